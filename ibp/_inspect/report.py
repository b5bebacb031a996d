"""Reports of files and tensors: how large they are, of which parts they consist, and what their bits do. Files of ibp
are reported as they are, other files of tensors with what compressing them would save."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.progress import tqdm
from .._common.statistics import Saves
from .._core import ROWS_PER_BASE
from .._files import ChecksumError, File, FileFormatError, find_files, is_url, read_header
from .._files import open as open_file
from .._layout.geometry import Geometry
from .._rows.plan import spread_bytes
from .._schemes import AnyCodebook, ClusteredCodebook, Options
from .._tables.changes import decoded_bytes
from .._tables.compressed_tensor import CompressedTensor, compress_rows
from ..checkpoints._learning import CheckpointLearning, Codebooks
from ..checkpoints._outputs import compressed_bytes, table_bytes
from ..checkpoints._source import Source, SourceTensor, loaded_tensor
from ..checkpoints._sources import local_path, open_source
from ..codecs._whole import WholeTensor
from ..deltas import Delta
from .splitting import bit_entropy, count_rows, element_bytes, rounded, scaled, split_table

SAMPLE_BYTES = 1 << 20  # bytes of a tensor that are decoded and counted
_RUNS = 32  # places of a tensor from which a sample is taken

_Read = Callable[[int, int], np.ndarray]  # returns bytes [start, end) of a tensor, uint8
_Wanted = Callable[[str], bool]  # whether to look into a tensor with a name


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
        """Size in bytes of the compressed files, or, if only some of the tensors are reported, the stored bytes of
        those tensors."""
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


# ---- files ----


def inspect_path(
    path: str | os.PathLike[str], *, wanted: _Wanted = lambda name: True, progress: bool = False
) -> FileReport:
    """Looks into a file of tensors, or a set of files. It reads a few rows of each tensor.

    Args:
        path: a file of ibp, or any other file that `ibp.checkpoints.compress` takes.
        wanted: whether to look into a tensor with a name. Other tensors are left out.
        progress: whether to show a progress bar.

    Raises:
        FileFormatError, SourceFormatError, OSError: the file cannot be read.
        CorruptTableError: rows that were looked at are damaged.
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
    """Returns whether a file, or one of a set, is ibp's. If a file is not a safetensors file, `open_source` reports
    what it is."""
    try:
        return any(not read_header(file).is_plain for file in find_files(Path(path)).files.values())
    except (FileFormatError, FileNotFoundError):
        return False


def _bar(names: Iterable[str], progress: bool) -> Iterable[str]:
    return tqdm(list(names), desc="inspect", unit="tensor", leave=False, disable=not progress)


def _of_source(source: Source, wanted: _Wanted, progress: bool) -> FileReport:
    """Reports tensors as `ibp.checkpoints.compress` would code them: those of a kind share a codebook."""
    codebooks = Codebooks(CheckpointLearning(Options()), list(source.tensors.values()))
    of: dict[str, AnyCodebook | None] = {}
    for name in _bar(source.tensors, progress):
        codebooks.prepare([source.tensors[name]])
        of[name] = codebooks.of(source.tensors[name])
    users = Counter(id(codebook) for codebook in of.values())
    reports = []
    for name in _bar(filter(wanted, of), progress):
        tensor, codebook = source.tensors[name], of[name]
        reports.append(
            report_plain(tensor)
            if codebook is None
            else report_estimate(tensor, codebook, codebook_share=1 / users[id(codebook)])
        )
    size, other = sum(os.path.getsize(path) for path in source.files), 0
    if len(reports) == len(of):
        stored = {report.name: _bytes_in_file(report) for report in reports}
        other = compressed_bytes(source, stored, of) - sum(report.stored_bytes for report in reports)
    return FileReport(source.path, source.format, True, size, dict(source.metadata), reports, other)


def _bytes_in_file(report: TensorContents) -> int:
    """Returns the bytes that a file would have for a tensor, without its codebook."""
    if report.kind != "estimate":
        return report.stored_bytes
    return table_bytes(report.stored_bytes - report.parts.get("codebook", 0), report.num_rows)


def _of_ibp(file: File, wanted: _Wanted, progress: bool) -> FileReport:
    users = Counter(_codebook_of(file, name) for name in file.tables)
    reports = [_of_tensor(file, name, users) for name in _bar(filter(wanted, file), progress)]
    size = sum(os.path.getsize(path) for path in find_files(file.path).files.values())
    other = size - sum(report.stored_bytes for report in reports) if len(reports) == len(file) else 0
    return FileReport(str(file.path), "ibp", False, size, dict(file.metadata), reports, other)


def _codebook_of(file: File, name: str) -> int:
    """Returns a number that is different for different codebooks of a file; 0 if there is no codebook."""
    try:
        codebook = file.info(name).codebook
    except FileFormatError:
        return 0
    return 0 if codebook is None else id(codebook)


def _of_tensor(file: File, name: str, users: Counter[int]) -> TensorContents:
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
        return TensorContents(name, dtype, info.shape, "unknown", scheme, *sizes, {"coded rows": sizes[1]}, note=why)
    if isinstance(value, torch.Tensor):
        return report_plain(loaded_tensor(name, value, file.path))
    if isinstance(value, WholeTensor):
        return report_whole(name, value)
    table = value.table if isinstance(value, Delta) else value
    assert isinstance(table, CompressedTensor)
    kind = "delta" if isinstance(value, Delta) else "table"
    return report_table(name, table, kind=kind, codebook_share=1 / max(1, users[_codebook_of(file, name)]))


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


def read_rows(read: _Read, geometry: Geometry) -> np.ndarray:
    """Returns a sample of the rows of a tensor, uint8 [n, row_bytes]. A short last row is extended with zeros."""
    row_bytes, runs = geometry.row_bytes, sample_runs(geometry.num_rows, geometry.row_bytes)
    parts = [read(first * row_bytes, min(last * row_bytes, geometry.num_bytes)) for first, last in runs]
    missing = -sum(map(len, parts)) % row_bytes
    return np.concatenate([*parts, np.zeros(missing, np.uint8)]).reshape(-1, row_bytes)


# ---- tensors ----


def report_table(
    name: str, table: CompressedTensor, *, kind: str = "table", codebook_share: float = 1.0
) -> TensorContents:
    """Returns the report of a table on any device. codebook_share: the share of the codebook's bytes that counts for
    this table; less than 1 if other tables have the same codebook."""
    geometry, found = table.geometry, count_rows(table)
    rows = read_rows(lambda start, end: decoded_bytes(table, start, end, table.device).cpu().numpy(), geometry)
    runs = sample_runs(geometry.num_rows, geometry.row_bytes)
    numbers = np.concatenate([np.arange(*run) for run in runs]) if runs else np.empty(0, np.int64)
    split = split_table(table, rows, numbers)
    codebook_bytes = round(codebook_share * table.codebook.nbytes) if table.codebook else 0
    parts = scaled(split.parts if split else Counter(), found.coded_bytes)
    parts |= {"raw rows": found.raw_bytes, "index": table.index_bytes, "codebook": codebook_bytes}
    parts["unused room"] = max(0, spread_bytes(table) - found.raw_bytes - found.coded_bytes)
    parts = {part: size for part, size in parts.items() if size}
    width = split.left_out.size if split else 8 * element_bytes(geometry)
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
        left_out=rounded(coded_share * left_out + default_share),
        ranked=rounded(coded_share * ranked),
        lengths=found.histogram,
        entries=split.entries if split else [],
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
        entropy=bit_entropy(rows, element_bytes(geometry)),
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
