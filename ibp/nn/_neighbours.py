"""Modules that get the same x, one after the other. The first one multiplies for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._fetch.linear import linear
from .._fetch.products import wants_gradients


class _Kept(NamedTuple):
    """Results for which modules have not asked yet."""

    # x, version: the tensor that was multiplied, and how often it had been changed. None: torch does not count changes.
    x: torch.Tensor
    version: int | None
    number: int  # the module that asks next
    results: list[torch.Tensor]  # the results of all modules


class Neighbours:
    """Modules over tables that share one call of `linear`, as long as the model calls them in turn with the same x.
    modules: instances of `Linear`, in the order of the calls."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = tuple(modules)
        self._kept: _Kept | None = None
        self._is_used = True  # until a result that was made for a module was not asked for

    def product(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the product of x and a module's weights."""
        kept = self._kept
        if kept is not None and kept.number == number and kept.x is x and kept.version == _version(x):
            is_last = number + 1 == len(self.modules)
            self._kept = None if is_last else kept._replace(number=number + 1)
            return kept.results[number]
        if kept is not None:
            self._kept, self._is_used = None, False
        modules = self.modules
        if number or not self._is_used or any(wants_gradients(x, module.bias) for module in modules):
            return linear(x, modules[number].weight, modules[number].bias)
        results = linear(x, [module.weight for module in modules], [module.bias for module in modules])
        self._kept = _Kept(x, _version(x), 1, results)
        return results[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}


def _version(x: torch.Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version
