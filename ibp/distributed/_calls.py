"""Defines the functions that move tensors between ranks: the collectives, which move them between all ranks of a group,
and `send` and `recv`, which move a tensor from one rank to another. Each function has a class, which determines the
messages of a call and how they move. `_exchange.py` describes the steps of a coded call.

The ranks of a collective agree on a plan together (`Collective.plan`). The two ranks of `send` and `recv` do not ask
each other. The first tensor of a kind travels raw, followed by a note, which says how the next tensors are coded. Some
later tensors are followed by a new note. So both ranks know how a tensor travels. If rows do not fit in a tensor's
messages, the tensor is sent again, raw. This happens before any other tensor travels in the same direction, because
both ranks finish one call before they begin the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .._rows.learning import Learner
from ._exchange import Collective, ExchangePiece, OneTensor, Work, finished, movable, root_of
from ._links import NOTE_BYTES, RAW, CallOptions, Channel, Load, Plan, codec_in, note_of, rates_of, raw_all_gather
from ._messages import Codec, Messages, Status, as_bytes, sample_of, spans_of

# In an all-to-all, ranks may send different numbers of bytes. The call is planned as if each rank sent 64 MiB.
_NOMINAL = Load(64 << 20, 64 << 20, 64 << 20)
# Number of pieces of an all-to-all on GPUs. It is fixed, because a rank does not know how many bytes other ranks send
# to each other.
_PIECES = 2

# ---- collectives ---------------------------------------------------------------------------------------------------


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
    """Gathers a tensor from each rank, as `torch.distributed.all_gather_into_tensor` does. Tensors travel coded if that
    is faster.

    The bits of the result are the same as with torch. A tensor is divided into pieces. While one piece travels, the
    next piece is coded and the previous piece is decoded. If some rows of a tensor do not fit into the tensor's
    messages, the tensor is sent again, raw. While a CUDA graph is being captured, tensors travel raw, in torch's own
    call.

    The first call of a kind (shape, dtype, level, name) is slower: the ranks compare their arguments and learn a codec
    from samples of their tensors. A group's first call with level="auto" also times a raw all-gather. From time to
    time, a later call checks whether the codec still suits the tensors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> whole = torch.empty(2000, 64)
        >>> ibp.distributed.all_gather_into_tensor(whole, torch.full((1000, 64), float(rank)))
        >>> whole[[3, 1003], 0]
        tensor([0., 1.])

    Args:
        output_tensor: a contiguous tensor to write to. Its number of elements is the number of elements of input_tensor
            times the number of ranks.
        input_tensor: a contiguous tensor of any dtype, on the CPU or a GPU. It must have the same shape and dtype on
            all ranks. It may be this rank's part of output_tensor.
        group: a process group of torch.distributed. None: the default group.
        async_op: whether to return work at once. The result is complete after `wait()` of the work. On a GPU, `wait()`
            blocks the host until all ranks have coded their tensors, and makes the current stream wait for the result.
            All ranks must wait for their calls in the order in which they made them.
        codec: the codec for the tensors. It must be the same on all ranks. None: the ranks learn a codec from their
            tensors.
        level: "auto": tensors are coded at level "default" if that is faster at the measured rate of the link, and
            otherwise sent raw. "default" or "fast": tensors are coded at this level (see `ibp.compress`), unless that
            would save less than 2 % of the bytes.
        name: calls with the same name, level and dtype share a codec. Give a different name to tensors whose values are
            distributed differently.

    Returns:
        Work if async_op is set, else None.

    Raises:
        TypeError, ValueError: an argument is not as described, or ranks differ in an argument. All ranks raise.
        RuntimeError: torch.distributed is not initialised, or a rank does not take part.
    """
    return AllGather(output_tensor, input_tensor, group, CallOptions(codec, level, name)).call(async_op)


all_gather_single = all_gather_into_tensor  # The name of this function in torch 2.13.


class AllGather(Collective):
    """An all-gather. Each piece has a message for each rank: rank k sends message k, and receives the others.

    Args:
        is_known_to_fit: see `Load`.
    """

    def __init__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        options: CallOptions,
        is_known_to_fit: bool = False,
    ) -> None:
        super().__init__(group, options, "all_gather_into_tensor", (input_tensor, output_tensor))
        self._input, self._output = input_tensor, output_tensor
        moved = (self.state.size - 1) * input_tensor.nbytes
        self.load = Load(input_tensor.nbytes, moved, moved, is_known_to_fit)

    def check(self) -> None:
        super().check()
        count, size = self._input.numel(), self.state.size
        if self._output.numel() != size * count:
            raise ValueError(
                f"output_tensor has {self._output.numel()} elements; wanted {size} times the {count} of input_tensor"
            )

    def raw(self, async_op: bool) -> dist.Work | None:
        return raw_all_gather(movable(self._output), movable(self._input), group=self.group, async_op=async_op)

    def pieces(self, plan: Plan) -> list[ExchangePiece]:
        x, out, rank, size = as_bytes(self._input), as_bytes(self._output), self.state.rank, self.state.size
        self.own = out[rank * len(x) : (rank + 1) * len(x)], x
        spans = spans_of(x.numel(), plan.num_pieces)
        lengths = [min(len(span), x.numel() - span.start) for span in spans]
        sent, received = x.split_with_sizes(lengths), out.split_with_sizes(lengths * size)
        pieces = []
        for k, span in enumerate(spans):
            arriving = {other: received[other * len(spans) + k] for other in range(size) if other != rank}
            messages = plan.messages_of([len(span)] * size, x.device)
            pieces.append(ExchangePiece(messages, {rank: sent[k]}, arriving))
        return pieces

    def move(self, whole: torch.Tensor, each: Sequence[torch.Tensor]) -> dist.Work | None:
        return raw_all_gather(whole, each[self.state.rank], group=self.group, async_op=True)


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
    """Sends a tensor from one rank to all ranks, as `torch.distributed.broadcast` does. The tensor travels coded if
    that is faster.

    See `all_gather_into_tensor` for how tensors are coded, for the other arguments, the result and the errors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()
        >>> weights = torch.full((1000, 64), float(rank))
        >>> ibp.distributed.broadcast(weights, src=1)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: a contiguous tensor, which has the same shape and dtype on all ranks. The source rank sends its tensor,
            and the other ranks overwrite theirs.
        src, group_src: the rank of the source among all ranks, or in the group. Give exactly one of the two.
    """
    root = root_of(src, group_src, group)
    return _Broadcast(tensor, root, group, CallOptions(codec, level, name)).call(async_op)


class _Broadcast(OneTensor):
    """A broadcast. root: the rank of the source in the group. It sends the only message of each piece."""

    def __init__(self, tensor: torch.Tensor, root: int, group: dist.ProcessGroup | None, options: CallOptions) -> None:
        super().__init__("broadcast", tensor, group, options, root)
        self.is_sent, self._root = self.state.rank == root, root

    def raw(self, async_op: bool) -> dist.Work | None:
        return self._broadcast(movable(self.tensors[0]), async_op)

    def move(self, whole: torch.Tensor, each: Sequence[torch.Tensor]) -> dist.Work | None:
        return self._broadcast(whole, True)

    def _broadcast(self, data: torch.Tensor, async_op: bool) -> dist.Work | None:
        return dist.broadcast(data, group=self.group, group_src=self._root, async_op=async_op)


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
    """Sends a part of a tensor to each rank, as `torch.distributed.all_to_all_single` does. Parts travel coded if that
    is faster.

    A part travels in two pieces on GPUs, and in one piece on the CPU. If neither a level nor a codec is given, parts
    that are too small for coding to pay travel raw. See `all_gather_into_tensor` for how tensors are coded, for the
    other arguments, the result and the errors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> output = torch.empty(2000, 64)
        >>> ibp.distributed.all_to_all_single(output, torch.full((2000, 64), float(rank)))
        >>> output[[3, 1003], 0]  # the first half is from rank 0
        tensor([0., 1.])

    Args:
        output, input: contiguous tensors of one dtype on one device.
        output_split_sizes: for each rank, the number of items of dimension 0 that are received from it. None: equal
            parts.
        input_split_sizes: for each rank, the number of items of dimension 0 that are sent to it. None: equal parts.
    """
    splits = output_split_sizes, input_split_sizes
    return _AllToAll(output, input, splits, group, CallOptions(codec, level, name)).call(async_op)


class _Exchange(Collective):
    """A call in which a rank can send a part of its data to each rank. In a group of n ranks, message k of a piece goes
    to rank k, and message n + k comes from rank k. A rank's messages to and from itself are empty.

    The sender and the receiver of a message both know its size, so they both know whether it is coded. On GPUs a raw
    part moves directly from the sender's tensor to the receiver's tensor, together with the first piece of the coded
    parts. On the CPU a raw part is copied into a raw message.
    """

    def divide(self, plan: Plan, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Sets the parts that the call moves, and decides which of them are coded. Subclasses call this method before a
        coded call.

        Args:
            sent: for each rank, the bytes that this rank sends to it.
            received: for each rank, the memory of the bytes that come from it.
        """
        rank, size = self.state.rank, self.state.size
        self._on_gpu = self.state.buffers(self.tensors[0].device).on_gpu
        self.own = received[rank], sent[rank]
        self._parts = [data[:0] if k % size == rank else data for k, data in enumerate((*sent, *received))]
        self._is_coded = [data.numel() >= max(1, plan.least) for data in self._parts]
        self._raw = [data[:0] if coded else data for data, coded in zip(self._parts, self._is_coded)]

    def num_pieces(self, plan: Plan) -> int:
        """Returns the number of pieces of a call on GPUs. It is the same on all ranks."""
        return plan.num_pieces

    def pieces(self, plan: Plan) -> list[ExchangePiece]:
        device = self.tensors[0].device
        if not self._on_gpu:
            messages = plan.messages_of([data.numel() for data in self._parts], device, plan.least)
            return [self._piece(messages, self._parts)]
        count = self.num_pieces(plan)
        spans = [spans_of(data.numel(), count) if coded else () for data, coded in zip(self._parts, self._is_coded)]
        pieces = []
        for k in range(count):
            of_piece = [found[k] if k < len(found) else range(0) for found in spans]
            parts = [data[span.start : span.stop] for data, span in zip(self._parts, of_piece)]
            pieces.append(self._piece(plan.messages_of(list(map(len, of_piece)), device), parts))
        return pieces

    def _piece(self, messages: Messages, parts: Sequence[torch.Tensor]) -> ExchangePiece:
        size, found = self.state.size, {k: data for k, data in enumerate(parts) if data.numel()}
        sent, received = ({k: data for k, data in found.items() if (k < size) == is_sent} for is_sent in (True, False))
        return ExchangePiece(messages, sent, received)

    def move(self, whole: torch.Tensor, each: Sequence[torch.Tensor]) -> dist.Work | None:
        size = self.state.size
        if self._on_gpu:
            parts = [message if coded else raw for message, coded, raw in zip(each, self._is_coded, self._raw)]
            self._raw = [data[:0] for data in self._raw]  # Later pieces have no raw parts.
            return dist.all_to_all(parts[size:], parts[:size], group=self.group, async_op=True)
        to, back = ([message.numel() for message in of] for of in (each[:size], each[size:]))
        sent, received = whole.split([sum(to), sum(back)])
        return dist.all_to_all_single(received, sent, back, to, group=self.group, async_op=True)

    def tell(self, status: Status) -> dist.Work | None:
        """Sends and receives the status of coded messages only. A rank without coded messages does not call `tell`."""
        size = self.state.size
        rows = [row if coded else row[:0] for row, coded in zip(status.rows, self._is_coded)]
        return dist.all_to_all(rows[size:], rows[:size], group=self.group, async_op=True)

    def repair(self, status: Status) -> None:
        """Sends the parts that have lost rows again, raw. Only the sender and the receiver of a part know that it has
        lost rows, so only these two ranks take part."""
        size, ops = self.state.size, []
        for k in (k for k, is_lost in enumerate(status.lost) if is_lost):
            function, peer = (dist.isend, k) if k < size else (dist.irecv, k - size)
            ops.append(dist.P2POp(function, self._parts[k], group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()


class _AllToAll(_Exchange):
    """An all-to-all. splits: output_split_sizes and input_split_sizes."""

    def __init__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        splits: tuple[Sequence[int] | None, Sequence[int] | None],
        group: dist.ProcessGroup | None,
        options: CallOptions,
    ) -> None:
        super().__init__(group, options, "all_to_all_single", (input, output))
        # A rank that sends few bytes can take part in a large call, so the plan must not depend on the sizes of one
        # rank.
        self.kind, self.load = self.kind._replace(numel=0), _NOMINAL
        self._input, self._output, self._splits = input, output, splits

    def check(self) -> None:
        super().check()
        for what, x, sizes in zip(("output", "input"), (self._output, self._input), self._splits):
            _check_splits(what, x, sizes, self.state.size)

    def raw(self, async_op: bool) -> dist.Work | None:
        output, input = movable(self._output, items=True), movable(self._input, items=True)
        return dist.all_to_all_single(output, input, *self._splits, group=self.group, async_op=async_op)

    def num_pieces(self, plan: Plan) -> int:
        return _PIECES

    def coded(self, plan: Plan, is_async: bool, status: Status | None = None) -> dist.Work | None:
        received, sent = (
            _parts(x, sizes, self.state.size) for x, sizes in zip((self._output, self._input), self._splits)
        )
        self.divide(plan, sent, received)
        if self._on_gpu and not any(self._is_coded):
            # This rank has no coded messages, but other ranks may send coded messages to each other. An NCCL all-to-all
            # is a group of sends and receives between pairs of ranks, so this rank can leave out the all-to-alls in
            # which it moves no bytes. Its raw parts are moved as bytes, because the other ranks also send and receive
            # them as bytes.
            to, back = ([data.numel() for data in parts] for parts in (sent, received))
            x, out = as_bytes(self._input), as_bytes(self._output)
            return dist.all_to_all_single(out, x, back, to, group=self.group, async_op=is_async)
        return super().coded(plan, is_async, status)


def _check_splits(what: str, x: torch.Tensor, sizes: Sequence[int] | None, count: int) -> None:
    """Raises ValueError unless x can be divided into parts for `count` ranks.

    Args:
        what: the name of x, for the error.
        sizes: the number of items of dimension 0 for each rank. None: equal parts.
    """
    items = x.shape[0] if x.dim() else 1
    if not sizes:
        if items % count:
            raise ValueError(f"{what} has {items} items, which are not divided by {count} ranks")
    elif len(sizes) != count or min(sizes) < 0 or sum(sizes) != items:
        raise ValueError(f"{what}_split_sizes is {list(sizes)}; wanted {count} numbers that are {items} in sum")


def _parts(x: torch.Tensor, sizes: Sequence[int] | None, count: int) -> list[torch.Tensor]:
    """Returns the bytes of each rank's part of x, as views of x. The arguments are those of `_check_splits`."""
    items = max(1, x.shape[0] if x.dim() else 1)
    data = as_bytes(x)
    return list(data.split([data.numel() // items * n for n in sizes] if sizes else [data.numel() // count] * count))


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """Gathers a tensor from each rank on one rank, as `torch.distributed.gather` does. Tensors travel coded if that is
    faster.

    If some rows of a tensor do not fit into its messages, only that tensor is sent again, raw. See
    `all_gather_into_tensor` for how tensors are coded, for the other arguments, the result and the errors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> parts = [torch.empty(1000, 64) for _ in range(2)]
        >>> ibp.distributed.gather(torch.full((1000, 64), float(rank)), parts if rank == 1 else None, dst=1)
        >>> [part[3, 0].item() for part in parts]  # on rank 1
        [0.0, 1.0]

    Args:
        tensor: a contiguous tensor, which has the same shape and dtype on all ranks.
        gather_list: on the destination rank, a contiguous tensor for each rank of the group to write to, in the order
            of the ranks. Each has the shape, dtype and device of `tensor`, and the destination's own may be `tensor`
            itself. On the other ranks, None or an empty list.
        dst, group_dst: the rank of the destination among all ranks, or in the group. Give at most one of the two. If
            both are None, the destination is rank 0 among all ranks.
    """
    root = root_of(0 if dst is None and group_dst is None else dst, group_dst, group, "dst")
    return _Rooted("gather", tensor, gather_list, root, group, CallOptions(codec, level, name)).call(async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """Sends a different tensor from one rank to each rank, as `torch.distributed.scatter` does. Tensors travel coded if
    that is faster.

    If some rows of a tensor do not fit into its messages, only that tensor is sent again, raw. See
    `all_gather_into_tensor` for how tensors are coded, for the other arguments, the result and the errors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> part = torch.empty(1000, 64)
        >>> parts = [torch.full((1000, 64), float(k)) for k in range(2)] if rank == 1 else None
        >>> ibp.distributed.scatter(part, parts, src=1)
        >>> part[3, 0].item() == rank
        True

    Args:
        tensor: a contiguous tensor to write to, which has the same shape and dtype on all ranks.
        scatter_list: on the source rank, a contiguous tensor for each rank of the group, in the order of the ranks.
            Each has the shape, dtype and device of `tensor`, and the source's own may be `tensor` itself. On the other
            ranks, None or an empty list.
        src, group_src: the rank of the source among all ranks, or in the group. Give at most one of the two. If both
            are None, the source is rank 0 among all ranks.
    """
    root = root_of(0 if src is None and group_src is None else src, group_src, group)
    return _Rooted("scatter", tensor, scatter_list, root, group, CallOptions(codec, level, name)).call(async_op)


class _Rooted(_Exchange):
    """A gather or a scatter: one rank, the root, receives a tensor from each rank, or sends a tensor to each rank.

    Args:
        what: "gather" or "scatter".
        tensor: the tensor that this rank sends to the root, or receives from it.
        tensors: on the root, the tensors of all ranks. `check` raises an error unless they suit the call. The
            constructor does not, because the other ranks would then wait for this rank.
        root: the rank of the root in the group.
    """

    def __init__(
        self,
        what: str,
        tensor: torch.Tensor,
        tensors: Sequence[torch.Tensor] | None,
        root: int,
        group: dist.ProcessGroup | None,
        options: CallOptions,
    ) -> None:
        super().__init__(group, options, what, (tensor,), root)
        self._tensor, self._list, self._root, self._gathers = tensor, tensors, root, what == "gather"
        at_root = (self.state.size - 1) * tensor.nbytes
        coded, decoded = (tensor.nbytes, at_root) if self._gathers else (at_root, tensor.nbytes)
        self.load = Load(coded, at_root, decoded)

    def check(self) -> None:
        size, rank, what, tensors = self.state.size, self.state.rank, f"{self.kind.what}_list", self._list
        if not 0 <= self._root < size:
            raise ValueError(f"{'dst' if self._gathers else 'src'} is {self._root}; wanted 0 to {size - 1}")
        if not isinstance(tensors, (list, tuple, type(None))):
            raise TypeError(f"{what} is a {type(tensors).__name__}; wanted a list of tensors")
        tensors, wanted = tensors or (), size if rank == self._root else 0
        if len(tensors) != wanted:
            raise ValueError(
                f"{what} has {len(tensors)} tensors on rank {rank} of the group; wanted {wanted}, because rank "
                f"{self._root} {'receives from' if self._gathers else 'sends to'} {size} ranks"
            )
        for k, x in enumerate(tensors):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{what}[{k}] is a {type(x).__name__}; wanted a torch.Tensor")
            if x.shape != self._tensor.shape:
                raise ValueError(
                    f"{what}[{k}] has shape {list(x.shape)}; wanted {list(self._tensor.shape)}, the shape of tensor"
                )
        self.tensors = self._tensor, *tensors
        super().check()

    def raw(self, async_op: bool) -> dist.Work | None:
        self.check()
        tensor, *tensors = (movable(x) for x in self.tensors)
        if self._gathers:
            return dist.gather(tensor, tensors, group=self.group, group_dst=self._root, async_op=async_op)
        return dist.scatter(tensor, tensors, group=self.group, group_src=self._root, async_op=async_op)

    def sample(self) -> torch.Tensor | None:
        if self._gathers:
            return super().sample()
        samples = [self.rows_from(x) for x in self.tensors[1:]]
        return torch.cat(samples) if samples else None

    def coded(self, plan: Plan, is_async: bool, status: Status | None = None) -> dist.Work | None:
        if self._tensor.nbytes < plan.least:  # On all ranks, because all tensors have one size.
            return self.raw(is_async)
        one, *many = (as_bytes(x) for x in self.tensors)
        nothing = one[:0]
        with_root = [one if rank == self._root else nothing for rank in range(self.state.size)]
        with_each = many or [nothing] * self.state.size
        self.divide(plan, *((with_root, with_each) if self._gathers else (with_each, with_root)))
        return super().coded(plan, is_async, status)


# ---- send and recv -------------------------------------------------------------------------------------------------

# A tensor of n bytes is divided into max(1, min(_MOST_PIECES, n // _PIECE_BYTES)) pieces.
_PIECE_BYTES, _MOST_PIECES = 64 << 20, 8


class NotedWork(Work):
    """Waits for a raw tensor and for the note that follows it.

    Args:
        works: the work of the tensor and the work of the note.
        read: a function that is called when the tensor and the note have arrived. None: nothing is called.
    """

    def __init__(self, works: list[dist.Work | None], read: Callable[[], None] | None) -> None:
        super().__init__()
        self._works, self._read = works, read
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self, timeout: object = None) -> bool:
        # Some kinds of work cannot be waited for twice. An interrupted call leaves the others to the next call. If one
        # has failed, each later call raises its error again, as that of a CodedWork does.
        while self._works and self._error is None:
            try:
                finished(self._works.pop(0), False)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        if self._read is not None:
            self._read()
            self._read = None
        return True


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    async_op: bool = False,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """Sends a tensor to another rank, as `torch.distributed.send` does. The tensor is sent in coded form if that is
    faster.

    The receiver calls `recv` of this module with the same arguments.

    If no codec is given, the first tensor of a kind travels raw, followed by the codec for the next tensors of the
    kind. The call first waits until the previous tensor with the same tag has arrived at the same rank. See
    `all_gather_into_tensor` for the other arguments.

    Example:
        >>> # on each rank of a group
        >>> weights = torch.full((1000, 64), float(torch.distributed.get_rank()))
        >>> if torch.distributed.get_rank() == 1:
        ...     ibp.distributed.send(weights, dst=0)
        ... elif torch.distributed.get_rank() == 0:
        ...     ibp.distributed.recv(weights, src=1)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: a contiguous tensor of any dtype.
        dst, group_dst: the receiver's rank among all ranks, or in the group. Give exactly one of the two.
        tag: as in torch.
        async_op: whether to return work, as `torch.distributed.isend` does.
        level: as in `all_gather_into_tensor`, with one difference. With "auto", tensors travel raw on the CPU, and also
            before the rate of the group's link has been measured (`measure_link`).

    Returns:
        Work if async_op is set, else None.

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: torch.distributed is not initialised, or the other rank does not take part.
    """
    peer = root_of(dst, group_dst, group, "dst")
    return _Transfer(tensor, True, peer, tag, group, CallOptions(codec, level, name)).call(async_op)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    async_op: bool = False,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> dist.Work | None:
    """Receives a tensor from another rank, as `torch.distributed.recv` does.

    The sender calls `send` of this module with the same arguments.

    Example:
        >>> # on each rank of a group
        >>> weights = torch.full((1000, 64), float(torch.distributed.get_rank()))
        >>> if torch.distributed.get_rank() == 0:
        ...     ibp.distributed.recv(weights, src=1)
        ... elif torch.distributed.get_rank() == 1:
        ...     ibp.distributed.send(weights, dst=0)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: a contiguous tensor to write to, with the shape and dtype of the sender's tensor.
        src, group_src: the sender's rank among all ranks, or in the group. Give exactly one of the two.
        tag, async_op, codec, level, name: as in `send`.

    Returns:
        Work if async_op is set, else None.

    Raises:
        TypeError, ValueError, RuntimeError: as in `send`; ValueError also if the sender's tensor is of another kind.
    """
    peer = root_of(src, group_src, group)
    return _Transfer(tensor, False, peer, tag, group, CallOptions(codec, level, name)).call(async_op)


def _finish(channel: Channel) -> None:
    """Waits for the last work of a channel. An error is raised once: the next call does not wait for the work again. If
    the wait was interrupted, the next call waits for the rest of the work."""
    try:
        finished(channel.last, False)
    except Exception:
        channel.last = None
        raise
    channel.last = None


class _Transfer(OneTensor):
    """One call of `send` or `recv`, which moves a tensor to another rank or from it.

    Args:
        is_sent: whether this rank sends the tensor. If not, this rank receives it.
        peer: the rank of the other process in the group.
        tag: as in torch.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        is_sent: bool,
        peer: int,
        tag: int,
        group: dist.ProcessGroup | None,
        options: CallOptions,
    ) -> None:
        super().__init__("send", tensor, group, options)
        self.is_sent, self._peer, self._tag = is_sent, peer, tag

    def raw(self, async_op: bool) -> dist.Work | None:
        return finished(self._moved(movable(self.tensors[0])), async_op)

    def move(self, whole: torch.Tensor, each: Sequence[torch.Tensor]) -> dist.Work | None:
        return self._moved(whole)

    def call(self, async_op: bool) -> dist.Work | None:
        """Finishes the previous call in this direction. Then makes this call by the channel's plan for tensors of
        this kind."""
        if self.travels_raw() or self.load.coded == 0:
            return self.raw(async_op)
        self.check()
        channel = self.state.channels.setdefault((self.is_sent, self._peer, self._tag), Channel())
        _finish(channel)
        plan = channel.plans.get(self.kind)
        if plan is None and self.options.codec is not None:
            plan = channel.plans[self.kind] = Plan(self.options.codec, self._num_pieces(), is_checked=False)
        if plan is None or (plan.codec is not None and plan.is_due()):
            channel.last = self._noted(channel, plan)
        elif plan.codec is not None:
            channel.last = self.begun(plan, async_op)
        else:
            return self.raw(async_op)
        if async_op:
            return channel.last
        _finish(channel)
        return None

    def _moved(self, data: torch.Tensor) -> dist.Work | None:
        """Begins to send or to receive `data`. Returns work."""
        if self.is_sent:
            return dist.isend(data, group=self.group, tag=self._tag, group_dst=self._peer)
        return dist.irecv(data, group=self.group, tag=self._tag, group_src=self._peer)

    def _noted(self, channel: Channel, old: Plan | None) -> NotedWork:
        """Begins to move the tensor raw, followed by a note that says how the next tensors of the kind travel. The
        sender replaces the plan of the kind at once. The receiver replaces it when the note has arrived.

        Args:
            old: the present plan of the kind. None: the kind is new.
        """

        def take(note: torch.Tensor) -> None:
            codec = codec_in(note, self.kind)
            num_calls = 1 if old is None else old.num_calls
            channel.plans[self.kind] = RAW if codec is None else Plan(codec, self._num_pieces(), num_calls=num_calls)

        device, data = self.tensors[0].device, movable(self.tensors[0])
        if self.is_sent:
            note = note_of(self.kind, self._learned(old, channel.learners.setdefault(self.kind, Learner())))
            take(note)
            note = note.to(device)
            return NotedWork([self._moved(data), self._moved(note)], None)
        note = torch.empty(NOTE_BYTES, dtype=torch.uint8, device=device)
        return NotedWork([self._moved(data), self._moved(note)], lambda: take(note))

    def _learned(self, old: Plan | None, learner: Learner[Codec]) -> Codec | None:
        """Chooses the codec for the next tensors, on the sender. Keeps the present codec unless a tensor has lost rows
        with it; otherwise learns a codec. Returns None if coding saves too little. With level="auto", also returns None
        if raw tensors are expected to be faster, or if the rate of the link is not known."""
        kind, link = self.kind, self.state.link
        learner.has_drifted = old is not None and old.has_lost
        if old is not None and not learner.has_drifted:
            return old.codec
        if learner.is_hopeless or (kind.level == "auto" and (link is None or not kind.follows_link)):
            return None
        rows = sample_of(self.tensors[0])
        found = kind.learned(rows)
        if found is not None and kind.level == "auto":
            assert link is not None
            rates = rates_of(found, rows, self.tensors[0].device)
            found = found if rates.pays(link, self.load) else None
        learner.take(found)
        return found

    def _num_pieces(self) -> int:
        """Returns the number of pieces of the tensor. It is the same on both ranks, because it depends only on the size
        of the tensor."""
        return max(1, min(_MOST_PIECES, self.tensors[0].nbytes // _PIECE_BYTES))
