"""`SavedTensor`, a cache with which `state_dict()` makes a tensor only once, even if several names in the state dict
refer to it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


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
