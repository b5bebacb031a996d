"""The golden files of each format version: read by the library and by a reader in numpy, to the same bytes."""

import hashlib
import json

import pytest
import torch

import ibp
import reference_files
from golden.make_files import FILES
from helpers import assert_same_bits, bytes_of

CONTENTS = json.loads((FILES / "contents.json").read_text())
IN_SETS = "set-0000{}-of-00002.safetensors"


GENERAL = "general.safetensors"  # whose tables are coded by optional packages


def needs_packages(name):
    """Skips what reads tables whose codecs are not installed."""
    if name == GENERAL:
        pytest.importorskip("zstandard")
        pytest.importorskip("lz4.block")


def files_of(name):
    if name == "set.safetensors.index.json":
        return [FILES / IN_SETS.format(number) for number in (1, 2)]
    return [FILES / name]


def described(x):
    sha256 = hashlib.sha256(bytes_of(x).numpy().tobytes()).hexdigest()
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "sha256": sha256}


def tensor_of(value):
    table = value.table if isinstance(value, ibp.deltas.Delta) else value
    return table if isinstance(table, torch.Tensor) else table.decompress()


def test_every_file_has_contents():
    listed = {file.name for name in CONTENTS for file in files_of(name)}
    assert {path.name for path in FILES.glob("*.safetensors")} == listed


@pytest.mark.parametrize("name", CONTENTS)
def test_the_library_reads(name):
    needs_packages(name)
    opened = ibp.open(FILES / name, verify=True)
    assert {each for each in opened if each != "coded"} == CONTENTS[name].keys()
    for each, wanted in CONTENTS[name].items():
        assert described(tensor_of(opened[each])) == wanted
    loaded = ibp.load(FILES / name, names=CONTENTS[name], verify=True)
    for each, wanted in CONTENTS[name].items():
        assert described(tensor_of(loaded[each])) == wanted


@pytest.mark.parametrize("name", CONTENTS)
def test_the_reference_reads(name):
    needs_packages(name)
    files = [reference_files.File.at(path) for path in files_of(name)]
    names = {each for file in files for each in (*file.tables, *file.plain) if each != "coded"}
    assert names == CONTENTS[name].keys()
    for file in files:
        if not file.is_plain:
            file.check()
    for each, wanted in CONTENTS[name].items():
        dtype, shape, data = reference_files.decode(files, each)
        assert shape == wanted["shape"] and hashlib.sha256(data).hexdigest() == wanted["sha256"]


@pytest.mark.parametrize("name", CONTENTS)
def test_safetensors_reads(name):
    safetensors = pytest.importorskip("safetensors")
    for path in files_of(name):
        with safetensors.safe_open(path, "pt") as file:
            tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - it is no mapping
        for each, (_, _, data) in reference_files.File.at(path).tensors.items():
            assert bytes_of(tensors[each]).numpy().tobytes() == data


def test_what_is_said_of_codecs():
    opened = ibp.open(FILES / "codec.safetensors")
    with pytest.raises(ibp.FileFormatError, match="'coded' is coded by 'example_zlib', which this ibp lacks"):
        opened["coded"]
    info = opened.info("coded")
    assert (info.codec, info.scheme, info.fields["codec_level"]) == ("example_zlib", None, "6")
    assert_same_bits(opened["before"], torch.arange(10, dtype=torch.int32))


def test_mixed_files_keep_names_and_metadata():
    opened = ibp.open(FILES / "mixed.safetensors")
    assert opened.metadata == {"format": "pt", "note": 'ünï "x"\n'}
    assert opened["table"].codebook is opened["same codebook"].codebook


def test_what_the_delta_says():
    opened = ibp.open(FILES / "delta.safetensors")
    assert opened.removed == ("gone",) and isinstance(opened["w"], ibp.deltas.Delta)
    assert f"{opened['w'].base:016x}" == opened.info("w").fields["base"]
