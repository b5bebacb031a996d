"""The header of a safetensors file, and the files of a set."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .. import _core
from .fields import FileFormatError
from .regular import open_regular
from .sets import INDEX_SUFFIX
from .writer import CHECKS, FORMAT, MAX_HEADER_BYTES, PREFIX

_MOST_DIMENSIONS = 64
_MOST = 2**63 - 1
_MOST_DIGITS = 20  # of a number, its sign included
SHAPE_BITS = "2^63 - 1 bits, each size 0 taken as 1"  # of a tensor
# Bits of an element, of dtypes that safetensors names, and then of those of torch's that it does not.
_ITEM_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"COMPLEX32": 32, "COMPLEX128": 128},
}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        dtype: its name in the header.
        shape: of the tensor; of a part of a table one dimension, padding included.
        start, end: of its bytes, counted from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """What stands before the data.

    Attributes:
        num_bytes: of the header, its own size included: where the data begins.
        tensors: by name, in the order of their bytes.
        metadata: text by text, as it is in the file.
    """

    num_bytes: int
    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @property
    def is_plain(self) -> bool:
        """Whether the file is an ordinary one of safetensors."""
        return FORMAT not in self.metadata


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        FileFormatError: it is no file of safetensors, is cut short, is of a newer format than this ibp reads, or has
            lost one of the names that say that it is ibp's.
        OSError: it cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return header_of(file, str(path))


def header_of(file: BinaryIO, name: str) -> Header:
    """The header of an open file, whose name is for messages."""
    size = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    if size < 10 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise FileFormatError(
            f"{name} is no file of safetensors: it has {size} bytes and says that its header has {header_bytes}; "
            f"wanted 2 to {MAX_HEADER_BYTES} within the file"
        )
    header = parse_header(file.read(header_bytes), size, name)
    _check_version(header.metadata, name)
    _check_names(header, name)
    return header


def parse_header(text: bytes, file_bytes: int, name: str) -> Header:
    """The header with the JSON `text`, of a file of `file_bytes` bytes. FileFormatError if `text` is no header."""
    parsed = _parsed(text, name)
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileFormatError(f"{name}: __metadata__ is not text for text")
    start = 8 + len(text)
    entries = {key: _entry(key, value, start, name) for key, value in parsed.items()}
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = start
    for key, entry in tensors.items():
        if entry.start != end:
            raise FileFormatError(f"{name}: the data of {key!r} begins at {entry.start}; wanted {end}, without gap")
        end = entry.end
    if end != file_bytes:
        raise FileFormatError(f"{name} has {file_bytes} bytes, and its tensors end at {end}: it was cut or added to")
    return Header(start, tensors, metadata)


def _parsed(text: bytes, name: str) -> dict[str, Any]:
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with {")
        return json.loads(
            text.decode(), object_pairs_hook=_unique, parse_int=_whole_number, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise FileFormatError(f"{name} is no file of safetensors: its header is no JSON ({why[:200]})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    for key in found:
        key.encode()  # no half of a surrogate pair, which cannot be printed
    return found


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(text)} digits")
    return int(text)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}")


def _entry(key: str, value: Any, data_start: int, name: str) -> Entry:
    """A tensor's entry; FileFormatError unless dtype, shape and offsets fit each other."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{name}: the entry of {key!r} has other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape, _MOST_DIMENSIONS) or not _are_sizes(offsets, 2):
        raise FileFormatError(f"{name}: dtype, shape or data_offsets of {key!r} are no text and no sizes")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileFormatError(f"{name}: data_offsets of {key!r} are {offsets}; wanted its first byte and its end")
    bits = _ITEM_BITS.get(dtype)  # of a newer safetensors's dtype nothing is known
    if bits is not None and not is_shape(shape, bits):
        raise FileFormatError(f"{name}: {key!r} is {dtype} {shape}; wanted at most {SHAPE_BITS}")
    if bits is not None and math.prod(shape) * bits != 8 * (offsets[1] - offsets[0]):
        raise FileFormatError(f"{name}: {key!r} has {offsets[1] - offsets[0]} bytes; wanted those of {dtype} {shape}")
    return Entry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: Any, most: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value <= _MOST for value in values)
    )


def is_shape(shape: Sequence[int], item_bits: int) -> bool:
    """Whether a tensor can have the shape (FORMAT.md section 9): no product of its sizes overflows, in any order."""
    return math.prod(max(1, size) for size in shape) * item_bits <= _MOST


def _check_version(metadata: Mapping[str, str], name: str) -> None:
    """FileFormatError if the file is of a newer format."""
    text = metadata.get(FORMAT)
    if text is None:
        return
    if not text.isascii() or not text.isdigit() or len(text) > 9 or text[0] == "0":
        raise FileFormatError(f"{name}: ibp.format is {text[:40]!r}; wanted a number from 1 on")
    if int(text) > _core.FORMAT_VERSION:
        release = metadata.get("ibp.release", "")[:40] or "a later one"
        raise FileFormatError(
            f"{name} has format {int(text)}, and ibp {_core.version()} reads formats up to {_core.FORMAT_VERSION}: "
            f"ibp {release} wrote it and reads it"
        )


def _check_names(header: Header, name: str) -> None:
    """FileFormatError if a file of ibp has lost one of the names by which its checksums are found."""
    wanted = {
        f"{FORMAT!r} in its metadata": FORMAT in header.metadata,
        f"{CHECKS!r} in its metadata": CHECKS in header.metadata,
        f"the tensor {CHECKS!r}": CHECKS in header.tensors,
    }
    found = [f"{key[:80]!r} in its metadata" for key in header.metadata if key.startswith(PREFIX)]
    missing = [sign for sign, is_there in wanted.items() if not is_there]
    if found and missing:
        raise FileFormatError(
            f"{name}: its header is damaged: it has {found[0]} and lacks {' and '.join(missing)}; a file of ibp has "
            f"{', '.join(wanted)}, and any other no 'ibp.' in its metadata"
        )


# ---- sets of files ----


@dataclass(frozen=True)
class FileSet:
    """The files that are opened as one.

    Attributes:
        files: their paths, by name.
        places: the file's name of each tensor, where an index says it; else empty.
    """

    files: Mapping[str, Path]
    places: Mapping[str, str]


def find_files(path: Path) -> FileSet:
    """The files of a path: a file, an index of shards, or a directory of either.

    Raises:
        FileNotFoundError: there is none, or an index names one that is not there.
        FileFormatError: the index is none, or a directory has several.
    """
    if path.is_dir():
        indices = sorted(path.glob(f"*.safetensors{INDEX_SUFFIX}"))
        if len(indices) > 1:
            raise FileFormatError(f"{path} has {len(indices)} indexes of shards; wanted the path of one of them")
        if not indices:
            files = {file.name: file for file in sorted(path.glob("*.safetensors"))}
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


def read_index(path: Path) -> dict[str, str]:
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_HEADER_BYTES:
            raise FileFormatError(f"{path} has {size} bytes; wanted an index of at most {MAX_HEADER_BYTES}")
        places = _parsed(file.read().strip(), str(path)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise FileFormatError(f"{path} has no weight_map; wanted one from tensors to files")
    for tensor, name in places.items():
        if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
            raise FileFormatError(f"{path}: {tensor!r} is in {str(name)[:80]!r}; wanted the name of a file beside it")
    return places
