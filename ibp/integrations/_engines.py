"""What adapters of serving engines share: releases that they were tried with, options, tasks, dtypes."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import ibp

from ._releases import numbers

_logger = logging.getLogger(__name__)

# By package: its name, and the first and last release in tests/integrations/interfaces.
TRIED = {
    "vllm": ("vLLM", "0.26.0", "0.33.0"),
    "sglang": ("SGLang", "0.5.10.post1", "0.5.23"),
    "lmcache": ("LMCache", "0.5.4", "0.5.6"),
}

_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}
_CACHE_DTYPES["auto"] = "bfloat16"  # vLLM's default: the model's dtype, which it does not say, and mostly BF16


def check_engine(package: str, missing: ImportError | None, since: str | None = None) -> None:
    """missing: what importing the engine's classes raised. since: the first release, where that is not the package's.

    Raises:
        ImportError: classes that the adapter derives from are missing.

    Warns:
        The installed release is older or newer than every release that the adapter was tried with.
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


def register_host_pool() -> None:
    """SGLang calls it as its plugin `ibp_host_pool` in each of its processes, whether or not somebody wants the plugin:
    does nothing, and imports nothing of SGLang, unless `SGLANG_PLUGINS` names it."""
    if "ibp_host_pool" in os.environ.get("SGLANG_PLUGINS", "").replace(" ", "").split(","):
        importlib.import_module("ibp.integrations.sglang_pool").register()


def pages_by(options: dict[str, Any], where: str) -> functools.partial[ibp.kv.KeyedPages]:
    """What makes `ibp.kv.KeyedPages` as options say: pool_bytes, device, level. where: what users call the options.
    TypeError, ValueError: pool_bytes is missing, or an option is not as described."""
    if not options.get("pool_bytes"):
        raise ValueError(f"{where} has no pool_bytes: bytes of host memory for coded pages")
    try:
        pool_bytes = int(options["pool_bytes"])
    except (TypeError, ValueError):
        raise ValueError(f"pool_bytes is {options['pool_bytes']!r}; wanted a number of bytes") from None
    device, level = options.get("device", "cpu"), options.get("level", "default")
    made = functools.partial(ibp.kv.KeyedPages, pool_bytes, device=device, level=level)
    made()  # raises now what else the first page would, on a thread of the engine
    return made


class Tasks:
    """Tasks on a thread of their own, whose results are asked for later.

    numbers: where their numbers come from. on_done: is called after each task.
    """

    def __init__(self, numbers: Iterator[int], on_done: Callable[[], None]) -> None:
        self._numbers, self._on_done, self._thread = numbers, on_done, ThreadPoolExecutor(1)
        self._results: dict[int, Any] = {}

    def submit(self, work: Callable[..., Any], *arguments: Any, failed: Any) -> int:
        """Returns the number of the task. failed: its result if it raises, which the log says."""
        number = next(self._numbers)
        self._thread.submit(self._run, number, work, arguments, failed)
        return number

    def take(self, number: int) -> Any:
        """A result, once; None while the task is under way."""
        return self._results.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """The results that are there, by number."""
        return {number: self._results.pop(number) for number in list(self._results)}

    def wait(self) -> None:
        """Waits for the tasks so far."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Waits for the task that has begun; later ones do not run."""
        self._thread.shutdown(cancel_futures=True)

    def _run(self, number: int, work: Callable[..., Any], arguments: Sequence[Any], failed: Any) -> None:
        try:
            self._results[number] = work(*arguments)
        except Exception:
            _logger.exception("a task of an adapter has failed")
            self._results[number] = failed
        self._on_done()


def dtype_of(name: str, option: str | None = None) -> torch.dtype:
    """The dtype that an engine calls so; torch.uint8 where that is unknown. option: what a user has named, in place of
    the engine's dtype. ValueError: the option is unknown."""
    known = getattr(torch, _CACHE_DTYPES.get(option or name, option or name), None)
    if isinstance(known, torch.dtype):
        return known
    if option:
        raise ValueError(f"the pages' dtype is {option!r}; wanted one of torch, such as 'bfloat16', or 'fp8_e4m3'")
    return torch.uint8
