"""Compresses the tensors in data/, checks every bit, and prints what it saved; with a GPU, also how fast rows are
fetched.

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
        "Cora": load_sparse("cora.npz"),
        "Citeseer": load_sparse("citeseer.npz"),
        "Pubmed (sample)": load_sparse("pubmed_1060rows.npz"),
        "MovieLens users": load_dense("ncf_mlp.npz", "mlp_user"),
        "MovieLens items": load_dense("ncf_mlp.npz", "mlp_item"),
        "LLM weights": load_dense("stories260k.npz", "weights_bf16"),
        "KV-cache, keys": load_dense("kv_stories260k.npz", "k_bf16"),
        "KV-cache, values": load_dense("kv_stories260k.npz", "v_bf16"),
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
    table = ibp.compress(big, scheme=scheme, memory="pinned")
    ids = torch.randint(len(big), (FETCH_BYTES // row_bytes,), device="cuda")
    out = torch.empty(len(ids), x.shape[1], dtype=x.dtype, device="cuda")
    seconds = median_seconds(lambda: ibp.index_select(table, ids, out=out))
    table.check()
    if not same_bits(out[-1000:], big[ids[-1000:].cpu()]):
        raise SystemExit(f"demo: rows fetched by the GPU differ from the original (scheme {scheme})")
    return out.nbytes / seconds / 1e9


# ---- the run ----

SCHEMES = {"ibp": "invariant bits (the paper's)", "planes": "ranked symbols"}
COLORS = {"raw": "#b0b0b0", "ibp": "#8fb4d9", "planes": "#2f5f95"}


def measure(x, has_gpu):
    device = "cuda" if has_gpu else "cpu"
    coded = {scheme: ibp.compress(x, scheme=scheme) for scheme in SCHEMES}
    auto = ibp.compress(x)
    return {
        "x": x,
        "coded": coded,
        "auto": auto,
        "lossless": all(is_lossless(table, x, device) for table in (*coded.values(), auto)),
        "rates": {scheme: fetch_rate(x, scheme) for scheme in ("raw", *SCHEMES)} if has_gpu else {},
    }


def print_grid(console, columns, rows):
    """A table of at most 80 columns: the first column is text, the others are figures."""
    grid = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
    for i, name in enumerate(columns):
        grid.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def print_savings(console, results):
    rows = []
    for name, result in results.items():
        x, coded, auto = result["x"], result["coded"], result["auto"]
        saved = [f"{table.savings:.1%}" for table in coded.values()]
        memory, link = (f"{1 - taken / x.nbytes:.1%}" for taken in (auto.nbytes, auto.link_bytes))
        bits = "same" if result["lossless"] else "DIFFER"
        rows.append(
            [name, str(x.dtype).removeprefix("torch."), f"{x[0].nbytes:,}", *saved, auto.scheme, memory, link, bits]
        )
    print_grid(console, ["set", "dtype", "row bytes", *SCHEMES, "auto", "memory", "link", "bits"], rows)
    console.print(
        "ibp, planes: what each scheme saves of the original bytes. auto: the scheme\n"
        "that ibp.compress(x) takes; memory: what its table saves in all; link: what\n"
        "it saves over the link, counted in sectors of 32 bytes.",
        highlight=False,
    )
    if any(result["auto"].nbytes > result["x"].nbytes for result in results.values()):
        console.print(
            "Memory below 0: the slots are as long as the rows, so that coded rows save\n"
            "bytes over the link alone, and the index of the rows is added. With\n"
            'layout="packed" the table takes less memory than the tensor.',
            highlight=False,
        )


def print_rates(console, results):
    rows = [[name, *(f"{rate:.1f}" for rate in result["rates"].values())] for name, result in results.items()]
    print_grid(console, ["set", "raw rows", *SCHEMES], rows)
    console.print(
        f"GB/s of original bytes: {FETCH_BYTES >> 20} MiB of random rows, from each set repeated to\n"
        f"{TABLE_BYTES >> 20} MiB of pinned host memory.",
        highlight=False,
    )


def label_bars(axes, bars, texts):
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_bars(axes, series, unit):
    """Horizontal bars by set; series: {label: (color, [value of each set])}."""
    height = 0.8 / len(series)
    for i, (label, (color, values)) in enumerate(series.items()):
        places = np.arange(len(values)) + (i - (len(series) - 1) / 2) * height
        label_bars(
            axes,
            axes.barh(places, values, height=0.92 * height, color=color, label=label),
            [unit.format(value) for value in values],
        )
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def draw_chart(results, has_gpu):
    names, rows = list(results), list(results.values())
    figure, panels = plt.subplots(1, 2 if has_gpu else 1, figsize=(12 if has_gpu else 8, 5), sharey=True, squeeze=False)
    savings = panels[0][0]
    draw_bars(
        savings,
        {
            label: (COLORS[scheme], [100 * row["coded"][scheme].savings for row in rows])
            for scheme, label in SCHEMES.items()
        },
        "{:.1f}",
    )
    savings.set(
        title="Bytes saved, lossless",
        xlabel="% of the original bytes",
        xlim=(0, 112),
        yticks=np.arange(len(names)),
        yticklabels=names,
    )
    savings.invert_yaxis()
    if has_gpu:
        labels = {"raw": "raw rows", **SCHEMES}
        draw_bars(
            panels[0][1],
            {label: (COLORS[scheme], [row["rates"][scheme] for row in rows]) for scheme, label in labels.items()},
            "{:.0f}",
        )
        panels[0][1].set(title="Random rows fetched from pinned host memory", xlabel="GB/s of original bytes")
        panels[0][1].margins(x=0.12)
    figure.tight_layout()
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=150)


def main():
    console = Console(width=80)
    has_gpu = torch.cuda.is_available() and ibp.cuda_is_available()
    machine = torch.cuda.get_device_name() if has_gpu else "no GPU: everything on the CPU, no rates"
    console.print(f"ibp {ibp.__version__}, torch {torch.__version__}, {machine}", highlight=False)
    results = {name: measure(x, has_gpu) for name, x in load_sets().items()}
    print_savings(console, results)
    if has_gpu:
        print_rates(console, results)
    draw_chart(results, has_gpu)
    console.print(f"Chart: {CHART.relative_to(ROOT)}", highlight=False)
    differing = [name for name, row in results.items() if not row["lossless"]]
    if differing:
        sys.exit(f"demo: not bit for bit the same: {', '.join(differing)}")
    console.print("Every bit of every set came back.", highlight=False)


if __name__ == "__main__":
    main()
