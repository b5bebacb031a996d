"""How fast do the rows of a table change: update_, append and refit?

    python -m benchmarks.changes [--out DIR] [--device cpu] [--quick]

The table has 256 MiB of BF16 in rows of 512 B. It is in device memory, or in pinned memory with the new rows on the
GPU; without a GPU it is in pageable memory. Arms: `update_` of random rows, each at most once; `append` of a block of a
sixteenth of the table; `refit`; and `index_copy_`, torch's update of the raw tensor in the same memory. Whole calls are
timed with the wall clock; `us` is the time of one. Every table is decompressed and compared with a tensor to which
torch made the same changes.
"""

import sys

import torch

import ibp

from . import codec, families, harness, ideal, inputs

COLUMNS = ("us",)
TABLE_BYTES, QUICK_TABLE_BYTES = 256 * inputs.MIB, inputs.MIB // 4
COLUMNS_OF_ROW, DTYPE = 256, torch.bfloat16
NUM_UPDATED = (1, 1000, 100_000)
APPENDED_SHARE = 16
NEAR, PINNED, PAGEABLE = "device memory", "pinned memory", "pageable memory"


class Case:
    """A table in one kind of memory, and the tensor that it should hold."""

    def __init__(self, run, place, x, ideal_of):
        self.run, self.place, self.x = run, place, x
        home = x if place == NEAR else x.cpu()
        self.table = ibp.compress(
            home, scheme="planes", memory=None if place == PINNED else "host" if not home.is_cuda else None
        )
        self.raw = home if place == NEAR else home.pin_memory() if place == PINNED else home
        self.ideal_gbps = ideal_of(self.table)

    def new_rows(self, num_rows):
        return families.weights(num_rows, COLUMNS_OF_ROW, self.run.device).to(DTYPE)

    def record(self, arm, num_rows, seconds):
        row_bytes = self.table.row_bytes
        self.run.add(
            case=f"{self.place}, {num_rows:,} rows",
            arm=arm,
            rows=num_rows,
            row_bytes=row_bytes,
            dtype=DTYPE,
            savings=self.table.savings,
            gbps=num_rows * row_bytes * 1e-9 / seconds,
            ideal_gbps=self.ideal_gbps,
            sms=None if self.run.on_gpu else 0,
            us=harness.four_digits(1e6 * seconds),
        )

    def check(self, want, what):
        harness.check_bits(ibp.decompress(self.table, device=want.device), want, f"{self.place}, {what}")


def measure_updates(case, num_rows):
    """Measures updates of random rows in the table and in the raw tensor, which both get the same changes."""
    run = case.run
    with run.cell(f"{case.place}, update_ of {num_rows} rows"):
        sets = [
            (torch.randperm(len(case.raw), device=run.device)[:num_rows], case.new_rows(num_rows)) for _ in range(2)
        ]
        raw_sets = [(ids.to(case.raw.device), rows.to(case.raw.device)) for ids, rows in sets]
        updates = [lambda ids=ids, rows=rows: case.table.update_(ids, rows) for ids, rows in sets]
        copies = [lambda ids=ids, rows=rows: case.raw.index_copy_(0, ids, rows) for ids, rows in raw_sets]
        for update, copy in zip(updates, copies):
            update(), copy()
        case.check(case.raw, f"update_ of {num_rows} rows")
        case.record("update_", num_rows, run.seconds(updates, wall=True))
        case.record("index_copy_", num_rows, run.seconds(copies, wall=True))
        for update, copy in zip(updates, copies):  # Both tensors end with the same set of rows.
            update(), copy()


def measure_append(case):
    run, num_rows = case.run, len(case.raw) // APPENDED_SHARE
    with run.cell(f"{case.place}, append"):
        rows = case.new_rows(num_rows)
        case.table.append(rows)
        case.check(torch.cat([case.raw, rows.to(case.raw.device)]), "append")
        case.record("append", num_rows, run.seconds([lambda: case.table.append(rows)], wall=True))


def measure_refit(case):
    with case.run.cell(f"{case.place}, refit"):
        held = case.table.decompress()
        seconds = case.run.seconds([case.table.refit], wall=True)
        case.check(held, "refit")
        case.record("refit", len(case.table), seconds)


def places(run, rates):
    """Returns (place, function(table) -> ideal GB/s of a table there) for each place."""

    def near_gbps(table):
        num_bytes = ideal.original_bytes(table)
        return ideal.device_gbps(num_bytes, num_bytes + table.stored_bytes, rates.copy_gbps)

    if not run.on_gpu:
        return [(PAGEABLE, near_gbps)]
    link_gbps = ideal.MACHINE.copy_out_gbps
    return [(NEAR, near_gbps), (PINNED, lambda table: link_gbps * ideal.original_bytes(table) / table.stored_bytes)]


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("changes", args, COLUMNS)
    torch.manual_seed(0)
    rates = codec.DeviceRates(run)
    num_rows = (QUICK_TABLE_BYTES if run.quick else TABLE_BYTES) // (COLUMNS_OF_ROW * DTYPE.itemsize)
    for place, ideal_of in places(run, rates):
        with run.cell(place):
            x = families.weights(num_rows, COLUMNS_OF_ROW, run.device).to(DTYPE)
            case = Case(run, place, x, ideal_of)
            for updated in sorted({min(count, num_rows) for count in NUM_UPDATED}):
                measure_updates(case, updated)
            measure_append(case)
            measure_refit(case)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
