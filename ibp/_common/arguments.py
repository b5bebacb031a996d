"""Checks arguments that several functions have in common: numbers such as `max_sms`, and the patterns `include` and
`exclude`, which choose tensors by their names."""

from __future__ import annotations

import difflib
import fnmatch
import numbers
import operator
from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex


def whole_number(name: str, value: SupportsIndex, least: int | None = None, most: int | None = None) -> int:
    """Converts an argument to an int. Accepts Python and numpy integers, and tensors that hold one integer.

    Raises:
        TypeError: the value is a bool, a float or not a number.
        ValueError: the value is less than `least` or more than `most`. A bound that is None is not checked.
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
    """Converts an argument to a float. Accepts floats and ints of Python and numbers of numpy. Raises TypeError if the
    value is a bool or not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {_shown(value)}; wanted a float")
    return float(value)


def sms_of(max_sms: int | None) -> int:
    """Checks max_sms, the largest number of multiprocessors to keep busy. Returns the number to pass to operations,
    where 0 means all multiprocessors."""
    if max_sms is None:
        return 0
    if isinstance(max_sms, bool) or not hasattr(max_sms, "__index__"):
        raise TypeError(f"max_sms is {max_sms!r}; wanted an int of at least 1, or None for all")
    max_sms = operator.index(max_sms)
    if max_sms < 1:
        raise ValueError(f"max_sms is {max_sms}; wanted at least 1, or None for all")
    return max_sms


def near(value: object, known: Iterable[str]) -> str:
    """Returns a string to append to an error message about an unknown name. The string proposes known names with a
    similar spelling. Returns "" if there are no such names."""
    found = difflib.get_close_matches(str(value).lower(), known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _shown(value: object) -> str:
    return (
        f"{value!r}, a {type(value).__name__}"
        if isinstance(value, (bool, int, float, str))
        else f"a {type(value).__name__}"
    )


# ---- patterns of names ----


def is_chosen(name: str, include: Iterable[str] | None, exclude: Iterable[str]) -> bool:
    """Returns whether a name matches a pattern of include (None: any name matches), and no pattern of exclude. The
    patterns are those of the module fnmatch."""

    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return (include is None or matches(include)) and not matches(exclude)


def chosen(names: Iterable[str], include: Iterable[str] | None, exclude: Iterable[str]) -> list[str]:
    """Returns the names that patterns choose. Raises ValueError if a pattern of include does not match any name."""
    every, unwanted = list(names), tuple(exclude)
    wanted = None if include is None else tuple(include)
    for pattern in wanted or ():
        if not any(is_chosen(name, [pattern], ()) for name in every):
            raise ValueError(f"there is no tensor whose name matches {pattern!r}")
    return [name for name in every if is_chosen(name, wanted, unwanted)]
