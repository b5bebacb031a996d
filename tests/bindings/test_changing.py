"""Ids, rows, offsets, entries and indexes that another thread, or a kernel of another stream, writes while operations
read them: these raise, note faults or give wrong rows, and write nowhere else.

tests/c/test_changing_arrays.c does the same after each look of each function of the C core.
"""

import contextlib
import threading
import time

import pytest
import torch

import ibp
from corruption import CPU, I64, KINDS, ON_CPU, OPS, Result, Whole, check_device, on_device
from helpers import embedding, one_hot_rows, spiky_rows

I32, U8, U16 = torch.int32, torch.uint8, torch.uint16
SECONDS = {"cpu": 0.05, "cuda": 0.5}  # of calls while arrays change
NUM_ROWS = 64
# A group of several warps decodes and codes such rows on a GPU.
LONG = {
    "long masks": lambda: ibp.compress(spiky_rows(NUM_ROWS, 1500), scheme="ibp", slot_bytes=2048, **ON_CPU),
    "long dense": lambda: ibp.compress(embedding(NUM_ROWS, 4096), scheme="planes", **ON_CPU),
    "long fast": lambda: ibp.compress(embedding(NUM_ROWS, 8192, torch.bfloat16), level="fast", **ON_CPU),
    "long listed": lambda: ibp.compress(one_hot_rows(NUM_ROWS, 3000), scheme="planes", **ON_CPU),
}
TABLES = {name: KINDS[name] for name in ("masks", "dense", "listed packed", "changing", "raw")} | LONG


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return CPU if request.param == "cpu" else request.getfixturevalue("cuda")


@contextlib.contextmanager
def changing(*arrays, is_written=False):
    """Writes arrays over and over: each as drawn from its bytes, then as it was, which it is again in the end. Of int64
    some numbers are small ones. A thread does that, on a GPU by a stream of its own. is_written: calls write them too,
    and they end as anything."""
    where = arrays[0].device
    draw = torch.Generator(where).manual_seed(1)
    kept = [array.clone() for array in arrays]
    others = [array.clone() for array in arrays]
    for other in others:
        flat = other.view(-1)
        if flat.dtype == I64:
            spread = torch.randint(-4, 2 * NUM_ROWS, flat.shape, generator=draw, device=where)
            far = torch.randint(-(2**62), 2**62, flat.shape, generator=draw, device=where)
            flat.copy_(torch.where(far % 3 == 0, far, spread))
        else:
            flat.view(U8).copy_(torch.randint(256, flat.view(U8).shape, generator=draw, device=where, dtype=U8))
    is_over = threading.Event()

    def write():
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        with torch.cuda.stream(stream):
            while not is_over.is_set():
                for _ in range(16):
                    for array, other in zip(arrays, others, strict=True):
                        array.copy_(other)
                    for array, was in zip(arrays, kept, strict=True):
                        array.copy_(was)
                if stream is not None:
                    stream.synchronize()

    if where.type == "cuda":
        torch.cuda.synchronize(where)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        is_over.set()
        writer.join()
    for array, was in zip(arrays, kept, strict=True):
        assert is_written or torch.equal(array.view(-1).view(U8), was.view(-1).view(U8))


def repeat(call, device):
    """Calls for a while, and makes sure that all flags are set that a call returns."""
    end = time.monotonic() + SECONDS[device.type]
    while True:
        check_device(*call())
        if time.monotonic() > end:
            return


def zeros(count, dtype, device):
    return torch.zeros(count, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [I32, I64])
def test_partition(device, dtype):
    """Positions are a permutation, whatever ids are when they are looked at again."""
    count, num_items = (1 << 18, 1 << 21) if device == CPU else (1 << 20, 1 << 24)
    ids = torch.randint(num_items, (count,), device=device, dtype=dtype)
    every = torch.arange(count, device=device)

    def call():
        _, positions = OPS.partition_ids(ids, num_items, 10)
        return [(positions.sort().values == every).all()]

    with changing(ids):
        repeat(call, device)
    in_order, positions = OPS.partition_ids(ids, num_items, 10)
    assert torch.equal(in_order, ids[positions.long()]) and bool((in_order >> 10).diff().ge(0).all())


@pytest.mark.parametrize("kind", TABLES)
def test_gathers(device, kind):
    """Ids and positions change, then the index of the table."""
    arguments = on_device(TABLES[kind](), device)
    num_items, item_bytes, count = arguments[8], arguments[9], NUM_ROWS
    ids = torch.arange(count, device=device) * 7 % num_items
    positions = torch.arange(count - 1, -1, -1, dtype=I32, device=device)
    out, rows, whole = Result(num_items * item_bytes, device), Result(count * item_bytes, device), Whole(device)
    fault = zeros(4, I64, device)

    def call():
        OPS.gather_items(*arguments, ids, 0, rows.bytes, fault, positions)
        OPS.gather_items(*arguments, ids, 0, rows.bytes, fault)
        OPS.decode_bytes(*arguments, 0, out.bytes.numel(), 0, out.bytes, fault)
        return rows.check(), out.check(), whole.check()

    call()
    wanted = rows.bytes.clone()
    with changing(ids, positions):
        repeat(call, device)
    index = [array for array in arguments[2:4] if array.numel()]
    if index:
        with changing(*index):
            repeat(call, device)
    fault.zero_()
    call()
    assert torch.equal(rows.bytes, wanted) and fault.tolist() == [0, 0, 0, 0]


WAYS, SLOT_BYTES = 32, 512


@pytest.mark.parametrize("changes", ["ids", "rows", "offsets", "lengths", "entries"])
def test_caches(device, changes):
    table = on_device(KINDS["dense"](), device)
    num_items, item_bytes, row_bytes, count = table[8], table[9], table[5][1], NUM_ROWS
    slab, map_memory = Result(count * SLOT_BYTES, device), Result(WAYS * 16, device)
    ways, out, whole = map_memory.bytes.view(I64), Result(count * item_bytes, device), Whole(device)
    stamps, clock, counts = zeros(WAYS + 1, I32, device), zeros(2, I64, device), zeros(10, I64, device)
    fault, written = zeros(4, I64, device), Result(count * 8, device)
    rows = torch.arange(count, device=device) * 5 % num_items
    arrays = {
        "ids": rows.clone(),
        "rows": rows,
        "offsets": torch.arange(count, device=device) * SLOT_BYTES,
        "lengths": table[2],
        "entries": written.bytes.view(I64),
    }
    entries = arrays["entries"]

    def call():
        ways.view(-1, 2).copy_(torch.tensor([-1, 0], device=device))
        OPS.fill_slab(*table, arrays["rows"], arrays["offsets"], 0, WAYS, slab.bytes, ways, fault)
        OPS.find_cached(arrays["ids"], 1, row_bytes, table[2], [ways], WAYS, entries, counts)
        OPS.gather_items(*table, arrays["ids"], 0, out.bytes, fault, entries=entries, slabs=[slab.bytes])
        OPS.drop_cached(arrays["rows"], WAYS, ways)
        OPS.claim_cached(
            *table, arrays["ids"], WAYS, SLOT_BYTES, slab.bytes, ways, stamps, clock, entries, counts, fault
        )
        OPS.gather_items(*table, arrays["ids"], 0, out.bytes, fault, entries=entries, slabs=[slab.bytes])
        return slab.check(), map_memory.check(), out.check(), written.check(), whole.check()

    with changing(arrays[changes], is_written=changes == "entries"):
        repeat(call, device)
    fault.zero_()
    call()
    wanted = torch.empty_like(out.bytes)
    OPS.gather_items(*table, arrays["ids"], 0, wanted, fault)
    assert torch.equal(out.bytes, wanted) and fault.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("changes", ["row_ids", "lengths", "bases", "rooms"])
@pytest.mark.parametrize("columns", [64, 5000], ids=["short", "long"])
def test_places(device, columns, changes):
    rows = embedding(NUM_ROWS, columns).to(device)
    place = ibp.CodedRows(
        ibp.codecs.analyze(rows, scheme="planes"), NUM_ROWS, slot_bytes=96, overflow_bytes=1 << 20, device=device
    )
    slots, overflow = Result(place.slots.numel(), device), Result(place.overflow.numel(), device)
    _, _, lengths, bases, *rest, rooms, _ = place.handle.parts[:12]
    whole, fault = Whole(device), zeros(4, I64, device)
    arrays = {"row_ids": torch.arange(NUM_ROWS, device=device), "lengths": lengths, "bases": bases, "rooms": rooms}

    def call():
        used, counts = zeros(1, I64, device), zeros(2, I64, device)
        place = [slots.bytes, overflow.bytes, lengths, bases, *rest, rooms, used]
        OPS.encode_into(*place, rows, None, arrays["row_ids"], 0, 0, counts, fault)
        OPS.encode_into(*place, rows, None, None, 0, 0, counts, fault)
        return slots.check(), overflow.check(), whole.check()

    with changing(arrays[changes], is_written=changes != "row_ids"):
        repeat(call, device)
    check_device(*call())


def test_pages(device):
    per_block, num_flags = 4, 16
    ids = torch.arange(per_block * num_flags, device=device)
    lengths, rooms = (zeros(per_block * num_flags, U16, device) for _ in range(2))
    stored, seen = Result(num_flags, device), Result(num_flags, device)
    pages, blocks = (torch.arange(8, device=device) for _ in range(2))
    block_starts, starts = torch.arange(8, device=device), zeros(2, I64, device)
    planned, addresses = Result(8 * 2 * 8 * 3, device), Result(8 * 2 * 8, device)

    def call():
        OPS.note_pages(ids, per_block, lengths, rooms, stored.bytes, seen.bytes)
        OPS.plan_pages(
            *(pages, blocks, 8, 8, 2, 0, starts, block_starts, 0, 0, 1, None),
            *(planned.bytes.view(I64), addresses.bytes.view(I64)),
        )
        numbers, places = planned.bytes.view(I64), addresses.bytes.view(I64)
        return stored.check(), seen.check(), planned.check(), (numbers < 48).all(), (places < 8).all()

    with changing(ids, pages, blocks):
        repeat(call, device)


def test_selections():
    """Where rows go is no number of a tensor's."""
    count = 20000
    arguments = on_device(ibp.compress(embedding(count, 32), scheme="planes", layout="packed", **ON_CPU), CPU)
    ids, lengths, bases = torch.arange(count), zeros(count, U16, CPU), zeros(count // 32, I64, CPU)
    rows, taken, fault = Result((count + 32) * arguments[5][1], CPU), zeros(2, I64, CPU), zeros(4, I64, CPU)

    def call():
        OPS.select_rows(*arguments, ids, 0, lengths, bases, rows.bytes, taken, fault)
        fault.zero_()
        return [rows.check()]

    with changing(bases, is_written=True):
        repeat(call, CPU)
    with changing(ids):
        repeat(call, CPU)
    OPS.select_rows(*arguments, ids, 0, lengths, bases, rows.bytes, taken, fault)
    assert taken[0] == count and torch.equal(bases, arguments[3][: count // 32]) and fault.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("changes", ["ids", "offsets"])
def test_bags(cuda, changes):
    table = on_device(ibp.compress(embedding(NUM_ROWS, 64), scheme="planes", level="fast", **ON_CPU), cuda)
    num_bags = 4000
    arrays = {
        "ids": torch.arange(8 * num_bags, device=cuda) % NUM_ROWS,
        "offsets": torch.arange(num_bags, device=cuda) * 8,
    }
    out, whole, fault = Result(num_bags * table[9], cuda), Whole(cuda), zeros(4, I64, cuda)
    sums = out.bytes.view(torch.float32).view(num_bags, -1)

    def call():
        OPS.sum_bags(*table, arrays["ids"], None, [], arrays["offsets"], None, 0, -1, 0, 0, sums, fault)
        return out.check(), whole.check()

    call()
    wanted = sums.clone()
    with changing(arrays[changes]):
        repeat(call, cuda)
    fault.zero_()
    call()
    assert torch.equal(sums, wanted) and fault.tolist() == [0, 0, 0, 0]
