"""The GPU against the CPU: the same bytes coded, the same bits fetched, the same errors. With IBP_REQUIRE_CUDA=1 none
of these may skip.
"""

import copy
import io
import os
import pickle

import numpy as np
import pytest
import torch

import ibp
import reference
from golden.load import CORRUPT_TABLES, arrays_of, load, op_arguments, reference_table
from golden.make import CASES, edit_table
from handles import BY_VALUES as OPS
from handles import values_of, with_handle
from helpers import (
    DTYPES,
    LAYOUTS,
    SCHEMES,
    TENSORS,
    assert_same_bits,
    assert_same_table,
    bytes_of,
    embedding,
    layout_arguments,
    make_tensor,
    one_hot_rows,
    pairwise,
    spiky_rows,
    take,
)  # fmt: skip
from ibp._machine import memory as _memory
from ibp._rows.table import handle_on

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
CPU = torch.device("cpu")
PLACES = ["pinned", "device"]
CODED = ["ibp", "planes"]  # the schemes that code rows, for what is asked of every coder
LARGE_ROWS = [256, 600, 1024, 2408, 4096, 14812, 16384, 65535, 65536]


def make_table(x, layout, place, cuda, **arguments):
    """A table in pinned host memory, or in device memory. arguments: of compress(), which has either a codebook or a
    scheme.
    """
    row_bytes = arguments["codebook"].row_bytes if "codebook" in arguments else x.shape[1:].numel() * x.element_size()
    x = x.to(cuda) if place == "device" else x
    table = ibp.compress(x, **layout_arguments(layout, row_bytes), **arguments)
    assert table.device == x.device and table.is_pinned() == (place == "pinned")
    return table


def random_codebook(row_bytes, chunk_bytes, flag_all=False, seed=0):
    """Any masks: chunks without one, full ones, and bits here and there."""
    rng = np.random.default_rng([seed, row_bytes, chunk_bytes])
    kind = np.repeat(rng.integers(0, 4, -(-row_bytes // chunk_bytes)), chunk_bytes)[:row_bytes]
    noise = rng.integers(0, 256, row_bytes, np.uint8)
    mask = np.where(kind == 0, 0, np.where(kind == 1, 255, noise)).astype(np.uint8)
    bitval = mask & rng.integers(0, 256, row_bytes, np.uint8)
    return ibp.codecs.Codebook.from_masks(torch.from_numpy(mask), torch.from_numpy(bitval), chunk_bytes, flag_all)


def matching_rows(num_rows, codebook, seed=0):
    """Rows most of whose chunks participate; a few rows of noise, which stay raw."""
    rng = np.random.default_rng([seed, num_rows])
    noise = rng.integers(0, 256, (num_rows, codebook.row_bytes), np.uint8)
    matches = noise & ~codebook.mask.numpy() | codebook.bitval.numpy()
    keep = (rng.random(noise.shape) < 0.99) & (rng.random((num_rows, 1)) < 0.95)
    return torch.from_numpy(np.where(keep, matches, noise).astype(np.uint8))


def random_ids(num_items, count=200, dtype=torch.int64, device=CPU):
    return torch.randint(num_items, (count,)).to(dtype).to(device)


# ---- analysis and coding ----


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 5, 7, 8, 31, 33, 100, 128, 129, *LARGE_ROWS])
def test_analysis_counts(cuda, row_bytes):
    for num_rows in (1, 31, 257, 1000 if row_bytes < 10_000 else 300):
        data = bytes_of(make_tensor((num_rows, row_bytes), torch.uint8, "sparse", seed=num_rows))
        assert_same_bits(OPS.count_bits(data.to(cuda), row_bytes).cpu(), OPS.count_bits(data, row_bytes))
        for chunk_bytes in (1, 2, 4, 8):
            codebook = random_codebook(row_bytes, chunk_bytes)
            on_gpu = OPS.count_hits(data.to(cuda), codebook.words(cuda), codebook.codec)
            assert_same_bits(on_gpu.cpu(), OPS.count_hits(data, codebook.words(CPU), codebook.codec))


@pytest.mark.parametrize(
    "arguments", [{}, {"tau": 0.8, "chunk_bytes": 2}, {"paper": True}, {"chunk_bytes": 8}], ids=str
)
def test_analysis(cuda, arguments):
    for x in (one_hot_rows(3000, 60), embedding(3000, 32), embedding(3000, 33, torch.bfloat16)):
        on_cpu = ibp.codecs.analyze(x, sample=1.0, device="cpu", **arguments)
        for where, device in ((x, cuda), (x.to(cuda), None), (x.pin_memory(), cuda)):
            on_gpu = ibp.codecs.analyze(where, sample=1.0, device=device, **arguments)
            assert on_gpu == on_cpu and on_gpu.expected_savings == on_cpu.expected_savings and on_gpu.tau == on_cpu.tau


@pytest.mark.parametrize("flag_all", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
def test_coding_every_small_row(cuda, chunk_bytes, flag_all):
    for row_bytes in range(1, 201):
        check_coding(cuda, random_codebook(row_bytes, chunk_bytes, flag_all), 75)


@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("row_bytes", LARGE_ROWS)
def test_coding_large_rows(cuda, row_bytes, chunk_bytes):
    check_coding(cuda, random_codebook(row_bytes, chunk_bytes), 33)


def check_coding(cuda, codebook, num_rows):
    """CUDA codes a tensor of whole rows and a short one to the bytes that C does, in every layout, and fetches it
    again.
    """
    row_bytes = codebook.row_bytes
    data = matching_rows(num_rows, codebook).reshape(-1)[: num_rows * row_bytes - row_bytes // 3]
    lengths = OPS.measure_rows(data, codebook.words(CPU), codebook.codec)
    assert_same_bits(OPS.measure_rows(data.to(cuda), codebook.words(cuda), codebook.codec).cpu(), lengths)
    for layout in LAYOUTS:
        arguments = {"codebook": codebook, **layout_arguments(layout, row_bytes)}
        on_cpu, on_gpu = (ibp.compress(data, device=device, memory="pinned", **arguments) for device in ("cpu", cuda))
        assert_same_table(on_cpu, on_gpu)
        assert_same_bits(on_gpu.decompress(device=cuda, check=True).cpu(), data)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_x_is_makes_no_difference(cuda, layout, scheme):
    x = spiky_rows(3000, 60)
    arguments = {"scheme": scheme, **layout_arguments(layout, 240)}
    tables = [ibp.compress(x, device="cpu", memory="host", **arguments)]
    tables += [
        ibp.compress(where, device=cuda, **arguments)
        for where in (x, x.pin_memory(), x.to(cuda), x.to(cuda).t().contiguous().t())
    ]
    for table in tables:
        assert_same_table(table, tables[0])
    assert [table.device.type for table in tables] == ["cpu", "cpu", "cpu", "cuda", "cuda"]
    assert [table.is_pinned() for table in tables] == [False, True, True, False, False]


@pytest.mark.parametrize("scheme", CODED)
def test_a_tensor_of_many_blocks(cuda, monkeypatch, scheme):
    """Coded piece by piece: 32 rows at a time."""
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 1)
    x = spiky_rows(777, 61)
    codebook = ibp.codecs.analyze(x, scheme=scheme, device="cpu")
    for layout in LAYOUTS:
        arguments = {"codebook": codebook, **layout_arguments(layout, 244)}
        assert_same_table(ibp.compress(x, device=cuda, **arguments), ibp.compress(x, device="cpu", **arguments))


@pytest.mark.parametrize("scheme", CODED)
def test_estimate(cuda, scheme):
    x = spiky_rows(3000, 60)
    codebook = ibp.codecs.analyze(x, scheme=scheme)
    assert (
        ibp.estimate(x, codebook, device=cuda).stored_bytes
        == ibp.estimate(x.to(cuda), codebook).stored_bytes
        == ibp.estimate(x, codebook, device="cpu").stored_bytes
    )


def test_encode_notes_lengths_of_other_data(cuda):
    codebook = random_codebook(128, 4)
    data = matching_rows(40, codebook).to(cuda).reshape(-1)
    lengths = OPS.measure_rows(data, codebook.words(cuda), codebook.codec)
    row = int((lengths.to(torch.int64) > 1).nonzero()[0])
    lengths.view(torch.int16)[row] -= 1
    slots, fault = torch.zeros_like(data), torch.zeros(4, dtype=torch.int64, device=cuda)
    nothing = torch.empty(0, dtype=torch.uint8, device=cuda)
    bases = torch.empty(0, dtype=torch.int64, device=cuda)
    OPS.encode_rows(slots, nothing, lengths, bases, codebook.words(cuda), codebook.codec, 128, 0, 40, 128, data, fault)
    assert fault.tolist()[:2] == [3, row]


# ---- fetching ----


@pytest.mark.parametrize(
    "dtype, scheme, layout, place", pairwise(DTYPES, ["ibp", "planes", "auto"], LAYOUTS, PLACES), ids=str
)
def test_dtypes(cuda, dtype, scheme, layout, place):
    for kind in ("sparse", "narrow", "random"):
        x = make_tensor((300, 45), dtype, kind)
        table = make_table(x, layout, place, cuda, scheme=scheme)
        ids = random_ids(300)
        assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), take(x, ids))
        assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_small_row(cuda, layout, place):
    for row_bytes in range(1, 201):
        codebook = random_codebook(row_bytes, 4, seed=1)
        x = matching_rows(150, codebook)
        table = make_table(x, layout, place, cuda, codebook=codebook)
        ids = random_ids(150)
        assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), x[ids])


@pytest.mark.parametrize("row_bytes, chunk_bytes, layout, place", pairwise(LARGE_ROWS, [1, 2, 4, 8], LAYOUTS, PLACES))
def test_large_rows(cuda, row_bytes, chunk_bytes, layout, place):
    codebook = random_codebook(row_bytes, chunk_bytes, seed=2)
    x = matching_rows(70, codebook)
    table = make_table(x, layout, place, cuda, codebook=codebook)
    ids = random_ids(70)
    assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), x[ids])
    assert_same_bits(table[20:50].cpu(), x[20:50])


ITEMS_AND_ROWS = [(70000, None), (100_001, None), (4, 4096), (3, 100), (250, 64), (64, 250), (1, 1), (1000, 1)]


@pytest.mark.parametrize("sizes, layout, scheme, place", pairwise(ITEMS_AND_ROWS, LAYOUTS, SCHEMES, PLACES), ids=str)
def test_items_that_are_not_rows(cuda, sizes, layout, scheme, place):
    """Items of several rows, several items a row, items that start in the middle of one; a short last row."""
    item_bytes, row_bytes = sizes
    x = make_tensor((61, item_bytes), torch.uint8, "sparse", seed=item_bytes)
    row = row_bytes or 4096
    table = ibp.compress(
        x.to(cuda) if place == "device" else x, scheme=scheme, row_bytes=row_bytes, **layout_arguments(layout, row)
    )
    ids = random_ids(61)
    assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), x[ids])
    assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
    assert_same_bits(table[7:60].cpu(), x[7:60])


SHAPES = [(), (1,), (5000,), (0,), (0, 7), (7, 0), (1, 1), (33, 5), (6, 5, 4, 3)]


@pytest.mark.parametrize("shape, scheme, place", pairwise(SHAPES, SCHEMES, PLACES), ids=str)
def test_shapes(cuda, shape, scheme, place):
    for dtype in (torch.uint8, torch.float32, torch.complex64):
        x = make_tensor(shape, dtype)
        table = ibp.compress(x.to(cuda) if place == "device" else x, scheme=scheme)
        assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
        if shape:
            ids = random_ids(len(x)) if len(x) else torch.empty(0, dtype=torch.int64)
            assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), take(x, ids))


@pytest.mark.parametrize("name", CASES)
def test_golden_tables(cuda, name):
    golden = load(name)
    table = reference_table(golden)
    out, fault = (
        torch.zeros(table.num_bytes, dtype=torch.uint8, device=cuda),
        torch.zeros(4, dtype=torch.int64, device=cuda),
    )
    OPS.decode_bytes(*op_arguments(table, *arrays_of(table, cuda)), 0, table.num_bytes, 0, out, fault)
    assert fault.tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(out.cpu().numpy(), golden["original"])


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("place", PLACES)
def test_ids(cuda, place, scheme):
    x = spiky_rows(500, 60)
    table = make_table(x, "slots", place, cuda, scheme=scheme)
    for dtype in (torch.int32, torch.int64):
        for device in (CPU, cuda):
            ids = random_ids(500, 333, dtype, device)
            both = torch.stack([ids, ids], 1)
            for chosen in (
                ids,
                both[:, 0],
                ids[::3],
                ids[:0],
                ids[:1],
                torch.full((100,), 7, dtype=dtype, device=device),
            ):
                expected = x[chosen.cpu().long()]
                result = ibp.index_select(table, chosen)
                assert result.device == device
                assert_same_bits(result.cpu(), expected)
                for target in (CPU, cuda):
                    result = ibp.index_select(table, chosen, device=target)
                    assert result.device == target
                    assert_same_bits(result.cpu(), expected)
                    out = torch.empty(len(chosen), 60, device=target)
                    assert ibp.index_select(table, chosen, out=out) is out
                    assert_same_bits(out.cpu(), expected)


def test_a_pageable_table(cuda):
    """Gathered on the CPU, then copied; pinning it changes where, not what."""
    x = one_hot_rows(500, 60)
    table = ibp.compress(x, memory="host")
    assert not table.is_pinned() and "pageable" in repr(table)
    ids = random_ids(500)
    before = ibp.index_select(table, ids.to(cuda))
    assert table.pin_memory() is table and table.is_pinned() and "pinned" in repr(table)
    assert table.slots.is_pinned() and table.slots.untyped_storage().nbytes() == table.slots.numel()
    after = ibp.index_select(table, ids.to(cuda), check=True)
    assert before.device == after.device == cuda
    for result in (before, after):
        assert_same_bits(result.cpu(), x[ids])
    with pytest.raises(IndexError):
        ibp.index_select(ibp.compress(x, memory="host"), torch.tensor([500], device=cuda))


def test_pinned_memory_has_the_size_needed(cuda):
    """Not rounded up to a power of two."""
    table = ibp.compress(one_hot_rows(5000, 60))
    assert table.is_pinned()
    assert table.slots.untyped_storage().nbytes() == 5000 * table.slot_bytes


@pytest.mark.parametrize("scheme", CODED)
def test_moving_tables(cuda, scheme):
    x = spiky_rows(500, 60)
    table = ibp.compress(x, scheme=scheme)
    moved = table.to(cuda)
    assert moved.device == cuda and moved.to(cuda) is moved
    assert_same_table(moved, table)
    assert_same_bits(moved.decompress().cpu(), x)
    assert_same_bits(moved.to("cpu").decompress(), x)
    assert_same_bits(moved[[3, -1]].cpu(), x[[3, -1]])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_at_any_address(cuda, layout, place):
    """Views that start anywhere; not a byte beside them is touched."""
    for row_bytes in (1, 3, 16, 33, 64, 100, 600, 4096):
        codebook = random_codebook(row_bytes, 2, seed=3)
        x = matching_rows(90, codebook)
        table = make_table(x, layout, place, cuda, codebook=codebook)
        ids = random_ids(90, 50)
        for offset in (0, 1, 2, 3, 4, 7, 8, 15, 16):
            memory = torch.full((offset + 50 * row_bytes + 37,), 0xA5, dtype=torch.uint8, device=cuda)
            ibp.index_select(
                table, ids.to(cuda), out=memory[offset : offset + 50 * row_bytes].view(50, row_bytes), check=True
            )
            expected = torch.full_like(memory, 0xA5, device=CPU)
            expected[offset : offset + 50 * row_bytes] = x[ids].reshape(-1)
            assert_same_bits(memory.cpu(), expected)


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("max_sms", [1, 2, 7, 100_000])
@pytest.mark.parametrize("place", PLACES)
def test_max_sms(cuda, place, max_sms, scheme):
    x = spiky_rows(5000, 60)
    table = make_table(x, "slots", place, cuda, scheme=scheme)
    ids = random_ids(5000, 20000)
    assert_same_bits(ibp.index_select(table, ids.to(cuda), max_sms=max_sms, check=True).cpu(), x[ids])
    assert_same_bits(table.decompress(device=cuda, max_sms=max_sms, check=True).cpu(), x)


# ---- streams and graphs ----


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("place", PLACES)
def test_the_current_stream_is_used(cuda, place, scheme):
    """The ids arrive late on a side stream: work on any other stream would read the old ones."""
    x = spiky_rows(500, 60)
    table = make_table(x, "slots of 32", place, cuda, scheme=scheme)
    ids, out = torch.zeros(200, dtype=torch.int64, device=cuda), torch.empty(200, 60, device=cuda)
    ibp.index_select(table, ids, out=out)
    late = random_ids(500).pin_memory()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        ids.copy_(late, non_blocking=True)
        ibp.index_select(table, ids, out=out)
    stream.synchronize()
    assert_same_bits(out.cpu(), x[late])


def test_many_streams(cuda):
    x = spiky_rows(5000, 60)
    tables = [
        make_table(x, layout, place, cuda, scheme=scheme) for layout in LAYOUTS for place in PLACES for scheme in CODED
    ]
    chosen = [random_ids(5000, 3000) for _ in tables]
    on_gpu = [ids.to(cuda) for ids in chosen]
    streams = [torch.cuda.Stream() for _ in tables]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for table, ids, stream in zip(tables, on_gpu, streams):
            with torch.cuda.stream(stream):
                results.append(ibp.index_select(table, ids))
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert_same_bits(result.cpu(), x[chosen[number % len(chosen)]])


def test_one_table_on_many_streams(cuda):
    x = one_hot_rows(5000, 60)
    table = make_table(x, "slots of 32", "pinned", cuda)
    chosen = [random_ids(5000, 2000) for _ in range(8)]
    results = []
    torch.cuda.synchronize()
    for ids in chosen:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(ibp.index_select(table, ids.to(cuda)))
    torch.cuda.synchronize()
    for ids, result in zip(chosen, results):
        assert_same_bits(result.cpu(), x[ids])
    table.check()


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs(cuda, layout, place, scheme):
    x = spiky_rows(500, 60)
    table = make_table(x, layout, place, cuda, scheme=scheme)
    ids, out, whole = random_ids(500).to(cuda), torch.empty(200, 60, device=cuda), torch.empty(500, 60, device=cuda)
    ibp.index_select(table, ids, out=out)
    table.decompress(out=whole)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.index_select(table, ids, out=out)
        table.decompress(out=whole)
    for _ in range(3):
        others = random_ids(500)
        ids.copy_(others)
        out.zero_(), whole.zero_()
        graph.replay()
        assert_same_bits(out.cpu(), x[others])
        assert_same_bits(whole.cpu(), x)
    ids[5] = 500
    graph.replay()
    with pytest.raises(IndexError, match=r"ids\[5\] is 500"):
        table.check()
    assert (out[5] == 0).all()


def test_a_first_call_cannot_be_captured(cuda):
    table = ibp.compress(one_hot_rows(500, 60))
    ids, out = random_ids(500).to(cuda), torch.empty(200, 60, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capturing"):
        with torch.cuda.graph(graph):
            ibp.index_select(table, ids, out=out)
    assert ibp.index_select(table, ids, out=out) is out
    torch.cuda.synchronize()


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("place", PLACES)
def test_a_call_with_out_neither_allocates_nor_waits(cuda, place, scheme):
    x = spiky_rows(500, 60)
    table = make_table(x, "slots", place, cuda, scheme=scheme)
    ids, out = random_ids(500).to(cuda), torch.empty(200, 60, device=cuda)
    ibp.index_select(table, ids, out=out)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
    late = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        ibp.index_select(table, ids, out=out)
        late.record()
        returned_early = not late.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert returned_early, "the call came back only when the GPU was done"
    assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] == allocations
    torch.cuda.synchronize()


# ---- errors ----


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bad_ids_on_the_gpu(cuda, dtype, place, scheme):
    """A row of zeros; the error comes with the next call, check() or check=True; nothing is broken afterwards."""
    x = one_hot_rows(500, 60) + 1
    table = make_table(x, "slots", place, cuda, scheme=scheme)
    bad = {3: 500, 77: -1, 150: 2**31 - 1} | ({151: 2**40, 152: -(2**63)} if dtype == torch.int64 else {})
    ids = random_ids(500, dtype=dtype)
    for position, value in bad.items():
        ids[position] = value
    on_gpu = ids.to(cuda)
    message = "|".join(rf"ids\[{position}\] is {value}; wanted 0 to 499" for position, value in bad.items())

    result = ibp.index_select(table, on_gpu).cpu()
    good = torch.tensor([position not in bad for position in range(200)])
    assert_same_bits(result[good], x[ids[good].long()])
    assert (result[~good] == 0).all()
    with pytest.raises(IndexError, match=message):
        ibp.index_select(table, torch.tensor([0], device=cuda))
    assert_same_bits(ibp.index_select(table, torch.tensor([0], device=cuda), check=True).cpu(), x[:1])

    ibp.index_select(table, on_gpu)
    with pytest.raises(IndexError, match=message):
        table.check()
    table.check()

    with pytest.raises(IndexError, match=message):
        ibp.index_select(table, on_gpu, check=True)
    with pytest.raises(IndexError, match=message):
        ibp.index_select(table, ids)
    torch.cuda.synchronize()
    assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)


def test_bad_ids_of_an_empty_table(cuda):
    for table in (ibp.compress(torch.zeros(0, 9)), ibp.compress(torch.zeros(0, 9, device=cuda))):
        assert ibp.index_select(table, torch.empty(0, dtype=torch.int64, device=cuda), check=True).shape == (0, 9)
        with pytest.raises(IndexError):
            ibp.index_select(table, torch.tensor([0], device=cuda), check=True)


def test_an_error_belongs_to_its_table(cuda):
    x = one_hot_rows(500, 60)
    good, bad = ibp.compress(x), ibp.compress(x)
    ibp.index_select(bad, torch.tensor([1000], device=cuda))
    torch.cuda.synchronize()
    assert_same_bits(ibp.index_select(good, torch.tensor([1], device=cuda), check=True).cpu(), x[1:2])
    with pytest.raises(IndexError, match="1000"):
        bad.check()


def damage(table, seed):
    """Other bytes in every one of the table's tensors, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name in TENSORS:
        tensor = getattr(table, name)
        if tensor.numel() == 0:
            continue
        places = torch.randint(tensor.numel(), (1 + seed % 4,), generator=generator)
        low, high = {torch.uint8: (0, 256), torch.uint16: (0, 65536), torch.int64: (-(2**62), 2**62)}[tensor.dtype]
        values = torch.randint(low, high, places.shape, generator=generator)
        if name == "bases" and seed % 3 == 0:
            values = values % (table.overflow.numel() + 64)
        integers = tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor
        integers[places.to(tensor.device)] = values.to(integers.dtype).to(tensor.device)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
def test_damaged_tables(cuda, chunk_bytes, layout, place):
    """The GPU reads from damaged tables what the C core reads from them: a row, or zeros and a fault. It
    never fails.
    """
    for seed in range(25):
        row_bytes = [33, 64, 100, 600, 4100][seed % 5]
        codebook = random_codebook(row_bytes, chunk_bytes, seed % 2 == 1, seed=seed)
        table = make_table(matching_rows(130, codebook, seed), layout, place, cuda, codebook=codebook)
        damage(table, seed)
        whole = 130 * row_bytes
        outs, faults = [], []
        for device, near in ((CPU, table.to("cpu")), (cuda, table)):
            out, fault = (
                torch.full((whole,), 0xA5, dtype=torch.uint8, device=device),
                torch.zeros(4, dtype=torch.int64, device=device),
            )
            OPS.decode_bytes(*values_of(near, device), 0, whole, 0, out, fault)
            outs.append(out.cpu())
            faults.append(fault.tolist())
        assert_same_bits(outs[1], outs[0])
        assert faults[0][0] == faults[1][0]
        if faults[0][0]:
            with pytest.raises(ibp.CorruptTableError):
                table.decompress(device=cuda, check=True)
        ids = random_ids(130)
        gathered = ibp.index_select(table, ids.to(cuda)).cpu()
        assert_same_bits(gathered, outs[0].view(130, row_bytes)[ids])
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "edit", CORRUPT_TABLES, ids=lambda edit: f"{edit['table']}-{edit['array']}-{edit['at']}-{edit['value']}"
)
def test_golden_corrupt_tables(cuda, edit):
    table = edit_table(reference_table(load(edit["table"])), edit["array"], edit["at"], edit["value"])
    arguments = op_arguments(table, *arrays_of(table, cuda))
    for row in range(table.num_rows):
        start, size = row * table.row_bytes, table.valid(row)
        out, fault = (
            torch.full((size,), 0xA5, dtype=torch.uint8, device=cuda),
            torch.zeros(4, dtype=torch.int64, device=cuda),
        )
        OPS.decode_bytes(*arguments, start, start + size, 0, out, fault)
        is_corrupt = row in edit["corrupt_rows"]
        assert out.cpu().numpy().tobytes() == (bytes(size) if is_corrupt else reference.decode_table_row(table, row))
        assert fault.tolist()[:3] == ([3, row, row] if is_corrupt else [0, 0, 0])


def test_bad_arguments(cuda):
    x = one_hot_rows(500, 60)
    table = ibp.compress(x)
    ids = torch.tensor([1, 2, 3], device=cuda)
    for out, error in (
        (torch.empty(3, 59, device=cuda), ValueError),
        (torch.empty(3, 60, dtype=torch.int32, device=cuda), TypeError),
    ):
        with pytest.raises(error, match="out"):
            ibp.index_select(table, ids, out=out)
    with pytest.raises(ValueError, match="device"):
        ibp.index_select(table, ids, device="cpu", out=torch.empty(3, 60, device=cuda))
    with pytest.raises(TypeError, match="float32"):
        ibp.index_select(table, ids.float())
    with pytest.raises(RuntimeError, match="CUDA device"):
        out, fault = torch.zeros(720, dtype=torch.uint8, device=cuda), torch.zeros(4, dtype=torch.int64, device=cuda)
        OPS.gather_items(*values_of(table, cuda), ids.cpu(), 0, out, fault)
    torch.cuda.synchronize()


# ---- in its own memory, in files, as operations ----


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("worker", ["cpu", "cuda", None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compress_in_place(cuda, scheme, worker, where):
    before = spiky_rows(3000, 61)
    x = before.clone().to(where)
    table = ibp.compress(x, scheme=scheme, device=worker, inplace=True)
    assert table.slots.data_ptr() == x.data_ptr() and table.device == x.device and table.is_pinned() == (where == "cpu")
    copied = ibp.compress(before, codebook=table.codebook, slot_bytes=244, device="cpu", memory="host")
    assert table.stored_bytes == copied.stored_bytes
    assert_same_bits(table.lengths.cpu(), copied.lengths)
    ids = random_ids(3000)
    assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), before[ids])
    assert_same_bits(table.decompress(device="cpu").cpu(), before)
    assert_same_bits(table.decompress(device=cuda, check=True).cpu(), before)


def test_compress_in_place_unpins_what_it_pinned(cuda):
    x = one_hot_rows(3000, 60)
    table = ibp.compress(x, inplace=True)
    assert x.is_pinned()
    del table
    assert not x.is_pinned()


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("place", PLACES)
def test_pickling(cuda, place, scheme):
    x = spiky_rows(500, 60)
    table = make_table(x, "slots of 32", place, cuda, scheme=scheme)
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    loaded = [pickle.loads(pickle.dumps(table)), copy.deepcopy(table), torch.load(file)]
    file.seek(0)
    loaded.append(torch.load(file, map_location="cpu"))
    for again in loaded:
        assert_same_table(again, table)
        assert_same_bits(again.decompress(device=cuda).cpu(), x)
    assert loaded[-1].device == CPU and loaded[0].device == table.device
    assert loaded[-1].pin_memory().is_pinned()


def cuda_samples(cuda):
    """One call of every operation that runs on a GPU; tables on it, as torch refuses to clone views of pinned memory,
    which opcheck does.
    """
    x = spiky_rows(100, 60)
    data, masks = bytes_of(x).to(cuda), ibp.codecs.analyze(x)
    kinds = [
        (layout, place, scheme) for layout in ("slots of 32", "packed") for place in ("device",) for scheme in CODED
    ]
    tables = [values_of(make_table(x, layout, place, cuda, scheme=scheme), cuda) for layout, place, scheme in kinds]

    def fault():
        return torch.zeros(4, dtype=torch.int64, device=cuda)

    def out(size):
        return torch.zeros(size, dtype=torch.uint8, device=cuda)

    yield "count_bits", (data, 240)
    yield "count_hits", (data, masks.words(cuda), masks.codec)
    for codebook in (masks, ibp.codecs.analyze(x, scheme="planes")):
        yield "measure_rows", (data, codebook.words(cuda), codebook.codec)
    for slots, overflow, *rest in tables:
        yield "encode_rows", (torch.zeros_like(slots), torch.zeros_like(overflow), *rest, data, fault())
        yield "gather_items", (slots, overflow, *rest, torch.tensor([5, 99, 5], device=cuda), 0, out(720), fault())
        yield "decode_bytes", (slots, overflow, *rest, 100, 9000, 0, out(8900), fault())


def test_opcheck(cuda):
    for name, arguments in cuda_samples(cuda):
        torch.library.opcheck(getattr(torch.ops.ibp, name).default, with_handle(name, arguments))


@pytest.mark.parametrize("scheme", CODED)
def test_compile(cuda, scheme):
    x = one_hot_rows(500, 60)
    handle = handle_on(ibp.compress(x, scheme=scheme), cuda).table  # which holds the pinned memory

    @torch.compile(fullgraph=True, backend="aot_eager")
    def gather_and_sum(ids):
        out, noted = (
            torch.zeros(len(ids) * 240, dtype=torch.uint8, device=ids.device),
            torch.zeros(4, dtype=torch.int64, device=ids.device),
        )
        torch.ops.ibp.gather_items(handle, ids, 0, out, noted)
        return out.view(torch.float32).view(-1, 60).sum(0), noted

    ids = random_ids(500)
    total, noted = gather_and_sum(ids.to(cuda))
    assert noted.tolist() == [0, 0, 0, 0]
    assert_same_bits(total.cpu(), x[ids].sum(0))  # sums of zeros and ones are exact


def test_device_view(cuda):
    """Pinned memory as a tensor of the GPU, which keeps it alive."""
    host = torch.arange(100, dtype=torch.int32).pin_memory().view(10, 10)
    mapped = _memory.device_view(host, cuda)
    assert (mapped.shape, mapped.dtype, mapped.device) == (host.shape, host.dtype, cuda)
    host.add_(1)
    torch.cuda.synchronize()
    assert_same_bits(mapped.cpu(), host)
    address = host.data_ptr()
    del host
    assert mapped.data_ptr() == address and torch.zeros(100, dtype=torch.int32).pin_memory().data_ptr() != address
    assert mapped.cpu().flatten().tolist() == list(range(1, 101))
    with pytest.raises(RuntimeError):
        _memory.device_view(torch.zeros(100, dtype=torch.uint8), cuda)
    assert mapped.cpu()[0, 0] == 1


# ---- more than 4 GiB ----


GIB = 1 << 30
ROW_VALUES = 256


@pytest.fixture(scope="module")
def large(cuda, cannot_run):
    """(x, block): 5.5 GiB of float32 rows of 1 KiB, a block of rows over and over."""
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 24 * GIB:
        cannot_run("tables over 4 GiB need 24 GiB of free host memory")
    if torch.cuda.mem_get_info(cuda)[0] < 24 * GIB:
        cannot_run("tables over 4 GiB need 24 GiB of free GPU memory")
    block = embedding(65537, ROW_VALUES)
    repeats = -(-11 * GIB // 2 // block.nbytes)
    yield block.repeat(repeats, 1), block
    torch.cuda.empty_cache()


def check_large(table, block, cuda):
    num_rows = len(table)
    assert table.original_bytes > 5 * GIB
    assert max(table.slots.numel(), table.overflow.numel()) > 4 * GIB
    last = torch.arange(num_rows - 5000, num_rows)
    middle = 4 * GIB // 1024 + torch.arange(-2500, 2500)
    for ids in (last, middle, torch.randint(num_rows, (20000,))):
        assert_same_bits(ibp.index_select(table, ids.to(cuda), check=True).cpu(), block[ids % len(block)])
    assert_same_bits(table[num_rows - 1].cpu(), block[(num_rows - 1) % len(block)])
    out = torch.empty(table.shape, device=cuda)
    table.decompress(out=out, check=True)
    expected = block.to(cuda).view(torch.int32)
    for first in range(0, num_rows, len(block)):
        rows = out[first : first + len(block)].view(torch.int32)
        assert torch.equal(rows, expected[: len(rows)]), f"rows from {first}"


@pytest.mark.slow
@pytest.mark.parametrize("scheme, layout, place",
    [("ibp", "slots", "pinned"), ("ibp", "packed", "device"), ("planes", "slots", "device"),
                                                   ("planes", "packed", "pinned")])  # fmt: skip
def test_tables_over_4_gib(cuda, large, scheme, layout, place):
    x, block = large
    table = ibp.compress(x, scheme=scheme, device=cuda, layout=layout)
    assert table.is_pinned() and table.scheme == scheme
    check_large(table if place == "pinned" else table.to(cuda), block, cuda)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", CODED)
def test_tables_over_4_gib_on_the_cpu(cuda, large, scheme):
    """The same rows through the C core."""
    x, block = large
    table = ibp.compress(x, scheme=scheme, device=cuda, layout="packed")
    assert table.scheme == scheme
    for first in (0, len(x) - 4000, 4 * GIB // 1024 - 2000):
        assert_same_bits(table[first : first + 4000], x[first : first + 4000])
    ids = torch.randint(len(x), (20000,))
    assert_same_bits(ibp.index_select(table, ids), block[ids % len(block)])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", CODED)
def test_in_place_over_4_gib(cuda, large, scheme):
    x, block = large
    on_gpu = x.to(cuda)
    table = ibp.compress(on_gpu, scheme=scheme, inplace=True)
    assert table.scheme == scheme
    assert table.slots.data_ptr() == on_gpu.data_ptr() and table.slots.numel() > 5 * GIB
    check_large(table, block, cuda)
