"""Computes sizes of slots from target ratios. A target ratio is the size of a tensor divided by the size of its
slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import _core
from .._common.arguments import number
from .._layout.geometry import Survey

# The target ratios of Buddy Compression (section 3.4), including 16 for data that is mostly zero; plus infinity, at
# which rows have no slots.
RATIOS = (1.0, 4 / 3, 2.0, 4.0, 16.0, math.inf)
THRESHOLD = 0.30  # The fraction of rows that may be larger than their slots, as in the paper.


def slot_bytes_of(ratio: float, row_bytes: int) -> int:
    """Returns the size of a slot in bytes: 1/ratio of the size of a row, rounded down to whole sectors of 32 bytes, but
    at least one sector. A ratio of 1 gives row_bytes, and infinity gives 0."""
    if ratio == 1:
        return row_bytes
    if math.isinf(ratio):
        return 0
    sectors = max(1, int(row_bytes / ratio) // _core.SECTOR_BYTES)
    return min(row_bytes, sectors * _core.SECTOR_BYTES)


def checked_ratio(target: float) -> float:
    """Returns target as a float. Raises TypeError or ValueError if it is not a number of at least 1."""
    ratio = number("target", target)
    if not ratio >= 1:
        raise ValueError(
            f"target is {target}; wanted a ratio of at least 1, such as 4/3, 2, 4, or math.inf for no slots"
        )
    return ratio


def checked_threshold(threshold: float) -> float:
    """Returns threshold as a float. Raises TypeError or ValueError if it is not a number from 0 to 1."""
    share = number("threshold", threshold)
    if not 0 <= share <= 1:
        raise ValueError(f"threshold is {threshold}; wanted a share of the rows from 0 to 1")
    return share


def slots_within(share: float, found: Survey, ratios: Sequence[float] | None) -> int:
    """Returns the smallest size of slots, in bytes, such that at most a given fraction of the rows is larger than its
    slot.

    Args:
        share: the largest fraction of the rows that may be larger than their slots, 0 to 1.
        found: the survey of the rows.
        ratios: the target ratios to choose from, in addition to 1. None: slots of any whole number of sectors.
    """
    row_bytes = found.row_bytes
    sizes = None if ratios is None else [row_bytes, *(slot_bytes_of(ratio, row_bytes) for ratio in ratios)]
    return found.best_slots(overflow_cost=0.0, most_spilled=share * found.num_rows, sizes=sizes)[0]
