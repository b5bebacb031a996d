"""Adapters for other frameworks. Each adapter is a module or a package. An adapter is imported when it is first used
(`ibp.integrations.<framework>`, or `import ibp.integrations.<framework>`), and never by `import ibp`.

An adapter uses tables to implement an interface of a framework, such as a feature store, an offloading hook or a cache.
An adapter needs its framework to be installed; the rest of ibp needs only torch. `shared` has code that several
adapters use. The pages gnn.md, llm.md, kv-cache.md and serving.md in docs/ show how to use the adapters. Tests of an
adapter are skipped if its framework is not installed. `ibp.nn` and `ibp.offload` are for torch itself.

Some modules can also be imported under their former names, such as `ibp.integrations.vllm_sync`. Existing engine
options, imports and pickles still use these names.
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.machinery import ModuleSpec as _ModuleSpec
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

# A map from former names of modules to their present names.
_FORMER = {
    "sglang_pool": "sglang.pool",
    "vllm_sync": "vllm.sync",
    "vllm_tiers": "vllm.tiers",
    "vllm_weights": "vllm.weights",
}
_NAMES = sorted({*_FORMER, *(path.stem for path in _Path(__file__).parent.glob("[!_]*"))} - {"shared"})


def __dir__() -> list[str]:
    return _NAMES


def __getattr__(name: str) -> _ModuleType:
    if name in _NAMES:
        return _import_module(f"ibp.integrations.{name}")
    raise AttributeError(f"module 'ibp.integrations' has no attribute {name!r}; there are {', '.join(_NAMES)}")


class _FormerNames:
    """Finds and loads modules under the names in `_FORMER`. Both names then refer to the same module object."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> _ModuleSpec | None:
        package, _, last = name.rpartition(".")
        return _ModuleSpec(name, cls) if package == __name__ and last in _FORMER else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: _ModuleSpec) -> None:
        """Returns None: Python makes a module, which `exec_module` then replaces."""

    @staticmethod
    def exec_module(module: _ModuleType) -> None:
        _sys.modules[module.__name__] = _import_module(f"{__name__}.{_FORMER[module.__name__.rpartition('.')[2]]}")


_sys.meta_path.append(_FormerNames)
