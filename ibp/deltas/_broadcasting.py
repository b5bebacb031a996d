"""Deltas from one process to others, over torch.distributed: the coded bytes in one broadcast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from .._common import group as _group
from .._common import wire
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from ._checkpoints import CheckpointDelta, Version
from ._tensors import Delta

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WHAT = "broadcast_delta"
_PARTS = ("slots", "overflow", "lengths", "bases")
_ALIGNMENT = 16  # bytes, of each part
_MOST_BYTES = 1 << 30  # of one broadcast: gloo counts bytes in int


@wire.sent
class _Head(NamedTuple):
    """What is known of a change besides its bytes. fields: of a table; None of a whole tensor. fingerprints: of a
    delta."""

    shape: torch.Size
    dtype: torch.dtype
    fields: dict[str, Any] | None
    fingerprints: tuple[int, int] | None
    sizes: tuple[int, ...]  # bytes of each part


@wire.sent
class _Offer(NamedTuple):
    """What rank src tells the others. names: None of a delta of one tensor."""

    names: tuple[str, ...] | None
    removed: tuple[str, ...]
    heads: list[_Head]


def broadcast_delta(
    delta: Delta | CheckpointDelta | None,
    src: int = 0,
    group: ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """Brings one rank's delta to all ranks of a group. A collective call.

    One broadcast of torch.distributed moves the coded bytes: NCCL from GPU to GPU, gloo over host memory. An object
    that describes the tensors is sent before them.

    Example:
        >>> # on each rank of a group
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}  # which rank 0 alone needs
        >>> change = ibp.deltas.make(new, old, device="cpu") if torch.distributed.get_rank() == 0 else None
        >>> ibp.distributed.broadcast_delta(change, device="cpu").apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        delta: on rank src; other ranks give None.
        src: the rank in the group that has the delta.
        group: a process group of torch.distributed; None: the default group.
        device: where the delta goes. None: on rank src it stays where it is; on the other ranks it stays where it
            arrives: on the current CUDA device with NCCL, else on the CPU.

    Returns:
        The delta of rank src.

    Raises:
        TypeError, ValueError: delta is none, src is no rank, or ranks differ in it.
        RuntimeError: torch.distributed is not initialised, or another rank has failed.
    """
    members = _group.RankGroup(group)
    target = None if device is None else memory.canonical(device)

    def offer() -> tuple[dict[str, int], _Offer | None]:
        if not 0 <= src < members.size:
            raise ValueError(f"src is {src}; wanted 0 to {members.size - 1}")
        if members.rank != src:
            return {"src": src}, None
        if not isinstance(delta, (Delta, CheckpointDelta)):
            raise TypeError(
                f"delta is a {type(delta).__name__}; wanted an ibp.deltas.Delta or an ibp.deltas.CheckpointDelta"
            )
        return {"src": src}, _offer(delta)

    offers = members.together(_WHAT, offer)
    _group.same_on_all(_WHAT, [arguments for arguments, _ in offers])
    offered = offers[src][1]
    starts = _starts(offered.heads)
    if members.rank == src and delta is not None:
        _exchange(members, src, _packed(delta, starts, members.device))
        return delta if target is None else delta.to(target)
    data = torch.empty(starts[-1], dtype=torch.uint8, device=members.device)
    _exchange(members, src, data)
    return _opened(offered, starts, data if target is None else data.to(target))


def _changes_of(delta: Delta | CheckpointDelta) -> list[Delta | Version]:
    return [delta] if isinstance(delta, Delta) else list(delta.values())


def _offer(delta: Delta | CheckpointDelta) -> _Offer:
    heads = [_head(change) for change in _changes_of(delta)]
    return _Offer(None, (), heads) if isinstance(delta, Delta) else _Offer(tuple(delta), delta.removed, heads)


def _head(change: Delta | Version) -> _Head:
    sizes = tuple(part.nbytes for part in _parts(change))
    if isinstance(change, torch.Tensor):
        return _Head(change.shape, change.dtype, None, None, sizes)
    table = change.table if isinstance(change, Delta) else change
    fields = {name: getattr(table, name) for name in ("scheme", "row_bytes", "slot_bytes", "codebook")}
    fingerprints = (change.base, change.result) if isinstance(change, Delta) else None
    return _Head(table.shape, table.dtype, fields, fingerprints, sizes)


def _parts(change: Delta | Version) -> list[torch.Tensor]:
    if isinstance(change, torch.Tensor):
        return [change.detach().resolve_conj().resolve_neg().contiguous()]
    table = change.table if isinstance(change, Delta) else change
    tensors = table._tensors()
    return [tensors[name] for name in _PARTS]


def _starts(heads: Sequence[_Head]) -> list[int]:
    """Where each part begins among all of them, and the end."""
    sizes = [size for head in heads for size in head.sizes]
    return list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def _packed(delta: Delta | CheckpointDelta, starts: Sequence[int], device: torch.device) -> torch.Tensor:
    data = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    parts = [part for change in _changes_of(delta) for part in _parts(change)]
    for start, part in zip(starts, parts):
        data[start : start + part.nbytes].copy_(part.reshape(-1).view(torch.uint8), non_blocking=True)
    return data


def _exchange(members: _group.RankGroup, src: int, data: torch.Tensor) -> None:
    root = src if members.process_group is None else dist.get_global_rank(members.process_group, src)
    for part in data.split(_MOST_BYTES):
        with _group.all_taking_part():
            dist.broadcast(part, root, group=members.process_group)


def _opened(offered: _Offer, starts: Sequence[int], data: torch.Tensor) -> Delta | CheckpointDelta:
    changes, places = [], iter(starts)
    for head in offered.heads:
        parts = [data[start : start + size] for size, start in zip(head.sizes, places)]
        changes.append(_change(head, parts))
    if offered.names is not None:
        return CheckpointDelta(dict(zip(offered.names, changes)), offered.removed)
    assert isinstance(changes[0], Delta)
    return changes[0]


def _change(head: _Head, parts: Sequence[torch.Tensor]) -> Delta | Version:
    if head.fields is None:
        return parts[0].clone().view(head.dtype).view(head.shape)
    slots, overflow, lengths, bases = parts
    table = CompressedTensor(
        shape=head.shape,
        dtype=head.dtype,
        slots=slots,
        overflow=overflow,
        lengths=lengths.view(torch.uint16),
        bases=bases.view(torch.int64),
        **head.fields,
    )
    return table if head.fingerprints is None else Delta(table, *head.fingerprints)
