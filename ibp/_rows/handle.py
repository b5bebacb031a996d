"""The handle of a table: the description of a table that the operations of one device take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._machine.calibration import Calibration
from .plan import Plan


class Parts(NamedTuple):
    """The memory of a table as one device reads it: the arguments of torch.ops.ibp.describe_table
    (csrc/bindings/torch_ops.cpp).

    Attributes:
        rooms, used: given if rows are to be encoded into the memory.
        fault, plan: what `take` needs on a GPU.
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
    """A table that has been checked and described once for all operations of a device. Describing a table takes about
    as long as a call of an operation.

    Attributes:
        parts: the table's memory.
        table: the tensor that operations take as their argument `table`. It keeps the memory alive.

    Raises:
        RuntimeError: parts contradict each other.
    """

    # These attributes are set only on the handles that `handle_on` returns, which calls of `take` use:
    like: torch.Tensor  # An empty tensor with the dtype of an item; its dimensions after the first are an item's shape.
    plan: Plan
    machine: Calibration | None  # The calibration of the plan; None if the table is in the memory of the device.
    noted: memoryview  # The words of the fault records that GPUs write to.
    staged: dict[tuple[int, int], bool]  # Whether the CPU gathers the rows, by the numbers of ids and of threads.

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.table = torch.ops.ibp.describe_table.default(*parts)
        self.table.parts = parts

    def __reduce__(self) -> tuple[type[Handle], tuple[Parts]]:
        """Copies and pickles only the parts, so that a copy describes its own parts."""
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
        """Encodes the rows of x, or of buffers with the layout of x, into the table's memory. See
        `_tables.coded_rows.encode_into`, and the operation in csrc/bindings/torch_ops.cpp for counts, fault and
        is_new."""
        given = (buffers, row_ids, first_row, max_sms, counts, fault, is_new)
        torch.ops.ibp.encode_into.default(self.table, x, *given)
