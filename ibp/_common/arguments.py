"""Checks of arguments that several functions take."""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex


def whole_number(name: str, value: SupportsIndex, least: int | None = None, most: int | None = None) -> int:
    """Returns the argument as an int; numpy's integers and tensors of one integer are also accepted.

    Raises:
        TypeError: it is a bool, a float or not a number.
        ValueError: it is not in [least, most], if these are given.
    """
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
    """Returns the argument as a float; ints and numpy's numbers are also accepted. Raises TypeError if it is a bool
    or not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {_shown(value)}; wanted a float")
    return float(value)


def near(value: object, known: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name: the known names with a similar spelling."""
    found = difflib.get_close_matches(str(value).lower(), known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _shown(value: object) -> str:
    return (
        f"{value!r}, a {type(value).__name__}"
        if isinstance(value, (bool, int, float, str))
        else f"a {type(value).__name__}"
    )
