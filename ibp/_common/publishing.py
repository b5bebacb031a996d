"""Makes the public names of a package appear to be defined in the package itself and not in its modules."""

from __future__ import annotations

import sys
from collections.abc import Callable


def published(package: str) -> Callable[[], list[str]]:
    """Sets `__module__` of all classes in a package's `__all__` to the name of the package, for pickle and for readers.
    Returns a function to use as the package's `__dir__`, which lists the names of `__all__`."""
    module = vars(sys.modules[package])
    for name in module["__all__"]:
        if isinstance(value := module.get(name), type):
            value.__module__ = package
    return lambda: module["__all__"]
