"""`ibp.offload_activations`: moves the tensors that a forward pass saves for the backward pass off the device, in
compressed form.

The first part decides which regions leave the device, and in which form. Regions that have the same number in different
passes share a codebook. A budget, if there is one, limits the bytes that may stay on the device. The second part has
the hooks that autograd calls for saved tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._common.arguments import sms_of, whole_number
from .._common.manners import Statistics
from .._common.process import ForkLock, OfThisProcess
from .._machine import calibration
from .._machine import memory as _memory
from .._rows.codebook import coder_rates
from .._rows.handle import Faults, FaultWords
from .._rows.learning import Learner
from . import coding
from .coding import IndexOrigin, SpanView
from .regions import ForwardPass, PieceTransfers, SavedPiece, SavedRegion

LEAST_BYTES = 1 << 20  # Default of least_bytes. The host's work for a smaller tensor takes longer than the copy.
# Default of window_bytes. Copying this many bytes takes several milliseconds, even if they are compressed.
WINDOW_BYTES = 768 << 20
MEMORY = ("pinned", "device")
_WORDS = FaultWords(
    "saved activations came back damaged in an earlier step: its gradients are wrong", RuntimeError, later=""
)
_NO_CHANGE = contextlib.nullcontext()


# ---- what is moved -------------------------------------------------------------------------------------------------


# The modes of a region, in this order: not moved; encoded, on the device; raw, on the host; encoded, on the host.
KEEP, DEVICE, RAW, CODED = "keep", "device", "raw", "coded"
_LEAST_SAVED = 0.05  # least fraction of the bytes that encoding must save to be worth the time that it takes


class _RegionSize(NamedTuple):
    """The sizes of one region. Sorting puts the most compressible regions first.

    Attributes:
        share: the expected encoded size as a fraction of the region's size, rounded to 0.01. It is 1 if the region is
            not encoded.
        number: the number of the region in its pass.
        num_bytes: size of the region in bytes on the device if it stays there uncompressed.
        left_bytes: size in bytes that the region takes on the device if it is moved or encoded.
    """

    share: float
    number: int
    num_bytes: int
    left_bytes: int


class ActivationPolicy:
    """Chooses the form in which each region is saved. A codebook is learned when a region is first saved. With a
    budget, the first pass moves all regions. Later passes use the sizes of the previous pass to choose which regions
    stay on the device, within the budget."""

    def __init__(self, memory: str, coded: bool, device_bytes: int | None) -> None:
        # The arguments of `offload_activations`.
        self.memory, self._coded, self._device_bytes = memory, coded, device_bytes
        # The learners of recipes, keyed by a region's number, dtype and device.
        self._learners: defaultdict[tuple[int, torch.dtype, torch.device], Learner[coding.ActivationRecipe]]
        self._learners = defaultdict(Learner)
        self._sizes: dict[torch.device, list[_RegionSize]] = {}
        self._staying: set[tuple[torch.device, int]] = set()
        self._passes = 0  # number of passes that have begun
        self.is_settled = False

    def begin_pass(self, was_used: bool) -> None:
        """Begins a pass. was_used: True if the backward pass of the previous pass has begun and all regions of that
        pass have been destroyed."""
        if was_used:
            self.is_settled = True
            self._staying = {(device, k) for device, sizes in self._sizes.items() for k in self._that_fit(sizes)}
        self._sizes = {}
        self._passes += 1

    def _that_fit(self, sizes: list[_RegionSize]) -> list[int]:
        """Returns the numbers of the regions that stay on the device. The most compressible regions are moved first,
        until the others fit in the budget."""
        assert self._device_bytes is not None
        left, staying = sum(size.num_bytes for size in sizes), []
        for size in sorted(sizes):
            if left <= self._device_bytes:
                staying.append(size.number)
            left -= (size.num_bytes - size.left_bytes) * (left > self._device_bytes)
        return staying

    def choose(self, number: int, data: torch.Tensor, view: SpanView) -> tuple[str, coding.ActivationRecipe | None]:
        """Returns (mode, recipe) for a region.

        Args:
            number: the number of the region in its pass.
            data: uint8 [num_bytes].
            view: describes a tensor in the region.
        """
        recipe = self._recipe(number, data, view) if self._coded else None
        mode = self._mode(recipe, data.device)
        if self._device_bytes is not None:
            self._note_size(number, data, mode, recipe)
            if (data.device, number) in self._staying:
                mode = KEEP
        return mode, recipe if mode in (CODED, DEVICE) else None

    def _note_size(self, number: int, data: torch.Tensor, mode: str, recipe: coding.ActivationRecipe | None) -> None:
        num_bytes, share, left = data.numel(), 1.0, data.numel() if mode == KEEP else 0
        if recipe is not None and mode in (CODED, DEVICE):
            share = round(recipe.coded_share, 2)
            left = recipe.expected_bytes(num_bytes) if mode == DEVICE else 0
        self._sizes.setdefault(data.device, []).append(_RegionSize(share, number, num_bytes, left))

    def _recipe(self, number: int, data: torch.Tensor, view: SpanView) -> coding.ActivationRecipe | None:
        """Returns the recipe that all regions with this number share, or None if the region stays raw. The recipe is
        learned when the first of these regions is saved. If no recipe was found, or if encoded sizes have grown since,
        it is learned again once the number of passes has doubled."""
        learner = self._learners[number, view.dtype, data.device]
        if learner.found is not None:
            learner.note(learner.found.needed_share, 1)
        if learner.is_due(self._passes + 1):
            recipe = coding.learn(data, view)
            learner.take(recipe, None if recipe is None else recipe.needed_share, self._passes + 1)
        recipe = learner.found
        return recipe if recipe is None or recipe.takes(data.numel()) else None

    def _mode(self, recipe: coding.ActivationRecipe | None, device: torch.device) -> str:
        """Returns the mode of a region if there is no budget. On the CPU, and with memory="device", the mode is DEVICE
        if encoding saves more than _LEAST_SAVED, and otherwise KEEP. On a GPU it is CODED if encoding and decoding take
        less time than the link would take to move the saved bytes out and back, and otherwise RAW."""
        saved = 0.0 if recipe is None else 1 - recipe.coded_share
        if device.type == "cpu" or self.memory == "device":
            return DEVICE if saved > _LEAST_SAVED else KEEP
        if recipe is None:
            return RAW
        machine = calibration.in_force(device)
        rates = coder_rates(recipe.codebook, machine)
        link_ns = saved * (1 / machine.copy_out_gbps + 1 / machine.copy_in_gbps)
        return CODED if link_ns > 1 / rates.encode_gbps + 1 / rates.decode_gbps else RAW


# ---- the context and its hooks -------------------------------------------------------------------------------------


@dataclass
class ActivationStats(Statistics):
    """Counts of saved tensors since the last `reset_stats`. Numbers of bytes are sizes before compression, except
    sent_bytes and device_bytes.

    Attributes:
        tensors: number of tensors that were saved. Tensors that share memory are all counted.
        shared: number of saved tensors whose bytes an earlier save had already stored.
        kept_bytes: number of bytes that are not moved: those of parameters, of small tensors, and of tensors that fit
            in the budget.
        coded_bytes, raw_bytes: number of bytes that were compressed, and number of bytes that were sent uncompressed.
        sent_bytes: number of bytes that were copied to the host, counted in compressed form if they were compressed.
        device_bytes: size in bytes of the compressed tensors on the device.
        outgrown_bytes: size in bytes, before compression, of the pieces and tensors that compressed worse than
            expected. They stayed on the device until they were used.
    """

    tensors: int = 0
    shared: int = 0
    kept_bytes: int = 0
    coded_bytes: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    device_bytes: int = 0
    outgrown_bytes: int = 0


class ActivationOffload(OfThisProcess):
    """The context that `offload_activations` returns. Use it for the forward pass of every step.

    From step to step it keeps its pinned memory and what it has learned: codebooks, sizes, and the order in which the
    backward pass needs tensors. Some tensors are not moved: tensor subclasses, tensors that are saved while a CUDA
    graph is captured, and tensors that are saved during a backward pass (by double backward, or because
    `torch.utils.checkpoint` recomputes them).

    Example:
        >>> layer, x = torch.nn.Linear(1024, 1024), torch.randn(8, 1024, requires_grad=True)
        >>> offload = ibp.offload_activations(device="cpu", least_bytes=4096)
        >>> for step in range(2):
        ...     with offload:
        ...         loss = layer(x).relu().sum()
        ...     loss.backward()
        >>> offload.stats().tensors, offload.is_settled
        (6, True)
    """

    _instead = "call ibp.offload_activations() where another one is needed"

    def __init__(
        self, policy: ActivationPolicy, least_bytes: int, window_bytes: int, max_sms: int, device: torch.device | None
    ) -> None:
        # device: the device whose tensors are moved; None: all CUDA devices. max_sms: 0: all.
        self.least_bytes, self.device = least_bytes, device
        self._policy, self._window_bytes, self._max_sms = policy, window_bytes, max_sms
        self._stats = ActivationStats()
        self._lock = ForkLock()
        self._transfers: dict[torch.device, PieceTransfers] = {}
        # Maps each saved span to (its storage, the region that holds the span). The region is None if this pass does
        # not move the span. An entry is valid only while the storage lives, so that a later storage at the same address
        # is not mistaken for the saved one.
        self._seen: dict[coding.ByteSpan, tuple[StorageWeakRef, weakref.ref[SavedRegion] | None]] = {}
        self._order: list[int] = []
        self._faults = Faults(_WORDS)
        self._pass = self._new_pass()
        self._contexts: list[torch.autograd.graph.saved_tensors_hooks] = []
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

    def __repr__(self) -> str:
        stats = self._stats
        return (
            f"ibp.ActivationOffload: {stats.tensors:,} tensors saved, {stats.shared:,} of them again; bytes kept "
            f"{stats.kept_bytes:,}, coded {stats.coded_bytes:,}, raw {stats.raw_bytes:,}; sent {stats.sent_bytes:,}, "
            f"coded on the device {stats.device_bytes:,}"
        )

    def stats(self) -> ActivationStats:
        """Returns the counts since the last `reset_stats`."""
        return dataclasses.replace(self._stats)

    def reset_stats(self) -> None:
        """Sets all counts to 0."""
        self._stats = ActivationStats()

    def close(self) -> None:
        """Frees pinned memory that no saved tensor is using. A later step allocates pinned memory again."""
        with self._lock:
            for transfers in self._transfers.values():
                transfers.take_back()
                transfers.buffers.release()

    @property
    def is_settled(self) -> bool:
        """True from the second step on: codebooks have been learned and, if there is a budget, the sizes of the saved
        tensors are known."""
        return self._policy.is_settled

    @property
    def pinned_bytes(self) -> int:
        """Size in bytes of the pinned memory that this object has allocated."""
        return sum(transfers.buffers.held_bytes for transfers in self._transfers.values())

    # ---- hooks ----

    def _pack(self, x: torch.Tensor) -> coding.UnchangedTensor | tuple[SavedRegion, SpanView]:
        with self._lock:  # autograd has switched gradients off here
            self._stats.tensors += 1
            if self._is_offloaded(x) and (found := self._save(x)) is not None:
                return found
            self._stats.kept_bytes += x.numel() * x.element_size()  # sparse tensors have no nbytes
            return coding.UnchangedTensor.of(x)

    def _unpack(self, saved: coding.UnchangedTensor | tuple[SavedRegion, SpanView]) -> torch.Tensor:
        if isinstance(saved, coding.UnchangedTensor) and self._pass.is_used:
            return saved.get()
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else _NO_CHANGE:
            if not self._pass.is_used:
                self._pass.start()
            if isinstance(saved, coding.UnchangedTensor):
                return saved.get()
            region, view = saved
            return view.of(region.data())

    def _is_offloaded(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor may be moved off the device."""
        if not coding.is_plain(x) or x.nbytes < max(1, self.least_bytes):
            return False
        if not (x.is_cuda if self.device is None else x.device == self.device):
            return False
        if coding.is_of_parameter(x) or torch._C._current_graph_task_id() != -1:
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def _save(self, x: torch.Tensor) -> tuple[SavedRegion, SpanView] | None:
        """Saves a tensor. Returns (the region that holds it, its layout in the region), or None if the tensor is not
        moved."""
        found = coding.span_of(x)
        if found is None:
            return None
        span, view = found
        if self._pass.alive == 0 and self._pass.is_used:
            self._begin_pass()
        storage, held_by = self._seen.get(span, (None, None))
        region = None
        if storage is not None and not storage.expired():
            if held_by is None:
                return None
            region = held_by()
        if region is not None:
            self._stats.shared += 1
            self._pass.share(region)
        elif (region := self._new(x, span, view)) is None:
            return None
        region.saves += 1
        return region, view

    def _new(self, x: torch.Tensor, span: coding.ByteSpan, view: SpanView) -> SavedRegion | None:
        """Makes a region for a span that no region holds, and saves the bytes of x in it. Returns None if the span is
        not moved."""
        number, data = self._pass.take_number(), coding.bytes_of(x, span)
        mode, recipe = self._policy.choose(number, data, view)
        region, transfers = None, self._transfers_of(x.device)
        if mode != KEEP:
            region = SavedRegion(self._pass, number, span.num_bytes, recipe, transfers)
            self._pass.add(region)
            self._fill(region, x, data)
        elif transfers is not None:
            transfers.free()
        self._seen[span] = StorageWeakRef(x.untyped_storage()), None if region is None else weakref.ref(region)
        return region

    def _fill(self, region: SavedRegion, x: torch.Tensor, data: torch.Tensor) -> None:
        """Encodes the bytes of a region, if it has a recipe, and moves them piece by piece to the memory that will hold
        them."""
        recipe, transfers = region.recipe, region.transfers
        if recipe is None:
            if transfers is not None:
                transfers.make_room(region.num_bytes)  # x is held until its last piece has been copied
            self._stats.raw_bytes += region.num_bytes
            region.hold(data, x)
        else:
            self._stats.coded_bytes += region.num_bytes
            recipe.begin()
        for piece in region.pieces:
            if recipe is not None:
                if transfers is not None:
                    transfers.make_room(piece.num_bytes)
                if piece is region.pieces[0] and recipe.origin is not None:
                    data = self._narrowed(region, recipe.origin, x, data)
                region.encode(piece, data)
            self._move(region, piece)

    def _narrowed(self, region: SavedRegion, origin: IndexOrigin, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Returns the narrower elements of x as bytes. data: the bytes of x. The region keeps these bytes until the
        host knows that narrowing lost nothing."""
        region.hold(data, x)
        rest, region.misfits = origin.narrow(data)
        if region.transfers is None:
            region.note_narrow(not bool(region.misfits))
        else:
            try:
                region.transfers.ask_for_misfits(region)
            except _memory.PinningError as error:  # the bytes stay on the device
                _memory.warn_of_pageable(error)
        return rest

    def _move(self, region: SavedRegion, piece: SavedPiece) -> None:
        """Moves a piece to the memory that will hold it, and counts its bytes."""
        if region.transfers is None:
            self._stats.device_bytes += region.trim(piece)
            return
        try:
            moved = region.transfers.send(region, piece)
        except _memory.PinningError as error:  # the bytes stay on the device
            _memory.warn_of_pageable(error)
        else:
            self._stats.sent_bytes += moved * (self._policy.memory == "pinned")
            self._stats.device_bytes += moved * (self._policy.memory == "device")

    def _begin_pass(self) -> None:
        for device in self._faults.devices:
            self._faults.raise_pending(device)
        self._order = self._pass.uses or self._order
        self._policy.begin_pass(self._pass.is_used and self._pass.alive == 0)
        self._seen = {span: seen for span, seen in self._seen.items() if seen[1] is not None and not seen[0].expired()}
        self._pass = self._new_pass()

    def _new_pass(self) -> ForwardPass:
        return ForwardPass(self._order, self._transfers, self._faults, self._note_outgrown)

    def _transfers_of(self, device: torch.device) -> PieceTransfers | None:
        if device.type != "cuda":
            return None
        if device not in self._transfers:
            window_bytes = self._window_bytes if self._policy.memory == "pinned" else None
            self._transfers[device] = PieceTransfers(device, window_bytes, self._max_sms)
        return self._transfers[device]

    def _note_outgrown(self, num_bytes: int) -> None:
        self._stats.outgrown_bytes += num_bytes
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
    memory: str = "pinned",
    device_bytes: int | None = None,
    coded: bool = True,
    least_bytes: int = LEAST_BYTES,
    window_bytes: int = WINDOW_BYTES,
    max_sms: int | None = None,
    device: torch.device | str | int | None = None,
) -> ActivationOffload:
    """Returns a context for forward passes. The tensors that autograd saves in it are compressed and moved off the
    device, and are moved back before the backward pass needs them. Gradients are the same bit for bit.

    Bytes that several operations save are moved only once. Parameters, views of parameters, and small tensors stay on
    the device.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
        >>> with ibp.offload_activations(device="cpu", least_bytes=4096) as offload:
        ...     loss = layers(torch.randn(8, 1024)).sum()
        >>> loss.backward()
        >>> offload.stats()
        ActivationStats(tensors=4, ...)

    Args:
        memory: "pinned": tensors are moved to pinned host memory. "device": compressed tensors stay on the device until
            the backward pass has decompressed them.
        device_bytes: number of bytes of saved tensors that may stay on each device during a pass. The first step moves
            all tensors. Later steps choose by the sizes of the previous step: the most compressible tensors are moved,
            until the others fit in this number of bytes. None: all tensors are moved.
        coded: whether tensors are compressed. False: they are moved uncompressed.
        least_bytes: size in bytes below which tensors are not moved.
        window_bytes: largest number of bytes of device memory that copies to the host use at the same time. The same
            limit holds separately for copies back. Two pieces of 64 MiB are always allowed. With memory="device", there
            is no window: the full-size buffers of at most two pieces are kept until the host knows their compressed
            sizes.
        max_sms: largest number of the GPU's multiprocessors that compression and decompression may keep busy. This
            limits the memory bandwidth that they use while the model computes (cDMA, section V-C). None: all.
        device: the device whose tensors are moved. None: all CUDA devices; if torch sees no CUDA device, the CPU, whose
            saved tensors are kept compressed in host memory.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    if memory not in MEMORY:
        raise ValueError(f"memory is {memory!r}; wanted one of {list(MEMORY)}")
    least_bytes = whole_number("least_bytes", least_bytes, 0, 2**62)
    window_bytes = whole_number("window_bytes", window_bytes, 0, 2**62)
    if device_bytes is not None:
        device_bytes = whole_number("device_bytes", device_bytes, 0, 2**62)
    if device is None:
        of = None if torch.cuda.is_available() else torch.device("cpu")
    else:
        of = _memory.canonical(device)
    policy = ActivationPolicy(memory, bool(coded), device_bytes)
    return ActivationOffload(policy, least_bytes, window_bytes, sms_of(max_sms), of)
