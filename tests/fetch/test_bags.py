"""Bags of rows: `ibp.embedding_bag` against torch's function, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import ibp
from helpers import assert_same_bits, pairwise
from ibp._rows.table import handle_on

ON_CPU = {"device": "cpu", "memory": "host"}
NUM_ROWS = 60
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MODES = ["sum", "mean", "max"]


def weights_of(dtype, dim=16, num_rows=NUM_ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, dim, generator=generator)
    x[3] = 0
    x[4] = -x[5]
    return (x * 0.02).to(dtype)


def draw(num_bags, most=9, dtype=torch.int64, num_rows=NUM_ROWS, seed=0):
    """Ids and offsets of bags of 0 to `most` ids."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(most + 1, (num_bags,), generator=generator)
    ids = torch.randint(num_rows, (int(sizes.sum()),), generator=generator)
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    return ids.to(dtype), offsets.to(dtype)


def compare(x, table, ids, offsets=None, **options):
    wanted = F.embedding_bag(ids, x, offsets, **options)
    assert_same_bits(ibp.embedding_bag(table, ids, offsets, **options), wanted)
    return wanted


@pytest.mark.parametrize(
    "dtype, mode, id_dtype, padding_idx, scheme",
    pairwise(DTYPES, MODES, [torch.int32, torch.int64], [None, 7, -1, 3], ["planes", "raw", "ibp"]),
)
def test_bits_of_torch(dtype, mode, id_dtype, padding_idx, scheme):
    x = weights_of(dtype)
    table = ibp.compress(x, scheme=scheme, **ON_CPU)
    ids, offsets = draw(25, dtype=id_dtype)
    options = {"mode": mode, "padding_idx": padding_idx}
    compare(x, table, ids, offsets[:-1], **options)
    compare(x, table, ids, offsets, include_last_offset=True, **options)
    compare(x, table, ids[:24].view(6, 4), **options)
    compare(x, table, ids[:24].view(4, 6).T, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_idx", [None, 5])
def test_weights_of_samples(dtype, padding_idx):
    x = weights_of(dtype)
    table = ibp.compress(x, **ON_CPU)
    ids, offsets = draw(20)
    weights = torch.rand(len(ids)).to(dtype)
    options = {"mode": "sum", "padding_idx": padding_idx}
    compare(x, table, ids, offsets[:-1], per_sample_weights=weights, **options)
    compare(x, table, ids[:20].view(5, 4), per_sample_weights=weights[:20].view(5, 4), **options)


def test_gradients_of_weights():
    x = weights_of(torch.float32)
    table = ibp.compress(x, **ON_CPU)
    ids, offsets = draw(20)
    weights, ours = (torch.rand(len(ids), generator=torch.Generator().manual_seed(1)) for _ in range(2))
    F.embedding_bag(ids, x, offsets[:-1], mode="sum", per_sample_weights=weights.requires_grad_()).sum().backward()
    ibp.embedding_bag(table, ids, offsets[:-1], mode="sum", per_sample_weights=ours.requires_grad_()).sum().backward()
    assert_same_bits(ours.grad, weights.grad)


@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6), max_size=8), st.sampled_from(MODES), st.data())
def test_any_bags(bags, mode, data):
    x = weights_of(torch.bfloat16, dim=7)
    table = ibp.compress(x, **ON_CPU)
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    padding_idx = data.draw(st.none() | st.integers(-NUM_ROWS, NUM_ROWS - 1))
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": True}
    compare(x, table, ids, offsets, **options)


def test_empty_inputs():
    x = weights_of(torch.float16)
    table = ibp.compress(x, **ON_CPU)
    no_ids, zeros = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    compare(x, table, no_ids, zeros)
    compare(x, table, no_ids, zeros, mode="max", padding_idx=2)
    compare(x, table, no_ids, no_ids)
    compare(x, table, no_ids, zeros, include_last_offset=True)
    compare(x, table, no_ids.view(0, 4))
    assert_same_bits(ibp.embedding_bag(table, no_ids.view(4, 0)), torch.zeros(4, 16, dtype=torch.float16))
    assert ibp.embedding_bag(table, torch.tensor([1]), zeros[:1], include_last_offset=True).shape == (0, 16)
    nothing = ibp.compress(x[:0], **ON_CPU)
    assert_same_bits(ibp.embedding_bag(nothing, no_ids, zeros), torch.zeros(3, 16, dtype=torch.float16))


def test_sequences_and_out():
    x = weights_of(torch.float32)
    table = ibp.compress(x, **ON_CPU)
    wanted = F.embedding_bag(torch.tensor([4, 2, 9]), x, torch.tensor([0, 1]))
    assert_same_bits(ibp.embedding_bag(table, [4, 2, 9], [0, 1]), wanted)
    assert_same_bits(ibp.embedding_bag(table, torch.tensor([4, 2, 9]).numpy(), [0, 1], device="cpu"), wanted)
    out = torch.empty(16, 2).T
    assert ibp.embedding_bag(table, [4, 2, 9], [0, 1], out=out) is out
    assert_same_bits(out.contiguous(), wanted)
    for bad in (torch.empty(3, 16), torch.empty(2, 16, dtype=torch.float16)):
        with pytest.raises((ValueError, TypeError), match="out has"):
            ibp.embedding_bag(table, [4, 2, 9], [0, 1], out=bad)


def test_errors():
    x = weights_of(torch.float32)
    table = ibp.compress(x, **ON_CPU)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    wrong = [
        (IndexError, r"ids\[1\] is 60; wanted 0 to 59", (torch.tensor([1, 60, 3]), offsets), {}),
        (IndexError, r"ids\[2\] is -1", (torch.tensor([1, 2, -1]), offsets), {}),
        (TypeError, "ids has dtype", (ids.float(), offsets), {}),
        (ValueError, "one or two dimensions", (ids.view(1, 1, 3),), {}),
        (ValueError, "wanted offsets", (ids,), {}),
        (ValueError, "no offsets", (ids.view(1, 3), offsets), {}),
        (ValueError, "offsets has shape", (ids, offsets.view(1, 2)), {}),
        (TypeError, "offsets has dtype", (ids, offsets.float()), {}),
        (ValueError, r"offsets\[0\] is 1", (ids, offsets + 1), {}),
        (ValueError, r"offsets\[1\] is 4; wanted at most 3", (ids, torch.tensor([0, 4])), {}),
        (ValueError, r"offsets\[2\] is 1, less than the one before, 2", (ids, torch.tensor([0, 2, 1])), {}),
        (ValueError, "offsets is empty", (ids, offsets[:0]), {"include_last_offset": True}),
        (ValueError, "mode is 'median'", (ids, offsets), {"mode": "median"}),
        (ValueError, "padding_idx is 60; wanted -60 to 59", (ids, offsets), {"padding_idx": 60}),
        (NotImplementedError, "mode 'sum' only", (ids, offsets), {"per_sample_weights": torch.ones(3)}),
        (ValueError, "that of ids", (ids, offsets), {"per_sample_weights": torch.ones(2), "mode": "sum"}),
        (TypeError, "dtype", (ids, offsets), {"per_sample_weights": torch.ones(3).half(), "mode": "sum"}),
    ]
    for error, message, args, options in wrong:
        with pytest.raises(error, match=message):
            ibp.embedding_bag(table, *args, **options)
    for source, error in ((x, TypeError), (ibp.compress(torch.ones(4, 2, 2), **ON_CPU), ValueError)):
        with pytest.raises(error, match="source is|two dimensions"):
            ibp.embedding_bag(source, ids, offsets)
    with pytest.raises(TypeError, match="the table has dtype"):
        ibp.embedding_bag(ibp.compress(torch.ones(4, 2, dtype=torch.int32), **ON_CPU), ids, offsets)


def test_corrupt_rows():
    x = weights_of(torch.bfloat16)
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    table.lengths.view(torch.int16)[5] += 40
    with pytest.raises(ibp.CorruptTableError):
        ibp.embedding_bag(table, [1, 5], [0])
    compare(x, table, torch.tensor([1, 4]), torch.tensor([0]))


def test_bags_of_a_cache():
    x = weights_of(torch.bfloat16)
    cache = ibp.RowCache(ibp.compress(x, **ON_CPU), 2000, range(NUM_ROWS), devices="cpu")
    ids, offsets = draw(20)
    for mode in MODES:
        compare(x, cache, ids, offsets[:-1], mode=mode, padding_idx=5)
    assert cache.stats().hits > 0


# ---- on a GPU ----


def tables_on(cuda, x, **options):
    """A table of x in pinned host memory, and one on the GPU."""
    return ibp.compress(x, device="cpu", memory="pinned", **options), ibp.compress(x.to(cuda), **options)


@pytest.fixture
def fused(monkeypatch):
    """Fails where bags are not summed by the kernel, which short rows are as well."""

    def refuse(*args):
        raise AssertionError("rows are gathered")

    monkeypatch.setattr("ibp._fetch.bags._pool_gathered", refuse)
    monkeypatch.setattr("ibp._fetch.bags._SHORT_ROW_BYTES", 0)


@pytest.mark.parametrize(
    "dtype, mode, dim, scheme, padding_idx, id_dtype",
    pairwise(
        DTYPES[:3],
        MODES,
        [6, 32, 64, 250, 256, 700, 1024, 2048],
        ["planes", "raw", "fast"],
        [None, 7],
        [torch.int32, torch.int64],
    ),
)
def test_kernel(cuda, fused, dtype, mode, dim, scheme, padding_idx, id_dtype):
    x = weights_of(dtype, dim, 400)
    coding = {"scheme": "planes", "level": "fast"} if scheme == "fast" else {"scheme": scheme}
    ids, offsets = (part.to(cuda) for part in draw(300, 30, id_dtype, 400))
    near, options = x.to(cuda), {"mode": mode, "padding_idx": padding_idx}
    for table in tables_on(cuda, x, **coding):
        compare(near, table, ids, offsets[:-1], **options)
        compare(near, table, ids, offsets, include_last_offset=True, **options)
        compare(near, table, ids[:4000].view(40, 100), **options)
        compare(near, table, ids[:4000].view(4000, 1), **options)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("padding_idx", [None, 7])
def test_kernel_with_weights(cuda, fused, dtype, padding_idx):
    x = weights_of(dtype, 128, 400)
    ids, offsets = (part.to(cuda) for part in draw(300, 30, num_rows=400))
    weights = torch.randn(len(ids)).to(dtype).to(cuda)
    for table in tables_on(cuda, x):
        options = {"mode": "sum", "padding_idx": padding_idx, "per_sample_weights": weights}
        compare(x.to(cuda), table, ids, offsets[:-1], **options)


@pytest.mark.parametrize("mode", MODES)
def test_special_numbers(cuda, fused, mode):
    """Infinities, numbers that are none, zeros of both signs, and sums that are too large."""
    for dtype in DTYPES[:3]:
        x = weights_of(dtype, 64, 50)
        x[:6] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 0.0, torch.finfo(dtype).max])[:, None]
        ids = torch.randint(50, (400, 5), generator=torch.Generator().manual_seed(1)).to(cuda)
        ids[:200] %= 8
        compare(x.to(cuda), tables_on(cuda, x)[0], ids, mode=mode)


def test_long_and_empty_bags(cuda, fused):
    x = weights_of(torch.bfloat16, 256, 1000)
    table = tables_on(cuda, x)[1]
    sizes = torch.zeros(5000, dtype=torch.int64)
    sizes[[3, 7, 4990]] = torch.tensor([20000, 1, 3000])
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))[:-1].to(cuda)
    ids = torch.randint(1000, (int(sizes.sum()),)).to(cuda)
    for mode in MODES:
        compare(x.to(cuda), table, ids, offsets, mode=mode)
        compare(x.to(cuda), table, ids[:7], offsets[:1], mode=mode)


def test_graph_and_stream(cuda, fused):
    x = weights_of(torch.float16, 64, 400)
    table = tables_on(cuda, x)[0]
    ids, offsets = (part.to(cuda) for part in draw(50, num_rows=400))
    out = torch.empty(50, 64, dtype=x.dtype, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ibp.embedding_bag(table, ids, offsets[:-1], out=out, max_sms=7)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            ibp.embedding_bag(table, ids, offsets[:-1], out=out, max_sms=7)
        ids.copy_(ids.flip(0))
        graph.replay()
    stream.synchronize()
    assert_same_bits(out, F.embedding_bag(ids, x.to(cuda), offsets[:-1]))


def test_faults(cuda, fused):
    x = weights_of(torch.bfloat16, 64, 400)
    table = tables_on(cuda, x)[0]
    zeroed = torch.cat((x, x.new_zeros(1, 64))).to(cuda)
    ids = torch.tensor([[1, 2, 3], [4, 400, 6]], device=cuda)
    result = ibp.embedding_bag(table, ids, mode="sum")
    assert_same_bits(result, F.embedding_bag(ids, zeroed, mode="sum"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"ids\[4\] is 400; wanted 0 to 399"):
        ibp.embedding_bag(table, ids[:1])
    with pytest.raises(IndexError, match=r"ids\[4\]"):
        ibp.embedding_bag(table, ids, check=True)
    for wrong in ([0, 4, 3, 6], [0, 7, 7, 7], [0, -1, 3, 3]):
        with pytest.raises(ValueError, match=r"offsets\[\d\] is"):
            ibp.embedding_bag(table, ids.clamp(max=399).view(-1), torch.tensor(wrong, device=cuda), check=True)
    with pytest.raises(RuntimeError, match="weights has the wrong dtype"):
        handle, fault = handle_on(table, cuda), torch.zeros(4, dtype=torch.int64, device=cuda)
        weights = torch.ones(6, device=cuda)
        torch.ops.ibp.sum_bags(handle.table, ids.view(-1), None, [], None, weights, 0, -1, 2, 0, result, fault)


@pytest.mark.parametrize("options", [{}, {"policy": "lru"}, {"writable": True}], ids=["static", "lru", "writable"])
def test_cached_rows(cuda, fused, options):
    x = weights_of(torch.bfloat16, 256, 2000)
    table = tables_on(cuda, x)[0]
    cache = ibp.RowCache(table, 1 << 18, range(500), devices=cuda, **options)
    ids, offsets = (part.to(cuda) for part in draw(200, 30, num_rows=2000))
    for mode in MODES:
        compare(x.to(cuda), cache, ids, offsets[:-1], mode=mode, padding_idx=7)
    stats = cache.stats()
    assert 0 < stats.hits < 3 * len(ids) and stats.misses > 0


def test_short_rows_near_the_gpu(cuda):
    """They are gathered first."""
    x = weights_of(torch.bfloat16, 64, 400)
    ids, offsets = (part.to(cuda) for part in draw(300, 30, num_rows=400))
    near, table = x.to(cuda), tables_on(cuda, x, scheme="planes")[1]
    for mode in MODES:
        compare(near, table, ids, offsets[:-1], mode=mode)


def test_operation(cuda):
    x = weights_of(torch.bfloat16, 64, 400)
    table = tables_on(cuda, x)[1]
    ids, offsets = (part.to(cuda) for part in draw(20, num_rows=400))
    fault, out = torch.zeros(4, dtype=torch.int64, device=cuda), torch.empty(20, 64, dtype=x.dtype, device=cuda)
    arguments = (handle_on(table, cuda).table, ids, None, [], offsets, None, 0, -1, 2, 0, out, fault)
    torch.library.opcheck(torch.ops.ibp.sum_bags.default, arguments)


def test_rows_that_are_gathered(cuda):
    """Rows of other schemes and dtypes, long ones, items of parts of a row, and weights that train."""
    for x, options in (
        (weights_of(torch.float32, 64), {"scheme": "ibp"}),
        (weights_of(torch.float64, 64), {}),
        (weights_of(torch.float32, 4096), {}),
        ((torch.rand(60, 64) > 0.9).float(), {}),
    ):
        ids, offsets = (part.to(cuda) for part in draw(20))
        for table in tables_on(cuda, x, **options):
            compare(x.to(cuda), table, ids, offsets[:-1], mode="mean", padding_idx=3)
    weights = torch.rand(len(ids), device=cuda, requires_grad=True)
    ibp.embedding_bag(table, ids, offsets[:-1], mode="sum", per_sample_weights=weights).sum().backward()
    assert weights.grad is not None
    unpinned = ibp.compress(x, **ON_CPU)
    compare(x.to(cuda), unpinned, ids, offsets[:-1], mode="sum")
