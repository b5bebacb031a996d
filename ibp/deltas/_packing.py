"""Changes of tensors as bytes for other processes: of a broadcast, and of messages that name and check themselves."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._common import wire
from .._common.rounding import rounded_up
from .._machine import staging
from .._rows.faults import CorruptTableError
from .._rows.table import TENSORS
from .._tables.compressed_tensor import CompressedTensor
from . import _coding
from ._checkpoints import Version
from ._fingerprint import fingerprint, mix
from ._tensors import Delta

Change = Delta | Version

_ALIGNMENT = 16  # bytes, of each part
_PREFIX = struct.Struct("<8sQQQ")  # _MAGIC, bytes of the head, bytes of the parts, fingerprint of both
_MAGIC = b"ibp push"
_BEGIN_BYTES = 64 << 10  # of a message, which hold most heads


@wire.sent
class ChangeHead(NamedTuple):
    """What is known of a change besides its bytes. fields: of a table, without the codebook where it is the known one;
    None of a whole tensor. fingerprints: of a delta."""

    shape: torch.Size
    dtype: torch.dtype
    fields: dict[str, Any] | None
    fingerprints: tuple[int, int] | None
    sizes: tuple[int, ...]  # bytes of each part


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
    return [tensors[name] for name in TENSORS]


def starts_of(heads: Iterable[ChangeHead]) -> list[int]:
    """Where each part begins among all of them, and the end."""
    sizes = [size for head in heads for size in head.sizes]
    return list(itertools.accumulate((rounded_up(size, _ALIGNMENT) for size in sizes), initial=0))


def pack(changes: Iterable[Change], starts: Sequence[int], data: torch.Tensor) -> None:
    """Puts the parts of changes into memory. data: uint8, of as many bytes as `starts` ends with."""
    parts = [part.reshape(-1).view(torch.uint8) for change in changes for part in _parts(change)]
    pairs = [(data[start : start + len(part)], part) for start, part in zip(starts, parts) if len(part)]
    if pairs:
        staging.copy_all(*zip(*pairs))


def opened(heads: Sequence[ChangeHead], data: torch.Tensor) -> list[Change]:
    """Returns the changes whose parts are in data, which they share. CorruptTableError: a head is not that of its
    parts."""
    *places, end = starts_of(heads)
    if min((size for head in heads for size in head.sizes), default=0) < 0 or end != data.numel():
        raise CorruptTableError(f"the message has {data.numel()} bytes of changes; its head says {end}")
    changes, starts = [], iter(places)
    for head in heads:
        parts = [data[start : start + size] for size, start in zip(head.sizes, starts)]
        try:
            changes.append(_change(head, parts))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise CorruptTableError(f"a change of the message is not what its head says: {error}") from error
    return changes


def _change(head: ChangeHead, parts: Sequence[torch.Tensor]) -> Change:
    if head.fields is None:
        (part,) = parts
        return part.view(head.dtype).view(head.shape)
    slots, overflow, lengths, bases = parts
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
    """uint8 [bytes] on a device: what `wire` writes of a head, and the parts of changes behind it. A GPU is not waited
    for."""
    text, starts = wire.written(head), starts_of(heads)
    first = _PREFIX.size + rounded_up(len(text), _ALIGNMENT)
    message = torch.zeros(first + starts[-1], dtype=torch.uint8, device=device)  # its fingerprint covers gaps
    prefix = _PREFIX.pack(_MAGIC, len(text), starts[-1], mix(message.numel() - _PREFIX.size))
    begin = torch.frombuffer(bytearray(prefix + text), dtype=torch.uint8)
    message[: begin.numel()].copy_(staging.queued(begin, device))
    pack(changes, starts, message[first:])
    fingerprint_of_both = message[_PREFIX.size - 8 : _PREFIX.size].view(torch.int64)  # so far of the number of bytes
    torch.ops.ibp.sum_words.default(message[_PREFIX.size :], 0, fingerprint_of_both)
    return message


def read_message(message: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(head, memory of the parts) of what `message_of` made; all of its bytes are checked. TypeError: the message is no
    uint8 [bytes]. CorruptTableError: it is damaged, or something else."""
    if not isinstance(message, torch.Tensor) or message.dtype != torch.uint8 or message.dim() != 1:
        what = f"{message.dtype} {list(message.shape)}" if isinstance(message, torch.Tensor) else type(message).__name__
        raise TypeError(f"the message is a {what}; wanted a torch.uint8 tensor of one dimension")
    if message.data_ptr() % _ALIGNMENT or not message.is_contiguous():
        message = message.clone(memory_format=torch.contiguous_format)
    coming = staging.Coming(message[:_BEGIN_BYTES])
    found = fingerprint(message[_PREFIX.size :])  # this waits for both
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
