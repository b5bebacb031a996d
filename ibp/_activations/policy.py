"""Decides which saved tensors are moved off the device, and in which form. Regions that have the same number in
different passes share a codebook. A budget, if there is one, limits the bytes that may stay on the device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._machine import calibration
from .._schemes.codebook import coder_rates
from .._schemes.learning import Learner
from . import coding
from .spans import SpanView

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
