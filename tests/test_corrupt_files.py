"""Files that contradict themselves are refused with a sentence; checksums find every change."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ibp
from golden.corrupt_files import CASES, OF_CHECKSUMS, OF_TABLES
from golden.make_files import FILES

NAMES = ["raw", "masks", "planes", "clusters", "changed", "mixed", "delta", "codec", "foreign"]
ALLOWED = (ibp.FileFormatError, ibp.CorruptTableError)


@pytest.mark.parametrize("name", CASES)
def test_refused(tmp_path, name):
    case, path = CASES[name], tmp_path / "x.safetensors"
    path.write_bytes(case.bytes())
    assert path.read_bytes() != (FILES / case.file).read_bytes()
    if case.tensor is None:
        for function in (ibp.open, ibp.load):
            with pytest.raises(ibp.FileFormatError, match=case.message):
                function(path)
        return
    opened = ibp.open(path)
    with pytest.raises(ibp.FileFormatError, match=case.message) as refusal:
        opened[case.tensor]
    assert "\n" not in str(refusal.value)
    with pytest.raises(ibp.FileFormatError, match=case.message):
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
        ibp.load(path, verify=True)
    with pytest.raises(ibp.FileFormatError, match=case.message):
        ibp.open(path).verify()
    if case.tensor is not None:
        opened = ibp.open(path, verify=True)
        with pytest.raises(ibp.ChecksumError, match=case.message):
            opened[case.tensor]


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
            if isinstance(value, ibp.Delta):
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
