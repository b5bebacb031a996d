"""Checks of arguments that several functions take."""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex


def whole_number(name: str, value: SupportsIndex, least: int | None = None, most: int | None = None) -> int:
    """The int that an argument is; numpy's integers and tensors of one are taken too. TypeError: it is a bool, a float
    or no number. ValueError: it is not in [least, most], where they are given."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {_shown(value)}; wanted an int") from None
    if (least is not None and number < least) or (most is not None and number > most):
        wanted = f"at most {most}" if least is None else f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {number}; wanted {wanted}")
    return number


def number(name: str, value: SupportsFloat) -> float:
    """The float that an argument is; ints and numpy's numbers too. TypeError: it is a bool or no real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {_shown(value)}; wanted a float")
    return float(value)


def near(value: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the known names that are spelt nearly so."""
    found = difflib.get_close_matches(str(value).lower(), known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _shown(value: object) -> str:
    return (
        f"{value!r}, a {type(value).__name__}"
        if isinstance(value, (bool, int, float, str))
        else f"a {type(value).__name__}"
    )
