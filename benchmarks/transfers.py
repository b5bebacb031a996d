"""How fast do rows of each kind come to the GPU with each codec, and how long does compressing take (the paper's tables
1 to 3)?

    python -m benchmarks.transfers [--ndzip | --rows] [--more DIR] [--data DIR] [--out DIR] [--device cpu] [--quick]

Real sets, with their rows repeated, are in pinned host memory. --more names a directory with the larger files from
which data/make.py cuts those of data/. It gives dense rows of FP32 (kokoro_voices.npz and word2vec_1000x300.npz), and
keys and values in FP16 (kv_stories260k.npz), rounded from those that the model computed in FP32, so that no bit of them
is zero by their dtype alone. `LLM weights, 512 B` has the same weights in longer rows, and `embedding, 512 B` four rows
of the embedding in one. A full run with --more is expected to take two to three minutes on an H200.

ibp fetches random rows from slots with one kernel. The arms of rows take turns ROUNDS times, and the median counts;
`spread` is the largest less the smallest time, over the median. `chosen` is the scheme of the table, which says what
`auto` took, and `slot_bytes` the size of its slots. nvCOMP copies the whole table's bytes with the copy engine and then
decodes them, in chunks of 64 KiB and of one row, which access to rows requires. In the arms `pipelined` it does so in
pieces of chunks of 64 KiB, each of which is decoded while the next ones are copied, as in stream.py. `gain` is the
speed-up over raw rows in the same way. `encode_ms` is the time for compressing the whole table in device memory, for
ibp including the choice of a codebook. --ndzip measures only the whole table with ndzip (ndzip.py) and raw; other rows
of the CSV stay, and its rows stay in runs without the option.

--rows measures only the arms of rows, in under a minute, and also normal values in rows of 128 B, the shortest for
which a codebook may pay. Other rows of the CSV stay. Where `auto` is slower than raw rows by more than the spread of
both, the run says so: `auto` is to choose raw rows there.
"""

import argparse
import gc
import statistics
import sys
from pathlib import Path

import torch

import ibp
from ibp.codecs._codec import CODECS

from . import gather, harness, ideal, inputs, ndzip, ratio, reading, sets, stream

COLUMNS = ("gain", "encode_ms", "table_bytes", "spread", "chosen", "slot_bytes")
TABLE_BYTES, QUICK_TABLE_BYTES = 128 * inputs.MIB, 512 << 10
# These sets of sets.py, by their dtype, are taken from the directory of --more.
MORE_SETS = {"kokoro": torch.float32, "word2vec": torch.float32, "K-cache": torch.float16, "V-cache": torch.float16}
LONG_ROW_BYTES = 512
LENGTHENED = ("LLM weights", "embedding")  # These sets are also measured in rows of LONG_ROW_BYTES.
RAW_ROWS, RAW_COPY = "raw rows", "raw copy_"
SCHEMES = ("raw", "ibp", "planes", "auto")
SHORT_ROW_BYTES = 128
SHORT_NAMES = tuple(f"{name}, {SHORT_ROW_BYTES} B" for name, _, _ in inputs.NORMAL)
BY_ROW, PIPELINED = ", row by row", ", pipelined"
ROUNDS = 3


def all_sets(data, more=None):
    """Yields (name, rows) of the real sets, of some of them also in longer rows, and of MORE_SETS from another
    directory."""
    for name, x in inputs.real_sets(data):
        yield name, x
        if name in LENGTHENED:
            columns = LONG_ROW_BYTES // x.itemsize
            yield f"{name}, {LONG_ROW_BYTES} B", x.reshape(-1)[: x.numel() // columns * columns].view(-1, columns)
    for found in sets.real_sets(more) if more else ():
        if MORE_SETS.get(found.name) == found.dtype:
            yield found.name, found.tensors[0]


def short_sets():
    """Yields (name, rows) of normal values in rows of SHORT_ROW_BYTES."""
    for name, (_, dtype, deviation) in zip(SHORT_NAMES, inputs.NORMAL):
        columns = SHORT_ROW_BYTES // dtype.itemsize
        yield name, inputs.normal_rows(QUICK_TABLE_BYTES, dtype, deviation, "cpu", columns=columns)


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

    def add(self, arm, *, rows, seconds, num_bytes, savings, ideal_gbps, sms, raw_arm, encode_s, **extra):
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
            **extra,
        )


def measure_rows(case, schemes):
    """Measures random rows that a kernel fetches from tables of these schemes, the first of which is raw."""
    run, fetches, tables, encode_s = case.run, case.fetches, {}, {}
    want = torch.index_select(case.x, 0, fetches.ids[0])
    for scheme in schemes:
        arm = RAW_ROWS if scheme == "raw" else scheme
        with run.cell(f"{case.name}, {arm}"):
            table = ibp.compress(case.host, layout="slots", scheme=scheme)
            harness.poison(fetches.outs[0])
            harness.check_bits(fetched(table, fetches, 0), want, f"{case.name}, {arm}")
            calls = [lambda scheme=scheme: ibp.compress(case.x, layout="slots", scheme=scheme)]
            encode_s[arm] = None if scheme == "raw" else run.seconds(calls, wall=True)
            tables[arm] = table
    seconds = {arm: [] for arm in tables}
    for _ in range(ROUNDS):
        for arm, table in tables.items():
            calls = [lambda k=k, table=table: fetched(table, fetches, k) for k in range(len(fetches.ids))]
            seconds[arm].append(run.seconds(calls))
    for arm, table in tables.items():
        median = statistics.median(seconds[arm])
        case.add(
            arm,
            rows=len(fetches.ids[0]),
            seconds=median,
            num_bytes=fetches.output_bytes,
            savings=table.savings,
            ideal_gbps=gather.table_ideal(run, table, fetches),
            sms=None,
            raw_arm=RAW_ROWS,
            encode_s=encode_s[arm],
            spread=f"{(max(seconds[arm]) - min(seconds[arm])) / median:.3f}",
            chosen=table.scheme,
            slot_bytes=table.slot_bytes,
        )


def fetched(table, fetches, k):
    return ibp.index_select(table, fetches.ids[k], out=fetches.outs[k])


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


def measure_nvcomp(case, codec, chunk_bytes, suffix):
    """Measures a codec of nvCOMP. It is made once. ANS takes floats or bytes, whichever it encodes in fewer bytes."""
    device, dtype, data = case.x.device, case.x.dtype, case.x.view(torch.uint8).view(-1)
    options = codec.suited(codec.fields(dtype, chunk_bytes), dtype, data, device)
    coder, arm = codec.coder(device, options), reading.NVCOMP + codec.kind + suffix
    measure_coder(case, arm, coder)
    if suffix != BY_ROW:
        measure_pieces(case, arm + PIPELINED, coder)


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

    encode_s = run.seconds([lambda: coder.encode(data, room)], wall=True)
    add_coder(case, arm, transfer, out, coded.numel(), encode_s)


def measure_pieces(case, arm, coder):
    """Measures decoding a piece while the next ones are copied."""
    data = case.x.view(torch.uint8).view(-1)
    out = torch.empty_like(data)
    pieces = stream.CodedPieces(coder, data, out)
    add_coder(case, arm, pieces.decode, out, pieces.stored_bytes, None)


def add_coder(case, arm, transfer, out, stored_bytes, encode_s):
    """Checks and times transfers of a whole table to `out`, uint8, and records the result."""
    harness.poison(out)
    transfer()
    harness.check_bits(out, case.x.view(torch.uint8).view(-1), f"{case.name}, {arm}")
    case.add(
        arm,
        rows=len(case.x),
        seconds=case.run.seconds([transfer]),
        num_bytes=case.num_bytes,
        savings=1 - stored_bytes / case.num_bytes,
        ideal_gbps=ideal.tensor_gbps(case.num_bytes, stored_bytes),
        sms=None,
        raw_arm=RAW_COPY,
        encode_s=encode_s,
    )


def measure_nvcomps(case):
    row_bytes = case.x.shape[1] * case.x.element_size()
    for codec in (codec for codec in CODECS.values() if codec.device_type == "cuda"):
        for chunk_bytes, suffix in ((ratio.BLOCK_BYTES, ""), (row_bytes, BY_ROW)):
            try:
                measure_nvcomp(case, codec, chunk_bytes, suffix)
            except AssertionError as error:
                case.run.failures.append(str(error))
            except Exception as error:  # Versions of nvCOMP differ in their dtypes and chunks.
                print(f"{case.name}, {codec.name}{suffix}: left out: {error}")
            # A coder's memory for short rows has gigabytes, and the next coder's has to fit the GPU, too.
            gc.collect()


def slower_than_raw(rows):
    """Yields lines that say where `auto` is slower than raw rows by more than the spread of both."""
    for (case, dtype), arms in reading.by_arm(rows, lambda row: (row["case"], row["dtype"])).items():
        if {RAW_ROWS, "auto"} <= arms.keys():
            gain, spread = float(arms["auto"]["gain"]), max(float(arms[arm]["spread"]) for arm in (RAW_ROWS, "auto"))
            if gain < 1 - spread:
                chosen = arms["auto"]["chosen"]
                yield f"{case} {dtype}: auto, which chose {chosen}, {gain:.2f} times as fast as raw rows, wanted 1"


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--more", type=Path)
    own.add_argument("--ndzip", action="store_true")
    own.add_argument("--rows", action="store_true")
    options, others = own.parse_known_args(argv)
    return options, harness.parse_args(others, __doc__)


def measure_codecs(case):
    measure_rows(case, SCHEMES)
    if ratio.nvcomp and case.run.on_gpu:
        with case.run.cell(f"{case.name}, nvCOMP"):
            measure_nvcomps(case)


def main(argv=None):
    options, args = parsed(argv)
    if options.ndzip and not ndzip.repository():
        print("IBP_NDZIP names no clone of ndzip")
        return 2
    found, short = [*all_sets(args.data, options.more)], [*short_sets()] if options.rows else []
    measured = {name for name, _ in (*found, *short)}

    def is_kept(row):
        if options.rows:
            return row["arm"] not in (RAW_ROWS, *SCHEMES) or row["case"] not in measured
        return row["case"] in SHORT_NAMES or (
            row["arm"] not in (ratio.NDZIP, RAW_COPY) if options.ndzip else row["arm"] == ratio.NDZIP
        )

    run = harness.Run("transfers", args, COLUMNS, keep=is_kept)
    ratio.say_what_is_left_out(run.on_gpu)
    for name, rows in (*found, *short):
        with run.cell(name):
            case = Case(run, name, rows)
            if options.rows:
                measure_rows(case, SCHEMES)
                continue
            measure_copy(case)
            if options.ndzip:
                measure_coder(case, ratio.NDZIP, ndzip.GpuCoder(case.num_bytes, run.device))
            else:
                measure_codecs(case)
    return run.finish(slower_than_raw(run.rows))


if __name__ == "__main__":
    sys.exit(main())
