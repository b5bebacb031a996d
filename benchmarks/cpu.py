"""How fast are decoding and encoding on the CPU, with one core and with all, compared with a memory copy, zstd -1 and
LZ4?

    python -m benchmarks.cpu [--out DIR] [--quick]

The tables are normal, with 128 MiB in host memory in rows of 1,024 values, in the slots layout. With one core, these
are the BF16 tables and two simulations in FP64 of 32 MiB. GB/s count original bytes; the ideal is the rate of a copy in
the same run with as many threads. `encode` measures the rows and encodes them into the table's own memory. The `plain`
arms run the C code without the processor's vector and bit instructions, on a part of the rows; the `avx2` arms, on one
core, run the code for processors without AVX-512. zstd and LZ4 (packages zstandard and lz4) compress blocks of 256 KiB,
as many at once as there are threads. The same blocks of BF16 values are coded by the rANS of rans.c, which a C compiler
builds: `rans` codes their exponents and leaves signs and mantissas as they are, as DietGPU does, and `rans of bytes`
codes all their bytes by one table. In the CSV, the column gpu names the processor, sms is 0, and the case has the
number of threads.
"""

import contextlib
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import ibp
from ibp._rows.handle import Handle, Parts

from . import harness, inputs, rans, sets

try:
    import zstandard
except ImportError:
    zstandard = None
try:
    import lz4.block as lz4_block
except ImportError:
    lz4_block = None

SCHEMES = ("planes", "ibp")
AVX2 = ibp._core.CPU_AVX2_BMI2
ONE_THREAD_DTYPE = torch.bfloat16
SIMULATED_PART = 4  # Simulations have a quarter of the size, because they are short.
# The plain arms take one row in 64, but at least 64 rows, because compressing fewer rows does not pay.
PLAIN_PART, LEAST_ROWS = 64, 64
ANALYZED_BYTES = 4 * inputs.MIB
BLOCK_BYTES = 256 << 10
ZSTD_LEVEL = 1


def data_bytes(run):
    return (4 if run.quick else 128) * inputs.MIB


def processor_name():
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


@contextlib.contextmanager
def cpu_features(features):
    """Limits the processor features that the CPU coders use (see ibp_set_cpu_features in ibp.h)."""
    before = ibp._core.cpu_features()
    ibp._core.set_cpu_features(features)
    try:
        yield
    finally:
        ibp._core.set_cpu_features(before)


@contextlib.contextmanager
def torch_threads(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Case:
    """One tensor, one number of threads, and the run that records their measurements."""

    def __init__(self, run, name, x, num_threads):
        self.run, self.x, self.num_threads = run, x, num_threads
        self.name = f"{name}, {num_threads} thread{'s' if num_threads > 1 else ''}"
        self.out = torch.empty_like(x)
        self.copy_gbps = self.gbps(x, lambda: self.out.copy_(x))
        harness.check_bits(self.out, x, "copy_")
        self.add("copy_", x, 0.0, self.copy_gbps)

    def gbps(self, x, call):
        return x.numel() * x.dtype.itemsize * 1e-9 / self.run.seconds([call], wall=True)

    def add(self, arm, x, savings, gbps):
        self.run.add(
            case=self.name,
            arm=arm,
            rows=len(x),
            row_bytes=x.shape[1] * x.dtype.itemsize,
            dtype=x.dtype,
            savings=savings,
            gbps=gbps,
            ideal_gbps=self.copy_gbps,
            sms=0,
        )

    def time(self, arm, x, savings, call):
        self.add(arm, x, savings, self.gbps(x, call))


def measure_coding(case, arm, x, codebook):
    """Measures decoding and encoding of a table of x. Each is first checked on poisoned memory."""
    table = ibp.compress(x, codebook=codebook, layout="slots", device="cpu", memory="host")
    data, words, fault = x.view(torch.uint8).view(-1), codebook.words(table.device), torch.zeros(4, dtype=torch.int64)
    out = case.out[: len(x)]

    def decode():
        ibp.decompress(table, out=out)

    def encode():
        lengths = torch.ops.ibp.measure_rows(data, words, codebook.codec)
        parts = (table.slots, table.overflow, lengths, table.bases, words, codebook.codec)
        handle = Handle(Parts(*parts, table.slot_bytes, 0, len(x), codebook.row_bytes))
        torch.ops.ibp.encode_rows(handle.table, data, fault)

    for call in (decode, encode, decode):
        for tensor in (out,) if call is decode else (table.slots, table.overflow):
            harness.poison(tensor)
        call()
        if call is decode:
            harness.check_bits(out, x, f"{case.name}, {arm}")
    assert not fault.any(), f"{case.name}, {arm}: fault {fault.tolist()}"
    case.time(f"{arm} decode", x, table.savings, decode)
    case.time(f"{arm} encode", x, table.savings, encode)


def zstd_codec():
    """Returns (compress, decompress) of one block. The objects behind them serve only one thread."""
    compressor, decompressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
    return compressor.compress, decompressor.decompress


def lz4_codec():
    return lz4_block.compress, lz4_block.decompress


def rans_codec():
    """Returns (compress, decompress) of the bytes of a block."""
    return lambda block: rans.encode(np.frombuffer(block, np.uint8)), lambda coded: rans.decode(coded).data


def rans_bfloat16_codec():
    """Returns (compress, decompress) of a block of BF16 values, of which the exponents are coded."""

    def compress(block):
        return rans.encode_bfloat16(np.frombuffer(block, np.uint16))

    def decompress(coded):
        return rans.decode_bfloat16(coded).view(np.uint8).data

    return compress, decompress


def measure_blocks(case, arm, codec_of):
    """Measures a general compressor on blocks. Each thread has its share of them."""
    data = memoryview(case.x.view(torch.uint8).view(-1).numpy())
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    codecs = [codec_of() for _ in range(case.num_threads)]

    with ThreadPoolExecutor(case.num_threads) as pool:

        def over_shares(work):
            """Calls work(codec, block numbers) in each thread, and returns the results for all blocks, in order."""
            bounds = [len(blocks) * i // case.num_threads for i in range(case.num_threads + 1)]
            shares = [range(first, last) for first, last in zip(bounds, bounds[1:])]
            return [item for share in pool.map(work, codecs, shares) for item in share]

        frames = over_shares(lambda codec, numbers: [codec[0](blocks[i]) for i in numbers])
        good = over_shares(lambda codec, numbers: [codec[1](frames[i]) == blocks[i] for i in numbers])
        assert len(good) == len(blocks) and all(good), f"{case.name}, {arm}: bytes differ"
        savings = 1 - sum(map(len, frames)) / len(data)

        def compress():
            over_shares(lambda codec, numbers: [len(codec[0](blocks[i])) for i in numbers])

        def decompress():
            over_shares(lambda codec, numbers: [len(codec[1](frames[i])) for i in numbers])

        case.time(f"{arm} decompress", case.x, savings, decompress)
        case.time(f"{arm} compress", case.x, savings, compress)


def measure_case(run, name, x, num_threads):
    with torch_threads(num_threads):
        case = Case(run, name, x, num_threads)
        for scheme in SCHEMES:
            with run.cell(f"{case.name} {harness.dtype_name(x.dtype)}, {scheme}"):
                codebook = ibp.codecs.analyze(
                    x[: max(1, ANALYZED_BYTES // (x.shape[1] * x.dtype.itemsize))], scheme=scheme
                )
                measure_coding(case, scheme, x, codebook)
                if ibp._core.cpu_features() > AVX2 and num_threads == 1:
                    with cpu_features(AVX2):
                        measure_coding(case, f"{scheme} avx2", x, codebook)
                with cpu_features(0):
                    measure_coding(case, f"{scheme} plain", x[: max(LEAST_ROWS, len(x) // PLAIN_PART)], codebook)
        codecs = ((f"zstd -{ZSTD_LEVEL}", zstd_codec, zstandard), ("lz4", lz4_codec, lz4_block))
        arms = [(arm, codec_of) for arm, codec_of, package in codecs if package]
        if rans.compiler() and x.dtype == torch.bfloat16:
            arms += [("rans", rans_bfloat16_codec), ("rans of bytes", rans_codec)]
        for arm, codec_of in arms:
            with run.cell(f"{case.name} {harness.dtype_name(x.dtype)}, {arm}"):
                measure_blocks(case, arm, codec_of)


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    args.device = "cpu"
    run = harness.Run("cpu", args)
    run.same["gpu"] = processor_name()
    torch.manual_seed(0)
    for package, module in (("zstandard", zstandard), ("lz4", lz4_block)):
        if not module:
            print(f"no package {package}: its arms are left out", flush=True)
    if not rans.compiler():
        print("no C compiler: the arms of the rANS are left out", flush=True)
    if not ibp._core.cpu_features():
        print("this processor has none of the features that ibp uses: the arms are all of plain C", flush=True)
    for name, dtype, deviation in inputs.NORMAL:
        x = inputs.normal_rows(data_bytes(run), dtype, deviation, run.device)
        for num_threads in sorted(
            {1, torch.get_num_threads()} if dtype == ONE_THREAD_DTYPE else {torch.get_num_threads()}
        ):
            measure_case(run, name, x, num_threads)
    for name, x in sets.repeated_simulations(data_bytes(run) // SIMULATED_PART, run.device, run.quick):
        measure_case(run, name, x, 1)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
