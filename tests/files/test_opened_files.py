"""Files opened and saved: what can be asked of them, sets, URLs, whole files or none, and memory that is shared."""

import errno
import gc
import json
import multiprocessing
import os
import pickle
import tempfile
import warnings

import numpy as np
import pytest
import torch

import ibp
from golden.make_files import FILES
from helpers import assert_same_bits, bytes_of, spiky_rows
from ibp._common import process
from ibp._files import FileWriter, header_room, opened, reader, write_plain, write_table
from ibp._machine import segments
from ibp._machine.memory import PinningError
from ibp._machine.segments import FileRows
from ibp._rows.table import tensors_of
from kinds_of_paths import few_descriptors

PAGEABLE = {"device": "cpu", "memory": "host"}
ROWS = spiky_rows(300, 64)


@pytest.fixture(scope="module")
def table():
    return ibp.compress(ROWS, scheme="planes", slot_bytes=64, **PAGEABLE)


@pytest.fixture
def path(tmp_path, table):
    ibp.save(tmp_path / "x.safetensors", {"t": table, "p": torch.arange(6.0).view(2, 3)}, content=True)
    return tmp_path / "x.safetensors"


# ---- an opened file ----


def test_an_opened_file_is_a_mapping(path):
    with ibp.open(str(path)) as file:
        assert list(file) == ["t", "p"] and len(file) == 2 and "t" in file and "t:slots" not in file and 5 not in file
        assert repr(file) == f"ibp.File({str(path)!r}, tables=1, tensors=2)"
        assert file.tables == ("t",) and file.removed == () and file.metadata == {} and file.path == path
        for ask in (file.__getitem__, file.info):
            with pytest.raises(KeyError, match="x.safetensors has no tensor 'u'; it has 't', 'p'\""):
                ask("u")
        assert file.get("u") is None and file.get("u", 3) == 3 and file.get("t") is file["t"]
        table, tensor = file["t"], file["p"]
        assert dict(file)["t"] is table and not table.is_shared() and pickle.loads(pickle.dumps(file))["t"].shape
    for ask in (lambda: file["t"], lambda: file.get("u"), lambda: file.info("t"), file.verify):
        with pytest.raises(ValueError, match="x.safetensors is closed"):
            ask()
    assert "closed" in repr(file)
    with pytest.raises(ValueError, match="x.safetensors is closed"):
        file._files["x.safetensors"].fileno()
    path.unlink()
    assert_same_bits(table[[3, 299]], ROWS[[3, 299]])
    assert_same_bits(tensor, torch.arange(6.0).view(2, 3))


def test_plain_tensors_by_name(path, tmp_path):
    """As of safetensors' `safe_open`."""
    with ibp.open(path) as file:
        assert_same_bits(file.get_tensor("t"), ROWS)
        assert_same_bits(file.get_tensor("p", device="cpu"), torch.arange(6.0).view(2, 3))
        assert list(file.keys()) == ["t", "p"]
        with pytest.raises(KeyError, match="has no tensor 'u'"):
            file.get_tensor("u")
    ibp.save(tmp_path / "delta.safetensors", ibp.deltas.make({"a": ROWS + 1}, {"a": ROWS}))
    with ibp.open(tmp_path / "delta.safetensors") as file, pytest.raises(TypeError, match="'a' is a delta; wanted"):
        file.get_tensor("a")


def test_what_a_file_says_of_tensors(path, table):
    file = ibp.open(path)
    info = file.info("t")
    assert (info.dtype, info.shape, info.scheme, info.codec) == (torch.float32, (300, 64), "planes", None)
    assert info.codebook == table.codebook and info.num_bytes == 300 * 256 and info.files == ("x.safetensors",)
    held = sum(-(-part.nbytes // 128) * 128 for part in tensors_of(table).values())
    assert info.stored_bytes == held and info.fields["row_bytes"] == "256"
    assert file.fields("t").content == ibp.deltas.fingerprint(ROWS)
    plain = file.info("p")
    assert (plain.dtype, plain.shape, plain.scheme, plain.stored_bytes) == (torch.float32, (2, 3), None, 24)
    assert plain.fields == {} and plain.codebook is None


def test_changes_leave_the_file_as_it_is(path):
    before = path.read_bytes()
    file = ibp.open(path)
    file["p"].mul_(3)
    file["t"].update_(torch.tensor([7]), torch.ones(1, 64))
    file["t"].append(torch.ones(2, 64))
    assert_same_bits(file["t"][7], torch.ones(64))
    assert file["t"].shape == (302, 64) and path.read_bytes() == before
    again = ibp.open(path)["t"]
    again.refit()
    assert_same_bits(again.decompress(), ROWS)
    assert path.read_bytes() == before


def test_a_table_of_a_file_can_be_shared_and_kept(path, tmp_path):
    table = ibp.open(path)["t"]
    torch.save(table, tmp_path / "t.pt")
    assert_same_bits(torch.load(tmp_path / "t.pt", weights_only=True).decompress(), ROWS)
    ibp.save(path, {"again": table})  # over the file that it is mapped from
    assert_same_bits(table.decompress(), ROWS)
    assert_same_bits(ibp.load(path)["again"].decompress(), ROWS)
    assert ibp.distributed.open_shared(table.share()).is_shared()


def test_names_that_are_not_there(tmp_path):
    ibp.save(tmp_path / "x", {f"layers.{number}.weight": torch.ones(3) for number in range(8)})
    wanted = (
        r"""no tensor 'layers.3.wieght' \(did you mean 'layers.3.weight'.*; it has 'layers.0.weight', .* and 2 more"""
    )
    with pytest.raises(KeyError, match=wanted):
        ibp.load(tmp_path / "x", names=["layers.3.wieght"])
    ibp.save(tmp_path / "none", {})
    with pytest.raises(KeyError, match="none has no tensor 'a'; it has no tensors"):
        ibp.open(tmp_path / "none")["a"]


def test_arguments_of_save_that_are_exchanged(tmp_path):
    for path in (str(tmp_path / "x"), tmp_path / "x"):
        with pytest.raises(
            TypeError, match=r"tensors is the path '.*x'; wanted ibp.save\(path, tensors\), the path fir"
        ):
            ibp.save({"a": torch.ones(3)}, path)
    for path, kind in (({}, "dict"), (None, "NoneType"), (b"x", "bytes"), (3, "int")):
        with pytest.raises(TypeError, match=f"path is a {kind}; wanted text or a path"):
            ibp.save(path, torch.ones(3))
        with pytest.raises(TypeError, match=f"path is a {kind}; wanted text or a path"):
            ibp.load(path)


def test_names_that_are_loaded(path):
    assert list(ibp.load(path, names=["p"])) == ["p"]
    with pytest.raises(KeyError, match="q"):
        ibp.load(path, names=["q"])
    with pytest.raises(TypeError, match="names is the text 'p'"):
        ibp.load(path, names="p")
    with pytest.raises(TypeError, match="names is the text 'p'"):
        ibp.open(path).verify("p")


# ---- many tensors ----


def maps_of(path):
    with open("/proc/self/maps") as maps:
        return sum(line.rstrip().endswith(str(path)) for line in maps)


def test_one_map_serves_the_tensors_of_a_file(tmp_path, table):
    path = tmp_path / "many.safetensors"
    plain = {f"p{number}": torch.full((3,), float(number)) for number in range(100)}
    ibp.save(path, {**plain, **{f"t{number}": table for number in range(20)}})
    with few_descriptors(), ibp.open(path, memory="host") as file:
        held = dict(file)
        # One for tensors, which may be written to, and one for tables, whose rows have their own if they can be pinned.
        assert maps_of(path) <= 2 + 2 * 20 * ibp.cuda_is_available()
    held["p7"].zero_()
    for name in ("p6", "p8"):
        assert_same_bits(held[name], plain[name])
    assert_same_bits(held["t19"].decompress(), ROWS)
    assert not ibp.open(path)["p7"].equal(held["p7"])
    del held
    gc.collect()
    assert maps_of(path) == 0


@pytest.mark.parametrize(
    "name, what",
    [
        ("x.npy", "an array of numpy"),
        ("x.npz", "an archive, as torch.save and numpy.savez write them"),
        ("x.pt", "an archive, as torch.save and numpy.savez write them"),
        ("old.pt", "a pickle, as torch.save once wrote them"),
    ],
)
@pytest.mark.parametrize("read", [ibp.load, ibp.open])
def test_files_of_other_formats(tmp_path, name, what, read):
    array = np.arange(6.0)
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", a=array)
    for file, is_archive in (("x.pt", True), ("old.pt", False)):
        torch.save({"a": torch.ones(3)}, tmp_path / file, _use_new_zipfile_serialization=is_archive)
    with pytest.raises(ibp.FileFormatError, match=f"{name} is {what}, no file of safetensors; ibp.checkpoints.comp"):
        read(tmp_path / name)


@pytest.mark.parametrize("read", [ibp.load, ibp.open])
def test_files_of_no_known_format(tmp_path, read):
    """A number that no header has said is not told as one; of a file that was cut it is."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(range(20)))
    with pytest.raises(ibp.FileFormatError, match=r"x.gguf is no file of safetensors: it has 24 .* begins with b'GGUF"):
        read(path)
    ibp.save(tmp_path / "x", {"a": torch.ones(3)})
    os.truncate(tmp_path / "x", 20)
    with pytest.raises(ibp.FileFormatError, match=r"x is no file of safetensors, or was cut: it has 20 bytes and says"):
        read(tmp_path / "x")


def test_a_header_as_long_as_a_pickle_begins(tmp_path):
    """Its size is 640: the bytes with which a pickle begins."""
    text = b"{}".ljust(0x280)
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert ibp.load(tmp_path / "x.safetensors") == {}


def test_a_file_that_was_cut_after_it_was_opened(path):
    file = ibp.open(path)
    os.truncate(path, 200)
    for name in ("t", "p"):
        with pytest.raises(ibp.FileFormatError, match="x.safetensors has been cut since it was opened"):
            file[name]


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="older systems end the process that reads"
)
def test_a_file_that_was_cut_after_it_was_mapped(path):
    """Verifying asks the system whether it can read the bytes: a process that reads what is gone is ended."""
    file = ibp.open(path, verify=True)  # maps the file to compare the header
    os.truncate(path, 200)
    with pytest.raises(ibp.FileFormatError, match="x.safetensors was cut while it was read"):
        file.verify()


# ---- checksums ----


def test_much_is_verified_piece_by_piece(tmp_path, monkeypatch):
    """The system need not keep a large tensor in memory until it is hashed."""
    path, sizes = tmp_path / "large.safetensors", []
    ibp.save(path, {"x": torch.zeros(20 << 20, dtype=torch.uint8)})
    loaded = reader.OpenFile.loaded
    monkeypatch.setattr(reader.OpenFile, "loaded", lambda file, *at: sizes.append(at[1]) or loaded(file, *at))
    with ibp.checkpoints.open(path, verify=True) as source:
        x, sizes[:] = source.tensors["x"], []
        x.read(0, x.num_bytes)
        assert sum(sizes) >= x.num_bytes and max(sizes) <= 8 << 20
        sizes.clear()
        x.read(0, x.num_bytes)
        assert not sizes


@pytest.fixture
def large(tmp_path):
    """A file of several blocks, and its tensors."""
    tensors = {name: torch.randint(0, 256, (700_001,), dtype=torch.uint8) for name in "abcde"}
    ibp.save(tmp_path / "large", tensors)
    return tmp_path / "large", tensors


def test_a_damaged_block_is_named(large):
    path, tensors = large
    assert ibp.open(path).verify() == 5 * 700_032
    data = bytearray(path.read_bytes())
    at = data.find(tensors["d"].numpy().tobytes()[:64]) + 5000
    data[at] ^= 16
    path.write_bytes(data)
    with pytest.raises(
        ibp.ChecksumError, match="block 2, bytes 2.* of the file, has another checksum: one of 'c', 'd', 'e' is damaged"
    ):
        ibp.open(path).verify()
    with pytest.raises(ibp.ChecksumError, match="'d'"):
        ibp.load(path)
    assert ibp.open(path).verify(["a", "b"]) == 2 << 20
    assert list(ibp.load(path, names=["a", "b"])) == ["a", "b"]
    opened = ibp.open(path, verify=True)
    assert_same_bits(opened["a"], tensors["a"])
    with pytest.raises(ibp.ChecksumError, match="'d'"):
        opened["d"]
    assert_same_bits(ibp.load(path, verify=False)["e"], tensors["e"])
    assert_same_bits(ibp.open(path)["e"], tensors["e"])  # nobody has asked


def test_content_that_is_not_what_was_compressed(tmp_path, table):
    with FileWriter(tmp_path / "x", header_bytes=8192) as file:
        write_table(file, "t", table, content=ibp.deltas.fingerprint(ROWS) ^ 1)
    assert ibp.open(tmp_path / "x").verify() > 0
    with pytest.raises(ibp.ChecksumError, match="'t' decodes to other bytes than were compressed"):
        ibp.open(tmp_path / "x").verify(content=True)


# ---- sets of files ----


@pytest.fixture
def items(table):
    return {"a": torch.arange(1000.0), "t": table, "b": torch.ones(5), "u": ibp.compress(ROWS[:50], **PAGEABLE)}


@pytest.mark.parametrize("where", ["index", "directory"])
def test_a_set_of_files(tmp_path, items, where):
    ibp.save(tmp_path, items, shard_bytes=4096, metadata={"format": "pt"})
    names = sorted(os.listdir(tmp_path))
    assert names[-1] == "model.safetensors.index.json"
    assert names[:-1] == [f"model-{number:05d}-of-00003.safetensors" for number in range(1, 4)]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["weight_map"]["t:slots"] == names[1] and not any(
        name.startswith("ibp.") for name in index["weight_map"]
    )
    files = [(tmp_path / name).read_bytes() for name in names[:-1]]
    data_bytes = sum(len(file) - 8 - int.from_bytes(file[:8], "little") for file in files)
    assert index["metadata"]["total_size"] == data_bytes
    opened = ibp.open(tmp_path / names[-1] if where == "index" else tmp_path, verify=True)
    assert list(opened) == list(items) and opened.metadata == {"format": "pt"} and opened.verify() > 0
    assert_same_bits(opened["t"].decompress(), ROWS)
    assert opened.info("t").files == (names[1],)
    assert_same_bits(ibp.load(tmp_path)["a"], items["a"])


def test_files_of_a_set_are_filled(tmp_path):
    ibp.save(tmp_path, {name: torch.ones(256) for name in "abcdef"}, shard_bytes=2048)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_one_file_where_one_is_enough(tmp_path, items):
    ibp.save(tmp_path, items, shard_bytes=1 << 30)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert list(ibp.load(tmp_path)) == list(items)


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({"a": "../x.safetensors"}, "wanted the name of a file beside it"),
        ({"a": "/etc/passwd"}, "wanted the name of a file beside it"),
        ({"a": ""}, "wanted the name"),
        ({"a": 5}, "wanted the name"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"a": "1.safetensors", "z": "1.safetensors"}, "1.safetensors has no tensor 'z', which the index says it has"),
        ({"b": "1.safetensors", "c": "2.safetensors"}, "1.safetensors and .*2.safetensors both have a tensor 'a'"),
    ],
)
def test_wrong_indexes(tmp_path, weight_map, message):
    ibp.save(tmp_path / "1.safetensors", {"a": torch.ones(1), "b": torch.ones(1)})
    ibp.save(tmp_path / "2.safetensors", {"a": torch.ones(1), "c": torch.ones(1)})
    write_index(tmp_path, weight_map)
    with pytest.raises(ibp.FileFormatError, match=message):
        ibp.open(tmp_path)


def test_files_that_are_not_there(tmp_path, table):
    with pytest.raises(FileNotFoundError, match="has no files"):
        ibp.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        ibp.load(tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": "1.safetensors"})
    with pytest.raises(FileNotFoundError, match="names the file '1.safetensors', which is not beside it"):
        ibp.open(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(ibp.FileFormatError, match="has 2 indexes"):
        ibp.open(tmp_path)
    for name in ("1.safetensors", "2.safetensors"):
        ibp.save(tmp_path / name, {"t": table})
    for name in ("other", "model"):
        (tmp_path / f"{name}.safetensors.index.json").unlink()
    with pytest.raises(ibp.FileFormatError, match="both have a t"):
        ibp.open(tmp_path)


# ---- URLs ----


def test_urls(items):
    fsspec = pytest.importorskip("fsspec")
    for url, names in (
        ("memory://files/one.safetensors", ["one.safetensors"]),
        ("memory://sets/m.safetensors", [f"m-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]),
    ):
        ibp.save(url, items, shard_bytes=4096 if "sets" in url else None)
        folder = url.rpartition("/")[0]
        found = sorted(each.rpartition("/")[2] for each in fsspec.filesystem("memory").ls(folder, detail=False))
        assert [each for each in found if not each.endswith(".json")] == names
        loaded = ibp.load(url if len(names) == 1 else f"{url}.index.json", verify=True)
        assert list(loaded) == list(items)
        assert_same_bits(loaded["t"].decompress(), ROWS)
        assert list(ibp.load(folder)) == list(items)
        with pytest.raises(ValueError, match="on no file system of this machine.*: use ibp.load"):
            ibp.open(url)


def test_urls_of_this_machine(path):
    pytest.importorskip("fsspec")
    assert_same_bits(ibp.open(f"file://{path}")["t"].decompress(), ROWS)
    ibp.save(f"file://{path}", {"p": torch.ones(2)})
    assert list(ibp.load(f"file://{path}")) == ["p"]
    assert list(ibp.load(f"filecache::file://{path}")) == ["p"]  # whose protocol only begins so


# ---- saving ----


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_permissions(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        ibp.save(tmp_path / "x", torch.ones(3))
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode and list(ibp.load(tmp_path / "x")) == ["tensor"]


@pytest.mark.parametrize(
    "tensors, options, kind, message",
    [
        ({5: torch.ones(1)}, {}, TypeError, "tensors has the key 5; wanted names"),
        ({"a": [1]}, {}, TypeError, "'a' is a list; wanted a table .*, a torch.Tensor, an array of numpy or a delta"),
        ({"a": torch.ones(1).to_sparse()}, {}, TypeError, "sparse"),
        ({"ibp.checks": torch.ones(1)}, {}, ValueError, "'ibp.checks' is reserved"),
        ({"ibp.x": torch.ones(1)}, {"shard_bytes": 1}, ValueError, "'ibp.x' is reserved"),
        ({"__metadata__": torch.ones(1)}, {}, ValueError, "reserved"),
        ({"a\ud800": torch.ones(1)}, {}, ValueError, "half of a surrogate pair"),
        ({"a": torch.ones(1)}, {"metadata": {"a": 1}}, TypeError, "wanted text for text"),
        ({"a": torch.ones(1)}, {"metadata": {"ibp.a": "1"}}, ValueError, "wanted none that begins with 'ibp.'"),
        ({"a": torch.ones(1)}, {"shard_bytes": 0}, ValueError, "shard_bytes is 0"),
        ({"a": torch.ones(1)}, {"shard_bytes": 1.5}, TypeError, "shard_bytes is 1.5"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tensors, options, kind, message):
    with pytest.raises(kind, match=message):
        ibp.save(tmp_path / "x", tensors, **options)
    assert os.listdir(tmp_path) == []


def test_names_that_a_writer_has_written(tmp_path, table):
    """Of tables and of plain tensors."""
    writes = {
        "table": lambda file: write_table(file, "t", table),
        "plain": lambda file: write_plain(file, "t", torch.ones(5)),
    }
    for first in writes.values():
        for second in writes.values():
            with FileWriter(tmp_path / "x") as file:
                first(file)
                with pytest.raises(ValueError, match="there are two tensors 't'"):
                    second(file)


@pytest.mark.parametrize("part", ["slots", "overflow", "lengths", "bases", "blocks"])
def test_names_that_parts_have(tmp_path, table, part):
    for items in ({"t": table, f"t:{part}": torch.ones(1)}, {f"t:{part}": torch.ones(1), "t": table}):
        for shard_bytes in (None, 1):  # in one file, and in a set
            with pytest.raises(ValueError, match=f"a part of the table 't' and another tensor .* name 't:{part}'"):
                ibp.save(tmp_path / "x", items, shard_bytes=shard_bytes)
    assert os.listdir(tmp_path) == []
    ibp.save(tmp_path / "x", {"t": table, "t:other": torch.ones(1), f"u:{part}": torch.ones(1)})
    assert set(ibp.load(tmp_path / "x")) == {"t", "t:other", f"u:{part}"}


@pytest.mark.parametrize("shard_bytes", [None, 4096])
@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_a_full_disk_leaves_what_was_there(tmp_path, items, monkeypatch, failing, shard_bytes):
    ibp.save(tmp_path, items, shard_bytes=shard_bytes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    real = getattr(os, failing)
    monkeypatch.setattr(os, failing, full)
    changed = {name: value * 2 if isinstance(value, torch.Tensor) else value for name, value in items.items()}
    if shard_bytes is None and failing == "fsync":
        calls.append(())
    with pytest.raises(OSError, match="No space left"):
        ibp.save(tmp_path, changed, shard_bytes=shard_bytes)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_header_has_the_room_that_names_need(tmp_path):
    """The bound holds for names that JSON writes longer, many of them, and many dimensions."""
    books = [ibp.compress(spiky_rows(60, 16 + 4 * k), scheme="ibp", clusters=2, **PAGEABLE) for k in range(3)]
    names = {f'"{k}"\\\n\u1234' * 20: book for k, book in enumerate(books)}
    names |= {f"{k}": torch.ones([1] * 40) for k in range(50)}
    ibp.save(tmp_path / "x", names, metadata={"\u1234" * 50: '"' * 999}, content=True)
    assert set(ibp.load(tmp_path / "x", verify=True)) == set(names)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path / 'none'}'"):
        ibp.save(tmp_path / "none" / "x", torch.ones(1))


# ---- the writer ----


def test_what_a_writer_refuses(tmp_path, table):
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="not being written"):
        FileWriter(path).plain("a", "U8", (1,)).__enter__()
    with FileWriter(path, header_bytes=2048) as file:
        with file.plain("a", "U8", (2, 100)) as write:
            write(torch.arange(200, dtype=torch.uint8))
        with pytest.raises(ValueError, match="'a' is closed"):
            write(b"1")
        for name, error, message in (
            ("a", ValueError, "two tensors 'a'"),
            ("ibp.b", ValueError, "'ibp.b' is reserved; wanted one that does not begin with 'ibp.'"),
            ("b\ud800", ValueError, "half of a surrogate pair"),
            (3, TypeError, "the name 3 is of type int; wanted text"),
        ):
            with pytest.raises(error, match=message):  # writes nothing
                file.plain(name, "U8", (1,))
    assert_same_bits(ibp.load(path)["a"], torch.arange(200, dtype=torch.uint8).view(2, 100))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="cannot be completed.*: ValueError: 'b' begins before 'a' is closed"):
        with FileWriter(path) as file, file.plain("a", "U8", (1,)) as write:
            write(b"1")
            with pytest.raises(ValueError, match="'b' begins before 'a' is closed"), file.part("b", "U8"):
                pass
    with pytest.raises(ValueError, match="cannot be completed.*: ValueError: there are two tensors 'a' in a file"):
        with FileWriter(path) as file:
            write_plain(file, "a", torch.ones(5))
            with pytest.raises(ValueError, match="two tensors 'a'"), file.part("a", "U8"):
                pass
    with pytest.raises(ValueError, match=r"'a' has 3 bytes; wanted F32 \[1\]"), FileWriter(path) as file:
        with file.plain("a", "F32", (1,)) as write:
            write(b"123")
    with pytest.raises(ValueError, match="'a' was not closed"), FileWriter(path) as file:
        unfinished = file.plain("a", "F32", (1,))
        unfinished.__enter__()(b"1234")
    with pytest.raises(KeyboardInterrupt), FileWriter(path) as file:
        write_plain(file, "a", torch.ones(5))
        raise KeyboardInterrupt
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x"]


def test_a_writer_that_is_closed_in_the_middle_of_a_write(tmp_path, monkeypatch):
    """As if an interrupt ended the wait for the thread that writes: it writes to no descriptor that is not its own."""
    written, pwrite = [], os.pwrite

    def close_after(descriptor, data, start):
        written.append(pwrite(descriptor, data[:1], start))
        writer._output.discard()
        return written[-1]

    monkeypatch.setattr(os, "pwrite", close_after)
    with pytest.raises(ValueError, match="closed file"), FileWriter(tmp_path / "x") as writer:
        write_plain(writer, "a", torch.ones(1 << 20))
    assert written == [1] and os.listdir(tmp_path) == []


@pytest.mark.parametrize("num_names", [1, 9000])  # by which the data move less, and more, than they have bytes
def test_a_header_without_enough_room(tmp_path, num_names):
    data = torch.randint(0, 256, ((5 << 19) + 1,), dtype=torch.uint8)
    with FileWriter(tmp_path / "x", metadata={"a": "b" * 400}, header_bytes=128) as file:
        write_plain(file, "data", data)
        for number in range(num_names):
            write_plain(file, f"{'name' * 20}{number}", data[:0])
    found = ibp.open(tmp_path / "x")
    assert len(found) == num_names + 1 and found.metadata == {"a": "b" * 400}
    found.verify()
    assert_same_bits(found["data"], data)


def test_a_header_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("ibp._files.writer._MOST_ROOM", 4096)
    with pytest.raises(ValueError, match=r"the header of x has \d+ bytes; wanted at most 100000000"):
        ibp.save(tmp_path / "x", {"a": torch.ones(3)}, metadata={"b": "c" * 4096})
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_fed_in_pieces(tmp_path):
    data = torch.randint(0, 256, (9_500_001,), dtype=torch.uint8)  # more than a thread reads at once
    written = []
    with FileWriter(tmp_path / "x", header_bytes=header_room({"a": data.shape}), on_write=written.append) as file:
        with file.plain("a", "U8", tuple(data.shape)) as write:
            start = 0
            for size in (1, 999_999, 1 << 20, 5, 1_200_000, 10**7):
                write(data[start : start + size].numpy())
                start += size
        assert file.data_bytes == -(-len(data) // 128) * 128 and sum(written) == len(data)
    found = ibp.open(tmp_path / "x")
    assert found.verify() == -(-len(data) // 128) * 128
    for tensor in (found["a"], ibp.load(tmp_path / "x")["a"]):
        assert_same_bits(tensor, data)


# ---- memory that processes share ----

SHARED = {
    "slots": torch.arange(100, dtype=torch.uint8),
    "overflow": torch.empty(0, dtype=torch.uint8),
    "lengths": torch.arange(5, dtype=torch.int16).view(torch.uint16),
    "bases": torch.ones(3, dtype=torch.int64),
}


def hold(pipe):
    """Has the shared memory until the pipe says something."""
    segment, same = segments.segment_of("a key", SHARED)
    assert all(torch.equal(bytes_of(same[name]), bytes_of(SHARED[name])) for name in SHARED)
    pipe.send(segment.name)
    pipe.recv()


def test_processes_share_one_copy(tmp_path, monkeypatch):
    """Also when the one that made it is killed; a new copy is made when all have gone, and the last removes the file
    where they meet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    processes = []

    def start():
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(target=hold, args=(theirs,))
        process.start()
        processes.append(process)
        assert ours.poll(60)
        return process, ours, ours.recv()

    def end(process, pipe):
        pipe.send("end")
        process.join(60)
        assert process.exitcode == 0

    try:
        first, _, name = start()
        *second, same = start()
        assert name.startswith("ibp-") and same == name
        first.kill()
        first.join(60)
        *third, same = start()
        assert same == name
        end(*second)
        end(*third)
        folder = tmp_path / f"ibp-{os.geteuid()}"
        assert not list(folder.iterdir())
        (folder / "of a process that was killed").write_text('["ibp-0", 4096, [[1, 2]]]')
        *fourth, other = start()
        assert other.startswith("ibp-") and other != name
        (record,) = folder.iterdir()
        assert record.stat().st_size < 500
        record.write_text("half of a rec")
        *fifth, another = start()
        assert another.startswith("ibp-") and another != other
        end(*fourth)
        end(*fifth)
        assert not list(folder.iterdir())
    finally:
        for process in processes:
            process.kill()
            process.join(60)


def test_the_place_where_processes_meet(tmp_path, monkeypatch, table):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"ibp-{os.geteuid()}"
    folder.mkdir()
    os.chmod(folder, 0o777)
    with pytest.raises(RuntimeError, match="is not a directory of this user alone"):
        segments.segment_of("key", tensors_of(table))
    os.chmod(folder, 0o700)
    segment, same = segments.segment_of("key", tensors_of(table))
    again, _ = segments.segment_of("key", tensors_of(table))
    assert again is segment and torch.equal(same["slots"], table.slots)
    assert segments.segment_of("another key", tensors_of(table))[0] is not segment


def test_processes_meet_in_the_directory_for_temporary_files(tmp_path, monkeypatch):
    """Where the user has no directory of their own: the variable has to name one, by its whole path."""
    monkeypatch.chdir(tmp_path)
    for name in ("temporary", "own"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for said, chosen in (("", "temporary"), ("own", "temporary"), ("/no/such", "temporary"), (tmp_path / "own", "own")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(said))
        assert segments._folder() == tmp_path / chosen / f"ibp-{os.geteuid()}"
        assert segments._folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("can_meet", [True, False])
def test_tables_that_processes_share(path, tmp_path, monkeypatch, can_meet):
    """As on a machine whose GPUs cannot read mapped files."""
    if not can_meet:
        (tmp_path / f"ibp-{os.geteuid()}").write_text("no directory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(opened, "can_pin", lambda file: False)
    files = [ibp.open(path, share=True) for _ in range(2)]
    for file in files:
        file._pins = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first, second = (file["t"] for file in files)
    assert first.is_shared() == second.is_shared() == can_meet
    assert not can_meet or first._segment is second._segment
    assert len([one for one in said if "'t' is not shared between processes" in str(one.message)]) == 2 * (not can_meet)
    for table in (first, second):
        assert_same_bits(table.decompress(), ROWS)


def test_sharing_without_a_gpu(path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert_same_bits(ibp.open(path, share=True)["t"].decompress(), ROWS)


# ---- on a GPU ----


@pytest.fixture
def refused(monkeypatch):
    """Mapped files cannot be pinned, as some systems have it."""

    def pin_here(self):
        raise PinningError("a mapped file cannot be pinned (as the test says)")

    monkeypatch.setattr(FileRows, "pin_here", pin_here)
    monkeypatch.setattr(process, "said", set())


def test_load_to_a_gpu(cuda, path):
    loaded = ibp.load(path, device="cuda", verify=True)
    assert loaded["t"].is_cuda and loaded["p"].is_cuda
    assert_same_bits(loaded["t"].decompress().cpu(), ROWS)
    near = ibp.load(path)
    assert near["t"].is_pinned() and not near["p"].is_pinned() and ibp.load(path, memory="pinned")["p"].is_pinned()
    assert not ibp.load(path, memory="host")["t"].is_pinned()
    assert_same_bits(near["t"].index_select(torch.tensor([5, 0]), device=cuda).cpu(), ROWS[[5, 0]])


def test_large_tensors_go_to_a_gpu_in_blocks(cuda, tmp_path):
    x = torch.randn(9_000_001)
    ibp.save(tmp_path / "x", {"x": x, "t": ibp.compress(x, scheme="raw")})
    loaded = ibp.load(tmp_path / "x", device=cuda)
    assert_same_bits(loaded["x"].cpu(), x)
    assert_same_bits(loaded["t"].decompress().cpu(), x)


@pytest.mark.parametrize("memory", [None, "pinned", "host"])
def test_rows_of_an_opened_file_on_a_gpu(cuda, path, memory):
    """Whatever the system says to pinning a file."""
    ids = torch.randint(300, (1000,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        table = ibp.open(path, memory=memory)["t"]
        for near in (ids, ids.to(cuda)):
            assert_same_bits(table.index_select(near, device=cuda).cpu(), ROWS[ids])
        assert_same_bits(table.decompress(device=cuda).cpu(), ROWS)
    assert table.is_pinned() == (memory != "host")
    assert_same_bits(table[ids], ROWS[ids])


def test_a_file_that_cannot_be_pinned_is_copied(cuda, path, refused):
    ids = torch.randint(300, (1000,), device=cuda)
    file = ibp.open(path)
    with pytest.warns(RuntimeWarning, match="cannot be pinned .* are copied to pinned memory instead") as said:
        assert_same_bits(file["t"].index_select(ids).cpu(), ROWS[ids.cpu()])
        again = ibp.open(path)["t"]
        assert_same_bits(again.index_select(ids).cpu(), ROWS[ids.cpu()])
    assert len([str(one.message) for one in said if one.category is RuntimeWarning]) == 1
    assert again.is_pinned() and file["t"].is_pinned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unpinned = ibp.open(path, memory="host")["t"]
        assert_same_bits(unpinned.index_select(ids).cpu(), ROWS[ids.cpu()])
        assert not unpinned.is_pinned()


def test_changed_rows_of_a_mapped_table(cuda, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        table = ibp.open(path)["t"]
        table.index_select(torch.tensor([1], device=cuda))
        table.update_(torch.tensor([7]), torch.ones(1, 64))
        assert_same_bits(table.index_select(torch.tensor([7, 8], device=cuda))[0].cpu(), torch.ones(64))
        table.append(torch.ones(1, 64))
        assert_same_bits(table.decompress(device=cuda).cpu()[[8, 300]], torch.stack([ROWS[8], torch.ones(64)]))
    assert_same_bits(ibp.open(path)["t"].decompress(), ROWS)


def test_shared_where_files_cannot_be_pinned(cuda, path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(reader, "_can_pin", {path.stat().st_dev: False})
    first, second = (ibp.open(path, share=True)["t"] for _ in range(2))
    assert first.is_shared() and first._segment is second._segment and first.is_pinned()
    ids = torch.randint(300, (1000,), device=cuda)
    for table in (first, second):
        assert_same_bits(table.index_select(ids).cpu(), ROWS[ids.cpu()])
    with pytest.raises(RuntimeError, match="shared with other processes"):
        first.update_(torch.tensor([7]), torch.ones(1, 64))


def test_parts_in_different_files_on_a_gpu(cuda):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        table = ibp.open(FILES / "set.safetensors.index.json")["split"]
        near = table.index_select(torch.arange(70, device=cuda))
    assert_same_bits(near.cpu(), spiky_rows(70, 40))
