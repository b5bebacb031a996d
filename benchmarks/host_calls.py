"""How long does the host take to issue a call, compared with torch's call that does the same?

    python -m benchmarks.host_calls [--out DIR] [--device cpu] [--quick]

Calls with few rows and small tensors are made in a loop that waits for none of them. This measures the microseconds
until a call returns, and counts the Python functions of ibp that it enters. The results are medians over several
processes; in each process ibp's call and torch's take turns. The targets are 1.3 times torch's time for index_select,
1.5 times for table[ids] and products, and 20 us for decompressing 4 MiB.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import ibp

from . import harness, inputs

COLUMNS = ("us", "torch_us", "times_torch", "python_calls", "wanted")
PROCESSES, ROUNDS, LOOP = 5, 11, 100
ROW_BYTES, NUM_IDS, NUM_TABLES = 512, 64, 16
DTYPE = torch.bfloat16
SIZE = 1024  # A matrix has this many rows and columns.
VECTORS = 4
# The targets are these multiples of torch's time.
TIMES = {
    "index_select, device memory": 1.3,
    "index_select, pinned memory": 1.3,
    "index_select, out": 1.3,
    "table[ids]": 1.5,
    "linear": 1.5,
    "nn.Linear": 1.5,
}
MICROSECONDS = {"decompress, 4 MiB": 20.0}


def cases(device, quick):
    """Yields (name, ibp's call, torch's call, bytes of the result)."""
    num_rows, columns = 1 << 12 if quick else 1 << 16, ROW_BYTES // DTYPE.itemsize
    x = inputs.normal_rows(num_rows * ROW_BYTES, DTYPE, 0.02, device, columns=columns)
    ids = torch.randint(num_rows, (NUM_IDS,), device=device)
    out = torch.empty(NUM_IDS, columns, dtype=DTYPE, device=device)
    near, far = ibp.compress(x, scheme="planes"), ibp.compress(x.cpu(), scheme="planes")
    of_rows = NUM_IDS * ROW_BYTES
    yield (
        "index_select, device memory",
        lambda: ibp.index_select(near, ids),
        lambda: torch.index_select(x, 0, ids),
        of_rows,
    )
    yield (
        "index_select, pinned memory",
        lambda: ibp.index_select(far, ids),
        lambda: torch.index_select(x, 0, ids),
        of_rows,
    )
    for name, table in (("index_select, out", near), ("index_select, pinned memory, out", far)):
        yield (
            name,
            lambda table=table: ibp.index_select(table, ids, out=out),
            lambda: torch.index_select(x, 0, ids, out=out),
            of_rows,
        )
    yield "table[ids]", lambda: near[ids], lambda: x[ids], of_rows
    tables = [ibp.compress(part, scheme="planes") for part in x.split(num_rows // NUM_TABLES)]
    numbers, places = torch.arange(NUM_IDS, device="cpu") % NUM_TABLES, ids // NUM_TABLES
    yield (
        "index_select, 16 tables",
        lambda: ibp.index_select(tables, places, table_numbers=numbers),
        lambda: torch.index_select(x, 0, ids),
        of_rows,
    )
    for policy in ("static", "lru"):
        cache = ibp.RowCache(far, 64 * of_rows, torch.rand(num_rows), devices=device, policy=policy)
        yield (
            f"RowCache, {policy}",
            lambda cache=cache: cache.index_select(ids),
            lambda: torch.index_select(x, 0, ids),
            of_rows,
        )
    part = x[: (1 << 18 if quick else 1 << 22) // ROW_BYTES]
    table = ibp.compress(part, scheme="planes")
    yield "decompress, 4 MiB", lambda: ibp.decompress(table), lambda: part.clone(), part.nbytes
    plain = torch.nn.Linear(SIZE, SIZE, bias=False, device=device, dtype=DTYPE).requires_grad_(False)
    module, vectors = ibp.nn.Linear.from_linear(plain), torch.randn(VECTORS, SIZE, device=device, dtype=DTYPE)
    of_products = VECTORS * SIZE * DTYPE.itemsize
    weight = module.weight
    yield "linear", lambda: ibp.linear(vectors, weight), lambda: F.linear(vectors, plain.weight), of_products
    yield "nn.Linear", lambda: module(vectors), lambda: plain(vectors), of_products


def microseconds(call, sync, loop):
    sync()
    start = time.perf_counter()
    for _ in range(loop):
        call()
    taken = time.perf_counter() - start
    sync()
    return 1e6 * taken / loop


def entered(call):
    """Returns how many Python functions of ibp a call enters."""
    package, count = os.path.dirname(ibp.__file__) + os.sep, 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def measured(device, quick):
    """Returns {case: [ibp's microseconds, torch's, Python functions, bytes]} of this process."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rounds, loop = (2, 5) if quick else (ROUNDS, LOOP)
    found = {}
    torch.manual_seed(0)
    for name, ours, theirs, num_bytes in cases(device, quick):
        for call in (ours, theirs):
            microseconds(call, sync, loop)
        times = [(microseconds(ours, sync, loop), microseconds(theirs, sync, loop)) for _ in range(rounds)]
        found[name] = [*map(statistics.median, zip(*times)), entered(ours), num_bytes]
    return found


def of_processes(args):
    """Returns the median of each number of `measured` over several processes."""
    command = [sys.executable, "-m", "benchmarks.host_calls", "--device", args.device, *["--quick"] * args.quick]
    environment = os.environ | {"IBP_HOST_CALLS": "1"}
    runs = []
    for _ in range(1 if args.quick else PROCESSES):
        done = subprocess.run(command, env=environment, cwd=harness.ROOT, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: [statistics.median(run[name][k] for run in runs) for k in range(4)] for name in runs[0]}


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    if os.environ.get("IBP_HOST_CALLS"):  # This is one of the processes that measure.
        with torch.no_grad():
            print(json.dumps(measured(torch.device(args.device), args.quick)))
        return 0
    run = harness.Run("host_calls", args, COLUMNS)
    lines, below = [], []
    for name, (ours, theirs, calls, num_bytes) in of_processes(args).items():
        most = MICROSECONDS.get(name, TIMES.get(name, 0) * theirs)
        run.add(
            case=name,
            arm="ibp",
            rows=NUM_IDS,
            row_bytes=ROW_BYTES,
            dtype=DTYPE,
            savings=0.0,
            gbps=num_bytes * 1e-3 / ours,
            ideal_gbps=num_bytes * 1e-3 / theirs,
            sms=None,
            us=f"{ours:.2f}",
            torch_us=f"{theirs:.2f}",
            times_torch=f"{ours / theirs:.2f}",
            python_calls=int(calls),
            wanted=f"{most:.2f}" if most else "",
        )
        lines.append(
            f"{name:34s} {ours:8.2f} us, torch {theirs:8.2f} us, {ours / theirs:5.2f} times, {calls:.0f} calls"
        )
        if most and ours > most:
            below.append(f"{name}: {ours:.1f} us, wanted {most:.1f}")
    print("\n".join(lines))
    return run.finish(below if run.is_judged else [])


if __name__ == "__main__":
    sys.exit(main())
