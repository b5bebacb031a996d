"""The regions that one forward pass saves, and the order in which the backward pass needs them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from .._rows.faults import Faults

if TYPE_CHECKING:
    from .region import SavedRegion
    from .transfers import PieceTransfers


class ForwardPass:
    """One forward pass and the regions that it saved.

    Args:
        order: numbers of the regions in the order in which the previous backward pass used them. Empty: regions are
            expected in the reverse order of saving.
        transfers: the transfers of each device.
        faults: receives the faults that decoders find.
        note_outgrown: a function that is called for each region or piece that compressed worse than expected, with its
            size in bytes before encoding.
    """

    def __init__(
        self,
        order: list[int],
        transfers: Mapping[torch.device, PieceTransfers],
        faults: Faults,
        note_outgrown: Callable[[int], None],
    ) -> None:
        self.faults, self.note_outgrown = faults, note_outgrown
        self.numbers = 0  # number of regions so far, including those that are not moved; also the next region's number
        self.is_used = False  # whether a saved tensor has been read since the pass began
        self.uses: list[int] = []  # numbers of regions in the order of their first use
        self._order, self._transfers = order, transfers
        self._positions = {number: position for position, number in enumerate(order)}
        self._regions: dict[int, weakref.ref[SavedRegion]] = {}
        self._ended: deque[int] = deque()  # numbers of regions that have been destroyed
        # For each device, the position in `order` from which regions are fetched next.
        self._next: dict[PieceTransfers, int] = {}

    @property
    def alive(self) -> int:
        """Number of regions that may still be read."""
        return len(self._regions) - len(self._ended)

    def take_number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def add(self, region: SavedRegion) -> None:
        self._regions[region.number] = weakref.ref(region)

    def note_end(self, region: SavedRegion) -> None:
        """Records that a region is destroyed, which may happen at any time and in any thread."""
        self._ended.append(region.number)

    def note_use(self, region: SavedRegion) -> None:
        if region.uses == 0:
            self.uses.append(region.number)

    def prefetch(self, region: SavedRegion, first: int) -> None:
        """Starts to bring back the pieces of a region, beginning with piece number `first`, and then the regions that
        are expected to be used after it."""
        transfers = region.transfers
        if transfers is None or not transfers.fetch_region(region, first):
            return
        position = self._positions.get(region.number) if self._order else self.numbers - 1 - region.number
        if position is not None and (position >= self._next.get(transfers, 0) or region.uses > region.saves):
            self._next[transfers] = position + 1
        self._fetch_on(transfers)

    def start(self) -> None:
        """Records that the backward pass begins, and starts to bring back the regions that it needs first."""
        self.is_used = True
        for transfers in self._transfers.values():
            transfers.begin_backward()
            self._fetch_on(transfers)

    def _fetch_on(self, transfers: PieceTransfers) -> None:
        """Starts to bring back the next regions of a device, in the expected order, until the window is full."""
        numbers, position = self._order or range(self.numbers - 1, -1, -1), self._next.get(transfers, 0)
        while position < len(numbers):
            found = self._regions.get(numbers[position])
            region = None if found is None else found()
            if region is not None and region.transfers is transfers and not transfers.fetch_region(region, 0):
                break
            position += 1
        self._next[transfers] = position
