"""What does a call of index_select for few rows cost in addition to its kernel?

    python -m benchmarks.small_calls [--out DIR] [--device cpu] [--quick]

Calls for 1 to 1,000 rows of 512 B, from pinned and from device memory, are compared with torch.index_select on a tensor
in device memory. The target is that a call returns within 10 microseconds. Three times of a call are measured: until it
returns (in a loop that waits for no call), until its result is there (the loop waits for each call), and the time of
the kernel alone (in a CUDA graph of many). The CSV has rates, as always. The times in microseconds are printed, with
what the call costs in addition to the kernel.
"""

import statistics
import sys
import time

import torch

import ibp

from . import harness, inputs

ROW_BYTES = 512
NUM_ROWS = (1, 10, 100, 1000)
LOOP, ROUNDS, IN_GRAPH = 100, 21, 20
DTYPE = torch.bfloat16
MOST_RETURNING_US = 10


def returning_s(run, call):
    """Returns the median over rounds of the seconds until a call returns."""
    times, loop = [], 10 if run.quick else LOOP
    for _ in range(3 if run.quick else ROUNDS):
        run.sync()
        start = time.perf_counter()
        for _ in range(loop):
            call()
        times.append((time.perf_counter() - start) / loop)
    run.sync()
    return statistics.median(times)


def result_s(run, call):
    """Returns the median over calls of the seconds until a call's result is there."""
    return statistics.median(run._wall_seconds(call) for _ in range(10 if run.quick else LOOP))


def kernel_s(run, call):
    """Returns the seconds of a call's kernels, in a graph of IN_GRAPH calls."""
    call()
    run.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    return run.seconds([graph.replay]) / IN_GRAPH


def measure(run, case, savings, num_rows, call, wanted, out, lines):
    """Measures the three times of one call that writes to `out`, and records its rates."""
    harness.poison(out)
    call()
    harness.check_bits(out, wanted, f"{case}, {num_rows} rows")
    times = {"until it returns": returning_s(run, call), "until the result is there": result_s(run, call)}
    if run.on_gpu:
        times["kernel in a graph"] = kernel_s(run, call)
    fastest = min(times.values())
    for arm, seconds in times.items():
        run.add(
            case=f"{case}, {num_rows:,} rows",
            arm=arm,
            rows=num_rows,
            row_bytes=ROW_BYTES,
            dtype=DTYPE,
            savings=savings,
            gbps=num_rows * ROW_BYTES * 1e-9 / seconds,
            ideal_gbps=num_rows * ROW_BYTES * 1e-9 / times.get("kernel in a graph", fastest),
            sms=None,
        )
    on_top = times["until the result is there"] - times.get("kernel in a graph", 0.0)
    lines.append(
        f"{case:20s} {num_rows:5d} rows  "
        + "  ".join(f"{arm} {1e6 * seconds:7.2f} us" for arm, seconds in times.items())
        + f"  waited for, on top of the kernel {1e6 * on_top:7.2f} us"
    )


def shortfalls(rows):
    """Returns lines that say which calls take longer to return than the target."""
    found = []
    for row in rows:
        if row["arm"] == "until it returns" and row["case"].startswith("ibp"):
            micros = row["rows"] * row["row_bytes"] * 1e-3 / float(row["gbps"])
            if micros > MOST_RETURNING_US:
                found.append(f"{row['case']}: returns after {micros:.1f} us, wanted {MOST_RETURNING_US} at most")
    return found


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("small_calls", args)
    torch.manual_seed(0)
    x = inputs.normal_rows(
        1 << 22 if run.quick or not run.on_gpu else 1 << 26,
        DTYPE,
        0.02,
        run.device,
        columns=ROW_BYTES // DTYPE.itemsize,
    )
    tables = {
        "ibp, host memory": ibp.compress(x.cpu(), scheme="planes"),
        "ibp, device memory": ibp.compress(x, scheme="planes"),
    }
    lines = []
    for num_rows in run.some(NUM_ROWS):
        ids = torch.randint(len(x), (num_rows,), device=run.device)
        out = torch.empty(num_rows, x.shape[1], dtype=DTYPE, device=run.device)
        calls = {
            case: (table.savings, lambda table=table: ibp.index_select(table, ids, out=out))
            for case, table in tables.items()
        }
        calls["torch"] = 0.0, lambda: torch.index_select(x, 0, ids, out=out)
        for case, (savings, call) in calls.items():
            with run.cell(f"{case}, {num_rows} rows"):
                measure(run, case, savings, num_rows, call, x[ids], out, lines)
    print("\n".join(lines))
    return run.finish(shortfalls(run.rows) if run.on_gpu else [])


if __name__ == "__main__":
    sys.exit(main())
