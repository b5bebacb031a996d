"""Measures how fast tensors travel between ranks and how fast they are coded, and decides whether coding pays."""

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

_MEASURED_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # Number of bytes that each rank sends in a call that is timed.
# A measurement times _REPEATS repeats and takes the fastest. Each repeat makes _IN_A_ROW calls one after the other.
_REPEATS, _IN_A_ROW = 3, 4
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


@dataclass(frozen=True)
class Rates:
    """The rates at which a codec encodes and decodes.

    Attributes:
        encode_gbps, decode_gbps: the rates of encoding and decoding in GB/s of original (uncoded) bytes, on all
            multiprocessors of a GPU, or on a CPU.
        hides: whether one message travels while another message is coded. It is False on a CPU, where the same cores
            code and move bytes.
    """

    encode_gbps: float
    decode_gbps: float
    hides: bool = True


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
        return Rates(known.encode_gbps, known.decode_gbps)
    return _measured(codec, rows)


def num_pieces(rates: Rates, load: Load) -> int:
    """Returns the number of pieces that makes a call fastest. Only the coding of the first piece and the decoding of
    the last piece happen while nothing travels. So the longer coding takes, the more pieces are worth their cost."""
    most = max(3, min(_MOST_PIECES, 1 + round(math.sqrt(_coding_s(rates, load) / _GAP_S))))
    return min((1, 2, most), key=lambda count: _exposed_s(rates, load, count) + count * _GAP_S)


def _exposed_s(rates: Rates, load: Load, count: int) -> float:
    """Returns the part of the time of coding and decoding, in seconds, during which nothing travels. If there are
    several pieces and the device hides coding (`Rates.hides`), this is the time to code the first piece and to decode
    the last piece. Otherwise it is all of the time."""
    if count == 1 or not rates.hides:
        return _coding_s(rates, load)
    shares = shares_of(count)
    return load.coded * shares[0] / rates.encode_gbps / 1e9 + load.decoded * shares[-1] / rates.decode_gbps / 1e9


def gain(codec: Codec, rates: Rates, link: Link, load: Load) -> float:
    """Returns the expected time of a raw call divided by the expected time of a coded call.

    Returns 0 if the link is so fast that coding and decoding take longer than the time that they save on the link.
    The coders and the link then compete for multiprocessors and memory, and this model does not cover that.
    """
    if link.gbps >= codec.savings / (1 / rates.encode_gbps + 1 / rates.decode_gbps):
        return 0.0
    count = num_pieces(rates, load)
    moving_s = load.moved * (1 - codec.savings) / link.gbps / 1e9
    host_s = (_LATE_S if load.is_known_to_fit else _CALL_S) + count * _GAP_S
    return load.moved / link.gbps / 1e9 / (moving_s + _exposed_s(rates, load, count) + host_s)


def pays(codec: Codec, rates: Rates, link: Link, load: Load) -> bool:
    """Returns whether a coded call is expected to be at least _LEAST_GAIN times as fast as a raw call."""
    return gain(codec, rates, link, load) >= _LEAST_GAIN


def least_bytes(codec: Codec, rates: Rates, link: Link, start: int, count: int) -> int:
    """Returns the smallest size in bytes of a message of an all-to-all for which coding pays, among the sizes start,
    2 * start, 4 * start, ... If coding pays for none of these sizes below _MOST_LEAST_BYTES, returns the first size
    that is at least _MOST_LEAST_BYTES.

    Args:
        count: the number of messages that a rank sends, which is also the number that it receives.
    """
    size = start
    while size < _MOST_LEAST_BYTES and not pays(codec, rates, link, Load(size * count, size * count, size * count)):
        size *= 2
    return size


def _coding_s(rates: Rates, load: Load) -> float:
    """Returns the time in seconds that coding and decoding take."""
    return load.coded / rates.encode_gbps / 1e9 + load.decoded / rates.decode_gbps / 1e9


def _measured(codec: Codec, rows: torch.Tensor) -> Rates:
    """Measures the rates of a codec on the CPU with `rows`, uint8 [n, 4096]. Returns rates of 1 GB/s if n is 0."""
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
