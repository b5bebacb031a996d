"""Makes the tensor for a state_dict() only once if several names of the state share it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class SavedTensor:
    """A cache of the tensor that was last made for a state dict. It holds weak references to the dict and to the
    tensor, so it keeps neither of them alive. Copies and pickles of it start empty."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], weakref.ref[torch.Tensor]] | None = None

    def of(self, state: dict[str, Any], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor that was made for a state, or else make()."""
        tensor = self._last[1]() if self._last is not None and self._last[0]() is state else None
        if tensor is None:
            tensor = make()
            if isinstance(state, OrderedDict):  # the class that torch uses; a dict cannot have weak references
                self._last = weakref.ref(state), weakref.ref(tensor)
        return tensor

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return SavedTensor, ()
