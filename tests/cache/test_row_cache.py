"""`ibp.RowCache`: rows come from it bit for bit, it holds what its budget does, and it follows the table's changes. On
the CPU all of it runs on the host's twins of the kernels."""

import copy
import itertools
import pickle
import threading
import warnings
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ibp
from helpers import assert_same_bits, embedding, in_threads, reckon_with, spiky_rows, take
from ibp._rows import handle
from ibp.cache import _row_cache, _slabs
from interrupts import Interrupted, InterruptedOperations

ON_CPU = {"device": "cpu", "memory": "host"}
KINDS = {
    "planes": {"scheme": "planes", "slot_bytes": 96},
    "packed": {"scheme": "planes", "layout": "packed"},
    "in place": {"scheme": "planes", "slot_bytes": 256},
    "masks": {"scheme": "ibp", "slot_bytes": 128},
    "clusters": {"scheme": "planes", "clusters": 3, "slot_bytes": 128},
    "raw": {"scheme": "raw"},
}
NUM_ITEMS, COLUMNS, ROW_BYTES = 600, 64, 256
DATA = Path(__file__).parents[2] / "data"


def tensor(num_items=NUM_ITEMS):
    """Rows that are zeros, coded, and raw."""
    x = spiky_rows(num_items, COLUMNS, seed=3)
    x[::7] = torch.randn(len(x[::7]), COLUMNS)
    x[5] = 0
    return x


def table_of(x, kind="planes", **options):
    return ibp.compress(x, **KINDS[kind], **options, **ON_CPU)


def cached_rows(cache):
    """Numbers of the rows that are cached, from the maps."""
    found = [slab.map[slab.map[:, 0] >= 0] for slab in cache._state.generation.slabs]
    return {int(row) for rows in found for row in rows[_slabs.are_present(rows[:, 1])][:, 0]}


def random_ids(count=200, num_items=NUM_ITEMS, dtype=torch.int64):
    return torch.randint(num_items, (count,)).to(dtype)


# ---- reading ----


@pytest.mark.parametrize("num_slabs", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_from_the_cache_and_the_table(kind, num_slabs):
    x = tensor()
    table = table_of(x, kind)
    hotness = torch.rand(NUM_ITEMS)
    cache = ibp.RowCache(table, 40_000 // num_slabs, hotness, devices=["cpu"] * num_slabs)
    held = cached_rows(cache)
    assert 0 < len(held) == cache.num_cached_rows <= cache.capacity < NUM_ITEMS
    for dtype in (torch.int64, torch.int32):
        ids = random_ids(dtype=dtype)
        assert_same_bits(cache.index_select(ids), x[ids])
        out = torch.empty(len(ids), COLUMNS)
        assert cache.index_select(ids.tolist(), out=out) is out
        assert_same_bits(out, x[ids])
        stats = cache.stats()
        is_default = {row for row in range(NUM_ITEMS) if not stored_of(table, row)}
        missed = [row for row in ids.tolist() if row not in held and row not in is_default]
        assert stats.hits == stats.own_hits + stats.peer_hits == 2 * sum(row in held for row in ids.tolist())
        assert stats.misses == 2 * len(missed)
        assert stats.link_bytes == 2 * sum(-(-stored_of(table, row) // 32) * 32 for row in missed)
        assert stats.hit_rate == stats.hits / (stats.hits + stats.misses)
        assert (
            sum(stats.hits_of_slabs) == stats.hits
            and all(stats.hits_of_slabs)
            and len(stats.hits_of_slabs) == num_slabs
        )
        cache.reset_stats()


def features(name):
    """Real features of a graph's nodes, and rows as embeddings have them."""
    if name == "bfloat16":
        return embedding(4000, 256, torch.bfloat16)
    with np.load(DATA / {"citeseer": "citeseer.npz", "pubmed": "pubmed_1060rows.npz"}[name]) as z:
        dense = torch.zeros(tuple(z["shape"]))
        rows = np.repeat(np.arange(len(z["indptr"]) - 1), np.diff(z["indptr"]))
        dense[torch.from_numpy(rows), torch.from_numpy(z["indices"].astype(np.int64))] = torch.from_numpy(z["data"])
    return dense[:1000]


def stored_of(table, row):
    return int(_slabs.stored_bytes(table, torch.tensor([row])))


@pytest.mark.parametrize("num_slabs", [1, 3])
@pytest.mark.parametrize("kind", ["planes", "raw"])
def test_budgets(kind, num_slabs):
    x = tensor()
    table = table_of(x, kind)
    hotness, devices = torch.arange(NUM_ITEMS, 0, -1), ["cpu"] * num_slabs
    before = -1
    for budget in (0, 100, 1000, 5000, 50_000, 1 << 20):
        cache = ibp.RowCache(table, budget, hotness, devices=devices)
        assert cache.nbytes <= max(budget * num_slabs, 80)
        assert before <= cache.capacity and cache.num_cached_rows >= 0.97 * cache.capacity
        before = cache.capacity
        ids = random_ids()
        assert_same_bits(cache.index_select(ids), x[ids])
        assert cache.stats().raw_capacity == budget // ROW_BYTES * num_slabs
    has_bytes = _slabs.stored_bytes(table, torch.arange(NUM_ITEMS)) > 0
    assert cache.capacity == int(has_bytes.sum()) and ibp.RowCache(table, 0, hotness, devices=devices).capacity == 0


@pytest.mark.parametrize("name", ["citeseer", "pubmed", "bfloat16"])
def test_capacity(name):
    """Rows and their map fill nearly all of a budget: it holds as many times more rows as they are smaller."""
    x = features(name)
    table = ibp.compress(x, layout="packed", **ON_CPU)
    budget = table.stored_bytes // 4
    cache = ibp.RowCache(table, budget, torch.rand(len(x)), devices="cpu")
    stored = _slabs.stored_bytes(table, torch.arange(len(x))).double().mean()
    formula = table.row_bytes / (stored + _slabs.WAY_BYTES / _slabs.STATIC_LOAD)
    assert cache.num_cached_rows / (budget / table.row_bytes) >= 0.9 * formula


def test_slab_order_is_hotness():
    x = tensor()
    table = table_of(x)
    hotness = torch.randperm(NUM_ITEMS)
    for given in (hotness, hotness.float(), hotness.numpy(), hotness.argsort(descending=True).tolist()):
        cache = ibp.RowCache(table, 20_000, given, devices="cpu")
        held = cached_rows(cache)
        hottest = [row for row in hotness.argsort(descending=True).tolist() if stored_of(table, row)]
        assert held <= set(hottest[: cache.capacity]) and len(held) >= 0.97 * cache.capacity
    listed = ibp.RowCache(table, 20_000, [14, 7, 14, 0, 7], devices="cpu")
    assert cached_rows(listed) == {14, 7, 0}


@pytest.mark.parametrize("num_slabs", [1, 4])
def test_items_of_several_rows(num_slabs):
    x = embedding(90, 6 * 64).view(90, 6, 64)
    table = ibp.compress(x, row_bytes=512, **ON_CPU)
    cache = ibp.RowCache(table, 30_000 // num_slabs, torch.rand(90), devices=["cpu"] * num_slabs)
    assert 0 < cache.num_cached_rows < 270
    ids = random_ids(num_items=90)
    assert_same_bits(cache.index_select(ids), x[ids])
    assert cache.stats().hits + cache.stats().misses == 3 * len(ids)
    lru = ibp.RowCache(table, 60_000, torch.rand(90), devices="cpu", policy="lru")
    for _ in range(3):
        ids = random_ids(20, num_items=90)
        assert_same_bits(lru.index_select(ids), x[ids])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64, torch.bool]
)
def test_dtypes(dtype):
    x = (torch.rand(100, 40) < 0.3).to(dtype)
    cache = ibp.RowCache(ibp.compress(x, **ON_CPU), 4000, torch.rand(100), devices="cpu")
    ids = random_ids(num_items=100)
    assert_same_bits(cache.index_select(ids), take(x, ids))
    assert (cache.shape, cache.dtype, len(cache), cache.dim(), cache.size(1)) == (x.shape, dtype, 100, 2, 40)


def test_empty():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 10_000, [], devices="cpu")
    assert cache.capacity == cache.num_cached_rows == 0 and cache.stats().hit_rate == 0
    assert_same_bits(cache.index_select([]), x[:0])
    assert_same_bits(cache.index_select([3, 1]), x[[3, 1]])
    for shape in ((0, 16), (5, 0)):
        empty = torch.zeros(shape)
        for policy in _row_cache.POLICIES:
            cache = ibp.RowCache(
                ibp.compress(empty, **ON_CPU), 10_000, torch.rand(shape[0]), devices="cpu", policy=policy
            )
            ids = torch.arange(shape[0])
            assert_same_bits(cache.index_select(ids), empty)


def test_a_cache_that_nothing_fills_warns():
    table = table_of(tensor())
    match = r"holds no rows, so that all come from the table, until its refill\(hotness\): give hotness .* hotness=\[\]"
    with pytest.warns(RuntimeWarning, match=match) as warned:
        ibp.RowCache(table, 10_000, devices="cpu")
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ibp.RowCache(table, 10_000, devices="cpu", policy="lru")
        ibp.RowCache(table, 0, devices="cpu")
        assert ibp.RowCache(table, 10_000, [], devices="cpu").refill(range(NUM_ITEMS)).num_cached_rows > 0


def test_out_of_any_strides():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.rand(NUM_ITEMS), devices="cpu")
    ids = random_ids(24)
    out = torch.zeros(6, 5, 4, COLUMNS)[:, 2]
    assert cache.index_select(ids, out=out) is out
    assert_same_bits(out, x[ids].view(6, 4, COLUMNS))


def test_as_a_table():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.rand(NUM_ITEMS), devices="cpu")
    assert_same_bits(cache.decompress(), x)
    assert_same_bits(cache[3:9, :5], x[3:9, :5])
    assert_same_bits(cache[torch.tensor([-1, 2])], x[[-1, 2]])
    assert not cache.is_cuda and not cache.is_pinned() and cache.pin_memory() is cache
    text = repr(cache)
    assert "RowCache(shape=[600, 64]" in text and "budget_bytes=20,000" in text and "'static'" in text


def assert_counts_each_row_once(cache, x, ids):
    """Calls in all their forms give the same items, and meet the same rows."""
    seen = []
    for out in (None, torch.empty_like(x[ids])):
        for options in ({}, {"check": True}, {"in_order": True}, {"max_sms": 2}):
            cache.index_select(ids, out=out)
            cache.reset_stats()
            assert_same_bits(cache.index_select(ids, out=out, **options).view(x.dtype), x[ids])
            seen.append(cache.stats())
    assert seen == seen[:1] * len(seen) and seen[0].hits > 0
    assert_same_bits(cache.index_select(ids.repeat(2)[::2]), x[ids.repeat(2)[::2]])
    with pytest.raises(ValueError, match="out has shape"):
        cache.index_select(ids, out=torch.empty(1, dtype=x.dtype, device=ids.device))


@pytest.mark.parametrize("policy", _row_cache.POLICIES)
@pytest.mark.parametrize("kind", ["planes", "raw"])
def test_calls_for_few_items(kind, policy):
    x = tensor()
    table = table_of(x, kind)
    cache = ibp.RowCache(table, 60_000, torch.rand(NUM_ITEMS), devices="cpu", policy=policy)
    ids = torch.arange(0, 70, 7)
    assert_counts_each_row_once(cache, x, ids)
    cache.refill(torch.rand(NUM_ITEMS))
    assert_counts_each_row_once(cache, x, ids)
    with pytest.raises(IndexError, match="wanted 0 to 599"):
        cache.index_select(torch.tensor([NUM_ITEMS]))
    cache.update_(ids, x[ids] + 1)
    x[ids] = x[ids] + 1
    assert_same_bits(cache.index_select(ids), x[ids])
    slab = cache._state.generation.slabs[0].bytes
    with pytest.raises(RuntimeError, match="memory"):
        cache.index_select(ids, out=slab[: 10 * ROW_BYTES].view(torch.float32).view(10, COLUMNS))


@pytest.mark.slow  # torch.compile is loaded
def test_compiled():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.rand(NUM_ITEMS), devices="cpu")
    compiled = torch.compile(lambda ids: cache.index_select(ids * 2 + 1) + 1, backend="eager")
    ids = random_ids(num_items=NUM_ITEMS // 2)
    assert_same_bits(compiled(ids), x[ids * 2 + 1] + 1)


# ---- refilling ----


@pytest.mark.parametrize("policy", _row_cache.POLICIES)
def test_refill(policy):
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.arange(NUM_ITEMS), devices="cpu", policy=policy)
    for hotness in (torch.arange(NUM_ITEMS), -torch.arange(NUM_ITEMS)):
        assert cache.refill(hotness) is cache
        hot = hotness.argsort(descending=True)[:20]
        cache.reset_stats()
        assert_same_bits(cache.index_select(hot), x[hot])
        assert cache.stats().misses <= 1


def test_refill_without_memory_leaves_the_cache(monkeypatch):
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.arange(NUM_ITEMS), devices=["cpu"] * 2)
    held, made = cached_rows(cache), []

    def refuse(*arguments):
        if made:
            raise torch.OutOfMemoryError("no memory")
        made.append(_slabs.filled_slab(*arguments))
        return made[0]

    monkeypatch.setattr(_row_cache, "filled_slab", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        cache.refill(-torch.arange(NUM_ITEMS))
    assert cached_rows(cache) == held
    ids = random_ids()
    assert_same_bits(cache.index_select(ids), x[ids])


def test_refill_beside_readers():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.rand(NUM_ITEMS), devices=["cpu"] * 2)
    done, wrong = threading.Event(), []

    def read():
        while not done.is_set():
            ids = random_ids(50)
            if not torch.equal(cache.index_select(ids), x[ids]):
                wrong.append(ids)

    def refill():
        try:
            for _ in range(20):
                cache.refill(torch.rand(NUM_ITEMS))
        finally:
            done.set()

    in_threads(refill, read, read, read)
    assert not wrong


def test_count_accesses():
    batches = [[3, 1, 3], torch.tensor([[1, 9]]), np.array([3], np.int32), []]
    assert ibp.cache.count_accesses(batches, 10).tolist() == [0, 2, 0, 3, 0, 0, 0, 0, 0, 1]
    with pytest.raises(IndexError, match="wanted 0 to 9"):
        ibp.cache.count_accesses([[10]], 10)
    with pytest.raises(TypeError, match="float"):
        ibp.cache.count_accesses([[1.5]], 10)


# ---- the least recently used ----


class Model:
    """A set-associative cache that replaces what was used longest ago, row by row."""

    def __init__(self, num_sets, fits):
        self.sets, self.fits, self.time = [{} for _ in range(num_sets)], fits, 0

    def home(self, row):
        mask = (1 << 64) - 1
        z = (row + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return ((z ^ z >> 31) >> 32) * len(self.sets) >> 32

    def ask(self, rows):
        """Hits of one call."""
        self.time += 1
        hits = 0
        held = [row for row in rows if row in self.sets[self.home(row)]]
        for row in held:
            self.sets[self.home(row)][row] = self.time
        for row in rows:
            ways = self.sets[self.home(row)]
            if row in ways:
                hits += 1
                continue
            old = sorted((used, other) for other, used in ways.items() if used != self.time)
            if not self.fits(row) or (len(ways) == _slabs.LRU_WAYS and not old):
                continue
            if len(ways) == _slabs.LRU_WAYS:
                del ways[old[0][1]]
            ways[row] = self.time
        return hits


@pytest.fixture(scope="module")
def some_rows():
    x = tensor()
    return x, table_of(x)


@hypothesis.settings(max_examples=20)  # each is many calls
@hypothesis.given(seed=st.integers(0, 2**20), num_sets=st.integers(1, 4), zipf=st.floats(0, 2))
def test_least_recently_used(some_rows, seed, num_sets, zipf):
    """Hits as a model says, where a call asks for one row: which of equally old ones goes is not said."""
    x, table = some_rows
    cache = ibp.RowCache(table, 1 << 15, devices="cpu", policy="lru")
    generation = cache._state.generation
    slot_bytes = generation.slot_bytes
    set_bytes = 32 * (slot_bytes + 16 + 4) + 4
    cache = ibp.RowCache(table, num_sets * set_bytes + _slabs.FIXED_BYTES, devices="cpu", policy="lru")
    assert cache.capacity == 32 * num_sets
    sizes = _slabs.stored_bytes(table, torch.arange(len(x))).tolist()
    model = Model(num_sets, lambda row: sizes[row] <= slot_bytes)
    rng = np.random.default_rng(seed)
    chances = 1.0 / np.arange(1, len(x) + 1) ** zipf
    asked = [row for row in rng.choice(len(x), 120, p=chances / chances.sum()).tolist() if sizes[row]]
    hits = sum(model.ask([row]) for row in asked)
    for row in asked:
        assert_same_bits(cache.index_select([row]), x[row : row + 1])
    assert cache.stats().hits == hits and cache.stats().misses == len(asked) - hits
    assert cached_rows(cache) == {row for ways in model.sets for row in ways}


def test_lru_of_many_rows_a_call(some_rows):
    x, table = some_rows
    cache = ibp.RowCache(table, 20_000, devices="cpu", policy="lru")
    for _ in range(10):
        ids = random_ids(500)
        assert_same_bits(cache.index_select(ids), x[ids])
        assert cache.num_cached_rows <= cache.capacity and cache.nbytes <= 20_000
    assert cache.stats().hits > 0
    assert ibp.RowCache(table, 100, devices="cpu", policy="lru").capacity == 0
    whole = ibp.RowCache(table, 1 << 40, torch.rand(NUM_ITEMS), devices="cpu", policy="lru")  # takes what it needs
    assert_same_bits(whole.index_select(range(NUM_ITEMS)), x)
    assert whole.stats().misses == 0 and whole.nbytes < 4 * x.nbytes


def test_slots_of_lru_caches():
    x = embedding(500, 64)
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    cache = ibp.RowCache(table, 20_000, devices="cpu", policy="lru")
    sizes = _slabs.stored_bytes(table, torch.arange(500))
    assert cache._state.generation.slot_bytes % 32 == 0
    assert (sizes <= cache._state.generation.slot_bytes).float().mean() >= 0.999
    small = ibp.RowCache(table, 20_000, devices="cpu", policy="lru", slot_bytes=33)
    assert small._state.generation.slot_bytes == 64
    ids = random_ids(num_items=500)
    assert_same_bits(small.index_select(ids), x[ids])
    assert small.num_cached_rows == 0


# ---- rows that change ----


@pytest.mark.parametrize("num_slabs", [1, 3])
@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_updates(kind, writable, num_slabs):
    x = tensor()
    table = table_of(x, kind)
    cache = ibp.RowCache(
        table, 60_000 // num_slabs, torch.rand(NUM_ITEMS), devices=["cpu"] * num_slabs, writable=writable
    )
    assert cache.num_cached_rows > 100
    for step in range(4):
        ids = random_ids(150)
        rows = tensor()[torch.randint(NUM_ITEMS, (150,))] + (step if step < 3 else 0)
        assert cache.update_(ids, rows) is cache
        for id, row in zip(ids.tolist(), rows):
            x[id] = row
        assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS)), x)
        if step == 2:
            cache.flush()
            assert_same_bits(table.decompress(), x)
    assert writable != torch.equal(table.decompress(), x)
    cache.refill(torch.rand(NUM_ITEMS))
    assert_same_bits(table.decompress(), x)
    assert_same_bits(cache.decompress(), x)


def test_updates_of_items_of_several_rows():
    x = embedding(60, 3 * 64).view(60, 3, 64)
    table = ibp.compress(x, row_bytes=256, **ON_CPU)
    for writable in (True, False):
        cache = ibp.RowCache(table, 12_000, torch.rand(60), devices="cpu", writable=writable)
        ids = torch.randperm(60)[:40]
        rows = embedding(40, 3 * 64, seed=writable + 1).view(40, 3, 64)
        cache.update_(ids, rows)
        x[ids] = rows
        assert_same_bits(cache.index_select(range(60)), x)
        assert_same_bits(cache.decompress(), x)


def test_rows_that_stay_in_the_cache_are_written_back_once():
    x = embedding(200, 64)
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    cache = ibp.RowCache(table, 1 << 20, torch.rand(200), devices="cpu", writable=True)
    before = table.decompress()
    x = x.flip(0)
    cache.update_(torch.arange(200), x)
    assert_same_bits(cache.index_select(range(200)), x)
    assert (table.decompress() == before).all(1).sum() >= 190  # all but those that do not fit a slot
    cache.flush()
    assert_same_bits(table.decompress(), x)
    version = table.version
    cache.flush()
    assert table.version == version
    assert cache.stats().hits >= 190


class RefusedLengths(TorchDispatchMode):
    """The operation that notes what changed rows take in a cache fails before it begins."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.ibp.set_cached.default:
            raise RuntimeError("refused by the test")
        return function(*args, **(kwargs or {}))


def test_a_refused_update_leaves_rows_as_they_were():
    x = embedding(200, 64)
    cache = ibp.RowCache(
        ibp.compress(x, scheme="planes", **ON_CPU), 1 << 20, torch.rand(200), devices="cpu", writable=True
    )
    ids = torch.arange(40, 90)
    new = embedding(50, 64, seed=1)
    with pytest.raises(RuntimeError, match="refused by the test"), RefusedLengths():
        cache.update_(ids, new)
    found = cache.index_select(torch.arange(200))
    is_new = (found[ids] == new).all(1)
    assert is_new.sum() <= 10  # rows that do not fit a slot, which are in the table
    x[ids[is_new]] = new[is_new]
    assert_same_bits(found, x)
    cache.update_(ids, new)
    x[ids] = new
    assert_same_bits(cache.index_select(range(200)), x)


def test_default_rows_leave_the_cache():
    """A row that becomes zeros, and something again later, is what was written last."""
    x = spiky_rows(100, 64)
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    cache = ibp.RowCache(table, 1 << 20, torch.rand(100), devices="cpu", writable=True)
    for scale in (0.0, 2.0, 0.0, 3.0):
        cache.update_(torch.arange(100), x * scale)
        assert_same_bits(cache.index_select(range(100)), x * scale)
    cache.flush()
    assert_same_bits(table.decompress(), x * 3.0)


@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**20), num_slabs=st.sampled_from([1, 2]), writable=st.booleans())
def test_any_order_of_changes(seed, num_slabs, writable):
    rng = np.random.default_rng(seed)
    x = tensor(80)
    table = table_of(x)
    cache = ibp.RowCache(table, 6000, torch.rand(80), devices=["cpu"] * num_slabs, writable=writable)
    for step in rng.choice(["update", "flush", "refill", "read", "own update"], 12):
        ids = torch.from_numpy(rng.integers(0, 80, 10))
        if step == "update":
            rows = tensor(80)[torch.from_numpy(rng.integers(0, 80, 10))] * float(rng.integers(1, 4))
            cache.update_(ids, rows)
            for id, row in zip(ids.tolist(), rows):
                x[id] = row
        elif step == "own update":
            cache.flush()
            ids = ids.unique()
            x[ids] = x[ids] * 2
            table.update_(ids, x[ids])
            with pytest.raises(RuntimeError, match="other than by this cache"):
                cache.index_select(ids)
            cache.invalidate(ids)
        elif step == "flush":
            cache.flush()
        elif step == "refill":
            cache.refill(torch.from_numpy(rng.random(80)))
        assert_same_bits(cache.index_select(ids), x[ids])
    cache.flush()
    assert_same_bits(table.decompress(), x)


def test_invalidate():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 30_000, torch.rand(NUM_ITEMS), devices=["cpu"] * 2)
    held = cached_rows(cache)
    gone = sorted(held)[:5]
    cache.invalidate(gone)
    assert cached_rows(cache) == held - set(gone)
    assert_same_bits(cache.index_select(range(NUM_ITEMS)), x)
    cache.invalidate()
    assert cache.num_cached_rows == 0
    assert_same_bits(cache.index_select(range(NUM_ITEMS)), x)
    with pytest.raises(IndexError, match="wanted 0 to 599"):
        cache.invalidate([600])


@pytest.mark.parametrize("scheme", ["planes", "raw"])
def test_a_table_that_was_refit(scheme):
    """What was cached is refused, but rows that had changed are not lost."""
    x = embedding(300, 64)
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    cache = ibp.RowCache(table, 20_000, torch.rand(300), devices="cpu", writable=True)
    x = x * 2
    cache.update_(torch.arange(300), x)
    table.refit(scheme=scheme)
    with pytest.raises(RuntimeError, match="refit"):
        cache.index_select([1])
    with pytest.raises(RuntimeError, match="refit"):
        cache.update_(torch.tensor([1]), x[:1])
    cache.refill(torch.rand(300))
    assert_same_bits(cache.index_select(range(300)), x)
    assert_same_bits(table.decompress(), x)


def test_a_table_that_grows():
    x = tensor()
    table = table_of(x)
    cache = ibp.RowCache(table, 20_000, torch.rand(NUM_ITEMS), devices="cpu")
    table.append(x[:50] + 1)
    longer = torch.cat((x, x[:50] + 1))
    assert len(cache) == 650
    assert_same_bits(cache.index_select(range(650)), longer)
    cache.refill(torch.arange(650))
    assert_same_bits(cache.index_select(range(650)), longer)


# ---- places ----


@pytest.mark.parametrize("policy", _row_cache.POLICIES)
def test_places(policy):
    x = embedding(200, 64, torch.bfloat16)
    codebook = ibp.codecs.analyze(x, scheme="planes")
    place = ibp.CodedRows(codebook, 200, slot_bytes=96, overflow_bytes=1 << 16, device="cpu")
    cache = ibp.RowCache(place, 10_000, [], devices="cpu", policy=policy)
    assert (cache.shape, cache.dtype) == ((200, 128), torch.uint8)
    assert_same_bits(cache.index_select([5]), torch.zeros(1, 128, dtype=torch.uint8))
    ibp.encode_into(x, place)
    cache.refill(torch.rand(200))
    for _ in range(3):
        ids = random_ids(60, num_items=200)
        out = torch.empty(60, 64, dtype=torch.bfloat16)
        assert cache.index_select(ids, out=out) is out
        assert_same_bits(out, x[ids])
        assert_same_bits(cache.index_select(ids).view(torch.bfloat16), x[ids])
        changed = torch.randperm(200)[:20]
        x[changed] = embedding(20, 64, torch.bfloat16, seed=int(ids[0]) + 1)
        ibp.encode_into(x[changed], place, changed)
        cache.invalidate(changed)
    assert cache.stats().hits > 0
    with pytest.raises(ValueError, match="contiguous bytes"):
        cache.index_select(ids, out=torch.empty(60, 63, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="encode_into"):
        cache.update_(ids, torch.zeros(60, 128, dtype=torch.uint8))
    with pytest.raises(ValueError, match="encode_into"):
        ibp.RowCache(place, 10_000, devices="cpu", writable=True)


# ---- what goes wrong ----


def test_refused_arguments():
    x = tensor()
    table = table_of(x)
    for error, message, arguments, options in (
        (TypeError, "table is a Tensor", (x, 100), {}),
        (TypeError, "budget_bytes is 1.5", (table, 1.5), {}),
        (ValueError, "budget_bytes is -1", (table, -1), {}),
        (ValueError, r"hotness has shape \[5\]; wanted \[600\]", (table, 100, torch.rand(5)), {}),
        (ValueError, "hotness has NaN", (table, 100, torch.full((NUM_ITEMS,), torch.nan)), {}),
        (TypeError, "hotness is a dict", (table, 100, {}), {}),
        (TypeError, "real number", (table, 100, torch.zeros(NUM_ITEMS, dtype=torch.complex64)), {}),
        (IndexError, "wanted 0 to 599", (table, 100, [600]), {}),
        (ValueError, "policy is 'fifo'; wanted one of 'static', 'lru'", (table, 100), {"policy": "fifo"}),
        (ValueError, "for one device; there are 2", (table, 100), {"policy": "lru", "devices": ["cpu"] * 2}),
        (ValueError, "writable cache has policy 'static'", (table, 100), {"policy": "lru", "writable": True}),
        (ValueError, "there are 9 devices; wanted 1 to 8", (table, 100), {"devices": ["cpu"] * 9}),
        (ValueError, "there are 0 devices", (table, 100), {"devices": []}),
        (ValueError, "slot_bytes is 0", (table, 100), {"writable": True, "slot_bytes": 0}),
        (ValueError, "slot_bytes is 257", (table, 100), {"policy": "lru", "slot_bytes": 257}),
    ):
        with pytest.raises(error, match=message):
            ibp.RowCache(*arguments, **{"devices": "cpu", **options})
    with pytest.raises(ValueError, match="wanted items of whole rows"):
        ibp.RowCache(ibp.compress(torch.randn(1000), **ON_CPU), 100, devices="cpu")
    if not ibp.cuda_is_available():
        with pytest.raises(ValueError, match="cuda"):
            ibp.RowCache(table, 100, devices="cuda")


def test_refused_calls():
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.rand(NUM_ITEMS), devices="cpu")
    for error, message, ids, options in (
        (IndexError, r"ids\[1\] is 600; wanted 0 to 599", [0, 600], {}),
        (IndexError, "-1", [-1], {}),
        (TypeError, "torch.float32", torch.rand(3), {}),
        (ValueError, "one dimension", torch.zeros(2, 2, dtype=torch.int64), {}),
        (TypeError, "out has dtype", [1], {"out": torch.empty(1, COLUMNS, dtype=torch.float64)}),
        (ValueError, "out has shape", [1], {"out": torch.empty(2, COLUMNS)}),
        (ValueError, "max_sms is 0", [1], {"max_sms": 0}),
    ):
        with pytest.raises(error, match=message):
            cache.index_select(ids, **options)
    for error, message, ids, rows in (
        (IndexError, "600", [600], x[:1]),
        (TypeError, "rows has dtype", [1], x[:1].double()),
        (ValueError, "rows has shape", [1], x[:2]),
    ):
        with pytest.raises(error, match=message):
            cache.update_(ids, rows)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copied(cache)
    assert_same_bits(cache.index_select(range(NUM_ITEMS)), x)


def test_shared_tables_are_read_only():
    x = tensor()
    table = table_of(x).share_memory_()
    cache = ibp.RowCache(table, 20_000, torch.rand(NUM_ITEMS), devices="cpu")
    assert_same_bits(cache.index_select(range(NUM_ITEMS)), x)
    with pytest.raises(RuntimeError, match="shared"):
        cache.update_([1], x[:1])
    with pytest.raises(RuntimeError, match="shared"):
        ibp.RowCache(table, 20_000, devices="cpu", writable=True)


def test_corrupt_rows_are_not_cached():
    x = tensor()
    table = table_of(x)
    broken = copy.deepcopy(table)
    broken.lengths.view(torch.int16)[:100] = 5000  # longer than a row
    broken.bases.fill_(1 << 60)
    cache = ibp.RowCache(broken, 1 << 20, torch.rand(NUM_ITEMS), devices="cpu")
    assert not cached_rows(cache) & set(range(100))
    with pytest.raises(ibp.CorruptTableError):
        cache.index_select([1])


@pytest.mark.parametrize("policy", _row_cache.POLICIES)
def test_hostile_maps(policy):
    """Whatever is in a map, nothing outside the cache is read: rows are wrong, or refused."""
    x = tensor()
    cache = ibp.RowCache(table_of(x), 20_000, torch.rand(NUM_ITEMS), devices="cpu", policy=policy)
    slab = cache._state.generation.slabs[0]
    good = slab.map.clone()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noise = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, tuple(good.shape)))
        slab.map.copy_(noise if seed % 2 else torch.stack((good[:, 0], noise[:, 1] | 1 << 60), 1))
        try:
            assert cache.index_select(range(NUM_ITEMS)).shape == x.shape
        except ibp.CorruptTableError:
            pass


# ---- on GPUs ----


def pinned_table(x, kind="planes"):
    table = ibp.compress(x, **KINDS[kind])
    assert table.is_pinned()
    return table


@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_a_gpu(kind, cuda):
    x = tensor()
    near = x.to(cuda)
    cache = ibp.RowCache(pinned_table(x, kind), 40_000, torch.rand(NUM_ITEMS), devices=cuda)
    held = cached_rows(cache)
    assert 0 < len(held) == cache.num_cached_rows < NUM_ITEMS
    for dtype in (torch.int64, torch.int32):
        ids = random_ids(dtype=dtype).to(cuda)
        assert_same_bits(cache.index_select(ids), near[ids])
        assert_same_bits(cache.index_select(ids.cpu(), device=cuda, max_sms=3), near[ids])
        out = torch.zeros(50, 2, 4, COLUMNS, device=cuda)[:, :, 1]
        assert_same_bits(cache.index_select(ids[:100], out=out, check=True).reshape(100, COLUMNS), near[ids[:100]])
    stats = cache.stats()
    asked = [row for _ in range(2) for row in (*ids.tolist(), *ids.tolist(), *ids[:100].tolist())]
    assert stats.hits + stats.misses <= len(asked) and stats.own_hits == stats.hits > 0
    assert_same_bits(cache.index_select(ids.cpu()), x[ids.cpu()])  # by the CPU, from the table
    assert cache.stats() == stats
    assert_same_bits(cache.index_select(ids[:0]), near[:0])


@pytest.mark.parametrize("policy", _row_cache.POLICIES)
def test_calls_for_few_items_on_a_gpu(cuda, policy):
    x = tensor().to(cuda)
    cache = ibp.RowCache(pinned_table(x.cpu()), 60_000, torch.rand(NUM_ITEMS), devices=cuda, policy=policy)
    ids = torch.arange(0, 70, 7, device=cuda)
    assert_counts_each_row_once(cache, x, ids)
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        assert_counts_each_row_once(cache, x, ids)
        torch.cuda.current_stream().synchronize()
    assert_counts_each_row_once(cache, x, ids)


def test_devices_are_the_usual_ones(cuda):
    x = tensor()
    assert ibp.RowCache(pinned_table(x), 1000).devices == (torch.device("cuda", torch.cuda.current_device()),)
    with pytest.raises(ValueError, match="pin_memory"):
        ibp.RowCache(ibp.compress(x, **ON_CPU), 1000, devices=cuda)
    on_gpu = ibp.compress(x.to(cuda))
    cache = ibp.RowCache(on_gpu, 20_000, torch.rand(NUM_ITEMS))
    ids = random_ids().to(cuda)
    assert_same_bits(cache.index_select(ids), x.to(cuda)[ids])
    with pytest.raises(ValueError, match="wanted the cache there"):
        ibp.RowCache(on_gpu, 1000, devices="cpu")


def test_many_ids_of_a_large_table(cuda, monkeypatch):
    """They are put in the order of windows first, unless the caller says that they are in order."""
    reckon_with(monkeypatch, reach_bytes=1, random_row_ns=1e6)
    monkeypatch.setattr(handle, "LEAST_BUCKETED_IDS", 64)
    x = tensor().to(cuda)
    for policy in _row_cache.POLICIES:
        cache = ibp.RowCache(pinned_table(x.cpu()), 40_000, torch.rand(NUM_ITEMS), devices=cuda, policy=policy)
        for count in (10, 500):
            ids = random_ids(count).to(cuda)
            assert_same_bits(cache.index_select(ids), x[ids])
            assert_same_bits(cache.index_select(ids, in_order=True), x[ids])


def test_bad_ids_on_a_gpu(cuda):
    x = tensor().to(cuda)
    for policy in _row_cache.POLICIES:
        cache = ibp.RowCache(pinned_table(x.cpu()), 40_000, torch.rand(NUM_ITEMS), devices=cuda, policy=policy)
        ids = torch.tensor([3, NUM_ITEMS, 5, -1], device=cuda)
        with pytest.raises(IndexError, match="wanted 0 to 599"):
            cache.index_select(ids, check=True)
        rows = cache.index_select(ids)
        torch.cuda.synchronize()
        assert_same_bits(rows[::2], x[ids[::2]])
        assert not rows[1::2].any()
        with pytest.raises(IndexError, match="noted by an earlier call"):
            cache.index_select(ids[:1])
        assert_same_bits(cache.index_select(ids[::2]), x[ids[::2]])
        cache.check()


@pytest.mark.parametrize("kind", ["planes", "packed", "raw"])
def test_lru_on_a_gpu(cuda, kind):
    x = tensor(3000).to(cuda)
    table = pinned_table(x.cpu(), kind)
    cache = ibp.RowCache(table, 60_000, devices=cuda, policy="lru")
    chances = 1 / torch.arange(1, 3001, device=cuda)
    for count in (1, 7, 300, 2000, 100) * 3:
        ids = torch.multinomial(chances, count, replacement=True)
        assert_same_bits(cache.index_select(ids), x[ids])
        assert cache.num_cached_rows <= cache.capacity
    rows = torch.arange(8, device=cuda)
    cache.index_select(rows)
    cache.reset_stats()
    assert_same_bits(cache.index_select(rows), x[rows])
    has_bytes = (_slabs.stored_bytes(table, rows) > 0) & (
        _slabs.stored_bytes(table, rows) <= cache._state.generation.slot_bytes
    )
    assert cache.stats().hits == int(has_bytes.sum())


def test_lru_on_several_streams(cuda):
    """Calls follow each other, so that no row is replaced while it is read."""
    x = tensor(3000).to(cuda)
    cache = ibp.RowCache(pinned_table(x.cpu()), 30_000, devices=cuda, policy="lru")
    streams, results = [torch.cuda.Stream(cuda) for _ in range(3)], []
    torch.cuda.synchronize()
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            ids = torch.randint(3000, (400,), device=cuda)
            results.append((ids, cache.index_select(ids)))
    torch.cuda.synchronize()
    for ids, rows in results:
        assert_same_bits(rows, x[ids])


@pytest.mark.parametrize("policy", _row_cache.POLICIES)
def test_graphs(cuda, policy):
    """A graph reads through the cache, also after it has been filled anew."""
    x = tensor().to(cuda)
    cache = ibp.RowCache(pinned_table(x.cpu()), 40_000, torch.rand(NUM_ITEMS), devices=cuda, policy=policy)
    ids, out = torch.zeros(100, dtype=torch.int64, device=cuda), torch.empty(100, COLUMNS, device=cuda)
    cache.index_select(ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.index_select(ids, out=out)
    for step in range(6):
        ids.copy_(random_ids(100))
        graph.replay()
        assert_same_bits(out, x[ids])
        if step == 2:
            cache.refill(torch.rand(NUM_ITEMS))
        if step == 4:
            cache.invalidate(ids[:50])
        assert_same_bits(cache.index_select(ids), x[ids])
    cache.check()


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("kind", ["planes", "masks", "packed", "raw"])
def test_updates_on_a_gpu(cuda, kind, writable):
    x = tensor().to(cuda)
    table = pinned_table(x.cpu(), kind)
    cache = ibp.RowCache(table, 60_000, torch.rand(NUM_ITEMS), devices=cuda, writable=writable)
    for step in range(3):
        ids = torch.randperm(NUM_ITEMS)[:150].to(cuda)
        rows = x[torch.randint(NUM_ITEMS, (150,), device=cuda)] + (step if step < 2 else 0)
        cache.update_(ids, rows if step else rows.cpu())
        x[ids] = rows
        assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS, device=cuda)), x)
        with torch.cuda.stream(torch.cuda.Stream(cuda)):  # what reads waits for what has written
            rows = cache.index_select(torch.arange(NUM_ITEMS, device=cuda))
            torch.cuda.current_stream().synchronize()
        assert_same_bits(rows, x)
    cache.flush()
    assert_same_bits(table.decompress(), x.cpu())
    cache.refill(torch.rand(NUM_ITEMS))
    assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS, device=cuda)), x)


def test_refill_beside_readers_on_a_gpu(cuda):
    x = tensor().to(cuda)
    cache = ibp.RowCache(pinned_table(x.cpu()), 40_000, torch.rand(NUM_ITEMS), devices=cuda)
    done, wrong = threading.Event(), []

    def read():
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            while not done.is_set():
                ids = torch.randint(NUM_ITEMS, (300,), device=cuda)
                if not torch.equal(cache.index_select(ids), x[ids]):
                    wrong.append(ids)

    def refill():
        try:
            for _ in range(10):
                cache.refill(torch.rand(NUM_ITEMS))
        finally:
            done.set()

    torch.cuda.synchronize()
    in_threads(refill, read, read)
    assert not wrong


def test_memory_is_within_the_budget(cuda):
    x = embedding(20_000, 128, torch.bfloat16)
    table = ibp.compress(x)
    table.index_select([1], device=cuda)
    budget = 2 << 20
    for options in ({}, {"policy": "lru"}, {"writable": True}):
        before = requested_bytes(cuda)
        cache = ibp.RowCache(table, budget, torch.rand(len(x)), devices=cuda, **options)
        assert 0.9 * budget <= cache.nbytes <= budget
        assert requested_bytes(cuda) - before <= budget
        del cache


def requested_bytes(device):
    torch.cuda.synchronize()
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def test_refill_without_memory_on_a_gpu(cuda):
    x = embedding(60_000, 128)
    cache = ibp.RowCache(ibp.compress(x), 24 << 20, range(100), devices=cuda)
    ids = torch.randint(200, (500,), device=cuda)
    near = x[:200].to(cuda)
    assert_same_bits(cache.index_select(ids), near[ids])
    held = cached_rows(cache)
    assert held <= set(range(100)) and len(held) > 90  # a full map leaves out some, as the order of threads has it
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved(cuda) + (8 << 20)
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(cuda).total_memory, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            cache.refill(torch.rand(len(x)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert cached_rows(cache) == held
    assert_same_bits(cache.index_select(ids), near[ids])
    cache.refill(torch.rand(len(x)))
    assert cache.num_cached_rows > 20_000
    assert_same_bits(cache.index_select(ids), near[ids])


@pytest.mark.parametrize("pinned", [False, True])
def test_places_on_a_gpu(cuda, pinned):
    """Rows are coded, looked up and dropped on a stream, in a graph as well."""
    x = embedding(500, 64, torch.bfloat16).to(cuda)
    codebook = ibp.codecs.analyze(x, scheme="planes")
    place = ibp.CodedRows(
        codebook, 500, slot_bytes=96, overflow_bytes=1 << 16, device=cuda, memory="pinned" if pinned else "device"
    )
    cache = ibp.RowCache(place, 20_000, policy="lru")
    assert cache.devices == (cuda,)
    ibp.encode_into(x, place)
    ids, out = torch.zeros(80, dtype=torch.int64, device=cuda), torch.empty(80, 64, dtype=torch.bfloat16, device=cuda)
    cache.index_select(ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.index_select(ids, out=out)
    for step in range(5):
        ids.copy_(random_ids(80, num_items=500))
        graph.replay()
        assert_same_bits(out, x[ids])
        assert_same_bits(cache.index_select(ids).view(torch.bfloat16), x[ids])
        assert_same_bits(cache.index_select(ids.cpu()).view(torch.bfloat16), x[ids].cpu())
        changed = torch.randperm(500, device=cuda)[:50]
        x[changed] = embedding(50, 64, torch.bfloat16, seed=step + 1).to(cuda)
        ibp.encode_into(x[changed], place, changed)
        cache.invalidate(changed)
    assert cache.stats().hits > 0
    place.check()


# ---- on two GPUs ----


@pytest.mark.parametrize("near_maps", [True, False])
@pytest.mark.parametrize("writable", [True, False])
def test_slabs_of_two_gpus(gpus, monkeypatch, near_maps, writable):
    monkeypatch.setattr(_slabs, "NEAR_MAP_SHARE", 1e9 if near_maps else 0.0)
    x = tensor()
    table = pinned_table(x)
    cache = ibp.RowCache(table, 30_000, torch.rand(NUM_ITEMS), devices=gpus, writable=writable)
    assert bool(cache._state.generation.near_maps) == (near_maps and not writable)
    assert cache.nbytes <= 2 * 30_000
    held = cached_rows(cache)
    assert all(slab.map.device == gpu for slab, gpu in zip(cache._state.generation.slabs, gpus))
    for gpu in gpus:
        cache.reset_stats()
        ids = torch.arange(NUM_ITEMS, device=gpu)
        assert_same_bits(cache.index_select(ids).cpu(), x)
        stats = cache.stats()
        assert stats.own_hits > 0 and stats.peer_hits > 0 and stats.hits == len(held)
    changed = torch.randperm(NUM_ITEMS)[:200]
    x[changed] = x[changed.flip(0)]
    cache.update_(changed.to(gpus[1]), x[changed].to(gpus[1]))
    for gpu in gpus:
        assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS, device=gpu)).cpu(), x)
        assert_same_bits(cache.index_select(range(NUM_ITEMS), device=gpu).cpu(), x)
    cache.refill(torch.rand(NUM_ITEMS))
    assert_same_bits(table.decompress(), x)
    for gpu in gpus:
        assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS, device=gpu)).cpu(), x)


def test_gpus_without_access_to_each_other(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    x = tensor()
    table = pinned_table(x)
    cache = ibp.RowCache(table, 30_000, torch.rand(NUM_ITEMS), devices=gpus)
    for gpu in gpus:
        assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS, device=gpu)).cpu(), x)
    assert cache.stats().peer_hits == 0 and cache.stats().own_hits > 0
    with pytest.raises(ValueError, match="cannot read the memory of"):
        ibp.RowCache(table, 30_000, devices=gpus, writable=True)


def test_a_gpu_without_a_slab(gpus):
    x = tensor()
    for writable in (False, True):
        cache = ibp.RowCache(pinned_table(x), 30_000, torch.rand(NUM_ITEMS), devices=gpus[0], writable=writable)
        cache.update_(range(5), x[5:10])
        wanted = x.clone()
        wanted[:5] = x[5:10]
        assert_same_bits(cache.index_select(torch.arange(NUM_ITEMS, device=gpus[1])).cpu(), wanted)


def test_functions_of_tables_take_a_cache(tmp_path):
    """index_select, decompress, embedding_bag, linear and save take whatever has rows."""
    x = torch.randn(300, 64)
    cache = ibp.RowCache(ibp.compress(x, device="cpu", memory="host"), 1 << 14, torch.arange(300), devices="cpu")
    ids, bags = torch.tensor([3, 299, 3]), torch.tensor([0, 2])
    out = torch.empty(3, 64)
    assert ibp.index_select(cache, ids, out=out) is out
    assert_same_bits(out, x[ids])
    assert_same_bits(ibp.index_select(cache, ids.tolist(), device="cpu", check=True), x[ids])
    assert_same_bits(ibp.decompress(cache), x)
    assert_same_bits(ibp.decompress([cache, cache.table])[0], x)
    assert_same_bits(ibp.embedding_bag(cache, ids, bags), torch.nn.functional.embedding_bag(ids, x, bags))
    assert_same_bits(ibp.linear(x[:5], cache), torch.nn.functional.linear(x[:5], x))
    ibp.save(tmp_path / "x.safetensors", cache)
    assert_same_bits(ibp.load(tmp_path / "x.safetensors")["tensor"].decompress(), x)
    with pytest.raises(ValueError, match="path is for tables"):
        ibp.index_select(cache, ids, path="cpu")
    for wrong in (x, "x"):
        with pytest.raises(TypeError, match="wanted an ibp.CompressedTensor"):
            ibp.index_select(wrong, ids)
        with pytest.raises(TypeError, match="wanted an ibp.CompressedTensor"):
            ibp.linear(x[:5], wrong)


def test_rows_ahead_of_use():
    x = tensor()
    cache = ibp.RowCache(ibp.compress(x, **ON_CPU, **KINDS["planes"]), 1 << 14, range(NUM_ITEMS), devices="cpu")
    ids, out = torch.tensor([3, 0, 599, 3]), torch.empty(4, COLUMNS)
    with cache.prefetch(ids, out=out) as rows:
        assert rows is out
    assert_same_bits(out, x[ids])
    assert_same_bits(cache.prefetch(ids).wait(), x[ids])
    with pytest.raises(IndexError):
        cache.prefetch([NUM_ITEMS])


def test_rows_ahead_of_use_on_a_gpu(cuda):
    x = tensor()
    cache = ibp.RowCache(ibp.compress(x), 1 << 14, range(NUM_ITEMS), devices=cuda)
    ids = torch.tensor([3, 0, 599, 3], device=cuda)
    ahead = cache.prefetch(ids, stream=torch.cuda.Stream(cuda))
    assert_same_bits(ahead.wait().cpu(), x[ids.cpu()])


# ---- interruptions ----


def test_a_cache_that_could_not_forget_changed_rows_refuses_reads(monkeypatch):
    """Rows that do not fit their slots any more are changed in the table, and then leave the cache."""
    x, ids = torch.zeros(120, COLUMNS), torch.arange(0, 120, 3)
    x[:, 0] = torch.arange(120)
    cache = ibp.RowCache(table_of(x), 80_000, list(range(120)), devices="cpu", writable=True)
    monkeypatch.setattr(type(cache._state), "forget", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.update_(ids, torch.randn(len(ids), COLUMNS))
    with pytest.raises(RuntimeError, match="changed"):
        cache.index_select(ids)


@pytest.mark.slow
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("call", ["update_", "update_ writable", "flush", "update_ of the table"])
def test_interrupted_changes_leave_no_old_row(call, is_before):
    """Each row is the one before the call, or the one after it. It stays so until the next change, and after the same
    call all rows are those after it. If the table alone changes, the cache may refuse reads."""
    x, ids, all_ids = tensor(120), torch.arange(0, 120, 3), torch.arange(120)
    table, rows, wanted = table_of(x), x[ids].flip(0), x.clone()
    wanted[ids] = rows
    for number in itertools.count():
        held, is_writable = table.clone(), call in ("update_ writable", "flush")
        cache = ibp.RowCache(held, 80_000, all_ids.tolist(), devices="cpu", writable=is_writable)
        changed = held if call == "update_ of the table" else cache
        if call == "flush":
            cache.update_(ids, rows)
        try:
            with InterruptedOperations([number], is_before):
                cache.flush() if call == "flush" else changed.update_(ids, rows)
            break
        except Interrupted:
            pass
        if changed is held:
            try:
                assert_same_bits(cache.index_select(all_ids), held.decompress())
            except RuntimeError:
                assert held.version != table.version
            continue
        found = cache.index_select(all_ids)
        assert ((found == x).all(1) | (found == wanted).all(1)).all()
        cache.flush()
        assert_same_bits(cache.index_select(all_ids), found)
        assert_same_bits(held.decompress(), found)
        cache.update_(ids, rows)
        assert_same_bits(cache.index_select(all_ids), wanted)
    assert number > 5 and held.version > table.version
