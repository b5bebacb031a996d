"""Tables in several processes and on several machines, over torch.distributed.

ibp.distributed.share_table        one table in host memory for all processes of a machine
ibp.distributed.ShardedTable       a table whose rows are spread over machines
ibp.distributed.broadcast_delta    what changed in weights, from one process to the others
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _group
from ._compressed_tensor import CompressedTensor
from ._delta import CheckpointDelta, Delta, broadcasting
from ._sharded import ShardedTable
from ._sharing import open_shared

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ShardedTable", "broadcast_delta", "share_table"]


def __dir__() -> list[str]:
    return __all__


def share_table(
    table: CompressedTensor | None,
    group: ProcessGroup | None = None,
    *,
    src: int = 0,
    pin_memory: bool | None = None,
) -> CompressedTensor:
    """One rank's table in the memory of all processes of a machine, which is there once. A collective call.

    The table is moved to shared memory (see `CompressedTensor.share_memory_`). Each process pins it for its GPU when
    it first fetches from it.

    Args:
        table: in host memory, on rank src; other ranks give None.
        group: a process group of torch.distributed, all on one machine; None: the default group.
        src: the rank in the group that has the table.
        pin_memory: whether GPUs fetch rows from the memory themselves; None: as on rank src.

    Returns:
        The table of rank src: there itself, elsewhere a table in the same memory.

    Raises:
        TypeError, ValueError: table is none, or on a GPU; ranks are on several machines or differ in src.
        RuntimeError: the memory cannot be opened, torch.distributed is not initialised, or another rank has failed.
    """
    members, what = _group.Group(group), "share_table"

    def offer() -> tuple[str, dict[str, int], Any]:
        if not 0 <= src < members.size:
            raise ValueError(f"src is {src}; wanted 0 to {members.size - 1}")
        if members.rank != src:
            return _group.machine(), {"src": src}, None
        if not isinstance(table, CompressedTensor):
            raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")
        if table.is_cuda:
            raise ValueError(f"table is on {table.device}; wanted one in host memory")
        return _group.machine(), {"src": src}, table.share()

    offers = members.together(what, offer)
    _group.check_one_machine(what, [name for name, _, _ in offers])
    _group.same_on_all(what, [arguments for _, arguments, _ in offers])
    opened: list[CompressedTensor] = []

    def open_it() -> None:
        if members.rank != src or table is None:
            opened.append(open_shared(offers[src][2], pin_memory=pin_memory))
        else:
            opened.append(table.pin_memory() if pin_memory else table)

    members.together(what, open_it)  # rank src keeps the table until all have opened it
    return opened[0]


def broadcast_delta(
    delta: Delta | CheckpointDelta | None,
    src: int = 0,
    group: ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """Brings one rank's delta to all ranks of a group. A collective call.

    Moved are the coded bytes, in one broadcast of torch.distributed: through NCCL from GPU to GPU, through gloo over
    host memory. Which tensors they are of goes before, as an object.

    Args:
        delta: on rank src; other ranks give None.
        src: the rank in the group that has the delta.
        group: a process group of torch.distributed; None: the default group.
        device: where the delta is to be; None: on rank src where it is, elsewhere where it has arrived: on the current
            CUDA device with NCCL, else on the CPU.

    Returns:
        The delta of rank src.

    Raises:
        TypeError, ValueError: delta is none, src is no rank, or ranks differ in it.
        RuntimeError: torch.distributed is not initialised, or another rank has failed.
    """
    return broadcasting.broadcast_delta(delta, src, group, device=device)
