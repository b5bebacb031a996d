"""Lays out coded rows in one contiguous piece of memory, which can be sent, copied or stored as plain bytes.

A piece has the following parts, in this order. Some of them may be empty.

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
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._common.sequences import rounded_up

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
