"""Which group of weights is used next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Schedule(Generic[Item]):
    """Predicts that what came after the same two uses, or else after the same one, comes again.

    A pass over the items in one order is known after it was seen once; where the order changes, every new step is a
    wrong prediction once. An item that is used twice in a pass is told apart by what came before it; a run of items
    that comes twice, and then goes on in another way, costs a wrong prediction a pass.

    items: in the order that is expected of the first pass; it is expected to repeat."""

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
        """The uses that are expected next, endlessly unless nothing is known."""
        before, last = self._last
        while last is not None:
            item = self._after_two.get((before, last), self._after_one.get(last))
            if item is None:
                return
            yield item
            before, last = last, item
