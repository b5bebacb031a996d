"""The header of a safetensors file, and the files of a set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .. import _core
from .fields import FileFormatError, refused
from .regular import open_regular
from .sets import INDEX_SUFFIX, SUFFIX, is_of_weights, read_index
from .writer import FORMAT, MAX_HEADER_BYTES, PREFIX

_OTHERS = {
    "npy": "an array of numpy",
    "archive": "an archive, as torch.save and numpy.savez write them",
    "pickle": "a pickle, as torch.save once wrote them",
}
_PICKLE = re.compile(rb"\x80[\x02-\x05]")


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: str  # its name in the header
    shape: tuple[int, ...]  # of the tensor; of a part of a table one dimension, padding included
    # start, end: of its bytes, counted from the beginning of the file
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """What stands before the data."""

    num_bytes: int  # of the header, its own size included: where the data begins
    tensors: Mapping[str, Entry]  # by name, in the order of their bytes
    metadata: Mapping[str, str]  # text by text, as it is in the file
    # bytes of the blocks that have checksums, and how many blocks there are; why the checksums are none; or None of an
    # ordinary file of safetensors
    checks: tuple[int, int] | str | None

    @property
    def is_plain(self) -> bool:
        """Whether the file is an ordinary one of safetensors."""
        return FORMAT not in self.metadata

    @property
    def user_metadata(self) -> dict[str, str]:
        """The metadata without ibp's own entries."""
        return {key: text for key, text in self.metadata.items() if self.is_plain or not key.startswith(PREFIX)}


def read_header(path: Path) -> Header:
    """The header of a file. FileFormatError: it is no file of safetensors, is cut short, is of a newer format than this
    ibp reads, or has lost one of the names that say that it is ibp's. OSError: it cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        return header_of(file, str(path))


def header_of(file: BinaryIO, name: str) -> Header:
    """The header of an open file, whose name is for messages."""
    size, start = os.fstat(file.fileno()).st_size, file.read(9)
    other = other_format(start)
    if other is not None:
        raise FileFormatError(
            f"{name} is {_OTHERS[other]}, no file of safetensors; ibp.checkpoints.compress makes one of it, which "
            "ibp.load and ibp.open read"
        )
    header_bytes = int.from_bytes(start[:8], "little")
    if size < 10 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        if start[8:9] != b"{":
            raise FileFormatError(
                f"{name} is no file of safetensors: it has {size} bytes and begins with {start!r}; wanted 8 bytes with "
                "the size of the header, then the header, which begins with {"
            )
        raise FileFormatError(
            f"{name} is no file of safetensors, or was cut: it has {size} bytes and says that its header has "
            f"{header_bytes}; wanted 2 to {MAX_HEADER_BYTES} within the file"
        )
    with refused(name):
        tensors, metadata, checks = _core.read_header(start + file.read(header_bytes - 1), size)
    entries = sorted(((name, Entry(*entry)) for name, entry in tensors.items()), key=lambda item: item[1][2:])
    return Header(8 + header_bytes, dict(entries), metadata, checks)


def other_format(start: bytes) -> str | None:
    """Returns what a file is that begins with these bytes, at least 9 of them, if it is no file of safetensors: "npy",
    "archive" or "pickle"; None if they tell nothing of the kind."""
    if start[8:9] == b"{":  # the sizes of some headers are the first bytes of pickles
        return None
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if start.startswith((b"PK\3\4", b"PK\5\6")):
        return "archive"
    return "pickle" if _PICKLE.match(start) else None


# ---- sets of files ----


@dataclass(frozen=True)
class FileSet:
    """The files that are opened as one. files: their paths, by name; places: the file's name of each tensor, where an
    index says it; else empty."""

    files: Mapping[str, Path]
    places: Mapping[str, str]


def find_files(path: Path) -> FileSet:
    """The files of a path: a file, an index of shards, or a directory of either, without the coded forms of files of
    other kinds (`optimizer.pt.ibp.safetensors`) beside a model. FileNotFoundError: there is none, or an index names one
    that is not there. FileFormatError: the index is none, or a directory has several."""
    if path.is_dir():
        indices = _of_weights(path.glob(f"*{SUFFIX}{INDEX_SUFFIX}"))
        if len(indices) > 1:
            raise FileFormatError(f"{path} has {len(indices)} indexes of shards; wanted the path of one of them")
        if not indices:
            files = {file.name: file for file in _of_weights(path.glob(f"*{SUFFIX}"))}
            if not files:
                raise FileNotFoundError(f"{path} has no files *.safetensors")
            return FileSet(files, {})
        path = indices[0]
    if not path.name.endswith(INDEX_SUFFIX):
        return FileSet({path.name: path}, {})
    places = read_index(path)
    files = {name: path.parent / name for name in sorted(set(places.values()))}
    for name, file in files.items():
        if not file.exists():
            raise FileNotFoundError(f"{path.name} names the file {name!r}, which is not beside it")
    return FileSet(files, places)


def _of_weights(paths: Iterable[Path]) -> list[Path]:
    """The files of weights among files of safetensors, sorted; all of them, where none is of weights."""
    found = sorted(paths)
    return [path for path in found if is_of_weights(path.name)] or found
