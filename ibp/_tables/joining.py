"""Tables made of rows of other tables, which are copied as they are coded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _core
from .compressed_tensor import CompressedTensor


class Items(NamedTuple):
    """Items first to last - 1 of a table."""

    table: CompressedTensor
    first: int
    last: int

    def overflow(self) -> torch.Tensor:
        """What of them lies behind the slots."""
        start, end = (_overflow_before(self.table, item) for item in (self.first, self.last))
        return self.table.overflow[start:end]


def join(parts: Sequence[Items], device: torch.device) -> CompressedTensor | None:
    """One table of items of several tables, one after the other, on a device. Nothing is decoded. None: the tables are
    not of one form: rows that are items, in slots of one size, coded by equal codebooks."""
    table = parts[0].table
    if len({_form(part.table) for part in parts}) > 1 or not _can_be_cut(table):
        return None
    if len(parts) == 1 and parts[0][1:] == (0, table.num_items):
        return table.to(device)

    def on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(device) for tensor in tensors])

    size, num_items = table.slot_bytes, sum(part.last - part.first for part in parts)
    lengths = on_device([part.table.lengths[part.first : part.last] for part in parts])
    overflow = on_device([part.overflow() for part in parts])
    bases = torch.ops.ibp.index_rows(lengths, num_items * table.row_bytes, table.row_bytes, size)
    return CompressedTensor(
        shape=(num_items, *table.shape[1:]),
        dtype=table.dtype,
        scheme=table.scheme,
        row_bytes=table.row_bytes,
        slot_bytes=size,
        slots=on_device([part.table.slots[part.first * size : part.last * size] for part in parts]),
        overflow=overflow,
        lengths=lengths,
        bases=bases[: -1 if len(overflow) else 0],
        codebook=table.codebook,
    )


def _can_be_cut(table: CompressedTensor) -> bool:
    """Whether items are rows that lie in slots, with overflow in the rows' order."""
    is_coded = table.codebook is not None and table.layout == "slots"
    return is_coded and table.item_bytes == table.row_bytes and not table.has_own_bases


def _form(table: CompressedTensor) -> tuple:
    """The same for tables whose rows one table can have."""
    book = table.codebook
    coding = () if book is None else (tuple(book.codec), book.words(torch.device("cpu")).numpy().tobytes())
    return table.dtype, table.shape[1:], table.slot_bytes, coding


def _overflow_before(table: CompressedTensor, item: int) -> int:
    """Bytes of overflow of the items before one."""
    if not table.overflow.numel():
        return 0
    group = min(item // _core.ROWS_PER_BASE, len(table.bases) - 1)
    lengths = table.lengths[group * _core.ROWS_PER_BASE : item]
    sizes = torch.ops.ibp.index_rows(lengths, len(lengths) * table.row_bytes, table.row_bytes, table.slot_bytes)
    return int(table.bases[group]) + int(sizes[-1])
