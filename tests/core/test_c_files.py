"""The C reader of files against the golden files, and against the reader in Python on damaged ones."""

import hashlib
import json
import random

import pytest

import ibp
from c_files import NEWER_FILE, NOT_IN_FILE, OK, UNSUPPORTED_TABLE, WRONG_CHECKSUM, Failed, OpenFile
from golden.corrupt_files import CASES
from helpers import bytes_of
from native import CSRC, ROOT, TESTS, WARNINGS, c_compiler, core_objects, linked, run
from native import PLAIN as PLAIN_FLAGS

FILES = TESTS.parent / "golden" / "files"
CONTENTS = json.loads((FILES / "contents.json").read_text())
CODECS = {  # tables of codecs that the C reader lacks
    "codec.safetensors": {"coded"},
    "general.safetensors": {"zstd", "lz4", "empty"},
}


def contents_of(name):
    paths = sorted(FILES.glob("set-*.safetensors")) if name.endswith(".json") else [FILES / name]
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("name", CONTENTS)
def test_golden_files(name):
    """Names, shapes and bytes of everything in a file, or a set of files, are those that were written."""
    opened, wanted = OpenFile(*contents_of(name)), CONTENTS[name]
    plain = {each: value for each, value in opened.plain().items() if not each.startswith("ibp.padding.")}
    refused = CODECS.get(name, set())
    assert {*plain, *opened.tables()} - refused == wanted.keys() - refused
    for each, about in wanted.items():
        if each in refused:
            continue
        _, shape, data = plain[each] if each in plain else opened.table(each)
        assert shape == about["shape"] and hashlib.sha256(data).hexdigest() == about["sha256"], each
    for each in refused:
        with pytest.raises(Failed) as caught:
            opened.table(each)
        assert caught.value.status == UNSUPPORTED_TABLE


def test_checksums():
    xxhash = pytest.importorskip("xxhash")
    for name in CONTENTS:
        for content in contents_of(name):
            opened = OpenFile(content)
            status, _ = opened.check(xxhash.xxh3_64_intdigest)
            assert status == (NOT_IN_FILE if opened.views[0].version == 0 else OK), name
            if opened.views[0].version:
                status, block = opened.check(lambda data: xxhash.xxh3_64_intdigest(data) ^ 1)
                assert (status, block) == (WRONG_CHECKSUM, 0)


def test_a_newer_file():
    content = contents_of("raw.safetensors")[0].replace(b'"ibp.format":"1"', b'"ibp.format":"2"')
    with pytest.raises(Failed) as caught:
        OpenFile(content)
    assert caught.value.status == NEWER_FILE


def decoded(opened, name):
    """The bytes of a table by the reader in Python."""
    value = opened[name]
    table = value.table if isinstance(value, ibp.deltas.Delta) else value
    return bytes_of(table.decompress()).numpy().tobytes()


def attempt(function, *arguments):
    """What a function returns; None where it refuses its arguments."""
    try:
        return function(*arguments)
    except (ValueError, RuntimeError, Failed):
        return None


def damaged(content, rng):
    """A file with a byte or two changed, every third in the header, where most changes make it no file."""
    content, header_bytes = bytearray(content), int.from_bytes(content[:8], "little")
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(8, 8 + header_bytes) if rng.random() < 0.3 else rng.randrange(len(content))
        content[at] = rng.choice((content[at] ^ 1 << rng.randrange(8), rng.choice(b'0123456789,:" {}[]')))
    return bytes(content)


@pytest.mark.parametrize("rounds", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_damaged_files(rounds, tmp_path):
    """Both readers accept the same tables of damaged files, and decode them to the same bytes."""
    rng, path, accepted, differing = random.Random(5), tmp_path / "damaged.safetensors", 0, 0
    names = [name for name in CONTENTS if not name.endswith(".json") and name != "general.safetensors"]
    sources = [content for name in names for content in contents_of(name)]
    for _ in range(rounds):
        content = damaged(rng.choice(sources), rng)
        path.write_bytes(content)
        in_c, in_python = attempt(OpenFile, content), attempt(ibp.open, path)
        differing += (in_c is None) != (in_python is None)
        if in_c is None or in_python is None:
            continue
        for name in {*in_c.tables()} & {*in_python.tables}:
            ours, theirs = attempt(in_c.table, name), attempt(decoded, in_python, name)
            differing += (ours is None) != (theirs is None)
            if ours is not None and theirs is not None:
                assert ours[2] == theirs, name
                accepted += 1
    # A key that is there twice C finds only where it looks for it, without memory for all of them.
    assert accepted > rounds / 2 and differing <= 1 + rounds // 100


READ_BY_C = {  # what the reader in C, which has no memory for names and no dtypes of torch, does not look at
    "a tensor that is there twice",
    "a table and a tensor of one name",
    "elements of 16 bytes",
    "a part of another table",
}


@pytest.mark.parametrize("name", CASES)
def test_what_python_refuses(name):
    """C refuses the same files and tables."""
    case = CASES[name]
    opened = attempt(OpenFile, case.bytes())
    accepted = opened is not None and (case.tensor is None or attempt(opened.table, case.tensor) is not None)
    assert accepted == (name in READ_BY_C)


def test_the_example(tmp_path):
    """examples/c/open_file.c lists a file, prints rows that are asked for, and complains in one line."""
    objects = core_objects(PLAIN_FLAGS)
    command = [*c_compiler(), "-std=c11", *WARNINGS, f"-I{CSRC / 'include'}", ROOT / "examples" / "c" / "open_file.c"]
    program = linked(command, objects, "open_file")
    code, output = run([program, FILES / "mixed.safetensors"])
    assert code == 0 and "table: " in output and "int8: I8 [" in output
    opened = ibp.open(FILES / "masks.safetensors")
    code, output = run([program, FILES / "masks.safetensors", "slots", "3", "0"])
    rows = bytes_of(opened["slots"].decompress()[[3, 0]]).view(2, -1)[:, :16]
    shown = [" ".join(f"{byte:02x}" for byte in row) for row in rows.tolist()]
    assert code == 0 and all(f"{k}: {row}" in output for k, row in zip((3, 0), shown, strict=True))
    code, output = run([program, FILES / "masks.safetensors", "slots", "99999999"])
    assert code == 1 and "id 99999999: rows: an item id is outside" in output
    assert run([program, FILES / "masks.safetensors", "none", "1"])[0] == 1
    assert run([program, FILES / "contents.json"]) == (
        1,
        f"{FILES / 'contents.json'}: the bytes are no file of this format, or contradict each other\n",
    )
