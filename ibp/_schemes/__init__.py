"""The registry of schemes: how each learns a codebook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _rows, _staging
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
        return _staging.to_device(_rows.sample(self.data, geometry.row_bytes, wanted), self.device)

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
