"""Targets: the factors by which tensors should become smaller on a GPU, and the slots that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import _core
from .._common.arguments import number
from .._layout.geometry import Survey

# The targets of Buddy Compression (section 3.4), with 16 for data that are mostly zero; and infinity, for which rows
# have no slots.
RATIOS = (1.0, 4 / 3, 2.0, 4.0, 16.0, math.inf)
THRESHOLD = 0.30  # the paper's share of rows that may be larger than their slots


def slot_bytes_of(ratio: float, row_bytes: int) -> int:
    """Returns the bytes of a slot for which rows take `ratio` times fewer bytes on a GPU: whole sectors of 32 bytes,
    at least one; the whole row for a ratio of 1, and 0 for infinity."""
    if ratio == 1:
        return row_bytes
    if math.isinf(ratio):
        return 0
    sectors = max(1, int(row_bytes / ratio) // _core.SECTOR_BYTES)
    return min(row_bytes, sectors * _core.SECTOR_BYTES)


def checked_ratio(target: float) -> float:
    """Returns target as a float. Raises TypeError or ValueError if it is not a ratio."""
    ratio = number("target", target)
    if not ratio >= 1:
        raise ValueError(
            f"target is {target}; wanted a ratio of at least 1, such as 4/3, 2, 4, or math.inf for no slots"
        )
    return ratio


def checked_threshold(threshold: float) -> float:
    """Returns threshold as a float. Raises TypeError or ValueError if it is not a share."""
    share = number("threshold", threshold)
    if not 0 <= share <= 1:
        raise ValueError(f"threshold is {threshold}; wanted a share of the rows from 0 to 1")
    return share


def slots_within(share: float, found: Survey, ratios: Sequence[float] | None) -> int:
    """Returns the smallest slots that at most this share of the rows does not fit. ratios: the ratios to choose
    from, in addition to 1. None: all whole numbers of sectors."""
    row_bytes = found.row_bytes
    sizes = None if ratios is None else [row_bytes, *(slot_bytes_of(ratio, row_bytes) for ratio in ratios)]
    return found.best_slots(overflow_cost=0.0, most_spilled=share * found.num_rows, sizes=sizes)[0]
