"""Changes rows of a table: `update_` and `append`. New rows are encoded with the table's codebook. Each row is written
to its slot. If it does not fit, the rest goes to a part of the overflow that belongs to this row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _core
from .._common.sequences import rounded_up
from .._fetch.calls import Ids, check_range, list_of_ids
from .._machine import memory
from .._machine.segments import Segment
from .._rows.faults import new_record
from .._rows.geometry import Geometry, bytes_of, rows_of
from .._rows.room import Room, room_of
from .._rows.table import Handle, Table, handle_on, spills

_SECTOR = _core.SECTOR_BYTES
_FEW_IDS = 256  # Up to this many ids are compared on the host, because a GPU would take longer to sort them.


def update(table: Table, ids: Ids, rows: torch.Tensor) -> None:
    """See `CompressedTensor.update_`."""
    put_items(table, *changed_items(table, ids, rows))


def put_items(table: Table, ids: torch.Tensor, items: torch.Tensor) -> None:
    """Replaces items of a table. ids: int64, all different and in range. items: the new items, which `check_rows` has
    checked."""
    if ids.numel() == 0 or table.geometry.item_bytes == 0:
        return
    worker = _worker_of(table, items.device, ids.device)
    _make_room(table)
    numbers, data = _rows_of_items(table, ids.to(worker), items.to(worker))
    _encode(table, table.geometry, data, worker, numbers, 0)
    table._note_change()


def put_rows(table: Table, numbers: torch.Tensor, data: torch.Tensor) -> None:
    """Replaces whole rows of a table. numbers: the row numbers, int64, all different and in range. data: the bytes of
    the new rows."""
    worker = _worker_of(table, data.device)
    _make_room(table)
    _encode(table, table.geometry, data.to(worker), worker, numbers.to(worker), 0)
    table._note_change()


def append(table: Table, rows: torch.Tensor) -> None:
    """See `CompressedTensor.append`."""
    if not table.shape:
        raise ValueError("a table of 0 dimensions has no items to append to")
    check_rows(table, rows, None)
    if rows.shape[0] == 0:
        return
    worker = _worker_of(table, rows.device, table.device)
    old = table.geometry
    new = Geometry(torch.Size((old.num_items + rows.shape[0], *old.shape[1:])), table.dtype, table.row_bytes)
    _make_room(table)
    data = bytes_of(rows.detach().to(worker))
    first_row, rest = divmod(old.num_bytes, old.row_bytes)
    if rest:
        data = torch.cat((decoded_bytes(table, old.num_bytes - rest, old.num_bytes, worker), data))
    room = _room_of(table)
    room = table._set_room(room.with_rows(new.num_rows, table.slot_bytes, _memory_of(table)))
    # The short last row is encoded again together with the new bytes. If that fails, its memory gets its old bytes.
    kept = [(part, part.clone()) for part in _memory_of_row(table, room, first_row, worker)] if rest else []
    try:
        if data.numel():
            _encode(table, new, data, worker, None, first_row)
        table._set_room(_room_of(table), new)
    except BaseException:
        for part, held in kept:
            part.copy_(held)
        raise


def reserve(table: Table, num_items: int) -> None:
    """Allocates memory for `num_items` items in total, so that `append` does not move rows until the table has more
    than `num_items` items."""
    _make_room(table)
    geometry = Geometry(torch.Size((num_items, *table.shape[1:])), table.dtype, table.row_bytes)
    table._set_room(_room_of(table).with_rows(geometry.num_rows, table.slot_bytes, _memory_of(table)))


def check_can_change(table: Table) -> None:
    """Raises RuntimeError if rows of the table must not change, because it is shared with other processes."""
    if isinstance(table._segment, Segment):
        raise RuntimeError("the table is shared with other processes, which would read its old index: clone() it first")


# ---- arguments ----


def check_rows(table: Table, rows: Any, count: int | None) -> None:
    """Raises TypeError or ValueError unless rows is a dense tensor whose items have the shape and dtype of the table's
    items. Raises RuntimeError if the table is shared with other processes. count: the number of items that rows must
    have. None: any number."""
    if not isinstance(rows, torch.Tensor):
        raise TypeError(f"rows is a {type(rows).__name__}; wanted a torch.Tensor")
    if rows.dtype != table.dtype:
        raise TypeError(f"rows has dtype {rows.dtype}; wanted the table's, {table.dtype}")
    wanted = [count if count is not None else "any number", *table.geometry.item_shape]
    if rows.dim() != len(wanted) or rows.shape[1:] != table.geometry.item_shape or count not in (None, rows.shape[0]):
        raise ValueError(f"rows has shape {list(rows.shape)}; wanted {wanted}")
    if rows.layout != torch.strided or rows.device.type not in ("cpu", "cuda"):
        raise TypeError(f"rows is a {rows.layout} tensor on {rows.device}; wanted a dense one on the CPU or a GPU")
    check_can_change(table)


def changed_items(table: Table, ids: Ids, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks the arguments of `update` and converts them to the arguments (ids, items) of `put_items`. If an id occurs
    more than once, only its last occurrence is kept. Raises the same errors as `CompressedTensor.update_`."""
    ids = list_of_ids(ids)
    check_rows(table, rows, ids.numel())
    chosen, places = last_of_each(ids, table.geometry.num_items)
    return chosen, rows.detach() if places is None else rows.detach()[places.to(rows.device)]


def _worker_of(table: Table, *devices: torch.device) -> torch.device:
    """Returns the device that is to encode new rows. For a pinned table, this is the first GPU among the given devices.
    If they include no GPU, it is a GPU that has used the table, so that this GPU's reads and the change are in stream
    order. For any other table, or if no GPU is found, it is the table's own device."""
    home = table.device
    if home.type == "cuda" or not table.is_pinned():
        return home
    gpus = [device for device in (*devices, *table._faults.devices) if device.type == "cuda"]
    return gpus[0] if gpus else home


def last_of_each(ids: torch.Tensor, num_items: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Removes repeated ids and keeps the last occurrence of each. Returns (the remaining ids, their positions in
    `ids`). If no id is repeated, returns (ids, None). Raises IndexError if an id is out of range."""
    if ids.numel() == 0:
        return ids, None
    if ids.dtype != torch.int64:
        ids = ids.to(torch.int64)
    if ids.numel() <= _FEW_IDS:
        few = ids.tolist()  # If the ids are on a GPU, the host waits for it here.
        if 0 <= min(few) and max(few) < num_items and len(set(few)) == len(few):
            return ids, None
    ordered, order = ids.sort(stable=True)
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    # If the ids are on a GPU, the host waits for it here.
    low, high, count = torch.stack((ordered[0], ordered[-1], is_last.sum())).tolist()
    if low < 0 or high >= num_items:
        check_range(ids.cpu(), num_items)
    if count == ids.numel():
        return ids, None
    return ordered[is_last], order[is_last]


def _rows_of_items(table: Table, ids: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (numbers of the rows that hold the items, new contents of these rows). The contents are `items` itself if
    each item is one row and `items` is a plain contiguous tensor. Otherwise the contents are bytes. Rows that also hold
    bytes of other items are decoded, and the new bytes are inserted."""
    item_bytes, row_bytes = table.geometry.item_bytes, table.row_bytes
    is_bare = items.is_contiguous() and not (items.requires_grad or items.is_conj() or items.is_neg())
    if item_bytes == row_bytes and is_bare:
        return ids, items
    data = bytes_of(items)
    if item_bytes % row_bytes == 0:
        return rows_of(ids, item_bytes // row_bytes), data
    starts = ids * item_bytes
    first, last = starts // row_bytes, (starts + item_bytes - 1) // row_bytes
    span = torch.arange(-(-item_bytes // row_bytes) + 1, device=ids.device)
    numbers = torch.minimum(first[:, None] + span, last[:, None]).unique()
    held = _decoded_rows(table, numbers)
    at = torch.searchsorted(numbers, first) * row_bytes + starts - first * row_bytes
    held[(at[:, None] + torch.arange(item_bytes, device=ids.device)).reshape(-1)] = data
    return numbers, held


# ---- present contents of rows ----


def decoded_bytes(table: Table, start: int, end: int, worker: torch.device) -> torch.Tensor:
    """Decodes a byte range of the table's tensor on a device. Returns uint8 [end - start]."""
    out = torch.empty(end - start, dtype=torch.uint8, device=worker)
    fault = new_record(worker)
    torch.ops.ibp.decode_bytes.default(handle_on(table, worker).table, start, end, 0, out, fault)
    table._raise_fault(fault)
    return out


def _decoded_rows(table: Table, numbers: torch.Tensor) -> torch.Tensor:
    """Decodes rows, and returns their bytes, uint8 [rows * row_bytes]. If the table's last row is short and is among
    the rows, its bytes are followed by undefined bytes up to row_bytes. numbers: the row numbers, in increasing
    order."""
    geometry, worker = table.geometry, numbers.device
    row_bytes = geometry.row_bytes
    num_whole, rest = divmod(geometry.num_bytes, row_bytes)
    out = torch.empty(numbers.numel() * row_bytes, dtype=torch.uint8, device=worker)
    has_last = bool(rest) and int(numbers[-1]) == num_whole
    whole = numbers[:-1] if has_last else numbers
    fault = new_record(worker)
    if whole.numel():
        parts = handle_on(table, worker).parts
        parts = parts._replace(bases=parts.bases[:num_whole], num_items=num_whole, item_bytes=row_bytes)
        torch.ops.ibp.gather_items.default(Handle(parts).table, whole, 0, out, fault, None)
        table._raise_fault(fault)
    if has_last:
        start = num_whole * row_bytes
        last = decoded_bytes(table, start, start + rest, worker)
        out[whole.numel() * row_bytes :][:rest] = last
    return out


def _memory_of_row(table: Table, room: Room, row: int, worker: torch.device) -> list[torch.Tensor]:
    """Returns views of all memory that holds a stored row: its slot, its entries in the worker's index, and its part of
    the overflow."""
    slot_bytes, index = table.slot_bytes, room.index_on(worker)
    overflow = memory.seen_from(worker, room.overflow) if room.overflow.is_cuda else room.overflow
    parts = [room.slots[row * slot_bytes : (row + 1) * slot_bytes]]
    parts += [tensor[row : row + 1] for tensor in index[:3]]
    if index.bases.numel():
        base, units = int(index.bases[row]), int(index.rooms[row : row + 1].view(torch.int16))
        if 0 <= base <= room.overflow.numel():
            parts.append(overflow[base : base + units * _SECTOR])
    return parts


# ---- coding ----


def _memory_of(table: Table) -> Callable[[int], torch.Tensor]:
    """Returns a function that allocates a given number of bytes in the kind of memory that holds the table's slots."""
    return lambda num_bytes: memory.empty(num_bytes, table.device, table.is_pinned())


def _overflow_memory_of(table: Table) -> Callable[[int], torch.Tensor]:
    """Returns a function that allocates a given number of bytes in the kind of memory that holds the table's
    overflow."""
    home = table.overflow.device
    if spills(table):
        return lambda num_bytes: memory.empty_overflow(num_bytes, home, table.device)
    return lambda num_bytes: memory.empty(num_bytes, home, table.is_pinned())


def copied_overflow(table: Table, overflow: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a table's overflow in the kind of memory that holds it."""
    return memory.copied_overflow(_overflow_memory_of(table)(overflow.numel()), overflow, table.device)


def _room_of(table: Table) -> Room:
    assert table._room is not None
    return table._room


def _make_room(table: Table) -> None:
    """Prepares a table for changes of its rows: gives it a `Room`, and copies its memory if another table uses the same
    memory. Does nothing if this is already done."""
    if table._room is not None and not table._is_aliased:
        return
    if table.scheme == "raw" and table.slot_bytes < table.row_bytes:
        table._become_plain(bytes_of(decoded_bytes(table, 0, table.original_bytes, table.device)))
    slots, overflow = table.slots, table.overflow
    if table._is_aliased:  # Another table has the same memory and must keep its rows.
        slots = _memory_of(table)(slots.numel()).copy_(slots)
        overflow = copied_overflow(table, overflow)
    table._set_room(room_of(table.geometry, table.slot_bytes, slots, overflow, table.lengths, table.bases))


def _encode(
    table: Table,
    geometry: Geometry,
    data: torch.Tensor,
    worker: torch.device,
    numbers: torch.Tensor | None,
    first_row: int,
) -> None:
    """Encodes rows into the table's room. If the overflow may be too small for the rows, it is enlarged first. The ids
    have been checked. Therefore the operation needs no fault record.

    Args:
        geometry: the geometry of the table after the change.
        data: the new rows, contiguous, on the worker.
        worker: the device that encodes the rows.
        numbers: the row numbers, all different. None: first_row and the row numbers after it.
    """
    row_bytes, slot_bytes = table.row_bytes, table.slot_bytes
    most_bytes = -(-data.nbytes // row_bytes) * rounded_up(row_bytes - slot_bytes, _SECTOR)
    room = table._set_room(_room_of(table).with_overflow(most_bytes, _overflow_memory_of(table)))
    same = geometry is table.geometry
    handle = handle_on(table, worker) if same else Handle(table._parts(worker, geometry))
    index = room.begin_change(worker)
    table._forget_handles(worker)
    room.most_used += most_bytes
    handle.encode(data, row_ids=numbers, first_row=first_row)
    if worker.type == "cpu":
        room.most_used = int(index.used)
