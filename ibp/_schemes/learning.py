"""Which codebook: the options of `ibp.compress`, the table of schemes, and the choice between them; and the `Learner`,
which says for data of a kind when a codebook is learned anew.

`learn` finds the codebook of a `Request`, which is the rows of a tensor and the options. Scheme "auto" learns a
codebook of every scheme that may be best, measures a sample of the rows with each, and chooses by what the whole table
would cost. For slots a scheme must not be slower than raw rows: the link brings a row's sectors and the decoder
rebuilds the row, and the slower of the two decides. Packed rows and `compress(inplace=True)` are chosen by their bytes.
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
from .._layout import geometry as _rows
from .._machine import calibration, memory, staging
from .._machine.calibration import Calibration
from .._machine.numa import Numa
from . import masks, planes
from .clusters import check_clusters, split
from .codebook import AnyCodebook, check_codebook, coder_rates, measure, work_of

_LEAST_ROWS, _LEAST_FEW_ROWS = 1024, 4096
_HOST_ELEMENTS, _LEAST_HOST_ROWS = 1 << 19, 16
_FEW_SHARE = 0.01
# Bytes that an analysis without a given sample looks at. A codebook a table loses at most 0.07 points of savings at 1 %
# of the rows (benchmarks/sampling.py).
_SAMPLE_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
# The coded bytes of a scheme are at least this share of their estimate (0.985 to 1.03 on the sets of ratio.csv).
ESTIMATE_MARGIN = 0.98
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """Holds the arguments of `ibp.compress` other than x and inplace; its docstring describes them. All code below
    `ibp.compress` reads them from here. `checked` checks them as far as that needs no tensor."""

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
    """Holds the rows of a tensor that are to be coded, and the options. `of` makes a request from a tensor. Samples of
    the rows are drawn when they are first asked for.

    Attributes:
        data: the bytes of the tensor, uint8 [geometry.num_bytes].
        geometry: how these bytes are cut into rows.
        device: where the codebook is learned and the rows are coded.
        options: checked by `checked`.
        slot_bytes: the size of the table's slots; 0: the table is packed; None: the size is still to be chosen.
        paper: an option of scheme "ibp" (see `ibp.codecs.analyze`).
        codes_invariant: whether the codebook has a coded form for every row, also for rows that lack what all sampled
            rows have in common.
        in_place: whether rows stay where they are, so that "auto" takes the scheme of fewest bytes.
        near: returns the bytes in memory of the device, if they are copied there ahead; None: they are not.
        measured: the codebooks that were learned from `host_rows`, each with the lengths that these rows have with it,
            and the survey of the lengths.
    """

    data: torch.Tensor
    geometry: _rows.Geometry
    device: torch.device
    options: Options = Options()
    slot_bytes: int | None = None
    paper: bool = False
    codes_invariant: bool = False
    in_place: bool = False
    near: Callable[[], torch.Tensor] | None = None
    measured: list[tuple[AnyCodebook, torch.Tensor, _rows.Survey]] = field(
        default_factory=list, init=False, compare=False
    )

    @classmethod
    def of(cls, x: torch.Tensor, options: Options, paper: bool = False) -> Request:
        """Returns the rows of a tensor, which `check_tensor` has checked. The options are checked here, without the
        tensor and with it.

        Raises:
            TypeError: an option is of another type.
            ValueError: an option is out of its range, or contradicts another one.
        """
        options = checked(options)
        device, codebook = memory.usual(options.device, x), options.codebook
        if codebook is None:
            geometry = _rows.Geometry.of(x, options.row_bytes)
        else:
            check_codebook(codebook)
            if options.row_bytes not in (None, codebook.row_bytes):
                raise ValueError(
                    f"row_bytes is {options.row_bytes}, but the codebook is for rows of {codebook.row_bytes} bytes"
                )
            geometry = _rows.Geometry(x.shape, x.dtype, codebook.row_bytes)
        slot_bytes = _rows.checked_slot_bytes(options.layout, options.slot_bytes, geometry.row_bytes)
        return cls(_rows.bytes_of(x), geometry, device, options, slot_bytes, paper)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Sampled whole rows on the device, uint8 [n * row_bytes]. A table of one short row gives that row, with
        zeros."""
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
        return staging.to_device(_rows.sample(data, geometry.row_bytes, wanted), self.device)

    @functools.cached_property
    def few_rows(self) -> torch.Tensor:
        """The sampled rows that `compare` measures with every scheme, and that clusters are learned from."""
        geometry = self.geometry
        if self.options.sample is None:
            most = max(1, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
            wanted = min(most, max(_LEAST_FEW_ROWS, int(geometry.num_rows * _FEW_SHARE)))
        else:
            wanted = int(geometry.num_rows * self.options.sample) + 1
        return _rows.sample(self.rows, geometry.row_bytes, wanted)

    @functools.cached_property
    def host_rows(self) -> torch.Tensor:
        """Sampled whole rows on the CPU, about 2^19 elements: the core learns symbols from them, and "auto" measures
        them with every scheme."""
        geometry = self.geometry
        if geometry.num_bytes < geometry.row_bytes:
            return self.rows.cpu()
        wanted = max(_LEAST_HOST_ROWS, _HOST_ELEMENTS * geometry.dtype.itemsize // geometry.row_bytes)
        if self.options.sample is not None:
            wanted = min(wanted, int(geometry.num_rows * self.options.sample) + 1)
        return staging.to_host(_rows.sample(self.data, geometry.row_bytes, wanted))

    def known(self, codebook: AnyCodebook) -> tuple[torch.Tensor, _rows.Survey] | None:
        """Returns what `measured` says of a codebook; None if it was not learned from `host_rows`."""
        return next(((lengths, survey) for learned, lengths, survey in self.measured if learned is codebook), None)


# ---- the table of schemes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """How codebooks of a scheme are learned. A new scheme is a file in this folder and a row in `SCHEMES` (and what
    csrc/FORMAT.md and csrc/core/schemes.h say of it).

    Attributes:
        learn: finds a codebook for a request; None: raw rows are best.
        estimates: (rows, row_bytes, num_rows): returns upper bounds of the share of a table's bytes that the scheme
            saves, the one that is found soonest first, by a sample of its rows on the CPU, uint8 [n * row_bytes]; None
            if learning takes no longer.
        relearn: (codebook, rows, sizes, options): returns codebooks of the same form, one for each group of rows; rows
            is uint8 [n * row_bytes], with the rows of a group next to each other, and sizes are their numbers.
        options: the arguments of `ibp.compress` and `ibp.codecs.analyze` that belong to the scheme, each with a
            function that raises ValueError for wrong values.
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
    """Returns the best codebook of scheme planes that the device can code a table's rows with."""

    def learned(codes_invariant: bool) -> planes.PlanesCodebook:
        rows, geometry, level = request.host_rows, request.geometry, request.options.level
        of_table = geometry.row_bytes, geometry.num_rows, geometry.dtype
        found = planes.learn_planes(rows, *of_table, level=level, codes_invariant=codes_invariant)
        if found.survey is not None:
            request.measured.append((found.codebook, found.entries, found.survey))
        return found.codebook

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
# "auto" chooses among these and raw rows. Schemes with estimates come last: they are learned only if they may be best.
_CODED = sorted((name for name in SCHEMES if name != "raw"), key=lambda name: SCHEMES[name].estimates is not None)


def check_scheme(scheme: str, **options: object) -> None:
    """Raises ValueError for an unknown scheme, for wrong options, and for options of other schemes. Scheme "auto" takes
    the options of any one scheme. An option that is None or has its default is not given."""
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
    """Returns a codebook of a scheme for a table; None for raw rows.

    "auto" takes the best of all schemes on a sample (see `choose`), or the scheme whose options are given.
    """
    if scheme == "auto":
        options = request.options
        if options.chunk_bytes is not None or options.tau is not None or request.paper:
            scheme = "ibp"
        elif options.level not in ("default", None):
            scheme = "planes"
    return _best(request).codebook if scheme == "auto" else learn_scheme(scheme, request)


def learn_scheme(scheme: str, request: Request) -> AnyCodebook | None:
    """Returns a codebook of a scheme for a table, or a codebook for each of the clusters asked for, if they pay; None
    for raw rows."""
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
    if paper and scheme != "ibp":
        raise ValueError(f"paper=True is a choice of scheme 'ibp', but scheme is {scheme!r}")
    options = Options(
        scheme, chunk_bytes, tau, sample, level=level, row_bytes=row_bytes, device=device, progress=progress
    )
    return learn(scheme, Request.of(x, options, paper))


# ---- what a table of each scheme would cost ------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """What a table of all rows is expected to cost with a codebook, by rows that were measured with it.

    Attributes:
        codebook: None for raw rows.
        stored_bytes: bytes of the coded rows and the codebook, as `table.stored_bytes`.
        slot_bytes: bytes of a slot; 0 for packed rows.
        nbytes: all memory that the table takes, as `table.nbytes`.
        link_bytes: the sectors that fetching every row once reads, as `table.link_bytes`.
        fetch_bytes: link_bytes, the price of second fetches of rows that overflow their slot, and the codebook.
        index_bytes: bytes of lengths and bases.
        row_ns: time in which a GPU fetches a row from pinned memory, in ns, by the calibration in force.
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


def compare(request: Request) -> list[Candidate]:
    """Returns a candidate of every scheme, measured on the same sample of the table's rows; raw rows first. A scheme
    whose rows would take more bytes than x is left out."""
    found = [_raw(request)]
    for scheme in _CODED if request.geometry.num_bytes else ():
        found += _coded(request, learn_scheme(scheme, request), request.few_rows, request.device)
    return found


def exact(request: Request, codebook: AnyCodebook) -> list[Candidate]:
    """Returns raw rows, and all rows measured with a codebook if they take fewer bytes."""
    return [_raw(request), *_coded(request, codebook, request.data, request.device, request.options.progress)]


def choose(candidates: list[Candidate], in_place: bool = False) -> Candidate:
    """Returns the best of the candidates, the first of which are raw rows.

    In place: the scheme of fewest stored bytes. Packed: the same, or raw rows if the index takes as many bytes as the
    scheme saves. Slots: the scheme that fetches the fewest bytes, among candidates that a GPU fetches faster than raw
    rows, or as fast and from less memory; raw rows if there is none.
    """
    raw, coded = candidates[0], candidates[1:]
    if in_place:
        return min(candidates, key=lambda candidate: candidate.stored_bytes)
    if any(candidate.slot_bytes == 0 for candidate in coded):
        return min(candidates, key=lambda candidate: candidate.stored_bytes + candidate.index_bytes)
    better = [candidate for candidate in coded if (candidate.row_ns, candidate.nbytes) < (raw.row_ns, raw.nbytes)]
    return min(better, key=lambda candidate: (candidate.fetch_bytes, candidate.stored_bytes), default=raw)


def _best(request: Request) -> Candidate:
    """Returns what `choose` takes, by fewer rows than `compare` looks at. A scheme that cannot be best is not
    learned."""
    candidates, geometry = [_raw(request)], request.geometry
    for name in _CODED if geometry.num_bytes else ():
        estimates = SCHEMES[name].estimates
        if estimates is not None and request.options.clusters in (None, 1):
            best = choose(candidates, request.in_place)
            bounds = estimates(request.host_rows, geometry.row_bytes, geometry.num_rows)
            if not all(_may_be_best(savings, best, request) for savings in bounds):
                continue
        candidates += _coded(request, learn_scheme(name, request), request.host_rows, _CPU)
    return choose(candidates, request.in_place)


def _may_be_best(savings: float, best: Candidate, request: Request) -> bool:
    """Returns whether a scheme that is estimated to save that share of a table's bytes may be better than the best one
    so far. With slots it must save a sector of raw rows."""
    row_bytes, savings = request.geometry.row_bytes, 1 - (1 - savings) * ESTIMATE_MARGIN
    if best.codebook is None and request.slot_bytes != 0:
        sectors = math.ceil(row_bytes * (1 - savings) / _rows.SECTOR_BYTES)
        return sectors < math.ceil(row_bytes / _rows.SECTOR_BYTES)
    return request.geometry.num_bytes * (1 - savings) < best.stored_bytes


def _raw(request: Request) -> Candidate:
    """Returns the candidate of raw rows, for which no row needs to be measured."""
    geometry, row_bytes = request.geometry, request.geometry.row_bytes
    link_bytes, machine = geometry.raw_link_bytes(), calibration.in_force(request.device)
    time = row_ns(None, row_bytes, row_bytes, link_bytes / max(1, geometry.num_rows), machine)
    return Candidate(None, geometry.num_bytes, row_bytes, geometry.num_bytes, link_bytes, link_bytes, 0, time)


def _coded(
    request: Request, codebook: AnyCodebook | None, rows: torch.Tensor, device: torch.device, progress: bool = False
) -> list[Candidate]:
    """Returns the candidate of a codebook; an empty list if the table would take no fewer bytes than raw rows.

    Args:
        rows: a sample of the request's, or all of its data.
        device: measures the rows with the codebook.
    """
    geometry = request.geometry
    if codebook is None or not geometry.num_bytes:
        return []
    sampled = _rows.Geometry(rows.shape, torch.uint8, geometry.row_bytes)
    known = request.known(codebook)
    if known is not None and rows is request.host_rows:
        lengths, survey = known
    else:
        lengths = measure(rows, codebook, device, progress)
        survey = sampled.survey(lengths)
    scale = geometry.num_bytes / sampled.num_bytes  # A short last row counts as what it is.
    stored_bytes = round(survey.stored * scale) + codebook.nbytes
    if stored_bytes >= geometry.num_bytes:
        return []
    slot_bytes = survey.table_slot_bytes if request.slot_bytes is None else request.slot_bytes
    overflow_bytes = round(survey.overflow_bytes(slot_bytes) * scale) if slot_bytes < geometry.row_bytes else 0
    index_bytes = geometry.index_bytes(overflow_bytes > 0)
    words = codebook.words(_CPU)
    nbytes = geometry.slots_size(slot_bytes) + overflow_bytes + index_bytes + codebook.nbytes + words.nbytes
    link_bytes = sampled.link_bytes(lengths, slot_bytes, found=survey)
    second_fetches = survey.spilled(slot_bytes)[0] if slot_bytes else 0  # of rows that overflow their slot
    fetched_bytes = link_bytes + second_fetches * _rows.SECOND_FETCH_BYTES
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
    """Returns the time in which a GPU fetches a row from pinned memory and rebuilds it, in ns.

    Args:
        codebook: what the rows are coded with; None for raw ones.
        row_bytes: bytes of a row.
        stored_bytes, link_bytes: bytes of a mean row as coded, and of the sectors that fetching it reads.
        machine: whose rates to reckon with.
    """
    if codebook is None:
        return max(link_bytes / machine.read_gbps, machine.least_row_ns)
    rates, work = coder_rates(codebook, machine), work_of(codebook, row_bytes, stored_bytes)
    fetch_ns = max(link_bytes / (machine.read_gbps * machine.coded_read_share), machine.least_row_ns)
    # The decoder writes the row to device memory.
    return max(fetch_ns, row_bytes / machine.memset_gbps, rates.least_row_ns, work / rates.work_per_ns)


# ---- one codebook for data of a kind -------------------------------------------------------------------------------
# Learning a codebook takes far longer than coding with it, so weights, caches, activations and messages of a kind share
# one, which is learned from a sample. It is learned anew, or other data get a codebook of their own, if it saves
# clearly less of them.

ROW_BYTES = 4096  # of weights: longer rows save 0.1 % more and keep fewer warps of a multiprocessor busy
LEAST_BYTES = 4096  # A smaller tensor is one row, whose fetch costs the same whatever its bytes.
CLEARLY_LESS = 0.01  # of the original bytes
_DRIFT = 0.02  # of the original bytes: learning anew interrupts work, so it waits for more than a clear loss
_GROWTH = 2.0  # A codebook is learned anew after at least this many times the uses before it was learned.
_MOST_TIMES = 3  # If each misfit is sent twice, data travel raw after a codebook was learned anew so often.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Kind = tuple[str, torch.Size, torch.dtype]
_Found = TypeVar("_Found")


def kind_of(name: str, shape: torch.Size, dtype: torch.dtype) -> Kind:
    """Returns the kind of a tensor: its shape, dtype, and its name without the numbers between dots, so that
    `layers.0.fc1.weight` and `layers.1.fc1.weight` are of one kind."""
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
    """Returns a codebook for data of a kind that come later: every row has a coded form, also rows that lack what the
    sample's rows have in common. None: raw rows are best.

    Args:
        rows: uint8 [n * row_bytes], a sample.
        dtype: of the elements.
        num_rows: over which the codebook's own bytes are spread; None: the sample's.
    """
    num_rows = rows.numel() // row_bytes if num_rows is None else num_rows
    geometry = _rows.Geometry(torch.Size((num_rows, row_bytes // dtype.itemsize)), dtype, row_bytes)
    return SCHEMES[scheme].learn(Request(rows, geometry, rows.device, Options(level=level), codes_invariant=True))


@dataclass
class Learner(Generic[_Found]):
    """Keeps what was learned for a kind of data, and says when to learn anew. From data that do not compress, or that
    never stay as they are, it learns ever more rarely.

    Attributes:
        found: a codebook, or an object made of one; None: raw is best, or nothing was learned yet.
        share: bytes that the data which it was learned from take, to their raw bytes; None: the data that are noted
            next say it.
        learned_at: number of the use that it was learned for, from 1; 0: there was none yet.
        times: how often it was learned anew.
        has_drifted: whether later data take clearly more, or have no room.
    """

    found: _Found | None = None
    share: float | None = None
    learned_at: int = 0
    times: int = 0
    has_drifted: bool = False

    def take(self, found: _Found | None, share: float | None = None, use: int = 1) -> None:
        """Takes what was learned for a use."""
        self.times += self.learned_at > 0
        self.found, self.share, self.learned_at, self.has_drifted = found, share, use, False

    def fits(self, coded_bytes: float, raw_bytes: float) -> bool:
        """Returns whether other data of the kind, which take coded_bytes, do without a codebook of their own."""
        return self.share is None or coded_bytes <= (self.share + CLEARLY_LESS) * raw_bytes

    def note(self, coded_bytes: float, raw_bytes: float) -> None:
        """Notes what the newest data take."""
        if self.share is None:
            self.share = coded_bytes / raw_bytes
        self.has_drifted = coded_bytes > (self.share + _DRIFT) * raw_bytes

    def is_due(self, use: int) -> bool:
        """Returns whether to learn for a use."""
        if self.learned_at == 0:
            return True
        return (self.found is None or self.has_drifted) and use >= _GROWTH * self.learned_at

    @property
    def is_hopeless(self) -> bool:
        """Whether data have no room although a codebook was learned anew again and again."""
        return self.has_drifted and self.times >= _MOST_TIMES
