"""The collectives: which messages there are, and what they carry."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ._codec import Codec, as_bytes
from ._exchange import CodedWork, ExchangePiece, Job
from ._links import Load, raw_all_gather
from ._messages import Memory, Messages, Part, Status, spans_of
from ._planning import LEAST_BYTES, RAW, CallOptions, Kind, Plan, State, state_of

_NOMINAL = Load(64 << 20, 64 << 20, 64 << 20)  # of calls whose ranks send each other what they like
_MOST_MESSAGES = 64  # layouts that a plan keeps
_PIECES = 2  # of all_to_all_single on GPUs: the same on all ranks, which do not know the messages of other ranks
_PLAIN = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8))


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """`torch.distributed.all_gather_into_tensor`, with tensors that travel coded where that is faster.

    The bits of the result are torch's. A tensor is divided into pieces: while one piece travels, the next is coded and
    the one before it decoded. If a codec has too little room for a tensor, the tensor is sent again, raw. A CUDA graph
    captures torch's own call.

    The first call of a kind (shape, dtype, level, name) is slower: the ranks compare their arguments and learn a codec
    from samples of their tensors. A group's first call with level="auto" also times a raw all-gather. Some later calls
    check whether the codec still fits.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> whole = torch.empty(2000, 64)
        >>> ibp.distributed.all_gather_into_tensor(whole, torch.full((1000, 64), float(rank)))
        >>> whole[[3, 1003], 0]
        tensor([0., 1.])

    Args:
        output_tensor: contiguous, as many elements as the input tensors of all ranks. The input may be this rank's part
            of it.
        input_tensor: contiguous, of any dtype, on the CPU or a GPU; of one shape and dtype on all ranks.
        group: of torch.distributed; None: the default one.
        async_op: return work at once; its `wait()` gives the result. On a GPU `wait()` blocks the host until all ranks
            have coded their tensors, and lets the current stream wait for the rest; ranks wait in the order in which
            they call.
        codec: how to code, equal on all ranks; None: learned from the tensors of all ranks.
        level: "auto": coded at level "default" if that is faster over a link of the measured rate, else raw; "default",
            "fast": coded at this level (see `ibp.compress`), unless that saves nothing.
        name: calls of one name and dtype share a codec: give another name to tensors of another distribution.

    Returns:
        Work where async_op is set, else None.

    Raises:
        TypeError, ValueError: an argument is not as described, or ranks differ in it: then on all ranks.
        RuntimeError: torch.distributed is not initialised, or a rank does not take part.
    """
    options = CallOptions(codec, level, name)
    return gather(output_tensor, input_tensor, group, async_op, async_op, options)


all_gather_single = all_gather_into_tensor  # what torch 2.13 calls it


def gather(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    async_op: bool,
    is_coded_async: bool,
    options: CallOptions,
    is_known_to_fit: bool = False,
) -> dist.Work | None:
    """The same. async_op: of torch's call; is_coded_async: of a coded one; is_known_to_fit: later calls are, so that
    the host does not wait for them."""
    options.check(output_tensor, input_tensor)
    state, kind = state_of(group), options.kind_of("all_gather_into_tensor", input_tensor)
    raw = functools.partial(raw_all_gather, movable(output_tensor), movable(input_tensor), group=group)

    def check() -> None:
        check_tensors(input_tensor, output_tensor)
        if output_tensor.numel() != state.size * input_tensor.numel():
            raise ValueError(
                f"output_tensor has {output_tensor.numel()} elements; wanted {state.size} times the "
                f"{input_tensor.numel()} of input_tensor"
            )

    def job(plan: Plan) -> Job:
        return gathering(plan, state, group, output_tensor, input_tensor, lambda status: raw())

    moved = (state.size - 1) * input_tensor.nbytes
    load = Load(input_tensor.nbytes, moved, moved, is_known_to_fit)
    return _called(group, kind, options, input_tensor, load, check, raw, job, async_op, is_coded_async)


def _called(
    group: dist.ProcessGroup | None,
    kind: Kind,
    options: CallOptions,
    x: torch.Tensor,
    load: Load,
    check: Callable[[], None],
    raw: Callable[..., dist.Work | None],
    job: Callable[[Plan], Job],
    async_op: bool,
    is_coded_async: bool,
) -> dist.Work | None:
    """Makes a call as the plan of its kind says. raw: torch's own; job: a coded one."""
    state = state_of(group)
    if state.plans.get(kind) is RAW or travels_raw(state, x, x.nbytes, options):
        return raw(async_op=async_op)
    plan = state.plan(group, kind, x, load, options.codec, check)
    if plan.codec is None:
        return raw(async_op=async_op)
    return finished(run(job(plan), state, is_coded_async), is_coded_async)


def gathering(
    plan: Plan,
    state: State,
    group: dist.ProcessGroup | None,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    repair: Callable[[Status], object],
    status: Status | None = None,
) -> Job:
    """An all-gather. repair, status: of the job."""
    x, out, rank, size = as_bytes(input_tensor), as_bytes(output_tensor), state.rank, state.size

    def move(messages: Messages, memory: Memory) -> dist.Work | None:
        return raw_all_gather(memory.whole, memory.each[rank], group=group, async_op=True)

    def tell(status: Status) -> dist.Work | None:
        return raw_all_gather(status.all_rows, status.rows[rank], group=group, async_op=True)

    pieces = []
    spans = spans_of(x.numel(), plan.num_pieces)
    lengths = [span.bytes.stop - span.bytes.start for span in spans]
    sent, received = x.split_with_sizes(lengths), out.split_with_sizes(lengths * size)
    for k, span in enumerate(spans):
        arriving = [Part(other, received[other * len(spans) + k]) for other in range(size) if other != rank]
        messages = messages_of(plan, [span.payload] * size, x.device)
        pieces.append(ExchangePiece(messages, [Part(rank, sent[k])], arriving))
    own = functools.partial(_copy_own, out[rank * len(x) : (rank + 1) * len(x)], x)
    return Job(pieces, move, tell, repair, plan.note_lost, (x, out), own, status)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """`torch.distributed.broadcast`, with a tensor that travels coded where that is faster.

    See `all_gather_into_tensor` for how, for the other arguments and for the errors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()
        >>> weights = torch.full((1000, 64), float(rank))
        >>> ibp.distributed.broadcast(weights, src=1)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: contiguous; sent by the source, written by the others.
        src, group_src: the source's rank among all, or in the group: one of them.
    """
    options = CallOptions(codec, level, name)
    options.check(tensor)
    state, root = state_of(group), root_of(src, group_src, group)
    send = functools.partial(dist.broadcast, group=group, group_src=root)
    raw = functools.partial(send, movable(tensor))

    def job(plan: Plan) -> Job:
        x = as_bytes(tensor)
        return Job(
            pieces_of_one(plan, x, state.rank == root),
            lambda messages, memory: send(memory.whole, async_op=True),
            lambda status: send(status.all_rows, async_op=True),
            lambda status: raw(),
            plan.note_lost,
            (x,),
        )

    kind, load = options.kind_of("broadcast", tensor, root), Load(tensor.nbytes, tensor.nbytes, tensor.nbytes)
    return _called(group, kind, options, tensor, load, lambda: check_tensors(tensor), raw, job, async_op, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """`torch.distributed.all_to_all_single`, with tensors that travel coded where that is faster.

    See `all_gather_into_tensor` for how, for the other arguments and for the errors. Parts travel in one piece. Unless
    a level or codec is given, parts that are too small for coding to pay travel raw.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> output = torch.empty(2000, 64)
        >>> ibp.distributed.all_to_all_single(output, torch.full((2000, 64), float(rank)))
        >>> output[[3, 1003], 0]  # the first half is from rank 0
        tensor([0., 1.])

    Args:
        output, input: contiguous, of one dtype and device.
        output_split_sizes, input_split_sizes: items of dimension 0 from and to each rank; None: equal parts.
    """
    options = CallOptions(codec, level, name)
    options.check(output, input)
    # Ranks that send and receive little can be part of a large call: nothing depends on a rank's own sizes.
    state, kind = state_of(group), options.kind_of("all_to_all_single", input)._replace(numel=0)
    raw = functools.partial(
        dist.all_to_all_single,
        movable(output, items=True),
        movable(input, items=True),
        output_split_sizes,
        input_split_sizes,
        group=group,
        async_op=async_op,
    )
    if state.plans.get(kind) is RAW or travels_raw(state, input, LEAST_BYTES, options):
        return raw()

    def check() -> None:
        check_tensors(input, output)
        for what, x, sizes in (("output", output, output_split_sizes), ("input", input, input_split_sizes)):
            _check_splits(what, x, sizes, state.size)

    plan = state.plan(group, kind, input, _NOMINAL, codec, check)
    if plan.codec is None:
        return raw()
    sent = _parts(input, input_split_sizes, state.size)
    received = _parts(output, output_split_sizes, state.size)
    exchange = _Splits(state, plan, group, sent, received)
    if exchange.on_gpu and not any(exchange.is_coded):
        return exchange.move_raw(output, input, async_op)
    own = functools.partial(_copy_own, received[state.rank], sent[state.rank])
    job = Job(exchange.pieces(), exchange.move, exchange.tell, exchange.repair, plan.note_lost, (*sent, *received), own)
    return finished(run(job, state, async_op), async_op)


class _Splits:
    """What ranks send each other in all_to_all_single: bytes by rank, none of them to themselves. Messages to ranks
    come first, then those from them. Both ranks of a message know its size, and so whether it is coded. On a GPU raw
    ones are moved from where they are, beside the first piece of the coded ones.

    is_coded: of messages to and from each rank."""

    def __init__(
        self,
        state: State,
        plan: Plan,
        group: dist.ProcessGroup | None,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> None:
        self.state, self.plan, self.group, self.sent, self.received = state, plan, group, sent, received
        self.on_gpu = state.slots(sent[0].device).on_gpu
        own, parts = (state.rank, state.size + state.rank), (*sent, *received)
        self.parts = [data[:0] if k in own else data for k, data in enumerate(parts)]
        self.is_coded = [data.numel() >= max(1, plan.least) for data in self.parts]
        self._raw = [data[:0] if coded else data for data, coded in zip(self.parts, self.is_coded)]  # yet to be moved

    def pieces(self) -> list[ExchangePiece]:
        if not self.on_gpu:  # one, which raw messages are in, too
            payloads = [data.numel() for data in self.parts]
            messages = messages_of(self.plan, payloads, self.sent[0].device, self.plan.least)
            return [self._piece(messages, self.parts)]
        spans = [spans_of(data.numel(), _PIECES) if coded else () for data, coded in zip(self.parts, self.is_coded)]
        pieces = []
        for k in range(_PIECES):
            payloads = [of[k].payload if k < len(of) else 0 for of in spans]
            parts = [data[of[k].bytes] if k < len(of) else data[:0] for data, of in zip(self.parts, spans)]
            pieces.append(self._piece(messages_of(self.plan, payloads, self.sent[0].device), parts))
        return pieces

    def _piece(self, messages: Messages, parts: Sequence[torch.Tensor]) -> ExchangePiece:
        size, found = self.state.size, [Part(k, data) for k, data in enumerate(parts) if data.numel()]
        to, back = ([part for part in found if (part.message < size) == is_out] for is_out in (True, False))
        return ExchangePiece(messages, to, back)

    def move(self, messages: Messages, memory: Memory) -> dist.Work | None:
        size = self.state.size
        if self.on_gpu:
            parts = [of if coded else raw for of, coded, raw in zip(memory.each, messages.is_coded, self._raw)]
            self._raw = [data[:0] for data in self._raw]
            return dist.all_to_all(parts[size:], parts[:size], group=self.group, async_op=True)
        to, back = messages.sizes[:size], messages.sizes[size:]
        ours, theirs = memory.whole.split([sum(to), sum(back)])
        return dist.all_to_all_single(theirs, ours, back, to, group=self.group, async_op=True)

    def tell(self, status: Status) -> dist.Work | None:
        """Of coded messages: the ranks of others may have none, and tell nothing."""
        size = self.state.size
        rows = [row if coded else row[:0] for row, coded in zip(status.rows, self.is_coded)]
        return dist.all_to_all(rows[size:], rows[:size], group=self.group, async_op=True)

    def move_raw(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> dist.Work | None:
        """Where this rank has no coded message: others may have some, to each other. The bytes to itself go too."""
        to, back = ([data.numel() for data in of] for of in (self.sent, self.received))
        return dist.all_to_all_single(as_bytes(output), as_bytes(input), back, to, group=self.group, async_op=async_op)

    def repair(self, status: Status) -> None:
        """Sends what was lost again: only the two ranks know of it."""
        size, ops = self.state.size, []
        for k in range(size):
            if status.is_lost(k):
                ops.append(dist.P2POp(dist.isend, self.sent[k], group=self.group, group_peer=k))
            if status.is_lost(size + k):
                ops.append(dist.P2POp(dist.irecv, self.received[k], group=self.group, group_peer=k))
        for work in dist.batch_isend_irecv(ops):
            work.wait()


# ---- what they share -----------------------------------------------------------------------------------------------


def travels_raw(state: State, x: torch.Tensor, num_bytes: int, options: CallOptions) -> bool:
    """Whether nothing needs to be agreed on: there is nothing to code, or too little; CUDA graphs are captured."""
    is_chosen = options.level == "auto" and options.codec is None
    if state.size == 1 or num_bytes == 0 or (is_chosen and num_bytes < LEAST_BYTES):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_tensors(*tensors: torch.Tensor) -> None:
    """Raises ValueError unless they are contiguous, and alike in dtype and device."""
    first = tensors[0]
    for tensor in tensors:
        if not _is_memory(tensor):
            strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
            raise ValueError(f"a tensor {list(tensor.shape)} of strides {strides} is not contiguous memory")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"tensors are {tensor.dtype} on {tensor.device} and {first.dtype} on {first.device}; wanted one dtype "
                "and device"
            )


def movable(x: torch.Tensor, items: bool = False) -> torch.Tensor:
    """x as bytes, where that is the same memory: backends do not move all dtypes. items: [items, bytes of one]."""
    if x.is_cuda and x.dtype in _PLAIN:
        return x
    if not _is_memory(x):
        return x
    if not items:
        return as_bytes(x)
    return as_bytes(x).view(x.shape[0] if x.dim() else 1, math.prod(x.shape[1:]) * x.element_size())


def _is_memory(x: torch.Tensor) -> bool:
    """Whether a tensor is contiguous memory, as it is."""
    return x.layout == torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _check_splits(what: str, x: torch.Tensor, sizes: Sequence[int] | None, count: int) -> None:
    items = x.shape[0] if x.dim() else 1
    if not sizes:
        if items % count:
            raise ValueError(f"{what} has {items} items, which are not divided by {count} ranks")
    elif len(sizes) != count or min(sizes) < 0 or sum(sizes) != items:
        raise ValueError(f"{what}_split_sizes is {list(sizes)}; wanted {count} numbers that are {items} in sum")


def _parts(x: torch.Tensor, sizes: Sequence[int] | None, count: int) -> list[torch.Tensor]:
    """The bytes for each rank."""
    items = max(1, x.shape[0] if x.dim() else 1)
    data = as_bytes(x)
    return list(data.split([data.numel() // items * n for n in sizes] if sizes else [data.numel() // count] * count))


def messages_of(plan: Plan, payloads: Sequence[int], device: torch.device, least: int = 1) -> Messages:
    key = (*payloads, least, device)
    if key not in plan.messages:
        if len(plan.messages) >= _MOST_MESSAGES:
            plan.messages.clear()
        assert plan.codec is not None
        plan.messages[key] = Messages(plan.codec, payloads, least, device)
    return plan.messages[key]


def pieces_of_one(plan: Plan, x: torch.Tensor, is_sent: bool) -> list[ExchangePiece]:
    """Of a tensor that is sent, or received, in one message a piece."""
    pieces = []
    for span in spans_of(x.numel(), plan.num_pieces):
        parts = [Part(0, x[span.bytes])]
        messages = messages_of(plan, [span.payload], x.device)
        pieces.append(ExchangePiece(messages, parts, []) if is_sent else ExchangePiece(messages, [], parts))
    return pieces


def root_of(src: int | None, group_src: int | None, group: dist.ProcessGroup | None, what: str = "src") -> int:
    """The rank in the group that is named among all, or in the group. what: the arguments' name."""
    if (src is None) == (group_src is None):
        raise ValueError(f"wanted one of {what} and group_{what}")
    if group_src is not None:
        return group_src
    assert src is not None
    return src if group is None else dist.get_group_rank(group, src)


def run(job: Job, state: State, is_async: bool) -> CodedWork:
    """Starts a job. is_async: of `CodedWork`."""
    with torch.no_grad():
        return CodedWork(job, state.slots(job.tensors[0].device), is_async)


def finished(work: dist.Work | None, is_async: bool) -> dist.Work | None:
    """What a call returns: its work, or None once the work is done."""
    if is_async:
        return work
    if work is not None:
        work.wait()
    return None


def _copy_own(out: torch.Tensor, x: torch.Tensor) -> None:
    """What a rank sends to itself."""
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
