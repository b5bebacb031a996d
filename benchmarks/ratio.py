"""How much do methods save on sets of data? Writes one table, sets x methods. In every cell the bits of decompressed
data are checked.

The sets are synthetic ones, fields of two simulations in FP64, and those in --data. Methods: the paper's own choice and
bytes; scheme ibp; scheme planes; auto; bit-plane compression of entries of 128 bytes; floats as DietGPU codes them, by
the rANS of rans.c, if there is a C compiler; zstd on blocks of 64 KiB and row by row, if the package `zstandard` is
installed; LZ4 on blocks, if `lz4` is; nvCOMP's codecs, if there is a GPU and the wheel `nvidia-nvcomp-cu13`; and ndzip,
for elements of two and four bytes taken as FP32, if IBP_NDZIP names a clone of it. With --no-times the column `seconds`
stays empty. --methods and --sets take names, separated by semicolons, and measure only these; the CSV's other rows stay
as they are.
"""

import argparse
import csv
import functools
import importlib.metadata
import itertools
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, replace

import numpy as np
import torch

import ibp
from ibp._rows.planes import relearn

from . import bpc, harness, ndzip, rans, reading, sets

try:
    import zstandard
except ImportError:
    zstandard = None
try:
    import lz4.block as lz4_block
    from lz4 import library_version_string as lz4_version
except ImportError:
    lz4_block = None
try:
    from nvidia import nvcomp
except ImportError:
    nvcomp = None
try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = None

COLUMNS = "set,dtype,rows,row_bytes,method,savings,link_savings,metadata_bytes,seconds,version,commit".split(",")
BLOCK_BYTES = 64 << 10
BLOCK_INDEX_BYTES = 4  # A zstd block is counted with its length, without which it cannot be found.
REPEATS = 3
OURS = ("paper", "ibp", "planes", "auto")
NO_LIST, SPARSE_SET, LEARNED_ROWS = "planes, no list", "half zeros", 1024  # Only SPARSE_SET is measured with NO_LIST.
BPC = "bit planes"
# Floats as DietGPU codes them. FP64 has two coders, or one for both sets of bytes. Zeros are left to a bitmap where at
# least BITMAP_SHARE of the elements are zero.
RANS, RANS_ONE = "rans", "rans, one coder"
RANS_BITMAP, RANS_CODED_BITMAP, BITMAP_SHARE = "rans, bitmap", "rans, coded bitmap", 0.01
ZSTD, ZSTD_ROWS, LZ4, NDZIP = "zstd -3", "zstd -3, row by row", "lz4", "ndzip"
RATIO_FROM = 0.8  # From these savings on the table shows "5.0x" instead of "80.0".


@dataclass
class Cell:
    """The result of a method for a set. Bytes are sums over the set's tables; seconds are the median of whole runs."""

    stored_bytes: int
    link_bytes: int | None = None
    metadata_bytes: int | None = None
    seconds: float | None = None


class Sheet:
    """A script's CSV file, which is written row by row, and the script's failures. If it has a column for the commit,
    rows get the commit. keep: function(row) -> whether a row of the earlier file stays."""

    def __init__(self, path, columns, keep=lambda row: False):
        self.path, self.columns, self.failures, self.started = path, columns, [], time.perf_counter()
        self._commit = {"commit": harness.commit_id()} if "commit" in columns else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        harness.start_file(path, columns, keep)
        with open(path, newline="") as file:
            self.rows = list(csv.DictReader(file))

    def rewrite(self, rows):
        """Makes these rows the only ones of the file."""
        self.rows = rows
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def add(self, **row):
        row = self._commit | row
        self.rows.append(row)
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def failed(self, what, error):
        self.failures.append(f"{what}: {type(error).__name__}: {error}")
        traceback.print_exception(error)

    def finish(self):
        """Prints a summary and the failures. Returns the exit status of the script."""
        print(f"{self.path}: {len(self.rows)} rows in {time.perf_counter() - self.started:.0f} s")
        for failure in self.failures:
            print(f"FAILED {failure}")
        return 1 if self.failures else 0


# ---- methods: function(list of tensors on the device, device) -> (Cell without times, function that compresses once mo


def _compress(x, method, layout, device):
    options = {"layout": layout, "device": device, "memory": "host"}
    if method == "paper":
        codebook = ibp.codecs.analyze(x, paper=True, chunk_bytes=4, sample=1.0, device=device)
        return ibp.compress(x, codebook=codebook, **options)
    return ibp.compress(x, scheme=method, **options)


def ours(method):
    def measure(tensors, device):
        total = Cell(0, 0, 0)
        for x in tensors:
            packed, slots = (_compress(x, method, layout, device) for layout in ("packed", "slots"))
            for table in (packed, slots):
                harness.check_bits(table.decompress(device=x.device, check=True), x, f"{method}, {table.layout}")
            total.stored_bytes += packed.stored_bytes
            total.metadata_bytes += packed.index_bytes + (packed.codebook.nbytes if packed.codebook else 0)
            total.link_bytes += slots.link_bytes
        return total, lambda: [_compress(x, method, "packed", device) for x in tensors]

    return measure


def without_list(tensors, device):
    """Compresses sparse rows by scheme planes with every element encoded, including zeros. The difference shows what
    the list of other elements saves."""

    def compress(x):
        listed = ibp.codecs.analyze(x, scheme="planes", device=device)
        rows = x[:LEARNED_ROWS].contiguous().view(torch.uint8).view(-1)
        codebook = relearn(replace(listed, listed=False), rows, [rows.numel() // listed.row_bytes])[0]
        return ibp.compress(x, codebook=codebook, layout="packed", device=device, memory="host")

    total = Cell(0, None, 0)
    for x in tensors:
        table = compress(x)
        harness.check_bits(table.decompress(device=x.device, check=True), x, NO_LIST)
        total.stored_bytes += table.stored_bytes
        total.metadata_bytes += table.index_bytes + table.codebook.nbytes
    return total, lambda: [compress(x) for x in tensors]


def bit_planes(tensors, device):
    """Compresses entries of 128 bytes by bit-plane compression, in the sizes that Buddy Compression allows."""
    total = Cell(0, 0, 0)
    for x in tensors:
        entries = bpc.entries_of(bytes_of(x.cpu()))
        classes, data = bpc.encode(entries)
        harness.check_bits(bpc.decode(classes, data), entries, BPC)
        total.stored_bytes += data.size
        total.link_bytes += bpc.sector_bytes(classes)
        total.metadata_bytes += -(-len(entries) * bpc.METADATA_BITS // 8)
    total.stored_bytes += total.metadata_bytes
    return total, lambda: [bpc.encode(bpc.entries_of(bytes_of(x.cpu()))) for x in tensors]


def byte_sets(words, is_half):
    """Splits floats, unsigned numbers [n], into sets of bytes as DietGPU does. Returns (the sets that are coded, one or
    for FP64 two of uint8 [n]; the other bytes, uint8 [n, others]). The sign moves behind the mantissa, so that the
    first byte is the exponent's. is_half: whether the floats are FP16, whose signs stay where they are."""
    turned = words if is_half else words << 1 | words >> (8 * words.itemsize - 1)
    parts = turned.view(np.uint8).reshape(-1, words.itemsize)
    num_sets = 2 if words.itemsize == 8 else 1
    return [np.ascontiguousarray(parts[:, -1 - k]) for k in range(num_sets)], parts[:, :-num_sets]


def floats_of(coded_sets, rest, is_half):
    """Returns the floats that byte_sets has split."""
    parts = np.concatenate([rest, np.stack(coded_sets[::-1], axis=1)], axis=1)
    turned = parts.view(f"u{parts.shape[1]}")[:, 0]
    return turned if is_half else turned >> 1 | turned << (8 * turned.itemsize - 1)


def rans_floats(one_coder=False, bitmap=False, coded_bitmap=False):
    """Returns a method that codes floats as DietGPU does: sets of bytes by an rANS each, or all by one with one_coder.
    bitmap: whether a bitmap says which elements are zero, and the others alone are coded. coded_bitmap: whether the
    bitmap's bytes are coded by an rANS, too."""

    def code(data, total):
        coded = rans.encode(data)
        total.stored_bytes += coded.size
        total.metadata_bytes += rans.TABLE_BYTES
        return rans.decode(coded)

    def measure(tensors, device):
        total = Cell(0, None, 0)
        for x in tensors:
            is_half = x.dtype == sets.FP16
            words = bytes_of(x.cpu()).numpy().view(f"u{x.element_size()}")
            is_kept = words != 0 if bitmap else np.ones(words.shape, bool)
            split, rest = byte_sets(words[is_kept], is_half)
            total.stored_bytes += rest.size
            if one_coder:
                back = np.split(code(np.concatenate(split), total), len(split))
            else:
                back = [code(part, total) for part in split]
            if bitmap:
                bits = np.packbits(is_kept)
                if coded_bitmap:
                    bits = code(bits, total)
                else:
                    total.stored_bytes += bits.size
                is_kept = np.unpackbits(bits, count=words.size).astype(bool)
            found = np.zeros_like(words)
            found[is_kept] = floats_of(back, rest, is_half)
            if not np.array_equal(found, words):
                raise AssertionError("bits differ")
        return total, lambda: measure(tensors, device)

    return measure


def bytes_of(x):
    return x.contiguous().view(torch.uint8).reshape(-1)


def block_codec(make, by_row=False):
    """Returns a method that compresses blocks on the CPU. make() returns (compress, decompress) of bytes. Blocks that
    would not become smaller count as they are."""

    def measure(tensors, device):
        (compress, decompress), total = make(), Cell(0, None, 0)
        sizes = [x[0].numel() * x.element_size() if by_row else BLOCK_BYTES for x in tensors]
        blocks = [
            part.numpy().tobytes() for x, size in zip(tensors, sizes) for part in bytes_of(x.cpu()).split(max(1, size))
        ]
        for block in blocks:
            coded = compress(block)
            if decompress(coded) != block:
                raise AssertionError("bits differ")
            total.stored_bytes += min(len(coded), len(block))
            total.metadata_bytes += BLOCK_INDEX_BYTES
        return total, lambda: [compress(block) for block in blocks]

    return measure


def by_ndzip(tensors, device):
    """Compresses whole tensors on the CPU with ndzip."""

    def code():
        return sum(min(ndzip.coded_bytes(bytes_of(x.cpu())), x.numel() * x.element_size()) for x in tensors)

    return Cell(code()), code


def zstd_coders():
    return zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress


def lz4_coders():
    return lz4_block.compress, lz4_block.decompress


def nvcomp_codec(algorithm, typestr, as_words):
    """Returns a method with a codec of nvCOMP. as_words: whether the codec gets words of the elements' size instead of
    bytes. The bytes include nvCOMP's own index."""

    def measure(tensors, device):
        torch.cuda.synchronize(device)
        codec = nvcomp.Codec(
            algorithm=algorithm, uncomp_chunk_size=BLOCK_BYTES, **({"data_type": typestr} if typestr else {})
        )
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
            tensors[0].element_size() if as_words else 1
        ]
        arrays, total = [nvcomp.as_array(bytes_of(x).view(words)) for x in tensors], Cell(0)
        for x, array in zip(tensors, arrays):
            coded = codec.encode(array)
            torch.cuda.synchronize(device)
            total.stored_bytes += coded.buffer_size
            back = codec.decode(coded)
            torch.cuda.synchronize(device)
            harness.check_bits(bytes_of(torch.as_tensor(back, device=device)), bytes_of(x), f"nvCOMP {algorithm}")
        return total, lambda: [codec.encode(array) for array in arrays]

    return measure


def nvcomp_options(dtype):
    """Returns {method: (algorithm, data type or None, as_words)}. ANS knows floats of 2 bytes, and in newer versions of
    4 bytes, whose exponents it splits off. For other dtypes it encodes the bytes."""
    size, methods = dtype.itemsize, {}
    if dtype.is_floating_point and size in (2, 4):
        methods["nvcomp ANS float"] = ("ANS", f"<f{size}", False)
    unsigned = f"<u{size}" if size > 1 else "|u1"
    return methods | {
        "nvcomp ANS": ("ANS", "|u1", False),
        "nvcomp Bitcomp": ("Bitcomp", unsigned, True),
        "nvcomp GDeflate": ("GDeflate", None, False),
        "nvcomp Deflate": ("Deflate", None, False),
        "nvcomp Gzip": ("Gzip", None, False),
        "nvcomp zstd": ("Zstd", None, False),
        "nvcomp Snappy": ("Snappy", None, False),
        "nvcomp LZ4": ("LZ4", "|u1", False),
        "nvcomp Cascaded": ("Cascaded", unsigned, True),
    }


def methods_for(dtype, on_gpu):
    methods = {name: ours(name) for name in OURS} | {NO_LIST: without_list, BPC: bit_planes}
    if rans.compiler() and dtype.is_floating_point and dtype.itemsize > 1:
        methods[RANS] = rans_floats()
        if dtype == sets.FP64:
            methods[RANS_ONE] = rans_floats(one_coder=True)
        methods[RANS_BITMAP] = rans_floats(bitmap=True)
        methods[RANS_CODED_BITMAP] = rans_floats(bitmap=True, coded_bitmap=True)
    if zstandard:
        methods |= {ZSTD: block_codec(zstd_coders), ZSTD_ROWS: block_codec(zstd_coders, by_row=True)}
    if lz4_block:
        methods[LZ4] = block_codec(lz4_coders)
    if ndzip.repository() and dtype.itemsize in (2, 4):
        methods[NDZIP] = by_ndzip
    if nvcomp and on_gpu:
        methods |= {name: nvcomp_codec(*options) for name, options in nvcomp_options(dtype).items()}
    return methods


@functools.cache
def version_of(method):
    """Returns the version of the package that a method is from, or an empty text for code of this repository, which the
    commit names."""
    if method in (ZSTD, ZSTD_ROWS):
        return f"zstandard {zstandard.__version__}, zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"
    if method == LZ4:
        return f"lz4 {importlib.metadata.version('lz4')}, LZ4 {lz4_version()}"
    if method == NDZIP:
        return f"ndzip {ndzip.commit()[:7]}"
    return f"nvcomp {nvcomp.__version__}" if method.startswith("nvcomp ") else ""


def is_measured(method, case):
    """Returns whether a method is for a set: some show what a list or a bitmap of zeros saves."""
    if method == NO_LIST:
        return case.name == SPARSE_SET
    if method in (RANS_BITMAP, RANS_CODED_BITMAP):
        zeros = sum(int((x == 0).sum()) for x in case.tensors)
        return zeros >= BITMAP_SHARE * sum(x.numel() for x in case.tensors)
    return True


def say_what_is_left_out(on_gpu):
    if not rans.compiler():
        print(f"{RANS}: there is no C compiler, left out")
    if not zstandard:
        print(f"{ZSTD}: the package zstandard is not installed, left out")
    if not lz4_block:
        print(f"{LZ4}: the package lz4 is not installed, left out")
    if not ndzip.repository():
        print(f"{NDZIP}: IBP_NDZIP names no clone of it, left out")
    if not on_gpu:
        print("nvCOMP: needs --device cuda, left out")
    elif not nvcomp:
        print("nvCOMP: the package nvidia-nvcomp-cu13 is not installed, left out")


# ---- what auto should save -----------------------------------------------------------------------------------------


def _times(ratio):
    return 1 - 1 / ratio


# By set and dtype, these are the savings that `auto` should reach in the packed layout.
TARGETS = {
    ("normal 0.02", sets.BF16): 0.33,
    ("normal 0.02", sets.FP16): 0.144,
    ("normal 1", sets.FP32): 0.165,
    ("normal 1", sets.FP64): 0.124,
    ("half zeros", sets.FP16): 0.509,
    ("half zeros", sets.BF16): 0.6,
    ("half zeros", sets.FP32): 0.55,
    ("half zeros", sets.FP64): 0.545,
    ("clipped normal", sets.FP32): 0.56,
    ("clipped normal", sets.FP16): 0.535,
    ("clipped normal", sets.BF16): 0.63,
    ("FP8 normal 1", torch.float8_e4m3fn): 0.173,
    ("FP8 normal 1", torch.float8_e5m2): 0.298,
    ("dropout", sets.BF16): 0.57,
    ("holding BF16", sets.FP32): 0.66,
    ("holding BF16", sets.FP16): 0.325,
    ("holding FP16", sets.FP32): 0.57,
    ("kokoro", sets.BF16): 0.339,
    ("kokoro", sets.FP16): 0.153,
    ("kokoro", sets.FP32): 0.17,
    ("word2vec", sets.BF16): 0.33,
    ("stories260k, codebook a tensor", sets.BF16): 0.32,
    ("K-cache", sets.BF16): 0.334,
    ("V-cache", sets.BF16): 0.32,
    ("ncf mlp_user", sets.FP32): 0.16,
    ("citeseer", sets.FP32): _times(350),
    ("cora", sets.FP32): _times(240),
    ("amazon_photo", sets.FP32): _times(38),
    ("pubmed_1060rows", sets.FP32): _times(10),
    ("pubmed_1060rows", sets.FP16): _times(8.5),
    ("pubmed_1060rows", sets.BF16): _times(10),
}
TARGET_OF = {(name, harness.dtype_name(dtype)): target for (name, dtype), target in TARGETS.items()}


def shortfalls(cells, targets):
    """Returns lines that say where savings {method: fraction} of {(set, dtype): ...} are below their targets."""
    found = []
    for (name, dtype), savings in cells.items():
        wanted = [
            ("auto", "its target", targets.get((name, dtype)), 0),
            ("auto", "raw rows", 0, 0),
            ("auto", "ibp", savings.get("ibp"), 0.001),
            ("ibp", "paper", savings.get("paper"), 1e-5),
        ]
        for method, other, least, slack in wanted:
            if method in savings and least is not None and savings[method] < least - slack:
                found.append(
                    f"{name} {dtype}: {method} saves {show(savings[method], 2)}, less than {other}, {show(least, 2)}"
                )
    return found


# ---- a run ---------------------------------------------------------------------------------------------------------


def _seconds(again, device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    again()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_cell(measure, tensors, device, with_times):
    cell, again = measure(tensors, device)
    if with_times:
        cell.seconds = statistics.median(_seconds(again, device) for _ in range(REPEATS))
    return cell


def record(sheet, case, method, cell):
    def savings(num_bytes):
        return "" if num_bytes is None else f"{1 - num_bytes / case.num_bytes:.6f}"

    sheet.add(
        set=case.name,
        dtype=harness.dtype_name(case.dtype),
        rows=case.rows,
        row_bytes=case.row_bytes,
        method=method,
        savings=savings(cell.stored_bytes),
        link_savings=savings(cell.link_bytes),
        metadata_bytes="" if cell.metadata_bytes is None else cell.metadata_bytes,
        seconds="" if cell.seconds is None else harness.four_digits(cell.seconds),
        version=version_of(method),
    )


def run_set(sheet, case, device, with_times, wanted):
    """Measures the methods for one set. wanted: the names of the methods, None for all."""
    tensors = [x.to(device) for x in case.tensors]
    for method, measure in methods_for(case.dtype, device.type == "cuda").items():
        if (wanted is not None and method not in wanted) or not is_measured(method, case):
            continue
        try:
            record(sheet, case, method, measure_cell(measure, tensors, device, with_times))
        except Exception as error:
            what = f"{method}, {case.name} {harness.dtype_name(case.dtype)}"
            if method.startswith("nvcomp ") and not isinstance(
                error, AssertionError
            ):  # Versions of nvCOMP differ in their dtypes.
                print(f"{what}: left out: {error}")
            else:
                sheet.failed(what, error)


# ---- the table -----------------------------------------------------------------------------------------------------


def show(savings, digits=1):
    """Returns percent, or for example "12.3x" if most of the bytes are saved."""
    if savings < RATIO_FROM:
        return f"{round(100 * savings, digits) + 0.0:.{digits}f}"  # Adding 0.0 avoids "-0.0".
    ratio = 1 / (1 - savings)
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.{digits}f}x"


def print_lines(title, heads, lines, num_left):
    """Prints a table of texts. The first num_left columns are aligned left."""
    if Console is None:
        widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
        padded = ([text.ljust(width) for text, width in zip(line, widths)] for line in [heads, *lines])
        print(title, *("  ".join(line).rstrip() for line in padded), sep="\n")
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(head.replace(" ", "\n"), justify="left" if i < num_left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console(highlight=False)
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    console.print(table)


def _text(row):
    text = show(float(row["savings"]))
    return text if row["link_savings"] == "" else f"{text} ({show(float(row['link_savings']))})"


def cells_of(rows):
    """Returns {(set, dtype): {method: savings}}."""
    cells = {}
    for row in rows:
        cells.setdefault((row["set"], row["dtype"]), {})[row["method"]] = float(row["savings"])
    return cells


def print_table(rows, targets):
    methods = reading.in_order(row["method"] for row in rows)
    lines = {}
    for row in rows:
        lines.setdefault((row["set"], row["dtype"], str(row["row_bytes"])), {})[row["method"]] = _text(row)
    saved, texts = cells_of(rows), []
    for (name, dtype, row_bytes), values in lines.items():
        target, auto = targets.get((name, dtype)), saved[name, dtype].get("auto")
        verdict = "" if target is None or auto is None else f"{show(target)} {'yes' if auto >= target else 'NO'}"
        texts.append([name, dtype, row_bytes, *(values.get(method, "") for method in methods), verdict])
    heads = ["set", "dtype", "row bytes", *methods, "target"]
    print_lines("Percent saved, or times smaller; in brackets over the link, in sectors", heads, texts, 2)


def rows_to_keep(path, methods, names):
    """Returns the rows of an earlier run's CSV that a run of some methods and sets does not measure. None stands for
    all."""
    if (methods is None and names is None) or not path.exists():
        return []
    with open(path, newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if (methods is not None and row["method"] not in methods) or (names is not None and row["set"] not in names)
        ]


def in_usual_order(rows):
    """Returns rows in the order of sets.py's sets, and within a set in the order in which methods first appear."""
    kinds = (sets.SYNTHETIC, sets.REAL, sets.SIMULATIONS)
    names = reading.in_order(name for kind in kinds for name, *_ in kind)
    dtypes = {name: list(map(harness.dtype_name, held)) for name, held, _ in sets.SYNTHETIC}
    dtypes |= {name: [harness.dtype_name(sets.FP64)] for name, *_ in sets.SIMULATIONS}
    dtypes |= {name: list(map(harness.dtype_name, held)) for name, _, held, _ in sets.REAL}
    methods = reading.in_order(row["method"] for row in rows)
    return sorted(
        rows,
        key=lambda row: (
            names.index(row["set"]),
            dtypes[row["set"]].index(row["dtype"]),
            methods.index(row["method"]),
        ),
    )


def parsed(argv):
    def names(text):
        return [name.strip() for name in text.split(";")]

    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--no-times", action="store_true")
    own.add_argument("--methods", type=names)
    own.add_argument("--sets", type=names)
    options, others = own.parse_known_args(argv)
    return options, harness.parse_args(others, __doc__)


def main(argv=None):
    options, args = parsed(argv)
    device, path = torch.device(args.device), args.out / "ratio.csv"
    kept = rows_to_keep(path, options.methods, options.sets)
    sheet = Sheet(path, COLUMNS)
    for row in kept:
        sheet.add(**row)
    say_what_is_left_out(device.type == "cuda")
    if not options.no_times:
        for method in OURS:  # This does what only first calls do.
            _compress(torch.randn(64, 64, device=device), method, "packed", device)
    simulated = sets.simulated_sets(sets.QUICK_ROWS if args.quick else sets.ROWS)
    for case in itertools.chain(sets.all_sets(args.data, args.quick), simulated):
        if options.sets is None or case.name in options.sets:
            run_set(sheet, case, device, not options.no_times, options.methods)
            print(".", end="", flush=True)
    print()
    if kept:
        sheet.rewrite(in_usual_order(sheet.rows))
    targets = {} if args.quick else TARGET_OF  # Small tables need not reach the targets.
    print_table(sheet.rows, targets)
    for line in shortfalls(cells_of(sheet.rows), targets):
        print(f"BELOW {line}")
    return sheet.finish()


if __name__ == "__main__":
    sys.exit(main())
