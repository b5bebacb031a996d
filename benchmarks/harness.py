"""The harness of all benchmarks: command line, timing, memory, checks, CSV, and the table that is printed last.

Timing: CUDA events are recorded around each call. The calls are queued behind other GPU work, so that no launch gap is
measured. There are two warm-up calls (one if calls are long), and the median counts. Calls rotate among several inputs
and outputs, so that more bytes than the L2 cache holds pass between two uses of the same ones. With --device cpu the
wall clock replaces the events. This executes the scripts on a machine without a GPU, and measures nothing that the
project claims.

Memory: the most that torch's allocator handed out while one call ran, beyond its result and what an earlier call left.
The core library allocates nothing by itself.
"""

import argparse
import contextlib
import csv
import ctypes
import gc
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which default arguments of this module would keep alive

from ibp._machine import calibration

from . import ideal, inputs

COLUMNS = "benchmark,case,arm,rows,row_bytes,dtype,savings,gbps,ideal_gbps,sms,gpu,torch,cuda,commit".split(",")
MEMORY_COLUMNS = (
    "benchmark,case,arm,row_bytes,dtype,peak_bytes,output_bytes,index_bytes,original_bytes,gpu,commit".split(",")
)
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
POISON = 0xA5
# As many calls of an arm are timed as fit the budget in seconds, between these two numbers.
MAX_REPEATS, MIN_REPEATS, BUDGET_S = 7, 3, 0.15
LONG_S = 2.0  # Of calls that take more seconds than this only one is timed.
MAX_ROTATION = 16
HEAD_START_S = 2e-3  # The GPU works this many seconds while the timed calls are queued.

# Limits for memory on a GPU: no temporary is larger than the ring in which streamed tensors are staged, and the
# metadata of a table that rows are fetched from is at most this share of the original bytes, for rows with at least
# METADATA_ROW_BYTES.
MAX_TEMPORARY_BYTES = 64 << 20
MAX_METADATA_SHARE, METADATA_ROW_BYTES = 0.01, 256


# ---- command line and provenance -----------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(kind, store, rank, world):
    """Joins the processes of a benchmark to a group over NCCL or gloo, and yields the device of this one. kind: "cuda"
    or "cpu". store: a file that no other run uses."""
    on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        device_id=device if on_gpu else None,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def parse_args(argv=None, description=None):
    """Parses --out, --device, --quick, --data and --every, which are the same for every script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        help="directory of the CSV files (default: benchmarks/results for a full run on a "
        "GPU, else a directory for temporary files)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few cells and small tables: does it run?")
    parser.add_argument("--data", type=Path, default=inputs.DATA_DIR, help="directory of the real sets")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="every Nth case alone (tools/compare_commits.py)"
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.out is None:
        complete = args.device == "cuda" and not args.quick
        args.out = RESULTS if complete else Path(tempfile.gettempdir()) / "ibp-benchmarks"
    return args


def commit_id():
    """Returns the commit that is measured: IBP_COMMIT if it is set (for copies of a tree), otherwise git's HEAD, with
    "-dirty" if code differs from it."""
    if os.environ.get("IBP_COMMIT"):
        return os.environ["IBP_COMMIT"]

    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    if not (ROOT / ".git").exists():  # Git would find another repository that contains this directory.
        return "unknown"
    try:
        head = git("rev-parse", "HEAD")
        code = git("status", "--porcelain", "--", "csrc", "ibp", "setup.py", "benchmarks/*.py", "examples/*.py")
    except OSError:
        return "unknown"
    if head.returncode != 0:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if code.stdout.strip() else "")


# ---- bits ----------------------------------------------------------------------------------------------------------


def poison(tensor):
    """Fills a tensor with bytes that a correct result is not expected to hold."""
    tensor.view(torch.uint8).fill_(POISON)


def release(run):
    """Frees what earlier arms have left. Objects that refer to each other, such as an offloaded model and its hooks,
    keep their memory until the garbage collector finds them."""
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()


def check_bits(got, want, what):
    """Raises AssertionError unless two tensors agree in shape, dtype and every bit (so also in NaN payloads and -0)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{what}: got {tuple(got.shape)} {got.dtype}, wanted {tuple(want.shape)} {want.dtype}")
    if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
        raise AssertionError(f"{what}: bits differ from torch's own result")


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def compiled(command, source):
    """Compiles a source file to a shared library and returns its functions. command: the compiler and its options,
    without the names of files. Raises CalledProcessError if the compiler fails."""
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / f"{source.stem}.so"
        subprocess.run([*command, source, "-o", built], check=True)
        return ctypes.CDLL(built)


def four_digits(number):
    """Returns a number with four significant digits, without an exponent if it is below a million."""
    return f"{float(f'{number:.4g}'):g}"


# ---- a CSV file that several scripts share -------------------------------------------------------------------------


def append_row(path, columns, row):
    with open(path, "a", newline="") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerow(row)


def start_file(path, columns, keep=lambda row: False):
    """Writes an empty CSV that only has the rows of the earlier file that are to be kept. Columns that the earlier file
    lacks are empty in these rows. If it has a column that the new one lacks, none of its rows are kept."""
    kept = []
    if path.exists():
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            kept = [row for row in reader if keep(row)] if {*(reader.fieldnames or ())} <= {*columns} else []
    with open(path, "w", newline="") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writeheader()
    for row in kept:
        append_row(path, columns, row)


# ---- a run ---------------------------------------------------------------------------------------------------------


def metadata_bytes(table, device):
    """Returns the bytes that a table keeps in the memory of a device that fetches from it, beside its rows: lengths,
    bases, and the codebook's words."""
    held = [table.lengths, table.bases] + ([table.codebook.words(torch.device(device))] if table.codebook else [])
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


class Run:
    """The run of one script. It times calls, writes rows to <out>/<benchmark>.csv as they come, and writes the GPU
    memory that calls take to <out>/memory.csv. SIGTERM ends the script and keeps what was measured until then.

    Args:
        extra_columns: columns of this script's CSV, after the common ones.
        keep: function(row) -> whether a row of the earlier CSVs stays. Other machines' rows of the script's own CSV
            never stay.
    """

    def __init__(self, benchmark, args, extra_columns=(), keep=lambda row: False):
        self.benchmark, self.quick, self.device = benchmark, args.quick, torch.device(args.device)
        self.every = args.every
        self.on_gpu = args.device == "cuda"
        self.columns, self.rows, self.memory, self.failures = [*COLUMNS, *extra_columns], [], [], []
        self.started = time.perf_counter()
        if self.on_gpu:
            ideal.reckon_with(calibration.in_force(torch.device("cuda", torch.cuda.current_device())))
            properties = torch.cuda.get_device_properties(self.device)
            self.num_sms, self.l2_bytes = (
                properties.multi_processor_count,
                getattr(properties, "L2_cache_size", 64 << 20),
            )
        else:
            self.num_sms, self.l2_bytes = 0, 1 << 20
        self.same = {
            "benchmark": benchmark,
            "gpu": torch.cuda.get_device_name(self.device) if self.on_gpu else "none",
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "commit": commit_id(),
        }
        self.scratch = torch.empty((1 << 30) if self.on_gpu else (1 << 24), dtype=torch.uint8, device=self.device)
        self.path = args.out / f"{benchmark}.csv"
        args.out.mkdir(parents=True, exist_ok=True)
        self.memory_path = args.out / "memory.csv"
        start_file(self.path, self.columns, lambda row: self._is_of_this_machine(row) and keep(row))
        start_file(self.memory_path, MEMORY_COLUMNS, lambda row: row["benchmark"] != benchmark or keep(row))
        signal.signal(signal.SIGTERM, self._stop)
        self.head_start = 1
        self.memset_gbps = self.scratch.numel() * 1e-9 / self.seconds([self.scratch.zero_])
        self.head_start = math.ceil(HEAD_START_S * self.memset_gbps * 1e9 / self.scratch.numel())

    def some(self, cases):
        """Returns the cases that are measured: all of them, or every Nth with --every N."""
        return itertools.islice(cases, 0, None, self.every)

    def _is_of_this_machine(self, row):
        return all(row[name] == value for name, value in self.same.items() if name != "commit")

    @property
    def is_judged(self):
        """Returns whether the targets apply. Few cells on small tables, or on a CPU, need not reach them."""
        return self.on_gpu and not self.quick

    def add(self, *, case, arm, rows, row_bytes, dtype, savings, gbps, ideal_gbps, sms, **extra):
        """Records one measurement. sms: the most SMs that the arm may keep busy, None for all, 0 if no kernel does the
        work. extra: the script's own columns, texts or numbers."""
        row = {
            **self.same,
            "case": case,
            "arm": arm,
            "rows": rows,
            "row_bytes": row_bytes,
            "dtype": dtype_name(dtype),
            "savings": f"{savings:.4f}",
            "gbps": four_digits(gbps),
            "ideal_gbps": four_digits(ideal_gbps),
            "sms": self.num_sms if sms is None else sms,
            **extra,
        }
        self.rows.append(row)
        append_row(self.path, self.columns, row)

    def peak_bytes(self, call, out=None):
        """Returns (the call's result, the most bytes of device memory that it took beyond its result and what was held
        before). Without a GPU the bytes are None. The call is made twice, because the first one allocates memory that
        stays, such as a table's metadata. out: the tensor that the call writes its result to; None: the call makes the
        result, one tensor or several."""
        call()
        if not self.on_gpu:
            return call(), None
        self.sync()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = call()
        self.sync()
        made = [] if out is not None else [result] if isinstance(result, torch.Tensor) else list(result)
        made_bytes = sum(x.numel() * x.element_size() for x in made if x.is_cuda)
        return result, torch.cuda.max_memory_allocated(self.device) - before - made_bytes

    def add_memory(self, *, case, arm, row_bytes, dtype, peak_bytes, output_bytes, original_bytes, table=None):
        """Records the GPU memory that one path takes. table: the table that is fetched from; `index_bytes` is its
        metadata on the GPU. Without a GPU the sizes are empty, but a CPU run tests the columns."""
        row = {
            "benchmark": self.benchmark,
            "case": case,
            "arm": arm,
            "row_bytes": row_bytes,
            "dtype": dtype_name(dtype),
            "peak_bytes": "" if peak_bytes is None else peak_bytes,
            "output_bytes": output_bytes,
            "index_bytes": "" if table is None else metadata_bytes(table, self.device),
            "original_bytes": original_bytes,
            "gpu": self.same["gpu"],
            "commit": self.same["commit"],
        }
        self.memory.append(row)
        append_row(self.memory_path, MEMORY_COLUMNS, row)

    @contextlib.contextmanager
    def cell(self, what):
        """Catches exceptions inside a block. They are reported at the end, and the run goes on with the next cell."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()

    def sync(self):
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def rotation(self, bytes_per_call):
        """Returns how many sets of inputs and outputs to rotate among: four times the L2 cache passes between two uses
        of a set."""
        return min(MAX_ROTATION, max(2, math.ceil(4 * self.l2_bytes / max(1, bytes_per_call))))

    def seconds(self, calls, wall=False):
        """Returns the median seconds of one call. calls: functions without arguments that do the same work on different
        memory. wall: whether to time host and GPU together with the wall clock, for arms in which the CPU does part of
        the work."""
        one = self._wall_seconds(calls[-1])
        if one < BUDGET_S:  # Longer calls are warmed up only once.
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
        for _ in range(self.head_start):
            self.scratch.zero_()
        for i, (start, end) in enumerate(events):
            start.record()
            calls[i % len(calls)]()
            end.record()
        self.sync()
        return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3

    def _stop(self, *_):
        self.failures.append("stopped before its end")
        sys.exit(self.finish())

    def finish(self, shortfalls=()):
        """Prints the table, the rates below their targets, and the failures. Returns the exit status of the script: 1
        if something failed.

        Args:
            shortfalls: lines that say where rates are below their targets.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(format_table(self.rows))
        for line in memory_lines(self.memory):
            print(line)
        for line in [*shortfalls, *memory_shortfalls(self.memory)] if self.is_judged else ():
            print(f"BELOW {line}")
        print(
            f"{self.benchmark}: {len(self.rows)} measurements in {time.perf_counter() - self.started:.0f} s on "
            f"{self.same['gpu']}, memset {self.memset_gbps:.0f} GB/s, {self.path}"
        )
        for failure in self.failures:
            print(f"FAILED {failure}", flush=True)
        return 1 if self.failures else 0


# ---- targets -------------------------------------------------------------------------------------------------------

TARGET_COLUMNS = ("target_gbps", "met")  # Scripts whose rates have targets write these columns.
MOST_WANTED = 0.95  # No target is above this share of what the hardware allows.


def judged(gbps, wanted, allowed_gbps=math.inf):
    """Returns the values of TARGET_COLUMNS. wanted: the target in GB/s, or None. allowed_gbps: what the hardware
    allows."""
    wanted = min(wanted, MOST_WANTED * allowed_gbps) if wanted else None
    return {"target_gbps": four_digits(wanted), "met": "yes" if gbps >= wanted else "no"} if wanted else {}


def allowed_beside(raw_gbps, raw_ideal_gbps, ideal_gbps):
    """Returns the GB/s that the link allows compressed rows, given the rate of raw rows with the same code: it grows by
    the same factor as the ideal rate."""
    return raw_gbps * ideal_gbps / raw_ideal_gbps


def missed(rows):
    """Returns lines that say where a target is missed."""
    return [
        f"{row['case']} {row['dtype']}, {row['row_bytes']} B, {row['arm']}, {row['sms']} SMs: {row['gbps']} GB/s, "
        f"wanted {row['target_gbps']}"
        for row in rows
        if row.get("met") == "no"
    ]


# ---- memory --------------------------------------------------------------------------------------------------------


def _path_name(row):
    return f"{row['case']} {row['dtype']}, {row['row_bytes']} B, {row['arm']}"


def metadata_share(row):
    return int(row["index_bytes"]) / int(row["original_bytes"])


def of_tables(memory):
    """Returns the rows of memory.csv that describe the metadata of a table on the GPU, if its rows are long enough for
    the limit."""
    return [row for row in memory if row["index_bytes"] != "" and int(row["row_bytes"]) >= METADATA_ROW_BYTES]


def memory_lines(memory):
    """Yields lines on the largest share of metadata and the largest temporary."""
    if tables := of_tables(memory):
        most = max(tables, key=metadata_share)
        yield (
            f"metadata on the GPU: at most {100 * metadata_share(most):.2f} % of the original bytes, "
            f"rows from {METADATA_ROW_BYTES} B ({_path_name(most)})"
        )
    if own := [row for row in memory if row["index_bytes"] != "" and row["peak_bytes"] != ""]:
        most = max(own, key=lambda row: int(row["peak_bytes"]))
        yield f"temporaries on the GPU: at most {int(most['peak_bytes']) / 2**20:.1f} MiB ({_path_name(most)})"


def memory_shortfalls(memory):
    for row in of_tables(memory):
        if metadata_share(row) > MAX_METADATA_SHARE:
            share = f"{100 * metadata_share(row):.2f} % of the original bytes"
            yield f"{_path_name(row)}: metadata is {share}, wanted {100 * MAX_METADATA_SHARE:g} % at most"
    for row in memory:
        if row["index_bytes"] != "" and row["peak_bytes"] != "" and int(row["peak_bytes"]) > MAX_TEMPORARY_BYTES:
            taken = f"{int(row['peak_bytes']) / 2**20:.1f} MiB"
            yield f"{_path_name(row)}: temporaries of {taken}, wanted {MAX_TEMPORARY_BYTES >> 20} at most"


# ---- the table printed last ----------------------------------------------------------------------------------------


def format_table(rows):
    """Returns a table with one line per case and row size and one column per arm: GB/s, and in brackets the percentage
    of the ideal."""
    arms, lines, savings = [], {}, {}
    for row in rows:
        arm = row["arm"] + (f" {row['sms']} SMs" if row["sms"] else "")
        if arm not in arms:
            arms.append(arm)
        key = (row["case"], str(row["row_bytes"]), row["dtype"])
        share = 100 * float(row["gbps"]) / float(row["ideal_gbps"])
        lines.setdefault(key, {})[arm] = f"{row['gbps']} ({share:.0f})"
        if not float(savings.get(key, 0)):  # The savings are those of the first arm that compresses.
            savings[key] = row["savings"]
    cells = [["case", "row_bytes", "dtype", "savings", *arms]]
    cells += [[*key, savings[key], *(values.get(arm, "") for arm in arms)] for key, values in lines.items()]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in cells)
