"""Pinned memory for the states of an optimizer: `Reserve`."""

from __future__ import annotations

import torch

from .._machine.pool import Pool


class Reserve(Pool):
    """Pinned memory for states, in large blocks. All work on its parts is on one stream at a time."""

    def __init__(self) -> None:
        super().__init__(cuts=True)
        self._rows_to_come = self._spare_rows = 0

    def expect(self, num_rows: int, spare_rows: int = 0) -> None:
        """Announces states that have num_rows rows in all; each state takes a part later. spare_rows: of the largest of
        them that may come apart, whose parts take memory before it gives back its own."""
        self._rows_to_come += num_rows + max(0, spare_rows - self._spare_rows)
        self._spare_rows = max(self._spare_rows, spare_rows)

    def take_first(self, num_rows: int, bytes_per_row: int) -> torch.Tensor:
        """As `take`, for a state of num_rows rows that `expect` has announced."""
        others = max(0, self._rows_to_come - num_rows)
        part = self.take(num_rows * bytes_per_row, others=others * bytes_per_row)
        self._rows_to_come = others
        return part
