"""Decides how calls are made. The first part measures how fast tensors travel between ranks and how fast they are
coded, and decides whether coding pays. The second part has the state of a process group on one rank: the rate of its
link, and the plan for each kind of call. `Collective.plan` (`_exchange.py`) makes the plans of collectives; the
receiver of a `send` learns the plan from a note.

With level="auto", tensors are sent coded only if coding is expected to save time on the group's link. The rate of the
link is measured once for each group, with a raw all-gather. All ranks decide from the same numbers: the time of the
slowest rank, and the rates at which rank 0 codes and decodes. If the caller gives a codec or another level, the rate of
the link does not matter.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common import wire
from .._common.wire import RankGroup
from .._machine import calibration
from .._machine.calibration import timed_once
from .._rows.codebook import coder_rates
from .._rows.learning import Learner
from .._rows.planes import LEVELS as CODED_LEVELS
from ._messages import Codec, MessageBuffer, MessageBuffers, Messages, learned, shares_of

# ---- rates ---------------------------------------------------------------------------------------------------------

_MEASURED_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # Number of bytes that each rank sends in a call that is timed.
# A measurement times _REPEATS repeats and takes the fastest. Each repeat makes _IN_A_ROW calls one after the other.
_REPEATS, _IN_A_ROW = 3, 4
# Coding is not expected to pay on a link that is faster than this share of the break-even rate, at which coding and
# decoding take as long as the time that they save. Below this rate, the coders and the link already compete for
# multiprocessors and memory. Between two H200 on NVLink, coded all-gathers of 256 MiB would have been as fast as raw
# ones at 0.44 (int64 below 1,000) to 0.77 (FP32 gradients) of the break-even rate, if the time that a coded call took
# in addition to its transfer were the same at that rate (collectives.csv).
_CROWDED_SHARE = 0.45
_LEAST_GAIN = 1.1  # Tensors travel coded if this is expected to be at least this many times as fast as raw.
# Time in seconds that a coded call takes to begin and to end, in addition to the time of torch's call.
_CALL_S = 40e-6
# The same for calls that the host does not wait for. This time is longer, because the host does other work between the
# calls.
_LATE_S = 4e-4
# Before each piece after the first, the link is idle for this many seconds, until the host has queued the piece.
_GAP_S = 80e-6
_MOST_PIECES = 16  # A call has at most this many pieces.
_MOST_LEAST_BYTES = 1 << 30  # `least_bytes` does not search beyond this many bytes.
# The rate of coding on a CPU is measured while only one rank codes. It is divided by this number, because several ranks
# share the CPU.
_CODING_AT_ONCE = 2


@dataclass(frozen=True)
class Link:
    """The rate of a group's all-gathers.

    Example:
        >>> link = ibp.distributed.Link(gbps=12.5)
        >>> f"{4e9 / (link.gbps * 1e9):.2f} s"  # for 4 GB
        '0.32 s'

    Attributes:
        gbps: the rate at which bytes arrive at each rank, in GB/s (10^9 bytes per second).
    """

    gbps: float


class Load(NamedTuple):
    """The work of a call on one rank.

    Attributes:
        coded: the number of original (uncoded) bytes that the rank codes.
        moved: the number of original bytes that arrive at the rank.
        decoded: the number of original bytes that the rank decodes.
        is_known_to_fit: True if the caller checks, before each later call of the same `Kind`, that all rows fit in
            their messages. The host then does not wait for these later calls.
    """

    coded: int
    moved: int
    decoded: int
    is_known_to_fit: bool = False


@dataclass(frozen=True)
class Rates:
    """Says what a codec saves on a device, and how fast the codec is there.

    Attributes:
        savings: the fraction of a large tensor's bytes that coding saves (`Codec.savings`).
        encode_gbps, decode_gbps: the rates of encoding and decoding in GB/s of original (uncoded) bytes, on all
            multiprocessors of a GPU, or on a CPU.
        hides: whether one message travels while another message is coded. It is False on a CPU, where the same cores
            code and move bytes.
    """

    savings: float
    encode_gbps: float
    decode_gbps: float
    hides: bool = True

    def num_pieces(self, load: Load) -> int:
        """Returns the number of pieces that makes a call fastest. Only the coding of the first piece and the decoding
        of the last piece happen while nothing travels. So the longer coding takes, the more pieces are worth their
        cost."""
        most = max(3, min(_MOST_PIECES, 1 + round(math.sqrt(self._coding_s(load) / _GAP_S))))
        return min((1, 2, most), key=lambda count: self._exposed_s(load, count) + count * _GAP_S)

    def gain(self, link: Link, load: Load) -> float:
        """Returns the expected time of a raw call divided by the expected time of a coded call.

        Returns 0 if the link is so fast that coding and decoding take about as long as the time that they save on the
        link. The coders and the link then compete for multiprocessors and memory, and this model does not cover that.
        """
        if link.gbps >= _CROWDED_SHARE * self.savings / (1 / self.encode_gbps + 1 / self.decode_gbps):
            return 0.0
        count = self.num_pieces(load)
        moving_s = load.moved * (1 - self.savings) / link.gbps / 1e9
        host_s = (_LATE_S if load.is_known_to_fit else _CALL_S) + count * _GAP_S
        return load.moved / link.gbps / 1e9 / (moving_s + self._exposed_s(load, count) + host_s)

    def pays(self, link: Link, load: Load) -> bool:
        """Returns whether a coded call is expected to be at least _LEAST_GAIN times as fast as a raw call."""
        return self.gain(link, load) >= _LEAST_GAIN

    def least_bytes(self, link: Link, start: int, count: int) -> int:
        """Returns the smallest size in bytes of a message of an all-to-all for which coding pays, among the sizes
        start, 2 * start, 4 * start, ... If coding pays for none of these sizes below _MOST_LEAST_BYTES, returns the
        first size that is at least _MOST_LEAST_BYTES.

        Args:
            count: the number of messages that a rank sends, which is also the number that it receives.
        """
        size = start
        while size < _MOST_LEAST_BYTES and not self.pays(link, Load(size * count, size * count, size * count)):
            size *= 2
        return size

    def _coding_s(self, load: Load) -> float:
        """Returns the time in seconds that coding and decoding take."""
        return load.coded / self.encode_gbps / 1e9 + load.decoded / self.decode_gbps / 1e9

    def _exposed_s(self, load: Load, count: int) -> float:
        """Returns the part of the time of coding and decoding, in seconds, during which nothing travels. If there are
        several pieces and the device hides coding, this is the time to code the first piece and to decode the last
        piece. Otherwise it is all of the time."""
        if count == 1 or not self.hides:
            return self._coding_s(load)
        first, last = shares_of(count)
        return load.coded * first / self.encode_gbps / 1e9 + load.decoded * last / self.decode_gbps / 1e9


def measure(members: RankGroup) -> Link:
    """Measures how fast a group's all-gathers are. Returns the rate on the slowest rank; the result is the same on all
    ranks. A collective call."""
    size = _MEASURED_BYTES[members.device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=members.device)
    out = torch.empty(members.size * size, dtype=torch.uint8, device=members.device)

    def row() -> None:
        for _ in range(_IN_A_ROW):
            raw_all_gather(out, sent, group=members.process_group)

    raw_all_gather(out, sent, group=members.process_group)
    times = []
    for _ in range(_REPEATS):
        dist.barrier(group=members.process_group)
        times.append(timed_once(row, members.device)[1] / _IN_A_ROW)
    slowest = max(members.together("measure_link", lambda: min(times)))
    return Link(max(1, members.size - 1) * size / slowest / 1e9)


def raw_all_gather(out: torch.Tensor, x: torch.Tensor, **options: object) -> dist.Work | None:
    """Calls torch's all-gather by its new name, or by its old name if this torch does not have the new one."""
    gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, **options)


def rates_of(codec: Codec, rows: torch.Tensor, device: torch.device) -> Rates:
    """Returns the rates of a codec on a device. The rates for a GPU come from the calibration that is in force. The
    rates for the CPU are measured.

    Args:
        rows: uint8 [n, 4096] on the CPU, the rows with which to measure.
    """
    if device.type == "cuda":
        known = coder_rates(codec.codebook, calibration.in_force(device))
        return Rates(codec.savings, known.encode_gbps, known.decode_gbps)
    return _measured(codec, rows)


def _measured(codec: Codec, rows: torch.Tensor) -> Rates:
    """Measures the rates of a codec on the CPU with `rows`, uint8 [n, 4096]. Returns rates of 1 GB/s if n is 0."""
    if not len(rows):
        return Rates(codec.savings, 1.0, 1.0)
    messages = Messages(codec, [rows.numel()], 0, rows.device)
    buffer, status = MessageBuffer(torch.empty(messages.num_bytes, dtype=torch.uint8, device="cpu")), messages.status()
    data = rows.reshape(-1)
    out = torch.empty_like(data)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        messages.code(buffer, 0, data, status, 0)
        coded = time.perf_counter()
        messages.decode(buffer, 0, out, status, 0)
        times.append((coded - start, time.perf_counter() - coded))
    encode_s, decode_s = (min(of) for of in zip(*times))
    encode_gbps, decode_gbps = (rows.numel() / seconds / 1e9 for seconds in (encode_s, decode_s))
    return Rates(codec.savings, encode_gbps / _CODING_AT_ONCE, decode_gbps / _CODING_AT_ONCE, hides=False)


# ---- plans and the state of a group --------------------------------------------------------------------------------

LEVELS = ("auto", *CODED_LEVELS)
NOTE_BYTES = 1 << 14  # Size of a note in bytes. If a codec does not fit in it, the note says that tensors travel raw.
_LENGTH_BYTES = 8  # A note begins with the length of its content in bytes, an int64.
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
        root: the rank in the group that alone sends tensors, or alone receives them. -1: there is no such rank.
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
class Channel:
    """Holds the state of the `send` calls, or of the `recv` calls, between this rank and another rank, for one tag.

    Attributes:
        plans: the plan for each kind of tensor.
        learners: the learner for each kind of tensor. Only the sender has learners.
        last: the work of the last call, which has to be finished before the next call. None: no call has to be
            finished.
    """

    plans: dict[Kind, Plan] = field(default_factory=dict)
    learners: dict[Kind, Learner[Codec]] = field(default_factory=dict)
    last: dist.Work | None = None


def note_of(kind: Kind, codec: Codec | None) -> torch.Tensor:
    """Returns a note, uint8 [NOTE_BYTES] on the CPU. The note has the length of its content, followed by the content:
    the kind and the codec. If the content does not fit, the length is 0."""
    content = wire.written((kind, codec))
    note = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device="cpu")
    if len(content) <= NOTE_BYTES - _LENGTH_BYTES:
        note[:_LENGTH_BYTES].view(torch.int64).fill_(len(content))
        note[_LENGTH_BYTES : _LENGTH_BYTES + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return note


def codec_in(note: torch.Tensor, kind: Kind) -> Codec | None:
    """Returns the codec in a note, or None if tensors travel raw.

    Args:
        kind: the kind of tensor that the receiver expects.

    Raises:
        ValueError: the bytes are not a note, or the sender's tensor is of another kind.
    """
    content = note.cpu()
    length = int(content[:_LENGTH_BYTES].view(torch.int64))
    if not 0 < length <= NOTE_BYTES - _LENGTH_BYTES:
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


class GroupState:
    """The state of a process group on one rank.

    Attributes:
        rank, size: the rank of this process in the group, and the size of the group.
        link: the rate of the group's all-gathers. None: it has not been measured yet.
        plans: the plan for each kind of call.
        learners: the learner for each codec, by `Kind.shared`.
        channels: the channels of `send` and `recv`, by (whether this rank sends, the other rank, the tag).
    """

    def __init__(self, members: RankGroup) -> None:
        self.rank, self.size = members.rank, members.size
        self.link: Link | None = None
        self.plans: dict[Kind, Plan] = {}
        self.channels: dict[tuple[bool, int, int], Channel] = {}
        self.learners: defaultdict[tuple, Learner[Codec]] = defaultdict(Learner)
        self._buffers: dict[torch.device, MessageBuffers] = {}

    def buffers(self, device: torch.device) -> MessageBuffers:
        """Returns the message buffers on a device."""
        if device not in self._buffers:
            self._buffers[device] = MessageBuffers(device)
        return self._buffers[device]

    def measure(self, members: RankGroup, refresh: bool = False) -> Link:
        """Returns the rate of the group's all-gathers. Measures it first if it is not known yet. A collective call.

        Args:
            refresh: whether to measure the rate even if it is known.
        """
        if self.link is None or refresh:
            self.link = measure(members)
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
    return state_of(group).measure(RankGroup(group), refresh)


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


def state_of(group: dist.ProcessGroup | None) -> GroupState:
    """Returns the state of a group. None: the default group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    key = dist.group.WORLD if group is None and dist.is_initialized() else group
    state = _states.get(key) if isinstance(key, dist.ProcessGroup) else None
    if state is None:
        state = GroupState(RankGroup(group))
        assert key is not None  # RankGroup raises if there is no default group.
        _states[key] = state
    return state
