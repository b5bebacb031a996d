"""The lines of a file's metadata: tables, codebooks and checksums as fields, `key=value` (FORMAT.md section 9)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import _core
from .._schemes import SCHEMES, AnyCodebook, ClusteredCodebook, Codebook, PlanesCodebook
from .._schemes.planes.codebook import num_entries, symbol_bytes

ALIGNMENT = 128  # bytes, of every tensor's data in a file
TABLE_PARTS = {"slots": "U8", "overflow": "U8", "lengths": "U16", "bases": "U64"}
CODEC_PARTS = {"blocks": "U8", "offsets": "U64"}

# Names of dtypes in headers of safetensors; other dtypes have torch's name in capitals.
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
_NAMES = {f"torch.{name}": text for text, name in _DTYPES.items()}
PLAIN_ITEM_BYTES = {text: getattr(torch, name).itemsize for text, name in _DTYPES.items() if hasattr(torch, name)}

_KEY = re.compile(r"[a-z_]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}", re.ASCII)
_FLOAT = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,3})?", re.ASCII)
_FINGERPRINT = re.compile(r"[0-9a-f]{16}", re.ASCII)


class FileFormatError(ValueError):
    """A file is no file of ibp or of safetensors, contradicts itself, or is of a newer format."""

    __module__ = "ibp"


class ChecksumError(FileFormatError):
    """Bytes of a file differ from the bytes that were written."""

    __module__ = "ibp"


# ---- dtypes ----


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a file."""
    return _NAMES.get(str(dtype), str(dtype).removeprefix("torch.").upper())


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in a file. FileFormatError if this torch has none."""
    dtype = getattr(torch, _DTYPES.get(name, name.lower()), None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise FileFormatError(f"the dtype {name!r} is none of torch {torch.__version__}")
    return dtype


# ---- fields as text ----


def write_fields(fields: Mapping[str, object]) -> str:
    """`key=value` pairs; fields that are None are left out."""
    return " ".join(f"{key}={_written(value)}" for key, value in fields.items() if value is not None)


def _written(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(map(_written, value))
    if isinstance(value, (bool, int)):
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def fingerprint_text(fingerprint: int | None) -> str | None:
    return None if fingerprint is None else f"{fingerprint:016x}"


class Fields:
    """The fields of one line. Each `take` removes a field and checks it; `done` refuses what is left.

    Args:
        what: what the fields are of, for messages.
        text: the line.
    """

    def __init__(self, what: str, text: str) -> None:
        self.what, self._values = what, dict[str, str]()
        for pair in text.split(" ") if text else ():
            key, equals, value = pair.partition("=")
            if not equals or not _KEY.fullmatch(key) or key in self._values:
                raise self.error(f"{pair[:80]!r} is none of its fields, or one that is there twice; wanted key=value")
            self._values[key] = value

    def error(self, message: str) -> FileFormatError:
        return FileFormatError(f"{self.what}: {message}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def remaining(self) -> dict[str, str]:
        return dict(self._values)

    def text(self, key: str) -> str:
        """A field that must be there."""
        if key not in self._values:
            raise self.error(f"the field {key!r} is missing")
        return self._values.pop(key)

    def number(self, key: str, most: int = 2**64 - 1) -> int:
        text = self.text(key)
        if not _NUMBER.fullmatch(text) or int(text) > most:
            raise self.error(f"{key} is {text[:40]!r}; wanted 0 to {most}")
        return int(text)

    def numbers(self, key: str, most: int = 2**63 - 1, most_entries: int = 256) -> tuple[int, ...]:
        text = self.text(key)
        parts = text.split(",") if text else []
        if len(parts) > most_entries or not all(_NUMBER.fullmatch(part) and int(part) <= most for part in parts):
            raise self.error(f"{key} is {text[:80]!r}; wanted at most {most_entries} numbers up to {most}")
        return tuple(map(int, parts))

    def optional(self, key: str, most: int = 2**64 - 1) -> int | None:
        return self.number(key, most) if key in self else None

    def optional_float(self, key: str) -> float | None:
        if key not in self:
            return None
        text = self.text(key)
        if not _FLOAT.fullmatch(text) or not math.isfinite(float(text)):
            raise self.error(f"{key} is {text[:40]!r}; wanted a finite number")
        return float(text)

    def optional_fingerprint(self, key: str) -> int | None:
        if key not in self:
            return None
        text = self.text(key)
        if not _FINGERPRINT.fullmatch(text):
            raise self.error(f"{key} is {text[:40]!r}; wanted 16 hexadecimal digits")
        return int(text, 16)

    def done(self) -> None:
        if self._values:
            raise self.error(f"its fields {sorted(self._values)[:8]} are none that this ibp knows: a newer one may")


# ---- a table ----


@dataclass(frozen=True)
class TableFields:
    """What a file says of a table.

    Attributes:
        dtype: its name in the file.
        shape: of the tensor.
        scheme: how rows are coded; None of a table of an external codec.
        row_bytes, slot_bytes, rows_per_base: FORMAT.md sections 1 to 3.
        codebook: number of the codebook; None for scheme raw.
        content: fingerprint of the tensor's bytes, where it is known.
        base, result: of a delta, fingerprints of what it is applied to and of what that becomes.
        codec, block_bytes, codec_fields: of a table of an external codec.
    """

    dtype: str
    shape: tuple[int, ...]
    scheme: str | None = None
    row_bytes: int = 0
    slot_bytes: int = 0
    codebook: int | None = None
    rows_per_base: int = _core.ROWS_PER_BASE
    content: int | None = None
    base: int | None = None
    result: int | None = None
    codec: str | None = None
    block_bytes: int = 0
    codec_fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[str, str]:
        """Dtypes of the table's parts, by their names."""
        return TABLE_PARTS if self.codec is None else CODEC_PARTS

    def text(self) -> str:
        """The line of a table."""
        if self.codec is not None:
            coding = {"codec": self.codec, "block_bytes": self.block_bytes, **self.codec_fields}
            known = {"dtype": self.dtype, "shape": self.shape, "content": fingerprint_text(self.content)}
            return write_fields({**known, **coding})
        return write_fields(
            {
                "dtype": self.dtype,
                "shape": self.shape,
                "scheme": self.scheme,
                "row_bytes": self.row_bytes,
                "slot_bytes": self.slot_bytes,
                "codebook": self.codebook,
                "rows_per_base": None if self.rows_per_base == _core.ROWS_PER_BASE else self.rows_per_base,
                "content": fingerprint_text(self.content),
                "base": fingerprint_text(self.base),
                "result": fingerprint_text(self.result),
            }
        )


def table_fields(name: str, text: str) -> TableFields:
    """The fields of a table's line. FileFormatError for wrong and for unknown ones."""
    fields = Fields(f"table {name!r}", text)
    dtype, shape = fields.text("dtype"), fields.numbers("shape", most_entries=64)
    content = fields.optional_fingerprint("content")
    if "codec" in fields:
        codec, block_bytes = fields.text("codec"), fields.number("block_bytes")
        own = {key: fields.text(key) for key in fields.remaining() if key.startswith("codec_")}
        found = TableFields(dtype, shape, content=content, codec=codec, block_bytes=block_bytes, codec_fields=own)
    else:
        found = TableFields(dtype, shape, content=content, **_coding_fields(fields, content is not None))
    fields.done()
    return found


def _coding_fields(fields: Fields, has_content: bool) -> dict[str, Any]:
    scheme = fields.text("scheme")
    if scheme not in SCHEMES:
        raise fields.error(f"its scheme is {scheme[:40]!r}; this ibp knows {sorted(SCHEMES)}")
    rows_per_base = fields.optional("rows_per_base")
    if rows_per_base not in (None, 1, _core.ROWS_PER_BASE):
        raise fields.error(f"rows_per_base is {rows_per_base}; wanted {_core.ROWS_PER_BASE} or 1")
    codebook = None if scheme == "raw" else fields.number("codebook", 2**32 - 1)
    base, result = fields.optional_fingerprint("base"), fields.optional_fingerprint("result")
    if (base is None) != (result is None):
        raise fields.error("only one of base and result is there; wanted both, as of a delta, or none")
    if base is not None and has_content:
        raise fields.error("content is there beside base; wanted one of them: a delta is of no tensor by itself")
    return {
        "scheme": scheme,
        "row_bytes": fields.number("row_bytes", _core.MAX_ROW_BYTES),
        "slot_bytes": fields.number("slot_bytes", _core.MAX_ROW_BYTES),
        "codebook": codebook,
        "rows_per_base": rows_per_base or _core.ROWS_PER_BASE,
        "base": base,
        "result": result,
    }


# ---- a codebook ----


@dataclass(frozen=True)
class CodebookRecord:
    """A codebook as a file has it: its line, and its parts."""

    text: str
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)


Parts = Callable[[str, str, int], np.ndarray]  # (part, dtype's name, entries): the entries of a codebook's part


def codebook_record(codebook: AnyCodebook, number_of: Callable[[AnyCodebook], int]) -> CodebookRecord:
    """What a file says of a codebook. number_of: the number in the file of one of several clusters."""
    if isinstance(codebook, ClusteredCodebook):
        fields = {
            "clusters": [number_of(one) for one in codebook.codebooks],
            "expected_savings": codebook.expected_savings,
        }
        return CodebookRecord(write_fields(fields))
    if isinstance(codebook, Codebook):
        return _masks_record(codebook)
    assert isinstance(codebook, PlanesCodebook)
    return _planes_record(codebook)


def _masks_record(codebook: Codebook) -> CodebookRecord:
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


_PLANES_NUMBERS = ("element_bytes", "rotate", "residual_bits")
_PLANES_FLAGS = ("per_column", "listed")
_PLANES_VALUES = ("default", "closed", "signed_default", "invariant_bits", "invariant_value")


def _planes_record(codebook: PlanesCodebook) -> CodebookRecord:
    live = codebook.live_columns
    names = ("scheme", "row_bytes", *_PLANES_NUMBERS, "digit_bits", *_PLANES_FLAGS, *_PLANES_VALUES)
    fields = {
        **{name: getattr(codebook, name) for name in names},
        "first_symbol": codebook.first_symbol,
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
    number: int, text_of: Callable[[int], str], part: Callable[[int, str, str, int], np.ndarray]
) -> AnyCodebook:
    """The codebook of a number.

    Args:
        text_of: the line of a number.
        part: (number, part, dtype's name, how many): the entries of a codebook's part.

    Raises:
        FileFormatError: the lines or the parts are none of a codebook.
    """
    fields = Fields(f"codebook {number}", text_of(number))
    try:
        if "clusters" not in fields:
            return _read_single(fields, lambda *wanted: part(number, *wanted))
        numbers = fields.numbers("clusters", 2**32 - 1)
        expected_savings = fields.optional_float("expected_savings")
        fields.done()
        members = []
        for member in numbers:
            member_fields = Fields(f"codebook {member}", text_of(member))
            members.append(_read_single(member_fields, lambda *wanted, k=member: part(k, *wanted)))
        return ClusteredCodebook(members, expected_savings)
    except FileFormatError:
        raise
    except ValueError as error:
        raise fields.error(str(error)) from error


def _read_single(fields: Fields, part: Parts) -> AnyCodebook:
    scheme = fields.text("scheme")
    if scheme == Codebook.scheme:
        return _read_masks(fields, part)
    if scheme == PlanesCodebook.scheme:
        return _read_planes(fields, part)
    raise fields.error(f"its scheme is {scheme[:40]!r}; wanted {Codebook.scheme!r} or {PlanesCodebook.scheme!r}")


def _read_masks(fields: Fields, part: Parts) -> Codebook:
    row_bytes = fields.number("row_bytes", _core.MAX_ROW_BYTES)
    chunk_bytes, flag_all = fields.number("chunk_bytes", 8), fields.number("flag_all", 1)
    pairs = fields.number("pairs", 65536)
    tau, expected_savings = fields.optional_float("tau"), fields.optional_float("expected_savings")
    fields.done()
    if chunk_bytes not in (1, 2, 4, 8):
        raise fields.error(f"chunk_bytes is {chunk_bytes}; wanted 1, 2, 4 or 8")
    palette = part("palette", "U8", 2 * pairs * chunk_bytes).reshape(pairs, 2, chunk_bytes)
    num_chunks = -(-row_bytes // chunk_bytes) if pairs > 1 else 0
    index = part("index", "U8" if pairs <= 256 else "U16", num_chunks)
    return Codebook(
        row_bytes,
        chunk_bytes,
        bool(flag_all),
        torch.from_numpy(palette),
        torch.from_numpy(index),
        tau,
        expected_savings,
    )


def _read_planes(fields: Fields, part: Parts) -> PlanesCodebook:
    values: dict[str, Any] = {name: fields.number(name) for name in ("row_bytes", *_PLANES_NUMBERS, *_PLANES_VALUES)}
    values["digit_bits"] = digit_bits = fields.numbers("digit_bits", 4, 4)
    values.update({name: bool(fields.number(name, 1)) for name in _PLANES_FLAGS})
    values["first_symbol"] = fields.optional("first_symbol")
    values["expected_savings"] = fields.optional_float("expected_savings")
    live = fields.optional("live", _core.MAX_ROW_BYTES)
    fields.done()
    symbol_bits = 8 * values["element_bytes"] - values["invariant_bits"] - values["residual_bits"]
    if values["element_bytes"] not in (1, 2, 4, 8) or not 0 <= symbol_bits <= 64 or values["row_bytes"] > 65536:
        raise fields.error("its elements, rows and symbols have sizes that do not fit each other")
    columns = values["row_bytes"] // values["element_bytes"]
    if live is not None:
        values["live_columns"] = torch.from_numpy(part("live_columns", "U16", live).astype(np.int64))
        values["row_template"] = torch.from_numpy(part("row_template", "U8", values["row_bytes"]))
    sets = (columns if live is None else live) if values["per_column"] else 1
    shape = (sets, num_entries(digit_bits) if values["first_symbol"] is None else 0)
    entries = part("entries", f"U{8 * symbol_bytes(symbol_bits)}", shape[0] * shape[1])
    values["entries"] = torch.from_numpy(entries.astype(np.uint64).view(np.int64).reshape(shape))
    return PlanesCodebook(**values)
