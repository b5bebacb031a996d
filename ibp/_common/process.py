"""The base of classes whose objects belong to one process."""

from __future__ import annotations

from typing import NoReturn


class OfThisProcess:
    """Base of classes whose objects hold memory, streams or locks of this process. Pickling an object raises
    TypeError, which says what to do instead. Copying it also raises, unless its class has a `__deepcopy__`."""

    _instead: str  # what to do in place of pickling or copying; each class says it

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self)
        what = "pickled" if hasattr(kind, "__deepcopy__") else "pickled or copied"
        raise TypeError(f"an {kind.__module__}.{kind.__name__} cannot be {what}: {self._instead}")
