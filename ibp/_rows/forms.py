"""Says where coded rows lie in memory: in one piece of a known form, or in the room of a table whose rows change.

A *piece* is contiguous memory, which can be sent, copied or stored as plain bytes. It has the following parts, in this
order. Some of them may be empty.

    head      int64 [8]: counters and a fault record, see `PieceHead`
    bases     int64: the offsets in overflow at which the bytes of rows begin (FORMAT.md, section 2)
    rooms     uint16 [rows]: the size of the space that each row has in overflow, in units of 32 bytes; only if rows can
              be encoded more than once (ibp_place.h)
    lengths   uint16 [rows]: the lengths of the stored rows (FORMAT.md, section 2)
    slots     uint8
    overflow  uint8

bases, rooms and lengths, which form the index, follow each other without gaps. Slots and overflow begin at multiples of
an alignment.

There are two forms. In a *fixed* piece, every row has a slot, and overflow has a given size. The size of such a piece
is known before its rows are coded, and is the same on all ranks of a process group. A *packed* piece has no slots and
no rooms, and all rows lie in overflow, one after the other. To send a packed piece, it is enough to send its bytes up
to the last byte of overflow that is in use. The operation `encode_piece` writes packed pieces, and `decode_piece` reads
them (csrc/bindings/torch_ops.cpp).

A `Room` is the memory of a table whose rows change. Its parts lie apart. It may have capacity for more rows, and every
row has its own base in the index, so a row that grows does not move any other row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._common.sequences import rounded_up
from .._machine import memory
from .geometry import Geometry, stored_sizes

ALIGNMENT = 64  # Pieces, and slots and overflow inside a piece, begin at multiples of this many bytes.
HEAD_BYTES = 64  # Size in bytes of the head.
NOTE = 7  # Index of `PieceHead.note` among the int64 words of the head.
_BASE_BYTES, _ROOM_BYTES, _LENGTH_BYTES = 8, 2, 2  # Sizes in bytes of a row's entry in each part of the index.


class PieceHead(NamedTuple):
    """The entries of the head of a piece, as views of the head.

    Attributes:
        used: int64 [1]: number of bytes of overflow that have been allocated to rows. If rows were lost because
            overflow was too small, it may be more than the size of overflow.
        counts: int64 [2]: number of rows that have bytes in overflow, and number of lost rows.
        fault: int64 [4]: a fault record.
        note: int64 [1]: a number that the sender of the piece can set. `encode_into` does not write to it.
    """

    used: torch.Tensor
    counts: torch.Tensor
    fault: torch.Tensor
    note: torch.Tensor


class PieceForm(NamedTuple):
    """The ranges of the parts after the head, in bytes from the beginning of the piece."""

    bases: slice
    rooms: slice
    lengths: slice
    slots: slice
    overflow: slice


def head_of(words: torch.Tensor) -> PieceHead:
    """Returns the entries of a head. words: int64 [8], the first `HEAD_BYTES` bytes of a piece."""
    return PieceHead(*words.split_with_sizes([1, 2, 4, 1]))


def used_bytes(piece: torch.Tensor) -> int:
    """Returns the number of bytes of overflow that have been allocated to rows of a piece (see `PieceHead.used`).
    piece: the piece, or a copy of its head, in host memory."""
    return int(piece[:8].view(torch.int64))


@functools.lru_cache(1024)
def fixed(num_rows: int, row_bytes: int, slot_bytes: int, overflow_bytes: int) -> PieceForm:
    """Returns the form of a fixed piece. If a slot is as large as a row, bases, rooms and overflow are empty."""
    if slot_bytes == row_bytes:
        return laid_out(HEAD_BYTES, lengths=_LENGTH_BYTES * num_rows, slots=num_rows * slot_bytes)
    return laid_out(
        HEAD_BYTES,
        bases=_BASE_BYTES * num_rows,
        rooms=_ROOM_BYTES * num_rows,
        lengths=_LENGTH_BYTES * num_rows,
        slots=num_rows * slot_bytes,
        overflow=overflow_bytes,
    )


@functools.lru_cache(1024)
def packed(num_rows: int, overflow_bytes: int = 0) -> PieceForm:
    """Returns the form of a packed piece. overflow_bytes: size in bytes of the memory for its coded rows."""
    index = {"bases": _BASE_BYTES * num_rows, "lengths": _LENGTH_BYTES * num_rows}
    return laid_out(HEAD_BYTES, **index, overflow=overflow_bytes)


def laid_out(
    start: int,
    *,
    bases: int = 0,
    rooms: int = 0,
    lengths: int = 0,
    slots: int = 0,
    overflow: int = 0,
    alignment: int = ALIGNMENT,
) -> PieceForm:
    """Computes the form of a piece from the sizes of its parts.

    Args:
        start: the offset of the bases in bytes, a multiple of 8.
        bases, rooms, lengths, slots, overflow: size in bytes of each part.
        alignment: slots and overflow begin at multiples of this many bytes.
    """
    first_room, first_length = start + bases, start + bases + rooms
    index_end = first_length + lengths
    first_slot = rounded_up(index_end, alignment)
    first_overflow = rounded_up(first_slot + slots, alignment)
    return PieceForm(
        slice(start, first_room),
        slice(first_room, first_length),
        slice(first_length, index_end),
        slice(first_slot, first_slot + slots),
        slice(first_overflow, first_overflow + overflow),
    )


# ---- the room of a table whose rows change ----

NO_BASE = -1  # IBP_NO_BASE of ibp_place.h: the base of a row without a part in the overflow.
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
        own = torch.full((num_rows,), NO_BASE, dtype=torch.int64, device=device)
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
    own = torch.where(parts > 0, own, NO_BASE)
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
