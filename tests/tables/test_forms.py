"""Where coded rows lie in one piece of memory (ibp/_rows/forms.py), and how many bytes messages take by it."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import ibp
from helpers import embedding
from ibp._rows import forms

SIZES = st.integers(0, 5000)


def up(number, unit):
    return -(-number // unit) * unit


def head_of(memory):
    return forms.head_of(memory[: forms.HEAD_BYTES].view(torch.int64))


@hypothesis.given(st.integers(0, 500), st.sampled_from([0, 32, 96, 256]), SIZES)
def test_parts_follow_each_other(num_rows, slot_bytes, overflow_bytes):
    packed = forms.packed(num_rows, overflow_bytes)
    fixed = forms.fixed(num_rows, 256, slot_bytes, overflow_bytes)
    for form in (packed, fixed):
        end = forms.HEAD_BYTES
        for name, part in form._asdict().items():
            gap = part.start - end
            assert 0 <= gap < forms.ALIGNMENT and (gap == 0 or name in ("slots", "overflow"))
            end = part.stop
        assert form.bases.start % 8 == form.rooms.start % 2 == form.lengths.start % 2 == 0
        assert form.slots.start % forms.ALIGNMENT == form.overflow.start % forms.ALIGNMENT == 0
        assert form.lengths.stop - form.lengths.start == 2 * num_rows
    assert packed.rooms.start == packed.rooms.stop and packed.slots.start == packed.slots.stop
    assert fixed.slots.stop - fixed.slots.start == num_rows * slot_bytes
    assert (fixed.overflow.stop - fixed.overflow.start) == (0 if slot_bytes == 256 else overflow_bytes)


@pytest.mark.parametrize("sizes", [{"slot_bytes": 0, "overflow_bytes": 1 << 17}, {}], ids=["overflow", "slots"])
def test_the_parts_of_rows_in_a_buffer(sizes):
    x = embedding(500, 64)
    codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
    memory = torch.zeros(ibp.CodedRows.memory_bytes(codebook, 500, **sizes), dtype=torch.uint8)
    place = ibp.CodedRows(codebook, 500, buffer=memory, **sizes)
    ibp.encode_into(x, place)
    form = forms.fixed(500, 256, sizes.get("slot_bytes", 256), sizes.get("overflow_bytes", 0))
    head = head_of(memory)
    assert forms.used_bytes(memory) == int(head.used) == place.counts().used_bytes
    assert head.counts.tolist() == list(place.counts()[:2]) and int(head.note) == 0
    lengths = memory[form.lengths].view(torch.int16)
    assert torch.equal(lengths, place.lengths.view(torch.int16)) and lengths.any()
    assert torch.equal(memory[form.bases].view(torch.int64), place.bases)
    assert torch.equal(memory[form.overflow], place.overflow)


def test_the_note_of_a_head_stays():
    x = embedding(500, 64)
    codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
    sizes = {"slot_bytes": 0, "overflow_bytes": 1 << 10}  # too few: rows are lost
    memory = torch.zeros(ibp.CodedRows.memory_bytes(codebook, 500, **sizes), dtype=torch.uint8)
    place = ibp.CodedRows(codebook, 500, buffer=memory, **sizes)
    head_of(memory).note.fill_(7)
    ibp.encode_into(x, place)
    assert place.counts().lost > 0 and head_of(memory).note.tolist() == [7]


def test_pieces_are_packed():
    """The operations that code and decode one piece lay it out by the packed form."""
    x = embedding(500, 64)
    data, codebook = x.view(torch.uint8).view(-1), ibp.codecs.analyze(x, scheme="planes", device="cpu")
    words, form = codebook.words("cpu"), forms.packed(500, 500 * 256)
    memory = torch.full((form.overflow.stop,), 0xA5, dtype=torch.uint8)
    torch.ops.ibp.encode_piece(data, words, codebook.codec, form.overflow.start, 0, memory)
    head, wanted = head_of(memory), torch.ops.ibp.measure_rows(data, words, codebook.codec)
    lengths = memory[form.lengths].view(torch.int16)
    assert torch.equal(lengths, wanted.view(torch.int16)) and head.note.tolist() == [0] and not head.fault.any()
    has_bytes, sizes = (lengths != 256).tolist(), [up(length or 256, 32) for length in lengths.tolist()]
    ends = itertools.accumulate(size for size, has in zip(sizes, has_bytes) if has)
    bases = memory[form.bases].view(torch.int64).tolist()
    found = sorted((base, size) for base, size, has in zip(bases, sizes, has_bytes) if has)
    assert [base + size for base, size in found] == list(ends)
    assert forms.used_bytes(memory) == sum(size for _, size in found) and head.counts.tolist() == [len(found), 0]


# ---- bytes of messages ----


@pytest.mark.parametrize("num_rows", [1, 7, 100, 4097])
def test_messages_of_collectives(num_rows):
    """They take no more bytes than their parts do at multiples of 64."""
    codec = ibp.distributed.Codec.learn(torch.randn(1000, 1024))
    sizes = codec.sizes(num_rows)
    parts = (64, 2 * num_rows, 8 * num_rows, 2 * num_rows, num_rows * sizes["slot_bytes"], sizes["overflow_bytes"])
    assert codec.message_bytes(num_rows) <= sum(up(part, 64) for part in parts)


@pytest.mark.parametrize("blocks", [[3], [3, 5, 9, 11, 30]])
def test_messages_of_pages(blocks):
    """They take a head, 10 bytes a row, and the rows in whole sectors."""
    kv = torch.randn(64, 16, 8, 64).bfloat16()
    codec = ibp.kv.PageCodec.learn(kv)
    _, used = ibp.kv.pack(kv, codec, blocks=blocks)
    table = ibp.compress(kv[blocks], codebook=codec.codebook, layout="packed", device="cpu")
    num_rows, lengths = table.num_rows, table.lengths.tolist()
    rows_bytes = sum(up(length or table.row_bytes, 32) for length in lengths)
    assert int(used) == up(64 + 10 * num_rows, 64) + rows_bytes


@pytest.mark.parametrize("percent", [1, 4, 10])
def test_messages_of_changes(percent):
    """Besides their heads they take no more bytes than the parts of the tables do at multiples of 16."""
    torch.manual_seed(percent)
    old = torch.randn(512, 640).bfloat16()
    new = old.clone()
    new.view(torch.int16)[torch.rand(new.shape) < percent / 100] += 1
    (message,) = ibp.deltas.Sender({"w": old}).push({"w": new})
    table = ibp.deltas.make(new, old, device="cpu").table
    head_bytes, num_bytes = message[8:24].view(torch.int64).tolist()
    assert message.numel() == 32 + up(head_bytes, 16) + num_bytes
    assert num_bytes <= sum(up(part.nbytes, 16) for part in (table.slots, table.overflow, table.lengths, table.bases))
    assert num_bytes < (0.02 + percent / 100) * new.nbytes
