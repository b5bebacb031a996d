"""How fast tensors travel between ranks, and when coding them pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._common.group import RankGroup
from .._machine import calibration
from .._machine.timing import timed_once
from .._schemes.codebook import coder_rates
from ._codec import Codec
from ._messages import Messages, Part, Slot, shares_of

_MEASURED_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # that each rank sends
_REPEATS, _IN_A_ROW = 3, 4
_LEAST_GAIN = 1.1  # coding has to be so much faster by the model
_CALL_S = 40e-6  # that a coded call takes longer to begin and end than torch's, about
_LATE_S = 4e-4  # the same, for calls that the host does not wait for: it has other work between them
_GAP_S = 80e-6  # what the link loses, about, at each piece after the first, which the host queues while others move
_MOST_PIECES = 16
_MOST_LEAST_BYTES = 1 << 30
_CODING_AT_ONCE = 2  # ranks on a machine's CPU, where one alone was measured


@dataclass(frozen=True)
class Link:
    """What an all-gather of a group moves.

    Example:
        >>> link = ibp.distributed.Link(gbps=12.5)
        >>> f"{4e9 / (link.gbps * 1e9):.2f} s"  # for 4 GB
        '0.32 s'

    Attributes:
        gbps: bytes that arrive at a rank, 10^9 a second.
    """

    gbps: float


@dataclass(frozen=True)
class Rates:
    """Of the coder: GB/s of original bytes, with all multiprocessors. hides: whether it works beside the link; a CPU
    moves bytes by the same cores."""

    encode_gbps: float
    decode_gbps: float
    hides: bool = True


class Load(NamedTuple):
    """What a call is to a rank: original bytes that it codes, that arrive, and that it decodes. is_known_to_fit: the
    host does not wait for the call."""

    coded: int
    moved: int
    decoded: int
    is_known_to_fit: bool = False


def measure(members: RankGroup) -> Link:
    """Returns how fast all-gathers of a group are, by its slowest rank. A collective call: all ranks get the same."""
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
    """torch's own, by its new name or the old one."""
    gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, **options)


def rates_of(codec: Codec, rows: torch.Tensor, device: torch.device) -> Rates:
    """The coder's, from the calibration in force, or on the CPU measured with some rows."""
    if device.type == "cuda":
        known = coder_rates(codec.codebook, calibration.in_force(device))
        return Rates(known.encode_gbps, known.decode_gbps)
    return _measured(codec, rows)


def num_pieces(rates: Rates, load: Load) -> int:
    """Returns in how many pieces a call is divided: the more coding there is to hide behind the link, the more."""
    most = max(3, min(_MOST_PIECES, 1 + round(math.sqrt(_coding_s(rates, load) / _GAP_S))))
    return min((1, 2, most), key=lambda count: _exposed_s(rates, load, count) + count * _GAP_S)


def _exposed_s(rates: Rates, load: Load, count: int) -> float:
    """Seconds of coding and decoding that `count` pieces do not hide: coding the first, and decoding the last one."""
    if count == 1 or not rates.hides:
        return _coding_s(rates, load)
    shares = shares_of(count)
    return load.coded * shares[0] / rates.encode_gbps / 1e9 + load.decoded * shares[-1] / rates.decode_gbps / 1e9


def gain(codec: Codec, rates: Rates, link: Link, load: Load) -> float:
    """Returns how many times as fast as a raw call a coded one is expected to be. It is 0 if the link is so fast that
    coding hides behind it only in part: the coders and the link then take multiprocessors and memory from each other.
    """
    if link.gbps >= codec.savings / (1 / rates.encode_gbps + 1 / rates.decode_gbps):
        return 0.0
    count = num_pieces(rates, load)
    moving_s = load.moved * (1 - codec.savings) / link.gbps / 1e9
    host_s = (_LATE_S if load.is_known_to_fit else _CALL_S) + count * _GAP_S
    return load.moved / link.gbps / 1e9 / (moving_s + _exposed_s(rates, load, count) + host_s)


def pays(codec: Codec, rates: Rates, link: Link, load: Load) -> bool:
    """Whether a coded call is expected to be clearly faster than a raw one."""
    return gain(codec, rates, link, load) >= _LEAST_GAIN


def least_bytes(codec: Codec, rates: Rates, link: Link, start: int, count: int) -> int:
    """Returns the least size of a message for which coding pays, if `count` messages go to other ranks and `count` come
    from them: `start`, or a power of two times that."""
    size = start
    while size < _MOST_LEAST_BYTES and not pays(codec, rates, link, Load(size * count, size * count, size * count)):
        size *= 2
    return size


def _coding_s(rates: Rates, load: Load) -> float:
    return load.coded / rates.encode_gbps / 1e9 + load.decoded / rates.decode_gbps / 1e9


def _measured(codec: Codec, rows: torch.Tensor) -> Rates:
    """Of the CPU's coder, with rows uint8 [n, 4096]; slow ones where there are no rows."""
    if not len(rows):
        return Rates(1.0, 1.0)
    messages = Messages(codec, [rows.numel()], 0, rows.device)
    slot, status = Slot(torch.empty(messages.num_bytes, dtype=torch.uint8, device="cpu")), messages.status()
    part, out = Part(0, rows.reshape(-1)), Part(0, torch.empty(rows.numel(), dtype=torch.uint8, device="cpu"))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        messages.code(slot, part, status, 0)
        coded = time.perf_counter()
        messages.decode(slot, out, status, 0)
        times.append((coded - start, time.perf_counter() - coded))
    encode_s, decode_s = (min(of) for of in zip(*times))
    encode_gbps, decode_gbps = (rows.numel() / seconds / 1e9 for seconds in (encode_s, decode_s))
    return Rates(encode_gbps / _CODING_AT_ONCE, decode_gbps / _CODING_AT_ONCE, hides=False)
