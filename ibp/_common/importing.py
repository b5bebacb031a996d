"""Has two tools for imports. `published` makes the public names of a package appear to be defined in the package itself
and not in its modules. `after_import` delays work until a module of another package is imported, so that `import ibp`
does not have to import it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


def published(package: str) -> Callable[[], list[str]]:
    """Sets `__module__` of all classes in a package's `__all__` to the name of the package, for pickle and for readers.
    Returns a function to use as the package's `__dir__`, which lists the names of `__all__`."""
    module = vars(sys.modules[package])
    for name in module["__all__"]:
        if isinstance(value := module.get(name), type):
            value.__module__ = package
    return lambda: module["__all__"]


def after_import(name: str, work: Callable[[], object]) -> None:
    """Calls work() once the module with the given name is imported: now if it is imported already, otherwise right
    after its import."""
    if name in sys.modules:
        work()
    else:
        sys.meta_path.insert(0, _Finder(name, work))


class _Finder:
    """A finder in sys.meta_path for one module. It lets the other finders find the module, and calls work() after the
    module's code has run."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self._name, self._work, self._is_asking = name, work, False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: object) -> None:
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # The loader may also load other modules: all modules of an archive share a loader.
            if module.__name__ == self._name and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._work()

        loader.exec_module = exec_module  # type: ignore[attr-defined]
