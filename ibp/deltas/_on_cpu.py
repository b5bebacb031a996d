"""Deltas applied on the CPU, in the memory of their bases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._layout.geometry import bytes_of
from .._rows.faults import new_record
from . import _coding
from ._fingerprint import fingerprint

if TYPE_CHECKING:
    from ._tensors import Delta


def can_apply(delta: Delta, base: torch.Tensor) -> bool:
    """Whether rows are added in place, of a delta and its base of one shape and dtype."""
    if base.device.type != "cpu" or not base.is_contiguous() or base.numel() == 0:
        return False
    return delta.table.row_bytes % 8 == 0


class InPlace:
    """A delta and its base: attribute `indices` is what the caller calls it, in a list."""

    def __init__(self, index: int, delta: Delta, base: torch.Tensor) -> None:
        self.indices = [index]
        self._delta, self._base = delta, bytes_of(base)
        self._table = delta.to("cpu").table
        self._is_begun = False

    def begin(self) -> None:
        """`apply` does it."""

    def apply(self) -> int | None:
        """Applies the delta, or leaves the base as it is. Returns None, or the index where it does not fit."""
        before = fingerprint(self._base)
        if before != self._delta.base:
            return self.indices[0]
        self._is_begun = True
        change, is_good = self._add(False)
        if is_good and (before + change) % 2**64 == self._delta.result:
            return None
        self.take_back()
        return self.indices[0]

    def take_back(self) -> None:
        """Undoes `apply`, which may have been interrupted."""
        if self._is_begun and fingerprint(self._base) != self._delta.base:
            self._add(True)

    def _add(self, subtracts: bool) -> tuple[int, bool]:
        """What that adds to the fingerprint, and whether no row is corrupt; corrupt rows change nothing."""
        change, fault = torch.zeros(1, dtype=torch.int64), new_record()
        width = _coding.element_bytes_of(self._delta.dtype)
        table = self._table.handle(torch.device("cpu")).table
        torch.ops.ibp.add_rows.default(table, width, subtracts, self._base, change, fault)
        return int(change), not int(fault[0])
