"""One collective call whose tensors travel coded, in pieces: while one is on its way, the next is coded and the one
before it decoded.

Nothing waits for the host until the call is finished: then it looks at the status, which says whether a message had no
room for all rows. Such a call is repeated raw.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .._group import all_taking_part
from .messages import FAULT, LOST, STATUS, STRANGE, Messages, Part
from .staging import Slot, Staging, on

_LAG = 1  # pieces that are coded before the first one is waited for
_NO_TIMEOUT = timedelta(0)
_has_warned = False


@dataclass(frozen=True)
class Piece:
    """What a piece carries: parts that are coded here, and parts that arrive here."""

    sent: Sequence[Part]
    received: Sequence[Part]


@dataclass(frozen=True)
class Job:
    """A call.

    Attributes:
        messages: of each piece.
        pieces: in order.
        move: sends and receives the messages of a piece, in the memory that is given; returns work to wait for, or
            None.
        repair: does the call raw, if this rank or one that it exchanges with has lost rows; is given the status.
        note_lost: is told that there were lost rows.
        tensors: that the call reads and writes.
        max_sms: of the GPU, for coding and decoding; 0: all.
    """

    messages: Messages
    pieces: Sequence[Piece]
    move: Callable[[torch.Tensor], dist.Work | None]
    repair: Callable[[list[list[int]]], None]
    note_lost: Callable[[], None]
    tensors: Sequence[torch.Tensor]
    max_sms: int = 0


class CodedWork(dist.Work):
    """A coded call that is under way.

    The result is there after `wait()`: on a GPU it waits on the host, unlike torch's own, as only there it is known
    whether all rows had room. If not, they are sent again then: so ranks wait in the same order as they call.
    """

    def __init__(self, job: Job, staging: Staging, is_async: bool) -> None:
        """Starts the call. is_async: on the CPU, all that has to be waited for is left to `wait()`."""
        super().__init__()
        self._job: Job | None = None
        self._staging, self._pending = staging, deque[tuple[Piece, Slot, dist.Work | None]]()
        self._error: Exception | None = None
        self._make_status(job)
        if staging.coding is not None and staging.decoding is not None:
            staging.coding.wait_stream(torch.cuda.current_stream(staging.device))
            staging.decoding.wait_stream(staging.coding)
        self._job = job
        for piece in job.pieces:
            self._start(job, piece)
            if len(self._pending) > _LAG and (staging.on_gpu or not is_async):
                self._finish_piece(job)
        if staging.on_gpu:
            self._finish_on_gpu(job)

    def _make_status(self, job: Job) -> None:
        device = self._staging.device
        self._status = torch.zeros(len(job.messages.payloads) + 1, STATUS, dtype=torch.int64, device=device)
        self._unused = self._status[-1, :4]
        self._seen = self._status
        self._done: torch.cuda.Event | None = None

    def _start(self, job: Job, piece: Piece) -> None:
        """Codes a piece and sends it off."""
        slot = self._staging.take(job.messages.num_bytes)
        with on(self._staging.coding), all_taking_part():
            for part in piece.sent:
                job.messages.code(slot, part, self._status, self._unused, job.max_sms)
            self._pending.append((piece, slot, job.move(job.messages.of(slot))))

    def _finish_piece(self, job: Job) -> None:
        """Decodes the oldest piece once it has arrived."""
        piece, slot, work = self._pending.popleft()
        with on(self._staging.decoding), all_taking_part():
            if work is not None:
                work.wait()
            if piece is job.pieces[0]:
                job.messages.note_strange(slot, self._status)
            for part in piece.received:
                job.messages.decode(slot, part, self._status, job.max_sms)
        self._staging.leave(slot)

    def _finish_on_gpu(self, job: Job) -> None:
        """Puts what is left on the streams, and the status behind it."""
        while self._pending:
            self._finish_piece(job)
        with on(self._staging.decoding):
            self._seen = torch.empty(self._status.shape, dtype=torch.int64, pin_memory=True)
            self._seen.copy_(self._status, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def is_completed(self) -> bool:
        """Whether `wait()` waits for no other rank, unless rows are to be sent again."""
        if self._done is not None:
            return self._done.query()
        return all(work is None or work.is_completed() for _, _, work in self._pending)

    def is_success(self) -> bool:
        return self._job is None and self._error is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the result is there.

        Raises:
            RuntimeError: ranks use different codecs, one does not take part, or the timeout has passed.
        """
        if self._job is not None:
            try:
                self._arrive(self._job, timeout.total_seconds())
            except Exception as error:
                self._error = error
            self._job = None
        if self._error is not None:
            raise self._error
        return True

    def _arrive(self, job: Job, seconds: float) -> None:
        while self._pending:
            self._finish_piece(job)
        if self._done is not None:
            _synchronize(self._done, seconds)
            torch.cuda.current_stream(self._staging.device).wait_event(self._done)
        status = self._seen[:-1].tolist()
        strange = [k for k, of in enumerate(status) if of[STRANGE]]
        if strange:
            raise RuntimeError(f"the ranks use different codecs: messages {strange} were coded with another one")
        if any(of[LOST] or of[FAULT] for of in status):
            _warn()
            job.note_lost()
            job.repair(status)

    def __del__(self) -> None:
        """Of a call that nobody has waited for, tensors stay until the GPU is done with them."""
        job, stream = getattr(self, "_job", None), self._staging.decoding
        if job is not None and stream is not None:
            for tensor in (*job.tensors, self._status):
                tensor.record_stream(stream)


def _synchronize(event: torch.cuda.Event, seconds: float) -> None:
    """Waits for the event on the host, so long at most; 0: without a limit."""
    if not seconds:
        event.synchronize()
        return
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > until:
            raise RuntimeError(f"the call was not done within {seconds} s")
        time.sleep(1e-4)


def _warn() -> None:
    """Says, once a process, that rows are sent twice."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        message = (
            "a message had no room for all rows, and the tensor is sent again, raw: it differs from those that its "
            "codec was learned from. Codecs that ibp has learned by itself are learned anew after some such calls"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
