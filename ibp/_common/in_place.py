"""Checks for functions that change a model in place: of their argument, and of the use of what they return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch


class NotTheModel:
    """The base of what such a function returns. A caller that takes it for the model is told where the model is.

    Attributes:
        changed_by: name of the call that returned it.
    """

    changed_by: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(self._sentence("is not callable"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # attributes that Python, pickle and copy ask of any object
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(self._sentence(f"has no attribute {name!r}"))

    def _sentence(self, what: str) -> str:
        return (
            f"{type(self).__name__!r} object {what}: {self.changed_by} returned it, and changed the model in place. "
            "Do not assign the result to the name of the model, and use the model as before"
        )


def check_model(model: Any, hint: str = "") -> None:
    """Raises TypeError unless `model` is a model. hint: says which models are accepted."""
    if isinstance(model, NotTheModel):
        raise TypeError(model._sentence("is no torch.nn.Module"))
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; wanted a torch.nn.Module{hint and f': {hint}'}")
