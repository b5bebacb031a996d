"""Which code each CSV of benchmarks/results measures, and which CSVs are older than a change of that code.

SOURCES names the script of a CSV, and the folders and files whose changes can move its figures. Code that every script
uses (memory, streams, arguments) is left out: each change would mark every CSV, and the list would say nothing.

Pages name the commit of a CSV and never whether it is stale: each commit of code would change such a page. The list is
`python -m benchmarks.claims --stale`, which continuous integration prints.
"""

import re
import subprocess
from dataclasses import dataclass

from .reading import in_order

BYTES = ("csrc/core", "ibp/_schemes")  # what decides how many bytes are stored
CODERS = (*BYTES, "csrc/cuda/encode", "csrc/cuda/decode")
ROWS = ("csrc/core/locate.h", "csrc/cuda/rows", "csrc/cuda/decode", "ibp/_fetch")
STREAMS = ("csrc/cuda/stream", "csrc/cuda/decode", "ibp/_fetch")
CPU = (*BYTES, "csrc/x86")
CACHES = (*ROWS, "csrc/cuda/cache", "ibp/cache")
MODELS = ("csrc/cuda/linear", "csrc/cuda/decode", "ibp/_fetch", "ibp/nn", "ibp/_offload")

# {CSV: (its script, what it measures)}
SOURCES = {
    "activation_ratios": ("densities", *BYTES),
    "activations": ("activations", *CODERS, "ibp/_activations"),
    "adamw": ("adamw", *CODERS, "ibp/optim"),
    "bags": ("bags", *ROWS),
    "bits": ("bits", "csrc/core/analysis.c"),
    "changes": ("changes", *CODERS, "ibp/_tables"),
    "checkpoints": ("checkpoints", *CPU, "ibp/checkpoints", "ibp/_files"),
    "choose": ("choose", *CODERS, "ibp/codecs"),
    "chunk_rates": ("chunks", *ROWS),
    "chunks": ("chunks", *BYTES),
    "clusters": ("clusters", *BYTES),
    "codec": ("codec", *CODERS),
    "collectives": ("collectives", *CODERS, "ibp/distributed"),
    "compress": ("compress", *CODERS, "ibp/_tables"),
    "copy_threads": ("copy_threads", *ROWS),
    "cpu": ("cpu", *CPU),
    "deltas": ("deltas", "csrc/core/delta.c", "csrc/cuda/delta", "ibp/deltas"),
    "densities": ("densities",),
    "digit_forms": ("digit_forms",),
    "dlrm": ("dlrm", *CACHES),
    "dlrm_train": ("dlrm_train", *CACHES, "ibp/nn"),
    "encode_into": ("encode_into", *CODERS),
    "families": ("families", *CODERS, *ROWS),
    "flexgen_opt": ("flexgen_opt", *STREAMS, "ibp/integrations/flexgen.py"),
    "gather": ("gather", *ROWS),
    "gnn": ("gnn", *ROWS),
    "gnn_cache": ("gnn_cache", *CACHES),
    "gnn_parallel": ("gnn_parallel", *ROWS),
    "kv_fetch": ("kv_fetch", *STREAMS, "csrc/cuda/kv", "ibp/kv"),
    "kv_pages": ("kv_pages", *STREAMS, "csrc/cuda/kv", "ibp/kv"),
    "kv_rows": ("kv_rows", *ROWS, "csrc/cuda/kv", "ibp/kv"),
    "large_table": ("large_table", *ROWS),
    "linear": ("linear", "csrc/cuda/linear", "ibp/_fetch"),
    "llm": ("llm", *MODELS),
    "moe_hits": ("moe", *BYTES),
    "more_clusters": ("more_clusters", *BYTES),
    "overlap": ("overlap", *ROWS, "csrc/cuda/stream"),
    "ratio": ("ratio", *BYTES),
    "real_weights": ("real_weights", *BYTES),
    "reference": ("reference", *ROWS),
    "row_cache": ("row_cache", *CACHES),
    "sampling": ("sampling", *BYTES),
    "scale": ("scale", *CACHES),
    "scattered": ("scattered", *ROWS),
    "small_calls": ("small_calls", *ROWS),
    "spill": ("spill", *ROWS, "ibp/spill"),
    "stream": ("stream", *STREAMS),
    "transfers": ("transfers", *CODERS, *ROWS),
    "weights": ("weights", *STREAMS, "ibp/_offload"),
}
NO_SCRIPT = ("fuzz", "memory", "probes")  # runs of several scripts, or of none


@dataclass(frozen=True)
class Age:
    """A CSV and a commit of it. `changes`: later commits that change what it measures; None: git has no such commit."""

    csv: str
    commit: str
    changes: int | None


def paths_of(csv):
    """What a CSV measures: its script first."""
    script, *others = SOURCES[csv]
    return [f"benchmarks/{script}.py", *others]


def commits_of(rows):
    """The commits that rows were measured at, in their order."""
    return in_order(row["commit"] for row in rows if row.get("commit"))


def git(root, *words):
    """What git prints; None: it failed, or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_history(root):
    """Whether root is the top of a repository with all of its commits."""
    # Git would find another repository that holds this directory.
    return (root / ".git").exists() and git(root, "rev-parse", "--is-shallow-repository") == "false"


def ages(root, results):
    """An Age for each CSV and commit. The history must be whole."""
    for csv in SOURCES:
        for commit in commits_of(results.rows(csv)):
            known = re.sub("-dirty$", "", commit)
            count = git(root, "rev-list", "--count", f"{known}..HEAD", "--", *paths_of(csv))
            yield Age(csv, commit, None if count is None else int(count))


def report(root, results):
    """The list of stale CSVs as lines of text."""
    if not has_history(root):
        return ["no whole git history here: which CSVs are older than their code cannot be told"]
    found = list(ages(root, results))
    nameless = [csv for csv in SOURCES if results.rows(csv) and not commits_of(results.rows(csv))]
    lines = [
        f"{age.csv}.csv, {age.commit[:10]}: "
        + ("not in this history" if age.changes is None else f"later commits that change its code: {age.changes}")
        for age in found
        if age.changes != 0
    ]
    stale = {age.csv for age in found if age.changes != 0}
    counted = len({age.csv for age in found})
    return [*lines, *(f"{csv}.csv names no commit" for csv in nameless), f"{len(stale)} of {counted} CSVs are stale"]


def measured_at(results):
    """ "gather 0b5237c10e, ...": the CSVs that were read, and their commits."""
    found = ((csv, commits_of(rows)) for csv, rows in results.sheets.items())
    return ", ".join(" ".join([csv, *(commit[:10] for commit in commits)]) for csv, commits in found if commits)
