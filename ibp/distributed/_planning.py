"""The state of a process group on one rank: the rate of its link, and the plan for each kind of call.

`Collective.plan` (`_exchange.py`) makes plans. With level="auto", tensors are sent coded only if coding is expected to
save time on the group's link. The rate of the link is measured once for each group, with a raw all-gather. All ranks
decide from the same numbers: the time of the slowest rank, and the rates at which rank 0 codes and decodes. If the
caller gives a codec or another level, the rate of the link does not matter.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common import group as _group
from .._common import wire
from .._schemes.learning import Learner
from .._schemes.planes import LEVELS as CODED_LEVELS
from . import _links
from ._codec import Codec, learned
from ._links import Link
from ._messages import Messages, MessageSlots

LEVELS = ("auto", *CODED_LEVELS)
_MOST_LAYOUTS = 64  # A plan keeps at most this many layouts of messages.
# The ranks tell each other whether rows were lost after 8 calls of a kind, after 32 calls, and then after every 64th
# call.
_EARLY_CHECKS, _CALLS_A_CHECK = (8, 32), 64


@wire.sent
class Kind(NamedTuple):
    """The key of a plan: calls of the same kind share one plan. All ranks make the same calls in the same order, so
    they know the same kinds.

    Attributes:
        what: the name of the function.
        numel: the number of elements of the input. 0: this number may differ between ranks.
        dtype: the dtype of the tensors.
        device: the type of the tensors' device.
        level, name: the arguments of the call.
        codec: the fingerprint of the codec that the caller gave. None: the caller gave no codec.
        root: the rank in the group that has the data. -1: each rank has a part of the data.
    """

    what: str
    numel: int
    dtype: torch.dtype
    device: str
    level: str
    name: str
    codec: int | None
    root: int = -1

    @property
    def shared(self) -> tuple:
        """The key of the learner for this kind. Kinds with the same key share a codec."""
        return self.dtype, self.device, self.level, self.name, self.codec

    @property
    def follows_link(self) -> bool:
        """True if the rate of the group's all-gathers predicts how fast calls of this kind are. On the CPU it predicts
        only all-gathers."""
        return self.device != "cpu" or self.what == "all_gather_into_tensor"

    def learned(self, rows: torch.Tensor) -> Codec | None:
        """Learns a codec of the kind's level from sampled rows, uint8 [n, 4096] on the CPU. Returns None if it would
        save too little.

        For level="auto" the codec has level "default". This level saves more bytes than "fast", so it is faster over
        links that are slow enough for coding to pay."""
        return learned(rows, self.dtype, "default" if self.level == "auto" else self.level)


class CallOptions(NamedTuple):
    """The arguments of a collective that say how tensors are coded. `all_gather_into_tensor` describes them."""

    codec: Codec | None
    level: str
    name: str

    def check(self, *tensors: torch.Tensor) -> None:
        """Raises TypeError or ValueError if an option is wrong, and TypeError if one of `tensors` is not a tensor."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor is a {type(tensor).__name__}; wanted a torch.Tensor")
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(f"codec is a {type(self.codec).__name__}; wanted an ibp.distributed.Codec")
        if self.level not in LEVELS:
            raise ValueError(f"level is {self.level!r}; wanted one of {list(LEVELS)}")

    def kind_of(self, what: str, x: torch.Tensor, root: int = -1) -> Kind:
        """Returns the kind of a call with these options. x: the input. what, root: as in `Kind`."""
        fingerprint = None if self.codec is None else self.codec.fingerprint
        return Kind(what, x.numel(), x.dtype, x.device.type, self.level, self.name, fingerprint, root)


@dataclass(eq=False)
class Plan:
    """Says how calls of one kind are made: raw, or coded with a codec in a number of pieces.

    Attributes:
        codec: how tensors are coded. None: calls are raw.
        num_pieces: the number of pieces of a call.
        least: in an all-to-all, messages of fewer than this many bytes are raw.
        is_checked: whether the ranks check from time to time whether messages have lost rows. If so, they learn the
            codec anew.
        messages: the layouts of messages that calls have used.
        num_calls: the number of calls so far.
        has_lost: whether messages that this rank sent or received have lost rows since the codec was learned.
    """

    codec: Codec | None
    num_pieces: int = 1
    least: int = 1
    is_checked: bool = True
    messages: dict[Any, Messages] = field(default_factory=dict)
    num_calls: int = 0
    has_lost: bool = False

    def messages_of(self, payloads: Sequence[int], device: torch.device, least: int = 1) -> Messages:
        """Returns the layout of the messages of a piece. The arguments are those of `Messages`."""
        key = (*payloads, least, device)
        if key not in self.messages:
            if len(self.messages) >= _MOST_LAYOUTS:
                self.messages.clear()
            assert self.codec is not None
            self.messages[key] = Messages(self.codec, payloads, least, device)
        return self.messages[key]

    def is_due(self) -> bool:
        """Counts a call. Returns whether the ranks have to check, before this call, whether any of them has lost rows.
        Such checks are rare, because the host has to wait for them."""
        self.num_calls += 1
        count = self.num_calls - 1
        return self.is_checked and count > 0 and (count in _EARLY_CHECKS or count % _CALLS_A_CHECK == 0)


RAW = Plan(None)  # The plan of calls that are raw.


@dataclass(eq=False)
class Pair:
    """The state of `send`, or of `recv`, between this rank and another rank, for one tag.

    Attributes:
        plans: the plan for each kind of tensor.
        learners: the learner for each kind of tensor. Only the sender has learners.
        last: the work of the last call, which has to be finished before the next call. None: no call has to be
            finished.
    """

    plans: dict[Kind, Plan] = field(default_factory=dict)
    learners: dict[Kind, Learner[Codec]] = field(default_factory=dict)
    last: dist.Work | None = None


class State:
    """The state of a process group on one rank.

    Attributes:
        rank, size: the rank of this process in the group, and the size of the group.
        link: the rate of the group's all-gathers. None: it has not been measured yet.
        plans: the plan for each kind of call.
        learners: the learner for each codec, by `Kind.shared`.
        pairs: the state of each direction of `send` and `recv`, by (whether this rank sends, the other rank, the tag).
    """

    def __init__(self, members: _group.RankGroup) -> None:
        self.rank, self.size = members.rank, members.size
        self.link: Link | None = None
        self.plans: dict[Kind, Plan] = {}
        self.pairs: dict[tuple[bool, int, int], Pair] = {}
        self.learners: defaultdict[tuple, Learner[Codec]] = defaultdict(Learner)
        self._slots: dict[torch.device, MessageSlots] = {}

    def slots(self, device: torch.device) -> MessageSlots:
        """Returns the message slots on a device."""
        if device not in self._slots:
            self._slots[device] = MessageSlots(device)
        return self._slots[device]

    def measure(self, members: _group.RankGroup, refresh: bool = False) -> Link:
        """Returns the rate of the group's all-gathers. Measures it first if it is not known yet. A collective call.

        Args:
            refresh: whether to measure the rate even if it is known.
        """
        if self.link is None or refresh:
            self.link = _links.measure(members)
        return self.link

    def forget(self, kind: Kind) -> None:
        """Drops the plan of a kind, so that the next call of this kind learns the codec anew. All ranks must drop the
        plan before the same call."""
        self.learners[kind.shared].has_drifted = True
        self.plans.pop(kind, None)


def measure_link(group: dist.ProcessGroup | None = None, *, refresh: bool = False) -> Link:
    """Measures how fast the all-gathers of a group are. With level="auto" this rate decides whether tensors travel
    coded. If `measure_link` is not called, the first collective that needs the rate measures it. A collective call.

    Example:
        >>> # on each rank of a group
        >>> ibp.distributed.measure_link().gbps > 0
        True

    Args:
        group: a process group of torch.distributed. None: the default group.
        refresh: whether to measure the rate even if it is known.

    Returns:
        The rate. It is the same on all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not take part.
    """
    return state_of(group).measure(_group.RankGroup(group), refresh)


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, State] = weakref.WeakKeyDictionary()


def state_of(group: dist.ProcessGroup | None) -> State:
    """Returns the state of a group. None: the default group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    key = dist.group.WORLD if group is None and dist.is_initialized() else group
    state = _states.get(key) if isinstance(key, dist.ProcessGroup) else None
    if state is None:
        state = State(_group.RankGroup(group))
        assert key is not None  # RankGroup raises if there is no default group.
        _states[key] = state
    return state
