"""Tables made ready for calls by the shortest way."""

from __future__ import annotations

import torch

from .._machine import calibration
from .._rows.table import Table
from .paths import is_capturing

LEAST_SHARED_BYTES = 1 << 19  # of items: fewer are one thread's work on the CPU (torch_ops.cpp)
_MANY = 1 << 62  # bytes


def make_ready(table: Table, worker: torch.device) -> None:
    """Readies a table for calls with ids on the device that decodes, where it is not; those of many items have a choice
    of paths."""
    if table.is_ready(worker) or table.item_bytes == 0 or (worker.type == "cuda" and is_capturing(worker)):
        return
    most_items = LEAST_SHARED_BYTES // table.item_bytes
    if worker.type == "cuda":
        machine = calibration.in_force(worker)
        is_large = table.device.type == "cpu" and table.resident_bytes >= machine.reach_bytes
        most_items = machine.least_bucketed_ids - 1 if is_large else _MANY // table.item_bytes
    table.make_ready(worker, most_items)
