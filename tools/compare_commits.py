#!/usr/bin/env python3
"""Measures two commits in turn on one GPU, and says which cells became slower.

    python tools/compare_commits.py BEFORE AFTER --out DIR [--every 3] [--scripts gather,codec] [--spreads FILE]

BEFORE and AFTER are two trees with built libraries, or twice the same tree. There are four passes: before, after,
before, after. Each pass is one process, which runs the benchmarks of its tree and writes CSVs to DIR/1 to DIR/4. By
default the benchmarks run every third of their cases (see `python -m benchmarks.gather --help`). Rows of different CSVs
belong to the same cell if they agree in the columns that compare_results.py compares.

The spread of a cell is the standard deviation of its rates in the passes of one tree, divided by their mean. If the
same tree is given twice, all four passes count. For two trees, the spread is the root mean square of the spreads of
both. DIR/spreads.csv gets the spreads, and one line per script is printed.

A cell of two different trees is slower if its mean rate fell by more than 2 % and by more than three times its spread.
The spread of this run counts, or the spread that --spreads has for this GPU if that is larger. A cell counts as slower
only if two runs say so: pass the first run's DIR/slower.csv to the second run as --again. The exit status is 1 if cells
are slower.
"""

import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import compare_results

SCRIPTS = "gather,codec,families,linear,small_calls,paths"
# A cell is slower if its rate fell by more than this share, and by more than this many spreads.
LEAST, TIMES = 0.02, 3
PASSES = 4
COLUMNS = ("gpu", "commit", "benchmark", "cell", "mean", "spread")
PROGRAM = """
import gc, importlib, sys, torch
failed = 0
for name in sys.argv[3].split(","):
    script = importlib.import_module("benchmarks." + name)
    failed |= script.main(["--out", sys.argv[1], "--every", sys.argv[2], *sys.argv[4:]])
    gc.collect()
    torch.cuda.is_available() and torch.cuda.empty_cache()
sys.exit(failed)
"""


def measure(tree, out, every, scripts, options):
    """Runs the scripts of a tree in one process. Returns whether all of their cells were measured."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, str(out), str(every), scripts, *options]
    with open(out / "log", "w") as log:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        return subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log).returncode == 0


def origin_of(folder):
    """Returns the GPU and the commit that the CSVs of a folder name."""
    for path in folder.glob("*.csv"):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                return row["gpu"], row["commit"]
    sys.exit(f"{folder} has no rows: its file log says why")


def cells_of(folder):
    """Returns {(script, text of the cell): rate} of a folder's CSVs."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        if path.stem != "memory":
            for name, speed in compare_results.cells_of(path).items():
                found[path.stem, ", ".join(text for column, text in name if column != "benchmark")] = speed
    return found


def spread_of(speeds):
    """Returns the standard deviation of rates, divided by their mean."""
    return statistics.stdev(speeds) / statistics.fmean(speeds)


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*words, f"{mean:.6g}", f"{spread:.4f}") for *words, mean, spread in rows)


def read(path, gpu):
    """Returns {(script, cell): spread} for one GPU from a file of spreads."""
    with open(path, newline="") as file:
        return {
            (row["benchmark"], row["cell"]): float(row["spread"]) for row in csv.DictReader(file) if row["gpu"] == gpu
        }


def pooled(groups):
    """Returns the root mean square of the spreads of groups of rates."""
    return math.sqrt(statistics.fmean(spread_of(speeds) ** 2 for speeds in groups))


def report_spreads(out, origin, passes, trees):
    """Writes and prints the spreads of the cells. trees: 1 if all passes are of one tree, 2 if the passes alternate
    between two."""
    common = [name for name in passes[0] if all(name in cells for cells in passes)]
    rows = []
    for name in common:
        speeds = [cells[name] for cells in passes]
        spread = pooled([speeds[first::trees] for first in range(trees)])
        rows.append((*origin, *name, statistics.fmean(speeds), spread))
    write(out / "spreads.csv", rows)
    print(f"{origin[0]}: spreads of {PASSES} passes, in per cent\n{'script':14} cells  median  95 % below  largest")
    for script in sorted({row[2] for row in rows}):
        found = sorted(100 * row[-1] for row in rows if row[2] == script)
        most = found[max(0, -(-95 * len(found) // 100) - 1)]
        print(f"{script:14} {len(found):5} {statistics.median(found):7.2f} {most:11.2f} {found[-1]:8.2f}")


def report_slower(out, origin, passes, known, again):
    """Prints the cells that became slower, and returns the exit status. known: spreads measured before. again: the
    cells that count, which an earlier run found slower; None if all cells count."""
    slower, ratios = [], {}
    for name in passes[0]:
        if not all(name in cells for cells in passes):
            continue
        before, after = ([cells[name] for cells in passes[of::2]] for of in (0, 1))
        ratio = statistics.fmean(after) / statistics.fmean(before)
        spread = max(known.get(name, 0.0), pooled([before, after]))
        ratios.setdefault(name[0], []).append(ratio)
        if 1 - ratio > max(LEAST, TIMES * spread) and (again is None or name in again):
            slower.append((*origin, *name, ratio, spread))
    write(out / "slower.csv", slower)
    for script, found in ratios.items():
        mean = statistics.geometric_mean(found)
        count = sum(row[2] == script for row in slower)
        print(f"{script}: {len(found)} cells, geometric mean {mean:.3f}, {count} slower")
    for *_, script, cell, ratio, spread in sorted(slower, key=lambda row: row[-2]):
        print(f"    {ratio:.3f} (spread {100 * spread:.1f} %)  {script}: {cell}")
    return 1 if slower else 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=3, help="every Nth case (3: under eight minutes)")
    parser.add_argument("--scripts", default=SCRIPTS)
    parser.add_argument("--spreads", type=Path, help="a spreads.csv of the same kind of GPU")
    parser.add_argument("--again", type=Path, help="slower.csv of an earlier run: only its cells count")
    parser.add_argument("--options", default="", help="further options of the scripts, such as '--device cpu --quick'")
    options = parser.parse_args(argv)
    trees = [options.before.resolve(), options.after.resolve()]
    for number in range(PASSES):
        out = options.out.resolve() / str(number + 1)
        if not measure(trees[number % 2], out, options.every, options.scripts, options.options.split()):
            print(f"pass {number + 1}: some cells failed; {out / 'log'} says which")
    folders = [options.out / str(number + 1) for number in range(PASSES)]
    origin, passes = origin_of(folders[-1]), [cells_of(folder) for folder in folders]
    report_spreads(options.out, origin, passes, len(set(trees)))
    if trees[0] == trees[1]:
        return 0
    known = read(options.spreads, origin[0]) if options.spreads else {}
    again = set(read(options.again, origin[0])) if options.again else None
    return report_slower(options.out, origin, passes, known, again)


if __name__ == "__main__":
    sys.exit(main())
