"""`ibp.codecs.choose`: times every candidate as it codes and decodes a sample of the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from .._common.arguments import near, number
from .._fetch.streaming import decompress
from .._layout.geometry import check_tensor
from .._machine import calibration, memory, staging
from .._machine.timing import timed_once
from .._schemes import SCHEMES, AnyCodebook
from .._schemes.learning import analyze
from .._tables.compressed_tensor import CompressedTensor
from . import _nvcomp
from ._chosen import Choice, CodingCost, arguments_of, ranked
from ._compressing import compress
from ._whole import CODECS, WholeTensor, codec_of, is_general

_GPU_SAMPLE_BYTES = 256 << 20  # bytes; several times a GPU's cache, and enough chunks to fill a GPU
_CPU_SAMPLE_BYTES = 16 << 20  # bytes for each thread, which codes blocks of 2 MiB
_LEAST_PARTED_BYTES = 4 << 20  # bytes; of a sample of at least this size, a part is looked at first
_PIECE_BYTES = 4 << 20  # bytes of the tensor in one piece, because general codecs look back that far
_FIRST_SHARE = 4  # the part that is looked at first is a quarter of the sample
_SHORT_SHARE = 2  # the part that shows the fixed cost of a call is half of the sample, itself larger than a GPU's cache
# A candidate is out if another takes 4 times fewer seconds. Short parts exaggerate the fixed cost of a call.
_BEATEN = 4.0
_BUDGET_S, _MOST_REPEATS = 4e-3, 12  # for one measurement
_ROUNDS = 3  # candidates take turns in each round, so that other work on the machine slows all of them
_LONG_S = 1.0  # a call that takes longer is timed only once
# calls that take longer are not timed again, because other work on the machine changes their time little
_STEADY_S = 20e-3
_Result = TypeVar("_Result")
_ROWS = (("planes", "default"), ("planes", "fast"), ("ibp", "default"))  # schemes with codebooks, and their levels


def choose(
    x: torch.Tensor,
    link_gbps: float | None = None,
    *,
    device: torch.device | str | int | None = None,
    encode: bool = True,
    rows: bool = False,
    schemes: Iterable[str] | None = None,
) -> Choice:
    """Chooses the coding that moves a tensor over a link in the least time: coded, moved and decoded, one after the
    other.

    Every candidate codes and decodes a sample of the tensor on the device, and is timed; the sample is the whole tensor
    if it is small. General codecs are candidates if their packages are installed. The call takes from a tenth of a
    second to some seconds. Nothing else should run on the device meanwhile.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> choice = ibp.codecs.choose(x, link_gbps=0.0001, encode=False, schemes=["planes"])
        >>> choice.scheme, choice.level, torch.equal(choice.compress(x).decompress(), x)
        ('planes', 'default', True)
        >>> choice.table[-1]
        CodingCost(scheme='raw', ..., stored_bytes=2048000, ...)

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes.
        link_gbps: rate of the link, 10^9 bytes per second. None: that of the link from the host to the GPU, by the
            calibration in force (see `ibp.calibration.calibrate`).
        device: where tensors like x are coded and decoded. None: where x is.
        encode: whether the time for coding counts. False: for tensors that are coded once and fetched often.
        rows: whether rows must be decodable alone. If so, general codecs are left out, tables have slots, and the bytes
            that are moved are those of fetching every row once.
        schemes: the candidates in addition to "raw": some of "planes", "ibp" and the general codecs, such as "zstd:9".
            None: all that are available, general codecs at their default levels.

    Returns:
        `ibp.codecs.Choice`: the scheme, level and codebook, with times and bytes of every candidate.
        `choice.compress(x)`, or `ibp.compress(x, scheme=choice)`, codes by it.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype, or link_gbps is not a number.
        ValueError: link_gbps is not positive, or a scheme does not exist, works on another device, or has no rows.
        ImportError: the package of a named scheme is not installed.
    """
    check_tensor(x)
    where = memory.canonical(x.device if device is None else device)
    if link_gbps is None:
        link_gbps = calibration.in_force(where).copy_in_gbps
    link_gbps = number("link_gbps", link_gbps)
    if not 0 < link_gbps < float("inf"):
        raise ValueError(f"link_gbps is {link_gbps}; wanted a positive number")
    candidates = _candidates(schemes, x.dtype, where, rows)
    num_bytes = x.numel() * x.dtype.itemsize
    found = [CodingCost("raw", "default", None, num_bytes, 0.0, 0.0, 0.0, 0.0)]
    if num_bytes:
        found += _measured(candidates, _Sample.of(x, where), rows)
        _nvcomp.forget_coders()
    return Choice(num_bytes, link_gbps, encode, rows, ranked(found, link_gbps, encode))


def _candidates(
    schemes: Iterable[str] | None, dtype: torch.dtype, device: torch.device, rows: bool
) -> list[tuple[str, str]]:
    """Returns (scheme, level) of each candidate to measure. Schemes that the caller names must be installed."""
    if schemes is None:
        general = [] if rows else [name for name, codec in CODECS.items() if codec.device_type == device.type]
        there = (name for name in general if _is_there(name))
        return [*_ROWS, *((variant, "default") for name in there for variant in _nvcomp.variants_of(name, dtype))]
    found: list[tuple[str, str]] = []
    for scheme in schemes:
        if is_general(scheme):
            codec = codec_of(scheme)[0]
            if rows or codec.device_type != device.type:
                why = "has no rows that decode alone" if rows else f"codes on a {codec.device_type.upper()} device"
                raise ValueError(f"schemes has {scheme!r}, which {why}")
            codec.require()
            found += [(variant, "default") for variant in _nvcomp.variants_of(scheme, dtype)]
        elif scheme not in SCHEMES:
            known = [*SCHEMES, *CODECS]
            raise ValueError(f"schemes has {scheme!r}{near(scheme, known)}; wanted some of {known}")
        found += [one for one in _ROWS if one[0] == scheme]
    return found


def _is_there(name: str) -> bool:
    """Returns whether the package of a codec is installed."""
    try:
        CODECS[name].require()
    except ImportError:
        return False
    return True


# ---- the sample ----------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """A sample of a tensor, on the device that codes: pieces spread over the tensor, one behind the other.

    Attributes:
        sizes: tensors [n, ...]; the last is the sample. Unless it is small, its first part comes before it and, for a
            larger tensor, half of it.
        num_bytes: bytes of the whole tensor.
    """

    sizes: tuple[torch.Tensor, ...]
    num_bytes: int

    @classmethod
    def of(cls, x: torch.Tensor, device: torch.device) -> _Sample:
        num_bytes = x.numel() * x.dtype.itemsize
        limit = _GPU_SAMPLE_BYTES if device.type == "cuda" else _CPU_SAMPLE_BYTES * torch.get_num_threads()
        x = x.detach()
        if num_bytes > limit and (x.dim() == 0 or len(x) * limit < 2 * num_bytes):  # the items are few and long
            x = x.reshape(-1)
        parts = _pieces(x, limit) if num_bytes > limit else [x]
        whole = torch.cat([_near(part, device) for part in parts]) if len(parts) > 1 else _near(parts[0], device)
        if whole.dim() == 0 or whole.nbytes < min(limit, _LEAST_PARTED_BYTES):
            return cls((whole,), num_bytes)
        shares = (_FIRST_SHARE, _SHORT_SHARE) if num_bytes > whole.nbytes else (_FIRST_SHARE,)
        return cls((*(whole[: max(1, len(whole) // share)] for share in shares), whole), num_bytes)


def _pieces(x: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """Returns pieces of a tensor, `limit` bytes in all, spread evenly over its items."""
    item_bytes = x.nbytes // len(x)
    count = max(1, limit // max(_PIECE_BYTES, item_bytes))
    length = max(1, limit // count // item_bytes)
    starts = [number * (len(x) - length) // max(1, count - 1) for number in range(count)]
    return [x[start : start + length] for start in starts]


def _near(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    part = part.contiguous()
    return part if part.device == device else staging.to_device(part, device)


# ---- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class _Candidate:
    """A candidate that is measured.

    Attributes:
        scheme, level, codebook: how it codes.
        timed: its times for sizes of the sample, the largest last.
    """

    scheme: str
    level: str
    codebook: AnyCodebook | None
    timed: list[_Timed] = field(default_factory=list)

    def is_beaten_by(self, other: _Candidate) -> bool:
        """Returns whether another candidate is far better over every link."""
        if not self.timed:
            return False
        mine, its = self.timed[-1], other.timed[-1]
        return (
            its.stored_bytes <= mine.stored_bytes
            and its.encode_s * _BEATEN <= mine.encode_s
            and its.decode_s * _BEATEN <= mine.decode_s
        )

    def time(self, x: torch.Tensor, rows: bool) -> None:
        """Times the candidate on one size of the sample. If that size was timed before, the smaller times are kept."""
        found = _Timed.of(x, self.scheme, self.codebook, rows)
        if self.timed and self.timed[-1].num_bytes == found.num_bytes:
            before = self.timed.pop()
            least_s = {name: min(getattr(before, name), getattr(found, name)) for name in ("encode_s", "decode_s")}
            found = found._replace(**least_s)
        self.timed.append(found)

    def cost(self, num_bytes: int) -> CodingCost:
        """Returns what coding a tensor of num_bytes bytes costs."""
        last = self.timed[-1]
        stored_bytes = round(last.stored_bytes * (num_bytes / last.num_bytes))
        encode_s, decode_s = (
            _extrapolated([(one.num_bytes, seconds) for one, seconds in zip(self.timed, times)], num_bytes)
            for times in zip(*((one.encode_s, one.decode_s) for one in self.timed))
        )
        return CodingCost(self.scheme, self.level, self.codebook, stored_bytes, encode_s, 0.0, decode_s, 0.0)


def _measured(candidates: list[tuple[str, str]], sample: _Sample, rows: bool) -> list[CodingCost]:
    """Returns what each candidate takes for the whole tensor. Candidates that save nothing are left out. A candidate
    that is far worse on the first part of the sample is not measured further."""
    found: list[_Candidate] = []
    for scheme, level in candidates:
        codebook = None if is_general(scheme) else _learned(scheme, level, sample)
        if is_general(scheme) or (codebook is not None and all(codebook != known.codebook for known in found)):
            found.append(_Candidate(scheme, level, codebook))
    left = found
    for size in sample.sizes:
        left = [one for one in left if not any(one.is_beaten_by(other) for other in left)]
        is_a_look = size is sample.sizes[0] and size is not sample.sizes[-1]
        for turn in range(1 if is_a_look else _ROUNDS):
            for one in left:
                if not turn or one.timed[-1].is_short:
                    one.time(size, rows)
    costs = [one.cost(sample.num_bytes) for one in found]
    return [cost for cost in costs if cost.stored_bytes < sample.num_bytes]


def _learned(scheme: str, level: str, sample: _Sample) -> AnyCodebook | None:
    """Returns the codebook of a scheme of rows, or None if it has none for the sample."""
    whole = sample.sizes[-1]
    return analyze(whole, scheme=scheme, level=level, sample=None, device=whole.device)


def _extrapolated(timed: list[tuple[int, float]], num_bytes: int) -> float:
    """Returns the seconds for num_bytes bytes, from the (bytes, seconds) of one size, or of the last two: a fixed
    part per call, and a part per byte."""
    size, seconds = timed[-1]
    a_byte = seconds / size
    if len(timed) > 1:
        short, less = timed[-2]
        if seconds > less:  # otherwise the difference is too small for the clock
            a_byte = (seconds - less) / (size - short)
    return seconds + a_byte * (num_bytes - size)


class _Timed(NamedTuple):
    """What coding num_bytes bytes took."""

    num_bytes: int
    stored_bytes: int
    encode_s: float
    decode_s: float

    @classmethod
    def of(cls, x: torch.Tensor, scheme: str, codebook: AnyCodebook | None, rows: bool) -> _Timed:
        arguments = arguments_of(scheme, codebook, rows)

        def code() -> CompressedTensor | WholeTensor:
            return compress(x, **arguments, device=x.device, memory="device")

        table, encode_s = timed(code, x.device)
        out = torch.empty_like(x)
        _, decode_s = timed(lambda: decompress(table, out=out), x.device)
        return cls(x.nbytes, moved_bytes(table, rows), encode_s, decode_s)

    @property
    def is_short(self) -> bool:
        """Whether the times are so short that other work on the machine distorts them."""
        return self.encode_s + self.decode_s < _STEADY_S


def moved_bytes(table: CompressedTensor | WholeTensor, rows: bool) -> int:
    """Returns the bytes that go over a link to move a coded tensor, including what decoding needs. rows: whether
    every row is fetched."""
    if isinstance(table, WholeTensor):
        return table.nbytes
    return (table.link_bytes if rows else table.stored_bytes) + table.index_bytes


def timed(call: Callable[[], _Result], device: torch.device, budget_s: float = _BUDGET_S) -> tuple[_Result, float]:
    """Returns (what a call returns, the least seconds until its work is done), from calls that together take about
    budget_s. The least is taken because other work can only add to the time. The first call also prepares what later
    calls reuse, and counts only if it is long."""
    result, first = timed_once(call, device)
    if first > _LONG_S:
        return result, first
    del result  # frees its memory for the next result
    result, least = timed_once(call, device)
    for _ in range(min(_MOST_REPEATS, int(budget_s / least))):
        del result
        result, again = timed_once(call, device)
        least = min(least, again)
    return result, least
