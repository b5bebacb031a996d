"""Which tensors of a checkpoint are coded, and with which codebooks: weights of a kind share one, which is learned from
rows that are drawn from up to 8 of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._layout import geometry as _rows
from .._machine import memory
from .._schemes import AnyCodebook, Options, Request, checked, learn, surveyed
from .._schemes.clusters import check_clusters
from .._schemes.learning import CLEARLY_LESS, LEAST_BYTES, ROW_BYTES, Learner, kind_of
from ._source import SourceTensor

_LEAST_ITEM_BYTES = 512  # an array's shorter items are no rows: their index would take what they save
SAMPLE_ELEMENTS = 1 << 19  # what `ibp.compress` learns from
_CHECK_BYTES = 16 << 20  # of rows that a codebook is tried on that has no coded form for every row
TRIED_BYTES = 1 << 18  # of rows of a tensor that the codebook of its kind is tried on
_SAMPLED_TENSORS = 8  # of a kind, at most
_LEAST_ROWS = 16
_LEAST_SAVED_BYTES = 1024  # what a table's entries in the header take, about
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CheckpointLearning:
    """How codebooks are learned.

    Attributes:
        options: of `ibp.compress`. row_bytes: None: 4,096 bytes of the flat tensor; an item of an array of numpy if it
            has 512 bytes to 64 KiB.
        device: that codes rows with the codebooks.
    """

    options: Options
    device: torch.device = _CPU

    @classmethod
    def of(cls, options: Options) -> CheckpointLearning:
        """Returns how codebooks are learned by options, which are checked. Raises TypeError and ValueError for wrong
        ones."""
        clusters, rows = options.clusters, options.row_bytes
        options = checked(replace(options, clusters=None))
        check_clusters(clusters)
        rows = None if rows is None else whole_number("row_bytes", rows, 1, _core.MAX_ROW_BYTES)
        return cls(replace(options, clusters=clusters, row_bytes=rows), memory.usual(options.device))

    def geometry_of(self, tensor: SourceTensor) -> _rows.Geometry:
        whole = _rows.Geometry(torch.Size(tensor.shape), tensor.dtype, 1)
        row_bytes = self.options.row_bytes or min(ROW_BYTES, max(1, whole.num_bytes))
        if self.options.row_bytes is None and tensor.has_items and len(tensor.shape) > 1:
            if _LEAST_ITEM_BYTES <= whole.item_bytes <= _core.MAX_ROW_BYTES:
                row_bytes = whole.item_bytes
        return replace(whole, row_bytes=row_bytes)

    def is_worth_coding(self, tensor: SourceTensor) -> bool:
        """Whether a tensor is large enough for a table, and of a dtype that tables have."""
        has_dtype = tensor.dtype in _rows.DTYPES and tensor.entry is None
        return self.options.scheme != "raw" and has_dtype and tensor.num_bytes >= LEAST_BYTES

    def kind_of(self, tensor: SourceTensor) -> tuple:
        """The kind of a tensor (see `_schemes/learning.py`), and the bytes of its rows: such tensors share a
        codebook."""
        return kind_of(tensor.name, torch.Size(tensor.shape), tensor.dtype), self.geometry_of(tensor).row_bytes

    def learn(self, scheme: str, sample: torch.Tensor, geometry: _rows.Geometry, all_rows: bool) -> AnyCodebook | None:
        """A codebook for a tensor, learned from a sample of its rows; None where raw rows are best. sample: uint8 [n *
        row_bytes]; all_rows: whether every row has to have a coded form."""
        return learn(scheme, Request(sample, geometry, self.device, self.options, 0, codes_invariant=all_rows))


class Codebooks:
    """The codebooks of a checkpoint's tensors.

    Args:
        learning: how they are learned.
        tensors: all of the checkpoint.
        kept: names of tensors that are not to be coded.
    """

    def __init__(
        self,
        learning: CheckpointLearning,
        tensors: Sequence[SourceTensor],
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self._learning, self._kept = learning, kept
        self._kinds: dict[tuple, list[SourceTensor]] = {}
        for tensor in tensors:
            if self.is_coded(tensor):
                self._kinds.setdefault(learning.kind_of(tensor), []).append(tensor)
        self._of_kinds: dict[tuple, Learner[AnyCodebook]] = {}
        self._of_tensors: dict[SourceTensor, tuple[AnyCodebook | None, float | None]] = {}

    def prepare(self, tensors: Sequence[SourceTensor], jobs: int = 1) -> None:
        """Learns the codebooks of tensors: first one for each kind, then, by several threads, one for each tensor that
        needs its own. A single tensor's own is learned when `of` asks for it."""
        for tensor in tensors:
            if self.is_coded(tensor) and (kind := self._learning.kind_of(tensor)) not in self._of_kinds:
                self._of_kinds[kind] = self._learned(kind, sample_of(self._kinds[kind], self._geometry(kind)))
        if len(tensors) == 1:
            return
        with ThreadPoolExecutor(jobs, "ibp-learner") as pool:
            for _ in pool.map(self.of, tensors):
                pass

    def of(self, tensor: SourceTensor) -> AnyCodebook | None:
        """The codebook of a tensor that has been prepared; None where it is kept as it is."""
        return self._found(tensor)[0] if self.is_coded(tensor) else None

    def savings(self, tensor: SourceTensor) -> float | None:
        """What the codebook of a prepared tensor saves of rows that it was tried on; None: it was tried on none."""
        return self._found(tensor)[1] if self.is_coded(tensor) else None

    def is_coded(self, tensor: SourceTensor) -> bool:
        """Whether a tensor is one that may have a codebook."""
        return tensor.name not in self._kept and self._learning.is_worth_coding(tensor)

    def _found(self, tensor: SourceTensor) -> tuple[AnyCodebook | None, float | None]:
        if tensor not in self._of_tensors:
            self._of_tensors[tensor] = self._find(tensor)
        return self._of_tensors[tensor]

    def _find(self, tensor: SourceTensor) -> tuple[AnyCodebook | None, float | None]:
        kind = self._learning.kind_of(tensor)
        codebook = self._of_kinds[kind].found
        if codebook is None or (len(self._kinds[kind]) == 1 and not codebook.is_partial):
            return codebook, None
        return self._tried(tensor, kind, codebook)

    def _geometry(self, kind: tuple) -> _rows.Geometry:
        return self._learning.geometry_of(self._kinds[kind][0])

    def _tried(
        self, tensor: SourceTensor, kind: tuple, codebook: AnyCodebook
    ) -> tuple[AnyCodebook | None, float | None]:
        """The codebook of the kind, or one of the tensor's own where that one loses a point, and what it saves."""
        geometry = self._geometry(kind)
        sample = sample_of([tensor], geometry, _CHECK_BYTES if codebook.is_partial else TRIED_BYTES)
        savings = savings_of(sample, codebook)
        if self._of_kinds[kind].fits(1 - savings, 1):
            return codebook, savings
        sample = sample if codebook.is_partial else sample_of([tensor], geometry)
        own = self._learning.learn(self._learning.options.scheme, sample, geometry, codebook.is_partial)
        tried = {one: savings_of(sample, one) for one in (codebook, own) if one is not None}
        best = max(tried, key=tried.__getitem__)
        return (best, tried[best]) if _pays(tried[best], geometry) else (None, None)

    def _learned(self, kind: tuple, sample: torch.Tensor) -> Learner[AnyCodebook]:
        """The codebook of a kind, learned from a sample; None where raw is best."""
        geometry = self._geometry(kind)
        codebook = self._learning.learn(self._learning.options.scheme, sample, geometry, False)
        savings = 0.0 if codebook is None else savings_of(sample, codebook)
        return Learner(codebook, 1 - savings) if _pays(savings, geometry) else Learner()


def sample_of(tensors: Sequence[SourceTensor], geometry: _rows.Geometry, num_bytes: int | None = None) -> torch.Tensor:
    """Returns whole rows of up to 8 tensors of one geometry, uint8 [n * row_bytes]; a tensor of one short row gives
    that row, with zeros. num_bytes: of the sample; None: 2^19 elements."""
    row_bytes = geometry.row_bytes
    wanted_bytes = SAMPLE_ELEMENTS * geometry.dtype.itemsize if num_bytes is None else num_bytes
    chosen = [
        tensors[number] for number in np.linspace(0, len(tensors) - 1, min(len(tensors), _SAMPLED_TENSORS)).astype(int)
    ]
    wanted = max(_LEAST_ROWS, wanted_bytes // row_bytes // len(chosen))
    num_rows = geometry.num_bytes // row_bytes
    if num_rows == 0:
        row = np.zeros(row_bytes, np.uint8)
        row[: geometry.num_bytes] = chosen[0].read(0, geometry.num_bytes)
        return torch.from_numpy(row)
    sample = np.empty((len(chosen), min(wanted, num_rows), row_bytes), np.uint8)
    for seed, (rows, tensor) in enumerate(zip(sample, chosen)):
        for row, number in zip(rows, _rows.sampled(num_rows, wanted, seed).tolist()):
            row[:] = tensor.read(number * row_bytes, (number + 1) * row_bytes)
    return torch.from_numpy(sample.reshape(-1))


def savings_of(sample: torch.Tensor, codebook: AnyCodebook) -> float:
    """The share of their bytes that a codebook saves of rows, the last one shorter or not, their index counted."""
    geometry = _rows.Geometry(sample.shape, torch.uint8, codebook.row_bytes)
    stored = surveyed(sample, codebook, _CPU).stored
    return 1 - (stored + geometry.index_bytes(True)) / geometry.num_bytes


def _pays(savings: float, geometry: _rows.Geometry) -> bool:
    return savings > CLEARLY_LESS and savings * geometry.num_bytes > _LEAST_SAVED_BYTES
