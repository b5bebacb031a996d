"""Sends deltas to other processes: `ibp.deltas.Sender` makes the messages that keep an engine's weights equal to those
of a trainer, and `ibp.distributed.broadcast_delta` sends one delta over torch.distributed.

A sender divides its weights into regions, and keeps a copy of each region. A push goes through the regions in pieces:
it compares a piece with its copies, makes one message of the changes, and updates the copies, while a GPU measures the
next piece.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common import wire as _wire
from .._common.arguments import whole_number
from .._common.sequences import cut, one_ahead
from .._machine import memory as _memory
from .._machine import staging
from .._rows.geometry import check_tensor
from ._applying import place_of
from ._coding import Version, bits_of, check_weight, fingerprint
from ._delta import CheckpointDelta, Delta, begin_differences
from ._messages import (
    Change,
    ChangeHead,
    Named,
    PushHead,
    Region,
    TensorRows,
    head_of,
    message_of,
    named,
    opened,
    pack,
    places_of,
)

# Each message takes time of the host on both sides, however few bytes it has. So a message has the changes of many
# weights.
PIECE_BYTES = 1 << 30
# A receiver needs memory for a copy of a region's weights if they are coded or joined there, so regions are smaller.
_REGIONS_OF_PIECE = 4


# ---- pushes ----


class Sender:
    """Makes messages that tell receivers what has changed in a trainer's weights since the last push. An
    `ibp.deltas.Receiver` applies the messages to an engine's weights.

    A sender keeps a copy of the weights of the last push, and compares new weights with it. The messages are plain
    bytes. They can be sent to any number of receivers, by any means that moves bytes. Send all messages of a push
    before those of the next push.

    With FSDP2, each rank pushes its own shards. Each rank has a sender with a different `part`, and receivers need the
    messages of all ranks. DTensors that are sharded by rows (`Shard(0)`) or replicated are not gathered. Only one rank
    sends a replicated DTensor. `push` gathers DTensors with other placements (`full_tensor`), so all ranks must call
    `push`. Each sender sends all plain tensors that it is given.

    Example:
        >>> weights = {"w": torch.zeros(1000, 64)}
        >>> sender = ibp.deltas.Sender(weights)
        >>> receiver = ibp.deltas.Receiver({"w": torch.zeros(1000, 64)})
        >>> weights["w"][17] = 1  # a step of training
        >>> for message in sender.push(weights):
        ...     receiver.apply(message)
        True
        >>> sender.version, receiver.version
        (1, 1)

    Args:
        weights: the weights that receivers already have (version 0), in any form that `push` accepts. None: receivers
            have other weights, so the first push sends all weights whole.
        part: (index of this sender, number of senders), if several senders send the same weights; for example, (rank,
            world size).
        memory: where the copy of the weights is kept. "device": on the device of the weights. "pinned" or "host": in
            host memory. Each push then copies it to the GPU of the weights, piece by piece, and compares it there.
        piece_bytes: the size in bytes of a piece. One message holds the changes of at most this many bytes of weights;
            only a single row may be larger. Tensors of at most 1/64 of this size are coded together. A push takes
            memory for more than its messages, because a GPU measures the next piece while a message is made: it takes
            memory for the changes of two pieces, and for copies of their tensors that are coded together, unless these
            are views of one buffer, one after the other. If the sender's copy is in host memory, the push also takes
            memory for two pieces of this copy.
        device: the device on which messages are made. None: the device of the weights.

    Attributes:
        version: the number of the version that was pushed last; 0 before the first push.

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: memory is "pinned", and there is no CUDA device.
    """

    def __init__(
        self,
        weights: Named | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        memory: str = "device",
        piece_bytes: int = PIECE_BYTES,
        device: torch.device | str | int | None = None,
    ) -> None:
        _memory.check_memory(memory)
        count = whole_number("part[1]", part[1], 1, 2**31)
        self._part = whole_number("part[0]", part[0], 0, count - 1), count
        self._piece_bytes = whole_number("piece_bytes", piece_bytes, 1, 2**40)
        self._is_pinned = None if memory == "device" else bool(_memory.pins(memory))
        self._device = None if device is None else _memory.canonical(device)
        self._id = uuid.uuid4().hex
        self._kept: dict[bytes, torch.Tensor] = {}  # the copy of each region, by OwnRegion.rows
        # It takes several microseconds for each tensor to divide weights into regions. So the division is kept for the
        # next push, whose weights mostly have the same layout.
        self._layout: list[list[Any]] = []  # the shards that are divided, and the result of `_layout_of` for them
        self._division: list[tuple[bytes, list[_Extent], int]] = []  # the result of `_divided`
        self.version = 0
        if weights is not None:
            regions = self._regions(weights)
            self._kept = {region.rows: self._copy(region, region.values(), None, None) for region in regions}

    def push(self, weights: Named, *, full: bool = False) -> list[torch.Tensor]:
        """Returns messages that change the weights of receivers to `weights`, which become a new version.

        If the call raises an error, `version` does not change. The sender's copy of the weights is then unchanged or
        lost; after a loss, the next push sends all weights whole.

        Args:
            weights: a module, whose state dict is used; or tensors by name, as a mapping or as pairs (name, tensor).
                The tensors must not change during the call. A tensor is sent whole if its name is new, or if its shape
                or dtype has changed.
            full: whether to send all weights whole, for receivers that have lost a message.

        Returns:
            A list of one or more messages, each uint8 [bytes]. They share no memory with the weights. A message on a
            GPU is complete once the work that is now queued on the current stream has ended.

        Raises:
            TypeError: a weight is not a tensor that can be compressed.
            ValueError: a DTensor is sharded over more ranks than there are senders.
        """
        regions = self._regions(weights)
        kept, self._kept = self._kept, {}  # if the call is interrupted, the next push sends all weights
        base = None if full or not kept else self.version  # `_like` takes copies out of kept, so this comes first
        pieces = cut(regions, lambda region: region.nbytes, self._piece_bytes)
        made: dict[bytes, torch.Tensor] = {}

        def begin(number: int, piece: list[OwnRegion]) -> Callable[[], torch.Tensor]:
            """Queues work on GPUs that measures the changes of a piece. Returns a function that makes and returns the
            message of the piece."""
            values, olds = [region.values() for region in piece], [self._like(region, kept) for region in piece]
            bases = olds if base is not None else [None] * len(piece)
            pairs = [(new, old) for new, old in zip(values, bases) if old is not None]
            differences = begin_differences(pairs, None, updates_bases=self._is_pinned is None)

            def finish() -> torch.Tensor:
                found = iter(differences())
                changes: list[Change] = [new if old is None else next(found) for new, old in zip(values, bases)]
                message = self._message(list(zip(piece, values, changes)), base, (number, len(pieces)))
                for region, new, old, change in zip(piece, values, olds, changes):
                    made[region.rows] = self._copy(region, new, old, change)
                return message

            return finish

        messages = [finish() for finish in one_ahead(begin(*numbered) for numbered in enumerate(pieces))]
        self._kept, self.version = made, self.version + 1
        return messages

    def _regions(self, weights: Named) -> list[OwnRegion]:
        """Returns the regions that this process sends. Tied tensors are sent once.

        A DTensor is not gathered if it is replicated, or sharded by rows along one dimension of its mesh. All other
        DTensors are gathered, and then this is a collective call. Raises TypeError and ValueError as `push` does."""
        shards: list[_Shard] = []
        tensors: list[torch.Tensor] = []
        for name, tensor in named(weights).items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor")
            start, values = (0, tensor) if not hasattr(tensor, "device_mesh") else _shard_of(name, tensor, self._part)
            if values is not None:
                if values.layout != torch.strided or values.is_nested:
                    check_tensor(values, name)
                full_shape = tensor.shape
                shards.append((name, full_shape, start, self._part[1] > 1 and values.shape == full_shape))
                tensors.append(values.detach())  # This decodes weights of `ibp.offload` that rest.
        layout = [shards, *_layout_of(tensors)]
        if layout != self._layout:
            for (name, *_), values in zip(shards, tensors):
                check_weight(values, name)
            division = _divided(shards, tensors, max(1, self._piece_bytes // _REGIONS_OF_PIECE))
            self._layout, self._division = layout, division
        return [OwnRegion(*place, tensors) for place in self._division]

    def _like(self, region: OwnRegion, kept: dict[bytes, torch.Tensor]) -> torch.Tensor | None:
        """Takes the copy of a region out of `kept`, so that its memory is freed as soon as a new copy replaces it.
        Returns the copy. Returns None if there is no copy, or if its dtype differs from that of the region."""
        base = kept.pop(region.rows, None)
        return base if base is not None and base.dtype == region.dtype else None

    def _message(
        self, piece: Sequence[tuple[OwnRegion, torch.Tensor, Change]], base: int | None, number: tuple[int, int]
    ) -> torch.Tensor:
        regions, sent = [], []
        for region, new, change in piece:
            head, result = None, change.result if isinstance(change, Delta) else fingerprint(new)
            if not (isinstance(change, Delta) and change.is_empty):
                head = head_of(change)
                sent.append((head, change))
            regions.append(Region(region.rows, region.dtype, result, head))
        device = self._device or (piece[0][0].device if piece else torch.device("cpu"))
        said = PushHead(self._id, self._part, self.version + 1, base, number, regions)
        return message_of(said, [head for head, _ in sent], [change for _, change in sent], device)

    def _copy(
        self, region: OwnRegion, values: torch.Tensor, old: torch.Tensor | None, change: Change | None
    ) -> torch.Tensor:
        """Returns the copy of a region that the sender keeps. old: the previous copy, or None. If copies are kept on
        the device of the weights, and the change is a delta, `old` already has the new values."""
        if old is not None and isinstance(change, Delta) and (self._is_pinned is None or change.is_empty):
            return old
        if region.is_gathered and self._is_pinned is None:
            return values
        if old is None and self._is_pinned:
            old = staging.pinned_like(values)
        elif old is None:
            device = values.device if self._is_pinned is None else torch.device("cpu")
            old = torch.empty(values.shape, dtype=values.dtype, device=device)
        bits_of(old).copy_(bits_of(values))
        return old


# ---- the division into regions ----

# If more than 16 rows of a tensor fit in a region, the tensor is cut after a multiple of 16 rows. So the next region
# begins at a multiple of 16 bytes, whatever the dtype is. Kernels are fastest with this alignment.
_ROW_STEP = 16
# Tensors of at most 1/16 of the largest size of a region are joined, because every region takes time on the host.
_JOINED_SHARE = 16


# Says which rows of a tensor this process sends: (the name of the tensor, its shape, the index of the first row that is
# sent, is_alone). is_alone: whether other senders may send the same rows. Such rows are not joined with others, because
# each sender could join them with different ones.
_Shard = tuple[str, torch.Size, int, bool]


class _Extent(NamedTuple):
    """The elements that `torch.as_strided` selects, with the arguments size, strides and offset, from the storage of a
    tensor. source: the index of the tensor among those of a push."""

    source: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class OwnRegion(NamedTuple):
    """A region that this process sends.

    rows: as in `Region`.
    extents: where the elements are. There are several extents if the region joins tensors that do not lie one after the
        other in memory, or of which one is not contiguous.
    nbytes: the size of the elements in bytes.
    sent: the tensors of the push, detached. Each has the rows of one tensor that this process sends.
    """

    rows: bytes
    extents: list[_Extent]
    nbytes: int
    sent: list[torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.sent[self.extents[0].source].dtype

    @property
    def device(self) -> torch.device:
        return self.sent[self.extents[0].source].device

    @property
    def is_gathered(self) -> bool:
        """Whether `values` returns a copy."""
        return len(self.extents) > 1

    def values(self) -> torch.Tensor:
        """Returns the values of the rows. If there are several extents, the result is a copy of their elements, 1-D."""
        found = [self.sent[each.source].as_strided(each.size, each.strides, each.offset) for each in self.extents]
        if not self.is_gathered:
            return found[0]
        bits = [bits_of(tensor) if tensor.dim() == 1 else bits_of(tensor).reshape(-1) for tensor in found]
        return torch.cat(bits).view(self.dtype)


def _layout_of(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Returns lists that describe tensors and their places in memory, as far as `_divided` depends on them. They are
    equal for tensors in other memory, if the same tensors are tied, and the same ones lie one after the other."""
    pointers, offsets = [each.data_ptr() for each in tensors], [int(each.storage_offset()) for each in tensors]
    storages = [pointer - offset * each.itemsize for pointer, offset, each in zip(pointers, offsets, tensors)]
    return [
        [each.shape for each in tensors],
        [each.stride() for each in tensors],
        [each.dtype for each in tensors],
        [each.device for each in tensors],
        [each.is_conj() for each in tensors],
        [each.is_neg() for each in tensors],
        offsets,
        _numbered(pointers),
        _numbered(storages),
    ]


def _numbered(addresses: Sequence[int]) -> list[int]:
    """Returns a number for each address: 0 for the first one, and 1, 2, ... for those that differ from all before."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(address, len(numbers)) for address in addresses]


def _divided(
    shards: Sequence[_Shard], tensors: Sequence[torch.Tensor], most_bytes: int
) -> list[tuple[bytes, list[_Extent], int]]:
    """Divides the weights that a process sends into regions. The division depends only on names, shapes and places in
    memory (`_layout_of`).

    Args:
        tensors: the values of each shard.
        most_bytes: a region has at most this many bytes; the exception is a region of one row that is larger.

    Returns:
        For each region, (the JSON of its rows, the places of its elements, its size in bytes).
    """
    names: dict[tuple[Any, ...], list[str]] = {}  # the names of the tensors in a place in memory
    first: dict[tuple[Any, ...], int] = {}  # the index of the first of these tensors
    alone: set[tuple[Any, ...]] = set()
    for index, ((name, _, _, is_alone), values) in enumerate(zip(shards, tensors)):
        # A tensor without elements has no memory, so its name, dtype and device identify it.
        memory = place_of(values) if values.numel() else (name, values.dtype, values.device)
        names.setdefault(memory, []).append(name)
        first.setdefault(memory, index)
        if is_alone:
            alone.add(memory)
    regions: list[list[tuple[TensorRows, int]]] = []  # for each region, its rows, and the indices of their shards
    small: dict[tuple[Any, ...], list[tuple[TensorRows, int]]] = {}  # the joined region that is not full yet
    sizes: dict[tuple[Any, ...], int] = {}
    for memory in sorted(first, key=lambda memory: memory not in alone):
        index, values = first[memory], tensors[first[memory]]
        _, full_shape, start, _ = shards[index]
        rows, kind = TensorRows(tuple(names[memory]), full_shape, start, values.shape), (values.dtype, values.device)
        for part in _cut(rows, values.nbytes, most_bytes):
            num_bytes = part.shape.numel() * values.itemsize
            if memory in alone or num_bytes * _JOINED_SHARE > most_bytes:
                regions.append([(part, index)])
                continue
            if sizes.get(kind, 0) + num_bytes > most_bytes:
                regions.append(small.pop(kind))
                sizes[kind] = 0
            small.setdefault(kind, []).append((part, index))
            sizes[kind] = sizes.get(kind, 0) + num_bytes
    return [
        (
            json.dumps([rows for rows, _ in region]).encode(),
            _extents_of(region, shards, tensors),
            sum(rows.shape.numel() * tensors[index].itemsize for rows, index in region),
        )
        for region in (*regions, *small.values())
    ]


def _extents_of(
    region: Sequence[tuple[TensorRows, int]], shards: Sequence[_Shard], tensors: Sequence[torch.Tensor]
) -> list[_Extent]:
    """Returns where the elements of a region are. Joined tensors that lie one after the other in memory, as views of
    one buffer do, become one extent, so that they need not be copied."""
    extents: list[_Extent] = []
    end = None  # (address of the storage of the last extent, index of the element after the extent)
    # A tensor without elements must not be the source of other elements, because its address does not tell its storage.
    for rows, index in [each for each in region if each[0].shape.numel()] or region[:1]:
        values, (_, _, start, _) = tensors[index], shards[index]
        size, strides, offset = tuple(rows.shape), values.stride(), int(values.storage_offset())
        offset += strides[0] * (rows.start - start) if strides else 0
        if len(region) == 1 or not values.is_contiguous():
            extents.append(_Extent(index, size, strides, offset))
            end = None
            continue
        count, storage = rows.shape.numel(), values.untyped_storage().data_ptr()
        first = extents.pop().offset if (storage, offset) == end else offset
        # The storage of the later tensor certainly has the elements of the earlier ones, too.
        extents.append(_Extent(index, (offset + count - first,), (1,), first))
        end = storage, offset + count
    if len(region) > len(extents) == 1 and end is None:
        # The others have no elements. A second extent without elements makes `OwnRegion.values` return a 1-D copy.
        extents.append(_Extent(extents[0].source, (0,), (1,), 0))
    return extents


def _cut(rows: TensorRows, num_bytes: int, most_bytes: int) -> Iterator[TensorRows]:
    """Cuts rows of a tensor, num_bytes bytes in total, into parts of at most most_bytes bytes, or of one row if a row
    is larger."""
    if num_bytes <= most_bytes or not rows.shape:
        yield rows
        return
    step = max(1, most_bytes * rows.shape[0] // num_bytes)
    step -= step % _ROW_STEP if step > _ROW_STEP else 0
    for start in range(rows.start, rows.end, step):
        yield rows._replace(start=start, shape=torch.Size((min(step, rows.end - start), *rows.shape[1:])))


def _shard_of(name: str, tensor: Any, part: tuple[int, int]) -> tuple[int, torch.Tensor | None]:
    """For a DTensor, returns (the index of the first row that this process sends, the values of these rows). The values
    are None if only other ranks send rows of the tensor."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    tensor = tensor.detach()
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if mesh.size() > part[1]:
        raise ValueError(
            f"{name} is a DTensor of {mesh.size()} ranks, and part is {part}: wanted a sender on each rank, with "
            "part=(torch.distributed.get_rank(), torch.distributed.get_world_size())"
        )
    if at is None:
        return 0, None
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    by_rows = [placement for placement in tensor.placements if type(placement) is Shard and placement.dim == 0]
    if len(split) > 1 or len(by_rows) < len(split):
        whole = tensor.full_tensor()
        return 0, None if any(at) else whole
    local, start = tensor.to_local(), 0
    if split:
        num_rows = tensor.shape[0]
        start = min(-(-num_rows // mesh.size(split[0])) * at[split[0]], num_rows)  # as torch.chunk cuts
    is_sent = not any(at[dim] for dim in range(mesh.ndim) if dim not in split) and (local.numel() or not start)
    return start, local if is_sent else None


# ---- broadcasts ----

# Largest size of one broadcast in bytes. A larger delta takes several broadcasts, because gloo counts bytes in a 32-bit
# int.
_MOST_BYTES = 1 << 30


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
    members = _wire.RankGroup(group)
    target = None if device is None else _memory.canonical(device)

    def offer() -> tuple[tuple[str, ...] | None, tuple[str, ...], list[ChangeHead]]:
        """Returns what rank src sends to the other ranks before the coded bytes: (the names of the changed tensors, or
        None if the delta is a `Delta`, that is, of a single tensor; the names of the tensors that are removed; a head
        for each changed tensor)."""
        if not isinstance(delta, (Delta, CheckpointDelta)):
            raise TypeError(
                f"delta is a {type(delta).__name__}; wanted an ibp.deltas.Delta or an ibp.deltas.CheckpointDelta"
            )
        heads = [head_of(change) for change in _changes_of(delta)]
        return (None, (), heads) if isinstance(delta, Delta) else (tuple(delta), delta.removed, heads)

    names, removed, heads = members.from_rank(src, "broadcast_delta", offer)
    places, num_bytes = places_of(heads)
    data = torch.empty(num_bytes, dtype=torch.uint8, device=members.device)
    if members.rank == src and delta is not None:
        pack(_changes_of(delta), places, data)
        _exchange(members, src, data)
        return delta if target is None else delta.to(target)
    _exchange(members, src, data)
    data = data if target is None else data.to(target)
    changes = opened(heads, data)
    if names is None:
        assert isinstance(changes[0], Delta)
        return changes[0]
    # New tensors are cloned, because torch.save would otherwise save the memory of the whole message with each of them.
    own = (change.clone() if isinstance(change, torch.Tensor) else change for change in changes)
    return CheckpointDelta(dict(zip(names, own)), removed)


def _changes_of(delta: Delta | CheckpointDelta) -> list[Delta | Version]:
    return [delta] if isinstance(delta, Delta) else list(delta.values())


def _exchange(members: _wire.RankGroup, src: int, data: torch.Tensor) -> None:
    """Broadcasts the bytes of `data` from rank src of the group into `data` on the other ranks."""
    root = src if members.process_group is None else dist.get_global_rank(members.process_group, src)
    for part in data.split(_MOST_BYTES):
        with _wire.all_taking_part():
            dist.broadcast(part, root, group=members.process_group)
