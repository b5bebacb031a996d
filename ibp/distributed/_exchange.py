"""The steps of a collective call whose tensors travel coded.

A `Collective` is one call. Its `Kind` is the key of a `Plan`, which says how calls of that kind are made; the
`GroupState` of the process group keeps the plans. The tensors of a coded call are divided into pieces, and an
`ExchangePiece` has the layout of a piece's messages (`Messages`). `CodedWork` makes the call: it codes each piece into
a `MessageBuffer`, and counts lost rows in a `Status`. While one piece travels, the next piece is coded and the previous
piece is decoded. Each call takes these steps:

    step      where                    the host waits for                   who learns what
    --------  -----------------------  -----------------------------------  ------------------------------------------
    plan      Collective.plan          all ranks: always on the CPU; on     rank 0 learns a codec from samples of all
                                       GPUs if a codec is given, or if the  ranks that send, and sends it to all ranks
                                       kind is new or due to be checked
              _Transfer.call           the previous call in this direction  the sender learns a codec, and the receiver
              (_calls.py)                                                   reads it in a note after a raw tensor
    size      Collective.pieces,       nothing                              nobody: sizes of messages follow from the
              Messages                                                      codec and the sizes of tensors
    encode    CodedWork._start         nothing                              the sender: which messages lose rows
    tell      Collective.tell,         nothing                              receivers: which messages lose rows, and
              only on GPUs                                                  which codecs code them
    exchange  Collective.move          nothing                              nobody
    decode    CodedWork._finish        on the CPU: messages                 the receiver: from which messages rows are
                                                                            missing; on the CPU also the codecs
    check     CodedWork._arrive        on a GPU: what the ranks tell each   the host: what its device has learned
                                       other once they have coded all rows
    repair    Collective.repair        torch's own call, if rows were lost  all ranks, at the next check of the kind by
                                                                            Collective.plan: they learn a codec anew
              that of all-to-alls,     the sender or the receiver of the    the same
              gathers and scatters     part whose rows were lost
              (_calls.py)

Encode, exchange and decode happen once for each piece, and the other steps once in each call. Tell comes just before
the exchange of the last piece. The steps of each function differ in what a rank codes, and in which ranks wait for each
other during tell on GPUs, and during exchange:

    function                  a rank codes                           a rank waits for
    ------------------------  -------------------------------------  -----------------------------------------------
    all_gather_into_tensor    its tensor                             all ranks
    all_to_all_single         its part for each rank                 the ranks that it sends to or receives from
    broadcast                 the source: its tensor                 the ranks that torch's broadcast waits for
    gather                    all but the destination: their tensor  the destination; the destination for all ranks
    scatter                   the source: a tensor for each rank     the source; the source for all ranks
    send, recv                the sender: its tensor                 the other rank

If the caller passes a status (_fsdp.py does), the call leaves out tell, check and repair. If a rank finds a message
damaged while a repair is due, it takes part in the repair before it raises, because the other ranks do not know of the
damage and would wait for this rank.
"""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._common.process import warn_once
from .._common.wire import RankGroup, all_taking_part, same_on_all
from ._links import RAW, CallOptions, Load, Plan, rates_of, raw_all_gather, state_of
from ._messages import TURNS, Codec, MessageBuffer, Messages, Status, as_bytes, on, sample_of, spans_of

if TYPE_CHECKING:
    from torch.distributed import Work
else:
    Work = getattr(dist, "Work", object)  # Torch can be built without torch.distributed.

# On GPUs, tensors of these dtypes are given to the backend unchanged. All other tensors are moved as bytes.
_PLAIN = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8))
_LEAST_BYTES = 1 << 20  # With level="auto", smaller tensors travel raw, because coding them never pays.
# A codec is learned from about _SAMPLED_ROWS rows of all tensors together, at least _LEAST_SAMPLED_ROWS from each one.
_SAMPLED_ROWS, _LEAST_SAMPLED_ROWS = 512, 16
_MOST_PLANS = 4096  # A group keeps at most this many plans.
_NO_TIMEOUT = timedelta(0)  # Torch passes this value to `wait` if the caller gives no timeout.
SENT_TWICE = (
    "a message had no room for all rows, and the tensor is sent again, raw: it differs from the tensors that its codec "
    "was learned from. ibp learns its own codecs anew after some such calls"
)


@dataclass(frozen=True)
class ExchangePiece:
    """A piece of a call.

    Attributes:
        messages: the messages of the piece.
        sent: for each message that this rank sends, by its number: the bytes of a tensor to code, uint8 [n].
        received: for each message that comes from another rank, by its number: the memory of the decoded bytes,
            uint8 [n].
    """

    messages: Messages
    sent: Mapping[int, torch.Tensor]
    received: Mapping[int, torch.Tensor]


class Collective(ABC):
    """One call of a collective function, whose tensors travel raw or coded. Each function has a subclass, which says
    how the function moves bytes. The method `call` makes the call.

    Args:
        group: a process group of torch.distributed. None: the default group.
        options: how tensors are coded.
        what: the name of the function.
        tensors: the tensors that the call reads and writes. The size and dtype of the first tensor are part of the
            call's kind.
        root: the rank in the group that alone sends tensors, or alone receives them. -1: there is no such rank.

    Attributes:
        load: the numbers of bytes that a rank codes, moves and decodes. Subclasses set this attribute.
        own: (destination, source) of the bytes that this rank sends to itself. They are copied while messages travel.
            None: there are no such bytes. `coded` or `pieces` sets this attribute.

    Raises:
        TypeError, ValueError: an argument is not a tensor, or the options are wrong.
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
        """Raises ValueError unless all tensors are contiguous, and have the same dtype and the same device."""
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
        """Makes torch's own call. Returns work if async_op is set."""

    @abstractmethod
    def pieces(self, plan: Plan) -> list[ExchangePiece]:
        """Returns the pieces of a coded call in order: at least one, all with the same number of messages."""

    @abstractmethod
    def move(self, whole: torch.Tensor, each: Sequence[torch.Tensor]) -> Work | None:
        """Begins to send the messages of this rank, and to receive the messages of other ranks. Returns work to wait
        for, or None if there is nothing to wait for.

        Args:
            whole: the memory of all messages, one after the other.
            each: the memory of each message, as views of `whole`.
        """

    def tell(self, status: Status) -> Work | None:
        """Begins to send the rows of a status (`Status.rows`) that this rank has written, and to receive the rows of
        other ranks. The rows move in the same way as messages."""
        return self.move(status.all_rows, status.rows)

    def repair(self, status: Status) -> None:
        """Sends the tensors again, raw, because rows were lost. Every rank that has to take part sees in its own status
        that rows were lost."""
        self.raw(False)

    def sample(self) -> torch.Tensor | None:
        """Returns rows from which a codec is learned, uint8 [n, 4096] on the CPU: a share of the rows that this rank
        sends. Returns None if this rank sends no tensor."""
        return self.rows_from(self.tensors[0])

    def rows_from(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a sample of the rows of a tensor, in a call in which as many tensors travel as the group has
        ranks."""
        return sample_of(x, max(_LEAST_SAMPLED_ROWS, _SAMPLED_ROWS // self.state.size))

    def travels_raw(self) -> bool:
        """Returns whether the call has to be raw for a reason that every rank can see without asking the other ranks.
        There are three such reasons: the group has one rank, the tensor is too small for coding to pay, or a CUDA graph
        is being captured."""
        num_bytes, x = min(self.load.coded, self.load.decoded), self.tensors[0]
        is_chosen = self.options.level == "auto" and self.options.codec is None
        if self.state.size == 1 or (is_chosen and num_bytes < _LEAST_BYTES):
            return True
        return x.is_cuda and torch.cuda.is_current_stream_capturing()

    def call(self, async_op: bool) -> Work | None:
        """Makes the call, raw or coded as the plan of its kind says.

        Returns:
            Work if async_op is set, or if the call is coded and `load.is_known_to_fit` is set, because the host does
            not wait for such a call. Otherwise None, once the call is done.
        """
        if self.state.plans.get(self.kind) is RAW or self.travels_raw():
            return self.raw(async_op)
        plan = self.plan()
        if plan.codec is None:
            return self.raw(async_op)
        return self.coded(plan, async_op or self.load.is_known_to_fit)

    def coded(self, plan: Plan, is_async: bool, status: Status | None = None) -> Work | None:
        """Makes a coded call. The arguments are those of `CodedWork`. Returns work if is_async is set. Otherwise waits
        until the call is done and returns None."""
        return finished(self.begun(plan, is_async, status), is_async)

    def begun(self, plan: Plan, is_async: bool, status: Status | None = None) -> CodedWork:
        """Begins a coded call. The arguments are those of `CodedWork`. Returns its work."""
        with torch.no_grad():
            return CodedWork(self, plan, is_async, status)

    def plan(self) -> Plan:
        """Returns the plan of the call's kind. If the kind is new, or its codec has lost rows, makes the plan first.

        All ranks must call this together. The ranks communicate here if the tensors are on the CPU, if a codec is given
        (ranks could give different codecs), if the kind is new or due to be checked, or if torch's debug level is
        DETAIL."""
        state, kind = self.state, self.kind
        known, is_detailed = state.plans.get(kind), dist.get_debug_level() == dist.DebugLevel.DETAIL
        if known is None or kind.device == "cpu" or kind.codec is not None or is_detailed:
            self._compare()
        else:
            self.check()
        num_calls = 1
        if known is not None:
            if known.codec is None or not known.is_due():
                return known
            if not any(RankGroup(self.group).together(kind.what, lambda: known.has_lost)):
                return known
            state.forget(kind)
            num_calls = known.num_calls
        # All ranks have the same number of plans, so they all clear them in the same call.
        if len(state.plans) >= _MOST_PLANS:
            state.plans.clear()
        state.plans[kind] = plan = self._agreed(num_calls)
        return plan

    def _compare(self) -> None:
        """Raises an error on all ranks unless all of them make the same call with the same plan. A collective call.
        Without this check, gloo would terminate a process that receives more bytes than it expects, and NCCL would wait
        for bytes that never arrive."""
        members, kind = RankGroup(self.group), self.kind
        try:
            self.check()
            plan = self.state.plans.get(kind)
            how = None if plan is None else (plan.codec and plan.codec.fingerprint, plan.num_pieces, plan.num_calls)
            digest = hashlib.blake2b(repr((kind, how)).encode(), digest_size=8).digest()
            mine = max(1, int.from_bytes(digest, "little") >> 1)
        except (TypeError, ValueError):
            mine = 0
        numbers = torch.empty(members.size, dtype=torch.int64, device=members.device)
        with all_taking_part():
            sent = torch.tensor([mine], dtype=torch.int64, device=members.device)
            raw_all_gather(numbers, sent, group=members.process_group)
        if mine and numbers.tolist() == [mine] * members.size:
            return

        def offer() -> dict[str, Any]:
            self.check()
            return kind._asdict()

        same_on_all(kind.what, members.together(kind.what, offer))
        raise RuntimeError(f"{kind.what}: the ranks have not made the same calls before this one")

    def _agreed(self, num_calls: int) -> Plan:
        """Makes a plan that is the same on all ranks: rank 0 learns a codec from samples of all ranks and decides
        whether coding pays. A collective call.

        Args:
            num_calls: the number of calls of the kind so far, this one included.
        """
        members, kind, load, codec = RankGroup(self.group), self.kind, self.load, self.options.codec
        link = self.state.measure(members) if kind.level == "auto" and codec is None else None
        samples = members.together(kind.what, self.sample)
        rows = torch.cat([sample for sample in samples if sample is not None])
        learner = self.state.learners[kind.shared]
        is_due = len(rows) > 0 and (learner.learned_at == 0 or learner.has_drifted)

        def offer() -> tuple[Codec | None, int, int]:
            """Returns (the codec, or None if calls are raw; the number of pieces, or 0 if calls are raw; the size in
            bytes below which a message is raw)."""
            found = codec
            if codec is None and not learner.is_hopeless:
                found = kind.learned(rows) if is_due or kind.level == "auto" else learner.found
            if found is None or load.coded == 0:
                return None, 0, 1
            rates = rates_of(found, rows, self.tensors[0].device)
            if link is None:
                return found, rates.num_pieces(load), 1
            if not (kind.follows_link and rates.pays(link, load)):
                return found, 0, 1
            return found, rates.num_pieces(load), rates.least_bytes(link, _LEAST_BYTES, members.size - 1)

        found, num_pieces, least = members.from_rank(0, kind.what, offer)
        if is_due:
            learner.take(found)
        if num_pieces == 0:
            # If the plan is the object RAW, `call` does not call `plan`, so the ranks do not compare their calls. On
            # the CPU the ranks compare every call, so the plan of raw calls is a different object there.
            return RAW if kind.device != "cpu" else Plan(None)
        return Plan(found, num_pieces, least, is_checked=codec is None, num_calls=num_calls)


class OneTensor(Collective):
    """A call in which one rank sends a tensor that one or more other ranks receive. Each piece has one message.

    Attributes:
        is_sent: whether this rank is the sender. Subclasses set it.
    """

    is_sent: bool

    def __init__(
        self, what: str, tensor: torch.Tensor, group: dist.ProcessGroup | None, options: CallOptions, root: int = -1
    ) -> None:
        super().__init__(group, options, what, (tensor,), root)
        self.load = Load(tensor.nbytes, tensor.nbytes, tensor.nbytes)

    def sample(self) -> torch.Tensor | None:
        return sample_of(self.tensors[0], _SAMPLED_ROWS) if self.is_sent else None

    def pieces(self, plan: Plan) -> list[ExchangePiece]:
        x, pieces = as_bytes(self.tensors[0]), []
        for span in spans_of(x.numel(), plan.num_pieces):
            messages, data = plan.messages_of([len(span)], x.device), {0: x[span.start : span.stop]}
            pieces.append(ExchangePiece(messages, data, {}) if self.is_sent else ExchangePiece(messages, {}, data))
        return pieces


class CodedWork(Work):
    """A coded call that is under way.

    On a GPU, `wait()` blocks the host until it knows whether all rows had room in their messages; torch's own calls do
    not block the host. If rows had no room, `wait()` makes the call again, raw. All ranks must therefore wait for their
    calls in the order in which they made them. As in torch, `wait()` makes the current stream wait for the result. On
    the CPU the result is complete when `wait()` returns.
    """

    def __init__(self, call: Collective, plan: Plan, is_async: bool, status: Status | None = None) -> None:
        """Starts the call.

        Args:
            is_async: whether the caller waits later. If so, a call on a GPU uses a stream other than the current
                stream, and the constructor of a call on the CPU does not wait for messages.
            status: a status to write, if the caller knows that all rows have room. The caller reads it later, and
                `wait()` does not block the host. None: the call makes a status, and `wait()` reads it.
        """
        super().__init__()
        self._call: Collective | None = None  # None: there is nothing to wait for.
        self._error: Exception | None = None
        self._plan, self._pieces = plan, call.pieces(plan)
        self._buffers = buffers = call.state.buffers(call.tensors[0].device)
        # (number of the piece, its buffer, work to wait for or None) for each piece that is travelling, the oldest
        # first.
        self._pending = deque[tuple[int, MessageBuffer, Work | None]]()
        self._is_known, self._is_repaired = status is not None, False
        self._status = self._pieces[0].messages.status() if status is None else status
        self._stream = buffers.side if is_async else None
        self._done = None if self._stream is None else torch.cuda.Event()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(buffers.device))
        try:
            with on(self._stream):
                self._queue(call, buffers.on_gpu or not is_async)
        except BaseException:
            buffers.forget()
            self._keep_memory(call)
            raise
        self._call = call

    def _queue(self, call: Collective, waits: bool) -> None:
        """Codes the pieces, moves them and decodes them. On a GPU all of this is queued when the method returns. On the
        CPU, `_finish_all` has to wait for the last pieces and decode them.

        Args:
            waits: whether to wait for a piece once the next piece is coded. If not, `_finish_all` does all the
                decoding. On a GPU only streams wait, not the host.
        """
        self._buffers.begin()
        for piece in range(len(self._pieces)):
            self._start(call, piece)
            if len(self._pending) == TURNS and waits:
                self._finish()
        if call.own is not None and call.own[0].data_ptr() != call.own[1].data_ptr():
            call.own[0].copy_(call.own[1])
        if self._buffers.on_gpu:
            self._finish_all()
        self._buffers.end()

    def _start(self, call: Collective, number: int) -> None:
        """Codes a piece and begins to move it."""
        piece, messages = self._pieces[number], self._pieces[number].messages
        buffer = self._buffers.take(number, messages.num_bytes)
        # While a piece other than the first is coded, the previous piece travels. NCCL needs some multiprocessors to
        # move it.
        max_sms = 0 if number == 0 else self._buffers.coding_sms
        for message, data in piece.sent.items():
            messages.code(buffer, message, data, self._status, max_sms)
        buffer.clean = None
        views = messages.of(buffer)
        tells = self._buffers.on_gpu and not self._is_known and number == len(self._pieces) - 1
        with all_taking_part():
            told = call.tell(self._status) if tells else None
            work = call.move(views.whole, views.each)
            if told is not None:
                told.wait()
        if tells:
            self._status.record()
        self._pending.append((number, buffer, work))

    def _finish(self, until: float | None = None) -> None:
        """Waits for the oldest piece that is still travelling, and decodes it. If the call was interrupted, the caller
        may call this method again.

        Args:
            until: the value of `time.monotonic()` at which to stop waiting. None: there is no timeout.
        """
        number, buffer, work = self._pending[0]
        piece, messages, is_last = self._pieces[number], self._pieces[number].messages, number == len(self._pieces) - 1
        if work is not None:
            # Recorded before the wait, because some kinds of work cannot be waited for twice. An interrupt is raised
            # when the wait has ended.
            self._pending[0] = number, buffer, None
            with all_taking_part():  # To backends a timeout of 0 means that there is no timeout.
                work.wait() if until is None else work.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))
        if number == 0 and not self._buffers.on_gpu:
            messages.note_heads(buffer, self._status)
        for message, data in piece.received.items():
            messages.decode(buffer, message, data, self._status, 0 if is_last else self._buffers.decoding_sms)
        if is_last and self._done is not None:
            self._done.record()
        if self._buffers.on_gpu and piece.sent:
            messages.clean(buffer, next(iter(piece.sent)))
        self._pending.popleft()

    def _finish_all(self, until: float | None = None) -> None:
        while self._pending:
            self._finish(until)

    def is_completed(self) -> bool:
        """Returns whether `wait()` would return without waiting for another rank. Assumes that no rows have to be sent
        again."""
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
        """Waits until messages have arrived, checks them, and repairs the call if rows were lost.

        Args:
            seconds: the timeout. 0: there is no timeout.
        """
        until = time.monotonic() + seconds if seconds else None
        self._finish_all(until)
        if self._done is not None:
            torch.cuda.current_stream(self._buffers.device).wait_event(self._done)
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
            if not self._is_repaired:
                self._is_repaired = True  # Recorded before the wait, as in `_finish`.
                call.repair(status)
        self._pieces[0].messages.give_back(status)
        if status.is_damaged:
            raise RuntimeError(
                "this call or an earlier call has given a wrong tensor: a message was damaged on its way"
            )

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:  # Nobody has waited for the call.
            self._keep_memory(call)

    def _keep_memory(self, call: Collective) -> None:
        """Tells the allocator that the call's stream may still use the call's tensors, so that their memory is not
        reused before the stream is done with it. Must be called if the call may not have ended."""
        if self._stream is not None:
            for tensor in (*call.tensors, self._status.data):
                tensor.record_stream(self._stream)


def finished(work: Work | None, is_async: bool) -> Work | None:
    """Returns the work of a call if is_async is set. Otherwise waits for the work and returns None."""
    if is_async:
        return work
    if work is not None:
        work.wait()
    return None


def movable(x: torch.Tensor, items: bool = False) -> torch.Tensor:
    """Returns a tensor in a form that backends can move. A tensor on a GPU that has a dtype in _PLAIN is returned
    unchanged. So is a tensor whose elements do not lie in one contiguous range of memory. For any other tensor, the
    result is a view of its bytes, because backends may not support its dtype.

    Args:
        items: whether to keep dimension 0, because the split sizes of `all_to_all_single` count its items.
    """
    if (x.is_cuda and x.dtype in _PLAIN) or not _is_memory(x):
        return x
    if not items:
        return as_bytes(x)
    return as_bytes(x).view(x.shape[0] if x.dim() else 1, math.prod(x.shape[1:]) * x.element_size())


def root_of(src: int | None, group_src: int | None, group: dist.ProcessGroup | None, what: str = "src") -> int:
    """Returns the rank in the group that the caller has named by either of two arguments.

    Args:
        src: the rank among all ranks, or None.
        group_src: the rank in the group, or None.
        what: the name of the argument src, for the error.

    Raises:
        ValueError: both arguments are given, or neither.
    """
    if (src is None) == (group_src is None):
        raise ValueError(f"wanted one of {what} and group_{what}")
    if group_src is not None:
        return group_src
    assert src is not None
    return src if group is None else dist.get_group_rank(group, src)


def _is_memory(x: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor lie in one contiguous range of memory, in order."""
    return x.layout == torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _synchronize(event: torch.cuda.Event, until: float | None) -> None:
    """Blocks the host until a CUDA event has completed. Raises RuntimeError if it has not completed when
    `time.monotonic()` reaches `until`. If until is None, there is no timeout."""
    if until is None:
        event.synchronize()
        return
    while not event.query():
        if time.monotonic() > until:
            raise RuntimeError("the call was not done within the timeout that was given")
        time.sleep(1e-4)
