"""Deltas of rows that this process keeps in pieces: in several tensors, in coded rows, or only some of them, such as a
slice of a sharded weight. The rows are brought together, changed, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._fetch.streaming import decode_items, decompress
from .._machine import staging
from .._tables.changes import put_items
from .._tables.compressed_tensor import CompressedTensor
from ._coding import bits_of, integers_of
from ._fingerprint import fingerprint, finished
from ._on_gpu import DeltaBatch, can_apply, coding_key

if TYPE_CHECKING:
    from ._tensors import Delta


class TableRows(NamedTuple):
    """Items first to last - 1 of a table that may change."""

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
        """Codes items with the table's codebook, all or none."""
        put_items(self.table, torch.arange(self.first, self.last, device="cpu"), items)


Memory = torch.Tensor | TableRows


class Piece(NamedTuple):
    """A part of a tensor's rows, which are in turn a part of joined elements.

    memory: the part. size, strides, offset: where it is among all elements.
    """

    memory: Memory
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, memory: Memory, first: int, shape: torch.Size, box: tuple[slice, ...]) -> Piece:
        """first: the rows' first element among all; shape: of the rows; box: where in them the part is, a slice of each
        dimension."""
        strides = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        ranges = [range(length)[part] for length, part in zip(shape, box)]
        offset = first + sum(each.start * stride for each, stride in zip(ranges, strides))
        if isinstance(memory, torch.Tensor):
            memory = bits_of(memory.detach())
        return cls(memory, tuple(map(len, ranges)), strides, offset)

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """The part of all elements, 1-D: a view."""
        return elements.as_strided(self.size, self.strides, elements.storage_offset() + self.offset)


class Pieces(NamedTuple):
    """A base of deltas that is in pieces. shape, dtype: of the rows, or [elements] of joined ones. is_whole: whether
    each element is in some piece; else its fingerprint is not known here."""

    pieces: Sequence[Piece]
    shape: torch.Size
    dtype: torch.dtype
    is_whole: bool

    @property
    def device(self) -> torch.device:
        return self.pieces[0].memory.device

    def groups(self) -> list[list[Piece]]:
        """The pieces, as they are written: coded ones one after the other, then all tensors by one operation."""
        dense = [each for each in self.pieces if isinstance(each.memory, torch.Tensor)]
        return [[each] for each in self.pieces if isinstance(each.memory, TableRows)] + ([dense] if dense else [])

    def read(self) -> torch.Tensor:
        """All elements, 1-D, with zeros where they are not here."""
        make = torch.empty if self.is_whole else torch.zeros
        elements = make(self.shape.numel(), dtype=self.dtype, device=self.device)
        bits = bits_of(elements)
        for group in self.groups():
            staging.copy_all([each.of(bits) for each in group], [_bits_in(each.memory) for each in group])
        return elements


def _bits_in(memory: Memory) -> torch.Tensor:
    return bits_of(memory.read()) if isinstance(memory, TableRows) else memory


def _write(group: Sequence[Piece], elements: torch.Tensor) -> None:
    """Writes a group of pieces, all or none."""
    first = group[0]
    if isinstance(first.memory, TableRows):
        first.memory.write(first.of(elements))
    else:
        bits = bits_of(elements)
        staging.copy_all([_bits_in(each.memory) for each in group], [each.of(bits) for each in group])


def in_one_piece(memory: Memory) -> Pieces:
    """A base that is a tensor, or rows of a table, and nothing else."""
    piece = Piece.at(memory, 0, memory.shape, (slice(None),) * len(memory.shape))
    return Pieces([piece], memory.shape, memory.dtype, True)


class InPieces:
    """A delta and its base in pieces: attribute `indices` is what the caller calls it, in a list. The methods hold all
    elements and their differences."""

    def __init__(self, index: int, delta: Delta, base: Pieces) -> None:
        self.indices = [index]
        self._delta, self._base = delta, base
        self._batch: DeltaBatch | None = None  # of the elements, on a GPU
        self._before: Callable[[], int] | None = None  # the elements' fingerprint, once they change

    def begin(self) -> None:
        """Lets a GPU change the elements, if it can; where the delta does not fit they stay, and are written so."""
        if not (self._base.is_whole and self._base.device.type == "cuda"):
            return
        elements = self._base.read()
        if can_apply(self._delta, elements) and coding_key(self._delta) is not None:
            batch = DeltaBatch(self.indices, [self._delta], [elements])
            batch.begin()
            self._batch = batch
            self._before = lambda: finished(batch.sum_before(), self._delta.table.original_bytes)
            self._write(elements)

    def apply(self) -> int | None:
        """Applies the delta, or leaves the base as it is. Returns None, or the index where it does not fit."""
        if self._batch is not None:
            return self._batch.apply()
        elements = self._base.read()
        before = fingerprint(elements)
        if self._base.is_whole and before != self._delta.base:
            return self.indices[0]
        integers_of(elements).add_(self._differences())
        if self._base.is_whole and fingerprint(elements) != self._delta.result:
            return self.indices[0]
        self._before = lambda: before
        self._write(elements)
        return None

    def _write(self, elements: torch.Tensor) -> None:
        for group in self._base.groups():
            _write(group, elements)

    def take_back(self) -> None:
        """Undoes what may have been interrupted: the first groups are written then, and others are not."""
        if self._before is None:
            return
        before, elements = self._before(), self._base.read()
        old = integers_of(elements).sub(self._differences()).view(elements.dtype)
        for group in self._base.groups():
            if fingerprint(elements) == before:
                return
            for each in group:
                bits_of(each.of(elements)).copy_(bits_of(each.of(old)))
            _write(group, elements)

    def _differences(self) -> torch.Tensor:
        return integers_of(decompress(self._delta.table, device=self._base.device, check=True))
