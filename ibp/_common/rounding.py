"""Numbers of bytes in whole units."""

from __future__ import annotations


def rounded_up(number: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-number // unit) * unit
