"""Files: written and read, as safetensors' own library reads them, with names, metadata and checksums."""

import os
import warnings

import numpy as np
import pytest
import torch

import ibp
from helpers import DTYPES, assert_same_bits, make_tensor, one_hot_rows, spiky_rows
from ibp._files import read_header
from ibp._rows.geometry import given_tensor
from ibp._rows.table import has_own_bases

PAGEABLE = {"device": "cpu", "memory": "host"}


def tables():
    """A table of each kind, by name."""
    bf16 = (torch.randn(300, 64) * 0.02).bfloat16()
    changed = ibp.compress(spiky_rows(100, 60), slot_bytes=64, **PAGEABLE)
    changed.update_(torch.tensor([3, 70]), torch.randn(2, 60))
    return {
        "planes": ibp.compress(bf16, scheme="planes", **PAGEABLE),
        "packed": ibp.compress(bf16, scheme="planes", layout="packed", **PAGEABLE),
        "masks": ibp.compress(spiky_rows(100, 60), scheme="ibp", slot_bytes=32, **PAGEABLE),
        "listed": ibp.compress(one_hot_rows(200, 300), scheme="planes", **PAGEABLE),
        "clusters": ibp.compress(spiky_rows(100, 60), scheme="ibp", clusters=3, **PAGEABLE),
        "raw": ibp.compress(bf16[:10], scheme="raw", **PAGEABLE),
        "raw overflow": ibp.compress(bf16[:50], scheme="raw", slot_bytes=32, **PAGEABLE),
        "changed": changed,
        "long items": ibp.compress(torch.zeros(2, 70, 1001, dtype=torch.int16), **PAGEABLE),
        "none": ibp.compress(torch.empty(0, 7), **PAGEABLE),
        "one": ibp.compress(torch.tensor(3.5), **PAGEABLE),
    }


@pytest.fixture(scope="module")
def kept():
    return tables()


def assert_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert_same_bits(got, wanted)
        return
    assert_same_bits(got.decompress(), wanted.decompress())
    assert (got.scheme, got.layout, got.slot_bytes, got.row_bytes) == (
        wanted.scheme,
        wanted.layout,
        wanted.slot_bytes,
        wanted.row_bytes,
    )
    assert got.codebook == wanted.codebook and has_own_bases(got) == has_own_bases(wanted)
    if wanted.codebook is not None:
        assert got.codebook.expected_savings == wanted.codebook.expected_savings


# ---- round trips ----


def test_tables_and_tensors_come_back(tmp_path, kept):
    items = {**kept, "plain": torch.randn(3, 5), "strided": torch.randn(6, 4).t()[1:], "empty": torch.empty(0, 3)}
    path = tmp_path / "all.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ibp.save(path, items, metadata={"format": "pt", "note": 'ünï "x"'}, content=True)
        opened = ibp.open(path, verify=True)
        loaded = ibp.load(path, verify=True)
    assert os.listdir(tmp_path) == ["all.safetensors"]
    assert set(opened) == set(loaded) == set(items) and set(opened.tables) == set(kept)
    assert opened.metadata == {"format": "pt", "note": 'ünï "x"'}
    assert opened.verify(content=True) > 0
    for name, value in items.items():
        assert_same(opened[name], value)
        assert_same(loaded[name], value)
        assert opened[name] is opened[name]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype):
    x = make_tensor((40, 6), dtype)
    ibp.save(tmp_path / "x", {"table": ibp.compress(x, **PAGEABLE)})
    assert_same_bits(ibp.load(tmp_path / "x")["table"].decompress(), x)
    if dtype == torch.complex32:
        with pytest.raises(ValueError, match="'x' has dtype torch.complex32, which safetensors lacks: ibp.compress"):
            ibp.save(tmp_path / "y", {"x": x})
        assert os.listdir(tmp_path) == ["x"]
        return
    ibp.save(tmp_path / "y", {"x": x, "first": x[0, 0], "odd": x[:1, :3]})
    opened = ibp.open(tmp_path / "y")
    assert_same_bits(opened["x"], x)
    assert_same_bits(opened["first"], x[0, 0])
    assert_same_bits(opened["odd"], x[:1, :3])


def test_safetensors_lists_and_reads_the_file(tmp_path, kept):
    safetensors = pytest.importorskip("safetensors")
    x = torch.randn(7)
    ibp.save(tmp_path / "x", {**kept, "x": x}, metadata={"format": "pt"})
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["ibp.format"] == "1"
        assert_same_bits(file.get_tensor("x"), x)
        slots = kept["planes"].slots
        assert_same_bits(file.get_tensor("planes:slots")[: len(slots)], slots)
    starts = {name: entry.start % 128 for name, entry in read_header(tmp_path / "x").tensors.items()}
    assert not any(start for name, start in starts.items() if "padding" not in name)


def test_ordinary_safetensors(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 5).bfloat16(), "ibp.checks": torch.tensor([1], dtype=torch.int8), "b": torch.ones(3)}
    torch_files.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    opened = ibp.open(tmp_path / "x.safetensors", verify=True)
    assert opened.tables == () and set(opened) == set(tensors) and opened.metadata == {"format": "pt"}
    assert not opened.has_checksums and opened.verify() == 0
    for name, tensor in tensors.items():
        assert_same_bits(opened[name], tensor)
        assert_same_bits(ibp.load(tmp_path)[name], tensor)


def test_deltas_come_back(tmp_path):
    base = {"w": torch.randn(200, 64).bfloat16(), "gone": torch.ones(3), "same": torch.ones(4, 4)}
    new = {"w": base["w"].clone(), "same": base["same"], "new": torch.arange(5.0)}
    new["w"][3:9] += 1
    delta = ibp.deltas.make(new, base)
    ibp.save(tmp_path / "d.safetensors", delta)
    opened, loaded = ibp.open(tmp_path / "d.safetensors"), ibp.load(tmp_path / "d.safetensors", verify=True)
    assert opened.removed == ("gone",) and set(opened) == {"w", "new"}
    for changes in (opened, loaded):
        assert type(changes["w"]) is ibp.deltas.Delta and changes["w"].base == delta["w"].base
        applied = ibp.deltas.CheckpointDelta(changes, opened.removed).apply_(
            {name: x.clone() for name, x in base.items()}
        )
        assert set(applied) == set(new)
        for name, tensor in new.items():
            assert_same_bits(applied[name], tensor)


# ---- arrays of numpy ----

ARRAYS = {
    "plain": np.arange(24, dtype=np.float32).reshape(4, 6),
    "none": np.empty((0, 3), np.int64),
    "no dimension": np.array(2.5),
    "backwards": np.arange(10, dtype=np.int16)[::-1],
    "Fortran's": np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4)),
    "another byte order": np.arange(7, dtype=">f4"),
    "bool": np.array([True, False]),
    "half": np.arange(5, dtype=np.float16),
    "complex": np.arange(3, dtype=np.complex64),
    "unsigned": np.arange(3, dtype=np.uint32),
}


def test_arrays_are_saved(tmp_path, recwarn):
    read_only = np.arange(9.0)
    read_only.flags.writeable = False
    arrays = {**ARRAYS, "read only": read_only}
    ibp.save(tmp_path / "x.safetensors", arrays)
    found = ibp.load(tmp_path / "x.safetensors")
    assert not recwarn.list and found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].numpy().dtype == array.dtype.newbyteorder("=") and tuple(found[name].shape) == array.shape
        assert np.array_equal(found[name].numpy(), array), name
    ibp.save(tmp_path / "one.safetensors", read_only)
    assert np.array_equal(ibp.load(tmp_path / "one.safetensors")["tensor"], read_only)


def test_a_mapped_array_is_not_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(9.0))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert given_tensor(mapped, "x").data_ptr() == mapped.ctypes.data


@pytest.mark.parametrize(
    "array", [np.array(["text"]), np.array([None]), np.zeros(2, "datetime64[s]"), np.zeros(2, "i4,f4")]
)
def test_arrays_that_torch_lacks(tmp_path, array):
    with pytest.raises(TypeError, match=r"'x' is an array of .*; wanted a dtype that torch has"):
        ibp.save(tmp_path / "x.safetensors", {"x": array})
    assert not list(tmp_path.iterdir())
