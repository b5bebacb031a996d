"""Scheme planes: codebooks of ranked symbols, what rows cost with them, and how they are learned (FORMAT.md section 6).

Below, n is a number of rows, C the elements of a row, w the bits of an element, t = w - r the bits of a symbol, E the entries a column.
A symbol's *rank* is its place among the entries, E if it is none. Elements and symbols are int32 where w <= 32, else int64: of 32 or
64 bits they are signed there, bit patterns all the same.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ... import _core
from ..masks.codebook import SCHEMES

ELEMENT_BYTES = (1, 2, 4, 8)
MAX_PLANES, MAX_DIGIT_BITS = 4, 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_LOW_BITS = 13  # of a list of positions
_MAX_BINS_BITS = 16  # of symbols that are counted and looked up in arrays of all symbols


# ---- the codebook ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class PlanesCodebook:
    """How the elements of a row are split and which symbols are frequent.

    Made by `learn_planes` or from its fields. Immutable; shared freely between tables.

    Attributes:
        row_bytes: bytes of a row, 1 to 65,536, a multiple of element_bytes.
        element_bytes: 1, 2, 4 or 8.
        rotate: 0 or 1: elements are rotated left by this many bits before they are split.
        residual_bits: the low bits that are kept as they are, 0 to 8 * element_bytes; the others are the symbol.
        digit_bits: width of each plane's digits: up to 4 planes of 1 to 4 bits.
        per_column: whether every column has entries of its own; not with listed.
        listed: whether rows list the elements that differ from default.
        default, closed: bit patterns of elements, not negative; used in listed rows only.
        entries: int64 [columns or 1, E], the symbols' bit patterns, most frequent first; of 64 bits as signed numbers. On the CPU.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebook included; None if not learned.

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
    _words: dict = field(init=False, default_factory=dict)

    scheme = "planes"

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        put("row_bytes", _whole("row_bytes", self.row_bytes, 1, _core.MAX_ROW_BYTES))
        put("element_bytes", _whole("element_bytes", self.element_bytes, 1, 8))
        if self.element_bytes not in ELEMENT_BYTES or self.row_bytes % self.element_bytes:
            raise ValueError(f"element_bytes is {self.element_bytes}; wanted one of {ELEMENT_BYTES} that divides row_bytes, {self.row_bytes}")
        most = {"rotate": 1, "residual_bits": self.width, "per_column": 1, "listed": 1, "default": 2**self.width - 1, "closed": 2**self.width - 1}
        for name in most:
            put(name, _whole(name, getattr(self, name), 0, most[name]))
        put("per_column", bool(self.per_column))
        put("listed", bool(self.listed))
        if self.per_column and self.listed:
            raise ValueError("listed rows have no entries a column: per_column and listed are both set")
        put("digit_bits", _digits(self.digit_bits))
        put("entries", self._checked_entries())
        if self.expected_savings is not None:
            if not isinstance(self.expected_savings, (int, float)):
                raise ValueError(f"expected_savings is a {type(self.expected_savings).__name__}; wanted a number or None")
            put("expected_savings", float(self.expected_savings))

    @property
    def is_fast(self) -> bool:
        """Whether a GPU decodes rows faster than any link brings them, with few multiprocessors: dense ones, of digits of two bits and symbols of a byte."""
        return not self.listed and _is_fast(self.width - self.residual_bits, self.digit_bits)

    def _checked_entries(self):
        entries, shape = self.entries, (self.columns if self.per_column else 1, num_entries(self.digit_bits))
        if not isinstance(entries, torch.Tensor) or entries.layout != torch.strided or entries.dtype != torch.int64 or entries.shape != shape:
            kind = f"{entries.dtype} {list(entries.shape)}" if isinstance(entries, torch.Tensor) else type(entries).__name__
            raise ValueError(f"entries is {kind}; wanted torch.int64 {list(shape)}")
        entries = torch.empty(shape, dtype=torch.int64).copy_(entries.detach())
        if entries.numel() and self.symbol_bits < 64 and not 0 <= int(entries.min()) <= int(entries.max()) < 2**self.symbol_bits:
            raise ValueError(f"entries are {int(entries.min())} to {int(entries.max())}; wanted symbols of {self.symbol_bits} bits")
        return entries

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
    def codec(self) -> list[int]:
        """What the operations want to know besides the words; default and closed as signed 64-bit numbers."""
        split = [SCHEMES["planes"], self.row_bytes, self.element_bytes, self.rotate, self.residual_bits, int(self.per_column), int(self.listed)]
        return [*split, _signed(self.default, 64), _signed(self.closed, 64), *self.digit_bits]

    def words(self, device: torch.device) -> torch.Tensor:
        """The entries as stored, little-endian, that the coders read: uint8 [nbytes] on the device; kept once made."""
        device = torch.device(device)
        if device not in self._words:
            in_bytes = self.entries.view(torch.uint8).view(*self.entries.shape, 8)
            self._words[device] = in_bytes[..., : self.symbol_bytes].reshape(-1).contiguous().to(device)
        return self._words[device]

    def __getstate__(self):
        numbers = {name: int(getattr(self, name)) for name in ("row_bytes", "element_bytes", "rotate", "residual_bits", "per_column", "listed", "default", "closed")}
        return {**numbers, "digit_bits": self.digit_bits, "entries": self.entries, "expected_savings": self.expected_savings}

    def __setstate__(self, state):
        names = set(self.__dataclass_fields__) - {"_words"}
        if not isinstance(state, dict) or set(state) != names:
            raise ValueError(f"the state of a PlanesCodebook has not just the fields {sorted(names)}")
        self.__init__(**state)

    def __eq__(self, other):
        if not isinstance(other, PlanesCodebook):
            return NotImplemented
        return self.codec == other.codec and torch.equal(self.entries, other.entries)

    def __hash__(self):
        return hash((*self.codec, *self.entries.flatten().tolist()))

    def __repr__(self):
        parts = [f"{name}={getattr(self, name)!r}" for name in ("row_bytes", "element_bytes", "rotate", "residual_bits", "digit_bits")]
        if self.per_column:
            parts.append("per_column=True")
        if self.listed:
            parts.append(f"listed=True, default={self.default:#x}, closed={self.closed:#x}")
        parts.append(f"nbytes={self.nbytes}")
        if self.expected_savings is not None:
            parts.append(f"expected_savings={self.expected_savings:.1%}")
        return f"ibp.PlanesCodebook({', '.join(parts)})"


def symbol_bytes(symbol_bits: int) -> int:
    """Bytes of the smallest unsigned type that holds a symbol."""
    return next(size for size in ELEMENT_BYTES if 8 * size >= symbol_bits)


def num_entries(digit_bits: tuple[int, ...]) -> int:
    """Symbols that digits of these widths name."""
    return sum(2**b - 1 for b in digit_bits)


def _whole(name, value, least, most):
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor is asked for its value
        raise ValueError(f"{name} is a {type(value).__name__}; wanted a whole number") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; wanted {least} to {most}")
    return number


def _digits(digit_bits):
    if not isinstance(digit_bits, (tuple, list)) or len(digit_bits) > MAX_PLANES:
        raise ValueError(f"digit_bits is {digit_bits!r}; wanted a tuple of at most {MAX_PLANES} widths")
    return tuple(_whole("a width in digit_bits", b, 1, MAX_DIGIT_BITS) for b in digit_bits)


def _signed(number, bits):
    """The signed number with the same `bits` bits as one that is not negative."""
    return number - 2**bits if number >= 2 ** (bits - 1) else number


torch.serialization.add_safe_globals([PlanesCodebook])


# ---- elements, symbols and ranks ------------------------------------------------------------------------------------


def _elements(data: torch.Tensor, element_bytes: int, columns: int) -> torch.Tensor:
    """Bytes of whole rows, uint8, as elements [n, C]."""
    if data.storage_offset() % element_bytes:
        data = data.clone()
    x = data.view(_INTEGERS[element_bytes])
    if element_bytes == 2:
        x = x.to(torch.int32) & 0xFFFF
    return (x.to(torch.int32) if element_bytes == 1 else x).view(-1, columns)


def _symbols(x: torch.Tensor, width: int, rotate: int, residual_bits: int) -> torch.Tensor:
    """The symbols of elements of any shape."""
    bits, shift = width - residual_bits, residual_bits
    if bits == 0:
        return torch.zeros_like(x)
    if rotate and residual_bits:  # the sign, rotated to the lowest bit, is residual
        shift -= 1
    elif rotate:
        x = (x << 1) | ((x >> (width - 1)) & 1)
    return (x >> shift) & _mask(bits, x.dtype)


def _mask(bits, dtype):
    return _signed(2**bits - 1, 8 * dtype.itemsize)


def _as_entries(symbols: torch.Tensor, bits: int) -> torch.Tensor:
    """Symbols as int64 bit patterns, what a codebook's entries are."""
    return symbols.to(torch.int64) & _mask(bits, torch.int64)


def _as_symbols(entries: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of _as_entries."""
    if bits == 32 and dtype == torch.int32:
        entries = entries - ((entries >> 31) << 32)
    return entries.to(dtype)


def _ranks(symbols: torch.Tensor, entries: torch.Tensor, bits: int) -> torch.Tensor:
    """The rank of every symbol among the entries [C or 1, E] of its column, E if it is none.

    Args:
        symbols: [n, C], or of any shape if there is one set of entries.

    Returns:
        uint8 of the symbols' shape.
    """
    count = entries.shape[1]
    if count == 0:
        return torch.zeros_like(symbols, dtype=torch.uint8)
    entries = entries.to(symbols.device)
    if len(entries) == 1 and bits <= _MAX_BINS_BITS:
        places = torch.arange(count, device=symbols.device)
        table = torch.full((2**bits,), count, device=symbols.device).scatter_reduce_(0, entries[0], places, "amin")
        return table.to(torch.uint8).index_select(0, symbols.reshape(-1)).view(symbols.shape)
    ordered, order = _as_symbols(entries, bits, symbols.dtype).sort(dim=1, stable=True)  # of equal ones the first is found
    wanted = symbols.t().contiguous() if len(entries) > 1 else symbols.reshape(1, -1)
    at = torch.searchsorted(ordered, wanted).clamp_(max=count - 1)
    ranks = torch.where(ordered.gather(1, at) == wanted, order.gather(1, at), count).to(torch.uint8)
    return ranks.t().contiguous() if len(entries) > 1 else ranks.view(symbols.shape)


# ---- what rows cost -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def positions_bytes(columns: int) -> torch.Tensor:
    """Bytes of the positions of k listed elements, for every k from 0 to columns: int64 [columns + 1]."""
    listed = torch.arange(columns + 1)
    best = torch.full_like(listed, _whole_bytes(columns))
    for low in range(_MOST_LOW_BITS + 1):
        for held in (listed, columns - listed):
            upper = held + (-(-columns // 2**low) - 1)
            best = torch.minimum(best, _whole_bytes(upper) + _whole_bytes(held * low))
    best[0] = 0
    return best


def header_bytes(columns: int) -> int:
    """Bytes of a listed row's header."""
    return 1 if columns < 128 else 2 if columns < 32768 else 3


def row_bytes_of(codebook: PlanesCodebook, sample: torch.Tensor) -> torch.Tensor:
    """Exact bytes of rows as coded with a codebook, row_bytes for those that are stored raw: int64 [n] on the sample's device.

    Args:
        sample: uint8 [n * row_bytes], whole rows.
    """
    _check_sample(sample, codebook.row_bytes)
    values, bits = _values_of(codebook, _elements(sample, codebook.element_bytes, codebook.columns)), codebook.symbol_bits
    return values.lengths(_ranks(values.symbols(codebook.rotate, bits), codebook.entries, bits), bits, codebook.digit_bits)


def _whole_bytes(bits):
    return (bits + 7) // 8


def _check_sample(sample, row_bytes):
    if sample.dtype != torch.uint8 or sample.dim() != 1 or sample.numel() % row_bytes:
        raise ValueError(f"the sample is {sample.dtype} {list(sample.shape)}; wanted torch.uint8 [n * {row_bytes}]")


@dataclass
class _Values:
    """The elements of n rows that are coded one by one: all of dense rows, the listed ones of listed rows that are not closed."""

    elements: torch.Tensor  # [n, C], or [m] if listed
    rows: torch.Tensor | None  # int64 [m], the row of every element, if listed
    counts: torch.Tensor  # int64 [n], elements of every row
    extra: torch.Tensor | int  # int64 [n], bytes of every row besides the values
    width: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    def symbols(self, rotate, symbol_bits):
        return _symbols(self.elements, self.width, rotate, self.width - symbol_bits)

    def escapes(self, ranks, least):
        """Elements of every row whose rank is at least `least`: int64 [n]."""
        if self.rows is None:
            return (ranks >= least).sum(1)
        return torch.bincount(self.rows[ranks >= least], minlength=self.num_rows)

    def lengths(self, ranks, symbol_bits, digit_bits, found=None):
        """Bytes of every row: int64 [n]. `found` keeps the counts of escapes between calls with the same ranks."""
        found = {} if found is None else found
        total, waiting, first = self.extra + _whole_bytes(self.counts * (self.width - symbol_bits)), self.counts, 0
        for bits in digit_bits:
            total = total + _whole_bytes(waiting * bits)
            first += 2**bits - 1
            if first not in found:
                found[first] = self.escapes(ranks, first)
            waiting = found[first]
        return (total + _whole_bytes(waiting * symbol_bits)).clamp(max=self.row_bytes)


def _values_of(plan, x):
    """The values of rows of elements [n, C] as a codebook or a plan has them coded."""
    return _listed_values(x, plan.width, plan.default, plan.closed) if plan.listed else _dense_values(x, plan.width)


def _dense_values(x, width):
    counts = torch.full((len(x),), x.shape[1], dtype=torch.int64, device=x.device)
    return _Values(x, None, counts, 0, width, x.shape[1] * width // 8)


def _listed_values(x, width, default, closed):
    num_rows, columns = x.shape
    is_listed = x != _signed(default, 8 * x.element_size())
    counts = is_listed.sum(1)
    elements = x[is_listed]
    rows = torch.repeat_interleave(torch.arange(num_rows, device=x.device), counts, output_size=len(elements))
    extra = header_bytes(columns) + positions_bytes(columns).to(x.device)[counts]
    is_open = torch.zeros(num_rows, dtype=torch.bool, device=x.device)
    is_open[rows[elements != _signed(closed, 8 * x.element_size())]] = True
    kept = is_open[rows]
    if not kept.all():
        elements, rows, counts = elements[kept], rows[kept], counts * is_open
    return _Values(elements, rows, counts, extra, width, columns * width // 8)


# ---- learning -------------------------------------------------------------------------------------------------------

_GUESS_ELEMENTS = 1 << 17  # from which the symbols' frequencies are guessed
_LEARN_ELEMENTS = 1 << 19  # from which candidates are learned, and
_TEST_ELEMENTS = 1 << 18  # on which they are compared, always whole rows
_WHOLE_ELEMENTS = 1 << 20  # of a table that candidates are learned from as a whole
_LEAST_ROWS = 32
_CANDIDATES = 10  # that are compared exactly
_COLUMNS_GAIN = 1.5  # rows with entries a column are taken to be smaller than others by this factor at the most
_AS_GOOD = 1.001  # a cost within this of the least is as good; then dense rows, fewer planes and fewer entries are better, for the decoder
_FAST_COST = 1.008  # a cost within this of the least is worth it for a plan that decodes fastest,
_FAST_COLUMNS_COST = 1.006  # and this, where entries are a column's and it decodes faster than others of that kind
_LEAST_SHARE = 1 / 256  # of a default
_PSEUDO_COUNTS = 8.0  # of the table's symbols that every column has besides its own
_DICTIONARY, _COLUMN_CELLS = 255, 1 << 20  # the table's symbols that columns choose from, and columns * symbols, at most


def _all_digit_lists():
    """All lists of digit widths, those of fewer entries first."""
    widths = range(1, MAX_DIGIT_BITS + 1)
    lists = [digits for planes in range(MAX_PLANES + 1) for digits in itertools.product(widths, repeat=planes)]
    return sorted(lists, key=lambda digits: (num_entries(digits), len(digits)))


_DIGIT_LISTS = _all_digit_lists()
_MOST_ENTRIES = num_entries(_DIGIT_LISTS[-1])


@dataclass(frozen=True)
class Learned:
    """What `learn_planes` found.

    Attributes:
        codebook: with expected_savings.
        lengths: int64 [n], the bytes of the sample's rows as coded with it, row_bytes for those that are stored raw; on the sample's device.
    """

    codebook: PlanesCodebook
    lengths: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """A codebook without its entries."""

    width: int
    listed: bool = False
    default: int = 0
    closed: int = 0
    rotate: int = 0
    symbol_bits: int = 0
    digit_bits: tuple[int, ...] = ()
    per_column: bool = False

    @property
    def shape(self):
        return self.rotate, self.symbol_bits

    @property
    def is_fast(self):
        """Whether the decoder is at its best: symbols of a byte, digits of two bits."""
        return _is_fast(self.symbol_bits, self.digit_bits)

    def codebook_bytes(self, columns):
        values = 2 * self.width // 8 if self.listed else 0
        return num_entries(self.digit_bits) * (columns if self.per_column else 1) * symbol_bytes(self.symbol_bits) + values


def _is_fast(symbol_bits, digit_bits):
    return symbol_bits <= 8 and set(digit_bits) <= {2}


def learn_planes(sample: torch.Tensor, row_bytes: int, num_rows: int, dtype: torch.dtype, *, element_bytes: int | None = None) -> Learned:
    """The best codebook of scheme planes for a table, from a sample of its rows.

    Symbol widths, rotation, digit widths, dense or listed rows and entries a table or a column are compared by the exact bytes of coded
    rows. Entries a column are learned on one half of the sample and compared on the other, unless the sample is the whole table.

    What is found for few rows is flattered by the very rows it was learned from: expect 2 points of savings less from 30 rows, 0.2 from 300.

    Args:
        sample: uint8 [n * row_bytes], whole rows in any order, on the CPU or a GPU, where the work is then done.
        row_bytes: bytes of a row.
        num_rows: rows of the whole table, over which the codebook's own bytes are spread.
        dtype: of the table's elements; it decides where exponents are looked for.
        element_bytes: 1, 2, 4 or 8; None: the dtype's (a complex dtype's parts), or the largest that divides row_bytes.

    Raises:
        ValueError: the sample has no row or is not of whole rows, or element_bytes does not divide row_bytes.
    """
    _check_sample(sample, row_bytes)
    if sample.numel() == 0:
        raise ValueError("the sample has no row to learn from")
    element_bytes, exponent_bits = _element_of(dtype, row_bytes, element_bytes)
    return _Search(sample, row_bytes, max(num_rows, sample.numel() // row_bytes), element_bytes, exponent_bits).best()


def relearn(codebook: PlanesCodebook, rows: torch.Tensor) -> PlanesCodebook:
    """A codebook that differs from another in its entries only: the most frequent symbols of other rows.

    Args:
        codebook: with at least one entry.
        rows: uint8 [n * row_bytes], whole rows, at least one.
    """
    _check_sample(rows, codebook.row_bytes)
    plan = _Plan(codebook.width, codebook.listed, codebook.default, codebook.closed, codebook.rotate, codebook.symbol_bits, codebook.digit_bits,
                 codebook.per_column)
    values = _values_of(plan, _elements(rows, codebook.element_bytes, codebook.columns))
    symbols = values.symbols(*plan.shape)
    if symbols.numel() == 0:
        return codebook
    entries = _column_entries(symbols, plan.symbol_bits, codebook.columns, False) if plan.per_column else _top_symbols(symbols, plan.symbol_bits)
    return replace(codebook, entries=_exactly(entries, codebook.num_entries), expected_savings=None)


def _element_of(dtype, row_bytes, element_bytes):
    """(bytes of an element, bits of its exponent or 0)."""
    exponent_bits, own_bytes = 0, dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        own_bytes = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        exponent_bits = 8 * own_bytes - 1 + round(math.log2(torch.finfo(dtype).eps)) if own_bytes > 1 else 4  # of a byte all bits are tried
    if element_bytes is None:
        element_bytes = math.gcd(own_bytes, row_bytes)
    if element_bytes not in ELEMENT_BYTES or row_bytes % element_bytes:
        raise ValueError(f"element_bytes is {element_bytes}; wanted one of {ELEMENT_BYTES} that divides row_bytes, {row_bytes}")
    return element_bytes, exponent_bits if element_bytes == own_bytes else 0


def _shapes(width, exponent_bits):
    """The (rotate, symbol bits) to try; of equally good ones the first is taken."""
    if exponent_bits == 0:
        return [(0, bits) for bits in range(width + 1)]
    if width == 8:
        return [(0, bits) for bits in range(width + 1)] + [(1, bits) for bits in range(1, width)]
    around = range(max(1, exponent_bits - 2), _MAX_BINS_BITS)
    return [(0, 0)] + [(1, bits) for bits in around] + [(0, bits + 1) for bits in around] + [(0, width)] * (width > _MAX_BINS_BITS)


class _Search:
    """Plans tried on parts of the same sampled rows."""

    def __init__(self, sample, row_bytes, num_rows, element_bytes, exponent_bits):
        self.row_bytes, self.num_rows, self.width = row_bytes, num_rows, 8 * element_bytes
        self.columns = row_bytes // element_bytes
        self.shapes = _shapes(self.width, exponent_bits)
        self.sample, self.element_bytes = sample, element_bytes
        self.learn, self.test = self._parts(sample.view(-1, row_bytes))

    def _parts(self, rows):
        """Elements [n, C] of the rows to learn on and of others to compare on, or of the same if no others are to come."""
        order, half = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)), len(rows) // 2
        self.is_whole = len(rows) >= self.num_rows and len(rows) * self.columns <= _WHOLE_ELEMENTS
        self.is_apart = not self.is_whole and half > 0
        parts = (order[:half], order[half:]) if self.is_apart else (order, order)
        learned = _WHOLE_ELEMENTS if self.is_whole else _LEARN_ELEMENTS
        sizes = (max(_LEAST_ROWS, most // self.columns) for most in (learned, _TEST_ELEMENTS))
        return [self._elements(rows[part[:size].sort().values.to(rows.device)]) for part, size in zip(parts, sizes)]

    def _elements(self, rows):
        return _elements(rows.reshape(-1), self.element_bytes, self.columns)

    def best(self):
        listing = self._listing()
        plans = self._table_plans(listing) if listing else []
        least = min((cost for cost, _ in plans), default=math.inf)
        plans += self._table_plans(_Plan(self.width), _COLUMNS_GAIN * least)
        least = min(cost for cost, _ in plans)
        fast = [(cost, plan) for cost, plan in plans if plan.is_fast and cost <= (_FAST_COLUMNS_COST if plan.per_column else _FAST_COST) * least]
        if fast:
            return self._learned(min(fast, key=lambda found: found[0])[1])
        as_good = [plan for cost, plan in plans if cost <= _AS_GOOD * least]
        return self._learned(min(as_good, key=lambda plan: (plan.listed, len(plan.digit_bits), plan.codebook_bytes(self.columns))))

    def _learned(self, plan):
        """The plan's codebook, its entries from all sampled rows."""
        values = _values_of(plan, self._elements(self.sample))
        symbols = values.symbols(*plan.shape)
        entries = _column_entries(symbols, plan.symbol_bits, self.columns, self.is_whole) if plan.per_column else _top_symbols(symbols, plan.symbol_bits)
        entries = _exactly(entries, num_entries(plan.digit_bits))
        lengths = values.lengths(_ranks(symbols, entries, plan.symbol_bits), plan.symbol_bits, plan.digit_bits)
        coded = float(lengths.sum()) / len(lengths) + plan.codebook_bytes(self.columns) / self.num_rows
        codebook = PlanesCodebook(self.row_bytes, self.element_bytes, plan.rotate, self.width - plan.symbol_bits, plan.digit_bits, plan.per_column,
                                  plan.listed, plan.default, plan.closed, entries, 1 - coded / self.row_bytes)
        return Learned(codebook, lengths)

    # -- what rows list

    def _listing(self):
        """A plan that lists, or None where no value is frequent enough for that to pay."""
        picked = _some(self.learn)
        default, share = _most_frequent(picked)
        if share < _LEAST_SHARE or share * self.width < 2 * _entropy(share):
            return None
        others = self.learn[self.learn != default]
        closed = _most_frequent(_some(others))[0] if others.numel() else default
        low = 2**self.width - 1
        return _Plan(self.width, True, default & low, closed & low)

    # -- entries a table

    def _table_plans(self, plan, worth=0.0):
        """A plan with the best shapes and digits filled in: [(bytes of a mean row with its share of the codebook, plan)].

        With entries a column too if a mean row has at most `worth` bytes without.
        """
        learn, test = _values_of(plan, self.learn), _values_of(plan, self.test)
        bits = self._model(_tails(learn, self.shapes), self.shapes, learn.rows is None, 1)
        found = []
        for shape, digit_lists in _best_groups(bits, self.shapes):
            ranks = _ranks(test.symbols(*shape), _top_symbols(learn.symbols(*shape), shape[1]), shape[1])
            found += self._compare(replace(plan, rotate=shape[0], symbol_bits=shape[1]), digit_lists, ranks, test)
        if self._columns_may_pay() and min(cost for cost, _ in found) <= worth:
            found += self._column_plans(plan, bits.min(1).values.tolist(), learn, test)
        return found

    def _compare(self, plan, digit_lists, ranks, test):
        """Digits of several widths for the same ranks, which say how many entries they want."""
        found, counts = [], {}
        for digits in digit_lists:
            tried = replace(plan, digit_bits=digits)
            lengths = test.lengths(ranks, plan.symbol_bits, digits, counts)
            found.append((float(lengths.sum()) / test.num_rows + tried.codebook_bytes(self.columns) / self.num_rows, tried))
        return found

    def _model(self, tails, shapes, is_dense, sets):
        """Bits of the values of a mean row with its share of the codebook: float64 [shapes, lists of digits].

        Args:
            tails: float64 [shapes, _MOST_ENTRIES + 1]: how many elements of a mean row have that rank or a higher one.
            sets: of entries: 1 or columns.
        """
        widths, firsts, entries = _digit_tables()
        symbol_bits = torch.tensor([bits for _, bits in shapes])[:, None]
        waiting = tails[:, firsts]  # [shapes, lists, planes + 1]
        total = _padded_bits(waiting[..., 0], self.width - symbol_bits, is_dense)
        for plane in range(MAX_PLANES):
            total = total + _padded_bits(waiting[..., plane], widths[:, plane], is_dense and plane == 0)
        total = total + _padded_bits(waiting[..., MAX_PLANES], symbol_bits, False)
        entry_bytes = torch.tensor([symbol_bytes(bits) for _, bits in shapes])[:, None]
        return total + 8.0 * sets / self.num_rows * entries * entry_bytes

    # -- entries a column

    def _columns_may_pay(self):
        """Whether there are rows to compare on, and one entry a column is less than a tenth of the table."""
        return self.columns > 1 and (self.is_whole or self.is_apart) and self.columns < 0.1 * self.row_bytes * self.num_rows

    def _column_plans(self, plan, table_bits, learn, test):
        """Symbols of more and fewer bits, from those on that are best with entries a table, as long as they are better."""
        tried = {}

        def cost(shape):
            if shape not in tried:
                tried[shape] = self._column_digits(shape, learn, test)
            return tried[shape][0]

        for rotate in sorted({rotate for rotate, _ in self.shapes}):
            own = [(shape, bits) for shape, bits in zip(self.shapes, table_bits) if shape[0] == rotate and shape[1]]
            best = min(range(len(own)), key=lambda i: own[i][1])
            for step in (1, -1):
                while 0 <= best + step < len(own) and cost(own[best + step][0]) < cost(own[best][0]):
                    best += step
        shape, (_, digit_lists, ranks) = min(tried.items(), key=lambda item: item[1][0])
        return self._compare(replace(plan, rotate=shape[0], symbol_bits=shape[1], per_column=True), digit_lists, ranks, test)

    def _column_digits(self, shape, learn, test):
        """(bits of a mean row, the best lists of digits, ranks of the elements to compare on) with entries a column."""
        entries = _column_entries(learn.symbols(*shape), shape[1], self.columns, self.is_whole)
        ranks = _ranks(test.symbols(*shape), entries, shape[1])
        count = entries.shape[1]
        tails = _tails_of(torch.bincount(ranks.flatten(), minlength=count + 1).cpu()[:count], ranks.numel()) / test.num_rows
        bits = self._model(tails[None], [shape], True, self.columns)
        return float(bits.min()), _best_groups(bits, [shape])[0][1], ranks


# -- frequencies


def _column_entries(symbols, bits, columns, is_whole):
    """Entries a column, int64 [C, up to _MOST_ENTRIES], out of the table's most frequent symbols."""
    dictionary = _top_symbols(symbols, bits, max(16, min(_DICTIONARY, _COLUMN_CELLS // columns)))
    size = dictionary.shape[1]
    cells = _ranks(symbols, dictionary, bits).to(torch.int32)
    cells += torch.arange(columns, dtype=torch.int32, device=cells.device) * (size + 1)
    counts = torch.bincount(cells.flatten(), minlength=columns * (size + 1)).view(columns, size + 1)[:, :size].to(torch.float64)
    if not is_whole:
        counts = counts + counts.sum(0) * (_PSEUDO_COUNTS / symbols.numel())
    order = counts.sort(dim=1, descending=True, stable=True).indices[:, :_MOST_ENTRIES]
    return dictionary[0][order]


def _some(x, most=_GUESS_ELEMENTS):
    """Elements drawn at random, or all if there are no more than `most`: [up to most]."""
    x = x.reshape(-1)
    if x.numel() <= most:
        return x
    return x[torch.randint(x.numel(), (most,), generator=torch.Generator().manual_seed(0)).to(x.device)]


def _runs(x):
    """Distinct values in increasing order and how often they are there."""
    ordered = x.sort().values if x.is_cuda else torch.from_numpy(np.sort(x.numpy()))  # numpy's sort is 50 times torch's on the CPU
    return torch.unique_consecutive(ordered, return_counts=True)


def _most_frequent(x):
    """(the most frequent of elements, its share)."""
    values, counts = _runs(x)
    at = int((counts == counts.max()).nonzero()[0])  # the smallest; argmax may take any
    return int(values[at]), float(counts[at]) / x.numel()


def _entropy(share):
    """Bits an element of saying which elements are of a share."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _top_symbols(symbols, bits, most=_MOST_ENTRIES):
    """The most frequent symbols as entries, int64 [1, up to most]; of equally frequent ones the smaller first."""
    if bits <= _MAX_BINS_BITS:
        counts = torch.bincount(symbols.reshape(-1), minlength=2**bits)
        values = torch.arange(2**bits, device=symbols.device)
    else:
        values, counts = _runs(_some(symbols, _LEARN_ELEMENTS))
    ordered = counts.sort(descending=True, stable=True)
    order = ordered.indices[:most][ordered.values[:most] > 0]
    return _as_entries(values[order], bits)[None]


def _exactly(entries, count):
    """The first `count` entries of every column; what is missing repeats the first one, so that it is never chosen."""
    if entries.shape[1] == 0:
        return entries.new_zeros(len(entries), count)
    at = torch.arange(count, device=entries.device)
    return entries[:, torch.where(at < entries.shape[1], at, 0)]


def _tails(values, shapes):
    """How many elements of a mean row have a rank or a higher one, for every shape: float64 [shapes, _MOST_ENTRIES + 1] on the CPU."""
    picked = _some(values.elements)
    scale = float(values.counts.sum()) / max(1, picked.numel()) / values.num_rows
    bins = {}
    for rotate in {rotate for rotate, _ in shapes}:
        most = max((bits for turned, bits in shapes if turned == rotate and bits <= _MAX_BINS_BITS), default=0)
        bins[rotate] = torch.bincount(_symbols(picked, values.width, rotate, values.width - most), minlength=2**most)
    tops = []
    for rotate, bits in shapes:
        if bits <= _MAX_BINS_BITS:
            counts = bins[rotate].view(2**bits, -1).sum(1)
        else:
            counts = _runs(_symbols(picked, values.width, rotate, values.width - bits))[1]
        tops.append(_tails_of(counts.topk(min(_MOST_ENTRIES, len(counts))).values, picked.numel()))
    return torch.stack(tops).cpu() * scale


def _tails_of(counts, total):
    """From the counts of ranks 0, 1, ...: float64 [_MOST_ENTRIES + 1], how many of `total` have a rank or a higher one."""
    tails = torch.full((_MOST_ENTRIES + 1,), float(total), dtype=torch.float64, device=counts.device)
    named = counts.to(torch.float64).cumsum(0)
    tails[1 : 1 + len(named)] -= named
    tails[1 + len(named) :] = tails[len(named)]
    return tails


# -- what the plans are thought to cost


def _padded_bits(count, bits, is_exact):
    """Bits of `count` fields of `bits` bits in a mean row, padded; is_exact: count is the same in all rows."""
    if is_exact:
        return torch.ceil(count * bits / 8) * 8
    padding = (8 - torch.gcd(bits, torch.tensor(8))) / 2
    return count * bits + padding * (1 - torch.exp(-count))


@functools.lru_cache(maxsize=1)
def _digit_tables():
    """Of all lists of digits: widths [lists, planes], first entries [lists, planes + 1], entries [lists]; planes that are not there have 0 bits."""
    widths = torch.tensor([digits + (0,) * (MAX_PLANES - len(digits)) for digits in _DIGIT_LISTS])
    firsts = torch.nn.functional.pad((2**widths - 1).cumsum(1), (1, 0))
    return widths, firsts, firsts[:, -1]


def _best_groups(bits, shapes):
    """The _CANDIDATES least of bits [shapes, lists of digits] and the least of the fast ones: [(shape, lists)], the best shape first."""
    groups, order = {}, [divmod(at, len(_DIGIT_LISTS)) for at in bits.flatten().argsort(stable=True).tolist()]
    fast = next(((shape, digits) for shape, digits in order if _is_fast(shapes[shape][1], _DIGIT_LISTS[digits])), None)
    for shape, digits in dict.fromkeys([*order[:_CANDIDATES], *([fast] if fast else [])]):
        groups.setdefault(shapes[shape], []).append(_DIGIT_LISTS[digits])
    return list(groups.items())
