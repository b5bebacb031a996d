"""Which calls travel coded, and how: agreed on by all ranks of a group when they first make a call of a kind."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common import group as _group
from .._common import wire
from .._schemes.kinds import Learner
from .._schemes.planes.learning import LEVELS as CODED_LEVELS
from . import _links
from ._codec import Codec, learned, sample_of
from ._links import Link, Load
from ._messages import Messages
from ._slots import MessageSlots

LEVELS = ("auto", *CODED_LEVELS)
LEAST_BYTES = 1 << 20  # that a rank codes: less is never worth it
_SAMPLED_ROWS = 512  # of all ranks together, at least
_MOST_PLANS = 4096
_EARLY_CHECKS, _CALLS_A_CHECK = (8, 32), 64  # calls after which, and in which distance, ranks compare what was lost
_WORTH_TRYING, _MOST_TRIED = 0.9, 3  # the least gain by the model, and the most ways to code, that are tried out
_LEAST_TRIED_GAIN, _NEAR_BEST = 1.05, 1.01  # that were measured: calls scatter
_LATE_S = 4e-4  # that the host is later with a coded call than with torch's, about, with other work between them


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


class Call(NamedTuple):
    """One call."""

    data: torch.Tensor  # what is sent
    load: Load  # bytes that are coded, moved and decoded
    check: Callable[[], None]  # raises what is wrong with the arguments
    codec: Codec | None  # that was given; None: it is learned
    # does the call by a plan, as often as that is asked for; None: it cannot be tried out
    attempt: Callable[[Plan], object] | None = None


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

    def note_lost(self) -> None:
        self.has_lost = True

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
        self._tried: dict[tuple, int] = {}

    def slots(self, device: torch.device) -> MessageSlots:
        if device not in self._slots:
            self._slots[device] = MessageSlots(device)
        return self._slots[device]

    def measure(self, members: _group.RankGroup, refresh: bool = False) -> Link:
        """How fast the group is, measured once. A collective call."""
        if self.link is None or refresh:
            self.link = _links.measure(members)
        return self.link

    def plan(self, group: dist.ProcessGroup | None, kind: Kind, call: Call) -> Plan:
        """The plan of a call. Collective where the kind of call is new, or due to be checked, on the CPU, and where a
        codec is given, which ranks could mix up."""
        if kind.device == "cpu" or kind.codec is not None or dist.get_debug_level() == dist.DebugLevel.DETAIL:
            self._compare(_group.RankGroup(group), kind, call)
        known = self.plans.get(kind)
        if known is None:
            if len(self.plans) >= _MOST_PLANS:  # on all ranks at the same call
                self.plans.clear()
            self.plans[kind] = plan = self._agree(_group.RankGroup(group), kind, call)
            return plan
        plan = known
        call.check()
        if plan.codec is not None and plan.is_due():
            members = _group.RankGroup(group)
            if any(members.together(kind.what, lambda: known.has_lost)):
                self.forget(kind)
                self.plans[kind] = plan = self._agree(members, kind, call, plan.num_calls)
        return plan

    def forget(self, kind: Kind) -> None:
        """The codec of calls of a kind is learned anew. On all ranks at the same time."""
        self._learners[_key_of(kind)].has_drifted = True
        self.plans.pop(kind, None)

    def _compare(self, members: _group.RankGroup, kind: Kind, call: Call) -> None:
        """Raises on all ranks unless they make the same call by the same plan. Without this check, gloo would end a
        process that is sent more bytes than it expects, and NCCL would wait for the missing ones."""
        try:
            call.check()
            mine = _number_of(kind, self.plans.get(kind))
        except (TypeError, ValueError):
            mine = 0
        numbers = torch.empty(self.size, dtype=torch.int64, device=members.device)
        with _group.all_taking_part():
            sent = torch.tensor([mine], dtype=torch.int64, device=members.device)
            _links.raw_all_gather(numbers, sent, group=members.process_group)
        if mine and numbers.tolist() == [mine] * self.size:
            return
        self._same_call(members, kind, call)
        raise RuntimeError(f"{kind.what}: the ranks have not made the same calls before this one")

    def _same_call(self, members: _group.RankGroup, kind: Kind, call: Call) -> None:
        """Raises on all ranks unless they make the same call."""

        def offer() -> dict[str, Any]:
            call.check()
            return kind._asdict()

        _group.same_on_all(kind.what, members.together(kind.what, offer))

    def _agree(self, members: _group.RankGroup, kind: Kind, call: Call, num_calls: int = 1) -> Plan:
        """A plan that all ranks have. Raises on all, if one of them calls otherwise."""
        self._same_call(members, kind, call)
        link = self.measure(members) if kind.level == "auto" and call.codec is None else None
        has_data = kind.root in (-1, members.rank)
        count = _SAMPLED_ROWS if kind.root >= 0 else max(16, _SAMPLED_ROWS // members.size)
        samples = members.together(kind.what, lambda: sample_of(call.data, count) if has_data else None)
        rows = torch.cat([sample for sample in samples if sample is not None])
        offers = members.from_rank(0, kind.what, lambda: self._offers(kind, call, link, rows))
        is_checked = call.codec is None
        plans = [Plan(codec, count, least, is_checked, num_calls=num_calls) for codec, count, least in offers]
        if link is not None and plans and call.attempt is not None:
            plans = self._fastest(members, kind, call, link, plans)
        codec = plans[0].codec if plans else None
        learner = self._learners[_key_of(kind)]
        if learner.learned_at == 0 or learner.has_drifted:
            learner.take(codec)
        if codec is None:
            return RAW if kind.device != "cpu" else Plan(None)  # on the CPU the next call is compared too
        return plans[0]

    def _offers(self, kind: Kind, call: Call, link: Link | None, rows: torch.Tensor) -> list[tuple[Codec, int, int]]:
        """(codec, number of pieces, bytes that a message has at least) of ways to make a call of a kind; none where raw
        tensors come sooner. On one rank, which tells the others."""
        device, load = call.data.device, call.load
        if link is not None and call.attempt is None and kind.device == "cpu":
            return []  # the link is that of all-gathers, and others go by other ways there
        if link is None or call.attempt is None:
            codec = self._codec_for(kind, call, link, rows)
            if codec is None:
                return []
            rates = _links.rates_of(codec, rows, device)
            least = 1 if link is None else _links.least_bytes(codec, rates, link, LEAST_BYTES, self.size - 1)
            return [(codec, _links.num_pieces(rates, load), least)]
        if self._learners[_key_of(kind)].is_hopeless:
            return []
        found = []
        for codec in codecs_for(kind, rows):
            rates = _links.rates_of(codec, rows, device)
            for count in _links.piece_counts(rates, load):
                found.append((_links.gain(codec, rates, link, load, count), (codec, count, 1)))
        found = sorted((item for item in found if item[0] >= _WORTH_TRYING), key=lambda item: -item[0])
        return [offer for _, offer in found[:_MOST_TRIED]]

    def _fastest(self, members: _group.RankGroup, kind: Kind, call: Call, link: Link, plans: list[Plan]) -> list[Plan]:
        """The fastest of the plans, found by making the call; none where torch's own is about as fast. Calls that are
        alike are tried out once. A collective call."""
        codec, attempt = plans[0].codec, call.attempt
        assert codec is not None and attempt is not None
        key = *kind._replace(name=""), call.load.is_known_to_fit, round(100 * codec.savings)
        if key not in self._tried:
            times = [
                _links.seconds(members, functools.partial(attempt, plan), *_links.calls_to_try(link, call.load))
                for plan in (RAW, *plans)
            ]
            raw_s, *coded_s = (max(of) for of in zip(*members.together(kind.what, lambda: times)))
            near = [k for k in range(len(plans)) if coded_s[k] <= min(coded_s) * _NEAR_BEST]
            best = min(near, key=lambda k: plans[k].num_pieces)  # the host has the least to do
            late_s = _LATE_S if call.load.is_known_to_fit else 0.0
            self._tried[key] = best if coded_s[best] * _LEAST_TRIED_GAIN + late_s < raw_s else -1
        best = self._tried[key]
        return [plans[min(best, len(plans) - 1)]] if best >= 0 else []

    def _codec_for(self, kind: Kind, call: Call, link: Link | None, rows: torch.Tensor) -> Codec | None:
        if call.codec is not None:
            return call.codec
        learner = self._learners[_key_of(kind)]
        if learner.is_hopeless:
            return None
        if learner.learned_at and not learner.has_drifted and kind.level != "auto":
            return learner.found
        return choose(kind, rows, call.data.device, call.load, link)


def codecs_for(kind: Kind, rows: torch.Tensor) -> list[Codec]:
    """Of each level that may be used, for tensors with such rows, uint8 [n, 4096] on the CPU."""
    levels = CODED_LEVELS if kind.level == "auto" else (kind.level,)
    return [codec for level in levels if (codec := learned(rows, kind.dtype, level)) is not None]


def choose(kind: Kind, rows: torch.Tensor, device: torch.device, load: Load, link: Link | None) -> Codec | None:
    """A codec for tensors with such rows, uint8 [n, 4096] on the CPU; None where raw ones come sooner. link: None:
    whether coding pays is not asked."""
    codecs = codecs_for(kind, rows)
    if link is None or not codecs:
        return codecs[0] if codecs else None
    gains = [_links.gain(codec, _links.rates_of(codec, rows, device), link, load) for codec in codecs]
    best = max(range(len(codecs)), key=gains.__getitem__)
    return codecs[best] if _links.pays(gains[best]) else None


def _number_of(kind: Kind, plan: Plan | None) -> int:
    """What differs where calls or their plans do: 1 to 2^63 - 1."""
    how = None if plan is None else (plan.codec and plan.codec.fingerprint, plan.num_pieces, plan.num_calls)
    digest = hashlib.blake2b(repr((kind, how)).encode(), digest_size=8).digest()
    return max(1, int.from_bytes(digest, "little") >> 1)


def _key_of(kind: Kind) -> tuple:
    """What kinds that share a codec have in common."""
    return kind.dtype, kind.device, kind.level, kind.name, kind.codec


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
