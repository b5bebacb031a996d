"""Code that the adapters of several frameworks share.

`engines.py` is for engines that serve models, `features.py` for stores of features, `loading.py` for frameworks that
load models by a configuration, and `releases.py` checks which release of a framework is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns a function `__getattr__` for a package, which imports a module of the package when the module, or a name
    that the package has from it, is first read. An adapter then needs only those classes of its framework that it uses.

    modules: for each module, the names that the package also has.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return __getattr__
