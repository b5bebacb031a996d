"""A flipped bit of a file of ibp is found by every call that reads the file into something else."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ibp
from ibp._cli.main import main
from ibp._files import read_header
from ibp._files.reader import Checks
from ibp.checkpoints import _converting, _writing

ROOT = Path(__file__).resolve().parents[2]
SIZE = 1024  # of a weight's rows and columns, so that each weight has blocks of its own
NAMES = {"0": "packed", "1": "slots", "2": "raw", "3": "plain"}  # what each weight is in the file
PARTS = [
    "0.weight:overflow",
    "0.weight:lengths",
    "0.weight:bases",
    "1.weight:slots",
    "1.weight:overflow",
    "1.weight:lengths",
    "2.weight:slots",
    "3.weight",
    "ibp.codebook.0:entries",
]
# A table, a plain tensor and a codebook, for tests of what follows the reading of a part.
KINDS_OF_PARTS = pytest.mark.parametrize(
    "damaged", ["1.weight:slots", "3.weight", "ibp.codebook.0:entries"], indirect=True
)


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(1)
    return {f"{number}.weight": torch.randn(SIZE, SIZE, generator=generator).mul(0.02).bfloat16() for number in NAMES}


@pytest.fixture(scope="module")
def good(tmp_path_factory, weights):
    """The bytes of a file with tables of every layout and a plain tensor, and its header."""
    path = tmp_path_factory.mktemp("good") / "m.safetensors"
    packed = ibp.compress(weights["0.weight"], layout="packed", scheme="planes", device="cpu")
    book = packed.codebook
    ibp.save(
        path,
        {
            "0.weight": packed,
            "1.weight": ibp.compress(weights["1.weight"], codebook=book, slot_bytes=1344, device="cpu"),
            "2.weight": ibp.compress(weights["2.weight"], scheme="raw", device="cpu"),
            "3.weight": weights["3.weight"],
        },
    )
    return path.read_bytes(), read_header(path)


@pytest.fixture(params=PARTS)
def damaged(request, tmp_path, good, monkeypatch):
    """(The path of a file with a flipped bit in a part, the name of a tensor that the part belongs to.)"""
    monkeypatch.chdir(tmp_path)
    data, header = good
    data = bytearray(data)
    entry = header.tensors[request.param]
    is_codebook = request.param.startswith("ibp.")
    data[entry.start + (0 if entry.num_bytes < 4096 else entry.num_bytes // 2)] ^= 8
    (tmp_path / "m.safetensors").write_bytes(data)
    return "m.safetensors", "0.weight" if is_codebook else request.param.partition(":")[0]


def net():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in NAMES)).eval()


def read(path, verify=True):
    with ibp.checkpoints.open(path, verify=verify) as source:
        return {name: tensor.tensor() for name, tensor in source.tensors.items()}


def tables(path, verify=True):
    with ibp.checkpoints.open(path, verify=verify) as source:
        return {name: t.tensor() if t.table is None else t.table for name, t in source.tensors.items()}


def plain(path, verify=True):
    with ibp.open(path, verify=verify) as file:
        return {name: file.get_tensor(name) for name in file}


DOORS = {
    "load": lambda path, **options: ibp.load(path, memory="host", **options),
    "get_tensor": plain,
    "decompress": lambda path, **options: ibp.checkpoints.decompress(path, "out.safetensors", **options),
    "compress": lambda path, **options: ibp.checkpoints.compress(path, "out.safetensors", device="cpu", **options),
    "compress raw": lambda path, **options: ibp.checkpoints.compress(
        path, "out.safetensors", scheme="raw", device="cpu", **options
    ),
    "read": read,
    "table": tables,
    "offload": lambda path, **options: ibp.offload(net(), "cpu", checkpoint=path, **options),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_flipped_bit_is_found(door, damaged):
    path, name = damaged
    with pytest.raises(ibp.ChecksumError) as caught:
        DOORS[door](path)
    assert str(caught.value).startswith(f"{path}: block ") and repr(name) in str(caught.value)
    assert os.listdir() == [path]


@KINDS_OF_PARTS
@pytest.mark.parametrize("door", DOORS)
def test_verify_is_an_option(door, damaged):
    """What is damaged may still be an error of the decoder, which finds most of it."""
    path, name = damaged
    try:
        DOORS[door](path, verify=False)
    except (ibp.CorruptTableError, ibp.FileFormatError) as error:
        assert not isinstance(error, ibp.ChecksumError) and name != "3.weight"


@pytest.mark.parametrize("door", DOORS)
def test_good_files_are_read(door, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.safetensors").write_bytes(good[0])
    DOORS[door]("m.safetensors")


CALLS = {
    "compress": lambda **options: ibp.checkpoints.compress("m.safetensors", "out.safetensors", device="cpu", **options),
    "decompress": lambda **options: ibp.checkpoints.decompress("m.safetensors", "out.safetensors", **options),
}


@pytest.fixture
def of_plain(tmp_path, good, monkeypatch):
    """A file with a flipped bit of a plain tensor, which only its checksum shows."""
    monkeypatch.chdir(tmp_path)
    data, header = bytearray(good[0]), good[1]
    data[header.tensors["3.weight"].start] ^= 1
    (tmp_path / "m.safetensors").write_bytes(data)


@pytest.mark.parametrize("call", CALLS)
def test_what_verifies_the_inputs(call, of_plain):
    """Under its name and its former name, which counts if both are given."""
    for options in ({}, {"verify_inputs": True}, {"verify": True}, {"verify_inputs": False, "verify": True}):
        with pytest.raises(ibp.ChecksumError, match=r"^m.safetensors: block .*'3.weight'"):
            CALLS[call](**options)
        assert os.listdir() == ["m.safetensors"]
    for options in ({"verify_inputs": False}, {"verify": False}, {"verify_inputs": True, "verify": False}):
        CALLS[call](force=True, **options)
        assert len(ibp.load("out.safetensors", memory="host")) == len(NAMES)


def test_commands_verify_inputs_by_these_words(of_plain, capsys):
    for command in ("compress", "decompress"):
        words = [command, "m.safetensors", "-o", "out.safetensors", "--force"]
        assert main(words) == 1 and "'3.weight'" in capsys.readouterr().err
        assert main([*words, "--no-verify-inputs"]) == 0
    assert main([*words, "--no-verify"]) == 0
    assert main(["compress", *words[1:], "--no-verify"]) == 1  # which is about the output there


def flip(monkeypatch):
    """Makes writers flip a bit of what they write."""
    write = os.pwrite

    def flipped(file, data, at):
        changed = bytearray(data)
        if at and changed:
            changed[len(changed) // 2] ^= 1
        return write(file, changed, at)

    monkeypatch.setattr(os, "pwrite", flipped)


def mix_up(monkeypatch):
    """Makes tables have other fingerprints than their tensors."""
    finished = _writing.finished
    monkeypatch.setattr(_writing, "finished", lambda *arguments: finished(*arguments) ^ 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"), [(flip, "has another checksum"), (mix_up, "decodes to other bytes than were compressed")]
)
@pytest.mark.parametrize("shard_bytes", [None, 3 << 20])
def test_what_verifies_the_output(fault, message, shard_bytes, good, tmp_path, monkeypatch, capsys):
    """Without it a faulty disk or coder passes in silence; with it the output stays, to be looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.safetensors").write_bytes(good[0])
    options = {"shard_bytes": shard_bytes, "force": True}
    report = CALLS["compress"](verify_output=True, **options)
    fault(monkeypatch)
    CALLS["compress"](**options)
    with pytest.raises(ibp.ChecksumError, match=message):
        CALLS["compress"](verify_output=True, **options)
    assert os.path.exists(report.path)
    words = ["compress", "m.safetensors", "-o", "out.safetensors", "--force", "--device", "cpu"]
    words += [] if shard_bytes is None else ["--shard-bytes", "3M"]
    for more, status in ([], 0), (["--verify-output"], 1), (["--verify"], 1), (["--verify", "--no-verify-output"], 0):
        assert main([*words, *more]) == status
        assert (message in capsys.readouterr().err) == bool(status)


@pytest.mark.parametrize("word", ["--verify-output", "--verify"])
def test_a_verified_output_is_said(word, good, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.safetensors").write_bytes(good[0])
    assert main(["compress", "m.safetensors", "-o", "out.safetensors", "--device", "cpu", word]) == 0
    assert capsys.readouterr().out.endswith(" were read again, and every tensor is what it was.\n")


COMMANDS = [
    "compress m.safetensors -o out.safetensors --device cpu",
    "decompress m.safetensors -o out.safetensors",
    "diff m.safetensors good.safetensors --device cpu",
    "diff good.safetensors m.safetensors -o out.safetensors --device cpu",
    "apply m.safetensors delta.safetensors -o out.safetensors --device cpu",
]


@KINDS_OF_PARTS
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_find_a_flipped_bit(command, damaged, good, tmp_path, capsys):
    path, name = damaged
    (tmp_path / "good.safetensors").write_bytes(good[0])
    ibp.save("delta.safetensors", ibp.deltas.CheckpointDelta({}, []))
    before = sorted(os.listdir())
    assert main([*command.split(), "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"ibp {command.partition(' ')[0]}: {path}: block \d+, .*{name!r}.*", line), line
    assert sorted(os.listdir()) == before


ROW_BYTES, BLOCK_BYTES = 2048, 1 << 20  # of the tables below, and of a block with a checksum


@pytest.mark.parametrize("layout", ["packed", "slots", "raw", "plain"])
def test_ranges_are_compared_in_the_blocks_that_hold_them(layout, tmp_path):
    """Each flipped block is found by the reads of the rows in it, and by no others."""
    path, x = tmp_path / "m.safetensors", torch.randn(5000, ROW_BYTES // 2).bfloat16()
    kinds = {"packed": {"layout": "packed"}, "slots": {"slot_bytes": 1344}, "raw": {"scheme": "raw"}}
    ibp.save(path, {"x": x if layout == "plain" else ibp.compress(x, device="cpu", **kinds[layout])})
    good, header = path.read_bytes(), read_header(path)
    part = {"packed": "x:overflow", "slots": "x:slots", "raw": "x:slots", "plain": "x"}[layout]
    entry = header.tensors[part]
    num_blocks = entry.num_bytes // BLOCK_BYTES  # the last ones also hold the index
    assert num_blocks >= 6
    for block in range(1, num_blocks - 1):
        data = bytearray(good)
        data[header.num_bytes + block * BLOCK_BYTES + 5] ^= 1
        path.write_bytes(data)
        with ibp.checkpoints.open(path, verify=True) as source:
            tensor, failed = source.tensors["x"], []
            for first in range(0, 5000 - 200, 200):
                try:
                    found = tensor.read(first * ROW_BYTES, (first + 200) * ROW_BYTES)
                    assert torch.equal(torch.from_numpy(found).view(x.dtype).view(200, -1), x[first : first + 200])
                except ibp.ChecksumError:
                    failed.append(first)
        share = [BLOCK_BYTES * at / entry.num_bytes * 5000 for at in (block, block + 1)]
        assert failed == list(range(failed[0], failed[-1] + 1, 200))
        assert share[0] - 300 <= failed[0] <= share[0] + 300 and share[1] - 300 <= failed[-1] + 200 <= share[1] + 300


def test_blocks_are_compared_once(good, tmp_path, monkeypatch):
    """Several threads may compare a block in which their ranges meet at the same time."""
    path, compared, compare = tmp_path / "m.safetensors", [], Checks._compare
    path.write_bytes(good[0])
    monkeypatch.setattr(Checks, "_compare", lambda self, *block: (compared.append(block[0]), compare(self, *block)))
    monkeypatch.setattr(_converting, "BLOCK_BYTES", 300_000)
    every = list(range(-(-(len(good[0]) - good[1].num_bytes - 100) // BLOCK_BYTES)))
    for num_threads in (1, 4):
        compared.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
        ibp.checkpoints.decompress(path, tmp_path / f"out{num_threads}.safetensors")
        assert sorted(compared if num_threads == 1 else set(compared)) == every


@pytest.mark.parametrize("row_bytes", [4096, 3000, 65536])
def test_blocks_are_decoded_by_one_thread_each(row_bytes, tmp_path, monkeypatch):
    """No call decodes so many rows that the operation would use several threads."""
    (least,) = re.findall(r"kLeastSharedBytes = 1 << (\d+);", (ROOT / "csrc/bindings/torch_tensors.h").read_text())
    x, calls, decode = torch.randn(700_001).bfloat16(), [], torch.ops.ibp.decode_bytes.default
    ibp.save(tmp_path / "m.safetensors", {"x": ibp.compress(x, row_bytes=row_bytes, device="cpu")})

    def noting(table, start, end, *others):
        calls.append((start, end))
        decode(table, start, end, *others)

    monkeypatch.setattr(torch.ops.ibp.decode_bytes, "default", noting)
    with ibp.checkpoints.open(tmp_path / "m.safetensors") as source:
        for start, end in [(0, x.nbytes), (1234, 1_300_000), (5, 6)]:
            calls.clear()
            found = torch.from_numpy(source.tensors["x"].read(start, end))
            assert torch.equal(found, x.view(torch.uint8)[start:end])
            starts, ends = zip(*calls)
            assert (starts[0], ends[-1]) == (start, end) and starts[1:] == ends[:-1]
            rows = [(last - 1) // row_bytes - first // row_bytes + 1 for first, last in calls]
            assert max(rows) <= (1 << int(least)) // row_bytes


def test_no_file_of_a_set_appears(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = {name: torch.randn(512, SIZE).bfloat16() for name in "abcd"}
    ibp.save("m.safetensors", {name: ibp.compress(x, device="cpu") for name, x in weights.items()}, shard_bytes=900_000)
    files = sorted(os.listdir())
    assert len(files) == 5  # the index is one of them
    data = bytearray(open(files[2], "rb").read())
    data[read_header(tmp_path / files[2]).num_bytes + 5000] ^= 1
    (tmp_path / files[2]).write_bytes(data)
    with pytest.raises(ibp.ChecksumError, match=f"{files[2]}: block 0, .* is damaged; 'c' was being read"):
        ibp.checkpoints.decompress("m.safetensors.index.json", "out.safetensors")
    assert sorted(os.listdir()) == files


@pytest.mark.parametrize("verify", [True, False])
def test_a_changed_table_is_read(verify, tmp_path):
    """Rows with bases of their own lie anywhere in the overflow."""
    x = torch.randn(300, 256).bfloat16()
    table = ibp.compress(x, scheme="planes", slot_bytes=256, device="cpu")
    table.update_(torch.tensor([7, 200]), torch.randn(2, 256).bfloat16())
    ibp.save(tmp_path / "m.safetensors", {"x": table})
    assert torch.equal(read(tmp_path / "m.safetensors", verify)["x"], table.decompress())
