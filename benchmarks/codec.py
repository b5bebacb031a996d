"""How fast are decoding, encoding and analysis from device memory, next to a device copy and a memset?

    python -m benchmarks.codec [--out DIR] [--device cpu] [--quick]

Tables of 256 MiB, several times the L2 cache, in the slots layout. GB/s of original bytes, the copy's of bytes copied.
`encode` is the kernels alone, `compress` and the analyses whole Python calls with their allocations and synchronisations.
"""

import sys

import torch

import ibp

from . import harness, ideal, inputs

ANALYZED_SAVINGS = 0.5  # the one synthetic savings at which analysis is timed too: its time hardly depends on them
SWEEP_SAMPLE = 0.1  # of the rows, for the analysis that sweeps thresholds and chunk sizes
TAU = 0.8
FEW_SMS = 8


def data_bytes(run):
    return (4 if run.quick else 256) * inputs.MIB


class DeviceRates:
    """The rates of a copy and a memset of the size that the codec works on, measured in this run."""

    def __init__(self, run):
        size = data_bytes(run)
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=run.device)
        target = torch.empty_like(source)
        self.copy_gbps = size * 1e-9 / run.seconds([lambda: target.copy_(source)])
        harness.check_bits(target, source, "copy_")
        self.memset_gbps = size * 1e-9 / run.seconds([target.zero_])
        for arm, gbps in (("copy_", self.copy_gbps), ("memset", self.memset_gbps)):
            run.add(case="device", arm=arm, rows=1, row_bytes=size, dtype=torch.uint8, savings=0.0, gbps=gbps,
                    ideal_gbps=gbps, sms=None)


class Case:
    """One tensor in device memory under one name, and where its measurements go."""

    def __init__(self, run, rates, name, x):
        self.run, self.rates, self.name, self.x = run, rates, name, x
        self.num_bytes = x.numel() * x.dtype.itemsize
        self.row_bytes = self.num_bytes // len(x)
        self.out = torch.empty_like(x)
        self.scheme = "ibp"

    def check(self, table, arm):
        """Decodes a table on poisoned output and compares it with x."""
        harness.poison(self.out)
        harness.check_bits(ibp.decompress(table, out=self.out), self.x, f"{self.name}, {arm}")

    def time(self, arm, call, savings, ideal_gbps, sms=None, wall=False):
        arm = arm if self.scheme == "ibp" else f"{self.scheme} {arm}"
        self.run.add(case=self.name, arm=arm, rows=len(self.x), row_bytes=self.row_bytes, dtype=self.x.dtype, savings=savings,
                     gbps=self.num_bytes * 1e-9 / self.run.seconds([call], wall), ideal_gbps=ideal_gbps, sms=sms)


def measure_decode(case, table, moved_bytes):
    case.check(table, "decode")
    ideal_gbps = ideal.device_gbps(case.num_bytes, moved_bytes, case.rates.copy_gbps, case.rates.memset_gbps)
    for sms in (None, FEW_SMS) if case.run.on_gpu else (None,):

        def decode(sms=sms):
            ibp.decompress(table, out=case.out, max_sms=sms)

        case.time("decode", decode, table.savings, ideal_gbps, sms)


def measure_encode(case, table, moved_bytes):
    """The kernels alone: rows measured and coded into the table's own memory."""
    codebook, data = table.codebook, case.x.view(torch.uint8).view(-1)
    words, fault = codebook.words(table.device), torch.zeros(4, dtype=torch.int64, device=table.device)

    def encode():
        lengths = torch.ops.ibp.measure_rows(data, words, codebook.codec)
        torch.ops.ibp.encode_rows(table.slots, table.overflow, lengths, table.bases, words, codebook.codec, table.slot_bytes, 0,
                                  len(case.x), case.row_bytes, data, fault)

    for coded in (table.slots, table.overflow):
        harness.poison(coded)
    encode()
    case.check(table, "encode")
    case.time("encode", encode, table.savings, ideal.device_gbps(case.num_bytes, moved_bytes, case.rates.copy_gbps))


def measure_kernels(case, table, moved_bytes):
    """What `compress` and `analyze` spend on the device: each pass over the data by itself."""
    codebook, data = table.codebook, case.x.view(torch.uint8).view(-1)
    words = codebook.words(table.device)
    reading = ideal.device_gbps(case.num_bytes, case.num_bytes, case.rates.copy_gbps)
    case.time("measure_rows", lambda: torch.ops.ibp.measure_rows(data, words, codebook.codec), table.savings, reading)
    if codebook.scheme == "ibp":
        case.time("count_bits", lambda: torch.ops.ibp.count_bits(data, case.row_bytes), table.savings, reading)
        case.time("count_hits", lambda: torch.ops.ibp.count_hits(data, words, codebook.codec), table.savings, reading)


def measure_compress(case, table, moved_bytes):
    def compress():
        return ibp.compress(case.x, codebook=table.codebook, layout="slots")

    case.check(compress(), "compress")
    case.time("compress", compress, table.savings, ideal.device_gbps(case.num_bytes, moved_bytes, case.rates.copy_gbps))


def measure_codec(case, codebook):
    """Decoding and encoding under a given codebook. They move the coded rows' sectors and the original bytes."""
    table = ibp.compress(case.x, codebook=codebook, layout="slots")
    case.scheme = codebook.scheme
    moved_bytes = ideal.SECTOR_BYTES * int(ideal.row_sectors(table).sum()) + case.num_bytes
    # Where nothing is saved, nothing is encoded.
    for measure in (measure_decode, measure_encode, measure_kernels, measure_compress) if table.scheme != "raw" else (measure_decode,):
        with case.run.cell(f"{case.name}, {case.row_bytes} B, {measure.__name__}"):
            measure(case, table, moved_bytes)


def measure_analysis(case):
    """One threshold on all rows, and the sweep of a sample; checked by what they are for, a round trip."""

    def one_threshold():
        return ibp.analyze(case.x, sample=1.0, chunk_bytes=inputs.CHUNK_BYTES, tau=TAU)

    def sweep():
        return ibp.analyze(case.x, sample=SWEEP_SAMPLE)

    for arm, analyze, share in (("analyze", one_threshold, 1.0), ("analyze, sweep", sweep, SWEEP_SAMPLE)):
        table = ibp.compress(case.x, codebook=analyze())
        case.check(table, arm)
        case.time(arm, analyze, table.savings, ideal.device_gbps(case.num_bytes, share * case.num_bytes, case.rates.copy_gbps))


def measure_host(case, codebook):
    """Compression from host memory to host memory and analysis of host memory, beside the copies that bound them: the link for pinned data,
    x.to("cuda") for pageable. Whole calls by the wall clock: `compress` allocates its table, and pins it."""
    run = case.run
    if not run.on_gpu:
        return
    far = {"pageable": case.x.cpu(), "pinned": case.x.cpu().pin_memory()}
    for place, x in far.items():
        pin = place == "pinned"
        calls = {
            "to(cuda)": lambda: x.to(run.device, non_blocking=True),
            "compress": lambda: ibp.compress(x, codebook=codebook, layout="slots", device=run.device, pin_memory=pin),
            "analyze": lambda: ibp.analyze(x, sample=1.0, chunk_bytes=inputs.CHUNK_BYTES, tau=TAU, device=run.device),
        }
        table = calls["compress"]()
        case.check(table, f"compress, {place}")
        for arm, call in calls.items():
            case.time(f"{arm}, {place}", call, table.savings, ideal.LINK_COPY_GBPS, wall=True)


def run_synthetic(run, rates):
    for row_bytes in inputs.QUICK_ROW_BYTES if run.quick else inputs.ROW_BYTES:
        for savings in inputs.QUICK_SAVINGS if run.quick else inputs.SAVINGS:
            name = f"synthetic {100 * savings:g}%"
            with run.cell(f"{name}, {row_bytes} B"):
                mask, bitval = inputs.synthetic_mask(row_bytes, savings)
                x = inputs.agreeing_rows(data_bytes(run) // row_bytes, mask, bitval, run.device)
                case = Case(run, rates, name, x)
                measure_codec(case, ibp.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES))
                if savings == ANALYZED_SAVINGS:
                    measure_analysis(case)


def run_found(run, rates, name, x):
    """A table whose codebook is found by analysis, as a user's is."""
    with run.cell(f"{name} {harness.dtype_name(x.dtype)}"):
        case = Case(run, rates, name, x)
        measure_codec(case, ibp.analyze(x, sample=None))
        measure_analysis(case)
        codebook = ibp.analyze(x, scheme="planes", sample=None)
        measure_codec(case, codebook)
        with run.cell(f"{name} {harness.dtype_name(x.dtype)}, host memory"):
            measure_host(case, codebook)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("codec", args)
    torch.manual_seed(0)
    rates = DeviceRates(run)
    run_synthetic(run, rates)
    for name, dtype, deviation in inputs.NORMAL:
        run_found(run, rates, name, inputs.normal_rows(data_bytes(run), dtype, deviation, run.device))
    for name, rows in inputs.real_sets(args.data):
        num_rows = data_bytes(run) // (rows.shape[1] * rows.dtype.itemsize)
        run_found(run, rates, name, inputs.replicated(rows, num_rows, run.device))
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
