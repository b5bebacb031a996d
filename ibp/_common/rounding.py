"""Rounds numbers up to multiples of a unit."""

from __future__ import annotations


def rounded_up(number: int, unit: int) -> int:
    """Returns the least multiple of a unit that is at least `number`."""
    return -(-number // unit) * unit
