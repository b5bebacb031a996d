"""Deltas applied to coded rows: these are decoded, changed, and coded again with their table's codebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._fetch.streaming import decode_items, decompress
from .._tables.changes import put_items
from .._tables.compressed_tensor import CompressedTensor
from ._coding import integers_of
from ._fingerprint import fingerprint

if TYPE_CHECKING:
    from ._tensors import Delta


class TableRows(NamedTuple):
    """Items first to last - 1 of a table that may change, as a base of deltas."""

    table: CompressedTensor
    first: int
    last: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.last - self.first, *self.table.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    def read(self) -> torch.Tensor:
        return decode_items(self.table, self.first, self.last, self.device, check=True)

    def write(self, items: torch.Tensor) -> None:
        """Codes items into the table, all or none."""
        put_items(self.table, torch.arange(self.first, self.last), items)


class InTable:
    """A delta and rows of a table: attribute `indices` is what the caller calls it, in a list. Both methods hold the
    rows and their differences decoded."""

    def __init__(self, index: int, delta: Delta, rows: TableRows) -> None:
        self.indices = [index]
        self._delta, self._rows = delta, rows
        self._is_begun = False

    def apply(self) -> int | None:
        """Applies the delta, or leaves the rows as they are. Returns None, or the index where it does not fit."""
        items = self._rows.read()
        if fingerprint(items) != self._delta.base:
            return self.indices[0]
        integers_of(items).add_(self._differences())
        if fingerprint(items) != self._delta.result:
            return self.indices[0]
        self._is_begun = True
        self._rows.write(items)
        return None

    def take_back(self) -> None:
        """Undoes `apply`, which may have been interrupted."""
        if not self._is_begun:
            return
        items = self._rows.read()
        if fingerprint(items) != self._delta.base:
            integers_of(items).sub_(self._differences())
            self._rows.write(items)

    def _differences(self) -> torch.Tensor:
        return integers_of(decompress(self._delta.table, device=self._rows.device, check=True))
