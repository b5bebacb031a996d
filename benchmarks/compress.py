"""How long does a whole call of `ibp.compress` take, including the choice of scheme and codebook?

    python -m benchmarks.compress [--inplace [GB] [--count]] [--out DIR] [--device cpu] [--quick]

Tensors have 64 elements to 4 GiB; at 128 MiB there are values of every kind. Arms: `on the GPU`; `pinned`, from pinned
host memory to a pinned table with the GPU; `pageable`, the same without pinned memory; `on the CPU`; and `copy_`, a
copy of the same bytes in the same memory. Whole calls are timed with the wall clock; `ms` is the time of one. Each is
checked by a round trip.

--inplace measures only `compress(inplace=True)` of a table in host memory, of 174 GB (10^9 bytes) if no size is given,
which is the largest table of Invariant Bit Packing. Rows are those of FP16 N(0, 0.02) with 768 columns; 1 GiB of them
is distinct and repeated by all cores, in huge pages if the system gives them. Arms: `in place, pageable`; `pinning`, of
the same memory at its address; and `in place, pinned`. With --count the codebook is learned as the paper learns it,
from all rows, with the best of all thresholds for all chunks of 4 bytes: of a pageable table by the CPU, because the
table does not fit the GPU's memory, and of a pinned one by the GPU, where the rows are. `learn_ms` is the part of the
arm's `ms` that this takes. The table is filled anew before each arm, and each arm is called once. Rows of other runs
stay.

`checked_rows` is how many rows were decoded and compared afterwards, blocks from all over the table, for at most
CHECK_S seconds an arm. `host_gb` is the most host memory that the process had until the end of the arm, the table and
all that CUDA maps included, and `device_gb` the most that torch's allocator handed out during the call. A run needs
host memory for the table and 8 GB. A run of 174 GB is expected to take at most 200 s on a machine of two H200, filling
included.
"""

import argparse
import os
import resource
import sys
import time

import torch

import ibp
from ibp._machine import memory

from . import families, harness, ideal, inputs

COLUMNS = ("ms", *harness.TARGET_COLUMNS, "learn_ms", "checked_rows", "host_gb", "device_gb")
MANY_BYTES, LARGE_BYTES, HOST_BYTES = 128 * inputs.MIB, 4096 * inputs.MIB, 1024 * inputs.MIB
QUICK_BYTES = inputs.MIB // 4
GPU, PINNED, PAGEABLE, CPU, COPY = "on the GPU", "pinned", "pageable", "on the CPU", "copy_"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL_ELEMENTS = (64, 1024, 1 << 19)  # These tensors have one dimension.
# Each set has (name, dtype, columns, function that returns float rows).
SETS = (
    ("normal 0.02", BF16, 1024, families.weights),
    ("normal 0.02", BF16, 64, families.weights),
    ("normal 0.02", FP16, 1024, families.weights),
    ("normal 1", FP32, 1024, families.normal),
    ("normal, a scale a column", FP32, 128, families.scaled_columns),
    ("normal 1", torch.float8_e4m3fn, 1024, families.normal),
    ("half zeros", BF16, 1024, families.masked),
    ("ReLU, 70 % zeros", BF16, 1024, families.clipped(0.7)),
    ("zeros of both signs", BF16, 1024, families.multiplied),
)
REAL = ("LLM keys", "pubmed", "citeseer")
OF_CPU = (0, 3, 6)  # The CPU is measured on these indices of SETS.

# --inplace: sizes in GB, columns of FP16, distinct bytes, bytes of a block that is checked, and bytes beside the table.
INPLACE_GB, QUICK_INPLACE_GB, INPLACE_COLUMNS = 174.0, 0.02, 768
DISTINCT_BYTES, QUICK_DISTINCT_BYTES = 1 << 30, inputs.MIB
BLOCK_BYTES, QUICK_BLOCK_BYTES, BESIDE_BYTES, CHECK_S = 128 * inputs.MIB, inputs.MIB // 4, 8e9, 5.0
IN_PLACE, FILLING, PINNING = "in place, ", "in place, filling", "in place, pinning"
COUNTED = ", all rows counted"

SMALL_MS, SMALL_BYTES = 1.0, 4096  # A tensor of fewer bytes should take at most this many milliseconds.
# Targets: milliseconds for 128 MiB and GB/s for 4 GiB on the GPU, GB/s from pinned memory, and GB/s of one core.
MANY_MS, LARGE_GBPS, PINNED_GBPS, CORE_GBPS = 5.0, 300.0, 30.0, 1.0


def target(arm, num_bytes, threads):
    """Returns the GB/s that a call should reach, or None if there is no target."""
    if arm in (GPU, CPU) and num_bytes < SMALL_BYTES:
        return num_bytes / SMALL_MS / 1e6
    if arm == GPU and num_bytes >= LARGE_BYTES:
        return LARGE_GBPS
    if arm == GPU and num_bytes >= 0.9 * MANY_BYTES:
        return num_bytes / MANY_MS / 1e6
    if arm == PINNED and num_bytes >= 0.9 * MANY_BYTES:
        return PINNED_GBPS
    return CORE_GBPS * threads if arm == CPU and num_bytes >= inputs.MIB else None


def record(run, case, arm, x, seconds, savings, ideal_gbps, **extra):
    num_bytes = x.numel() * x.dtype.itemsize
    gbps = num_bytes * 1e-9 / seconds
    run.add(
        case=case,
        arm=arm,
        rows=len(x),
        row_bytes=num_bytes // len(x),
        dtype=x.dtype,
        savings=savings,
        gbps=gbps,
        ideal_gbps=ideal_gbps,
        sms=None if arm == GPU else 0,
        ms=harness.four_digits(1e3 * seconds),
        **harness.judged(gbps, target(arm, num_bytes, torch.get_num_threads())),
        **extra,
    )


def measure(run, case, arm, x, ideal_gbps, **arguments):
    """Checks a round trip, then times calls."""
    with run.cell(f"{case} {harness.dtype_name(x.dtype)}, {arm}"):
        table = ibp.compress(x, **arguments)
        harness.check_bits(ibp.decompress(table), x, f"{case}, {arm}")
        savings = table.savings
        del table
        seconds = run.seconds([lambda: ibp.compress(x, **arguments)], wall=True)
        record(run, case, arm, x, seconds, savings, ideal_gbps)


def measure_copy(run, case, x):
    """Measures a copy beside the tensor and returns its GB/s."""
    other = torch.empty_like(x)
    seconds = run.seconds([lambda: other.copy_(x)], wall=True)
    gbps = x.numel() * x.dtype.itemsize * 1e-9 / seconds
    record(run, case, f"{COPY} {CPU if x.device.type == 'cpu' else GPU}", x, seconds, 0.0, gbps)
    return gbps


def measure_near(run, case, x):
    """Measures compression in the tensor's own memory: on the GPU, or without one on the CPU."""
    copy_gbps = measure_copy(run, case, x)
    if run.on_gpu:
        measure(run, case, GPU, x, copy_gbps)
    else:
        measure(run, case, CPU, x, copy_gbps, device="cpu", memory="host")


def measure_cpu(run, case, x):
    """Measures compression with only the CPU, on a machine with a GPU."""
    if run.on_gpu:
        host = x.cpu()
        measure(run, case, CPU, host, measure_copy(run, case, host), device="cpu", memory="host")


def measure_host(run, case, x):
    """Measures compression from host memory to host memory with the GPU."""
    if run.on_gpu:
        host = x.cpu()
        measure(run, case, PAGEABLE, host, ideal.LINK_COPY_GBPS, memory="host")
        measure(run, case, PINNED, host.pin_memory(), ideal.LINK_COPY_GBPS)


def table(run, case, num_bytes):
    """Returns (name with its size, rows on the device) of one of SETS."""
    name, dtype, columns, make = case
    num_rows = max(1, num_bytes // (columns * dtype.itemsize))
    step = max(1, MANY_BYTES // (4 * columns))  # This many rows are made as FP32 at once.
    parts = [make(min(step, num_rows - first), columns, run.device).to(dtype) for first in range(0, num_rows, step)]
    return f"{name}, {size_name(num_rows * columns * dtype.itemsize)}", torch.cat(parts)


def size_name(num_bytes):
    shift, unit = next((shift, unit) for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if num_bytes >> shift)
    return f"{num_bytes / (1 << shift):.0f} {unit}"


def run_small(run):
    """Measures tensors with one dimension. Most tensors of a model are of this kind."""
    for num_elements in SMALL_ELEMENTS:
        x = (0.02 * torch.randn(num_elements, device=run.device)).to(BF16)
        case = f"normal 0.02, {num_elements:,} elements"
        measure_near(run, case, x)
        measure_cpu(run, case, x)


def run_sets(run, data_dir):
    num_bytes = QUICK_BYTES if run.quick else MANY_BYTES
    for i, case in enumerate(SETS):
        name, x = table(run, case, num_bytes)
        measure_near(run, name, x)
        if i in OF_CPU:
            measure_cpu(run, name, x)
    for name, rows in inputs.real_sets(data_dir):
        if name in REAL:
            x = inputs.replicated(rows, max(1, num_bytes // (rows.shape[1] * rows.dtype.itemsize)), run.device)
            measure_near(run, f"{name}, {size_name(num_bytes)}", x)


def run_large(run):
    if run.on_gpu and not run.quick:
        measure_near(run, *table(run, SETS[0], LARGE_BYTES))
        measure_host(run, *table(run, SETS[0], HOST_BYTES))


class InPlace:
    """A table in pageable host memory that is compressed in place by one arm after the other.

    Attributes:
        x: the table, FP16 [rows, INPLACE_COLUMNS]. Row number i is source[i % len(source)].
        source: the distinct rows, in host memory and on the device.
    """

    def __init__(self, run, gb):
        self.run, self.case = run, f"normal 0.02, {gb:g} GB"
        row_bytes = INPLACE_COLUMNS * FP16.itemsize
        self.block_rows = (QUICK_BLOCK_BYTES if run.quick else BLOCK_BYTES) // row_bytes
        distinct = (QUICK_DISTINCT_BYTES if run.quick else DISTINCT_BYTES) // row_bytes // self.block_rows
        made = (families.weights(self.block_rows, INPLACE_COLUMNS, run.device).to(FP16) for _ in range(distinct))
        self.near = torch.cat([*made])
        self.source = self.near.cpu()
        self.x = memory.empty_tensor((int(gb * 1e9) // row_bytes, INPLACE_COLUMNS), FP16)

    def timed(self, call):
        """Returns (the call's result, seconds)."""
        self.run.sync()
        began = time.perf_counter()
        result = call()
        self.run.sync()
        return result, time.perf_counter() - began

    def fill(self):
        for part in self.x.split(len(self.source)):
            part.copy_(self.source[: len(part)])

    def record(self, arm, seconds, savings=0.0, ideal_gbps=ideal.LINK_COPY_GBPS, **extra):
        host_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9
        extra["host_gb"] = harness.four_digits(host_gb)
        record(self.run, self.case, arm, self.x, seconds, savings, ideal_gbps, **extra)
        print(
            f"{arm}: {seconds:.1f} s, {len(self.x) / seconds:,.0f} rows/s, {host_gb:.1f} GB of host memory", flush=True
        )

    def check(self, table, arm):
        """Compares blocks of rows from all over the table until CHECK_S seconds are over. Returns the number of rows
        that were compared."""
        starts = range(0, len(self.x), self.block_rows)
        began, checked = time.perf_counter(), 0
        for block in torch.randperm(len(starts)).tolist():
            first = starts[block]
            ids, place = torch.arange(first, min(first + self.block_rows, len(self.x))), first % len(self.source)
            got = ibp.index_select(table, ids, device=self.run.device)
            harness.check_bits(got, self.near[place : place + len(ids)], f"{self.case}, {arm}, rows from {first:,}")
            checked += len(ids)
            if time.perf_counter() - began > CHECK_S:
                break
        return checked

    def measure(self, arm, learn, **arguments):
        """Measures a call. learn: returns a codebook, or None if the call learns one."""
        with self.run.cell(f"{self.case}, {arm}"):
            if self.run.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            codebook, learn_s = self.timed(learn)
            table, seconds = self.timed(lambda: ibp.compress(self.x, inplace=True, codebook=codebook, **arguments))
            device_gb = torch.cuda.max_memory_allocated() * 1e-9 if self.run.on_gpu else None
            if table.scheme == "raw" or table.slots.data_ptr() != self.x.data_ptr():
                raise AssertionError(f"{self.case}, {arm}: wanted coded rows in the memory of x, got {table}")
            self.record(
                arm,
                learn_s + seconds,
                table.savings,
                learn_ms="" if codebook is None else harness.four_digits(1e3 * learn_s),
                checked_rows=self.check(table, arm),
                device_gb="" if device_gb is None else harness.four_digits(device_gb),
            )

    def learn_from_all(self):
        """Returns a codebook as the paper's code learns it: from all rows, by the GPU if they are pinned."""
        device = memory.canonical(self.run.device)
        x = memory.seen_from(device, self.x) if self.x.is_pinned() else self.x
        return ibp.codecs.analyze(x, sample=1.0, chunk_bytes=inputs.CHUNK_BYTES, paper=True, device=x.device)

    def compare(self, counts):
        """Measures compression in pageable memory, then in the same memory, pinned. counts: whether codebooks are
        learned from all rows."""
        learn, suffix = (self.learn_from_all, COUNTED) if counts else (lambda: None, "")
        _, seconds = self.timed(self.fill)
        self.record(FILLING + suffix, seconds)
        self.measure(IN_PLACE + PAGEABLE + suffix, learn, memory="host")
        if self.run.on_gpu:
            with self.run.cell(f"{self.case}, pinned"):
                self.pinned, seconds = self.timed(lambda: memory.pin_in_place(self.x.view(-1).view(torch.uint8)))
                self.record(PINNING + suffix, seconds)
                self.fill()
                self.measure(IN_PLACE + PINNED + suffix, learn)


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--inplace", type=float, nargs="?", const=0.0, metavar="GB")
    own.add_argument("--count", action="store_true")
    options, others = own.parse_known_args(argv)
    return options, harness.parse_args(others, __doc__)


def run_in_place(run, gb, counts):
    held, wanted = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), gb * 1e9 + BESIDE_BYTES
    if wanted > held:
        sys.exit(f"{gb:g} GB in place need {wanted / 1e9:.0f} GB of memory, and this machine has {held / 1e9:.0f}: "
                 "name fewer after --inplace")  # fmt: skip
    InPlace(run, gb).compare(counts)


def option_of(arm):
    """Returns the options with which an arm of the CSV is measured."""
    return ("inplace", arm.endswith(COUNTED)) if arm.startswith(IN_PLACE) else ("", False)


def main(argv=None):
    options, args = parsed(argv)
    option = ("", False) if options.inplace is None else ("inplace", options.count)
    run = harness.Run("compress", args, COLUMNS, keep=lambda row: option_of(row["arm"]) != option)
    torch.manual_seed(0)
    print(f"the CPU: {torch.get_num_threads()} threads")
    if options.inplace is not None:
        small = run.quick or not run.on_gpu
        run_in_place(run, options.inplace or (QUICK_INPLACE_GB if small else INPLACE_GB), options.count)
    else:
        run_small(run)
        run_sets(run, args.data)
        run_large(run)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
