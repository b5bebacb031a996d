"""Joins rows of several tables into one table, by copying the coded rows. No row is decoded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from .._layout.geometry import Geometry
from .._schemes.codebook import fingerprint_of
from .compressed_tensor import CompressedTensor


class Items(NamedTuple):
    """The items from `first` to `last` - 1 of a table."""

    table: CompressedTensor
    first: int
    last: int

    def slots(self) -> torch.Tensor:
        return self.table.slots[self.first * self.table.slot_bytes : self.last * self.table.slot_bytes]

    def overflow(self) -> torch.Tensor:
        """Returns the bytes of the overflow that belong to these items."""
        return self.table.overflow[_overflow_before(self.table, self.first) : _overflow_before(self.table, self.last)]


def join(parts: Sequence[Items], device: torch.device) -> CompressedTensor | None:
    """Concatenates items of several tables into a table on a device, without decoding them. Returns None if the tables
    cannot be joined.

    Tables can be joined if they have equal codebooks, dtypes, item shapes and slot sizes. Every item must be one row.
    The size of a slot must be above 0 and below the size of a row. No table may have a separate base for every row, as
    a table has after its rows have been changed."""
    table = parts[0].table
    form = _form(table)
    if form is None or any(_form(part.table) != form for part in parts[1:]):
        return None
    if len(parts) == 1 and parts[0][1:] == (0, table.geometry.num_items):
        return table.to(device)

    def on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(device) for tensor in tensors])

    num_items, size = sum(part.last - part.first for part in parts), table.slot_bytes
    geometry = Geometry(torch.Size((num_items, *table.shape[1:])), table.dtype, table.row_bytes)
    slots, overflow = on_device([part.slots() for part in parts]), on_device([part.overflow() for part in parts])
    lengths = on_device([part.table.lengths[part.first : part.last] for part in parts])
    bases = geometry.index_rows(lengths, size) if len(overflow) else None
    return CompressedTensor.of_parts(geometry, table.scheme, size, slots, table.codebook, lengths, overflow, bases)


def _form(table: CompressedTensor) -> Hashable | None:
    """Returns a value that is equal for tables that can be joined with each other. Returns None for a table that does
    not meet the conditions of `join` for a single table."""
    if table.codebook is None or table.geometry.item_bytes != table.row_bytes or table._has_own_bases:
        return None
    if not 0 < table.slot_bytes < table.row_bytes:
        return None
    return table.dtype, table.shape[1:], table.slot_bytes, fingerprint_of(table.codebook)


def _overflow_before(table: CompressedTensor, item: int) -> int:
    """Returns the total size in bytes of the overflow of all items before `item`."""
    geometry = Geometry(torch.Size((item, *table.shape[1:])), table.dtype, table.row_bytes)
    return geometry.survey(table.lengths[:item]).overflow_bytes(table.slot_bytes)
