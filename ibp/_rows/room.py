"""The memory of a table whose rows change: capacity for more of them, and an index in which every row has a base of its
own (FORMAT.md section 2), so that one that grows moves no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._common.rounding import rounded_up
from .._layout.geometry import Geometry, stored_sizes

_NO_BASE = -1  # IBP_NO_BASE of ibp.h: the base of a row that has no part in overflow
_GROUP, _SECTOR = _core.ROWS_PER_BASE, _core.SECTOR_BYTES
_GROWTH = 1.5  # An array that has become too small is made larger by this factor.
_MOST_FREE = 1 << 16  # Bytes of overflow that are kept free, so that few changes have to ask a GPU how many are used.
_FREE_SHARE = 64  # At most one part in so many of the slots' bytes is kept free.

Empty = Callable[[int], torch.Tensor]  # allocates a number of bytes in the memory that a table is in


class Index(NamedTuple):
    """Says where rows are, for as many rows as there is capacity for. Arrays that a table does not need are empty."""

    # lengths, bases: as in FORMAT.md section 2
    lengths: torch.Tensor
    bases: torch.Tensor
    rooms: torch.Tensor  # uint16: how many units of 32 bytes a row owns, beginning at its base
    used: torch.Tensor  # int64 [1]: bytes of the overflow that have been handed out

    def first(self, num_rows: int) -> Index:
        """Returns the index of the first rows."""
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
    """The buffers that hold a table's rows. The table's own tensors are the first parts of these buffers."""

    capacity: int  # how many whole rows there is room for
    # slots, overflow: in the memory that the table is in; the end of the overflow has not been handed out
    slots: torch.Tensor
    overflow: torch.Tensor
    index: Index  # in the same memory as the slots
    most_used: int  # an upper bound of `used`, whose newest value may be on a GPU
    # If a GPU has changed rows of a table in host memory, its copy of the index is the newest one. None: `index` is.
    current: torch.device | None = None
    copies: dict[torch.device, Index] = field(default_factory=dict)  # copies of the index on GPUs

    @property
    def index_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.index)

    @property
    def nbytes(self) -> int:
        return self.slots.numel() + self.overflow.numel() + self.index_bytes

    def settle(self) -> None:
        """Waits for the GPU that has changed rows last, and copies its index to `index`. If the call is interrupted,
        the next call does all of it."""
        if self.current is None:
            return
        torch.cuda.synchronize(self.current)
        for home, near in zip(self.index, self.copies[self.current]):
            home.copy_(near)
        self.current = None

    def index_on(self, device: torch.device) -> Index:
        """Returns a copy of the index on a device, as the last change has left it."""
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
        """Returns the index on a device that is about to change rows. Forgets the copies on other devices."""
        index = self.index_on(device)
        is_home = device == self.slots.device
        self.copies = {} if is_home else {device: index}
        self.current = None if is_home else device
        return index

    def with_overflow(self, num_bytes: int, empty: Empty) -> Room:
        """Returns a room in which num_bytes more bytes of overflow can be handed out: this room if it has them, else a
        larger one. Waits for the GPU only if the host does not know how many bytes have been handed out."""
        if self.most_used + num_bytes <= self.overflow.numel():
            return self
        newest = self.index if self.current is None else self.copies[self.current]
        self.most_used = int(newest.used)
        wanted, free = self.most_used + num_bytes, min(_MOST_FREE, self.slots.numel() // _FREE_SHARE)
        if wanted + free <= self.overflow.numel():
            return self
        self.settle()
        if self.slots.is_cuda and not self.overflow.is_cuda:
            torch.cuda.synchronize(self.slots.device)  # which writes to the host memory that is copied here
        larger = empty(max(wanted + 2 * free, int(_GROWTH * self.overflow.numel())))
        larger[: self.most_used].copy_(self.overflow[: self.most_used])
        return replace(self, overflow=larger)

    def with_rows(self, num_rows: int, slot_bytes: int, empty: Empty) -> Room:
        """Returns a room with capacity for num_rows rows: this room if it has the capacity, else a larger one."""
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
    """Returns the room of a table that has not changed before. It has the table's slots and overflow, and a new index.
    The table's index is not trusted: if the entry of a row is wrong, this row stays wrong, and rows that change are not
    harmed."""
    device, num_rows, used = slots.device, geometry.num_rows, overflow.numel()
    none = torch.empty(0, dtype=torch.uint16, device=device)
    index = Index(lengths.clone(), bases[:0], none, torch.tensor([used], dtype=torch.int64, device=device))
    if slot_bytes < geometry.row_bytes:
        index = index._replace(**_own_bases(geometry, slot_bytes, used, lengths, bases))
    capacity = num_rows if slot_bytes < geometry.row_bytes else slots.numel() // slot_bytes  # no short slots
    return Room(capacity, slots, overflow, index, used)


def _own_bases(
    geometry: Geometry, slot_bytes: int, overflow_bytes: int, lengths: torch.Tensor, bases: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns `bases` and `rooms` of the index of a table with overflow, one entry of each for every row."""
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
    # A part that lies at any byte may end where the next one begins.
    is_aligned = own % _SECTOR == 0 if slot_bytes else torch.zeros_like(own, dtype=torch.bool)
    rooms = (parts + torch.where(is_aligned, _SECTOR - 1, 0)) // _SECTOR
    own = torch.where(parts > 0, own, _NO_BASE)
    if not _are_apart(own, torch.maximum(parts, rooms * _SECTOR), overflow_bytes):
        rooms = torch.zeros_like(rooms)  # rows that change take new parts
    return {"bases": own, "rooms": rooms.to(torch.int16).view(torch.uint16)}


def _are_apart(bases: torch.Tensor, sizes: torch.Tensor, overflow_bytes: int) -> bool:
    """Returns whether parts of these sizes share no byte and lie within the overflow. Empty parts do not count."""
    starts, order = bases[sizes > 0].sort()
    sizes = sizes[sizes > 0][order]
    if not starts.numel():
        return True
    is_in = bool((starts[0] >= 0) & (starts[-1] <= overflow_bytes - sizes[-1]))
    return is_in and bool((starts[1:] - starts[:-1] >= sizes[:-1]).all())
