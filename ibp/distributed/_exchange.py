"""One collective call whose tensors travel coded, in pieces: while one is on its way, the next is coded and the one
before it decoded.

Nothing waits for the host until the call is finished: then it looks at the status, which says whether a message had no
room for all rows. Such a call is repeated raw. On a GPU ranks tell each other as soon as the last piece is coded,
before it is moved: the host knows what has room while tensors are still on their way, and can queue what follows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._common.group import all_taking_part
from .._common.once import warn_once
from ._messages import Memory, Messages, Part, Status
from ._slots import MessageSlots, Slot, on

if TYPE_CHECKING:
    from torch.distributed import Work
else:
    Work = getattr(dist, "Work", object)  # torch can be built without torch.distributed

_LAG = 1  # pieces that are coded before the first one is waited for
_NO_TIMEOUT = timedelta(0)
SENT_TWICE = (
    "a message had no room for all rows, and the tensor is sent again, raw: it differs from the tensors that its codec "
    "was learned from. ibp learns its own codecs anew after some such calls"
)


@dataclass(frozen=True)
class ExchangePiece:
    """What a piece carries, in which messages: parts that are coded here, and parts that arrive here."""

    messages: Messages
    sent: Sequence[Part]
    received: Sequence[Part]


@dataclass(frozen=True)
class Job:
    """A call."""

    pieces: Sequence[ExchangePiece]  # in order, at least one, with as many messages each
    # sends and receives the messages of a piece, in the memory that is given; returns work to wait for, or None
    move: Callable[[Messages, Memory], dist.Work | None]
    # sends the rows of a status that are about messages coded here, and receives the others; likewise
    tell: Callable[[Status], dist.Work | None]
    repair: Callable[[Status], object]  # does the call raw, where rows were lost; is given the status
    note_lost: Callable[[], None]  # is told that there were lost rows
    tensors: Sequence[torch.Tensor]  # that the call reads and writes
    meanwhile: Callable[[], None] | None = None  # is done while messages are on their way
    # given where all rows are known to have room: then the host waits for nothing, and what is lost all the same is
    # noted there. None: the call has one of its own, and looks at it
    status: Status | None = None


class CodedWork(Work):
    """A coded call that is under way.

    On a GPU `wait()` waits on the host, unlike torch's own, until it is known there that all rows had room. If not,
    they are sent again then: so ranks wait in the same order as they call. For the result the current stream waits, as
    for torch's own. On the CPU the result is there after `wait()`.
    """

    def __init__(self, job: Job, slots: MessageSlots, is_async: bool) -> None:
        """Starts the call. is_async: the caller waits later. The current stream has other work meanwhile, and on the
        CPU `wait()` does all of the waiting."""
        super().__init__()
        self._job: Job | None = None
        self._slots, self._pending = slots, deque[tuple[ExchangePiece, Slot, dist.Work | None]]()
        self._error: Exception | None = None
        self._stream = slots.side if is_async else None
        self._is_known, self._status = job.status is not None, job.status or job.pieces[0].messages.status()
        self._done = None if self._stream is None else torch.cuda.Event()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(slots.device))
        self._job = job
        with on(self._stream):
            self._queue(job, slots.on_gpu or not is_async)

    def _queue(self, job: Job, waits: bool) -> None:
        """All that the call does, or on the CPU what it need not wait for."""
        self._slots.begin()
        for piece in job.pieces:
            self._start(job, piece)
            if len(self._pending) > _LAG and waits:
                self._finish_piece(job)
        if job.meanwhile is not None:
            job.meanwhile()
        if self._slots.on_gpu:
            self._finish_pieces(job)
        self._slots.end()

    def _start(self, job: Job, piece: ExchangePiece) -> None:
        """Codes a piece and sends it off."""
        slot = self._slots.take(piece.messages.num_bytes)
        try:
            self._pending.append((piece, slot, self._sent(job, piece, slot)))
        except BaseException:
            self._slots.give_up(slot)
            raise

    def _sent(self, job: Job, piece: ExchangePiece, slot: Slot) -> dist.Work | None:
        """Codes a piece into a slot and sends it off. Returns the work to wait for."""
        messages = piece.messages
        # The link begins with the piece before this one meanwhile, and needs some multiprocessors for that.
        max_sms = 0 if piece is job.pieces[0] else self._slots.coding_sms
        for part in piece.sent:
            messages.code(slot, part, self._status, max_sms)
        slot.clean = None
        tells = self._slots.on_gpu and not self._is_known and piece is job.pieces[-1]
        with all_taking_part():
            told = job.tell(self._status) if tells else None
            work = job.move(messages, messages.of(slot))
            if told is not None:
                told.wait()
        if tells:
            self._status.record()
        return work

    def _finish_piece(self, job: Job, until: float | None = None) -> None:
        """Decodes the oldest piece once it has arrived. until: by the clock, at most. Interrupted, it may be called
        again."""
        piece, slot, work = self._pending[0]
        max_sms = 0 if piece is job.pieces[-1] else self._slots.decoding_sms
        if work is not None:
            with all_taking_part():  # backends take a timeout of 0 for none
                work.wait() if until is None else work.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))
        if piece is job.pieces[0] and not self._slots.on_gpu:
            piece.messages.note_heads(slot, self._status)
        for part in piece.received:
            piece.messages.decode(slot, part, self._status, max_sms)
        if piece is job.pieces[-1] and self._done is not None:
            self._done.record()
        if self._slots.on_gpu and piece.sent:
            piece.messages.clean(slot, piece.sent[0].message)
        self._slots.leave(slot)
        self._pending.popleft()

    def _finish_pieces(self, job: Job, until: float | None = None) -> None:
        while self._pending:
            self._finish_piece(job, until)

    def is_completed(self) -> bool:
        """Whether `wait()` waits for no other rank, unless rows are to be sent again."""
        if self._done is not None:
            return self._job is None or self._done.query()
        return all(work is None or work.is_completed() for _, _, work in self._pending)

    def is_success(self) -> bool:
        return self._job is None and self._error is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the result is there. RuntimeError: ranks use different codecs, one does not take part, or the
        timeout has passed."""
        if self._job is not None:
            try:
                self._arrive(self._job, timeout.total_seconds())
            except Exception as error:
                self._error = error
                self._abandon(self._job)
            self._job = None
        if self._error is not None:
            raise self._error
        return True

    def _arrive(self, job: Job, seconds: float) -> None:
        until = time.monotonic() + seconds if seconds else None
        self._finish_pieces(job, until)
        status, messages = self._status, job.pieces[0].messages
        if self._done is not None:
            torch.cuda.current_stream(self._slots.device).wait_event(self._done)
        if self._is_known:
            return
        if status.seen is not None:
            _synchronize(status.seen, until)
        status.read()
        is_strange, is_lost = status.strange(messages.codec.fingerprint), status.any_lost()
        if is_strange:
            raise RuntimeError("ranks use different codecs: a message was coded with another one than is decoded with")
        if is_lost:
            warn_once(SENT_TWICE, stacklevel=3)
            job.note_lost()
            job.repair(status)
        messages.give_back(status)
        if status.is_damaged:  # known on this rank alone: the others may wait for it in the repair
            raise RuntimeError(
                "this call or an earlier call has given a wrong tensor: a message was damaged on its way"
            )

    def __del__(self) -> None:
        job = getattr(self, "_job", None)
        if job is not None:  # nobody has waited for it
            self._abandon(job)

    def _abandon(self, job: Job) -> None:
        """Of a call that may not have ended, tensors stay until the GPU is done with them, and slots are not used
        again."""
        for _, slot, _ in self._pending:
            self._slots.give_up(slot)
        stream = self._stream
        if stream is not None:
            for tensor in (*job.tensors, self._status.data):
                tensor.record_stream(stream)


def _synchronize(event: torch.cuda.Event, until: float | None) -> None:
    """Waits for the event on the host. until: by the clock, at most."""
    if until is None:
        event.synchronize()
        return
    while not event.query():
        if time.monotonic() > until:
            raise RuntimeError("the call was not done within the timeout that was given")
        time.sleep(1e-4)
