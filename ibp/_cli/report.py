"""Reports on files and tensors: their sizes, their parts, and how their bits are stored. For files that ibp wrote, a
report says what they contain. For other files of tensors, it estimates what compressing them would give.

`inspect_path` makes the report on a file. The reports on tensors, such as that of `report_table`, consist of what the
index of a table tells about all rows (`count_rows`), and of what is found in a sample of the decoded rows: the entropy
of bits, and the sizes of the parts of coded rows. The latter are computed from the rows and their codebook, as a
`Split`, by the rules of FORMAT.md, which also explains the terms of the two schemes.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibp._common.manners import Saves
from ibp._common.process import tqdm
from ibp._core import ROWS_PER_BASE
from ibp._files import ChecksumError, File, FileFormatError, find_files, is_url, read_header, views_in
from ibp._files import open as open_file
from ibp._rows.clusters import ClusteredCodebook
from ibp._rows.codebook import AnyCodebook
from ibp._rows.geometry import Geometry, default_length, stored_sizes
from ibp._rows.handle import spread_bytes
from ibp._rows.learning import Options
from ibp._rows.masks import Codebook
from ibp._rows.planes import PlanesCodebook
from ibp._rows.table import decoded_bytes, has_own_bases
from ibp._tables.compressed_tensor import CompressedTensor, compress_rows
from ibp.checkpoints._coding import Codebooks
from ibp.checkpoints._inputs import local_path, open_source
from ibp.checkpoints._outputs import compressed_bytes, table_bytes
from ibp.checkpoints._source import Source, SourceTensor, loaded_tensor
from ibp.codecs._whole import WholeTensor
from ibp.deltas import Delta

SAMPLE_BYTES = 1 << 20  # Size in bytes of the sample of a tensor that is decoded and counted.
_RUNS = 32  # A sample consists of this number of runs of consecutive rows.
_MOST_ENTRIES = 16  # Largest number of entries of a codebook that a report lists.
_BINS = 32  # Number of bins in the histogram of row lengths.
_BLOCK_ROWS = 1 << 22  # Number of rows whose lengths are counted at once.

_Read = Callable[[int, int], np.ndarray]  # A function that returns bytes [start, end) of a tensor, uint8.
_Wanted = Callable[[str], bool]  # A function that returns whether to report on the tensor with a given name.


@dataclass(frozen=True)
class TensorContents(Saves):
    """The report on one tensor."""

    name: str
    dtype: str  # The name of the dtype in torch, without "torch.". "?": not known.
    shape: tuple[int, ...]
    # How the file contains the tensor. "table": compressed. "delta": as a table of differences from another tensor.
    # "plain": uncompressed. "unknown": in a form that this version of ibp cannot read. "estimate": ibp did not write
    # the file, and the report estimates a table by compressing a sample of the tensor.
    kind: str
    scheme: str  # "raw", "ibp", "planes", "plain", or the name of an external codec. "?": not known.
    original_bytes: int  # Size of the uncompressed tensor in bytes.
    # Size in bytes of the tensor in the file, or, for an estimate, in the file that compressing would make. It includes
    # rows, index, unused room and padding, as in `ibp.TensorInfo`. It does not include the codebook, which several
    # tensors may share.
    stored_bytes: int
    # For each part, its size in bytes. The sum is stored_bytes. The part "unused room" consists of padding and of bytes
    # of slots and overflow that no row fills. The sizes of the parts of coded rows are exact if `is_sampled` is False;
    # otherwise they are estimated.
    parts: dict[str, int]
    row_bytes: int = 0  # Size of a row in bytes.
    num_rows: int = 0  # Number of rows. 0: the tensor is empty, is not divided into rows, or cannot be read.
    raw_rows: int = 0  # Number of rows that are stored raw.
    default_rows: int = 0  # Number of default rows, which are zeros or the codebook's default, and take no bytes.
    sampled_rows: int = 0  # Number of rows that were decoded and counted.
    clusters: int = 0  # Number of codebooks of the table.
    codebook: str = ""  # A description of the codebook. "": there is no codebook.
    codebook_bytes: int = 0  # Size of the codebook in bytes, without padding.
    # float [w]: for each bit of an element, its entropy in bits, the most significant bit first. Empty if there are no
    # elements, or if this is not known.
    entropy: list[float] = field(default_factory=list)
    # float [w]: for each bit of an element, the fraction of the elements in which the bit is not stored. Empty if this
    # is not known.
    left_out: list[float] = field(default_factory=list)
    # float [w]: for each bit of an element, the fraction of the elements in which the bit is stored as part of a
    # symbol. Empty if this is not known.
    ranked: list[float] = field(default_factory=list)
    # A histogram of the stored sizes of rows: the number of rows in each bin. The bins divide the range from 0 to
    # row_bytes evenly.
    lengths: list[int] = field(default_factory=list)
    # The most frequent entries of the codebook, as in `Split.entries`.
    entries: list[tuple[str, str, float]] = field(default_factory=list)
    note: str = ""  # Why the tensor could not be read. "": it was read.

    @property
    def is_sampled(self) -> bool:
        """Whether the sizes of the parts of coded rows are estimated from a sample of the rows."""
        return self.sampled_rows < self.num_rows


@dataclass(frozen=True)
class FileReport(Saves):
    """The report on a file, or on a set of files."""

    path: str  # The path as the caller gave it.
    format: str  # "ibp", "safetensors", "npy", "npz" or "torch".
    is_estimate: bool  # True if ibp did not write the files. stored_bytes then estimates their compressed size.
    file_bytes: int  # Size of the files in bytes.
    # Size of the uncompressed tensors in bytes, where memory that several tensors share counts once; and size of the
    # compressed files in bytes, with headers, codebooks, checksums and padding. If the report leaves out some tensors,
    # the sizes are instead those of the other tensors, added up.
    original_bytes: int
    stored_bytes: int
    metadata: dict[str, str] = field(default_factory=dict)  # The user's metadata.
    tensors: list[TensorContents] = field(default_factory=list)  # The reports on the tensors, in the file's order.

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary that JSON can hold."""
        names = ("file_bytes", "metadata", "original_bytes", "stored_bytes", "savings")
        return {
            "path": self.path,
            "format": self.format,
            "estimate": self.is_estimate,
            **{name: getattr(self, name) for name in names},
            "tensors": [{**vars(tensor), "savings": tensor.savings} for tensor in self.tensors],
        }


# ---- files ----


def inspect_path(
    path: str | os.PathLike[str], *, wanted: _Wanted = lambda name: True, progress: bool = False
) -> FileReport:
    """Makes the report on a file of tensors, or on a set of files. Reads only a sample of the rows of large tensors.

    Args:
        path: path or URL of a file that ibp wrote, or of any file that `ibp.checkpoints.compress` accepts.
        wanted: a function that returns whether to report on the tensor with a given name.
        progress: whether to show a progress bar.

    Raises:
        FileFormatError, SourceFormatError, OSError: the file cannot be read.
        CorruptTableError: rows of the sample are damaged.
    """
    path = os.fspath(path)
    if is_url(path):
        with local_path(path) as near:
            found = inspect_path(near, wanted=wanted, progress=progress)
        return replace(found, path=path)
    if _is_ibp(path):
        with open_file(path, memory="host") as file:
            return _of_ibp(file, wanted, progress)
    with open_source(path) as source:
        return _of_source(source, wanted, progress)


def _is_ibp(path: str) -> bool:
    """Returns whether ibp wrote a file, or one of the files of a set. Returns False for files that are not safetensors
    files or that do not exist; `open_source` then finds out which format they have, or raises."""
    try:
        return any(not read_header(file).is_plain for file in find_files(Path(path))[0].values())
    except (FileFormatError, FileNotFoundError):
        return False


def sum_bytes(reports: Iterable[TensorContents | FileReport]) -> tuple[int, int]:
    """Returns (size before coding, size after coding), in bytes, summed over the reports."""
    sizes = [(report.original_bytes, report.stored_bytes) for report in reports]
    return sum(before for before, _ in sizes), sum(after for _, after in sizes)


def _bar(names: Iterable[str], progress: bool) -> Iterable[str]:
    return tqdm(list(names), desc="inspect", unit="tensor", leave=False, disable=not progress)


def _of_source(source: Source, wanted: _Wanted, progress: bool) -> FileReport:
    """Makes the report on a file that ibp did not write: estimates how `ibp.checkpoints.compress` would code its
    tensors. As in that function, tensors of the same kind share a codebook, and a tensor in whose memory others lie is
    stored once."""
    stored = {tensor.name: tensor for tensor in source.stored()}
    codebooks = Codebooks(Options(device="cpu"), list(stored.values()))
    of: dict[str, AnyCodebook | None] = {}
    for name in _bar(stored, progress):
        codebooks.prepare([stored[name]])
        of[name] = codebooks.of(stored[name])

    def report(tensor: SourceTensor) -> TensorContents:
        codebook = of[(tensor.base or tensor).name]
        if codebook is None or not tensor.num_bytes:
            return report_plain(tensor)
        return report_estimate(tensor, codebook)

    reports = []
    for name in _bar(filter(wanted, source.tensors), progress):
        found = report(source.tensors[name])
        reports.append(found if source.tensors[name].base is None else _as_view(found))
    size, (before, after) = sum(os.path.getsize(path) for path in source.files), sum_bytes(reports)
    if len(reports) == len(source.tensors):
        listed = {found.name: found.stored_bytes for found in reports}
        sizes = {name: listed[name] if name in listed else report(stored[name]).stored_bytes for name in stored}
        before = sum(tensor.num_bytes for tensor in stored.values())
        after = compressed_bytes(source, sizes, of)
    return FileReport(source.path, source.format, True, size, before, after, dict(source.metadata), reports)


def _as_view(report: TensorContents) -> TensorContents:
    """Returns the report on a tensor that lies in the memory of another tensor. A file of ibp has no bytes for it."""
    return replace(report, stored_bytes=0, parts={})


def _padded(report: TensorContents, stored_bytes: int) -> TensorContents:
    """Adds the padding of a tensor to its report, in the part "unused room". Returns the new report. stored_bytes: size
    in bytes of the tensor in its file, padding included."""
    padding = stored_bytes - report.stored_bytes
    if not padding:
        return report
    parts = {**report.parts, "unused room": report.parts.get("unused room", 0) + padding}
    return replace(report, stored_bytes=stored_bytes, parts=parts)


def _of_ibp(file: File, wanted: _Wanted, progress: bool) -> FileReport:
    reports = [_of_tensor(file, name) for name in _bar(filter(wanted, file), progress)]
    size = sum(os.path.getsize(path) for path in find_files(file.path)[0].values())
    before, after = sum_bytes(reports)
    if len(reports) == len(file):
        views = views_in(file)
        stored = dict.fromkeys(views[name].base if name in views else name for name in file)
        before, after = sum(_num_bytes(file, name) for name in stored), size
    return FileReport(str(file.path), "ibp", False, size, before, after, dict(file.metadata), reports)


def _num_bytes(file: File, name: str) -> int:
    """Returns the original size of a stored tensor in bytes, or 0 if this version of ibp cannot tell it."""
    try:
        return file.info(name).num_bytes or 0
    except FileFormatError:
        return 0


def _of_tensor(file: File, name: str) -> TensorContents:
    try:
        value = file[name]
    except ChecksumError:
        raise
    except FileFormatError as error:
        why = str(error)
        try:
            info = file.info(name)
        except FileFormatError:
            return TensorContents(name, "?", (), "unknown", "?", 0, 0, {}, note=why)
        dtype, scheme = str(info.dtype or "?").removeprefix("torch."), info.codec or info.scheme or "?"
        sizes = info.num_bytes or 0, info.stored_bytes
        parts = {"coded rows": info.stored_bytes} if info.stored_bytes else {}
        return TensorContents(name, dtype, info.shape, "unknown", scheme, *sizes, parts, note=why)
    if isinstance(value, torch.Tensor):
        found = report_plain(loaded_tensor(name, value, file.path))
    elif isinstance(value, WholeTensor):
        found = report_whole(name, value)
    elif isinstance(value, Delta):
        found = report_table(name, value.table, kind="delta")
    else:
        found = report_table(name, value)
    return _as_view(found) if name in views_in(file) else _padded(found, file.info(name).stored_bytes)


# ---- samples of rows ----


def sample_runs(num_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Chooses the rows of a sample. Returns a list of ranges [first, last) of row numbers. The ranges are spread evenly
    over the table. Each begins at a multiple of 32 if the table has enough rows. For a small table there is one range,
    with all rows."""
    wanted = max(_RUNS, SAMPLE_BYTES // max(1, row_bytes))
    if num_rows <= wanted:
        return [(0, num_rows)] if num_rows else []
    size = wanted // _RUNS
    grain = ROWS_PER_BASE if num_rows >= ROWS_PER_BASE * _RUNS * -(-size // ROWS_PER_BASE) else 1
    starts = [run * (num_rows - size) // (_RUNS - 1) // grain * grain for run in range(_RUNS)]
    return [(start, start + size) for start in starts]


def read_rows(read: _Read, geometry: Geometry) -> np.ndarray:
    """Reads the rows that `sample_runs` chooses. Returns them as uint8 [n, row_bytes]. A short last row is padded with
    zeros."""
    row_bytes, runs = geometry.row_bytes, sample_runs(geometry.num_rows, geometry.row_bytes)
    parts = [read(first * row_bytes, min(last * row_bytes, geometry.num_bytes)) for first, last in runs]
    missing = -sum(map(len, parts)) % row_bytes
    return np.concatenate([*parts, np.zeros(missing, np.uint8)]).reshape(-1, row_bytes)


# ---- tensors ----


def report_table(name: str, table: CompressedTensor, *, kind: str = "table") -> TensorContents:
    """Returns the report on a table, without the padding that it has in a file. The table may be on any device. kind:
    "table", "delta" or "estimate"."""
    geometry, (raw_bytes, coded_bytes, counted) = table.geometry, count_rows(table)
    rows = read_rows(lambda start, end: decoded_bytes(table, start, end, table.device).cpu().numpy(), geometry)
    runs = sample_runs(geometry.num_rows, geometry.row_bytes)
    numbers = np.concatenate([np.arange(*run) for run in runs]) if runs else np.empty(0, np.int64)
    split = split_table(table, rows, numbers)
    parts = scaled(split.parts, coded_bytes)
    parts |= {"raw rows": raw_bytes, "index": table.index_bytes}
    parts["unused room"] = max(0, spread_bytes(table) - raw_bytes - coded_bytes)
    parts = {part: size for part, size in parts.items() if size}
    num_rows, default_rows = geometry.num_rows, counted["default_rows"]
    coded_share = (num_rows - default_rows - counted["raw_rows"]) / max(1, num_rows)
    return TensorContents(
        **_identity(name, geometry, kind, table.scheme),
        stored_bytes=sum(parts.values()),
        parts=parts,
        **counted,
        sampled_rows=len(rows),
        clusters=len(table.codebook) if isinstance(table.codebook, ClusteredCodebook) else int(bool(table.codebook)),
        codebook=repr(table.codebook) if table.codebook else "",
        codebook_bytes=table.codebook.nbytes if table.codebook else 0,
        entropy=bit_entropy(rows, split.left_out.size // 8),
        left_out=rounded(coded_share * split.left_out + default_rows / max(1, num_rows)),
        ranked=rounded(coded_share * split.ranked),
        entries=split.entries,
    )


def report_whole(name: str, whole: WholeTensor) -> TensorContents:
    """Returns the report on a tensor that an external codec has compressed as a whole. Such a tensor has no rows.
    Nothing is decoded."""
    parts = {"coded blocks": whole.stored_bytes, "index": whole.offsets.nbytes}
    return TensorContents(
        **_identity(name, Geometry(whole.shape, whole.dtype, 1), "table", whole.codec),
        stored_bytes=sum(parts.values()),
        parts={part: size for part, size in parts.items() if size},
    )


def report_plain(tensor: SourceTensor) -> TensorContents:
    """Returns the report on a tensor that is not compressed in the file."""
    geometry = Geometry.of(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    rows = read_rows(tensor.read, geometry)
    return TensorContents(
        **_identity(tensor.name, geometry, "plain", "plain"),
        stored_bytes=geometry.num_bytes,
        parts={"plain": geometry.num_bytes} if geometry.num_bytes else {},
        row_bytes=geometry.row_bytes,
        num_rows=geometry.num_rows,
        sampled_rows=len(rows),
        entropy=bit_entropy(rows, element_bytes(geometry)),
    )


def report_estimate(tensor: SourceTensor, codebook: AnyCodebook) -> TensorContents:
    """Estimates the report on the packed table that a tensor would become in a compressed file. Compresses a sample of
    the tensor's rows, and scales the report on this sample to all rows. The tensor must not be empty."""
    geometry = Geometry(torch.Size(tensor.shape), tensor.dtype, codebook.row_bytes)
    rows = read_rows(tensor.read, geometry)
    is_whole = len(rows) == geometry.num_rows
    sample = torch.from_numpy(rows).reshape(-1)[: geometry.num_bytes if is_whole else None]
    sample = sample.clone().view(tensor.dtype)
    sample = sample.view(tensor.shape) if is_whole else sample
    table = compress_rows(sample, codebook=codebook, layout="packed", device="cpu", memory="host")
    found = report_table(tensor.name, table, kind="estimate")
    if is_whole:
        return _padded(found, table_bytes(found.stored_bytes, geometry.num_rows))
    factor = geometry.num_bytes / table.original_bytes
    parts = {part: round(factor * size) for part, size in found.parts.items()}
    whole = replace(
        found,
        **_identity(tensor.name, geometry, "estimate", found.scheme),
        stored_bytes=sum(parts.values()),
        parts=parts,
        num_rows=geometry.num_rows,
        raw_rows=round(factor * found.raw_rows),
        default_rows=round(factor * found.default_rows),
        lengths=[round(factor * count) for count in found.lengths],
    )
    return _padded(whole, table_bytes(whole.stored_bytes, geometry.num_rows))


def _identity(name: str, geometry: Geometry, kind: str, scheme: str) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "shape": tuple(geometry.shape),
        "kind": kind,
        "scheme": scheme,
        "original_bytes": geometry.num_bytes,
    }


# ---- the parts of coded rows ----


@dataclass
class Split:
    """The sizes of the parts of coded rows, and how the bits of their elements are stored. A bit of an element is left
    out, stored as part of a symbol, or stored unchanged."""

    parts: Counter[str]  # For each part, its total size in bytes in all rows.
    # float [w]: for each bit of an element, the most significant first, the fraction of the elements in which the bit
    # is left out.
    left_out: np.ndarray
    # float [w]: for each bit of an element, the fraction of the elements in which the bit is part of a symbol.
    ranked: np.ndarray
    # (name, meaning, share) for each of the codebook's most frequent entries, the most frequent first. The share is the
    # fraction of the coded symbols (scheme planes) or of a row's chunks (scheme ibp) that have the entry.
    entries: list[tuple[str, str, float]] = field(default_factory=list)


def scaled(parts: Counter[str], total: int) -> dict[str, int]:
    """Scales the sizes of parts so that their sum is `total`, the size in bytes of all coded rows. The given sizes may
    be in any unit, and may be those of a sample of the rows. If they are all 0, returns a single part "coded rows"."""
    counted = sum(parts.values())
    if not counted:
        return {"coded rows": total}
    found = {part: size * total // counted for part, size in parts.items()}
    largest = max(found, key=lambda part: found[part])
    found[largest] += total - sum(found.values())  # Corrects for rounding.
    return found


def split_rows(rows: np.ndarray, codebook: AnyCodebook, element_bytes: int) -> Split:
    """Computes the `Split` of rows that are coded with a codebook.

    Args:
        rows: uint8 [n, row_bytes], n > 0: the decoded rows, without raw rows and default rows.
        codebook: the codebook of these rows, not a `ClusteredCodebook`.
        element_bytes: size in bytes of the elements whose bits are reported. For scheme planes it is ignored, and the
            size in the codebook is used.
    """
    if isinstance(codebook, PlanesCodebook):
        return _split_planes(rows, codebook)
    assert isinstance(codebook, Codebook)
    return _split_masks(rows, codebook, element_bytes)


# ---- scheme ibp ----


def _split_masks(rows: np.ndarray, codebook: Codebook, element_bytes: int) -> Split:
    size, num_chunks = codebook.chunk_bytes, codebook.num_chunks
    mask, bitval = (_chunks(bits.numpy()[None], size)[0] for bits in (codebook.mask, codebook.bitval))
    flagged = (mask != 0) | codebook.flag_all
    agrees = ((_chunks(rows, size) & mask) == bitval) & flagged
    chunk_bits = np.full(num_chunks, 8 * size)
    chunk_bits[-1] = 8 * (codebook.row_bytes - (num_chunks - 1) * size)
    fixed_bits = np.unpackbits(mask.view(np.uint8).reshape(num_chunks, size), axis=1).sum(1, dtype=np.int64)
    kept_if_agreeing = chunk_bits - fixed_bits
    in_agreeing, in_others = agrees @ kept_if_agreeing, ~agrees @ chunk_bits
    lengths = -(-(codebook.num_flags + in_agreeing + in_others) // 8)
    bits = Counter({"participation bits": codebook.num_flags * len(rows), "kept bits": int(in_agreeing.sum())})
    bits["chunks kept whole"] = int(in_others.sum())
    bits["rounding to bytes"] = 8 * int(lengths.sum()) - sum(bits.values())
    return Split(
        Counter(scaled(bits, int(lengths.sum()))),
        _left_out_by_masks(codebook, agrees.mean(0), element_bytes),
        np.zeros(8 * element_bytes),
        _pairs(codebook, agrees.mean(0)),
    )


def _chunks(rows: np.ndarray, size: int) -> np.ndarray:
    """Cuts rows, uint8 [n, row_bytes], into chunks of `size` bytes. Returns the chunks as unsigned integers,
    [n, chunks]. The last chunk is padded with zero bytes."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    return np.ascontiguousarray(padded).view(f"<u{size}")


def _left_out_by_masks(codebook: Codebook, agreeing: np.ndarray, element_bytes: int) -> np.ndarray:
    """Returns `left_out` of a `Split`. agreeing: for each chunk of a row, the fraction of the rows in which the chunk
    agrees with its mask and value."""
    of_bytes = np.repeat(agreeing, codebook.chunk_bytes)[: codebook.row_bytes]
    bits = np.unpackbits(codebook.mask.numpy(), bitorder="little").reshape(-1, 8) * of_bytes[:, None]
    return bits.reshape(-1, 8 * element_bytes).mean(0)[::-1]


def _pairs(codebook: Codebook, agreeing: np.ndarray) -> list[tuple[str, str, float]]:
    """Returns `entries` of a `Split`: the pairs of mask and value that most chunks have. agreeing: as in
    `_left_out_by_masks`."""
    index = codebook.index.numpy().astype(np.int64) if codebook.index.numel() else np.zeros(len(agreeing), np.int64)
    counts = np.bincount(index, minlength=len(codebook.palette))
    shares = np.bincount(index, agreeing, minlength=len(codebook.palette)) / np.maximum(counts, 1)
    found = []
    for pair in np.argsort(-counts, kind="stable")[:_MOST_ENTRIES]:
        mask, value = (bytes(part.tolist()[::-1]).hex().upper() for part in codebook.palette[pair])
        agrees = f"value {value}, {shares[pair]:.1%} of rows agree" if mask.strip("0") else "no invariant bit"
        found.append((f"mask {mask}", agrees, float(counts[pair] / len(agreeing))))
    return found


# ---- scheme planes ----


def _split_planes(rows: np.ndarray, codebook: PlanesCodebook) -> Split:
    elements = np.ascontiguousarray(rows).view(f"<u{codebook.element_bytes}")
    if codebook.live_columns is not None:
        elements = elements[:, codebook.live_columns.numpy()]
    parts: Counter[str] = Counter()
    coded = np.ones(elements.shape, bool)
    if codebook.listed:
        coded = _split_listed(elements, codebook, parts)
    symbols = _symbols(elements, codebook)
    ranks = _ranks(symbols, codebook)
    _split_values(ranks, coded, codebook, parts)
    live = 1 - codebook.num_constant / codebook.columns
    return Split(+parts, *_uses(codebook, live * float(coded.mean())), _frequent(symbols[coded], codebook))


def _split_listed(elements: np.ndarray, codebook: PlanesCodebook, parts: Counter[str]) -> np.ndarray:
    """Adds the sizes of headers, positions and signs of listed rows to `parts`. Returns bool [n, columns]: True if the
    coded row has a value for the element. It has no value if the element is not listed, or if the row is closed, which
    means that all its listed elements equal `codebook.closed`."""
    columns = elements.shape[1]
    differs = elements ^ elements.dtype.type(codebook.default)
    if codebook.signed_default:
        differs &= elements.dtype.type(2 ** (codebook.width - 1) - 1)
    listed = differs != 0
    num_listed = listed.sum(1)
    closed = ((elements == elements.dtype.type(codebook.closed)) | ~listed).all(1) & (num_listed > 0)
    parts["header"] += len(elements) * (1 if columns < 128 else 2 if columns < 32768 else 3)
    distinct, counts = np.unique(num_listed, return_counts=True)
    for k, count in zip(distinct.tolist(), counts.tolist()):
        parts["positions"] += count * _position_bytes(k, columns)
        parts["signs"] += count * -(-(columns - k) // 8) * codebook.signed_default
    return listed & ~closed[:, None]


def _position_bytes(k: int, columns: int) -> int:
    """Returns the size in bytes of the positions of k listed elements in a row of `columns` elements, in the shortest
    form: a bitmap, or a list of the positions of listed or of unlisted elements."""
    if k == 0:
        return 0
    sizes = [-(-columns // 8)]
    for m in (k, columns - k):
        sizes += [-(-(m + -(-columns // 2**low) - 1) // 8) + -(-m * low // 8) for low in range(14)]
    return min(sizes)


def _symbols(elements: np.ndarray, codebook: PlanesCodebook) -> np.ndarray:
    """Returns the symbols of elements, as integers of the elements' type."""
    kind, bits = elements.dtype.type, codebook.width - codebook.invariant_bits
    coded = elements >> kind(codebook.invariant_bits)
    if codebook.rotate and bits > 1:
        coded = ((coded << kind(1)) | (coded >> kind(bits - 1))) & kind(2**bits - 1)
    if codebook.symbol_bits == 0:
        return np.zeros_like(coded)
    return coded >> kind(codebook.residual_bits)


def _entries(codebook: PlanesCodebook) -> np.ndarray:
    """Returns the symbols in the codebook, uint64 [C, E], where E is codebook.num_entries. C is 1 if all columns have
    the same entries. Otherwise it is the number of live columns."""
    if codebook.first_symbol is None:
        return codebook.entries.numpy().view(np.uint64)
    return np.array(
        [[(codebook.first_symbol + i) % 2**codebook.symbol_bits for i in range(codebook.num_entries)]], np.uint64
    )


def _ranks(symbols: np.ndarray, codebook: PlanesCodebook) -> np.ndarray:
    """Returns uint8 [n, columns]: for each symbol, the position of the first entry that equals it, or the number of
    entries if there is no such entry."""
    entries, num_entries = _entries(codebook), codebook.num_entries
    ranks = np.full(symbols.shape, num_entries, np.uint8)
    for rank in range(num_entries)[::-1]:
        ranks[symbols == entries[:, rank].astype(symbols.dtype)] = rank
    return ranks


def _split_values(ranks: np.ndarray, coded: np.ndarray, codebook: PlanesCodebook, parts: Counter[str]) -> None:
    """Adds the sizes of residuals, digits and raw symbols to `parts`.

    Args:
        ranks: the result of `_ranks`.
        coded: bool [n, columns], whether the coded row has a value for the element.
    """
    left = coded.sum(1)
    parts["residuals"] += _field_bytes(left, codebook.residual_bits)
    first = 0
    for plane, bits in enumerate(codebook.digit_bits):
        parts[f"digits of plane {plane}"] += _field_bytes(left, bits)
        first += 2**bits - 1
        left = (coded & (ranks >= first)).sum(1)
    parts["raw symbols"] += _field_bytes(left, codebook.symbol_bits)


def _field_bytes(counts: np.ndarray, bits: int) -> int:
    """Returns the total size in bytes of fields of `bits` bits each. The size of all fields of a row is rounded up to
    whole bytes. counts: for each row, the number of fields."""
    return int((-(-counts * bits // 8)).sum())


def _uses(codebook: PlanesCodebook, stored: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns `left_out` and `ranked` of a `Split`. stored: the fraction of the elements for which coded rows have a
    value."""
    coded_bits = codebook.width - codebook.invariant_bits
    left_out, ranked = np.full(codebook.width, 1 - stored), np.zeros(codebook.width)
    left_out[: codebook.invariant_bits] = 1
    for bit in range(coded_bits):
        if (bit + codebook.rotate) % coded_bits >= codebook.residual_bits:
            ranked[codebook.invariant_bits + bit] = stored
    return left_out[::-1], ranked[::-1]


def _frequent(symbols: np.ndarray, codebook: PlanesCodebook) -> list[tuple[str, str, float]]:
    """Returns `entries` of a `Split`: the most frequent symbols, each with its plane."""
    if codebook.symbol_bits == 0 or symbols.size == 0:
        return []
    distinct, counts = np.unique(symbols, return_counts=True)
    digits = -(-codebook.symbol_bits // 4)
    found = []
    for at in np.argsort(-counts, kind="stable")[:_MOST_ENTRIES]:
        share = float(counts[at] / symbols.size)
        found.append((f"{int(distinct[at]):0{digits}X}", _named_by(distinct[at], codebook), share))
    return found


def _named_by(symbol: np.generic, codebook: PlanesCodebook) -> str:
    if codebook.per_column:
        return "each column has entries of its own"
    (found,) = np.nonzero(_entries(codebook)[0] == np.uint64(symbol))
    first = 0
    for plane, bits in enumerate(codebook.digit_bits):
        first += 2**bits - 1
        if len(found) and found[0] < first:
            return f"plane {plane}"
    return "raw symbol"


# ---- rows of tables ----


def count_rows(table: CompressedTensor) -> tuple[int, int, dict[str, Any]]:
    """Counts the rows of a table by their lengths in the index. Returns (total size in bytes of the raw rows, that of
    the coded rows, the fields of `TensorContents` about rows)."""
    geometry, lengths = table.geometry, table.lengths.cpu().numpy()
    counts = np.zeros(1 << 16, np.int64)
    for start in range(0, len(lengths), _BLOCK_ROWS):
        counts += np.bincount(lengths[start : start + _BLOCK_ROWS], minlength=len(counts))
    if not len(lengths):
        counts[0] = geometry.num_rows
    default = default_length(geometry.row_bytes)
    raw_rows, default_rows = int(counts[0]), int(counts[default])
    rest = geometry.num_rows * geometry.row_bytes - geometry.num_bytes  # Bytes that a short last row lacks.
    is_short_raw = bool(rest) and (not len(lengths) or not lengths[-1])
    sizes = np.arange(len(counts))
    sizes[0], sizes[default] = geometry.row_bytes, 0
    stored = int((sizes * counts).sum()) - raw_rows * geometry.row_bytes
    fields = {
        "row_bytes": geometry.row_bytes,
        "num_rows": geometry.num_rows,
        "raw_rows": raw_rows,
        "default_rows": default_rows,
        "lengths": np.histogram(sizes, _BINS, (0, geometry.row_bytes), weights=counts)[0].tolist(),
    }
    return raw_rows * geometry.row_bytes - is_short_raw * rest, stored, fields


def _lengths(table: CompressedTensor, numbers: np.ndarray) -> np.ndarray:
    """Returns the entries of the given rows in `table.lengths`, as int64. Returns zeros if the table has no index.
    numbers: the numbers of the rows."""
    if not table.lengths.numel():
        return np.zeros(numbers.shape, np.int64)
    return table.lengths.cpu().numpy()[numbers].astype(np.int64)


def split_table(table: CompressedTensor, rows: np.ndarray, numbers: np.ndarray) -> Split:
    """Computes the `Split` of the coded rows among given rows of a table. If all given rows are raw rows or default
    rows, the split has no parts, and its fractions are zeros.

    Args:
        rows: uint8 [n, row_bytes], the decoded rows.
        numbers: int64 [n], the numbers of these rows in the table.
    """
    lengths = _lengths(table, numbers)
    coded = (lengths != 0) & (lengths != default_length(table.row_bytes))
    rows, numbers = rows[coded], numbers[coded]
    own_bytes = element_bytes(table.geometry)
    if table.codebook is None or not len(rows):
        return Split(Counter(), np.zeros(8 * own_bytes), np.zeros(8 * own_bytes))
    if not isinstance(table.codebook, ClusteredCodebook):
        split = split_rows(rows, table.codebook, own_bytes)
        return replace(split, entries=_with_powers(split.entries, table))
    clusters = _first_bytes(table, numbers)
    splits = []
    for cluster in np.unique(clusters):
        own = rows[clusters == cluster]
        splits.append((len(own), split_rows(own, table.codebook.codebooks[cluster], own_bytes)))
    # Combine the splits of all clusters.
    num_rows = sum(count for count, _ in splits)
    parts = sum((split.parts for _, split in splits), Counter({"cluster numbers": num_rows}))
    left_out, ranked = (
        sum(count / num_rows * getattr(split, name) for count, split in splits) for name in ("left_out", "ranked")
    )
    largest = max(splits, key=lambda split: split[0])[1]
    return Split(parts, np.asarray(left_out), np.asarray(ranked), _with_powers(largest.entries, table))


def _first_bytes(table: CompressedTensor, numbers: np.ndarray) -> np.ndarray:
    """Returns the first stored byte of coded rows. In a table with clusters, this byte is the number of the row's
    cluster, in both schemes. numbers: the numbers of the rows."""
    if table.slot_bytes:
        return table.slots.cpu().numpy()[numbers * table.slot_bytes]
    bases = table.bases.cpu().numpy()  # This also waits for a GPU that writes to overflow elsewhere.
    overflow = table.overflow.cpu().numpy()
    if has_own_bases(table):
        return overflow[bases[numbers]]
    of_group = numbers[:, None] // ROWS_PER_BASE * ROWS_PER_BASE + np.arange(ROWS_PER_BASE)
    lengths = torch.from_numpy(_lengths(table, np.minimum(of_group, table.num_rows - 1)))
    stored = stored_sizes(lengths, table.row_bytes, table.row_bytes).numpy()
    before = np.where(of_group < numbers[:, None], stored, 0).sum(1)
    return overflow[bases[numbers // ROWS_PER_BASE] + before]


def _with_powers(entries: list[tuple[str, str, float]], table: CompressedTensor) -> list[tuple[str, str, float]]:
    """Returns the given `entries` of a `Split`. If symbols are the exponents of floats, the meaning of each entry then
    also says which power of two its symbol stands for."""
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
    """Returns the Shannon entropy of each bit of an element in the given rows, in bits. The most significant bit comes
    first. Returns an empty list if there are no rows, or if rows do not consist of whole elements."""
    if not rows.size or rows.shape[1] % element_bytes:
        return []
    p = np.unpackbits(rows.reshape(-1, element_bytes)[:, ::-1], axis=1).mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return rounded(np.nan_to_num(entropy))


def rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 3) + 0.0 for value in values]


def element_bytes(geometry: Geometry) -> int:
    """Returns the size in bytes of the elements whose bits are reported. This is the size of an element of the tensor,
    or half of it for complex numbers. If rows do not consist of whole elements, it is the greatest common divisor of
    this size and the size of a row."""
    own_bytes = geometry.dtype.itemsize // (2 if geometry.dtype.is_complex else 1)
    return math.gcd(own_bytes, geometry.row_bytes)
