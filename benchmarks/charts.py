"""Draws PNG charts beside the CSV files: `python -m benchmarks.charts [--out DIR]`."""

import argparse
import csv
import sys
from pathlib import Path

from . import harness

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
    "ibp in place": ("ibp, in place", "#d9822b", "-"),
    RAW_ARM: ("raw rows, same kernel", "#7a7a7a", "-"),
    "cpu pinned + copy": ("CPU gather, pinned, copy", "#5d8c3e", "-"),
    "cpu index + copy": ("CPU gather, copy", "#a5c78b", "-"),
}
CODEC_STYLE = {"decode": "#1f5fa8", "encode": "#d9822b", "compress": "#eab676", "analyze": "#5d8c3e", "analyze, sweep": "#a5c78b"}


def read(path):
    """Rows of a CSV with numbers as numbers; [] if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in ("rows", "row_bytes", "sms"):
            row[name] = int(row[name])
        for name in ("savings", "gbps", "ideal_gbps"):
            row[name] = float(row[name])
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="directory of the CSV files")
    draw(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
