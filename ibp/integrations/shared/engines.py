"""Compares the installed release of a framework with the releases that an adapter works with.

Code that the adapters of serving engines share. It checks the engines' releases, reads options of pools, runs tasks
on threads, and converts names of dtypes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch

import ibp


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


_logger = logging.getLogger(__name__)

# (the engine's name, the first and the last release in tests/integrations/interfaces) for each package.
TRIED = {
    "vllm": ("vLLM", "0.26.0", "0.33.0"),
    "sglang": ("SGLang", "0.5.10.post1", "0.5.23"),
    "lmcache": ("LMCache", "0.5.4", "0.5.6"),
}

_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}
_CACHE_DTYPES["auto"] = "bfloat16"  # means the model's dtype, which vLLM does not say here; it is usually BF16


def check_engine(package: str, missing: ImportError | None, since: str | None = None) -> None:
    """Checks that an engine can be used.

    Args:
        package: the name of the engine's package, a key of `TRIED`.
        missing: the error that importing the engine's classes raised. None: the classes could be imported.
        since: the first release that works with the calling module. None: the first release of `TRIED`.

    Raises:
        ImportError: classes that the adapter needs could not be imported.

    Warns:
        The installed release is older or newer than all tested releases.
    """
    name, first, last = TRIED[package]
    first = since or first
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    if missing is not None:
        what = f"{installed} is installed: {missing}" if installed else "none is installed"
        raise ImportError(f"ibp.integrations.{package} needs {name} {first} to {last}; {what}") from missing
    if installed and not numbers(first) <= numbers(installed) <= numbers(last):
        warnings.warn(
            f"ibp.integrations.{package} was tried with {name} {first} to {last}; {installed} is installed",
            stacklevel=3,
        )


def pages_by(options: dict[str, Any], where: str) -> functools.partial[ibp.kv.KeyedPages]:
    """Returns a function that makes an `ibp.kv.KeyedPages` with the options pool_bytes, device and level. where: the
    name of the options in error messages. Raises TypeError or ValueError if pool_bytes is missing, or if an option is
    not as described."""
    if not options.get("pool_bytes"):
        raise ValueError(f"{where} has no pool_bytes: bytes of host memory for coded pages")
    try:
        pool_bytes = int(options["pool_bytes"])
    except (TypeError, ValueError):
        raise ValueError(f"pool_bytes is {options['pool_bytes']!r}; wanted a number of bytes") from None
    device, level = options.get("device", "cpu"), options.get("level", "default")
    made = functools.partial(ibp.kv.KeyedPages, pool_bytes, device=device, level=level)
    made()  # raises errors in the options now; otherwise the first page would raise them on a thread of the engine
    return made


class Tasks:
    """Runs tasks one after the other on a separate thread, and keeps their results until the caller takes them.

    Args:
        numbers: an iterator of the numbers of tasks.
        on_done: a function that is called after each task.
    """

    def __init__(self, numbers: Iterator[int], on_done: Callable[[], None]) -> None:
        self._numbers, self._on_done, self._thread = numbers, on_done, ThreadPoolExecutor(1)
        self._results: dict[int, Any] = {}

    def submit(self, work: Callable[..., Any], *arguments: Any, failed: Any) -> int:
        """Queues a task and returns its number. failed: the result of the task if `work` raises; the error is
        logged."""
        number = next(self._numbers)
        self._thread.submit(self._run, number, work, arguments, failed)
        return number

    def take(self, number: int) -> Any:
        """Returns the result of a task and drops it. Returns None if the task has not ended, or if its result was taken
        before."""
        return self._results.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """Returns the results of all tasks that have ended, by number, and drops them."""
        return {number: self._results.pop(number) for number in list(self._results)}

    def wait(self) -> None:
        """Waits for all tasks that have been submitted."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Waits for the task that is running. Tasks that have not begun do not run."""
        self._thread.shutdown(cancel_futures=True)

    def _run(self, number: int, work: Callable[..., Any], arguments: Sequence[Any], failed: Any) -> None:
        try:
            self._results[number] = work(*arguments)
        except Exception:
            _logger.exception("a task of an adapter has failed")
            self._results[number] = failed
        self._on_done()


def dtype_of(name: str, option: str | None = None) -> torch.dtype:
    """Returns the torch dtype that an engine calls `name`, or torch.uint8 if the name is unknown. option: if given, the
    name of a dtype that the user chose, which is used in place of `name`. Raises ValueError if this name is unknown."""
    known = getattr(torch, _CACHE_DTYPES.get(option or name, option or name), None)
    if isinstance(known, torch.dtype):
        return known
    if option:
        raise ValueError(f"the pages' dtype is {option!r}; wanted one of torch, such as 'bfloat16', or 'fp8_e4m3'")
    return torch.uint8
