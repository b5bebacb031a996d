#!/usr/bin/env python3
"""Compares two folders of benchmark results: `python tools/compare_results.py before after [--slower 0.03]`.

Two rows of a CSV belong to the same cell if all columns agree except the measured ones. For each script this prints the
number of cells, the geometric mean of after / before (more is faster), and the cells that are slower by more than
--slower. If a script has no gbps column, its times are compared. Cells that only one folder has are counted.
"""

import argparse
import csv
import math
import sys
from pathlib import Path

FASTER, SLOWER = "gbps", ("us", "ms")  # In the first column more is better, in the others less.
MEASURED = set(
    "gbps ideal_gbps savings gpu torch cuda commit us ms mean_ms first_ms slowest_ms host_ms host_us ratio".split()
)
MEASURED |= set("target_gbps met times tokens_per_s share_of_alone matmul_share gain hit_rate bound_ms".split())
MEASURED |= {"ms_of_all", "own_us"}


def cells_of(path):
    """Returns the measured speed of each cell of a CSV, by the names and texts of its other columns."""
    cells = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            speed = speed_of(row)
            if speed:
                name = tuple((column, text) for column, text in row.items() if column not in MEASURED and text)
                cells.setdefault(name, []).append(speed)
    return {name: sum(speeds) / len(speeds) for name, speeds in cells.items()}


def speed_of(row):
    for column, of_text in [(FASTER, float), *((column, lambda text: 1 / float(text)) for column in SLOWER)]:
        text = row.get(column) or ""
        if text and math.isfinite(float(text)) and float(text) > 0:
            return of_text(text)
    return None


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--slower", type=float, default=0.03, help="share by which a cell is slower to be named")
    options = parser.parse_args(argv)
    paths = [path for path in sorted(options.before.glob("*.csv")) if (options.after / path.name).is_file()]
    if not paths:
        parser.error(f"no CSV is in both {options.before} and {options.after}")
    for path in paths:
        before, after = cells_of(path), cells_of(options.after / path.name)
        ratios = {name: after[name] / before[name] for name in before if name in after}
        alone = len(before.keys() ^ after.keys())
        if not ratios:
            print(f"{path.stem}: no cell is in both; {alone} in one alone")
            continue
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        slow = {name: ratio for name, ratio in ratios.items() if ratio < 1 - options.slower}
        print(f"{path.stem}: {len(ratios)} cells, geometric mean {mean:.3f}, {len(slow)} slower; {alone} in one alone")
        for name, ratio in sorted(slow.items(), key=lambda item: item[1]):
            print(f"    {ratio:.3f}  " + ", ".join(text for column, text in name if column != "benchmark"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
