"""Defines the format of files (FORMAT.md section 9): names and keys, the fields of tables and codebooks, views, and the
header. This module opens no file: `reader.py` reads files, and `writer.py` writes them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from .. import _core
from .._common import sequences
from .._rows.clusters import ClusteredCodebook
from .._rows.codebook import AnyCodebook
from .._rows.geometry import PAIRS_DTYPE
from .._rows.masks import Codebook
from .._rows.planes import PlanesCodebook, num_entries, symbol_bytes

ALIGNMENT = 128  # Bytes: every tensor's data in a file begin at a multiple of this.
MAX_HEADER_BYTES = 100_000_000  # The largest size in bytes of the JSON that readers of safetensors accept.

PREFIX = "ibp."  # The beginning of all metadata keys and names of tensors that belong to the format.
FORMAT = "ibp.format"  # The key whose value is the format's version.
CHECKS = "ibp.checks"  # The key of the fields of the checksums, and the name of the tensor that holds the checksums.
PADDING = "ibp.padding."  # The beginning of the names of the tensors of zeros that fill gaps between other tensors.
# Beginnings of keys. The name of a table, the number of a codebook or the name of a removed tensor follows.
TABLE_KEY, CODEBOOK_KEY, REMOVED_KEY = "ibp.table.", "ibp.codebook.", "ibp.removed."

# The parts of a table, and the parts of a tensor that an external codec has coded. Each dictionary maps the name of a
# part to the name of its dtype.
TABLE_PARTS = {"slots": "U8", "overflow": "U8", "lengths": "U16", "bases": "U64"}
CODEC_PARTS = {"blocks": "U8", "offsets": "U64"}


class FileFormatError(ValueError):
    """A file is not a file of ibp or of safetensors, is inconsistent, or has a newer format."""


class ChecksumError(FileFormatError):
    """Bytes of a file differ from the bytes that were written."""


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """A context that converts a ValueError or TypeError of its block to a FileFormatError. what: the name of what is
    being read, with which the message begins."""
    try:
        yield
    except FileFormatError:
        raise
    except (ValueError, TypeError) as error:
        raise FileFormatError(f"{what}: {error}") from error


def part_names(table: str) -> list[str]:
    """Returns all names that parts of a table can have in a file."""
    return [f"{table}:{part}" for part in (*TABLE_PARTS, *CODEC_PARTS)]


def rounded_up(num_bytes: int) -> int:
    """Returns the size in bytes, with padding, that a tensor of num_bytes bytes has in a file."""
    return sequences.rounded_up(num_bytes, ALIGNMENT)


# ---- dtypes ----

# Maps the names of dtypes in headers of safetensors to torch's names. In the fields of tables, a dtype that safetensors
# lacks has torch's name in capitals.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_NAMES = {name: text for text, name in _DTYPES.items()}
# Size in bytes of an element, for each dtype of safetensors that this torch has.
PLAIN_ITEM_BYTES = {text: getattr(torch, name).itemsize for text, name in _DTYPES.items() if hasattr(torch, name)}
_PAIRS = "F4"  # 4-bit floats: an element of torch's corresponding dtype holds two of them


def dtype_name(dtype: torch.dtype | str) -> str:
    """Returns the name that a dtype has in files. dtype: the dtype, or torch's name for it."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name.upper())


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype that files call `name`. Raises FileFormatError if this torch does not have it."""
    dtype = getattr(torch, _DTYPES.get(name, name.lower()), None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise FileFormatError(f"the dtype {name!r} is none of torch {torch.__version__}")
    return dtype


def entry_of(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Returns (the name of the dtype, the shape) of a plain tensor in a header, or None if safetensors does not have
    the dtype."""
    if dtype == PAIRS_DTYPE and shape:
        return _PAIRS, (*shape[:-1], 2 * shape[-1])
    text = dtype_name(dtype)
    return (text, shape) if text in PLAIN_ITEM_BYTES else None


def form_of(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns (dtype, shape) of the torch tensor into which a plain tensor is read. dtype, shape: as in the header.
    num_bytes: size of the tensor in bytes.

    If torch does not have the dtype, the tensor is read as bytes: the dtype is uint8, and the last dimension counts
    bytes instead of elements. If the bytes do not divide evenly among the other dimensions, the result has one
    dimension. The exceptions are 4-bit floats: if torch has PAIRS_DTYPE, each element of the result holds a pair of
    them.
    """
    with contextlib.suppress(FileFormatError):
        return dtype_of(dtype), shape
    items = math.prod(shape[:-1])
    made = (*shape[:-1], num_bytes // max(items, 1)) if shape and num_bytes % max(items, 1) == 0 else (num_bytes,)
    if dtype == _PAIRS and PAIRS_DTYPE is not None and math.prod(made) * 2 == math.prod(shape):
        return PAIRS_DTYPE, made
    return torch.uint8, made


# ---- fields as text ----


def write_fields(fields: Mapping[str, object]) -> str:
    """Returns fields as a string: `key=value` pairs with spaces between them. Fields that are None are left out."""
    return " ".join(f"{key}={_written(value)}" for key, value in fields.items() if value is not None)


def _written(value: object) -> str:
    """Returns the text of a field's value."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_written, value))
    if isinstance(value, (bool, int)):
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def _fingerprint_text(fingerprint: int | None) -> str | None:
    """Returns the text of a fingerprint, or None if it is not known."""
    return None if fingerprint is None else f"{fingerprint:016x}"


# ---- a table ----


@dataclass(frozen=True)
class TableFields:
    """What the metadata of a file says about a table."""

    dtype: str  # The dtype's name in the file.
    shape: tuple[int, ...]  # The tensor's shape.
    scheme: str | None = None  # How rows are coded; None for a table of an external codec.
    # row_bytes, slot_bytes, rows_per_base: FORMAT.md sections 1 to 3
    row_bytes: int = 0
    slot_bytes: int = 0
    codebook: int | None = None  # Number of the codebook; None for scheme raw.
    rows_per_base: int = _core.ROWS_PER_BASE
    content: int | None = None  # Fingerprint of the tensor's bytes, if it is known.
    # base, result: for a delta, the fingerprints of the tensor that it is applied to, and of the result.
    base: int | None = None
    result: int | None = None
    # codec, block_bytes, codec_fields: for a table of an external codec.
    codec: str | None = None
    block_bytes: int = 0
    codec_fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[str, str]:
        """A mapping from the names of the table's parts to the names of their dtypes."""
        return TABLE_PARTS if self.codec is None else CODEC_PARTS

    def text(self) -> str:
        """Returns the fields as text, the form that they have in the metadata."""
        return write_fields(
            {
                **vars(self),
                "row_bytes": self.row_bytes or None,
                "slot_bytes": self.slot_bytes if self.codec is None else None,
                "rows_per_base": None if self.rows_per_base == _core.ROWS_PER_BASE else self.rows_per_base,
                "content": _fingerprint_text(self.content),
                "base": _fingerprint_text(self.base),
                "result": _fingerprint_text(self.result),
                "block_bytes": self.block_bytes or None,
                "codec_fields": None,
                **self.codec_fields,
            }
        )


def table_fields(what: str, text: str) -> TableFields:
    """Reads the fields of a table from their text. Raises FileFormatError if a field is missing, wrong or unknown.
    what: the file and the table, for the message."""
    with refused(what):
        fields = _core.read_table(_in_json(text))
        own = [pair for pair in text.split(" ") if pair.startswith("codec_")]
        codec_fields = dict(pair.split("=", 1) for pair in own)
        if len(codec_fields) != len(own):
            raise ValueError(f"it has {own}; wanted no field there twice")
        return TableFields(**fields, codec_fields=codec_fields)


def _in_json(text: str) -> str:
    """Returns a string in the form that it has in JSON, without the quotes around it."""
    return json.dumps(text)[1:-1]


# ---- a codebook ----

# (part, name of the dtype, number of entries) -> the entries of a codebook's part
Parts = Callable[[str, str, int], np.ndarray]

_PLANES_NUMBERS = ("element_bytes", "rotate", "residual_bits")
_PLANES_FLAGS = ("per_column", "listed")
_PLANES_VALUES = ("default", "closed", "signed_default", "invariant_bits", "invariant_value", "first_symbol")


def codebook_record(
    codebook: AnyCodebook, number_of: Callable[[AnyCodebook], int]
) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the fields of a codebook as text, and its parts by name, without empty parts. number_of: a function that
    returns the number that the codebook of a cluster has in the file."""
    fields: dict[str, Any]
    parts: dict[str, np.ndarray] = {}
    if isinstance(codebook, ClusteredCodebook):
        fields = {"clusters": [number_of(one) for one in codebook.codebooks]}
    elif isinstance(codebook, Codebook):
        fields = {
            "scheme": codebook.scheme,
            "row_bytes": codebook.row_bytes,
            "chunk_bytes": codebook.chunk_bytes,
            "flag_all": codebook.flag_all,
            "pairs": len(codebook.palette),
            "tau": codebook.tau,
        }
        parts = {"palette": codebook.palette.numpy().reshape(-1), "index": codebook.index.numpy()}
    else:
        assert isinstance(codebook, PlanesCodebook)
        live = codebook.live_columns
        names = ("scheme", "row_bytes", *_PLANES_NUMBERS, "digit_bits", *_PLANES_FLAGS, *_PLANES_VALUES)
        fields = {**{name: getattr(codebook, name) for name in names}, "live": None if live is None else len(live)}
        parts = {"entries": codebook.entries.numpy().reshape(-1).astype(f"<u{codebook.symbol_bytes}")}
        if live is not None:
            assert codebook.row_template is not None
            parts.update(live_columns=live.numpy().astype("<u2"), row_template=codebook.row_template.numpy())
    fields["expected_savings"] = codebook.expected_savings
    return write_fields(fields), {name: array for name, array in parts.items() if array.size}


def read_codebook(
    file: str,
    metadata: Mapping[str, str],
    number: int,
    part: Callable[[int, str, str, int], np.ndarray],
    is_cluster: bool = False,
) -> AnyCodebook:
    """Reads the codebook that has the given number in a file.

    Args:
        file: the file's name, for messages.
        metadata: the file's metadata, which has the fields of the codebook.
        number: the number of the codebook in the file.
        part: a function of (number, part, name of the dtype, number of entries) that returns the entries of a
            codebook's part.
        is_cluster: whether the codebook belongs to a cluster of another codebook, so that it must not have clusters
            itself.

    Raises:
        FileFormatError: the fields are missing or wrong, or a part does not match them.
    """
    line = metadata.get(f"{CODEBOOK_KEY}{number}")
    if line is None:
        raise FileFormatError(f"{file} has no codebook {number}")
    with refused(f"{file}: codebook {number}"):
        fields = _core.read_codebook(_in_json(line))
        if "clusters" in fields:
            if is_cluster:
                raise ValueError("it has clusters of its own; wanted a codebook of one cluster")
            members = [read_codebook(file, metadata, member, part, True) for member in fields["clusters"]]
            return ClusteredCodebook(members, fields.get("expected_savings"))
        read = _read_masks if fields.pop("scheme") == Codebook.scheme else _read_planes
        return read(fields, lambda *wanted: part(number, *wanted))


def _read_masks(fields: dict[str, Any], part: Parts) -> Codebook:
    """Returns the codebook of scheme "ibp" with these fields and parts."""
    pairs, chunk_bytes = fields.pop("pairs"), fields["chunk_bytes"]
    palette = part("palette", "U8", 2 * pairs * chunk_bytes).reshape(pairs, 2, chunk_bytes)
    num_chunks = -(-fields["row_bytes"] // chunk_bytes) if pairs > 1 else 0
    index = part("index", "U8" if pairs <= 256 else "U16", num_chunks)
    return Codebook(palette=torch.from_numpy(palette), index=torch.from_numpy(index), **fields)


def _read_planes(values: dict[str, Any], part: Parts) -> PlanesCodebook:
    """Returns the codebook of scheme "planes" with these fields and parts."""
    live, is_consecutive = values.pop("live", None), "first_symbol" in values
    values.update((name, bool(values[name])) for name in _PLANES_FLAGS)
    if live is not None:
        values["live_columns"] = torch.from_numpy(part("live_columns", "U16", live).astype(np.int64))
        values["row_template"] = torch.from_numpy(part("row_template", "U8", values["row_bytes"]))
    columns = values["row_bytes"] // values["element_bytes"] if live is None else live
    shape = (columns if values["per_column"] else 1, 0 if is_consecutive else num_entries(values["digit_bits"]))
    symbol_bits = 8 * values["element_bytes"] - values["invariant_bits"] - values["residual_bits"]
    entries = part("entries", f"U{8 * symbol_bytes(symbol_bits)}", shape[0] * shape[1])
    values["entries"] = torch.from_numpy(entries.astype(np.uint64).view(np.int64).reshape(shape))
    return PlanesCodebook(**values)


# ---- views ----

# The beginning of the keys of views, and the beginning of the names of bases that are not tensors of the checkpoint.
VIEW_KEY, STORAGE = "ibp_view.", "torch_storage."
MOST_TIMES = 1000  # The largest allowed ratio of the number of elements of a view to that of its base.
_LIMIT = 1 << 62  # Sizes, strides and the offset of a view must be less than this; torch holds them in 64 bits.


class View(NamedTuple):
    """A tensor that shares memory with another tensor of its checkpoint, and is stored as a view of it.

    The metadata describes the view under the key "ibp_view.<name>", as JSON: [base, shape, strides, offset]. The tensor
    is `torch.as_strided` of the contiguous base, and has the base's dtype. A base whose name begins with
    "torch_storage." holds memory that no single tensor covers; it is not itself a tensor of the checkpoint.
    """

    base: str  # The name of the base.
    shape: tuple[int, ...]
    # strides, offset: in elements
    strides: tuple[int, ...]
    offset: int

    def check(self, num_elements: int) -> None:
        """Raises FileFormatError if the view ends past the end of a base of num_elements elements, or has more than
        1,000 times that number of elements."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        if math.prod(self.shape) > MOST_TIMES * num_elements or (0 not in self.shape and last >= num_elements):
            elements = f"{math.prod(self.shape)} elements up to number {last}"
            raise FileFormatError(f"a view of {self.base!r} has {elements}; the base has {num_elements}")

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the view of a base. Raises FileFormatError as `check` does."""
        self.check(base.numel())
        return base.contiguous().view(-1).as_strided(self.shape, self.strides, self.offset)

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the view is the same tensor as a contiguous base of this shape."""
        return self[1:] == (tuple(shape), torch.empty(shape, dtype=torch.uint8, device="meta").stride(), 0)

    def text(self) -> str:
        """Returns the view as JSON, the form that it has in the metadata."""
        return json.dumps(self)


def views_of(metadata: Mapping[str, str], names: Container[str]) -> dict[str, View]:
    """Reads the views in metadata. Returns them by name.

    names: the names of the tensors that the file stores.

    Raises:
        FileFormatError: an entry is not a view, has the name of a stored tensor, or has a base that does not exist.
    """
    found = {}
    for key, text in metadata.items():
        if key.startswith(VIEW_KEY):
            with refused(f"the metadata {key!r}"):
                name, view = key.removeprefix(VIEW_KEY), _read_view(text)
                if name in names or view.base not in names:
                    raise ValueError(f"{name!r} is a tensor already, or there is no tensor {view.base!r}")
                found[name] = view
    return found


def _read_view(text: str) -> View:
    """Parses a view from JSON. Raises ValueError if the text is not a view."""
    try:
        base, shape, strides, offset = json.loads(text)
        numbers = [*shape, *strides, offset]
        are_right = len(shape) == len(strides) and all(type(each) is int and 0 <= each < _LIMIT for each in numbers)
    except (ValueError, TypeError, RecursionError):
        are_right = False
    if not are_right or not isinstance(base, str):
        raise ValueError(f"it is {text[:80]!r}; wanted a base, a shape, as many strides, and an offset")
    return View(base, tuple(shape), tuple(strides), offset)


# ---- the header ----

_OTHERS = {  # For messages: a description of each format that `other_format` returns.
    "npy": "an array of numpy",
    "archive": "an archive, as torch.save and numpy.savez write them",
    "pickle": "a pickle, as torch.save once wrote them",
}
_PICKLE = re.compile(rb"\x80[\x02-\x05]")


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: str  # The dtype's name in the header.
    shape: tuple[int, ...]  # The tensor's shape; a part of a table has one dimension, which includes the padding.
    # start, end: offsets in the file at which its bytes begin and end.
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """The header of a file, which comes before the data."""

    num_bytes: int  # Size in bytes, including the 8 bytes with the size of the JSON. The data begin at this offset.
    tensors: Mapping[str, Entry]  # By name, in the order of their bytes in the file.
    metadata: Mapping[str, str]  # A mapping from strings to strings, with the user's entries and ibp's.
    # (size in bytes of a block that has a checksum, number of these blocks); or the reason why the checksums are
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


def header_of(file: BinaryIO, name: str) -> Header:
    """Reads the header of a file that is open at its beginning. Raises FileFormatError if there is no valid header.
    name: the file's name, for messages."""
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
    """Recognises a format other than safetensors by the first bytes of a file. Returns "npy", "archive" or "pickle", or
    None for any other file. start: the first bytes, at least 9."""
    # This test must come first, because the sizes of some headers look like the first bytes of pickles.
    if start[8:9] == b"{":
        return None
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if start.startswith((b"PK\3\4", b"PK\5\6")):
        return "archive"
    return "pickle" if _PICKLE.match(start) else None


# ---- checksums ----

BLOCK_BYTES = 1 << 20  # Size in bytes of a block of data; each block has a checksum.
HASH = "xxh3_64"  # The name of the hash function in the fields of the checksums.


def checksum_bytes(data_bytes: int) -> int:
    """Returns the size in bytes of the checksums for data_bytes bytes of data: one checksum of 8 bytes for each block,
    one for the header, and one for all preceding checksums."""
    return 8 * (-(-data_bytes // BLOCK_BYTES) + 2)
