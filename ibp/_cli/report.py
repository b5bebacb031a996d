"""Reports on files and tensors: their sizes, their parts, and how their bits are stored. For files that ibp wrote, a
report says what they contain. For other files of tensors, it estimates what compressing them would give."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ibp._core import ROWS_PER_BASE
from ibp._files import ChecksumError, File, FileFormatError, find_files, is_url, read_header
from ibp._files import open as open_file
from ibp._rows.clusters import ClusteredCodebook
from ibp._rows.codebook import AnyCodebook
from ibp._rows.geometry import Geometry
from ibp._rows.learning import Options
from ibp._rows.table import decoded_bytes
from ibp._tables.compressed_tensor import CompressedTensor, compress_rows
from ibp.checkpoints._coding import Codebooks
from ibp.checkpoints._inputs import local_path, open_source
from ibp.checkpoints._outputs import compressed_bytes, table_bytes
from ibp.checkpoints._source import Source, SourceTensor, loaded_tensor
from ibp.codecs._whole import WholeTensor
from ibp.deltas import Delta

from .._common.manners import Saves
from .._common.process import tqdm
from .._rows.handle import spread_bytes
from .splitting import bit_entropy, count_rows, element_bytes, rounded, scaled, split_table

SAMPLE_BYTES = 1 << 20  # Size in bytes of the sample of a tensor that is decoded and counted.
_RUNS = 32  # A sample consists of this number of runs of consecutive rows.

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
    metadata: dict[str, str] = field(default_factory=dict)  # The user's metadata.
    tensors: list[TensorContents] = field(default_factory=list)  # The reports on the tensors, in the file's order.
    # Number of bytes in the compressed files that do not belong to a single tensor: headers, codebooks, checksums,
    # padding. 0 if the report leaves out some tensors.
    other_bytes: int = 0

    @property
    def original_bytes(self) -> int:
        return sum(tensor.original_bytes for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the compressed files. If the report leaves out some tensors, this is the sum of the stored
        sizes of the other tensors."""
        return sum(tensor.stored_bytes for tensor in self.tensors) + self.other_bytes

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


def _bar(names: Iterable[str], progress: bool) -> Iterable[str]:
    return tqdm(list(names), desc="inspect", unit="tensor", leave=False, disable=not progress)


def _of_source(source: Source, wanted: _Wanted, progress: bool) -> FileReport:
    """Makes the report on a file that ibp did not write: estimates how `ibp.checkpoints.compress` would code its
    tensors. As in that function, tensors of the same kind share a codebook."""
    # Besides its tensors, a file stores the bases of tensors that share memory, some of which have other names.
    tensors = {tensor.name: tensor for tensor in (*source.stored(), *source.tensors.values())}
    codebooks = Codebooks(Options(device="cpu"), list(tensors.values()))
    of: dict[str, AnyCodebook | None] = {}
    for name in _bar(tensors, progress):
        codebooks.prepare([tensors[name]])
        of[name] = codebooks.of(tensors[name])

    def report(name: str) -> TensorContents:
        codebook = of[name]
        return report_plain(tensors[name]) if codebook is None else report_estimate(tensors[name], codebook)

    reports = list(map(report, _bar(filter(wanted, source.tensors), progress)))
    size, other = sum(os.path.getsize(path) for path in source.files), 0
    if len(reports) == len(source.tensors):
        listed = {report.name: report.stored_bytes for report in reports}
        stored = listed | {name: report(name).stored_bytes for name in tensors.keys() - listed.keys()}
        other = compressed_bytes(source, stored, of) - sum(listed.values())
    return FileReport(source.path, source.format, True, size, dict(source.metadata), reports, other)


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
    other = size - sum(report.stored_bytes for report in reports) if len(reports) == len(file) else 0
    return FileReport(str(file.path), "ibp", False, size, dict(file.metadata), reports, other)


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
        return TensorContents(name, dtype, info.shape, "unknown", scheme, *sizes, {"coded rows": sizes[1]}, note=why)
    if isinstance(value, torch.Tensor):
        return report_plain(loaded_tensor(name, value, file.path))
    if isinstance(value, WholeTensor):
        found = report_whole(name, value)
    elif isinstance(value, Delta):
        found = report_table(name, value.table, kind="delta")
    else:
        found = report_table(name, value)
    return _padded(found, file.info(name).stored_bytes)


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
    geometry, found = table.geometry, count_rows(table)
    rows = read_rows(lambda start, end: decoded_bytes(table, start, end, table.device).cpu().numpy(), geometry)
    runs = sample_runs(geometry.num_rows, geometry.row_bytes)
    numbers = np.concatenate([np.arange(*run) for run in runs]) if runs else np.empty(0, np.int64)
    split = split_table(table, rows, numbers)
    parts = scaled(split.parts if split else Counter(), found.coded_bytes)
    parts |= {"raw rows": found.raw_bytes, "index": table.index_bytes}
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
        codebook_bytes=table.codebook.nbytes if table.codebook else 0,
        entropy=bit_entropy(rows, width // 8),
        left_out=rounded(coded_share * left_out + default_share),
        ranked=rounded(coded_share * ranked),
        lengths=found.histogram,
        entries=split.entries if split else [],
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
