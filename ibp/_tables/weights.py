"""Weights of models as packed tables: the order of their memory, and one codebook for many of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from .._fetch.streaming import decompress
from .._layout.geometry import DTYPES
from .._schemes import AnyCodebook, Options
from .._schemes.learning import LEAST_BYTES, ROW_BYTES, Kind, Learner, kind_of
from .compressed_tensor import CompressedTensor, compress_rows

_OF_LEARNING = {"scheme", "chunk_bytes", "tau", "sample", "clusters"}  # options that a codebook has settled
_OF_A_MODEL = {field.name for field in fields(Options)} - {"codebook"}


def is_worth_coding(x: torch.Tensor) -> bool:
    """Whether x is an ordinary tensor of at least 4 KiB: no subclass, as quantised weights are, and dense."""
    return type(x) is torch.Tensor and x.layout == torch.strided and x.dtype in DTYPES and x.nbytes >= LEAST_BYTES


@dataclass(frozen=True)
class CodedWeight:
    """A weight as a table, and how it lay in memory, such as channels last. table: of the weight, its dimensions in the
    order in which memory held them; shape, stride: of the weight; of one that left gaps in memory or overlapped itself,
    as if it were contiguous."""

    table: CompressedTensor
    shape: torch.Size
    stride: tuple[int, ...]

    def decoded(self, device: torch.device | str | int) -> torch.Tensor:
        """The weight on a device."""
        return self.as_it_was(decompress(self.table, device=device))

    def as_it_was(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight in the memory of what its table was decoded to."""
        return tensor.as_strided(self.shape, self.stride)


class WeightCompressor:
    """Compresses the weights of a model into packed tables.

    Weights of a kind share a codebook (see `_schemes/learning.py`), which is learned from the first of them. Where the
    first is best raw, all are kept raw.

    options: of `ibp.compress`, but x and codebook. By default layout is "packed" and row_bytes 4,096. TypeError: an
    option is none of `ibp.compress`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - _OF_A_MODEL):
            raise TypeError(f"{', '.join(unknown)}: no such option; wanted some of {', '.join(sorted(_OF_A_MODEL))}")
        self._options = dict(options)
        self._learned: dict[tuple[Kind, int | None], Learner[AnyCodebook]] = {}

    def code(self, name: str, x: torch.Tensor, **defaults: Any) -> CodedWeight:
        """As `compress`, for a weight that may have any strides."""
        ordered = x.permute(memory_order(x))
        if not ordered.is_contiguous():
            x = ordered = x.contiguous()
        return CodedWeight(self.compress(name, ordered, **defaults), x.shape, x.stride())

    def compress(self, name: str, x: torch.Tensor, **defaults: Any) -> CompressedTensor:
        """A table of the weight x, called `name` in its model. defaults: options where none were given for all."""
        options = {"layout": "packed", "row_bytes": ROW_BYTES, **defaults, **self._options}
        kind = kind_of(name, x.shape, x.dtype), options["row_bytes"]  # a codebook is for rows of one length
        if kind in self._learned:
            learned = self._learned[kind]
            of_memory = {key: value for key, value in options.items() if key not in _OF_LEARNING}
            if learned.found is None:
                return compress_rows(x, scheme="raw", **of_memory)
            table = compress_rows(x, codebook=learned.found, **of_memory)
            if learned.fits(table.stored_bytes, table.original_bytes):
                return table
            own = compress_rows(x, **options)
            return own if own.stored_bytes < table.stored_bytes else table
        table = compress_rows(x, **options)
        self._learned[kind] = Learner(table.codebook, 1 - table.savings)
        return table


def memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest, so that `x.permute(order)` is contiguous if x is dense; as
    they are where memory has gaps or holds elements twice."""
    order = tuple(sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], dim)))
    return order if x.permute(order).is_contiguous() else tuple(range(x.dim()))
