"""Codebooks of scheme planes: how elements are split, and which symbols are frequent (FORMAT.md section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import _core
from ..codebook import AnyCodebook, checked_savings, private_copy, public, whole

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

    def codec(self) -> list[int]:
        """What the operations are told besides the words (read_planes in csrc/bindings); default and closed as signed
        64-bit numbers."""
        split = [
            PlanesCodebook.number,
            self.row_bytes,
            self.element_bytes,
            self.rotate,
            self.residual_bits,
            int(self.per_column),
            int(self.listed),
        ]
        return [*split, signed(self.default, 64), signed(self.closed, 64), *self.digit_bits]


@public
@dataclass(frozen=True, eq=False, repr=False)
class PlanesCodebook(AnyCodebook):
    """How the elements of a row are split and which symbols are frequent.

    Made by `ibp.analyze`, by `ibp.compress`, or from its fields. It never changes, and is shared freely between tables;
    its entries are a copy of its own and must not be written to.

    Attributes:
        row_bytes: bytes of a row, 1 to 65,536, a multiple of element_bytes.
        element_bytes: 1, 2, 4 or 8.
        rotate: 0 or 1: elements are rotated left by this many bits before they are split.
        residual_bits: the low bits that are kept as they are, 0 to 8 * element_bytes; the others are the symbol.
        digit_bits: width of each plane's digits: up to 4 planes of 1 to 4 bits.
        per_column: whether every column has entries of its own; not with listed.
        listed: whether rows list the elements that differ from default.
        default, closed: bit patterns of elements, not negative; used in listed rows only.
        entries: int64 [columns or 1, E], the symbols' bit patterns, most frequent first; of 64 bits as signed numbers.
            On the CPU.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebook included; None if not
            learned.

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

    scheme = "planes"
    number = 2  # IBP_SCHEME_PLANES
    _fields = (
        "row_bytes",
        "element_bytes",
        "rotate",
        "residual_bits",
        "digit_bits",
        "per_column",
        "listed",
        "default",
        "closed",
        "entries",
        "expected_savings",
    )

    def __post_init__(self) -> None:
        row_bytes = whole("row_bytes", self.row_bytes, 1, _core.MAX_ROW_BYTES)
        element_bytes = whole("element_bytes", self.element_bytes, 1, 8)
        if element_bytes not in ELEMENT_BYTES or row_bytes % element_bytes:
            raise ValueError(
                f"element_bytes is {element_bytes}; wanted one of {ELEMENT_BYTES} that divides row_bytes, {row_bytes}"
            )
        width = 8 * element_bytes
        most = {
            "rotate": 1,
            "residual_bits": width,
            "per_column": 1,
            "listed": 1,
            "default": 2**width - 1,
            "closed": 2**width - 1,
        }
        numbers = {name: whole(name, getattr(self, name), 0, limit) for name, limit in most.items()}
        if numbers["per_column"] and numbers["listed"]:
            raise ValueError("listed rows have no entries a column: per_column and listed are both set")
        digit_bits, symbol_bits = _checked_digits(self.digit_bits), width - numbers["residual_bits"]
        shape = (row_bytes // element_bytes if numbers["per_column"] else 1, num_entries(digit_bits))
        entries = _checked_entries(self.entries, shape, symbol_bits)
        in_bytes = entries.view(torch.uint8).view(*shape, 8)[..., : symbol_bytes(symbol_bits)]
        flags = {name: bool(numbers[name]) for name in ("per_column", "listed")}
        checked = {
            **numbers,
            **flags,
            "row_bytes": row_bytes,
            "element_bytes": element_bytes,
            "digit_bits": digit_bits,
            "entries": entries,
        }
        self._finish(in_bytes.reshape(-1).clone(), **checked, expected_savings=checked_savings(self.expected_savings))

    @property
    def form(self) -> PlanesForm:
        return PlanesForm(*(getattr(self, name) for name in PlanesForm._fields))

    @property
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
    def symbol_bits(self) -> int:
        """Bits of a symbol."""
        return self.width - self.residual_bits

    @property
    def symbol_bytes(self) -> int:
        """Bytes of an entry as stored: 1, 2, 4 or 8."""
        return symbol_bytes(self.symbol_bits)

    @property
    def num_entries(self) -> int:
        """Entries a column, E: those of all planes."""
        return self.entries.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the codebook as stored: entries, and in a listed one default and closed."""
        return self.entries.numel() * self.symbol_bytes + (2 * self.element_bytes if self.listed else 0)

    @property
    def can_differ(self) -> bool:
        return self.num_entries > 0

    @property
    def is_fast(self) -> bool:
        """Dense rows, of digits of two bits and symbols of at most a byte."""
        return not self.listed and is_fast(self.symbol_bits, self.digit_bits)

    is_fast_in_clusters = False

    @property
    def cluster_words(self) -> torch.Tensor:
        return self.words("cpu")

    def _description(self) -> list[str]:
        parts = [
            f"{name}={getattr(self, name)!r}"
            for name in ("row_bytes", "element_bytes", "rotate", "residual_bits", "digit_bits")
        ]
        if self.per_column:
            parts.append("per_column=True")
        if self.listed:
            parts.append(f"listed=True, default={self.default:#x}, closed={self.closed:#x}")
        return [*parts, f"nbytes={self.nbytes}"]


def symbol_bytes(symbol_bits: int) -> int:
    """Bytes of the smallest unsigned type that holds a symbol."""
    return next(size for size in ELEMENT_BYTES if 8 * size >= symbol_bits)


def num_entries(digit_bits: tuple[int, ...]) -> int:
    """Symbols that digits of these widths name."""
    return sum(2**b - 1 for b in digit_bits)


def is_fast(symbol_bits: int, digit_bits: tuple[int, ...]) -> bool:
    """Whether the decoder of dense rows is at its best: symbols of at most a byte, digits of two bits
    (csrc/cuda/decode/dense.cuh)."""
    return symbol_bits <= 8 and set(digit_bits) <= {2}


def signed(number: int, bits: int) -> int:
    """The signed number with the same `bits` bits as one that is not negative."""
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def _checked_digits(digit_bits: object) -> tuple[int, ...]:
    if not isinstance(digit_bits, (tuple, list)) or len(digit_bits) > MAX_PLANES:
        raise ValueError(f"digit_bits is {digit_bits!r}; wanted a tuple of at most {MAX_PLANES} widths")
    return tuple(whole("a width in digit_bits", b, 1, MAX_DIGIT_BITS) for b in digit_bits)


def _checked_entries(entries: object, shape: tuple[int, int], symbol_bits: int) -> torch.Tensor:
    """A copy of the entries."""
    entries = private_copy("entries", entries, torch.int64, shape)
    if entries.numel() and symbol_bits < 64 and not 0 <= int(entries.min()) <= int(entries.max()) < 2**symbol_bits:
        raise ValueError(
            f"entries are {int(entries.min())} to {int(entries.max())}; wanted symbols of {symbol_bits} bits"
        )
    return entries
