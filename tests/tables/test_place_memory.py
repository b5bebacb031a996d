"""Places in memory that is given: their bytes are moved as one piece, and read from there."""

import copy

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding

NUM_ROWS, ROW_BYTES = 500, 256
SIZES = [{"slot_bytes": 0, "overflow_bytes": 1 << 17}, {"slot_bytes": 96, "overflow_bytes": 1 << 17}, {}]


@pytest.fixture(params=["cpu", "cuda"])
def rows(request):
    device = request.getfixturevalue("cuda") if request.param == "cuda" else "cpu"
    return embedding(NUM_ROWS, ROW_BYTES // 4).to(device)


def given_memory(codebook, device, **sizes):
    return torch.full(
        (ibp.CodedRows.memory_bytes(codebook, NUM_ROWS, **sizes),), 0xA5, dtype=torch.uint8, device=device
    )


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"slots {sizes.get('slot_bytes')}")
def test_a_copy_of_the_memory_is_read(rows, sizes):
    codebook = ibp.codecs.analyze(rows, scheme="planes")
    memory = given_memory(codebook, rows.device, **sizes)
    place = ibp.CodedRows(codebook, NUM_ROWS, buffer=memory, **sizes)
    assert place.device == rows.device
    ibp.encode_into(rows, place)
    other = ibp.CodedRows.over(memory.clone(), codebook, NUM_ROWS, **sizes)
    memory.fill_(0xA5)
    assert_same_bits(other.decode(dtype=torch.float32), rows)
    assert other.counts().lost == 0 and (other.counts().used_bytes > 0) == bool(sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"slots {sizes.get('slot_bytes')}")
def test_a_copy_has_memory_of_its_own(rows, sizes):
    place = ibp.CodedRows(ibp.codecs.analyze(rows, scheme="planes"), NUM_ROWS, device=rows.device, **sizes)
    ibp.encode_into(rows, place)
    other = copy.deepcopy(place)
    ibp.encode_into(rows.flip(0).contiguous(), other)
    assert_same_bits(place.decode(dtype=torch.float32), rows)
    assert_same_bits(other.decode(dtype=torch.float32), rows.flip(0))


def test_only_what_is_used_of_overflow_is_moved(rows):
    codebook, sizes = ibp.codecs.analyze(rows, scheme="planes"), SIZES[0]
    memory = given_memory(codebook, rows.device, **sizes)
    place = ibp.CodedRows(codebook, NUM_ROWS, buffer=memory, **sizes)
    ibp.encode_into(rows, place)
    used = place.counts().used_bytes
    moved = memory[: memory.numel() - sizes["overflow_bytes"] + used].clone()
    read = ibp.CodedRows.over(moved, codebook, NUM_ROWS, slot_bytes=0, overflow_bytes=used)
    assert_same_bits(read.decode(dtype=torch.float32), rows)
    lacking = ibp.CodedRows.over(moved[:-64], codebook, NUM_ROWS, slot_bytes=0, overflow_bytes=used - 64)
    with pytest.raises(ValueError, match="lost or is damaged"):
        lacking.decode()


def test_memory_that_cannot_be_used():
    codebook = ibp.codecs.analyze(embedding(NUM_ROWS, ROW_BYTES // 4), scheme="planes")
    memory = given_memory(codebook, "cpu", **SIZES[1])
    for wrong in (memory[:-1], memory.view(2, -1).t(), memory.float(), torch.cat([memory, memory])[1:]):
        with pytest.raises(ValueError, match="buffer"):
            ibp.CodedRows(codebook, NUM_ROWS, buffer=wrong, **SIZES[1])
    with pytest.raises(ValueError, match="a buffer is given"):
        ibp.CodedRows(codebook, NUM_ROWS, buffer=memory, memory="pinned", **SIZES[1])
    with pytest.raises(TypeError, match="buffer"):
        ibp.CodedRows(codebook, NUM_ROWS, buffer=bytes(10), **SIZES[1])


def test_host_memory(rows):
    """What spills lies in it, from its first byte on."""
    codebook = ibp.codecs.analyze(rows, scheme="planes")
    options = {"device": rows.device, "overflow_memory": "pinned", **SIZES[0]}
    memory = ibp._machine.memory.empty(SIZES[0]["overflow_bytes"] + 64, torch.device("cpu"), rows.is_cuda)
    place = ibp.CodedRows(codebook, NUM_ROWS, **options, host_buffer=memory)
    ibp.encode_into(rows, place)
    assert_same_bits(place.decode(dtype=torch.float32), rows)
    assert place.overflow.data_ptr() == memory.data_ptr() and place.overflow.numel() == SIZES[0]["overflow_bytes"]


def test_host_memory_that_cannot_be_used(rows):
    codebook = ibp.codecs.analyze(rows, scheme="planes")
    size = SIZES[0]["overflow_bytes"]
    memory = ibp._machine.memory.empty(2 * size, torch.device("cpu"), rows.is_cuda)
    wrong = {
        "has 100 bytes; wanted": memory[:100],
        r"torch.uint8 \[2, ": memory.view(2, -1),
        "strides": memory[::2],
        "torch.int8": memory.view(torch.int8),
    }
    if rows.is_cuda:
        wrong |= {"on cuda:0, strides": memory.cuda(), "is pageable": memory.clone()}
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            ibp.CodedRows(
                codebook, NUM_ROWS, device=rows.device, overflow_memory="pinned", **SIZES[0], host_buffer=given
            )
    with pytest.raises(TypeError, match="host_buffer is a list"):
        ibp.CodedRows(codebook, NUM_ROWS, device=rows.device, overflow_memory="pinned", **SIZES[0], host_buffer=[0])
    with pytest.raises(ValueError, match="host_buffer is given"):
        ibp.CodedRows(codebook, NUM_ROWS, device=rows.device, **SIZES[0], host_buffer=memory)


@pytest.mark.parametrize("shape, dtype", [((NUM_ROWS + 1, 1), torch.uint8), ((NUM_ROWS,), torch.float32)], ids=str)
def test_a_table_of_other_bytes_is_refused(shape, dtype):
    rows = torch.randn(NUM_ROWS, 64).bfloat16()
    place = ibp.CodedRows(ibp.codecs.analyze(rows, scheme="planes", device="cpu"), NUM_ROWS, device="cpu")
    with pytest.raises(ValueError, match="the table's slots is"):
        place.table(shape, dtype)
