"""Compresses the tensors in data/, checks every bit, and prints what it saved; with a GPU, also how fast rows are fetched.

    python examples/demo.py

Draws build/demo.png. Exits with 1 if a single bit differs.
"""

import statistics
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import ibp

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
CHART = ROOT / "build" / "demo.png"

TABLE_BYTES = 256 << 20  # sets are repeated to this size for timing, so that no cache holds them
FETCH_BYTES = 128 << 20  # original bytes that one timed gather fetches


# ---- the sets ----


def load_sparse(name):
    """A CSR file as a dense float32 matrix, which is how a GNN trains on it."""
    with np.load(DATA / name) as csr:
        dense = np.zeros(csr["shape"], np.float32)
        dense[np.repeat(np.arange(len(dense)), np.diff(csr["indptr"])), csr["indices"]] = csr["data"]
    return torch.from_numpy(dense)


def load_dense(name, array):
    with np.load(DATA / name) as arrays:
        values = torch.from_numpy(arrays[array])
    return values.view(torch.bfloat16) if array.endswith("_bf16") else values


def load_sets():
    return {
        "Cora features": load_sparse("cora.npz"),
        "Citeseer features": load_sparse("citeseer.npz"),
        "Pubmed features (sample)": load_sparse("pubmed_1060rows.npz"),
        "MovieLens user embedding": load_dense("ncf_mlp.npz", "mlp_user"),
        "MovieLens item embedding": load_dense("ncf_mlp.npz", "mlp_item"),
        "LLM weights": load_dense("stories260k.npz", "weights_bf16"),
        "LLM KV-cache, keys": load_dense("kv_stories260k.npz", "k_bf16"),
        "LLM KV-cache, values": load_dense("kv_stories260k.npz", "v_bf16"),
    }


# ---- is every bit the same? ----


def same_bits(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def is_lossless(table, x, device):
    """The whole table and 1,000 random rows, at least one of them fetched twice, against the original."""
    ids = torch.randint(len(x), (1000,), generator=torch.Generator().manual_seed(0))
    ids[-1] = ids[0]
    fetched = ibp.index_select(table, ids.to(device), device=device)
    return same_bits(ibp.decompress(table), x) and same_bits(fetched, x[ids])


# ---- how fast are rows fetched by a GPU from pinned host memory? ----


def median_seconds(action, repeats=10):
    for _ in range(2):
        action()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def fetch_rate(x, scheme):
    """GB/s of original bytes, for random rows of x repeated to TABLE_BYTES."""
    row_bytes = x[0].nbytes
    big = x.repeat(max(1, TABLE_BYTES // x.nbytes), 1)
    table = ibp.compress(big, scheme=scheme, pin_memory=True)
    ids = torch.randint(len(big), (FETCH_BYTES // row_bytes,), device="cuda")
    out = torch.empty(len(ids), x.shape[1], dtype=x.dtype, device="cuda")
    seconds = median_seconds(lambda: ibp.index_select(table, ids, out=out))
    table.check()
    if not same_bits(out[-1000:], big[ids[-1000:].cpu()]):
        raise SystemExit(f"demo: rows fetched by the GPU differ from the original (scheme {scheme})")
    return out.nbytes / seconds / 1e9


# ---- the run ----


def measure(x, has_gpu):
    table = ibp.compress(x)
    row = {
        "rows": len(x),
        "dtype": str(x.dtype).removeprefix("torch."),
        "row_bytes": x[0].nbytes,
        "before": x.nbytes,
        "after": table.stored_bytes,
        "savings": table.savings,
        "link_savings": 1 - table.link_bytes / x.nbytes,
        "lossless": is_lossless(table, x, "cuda" if has_gpu else "cpu"),
    }
    if has_gpu:
        row["raw_rate"], row["rate"] = fetch_rate(x, "raw"), fetch_rate(x, "ibp")
    return row


def print_table(console, results, has_gpu):
    grid = Table(box=box.SIMPLE_HEAD)
    grid.add_column("set")
    headings = ["rows", "dtype", "row bytes", "bytes before", "bytes after", "savings", "link savings", "every bit"]
    for heading in headings + (["GB/s raw", "GB/s ibp"] if has_gpu else []):
        grid.add_column(heading, justify="right")
    for name, row in results.items():
        cells = [f"{row['rows']:,}", row["dtype"], f"{row['row_bytes']:,}", f"{row['before']:,}", f"{row['after']:,}"]
        cells += [f"{row['savings']:.1%}", f"{row['link_savings']:.1%}", "same" if row["lossless"] else "DIFFERS"]
        if has_gpu:
            cells += [f"{row['raw_rate']:.1f}", f"{row['rate']:.1f}"]
        grid.add_row(name, *cells)
    console.print(grid)


def label_bars(axes, bars, texts):
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_chart(results, has_gpu):
    names, rows = list(results), list(results.values())
    places = np.arange(len(names))
    figure, panels = plt.subplots(1, 2 if has_gpu else 1, figsize=(11 if has_gpu else 7, 4), sharey=True, squeeze=False)
    savings = panels[0][0]
    label_bars(savings, savings.barh(places, [100 * row["savings"] for row in rows], color="#3b6ea5"), [f"{row['savings']:.1%}" for row in rows])
    savings.set(title="Bytes saved, lossless", xlabel="% of the original bytes", xlim=(0, 110), yticks=places, yticklabels=names)
    savings.invert_yaxis()
    if has_gpu:
        rates = panels[0][1]
        for shift, key, label, color in ((-0.2, "raw_rate", "raw rows", "#b0b0b0"), (0.2, "rate", "compressed rows", "#3b6ea5")):
            bars = rates.barh(places + shift, [row[key] for row in rows], height=0.38, color=color, label=label)
            label_bars(rates, bars, [f"{row[key]:.0f}" for row in rows])
        rates.set(title="Random rows fetched from pinned host memory", xlabel="GB/s of original bytes")
        rates.margins(x=0.12)
        rates.legend(loc="lower right", frameon=False, fontsize=8)
    figure.tight_layout()
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=150)


def main():
    console = Console(width=None if sys.stdout.isatty() else 160)
    has_gpu = torch.cuda.is_available() and ibp.cuda_is_available()
    machine = torch.cuda.get_device_name() if has_gpu else "no GPU that ibp can use: compressed and checked on the CPU, nothing timed"
    console.print(f"ibp {ibp.__version__}, torch {torch.__version__}, {machine}", highlight=False)
    results = {name: measure(x, has_gpu) for name, x in load_sets().items()}
    print_table(console, results, has_gpu)
    console.print("link savings: of what a gather of every row reads over the link, in whole 32-byte sectors.", highlight=False)
    if has_gpu:
        console.print(f"GB/s of original bytes: {FETCH_BYTES >> 20} MiB of random rows, from each set repeated to "
                      f"{TABLE_BYTES >> 20} MiB of pinned host memory.", highlight=False)
    draw_chart(results, has_gpu)
    console.print(f"chart: {CHART.relative_to(ROOT)}", highlight=False)
    differing = [name for name, row in results.items() if not row["lossless"]]
    if differing:
        sys.exit(f"demo: not bit for bit the same: {', '.join(differing)}")
    console.print("Every bit of every set came back.", highlight=False)


if __name__ == "__main__":
    main()
