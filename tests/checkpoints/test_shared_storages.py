"""Tensors of a checkpoint of torch that share memory: it is stored once, and shared again."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

import ibp
from helpers import assert_same_bits
from ibp._cli.main import main
from ibp.checkpoints import _converting, _source
from ibp.checkpoints._inputs import open_source


def states():
    """By name: a checkpoint, and bytes of memory that its tensors take."""
    torch.manual_seed(0)
    big, pair = torch.randn(1000, 256).bfloat16(), torch.randn(64, 64, dtype=torch.complex64)
    size = big.nbytes
    return {
        "tied": ({"head": big, "embed": big}, size),
        "parts": ({"big": big, "low": big[:300], "T": big.T, "even": big[::2], "flat": big.view(-1)[7:5000]}, size),
        "overlapping": ({"low": big[:600], "high": big[400:]}, size),
        "interleaved": ({"re": pair.real, "im": pair.imag}, pair.nbytes),
        "expanded": ({"x": torch.randn(1, 4096).expand(50, 4096)}, 4 * 4096),
        "strided": ({"x": torch.arange(50000).as_strided((1000, 100), (7, 1))}, 8 * (999 * 7 + 100)),
        "odd names": ({"torch_storage.x": big, "x": big, "torch_storage.y": big[1:]}, size),
        "chunks": ({"chunks": list(torch.chunk(big, 3))}, size),
        "slices": ({"first": big[:9], "last": big[-9:]}, 2 * 9 * 512),
        "conj": ({"x": pair, "conj": pair.conj()}, 2 * pair.nbytes),
        "among values": ({"epoch": 3, "b": big, "a": big[1:], "empty": big[:0], "none": big[:0]}, size),
    }


def places(value):
    """Where the elements of a tensor lie in its storage."""
    return value.untyped_storage().data_ptr()


@pytest.mark.parametrize("shard_bytes", [None, 1])
@pytest.mark.parametrize("case", states())
def test_memory_is_stored_once_and_shared_again(case, shard_bytes, tmp_path):
    state, num_bytes = states()[case]
    torch.save(state, tmp_path / "plain.pt")
    coded, back = tmp_path / "coded.safetensors", tmp_path / "back.pt"
    report = ibp.checkpoints.compress(tmp_path / "plain.pt", coded, device="cpu", shard_bytes=shard_bytes)
    assert report.num_bytes == num_bytes == ibp.checkpoints.estimate(tmp_path / "plain.pt").num_bytes
    ibp.checkpoints.decompress(report.path, back)
    again = torch.load(back)
    assert list(again) == list(state)
    for key, value in state.items():
        pairs = zip(again[key], value) if isinstance(value, list) else [(again[key], value)]
        for got, wanted in pairs:
            if not isinstance(wanted, torch.Tensor):
                assert got == wanted
                continue
            assert_same_bits(got, wanted.resolve_conj())
    named = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel()}
    if case not in ("slices", "conj"):
        assert len({places(again[key]) for key in named}) == len({places(value) for value in named.values()})
    loaded = ibp.load(report.path, device="cpu")
    with ibp.open(report.path) as file, open_source(report.path) as source:
        file.verify(content=True)
        assert set(file) == set(loaded) == set(source.tensors) and not file.metadata.keys() - {"torch_structure"} - {
            "torch.epoch"
        }
        for key, value in named.items():
            for got in (loaded[key], file[key]):
                assert_same_bits(got if isinstance(got, torch.Tensor) else got.decompress(), value.resolve_conj())
            assert_same_bits(source.tensors[key].tensor(), value.resolve_conj())
            info = file.info(key)
            assert (info.dtype, info.shape) == (value.dtype, value.shape)
            file.verify([key], content=True)


def test_whole_views_share_a_table(tmp_path):
    big = torch.randn(1000, 256).bfloat16()
    torch.save({"head": big, "embed": big}, tmp_path / "plain.pt")
    ibp.checkpoints.compress(tmp_path / "plain.pt", tmp_path / "coded.safetensors", device="cpu")
    with ibp.open(tmp_path / "coded.safetensors") as file:
        assert file["head"] is file["embed"] and file.info("embed").stored_bytes == 0


def test_threads_decode_a_base_once(tmp_path, monkeypatch):
    """The base of a view that is not contiguous, of which several threads read ranges at the same time."""
    w, decoded, tensor = torch.randn(700, 300), [], _source.SourceTensor.tensor
    torch.save({"w": w, "turned": w.t()}, tmp_path / "x.pt")
    ibp.checkpoints.compress(tmp_path / "x.pt", tmp_path / "x.safetensors", device="cpu")
    monkeypatch.setattr(_source.SourceTensor, "tensor", lambda self: (decoded.append(self.name), tensor(self))[1])
    monkeypatch.setattr(_converting, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    ibp.checkpoints.decompress(tmp_path / "x.safetensors", tmp_path / "out.safetensors")
    assert decoded == ["w"]
    assert torch.equal(load_file(tmp_path / "out.safetensors")["turned"], w.t())


def test_views_go_to_other_formats_and_into_new_files(tmp_path):
    big = torch.randn(1000, 256)
    torch.save({"low": big[:600], "high": big[400:], "T": big.T}, tmp_path / "plain.pt")
    coded = tmp_path / "coded.safetensors"
    ibp.checkpoints.compress(tmp_path / "plain.pt", coded, device="cpu")
    ibp.checkpoints.decompress(coded, tmp_path / "back.safetensors")
    ibp.checkpoints.compress(coded, tmp_path / "again.safetensors", device="cpu")
    ibp.checkpoints.decompress(coded, tmp_path / "some.pt", include=["high"])
    for path in ("back.safetensors", "again.safetensors"):
        loaded = ibp.load(tmp_path / path, device="cpu")
        assert set(loaded) == {"low", "high", "T"}
        assert_same_bits(loaded["high"], big[400:])
    assert (tmp_path / "again.safetensors").stat().st_size < 1.01 * coded.stat().st_size
    assert list(torch.load(tmp_path / "some.pt")) == ["high"]
    assert_same_bits(torch.load(tmp_path / "some.pt")["high"], big[400:])


@pytest.mark.parametrize(
    "view",
    [
        "no JSON",
        "[" * 100_000,
        ["x", [10], [1], 0],
        [["base"], [10], [1], 0],
        ["base", [10], [1, 1], 0],
        ["base", [-1], [1], 0],
        ["base", [True], [1], 0],
        ["base", [1 << 70], [0], 0],
        ["base", 10, [1], 0],
        ["base", [10], [1]],
        ["base", [10], [1], 991],
        ["base", [10], [101], 100],
        ["base", [1 << 40], [0], 0],
        ["base", [1001], [1], 0],
    ],
)
def test_views_that_are_none_are_refused(view, tmp_path):
    text = view if isinstance(view, str) else json.dumps(view)
    ibp.save(tmp_path / "x.safetensors", {"base": torch.ones(1000)}, metadata={"ibp_view.v": text})
    with pytest.raises(ibp.FileFormatError), ibp.open(tmp_path / "x.safetensors") as file:
        file["v"]
    with pytest.raises(ibp.FileFormatError):
        open_source(tmp_path / "x.safetensors")
    ibp.save(tmp_path / "y.safetensors", {"v": torch.ones(9)}, metadata={"ibp_view.v": '["v", [9], [1], 0]'})
    with pytest.raises(ibp.FileFormatError, match="'v' is a tensor already"):
        ibp.load(tmp_path / "y.safetensors")


@pytest.mark.parametrize("shard_bytes", [None, 100])
def test_a_tensor_with_the_name_of_the_base_of_others(shard_bytes, tmp_path):
    """The base of "a" and "b", which no tensor covers, gets this name. Files of a set would each have one of them."""
    x = torch.arange(4000.0)
    torch.save({"a": x[:3000], "b": x[1000:], "torch_storage.a": torch.ones(5)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="there are two tensors 'torch_storage.a' in .*m.pt; wanted different names"):
        ibp.checkpoints.compress(tmp_path / "m.pt", tmp_path / "m.safetensors", device="cpu", shard_bytes=shard_bytes)
    assert os.listdir(tmp_path) == ["m.pt"]


def test_what_inspect_says_of_memory_that_no_tensor_covers(tmp_path, monkeypatch, capsys):
    """The size after is that of the file that `compress` would write."""
    monkeypatch.chdir(tmp_path)
    x = torch.arange(40000.0)
    torch.save({"a": x[:30000], "b": x[10000:]}, "m.pt")
    assert main(["inspect", "m.pt", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["files"]
    assert [tensor["name"] for tensor in said["tensors"]] == ["a", "b"]
    report = ibp.checkpoints.compress("m.pt", "m.safetensors", device="cpu")
    assert abs(said["stored_bytes"] / report.file_bytes - 1) < 0.01
