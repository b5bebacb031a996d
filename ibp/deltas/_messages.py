"""Converts changes of tensors to bytes for other processes. The bytes are sent in a broadcast, or in the messages of an
`ibp.deltas.Sender`. Such a message describes its content and has a fingerprint.

A change is a delta, or a tensor or table that is sent whole. The parts of a delta or table are the arrays of the table.
A tensor has one part, the tensor. The parts of all changes lie one after the other in one buffer. The parts of a table
have the same order as in a packed piece (`_rows.forms`), but no head precedes them, because the `ChangeHead` has
their sizes.

A message consists of a prefix (_PREFIX), a head that `wire` has written, zeros up to a multiple of 16 bytes, and the
buffer with the parts.

A sender divides the weights into *regions* (`RegionPlan`), which it compares and codes. A region is some rows of a
tensor. Small tensors are *joined*: one region then has the elements of several tensors, one after the other. A *piece*
is a list of regions. One message holds their changes, and its head (`PushHead`) names them.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._common import wire
from .._common.sequences import rounded_up
from .._machine import staging
from .._rows import forms
from .._rows.faults import CorruptTableError
from .._tables.compressed_tensor import CompressedTensor
from . import _coding
from ._coding import bits_of, check_source, fingerprint, mix
from ._on_pieces import memory_of
from ._tensors import Delta, Version

Change = Delta | Version

_ALIGNMENT = 16  # Changes, and slots and overflow in a change, begin at multiples of this many bytes.
_PARTS = ("bases", "lengths", "slots", "overflow")  # The parts of a table, in the order of `ChangeHead.sizes`.
# _MAGIC, size of the head in bytes, size of the parts in bytes, fingerprint of all bytes after the prefix.
_PREFIX = struct.Struct("<8sQQQ")
_MAGIC = b"ibp push"
_BEGIN_BYTES = 64 << 10  # Number of bytes of a message that are copied to the host first. Most heads are shorter.


@wire.sent
class ChangeHead(NamedTuple):
    """Describes a change. `opened` rebuilds the change from this head and the buffer with the parts.

    fields: arguments of the table's constructor, by name. The codebook is left out if it is the known codebook
        (`_coding.py`). None if the change is a tensor that is sent whole.
    fingerprints: the fingerprints of the base and of the result; None if the change is not a delta.
    sizes: the sizes of the parts in bytes. The parts are the table's bases, lengths, slots and overflow, or the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    fields: dict[str, Any] | None
    fingerprints: tuple[int, int] | None
    sizes: tuple[int, ...]


def head_of(change: Change) -> ChangeHead:
    sizes = tuple(part.nbytes for part in _parts(change))
    if isinstance(change, torch.Tensor):
        return ChangeHead(change.shape, change.dtype, None, None, sizes)
    table = change.table if isinstance(change, Delta) else change
    fields = {name: getattr(table, name) for name in ("scheme", "row_bytes", "slot_bytes", "codebook")}
    if table.codebook is _known_codebook(table.dtype):
        del fields["codebook"]
    fingerprints = (change.base, change.result) if isinstance(change, Delta) else None
    return ChangeHead(table.shape, table.dtype, fields, fingerprints, sizes)


def _known_codebook(dtype: torch.dtype) -> Any:
    return _coding.known_codebook(_coding.element_bytes_of(dtype))


def _parts(change: Change) -> list[torch.Tensor]:
    if isinstance(change, torch.Tensor):
        return [change.detach().resolve_conj().resolve_neg().contiguous()]
    table = change.table if isinstance(change, Delta) else change
    tensors = table._tensors()
    return [tensors[name] for name in _PARTS]


def places_of(heads: Iterable[ChangeHead]) -> tuple[list[list[slice]], int]:
    """Returns (for each change, the byte ranges of its parts in the buffer of all changes; the size of this buffer in
    bytes)."""
    places, end = [], 0
    for head in heads:
        if head.fields is None:
            (num_bytes,) = head.sizes
            place = [slice(end, end + num_bytes)]
        else:
            form = forms.laid_out(end, **dict(zip(_PARTS, head.sizes, strict=True)), alignment=_ALIGNMENT)
            place = [form.bases, form.lengths, form.slots, form.overflow]
        places.append(place)
        end = rounded_up(place[-1].stop, _ALIGNMENT)
    return places, end


def pack(changes: Iterable[Change], places: Iterable[Sequence[slice]], data: torch.Tensor) -> None:
    """Copies the parts of changes into `data`, a uint8 tensor of the size that `places_of` returns."""
    pairs = [
        (data[where], part.reshape(-1).view(torch.uint8))
        for change, place in zip(changes, places)
        for where, part in zip(place, _parts(change))
        if part.numel()
    ]
    if pairs:
        staging.copy_all(*zip(*pairs))


def opened(heads: Sequence[ChangeHead], data: torch.Tensor) -> list[Change]:
    """Returns the changes whose parts are in `data`. They are views of `data`. Raises CorruptTableError if a head does
    not match its parts."""
    if any(len(head.sizes) != (1 if head.fields is None else len(_PARTS)) or min(head.sizes) < 0 for head in heads):
        raise CorruptTableError("the message has a change whose head does not say how large it is")
    places, end = places_of(heads)
    if end != data.numel():
        raise CorruptTableError(f"the message has {data.numel()} bytes of changes; its head says {end}")
    changes = []
    for head, place in zip(heads, places):
        try:
            changes.append(_change(head, [data[where] for where in place]))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise CorruptTableError(f"a change of the message is not what its head says: {error}") from error
    return changes


def _change(head: ChangeHead, parts: Sequence[torch.Tensor]) -> Change:
    if head.fields is None:
        (part,) = parts
        return part.view(head.dtype).view(head.shape)
    bases, lengths, slots, overflow = parts
    table = CompressedTensor(
        shape=head.shape,
        dtype=head.dtype,
        slots=slots,
        overflow=overflow,
        lengths=lengths.view(torch.uint16),
        bases=bases.view(torch.int64),
        **{"codebook": _known_codebook(head.dtype)} | head.fields,
    )
    return table if head.fingerprints is None else Delta(table, *head.fingerprints)


# ---- messages ----


def message_of(head: Any, heads: Sequence[ChangeHead], changes: Iterable[Change], device: torch.device) -> torch.Tensor:
    """Returns a message, uint8 [bytes] on `device`. Does not wait for a GPU.

    Args:
        head: the head of the message, any value that `wire.written` accepts.
        heads: the result of `head_of` for each change.
    """
    text, (places, num_bytes) = wire.written(head), places_of(heads)
    first = _PREFIX.size + rounded_up(len(text), _ALIGNMENT)
    # Zeros, because the fingerprint covers the gaps between the parts, too.
    message = torch.zeros(first + num_bytes, dtype=torch.uint8, device=device)
    prefix = _PREFIX.pack(_MAGIC, len(text), num_bytes, mix(message.numel() - _PREFIX.size))
    begin = torch.frombuffer(bytearray(prefix + text), dtype=torch.uint8)
    message[: begin.numel()].copy_(staging.queued(begin, device))
    pack(changes, places, message[first:])
    # So far this field has only the mixed number of bytes. sum_words adds the mixed words; the sum is the fingerprint.
    fingerprint_of_both = message[_PREFIX.size - 8 : _PREFIX.size].view(torch.int64)
    torch.ops.ibp.sum_words.default(message[_PREFIX.size :], 0, fingerprint_of_both)
    return message


def read_message(message: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Checks all bytes of a message, and returns (its head, the buffer with the parts). Raises TypeError if the message
    is not uint8 [bytes], and CorruptTableError if it is damaged or was not made by `message_of`."""
    if not isinstance(message, torch.Tensor) or message.dtype != torch.uint8 or message.dim() != 1:
        what = f"{message.dtype} {list(message.shape)}" if isinstance(message, torch.Tensor) else type(message).__name__
        raise TypeError(f"the message is a {what}; wanted a torch.uint8 tensor of one dimension")
    if message.data_ptr() % _ALIGNMENT or not message.is_contiguous():
        message = message.clone(memory_format=torch.contiguous_format)
    coming = staging.Coming(message[:_BEGIN_BYTES])
    found = fingerprint(message[_PREFIX.size :])  # waits for the GPU, so `coming` has arrived, too
    begin = coming.wait().numpy().tobytes()
    prefix = begin[: _PREFIX.size]
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise CorruptTableError("the message is not from an ibp.deltas.Sender, or its beginning is damaged")
    _, length, num_bytes, wanted = _PREFIX.unpack(prefix)
    first = _PREFIX.size + rounded_up(length, _ALIGNMENT)
    if message.numel() != first + num_bytes:
        raise CorruptTableError(f"the message has {message.numel()} bytes; wanted {first + num_bytes}")
    if found != wanted:
        raise CorruptTableError("the message is damaged: its bytes do not have the fingerprint that it names")
    if first > _BEGIN_BYTES:
        begin = message[:first].cpu().numpy().tobytes()
    try:
        return wire.read(begin[_PREFIX.size : _PREFIX.size + length]), message[first:]
    except ValueError as error:
        raise CorruptTableError(str(error)) from error


# ---- regions ----

Named = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]

# If more than 16 rows of a tensor fit in a region, the tensor is cut after a multiple of 16 rows. So the next region
# begins at a multiple of 16 bytes, whatever the dtype is. Kernels are fastest with this alignment.
_ROW_STEP = 16
# Tensors of at most 1/16 of the largest size of a region are joined, because every region takes time on the host.
_JOINED_SHARE = 16


class TensorRows(NamedTuple):
    """Some rows of a tensor, along dimension 0.

    names: the names of the tensor; several if weights are tied.
    full_shape: the shape of the whole tensor.
    start: the index of the first row.
    shape: the shape of these rows.
    """

    names: tuple[str, ...]
    full_shape: torch.Size
    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        """The index of the row after the last one."""
        return self.start + (self.shape[0] if self.shape else 1)

    @property
    def num_tensor_rows(self) -> int:
        """The number of rows of the whole tensor. A tensor without dimensions is one row."""
        return self.full_shape[0] if self.full_shape else 1

    def are_in_tensor(self) -> bool:
        """Returns whether these rows exist in a tensor of shape full_shape."""
        is_like_rows = len(self.shape) == len(self.full_shape) and self.shape[1:] == self.full_shape[1:]
        return is_like_rows and 0 <= self.start <= self.end <= self.num_tensor_rows


@wire.sent
class Region(NamedTuple):
    """Describes a region in the head of a message.

    rows: a list of the `TensorRows` of the region's tensors, as JSON.
    result: the fingerprint of the region's elements after the push.
    change: the head of the change; None if the region has not changed.
    """

    rows: bytes
    dtype: torch.dtype
    result: int
    change: ChangeHead | None

    def tensor_rows(self) -> list[TensorRows]:
        return _rows_in(self.rows)


@functools.lru_cache(4096)  # most pushes have the same regions as the previous push
def _rows_in(text: bytes) -> list[TensorRows]:
    """Returns the rows in the JSON of a region. Raises CorruptTableError if they are not valid."""
    try:
        found = [
            wire.checked(TensorRows(tuple(names), torch.Size(full_shape), start, torch.Size(shape)))
            for names, full_shape, start, shape in json.loads(text)
        ]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptTableError(f"the message is damaged: it names no rows of tensors ({error})") from error
    if not found or not all(rows.names and rows.are_in_tensor() for rows in found):
        raise CorruptTableError("the message is damaged: it names rows that their tensors do not have")
    return found


@wire.sent
class PushHead(NamedTuple):
    """The head of a message.

    sender: a string that identifies the sender.
    part: (index of the sender among the senders of the same weights, number of these senders).
    version: the number of the version that the weights have after the push.
    base: the number of the version to which the message must be applied; None if all weights are sent whole.
    piece: (index of the message among the messages of this sender's push, number of these messages).
    regions: the regions whose changes the message carries.
    """

    sender: str
    part: tuple[int, int]
    version: int
    base: int | None
    piece: tuple[int, int]
    regions: list[Region]


class OwnRegion(NamedTuple):
    """A region that this process sends.

    rows: as in `Region`.
    names: the names of the first tensor.
    tensors: for each tensor of the region, the values of its rows.
    """

    rows: bytes
    names: tuple[str, ...]
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def is_joined(self) -> bool:
        return len(self.tensors) > 1

    def values(self) -> torch.Tensor:
        """Returns the values of the rows. If tensors are joined, the result is a copy of their elements, 1-D."""
        if not self.is_joined:
            return self.tensors[0]
        return torch.cat([bits_of(tensor).reshape(-1) for tensor in self.tensors]).view(self.dtype)


def named(weights: Named) -> dict[str, Any]:
    """Returns a dict of the tensors by name. If weights is a module, these are the tensors of its state dict."""
    return dict(weights.state_dict() if isinstance(weights, torch.nn.Module) else weights)


class _Shard(NamedTuple):
    """Describes the rows of a tensor that this process sends.

    name, full_shape, start: the name of the tensor, its complete shape, and the index of the first row.
    is_alone: whether other senders may send the same rows. Such rows are not joined with others, because each sender
        could join them with different ones.
    memory: identifies the values in memory (`memory_of`). A tensor without elements has no memory, so its name, dtype
        and device identify it.
    """

    name: str
    full_shape: torch.Size
    start: int
    is_alone: bool
    memory: tuple[Any, ...]


# Rows of one tensor in a region: (the rows; the index of the tensor among the shards; (index of the first row, index of
# the row after the last one) in the values of the shard, or None for all of its rows).
_Member = tuple[TensorRows, int, tuple[int, int] | None]


class RegionPlan:
    """Divides the weights that a process sends into regions. The division depends only on names, shapes and places in
    memory. It takes several microseconds for each tensor, so it is kept for the next push, which mostly has the same
    weights.

    Args:
        part: as in `PushHead`.
        most_bytes: a region has at most this many bytes; the exception is a region of one row that is larger.
    """

    def __init__(self, part: tuple[int, int], most_bytes: int) -> None:
        self._part, self._most_bytes = part, most_bytes
        self._shards: list[_Shard] = []
        self._regions: list[tuple[bytes, list[_Member]]] = []  # the JSON of the rows, and the members

    def regions(self, weights: Named) -> list[OwnRegion]:
        """Returns the regions that this process sends. Tied tensors are sent once.

        A DTensor is not gathered if it is replicated, or sharded by rows along one dimension of its mesh. All other
        DTensors are gathered, and then this is a collective call.

        Raises:
            TypeError: a weight is not a tensor that can be compressed.
            ValueError: a DTensor is sharded over more ranks than there are senders.
        """
        shards: list[_Shard] = []
        tensors: list[torch.Tensor] = []
        for name, tensor in named(weights).items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor")
            shard = _shard_of(name, tensor.detach(), self._part)
            if shard is not None:
                full_shape, start, values = shard
                check_source(values, name)
                is_alone = self._part[1] > 1 and values.shape == tensor.shape
                memory = memory_of(values) if values.numel() else (name, values.dtype, values.device)
                shards.append(_Shard(name, full_shape, start, is_alone, memory))
                tensors.append(values)
        if shards != self._shards:
            self._regions = _divided(shards, tensors, self._most_bytes)
            self._shards = shards
        return [
            OwnRegion(
                text,
                members[0][0].names,
                [tensors[i] if rows is None else tensors[i][rows[0] : rows[1]] for _, i, rows in members],
            )
            for text, members in self._regions
        ]


def _divided(
    shards: Sequence[_Shard], tensors: Sequence[torch.Tensor], most_bytes: int
) -> list[tuple[bytes, list[_Member]]]:
    """Returns the regions of `RegionPlan`. tensors: the values of each shard."""
    names: dict[tuple[Any, ...], list[str]] = {}  # the names of the tensors in a place in memory
    first: dict[tuple[Any, ...], int] = {}  # the index of the first of these tensors
    for index, shard in enumerate(shards):
        names.setdefault(shard.memory, []).append(shard.name)
        first.setdefault(shard.memory, index)
    alone = {shard.memory for shard in shards if shard.is_alone}
    regions: list[list[_Member]] = []
    small: dict[tuple[Any, ...], list[_Member]] = {}  # the members of the joined region that is not full yet
    sizes: dict[tuple[Any, ...], int] = {}
    for memory in sorted(first, key=lambda memory: memory not in alone):
        index, tensor = first[memory], tensors[first[memory]]
        kind = tensor.dtype, tensor.device
        for rows, part in _cut(tensor, most_bytes):
            start = shards[index].start + (rows[0] if rows is not None else 0)
            found = TensorRows(tuple(names[memory]), shards[index].full_shape, start, part.shape), index, rows
            if memory in alone or part.nbytes * _JOINED_SHARE > most_bytes:
                regions.append([found])
                continue
            if sizes.get(kind, 0) + part.nbytes > most_bytes:
                regions.append(small.pop(kind))
                sizes[kind] = 0
            small.setdefault(kind, []).append(found)
            sizes[kind] = sizes.get(kind, 0) + part.nbytes
    return [(json.dumps([rows for rows, *_ in each]).encode(), each) for each in (*regions, *small.values())]


def _cut(tensor: torch.Tensor, most_bytes: int) -> Iterator[tuple[tuple[int, int] | None, torch.Tensor]]:
    """Cuts a tensor into parts of at most most_bytes bytes, or of one row if a row is larger. Yields (the indices of
    the part's first row and of the row after its last one, the part). If one part is the whole tensor, it yields None
    in place of the indices."""
    if tensor.nbytes <= most_bytes or tensor.dim() == 0:
        yield None, tensor
        return
    step = max(1, most_bytes * tensor.shape[0] // tensor.nbytes)
    step -= step % _ROW_STEP if step > _ROW_STEP else 0
    for first in range(0, tensor.shape[0], step):
        yield (first, first + step), tensor[first : first + step]


def _shard_of(name: str, tensor: torch.Tensor, part: tuple[int, int]) -> tuple[torch.Size, int, torch.Tensor] | None:
    """Returns (shape of the complete tensor, index of the first row that this process sends, the rows that it sends).
    Returns None if only other ranks send rows of the tensor."""
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
