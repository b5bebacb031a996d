"""Runs all benchmarks, then draws the chart: `python -m benchmarks [--coding] [--caches] [--training] [--choices]
[--papers] [--models] [--all] [--claim PAPER ITEM] [--together] [--unlimited] [--out DIR] [--device cpu] [--quick]`.

Without options: the scripts of speed, in under 5 minutes on one H200.
--coding     kinds of rows, compression and decompression, in under 4 minutes
--caches     caches, embedding tables and KV-caches, in under 8 minutes
--training   nets that train, in under 6 minutes
--choices    measurements that only papers ask for, and the choice of codecs, in under 7 minutes
--models     language models, in under 13 minutes; needs transformers
--all        all of these, and the scripts that count bytes, whose results are the same on every machine, in 30
             minutes; a script that has not begun by then does not run
--papers     every script behind a table of docs/reproduction.md, including OTHERS; scripts of speed have their limits,
             scripts that count bytes run to their end
--claim      the scripts behind one line of that page, for example `--claim ibp "Table 1"`
--together   on a machine with several GPUs, as many scripts at once; each runs alone on its GPU (a few need two) and on
             its share of the cores
--unlimited  lets every script finish

Each script runs in a process of its own. On a GPU, a script of speed is stopped when its time is over, and what it has
measured by then is kept. The last lines name the scripts that were not asked for, and those that were stopped or
failed.
"""

import argparse
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from . import charts, harness, reproduction

SPEED = {
    "gather": 80,
    "codec": 70,
    "stream": 40,
    "large_table": 45,
    "overlap": 24,
    "small_calls": 14,
    "host_calls": 60,
    "cpu": 26,
}  # Each script may take this many seconds. The most important ones come first.
# The numbers here and below are seconds, as in SPEED.
CODING = {"families": 80, "compress": 60, "encode_into": 40, "changes": 25, "deltas": 20}
CACHES = {
    "row_cache": 30,
    "dlrm": 240,
    "dlrm_train": 30,
    "bags": 25,
    "kv_fetch": 45,
    "kv_pages": 30,
    "kv_rows": 30,
    "kv_transfer": 40,
}
TRAINING = {"activations": 150, "sync": 90}
CHOICES = {"transfers": 150, "copy_threads": 60, "spill": 45, "choose": 110}
# A name may include options of the script.
MODELS = {
    "linear": 200,
    "llm": 75,
    "llm --compiled": 125,
    "llm --large": 90,
    "kv_pages --decoding": 40,
    "moe --layers 4": 150,
    "moe --deepseek": 90,
}
# These scripts take long, or need packages or GPUs that few machines have.
OTHERS = {
    "dlrm --unequal": 60,
    "compress --inplace": 240,
    "compress --inplace --count": 240,
    "transfers --rows": 60,
    "paths": 200,
    "llm --qwen": 120,
    "llm --loading": 60,
    "checkpoints": 90,
    "dcp": 150,
    "profiles": 340,
    "scale": 90,
    "gnn_parallel": 90,
    "densities": 350,
    "thresholds --batches": 150,
    "scattered": 40,
    "codec --sizes": 70,
    "codec --joins": 30,
    "choose --cascaded": 40,
    "spill --programs": 90,
    "spill --managed": 20,
    "spill --peer": 40,
    "activations --batches": 90,
    "throttle": 120,
    "throttle --energy": 330,
    "throttle --together": 150,
    "gnn": 180,
    "gnn_cache": 100,
    "gnn_pyg": 240,
    "gnn_dgl": 240,
    "kv_request": 60,
    "kv_request --workers": 90,
    "kv_request --opt": 150,
    "weights": 140,
    "flexgen_opt": 150,
    "flexgen_opt --trace": 150,
    "collectives": 90,
}
# These scripts take two GPUs if there are two.
TWO_GPUS = {"collectives", "gnn_parallel", "row_cache", "scale", "spill", "throttle", "weights"}
BYTES = (
    *("ratio", "sampling", "clusters", "bits", "chunks", "more_clusters", "real_weights", "digit_forms", "entries"),
    "thresholds",
)
GRACE_S = 5  # A script has this many seconds to print what it measured.
ALL_S = 1800  # --all takes at most this many seconds on a GPU.


def rows_of(paper, item):
    """Returns the line of docs/reproduction.md for a figure, table or headline. Raises SystemExit if there is none."""
    rows = {row.item.removesuffix("; headline"): row for row in reproduction.PAPERS.get(paper, ())}
    if item not in rows:
        sys.exit(f"there is no {item!r} of {paper!r}; wanted one of {', '.join(rows or reproduction.PAPERS)}")
    return [rows[item]]


def of_papers(names, rows):
    """Returns the names of the scripts whose CSVs are behind lines of docs/reproduction.md."""
    scripts = {script.removesuffix(".py") for row in rows for script in (row.script, *row.others)}
    return [name for name in names if script_of(name) in scripts]


def stop(process):
    """Ends a script that still runs; first asks it to end. Returns its exit status."""
    process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def run_script(name, argv, limit_s=None, gpus=(), cores=(), running=None):
    """Runs a script and returns its exit status.

    Args:
        name: the script and its own options.
        limit_s: seconds that it may take; if 0 or less, it does not begin. None: any number.
        gpus, cores: those that only this script uses. If there are any, its output is printed at its end.
        running: a list to which its process is appended, or None.
    """
    if limit_s is not None and limit_s <= 0:
        print(f"{name}: no time was left\n", flush=True)
        return 1
    started, (script, *options) = time.perf_counter(), name.split()
    command = [sys.executable, "-m", f"{__package__}.{script}", *options, *argv]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=said if gpus else None,
            stderr=said if gpus else None,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
        late = ""
        if running is not None:
            running.append(process)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"{name}: stopped after {limit_s:.0f} s\n"
        finally:
            status = stop(process)
        said.seek(0)
        seconds = f"{name}: {time.perf_counter() - started:.0f} s" + (f", exit status {status}" if status else "")
        print(f"{said.read()}{late}{seconds}\n", flush=True)
    return status


def allowed_s(name, limits, deadline):
    """Returns the seconds that a script may take. None: any number."""
    seconds = min(limits.get(name, math.inf), deadline - time.perf_counter())
    return None if seconds == math.inf else seconds


def run_together(names, argv, limits, num_gpus, deadline=math.inf):
    """Runs scripts at the same time, the longest first, and returns {name: exit status}. A script with different
    options runs one after the other, because the runs write the same CSV."""
    together = [[*group] for _, group in itertools.groupby(sorted(names, key=script_of), script_of)]
    together.sort(key=lambda group: (script_of(group[0]) in TWO_GPUS, sum(limits.get(each, 0) for each in group)))
    cores, free, changed = sorted(os.sched_getaffinity(0)), {*range(num_gpus)}, threading.Condition()
    share, running = len(cores) // num_gpus, []

    def run(group):
        count = 2 if script_of(group[0]) in TWO_GPUS else 1
        with changed:
            changed.wait_for(lambda: len(free) >= count)
            gpus = sorted(free)[:count]
            free.difference_update(gpus)
        own = [core for gpu in gpus for core in cores[gpu * share :][:share]]
        try:
            return {
                name: run_script(name, argv, allowed_s(name, limits, deadline), gpus, own, running) for name in group
            }
        finally:
            with changed:
                free.update(gpus)
                changed.notify_all()

    with ThreadPoolExecutor(num_gpus) as pool:
        futures = [pool.submit(run, group) for group in reversed(together)]
        try:
            return {name: status for future in futures for name, status in future.result().items()}
        except BaseException:  # This process is to end.
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                for process in running:
                    stop(process)
                time.sleep(0.1)
            raise


def script_of(name):
    return name.split()[0]


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--all", action="store_true")
    own.add_argument("--coding", action="store_true")
    own.add_argument("--caches", action="store_true")
    own.add_argument("--training", action="store_true")
    own.add_argument("--choices", action="store_true")
    own.add_argument("--papers", action="store_true")
    own.add_argument("--models", action="store_true")
    own.add_argument("--claim", nargs=2, metavar=("PAPER", "ITEM"))
    own.add_argument("--together", action="store_true")
    own.add_argument("--unlimited", action="store_true")
    options, others = own.parse_known_args(argv)
    args, started = harness.parse_args(others, __doc__), time.perf_counter()
    # Exits in the main thread, so that the `finally` of run_script ends its script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    named = {"coding": CODING, "caches": CACHES, "training": TRAINING, "choices": CHOICES, "models": MODELS}
    every = SPEED | CODING | CACHES | TRAINING | CHOICES | MODELS
    is_limited = not options.unlimited and args.device == "cuda"
    limits = every | OTHERS if is_limited else {}
    deadline = started + ALL_S if is_limited and options.all else math.inf
    chosen = [group for option, group in named.items() if getattr(options, option)]
    rows = [row for paper in reproduction.PAPERS.values() for row in paper] if options.papers else []
    rows += rows_of(*options.claim) if options.claim else []
    chosen += [of_papers([*every, *OTHERS, *BYTES], rows)] if rows else []
    names = (
        [*every, *BYTES] if options.all else list(dict.fromkeys(name for group in chosen or [SPEED] for name in group))
    )
    num_gpus = torch.cuda.device_count() if options.together and args.device == "cuda" else 1
    if num_gpus > 1:
        ended = run_together(names, others, limits, num_gpus, deadline)
    else:
        ended = {name: run_script(name, others, allowed_s(name, limits, deadline)) for name in names}
    failed = [name for name in names if ended[name]]
    charts.draw(args.out)
    print(f"not asked for: {', '.join(sorted({*every, *OTHERS, *BYTES} - {*names}))}")
    print(f"all in {time.perf_counter() - started:.0f} s" + (f", FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
