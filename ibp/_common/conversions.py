"""Refuses conversions of modules, such as `module.half()` and `module.to("cuda")`, before they change anything.

A module or a tensor that refuses some conversions has a method `check_conversion(convert)`, which raises an error if
the conversion is refused. convert is the function that torch would apply to each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_APPLY = "_apply"  # The method of torch.nn.Module by which torch converts a module.


def check_conversion(module: torch.nn.Module, convert: Callable) -> None:
    """Raises an error if a module, or a submodule or tensor in it, refuses a conversion."""
    for part in _refusing(module):
        part.check_conversion(convert)


def guard_conversions(model: torch.nn.Module) -> None:
    """Makes a model and each of its submodules check all that they contain before they convert anything. Without this
    check, a submodule or a tensor could refuse after torch, which converts depth first, has converted other tensors. If
    a module no longer contains anything that may refuse, its check is removed.

    If the model later becomes a submodule of another module, that module does not check, because torch does not tell
    the model about it.
    """
    for module in model.modules():
        if next(_refusing(module), None) is not None:
            vars(module)[_APPLY] = _GuardedApply(module)
        elif isinstance(vars(module).get(_APPLY), _GuardedApply):
            del vars(module)[_APPLY]


class _GuardedApply:
    """Replaces the method `_apply` of one module: calls `check_conversion` first, and then the method of the module's
    class."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module: Any = module

    def __call__(self, convert: Callable, recurse: bool = True) -> torch.nn.Module:
        check_conversion(self._module, convert)
        return getattr(type(self._module), _APPLY)(self._module, convert, recurse)


def _refusing(module: torch.nn.Module) -> Iterator[Any]:
    """Searches a module, its submodules, and their parameters and buffers. Yields those that have a method
    `check_conversion`, because they may refuse conversions."""
    for part in module.modules():
        for held in (part, *part._parameters.values(), *part._buffers.values()):
            if hasattr(type(held), "check_conversion"):
                yield held
