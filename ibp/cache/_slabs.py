"""Slabs: what a budget holds, and rows copied there as they are stored (the paper's section 5).

A slab is one device's: the rows' bytes, and a map from row numbers to 64-bit entries. Rows that never change lie back
to back; where rows change or replace each other every row has a slot. A row is in the slab that the hash of its number
says (its owner).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._common.rounding import rounded_up
from .._layout.geometry import stored_sizes
from .._rows.faults import new_record
from .._rows.table import Table, handle_on
from .._schemes import AnyCodebook
from ._order import Key, key_of

MAX_SLABS = 8
# Of a map that is filled once: ways of a set, a sector of memory, and the share of all ways that rows take. Fewer than
# one row in a thousand finds no way in the sets that are searched, and is not cached.
STATIC_WAYS, STATIC_LOAD = 2, 0.85
_SETS, _ROWS = 10, 17  # ten sets of STATIC_WAYS ways have room for 17 rows at STATIC_LOAD
LRU_WAYS = 32  # a warp looks at a set
WAY_BYTES, STAMP_BYTES = 16, 4
READ_AHEAD_BYTES = 16  # behind the last row, which may be read and mean nothing
COUNTERS = 10  # hits of slabs 0 to 7, misses, bytes of the link
CLOCK_BYTES = 16
FIXED_BYTES = READ_AHEAD_BYTES + 8 * COUNTERS + CLOCK_BYTES  # of a slab besides rows and ways
# Maps of other GPUs are copied near where this costs at most such a share of what rows take: a look-up then reads no
# peer's memory. On two H200s rows of 128, 512 and 2,048 B came 1.5, 1.2 and 1.1 times as fast from the peer so.
NEAR_MAP_SHARE = 0.4
SLOT_QUANTILE = 0.999  # of the rows' stored sizes fit a slot
GROWTH = 16  # a slot of rows that change is larger by such a part
_SLAB_SHIFT, _PRESENT_SHIFT = 40, 60  # fields of an entry
DIRTY = 1 << 61


@dataclass
class Slab:
    """One device's part of a cache."""

    device: torch.device
    bytes: torch.Tensor  # uint8, rows as they are stored; READ_AHEAD_BYTES more than they take
    map: torch.Tensor  # int64 [ways of all sets, 2], row number (-1: none, -2: removed) and entry
    # stamps, clock: int32 [sets * (LRU_WAYS + 1)] and int64 [2], of a cache that replaces rows: when each way was used
    # last, and the time
    stamps: torch.Tensor | None = None
    clock: torch.Tensor | None = None
    is_lent: bool = False  # whether it is another process's, which this one only reads (see `peers.py`)

    def tensors(self) -> list[torch.Tensor]:
        """All that it has in this process's memory."""
        held = (self.bytes, self.map, self.stamps, self.clock)
        return [tensor for tensor in held if tensor is not None and not self.is_lent]


View = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass
class Generation:
    """What a cache holds from one refill to the next."""

    slabs: tuple[Slab, ...]
    ways: int  # of a set
    slot_bytes: int  # of a row; 0 where rows lie back to back
    codebook: AnyCodebook | None  # how the rows are coded
    version: int  # of the table's rows, when they were copied
    capacity: int  # rows that there is room for
    # copies of slabs' maps on other devices: {device: {number of the slab: map}}
    near_maps: dict[torch.device, dict[int, torch.Tensor]] = field(default_factory=dict)
    is_captured: bool = False  # a CUDA graph reads it

    views: dict[torch.device, View] = field(default_factory=dict)  # see `view_of`
    streams: set[Key] = field(default_factory=set)  # that have read it, or written to it
    described: dict[torch.device, torch.Tensor] = field(default_factory=dict)  # see `describe`

    def view_of(self, device: torch.device) -> View:
        """(maps that a device looks rows up in, bytes that it reads them from), one a slab; empty ones of slabs that it
        cannot read."""
        if device not in self.views:
            near = self.near_maps.get(device, {})
            readable = [can_read(device, slab) for slab in self.slabs]
            self.views[device] = (
                [near.get(i, slab.map) if readable[i] else _none_of(slab.map, device) for i, slab in self],
                [slab.bytes if readable[i] else _none_of(slab.bytes, device) for i, slab in self],
            )
        return self.views[device]

    def __iter__(self) -> Iterator[tuple[int, Slab]]:
        return enumerate(self.slabs)

    def all_maps(self) -> Iterator[torch.Tensor]:
        """Every map and every copy of one."""
        for _, slab in self:
            yield slab.map
        for near in self.near_maps.values():
            yield from near.values()

    def tensors(self) -> list[torch.Tensor]:
        """All that it has in memory."""
        copies = [copy for near in self.near_maps.values() for copy in near.values()]
        return [tensor for slab in self.slabs for tensor in slab.tensors()] + copies

    def hold_for(self, stream: torch.cuda.Stream | None) -> None:
        """Keeps memory that is given up from its next user until the stream has done what it was given."""
        if stream is None or key_of(stream) in self.streams:
            return
        for tensor in self.tensors():
            if tensor.is_cuda:
                tensor.record_stream(stream)
        self.streams.add(key_of(stream))

    def describe(self, device: torch.device, counts: torch.Tensor) -> torch.Tensor:
        """Returns the argument `cache` of operations on a device, from now on in `described`. counts: of the device,
        which it keeps alive, too."""
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


def can_read(device: torch.device, slab: Slab) -> bool:
    """Whether kernels of a device can read a slab, from now on."""
    peer = slab.device
    if device == peer:
        return True
    if device.type != "cuda" or peer.type != "cuda" or not torch.cuda.can_device_access_peer(device, peer):
        return False
    _core.enable_peer(device.index, peer.index)
    return True


def _none_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.new_empty((0, *tensor.shape[1:]), device=device)


# ---- rows and their sizes ----


def stored_bytes(table: Table, rows: torch.Tensor) -> torch.Tensor:
    """Bytes of rows as they are stored, int64, on the device that their numbers are on, which reads the table; 0 for
    default rows, and for those whose length is no row's."""
    lengths, row_bytes = handle_on(table, rows.device).parts.lengths, table.row_bytes
    if lengths.numel() == 0:
        return torch.full_like(rows, row_bytes)
    sizes = stored_sizes(lengths.view(torch.int16)[rows].to(torch.int64) & 0xFFFF, row_bytes, row_bytes)
    return torch.where(sizes <= row_bytes, sizes, 0)


def slot_for(table: Table, device: torch.device, may_grow: bool) -> int:
    """Bytes of a slot, a multiple of 32, that nearly all rows that have bytes fit; a whole row where there are none.
    may_grow: with room for rows that change to take more bytes."""
    found = table.geometry.survey(handle_on(table, device).parts.lengths)
    with_bytes = found.num_rows - int(found.sectors[0])
    if not with_bytes:
        return in_sectors(table.row_bytes)
    fits = found.best_slots(overflow_cost=0.0, most_spilled=with_bytes - math.ceil(SLOT_QUANTILE * with_bytes))[0]
    return in_sectors(min(fits + fits // GROWTH if may_grow else fits, table.row_bytes))


def in_sectors(num_bytes: int) -> int:
    """Rounded up to whole sectors of 32 bytes."""
    return rounded_up(num_bytes, _core.SECTOR_BYTES)


def sets_for(num_rows: Any) -> Any:
    """How many sets a map needs to be filled once with num_rows rows; an int, or a tensor of them."""
    return (num_rows * _SETS + _ROWS - 1) // _ROWS


@dataclass(frozen=True)
class SlabPlan:
    """Rows of one slab, from the hottest on, where each begins, and the bytes of all."""

    rows: torch.Tensor
    offsets: torch.Tensor
    num_bytes: int


def plan_rows(rows: torch.Tensor, sizes: torch.Tensor, slot_bytes: int, budget_bytes: int, num_maps: int) -> SlabPlan:
    """The first rows, in the order given, that a budget holds with their map.

    Args:
        rows, sizes: int64, their numbers and stored bytes, of at least 1 byte each.
        slot_bytes: of a row; 0: they lie back to back.
        num_maps: maps of this size that the device holds: its own, and copies of others.
    """
    taken = sizes if slot_bytes == 0 else torch.full_like(sizes, slot_bytes)
    ends = taken.cumsum(0)
    numbers = torch.arange(1, rows.numel() + 1, device=rows.device)
    needed = ends + num_maps * sets_for(numbers) * (STATIC_WAYS * WAY_BYTES) + FIXED_BYTES
    count = int((needed <= budget_bytes).sum())
    return SlabPlan(rows[:count], (ends - taken)[:count], int(ends[count - 1]) if count else 0)


def plan_slabs(
    table: Table, rows: torch.Tensor, num_slabs: int, slot_bytes: int, budget_bytes: int, may_copy_maps: bool
) -> tuple[list[SlabPlan], bool]:
    """(what each slab holds of rows in the order of their hotness, whether maps are copied near). rows: on a device of
    the cache.

    Rows without bytes are left out, since the index answers them, and so are rows that do not fit a slot.
    """
    sizes = stored_bytes(table, rows)
    fits = sizes > 0 if slot_bytes == 0 else (sizes > 0) & (sizes <= slot_bytes)
    rows, sizes = rows[fits], sizes[fits]
    owners = torch.ops.ibp.owners_of_rows.default(rows, num_slabs) if num_slabs > 1 else None
    parts = [slice(None) if owners is None else owners == slab for slab in range(num_slabs)]
    plans = [plan_rows(rows[part], sizes[part], slot_bytes, budget_bytes, 1) for part in parts]
    total, held = sum(plan.num_bytes for plan in plans), sum(plan.rows.numel() for plan in plans)
    map_bytes = WAY_BYTES / STATIC_LOAD
    copies = may_copy_maps and num_slabs > 1 and (num_slabs - 1) * map_bytes * held <= NEAR_MAP_SHARE * total
    if copies:
        # All maps as large as the largest: then no device's copies exceed its budget.
        most = max(
            plan_rows(rows[part], sizes[part], slot_bytes, budget_bytes, num_slabs).rows.numel() for part in parts
        )
        fixed = (num_slabs - 1) * sets_for(most) * STATIC_WAYS * WAY_BYTES
        plans = [
            plan_rows(rows[part][:most], sizes[part][:most], slot_bytes, budget_bytes - fixed, 1) for part in parts
        ]
    return plans, copies


# ---- making them ----


def empty_map(num_ways: int, device: torch.device) -> torch.Tensor:
    made = torch.zeros(num_ways, 2, dtype=torch.int64, device=device)
    made[:, 0] = -1
    return made


def filled_slab(table: Table, plan: SlabPlan, number: int, device: torch.device) -> Slab:
    """A slab with the planned rows of a table, copied on the device's current stream. A row whose place in the table is
    corrupt is left out: reading it raises."""
    num_bytes = plan.num_bytes + READ_AHEAD_BYTES if plan.rows.numel() else 0
    slab = Slab(
        device,
        torch.empty(num_bytes, dtype=torch.uint8, device=device),
        empty_map(sets_for(plan.rows.numel()) * STATIC_WAYS, device),
    )
    if plan.rows.numel():
        fault = new_record(device)
        rows, offsets = plan.rows.to(device), plan.offsets.to(device)
        handle = handle_on(table, device)
        torch.ops.ibp.fill_slab.default(handle.table, rows, offsets, number, STATIC_WAYS, slab.bytes, slab.map, fault)
    return slab


def replacing_slab(slot_bytes: int, budget_bytes: int, num_rows: int, device: torch.device) -> Slab:
    """An empty slab whose rows replace each other. It has as many sets as the budget holds, but no more than a table of
    num_rows rows fills by half."""
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
    """Copies of every slab's map on all other devices."""
    return {
        device: {i: slab.map.to(device) for i, slab in enumerate(slabs) if slab.device != device}
        for device in {slab.device for slab in slabs}
    }


# ---- entries ----


class Entries:
    """Fields of entries, int64 tensors."""

    @staticmethod
    def are_present(entries: torch.Tensor) -> torch.Tensor:
        return (entries >> _PRESENT_SHIFT & 1).bool()

    @staticmethod
    def are_dirty(entries: torch.Tensor) -> torch.Tensor:
        return (entries & DIRTY) != 0

    @staticmethod
    def slabs(entries: torch.Tensor) -> torch.Tensor:
        return entries >> _SLAB_SHIFT & 7

    @staticmethod
    def offsets(entries: torch.Tensor) -> torch.Tensor:
        return entries & ((1 << _SLAB_SHIFT) - 1)
