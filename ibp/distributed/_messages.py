"""Messages of fixed sizes, one behind the other in memory. Each is a `CodedRows` or raw bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._common.rounding import rounded_up
from .._layout import forms
from .._rows.faults import ENTRIES as _FAULT
from .._rows.handle import Handle
from .._tables.coded_rows import CodedRows
from ._codec import ROW_BYTES, Codec, rows_of
from ._slots import Slot

_EDGE = 8  # how many times smaller than others the first and the last of many pieces are
_FIRST_OF_TWO = 4  # the first of two pieces has a quarter of the rows, because coding takes longer than decoding
_WHOLE = -1  # instead of a message's number
# Of a message in a status: how many int64 it has, the one that counts lost rows, and the codec's fingerprint. The
# fingerprint is the note in the message's head.
_ENTRIES, _LOST, _FINGERPRINT = 8, 1, 7


class Part(NamedTuple):
    """What a message carries. message: its number; data: uint8 [n], where from or where to."""

    message: int
    data: torch.Tensor


class Memory(NamedTuple):
    """The memory of the messages in a slot: of all messages, as bytes and as int64, and of each message."""

    whole: torch.Tensor
    words: torch.Tensor
    each: Sequence[torch.Tensor]


class _BoundMessages(NamedTuple):
    """A message in a slot's memory: its first bytes, and its rows as operations take them."""

    start: torch.Tensor
    handle: Handle


class Status:
    """What has become of each message of a call, for the host to look at.

    Attributes:
        rows: int64 [8] for each message, which its coder writes: how many rows were spilled, how many were lost, and
            last the codec's fingerprint. Ranks can send each other theirs.
        all_rows: the rows of all messages as one tensor.
        faults: int64 [4] for each message, a fault record for decoding it.
        heads: the fingerprints, a view.
        unused: a fault record for the coder, which finds no wrong ids.
        seen: an event that is recorded when the host has a copy; None on the CPU.
        is_damaged: on a GPU, after `read`: whether rows were missing from a message although its coder lost none.

    Args:
        count: number of messages.
        device: the device that writes the status.
        fingerprint: that of the codec.
        data: int64 [status_entries(count)] zeros, the status's memory; None: new memory.
    """

    @torch.inference_mode(False)  # as all that later calls write to
    def __init__(
        self, count: int, device: torch.device, fingerprint: int = 0, data: torch.Tensor | None = None
    ) -> None:
        self._count, entries = count, status_entries(count)
        self.data = torch.zeros(entries, dtype=torch.int64, device=device) if data is None else data
        of_rows, of_faults, self.unused = self.data.split([_ENTRIES * count, _FAULT * count, _FAULT])
        self.all_rows, self.rows = of_rows, of_rows.view(count, _ENTRIES).unbind()
        self.counts = [row[: _LOST + 1] for row in self.rows]
        self.faults = of_faults.view(count, _FAULT).unbind()
        self.heads = of_rows.view(count, _ENTRIES)[:, _FINGERPRINT]
        self.heads.fill_(fingerprint)
        is_pinned = self.data.is_cuda and data is None
        self._empty = self.data.clone() if data is None else None
        self._on_host = (
            torch.empty(entries, dtype=torch.int64, pin_memory=True, device="cpu") if is_pinned else self.data
        )
        self.seen = torch.cuda.Event() if is_pinned else None
        self._values: list[int] = []
        self._was_lost = [False] * count
        self.is_damaged = False

    def record(self) -> None:
        """On a GPU: copies it to the host, on the current stream, and makes it ready for another call."""
        if self.seen is not None:
            self._on_host.copy_(self.data, non_blocking=True)
            self.seen.record()
            self._clear()

    def _clear(self) -> None:
        assert self._empty is not None
        self.data.copy_(self._empty)

    def read(self) -> None:
        """Takes the host's copy as what the other methods look at.

        A GPU decodes the last messages of a call after it has recorded the status: what is missing from them is noted
        a call later."""
        values, of_rows = self._on_host.tolist(), _ENTRIES * self._count
        if self.seen is None:
            self._values = values
            self._clear()
            return
        self._values, faults = values[:of_rows] + [0] * (len(values) - of_rows), values[of_rows::_FAULT]
        was_lost, self._was_lost = self._was_lost, [self.is_lost(k) for k in range(self._count)]
        # Rows that the coder of a message lost, in this call or in the one before, are missing for its receivers, too.
        self.is_damaged = any(
            fault and not (lost or before) for fault, lost, before in zip(faults, self._was_lost, was_lost)
        )

    def is_lost(self, message: int) -> bool:
        """Returns whether rows of the message had no room when it was coded, or were missing when it was decoded."""
        fault = _ENTRIES * self._count + _FAULT * message
        return self._values[_ENTRIES * message + _LOST] != 0 or self._values[fault] != 0

    def any_lost(self) -> bool:
        return any(self.is_lost(k) for k in range(self._count))

    def strange(self, fingerprint: int) -> bool:
        """Returns whether a message came from another codec."""
        heads = self._values[_FINGERPRINT : _ENTRIES * self._count : _ENTRIES]
        return any(head != fingerprint for head in heads)


def status_entries(count: int) -> int:
    return (_ENTRIES + _FAULT) * count + _FAULT


def has_lost(statuses: torch.Tensor) -> torch.Tensor:
    """Returns bool [n] for statuses, int64 [n, status_entries(count)]: whether rows that were coded here had no room,
    or rows that came were missing."""
    count = (statuses.shape[1] - _FAULT) // (_ENTRIES + _FAULT)
    of_rows, of_faults, _ = statuses.split([_ENTRIES * count, _FAULT * count, _FAULT], 1)
    return (of_rows[:, _LOST::_ENTRIES] != 0).any(1) | (of_faults[:, ::_FAULT] != 0).any(1)


class Messages:
    """How messages lie in a slot. Their sizes follow from the codec and from how many bytes they carry at most.

    Args:
        codec: how messages are coded.
        payloads: how many bytes each message carries at most.
        least: a message that carries fewer bytes is raw.
        device: the device of the memory.
    """

    @torch.inference_mode(False)
    def __init__(self, codec: Codec, payloads: Sequence[int], least: int, device: torch.device) -> None:
        self.codec, self.payloads, self.device = codec, tuple(payloads), device
        self.is_coded = [size >= max(1, least) for size in self.payloads]
        self.sizes = [self._size(size, coded) for size, coded in zip(self.payloads, self.is_coded)]
        self.starts = list(itertools.accumulate(self.sizes, initial=0))
        self.num_bytes = self.starts[-1]
        coded = [k for k, is_coded in enumerate(self.is_coded) if is_coded]
        self._empty = {size: self._empty_start(size) for size in {self.payloads[k] for k in coded}}
        self._heads = [self.starts[k] // 8 + forms.NOTE for k in coded]
        self._coded = coded
        self._statuses: list[Status] = []  # that no call uses

    def _size(self, payload: int, is_coded: bool) -> int:
        if is_coded:
            return self.codec.message_bytes(rows_of(payload))
        return rounded_up(payload, forms.ALIGNMENT)

    def of(self, slot: Slot) -> Memory:
        """Returns the memory of the messages in a slot."""
        known = slot.bound.setdefault(self, {})
        if _WHOLE not in known:
            known[_WHOLE] = self._memory(slot)
        return known[_WHOLE]

    @torch.inference_mode(False)
    def _memory(self, slot: Slot) -> Memory:
        whole = slot.memory[: self.num_bytes]
        return Memory(whole, whole.view(torch.int64), whole.split(self.sizes))

    def status(self) -> Status:
        """Returns a status that no other call has."""
        if self._statuses:
            return self._statuses.pop()
        return Status(len(self.payloads), self.device, self.codec.fingerprint)

    def give_back(self, status: Status) -> None:
        self._statuses.append(status)

    def code(self, slot: Slot, part: Part, status: Status, max_sms: int) -> None:
        """Codes a part of a tensor into its message."""
        k, data = part
        if not self.is_coded[k]:
            self.of(slot).each[k][: data.numel()].copy_(data)
            return
        bound = self._bind(slot, k)
        if slot.clean is not bound:
            bound.start.copy_(self._empty[self.payloads[k]])
        slot.clean = None
        bound.handle.encode(data, status.counts[k], status.unused, max_sms=max_sms)

    def clean(self, slot: Slot, k: int) -> None:
        """Makes a message that was moved ready for being coded again, while the host has nothing else to do."""
        if self.is_coded[k]:
            slot.clean = self._bind(slot, k)
            slot.clean.start.copy_(self._empty[self.payloads[k]])

    def decode(self, slot: Slot, part: Part, status: Status, max_sms: int) -> None:
        """Writes what a message carries to where it belongs."""
        k, data = part
        if not self.is_coded[k]:
            data.copy_(self.of(slot).each[k][: data.numel()])
            return
        bound = self._bind(slot, k)
        torch.ops.ibp.decode_bytes.default(bound.handle.table, 0, data.numel(), max_sms, data, status.faults[k])

    def note_heads(self, slot: Slot, status: Status) -> None:
        """Notes in the status which codecs have coded the messages."""
        status.heads[self._coded] = self.of(slot).words[self._heads]

    def _bind(self, slot: Slot, k: int) -> _BoundMessages:
        known = slot.bound.setdefault(self, {})
        if k not in known:
            known[k] = self._bound(self.of(slot).each[k], k)
        return known[k]

    @torch.inference_mode(False)
    def _bound(self, memory: torch.Tensor, k: int) -> _BoundMessages:
        payload = self.payloads[k]
        return _BoundMessages(memory[: self._start_bytes(payload)], self._place(memory, payload).handle)

    def _empty_start(self, payload: int) -> torch.Tensor:
        """Returns what a message begins with before rows are coded into it."""
        memory = torch.empty(self._size(payload, True), dtype=torch.uint8, device=self.device)
        self._place(memory, payload).clear()
        forms.head_of(memory[: forms.HEAD_BYTES].view(torch.int64)).note.fill_(self.codec.fingerprint)
        return memory[: self._start_bytes(payload)].clone()

    def _place(self, memory: torch.Tensor, payload: int) -> CodedRows:
        num_rows = rows_of(payload)
        return CodedRows.over(memory, self.codec.codebook, num_rows, **self.codec.sizes(num_rows))

    def _start_bytes(self, payload: int) -> int:
        """Returns how many bytes stand before the lengths: the head, bases and rooms, which have to be empty when rows
        are coded. Coding all rows writes all lengths."""
        num_rows = rows_of(payload)
        return forms.fixed(num_rows, ROW_BYTES, **self.codec.sizes(num_rows)).lengths.start


class MessageSpan(NamedTuple):
    """A piece of a tensor. payload: what its message has room for: as many bytes, or more at the end."""

    bytes: slice
    payload: int


@functools.lru_cache(maxsize=256)
def spans_of(num_bytes: int, count: int) -> tuple[MessageSpan, ...]:
    """At most `count` pieces of whole rows. The first and the last of three or more have an eighth of the others' size,
    the first of two a quarter of the tensor: coding the first one and decoding the last one are not hidden behind the
    link."""
    rows, inner = rows_of(num_bytes), max(1, count - 2)
    if count > 2:
        step = max(1, -(-rows * _EDGE // (inner * _EDGE + 2)))
        edge = -(-step // _EDGE)
        payloads = [edge, *[step] * inner, edge]
    elif count == 2:
        first = max(1, rows // _FIRST_OF_TWO)
        payloads = [first, max(1, rows - first)]
    else:
        payloads = [max(1, rows)]
    spans, first = [], 0
    for payload in payloads:
        if first < num_bytes:
            stop = min(first + payload * ROW_BYTES, num_bytes)
            spans.append(MessageSpan(slice(first, stop), payload * ROW_BYTES))
        first += payload * ROW_BYTES
    return tuple(spans)


def shares_of(count: int) -> tuple[float, float]:
    """Of a large tensor's bytes: what the first and the last of two or more pieces have."""
    if count == 2:
        return 1 / _FIRST_OF_TWO, 1 - 1 / _FIRST_OF_TWO
    return (1 / ((count - 2) * _EDGE + 2),) * 2
