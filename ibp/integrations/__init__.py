"""Adapters for other frameworks. Each adapter is a module or a package. It is imported at its first use
(`ibp.integrations.<framework>`, or `import ibp.integrations.<framework>`), and never by `import ibp`.

An adapter implements an interface of a framework (a feature store, an offloading hook, a cache) with tables. It needs
the framework to be installed; the package itself needs only torch. `shared` has code that several adapters use. The
pages gnn.md, llm.md, kv-cache.md and serving.md in docs/ show how to use the adapters. Tests of an adapter are skipped
if its framework is not installed. `ibp.nn` and `ibp.offload` are for torch itself.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

_NAMES = sorted({path.stem for path in _Path(__file__).parent.glob("[!_]*")} - {"shared"})


def __dir__() -> list[str]:
    return _NAMES


def __getattr__(name: str) -> _ModuleType:
    if name in _NAMES:
        return _import_module(f"ibp.integrations.{name}")
    raise AttributeError(f"module 'ibp.integrations' has no attribute {name!r}; there are {', '.join(_NAMES)}")
