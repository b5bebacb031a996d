"""What one forward pass saves, and the order in which the backward pass asks for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from .planning import Recorder
from .region import Region

if TYPE_CHECKING:
    from .offload import ActivationOffload


class Order:
    """The order in which regions were asked for, by their numbers; before any was, the last saved is the first."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._positions: dict[int, int] = {}

    def learn(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._positions = {number: position for position, number in enumerate(numbers)}

    def after(self, number: int) -> range | list[int]:
        """Numbers of what comes next."""
        if not self._numbers:
            return range(number - 1, -1, -1)
        position = self._positions.get(number)
        return [] if position is None else self._numbers[position + 1 :]


class Pass:
    """One forward pass and what it saved.

    Attributes:
        alive: regions that something may ask for.
        numbers, num_bytes: how many regions there were and their bytes, those that stay as they are counted.
        recorders: what is measured, by device.
        uses: numbers of regions in the order of their first use.
    """

    def __init__(self, offload: ActivationOffload, is_measured: bool) -> None:
        self.offload = offload
        self.alive = self.numbers = self.num_bytes = 0
        self.recorders: dict[torch.device, Recorder] = {}
        self._is_measured = is_measured
        self.uses: list[int] = []
        self._regions: dict[int, weakref.ref[Region]] = {}

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

    def prefetch(self, region: Region) -> None:
        """Starts bringing what comes after a region."""
        lane = region.lane
        if lane is None:
            return
        for number in self.offload._order.after(region.number):
            following = self._regions[number]() if number in self._regions else None
            if following is None or following.lane is not lane or not following.is_away:
                continue
            if not lane.has_room_for(following):
                break
            lane.fetch(following)
