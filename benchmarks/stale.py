"""Which results are older than the code that they measure?

    python -m benchmarks.stale

For each CSV in results/, this prints how many commits have changed its sources since the commits that its rows name,
and the last of these commits. SOURCES lists what a script measures, by folders and files. A change there may change the
figures, but may also change only words. Without git's whole history, as in an archive or a shallow clone, the script
says so.

RESULTS.md names the commits of each table. The set of stale tables changes with every commit, so no page lists it.
"""

import subprocess
import sys

from . import harness, reading

_CODING = ("csrc/core/planes.c", "csrc/core/masks.c", "csrc/core/learn.c", "ibp/_rows")
_DECODING = ("csrc/cuda/decode", "csrc/cuda/planes_book.cuh", "csrc/cuda/warp.cuh", "csrc/cuda/group.cuh")
_ENCODING = ("csrc/cuda/encode", "csrc/cuda/planes_book.cuh", "csrc/cuda/warp.cuh", "csrc/cuda/group.cuh")
_KERNELS = (*_DECODING, "csrc/cuda/encode")
_FETCHING = (*_DECODING, "ibp/_fetch/gather.py", "csrc/bindings/torch_take_ops.cpp")
_STREAMING = (*_DECODING, "csrc/cuda/stream", "ibp/_fetch/streaming.py")
_CACHING = (*_FETCHING, "csrc/cuda/cache", "ibp/cache")
_LINEAR = ("csrc/cuda/linear", "ibp/_fetch/linear.py", "ibp/_fetch/linear.py")
_OFFLOADING = (*_STREAMING, "ibp/_offload")
_KV = (*_KERNELS, "csrc/cuda/kv", "ibp/kv")
_SAVINGS = (*_CODING, "csrc/core/analysis.c")

# By CSV: folders and files whose changes may change its figures. A CSV that measures no code of ours has none.
SOURCES = {
    "activation_maps": (),
    "activation_ratios": (*_CODING, "ibp/_activations"),
    "activations": (*_KERNELS, "ibp/_activations"),
    "bags": (*_CACHING, "csrc/cuda/linear/bags.cuh", "csrc/cuda/linear/bag_sums.cuh"),
    "batches": (*_CODING, "ibp/spill.py"),
    "bits": _SAVINGS,
    "changes": (*_CACHING, "csrc/cuda/encode"),
    "checkpoints": ("ibp/checkpoints", "ibp/_files", "csrc/core", "csrc/x86"),
    "dcp": ("ibp/integrations/dcp.py", "ibp/_files", "ibp/checkpoints", "csrc/core", "csrc/x86"),
    "choose": (*_KERNELS, "ibp/codecs"),
    "chunk_rates": _DECODING,
    "chunks": _SAVINGS,
    "clusters": _SAVINGS,
    "codec": (*_KERNELS, "ibp/_tables"),
    "collectives": (*_KERNELS, "ibp/distributed"),
    "compress": (*_ENCODING, "ibp/_tables/coding.py", "ibp/_rows"),
    "copy_threads": _FETCHING,
    "cpu": ("csrc/core", "csrc/x86"),
    "deltas": ("csrc/cuda/delta", "ibp/deltas"),
    "densities": (*_CODING, "ibp/_activations"),
    "digit_forms": (),
    "dlrm": _CACHING,
    "dlrm_train": (*_CACHING, "csrc/cuda/encode", "ibp/optim.py"),
    "encode_into": _ENCODING,
    "entries": (),
    "families": _KERNELS,
    "flexgen_opt": (*_STREAMING, "ibp/integrations/flexgen.py"),
    "flexgen_trace": (*_STREAMING, "ibp/integrations/flexgen.py"),
    "fuzz": ("csrc/core", "csrc/x86"),
    "gather": _FETCHING,
    "gnn": (*_FETCHING, "ibp/integrations/pyg.py", "ibp/integrations/dgl.py"),
    "gnn_cache": _CACHING,
    "gnn_dgl": (*_FETCHING, "ibp/integrations/dgl.py"),
    "gnn_pyg": (*_FETCHING, "ibp/integrations/pyg.py"),
    "gnn_parallel": (*_CACHING, "ibp/distributed"),
    "infinigen": (*_FETCHING, *_ENCODING),
    "kv_decoding": _KV,
    "kv_fetch": _KV,
    "kv_pages": _KV,
    "kv_request": _KV,
    "kv_rows": _KV,
    "kv_transfer": _KV,
    "large_table": (*_FETCHING, "csrc/cuda/rows/partition.cu"),
    "linear": _LINEAR,
    "llm": (*_LINEAR, *_OFFLOADING, "ibp/nn"),
    "memory": (),
    "moe": (*_LINEAR, *_CACHING, "ibp/_offload/events.py", "ibp/nn/_experts.py"),
    "moe_deepseek": (*_CACHING, "ibp/_offload/events.py", "ibp/nn/_experts.py"),
    "moe_hits": ("csrc/cuda/cache", "csrc/core/cache.c", "csrc/core/cache.h", "ibp/cache", "ibp/_offload/events.py"),
    "moe_policies": (),
    "moments": (*_CODING, "ibp/spill.py"),
    "more_clusters": _SAVINGS,
    "paths": (*_FETCHING, "ibp/_machine/calibration.py", "csrc/cuda/rows/partition.cu"),
    "paths_h100": (*_FETCHING, "ibp/_machine/calibration.py", "csrc/cuda/rows/partition.cu"),
    "overlap": (*_FETCHING, *_STREAMING),
    "probes": (),
    "profiles": (*_KERNELS, *_LINEAR, *_KV, "csrc/cuda/cache", "csrc/cuda/delta"),
    "ratio": _SAVINGS,
    "real_weights": (*_SAVINGS, *_LINEAR),
    "reference": (),
    "row_cache": _CACHING,
    "sampling": _SAVINGS,
    "scale": _FETCHING,
    "scattered": _FETCHING,
    "serve_parts": (*_KV, *_LINEAR, "ibp/integrations"),
    "serve_steps": (*_KV, *_LINEAR, "ibp/integrations"),
    "serve_vllm": (*_KV, *_LINEAR, "ibp/integrations"),
    "host_calls": ("csrc/bindings", "ibp/_fetch", "ibp/_rows", "ibp/_tables", "ibp/cache", "ibp/nn"),
    "small_calls": ("csrc/bindings", "ibp/_fetch", "ibp/_tables"),
    "spreads": (),
    "spill": (*_KERNELS, "ibp/spill.py"),
    "stream": _STREAMING,
    "sync": ("csrc/cuda/delta", "ibp/deltas"),
    "thresholds": (*_CODING, "ibp/spill.py"),
    "throttle": (*_KERNELS, "ibp/_activations"),
    "transfers": (*_KERNELS, *_STREAMING),
    "weights": _OFFLOADING,
}


def git(*words):
    """Returns what git prints, or None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=harness.ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_history():
    # Git would otherwise find another repository that contains this directory.
    return (harness.ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == "false"


def changes_since(commit, sources):
    """Returns the commits that changed sources since a commit, the last one first, as "hash date subject". Returns None
    if git does not know the commit."""
    if git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    if not sources:
        return []
    found = git("log", "--format=%h %ad %s", "--date=short", f"{commit}..HEAD", "--", *sources)
    return found.splitlines()


def stale():
    """Yields (CSV, commit, result of `changes_since`) for each commit that a row names."""
    results = reading.Results(harness.RESULTS)
    for path in sorted(harness.RESULTS.glob("*.csv")):
        commits = {str(row.get("commit") or "").removesuffix("-dirty") for row in results.rows(path.stem)}
        for commit in sorted(commits - {""}):
            yield path.stem, commit, changes_since(commit, SOURCES[path.stem])


def main():
    if not has_history():
        print("git's history is not here, or is shallow: the age of results is not known")
        return 0
    for name, commit, changes in stale():
        if changes is None:
            print(f"{name}.csv, {commit[:10]}: git does not know the commit")
        elif changes:
            print(f"{name}.csv, {commit[:10]}: its sources have changed {len(changes)} times, last in {changes[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
