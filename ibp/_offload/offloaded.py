"""`ibp.offload`, `ibp.Offloaded` and `ibp.OffloadStats`: what a user sees of an offloaded model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._common import ops
from .._common.arguments import whole_number
from .._common.manners import Statistics, shown_memory
from .._common.modes import outside_of_modes
from .._common.process import Closing, OfThisProcess
from .._machine import memory
from .._rows.learning import check_scheme
from ..nn import TableParameter
from ..nn._compressing import NotTheModel, check_model
from .events import Events, ExpertsForward, install, remove_all
from .plan import OffloadPlan, plan_for
from .weights import Checkpoint, Resting, read_checkpoint, store

_GROUP_BYTES = 128 << 20  # size of a group; three such groups are about one layer of a model of 7 billion weights
_LEAST_GROUPS = 16  # least number of groups of a small model, so that fetches overlap with computing
_LOOKAHEAD = 2  # number of groups that are fetched ahead of the one in use


def offload(
    model: nn.Module,
    device: torch.device | str | int | Sequence[torch.device | str | int] | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    verify: bool = True,
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
    computes, the copy engine brings the next weights and the GPU decompresses them into a small arena, bit for bit.
    Weights are first expected to be used in the order of the model's modules; the order is then learned from the calls.
    `torch.nn.Embedding` fetches only the rows that it looks up. In a call for few tokens, a mixture of experts of
    transformers fetches only the experts that the router chooses. All other parameters and buffers move to the device.
    Modules of `ibp.nn` keep their tables where they are: use `ibp.nn.compress` for the part of a model that stays on
    the GPU.

    Call the model as before. `state_dict()` returns plain tensors on the CPU. Between calls a weight still has its
    shape, dtype and device; reading its values returns a decompressed copy. A module that reads another module's weight
    also gets a copy; if it does so while the model runs, its next calls fetch the weight as if it were its own. In
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
        model: a module in eval mode, or in training mode if the weights to be offloaded are frozen. If a module is in
            training mode, its parameters that require grad are not offloaded; they stay on the device. Weights on the
            meta device are read from `checkpoint`.
        device: the device on which the model computes. Several devices: the blocks of the model's outermost
            `ModuleList` or `Sequential` are distributed over them round-robin, so that the links of all devices are
            busy. The blocks must be called one after the other. All other modules run on the first device. None: the
            current CUDA device if there is one, otherwise the CPU.
        checkpoint: a .safetensors file, a directory of such files (with or without an index), an index, a mapping, or
            pairs of names and tensors. It is read one tensor at a time, and each tensor is converted to its parameter's
            dtype, as `load_state_dict` does. Tables of a compressed checkpoint (`ibp.checkpoints.compress`) or of a
            mapping are used without decompressing them if they have the parameter's dtype and the given scheme. For a
            GPU they are put into pinned memory. Other tables are decompressed.
        verify: whether to compare the checksums of a checkpoint's files, as `ibp.load` does. A tensor's checksums are
            compared when the tensor is read. With verify=False on the CPU, the bytes of tables are not read before they
            are used.
        resident_bytes: number of bytes of weights, counted before compression, that stay on the device; with several
            devices, on each of them. In a model with mixtures of experts, the bytes that its other weights do not need
            are used for caches of compressed experts. Each stacked weight has a cache in proportion to its size;
            requested experts replace the least recently used ones. None: no weights stay.
        resident: "raw", the only value: weights that stay on the device are not compressed.
        max_sms: the largest number of the GPU's multiprocessors to keep busy with decompression. None: 32.
        lookahead: number of groups of weights that are fetched ahead. None: 2 on a GPU; 0 on the CPU, where nothing
            runs beside the model.
        group_bytes: a module with at most this many bytes of weights is fetched as a whole, a larger one in parts.
            None: 128 MiB, or a sixteenth of the size of the model's parameters if that is less.
        min_bytes: parameters of fewer bytes stay on the device.
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
        ibp.FileFormatError: a file of the checkpoint is damaged. With `verify`, damaged bytes raise ibp.ChecksumError,
            a FileFormatError, which names the file and the tensor.
        RuntimeError: a weight is on the meta device and no checkpoint is given; memory cannot be pinned.
        torch.OutOfMemoryError: the device does not have enough memory. After this and every other error the model is
            unchanged, except that a checkpoint may have filled tensors that were on the meta device.
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
    plan = plan_for(
        model,
        devices,
        min_bytes=min_bytes,
        group_bytes=whole_number("group_bytes", group_bytes, 1),
        resident_bytes=resident_bytes,
        lookahead=lookahead,
        buffers=buffers,
    )
    if not plan.weights:
        raise ValueError(
            f"the model has no frozen weight of at least {min_bytes:,} bytes to offload: call model.eval() or "
            "model.requires_grad_(False), or lower min_bytes"
        )
    offloaded: Offloaded | None = None
    try:
        with outside_of_modes(), torch.no_grad():
            events = Events(model, plan, max_sms, lookahead)
            offloaded = Offloaded(model, plan, events)
            values = None if checkpoint is None else read_checkpoint(checkpoint, verify)
            store(model, plan, values, scheme, progress, events.read)
            offloaded._experts = install(model, plan, events)
            events.start()
        return offloaded
    except BaseException:
        if offloaded is not None:
            offloaded.close()
        raise


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
        misses: number of uses whose weights were neither on the device nor being fetched when the use began. Misses are
            expected at first uses, and when modules are called in a new order.
        fetched_bytes: number of bytes of weights that were brought to the device, counted uncompressed.
        link_bytes: number of bytes of compressed rows that crossed the link from host memory.
        seconds: time in seconds from the beginning of the first use to the latest beginning or end of a use, by the
            host's clock.
        waited_seconds: on a GPU, the time in seconds that modules waited for their weights, by the GPU's clock; the
            wait of the latest use of each group is not counted yet. On the CPU, the time of decompression.
            `waited_seconds` is close to `seconds` if the link is the bottleneck.
        weight_bytes: size in bytes of all offloaded weights, uncompressed.
        host_bytes: size in bytes of the offloaded weights in host memory, including index and codebooks.
        device_bytes: size in bytes of the device memory for offloaded weights: weights that stay, the arena, the ring,
            the index, and caches of experts.
        expert_hits, expert_misses: number of requested rows of experts that were found in the cache, and number of
            requested rows that had to be fetched. Calls that fetch all experts are not counted.
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
        """Rate in GB/s at which weights were brought to the device, counted before compression; 0 if `seconds` is 0."""
        return self.fetched_bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def expert_hit_rate(self) -> float:
        """Fraction of the requested rows of experts that were found in the cache; 0 if no experts were requested."""
        asked = self.expert_hits + self.expert_misses
        return self.expert_hits / asked if asked else 0.0


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

    def __init__(self, model: nn.Module, plan: OffloadPlan, events: Events) -> None:
        self._model, self._plan, self._events, self._modules = model, plan, events, list(model.modules())
        self._experts: list[ExpertsForward] = []  # mixtures whose experts are fetched as the router chooses them
        self._is_removed = False

    def __repr__(self) -> str:
        if self._is_removed:
            return f"ibp.Offloaded({type(self._model).__name__}, closed)"
        stats = self.stats()
        where = ", ".join(map(str, self._plan.devices))
        return (
            f"ibp.Offloaded({type(self._model).__name__}, {len(self._plan.weights)} weights in "
            f"{len(self._plan.groups)} groups, {shown_memory(stats.nbytes, stats.weight_bytes)}, "
            f"host_bytes={stats.host_bytes:,}, device_bytes={stats.device_bytes:,}, on {where})"
        )

    # ---- methods for users ----

    def stats(self) -> OffloadStats:
        """Returns statistics of the offloaded model: uses, misses, bytes and times since the last reset, and the memory
        that its weights take. Waits for the device if the model has a mixture of experts."""
        events, weights, fetchers = self._events, self._plan.weights, self._events.fetchers
        with events.lock:
            counts = [experts.counts() for experts in self._experts]
            hits, misses, missed_bytes, link_bytes = (sum(part) for part in zip((0, 0, 0, 0), *counts))
            tables = [weight.table for weight in weights if weight.table is not None]
            uses_gpu = any(device.type == "cuda" for device in self._plan.devices)
            device_bytes = sum(fetcher.device_bytes for fetcher in fetchers)
            device_bytes += 0 if self._is_removed else sum(weight.num_bytes for weight in weights if weight.stays)
            device_bytes += sum(experts.device_bytes for experts in self._experts)
            device_bytes += sum(table.index_bytes for table in tables) if uses_gpu else 0
            return OffloadStats(
                events.uses,
                sum(fetcher.misses for fetcher in fetchers),
                sum(fetcher.fetched_bytes for fetcher in fetchers) + missed_bytes,
                sum(fetcher.link_bytes for fetcher in fetchers) + link_bytes,
                events.last_use - events.first_use if events.first_use is not None else 0.0,
                sum(fetcher.waited_s for fetcher in fetchers),
                sum(weight.num_bytes for weight in weights),
                sum(table.nbytes for table in tables),
                device_bytes,
                hits,
                misses,
            )

    def reset_stats(self) -> None:
        """Sets the counts of uses, bytes and seconds to 0."""
        self._events.reset_counts()
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
        events = self._events
        with events.lock, outside_of_modes():
            if self._is_removed:
                return
            if not _is_within([module for module, _, _ in events.thread.calls]):
                events.abandon()
            if any(group.uses for group in events.groups):
                raise RuntimeError("the model is in use: close() between its calls")
            for fetcher in events.fetchers:
                fetcher.synchronize()
            for group in events.groups:
                events.fetchers[group.device_number].drop(group)
            for weight in self._plan.weights:
                weight.restore()
            for other in self._plan.others:
                if not other.tensor.is_meta:  # otherwise the checkpoint has not filled it
                    other.tensor.data = other.tensor.data.to(other.home)
            remove_all(self._model, self._modules, events)
            for fetcher in events.fetchers:
                fetcher.close()
            self._experts, self._is_removed = [], True


def _is_within(modules: Sequence[nn.Module]) -> bool:
    """Returns whether a method of one of the modules is on the call stack."""
    frame = sys._getframe() if modules else None
    while frame is not None:
        if any(frame.f_locals.get("self") is module for module in modules):
            return True
        frame = frame.f_back
    return False
