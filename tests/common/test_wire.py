"""What processes tell each other: values come back, and bytes of a hostile peer are refused and run nothing."""

import dataclasses
import math
import os
import pickle
import random

import numpy as np
import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding, spiky_rows
from ibp._common import wire
from ibp._common.wire import RankGroup
from ibp.deltas._messages import ChangeHead, Region
from ibp.distributed import _links
from ranks import Ranks

KIND = _links.Kind("send", 1 << 20, torch.bfloat16, "cpu", "default", "grads", None)


@pytest.fixture(scope="module")
def codebooks():
    found = [ibp.codecs.analyze(spiky_rows(500, 60)), ibp.compress(embedding(500, 64), memory="host").codebook]
    return [*found, ibp.compress(embedding(500, 64), clusters=2, scheme="planes", memory="host").codebook]


@pytest.fixture
def bomb(tmp_path):
    """(a pickle that makes a directory where it is read, whether it has)"""
    path = tmp_path / "made by a pickle"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(path),)

    return pickle.dumps(Bomb()), path.exists


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.end()


def test_values_come_back(codebooks):
    value = {
        "none": None,
        "numbers": [True, 5, -(2**70), 0.1, math.inf, np.int64(3), np.float32(0.5)],
        7: ("text ü", b"\x00bytes", (), [], {}),
        "torch": (torch.bfloat16, torch.device("cuda", 1), torch.Size([3, 4])),
        "kind": KIND,
        "codebooks": codebooks,
    }
    found = wire.read(wire.written(value))
    assert found == value and [type(held) for held in found[7]] == [str, bytes, tuple, list, dict]
    assert type(found["torch"][2]) is torch.Size and type(found["kind"]) is _links.Kind
    codec = ibp.distributed.Codec.learn(torch.randn(1 << 20).bfloat16())
    assert wire.read(wire.written(codec)).fingerprint == codec.fingerprint


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.float64]
)
def test_tensors_come_back(dtype):
    for x in (
        torch.arange(24).view(2, 3, 4).to(dtype)[:, :, ::2],
        torch.zeros(3, 0, 5, dtype=dtype),
        torch.ones((), dtype=dtype),
    ):
        found = wire.read(wire.written([b"odd", x]))[1]
        assert found.is_contiguous() and not found.requires_grad
        assert_same_bits(found, x)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("rows", "text", "rows of a Region is a str; wanted <class 'bytes'>"),
        ("dtype", None, "dtype of a Region is a NoneType"),
        ("change", 3, "change of a Region is a int; wanted ibp.deltas._messages.ChangeHead | None"),
        ("shape", (3,), "shape of a ChangeHead is a tuple"),
        ("fields", {7: "raw"}, r"fields of a ChangeHead is a dict; wanted dict\[str, typing.Any\] | None"),
        ("fingerprints", (1, 2, 3), r"fingerprints of a ChangeHead is a tuple; wanted tuple\[int, int\]"),
        ("sizes", (1, "2"), r"sizes of a ChangeHead is a tuple; wanted tuple\[int, ...\]"),
    ],
)
def test_fields_that_are_not_what_they_are_said_to_be(field, value, wanted):
    head = ChangeHead(torch.Size([3]), torch.int8, {"scheme": "raw"}, (1, 2), (3, 4))
    region = Region(b"rows", torch.int8, 5, head)
    assert wire.read(wire.written(region)) == region
    assert wire.read(wire.written(region._replace(change=None))).change is None
    other = region._replace(**{field: value}) if field in Region._fields else None
    with pytest.raises(ValueError, match=wanted):
        wire.read(wire.written(other or region._replace(change=head._replace(**{field: value}))))


def test_what_cannot_be_sent():
    for value in (object(), {1, 2}, [lambda: 1], dataclasses.make_dataclass("Codec", ["codebook"])(1)):
        with pytest.raises(TypeError, match="cannot be sent to other processes"):
            wire.written(value)


def test_damaged_messages(codebooks):
    """Of any bytes a value, or ValueError."""
    generator = random.Random(0)
    whole = wire.written([KIND, codebooks[1], torch.arange(9), b"bytes", {"a": (1, None)}])
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged) if generator.random() < 0.3 else 400)] = generator.randrange(256)
        try:
            wire.read(bytes(damaged[: generator.choice([len(damaged), generator.randrange(len(damaged))])]))
        except ValueError as error:
            assert "no message of ibp's" in str(error)


@pytest.mark.parametrize(
    "text, words",
    [
        ('["object", "Popen", ["true"]]', "'Popen' is no class"),
        ('["dtype", "load"]', "'load' is no dtype"),
        ('["run", "true"]', "is no value"),
        ('{"a": 1}', "is no value"),
        ("[" * 100_000, "no message"),
        ('["bytes", 99]', "99 bytes are wanted; 3 are there"),
        ('["tensor", "float32", [1], 3]', "no message"),
        ('["tensor", "uint8", [4611686018427387904, 4], 3]', "no message"),
        ('["dict", [[["list", []], 1]]]', "unhashable"),
        ('["object", "Kind", ["list", []]]', "no message"),
        ("1", "3 bytes too many"),
    ],
)
def test_messages_that_are_made_up(text, words):
    content = len(text).to_bytes(8, "little") + text.encode() + b"abc"
    with pytest.raises(ValueError, match=words):
        wire.read(content)


# ---- who reads what a peer has sent ----


def test_a_pickle_is_no_message(bomb):
    content, has_run = bomb
    with pytest.raises(ValueError, match="no message of ibp's"):
        wire.read(content)
    assert not has_run()


def test_a_pickle_in_a_handle(bomb):
    content, has_run = bomb
    handle = ibp.compress(embedding(500, 64), memory="host").share()
    for wrong in (dict(_fields=content), dict(_tensors=content), dict(num_bytes=0, _tensors=content)):
        with pytest.raises(ValueError, match="no message of ibp's"):
            ibp.distributed.open_shared(dataclasses.replace(handle, **wrong))
    for wrong in (dict(_tensors=wire.written({})), dict(num_bytes=0, _fields=wire.written([1]))):
        with pytest.raises(ValueError, match="handle has"):
            ibp.distributed.open_shared(dataclasses.replace(handle, **wrong))
    assert not has_run()


def test_a_pickle_in_a_note(bomb):
    """That says how tensors travel which one rank sends another."""
    content, has_run = bomb
    note = _links.note_of(KIND, None)
    assert _links.codec_in(note, KIND) is None
    for wrong in (content, wire.written(5), wire.written((1, None)), wire.written((KIND, KIND))):
        note[:8].view(torch.int64).fill_(len(wrong))
        note[8 : 8 + len(wrong)] = torch.frombuffer(bytearray(wrong), dtype=torch.uint8)
        with pytest.raises(ValueError, match="no message of ibp's|no note|wanted a codec"):
            _links.codec_in(note, KIND)
    assert not has_run()


def _hostile(rank, content):
    """Rank 1 sends something else than it should in a call of rank 0."""
    if rank == 1:
        return len(RankGroup(None).gather(content)) == 2
    try:
        ibp.distributed.share_table(ibp.compress(embedding(500, 64), memory="host"))
    except ValueError as error:
        return str(error)


def test_a_pickle_from_another_rank(ranks, bomb):
    content, has_run = bomb
    message, sent = ranks(_hostile, content)
    assert sent and "share_table: what rank 1 of the group has sent cannot be read" in message
    assert not has_run()


def test_no_peer_is_read_by_pickle():
    """No module of the package reads pickles, or calls what does."""
    from pathlib import Path

    for path in Path(ibp.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "pickle.loads", "all_gather_object", "broadcast_object_list(", "recv_object"):
            assert word not in text, f"{path}: {word}"
