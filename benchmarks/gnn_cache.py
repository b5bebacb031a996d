"""How long is an epoch of GraphSAGE with a cache of features on the GPU (the paper's table 7, Legion's cache)?

    python -m benchmarks.gnn_cache [--out DIR] [--device cpu] [--quick]

Features, batches of 1,024 seeds and epochs are those of gnn.py, on one GPU, with 600,000 nodes and 30 million edges.
Arms: `raw rows` and `ibp`, which the GPU fetches from pinned memory, and both through a `RowCache` with 1 and 5 % of
the bytes of the raw features. The cache holds the rows that the first epoch asks for most often
(`ibp.cache.count_accesses`). With 1 % there are also `cache by ibp` and `misses by ibp`, the paper's IBP(C) and IBP(M),
in which only the cache or only the missed rows are compressed. They take two calls and a copy on the GPU, and wait for
the number of misses.

gnn_cache.csv has the columns of gnn.csv, and cache_percent (0: no cache), held_rows, raw_rows (that fit the same
bytes), hit_rate and predicted. `predicted` is the target for fetches of compressed rows, compared with raw rows with an
equally large cache. It is the gain that would come only from the larger number of cached rows, if all of them were raw,
misses came at the link's rate and hits at that of memory.
"""

import functools
import sys

import torch

import ibp

from . import gnn, harness, ideal

COLUMNS = (*gnn.COLUMNS, "cache_percent", "held_rows", "raw_rows", "hit_rate", "predicted")
NUM_NODES, NUM_EDGES = 600_000, 30_000_000
BATCH, QUICK_BATCH = 1024, 16
CASES = (
    gnn.Case("pubmed", NUM_NODES, (BATCH,)),
    gnn.Case("dense 768", NUM_NODES, (BATCH,), torch.bfloat16, 768),
    gnn.Case("dense 602", NUM_NODES, (BATCH,), torch.float32, 602),
    gnn.Case("citeseer", NUM_NODES, (BATCH,)),
)
ARM_S = 0.8  # This many seconds of an epoch are timed.
# GB/s of random rows in a GPU's own memory and in another GPU's, measured on two H200.
OWN_GBPS, PEER_GBPS = 1500, 370
PERCENTS = (0, 1, 5)
RAW, IBP = "raw rows", "ibp"
CACHE_ALONE, MISSES_ALONE = "cache by ibp", "misses by ibp"


class Cached:
    """A fetcher with which the GPU fetches rows through a cache of a table."""

    def __init__(self, cache):
        self.cache, self.table = cache, cache.table

    def __call__(self, ids, out):
        return self.cache.index_select(ids, out=out)


class HalfCoded(Cached):
    """A fetcher that takes rows from a cache of one table, and missed rows from another table with the same rows."""

    def __init__(self, cache, misses):
        self.cache, self.table = cache, misses

    def __call__(self, ids, out):
        with self.cache.found(ids) as (_, entries, _):
            is_held = (entries.view(len(ids), -1) != 0).all(1)
        held, missed = is_held.nonzero().view(-1), (~is_held).nonzero().view(-1)
        out[held] = self.cache.index_select(ids[held])
        out[missed] = ibp.index_select(self.table, ids[missed], device=out.device)
        return out


def arm_name(kind, percent):
    return f"{kind}, cache of {percent} %" if percent else kind


def accesses(training, num_batches, num_nodes):
    """Returns how often an epoch asks for each node, int64 on its device."""
    batches = (training.sample(i).ids for i in range(num_batches))
    return ibp.cache.count_accesses(batches, num_nodes, device=training.device)


def fetcher(features, kind, percent, hotness, device):
    """Returns the object with which an arm fetches."""
    cached = features.table if kind in (IBP, CACHE_ALONE) else features.raw
    if not percent:
        return gnn.ByGpu(cached)
    cache = ibp.RowCache(cached, features.num_bytes * percent // 100, hotness, devices=device)
    if kind in (RAW, IBP):
        return Cached(cache)
    return HalfCoded(cache, features.raw if kind == CACHE_ALONE else features.table)


def expected_hits(hotness, num_rows):
    """Returns the share of accesses that go to the most frequent num_rows rows."""
    counts = hotness.sort(descending=True).values
    return float(counts[:num_rows].sum() / counts.sum().clamp(min=1))


def predicted_gain(hotness, raw_rows, held_rows, num_gpus=1):
    """Returns how many times as fast raw rows would be fetched if held_rows of them were cached instead of raw_rows."""
    hit_s = (1 / OWN_GBPS + (num_gpus - 1) / PEER_GBPS) / num_gpus

    def seconds(num_rows):
        hits = expected_hits(hotness, num_rows)
        return (1 - hits) / ideal.LINK_KERNEL_GBPS + hits * hit_s

    return seconds(raw_rows) / seconds(held_rows)


def ideal_of(run, fetch, ids, row_bytes):
    """Returns the ideal rate, for which only the rows that the cache lacks cross the link."""
    if not isinstance(fetch, Cached):
        return gnn.ideal_of(run, fetch, ids, row_bytes)
    with fetch.cache.found(ids) as (_, entries, _):
        missed = ids[(entries.view(len(ids), -1) == 0).any(1)]
    link_ns = ideal.row_link_ns(fetch.table, missed.cpu())
    return ideal.gather_gbps(len(ids) * row_bytes, link_ns, run.memset_gbps)


def cache_columns(features, fetch, kind, percent, hotness, ids):
    if not percent:
        return {"cache_percent": 0}
    cache = fetch.cache
    cache.reset_stats()
    cache.index_select(ids)
    stats = cache.stats()
    predicted = predicted_gain(hotness, stats.raw_capacity, cache.num_cached_rows)
    return {
        "cache_percent": percent,
        "held_rows": cache.num_cached_rows,
        "raw_rows": features.num_bytes * percent // 100 // features.row_bytes,
        "hit_rate": f"{stats.hit_rate:.4f}",
        "predicted": harness.four_digits(predicted) if kind == IBP else "",
    }


def measure(run, case, features, training, num_batches, hotness, kind, percent):
    """Measures one arm."""
    fetch = fetcher(features, kind, percent, hotness, run.device)
    for buffer in training.buffers:
        harness.poison(buffer)
    arm = arm_name(kind, percent)
    training.restart()
    check = functools.partial(features.check, what=f"{case.name}, {arm}")
    alone, ids = training.split(fetch, check)
    training.restart()
    mean_s, done = training.run(fetch, num_batches, ARM_S)
    run.add(
        case=case.name,
        arm=arm,
        rows=len(ids),
        row_bytes=features.row_bytes,
        dtype=case.dtype,
        savings=fetch.table.savings,
        gbps=len(ids) * features.row_bytes * 1e-9 / alone[1],
        ideal_gbps=ideal_of(run, fetch, ids, features.row_bytes),
        sms=None if run.on_gpu else 0,
        batch=len(training.seeds[0]),
        batches=done,
        **{f"{name}_ms": harness.four_digits(1e3 * s) for name, s in zip(("sample", "fetch", "train"), alone)},
        beside_ms=harness.four_digits(1e3 * training.beside_s()),
        wait_ms=harness.four_digits(1e3 * training.wait_s()),
        epoch_s=harness.four_digits(mean_s * gnn.EPOCH_BATCHES),
        table_gib=f"{features.num_bytes / gnn.GIB:.2f}",
        **cache_columns(features, fetch, kind, percent, hotness, ids),
    )


def run_case(run, case, graph, data_dir):
    features = gnn.Features(case, data_dir, run.device)
    batch = BATCH if run.is_judged else QUICK_BATCH
    num_batches = gnn.EPOCH_BATCHES if run.is_judged else gnn.QUICK_EPOCH
    training = gnn.Training(graph, features.x.shape[1], case.dtype, batch, run.device)
    hotness = accesses(training, num_batches, case.num_nodes)
    for percent in PERCENTS:
        for kind in (RAW, IBP, CACHE_ALONE, MISSES_ALONE) if percent == 1 else (RAW, IBP):
            with run.cell(f"{case.name}, {arm_name(kind, percent)}"):
                measure(run, case, features, training, num_batches, hotness, kind, percent)


def gains(rows):
    """Yields (row of ibp, gain of its fetches over raw rows with the same cache, gain of its epochs)."""
    arms = {(row["case"], row["arm"]): row for row in rows}
    for row in rows:
        if row["arm"].startswith(IBP):
            raw = arms.get((row["case"], row["arm"].replace(IBP, RAW)))
            if raw is not None:
                yield (
                    row,
                    float(raw["fetch_ms"]) / float(row["fetch_ms"]),
                    float(raw["epoch_s"]) / float(row["epoch_s"]),
                )


def shortfalls(rows):
    for row, fetch, _ in gains(rows):
        if row.get("predicted") and fetch < float(row["predicted"]):
            yield (
                f"{row['case']}, {row['arm']}: {fetch:.2f} times as fast as raw rows with the same cache, wanted "
                f"{row['predicted']}"
            )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("gnn_cache", args, COLUMNS)
    torch.manual_seed(0)
    small = not run.is_judged
    graph, num_nodes = None, 0
    for case in gnn.QUICK_CASES if small else CASES:
        with run.cell(case.name):
            if case.num_nodes != num_nodes:
                graph = None
                num_edges = gnn.QUICK_EDGES if small else NUM_EDGES
                graph, num_nodes = gnn.Graph(case.num_nodes, num_edges, run.device), case.num_nodes
            run_case(run, case, graph, args.data)
        harness.release(run)
    for row, fetch, epoch in gains(run.rows):
        print(f"{row['case']}, {row['arm']}: fetches {fetch:.2f}, epochs {epoch:.2f} times as fast as raw rows")
    return run.finish([*shortfalls(run.rows)])


if __name__ == "__main__":
    sys.exit(main())
