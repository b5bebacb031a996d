"""The base of classes whose objects belong to one process."""

from __future__ import annotations

from typing import NoReturn


class OfThisProcess:
    """Base of classes whose objects hold memory, streams or locks of this process. Pickling an object raises a
    TypeError that says what to do instead. Copying an object also raises, unless its class has a `__deepcopy__`.

    Example:
        >>> import copy
        >>> class Pool(ibp.adapters.OfThisProcess):
        ...     _instead = "make it anew there"    # each class says what to do instead
        >>> copy.copy(Pool())
        Traceback (most recent call last):
        TypeError: an ...Pool cannot be pickled or copied: make it anew there
    """

    _instead: str

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self)
        what = "pickled" if hasattr(kind, "__deepcopy__") else "pickled or copied"
        raise TypeError(f"an {kind.__module__}.{kind.__name__} cannot be {what}: {self._instead}")
