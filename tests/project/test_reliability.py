"""docs/reliability.md: each promise names tests that there are."""

import ast
import functools
import re

import pytest

from native import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "reliability.md").read_text().partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| fault"))
]


@functools.cache
def names_in(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_promises_have_tests(row):
    fault, promise, named = row
    tests = re.findall(r"`([^`]+\.py)::(\w+)`", named)
    assert fault and promise and tests and len(tests) == named.count("`") / 2
    for path, test in tests:
        assert test in names_in(path), f"{path} has no {test}"


def test_there_are_promises():
    assert len(ROWS) > 25
