"""Learning codebooks of scheme planes from rows (FORMAT.md section 6); words and letters as in cost.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ... import _layout
from ..request import Request
from .codebook import ELEMENT_BYTES, MAX_DIGIT_BITS, MAX_PLANES, PlanesCodebook, num_entries, symbol_bytes
from .cost import MAX_BINS_BITS, as_entries, check_sample, elements_of, ranks_of, values_of

_LEARN_ELEMENTS = 1 << 19  # of the rows of a cluster that are looked at
_PSEUDO_COUNTS = 8.0  # of the table's symbols that every column has besides its own
_DICTIONARY = 255  # the table's symbols that columns choose from, at most
_COLUMN_CELLS = 1 << 20  # columns * symbols, at most
_MOST_ENTRIES = num_entries((MAX_DIGIT_BITS,) * MAX_PLANES)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Learned:
    """What `learn_planes` found.

    Attributes:
        codebook: with expected_savings.
        lengths: int64 [n], the bytes of the sample's rows as coded with it, row_bytes for those that are stored raw; on
            the sample's device.
    """

    codebook: PlanesCodebook
    lengths: torch.Tensor


def learn(request: Request) -> PlanesCodebook:
    """The best codebook of scheme planes for a table."""
    return learn_planes(
        request.host_rows, request.geometry.row_bytes, request.geometry.num_rows, request.geometry.dtype
    ).codebook


def learn_planes(
    sample: torch.Tensor, row_bytes: int, num_rows: int, dtype: torch.dtype, *, element_bytes: int | None = None
) -> Learned:
    """The best codebook of scheme planes for a table, from a sample of its rows.

    Symbol widths, rotation, digit widths, dense or listed rows and entries a table or a column are compared by the
    exact bytes of coded rows. Entries a column are learned on one half of the sample and compared on the other, unless
    the sample is the whole table.

    What is found for few rows is flattered by the very rows it was learned from: expect 2 points of savings less from
    30 rows, 0.2 from 300.

    Args:
        sample: uint8 [n * row_bytes], whole rows in any order, on the CPU.
        row_bytes: bytes of a row.
        num_rows: rows of the whole table, over which the codebook's own bytes are spread.
        dtype: of the table's elements; it decides where exponents are looked for.
        element_bytes: 1, 2, 4 or 8; None: the dtype's (a complex dtype's parts), or the largest that divides row_bytes.

    Raises:
        ValueError: the sample has no row or is not of whole rows, or element_bytes does not divide row_bytes.
    """
    check_sample(sample, row_bytes)
    if sample.numel() == 0:
        raise ValueError("the sample has no row to learn from")
    element_bytes, exponent_bits = _element_of(dtype, row_bytes, element_bytes)
    num_rows = max(num_rows, sample.numel() // row_bytes)
    entries, codec, _ = torch.ops.ibp.learn_planes.default(sample, row_bytes, element_bytes, exponent_bits, num_rows)
    _, _, _, rotate, residual_bits, per_column, listed, default, closed, *digits = codec.tolist()
    digit_bits = tuple(filter(None, digits))
    columns, width = row_bytes // element_bytes, 8 * element_bytes
    count, size = num_entries(digit_bits), symbol_bytes(width - residual_bits)
    sets = columns if per_column else 1
    symbols = entries[: sets * count * size].view(_INTEGERS[size]).view(sets, count)
    codebook = PlanesCodebook(
        row_bytes,
        element_bytes,
        rotate,
        residual_bits,
        digit_bits,
        bool(per_column),
        bool(listed),
        default & (2**width - 1),
        closed & (2**width - 1),
        as_entries(symbols, width - residual_bits),
    )
    lengths = torch.ops.ibp.measure_rows(sample, codebook.words(sample.device), codebook.codec)
    lengths = _layout.stored_sizes(lengths, row_bytes, row_bytes)
    coded_bytes = float(lengths.sum()) / len(lengths) + codebook.nbytes / num_rows
    return Learned(replace(codebook, expected_savings=1 - coded_bytes / row_bytes), lengths)


def relearn(codebook: PlanesCodebook, rows: torch.Tensor, sizes: list[int]) -> list[PlanesCodebook]:
    """Codebooks that differ from another in their entries only: the most frequent symbols of each group of rows.

    Args:
        codebook: with at least one entry.
        rows: uint8 [n * row_bytes], whole rows, those of each group next to each other.
        sizes: rows of each group, at least one.
    """
    check_sample(rows, codebook.row_bytes)
    return [_relearned(codebook, part) for part in rows.split([size * codebook.row_bytes for size in sizes])]


def _relearned(codebook: PlanesCodebook, rows: torch.Tensor) -> PlanesCodebook:
    values = values_of(codebook, elements_of(rows, codebook.element_bytes, codebook.columns))
    symbols = values.symbols(codebook.rotate, codebook.symbol_bits)
    if symbols.numel() == 0:
        return codebook
    entries = (
        _column_entries(symbols, codebook.symbol_bits, codebook.columns, False)
        if codebook.per_column
        else _top_symbols(symbols, codebook.symbol_bits)
    )
    return replace(codebook, entries=_exactly(entries, codebook.num_entries), expected_savings=None)


def _element_of(dtype: torch.dtype, row_bytes: int, element_bytes: int | None) -> tuple[int, int]:
    """(bytes of an element, bits of its exponent or 0)."""
    exponent_bits, own_bytes = 0, dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        own_bytes = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        exponent_bits = (
            8 * own_bytes - 1 + round(math.log2(torch.finfo(dtype).eps)) if own_bytes > 1 else 4
        )  # of a byte all bits are tried
    if element_bytes is None:
        element_bytes = math.gcd(own_bytes, row_bytes)
    if element_bytes not in ELEMENT_BYTES or row_bytes % element_bytes:
        raise ValueError(
            f"element_bytes is {element_bytes}; wanted one of {ELEMENT_BYTES} that divides row_bytes, {row_bytes}"
        )
    return element_bytes, exponent_bits if element_bytes == own_bytes else 0


# -- frequencies


def _column_entries(symbols: torch.Tensor, bits: int, columns: int, is_whole: bool) -> torch.Tensor:
    """Entries a column, int64 [C, up to _MOST_ENTRIES], out of the table's most frequent symbols."""
    dictionary = _top_symbols(symbols, bits, max(16, min(_DICTIONARY, _COLUMN_CELLS // columns)))
    size = dictionary.shape[1]
    cells = ranks_of(symbols, dictionary, bits).to(torch.int32)
    cells += torch.arange(columns, dtype=torch.int32, device=cells.device) * (size + 1)
    counts = (
        torch.bincount(cells.flatten(), minlength=columns * (size + 1))
        .view(columns, size + 1)[:, :size]
        .to(torch.float64)
    )
    if not is_whole:
        counts = counts + counts.sum(0) * (_PSEUDO_COUNTS / symbols.numel())
    order = counts.sort(dim=1, descending=True, stable=True).indices[:, :_MOST_ENTRIES]
    return dictionary[0][order]


def _some(x: torch.Tensor, most: int) -> torch.Tensor:
    """Elements drawn at random, or all if there are no more than `most`: [up to most]."""
    x = x.reshape(-1)
    if x.numel() <= most:
        return x
    return x[torch.randint(x.numel(), (most,), generator=torch.Generator().manual_seed(0)).to(x.device)]


def _runs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct values in increasing order and how often they are there."""
    ordered = (
        x.sort().values if x.is_cuda else torch.from_numpy(np.sort(x.numpy()))
    )  # numpy's sort is 50 times torch's on the CPU
    return torch.unique_consecutive(ordered, return_counts=True)


def _top_symbols(symbols: torch.Tensor, bits: int, most: int = _MOST_ENTRIES) -> torch.Tensor:
    """The most frequent symbols as entries, int64 [1, up to most]; of equally frequent ones the smaller first."""
    if bits <= MAX_BINS_BITS:
        counts = torch.bincount(symbols.reshape(-1), minlength=2**bits)
        values = torch.arange(2**bits, device=symbols.device)
    else:
        values, counts = _runs(_some(symbols, _LEARN_ELEMENTS))
    ordered = counts.sort(descending=True, stable=True)
    order = ordered.indices[:most][ordered.values[:most] > 0]
    return as_entries(values[order], bits)[None]


def _exactly(entries: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` entries of every column; what is missing repeats the first one, so that it is never chosen."""
    if entries.shape[1] == 0:
        return entries.new_zeros(len(entries), count)
    at = torch.arange(count, device=entries.device)
    return entries[:, torch.where(at < entries.shape[1], at, 0)]
