"""What one forward pass saves, and the order in which the backward pass asks for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

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
        numbers: how many regions there were, those that stay as they are counted.
        uses: numbers of regions in the order of their first use.
    """

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self.alive = self.numbers = 0
        self.uses: list[int] = []
        self._regions: dict[int, weakref.ref[Region]] = {}

    def take_number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def add(self, region: Region) -> None:
        self._regions[region.number] = weakref.ref(region)

    def use(self, region: Region) -> None:
        """Notes that a region is asked for, and starts bringing those that come next."""
        if region.uses == 0:
            self.uses.append(region.number)
        if region.lane is None:
            return
        if region.is_away:
            region.lane.fetch(region)
        for number in self.offload._order.after(region.number):
            following = self._regions[number]() if number in self._regions else None
            if following is None or following.lane is not region.lane or not following.is_away:
                continue
            if not region.lane.has_room_for(following):
                break
            region.lane.fetch(following)
