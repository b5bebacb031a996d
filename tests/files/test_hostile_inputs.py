"""Small files that ask for very much time or memory: each is refused at once."""

import os
import zipfile

import numpy as np
import pytest
import torch

import ibp
from ibp._cli.main import main
from ibp.checkpoints._inputs import open_source
from kinds_of_paths import soon


def doubled(value, times, pair):
    for _ in range(times):
        value = pair(value)
    return value


def listed(x):
    return [x, x]


def holding_itself():
    x = [1]
    x.append(x)
    return x


SHARED = {
    "texts": lambda: doubled(["lol"], 60, listed),
    "tensors": lambda: doubled(torch.zeros(2), 60, listed),
    "dicts": lambda: doubled({}, 60, lambda x: {"a": x, "b": x}),
    "tuples": lambda: doubled((), 60, lambda x: (x, x)),
    "long texts": lambda: ["x" * 10_000] * 10_000,
    "itself": holding_itself,
    "depth": lambda: doubled([], 200, lambda x: [x]),
}


@pytest.mark.parametrize("kind", SHARED)
def test_values_that_are_shared_by_very_many(kind, tmp_path):
    torch.save({"w": torch.zeros(64), "meta": SHARED[kind]()}, tmp_path / "x.pt")
    assert os.path.getsize(tmp_path / "x.pt") < 100_000
    with (
        soon(),
        pytest.raises(
            ibp.checkpoints.SourceFormatError, match=r"x\.pt: (names, and values|lists and dicts are nested)"
        ),
    ):
        open_source(tmp_path / "x.pt")


@pytest.mark.parametrize("tensors", [
    {"w": torch.zeros(1).expand(2**20, 2**20, 2**10)},
    {f"w{n}": torch.zeros(1).expand(2**20) for n in range(9)},
], ids=["one", "several"])  # fmt: skip
def test_tensors_that_are_larger_than_what_is_stored(tensors, tmp_path, capsys):
    torch.save(tensors, tmp_path / "x.pt")
    path, out = str(tmp_path / "x.pt"), str(tmp_path / "out")
    for command in (["estimate", path], ["compress", path, "-o", out], ["inspect", path], ["verify", path]):
        with soon():
            assert main(command) == 2
        assert "wanted tensors that are stored whole" in capsys.readouterr().err


def test_deflated_arrays_are_loaded_when_they_are_read(tmp_path, monkeypatch):
    array, read, count = np.arange(30_000.0).reshape(100, 300), np.lib.format.read_array, []

    def counted(stream, **options):
        count.append(1)
        return read(stream, **options)

    monkeypatch.setattr(np.lib.format, "read_array", counted)
    np.savez_compressed(tmp_path / "deflated.npz", a=array, b=array)
    with open_source(tmp_path / "deflated.npz") as source:
        assert not count
        for name, loads in (("a", 1), ("b", 2), ("a", 2)):
            assert np.array_equal(source.tensors[name].tensor().numpy(), array) and len(count) == loads
    np.savez(tmp_path / "stored.npz", a=array, b=np.asfortranarray(array))
    with open_source(tmp_path / "stored.npz") as source:
        for tensor in source.tensors.values():
            assert np.array_equal(tensor.tensor().numpy(), array) and len(count) == 2  # stored members are mapped


def test_an_array_that_memory_does_not_hold(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", a=np.ones(3))

    def read(stream, **options):
        raise MemoryError

    monkeypatch.setattr(np.lib.format, "read_array", read)
    with open_source(tmp_path / "x.npz") as source:
        with pytest.raises(MemoryError, match=r"array 'a', which is deflated .* unzip the archive"):
            source.tensors["a"].read(0, 8)


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1,)", "(3, -1)"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_whose_arrays_are_larger_than_their_bytes(shape, method, tmp_path):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(24))
    with pytest.raises(ibp.checkpoints.SourceFormatError, match=r"x\.npz: 'a' is .* bytes cannot hold"):
        open_source(tmp_path / "x.npz")


def test_deflated_checkpoints_of_torch(tmp_path):
    """torch maps their members as if they were not deflated."""
    torch.save({"w": torch.arange(1000)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ibp.checkpoints.SourceFormatError, match=r"y\.pt: members of the archive are deflated"):
        open_source(tmp_path / "y.pt")
