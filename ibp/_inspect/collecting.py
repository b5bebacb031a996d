"""Makes reports of whole files: of ibp files as they are, and of other files of tensors with what compressing them
would save."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from .._common.progress import tqdm
from .._files.fields import ChecksumError, FileFormatError
from .._files.header import find_files, read_header
from .._files.opened import File
from .._files.opened import open as open_file
from .._files.paths import is_url
from .._schemes import AnyCodebook, Options
from .._tables.compressed_tensor import CompressedTensor
from ..checkpoints._learning import CheckpointLearning, Codebooks
from ..checkpoints._outputs import compressed_bytes, table_bytes
from ..checkpoints._source import Source, SourceTensor, loaded_tensor
from ..checkpoints._sources import local_path, open_source
from ..codecs._whole import WholeTensor
from ..deltas import Delta
from .report import FileReport, TensorContents, report_estimate, report_plain, report_table, report_whole

Wanted = Callable[[str], bool]  # whether to look into a tensor with a name


def inspect_path(
    path: str | os.PathLike[str], *, wanted: Wanted = lambda name: True, progress: bool = False
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


def _of_source(source: Source, wanted: Wanted, progress: bool) -> FileReport:
    """Reports tensors as `ibp.checkpoints.compress` would code them: those of a kind share a codebook."""
    codebooks = Codebooks(CheckpointLearning(Options()), list(source.tensors.values()))
    of: dict[str, AnyCodebook | None] = {}
    for name in _bar(source.tensors, progress):
        codebooks.prepare([source.tensors[name]])
        of[name] = codebooks.of(source.tensors[name])
    users = Counter(id(codebook) for codebook in of.values())
    reports = [_of_plain(source.tensors[name], of[name], users) for name in _bar(filter(wanted, of), progress)]
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


def _of_plain(tensor: SourceTensor, codebook: AnyCodebook | None, users: Counter[int]) -> TensorContents:
    if codebook is None:
        return report_plain(tensor)
    return report_estimate(tensor, codebook, codebook_share=1 / users[id(codebook)])


def _of_ibp(file: File, wanted: Wanted, progress: bool) -> FileReport:
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
