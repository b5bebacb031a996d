"""`broadcast_delta`: sends a delta from one process to others over torch.distributed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from .._common import group as _group
from .._common import wire
from .._machine import memory
from . import _packing
from ._checkpoints import CheckpointDelta, Version
from ._tensors import Delta

# Largest size of one broadcast in bytes. A larger delta takes several broadcasts, because gloo counts bytes in a 32-bit
# int.
_MOST_BYTES = 1 << 30


@wire.sent
class _Offer(NamedTuple):
    """What rank src sends to the other ranks before the coded bytes. names: the names of the changed tensors; None if
    the delta is a `Delta`, that is, of a single tensor. removed: the names of the tensors that are removed. heads: a
    head for each changed tensor."""

    names: tuple[str, ...] | None
    removed: tuple[str, ...]
    heads: list[_packing.ChangeHead]


def broadcast_delta(
    delta: Delta | CheckpointDelta | None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """Sends the delta of one rank to all ranks of a group. This is a collective call: all ranks must make it.

    First an object that describes the tensors is sent. Then torch.distributed broadcasts the coded bytes, at most 1 GiB
    at a time: NCCL from GPU to GPU, gloo from host memory to host memory.

    Example:
        >>> # on each rank of a group
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}  # which rank 0 alone needs
        >>> change = ibp.deltas.make(new, old, device="cpu") if torch.distributed.get_rank() == 0 else None
        >>> ibp.distributed.broadcast_delta(change, device="cpu").apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        delta: the delta, on rank src. Other ranks pass None.
        src: the rank in the group that has the delta.
        group: a process group of torch.distributed. None: the default group.
        device: the device of the delta that is returned. None: rank src returns its own delta. Other ranks return a
            delta on the device that receives the bytes, which is the current CUDA device with NCCL, and otherwise the
            CPU.

    Returns:
        The delta of rank src.

    Raises:
        TypeError: on rank src, delta is neither a `Delta` nor a `CheckpointDelta`.
        ValueError: src is not a rank of the group, or ranks pass different values of src.
        RuntimeError: torch.distributed is not initialised, or another rank has failed.
    """
    members = _group.RankGroup(group)
    target = None if device is None else memory.canonical(device)

    def offer() -> _Offer:
        if not isinstance(delta, (Delta, CheckpointDelta)):
            raise TypeError(
                f"delta is a {type(delta).__name__}; wanted an ibp.deltas.Delta or an ibp.deltas.CheckpointDelta"
            )
        heads = [_packing.head_of(change) for change in _changes_of(delta)]
        return _Offer(None, (), heads) if isinstance(delta, Delta) else _Offer(tuple(delta), delta.removed, heads)

    offered = members.from_rank(src, "broadcast_delta", offer)
    places, num_bytes = _packing.places_of(offered.heads)
    data = torch.empty(num_bytes, dtype=torch.uint8, device=members.device)
    if members.rank == src and delta is not None:
        _packing.pack(_changes_of(delta), places, data)
        _exchange(members, src, data)
        return delta if target is None else delta.to(target)
    _exchange(members, src, data)
    data = data if target is None else data.to(target)
    changes = _packing.opened(offered.heads, data)
    if offered.names is None:
        assert isinstance(changes[0], Delta)
        return changes[0]
    # New tensors are cloned, because torch.save would otherwise save the memory of the whole message with each of them.
    own = (change.clone() if isinstance(change, torch.Tensor) else change for change in changes)
    return CheckpointDelta(dict(zip(offered.names, own)), offered.removed)


def _changes_of(delta: Delta | CheckpointDelta) -> list[Delta | Version]:
    return [delta] if isinstance(delta, Delta) else list(delta.values())


def _exchange(members: _group.RankGroup, src: int, data: torch.Tensor) -> None:
    """Broadcasts the bytes of `data` from rank src of the group into `data` on the other ranks."""
    root = src if members.process_group is None else dist.get_global_rank(members.process_group, src)
    for part in data.split(_MOST_BYTES):
        with _group.all_taking_part():
            dist.broadcast(part, root, group=members.process_group)
