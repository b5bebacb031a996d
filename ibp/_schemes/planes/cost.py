"""What rows of scheme planes cost with a codebook, to the byte (FORMAT.md section 6).

Below, n is a number of rows, C the elements of a row, w the bits of an element, t = w - r the bits of a symbol, E the
entries a column. A symbol's *rank* is its place among the entries, E if it is none. Elements and symbols are int32
where w <= 32, else int64: of 32 or 64 bits they are signed there, bit patterns all the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from .codebook import PlanesCodebook, signed

_Number = TypeVar("_Number", int, torch.Tensor)

MAX_BINS_BITS = 16  # of symbols that are counted and looked up in arrays of all symbols
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_LOW_BITS = 13  # of a list of positions


# ---- elements, symbols and ranks -----------------------------------------------------------------------------------


def elements_of(data: torch.Tensor, element_bytes: int, columns: int) -> torch.Tensor:
    """Bytes of whole rows, uint8, as elements [n, C]."""
    if data.storage_offset() % element_bytes:
        data = data.clone()
    x = data.view(_INTEGERS[element_bytes])
    if element_bytes == 2:
        x = x.to(torch.int32) & 0xFFFF
    return (x.to(torch.int32) if element_bytes == 1 else x).view(-1, columns)


def symbols_of(x: torch.Tensor, width: int, rotate: int, residual_bits: int) -> torch.Tensor:
    """The symbols of elements of any shape."""
    bits, shift = width - residual_bits, residual_bits
    if bits == 0:
        return torch.zeros_like(x)
    if rotate and residual_bits:  # the sign, rotated to the lowest bit, is residual
        shift -= 1
    elif rotate:
        x = (x << 1) | ((x >> (width - 1)) & 1)
    return (x >> shift) & _mask(bits, x.dtype)


def _mask(bits: int, dtype: torch.dtype) -> int:
    return signed(2**bits - 1, 8 * dtype.itemsize)


def as_entries(symbols: torch.Tensor, bits: int) -> torch.Tensor:
    """Symbols as int64 bit patterns, what a codebook's entries are."""
    return symbols.to(torch.int64) & _mask(bits, torch.int64)


def _as_symbols(entries: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of as_entries."""
    if bits == 32 and dtype == torch.int32:
        entries = entries - ((entries >> 31) << 32)
    return entries.to(dtype)


def ranks_of(symbols: torch.Tensor, entries: torch.Tensor, bits: int) -> torch.Tensor:
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
    if len(entries) == 1 and bits <= MAX_BINS_BITS:
        places = torch.arange(count, device=symbols.device)
        table = torch.full((2**bits,), count, device=symbols.device).scatter_reduce_(0, entries[0], places, "amin")
        return table.to(torch.uint8).index_select(0, symbols.reshape(-1)).view(symbols.shape)
    ordered, order = _as_symbols(entries, bits, symbols.dtype).sort(
        dim=1, stable=True
    )  # of equal ones the first is found
    wanted = symbols.t().contiguous() if len(entries) > 1 else symbols.reshape(1, -1)
    at = torch.searchsorted(ordered, wanted).clamp_(max=count - 1)
    ranks = torch.where(ordered.gather(1, at) == wanted, order.gather(1, at), count).to(torch.uint8)
    return ranks.t().contiguous() if len(entries) > 1 else ranks.view(symbols.shape)


# ---- what rows cost ------------------------------------------------------------------------------------------------


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
    """Exact bytes of rows as coded with a codebook, row_bytes for those that are stored raw: int64 [n] on the sample's
    device.

    Args:
        sample: uint8 [n * row_bytes], whole rows.
    """
    check_sample(sample, codebook.row_bytes)
    values, bits = (
        values_of(codebook, elements_of(sample, codebook.element_bytes, codebook.columns)),
        codebook.symbol_bits,
    )
    return values.lengths(
        ranks_of(values.symbols(codebook.rotate, bits), codebook.entries, bits), bits, codebook.digit_bits
    )


def _whole_bytes(bits: _Number) -> _Number:
    return (bits + 7) // 8


def check_sample(sample: torch.Tensor, row_bytes: int) -> None:
    if sample.dtype != torch.uint8 or sample.dim() != 1 or sample.numel() % row_bytes:
        raise ValueError(f"the sample is {sample.dtype} {list(sample.shape)}; wanted torch.uint8 [n * {row_bytes}]")


class Coded(Protocol):
    """What `values_of` wants to know of a codebook or a plan."""

    @property
    def width(self) -> int: ...
    @property
    def listed(self) -> bool: ...
    @property
    def default(self) -> int: ...
    @property
    def closed(self) -> int: ...


@dataclass
class Values:
    """The elements of n rows that are coded one by one: all of dense rows, the listed ones of listed rows that are not
    closed."""

    elements: torch.Tensor  # [n, C], or [m] if listed
    rows: torch.Tensor | None  # int64 [m], the row of every element, if listed
    counts: torch.Tensor  # int64 [n], elements of every row
    extra: torch.Tensor | int  # int64 [n], bytes of every row besides the values
    width: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    def symbols(self, rotate: int, symbol_bits: int) -> torch.Tensor:
        return symbols_of(self.elements, self.width, rotate, self.width - symbol_bits)

    def escapes(self, ranks: torch.Tensor, least: int) -> torch.Tensor:
        """Elements of every row whose rank is at least `least`: int64 [n]."""
        if self.rows is None:
            return (ranks >= least).sum(1)
        return torch.bincount(self.rows[ranks >= least], minlength=self.num_rows)

    def lengths(
        self,
        ranks: torch.Tensor,
        symbol_bits: int,
        digit_bits: tuple[int, ...],
        found: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
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


def values_of(plan: Coded, x: torch.Tensor) -> Values:
    """The values of rows of elements [n, C] as a codebook or a plan has them coded."""
    return _listed_values(x, plan.width, plan.default, plan.closed) if plan.listed else _dense_values(x, plan.width)


def _dense_values(x: torch.Tensor, width: int) -> Values:
    counts = torch.full((len(x),), x.shape[1], dtype=torch.int64, device=x.device)
    return Values(x, None, counts, 0, width, x.shape[1] * width // 8)


def _listed_values(x: torch.Tensor, width: int, default: int, closed: int) -> Values:
    num_rows, columns = x.shape
    is_listed = x != signed(default, 8 * x.element_size())
    counts = is_listed.sum(1)
    elements = x[is_listed]
    rows = torch.repeat_interleave(torch.arange(num_rows, device=x.device), counts, output_size=len(elements))
    extra = header_bytes(columns) + positions_bytes(columns).to(x.device)[counts]
    is_open = torch.zeros(num_rows, dtype=torch.bool, device=x.device)
    is_open[rows[elements != signed(closed, 8 * x.element_size())]] = True
    kept = is_open[rows]
    if not kept.all():
        elements, rows, counts = elements[kept], rows[kept], counts * is_open
    return Values(elements, rows, counts, extra, width, columns * width // 8)
