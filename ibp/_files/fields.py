"""The lines of a file's metadata: tables, codebooks and checksums as fields `key=value` (FORMAT.md section 9)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import _core
from .._layout.geometry import PAIRS_DTYPE
from .._schemes import AnyCodebook, ClusteredCodebook, Codebook, PlanesCodebook
from .._schemes.planes import num_entries, symbol_bytes

ALIGNMENT = 128  # bytes: every tensor's data in a file begin at a multiple of this
TABLE_PARTS = {"slots": "U8", "overflow": "U8", "lengths": "U16", "bases": "U64"}
CODEC_PARTS = {"blocks": "U8", "offsets": "U64"}

# Names of dtypes in headers of safetensors. Other dtypes have torch's name in capitals.
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
PLAIN_ITEM_BYTES = {text: getattr(torch, name).itemsize for text, name in _DTYPES.items() if hasattr(torch, name)}
_PAIRS = "F4"  # an item of torch's tensors of this dtype has two values


class FileFormatError(ValueError):
    """A file is not a file of ibp or of safetensors, contradicts itself, or has a newer format."""


class ChecksumError(FileFormatError):
    """Bytes of a file differ from the bytes that were written."""


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Turns a ValueError or TypeError that is raised inside into a FileFormatError that shows the refused text."""
    try:
        yield
    except FileFormatError:
        raise
    except (ValueError, TypeError) as error:
        raise FileFormatError(f"{what}: {error}") from error


# ---- dtypes ----


def dtype_name(dtype: torch.dtype | str) -> str:
    """Returns the name in a file of a dtype, or of torch's name for one."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name.upper())


def as_json(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that has a dtype and a shape, in the form for JSON."""
    return {**vars(record), "dtype": dtype_name(record.dtype), "shape": list(record.shape)}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with a name in a file. Raises FileFormatError if this torch does not have it."""
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
    """Returns the dtype and shape of the tensor that a plain entry of a header becomes.

    If torch does not have the dtype, the tensor holds the bytes: uint8, and the last dimension has as many bytes as
    its values take. If this is not a whole number, the tensor has one dimension.
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
    """Returns `key=value` pairs. Fields that are None are left out."""
    return " ".join(f"{key}={_written(value)}" for key, value in fields.items() if value is not None)


def _written(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(map(_written, value))
    if isinstance(value, (bool, int)):
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def fingerprint_text(fingerprint: int | None) -> str | None:
    return None if fingerprint is None else f"{fingerprint:016x}"


# ---- a table ----


@dataclass(frozen=True)
class TableFields:
    """The fields that a file has of a table."""

    dtype: str  # the dtype's name in the file
    shape: tuple[int, ...]  # the tensor's shape
    scheme: str | None = None  # how rows are coded; None for a table of an external codec
    # row_bytes, slot_bytes, rows_per_base: FORMAT.md sections 1 to 3
    row_bytes: int = 0
    slot_bytes: int = 0
    codebook: int | None = None  # number of the codebook; None for scheme raw
    rows_per_base: int = _core.ROWS_PER_BASE
    content: int | None = None  # fingerprint of the tensor's bytes, if it is known
    # base, result: for a delta, the fingerprints of what it is applied to and of the result.
    base: int | None = None
    result: int | None = None
    # codec, block_bytes, codec_fields: for a table of an external codec.
    codec: str | None = None
    block_bytes: int = 0
    codec_fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[str, str]:
        """The dtypes of the table's parts, by the names of the parts."""
        return TABLE_PARTS if self.codec is None else CODEC_PARTS

    def text(self) -> str:
        """Returns the line of a table."""
        return write_fields(
            {
                **vars(self),
                "row_bytes": self.row_bytes or None,
                "slot_bytes": self.slot_bytes if self.codec is None else None,
                "rows_per_base": None if self.rows_per_base == _core.ROWS_PER_BASE else self.rows_per_base,
                "content": fingerprint_text(self.content),
                "base": fingerprint_text(self.base),
                "result": fingerprint_text(self.result),
                "block_bytes": self.block_bytes or None,
                "codec_fields": None,
                **self.codec_fields,
            }
        )


def table_fields(what: str, text: str) -> TableFields:
    """Returns the fields of a table's line. Raises FileFormatError for wrong and unknown fields. what: what the line
    belongs to, for the message."""
    with refused(what):
        fields = _core.read_table(_in_json(text))
        own = [pair for pair in text.split(" ") if pair.startswith("codec_")]
        codec_fields = dict(pair.split("=", 1) for pair in own)
        if len(codec_fields) != len(own):
            raise ValueError(f"it has {own}; wanted no field there twice")
        return TableFields(**fields, codec_fields=codec_fields)


def _in_json(text: str) -> str:
    """Returns a text as it appears within the quotes of JSON."""
    return json.dumps(text)[1:-1]


# ---- a codebook ----


@dataclass(frozen=True)
class CodebookRecord:
    """The line and the parts of a codebook in a file."""

    text: str
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)


# (part, name of the dtype, number of entries) -> the entries of a codebook's part
Parts = Callable[[str, str, int], np.ndarray]


_PLANES_NUMBERS = ("element_bytes", "rotate", "residual_bits")
_PLANES_FLAGS = ("per_column", "listed")
_PLANES_VALUES = ("default", "closed", "signed_default", "invariant_bits", "invariant_value", "first_symbol")


def codebook_record(codebook: AnyCodebook, number_of: Callable[[AnyCodebook], int]) -> CodebookRecord:
    """Returns the line and the parts of a codebook. number_of: returns the number in the file of a codebook that is
    one of several clusters."""
    if isinstance(codebook, ClusteredCodebook):
        fields: dict[str, Any] = {
            "clusters": [number_of(one) for one in codebook.codebooks],
            "expected_savings": codebook.expected_savings,
        }
        return CodebookRecord(write_fields(fields))
    if isinstance(codebook, Codebook):
        fields = {
            "scheme": codebook.scheme,
            "row_bytes": codebook.row_bytes,
            "chunk_bytes": codebook.chunk_bytes,
            "flag_all": codebook.flag_all,
            "pairs": len(codebook.palette),
            "tau": codebook.tau,
            "expected_savings": codebook.expected_savings,
        }
        parts = {"palette": codebook.palette.numpy().reshape(-1), "index": codebook.index.numpy()}
        return CodebookRecord(write_fields(fields), _present(parts))
    assert isinstance(codebook, PlanesCodebook)
    live = codebook.live_columns
    names = ("scheme", "row_bytes", *_PLANES_NUMBERS, "digit_bits", *_PLANES_FLAGS, *_PLANES_VALUES)
    fields = {
        **{name: getattr(codebook, name) for name in names},
        "live": None if live is None else len(live),
        "expected_savings": codebook.expected_savings,
    }
    entries = codebook.entries.numpy().reshape(-1).astype(f"<u{codebook.symbol_bytes}")
    parts = {"entries": entries}
    if live is not None:
        assert codebook.row_template is not None
        parts.update(live_columns=live.numpy().astype("<u2"), row_template=codebook.row_template.numpy())
    return CodebookRecord(write_fields(fields), _present(parts))


def _present(parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in parts.items() if array.size}


def read_codebook(
    number: int,
    line_of: Callable[[int], tuple[str, str]],
    part: Callable[[int, str, str, int], np.ndarray],
    is_cluster: bool = False,
) -> AnyCodebook:
    """Reads the codebook with a number.

    Args:
        line_of: a function of a number that returns (what it is, its line).
        part: a function of (number, part, name of the dtype, number of entries) that returns the entries of a
            codebook's part.
        is_cluster: whether the codebook is one of several clusters.

    Raises:
        FileFormatError: the lines or the parts are not those of a codebook.
    """
    what, line = line_of(number)
    with refused(what):
        fields = _core.read_codebook(_in_json(line))
        if "clusters" in fields:
            if is_cluster:
                raise ValueError("it has clusters of its own; wanted a codebook of one cluster")
            members = [read_codebook(member, line_of, part, True) for member in fields["clusters"]]
            return ClusteredCodebook(members, fields.get("expected_savings"))
        read = _read_masks if fields.pop("scheme") == Codebook.scheme else _read_planes
        return read(fields, lambda *wanted: part(number, *wanted))


def _read_masks(fields: dict[str, Any], part: Parts) -> Codebook:
    pairs, chunk_bytes = fields.pop("pairs"), fields["chunk_bytes"]
    palette = part("palette", "U8", 2 * pairs * chunk_bytes).reshape(pairs, 2, chunk_bytes)
    num_chunks = -(-fields["row_bytes"] // chunk_bytes) if pairs > 1 else 0
    index = part("index", "U8" if pairs <= 256 else "U16", num_chunks)
    return Codebook(palette=torch.from_numpy(palette), index=torch.from_numpy(index), **fields)


def _read_planes(values: dict[str, Any], part: Parts) -> PlanesCodebook:
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
