"""Changes rows of a table: `update_` and `append`. New rows are encoded with the table's codebook. Each row is written
to its slot. If it does not fit, the rest goes to a part of the overflow that belongs to this row alone."""

from __future__ import annotations

from typing import Any

import torch

from .. import _core
from .._fetch.calls import Ids, check_range, list_of_ids
from .._machine import memory
from .._rows.forms import Room
from .._rows.geometry import Geometry, bytes_of, rows_of
from .._rows.handle import Handle, new_record
from .._rows.table import (
    Table,
    check_can_change,
    decoded_bytes,
    encode_rows,
    faults_of,
    handle_on,
    make_overflow,
    make_room,
)

_SECTOR = _core.SECTOR_BYTES
_FEW_IDS = 256  # Up to this many ids are compared on the host, because a GPU would take longer to sort them.


def put_items(table: Table, ids: torch.Tensor, items: torch.Tensor) -> None:
    """Replaces items of a table. ids: int64, all different and in range. items: the new items, which `check_rows` has
    checked."""
    if ids.numel() == 0 or table.geometry.item_bytes == 0:
        return
    worker = _worker_of(table, items.device, ids.device)
    make_room(table)
    numbers, data = _rows_of_items(table, ids.to(worker), items.to(worker))
    encode_rows(table, data, worker, row_ids=numbers)


def put_rows(table: Table, numbers: torch.Tensor, data: torch.Tensor) -> None:
    """Replaces whole rows of a table. numbers: the row numbers, int64, all different and in range. data: the bytes of
    the new rows."""
    worker = _worker_of(table, data.device)
    make_room(table)
    encode_rows(table, data.to(worker), worker, row_ids=numbers.to(worker))


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
    make_room(table, new.num_rows)
    data = bytes_of(rows.detach().to(worker))
    first_row, rest = divmod(old.num_bytes, old.row_bytes)
    if rest:
        data = torch.cat((decoded_bytes(table, old.num_bytes - rest, old.num_bytes, worker), data))
    # The short last row is encoded again together with the new bytes. If that fails, the memory of the row gets its old
    # bytes back. The overflow is enlarged before these bytes are copied, because a larger overflow is other memory.
    room = make_overflow(table, data)
    kept = [(part, part.clone()) for part in _memory_of_row(table, room, first_row, worker)] if rest else []
    try:
        encode_rows(table, data, worker, first_row=first_row, geometry=new)
    except BaseException:
        if table.geometry is not new:
            for part, held in kept:
                part.copy_(held)
        raise


def reserve(table: Table, num_items: int) -> None:
    """Allocates memory for `num_items` items in total, so that `append` does not move rows until the table has more
    than `num_items` items."""
    make_room(table, Geometry(torch.Size((num_items, *table.shape[1:])), table.dtype, table.row_bytes).num_rows)


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
    """Checks the arguments of `update_` and converts them to the arguments (ids, items) of `put_items`. If an id occurs
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
    gpus = [device for device in (*devices, *faults_of(table).devices) if device.type == "cuda"]
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
        handle = handle_on(table, worker)
        parts = handle.parts
        parts = parts._replace(bases=parts.bases[:num_whole], num_items=num_whole, item_bytes=row_bytes)
        torch.ops.ibp.gather_items.default(Handle(parts).table, whole, 0, out, fault, None)
        handle.faults.raise_for(fault)
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
