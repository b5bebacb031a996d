"""Adapters for other frameworks. Each adapter is a module or a package. An adapter is imported when it is first used
(`ibp.integrations.<framework>`, or `import ibp.integrations.<framework>`), and never by `import ibp`.

An adapter uses tables to implement an interface of a framework, such as a feature store, an offloading hook or a cache.
An adapter needs its framework to be installed; the rest of ibp needs only torch. `shared` has code that several
adapters use. The pages gnn.md, llm.md, kv-cache.md and serving.md in docs/ show how to use the adapters. Tests of an
adapter are skipped if its framework is not installed. `ibp.nn` and `ibp.offload` are for torch itself.
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
