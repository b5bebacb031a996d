"""Code that the adapters of several frameworks share.

- `engines.py`: for serving engines, such as vLLM.
- `features.py`: for feature stores of graphs.
- `loading.py`: for the quantizers of transformers and diffusers.
- `releases.py`: compares the installed release of a framework with those that an adapter supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns a function `__getattr__` for a package, which imports the package's modules lazily. A module is imported
    when the module or one of its names is first read from the package. So users need only the parts of a framework that
    the modules they use import.

    modules: for each module, those of its names that can also be read from the package.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return __getattr__
