"""What one forward pass saves, and the order in which the backward pass asks for it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from .planning import Recorder
from .region import Region

if TYPE_CHECKING:
    from .lane import Lane
    from .offload import ActivationOffload


class Order:
    """The order in which regions were asked for, by their numbers; before any was, the last saved is the first."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._positions: dict[int, int] = {}

    def learn(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._positions = {number: position for position, number in enumerate(numbers)}

    def all(self, count: int) -> range | list[int]:
        """Numbers of a pass of so many."""
        return self._numbers or range(count - 1, -1, -1)

    def position(self, number: int, count: int) -> int | None:
        """Where a number is among all; None: it was not asked for."""
        return self._positions.get(number) if self._numbers else count - 1 - number


class Pass:
    """One forward pass and what it saved.

    Attributes:
        ended: an entry for each region that nobody can ask for any more. Regions end at any time and in any thread.
        numbers, num_bytes: how many regions there were and their bytes, those that stay as they are counted.
        recorders: what is measured, by device.
        is_bare: whether it runs without hooks.
        is_used: whether anything was asked for since it began.
        uses: numbers of regions in the order of their first use.
    """

    def __init__(self, offload: ActivationOffload, is_measured: bool, is_bare: bool = False) -> None:
        self.offload, self.is_bare, self.is_used = offload, is_bare, False
        self.numbers = self.num_bytes = 0
        self.ended: deque[int] = deque()
        self.recorders: dict[torch.device, Recorder] = {}
        self._is_measured = is_measured
        self.uses: list[int] = []
        self._regions: dict[int, weakref.ref[Region]] = {}
        self._next: dict[Lane, int] = {}  # where what is to be fetched goes on, in the order of use

    @property
    def alive(self) -> int:
        """Regions that something may ask for."""
        return len(self._regions) - len(self.ended)

    def take_number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def add(self, region: Region) -> None:
        self._regions[region.number] = weakref.ref(region)

    def recorder(self, device: torch.device) -> Recorder | None:
        """Where marks of a device go; None: nothing is measured."""
        return self.recorders.setdefault(device, Recorder()) if self._is_measured else None

    def use(self, region: Region) -> None:
        """Notes that a region is asked for."""
        if region.uses == 0:
            self.uses.append(region.number)

    def prefetch(self, region: Region, first: int) -> None:
        """Starts bringing pieces of a region, from the first-th on, and what comes after the region."""
        lane = region.lane
        if lane is None or not self._fetch(region, first):
            return
        position = self.offload._order.position(region.number, self.numbers)
        if position is not None and (position >= self._next.get(lane, 0) or region.uses > region.saves):
            self._next[lane] = position + 1
        self._fetch_on(lane)

    def start(self) -> None:
        """Notes that something is asked for; what is asked for first starts to come."""
        self.is_used = True
        for lane in self.offload._lanes.values():
            self._fetch_on(lane)

    def _fetch_on(self, lane: Lane) -> None:
        """Starts bringing regions of a lane, as far as there is room."""
        numbers, position = self.offload._order.all(self.numbers), self._next.get(lane, 0)
        while position < len(numbers):
            found = self._regions.get(numbers[position])
            region = None if found is None else found()
            if region is not None and region.lane is lane and not self._fetch(region, 0):
                break
            position += 1
        self._next[lane] = position

    def _fetch(self, region: Region, first: int) -> bool:
        """Whether there is room for all pieces of a region from the first-th on that are away; they are on their way
        then."""
        for piece in region.pieces[first:]:
            if not region.is_away(piece):
                continue
            assert region.lane is not None
            if not region.lane.has_room_for(piece):
                return False
            region.lane.fetch(region, piece)
        return True
