"""Is ibp slower than raw rows for any kind of rows, from host memory or in device memory, or with few SMs?

    python -m benchmarks.families [--out DIR] [--device cpu] [--quick]

Up to 100,000 random rows of a pinned table of 256 MiB are fetched in the order of the ids, with all SMs and with at
most 16 and 8: raw, compressed by scheme planes, and as `auto` stores them, always by the same kernel. The whole table
is also decoded and encoded in device memory, and compared with a copy and a memset. The kinds are BF16 in short and
long rows, rows with entries per column, elements of one byte, rows with several shares of zeros and with zeros of both
signs, and FP64. `target_gbps` is what an arm should reach, and `met` says whether it does.
"""

import functools
import sys

import torch

import ibp

from . import codec, gather, harness, ideal, inputs

TABLE_BYTES, QUICK_TABLE_BYTES = 256 * inputs.MIB, inputs.MIB
MANY_SMS, FEW_SMS = 16, 8
SMS = (None, MANY_SMS, FEW_SMS)
SAMPLE = 0.1  # The codebook is learned from this share of the rows.
NO_TARGET = ""  # A case without a target has this in place of a kind.
RAW, CODED, AUTO, DECODE, ENCODE = "raw rows", "planes slots", "auto", "planes decode", "planes encode"
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# ---- what is measured ----------------------------------------------------------------------------------------------


def normal(rows, columns, device):
    return torch.randn(rows, columns, device=device)


def doubles(rows, columns, device):
    """Returns doubles with random bits in the whole mantissa."""
    return torch.randn(rows, columns, dtype=FP64, device=device)


def weights(rows, columns, device):
    return 0.02 * normal(rows, columns, device)


def scaled_columns(rows, columns, device):
    """Returns values with a power of two as scale of each column. Trained embeddings have such scales, for which
    entries per column pay."""
    generator = torch.Generator().manual_seed(0)
    return normal(rows, columns, device) * 2.0 ** torch.randint(-8, 9, (columns,), generator=generator).to(device)


def quantised(rows, columns, device):
    """Returns integers. The largest magnitude in each row is 127."""
    x = normal(rows, columns, device)
    return (x * (127 / x.abs().amax(1, keepdim=True))).round()


def clipped(share):
    """Returns a maker of what a ReLU makes of normal values if it sets this share of them to zero."""
    threshold = 2**0.5 * float(torch.erfinv(torch.tensor(2 * share - 1.0)))
    return lambda rows, columns, device: (normal(rows, columns, device) - threshold).clamp_(min=0)


def masked(rows, columns, device, make=normal):
    """Returns values, half of them +0."""
    x = make(rows, columns, device)
    return x.masked_fill_(torch.rand_like(x) < 0.5, 0)


def multiplied(rows, columns, device):
    """Returns values, half of them zeros that keep the sign of the value. Dropout masks by a product in this way."""
    x = normal(rows, columns, device)
    return x * (torch.rand_like(x) < 0.5)


# Each case has (name, kind, dtype, columns, function that returns float rows). For the kind see `target`.
CASES = (
    *(("normal 0.02", "short", BF16, columns, weights) for columns in (64, 128, 256)),
    ("normal 0.02", "long", BF16, 32768, weights),
    ("normal, a scale a column", "columns", FP32, 128, scaled_columns),
    *(("normal 1", "bytes", dtype, columns, normal) for dtype in (E4M3, E5M2) for columns in (576, 1024)),
    *(("quantised weights", "bytes", torch.int8, columns, quantised) for columns in (576, 1024)),
    *(("half zeros", "zeros", dtype, 1024, masked) for dtype in (BF16, FP32)),
    *(
        (f"ReLU, {100 * share:.0f} % zeros", "zeros", dtype, 1024, clipped(share))
        for dtype in (BF16, FP32)
        for share in (0.3, 0.5, 0.7, 0.9)
    ),
    *(("zeros of both signs", "zeros", dtype, 1024, multiplied) for dtype in (BF16, FP32)),
    ("normal 1", NO_TARGET, FP64, 512, doubles),
    ("half zeros", NO_TARGET, FP64, 512, functools.partial(masked, make=doubles)),
)
REAL = {"LLM keys": "columns", "pubmed": "zeros"}  # These sets of inputs.REAL_SETS have these kinds.
QUICK_CASES = (0, 5, 11)  # A quick run measures these indices of CASES.


# Targets of the arms that fetch, as shares of the ideal. With few SMs some kinds have none, and the target is the rate
# of raw rows.
WANTED_SHARES = {"short": 0.95, "long": 0.97, "columns": 0.92, "bytes": 0.92, "zeros": 0.90}
# GB/s of BF16 rows of 128 B, by arm and SMs.
WANTED_OF_SHORTEST = {(CODED, None): 62.0, (CODED, FEW_SMS): 50.0, (DECODE, None): 900.0, (ENCODE, None): 500.0}
WANTED_DECODE, WANTED_ENCODE = {"bytes": 1200.0, "zeros": 1000.0}, dict.fromkeys(("short", "long", "zeros"), 800.0)
LEAST_COPIED_ROW_BYTES, COPY_SHARE = 512, 0.95  # Dense BF16 and FP32 rows decode at this share of copy_.


def target(kind, row_bytes, arm, sms, raw_gbps, ideal_gbps, copy_gbps):
    """Returns the GB/s that an arm should reach, or None if there is no target.

    Args:
        sms: 16, 8, or None for all.
        raw_gbps: rate of raw rows with the same kernel and as many SMs.
    """
    if arm in (DECODE, ENCODE) and sms is not None:
        return None
    if kind == "short" and row_bytes == 128 and arm in (CODED, DECODE, ENCODE):
        wanted = WANTED_OF_SHORTEST.get((arm, sms))
        return wanted and min(wanted, WANTED_SHARES[kind] * ideal_gbps)
    if arm == DECODE:
        is_copied = kind in ("short", "long", "columns") and row_bytes >= LEAST_COPIED_ROW_BYTES
        return COPY_SHARE * copy_gbps if is_copied else WANTED_DECODE.get(kind)
    if arm == ENCODE:
        return WANTED_ENCODE.get(kind)
    not_below_raw = (1 - gather.RAW_TOLERANCE) * raw_gbps
    if arm == AUTO:
        return not_below_raw
    if arm != CODED:
        return None
    keeps_its_share = sms is None or kind in ("short", "long") or (kind == "bytes" and sms == MANY_SMS)
    return WANTED_SHARES[kind] * ideal_gbps if keeps_its_share else not_below_raw


class Run(harness.Run):
    """A run whose rows have a target. `kind` and `raw_gbps` belong to the case that is being measured."""

    def __init__(self, args):
        super().__init__("families", args, harness.TARGET_COLUMNS)
        self.kind, self.raw_gbps = NO_TARGET, {}
        self.rates = codec.DeviceRates(self)

    def add(self, *, arm, row_bytes, gbps, ideal_gbps, sms, **others):
        if arm == RAW:
            self.raw_gbps[sms] = gbps
        wanted = None
        if self.kind:
            raw_gbps = self.raw_gbps.get(sms, 0.0)
            wanted = target(self.kind, row_bytes, arm, sms, raw_gbps, ideal_gbps, self.rates.copy_gbps)
        said = harness.judged(gbps, wanted)
        super().add(arm=arm, row_bytes=row_bytes, gbps=gbps, ideal_gbps=ideal_gbps, sms=sms, **others, **said)


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure_host(run, case, x, host, codebook):
    """Measures random rows from pinned host memory: raw, compressed, and as `auto` stores them."""
    fetches = gather.Fetches(run, len(x), x.shape[1], x.dtype)
    counts = SMS if run.on_gpu else (None,)
    for arm, arguments, sms_counts in (
        (RAW, {"scheme": "raw"}, counts),
        (CODED, {"codebook": codebook}, counts),
        (AUTO, {}, (None,)),
    ):
        with run.cell(f"{case}, {arm}"):
            gather.measure_table(run, case, arm, ibp.compress(host, **arguments), x, fetches, sms_counts)


def measure_device(run, name, x, codebook):
    """Measures decoding and encoding of the whole table in its own memory."""
    case = codec.Case(run, run.rates, name, x)
    case.kind = "planes "
    table = ibp.compress(x, codebook=codebook)
    moved_bytes = codec.read_bytes(table) + case.num_bytes
    with case.cell("decode"):
        case.check(table, DECODE)
        ideal_gbps = ideal.device_gbps(case.num_bytes, moved_bytes, run.rates.copy_gbps, run.rates.memset_gbps)
        for sms in SMS if run.on_gpu else (None,):
            case.time(
                "decode", lambda: ibp.decompress(table, out=case.out, max_sms=sms), table.savings, ideal_gbps, sms
            )
    with case.cell("encode"):
        codec.measure_encode(case, table, moved_bytes)


def measure_case(run, name, kind, x, buffer, rows):
    """Measures one kind of rows. rows: those from which the codebook is learned."""
    row_bytes = x.shape[1] * x.dtype.itemsize
    what = f"{name} {harness.dtype_name(x.dtype)}, {row_bytes} B"
    with run.cell(what):
        run.kind, run.raw_gbps = kind, {}
        codebook = ibp.codecs.analyze(rows, scheme="planes", sample=SAMPLE)
        measure_host(run, name, x, buffer.hold(x), codebook)
        measure_device(run, name, x, codebook)


def table_bytes(run):
    return QUICK_TABLE_BYTES if run.quick else TABLE_BYTES


def cases(run, data_dir):
    """Yields (name, kind, table in the device's memory, rows to learn from)."""
    for name, kind, dtype, columns, make in [CASES[i] for i in QUICK_CASES] if run.quick else CASES:
        num_rows = table_bytes(run) // (columns * dtype.itemsize)
        x = make(num_rows, columns, run.device).to(dtype)
        yield name, kind, x, x
    for name, rows in inputs.real_sets(data_dir):
        if name in REAL:
            num_rows = table_bytes(run) // (rows.shape[1] * rows.dtype.itemsize)
            yield name, REAL[name], inputs.replicated(rows, num_rows, run.device), rows.to(run.device)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = Run(args)
    torch.manual_seed(0)
    buffer = gather.HostBuffer(run, table_bytes(run))
    for name, kind, x, rows in run.some(cases(run, args.data)):
        measure_case(run, name, kind, x, buffer, rows)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
