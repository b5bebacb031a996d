"""Converts changes of tensors to bytes for other processes. The bytes are sent in a broadcast, or in the messages of an
`ibp.deltas.Sender`. Such a message describes its content and has a fingerprint.

A change is a delta, or a tensor or table that is sent whole. The parts of a delta or table are the arrays of the table.
A tensor has one part, the tensor. The parts of all changes lie one after the other in one buffer. The parts of a table
have the same order as in a packed piece (`_rows.forms`), but no head precedes them, because the `ChangeHead` has
their sizes.

A message consists of a prefix (_PREFIX), a head that `wire` has written, zeros up to a multiple of 16 bytes, and the
buffer with the parts.

The weights that a sender pushes are divided into regions. A *region* is some rows of a tensor. Small tensors are
*joined*: one region then has the elements of several tensors, one after the other. A *piece* of a push is a list of
regions. One message holds their changes, and its head (`PushHead`) names them.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._common import wire
from .._common.sequences import rounded_up
from .._machine import staging
from .._rows import forms
from .._rows.handle import CorruptTableError
from .._rows.table import tensors_of
from .._tables.compressed_tensor import CompressedTensor
from . import _coding
from ._coding import Version, fingerprint, mix
from ._delta import Delta

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
    tensors = tensors_of(table)
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


def named(weights: Named) -> dict[str, Any]:
    """Returns a dict of the tensors by name. If weights is a module, these are the tensors of its state dict."""
    return dict(weights.state_dict() if isinstance(weights, torch.nn.Module) else weights)
