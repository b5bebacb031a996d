"""Codebooks and sizes without compressing: `analyze` and `estimate`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from .. import _core, _schemes
from .._common.arguments import number, whole_number
from .._common.statistics import share_saved
from .._layout import geometry as _rows
from .._layout import slots
from .._machine import memory
from . import AnyCodebook, Options, Request, choice, surveyed

_LONGER_ROW_BYTES = 512  # dense rows then come at more than 0.9 of the link's rate (benchmarks/results/gather.csv)


def analyze(
    x: torch.Tensor,
    *,
    scheme: str = "ibp",
    sample: float | None = 0.1,
    chunk_bytes: int | None = None,
    tau: float | None = None,
    paper: bool = False,
    level: str = "default",
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    progress: bool = False,
) -> AnyCodebook | None:
    """Learns a codebook from a sample of the rows of a tensor (the paper's sections 4.1 and, for samples, 6.1).

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
        >>> codebook.row_bytes, codebook.digit_bits, f"{codebook.expected_savings:.0%}"
        (2048, (2, 2, 2, 2), '34%')
        >>> table = ibp.compress(x * 2, codebook=codebook)  # learned once, for all tensors of a kind

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes, on the CPU or a GPU.
        scheme: "ibp", "planes", or "auto" for the better one; with "auto" the result is None if raw rows are best.
        sample: fraction of the rows to look at, in (0, 1]; at least 1,024 rows are. None: as many as `compress` looks
            at.
        chunk_bytes: 1, 2, 4 or 8; None takes the best. Scheme ibp only.
        tau: one threshold for all chunks, in [0.5, 1], as in the paper. None tries 0.55 to 1 and takes the best for
            each chunk.
        paper: sweep one threshold for all chunks, and give every chunk a participation bit: the paper's own choice and
            bytes.
        level: of scheme planes, see `compress`.
        row_bytes: bytes of a row, see `compress`.
        device: where the analysis runs. None: x's GPU, else the current GPU if there is one, else the CPU.
        progress: show a progress bar.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype.
        ValueError: an argument is outside its range.
    """
    _rows.check_tensor(x)
    options = checked(Options(scheme, chunk_bytes, tau, sample, level=level, progress=progress))
    if paper and scheme != "ibp":
        raise ValueError(f"paper=True is a choice of scheme 'ibp', but scheme is {scheme!r}")
    geometry = _rows.Geometry.of(x, row_bytes)
    worker = memory.usual(device, x)
    return choice.learn(scheme, Request(_rows.bytes_of(x), geometry, worker, options, paper=paper))


@dataclass(frozen=True)
class SchemeEstimate:
    """What a table of one scheme is expected to be.

    Attributes:
        scheme: "raw", "ibp" or "planes".
        savings: 1 - stored_bytes / original bytes; 0 where `compress` would keep raw rows.
        stored_bytes: of coded rows and codebook.
        slot_bytes: bytes of a slot; 0 in the packed layout.
        nbytes: of all memory that the table takes, its index and codebook counted.
        memory_savings: 1 - nbytes / original bytes; negative where the table is larger than x.
        link_bytes: of the 32-byte sectors that fetching every row once reads.
        link_savings: 1 - link_bytes / those of raw rows.
        fetch_speedup: how many times as fast as raw ones a GPU fetches and decodes rows from pinned memory, by the
            calibration in force (see `ibp.calibration.calibrate`).
    """

    scheme: str
    savings: float
    stored_bytes: int
    slot_bytes: int
    nbytes: int
    memory_savings: float
    link_bytes: int
    link_savings: float
    fetch_speedup: float


class Estimate(Mapping[str, float]):
    """What `compress` would do to a tensor: a mapping from scheme to savings, {"raw": 0.0, "ibp": 0.23, "planes":
    0.33}, that knows more.

    Attributes:
        shape, dtype, original_bytes: of the tensor.
        layout, row_bytes: that were asked for.
        schemes: dict from scheme to `SchemeEstimate`.
        auto: the scheme that `compress` chooses for this layout.
        advice: a sentence about what it takes, and what would help where that is raw rows.
    """

    def __init__(self, geometry: _rows.Geometry, layout: str, schemes: dict[str, SchemeEstimate], auto: str) -> None:
        self.shape, self.dtype, self.original_bytes = geometry.shape, geometry.dtype, geometry.num_bytes
        self.layout, self.row_bytes, self.schemes, self.auto = layout, geometry.row_bytes, schemes, auto
        self.advice = _advice(geometry, layout, schemes, auto)

    @property
    def stored_bytes(self) -> int:
        """Of rows and codebook, as `compress` would store them."""
        return self.schemes[self.auto].stored_bytes

    def __getitem__(self, scheme: str) -> float:
        return self.schemes[scheme].savings

    def __iter__(self) -> Iterator[str]:
        return iter(self.schemes)

    def __len__(self) -> int:
        return len(self.schemes)

    def __repr__(self) -> str:
        heads = ("scheme", "coded bytes", "saved", "memory bytes", "saved", "link", "fetch")
        lines = [
            f"ibp.estimate of {list(self.shape)} {self.dtype}: {self.original_bytes:,} bytes, "
            f"rows of {self.row_bytes:,}, layout {self.layout!r}",
            "{:7}{:>15}{:>8}{:>15}{:>8}{:>8}{:>8}".format(*heads),
        ]
        lines += [
            f"{of.scheme:7}{of.stored_bytes:>15,}{_percent(of.savings):>8}{of.nbytes:>15,}{_percent(of.memory_savings):>8}"
            f"{_percent(of.link_savings):>8}{of.fetch_speedup:>7.2f}x"
            for of in self.schemes.values()
        ]
        return "\n".join([*lines, *textwrap.wrap(self.advice, 100)])


def estimate(
    x: torch.Tensor,
    codebook: AnyCodebook | None = None,
    *,
    layout: str = "slots",
    slot_bytes: int | None = None,
    level: str = "default",
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    progress: bool = False,
) -> Estimate:
    """What compressing x would give, without compressing it.

    With a codebook all rows are measured: `stored_bytes` is exactly what `compress(x, codebook=codebook)` reports, or
    x's own size where nothing would be saved. Without a codebook a sample of the rows is measured: how much each scheme
    should save in coded bytes, in memory and over the link, and which scheme `compress` takes.

    Example:
        >>> estimate = ibp.estimate(torch.randn(1000, 1024).bfloat16(), device="cpu")
        >>> {scheme: round(savings, 2) for scheme, savings in estimate.items()}
        {'raw': 0.0, 'ibp': 0.26, 'planes': 0.34}
        >>> estimate.auto
        'planes'

    Args:
        x: tensor [N, ...]; a tensor that requires grad is measured by its values.
        codebook: from `analyze`, `Codebook.from_masks` or a table; x is cut into rows of `codebook.row_bytes`.
        layout, slot_bytes, level, row_bytes: as in `compress`; not with a codebook.
        device: where rows are measured, as in `analyze`.
        progress: show progress bars.

    Returns:
        `Estimate`, a mapping: {"raw": 0.0, "ibp": 0.23, "planes": 0.33}, 1 - stored / original bytes by scheme. With a
        codebook: for raw rows and for its scheme.

    Raises:
        TypeError, ValueError: as `compress`.
    """
    _rows.check_tensor(x)
    options = Options(level=level, progress=progress)
    if codebook is None:
        geometry = _rows.Geometry.of(x, row_bytes)
        slot_bytes = slots.checked_slot_bytes(layout, slot_bytes, geometry.row_bytes)
        _schemes.check_scheme("planes", level=level)
        request = Request(_rows.bytes_of(x), geometry, memory.usual(device, x), options, slot_bytes)
        return _estimate_of(geometry, layout, choice.compare(request))
    check_codebook(codebook)
    if layout != "slots" or slot_bytes is not None or row_bytes is not None or level != "default":
        raise ValueError(
            "layout, slot_bytes, level and row_bytes belong to an estimate without a codebook: "
            "the bytes of rows are the same in all layouts"
        )
    geometry = _rows.Geometry.of(x, codebook.row_bytes)
    request = Request(_rows.bytes_of(x), geometry, memory.usual(device, x), options)
    return _estimate_of(geometry, layout, choice.exact(request, codebook), codebook.scheme)


def exact_stored_bytes(x: torch.Tensor, codebook: AnyCodebook, device: torch.device) -> int:
    """Bytes of a tensor's rows, coded by a codebook, and of the codebook; x's own size where that is less."""
    data = _rows.bytes_of(x)
    return min(surveyed(data, codebook, device).stored + codebook.nbytes, data.numel())


def _estimate_of(
    geometry: _rows.Geometry, layout: str, candidates: list[choice.Candidate], only: str | None = None
) -> Estimate:
    """only: the scheme of the codebook that rows are coded by; None: all schemes are compared."""
    raw, found, num_bytes = candidates[0], {candidate.scheme: candidate for candidate in candidates}, geometry.num_bytes

    def of(scheme: str) -> SchemeEstimate:
        candidate = found.get(scheme, raw)  # rows that would not be smaller stay raw
        return SchemeEstimate(
            scheme,
            share_saved(num_bytes, candidate.stored_bytes),
            candidate.stored_bytes,
            candidate.slot_bytes,
            candidate.nbytes,
            share_saved(num_bytes, candidate.nbytes),
            candidate.link_bytes,
            share_saved(raw.link_bytes, candidate.link_bytes),
            raw.row_ns / candidate.row_ns,
        )

    schemes = list(_schemes.SCHEMES) if only is None else list(dict.fromkeys(["raw", only]))
    auto = choice.choose(candidates).scheme if only is None else candidates[-1].scheme
    return Estimate(geometry, layout, {scheme: of(scheme) for scheme in schemes}, auto)


def _advice(geometry: _rows.Geometry, layout: str, schemes: dict[str, SchemeEstimate], auto: str) -> str:
    """What `compress` takes; where that is raw rows, why, and what would help."""
    best = max(schemes.values(), key=lambda scheme: scheme.savings)
    rows = f"rows of {geometry.row_bytes} bytes"
    if auto != "raw":
        taken = schemes[auto]
        over_the_link = taken.savings if layout == "packed" else taken.link_savings
        return (
            f"compress takes scheme {auto!r}, which saves {_percent(taken.memory_savings)} of the memory and "
            f"{_percent(over_the_link)} of the bytes over the link{' of a whole tensor' if layout == 'packed' else ''}."
        )
    if best.savings == 0:
        return "compress keeps raw rows: no scheme saves anything."
    saved = f"compress keeps raw rows: {rows} save {_percent(best.savings)} of their bytes with scheme {best.scheme!r}"
    saved_bytes, helps = geometry.num_bytes - best.stored_bytes, []  # arguments that make use of what is saved
    if layout == "slots" and saved_bytes > slots.index_bytes(geometry, True):
        helps.append("layout='packed' for a smaller table and for streaming")
    least = max(_LONGER_ROW_BYTES, math.ceil(2 * slots.SECTOR_BYTES / best.savings))  # rows that save two sectors
    row_bytes = -(-least // max(1, geometry.item_bytes)) * geometry.item_bytes
    if geometry.row_bytes < row_bytes <= min(_core.MAX_ROW_BYTES, geometry.num_bytes):
        helps.append(f"row_bytes={row_bytes} where x is used as a whole")
    if layout == "slots" and best.memory_savings > 0:
        helps.append(f"scheme={best.scheme!r} to save {_percent(best.memory_savings)} of the memory all the same")
    hint = f" Pass {', or '.join(helps)}." if helps else ""
    if layout == "packed":
        return f"{saved}, but their index takes as much.{hint}"
    if best.link_savings <= 0:
        return f"{saved}, but no 32-byte sector.{hint}"
    return f"{saved}, but a GPU fetches and decodes them at {best.fetch_speedup:.2f} times the rate of raw ones.{hint}"


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # never "-0.0%"


def checked(options: Options) -> Options:
    """Returns the options, checked as far as that needs no tensor. Numbers of numpy and of tensors become Python's own.

    Only the options that a codebook is learned by are checked. The others depend on the tensor, as the codebook does.

    Raises:
        TypeError: an option is of another type.
        ValueError: an option is out of its range, or contradicts another one.
    """
    chunk_bytes, tau, sample, clusters = options.chunk_bytes, options.tau, options.sample, options.clusters
    chunk_bytes = None if chunk_bytes is None else whole_number("chunk_bytes", chunk_bytes)
    tau = None if tau is None else number("tau", tau)
    sample = None if sample is None else number("sample", sample)
    _schemes.check_scheme(options.scheme, chunk_bytes=chunk_bytes, tau=tau, level=options.level)
    if sample is not None and not 0 < sample <= 1:
        raise ValueError(f"sample is {sample}; wanted a fraction in (0, 1], or None")
    if clusters is not None:
        clusters = clusters if isinstance(clusters, str) else whole_number("clusters", clusters)
        _schemes.check_clusters(clusters)
        conflict = (
            "a codebook is given: it says itself how many clusters there are"
            if options.codebook is not None
            else "rows of scheme 'raw' have no codebook"
            if options.scheme == "raw"
            else "consecutive entries, level='fast', have no clusters"
            if options.level == "fast"
            else None
        )
        if conflict is not None:
            raise ValueError(f"clusters is {clusters!r}, but {conflict}")
    if chunk_bytes is tau is sample is clusters is None:
        return options
    return replace(options, chunk_bytes=chunk_bytes, tau=tau, sample=sample, clusters=clusters)


def check_codebook(codebook: object) -> None:
    if not isinstance(codebook, AnyCodebook):
        raise TypeError(
            f"codebook is a {type(codebook).__name__}; wanted an ibp.codecs.Codebook, a PlanesCodebook or a "
            "ClusteredCodebook"
        )
