"""Decides which saved tensors are moved off the device, and in which form. Regions that have the same number in
different passes share a codebook. A budget, if there is one, limits the bytes that may stay on the device.

The regions that one forward pass saves, and the order in which the backward pass needs them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._machine import calibration
from .._rows.codebook import coder_rates
from .._rows.faults import Faults
from .._rows.learning import Learner
from . import coding
from .coding import SpanView

# The modes of a region, in this order: not moved; encoded, on the device; raw, on the host; encoded, on the host.
KEEP, DEVICE, RAW, CODED = "keep", "device", "raw", "coded"
_LEAST_SAVED = 0.05  # least fraction of the bytes that encoding must save to be worth the time that it takes


@dataclass(frozen=True)
class OffloadOptions:
    """The arguments of `offload_activations`."""

    memory: str
    coded: bool
    device_bytes: int | None
    window_bytes: int
    max_sms: int = 0  # 0: all


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

    def __init__(self, options: OffloadOptions) -> None:
        self._options = options
        # The learners of recipes, keyed by a region's number, dtype and device.
        self._learners: defaultdict[tuple[int, torch.dtype, torch.device], Learner[coding.ActivationRecipe]]
        self._learners = defaultdict(Learner)
        self._sizes: dict[torch.device, list[_RegionSize]] = {}
        self._staying: set[tuple[torch.device, int]] = set()
        self.is_settled = False

    def begin_pass(self, was_used: bool) -> None:
        """Begins a pass. was_used: True if the backward pass of the previous pass has begun and all regions of that
        pass have been destroyed."""
        if was_used:
            self.is_settled = True
            self._staying = {(device, k) for device, sizes in self._sizes.items() for k in self._that_fit(sizes)}
        self._sizes = {}

    def _that_fit(self, sizes: list[_RegionSize]) -> list[int]:
        """Returns the numbers of the regions that stay on the device. The most compressible regions are moved first,
        until the others fit in the budget."""
        assert self._options.device_bytes is not None
        left, staying = sum(size.num_bytes for size in sizes), []
        for size in sorted(sizes):
            if left <= self._options.device_bytes:
                staying.append(size.number)
            left -= (size.num_bytes - size.left_bytes) * (left > self._options.device_bytes)
        return staying

    def choose(
        self, number: int, data: torch.Tensor, view: SpanView, passes: int
    ) -> tuple[str, coding.ActivationRecipe | None]:
        """Returns (mode, recipe) for a region.

        Args:
            number: the number of the region in its pass.
            data: uint8 [num_bytes].
            view: describes a tensor in the region.
            passes: number of passes that have begun.
        """
        recipe = self._recipe(number, data, view, passes) if self._options.coded else None
        mode = self._mode(recipe, data.device)
        if self._options.device_bytes is not None:
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

    def _recipe(self, number: int, data: torch.Tensor, view: SpanView, passes: int) -> coding.ActivationRecipe | None:
        """Returns the recipe that all regions with this number share, or None if the region stays raw. The recipe is
        learned when the first of these regions is saved. If no recipe was found, or if encoded sizes have grown since,
        it is learned again once the number of passes has doubled."""
        learner = self._learners[number, view.dtype, data.device]
        if learner.found is not None:
            learner.note(learner.found.needed_share, 1)
        if learner.is_due(passes + 1):
            recipe = coding.learn(data, view)
            learner.take(recipe, None if recipe is None else recipe.needed_share, passes + 1)
        recipe = learner.found
        return recipe if recipe is None or recipe.takes(data.numel()) else None

    def _mode(self, recipe: coding.ActivationRecipe | None, device: torch.device) -> str:
        """Returns the mode of a region if there is no budget. On the CPU, and with memory="device", the mode is DEVICE
        if encoding saves more than _LEAST_SAVED, and otherwise KEEP. On a GPU it is CODED if encoding and decoding take
        less time than the link would take to move the saved bytes out and back, and otherwise RAW."""
        saved = 0.0 if recipe is None else 1 - recipe.coded_share
        if device.type == "cpu" or self._options.memory == "device":
            return DEVICE if saved > _LEAST_SAVED else KEEP
        if recipe is None:
            return RAW
        machine = calibration.in_force(device)
        rates = coder_rates(recipe.codebook, machine)
        link_ns = saved * (1 / machine.copy_out_gbps + 1 / machine.copy_in_gbps)
        return CODED if link_ns > 1 / rates.encode_gbps + 1 / rates.decode_gbps else RAW


if TYPE_CHECKING:
    from .region import SavedRegion
    from .transfers import PieceTransfers


class ForwardPass:
    """One forward pass and the regions that it saved.

    Args:
        order: numbers of the regions in the order in which the previous backward pass used them. Empty: regions are
            expected in the reverse order of saving.
        transfers: the transfers of each device.
        faults: receives the faults that decoders find.
        note_outgrown: a function that is called for each region or piece that compressed worse than expected, with its
            size in bytes before encoding.
    """

    def __init__(
        self,
        order: list[int],
        transfers: Mapping[torch.device, PieceTransfers],
        faults: Faults,
        note_outgrown: Callable[[int], None],
    ) -> None:
        self.faults, self.note_outgrown = faults, note_outgrown
        self.numbers = 0  # number of regions so far, including those that are not moved; also the next region's number
        self.is_used = False  # whether a saved tensor has been read since the pass began
        self.uses: list[int] = []  # numbers of regions in the order of their first use
        self._order, self._transfers = order, transfers
        self._positions = {number: position for position, number in enumerate(order)}
        self._regions: dict[int, weakref.ref[SavedRegion]] = {}
        self._ended: deque[int] = deque()  # numbers of regions that have been destroyed
        # For each device, the position in `order` from which regions are fetched next.
        self._next: dict[PieceTransfers, int] = {}

    @property
    def alive(self) -> int:
        """Number of regions that may still be read."""
        return len(self._regions) - len(self._ended)

    def take_number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def add(self, region: SavedRegion) -> None:
        self._regions[region.number] = weakref.ref(region)

    def note_end(self, region: SavedRegion) -> None:
        """Records that a region is destroyed, which may happen at any time and in any thread."""
        self._ended.append(region.number)

    def note_use(self, region: SavedRegion) -> None:
        if region.uses == 0:
            self.uses.append(region.number)

    def prefetch(self, region: SavedRegion, first: int) -> None:
        """Starts to bring back the pieces of a region, beginning with piece number `first`, and then the regions that
        are expected to be used after it."""
        transfers = region.transfers
        if transfers is None or not transfers.fetch_region(region, first):
            return
        position = self._positions.get(region.number) if self._order else self.numbers - 1 - region.number
        if position is not None and (position >= self._next.get(transfers, 0) or region.uses > region.saves):
            self._next[transfers] = position + 1
        self._fetch_on(transfers)

    def start(self) -> None:
        """Records that the backward pass begins, and starts to bring back the regions that it needs first."""
        self.is_used = True
        for transfers in self._transfers.values():
            transfers.begin_backward()
            self._fetch_on(transfers)

    def _fetch_on(self, transfers: PieceTransfers) -> None:
        """Starts to bring back the next regions of a device, in the expected order, until the window is full."""
        numbers, position = self._order or range(self.numbers - 1, -1, -1), self._next.get(transfers, 0)
        while position < len(numbers):
            found = self._regions.get(numbers[position])
            region = None if found is None else found()
            if region is not None and region.transfers is transfers and not transfers.fetch_region(region, 0):
                break
            position += 1
        self._next[transfers] = position
