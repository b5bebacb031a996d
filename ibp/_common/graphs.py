"""Functions that torch.compile leaves out of its graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def outside_of_graphs(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """A function that compiled code calls as it is: torch.compile's graph ends before it."""

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if not made:  # not before the first call: it loads torch's compiler
            made.append(torch.compiler.disable(function))
        return made[0](*args, **kwargs)

    made: list[Callable[_Given, _Result]] = []
    return call
