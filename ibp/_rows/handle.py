"""The handle of a table: a description of the table that operations on one device take as an argument."""

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
        codebook, codec: the words and the codec of the codebook (see `AnyCodebook`).
        overflow_start: the offset in bytes at which `overflow` begins in the overflow of the whole table. It is 0
            unless the parts belong to only some of the table's rows.
        rooms, used: needed only if rows are to be encoded into the memory (see `room.Index`).
        fault, plan: the fault record and the plan that the operation `take` uses on a GPU.
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
    """The description of a table for the operations on one device. It is checked and made once, and used by all later
    operations. This saves time, because describing a table takes about as long as calling an operation.

    Attributes:
        parts: the table's memory.
        table: the tensor that operations take as their argument `table`. It keeps the table's memory alive.

    Raises:
        RuntimeError: parts are inconsistent.
    """

    # Only handles that `handle_on` returns have the following attributes. Calls of `take` use them.
    like: torch.Tensor  # An empty tensor [0, *item_shape] with the table's dtype.
    plan: Plan
    machine: Calibration | None  # The calibration that the plan is for; None if the table is in the device's memory.
    noted: memoryview  # The words of the table's fault records for the device (see `Faults.words`).
    staged: dict[tuple[int, int], bool]  # (number of ids, number of threads) -> whether the CPU gathers the rows.

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.table = torch.ops.ibp.describe_table.default(*parts)
        self.table.parts = parts

    def __reduce__(self) -> tuple[type[Handle], tuple[Parts]]:
        """Copies and pickles only the parts, so that a copy makes its own description of its own parts."""
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
        """Encodes the rows of x, or of buffers with the layout of x, into the table's memory.

        For the arguments counts, fault and is_new, see the operation encode_into in csrc/bindings/torch_ops.cpp. For
        all others, see `_tables.coded_rows.encode_into`.
        """
        given = (buffers, row_ids, first_row, max_sms, counts, fault, is_new)
        torch.ops.ibp.encode_into.default(self.table, x, *given)
