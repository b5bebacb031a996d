"""Whole checkpoints compressed and decompressed: formats, sets of files, interruptions, and what is refused."""

import json
import math
import os
import pathlib
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

import ibp
from helpers import bytes_of
from ibp._cli.report import inspect_path
from ibp._files import FileWriter
from ibp.checkpoints import _coding, _converting
from ibp.checkpoints._inputs import open_source, open_sources
from ibp.checkpoints._outputs import Journal
from ibp.checkpoints._source import source_of

safetensors = pytest.importorskip("safetensors.torch")
SLOW = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[2]


def weights(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def model():
    """Tensors of all sorts: of a kind, incompressible, small, empty, of other dtypes."""
    tensors = {f"layers.{number}.weight": weights(64, 256, seed=number) for number in range(3)}
    tensors["embedding"] = torch.randn(300, 33, generator=torch.Generator().manual_seed(7))
    tensors["noise"] = torch.randint(0, 256, (50, 200), dtype=torch.uint8)
    tensors["ids"], tensors["flags"] = torch.arange(3000), torch.arange(5000) % 97 == 0
    tensors["scalar"], tensors["empty"] = torch.tensor(3.5), torch.empty(0, 4, dtype=torch.float16)
    return tensors


def assert_same_tensors(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name


def read_back(path):
    with open_source(path) as source:
        return {name: tensor.tensor() for name, tensor in source.tensors.items()}, dict(source.metadata)


def compress(inputs, output, **options):
    return ibp.checkpoints.compress(inputs, output, device="cpu", jobs=2, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A safetensors file, and what it holds."""
    path, tensors = tmp_path_factory.mktemp("checkpoint") / "model.safetensors", model()
    safetensors.save_file(tensors, path, metadata={"format": "pt", "note": "ä"})
    return path, tensors


# ---- round trips ----


def test_a_checkpoint_becomes_a_file_of_tables_and_itself_again(checkpoint, tmp_path):
    path, tensors = checkpoint
    report = compress(path, tmp_path / "small.safetensors")
    assert report.path == str(tmp_path / "small.safetensors") and report.num_bytes == sum(
        tensor.nbytes for tensor in tensors.values()
    )
    assert report.file_bytes == os.path.getsize(report.path) and report.peak_bytes > 0
    schemes = {tensor.name: tensor.scheme for tensor in report.tensors}
    assert schemes["layers.0.weight"] == "planes" and schemes["noise"] is None and schemes["scalar"] is None
    file = ibp.open(report.path)
    assert file.metadata == {"format": "pt", "note": "ä"} and set(file) == set(tensors)
    file.verify(content=True)
    found = {name: file[name] for name in tensors}
    assert_same_tensors(
        {name: v if isinstance(v, torch.Tensor) else ibp.decompress(v, device="cpu") for name, v in found.items()},
        tensors,
    )
    assert file["layers.0.weight"].codebook == file["layers.2.weight"].codebook
    assert ibp.checkpoints.decompress(report.path, tmp_path / "back.safetensors") == [
        str(tmp_path / "back.safetensors")
    ]
    assert_same_tensors(safetensors.load_file(tmp_path / "back.safetensors"), tensors)
    assert read_back(tmp_path / "back.safetensors")[1] == {"format": "pt", "note": "ä"}


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_other_formats_round_trip(suffix, tmp_path):
    tensors = {name: tensor for name, tensor in model().items() if suffix == ".pt" or tensor.dtype != torch.bfloat16}
    path = tmp_path / f"in{suffix}"
    if suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        torch.save({**tensors, "epoch": 3, "rates": [0.5, 0.25]}, path)
    compress(path, tmp_path / "small.ibp")
    ibp.checkpoints.decompress(tmp_path / "small.ibp", tmp_path / f"out{suffix}")
    if suffix == ".npz":
        with np.load(tmp_path / "out.npz") as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays}
    else:
        found = torch.load(tmp_path / "out.pt", weights_only=True)
        assert (found.pop("epoch"), found.pop("rates")) == (3, [0.5, 0.25])
    assert_same_tensors(found, tensors)


def test_arrays_are_cut_into_items(tmp_path):
    array = (np.random.default_rng(0).standard_normal((500, 256)) * 0.1).astype(np.float32)
    np.save(tmp_path / "rows.npy", array)
    compress(tmp_path / "rows.npy", tmp_path / "rows.safetensors")
    table = ibp.open(tmp_path / "rows.safetensors")["rows"]
    assert table.row_bytes == 1024
    ids = torch.tensor([3, 499, 3])
    assert torch.equal(ibp.index_select(table, ids, device="cpu"), torch.from_numpy(array)[ids])
    ibp.checkpoints.decompress(tmp_path / "rows.safetensors", tmp_path / "back.npy")
    assert (tmp_path / "back.npy").read_bytes() == (tmp_path / "rows.npy").read_bytes()


@pytest.mark.parametrize("array", [
    np.arange(600, dtype=">i4").reshape(20, 30), np.asfortranarray(np.arange(5000.0).reshape(50, 100)),
    np.float64(2.5), np.zeros((0, 3), np.int16), np.arange(24, dtype=np.int8).reshape(2, 3, 4)[:, ::2],
], ids=["big-endian", "fortran", "scalar", "empty", "strided"])  # fmt: skip
@pytest.mark.parametrize("save", [np.savez_compressed, pytest.param(np.savez, marks=SLOW)])
def test_arrays_of_any_order_are_read(array, save, tmp_path):
    save(tmp_path / "a.npz", x=array)
    np.save(tmp_path / "b.npy", array)
    wanted = torch.from_numpy(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="))).reshape(
        np.shape(array)
    )
    for path, name in ((tmp_path / "a.npz", "x"), (tmp_path / "b.npy", "b")):
        with open_source(path) as source:
            tensor = source.tensors[name]
            assert torch.equal(tensor.tensor(), wanted) and tensor.dtype == wanted.dtype
            middle = tensor.num_bytes // 3
            whole = np.concatenate([tensor.read(0, middle), tensor.read(middle, tensor.num_bytes)])
            assert bytes(whole) == bytes(bytes_of(wanted).numpy()) and bytes(tensor.read(0, middle)) == bytes(
                whole[:middle]
            )


def test_tensors_of_torch_may_have_any_strides(tmp_path):
    tensors = {
        "t": weights(40, 60).t(),
        "slice": torch.arange(1000).view(10, 10, 10)[:, 2:7, ::3],
        "one": weights(9)[4],
    }
    tensors["expanded"] = torch.arange(5).expand(7, 5)
    torch.save({"a": {"b": tensors}, "list": [torch.ones(2), {"c": torch.zeros(3)}]}, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        assert set(source.tensors) == {f"a.b.{name}" for name in tensors} | {"list.0", "list.1.c"}
        for name, tensor in tensors.items():
            held = source.tensors[f"a.b.{name}"]
            assert torch.equal(held.tensor(), tensor)
            for start, end in ((0, 3), (1, held.num_bytes), (5, min(77, held.num_bytes))):
                if start < end <= held.num_bytes:
                    assert bytes(held.read(start, end)) == bytes(bytes_of(tensor.contiguous()).numpy()[start:end])


class Stage(_coding.CudaCoder):
    """The order in which blocks go through a GPU, without one: stand-ins note each step."""

    def __init__(self, readers):
        self._readers, self.done = readers, []
        self._up = self._coder = self._down = types.SimpleNamespace(
            synchronize=lambda: self.done.append("synchronized")
        )

    def note(self, what, block):
        self.done.append((what, block))
        return block

    def _begin(self, block, pool):
        return self.note("read", types.SimpleNamespace(number=block, read=pool.submit(int)))

    def _launch(self, passing):
        return self.note("coded", passing)

    def _fetch(self, passing):
        return self.note("fetched", passing)

    def _finish(self, passing):
        return self.note("finished", passing).number

    def count(self, what):
        return sum(done[0] == what for done in self.done)


def test_blocks_that_are_on_their_way_to_a_gpu():
    """In their order, and as many at once as there is to overlap; the next is begun when one is taken."""
    stage = Stage(readers=3)
    left = iter(range(20))
    taken = stage.coded(left)
    assert [next(taken), next(taken)] == [0, 1]
    assert [stage.count(what) for what in ("finished", "fetched", "coded", "read")] == [2, 3, 4, 6]
    assert [*taken] == [*range(2, 20)] and stage.done[-3:] == ["synchronized"] * 3
    assert [stage.count(what) for what in ("finished", "fetched", "coded", "read")] == [20] * 4
    assert [*Stage(readers=1).coded([7])] == [7] and [*Stage(readers=1).coded([])] == []


def test_a_gpu_codes_what_a_cpu_codes(cuda, tmp_path):
    """Blocks of several lengths, kept ones between coded ones, more of them than there are slots."""
    tensors = {**model(), "large": weights(9000, 4096, seed=5), "rest": weights(3, 333_333, seed=6)}
    tensors["sparse"] = torch.where(torch.rand(1000, 2048) < 0.05, torch.randn(1000, 2048), torch.zeros(()))
    tensors["padded"] = (torch.arange(1 << 20, dtype=torch.float32) % 777).bfloat16().float()
    tensors["masks"] = torch.randint(0, 2**20, (1 << 18,), dtype=torch.int32)
    safetensors.save_file(tensors, tmp_path / "m.safetensors")
    for options in ({}, {"scheme": "ibp"}, {"level": "fast"}, {"row_bytes": 1000, "shard_bytes": 1 << 20}):
        options["force"] = True
        report = ibp.checkpoints.compress(tmp_path / "m.safetensors", tmp_path / "near", device=cuda, **options)
        with ibp.open(report.path) as file:
            file.verify(content=True)
        assert_same_tensors(read_back(report.path)[0], tensors)
        alone = compress(tmp_path / "m.safetensors", tmp_path / "cpu", **options)
        assert abs(report.file_bytes - alone.file_bytes) < 0.01 * alone.file_bytes


# ---- sets of files, globs, URLs ----


def test_large_checkpoints_become_sets_of_files(checkpoint, tmp_path):
    path, tensors = checkpoint
    (tmp_path / "out").mkdir()
    report = compress(path, tmp_path / "out" / "m.safetensors", shard_bytes=50_000)
    assert len(report.files) > 2 and report.path.endswith("m.safetensors.index.json")
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*report.files, "m.safetensors.index.json"])
    assert_same_tensors(read_back(report.path)[0], tensors)
    assert_same_tensors(read_back(tmp_path / "out")[0], tensors)
    written = ibp.checkpoints.decompress(tmp_path / "out", tmp_path / "back.safetensors")
    assert len(written) == len(report.files) + 1
    assert_same_tensors(read_back(written[-1])[0], tensors)
    again = compress(written[-1], tmp_path / "again.safetensors", shard_bytes=None)
    assert len(again.files) == len(report.files), "files of a set stay files of their own"


@SLOW
def test_several_inputs_become_one_file(tmp_path):
    for number in range(3):
        np.save(tmp_path / f"part{number}.npy", np.arange(2000) + number)
    report = compress(tmp_path / "part*.npy", tmp_path / "all.safetensors")
    assert [tensor.name for tensor in report.tensors] == ["part0", "part1", "part2"]
    os.mkdir(tmp_path / "other")
    np.save(tmp_path / "other" / "part1.npy", np.zeros(3))
    with pytest.raises(ValueError, match="both have a tensor 'part1'"):
        compress([tmp_path / "part*.npy", tmp_path / "other"], tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


def test_urls_are_read_and_written(checkpoint, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    path, tensors = checkpoint
    memory = fsspec.filesystem("memory")
    memory.put_file(str(path), "/in/model.safetensors")
    report = compress("memory://in/*.safetensors", "memory://out/m.safetensors", shard_bytes=100_000)
    assert report.path == "memory://out/m.safetensors.index.json" and memory.exists("/out/m.safetensors.index.json")
    memory.makedirs("/back", exist_ok=True)
    names = ibp.checkpoints.decompress("memory://out", "memory://back/b.safetensors")
    assert names[-1] == "memory://back/b.safetensors.index.json"
    assert_same_tensors(read_back("memory://back")[0], tensors)
    compress(f"file://{path}", f"file://{tmp_path}/local.safetensors")
    assert_same_tensors(read_back(tmp_path / "local.safetensors")[0], tensors)
    memory.rm("/", recursive=True)


# ---- which tensors are coded, and how ----


def test_patterns_say_what_is_coded(checkpoint, tmp_path):
    path, tensors = checkpoint
    report = compress(path, tmp_path / "a", include=["layers.*"], exclude=["*.1.*"], metadata={"by": "me"})
    coded = {tensor.name for tensor in report.tensors if tensor.scheme}
    assert coded == {"layers.0.weight", "layers.2.weight"}
    assert ibp.open(tmp_path / "a").metadata["by"] == "me"
    report = compress(path, tmp_path / "b", scheme="raw")
    assert not any(tensor.scheme for tensor in report.tensors)


@SLOW
def test_a_tensor_unlike_its_kind_has_a_codebook_of_its_own(tmp_path):
    tensors = {f"layers.{number}.w": weights(64, 512, seed=number) for number in range(4)}
    tensors["layers.9.w"] = tensors["layers.0.w"] * 2.0**30
    safetensors.save_file(tensors, tmp_path / "m.safetensors")
    compress(tmp_path / "m.safetensors", tmp_path / "s.safetensors")
    file = ibp.open(tmp_path / "s.safetensors")
    assert file["layers.9.w"].codebook != file["layers.0.w"].codebook == file["layers.3.w"].codebook
    assert_same_tensors(read_back(tmp_path / "s.safetensors")[0], tensors)


@SLOW
def test_rows_that_lack_what_the_sample_has_in_common_are_coded_too(tmp_path):
    x = (torch.arange(1 << 18, dtype=torch.float32) % 1000).bfloat16().float()  # invariant low bits
    x[: 1 << 15] += 1e-3
    safetensors.save_file({"x": x}, tmp_path / "m.safetensors")
    report = compress(tmp_path / "m.safetensors", tmp_path / "s.safetensors")
    assert report.tensors[0].savings > 0.3
    assert_same_tensors(read_back(tmp_path / "s.safetensors")[0], {"x": x})


@SLOW
@pytest.mark.parametrize("options", [{"scheme": "ibp"}, {"level": "fast"}, {"scheme": "planes", "clusters": 2},
                                     {"row_bytes": 1000}], ids=str)  # fmt: skip
def test_options_of_compress_are_taken(options, checkpoint, tmp_path):
    path, tensors = checkpoint
    report = compress(path, tmp_path / "s", **options)
    assert any(tensor.scheme == options.get("scheme", "planes") for tensor in report.tensors)
    assert_same_tensors(read_back(tmp_path / "s")[0], tensors)


def test_estimates_are_near_what_compress_does(checkpoint, tmp_path):
    path, tensors = checkpoint
    estimate, report = ibp.checkpoints.estimate(path), compress(path, tmp_path / "s")
    assert [tensor.name for tensor in estimate.tensors] == [tensor.name for tensor in report.tensors]
    stored = {tensor.name: tensor.stored_bytes for tensor in report.tensors}
    for tensor in estimate.tensors:
        if tensor.num_bytes > 30_000:
            assert abs(tensor.stored_bytes - stored[tensor.name]) < 0.03 * tensor.num_bytes, tensor.name
    assert json.loads(json.dumps(estimate.as_dict()))["num_bytes"] == report.num_bytes
    assert json.loads(json.dumps(report.as_dict()))["files"] == list(report.files)
    assert "compressed" in repr(report) and "saved" in repr(estimate)


def tables_of_items(path, *entries, shape=(4,), others=()):
    """A file whose tables hold items of the tensor w, as its metadata says: (first, last, items) each."""
    tensors = {f"w.rows-{first}": torch.full((last - first, *shape), float(first)) for first, last, _ in entries}
    texts = {f"ibp_rows.w.rows-{first}": f"first={first} last={last} items={items}" for first, last, items in entries}
    ibp.save(path, {**tensors, **dict(others)}, metadata={**texts, "by": "a test"})
    return path


def test_tables_of_items_are_one_tensor(tmp_path):
    path = tables_of_items(tmp_path / "m.safetensors", (0, 2, 5), (2, 5, 5), others={"b": torch.ones(3)}.items())
    with open_source(path) as source:
        assert source.metadata == {"by": "a test"} and set(source.tensors) == {"w", "b"}
        wanted = torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0])[:, None].expand(5, 4)
        assert torch.equal(source.tensors["w"].tensor(), wanted)
        assert source.tensors["w"].read(12, 40).tolist() == bytes_of(wanted.contiguous())[12:40].tolist()


@pytest.mark.parametrize(
    "entries, others",
    [
        ([(0, 2, 5)], {}),  # the last ones lack
        ([(2, 5, 5)], {}),  # the first ones
        ([(0, 2, 5), (3, 5, 5)], {}),
        ([(0, 3, 5), (2, 5, 5)], {}),
        ([(0, 2, 5), (2, 5, 5)], {"w": torch.ones(5, 4)}),  # there is another tensor of its name
        ([(0, 2, 5), (2, 5, 5)], {"w.rows-2": torch.ones(2, 4)}),  # fewer items than the metadata says
        ([(0, 2, 5), (2, 5, 5)], {"w.rows-2": torch.ones(3, 5)}),  # of another shape
        ([(0, 2, 5), (2, 5, 5)], {"w.rows-2": torch.ones(3, 4, dtype=torch.float64)}),
        ([(0, 2, 5), (2, 5, 5)], {"w.rows-2": torch.tensor(3.0)}),
    ],
    ids=["end", "start", "gap", "overlap", "name", "items", "shape", "dtype", "scalar"],
)
def test_tables_that_are_not_of_all_items(tmp_path, entries, others):
    path = tables_of_items(tmp_path / "m.safetensors", *entries, others=others.items())
    with pytest.raises(ibp.FileFormatError, match="are not those of all its items"):
        open_source(path)


def test_items_that_no_metadata_says(tmp_path):
    ibp.save(tmp_path / "m.safetensors", {"w.rows-0": torch.ones(2, 4)}, metadata={"ibp_rows.w.rows-0": "first=0"})
    with pytest.raises(ibp.FileFormatError, match="wanted first, last and items"):
        open_source(tmp_path / "m.safetensors")


def test_the_memory_of_a_process_is_its_own():
    before = _converting.own_memory()
    if not before:
        pytest.skip("the system does not say how much memory a process has")
    held = bytearray(b"x") * (128 << 20)
    assert _converting.own_memory() > before + (100 << 20)
    del held


def test_the_peak_of_memory_is_looked_for_as_data_passes(tmp_path, monkeypatch):
    """At the beginning, and whenever two of these blocks have passed."""
    torch.save({f"x{number}": torch.zeros(1000) for number in range(7)}, tmp_path / "x.pt")
    looks = [3000, 1000, 5000, 4000]
    left = iter(looks)
    monkeypatch.setattr(_converting, "own_memory", lambda: next(left))
    monkeypatch.setattr(_converting, "_BETWEEN_BYTES", 8000)
    report = ibp.checkpoints.compress(tmp_path / "x.pt", tmp_path / "x.ibp", device="cpu")
    assert report.peak_bytes == max(looks) and list(left) == []


MOST_APART = 0.001  # of an estimate and a report, of a checkpoint whose tensors are looked at whole


@pytest.mark.parametrize("options", [{}, {"include": ["layers.*"]}, {"exclude": ["*.1.*"], "level": "fast"}], ids=str)
@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_saved_means_the_same_everywhere(kind, options, checkpoint, tmp_path):
    """In an estimate, in a report, and by inspect of the file before and after."""
    path, tensors = checkpoint
    if kind == "npz":
        path = ROOT / "data" / "ncf_mlp.npz"
        options = {key: value for key, value in options.items() if key != "include"}
    report = compress(path, tmp_path / "s", **options)
    assert report.savings == 1 - os.path.getsize(tmp_path / "s") / report.num_bytes > 0.05
    assert inspect_path(tmp_path / "s").savings == report.savings
    assert abs(ibp.checkpoints.estimate(path, **options).savings - report.savings) < MOST_APART
    if not options:
        assert abs(inspect_path(path).savings - report.savings) < MOST_APART
    name = report.tensors[0].name
    some = inspect_path(tmp_path / "s", wanted=lambda one: one == name)
    assert some.stored_bytes == some.tensors[0].stored_bytes and some.savings == some.tensors[0].savings


def test_sets_are_estimated_as_sets(tmp_path):
    safetensors.save_file(model(), tmp_path / "m.safetensors")
    report = compress(tmp_path / "m.safetensors", tmp_path / "s", shard_bytes=50_000)
    plain = ibp.checkpoints.decompress(report.path, tmp_path / "plain.safetensors")
    estimate, again = ibp.checkpoints.estimate(plain[-1]), compress(plain[-1], tmp_path / "again")
    assert len(again.files) == len(report.files) > 2 and inspect_path(again.path).savings == again.savings
    assert abs(estimate.savings - again.savings) < MOST_APART


@pytest.mark.parametrize("as_module", [True, False])
def test_models_are_estimated_as_their_checkpoints(as_module, tmp_path):
    """A tied head counts once, and any strides will do."""
    model = torch.nn.Sequential(torch.nn.Embedding(500, 128), torch.nn.Linear(128, 500, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    model.register_buffer("across", torch.randn(64, 200).t())
    safetensors.save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "1.weight"},
        tmp_path / "m.safetensors",
    )
    found = ibp.checkpoints.estimate(model if as_module else model.state_dict(), exclude=["across", "1.*"])
    wanted = ibp.checkpoints.estimate(tmp_path / "m.safetensors", exclude=["across"])
    assert {tensor.name for tensor in found.tensors} == {"0.weight", "across"}
    assert sorted(found.as_dict()["tensors"], key=str) == sorted(wanted.as_dict()["tensors"], key=str)
    assert found.savings == wanted.savings > 0.2
    with pytest.raises(TypeError, match="on meta; wanted a dense tensor"):
        ibp.checkpoints.estimate(torch.nn.Linear(100, 100, device="meta"))
    with pytest.raises(TypeError, match="the name 3 is of type int; wanted text"):
        ibp.checkpoints.estimate({3: torch.ones(5000)})


def test_a_model_that_is_estimated_is_not_copied():
    """Tensors with strides of any kind are read where they are."""
    x = torch.randn(64, 200)
    with source_of({"whole": x, "across": x.t(), "steps": x[::2, ::3]}) as source:
        x.zero_()
        assert not any(tensor.tensor().any() for tensor in source.tensors.values())


# ---- interruptions ----


def test_finished_files_are_kept_when_a_call_is_made_again(checkpoint, tmp_path, monkeypatch):
    path, tensors = checkpoint
    target = tmp_path / "m.safetensors"
    written, write = [], _converting.write_file

    def interrupted(to, shard, *arguments, **options):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.path)
        return write(to, shard, *arguments, **options)

    monkeypatch.setattr(_converting, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(path, target, shard_bytes=50_000)
    assert os.listdir(tmp_path) == [".m.safetensors.ibp-work"]
    monkeypatch.setattr(_converting, "write_file", write)
    assert compress(path, tmp_path / "n.safetensors", shard_bytes=50_000).kept_files == 0
    report = compress(path, target, shard_bytes=50_000)
    assert report.kept_files == 2 and not (tmp_path / ".m.safetensors.ibp-work").exists()
    assert_same_tensors(read_back(report.path)[0], tensors)


@pytest.mark.parametrize("change", ["damage", *(pytest.param(x, marks=SLOW) for x in ("options", "input", "restart"))])
def test_files_of_another_call_are_not_kept(change, checkpoint, tmp_path, monkeypatch):
    path, tensors = checkpoint
    copied, target = tmp_path / "in.safetensors", tmp_path / "m.safetensors"
    copied.write_bytes(path.read_bytes())
    publish = Journal.publish
    monkeypatch.setattr(Journal, "publish", lambda *_: (_ for _ in ()).throw(OSError("interrupted")))
    with pytest.raises(OSError, match="interrupted"):
        compress(copied, target, shard_bytes=50_000)
    monkeypatch.setattr(Journal, "publish", publish)
    options = {}
    if change == "input":
        os.utime(copied, (1, 1))
    elif change == "damage":
        first = next(pathlib.Path(tmp_path / ".m.safetensors.ibp-work").glob("*.safetensors"))
        os.truncate(first, 1000)
    else:
        options = {"options": {"level": "fast"}, "restart": {"restart": False}}[change]
    report = compress(copied, target, shard_bytes=50_000, **options)
    assert report.kept_files == (len(report.files) - 1 if change == "damage" else 0)
    assert_same_tensors(read_back(report.path)[0], tensors)


def test_a_failure_leaves_what_was_there(checkpoint, tmp_path, monkeypatch):
    path, _ = checkpoint
    (tmp_path / "old.safetensors").write_bytes(b"old")
    monkeypatch.setattr(FileWriter, "table", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    for target, options in (("old.safetensors", {"force": True}), ("new.safetensors", {"shard_bytes": 50_000})):
        with pytest.raises(OSError, match="full"):
            compress(path, tmp_path / target, **options)
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        ibp.checkpoints.decompress(path, tmp_path / "old.safetensors", force=True)
    assert os.listdir(tmp_path) == ["old.safetensors"] and (tmp_path / "old.safetensors").read_bytes() == b"old"


KILLED = """
import os, random, signal, sys, time
import torch
import ibp
from ibp.checkpoints._inputs import open_source

torch.set_num_threads(1)  # whose others a fork would lack
source, directory = sys.argv[1:]
index = directory + "/m.safetensors.index.json"


def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
    return child


def compress():
    options = {"shard_bytes": 100_000, "device": "cpu", "jobs": 2, "force": True}
    ibp.checkpoints.compress(source, directory + "/m.safetensors", **options)


def compare():
    with open_source(source) as wanted, open_source(index) as found:
        assert set(wanted.tensors) == set(found.tensors)
        for name, tensor in wanted.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert bytes(found.tensors[name].read(0, tensor.num_bytes)) == bytes(tensor.read(0, tensor.num_bytes)), name


random.seed(1)
started = time.perf_counter()
assert os.waitpid(forked(compress), 0)[1] == 0
whole = time.perf_counter() - started
for _ in range(8):
    for name in os.listdir(directory):
        if random.random() < 0.3 and not name.startswith("."):
            os.unlink(os.path.join(directory, name))
    child = forked(compress)
    time.sleep(random.uniform(0, whole))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    finished = [name for name in os.listdir(directory) if name.endswith(".safetensors")]
    for name in finished:  # whole files only
        with ibp.open(os.path.join(directory, name)) as file:
            file.verify()
assert os.waitpid(forked(compress), 0)[1] == 0
assert os.waitpid(forked(compare), 0)[1] == 0
print(sorted(os.listdir(directory)))
"""


@SLOW
def test_a_call_that_is_killed_can_be_made_again(checkpoint, tmp_path):
    """At random points, over sets of files of which some are missing."""
    path, _ = checkpoint
    command = [sys.executable, "-c", KILLED, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ".ibp-work" not in done.stdout


# ---- what is refused ----


def test_bad_arguments_are_refused(checkpoint, tmp_path):
    path, _ = checkpoint
    for error, match, options in (
        (ValueError, "scheme is 'zip'", {"scheme": "zip"}),
        (ValueError, "shard_bytes is 0", {"shard_bytes": 0}),
        (ValueError, "row_bytes is 65537", {"row_bytes": 65537}),
        (ValueError, "none that begins with 'ibp.'", {"metadata": {"ibp.x": ""}}),
        (TypeError, "jobs is 1.5", {"jobs": 1.5}),
    ):
        with pytest.raises(error, match=match):
            ibp.checkpoints.compress(path, tmp_path / "x", **options)
    with pytest.raises(ValueError, match="row_bytes is 0"):
        ibp.checkpoints.estimate(path, row_bytes=0)
    with pytest.raises(ValueError, match="level"):
        ibp.checkpoints.estimate(path, level="none")
    for match, inputs in (("no such file", tmp_path / "absent"), ("no input", []),
                          ("no file matches", tmp_path / "*.x"), ("no file of tensors", tmp_path)):  # fmt: skip
        with pytest.raises(FileNotFoundError, match=match):
            compress(inputs, tmp_path / "x")
    for wrong in (b"x", 5, [path, 5]):
        with pytest.raises(TypeError):
            compress(wrong, tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="memory://none.npy: there is no such file"):
        compress("memory://none.npy", tmp_path / "x")
    np.save(tmp_path / "wide.npy", np.zeros((100, 100), np.complex128))
    for work in (compress, ibp.checkpoints.decompress):
        with pytest.raises(ValueError, match="'wide' has torch.complex128, which safetensors lacks"):
            work(tmp_path / "wide.npy", tmp_path / "x.safetensors")
    (tmp_path / "wide.npy").unlink()
    with pytest.raises(ValueError, match="format is 'zip'"):
        ibp.checkpoints.decompress(path, tmp_path / "x", format="zip")
    with pytest.raises(ValueError, match="wanted a name with .npz"):
        ibp.checkpoints.decompress(path, tmp_path / "x.npy")
    with pytest.raises(ValueError, match="bfloat16, which numpy lacks"):
        ibp.checkpoints.decompress(path, tmp_path / "x.npz")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("shard_bytes", [None, 1])
def test_names_that_a_file_cannot_have(tmp_path, shard_bytes):
    """Nothing is written, neither to a file nor to a set. The names of tensors that cannot become tables are free."""
    path, x, small = tmp_path / "in.npz", np.zeros((100, 100), np.float32), np.ones(3)
    for tensors, message in (
        ({"a": x, "a:overflow": small}, "a part of the table 'a' and another tensor both have the name 'a:overflow'"),
        ({"a:overflow": x, "a": x}, "a part of the table 'a' and another tensor both have the name 'a:overflow'"),
        ({"a": x, "ibp.x": small}, "'ibp.x' is reserved; wanted one that does not begin with 'ibp.'"),
    ):
        np.savez(path, **tensors)
        with pytest.raises(ValueError, match=message):
            compress(path, tmp_path / "out.safetensors", shard_bytes=shard_bytes)
        assert os.listdir(tmp_path) == ["in.npz"]
    np.savez(path, **{"a": small, "a:overflow": x})
    report = compress(path, tmp_path / "out.safetensors", shard_bytes=shard_bytes)
    assert {tensor.name: tensor.scheme for tensor in report.tensors} == {"a": None, "a:overflow": "planes"}
    assert ibp.load(report.path, memory="host").keys() == {"a", "a:overflow"}


def test_damaged_inputs_are_refused(tmp_path):
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object))
    np.save(tmp_path / "good.npy", np.arange(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "good.npy").read_bytes()[:-1])
    (tmp_path / "head.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff{")
    (tmp_path / "zip.npz").write_bytes(b"PK\3\4 nothing")
    np.savez(tmp_path / "text.npz", x=np.array(["text"]))
    torch.save({"f": torch.nn.Linear(1, 1)}, tmp_path / "module.pt")
    torch.save({"d": torch.device("cpu")}, tmp_path / "value.pt")
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    (tmp_path / "torn.pt").write_bytes(b"PK\3\4torn")
    (tmp_path / "cut.pt").write_bytes(b"\x80\x02")
    (tmp_path / "no.pt").write_bytes(b"\x80\x02not")
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}')
    for name in ("o.npy", "cut.npy", "head.npy", "zip.npz", "text.npz", "module.pt", "value.pt", "sparse.pt",
                 "torn.pt", "cut.pt", "no.pt", "junk.safetensors", "x.safetensors.index.json"):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            open_source(tmp_path / name)
        assert isinstance(caught.value, (ibp.checkpoints.SourceFormatError, ibp.FileFormatError)), name
        said = str(caught.value)
        assert "\n" not in said and str(tmp_path / name) in said and not said.endswith(": "), name


@pytest.mark.parametrize("descr", ["('<f4', (3,))", "[('a', '<f4', (3,))]", "[('a', '<f4')]"])
def test_arrays_whose_elements_are_no_numbers_are_refused(tmp_path, descr):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (4,)}}\n".encode()
    array = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + np.arange(12.0, dtype="<f4").tobytes()
    if descr.startswith("["):  # numpy maps the other as an array of one dimension more
        (tmp_path / "x.npy").write_bytes(array)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / f"{method}.npz", "w", method) as archive:
            archive.writestr("x.npy", array)
    for file in tmp_path.iterdir():
        with pytest.raises(ibp.checkpoints.SourceFormatError, match="which torch does not have"):
            open_source(file)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_damage_of_inputs_raises_errors_of_other_kinds(tmp_path):
    """Of bytes that are wrong, zipfile, zlib, numpy and torch raise errors of many kinds."""
    path, x, rng = tmp_path / "x", np.arange(300, dtype=np.float32), np.random.default_rng(0)
    np.savez_compressed(tmp_path / "good.npz", a=x, b=np.zeros((3, 4), order="F"), c=x.astype(">f4"))
    np.save(tmp_path / "good.npy", np.asfortranarray(np.ones((3, 4), ">f4")))
    tensors = {"a": torch.ones(5), "n": [torch.zeros(3)]}
    torch.save(tensors, tmp_path / "good.pt", _use_new_zipfile_serialization=False)
    for suffix in (".npz", ".npy", ".pt"):
        good, damaged = (tmp_path / f"good{suffix}").read_bytes(), path.with_suffix(suffix)
        refused = 0
        for _ in range(60):
            data = np.frombuffer(good, np.uint8).copy()
            data[rng.integers(0, len(data), 2)] = rng.integers(0, 256, 2)
            damaged.write_bytes(data)
            try:
                with open_source(damaged) as source:
                    for tensor in source.tensors.values():
                        tensor.read(0, min(tensor.num_bytes, 1 << 20))
            except ibp.checkpoints.SourceFormatError:
                refused += 1
        assert refused > 5, suffix


def test_names_that_files_of_safetensors_cannot_have_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", __metadata__=np.arange(3))
    with pytest.raises(ValueError, match="'__metadata__'"):
        ibp.checkpoints.decompress(tmp_path / "x.npz", tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["x.npz"]


def test_sources_say_what_they_are(checkpoint):
    path, tensors = checkpoint
    with open_sources([path]) as source:
        assert source.format == "safetensors" and source.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert "tensors" in repr(source) and "torch.bfloat16" in repr(source.tensors["layers.0.weight"])
        data = source.tensors["ids"].read(8, 24)
        assert not data.flags.writeable and data.view(np.int64).tolist() == [1, 2]


# ---- memory ----

LIMITED = """
import resource, sys, threading
import ibp
from ibp.checkpoints._converting import own_memory
before = own_memory()
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
limits = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (used + (128 << 20), limits[1]))
report = ibp.checkpoints.compress(sys.argv[1], sys.argv[2], device="cpu", jobs=2)
resource.setrlimit(resource.RLIMIT_DATA, limits)  # which counts a table's map, whose pages stay the file's
done, seen = threading.Event(), [own_memory()]
watch = threading.Thread(target=lambda: [seen.append(own_memory()) for _ in iter(lambda: done.wait(0.01), True)])
watch.start()
ibp.checkpoints.decompress(sys.argv[2], sys.argv[3])
done.set(), watch.join()
print(report.peak_bytes - before, max(seen) - before, report.savings)
"""


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path):
    """One tensor of 160 MiB, in a process that may take 128."""
    block = weights(1 << 20)
    header = json.dumps({"x": {"dtype": "BF16", "shape": [80, 1 << 20], "data_offsets": [0, 160 << 20]}}).encode()
    paths = [tmp_path / name for name in ("in.safetensors", "small.ibp", "out.safetensors")]
    with open(paths[0], "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(80):
            file.write(bytes_of(block).numpy())
    command = [sys.executable, "-c", LIMITED, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    peak, back, savings = map(float, done.stdout.split())
    assert peak < 80 << 20 and back < 100 << 20 and savings > 0.3
    whole = [np.memmap(path, np.uint8, "r")[-(160 << 20) :] for path in (paths[0], paths[2])]
    assert np.array_equal(*whole)


KINDS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F7_OF_LATER": 7}


@pytest.mark.parametrize("shape", [(64, 128), (8, 2, 512), (8192,), (0, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_safetensors_that_torch_lacks_stay_as_they_are(kind, shape, tmp_path):
    size = math.prod(shape) * KINDS[kind] // 8
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    entries = {"a": {"dtype": kind, "shape": list(shape), "data_offsets": [0, size]}}
    entries["w"] = {"dtype": "F32", "shape": [64, 128], "data_offsets": [size, size + 4 * 64 * 128]}
    header = json.dumps({**entries, "__metadata__": {"format": "pt"}}).encode()
    plain = tmp_path / "plain.safetensors"
    weights = np.arange(64 * 128, dtype="<f4").tobytes()
    plain.write_bytes(len(header).to_bytes(8, "little") + header + data + weights)
    coded, back = tmp_path / "coded.safetensors", tmp_path / "back.safetensors"
    report = compress(plain, coded)
    assert [tensor.scheme for tensor in report.tensors] == [None, "planes"]  # the bytes are noise
    ibp.checkpoints.decompress(coded, back)
    text = back.read_bytes()
    end = 8 + int.from_bytes(text[:8], "little")
    assert json.loads(text[8:end]) == json.loads(header) and text[end:] == data + weights
    for path in (plain, coded):
        loaded, info = ibp.load(path, device="cpu")["a"], ibp.open(path).info("a")
        assert loaded.dtype == info.dtype and loaded.shape == info.shape and loaded.shape[:-1] == shape[:-1]
        assert loaded.view(torch.uint8).numpy().tobytes() == data
        assert ibp.open(path)["a"].shape == loaded.shape
    if kind == "F4" and size:
        ibp.save(tmp_path / "saved.safetensors", ibp.load(plain, device="cpu"))
        text = (tmp_path / "saved.safetensors").read_bytes()
        found = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])["a"]
        assert (found["dtype"], found["shape"]) == ("F4", list(shape))
