"""Fetches items with the CPU's help: threads of the CPU gather the stored rows, the copy engine moves them, and the GPU
decodes them.

If a GPU itself fetches rows at random addresses of a large table, address translation limits its speed. CPU cores do
not have this limit. If the table is pinned and has slots, the threads gather the slots, and the GPU, which has the
table's index, reads the gathered slots in place of those in host memory. One operation does this
(csrc/cuda/stream/stage.cu). For other tables the threads make a selection: a table in packed layout (FORMAT.md section
3) that holds only the selected items. The GPU decodes a selection as it decodes any other table.
"""

from __future__ import annotations

from functools import partial

import torch

from .. import _core
from .._common.modes import outside_of_modes
from .._common.process import ForkLock
from .._machine import memory as _memory
from .._machine.staging import Ring
from .._rows.codebook import coding_of
from .._rows.handle import OF_SELECTIONS, Handle, Parts, new_record, spread_bytes
from .._rows.table import Table, faults_of, handle_on

# Size in bytes of one chunk, which holds the rows and the index of a selection. The copy engine reaches its full rate
# with copies of 4 MiB or more.
CHUNK_BYTES = 8 << 20
# While one chunk is gathered, another is copied and a third is decoded. Each chunk has a buffer in pinned memory and a
# buffer in device memory.
NUM_CHUNKS = 3
# Size in bytes of each of two rings for slots, one in pinned memory and one in device memory. The core divides each
# ring into twelve buffers.
RING_BYTES = 24 << 20
_CPU = torch.device("cpu")


def rows_at_once(table: Table) -> int:
    """Returns the number of rows that are expected to fit in one chunk. Returns 0 if items do not consist of whole
    rows, or if the rows of an item may not fit in a chunk."""
    geometry = table.geometry
    if geometry.item_bytes == 0 or geometry.item_bytes % geometry.row_bytes:
        return 0
    rows_per_item = geometry.item_bytes // geometry.row_bytes
    most_bytes = CHUNK_BYTES - (rows_per_item + _core.ROWS_PER_BASE) * geometry.row_bytes - 64
    mean_bytes = spread_bytes(table) // max(1, geometry.num_rows)
    num_rows = min(2 * most_bytes // 5, CHUNK_BYTES // (mean_bytes + 3))  # The index has at most 2.5 bytes per row.
    return num_rows if num_rows >= rows_per_item else 0


def parts_of(memory: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divides a chunk's memory into the parts of a selection of at most num_rows rows. Returns views of them: (bases,
    lengths, rows)."""
    bases_bytes = -(-num_rows // _core.ROWS_PER_BASE) * 8
    lengths_end = bases_bytes + 2 * num_rows
    return (
        memory[:bases_bytes].view(torch.int64),
        memory[bases_bytes:lengths_end].view(torch.uint16),
        memory[-(-lengths_end // 16) * 16 :],
    )


def select(
    table: Table, ids: torch.Tensor, first: int, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> list[int]:
    """Fills the parts of a chunk with a selection: the items ids[first], ids[first + 1] and so on, until the next item
    does not fit. At least one item is taken.

    Args:
        parts: what `parts_of` returns for the chunk.

    Returns:
        [number of selected items, total size of their stored rows in bytes].

    Raises:
        IndexError, CorruptTableError: an id or a row is bad. Positions in error messages count from ids[0].
    """
    bases, lengths, rows = parts
    taken, fault, handle = torch.empty(2, dtype=torch.int64, device="cpu"), new_record(), handle_on(table, _CPU)
    torch.ops.ibp.select_rows.default(handle.table, ids, first, lengths, bases, rows, taken, fault)
    handle.faults.raise_for(fault)
    return taken.tolist()


def decode(
    table: Table,
    selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    first: int,
    num_items: int,
    order: torch.Tensor,
    max_sms: int,
    out: torch.Tensor,
    fault: torch.Tensor,
) -> None:
    """Decodes a selection of num_items items on its device, and writes them to out[first : first + num_items].

    Args:
        order: int32 tensor on the device: 0, 1, 2 and so on, one number for each item of out.
    """
    bases, lengths, rows = selection
    geometry, none = table.geometry, rows[:0]
    codec, words = coding_of(table.codebook, table.row_bytes, rows.device)
    sizes = (0, num_items, geometry.item_bytes)
    if table.scheme == "raw":
        parts = Parts(rows, none, lengths[:0], bases[:0], words, codec, geometry.row_bytes, *sizes)
    else:
        num_rows = num_items * geometry.item_bytes // geometry.row_bytes
        parts = Parts(none, rows, lengths, bases[: -(-num_rows // _core.ROWS_PER_BASE)], words, codec, 0, *sizes)
    ids, places = order[:num_items], order[first : first + num_items]
    torch.ops.ibp.gather_items.default(Handle(parts).table, ids, max_sms, out, fault, places)


# ---- the buffers, and the calls that use them ----

# For each device, the buffers that both kinds of calls use, with their locks: only one call at a time may use a stager
# or a ring. A stager gathers slots through two rings, one in pinned memory and one in device memory.
_stagers: dict[torch.device, tuple[_core.Stager, ForkLock]] = {}
_rings: dict[torch.device, tuple[Ring, ForkLock]] = {}
_refused: set[torch.device] = set()
_lock = ForkLock()


def _gathers_slots(table: Table) -> bool:
    """Returns whether the CPU gathers the slots of a table. If not, it makes selections."""
    item_slots = table.geometry.item_bytes // table.row_bytes * table.slot_bytes
    return table.is_pinned() and 0 < item_slots <= RING_BYTES // 16


def _new_stager(device: torch.device) -> _core.Stager:
    with outside_of_modes():
        pinned = _memory.empty(RING_BYTES, _CPU, pin=True)
        near = torch.empty(RING_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        # If the memory belonged to another tensor before, queued work on this stream may still use it.
        torch.cuda.current_stream(device).synchronize()
        return _core.Stager(pinned.data_ptr(), near.data_ptr(), RING_BYTES, (pinned, near))


def _stager_of(device: torch.device) -> tuple[_core.Stager, ForkLock]:
    with _lock:
        if device not in _stagers:
            _stagers[device] = _new_stager(device), ForkLock()
        return _stagers[device]


def _ring_of(device: torch.device) -> tuple[Ring, ForkLock]:
    with _lock:
        if device not in _rings:
            worker, empty_host = torch.cuda.current_stream(device), partial(_memory.empty, device=_CPU, pin=True)
            _rings[device] = Ring(device, worker, CHUNK_BYTES, NUM_CHUNKS, empty_host), ForkLock()
        return _rings[device]


def has_buffers(table: Table, device: torch.device) -> bool:
    """Makes the buffers through which the rows of a table are gathered for a device, unless they exist already. Returns
    False if the system refuses to pin them."""
    if device not in _refused:
        try:
            _stager_of(device) if _gathers_slots(table) else _ring_of(device)
        except _memory.PinningError as error:
            _memory.warn_of_pageable(error)
            _refused.add(device)
    return device not in _refused


def fetch(table: Table, ids: torch.Tensor, device: torch.device, max_sms: int, out: torch.Tensor) -> None:
    """Fetches items of a table in host memory to a CUDA device. The device's current stream waits for them.

    The call returns when the last row is gathered. It waits for the GPU only if the buffers of all chunks are in use.

    Args:
        ids: on the CPU, contiguous, not empty.
        out: receives the items; contiguous, on the device.
    """
    if not _gathers_slots(table):
        _fetch_selections(table, ids, device, max_sms, out)
        return
    handle_on(table, _CPU)  # Waits for a GPU that has changed the slots: the threads must not read them before.
    (stager, lock), handle = _stager_of(device), handle_on(table, device)
    fault = handle.faults.on(device)
    with lock:
        torch.ops.ibp.stage_items.default(handle.table, table.slots, ids, stager.address, max_sms, out, fault)


def _fetch_selections(table: Table, ids: torch.Tensor, device: torch.device, max_sms: int, out: torch.Tensor) -> None:
    (ring, lock), current = _ring_of(device), torch.cuda.current_stream(device)
    fault = faults_of(table).on(device, OF_SELECTIONS)
    num_rows = min(rows_at_once(table), ids.numel() * (table.geometry.item_bytes // table.row_bytes))
    order = torch.arange(ids.numel(), dtype=torch.int32, device=device)
    first = 0
    with lock:
        while first < ids.numel():
            turn = ring.next()
            parts = parts_of(turn.host, num_rows)
            turn.filled.synchronize()
            num_items, num_bytes = select(table, ids, first, parts)
            size = parts[2].storage_offset() - turn.host.storage_offset() + num_bytes
            turn.bring(ring.stream, [(turn.memory[:size], turn.host[:size])])
            turn.wait(current)
            decode(table, parts_of(turn.memory, num_rows), first, num_items, order, max_sms, out, fault)
            turn.release(current)
            first += num_items
