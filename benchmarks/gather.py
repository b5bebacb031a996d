"""How fast do random rows come from pinned host memory, by row size and savings?

    python -m benchmarks.gather [--out DIR] [--device cpu] [--quick]

Up to 100,000 random rows are fetched from a table of at most 256 MiB, which is small enough that address translation is
no bottleneck. Arms: slots of both schemes, the paper's in-place layout, raw rows with the same kernel, and the CPU,
which gathers before or while it copies. Rates below their target are printed last, as BELOW.
"""

import csv
import itertools
import sys
from pathlib import Path

import torch

import ibp

from . import harness, ideal, inputs
from .cpu_gather import PipelinedGather

NUM_IDS = 100_000
MAIN_DTYPE, OTHER_ROW_BYTES = torch.bfloat16, (512, 2048)  # Normal tables of other dtypes have only these row sizes.
FEW_SMS = 8
SMS = {"ibp": (None,), "planes": (None, FEW_SMS), "raw": (None, FEW_SMS)}
# The synthetic table with these savings is also measured in the paper's layout.
IN_PLACE_SAVINGS = 0.5
SAMPLE = 0.1  # Codebooks of normal tables are learned from this share of the rows.
PAPER_RATES = Path(__file__).with_name("reference_rates.csv")


class Fetches:
    """Ids and outputs for tables of one shape. There are so many sets that they do not fit the L2 cache."""

    def __init__(self, run, num_rows, columns, dtype):
        num_ids = min(NUM_IDS, num_rows)
        self.output_bytes = num_ids * columns * dtype.itemsize
        num_sets = run.rotation(self.output_bytes)
        self.ids = [torch.randperm(num_rows, device=run.device)[:num_ids].clone() for _ in range(num_sets)]
        self.outs = [torch.empty(num_ids, columns, dtype=dtype, device=run.device) for _ in range(num_sets)]
        self.cpu_ids = [ids.cpu() for ids in self.ids]


def table_bytes(run, row_bytes):
    """Returns the original bytes of a table: 128 MiB for rows up to 1 KiB, which holds NUM_IDS different rows, and 256
    MiB for longer rows. Larger tables would take too long."""
    if run.quick:
        return 2 * inputs.MIB
    return (128 if row_bytes <= 1024 else 256) * inputs.MIB


def measure(run, case, arm, x, fetches, call, *, savings, ideal_gbps, sms=None, wall=False, table=None):
    """Checks an arm on poisoned output, then times it. call(k) fetches set k, into its output or into a new one."""
    row_bytes = x.shape[1] * x.dtype.itemsize
    harness.poison(fetches.outs[0])
    makes_result = arm == "cpu index + copy"
    result, peak_bytes = run.peak_bytes(lambda: call(0), out=None if makes_result else fetches.outs[0])
    harness.check_bits(result, torch.index_select(x, 0, fetches.ids[0]), f"{case}, {arm}")
    if sms is None or table is None:
        run.add_memory(
            case=case,
            arm=arm,
            row_bytes=row_bytes,
            dtype=x.dtype,
            peak_bytes=peak_bytes,
            output_bytes=fetches.output_bytes,
            original_bytes=x.numel() * x.dtype.itemsize,
            table=table,
        )
    calls = [lambda k=k: call(k) for k in range(len(fetches.ids))]
    gbps = fetches.output_bytes * 1e-9 / run.seconds(calls, wall)
    run.add(
        case=case,
        arm=arm,
        rows=len(fetches.ids[0]),
        row_bytes=row_bytes,
        dtype=x.dtype,
        savings=savings,
        gbps=gbps,
        ideal_gbps=ideal_gbps,
        sms=sms,
    )


def table_ideal(run, table, fetches):
    return ideal.gather_gbps(
        fetches.output_bytes * len(fetches.ids), ideal.row_link_ns(table, torch.cat(fetches.ids)), run.memset_gbps
    )


def measure_table(run, case, arm, table, x, fetches, sms_counts):
    """Measures one table, which is fetched with all SMs and with few."""
    if run.on_gpu and not table.is_pinned():
        raise AssertionError(f"{arm}: the table is not in pinned memory")
    ideal_gbps = table_ideal(run, table, fetches)
    for sms in sms_counts if run.on_gpu else (None,):

        def call(k):
            return ibp.index_select(table, fetches.ids[k], out=fetches.outs[k], max_sms=sms)

        measure(run, case, arm, x, fetches, call, savings=table.savings, ideal_gbps=ideal_gbps, sms=sms, table=table)


def measure_coded(run, case, x, host, codebook, fetches, slot_bytes=None):
    """Measures the slots of a codebook. slot_bytes: that of the paper's layout, or None."""
    scheme, row_bytes = codebook.scheme, x.shape[1] * x.dtype.itemsize
    arm = f"{scheme} slots" if slot_bytes is None else f"{scheme} in place"
    with run.cell(f"{case}, {row_bytes} B, {arm}"):
        table = ibp.compress(host, codebook=codebook, layout="slots", slot_bytes=slot_bytes)
        measure_table(run, case, arm, table, x, fetches, SMS[scheme] if slot_bytes is None else (None,))


def measure_found(run, case, rows, x, host, fetches, sample=None):
    """Measures raw rows, and both schemes with codebooks that analysis of `rows` finds, as for a user."""
    measure_raw(run, case, x, host, fetches)
    for scheme in ("ibp", "planes"):
        with run.cell(f"{case}, analysis, {scheme}"):
            measure_coded(run, case, x, host, ibp.codecs.analyze(rows, scheme=scheme, sample=sample), fetches)


def measure_raw(run, case, x, host, fetches):
    """Measures fetches without compression: the same kernel on raw rows, and the CPU, which gathers before or while it
    copies."""
    with run.cell(f"{case}, raw rows"):
        measure_table(run, case, "raw rows", ibp.compress(host, scheme="raw"), x, fetches, SMS["raw"])
    pipelined = PipelinedGather(host, len(fetches.cpu_ids[0]), run.device)

    def index_and_copy(k):
        return host[fetches.cpu_ids[k]].to(run.device)

    def gather_and_copy(k):
        return pipelined(fetches.cpu_ids[k], fetches.outs[k])

    # The ideal is the copy engine's rate for whole rows.
    for arm, call in (("cpu index + copy", index_and_copy), ("cpu pipelined", gather_and_copy)):
        with run.cell(f"{case}, {arm}"):
            measure(run, case, arm, x, fetches, call, savings=0.0, ideal_gbps=ideal.LINK_COPY_GBPS, sms=0, wall=True)


class HostBuffer:
    """A pinned buffer for the raw rows of one table after the other."""

    def __init__(self, run, size):
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=run.on_gpu)

    def hold(self, x):
        """Copies x to the buffer. Returns the copy as a tensor of x's shape."""
        view = self.bytes[: x.numel() * x.dtype.itemsize].view(x.dtype).view(x.shape)
        return view.copy_(x)


def row_sizes(run):
    return inputs.QUICK_ROW_BYTES if run.quick else inputs.ROW_BYTES


def run_synthetic(run, buffer):
    every_savings = inputs.QUICK_SAVINGS if run.quick else inputs.SAVINGS
    for row_bytes, savings in run.some(itertools.product(row_sizes(run), every_savings)):
        case = f"synthetic {100 * savings:g}%"
        with run.cell(f"{case}, {row_bytes} B"):
            num_rows = table_bytes(run, row_bytes) // row_bytes
            fetches = Fetches(run, num_rows, row_bytes // 4, torch.int32)
            mask, bitval = inputs.synthetic_mask(row_bytes, savings)
            x = inputs.agreeing_rows(num_rows, mask, bitval, run.device)
            host = buffer.hold(x)
            if savings == every_savings[0]:
                measure_raw(run, "synthetic", x, host, fetches)
            codebook = ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES)
            for slot_bytes in (None, row_bytes) if savings == IN_PLACE_SAVINGS else (None,):
                measure_coded(run, case, x, host, codebook, fetches, slot_bytes)


def run_normal(run, buffer):
    """Measures random values as in a network's initial weights, in rows of every size."""
    cases = (
        (*kind, row_bytes)
        for kind in inputs.NORMAL
        for row_bytes in (row_sizes(run) if run.quick or kind[1] == MAIN_DTYPE else OTHER_ROW_BYTES)
    )
    for name, dtype, deviation, row_bytes in run.some(cases):
        with run.cell(f"{name} {harness.dtype_name(dtype)}, {row_bytes} B"):
            x = inputs.normal_rows(
                table_bytes(run, row_bytes), dtype, deviation, run.device, columns=row_bytes // dtype.itemsize
            )
            measure_found(run, name, x, x, buffer.hold(x), Fetches(run, len(x), x.shape[1], x.dtype), SAMPLE)


def run_real(run, buffer, data_dir):
    for name, rows in run.some(inputs.real_sets(data_dir)):
        with run.cell(f"{name} {harness.dtype_name(rows.dtype)}"):
            row_bytes = rows.shape[1] * rows.dtype.itemsize
            num_rows = table_bytes(run, row_bytes) // row_bytes
            x = inputs.replicated(rows, num_rows, run.device)
            host = buffer.hold(x)
            fetches = Fetches(run, num_rows, rows.shape[1], rows.dtype)
            measure_found(run, name, rows.to(run.device), x, host, fetches)


# ---- what the rates should be --------------------------------------------------------------------------------------

# These rows have only a few dozen bytes, so that the bottleneck is writing the output.
LISTED_GBPS = {"citeseer": 1000.0}
RAW_TOLERANCE = 0.02


def wanted_share(row):
    """Returns the target as a share of the ideal, by scheme, row size, savings and SMs, or None if there is no
    target."""
    row_bytes, savings, few = row["row_bytes"], float(row["savings"]), row["sms"] == FEW_SMS
    if row["arm"] == "planes slots" and few and row["case"] not in LISTED_GBPS:
        return 0.97 if row_bytes >= 1024 else 0.95 if row_bytes >= 512 else 0.92 if row_bytes >= 256 else None
    if row["arm"] == "ibp slots" and row["sms"] > FEW_SMS and row["case"].startswith("synthetic"):
        if savings > 0.6:
            return 0.85 if row_bytes >= 1024 else None
        return 0.95 if row_bytes >= 512 else 0.90 if row_bytes >= 256 else None
    return None


def paper_rates(path=PAPER_RATES):
    """Returns {(row_bytes, savings): GB/s} of rows that the paper's own code fetches."""
    with open(path, newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (int(row["row_bytes"]), float(row["savings"])): float(row["gbps"]) for row in rows if row["path"] == "rows"
        }


def shortfalls(rows, paper):
    """Returns lines that say where tables with compressed rows are slower than their target."""
    raw = {
        (row["case"], row["dtype"], row["row_bytes"], row["sms"]): float(row["gbps"])
        for row in rows
        if row["arm"] == "raw rows"
    }
    found = []
    for row in rows:
        if not row["arm"].endswith(" slots"):
            continue
        is_synthetic, gbps, ideal_gbps = (
            row["case"].startswith("synthetic"),
            float(row["gbps"]),
            float(row["ideal_gbps"]),
        )
        same_rows = raw.get(("synthetic" if is_synthetic else row["case"], row["dtype"], row["row_bytes"], row["sms"]))
        share = wanted_share(row)
        wanted = {"raw rows less 2 %": same_rows and (1 - RAW_TOLERANCE) * same_rows}
        if share:
            wanted[f"{100 * share:g} % of the ideal"] = share * ideal_gbps
        if row["sms"] > FEW_SMS and is_synthetic:
            wanted["the paper's code"] = paper.get(
                (row["row_bytes"], float(row["case"].removeprefix("synthetic ").removesuffix("%")) / 100)
            )
        if row["sms"] > FEW_SMS and row["arm"] == "planes slots":
            wanted["what listed rows should"] = LISTED_GBPS.get(row["case"])
        found += [
            f"{row['case']} {row['dtype']}, {row['row_bytes']} B, {row['arm']}, {row['sms']} SMs: {gbps:g} GB/s, less "
            f"than {what}, "
            f"{harness.four_digits(least)}"
            for what, least in wanted.items()
            if least and gbps < least
        ]
    return found


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("gather", args)
    torch.manual_seed(0)
    print(f"the CPU's gathers: {torch.get_num_threads()} threads")
    buffer = HostBuffer(run, max(table_bytes(run, row_bytes) for row_bytes in inputs.ROW_BYTES))
    run_normal(run, buffer)
    run_synthetic(run, buffer)
    run_real(run, buffer, args.data)
    return run.finish(shortfalls(run.rows, paper_rates()))


if __name__ == "__main__":
    sys.exit(main())
