"""Objects whose `close()` undoes a change, also at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """An object with a `close()` method, as a context manager that calls it.

    Example:
        >>> class Attached(ibp.adapters.Closing):
        ...     def close(self):
        ...         print("detached")
        >>> with Attached() as attached:
        ...     print("attached")
        attached
        detached
    """

    @abstractmethod
    def close(self) -> object:
        """Undoes the change."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
