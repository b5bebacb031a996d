"""How fast are bags of rows summed?

    python -m benchmarks.bags [--out DIR] [--device cpu] [--quick]

The tables are N(0, 0.02): BF16 and FP32 with rows of 128 B, 512 B and 2 KiB, and FP16 with rows of 512 B, in device
memory and in pinned memory. Ids are random; all bags of a call have 1, 10 or 50 rows. Rates count the bytes of the rows
that are added.

Arms in device memory: `ibp` is `ibp.embedding_bag`, which decodes and sums in one kernel. `raw, same code` is the same
kernel on raw rows. `torch embedding_bag` is torch's, on the raw weights. `torch rows + sum` selects rows with
torch.index_select and sums them with torch.sum. `ibp rows + sum` selects them with `ibp.index_select` and sums them in
the same way. Arms in pinned memory: `ibp, host` and `raw, host` are `ibp.embedding_bag`; `ibp rows, host` is only
`ibp.index_select`.

After the common columns, bags.csv has bag_rows, target_gbps and met. From device memory, bags should come at 1.3 times
the rate of `torch rows + sum`; from host memory, at 0.9 of what the link allows.
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

import ibp

from . import codec, harness, ideal, inputs

COLUMNS = ("bag_rows", *harness.TARGET_COLUMNS)
TABLE_BYTES, HOST_BYTES, QUICK_BYTES = 192 * inputs.MIB, 96 * inputs.MIB, inputs.MIB // 2
CALL_BYTES, HOST_CALL_BYTES = 256 * inputs.MIB, 64 * inputs.MIB  # The rows of a call have this many bytes.
BAG_ROWS = (1, 10, 50)
NUM_SETS = 3
DEVIATION = 0.02
WANTED_NEAR, WANTED_HOST = 1.3, 0.9


class Rows(NamedTuple):
    row_bytes: int
    dtype: torch.dtype


ROWS = (
    *(Rows(row_bytes, dtype) for dtype in (torch.bfloat16, torch.float32) for row_bytes in (2048, 512, 128)),
    Rows(512, torch.float16),
)
QUICK_ROWS = (Rows(512, torch.bfloat16),)


class Case:
    """A table, its raw rows, and sets of ids for bags of one size."""

    def __init__(self, run, x, call_bytes, bag_rows):
        self.run, self.x, self.bag_rows = run, x, bag_rows
        num_bags = max(1, call_bytes // x[0].nbytes // bag_rows)
        self.ids = [torch.randint(len(x), (num_bags, bag_rows), device=run.device) for _ in range(NUM_SETS)]
        self.num_bytes = self.ids[0].numel() * x[0].nbytes
        self.wanted = F.embedding_bag(self.ids[0], x, mode="sum")

    def measure(self, arm, call, ideal_gbps, savings=0.0, wanted=None, checks=True):
        """Records an arm and returns its rate.

        Args:
            call: call(ids) returns the sums.
            wanted: the target in GB/s, or None.
            checks: whether to check the bits of the sums.
        """
        where = f"{self.bag_rows} rows a bag"
        if checks:
            harness.check_bits(call(self.ids[0]), self.wanted, f"{arm}, {where}")
        gbps = self.num_bytes * 1e-9 / self.run.seconds([lambda ids=ids: call(ids) for ids in self.ids])
        self.run.add(
            case=where,
            arm=arm,
            rows=self.ids[0].numel(),
            row_bytes=self.x[0].nbytes,
            dtype=self.x.dtype,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=None if self.run.on_gpu else 0,
            bag_rows=self.bag_rows,
            **harness.judged(gbps, wanted),
        )
        return gbps


def summed(rows, ids):
    return rows.view(*ids.shape, -1).sum(1)


def measure_near(run, rates, x, table, raw, bag_rows):
    """Measures the arms in device memory."""
    case = Case(run, x, CALL_BYTES if run.is_judged else QUICK_BYTES, bag_rows)

    def allowed(savings):
        return ideal.device_gbps(case.num_bytes, case.num_bytes * (1 - savings + 1 / bag_rows), rates.copy_gbps)

    gbps = case.measure(
        "torch rows + sum", lambda ids: summed(torch.index_select(x, 0, ids.view(-1)), ids), allowed(0.0), checks=False
    )
    case.measure("torch embedding_bag", lambda ids: F.embedding_bag(ids, x, mode="sum"), allowed(0.0))
    case.measure("raw, same code", lambda ids: ibp.embedding_bag(raw, ids, mode="sum"), allowed(0.0))
    case.measure(
        "ibp rows + sum",
        lambda ids: summed(ibp.index_select(table, ids.view(-1)), ids),
        allowed(table.savings),
        table.savings,
        checks=False,
    )
    case.measure(
        "ibp",
        lambda ids: ibp.embedding_bag(table, ids, mode="sum"),
        allowed(table.savings),
        table.savings,
        WANTED_NEAR * gbps,
    )


def measure_host(run, x, tables, bag_rows):
    """Measures the arms in pinned memory."""
    case = Case(run, x, HOST_CALL_BYTES if run.is_judged else QUICK_BYTES, bag_rows)
    for name, table in tables.items():
        link_ns = ideal.row_link_ns(table, torch.cat([ids.view(-1) for ids in case.ids]).cpu())
        allowed = case.num_bytes * NUM_SETS / float(link_ns.sum())
        case.measure(
            f"{name}, host",
            lambda ids, table=table: ibp.embedding_bag(table, ids, mode="sum"),
            allowed,
            table.savings,
            WANTED_HOST * allowed,
        )
        if name == "ibp":
            rows = lambda ids: ibp.index_select(table, ids.view(-1))  # noqa: E731
            case.measure(f"{name} rows, host", rows, allowed, table.savings, checks=False)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("bags", args, COLUMNS)
    torch.manual_seed(0)
    rates = codec.DeviceRates(run)
    near_bytes, host_bytes = (TABLE_BYTES, HOST_BYTES) if run.is_judged else (QUICK_BYTES, QUICK_BYTES)
    for rows in ROWS if run.is_judged else QUICK_ROWS:
        columns = rows.row_bytes // rows.dtype.itemsize
        x = inputs.normal_rows(near_bytes, rows.dtype, DEVIATION, run.device, columns=columns)
        host = x[: host_bytes // rows.row_bytes]
        table, raw = (ibp.compress(x, scheme=scheme) for scheme in ("planes", "raw"))
        tables = {
            name: ibp.compress(host.cpu(), scheme=scheme, memory=None if run.on_gpu else "host")
            for name, scheme in (("raw", "raw"), ("ibp", "planes"))
        }
        for bag_rows in BAG_ROWS:
            with run.cell(f"{harness.dtype_name(rows.dtype)}, {rows.row_bytes} B, {bag_rows} rows a bag"):
                measure_near(run, rates, x, table, raw, bag_rows)
                measure_host(run, host, tables, bag_rows)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
