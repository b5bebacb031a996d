"""Changes rows of a cache: removes them, encodes them into their slots, or writes them back to the table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._fetch.calls import Ids
from .._rows.codebook import AnyCodebook, coding_of
from .._rows.faults import FaultWords, new_record
from .._rows.geometry import bytes_of, default_length, rows_of
from .._rows.planes import signed
from .._rows.table import Handle, Parts, handle_on
from .._tables import changes
from .._tables.changes import put_rows
from ._slabs import DIRTY, CacheState, Entries, Generation, Slab

_BLOCK_BYTES = 256 << 20  # size in bytes of the rows that are written back at once
_WORDS = FaultWords("a changed row of the cache is damaged: it cannot be written back")


def forget(state: CacheState, generation: Generation, rows: torch.Tensor | None) -> None:
    """Removes rows from every map of a generation, and from every copy of a map. rows: the row numbers; None: all
    rows."""
    for held in generation.all_maps():
        state.hold(generation, held.device, state.order.write(held.device))
        if rows is not None:
            torch.ops.ibp.drop_cached.default(rows.to(held.device), generation.ways, held)
        else:
            held.zero_()[:, 0] = -1


def update(state: CacheState, ids: Ids, rows: torch.Tensor) -> None:
    """Implements `RowCache.update_`."""
    put_items(state, *changes.changed_items(state.view, ids, rows))


def put_items(state: CacheState, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Changes items of a cache and its table. ids: int64, all different and in range. rows: in the form that
    `check_rows` requires."""
    if ids.numel() == 0 or state.view.geometry.item_bytes == 0:
        return
    with state.change_lock, state.lock:
        generation = state.generation
        state.check(generation)
        if state.writable and not state.is_idle:
            _write(state, generation, ids.to(state.devices[0]), rows)
        else:
            for held in (generation, *state.captured):
                forget(state, held, rows_of(ids, state.rows_per_item))
            changes.put_items(state.view, ids, rows)
            mark_current(state)


def mark_current(state: CacheState) -> None:
    for held in (state.generation, *state.captured):
        held.version = state.view.version


def _write(state: CacheState, generation: Generation, items: torch.Tensor, rows: torch.Tensor) -> None:
    """Changes items of a writable cache. If a row is cached and its new bytes fit in its slot, the row is changed in
    the slot. All other rows are changed in the table, and those that are cached are removed from the cache. items: ids
    on the cache's first device, all different."""
    view, worker = state.view, items.device
    numbers = rows_of(items, state.rows_per_item)
    data = bytes_of(rows.to(worker)).view(numbers.numel(), view.row_bytes)
    entries = torch.empty_like(numbers)
    state.hold(generation, worker, state.order.read(worker))
    maps, _ = generation.view_of(worker)
    lengths = handle_on(view, worker).parts.lengths
    torch.ops.ibp.find_cached.default(numbers, 1, view.row_bytes, lengths, maps, generation.ways, entries, None)
    held = entries.nonzero()[:, 0]
    coded = _CodedChanges.of(generation.codebook, _rows_at(data, held), generation.slot_bytes)
    fitting = coded.fits.nonzero()[:, 0]
    kept, lost = held, None
    if fitting.numel() < held.numel():
        kept, lost, coded = held[fitting], numbers[held[~coded.fits]], coded.some(fitting)
    if kept.numel() < numbers.numel():
        others = torch.ones_like(numbers, dtype=torch.bool).index_fill_(0, kept, False).nonzero()[:, 0]
        put_rows(view, numbers[others], _rows_at(data, others).view(-1))
        mark_current(state)
    numbers, entries = numbers[kept], entries[kept]
    for number, slab in generation:
        mine = None if len(generation.slabs) == 1 else (Entries.slabs(entries) == number).nonzero()[:, 0]
        state.hold(generation, slab.device, state.order.write(slab.device))
        if mine is None:
            _put(slab, generation, numbers, entries, coded)
        else:
            _put(slab, generation, numbers[mine], entries[mine], coded.some(mine))
        if lost is not None:
            torch.ops.ibp.drop_cached.default(lost.to(slab.device), generation.ways, slab.map)


def _put(
    slab: Slab, generation: Generation, numbers: torch.Tensor, entries: torch.Tensor, coded: _CodedChanges
) -> None:
    """Copies coded rows to their slots in a slab, and marks them as changed. numbers: the row numbers. entries: their
    map entries."""
    if numbers.numel() == 0:
        return
    slot_bytes, num_bytes = generation.slot_bytes, coded.bytes.shape[1]
    num_slots = slab.bytes.numel() // slot_bytes
    slots = slab.bytes[: num_slots * slot_bytes].view(num_slots, slot_bytes)[:, :num_bytes]
    rows, numbers, entries = (tensor.to(slab.device) for tensor in (coded.bytes, numbers, entries))
    if num_bytes % 8 == 0:
        slots, rows = _wide(slots), _wide(rows)
    places, lengths = Entries.offsets(entries) // slot_bytes, coded.lengths.to(slab.device).view(torch.uint16)
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


class _CodedChanges(NamedTuple):
    """Rows in the form in which a cache stores them.

    Attributes:
        bytes: uint8 [rows, min(slot_bytes, row_bytes)]. Without a codebook, [rows, row_bytes].
        lengths: int16 [rows]: for each row, its entry of a table's `lengths` (uint16), viewed as int16.
        fits: bool [rows]: whether each row fits in a slot.
    """

    bytes: torch.Tensor
    lengths: torch.Tensor
    fits: torch.Tensor

    @classmethod
    def of(cls, codebook: AnyCodebook | None, data: torch.Tensor, slot_bytes: int) -> _CodedChanges:
        """Encodes data, [rows, row_bytes]. Default rows have no bytes; `fits` is False for them if there is a
        codebook."""
        (num_rows, row_bytes), device = data.shape, data.device
        if codebook is None:
            fits = torch.full((num_rows,), slot_bytes >= row_bytes, dtype=torch.bool, device=device)
            return cls(data, torch.zeros(num_rows, dtype=torch.int16, device=device), fits)
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
        return cls(slots, found, fits)

    def some(self, which: torch.Tensor) -> _CodedChanges:
        return _CodedChanges(_rows_at(self.bytes, which), self.lengths[which], self.fits[which])


def flush(state: CacheState) -> None:
    """Implements `RowCache.flush`."""
    view = state.view
    with state.change_lock, state.lock:
        generation = state.generation
        was_current = generation.version == view.version
        for _, slab in generation:
            state.hold(generation, slab.device, state.order.write(slab.device))
            are_dirty = Entries.are_dirty(slab.map[:, 1]) & (slab.map[:, 0] >= 0)
            changed = are_dirty.nonzero()[:, 0]
            for ways in changed.split(max(1, _BLOCK_BYTES // view.row_bytes)) if changed.numel() else ():
                numbers, entries = slab.map[ways].t().contiguous().unbind(0)
                put_rows(view, numbers, _decoded(generation, entries, slab.device, view.row_bytes))
                slab.map[ways, 1] = entries & ~DIRTY
        if was_current:
            mark_current(state)


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
