"""`ibp.offload_activations`: what a forward pass saves for the backward pass leaves the device, coded."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from .. import _calibration, _memory
from .._arguments import whole_number
from . import coding, spans
from .lane import Lane
from .passes import Order, Pass
from .region import Region

LEAST_BYTES = 64 << 10
WINDOW_BYTES = 1 << 30
_LEAST_SAVED = 0.05  # of the bytes; less is not worth coding
TO = ("host", "device")


class _Saved(NamedTuple):
    region: Region
    view: spans.View


@dataclass
class ActivationStats:
    """What became of the tensors that were saved since the last `reset_stats`. Bytes are those before coding where
    nothing else is said.

    Attributes:
        tensors: saved, those that share memory counted each.
        shared: that had been saved before.
        kept_bytes: that stay as they are: parameters, small tensors, and what the budget leaves.
        coded_bytes, raw_bytes: that were coded, and that were sent as they are.
        sent_bytes: that went to the host, as they went.
        device_bytes: that coded tensors take on the device.
        outgrown_bytes: for which less room was expected than they took: they stayed on the device until their use.
    """

    tensors: int = 0
    shared: int = 0
    kept_bytes: int = 0
    coded_bytes: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    device_bytes: int = 0
    outgrown_bytes: int = 0


class ActivationOffload:
    """What `offload_activations` makes: a context for forward passes, to be used again for every step.

    It keeps what it learns: codebooks, sizes, the order in which the backward pass asks, pinned memory. What is saved
    during a backward pass (by double backward, or computed again by `torch.utils.checkpoint`), while a CUDA graph is
    captured, and by tensor subclasses stays as it is.
    """

    __module__ = "ibp"

    def __init__(self, to: str, coded: bool, least_bytes: int, window_bytes: int, device: torch.device | None) -> None:
        self.to, self.coded, self.least_bytes, self.window_bytes, self.device = (
            to,
            coded,
            least_bytes,
            window_bytes,
            device,
        )
        self.stats = ActivationStats()
        self._lock = threading.RLock()
        self._lanes: dict[torch.device, Lane] = {}
        self._recipes: dict[tuple[int, torch.dtype, torch.device], tuple[coding.Recipe | None, int]] = {}
        self._passes = 0
        self._known: spans.Known[weakref.ref[Region]] = spans.Known()
        self._order = Order()
        self._pass = Pass(self)
        self._contexts: list[contextlib.AbstractContextManager[None]] = []
        self._has_warned = False

    def __enter__(self) -> ActivationOffload:
        if not self._contexts:
            self._begin_pass()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._contexts.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.pop().__exit__(kind, error, trace)

    def reset_stats(self) -> None:
        self.stats = ActivationStats()

    def release(self) -> None:
        """Gives back pinned memory that no saved tensor has at the moment. It is taken again by the next step."""
        for lane in self._lanes.values():
            lane.buffers.release()

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that it has."""
        return sum(lane.buffers.held_bytes for lane in self._lanes.values())

    # ---- hooks ----

    def _pack(self, x: torch.Tensor) -> spans.Kept | _Saved:
        with self._lock, torch.no_grad():
            self.stats.tensors += 1
            found = self._save(x) if self._is_offloaded(x) else None
            if found is None:
                self.stats.kept_bytes += x.numel() * x.element_size()
                return spans.Kept.of(x)
            return found

    def _unpack(self, saved: spans.Kept | _Saved) -> torch.Tensor:
        if isinstance(saved, spans.Kept):
            return saved.get()
        with self._lock, torch.no_grad():
            return saved.view.of(saved.region.data())

    def _is_offloaded(self, x: torch.Tensor) -> bool:
        """Whether a tensor may leave."""
        if not spans.is_plain(x) or x.numel() * x.element_size() < max(1, self.least_bytes):
            return False
        if not (x.is_cuda if self.device is None else x.device == self.device):
            return False
        if spans.is_of_parameter(x) or torch._C._current_graph_task_id() != -1:
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def _save(self, x: torch.Tensor) -> _Saved | None:
        found = spans.span_of(x)
        if found is None:
            return None
        span, view = found
        known = self._known.get(span)
        if known is not None:
            region = known()
            if region is not None:
                self.stats.shared += 1
                region.saves += 1
                return _Saved(region, view)
        if self._pass.alive == 0 and self._pass.uses:
            self._begin_pass()
        region = self._take(x, span)
        if region is None:
            return None
        region.saves = 1
        self._known.put(span, x.untyped_storage(), weakref.ref(region))
        return _Saved(region, view)

    # ---- regions ----

    def _begin_pass(self) -> None:
        if self._pass.uses:
            self._order.learn(self._pass.uses)
        self._known.drop_expired()
        self._pass = Pass(self)
        self._passes += 1

    def _take(self, x: torch.Tensor, span: spans.Span) -> Region | None:
        """A region of a span that was not saved before; None where it stays as it is."""
        number, data = self._pass.take_number(), spans.bytes_of(x, span)
        recipe = self._recipe_of(number, data, x.dtype) if self.coded else None
        if recipe is None and (self.to == "device" or not x.is_cuda):
            return None
        region = Region(self._pass, number, span.num_bytes, recipe, self._lane_of(x.device))
        self._pass.add(region)
        if recipe is None:
            self.stats.raw_bytes += span.num_bytes
            region.memory, region.source = data, spans.Kept.of(x)
        else:
            self.stats.coded_bytes += span.num_bytes
            region.memory = coding.memory_for(recipe.codebook, data)
            coding.encode(data, recipe.codebook, region.memory)
        self._move(region)
        return region

    def _move(self, region: Region) -> None:
        """Sends a region where it belongs."""
        lane = region.lane
        if lane is None:
            assert region.memory is not None and region.recipe is not None
            used = int(region.memory[:8].view(torch.int64))
            end = coding.index_bytes(region.recipe.codebook, region.num_bytes) + used
            region.memory = region.memory[:end].clone()
            self.stats.device_bytes += end
            return
        if self.to == "device":
            lane.keep(region)
            self.stats.device_bytes += region.expected_bytes
            return
        try:
            lane.send(region)
        except _memory.PinningError as error:
            _memory.warn_of_pageable(error)
            return
        assert region.host is not None
        self.stats.sent_bytes += region.host.numel()

    def _recipe_of(self, number: int, data: torch.Tensor, dtype: torch.dtype) -> coding.Recipe | None:
        """The recipe of what is saved at this place of a pass, learned when it first is, and again, at
        growing distances, where it does not serve."""
        key = number, dtype, data.device
        recipe, next_pass = self._recipes.get(key, (None, 0))
        if (recipe is None or recipe.is_outdated) and self._passes >= next_pass:
            recipe = coding.learn(data, spans.element_type(dtype))
            if recipe is not None and not self._pays(recipe, data.device):
                recipe = None
            self._recipes[key] = recipe, 2 * self._passes + 1
        return recipe

    def _pays(self, recipe: coding.Recipe, device: torch.device) -> bool:
        """Whether coding takes less time than the link takes for the bytes that it saves."""
        saved = 1 - recipe.needed_share
        if self.to == "device" or device.type == "cpu":
            return saved > _LEAST_SAVED
        machine = _calibration.in_force(device)
        link_ns = 1 / machine.copy_out_gbps + 1 / machine.copy_in_gbps
        return saved * link_ns > coding.coder_ns(recipe.codebook, machine)

    def _lane_of(self, device: torch.device) -> Lane | None:
        if device.type != "cuda":
            return None
        if device not in self._lanes:
            self._lanes[device] = Lane(device, self.window_bytes)
        return self._lanes[device]

    def _note_outgrown(self, num_bytes: int) -> None:
        self.stats.outgrown_bytes += num_bytes
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "activations are less compressible than they were: some stay on the device until their use, and the "
                "next step expects larger ones",
                RuntimeWarning,
                stacklevel=2,
            )


def offload_activations(
    *,
    to: str = "host",
    coded: bool = True,
    least_bytes: int = LEAST_BYTES,
    window_bytes: int = WINDOW_BYTES,
    device: torch.device | str | int | None = None,
) -> ActivationOffload:
    """A context for forward passes, in which tensors that autograd saves leave the device, coded, and come back before
    the backward pass needs them. Gradients are the same bit for bit.

        offload = ibp.offload_activations()
        for batch in batches:
            with offload:
                loss = model(batch)
            loss.backward()
            ...

    Bytes that several operations save leave once. Parameters, views of them and small tensors stay.

    Args:
        to: "host": pinned host memory; "device": coded tensors stay on the device.
        coded: False: they go as they are.
        least_bytes: smaller tensors stay as they are.
        window_bytes: of device memory that may be on its way to the host, and as much on its way back.
        device: of the tensors that leave. None: all CUDA devices; where torch sees none, the CPU, whose saved tensors
            are kept coded.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    if to not in TO:
        raise ValueError(f"to is {to!r}; wanted one of {list(TO)}")
    least_bytes = whole_number("least_bytes", least_bytes, 0, 2**62)
    window_bytes = whole_number("window_bytes", window_bytes, 0, 2**62)
    if device is None:
        of = None if torch.cuda.is_available() else torch.device("cpu")
    else:
        of = _memory.canonical(device)
    return ActivationOffload(to, bool(coded), least_bytes, window_bytes, of)
