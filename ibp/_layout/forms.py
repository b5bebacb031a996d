"""The layout of coded rows in one piece of memory, which is sent, copied or kept as bytes.

A piece has these parts, in this order; some of them may be empty:

    head      int64 [8]: counters and a fault record, see `PieceHead`
    bases     int64: where the rows' parts in overflow begin (FORMAT.md, section 2)
    rooms     uint16 [rows]: how much of overflow each row owns, if rows are coded again and again (ibp_place.h)
    lengths   uint16 [rows]: how long the rows are as stored (FORMAT.md, section 2)
    slots     uint8
    overflow  uint8

The three parts of the index follow each other without gaps. Slots and overflow begin at multiples of an alignment.

There are two forms. The size of a *fixed* piece is known before its rows are coded, and is the same on all ranks: every
row has a slot, and overflow has a given size. In a *packed* piece there are no slots and no rooms, and all rows lie in
overflow, one behind the other. Its bytes up to the last one in use are all that has to be sent. The operations
`encode_piece` and `decode_piece` (csrc/bindings/torch_ops.cpp) read and write packed pieces.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._common.rounding import rounded_up

ALIGNMENT = 64  # Pieces, and slots and overflow inside a piece, are aligned to this many bytes.
HEAD_BYTES = 64
NOTE = 7  # Position of `PieceHead.note` among the int64 of the head.
_BASE_BYTES, _ROOM_BYTES, _LENGTH_BYTES = 8, 2, 2  # Number of bytes that each part of the index has for a row.


class PieceHead(NamedTuple):
    """The entries of a head, as views.

    Attributes:
        used: int64 [1]: bytes of overflow that have been handed out. If overflow had no room for a row, this is more
            bytes than overflow has.
        counts: int64 [2]: the number of rows with a part in overflow, and the number of lost rows.
        fault: int64 [4]: a fault record.
        note: int64 [1]: whoever sends the piece may write a number there, because `encode_into` leaves it alone.
    """

    used: torch.Tensor
    counts: torch.Tensor
    fault: torch.Tensor
    note: torch.Tensor


class PieceForm(NamedTuple):
    """The ranges of the parts behind the head, in bytes from the beginning of the memory."""

    bases: slice
    rooms: slice
    lengths: slice
    slots: slice
    overflow: slice


def head_of(words: torch.Tensor) -> PieceHead:
    """Returns the entries of a head. words: int64 [8], the first `HEAD_BYTES` bytes of a piece."""
    return PieceHead(*words.split_with_sizes([1, 2, 4, 1]))


def used_bytes(piece: torch.Tensor) -> int:
    """Returns how many bytes of overflow a piece in host memory uses. A copy of its head is enough."""
    return int(piece[:8].view(torch.int64))


@functools.lru_cache(1024)
def fixed(num_rows: int, row_bytes: int, slot_bytes: int, overflow_bytes: int) -> PieceForm:
    """Returns the form of a fixed piece. If slots hold whole rows, there are no bases, rooms and overflow."""
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
    """Returns the form of a packed piece. overflow_bytes: the bytes that it has for coded rows."""
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
    """Returns the form of parts of these sizes, in bytes.

    Args:
        start: the offset of the bases, a multiple of 8.
        alignment: the offsets of slots and overflow are multiples of it.
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
