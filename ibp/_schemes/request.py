"""Holds the options of `ibp.compress`, and draws the rows from which a codebook is learned."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from .._layout import geometry as _rows
from .._layout import slots
from .._machine import memory, staging
from .._machine.numa import Numa
from .codebook import AnyCodebook

_LEAST_ROWS, _LEAST_FEW_ROWS = 1024, 4096
_HOST_ELEMENTS, _LEAST_HOST_ROWS = 1 << 19, 16
_FEW_SHARE = 0.01
# Bytes that an analysis without a given sample looks at. A codebook a table loses at most 0.07 points of savings at 1 %
# of the rows (benchmarks/sampling.py).
_SAMPLE_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}


@dataclass(frozen=True)
class Options:
    """Holds the arguments of `ibp.compress` other than x and inplace; its docstring describes them. All code below
    `ibp.compress` reads them from here. `estimation.checked` checks them as far as that needs no tensor."""

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


@dataclass(frozen=True)
class Request:
    """Holds the rows of a tensor for which a codebook is wanted, and the options for learning one.

    Attributes:
        data: the bytes of the tensor, uint8 [geometry.num_bytes].
        geometry: how these bytes are cut into rows.
        device: where the codebook is learned.
        options: checked by `estimation.checked`.
        slot_bytes: the size of the table's slots; 0: the table is packed; None: the size is still to be chosen.
        paper: an option of scheme "ibp" (see `ibp.codecs.analyze`).
        codes_invariant: whether the codebook has a coded form for every row, also for rows that lack what all sampled
            rows have in common.
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
    measured: list[tuple[AnyCodebook, torch.Tensor, slots.Survey]] = field(
        default_factory=list, init=False, compare=False
    )

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
        """Those of `rows` that `estimate` compares schemes on, and clusters are learned from."""
        geometry = self.geometry
        if self.options.sample is None:
            most = max(1, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
            wanted = min(most, max(_LEAST_FEW_ROWS, int(geometry.num_rows * _FEW_SHARE)))
        else:
            wanted = int(geometry.num_rows * self.options.sample) + 1
        return _rows.sample(self.rows, geometry.row_bytes, wanted)

    @functools.cached_property
    def host_rows(self) -> torch.Tensor:
        """Sampled whole rows on the CPU, about 2^19 elements: what the core learns symbols from, and what "auto"
        compares schemes on."""
        geometry = self.geometry
        if geometry.num_bytes < geometry.row_bytes:
            return self.rows.cpu()
        wanted = max(_LEAST_HOST_ROWS, _HOST_ELEMENTS * geometry.dtype.itemsize // geometry.row_bytes)
        if self.options.sample is not None:
            wanted = min(wanted, int(geometry.num_rows * self.options.sample) + 1)
        return staging.to_host(_rows.sample(self.data, geometry.row_bytes, wanted))

    def known(self, codebook: AnyCodebook) -> tuple[torch.Tensor, slots.Survey] | None:
        """What `measured` says of a codebook; None where it was not learned from `host_rows`."""
        return next(((lengths, survey) for learned, lengths, survey in self.measured if learned is codebook), None)
