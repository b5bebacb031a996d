"""`Neighbours`: modules that are called one after the other with the same x. The first module computes the results of
all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._fetch.linear import linear
from .._fetch.products import wants_gradients


class _Kept(NamedTuple):
    """The results of one call of `linear` for all modules, kept until the last module has returned its result."""

    x: torch.Tensor  # the tensor that was multiplied
    version: int | None  # torch's count of changes of x at that time; None: torch does not count them
    number: int  # number of the module that is expected to be called next
    results: list[torch.Tensor]  # the results, one for each module


class Neighbours:
    """Modules over tables that share one call of `linear`, as long as the model calls them one after the other with the
    same x. modules: instances of `Linear`, in the order of the calls."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = tuple(modules)
        self._kept: _Kept | None = None
        # Becomes False when a result that was computed ahead is not used. From then on, every module multiplies alone.
        self._is_used = True

    def product(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of a module for x. number: the module's number in `modules`."""
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
