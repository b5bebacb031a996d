"""Large tables: ids by windows, selections that the CPU gathers for a GPU, and the paths of index_select; on small
tables, which know no difference."""

import numpy as np
import pytest
import torch

import ibp
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import (
    LAYOUTS,
    assert_same_bits,
    embedding,
    layout_arguments,
    make_tensor,
    one_hot_rows,
    reckon_with,
    sized,
    spiky_rows,
)
from ibp._fetch import gather, host_gather
from ibp._rows import handle
from ibp._rows.table import handle_on

CPU = torch.device("cpu")
CODED = ["ibp", "planes"]
KINDS = ["raw", *CODED]
NAMES = ["gpu", "bucketed", "cpu", None]


def check_partition(ids, num_items, window_bits, stable):
    sorted_ids, positions = OPS.partition_ids(ids, num_items, window_bits)
    assert (
        sorted_ids.dtype == ids.dtype
        and positions.dtype == torch.int32
        and sorted_ids.device == positions.device == ids.device
    )
    ids, sorted_ids, positions = ids.cpu(), sorted_ids.cpu(), positions.cpu().long()
    assert torch.equal(positions.sort().values, torch.arange(len(ids)))
    assert torch.equal(sorted_ids, ids[positions])
    windows = ids.long().clamp(0, max(0, num_items - 1)) >> window_bits
    if stable:
        assert torch.equal(positions, windows.sort(stable=True).indices)
    else:
        assert torch.equal(windows[positions], windows.sort().values)


def partition_cases():
    """(ids, num_items, window_bits): none, few, many, all alike, in order, out of range, windows of one item and one
    window."""
    for count, num_items, window_bits in (
        (0, 10, 0),
        (1, 1, 0),
        (31, 5, 0),
        (33, 100, 3),
        (5000, 1 << 16, 0),
        (5000, 70_001, 5),
        (70_000, 1 << 30, 14),
        (999, 7, 62),
    ):
        anywhere = torch.randint(num_items, (count,))
        yield anywhere, num_items, window_bits
        yield anywhere.sort().values, num_items, window_bits
        yield anywhere // max(1, num_items // 3), num_items, window_bits
        yield torch.full((count,), num_items - 1), num_items, window_bits
        yield (
            torch.where(torch.rand(count) < 0.1, torch.randint(-(2**31), 2**31 - 1, (count,)), anywhere),
            num_items,
            window_bits,
        )
    yield torch.tensor([2**62, -(2**63), 3, 2**63 - 1]), 5, 1
    yield torch.tensor([0, -1]), 0, 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_partition(dtype):
    for ids, num_items, window_bits in partition_cases():
        if dtype == torch.int64 or ids.numel() == 0 or int(ids.abs().max()) < 2**31:
            check_partition(ids.to(dtype), num_items, window_bits, stable=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_partition_on_the_gpu(cuda, dtype):
    for ids, num_items, window_bits in partition_cases():
        if dtype == torch.int64 or ids.numel() == 0 or int(ids.abs().max()) < 2**31:
            check_partition(ids.to(dtype).to(cuda), num_items, window_bits, stable=False)


def test_partition_refuses_too_many_windows():
    with pytest.raises(RuntimeError, match="65537 items fall into more than 65536 windows"):
        OPS.partition_ids(torch.tensor([0]), 65537, 0)
    with pytest.raises(RuntimeError, match="int32 or int64"):
        OPS.partition_ids(torch.tensor([0.5]), 5, 0)


@pytest.mark.parametrize("num_items", [0, 1, 5, 65_536, 65_537, 10**6, 10**9])
@pytest.mark.parametrize("item_bytes", [0, 4, 37, 352, 65_536, 10**6])
def test_window_bits(num_items, item_bytes):
    bits = handle.window_bits(num_items, num_items * item_bytes)
    windows = ((max(1, num_items) - 1) >> bits) + 1
    assert windows <= handle.MAX_WINDOWS
    if (
        bits and num_items * item_bytes and num_items > 1
    ):  # no larger than need be: at most twice 64 KiB, or at least half of the windows
        assert item_bytes << (bits - 1) < handle.WINDOW_BYTES or 2 * windows >= handle.MAX_WINDOWS
    if windows > 1 and item_bytes:
        assert item_bytes << bits >= handle.WINDOW_BYTES // 2


@pytest.mark.slow
@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_partitioned_gather_puts_items_where_they_belong(layout, scheme):
    if scheme == "raw" and layout != "in place":
        pytest.skip("raw tables have one layout")
    x = spiky_rows(3000, 60)
    table = ibp.compress(
        x, scheme=scheme, device="cpu", memory="host", **(layout_arguments(layout, 240) if scheme != "raw" else {})
    )
    for count in (0, 1, 777):
        ids = torch.randint(3000, (count,))
        sorted_ids, positions = OPS.partition_ids(ids, 3000, 4)
        out, fault = torch.full((count, 60), 7.0), torch.zeros(4, dtype=torch.int64)
        OPS.gather_items(*values_of(table, CPU), sorted_ids, 0, out, fault, positions)
        assert fault.tolist() == [0, 0, 0, 0]
        assert_same_bits(out, x[ids])


def test_positions_outside_are_noted():
    x = spiky_rows(30, 60)
    table = ibp.compress(x, device="cpu", memory="host")
    out, fault = torch.full((3, 60), 7.0), torch.zeros(4, dtype=torch.int64)
    for bad in (3, -1, 2**31 - 1):
        OPS.gather_items(
            *values_of(table, CPU),
            torch.tensor([4, 5]),
            0,
            out,
            fault.zero_(),
            torch.tensor([bad, 1], dtype=torch.int32),
        )
        assert fault.tolist()[:3] == [2, bad % 2**32, 4]
        assert_same_bits(out[1], x[5])
        assert (out[[0, 2]] == 7).all()
    with pytest.raises(RuntimeError, match="positions"):
        OPS.gather_items(
            *values_of(table, CPU), torch.tensor([4, 5]), 0, out, fault, torch.tensor([0], dtype=torch.int32)
        )


# ---- selections, decoded on the CPU ----


def fetch_by_selections(table, ids, chunk_bytes, num_rows=None):
    """What host_gather.fetch does, with one chunk, no pinned memory and the CPU for the GPU. Returns (items, sizes of
    the chunks)."""
    num_rows = min(
        num_rows or host_gather.rows_at_once(table), len(ids) * (table.geometry.item_bytes // table.row_bytes)
    )
    memory = torch.full((chunk_bytes,), 0xA5, dtype=torch.uint8)
    out = torch.empty((len(ids), *table.shape[1:]), dtype=table.dtype)
    fault, order, first, sizes = torch.zeros(4, dtype=torch.int64), torch.arange(len(ids), dtype=torch.int32), 0, []
    while first < len(ids):
        parts = host_gather.parts_of(memory, num_rows)
        num_items, _ = host_gather.select(table, ids, first, parts)
        host_gather.decode(table, parts, first, num_items, order, 0, out, fault)
        assert fault.tolist() == [0, 0, 0, 0] and num_items > 0
        sizes.append(num_items)
        first += num_items
    return out, sizes


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "columns, row_bytes", [(60, None), (60, 80), (1, None), pytest.param(3000, 4000, marks=pytest.mark.slow)]
)
def test_selections(layout, scheme, columns, row_bytes):
    """Items of one and of several rows, rows that overflow their slots, ids of both dtypes, chunks cut by rows and by
    bytes."""
    if scheme == "raw" and layout != "in place":
        pytest.skip("raw tables have one layout")
    x = spiky_rows(300, columns)
    table = ibp.compress(
        x,
        scheme=scheme,
        row_bytes=row_bytes,
        device="cpu",
        memory="host",
        **(layout_arguments(layout, row_bytes or 4 * columns) if scheme != "raw" else {}),
    )
    rows_per_item = 4 * columns // table.row_bytes
    for ids in (
        torch.randint(300, (500,)),
        torch.randint(300, (499,), dtype=torch.int32),
        torch.tensor([299]),
        torch.full((100,), 7),
    ):
        out, sizes = fetch_by_selections(table, ids, 1 << 20 if columns < 3000 else 16 << 20)
        assert_same_bits(out, x[ids.long()])
        out, sizes = fetch_by_selections(
            table, ids, (rows_per_item + 40) * table.row_bytes + 8192, num_rows=64 * rows_per_item
        )
        assert_same_bits(out, x[ids.long()])
        assert len(sizes) >= len(ids) / 64


def test_chunks_are_cut_where_rows_are_longer_than_expected(monkeypatch):
    """Nearly all of a table's rows are short, all of those asked for are long."""
    x = torch.zeros(20_000, 64)
    x[:100] = torch.randn(100, 64)
    monkeypatch.setattr(host_gather, "CHUNK_BYTES", 1 << 16)
    table = ibp.compress(x, scheme="planes", layout="packed", device="cpu", memory="host")
    ids = torch.randint(100, (2000,))
    out, sizes = fetch_by_selections(table, ids, host_gather.CHUNK_BYTES)
    assert_same_bits(out, x[ids])
    assert max(sizes) < host_gather.rows_at_once(table), "every chunk was cut by its bytes"


def test_items_that_cannot_be_selected():
    for shape, dtype, row_bytes in (
        ((50, 8), torch.int32, 64),
        ((50, 100), torch.uint8, 64),
        ((50,), torch.int32, None),
        ((7, 0), torch.int32, None),
        ((2, 9 << 20), torch.uint8, 65536),
    ):
        table = ibp.compress(
            make_tensor(shape, dtype, "equal"), scheme="raw", row_bytes=row_bytes, device="cpu", memory="host"
        )
        assert host_gather.rows_at_once(table) == 0
    table = ibp.compress(spiky_rows(50, 60), row_bytes=100, scheme="ibp", device="cpu", memory="host")
    parts = host_gather.parts_of(torch.empty(1 << 20, dtype=torch.uint8), 100)
    with pytest.raises(RuntimeError, match="not whole rows"):
        host_gather.select(table, torch.tensor([0]), 0, parts)


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_selections_from_damaged_tables(layout, scheme):
    """Where the ids or the index are bad, an error; never a read outside."""
    x = spiky_rows(300, 60)
    table = ibp.compress(x, scheme=scheme, device="cpu", memory="host", **layout_arguments(layout, 240))
    parts = host_gather.parts_of(torch.empty(1 << 20, dtype=torch.uint8), 1000)
    for ids, first, message in (
        (torch.tensor([1, 300]), 0, r"ids\[1\] is 300"),
        (torch.tensor([1, 5, -1]), 1, r"ids\[2\] is -1"),
    ):
        with pytest.raises(IndexError, match=message):
            host_gather.select(table, ids, first, parts)
    table.lengths.view(torch.int16)[7] = -1
    with pytest.raises(ibp.CorruptTableError, match="item or row 7 at position 2"):
        host_gather.select(table, torch.tensor([6, 5, 7]), 1, parts)
    rng = np.random.default_rng(0)
    for _ in range(50):
        table.lengths.view(torch.int16)[:] = torch.from_numpy(rng.integers(-(2**15), 300, 300).astype(np.int16))
        table.bases[:] = torch.from_numpy(
            rng.integers(-(2**62), 2**62, len(table.bases)) % (table.overflow.numel() + 64)
        )
        ids = torch.randint(300, (4,))
        if (table.lengths.to(torch.int64)[ids] > 240).any():
            with pytest.raises(ibp.CorruptTableError):
                host_gather.select(table, ids, 0, parts)
        else:
            try:
                taken, _ = host_gather.select(table, ids, 0, parts)
                assert taken == 4
            except ibp.CorruptTableError as error:
                assert layout != "in place" or "item or row" in str(error)


# ---- paths ----


def test_paths_that_do_not_exist():
    x = spiky_rows(300, 60)
    table = ibp.compress(x, device="cpu", memory="host")
    ids = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="'fast'; wanted one of 'gpu', 'bucketed', 'cpu', or None"):
        table.index_select(ids, path="fast")
    for path in ("gpu", "bucketed"):
        with pytest.raises(ValueError, match="wanted a pinned table and device='cuda'"):
            table.index_select(ids, path=path)
    with pytest.raises(ValueError, match="the result goes to cpu"):
        table.index_select(ids, path="cpu")


def test_looks_sorted():
    ordered = torch.arange(100_000)
    assert handle.looks_sorted(ordered) and handle.looks_sorted(ordered // 7) and handle.looks_sorted(ordered[:1])
    assert not handle.looks_sorted(ordered.flip(0)) and not handle.looks_sorted(torch.randperm(100_000))


def choice(table, ids, cuda):
    """The path that a call without `path` takes to a GPU; None: the CPU decodes."""
    worker = cuda if table.is_pinned() or table.is_cuda else CPU
    if not ids.is_cuda and gather._way_from_cpu(table, handle_on(table, worker), ids, cuda, worker, None, 0) is None:
        return "cpu"
    if worker == CPU:
        return None
    made = handle_on(table, cuda).plan
    least = made.least_bucketed if ids.is_cuda else made.least_from_cpu
    return "bucketed" if len(ids) >= least and (ids.is_cuda or not handle.looks_sorted(ids)) else "gpu"


def make_table(x, scheme, place, cuda, **arguments):
    table = ibp.compress(
        x.to(cuda) if place == "device" else x,
        scheme=scheme,
        memory={"pinned": "pinned", "pageable": "host", "device": None}[place],
        device=cuda,
        **arguments,
    )
    assert table.is_pinned() == (place == "pinned")
    return table


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["raw", "ibp", "planes"])
def test_multiprocessors_of_bucketed_ids(scheme):
    """As many as decode at the rate of the link: few for rows that save little, all for rows of which little comes."""
    machine = ibp.calibration.H200
    table = ibp.compress(embedding(2000, 256, torch.bfloat16), scheme=scheme, memory="host")
    sms = handle.bucketed_sms(table, machine, 132)
    assert sms == machine.bucketed_sms if scheme == "raw" else machine.bucketed_sms < sms < 132 // 3
    if scheme != "raw":
        sparse = ibp.compress(one_hot_rows(500, 3000), scheme=scheme, memory="host")
        assert handle.bucketed_sms(sparse, machine, 132) == 0
        assert handle.bucketed_sms(table, machine, 8) == 0


@pytest.mark.parametrize(
    "gib, stored_bytes, item_bytes, num_ids, on_gpu, on_cpu",
    [
        (4, 128, 128, 1_000_000, "bucketed", "bucketed"),
        (16, 512, 512, 1_000_000, "bucketed", "bucketed"),
        (16, 512, 512, 100_000, "bucketed", "cpu"),
        (16, 342, 512, 100_000, "bucketed", "cpu"),
        (0.625, 128, 512, 65_536, "bucketed", "gpu"),
        (0.625, 2048, 2048, 65_536, "gpu", "gpu"),
        (0.625, 64, 14_812, 16_384, "gpu", "gpu"),
    ],
)
def test_what_is_expected_of_paths(gib, stored_bytes, item_bytes, num_ids, on_gpu, on_cpu):
    """The paths of ids on a GPU and on the CPU, as large_table.csv (an H200) and paths.csv measured them."""
    num_items = int(gib * 2**30) // stored_bytes
    table = sized(num_items, item_bytes, num_items * stored_bytes)
    machine = ibp.calibration.H200
    for ids_on_gpu, expected in ((True, on_gpu), (False, on_cpu)):
        promised = {
            "gpu": handle.fetched_ns(table, machine),
            "bucketed": handle.PROMISED * handle.bucketed_ns(table, num_ids, ids_on_gpu, machine),
        }
        if not ids_on_gpu:
            promised["cpu"] = handle.PROMISED * handle.staged_ns(table, num_ids, machine, 16)
        assert min(promised, key=promised.get) == expected, promised


def test_choices(cuda, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    x = embedding(200_000, 64)
    pinned, pageable, on_gpu = (make_table(x, "planes", place, cuda) for place in ("pinned", "pageable", "device"))
    many, few = torch.randint(200_000, (100_000,)), torch.randint(200_000, (100,))
    assert choice(pinned, many, cuda) == "gpu", "a small table"
    assert choice(pageable, many, cuda) == "cpu" and choice(pageable, few, cuda) is None
    reckon_with(monkeypatch, reach_bytes=1 << 20)
    for ids in (many, many.to(cuda)):
        assert choice(pinned, ids, cuda) == "bucketed", "its ids are so near that they share addresses"
    for ids in (few, few.to(cuda)):
        assert choice(pinned, ids, cuda) == "gpu"
    reckon_with(monkeypatch, reach_bytes=1 << 20, sorted_row_ns=1e4)
    assert choice(pinned, many, cuda) == "cpu", "an order of places gains nothing"
    reckon_with(monkeypatch, reach_bytes=1 << 20)
    assert choice(on_gpu, many.to(cuda), cuda) == "gpu"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choice(pinned, many, cuda) == "bucketed"
    assert choice(pinned, many.sort().values, cuda) == "gpu"


@pytest.mark.parametrize("place, count", [("pageable", 100_000), ("pageable", 100), ("pinned", 100_000)])
def test_what_the_cpu_gathers_by_itself(cuda, monkeypatch, place, count):
    """Many rows of pageable memory, whatever says where they go."""
    fetched, fetch = [], host_gather.fetch
    monkeypatch.setattr(host_gather, "fetch", lambda *given: (fetched.append(1), fetch(*given)))
    x = embedding(200_000, 64)
    table, ids = make_table(x, "planes", place, cuda), torch.randint(200_000, (count,))
    out = torch.empty(count, 64, dtype=x.dtype, device=cuda)
    for options in ({"device": cuda}, {"out": out}, {"device": cuda, "out": out, "check": True}):
        assert_same_bits(ibp.index_select(table, ids, **options).cpu(), x[ids])
    assert len(fetched) == (3 if place == "pageable" and count == 100_000 else 0)


def paths_of(ids, place):
    """The paths that ids on the CPU or the GPU can take out of a table in a place."""
    of_gpu = ["gpu", "bucketed"] if place != "pageable" else []
    return of_gpu + (["cpu"] if place != "device" and not ids.is_cuda else []) + [None]


@pytest.fixture
def small_is_large(monkeypatch):
    """Thresholds that make every table large, so that path=None takes each of the paths too."""
    reckon_with(monkeypatch, reach_bytes=1, random_row_ns=1e6)
    monkeypatch.setattr(handle, "LEAST_BUCKETED_IDS", 128)
    monkeypatch.setattr(handle, "LEAST_STAGED_BYTES", 1000)


@pytest.mark.parametrize("place", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_path_gives_the_same(cuda, small_is_large, layout, scheme, place):
    if scheme == "raw" and layout != "in place":
        pytest.skip("raw tables have one layout")
    x = spiky_rows(5000, 60)
    table = make_table(x, scheme, place, cuda, **(layout_arguments(layout, 240) if scheme != "raw" else {}))
    for dtype in (torch.int32, torch.int64):
        for ids in (
            torch.randint(5000, (3333,)),
            torch.arange(5000),
            torch.full((1000,), 4999),
            torch.tensor([17]),
            torch.empty(0),
        ):
            for device in (CPU, cuda):
                chosen, expected = ids.to(dtype).to(device), x[ids.long()]
                for path in paths_of(chosen, place):
                    assert_same_bits(
                        ibp.index_select(table, chosen, device=cuda, path=path, check=True).cpu(), expected
                    )
                    out = torch.full((len(ids), 60), 7.0, device=cuda)
                    assert table.index_select(chosen, out=out, path=path, check=True, max_sms=2) is out
                    assert_same_bits(out.cpu(), expected)


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("columns, row_bytes", [(2000, 800), (1, None), (5000, 4000)])
def test_items_of_several_rows(cuda, small_is_large, path, columns, row_bytes):
    x = spiky_rows(2000, columns)
    table = make_table(x, "planes", "pinned", cuda, row_bytes=row_bytes, slot_bytes=32 if columns > 8 else None)
    ids = torch.randint(2000, (3000,))
    assert_same_bits(ibp.index_select(table, ids, device=cuda, path=path, check=True).cpu(), x[ids])


def test_many_chunks(cuda, monkeypatch, small_is_large):
    """More bytes than the ring holds, on two streams by turns, with work of the GPU in front that lets the ring
    fill."""
    x = embedding(50_000, 256, torch.bfloat16)
    table = make_table(x, "planes", "pinned", cuda)
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    chosen = [torch.randint(50_000, (120_000,)) for _ in range(4)]
    for k, ids in enumerate(chosen):
        with torch.cuda.stream(streams[k % 2]):
            torch.cuda._sleep(20_000_000)
            results.append(ibp.index_select(table, ids, device=cuda, path="cpu"))
    torch.cuda.synchronize()
    for ids, result in zip(chosen, results):
        assert_same_bits(result.cpu(), x[ids])
    table.check()


@pytest.mark.parametrize("path", ["gpu", "bucketed", "cpu"])
def test_the_current_stream_is_used(cuda, path):
    """The output is overwritten late on a side stream: work on any other stream would come before that."""
    x = spiky_rows(5000, 60)
    table = make_table(x, "planes", "pinned", cuda)
    ids, out = torch.randint(5000, (2000,)), torch.empty(2000, 60, device=cuda)
    near = ids if path == "cpu" else ids.to(cuda)
    ibp.index_select(table, near, out=out, path=path)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        out.fill_(7)
        ibp.index_select(table, near, out=out, path=path)
    stream.synchronize()
    assert_same_bits(out.cpu(), x[ids])


@pytest.mark.parametrize("path", ["gpu", "bucketed", None])
@pytest.mark.parametrize("place", ["pinned", "device"])
def test_graphs(cuda, small_is_large, place, path):
    x = spiky_rows(5000, 60)
    table = make_table(x, "planes", place, cuda, slot_bytes=32)
    ids, out = torch.randint(5000, (2000,), device=cuda), torch.empty(2000, 60, device=cuda)
    ibp.index_select(table, ids, out=out, path=path)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.index_select(table, ids, out=out, path=path)
    for _ in range(3):
        others = torch.randint(5000, (2000,))
        ids.copy_(others)
        out.zero_()
        graph.replay()
        assert_same_bits(out.cpu(), x[others])
    ids[5] = 5000
    graph.replay()
    with pytest.raises(IndexError, match=r"ids\[5\] is 5000"):
        table.check()


def test_the_cpu_path_cannot_be_captured(cuda):
    table = make_table(spiky_rows(5000, 60), "planes", "pinned", cuda)
    ids, out = torch.randint(5000, (2000,)), torch.empty(2000, 60, device=cuda)
    ibp.index_select(table, ids, out=out, path="cpu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="cannot be captured"):
        with torch.cuda.graph(graph):
            ibp.index_select(table, ids, out=out, path="cpu")
    torch.cuda.synchronize()


def test_paths_that_cannot_be_taken(cuda):
    x = spiky_rows(300, 60)
    ids = torch.tensor([1, 2])
    pinned, pageable, on_gpu = (make_table(x, "planes", place, cuda) for place in ("pinned", "pageable", "device"))
    for table, chosen, arguments, message in (
        (pageable, ids.to(cuda), {"path": "gpu"}, "wanted a pinned table.*pageable"),
        (pageable, ids, {"path": "bucketed", "device": cuda}, "wanted a pinned table"),
        (pinned, ids, {"path": "bucketed"}, "device='cuda'"),
        (pinned, ids.to(cuda), {"path": "cpu"}, "wants ids on the CPU"),
        (on_gpu, ids, {"path": "cpu", "device": cuda}, "the table is on cuda:0"),
        (ibp.compress(x, row_bytes=100), ids, {"path": "cpu", "device": cuda}, "items of whole rows"),
    ):
        with pytest.raises(ValueError, match=message):
            ibp.index_select(table, chosen, **arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("path", NAMES)
def test_bad_ids(cuda, small_is_large, path, dtype):
    x = spiky_rows(500, 60) + 1
    table = make_table(x, "planes", "pinned", cuda)
    for bad in (500, -1, 2**31 - 1):
        ids = torch.randint(500, (2000,)).to(dtype)
        ids[77] = bad
        with pytest.raises(IndexError, match=rf"ids\[77\] is {bad}; wanted 0 to 499"):
            ibp.index_select(table, ids, device=cuda, path=path)
        if path == "cpu":
            continue
        out = torch.full((2000, 60), 7.0, device=cuda)
        ibp.index_select(table, ids.to(cuda), out=out, path=path)
        good = torch.arange(2000) != 77
        assert_same_bits(out.cpu()[good], x[ids[good].long()])
        assert (out[77] == 0).all()
        with pytest.raises(IndexError, match=rf"ids\[77\] is {bad}; wanted 0 to 499"):
            table.check()
    assert_same_bits(ibp.index_select(table, torch.tensor([3]), device=cuda, check=True).cpu(), x[3:4])


def test_a_pageable_table_and_ids_on_the_gpu(cuda, small_is_large):
    """Bad ids are noticed on the CPU, which brings them there."""
    x = spiky_rows(500, 60)
    table = make_table(x, "planes", "pageable", cuda)
    ids = torch.randint(500, (2000,), device=cuda)
    assert_same_bits(ibp.index_select(table, ids).cpu(), x[ids.cpu()])
    ids[1500] = 500
    with pytest.raises(IndexError, match=r"ids\[1500\] is 500"):
        ibp.index_select(table, ids)


@pytest.mark.parametrize("path", ["gpu", "bucketed", "cpu"])
def test_corrupt_rows(cuda, path):
    """A row whose coded bytes contradict their length is noticed by the GPU that decodes it, with its position."""
    x = embedding(500, 64, torch.bfloat16)
    table = make_table(x, "planes", "pinned", cuda)
    assert int(table.lengths.to(torch.int64)[33]) > 2
    table.lengths.view(torch.int16)[33] -= 1
    ids = torch.randperm(500)
    position = int((ids == 33).nonzero())
    out = torch.full((500, 64), 7.0, dtype=torch.bfloat16, device=cuda)
    ibp.index_select(table, ids, out=out, path=path)
    with pytest.raises(ibp.CorruptTableError, match=rf"position {position}\b|ids\[{position}\]"):
        table.check()
    good = ids != 33
    assert_same_bits(out.cpu()[good], x[ids[good]])
    assert (out[position] == 0).all()
    table.check()


def test_positions_outside_are_noted_by_the_gpu(cuda):
    x = spiky_rows(30, 60)
    arguments = values_of(make_table(x, "planes", "device", cuda), cuda)
    out, fault = torch.full((3, 60), 7.0, device=cuda), torch.zeros(4, dtype=torch.int64, device=cuda)
    OPS.gather_items(
        *arguments,
        torch.tensor([4, 5], device=cuda),
        0,
        out,
        fault,
        torch.tensor([3, 1], dtype=torch.int32, device=cuda),
    )
    assert fault.tolist()[:3] == [2, 3, 4]
    assert_same_bits(out[1].cpu(), x[5])
    assert (out[[0, 2]] == 7).all()


def test_a_second_call_allocates_only_what_it_returns(cuda):
    """The staging ring is made once."""
    x = embedding(20_000, 64)
    table = make_table(x, "planes", "pinned", cuda)
    ids, out = torch.randint(20_000, (30_000,)), torch.empty(30_000, 64, device=cuda)
    ibp.index_select(table, ids, out=out, path="cpu", check=True)
    before = torch.cuda.memory_stats(cuda)
    ibp.index_select(table, ids, out=out, path="cpu", check=True)
    after = torch.cuda.memory_stats(cuda)
    assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"]
    assert after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"] <= 4 * 30_000 + 512
    assert host_gather.NUM_CHUNKS * host_gather.CHUNK_BYTES * 2 <= 64 << 20
