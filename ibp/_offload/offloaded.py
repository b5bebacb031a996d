"""`ibp.offload`, `ibp.Offloaded`, and the hooks that bring weights to the modules that use them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from .._common import ops
from .._common.arguments import whole_number
from .._common.closing import Closing
from .._common.conversions import guard_conversions
from .._common.graphs import cannot_record, outside_of_graphs
from .._common.in_place import NotTheModel, check_model
from .._common.locks import ForkLock
from .._common.modes import is_transformed, outside_of_modes
from .._common.process import OfThisProcess
from .._common.progress import tqdm
from .._common.statistics import Statistics, shown_memory
from .._machine import memory
from .._rows.faults import CorruptTableError
from .._rows.plan import spread_bytes
from .._rows.table import handle_on
from .._schemes import check_scheme
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import WeightCompressor
from ..nn import TableParameter
from ..nn._stacks import by_rows, stand_in
from ..nn._tables import CodedModule
from .experts import ExpertsForward
from .fetcher import CudaWeightFetcher, WeightFetcher
from .groups import Division, Group, Lookup, StackedModule, Use, divide, spread
from .resting import NotCopied, Resting
from .schedule import Schedule
from .weights import Checkpoint, Weight, put, read_checkpoint

_GROUP_BYTES = 128 << 20  # size of a group; three such groups are about one layer of a model of 7 billion weights
_LEAST_GROUPS = 16  # least number of groups of a small model, so that fetches overlap with computing
_CPU = torch.device("cpu")
_LONGEST_ELEMENT = 16  # size in bytes of an element of complex128
_LOOKAHEAD = 2  # number of groups that are fetched ahead of the one in use


def offload(
    model: nn.Module,
    device: torch.device | str | int | Sequence[torch.device | str | int] | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    resident_bytes: int | None = None,
    resident: str = "raw",
    max_sms: int | None = None,
    lookahead: int | None = None,
    group_bytes: int | None = None,
    min_bytes: int = 1 << 20,
    buffers: bool = False,
    scheme: str = "auto",
    progress: bool = False,
) -> Offloaded:
    """Keeps the weights of a model compressed in host memory and brings them to a device when a module uses them (the
    paper's sections 2.1 and 6.4).

    Every weight is compressed once, into pinned host memory of its compressed size. While one part of the model
    computes, the copy engine brings the next weights and the GPU decompresses them into a small arena, bit for bit. The
    order of use is first that of the model's modules; it is then learned from the calls. `torch.nn.Embedding` fetches
    only the rows that it looks up. In a call for few tokens, a mixture of experts of transformers fetches only the
    experts that the router chooses. All other parameters and buffers move to the device. Modules of `ibp.nn` keep their
    tables where they are: use `ibp.nn.compress` for the part of a model that stays on the GPU.

    Call the model as before. `state_dict()` returns plain tensors on the CPU. Between calls a weight has its shape,
    dtype and device, and reading its values returns a decompressed copy. A module that reads a weight that it does not
    own also gets a copy; if it does so while the model runs, its next calls fetch the weight as if it were its own. In
    transforms of `torch.func` each module decompresses its weights when it reads them, and nothing is fetched ahead.

    Offloaded weights are frozen; gradients flow through them to inputs and to other parameters. Between calls, writing
    to a weight, or to values that were read from it, raises RuntimeError: write to a `clone()`, or call `close()`
    first. A conversion of the model to another dtype or device raises RuntimeError before anything has changed.
    Functions that read a tensor's memory directly, such as `torch.tensor(weight)` and code that uses pointers, find no
    values there: pass them `weight.detach()`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).bfloat16().eval()
        >>> offloaded = ibp.offload(model, "cpu")
        >>> model(torch.ones(2, 1024, dtype=torch.bfloat16)).shape
        torch.Size([2, 1024])
        >>> offloaded.stats()
        OffloadStats(uses=2, ..., weight_bytes=4194304, ...)

    Args:
        model: a module in eval mode, or in training mode if the weights to be offloaded are frozen: parameters of a
            training module that require grad stay on the device. Weights on the meta device are read from `checkpoint`.
        device: the device on which the model computes. Several devices: the blocks of the model's outermost
            `ModuleList` are distributed over them in turn, so that the links of all devices are busy; the blocks must
            be called one after the other, and all other modules run on the first device. None: the current CUDA device
            if there is one, otherwise the CPU.
        checkpoint: a .safetensors file, a directory of such files (with or without an index), an index, a mapping, or
            pairs of names and tensors. It is read one tensor at a time, and each tensor is converted to its parameter's
            dtype, as `load_state_dict` does. Tables of a compressed checkpoint (`ibp.checkpoints.compress`) or of a
            mapping are used without decompressing them, in pinned memory for a GPU, if they have the parameter's dtype
            and the given scheme; other tables are decompressed.
        resident_bytes: number of bytes of weights, counted before compression, that stay on the device; with several
            devices, on each of them. In a mixture, the bytes that its other weights do not need hold a cache of
            compressed experts, which is divided among the stacked weights by their sizes; requested experts replace the
            least recently used. None: no weights stay.
        resident: "raw", the only value: weights that stay on the device are not compressed.
        max_sms: keep at most this many of the GPU's multiprocessors busy with decompression. None: 32.
        lookahead: number of groups of weights that are fetched ahead. None: 2 on a GPU; 0 on the CPU, where nothing
            runs beside the model.
        group_bytes: a module with at most this many bytes of weights is fetched as a whole, a larger one in parts.
            None: 128 MiB, or less for small models.
        min_bytes: smaller parameters stay on the device.
        buffers: whether to offload large buffers, too, such as the packed weights of quantised layers. The model must
            not write to them.
        scheme: as in `ibp.compress`.
        progress: whether to show a progress bar.

    Returns:
        `ibp.Offloaded`: an object with statistics and with `close()`, which restores the model's weights.

    Raises:
        TypeError: model is not a module, or another argument has the wrong type.
        ValueError: an argument is out of range; the model is offloaded already, or has nothing to offload; names or
            shapes of the checkpoint differ from the model's.
        RuntimeError: a weight is on the meta device and no checkpoint is given; memory cannot be pinned.
        torch.OutOfMemoryError: the device does not have enough memory. After this and every other error the model is
            unchanged, except that a checkpoint may have filled tensors of the meta device.
    """
    check_model(model)
    if any(isinstance(tensor, Resting) for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("the model, or a part of it, is offloaded already: close() that first")
    if resident != "raw":
        raise ValueError(
            f"resident is {resident!r}; wanted 'raw': for coded weights that stay on the GPU use ibp.nn.compress(model)"
        )
    check_scheme(scheme)
    devices = _devices(device)
    if lookahead is None:
        lookahead = _LOOKAHEAD if devices[0].type == "cuda" else 0
    whole_number("lookahead", lookahead, 0)
    if max_sms is not None:
        whole_number("max_sms", max_sms, 1)
    resident_bytes = whole_number("resident_bytes", 0 if resident_bytes is None else resident_bytes, 0)
    min_bytes = whole_number("min_bytes", min_bytes, 0)
    if group_bytes is None:
        plain = (tensor for tensor in model.parameters() if not isinstance(tensor, TableParameter))
        total = sum(tensor.numel() * tensor.element_size() for tensor in plain)
        group_bytes = max(1, min(_GROUP_BYTES, total // _LEAST_GROUPS))
    division = divide(
        model,
        min_bytes=min_bytes,
        group_bytes=whole_number("group_bytes", group_bytes, 1),
        num_devices=len(devices),
        buffers=buffers,
    )
    if not division.weights:
        raise ValueError(
            f"the model has no frozen weight of at least {min_bytes:,} bytes to offload: call model.eval() or "
            "model.requires_grad_(False), or lower min_bytes"
        )
    offloaded = Offloaded(model, division, devices, max_sms, lookahead)
    try:
        with outside_of_modes(), torch.no_grad():
            offloaded._fill(checkpoint, resident_bytes, scheme, progress)
    except BaseException:
        offloaded.close()
        raise
    return offloaded


def _devices(device: Any) -> list[torch.device]:
    if device is None:
        device = "cuda" if ops.cuda_is_available() else "cpu"
    several = device if isinstance(device, (list, tuple)) else [device]
    if not several:
        raise ValueError("device is an empty list; wanted at least one device")
    devices = [memory.canonical(one) for one in several]
    if len({one.type for one in devices}) > 1:
        raise ValueError(f"device is {[str(one) for one in devices]}; wanted CUDA devices, or the CPU")
    return devices


@dataclass(frozen=True)
class OffloadStats(Statistics):
    """Counts of an offloaded model since it was made, or since the last `reset_stats`.

    Attributes:
        uses: number of times that a module used a group of weights.
        misses: number of uses whose weights were not being fetched when the use began: first uses, and uses after a
            change of order.
        fetched_bytes: number of bytes of weights that were brought to the device, counted as the model uses them.
        link_bytes: number of bytes of their compressed rows that crossed the link from host memory.
        seconds: time in seconds from the first use to the last one, by the host's clock.
        waited_seconds: time in seconds that modules waited for their weights, by the GPU's clock and without the last
            use of each group; on the CPU, the time of decompression. It is close to `seconds` if the link is the
            bottleneck.
        weight_bytes: size in bytes of all offloaded weights, uncompressed.
        host_bytes: size in bytes of the offloaded weights in host memory, including index and codebooks.
        device_bytes: size in bytes of the device memory for offloaded weights: weights that stay, the arena, the ring,
            the index, and caches of experts.
        expert_hits, expert_misses: numbers of requested rows of experts that were found in the cache, and that were
            fetched. Calls that fetch all experts are not counted.
    """

    uses: int
    misses: int
    fetched_bytes: int
    link_bytes: int
    seconds: float
    waited_seconds: float
    weight_bytes: int
    host_bytes: int
    device_bytes: int
    expert_hits: int
    expert_misses: int

    @property
    def nbytes(self) -> int:
        """Size in bytes of all memory that the offloaded weights take, on the host and on devices."""
        return self.host_bytes + self.device_bytes

    @property
    def gb_per_s(self) -> float:
        """Rate in GB/s at which weights were brought to the device, counted before compression; 0 before there are two
        uses."""
        return self.fetched_bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def expert_hit_rate(self) -> float:
        """Fraction of the requested rows of experts that were found in the cache; 0 if no experts were requested."""
        asked = self.expert_hits + self.expert_misses
        return self.expert_hits / asked if asked else 0.0


class _CallHook(NotCopied):
    """A pair of hooks that call `start` before and `end` after each call of a module. torch.compile does not trace
    these functions."""

    def __init__(self, start: Callable[[], None], end: Callable[[], None]) -> None:
        self._start, self._end = start, end

    def before(self, module: nn.Module, args: tuple) -> None:
        self._start()

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._end()


def _refuse_script() -> NoReturn:
    """Raises an error. torch.jit.script calls this function of a module before it compiles the module and its hooks."""
    raise cannot_record("torch.jit.script")


class _MoveHook(NotCopied):
    """A hook that moves a module's arguments to the module's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return self._moved(args), self._moved(kwargs)

    def _moved(self, value: Any) -> Any:
        """Returns a value with its tensors moved to the device, including tensors in lists, tuples and dicts. A cache
        of transformers is returned as it is, because its layers stay on the devices that fill them."""
        if isinstance(value, torch.Tensor):
            return value.to(self._device, non_blocking=True)
        if type(value) in (tuple, list):
            return type(value)(map(self._moved, value))
        if type(value) is dict:
            return {key: self._moved(held) for key, held in value.items()}
        return value


class _StateHook(NotCopied):
    """Hooks that put a module's weights into its state_dict, and that refuse to load other weights."""

    def __init__(self, holds: list[tuple[str, Weight]]) -> None:
        self._holds = holds

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for _, weight in self._holds:
            weight.wake()  # so that torch lists the tensor without decoding it

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for attribute, weight in self._holds:
            if weight.group is None or not weight.group.uses:
                weight.rest()
            if prefix + attribute in state and weight.table is not None and weight.is_held(module, attribute):
                state[prefix + attribute] = weight.saved.of(state, functools.partial(weight.value, "cpu"))

    def before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for attribute, weight in self._holds:
            if prefix + attribute in state and weight.table is not None and weight.is_held(module, attribute):
                raise RuntimeError(f"{prefix}{attribute} is offloaded and cannot be loaded: close() first")


class _RowsForward(NotCopied):
    """The forward of a module that looks up rows: the module's own, with a table instead of the weight."""

    def __init__(self, lookup: Lookup, look_up: Callable[..., Any]) -> None:
        self._lookup, self._look_up = lookup, look_up

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._look_up(self, *args, **kwargs)

    def look_up(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._lookup.module
        if is_transformed():  # `vmap` may have batched the ids, which a table cannot look up
            return type(module).forward(module, *args, **kwargs)
        table = {self._lookup.attribute: self._lookup.weight.table}
        return type(module).forward(stand_in(module, table, type(module)), *args, **kwargs)


@dataclass(frozen=True)
class _Call:
    """A call of a module that has begun and not ended."""

    use: Use  # the module and its groups when the call began
    groups: list[Group]  # groups that the call uses
    saving: Any  # the result of `_saving`


@dataclass(frozen=True)
class _SavedWeight:
    """The description of a part of a weight that autograd saves for backward instead of its memory; the weight is
    decoded again there."""

    weight: Weight
    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements

    def tensor(self) -> torch.Tensor:
        return self.weight.data(self.device).view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Offloaded(OfThisProcess, Closing, NotTheModel):
    """A model whose weights are offloaded, as `ibp.offload` returns it. As a context manager it calls `close` at the
    end.

    Several threads may call the model at the same time; weights that are in use are never overwritten.

    Example:
        >>> model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16).eval()
        >>> with ibp.offload(model, "cpu") as offloaded:
        ...     y = model(torch.ones(2, 1024, dtype=torch.bfloat16))
        ...     offloaded.stats().weight_bytes
        2097152
        >>> torch.equal(model(torch.ones(2, 1024, dtype=torch.bfloat16)), y)  # with its own weights
        True
    """

    _instead = "save the model's state_dict()"
    changed_by = "ibp.offload(model)"

    def __init__(
        self, model: nn.Module, division: Division, devices: list[torch.device], max_sms: int | None, lookahead: int
    ) -> None:
        self._model, self._division, self._devices = model, division, devices
        self._max_sms, self._lookahead = max_sms, lookahead
        self._lock, self._thread = ForkLock(), threading.local()
        self._fetchers: list[WeightFetcher] = []
        self._groups: list[Group] = []  # groups that are fetched for their uses
        self._schedule: Schedule[Group] = Schedule([])
        self._undo: list[Callable[[], object]] = []
        self._uses_of: dict[nn.Module, Use] = {}
        self._parents = {child: module for module in model.modules() for child in module.children()}
        self._users: dict[Weight, nn.Module] = {}  # modules that read weights which are not their own
        self._kept: list[Weight] = []  # weights that stay on a device as they are
        self._experts: list[ExpertsForward] = []  # mixtures whose experts are fetched as the router chooses them
        self._of_experts: set[Group] = set()
        self._uses_all_experts = False  # whether the last call of a mixture used all of its experts
        self._is_removed = False
        self._is_short = False  # whether the arena had no room for an expected group; the end of a use makes room
        self.reset_stats()

    def __repr__(self) -> str:
        if self._is_removed:
            return f"ibp.Offloaded({type(self._model).__name__}, closed)"
        stats = self.stats()
        where = ", ".join(map(str, self._devices))
        return (
            f"ibp.Offloaded({type(self._model).__name__}, {len(self._division.weights)} weights in "
            f"{len(self._division.groups)} groups, {shown_memory(stats.nbytes, stats.weight_bytes)}, "
            f"host_bytes={stats.host_bytes:,}, device_bytes={stats.device_bytes:,}, on {where})"
        )

    # ---- what the user asks ----

    def stats(self) -> OffloadStats:
        """Returns the counts of the offloaded model, and the memory that its weights take. Waits for the device if the
        model has a mixture of experts."""
        with self._lock:
            counts = [experts.counts() for experts in self._experts]
            hits, misses, missed_bytes, link_bytes = (sum(part) for part in zip((0, 0, 0, 0), *counts))
            tables = [weight.table for weight in self._division.weights if weight.table is not None]
            uses_gpu = any(device.type == "cuda" for device in self._devices)
            device_bytes = sum(fetcher.device_bytes for fetcher in self._fetchers)
            device_bytes += sum(weight.num_bytes for weight in self._kept)
            device_bytes += sum(experts.device_bytes for experts in self._experts)
            device_bytes += sum(table.index_bytes for table in tables) if uses_gpu else 0
            return OffloadStats(
                self._uses,
                self._misses,
                self._fetched_bytes + missed_bytes,
                self._link_bytes + link_bytes,
                self._last_use - self._first_use if self._first_use is not None else 0.0,
                sum(fetcher.waited_s for fetcher in self._fetchers),
                sum(weight.num_bytes for weight in self._division.weights),
                sum(table.nbytes for table in tables),
                device_bytes,
                hits,
                misses,
            )

    def reset_stats(self) -> None:
        """Sets the counts of uses, bytes and seconds to 0."""
        self._uses = self._misses = self._fetched_bytes = self._link_bytes = 0
        self._first_use: float | None = None
        self._last_use = 0.0
        for fetcher in self._fetchers:
            fetcher.waited_s = 0.0
        for experts in self._experts:
            experts.reset_counts()

    def close(self) -> None:
        """Restores the model's weights as plain tensors on their original devices, and removes all hooks. A second call
        does nothing.

        Weights are decompressed one at a time, and the compressed rows of each are freed. If memory runs out, the
        weights that are not yet decompressed stay offloaded, and `close` can be called again.

        Raises:
            RuntimeError: the method was called within a call of the model.
        """
        with self._lock, outside_of_modes():
            if self._is_removed:
                return
            if not _is_within([call.use.module for call in self._calls()]):
                self._abandon()
            if any(group.uses for group in self._groups):
                raise RuntimeError("the model is in use: close() between its calls")
            for fetcher in self._fetchers:
                fetcher.synchronize()
            for group in self._groups:
                self._fetchers[group.device_number].drop(group)
            for weight in self._division.weights:
                if weight.table is not None:
                    weight.bind(weight.value(weight.home))
                    weight.table = None
                weight.release()
            for weight in self._kept:
                weight.bind(weight.tensors[0].data.to(weight.home))
            for other in self._division.others:
                if not other.tensor.is_meta:  # otherwise the checkpoint has not filled it
                    other.tensor.data = other.tensor.data.to(other.home)
            for weight in self._division.weights:
                for tensor, requires_grad in zip(weight.tensors, weight.requires_grad):
                    tensor.requires_grad_(requires_grad)
            while self._undo:
                self._undo.pop()()
            for fetcher in self._fetchers:
                fetcher.close()
            self._fetchers, self._groups, self._experts, self._is_removed = [], [], [], True

    # ---- set-up ----

    def _fill(self, checkpoint: Checkpoint | None, resident_bytes: int, scheme: str, progress: bool) -> None:
        division, devices = self._division, self._devices
        resident, cache_bytes = self._residents(resident_bytes)
        kept = {weight for group in resident for weight in group.weights}
        groups = [group for group in division.groups if group not in resident]
        fetchers: list[WeightFetcher] = []
        for number, device in enumerate(devices):
            mine = [group.num_bytes for group in groups if group.device_number == number]
            make = CudaWeightFetcher if device.type == "cuda" else WeightFetcher
            arena_bytes = division.nested_bytes.get(number, 0) + _most_at_once(mine, self._lookahead + 1)
            fetchers.append(make(device, arena_bytes, self._max_sms))
        self._fetchers, self._groups, self._schedule = fetchers, groups, Schedule(groups)
        compressor = WeightCompressor({"scheme": scheme})
        looked_up = {lookup.weight for lookup in division.lookups}
        stacked = {weight for experts in division.experts for weight in experts.stacks.values()}
        ones = {device: torch.full((_LONGEST_ELEMENT,), 0xFF, dtype=torch.uint8, device=device) for device in devices}

        def store(weight: Weight, x: torch.Tensor | CompressedTensor) -> None:
            group, first_holder = weight.group, weight.holders[0][0]
            device = devices[division.device_numbers[first_holder] if group is None else group.device_number]
            if isinstance(x, CompressedTensor) and (
                weight in kept or not weight.fits(x, scheme, by_rows=weight in looked_up or weight in stacked)
            ):
                x = x.decompress(device=_CPU).to(weight.dtype)
            if isinstance(x, CompressedTensor):
                weight.table = x.to(_CPU)
                if device.type == "cuda":
                    memory.pin_if_possible(weight.table)
            elif weight in kept:
                weight.bind(x.to(device, copy=checkpoint is not None))
                self._kept.append(weight)
            else:
                stored = x.to(_CPU).permute(weight.order)
                row_bytes: dict[str, Any] = {}
                if weight in looked_up:
                    row_bytes = {"row_bytes": None}  # rows of the weight, which are fetched one by one
                elif weight in stacked:
                    row_bytes = {"row_bytes": weight.stacked_row_bytes}
                weight.table = compressor.compress(weight.name, stored, device=device, **row_bytes)
            if weight in stacked and weight.table is not None:
                weight.table = by_rows(weight.table)
            weight.freeze()
            if weight.table is not None:
                if device.type == "cpu" or weight.table._serves(device):
                    handle_on(weight.table, device)  # copies the index to the device now instead of at the first use
                blank = ones[device].view(weight.dtype)[0].expand(weight.shape)
                weight.prepare(blank, self._read)

        total = sum(weight.num_bytes for weight in division.weights)
        with tqdm(total=total, desc="offload", unit="B", unit_scale=True, disable=not progress) as bar:
            for weight, x in self._sources(checkpoint):
                store(weight, x)
                bar.update(weight.num_bytes)
        for group in self._groups:
            tables = [weight.table for weight in group.weights if weight.table is not None]
            group.stored_bytes = sum(spread_bytes(table) for table in tables)
        for other in division.others:
            other.tensor.data = other.tensor.data.to(devices[other.device_number])
        self._install(cache_bytes)
        for number, fetcher in enumerate(self._fetchers):
            fetcher.start([group for group in self._groups if group.device_number == number])
        self._fetch_ahead()

    def _residents(self, num_bytes: int) -> tuple[list[Group], list[int]]:
        """Returns (the groups that stay on their devices, the number of bytes that they leave of each device's
        num_bytes). Experts stay only on a device on which all weights stay."""
        self._of_experts = {experts.group for experts in self._division.experts}
        chosen: list[Group] = []
        left: list[int] = []
        for number in range(len(self._devices)):
            mine = [group for group in self._division.groups if group.device_number == number]
            if sum(group.num_bytes for group in mine) > num_bytes:
                mine = [group for group in mine if group not in self._of_experts]
            staying = spread(mine, num_bytes)
            chosen += staying
            left.append(num_bytes - sum(group.num_bytes for group in staying))
        return chosen, left

    def _sources(self, checkpoint: Checkpoint | None) -> Iterable[tuple[Weight, torch.Tensor | CompressedTensor]]:
        """Yields each weight with its values, from the model or from the checkpoint. The checkpoint also fills the
        tensors that are not offloaded."""
        weights = self._division.weights
        if checkpoint is None:
            for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
                if tensor.is_meta:
                    raise RuntimeError(f"{name} is on the meta device: give its values as checkpoint=")
            for weight in weights:
                yield weight, weight.tensors[0].data
            return
        by_name: dict[str, Weight] = {name: weight for weight in weights for name in weight.names}
        others = {name: other.tensor for other in self._division.others for name in other.names}
        seen: set[int] = set()
        for name, x in read_checkpoint(checkpoint):
            target = by_name.get(name, others.get(name))
            if target is None:
                raise ValueError(f"the checkpoint has {name!r}, which the model has not")
            if x.shape != target.shape:
                raise ValueError(f"{name} has shape {list(x.shape)} in the checkpoint; wanted {list(target.shape)}")
            if id(target) in seen:
                continue
            seen.add(id(target))
            if isinstance(target, Weight):
                yield target, x if isinstance(x, CompressedTensor) else x.to(target.dtype)
            else:
                values = x.decompress() if isinstance(x, CompressedTensor) else x
                put(target, values.to(target.dtype, copy=True))
        missing = [weight.name for weight in weights if id(weight) not in seen]
        missing += [name for name, tensor in others.items() if id(tensor) not in seen]
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} of the model's tensors, the first {missing[0]!r}")
        for name, buffer in self._model.named_buffers():
            if buffer.is_meta:
                raise RuntimeError(
                    f"buffer {name} is on the meta device and no checkpoint holds it: make the model with its buffers, "
                    "for example under accelerate.init_empty_weights()"
                )

    def _install(self, cache_bytes: Sequence[int]) -> None:
        """Installs hooks and forwards. cache_bytes: for each device, size in bytes of the caches of experts."""
        streamed = set(self._groups)
        for use in self._division.uses:
            use.groups = [group for group in use.groups if group in streamed]
            if use.groups:
                self._install_use(use)
        look_up = outside_of_graphs(_RowsForward.look_up)
        for lookup in self._division.lookups:
            if lookup.weight.table is not None:
                lookup.module.forward = _RowsForward(lookup, look_up)
                self._undo.append(functools.partial(vars(lookup.module).pop, "forward"))
        experts = [one for one in self._division.experts if one.group in streamed]
        totals = [0] * len(self._devices)
        for one in experts:
            totals[one.group.device_number] += one.group.num_bytes
        for one in experts:
            number, num_bytes = one.group.device_number, sum(weight.num_bytes for weight in one.stacks.values())
            self._install_experts(one, cache_bytes[number] * num_bytes // totals[number])
        self._hook_calls(self._model, self._start, self._stop)
        if len(self._devices) > 1:
            self._install_moves()
        holds: dict[nn.Module, list[tuple[str, Weight]]] = {}
        for weight in self._division.weights:
            if weight.table is not None:
                for module, attribute in weight.holders:
                    holds.setdefault(module, []).append((attribute, weight))
        for module, held in holds.items():
            state = _StateHook(held)
            self._hook(module.register_state_dict_pre_hook(state.before_save))
            self._hook(module.register_state_dict_post_hook(state))
            self._hook(module.register_load_state_dict_pre_hook(state.before_load))
        guard_conversions(self._model)
        self._undo.append(functools.partial(guard_conversions, self._model))

    def _install_use(self, use: Use) -> None:
        self._uses_of[use.module] = use
        self._hook_calls(use.module, lambda: self._enter(use), lambda: self._leave(use))

    def _install_experts(self, experts: StackedModule, cache_bytes: int) -> None:
        use = Use(experts.module, [experts.group])
        device = self._devices[experts.group.device_number]
        forward = ExpertsForward(
            experts, device, cache_bytes, lambda: self._using_all(use), lambda: self._note_choice(experts.group)
        )
        self._experts.append(forward)
        experts.module.forward = forward
        self._undo.append(functools.partial(vars(experts.module).pop, "forward"))

    def _hook_calls(self, module: nn.Module, start: Callable[[], None], end: Callable[[], None]) -> None:
        hook = _CallHook(outside_of_graphs(start), outside_of_graphs(end))
        self._hook(module.register_forward_pre_hook(hook.before, prepend=True))
        self._hook(module.register_forward_hook(hook.after, always_call=True))
        vars(module)["__prepare_scriptable__"] = _refuse_script
        self._undo.append(functools.partial(vars(module).pop, "__prepare_scriptable__", None))

    def _install_moves(self) -> None:
        numbers, blocks = self._division.device_numbers, self._division.blocks
        within = {part for block in blocks for part in block.modules()}
        outside = [module for module in numbers if module not in within]
        others = [
            module
            for module in outside
            if any(True for _ in module.parameters(recurse=False)) or isinstance(module, CodedModule)
        ]
        for module in [*blocks, *others]:
            move = _MoveHook(self._devices[numbers[module]])
            self._hook(module.register_forward_pre_hook(move.before, prepend=True, with_kwargs=True))

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    # ---- while the model runs ----

    def _enter(self, use: Use) -> None:
        """Fetches and binds a module's groups. If it raises, it leaves no group in use that was not in use before.

        In a transform of torch.func the module computes with its resting weights, each of which is decoded when it is
        read: after the call other weights use the memory, and these transforms do not support
        autograd's saved-tensor hooks."""
        with self._lock:
            if is_transformed():
                self._calls().append(_Call(use, [], None))
                return
            with outside_of_modes():
                begun = self._bring(use)
            self._calls().append(_Call(use, begun, self._saving()))
            self._fetch_ahead()

    def _bring(self, use: Use) -> list[Group]:
        """Begins a use of each of a module's groups and binds their weights. Returns the groups."""
        begun: list[Group] = []
        try:
            for group in use.groups:
                self._begin(group)
                begun.append(group)
        except BaseException:
            for group in begun:
                group.uses -= 1
            raise
        for group in begun:
            for weight, value in zip(group.weights, self._fetchers[group.device_number].place_of(group).values):
                weight.bind(value)
        return begun

    def _begin(self, group: Group) -> None:
        fetcher = self._fetchers[group.device_number]
        fetcher.check_use(group)
        if not group.is_loaded:
            self._misses += 1
            fetcher.fetch_now(group)
            self._count(group)
        fetcher.begin_use(group)
        group.is_ahead = False
        group.uses += 1
        self._note_use(group)

    def _note_use(self, group: Group) -> None:
        self._schedule.saw(group)
        self._uses += 1
        self._last_use = time.perf_counter()
        if self._first_use is None:
            self._first_use = self._last_use

    @contextlib.contextmanager
    def _using_all(self, use: Use) -> Iterator[None]:
        """A context for a call of a mixture that uses all experts. The next calls are expected to use all experts,
        too."""
        with self._lock:
            self._uses_all_experts = True
            self._enter(use)
        try:
            yield
        finally:
            self._leave(use)

    def _note_choice(self, group: Group) -> None:
        """Records a call of a mixture that uses some experts. All experts are then no longer fetched ahead."""
        with self._lock:
            self._uses_all_experts = False
            self._note_use(group)

    def _leave(self, use: Use) -> None:
        with self._lock:
            calls = self._calls()
            if calls and calls[-1].use is use:  # otherwise the call failed to begin
                self._end(calls.pop())
                if self._is_short:
                    self._fetch_ahead()

    @outside_of_modes()
    def _end(self, call: _Call) -> None:
        if call.saving is not None:
            call.saving.__exit__()
        for group in call.groups:
            group.uses -= 1
            self._fetchers[group.device_number].end_use(group)
            if group.uses == 0:
                for weight in group.weights:
                    weight.rest()
        self._last_use = time.perf_counter()

    def _start(self) -> None:
        """Prepares for a call of the whole model. Such calls do not nest, so uses that this thread has not ended were
        interrupted; they are ended here."""
        self._abandon()
        self._thread.is_running = True

    def _stop(self) -> None:
        self._thread.is_running = False

    def _abandon(self) -> None:
        """Ends the uses that this thread has begun and not ended. There are such uses after a KeyboardInterrupt,
        because torch then runs no hooks."""
        with self._lock:
            calls = self._calls()
            while calls:
                self._end(calls.pop())

    def _calls(self) -> list[_Call]:
        """Returns the calls that this thread is in, the innermost last."""
        if not hasattr(self._thread, "calls"):
            self._thread.calls = []
        return self._thread.calls

    def _read(self, weight: Weight) -> torch.Tensor:
        """Returns the values of a weight that is read between uses, in newly allocated memory. While the model runs,
        the reader is assumed to be the parent of the module that was last known to use the weight; the next calls of
        that parent fetch the weight."""
        assert weight.blank is not None
        with self._lock:
            user, group = self._parents.get(self._users.get(weight, weight.holders[0][0])), weight.group
            is_running = getattr(self._thread, "is_running", False) and not is_transformed()
            if is_running and user not in (None, self._model) and group is not None and group in self._groups:
                self._users[weight] = user
                use = self._uses_of.get(user)
                if use is None:
                    use = Use(user)
                    self._install_use(use)
                if group not in use.groups:
                    use.groups = [*use.groups, group]
        return weight.value(weight.blank.device)

    @outside_of_modes()
    def _fetch_ahead(self) -> None:
        """Fetches ahead, for each device, the next groups that are expected to be used there, as long as there is
        room."""
        left, expected = [self._lookahead] * len(self._fetchers), []
        for group in itertools.islice(self._schedule.coming(), len(self._groups)):
            if not any(left):
                break
            if group in self._of_experts and not self._uses_all_experts:
                continue
            if left[group.device_number] and not group.uses and group not in expected:
                left[group.device_number] -= 1
                expected.append(group)
        for fetcher in self._fetchers:
            fetcher.expect(expected)
        full: set[int] = set()
        self._is_short = False
        for group in expected:
            if group.is_loaded:
                group.is_ahead = True
            elif group.device_number not in full:
                if self._fetched_ahead(group):
                    self._count(group)
                else:
                    self._is_short = True
                    full.add(group.device_number)  # later groups must not take the room that this group waits for

    def _fetched_ahead(self, group: Group) -> bool:
        try:
            return self._fetchers[group.device_number].fetch_ahead(group)
        except CorruptTableError:  # the use that needs the group will raise it
            return False

    def _count(self, group: Group) -> None:
        self._fetched_bytes += group.num_bytes
        self._link_bytes += group.stored_bytes

    # ---- autograd ----

    def _saving(self) -> Any:
        """Makes autograd save descriptions of weights instead of their memory, which other weights will overwrite.
        Returns the hooks, or None if autograd saves nothing."""
        if not torch.is_grad_enabled():
            return None
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        return hooks

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedWeight:
        with self._lock:
            for fetcher in self._fetchers:
                found = fetcher.find(tensor) if fetcher.device == tensor.device else None
                if found is not None:
                    weight, start = found
                    return _SavedWeight(
                        weight, tensor.device, tensor.dtype, tensor.size(), tensor.stride(), start // tensor.itemsize
                    )
        return tensor


def _is_within(modules: Sequence[nn.Module]) -> bool:
    """Returns whether a method of one of the modules is on the call stack."""
    frame = sys._getframe() if modules else None
    while frame is not None:
        if any(frame.f_locals.get("self") is module for module in modules):
            return True
        frame = frame.f_back
    return False


def _unpack(saved: torch.Tensor | _SavedWeight) -> torch.Tensor:
    return saved.tensor() if isinstance(saved, _SavedWeight) else saved


def _most_at_once(sizes: Sequence[int], number: int) -> int:
    """Returns the size in bytes of the largest run of `number` consecutive groups; the first group follows the last."""
    number = min(number, len(sizes))
    return max((sum([*sizes, *sizes][first : first + number]) for first in range(len(sizes))), default=0)
