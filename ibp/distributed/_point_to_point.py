"""`send` and `recv`, which move a tensor from one rank to another rank. `_exchange.py` describes the steps of a coded
call.

The first tensor of a kind travels raw, followed by a note, which says how the next tensors are coded. Some later
tensors are followed by a new note. So both ranks know how a tensor travels, without asking each other. If rows do not
fit in a tensor's messages, the tensor is sent again, raw. This happens before any other tensor travels in the same
direction, because both ranks finish one call before they begin the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .._common import wire
from .._rows.learning import Learner
from . import _links
from ._exchange import OneTensor, Work, finished, movable, root_of
from ._links import RAW, CallOptions, Channel, Kind, Plan
from ._messages import Codec, sample_of

_NOTE_BYTES = 1 << 14  # Size of a note in bytes. If a codec does not fit in it, the note says that tensors travel raw.
_LENGTH_BYTES = 8  # A note begins with the length of its content in bytes, an int64.
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

    def is_completed(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self, timeout: object = None) -> bool:
        works, self._works = self._works, []  # Some kinds of work cannot be waited for twice.
        for work in works:
            finished(work, False)
        read, self._read = self._read, None
        if read is not None:
            read()
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
        # If waiting for the last call fails here, the next call does not wait for it again.
        last, channel.last = channel.last, None
        finished(last, False)
        plan = channel.plans.get(self.kind)
        if plan is None and self.options.codec is not None:
            plan = channel.plans[self.kind] = Plan(self.options.codec, self._num_pieces(), is_checked=False)
        if plan is None or (plan.codec is not None and plan.is_due()):
            work = finished(self._noted(channel, plan), async_op)
        elif plan.codec is not None:
            work = self.coded(plan, async_op)
        else:
            return self.raw(async_op)
        channel.last = work
        return work

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
            codec = _read(note, self.kind)
            num_calls = 1 if old is None else old.num_calls
            channel.plans[self.kind] = RAW if codec is None else Plan(codec, self._num_pieces(), num_calls=num_calls)

        device, data = self.tensors[0].device, movable(self.tensors[0])
        if self.is_sent:
            note = _note(self.kind, self._learned(old, channel.learners.setdefault(self.kind, Learner())))
            take(note)
            note = note.to(device)
            return NotedWork([self._moved(data), self._moved(note)], None)
        note = torch.empty(_NOTE_BYTES, dtype=torch.uint8, device=device)
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
            rates = _links.rates_of(found, rows, self.tensors[0].device)
            found = found if _links.pays(found, rates, link, self.load) else None
        learner.take(found)
        return found

    def _num_pieces(self) -> int:
        """Returns the number of pieces of the tensor. It is the same on both ranks, because it depends only on the size
        of the tensor."""
        return max(1, min(_MOST_PIECES, self.tensors[0].nbytes // _PIECE_BYTES))


def _note(kind: Kind, codec: Codec | None) -> torch.Tensor:
    """Returns a note, uint8 [_NOTE_BYTES] on the CPU. The note has the length of its content, followed by the content:
    the kind and the codec. If the content does not fit, the length is 0."""
    content = wire.written((kind, codec))
    note = torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
    if len(content) <= _NOTE_BYTES - _LENGTH_BYTES:
        note[:_LENGTH_BYTES].view(torch.int64).fill_(len(content))
        note[_LENGTH_BYTES : _LENGTH_BYTES + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return note


def _read(note: torch.Tensor, kind: Kind) -> Codec | None:
    """Returns the codec in a note, or None if tensors travel raw.

    Args:
        kind: the kind of tensor that the receiver expects.

    Raises:
        ValueError: the bytes are not a note, or the sender's tensor is of another kind.
    """
    content = note.cpu()
    length = int(content[:_LENGTH_BYTES].view(torch.int64))
    if not 0 < length <= _NOTE_BYTES - _LENGTH_BYTES:
        return None
    found = wire.read(content[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes())
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Kind):
        raise ValueError("recv: what came behind the sender's tensor is no note that says how later ones travel")
    sent, codec = found
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(f"recv: the sender's note has a {type(codec).__name__}; wanted a codec")
    if sent != kind:
        raise ValueError(f"recv: the sender's tensor is {_shown(sent)}; this one is {_shown(kind)}")
    return codec


def _shown(kind: Kind) -> str:
    return f"{kind.numel} elements of {kind.dtype} on {kind.device}, level {kind.level!r}, name {kind.name!r}"
