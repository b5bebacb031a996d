"""Tensors from one rank to another: `send` and `recv`.

The first tensor of a kind is raw, and behind it travels a note that says how later ones are coded; a new note follows
some of them. So both ranks know without asking what travels how. A tensor that has lost rows is sent again, raw, before
anything else travels from that rank to that other one: both ranks finish one call before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._common import wire
from .._schemes.learning import Learner
from . import _links
from ._calls import check_tensors, finished, movable, pieces_of_one, root_of, run, travels_raw
from ._codec import Codec, as_bytes, sample_of
from ._exchange import Job, Work
from ._links import Load
from ._planning import RAW, CallOptions, Kind, Pair, Plan, State, state_of

_NOTE_BYTES = 1 << 14  # of a note: a longer one says that tensors are raw
_LENGTH_BYTES = 8
_PIECE_BYTES, _MOST_PIECES = 64 << 20, 8  # of a tensor


class Way(NamedTuple):
    """From this rank to another, or back."""

    group: dist.ProcessGroup | None
    is_out: bool  # to the other
    peer: int  # its rank in the group
    tag: int  # of torch.distributed

    def move(self, data: torch.Tensor) -> dist.Work | None:
        """Sends a tensor, or receives one."""
        if self.is_out:
            return dist.isend(data, group=self.group, tag=self.tag, group_dst=self.peer)
        return dist.irecv(data, group=self.group, tag=self.tag, group_src=self.peer)


class NotedWork(Work):
    """A raw tensor and the note behind it."""

    def __init__(self, works: list[dist.Work | None], read: Callable[[], None] | None) -> None:
        """read: is called when both are there."""
        super().__init__()
        self._works, self._read = works, read

    def is_completed(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self, timeout: object = None) -> bool:
        works, self._works = self._works, []  # some work cannot be waited for twice
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
    """`torch.distributed.send`, with a tensor that travels coded where that is faster. Its twin is `recv` of this
    module, with the same arguments.

    Unless a codec is given, the first tensor of a kind travels raw, and behind it travels the codec of the next ones.
    The call waits first for an earlier tensor to the same rank. See `all_gather_into_tensor` for the other arguments.

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
        tensor: contiguous.
        dst, group_dst: the receiver's rank among all, or in the group: one of them.
        tag: as in torch.
        async_op: return work, as `torch.distributed.isend` does.
        level: "auto": raw on the CPU, and unless the group's link was measured before (`measure_link`).

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: torch.distributed is not initialised, or the other rank does not take part.
    """
    way = Way(group, True, root_of(dst, group_dst, group, "dst"), tag)
    return _transferred(tensor, way, CallOptions(codec, level, name), async_op)


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
    """`torch.distributed.recv` from a rank that calls `send` of this module with the same arguments.

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
        tensor: contiguous; it is written.
        src, group_src: the sender's rank among all, or in the group: one of them.
        tag, async_op, codec, level, name: as in `send`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `send`; ValueError also if the sender's tensor is of another kind.
    """
    way = Way(group, False, root_of(src, group_src, group), tag)
    return _transferred(tensor, way, CallOptions(codec, level, name), async_op)


def _transferred(tensor: torch.Tensor, way: Way, options: CallOptions, is_async: bool) -> dist.Work | None:
    """What `send` and `recv` do."""
    options.check(tensor)
    state = state_of(way.group)
    if travels_raw(state, tensor, tensor.nbytes, options):
        return finished(way.move(movable(tensor)), is_async)
    check_tensors(tensor)
    pair = state.pairs.setdefault((way.is_out, way.peer, way.tag), Pair())
    last, pair.last = pair.last, None  # if it fails, it is not in the way of the call after this one
    finished(last, False)
    kind = options.kind_of("send", tensor)
    plan = pair.plans.get(kind)
    if plan is None and options.codec is not None:
        plan = pair.plans[kind] = Plan(options.codec, _num_pieces(tensor), is_checked=False)
    if plan is None or (plan.codec is not None and plan.is_due()):
        work: dist.Work | None = _with_note(tensor, way, state, pair, kind)
    elif plan.codec is not None:
        x = as_bytes(tensor)
        pieces = pieces_of_one(plan, x, way.is_out)
        job = Job(
            pieces,
            lambda messages, memory: way.move(memory.whole),
            lambda status: way.move(status.all_rows),
            lambda status: finished(way.move(x), False),
            plan.note_lost,
            (x,),
        )
        work = run(job, state, is_async)
    else:
        return finished(way.move(movable(tensor)), is_async)
    pair.last = work if is_async else None
    return finished(work, is_async)


def _with_note(tensor: torch.Tensor, way: Way, state: State, pair: Pair, kind: Kind) -> NotedWork:
    """A raw tensor, and how those after it travel."""
    old = pair.plans.get(kind)
    if way.is_out:
        codec = _codec_for(tensor, state, kind, old, pair.learners.setdefault(kind, Learner()))
        note = _note(kind, codec).to(tensor.device)
        pair.plans[kind] = _plan(codec if int(note[:_LENGTH_BYTES].view(torch.int64)) else None, tensor, old)
        return NotedWork([way.move(movable(tensor)), way.move(note)], None)
    note = torch.empty(_NOTE_BYTES, dtype=torch.uint8, device=tensor.device)

    def read() -> None:
        pair.plans[kind] = _plan(_read(note, kind), tensor, old)

    return NotedWork([way.move(movable(tensor)), way.move(note)], read)


def _codec_for(
    tensor: torch.Tensor, state: State, kind: Kind, old: Plan | None, learner: Learner[Codec]
) -> Codec | None:
    """Returns the sender's choice. It is None if raw tensors come sooner, or if the rate of the link is not known."""
    learner.has_drifted = old is not None and old.has_lost
    if old is not None and not learner.has_drifted:
        return old.codec
    if learner.is_hopeless or (kind.level == "auto" and (state.link is None or not kind.follows_link)):
        return None
    rows = sample_of(tensor)
    found = kind.learned(rows)
    if found is not None and kind.level == "auto":
        assert state.link is not None
        load = Load(tensor.nbytes, tensor.nbytes, tensor.nbytes)
        found = found if _links.pays(found, _links.rates_of(found, rows, tensor.device), state.link, load) else None
    learner.take(found)
    return found


def _plan(codec: Codec | None, tensor: torch.Tensor, old: Plan | None) -> Plan:
    if codec is None:
        return RAW
    return Plan(codec, _num_pieces(tensor), num_calls=1 if old is None else old.num_calls)


def _num_pieces(tensor: torch.Tensor) -> int:
    """The same on both ranks."""
    return max(1, min(_MOST_PIECES, tensor.nbytes // _PIECE_BYTES))


def _note(kind: Kind, codec: Codec | None) -> torch.Tensor:
    """Its length and the bytes of the kind and the codec, uint8 [_NOTE_BYTES]; a length of 0 where it is too long."""
    content = wire.written((kind, codec))
    note = torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
    if len(content) <= _NOTE_BYTES - _LENGTH_BYTES:
        note[:_LENGTH_BYTES].view(torch.int64).fill_(len(content))
        note[_LENGTH_BYTES : _LENGTH_BYTES + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return note


def _read(note: torch.Tensor, kind: Kind) -> Codec | None:
    """The codec that a note names. ValueError: it is none, or of another kind of tensor than is received."""
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
