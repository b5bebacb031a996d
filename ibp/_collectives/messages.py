"""Messages of fixed sizes, one behind the other in one piece of memory: a `Place` each, or raw bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._place import Place
from .codec import ROW_BYTES, Codec, rows_of
from .staging import Slot

_ALIGNMENT = 64  # bytes
_EDGE = 8  # times smaller than others are the first and the last of many pieces
_FIRST_OF_TWO = 4  # pieces that are as large as the first one: coding it takes longer than decoding the second one
_COUNTERS, _FINGERPRINT = 8, 7  # int64 at the start of a place, and the one of them that places leave alone
_WHOLE = -1  # instead of a message's number
_ENTRIES, _LOST, _FAULT = 8, 1, 2  # of a message in a status: rows spilled and lost, and a fault of 4


class Part(NamedTuple):
    """What a message carries. message: its number; data: uint8 [n], where from or where to."""

    message: int
    data: torch.Tensor


class Memory(NamedTuple):
    """Of messages in a slot: of all of them, as bytes and as int64, and of each."""

    whole: torch.Tensor
    words: torch.Tensor
    each: Sequence[torch.Tensor]


class _Bound(NamedTuple):
    """A message in a slot's memory: its first bytes, the arguments of operations, and where it is raw its bytes."""

    start: torch.Tensor
    encode: tuple
    decode: tuple


class Status:
    """What the host looks at after a call: what has become of each message. It is zero before a call.

    Args:
        count: of messages.
        num_coded: of them.
        device: that writes it.
        data: int64 [status_entries(count, num_coded)] zeros, that it lies in; None: it has its own.
    """

    @torch.inference_mode(False)  # as all that later calls write to
    def __init__(self, count: int, num_coded: int, device: torch.device, data: torch.Tensor | None = None) -> None:
        self._count = count
        entries = status_entries(count, num_coded)
        self.data = torch.zeros(entries, dtype=torch.int64, device=device) if data is None else data
        of_messages = self.data[: _ENTRIES * count].view(count, _ENTRIES)
        self.counts = [row[:_FAULT] for row in of_messages]
        self.faults = [row[_FAULT : _FAULT + 4] for row in of_messages]
        self.unused = self.data[_ENTRIES * count : _ENTRIES * count + 4]  # where the coder would note wrong ids
        self.heads = self.data[_ENTRIES * (count + 1) :]  # fingerprints of the codecs of coded messages
        is_pinned = self.data.is_cuda and data is None
        self._seen = torch.empty(entries, dtype=torch.int64, pin_memory=True) if is_pinned else self.data
        self.done = torch.cuda.Event() if is_pinned else None
        self._values: list[int] = []

    def record(self) -> None:
        """Brings it to the host, on the current stream, and makes it ready for another call."""
        if self.done is not None:
            self._seen.copy_(self.data, non_blocking=True)
            self.done.record()
            self.data.zero_()

    def read(self) -> None:
        """What is on the host is looked at, from now on."""
        self._values = self._seen.tolist()
        if self.done is None:
            self.data.zero_()

    def is_lost(self, message: int) -> bool:
        """Whether the message, where it was coded here, had no room for all rows."""
        return self._values[_ENTRIES * message + _LOST] != 0

    def is_missing(self, message: int) -> bool:
        """Whether the message, where it was decoded here, lacks rows."""
        return self._values[_ENTRIES * message + _FAULT] != 0

    def any_lost(self) -> bool:
        return any(self.is_lost(k) or self.is_missing(k) for k in range(self._count))

    def strange(self, fingerprint: int) -> bool:
        """Whether a message came from another codec."""
        return any(head != fingerprint for head in self._values[_ENTRIES * (self._count + 1) :])


def status_entries(count: int, num_coded: int) -> int:
    return _ENTRIES * (count + 1) + num_coded


def has_lost(statuses: torch.Tensor) -> torch.Tensor:
    """Of each of the statuses, int64 [n, status_entries(count, 0)]: whether rows that were coded here had no room, or
    ones that came lack: bool [n]."""
    entries = statuses.view(len(statuses), -1, _ENTRIES)[:, :-1]
    return entries[:, :, _LOST : _FAULT + 1].ne(0).flatten(1).any(1)


class Messages:
    """How messages lie in a slot. Their sizes follow from the codec and what they carry at most.

    Args:
        codec: how they are coded.
        payloads: bytes that each message carries at most.
        least: a message that carries fewer bytes is raw.
        device: of the memory.
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
        heads = [self.starts[k] // 8 + _FINGERPRINT for k in coded]
        self._heads = torch.tensor(heads, dtype=torch.int64, device=device)
        self._statuses: list[Status] = []  # that no call uses

    def _size(self, payload: int, is_coded: bool) -> int:
        if is_coded:
            return self.codec.message_bytes(rows_of(payload))
        return -(-payload // _ALIGNMENT) * _ALIGNMENT

    def of(self, slot: Slot) -> Memory:
        """The memory of the messages in a slot."""
        known = self._known(slot)
        if _WHOLE not in known:
            known[_WHOLE] = self._memory(slot)
        return known[_WHOLE]

    @torch.inference_mode(False)
    def _memory(self, slot: Slot) -> Memory:
        whole = slot.memory[: self.num_bytes]
        return Memory(whole, whole.view(torch.int64), whole.split(self.sizes))

    def status(self) -> Status:
        """One that no other call has."""
        return self._statuses.pop() if self._statuses else Status(len(self.payloads), len(self._heads), self.device)

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
        torch.ops.ibp.encode_into.default(*bound.encode, status.counts[k], data, None, None, 0, max_sms, status.unused)

    def clean(self, slot: Slot, k: int) -> None:
        """Makes a message that was moved ready for being coded again: by then the host has less to do."""
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
        torch.ops.ibp.decode_bytes.default(*bound.decode, 0, data.numel(), max_sms, data, status.faults[k])

    def note_heads(self, slot: Slot, status: Status) -> None:
        """Notes in the status which codecs have coded the messages."""
        torch.index_select(self.of(slot).words, 0, self._heads, out=status.heads)

    def _known(self, slot: Slot) -> dict[int, Any]:
        """What is kept about a slot's memory."""
        known = slot.bound.get(self)
        if known is None:
            known = slot.bound[self] = {}
        return known

    def _bind(self, slot: Slot, k: int) -> _Bound:
        known = self._known(slot)
        if k not in known:
            known[k] = self._bound(self.of(slot).each[k], k)
        return known[k]

    @torch.inference_mode(False)
    def _bound(self, memory: torch.Tensor, k: int) -> _Bound:
        place = self._place(memory, self.payloads[k])
        *encode, _ = place._arguments
        return _Bound(_start_of(place, memory), tuple(encode), place._table_arguments)

    def _empty_start(self, payload: int) -> torch.Tensor:
        """What a message begins with before rows are coded into it."""
        memory = torch.empty(self._size(payload, True), dtype=torch.uint8, device=self.device)
        place = self._place(memory, payload)
        place.clear()
        memory[: 8 * _COUNTERS].view(torch.int64)[_FINGERPRINT] = self.codec.fingerprint
        return _start_of(place, memory).clone()

    def _place(self, memory: torch.Tensor, payload: int) -> Place:
        num_rows = rows_of(payload)
        return Place.over(memory, self.codec.codebook, num_rows, **self.codec.sizes(num_rows))


def _start_of(place: Place, memory: torch.Tensor) -> torch.Tensor:
    """The counters, rooms and bases of a place."""
    return memory[: place.lengths.data_ptr() - memory.data_ptr()]


class Span(NamedTuple):
    """A piece of a tensor. payload: what its message has room for: as many bytes, or more at the end."""

    bytes: slice
    payload: int


@functools.lru_cache(maxsize=256)
def spans_of(num_bytes: int, count: int) -> tuple[Span, ...]:
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
            spans.append(Span(slice(first, stop), payload * ROW_BYTES))
        first += payload * ROW_BYTES
    return tuple(spans)


def shares_of(count: int) -> tuple[float, float]:
    """Of a large tensor's bytes: what the first and the last of two or more pieces have."""
    if count == 2:
        return 1 / _FIRST_OF_TWO, 1 - 1 / _FIRST_OF_TWO
    return (1 / ((count - 2) * _EDGE + 2),) * 2
