"""The messages of collective calls: how tensors are coded into messages of fixed size (`Codec`), the memory in which
messages lie, the record of their lost rows, their layout, and the spans into which a tensor is divided.

A message carries one part of a tensor to another rank. It holds either coded rows, in the form of a fixed piece
(`_rows/forms.py`), or the raw bytes. The size of a message follows from the codec and from the size of the part, so
ranks never tell each other sizes. Rows for which a message has no room are lost; a `Status` counts them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._common import wire
from .._common.sequences import rounded_up
from .._rows import forms
from .._rows import geometry as _rows
from .._rows.codebook import AnyCodebook, check_codebook, fingerprint_of, surveyed
from .._rows.handle import ENTRIES as _FAULT
from .._rows.handle import Handle
from .._rows.learning import learned_from
from .._rows.planes import check_level
from .._tables.coded_rows import CodedRows

# ---- codecs --------------------------------------------------------------------------------------------------------

ROW_BYTES = 4096  # A message cuts a tensor's bytes into rows of this size.
# The overflow of a message has 1.25 times the size that rows like those of the sample need, plus this fraction of the
# size of the message's rows before coding.
_SLACK = 1 / 256
_LEAST_OVERFLOW = 4096  # Every message has this many additional bytes of overflow.
# Among the slot sizes for which slots and overflow together take at most this many times the fewest possible bytes, the
# largest is used. The larger the slots, the fewer rows need overflow.
_NEAR = 1.01
_LEAST_SAVINGS = 0.02  # If a codec would save less than this fraction of the bytes, tensors travel raw.
# Version of the layout of messages. Raise it when the meaning of their bytes changes, so that ranks with different
# versions of this package refuse each other's messages.
_LAYOUT = 2


@wire.sent
@dataclass(frozen=True, eq=False)
class Codec:
    """Describes how tensors of one kind are coded into messages. The size of a message follows from the size of the
    tensor.

    A message has a slot for each row of 4,096 bytes, and an overflow of fixed size for the bytes that do not fit into
    the slots. Ranks that exchange tensors need equal codecs.

    Example:
        >>> x = torch.randn(1000, 1024)
        >>> codec = ibp.distributed.Codec.learn(x)
        >>> codec.message_bytes(1000) < x.nbytes  # 1000 rows of 4,096 bytes
        True
        >>> f"{codec.savings:.0%}"
        '15%'

    Attributes:
        codebook: how rows are coded. It is for rows of 4,096 bytes.
        slot_bytes: size of a row's slot in bytes, a multiple of 32 below 4,096.
        overflow_bytes: size in bytes of a message's overflow, divided by the message's number of rows: 0 to 4,096.

    Raises:
        TypeError, ValueError: an attribute is not as described.
    """

    codebook: AnyCodebook
    slot_bytes: int
    overflow_bytes: float

    def __post_init__(self) -> None:
        check_codebook(self.codebook)
        if self.codebook.row_bytes != ROW_BYTES:
            raise ValueError(f"the codebook is for rows of {self.codebook.row_bytes} bytes; wanted {ROW_BYTES}")
        if not (0 <= self.slot_bytes < ROW_BYTES and self.slot_bytes % _rows.SECTOR_BYTES == 0):
            raise ValueError(f"slot_bytes is {self.slot_bytes}; wanted a multiple of 32 below {ROW_BYTES}")
        if not 0 <= self.overflow_bytes <= ROW_BYTES:
            raise ValueError(f"overflow_bytes is {self.overflow_bytes}; wanted 0 to {ROW_BYTES}")

    @classmethod
    def learn(cls, x: torch.Tensor, *, level: str = "default") -> Codec | None:
        """Learns a codec for tensors like x from some rows of x.

        Args:
            x: a dense tensor of any dtype, on the CPU or a GPU.
            level: "default" or "fast", see `ibp.compress`.

        Returns:
            The codec, or None if it would save less than 2 % of the bytes.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; wanted a tensor")
        check_level(level)
        return learned(sample_of(x), x.dtype, level)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number of 63 bits. Different codecs almost certainly have different fingerprints."""
        return fingerprint_of(self.codebook, self.slot_bytes, self.overflow_bytes, _LAYOUT)

    def sizes(self, num_rows: int) -> dict[str, int]:
        """Returns the arguments slot_bytes and overflow_bytes, by name, of the `CodedRows` in a message of num_rows
        rows."""
        slack = int(num_rows * self.overflow_bytes) + _LEAST_OVERFLOW
        return {"slot_bytes": self.slot_bytes, "overflow_bytes": rounded_up(slack, 64)}

    def message_bytes(self, num_rows: int) -> int:
        """Returns the size in bytes of a message of num_rows rows."""
        return rounded_up(CodedRows.memory_bytes(self.codebook, num_rows, **self.sizes(num_rows)), 64)

    @property
    def savings(self) -> float:
        """The fraction of a large tensor's bytes that coding saves."""
        return 1 - self.message_bytes(1 << 16) / (ROW_BYTES << 16)


def rows_of(num_bytes: int) -> int:
    """Returns the number of rows into which num_bytes bytes are cut. The last row may be short."""
    return -(-num_bytes // ROW_BYTES)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a view, uint8 [n]."""
    x = x.detach() if x.requires_grad else x
    if x.numel() == 1:  # A tensor of one element is contiguous whatever its strides are, but `view` checks the strides.
        x = x.as_strided((1,), (1,))
    return (x if x.dim() == 1 else x.reshape(-1)).view(torch.uint8)


def sample_of(x: torch.Tensor, num_rows: int = 512) -> torch.Tensor:
    """Returns a sample of at most num_rows full rows of 4,096 bytes, spread over x, as uint8 [n, 4096] on the CPU."""
    return _rows.sample(_rows.bytes_of(x), ROW_BYTES, num_rows).view(-1, ROW_BYTES).cpu()


def learned(rows: torch.Tensor, dtype: torch.dtype, level: str) -> Codec | None:
    """Learns a codec from sampled rows. Returns None if it would save less than 2 % of the bytes.

    Args:
        rows: uint8 [n, 4096] on the CPU, rows of the tensors that will be coded.
        dtype: the dtype of the tensors.
        level: "default" or "fast".
    """
    if not len(rows):
        return None
    is_known = dtype in _rows.DTYPES or dtype.is_complex
    data = rows.reshape(-1)
    codebook = learned_from(data, ROW_BYTES, dtype if is_known else torch.uint8, level=level)
    if codebook is None:
        return None
    slot_bytes, mean_overflow = surveyed(data, codebook).best_slots(near=_NEAR)
    if slot_bytes == ROW_BYTES:
        return None
    codec = Codec(codebook, slot_bytes, 1.25 * mean_overflow + _SLACK * ROW_BYTES)
    return codec if codec.savings >= _LEAST_SAVINGS else None


# ---- messages ------------------------------------------------------------------------------------------------------

TURNS = 2  # Number of pieces of a call that are under way at the same time: while one travels, the next one is coded.
_ENTRIES = 8  # Number of int64 entries that the coder of a message writes to the status.
_LOST, _FINGERPRINT = 1, 7  # Indices of the number of lost rows and of the codec's fingerprint among these entries.


class MessageViews(NamedTuple):
    """Views of the messages in a buffer.

    Attributes:
        whole: uint8, all messages, one after the other.
        each: uint8, the bytes of each message.
        coded: for each coded message that has been used so far, by its number: (the first bytes of the message, which
            have to be reset before rows are coded into the message; a handle of the message's rows, for the operations
            that code and decode).
    """

    whole: torch.Tensor
    each: Sequence[torch.Tensor]
    coded: dict[int, tuple[torch.Tensor, Handle]]


@dataclass(eq=False)
class MessageBuffer:
    """Memory for the messages of one piece.

    Attributes:
        memory: uint8.
        clean: the first bytes of the message that has already been reset, so that rows can be coded into it at once.
            None: there is no such message.
        views: views of the memory, for each layout (`Messages`) that the buffer was used with.
    """

    memory: torch.Tensor
    clean: torch.Tensor | None = None
    views: MutableMapping[Messages, MessageViews] = field(default_factory=weakref.WeakKeyDictionary)


class MessageBuffers:
    """The buffers in which a group's messages lie on one device, and the order of the streams that use them.

    On the CPU every piece gets a new buffer, which lives until the call ends. On a GPU the pieces of all calls
    alternate between two buffers. Streams keep the uses of a buffer in order: the work of a call begins when the work
    of the previous call has ended, and the pieces of a call follow each other on one stream.

    Attributes:
        side: the stream on which asynchronous calls run. The current stream waits for such a call only when the caller
            calls `wait` of the call's work. None on the CPU.
        coding_sms, decoding_sms: the numbers of multiprocessors that code, and that decode, while other messages
            travel. The remaining multiprocessors are left to NCCL. coding_sms is larger, because a piece that is coded
            late delays the link, while a piece that is decoded late does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.side = torch.cuda.Stream(device) if self.on_gpu else None
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 0
        self.coding_sms, self.decoding_sms = num_sms * 3 // 4, num_sms // 2
        self._buffers: list[MessageBuffer | None] = [None] * TURNS
        self._ended = torch.cuda.Event() if self.on_gpu else None
        self._last: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Makes the current stream wait for the work of the previous collective call."""
        if self._ended is not None:
            stream = torch.cuda.current_stream(self.device)
            if stream != self._last:
                stream.wait_event(self._ended)

    def end(self) -> None:
        """Records that all work of a collective call has now been queued on the current stream."""
        if self._ended is not None:
            self._last = torch.cuda.current_stream(self.device)
            self._ended.record(self._last)

    def take(self, piece: int, num_bytes: int) -> MessageBuffer:
        """Returns a buffer of at least num_bytes bytes for a piece of a call. piece: the index of the piece in the
        call."""
        if not self.on_gpu:
            return MessageBuffer(self._empty(num_bytes))
        buffer = self._buffers[piece % TURNS]
        if buffer is None or buffer.memory.numel() < num_bytes:
            self._release(buffer)
            buffer = self._buffers[piece % TURNS] = MessageBuffer(self._empty(num_bytes))
        return buffer

    def forget(self) -> None:
        """Releases the buffers, so that later calls use new memory. Call this method after a collective call has
        failed: its work may still use the buffers, and nobody waits for this work."""
        for turn, buffer in enumerate(self._buffers):
            self._release(buffer)
            self._buffers[turn] = None

    def _release(self, buffer: MessageBuffer | None) -> None:
        """Tells the allocator which streams may still use a buffer's memory, so that it keeps the memory until these
        streams are done."""
        if buffer is not None and self.side is not None:
            buffer.memory.record_stream(torch.cuda.current_stream(self.device))
            buffer.memory.record_stream(self.side)

    @torch.inference_mode(False)  # Later calls write to the memory.
    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Returns a context in which work is queued on the given stream. None: on the current stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class Status:
    """Records which messages of a call have lost rows, were damaged, or were coded with another codec. Coders and
    decoders write the status on their device, and the host reads it.

    Attributes:
        rows: int64 [8] for each message, written by the coder of the message. Entry 1 is the number of lost rows, and
            entry 7 is the codec's fingerprint. On GPUs the ranks send each other all eight entries.
        all_rows: the entries of `rows` for all messages as one tensor.
        counts: int64 [2] for each message, a view of `rows`: (the number of the message's rows that have overflow, the
            number of its lost rows).
        faults: int64 [4] for each message, the fault record of its decoder.
        heads: int64 [number of messages], a view of `rows`: the fingerprint of each message's codec.
        unused: a fault record that is passed to the operation that codes. The operation never writes to it, because the
            ids in these calls are always valid.
        seen: a CUDA event that completes when the host's copy is complete. None: the host reads the status's memory
            itself.
        lost: after `read`, a bool for each message: True if rows had no room when the message was coded. On the CPU it
            is also True if rows were missing when the message was decoded.
        is_strange: after `read`: whether a message was coded with a codec other than this rank's.
        is_damaged: after `read` on a GPU: whether rows were missing from a message although its coder lost none.

    Args:
        count: number of messages.
        device: the device that writes the status.
        fingerprint: the codec's fingerprint.
        data: int64 [status_entries(count)], zeros: the memory to use. The caller then reads this memory (see
            `has_lost`), and does not call `record` or `read`. None: the status allocates its memory.
    """

    @torch.inference_mode(False)  # Later calls write to the memory.
    def __init__(
        self, count: int, device: torch.device, fingerprint: int = 0, data: torch.Tensor | None = None
    ) -> None:
        self._fingerprint, self._num_row_entries = fingerprint, _ENTRIES * count
        entries = status_entries(count)
        self.data = torch.zeros(entries, dtype=torch.int64, device=device) if data is None else data
        self.all_rows, faults, self.unused = _split(self.data, count)
        rows = self.all_rows.view(count, _ENTRIES)
        self.rows, self.faults = rows.unbind(), faults.view(count, _FAULT).unbind()
        self.counts = [row[: _LOST + 1] for row in self.rows]
        self.heads = rows[:, _FINGERPRINT]
        self.heads.fill_(fingerprint)
        self._empty = self.data.clone() if data is None else None
        self._on_host = self.data
        self.seen: torch.cuda.Event | None = None
        if self.data.is_cuda and data is None:
            self._on_host = torch.empty(entries, dtype=torch.int64, pin_memory=True, device="cpu")
            self.seen = torch.cuda.Event()
        self.lost, self.is_strange, self.is_damaged = [False] * count, False, False

    def record(self) -> None:
        """On a GPU, queues two operations on the current stream: a copy of the status to the host, and a reset of the
        status for the next call."""
        if self.seen is not None:
            self._on_host.copy_(self.data, non_blocking=True)
            self.seen.record()
            self._clear()

    def read(self) -> None:
        """Sets `lost`, `is_strange` and `is_damaged` from the host's copy. On a GPU the caller must first wait for
        `seen`.

        A GPU decodes the last messages of a call after it has recorded the status, so the faults of these messages are
        reported by the next call that uses the status."""
        values, end = self._on_host.tolist(), self._num_row_entries
        lost, faults = values[_LOST:end:_ENTRIES], values[end::_FAULT]
        self.is_strange = any(head != self._fingerprint for head in values[_FINGERPRINT:end:_ENTRIES])
        if self.seen is None:
            self.lost = [count != 0 or fault != 0 for count, fault in zip(lost, faults)]
            self._clear()
            return
        # If the coder lost rows, in this call or in the previous call, the decoder has recorded a fault for them, too.
        # All other faults are damage.
        lost_before, self.lost = self.lost, [count != 0 for count in lost]
        explained = [now or before for now, before in zip(self.lost, lost_before)]
        self.is_damaged = any(fault != 0 and not is_lost for fault, is_lost in zip(faults, explained))

    def _clear(self) -> None:
        assert self._empty is not None
        self.data.copy_(self._empty)


def status_entries(count: int) -> int:
    """Returns the number of int64 entries in the status of `count` messages."""
    return (_ENTRIES + _FAULT) * count + _FAULT


def has_lost(statuses: torch.Tensor) -> torch.Tensor:
    """Returns for each status whether rows were lost: they had no room when this rank coded messages, or were missing
    when this rank decoded messages.

    Args:
        statuses: int64 [n, status_entries(count)].

    Returns:
        bool [n].
    """
    count = (statuses.shape[1] - _FAULT) // (_ENTRIES + _FAULT)
    rows, faults, _ = _split(statuses, count)
    return (rows[:, _LOST::_ENTRIES] != 0).any(1) | (faults[:, ::_FAULT] != 0).any(1)


def _split(data: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Returns (`Status.all_rows`, `Status.faults` of all messages, `Status.unused`) as views of `data`, the memory of
    one or more statuses."""
    return data.split([_ENTRIES * count, _FAULT * count, _FAULT], -1)


class Messages:
    """Says where messages lie in a buffer, one after the other.

    Args:
        codec: how messages are coded.
        payloads: for each message, the largest number of a tensor's bytes that the message can carry.
        least: messages with a payload of fewer than this many bytes are raw.
        device: the device of the memory.
    """

    @torch.inference_mode(False)  # Later calls write to the memory.
    def __init__(self, codec: Codec, payloads: Sequence[int], least: int, device: torch.device) -> None:
        self.codec, self.payloads, self.device = codec, tuple(payloads), device
        self.is_coded = [payload >= max(1, least) for payload in self.payloads]
        self._sizes = [
            codec.message_bytes(rows_of(payload)) if is_coded else rounded_up(payload, forms.ALIGNMENT)
            for payload, is_coded in zip(self.payloads, self.is_coded)
        ]
        *starts, self.num_bytes = itertools.accumulate(self._sizes, initial=0)
        self._coded = [k for k, is_coded in enumerate(self.is_coded) if is_coded]
        # Indices of the fingerprints in the memory as int64.
        self._notes = [starts[k] // 8 + forms.NOTE for k in self._coded]
        self._starts = {payload: self._empty_start(payload) for payload in {self.payloads[k] for k in self._coded}}
        self._unused_statuses: list[Status] = []

    def of(self, buffer: MessageBuffer) -> MessageViews:
        """Returns views of the messages in a buffer."""
        views = buffer.views.get(self)
        if views is None:
            with torch.inference_mode(False):  # Later calls write to the views.
                whole = buffer.memory[: self.num_bytes]
                views = buffer.views[self] = MessageViews(whole, whole.split(self._sizes), {})
        return views

    def status(self) -> Status:
        """Returns a status that no other call uses. Pass it to `give_back` after the call."""
        if self._unused_statuses:
            return self._unused_statuses.pop()
        return Status(len(self.payloads), self.device, self.codec.fingerprint)

    def give_back(self, status: Status) -> None:
        """Takes back a status, so that another call can use the status."""
        self._unused_statuses.append(status)

    def code(self, buffer: MessageBuffer, k: int, data: torch.Tensor, status: Status, max_sms: int) -> None:
        """Codes bytes of a tensor, uint8 [n], into message k. If the message is raw, copies the bytes into it.

        Args:
            max_sms: the largest number of multiprocessors to use. 0: all.
        """
        if not self.is_coded[k]:
            self.of(buffer).each[k][: data.numel()].copy_(data)
            return
        start, handle = self._coded_in(buffer, k)
        if buffer.clean is not start:
            start.copy_(self._starts[self.payloads[k]])
        buffer.clean = None
        handle.encode(data, status.counts[k], status.unused, max_sms=max_sms)

    def clean(self, buffer: MessageBuffer, k: int) -> None:
        """Resets message k after it was sent, so that the next call can code rows into it at once."""
        if self.is_coded[k]:
            buffer.clean, _ = self._coded_in(buffer, k)
            buffer.clean.copy_(self._starts[self.payloads[k]])

    def decode(self, buffer: MessageBuffer, k: int, data: torch.Tensor, status: Status, max_sms: int) -> None:
        """Decodes message k to `data`, uint8 [n]. If the message is raw, copies its bytes. max_sms: as for `code`."""
        if not self.is_coded[k]:
            data.copy_(self.of(buffer).each[k][: data.numel()])
            return
        _, handle = self._coded_in(buffer, k)
        torch.ops.ibp.decode_bytes.default(handle.table, 0, data.numel(), max_sms, data, status.faults[k])

    def note_heads(self, buffer: MessageBuffer, status: Status) -> None:
        """Copies the fingerprints in the heads of the coded messages to a status."""
        status.heads[self._coded] = self.of(buffer).whole.view(torch.int64)[self._notes]

    def _coded_in(self, buffer: MessageBuffer, k: int) -> tuple[torch.Tensor, Handle]:
        """Returns (the first bytes of coded message k in a buffer, a handle of the message's rows)."""
        views, payload = self.of(buffer), self.payloads[k]
        if k not in views.coded:
            with torch.inference_mode(False):  # Later calls write to the views.
                start = views.each[k][: self._start_bytes(payload)]
                views.coded[k] = start, self._rows_in(views.each[k], payload).handle
        return views.coded[k]

    def _empty_start(self, payload: int) -> torch.Tensor:
        """Returns the content to which a message's first bytes are reset before rows are coded."""
        size = self.codec.message_bytes(rows_of(payload))
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._rows_in(memory, payload).clear()
        forms.head_of(memory[: forms.HEAD_BYTES].view(torch.int64)).note.fill_(self.codec.fingerprint)
        return memory[: self._start_bytes(payload)].clone()

    def _rows_in(self, memory: torch.Tensor, payload: int) -> CodedRows:
        num_rows = rows_of(payload)
        return CodedRows.over(memory, self.codec.codebook, num_rows, **self.codec.sizes(num_rows))

    def _start_bytes(self, payload: int) -> int:
        """Returns the number of bytes at the start of a message that have to be reset before rows are coded. They hold
        the head, the bases and the rooms (`_rows/forms.py`). The lengths of rows, which follow them, need no reset,
        because coding writes all lengths."""
        num_rows = rows_of(payload)
        return forms.fixed(num_rows, ROW_BYTES, **self.codec.sizes(num_rows)).lengths.start


# ---- spans ---------------------------------------------------------------------------------------------------------

# A span is the range of a tensor's bytes that one piece of a call carries. If a tensor has three or more spans, the
# first and the last span each have 1 / _EDGE of the size of each other span.
_EDGE = 8
# If a tensor has two spans, the first has 1 / _FIRST_OF_TWO of the rows. The first span is the smaller one, because the
# link is idle while this span is coded. The link is also idle while the last span is decoded, but decoding is faster
# than coding.
_FIRST_OF_TWO = 4


@functools.lru_cache(maxsize=256)
def spans_of(num_bytes: int, count: int) -> tuple[range, ...]:
    """Divides a tensor of num_bytes bytes into at most `count` spans of whole rows. The length of a span is the number
    of bytes for which its message has room; the tensor can end inside the last span.

    If there are three or more spans, the first and the last each have an eighth of the size of each other span. If
    there are two spans, the first has a quarter of the tensor. These spans are small because nothing travels while the
    first span is coded and while the last one is decoded.
    """
    rows, inner = rows_of(num_bytes), max(1, count - 2)
    if count > 2:
        step = max(1, -(-rows * _EDGE // (inner * _EDGE + 2)))
        edge = -(-step // _EDGE)
        sizes = [edge, *[step] * inner, edge]
    elif count == 2:
        first = max(1, rows // _FIRST_OF_TWO)
        sizes = [first, max(1, rows - first)]
    else:
        sizes = [max(1, rows)]
    starts = itertools.accumulate((size * ROW_BYTES for size in sizes), initial=0)
    return tuple(range(start, end) for start, end in itertools.pairwise(starts) if start < num_bytes)


def shares_of(count: int) -> tuple[float, float]:
    """Returns (the fraction of a large tensor's bytes in its first span, the fraction in its last span) if `spans_of`
    divides the tensor into `count` spans. count: at least 2."""
    if count == 2:
        return 1 / _FIRST_OF_TWO, 1 - 1 / _FIRST_OF_TWO
    return (1 / ((count - 2) * _EDGE + 2),) * 2
