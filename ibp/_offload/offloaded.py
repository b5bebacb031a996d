"""`ibp.offload`, and what it returns: the hooks that bring weights to the modules that use them."""

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

_GROUP_BYTES = 128 << 20  # of weights fetched together: three such groups are about a layer of 7 billion weights
_LEAST_GROUPS = 16  # groups of a small model, so that fetching one and using another overlap
_CPU = torch.device("cpu")
_LONGEST_ELEMENT = 16  # bytes, of complex128
_LOOKAHEAD = 2  # groups fetched ahead of the one in use


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
    computes, the copy engine brings the next weights and the GPU decodes them into a small arena: the same bits as
    before. The order of use is taken from the model at first and then learned, call by call. `torch.nn.Embedding`
    fetches only the rows that it looks up, and a mixture of experts of transformers only the experts that the router
    asks for, where a call has few tokens. All other parameters and buffers move to the device. Modules of `ibp.nn`
    keep their tables where they are: `ibp.nn.compress` codes the part of a model that stays on the GPU.

    The model is used as before, by calling it. `state_dict()` gives plain tensors on the CPU. Between calls a weight
    has its shape, dtype and device. A user who asks for its values gets a decoded copy, and so does a module that does
    not own it; if such a module asks while the model runs, the weight is brought to it from the next call on. In
    transforms of `torch.func` each module decodes its weights where it reads them, and nothing is fetched ahead.

    Offloaded weights are frozen; gradients flow through them to inputs and to other parameters. Between calls, whatever
    would write to a weight, or to values that were read from it, raises RuntimeError: write to a `clone()`, or call
    `close()` first. A conversion of the model to another dtype or device raises it before anything has changed.
    Functions that take a tensor's memory without asking torch, such as `torch.tensor(weight)` and pointers, find no
    values there: pass them `weight.detach()`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).bfloat16().eval()
        >>> offloaded = ibp.offload(model, "cpu")
        >>> model(torch.ones(2, 1024, dtype=torch.bfloat16)).shape
        torch.Size([2, 1024])
        >>> offloaded.stats()
        OffloadStats(uses=2, ..., weight_bytes=4194304, ...)

    Args:
        model: in eval mode, or in training mode with the weights to be offloaded frozen: parameters that require grad
            then stay on the device. Weights on the meta device are taken from `checkpoint`.
        device: where the model computes. Several: the blocks of the model's outermost `ModuleList` take turns, so that
            every device's link is busy; blocks must follow each other, and all other modules run on the first device.
            None: the current CUDA device if there is one, else the CPU.
        checkpoint: a .safetensors file, a directory of them (with or without an index), an index, a mapping, or pairs
            of names and tensors: read one tensor at a time, each converted to its parameter's dtype as
            `load_state_dict` does. Tables, of a compressed checkpoint (`ibp.checkpoints.compress`) or in a mapping,
            become the weights' own as they are, pinned for a GPU, if they have the parameter's dtype and the scheme
            that is asked for; else they are decoded.
        resident_bytes: bytes of weights, counted before compression, that stay on the device; with several devices, on
            each. What a mixture's other weights leave of them is memory for a cache of coded experts, divided by the
            sizes of the stacked weights; experts that are asked for replace those used longest ago. None: no weights
            stay.
        resident: "raw", the only value: weights that stay on the device stay as they are.
        max_sms: keep at most this many of the GPU's multiprocessors busy with decoding. None: 32.
        lookahead: groups of weights that are fetched before they are used. None: 2 on a GPU; none on the CPU, where
            nothing runs beside the model.
        group_bytes: a module with at most this many bytes of weights is brought as one, a larger one in parts. None:
            128 MiB, less for small models.
        min_bytes: smaller parameters stay on the device.
        buffers: offload large buffers too: the packed weights of quantised layers. They must not be written to.
        scheme: as in `ibp.compress`.
        progress: show a progress bar.

    Returns:
        `ibp.Offloaded`: statistics, and `close()`, which gives the model its weights back.

    Raises:
        TypeError: model is no module, or an argument is not of its type.
        ValueError: an argument is outside its range; the model is offloaded already, or has nothing to offload;
            names or shapes of the checkpoint do not fit.
        RuntimeError: a weight is on the meta device and no checkpoint is given; memory cannot be pinned.
        torch.OutOfMemoryError: the device has no room. The model is then as it was; so it is after every error, except
            for tensors on the meta device, which a checkpoint may have filled.
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
    """What an offloaded model has done since it was made, or since `reset_stats`.

    Attributes:
        uses: how many times a module used a group of weights.
        misses: uses whose weights were not even on their way: the first uses, and uses after a change of order.
        fetched_bytes: bytes of weights, as the model uses them, brought to the device.
        link_bytes: bytes of their coded rows that crossed the link from host memory.
        seconds: from the first use to the last one, on the host's clock.
        waited_seconds: that modules waited for their weights, on the GPU's clock and without their last uses; without a
            GPU, the time of decoding. Close to `seconds` where the link binds.
        weight_bytes: bytes of all offloaded weights, uncompressed.
        host_bytes: host memory of the offloaded weights, index and codebooks counted.
        device_bytes: device memory for the offloaded weights: weights that stay, the arena, the ring, the index, caches
            of experts.
        expert_hits, expert_misses: rows of experts that were asked for and cached, or brought to the device. Calls
            that bring all experts do not count.
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
        """Bytes of all memory that the offloaded weights take, on the host and on devices."""
        return self.host_bytes + self.device_bytes

    @property
    def gb_per_s(self) -> float:
        """Bytes of weights brought to the device a second, in GB/s; 0 before there are two uses."""
        return self.fetched_bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def expert_hit_rate(self) -> float:
        """Share of the experts' rows that were cached; 0 where no experts were asked for."""
        asked = self.expert_hits + self.expert_misses
        return self.expert_hits / asked if asked else 0.0


class _CallHook(NotCopied):
    """Says when a module is called. start, end: functions to call; torch.compile leaves both alone."""

    def __init__(self, start: Callable[[], None], end: Callable[[], None]) -> None:
        self._start, self._end = start, end

    def before(self, module: nn.Module, args: tuple) -> None:
        self._start()

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._end()


def _refuse_script() -> NoReturn:
    """What torch.jit.script calls of a module before it compiles the module and its hooks."""
    raise cannot_record("torch.jit.script")


class _MoveHook(NotCopied):
    """Brings a module's arguments to the device that it is on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return self._moved(args), self._moved(kwargs)

    def _moved(self, value: Any) -> Any:
        """Tensors on the device, also those in plain containers. A cache is left as it is: its layers stay where they
        are filled."""
        if isinstance(value, torch.Tensor):
            return value.to(self._device, non_blocking=True)
        if type(value) in (tuple, list):
            return type(value)(map(self._moved, value))
        if type(value) is dict:
            return {key: self._moved(held) for key, held in value.items()}
        return value


class _StateHook(NotCopied):
    """Puts a module's weights into its state_dict, and refuses to load others."""

    def __init__(self, holds: list[tuple[str, Weight]]) -> None:
        self._holds = holds

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for _, weight in self._holds:
            weight.wake()  # to be listed as it is, without being decoded

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
    """The forward of a module that looks rows up: its own, with a table in the place of the weight."""

    def __init__(self, lookup: Lookup, look_up: Callable[..., Any]) -> None:
        self._lookup, self._look_up = lookup, look_up

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._look_up(self, *args, **kwargs)

    def look_up(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._lookup.module
        if is_transformed():  # `vmap` may have made one tensor of many ids, which no table takes
            return type(module).forward(module, *args, **kwargs)
        table = {self._lookup.attribute: self._lookup.weight.table}
        return type(module).forward(stand_in(module, table, type(module)), *args, **kwargs)


@dataclass(frozen=True)
class _Call:
    """A call of a module that is going on."""

    use: Use  # what it began as
    groups: list[Group]  # that it uses
    saving: Any  # what `_saving` returned


@dataclass(frozen=True)
class _SavedWeight:
    """What autograd keeps of a weight for backward: which part of it, to be decoded again."""

    weight: Weight
    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements

    def tensor(self) -> torch.Tensor:
        return self.weight.data(self.device).view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Offloaded(OfThisProcess, Closing, NotTheModel):
    """A model whose weights are offloaded: made by `ibp.offload`. As a context manager it calls `close` at the end.

    Several threads may call the model at once; weights that are in use are never overwritten.

    Example:
        >>> model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16).eval()
        >>> with ibp.offload(model, "cpu") as offloaded:
        ...     y = model(torch.ones(2, 1024, dtype=torch.bfloat16))
        ...     offloaded.stats().weight_bytes
        2097152
        >>> torch.equal(model(torch.ones(2, 1024, dtype=torch.bfloat16)), y)  # with its own weights again
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
        self._groups: list[Group] = []  # what is brought to the device for every use
        self._schedule: Schedule[Group] = Schedule([])
        self._undo: list[Callable[[], object]] = []
        self._uses_of: dict[nn.Module, Use] = {}
        self._parents = {child: module for module in model.modules() for child in module.children()}
        self._users: dict[Weight, nn.Module] = {}  # modules that were found to use weights that are not their own
        self._kept: list[Weight] = []  # weights that stay on a device as they are
        self._experts: list[ExpertsForward] = []  # that are brought as a router asks for them
        self._of_experts: set[Group] = set()
        self._uses_all_experts = False  # whether the last call of a mixture did
        self._is_removed = False
        self._is_short = False  # of room for what is expected next: the end of a use makes some
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
        """What the offloaded model has done, and the memory that its weights take. Waits for the device where it has a
        mixture of experts."""
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
        """Counts uses, bytes and seconds from now on."""
        self._uses = self._misses = self._fetched_bytes = self._link_bytes = 0
        self._first_use: float | None = None
        self._last_use = 0.0
        for fetcher in self._fetchers:
            fetcher.waited_s = 0.0
        for experts in self._experts:
            experts.reset_counts()

    def close(self) -> None:
        """Gives the model its weights back as plain tensors, on the devices that they were on, and removes all hooks. A
        second call does nothing.

        Weights are decoded one at a time, and the coded rows of each are given up. If memory runs out on the way, the
        weights that are not yet decoded stay offloaded and `close` can be called again.

        Raises:
            RuntimeError: called from within a call of the model.
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
                if not other.tensor.is_meta:  # else the checkpoint did not get to it
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
                    row_bytes = {"row_bytes": None}  # its own rows, to be fetched one by one
                elif weight in stacked:
                    row_bytes = {"row_bytes": weight.stacked_row_bytes}
                weight.table = compressor.compress(weight.name, stored, device=device, **row_bytes)
            if weight in stacked and weight.table is not None:
                weight.table = by_rows(weight.table)
            weight.freeze()
            if weight.table is not None:
                if device.type == "cpu" or weight.table._serves(device):
                    handle_on(weight.table, device)  # copies the index there now, not at the first use
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
        """(The groups that stay on their devices, the bytes that they leave of each device's). Experts stay where all
        weights do."""
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
        """Every weight and its values: from the model, or from the checkpoint, which fills the other tensors too."""
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
        """cache_bytes: for experts, on each device."""
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
        """Brings a module's groups. After an error nothing is in use that was not before.

        In a transform of torch.func the module computes with its resting weights, each decoded where it is read: the
        memory of weights in use is given to others after the call, and autograd keeps no names of weights there."""
        with self._lock:
            if is_transformed():
                self._calls().append(_Call(use, [], None))
                return
            with outside_of_modes():
                begun = self._bring(use)
            self._calls().append(_Call(use, begun, self._saving()))
            self._fetch_ahead()

    def _bring(self, use: Use) -> list[Group]:
        """Binds the weights of a module's groups. Returns the groups."""
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
        """A call of a mixture that uses all experts: the next ones are expected to do so, too."""
        with self._lock:
            self._uses_all_experts = True
            self._enter(use)
        try:
            yield
        finally:
            self._leave(use)

    def _note_choice(self, group: Group) -> None:
        """A call of a mixture that uses some experts: the next ones are not fetched ahead."""
        with self._lock:
            self._uses_all_experts = False
            self._note_use(group)

    def _leave(self, use: Use) -> None:
        with self._lock:
            calls = self._calls()
            if calls and calls[-1].use is use:  # else its beginning failed
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
        """The whole model is called: this thread is in no other call of it."""
        self._abandon()
        self._thread.is_running = True

    def _stop(self) -> None:
        self._thread.is_running = False

    def _abandon(self) -> None:
        """Ends the uses that this thread has begun and not ended: torch runs no hook after a KeyboardInterrupt."""
        with self._lock:
            calls = self._calls()
            while calls:
                self._end(calls.pop())

    def _calls(self) -> list[_Call]:
        """The uses that this thread is in, the innermost last."""
        if not hasattr(self._thread, "calls"):
            self._thread.calls = []
        return self._thread.calls

    def _read(self, weight: Weight) -> torch.Tensor:
        """The values of a weight that is asked for between uses, in memory of their own. While the model runs, the
        module above the last one known to use it is taken for the one that asks, and will have it when it is next
        called."""
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
        """Fetches what is expected next, as far as there is room: for every device the next few groups that it is to
        use."""
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
                    full.add(group.device_number)  # what comes later must not take the room that this one waits for

    def _fetched_ahead(self, group: Group) -> bool:
        try:
            return self._fetchers[group.device_number].fetch_ahead(group)
        except CorruptTableError:  # which the use that needs the group raises
            return False

    def _count(self, group: Group) -> None:
        self._fetched_bytes += group.num_bytes
        self._link_bytes += group.stored_bytes

    # ---- autograd ----

    def _saving(self) -> Any:
        """Lets autograd keep names of weights in the place of their memory, which other weights will use. None if it
        keeps nothing."""
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
    """Whether this function was called, at any distance, by a method of one of the modules."""
    frame = sys._getframe() if modules else None
    while frame is not None:
        if any(frame.f_locals.get("self") is module for module in modules):
            return True
        frame = frame.f_back
    return False


def _unpack(saved: torch.Tensor | _SavedWeight) -> torch.Tensor:
    return saved.tensor() if isinstance(saved, _SavedWeight) else saved


def _most_at_once(sizes: Sequence[int], number: int) -> int:
    """Bytes of the largest run of that many groups, the last followed by the first."""
    number = min(number, len(sizes))
    return max((sum([*sizes, *sizes][first : first + number]) for first in range(len(sizes))), default=0)
