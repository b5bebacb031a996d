"""How much smaller does the memory of nets in training become if more of their rows may leave their slots?

    python -m benchmarks.thresholds [--nets NAME,NAME] [--out DIR] [--device cpu] [--quick]

For Buddy Compression's figures 3, 7 and 9 this profiles ten snapshots, one step apart, of each program of
`spill.py --programs` with a small batch, in single precision. Rows have 2 KiB, or 128 bytes, as the paper's entries.
`thresholds.csv` has, by threshold and kinds of slots as in spill.py, how many times smaller the slots and the index are
(`ratio`), how many times smaller the rows are in whole sectors (`best_ratio`), the share of all rows that leave their
slots in the mean of the snapshots, in the least and in the most, and the share of the original bytes that the index
takes. It counts sampled rows, and needs no GPU.
"""

import argparse
import sys

import torch

import ibp

from . import bpc, densities, entries, harness, ratio, spill

COLUMNS = "program,row_bytes,slots,threshold,ratio,best_ratio,spilled,least_spilled,most_spilled,index,commit".split(
    ","
)
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


def snapshots(device, name, quick):
    """Yields what a program holds after each of its first steps."""
    program = spill.Program(device, name, quick, entries.BATCH)
    for _ in range(2 if quick else spill.NUM_SNAPSHOTS):
        program.step()
        yield in_rows(program.snapshot(spill.PROGRAM_ROW_BYTES if quick else spill.PROGRAM_LEAST_BYTES))


def with_rows(report, row_bytes):
    """Returns the profile of the rows of one size."""
    tensors = {name: tensor for name, tensor in report.items() if tensor.row_bytes == row_bytes}
    return ibp.spill.Profile(tensors, report.threshold, report.num_snapshots)


def record(sheet, program, report):
    for row_bytes in ROW_BYTES:
        for slots, threshold, of in spill.placements(with_rows(report, row_bytes), SWEEP):
            shares, num_rows = list(spill.spilled_by_snapshot(of)), sum(tensor.num_rows for tensor in of.values())
            index = of.device_bytes - sum(tensor.num_rows * tensor.slot_bytes for tensor in of.values())
            sheet.add(
                program=program, row_bytes=row_bytes, slots=slots, threshold=f"{threshold:g}",
                ratio=f"{of.ratio:.4f}", best_ratio=f"{of.best_ratio:.4f}", spilled=f"{of.rows:.4f}",
                least_spilled=f"{min(shares):.4f}", most_spilled=f"{max(shares):.4f}",
                index=f"{index / (num_rows * row_bytes):.5f}",
            )  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nets", type=lambda text: text.split(","))
    own, others = parser.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    sheet = densities.sheet_with_others(args.out / "thresholds.csv", COLUMNS, "program", own.nets)
    for name in spill.PROGRAMS if own.nets is None else own.nets:
        try:
            record(sheet, name, ibp.spill.profile(snapshots(torch.device(args.device), name, args.quick)))
        except Exception as error:
            sheet.failed(name, error)
        print(name, flush=True)
    shown = ("program", "row_bytes", "slots", "threshold", "ratio", "spilled")
    lines = [[str(row[name]) for name in shown] for row in sheet.rows]
    ratio.print_lines("Times smaller, and the rows that leave their slots", list(shown), lines, 3)
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
