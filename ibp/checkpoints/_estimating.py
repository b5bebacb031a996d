"""`estimate`: what a checkpoint would become, judged by samples of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._common.progress import tqdm
from .._common.statistics import share_saved
from .._files import PathLike, as_json
from .._layout.geometry import as_tensor
from .._schemes import SCHEMES, AnyCodebook, Options
from ._learning import TRIED_BYTES, CheckpointLearning, Codebooks, sample_of, savings_of
from ._outputs import compressed_bytes, table_bytes
from ._source import SourceTensor, chosen
from ._sources import open_sources

_COMPARED = ("ibp", "planes")


@dataclass(frozen=True)
class TensorEstimate:
    """What `compress` would make of a tensor.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> for tensor in ibp.checkpoints.estimate("model.pt").tensors:
        ...     print(tensor.name, tensor.num_bytes, tensor.best)
        w 1024000 planes
        b 1024 None

    Attributes:
        name, dtype, shape, num_bytes: name, dtype, shape and bytes of the tensor.
        savings: for each scheme, the share of the tensor's bytes that a table would save, index included. For schemes
            that `compress` would not choose the share is approximate. Empty for a tensor that is kept as it is: one of
            less than 4 KiB, of a dtype that tables do not have, or that patterns leave out.
        best: the scheme that `compress` chooses. None if no scheme saves 1 %.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    savings: Mapping[str, float]
    best: str | None

    @property
    def stored_bytes(self) -> int:
        """Bytes with the best scheme."""
        return self.num_bytes - (round(self.savings[self.best] * self.num_bytes) if self.best else 0)


@dataclass(frozen=True)
class CheckpointEstimate:
    """What `compress` would make of a checkpoint.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> estimate = ibp.checkpoints.estimate("model.pt")
        >>> f"{estimate.savings:.0%} of {estimate.num_bytes:,} bytes"
        '16% of 1,025,024 bytes'

    Attributes:
        tensors: a `TensorEstimate` for each tensor.
        num_bytes, stored_bytes: bytes of all tensors, before and after, without headers and codebooks.
        file_bytes: bytes of the files, with headers, codebooks and checksums.
    """

    tensors: tuple[TensorEstimate, ...]
    num_bytes: int
    stored_bytes: int
    file_bytes: int

    @property
    def savings(self) -> float:
        """1 - file_bytes / num_bytes, like `CheckpointReport.savings` after compressing."""
        return share_saved(self.num_bytes, self.file_bytes)

    def __repr__(self) -> str:
        return (
            f"ibp.checkpoints.CheckpointEstimate({len(self.tensors)} tensors, {self.num_bytes:,} -> "
            f"{self.file_bytes:,} bytes, {self.savings:.1%} saved)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields in the form for JSON."""
        tensors = [{**as_json(tensor), "stored_bytes": tensor.stored_bytes} for tensor in self.tensors]
        own = {key: getattr(self, key) for key in ("num_bytes", "stored_bytes", "file_bytes", "savings")}
        return {**own, "tensors": tensors}


def estimate(
    inputs: PathLike | Iterable[PathLike],
    *,
    level: str = "default",
    row_bytes: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    progress: bool = False,
) -> CheckpointEstimate:
    """Estimates what `compress` would make of a checkpoint, from a sample of its rows. Nothing is written.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256)}, "model.pt")
        >>> estimate = ibp.checkpoints.estimate("model.pt")
        >>> {scheme: f"{savings:.0%}" for scheme, savings in estimate.tensors[0].savings.items()}
        {'ibp': '13%', 'planes': '17%'}

    Args:
        inputs: as in `compress`.
        level, row_bytes: as in `compress`.
        include, exclude: patterns of names, as in `compress`. The other tensors are kept as they are.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError, SourceFormatError, ibp.FileFormatError: as in `compress`.
        TypeError, ValueError: level or row_bytes is not as described, or a pattern of include matches no name.
    """
    learning = CheckpointLearning.of(Options(level=level, row_bytes=row_bytes, device="cpu"))
    with open_sources(inputs) as source:
        kept = frozenset(source.tensors).difference(chosen(source.tensors, include, exclude))
        kinds = _Kinds(learning, source.stored(), kept)
        found, books, stored = {}, {}, {}
        for tensor in tqdm(source.stored(), desc="estimate", unit="tensor", disable=not progress):
            name = tensor.name
            books[name] = kinds.codebook(tensor)
            found[name] = estimate = kinds.estimate(tensor, books[name])
            num_rows = learning.geometry_of(tensor).num_rows
            stored[name] = table_bytes(estimate.stored_bytes, num_rows) if estimate.best else tensor.num_bytes
        file_bytes = compressed_bytes(source, stored, books)
    tensors = tuple(found.values())
    before, after = sum(tensor.num_bytes for tensor in tensors), sum(tensor.stored_bytes for tensor in tensors)
    return CheckpointEstimate(tensors, before, after, file_bytes)


class _Kinds:
    """What schemes save of tensors. For the codebook that `compress` takes, rows of each tensor are tried; for other
    schemes, rows of each kind.

    Args:
        learning: how codebooks are learned.
        tensors: the tensors of the checkpoint.
        kept: names of tensors that are not to be coded.
    """

    def __init__(self, learning: CheckpointLearning, tensors: list[SourceTensor], kept: frozenset[str]) -> None:
        self._learning = learning
        self._taken = Codebooks(learning, tensors, kept)
        self._others: dict[tuple, float] = {}  # by kind and scheme

    def codebook(self, tensor: SourceTensor) -> AnyCodebook | None:
        """Returns the codebook that `compress` takes, or None if it keeps the tensor."""
        self._taken.prepare([tensor])
        return self._taken.of(tensor)

    def estimate(self, tensor: SourceTensor, taken: AnyCodebook | None) -> TensorEstimate:
        savings = {}
        for scheme in _COMPARED if self._taken.is_coded(tensor) else []:
            if taken is None or taken.scheme != scheme:
                key = *self._learning.kind_of(tensor), scheme
                if key not in self._others:
                    self._others[key] = self._share_saved(tensor, scheme)
                saved = self._others[key]
            else:
                saved = self._taken_saves(tensor, taken)
            savings[scheme] = max(0.0, saved)
        best = None if taken is None else taken.scheme
        return TensorEstimate(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes, savings, best)

    def _taken_saves(self, tensor: SourceTensor, taken: AnyCodebook) -> float:
        tried = self._taken.savings(tensor)
        if tried is not None:
            return tried
        geometry = self._learning.geometry_of(tensor)
        if geometry.num_bytes > TRIED_BYTES:
            return savings_of(sample_of([tensor], geometry, TRIED_BYTES), taken)
        return savings_of(as_tensor(tensor.read(0, geometry.num_bytes)), taken)

    def _share_saved(self, tensor: SourceTensor, scheme: str) -> float:
        geometry, estimates = self._learning.geometry_of(tensor), SCHEMES[scheme].estimates
        if estimates is not None:
            rows = sample_of([tensor], geometry, TRIED_BYTES)
            index_share = geometry.index_bytes(True) / geometry.num_bytes
            return min(estimates(rows, geometry.row_bytes, geometry.num_rows)) - index_share
        sample = sample_of([tensor], geometry)
        codebook = self._learning.learn(scheme, sample, geometry, False)
        return 0.0 if codebook is None else savings_of(sample, codebook)
