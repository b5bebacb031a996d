"""Which calls travel coded: agreed on by all ranks of a group when they first make a call of a kind.

With level="auto", the rate of a raw all-gather decides, which a group times once: the slowest rank's time counts, and
rank 0 says how fast it codes, so that all ranks decide by the same numbers. A level or a codec overrules that.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common import group as _group
from .._common import wire
from .._schemes.learning import Learner
from .._schemes.planes import LEVELS as CODED_LEVELS
from . import _links
from ._codec import Codec, learned, sample_of
from ._links import Link, Load
from ._messages import Messages, MessageSlots

LEVELS = ("auto", *CODED_LEVELS)
LEAST_BYTES = 1 << 20  # that a rank codes: less is never worth it
_SAMPLED_ROWS = 512  # of all ranks together, at least
_MOST_PLANS = 4096
_MOST_LAYOUTS = 64  # A plan keeps at most this many layouts of messages.
_EARLY_CHECKS, _CALLS_A_CHECK = (8, 32), 64  # calls after which, and in which distance, ranks compare what was lost


@wire.sent
class Kind(NamedTuple):
    """Calls of one kind have one plan. All ranks make the same calls in the same order, and so know the same kinds."""

    what: str  # the function
    numel: int  # of the input; 0 where ranks differ in it
    dtype: torch.dtype  # of the tensors
    device: str  # type of their device
    # level, name: as given
    level: str
    name: str
    codec: int | None  # fingerprint of the codec that was given, or None
    root: int = -1  # the rank in the group that has the data; -1: all

    @property
    def shared(self) -> tuple:
        """What kinds that share a codec have in common."""
        return self.dtype, self.device, self.level, self.name, self.codec

    @property
    def follows_link(self) -> bool:
        """Whether the rate of all-gathers says how fast such calls are. On the CPU others take other ways."""
        return self.device != "cpu" or self.what == "all_gather_into_tensor"

    def learned(self, rows: torch.Tensor) -> Codec | None:
        """Returns a codec for tensors with such rows, uint8 [n, 4096] on the CPU; None if it would save too little.
        Where a link is slow enough for coding to pay, "default" is faster than "fast", because it saves more."""
        return learned(rows, self.dtype, "default" if self.level == "auto" else self.level)


class CallOptions(NamedTuple):
    """How tensors are coded: arguments of `ibp.distributed.all_gather_into_tensor`."""

    codec: Codec | None
    level: str
    name: str

    def check(self, *tensors: torch.Tensor) -> None:
        """Raises TypeError, ValueError for wrong tensors, and for arguments that are no tensors."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor is a {type(tensor).__name__}; wanted a torch.Tensor")
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(f"codec is a {type(self.codec).__name__}; wanted an ibp.distributed.Codec")
        if self.level not in LEVELS:
            raise ValueError(f"level is {self.level!r}; wanted one of {list(LEVELS)}")

    def kind_of(self, what: str, x: torch.Tensor, root: int = -1) -> Kind:
        fingerprint = None if self.codec is None else self.codec.fingerprint
        return Kind(what, x.numel(), x.dtype, x.device.type, self.level, self.name, fingerprint, root)


@dataclass(eq=False)
class Plan:
    """How calls of a kind are made."""

    codec: Codec | None  # None: by torch
    num_pieces: int = 1  # of a call
    least: int = 1  # bytes of a message that is coded, where ranks send each other as much as they like: less is raw
    is_checked: bool = True  # whether the codec is learned anew where messages have lost rows
    messages: dict[Any, Messages] = field(default_factory=dict)  # of the pieces, by what they carry
    num_calls: int = 0  # so far
    has_lost: bool = False  # whether messages of this rank, or to it, have lost rows since the codec was learned

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
        """Whether the ranks tell each other now whether rows were lost: seldom, as the host waits for that."""
        self.num_calls += 1
        count = self.num_calls - 1
        return self.is_checked and count > 0 and (count in _EARLY_CHECKS or count % _CALLS_A_CHECK == 0)


RAW = Plan(None)


@dataclass(eq=False)
class Pair:
    """What is known of tensors from one rank to another. plans, learners: of kinds of tensors; learners of the sender
    alone; last: of a call that is to be finished before the next one."""

    plans: dict[Kind, Plan] = field(default_factory=dict)
    learners: dict[Kind, Learner[Codec]] = field(default_factory=dict)
    last: dist.Work | None = None


class State:
    """What is known of a process group."""

    def __init__(self, members: _group.RankGroup) -> None:
        # rank, size: of this process in the group, of the group
        self.rank, self.size = members.rank, members.size
        self.link: Link | None = None  # how fast it is; None: not measured yet
        self.plans: dict[Kind, Plan] = {}  # of kinds of calls
        self.pairs: dict[tuple[bool, int, int], Pair] = {}  # of ways from and to other ranks
        self._learners: defaultdict[tuple, Learner[Codec]] = defaultdict(Learner)
        self._slots: dict[torch.device, MessageSlots] = {}

    def slots(self, device: torch.device) -> MessageSlots:
        if device not in self._slots:
            self._slots[device] = MessageSlots(device)
        return self._slots[device]

    def measure(self, members: _group.RankGroup, refresh: bool = False) -> Link:
        """Returns how fast the group is, which is measured once. A collective call."""
        if self.link is None or refresh:
            self.link = _links.measure(members)
        return self.link

    def plan(
        self,
        group: dist.ProcessGroup | None,
        kind: Kind,
        x: torch.Tensor,
        load: Load,
        codec: Codec | None,
        check: Callable[[], None],
    ) -> Plan:
        """Returns the plan of a call that sends x. It is a collective call if the kind is new, or due to be checked, on
        the CPU, and if a codec is given, which ranks could mix up. check: raises what is wrong with the arguments."""
        known, is_detailed = self.plans.get(kind), dist.get_debug_level() == dist.DebugLevel.DETAIL
        if known is None or kind.device == "cpu" or codec is not None or is_detailed:
            self._compare(_group.RankGroup(group), kind, check)
        else:
            check()
        num_calls = 1
        if known is not None:
            if known.codec is None or not known.is_due():
                return known
            if not any(_group.RankGroup(group).together(kind.what, lambda: known.has_lost)):
                return known
            self.forget(kind)
            num_calls = known.num_calls
        if len(self.plans) >= _MOST_PLANS:  # on all ranks at the same call
            self.plans.clear()
        self.plans[kind] = plan = self._agree(_group.RankGroup(group), kind, x, load, codec, num_calls)
        return plan

    def forget(self, kind: Kind) -> None:
        """Lets the codec of calls of a kind be learned anew. All ranks call it at the same time."""
        self._learners[kind.shared].has_drifted = True
        self.plans.pop(kind, None)

    def _compare(self, members: _group.RankGroup, kind: Kind, check: Callable[[], None]) -> None:
        """Raises on all ranks unless they make the same call by the same plan. Without this check, gloo would end a
        process that is sent more bytes than it expects, and NCCL would wait for the missing ones."""
        try:
            check()
            plan = self.plans.get(kind)
            how = None if plan is None else (plan.codec and plan.codec.fingerprint, plan.num_pieces, plan.num_calls)
            digest = hashlib.blake2b(repr((kind, how)).encode(), digest_size=8).digest()
            mine = max(1, int.from_bytes(digest, "little") >> 1)
        except (TypeError, ValueError):
            mine = 0
        numbers = torch.empty(self.size, dtype=torch.int64, device=members.device)
        with _group.all_taking_part():
            sent = torch.tensor([mine], dtype=torch.int64, device=members.device)
            _links.raw_all_gather(numbers, sent, group=members.process_group)
        if mine and numbers.tolist() == [mine] * self.size:
            return

        def offer() -> dict[str, Any]:
            check()
            return kind._asdict()

        _group.same_on_all(kind.what, members.together(kind.what, offer))
        raise RuntimeError(f"{kind.what}: the ranks have not made the same calls before this one")

    def _agree(
        self, members: _group.RankGroup, kind: Kind, x: torch.Tensor, load: Load, codec: Codec | None, num_calls: int
    ) -> Plan:
        """Returns a plan that all ranks have: rank 0 learns a codec from samples of all ranks, and says whether coding
        pays. A collective call."""
        link = self.measure(members) if kind.level == "auto" and codec is None else None
        has_data = kind.root in (-1, members.rank)
        count = _SAMPLED_ROWS if kind.root >= 0 else max(16, _SAMPLED_ROWS // members.size)
        samples = members.together(kind.what, lambda: sample_of(x, count) if has_data else None)
        rows, learner = torch.cat([sample for sample in samples if sample is not None]), self._learners[kind.shared]
        is_due = learner.learned_at == 0 or learner.has_drifted

        def offer() -> tuple[Codec | None, int, int]:
            """The codec, in how many pieces calls are divided (0: they are raw), and the least bytes of a message."""
            found = codec
            if codec is None and not learner.is_hopeless:
                found = kind.learned(rows) if is_due or kind.level == "auto" else learner.found
            if found is None:
                return None, 0, 1
            rates = _links.rates_of(found, rows, x.device)
            if link is None:
                return found, _links.num_pieces(rates, load), 1
            if not (kind.follows_link and _links.pays(found, rates, link, load)):
                return found, 0, 1
            least = _links.least_bytes(found, rates, link, LEAST_BYTES, self.size - 1)
            return found, _links.num_pieces(rates, load), least

        found, num_pieces, least = members.from_rank(0, kind.what, offer)
        if is_due:
            learner.take(found)
        if num_pieces == 0:
            return RAW if kind.device != "cpu" else Plan(None)  # on the CPU the next call is compared too
        return Plan(found, num_pieces, least, is_checked=codec is None, num_calls=num_calls)


def measure_link(group: dist.ProcessGroup | None = None, *, refresh: bool = False) -> Link:
    """Measures how fast all-gathers of a group are, for the choices of level="auto". The first call that needs the
    result measures it, once. A collective call.

    Example:
        >>> # on each rank of a group
        >>> ibp.distributed.measure_link().gbps > 0
        True

    Args:
        group: of torch.distributed; None: the default one.
        refresh: measure again.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not take part.
    """
    return state_of(group).measure(_group.RankGroup(group), refresh)


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, State] = weakref.WeakKeyDictionary()


def state_of(group: dist.ProcessGroup | None) -> State:
    """RuntimeError: torch.distributed is not initialised. ValueError: this process is not in the group."""
    key = dist.group.WORLD if group is None and dist.is_initialized() else group
    state = _states.get(key) if isinstance(key, dist.ProcessGroup) else None
    if state is None:
        state = State(_group.RankGroup(group))
        assert key is not None  # else there is no group, which was said
        _states[key] = state
    return state
