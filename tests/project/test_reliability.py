"""docs/reliability.md: each promise names tests that there are."""

import re

import pytest

from named_tests import is_test
from native import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "reliability.md").read_text().partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| fault"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_promises_have_tests(row):
    fault, promise, named = row
    tests = re.findall(r"`([^`]+)`", named)
    assert fault and promise and tests
    assert [test for test in tests if not is_test(test)] == []


def test_there_are_promises():
    assert len(ROWS) > 25
