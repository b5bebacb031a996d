"""Parameters cut into chunks, whose states are decoded, used and coded again one chunk after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from .._place import _in_memory_order
from ._reserve import Reserve
from ._states import ROW_BYTES, CodedState

NAMES = ("exp_avg", "exp_avg_sq")


class Work(NamedTuple):
    """Memory for the states of one chunk, raw: 1-D, of the parameters' dtype."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Piece(NamedTuple):
    """Elements start to stop of a parameter, in the order of its memory, or all of it; in the chunk they begin at
    `offset`. Of a DTensor this process's part is meant."""

    param: torch.Tensor
    start: int
    stop: int
    offset: int
    is_whole: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor in the parameter's layout: all of it, or a 1-D view."""
        own = local(tensor)
        return own if self.is_whole else flat(own)[self.start : self.stop]

    def within(self, states: torch.Tensor) -> torch.Tensor:
        """The piece of a chunk's states, laid out as `of` lays out the parameter."""
        if self.is_whole:
            like = local(self.param)
            return states.as_strided(like.shape, like.stride(), states.storage_offset() + self.offset)
        return states[self.offset : self.offset + self.stop - self.start]


class Chunk:
    """Pieces of parameters of one dtype and device, and their states."""

    def __init__(
        self, pieces: list[Piece], num_elements: int, level: str, reserve: Reserve | None, pinned: bool
    ) -> None:
        first = local(pieces[0].param)
        self.pieces, self.num_elements = pieces, num_elements
        self.dtype, self.device = first.dtype, first.device
        num_rows = num_elements * self.dtype.itemsize // ROW_BYTES
        self.states = tuple(CodedState(num_rows, self.device, level, reserve, pinned) for _ in NAMES)
        self._views: tuple[Work, list[tuple[torch.Tensor, ...]]] | None = None

    def raw(self, work: Work) -> list[torch.Tensor]:
        """The parts of work memory that this chunk's states take."""
        return [memory[: self.num_elements] for memory in work]

    def views(self, work: Work) -> list[tuple[torch.Tensor, ...]]:
        """(exp_avg, exp_avg_sq) of each piece in work memory."""
        if self._views is None or self._views[0] is not work:
            self._views = work, [tuple(piece.within(memory) for memory in work) for piece in self.pieces]
        return self._views[1]

    def load(self, work: Work, near: torch.Tensor | None = None) -> None:
        """Decodes the states to work memory. near: copies of their slots, as bytes of the device."""
        for i, (state, memory) in enumerate(zip(self.states, self.raw(work))):
            state.load(memory, None if near is None else near[i])

    def store(self, work: Work, near: torch.Tensor | None = None) -> None:
        """Codes the states in work memory. near: bytes of the device that slots are coded to in place of their own."""
        for i, (state, memory) in enumerate(zip(self.states, self.raw(work))):
            state.store(memory, None if near is None else near[i])


def planned(
    params: Iterable[torch.Tensor], chunk_bytes: int, level: str, reserves: dict[torch.device, Reserve], pinned: bool
) -> Iterator[Chunk]:
    """Chunks with the elements of all parameters, each of one dtype and device. Both states of one have at most
    chunk_bytes bytes. Pieces begin with a row of the coder. reserves: of GPUs. pinned: slots are in pinned memory where
    the parameters are on a GPU."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in params:
        kinds.setdefault((local(param).device, param.dtype), []).append(param)
    for (device, dtype), alike in kinds.items():
        reserve = reserves.setdefault(device, Reserve()) if device.type == "cuda" else None
        options = level, reserve, pinned and reserve is not None
        row_elements = ROW_BYTES // dtype.itemsize
        most = max(1, chunk_bytes // (2 * ROW_BYTES)) * row_elements
        pieces: list[Piece] = []
        end = 0
        for param in alike:
            start, length = 0, local(param).numel()
            while start < length:
                if end == most:
                    yield Chunk(pieces, end, *options)
                    pieces, end = [], 0
                stop = min(length, start + most - end)
                pieces.append(Piece(param, start, stop, end, stop - start == length))
                end += -(-(stop - start) // row_elements) * row_elements
                start = stop
        if pieces:
            yield Chunk(pieces, end, *options)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this process's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory: a view."""
    return _in_memory_order(tensor.detach()).view(-1)
