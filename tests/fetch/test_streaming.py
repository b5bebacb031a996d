"""Whole tensors: lists of them, and on a GPU the stream of chunks through a ring. With IBP_REQUIRE_CUDA=1 no GPU test
may skip.

The chunks themselves are tested in tests/c/test_stream.c.
"""

import functools
import types

import pytest
import torch

import ibp
from helpers import (
    LAYOUTS,
    assert_same_bits,
    bytes_of,
    embedding,
    in_threads,
    layout_arguments,
    make_tensor,
    pairwise,
    reckon_with,
    spiky_rows,
)
from ibp._fetch import streaming
from ibp._rows.table import handle_on

CPU = torch.device("cpu")
OPS = torch.ops.ibp
CODED = ["ibp", "planes"]
SMALL_RING = 4 * (16 << 10)  # each place holds two groups of 32 rows of 240 bytes


def make_table(x, layout="packed", **arguments):
    row_bytes = (
        arguments["codebook"].row_bytes
        if "codebook" in arguments
        else arguments.get("row_bytes", x.shape[1:].numel() * x.element_size())
    )
    return ibp.compress(x, **layout_arguments(layout, row_bytes), **arguments)


def packed_raw_table(x):
    """A table of raw rows back to back in overflow, as compress never makes one."""
    data, row_bytes = bytes_of(x), x.shape[1] * x.element_size()
    nothing = torch.empty(0, dtype=torch.uint8)
    bases = OPS.index_rows(torch.empty(0, dtype=torch.uint16), data.numel(), row_bytes, 0)
    return ibp.CompressedTensor(
        shape=x.shape,
        dtype=x.dtype,
        scheme="raw",
        row_bytes=row_bytes,
        slot_bytes=0,
        slots=nothing,
        overflow=data,
        lengths=nothing.view(torch.uint16),
        bases=bases[:-1].clone(),
        codebook=None,
    )


HALF_ROW, HALF_CODED = 128, 4 + 64


def half_codebook():
    """Rows of 128 bytes, of whose chunks of 4 bytes two are fixed."""
    mask = torch.tensor([255, 255, 0, 0] * 32, dtype=torch.uint8)
    return ibp.codecs.Codebook.from_masks(mask, torch.zeros_like(mask), 4)


def half_rows(num_rows, seed=0):
    """Rows that all participate in every chunk, so that all of them have the same coded length."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 256, (num_rows, 32, 4), dtype=torch.uint8, generator=generator)
    rows[:, :, :2] = 0
    return rows.view(num_rows, HALF_ROW)


def poisoned(x, device):
    return (
        torch.full((x.numel() * x.element_size(),), 0xA5, dtype=torch.uint8, device=device).view(x.dtype).view(x.shape)
    )


# ---- lists, anywhere ----


@pytest.mark.parametrize("scheme", CODED)
def test_many_on_the_cpu(scheme):
    xs = [
        spiky_rows(300, 60),
        make_tensor((70, 45), torch.int16),
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.randn(100, 7),
    ]
    tables = [
        ibp.compress(x, scheme=scheme, layout=layout, memory="host") for x in xs for layout in ("slots", "packed")
    ]
    results = ibp.decompress(tables)
    assert isinstance(results, list) and len(results) == 2 * len(xs)
    for result, x in zip(results, [x for x in xs for _ in range(2)]):
        assert_same_bits(result, x)
    for result, x in zip(ibp.decompress(iter(tables[::2]), device="cpu", check=True, max_sms=3), xs):
        assert_same_bits(result, x)
    assert ibp.decompress([]) == [] == ibp.decompress([], out=[])


def test_many_into_given_tensors():
    xs = [spiky_rows(100, 60, seed) for seed in range(3)]
    tables = [ibp.compress(x, memory="host") for x in xs]
    outs = [torch.empty_like(xs[0]), None, torch.empty_like(xs[2])]
    results = ibp.decompress(tables, out=outs)
    assert results[0] is outs[0] and results[2] is outs[2]
    for result, x in zip(results, xs):
        assert_same_bits(result, x)


def test_arguments_of_many():
    """What is wrong is said before anything is written."""
    xs = [spiky_rows(100, 60, seed) for seed in range(2)]
    tables, good = [ibp.compress(x, memory="host") for x in xs], poisoned(xs[0], CPU)
    with pytest.raises(ValueError, match="out has 1 tensors; wanted 2"):
        ibp.decompress(tables, out=[good])
    with pytest.raises(TypeError, match="table is a Tensor"):
        ibp.decompress([tables[0], xs[0]], out=[good, None])
    for bad, error in (
        (torch.empty(100, 61), ValueError),
        (torch.empty(100, 60, dtype=torch.int32), TypeError),
        (torch.empty(60, 100), ValueError),
        (3, TypeError),
    ):
        with pytest.raises(error, match="out"):
            ibp.decompress(tables, out=[good, bad])
    with pytest.raises(ValueError, match="max_sms is 0"):
        ibp.decompress(tables, out=[good, None], max_sms=0)
    with pytest.raises(ValueError, match="device"):
        ibp.decompress(tables, out=[good, None], device="meta")
    assert_same_bits(good, poisoned(xs[0], CPU))


def test_a_corrupt_table_of_many():
    x = half_rows(100)
    tables = [make_table(x, codebook=half_codebook(), memory="host") for _ in range(2)]
    assert tables[1].overflow.numel() == 100 * HALF_CODED
    tables[1].overflow[7 * HALF_CODED] = 0  # chunks that do not participate need more bytes than the row has
    outs = [poisoned(x, CPU) for _ in range(2)]
    with pytest.raises(ibp.CorruptTableError, match="row 7"):
        ibp.decompress(tables, out=outs)
    assert_same_bits(outs[0], x)
    expected = x.clone()
    expected[7] = 0
    assert_same_bits(outs[1], expected)


@pytest.mark.parametrize("number", [None, 1, 2])
def test_what_earlier_work_has_noted(number):
    """Compiled code on the CPU waits for nothing: the next call, of one table or of several, raises what it noted, once
    and before anything is written."""
    x = half_rows(100)
    table = make_table(x, codebook=half_codebook(), memory="host")
    table.overflow[7 * HALF_CODED] = 0
    handle = handle_on(table, CPU)
    OPS.decode_bytes(handle.table, 0, x.nbytes, 0, torch.empty_like(x), handle.faults.on(CPU))
    table.overflow.copy_(make_table(x, codebook=half_codebook(), memory="host").overflow)
    given, out = table if number is None else [table] * number, poisoned(x, CPU)
    outs = out if number is None else [out, None][:number]
    with pytest.raises(ibp.CorruptTableError, match="row 7 .*noted by an earlier call on cpu"):
        ibp.decompress(given, out=outs)
    assert_same_bits(out, poisoned(x, CPU))
    ibp.decompress(given, out=outs)
    assert_same_bits(out, x)


def test_packed_raw_rows_on_the_cpu():
    x = spiky_rows(101, 60)
    assert_same_bits(packed_raw_table(x).decompress(), x)


def test_sms_that_keep_up_with_the_link(monkeypatch):
    """More where more is decoded for what is brought, where the decoder is slow and where the link is fast."""

    def sms(x, scheme="planes", num_bytes=3 << 19):
        table = ibp.compress(x, scheme=scheme, memory="host", device="cpu")
        return streaming.sms_at_link_rate(table, torch.device("cpu"), num_bytes, 1 << 20)

    floats, small = embedding(500, 256, torch.bfloat16), torch.randn(500, 256).to(torch.float8_e4m3fn)
    few = sms(floats)
    assert few == sms(floats, "raw") == 8 and sms(floats, num_bytes=3 << 20) == 2 * few and sms(small) > few
    reckon_with(monkeypatch, copy_in_gbps=2 * ibp.calibration.H200.copy_in_gbps)
    assert sms(floats) == 2 * few


# ---- streams to a GPU ----


@pytest.fixture
def streamed(monkeypatch):
    """Every tensor is streamed, through a ring much smaller than it; holds the tables that were."""
    tables, decode = [], streaming.TensorStream.decode

    def noted(self, table, *rest):
        tables.append(table)
        decode(self, table, *rest)

    monkeypatch.setattr(streaming.TensorStream, "decode", noted)
    reckon_with(monkeypatch, least_streamed_bytes=0)
    monkeypatch.setattr(streaming, "_RING_BYTES", SMALL_RING)
    return tables


@pytest.mark.parametrize("num_rows, layout, scheme", pairwise([1, 31, 32, 33, 64, 65, 128, 500, 5001], LAYOUTS, CODED))
def test_chunk_borders(cuda, streamed, num_rows, layout, scheme):
    x = spiky_rows(num_rows, 60)
    table = make_table(x, layout, codebook=ibp.codecs.analyze(spiky_rows(5001, 60), scheme=scheme))
    for _ in range(2):
        out = poisoned(x, cuda)
        assert ibp.decompress(table, out=out, check=True) is out
        assert_same_bits(out.cpu(), x)
    assert len(streamed) == 2


@pytest.mark.parametrize("num_elements", [1, 4095, 123_457])
@pytest.mark.parametrize("layout", ["slots", "packed"])
def test_a_short_last_row(cuda, streamed, layout, num_elements):
    x = embedding(1, num_elements, torch.bfloat16)[0]
    table = ibp.compress(x, layout=layout, row_bytes=100)
    assert_same_bits(ibp.decompress(table, device=cuda, check=True).cpu(), x)
    assert len(streamed) == 1


@pytest.mark.parametrize("ring_bytes", [1, 512, 4 * 8192, 1 << 20, 32 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rings(cuda, streamed, monkeypatch, layout, ring_bytes):
    """One that cannot hold 32 rows too: those the kernel fetches itself."""
    monkeypatch.setattr(streaming, "_RING_BYTES", ring_bytes)
    x = spiky_rows(3000, 60)
    table, out = make_table(x, layout, scheme="planes"), poisoned(x, cuda)
    ibp.decompress(table, out=out, check=True)
    assert_same_bits(out.cpu(), x)
    assert len(streamed) == 1


@pytest.mark.parametrize("layout", ["slots", "packed"])
@pytest.mark.parametrize("scheme", CODED)
def test_large_tensors_are_streamed_by_themselves(cuda, monkeypatch, scheme, layout):
    """Through the real ring, with chunks of every size."""
    calls, decode = [], streaming.TensorStream.decode
    monkeypatch.setattr(streaming.TensorStream, "decode", lambda *arguments: (calls.append(1), decode(*arguments))[1])
    x = (torch.randn(100_003, 1024, device=cuda) * 0.02).to(torch.bfloat16)
    table = make_table(x.cpu(), layout, scheme=scheme)
    for options in ({}, {"max_sms": 4, "path": "copy"}, {"max_sms": 4}):  # the last one by a kernel
        out = poisoned(x, cuda)
        ibp.decompress(table, out=out, **options, check=True)
        assert torch.equal(out.view(torch.int16), x.view(torch.int16))
    assert len(calls) == 2
    small = make_table(x[:100].cpu(), layout, scheme=scheme)
    assert torch.equal(small.decompress(device=cuda, check=True).view(torch.int16), x[:100].view(torch.int16))
    assert len(calls) == 2


def test_raw_rows(cuda, streamed):
    x = spiky_rows(3001, 60)
    packed = packed_raw_table(x).pin_memory()
    assert packed.is_pinned()
    for table in (ibp.compress(x, scheme="raw"), packed):
        out = poisoned(x, cuda)
        ibp.decompress(table, out=out, check=True)
        assert_same_bits(out.cpu(), x)
    assert len(streamed) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranges(cuda, streamed, layout):
    x = spiky_rows(3000, 61)
    table = make_table(x, layout, scheme="ibp", row_bytes=100)
    for first, last in ((0, 3000), (0, 1), (2999, 3000), (37, 2999), (1000, 1000), (1023, 1025)):
        assert_same_bits(streaming.decode_items(table, first, last, cuda, check=True).cpu(), x[first:last])
    assert len(streamed) == 5


@pytest.mark.parametrize("max_sms", [1, 4, 8, 1000])
def test_max_sms(cuda, streamed, max_sms):
    x = spiky_rows(3000, 60)
    table = make_table(x, scheme="planes")
    for path, num_streamed in (("copy", 1), (None, 1)):
        assert_same_bits(ibp.decompress(table, device=cuda, max_sms=max_sms, path=path, check=True).cpu(), x)
        assert len(streamed) == num_streamed


def test_what_was_compressed_in_place(cuda, streamed):
    before = spiky_rows(3000, 60)
    table = ibp.compress(before.clone(), inplace=True)
    assert_same_bits(ibp.decompress(table, device=cuda, check=True).cpu(), before)
    assert len(streamed) == 1


@pytest.mark.parametrize("small_ring", [False, True])
def test_many(cuda, streamed, monkeypatch, small_ring):
    """Of all schemes, layouts and places, some with an out; each as often as it comes."""
    if not small_ring:
        monkeypatch.setattr(streaming, "_RING_BYTES", 32 << 20)
    xs = [
        spiky_rows(700, 60),
        embedding(999, 33, torch.bfloat16),
        torch.zeros(0, 3),
        spiky_rows(2000, 60, seed=1),
        torch.tensor(2.5),
    ]
    tables, want = [], []
    for x in xs:
        tables += [
            ibp.compress(x, scheme=scheme, layout=layout)
            for scheme in ("ibp", "planes", "raw")
            for layout in ("slots", "packed")
        ]
        tables += [ibp.compress(x, memory="host"), ibp.compress(x.to(cuda))]
        want += [x] * 8
    num_streamed = sum(table.is_pinned() and table.original_bytes > 0 for table in tables)
    tables.append(tables[0]), want.append(want[0])
    outs = [None if i % 3 else poisoned(x, cuda if i % 2 else "cpu") for i, x in enumerate(want)]
    for result, x, table in zip(ibp.decompress(tables, device=cuda), want, tables):
        assert result.device == cuda
        assert_same_bits(result.cpu(), x)
        table.check()
    assert len(streamed) == num_streamed + 1
    results = ibp.decompress(tables, out=outs, check=True)
    for i, (result, x, table) in enumerate(zip(results, want, tables)):
        assert result.device == (outs[i] if outs[i] is not None else table).device and (
            outs[i] is None or result is outs[i]
        )
        assert_same_bits(result.cpu(), x)


def test_one_stream_of_many(cuda, streamed, monkeypatch):
    """Only the last ends it, and none but the first may begin one; small ones are streamed if they are much
    together."""
    calls, stream_bytes = [], OPS.stream_bytes.default
    noted = types.SimpleNamespace(
        default=lambda *arguments: (calls.append(arguments[5:7]), stream_bytes(*arguments))[1]
    )
    monkeypatch.setattr(OPS, "stream_bytes", noted)
    xs = [spiky_rows(700, 60, seed) for seed in range(4)]
    tables = [make_table(x, scheme="planes") for x in xs]
    reckon_with(monkeypatch, least_streamed_bytes=sum(table.overflow.numel() for table in tables))
    for result, x in zip(ibp.decompress(tables, device=cuda), xs):
        assert_same_bits(result.cpu(), x)
    assert [ends for _, ends in calls] == [False, False, False, True]
    assert not any(begins for begins, _ in calls[1:])
    for result, x in zip(ibp.decompress(tables[:3], device=cuda), xs):
        assert_same_bits(result.cpu(), x)
    assert len(calls) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paths(cuda, streamed, monkeypatch, layout):
    """A path is taken where the sizes would choose the other one, and gives the same bits."""
    x = spiky_rows(700, 60)
    table = make_table(x, layout, scheme="planes")
    for path, num_streamed in (("gpu", 0), ("copy", 1)):
        reckon_with(monkeypatch, least_streamed_bytes=0 if path == "gpu" else 1 << 30)
        streamed.clear()
        for result in (
            table.decompress(device=cuda, path=path, max_sms=2, check=True),
            *ibp.decompress([table], device=cuda, path=path),
        ):
            assert_same_bits(result.cpu(), x)
        assert len(streamed) == 2 * num_streamed


def test_paths_that_cannot_be_taken():
    table = ibp.compress(spiky_rows(64, 60), memory="host")
    with pytest.raises(ValueError, match="path is 'bucketed'; wanted one of 'copy', 'gpu', or None"):
        ibp.decompress(table, path="bucketed")
    with pytest.raises(ValueError, match="path is 'bucketed'"):
        ibp.decompress([], path="bucketed")
    for path in ("copy", "gpu"):
        out = poisoned(torch.empty(64, 60), "cpu")
        with pytest.raises(
            ValueError,
            match=f"path '{path}' cannot be taken: it goes from pinned host memory to a GPU, but .* goes to cpu",
        ):
            ibp.decompress([table], out=[out], path=path)
        assert_same_bits(out, poisoned(torch.empty(64, 60), "cpu"))


# ---- streams and graphs ----


def test_the_ring_is_the_current_streams(cuda, streamed, monkeypatch):
    """Its memory is still written when the call is queued, and is written again right after: neither may meet the
    copies."""
    monkeypatch.setattr(streaming, "_RING_BYTES", 4 << 20)
    x = spiky_rows(3000, 60)
    table, outs = make_table(x, scheme="planes"), [poisoned(x, cuda) for _ in range(6)]
    ibp.decompress(table, out=outs[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for out in outs:
            before = torch.empty(4 << 20, dtype=torch.uint8, device=cuda)
            torch.cuda._sleep(10_000_000)
            before.fill_(0xA5)
            del before
            ibp.decompress(table, out=out)
            torch.full((4 << 20,), 0xA5, dtype=torch.uint8, device=cuda)
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bits(out.cpu(), x)
    table.check()


def test_the_call_does_not_wait(cuda, streamed, monkeypatch):
    monkeypatch.setattr(streaming, "_RING_BYTES", 1 << 20)  # few chunks: the GPU's own queue must hold them all
    x = spiky_rows(3000, 60)
    tables = [make_table(x, layout, scheme="planes") for layout in LAYOUTS]
    outs = [poisoned(x, cuda) for _ in tables]
    ibp.decompress(tables, out=outs)
    torch.cuda.synchronize()
    late = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        ibp.decompress(tables, out=outs)
        late.record()
        returned_early = not late.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert returned_early, "the call came back only when the GPU was done"
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bits(out.cpu(), x)


def test_memory(cuda, monkeypatch):
    """No temporary on the GPU larger than the ring, and none that stays."""
    reckon_with(monkeypatch, least_streamed_bytes=0)
    x = embedding(20_000, 512, torch.bfloat16)
    table, out = make_table(x, scheme="planes"), poisoned(x, cuda)
    ibp.decompress(table, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    ibp.decompress(table, out=out)
    assert streaming._RING_BYTES <= 64 << 20
    assert torch.cuda.max_memory_allocated(cuda) - before <= streaming._RING_BYTES
    assert torch.cuda.memory_allocated(cuda) == before
    assert_same_bits(out.cpu(), x)


def test_two_streams_at_once(cuda, streamed):
    xs = [spiky_rows(3000, 60, seed) for seed in range(4)]
    tables = [make_table(x, layout, scheme=scheme) for x, layout, scheme in zip(xs, LAYOUTS, CODED * 2)]
    for table in tables:
        ibp.decompress(table, device=cuda)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for round in range(5):
        for i, table in enumerate(tables):
            with torch.cuda.stream(streams[(i + round) % 2]):
                results.append((ibp.decompress(table, device=cuda), xs[i]))
                results += zip(ibp.decompress(tables[i:], device=cuda), xs[i:])
    torch.cuda.synchronize()
    for result, x in results:
        assert_same_bits(result.cpu(), x)


@pytest.mark.parametrize("own_stream", [True, False])
def test_threads(cuda, streamed, own_stream):
    """Each with tables of its own, on streams of their own or all on the default one."""
    num_threads, results = 4, {}
    xs = [spiky_rows(2000, 60, seed) for seed in range(num_threads)]
    tables = [[make_table(x, layout, scheme="planes") for layout in ("slots of 32", "packed")] for x in xs]
    for pair in tables:
        ibp.decompress(pair, device=cuda)
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.default_stream()):
            results[i] = [result for _ in range(10) for result in ibp.decompress(tables[i], device=cuda)]

    in_threads(*(functools.partial(work, i) for i in range(num_threads)))
    torch.cuda.synchronize()
    for i, x in enumerate(xs):
        assert len(results[i]) == 20
        for result in results[i]:
            assert_same_bits(result.cpu(), x)


@pytest.mark.parametrize("scheme", CODED)
def test_graphs(cuda, streamed, scheme):
    """One call and a list in one graph, replayed while other calls use other rings."""
    x = spiky_rows(3000, 60)
    tables = [make_table(x, layout, scheme=scheme) for layout in LAYOUTS] + [ibp.compress(x, scheme="raw")]
    outs = [poisoned(x, cuda) for _ in tables]
    single, others = poisoned(x, cuda), ibp.decompress(tables, device=cuda)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.decompress(tables[1], out=single)
        ibp.decompress(tables, out=outs)
    torch.cuda.synchronize()
    for out in (single, *outs):
        assert_same_bits(out.cpu(), poisoned(x, CPU))
    for _ in range(3):
        for out in (single, *outs):
            out.view(torch.uint8).fill_(0xA5)
        graph.replay()
        others = ibp.decompress(tables, device=cuda)
        for result in (single, *outs, *others):
            assert_same_bits(result.cpu(), x)
    for table in tables:
        table.check()


def test_a_graph_reads_the_table_as_it_is(cuda, streamed):
    xs = [half_rows(2000, seed) for seed in range(3)]
    table, *others = (make_table(x, codebook=half_codebook()) for x in xs)
    out = poisoned(xs[0], cuda)
    ibp.decompress(table, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.decompress(table, out=out)
    for x, coded in zip(xs, [table.overflow.clone(), *(other.overflow for other in others)]):
        table.overflow.copy_(coded)
        out.fill_(0xA5)
        graph.replay()
        assert_same_bits(out.cpu(), x)


def test_two_graphs(cuda, streamed):
    """Captured one after the other on the same stream, and replayed in the other order."""
    xs = [spiky_rows(2000, 60, seed) for seed in range(2)]
    tables = [make_table(x, scheme="planes") for x in xs]
    outs, graphs = [poisoned(x, cuda) for x in xs], [torch.cuda.CUDAGraph() for _ in xs]
    ibp.decompress(tables, device=cuda)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for table, out, graph in zip(tables, outs, graphs):
        with torch.cuda.graph(graph, stream=stream):
            ibp.decompress(table, out=out)
    for i in (1, 0, 0, 1):
        outs[i].view(torch.uint8).fill_(0xA5)
        graphs[i].replay()
        assert_same_bits(outs[i].cpu(), xs[i])
    with torch.cuda.stream(stream):
        again = ibp.decompress(tables, device=cuda)
    torch.cuda.synchronize()
    for result, x in zip(again, xs):
        assert_same_bits(result.cpu(), x)


def test_a_first_call_cannot_be_captured(cuda, streamed):
    x = spiky_rows(2000, 60)
    table, out = make_table(x, scheme="planes"), poisoned(x, cuda)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capturing"):
        with torch.cuda.graph(graph):
            ibp.decompress(table, out=out)
    ibp.decompress(table, out=out, check=True)
    assert_same_bits(out.cpu(), x)


# ---- damage ----


@pytest.mark.parametrize("row", [0, 31, 32, 777, 1999])
def test_a_damaged_row(cuda, streamed, row):
    """It alone is zeros; the call, the next one or check() says which it was, and nothing is broken afterwards."""
    x = half_rows(2000)
    good, bad = (make_table(x, codebook=half_codebook()) for _ in range(2))
    bad.overflow[row * HALF_CODED] = 0
    expected = x.clone()
    expected[row] = 0
    outs = [poisoned(x, cuda) for _ in range(3)]
    ibp.decompress([good, bad, good], out=outs)
    torch.cuda.synchronize()
    for out, want in zip(outs, (x, expected, x)):
        assert_same_bits(out.cpu(), want)
    good.check()
    with pytest.raises(ibp.CorruptTableError, match=f"row {row} "):
        bad.check()
    with pytest.raises(ibp.CorruptTableError, match=f"row {row} "):
        ibp.decompress([good, bad], device=cuda, check=True)
    ibp.decompress(bad, device=cuda)
    torch.cuda.synchronize()
    with pytest.raises(ibp.CorruptTableError, match=f"row {row} "):
        ibp.decompress(bad, device=cuda)
    assert_same_bits(ibp.decompress(good, device=cuda, check=True).cpu(), x)


@pytest.mark.parametrize("value", [0, 10**5, 2**40, -1, -(2**63)])
@pytest.mark.parametrize("group", [1, 5, 20, 62])
def test_a_damaged_base(cuda, streamed, group, value):
    """Rows of other chunks are intact, the error is reported, and the GPU goes on."""
    x = half_rows(2000)
    table = make_table(x, codebook=half_codebook())
    table.bases[group] = value
    out = poisoned(x, cuda)
    ibp.decompress(table, out=out)
    torch.cuda.synchronize()
    intact = (out.cpu() == x).all(1)
    in_places = 2 * (SMALL_RING // 4 // HALF_CODED)  # rows of two chunks
    assert intact[: max(0, 32 * group - in_places)].all() and intact[32 * group + in_places :].all()
    if value not in (0, 10**5):  # those point to other rows, which may be taken for these
        with pytest.raises(ibp.CorruptTableError):
            table.check()
    assert_same_bits(ibp.decompress(make_table(x, codebook=half_codebook()), device=cuda, check=True).cpu(), x)


def test_the_operation(cuda):
    """opcheck on tables in device memory, as torch refuses to clone views of pinned memory; then its arguments."""
    x = spiky_rows(500, 60)
    streamer = ibp._core.Streamer()
    assert streamer.address != 0
    for layout in ("slots of 32", "packed"):
        table = make_table(x.to(cuda), layout, scheme="planes")
        ring, fault = (
            torch.zeros(1 << 20, dtype=torch.uint8, device=cuda),
            torch.zeros(4, dtype=torch.int64, device=cuda),
        )
        arguments = [handle_on(table, cuda).table, table.bases.cpu(), 1000, 7777, streamer.address, True, True, 8, ring]
        out = torch.zeros(6777, dtype=torch.uint8, device=cuda)
        torch.library.opcheck(OPS.stream_bytes.default, (*arguments, out, fault))
        OPS.stream_bytes(*arguments, out, fault)
        assert_same_bits(out.cpu(), bytes_of(x)[1000:7777])
        for place, value, message in (
            (1, table.bases, "on the CPU"),
            (1, torch.zeros(3, dtype=torch.int64), "host_bases"),
            (2, 9000, "not among"),
            (3, 10**9, "not among"),
            (4, 0, "streamer"),
            (7, -1, "max_sms"),
            (8, ring[1:], "range"),
            (8, ring.cpu(), "CUDA device"),
        ):
            bad = [*arguments[:place], value, *arguments[place + 1 :]]
            with pytest.raises(RuntimeError, match=message):
                OPS.stream_bytes(*bad, out, fault)
        assert fault.tolist() == [0, 0, 0, 0]
    torch.cuda.synchronize()
