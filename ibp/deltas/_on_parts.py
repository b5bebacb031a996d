"""Deltas of which this process holds a part: a slice of a sharded weight, whose fingerprint is nobody's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._fetch.streaming import decompress
from ._coding import bits_of
from ._fingerprint import fingerprint
from ._on_tables import TableRows

if TYPE_CHECKING:
    from ._tensors import Delta


class PartOf(NamedTuple):
    """A part of the rows that a delta is for, as a base of it.

    memory: the part. shape: of all the rows. box: where in them the part is, a slice of each dimension.
    """

    memory: torch.Tensor | TableRows
    shape: torch.Size
    box: tuple[slice, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        return self.memory.device


def read(base: torch.Tensor | TableRows | PartOf) -> torch.Tensor:
    """The values of a base: its own memory, or decoded rows."""
    if isinstance(base, PartOf):
        return read(base.memory)
    return base.read() if isinstance(base, TableRows) else base.detach()


class InPart:
    """A delta and a part of its rows, to which the part's differences are added. Neither fingerprint can be checked.
    Attribute `indices` is what the caller calls it, in a list."""

    def __init__(self, index: int, delta: Delta, part: PartOf) -> None:
        self.indices = [index]
        self._delta, self._part = delta, part
        self._before: int | None = None  # the part's fingerprint

    def apply(self) -> None:
        """Applies the delta."""
        self._before = fingerprint(read(self._part))
        self._add(False)

    def take_back(self) -> None:
        """Undoes `apply`, which may have been interrupted."""
        if self._before is not None and fingerprint(read(self._part)) != self._before:
            self._add(True)

    def _add(self, subtracts: bool) -> None:
        differences = decompress(self._delta.table, device=self._part.device, check=True)[self._part.box]
        values = read(self._part)
        bits_of(values).add_(bits_of(differences), alpha=-1 if subtracts else 1)
        if isinstance(self._part.memory, TableRows):
            self._part.memory.write(values)
