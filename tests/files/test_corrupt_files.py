"""Files that contradict themselves are refused with a sentence; checksums find every change."""

import functools

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import c_files
import ibp
import reference_files
from golden.corrupt_files import CASES, OF_CHECKSUMS, OF_TABLES, header_of, with_header
from golden.make_files import FILES
from ibp._cli.main import main

NAMES = ["raw", "masks", "planes", "clusters", "changed", "mixed", "delta", "codec", "foreign"]
ALLOWED = (ibp.FileFormatError, ibp.CorruptTableError)


@pytest.mark.parametrize("name", CASES)
def test_refused(tmp_path, name):
    case, path = CASES[name], tmp_path / "x.safetensors"
    path.write_bytes(case.bytes())
    assert path.read_bytes() != (FILES / case.file).read_bytes()
    if case.tensor is None:
        for function in (ibp.open, functools.partial(ibp.load, verify=False)):
            with pytest.raises(ibp.FileFormatError, match=case.message):
                function(path)
        with pytest.raises(ibp.FileFormatError):  # of what is wrong, or of the header's checksum
            ibp.load(path)
        return
    opened = ibp.open(path)
    with pytest.raises(ibp.FileFormatError, match=case.message) as refusal:
        opened[case.tensor]
    assert "\n" not in str(refusal.value)
    with pytest.raises(ibp.FileFormatError, match=case.message):
        ibp.load(path, verify=False)
    with pytest.raises(ibp.FileFormatError):
        ibp.load(path)


@pytest.mark.parametrize("name", OF_TABLES)
def test_other_tables_are_read(tmp_path, name):
    case, path = OF_TABLES[name], tmp_path / "x.safetensors"
    path.write_bytes(case.bytes())
    opened = ibp.open(path)
    others = [each for each in opened if each not in (case.tensor, "packed", "short last row", "coded", "x")]
    for each in others:
        assert opened[each].decompress() is not None if each in opened.tables else opened[each] is not None
    assert others


@pytest.mark.parametrize("name", OF_CHECKSUMS)
def test_checksums(tmp_path, name):
    case, path = OF_CHECKSUMS[name], tmp_path / "x.safetensors"
    path.write_bytes(case.bytes())
    with pytest.raises(ibp.FileFormatError, match=case.message):
        ibp.load(path)
    with pytest.raises(ibp.FileFormatError, match=case.message):
        ibp.open(path).verify()
    if case.tensor is None:
        with pytest.raises(ibp.FileFormatError, match=case.message):
            ibp.open(path, verify=True)
    else:
        opened = ibp.open(path, verify=True)
        with pytest.raises(ibp.ChecksumError, match=case.message):
            opened[case.tensor]


# ---- one bit of the header ------------------------------------------------------------------------------------------

NAMES_OF_IBP = [
    b'"__metadata__":',
    b'"ibp.format":',
    b'"ibp.checks":"',
    b'"ibp.checks":{',
]


@pytest.fixture
def small(tmp_path):
    """A file of a table and a tensor, and its bytes."""
    table = ibp.compress(torch.randn(8, 16).to(torch.bfloat16), scheme="planes")
    ibp.save(tmp_path / "x.safetensors", {"t": table, "x": torch.arange(5.0)}, metadata={"who": "me"}, content=True)
    return tmp_path / "x.safetensors", (tmp_path / "x.safetensors").read_bytes()


def check_flipped(path, data, bit, commands):
    """That no reader takes a file in which a bit of the header is flipped. commands: also `ibp verify`."""
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    about = f"bit {bit % 8} of byte {bit // 8}, {data[bit // 8 - 8 : bit // 8 + 8]}"
    with pytest.raises(ibp.FileFormatError):
        pytest.fail(f"loaded {list(ibp.load(path))}, {about}")
    with pytest.raises(ibp.FileFormatError):
        pytest.fail(f"opened {list(ibp.open(path, verify=True))}, {about}")
    with pytest.raises((reference_files.Refused, ValueError, KeyError, TypeError, AttributeError)):
        reference_files.File.at(path).check()
        pytest.fail(f"read by the reference, {about}")
    try:
        assert c_files.OpenFile(bytes(flipped)).check(xxhash.xxh3_64_intdigest)[0] in WRONG_IN_C, about
    except c_files.Failed:
        pass
    if commands:
        assert main(["verify", "--content", str(path), "--quiet"]) == 1, about


WRONG_IN_C = (c_files.WRONG_CHECKSUM, c_files.BAD_FILE)


@pytest.mark.parametrize("name", NAMES_OF_IBP)
def test_a_flipped_bit_of_a_name(small, name):
    """No bit of the names by which checksums are found turns them off."""
    path, data = small
    start = data.index(name)
    for bit in range(8 * start, 8 * (start + len(name))):
        check_flipped(path, data, bit, commands=bit % 8 == 0)


@pytest.mark.slow
def test_a_flipped_bit_of_the_header(small):
    path, data = small
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    text_bytes = len(data[:header_bytes].rstrip(b" "))
    for bit in (*range(8 * text_bytes + 16), *range(8 * header_bytes - 8, 8 * header_bytes)):
        check_flipped(path, data, bit, commands=bit % 8 == 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "ibp.format",
            "hbp.format",
            "it has 'ibp.codebook.0'; wanted 'ibp.format' in its metadata beside it: the header is damaged",
        ),
        (
            '"ibp.checks":"',
            '"jbp.checks":"',
            "wanted 'ibp.checks' in its metadata beside it: .* a file of ibp has 'ibp.format'",
        ),
        (
            '"ibp.checks":{',
            '"ibq.checks":{',
            "wanted the tensor 'ibp.checks' beside it: .* a file of ibp has 'ibp.format'",
        ),
    ],
)
def test_a_name_that_is_lost(small, old, new, message):
    path, data = small
    path.write_bytes(with_header(data, header_of(data).replace(old, new)))
    for function in (ibp.open, ibp.load, functools.partial(ibp.load, verify=False)):
        with pytest.raises(ibp.FileFormatError, match=message):
            function(path)


# ---- any bytes -----------------------------------------------------------------------------------------------------


@st.composite
def changed_files(draw):
    """A golden file with some bytes changed, put in or cut out, most often in its header; and whether it is as it
    was."""
    name = draw(st.sampled_from(NAMES))
    golden = data = (FILES / f"{name}.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    text = len(data[:header].rstrip(b" "))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, draw(st.sampled_from([text, text, 8, len(golden)]))))
        new = draw(st.binary(max_size=4) | st.sampled_from([b'"', b"}", b"]", b",", b"9", b"0", b"-", b"="]))
        data = data[:at] + new + data[at + draw(st.sampled_from([len(new), len(new), len(new), 0, 1])) :]
    return data, data == golden


def read_all(path):
    """Reads all that a file has to say."""
    opened = ibp.open(path)
    for name in opened:
        try:
            value = opened[name]
            opened.info(name)
            if isinstance(value, ibp.deltas.Delta):
                value = value.table
            if isinstance(value, ibp.CompressedTensor) and value.original_bytes < 1 << 24:
                value.decompress()
        except ALLOWED as error:
            assert len(str(error)) < 2000


def check_any_bytes(path, changed):
    data, is_same = changed
    path.write_bytes(data)
    try:
        read_all(path)
        opened = ibp.open(path)
        opened.verify()
    except ibp.FileFormatError as error:
        assert not is_same and len(str(error)) < 2000
    else:
        assert is_same or not opened.has_checksums


@settings(max_examples=40, deadline=None, derandomize=True)
@given(changed=changed_files())
def test_any_bytes(tmp_path_factory, changed):
    check_any_bytes(tmp_path_factory.getbasetemp() / "any.safetensors", changed)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(changed=changed_files())
def test_more_of_any_bytes(tmp_path_factory, changed):
    check_any_bytes(tmp_path_factory.getbasetemp() / "more.safetensors", changed)
