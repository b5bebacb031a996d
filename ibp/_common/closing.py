"""`Closing`, the base of classes whose `close()` undoes a change. A `with` block calls `close()` at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """Base of classes with a method `close()`. Makes their objects context managers, which call `close()` at the end of
    a `with` block.

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
