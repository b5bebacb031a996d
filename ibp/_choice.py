"""The choice between schemes: what "auto" takes, and what every scheme would cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _layout, _rows, _schemes
from ._schemes import SCHEMES, AnyCodebook, Request, measure


def learn(scheme: str, request: Request) -> AnyCodebook | None:
    """A codebook of a scheme for a table; None for raw rows. "auto" compares all schemes on a sample, or is the one whose options are given."""
    if scheme == "auto":
        scheme = _schemes.scheme_of({"chunk_bytes": request.chunk_bytes, "tau": request.tau, "paper": request.paper}) or "auto"
    if scheme == "auto":
        candidates = compare(request)
        return min(candidates, key=lambda candidate: (candidate.cost, candidate.scheme != "raw", candidate.stored)).codebook
    return _schemes.learn(scheme, request)


@dataclass(frozen=True)
class Candidate:
    """A scheme with its codebook, and what it is expected to cost for the whole table, in bytes.

    cost: what fetching every row once reads: whole sectors for slots, second fetches priced in; exact bytes for packed rows; and the codebook.
    stored: exact bytes of rows and codebook.
    """

    scheme: str
    codebook: AnyCodebook | None
    cost: float
    stored: float


def compare(request: Request) -> list[Candidate]:
    """Every scheme, measured on the same sample of the table's rows; raw rows first."""
    if request.geometry.num_bytes == 0:
        return [Candidate("raw", None, 0.0, 0.0)]
    return [_measured(scheme, _schemes.learn(scheme, request), request.few_rows, request) for scheme in SCHEMES]


def _measured(scheme, codebook, rows, request):
    geometry = request.geometry
    sampled = _rows.Geometry(torch.Size((rows.numel() // geometry.row_bytes, geometry.row_bytes)), torch.uint8, geometry.row_bytes)
    scale = geometry.num_bytes / sampled.num_bytes  # a short last row counts as what it is
    if codebook is None:
        lengths, codebook_bytes = torch.zeros(sampled.num_rows, dtype=torch.uint16, device=request.device), 0
    else:
        lengths, codebook_bytes = measure(rows, codebook, request.device), codebook.nbytes
    survey = _layout.survey(lengths, sampled)
    stored = survey.stored * scale + codebook_bytes
    if request.slot_bytes == 0:
        return Candidate(scheme, codebook, stored, stored)
    slot_bytes = _layout.choose_slot_bytes(survey, sampled) if request.slot_bytes is None else request.slot_bytes
    return Candidate(scheme, codebook, _layout.fetch_cost(lengths, survey, sampled, slot_bytes) * scale + codebook_bytes, stored)
