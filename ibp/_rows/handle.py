"""The handle of a table: how the operations of one device are given it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._machine.calibration import Calibration
from .plan import Plan


class Parts(NamedTuple):
    """The arguments of torch.ops.ibp.describe_table (csrc/bindings/torch_ops.cpp): a table in memory that one device
    can read.

    Attributes:
        rooms, used: given if rows may be coded into the table.
        fault, plan: needed by `take` on a GPU.
    """

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
    fault: torch.Tensor | None = None
    plan: Sequence[int] = ()


class Handle:
    """A description of a table for all operations of one device. It is checked once, because describing a table costs
    about as much as a call.

    Attributes:
        parts: the table's memory.
        table: the argument `table` of operations, a tensor. It keeps the memory alive.

    Raises:
        RuntimeError: parts contradict each other.
    """

    # Only the handles that `handle_on` returns have these, because `take` needs them:
    like: torch.Tensor  # empty; has the dtype of an item, and its dimensions behind the first
    plan: Plan
    machine: Calibration | None  # the rates that the plan was made by; None: the table is in the device's memory
    noted: memoryview  # the words of the fault records to which GPUs write
    staged: dict[tuple[int, int], bool]  # whether the CPU gathers rows, by the numbers of ids and of threads

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.table = torch.ops.ibp.describe_table.default(*parts)
        self.table.parts = parts

    def __reduce__(self) -> tuple[type[Handle], tuple[Parts]]:
        """Lets copies be described anew, with copies of the parts."""
        return Handle, (self.parts,)

    def encode(
        self,
        x: torch.Tensor,
        counts: torch.Tensor | None = None,
        fault: torch.Tensor | None = None,
        *,
        buffers: torch.Tensor | None = None,
        row_ids: torch.Tensor | None = None,
        first_row: int = 0,
        max_sms: int = 0,
        is_new: bool = False,
    ) -> None:
        """Encodes the rows of x, or of buffers of its layout, into a place: see `_tables.coded_rows.encode_into`, and
        the operation in csrc/bindings/torch_ops.cpp for counts, fault and is_new."""
        given = (buffers, row_ids, first_row, max_sms, counts, fault, is_new)
        torch.ops.ibp.encode_into.default(self.table, x, *given)
