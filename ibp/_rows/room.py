"""Manages the memory of a table whose rows change. This memory may have capacity for more rows, and every row has its
own base in the index (FORMAT.md section 2), so a row that grows does not move any other row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._common.sequences import rounded_up
from .._machine import memory
from .geometry import Geometry, stored_sizes

_NO_BASE = -1  # IBP_NO_BASE of ibp.h: the base of a row without a part in the overflow.
_GROUP, _SECTOR = _core.ROWS_PER_BASE, _core.SECTOR_BYTES
_GROWTH = 1.5  # Factor by which buffers and index arrays grow when they have become too small.
# If the host does not know whether the overflow has enough free bytes for a change, it asks a GPU. It then also makes
# sure that more bytes are free than the change needs, so that later changes seldom have to ask. The number of these
# additional bytes is at least min(_MOST_FREE, size of the slots in bytes / _FREE_SHARE).
_MOST_FREE = 1 << 16
_FREE_SHARE = 64

Empty = Callable[[int], torch.Tensor]  # Allocates the given number of bytes in the kind of memory that holds the table.


class Index(NamedTuple):
    """The index of the rows. Each of lengths, bases and rooms has an entry for every row of the table's capacity, or is
    empty if the table does not need it.

    Attributes:
        lengths, bases: as in FORMAT.md section 2.
        rooms: uint16, the size of the part of the overflow that each row owns, in units of 32 bytes.
        used: int64 [1], the number of bytes of overflow that have been allocated to rows.
    """

    lengths: torch.Tensor
    bases: torch.Tensor
    rooms: torch.Tensor
    used: torch.Tensor

    def first(self, num_rows: int) -> Index:
        """Returns the index of the first num_rows rows, as views."""
        return Index(self.lengths[:num_rows], self.bases[:num_rows], self.rooms[:num_rows], self.used)


def _enlarged(tensor: torch.Tensor, size: int, byte: int) -> torch.Tensor:
    if not tensor.numel():
        return tensor
    larger = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    larger[: tensor.numel()].copy_(tensor)
    larger[tensor.numel() :].view(torch.uint8).fill_(byte)
    return larger


@dataclass
class Room:
    """The buffers that hold a table's rows. The tensors of the table are views of the beginnings of these buffers."""

    capacity: int  # Number of whole rows that the slots and the index have room for.
    # Slots and overflow are each in the kind of memory that the table uses for them. The bytes of the overflow from
    # index.used to its end are not allocated to any row.
    slots: torch.Tensor
    overflow: torch.Tensor
    index: Index  # The index, on the device of the slots.
    most_used: int  # An upper bound on index.used, which the host knows without waiting for a GPU.
    # For a table in host memory: the GPU whose copy of the index is newer than `index`. None: `index` is up to date.
    current: torch.device | None = None
    copies: dict[torch.device, Index] = field(default_factory=dict)  # Copies of the index on GPUs.

    @property
    def index_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.index)

    @property
    def nbytes(self) -> int:
        return self.slots.numel() + self.overflow.numel() + self.index_bytes

    def settle(self) -> None:
        """Waits for the GPU that last changed rows, and copies this GPU's index to `index`. If the call is interrupted,
        the next call copies everything again."""
        if self.current is None:
            return
        torch.cuda.synchronize(self.current)
        for home, near in zip(self.index, self.copies[self.current]):
            home.copy_(near)
        self.current = None

    def index_on(self, device: torch.device) -> Index:
        """Returns the index on a device, up to date with the last change."""
        if device == self.slots.device:
            self.settle()
            return self.index
        if device not in self.copies:
            self.settle()
            lengths, bases, rooms, used = self.index
            with outside_of_modes():
                self.copies[device] = Index(lengths.to(device), bases.to(device), rooms.to(device), used.to(device))
        return self.copies[device]

    def begin_change(self, device: torch.device) -> Index:
        """Prepares for a change of rows by `device`: drops the copies of the index on all other devices. Returns the
        index on `device`."""
        index = self.index_on(device)
        is_home = device == self.slots.device
        self.copies = {} if is_home else {device: index}
        self.current = None if is_home else device
        return index

    def with_overflow(self, num_bytes: int, empty: Empty) -> Room:
        """Returns a room with at least num_bytes free bytes of overflow: this room if it has them, and otherwise a room
        with a larger overflow. Waits for a GPU only if `most_used` does not show that the bytes are free."""
        if self.most_used + num_bytes <= self.overflow.numel():
            return self
        newest = self.index if self.current is None else self.copies[self.current]
        self.most_used = int(newest.used)
        wanted, free = self.most_used + num_bytes, min(_MOST_FREE, self.slots.numel() // _FREE_SHARE)
        if wanted + free <= self.overflow.numel():
            return self
        self.settle()
        larger = empty(max(wanted + 2 * free, int(_GROWTH * self.overflow.numel())))
        held = slice(self.most_used)
        memory.copied_overflow(larger[held], self.overflow[held], self.slots.device)
        return replace(self, overflow=larger)

    def with_rows(self, num_rows: int, slot_bytes: int, empty: Empty) -> Room:
        """Returns a room with capacity for num_rows rows: this room if its capacity suffices, and otherwise a larger
        one with copies of the slots and the index."""
        if num_rows <= self.capacity:
            return self
        self.settle()
        capacity = max(num_rows, int(_GROWTH * self.capacity))
        slots = empty(capacity * slot_bytes)
        slots[: self.slots.numel()].copy_(self.slots)
        lengths, bases, rooms = (_enlarged(array, capacity, byte) for array, byte in zip(self.index, (0, 0xFF, 0)))
        index = Index(lengths, bases, rooms, self.index.used)
        return replace(self, capacity=capacity, slots=slots, index=index, copies={})


def room_of(
    geometry: Geometry,
    slot_bytes: int,
    slots: torch.Tensor,
    overflow: torch.Tensor,
    lengths: torch.Tensor,
    bases: torch.Tensor,
) -> Room:
    """Returns a room for a table whose rows have not been changed before. The room uses the table's slots and overflow,
    and a new index. The entries of the table's index are not trusted: a row with a wrong entry stays wrong, but does
    not damage rows that change."""
    device, num_rows, used = slots.device, geometry.num_rows, overflow.numel()
    none = torch.empty(0, dtype=torch.uint16, device=device)
    index = Index(lengths.clone(), bases[:0], none, torch.tensor([used], dtype=torch.int64, device=device))
    if slot_bytes < geometry.row_bytes:
        index = index._replace(**_own_bases(geometry, slot_bytes, used, lengths, bases))
    # If slots hold whole rows, a short last row has a short slot, which does not count for the capacity.
    capacity = num_rows if slot_bytes < geometry.row_bytes else slots.numel() // slot_bytes
    return Room(capacity, slots, overflow, index, used)


def _own_bases(
    geometry: Geometry, slot_bytes: int, overflow_bytes: int, lengths: torch.Tensor, bases: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the fields `bases` and `rooms` of an `Index`, in which each row has its own base, for a table whose slots
    are smaller than rows."""
    num_rows, device = geometry.num_rows, lengths.device
    rows = torch.arange(num_rows, device=device)
    valid = torch.clamp(geometry.num_bytes - rows * geometry.row_bytes, max=geometry.row_bytes)
    entries = lengths.view(torch.int16).to(torch.int64) & 0xFFFF
    parts = (stored_sizes(entries, geometry.row_bytes, valid) - slot_bytes).clamp(min=0)
    if not bases.numel():
        own = torch.full((num_rows,), _NO_BASE, dtype=torch.int64, device=device)
    elif bases.numel() == num_rows:
        own = bases.clone()
    else:
        taken = parts if slot_bytes == 0 else (parts + _SECTOR - 1) // _SECTOR * _SECTOR
        ends = torch.zeros(rounded_up(num_rows, _GROUP), dtype=torch.int64, device=device)
        ends[:num_rows] = taken
        before = ends.view(-1, _GROUP).cumsum(1).view(-1)[:num_rows] - taken
        own = bases.repeat_interleave(_GROUP)[:num_rows] + before
    # Only an aligned part may be rounded up to whole sectors: the next part may begin directly after an unaligned one.
    is_aligned = own % _SECTOR == 0 if slot_bytes else torch.zeros_like(own, dtype=torch.bool)
    rooms = (parts + torch.where(is_aligned, _SECTOR - 1, 0)) // _SECTOR
    own = torch.where(parts > 0, own, _NO_BASE)
    if not _are_apart(own, torch.maximum(parts, rooms * _SECTOR), overflow_bytes):
        # Parts overlap or lie outside the overflow, so no row may write to its old part. Rows that change get new
        # parts.
        rooms = torch.zeros_like(rooms)
    return {"bases": own, "rooms": rooms.to(torch.int16).view(torch.uint16)}


def _are_apart(bases: torch.Tensor, sizes: torch.Tensor, overflow_bytes: int) -> bool:
    """Returns whether all parts lie inside the overflow and do not overlap. Empty parts are ignored."""
    starts, order = bases[sizes > 0].sort()
    sizes = sizes[sizes > 0][order]
    if not starts.numel():
        return True
    is_in = bool((starts[0] >= 0) & (starts[-1] <= overflow_bytes - sizes[-1]))
    return is_in and bool((starts[1:] - starts[:-1] >= sizes[:-1]).all())
