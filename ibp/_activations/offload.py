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

from .._common.arguments import number, whole_number
from .._machine import memory
from . import coding, planning, spans
from .choosing import Budget, Chooser
from .faults import Faults
from .lane import Lane
from .origin import Origin
from .passes import Order, Pass
from .planning import DEVICE, HOLD, KEEP
from .region import Piece, Region

LEAST_BYTES = 1 << 20  # sending a smaller one takes the host longer than the link
WINDOW_BYTES = 768 << 20  # some milliseconds of the link also where it is coded
TO = ("host", "device")


class _Saved(NamedTuple):
    region: Region
    view: spans.View


class _Entry(NamedTuple):
    """The region of a span, None where the span stays as it is, and the number of the pass that said so."""

    region: weakref.ref[Region] | None
    passes: int


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

    def __init__(self, budget: Budget, least_bytes: int, device: torch.device | None) -> None:
        self.least_bytes, self.device = least_bytes, device
        self.stats = ActivationStats()
        self._lock = threading.RLock()
        self._lanes: dict[torch.device, Lane] = {}
        self._budget, self._chooser = budget, Chooser(budget)
        self._known: spans.Known[_Entry] = spans.Known()
        self._order, self._faults = Order(), Faults()
        self._pass, self._passes = Pass(self, False), 0
        self._contexts: list[contextlib.AbstractContextManager[None]] = []
        self._has_warned = False

    def __enter__(self) -> ActivationOffload:
        if not self._contexts:
            self._begin_pass()
        hooks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self._pass.is_bare:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._contexts.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.pop().__exit__(kind, error, trace)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"ibp.ActivationOffload: {stats.tensors:,} tensors saved, {stats.shared:,} of them again; bytes kept "
            f"{stats.kept_bytes:,}, coded {stats.coded_bytes:,}, raw {stats.raw_bytes:,}; sent {stats.sent_bytes:,}, "
            f"coded on the device {stats.device_bytes:,}"
        )

    def reset_stats(self) -> None:
        """Counts from zero again."""
        self.stats = ActivationStats()

    def release(self) -> None:
        """Gives back pinned memory that no saved tensor has at the moment. It is taken again by the next step."""
        with self._lock:
            for lane in self._lanes.values():
                lane.take_back()
                lane.buffers.release()

    @property
    def is_settled(self) -> bool:
        """Whether steps go on as they are now, unless what they save changes: codebooks are learned, and a budget's
        plan is made."""
        return self._chooser.is_settled

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that it has."""
        return sum(lane.buffers.held_bytes for lane in self._lanes.values())

    # ---- hooks ----

    def _pack(self, x: torch.Tensor) -> spans.Kept | _Saved:
        with self._lock:
            self.stats.tensors += 1
            if self._is_offloaded(x):
                with torch.no_grad():
                    found = self._save(x)
                if found is not None:
                    return found
            self.stats.kept_bytes += x.numel() * x.element_size()
            return spans.Kept.of(x)

    def _unpack(self, saved: spans.Kept | _Saved) -> torch.Tensor:
        if isinstance(saved, spans.Kept) and self._pass.is_used:
            return saved.get()
        with self._lock, torch.no_grad():
            if not self._pass.is_used:
                self._pass.start()
            return saved.get() if isinstance(saved, spans.Kept) else saved.view.of(saved.region.data())

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
        """None: the tensor stays as it is."""
        found = spans.span_of(x)
        if found is None:
            return None
        span, view = found
        if self._pass.alive == 0 and self._pass.is_used:
            self._chooser.note_shared_context()
            self._begin_pass()
        region = self._shared(span) or self._new(x, span, view)
        if region is None:
            return None
        region.saves += 1
        return _Saved(region, view)

    def _shared(self, span: spans.Span) -> Region | None:
        """The region that has a span already. One that an earlier pass saved takes a number of this one too, so that
        numbers are the same in every pass."""
        entry = self._known.get(span)
        region = entry.region() if entry is not None and entry.region is not None else None
        if entry is None or region is None:
            return None
        self.stats.shared += 1
        if entry.passes != self._passes:
            self._pass.take_number()
            self._known.replace(span, _Entry(entry.region, self._passes))
        return region

    def _new(self, x: torch.Tensor, span: spans.Span, view: spans.View) -> Region | None:
        """A region of a span that was not saved before; None where it stays as it is."""
        entry = self._known.get(span)
        if entry is not None and entry.region is None and entry.passes == self._passes:
            return None
        number, data = self._pass.take_number(), spans.bytes_of(x, span)
        self._pass.num_bytes += span.num_bytes
        mode, recipe = self._chooser.choose(number, data, view, self._passes)
        region = None
        if mode != KEEP:
            region = Region(self._pass, number, span.num_bytes, recipe, self._lane_of(x.device))
            self._pass.add(region)
            self._fill(region, mode, x, data)
        else:
            self._keep(x.device, span.num_bytes)
        entry = _Entry(None if region is None else weakref.ref(region), self._passes)
        self._known.put(span, x.untyped_storage(), entry)
        return region

    def _keep(self, device: torch.device, num_bytes: int) -> None:
        """Notes bytes that stay as they are, and frees what has left beside them."""
        if (notes := self._pass.recorder(device)) is not None:
            notes.kept_bytes += num_bytes
        if (lane := self._lane_of(device)) is not None:
            lane.free()

    def _fill(self, region: Region, mode: str, x: torch.Tensor, data: torch.Tensor) -> None:
        """Codes a region, and sends it where it belongs, piece by piece."""
        notes = self._pass.recorder(x.device)
        watch = None if notes is None else planning.Stopwatch(x.device)
        if region.recipe is None:
            if region.lane is not None and mode != HOLD:
                region.lane.make_room(region.num_bytes)  # all of them stay until the last piece has left
            self.stats.raw_bytes += region.num_bytes
            region.memory, region.source = data, spans.Kept.of(x)
        else:
            self.stats.coded_bytes += region.num_bytes
            region.recipe.begin()
        for piece in region.pieces:
            if region.recipe is not None and region.lane is not None and mode != HOLD:
                region.lane.make_room(piece.num_bytes)
            if watch is not None:
                watch.mark()
            if region.recipe is not None:
                if piece is region.pieces[0] and region.recipe.origin is not None:
                    data = self._narrowed(region, region.recipe.origin, x, data)
                part = data[piece.start : piece.end]
                piece.memory = coding.memory_for(part)
                coding.encode(part, region.recipe, piece.memory)
            if watch is not None:
                watch.mark()
            if mode != HOLD:
                self._move(region, piece, mode)
        if watch is not None and notes is not None:
            coded_bytes = None if region.recipe is None else region.expected_bytes
            notes.saves.append(planning.Save(region.number, region.num_bytes, coded_bytes, watch.marks))

    def _narrowed(self, region: Region, origin: Origin, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """What is coded of data, the bytes of x, which stay until the host knows that nothing is lost."""
        region.memory, region.source = data, spans.Kept.of(x)
        rest = region.narrow(origin, data)
        if region.lane is None:
            region.note_narrow(not bool(region.misfits))
        else:
            try:
                region.lane.ask_for_misfits(region)
            except memory.PinningError as error:  # they stay
                memory.warn_of_pageable(error)
        return rest

    def _move(self, region: Region, piece: Piece, mode: str) -> None:
        lane = region.lane
        if lane is None:
            self.stats.device_bytes += region.trim(piece)
        elif mode == DEVICE:
            self.stats.device_bytes += lane.keep(region, piece)
        else:
            try:
                self.stats.sent_bytes += lane.send(region, piece)
            except memory.PinningError as error:  # it stays
                memory.warn_of_pageable(error)

    def _begin_pass(self) -> None:
        self._faults.check()
        ended, chooser = self._pass, self._chooser
        clock = chooser.take_clock()
        if ended.uses:
            self._order.learn(ended.uses)
        if ended.is_bare and torch.is_grad_enabled():
            chooser.note_pass(None, {}, clock, self._passes)
        elif ended.is_used and ended.alive == 0:
            chooser.note_pass(ended.num_bytes, ended.recorders, clock, self._passes)
        self._known.drop_expired()
        self._passes += 1
        self._pass = Pass(self, chooser.is_measuring, chooser.is_bare(self._passes))
        chooser.start_clock()

    def _lane_of(self, device: torch.device) -> Lane | None:
        if device.type != "cuda":
            return None
        if device not in self._lanes:
            self._lanes[device] = Lane(device, self._budget.window_bytes)
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
    device_bytes: int | None = None,
    slowdown: float | None = None,
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

    Bytes that several operations save leave once. Parameters, views of them and small tensors stay. With a budget the
    first three passes measure sizes and times; then a plan says which tensors leave; `is_settled` says when it is
    final.

    Args:
        to: "host": pinned host memory; "device": coded tensors stay on the device.
        device_bytes: of saved tensors of a pass that may stay on each device, at the least predicted time.
        slowdown: share of the time that a step may take longer, 0.05 for 5 %, for the lowest peak of memory. Steps that
            follow the plan are timed and compared with some in which nothing leaves, where there is memory for these;
            where they take longer than allowed the plan is corrected, and given up after a few times.
        coded: False: they go as they are.
        least_bytes: smaller tensors stay as they are.
        window_bytes: of device memory that may be on its way to the host, and as much on its way back. Two pieces of
            64 MiB may be in any case, and no more are with a slowdown.
        device: of the tensors that leave. None: all CUDA devices; where torch sees none, the CPU, whose saved tensors
            are kept coded.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    if to not in TO:
        raise ValueError(f"to is {to!r}; wanted one of {list(TO)}")
    if device_bytes is not None and slowdown is not None:
        raise ValueError("device_bytes and slowdown are both given; wanted one budget")
    least_bytes = whole_number("least_bytes", least_bytes, 0, 2**62)
    window_bytes = whole_number("window_bytes", window_bytes, 0, 2**62)
    if device_bytes is not None:
        device_bytes = whole_number("device_bytes", device_bytes, 0, 2**62)
    if slowdown is not None:
        slowdown = number("slowdown", slowdown)
        if not 0 <= slowdown < float("inf"):
            raise ValueError(f"slowdown is {slowdown}; wanted a share of the time, 0 or more")
    if device is None:
        of = None if torch.cuda.is_available() else torch.device("cpu")
    else:
        of = memory.canonical(device)
    if slowdown is not None:  # what is on its way takes memory, and a plan leaves the link time enough
        window_bytes = min(window_bytes, planning.LEAST_MOVING * coding.PIECE_BYTES)
    return ActivationOffload(Budget(to, bool(coded), device_bytes, slowdown, window_bytes), least_bytes, of)
