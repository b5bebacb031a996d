"""Draws PNG charts beside the CSV files: `python -m benchmarks.charts [--out DIR]`."""

import argparse
import csv
import sys
from pathlib import Path

from . import harness
from .sets import SYNTHETIC as SYNTHETIC_SETS

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator
except ImportError:
    plt = None

RATE_LABEL = "GB/s of original bytes"
SYNTHETIC = "synthetic "  # cases "synthetic 12.5%" and so on; raw rows and the CPU's gathers are the case "synthetic"
IBP_ARM, RAW_ARM = "ibp slots", "raw rows"
# Arm: label, colour, line style. An arm is one thing in every chart.
GATHER_STYLE = {
    IBP_ARM: ("ibp, slots", "#1f5fa8", "-"),
    "planes slots": ("planes, slots", "#8e5ea2", "-"),
    "ibp in place": ("ibp, in place", "#d9822b", "-"),
    RAW_ARM: ("raw rows, same kernel", "#7a7a7a", "-"),
    "cpu pinned + copy": ("CPU gather, pinned, copy", "#5d8c3e", "-"),
    "cpu index + copy": ("CPU gather, copy", "#a5c78b", "-"),
}
CODEC_STYLE = {"decode": "#1f5fa8", "planes decode": "#8e5ea2", "encode": "#d9822b", "compress": "#eab676", "analyze": "#5d8c3e", "analyze, sweep": "#a5c78b"}

NVCOMP = "nvcomp "  # methods of ratio.csv that are codecs of nvCOMP
RATIO_STYLE = {
    "paper": ("the paper's choice", "#bdbdbd"),
    "ibp": ("ibp", "#eab676"),
    "planes": ("planes", "#7fb0de"),
    "auto": ("auto", "#1f5fa8"),
    "zstd -3": ("zstd -3, 64 KiB", "#a5c78b"),
    NVCOMP: ("nvCOMP, its best codec", "#5d8c3e"),
}
SPARSE_SAVINGS = 0.8  # sets of which auto saves more are drawn as times smaller


def read(path):
    """Rows of a CSV with numbers as numbers, None where there is none; [] if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for number, names in ((int, ("rows", "row_bytes", "sms")), (float, ("savings", "link_savings", "gbps", "ideal_gbps"))):
            for name in row.keys() & set(names):
                row[name] = number(row[name]) if row[name] else None
    return rows


def size_name(num_bytes):
    return f"{num_bytes // 1024} KiB" if num_bytes >= 1024 and num_bytes % 1024 == 0 else f"{num_bytes} B"


def case_label(row):
    return f"{row['case']}\n{row['dtype']}, {size_name(row['row_bytes'])}"


def with_most_sms(rows):
    """The rows of the arms that may use the whole GPU, or none of it."""
    most = max((row["sms"] for row in rows), default=0)
    return [row for row in rows if row["sms"] in (0, most)]


def in_order(values):
    return list(dict.fromkeys(values))


def machine(rows):
    return f"{rows[0]['gpu']}, torch {rows[0]['torch']}, commit {rows[0]['commit'][:10]}"


def draw_gather_synthetic(rows, path):
    """One panel for each savings: GB/s by row size, ibp beside its ideal, raw rows and the CPU's gathers."""
    rows = with_most_sms([row for row in rows if row["case"].startswith(SYNTHETIC.strip())])
    cases = in_order(row["case"] for row in rows if row["case"].startswith(SYNTHETIC))
    if not cases:
        return
    figure, panels = plt.subplots(1, len(cases), figsize=(3.4 * len(cases), 4.2), sharey=True, squeeze=False)
    for panel, case in zip(panels[0], cases):
        ideal = sorted((row["row_bytes"], row["ideal_gbps"]) for row in rows if row["case"] == case and row["arm"] == IBP_ARM)
        if ideal:
            panel.plot(*zip(*ideal), color="black", linestyle=":", label="ideal, slots")
        for arm, (label, color, line) in GATHER_STYLE.items():
            points = sorted((row["row_bytes"], row["gbps"]) for row in rows
                            if row["arm"] == arm and row["case"] in (case, SYNTHETIC.strip()))
            if points:
                panel.plot(*zip(*points), color=color, linestyle=line, marker="o", markersize=3.5, label=label)
        sizes = sorted({row["row_bytes"] for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [size_name(size) for size in sizes], rotation=60, fontsize=8)
        set_rate_axis(panel)
        panel.set_title(f"{case.removeprefix(SYNTHETIC)} saved", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(RATE_LABEL)
    figure.supxlabel("row", fontsize=10)
    panels[0][0].legend(fontsize=7, loc="upper left")
    save(figure, path, f"Random rows from pinned host memory ({machine(rows)})")


def draw_gather_real(rows, path):
    """Real sets: bars of every arm, the ideal of ibp's slots as a tick above them."""
    rows = with_most_sms([row for row in rows if not row["case"].startswith(SYNTHETIC.strip())])
    labels = in_order(case_label(row) for row in rows)
    if not labels:
        return
    figure, panel = plt.subplots(figsize=(max(6.0, 1.5 * len(labels)), 4.4))
    arms = [arm for arm in GATHER_STYLE if any(row["arm"] == arm for row in rows)]
    for i, arm in enumerate(arms):
        draw_bars(panel, rows, labels, arm, i, len(arms), GATHER_STYLE[arm][0], GATHER_STYLE[arm][1])
    for row in rows:
        if row["arm"] == IBP_ARM:
            place = labels.index(case_label(row))
            panel.hlines(row["ideal_gbps"], place - 0.42, place + 0.42, color="black", linestyle=":")
    panel.plot([], [], color="black", linestyle=":", label="ideal, slots")
    finish_bars(panel, labels)
    save(figure, path, f"Random rows of real tables from pinned host memory ({machine(rows)})")


def draw_codec(rows, path):
    """Bars of decoding, encoding and analysis by all SMs, with the copy's and the memset's rate across."""
    rows = with_most_sms(rows)
    device = {row["arm"]: row["gbps"] for row in rows if row["case"] == "device"}
    shown = [row for row in rows if row["case"] != "device"]
    labels = in_order(case_label(row) for row in shown if row["case"] == f"{SYNTHETIC}50%"
                      or not row["case"].startswith(SYNTHETIC))
    if not labels:
        return
    figure, panel = plt.subplots(figsize=(max(6.0, 1.1 * len(labels)), 4.6))
    for i, (arm, color) in enumerate(CODEC_STYLE.items()):
        draw_bars(panel, shown, labels, arm, i, len(CODEC_STYLE), arm, color)
    for (arm, gbps), line in zip(device.items(), ("--", ":")):
        panel.axhline(gbps, color="black", linestyle=line, linewidth=1, label=arm)
    finish_bars(panel, labels)
    save(figure, path, f"From device memory to device memory ({machine(rows)})")


def draw_ratio(rows, path):
    """Savings of every set by every method: synthetic sets and real ones in percent, very compressible ones as times smaller."""
    if plt is None or not rows:
        return
    sets = {}
    for row in rows:
        methods = sets.setdefault((row["set"], f"{row['set']}\n{row['dtype']}, {size_name(row['row_bytes'])}"), {})
        method = NVCOMP if row["method"].startswith(NVCOMP) else row["method"]
        if method not in methods or row["savings"] > methods[method]["savings"]:
            methods[method] = row
    panels = {"synthetic": {}, "real": {}, "very compressible": {}}
    synthetic = {name for name, _, _ in SYNTHETIC_SETS}
    for (name, label), methods in sets.items():
        is_sparse = max(row["savings"] for row in methods.values()) > SPARSE_SAVINGS
        panels["very compressible" if is_sparse else "synthetic" if name in synthetic else "real"][label] = methods
    panels = {title: shown for title, shown in panels.items() if shown}
    figure, axes = plt.subplots(len(panels), 1, figsize=(15, 4.4 * len(panels)), squeeze=False)
    for panel, (title, shown) in zip(axes[:, 0], panels.items()):
        draw_ratio_panel(panel, shown, title == "very compressible")
        panel.set_title(title, loc="left", fontsize=11)
    axes[0, 0].legend(fontsize=9, ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(figure, path, "Bytes saved, lossless, codebooks included")


def draw_ratio_panel(panel, shown, as_times):
    """Bars of the methods in groups, one a set; a tick on auto's bar where its rows are read over the link."""

    def height(savings):
        return 1 / (1 - savings) if as_times else 100 * max(0.0, savings)

    arms = [arm for arm in RATIO_STYLE if any(arm in methods for methods in shown.values())]
    width = 0.84 / len(arms)
    for i, arm in enumerate(arms):
        label, color = RATIO_STYLE[arm]
        offset = (i - (len(arms) - 1) / 2) * width
        places = [(at + offset, methods[arm]) for at, methods in enumerate(shown.values()) if arm in methods]
        panel.bar([place for place, _ in places], [height(row["savings"]) for _, row in places], width, color=color, label=label)
        if arm == "auto":
            panel.hlines([height(row["link_savings"]) for _, row in places], [place - width / 2 for place, _ in places],
                         [place + width / 2 for place, _ in places], color="black", linewidth=1.5, label="auto, over the link")
            for place, row in places:
                number = height(row["savings"])
                panel.annotate(f"{number:.{0 if number >= 100 else 1}f}", (place, number), (0, 2), textcoords="offset points",
                               ha="center", fontsize=7)
    panel.set_xticks(range(len(shown)), shown, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    panel.set_xlim(-0.6, len(shown) - 0.4)
    panel.set_ylabel("times smaller" if as_times else "percent saved")
    panel.margins(y=0.1)
    if as_times:
        panel.set_yscale("log")
        panel.set_ylim(bottom=1)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def draw_bars(panel, rows, labels, arm, position, num_arms, label, color):
    points = [(labels.index(case_label(row)), row["gbps"]) for row in rows if row["arm"] == arm and case_label(row) in labels]
    width = 0.84 / num_arms
    panel.bar([place + (position - (num_arms - 1) / 2) * width for place, _ in points], [gbps for _, gbps in points],
              width, color=color, label=label)


def finish_bars(panel, labels):
    panel.set_xticks(range(len(labels)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    set_rate_axis(panel)
    panel.set_ylim(bottom=1)  # bars on a logarithmic axis start at 1 GB/s in every chart
    panel.set_ylabel(RATE_LABEL)
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize=7, ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def set_rate_axis(panel):
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.minorticks_off()


def save(figure, path, title):
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)


def draw(directory):
    """Draws every chart for which the CSV is in `directory`; says so where matplotlib is missing."""
    if plt is None:
        print("no charts: matplotlib is not installed")
        return
    directory = Path(directory)
    gather, codec = read(directory / "gather.csv"), read(directory / "codec.csv")
    draw_gather_synthetic(gather, directory / "gather.png")
    draw_gather_real(gather, directory / "gather_real.png")
    draw_codec(codec, directory / "codec.png")
    draw_ratio(read(directory / "ratio.csv"), directory / "ratio.png")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="directory of the CSV files")
    draw(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
