"""Slot sizes and the row index of a table (FORMAT.md sections 2 and 3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _core
from .._common.arguments import whole_number
from .geometry import Geometry

SECTOR_BYTES = _core.SECTOR_BYTES
SECOND_FETCH_BYTES = 64  # what a row's second part costs, as bytes: 1.45 ns a request at about 0.65 ns a sector


@dataclass(frozen=True)
class Survey:
    """What rows take as stored, raw ones included."""

    row_bytes: int  # bytes of a row
    stored: int  # bytes of all rows
    sectors: torch.Tensor  # int64 [1 + ceil(row_bytes / 32)] on the CPU: how many rows take k sectors of 32 bytes

    @property
    def num_rows(self) -> int:
        return int(self.sectors.sum())

    @functools.cached_property
    def table_slot_bytes(self) -> int:
        """Bytes of the slots that suit a table of the rows."""
        return slots_for(self, OF_TABLES)[0]

    def spilled(self, slot_bytes: int) -> tuple[int, int]:
        """Returns (rows that leave slots of this size, bytes of their parts in whole sectors)."""
        return _core.count_spilled(self.sectors.numpy(), slot_bytes)

    def overflow_bytes(self, slot_bytes: int) -> int:
        """Returns the bytes of the overflow array for slots of this size below row_bytes: whole sectors, but exact
        bytes without slots."""
        return self.stored if slot_bytes == 0 else self.spilled(slot_bytes)[1]


@dataclass(frozen=True)
class SlotRule:
    """Which slots suit rows: of the sizes that few enough rows outgrow, the one whose slots and overflow cost the least
    together."""

    least: int = 0  # bytes of a slot, at least
    overflow_cost: float = 1.0  # of a byte in overflow, in bytes of slots
    part_cost: float = 0.0  # of a row that has a part in overflow, besides its bytes
    most_spilled: float = math.inf  # rows with a part in overflow, at most
    near: float = 1.0  # of all slots that cost at most this many times the least, the largest are taken
    sizes: Sequence[int] | None = None  # of slots to choose from; None: all


OF_TABLES = SlotRule(least=SECTOR_BYTES, part_cost=SECOND_FETCH_BYTES)  # of equal costs the largest


def slots_for(found: Survey, rule: SlotRule) -> tuple[int, float]:
    """Returns (bytes of the slots that suit rows, bytes of overflow of a mean row). Slots are a multiple of 32 bytes
    below row_bytes, or row_bytes."""
    costs = (rule.overflow_cost, rule.part_cost, rule.most_spilled, rule.near)
    return _core.choose_slots(found.sectors.numpy(), found.row_bytes, rule.least, *costs, rule.sizes)


def stored_sizes(lengths: torch.Tensor, row_bytes: int, valid: torch.Tensor | int) -> torch.Tensor:
    """Bytes of rows as stored, int64; lengths: their entries of the index, valid: their bytes before coding."""
    sizes = lengths.to(torch.int64)
    sizes = torch.where(sizes == 0, valid, sizes)
    return torch.where(lengths.to(torch.int64) == default_length(row_bytes), 0, sizes)


def default_length(row_bytes: int) -> int:
    """The entry of `lengths` of a default row, which has no bytes."""
    return min(row_bytes, 65535)


def survey(lengths: torch.Tensor, geometry: Geometry) -> Survey:
    """The survey of a table's rows; lengths on any device, empty: all rows raw."""
    if lengths.numel() == 0:
        lengths = torch.zeros(geometry.num_rows, dtype=torch.uint16, device="cpu")
    found = torch.ops.ibp.survey_rows.default(lengths, geometry.num_bytes, geometry.row_bytes).cpu()
    return Survey(geometry.row_bytes, int(found.numpy()[0]), found[1:])


def check_slot_bytes(slot_bytes: int, row_bytes: int) -> None:
    """Raises ValueError if rows of row_bytes cannot have slots of that size."""
    if slot_bytes == row_bytes or (0 < slot_bytes < row_bytes and slot_bytes % SECTOR_BYTES == 0):
        return
    raise ValueError(
        f"slot_bytes is {slot_bytes}; wanted a multiple of {SECTOR_BYTES} below the row's {row_bytes} bytes, "
        f"or {row_bytes} itself"
    )


def checked_slot_bytes(layout: str, slot_bytes: int | None, row_bytes: int) -> int | None:
    """Bytes of a slot as asked for by these arguments of `compress`: 0 for packed rows, None where it is to be chosen.
    TypeError, ValueError: layout or slot_bytes is none of a table."""
    if layout not in ("slots", "packed"):
        raise ValueError(f"layout is {layout!r}; wanted 'slots' or 'packed'")
    if layout == "packed" and slot_bytes is not None:
        raise ValueError(f"slot_bytes is {slot_bytes}, but the packed layout has no slots")
    if slot_bytes is None:
        return 0 if layout == "packed" else None
    slot_bytes = whole_number("slot_bytes", slot_bytes)
    check_slot_bytes(slot_bytes, row_bytes)
    return slot_bytes


def slots_size(geometry: Geometry, slot_bytes: int) -> int:
    return geometry.num_bytes if slot_bytes == geometry.row_bytes else geometry.num_rows * slot_bytes


def index_rows(lengths: torch.Tensor, geometry: Geometry, slot_bytes: int) -> torch.Tensor:
    """The bases of a table some of whose rows overflow, where lengths are."""
    return torch.ops.ibp.index_rows.default(lengths, geometry.num_bytes, geometry.row_bytes, slot_bytes)[:-1]


def index_bytes(geometry: Geometry, overflows: bool) -> int:
    """Bytes of the lengths of a coded table, and of its bases if rows overflow their slots."""
    return 2 * geometry.num_rows + (8 * -(-geometry.num_rows // _core.ROWS_PER_BASE) if overflows else 0)


def link_bytes(
    lengths: torch.Tensor,
    geometry: Geometry,
    slot_bytes: int,
    own_bases: torch.Tensor | None = None,
    found: Survey | None = None,
) -> int:
    """Bytes of the whole 32-byte sectors that a fetch of every row reads, each row once. own_bases: of a table that has
    one for each row; found: the survey of the lengths, where it is known."""
    if slot_bytes > 0 and slot_bytes % SECTOR_BYTES == 0 and own_bases is None:  # slots and parts begin with a sector
        return (found or survey(lengths, geometry)).spilled(0)[1]
    sectors, overflow_end, step = 0, 0, 1 << 22
    for first in range(0, geometry.num_rows, step):
        row = torch.arange(first, min(first + step, geometry.num_rows), device=lengths.device)
        valid = torch.clamp(geometry.num_bytes - row * geometry.row_bytes, max=geometry.row_bytes)
        length = lengths[first : first + len(row)] if lengths.numel() else torch.zeros_like(row)
        stored = stored_sizes(length, geometry.row_bytes, valid)
        part = (stored - slot_bytes).clamp(min=0)
        sectors += _touched(row * slot_bytes, stored - part)
        if own_bases is not None:
            sectors += _touched(own_bases[first : first + len(row)], part)
        elif bool(part.any()):
            room = part if slot_bytes == 0 else (part + SECTOR_BYTES - 1) // SECTOR_BYTES * SECTOR_BYTES
            ends = overflow_end + room.cumsum(0)
            sectors += _touched(ends - room, part)
            overflow_end = int(ends[-1])
    return sectors * SECTOR_BYTES


def raw_link_bytes(geometry: Geometry) -> int:
    """The same for rows that are all raw, one after the other: every sector once, and once more for each row that
    begins inside one."""
    later_rows, period = geometry.num_rows - 1, SECTOR_BYTES // math.gcd(SECTOR_BYTES, geometry.row_bytes)
    return SECTOR_BYTES * (-(-geometry.num_bytes // SECTOR_BYTES) + later_rows - later_rows // period)


def _touched(start: torch.Tensor, size: torch.Tensor) -> int:
    touched = (start + size - 1) // SECTOR_BYTES - start // SECTOR_BYTES + 1
    return int((touched * (size > 0)).sum())
