"""Whole tensors: `decompress`."""

from __future__ import annotations

import torch

from .calls import check_table, produce, sms_of, target_of, worker_of
from .table import CompressedTensor


def decompress(table: CompressedTensor, *, device: torch.device | str | int | None = None, out: torch.Tensor | None = None,
               check: bool = False, max_sms: int | None = None) -> torch.Tensor:
    """The whole tensor again.

    Args:
        table: a table made from a tensor x.
        device: where the result goes; None: out's device, else the table's.
        out: contiguous tensor of x's shape and dtype to write to.
        check, max_sms: as in `index_select`.

    Returns:
        Tensor of x's shape and dtype; out if it was given.

    Raises:
        TypeError, ValueError: out does not fit.
        CorruptTableError: the table's bytes contradict each other; from a GPU as `index_select` reports faults.
    """
    check_table(table)
    return decode_items(table, 0, None, device, out, check, max_sms)


def decode_items(table, first_item, last_item, device, out, check, max_sms):
    """Items first_item to last_item - 1 in order; all of the tensor, in its own shape, if last_item is None."""
    geometry = table._geometry
    shape = table.shape if last_item is None else (last_item - first_item, *table.shape[1:])
    start, end = first_item * geometry.item_bytes, (geometry.num_items if last_item is None else last_item) * geometry.item_bytes
    target = target_of(device, out, table.device)
    worker = worker_of(table, target)

    def run(data, fault):
        torch.ops.ibp.decode_bytes(*table._arguments(worker), start, end, sms_of(max_sms), data, fault)

    return produce(table, shape, target, worker, out, check, run)
