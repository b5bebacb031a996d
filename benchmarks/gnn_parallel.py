"""How much faster is an epoch of GraphSAGE on several GPUs, each with a compressed table in its own pinned memory?

    python -m benchmarks.gnn_parallel [--out DIR] [--device cpu] [--quick]

Training is data-parallel with NCCL and has one process per GPU. It runs on 1, 2, 4, ... GPUs, up to the number of GPUs.
Graph, batches and the arm `ibp` are those of gnn.py. Each GPU takes 1,024 seeds per step, so that with two GPUs an
epoch of 200 batches has 100 steps.

gnn_parallel.csv has the rate at which all GPUs together fetch during the epoch (gbps) and, after the common columns,
gpus, batch (seeds of a GPU), batches (measured, of all GPUs together) and epoch_s. The first batch of each GPU is
compared with the right rows bit for bit.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import gnn, harness, ideal

COLUMNS = "gpus,batch,batches,epoch_s".split(",")
CASES = tuple(case for case in gnn.CASES if case.name in ("cora", "dense 602"))
BATCH, QUICK_BATCH = 1024, 16
WARM_UP = 3
WANTED_TWO = 1.9  # Two GPUs should be this many times as fast as one.


def work(rank, world, case, small, kind, data_dir, store, found):
    """Runs one process. kind: "cuda" or "cpu". store: a file that no other run uses. found: a file that gets what rank
    0 has measured, as JSON."""
    with harness.process_group(kind, store, rank, world) as device:
        measured = measure(rank, world, case, small, data_dir, device)
    if rank == 0:
        Path(found).write_text(json.dumps(measured))


def measure(rank, world, case, small, data_dir, device):
    """Returns what all processes together have fetched, the seconds of the slowest, and the link's ideal rate for one
    GPU."""
    torch.manual_seed(0)
    graph = gnn.Graph(case.num_nodes, gnn.QUICK_EDGES if small else gnn.NUM_EDGES, device)
    features = gnn.Features(case, data_dir, device)
    fetched = 0

    def fetch(ids, out):
        nonlocal fetched
        fetched += len(ids)
        return by_gpu(ids, out)

    def wrap(model):
        ids = [device.index] if device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids) if world > 1 else model

    by_gpu, columns = gnn.ByGpu(features.table), features.x.shape[1]
    training = gnn.Training(
        graph, columns, case.dtype, QUICK_BATCH if small else BATCH, device, wrap=wrap, part=(rank, world)
    )
    training.restart()
    ids = training.sample(0).ids
    features.check(fetch(ids, training.out(0, len(ids))), ids, f"{case.name}, rank {rank}")
    training.run(fetch, WARM_UP, math.inf)
    steps = max(gnn.LEAST_BATCHES, (gnn.QUICK_EPOCH if small else gnn.EPOCH_BATCHES) // world)
    fetched = 0
    dist.barrier()
    seconds, _ = training.run(fetch, steps, math.inf)
    totals = torch.tensor([fetched], dtype=torch.float64, device=device)
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        "rows": int(totals),
        "row_bytes": features.row_bytes,
        "savings": features.table.savings,
        "seconds": float(slowest) * steps,
        "link_gbps": ideal.gather_gbps(
            len(ids) * features.row_bytes, ideal.row_link_ns(features.table, ids.cpu()), math.inf
        ),
        "batches": steps * world,
    }


def run_world(run, case, world, small, data_dir):
    with tempfile.TemporaryDirectory() as directory:
        store, found = (str(Path(directory) / name) for name in ("store", "found"))
        mp.spawn(work, (world, case, small, run.device.type, data_dir, store, found), nprocs=world)
        measured = json.loads(Path(found).read_text())
    rate = measured["rows"] * measured["row_bytes"] * 1e-9 / measured["seconds"]
    run.add(
        case=case.name,
        arm=f"ibp, {world} GPU{'s' if world > 1 else ''}",
        rows=measured["rows"] // measured["batches"],
        row_bytes=measured["row_bytes"],
        dtype=case.dtype,
        savings=measured["savings"],
        gbps=rate,
        ideal_gbps=world * min(measured["link_gbps"], run.memset_gbps),
        sms=None,
        gpus=world,
        batch=QUICK_BATCH if small else BATCH,
        batches=measured["batches"],
        epoch_s=harness.four_digits(measured["seconds"] / measured["batches"] * gnn.EPOCH_BATCHES),
    )


def speedups(rows):
    """Yields (case, GPUs, speed-up over one GPU) for every case with more than one GPU."""
    alone = {row["case"]: float(row["epoch_s"]) for row in rows if int(row["gpus"]) == 1}
    for row in rows:
        if int(row["gpus"]) > 1 and row["case"] in alone:
            yield row["case"], int(row["gpus"]), alone[row["case"]] / float(row["epoch_s"])


def shortfalls(rows):
    for case, gpus, factor in speedups(rows):
        if gpus == 2 and factor < WANTED_TWO:
            yield f"{case}: two GPUs are {factor:.2f} times as fast as one, wanted {WANTED_TWO:g}"


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("gnn_parallel", args, COLUMNS)
    small = run.quick or not run.on_gpu
    num_gpus = torch.cuda.device_count() if run.on_gpu else 2
    for case in gnn.QUICK_CASES[:1] if small else CASES:
        for world in (2**i for i in range(num_gpus.bit_length())):
            with run.cell(f"{case.name}, {world} GPUs"):
                run_world(run, case, world, small, args.data)
    for case, gpus, factor in speedups(run.rows):
        print(f"{case}: {gpus} GPUs are {factor:.2f} times as fast as one")
    if num_gpus < 2:
        print("several GPUs: there is one, left out")
    return run.finish([*shortfalls(run.rows)])


if __name__ == "__main__":
    sys.exit(main())
