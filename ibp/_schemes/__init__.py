"""The registry of schemes, and the choice between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _layout, _rows
from .clusters import ClusteredCodebook, learn_clusters
from .masks import learning as analysis
from .masks.codebook import Codebook
from .planes import PlanesCodebook, learn_planes

AnyCodebook = Codebook | PlanesCodebook | ClusteredCodebook

_SAMPLE_SHARE, _LEAST_SAMPLE_ROWS = 0.01, 4096
_SAMPLE_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}  # of what schemes are compared on


@dataclass(frozen=True)
class Request:
    """What `compress` was asked for, as far as it matters to learning a codebook."""

    data: torch.Tensor
    geometry: _rows.Geometry
    device: torch.device
    sample: float | None = None
    chunk_bytes: int | None = None
    tau: float | None = None
    paper: bool = False
    slot_bytes: int | None = None  # 0: packed; None: to be chosen
    clusters: int | str | None = None
    progress: bool = False

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Sampled whole rows on the working device, uint8: what all schemes learn from. A table of one short row gives that row, with zeros."""
        geometry = self.geometry
        if 0 < geometry.num_bytes < geometry.row_bytes:
            return torch.nn.functional.pad(self.data, (0, geometry.row_bytes - geometry.num_bytes)).to(self.device)
        wanted = analysis.sampled_rows(geometry.num_rows, geometry.row_bytes, self.sample, self.device)
        return _rows.to_device(_rows.sample(self.data, geometry.row_bytes, wanted), self.device)

    @functools.cached_property
    def few_rows(self) -> torch.Tensor:
        """Those of `rows` that schemes are compared on, and symbols and clusters learned from."""
        geometry = self.geometry
        if self.sample is None:
            most = max(1, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
            wanted = min(most, max(_LEAST_SAMPLE_ROWS, int(geometry.num_rows * _SAMPLE_SHARE)))
        else:
            wanted = int(geometry.num_rows * self.sample) + 1
        return _rows.sample(self.rows, geometry.row_bytes, wanted)


def _learn_masks(request: Request) -> AnyCodebook:
    return _split(analysis.learn(request.rows, request.geometry.row_bytes, request.geometry.num_rows, request.device, request.chunk_bytes, request.tau,
                                 request.paper, request.progress), request)


def _learn_ranks(request: Request) -> AnyCodebook:
    return _split(learn_planes(request.few_rows, request.geometry.row_bytes, request.geometry.num_rows, request.geometry.dtype).codebook, request)


def _split(codebook, request):
    """Into clusters, if they were asked for."""
    if request.clusters in (None, 1) or request.geometry.num_rows < 2:
        return codebook
    return learn_clusters(codebook, request.few_rows, request.geometry.num_rows, request.clusters, request.tau)


# How each scheme learns a codebook; "raw" has none.
LEARNERS: dict[str, Callable[[Request], AnyCodebook | None]] = {"raw": lambda request: None, "ibp": _learn_masks, "planes": _learn_ranks}
SCHEME_NAMES = ("auto", *LEARNERS)


def check_scheme(scheme: str, chunk_bytes: int | None = None, tau: float | None = None) -> None:
    if scheme not in SCHEME_NAMES:
        raise ValueError(f"scheme is {scheme!r}; wanted one of {list(SCHEME_NAMES)}")
    if scheme not in ("auto", "ibp") and (chunk_bytes is not None or tau is not None):
        raise ValueError(f"chunk_bytes and tau belong to scheme 'ibp', but scheme is {scheme!r}")


def learn(scheme: str, request: Request) -> AnyCodebook | None:
    """A codebook of a scheme for a table; None for raw rows. "auto" compares all schemes on a sample, or is "ibp" where chunk_bytes or tau is given."""
    if scheme == "auto" and (request.chunk_bytes is not None or request.tau is not None):
        scheme = "ibp"
    if scheme == "auto":
        candidates = compare(request)
        return min(candidates, key=lambda candidate: (candidate.cost, candidate.scheme != "raw", candidate.stored)).codebook
    return LEARNERS[scheme](request)


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
    return [_measured(scheme, LEARNERS[scheme](request), request.few_rows, request) for scheme in LEARNERS]


def _measured(scheme, codebook, rows, request):
    geometry = request.geometry
    sampled = _rows.Geometry(torch.Size((rows.numel() // geometry.row_bytes, geometry.row_bytes)), torch.uint8, geometry.row_bytes)
    scale = geometry.num_bytes / sampled.num_bytes  # a short last row counts as what it is
    if codebook is None:
        lengths, codebook_bytes = torch.zeros(sampled.num_rows, dtype=torch.uint16, device=request.device), 0
    else:
        lengths, codebook_bytes = analysis.measure(rows, codebook, request.device), codebook.nbytes
    survey = _layout.survey(lengths, sampled)
    stored = survey.stored * scale + codebook_bytes
    if request.slot_bytes == 0:
        return Candidate(scheme, codebook, stored, stored)
    slot_bytes = _layout.choose_slot_bytes(survey, sampled) if request.slot_bytes is None else request.slot_bytes
    return Candidate(scheme, codebook, _layout.fetch_cost(lengths, survey, sampled, slot_bytes) * scale + codebook_bytes, stored)
