"""Which data share a codebook, and when it is learned anew: for weights, checkpoints, caches, activations and messages.

Learning a codebook takes far longer than coding with it, so data of a kind share one, which is learned from a sample
(`sample` of `_layout/geometry.py`). It is learned anew, or other data get one of their own, where it saves clearly
less of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from .._layout.geometry import Geometry
from .codebook import AnyCodebook
from .registry import SCHEMES
from .request import Options, Request

ROW_BYTES = 4096  # of weights: longer rows save 0.1 % more and keep fewer warps of a multiprocessor busy
LEAST_BYTES = 4096  # a smaller tensor is one row, whose fetch costs the same whatever its bytes
CLEARLY_LESS = 0.01  # of the original bytes
_DRIFT = 0.02  # of the original bytes: learning anew interrupts work, so it waits for more than a clear loss
_GROWTH = 2.0  # times as many uses as before it was learned, until it is learned anew
_MOST_TIMES = 3  # that it is learned anew where each misfit is sent twice, before data travel raw
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Kind = tuple[str, torch.Size, torch.dtype]
_Found = TypeVar("_Found")


def kind_of(name: str, shape: torch.Size, dtype: torch.dtype) -> Kind:
    """The kind of a tensor: its shape, dtype, and its name without the numbers between dots, so that
    `layers.0.fc1.weight` and `layers.1.fc1.weight` are of one kind."""
    return _NUMBER.sub("#", name), shape, dtype


def learned_from(
    rows: torch.Tensor,
    row_bytes: int,
    dtype: torch.dtype,
    *,
    scheme: str = "planes",
    level: str = "default",
    num_rows: int | None = None,
) -> AnyCodebook | None:
    """A codebook for data of a kind that come later: every row has a coded form, also rows that lack what the sample's
    have in common. None: raw rows are best.

    Args:
        rows: uint8 [n * row_bytes], a sample.
        dtype: of the elements.
        num_rows: over which the codebook's own bytes are spread; None: the sample's.
    """
    num_rows = rows.numel() // row_bytes if num_rows is None else num_rows
    geometry = Geometry(torch.Size((num_rows, row_bytes // dtype.itemsize)), dtype, row_bytes)
    return SCHEMES[scheme].learn(Request(rows, geometry, rows.device, Options(level=level), codes_invariant=True))


@dataclass
class Learner(Generic[_Found]):
    """What was learned for a kind of data, and when to learn anew.

    Data that do not compress, or never stay as they are, are learned from ever more rarely."""

    found: _Found | None = None  # a codebook, or an object made of one; None: raw is best, or nothing was learned yet
    # bytes that the data it was learned from take, to their raw bytes; None: the data noted next say that
    share: float | None = None
    learned_at: int = 0  # number of the use that it was learned for, from 1 on; 0: there was none yet
    times: int = 0  # that it was learned anew
    has_drifted: bool = False  # whether later data take clearly more, or have no room

    def take(self, found: _Found | None, share: float | None = None, use: int = 1) -> None:
        """Takes what was learned for a use."""
        self.times += self.learned_at > 0
        self.found, self.share, self.learned_at, self.has_drifted = found, share, use, False

    def fits(self, coded_bytes: float, raw_bytes: float) -> bool:
        """Whether other data of the kind need nothing of their own, by what they take."""
        return self.share is None or coded_bytes <= (self.share + CLEARLY_LESS) * raw_bytes

    def note(self, coded_bytes: float, raw_bytes: float) -> None:
        """Notes what the newest data take."""
        if self.share is None:
            self.share = coded_bytes / raw_bytes
        self.has_drifted = coded_bytes > (self.share + _DRIFT) * raw_bytes

    def is_due(self, use: int) -> bool:
        """Returns whether to learn for a use."""
        if self.learned_at == 0:
            return True
        return (self.found is None or self.has_drifted) and use >= _GROWTH * self.learned_at

    @property
    def is_hopeless(self) -> bool:
        """Whether it was learned anew again and again, and data have no room all the same."""
        return self.has_drifted and self.times >= _MOST_TIMES
