"""Coding into places on the GPU (ibp.encode_into): what is read back is what was coded, whatever the source, the ids
and the memory.
"""

import numpy as np
import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding

ROW_BYTES, NUM_ROWS = 256, 3000


@pytest.fixture(scope="module")
def rows(cuda):
    return embedding(NUM_ROWS, ROW_BYTES // 4).to(cuda)


@pytest.fixture(scope="module")
def codebook(rows):
    return ibp.codecs.analyze(rows, scheme="planes")


def place_of(codebook, num_rows=NUM_ROWS, **options):
    options = {"slot_bytes": 192, "overflow_bytes": num_rows * ROW_BYTES} | options
    return ibp.CodedRows(codebook, num_rows, **options)


def assert_holds(place, rows):
    place.check()
    assert_same_bits(place.decode(dtype=torch.float32), rows)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("slot_bytes", [0, 96, 192, ROW_BYTES])
@pytest.mark.parametrize("max_sms", [None, 1, 7])
def test_rows_come_back(rows, codebook, slot_bytes, pinned, max_sms):
    place = place_of(codebook, slot_bytes=slot_bytes, memory="pinned" if pinned else "device")
    ibp.encode_into(rows, place, max_sms=max_sms)
    assert_holds(place, rows)
    counts = place.counts()
    assert counts.lost == 0 and (counts.spilled == 0) == (slot_bytes == ROW_BYTES)
    assert (counts.used_bytes == 0) == (counts.spilled == 0)


def normal(num_rows, columns):
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(columns))


LONG_ROWS = {  # kinds of encoders: makers of rows, and the level
    "BF16": (lambda n, size: normal(n, size // 2).bfloat16(), "default"),
    "BF16, fast": (lambda n, size: normal(n, size // 2).bfloat16(), "fast"),
    "BF16, half zeros": (lambda n, size: normal(n, size // 2).relu().bfloat16(), "default"),
    "FP32": (lambda n, size: normal(n, size // 4), "default"),
    "int64": (lambda n, size: (normal(n, size // 8) * 100_000).long().abs(), "default"),
    "uint8": (lambda n, size: (normal(n, size) * 3).abs().byte(), "default"),
}


@pytest.mark.parametrize("max_sms", [None, 3])
@pytest.mark.parametrize("row_bytes", [4112, 8192, 8208])
@pytest.mark.parametrize("kind", LONG_ROWS)
def test_long_rows(cuda, kind, row_bytes, max_sms):
    make, level = LONG_ROWS[kind]
    x = make(300, row_bytes)
    codebook = ibp.codecs.analyze(x, scheme="planes", level=level, row_bytes=row_bytes)
    lengths = []
    for device in (torch.device("cpu"), cuda):
        place = ibp.CodedRows(codebook, len(x), slot_bytes=2048, overflow_bytes=len(x) * row_bytes, device=device)
        rows = x.to(device)
        ibp.encode_into(rows, place, max_sms=max_sms)
        place.check()
        assert_same_bits(place.decode(dtype=x.dtype), rows)
        lengths.append(place.table(x.shape, x.dtype).lengths.cpu())
    assert_same_bits(*lengths)
    assert place.counts().lost == 0


def test_a_place_is_a_table(rows, codebook):
    place = place_of(codebook)
    ibp.encode_into(rows, place)
    table = place.table((NUM_ROWS, ROW_BYTES // 4), torch.float32)
    ids = torch.tensor([5, 0, NUM_ROWS - 1, 5], device=rows.device)
    assert_same_bits(ibp.index_select(table, ids), rows[ids])
    ibp.encode_into(rows[:1], place, first_row=7)
    assert_same_bits(ibp.index_select(table, ids + 2)[:1], rows[:1])


def test_rows_that_were_never_coded_are_default_rows(rows, codebook):
    place = place_of(codebook)
    ibp.encode_into(rows[10:20], place, first_row=10)
    wanted = torch.zeros_like(rows)
    wanted[10:20] = rows[10:20]
    assert_holds(place, wanted)


def test_ids(rows, codebook):
    place, wanted = place_of(codebook), torch.zeros_like(rows)
    for seed in range(5):
        ids = torch.from_numpy(np.random.default_rng(seed).permutation(NUM_ROWS)[:1000]).to(rows.device)
        source = rows.roll(seed, 0)[:1000]
        ibp.encode_into(source, place, ids)
        wanted[ids] = source
    assert_holds(place, wanted)


def test_ids_outside_are_noted(rows, codebook):
    place, wanted = place_of(codebook), torch.zeros_like(rows)
    ids = torch.tensor([3, NUM_ROWS, 4, -1], device=rows.device)
    ibp.encode_into(rows[:4], place, ids)
    with pytest.raises(IndexError, match="3000"):
        place.check()
    wanted[3], wanted[4] = rows[0], rows[2]
    assert_holds(place, wanted)


def test_equal_ids_harm_no_other_row(rows, codebook):
    place = place_of(codebook)
    ibp.encode_into(rows, place)
    ids = torch.full((NUM_ROWS,), 17, device=rows.device)
    ibp.encode_into(rows.roll(3, 0), place, ids)
    place.fault.zero_()
    met = place.decode(dtype=torch.float32)
    others = torch.arange(NUM_ROWS, device=rows.device) != 17
    assert_same_bits(met[others], rows[others])
    assert (met[17] == rows).all(1).any()


def test_rows_grow_in_place(rows, codebook):
    """Rows that change to and fro never take more than two parts each."""
    noise = torch.randint(0, 256, (NUM_ROWS, ROW_BYTES), dtype=torch.uint8, device=rows.device).view(torch.float32)
    place = place_of(codebook, slot_bytes=96, overflow_bytes=2 * NUM_ROWS * ROW_BYTES)
    for source in (rows, noise, rows, noise, rows, noise):
        ibp.encode_into(source, place)
        assert_holds(place, source)
    assert place.counts().lost == 0


@pytest.mark.parametrize("overflow_bytes", [0, 32, 10_000])
def test_a_full_overflow_loses_rows_and_counts_them(rows, codebook, overflow_bytes):
    place = place_of(codebook, slot_bytes=96, overflow_bytes=overflow_bytes)
    ibp.encode_into(rows, place)
    counts = place.counts()
    lost = place.bases == -1
    assert counts.lost == int(lost.sum()) > 0 and counts.used_bytes <= overflow_bytes
    kept = torch.nonzero(~lost).view(-1)
    if len(kept):
        assert_same_bits(place.decode(kept, torch.float32), rows[kept])
    with pytest.raises(ValueError, match="lost"):
        place.decode(torch.nonzero(lost).view(-1)[:1])


def strided_sources(device):
    """Tensors [rows of 64 floats in some dimensions], and their rows in order."""
    cache = embedding(2 * 3 * 40, 64).to(device).view(2, 3, 40, 64)
    yield cache[:, :, 5:25]
    yield cache[:, 1]
    yield cache.transpose(1, 2)[:, 1:]
    yield cache[..., 4:30, :].transpose(0, 1)
    image = embedding(2 * 64 * 5, 7).to(device).view(2, 64, 5, 7)
    yield image.to(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    yield cache.view(torch.int16)[:, :, ::2]


def test_strided_sources(cuda, codebook):
    for x in strided_sources(cuda):
        wanted = x.contiguous().view(torch.float32).reshape(-1, ROW_BYTES // 4)
        place = place_of(codebook, len(wanted))
        ibp.encode_into(x, place)
        assert_holds(place, wanted)


def test_channels_last_is_coded_in_memory_order(cuda, codebook):
    x = embedding(2 * 64 * 5, 7).to(cuda).view(2, 64, 5, 7).to(memory_format=torch.channels_last)
    wanted = x.permute(0, 2, 3, 1).reshape(-1, 64)
    place = place_of(codebook, len(wanted))
    ibp.encode_into(x, place)
    assert_holds(place, wanted)


def test_many_buffers(rows, codebook):
    pages = [page.clone() for page in rows.view(100, 30, -1)]
    place = place_of(codebook)
    ibp.encode_into(ibp.Buffers(pages), place)
    assert_holds(place, rows)
    ibp.encode_into(pages[::-1], place)
    assert_holds(place, rows.view(100, 30, -1).flip(0).reshape(NUM_ROWS, -1))
    slices = [page[3:20:2] for page in pages]
    ids = torch.arange(100 * 9, device=rows.device) * 3
    ibp.encode_into(slices, place, ids)
    place.check()
    assert_same_bits(place.decode(ids, torch.float32), torch.cat(slices))


def test_a_short_last_row(rows, codebook):
    flat = rows.view(-1)[: 10 * ROW_BYTES // 4 + 5]
    place, wanted = place_of(codebook, 11), torch.zeros(11, ROW_BYTES // 4, device=rows.device)
    ibp.encode_into(flat, place)
    wanted.view(-1)[: len(flat)] = flat
    assert_holds(place, wanted)


def test_unaligned_sources(rows, codebook):
    data = rows.view(torch.uint8).view(-1)
    for shift in (1, 2, 4, 8, 15):
        memory = torch.empty(100 * ROW_BYTES + 32, dtype=torch.uint8, device=rows.device)
        source = memory[shift : shift + 100 * ROW_BYTES].copy_(data[: 100 * ROW_BYTES])
        place = place_of(codebook, 100)
        ibp.encode_into(source, place)
        assert_holds(place, rows[:100])


def test_graphs(rows, codebook):
    place, x = place_of(codebook), rows.clone()
    ibp.encode_into(x, place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.encode_into(x, place)
    for shift in range(3):
        x.copy_(rows.roll(shift, 0))
        place.clear()
        graph.replay()
        assert_holds(place, x)


def test_on_another_stream(rows, codebook):
    place, stream = place_of(codebook), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ibp.encode_into(rows, place)
    torch.cuda.current_stream().wait_stream(stream)
    assert_holds(place, rows)


def test_garbage_in_the_index_does_no_harm(rows, codebook):
    """Bases and rooms say which parts rows own: those that do not lie in overflow are none, others may overlap."""
    generator = torch.Generator(device=rows.device).manual_seed(1)
    place = place_of(codebook, slot_bytes=96)
    for _ in range(20):
        place.clear()
        place.bases.random_(-(2**63), 2**63 - 1, generator=generator)
        place.bases[::3] %= 2 * place.overflow.numel()
        place.rooms.view(torch.int16).random_(-(2**15), 2**15 - 1, generator=generator)
        place.used.random_(generator=generator)
        ibp.encode_into(rows, place)
        torch.cuda.synchronize()


def test_what_is_refused(rows, codebook):
    place = place_of(codebook)
    with pytest.raises(RuntimeError, match="not among"):
        ibp.encode_into(rows, place, first_row=1)
    with pytest.raises(RuntimeError, match="row_ids has 2"):
        ibp.encode_into(rows, place, torch.tensor([1, 2], device=rows.device))
    with pytest.raises(RuntimeError, match="whole rows"):
        ibp.encode_into(rows[:, :40], place)
    with pytest.raises(RuntimeError, match="device"):
        ibp.encode_into(rows.cpu(), place)
    with pytest.raises(RuntimeError, match="share memory"):
        ibp.encode_into(place.slots, place)
    with pytest.raises(TypeError, match="CodedRows"):
        ibp.encode_into(rows, rows)
    with pytest.raises(ValueError, match="differ"):
        ibp.Buffers([rows[:2], rows[:3]])


def test_opcheck(rows, codebook):
    place = place_of(codebook)
    arguments = (place.handle.table, rows, None, None, 0, 0, place.tally, place.fault)
    torch.library.opcheck(torch.ops.ibp.encode_into.default, arguments)


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_that_is_given(cuda, pinned):
    """Slots, where they are pinned, and overflow lie in it; what is too small is refused."""
    x = torch.randn(300, 512, device=cuda)
    codebook = ibp.codecs.analyze(x, scheme="planes")
    sizes = {
        "slot_bytes": 1024,
        "overflow_bytes": 300 * 1024,
        "device": cuda,
        "overflow_memory": "pinned",
        "memory": "pinned" if pinned else "device",
    }
    wanted = 300 * (2048 if pinned else 1024)
    memory = ibp._machine.memory.empty(wanted + 64, torch.device("cpu"), True)
    place = ibp.CodedRows(codebook, 300, **sizes, host_buffer=memory)
    ibp.encode_into(x, place)
    assert torch.equal(place.decode(dtype=torch.float32), x) and place.counts().spilled == 300
    first = place.slots if pinned else place.overflow
    assert first.data_ptr() == memory.data_ptr()
    assert place.overflow.data_ptr() + place.overflow.numel() == memory.data_ptr() + wanted
    with pytest.raises(ValueError, match="host_buffer has 100"):
        ibp.CodedRows(codebook, 300, **sizes, host_buffer=memory[:100])
