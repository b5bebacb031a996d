"""`RowCache` keeps hot rows of a table in the memory of GPUs, in compressed form."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .._common.arguments import sms_of, whole_number
from .._common.manners import Statistics, TensorManners
from .._common.modes import outside_of_graphs
from .._common.process import OfThisProcess
from .._fetch import gather
from .._fetch.calls import (
    ID_DTYPES,
    IN_ORDER,
    PLANNED,
    Ids,
    check_out,
    check_range,
    flat_ids,
    refusal,
    refuse_mapped,
    target_of,
)
from .._fetch.gather import raise_for
from .._machine import memory
from .._rows.geometry import rows_of
from .._rows.handle import Handle, new_record
from .._rows.table import check_can_change, faults_of, handle_on, is_refused
from .._tables.changes import changed_items
from .._tables.coded_rows import CodedRows, live_table
from .._tables.compressed_tensor import CompressedTensor
from . import _peers
from ._slabs import (
    LRU_WAYS,
    MAX_SLABS,
    STATIC_WAYS,
    CacheState,
    Generation,
    Hotness,
    are_present,
    copy_maps_near,
    filled_slab,
    hottest_first,
    in_sectors,
    plan_slabs,
    replacing_slab,
    slot_for,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

POLICIES = ("static", "lru")
# The items with which an lru cache is first filled get their slots in at least this many calls of `_claim`, or in one
# call for each item if there are fewer items. One call would not do, because rows that get slots in the same call do
# not replace each other.
_LEAST_PARTS = 16
Device = torch.device | str | int


@dataclass(frozen=True)
class CacheStats(Statistics):
    """The counts of lookups since the last `reset_stats`, and the capacity of the cache. All counts are of rows, the
    units of coding; an item of the table consists of one or more rows.

    Attributes:
        own_hits: number of rows that were found in the slab of the requesting device.
        peer_hits: number of rows that were found in the slab of another device.
        hits_of_slabs: for each slab, the number of rows that were found in it, whichever device requested them.
        misses: number of rows that came from the table. Default rows, which have no bytes, are neither hits nor misses.
        link_bytes: total size of the missed rows in bytes, each row rounded up to whole 32-byte sectors.
        capacity: number of rows for which the cache has room.
        raw_capacity: number of raw rows that the same memory would hold without a map.
    """

    __module__ = "ibp.cache"

    own_hits: int
    peer_hits: int
    hits_of_slabs: tuple[int, ...]
    misses: int
    link_bytes: int
    capacity: int
    raw_capacity: int

    @property
    def hits(self) -> int:
        """Number of rows that were found in the cache."""
        return self.own_hits + self.peer_hits

    @property
    def hit_rate(self) -> float:
        """Fraction of hits among the requested rows that have bytes; 0 if no rows were requested."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class RowCache(OfThisProcess, TensorManners):
    """A cache of a table's hot rows in the memory of one or more GPUs, in compressed form (Legion's cache in the
    paper's section 5). If rows compress to half their size, twice as many fit.

    In one call, `index_select` reads rows that are cached on this GPU from the GPU's memory, rows that are cached on
    other GPUs over NVLink, and all other rows from the table. No GPU waits for the host. The call can be captured in a
    CUDA graph after one call outside of a graph. With devices="cpu" the CPU does all of the work.

    A cache can be used wherever a table is read; the adapters in `ibp.integrations` accept it as a table. The cache
    keeps the table alive. A device without a slab gets all rows from the table. The exception is a cache that is
    writable, or whose table is an `ibp.CodedRows`: the cache's first device looks the rows up, and the rows are copied
    from that device. If a GPU cannot read the slab that holds a row, it gets the row from the table.

    Several threads may use a cache at the same time. The work of calls that change the cache (`update_`, `invalidate`,
    and lookups in a cache that replaces rows) is ordered with the cache's other work on all streams, except work in
    CUDA graphs.

    Example:
        >>> table = ibp.compress(torch.randn(1000, 1024).bfloat16(), device="cpu", memory="host")
        >>> cache = ibp.RowCache(table, budget_bytes=2**18, hotness=torch.arange(1000), devices="cpu")
        >>> rows = cache.index_select([999, 998, 0])
        >>> cache.stats()
        CacheStats(own_hits=2, ..., misses=1, ...)

    Args:
        table: an `ibp.CompressedTensor` whose items are whole rows, in pinned memory or on the cache's device; or an
            `ibp.CodedRows`, whose rows are the items: [num_rows, row_bytes] of uint8. If `ibp.encode_into` has replaced
            rows there, call `invalidate` for them.
        budget_bytes: size in bytes of the device memory of each slab, including its map and everything else that the
            cache keeps there; 0 or more. The index that the table keeps on a GPU is not counted. During `refill` the
            old and the new slabs exist at the same time, and together take up to twice this size.
        hotness: the items to cache: a number for each item, [num_items], larger for hotter items (such as degrees of
            nodes, or the result of `ibp.cache.count_accesses`); or a list of ids, the hottest first. None: nothing is
            cached until `refill` (a RuntimeWarning says so) or, with "lru", until rows are requested. An empty list:
            nothing is cached, and there is no warning.
        devices: 1 to 8 devices, each of which has a slab. The hash of a row's number determines its slab. None: the
            device of the `ibp.CodedRows`, or of a table on a GPU. For a table in host memory, the current GPU, or the
            CPU if there is no GPU.
        policy: "static": only `refill` changes which rows are cached. "lru": requested rows replace the least recently
            used rows; only for a cache on one device.
        writable: whether `update_` changes cached rows in their slots, and `flush` changes them in the table. Only for
            static caches.
        group: a process group of torch.distributed whose ranks are processes of one machine, at most 8. Each rank has a
            slab on one device, and reads the slabs of the others by CUDA IPC. All ranks must give the same table
            (shared or not), the same budget and the same hotness. The constructor and `refill` are collective calls;
            other calls are not. Before a process ends, all ranks must call `refill([])` or a barrier. Only for static
            caches that are not writable.
        slot_bytes: size in bytes of a row's slot in a cache that is writable or replaces rows, rounded up to a multiple
            of 32. Rows that do not fit in a slot are not cached. None: a size in which 99.9 % of the table's rows fit,
            plus a sixteenth if the cache is writable. If no row of the table has bytes yet, a slot has the size of a
            raw row.

    Raises:
        TypeError: table, budget_bytes or hotness has a wrong type.
        ValueError: an argument is out of range, or two arguments exclude each other.
        IndexError: hotness has an id that is out of range.
        RuntimeError: another rank of the group has failed, or does not take part.
        torch.OutOfMemoryError: the device does not have enough memory.
    """

    __module__ = "ibp"

    _instead = (
        "its rows are in the memory of this process's devices. Send the table, which is shared, and make a cache of it "
        "there"
    )

    def __init__(
        self,
        table: CompressedTensor | CodedRows,
        budget_bytes: int,
        hotness: Hotness | None = None,
        *,
        devices: Device | Sequence[Device] | None = None,
        policy: str = "static",
        writable: bool = False,
        group: ProcessGroup | None = None,
        slot_bytes: int | None = None,
    ) -> None:
        self._members = None if group is None else _peers.members_of(group)

        def set_up() -> None:
            """Sets up an empty cache."""
            self.table, self.view, self._is_of_place = table, _view_of(table), isinstance(table, CodedRows)
            self.budget_bytes = whole_number("budget_bytes", budget_bytes, 0, 2**40)
            self.devices = _checked_devices(devices, table, self.view)
            self.policy, self.writable, self._given_slot_bytes = policy, writable, slot_bytes
            _check_policy(self)
            if slot_bytes is not None:
                most = in_sectors(self.view.row_bytes)
                self._given_slot_bytes = in_sectors(whole_number("slot_bytes", slot_bytes, 1, most))
            self._state = CacheState(self.view, self.devices, writable, policy == "lru")
            for device in self._state.serving:
                handle_on(self.view, device)
            self._state.generation = self._made(None)

        if self._members is None:
            set_up()
        else:
            _peers.agree(self._members, self, set_up, hotness is not None)
        if hotness is not None:
            self.refill(hotness)
        elif self.policy == "static" and self.budget_bytes:
            warnings.warn(
                "the cache holds no rows, so that all come from the table, until its refill(hotness): give hotness (a "
                "number for each item, or a list of ids), or policy='lru'; hotness=[] begins without rows",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- properties ----

    @property
    def shape(self) -> torch.Size:
        """The shape of the table."""
        return self.view.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the table."""
        return self.view.dtype

    @property
    def device(self) -> torch.device:
        """The device of the table. Slabs are on `devices`."""
        return self.view.device

    @property
    def nbytes(self) -> int:
        """Size in bytes of the cache on all its devices, including maps and counters."""
        return self._state.generation.nbytes + sum(8 * counts.numel() for counts in self._state.counts.values())

    @property
    def capacity(self) -> int:
        """Number of rows for which the cache has room."""
        return self._state.generation.capacity

    @property
    def num_cached_rows(self) -> int:
        """Number of cached rows. Waits for the work on the cache's devices."""
        return self._cached_rows().numel()

    def _cached_rows(self) -> torch.Tensor:
        """Returns the numbers of the cached rows, int64 on the CPU."""
        with self._state.lock:
            self._state.synchronize()
            maps = [slab.map for _, slab in self._state.generation]
            rows = [held[are_present(held[:, 1]) & (held[:, 0] >= 0), 0].cpu() for held in maps]
        return torch.cat(rows)

    def cached_ids(self) -> torch.Tensor:
        """Returns the ids of the items whose rows are all cached: int64 on the CPU, in increasing order. Waits for
        the work on the cache's devices."""
        items, counts = (self._cached_rows() // self._state.rows_per_item).unique(return_counts=True)
        return items[counts == self._state.rows_per_item]

    def is_pinned(self) -> bool:
        """Returns whether the table is in pinned memory."""
        return self.view.is_pinned()

    def pin_memory(self) -> RowCache:
        """Returns the cache itself. The table's memory does not change."""
        return self

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.devices))
        kind = f"policy={self.policy!r}" + (", writable=True" if self.writable else "")
        of_group = f", rank {self._members.rank} of {self._members.size}" if self._members is not None else ""
        return (
            f"ibp.RowCache(shape={list(self.shape)}, dtype={self.dtype}, {kind}, budget_bytes={self.budget_bytes:,}, "
            f"capacity={self.capacity:,} of {self.view.num_rows:,} rows, devices=[{where}]{of_group})"
        )

    # ---- reading ----

    def serves(self, device: torch.device) -> bool:
        """Returns whether rows can be looked up and decoded on a device."""
        return device in self._state.serving

    def index_select(
        self,
        ids: Ids,
        *,
        device: Device | None = None,
        out: torch.Tensor | None = None,
        check: bool = False,
        max_sms: int | None = None,
        in_order: bool = False,
    ) -> torch.Tensor:
        """Returns items of the table, as `ibp.index_select(table, ids)` does. Cached rows come from the cache.

        Args:
            ids: integers [K] in [0, N), on the CPU or a GPU.
            device: the device of the result. None: out's device, else that of ids.
            out: tensor of the table's dtype to write to. For a cache of an `ibp.CodedRows`, out may have any dtype, but
                must have the same size in bytes.
            check: whether to wait for the result and raise errors here. Otherwise, if ids on a GPU are out of range or
                rows are corrupt, the next call raises the error.
            max_sms: keep at most this many of the GPU's multiprocessors busy. None: all.
            in_order: whether ids on a GPU are nearly sorted. If False, many ids into a large table are sorted first.

        Returns:
            Tensor [K, ...]; out if it was given.

        Raises:
            TypeError, ValueError, IndexError, CorruptTableError: as in `ibp.index_select`.
            RuntimeError: the table has been refit, or its rows have been changed by something other than this cache.
        """
        if type(ids) is not torch.Tensor or ids.dtype not in ID_DTYPES or ids.dim() != 1:
            ids = flat_ids(ids)
        sms = 0 if max_sms is None else sms_of(max_sms)
        target = ids.device if device is None and out is None else target_of(device, out, ids.device)
        worker = target if target in self._state.serving else self._other_worker()
        if worker is None:
            self._state.check(self._state.generation)
            return self.view.index_select(ids, device=device, out=out, check=check, max_sms=max_sms)
        shape, given = (ids.shape[0], *self.view.geometry.item_shape), out
        if out is not None:
            given = _as_bytes(out, shape) if self._is_of_place else out
            check_out(given, shape, self.view.dtype)
        if ids.device != worker:
            if not ids.is_cuda or worker.type == "cpu":
                ids = ids.cpu()
                check_range(ids, self.view.geometry.num_items)
            ids = ids.to(worker)
        take = self._take_outside if torch.compiler.is_compiling() else self._take
        result = take(ids, sms, in_order, given if out is not None and out.device == worker else None)
        if check and worker.type == "cuda":
            faults_of(self.view).raise_when_done(worker)
        if out is None:
            return result if worker == target else result.to(target)
        if given is not None and result is not given:
            given.copy_(result.view(given.shape))
        return out

    def prefetch(
        self,
        ids: Ids,
        *,
        device: Device | None = None,
        out: torch.Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
        max_sms: int | None = None,
    ) -> gather.Prefetch:
        """Starts copying items to a GPU on another stream, as `CompressedTensor.prefetch` does. Cached rows come from
        the cache.

        Raises:
            ValueError: stream belongs to another device.

        It also raises what `index_select` raises.
        """
        cached: Any = self
        return gather.prefetch(cached, ids, device=device, out=out, stream=stream, max_sms=max_sms)

    def _take(self, ids: torch.Tensor, sms: int, in_order: bool, out: torch.Tensor | None) -> torch.Tensor:
        """Returns the items at `ids`, which must be on a device of the cache. If `out` is given, writes the items to
        `out` and returns `out`."""
        worker, view, way = ids.device, self.view, IN_ORDER if in_order else PLANNED
        handle = self._state.handle_on(worker)
        try:
            with self._state.lock:
                cache = self._state.described_on(worker)
                if out is None:
                    return torch.ops.ibp.take.default(handle.table, ids, handle.like, sms, way, 0, cache)
                torch.ops.ibp.take.out(handle.table, ids, out, sms, way, cache)
                return out
        except RuntimeError as error:
            if worker.type == "cpu":
                refuse_mapped(ids)
                check_range(ids, view.geometry.num_items)
                with self.found(ids.contiguous()) as (_, entries, slabs):
                    raise_for(view, ids, handle, entries=entries, slabs=slabs)
            raise refusal(error) from None

    _take_outside = outside_of_graphs(_take)

    @contextmanager
    def found(self, ids: torch.Tensor) -> Iterator[tuple[Handle, torch.Tensor, list[torch.Tensor]]]:
        """Looks items up on the current stream, for operations that read their rows on this stream.

        Yields (handle of the table, map entries, bytes of each slab). Map entries are int64 [K * number of rows of an
        item]: the entry of each row, 0 if the row is not cached. Only work that is launched within the `with` block may
        use these values.

        Args:
            ids: int32 or int64 [K], contiguous, on one of `devices`.
        """
        worker, view = ids.device, self.view
        handle = handle_on(view, worker)
        entries = torch.empty(ids.numel() * self._state.rows_per_item, dtype=torch.int64, device=worker)
        counts = self._state.counts[worker]
        with self._state.lock:
            generation = self._state.in_use(worker)
            if self.policy == "lru":
                self._claim(generation, ids, handle, entries, counts)
            else:
                torch.ops.ibp.find_cached.default(
                    ids,
                    self._state.rows_per_item,
                    view.row_bytes,
                    handle.parts.lengths,
                    generation.view_of(worker)[0],
                    generation.ways,
                    entries,
                    counts,
                )
            yield handle, entries, generation.view_of(worker)[1]

    def _claim(
        self,
        generation: Generation,
        ids: torch.Tensor,
        handle: Handle,
        entries: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> None:
        """Looks items up in a cache of policy "lru", and claims slots for rows that are not cached. entries: receives
        the map entries of the items' rows."""
        slab = generation.slabs[0]
        fault = new_record(ids.device)  # never read: the gather that later decodes a corrupt row reports it
        torch.ops.ibp.claim_cached.default(
            handle.table,
            ids,
            generation.ways,
            generation.slot_bytes,
            slab.bytes,
            slab.map,
            slab.stamps,
            slab.clock,
            entries,
            counts,
            fault,
        )

    def _other_worker(self) -> torch.device | None:
        """Returns the device that looks up and decodes rows for devices without a slab, or None if such devices read
        the table without the cache."""
        is_asked = bool(self._state.serving) and (self.writable or self._is_of_place)
        return self._state.serving[0] if is_asked else None

    def decompress(self, *, device: Device | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Flushes the cache, and returns the whole tensor from the table."""
        self.flush()
        return self.view.decompress(device=device, out=out)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Flushes the cache, and returns table[key] from the table."""
        self.flush()
        return self.view[key]

    def check(self) -> None:
        """Waits for the table's work on all GPUs, and raises IndexError or CorruptTableError if a GPU has recorded an
        error."""
        self.view.check()

    # ---- contents ----

    def refill(self, hotness: Hotness) -> RowCache:
        """Refills the cache with the hottest rows. Returns the cache.

        The new rows are copied to new memory, on a separate stream. Readers use the old rows until all new rows have
        been copied. Then the new rows replace the old ones, and the call returns. CUDA graphs that were captured before
        still read the old rows, whose memory is kept for these graphs. Capture the graphs again to use the new rows. A
        writable cache is flushed first.

        Args:
            hotness: as in the constructor.

        With a group this is a collective call: all ranks must give the same hotness (add up counts of accesses with
        `torch.distributed.all_reduce`). If one rank fails, all ranks raise, and all caches are unchanged.

        Raises:
            TypeError, ValueError, IndexError: hotness does not fit the table, or is not the same on all ranks.
            RuntimeError: another rank of the group has failed, or does not take part.
            torch.OutOfMemoryError: there is not enough memory for the old and the new rows together. The cache
                is unchanged.
        """
        with self._state.change_lock:
            self.flush()
            if self._members is None:
                self._swap(self._made(hottest_first(hotness, self.view.geometry.num_items)))
            else:
                self._swap(_peers.filled_by_all(self._members, self._state, hotness, self.budget_bytes))
                _peers.give_back(self._members)
        return self

    @property
    def _slab_devices(self) -> tuple[torch.device, ...]:
        """The device on which this process finds each slab."""
        return self.devices if self._members is None else self.devices * self._members.size

    def _made(self, items: torch.Tensor | None) -> Generation:
        """Returns a new generation that holds the rows of the hottest items, up to the budget. Waits until the
        generation is filled. items: ids, the hottest first. None: the generation is empty."""
        if items is None or self.view.geometry.item_bytes == 0:
            items = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._state.is_idle:
            nothing = items[:0], items[:0]
            slabs = tuple(filled_slab(self.view, *nothing, *place) for place in enumerate(self._slab_devices))
            return self._state.generation_of(slabs, STATIC_WAYS, 0, 0)
        items = items.to(self.devices[0])
        slot_bytes = 0  # 0: rows lie back to back, in a static cache that is not writable
        if self.policy != "static" or self.writable:
            slot_bytes = self._given_slot_bytes or slot_for(self.view, self.devices[0], self.writable)
        if self.policy == "lru":
            with self._state.beside():
                return self._replacing(slot_bytes, items)
        plans, copies_maps = plan_slabs(
            self.view,
            rows_of(items, self._state.rows_per_item),
            len(self._slab_devices),
            slot_bytes,
            self.budget_bytes,
            not self.writable,
        )
        with self._state.beside():
            slabs = tuple(
                filled_slab(self.view, *plan, number, device)
                for number, (plan, device) in enumerate(zip(plans, self._slab_devices))
            )
            capacity = sum(rows.numel() for rows, _ in plans)
            made = self._state.generation_of(slabs, STATIC_WAYS, slot_bytes, capacity)
            if copies_maps:
                self._state.wait_beside()  # the maps must be complete before they are copied
                made.near_maps = copy_maps_near(slabs)
        return made

    def _replacing(self, slot_bytes: int, items: torch.Tensor) -> Generation:
        """Returns a generation of an lru cache that already holds the hottest items. The items get their slots in the
        order of increasing hotness, so that the hottest item is the most recently used one. items: ids, the hottest
        first."""
        slab = replacing_slab(slot_bytes, self.budget_bytes, self.view.num_rows, self.devices[0])
        made = self._state.generation_of((slab,), LRU_WAYS, slot_bytes, slab.map.shape[0])
        held = min(items.numel(), made.capacity // self._state.rows_per_item)
        if held == 0:
            return made
        for part in items[:held].flip(0).split(max(1, held // _LEAST_PARTS)):
            entries = torch.empty(part.numel() * self._state.rows_per_item, dtype=torch.int64, device=slab.device)
            self._claim(made, part.contiguous(), handle_on(self.view, slab.device), entries, None)
        return made

    def _swap(self, made: Generation) -> None:
        """Replaces the generation in use. The memory of the old generation is freed when the streams that read it are
        done. In a group the call also waits for this process's GPUs, so that this process no longer reads memory that
        other processes lent for the old generation."""
        with self._state.lock:
            old, self._state.generation = self._state.generation, made
        if self._members is not None:
            self._state.synchronize()
        del old

    def invalidate(self, ids: Ids | None = None) -> None:
        """Removes the rows of items from the cache, and discards changes of these rows that have not been flushed.
        Afterwards the rows come from the table. Call it when the rows of the table or the `ibp.CodedRows` have changed.

        Args:
            ids: integers [K] in [0, N), on the CPU or a GPU. None: all items. On a GPU, ids out of range have no
                effect.

        Raises:
            TypeError, ValueError, IndexError: as in `index_select`.
            RuntimeError: the cache belongs to a group.
        """
        self._check_alone()
        rows = None
        if ids is not None:
            ids = flat_ids(ids)
            if not ids.is_cuda:
                check_range(ids, self.view.geometry.num_items)
            rows = rows_of(ids, self._state.rows_per_item)
        with self._state.change_lock, self._state.lock:
            self._state.forget(rows)
            self._state.mark_current()

    # ---- changing ----

    def put_items(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Changes items as `update_` does. ids must be int64, all different and in range; rows must fit the table."""
        self._state.put_items(ids, rows)

    def update_(self, ids: Ids, rows: torch.Tensor) -> RowCache:
        """Sets table[ids] = rows, as `CompressedTensor.update_` does. Returns the cache.

        A writable cache encodes cached rows into their slots, with the table's codebook, and the table keeps the old
        rows until `flush`. Rows that are not cached, or that no longer fit in their slots, are written to the table. A
        cache that is not writable writes all rows to the table and removes them from its slabs. If ids are on a GPU,
        the call waits for them.

        Args:
            ids: items to change, int32 or int64 [K]. If an id occurs several times, its last row is used.
            rows: [K, ...] tensor of the table's dtype, on any device.

        Raises:
            IndexError: an id is out of range. No row has been changed.
            TypeError, ValueError: ids or rows do not fit, or the cache is of an `ibp.CodedRows`.
            RuntimeError: the table or the cache is shared with other processes.
        """
        self._check_alone()
        if isinstance(self.table, CodedRows):
            raise ValueError(
                "rows of an ibp.CodedRows are changed by ibp.encode_into: invalidate them in the cache then"
            )
        self._state.put_items(*changed_items(self.view, ids, rows))
        return self

    def flush(self) -> None:
        """Writes changed rows back to the table. They stay cached. Does nothing if no rows have changed.

        Raises:
            RuntimeError: the table is shared with other processes.
        """
        if self.writable:
            self._state.flush()

    def _check_alone(self) -> None:
        """Raises RuntimeError if the cache belongs to a group, because other processes read its slabs."""
        if self._members is not None:
            raise RuntimeError(
                "rows of a cache that the processes of a group have in common stay as they are: change the table on "
                "all ranks, and refill the cache"
            )

    # ---- statistics ----

    def stats(self) -> CacheStats:
        """Returns the counts of lookups. Waits for the work on the cache's devices."""
        of_slabs, own, misses, link_bytes = [0] * len(self._slab_devices), 0, 0, 0
        self._state.synchronize()
        for device, counts in self._state.counts.items():
            *hits, missed, num_bytes = counts.tolist()
            misses, link_bytes = misses + missed, link_bytes + num_bytes
            for slab in range(len(of_slabs)):
                of_slabs[slab] += hits[slab]
                is_own = self.devices[slab] == device if self._members is None else slab == self._members.rank
                own += hits[slab] if is_own else 0
        return CacheStats(
            own,
            sum(of_slabs) - own,
            tuple(of_slabs),
            misses,
            link_bytes,
            self.capacity,
            self.budget_bytes // self.view.row_bytes * len(of_slabs),
        )

    def reset_stats(self) -> None:
        """Sets all counts to zero, in order with the work on the current streams."""
        for counts in self._state.counts.values():
            counts.zero_()


# ---- arguments ----


def _view_of(table: Any) -> CompressedTensor:
    """If `table` is an `ibp.CodedRows`, returns a table over its memory, which always reads the present rows. Otherwise
    returns `table` itself."""
    if isinstance(table, CodedRows):
        return live_table(table)
    if not isinstance(table, CompressedTensor):
        raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor or an ibp.CodedRows")
    item_bytes = table.geometry.item_bytes
    if item_bytes % table.row_bytes or not table.shape:
        raise ValueError(
            f"the table has items of {item_bytes:,} bytes in rows of {table.row_bytes:,}; wanted items of whole rows"
        )
    return table


def _checked_devices(
    devices: Device | Sequence[Device] | None, table: Any, view: CompressedTensor
) -> tuple[torch.device, ...]:
    if devices is None:
        devices = table.device if isinstance(table, CodedRows) or view.is_cuda else memory.usual(None)
    given = [devices] if isinstance(devices, (torch.device, str, int)) else list(devices)
    found = tuple(memory.canonical(device) for device in given)
    if not 1 <= len(found) <= MAX_SLABS:
        raise ValueError(f"there are {len(found)} devices; wanted 1 to {MAX_SLABS}")
    if len({device.type for device in found}) > 1:
        raise ValueError(f"devices are {[str(device) for device in found]}; wanted GPUs, or the CPU alone")
    home = table.device if isinstance(table, CodedRows) else view.device
    is_bound = isinstance(table, CodedRows) or home.type == "cuda"
    if any(is_bound and device != home for device in found):
        raise ValueError(f"the table is on {home}; wanted the cache there")
    if found[0].type == "cuda" and home.type == "cpu" and not view.is_pinned() and not is_refused(view):
        raise ValueError("the table is in memory that is not pinned, which GPUs do not read: call its pin_memory()")
    return found


def _check_policy(cache: RowCache) -> None:
    if cache.policy not in POLICIES:
        raise ValueError(f"policy is {cache.policy!r}; wanted one of {', '.join(map(repr, POLICIES))}")
    if cache.policy == "lru" and len(cache.devices) > 1:
        raise ValueError(f"policy 'lru' is for one device; there are {len(cache.devices)}")
    if cache._members is not None and (cache.policy != "static" or cache.writable or len(cache.devices) > 1):
        raise ValueError(
            f"a cache with a group is static, not writable, and has one device a process; policy is {cache.policy!r}, "
            f"writable {cache.writable}, and there are {len(cache.devices)} devices"
        )
    if cache._members is not None and isinstance(cache.table, CodedRows):
        raise ValueError("a cache with a group is one of a table, not of an ibp.CodedRows")
    if cache.writable and cache.policy != "static":
        raise ValueError(f"a writable cache has policy 'static'; this one has {cache.policy!r}")
    if cache.writable and isinstance(cache.table, CodedRows):
        raise ValueError(
            "a cache of an ibp.CodedRows cannot be writable: code rows by ibp.encode_into, and invalidate them"
        )
    if cache.writable:
        check_can_change(cache.view)
        for device in cache.devices:
            for peer in cache.devices:
                if not memory.can_read(device, peer):
                    raise ValueError(f"{device} cannot read the memory of {peer}, as GPUs of a writable cache must")


def _as_bytes(out: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a view of a contiguous tensor as uint8 rows of an `ibp.CodedRows`. Raises ValueError if the tensor is not
    contiguous, or has another size."""
    if not out.is_contiguous() or out.numel() * out.element_size() != math.prod(shape):
        raise ValueError(
            f"out has shape {list(out.shape)} of {out.dtype}, strides {out.stride()}; wanted {math.prod(shape):,} "
            "contiguous bytes"
        )
    return out.view(-1).view(torch.uint8).view(shape)
