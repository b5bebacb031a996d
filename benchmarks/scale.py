"""How long is an epoch of GraphSAGE on one and two GPUs that cache features together (the paper's table 7, Legion's
cache), and how fast do rows of another process come?

    python -m benchmarks.scale [--out DIR] [--device cpu] [--quick]

There is one process per GPU, data-parallel with NCCL. All processes use one table in shared pinned memory. Graphs,
batches and epochs are those of gnn.py, with 400,000 nodes, 20 million edges, and 1,024 seeds per GPU and step. A
`RowCache` on each GPU with 1 and 5 % of the bytes of the raw features holds the rows that an epoch asks for most often.
On two GPUs each has a slab that the other one reads (`group=`). Arms: raw rows and compressed rows with equal bytes,
each on one GPU and on two at once.

scale.csv has the rate at which all GPUs together fetch (gbps, without other work) and, after the common columns, gpus,
cache_percent, held_rows, raw_rows (in the same bytes), hit_rate, own_share and peer_share (of the rows asked for),
fetch_ms (of a batch, on the slowest GPU), epoch_s (of 200 batches of all GPUs together) and predicted. `predicted` is
the gain of a fetch over raw rows with the same cache if it came only from the larger number of cached rows, at the
rates of the link and of the GPUs' memory. In the case `sharded`, each GPU's process has half of a table
(`ibp.distributed.ShardedTable`); there is no cache, and both processes ask at the same time.

The first batch of every arm is compared bit for bit with raw rows that the GPU fetches without a cache. The first of
these rows are also compared with the CPU's.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ibp
from ibp.distributed import ShardedTable, share_table

from . import gnn, gnn_cache, harness, ideal

COLUMNS = "gpus,cache_percent,held_rows,raw_rows,hit_rate,own_share,peer_share,fetch_ms,epoch_s,predicted".split(",")
NUM_NODES, NUM_EDGES = 400_000, 20_000_000
CASES = (
    gnn.Case("pubmed", NUM_NODES, (1024,)),
    gnn.Case("dense 768", NUM_NODES, (1024,), torch.bfloat16, 768),
)
RAW, IBP = gnn_cache.RAW, gnn_cache.IBP
WORLD = 2
# The batches of a timed fetch, the seconds of the timed part of an epoch, and the batches in which accesses are
# counted.
FETCHED, EPOCH_S, HOT_BATCHES = 12, 1.0, 100
SHARDED_IDS, SHARDED_CALLS = 100_000, 8
CHECKED = 1000  # This many rows are also compared with the CPU's.


class Process(NamedTuple):
    """One process of a run. small: few batches on small graphs."""

    rank: int
    device: torch.device
    small: bool

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds):
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def total(self, numbers):
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return found.tolist()


def work(rank, kind, cases, small, data_dir, store, found):
    """Runs one process. found: a file that gets what rank 0 has measured, as JSON."""
    with harness.process_group(kind, store, rank, WORLD) as device:
        process, measured = Process(rank, device, small), []
        for case in cases:
            measured += measure_case(process, case, data_dir)
            if rank == 0:  # What is measured is kept, whatever happens to the next case.
                Path(found).write_text(json.dumps(measured))
            dist.barrier()  # No process may end while others read its slab.


# ---- a cache of all processes --------------------------------------------------------------------------------------


def measure_case(process, case, data_dir):
    """Returns what rank 0 has measured, one dictionary per arm."""
    began = time.perf_counter()
    torch.manual_seed(0)
    features = gnn.Features(case, data_dir, process.device) if process.rank == 0 else None
    raw, coded = (share_table(features and table) for table in (features and features.raw, features and features.table))
    del features
    graph = gnn.Graph(case.num_nodes, gnn.QUICK_EDGES if process.small else NUM_EDGES, process.device)
    batch = gnn_cache.QUICK_BATCH if process.small else gnn_cache.BATCH
    measured = []
    for world in (1, WORLD):
        part = (process.rank, world) if world > 1 else (0, 1)
        training = gnn.Training(
            graph, raw.shape[1], case.dtype, batch, process.device, wrap=wrapper(process, world), part=part
        )
        hotness = hotness_of(process, training, case.num_nodes)
        for percent in (0, 1, 5):
            for kind, table in ((RAW, raw), (IBP, coded)):
                found = measure_arm(process, world, training, hotness, kind, table, raw, percent)
                measured.append({"case": case.name, "dtype": harness.dtype_name(case.dtype), **found})
    measured += measure_sharded(process, case, raw, coded)
    if process.rank == 0:
        print(f"{case.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return measured


def wrapper(process, world):
    ids = [process.device.index] if process.device.type == "cuda" else None
    if world == 1:
        return lambda model: model
    return lambda model: torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)


def hotness_of(process, training, num_nodes):
    """Returns how often the batches of all processes ask for each node."""
    counts = gnn_cache.accesses(training, gnn.QUICK_EPOCH if process.small else HOT_BATCHES, num_nodes)
    dist.all_reduce(counts)
    return counts


def measure_arm(process, world, training, hotness, kind, table, raw, percent):
    """Measures one arm, on one GPU while the other process waits, or on all GPUs."""
    cache_bytes = raw.nbytes * percent // 100
    takes_part = world > 1 or process.rank == 0
    found = {"batches": 0, "batch_rows": 0}
    if takes_part:
        group = dist.group.WORLD if world > 1 else None
        fetch = gnn.ByGpu(table)
        if percent:
            cache = ibp.RowCache(table, cache_bytes, hotness, devices=process.device, group=group)
            fetch = gnn_cache.Cached(cache)
        training.restart()
        ids = [training.sample(i).ids for i in range(gnn.QUICK_EPOCH if process.small else FETCHED)]
        check(fetch(ids[0], training.out(0, len(ids[0]))), raw, ids[0], f"{kind}, rank {process.rank}")
    dist.barrier()
    seconds = timed_fetches(process, fetch, training, ids) if takes_part else 0.0
    counted = [sum(map(len, ids))] if takes_part else [0]
    (num_rows,) = process.total(counted)
    fetch_s = process.slowest(seconds)
    epoch_s = 0.0
    if takes_part:
        training.restart()
        limit = math.inf if world > 1 else EPOCH_S  # Ranks must make the same steps.
        steps = gnn.QUICK_EPOCH if process.small else max(gnn.LEAST_BATCHES, 40 // world)
        epoch_s, _ = training.run(fetch, steps, limit)
    epoch_s = process.slowest(epoch_s) / world * gnn.EPOCH_BATCHES
    if process.rank != 0:
        return found
    return {
        "arm": gnn_cache.arm_name(kind, percent),
        "rows": len(ids[0]),
        "row_bytes": raw.row_bytes,
        "savings": table.savings,
        "gbps": num_rows * raw.row_bytes * 1e-9 / fetch_s,
        "link_gbps": link_gbps(raw.row_bytes, *missed(fetch, ids[0])),
        "gpus": world,
        "cache_percent": percent,
        "fetch_ms": 1e3 * fetch_s / len(ids),
        "epoch_s": epoch_s,
        **cache_columns(fetch, kind, hotness, ids, cache_bytes // raw.row_bytes * world),
    }


def check(rows, raw, ids, what):
    wanted = raw.index_select(ids)
    harness.check_bits(rows, wanted, what)
    harness.check_bits(wanted[:CHECKED].cpu(), raw.index_select(ids[:CHECKED].cpu()), f"{what}, by the CPU")


def timed_fetches(process, fetch, training, ids):
    """Returns the seconds of all batches, one after the other."""
    for i in range(2):
        fetch(ids[i], training.out(i, len(ids[i])))
    process.sync()
    began = time.perf_counter()
    for i, some in enumerate(ids):
        fetch(some, training.out(i, len(some)))
    process.sync()
    return time.perf_counter() - began


def missed(fetch, ids):
    """Returns (ids asked for, time of the link for each row that the cache lacks, in ns)."""
    lacking = ids
    if isinstance(fetch, gnn_cache.Cached):
        with fetch.cache.found(ids) as (_, entries, _):
            lacking = ids[(entries.view(len(ids), -1) == 0).any(1)]
    return ids, ideal.row_link_ns(fetch.table, lacking.cpu())


def link_gbps(row_bytes, ids, link_ns):
    """Returns the link's ideal rate of original bytes for one GPU."""
    return ideal.gather_gbps(len(ids) * row_bytes, link_ns, math.inf)


def cache_columns(fetch, kind, hotness, ids, raw_rows):
    if not isinstance(fetch, gnn_cache.Cached):
        return {}
    cache = fetch.cache
    cache.reset_stats()
    for some in ids:
        cache.index_select(some)
    stats, held = cache.stats(), cache.num_cached_rows
    asked = max(1, stats.hits + stats.misses)
    predicted = gnn_cache.predicted_gain(hotness, raw_rows, held, len(stats.hits_of_slabs))
    return {
        "held_rows": held,
        "raw_rows": raw_rows,
        "hit_rate": stats.hit_rate,
        "own_share": stats.own_hits / asked,
        "peer_share": stats.peer_hits / asked,
        "predicted": predicted if kind == IBP else None,
    }


# ---- rows of another process ---------------------------------------------------------------------------------------


def measure_sharded(process, case, raw, coded):
    measured = []
    size = case.num_nodes // WORLD
    x = raw.index_select(torch.arange(size * process.rank, size * (process.rank + 1)))
    for kind, table in ((RAW, raw), (IBP, coded)):
        own = ibp.compress(x, scheme="raw") if table.codebook is None else ibp.compress(x, codebook=table.codebook)
        sharded = ShardedTable(own)
        draws = torch.Generator().manual_seed(process.rank)
        count = min(SHARDED_IDS, size)
        ids = [torch.randint(2 * size, (count,), generator=draws).to(process.device) for _ in range(SHARDED_CALLS)]
        rows = sharded.index_select(ids[0])
        check(rows, raw, ids[0], f"sharded {kind}, rank {process.rank}")
        process.sync(), dist.barrier()
        began = time.perf_counter()
        for some in ids:
            sharded.index_select(some, out=rows)
        process.sync()
        seconds = process.slowest(time.perf_counter() - began)
        measured.append(
            {
                "case": f"sharded, {case.name}",
                "dtype": harness.dtype_name(case.dtype),
                "arm": kind,
                "rows": count,
                "row_bytes": raw.row_bytes,
                "savings": own.savings,
                "gbps": WORLD * len(ids) * count * raw.row_bytes * 1e-9 / seconds,
                "link_gbps": link_gbps(raw.row_bytes, ids[0], ideal.row_link_ns(table, ids[0].cpu())),
                "gpus": WORLD,
                "cache_percent": 0,
                "fetch_ms": 1e3 * seconds / len(ids),
            }
        )
    return measured


# ---- the run -------------------------------------------------------------------------------------------------------


def run_cases(run, cases, small, data_dir):
    with tempfile.TemporaryDirectory() as directory:
        store, found = (str(Path(directory) / name) for name in ("store", "found"))
        try:
            mp.spawn(work, (run.device.type, cases, small, data_dir, store, found), nprocs=WORLD)
        finally:
            measured = json.loads(Path(found).read_text()) if Path(found).exists() else []
            for arm in measured:
                add(run, arm)


def add(run, arm):
    """Records an arm that rank 0 has measured."""
    world, best = arm["gpus"], arm["link_gbps"]
    common = {name: arm[name] for name in ("case", "rows", "row_bytes", "savings", "gbps")}
    extra = {name: arm[name] for name in COLUMNS if arm.get(name) is not None}
    run.add(
        **common,
        arm=f"{arm['arm']}, {world} GPU{'s' if world > 1 else ''}",
        dtype=getattr(torch, arm["dtype"]),
        ideal_gbps=world * min(best, run.memset_gbps),
        sms=None,
        **{name: harness.four_digits(value) if isinstance(value, float) else value for name, value in extra.items()},
    )


def gains(rows):
    """Yields (row of compressed rows, speed-up of its fetches over raw rows with the same GPUs and cache)."""
    arms = {(row["case"], row["arm"]): row for row in rows}
    for row in rows:
        raw = arms.get((row["case"], row["arm"].replace(IBP, RAW))) if row["arm"].startswith(IBP) else None
        if raw is not None:
            yield row, float(raw["fetch_ms"]) / float(row["fetch_ms"])


def shortfalls(rows):
    for row, factor in gains(rows):
        if row.get("predicted") and factor < float(row["predicted"]):
            yield (
                f"{row['case']}, {row['arm']}: {factor:.2f} times as fast as raw rows with the same cache, wanted "
                f"{row['predicted']}"
            )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("scale", args, COLUMNS)
    if run.on_gpu and torch.cuda.device_count() < WORLD:
        print(f"scale: needs {WORLD} GPUs, there is one")
        return run.finish()
    small = not run.is_judged
    with run.cell("scale"):
        run_cases(run, gnn.QUICK_CASES if small else CASES, small, args.data)
    for row, factor in gains(run.rows):
        print(f"{row['case']}, {row['arm']}: {factor:.2f} times as fast as raw rows, predicted {row.get('predicted')}")
    return run.finish([*shortfalls(run.rows)])


if __name__ == "__main__":
    sys.exit(main())
