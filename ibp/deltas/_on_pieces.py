"""The memory that deltas change: a tensor, rows of a table, or several of them, which may hold only a part of a tensor,
such as a shard."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._fetch.streaming import decode_items
from .._machine import staging
from .._tables.changes import put_items
from .._tables.compressed_tensor import CompressedTensor
from ._coding import BLOCK_BYTES, INTEGERS, element_bytes_of, integers_in
from ._fingerprint import WORD_BYTES, fingerprint, finished


class TableRows(NamedTuple):
    """Items `first` to `last` - 1 of a table that may change."""

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
        """Encodes items with the table's codebook, all or none."""
        put_items(self.table, torch.arange(self.first, self.last, device="cpu"), items)


Memory = torch.Tensor | TableRows
Version = torch.Tensor | CompressedTensor


class Piece(NamedTuple):
    """A part of a base, and its place in the base.

    Attributes:
        memory: the part, as integers or as rows of a table.
        size, strides, offset: the place of the part in a contiguous tensor of all of the base's integers.
    """

    memory: Memory
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, memory: Memory, first: int, shape: torch.Size, box: tuple[slice, ...]) -> Piece:
        """Returns a part of rows that are, in turn, a part of a base.

        Args:
            memory: the part.
            first: the number of elements of the base before the rows.
            shape: the shape of the rows.
            box: the part's place in the rows, a slice for each dimension.
        """
        ranges = [range(length)[part] for length, part in zip(shape, box)]
        size, strides = tuple(map(len, ranges)), _strides_of(shape)
        offset = first + sum(each.start * stride for each, stride in zip(ranges, strides))
        if memory.dtype.is_complex:
            size, strides, offset = (*size, 2), (*(2 * stride for stride in strides), 1), 2 * offset
        if isinstance(memory, torch.Tensor):
            memory = integers_in(memory.detach())
            if memory.is_contiguous() and strides == _strides_of(size):
                memory, size, strides = memory.view(-1), (memory.numel(),), (1,)
        return cls(memory, size, strides, offset)

    @property
    def end(self) -> int:
        """Returns the number of the integer behind the last one of the part."""
        if self.strides == (1,):
            return self.offset + self.size[0]
        return self.offset + 1 + sum((length - 1) * stride for length, stride in zip(self.size, self.strides))

    def of(self, integers: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Returns a view of the integers of this part. integers: those of the base, 1-D, from number `first`."""
        return integers.as_strided(self.size, self.strides, integers.storage_offset() + self.offset - first)

    def cut(self, most: int) -> Iterator[Piece]:
        """Yields parts of the piece, which is a tensor and not empty. Each spans at most this many integers of the
        base."""
        memory, size, strides, offset = self
        assert isinstance(memory, torch.Tensor)
        if self.end - offset <= most:
            yield self
            return
        inner = self.end - offset - (size[0] - 1) * strides[0]  # number of integers that memory[0] spans
        if inner > most:
            for i, row in enumerate(memory):
                yield from Piece(row, size[1:], strides[1:], offset + i * strides[0]).cut(most)
            return
        step = 1 + (most - inner) // strides[0]
        for i, part in zip(itertools.count(0, step), memory.split(step)):
            yield Piece(part, tuple(part.shape), strides, offset + i * strides[0])


class Step(NamedTuple):
    """Pieces that change by one operation, and the range of the base's integers in which they lie."""

    pieces: list[Piece]
    first: int
    end: int

    @property
    def rows(self) -> TableRows | None:
        """Returns the rows of a table that the step changes, or None if it changes tensors."""
        memory = self.pieces[0].memory
        return memory if isinstance(memory, TableRows) else None


@dataclass(frozen=True, eq=False)
class Pieces:
    """The base of a delta, in pieces. Receivers keep these objects from push to push.

    Attributes:
        pieces: at least one piece.
        shape, dtype: those of the base. The shape is [elements] if the elements of several tensors are joined.
        is_whole: whether every element is in a piece. If not, the fingerprint of the base is not known here.
    """

    pieces: Sequence[Piece]
    shape: torch.Size
    dtype: torch.dtype
    is_whole: bool

    @property
    def device(self) -> torch.device:
        return self.pieces[0].memory.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Returns a copy of the base's integers, 1-D, with zeros for elements that are not here."""
        width = element_bytes_of(self.dtype)
        make = torch.empty if self.is_whole else torch.zeros
        integers = make(self.nbytes // width, dtype=INTEGERS[width], device=self.device)
        for piece in self.pieces:
            rows = piece.memory
            piece.of(integers).copy_(integers_in(rows.read()) if isinstance(rows, TableRows) else rows)
        return integers

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Returns what `memory_of` returns for the base."""
        return tuple(memory_of(piece.memory) for piece in self.pieces)

    @functools.cached_property
    def steps(self) -> list[Step]:
        """Returns the steps in which the base changes. Rows of a table are a step. A step of tensors spans at most
        `BLOCK_BYTES` bytes of the base."""
        most = BLOCK_BYTES[self.device.type] // element_bytes_of(self.dtype)
        steps: list[Step] = []
        for piece in dict(zip(self.key, self.pieces)).values():  # Tied tensors change once.
            if 0 in piece.size:
                continue
            if isinstance(piece.memory, TableRows):
                steps.append(Step([piece], piece.offset, piece.end))
                continue
            for part in piece.cut(most):
                last = steps[-1] if steps else None
                if last and not last.rows and last.first <= part.offset and part.end - last.first <= most:
                    last.pieces.append(part)
                    steps[-1] = last._replace(end=max(last.end, part.end))
                else:
                    steps.append(Step([part], part.offset, part.end))
        return steps

    @functools.cached_property
    def parts(self) -> tuple[list[int], list[torch.Tensor]] | None:
        """Returns all bytes of the base where they lie: the number of each part's first word, and the parts. None if
        the bytes do not lie in whole words, each in one place."""
        first_words, memories, total, width = [], [], 0, element_bytes_of(self.dtype)
        for memory, _, strides, offset in self.pieces:
            if isinstance(memory, TableRows) or strides != (1,) or not memory.is_contiguous():
                return None
            start, end = offset * width, offset * width + memory.nbytes
            if start % WORD_BYTES or (end % WORD_BYTES and end != self.nbytes):
                return None
            first_words.append(start // WORD_BYTES)
            memories.append(memory)
            total += memory.nbytes
        return (first_words, memories) if self.is_whole and total == self.nbytes else None


def in_one_piece(memory: Memory) -> Pieces:
    """Returns the base that consists of one tensor, or of rows of one table."""
    piece = Piece.at(memory, 0, memory.shape, (slice(None),) * len(memory.shape))
    return Pieces([piece], memory.shape, memory.dtype, True)


def memory_of(x: Version | TableRows | Pieces) -> tuple[Any, ...]:
    """Returns a key that is the same for tensors of the same elements in the same memory."""
    if isinstance(x, Pieces):
        return x.key
    if isinstance(x, TableRows):
        return id(x.table), x.first, x.last
    if isinstance(x, CompressedTensor) or x.numel() == 0:
        return (id(x),)
    return x.device, x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def fingerprints(bases: Sequence[Pieces]) -> list[int]:
    """Returns the fingerprints of bases, with zeros for elements that are not here."""
    return begin_fingerprints(bases)()


def begin_fingerprints(bases: Sequence[Pieces]) -> Callable[[], list[int]]:
    """Lets GPUs begin what `fingerprints` does. Returns a function that waits for them, and returns the fingerprints.
    Waits at once for bases that have to be copied first."""
    found = [0] * len(bases)
    summed: dict[torch.device, tuple[list[torch.Tensor], list[int], list[int]]] = {}
    for number, base in enumerate(bases):
        if base.parts is None:
            found[number] = fingerprint(base.read())
            continue
        parts, first_words, numbers = summed.setdefault(base.device, ([], [], []))
        first_words += base.parts[0]
        parts += base.parts[1]
        numbers += [number] * len(base.parts[0])
    coming = []
    for device, given in summed.items():
        sums = torch.zeros(len(bases), dtype=torch.int64, device=device)
        torch.ops.ibp.sum_parts.default(*given, sums)
        coming.append((set(given[2]), staging.Coming(sums)))

    def finish() -> list[int]:
        for numbers, sums in coming:
            totals = sums.wait().tolist()
            for number in numbers:
                found[number] = finished(totals[number], bases[number].nbytes)
        return found

    return finish


def _strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
