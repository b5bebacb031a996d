"""Tensors that share a codebook, and when one of them needs another: for weights, checkpoints and caches.

Learning a codebook takes far longer than coding with it, so tensors of a kind share one. It is learned from some of
them; a later tensor gets a codebook of its own where the shared one saves clearly less of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from .codebook import AnyCodebook

ROW_BYTES = 4096  # of weights: longer rows save 0.1 % more and keep fewer warps of a multiprocessor busy
LEAST_BYTES = 4096  # a smaller tensor is one row, whose fetch costs the same whatever its bytes
CLEARLY_LESS = 0.01  # of the original bytes
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Kind = tuple[str, torch.Size, torch.dtype]


def kind_of(name: str, shape: torch.Size, dtype: torch.dtype) -> Kind:
    """The kind of a tensor: its shape, dtype, and its name without the numbers between dots, so that
    `layers.0.fc1.weight` and `layers.1.fc1.weight` are of one kind."""
    return _NUMBER.sub("#", name), shape, dtype


class Learned(NamedTuple):
    """A codebook of a kind; None: raw rows are best.

    Attributes:
        savings: share of the bytes that it saved of the tensors from which it was learned.
    """

    codebook: AnyCodebook | None
    savings: float

    def fits(self, savings: float, loss: float = CLEARLY_LESS) -> bool:
        """Whether a tensor needs no codebook of its own if this codebook saves the given share of it."""
        return savings > self.savings - loss
