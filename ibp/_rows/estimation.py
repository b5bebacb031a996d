"""Estimates what compressing a tensor would save: `estimate`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from .. import _core
from .._common.manners import share_saved
from .._machine import calibration
from . import geometry as _geometry
from .codebook import AnyCodebook
from .geometry import SECTOR_BYTES, Geometry
from .learning import (
    SCHEMES,
    Candidate,
    Options,
    Request,
    choose,
    coded_row_ns,
    compare,
    exact,
    implied_scheme,
    learned,
)

# The smallest row size in bytes that the advice suggests. Dense rows of this size are fetched at more than 0.9 of the
# link's rate (results/gather.csv).
_LONGER_ROW_BYTES = 512

# The sample has a quarter of the tensor's elements, but at least _LEAST_ELEMENTS and at most _MOST_ELEMENTS. `compress`
# learns from 2^19 elements, and an estimate should take at most half of the time of `compress`.
_LEAST_ELEMENTS, _MOST_ELEMENTS = 1 << 15, 1 << 17
_LEAST_ROWS = 64  # The sample has at least this many rows, because symbols may be learned for each column.


@dataclass(frozen=True)
class SchemeEstimate:
    """The expected sizes and speed of a table of one scheme.

    Attributes:
        scheme: "raw", "ibp" or "planes".
        savings: 1 - stored_bytes / original bytes; 0 if `compress` would keep raw rows.
        stored_bytes: size in bytes of the coded rows and the codebook.
        slot_bytes: size in bytes of a slot; 0 in the packed layout.
        nbytes: size in bytes of all memory that the table takes, including its index and codebook.
        memory_savings: 1 - nbytes / original bytes; negative if the table is larger than x.
        link_bytes: total size in bytes of the 32-byte sectors that are read to fetch every row once.
        link_savings: 1 - link_bytes / link_bytes of raw rows.
        fetch_speedup: the rate at which a GPU fetches and decodes these rows from pinned memory, divided by the rate
            for raw rows, according to the calibration in force (see `ibp.calibration.calibrate`).
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
    """An estimate of what `compress` would do to a tensor. It is a mapping from scheme to savings, such as {"raw": 0.0,
    "ibp": 0.23, "planes": 0.33}, and has further attributes.

    Attributes:
        shape, dtype, original_bytes: shape, dtype and size in bytes of the tensor.
        layout, row_bytes: the layout, and the size in bytes of a row, for which the estimate is made.
        schemes: dict from scheme to `SchemeEstimate`.
        auto: the scheme that `compress` chooses for this layout.
        advice: a sentence that says what `compress` chooses. If it chooses raw rows, the sentence also says what would
            help.
    """

    def __init__(self, geometry: Geometry, layout: str, schemes: dict[str, SchemeEstimate], auto: str) -> None:
        self.shape, self.dtype, self.original_bytes = geometry.shape, geometry.dtype, geometry.num_bytes
        self.layout, self.row_bytes, self.schemes, self.auto = layout, geometry.row_bytes, schemes, auto
        self.advice = _advice(geometry, layout, schemes, auto)

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the coded rows and the codebook, with the scheme that `compress` would choose."""
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
    """Estimates what compressing x would save, without compressing it.

    With a codebook, all rows are measured: `stored_bytes` is exactly that of `compress(x, codebook=codebook)`, or the
    size of x if nothing would be saved. Without a codebook, a sample of the rows is measured. The estimate then says
    how much each scheme is expected to save in coded bytes, in memory and over the link, and which scheme `compress`
    chooses. As in `compress`, a scheme that cannot be the best on the sample is not learned. The numbers of such a
    scheme follow from a count of equal bits, and are approximate (within about 3 percentage points of savings for 1,000
    rows). For a model or a checkpoint, call `ibp.checkpoints.estimate`.

    Example:
        >>> estimate = ibp.estimate(torch.randn(1000, 1024).bfloat16(), device="cpu")
        >>> {scheme: round(savings, 2) for scheme, savings in estimate.items()}
        {'raw': 0.0, 'ibp': 0.26, 'planes': 0.34}
        >>> estimate.auto
        'planes'

    Args:
        x: tensor [N, ...]. If x requires grad, only its values are used.
        codebook: a codebook made by `analyze` or `Codebook.from_masks`, or the codebook of a table. x is cut into rows
            of `codebook.row_bytes` bytes. None: codebooks are learned from a sample.
        layout, slot_bytes, level, row_bytes: as in `compress`. They cannot be given with a codebook.
        device: the device that measures rows, as in `analyze`.
        progress: whether to show progress bars.

    Returns:
        An `Estimate`, which maps schemes to savings (1 - stored / original bytes): {"raw": 0.0, "ibp": 0.23, "planes":
        0.33}. With a codebook, its keys are only "raw" and the scheme of the codebook.

    Raises:
        TypeError, ValueError: as for `compress`.
    """
    _geometry.check_tensor(x)
    is_plain = layout == "slots" and slot_bytes is row_bytes is None and level == "default"
    if isinstance(codebook, AnyCodebook) and not is_plain:
        raise ValueError(
            "layout, slot_bytes, level and row_bytes belong to an estimate without a codebook: "
            "the bytes of rows are the same in all layouts"
        )
    options = Options(
        level=level,
        codebook=codebook,
        layout=layout,
        slot_bytes=slot_bytes,
        row_bytes=row_bytes,
        device=device,
        progress=progress,
    )
    request = Request.of(x, options)
    if codebook is None:
        num_rows, wanted = request.geometry.num_rows, min(max(_LEAST_ELEMENTS, x.numel() // 4), _MOST_ELEMENTS)
        sample = max(_LEAST_ROWS / max(1, num_rows), wanted / max(1, x.numel()))
        request = replace(request, options=replace(options, sample=min(1.0, sample)))
    candidates, not_learned = compare(request) if codebook is None else (exact(request, codebook), dict[str, float]())
    raw, found = candidates[0], {candidate.scheme: candidate for candidate in candidates}
    for name, savings in not_learned.items():
        found[name] = min(raw, _bounded(request, savings), key=lambda candidate: candidate.stored_bytes)
    is_free = codebook is None and implied_scheme(request) is None
    auto = choose(candidates).scheme if is_free else candidates[-1].scheme
    names = SCHEMES if codebook is None else dict.fromkeys(["raw", codebook.scheme])
    # Rows that would not be smaller stay raw.
    return Estimate(request.geometry, layout, {name: _beside(raw, name, found.get(name, raw)) for name in names}, auto)


def expected_savings(scheme: str, request: Request) -> float:
    """Returns the fraction of a tensor's bytes that a packed table of a scheme would save. The index counts as stored
    bytes. If the scheme has `estimates`, the result is computed from the lowest of these bounds. Otherwise a codebook
    is learned and measured.

    Args:
        request: a request with a sample of the tensor's rows as its data, and the geometry of the whole tensor.
    """
    geometry, bounds = request.geometry, SCHEMES[scheme].estimates
    if bounds is None:
        found = learned(request, scheme)
    else:
        found = [_bounded(request, min(bounds(request.host_rows, geometry.row_bytes, geometry.num_rows)))]
    taken = min((of.stored_bytes + of.index_bytes for of in found), default=geometry.num_bytes)
    return share_saved(geometry.num_bytes, taken)


def _beside(raw: Candidate, scheme: str, of: Candidate) -> SchemeEstimate:
    """Returns the estimate of a scheme. raw: the candidate of raw rows. of: the candidate of the scheme."""
    return SchemeEstimate(
        scheme,
        share_saved(raw.stored_bytes, of.stored_bytes),
        of.stored_bytes,
        of.slot_bytes,
        of.nbytes,
        share_saved(raw.nbytes, of.nbytes),
        of.link_bytes,
        share_saved(raw.link_bytes, of.link_bytes),
        raw.row_ns / of.row_ns,
    )


def _bounded(request: Request, savings: float) -> Candidate:
    """Returns a candidate with the approximate costs of scheme "ibp", for which no codebook was learned. All coded rows
    are assumed to have the same size. The codebook is assumed to consist of an index, with one byte for each chunk of
    4 bytes, and of a palette of 2 * row_bytes / num_rows bytes. In a table of one row, this palette holds a mask and a
    bitval for every chunk. With more rows, more chunks share a pair of mask and bitval, so the palette is assumed to
    shrink in proportion to 1 / num_rows.

    Args:
        savings: an upper bound on the fraction of the bytes that the rows save.
    """
    geometry, machine, sector = request.geometry, calibration.in_force(request.device), SECTOR_BYTES
    row_bytes, num_rows = geometry.row_bytes, geometry.num_rows
    codebook_bytes = round(row_bytes * (1 / 4 + 2 / num_rows))
    mean_bytes = min(row_bytes * (1 - savings) + 0.5, row_bytes)  # The last byte of a row is half full on average.
    in_sectors = sector * math.ceil(mean_bytes / sector)
    slot_bytes = min(in_sectors, row_bytes) if request.slot_bytes is None else request.slot_bytes
    part_bytes = sector * math.ceil(max(0.0, mean_bytes - slot_bytes) / sector) if slot_bytes else mean_bytes
    index_bytes = geometry.index_bytes(part_bytes > 0)
    # A row that need not begin at the start of a sector touches (length + 31) / 32 sectors on average.
    row_link_bytes = in_sectors if slot_bytes and slot_bytes % sector == 0 else mean_bytes + sector - 1
    link_bytes = round(num_rows * row_link_bytes)
    return Candidate(
        codebook=None,
        stored_bytes=round(geometry.num_bytes * mean_bytes / row_bytes) + codebook_bytes,
        slot_bytes=slot_bytes,
        nbytes=geometry.slots_size(slot_bytes) + round(num_rows * part_bytes) + index_bytes + codebook_bytes,
        link_bytes=link_bytes,
        fetch_bytes=link_bytes,
        index_bytes=index_bytes,
        row_ns=coded_row_ns(machine.masks, row_bytes, row_bytes, row_link_bytes, machine),
    )


def _advice(geometry: Geometry, layout: str, schemes: dict[str, SchemeEstimate], auto: str) -> str:
    """Returns the text of `Estimate.advice`. It says what `compress` chooses and, if it chooses raw rows, why it does,
    and which arguments would help."""
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
    saved_bytes, helps = geometry.num_bytes - best.stored_bytes, []  # helps: arguments that make the saving useful
    if layout == "slots" and saved_bytes > geometry.index_bytes(True):
        helps.append("layout='packed' for a smaller table and for streaming")
    least = max(_LONGER_ROW_BYTES, math.ceil(2 * SECTOR_BYTES / best.savings))  # rows that save two sectors
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
    return f"{round(share, 3) + 0.0:.1%}"  # Adding 0.0 turns -0.0 into 0.0, which prints without a sign.
