"""Where in a piece of device memory the next group of weights goes."""

from __future__ import annotations

from collections.abc import Iterable

Region = tuple[int, int]  # [start, end) in bytes


def overlap(one: Region, other: Region) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class WeightArena:
    """Memory given out in turn: the next place follows the last one, and wraps around.

    In a constant order of equal passes what is overwritten is thus what was used longest ago.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._cursor = 0

    def place(self, num_bytes: int, held: Iterable[Region], wish: int | None = None) -> int | None:
        """Start of num_bytes that overlap none of the held regions: where wished, if that is free, else the first such
        place after the last one given out. None: there is none."""
        held = list(held)
        after_held = sorted(end for _, end in held)
        starts = [self._cursor, *(end for end in after_held if end > self._cursor), 0, *after_held]
        if wish is not None:
            starts.insert(0, wish)
        for start in starts:
            region = start, start + num_bytes
            if region[1] <= self.num_bytes and not any(overlap(region, other) for other in held):
                self._cursor = region[1]
                return start
        return None
