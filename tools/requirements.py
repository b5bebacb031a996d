"""Reads the requirements that pyproject.toml lists, and tells which of them the running Python lacks.

    python tools/requirements.py GROUP ...    prints the missing ones, one a line

A GROUP is `build` (what is needed to build and import ibp) or one of the optional dependencies (test, demo, bench,
lint).
"""

import ast
import re
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
LISTS = {"build": ("requires", "dependencies")}  # Every other group is the list of its name.


def read(group):
    """Returns the requirements of a group that hold for the running Python: strings such as "torch>=2.10"."""
    text = PYPROJECT.read_text()
    lists = [
        re.search(rf"^{name} = (\[.*?\])", text, re.MULTILINE | re.DOTALL).group(1)
        for name in LISTS.get(group, (group,))
    ]
    parts = [requirement.partition("; python_version < ") for one in lists for requirement in ast.literal_eval(one)]
    return [name for name, _, version in parts if not version or sys.version_info < numbers(version)]


def numbers(version):
    """Returns the numbers of a version: (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def is_met(requirement):
    """Returns whether an installed distribution meets a requirement: a name, alone or with `>=` or `==` and a
    version."""
    name, operator, wanted = re.fullmatch(r"([\w.-]+?)(?:(>=|==)([\d.]+))?", requirement).groups()
    try:
        found = numbers(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    if operator is None:
        return True
    found = found[: len(numbers(wanted))]
    return found == numbers(wanted) if operator == "==" else found >= numbers(wanted)


def missing(*groups):
    """Returns the requirements of the groups that the running Python lacks, each of them once."""
    return [requirement for requirement in dict.fromkeys(sum(map(read, groups), [])) if not is_met(requirement)]


if __name__ == "__main__":
    print(*missing(*sys.argv[1:]), sep="\n")
