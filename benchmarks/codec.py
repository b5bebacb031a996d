"""How fast are decoding, encoding and analysis in device memory, compared with a device copy, a memset and nvCOMP?

    python -m benchmarks.codec [--out DIR] [--nvcomp | --sizes | --joins] [--device cpu] [--quick]

Tables have 256 MiB, several times the L2 cache. One has 4 GiB, beside which the fixed costs of compression and analysis
are small; another has 1 GiB in host memory. GB/s count original bytes, those of the copy the bytes copied. `decode` is
`ibp.decompress(table, out=)` in the slots layout, and `decode packed` in the packed one. `encode` is only the kernels.
`compress` and the analyses are whole Python calls with their allocations and synchronisations. nvCOMP writes into
memory that was allocated before. If decoding is slower than its target, it is printed last, as BELOW.

`--nvcomp` measures only nvCOMP's arms, in 20 s, and keeps the other rows if they are of the same machine. `--sizes`
does the same for floats of every kind in tables of 1 MiB to 1 GiB (the curves of DietGPU's report) and for its
simulations. `--joins` does it for decoding to memory that begins one element after an aligned address, so that no row
begins at one, beside aligned memory (DietGPU's report, section 3.2), in 15 s.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial

import torch

import ibp
from ibp._rows.handle import Handle, Parts
from ibp._rows.planes import relearn
from ibp.codecs._codec import CODECS, Coder, stream_number

from . import harness, ideal, inputs, sets
from .ratio import nvcomp

# Analysis is timed only at these synthetic savings, because its time hardly depends on them.
ANALYZED_SAVINGS = 0.5
# For normal tables, analysis, encoding and nvCOMP (which has no rows) are timed only at this row size.
ANALYZED_ROW_BYTES = 2048
LARGE_BYTES, HOST_BYTES = (
    4096 * inputs.MIB,
    1024 * inputs.MIB,
)  # BF16 tables of these sizes are compressed and analysed on the GPU and in host memory.
ROW_BYTES, QUICK_ROW_BYTES = (256, 512, 1024, 2048, 16384), (512, 2048)  # Normal tables have rows of these sizes.
SYNTHETIC_ROW_BYTES, SYNTHETIC_SAVINGS = (256, 512, 2048, 65536), (0.125, 0.5, 0.9)
PAGE_BYTES = 1 << 16  # A batch of nvCOMP has pages of this many bytes.
SWEEP_SAMPLE = 0.1  # An analysis that tries several thresholds and chunk sizes uses this share of the rows.
COLUMN_SAMPLE_ROWS = 4096  # A codebook with entries per column is learned from this many rows.
ONE_THRESHOLD = {"sample": 1.0, "chunk_bytes": inputs.CHUNK_BYTES, "tau": 0.8}  # This analysis uses all rows.
ANALYSES = {"analyze": ONE_THRESHOLD, "analyze, sweep": {"sample": SWEEP_SAMPLE}}
FEWEST_SMS = 4
SIZED = "by size: "  # The names of cases of --sizes begin with this text.
SIZES, QUICK_SIZES = (1, 4, 16, 64, 256, 1024), (1,)  # The sizes are in MiB.
JOINS = "joins: "  # The names of cases of --joins begin with this text.
JOINED_SIZES = (1, 16, 256)  # These sizes are in MiB.
JOINED = (inputs.NORMAL[0], ("normal 1", torch.float8_e4m3fn, 1.0))
HALF_ZEROS = "half zeros"
SIZED_KINDS = ("normal", HALF_ZEROS)
SIZED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def data_bytes(run):
    return (1 if run.quick else 256) * inputs.MIB


class DeviceRates:
    """The rates of a copy and a memset of as many bytes as the codec works on, measured in this run. record: whether
    the CSV also gets them."""

    def __init__(self, run, record=True):
        size = data_bytes(run)
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=run.device)
        target = torch.empty_like(source)
        self.copy_gbps = size * 1e-9 / run.seconds([lambda: target.copy_(source)])
        harness.check_bits(target, source, "copy_")
        self.memset_gbps = size * 1e-9 / run.seconds([target.zero_])
        for arm, gbps in (("copy_", self.copy_gbps), ("memset", self.memset_gbps)) if record else ():
            run.add(
                case="device",
                arm=arm,
                rows=1,
                row_bytes=size,
                dtype=torch.uint8,
                savings=0.0,
                gbps=gbps,
                ideal_gbps=gbps,
                sms=None,
            )


class Case:
    """One tensor in device memory, its name, and the run that records its measurements."""

    def __init__(self, run, rates, name, x):
        self.run, self.rates, self.name, self.x = run, rates, name, x
        self.num_bytes = x.numel() * x.dtype.itemsize
        self.row_bytes = self.num_bytes // len(x)
        self.out = torch.empty_like(x)
        self.kind = ""  # The names of arms begin with the kind of the codebook.

    def check(self, table, arm):
        """Decodes a table to poisoned output and compares it with x."""
        harness.poison(self.out)
        harness.check_bits(ibp.decompress(table, out=self.out), self.x, f"{self.name}, {arm}")

    def time(self, arm, call, savings, ideal_gbps, sms=None, wall=False):
        self.run.add(
            case=self.name,
            arm=self.kind + arm,
            rows=len(self.x),
            row_bytes=self.row_bytes,
            dtype=self.x.dtype,
            savings=savings,
            gbps=self.num_bytes * 1e-9 / self.run.seconds([call], wall),
            ideal_gbps=ideal_gbps,
            sms=sms,
        )

    def cell(self, what):
        return self.run.cell(f"{self.name} {harness.dtype_name(self.x.dtype)}, {self.row_bytes} B, {self.kind}{what}")


def kind_of(codebook):
    """Returns the kind of a codebook, with which the name of an arm begins. It is empty for scheme ibp."""
    if codebook.scheme != "planes":
        return ""
    return "planes per column " if codebook.per_column else "planes listed " if codebook.listed else "planes "


def read_bytes(table):
    """Returns the bytes of rows that decoding a whole table reads: whole sectors from slots, and every byte once from
    packed rows."""
    if table.layout == "packed":
        return int(ideal.stored_row_bytes(table).sum())
    return ideal.SECTOR_BYTES * int(ideal.row_sectors(table).sum())


def measure_decode(case, table, moved_bytes):
    arm = "decode" if table.layout == "slots" else "decode packed"
    harness.poison(case.out)
    decoded, peak_bytes = case.run.peak_bytes(lambda: ibp.decompress(table, out=case.out), out=case.out)
    harness.check_bits(decoded, case.x, f"{case.name}, {case.kind}{arm}")
    case.run.add_memory(
        case=case.name,
        arm=case.kind + arm,
        row_bytes=case.row_bytes,
        dtype=case.x.dtype,
        peak_bytes=peak_bytes,
        output_bytes=case.num_bytes,
        original_bytes=case.num_bytes,
        table=table,
    )
    ideal_gbps = ideal.device_gbps(case.num_bytes, moved_bytes, case.rates.copy_gbps, case.rates.memset_gbps)
    for sms in (None, FEWEST_SMS) if case.run.on_gpu and case.kind == "planes " else (None,):

        def decode(sms=sms):
            ibp.decompress(table, out=case.out, max_sms=sms)

        case.time(arm, decode, table.savings, ideal_gbps, sms)


def measure_encode(case, table, moved_bytes):
    """Measures only the kernels, which measure the rows and encode them into the table's own memory. On a GPU this
    takes one pass, as in `compress` if a sample gives the size of slots; afterwards the parts of the overflow are put
    in order."""
    codebook, data = table.codebook, case.x.view(torch.uint8).view(-1)
    words, fault = codebook.words(table.device), torch.zeros(4, dtype=torch.int64, device=table.device)
    sizes = (codebook.codec, table.slot_bytes, 0, len(case.x), case.row_bytes)
    spare, used = torch.empty_like(table.overflow), fault.new_empty(1)
    lengths, bases = torch.empty_like(table.lengths), fault.new_empty(table.num_rows)
    place = Handle(Parts(table.slots, spare, lengths, bases, words, *sizes, None, used))
    measured = Handle(Parts(table.slots, table.overflow, lengths, table.bases, words, *sizes))

    def encode():
        if not data.is_cuda:
            lengths.copy_(torch.ops.ibp.measure_rows(data, words, codebook.codec))
            return torch.ops.ibp.encode_rows(measured.table, data, fault)
        used.zero_()
        place.encode(data, is_new=True)
        if table.overflow.numel():
            torch.ops.ibp.move_parts(place.table, table.bases, table.overflow)

    for coded in (table.slots, table.overflow):
        harness.poison(coded)
    encode()
    case.check(table, "encode")
    case.time("encode", encode, table.savings, ideal.device_gbps(case.num_bytes, moved_bytes, case.rates.copy_gbps))


def measure_kernels(case, table, moved_bytes):
    """Measures each pass over the data that `compress` and `analyze` make on the device."""
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


def measure_decoding(case, codebook):
    """Measures decoding of both layouts under a given codebook. Returns the table in slots."""
    case.kind = kind_of(codebook)
    packed, slots = (ibp.compress(case.x, codebook=codebook, layout=layout) for layout in ("packed", "slots"))
    for table in (slots, packed):
        with case.cell(f"decode, {table.layout}"):
            measure_decode(case, table, read_bytes(table) + case.num_bytes)
    return slots


def measure_codec(case, codebook):
    """Measures decoding and encoding under a given codebook. They move the sectors of the coded rows and the original
    bytes."""
    table = measure_decoding(case, codebook)
    case.kind = (
        "planes " if codebook.scheme == "planes" else ""
    )  # The encoder's arms have the same names for all codebooks of a scheme.
    # If nothing is saved, nothing is encoded.
    for measure in (measure_encode, measure_kernels, measure_compress) if table.scheme != "raw" else ():
        with case.cell(measure.__name__):
            measure(case, table, read_bytes(table) + case.num_bytes)


def measure_analysis(case, arms=tuple(ANALYSES)):
    """Measures analysis. A round trip with its codebook checks it."""
    for arm in arms:
        arguments = ANALYSES[arm]
        table = ibp.compress(case.x, codebook=ibp.codecs.analyze(case.x, **arguments))
        case.check(table, arm)
        ideal_gbps = ideal.device_gbps(case.num_bytes, arguments["sample"] * case.num_bytes, case.rates.copy_gbps)
        case.time(arm, lambda: ibp.codecs.analyze(case.x, **arguments), table.savings, ideal_gbps)


def measure_host(case, codebook):
    """Measures compression from host memory to host memory and analysis of host memory, beside the copies that bound
    them: the link for pinned data, and x.to("cuda") for pageable data. Whole calls are timed with the wall clock;
    `compress` allocates its table and pins it."""
    run = case.run
    case.kind = kind_of(codebook)
    far = {"pageable": case.x.cpu(), "pinned": case.x.cpu().pin_memory()}
    for place, x in far.items():
        calls = {
            "to(cuda)": lambda: x.to(run.device, non_blocking=True),
            "compress": lambda: ibp.compress(
                x,
                codebook=codebook,
                layout="slots",
                device=run.device,
                memory={"pinned": "pinned", "pageable": "host"}[place],
            ),
            "analyze": lambda: ibp.codecs.analyze(x, **ONE_THRESHOLD, device=run.device),
        }
        with case.cell(place):
            table = calls["compress"]()
            case.check(table, f"compress, {place}")
            for arm, call in calls.items():
                case.time(f"{arm}, {place}", call, table.savings, ideal.LINK_COPY_GBPS, wall=True)


def run_synthetic(run, rates):
    sizes = (
        itertools.product(inputs.QUICK_ROW_BYTES, inputs.QUICK_SAVINGS)
        if run.quick
        else itertools.product(SYNTHETIC_ROW_BYTES, SYNTHETIC_SAVINGS)
    )
    for row_bytes, savings in run.some(sizes):
        name = f"synthetic {100 * savings:g}%"
        with run.cell(f"{name}, {row_bytes} B"):
            mask, bitval = inputs.synthetic_mask(row_bytes, savings)
            x = inputs.agreeing_rows(data_bytes(run) // row_bytes, mask, bitval, run.device)
            case = Case(run, rates, name, x)
            measure_codec(case, ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES))
            if savings == ANALYZED_SAVINGS and row_bytes == ANALYZED_ROW_BYTES:
                measure_analysis(case)


def column_codebook(codebook, x):
    """Returns a dense codebook with entries per column instead of per table, learned from the first rows."""
    rows = x[:COLUMN_SAMPLE_ROWS].contiguous().view(torch.uint8).view(-1)
    by_column = replace(codebook, per_column=True, entries=codebook.entries.expand(codebook.columns, -1))
    return relearn(by_column, rows, [rows.numel() // codebook.row_bytes])[0]


def ans_coders(x):
    """Returns {end of an arm's name: a coder of nvCOMP's ANS on the current stream}: as `ibp.compress` uses it, with
    its policy for latency, and with checksums that decoding verifies."""
    ans, data = CODECS["nvcomp:ans"], x.view(torch.uint8).view(-1)
    options = ans.suited(ans.plan(x.dtype, None)[1], x.dtype, data, x.device)
    data_type, chunk_bytes = options["codec_data_type"], int(options["codec_chunk_bytes"])
    of = nvcomp, "ans", data_type, chunk_bytes, x.device.index, stream_number(x.device)
    return {
        "": ans.coder(x.device, options),
        ", latency": Coder(*of, execution_policy=nvcomp.ExecutionPolicy.LATENCY),
        ", checksums": Coder(*of, checksum_policy=nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY),
    }


def measure_nvcomp(case):
    """Measures nvCOMP's ANS on the same bytes. Codecs, their configurations and the output memory are made once,
    before. The data type is floats or bytes, whichever saves more of a sample. Encoding is timed with the wall clock,
    because it waits for the size."""
    data, out = (x.view(torch.uint8).view(-1) for x in (case.x, case.out))
    for policy, coder in ans_coders(case.x).items():
        with case.run.cell(f"nvCOMP ANS{policy}, {case.name}"):
            room = coder.room(data)
            coded = coder.encode(data, room).clone()
            harness.poison(case.out)
            coder.decode(coded, out)
            harness.check_bits(case.out, case.x, f"{case.name}, nvCOMP{policy}")
            savings = 1 - coded.numel() / case.num_bytes
            ideal_gbps = ideal.device_gbps(case.num_bytes, coded.numel() + case.num_bytes, case.rates.copy_gbps)
            call, call_coding = partial(coder.decode, coded, out), partial(coder.encode, data, room)
            case.time(f"nvcomp ANS decode{policy}", call, savings, ideal_gbps)
            case.time(f"nvcomp ANS compress{policy}", call_coding, savings, ideal_gbps, wall=True)


def measure_nvcomp_batch(case):
    """Measures nvCOMP's ANS on a batch of pages in one call, with the wall clock, because it allocates its results."""
    with case.run.cell(f"nvCOMP ANS, batch, {case.name}"):
        options = {"data_type": CODECS["nvcomp:ans"].types(case.x.dtype)[0], "uncomp_chunk_size": PAGE_BYTES}
        coder, data = nvcomp.Codec(algorithm="ANS", **options), case.x.view(torch.uint8).view(-1)
        starts = list(range(0, data.numel(), PAGE_BYTES))
        pages = nvcomp.as_arrays(data, starts, [min(PAGE_BYTES, data.numel() - start) for start in starts])
        case.run.sync()  # The codec has a stream of its own.
        coded = coder.encode(pages)
        back = [torch.as_tensor(page, device=data.device).view(torch.uint8).view(-1) for page in coder.decode(coded)]
        case.run.sync()
        harness.check_bits(torch.cat(back), data, f"{case.name}, nvCOMP, batch")
        num_bytes = sum(page.buffer_size for page in coded)
        ideal_gbps = ideal.device_gbps(case.num_bytes, num_bytes + case.num_bytes, case.rates.copy_gbps)
        for what, call in (("decode", lambda: coder.decode(coded)), ("compress", lambda: coder.encode(pages))):
            case.time(f"nvcomp ANS {what}, batch", call, 1 - num_bytes / case.num_bytes, ideal_gbps, wall=True)


def run_normal(run, rates):
    """Measures normal tables with rows of several sizes: decoding under every kind of codebook."""
    cases = itertools.product(inputs.NORMAL, QUICK_ROW_BYTES if run.quick else ROW_BYTES)
    for (name, dtype, deviation), row_bytes in run.some(cases):
        with run.cell(f"{name} {harness.dtype_name(dtype)}, {row_bytes} B"):
            x = inputs.normal_rows(data_bytes(run), dtype, deviation, run.device, columns=row_bytes // dtype.itemsize)
            case, is_analyzed = Case(run, rates, name, x), row_bytes == ANALYZED_ROW_BYTES
            measure = measure_codec if is_analyzed else measure_decoding
            measure(case, ibp.codecs.analyze(x, sample=SWEEP_SAMPLE))
            if is_analyzed:
                measure_analysis(case)
            dense = ibp.codecs.analyze(x, scheme="planes", sample=SWEEP_SAMPLE)
            measure(case, dense)
            if not dense.per_column:
                measure_decoding(case, column_codebook(dense, x))


def sized_rows(kind, dtype, mib, device):
    """Returns mib MiB of N(0, 1), or half of it zeros, in rows of ANALYZED_ROW_BYTES."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    shape = mib * inputs.MIB // ANALYZED_ROW_BYTES, ANALYZED_ROW_BYTES // dtype.itemsize
    x = torch.randn(shape, dtype=drawn, device=device)
    if kind == HALF_ZEROS:
        x.masked_fill_(torch.rand(shape, device=device) < 0.5, 0)
    return x.to(dtype)


def run_sizes(run, rates):
    """Measures dense and sparse floats by size, and simulations, under codebooks of scheme planes."""
    sizes = itertools.product(SIZED_KINDS, SIZED_DTYPES, QUICK_SIZES if run.quick else SIZES)
    for kind, dtype, mib in sizes:
        with run.cell(f"{SIZED}{kind} {harness.dtype_name(dtype)}, {mib} MiB"):
            measure_sized(run, rates, kind, sized_rows(kind, dtype, mib, run.device))
    for name, x in sets.repeated_simulations(data_bytes(run), run.device, run.quick):
        with run.cell(f"{SIZED}{name}"):
            measure_sized(run, rates, name, x)


def measure_sized(run, rates, kind, x):
    case = Case(run, rates, SIZED + kind, x)
    table = ibp.compress(x, codebook=ibp.codecs.analyze(x, scheme="planes", sample=SWEEP_SAMPLE), layout="slots")
    case.kind, moved_bytes = "planes ", read_bytes(table) + case.num_bytes
    case.check(table, "decode")
    ideal_gbps = ideal.device_gbps(case.num_bytes, moved_bytes, rates.copy_gbps, rates.memset_gbps)
    case.time("decode", lambda: ibp.decompress(table, out=case.out), table.savings, ideal_gbps)
    measure_encode(case, table, moved_bytes)


def run_joins(run, rates):
    """Measures decoding to aligned memory and to memory that begins one element later, by tables of planes in slots."""
    for (name, dtype, deviation), mib in itertools.product(JOINED, QUICK_SIZES if run.quick else JOINED_SIZES):
        with run.cell(f"{JOINS}{name} {harness.dtype_name(dtype)}, {mib} MiB"):
            columns = ANALYZED_ROW_BYTES // dtype.itemsize
            x = inputs.normal_rows(mib * inputs.MIB, dtype, deviation, run.device, columns=columns)
            codebook = ibp.codecs.analyze(x, scheme="planes", sample=SWEEP_SAMPLE)
            measure_joins(Case(run, rates, JOINS + name, x), ibp.compress(x, codebook=codebook, layout="slots"))


def measure_joins(case, table):
    case.kind, moved_bytes = kind_of(table.codebook), read_bytes(table) + case.num_bytes
    ideal_gbps = ideal.device_gbps(case.num_bytes, moved_bytes, case.rates.copy_gbps, case.rates.memset_gbps)
    for first, arm in enumerate(("decode, aligned", "decode, one element off")):
        case.out = case.x.new_empty(case.x.numel() + first)[first:].view(case.x.shape)
        case.check(table, arm)
        case.time(arm, lambda: ibp.decompress(table, out=case.out), table.savings, ideal_gbps)


def run_large(run, rates):
    """Measures what compression and analysis cost for a large table, on the GPU and from host memory."""
    if run.quick or not run.on_gpu or run.every > 1:
        return
    name, dtype, deviation = inputs.NORMAL[0]
    with run.cell(f"{name} {harness.dtype_name(dtype)}, {LARGE_BYTES >> 30} GiB"):
        x = inputs.normal_rows(LARGE_BYTES, dtype, deviation, run.device, columns=ANALYZED_ROW_BYTES // dtype.itemsize)
        case, dense = (
            Case(run, rates, f"{LARGE_BYTES >> 30} GiB, {name}", x),
            ibp.codecs.analyze(x, scheme="planes", sample=None),
        )
        measure_codec(case, ibp.codecs.analyze(x, sample=None))
        measure_analysis(case, ["analyze"])
        measure_codec(case, dense)
        measure_host(Case(run, rates, f"{HOST_BYTES >> 30} GiB, {name}", x[: HOST_BYTES // ANALYZED_ROW_BYTES]), dense)


def run_real(run, rates, data_dir):
    """Measures tables whose codebooks are found by analysis, as for a user."""
    for name, rows in run.some(inputs.real_sets(data_dir)):
        with run.cell(f"{name} {harness.dtype_name(rows.dtype)}"):
            num_rows = data_bytes(run) // (rows.shape[1] * rows.dtype.itemsize)
            case = Case(run, rates, name, inputs.replicated(rows, num_rows, run.device))
            measure_codec(case, ibp.codecs.analyze(case.x, sample=None))
            measure_codec(case, ibp.codecs.analyze(case.x, scheme="planes", sample=None))


def run_nvcomp(run, rates, data_dir):
    """Measures nvCOMP, which has no rows, on one table of each kind."""
    if run.every > 1:
        return
    if not (nvcomp and run.on_gpu):
        print("nvCOMP: " + ("the package nvidia-nvcomp-cu13 is not installed" if run.on_gpu else "needs --device cuda"))
        return
    for name, dtype, deviation in inputs.NORMAL:
        x = inputs.normal_rows(
            data_bytes(run), dtype, deviation, run.device, columns=ANALYZED_ROW_BYTES // dtype.itemsize
        )
        measure_nvcomp(Case(run, rates, name, x))
        measure_nvcomp_batch(Case(run, rates, name, x))
    for name, rows in inputs.real_sets(data_dir):
        num_rows = data_bytes(run) // (rows.shape[1] * rows.dtype.itemsize)
        measure_nvcomp(Case(run, rates, name, inputs.replicated(rows, num_rows, run.device)))


# ---- what the rates should be --------------------------------------------------------------------------------------

LEAST_ROW_BYTES = 512
FEWEST_SMS_GBPS = 85.0  # BF16 planes with FEWEST_SMS should decode at the link's rate.


def wanted_gbps(row, device):
    """Returns (GB/s, what they are) that decoding should reach on all SMs or on FEWEST_SMS, or None if there is no
    target. device: GB/s of "copy_" and "memset"."""
    kind, is_dense_float = (
        row["arm"].removesuffix(" packed").removesuffix("decode"),
        row["dtype"] in ("bfloat16", "float32"),
    )
    if "decode" not in row["arm"] or "nvcomp" in row["arm"] or row["row_bytes"] < LEAST_ROW_BYTES:
        return None
    if row["sms"] > FEWEST_SMS:
        if kind == "planes listed ":
            return 0.8 * device["memset"], "80 % of a memset"
        share = 0.95 if kind == "planes " and is_dense_float else 0.6
        return share * device["copy_"], f"{100 * share:g} % of copy_"
    if row["sms"] == FEWEST_SMS and kind == "planes " and row["dtype"] == "bfloat16":
        return FEWEST_SMS_GBPS, "the link's rate"
    return None


LEAST_COMPRESS_GBPS, LEAST_ANALYZE_GBPS = 500.0, 1000.0  # These targets are for LARGE_BYTES on the GPU.
# The targets for pinned memory are shares of the link's rate. For pageable memory the target is a multiple of the time
# of x.to("cuda").
PINNED_SHARES, PAGEABLE_FACTOR = {"compress": 0.8, "analyze": 0.9}, 1.5


def wanted_of_large(row, rows):
    """Returns (GB/s, what they are) that compression and analysis should reach if fixed costs do not matter, or None if
    there is no target."""
    what = row["arm"].split(",")[0].split(" ")[-1]
    if row["row_bytes"] * row["rows"] == LARGE_BYTES and row["arm"].endswith(("compress", "analyze")):
        return (LEAST_COMPRESS_GBPS if what == "compress" else LEAST_ANALYZE_GBPS), "promised"
    if what in PINNED_SHARES and row["arm"].endswith(", pinned"):
        return PINNED_SHARES[what] * ideal.LINK_COPY_GBPS, f"{100 * PINNED_SHARES[what]:g} % of the link"
    if what in PINNED_SHARES and row["arm"].endswith(", pageable"):
        copied = next(
            float(other["gbps"])
            for other in rows
            if other["case"] == row["case"] and other["arm"].endswith("to(cuda), pageable")
        )
        return copied / PAGEABLE_FACTOR, f'x.to("cuda") in {PAGEABLE_FACTOR:g} times its time'
    return None


def shortfalls(rows):
    """Returns lines that say where decoding, compression or analysis is slower than its target."""
    device = {row["arm"]: float(row["gbps"]) for row in rows if row["case"] == "device"}
    wanted = [(row, wanted_gbps(row, device) or wanted_of_large(row, rows)) for row in rows if row["case"] != "device"]
    return [
        f"{row['case']} {row['dtype']}, {row['row_bytes']} B, {row['arm']}, {row['sms']} SMs: {row['gbps']} GB/s, less "
        f"than {want[1]}, "
        f"{harness.four_digits(want[0])}"
        for row, want in wanted
        if want and float(row["gbps"]) < want[0]
    ]


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False)
    parts = parser.add_mutually_exclusive_group()
    for part in ("--nvcomp", "--sizes", "--joins"):
        parts.add_argument(part, action="store_true")
    only, others = parser.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)

    def is_kept(row):
        if only.sizes or only.joins:
            return not row["case"].startswith(SIZED if only.sizes else JOINS)
        return row["case"].startswith((SIZED, JOINS)) or (only.nvcomp and not row["arm"].startswith("nvcomp"))

    run = harness.Run("codec", args, keep=is_kept)
    torch.manual_seed(0)
    rates = DeviceRates(run, record=not (only.nvcomp or only.sizes or only.joins))
    if only.sizes or only.joins:
        measure = run_sizes if only.sizes else run_joins
        measure(run, rates)
        return run.finish()
    if not only.nvcomp:
        run_normal(run, rates)
        run_synthetic(run, rates)
        run_large(run, rates)
        run_real(run, rates, args.data)
    run_nvcomp(run, rates, args.data)
    return run.finish([] if only.nvcomp else shortfalls(run.rows))


if __name__ == "__main__":
    sys.exit(main())
