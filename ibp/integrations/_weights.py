"""What the integrations of models share: which weights are worth coding, and one codebook for many of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._compressed_tensor import CompressedTensor
from .._compression import compress
from .._fetch.streaming import decompress
from .._rows import DTYPES
from .._schemes import AnyCodebook

_LEAST_BYTES = 4096  # a smaller tensor is kept raw: it is one row, whose fetch costs the same whatever its bytes
_ROW_BYTES = 4096  # of the flat tensor: longer rows save 0.1 % more and keep fewer warps of a multiprocessor busy
_CLEARLY_LESS = 0.01  # of the original bytes
_OF_A_MODEL = {name for name in inspect.signature(compress).parameters if name not in ("x", "codebook")}


def is_worth_coding(x: torch.Tensor) -> bool:
    """Whether x is an ordinary tensor of at least 4 KiB: no subclass, as quantised weights are, and dense."""
    return (
        type(x) is torch.Tensor
        and x.layout == torch.strided
        and x.dtype in DTYPES
        and x.numel() * x.element_size() >= _LEAST_BYTES
    )


@dataclass(frozen=True)
class CodedWeight:
    """A weight as a table, and how it lay in memory, such as channels last.

    Attributes:
        table: of the weight, its dimensions in the order in which memory held them.
        shape, stride: of the weight; of one that left gaps in memory or overlapped itself, as if it were contiguous.
    """

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

    Weights of a kind share a codebook, since learning one takes far longer than coding: those of one shape and dtype
    whose names differ in numbers only, as `layers.0.fc1.weight` and `layers.1.fc1.weight` do. It is learned from the
    first of them, and anew from one of which it saves a point less than it saved then.

    Args:
        options: of `ibp.compress`, but x and codebook. By default layout is "packed" and row_bytes 4,096.

    Raises:
        TypeError: an option is none of `ibp.compress`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - _OF_A_MODEL):
            raise TypeError(f"{', '.join(unknown)}: no such option; wanted some of {', '.join(sorted(_OF_A_MODEL))}")
        self.options = {"layout": "packed", "row_bytes": _ROW_BYTES, **options}
        self._learned: dict[tuple[str, torch.Size, torch.dtype], tuple[AnyCodebook, float]] = {}

    def code(self, name: str, x: torch.Tensor, **defaults: Any) -> CodedWeight:
        """As `compress`, for a weight that may have any strides."""
        ordered = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
        if not ordered.is_contiguous():
            x = ordered = x.contiguous()
        return CodedWeight(self.compress(name, ordered, **defaults), x.shape, x.stride())

    def compress(self, name: str, x: torch.Tensor, **defaults: Any) -> CompressedTensor:
        """A table of the weight x, called `name` in its model. defaults: options where none were given for all."""
        kind = re.sub(r"\d+", "#", name), x.shape, x.dtype
        options = {**defaults, **self.options}
        if kind in self._learned:
            codebook, savings = self._learned[kind]
            shared = {key: value for key, value in options.items() if key != "clusters"}  # the codebook says how many
            table = compress(x, codebook=codebook, **shared)
            if table.savings > savings - _CLEARLY_LESS:
                return table
        table = compress(x, **options)
        if table.codebook is not None:
            self._learned[kind] = table.codebook, table.savings
        return table
