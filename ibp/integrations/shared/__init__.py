"""What adapters of several hosts share.

`engines.py` is for engines that serve models, `features.py` for stores of features, `loading.py` for frameworks that
load models by a configuration, and `releases.py` checks which release of a host is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns `__getattr__` of a package, which has its modules and some of their names. A module is imported when it,
    or one of its names, is first asked for, so that an adapter needs only the classes of the host that it uses.

    modules: for each module the names that the package has, too.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return __getattr__
