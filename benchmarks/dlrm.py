"""How fast do the embedding rows of a recommendation model come to the GPU (the paper's section 6.3)?

    python -m benchmarks.dlrm [--unequal] [--out DIR] [--device cpu] [--quick]

26 tables of the same size follow each other in one table in pinned memory, as in `ibp.nn.EmbeddingCollection`: 40 GiB
of BF16 in rows of 2 KiB, or 4 GiB of other rows. Values are N(0, 0.02), or N(0, 1) in FP32. A call looks up one row of
every table for each sample of a batch. Ids are uniform, or follow Zipf's law with exponent 1.05. At most 1 GiB of rows
are distinct; they are compressed on the GPU and repeated.

--unequal measures the same arms for FP32 rows alone, with tables of unequal sizes. Their rows are in the proportions of
the categorical features of Criteo's Kaggle set (Display Advertising Challenge), whose numbers of values are those that
github.com/hpcaitech/CachedEmbedding lists (recsys/datasets/criteo.py, 0b177465), 3 to 10,131,227. All tables together
have 4 GiB as before, so sizes are scaled down, and the smallest tables have one row. Names of these cases contain
"unequal". Rows of the other run stay. It is expected to take under a minute on an H200.

Arms:

`cpu gather + copy`   torch's index_select into a pinned buffer, which is copied; ids are on the CPU
`cpu unique rows`     each row of a batch once, by `index_select().pin_memory()`, then `.cuda()`: the paper's baseline,
                      whose code has no cache hits (github.com/AKKamath/ColossalAI, commit 04cc5f4c, cache_mgr.py)
`cpu pipelined`       raw rows with path="cpu", in chunks that are copied meanwhile; ids are on the CPU
`raw rows`, `ibp`     rows that the GPU fetches; ids are on the GPU, and the call adds to them the first rows of tables
`scheme ibp`          the same with rows that are compressed with masks
`raw + cache`, `ibp + cache`   the same through a `RowCache` of 2 % of the raw bytes that holds the most frequent rows;
                      only for ids by Zipf's law
`CachedEmbeddingBag`  ColossalAI's class as it is released, if the package is installed, with an equally large cache
                      over the same pinned rows, which is full from the start; its own policy (LFU) and, by Zipf's law,
                      the ranks of the ids; bags have one row, and batches whose rows do not fit its cache are left out
`CachedEmbeddingBag, no write-back`   the same without copies of dropped rows to host memory, as the paper has it
`CachedEmbeddingBag, raw rows`, `CachedEmbeddingBag, ibp`, `CachedEmbeddingBag, scheme ibp`   the same, but the GPU
                      fetches the rows that the cache lacks, by examples/cached_embedding_bag.py

After the common columns, dlrm.csv has ids ("uniform" or "Zipf"), batch, ms (of a call), table_gib (of raw rows),
hit_rate, sets (of ids, which take turns; an arm is not called twice with one of them), colossalai (the release),
target_gbps and met. `rows` is the number of rows of a call.

The targets of `ibp` for BF16 rows of 2 KiB: 2.8 times as fast as `cpu gather + copy`, 1.3 times as fast as `cpu
pipelined`, and from 100,000 ids per call 1.35 times as fast as `raw rows`. For FP32 rows of 2 KiB it is 1.1 times as
fast as `raw rows`, and for others not slower. With a cache, the target is 1.3 times the rate of `raw + cache`, or 95 %
of what the fewer bytes allow, if that is less: FP32 saves too little for 1.3 times, and rows of 128 B stay raw. 2 %
less does not count as slower, because rates of the same code differ by as much.
"""

import argparse
import gc
import itertools
import runpy
import sys
import types
from typing import NamedTuple

import torch

import ibp
from ibp._machine import memory
from ibp.cache import _slabs

from . import harness, ideal, inputs
from .large_table import GIB, tiled

COLUMNS = ("ids", "batch", "ms", "table_gib", "hit_rate", "sets", "colossalai", *harness.TARGET_COLUMNS)
# An arm is called at most ten times: for its bits, twice to warm up, and harness.MAX_REPEATS times.
NUM_TABLES, CACHE_SHARE, NUM_SETS, NUM_OUTS = 26, 0.02, 16, 2
CPU_COPY, CPU_PIPELINED, RAW, IBP, RAW_CACHE, IBP_CACHE = ARMS = (
    *("cpu gather + copy", "cpu pipelined", "raw rows", "ibp"),
    *("raw + cache", "ibp + cache"),
)
SCHEME_IBP, CPU_UNIQUE = "scheme ibp", "cpu unique rows"
COLOSSALAI = "CachedEmbeddingBag"
NO_WRITE_BACK, RAW_INSIDE, IBP_INSIDE = (f"{COLOSSALAI}, {how}" for how in ("no write-back", RAW, IBP))
BY_CPU = (CPU_COPY, CPU_UNIQUE, CPU_PIPELINED, COLOSSALAI, NO_WRITE_BACK)
EXAMPLE = types.SimpleNamespace(**runpy.run_path(str(harness.ROOT / "examples" / "cached_embedding_bag.py")))
UNIFORM, ZIPF = "uniform", "Zipf"
# This many rows share a base (FORMAT.md section 2). The number of rows that are repeated is a multiple of it.
ROWS_TOGETHER = 32
MANY_IDS = 100_000
NOT_SLOWER = 0.98
UNEQUAL = "unequal"
# The numbers of values of the categorical features of Criteo's Kaggle set, in their order.
CRITEO_SIZES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)


class Case(NamedTuple):
    """Rows of one kind. gib: GiB of all tables, raw. is_unequal: whether the tables have unequal sizes."""

    dtype: torch.dtype
    row_bytes: int
    gib: float
    batches: tuple[int, ...]
    is_unequal: bool = False

    @property
    def name(self):
        return f"{self.gib:g} GiB" + (f", {UNEQUAL} tables" if self.is_unequal else "")

    def sizes(self, num_rows):
        """Returns the numbers of rows of the tables, which have together at most num_rows rows."""
        if not self.is_unequal:
            return [num_rows // NUM_TABLES] * NUM_TABLES
        return [1 + (num_rows - NUM_TABLES) * size // sum(CRITEO_SIZES) for size in CRITEO_SIZES]


CASES = (
    Case(torch.bfloat16, 2048, 40, (1024, 8192, 65536)),
    Case(torch.float32, 2048, 4, (1024, 16384)),
    *(Case(torch.bfloat16, row_bytes, 4, (1024, 16384)) for row_bytes in (1024, 512)),
    Case(torch.bfloat16, 128, 4, (16384,)),
    *(Case(torch.float16, row_bytes, 4, (16384,)) for row_bytes in (2048, 512, 128)),
    Case(torch.float32, 512, 4, (1024, 4096, 16384)),
    Case(torch.float32, 128, 4, (16384,)),
)
UNEQUAL_CASES = tuple(Case(torch.float32, row_bytes, 4, (1024, 16384), True) for row_bytes in (2048, 512))
QUICK_CASES = (Case(torch.bfloat16, 2048, 1 / 64, (4, 64)), Case(torch.float32, 512, 1 / 64, (16,)))
QUICK_UNEQUAL_CASES = (Case(torch.float32, 512, 1 / 64, (16,), True),)


def firsts_of(sizes):
    """Returns the first row of each table in the table that holds all of them."""
    return torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)


def hotness_of(sizes, device):
    """Returns how often each row of the tables is looked up by Zipf's law, as integers in one unit."""
    power, tables = 1 - inputs.ZIPF_EXPONENT, []
    for size in sizes:
        bounds = torch.arange(1, size + 2, dtype=torch.float64, device=device).pow_(power)
        counts = torch.empty(size, dtype=torch.int64, device=device)
        counts[inputs.scattered(torch.arange(size, device=device), size)] = (
            bounds.diff() / (bounds[-1] - bounds[0]) * 2.0**61
        ).long()
        tables.append(counts)
    return torch.cat(tables)


class Lookups:
    """Ids of one batch size and distribution, in several sets: per table on the GPU, and rows of the whole table on the
    CPU. sizes: the numbers of rows of the tables."""

    def __init__(self, run, case, law, batch, sizes):
        self.run, self.case, self.law, self.batch = run, case, law, batch
        self.num_rows = batch * NUM_TABLES
        self.firsts = firsts_of(sizes).to(run.device)
        self.ids = [torch.stack([self.drawn(size) for size in sizes], 1) for _ in range(NUM_SETS)]
        self.cpu_rows = [self.rows(k).cpu() for k in range(NUM_SETS)]
        columns = case.row_bytes // case.dtype.itemsize
        self.outs = [torch.empty(self.num_rows, columns, dtype=case.dtype, device=run.device) for _ in range(NUM_OUTS)]

    def drawn(self, num_rows):
        """Returns ids of a table, one for each sample."""
        if self.law == UNIFORM:
            return torch.randint(num_rows, (self.batch,), device=self.run.device)
        return inputs.scattered(inputs.zipf_ranks(self.batch, num_rows, self.run.device), num_rows)

    def rows(self, k):
        """Returns the ids of set k as rows of the table that holds all tables, as calls compute them."""
        return (self.ids[k] + self.firsts).view(-1)

    def out(self, k):
        """Returns the memory for the rows of set k."""
        return self.outs[k % NUM_OUTS]

    @property
    def output_bytes(self):
        return self.num_rows * self.case.row_bytes

    @property
    def name(self):
        return f"{self.case.name}, {self.law}, batch {self.batch:,}"


def num_rows_of(case, x):
    """Returns the number of rows of the table that holds all tables: a multiple of that of the distinct rows x."""
    return int(case.gib * GIB) // case.row_bytes // (NUM_TABLES * len(x)) * NUM_TABLES * len(x)


class Tables:
    """The tables, raw or compressed, and the rows that they must have: row r is x[r % len(x)]."""

    def __init__(self, run, case, x, small, buffer, hotness):
        self.run, self.case, self.x, self.hotness = run, case, x, hotness
        self.num_rows = num_rows_of(case, x)
        self.table = tiled(small, self.num_rows, buffer)
        if run.on_gpu and not self.table.is_pinned():
            raise AssertionError(f"{case.name}: the table is not in pinned memory")
        self.small = small

    @property
    def host(self):
        """The raw rows as a tensor of torch, in host memory."""
        return self.table.slots.view(self.table.dtype).view(self.num_rows, -1)

    def cache(self):
        budget = int(CACHE_SHARE * self.num_rows * self.case.row_bytes)
        return ibp.RowCache(self.table, budget, self.hotness, devices=self.run.device)

    def link_gbps(self, lookups, is_missed=None):
        """Returns the ideal rate of fetches by the GPU. is_missed: which rows are fetched; None: all."""
        rows = [lookups.rows(k) for k in range(NUM_SETS)]
        if is_missed is not None:
            rows = [one[is_missed[one]] for one in rows]
        link_ns = ideal.row_link_ns(self.small, torch.cat(rows) % len(self.x))
        return ideal.gather_gbps(NUM_SETS * lookups.output_bytes, link_ns, self.run.memset_gbps)


def measure(tables, lookups, arm, call, ideal_gbps, judged=None, wall=False, hit_rate=None, sums=False, release=""):
    """Times call(k), which returns the rows of set k, and records the arm. Returns GB/s. judged: arguments of
    `harness.judged`. hit_rate: function() -> the share of the rows that a cache had. sums: whether the rows are sums of
    one row each, which have no negative zeros."""
    run, case = tables.run, tables.case
    sets = itertools.cycle(range(NUM_SETS))
    harness.poison(lookups.out(0))
    found = call(next(sets))
    rows = tables.x[lookups.rows(0) % len(tables.x)]
    harness.check_bits(found, rows + 0.0 if sums else rows, f"{lookups.name}, {arm}")
    seconds = run.seconds([lambda: call(next(sets))], wall)
    gbps = lookups.output_bytes * 1e-9 / seconds
    run.add(
        case=lookups.name,
        arm=arm,
        rows=lookups.num_rows,
        row_bytes=case.row_bytes,
        dtype=case.dtype,
        savings=tables.table.savings,
        gbps=gbps,
        ideal_gbps=ideal_gbps,
        sms=None if run.on_gpu and arm not in BY_CPU else 0,
        ids=lookups.law,
        batch=lookups.batch,
        ms=harness.four_digits(1e3 * seconds),
        table_gib=f"{tables.num_rows * case.row_bytes / GIB:.2f}",
        hit_rate=f"{hit_rate():.4f}" if hit_rate else "",
        sets=NUM_SETS,
        colossalai=release,
        **({} if judged is None else harness.judged(gbps, *judged)),
    )
    return gbps


def measure_cpu(tables, lookups, buffer):
    """Measures raw rows that the CPU gathers. Returns the rates by arm. buffer: pinned memory for the rows of a
    call."""
    table, host, device = tables.table, tables.host, tables.run.device
    held = buffer[: lookups.output_bytes].view(table.dtype).view(lookups.outs[0].shape)

    def plain(k):
        return lookups.out(k).copy_(torch.index_select(host, 0, lookups.cpu_rows[k], out=held))

    def unique(k):
        rows, places = lookups.rows(k).unique(return_inverse=True)
        with EXAMPLE.calls_for(device):
            fetched = host.index_select(0, rows.cpu()).pin_memory().cuda()
        return torch.index_select(fetched, 0, places, out=lookups.out(k))

    def pipelined(k):
        path = "cpu" if tables.run.on_gpu else None
        return ibp.index_select(table, lookups.cpu_rows[k], out=lookups.out(k), path=path)

    arms = {CPU_COPY: plain, CPU_UNIQUE: unique, CPU_PIPELINED: pipelined}
    return {arm: measure(tables, lookups, arm, call, ideal.LINK_COPY_GBPS, wall=True) for arm, call in arms.items()}


def wanted_of(case, lookups, rates):
    """Returns the GB/s that `ibp` should reach."""
    is_bf16, is_long = case.dtype == torch.bfloat16, case.row_bytes == 2048
    factors = {RAW: NOT_SLOWER}
    if is_bf16 and is_long:
        factors = {CPU_COPY: 2.8, CPU_PIPELINED: 1.3, RAW: 1.35 if lookups.num_rows >= MANY_IDS else NOT_SLOWER}
    elif case.dtype == torch.float32 and is_long:
        factors = {RAW: 1.1}
    return max((factor * rates[arm] for arm, factor in factors.items() if arm in rates), default=None)


def measure_gpu(tables, lookups, arm, rates):
    """Measures rows that the GPU fetches."""

    def call(k):
        return ibp.index_select(tables.table, lookups.rows(k), out=lookups.out(k))

    judged = [wanted_of(tables.case, lookups, rates)] if arm == IBP else None
    rates[arm] = measure(tables, lookups, arm, call, tables.link_gbps(lookups), judged)


def measure_cached(tables, lookups, arm, rates, cache, is_missed):
    def call(k):
        return cache.index_select(lookups.rows(k), out=lookups.out(k))

    link_gbps, judged = tables.link_gbps(lookups, is_missed), None
    if arm == IBP_CACHE and RAW_CACHE in rates:
        judged = 1.3 * rates[RAW_CACHE], harness.allowed_beside(rates[RAW_CACHE], rates[RAW_CACHE, "ideal"], link_gbps)
    cache.reset_stats()
    rates[arm] = measure(tables, lookups, arm, call, link_gbps, judged, hit_rate=lambda: cache.stats().hit_rate)
    rates[arm, "ideal"] = link_gbps


class GatheredRows(EXAMPLE.Rows):
    """Plain rows in host memory, which the CPU gathers as the class itself does. No row is written back."""

    def index_select(self, dim, ids):
        return self.table.index_select(dim, ids.cpu()).pin_memory().cuda()


def released_class():
    """Returns (ColossalAI's class, its release), or None if it cannot be imported."""
    try:
        return EXAMPLE.released()
    except ImportError as error:
        print(f"{COLOSSALAI}, left out: {error}")
        return None


def weights_of(tables, arm):
    """Returns the weights to give to ColossalAI's class, by arm. arm: the arm of the same rows without the class."""
    device = tables.run.device
    weights = {f"{COLOSSALAI}, {arm}": EXAMPLE.Rows(tables.table, device, trainable=False)}
    if arm != RAW:
        return weights
    return {COLOSSALAI: tables.host, NO_WRITE_BACK: GatheredRows(tables.host, device, trainable=False), **weights}


def measure_inside(tables, lookups, arm, weight, make, release):
    """Measures ColossalAI's class with a weight. make, release: what `released_class` returns."""
    held = int(CACHE_SHARE * tables.num_rows)
    if max(len(lookups.rows(k).unique()) for k in range(NUM_SETS)) > held:
        print(f"{lookups.name}, {arm}: a batch has more rows than the cache, left out")
        return
    hotness = (tables.hotness - tables.hotness.min()).cpu() if lookups.law == ZIPF else None
    own = {} if isinstance(weight, torch.Tensor) else {"buffer_size": held}
    offsets = torch.arange(lookups.num_rows, device=tables.run.device)
    with EXAMPLE.calls_for(tables.run.device), torch.no_grad():
        own |= {"cache_ratio": CACHE_SHARE, "warmup_ratio": 1.0, "ids_freq_mapping": hotness}
        bags = make(*weight.shape, _weight=weight, mode="sum", **own)
        manager = bags.cache_weight_mgr

        def look_up(k):
            return bags(lookups.rows(k), offsets)

        def hit_rate():
            return 1 - float(manager._cache_miss) / manager._total_cache

        options = {"wall": True, "hit_rate": hit_rate, "sums": True, "release": release}
        measure(tables, lookups, arm, look_up, ideal.LINK_COPY_GBPS, **options)


def missed_rows(cache, num_rows, device):
    """Returns which rows a cache lacks, as a tensor of bool."""
    parts = torch.arange(num_rows, device=device).split(1 << 22)
    missed = []
    for rows in parts:
        with cache.found(rows) as (_, entries, _):
            missed.append(~_slabs.are_present(entries))
    return torch.cat(missed)


def run_scheme(run, case, scheme, x, buffers, rates, hotness, every, found_class):
    """Measures all arms of raw or compressed rows. rates: for every lookup, the rates by arm. found_class: what
    `released_class` returns."""
    small = ibp.compress(x, scheme=scheme, layout="slots")
    tables = Tables(run, case, x, small, buffers[0], hotness)
    is_raw, arm = scheme == "raw", {"raw": RAW, "auto": IBP, "ibp": SCHEME_IBP}[scheme]
    cache = is_missed = None
    for lookups, found in zip(every, rates):
        name = f"{lookups.name}, {harness.dtype_name(case.dtype)}, {case.row_bytes} B"
        if is_raw:
            with run.cell(f"{name}, CPU"):
                found.update(measure_cpu(tables, lookups, buffers[1]))
        with run.cell(f"{name}, {scheme}"):
            measure_gpu(tables, lookups, arm, found)
        for inside, weight in weights_of(tables, arm).items() if found_class else ():
            with run.cell(f"{name}, {inside}"):
                measure_inside(tables, lookups, inside, weight, *found_class)
        if lookups.law == ZIPF and scheme != "ibp":
            with run.cell(f"{name}, {scheme}, cache"):
                if cache is None:
                    cache = tables.cache()
                    is_missed = missed_rows(cache, tables.num_rows, run.device)
                measure_cached(tables, lookups, RAW_CACHE if is_raw else IBP_CACHE, found, cache, is_missed)


def run_case(run, case, buffers, found_class):
    num_bytes = int(case.gib * GIB)
    columns = case.row_bytes // case.dtype.itemsize
    num_distinct = min(GIB, num_bytes // NUM_TABLES // 4) // (ROWS_TOGETHER * case.row_bytes) * ROWS_TOGETHER
    deviation = 1.0 if case.dtype == torch.float32 else 0.02
    x = inputs.normal_rows(num_distinct * case.row_bytes, case.dtype, deviation, run.device, columns=columns)
    num_rows = num_rows_of(case, x)
    sizes = case.sizes(num_rows)
    every = [Lookups(run, case, law, batch, sizes) for law in (UNIFORM, ZIPF) for batch in case.batches]
    hotness = torch.zeros(num_rows, dtype=torch.int64, device=run.device)
    hotness[: sum(sizes)] = hotness_of(sizes, run.device)
    rates = [{} for _ in every]
    for scheme in ("raw", "auto", "ibp"):
        run_scheme(run, case, scheme, x, buffers, rates, hotness, every, found_class)
        gc.collect()


def buffers_of(run, cases):
    """Returns pinned memory for the largest table, and for the rows of the largest call."""
    largest = max(int(case.gib * GIB) for case in cases)
    longest = max(max(case.batches) * NUM_TABLES * case.row_bytes for case in cases)
    return [memory.empty(size, torch.device("cpu"), pin=run.on_gpu) for size in (largest, longest)]


class Gains(NamedTuple):
    """The gains of `ibp` in one case, as speed-ups over other arms. None: one of the two arms is missing. cached: with
    a cache, over raw rows behind a cache of the same bytes."""

    plain: float | None
    pipelined: float | None
    raw: float | None
    cached: float | None


def gains(rows, arm=IBP):
    """Yields the gains of an arm in every case that has it."""
    cells = {}
    for row in rows:
        cells.setdefault((row["case"], row["dtype"], row["row_bytes"]), {})[row["arm"]] = row
    for arms in cells.values():

        def factor(own, other):
            return float(arms[own]["gbps"]) / float(arms[other]["gbps"]) if {own, other} <= arms.keys() else None

        if arm in arms:
            cached = factor(IBP_CACHE, RAW_CACHE) if arm == IBP else None
            yield Gains(*(factor(arm, other) for other in ARMS[:3]), cached)


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--unequal", action="store_true")
    options, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    run = harness.Run("dlrm", args, COLUMNS, keep=lambda row: (UNEQUAL in row["case"]) != options.unequal)
    torch.manual_seed(0)
    if options.unequal:
        cases = UNEQUAL_CASES if run.is_judged else QUICK_UNEQUAL_CASES
    else:
        cases = CASES if run.is_judged else QUICK_CASES
    buffers, found_class = buffers_of(run, cases), released_class()
    for case in cases:
        with run.cell(f"{case.name}, {harness.dtype_name(case.dtype)}, {case.row_bytes} B"):
            run_case(run, case, buffers, found_class)
        if run.on_gpu:
            torch.cuda.empty_cache()
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
