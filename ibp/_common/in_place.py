"""Helpers for functions that change a model in place. `check_model` checks their argument. `NotTheModel` is the base
class of the objects that they return; such an object raises an error if the caller uses it as the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch


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
