"""Compares the installed release of a framework with the releases that an adapter works with."""

from __future__ import annotations

import re
from types import ModuleType


def numbers(version: str) -> list[int]:
    """Returns the numbers in a version string as a list; versions are compared by these lists. The part after a "+" is
    ignored."""
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


def check_release(framework: ModuleType, first: str) -> None:
    """Raises ImportError if an imported framework is older than `first`, the first release that its adapter works
    with."""
    name, installed = framework.__name__, framework.__version__
    if numbers(installed) < numbers(first):
        raise ImportError(f"ibp.integrations.{name} needs {name} {first} or newer; {installed} is installed")
