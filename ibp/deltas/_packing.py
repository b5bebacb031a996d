"""Writes changes of tensors as bytes for other processes: in a broadcast, or in messages that can be checked.

The coded rows of a change lie as in a packed piece (`_layout.forms`), but without its head, because the head of the
message says how large the parts of all changes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._common import wire
from .._common.rounding import rounded_up
from .._layout import forms
from .._machine import staging
from .._rows.faults import CorruptTableError
from .._tables.compressed_tensor import CompressedTensor
from . import _coding
from ._checkpoints import Version
from ._fingerprint import fingerprint, mix
from ._tensors import Delta

Change = Delta | Version

_ALIGNMENT = 16  # Changes, and slots and overflow inside a change, are aligned to this many bytes.
_PARTS = ("bases", "lengths", "slots", "overflow")  # parts of a table, in the order of `ChangeHead.sizes`
_PREFIX = struct.Struct("<8sQQQ")  # _MAGIC, bytes of the head, bytes of the parts, fingerprint of both
_MAGIC = b"ibp push"
_BEGIN_BYTES = 64 << 10  # Most heads end in this many first bytes of a message.


@wire.sent
class ChangeHead(NamedTuple):
    """The description of a change, without its bytes.

    Attributes:
        shape, dtype: those of the tensor.
        fields: the fields of the table, without the codebook if it is the known one. None for a whole tensor.
        fingerprints: the fingerprints of the base and of the result, if the change is a delta.
        sizes: the bytes of the table's bases, lengths, slots and overflow, or of the whole tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    fields: dict[str, Any] | None
    fingerprints: tuple[int, int] | None
    sizes: tuple[int, ...]


def head_of(change: Change) -> ChangeHead:
    """Returns the description of a change."""
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
    """Returns the tensors whose bytes are sent for a change."""
    if isinstance(change, torch.Tensor):
        return [change.detach().resolve_conj().resolve_neg().contiguous()]
    table = change.table if isinstance(change, Delta) else change
    tensors = table._tensors()
    return [tensors[name] for name in _PARTS]


def places_of(heads: Iterable[ChangeHead]) -> tuple[list[list[slice]], int]:
    """Returns where the parts of each change lie in the memory of all changes, and how many bytes that has."""
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
    """Copies the parts of changes to memory.

    Args:
        places: the result of `places_of`.
        data: uint8, of the size that `places_of` returns.
    """
    pairs = [
        (data[where], part.reshape(-1).view(torch.uint8))
        for change, place in zip(changes, places)
        for where, part in zip(place, _parts(change))
        if part.numel()
    ]
    if pairs:
        staging.copy_all(*zip(*pairs))


def opened(heads: Sequence[ChangeHead], data: torch.Tensor) -> list[Change]:
    """Returns the changes whose parts are in data, as views of this memory. Raises CorruptTableError if a head
    contradicts its parts."""
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
    """Returns the change that a head describes. Raises TypeError, ValueError or RuntimeError if its parts are wrong."""
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
    """Returns a message, uint8 [bytes], on a device. Does not wait for a GPU.

    Args:
        head: an object that `wire` can write. It comes first.
        heads, changes: the changes, whose parts follow, and their descriptions.
    """
    text, (places, num_bytes) = wire.written(head), places_of(heads)
    first = _PREFIX.size + rounded_up(len(text), _ALIGNMENT)
    message = torch.zeros(first + num_bytes, dtype=torch.uint8, device=device)  # The fingerprint covers gaps.
    prefix = _PREFIX.pack(_MAGIC, len(text), num_bytes, mix(message.numel() - _PREFIX.size))
    begin = torch.frombuffer(bytearray(prefix + text), dtype=torch.uint8)
    message[: begin.numel()].copy_(staging.queued(begin, device))
    pack(changes, places, message[first:])
    fingerprint_of_both = message[_PREFIX.size - 8 : _PREFIX.size].view(torch.int64)  # So far it covers only the size.
    torch.ops.ibp.sum_words.default(message[_PREFIX.size :], 0, fingerprint_of_both)
    return message


def read_message(message: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Returns (head, memory of the parts) of a message that `message_of` has made.

    Raises:
        TypeError: the message is not uint8 [bytes].
        CorruptTableError: the bytes are damaged, or are no message.
    """
    if not isinstance(message, torch.Tensor) or message.dtype != torch.uint8 or message.dim() != 1:
        what = f"{message.dtype} {list(message.shape)}" if isinstance(message, torch.Tensor) else type(message).__name__
        raise TypeError(f"the message is a {what}; wanted a torch.uint8 tensor of one dimension")
    if message.data_ptr() % _ALIGNMENT or not message.is_contiguous():
        message = message.clone(memory_format=torch.contiguous_format)
    coming = staging.Coming(message[:_BEGIN_BYTES])
    found = fingerprint(message[_PREFIX.size :])  # This waits for both copies.
    begin = coming.wait().numpy().tobytes()
    prefix = begin[: _PREFIX.size]
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise CorruptTableError("the message is none of an ibp.deltas.Sender, or its beginning is damaged")
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
