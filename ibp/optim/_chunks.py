"""Parameters cut into chunks, whose states are decoded, used and coded again one chunk after the other."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .._common.rounding import rounded_up
from .._machine.memory import PinningError
from .._machine.staging import Coming
from .._tables.coded_rows import _in_memory_order
from ._families import Section, StateGroup, grouped
from ._learning import ROW_BYTES, learn
from ._replay import Replay
from ._states import CodedState, StateCoding

NAMES = ("exp_avg", "exp_avg_sq")
_ALIGNMENT = 64  # bytes, of small parameters behind others
_REPLAYED_ON = "cuda"
_LEAST_REPLAYED = 6  # runs of a chunk; with fewer, the host launches kernel by kernel
_SAMPLED_ROWS, _LEAST_SAMPLED = 256, 128  # of a run, and of each of its sections at least, for later codebooks
_LARGE_BYTES = 4 << 20  # of a parameter that may have codebooks of its own: values of others may have another scale

_OfState = Callable[[CodedState, torch.Tensor, torch.Tensor | None], None]


class Work(NamedTuple):
    """Memory for the states of one chunk, raw: 1-D, of the parameters' dtype."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class ChunkPiece(NamedTuple):
    """Elements start to stop of a parameter, in the order of its memory, or all of it; in the chunk they begin at
    `offset`. Of a DTensor this process's part is meant."""

    param: torch.Tensor
    start: int
    stop: int
    offset: int
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.param.dtype.itemsize

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


class Run(NamedTuple):
    """Elements start to stop of a chunk, one of whose states has one codebook.

    which: 0: exp_avg, 1: exp_avg_sq.
    """

    which: int
    start: int
    stop: int
    state: CodedState

    def bytes_in(self, work: Work) -> torch.Tensor:
        """Its part of work memory, uint8."""
        return work[self.which][self.start : self.stop].view(torch.uint8)


class Chunk:
    """Pieces of parameters of one dtype and device, and their states. Large parameters are sections, and small ones
    between them together; sections that are alike and next to each other are a run, which is coded by one call."""

    def __init__(self, pieces: list[ChunkPiece], num_elements: int, coding: StateCoding) -> None:
        first = local(pieces[0].param)
        self.pieces, self.num_elements, self._coding = pieces, num_elements, coding
        self.dtype, self.device = first.dtype, first.device
        self._row_elements = ROW_BYTES // self.dtype.itemsize
        num_rows = num_elements // self._row_elements
        firsts = _firsts_of_sections(pieces)
        starts = [piece.offset // self._row_elements for piece in firsts]
        keys = [id(piece.param) if _is_large(piece.param) else object() for piece in firsts]
        self._sections = [Section(*parts) for parts in zip(starts, [*starts[1:], num_rows], keys)]
        if coding.reserve is not None:
            coding.reserve.expect(len(NAMES) * num_rows, num_rows if len(self._sections) > 1 else 0)
        self._views: tuple[Work, list[tuple[torch.Tensor, ...]]] | None = None
        self._samples: dict[Run, tuple[Coming, list[int], float]] = {}  # with the rows of each section, and the growth
        self._set_runs([self._run(which, 0, num_rows) for which in range(len(NAMES))])

    def _run(self, which: int, first_row: int, last_row: int, stores: int = 0) -> Run:
        start, stop = first_row * self._row_elements, last_row * self._row_elements
        num_bytes = sum(piece.num_bytes for piece in self.pieces if start <= piece.offset < stop)
        return Run(which, start, stop, CodedState(last_row - first_row, num_bytes, self.device, self._coding, stores))

    def _set_runs(self, runs: list[Run]) -> None:
        self.runs, self.states = runs, [run.state for run in runs]
        self._is_replayed = len(runs) >= _LEAST_REPLAYED and self.device.type == _REPLAYED_ON
        self._replays: dict[_OfState, Replay] = {CodedState.load: Replay(), CodedState.write: Replay()}
        self._bytes: tuple[Work, list[tuple[CodedState, torch.Tensor]]] | None = None

    def raw(self, work: Work) -> list[torch.Tensor]:
        """The parts of work memory that this chunk's states take."""
        return [memory[: self.num_elements] for memory in work]

    def views(self, work: Work) -> list[tuple[torch.Tensor, ...]]:
        """(exp_avg, exp_avg_sq) of each piece in work memory."""
        if self._views is None or self._views[0] is not work:
            self._views = work, [tuple(piece.within(memory) for memory in work) for piece in self.pieces]
        return self._views[1]

    def unfit(self) -> list[Run]:
        """The runs that want a codebook, and are not sampled yet."""
        return [run for run in self.runs if run.state.wants_fit and run not in self._samples]

    def fit(self, run: Run, work: Work, growth: float = 1.0) -> None:
        """Gives a run its first codebook and memory, or makes several runs of it whose sections have codebooks of their
        own. Waits for the device.

        Args:
            run: whose state is in work memory, or what it is about to be.
            growth: how many times larger its values are expected to become before the next fit.

        Raises:
            torch.OutOfMemoryError, MemoryError: there is no memory; nothing has changed.
        """
        rows = self._rows(run, work)
        self._take(run, rows, self._groups(run, rows, self._sections_of(run), growth))

    def sample(self, run: Run, work: Work, growth: float) -> None:
        """Has some rows of a run in work memory come to the host, for `refit`. Where there is no memory for them, the
        next step tries again. growth: as of `fit`."""
        rows, sections = self._rows(run, work), self._sections_of(run)
        most = max(_LEAST_SAMPLED, _SAMPLED_ROWS // len(sections))
        # An odd distance apart: even ones might always meet the same part of a matrix's rows.
        parts = [rows[start : stop : -(-(stop - start) // most) | 1] for start, stop, _ in sections]
        with contextlib.suppress(torch.OutOfMemoryError):
            self._samples[run] = Coming(torch.cat(parts)), [len(part) for part in parts], growth

    @property
    def is_sampled(self) -> bool:
        """Whether there are samples for `refit`."""
        return bool(self._samples)

    def refit(self, work: Work) -> None:
        """Gives the runs that were sampled other codebooks: the host learns them while the device does what is queued.
        Where there is no memory for one, a run keeps its codebook."""
        samples, self._samples = self._samples, {}
        for run, (coming, sizes, growth) in samples.items():
            held, ends = self._sections_of(run), [0, *itertools.accumulate(sizes)]
            sampled = [Section(start, stop, of.key) for of, start, stop in zip(held, ends, ends[1:])]
            row_at = dict(zip(ends, [*(section.start for section in held), held[-1].stop]))
            try:
                groups = self._groups(run, coming.wait(), sampled, growth)
                groups = [group._replace(start=row_at[group.start], stop=row_at[group.stop]) for group in groups]
                for group in groups:
                    group.codebook.queue_words(self.device)
                run.state.load(run.bytes_in(work))
                self._take(run, self._rows(run, work), groups)
            except (torch.OutOfMemoryError, MemoryError, PinningError):
                run.state.settle()

    def _take(self, run: Run, rows: torch.Tensor, groups: list[StateGroup]) -> None:
        """Codes the rows of a run by the codebooks of groups."""
        states = [run.state]
        if len(groups) == 1:
            run.state.fit(rows, groups[0])
        else:
            states = self._split(run, rows, groups)
        for state in states:
            state.settle()

    def _rows(self, run: Run, work: Work) -> torch.Tensor:
        return work[run.which][run.start : run.stop].view(-1, self._row_elements)

    def _sections_of(self, run: Run) -> list[Section]:
        """The sections of a run, from its first row on."""
        first, last = run.start // self._row_elements, run.stop // self._row_elements
        held = [section for section in self._sections if first <= section.start < last]
        return [Section(start - first, stop - first, key) for start, stop, key in held]

    def _groups(self, run: Run, rows: torch.Tensor, sections: list[Section], growth: float) -> list[StateGroup]:
        """Sections of a run that are alike, by their rows, or by samples of these."""
        before = None if run.state.place is None else run.state.place.codebook
        families = self._coding.families.setdefault((run.which, self.dtype), [])
        return grouped(rows, sections, families, lambda some: learn(some, self._coding.level, before, growth))

    def _split(self, run: Run, rows: torch.Tensor, groups: list[StateGroup]) -> list[CodedState]:
        """Puts a run for each group in the place of one. Their states."""
        first, stores = run.start // self._row_elements, run.state.stores
        parts = [self._run(run.which, first + group.start, first + group.stop, stores) for group in groups]
        states = [part.state for part in parts]
        run.state.lend(states)
        try:
            for state, group in zip(states, groups):
                state.fit(rows[group.start : group.stop], group)
        except BaseException:
            run.state.take_back(states, rows)
            raise
        run.state.release()
        i = self.runs.index(run)
        self._set_runs([*self.runs[:i], *parts, *self.runs[i + 1 :]])
        return states

    def prepare(self, work: Work) -> None:
        """Before the states are decoded and coded: many of them by one call each, if that was done before."""
        if self._is_replayed:
            key = self._key(work)
            for what, replay in self._replays.items():
                replay.prepare(key, functools.partial(self._of_all, what, work, None), self.device)

    def load(self, work: Work, near: torch.Tensor | None = None) -> None:
        """Decodes the states to work memory. near: copies of their slots, as `slots_near` has them."""
        self._run_all(CodedState.load, work, near)

    def store(self, work: Work, near: torch.Tensor | None = None) -> None:
        """Codes the states in work memory. near: memory of the device that slots are coded to in place of their own."""
        self._run_all(CodedState.write, work, near)
        for state in self.states:
            state.stores += 1

    def _run_all(self, what: _OfState, work: Work, near: torch.Tensor | None) -> None:
        if self._is_replayed and near is None:
            self._replays[what].run(self._key(work), functools.partial(self._of_all, what, work, None))
        else:
            self._of_all(what, work, near)

    def _of_all(self, what: _OfState, work: Work, near: torch.Tensor | None) -> None:
        parts = self._parts(work)
        nears: Sequence[torch.Tensor | None] = [None] * len(parts) if near is None else self._near(near)
        for (state, memory), slots in zip(parts, nears):
            what(state, memory, slots)

    def _parts(self, work: Work) -> list[tuple[CodedState, torch.Tensor]]:
        """The states, each with its bytes in work memory."""
        if self._bytes is None or self._bytes[0] is not work:
            self._bytes = work, [(run.state, run.bytes_in(work)) for run in self.runs]
        return self._bytes[1]

    def _key(self, work: Work) -> tuple[int, ...]:
        """Equal where the states are decoded from and coded to the same memory in the same way."""
        versions = (state.version for state in self.states)
        return (work.exp_avg.data_ptr(), work.exp_avg_sq.data_ptr(), self.states[0].is_new, *versions)

    def slots_near(self, near: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(slots of a place, their part of near). near: uint8 [states, bytes of the chunk's elements, at least]."""
        for run in self.runs:
            if run.state.place is not None:
                slots = run.state.place.slots
                yield slots, near[run.which, run.start * self.dtype.itemsize :][: slots.numel()]

    def _near(self, near: torch.Tensor) -> list[torch.Tensor]:
        size = self.dtype.itemsize
        return [near[run.which, run.start * size : run.stop * size] for run in self.runs]


def _firsts_of_sections(pieces: list[ChunkPiece]) -> list[ChunkPiece]:
    """The pieces that sections begin with: large parameters are alone."""
    are_large = [_is_large(piece.param) for piece in pieces]
    return [piece for i, piece in enumerate(pieces) if i == 0 or are_large[i] or are_large[i - 1]]


def _is_large(param: torch.Tensor) -> bool:
    return local(param).nbytes >= _LARGE_BYTES


def planned(
    params: Iterable[torch.Tensor], chunk_bytes: int, coding: Callable[[torch.device], StateCoding]
) -> Iterator[Chunk]:
    """Chunks with the elements of all parameters, each of one dtype and device. Both states of one have at most
    chunk_bytes bytes. Large parameters come first. Pieces begin with a row of the coder, but small whole ones behind
    others. coding: of a device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in sorted(params, key=_is_large, reverse=True):
        kinds.setdefault((local(param).device, param.dtype), []).append(param)
    for (device, dtype), alike in kinds.items():
        row_elements = ROW_BYTES // dtype.itemsize
        most = max(1, chunk_bytes // (2 * ROW_BYTES)) * row_elements
        pieces: list[ChunkPiece] = []
        end = 0
        for param in alike:
            start, length = 0, local(param).numel()
            is_first = not pieces or _is_large(pieces[-1].param) or _is_large(param)
            packed = rounded_up(end, _ALIGNMENT // dtype.itemsize)
            end = rounded_up(end, row_elements) if is_first or packed + length > most else packed
            while start < length:
                if end == most:
                    yield Chunk(pieces, end, coding(device))
                    pieces, end = [], 0
                stop = min(length, start + most - end)
                pieces.append(ChunkPiece(param, start, stop, end, stop - start == length))
                end += stop - start
                start = stop
        if pieces:
            yield Chunk(pieces, rounded_up(end, row_elements), coding(device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this process's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory: a view."""
    return _in_memory_order(tensor.detach()).view(-1)
