"""The handle of a table: how the operations of one device are given it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core


class Parts(NamedTuple):
    """A table in memory that one device reads, as torch.ops.ibp.describe_table takes it (see `_common/ops.py`).
    rooms, used: of a place, which rows are coded into."""

    slots: torch.Tensor
    overflow: torch.Tensor
    lengths: torch.Tensor
    bases: torch.Tensor
    codebook: torch.Tensor
    codec: list[int]
    slot_bytes: int
    overflow_start: int
    num_items: int
    item_bytes: int
    rooms: torch.Tensor | None = None
    used: torch.Tensor | None = None


class Handle:
    """A table that has been checked and described once for all operations of a device. Describing it costs about as
    much as a call.

    RuntimeError: parts contradict each other."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts  # its memory
        # Owns the description, and takes calls for few items once it is ready for them.
        self.core = _core.TableHandle(torch.ops.ibp.describe_table.default, parts)
        # The argument `table` of operations. It keeps the memory alive.
        self.table = torch.frombuffer(self.core, dtype=torch.uint8)

    def __reduce__(self) -> tuple[type[Handle], tuple[Parts]]:
        """A copy is described anew, with copies of the parts."""
        return Handle, (self.parts,)

    def encode(
        self,
        x: torch.Tensor,
        counts: torch.Tensor,
        fault: torch.Tensor,
        *,
        buffers: torch.Tensor | None = None,
        row_ids: torch.Tensor | None = None,
        first_row: int = 0,
        max_sms: int = 0,
    ) -> None:
        """Codes the rows of x, or of buffers of its layout, into a place: see `_tables.coded_rows.encode_into`."""
        torch.ops.ibp.encode_into.default(self.table, x, buffers, row_ids, first_row, max_sms, counts, fault)
