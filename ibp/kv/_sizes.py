"""Chooses the sizes of a cache's rows, slots and overflow, from a sample of its content or from the size of a pool."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.rounding import rounded_up
from .._layout import geometry
from .._machine import memory
from .._schemes import AnyCodebook, PlanesCodebook, check_codebook, surveyed
from .._schemes.learning import analyze

# Preferred size in bytes of the rows of pages. Longer rows save no more, and shorter rows take longer to decode for
# each byte (benchmarks/results/gather.csv).
ROW_BYTES = 2048
_SHARE_IN_SLOTS = 0.999  # the fraction of the sample's rows that should fit in their slots
# The smallest size of the overflow, as a fraction of the size of all slots. If a slot has 70 % of a row's size, this is
# enough for one raw row in 21.
_LEAST_OVERFLOW = 0.02
# The size of the overflow divided by the size that the sample's rows need. It is more than 1 because a row that needed
# overflow once keeps this overflow when a shorter row replaces it.
_SPILL_MARGIN = 4
_SECTOR = _core.SECTOR_BYTES
# For rows of at most _SHORT_ROW_BYTES bytes, a second codebook is learned, from groups of _ROWS_TOGETHER rows (see
# `_of_longer_rows`).
_SHORT_ROW_BYTES, _ROWS_TOGETHER = 128, 8


class Sizes(NamedTuple):
    """The size in bytes of a row's slot, and the size in bytes of the overflow divided by the number of rows."""

    slot_bytes: int
    overflow_per_row: float


def divided(piece_bytes: int) -> int:
    """Returns the size in bytes of the rows into which a contiguous piece of memory is cut without a remainder. The
    size is 1 to 2 KiB if possible."""
    fitting = [n for n in range(_SECTOR, min(piece_bytes, _core.MAX_ROW_BYTES) + 1, _SECTOR) if piece_bytes % n == 0]
    short = [n for n in fitting if n <= ROW_BYTES]
    if short and short[-1] >= ROW_BYTES // 2:
        return short[-1]
    long = [n for n in fitting if n > ROW_BYTES]
    if long:
        return long[0]
    return short[-1] if short else min(piece_bytes, _core.MAX_ROW_BYTES)


def row_bytes_of(codebook: AnyCodebook | torch.Tensor, row_bytes: int | None, page_bytes: int) -> int:
    """Returns the size in bytes of the rows of a page. If `codebook` is a codebook, this is its row size. If it is a
    sample, this is row_bytes, or a size that suits page_bytes if row_bytes is None."""
    if isinstance(codebook, torch.Tensor):
        row_bytes = divided(page_bytes) if row_bytes is None else row_bytes
        row_bytes = whole_number("row_bytes", row_bytes, 1, _core.MAX_ROW_BYTES)
    elif row_bytes is not None:
        raise ValueError("row_bytes is given beside a codebook, which says it")
    else:
        row_bytes = learned(codebook, 0, "default").row_bytes
    if page_bytes % row_bytes:
        raise ValueError(f"page_bytes is {page_bytes}; wanted whole rows of {row_bytes} bytes")
    return row_bytes


def learned(sample: AnyCodebook | torch.Tensor, row_bytes: int, level: str) -> AnyCodebook:
    """Learns a codebook for rows of row_bytes bytes, into which `sample`, a tensor of any shape, is cut. If `sample` is
    a codebook, returns it."""
    if not isinstance(sample, torch.Tensor):
        check_codebook(sample)
        return sample
    own = _of_rows(sample, row_bytes, level)
    if row_bytes > _SHORT_ROW_BYTES or level != "default":
        return own
    other = _of_longer_rows(sample, row_bytes)
    if other is None or chosen(sample, other).slot_bytes > chosen(sample, own).slot_bytes:
        return own
    return other


def _of_rows(sample: torch.Tensor, row_bytes: int, level: str) -> AnyCodebook:
    found = analyze(_as_rows(sample, row_bytes), scheme="planes", sample=None, level=level)
    assert found is not None, "scheme 'planes' always has a codebook"
    return found


def _of_longer_rows(sample: torch.Tensor, row_bytes: int) -> PlanesCodebook | None:
    """Learns a codebook for short rows from groups of `_ROWS_TOGETHER` consecutive rows. Returns None if the sample has
    no such group, or if the codebook depends on the columns or lists elements, because such a codebook does not suit
    single rows.

    The reason: each plane of a row is rounded up to whole bytes, which matters if rows are short. Learning from short
    rows may choose digits of three bits because they save a byte, although they are slower to decode. The codebook for
    longer rows is better if its slots are no larger.
    """
    if sample.nbytes < _ROWS_TOGETHER * row_bytes:
        return None
    found = _of_rows(sample, _ROWS_TOGETHER * row_bytes, "default")
    if not isinstance(found, PlanesCodebook) or found.per_column or found.listed or found.live_columns is not None:
        return None
    return dataclasses.replace(found, row_bytes=row_bytes, expected_savings=None)


def chosen(sample: torch.Tensor | None, codebook: AnyCodebook) -> Sizes:
    """Returns the smallest slot size that holds 99.9 % of a sample's rows, and enough overflow for the other rows.
    Without a sample, a slot is 2 % larger than the size of a coded row that the codebook's `expected_savings`
    predicts."""
    row_bytes = codebook.row_bytes
    if sample is None:
        savings = codebook.expected_savings or 0.0
        return _rounded(int(row_bytes * (1 - savings) * 1.02), 0.0, row_bytes)
    data, worker = geometry.bytes_of(_as_rows(sample, row_bytes)), memory.usual(None, sample)
    survey = surveyed(data, codebook, worker)
    last = survey.num_rows - 1
    suited = survey.best_slots(_SECTOR, overflow_cost=0.0, most_spilled=last - int(_SHARE_IN_SLOTS * last))
    return _rounded(*suited, row_bytes)


def within(pool_bytes: int, num_rows: int, row_bytes: int, spills: bool = False) -> Sizes:
    """Returns the largest slot size for which the slots and the overflow of num_rows rows fit in a pool. Overflow gets
    the bytes that slots leave, at least 2 % of the slots' size. If slots can hold complete raw rows, there is no
    overflow. spills: whether overflow is outside the pool. Slots may then fill the pool."""
    per_row = pool_bytes / max(1, num_rows)
    if per_row >= row_bytes:
        return Sizes(row_bytes, 0.0)
    slot_bytes = int(per_row / (1 if spills else 1 + _LEAST_OVERFLOW)) // _SECTOR * _SECTOR
    if slot_bytes < _SECTOR:
        raise ValueError(
            f"pool_bytes is {pool_bytes}: {per_row:.0f} bytes for each of {num_rows} rows; wanted 33 or more"
        )
    return Sizes(slot_bytes, per_row - slot_bytes)


def with_room_for_all(found: Sizes, slot_bytes: int | None, row_bytes: int) -> Sizes:
    """Returns the sizes at which overflow has room for all rows in raw form. slot_bytes: size of a slot. None: that of
    `found`."""
    slot_bytes = found.slot_bytes if slot_bytes is None else slot_bytes
    return Sizes(slot_bytes, _up(row_bytes - slot_bytes) if slot_bytes < row_bytes else 0)


def checked(slot_bytes: int | None, overflow_bytes: int | None, num_rows: int, found: Sizes) -> tuple[int, int]:
    """Checks the given sizes. Returns (size of a slot, size of the overflow of all rows), in bytes. A size that is None
    is taken from `found`."""
    slot_bytes = found.slot_bytes if slot_bytes is None else whole_number("slot_bytes", slot_bytes, 0)
    if overflow_bytes is None:
        return slot_bytes, int(num_rows * found.overflow_per_row) // _SECTOR * _SECTOR
    return slot_bytes, whole_number("overflow_bytes", overflow_bytes, 0)


def _rounded(slot_bytes: int, spilled: float, row_bytes: int) -> Sizes:
    slot_bytes = _up(slot_bytes)
    if slot_bytes >= row_bytes:
        return Sizes(row_bytes, 0.0)
    return Sizes(slot_bytes, max(_LEAST_OVERFLOW * slot_bytes, _SPILL_MARGIN * spilled))


def _up(num_bytes: int) -> int:
    return max(_SECTOR, rounded_up(num_bytes, _SECTOR))


def _as_rows(sample: torch.Tensor, row_bytes: int) -> torch.Tensor:
    geometry.check_tensor(sample)
    elements = row_bytes // sample.element_size()
    if sample.numel() < elements or row_bytes % sample.element_size():
        raise ValueError(
            f"the sample has {sample.numel()} elements of {sample.element_size()} bytes; wanted at least one row of "
            f"{row_bytes} bytes"
        )
    flat = sample.detach().reshape(-1)
    return flat[: flat.numel() // elements * elements].view(-1, elements)
