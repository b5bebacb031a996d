"""What a checkpoint would become, by samples of its rows: `estimate_checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import _core
from .._arguments import whole_number
from .._estimation import check_learning
from .._files.fields import dtype_name
from .._progress import tqdm
from .._schemes import SCHEMES, AnyCodebook
from .learning import Learning, sample_of, savings_of
from .source import SourceTensor, chosen
from .sources import AnyPath, open_sources


@dataclass(frozen=True)
class TensorEstimate:
    """What a tensor would become.

    Attributes:
        name, dtype, shape, num_bytes: of the tensor.
        savings: by scheme, the share of its bytes that a table would save, its index counted; empty for a tensor that
            is kept as it is: one of less than 4 KiB, or of a dtype that tables lack.
        best: the scheme that saves most; None where none saves 1 %.
    """

    __module__ = "ibp"

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
    """What `compress_checkpoint` would do to a checkpoint.

    Attributes:
        tensors: a `TensorEstimate` for each tensor.
        num_bytes, stored_bytes: of all tensors, before and after; headers and codebooks are left out.
    """

    __module__ = "ibp"

    tensors: tuple[TensorEstimate, ...]
    num_bytes: int
    stored_bytes: int

    @property
    def savings(self) -> float:
        """1 - stored_bytes / num_bytes."""
        return 1 - self.stored_bytes / self.num_bytes if self.num_bytes else 0.0

    def __repr__(self) -> str:
        return (
            f"ibp.CheckpointEstimate({len(self.tensors)} tensors, {self.num_bytes:,} -> {self.stored_bytes:,} bytes, "
            f"{self.savings:.1%} saved)"
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        tensors = [
            {
                **vars(tensor),
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stored_bytes": tensor.stored_bytes,
            }
            for tensor in self.tensors
        ]
        own = {"num_bytes": self.num_bytes, "stored_bytes": self.stored_bytes, "savings": self.savings}
        return {**own, "tensors": tensors}


def estimate_checkpoint(
    inputs: AnyPath | Iterable[AnyPath],
    *,
    schemes: Iterable[str] = ("ibp", "planes"),
    level: str = "default",
    row_bytes: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    progress: bool = False,
) -> CheckpointEstimate:
    """What `compress_checkpoint` would make of a checkpoint, by rows that are sampled; nothing is written.

    Args:
        inputs: as of `compress_checkpoint`.
        schemes: that are compared.
        level, row_bytes: as in `compress_checkpoint`.
        include, exclude: patterns of names, as there: only these tensors are looked at.
        progress: show a bar.

    Raises:
        FileNotFoundError, SourceFormatError, ibp.FileFormatError: as `compress_checkpoint`.
        TypeError, ValueError: a scheme, level or row_bytes is none.
    """
    compared = [scheme for scheme in dict.fromkeys(schemes) if scheme != "raw"]
    for scheme in compared:
        if scheme not in SCHEMES:
            raise ValueError(f"schemes has {scheme!r}; wanted some of {[name for name in SCHEMES if name != 'raw']}")
    check_learning("auto", None, None, None, level)
    row_bytes = None if row_bytes is None else whole_number("row_bytes", row_bytes, 1, _core.MAX_ROW_BYTES)
    learning = Learning("auto", level, row_bytes=row_bytes)
    books: dict[tuple, dict[str, AnyCodebook]] = {}
    found = []
    with open_sources(inputs) as source:
        names = chosen(source.tensors, include, exclude)
        for name in tqdm(names, desc="estimate", unit="tensor", disable=not progress):
            found.append(_estimate(source.tensors[name], learning, compared, books))
    return CheckpointEstimate(
        tuple(found), sum(tensor.num_bytes for tensor in found), sum(tensor.stored_bytes for tensor in found)
    )


def _estimate(
    tensor: SourceTensor, learning: Learning, schemes: list[str], books: dict[tuple, dict[str, AnyCodebook]]
) -> TensorEstimate:
    savings: dict[str, float] = {}
    if learning.is_worth_coding(tensor):
        geometry, kind = learning.geometry_of(tensor), learning.kind_of(tensor)
        sample = sample_of([tensor], geometry)
        if kind not in books:
            learned = {scheme: learning.learn(scheme, sample, geometry, False) for scheme in schemes}
            books[kind] = {scheme: codebook for scheme, codebook in learned.items() if codebook is not None}
        shared = {scheme: max(0.0, savings_of(sample, codebook)) for scheme, codebook in books[kind].items()}
        savings = {scheme: shared.get(scheme, 0.0) for scheme in schemes}
    best = max(savings, key=savings.__getitem__, default=None)
    clear = best if best is not None and savings[best] > 0.01 else None
    return TensorEstimate(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes, savings, clear)
