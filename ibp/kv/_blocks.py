"""`BlockStore` keeps blocks of layers as numbered pages, and loses no page. Blocks of different layers may have
different sizes.

What stays: a pool (`_Pool`) keeps the pages of blocks of one size and kind, coded in a `KVStore`, or raw in host memory
if the store has no room. A span (`_Span`) is the tensors of a group of layers whose blocks go to one pool. What comes
and goes: a call of `store` or `load` is a job (`_Job`), which has a part (`_JobPart`) for each span that it concerns.
When the work of a store has ended, its job is settled: the pages for which a pool had no room are copied from their
blocks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._common.arguments import whole_number
from .._common.process import OfThisProcess
from .._common.sequences import rounded_up
from .._core import SECTOR_BYTES
from .._rows.handle import CorruptTableError
from .._rows.learning import check_scheme
from ._paged import PagedTensors
from ._store import KVStore, Transfer

_SAMPLE_BYTES = 4 << 20  # size in bytes of the sample of blocks from which a codebook is learned

# {group of layers: (numbers of pages, numbers of blocks)}. The k-th block is stored as the k-th page, or the k-th page
# is loaded into it.
Moves = Mapping[int, tuple[list[int], list[int]]]


class _Pool:
    """A pool of pages. A page has a block of page_bytes bytes from each of several tensors. Pages are coded in a
    `KVStore`. If the store has no room for a page, the page is kept raw in host memory."""

    def __init__(self, page_bytes: int, dtype: torch.dtype, level: str, device: torch.device) -> None:
        self.page_bytes = page_bytes
        self.num_tensors = 0  # largest number of tensors that a group of layers has in this pool
        self._dtype = torch.uint8 if page_bytes % dtype.itemsize else dtype
        self._level, self._device = level, device
        self.store: KVStore | None = None  # None before the first store
        self.raw: dict[int, dict[int, torch.Tensor]] = {}  # raw blocks, by page and by the tensor's index in the page
        # Upper bound of the number of bytes of overflow that `store` uses once all submitted jobs have ended.
        self.may_use = 0
        self._lost_some = False  # whether `store` had no room for a page since the last compaction

    def make_store(self, parts: list[_JobPart], num_pages: int, pool_bytes: int) -> None:
        sample = []
        for part in parts:
            tensors = part.span.paged.tensors
            count = max(1, _SAMPLE_BYTES // (len(parts) * len(tensors) * self.page_bytes))
            some = torch.as_tensor(part.blocks[:count], device=self._device)
            sample += [tensor[some] for tensor in tensors]
        self.store = KVStore(
            torch.cat(sample).view(self._dtype),
            page_bytes=self.page_bytes,
            num_pages=num_pages,
            pool_bytes=pool_bytes,
            num_tensors=self.num_tensors,
            level=self._level,
            device=self._device,
        )

    def keep(self, part: _JobPart, lost: set[int]) -> None:
        """Makes raw copies of those blocks of a part whose pages are in `lost`. These are the pages for which the store
        had no room."""
        self._lost_some = self._lost_some or bool(lost)
        for page, block in zip(part.pages, part.blocks):
            if page in lost:
                kept = {n: tensor[block].to("cpu", copy=True) for n, tensor in part.span.columns()}
                self.raw.setdefault(page, {}).update(kept)

    def expect(self, part: _JobPart) -> None:
        """Adds to `may_use` the size in bytes of the overflow that a part needs if all of its rows are stored raw."""
        assert self.store is not None
        place, num_bytes = self.store.place, len(part.pages) * len(part.span.paged) * self.page_bytes
        raw_bytes = rounded_up(max(0, place.row_bytes - place.slot_bytes), SECTOR_BYTES)
        self.may_use += num_bytes // place.row_bytes * raw_bytes

    @property
    def may_lose(self) -> bool:
        """Whether `store` may turn out to have no room for a page that is being stored."""
        return self.store is not None and self.may_use > self.store.place.overflow.numel()

    def recount(self) -> None:
        """Sets `may_use` anew if it may be too large. No job may be storing pages."""
        if self.may_lose and self.store is not None:
            self.may_use = self.store.place.counts().used_bytes

    def compact(self) -> None:
        """Compacts the overflow of `store` if the store had no room for a page since the last compaction, and if enough
        pages were stored since then (see `KVStore.compact_if_due`)."""
        if self._lost_some and self.store is not None and self.store.compact_if_due():
            self.may_use = self.store.place.counts().used_bytes
            self._lost_some = False


class _Span(NamedTuple):
    """The tensors of a group of layers whose blocks belong to the same pool.

    Attributes:
        pool: the pool.
        paged: the tensors.
        first_tensor: the index in a page of the first of these tensors.
        numbers: the indices of these tensors in their group, ascending.
    """

    pool: _Pool
    paged: PagedTensors
    first_tensor: int
    numbers: tuple[int, ...]

    def columns(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields pairs (index of the tensor in a page, tensor)."""
        return enumerate(self.paged.tensors, self.first_tensor)

    def within(self, wanted: range) -> _Span | None:
        """Returns a span with only those tensors whose index in the group is in `wanted`, or None if there is no such
        tensor."""
        inside = [place for place, number in enumerate(self.numbers) if number in wanted]
        if not inside:
            return None
        tensors, numbers = [self.paged.tensors[place] for place in inside], tuple(self.numbers[p] for p in inside)
        return _Span(self.pool, PagedTensors(tensors), self.first_tensor + inside[0], numbers)


@dataclass
class _JobPart:
    """The part of a job that concerns one span. Block blocks[k] of the span's tensors is stored as page pages[k], or is
    loaded from it."""

    span: _Span
    pages: list[int]
    blocks: list[int]
    transfer: Transfer | None = None  # moves the coded pages; None before it begins, and if there are none

    def store(self, stream: torch.cuda.Stream | None) -> None:
        """Begins to store the blocks."""
        pool = self.span.pool
        assert pool.store is not None
        pool.expect(self)
        self.transfer = pool.store.store(
            self.pages, self.span.paged, self.blocks, first_tensor=self.span.first_tensor, stream=stream
        )

    def load(self, stream: torch.cuda.Stream | None) -> None:
        """Loads the raw pages, on the current stream, and begins to load the coded ones. If several pages go to the
        same block, only the last of them is loaded."""
        pool, first = self.span.pool, self.span.first_tensor
        if pool.store is None:
            raise RuntimeError("a load was submitted before any store")
        page_of = dict(zip(self.blocks, self.pages))
        kept = {block: pool.raw[page] for block, page in page_of.items() if first in pool.raw.get(page, ())}
        for block, tensors in kept.items():
            for number, tensor in self.span.columns():
                tensor[block].copy_(tensors[number], non_blocking=True)
        coded = {block: page for block, page in page_of.items() if block not in kept}
        if coded:
            self.transfer = pool.store.load(
                list(coded.values()), self.span.paged, list(coded), first_tensor=first, stream=stream
            )


@dataclass
class _Job:
    """A store or a load that has been submitted, in parts."""

    stores: bool
    parts: list[_JobPart]
    # Recorded before and after the job's work. None on the CPU.
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def is_done(self) -> bool:
        return self.events is None or self.events[1].query()

    def seconds(self) -> float | None:
        return None if self.events is None else self.events[0].elapsed_time(self.events[1]) * 1e-3

    def is_loaded(self) -> bool:
        """Waits for the transfers of a load. Returns whether all pages were stored and none was damaged."""
        try:
            for part in self.parts:
                if part.transfer is not None:
                    part.transfer.synchronize()
        except (IndexError, CorruptTableError):
            return False
        return True


class BlockStore(OfThisProcess):
    """A store that keeps blocks of layers as numbered pages, for engines that cannot lose a page.

    Layers are divided into groups. A page consists of one block of each layer of a group. Blocks of the same size and
    kind (see `kinds`) are coded in one pool, a `KVStore`. The codebook of a pool is learned from the blocks that are
    stored first. If a pool has no room for a page, the page is kept raw in pageable host memory until it is stored
    again.

    Every call of `store` or `load` submits a job. Jobs run on three streams of the store: one for stores, one for
    loads, and one for urgent loads. A job waits for the work that was queued on the current stream before the call.

    Example:
        >>> layers = [torch.randn(50, 2048).bfloat16().view(torch.int8) for _ in range(3)]
        >>> wide, narrow = layers[:2], [layers[2][:, :2048]]
        >>> blocks = ibp.kv.BlockStore([wide, narrow], num_pages=20, pool_bytes=1 << 18, dtype=torch.bfloat16)
        >>> blocks.store(1, {0: ([7, 8], [3, 5])})  # in group 0, pages 7 and 8 become copies of blocks 3 and 5
        >>> blocks.load(2, {0: ([8], [11])})
        >>> blocks.wait({1, 2})
        >>> blocks.finished()
        [(1, True, None), (2, True, None)]
        >>> torch.equal(layers[0][11], layers[0][5])
        True

    Args:
        groups: for each group, the tensors of its layers, int8 [num_blocks, size of a block in bytes]. Groups may share
            tensors. All groups use the same page numbers; a page belongs to the group that stored it last.
        num_pages: number of pages. They are numbered from 0 to num_pages - 1.
        pool_bytes: total size in bytes of the host memory of all pools.
        dtype: the dtype of the values in the blocks.
        level: level of the codebooks, see `ibp.compress`.
        kinds: a number for each tensor of each group, such as 0 for keys and 1 for values. Tensors of different kinds
            get different codebooks. None: all tensors are of the same kind.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    _instead = "load() its blocks into tensors, which can be pickled"

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        num_pages: int,
        pool_bytes: int,
        dtype: torch.dtype,
        level: str = "default",
        kinds: Sequence[Sequence[int]] | None = None,
    ) -> None:
        kinds = [[0] * len(tensors) for tensors in groups] if kinds is None else kinds
        if [*map(len, kinds)] != [*map(len, groups)]:
            raise ValueError(f"kinds are of {[*map(len, kinds)]} tensors by group; wanted {[*map(len, groups)]}")
        check_scheme("planes", level=level)
        self._num_pages, self._pool_bytes = num_pages, whole_number("pool_bytes", pool_bytes, 0)
        self._device = next(tensor.device for tensors in groups for tensor in tensors)
        self._pools: dict[tuple[int, int], _Pool] = {}  # by (kind, size of a block in bytes)
        self._spans = [list(self._spans_of(*group, dtype, level)) for group in zip(groups, kinds)]
        self._some_spans: dict[tuple[int, range], list[_Span]] = {}  # by (group, range of tensors)
        self._jobs: dict[int, _Job] = {}  # in the order in which they were submitted
        self._finished: list[tuple[int, bool, float | None]] = []
        on_gpu = self._device.type == "cuda"
        self._store_stream, self._load_stream, self._urgent_stream = (
            torch.cuda.Stream(self._device) if on_gpu else None for _ in range(3)
        )

    def _spans_of(
        self, tensors: Sequence[torch.Tensor], kinds: Sequence[int], dtype: torch.dtype, level: str
    ) -> Iterator[_Span]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, (tensor, kind) in enumerate(zip(tensors, kinds)):
            if tensor.dim() != 2 or tensor.itemsize != 1:
                raise ValueError(
                    f"a tensor has {list(tensor.shape)} {tensor.dtype}; wanted [num_blocks, bytes of a block] of int8"
                )
            alike.setdefault((kind, tensor.shape[1], tensor.shape[0], tensor.stride(0)), []).append(number)
        taken: Counter[tuple[int, int]] = Counter()  # number of the group's tensors in each pool
        for (kind, block_bytes, *_), numbers in alike.items():
            key = kind, block_bytes
            if key not in self._pools:
                self._pools[key] = _Pool(block_bytes, dtype, level, self._device)
            pool, first = self._pools[key], taken[key]
            taken[key] += len(numbers)
            pool.num_tensors = max(pool.num_tensors, taken[key])
            yield _Span(pool, PagedTensors([tensors[number] for number in numbers]), first, tuple(numbers))

    @property
    def num_raw_pages(self) -> int:
        """Number of pages that are kept raw because the pools had no room for them."""
        return sum(len(pool.raw) for pool in self._pools.values())

    @property
    def pools(self) -> list[KVStore]:
        """The stores: one for each size and kind of blocks that has been stored."""
        return [pool.store for pool in self._pools.values() if pool.store is not None]

    @property
    def may_lose(self) -> bool:
        """Whether the pools may turn out to have no room for blocks that are being stored. If so, do not change these
        blocks until `wait` has returned for their jobs: if a pool had no room for a page, the store makes a raw copy of
        the page from its blocks."""
        return any(pool.may_lose for pool in self._pools.values())

    def store(self, job: int, moves: Moves, stream: torch.cuda.Stream | None = None) -> None:
        """Begins to store blocks, after the work that is queued on the current stream.

        Args:
            job: the id of the job, chosen by the caller.
            moves: {group: (pages, blocks)}: block blocks[k] of the group is stored as page pages[k].
            stream: the stream that stores. None: the store's own stream for stores.
        """
        entry, stream = _Job(True, list(self._parts(moves))), stream or self._store_stream
        self._make_stores(entry.parts)
        with self._timed(entry, stream):
            for part in entry.parts:
                part.store(stream)
        self._jobs[job] = entry

    def load(
        self,
        job: int,
        moves: Moves,
        urgent: bool = False,
        *,
        tensors: range | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Begins to load pages into blocks, after the work that is queued on the current stream. If several pages are
        to be loaded into the same block, only the last of them is loaded.

        Args:
            job: the id of the job, chosen by the caller.
            moves: {group: (pages, blocks)}: page pages[k] is loaded into block blocks[k] of the group.
            urgent: whether the load may overtake earlier loads that are not urgent, or run at the same time as they do.
            tensors: which tensors of a group to load, as a range of indices in the group, for example the tensors of
                one layer. None: all tensors.
            stream: the stream that loads. None: the store's own stream for loads, or for urgent loads.

        Raises:
            RuntimeError: nothing has been stored yet.
        """
        stream = stream or (self._urgent_stream if urgent else self._load_stream)
        entry = _Job(False, list(self._parts(moves, tensors)))
        with self._timed(entry, stream):
            for part in entry.parts:
                part.load(stream)
        self._jobs[job] = entry

    def finished(self) -> list[tuple[int, bool, float | None]]:
        """Returns (job, success, seconds) for each job that has ended since the last call, in the order of submission.

        seconds is the time that the job took on the GPU, or None on the CPU. A load fails if one of its pages was never
        stored or is damaged; the blocks of this page are then zeros. Stores always succeed.
        """
        self._settle()
        if not self._jobs:
            for pool in self._pools.values():
                pool.compact()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, jobs: set[int] | None = None) -> None:
        """Makes the host wait for jobs. Afterwards the caller may write to the blocks that these jobs stored. jobs: the
        ids of the jobs. None: all jobs."""
        for job in self._jobs if jobs is None else jobs:
            entry = self._jobs.get(job)
            if entry is not None and entry.events is not None:
                entry.events[1].synchronize()
        self._settle()

    def close(self) -> None:
        """Waits for all jobs and frees the pools."""
        self.wait()
        self._finished.clear()
        for pool in self._pools.values():
            pool.store = None
            pool.raw.clear()

    # ---- implementation ----

    def _make_stores(self, parts: list[_JobPart]) -> None:
        all_bytes = sum(pool.page_bytes * pool.num_tensors for pool in self._pools.values())
        for pool in self._pools.values():
            mine = [part for part in parts if part.span.pool is pool]
            if mine and pool.store is None:
                share = self._pool_bytes * pool.page_bytes * pool.num_tensors // all_bytes
                pool.make_store(mine, self._num_pages, share)

    def _parts(self, moves: Moves, tensors: range | None = None) -> Iterator[_JobPart]:
        for group, (pages, blocks) in moves.items():
            for span in self._spans[group] if tensors is None else self._spans_with(group, tensors):
                yield _JobPart(span, pages, blocks)

    def _spans_with(self, group: int, tensors: range) -> list[_Span]:
        if (group, tensors) not in self._some_spans:
            found = (span.within(tensors) for span in self._spans[group])
            self._some_spans[group, tensors] = [span for span in found if span is not None]
        return self._some_spans[group, tensors]

    @contextlib.contextmanager
    def _timed(self, entry: _Job, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """A context in which a job's work is queued on a stream, after the work of the current stream. An event is
        recorded before the job's work, and another one after it. stream: None on the CPU, where nothing is recorded."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            entry.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            entry.events[0].record()
            yield
            entry.events[1].record()

    def _settle(self) -> None:
        """Completes the jobs whose work has ended, in the order of submission, and adds them to `_finished`. For a
        store, drops the earlier raw copies of its pages, and makes raw copies of the pages for which the pool had no
        room. The blocks of these pages are still unchanged, because callers obey the rule of `may_lose`."""
        for job, entry in [(job, entry) for job, entry in self._jobs.items() if entry.is_done()]:
            if entry.stores:
                self._keep_lost(entry.parts)
            success = entry.stores or entry.is_loaded()
            del self._jobs[job]  # only now: if a line before raises, the next call tries again
            self._finished.append((job, success, entry.seconds()))
        if not any(entry.stores for entry in self._jobs.values()):
            for pool in self._pools.values():
                pool.recount()

    def _keep_lost(self, parts: list[_JobPart]) -> None:
        """Drops the raw copies of the pages of a store, and makes raw copies of the pages that were lost."""
        pages = [page for part in parts for page in part.pages]
        for pool in self._pools.values():  # all pools, because a page may have belonged to another group before
            for page in pages:
                pool.raw.pop(page, None)
        for part in parts:
            assert part.transfer is not None
            part.span.pool.keep(part, set(part.transfer.lost()))
