"""Bridges to host frameworks. Each is one module or folder, which is imported when it is named
(`ibp.integrations.<framework>`, or `import ibp.integrations.<framework>`), and never by `import ibp`.

A bridge adapts tables to an interface of a framework (a feature store, an offloading hook, a cache) and needs that
framework installed; the package itself needs torch alone. `shared` has what several hosts need. Pages of docs/ show
bridges (gnn.md, llm.md, kv-cache.md, serving.md), and tests skip without the framework. `ibp.nn` and `ibp.offload`
serve torch itself.
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
