"""Paths: the ways in which a request can be served. Each is one object; the cheapest that can is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")


class Path(Generic[Request]):
    """One way to serve requests.

    A new path is a subclass with `can`, `cost` and a method `run` that the requests' module calls, and one entry in
    that module's `PATHS`.

    name: callers ask for the path by this name (`path=`); None: they cannot, only the library chooses it."""

    name: str | None = None

    def can(self, request: Request) -> str | None:
        """None if the path can serve the request, else the reason why not, as the end of a sentence."""
        raise NotImplementedError

    def cost(self, request: Request) -> float:
        """Time relative to 1.0, a kernel that reads rows in the order given; a ranking by measured thresholds, no
        prediction. Cheap to work out, and valid for requests that the path cannot serve too."""
        raise NotImplementedError


AnyPath = TypeVar("AnyPath", bound=Path)


def choose(paths: Sequence[AnyPath], request: Any) -> AnyPath:
    """The cheapest path that can serve the request, the first of equal ones."""
    best, least = None, math.inf
    for path in paths:
        cost = path.cost(request)
        if cost < least and path.can(request) is None:
            best, least = path, cost
    assert best is not None, "where the table is, it can be decoded"
    return best


def named(paths: Sequence[AnyPath], name: str) -> AnyPath:
    """The path with a name; ValueError if there is none."""
    for path in paths:
        if path.name is not None and path.name == name:
            return path
    names = ", ".join(repr(path.name) for path in paths if path.name is not None)
    raise ValueError(f"path is {name!r}; wanted one of {names}, or None")
