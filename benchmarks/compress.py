"""How long does a whole call of `ibp.compress` take, including the choice of scheme and codebook?

    python -m benchmarks.compress [--out DIR] [--device cpu] [--quick]

Tensors have 64 elements to 4 GiB; at 128 MiB there are values of every kind. Arms: `on the GPU`; `pinned`, from pinned
host memory to a pinned table with the GPU; `pageable`, the same without pinned memory; `on the CPU`; and `copy_`, a
copy of the same bytes in the same memory. Whole calls are timed with the wall clock; `ms` is the time of one. Each is
checked by a round trip.
"""

import sys

import torch

import ibp

from . import families, harness, ideal, inputs

COLUMNS = ("ms", *harness.TARGET_COLUMNS)
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


def record(run, case, arm, x, seconds, savings, ideal_gbps):
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


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("compress", args, COLUMNS)
    torch.manual_seed(0)
    print(f"the CPU: {torch.get_num_threads()} threads")
    run_small(run)
    run_sets(run, args.data)
    run_large(run)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
