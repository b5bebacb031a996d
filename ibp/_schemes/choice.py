"""The choice between schemes: what every one would cost a table, and which one "auto" takes.

For slots a scheme must not be slower than raw rows: the link brings a row's sectors and the decoder rebuilds it, and
    the slower of both binds.
Packed rows and `compress(inplace=True)` go by bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from .. import _schemes
from .._layout import geometry as _rows
from .._layout import slots
from .._machine import calibration
from .._machine.calibration import Calibration, CoderRates
from . import SCHEMES, AnyCodebook, ClusteredCodebook, PlanesCodebook, Request, measure

ESTIMATE_MARGIN = 0.98  # a scheme's coded bytes over their estimate, at least (0.985 to 1.03 on the sets of ratio.csv)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its codebook, and what it is expected to cost the whole table, by the sample that it was measured
    on."""

    scheme: str
    codebook: AnyCodebook | None
    stored_bytes: int  # of the coded rows and the codebook, as `table.stored_bytes`
    slot_bytes: int  # bytes of a slot, 0 for packed rows
    nbytes: int  # of all memory that the table takes, as `table.nbytes`
    link_bytes: int  # of the sectors that fetching every row once reads, as `table.link_bytes`
    fetch_bytes: int  # link_bytes with second fetches of rows that overflow their slot priced in, and the codebook
    index_bytes: int  # bytes of lengths and bases
    row_ns: float  # time in which a GPU fetches a row from pinned memory, in ns, by the calibration in force


def learn(scheme: str, request: Request, in_place: bool = False) -> AnyCodebook | None:
    """A codebook of a scheme for a table; None for raw rows.

    "auto" takes the best of all schemes on a sample (see `choose`), or the one whose options are given.
    """
    if scheme == "auto":
        given = {name: getattr(request.options, name) for name in ("chunk_bytes", "tau", "level")}
        scheme = _schemes.scheme_of(paper=request.paper, **given) or "auto"
    if scheme == "auto":
        return _best(request, in_place).codebook
    return _schemes.learn(scheme, request)


def compare(request: Request) -> list[Candidate]:
    """Every scheme, measured on the same sample of the table's rows; raw rows first. One whose rows would take more
    bytes than x is raw."""
    machine = calibration.in_force(request.device)
    raw = _raw(request, machine)
    if request.geometry.num_bytes == 0:
        return [raw]
    found = (_learned(scheme, request, request.few_rows, machine) for scheme in SCHEMES)
    return [raw, *(candidate for candidate in found if candidate is not None)]


def exact(request: Request, codebook: AnyCodebook) -> list[Candidate]:
    """Raw rows, and rows coded by a codebook, all of them measured, where they take fewer bytes."""
    machine, geometry = calibration.in_force(request.device), request.geometry
    raw = _raw(request, machine)
    if geometry.num_bytes == 0:
        return [raw]
    lengths = measure(request.data, codebook, request.device, request.options.progress)
    survey = slots.survey(lengths, geometry)
    found = measured(codebook.scheme, codebook, request, lengths, survey, geometry, machine)
    stored_bytes = survey.stored + codebook.nbytes
    return [raw, replace(found, stored_bytes=stored_bytes)] if stored_bytes < geometry.num_bytes else [raw]


def _best(request: Request, in_place: bool) -> Candidate:
    """What `choose` takes, by fewer rows than `compare` looks at, and without learning what cannot be best."""
    machine, rows = calibration.in_force(request.device), request.host_rows
    candidates = [_raw(request, machine)]
    if request.geometry.num_bytes == 0:
        return candidates[0]
    for scheme in sorted(SCHEMES.values(), key=lambda scheme: scheme.estimates is not None):
        if scheme.estimates is not None and request.options.clusters in (None, 1):
            best = choose(candidates, in_place)
            bounds = scheme.estimates(rows, request.geometry.row_bytes, request.geometry.num_rows)
            if not all(_may_be_best(savings, best, request) for savings in bounds):
                continue
        found = _learned(scheme.name, request, rows, machine)
        candidates += [] if found is None else [found]
    return choose(candidates, in_place)


def _may_be_best(savings: float, best: Candidate, request: Request) -> bool:
    """Whether a scheme that is estimated to save that share of a table's bytes may be better than the best one so far.
    With slots it must save a sector of raw rows."""
    row_bytes, savings = request.geometry.row_bytes, 1 - (1 - savings) * ESTIMATE_MARGIN
    if best.scheme == "raw" and request.slot_bytes != 0:
        sectors = math.ceil(row_bytes * (1 - savings) / slots.SECTOR_BYTES)
        return sectors < math.ceil(row_bytes / slots.SECTOR_BYTES)
    return request.geometry.num_bytes * (1 - savings) < best.stored_bytes


def choose(candidates: list[Candidate], in_place: bool = False) -> Candidate:
    """The best of what `compare` found.

    In place: the scheme of fewest stored bytes. Packed: likewise, or raw rows where the index takes as many bytes as
    the scheme saves. Slots: the scheme that fetches the fewest bytes, among candidates that a GPU fetches faster than
    raw rows, or as fast and from less memory; raw rows if there is none.
    """
    raw, coded = candidates[0], candidates[1:]
    if in_place:
        return min(candidates, key=lambda candidate: candidate.stored_bytes)
    if any(candidate.slot_bytes == 0 for candidate in coded):
        return min(candidates, key=lambda candidate: candidate.stored_bytes + candidate.index_bytes)
    better = [candidate for candidate in coded if (candidate.row_ns, candidate.nbytes) < (raw.row_ns, raw.nbytes)]
    return min(better, key=lambda candidate: (candidate.fetch_bytes, candidate.stored_bytes), default=raw)


def row_ns(
    codebook: AnyCodebook | None, row_bytes: int, stored_bytes: float, link_bytes: float, machine: Calibration
) -> float:
    """Time in which a GPU fetches a row from pinned memory and rebuilds it, in ns.

    Args:
        codebook: that the rows are coded with; None for raw ones.
        row_bytes: bytes of a row.
        stored_bytes, link_bytes: of a mean row as coded, and of the sectors that fetching it reads.
        machine: whose rates to reckon with.
    """
    if codebook is None:
        return max(link_bytes / machine.read_gbps, machine.least_row_ns)
    rates, work = coder_rates(codebook, machine), work_of(codebook, row_bytes, stored_bytes)
    fetch_ns = max(link_bytes / (machine.read_gbps * machine.coded_read_share), machine.least_row_ns)
    # The decoder writes the row to device memory.
    return max(fetch_ns, row_bytes / machine.memset_gbps, rates.least_row_ns, work / rates.work_per_ns)


def coder_rates(codebook: AnyCodebook, machine: Calibration) -> CoderRates:
    """The rates of the family of coders that rows of a codebook have."""
    first = codebook.codebooks[0] if isinstance(codebook, ClusteredCodebook) else codebook
    if not isinstance(first, PlanesCodebook):
        return machine.masks
    if first.listed:
        return machine.listed
    if first.first_symbol is not None and first.digit_bits == (4,):
        return machine.fast
    if first.element_bytes == 1:
        return machine.one_byte
    return machine.pairs if first.is_fast else machine.dense


def coder_ns(codebook: AnyCodebook, machine: Calibration) -> float:
    """Time to code and decode a byte, in ns."""
    rates = coder_rates(codebook, machine)
    return 1 / rates.encode_gbps + 1 / rates.decode_gbps


def work_of(codebook: AnyCodebook, row_bytes: int, stored_bytes: float) -> float:
    """What a decoder's rate `work_per_ns` counts of a row (see CoderRates)."""
    first = codebook.codebooks[0] if isinstance(codebook, ClusteredCodebook) else codebook
    if not isinstance(first, PlanesCodebook):
        return row_bytes
    return stored_bytes / first.element_bytes if first.listed else first.columns


def _raw(request: Request, machine: Calibration) -> Candidate:
    """Raw rows, which no sample needs to be measured for."""
    geometry, row_bytes = request.geometry, request.geometry.row_bytes
    link_bytes = slots.raw_link_bytes(geometry)
    time = row_ns(None, row_bytes, row_bytes, link_bytes / max(1, geometry.num_rows), machine)
    return Candidate("raw", None, geometry.num_bytes, row_bytes, geometry.num_bytes, link_bytes, link_bytes, 0, time)


def _learned(scheme: str, request: Request, rows: torch.Tensor, machine: Calibration) -> Candidate | None:
    """A candidate, measured on sampled rows; None where its rows would take no fewer bytes than raw ones."""
    codebook, geometry = _schemes.learn(scheme, request), request.geometry
    if codebook is None:
        return None
    sampled = _rows.Geometry(
        torch.Size((rows.numel() // geometry.row_bytes, geometry.row_bytes)), torch.uint8, geometry.row_bytes
    )
    known = request.known(codebook) if rows is request.host_rows else None
    lengths = measure(rows, codebook, rows.device) if known is None else known[0]
    survey = slots.survey(lengths, sampled) if known is None else known[1]
    found = measured(scheme, codebook, request, lengths, survey, sampled, machine)
    return found if found.stored_bytes < geometry.num_bytes else None


def measured(
    scheme: str,
    codebook: AnyCodebook,
    request: Request,
    lengths: torch.Tensor,
    survey: slots.Survey,
    sampled: _rows.Geometry,
    machine: Calibration,
) -> Candidate:
    """A candidate, by the lengths of sampled rows and their survey."""
    geometry = request.geometry
    scale = geometry.num_bytes / sampled.num_bytes  # a short last row counts as what it is
    stored_bytes = round(survey.stored * scale) + codebook.nbytes
    slot_bytes = survey.table_slot_bytes if request.slot_bytes is None else request.slot_bytes
    overflow_bytes = round(survey.overflow_bytes(slot_bytes) * scale) if slot_bytes < geometry.row_bytes else 0
    index_bytes = slots.index_bytes(geometry, overflow_bytes > 0)
    words = codebook.words(torch.device("cpu"))
    nbytes = slots.slots_size(geometry, slot_bytes) + overflow_bytes + index_bytes + codebook.nbytes + words.nbytes
    link_bytes = slots.link_bytes(lengths, sampled, slot_bytes, found=survey)
    second_fetches = survey.spilled(slot_bytes)[0] if slot_bytes else 0  # of rows that overflow their slot
    fetched_bytes = link_bytes + second_fetches * slots.SECOND_FETCH_BYTES
    stored, fetched = survey.stored / sampled.num_rows, fetched_bytes / sampled.num_rows
    time = row_ns(codebook, geometry.row_bytes, stored, fetched, machine)
    return Candidate(
        scheme,
        codebook,
        stored_bytes,
        slot_bytes,
        nbytes,
        round(link_bytes * scale),
        round(fetched_bytes * scale) + codebook.nbytes,
        index_bytes,
        time,
    )
