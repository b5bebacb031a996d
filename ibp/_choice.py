"""The choice between schemes: what every one would cost a table, and which one "auto" takes.

For slots a scheme must not be slower than raw rows: the link brings a row's sectors and the decoder rebuilds it, and
    the slower of both binds.
Packed rows and `compress_` go by bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _layout, _rows, _schemes
from ._schemes import SCHEMES, AnyCodebook, ClusteredCodebook, PlanesCodebook, Request, measure

# What one NVIDIA H200 on PCIe 5 x16 does with all of its multiprocessors. Sources are files of benchmarks/results.
LINK_BYTES_PER_NS = 51.4  # a kernel that reads pinned memory (gather.csv, raw rows of 2 KiB)
LEAST_ROW_NS = (
    1.45  # of a row that the link brings, however short (gather.csv, synthetic rows of 128 B, 75 and 90 % saved)
)
CODED_LINK_SHARE = (
    0.9  # of the link's rate, for coded rows (gather.csv, 256 B and more: 0.90 to 0.99 where no decoder binds)
)
WRITTEN_BYTES_PER_NS = 3270.0  # decoded rows (codec.csv, memset)
MASKS_BYTES_PER_NS = (
    419.0  # of rows of scheme ibp (gather.csv, 64 KiB, 90 % saved; decoding alone in codec.csv: 480 to 1,900)
)
DENSE_ROW_NS = (
    2.6  # of a dense row of scheme planes, at least (gather.csv, 128 B: 2.56 to 2.60 for two and four bytes an element)
)
LISTED_ROW_NS = 1.9  # of a listed row, at least (gather.csv, cora)
FAST_ELEMENTS_PER_NS = 170.0  # dense rows of digits of two bits (codec.csv, FP32 rows of 128 B; longer ones are faster)
DENSE_ELEMENTS_PER_NS = 110.0  # other dense rows (codec.csv, LLM keys and values)
LISTED_ELEMENTS_PER_NS = (
    40.0  # elements' worth of stored bytes of listed rows (a BF16 ReLU set of 70 % zeros: 354 GB/s at 77 % saved)
)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its codebook, and what it is expected to cost the whole table, by the sample that it was measured
    on.

    Attributes:
        stored_bytes: of the coded rows and the codebook, as `table.stored_bytes`.
        slot_bytes: bytes of a slot, 0 for packed rows.
        nbytes: of all memory that the table takes, as `table.nbytes`.
        link_bytes: of the sectors that fetching every row once reads, as `table.link_bytes`.
        fetch_bytes: link_bytes with second fetches of rows that overflow their slot priced in, and the codebook.
        index_bytes: bytes of lengths and bases.
        row_ns: time in which a GPU fetches a row from pinned memory, in ns, by the constants above.
    """

    scheme: str
    codebook: AnyCodebook | None
    stored_bytes: int
    slot_bytes: int
    nbytes: int
    link_bytes: int
    fetch_bytes: int
    index_bytes: int
    row_ns: float


def learn(scheme: str, request: Request, in_place: bool = False) -> AnyCodebook | None:
    """A codebook of a scheme for a table; None for raw rows.

    "auto" takes the best of all schemes on a sample (see `choose`), or the one whose options are given.
    """
    if scheme == "auto":
        scheme = (
            _schemes.scheme_of({"chunk_bytes": request.chunk_bytes, "tau": request.tau, "paper": request.paper})
            or "auto"
        )
    if scheme == "auto":
        return choose(compare(request), in_place).codebook
    return _schemes.learn(scheme, request)


def compare(request: Request) -> list[Candidate]:
    """Every scheme, measured on the same sample of the table's rows; raw rows first. One whose rows would take more
    bytes than x is raw."""
    raw = _raw(request)
    if request.geometry.num_bytes == 0:
        return [raw]
    learned = {scheme: _schemes.learn(scheme, request) for scheme in SCHEMES}
    found = (_measured(scheme, codebook, request) for scheme, codebook in learned.items() if codebook is not None)
    return [raw, *(candidate for candidate in found if candidate is not None)]


def choose(candidates: list[Candidate], in_place: bool = False) -> Candidate:
    """The best of what `compare` found.

    In place: the one of fewest stored bytes. Packed: likewise, or raw rows where the index takes what is saved. Slots:
        the one that fetches the
    fewest bytes, of those that a GPU fetches faster than raw rows, or as fast and from less memory; raw rows if there
    is none.
    """
    raw, coded = candidates[0], candidates[1:]
    if in_place:
        return min(candidates, key=lambda candidate: candidate.stored_bytes)
    if any(candidate.slot_bytes == 0 for candidate in coded):
        return min(candidates, key=lambda candidate: candidate.stored_bytes + candidate.index_bytes)
    better = [candidate for candidate in coded if (candidate.row_ns, candidate.nbytes) < (raw.row_ns, raw.nbytes)]
    return min(better, key=lambda candidate: (candidate.fetch_bytes, candidate.stored_bytes), default=raw)


def row_ns(codebook: AnyCodebook | None, row_bytes: int, stored_bytes: float, link_bytes: float) -> float:
    """Time in which a GPU fetches a row from pinned memory and rebuilds it, in ns.

    Args:
        codebook: that the rows are coded with; None for raw ones.
        row_bytes: bytes of a row.
        stored_bytes, link_bytes: of a mean row as coded, and of the sectors that fetching it reads.
    """
    if codebook is None:
        return max(link_bytes / LINK_BYTES_PER_NS, LEAST_ROW_NS)
    return max(
        link_bytes / (LINK_BYTES_PER_NS * CODED_LINK_SHARE), LEAST_ROW_NS, _decode_ns(codebook, row_bytes, stored_bytes)
    )


def _decode_ns(codebook: AnyCodebook, row_bytes: int, stored_bytes: float) -> float:
    """Time of the decoder for a row."""
    first = codebook.codebooks[0] if isinstance(codebook, ClusteredCodebook) else codebook
    written_ns = row_bytes / WRITTEN_BYTES_PER_NS
    if not isinstance(first, PlanesCodebook):
        return max(written_ns, row_bytes / MASKS_BYTES_PER_NS)
    if first.listed:
        return max(written_ns, LISTED_ROW_NS, stored_bytes / first.element_bytes / LISTED_ELEMENTS_PER_NS)
    rate = FAST_ELEMENTS_PER_NS if first.is_fast else DENSE_ELEMENTS_PER_NS
    return max(written_ns, DENSE_ROW_NS, first.columns / rate)


def _raw(request: Request) -> Candidate:
    """Raw rows, which no sample needs to be measured for."""
    geometry, row_bytes = request.geometry, request.geometry.row_bytes
    link_bytes = _layout.raw_link_bytes(geometry)
    time = row_ns(None, row_bytes, row_bytes, link_bytes / max(1, geometry.num_rows))
    return Candidate("raw", None, geometry.num_bytes, row_bytes, geometry.num_bytes, link_bytes, link_bytes, 0, time)


def _measured(scheme: str, codebook: AnyCodebook, request: Request) -> Candidate | None:
    """A candidate; None where its rows would take no fewer bytes than raw ones."""
    geometry, rows = request.geometry, request.few_rows
    sampled = _rows.Geometry(
        torch.Size((rows.numel() // geometry.row_bytes, geometry.row_bytes)), torch.uint8, geometry.row_bytes
    )
    scale = geometry.num_bytes / sampled.num_bytes  # a short last row counts as what it is
    lengths = measure(rows, codebook, request.device)
    survey = _layout.survey(lengths, sampled)
    stored_bytes = round(survey.stored * scale) + codebook.nbytes
    if stored_bytes >= geometry.num_bytes:
        return None
    slot_bytes = _layout.choose_slot_bytes(survey, sampled) if request.slot_bytes is None else request.slot_bytes
    overflow_bytes = round(survey.overflow_bytes(slot_bytes) * scale) if slot_bytes < geometry.row_bytes else 0
    index_bytes = _layout.index_bytes(geometry, overflow_bytes > 0)
    words = codebook.words(torch.device("cpu"))
    nbytes = (
        _layout.slots_size(geometry, slot_bytes)
        + overflow_bytes
        + index_bytes
        + codebook.nbytes
        + words.numel() * words.element_size()
    )
    link_bytes = _layout.link_bytes(lengths, sampled, slot_bytes)
    fetched_bytes = link_bytes + _layout.second_fetch_bytes(survey, sampled, slot_bytes)
    time = row_ns(codebook, geometry.row_bytes, survey.stored / sampled.num_rows, fetched_bytes / sampled.num_rows)
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
