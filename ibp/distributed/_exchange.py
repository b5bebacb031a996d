"""A call whose tensors travel coded, from begin to end.

A tensor is divided into pieces: while one piece travels, the next one is coded and the one before it decoded. A call
takes these steps.

    step      where                    the host waits for                   who learns what
    --------  -----------------------  -----------------------------------  ------------------------------------------
    plan      State.plan               all ranks, if the kind of call is    rank 0 learns a codec from samples of all
                                       new or due to be checked, on the     ranks and tells it to all
                                       CPU, and if a codec is given
    (pairs)   _pairs._Transfer.noted   the call before in this direction    the sender learns a codec; the receiver
                                                                            reads it in a note behind a raw tensor
    size      Collective.pieces,       nothing                              all ranks know the sizes of messages, which
              Messages                                                      follow from the codec and the tensors' sizes
    encode    CodedWork._start         nothing                              the sender: which messages lose rows
    tell      Collective.tell, on      nothing                              receivers: which messages lose rows, and by
              GPUs alone                                                    which codec they are coded
    exchange  Collective.move          nothing                              nobody
    decode    CodedWork._finish        nothing on a GPU; on the CPU, the    the receiver: from which messages rows are
                                       arrival of the messages              missing; on the CPU also the codec
    check     CodedWork._arrive        nothing on the CPU; on a GPU, what   the host
                                       is told before the last exchange:
                                       all senders have coded by then
    repair    Collective.repair        torch's own call, if rows are lost   all ranks, when State.plan next checks a
                                                                            codec: it is then learned anew

A rank learns alone that a message was damaged, so it takes part in a repair before it raises. `ibp.distributed._fsdp`
gives calls a status of its own: then tell, check and repair are left out.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._common.group import all_taking_part
from .._common.once import warn_once
from ._codec import as_bytes
from ._links import Load
from ._messages import Messages, Part, Slot, Status, on, spans_of
from ._planning import LEAST_BYTES, RAW, CallOptions, Plan, state_of

if TYPE_CHECKING:
    from torch.distributed import Work
else:
    Work = getattr(dist, "Work", object)  # torch can be built without torch.distributed

# On GPUs, backends move tensors of these dtypes. All other tensors are moved as bytes.
_PLAIN = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8))
_LAG = 1  # Number of pieces that are coded before the first one is waited for.
_NO_TIMEOUT = timedelta(0)
SENT_TWICE = (
    "a message had no room for all rows, and the tensor is sent again, raw: it differs from the tensors that its codec "
    "was learned from. ibp learns its own codecs anew after some such calls"
)


@dataclass(frozen=True)
class ExchangePiece:
    """A piece of a call.

    Attributes:
        messages: the messages of the piece.
        sent: parts that this rank codes into messages.
        received: parts that arrive in messages.
    """

    messages: Messages
    sent: Sequence[Part]
    received: Sequence[Part]


class Collective(ABC):
    """A call of a function of torch.distributed, which moves tensors raw or coded.

    Args:
        group: of torch.distributed; None: the default group.
        options: how tensors are coded.
        what: the name of the function.
        tensors: the tensors that the call reads and writes, first one that tells the kind.
        root: the rank in the group that has the data. -1: all ranks have some.

    Attributes:
        load: how many bytes a rank codes, moves and decodes.
        own: (to, from): the bytes that this rank sends to itself, which are copied while messages travel. None: there
            are none. A coded call sets it.

    Raises:
        TypeError, ValueError: tensors are no tensors, or options are wrong.
        RuntimeError: torch.distributed is not initialised.
    """

    load: Load
    own: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        options: CallOptions,
        what: str,
        tensors: Sequence[torch.Tensor],
        root: int = -1,
    ) -> None:
        options.check(*tensors)
        self.group, self.options, self.tensors, self.state = group, options, tensors, state_of(group)
        self.kind = options.kind_of(what, tensors[0], root)

    def check(self) -> None:
        """Raises ValueError unless the tensors fit the call: they are contiguous, of one dtype and on one device."""
        first = self.tensors[0]
        for x in self.tensors:
            if not _is_memory(x):
                strides = x.stride() if x.layout == torch.strided else x.layout
                raise ValueError(f"a tensor {list(x.shape)} of strides {strides} is not contiguous memory")
            if (x.dtype, x.device) != (first.dtype, first.device):
                raise ValueError(
                    f"tensors are {x.dtype} on {x.device} and {first.dtype} on {first.device}; wanted one dtype and "
                    "device"
                )

    @abstractmethod
    def raw(self, async_op: bool) -> Work | None:
        """Makes torch's own call."""

    @abstractmethod
    def pieces(self, plan: Plan) -> list[ExchangePiece]:
        """Returns the pieces of a coded call, in order: at least one, and all with equally many messages."""

    @abstractmethod
    def move(self, whole: torch.Tensor, each: Sequence[torch.Tensor]) -> Work | None:
        """Sends the messages of this rank and receives those of other ranks. Returns work, None if there is none.

        Args:
            whole: the memory of all messages, or the rows of a status, one behind the other.
            each: the same for each message.
        """

    def tell(self, status: Status) -> Work | None:
        """Sends the rows of a status that this rank has written, and receives those of other ranks."""
        return self.move(status.all_rows, status.rows)

    def repair(self, status: Status) -> None:
        """Makes the call again, raw, because rows were lost. The ranks that take part know it from their statuses."""
        self.raw(False)

    def travels_raw(self) -> bool:
        """Returns whether the call is raw without asking other ranks: there is nothing to code or too little, or a CUDA
        graph is captured."""
        num_bytes, x = self.load.coded, self.tensors[0]
        is_chosen = self.options.level == "auto" and self.options.codec is None
        if self.state.size == 1 or num_bytes == 0 or (is_chosen and num_bytes < LEAST_BYTES):
            return True
        return x.is_cuda and torch.cuda.is_current_stream_capturing()

    def call(self, async_op: bool) -> Work | None:
        """Makes the call as the plan of its kind says. Returns work if async_op is set, or if the call is coded and
        known to fit; else None once the call is done."""
        if self.state.plans.get(self.kind) is RAW or self.travels_raw():
            return self.raw(async_op)
        plan = self.state.plan(self.group, self.kind, self.tensors[0], self.load, self.options.codec, self.check)
        if plan.codec is None:
            return self.raw(async_op)
        return self.coded(plan, async_op or self.load.is_known_to_fit)

    def coded(self, plan: Plan, is_async: bool, status: Status | None = None) -> Work | None:
        """Makes a coded call. Returns work if is_async is set, else None once the call is done. status: as for
        `CodedWork`."""
        with torch.no_grad():
            work = CodedWork(self, plan, is_async, status)
        return finished(work, is_async)


class OneTensor(Collective):
    """A call in which one rank sends a tensor that others receive. Its pieces have one message each.

    Attributes:
        is_sent: whether this rank is the sender. Subclasses set it.
    """

    is_sent: bool

    def __init__(
        self, what: str, tensor: torch.Tensor, group: dist.ProcessGroup | None, options: CallOptions, root: int = -1
    ) -> None:
        super().__init__(group, options, what, (tensor,), root)
        self.load = Load(tensor.nbytes, tensor.nbytes, tensor.nbytes)

    def pieces(self, plan: Plan) -> list[ExchangePiece]:
        x, pieces = as_bytes(self.tensors[0]), []
        for span in spans_of(x.numel(), plan.num_pieces):
            messages, parts = plan.messages_of([span.payload], x.device), [Part(0, x[span.bytes])]
            sent, received = (parts, []) if self.is_sent else ([], parts)
            pieces.append(ExchangePiece(messages, sent, received))
        return pieces


class CodedWork(Work):
    """A coded call that is under way.

    On a GPU, `wait()` blocks the host until it is known that all rows had room, unlike `wait()` of torch's own calls.
    If some had no room, it makes the call again, so ranks have to wait in the order of their calls. The current stream
    then waits for the result, as in torch. On the CPU the result is there after `wait()`.
    """

    def __init__(self, call: Collective, plan: Plan, is_async: bool, status: Status | None = None) -> None:
        """Starts the call.

        Args:
            is_async: the caller waits later. On a GPU the call then uses a stream of its own, and on the CPU `wait()`
                does all of the waiting.
            status: where lost rows are noted if all rows are known to have room. The host then does not wait for the
                call. None: the call has a status of its own, and `wait()` looks at it.
        """
        super().__init__()
        self._call: Collective | None = None  # None: there is nothing to wait for.
        self._error: Exception | None = None
        self._plan, self._pieces = plan, call.pieces(plan)
        self._slots = slots = call.state.slots(call.tensors[0].device)
        self._pending = deque[tuple[int, Slot, Work | None]]()  # Pieces that travel: number, slot, what to wait for.
        self._is_known = status is not None
        self._status = self._pieces[0].messages.status() if status is None else status
        self._stream = slots.side if is_async else None
        self._done = None if self._stream is None else torch.cuda.Event()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(slots.device))
        try:
            with on(self._stream):
                self._queue(call, slots.on_gpu or not is_async)
        except BaseException:
            slots.forget()
            self._keep_memory(call)
            raise
        self._call = call

    def _queue(self, call: Collective, waits: bool) -> None:
        """Does all steps before the check, or on the CPU those that need no waiting. waits: whether the call may wait
        for messages."""
        self._slots.begin()
        for piece in range(len(self._pieces)):
            self._start(call, piece)
            if len(self._pending) > _LAG and waits:
                self._finish()
        if call.own is not None and call.own[0].data_ptr() != call.own[1].data_ptr():
            call.own[0].copy_(call.own[1])
        if self._slots.on_gpu:
            self._finish_all()
        self._slots.end()

    def _start(self, call: Collective, number: int) -> None:
        """Codes a piece and begins to move it."""
        piece, messages = self._pieces[number], self._pieces[number].messages
        slot = self._slots.take(number, messages.num_bytes)
        # The link needs some multiprocessors to move the piece before this one.
        max_sms = 0 if number == 0 else self._slots.coding_sms
        for part in piece.sent:
            messages.code(slot, part, self._status, max_sms)
        slot.clean = None
        memory = messages.of(slot)
        tells = self._slots.on_gpu and not self._is_known and number == len(self._pieces) - 1
        with all_taking_part():
            told = call.tell(self._status) if tells else None
            work = call.move(memory.whole, memory.each)
            if told is not None:
                told.wait()
        if tells:
            self._status.record()
        self._pending.append((number, slot, work))

    def _finish(self, until: float | None = None) -> None:
        """Waits for the oldest piece that travels, and decodes it. If it was interrupted, it may be called again.

        Args:
            until: the time by `time.monotonic` at which waiting ends.
        """
        number, slot, work = self._pending[0]
        piece, messages, is_last = self._pieces[number], self._pieces[number].messages, number == len(self._pieces) - 1
        if work is not None:
            with all_taking_part():  # Backends take a timeout of 0 for no timeout.
                work.wait() if until is None else work.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))
        if number == 0 and not self._slots.on_gpu:
            messages.note_heads(slot, self._status)
        for part in piece.received:
            messages.decode(slot, part, self._status, 0 if is_last else self._slots.decoding_sms)
        if is_last and self._done is not None:
            self._done.record()
        if self._slots.on_gpu and piece.sent:
            messages.clean(slot, piece.sent[0].message)
        self._pending.popleft()

    def _finish_all(self, until: float | None = None) -> None:
        while self._pending:
            self._finish(until)

    def is_completed(self) -> bool:
        """Returns whether `wait()` would not wait for another rank, unless rows have to be sent again."""
        if self._done is not None:
            return self._call is None or self._done.query()
        return all(work is None or work.is_completed() for _, _, work in self._pending)

    def is_success(self) -> bool:
        return self._call is None and self._error is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits for the result. Returns True.

        Raises:
            RuntimeError: ranks use different codecs, a rank does not take part, a message was damaged, or the timeout
                has passed.
        """
        if self._call is not None:
            try:
                self._arrive(self._call, timeout.total_seconds())
            except Exception as error:
                self._error = error
                self._keep_memory(self._call)
            self._call, self._pieces = None, []
        if self._error is not None:
            raise self._error
        return True

    def _arrive(self, call: Collective, seconds: float) -> None:
        """Waits for the messages and checks them. Repairs the call if rows were lost. seconds: the timeout; 0: none."""
        until = time.monotonic() + seconds if seconds else None
        self._finish_all(until)
        if self._done is not None:
            torch.cuda.current_stream(self._slots.device).wait_event(self._done)
        if self._is_known:
            return
        status = self._status
        if status.seen is not None:
            _synchronize(status.seen, until)
        status.read()
        if status.is_strange:
            raise RuntimeError("ranks use different codecs: a message was coded with another one than is decoded with")
        if any(status.lost):
            warn_once(SENT_TWICE, stacklevel=3)
            self._plan.has_lost = True
            call.repair(status)
        self._pieces[0].messages.give_back(status)
        if status.is_damaged:
            raise RuntimeError(
                "this call or an earlier call has given a wrong tensor: a message was damaged on its way"
            )

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:  # Nobody has waited for it.
            self._keep_memory(call)

    def _keep_memory(self, call: Collective) -> None:
        """Lets the allocator keep the tensors of a call that may not have ended until the GPU is done with them."""
        if self._stream is not None:
            for tensor in (*call.tensors, self._status.data):
                tensor.record_stream(self._stream)


def finished(work: Work | None, is_async: bool) -> Work | None:
    """Returns what a call returns: its work if is_async is set, else None once the work is done."""
    if is_async:
        return work
    if work is not None:
        work.wait()
    return None


def movable(x: torch.Tensor, items: bool = False) -> torch.Tensor:
    """Returns a tensor in the form in which backends move it: its bytes, unless backends move its dtype.

    Args:
        items: keep dimension 0, whose items `all_to_all_single` counts.
    """
    if (x.is_cuda and x.dtype in _PLAIN) or not _is_memory(x):
        return x
    if not items:
        return as_bytes(x)
    return as_bytes(x).view(x.shape[0] if x.dim() else 1, math.prod(x.shape[1:]) * x.element_size())


def _is_memory(x: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor are one range of memory, in order."""
    return x.layout == torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _synchronize(event: torch.cuda.Event, until: float | None) -> None:
    """Blocks the host until an event has happened. Raises RuntimeError at the time `until` by `time.monotonic`."""
    if until is None:
        event.synchronize()
        return
    while not event.query():
        if time.monotonic() > until:
            raise RuntimeError("the call was not done within the timeout that was given")
        time.sleep(1e-4)
