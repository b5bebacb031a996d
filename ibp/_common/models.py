"""Helps functions that change a model in place, and the modules and tensors that they put into it.

`check_model` checks the argument of such functions. `NotTheModel` is the base class of the objects that they return;
such an object raises an error if the caller uses it as the model.

`guard_conversions` lets a model refuse conversions, such as `model.half()` and `model.to("cuda")`, before they change
anything. A module or a tensor that refuses some conversions has a method `check_conversion(convert)`, which raises an
error if the conversion is refused. convert is the function that torch would apply to each tensor.

`SavedTensor` is a cache with which `state_dict()` makes a tensor only once, even if several names in the state dict
refer to it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

_APPLY = "_apply"  # The method of torch.nn.Module by which torch converts a module.


class NotTheModel:
    """Base class of the objects that are returned by functions that change a model in place. If the caller uses such an
    object as the model, an error says that the model itself was changed.

    Attributes:
        changed_by: the name of the function that returned the object.
    """

    changed_by: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(self._sentence("is not callable"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # Python, pickle and copy look for such attributes in any object.
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(self._sentence(f"has no attribute {name!r}"))

    def _sentence(self, what: str) -> str:
        return (
            f"{type(self).__name__!r} object {what}: {self.changed_by} returned it, and changed the model in place. "
            "Do not assign the result to the name of the model, and use the model as before"
        )


def check_model(model: Any, hint: str = "") -> None:
    """Raises TypeError unless `model` is a torch.nn.Module. hint: a string for the error message that says which models
    are accepted."""
    if isinstance(model, NotTheModel):
        raise TypeError(model._sentence("is no torch.nn.Module"))
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; wanted a torch.nn.Module{hint and f': {hint}'}")


# ---- conversions ----


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


# ---- state dicts ----


class SavedTensor:
    """A cache of the tensor that was last made for a state dict. It holds only weak references to the dict and to the
    tensor, so it keeps neither of them alive. Copies and pickles of the cache start empty."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], weakref.ref[torch.Tensor]] | None = None

    def of(self, state: dict[str, Any], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor that was made for this state dict, if it still exists. Otherwise calls make(), and caches
        and returns its result."""
        tensor = self._last[1]() if self._last is not None and self._last[0]() is state else None
        if tensor is None:
            tensor = make()
            # torch's state dicts are of class OrderedDict. A plain dict cannot be weakly referenced, so tensors for a
            # plain dict are not cached.
            if isinstance(state, OrderedDict):
                self._last = weakref.ref(state), weakref.ref(tensor)
        return tensor

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return SavedTensor, ()
