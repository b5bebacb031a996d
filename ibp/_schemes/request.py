"""What a codebook is learned for, and the rows that it is learned from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .._layout import geometry as _rows
from .._layout import slots
from .._machine import memory, staging
from .codebook import AnyCodebook

_LEAST_ROWS, _LEAST_FEW_ROWS = 1024, 4096
_HOST_ELEMENTS, _LEAST_HOST_ROWS = 1 << 19, 16
_FEW_SHARE = 0.01
# Bytes that an analysis without a given sample looks at. A codebook a table loses at most 0.07 points of savings at 1 %
# of the rows (benchmarks/sampling.py).
_SAMPLE_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}


@dataclass(frozen=True)
class Request:
    """What `compress` or `analyze` was asked for, as far as it matters to learning a codebook."""

    data: torch.Tensor  # uint8 [geometry.num_bytes], the table's bytes
    geometry: _rows.Geometry  # how they are cut into rows
    device: torch.device  # where the work is done
    # fraction of the rows to learn from, in (0, 1]; None: as many as fit a fixed number of bytes
    sample: float | None = None
    # chunk_bytes, tau, paper: options of scheme "ibp" (see `ibp.codecs.analyze`)
    chunk_bytes: int | None = None
    tau: float | None = None
    paper: bool = False
    slot_bytes: int | None = None  # of the table's layout; 0: packed; None: to be chosen
    clusters: int | str | None = None  # how many codebooks; "auto"; None or 1: one
    progress: bool = False  # whether to show progress bars
    level: str = "default"  # option of scheme "planes" (see `ibp.compress`)
    # whether codebooks have a coded form for every row, also for rows that lack what all sampled rows have in common
    codes_invariant: bool = False
    # returns the bytes where the working device reads them; None: that reads `data`
    near: Callable[[], torch.Tensor] | None = None
    # returns memory for as many bytes of slots, where `data` is: rows are coded into slots, of the size that the sample
    # asks for, in the pass that measures them. None: they are measured alone
    room_ahead: Callable[[int], torch.Tensor] | None = None
    # codebooks that were learned from `host_rows`, each with the lengths that these have with it, and their survey
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
        if self.sample is None:
            wanted = max(_LEAST_ROWS, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
        else:
            wanted = max(_LEAST_ROWS, -int(-geometry.num_rows * self.sample // 1))
        data, is_far = self.data, self.device.type == "cuda" and not self.data.is_cuda
        if is_far and wanted < geometry.num_bytes // geometry.row_bytes and data.is_pinned():
            data = memory.seen_from(self.device, data)
        return staging.to_device(_rows.sample(data, geometry.row_bytes, wanted), self.device)

    @functools.cached_property
    def few_rows(self) -> torch.Tensor:
        """Those of `rows` that `estimate` compares schemes on, and clusters are learned from."""
        geometry = self.geometry
        if self.sample is None:
            most = max(1, _SAMPLE_BYTES[self.device.type] // geometry.row_bytes)
            wanted = min(most, max(_LEAST_FEW_ROWS, int(geometry.num_rows * _FEW_SHARE)))
        else:
            wanted = int(geometry.num_rows * self.sample) + 1
        return _rows.sample(self.rows, geometry.row_bytes, wanted)

    @functools.cached_property
    def host_rows(self) -> torch.Tensor:
        """Sampled whole rows on the CPU, about 2^19 elements: what the core learns symbols from, and what "auto"
        compares schemes on."""
        geometry = self.geometry
        if geometry.num_bytes < geometry.row_bytes:
            return self.rows.cpu()
        wanted = max(_LEAST_HOST_ROWS, _HOST_ELEMENTS * geometry.dtype.itemsize // geometry.row_bytes)
        if self.sample is not None:
            wanted = min(wanted, int(geometry.num_rows * self.sample) + 1)
        return staging.to_host(_rows.sample(self.data, geometry.row_bytes, wanted))

    def known(self, codebook: AnyCodebook) -> tuple[torch.Tensor, slots.Survey] | None:
        """What `measured` says of a codebook; None where it was not learned from `host_rows`."""
        return next(((lengths, survey) for learned, lengths, survey in self.measured if learned is codebook), None)


def check_sample(sample: float | None) -> None:
    """Raises ValueError unless `sample` is None or a fraction in (0, 1]."""
    if sample is not None and not 0 < sample <= 1:
        raise ValueError(f"sample is {sample}; wanted a fraction in (0, 1], or None")
