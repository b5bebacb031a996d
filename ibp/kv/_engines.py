"""The stores of pages on which adapters of serving engines build. Both keep their pages in `KVStore`s. They differ in
what happens to a page for which there is no room.

`BlockStore` keeps blocks of layers as numbered pages, and loses no page. Blocks of different layers may have different
sizes. A pool (`_Pool`) keeps the pages of blocks of one size and kind, coded in a `KVStore`, or raw in host memory if
the store has no room. A span (`_Span`) holds the tensors of a group of layers whose blocks go to one pool. Pools and
spans stay as long as the store. A call of `store` or `load` submits a job (`_Job`), which has a transfer for each span
that the job concerns. When the work of a store has ended, its job is settled: the pages for which a pool had no room
are copied from their blocks.

`KeyedPages` finds pages of one size by keys, and drops the least recently used pages when it is full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._common.arguments import whole_number
from .._common.process import ForkLock, OfThisProcess
from .._machine.memory import usual
from .._rows.geometry import raw_row_overflow
from .._rows.handle import CorruptTableError
from .._rows.learning import check_scheme
from ._paged import PagedTensors
from ._store import KVStore, KVStoreStats, Transfer

# ---- blocks of layers ----

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

    def make_store(self, parts: list[tuple[_Span, list[int]]], num_pages: int, pool_bytes: int) -> None:
        """Makes the store. parts: the spans of this pool whose blocks are stored first, with the numbers of these
        blocks, from which the codebook is learned."""
        sample = []
        for span, blocks in parts:
            tensors = span.paged.tensors
            count = max(1, _SAMPLE_BYTES // (len(parts) * len(tensors) * self.page_bytes))
            some = torch.as_tensor(blocks[:count], device=self._device)
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

    def put(self, span: _Span, pages: list[int], blocks: list[int], stream: torch.cuda.Stream | None) -> Transfer:
        """Begins to store block blocks[k] of a span as page pages[k]. Adds to `may_use` the size in bytes of the
        overflow that the pages need if all of their rows are stored raw."""
        assert self.store is not None
        place, num_bytes = self.store.place, len(pages) * len(span.paged) * self.page_bytes
        raw_bytes = raw_row_overflow(place.row_bytes, place.slot_bytes)
        self.may_use += num_bytes // place.row_bytes * raw_bytes
        return self.store.store(pages, span.paged, blocks, first_tensor=span.first_tensor, stream=stream)

    def keep(self, span: _Span, pages: list[int], blocks: list[int], lost: set[int]) -> None:
        """Makes raw copies of those pages that are in `lost`, for which the store had no room. blocks: the blocks from
        which the pages were stored."""
        self._lost_some = self._lost_some or bool(lost)
        for page, block in zip(pages, blocks):
            if page in lost:
                kept = {n: tensor[block].to("cpu", copy=True) for n, tensor in span.columns()}
                self.raw.setdefault(page, {}).update(kept)

    def get(
        self, span: _Span, pages: list[int], blocks: list[int], stream: torch.cuda.Stream | None
    ) -> Transfer | None:
        """Loads those pages that are raw, on the current stream, and begins to load the coded ones. Returns the
        transfer of the coded pages, or None if there are none. If several pages go to the same block, only the last of
        them is loaded."""
        if self.store is None:
            raise RuntimeError("a load was submitted before any store")
        page_of, first = dict(zip(blocks, pages)), span.first_tensor
        kept = {block: self.raw[page] for block, page in page_of.items() if first in self.raw.get(page, ())}
        for block, tensors in kept.items():
            for number, tensor in span.columns():
                tensor[block].copy_(tensors[number], non_blocking=True)
        coded = {block: page for block, page in page_of.items() if block not in kept}
        if not coded:
            return None
        return self.store.load(list(coded.values()), span.paged, list(coded), first_tensor=first, stream=stream)

    @property
    def may_lose(self) -> bool:
        """Says whether `store` may still find that a page which is being stored has no room."""
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
        """Returns a span with only those tensors whose index in the group is in `wanted`. Returns None if none of the
        tensors is wanted."""
        inside = [place for place, number in enumerate(self.numbers) if number in wanted]
        if not inside:
            return None
        tensors, numbers = [self.paged.tensors[place] for place in inside], tuple(self.numbers[p] for p in inside)
        return _Span(self.pool, PagedTensors(tensors), self.first_tensor + inside[0], numbers)


@dataclass
class _Job:
    """Holds a store or a load that has been submitted.

    Attributes:
        stores: whether the job is a store.
        moves: the pages and blocks of each group.
        transfers: for each span that the job concerns, (group, span, the transfer of its coded pages). The transfer is
            None if a load has only raw pages.
        events: recorded before and after the job's work. None on the CPU.
        has_failed: whether `is_loaded` has found a page that was not stored, or was damaged.
    """

    stores: bool
    moves: Moves
    transfers: list[tuple[int, _Span, Transfer | None]] = field(default_factory=list)
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    has_failed: bool = False

    def concerns(self, wanted: set[int]) -> bool:
        """Returns whether the job stores or loads one of the given pages."""
        return any(not wanted.isdisjoint(pages) for pages, _ in self.moves.values())

    def is_done(self) -> bool:
        return self.events is None or self.events[1].query()

    def seconds(self) -> float | None:
        return None if self.events is None else self.events[0].elapsed_time(self.events[1]) * 1e-3

    def is_loaded(self) -> bool:
        """Waits for the transfers of a load. Returns whether all pages were stored and none was damaged."""
        for _, _, transfer in self.transfers:
            try:
                if transfer is not None:
                    transfer.synchronize()
            except (IndexError, CorruptTableError):
                self.has_failed = True  # Others may have noted faults, too, which later jobs must not find.
        return not self.has_failed


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
        """Begins to store blocks, after the work that is queued on the current stream. If the call is interrupted, or
        fails when some of the blocks have been stored, none of the pages can be loaded until it is stored again.

        Args:
            job: the id of the job, chosen by the caller.
            moves: {group: (pages, blocks)}: block blocks[k] of the group is stored as page pages[k].
            stream: the stream that stores. None: the store's own stream for stores.
        """
        entry, stream = _Job(True, dict(moves)), stream or self._store_stream
        spans = [(group, span) for group in entry.moves for span in self._spans[group]]
        self._make_stores([(span, entry.moves[group][1]) for group, span in spans])
        try:
            with self._timed(entry, stream):
                for group, span in spans:
                    entry.transfers.append((group, span, span.pool.put(span, *entry.moves[group], stream)))
            self._jobs[job] = entry
        except BaseException as error:
            if entry.transfers or not isinstance(error, Exception):
                self._remove(entry)
            raise

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

        A page is loaded as the last job that was submitted before has stored it. If this job has not ended, and the
        page is raw or may have no room in its pool, the host waits for the job. The engines of `ibp.integrations` load
        a page only after `finished` has reported the job that stored it, so they never wait here.

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
        entry = _Job(False, dict(moves))
        if self.num_raw_pages or self.may_lose:
            wanted = {page for pages, _ in entry.moves.values() for page in pages}
            stored = {job for job, each in self._jobs.items() if each.stores and each.concerns(wanted)}
            if stored:
                self.wait(stored)
        spans = [(group, span) for group in entry.moves for span in self._spans_with(group, tensors)]
        with self._timed(entry, stream):
            for group, span in spans:
                entry.transfers.append((group, span, span.pool.get(span, *entry.moves[group], stream)))
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

    def _make_stores(self, parts: list[tuple[_Span, list[int]]]) -> None:
        """Makes the stores of pools that have none. parts: the spans that are about to be stored, with the numbers of
        their blocks."""
        all_bytes = sum(pool.page_bytes * pool.num_tensors for pool in self._pools.values())
        for pool in self._pools.values():
            mine = [part for part in parts if part[0].pool is pool]
            if mine and pool.store is None:
                share = self._pool_bytes * pool.page_bytes * pool.num_tensors // all_bytes
                pool.make_store(mine, self._num_pages, share)

    def _spans_with(self, group: int, tensors: range | None) -> list[_Span]:
        """Returns the spans of a group. tensors: which of the group's tensors they have. None: all."""
        if tensors is None:
            return self._spans[group]
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
                self._keep_lost(entry)
            report = job, entry.stores or entry.is_loaded(), entry.seconds()
            left = {other: each for other, each in self._jobs.items() if other != job}
            # In one statement, so that no report is lost or given twice. If a line before raises, the next call tries
            # again.
            self._jobs, self._finished = left, [*self._finished, report]
        if not any(entry.stores for entry in self._jobs.values()):
            for pool in self._pools.values():
                pool.recount()

    def _keep_lost(self, entry: _Job) -> None:
        """Drops the raw copies of the pages of a store, and makes raw copies of the pages that were lost."""
        self._drop_raw(entry)
        for group, span, transfer in entry.transfers:
            assert transfer is not None
            span.pool.keep(span, *entry.moves[group], set(transfer.lost()))

    def _drop_raw(self, entry: _Job) -> None:
        """Drops the raw copies of the pages of a store."""
        for pool in self._pools.values():  # all pools, because a page may have belonged to another group before
            for pages, _ in entry.moves.values():
                for page in pages:
                    pool.raw.pop(page, None)

    def _remove(self, entry: _Job) -> None:
        """Removes the pages of a store that was interrupted, because some of their tensors may have new blocks, and
        others old ones. First waits for all jobs, so that earlier stores of these pages do not count them as lost."""
        self.wait()
        pages = {page for pages, _ in entry.moves.values() for page in pages if 0 <= page < self._num_pages}
        for store in self.pools:
            store.free(list(pages))
        self._drop_raw(entry)


# ---- pages by key ----

_logger = logging.getLogger(__name__)

# An empty page counts as this number of bytes, which is about the size of its key in host memory.
_KEY_BYTES = 256


class KeyedPages(OfThisProcess):
    """A store of pages of one size, which are found by keys. The pages are compressed in a `KVStore`. If there is no
    room for a new page, the least recently used page is dropped.

    The first page that is stored determines the page size, the codebook and the number of pages. A logger whose name
    begins with "ibp." logs the page size and the number of pages at level INFO. The first page must hold real keys and
    values, because the codebook and the size of slots are learned from it. If it is all zeros, slots are so small that
    almost every later page is refused. Later pages of a different size are refused, and a warning is logged for the
    first of them. A page is also refused if the pool's overflow has no room for it. Calls return when their work is
    done. Several threads may call at the same time.

    Example:
        >>> pages = torch.randn(3, 4096).mul(0.02).bfloat16()
        >>> kept = ibp.kv.KeyedPages(1 << 16, device="cpu")
        >>> kept.put("a", pages[0]), kept.put("b", pages[1]), "a" in kept, len(kept)
        (True, True, True, 2)
        >>> out = torch.empty_like(pages[0])
        >>> kept.get("a", out), torch.equal(out, pages[0]), kept.get("c", out)
        (True, True, False)

    Args:
        pool_bytes: size in bytes of the pool in host memory.
        device: the device that compresses and decompresses, as in `KVStore`. Pages themselves may be on the CPU or on
            that device.
        level: level of the codebook, see `ibp.compress`.
        on_drop: a function that is called with the key of each page that is dropped because room is needed or because
            the page is damaged. It must not store, load or delete pages of this object; if it does, RuntimeError is
            raised. None: no function is called.

    Attributes:
        store: the `KVStore`. None until a page that has bytes is stored.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    _instead = "get() its pages into tensors, which can be pickled"

    def __init__(
        self,
        pool_bytes: int,
        *,
        device: torch.device | str | int | None = None,
        level: str = "default",
        on_drop: Callable[[Any], None] | None = None,
    ) -> None:
        check_scheme("planes", level=level)
        self._pool_bytes, self._device = whole_number("pool_bytes", pool_bytes, 0), usual(device)
        self._level, self._on_drop = level, on_drop
        self._lock = ForkLock()
        self.store: KVStore | None = None
        self._pages: OrderedDict[Hashable, int] = OrderedDict()  # the most recently used page is last
        self._pins: Counter[Hashable] = Counter()
        self._free: list[int] = []
        self._has_warned = False  # whether a warning about a tensor of another size has been logged
        self._calls_on_drop = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, key: Hashable, page: torch.Tensor) -> bool:
        """Stores the bytes of a page, unless a page with this key is stored already. Returns whether a page with this
        key is stored afterwards.

        Returns False if there is no room for the page, for example because all pages are pinned, or if its size in
        bytes is not that of the first page. The dtype does not matter.

        Raises:
            TypeError: page is not a tensor.
        """
        if not isinstance(page, torch.Tensor):
            raise TypeError(f"page is a {type(page).__name__}; wanted a torch.Tensor")
        with self._changing():
            if key in self._pages:
                self._pages.move_to_end(key)
                return True
            page = page.detach().contiguous().view(1, -1)
            if self._page_bytes is not None and not self._has_size_of_pages(page):
                return False
            number = self._number_for(page)
            if number is None:
                return False
            self._pages[key] = number
            return True

    def get(self, key: Hashable, out: torch.Tensor) -> bool:
        """Loads the bytes of a page into a contiguous tensor of any dtype. Returns whether the page was loaded.

        Returns False if no page with this key is stored, or if the size of `out` in bytes is not that of a page. If the
        page is damaged, drops it and returns False.

        Raises:
            TypeError: out is not a tensor.
            ValueError: out is not contiguous.
        """
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
        if not out.is_contiguous():
            raise ValueError(f"out is not contiguous: its strides are {out.stride()}; wanted a contiguous tensor")
        with self._changing():
            if key not in self._pages or not self._has_size_of_pages(out):
                return False
            if self.store is not None and not self._is_got(self.store, key, out):
                return False
            self._pages.move_to_end(key)
            return True

    def touch(self, keys: Iterable[Hashable]) -> None:
        """Marks pages as used now, the last key as the most recently used. Keys that are not stored are ignored."""
        with self._lock:
            for key in keys:
                if key in self._pages:
                    self._pages.move_to_end(key)

    def pin(self, key: Hashable) -> bool:
        """Protects a page from being dropped until `unpin` has been called as often as `pin`. Returns False if no page
        with this key is stored."""
        with self._lock:
            if key not in self._pages:
                return False
            self._pins[key] += 1
            return True

    def unpin(self, key: Hashable) -> None:
        """Undoes one `pin`."""
        with self._lock:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                self._pins.pop(key, None)

    def delete(self, key: Hashable) -> bool:
        """Removes a page, even if it is pinned. Returns False if no page with this key is stored."""
        with self._changing():
            if key not in self._pages:
                return False
            self._forget(key)
            return True

    def leading(self, keys: Iterable[Hashable]) -> int:
        """Returns the number of keys before the first key that is not stored."""
        return sum(1 for _ in itertools.takewhile(self._pages.__contains__, keys))

    def restorable(self, keys: Iterable[Hashable], window: int) -> set[int]:
        """Returns the lengths of the prefixes of `keys` for which layers that look back at most `window` keys can be
        restored. These are the prefixes whose last `window` keys are stored, and the prefixes of fewer than `window`
        keys whose keys are all stored."""
        run, lengths = 0, set()
        for length, key in enumerate(keys, 1):
            run = run + 1 if key in self._pages else 0
            if run >= min(length, window):
                lengths.add(length)
        return lengths

    def stats(self) -> KVStoreStats:
        """Returns the store's counts and sizes."""
        with self._lock:
            found = self.store.stats() if self.store is not None else KVStoreStats(0, 0, 0, 0, 0, 0)
            return dataclasses.replace(found, stored_pages=len(self._pages))

    def clear(self) -> None:
        """Removes all pages."""
        with self._changing():
            self._pages.clear()
            self._pins.clear()
            if self.store is not None:
                self.store.clear()
                self._count_free()

    # ---- implementation ----

    @property
    def _page_bytes(self) -> int | None:
        """Size in bytes of a page, or None before the first page."""
        if self.store is not None:
            return self.store.page_bytes
        return 0 if self._pages else None

    def _has_size_of_pages(self, page: torch.Tensor) -> bool:
        """Returns whether a tensor has the size of the first page in bytes. Logs a warning for the first tensor that
        has another size."""
        if page.nbytes != self._page_bytes and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "ibp: a page of %s bytes is refused, as others may be; wanted %s bytes, the size of the first page",
                f"{page.nbytes:,}",
                f"{self._page_bytes:,}",
            )
        return page.nbytes == self._page_bytes

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """A context for calls that change which page numbers are free. It holds the lock. If the call raises or is
        interrupted, it rebuilds the list of free numbers."""
        with self._lock:
            if self._calls_on_drop:
                raise RuntimeError(
                    "on_drop must not store, load or delete pages; note the key and do it after the call"
                )
            try:
                yield
            except BaseException:
                self._count_free()
                raise

    def _count_free(self) -> None:
        """Rebuilds the list of the page numbers that are free."""
        taken, count = set(self._pages.values()), 0 if self.store is None else self.store.num_pages
        self._free = [number for number in reversed(range(count)) if number not in taken]

    def _number_for(self, page: torch.Tensor) -> int | None:
        """Stores a page under a free number, dropping another page if necessary. Returns the number, or None if there
        is no room for the page."""
        if not page.nbytes:  # only the key of an empty page has to be kept
            return 0 if len(self._pages) < self._pool_bytes // _KEY_BYTES or self._drop_oldest() else None
        store, free = self.store, self._free
        if store is None:
            store = KVStore(
                page, page_bytes=page.nbytes, pool_bytes=self._pool_bytes, level=self._level, device=self._device
            )
            free = list(range(store.num_pages))[::-1]
        if not (free or self._drop_oldest()):
            return None
        number = free.pop()
        if not self._is_put(store, number, page.to(store.device)):
            free.append(number)
            return None
        if self.store is None:
            _logger.info(
                "ibp: the first page has %s bytes, which all pages must have; by its codebook %s pages fit the pool, "
                "%.2f times as many as raw ones",
                f"{page.nbytes:,}",
                f"{store.num_pages:,}",
                store.gain,
            )
        self.store, self._free = store, free  # only now: after a refused first page, the next one may have another size
        return number

    def _drop_oldest(self) -> bool:
        """Drops the least recently used page that is not pinned. Returns False if all pages are pinned."""
        oldest = next((key for key in self._pages if key not in self._pins), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, key: Hashable) -> None:
        self._forget(key)
        if self._on_drop is not None:
            self._calls_on_drop = True
            try:
                self._on_drop(key)
            finally:
                self._calls_on_drop = False

    def _forget(self, key: Hashable) -> None:
        number = self._pages.pop(key)
        self._pins.pop(key, None)
        if self.store is not None:
            self._free.append(number)

    def _is_put(self, store: KVStore, number: int, page: torch.Tensor) -> bool:
        if not store.store([number], page, [0]).lost():
            return True
        return store.compact_if_due() and not store.store([number], page, [0]).lost()

    def _is_got(self, store: KVStore, key: Hashable, out: torch.Tensor) -> bool:
        near = out if out.device == store.device else torch.empty_like(out, device=store.device)
        try:
            store.load([self._pages[key]], near.view(1, -1), [0]).synchronize()
        except (IndexError, CorruptTableError):
            self._drop(key)
            return False
        if near.device != out.device:
            out.copy_(near)
        return True
