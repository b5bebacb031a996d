"""Decides which codebook a tensor gets. This module contains the options of `ibp.compress` and the table of schemes,
and chooses among the schemes. A `Learner` decides when a codebook for data of one kind is learned again.

`learn` finds the codebook for a `Request`, which holds the rows of a tensor and the options. Scheme "auto" learns a
codebook of every scheme that may be best, measures a sample of the rows with each codebook, and chooses by the expected
cost of the whole table. If the table has slots, a scheme is chosen only if a GPU is expected to fetch its rows no more
slowly than raw rows. The link transfers a row's sectors while the decoder rebuilds other rows, so the time of a row is
the longer of the link's time and the decoder's time. For packed rows and for `compress(inplace=True)` the choice
depends only on the size in bytes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from .._common.arguments import number, whole_number
from .._machine import calibration, memory, staging
from .._machine.calibration import Calibration, CoderRates
from .._machine.memory import Numa
from . import geometry as _geometry
from . import masks, planes
from .clusters import check_clusters, split
from .codebook import AnyCodebook, check_codebook, coder_rates, measure, work_of
from .geometry import SECOND_FETCH_BYTES, SECTOR_BYTES, Geometry, Survey

# Sizes of the samples of a `Request`, unless the table has fewer rows. `rows` has at least _LEAST_ROWS rows. If
# `Options.sample` is None, `few_rows` has the fraction _FEW_SHARE of the table's rows, but at least _LEAST_FEW_ROWS
# rows. `host_rows` has about _HOST_ELEMENTS elements, but at least _LEAST_HOST_ROWS rows.
_LEAST_ROWS, _LEAST_FEW_ROWS = 1024, 4096
_HOST_ELEMENTS, _LEAST_HOST_ROWS = 1 << 19, 16
_FEW_SHARE = 0.01
# Size of the sample in bytes if `Options.sample` is None, for each type of the device that analyses the sample. For a
# table with a single codebook, a sample of 1 % of the rows loses at most 0.07 percentage points of savings
# (benchmarks/sampling.py).
_SAMPLE_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
# The coded size of a table is assumed to be at least this fraction of its estimate. Measured fractions are 0.985 to
# 1.03 (on the data sets of ratio.csv).
ESTIMATE_MARGIN = 0.98
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """The arguments of `ibp.compress` other than x and inplace. The docstring of `ibp.compress` describes them. All
    code that `ibp.compress` calls reads them from this class. `checked` checks what can be checked without the
    tensor."""

    scheme: str = "auto"
    chunk_bytes: int | None = None
    tau: float | None = None
    sample: float | None = None
    clusters: int | str | None = None
    level: str = "default"
    codebook: AnyCodebook | None = None
    layout: str = "slots"
    slot_bytes: int | None = None
    row_bytes: int | None = None
    device: torch.device | str | int | None = None
    memory: str | None = None
    numa: Numa = None
    progress: bool = False


def checked(options: Options) -> Options:
    """Checks the options that say how a codebook is learned. Returns the options with NumPy numbers converted to Python
    numbers. The other options, and a given codebook, can be checked only together with the tensor.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is out of range, or is inconsistent with another option.
    """
    chunk_bytes, tau, sample, clusters = options.chunk_bytes, options.tau, options.sample, options.clusters
    chunk_bytes = None if chunk_bytes is None else whole_number("chunk_bytes", chunk_bytes)
    tau = None if tau is None else number("tau", tau)
    sample = None if sample is None else number("sample", sample)
    check_scheme(options.scheme, chunk_bytes=chunk_bytes, tau=tau, level=options.level)
    if sample is not None and not 0 < sample <= 1:
        raise ValueError(f"sample is {sample}; wanted a fraction in (0, 1], or None")
    if clusters is not None:
        clusters = clusters if isinstance(clusters, str) else whole_number("clusters", clusters)
        check_clusters(clusters)
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


@dataclass(frozen=True)
class Request:
    """The rows of a tensor that are to be encoded, with the options. `of` makes a request from a tensor. The properties
    `rows`, `few_rows` and `host_rows` are samples of the rows; each is drawn when it is first read.

    Attributes:
        data: the bytes of the tensor, uint8 [geometry.num_bytes].
        geometry: the division of these bytes into rows.
        device: the device that learns the codebook and encodes the rows.
        options: the options, which `checked` has checked.
        slot_bytes: size in bytes of a slot of the table. 0: the table is packed. None: the size is still to be chosen.
        paper: as in `ibp.codecs.analyze`; for scheme "ibp" only.
        codes_invariant: whether bits and columns that are the same in all sampled rows are coded, too. If so, every row
            has a coded form, even a row in which these bits or columns have other values.
        in_place: whether the coded rows replace the tensor in its own memory (`compress(inplace=True)`). If so, "auto"
            takes the scheme with the fewest stored bytes.
        near: a function that returns the bytes for work on the device: a copy of `data` on the device, which is made in
            the background, or `data` itself (see `staging.whole_ahead`). None: the work reads `data`.
        measured: the codebooks that were learned from `host_rows`, each with the coded lengths of `host_rows` and the
            survey of these lengths.
    """

    data: torch.Tensor
    geometry: Geometry
    device: torch.device
    options: Options = Options()
    slot_bytes: int | None = None
    paper: bool = False
    codes_invariant: bool = False
    in_place: bool = False
    near: Callable[[], torch.Tensor] | None = None
    measured: list[tuple[AnyCodebook, torch.Tensor, Survey]] = field(default_factory=list, init=False, compare=False)

    @classmethod
    def of(cls, x: torch.Tensor, options: Options, paper: bool = False) -> Request:
        """Returns a request for the rows of a tensor. Checks all options. The caller must have checked the tensor with
        `check_tensor`.

        Raises:
            TypeError: an option has a wrong type.
            ValueError: an option is out of range, or is inconsistent with another option.
        """
        options = checked(options)
        device, codebook = memory.usual(options.device, x), options.codebook
        if codebook is None:
            geometry = Geometry.of(x, options.row_bytes)
        else:
            check_codebook(codebook)
            if options.row_bytes not in (None, codebook.row_bytes):
                raise ValueError(
                    f"row_bytes is {options.row_bytes}, but the codebook is for rows of {codebook.row_bytes} bytes"
                )
            geometry = Geometry(x.shape, x.dtype, codebook.row_bytes)
        slot_bytes = _geometry.checked_slot_bytes(options.layout, options.slot_bytes, geometry.row_bytes)
        return cls(_geometry.bytes_of(x), geometry, device, options, slot_bytes, paper)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """A sample of whole rows on the device, uint8 [n * row_bytes]. If the tensor is shorter than a row, the sample
        is one row: the tensor's bytes, padded with zeros."""
        geometry = self.geometry
        if 0 < geometry.num_bytes < geometry.row_bytes:
            return torch.nn.functional.pad(self.data, (0, geometry.row_bytes - geometry.num_bytes)).to(self.device)
        if self.options.sample is None:
            wanted = max(_LEAST_ROWS, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
        else:
            wanted = max(_LEAST_ROWS, -int(-geometry.num_rows * self.options.sample // 1))
        data, is_far = self.data, self.device.type == "cuda" and not self.data.is_cuda
        if is_far and wanted < geometry.num_bytes // geometry.row_bytes and data.is_pinned():
            data = memory.seen_from(self.device, data)
        return staging.to_device(_geometry.sample(data, geometry.row_bytes, wanted), self.device)

    @functools.cached_property
    def few_rows(self) -> torch.Tensor:
        """A smaller sample, drawn from `rows`, from which clusters are learned."""
        geometry = self.geometry
        if self.options.sample is None:
            most = max(1, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
            wanted = min(most, max(_LEAST_FEW_ROWS, int(geometry.num_rows * _FEW_SHARE)))
        else:
            wanted = int(geometry.num_rows * self.options.sample) + 1
        return _geometry.sample(self.rows, geometry.row_bytes, wanted)

    @functools.cached_property
    def host_rows(self) -> torch.Tensor:
        """A sample of whole rows on the CPU, with no more than about 2^19 elements, but at least 16 rows. The core
        learns symbols from it, and "auto" measures it with the codebook of every scheme. If `Options.sample` is given,
        `host_rows` may be smaller."""
        geometry = self.geometry
        if geometry.num_bytes < geometry.row_bytes:
            return self.rows.cpu()
        wanted = max(_LEAST_HOST_ROWS, _HOST_ELEMENTS * geometry.dtype.itemsize // geometry.row_bytes)
        if self.options.sample is not None:
            wanted = min(wanted, int(geometry.num_rows * self.options.sample) + 1)
        return staging.to_host(_geometry.sample(self.data, geometry.row_bytes, wanted))

    def known(self, codebook: AnyCodebook) -> tuple[torch.Tensor, Survey] | None:
        """Returns the lengths and the survey that `measured` holds for a codebook, or None if the codebook was not
        learned from `host_rows`."""
        return next(((lengths, survey) for learned, lengths, survey in self.measured if learned is codebook), None)


# ---- the table of schemes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """The functions that learn codebooks of a scheme. A new scheme needs a file in this folder, an entry in `SCHEMES`,
    and entries in csrc/FORMAT.md and csrc/core/schemes.h.

    Attributes:
        learn: takes a request. Returns a codebook, or None if raw rows are best.
        estimates: takes (rows, row_bytes, num_rows). Returns upper bounds on the fraction of a table's bytes that the
            scheme can save; bounds that take less time to compute come first. rows is a sample of the table's rows on
            the CPU, uint8 [n * row_bytes]; num_rows is the number of rows of the whole table. None: there is no such
            function, because a codebook of the scheme is learned in the time that an estimate would take.
        relearn: takes (codebook, rows, sizes, options). Returns codebooks of the same form as the given one, one for
            each group of rows. rows is uint8 [n * row_bytes], with the rows of a group next to each other; sizes[i] is
            the number of rows in group i. None: the scheme cannot learn codebooks for clusters.
        options: the arguments of `ibp.compress` and `ibp.codecs.analyze` that belong to the scheme, each with a
            function that raises ValueError for an invalid value.
    """

    learn: Callable[[Request], AnyCodebook | None]
    estimates: Callable[[torch.Tensor, int, int], Iterable[float]] | None = None
    relearn: Callable[[Any, torch.Tensor, list[int], Options], Sequence[AnyCodebook]] | None = None
    options: Mapping[str, Callable[..., object]] = field(default_factory=dict)


def _masks_for(request: Request) -> AnyCodebook:
    options, geometry = request.options, request.geometry
    return masks.learn_masks(
        request.rows,
        geometry.row_bytes,
        geometry.num_rows,
        chunk_bytes=options.chunk_bytes,
        tau=options.tau,
        paper=request.paper,
        progress=options.progress,
    )


def _planes_for(request: Request) -> AnyCodebook:
    """Returns the best codebook of scheme planes among those that the device can encode with."""

    def learned(codes_invariant: bool) -> planes.PlanesCodebook:
        rows, geometry, level = request.host_rows, request.geometry, request.options.level
        of_table = geometry.row_bytes, geometry.num_rows, geometry.dtype
        found = planes.learn_planes(rows, *of_table, level=level, codes_invariant=codes_invariant)
        codebook, lengths, survey = found
        if survey is not None:
            request.measured.append((codebook, lengths, survey))
        return codebook

    codebook = learned(request.codes_invariant)
    is_plain = not codebook.is_partial and codebook.first_symbol is None
    if not is_plain and not planes.can_code(codebook, request.device):
        codebook = learned(True)
    if codebook.first_symbol is None or codebook.is_partial or codebook.rotate > codebook.residual_bits:
        return codebook
    return planes.with_fullest_run(codebook, request.data)


SCHEMES: Mapping[str, Scheme] = {
    "raw": Scheme(learn=lambda request: None),
    "ibp": Scheme(
        learn=_masks_for,
        estimates=masks.estimates,
        relearn=lambda codebook, rows, sizes, options: masks.relearn(codebook, rows, sizes, options.tau),
        options={"chunk_bytes": masks.check_chunk_bytes, "tau": masks.check_tau, "paper": bool},
    ),
    "planes": Scheme(
        learn=_planes_for,
        relearn=lambda codebook, rows, sizes, options: planes.relearn(codebook, rows, sizes),
        options={"level": planes.check_level},
    ),
}
# "auto" chooses among these schemes and raw rows. Schemes with estimates come last: a codebook of such a scheme is
# learned only if the estimates say that it may be better than the best scheme before it.
_CODED = sorted((name for name in SCHEMES if name != "raw"), key=lambda name: SCHEMES[name].estimates is not None)


def check_scheme(scheme: str, **options: object) -> None:
    """Raises ValueError for an unknown scheme, for an invalid option, and for an option of another scheme. Scheme
    "auto" accepts the options of every scheme. An option that is None or has its default value counts as not given."""
    if scheme not in ("auto", *SCHEMES):
        raise ValueError(
            f"scheme is {scheme!r}; wanted one of {['auto', *SCHEMES]} (general codecs, such as 'zstd' and "
            "'nvcomp:ans', are for ibp.compress alone)"
        )
    for name, value in options.items():
        if value is None or value == getattr(Options, name, False):
            continue
        owner = _owner(name)
        if scheme not in ("auto", owner):
            names = " and ".join(SCHEMES[owner].options)
            raise ValueError(f"{names} belong to scheme {owner!r}, but scheme is {scheme!r}")
        SCHEMES[owner].options[name](value)


def _owner(option: str) -> str:
    return next(name for name, scheme in SCHEMES.items() if option in scheme.options)


# ---- learning ------------------------------------------------------------------------------------------------------


def learn(scheme: str, request: Request) -> AnyCodebook | None:
    """Learns a codebook of a scheme for a table. Returns the codebook, or None if the rows are to stay raw.

    Scheme "auto" stands for the scheme whose options are given, or otherwise for the scheme that is best on a sample
    (see `choose`).
    """
    if scheme == "auto":
        scheme = implied_scheme(request) or scheme
    if scheme == "auto":
        return choose(compare(request)[0], request.in_place).codebook
    return learn_scheme(scheme, request)


def implied_scheme(request: Request) -> str | None:
    """Returns the scheme that "auto" must take because options of this scheme are given, or None if no scheme's options
    are given."""
    options = request.options
    if options.chunk_bytes is not None or options.tau is not None or request.paper:
        return "ibp"
    return None if options.level in ("default", None) else "planes"


def learn_scheme(scheme: str, request: Request) -> AnyCodebook | None:
    """Learns a codebook of a scheme for a table. Returns the codebook, or None if the rows are to stay raw. The result
    is a clustered codebook if the options ask for clusters and clusters save more than they cost."""
    codebook, clusters = SCHEMES[scheme].learn(request), request.options.clusters
    if codebook is None or clusters in (None, 1) or request.geometry.num_rows < 2:
        return codebook
    relearn = SCHEMES[scheme].relearn
    assert relearn is not None and clusters is not None, f"scheme {scheme} does not say how its codebooks are relearned"
    return split(
        codebook,
        request.few_rows,
        request.geometry.num_rows,
        clusters,
        lambda rows, sizes: relearn(codebook, rows, sizes, request.options),
    )


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
        scheme: "ibp", "planes", or "auto" for the better of the two. With "auto" the result is None if raw rows are
            best.
        sample: the fraction of the rows to look at, in (0, 1]. For scheme "ibp", the analysis looks at no fewer than
            1,024 rows, or at all rows of a smaller tensor. For scheme "planes", symbols are learned from no more than
            about 2^19 elements, or from 16 rows if these have more elements. None: the same number of rows as in
            `compress`.
        chunk_bytes: size in bytes of a chunk, 1, 2, 4 or 8, for scheme "ibp" only. None: the best size.
        tau: one threshold for all chunks, in [0.5, 1], as in the paper. None: thresholds from 0.55 to 1 are tried, and
            each chunk gets its best mask.
        paper: whether to code as in the paper, byte for byte: all chunks have the same threshold (tau, or the best
            threshold if tau is None), and every chunk has a participation bit.
        level: the level of scheme "planes", see `compress`.
        row_bytes: size in bytes of a row, see `compress`.
        device: the device that runs the analysis. None: the GPU that x is on, or otherwise the current GPU if there is
            one, or otherwise the CPU.
        progress: whether to show a progress bar.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype.
        ValueError: an argument is outside its range.
    """
    _geometry.check_tensor(x)
    if paper and scheme != "ibp":
        raise ValueError(f"paper=True is a choice of scheme 'ibp', but scheme is {scheme!r}")
    options = Options(
        scheme, chunk_bytes, tau, sample, level=level, row_bytes=row_bytes, device=device, progress=progress
    )
    return learn(scheme, Request.of(x, options, paper))


# ---- what a table of each scheme would cost ------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A codebook, with the expected cost of coding a whole table with it. The cost is estimated from a sample of the
    rows that was measured with the codebook.

    Attributes:
        codebook: the codebook; None for raw rows.
        stored_bytes: size in bytes of the coded rows and the codebook, as `table.stored_bytes`.
        slot_bytes: size in bytes of a slot; 0 for packed rows.
        nbytes: size in bytes of all memory that the table takes, as `table.nbytes`.
        link_bytes: size in bytes of the sectors that are read to fetch every row once, as `table.link_bytes`.
        fetch_bytes: link_bytes, plus SECOND_FETCH_BYTES for each row that overflows its slot, plus the size in bytes of
            the codebook.
        index_bytes: size in bytes of lengths and bases.
        row_ns: time, in ns, that a GPU takes to fetch and rebuild a row from pinned memory, according to the
            calibration in force.
    """

    codebook: AnyCodebook | None
    stored_bytes: int
    slot_bytes: int
    nbytes: int
    link_bytes: int
    fetch_bytes: int
    index_bytes: int
    row_ns: float

    @property
    def scheme(self) -> str:
        return "raw" if self.codebook is None else self.codebook.scheme


def compare(request: Request) -> tuple[list[Candidate], dict[str, float]]:
    """Compares the schemes on a sample of the table's rows.

    A scheme with `estimates` is not learned if options of another scheme are given. Nor is it learned if an estimate
    shows that it cannot be best. The estimates are not used, however, if several clusters are requested. A scheme whose
    table would not take fewer bytes than x does not become a candidate.

    Returns:
        (candidates, not_learned). The first candidate is raw rows. For each scheme that was not learned, not_learned
        has the upper bound on the fraction of the bytes that this scheme saves.
    """
    candidates, not_learned, geometry = [_raw(request)], dict[str, float](), request.geometry
    implied = implied_scheme(request)
    for scheme in _CODED if geometry.num_bytes else ():
        bounds, is_other = SCHEMES[scheme].estimates, implied not in (None, scheme)
        if bounds is not None and (is_other or request.options.clusters in (None, 1)):
            best = choose(candidates, request.in_place)
            for savings in bounds(request.host_rows, geometry.row_bytes, geometry.num_rows):
                if is_other or not _may_be_best(savings, best, request):
                    not_learned[scheme] = savings
                    break
        if scheme not in not_learned:
            candidates += learned(request, scheme)
    return candidates, not_learned


def learned(request: Request, scheme: str) -> list[Candidate]:
    """Learns a codebook of a scheme and measures it on a sample of the rows. Returns a list with the resulting
    candidate, or an empty list if the table would not take fewer bytes than raw rows."""
    return _coded(request, learn_scheme(scheme, request), request.host_rows, _CPU)


def exact(request: Request, codebook: AnyCodebook) -> list[Candidate]:
    """Measures a codebook on all rows. Returns a list with the candidate of raw rows and, if the codebook makes the
    table smaller, the candidate of the codebook."""
    return [_raw(request), *_coded(request, codebook, request.data, request.device, request.options.progress)]


def choose(candidates: list[Candidate], in_place: bool = False) -> Candidate:
    """Returns the best candidate. The first of the candidates must be raw rows.

    For compression in place, the best candidate has the fewest stored bytes. For packed rows, it has the fewest bytes
    of stored data and index together. For slots, it has the fewest fetch_bytes among the candidates that a GPU fetches
    faster than raw rows, or equally fast and from less memory. If there is no such candidate, raw rows are best.
    """
    raw, coded = candidates[0], candidates[1:]
    if in_place:
        return min(candidates, key=lambda candidate: candidate.stored_bytes)
    if any(candidate.slot_bytes == 0 for candidate in coded):
        return min(candidates, key=lambda candidate: candidate.stored_bytes + candidate.index_bytes)
    better = [candidate for candidate in coded if (candidate.row_ns, candidate.nbytes) < (raw.row_ns, raw.nbytes)]
    return min(better, key=lambda candidate: (candidate.fetch_bytes, candidate.stored_bytes), default=raw)


def _may_be_best(savings: float, best: Candidate, request: Request) -> bool:
    """Returns whether a scheme may be better than the best candidate so far. If this candidate is raw rows and the
    table has slots, the scheme must save at least one sector of a row.

    Args:
        savings: an upper bound on the fraction of the table's bytes that the scheme saves.
    """
    row_bytes, savings = request.geometry.row_bytes, 1 - (1 - savings) * ESTIMATE_MARGIN
    if best.codebook is None and request.slot_bytes != 0:
        sectors = math.ceil(row_bytes * (1 - savings) / SECTOR_BYTES)
        return sectors < math.ceil(row_bytes / SECTOR_BYTES)
    return request.geometry.num_bytes * (1 - savings) < best.stored_bytes


def _raw(request: Request) -> Candidate:
    """Returns the candidate of raw rows. Its costs follow from the geometry, so no rows are measured."""
    geometry, row_bytes = request.geometry, request.geometry.row_bytes
    link_bytes, machine = geometry.raw_link_bytes(), calibration.in_force(request.device)
    time = row_ns(None, row_bytes, row_bytes, link_bytes / max(1, geometry.num_rows), machine)
    return Candidate(None, geometry.num_bytes, row_bytes, geometry.num_bytes, link_bytes, link_bytes, 0, time)


def _coded(
    request: Request, codebook: AnyCodebook | None, rows: torch.Tensor, device: torch.device, progress: bool = False
) -> list[Candidate]:
    """Returns a list with the candidate of a codebook. The list is empty if the codebook is None, if there are no rows,
    or if the table would not take fewer bytes than raw rows.

    Args:
        rows: a sample of the request's rows, or all of its data.
        device: the device that measures the rows with the codebook.
    """
    geometry = request.geometry
    if codebook is None or not geometry.num_bytes:
        return []
    sampled = Geometry(rows.shape, torch.uint8, geometry.row_bytes)
    known = request.known(codebook)
    if known is not None and rows is request.host_rows:
        lengths, survey = known
    else:
        lengths = measure(rows, codebook, device, progress)
        survey = sampled.survey(lengths)
    scale = geometry.num_bytes / sampled.num_bytes  # The ratio of bytes counts a short last row correctly.
    stored_bytes = round(survey.stored * scale) + codebook.nbytes
    if stored_bytes >= geometry.num_bytes:
        return []
    slot_bytes = survey.table_slot_bytes if request.slot_bytes is None else request.slot_bytes
    overflow_bytes = round(survey.overflow_bytes(slot_bytes) * scale) if slot_bytes < geometry.row_bytes else 0
    index_bytes = geometry.index_bytes(overflow_bytes > 0)
    words = codebook.words(_CPU)
    nbytes = geometry.slots_size(slot_bytes) + overflow_bytes + index_bytes + codebook.nbytes + words.nbytes
    if slot_bytes:
        link_bytes = sampled.link_bytes(lengths, slot_bytes, found=survey)
        second_fetches = survey.spilled(slot_bytes)[0]  # one for each row that overflows its slot
    else:  # A row that need not begin at the start of a sector touches (length + 31) / 32 sectors on average.
        link_bytes = survey.stored + (SECTOR_BYTES - 1) * (sampled.num_rows - int(survey.sectors[0]))
        second_fetches = 0
    fetched_bytes = link_bytes + second_fetches * SECOND_FETCH_BYTES
    stored, fetched = survey.stored / sampled.num_rows, fetched_bytes / sampled.num_rows
    found = Candidate(
        codebook=codebook,
        stored_bytes=stored_bytes,
        slot_bytes=slot_bytes,
        nbytes=nbytes,
        link_bytes=round(link_bytes * scale),
        fetch_bytes=round(fetched_bytes * scale) + codebook.nbytes,
        index_bytes=index_bytes,
        row_ns=row_ns(codebook, geometry.row_bytes, stored, fetched, calibration.in_force(request.device)),
    )
    return [found]


def row_ns(
    codebook: AnyCodebook | None, row_bytes: int, stored_bytes: float, link_bytes: float, machine: Calibration
) -> float:
    """Returns the mean time, in ns, that a GPU takes for each row if it fetches many rows from pinned memory and
    rebuilds them.

    Args:
        codebook: the codebook of the rows; None for raw rows.
        row_bytes: size in bytes of a row.
        stored_bytes: mean size in bytes of a coded row.
        link_bytes: mean size in bytes of the sectors that are read to fetch a row.
        machine: the calibration whose rates are used.
    """
    if codebook is None:
        return max(link_bytes / machine.read_gbps, machine.least_row_ns)
    work = work_of(codebook, row_bytes, stored_bytes)
    return coded_row_ns(coder_rates(codebook, machine), work, row_bytes, link_bytes, machine)


def coded_row_ns(rates: CoderRates, work: float, row_bytes: int, link_bytes: float, machine: Calibration) -> float:
    """Returns the time of `row_ns`, in ns, for coded rows and a decoder with the given rates. work: the amount of work
    in decoding a row, as `work_of` returns it."""
    fetch_ns = max(link_bytes / (machine.read_gbps * machine.coded_read_share), machine.least_row_ns)
    # While the decoder works, the row is also written to device memory, at memset_gbps.
    return max(fetch_ns, row_bytes / machine.memset_gbps, rates.least_row_ns, work / rates.work_per_ns)


# ---- one codebook for each kind of data ----------------------------------------------------------------------------
#
# Learning a codebook takes far longer than encoding with it. Therefore weights, caches, activations and messages of one
# kind share a codebook, which is learned from a sample. If the codebook saves clearly less on later data of the kind, a
# codebook is learned from these data, either for them alone or in place of the first codebook.

ROW_BYTES = 4096  # Size in bytes of a row of weights. Longer rows save 0.1 % more, but keep fewer warps of an SM busy.
# Smallest size in bytes of a tensor that is worth coding. A smaller tensor would be a single row, and fetching one row
# takes the same time for any size.
LEAST_BYTES = 4096
CLEARLY_LESS = 0.01  # Savings are clearly less if they are lower by more than this fraction of the original bytes.
# A codebook has drifted if its savings on later data are lower by more than this fraction of the original bytes. The
# fraction is larger than CLEARLY_LESS, because learning again interrupts other work.
_DRIFT = 0.02
_GROWTH = 2.0  # A codebook that was learned for use n (see `Learner`) is learned again at use _GROWTH * n or later.
# Number of times that `ibp.distributed` learns a codebook for messages again before it gives up. If the codebook drifts
# after that, tensors of this kind are sent raw. The reason: if the coded rows of a tensor do not fit in its message,
# the tensor has to be sent a second time, raw, which takes longer than sending it raw at once.
_MOST_TIMES = 3
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Kind = tuple[str, torch.Size, torch.dtype]
_Found = TypeVar("_Found")


def kind_of(name: str, shape: torch.Size, dtype: torch.dtype) -> Kind:
    """Returns the kind of a tensor: its name, shape and dtype. In the name, each dot-separated component that is a
    number becomes "#", so `layers.0.fc1.weight` and `layers.1.fc1.weight` are of the same kind if their shapes and
    dtypes are equal."""
    return _NUMBER.sub("#", name), shape, dtype


def learned_from(
    rows: torch.Tensor,
    row_bytes: int,
    dtype: torch.dtype,
    *,
    scheme: str = "planes",
    level: str = "default",
    num_rows: int | None = None,
) -> AnyCodebook | None:
    """Learns a codebook from a sample, for later data of the same kind. Returns the codebook, or None if raw rows are
    best. The codebook can code every row. It also codes the bits and columns that are constant in the sample, so they
    may have other values in later rows.

    Args:
        rows: uint8 [n * row_bytes], the sample.
        row_bytes: size in bytes of a row.
        dtype: dtype of the elements.
        scheme: "planes" or "ibp".
        level: as in `ibp.compress`.
        num_rows: the number of rows over which the size of the codebook is spread. None: the number of rows of the
            sample.
    """
    num_rows = rows.numel() // row_bytes if num_rows is None else num_rows
    geometry = Geometry(torch.Size((num_rows, row_bytes // dtype.itemsize)), dtype, row_bytes)
    return SCHEMES[scheme].learn(Request(rows, geometry, rows.device, Options(level=level), codes_invariant=True))


@dataclass
class Learner(Generic[_Found]):
    """Holds the codebook that was learned for a kind of data, and decides when to learn it again. If the data do not
    compress, or keep changing, the codebook is learned ever more rarely.

    The caller counts the uses of the codebook, beginning with 1. A use is, for example, a call that encodes keys and
    values, or a training pass.

    Attributes:
        found: a codebook, or an object made from one. None: raw data are best, or nothing was learned yet.
        share: coded bytes / raw bytes of the data that the codebook was learned from. None: not known yet; the next
            call of `note` sets it.
        learned_at: the number of the use for which the codebook was learned. 0: nothing was learned yet.
        times: number of times that the codebook was learned again, not counting the first time.
        has_drifted: whether the codebook saved less on later data (by more than _DRIFT), or these data did not fit in
            the memory reserved for them.
    """

    found: _Found | None = None
    share: float | None = None
    learned_at: int = 0
    times: int = 0
    has_drifted: bool = False

    def take(self, found: _Found | None, share: float | None = None, use: int = 1) -> None:
        """Stores what was learned. use: the number of the use for which it was learned."""
        self.times += self.learned_at > 0
        self.found, self.share, self.learned_at, self.has_drifted = found, share, use, False

    def fits(self, coded_bytes: float, raw_bytes: float) -> bool:
        """Returns whether the codebook saves enough on other data of the kind, that is, not clearly less than on the
        data that it was learned from. If not, a separate codebook should be learned for the other data.

        Args:
            coded_bytes: size in bytes of the other data if they are coded with the codebook.
            raw_bytes: size in bytes of the other data if they are raw.
        """
        return self.share is None or coded_bytes <= (self.share + CLEARLY_LESS) * raw_bytes

    def note(self, coded_bytes: float, raw_bytes: float) -> None:
        """Sets `has_drifted` according to the sizes of the newest data. coded_bytes, raw_bytes: size of these data in
        bytes, coded and raw."""
        if self.share is None:
            self.share = coded_bytes / raw_bytes
        self.has_drifted = coded_bytes > (self.share + _DRIFT) * raw_bytes

    def is_due(self, use: int) -> bool:
        """Returns whether a codebook should be learned now. use: the number of the present use, counted from 1."""
        if self.learned_at == 0:
            return True
        return (self.found is None or self.has_drifted) and use >= _GROWTH * self.learned_at

    @property
    def is_hopeless(self) -> bool:
        """Whether the codebook has drifted although it was learned again `_MOST_TIMES` times or more."""
        return self.has_drifted and self.times >= _MOST_TIMES
