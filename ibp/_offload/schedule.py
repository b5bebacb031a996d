"""Predicts which group of weights is used next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Schedule(Generic[Item]):
    """A predictor of uses. It expects the item that followed the last two uses when they occurred before, or otherwise
    the item that followed the last use.

    After one pass, a constant order is predicted without error. If the order changes, each new step is mispredicted
    once. If an item is used twice in a pass, the item before it tells the two uses apart. If the same run of items
    occurs twice in a pass with different successors, one prediction per pass is wrong.

    items: in the order that is expected for the first pass and, until another order is seen, for the following ones."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._after_one: dict[Item, Item] = {}
        self._after_two: dict[tuple[Item | None, Item], Item] = {}
        self._last: tuple[Item | None, Item | None] = (None, items[-1] if items else None)
        for number, item in enumerate(items):
            self._after_one[item] = items[(number + 1) % len(items)]

    def saw(self, item: Item) -> None:
        before, last = self._last
        if last is not None:
            self._after_one[last] = item
            self._after_two[before, last] = item
        self._last = last, item

    def coming(self) -> Iterator[Item]:
        """Yields the expected uses, the next one first. The iterator does not end unless nothing is known."""
        before, last = self._last
        while last is not None:
            item = self._after_two.get((before, last), self._after_one.get(last))
            if item is None:
                return
            yield item
            before, last = last, item
