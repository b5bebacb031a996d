"""ibp.checkpoints.open, CheckpointWriter and is_coded: what loaders of frameworks read and write files with."""

import os
import threading

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.checkpoints import CheckpointWriter, coded_name, is_coded

PLAIN = {"layer.weight": torch.randn(1000, 256).bfloat16(), "bias": torch.randn(5), "scalar": torch.tensor(2)}
SHAPES = {name: tensor.shape for name, tensor in PLAIN.items()}


def values():
    return [(name, ibp.compress(tensor) if tensor.dim() == 2 else tensor) for name, tensor in PLAIN.items()]


@pytest.mark.parametrize("together", [False, True])
def test_what_is_written_is_read(tmp_path, together):
    path = tmp_path / "made.ibp.safetensors"
    with CheckpointWriter(path, SHAPES, metadata={"step": "3"}) as writer:
        sizes = (
            writer.write_all(values()) if together else {name: writer.write(name, value) for name, value in values()}
        )
        assert not path.exists()
    assert list(sizes) == list(PLAIN) and 0 < sizes["layer.weight"] < PLAIN["layer.weight"].nbytes
    file = ibp.open(path, memory="host")
    assert file.metadata == {"step": "3"} and file.tables == ("layer.weight",)
    with ibp.checkpoints.open(path) as source:
        assert source.format == "ibp" and source.metadata == {"step": "3"}
        for name, tensor in PLAIN.items():
            found = source.tensors[name]
            assert (found.shape, found.dtype, found.table is not None) == (
                tensor.shape,
                tensor.dtype,
                tensor.dim() == 2,
            )
            assert_same_bits(found.tensor(), tensor)
            assert_same_bits(file.get_tensor(name), tensor)


def test_the_calling_thread_makes_what_another_one_writes(tmp_path, monkeypatch):
    makers, writers, write = set(), set(), CheckpointWriter.write

    def watched(self, name, value):
        writers.add(threading.get_ident())
        return write(self, name, value)

    def made():
        for pair in values():
            makers.add(threading.get_ident())
            yield pair

    monkeypatch.setattr(CheckpointWriter, "write", watched)
    with CheckpointWriter(tmp_path / "x.safetensors", SHAPES) as writer:
        writer.write_all(made())
    assert makers == {threading.get_ident()} and len(writers) == 1 and writers.isdisjoint(makers)


def test_an_error_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "x.safetensors"
    ibp.save(path, {"old": torch.ones(3)})
    with pytest.raises(KeyError, match="no more"):
        with CheckpointWriter(path, SHAPES) as writer:
            writer.write(*values()[0])
            raise KeyError("no more")

    def failing():
        yield values()[0]
        raise KeyError("none")

    with pytest.raises(KeyError, match="none"):
        with CheckpointWriter(path, SHAPES) as writer:
            writer.write_all(failing())
    assert list(ibp.open(path)) == ["old"] and os.listdir(tmp_path) == ["x.safetensors"]


def test_a_file_that_is_not_open(tmp_path):
    writer = CheckpointWriter(tmp_path / "x.safetensors", {"a": [3]})
    with pytest.raises(ValueError, match="the file is not open; wanted `with ibp.checkpoints.CheckpointWriter"):
        writer.write("a", torch.ones(3))
    with writer:
        writer.write("a", torch.ones(3))
        writer.close()
        writer.close()
    assert list(ibp.open(tmp_path / "x.safetensors")) == ["a"]
    with pytest.raises(ValueError, match="the file is not open"):
        writer.write("b", torch.ones(3))


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="which readers of .npz files refuse"):
        CheckpointWriter(tmp_path / "x.npz", {})
    with pytest.raises(ValueError, match="wanted none that begins with 'ibp.'"):
        CheckpointWriter(tmp_path / "x.safetensors", {}, metadata={"ibp.a": ""})
    with pytest.raises(OSError, match="there is no such directory"):
        CheckpointWriter(tmp_path / "none" / "x.safetensors", {}).__enter__()
    with CheckpointWriter(tmp_path / "x.safetensors", {"a": [3]}) as writer:
        writer.write("a", torch.ones(3))
        with pytest.raises(ValueError, match="there are two tensors 'a' in a file"):
            writer.write("a", torch.ones(3))


def test_the_header_has_room_for_many_dimensions(tmp_path):
    tensors = {f"{'name' * 50}{number}": torch.ones([1] * 60) for number in range(30)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    with CheckpointWriter(tmp_path / "x.safetensors", shapes) as writer:
        writer.write_all(tensors.items())
    assert ibp.open(tmp_path / "x.safetensors").keys() == tensors.keys()


def test_what_a_file_takes():
    x, takes = torch.ones(3), CheckpointWriter.takes
    assert takes("a.b-c", x) and takes("a", torch.nn.Parameter(x)) and takes("a", torch.tensor(1))
    for name in ("a:slots", "a[0]", "ibp.a", "__metadata__", "a\nb"):
        assert not takes(name, x)
    of_subclass, of_dtype = x.as_subclass(type("Of", (torch.Tensor,), {})), torch.ones(3, dtype=torch.complex32)
    assert not any(takes("a", other) for other in (x.to_sparse(), x.to("meta"), of_subclass, of_dtype))


def test_files_of_ibp(tmp_path):
    plain, coded, cut = (tmp_path / f"{name}.safetensors" for name in ("plain", "coded", "cut"))
    ibp.save(coded, {"a": ibp.compress(torch.ones(100, 100))})
    ibp.checkpoints.decompress(coded, plain)
    cut.write_bytes(coded.read_bytes()[:20])
    (tmp_path / "empty.safetensors").touch()
    assert is_coded(coded) and is_coded(os.fspath(coded))
    for other in (plain, cut, tmp_path / "empty.safetensors", tmp_path / "there is none.bin"):
        assert not is_coded(other)
    (tmp_path / "long.safetensors").write_bytes(b"\xff" * 100)
    assert not is_coded(tmp_path / "long.safetensors")
    with pytest.raises(FileNotFoundError):
        is_coded(tmp_path / "there is none.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(OSError, match="is a pipe; wanted a regular file"):
        is_coded(tmp_path / "pipe.safetensors")


def test_coded_names():
    assert coded_name("model.safetensors") == coded_name("model.ibp.safetensors") == "model.ibp.safetensors"
    assert coded_name("optimizer.pt") == "optimizer.pt.ibp.safetensors"
