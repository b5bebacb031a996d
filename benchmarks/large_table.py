"""How fast do random rows come out of tables that are so large that address translation is the bottleneck, by path?

    python -m benchmarks.large_table [--out DIR] [--device cpu] [--quick]

Tables of 4 and 16 GiB of BF16 N(0, 0.02) are in pinned memory. They have 1 GiB of distinct rows, which are compressed
on the GPU and repeated until the table is full. Because each row can be decoded alone, this is a table like any other.
Arms: raw and compressed rows that the GPU fetches in the given order, pre-sorted (sorting is not timed) and bucketed
(timed with its partition); the partition alone; the CPU's path; and what torch does: x[ids].to("cuda"), and
index_select into pinned chunks, which are copied meanwhile.
"""

import sys

import torch

import ibp
from ibp._fetch import host_gather
from ibp._machine import calibration, memory
from ibp._rows import handle

from . import harness, ideal, inputs

GIB = 1 << 30
# Each table has (GiB, bytes of a row, numbers of ids).
TABLES = ((4, 128, (1_000_000,)), (16, 512, (100_000, 1_000_000)))
QUICK_TABLES = ((16 / 1024, 128, (20_000,)), (16 / 1024, 512, (500, 2_000)))
NUM_SETS = 2
CHUNK_BYTES, NUM_CHUNKS = 8 << 20, 3
DTYPE = torch.bfloat16


def tiled(table, num_rows, buffer):
    """Returns a table that repeats a table's rows until there are num_rows of them. Its slots are in the buffer, which
    is pinned if there is a GPU."""
    times = num_rows // table.num_rows
    slots = buffer[: times * table.slots.numel()]
    for part in slots.split(max(1, table.slots.numel())):
        part.copy_(table.slots)
    overflow = table.overflow.cpu().repeat(times)
    overflow = memory.to_pinned(overflow) if buffer.is_pinned() else overflow
    starts = torch.arange(times).mul_(table.overflow.numel()).view(-1, 1)
    bases = (table.bases.cpu().view(1, -1) + starts).view(-1) if table.bases.numel() else table.bases.cpu()
    return ibp.CompressedTensor(
        shape=(num_rows, *table.shape[1:]),
        dtype=table.dtype,
        scheme=table.scheme,
        row_bytes=table.row_bytes,
        slot_bytes=table.slot_bytes,
        slots=slots,
        overflow=overflow,
        lengths=table.lengths.cpu().repeat(times),
        bases=bases,
        codebook=table.codebook,
    )


class Fetches:
    """Several sets of ids, as they are drawn and sorted, on the GPU and on the CPU, with outputs and the rows that
    these must have."""

    def __init__(self, run, gib, x, num_rows, num_ids):
        self.run, self.x, self.num_rows, self.case = run, x, num_rows, f"{gib:g} GiB, {num_ids:,} ids"
        self.cpu_ids = [torch.randint(num_rows, (num_ids,)) for _ in range(NUM_SETS)]
        self.ids = [ids.to(run.device) for ids in self.cpu_ids]
        self.sorted_ids = [ids.sort().values for ids in self.ids]
        self.outs = [torch.empty(num_ids, x.shape[1], dtype=x.dtype, device=run.device) for _ in range(NUM_SETS)]
        self.output_bytes = num_ids * x.shape[1] * x.dtype.itemsize

    def wanted(self, ids):
        return self.x[ids.to(self.x.device) % len(self.x)]

    def distinct_rows(self):
        """Returns the ids of all sets as rows of the table that is repeated."""
        return torch.cat(self.cpu_ids) % len(self.x)

    def cell(self, arm):
        return self.run.cell(f"{self.case}, {arm}")

    def measure(
        self,
        arm,
        ids,
        call,
        *,
        savings,
        ideal_gbps,
        sms=None,
        wall=False,
        table=None,
        makes_result=False,
        buffer_bytes=0,
    ):
        """Checks and measures an arm. call(k) fetches set k, whose ids are ids[k], and returns the result. table: the
        table it fetches from, None for torch's own arms. buffer_bytes: device memory that the arm keeps from call to
        call."""
        with self.cell(arm):
            harness.poison(self.outs[0])
            result, peak_bytes = self.run.peak_bytes(lambda: call(0), out=None if makes_result else self.outs[0])
            harness.check_bits(result, self.wanted(ids[0]), f"{self.case}, {arm}")
            self.run.add_memory(
                case=self.case,
                arm=arm,
                row_bytes=self.x.shape[1] * self.x.dtype.itemsize,
                dtype=self.x.dtype,
                peak_bytes=None if peak_bytes is None else peak_bytes + buffer_bytes,
                output_bytes=self.output_bytes,
                original_bytes=self.num_rows * self.x.shape[1] * self.x.dtype.itemsize,
                table=table,
            )
            self.add(arm, [lambda k=k: call(k) for k in range(NUM_SETS)], savings, ideal_gbps, sms, wall)

    def add(self, arm, calls, savings, ideal_gbps, sms, wall):
        gbps = self.output_bytes * 1e-9 / self.run.seconds(calls, wall)
        self.run.add(
            case=self.case,
            arm=arm,
            rows=len(self.ids[0]),
            row_bytes=self.x.shape[1] * self.x.dtype.itemsize,
            dtype=self.x.dtype,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=sms,
        )


def measure_table(run, kind, table, savings, link_gbps, fetches):
    """Measures every path out of one table. link_gbps: the ideal rate of a kernel that fetches its rows over the
    link."""

    def fetching(ids, path, sms=None):
        return lambda k: ibp.index_select(table, ids[k], out=fetches.outs[k], path=path, max_sms=sms)

    few = (
        handle.bucketed_sms(table, calibration.in_force(run.device), run.num_sms) or None
    )  # The bucketed path chooses this many SMs. Pre-sorted ids get as many, which is faster than all.
    arms = (
        {
            "": (fetches.ids, "gpu", None),
            " pre-sorted": (fetches.sorted_ids, "gpu", few),
            " bucketed": (fetches.ids, "bucketed", few),
        }
        if run.on_gpu
        else {"": (fetches.ids, None, None)}
    )
    for arm, (ids, path, sms) in arms.items():
        fetches.measure(
            f"{kind}{arm}", ids, fetching(ids, path, sms), savings=savings, ideal_gbps=link_gbps, sms=sms, table=table
        )
    if not run.on_gpu:
        return
    copy_gbps = min(ideal.LINK_COPY_GBPS / (1 - savings), run.memset_gbps)
    for arm, path in (("cpu path", "cpu"), ("chosen, ids on the CPU", None)):
        fetches.measure(
            f"{kind}, {arm}",
            fetches.cpu_ids,
            fetching(fetches.cpu_ids, path),
            savings=savings,
            ideal_gbps=copy_gbps,
            wall=True,
            table=table,
            buffer_bytes=host_gather.RING_BYTES,
        )


def measure_partition(table, savings, link_gbps, fetches):
    """Measures the partition alone, as if its ids were rows. This shows how much faster it is than the fetch that it is
    for."""
    num_items = table.shape[0]
    bits = handle.window_bits(num_items, handle.spread_bytes(table))
    calls = [lambda k=k: torch.ops.ibp.partition_ids(fetches.ids[k], num_items, bits) for k in range(NUM_SETS)]
    with fetches.cell("partition alone"):
        fetches.add("partition alone", calls, savings, link_gbps, None, False)


class Chunks:
    """Pinned chunks that the CPU fills while the copy engine empties others."""

    def __init__(self, run, columns):
        rows = max(1, CHUNK_BYTES // (columns * DTYPE.itemsize))
        self.memory = [torch.empty(rows, columns, dtype=DTYPE, pin_memory=True) for _ in range(NUM_CHUNKS)]
        self.events = [torch.cuda.Event() for _ in range(NUM_CHUNKS)]

    def fetch(self, host, ids, out):
        rows = len(self.memory[0])
        for i, first in enumerate(range(0, len(ids), rows)):
            event, some = self.events[i % NUM_CHUNKS], ids[first : first + rows]
            event.synchronize()
            chunk = self.memory[i % NUM_CHUNKS][: len(some)]
            torch.index_select(host, 0, some, out=chunk)
            out[first : first + len(some)].copy_(chunk, non_blocking=True)
            event.record()
        return out


def measure_torch(run, host, fetches):
    """Measures what torch does with the raw rows in pinned memory, with all cores of the CPU."""
    arms = {"x[ids].to": lambda k: host[fetches.cpu_ids[k]].to(run.device)}
    if run.on_gpu:
        chunks = Chunks(run, host.shape[1])
        arms["cpu pinned chunks + copy"] = lambda k: chunks.fetch(host, fetches.cpu_ids[k], fetches.outs[k])
    for arm, call in arms.items():
        fetches.measure(
            arm,
            fetches.cpu_ids,
            call,
            savings=0.0,
            ideal_gbps=ideal.LINK_COPY_GBPS,
            sms=0,
            wall=True,
            makes_result=arm == "x[ids].to",
        )


def run_table(run, buffer, gib, row_bytes, numbers_of_ids):
    """Measures one table, raw and compressed, with every number of ids."""
    num_rows = int(gib * GIB) // row_bytes
    num_distinct = min(GIB, int(gib * GIB) // 4) // row_bytes
    x = inputs.normal_rows(num_distinct * row_bytes, DTYPE, 0.02, run.device, columns=row_bytes // DTYPE.itemsize)
    every = [Fetches(run, gib, x, num_rows, num_ids) for num_ids in numbers_of_ids]
    for scheme in ("raw", "planes"):
        small = ibp.compress(x, scheme=scheme, layout="slots")
        ideals = [
            ideal.gather_gbps(
                fetches.output_bytes * NUM_SETS, ideal.row_link_ns(small, fetches.distinct_rows()), run.memset_gbps
            )
            for fetches in every
        ]
        table, savings = tiled(small, num_rows, buffer), small.savings
        del small
        if run.on_gpu and not table.is_pinned():
            raise AssertionError(f"{gib:g} GiB, {scheme}: the table is not in pinned memory")
        for fetches, link_gbps in zip(every, ideals):
            measure_table(run, scheme, table, savings, link_gbps, fetches)
            if scheme == "raw":
                measure_torch(run, table.slots.view(DTYPE).view(num_rows, -1), fetches)
            else:
                measure_partition(table, savings, link_gbps, fetches)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("large_table", args)
    torch.manual_seed(0)
    tables = QUICK_TABLES if run.quick or not run.on_gpu else TABLES
    buffer = memory.empty(int(max(gib for gib, _, _ in tables) * GIB), torch.device("cpu"), pin=run.on_gpu)
    for gib, row_bytes, numbers_of_ids in tables:
        with run.cell(f"{gib:g} GiB, {row_bytes} B"):
            run_table(run, buffer, gib, row_bytes, numbers_of_ids)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
