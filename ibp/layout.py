"""Slot sizes and the row index of a table (FORMAT.md sections 2 and 3)."""

from __future__ import annotations

import torch

from .rows import Geometry

SECTOR_BYTES = 32
_SECOND_FETCH_BYTES = 64  # what fetching a row's second part costs, as bytes: 1.45 ns a request at about 0.65 ns a sector


def stored_sectors(lengths: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """How many rows take k sectors of 32 bytes as stored, for k = 0, 1, ...; lengths empty: all rows raw."""
    most = -(-geometry.row_bytes // SECTOR_BYTES)
    histogram = torch.zeros(most + 1, dtype=torch.int64)
    if lengths.numel() == 0:
        histogram[most] = geometry.num_rows
    for part in lengths.split(1 << 22):
        length = part.to(torch.int64)
        sectors = torch.where(length == 0, geometry.row_bytes, length).add_(SECTOR_BYTES - 1).div_(SECTOR_BYTES, rounding_mode="floor")
        histogram += torch.bincount(sectors, minlength=most + 1)
    return histogram


def slot_costs(lengths: torch.Tensor, geometry: Geometry) -> dict[int, float]:
    """Bytes that slots and overflow occupy by slot size, each row's second fetch priced in: for the multiples of 32 below row_bytes, and row_bytes."""
    histogram = stored_sectors(lengths, geometry).to(torch.float64)
    slots = torch.arange(len(histogram), dtype=torch.float64)
    rows_above = histogram.flip(0).cumsum(0).flip(0) - histogram  # rows that overflow a slot of k sectors
    sectors_above = (histogram * slots).flip(0).cumsum(0).flip(0) - histogram * slots - rows_above * slots
    costs = (geometry.num_rows * slots * SECTOR_BYTES + sectors_above * SECTOR_BYTES + rows_above * _SECOND_FETCH_BYTES).tolist()
    below = range(1, -(-geometry.row_bytes // SECTOR_BYTES))
    return {k * SECTOR_BYTES: costs[k] for k in below} | {geometry.row_bytes: float(geometry.num_rows * geometry.row_bytes)}


def choose_slot_bytes(lengths: torch.Tensor, geometry: Geometry) -> int:
    """The slot size with the least cost; of equal ones the largest."""
    costs = slot_costs(lengths, geometry)
    return max(costs, key=lambda slot_bytes: (-costs[slot_bytes], slot_bytes))


def check_slot_bytes(slot_bytes: int, row_bytes: int) -> None:
    if slot_bytes == row_bytes or (0 < slot_bytes < row_bytes and slot_bytes % SECTOR_BYTES == 0):
        return
    raise ValueError(f"slot_bytes is {slot_bytes}; wanted a multiple of {SECTOR_BYTES} below the row's {row_bytes} bytes, or {row_bytes} itself")


def slots_size(geometry: Geometry, slot_bytes: int) -> int:
    """Bytes of the slots array."""
    return geometry.num_bytes if slot_bytes == geometry.row_bytes else geometry.num_rows * slot_bytes


def index_rows(lengths: torch.Tensor, geometry: Geometry, slot_bytes: int) -> tuple[torch.Tensor, int]:
    """(bases, overflow bytes); bases is empty if no row overflows."""
    bases = torch.ops.ibp.index_rows(lengths, geometry.num_bytes, geometry.row_bytes, slot_bytes)
    overflow_bytes = int(bases[-1])
    return (bases[:-1].clone() if overflow_bytes else bases[:0].clone()), overflow_bytes


def fetch_cost(lengths: torch.Tensor, geometry: Geometry, slot_bytes: int) -> int:
    """link_bytes with the second fetch of rows that overflow their slot priced in."""
    overflowing = stored_sectors(lengths, geometry)[slot_bytes // SECTOR_BYTES + 1 :].sum() if 0 < slot_bytes < geometry.row_bytes else 0
    return link_bytes(lengths, geometry, slot_bytes) + int(overflowing) * _SECOND_FETCH_BYTES


def link_bytes(lengths: torch.Tensor, geometry: Geometry, slot_bytes: int) -> int:
    """Bytes of the whole 32-byte sectors that a fetch of every row reads, each row once; lengths on the CPU."""
    sectors, overflow_end, step = 0, 0, 1 << 22
    for first in range(0, geometry.num_rows, step):
        row = torch.arange(first, min(first + step, geometry.num_rows))
        valid = torch.clamp(geometry.num_bytes - row * geometry.row_bytes, max=geometry.row_bytes)
        length = lengths[first : first + len(row)].to(torch.int64) if lengths.numel() else torch.zeros_like(row)
        stored = torch.where(length == 0, valid, length)
        part = (stored - slot_bytes).clamp(min=0)
        sectors += _touched(row * slot_bytes, stored - part)
        room = part if slot_bytes == 0 else (part + SECTOR_BYTES - 1) // SECTOR_BYTES * SECTOR_BYTES
        ends = overflow_end + room.cumsum(0)
        sectors += _touched(ends - room, part)
        overflow_end = int(ends[-1])
    return sectors * SECTOR_BYTES


def _touched(start, size):
    touched = (start + size - 1) // SECTOR_BYTES - start // SECTOR_BYTES + 1
    return int(touched[size > 0].sum())
