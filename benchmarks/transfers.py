"""How fast do rows of each kind come to the GPU with each codec, and how long does compressing take (the paper's tables
1 to 3)?

    python -m benchmarks.transfers [--ndzip] [--dense DIR] [--data DIR] [--out DIR] [--device cpu] [--quick]

Real sets, with their rows repeated, are in pinned host memory. --dense names a directory with kokoro_voices.npz and
word2vec_1000x300.npz, whose dense rows are also measured. `LLM weights, 512 B` has the same weights in longer rows. ibp
fetches random rows from slots with one kernel. nvCOMP copies the whole table's bytes with the copy engine and then
decodes them, in chunks of 64 KiB and of one row, which access to rows requires. `gain` is the speed-up over raw rows in
the same way. `encode_ms` is the time for compressing the whole table in device memory, for ibp including the choice of
a codebook. --ndzip measures only the whole table with ndzip (ndzip.py) and raw; other rows of the CSV stay, and its
rows stay in runs without the option.
"""

import argparse
import gc
import sys
from pathlib import Path

import torch

import ibp
from ibp.codecs._codec import CODECS

from . import gather, harness, ideal, inputs, ndzip, ratio, reading, sets

COLUMNS = ("gain", "encode_ms", "table_bytes")
TABLE_BYTES, QUICK_TABLE_BYTES = 128 * inputs.MIB, 512 << 10
DENSE_SETS = ("kokoro", "word2vec")  # These sets of sets.py are taken in FP32.
LONG_ROW_BYTES = 512
RAW_ROWS, RAW_COPY = "raw rows", "raw copy_"
BY_ROW = ", row by row"


def all_sets(data, dense=None):
    """Yields (name, rows) of the real sets, of those of the KV-cache also in FP16, of weights also in longer rows, and
    of the dense sets of another directory."""
    for name, x in inputs.real_sets(data):
        yield name, x
        if name in ("LLM keys", "LLM values"):
            yield name, x.to(torch.float16)
        if name == "LLM weights":
            columns = LONG_ROW_BYTES // x.itemsize
            yield f"{name}, {LONG_ROW_BYTES} B", x.reshape(-1)[: x.numel() // columns * columns].view(-1, columns)
    for found in sets.real_sets(dense) if dense else ():
        if found.name in DENSE_SETS and found.dtype == torch.float32:
            yield found.name, found.tensors[0]


class Case:
    """One table in pinned memory and on the GPU, with ids and outputs."""

    def __init__(self, run, name, rows):
        self.run, self.name = run, name
        row_bytes = rows.shape[1] * rows.element_size()
        self.x = inputs.replicated(
            rows, max(1, (QUICK_TABLE_BYTES if run.quick else TABLE_BYTES) // row_bytes), run.device
        )
        self.num_bytes = self.x.numel() * self.x.element_size()
        self.host = torch.empty(self.x.shape, dtype=self.x.dtype, pin_memory=run.on_gpu).copy_(self.x)
        self.fetches = gather.Fetches(run, len(self.x), self.x.shape[1], self.x.dtype)
        self.raw = {}  # GB/s of raw rows, by way

    def add(self, arm, *, rows, seconds, num_bytes, savings, ideal_gbps, sms, raw_arm, encode_s):
        gbps = num_bytes * 1e-9 / seconds
        self.raw.setdefault(arm, gbps)
        self.run.add(
            case=self.name,
            arm=arm,
            rows=rows,
            row_bytes=self.x.shape[1] * self.x.element_size(),
            dtype=self.x.dtype,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal_gbps,
            sms=sms,
            gain=f"{gbps / self.raw[raw_arm]:.3f}",
            encode_ms="" if encode_s is None else harness.four_digits(1e3 * encode_s),
            table_bytes=self.num_bytes,
        )


def measure_rows(case, arm, **options):
    """Measures random rows that a kernel fetches. options: those of ibp.compress, without the layout."""
    run, fetches = case.run, case.fetches
    table = ibp.compress(case.host, layout="slots", **options)
    harness.poison(fetches.outs[0])

    def call(k):
        return ibp.index_select(table, fetches.ids[k], out=fetches.outs[k])

    harness.check_bits(call(0), torch.index_select(case.x, 0, fetches.ids[0]), f"{case.name}, {arm}")
    encode_s = None
    if arm != RAW_ROWS:
        encode_s = run.seconds([lambda: ibp.compress(case.x, layout="slots", **options)], wall=True)
    case.add(
        arm,
        rows=len(fetches.ids[0]),
        seconds=run.seconds([lambda k=k: call(k) for k in range(len(fetches.ids))]),
        num_bytes=fetches.output_bytes,
        savings=table.savings,
        ideal_gbps=gather.table_ideal(run, table, fetches),
        sms=None,
        raw_arm=RAW_ROWS,
        encode_s=encode_s,
    )


def measure_copy(case):
    """Measures the whole raw table, which the copy engine copies."""
    out = torch.empty_like(case.x)
    case.add(
        RAW_COPY,
        rows=len(case.x),
        seconds=case.run.seconds([lambda: out.copy_(case.host, non_blocking=True)]),
        num_bytes=case.num_bytes,
        savings=0.0,
        ideal_gbps=ideal.LINK_COPY_GBPS,
        sms=0,
        raw_arm=RAW_COPY,
        encode_s=None,
    )


def measure_nvcomp(case, arm, codec, chunk_bytes):
    """Measures a codec of nvCOMP. It is made once. ANS takes floats or bytes, whichever it encodes in fewer bytes."""
    device, dtype, data = case.x.device, case.x.dtype, case.x.view(torch.uint8).view(-1)
    options = codec.suited(codec.fields(dtype, chunk_bytes), dtype, data, device)
    measure_coder(case, arm, codec.coder(device, options))


def measure_coder(case, arm, coder):
    """Measures copying the compressed bytes with the copy engine and then decoding them, in one stream."""
    run, data = case.run, case.x.view(torch.uint8).view(-1)
    room, out = coder.room(data), torch.empty_like(data)
    coded = coder.encode(data, room)
    sent = torch.empty(coded.numel(), dtype=torch.uint8, pin_memory=run.on_gpu).copy_(coded)
    received = torch.empty_like(coded)

    def transfer():
        received.copy_(sent, non_blocking=True)
        coder.decode(received, out)

    harness.poison(out)
    transfer()
    harness.check_bits(out, data, f"{case.name}, {arm}")
    case.add(
        arm,
        rows=len(case.x),
        seconds=run.seconds([transfer]),
        num_bytes=case.num_bytes,
        savings=1 - coded.numel() / case.num_bytes,
        ideal_gbps=ideal.tensor_gbps(case.num_bytes, coded.numel()),
        sms=None,
        raw_arm=RAW_COPY,
        encode_s=run.seconds([lambda: coder.encode(data, room)], wall=True),
    )


def measure_nvcomps(case):
    row_bytes = case.x.shape[1] * case.x.element_size()
    for codec in (codec for codec in CODECS.values() if codec.device_type == "cuda"):
        for chunk_bytes, suffix in ((ratio.BLOCK_BYTES, ""), (row_bytes, BY_ROW)):
            arm = reading.NVCOMP + codec.kind + suffix
            try:
                measure_nvcomp(case, arm, codec, chunk_bytes)
            except AssertionError as error:
                case.run.failures.append(str(error))
            except Exception as error:  # Versions of nvCOMP differ in their dtypes and chunks.
                print(f"{case.name}, {arm}: left out: {error}")
            # A coder's memory for short rows has gigabytes, and the next coder's has to fit the GPU, too.
            gc.collect()


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--dense", type=Path)
    own.add_argument("--ndzip", action="store_true")
    options, others = own.parse_known_args(argv)
    return options, harness.parse_args(others, __doc__)


def measure_codecs(case):
    for scheme in ("raw", "ibp", "planes", "auto"):
        with case.run.cell(f"{case.name}, {scheme}"):
            measure_rows(case, RAW_ROWS if scheme == "raw" else scheme, scheme=scheme)
    if ratio.nvcomp and case.run.on_gpu:
        with case.run.cell(f"{case.name}, nvCOMP"):
            measure_nvcomps(case)


def main(argv=None):
    options, args = parsed(argv)
    if options.ndzip and not ndzip.repository():
        print("IBP_NDZIP names no clone of ndzip")
        return 2
    remeasured = (ratio.NDZIP, RAW_COPY)
    run = harness.Run(
        "transfers",
        args,
        COLUMNS,
        keep=lambda row: row["arm"] not in remeasured if options.ndzip else row["arm"] == ratio.NDZIP,
    )
    ratio.say_what_is_left_out(run.on_gpu)
    for name, rows in all_sets(args.data, options.dense):
        with run.cell(name):
            case = Case(run, name, rows)
            measure_copy(case)
            if options.ndzip:
                measure_coder(case, ratio.NDZIP, ndzip.GpuCoder(case.num_bytes, run.device))
            else:
                measure_codecs(case)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
