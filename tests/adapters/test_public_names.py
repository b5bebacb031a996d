"""Adapters stand on public names: what they need of the library, a stranger's adapter can use too."""

import ast

import pytest

from native import ROOT

ADAPTERS = sorted((ROOT / "ibp" / "integrations").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def private_names(path, tree):
    """The private modules and names of ibp that a file imports from outside of its folder, or reads as `ibp._name`."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            module = [*parts, *(node.module or "").split(".")]
            if module[0] == "ibp" and module[: len(package)] != package:
                yield from (part for part in module if part.startswith("_"))
                yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("ibp.") and "._" in alias.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] == "ibp":
            yield from [node.attr] * (node.attr.startswith("_") and not node.attr.endswith("__"))


@pytest.mark.parametrize("path", [*ADAPTERS, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_an_adapter_uses_public_names(path):
    assert list(private_names(path, ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line, found",
    [
        ("from ..._fetch.linear import linear", ["_fetch"]),
        ("from ...kv._engines import KeyedPages", ["_engines"]),
        ("from ... import _core", ["_core"]),
        ("import ibp._core", ["ibp._core"]),
        ("import ibp\nibp.kv._engines.KeyedPages", ["_engines"]),
        ("from ibp.kv import KeyedPages", []),
        ("from ..shared import Tasks", []),
        ("from ._incoming import incoming", []),
        ("import ibp\nibp.__version__", []),
    ],
)
def test_what_is_found(line, found):
    assert list(private_names(ROOT / "ibp" / "integrations" / "vllm" / "new.py", ast.parse(line))) == found
