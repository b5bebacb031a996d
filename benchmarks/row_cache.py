"""How many rows does a cache in device memory hold, and how fast do they come from it?

    python -m benchmarks.row_cache [--out DIR] [--device cpu] [--quick]

Tables are in pinned memory: repeated rows of Citeseer and Pubmed, and dense rows, N(0, 0.02) in BF16 with 128 B, 512 B
and 2 KiB and N(0, 1) in FP32 with 2 KiB. A cache has an eighth of a table's raw bytes on a GPU, or half of its
compressed bytes if that is less. The rows that it holds are random. Each arm has compressed rows or, if it is named
"raw", raw rows with the same code:

`device memory`   the whole table is there
`own hits`        all rows are cached
`peer hits`       all rows are in the other GPU's half of a cache on two GPUs
`90 % hits`, `50 % hits`   the other rows come from the table
`no cache`        all rows come from the table
`Zipf, ...`       ids follow Zipf's law with exponent 1.05; `lru` is a cache whose rows replace each other, filled by
                  earlier calls with the same law; `static` is a cache with the most frequent rows

After the common columns, row_cache.csv has budget_bytes (of a GPU), held_rows (rows in the cache), raw_rows (raw rows
in the same bytes, without a map), formula_rows (the budget over the mean stored bytes of a row and 16 bytes of a map),
hit_rate, target_gbps and met. Targets: own hits come at 0.9 of the rate of device memory. Peer hits come at 1.3 times
the rate of raw rows of the peer, but at most 95 % of what the fewer bytes allow. Mixed calls take at most 1.15 times as
long as the longer one of their parts, or come at 95 % of the rate of own hits, because the parts add up if decoding is
the bottleneck.
"""

import math
import sys
from typing import NamedTuple

import torch

import ibp
from ibp.cache import _slabs

from . import codec, harness, ideal, inputs

CACHE_COLUMNS = "budget_bytes,held_rows,raw_rows,formula_rows,hit_rate".split(",")
COLUMNS = (*CACHE_COLUMNS, *harness.TARGET_COLUMNS)
TABLE_BYTES, QUICK_TABLE_BYTES = 512 * inputs.MIB, inputs.MIB
CALL_SHARE, CACHE_SHARE = 4, 8  # A call reads a fourth of a table, and a cache has an eighth of it.
NUM_SETS, LRU_WARM_UP = 4, 8
HIT_PERCENT = (90, 50)
PEER_GBPS = 370  # Random rows of another GPU's memory come at this rate, measured on two H200 (README.md).
WAY_BYTES = 16  # A way of a map has this many bytes.
WANTED_OWN, WANTED_PEER, WANTED_CAPACITY, MOST_OF_LONGEST = 0.9, 1.3, 0.9, 1.15
ZIPF_CASE = "normal 0.02"


class Set(NamedTuple):
    """Rows to cache. columns, dtype and deviation are those of dense rows."""

    name: str
    columns: int = 0
    dtype: torch.dtype = torch.float32
    deviation: float = 1.0


SETS = (
    *(Set(ZIPF_CASE, columns, torch.bfloat16, 0.02) for columns in (1024, 256, 64)),
    Set("normal 1", 512),
    Set("citeseer"),
    Set("pubmed"),
)
QUICK_SETS = (Set(ZIPF_CASE, 256, torch.bfloat16, 0.02), Set("pubmed"))


def rows_of(run, one, data_dir):
    """Returns the set's tensor, of TABLE_BYTES."""
    num_bytes = TABLE_BYTES if run.is_judged else QUICK_TABLE_BYTES
    if one.columns:
        return inputs.normal_rows(num_bytes, one.dtype, one.deviation, run.device, columns=one.columns)
    x = dict(inputs.real_sets(data_dir))[one.name]
    return inputs.replicated(x, num_bytes // x[0].nbytes, run.device)


class Lookup(NamedTuple):
    """Sets of ids, and the rate at which the link allows their rows to come."""

    ids: list[torch.Tensor]
    ideal_gbps: float


class Case:
    """A set, its table in device memory and in pinned memory, compressed or raw, and a cache of it."""

    def __init__(self, run, rates, one, x, hotness, near, budget):
        self.run, self.one, self.x, self.kind = run, one, x, ", raw" if near.scheme == "raw" else ""
        self.near = near
        self.table = near.cpu().pin_memory() if run.on_gpu else near
        self.row_bytes = x[0].nbytes
        self.budget = budget
        self.num_ids = max(1, x.nbytes // CALL_SHARE // self.row_bytes)
        self.outs = [torch.empty(self.num_ids, *x.shape[1:], dtype=x.dtype, device=run.device) for _ in range(2)]
        moved = self.num_ids * self.row_bytes * (2 - self.table.savings)
        self.near_gbps = ideal.device_gbps(self.num_ids * self.row_bytes, moved, rates.copy_gbps)
        self.hotness = hotness

    def cache(self, devices=None, **options):
        hotness = None if options.get("policy") == "lru" else self.hotness
        devices = self.run.device if devices is None else devices
        return ibp.RowCache(self.table, self.budget, hotness, devices=devices, **options)

    def held(self, cache):
        """Returns the slab that each row is in; -1: none."""
        ids = torch.arange(len(self.x), device=self.run.device)
        with cache.found(ids) as (_, entries, _):
            entries = entries.view(len(ids), -1)
            whole = _slabs.are_present(entries).all(1)
            return torch.where(whole, _slabs.slabs_of(entries[:, 0]), -1)

    def drawn(self, rows, num_ids=None):
        """Returns NUM_SETS sets of some of these rows."""
        num_ids = self.num_ids if num_ids is None else num_ids
        return [rows[torch.randint(len(rows), (num_ids,), device=rows.device)] for _ in range(NUM_SETS)]

    def link_gbps(self, misses):
        """Returns the ideal rate of calls for which these rows come from the table. misses: one tensor for each
        call."""
        link_ns = ideal.row_link_ns(self.table, torch.cat(misses).cpu())
        return ideal.gather_gbps(len(misses) * self.num_ids * self.row_bytes, link_ns, self.run.memset_gbps)

    def seconds(self, source, ids, what):
        """Returns the seconds of one call, after comparing its rows."""
        out = self.outs[0][: len(ids[0])]
        harness.poison(out)
        source.index_select(ids[0], out=out)
        harness.check_bits(out, self.x[ids[0]], f"{self.one.name}, {what}")

        def call(k):
            return lambda: source.index_select(ids[k], out=self.outs[k % 2][: len(ids[k])])

        return self.run.seconds([call(k) for k in range(len(ids))])

    def measure(self, arm, source, lookup, wanted=None, cache=None, allowed_gbps=math.inf):
        """Records one arm and returns its rate. wanted: the target in GB/s. allowed_gbps: a limit of the target besides
        the ideal rate."""
        arm = f"{arm}{self.kind}"
        num_bytes = len(lookup.ids[0]) * self.row_bytes
        gbps = num_bytes * 1e-9 / self.seconds(source, lookup.ids, arm)
        self.run.add(
            case=self.one.name,
            arm=arm,
            rows=len(lookup.ids[0]),
            row_bytes=self.row_bytes,
            dtype=self.x.dtype,
            savings=self.table.savings,
            gbps=gbps,
            ideal_gbps=lookup.ideal_gbps,
            sms=None if self.run.on_gpu else 0,
            **({} if cache is None else self.counted(cache, lookup.ids[0])),
            **harness.judged(gbps, wanted, min(lookup.ideal_gbps, allowed_gbps)),
        )
        return gbps

    def counted(self, cache, ids):
        """Returns the values of CACHE_COLUMNS."""
        cache.reset_stats()
        cache.index_select(ids, out=self.outs[0][: len(ids)])
        stored = ideal.stored_row_bytes(self.table).double().mean()
        return {
            "budget_bytes": self.budget,
            "held_rows": cache.num_cached_rows,
            "raw_rows": len(cache.devices) * self.budget // self.row_bytes,
            "formula_rows": int(len(cache.devices) * self.budget / (stored + WAY_BYTES)),
            "hit_rate": f"{cache.stats().hit_rate:.4f}",
        }

    def cell(self, what):
        name = f"{self.one.name} {harness.dtype_name(self.x.dtype)}, {self.row_bytes} B"
        return self.run.cell(f"{name}, {what}{self.kind}")


# ---- arms ----------------------------------------------------------------------------------------------------------


def measure_own(case):
    """Measures rows that are cached, from the cache and from the table in device memory. Returns the cache, the slab of
    each row, and the rate of the cache."""
    cache = case.cache()
    places = case.held(cache)
    lookup = Lookup(case.drawn((places >= 0).nonzero()[:, 0]), case.near_gbps)
    gbps = case.measure("device memory", case.near, lookup)
    is_judged = case.x.dtype == torch.bfloat16 and not case.kind
    own_gbps = case.measure("own hits", cache, lookup, WANTED_OWN * gbps if is_judged else None, cache)
    return cache, places, own_gbps


def measure_mixed(case, cache, places, own_gbps):
    """Measures calls for some cached rows, which should not be faster than calls for cached rows alone, and calls for
    none."""
    held, others = (places >= 0).nonzero()[:, 0], (places < 0).nonzero()[:, 0]
    for percent in HIT_PERCENT:
        hits = case.drawn(held, max(1, case.num_ids * percent // 100))
        misses = case.drawn(others, max(1, case.num_ids - len(hits[0])))
        longest = max(case.seconds(cache, hits, "hits alone"), case.seconds(case.table, misses, "misses alone"))
        order = torch.randperm(len(hits[0]) + len(misses[0]), device=held.device)[: case.num_ids]
        mixed = [torch.cat(pair)[order] for pair in zip(hits, misses)]
        wanted = len(order) * case.row_bytes * 1e-9 / (MOST_OF_LONGEST * longest)
        lookup = Lookup(mixed, min(case.near_gbps, case.link_gbps(misses)))
        case.measure(f"{percent} % hits", cache, lookup, None if case.kind else wanted, cache, own_gbps)
    misses = case.drawn(others)
    case.measure("no cache", case.table, Lookup(misses, case.link_gbps(misses)))


def measure_peer(case, raw_gbps):
    """Measures rows in the other GPU's slab and returns the rate."""
    cache = case.cache(devices=[0, 1])
    ids = case.drawn((case.held(cache) == 1).nonzero()[:, 0])
    lookup = Lookup(ids, min(PEER_GBPS / (1 - case.table.savings), case.near_gbps))
    if raw_gbps is None:
        return case.measure("peer hits", cache, lookup, cache=cache)
    allowed_gbps = harness.allowed_beside(raw_gbps, PEER_GBPS, lookup.ideal_gbps)
    return case.measure("peer hits", cache, lookup, WANTED_PEER * raw_gbps, cache, allowed_gbps)


def measure_zipf(case):
    """Measures ids by Zipf's law, from the table and through caches with both policies."""
    order = case.hotness.argsort(descending=True)
    ids = [order[inputs.zipf_ranks(case.num_ids, len(order), order.device)] for _ in range(NUM_SETS)]
    case.measure("Zipf, no cache", case.table, Lookup(ids, case.link_gbps(ids)))
    for policy in ("static", "lru"):
        cache = case.cache(policy=policy)
        for k in range(LRU_WARM_UP if policy == "lru" else 0):
            cache.index_select(ids[k % NUM_SETS], out=case.outs[0])
        places = case.held(cache) if policy == "static" else None
        missed = [one[places[one] < 0] for one in ids] if places is not None else ids
        ideal_gbps = min(case.near_gbps, case.link_gbps(missed)) if policy == "static" else case.near_gbps
        case.measure(f"Zipf, {policy}", cache, Lookup(ids, ideal_gbps), cache=cache)


def tables_of(one, x):
    """Returns the set in device memory, raw and compressed."""
    coded = "planes" if one.columns == 64 else "auto"  # "auto" would keep rows of 128 B raw.
    return [ibp.compress(x, scheme=scheme, layout="slots") for scheme in ("raw", coded)]


def run_set(run, rates, one, data_dir):
    x = rows_of(run, one, data_dir)
    hotness = torch.randperm(len(x), device=run.device)
    tables = tables_of(one, x)
    budget = min(x.nbytes // CACHE_SHARE, int(ideal.stored_row_bytes(tables[1]).sum()) // 2)
    raw_peer_gbps = None
    for near in tables:
        case = Case(run, rates, one, x, hotness, near, budget)
        with case.cell("own hits and mixed calls"):
            cache, places, own_gbps = measure_own(case)
            measure_mixed(case, cache, places, own_gbps)
            del cache
        if run.on_gpu and torch.cuda.device_count() > 1:
            with case.cell("peer hits"):
                raw_peer_gbps = measure_peer(case, raw_peer_gbps)
        if one == (QUICK_SETS if not run.is_judged else SETS)[0]:
            with case.cell("Zipf"):
                measure_zipf(case)


def capacities(rows):
    """Yields (row, held rows over raw rows in the same bytes, held rows over the formula's) for every cache on one
    GPU."""
    for row in rows:
        if row["arm"].startswith("own hits"):
            held = int(row["held_rows"])
            yield row, held / max(1, int(row["raw_rows"])), held / max(1, int(row["formula_rows"]))


def shortfalls(rows):
    yield from harness.missed(rows)
    for row, gain, share in capacities(rows):
        if share < WANTED_CAPACITY and row["arm"] == "own hits":
            yield (
                f"{row['case']} {row['dtype']}, {row['row_bytes']} B: a cache holds {gain:.2f} times as many rows as "
                f"raw ones, {share:.2f} of the formula, wanted {WANTED_CAPACITY:g}"
            )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("row_cache", args, COLUMNS)
    torch.manual_seed(0)
    rates = codec.DeviceRates(run)
    for one in SETS if run.is_judged else QUICK_SETS:
        with run.cell(f"{one.name}, {one.columns} columns"):
            run_set(run, rates, one, args.data)
    for row, gain, _ in capacities(run.rows):
        print(f"{row['case']}, {row['arm']}: {int(row['held_rows']):,} rows, {gain:.2f} times as many as raw ones")
    return run.finish([*shortfalls(run.rows)])


if __name__ == "__main__":
    sys.exit(main())
