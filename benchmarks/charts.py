"""Draws the charts of README.md (overview.png), docs/llm.md (experts.png), docs/reproduction.md (columns.png) and
PAPERS.md (activation_maps.png and entries.png) from the CSVs: `python -m benchmarks.charts [--out DIR]`."""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

from . import bpc, harness, reading
from .reading import NORMAL, SYNTHETIC

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator
except ImportError:
    plt = None

RATE_LABEL, STEP_LABEL = "GB/s of original bytes", "ms a token"
ROW_BYTES = 2048  # The charts show rows of this many bytes.
CONTEXT = 512  # This many tokens come before the token that is timed.
IBP, RAW_COPY, NVCOMP, PLAIN = "ibp", "raw copy_", "nvCOMP, pipelined", "plain"
KINDS = {"cpu pipelined": "cpu pipelined", "raw rows": "raw rows", "ibp slots": IBP, "planes slots": IBP}
# Each kind has (label, colour).
STYLE = {
    "cpu pipelined": ("gathered by the CPU while it is copied", "#a5c78b"),
    "raw rows": ("raw rows, read by the GPU", "#7a7a7a"),
    PLAIN: ("plain weights", "#b9b9b9"),
    IBP: ("ibp", "#1f5fa8"),
}


def best_by(rows, key):
    """Returns {key(row): highest GB/s}, in the order of the rows. Rows whose key is None are left out."""
    found = {}
    for row in rows:
        if key(row) is not None:
            found[key(row)] = max(found.get(key(row), 0), row["gbps"])
    return found


def gathers(rows, label_of):
    """Returns {label: {kind: GB/s}} of arms that may use the whole GPU, or that use none of it."""
    shown, groups = [row for row in reading.whole(rows) if row["arm"] in KINDS], {}
    for (label, kind), gbps in best_by(shown, lambda row: (label_of(row), KINDS[row["arm"]])).items():
        groups.setdefault(label, {})[kind] = gbps
    return groups


def rows_of_tables(gather):
    """Returns the rates of rows of real sets."""
    own = [row for row in gather if not row["case"].startswith((SYNTHETIC.strip(), NORMAL))]
    return gathers(own, lambda row: f"{row['case']}\n{reading.size_name(row['row_bytes'])}")


def tensor_rates(stream):
    """Returns {way: GB/s} for bringing the largest normal BF16 tensor to the GPU as a whole. Each way is shown at its
    best."""
    own = [row for row in stream if row["dtype"] == "bfloat16" and row["case"].startswith(NORMAL)]
    largest = max((row["rows"] for row in own), default=0)
    best = best_by([row for row in own if row["rows"] == largest], lambda row: way_of(row["arm"]))
    return {way: best[way] for way in (RAW_COPY, NVCOMP, IBP) if way in best}


def way_of(arm):
    if arm.startswith("nvcomp"):
        return NVCOMP
    return RAW_COPY if arm == RAW_COPY else IBP


def steps_of_models(llm):
    """Returns {model: {kind: row}} of steps with one sequence, the fastest model first. If a model's plain weights fit
    no GPU, it has only one kind."""
    kinds, groups = {"plain": PLAIN, "coded": IBP}, {}
    for row in llm:
        if (row["way"], row["rows"], row["context"]) == ("step", 1, CONTEXT) and row["arm"] in kinds:
            groups.setdefault(row["model"], {})[kinds[row["arm"]]] = row
    return dict(sorted(groups.items(), key=lambda item: item[1][IBP]["ms"]))


def draw_groups(panel, groups, title, axis, text_of):
    kinds = [kind for kind in STYLE if any(kind in group for group in groups.values())]
    width = 0.86 / len(kinds)
    for i, kind in enumerate(kinds):
        places = [at + (i - (len(kinds) - 1) / 2) * width for at, group in enumerate(groups.values()) if kind in group]
        values = [group[kind] for group in groups.values() if kind in group]
        label, color = STYLE[kind]
        bars = panel.bar(places, values, width, color=color, label=label)
        panel.bar_label(bars, [text_of(value) for value in values], padding=2, fontsize=8)
    panel.set_xticks(range(len(groups)), groups, fontsize=8)
    panel.set_ylabel(axis, fontsize=9)
    panel.set_title(title, fontsize=10, loc="left")
    panel.margins(y=0.1)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.legend(fontsize=8, frameon=False)


def set_rate_axis(panel, groups):
    rates = [gbps for group in groups.values() for gbps in group.values()]
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.minorticks_off()
    panel.set_ylim(min(10, 0.9 * min(rates)), 1.6 * max(rates))


def draw(directory):
    """Writes overview.png. Prints a line instead if matplotlib or measurements are missing."""
    results = reading.Results(Path(directory))
    gather, llm = results.rows("gather"), results.rows("llm")
    real, models = rows_of_tables(gather), steps_of_models(llm)
    is_full = any(row["row_bytes"] == ROW_BYTES for row in gather)
    if plt is None or not (is_full and models):
        print(f"no chart: {'full runs of gather.py and llm.py on a GPU are' if plt else 'matplotlib is'} missing")
        return
    times = {
        model + ("" if PLAIN in kinds else "\n(plain: no room)"): {kind: row["ms"] for kind, row in kinds.items()}
        for model, kinds in models.items()
    }
    figure, (rows, steps) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained", width_ratios=(1.6, 1))
    draw_groups(rows, real, "Random rows of real tables from host memory (logarithmic)", RATE_LABEL, "{:,.0f}".format)
    set_rate_axis(rows, real)
    draw_groups(steps, times, "A token of a language model whose weights are on the GPU", STEP_LABEL, "{:.1f}".format)
    shown = [gather, [row for kinds in models.values() for row in kinds.values()]]
    commits = (", ".join(reading.in_order(row["commit"][:10] for row in table)) for table in shown)
    figure.suptitle("{}, torch {}; commits {}; {}".format(gather[0]["gpu"], gather[0]["torch"], *commits), fontsize=9)
    save(figure, directory, "overview", 130)


def smoothed(values, window=16):
    """Returns the mean of each value and the values before it, at most `window` of them."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw_experts(directory):
    """Writes experts.png: hits and bytes of a cache of experts over time."""
    rows = reading.Results(Path(directory)).rows("moe_hits")
    if plt is None or not rows:
        print("no chart of experts: " + ("moe_hits.csv is missing" if plt else "matplotlib is missing"))
        return
    figure, (hits, traffic) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for arm, color in (("by index, cache", STYLE[IBP][1]), ("by index, cache, raw rows", STYLE["raw rows"][1])):
        for routing, line in (("sticky", "-"), ("uniform", "--")):
            own = [row for row in rows if row["arm"] == arm and row["routing"] == routing]
            label = f"{'raw' if 'raw' in arm else 'coded'} experts, {routing}"
            rates = smoothed([100 * row["hit_rate"] for row in own])
            shares = smoothed([100 * row["link_bytes"] / row["asked_bytes"] for row in own])
            hits.plot(rates, line, color=color, label=label)
            traffic.plot(shares, line, color=color, label=label)
    for panel, title in ((hits, "Hits, %"), (traffic, "Bytes on the link, % of the experts' raw bytes")):
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlabel("token since the start (means of 16)", fontsize=9)
        panel.set_ylim(0, 105)
        panel.grid(alpha=0.3)
    hits.legend(fontsize=8, loc="lower right")
    share = rows[0]["cache_bytes"] / (rows[0]["asked_bytes"] / 8 * 128)
    figure.suptitle(
        f"8 of 128 experts a token, a cache of {share:.0%} of their raw bytes (commit {rows[0]['commit'][:10]})",
        fontsize=10,
    )
    save(figure, directory, "experts", 110)


CODECS = {"nvcomp:lz4": ("LZ4", "#5d8c3e"), "nvcomp:cascaded": ("Cascaded", "#b5453c"), "planes": ("planes", "#1f5fa8")}


def draw_columns(directory):
    """Writes columns.png: how many times smaller each set becomes, and the rate of encoding and decoding together, by
    codec."""
    rows = reading.Results(Path(directory)).rows("choose")
    if plt is None or not rows:
        print("no chart of columns: " + ("choose.csv is missing" if plt else "matplotlib is missing"))
        return
    figure, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for arm, (label, color) in CODECS.items():
        own = [row for row in rows if row["arm"] == arm and row["savings"] is not None and row["gbps"]]
        panel.scatter(
            [row["gbps"] for row in own], [1 / (1 - row["savings"]) for row in own], 16, color, label=label, alpha=0.7
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("coding and decoding together, GB/s of original bytes", fontsize=9)
    panel.set_ylabel("times smaller", fontsize=9)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    panel.set_title(f"A point a set ({rows[0]['gpu']}, torch {rows[0]['torch']})", fontsize=10, loc="left")
    save(figure, directory, "columns")


def mosaic(row):
    """Returns the maps of a row of activation_maps.csv side by side, with zeros in black."""
    shape = row["channels"], row["height"], row["width"]
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(row["map"]), np.uint8))[: math.prod(shape)].reshape(shape)
    return np.hstack([np.pad(channel, 1, constant_values=1) for channel in bits])


def draw_maps(directory):
    """Writes activation_maps.png: which outputs of AlexNet are zero, by layer and progress of training."""
    rows = reading.Results(Path(directory)).rows("activation_maps")
    if plt is None or not rows:
        print("no chart of activations: " + ("activation_maps.csv is missing" if plt else "matplotlib is missing"))
        return
    layers, shares = (reading.in_order(row[name] for row in rows) for name in ("layer", "progress"))
    size = 2.4 * len(shares), 0.5 * len(layers)
    figure, panels = plt.subplots(len(layers), len(shares), figsize=size, layout="constrained", squeeze=False)
    for row in rows:
        panel = panels[layers.index(row["layer"]), shares.index(row["progress"])]
        panel.imshow(mosaic(row), cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for panel in panels.flat:
        panel.set_xticks([])
        panel.set_yticks([])
    for layer, panel in zip(layers, panels[:, 0]):
        panel.set_ylabel(layer, fontsize=7, rotation=0, ha="right", va="center")
    for share, panel in zip(shares, panels[0]):
        panel.set_title(f"trained {reading.percent(share, 0)}", fontsize=8)
    save(figure, directory, "activation_maps")


def draw_entries(directory):
    """Writes entries.png: the bytes of each entry under bit-plane compression, one line per page."""
    rows = reading.Results(Path(directory)).rows("entries")
    if plt is None or not rows:
        print("no chart of entries: " + ("entries.csv is missing" if plt else "matplotlib is missing"))
        return
    programs = reading.in_order(row["program"] for row in rows)
    figure, panels = plt.subplots(1, len(programs), figsize=(2 * len(programs), 4), layout="constrained", squeeze=False)
    for program, panel in zip(programs, panels[0]):
        own = [row for row in rows if row["program"] == program]
        sizes = [[bpc.SIZES[int(digit)] for digit in row["sizes"]] for row in own]
        image = panel.imshow(
            sizes, cmap="coolwarm", vmin=0, vmax=bpc.ENTRY_BYTES, aspect="auto", interpolation="nearest"
        )
        panel.set_title(f"{program}, {own[0]['times_smaller']:.2f} times", fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])
    figure.colorbar(image, ax=panels[0, -1], label="bytes of an entry of 128")
    save(figure, directory, "entries")


def save(figure, directory, name, dpi=100):
    path = Path(directory) / f"{name}.png"
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    print(path)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="directory of the CSV files")
    directory = parser.parse_args(argv).out
    draw(directory)
    draw_experts(directory)
    draw_columns(directory)
    draw_maps(directory)
    draw_entries(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
