"""Decides which tensors of a checkpoint are coded, and with which codebooks. Tensors of the same kind share a codebook:
their names differ only in numbers, and their shapes and dtypes are equal. The codebook is learned from rows of up to 8
of these tensors."""

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

# Each item of an array becomes a row if items have at least this size in bytes. For shorter rows, the index would take
# about as many bytes as coding saves.
_LEAST_ITEM_BYTES = 512
SAMPLE_ELEMENTS = 1 << 19  # number of elements from which a codebook is learned, as in `ibp.compress`
# The codebook of a kind is tried on a sample of each tensor. This is the sample's size in bytes for a codebook that
# cannot code every row.
_CHECK_BYTES = 16 << 20
TRIED_BYTES = 1 << 18  # the same size for codebooks that can code every row
_SAMPLED_TENSORS = 8  # largest number of tensors of a kind from which the kind's sample is taken
_LEAST_ROWS = 16  # smallest number of rows that are sampled from a tensor, unless it has fewer rows
_LEAST_SAVED_BYTES = 1024  # A table must save more than this, which is about the size of its entries in the header.
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CheckpointLearning:
    """The options and the device with which codebooks are learned.

    Attributes:
        options: options of `ibp.compress`. If row_bytes is None, a row is 4,096 bytes of the flat tensor. For an array
            of numpy, a row is an item if items have 512 bytes to 64 KiB.
        device: the device that codes rows with the codebooks.
    """

    options: Options
    device: torch.device = _CPU

    @classmethod
    def of(cls, options: Options) -> CheckpointLearning:
        """Checks options of `ibp.compress`, and returns the `CheckpointLearning` that uses them. Raises TypeError or
        ValueError if an option is invalid."""
        clusters, rows = options.clusters, options.row_bytes
        options = checked(replace(options, clusters=None))
        check_clusters(clusters)
        rows = None if rows is None else whole_number("row_bytes", rows, 1, _core.MAX_ROW_BYTES)
        return cls(replace(options, clusters=clusters, row_bytes=rows), memory.usual(options.device))

    def geometry_of(self, tensor: SourceTensor) -> _rows.Geometry:
        """Returns how a tensor is divided into rows."""
        whole = _rows.Geometry(torch.Size(tensor.shape), tensor.dtype, 1)
        row_bytes = self.options.row_bytes or min(ROW_BYTES, max(1, whole.num_bytes))
        if self.options.row_bytes is None and tensor.has_items and len(tensor.shape) > 1:
            if _LEAST_ITEM_BYTES <= whole.item_bytes <= _core.MAX_ROW_BYTES:
                row_bytes = whole.item_bytes
        return replace(whole, row_bytes=row_bytes)

    def is_worth_coding(self, tensor: SourceTensor) -> bool:
        """Returns whether a tensor may become a table: the scheme is not "raw", tables can have the tensor's dtype, and
        the tensor has at least 4 KiB."""
        has_dtype = tensor.dtype in _rows.DTYPES and tensor.entry is None
        return self.options.scheme != "raw" and has_dtype and tensor.num_bytes >= LEAST_BYTES

    def kind_of(self, tensor: SourceTensor) -> tuple:
        """Returns (kind of a tensor as in `_schemes/learning.py`, size in bytes of its rows). Tensors for which both
        are equal share a codebook. In this file, a kind is this pair."""
        return kind_of(tensor.name, torch.Size(tensor.shape), tensor.dtype), self.geometry_of(tensor).row_bytes

    def learn(self, scheme: str, sample: torch.Tensor, geometry: _rows.Geometry, all_rows: bool) -> AnyCodebook | None:
        """Learns a codebook from a sample of rows. Returns the codebook, or None if raw rows are best.

        Args:
            sample: uint8 [n * row_bytes].
            geometry: the geometry of the tensors that the rows belong to.
            all_rows: whether every row must have a coded form; see `codes_invariant` of `Request`.
        """
        return learn(scheme, Request(sample, geometry, self.device, self.options, 0, codes_invariant=all_rows))


class Codebooks:
    """The codebooks of a checkpoint's tensors.

    Args:
        learning: how codebooks are learned.
        tensors: all tensors of the checkpoint.
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
        """Learns the codebooks of tensors: first one codebook for each kind; then, on `jobs` threads, a separate
        codebook for each tensor that the codebook of its kind does not suit. If only one tensor is given, the second
        step is left to the first call of `of` or `savings` for this tensor."""
        for tensor in tensors:
            if self.is_coded(tensor) and (kind := self._learning.kind_of(tensor)) not in self._of_kinds:
                self._of_kinds[kind] = self._learned(kind, sample_of(self._kinds[kind], self._geometry(kind)))
        if len(tensors) == 1:
            return
        with ThreadPoolExecutor(jobs, "ibp-learner") as pool:
            for _ in pool.map(self.of, tensors):
                pass

    def of(self, tensor: SourceTensor) -> AnyCodebook | None:
        """Returns the codebook of a tensor that has been prepared, or None if the tensor is stored uncompressed."""
        return self._found(tensor)[0] if self.is_coded(tensor) else None

    def savings(self, tensor: SourceTensor) -> float | None:
        """Returns the share of bytes that the codebook of a prepared tensor saved in the sample on which it was tried,
        or None if it was not tried."""
        return self._found(tensor)[1] if self.is_coded(tensor) else None

    def is_coded(self, tensor: SourceTensor) -> bool:
        """Returns whether a tensor may have a codebook."""
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
        """Tries the codebook of a kind on a sample of one tensor. If it saves less there than in the kind's sample, by
        more than one percentage point, learns a codebook for this tensor alone, and uses the better of the two. Returns
        (the codebook, the share of the sample's bytes that the codebook saves), or (None, None) if that share is too
        small for a table."""
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
        """Learns the codebook of a kind from a sample. Returns a `Learner` that holds the codebook, or that holds None
        if the codebook would save too little."""
        geometry = self._geometry(kind)
        codebook = self._learning.learn(self._learning.options.scheme, sample, geometry, False)
        savings = 0.0 if codebook is None else savings_of(sample, codebook)
        return Learner(codebook, 1 - savings) if _pays(savings, geometry) else Learner()


def sample_of(tensors: Sequence[SourceTensor], geometry: _rows.Geometry, num_bytes: int | None = None) -> torch.Tensor:
    """Returns a sample of whole rows from up to 8 tensors that have the same geometry, uint8 [n * row_bytes]. If the
    tensors are shorter than a row, returns the first tensor, padded with zeros to a row. num_bytes: approximate size of
    the sample in bytes. None: as many rows as hold 2^19 elements."""
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
    """Returns the share of a sample's bytes that is saved by a table of this sample. The size of the table includes its
    index, but not its codebook. The last row of the sample may be shorter than the others."""
    geometry = _rows.Geometry(sample.shape, torch.uint8, codebook.row_bytes)
    stored = surveyed(sample, codebook, _CPU).stored
    return 1 - (stored + geometry.index_bytes(stored > 0)) / geometry.num_bytes


def _pays(savings: float, geometry: _rows.Geometry) -> bool:
    """Returns whether a tensor is worth coding. savings: the share of its bytes that a table would save."""
    return savings > CLEARLY_LESS and savings * geometry.num_bytes > _LEAST_SAVED_BYTES
