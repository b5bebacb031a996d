"""All benchmarks, then the chart: `python -m benchmarks [--coding] [--caches] [--training] [--papers] [--models]
[--all] [--claim PAPER ITEM] [--unlimited] [--out DIR] [--device cpu] [--quick]`.

Without options: the scripts of speed, in under 5 minutes on one H200. --coding: kinds of rows and coding, in under 4.
--caches: caches, embedding tables and KV-caches, in under 5. --training: nets that train, in under 5. --choices: what
only papers ask for, and the choice of codecs, in under 5. --models: language models, in under 10, with transformers.
--all: all of these, and the scripts that count bytes, which are the same on every machine. --papers:
every script behind a table of docs/reproduction.md, of these and of OTHERS; scripts of speed have 30 minutes, scripts
that count bytes run to their end. --claim: the scripts behind one line of that page, say `--claim ibp "Table 1"`. Each
script runs in a process of its own. On a GPU a script of speed is stopped when its time is over, and what it measured
stays; --unlimited lets it finish. The last line says which were stopped or have failed.
"""

import argparse
import signal
import subprocess
import sys
import time

from . import charts, harness, reproduction

SPEED = {
    "gather": 80,
    "codec": 70,
    "stream": 40,
    "large_table": 45,
    "overlap": 24,
    "small_calls": 14,
    "cpu": 26,
}  # seconds each may take, most important first
CODING = {"families": 80, "compress": 60, "encode_into": 40, "changes": 25, "deltas": 20}  # likewise
CACHES = {
    "row_cache": 30,
    "dlrm": 100,
    "dlrm_train": 30,
    "bags": 25,
    "kv_fetch": 45,
    "kv_pages": 30,
    "kv_rows": 30,
    "kv_transfer": 40,
}  # likewise
TRAINING = {"adamw": 75, "activations": 150, "sync": 90}  # likewise
CHOICES = {"transfers": 75, "copy_threads": 30, "spill": 45, "choose": 110}  # likewise
MODELS = {  # likewise, with options of the script
    "llm": 75,
    "llm --compiled": 125,
    "llm --large": 90,
    "kv_pages --decoding": 40,
    "moe --layers 4": 150,
    "moe --deepseek": 90,
}
OTHERS = {  # likewise; they take long, or need packages or GPUs that are not everywhere
    "densities": 220,
    "scattered": 40,
    "codec --sizes": 70,
    "spill --programs": 90,
    "spill --managed": 20,
    "activations --batches": 90,
    "gnn": 180,
    "gnn_cache": 100,
    "kv_request": 60,
    "weights": 140,
    "flexgen_opt": 150,
    "collectives": 90,
}
BYTES = ("ratio", "sampling", "clusters", "bits", "chunks", "more_clusters", "real_weights", "digit_forms", "entries")
GRACE_S = 5  # to print what was measured


def rows_of(paper, item):
    """The line of docs/reproduction.md for a figure, table or headline. SystemExit: there is none."""
    rows = {row.item.removesuffix("; headline"): row for row in reproduction.PAPERS.get(paper, ())}
    if item not in rows:
        sys.exit(f"there is no {item!r} of {paper!r}; wanted one of {', '.join(rows or reproduction.PAPERS)}")
    return [rows[item]]


def of_papers(names, rows):
    """The names of scripts whose CSVs lines of docs/reproduction.md are written from."""
    scripts = {script.removesuffix(".py") for row in rows for script in (row.script, *row.others)}
    return [name for name in names if name.split()[0] in scripts]


def stop(process):
    """Ends a script that still runs: asked to at first. @return its exit status."""
    process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def run_script(name, argv, limit_s=None):
    """name: of the script, and its own options. @return its exit status."""
    started, (script, *options) = time.perf_counter(), name.split()
    process = subprocess.Popen([sys.executable, "-m", f"{__package__}.{script}", *options, *argv])
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {limit_s} s", flush=True)
    finally:
        status = stop(process)
    print(
        f"{name}: {time.perf_counter() - started:.0f} s" + (f", exit status {status}" if status else "") + "\n",
        flush=True,
    )
    return status


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
    own.add_argument("--unlimited", action="store_true")
    options, others = own.parse_known_args(argv)
    args, started = harness.parse_args(others, __doc__), time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # past run_script, which ends its script
    named = {"coding": CODING, "caches": CACHES, "training": TRAINING, "choices": CHOICES, "models": MODELS}
    every = SPEED | CODING | CACHES | TRAINING | CHOICES | MODELS
    limits = {} if options.unlimited or args.device == "cpu" else every | OTHERS
    chosen = [group for option, group in named.items() if getattr(options, option)]
    rows = [row for paper in reproduction.PAPERS.values() for row in paper] if options.papers else []
    rows += rows_of(*options.claim) if options.claim else []
    chosen += [of_papers([*every, *OTHERS, *BYTES], rows)] if rows else []
    names = (
        [*every, *BYTES] if options.all else list(dict.fromkeys(name for group in chosen or [SPEED] for name in group))
    )
    failed = [name for name in names if run_script(name, others, limits.get(name))]
    charts.draw(args.out)
    print(f"all in {time.perf_counter() - started:.0f} s" + (f", FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
