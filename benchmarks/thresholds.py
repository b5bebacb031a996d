"""How much smaller does the memory of nets in training become if more of their rows may leave their slots?

    python -m benchmarks.thresholds [--batches] [--nets NAME,NAME] [--out DIR] [--device cpu] [--quick]

For Buddy Compression's figures 3, 7 and 9 this profiles ten snapshots, one step apart, of each program of
`spill.py --programs` with a small batch, in single precision. Rows have 2 KiB, or 128 bytes, as the paper's entries.
`thresholds.csv` has, by threshold and kinds of slots as in spill.py, how many times smaller the slots and the index are
(`ratio`), how many times smaller the rows are in whole sectors (`best_ratio`), the share of all rows that leave their
slots in the mean of the snapshots, in the least and in the most, and the share of the original bytes that the index
takes. It counts sampled rows, and needs no GPU.

`--batches` is for the paper's section 3.4, which profiles a small run and then places a larger one: the codebooks and
the slots of a profile with a batch of 2 receive the rows of ten snapshots with a batch of 16. `batches.csv` has the
same columns for this (`profiled_batch` 2) and, beside it, for a profile of the larger batch itself (`profiled_batch`
16). A tensor counts if it has at least 1 MiB with the larger batch.

--nets measures only the named nets and keeps the rows of the others.
"""

import argparse
import dataclasses
import sys

import torch

import ibp
from ibp._rows import geometry
from ibp._rows.codebook import surveyed

from . import bpc, densities, entries, harness, ratio, spill

COLUMNS = "program,row_bytes,slots,threshold,ratio,best_ratio,spilled,least_spilled,most_spilled,index,commit".split(
    ","
)
SMALL_BATCH, LARGE_BATCH = 2, 16
BATCH_COLUMNS = [*COLUMNS[:-1], "batch", "profiled_batch", "commit"]
SAMPLED_BYTES = 1 << 20  # Of each tensor of a snapshot, `ibp.spill.profile` and `measuring` look at this many bytes.
ROW_BYTES = (spill.PROGRAM_ROW_BYTES, bpc.ENTRY_BYTES)
SWEEP = (0.1, 0.2, 0.3, 0.4)


def in_rows(snapshot):
    """Returns the tensors of a snapshot in rows of every size of ROW_BYTES, {"size, name": tensor}. Bytes behind the
    last row of 2 KiB are left out."""
    found = {}
    for name, x in snapshot.items():
        data = x.reshape(-1)[: x.nbytes // max(ROW_BYTES) * max(ROW_BYTES) // x.itemsize]
        found |= {f"{row_bytes}, {name}": data.view(-1, row_bytes // x.itemsize) for row_bytes in ROW_BYTES}
    return found


def snapshots(device, name, quick, batch, smallest=1.0):
    """Yields what a program holds after each of its first steps. smallest: the share of spill.PROGRAM_LEAST_BYTES that
    a tensor must have."""
    program = spill.Program(device, name, quick, batch)
    least_bytes = spill.PROGRAM_ROW_BYTES if quick else spill.PROGRAM_LEAST_BYTES
    for _ in range(2 if quick else spill.NUM_SNAPSHOTS):
        program.step()
        yield in_rows(program.snapshot(smallest * least_bytes))


def with_rows(report, row_bytes):
    """Returns the profile of the rows of one size."""
    tensors = {name: tensor for name, tensor in report.items() if tensor.row_bytes == row_bytes}
    return ibp.spill.Profile(tensors, report.threshold, report.num_snapshots)


def measuring(report, moments, found):
    """Yields other snapshots of the tensors of a profile, whose sizes may differ. Codes rows of each snapshot with the
    profile's codebooks, and adds their sizes to `found`, a dict with a TensorProfile for each tensor."""
    for k, snapshot in enumerate(moments):
        for name, x in snapshot.items():
            own = report[name]
            rows = geometry.sample(geometry.bytes_of(x), own.row_bytes, SAMPLED_BYTES // own.row_bytes, seed=k)
            sizes = tuple(surveyed(rows, own.codebook).sectors.tolist())
            before = found[name].histograms if name in found else ()
            found[name] = dataclasses.replace(own, num_bytes=x.nbytes, histograms=(*before, sizes))
        yield snapshot


def in_slots_of(report, chosen):
    """Returns a profile with the slots that another profile of the same tensors has."""
    tensors = {name: dataclasses.replace(own, slot_bytes=chosen[name].slot_bytes) for name, own in report.items()}
    return ibp.spill.Profile(tensors, chosen.threshold, report.num_snapshots)


def record(sheet, program, report, placed=None, **batches):
    """Adds the rows of a program. report: the profile that chooses the slots. placed: the profile of the rows that lie
    in them; None: the same."""
    for row_bytes in ROW_BYTES:
        for slots, threshold, of in spill.placements(with_rows(report, row_bytes), SWEEP):
            if placed is not None:
                of = in_slots_of(with_rows(placed, row_bytes), of)
            shares, num_rows = list(spill.spilled_by_snapshot(of)), sum(tensor.num_rows for tensor in of.values())
            index = of.device_bytes - sum(tensor.num_rows * tensor.slot_bytes for tensor in of.values())
            sheet.add(
                program=program, row_bytes=row_bytes, slots=slots, threshold=f"{threshold:g}",
                ratio=f"{of.ratio:.4f}", best_ratio=f"{of.best_ratio:.4f}", spilled=f"{of.rows:.4f}",
                least_spilled=f"{min(shares):.4f}", most_spilled=f"{max(shares):.4f}",
                index=f"{index / (num_rows * row_bytes):.5f}", **batches,
            )  # fmt: skip


def record_batches(sheet, program, device, quick):
    """Adds the rows of a program with a large batch, in slots that profiles of either batch choose."""
    small = ibp.spill.profile(snapshots(device, program, quick, SMALL_BATCH, SMALL_BATCH / LARGE_BATCH))
    found = {}
    large = ibp.spill.profile(measuring(small, snapshots(device, program, quick, LARGE_BATCH), found))
    small = ibp.spill.Profile({name: small[name] for name in large}, small.threshold, small.num_snapshots)
    placed = ibp.spill.Profile(found, small.threshold, large.num_snapshots)
    record(sheet, program, small, placed, batch=LARGE_BATCH, profiled_batch=SMALL_BATCH)
    record(sheet, program, large, batch=LARGE_BATCH, profiled_batch=LARGE_BATCH)


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nets", type=lambda text: text.split(","))
    parser.add_argument("--batches", action="store_true")
    own, others = parser.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    file, columns = ("batches.csv", BATCH_COLUMNS) if own.batches else ("thresholds.csv", COLUMNS)
    sheet = densities.sheet_with_others(args.out / file, columns, "program", own.nets)
    device = torch.device(args.device)
    for name in spill.PROGRAMS if own.nets is None else own.nets:
        try:
            if own.batches:
                record_batches(sheet, name, device, args.quick)
            else:
                record(sheet, name, ibp.spill.profile(snapshots(device, name, args.quick, entries.BATCH)))
        except Exception as error:
            sheet.failed(name, error)
        print(name, flush=True)
    profiled = ("profiled_batch",) if own.batches else ()
    shown = ("program", "row_bytes", "slots", "threshold", *profiled, "ratio", "spilled")
    lines = [[str(row[name]) for name in shown] for row in sheet.rows]
    ratio.print_lines("Times smaller, and the rows that leave their slots", list(shown), lines, len(shown) - 3)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
