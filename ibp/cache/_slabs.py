"""The rows that a cache holds: which rows, where they lie, and how they are changed.

A slab has copies of stored rows in the memory of one device, limited by a budget (the paper's section 5). It consists
of the rows' bytes, and of a map from row numbers to 64-bit entries, which say where the rows are. The map is a hash
table, divided into *sets* of *ways*; a way holds one row number and the entry of this row. Rows that never change lie
back to back. If rows change or replace each other, every row has a slot of fixed size. If there are several slabs, the
hash of a row's number determines the slab that may hold the row.

`count_accesses` and `hottest_first` find the hottest items. `StreamOrder` orders the work on several streams, because
one stream may write rows that another stream reads. A `Generation` has all slabs between two refills. `plan_slabs`
chooses the rows that slabs will hold, which depend on the sizes of the rows. `filled_slab` and `replacing_slab` make
slabs. `CacheState` has the generation that is in use, and the locks and streams of its readers and writers. It changes
rows: it removes them, encodes them into their slots, or writes them back to the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.modes import outside_of_modes
from .._common.process import ForkLock
from .._common.sequences import rounded_up
from .._fetch.calls import Ids, check_range, checked_ids
from .._machine import memory
from .._machine.memory import is_capturing
from .._rows.codebook import AnyCodebook, coding_of
from .._rows.geometry import bytes_of, default_length, rows_of, stored_sizes
from .._rows.handle import ENTRIES, FaultWords, Handle, Parts, new_record
from .._rows.planes import signed
from .._rows.table import Table, handle_on, is_refused
from .._tables import changes
from .._tables.compressed_tensor import CompressedTensor

# ---- hotness ----

Hotness = torch.Tensor | np.ndarray | Sequence[int]


def count_accesses(
    batches: Iterable[Ids], num_items: int, *, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """Counts how often batches of ids contain each item. `ibp.RowCache` takes the result as hotness. Legion, too,
    counts the accesses of a first epoch (the paper's sections 5 and 6.2).

    Example:
        >>> ibp.cache.count_accesses([torch.tensor([0, 2, 2]), torch.tensor([2, 4])], num_items=5)
        tensor([1, 0, 3, 0, 1])

    Args:
        batches: the ids of each batch, integers of any shape, on the CPU or a GPU.
        num_items: number of items. Ids are in [0, num_items).
        device: the device on which the accesses are counted. None: the CPU.

    Returns:
        int64 [num_items].

    Raises:
        TypeError: ids are not integers, or num_items is not an int.
        IndexError: an id is out of range.
    """
    num_items = whole_number("num_items", num_items, 0, 2**62)
    counts = torch.zeros(num_items, dtype=torch.int64, device=memory.canonical("cpu" if device is None else device))
    for batch in batches:
        ids = checked_ids(batch)
        ids = ids.reshape(-1).to(counts.device, torch.int64)
        check_range(ids, num_items)
        counts.index_add_(0, ids, torch.ones_like(ids))
    return counts


def hottest_first(hotness: Hotness, num_items: int) -> torch.Tensor:
    """Returns the ids of items, int64, the hottest first. If hotness is a number for each item, the result has all ids,
    and equally hot items are ordered by increasing id. If hotness is a list of ids, the result is this list without
    repetitions.

    Raises:
        TypeError, ValueError: hotness is neither a number for each item nor a list of ids.
        IndexError: the list has an id that is out of range.
    """
    if isinstance(hotness, np.ndarray):
        hotness = torch.from_numpy(np.ascontiguousarray(hotness))
    if not isinstance(hotness, torch.Tensor):
        ids = checked_ids(hotness, "hotness")
        if ids.dim() != 1:
            raise ValueError(f"hotness has shape {list(ids.shape)}; wanted a list of ids from the hottest on")
        check_range(ids, num_items)
        ids = ids.to(torch.int64)
        ordered, order = ids.sort(stable=True)
        is_first = torch.ones_like(ids, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        return ids[order[is_first].sort().values]
    if hotness.dtype.is_complex or hotness.layout != torch.strided:
        raise TypeError(f"hotness is a {hotness.layout} tensor of {hotness.dtype}; wanted a real number for each item")
    if hotness.shape != (num_items,):
        raise ValueError(
            f"hotness has shape {list(hotness.shape)}; wanted [{num_items}], a number for each item, or a list of ids "
            "from the hottest on"
        )
    scores = hotness.detach()
    if scores.is_floating_point() and bool(scores.isnan().any()):
        raise ValueError("hotness has NaN")
    return torch.argsort(scores, descending=True, stable=True)


# ---- streams ----

Key = tuple[int, int]  # a stream's device and address
ON_CPU: Key = (-1, 0)


class StreamOrder:
    """Orders work on several streams: a reader waits for the last write, and a writer waits for all earlier reads and
    writes. The host does not wait, and streams that capture CUDA graphs are left out."""

    def __init__(self) -> None:
        self._users: dict[Key, torch.cuda.Stream] = {}  # streams used since the last write, including the writer's
        self._writer: torch.cuda.Stream | None = None

    def read(self, device: torch.device, beside: torch.cuda.Stream | None = None) -> torch.cuda.Stream | None:
        """Makes the device's current stream wait for the last write, and returns the stream. Must be called before the
        stream reads. On the CPU, or while a graph is captured, does nothing and returns None. beside: a stream that
        takes the place of the current one, and that a capture of the current one includes."""
        current = _stream_of(device, beside)
        if current is None or key_of(current) in self._users:
            return current
        if self._writer is not None:
            current.wait_stream(self._writer)
        self._users[key_of(current)] = current
        return current

    def write(self, device: torch.device, beside: torch.cuda.Stream | None = None) -> torch.cuda.Stream | None:
        """Makes the device's current stream wait for all earlier reads and writes, and returns the stream. Must be
        called before the stream writes. On the CPU, or while a graph is captured, does nothing and returns None.
        beside: as in `read`."""
        current = _stream_of(device, beside)
        if current is None:
            return None
        for stream in self._users.values():
            if stream != current:
                current.wait_stream(stream)
        self._users, self._writer = {key_of(current): current}, current
        return current

    def is_settled(self, key: Key, writes: bool) -> bool:
        """Returns whether a stream may read (or write, if `writes` is set) without waiting for other streams."""
        return key == ON_CPU or (key in self._users and (not writes or len(self._users) == 1))


def key_of(stream: torch.cuda.Stream) -> Key:
    return stream.device.index, stream.cuda_stream


def current_key(device: torch.device, beside: torch.cuda.Stream | None = None) -> Key | None:
    """Returns the key of a device's current stream, or that of the stream `beside` if it is given. Returns None if the
    device is not the current one, or if its current stream captures a CUDA graph."""
    if device.type != "cuda":
        return ON_CPU
    if torch.cuda.current_device() != device.index or torch.cuda.is_current_stream_capturing():
        return None
    address = torch._C._cuda_getCurrentRawStream(device.index) if beside is None else beside.cuda_stream
    return device.index, address


def _stream_of(device: torch.device, beside: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
    if device.type != "cuda" or is_capturing(device):
        return None
    return torch.cuda.current_stream(device) if beside is None else beside


# ---- slabs ----

MAX_SLABS = 8
# For the map of a static cache, which is filled once. STATIC_WAYS: number of ways of a set; the ways of a set fill a
# 32-byte sector of memory. STATIC_LOAD: the fraction of all ways that are filled. At this load, fewer than one row in a
# thousand finds no free way in the sets that are searched; such a row is not cached.
STATIC_WAYS, STATIC_LOAD = 2, 0.85
_SETS, _ROWS = 10, 17  # ten sets of STATIC_WAYS ways have room for 17 rows at STATIC_LOAD
LRU_WAYS = 32  # number of ways of a set of an lru cache: one for each lane of the warp that searches the set
WAY_BYTES, STAMP_BYTES = 16, 4  # size in bytes of a way of a map, and of an element of `Slab.stamps`
READ_AHEAD_BYTES = 16  # size in bytes of the padding past the last row; decoders may read it, but ignore its content
COUNTERS = 10  # number of counters: the hits in each of slabs 0 to 7, the misses, and the bytes of the missed rows
CLOCK_BYTES = 16  # size in bytes of `Slab.clock`
FIXED_BYTES = READ_AHEAD_BYTES + 8 * COUNTERS + CLOCK_BYTES  # size in bytes of a slab without its rows and ways
# Every GPU gets copies of the other GPUs' maps if all copies together take at most this fraction of the size of all
# cached rows. Lookups then do not read the memory of peers. On two H200s, reading cached rows of 128, 512 and 2,048
# bytes from the peer was 1.5, 1.2 and 1.1 times as fast with such copies.
NEAR_MAP_SHARE = 0.4
SLOT_QUANTILE = 0.999  # the fraction of the rows that must fit in a slot
GROWTH = 16  # if rows may change, a slot is larger by a sixteenth, so that most rows still fit after a change
# The fields of an entry that this file reads (ibp_cache.h has all of them). Bits 0 to 39: offset of the row in its
# slab, in bytes. Bits 40 to 42: number of the slab. Bit 60: whether the row is present. Bit 61: whether the row has
# been changed, and not yet written back to the table.
_SLAB_SHIFT, _PRESENT_SHIFT = 40, 60
_DIRTY = 1 << 61


def are_present(entries: torch.Tensor) -> torch.Tensor:
    """Returns whether map entries are those of rows that are present, as a bool tensor."""
    return (entries >> _PRESENT_SHIFT & 1).bool()


def slabs_of(entries: torch.Tensor) -> torch.Tensor:
    """Returns the number of the slab to which each map entry refers."""
    return entries >> _SLAB_SHIFT & 7


@dataclass
class Slab:
    """The rows that a cache holds on one device, with their map."""

    device: torch.device
    bytes: torch.Tensor  # uint8: the stored bytes of the rows, followed by READ_AHEAD_BYTES bytes of padding
    map: torch.Tensor  # int64 [number of ways of all sets, 2]: row number (-1: no row, -2: removed) and entry
    # Only in a cache that replaces rows. stamps: int32 [number of sets * (LRU_WAYS + 1)]: the time at which each way
    # was last used, followed by a lock for each set. clock: int64 [2]: the present time.
    stamps: torch.Tensor | None = None
    clock: torch.Tensor | None = None
    is_lent: bool = False  # whether another process owns the slab, and this process only reads it (see `_peers.py`)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the slab's tensors, or an empty list if the slab is in another process's memory."""
        held = (self.bytes, self.map, self.stamps, self.clock)
        return [tensor for tensor in held if tensor is not None and not self.is_lent]


View = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass
class Generation:
    """The slabs and maps of a cache between two refills."""

    slabs: tuple[Slab, ...]
    ways: int  # number of ways of a set
    slot_bytes: int  # size in bytes of a row's slot; 0 if rows lie back to back
    codebook: AnyCodebook | None  # the codebook of the rows; None: the rows are raw
    version: int  # the table's version when its rows were copied
    capacity: int  # number of rows for which there is room
    # Copies of slabs' maps on other devices: {device: {number of the slab: map}}.
    near_maps: dict[torch.device, dict[int, torch.Tensor]] = field(default_factory=dict)
    is_captured: bool = False  # whether a CUDA graph reads it

    views: dict[torch.device, View] = field(default_factory=dict)  # see `view_of`
    streams: set[Key] = field(default_factory=set)  # streams that have read it or written to it
    described: dict[torch.device, torch.Tensor] = field(default_factory=dict)  # see `describe`

    def view_of(self, device: torch.device) -> View:
        """Returns (maps, bytes), two lists that each have one tensor for each slab. The device looks rows up in `maps`,
        and reads them from `bytes`. For a slab that the device cannot read, both tensors are empty."""
        if device not in self.views:
            near = self.near_maps.get(device, {})
            readable = [memory.can_read(device, slab.device) for slab in self.slabs]
            self.views[device] = (
                [near.get(i, slab.map) if readable[i] else _none_of(slab.map, device) for i, slab in self],
                [slab.bytes if readable[i] else _none_of(slab.bytes, device) for i, slab in self],
            )
        return self.views[device]

    def __iter__(self) -> Iterator[tuple[int, Slab]]:
        return enumerate(self.slabs)

    def all_maps(self) -> Iterator[torch.Tensor]:
        """Yields every map and every copy of a map."""
        for _, slab in self:
            yield slab.map
        for near in self.near_maps.values():
            yield from near.values()

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors of the generation that are in this process's own memory, including copies of maps."""
        copies = [copy for near in self.near_maps.values() for copy in near.values()]
        return [tensor for slab in self.slabs for tensor in slab.tensors()] + copies

    def describe(self, device: torch.device, counts: torch.Tensor) -> torch.Tensor:
        """Makes the argument `cache` of the operations `take` and `take.out` on a device, keeps it in `described`, and
        returns it. counts: the device's counters, which the argument keeps alive."""
        (maps, slabs), first = self.view_of(device), self.slabs[0]
        slot_bytes = 0 if first.stamps is None else self.slot_bytes
        with outside_of_modes():
            made = torch.ops.ibp.describe_cache.default(
                maps, self.ways, slabs, counts, first.stamps, first.clock, slot_bytes
            )
        made.parts = maps, slabs, counts, first
        self.described[device] = made
        return made

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def _none_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.new_empty((0, *tensor.shape[1:]), device=device)


# ---- plans ----


def stored_bytes(table: Table, rows: torch.Tensor) -> torch.Tensor:
    """Returns the stored size in bytes of each row: int64, on the device of `rows`, which must be able to read the
    table. The size is 0 for default rows, and for rows with an invalid length. rows: int64: the row numbers."""
    lengths, row_bytes = handle_on(table, rows.device).parts.lengths, table.row_bytes
    if lengths.numel() == 0:
        return torch.full_like(rows, row_bytes)
    sizes = stored_sizes(lengths.view(torch.int16)[rows].to(torch.int64) & 0xFFFF, row_bytes, row_bytes)
    return torch.where(sizes <= row_bytes, sizes, 0)


def slot_for(table: Table, device: torch.device, may_grow: bool) -> int:
    """Returns a slot size in bytes, a multiple of 32, in which nearly all rows that have bytes fit. If no row has
    bytes, returns the size of a raw row. may_grow: whether to leave room for rows to become larger when they change."""
    found = table.geometry.survey(handle_on(table, device).parts.lengths)
    with_bytes = found.num_rows - int(found.sectors[0])
    if not with_bytes:
        return in_sectors(table.row_bytes)
    fits = found.best_slots(overflow_cost=0.0, most_spilled=with_bytes - math.ceil(SLOT_QUANTILE * with_bytes))[0]
    return in_sectors(min(fits + fits // GROWTH if may_grow else fits, table.row_bytes))


def in_sectors(num_bytes: int) -> int:
    """Returns num_bytes rounded up to whole sectors of 32 bytes."""
    return rounded_up(num_bytes, _core.SECTOR_BYTES)


def sets_for(num_rows: Any) -> Any:
    """Returns the number of sets that the map of a static cache needs for num_rows rows. The result is a tensor if
    num_rows is a tensor, otherwise an int."""
    return (num_rows * _SETS + _ROWS - 1) // _ROWS


def rows_within(
    rows: torch.Tensor, sizes: torch.Tensor, budget_bytes: int, num_maps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns as many of the hottest rows as a budget allows for the rows of a slab and for maps, and their sizes.

    Args:
        rows: int64: the row numbers, the hottest first.
        sizes: int64: the size that each row takes in the slab in bytes, at least 1.
        budget_bytes: limit in bytes on all memory that the device holds for the cache.
        num_maps: number of maps that the device holds: the slab's own map, and copies of other slabs' maps. They are
            counted as equally large.
    """
    numbers = torch.arange(1, rows.numel() + 1, device=rows.device)
    needed = sizes.cumsum(0) + num_maps * sets_for(numbers) * (STATIC_WAYS * WAY_BYTES) + FIXED_BYTES
    count = int((needed <= budget_bytes).sum())
    return rows[:count], sizes[:count]


def plan_slabs(
    table: Table, rows: torch.Tensor, num_slabs: int, slot_bytes: int, budget_bytes: int, may_copy_maps: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], bool]:
    """Chooses the rows of slabs.

    Args:
        rows: int64: the row numbers, the hottest first, on a device of the cache.
        slot_bytes: size in bytes of a row's slot. 0: rows lie back to back.
        budget_bytes: limit in bytes on the memory of each slab.
        may_copy_maps: whether maps may be copied to other GPUs.

    Returns:
        (plans, copies): for each slab, (its row numbers, the size that each of these rows takes in bytes), both int64;
        and whether maps are copied to other GPUs. Default rows are left out: they have no bytes, because the table's
        index alone determines their values. Rows that do not fit in a slot are also left out.
    """
    sizes = stored_bytes(table, rows)
    fits = sizes > 0 if slot_bytes == 0 else (sizes > 0) & (sizes <= slot_bytes)
    rows, sizes = rows[fits], sizes[fits]
    if slot_bytes:
        sizes = torch.full_like(sizes, slot_bytes)
    parts = [(rows, sizes)]
    if num_slabs > 1:
        owners = torch.ops.ibp.owners_of_rows.default(rows, num_slabs)
        parts = [(rows[mine], sizes[mine]) for mine in (owners == slab for slab in range(num_slabs))]
    plans = [rows_within(*part, budget_bytes, 1) for part in parts]
    copies = False
    if may_copy_maps and num_slabs > 1:
        total, held = sum(int(taken.sum()) for _, taken in plans), sum(chosen.numel() for chosen, _ in plans)
        copies = (num_slabs - 1) * (WAY_BYTES / STATIC_LOAD) * held <= NEAR_MAP_SHARE * total
    if copies:
        # All maps are counted as large as the largest one, so that no device's copies exceed its budget.
        most = max(rows_within(*part, budget_bytes, num_slabs)[0].numel() for part in parts)
        fixed = (num_slabs - 1) * sets_for(most) * STATIC_WAYS * WAY_BYTES
        plans = [rows_within(chosen[:most], taken[:most], budget_bytes - fixed, 1) for chosen, taken in parts]
    return plans, copies


# ---- new slabs ----


def empty_map(num_ways: int, device: torch.device) -> torch.Tensor:
    made = torch.zeros(num_ways, 2, dtype=torch.int64, device=device)
    made[:, 0] = -1
    return made


def filled_slab(table: Table, rows: torch.Tensor, sizes: torch.Tensor, number: int, device: torch.device) -> Slab:
    """Returns a slab with rows of a table, which are copied on the device's current stream. A row with a corrupt index
    entry is left out, so that lookups read it from the table, which reports the error.

    Args:
        rows, sizes: one of the plans of `plan_slabs`.
        number: the number of the slab.
    """
    ends = sizes.cumsum(0)
    num_bytes = int(ends[-1]) + READ_AHEAD_BYTES if rows.numel() else 0
    slab = Slab(
        device,
        torch.empty(num_bytes, dtype=torch.uint8, device=device),
        empty_map(sets_for(rows.numel()) * STATIC_WAYS, device),
    )
    if rows.numel():
        fault = new_record(device)
        rows, offsets = rows.to(device), (ends - sizes).to(device)
        handle = handle_on(table, device)
        torch.ops.ibp.fill_slab.default(handle.table, rows, offsets, number, STATIC_WAYS, slab.bytes, slab.map, fault)
    return slab


def replacing_slab(slot_bytes: int, budget_bytes: int, num_rows: int, device: torch.device) -> Slab:
    """Returns an empty slab whose rows replace each other. It has the largest number of sets that the budget allows,
    but at most the number that twice num_rows rows need. num_rows: number of rows of the table."""
    set_bytes = LRU_WAYS * (slot_bytes + WAY_BYTES + STAMP_BYTES) + STAMP_BYTES
    num_sets = min(max(0, budget_bytes - FIXED_BYTES) // set_bytes, -(-2 * num_rows // LRU_WAYS))
    num_ways = num_sets * LRU_WAYS
    return Slab(
        device,
        torch.empty(num_ways * slot_bytes + READ_AHEAD_BYTES if num_ways else 0, dtype=torch.uint8, device=device),
        empty_map(num_ways, device),
        torch.zeros(num_ways + num_sets, dtype=torch.int32, device=device),
        torch.zeros(CLOCK_BYTES // 8, dtype=torch.int64, device=device),
    )


def copy_maps_near(slabs: Sequence[Slab]) -> dict[torch.device, dict[int, torch.Tensor]]:
    """Returns copies of each slab's map on all other slabs' devices: {device: {number of the slab: map}}."""
    return {
        device: {i: slab.map.to(device) for i, slab in enumerate(slabs) if slab.device != device}
        for device in {slab.device for slab in slabs}
    }


# ---- the rows that a cache holds ----

_BLOCK_BYTES = 256 << 20  # size in bytes of the rows that are written back at once
_WORDS = FaultWords("a changed row of the cache is damaged: it cannot be written back")


class CacheState:
    """Holds the rows of a cache, with the locks and streams that order readers and writers, and makes all changes of
    these rows.

    Args:
        view: the table whose rows are held.
        devices: the devices of the slabs.
        writable: whether changed rows are kept in the slabs until they are flushed.
        replaces: whether rows that are looked up replace other rows.
    """

    generation: Generation  # the slabs in use

    def __init__(
        self, view: CompressedTensor, devices: tuple[torch.device, ...], writable: bool, replaces: bool
    ) -> None:
        self.view, self.devices, self.writable, self.replaces = view, devices, writable, replaces
        self.workers = tuple(dict.fromkeys(devices))  # the devices, each once
        self.rows_per_item = max(1, view.geometry.item_bytes // view.row_bytes)
        # For each device, the counters of its lookups, see `COUNTERS`.
        self.counts = {device: torch.zeros(COUNTERS, dtype=torch.int64, device=device) for device in self.workers}
        self.change_lock = ForkLock()  # held from the beginning of a change to its end; taken before `lock`
        self.lock = ForkLock()  # held while lookups and changes are issued
        self.order = StreamOrder()  # orders the streams that read and write the slabs
        self.captured: list[Generation] = []  # generations that CUDA graphs read
        self._side_streams: dict[torch.device, torch.cuda.Stream] = {}
        # True if the system refused to pin the table, so that GPUs cannot read it. Then the cache holds nothing, and
        # all rows come from the table.
        self.is_idle = devices[0].type == "cuda" and is_refused(view) and not view.is_pinned()
        self.serving = () if self.is_idle else self.workers  # the devices that look rows up

    def use_lock_of(self, other: CacheState) -> None:
        """Makes this cache share the lock of another cache, so that one operation can use both. No thread may use this
        cache during the call."""
        self.lock = other.lock

    def in_use(
        self, worker: torch.device, beside: torch.cuda.Stream | None = None, key: Key | None = None
    ) -> Generation:
        """Returns the generation that is in use. If necessary, makes the current stream of the device `worker` wait for
        other streams before it uses the generation. The caller must hold `lock`. beside: a stream of the device that
        uses the generation in place of the current one, as in `StreamOrder.read`. key: the result of `current_key` for
        these arguments, if the caller has it. Raises RuntimeError if the table has changed since its rows were
        cached."""
        generation = self.generation
        if generation.codebook is not self.view.codebook or generation.version != self.view.version:
            self.check(generation)
        if key is None:
            key = current_key(worker, beside)
        if (
            key is not None
            and (key == ON_CPU or key in generation.streams)
            and self.order.is_settled(key, self.replaces)
        ):
            return generation
        if not generation.is_captured and is_capturing(worker):
            generation.is_captured = True
            self.captured.append(generation)  # the graph that is being captured reads it even after refills
        order = self.order.write if self.replaces else self.order.read
        self.hold(generation, worker, order(worker, beside))
        return generation

    def handle_on(self, worker: torch.device) -> Handle:
        """Returns the table's handle on a device of the cache. Raises the error that a GPU has noted, if there is
        one."""
        handle = self.view._handles.get(worker)
        if handle is None:
            handle = handle_on(self.view, worker)
        if handle.noted[0] or handle.noted[ENTRIES]:
            handle.faults.raise_pending(worker)
        return handle

    def described_on(
        self, worker: torch.device, beside: torch.cuda.Stream | None = None, key: Key | None = None
    ) -> torch.Tensor:
        """Returns the argument `cache` of an operation that looks rows up on a device. The caller must hold `lock`
        until it has called the operation. beside, key: as in `in_use`."""
        generation = self.in_use(worker, beside, key)
        described = generation.described.get(worker)
        return generation.describe(worker, self.counts[worker]) if described is None else described

    def hold(self, generation: Generation, worker: torch.device, stream: torch.cuda.Stream | None) -> None:
        """Keeps the allocator from reusing the memory of the generation and of the counters too early: when the memory
        has been freed, the allocator first waits for the work that is queued on the stream at that time. worker: the
        device of the stream. If stream is None, does nothing."""
        if stream is None or key_of(stream) in generation.streams:
            return
        for tensor in generation.tensors():
            if tensor.is_cuda:
                tensor.record_stream(stream)
        generation.streams.add(key_of(stream))
        self.counts[worker].record_stream(stream)

    def check(self, generation: Generation) -> None:
        """Raises RuntimeError if the table has changed since a generation was made."""
        if generation.codebook is not self.view.codebook:
            raise RuntimeError("the table has been refit since its rows were cached: refill the cache")
        if generation.version != self.view.version:
            raise RuntimeError(
                "the table's rows have changed other than by this cache: invalidate those, or change them by the "
                "cache's update_"
            )

    def generation_of(self, slabs: tuple[Slab, ...], ways: int, slot_bytes: int, capacity: int) -> Generation:
        """Returns a generation of slabs whose rows were copied from the present version of the table."""
        return Generation(slabs, ways, slot_bytes, self.view.codebook, self.view.version, capacity)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Makes the cache's own streams the current streams inside the context. The cache's streams first wait for the
        work that is already queued on the previously current streams. At the end the host waits for the cache's
        streams."""
        with ExitStack() as stack:
            for device in self.workers:
                if device.type != "cuda":
                    continue
                side = self._side_streams.setdefault(device, torch.cuda.Stream(device))
                side.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(side))
            yield
            self.wait_beside()

    def wait_beside(self) -> None:
        """Makes the host wait for the work on the cache's own streams."""
        for stream in self._side_streams.values():
            stream.synchronize()

    def synchronize(self) -> None:
        """Waits for all work on the cache's devices."""
        for device in self.workers:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    # ---- changes ----

    def forget(self, rows: torch.Tensor | None) -> None:
        """Removes rows from the cache, so that they come from the table. This includes the generations that CUDA graphs
        read, and copies of maps. rows: the row numbers; None: all rows."""
        for generation in {id(made): made for made in (self.generation, *self.captured)}.values():
            for held in generation.all_maps():
                self.hold(generation, held.device, self.order.write(held.device))
                if rows is not None:
                    torch.ops.ibp.drop_cached.default(rows.to(held.device), generation.ways, held)
                else:
                    held.zero_()[:, 0] = -1

    def put_items(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Changes items of a cache and its table. ids: int64, all different and in range. rows: in the form that
        `check_rows` requires."""
        if ids.numel() == 0 or self.view.geometry.item_bytes == 0:
            return
        with self.change_lock, self.lock:
            generation = self.generation
            self.check(generation)
            if self.writable and not self.is_idle:
                self._write(generation, ids.to(self.devices[0]), rows)
            else:
                self.forget(rows_of(ids, self.rows_per_item))
                try:
                    changes.put_items(self.view, ids, rows)
                finally:  # Whether the rows have changed or not, the cache has none of them.
                    self.mark_current()

    def mark_current(self) -> None:
        """Notes that the cached rows are those of the table's present version."""
        for held in (self.generation, *self.captured):
            held.version = self.view.version

    def _write(self, generation: Generation, items: torch.Tensor, rows: torch.Tensor) -> None:
        """Changes items of a writable cache. If a row is cached and its new bytes fit in its slot, the row is changed
        in the slot. All other rows are changed in the table, and those that are cached are removed from the cache.
        items: ids on the cache's first device, all different."""
        view, worker = self.view, items.device
        numbers = rows_of(items, self.rows_per_item)
        data = bytes_of(rows.to(worker)).view(numbers.numel(), view.row_bytes)
        entries = torch.empty_like(numbers)
        self.hold(generation, worker, self.order.read(worker))
        maps, _ = generation.view_of(worker)
        of_table = handle_on(view, worker).parts.lengths
        torch.ops.ibp.find_cached.default(numbers, 1, view.row_bytes, of_table, maps, generation.ways, entries, None)
        held = entries.nonzero()[:, 0]
        coded, lengths, fits = _encoded(generation.codebook, _rows_at(data, held), generation.slot_bytes)
        fitting = fits.nonzero()[:, 0]
        kept, lost = held, None
        if fitting.numel() < held.numel():
            kept, lost = held[fitting], numbers[held[~fits]]
            coded, lengths = _rows_at(coded, fitting), lengths[fitting]
        if kept.numel() < numbers.numel():
            others = torch.ones_like(numbers, dtype=torch.bool).index_fill_(0, kept, False).nonzero()[:, 0]
            self._write_others(numbers[others], _rows_at(data, others).view(-1), lost)
        numbers, entries = numbers[kept], entries[kept]
        for number, slab in generation:
            mine = None if len(generation.slabs) == 1 else (slabs_of(entries) == number).nonzero()[:, 0]
            self.hold(generation, slab.device, self.order.write(slab.device))
            if mine is None:
                _put(slab, generation, numbers, entries, coded, lengths)
            else:
                _put(slab, generation, numbers[mine], entries[mine], _rows_at(coded, mine), lengths[mine])

    def _write_others(self, numbers: torch.Tensor, data: torch.Tensor, lost: torch.Tensor | None) -> None:
        """Changes rows of a writable cache in the table. numbers, data: the row numbers, and the bytes of the rows.
        lost: those row numbers whose rows are cached, and are removed from the cache. None: no row is cached."""

        try:
            try:
                changes.put_rows(self.view, numbers, data)
            except Exception:  # The rows are what they were, in the table and in the cache.
                self.mark_current()
                raise
            if lost is not None:
                self.forget(lost)
            self.mark_current()
        except BaseException as error:
            if not isinstance(error, Exception):  # Do all steps again, so that the cache has no old row of these.
                self._write_others(numbers, data, lost)
            raise

    def flush(self) -> None:
        """Writes changed rows back to the table. They stay cached."""
        view = self.view
        with self.change_lock, self.lock:
            generation = self.generation
            was_current = generation.version == view.version
            try:
                for _, slab in generation:
                    self.hold(generation, slab.device, self.order.write(slab.device))
                    are_dirty = ((slab.map[:, 1] & _DIRTY) != 0) & (slab.map[:, 0] >= 0)
                    changed = are_dirty.nonzero()[:, 0]
                    for ways in changed.split(max(1, _BLOCK_BYTES // view.row_bytes)) if changed.numel() else ():
                        numbers, entries = slab.map[ways].t().contiguous().unbind(0)
                        changes.put_rows(view, numbers, _decoded(generation, entries, slab.device, view.row_bytes))
                        slab.map[ways, 1] = entries & ~_DIRTY
            finally:  # The table gets rows that the cache has, so the cached rows are current however far this came.
                if was_current:
                    self.mark_current()


# ---- coded rows in slots ----


def _put(
    slab: Slab,
    generation: Generation,
    numbers: torch.Tensor,
    entries: torch.Tensor,
    coded: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Copies coded rows to their slots in a slab, and marks them as changed. numbers: the row numbers. entries: their
    map entries. coded, lengths: the first two results of `_encoded` for these rows."""
    if numbers.numel() == 0:
        return
    slot_bytes, num_bytes = generation.slot_bytes, coded.shape[1]
    num_slots = slab.bytes.numel() // slot_bytes
    slots = slab.bytes[: num_slots * slot_bytes].view(num_slots, slot_bytes)[:, :num_bytes]
    rows, numbers, entries = (tensor.to(slab.device) for tensor in (coded, numbers, entries))
    if num_bytes % 8 == 0:
        slots, rows = _wide(slots), _wide(rows)
    places = (entries & ((1 << _SLAB_SHIFT) - 1)) // slot_bytes
    lengths = lengths.to(slab.device).view(torch.uint16)
    before = slots.index_select(0, places) if slab.device.type == "cpu" else None

    def put() -> None:
        slots.index_copy_(0, places, rows)
        torch.ops.ibp.set_cached.default(numbers, lengths, generation.ways, True, slab.map)

    try:
        put()
    except BaseException as error:  # new bytes together with an old length would not be a valid row
        if isinstance(error, Exception) and before is not None:
            slots.index_copy_(0, places, before)  # the operation was refused, so the map still has the old lengths
        else:
            put()  # do both steps again, so that the bytes match the lengths
        raise


def _rows_at(rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Returns the rows at the indices `which` of a uint8 tensor [rows, bytes], as a contiguous tensor."""
    return _wide(rows).index_select(0, which).view(torch.uint8)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """Returns a view of uint8 rows as int64 rows, because elements of 8 bytes are copied faster. If the size or the
    alignment of the rows does not allow this, returns the rows themselves."""
    can_be = rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0 and rows.stride(0) % 8 == 0
    return rows.view(torch.int64) if can_be else rows


def _encoded(
    codebook: AnyCodebook | None, data: torch.Tensor, slot_bytes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encodes rows for slots of a cache. data: uint8 [rows, row_bytes].

    Returns:
        (slots, lengths, fits). slots: uint8 [rows, min(slot_bytes, row_bytes)]; without a codebook, the data. lengths:
        int16 [rows]: for each row, its entry of a table's `lengths` (uint16), viewed as int16. fits: bool [rows]:
        whether each row fits in a slot. Default rows have no bytes; `fits` is False for them if there is a codebook.
    """
    (num_rows, row_bytes), device = data.shape, data.device
    if codebook is None:
        fits = torch.full((num_rows,), slot_bytes >= row_bytes, dtype=torch.bool, device=device)
        return data, torch.zeros(num_rows, dtype=torch.int16, device=device), fits
    inner = min(slot_bytes, row_bytes)
    num_parts = num_rows if inner < row_bytes else 0
    slots = torch.empty(num_rows, inner, dtype=torch.uint8, device=device)
    lengths, rooms = (torch.empty(n, dtype=torch.uint16, device=device) for n in (num_rows, num_parts))
    # There is no overflow memory, so the values of `bases` do not matter.
    bases = torch.empty(num_parts, dtype=torch.int64, device=device)
    used, counts, fault = torch.zeros(7, dtype=torch.int64, device=device).split((1, 2, 4))
    if num_rows:
        codec, words = coding_of(codebook, row_bytes, device)
        held, sizes = slots.view(-1), (inner, 0, num_rows, row_bytes)
        place = Parts(held, held[:0], lengths, bases, words, codec, *sizes, rooms, used)
        Handle(place).encode(data, counts, fault)
    found = lengths.view(torch.int16)
    fits = found != signed(default_length(row_bytes), 16)
    if inner < row_bytes:  # rows that do not fit are encoded as raw rows, of length 0
        fits &= found != 0
    return slots, found, fits


def _decoded(generation: Generation, entries: torch.Tensor, device: torch.device, row_bytes: int) -> torch.Tensor:
    """Decodes the cached rows to which map entries refer, and returns them as uint8 [rows * row_bytes]. Uses the
    codebook with which the rows were encoded, even if the table has another codebook now."""
    codec, words = coding_of(generation.codebook, row_bytes, device)
    count = entries.numel()
    none = torch.empty(0, dtype=torch.uint8, device=device)
    lengths = torch.zeros(count if generation.codebook is not None else 0, dtype=torch.uint16, device=device)
    bases = torch.empty(0, dtype=torch.int64, device=device)
    out = torch.empty(count * row_bytes, dtype=torch.uint8, device=device)
    fault = new_record(device)
    table = Handle(Parts(none, none, lengths, bases, words, codec, 0, 0, count, row_bytes)).table
    ids = torch.arange(count, device=device)
    near = {"entries": entries, "slabs": generation.view_of(device)[1]}
    torch.ops.ibp.gather_items.default(table, ids, 0, out, fault, **near)
    _WORDS.raise_for(fault)
    return out
