"""Codebooks of scheme planes: how elements are split, and which symbols are frequent (FORMAT.md section 6)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _core
from ..._common.rounding import rounded_up
from ..codebook import AnyCodebook, checked_savings, kind_of, private_copy, public, whole

# Of a codec, behind the scheme's and before the digits' widths (read_planes in csrc/bindings).
_NUMBERS = (
    *("row_bytes", "element_bytes", "rotate", "residual_bits", "per_column", "listed", "default", "closed"),
    *("invariant_bits", "invariant_value", "consecutive", "first_symbol", "signed_default", "num_constant"),
)
ELEMENT_BYTES = (1, 2, 4, 8)
MAX_PLANES, MAX_DIGIT_BITS = 4, 4


class PlanesForm(NamedTuple):
    """What codebooks of one table have in common: all but the entries. Fields as in PlanesCodebook."""

    row_bytes: int
    element_bytes: int
    rotate: int
    residual_bits: int
    per_column: bool
    listed: bool
    default: int
    closed: int
    digit_bits: tuple[int, ...]
    invariant_bits: int
    invariant_value: int
    first_symbol: int | None
    signed_default: bool
    num_constant: int
    constants: bytes  # as they stand in the words

    def codec(self) -> list[int]:
        """What the operations are told besides the words (read_planes in csrc/bindings); elements and symbols as signed
        64-bit numbers."""
        split = [PlanesCodebook.number, self.row_bytes, self.element_bytes, self.rotate, self.residual_bits]
        kinds = [int(self.per_column), int(self.listed)]
        values = [signed(self.default, 64), signed(self.closed, 64)]
        invariant = [self.invariant_bits, signed(self.invariant_value, 64)]
        consecutive = [int(self.first_symbol is not None), signed(self.first_symbol or 0, 64)]
        rest = [int(self.signed_default), self.num_constant]
        return [*split, *kinds, *values, *invariant, *consecutive, *rest, *self.digit_bits]


@public
@dataclass(frozen=True, eq=False, repr=False)
class PlanesCodebook(AnyCodebook):
    """How the elements of a row are split and which symbols are frequent.

    Made by `ibp.codecs.analyze`, by `ibp.compress`, or from its fields. It never changes, and is shared freely between
    tables; its entries are a copy of its own and must not be written to.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> codebook = ibp.compress(x, scheme="planes", device="cpu").codebook
        >>> codebook.residual_bits, codebook.digit_bits  # sign and mantissa stay; an exponent has 1 to 4 digits
        (8, (2, 2, 2, 2))

    Attributes:
        row_bytes: bytes of a row, 1 to 65,536, a multiple of element_bytes.
        element_bytes: 1, 2, 4 or 8.
        rotate: 0 or 1: elements are rotated left by this many bits before they are split.
        residual_bits: the low bits that are kept as they are, 0 to 8 * element_bytes - invariant_bits; the others are
            the symbol.
        digit_bits: width of each plane's digits: up to 4 planes of 1 to 4 bits.
        per_column: whether every column has entries of its own; not with listed.
        listed: whether rows list the elements that differ from default.
        default, closed: bit patterns of elements, not negative. Rows in which every element is default take no bytes;
            besides, both are used in listed rows only.
        entries: int64 [live columns or 1, E], the symbols' bit patterns, most frequent first; of 64 bits as signed
            numbers. [1, 0] where symbols are consecutive. On the CPU.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebook included; None if not
            learned.
        invariant_bits: the lowest bits of every element that are not stored, 0 to 8 * element_bytes - 1. Rows in which
            they are not invariant_value are stored raw.
        invariant_value: what they are.
        first_symbol: entry i is first_symbol + i, without what is above the bits of a symbol; None: entries are given.
            Not with per_column, nor in clusters.
        signed_default: whether elements that differ from default in their highest bit only are not listed either; with
            listed.
        live_columns: int64 [n], increasing: the columns that are coded, at least one. None: all of them.
        row_template: uint8 [row_bytes]: what the other columns hold in every row that is not stored raw; in the live
            ones default. None where live_columns is.

    Raises:
        ValueError: fields are out of range or contradict each other.
    """

    row_bytes: int
    element_bytes: int
    rotate: int
    residual_bits: int
    digit_bits: tuple[int, ...]
    per_column: bool
    listed: bool
    default: int
    closed: int
    entries: torch.Tensor
    expected_savings: float | None = None
    invariant_bits: int = 0
    invariant_value: int = 0
    first_symbol: int | None = None
    signed_default: bool = False
    live_columns: torch.Tensor | None = None
    row_template: torch.Tensor | None = None

    scheme = "planes"
    number = 2  # IBP_SCHEME_PLANES

    def __post_init__(self) -> None:
        row_bytes = whole("row_bytes", self.row_bytes, 1, _core.MAX_ROW_BYTES)
        element_bytes = whole("element_bytes", self.element_bytes, 1, 8)
        if element_bytes not in ELEMENT_BYTES or row_bytes % element_bytes:
            raise ValueError(
                f"element_bytes is {element_bytes}; wanted one of {ELEMENT_BYTES} that divides row_bytes, {row_bytes}"
            )
        numbers, columns = self._checked_numbers(8 * element_bytes), row_bytes // element_bytes
        if not isinstance(self.digit_bits, (tuple, list)) or len(self.digit_bits) > MAX_PLANES:
            raise ValueError(f"digit_bits is {self.digit_bits!r}; wanted a tuple of at most {MAX_PLANES} widths")
        digit_bits = tuple(whole("a width in digit_bits", b, 1, MAX_DIGIT_BITS) for b in self.digit_bits)
        symbol_bits = 8 * element_bytes - numbers["invariant_bits"] - numbers["residual_bits"]
        first_symbol = self.first_symbol
        if first_symbol is not None:
            first_symbol = whole("first_symbol", first_symbol, 0, 2**symbol_bits - 1)
        default = numbers["default"].to_bytes(element_bytes, "little")
        live, row_template = _checked_constants(self.live_columns, self.row_template, columns, default)
        shape = (
            (columns if live is None else len(live)) if numbers["per_column"] else 1,
            num_entries(digit_bits) if first_symbol is None else 0,
        )
        entries = _checked_entries(self.entries, shape, symbol_bits)
        symbols = entries.numpy().astype(f"<u{symbol_bytes(symbol_bits)}")
        constants = b""  # as they begin the words: each padded to a multiple of 16 bytes
        if live is not None and row_template is not None:
            parts = row_template.numpy().tobytes(), live.numpy().astype("<u2").tobytes()
            constants = b"".join(part + bytes(-len(part) % 16) for part in parts)
        checked = {
            **numbers,
            "row_bytes": row_bytes,
            "element_bytes": element_bytes,
            "digit_bits": digit_bits,
            "entries": entries,
            "first_symbol": first_symbol,
            "live_columns": live,
            "row_template": row_template,
            "expected_savings": checked_savings(self.expected_savings),
        }
        words = np.frombuffer(bytearray(constants + symbols.tobytes()), np.uint8)
        self._finish(torch.from_numpy(words), **checked, _shared=constants)

    @classmethod
    def of_words(cls, words: torch.Tensor, codec: list[int]) -> PlanesCodebook:
        """The codebook of words that the core has made, which nobody else writes to, and their codec."""
        fields: dict[str, Any] = dict(zip(_NUMBERS, codec[1:]))
        num_constant, is_consecutive = fields.pop("num_constant"), fields.pop("consecutive")
        row_bytes, element_bytes = fields["row_bytes"], fields["element_bytes"]
        for name in ("default", "closed", "invariant_value", "first_symbol"):
            fields[name] &= 2 ** (8 * element_bytes) - 1
        for flag in ("per_column", "listed", "signed_default"):
            fields[flag] = bool(fields[flag])
        if not is_consecutive:
            fields["first_symbol"] = None
        num_live, start, live, row_template = row_bytes // element_bytes - num_constant, 0, None, None
        if num_constant:
            live_start = rounded_up(row_bytes, 16)
            start = live_start + rounded_up(2 * num_live, 16)
            row_template = words[:row_bytes].clone()
            live = words[live_start : live_start + 2 * num_live].view(torch.uint16).to(torch.int64)
        symbol_bits = 8 * element_bytes - fields["invariant_bits"] - fields["residual_bits"]
        entries = words.numpy()[start:].view(f"<u{symbol_bytes(symbol_bits)}").astype(np.int64)
        fields["entries"] = torch.from_numpy(entries).view(num_live if fields["per_column"] else 1, -1)
        fields.update(digit_bits=tuple(codec[15:]), live_columns=live, row_template=row_template, expected_savings=None)
        book = object.__new__(cls)
        book._finish(words, **fields, codec=codec, _shared=words.numpy()[:start].tobytes())
        return book

    def _checked_numbers(self, width: int) -> dict[str, Any]:
        """The fields that are whole numbers, for elements of `width` bits."""
        invariant_bits = whole("invariant_bits", self.invariant_bits, 0, width - 1)
        most = {
            "rotate": 1,
            "residual_bits": width - invariant_bits,
            "per_column": 1,
            "listed": 1,
            "default": 2**width - 1,
            "closed": 2**width - 1,
            "invariant_value": 2**invariant_bits - 1,
            "signed_default": 1,
        }
        numbers: dict[str, Any] = {name: whole(name, getattr(self, name), 0, limit) for name, limit in most.items()}
        for flag in ("per_column", "listed", "signed_default"):
            numbers[flag] = bool(numbers[flag])
        if numbers["per_column"] and numbers["listed"]:
            raise ValueError("listed rows have no entries a column: per_column and listed are both set")
        if numbers["per_column"] and self.first_symbol is not None:
            raise ValueError(
                "columns have no consecutive symbols of their own: per_column and first_symbol are both set"
            )
        if numbers["signed_default"] and not numbers["listed"]:
            raise ValueError("signed_default is set, but not listed: it says which elements are not listed")
        return {**numbers, "invariant_bits": invariant_bits}

    @functools.cached_property
    def form(self) -> PlanesForm:
        fields = {name: getattr(self, name) for name in PlanesForm._fields[:-1]}
        return PlanesForm(**fields, constants=self._shared)

    @functools.cached_property
    def codec(self) -> list[int]:
        return self.form.codec()

    @property
    def width(self) -> int:
        """Bits of an element."""
        return 8 * self.element_bytes

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.row_bytes // self.element_bytes

    @property
    def num_constant(self) -> int:
        """Columns that are not coded."""
        return 0 if self.live_columns is None else self.columns - len(self.live_columns)

    @property
    def symbol_bits(self) -> int:
        """Bits of a symbol."""
        return self.width - self.invariant_bits - self.residual_bits

    @property
    def symbol_bytes(self) -> int:
        """Bytes of an entry as stored: 1, 2, 4 or 8."""
        return symbol_bytes(self.symbol_bits)

    @property
    def num_entries(self) -> int:
        """Entries a column, E: those of all planes."""
        return num_entries(self.digit_bits)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the codebook as stored: entries, or the first of them; default where it is not 0, and in a listed
        codebook with closed; the invariant bits; a bit a column, and the constant ones' elements."""
        symbols = self.entries.numel() + (self.first_symbol is not None)
        values = 2 if self.listed else int(self.default != 0)
        constants = -(-self.columns // 8) + self.num_constant * self.element_bytes if self.num_constant else 0
        return symbols * self.symbol_bytes + values * self.element_bytes + -(-self.invariant_bits // 8) + constants

    @property
    def can_differ(self) -> bool:
        return self.entries.numel() > 0

    @property
    def is_fast(self) -> bool:
        """Dense rows, of digits of two bits and symbols of at most a byte (csrc/cuda/decode/decode_dense.cuh)."""
        return not self.listed and self.symbol_bits <= 8 and set(self.digit_bits) <= {2}

    @property
    def level(self) -> str:
        return "default" if self.first_symbol is None else "fast"

    @property
    def is_partial(self) -> bool:
        return self.invariant_bits > 0 or self.num_constant > 0

    @property
    def shared_words(self) -> torch.Tensor:
        return self.words("cpu")[: len(self._shared)]

    @property
    def cluster_words(self) -> torch.Tensor:
        return self.words("cpu")[len(self._shared) :]

    def _description(self) -> list[str]:
        parts = [
            f"{name}={getattr(self, name)!r}"
            for name in ("row_bytes", "element_bytes", "rotate", "residual_bits", "digit_bits")
        ]
        if self.per_column:
            parts.append("per_column=True")
        if self.listed:
            parts.append(f"listed=True, default={self.default:#x}, closed={self.closed:#x}")
        elif self.default:
            parts.append(f"default={self.default:#x}")
        if self.signed_default:
            parts.append("signed_default=True")
        if self.invariant_bits:
            parts.append(f"invariant_bits={self.invariant_bits}, invariant_value={self.invariant_value:#x}")
        if self.first_symbol is not None:
            parts.append(f"first_symbol={self.first_symbol:#x}")
        if self.num_constant:
            parts.append(f"num_constant={self.num_constant}")
        return [*parts, f"nbytes={self.nbytes}"]


PlanesCodebook._fields = tuple(field.name for field in fields(PlanesCodebook))


def symbol_bytes(symbol_bits: int) -> int:
    """Bytes of the smallest unsigned type that holds a symbol."""
    return next(size for size in ELEMENT_BYTES if 8 * size >= symbol_bits)


def num_entries(digit_bits: tuple[int, ...]) -> int:
    """Symbols that digits of these widths name."""
    return sum(2**b - 1 for b in digit_bits)


def signed(number: int, bits: int) -> int:
    """The signed number with the same `bits` bits as one that is not negative."""
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def _checked_constants(
    live: object, row_template: object, columns: int, default: bytes
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Copies of live_columns and row_template, which is `default` there, or two None where all columns are live."""
    if live is None and row_template is None:
        return None, None
    if not isinstance(live, torch.Tensor) or live.dim() != 1 or not 1 <= len(live) <= columns:
        raise ValueError(f"live_columns is {kind_of(live)}; wanted 1 to {columns} columns, as row_template is given")
    live = private_copy("live_columns", live, torch.int64, (len(live),))
    row_template = private_copy("row_template", row_template, torch.uint8, (columns * len(default),))
    if int(live[0]) < 0 or int(live[-1]) >= columns or bool((live[1:] <= live[:-1]).any()):
        raise ValueError(f"live_columns are not increasing columns from 0 to {columns - 1}")
    if len(live) == columns:
        return None, None
    row_template.view(columns, len(default))[live] = torch.tensor(list(default), dtype=torch.uint8, device="cpu")
    return live, row_template


def _checked_entries(entries: object, shape: tuple[int, int], symbol_bits: int) -> torch.Tensor:
    entries = private_copy("entries", entries, torch.int64, shape)
    if symbol_bits < 64 and (entries.numpy() >> symbol_bits).any():
        raise ValueError(
            f"entries are {int(entries.min())} to {int(entries.max())}; wanted symbols of {symbol_bits} bits"
        )
    return entries
