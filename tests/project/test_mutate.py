"""tools/mutate.py: which small mistakes it makes of a source, and which lines a test has to reach for one."""

import ast
import os
import subprocess
import sys

import numpy as np
import pytest

from native import ROOT

sys.path.append(str(ROOT / "tools"))

mutations = pytest.importorskip("mutations")
mutate = pytest.importorskip("mutate")

PYTHON = '''
"""Adds 1 < 2 and more."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1

def clip(x: "int | 1", most: int = 1, *, wraps: bool = True) -> 1:
    # 1 + 1
    if x is not None and -x <= most and not (x
            == 7):
        raise ValueError(f"{x + 1} is above {most - 1}")
    assert x != 0, 1 + x
    return x + 10 if x not in (1,) else x
'''
C = """
#define ONE 1
static_assert(sizeof(int) + 1 > 0, "1");
/* 1 < 2 */
static bool less(const node *a, int b) // a < b
{
    for (int i = 0; i <= b - 1u; i++, b += 010) puts("1 + 1");
    return a->next && -b >= 0x1 << 1 || true;
}
"""


def places(path, text, tmp_path):
    (tmp_path / path).write_text(text)
    found = mutations.mutations_of(tmp_path, path)
    for mutation in found:
        changed = mutation.applied(text)
        assert changed != text and len(changed.splitlines()) == len(text.splitlines())
        if path.endswith(".py"):
            ast.parse(changed)
    return [(mutation.line, mutation.was, mutation.becomes) for mutation in found]


def test_mistakes_of_python(tmp_path):
    assert places("a.py", PYTHON, tmp_path) == [
        (8, "1", "0"),
        (8, "1", "2"),
        (8, "True", "False"),
        (10, "is not", "is"),
        (10, "and", "or"),
        (10, "-", "+"),
        (10, "<=", "<"),
        (10, "and", "or"),
        (11, "==", "!="),
        (13, "!=", "=="),
        (13, "0", "1"),
        (14, "+", "-"),
        (14, "not in", "in"),
        (14, "1", "0"),
        (14, "1", "2"),
    ]


def test_mistakes_of_c(tmp_path):
    assert places("a.c", C, tmp_path) == [
        (7, "0", "1"),
        (7, "<=", "<"),
        (7, "-", "+"),
        (7, "1", "0"),
        (7, "1", "2"),
        (7, "+=", "-="),
        (8, "&&", "||"),
        (8, "-", "+"),
        (8, ">=", ">"),
        (8, "1", "0"),
        (8, "1", "2"),
        (8, "||", "&&"),
        (8, "true", "false"),
    ]


def test_the_lines_that_a_test_has_to_reach():
    """Of a default those of its function; of what runs at the import any."""
    tree = ast.parse(PYTHON)
    assert mutate.lines_of_statement(tree, 8) == range(10, 15)
    assert mutate.lines_of_statement(tree, 11) == range(10, 12)
    assert mutate.lines_of_statement(tree, 14) == range(14, 15)
    assert mutate.lines_of_statement(tree, 6) is None


def test_lines_of_a_python_that_a_test_starts(tmp_path):
    tracing = pytest.importorskip("tracing")
    (tmp_path / "ibp").mkdir()
    (tmp_path / "ibp" / "traced.py").write_text(
        "def half(x):\n    return x / 2\n\n\ndef unused():\n    return 1\n\n\nhalf(1)\n"
    )
    (tmp_path / "ibp_command.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(tracing.SITE)
    reached = tmp_path / "reached"
    reached.write_bytes(bytes(tracing.TRACED_BYTES))
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tools'}", "IBP_REACHED": str(reached)}
    environment = {**os.environ, **paths, "IBP_TRACED_TREE": str(tmp_path)}
    command = [sys.executable, "-c", "import ibp.traced"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    start = tracing.starts_of(tmp_path)[str(tmp_path / "ibp" / "traced.py")]
    assert [line for line in range(10) if reached.read_bytes()[start + line]] == [1, 2, 5, 9]


def test_a_test_of_each_function_runs_first():
    names = [f"tests/test_a.py::test_a[{number}]" for number in range(9)] + ["tests/test_b.py::test_b"]
    seconds = np.array([*range(1, 10), 100.0])
    found = mutate.Reach(names, seconds, [], {}, {})
    for most in (100, 3):
        tests = [test for batch, _ in mutate.batches(found, np.arange(10), ["c"], most) for test in batch]
        assert tests == [*names[:2], names[9], *names[2 : min(9, most)], "c"]


def test_reasons_are_given_for_mistakes_of_the_sources():
    """A row of a line that has changed or gone excuses nothing."""
    known = mutate.reasons()
    sources = {key[0] for key in known}
    made = {mutate.key_of(mistake) for path in sources for mistake in mutations.mutations_of(mutate.ROOT, path)}
    assert known.keys() - made == set()
