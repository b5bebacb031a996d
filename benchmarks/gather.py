"""How fast do random rows come from pinned host memory, by row size and savings?

    python -m benchmarks.gather [--out DIR] [--device cpu] [--quick]

100,000 random rows (fewer where rows are long) of a table of at most 0.5 GiB, which address translation does not bind. Arms: slots of both
schemes, the paper's in-place layout, raw rows by the same kernel, and the CPU gathering before a copy.
"""

import sys

import torch

import ibp

from . import harness, ideal, inputs

NUM_IDS = 100_000
FEW_SMS = 8


class Fetches:
    """Ids, outputs and a pinned staging buffer for tables of one shape, in as many sets as pass the L2 cache."""

    def __init__(self, run, num_rows, columns, dtype):
        num_ids = min(NUM_IDS, num_rows)
        self.output_bytes = num_ids * columns * dtype.itemsize
        num_sets = run.rotation(self.output_bytes)
        self.ids = [torch.randperm(num_rows, device=run.device)[:num_ids].clone() for _ in range(num_sets)]
        self.outs = [torch.empty(num_ids, columns, dtype=dtype, device=run.device) for _ in range(num_sets)]
        self.cpu_ids = [ids.cpu() for ids in self.ids]
        self.staging = torch.empty(num_ids, columns, dtype=dtype, pin_memory=run.on_gpu)

    def all_ids(self):
        return torch.cat(self.cpu_ids)


def table_bytes(run, row_bytes):
    """Original bytes of a table: room for NUM_IDS different rows if 0.5 GiB gives it."""
    if run.quick:
        return 8 * inputs.MIB
    return (256 if row_bytes <= 2048 else 512) * inputs.MIB


def measure(run, case, arm, x, fetches, call, *, savings, ideal_gbps, sms=None, wall=False):
    """Checks one arm on poisoned output, then times it. call(k): fetches set k and returns the result."""
    harness.poison(fetches.outs[0])
    harness.check_bits(call(0), torch.index_select(x, 0, fetches.ids[0]), f"{case}, {arm}")
    calls = [lambda k=k: call(k) for k in range(len(fetches.ids))]
    gbps = fetches.output_bytes * 1e-9 / run.seconds(calls, wall)
    run.add(case=case, arm=arm, rows=len(fetches.ids[0]), row_bytes=x.shape[1] * x.dtype.itemsize, dtype=x.dtype,
            savings=savings, gbps=gbps, ideal_gbps=ideal_gbps, sms=sms)


def table_ideal(run, table, fetches):
    all_ids = fetches.all_ids()
    return ideal.gather_gbps(fetches.output_bytes * len(fetches.ids), ideal.row_sectors(table, all_ids), run.memset_gbps)


def measure_table(run, case, arm, table, x, fetches):
    """One table, fetched by all SMs and by few."""
    if run.on_gpu and not table.is_pinned:
        raise AssertionError(f"{arm}: the table is not in pinned memory")
    ideal_gbps = table_ideal(run, table, fetches)
    for sms in (None, FEW_SMS) if run.on_gpu else (None,):

        def call(k):
            return ibp.index_select(table, fetches.ids[k], out=fetches.outs[k], max_sms=sms)

        measure(run, case, arm, x, fetches, call, savings=table.savings, ideal_gbps=ideal_gbps, sms=sms)


def measure_coded(run, case, x, host, codebook, fetches):
    """Slots, and for scheme ibp the paper's in-place layout too."""
    row_bytes = x.shape[1] * x.dtype.itemsize
    arms = {f"{codebook.scheme} slots": None} | ({"ibp in place": row_bytes} if codebook.scheme == "ibp" else {})
    for arm, slot_bytes in arms.items():
        with run.cell(f"{case}, {row_bytes} B, {arm}"):
            table = ibp.compress(host, codebook=codebook, layout="slots", slot_bytes=slot_bytes)
            measure_table(run, case, arm, table, x, fetches)


def measure_found(run, case, rows, x, host, fetches):
    """Raw rows, and both schemes with codebooks found by analysis of `rows`, as a user's are."""
    measure_raw(run, case, x, host, fetches)
    for scheme in ("ibp", "planes"):
        measure_coded(run, case, x, host, ibp.analyze(rows, scheme=scheme, sample=None), fetches)


def measure_raw(run, case, x, host, fetches):
    """What users do without compression: the same kernel on raw rows, and the CPU's gather before a copy."""
    with run.cell(f"{case}, raw rows"):
        table = ibp.compress(host, scheme="raw")
        measure_table(run, case, "raw rows", table, x, fetches)

    def index_and_copy(k):
        return host[fetches.cpu_ids[k]].to(run.device)

    def stage_and_copy(k):
        torch.index_select(host, 0, fetches.cpu_ids[k], out=fetches.staging)
        return fetches.outs[k].copy_(fetches.staging, non_blocking=True)

    # The link's ideal for whole rows, by the copy engine.
    for arm, call in (("cpu index + copy", index_and_copy), ("cpu pinned + copy", stage_and_copy)):
        with run.cell(f"{case}, {arm}"):
            measure(run, case, arm, x, fetches, call, savings=0.0, ideal_gbps=ideal.LINK_COPY_GBPS, sms=0, wall=True)


class HostBuffer:
    """One pinned buffer that holds the raw rows of one table after the other."""

    def __init__(self, run):
        size = max(table_bytes(run, row_bytes) for row_bytes in inputs.ROW_BYTES)
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=run.on_gpu)

    def hold(self, x):
        """x's values in the buffer, as a tensor of x's shape."""
        view = self.bytes[: x.numel() * x.dtype.itemsize].view(x.dtype).view(x.shape)
        return view.copy_(x)


def run_synthetic(run, buffer):
    for row_bytes in inputs.QUICK_ROW_BYTES if run.quick else inputs.ROW_BYTES:
        num_rows = table_bytes(run, row_bytes) // row_bytes
        fetches = Fetches(run, num_rows, row_bytes // 4, torch.int32)
        for i, savings in enumerate(inputs.QUICK_SAVINGS if run.quick else inputs.SAVINGS):
            case = f"synthetic {100 * savings:g}%"
            with run.cell(f"{case}, {row_bytes} B"):
                mask, bitval = inputs.synthetic_mask(row_bytes, savings)
                x = inputs.agreeing_rows(num_rows, mask, bitval, run.device)
                host = buffer.hold(x)
                if i == 0:
                    measure_raw(run, "synthetic", x, host, fetches)
                codebook = ibp.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES)
                measure_coded(run, case, x, host, codebook, fetches)


def run_normal(run, buffer):
    """BF16 weights as a network starts with them, in rows of several sizes."""
    for row_bytes in inputs.QUICK_ROW_BYTES if run.quick else inputs.NORMAL_ROW_BYTES:
        with run.cell(f"normal 0.02, {row_bytes} B"):
            x = inputs.normal_rows(table_bytes(run, row_bytes), torch.bfloat16, 0.02, run.device, columns=row_bytes // 2)
            measure_found(run, "normal 0.02", x, x, buffer.hold(x), Fetches(run, len(x), x.shape[1], x.dtype))


def run_real(run, buffer, data_dir):
    for name, rows in inputs.real_sets(data_dir):
        with run.cell(f"{name} {harness.dtype_name(rows.dtype)}"):
            row_bytes = rows.shape[1] * rows.dtype.itemsize
            num_rows = table_bytes(run, row_bytes) // row_bytes
            x = inputs.replicated(rows, num_rows, run.device)
            host = buffer.hold(x)
            fetches = Fetches(run, num_rows, rows.shape[1], rows.dtype)
            measure_found(run, name, rows.to(run.device), x, host, fetches)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("gather", args)
    torch.manual_seed(0)
    buffer = HostBuffer(run)
    run_synthetic(run, buffer)
    run_normal(run, buffer)
    run_real(run, buffer, args.data)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
