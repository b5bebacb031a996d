"""The header of a safetensors file, and the files that form a set."""

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

    dtype: str  # the dtype's name in the header
    shape: tuple[int, ...]  # the tensor's shape; a part of a table has one dimension, padding included
    # start, end: the place of its bytes, counted from the beginning of the file.
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """The content of a file before its data."""

    num_bytes: int  # bytes of the header, its own size included: the data begin there
    tensors: Mapping[str, Entry]  # by name, in the order of their bytes
    metadata: Mapping[str, str]  # texts by keys, as they are in the file
    # The bytes of the blocks that have checksums, and the number of blocks; or the reason why the checksums are
    # invalid; or None for an ordinary safetensors file.
    checks: tuple[int, int] | str | None

    @property
    def is_plain(self) -> bool:
        """Whether the file is an ordinary safetensors file."""
        return FORMAT not in self.metadata

    @property
    def user_metadata(self) -> dict[str, str]:
        """The metadata without ibp's own entries."""
        return {key: text for key, text in self.metadata.items() if self.is_plain or not key.startswith(PREFIX)}


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        FileFormatError: the file is not a safetensors file, is cut short, has a newer format than this ibp reads, or
            has lost one of the names that mark it as ibp's.
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return header_of(file, str(path))


def header_of(file: BinaryIO, name: str) -> Header:
    """Reads the header of an open file. name: the file's name, for messages."""
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
    """Returns what kind of file begins with these bytes, if it is not a safetensors file: "npy", "archive" or
    "pickle". Returns None for any other start. start: at least 9 bytes."""
    # This must come first, because the sizes of some headers look like the first bytes of pickles.
    if start[8:9] == b"{":
        return None
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if start.startswith((b"PK\3\4", b"PK\5\6")):
        return "archive"
    return "pickle" if _PICKLE.match(start) else None


# ---- sets of files ----


@dataclass(frozen=True)
class FileSet:
    """The files that are opened as one.

    Attributes:
        files: their paths, by name.
        places: the name of each tensor's file, if an index says it; otherwise empty.
    """

    files: Mapping[str, Path]
    places: Mapping[str, str]


def find_files(path: Path) -> FileSet:
    """Finds the files of a path: a file, an index of shards, or a directory of either. In a directory, the coded forms
    of other kinds of files (`optimizer.pt.ibp.safetensors`) are left out if they are beside a model.

    Raises:
        FileNotFoundError: there is no file, or an index names a file that does not exist.
        FileFormatError: the index is not an index, or a directory has several.
    """
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
    """Returns those of the safetensors files that hold weights, sorted, or all files if none of them does."""
    found = sorted(paths)
    return [path for path in found if is_of_weights(path.name)] or found
