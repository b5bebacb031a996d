"""Items of a table by their ids: `index_select`."""

from __future__ import annotations

import torch

from .calls import check_table, produce, sms_of, target_of, worker_of
from .table import CompressedTensor


def index_select(table: CompressedTensor, ids: torch.Tensor, *, device: torch.device | str | int | None = None,
                 out: torch.Tensor | None = None, check: bool = False, max_sms: int | None = None) -> torch.Tensor:
    """The items ids of a table, as torch.index_select(x, 0, ids), moved to a device (the paper's sections 4.3 and 4.4).

    A table in pinned host memory is fetched and rebuilt by the GPU itself in one kernel on the current stream, and a table on a GPU
    likewise; an unpinned table is gathered on the CPU and copied. With ids and out on the GPU and the table pinned or on that GPU, the call
    neither allocates nor synchronises and can be captured in a CUDA graph (after one call outside it).

    CPU ids out of range raise IndexError at once. CUDA ids are checked by the kernel, without synchronising: a bad id's item is
    zeros, and the first bad one met raises in the next call on the table, in `table.check()`, or here with check=True.

    Args:
        table: a table of N items of shape [...].
        ids: int32 or int64 [K] in [0, N), on the CPU or a GPU, in any order, repeated or none at all.
        device: where the result goes; None: out's device, else the ids'.
        out: contiguous tensor [K, ...] of the table's dtype to write to.
        check: wait for the result and raise here what went wrong.
        max_sms: keep at most this many of the GPU's multiprocessors busy; None: all.

    Returns:
        Tensor [K, ...]; out if it was given.

    Raises:
        TypeError: ids is not int32 or int64, or out has another dtype.
        ValueError: ids is not 1-D, or out has another shape, is not contiguous or is not on `device`.
        IndexError: an id is out of range.
        CorruptTableError: the table's bytes contradict each other.
    """
    check_table(table)
    if not isinstance(ids, torch.Tensor):
        ids = torch.as_tensor(ids)
        ids = ids.to(torch.int64) if ids.numel() == 0 else ids
    check_ids_dtype(ids)
    if ids.dim() > 1:
        raise ValueError(f"ids has shape {list(ids.shape)}; wanted one dimension")
    ids = ids.reshape(-1)
    target = target_of(device, out, ids.device)
    worker = worker_of(table, target)
    if not ids.is_cuda:
        check_range(ids, table._geometry.num_items)
    ids = ids.to(worker).contiguous()
    shape = (ids.numel(), *table.shape[1:])

    def run(data, fault):
        torch.ops.ibp.gather_items(*table._arguments(worker), ids, sms_of(max_sms), data, fault)

    return produce(table, shape, target, worker, out, check, run)


def check_ids_dtype(ids):
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids has dtype {ids.dtype}; wanted torch.int32 or torch.int64")
    return ids


def check_range(ids, num_items, least=0):
    if ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < least or high >= num_items:
        position = int(((ids < least) | (ids >= num_items)).nonzero()[0])
        raise IndexError(f"ids[{position}] is {int(ids[position])}; wanted {least} to {num_items - 1}")
