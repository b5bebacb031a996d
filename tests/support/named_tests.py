"""Looks up tests that a page or a table names."""

import ast
import functools

from native import ROOT


@functools.cache
def _names_in(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def is_test(named):
    """Returns whether there is a test of this name: "tests/folder/test_file.py::test_name"."""
    path, _, name = named.partition("::")
    return name.startswith("test_") and (ROOT / path).is_file() and name in _names_in(path)
