"""Which rows of which tensors a sender answers for, and what its messages say of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .._common import wire
from ._checkpoints import memory_of
from ._fingerprint import check_source
from ._packing import ChangeHead

Named = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]
Key = tuple[str, int, torch.Size]  # a name, the first row, the rows' shape

_ROW_STEP = 16  # rows of any dtype begin at multiples of 16 bytes, where kernels are at their rate


@wire.sent
class Region(NamedTuple):
    """Rows of a tensor, in dimension 0, and what a push makes of them.

    names: of a tensor, several where weights are tied. full_shape: of all its rows. start: the first row. shape, dtype:
    of these rows. result: their fingerprint after the push. change: None where nothing has changed.
    """

    names: tuple[str, ...]
    full_shape: torch.Size
    start: int
    shape: torch.Size
    dtype: torch.dtype
    result: int
    change: ChangeHead | None

    @property
    def key(self) -> Key:
        return self.names[0], self.start, self.shape


@wire.sent
class PushHead(NamedTuple):
    """What stands in front of a message.

    sender: tells senders apart. part: which of how many senders of the same weights. version, base: what the weights
    become, and what they have to be; base is None where all are sent whole. piece: which of how many messages of this
    sender's push.
    """

    sender: str
    part: tuple[int, int]
    version: int
    base: int | None
    piece: tuple[int, int]
    regions: list[Region]


class OwnRows(NamedTuple):
    """Rows of a tensor that this process sends. names, full_shape, start: as in `Region`."""

    names: tuple[str, ...]
    full_shape: torch.Size
    start: int
    tensor: torch.Tensor

    @property
    def key(self) -> Key:
        return self.names[0], self.start, self.tensor.shape


def named(weights: Named) -> dict[str, Any]:
    """Tensors by name: of a module its state dict."""
    return dict(weights.state_dict() if isinstance(weights, torch.nn.Module) else weights)


def own_rows(weights: Named, part: tuple[int, int], most_bytes: int) -> list[OwnRows]:
    """What a sender sends of weights, tied tensors once, in parts of most_bytes or one row. A collective call where
    DTensors are sharded otherwise than by rows: these are gathered.

    Raises:
        TypeError, ValueError: what is given are no tensors, or shards of more ranks than `part` says.
    """
    tied: dict[tuple[Any, ...], list[str]] = {}
    found: dict[tuple[Any, ...], tuple[torch.Size, int, torch.Tensor]] = {}
    for name, tensor in named(weights).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor")
        shard = _shard_of(name, tensor.detach(), part)
        if shard is not None:
            check_source(shard[2], name)
            memory = memory_of(shard[2])
            tied.setdefault(memory, []).append(name)
            found[memory] = shard
    return [
        OwnRows(tuple(names), full_shape, start + first, rows)
        for names, (full_shape, start, tensor) in zip(tied.values(), (found[memory] for memory in tied))
        for first, rows in _cut(tensor, most_bytes)
    ]


def _cut(tensor: torch.Tensor, most_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of parts of a tensor."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes <= most_bytes or tensor.dim() == 0:
        yield 0, tensor
        return
    step = max(1, most_bytes * tensor.shape[0] // num_bytes)
    step -= step % _ROW_STEP if step > _ROW_STEP else 0
    yield from ((first, tensor[first : first + step]) for first in range(0, tensor.shape[0], step))


def _shard_of(name: str, tensor: torch.Tensor, part: tuple[int, int]) -> tuple[torch.Size, int, torch.Tensor] | None:
    """(shape of all, first row, rows) that this process sends of a tensor; None: other ranks do."""
    if not hasattr(tensor, "device_mesh"):
        return tensor.shape, 0, tensor
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if mesh.size() > part[1]:
        raise ValueError(
            f"{name} is a DTensor of {mesh.size()} ranks, and part is {part}: wanted a sender on each rank, with "
            "part=(torch.distributed.get_rank(), torch.distributed.get_world_size())"
        )
    if at is None:
        return None
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    by_rows = [placement for placement in tensor.placements if type(placement) is Shard and placement.dim == 0]
    if len(split) > 1 or len(by_rows) < len(split):
        whole = tensor.full_tensor()
        return None if any(at) else (whole.shape, 0, whole)
    local, start = tensor.to_local(), 0
    if split:
        num_rows = tensor.shape[0]
        start = min(-(-num_rows // mesh.size(split[0])) * at[split[0]], num_rows)  # as torch.chunk cuts
    is_sent = not any(at[dim] for dim in range(mesh.ndim) if dim not in split) and (local.numel() or not start)
    return (tensor.shape, start, local) if is_sent else None
