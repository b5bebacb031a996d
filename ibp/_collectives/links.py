"""How fast tensors travel between ranks, and when coding them pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import _calibration, _choice
from .._group import Group
from .codec import Codec
from .messages import Messages, Part
from .staging import Slot

_MEASURED_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # that each rank sends
_REPEATS, _IN_A_ROW = 3, 4
_LEAST_GAIN = 1.1  # coding has to be so much faster by the model
_CALL_S = 450e-6  # what a coded call takes longer to begin and end, about, the host's wait for it included
_PIECE_S = 80e-6  # what a piece takes longer than its bytes, about
_MOST_PIECES = 16
_CODING_AT_ONCE = 2  # ranks on a machine's CPU, where one alone was measured
_LEAST_CODING_S = 1e-4  # from which on a call is divided
_FIRST_SHARE = 1 / 8  # of a piece, that the first and the last one have


@dataclass(frozen=True)
class Link:
    """What an all-gather of a group moves.

    Attributes:
        gbps: bytes that arrive at a rank, 10^9 a second.
    """

    __module__ = "ibp.distributed"

    gbps: float


@dataclass(frozen=True)
class Rates:
    """Of the coder: GB/s of original bytes, with all multiprocessors. hides: whether it works beside the link; a CPU
    moves bytes by the same cores."""

    encode_gbps: float
    decode_gbps: float
    hides: bool = True


@dataclass(frozen=True)
class Load:
    """What a call is to a rank: original bytes that it codes, that arrive, and that it decodes. is_known_to_fit: the
    host does not wait for the call."""

    coded: int
    moved: int
    decoded: int
    is_known_to_fit: bool = False


def measure(members: Group) -> Link:
    """The rate of all-gathers in a group. A collective call; all ranks get the same."""
    size = _MEASURED_BYTES[members.device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=members.device)
    out = torch.empty(members.size * size, dtype=torch.uint8, device=members.device)
    seconds = _seconds(members, lambda: raw_all_gather(out, sent, group=members.process_group))
    slowest = max(members.together("measure_link", lambda: seconds))
    return Link(max(1, members.size - 1) * size / slowest / 1e9)


def raw_all_gather(out: torch.Tensor, x: torch.Tensor, **options: object) -> dist.Work | None:
    """torch's own."""
    gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, **options)


def _seconds(members: Group, call: Callable[[], object]) -> float:
    """Of a call among several in a row, the shortest."""
    times = []
    for _ in range(_REPEATS):
        dist.barrier(group=members.process_group)
        _synchronize(members.device)
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            call()
        _synchronize(members.device)
        times.append((time.perf_counter() - start) / _IN_A_ROW)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rates_of(codec: Codec, rows: torch.Tensor, device: torch.device) -> Rates:
    """The coder's, from the calibration in force, or on the CPU measured with some rows."""
    if device.type == "cuda":
        known = _choice.coder_rates(codec.codebook, _calibration.in_force(device))
        return Rates(known.encode_gbps, known.decode_gbps)
    return _measured(codec, rows)


def num_pieces(rates: Rates, load: Load) -> int:
    """In how many pieces a call is divided: the more coding there is to hide behind the link, the more."""
    coding_s = _coding_s(rates, load)
    return 1 if coding_s < _LEAST_CODING_S else max(3, min(_MOST_PIECES, 1 + round(math.sqrt(coding_s / _PIECE_S))))


def gain(codec: Codec, rates: Rates, link: Link, load: Load) -> float:
    """How many times as fast as a raw one a coded call is expected to be; 0 where the link is so fast that coding hides
    behind it in part only: then the coders and the link take multiprocessors and memory from each other."""
    if link.gbps >= codec.savings / (1 / rates.encode_gbps + 1 / rates.decode_gbps):
        return 0.0
    count, coding_s = num_pieces(rates, load), _coding_s(rates, load)
    moving_s = load.moved * (1 - codec.savings) / link.gbps / 1e9
    exposed = _FIRST_SHARE / (count - 2 + 2 * _FIRST_SHARE) if count > 2 and rates.hides else 1.0
    return load.moved / link.gbps / 1e9 / (moving_s + coding_s * exposed + _CALL_S + count * _PIECE_S)


def _coding_s(rates: Rates, load: Load) -> float:
    return load.coded / rates.encode_gbps / 1e9 + load.decoded / rates.decode_gbps / 1e9


def pays(expected_gain: float) -> bool:
    return expected_gain >= _LEAST_GAIN


def _measured(codec: Codec, rows: torch.Tensor) -> Rates:
    """Of the CPU's coder, with rows uint8 [n, 4096]; slow ones where there are no rows."""
    if not len(rows):
        return Rates(1.0, 1.0)
    messages = Messages(codec, [rows.numel()], 0, rows.device)
    slot, status = Slot(torch.empty(messages.num_bytes, dtype=torch.uint8)), messages.status()
    part, out = Part(0, rows.reshape(-1)), Part(0, torch.empty(rows.numel(), dtype=torch.uint8))
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
