"""Reports of tensors: how large they are, of which parts they consist, and what their bits do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .._common.statistics import Saves
from .._core import ROWS_PER_BASE
from .._layout.geometry import Geometry, default_length, stored_sizes
from .._rows.plan import spread_bytes
from .._schemes import AnyCodebook, ClusteredCodebook, PlanesCodebook
from .._tables.changes import decoded_bytes
from .._tables.compressed_tensor import CompressedTensor, compress_rows
from ..checkpoints._source import SourceTensor
from ..codecs._whole import WholeTensor
from .splitting import Split, scaled, split_rows

SAMPLE_BYTES = 1 << 20  # bytes of a tensor that are decoded and counted
_RUNS = 32  # places of a tensor from which a sample is taken
_BINS = 32  # bins of the histogram of lengths
_BLOCK_ROWS = 1 << 22  # rows whose lengths are counted at once

Read = Callable[[int, int], np.ndarray]  # returns bytes [start, end) of a tensor, uint8


@dataclass(frozen=True)
class TensorContents(Saves):
    """The parts of which a tensor consists."""

    # name, dtype, shape: of the tensor; dtype has torch's name.
    name: str
    dtype: str
    shape: tuple[int, ...]
    # "table": compressed in the file; "delta": a table of differences; "plain": as it is; "estimate": an ordinary
    # tensor, and what compressing a sample of it tells about the whole; "unknown": this ibp cannot read it.
    kind: str
    scheme: str  # "raw", "ibp", "planes", "plain", or the name of an external codec
    original_bytes: int  # bytes of the tensor
    # Bytes of everything that the file has, or would have, for it: rows, index, unused room and its share of the
    # codebook.
    stored_bytes: int
    # Bytes by part, which add up to stored_bytes. The parts of coded rows are exact if all rows were counted.
    parts: dict[str, int]
    # row_bytes, num_rows, raw_rows, default_rows: bytes of a row, the number of rows, and how many of them are stored
    # raw, or as default rows without bytes.
    row_bytes: int = 0
    num_rows: int = 0
    raw_rows: int = 0
    default_rows: int = 0
    sampled_rows: int = 0  # how many rows were decoded and counted
    clusters: int = 0  # the number of the table's codebooks; 0 without a codebook
    codebook: str = ""  # a description of the codebook; "" without a codebook
    # float [w]: the entropy, in bits, of each bit of an element, from the most significant bit. Empty if there are no
    # elements.
    entropy: list[float] = field(default_factory=list)
    # left_out, ranked: float [w]: the share of the elements in which a bit is not stored, and in which it is part of a
    # symbol.
    left_out: list[float] = field(default_factory=list)
    ranked: list[float] = field(default_factory=list)
    # How many rows have which stored bytes, in bins of equal width from 0 to row_bytes.
    lengths: list[int] = field(default_factory=list)
    # (name, meaning, share) of the codebook's most frequent entries.
    entries: list[tuple[str, str, float]] = field(default_factory=list)
    note: str = ""  # why the tensor could not be looked into; otherwise ""

    @property
    def is_sampled(self) -> bool:
        """Whether the parts of coded rows are known only from some of the rows."""
        return self.sampled_rows < self.num_rows


@dataclass(frozen=True)
class FileReport(Saves):
    """The contents of a file, or of a set of files."""

    path: str  # the path as it was given
    format: str  # "ibp", "safetensors", "npy", "npz" or "torch"
    is_estimate: bool  # whether stored bytes are those that compressing would give
    file_bytes: int  # bytes of the files
    metadata: dict[str, str] = field(default_factory=dict)  # the user's metadata
    tensors: list[TensorContents] = field(default_factory=list)  # the reports, in the file's order
    # Bytes of the compressed files that belong to no tensor: headers, checksums, padding. 0 if only some of the tensors
    # are reported.
    other_bytes: int = 0

    @property
    def original_bytes(self) -> int:
        return sum(tensor.original_bytes for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the compressed files; if only some of the tensors are reported, of these."""
        return sum(tensor.stored_bytes for tensor in self.tensors) + self.other_bytes

    def as_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        names = ("file_bytes", "metadata", "original_bytes", "stored_bytes", "savings")
        return {
            "path": self.path,
            "format": self.format,
            "estimate": self.is_estimate,
            **{name: getattr(self, name) for name in names},
            "tensors": [{**vars(tensor), "savings": tensor.savings} for tensor in self.tensors],
        }


# ---- samples of rows ----


def sample_runs(num_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges [first, last) of the rows to look at, spread evenly over the table; all rows of a small table.
    Each range begins at a multiple of 32 if the table has enough rows."""
    wanted = max(_RUNS, SAMPLE_BYTES // max(1, row_bytes))
    if num_rows <= wanted:
        return [(0, num_rows)] if num_rows else []
    size = wanted // _RUNS
    grain = ROWS_PER_BASE if num_rows >= ROWS_PER_BASE * _RUNS * -(-size // ROWS_PER_BASE) else 1
    starts = [run * (num_rows - size) // (_RUNS - 1) // grain * grain for run in range(_RUNS)]
    return [(start, start + size) for start in starts]


def read_rows(read: Read, geometry: Geometry) -> np.ndarray:
    """Returns a sample of the rows of a tensor, uint8 [n, row_bytes]. A short last row is extended with zeros."""
    row_bytes, runs = geometry.row_bytes, sample_runs(geometry.num_rows, geometry.row_bytes)
    parts = [read(first * row_bytes, min(last * row_bytes, geometry.num_bytes)) for first, last in runs]
    missing = -sum(map(len, parts)) % row_bytes
    return np.concatenate([*parts, np.zeros(missing, np.uint8)]).reshape(-1, row_bytes)


# ---- reports ----


def report_table(
    name: str, table: CompressedTensor, *, kind: str = "table", codebook_share: float = 1.0
) -> TensorContents:
    """Returns the report of a table on any device. codebook_share: the share of the codebook's bytes that counts for
    this table; less than 1 if other tables have the same codebook."""
    geometry, found = table.geometry, _count_rows(table)
    rows = read_rows(lambda start, end: decoded_bytes(table, start, end, table.device).cpu().numpy(), geometry)
    runs = sample_runs(geometry.num_rows, geometry.row_bytes)
    numbers = np.concatenate([np.arange(*run) for run in runs]) if runs else np.empty(0, np.int64)
    split = _split_table(table, rows, numbers)
    codebook_bytes = round(codebook_share * table.codebook.nbytes) if table.codebook else 0
    parts = scaled(split.parts if split else Counter(), found.coded_bytes)
    parts |= {"raw rows": found.raw_bytes, "index": table.index_bytes, "codebook": codebook_bytes}
    parts["unused room"] = max(0, spread_bytes(table) - found.raw_bytes - found.coded_bytes)
    parts = {part: size for part, size in parts.items() if size}
    width = split.left_out.size if split else 8 * _element_bytes(geometry)
    left_out, ranked = (split.left_out, split.ranked) if split else (np.zeros(width), np.zeros(width))
    num_rows = max(1, geometry.num_rows)
    default_share, coded_share = found.default_rows / num_rows, found.coded_rows / num_rows
    return TensorContents(
        **_identity(name, geometry, kind, table.scheme),
        stored_bytes=sum(parts.values()),
        parts=parts,
        row_bytes=geometry.row_bytes,
        num_rows=geometry.num_rows,
        raw_rows=found.raw_rows,
        default_rows=found.default_rows,
        sampled_rows=len(rows),
        clusters=len(table.codebook) if isinstance(table.codebook, ClusteredCodebook) else int(bool(table.codebook)),
        codebook=repr(table.codebook) if table.codebook else "",
        entropy=bit_entropy(rows, width // 8),
        left_out=_rounded(coded_share * left_out + default_share),
        ranked=_rounded(coded_share * ranked),
        lengths=found.histogram,
        entries=_with_powers(split.entries, table) if split else [],
    )


def report_whole(name: str, whole: WholeTensor) -> TensorContents:
    """Returns the report of a tensor of a general codec. It has no rows, and nothing is decoded."""
    parts = {"coded blocks": whole.stored_bytes, "index": whole.offsets.nbytes}
    return TensorContents(
        **_identity(name, Geometry(whole.shape, whole.dtype, 1), "table", whole.codec),
        stored_bytes=sum(parts.values()),
        parts={part: size for part, size in parts.items() if size},
    )


def report_plain(tensor: SourceTensor) -> TensorContents:
    """Returns the report of a tensor that the file has as it is."""
    geometry = Geometry.of(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    rows = read_rows(tensor.read, geometry)
    return TensorContents(
        **_identity(tensor.name, geometry, "plain", "plain"),
        stored_bytes=geometry.num_bytes,
        parts={"plain": geometry.num_bytes} if geometry.num_bytes else {},
        row_bytes=geometry.row_bytes,
        num_rows=geometry.num_rows,
        sampled_rows=len(rows),
        entropy=bit_entropy(rows, _element_bytes(geometry)),
    )


def report_estimate(tensor: SourceTensor, codebook: AnyCodebook, *, codebook_share: float = 1.0) -> TensorContents:
    """Returns the report of what a tensor, which must not be empty, would be as a packed table. A table of a sample
    of its rows is made, and its report is scaled to all rows."""
    geometry = Geometry(torch.Size(tensor.shape), tensor.dtype, codebook.row_bytes)
    rows = read_rows(tensor.read, geometry)
    is_whole = len(rows) == geometry.num_rows
    sample = torch.from_numpy(rows).reshape(-1)[: geometry.num_bytes if is_whole else None]
    sample = sample.clone().view(tensor.dtype)
    sample = sample.view(tensor.shape) if is_whole else sample
    table = compress_rows(sample, codebook=codebook, layout="packed", device="cpu", memory="host")
    found = report_table(tensor.name, table, kind="estimate", codebook_share=codebook_share)
    if is_whole:
        return found
    factor = geometry.num_bytes / table.original_bytes
    parts = {part: size if part == "codebook" else round(factor * size) for part, size in found.parts.items()}
    return replace(
        found,
        **_identity(tensor.name, geometry, "estimate", found.scheme),
        stored_bytes=sum(parts.values()),
        parts=parts,
        num_rows=geometry.num_rows,
        raw_rows=round(factor * found.raw_rows),
        default_rows=round(factor * found.default_rows),
        lengths=[round(factor * count) for count in found.lengths],
    )


def _identity(name: str, geometry: Geometry, kind: str, scheme: str) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "shape": tuple(geometry.shape),
        "kind": kind,
        "scheme": scheme,
        "original_bytes": geometry.num_bytes,
    }


def _element_bytes(geometry: Geometry) -> int:
    """Returns the bytes of the elements whose bits are distinguished: a part of a complex number, or what rows
    consist of."""
    own_bytes = geometry.dtype.itemsize // (2 if geometry.dtype.is_complex else 1)
    return math.gcd(own_bytes, geometry.row_bytes)


# ---- rows ----


class _ReportRows(NamedTuple):
    """How many rows of each kind a table has, how many bytes they take, and their distribution
    (`TensorContents.lengths`)."""

    raw_rows: int
    default_rows: int
    coded_rows: int
    raw_bytes: int
    coded_bytes: int
    histogram: list[int]


def _count_rows(table: CompressedTensor) -> _ReportRows:
    geometry, lengths = table.geometry, table.lengths.cpu().numpy()
    counts = np.zeros(1 << 16, np.int64)
    for start in range(0, len(lengths), _BLOCK_ROWS):
        counts += np.bincount(lengths[start : start + _BLOCK_ROWS], minlength=len(counts))
    if not len(lengths):
        counts[0] = geometry.num_rows
    default = default_length(geometry.row_bytes)
    raw_rows, default_rows = int(counts[0]), int(counts[default])
    rest = geometry.num_rows * geometry.row_bytes - geometry.num_bytes  # bytes that a short last row does not have
    is_short_raw = bool(rest) and (not len(lengths) or not lengths[-1])
    sizes = np.arange(len(counts))
    sizes[0], sizes[default] = geometry.row_bytes, 0
    stored = int((sizes * counts).sum()) - raw_rows * geometry.row_bytes
    return _ReportRows(
        raw_rows,
        default_rows,
        geometry.num_rows - raw_rows - default_rows,
        raw_rows * geometry.row_bytes - is_short_raw * rest,
        stored,
        np.histogram(sizes, _BINS, (0, geometry.row_bytes), weights=counts)[0].tolist(),
    )


def _lengths(table: CompressedTensor, numbers: np.ndarray) -> np.ndarray:
    """Returns the entries of the index for some rows, int64; zeros if the table has no index."""
    if not table.lengths.numel():
        return np.zeros(numbers.shape, np.int64)
    return table.lengths.cpu().numpy()[numbers].astype(np.int64)


def _split_table(table: CompressedTensor, rows: np.ndarray, numbers: np.ndarray) -> Split | None:
    """Returns the parts of those of some rows that are coded, or None if no row is. numbers: the numbers of the
    rows."""
    lengths = _lengths(table, numbers)
    coded = (lengths != 0) & (lengths != default_length(table.row_bytes))
    rows, numbers = rows[coded], numbers[coded]
    if table.codebook is None or not len(rows):
        return None
    element_bytes = _element_bytes(table.geometry)
    if not isinstance(table.codebook, ClusteredCodebook):
        return split_rows(rows, table.codebook, element_bytes)
    clusters = _first_bytes(table, numbers)
    splits = []
    for cluster in np.unique(clusters):
        own = rows[clusters == cluster]
        splits.append((len(own), split_rows(own, table.codebook.codebooks[cluster], element_bytes)))
    # The split of the rows of all clusters.
    num_rows = sum(count for count, _ in splits)
    parts = sum((split.parts for _, split in splits), Counter({"cluster numbers": num_rows}))
    left_out, ranked = (
        sum(count / num_rows * getattr(split, name) for count, split in splits) for name in ("left_out", "ranked")
    )
    largest = max(splits, key=lambda split: split[0])[1]
    return Split(parts, np.asarray(left_out), np.asarray(ranked), largest.entries)


def _first_bytes(table: CompressedTensor, numbers: np.ndarray) -> np.ndarray:
    """Returns the first stored byte of each of some coded rows: the cluster's number, in scheme planes and in scheme
    ibp."""
    if table.slot_bytes:
        return table.slots.cpu().numpy()[numbers * table.slot_bytes]
    overflow, bases = table.overflow.cpu().numpy(), table.bases.cpu().numpy()
    if table._has_own_bases:
        return overflow[bases[numbers]]
    of_group = numbers[:, None] // ROWS_PER_BASE * ROWS_PER_BASE + np.arange(ROWS_PER_BASE)
    lengths = torch.from_numpy(_lengths(table, np.minimum(of_group, table.num_rows - 1)))
    stored = stored_sizes(lengths, table.row_bytes, table.row_bytes).numpy()
    before = np.where(of_group < numbers[:, None], stored, 0).sum(1)
    return overflow[bases[numbers // ROWS_PER_BASE] + before]


def _with_powers(entries: list[tuple[str, str, float]], table: CompressedTensor) -> list[tuple[str, str, float]]:
    """Returns the entries. If symbols are the exponents of floats, each has the power of two that its symbol stands
    for."""
    codebook, dtype = table.codebook, table.dtype
    first = codebook.codebooks[0] if isinstance(codebook, ClusteredCodebook) else codebook
    if not isinstance(first, PlanesCodebook) or not (dtype.is_floating_point or dtype.is_complex):
        return entries
    info = torch.finfo(dtype)
    mantissa_bits = -round(math.log2(info.eps))
    is_split = first.rotate and first.residual_bits == mantissa_bits + 1 and not first.invariant_bits
    if not is_split or first.width != info.bits:
        return entries
    bias = 2 ** (first.symbol_bits - 1) - 1
    special = {0: "zero or subnormal", 2**first.symbol_bits - 1: "infinite or NaN"}
    return [
        (name, f"{meaning}: {special.get(int(name, 16), f'2^{int(name, 16) - bias}')}", share)
        for name, meaning, share in entries
    ]


# ---- bits ----


def bit_entropy(rows: np.ndarray, element_bytes: int) -> list[float]:
    """Returns Shannon's entropy of each bit of the elements of rows, in bits, from the most significant bit."""
    if not rows.size or rows.shape[1] % element_bytes:
        return []
    p = np.unpackbits(rows.reshape(-1, element_bytes)[:, ::-1], axis=1).mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return _rounded(np.nan_to_num(entropy))


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 3) + 0.0 for value in values]
