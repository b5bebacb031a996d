"""One harness for all benchmarks: command line, timing, checks, CSV and the table printed last.

Timing: CUDA events around each call, the calls queued behind a head start so that no launch gap is measured; two warm-up calls
(one where calls are long); median. Calls rotate among several inputs and outputs, so that more bytes than the L2 cache holds
pass between two uses of the same ones. With --device cpu a wall clock stands in for the events: that executes the scripts on
a machine without a GPU, and measures nothing that the project claims.
"""

import argparse
import contextlib
import csv
import math
import os
import statistics
import subprocess
import tempfile
import time
import traceback
from pathlib import Path

import torch

from . import inputs

COLUMNS = "benchmark,case,arm,rows,row_bytes,dtype,savings,gbps,ideal_gbps,sms,gpu,torch,cuda,commit".split(",")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
POISON = 0xA5
MAX_REPEATS, MIN_REPEATS, BUDGET_S = 7, 3, 0.3  # timed calls of an arm: as many of these as fit the budget
LONG_S = 2.0  # one timed call has to do where it takes longer than this
MAX_ROTATION = 16


# ---- command line and provenance ----------------------------------------------------------------------------------------------


def parse_args(argv=None, description=None):
    """--out, --device, --quick and --data, the same for every script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory of the CSV files (default: benchmarks/results for a full run on a "
                        "GPU, else a directory for temporary files)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few cells and small tables: does it run?")
    parser.add_argument("--data", type=Path, default=inputs.DATA_DIR, help="directory of the real sets")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.out is None:
        complete = args.device == "cuda" and not args.quick
        args.out = RESULTS if complete else Path(tempfile.gettempdir()) / "ibp-benchmarks"
    return args


def commit_id():
    """The commit measured: git's HEAD, with "-dirty" where code differs from it; IBP_COMMIT where there is no repository."""
    if not (ROOT / ".git").exists():
        return os.environ.get("IBP_COMMIT", "unknown")

    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    try:
        head = git("rev-parse", "HEAD")
        code = git("status", "--porcelain", "--", "csrc", "ibp", "benchmarks/*.py")
    except OSError:
        return os.environ.get("IBP_COMMIT", "unknown")
    if head.returncode != 0:
        return os.environ.get("IBP_COMMIT", "unknown")
    return head.stdout.strip() + ("-dirty" if code.stdout.strip() else "")


# ---- bits -----------------------------------------------------------------------------------------------------------------------


def poison(tensor):
    """Fills a tensor with bytes that a correct result is not expected to hold."""
    tensor.view(torch.uint8).fill_(POISON)


def check_bits(got, want, what):
    """Raises AssertionError unless two tensors agree in shape, dtype and every bit (so also in NaN payloads and -0)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{what}: got {tuple(got.shape)} {got.dtype}, wanted {tuple(want.shape)} {want.dtype}")
    if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
        raise AssertionError(f"{what}: bits differ from torch's own result")


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def four_digits(number):
    """Four significant digits, never in exponent notation below a million."""
    return f"{float(f'{number:.4g}'):g}"


# ---- a run ----------------------------------------------------------------------------------------------------------------------


class Run:
    """One script's run: times calls, collects rows, writes them to <out>/<benchmark>.csv as they come."""

    def __init__(self, benchmark, args):
        self.benchmark, self.quick, self.device = benchmark, args.quick, torch.device(args.device)
        self.on_gpu = args.device == "cuda"
        self.rows, self.failures, self.started = [], [], time.perf_counter()
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            self.num_sms, self.l2_bytes = properties.multi_processor_count, getattr(properties, "L2_cache_size", 64 << 20)
        else:
            self.num_sms, self.l2_bytes = 0, 1 << 20
        self.same = {"benchmark": benchmark, "gpu": torch.cuda.get_device_name(self.device) if self.on_gpu else "none",
                     "torch": torch.__version__, "cuda": torch.version.cuda or "none", "commit": commit_id()}
        self.scratch = torch.empty((1 << 30) if self.on_gpu else (1 << 24), dtype=torch.uint8, device=self.device)
        self.path = args.out / f"{benchmark}.csv"
        args.out.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()
        self.memset_gbps = self.scratch.numel() * 1e-9 / self.seconds([self.scratch.zero_])

    def add(self, *, case, arm, rows, row_bytes, dtype, savings, gbps, ideal_gbps, sms):
        """Records one measurement. sms: the most SMs that the arm may keep busy, None for all, 0 where no kernel does the work."""
        row = {**self.same, "case": case, "arm": arm, "rows": rows, "row_bytes": row_bytes, "dtype": dtype_name(dtype),
               "savings": f"{savings:.4f}", "gbps": four_digits(gbps), "ideal_gbps": four_digits(ideal_gbps),
               "sms": self.num_sms if sms is None else sms}
        self.rows.append(row)
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)

    @contextlib.contextmanager
    def cell(self, what):
        """Whatever fails inside is reported at the end, and the run goes on with the next cell."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()

    def sync(self):
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def rotation(self, bytes_per_call):
        """How many input and output sets to rotate among: four times the L2 cache between two uses of the same set."""
        return min(MAX_ROTATION, max(2, math.ceil(4 * self.l2_bytes / max(1, bytes_per_call))))

    def seconds(self, calls, wall=False):
        """Median seconds of one call. calls: functions without arguments that do the same work on different memory.
        wall: host and GPU work together by the wall clock, for arms whose work is partly the CPU's."""
        one = self._wall_seconds(calls[-1])
        if one < BUDGET_S:  # else the call is long enough to be measured as it is
            one = self._wall_seconds(calls[0])
        repeats = 1 if one > LONG_S else min(MAX_REPEATS, max(MIN_REPEATS, int(BUDGET_S / max(one, 1e-9))))
        if wall or not self.on_gpu:
            return statistics.median(self._wall_seconds(calls[i % len(calls)]) for i in range(repeats))
        return self._event_seconds(calls, repeats)

    def _wall_seconds(self, call):
        self.sync()
        start = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - start

    def _event_seconds(self, calls, repeats):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for _ in range(4):  # the head start: about 1 ms of work on an H200 while the calls are queued
            self.scratch.zero_()
        for i, (start, end) in enumerate(events):
            start.record()
            calls[i % len(calls)]()
            end.record()
        self.sync()
        return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3

    def finish(self):
        """Prints the table and the failures. @return the exit status of the script."""
        print(format_table(self.rows))
        print(f"{self.benchmark}: {len(self.rows)} measurements in {time.perf_counter() - self.started:.0f} s on "
              f"{self.same['gpu']}, memset {self.memset_gbps:.0f} GB/s, {self.path}")
        for failure in self.failures:
            print(f"FAILED {failure}")
        return 1 if self.failures else 0


# ---- the table printed last -------------------------------------------------------------------------------------------------------


def format_table(rows):
    """One line a case and row size, one column an arm: GB/s, and in brackets the share of the ideal in percent."""
    arms, lines, savings = [], {}, {}
    for row in rows:
        arm = row["arm"] + (f" {row['sms']} SMs" if row["sms"] else "")
        if arm not in arms:
            arms.append(arm)
        key = (row["case"], str(row["row_bytes"]), row["dtype"])
        share = 100 * float(row["gbps"]) / float(row["ideal_gbps"])
        lines.setdefault(key, {})[arm] = f"{row['gbps']} ({share:.0f})"
        if not float(savings.get(key, 0)):  # of the first arm that compresses
            savings[key] = row["savings"]
    cells = [["case", "row_bytes", "dtype", "savings", *arms]]
    cells += [[*key, savings[key], *(values.get(arm, "") for arm in arms)] for key, values in lines.items()]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in cells)
