"""Code that the adapters of several frameworks share.

Five parts follow each other: packages whose modules are imported when they are first used (`lazily`); releases of
frameworks that adapters work with; serving engines such as vLLM (options of pools, tasks on threads, names of dtypes);
feature stores of graphs (tables of users' data, and rows of tables on a device); and the quantizers of transformers and
diffusers (the configuration, and what device maps put elsewhere).
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch

import ibp

from ..adapters import ModelLoading, ModelOptions
from ..nn import Conv1D, Embedding, EmbeddingBag, Experts, Linear, ModelReport

# (the engine's name, the first and the last release in tests/integrations/interfaces) for each package.
TRIED = {
    "vllm": ("vLLM", "0.26.0", "0.33.0"),
    "sglang": ("SGLang", "0.5.10.post1", "0.5.23"),
    "lmcache": ("LMCache", "0.5.4", "0.5.6"),
}
_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}
_CACHE_DTYPES["auto"] = "bfloat16"  # means the model's dtype, which vLLM does not say here; it is usually BF16
TABLES = (ibp.CompressedTensor, ibp.RowCache)  # classes from which rows are fetched
Table = ibp.CompressedTensor | ibp.RowCache
METHOD = "ibp"  # frameworks find the quantizer by this value of quant_method in the quantization_config of config.json

_logger = logging.getLogger(__name__)


# ---- packages ----


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns a function `__getattr__` for a package, which imports the package's modules lazily. A module is imported
    when the module or one of its names is first read from the package. So users need only the parts of a framework that
    the modules they use import.

    modules: for each module, those of its names that can also be read from the package.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

    return __getattr__


# ---- releases ----


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


# ---- serving engines ----


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


# ---- features of graphs ----


def table_of(value: Any, what: str, options: dict[str, Any]) -> Table:
    """Returns `value` itself if it is a table or a cache of a table. If it is a tensor or an array, compresses it with
    the given options of `ibp.compress`, and returns the table. what: the name of the value in error messages.

    Raises:
        TypeError: value is not a tensor, an array, a table or a cache, or has a dtype that tables cannot hold.
        ValueError: options are given with a table, or are wrong.
    """
    if isinstance(value, TABLES):
        if options:
            raise ValueError(f"{what} is a table already, but options are given: {', '.join(options)}")
        return value
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{what} is a {type(value).__name__}; wanted a torch.Tensor, a numpy array, an ibp.CompressedTensor or an "
            "ibp.RowCache"
        )
    return ibp.compress(value, **options)


def check_rows(table: Table, num_rows: int, what: str, of: str) -> None:
    """Raises ValueError unless the table has num_rows rows. what: the name of the table in error messages. of: "nodes"
    or "edges"."""
    if table.dim() == 0 or len(table) != num_rows:
        raise ValueError(f"{what} has shape {list(table.shape)}; wanted {num_rows:,} rows, one for each of the {of}")


def fetch(table: Table, ids: torch.Tensor, device: torch.device | None, what: str) -> torch.Tensor:
    """Returns the rows of a table at `ids`, on `device`, or on the device of `ids` if `device` is None. what: the name
    of the table in error messages.

    Raises:
        IndexError: an id on the CPU is out of range (for ids on a GPU see `ibp.index_select`).
        RuntimeError: this is a worker process of a data loader, and a GPU would have to fetch the rows.
    """
    refuse_cuda_in_worker(table, device, what)
    try:
        return table.index_select(ids, device=device)
    except IndexError as error:
        raise IndexError(f"{what}: {error}") from None


def refuse_cuda_in_worker(table: Table, device: torch.device | None, what: str) -> None:
    """Raises RuntimeError if this is a worker process of a data loader and a GPU would be needed. A forked process
    cannot use CUDA if its parent has used it, and rows on a GPU cannot be queued to the main process."""
    needs_cuda = table.is_cuda or (device is not None and device.type == "cuda")
    if needs_cuda and torch.utils.data.get_worker_info() is not None:
        where = device if device is not None else table.device
        raise RuntimeError(
            f"{what} cannot be fetched to {where} in a worker process of a data loader: fetch it in the main process "
            "(PyG: filter_per_worker=False; DGL: prefetch_node_feats of the sampler), or to the CPU from a table there"
        )


# ---- quantizers ----


class CodingFields(ModelOptions):
    """The fields of a configuration: those of `ibp.adapters.ModelOptions`, and quant_method."""

    def __init__(self, *, quant_method: str = METHOD, **options: Any) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; wanted {METHOD!r}")
        self.quant_method = quant_method
        super().__init__(**options)


def holds_table(module: torch.nn.Module) -> bool:
    """Returns whether `module` is a module of `ibp.nn`, whose weights are tables."""
    return isinstance(module, (Conv1D, Embedding, EmbeddingBag, Experts, Linear))


def away_of(device_map: object) -> dict[str, str]:
    """Returns the entries of a device map whose part of the model is on "cpu" or "disk" and would have to be moved to a
    GPU for each use. If all parts are on "cpu", the CPU computes, and the result is empty."""
    places = {key: str(place) for key, place in device_map.items()} if isinstance(device_map, Mapping) else {}
    names = {"disk"} if set(places.values()) == {"cpu"} else {"cpu", "disk"}
    return {key: place for key, place in places.items() if place in names}


class CodingQuantizer:
    """The base class of the quantizers of both frameworks. In the list of bases, it must come before the framework's
    class. `report` is the report of the model that was loaded last. `_loading` is set while a model is loaded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.report: ModelReport | None = None
        self._loading: ModelLoading | None = None

    def _codes(self, name: str) -> bool:
        """Returns whether a parameter is coded when it is loaded."""
        return self._loading is not None and self._loading.codes(name)

    @property
    def is_trainable(self) -> bool:
        """True, because gradients pass through coded weights to adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True
