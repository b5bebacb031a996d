"""Applies deltas to bases that this process keeps in pieces. A base can be spread over several tensors, be in rows of
tables, or be only partly in this process, such as a shard of a weight. The elements of a base are copied into one
tensor, changed there, and written back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._fetch.streaming import decode_items, decompress
from .._machine import staging
from .._tables.changes import put_items
from .._tables.compressed_tensor import CompressedTensor
from ._coding import bits_of, fingerprint, finished, integers_of
from ._on_gpu import DeltaBatch, can_apply, coding_key

if TYPE_CHECKING:
    from ._tensors import Delta, Version


class TableRows(NamedTuple):
    """Items `first` to `last` - 1 of a table, which can be read and replaced."""

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
        """Replaces all items, or none if an error occurs. The new items are coded with the table's codebook."""
        put_items(self.table, torch.arange(self.first, self.last, device="cpu"), items)


Memory = torch.Tensor | TableRows


class Piece(NamedTuple):
    """A part of a base, and the memory that holds the part.

    The elements of a base form one sequence. They are the elements of some rows of a tensor. If several tensors are
    joined, the elements of each tensor follow those of the tensor before it.

    memory: a tensor, viewed as integers, or rows of a table. It holds the part.
    size, strides, offset: the arguments with which `torch.as_strided` selects the part's elements from the sequence.
    """

    memory: Memory
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, memory: Memory, first: int, shape: torch.Size, box: tuple[slice, ...]) -> Piece:
        """Returns the piece for a box, which is a range of elements in each dimension of a tensor's rows.

        Args:
            memory: holds the elements of the box.
            first: the index in the sequence at which the rows begin.
            shape: the shape of the rows.
            box: a slice for each dimension of the rows.
        """
        strides = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        ranges = [range(length)[part] for length, part in zip(shape, box)]
        offset = first + sum(each.start * stride for each, stride in zip(ranges, strides))
        if isinstance(memory, torch.Tensor):
            memory = bits_of(memory.detach())
        return cls(memory, tuple(map(len, ranges)), strides, offset)

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns a view of the part's elements. elements: all elements of the base, 1-D."""
        return elements.as_strided(self.size, self.strides, elements.storage_offset() + self.offset)


class Pieces:
    """A base that is kept in pieces.

    Attributes:
        pieces: the pieces.
        shape: the shape of the rows; if several tensors are joined, [number of elements].
        dtype: the dtype of the elements.
        is_whole: whether each element of the base is in a piece. Otherwise the fingerprint of the base cannot be
            computed in this process.
        groups: the pieces, divided into groups that are written one after the other. The first groups have one piece
            each: a piece that is in a table. The last group has all pieces that are in tensors.
        key: equal for bases that consist of the same elements in the same memory.
    """

    def __init__(self, pieces: Sequence[Piece], shape: torch.Size, dtype: torch.dtype, is_whole: bool) -> None:
        self.pieces, self.shape, self.dtype, self.is_whole = pieces, shape, dtype, is_whole
        dense = [each for each in pieces if isinstance(each.memory, torch.Tensor)]
        self.groups = [[each] for each in pieces if isinstance(each.memory, TableRows)] + ([dense] if dense else [])
        self.key = tuple(memory_of(each.memory) for each in pieces)
        # The tensors that hold the elements, as 1-D views, if the base consists of contiguous tensors, one after the
        # other (for example, the experts of a layer). Then one call of `split` makes the corresponding views of the
        # elements. Otherwise None.
        ends = list(itertools.accumulate(math.prod(each.size) for each in pieces))
        self._flats: list[torch.Tensor] | None = None
        if is_whole and ends[-1] == shape.numel() and all(map(_is_run, pieces, [0, *ends])):
            self._flats = [each.memory.view(-1) for each in dense if isinstance(each.memory, torch.Tensor)]

    @property
    def device(self) -> torch.device:
        return self.pieces[0].memory.device

    def read(self) -> torch.Tensor:
        """Returns all elements, 1-D. Elements that are in no piece are 0."""
        make = torch.empty if self.is_whole else torch.zeros
        elements = make(self.shape.numel(), dtype=self.dtype, device=self.device)
        for group in self.groups:
            staging.copy_all(*self._copied(group, bits_of(elements)))
        return elements

    def write(self, group: Sequence[Piece], elements: torch.Tensor) -> None:
        """Writes the elements of a group to the memory of its pieces: all of them, or none if an error occurs.
        elements: all elements of the base, 1-D."""
        first = group[0]
        if isinstance(first.memory, TableRows):
            first.memory.write(first.of(elements))
        else:
            parts, memories = self._copied(group, bits_of(elements))
            staging.copy_all(memories, parts)

    def _copied(
        self, group: Sequence[Piece], bits: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Returns (for each piece of a group, a view of its part of `bits`; for each piece, the values in its memory,
        as integers). The values of a piece in a tensor are a view of the tensor; rows of tables are decompressed. bits:
        all elements of the base as integers."""
        if self._flats is not None:
            return bits.split([flat.numel() for flat in self._flats]), self._flats
        memories = [each.memory for each in group]
        return [each.of(bits) for each in group], [
            bits_of(memory.read()) if isinstance(memory, TableRows) else memory for memory in memories
        ]


def _is_run(piece: Piece, first: int) -> bool:
    """Returns whether the memory of a piece is a contiguous tensor, and the piece has consecutive elements of the base,
    beginning at element `first`."""
    count, is_run = 1, piece.offset == first and isinstance(piece.memory, torch.Tensor) and piece.memory.is_contiguous()
    for length, stride in zip(reversed(piece.size), reversed(piece.strides)):
        is_run = is_run and (length == 1 or stride == count)
        count *= length
    return is_run


def memory_of(x: Version | TableRows | Pieces) -> tuple[Any, ...]:
    """Returns a key that identifies the elements of x in memory. Two arguments have equal keys if they consist of the
    same elements in the same memory."""
    if isinstance(x, Pieces):
        return x.key
    if isinstance(x, TableRows):
        return id(x.table), x.first, x.last
    if isinstance(x, CompressedTensor) or x.numel() == 0:
        return (id(x),)
    return x.device, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg()


def in_one_piece(memory: Memory) -> Pieces:
    """Returns a base that consists of one piece, which is a whole tensor or rows of a table."""
    piece = Piece.at(memory, 0, memory.shape, (slice(None),) * len(memory.shape))
    return Pieces([piece], memory.shape, memory.dtype, True)


class InPieces:
    """The batch (see `_tensors.py`) of one job whose base is in pieces. It needs memory for all elements of the base
    and for their differences.

    Attributes:
        indices: a list of one number, the index of the job.
    """

    def __init__(self, index: int, delta: Delta, base: Pieces) -> None:
        self.indices = [index]
        self._delta, self._base = delta, base
        self._batch: DeltaBatch | None = None  # applies the delta to the copied elements on a GPU
        # Returns the fingerprint that the elements had before. It is set just before the elements are written.
        self._before: Callable[[], int] | None = None

    def begin(self) -> None:
        """Queues work that reads, changes and writes the elements, if the base is whole and on a GPU, and the kernels
        can apply the delta. Otherwise `apply` does this work. If the delta was made for other elements, the kernels
        leave the elements unchanged, and the old values are written back."""
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
        """Applies the delta and returns None. If the delta was made for another base, or is damaged, returns the index
        of the job; the base then has its old values. A base that is not whole is not checked."""
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
        for group in self._base.groups:
            self._base.write(group, elements)

    def take_back(self) -> None:
        """Undoes the change, even if it was interrupted. After an interruption the first groups may have new values,
        and the others old values. So the old values are written group by group, until the elements have the old
        fingerprint."""
        if self._before is None:
            return
        before, elements = self._before(), self._base.read()
        old = integers_of(elements).sub(self._differences()).view(elements.dtype)
        for group in self._base.groups:
            if fingerprint(elements) == before:
                return
            for each in group:
                bits_of(each.of(elements)).copy_(bits_of(each.of(old)))
            self._base.write(group, elements)

    def _differences(self) -> torch.Tensor:
        """Returns the delta's differences, decompressed, as integers, 1-D."""
        return integers_of(decompress(self._delta.table, device=self._base.device, check=True))
