"""What adapters of serving engines share: the releases that they were tried with, and names of dtypes."""

from __future__ import annotations

import importlib.metadata
import re
import warnings

import torch

# By package: its name, and the first and last release in tests/integrations/interfaces.
TRIED = {
    "vllm": ("vLLM", "0.26.0", "0.33.0"),
    "sglang": ("SGLang", "0.5.10.post1", "0.5.23"),
}

_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}


def check_engine(package: str, missing: ImportError | None) -> None:
    """missing: what importing the engine's classes raised.

    Raises:
        ImportError: classes that the adapter derives from are missing.

    Warns:
        The release that is installed is older or newer than those that the adapter was tried with.
    """
    name, first, last = TRIED[package]
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    if missing is not None:
        what = f"{installed}, which is installed, lacks a class" if installed else "it is not installed"
        raise ImportError(f"ibp.integrations.{package} needs {name} {first} to {last}; {what}") from missing
    if installed and not _numbers(first) <= _numbers(installed) <= _numbers(last):
        warnings.warn(
            f"ibp.integrations.{package} was tried with {name} {first} to {last}; {installed} is installed",
            stacklevel=3,
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that an engine calls so; torch.uint8 where that is unknown."""
    dtype = getattr(torch, _CACHE_DTYPES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.uint8
