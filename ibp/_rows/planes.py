"""Implements scheme "planes". A codebook says how elements are split, and which symbols are frequent (FORMAT.md section
6).

The low bits of an element are its residual, which is stored unchanged. The high bits are its symbol. A frequent symbol
is coded by digits of a few bits each, which name an entry of the codebook; any other symbol is an escape, and is stored
in full. In a dense row, all elements are coded in this way. A listed row lists only the elements that differ from the
codebook's `default`. A column that holds the same element in all rows is constant and is not stored; the other columns
are live.

The second half of the file learns codebooks from rows. The core does most of this work: it counts symbols and compares
the sizes that rows would have with different codebooks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from .. import _core
from .._common.sequences import rounded_up
from .._machine import staging
from . import geometry as _geometry
from .codebook import AnyCodebook, checked_savings, private_copy, public, shown, whole
from .geometry import INTEGERS, Geometry, Survey

# Names of the numbers in a codec, in order (read_planes in csrc/bindings). The number of the scheme, which comes before
# them, and the widths of the digits, which come after them, have no names here.
_NUMBERS = (
    *("row_bytes", "element_bytes", "rotate", "residual_bits", "per_column", "listed", "default", "closed"),
    *("invariant_bits", "invariant_value", "consecutive", "first_symbol", "signed_default", "num_constant"),
)
ELEMENT_BYTES = (1, 2, 4, 8)
MAX_PLANES, MAX_DIGIT_BITS = 4, 4


@public
@dataclass(frozen=True, eq=False, repr=False)
class PlanesCodebook(AnyCodebook):
    """The codebook of scheme "planes": how the elements of a row are split, and which symbols are frequent.

    Codebooks are made by `ibp.codecs.analyze`, by `ibp.compress`, or from their fields. A codebook cannot be changed,
    and tables may share it. Its entries are its own copy and must not be written to.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> codebook = ibp.compress(x, scheme="planes", device="cpu").codebook
        >>> codebook.residual_bits, codebook.digit_bits  # sign and mantissa stay; an exponent has 1 to 4 digits
        (8, (2, 2, 2, 2))

    Attributes:
        row_bytes: size in bytes of a row, 1 to 65,536, a multiple of element_bytes.
        element_bytes: size in bytes of an element: 1, 2, 4 or 8.
        rotate: 0 or 1, the number of bits by which elements are rotated left before they are split.
        residual_bits: the number of bits of the residual, 0 to 8 * element_bytes - invariant_bits. The residual
            consists of the low bits, which are stored unchanged. The bits above the residual are the symbol.
        digit_bits: the number of bits of a digit in each plane: up to 4 planes, with digits of 1 to 4 bits.
        per_column: whether every column has its own entries. It cannot be combined with listed.
        listed: whether rows list the elements that differ from default.
        default, closed: two bit patterns of elements, as unsigned numbers. A row in which every element is default
            takes no bytes. Listed rows also use both patterns in other ways (FORMAT.md section 6); dense rows do not.
        entries: int64 [C, E] on the CPU: the bit patterns of the symbols, the most frequent first. C is the number of
            live columns if per_column is set, and otherwise 1. E is `num_entries`, or 0 if symbols are consecutive.
            Symbols of 64 bits are given as signed numbers.
        expected_savings: 1 - coded / original bytes on the rows that were analysed. The coded bytes include the
            codebook. None if the codebook was not learned.
        invariant_bits: the number of lowest bits of every element that are not stored, 0 to 8 * element_bytes - 1. Rows
            in which these bits are not invariant_value are stored raw.
        invariant_value: the value of the invariant bits.
        first_symbol: if it is given, symbols are consecutive: entry i is (first_symbol + i) mod 2^symbol_bits. It
            cannot be combined with per_column, nor used in clusters. None: `entries` has the symbols.
        signed_default: whether listed rows also omit elements that differ from default only in their highest bit. It
            can be set only if listed is set.
        live_columns: int64 [n], increasing: the columns that are coded, at least one. None: all columns.
        row_template: uint8 [row_bytes], a row that holds, in each constant (not live) column, the value of this column
            in all rows that are not stored raw. Its live columns hold default. None if live_columns is None.

    Raises:
        ValueError: fields are out of range or inconsistent.
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
        constants = b""  # The words begin with row_template and live_columns, each padded to a multiple of 16 bytes.
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
        """Makes a codebook from words and their codec, both made by the core. The codebook keeps the words, so the
        caller must not write to them."""
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
        """Checks the fields that are whole numbers or flags, for elements of `width` bits, and returns them by name.
        Raises ValueError if a field is out of range or inconsistent with another field."""
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

    @property
    def form(self) -> Hashable:
        """All fields except entries and expected_savings: they are in the codec and in the words of the constant
        columns."""
        return tuple(self.codec), self._shared

    @functools.cached_property
    def codec(self) -> list[int]:
        """See `AnyCodebook.codec`. Elements and symbols are given as signed 64-bit numbers."""
        symbols = {"consecutive": self.first_symbol is not None, "first_symbol": self.first_symbol or 0}
        numbers = (symbols[name] if name in symbols else getattr(self, name) for name in _NUMBERS)
        return [self.number, *(signed(int(number), 64) for number in numbers), *self.digit_bits]

    @property
    def width(self) -> int:
        """Number of bits in an element."""
        return 8 * self.element_bytes

    @property
    def columns(self) -> int:
        """Number of elements in a row."""
        return self.row_bytes // self.element_bytes

    @property
    def num_constant(self) -> int:
        """Number of columns that are constant and therefore not coded."""
        return 0 if self.live_columns is None else self.columns - len(self.live_columns)

    @property
    def symbol_bits(self) -> int:
        """Number of bits in a symbol."""
        return self.width - self.invariant_bits - self.residual_bits

    @property
    def symbol_bytes(self) -> int:
        """Size in bytes of a stored entry: 1, 2, 4 or 8."""
        return symbol_bytes(self.symbol_bits)

    @property
    def num_entries(self) -> int:
        """Number of symbols that the digits of all planes can name: the E of `entries`."""
        return num_entries(self.digit_bits)

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in bytes of the stored codebook, which consists of:

        - all entries, or the first symbol if the symbols are consecutive;
        - `default` and `closed` if rows are listed, or otherwise `default` if it is not 0;
        - the invariant bits;
        - if columns are constant, a bit for each column, and the constant elements.
        """
        symbols = self.entries.numel() + (self.first_symbol is not None)
        values = 2 if self.listed else int(self.default != 0)
        constants = -(-self.columns // 8) + self.num_constant * self.element_bytes if self.num_constant else 0
        return symbols * self.symbol_bytes + values * self.element_bytes + -(-self.invariant_bits // 8) + constants

    @property
    def can_differ(self) -> bool:
        return self.entries.numel() > 0

    @property
    def is_fast(self) -> bool:
        """Whether rows are dense (not listed), with digits of two bits and symbols of at most 8 bits. Most tables of
        floats have such rows, and GPUs have a faster decoder for them (csrc/cuda/decode/decode_pairs.cuh)."""
        return not self.listed and self.symbol_bits <= 8 and set(self.digit_bits) <= {2}

    @property
    def level(self) -> str:
        return "default" if self.first_symbol is None else "fast"

    @property
    def _coder(self) -> str:
        if self.listed:
            return "listed"
        if self.first_symbol is not None and self.digit_bits == (4,):
            return "fast"
        if self.element_bytes == 1:
            return "one_byte"
        return "pairs" if self.is_fast else "dense"

    def _work(self, row_bytes: int, stored_bytes: float) -> float:
        return stored_bytes / self.element_bytes if self.listed else self.columns

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
    """Returns the size in bytes of the smallest unsigned type that holds a symbol of symbol_bits bits."""
    return next(size for size in ELEMENT_BYTES if 8 * size >= symbol_bits)


def num_entries(digit_bits: tuple[int, ...]) -> int:
    """Returns the number of symbols that digits can name. digit_bits: the number of bits of a digit in each plane."""
    return sum(2**b - 1 for b in digit_bits)


def signed(number: int, bits: int) -> int:
    """Converts an unsigned number to the signed number with the same bit pattern. bits: the number of bits of both."""
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def _checked_constants(
    live: object, row_template: object, columns: int, default: bytes
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Returns copies of live_columns and row_template, with `default` in the live columns of row_template, or (None,
    None) if all columns are live. Raises ValueError if an argument is invalid."""
    if live is None and row_template is None:
        return None, None
    if not isinstance(live, torch.Tensor) or live.dim() != 1 or not 1 <= len(live) <= columns:
        raise ValueError(f"live_columns is {shown(live)}; wanted 1 to {columns} columns, as row_template is given")
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


# ---- learning --------------------------------------------------------------------------------------------------------

LEVELS = ("default", "fast")
_LEARN_ELEMENTS = 1 << 19  # Largest number of elements from which the entries of a cluster are learned.
# Approximate number of elements, taken from all rows, whose symbols decide where a run of consecutive symbols begins.
_RUN_ELEMENTS = 1 << 20


def check_level(level: str) -> None:
    """Raises ValueError unless level is one of `LEVELS`."""
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; wanted one of {list(LEVELS)}")


def can_code(codebook: PlanesCodebook, device: torch.device) -> bool:
    """Returns whether the device has an encoder for a codebook. GPUs lack encoders for some codebooks that leave out
    bits or columns (csrc/cuda/encode/encode.cu)."""
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    try:
        torch.ops.ibp.measure_rows.default(nothing, codebook.words(device), codebook.codec)
    except RuntimeError:
        return False
    return True


def learn_planes(
    sample: torch.Tensor,
    row_bytes: int,
    num_rows: int,
    dtype: torch.dtype,
    *,
    level: str = "default",
    codes_invariant: bool = False,
) -> tuple[PlanesCodebook, torch.Tensor, Survey | None]:
    """Learns the best codebook of scheme planes for a table from a sample of its rows.

    The search compares widths of symbols, rotations, widths of digits, dense and listed rows, and entries for the whole
    table or for each column. The sizes of coded rows are computed from histograms of the symbols. Entries for each
    column are learned from one half of the sample and compared on the other half, unless the sample is the whole table.

    The expected savings are measured on the rows that the codebook was learned from, so they are too high if the sample
    is small: by 2 percentage points for 30 rows, and by 0.2 for 300 rows.

    Args:
        sample: uint8 [n * row_bytes], whole rows in any order, on the CPU.
        row_bytes: size in bytes of a row.
        num_rows: number of rows of the whole table, over which the size of the codebook is spread.
        dtype: dtype of the tensor, which tells where the bits of exponents are. The elements that are split into
            symbols are the elements of this dtype, or for a complex dtype their real and imaginary parts. If the size
            of such an element does not divide row_bytes, the elements have the largest size that divides both.
        level: "default" or "fast", as in `ibp.compress`.
        codes_invariant: whether bits and columns that are the same in the whole sample are also coded. If so, every row
            has a coded form.

    Returns:
        (codebook, lengths, survey). lengths is uint16 [n], the `lengths` of the sample's rows (FORMAT.md section 2);
        survey is the survey of these lengths. If the sample does not compress, the codebook stores all bits unchanged,
        and survey is None.

    Raises:
        ValueError: the sample has no rows or does not consist of whole rows.
    """
    _check_sample(sample, row_bytes)
    if sample.numel() == 0:
        raise ValueError("the sample has no row to learn from")
    element_bytes, exponent_bits = _element_of(dtype, row_bytes)
    num_rows = max(num_rows, sample.numel() // row_bytes)
    words, codec = torch.ops.ibp.learn_planes.default(
        sample, row_bytes, element_bytes, exponent_bits, num_rows, level == "fast", codes_invariant
    )
    codebook = PlanesCodebook.of_words(words, codec.tolist())
    lengths = torch.ops.ibp.measure_rows.default(sample, codebook.words("cpu"), codebook.codec)
    survey = Geometry(sample.shape, torch.uint8, row_bytes).survey(lengths)
    coded_bytes = survey.stored / len(lengths) + codebook.nbytes / num_rows
    if coded_bytes > row_bytes:  # If there are few rows, the codebook may take more bytes than it saves.
        return _rows_as_they_are(row_bytes, element_bytes), torch.zeros_like(lengths), None
    return codebook.with_savings(1 - coded_bytes / row_bytes), lengths, survey


def _rows_as_they_are(row_bytes: int, element_bytes: int) -> PlanesCodebook:
    """Returns a codebook of 0 bytes that stores all bits of the elements unchanged."""
    return PlanesCodebook(
        row_bytes=row_bytes,
        element_bytes=element_bytes,
        rotate=0,
        residual_bits=8 * element_bytes,
        digit_bits=(),
        per_column=False,
        listed=False,
        default=0,
        closed=0,
        entries=torch.empty(1, 0, dtype=torch.int64, device="cpu"),
        expected_savings=0.0,
    )


def relearn(codebook: PlanesCodebook, rows: torch.Tensor, sizes: list[int]) -> list[PlanesCodebook]:
    """Learns a codebook for each group of rows. The new codebooks differ from the given one in two ways: their entries
    are the most frequent symbols of their group, and expected_savings is None.

    Args:
        codebook: a codebook with at least one entry.
        rows: uint8 [n * row_bytes], whole rows, with the rows of each group next to each other.
        sizes: number of rows in each group, at least 1.
    """
    _check_sample(rows, codebook.row_bytes)
    return [_relearned(codebook, part) for part in rows.split([size * codebook.row_bytes for size in sizes])]


def _relearned(codebook: PlanesCodebook, rows: torch.Tensor) -> PlanesCodebook:
    some = _geometry.sample(rows, codebook.row_bytes, max(1, _LEARN_ELEMENTS // codebook.columns))
    words = torch.ops.ibp.learn_entries.default(staging.to_host(some), codebook.words("cpu"), codebook.codec)
    return PlanesCodebook.of_words(words, codebook.codec)


def with_fullest_run(codebook: PlanesCodebook, data: torch.Tensor) -> PlanesCodebook:
    """Returns a copy of the codebook with the run of consecutive symbols that covers the most elements of all rows.
    Only first_symbol changes. This is needed because a small sample may lack rare rows with larger elements (say, one
    row in fifty), and every element of such a row would then be an escape.

    Args:
        codebook: a codebook that has consecutive symbols and codes all bits and columns.
        data: the bytes of all rows.
    """
    counts, run = _symbol_counts(codebook, data), 2 ** codebook.digit_bits[0] - 1
    if not counts.any():
        return codebook
    inside = torch.cat((counts, counts[: run - 1])).unfold(0, run, 1).sum(1)
    return replace(codebook, first_symbol=int(inside.argmax()))


def _symbol_counts(codebook: PlanesCodebook, data: torch.Tensor) -> torch.Tensor:
    """Returns a histogram of the symbols of sampled elements. The sample comes from all rows. Elements that are
    `default` are not counted."""
    size, num_symbols = codebook.element_bytes, 2**codebook.symbol_bits
    elements = data[: data.numel() // size * size].view(INTEGERS[size])
    # An odd step makes the sample take different columns in different rows.
    elements = elements[:: elements.numel() // _RUN_ELEMENTS | 1]
    elements = elements[elements != signed(codebook.default, 8 * size)]
    symbols = elements >> codebook.residual_bits - codebook.rotate & num_symbols - 1
    return torch.bincount(symbols, minlength=num_symbols)


def _check_sample(sample: torch.Tensor, row_bytes: int) -> None:
    if sample.dtype != torch.uint8 or sample.dim() != 1 or sample.numel() % row_bytes:
        raise ValueError(f"the sample is {sample.dtype} {list(sample.shape)}; wanted torch.uint8 [n * {row_bytes}]")


def _element_of(dtype: torch.dtype, row_bytes: int) -> tuple[int, int]:
    """Returns (size in bytes of the elements that rows of this dtype are split into, number of bits of their exponent).
    The number of bits is 0 if the elements have no exponent, or are smaller than the numbers of the tensor. See `dtype`
    of `learn_planes`."""
    exponent_bits, own_bytes = 0, dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        own_bytes = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        exponent_bits = (
            8 * own_bytes - 1 + round(math.log2(torch.finfo(dtype).eps)) if own_bytes > 1 else 4
        )  # The core tries all widths of symbols for one-byte elements, so 4 stands for every float8 format.
    element_bytes = math.gcd(own_bytes, row_bytes)
    return element_bytes, exponent_bits if element_bytes == own_bytes else 0
