"""Pinned memory for the states of an optimizer: `Reserve`."""

from __future__ import annotations

import torch

from .._machine import memory

_LARGEST_BLOCK = 1 << 30
_ALIGNMENT = 256
_CPU = torch.device("cpu")


class Reserve:
    """Hands out parts of pinned memory, which is taken from the system in large blocks: to pin memory takes tens of
    milliseconds, however little it is.

    Work on the parts is on one stream at a time: a part that is given back may still be read by what was queued before.
    """

    def __init__(self) -> None:
        self._rows_to_come = 0
        self._free: list[torch.Tensor] = []

    def expect(self, num_rows: int) -> None:
        """There will be states of so many rows more, each of which takes a part."""
        self._rows_to_come += num_rows

    def take_first(self, num_rows: int, bytes_per_row: int) -> torch.Tensor:
        """As `take`, for a state of so many rows that was expected."""
        others = max(0, self._rows_to_come - num_rows) * bytes_per_row
        part = self.take(num_rows * bytes_per_row, others)
        self._rows_to_come = max(0, self._rows_to_come - num_rows)
        return part

    def take(self, num_bytes: int, others: int = 0) -> torch.Tensor:
        """A part of at least so many bytes. others: bytes that are about to be asked for.

        Raises:
            PinningError: the system pins no more memory.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        fitting = [i for i, part in enumerate(self._free) if part.numel() >= size]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        else:
            block = memory.empty(max(size, min(size + others, _LARGEST_BLOCK)), _CPU, True)
        if block.numel() > size:
            self._free.append(block[size:])
        return block[:size]

    def give(self, part: torch.Tensor) -> None:
        """Takes a part back."""
        self._free.append(part)
