"""What becomes of a region: codebooks by the place in a pass at which it is saved, and the plan of a budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _calibration
from . import coding, planning
from .planning import CODED, DEVICE, HOLD, KEEP, RAW, Link, Recorder

_LEAST_SAVED = 0.05  # of the bytes; less is not worth coding
_CHANGED = 0.1  # of the bytes that a pass saves: then the plan is made anew
_HELD = 1.1  # bytes of free device memory for each saved byte, with which a pass is measured that sends nothing
_LEARNING, _SETTLING, _MEASURING, _PLANNED = range(4)


@dataclass(frozen=True)
class Budget:
    """Arguments of `offload_activations`."""

    to: str
    coded: bool
    device_bytes: int | None
    slowdown: float | None
    window_bytes: int

    @property
    def is_bounded(self) -> bool:
        return self.device_bytes is not None or self.slowdown is not None


class Chooser:
    """Learns in the first pass. Where there is a budget it measures the third, when the allocator has what the second
    needed, and then follows its plan."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._recipes: dict[tuple[int, torch.dtype, torch.device], tuple[coding.Recipe | None, int]] = {}
        self._plans: dict[tuple[int, torch.device], str] = {}
        self._phase, self._planned_bytes, self._next_plan = _LEARNING, 0, 0
        self._holds = False

    @property
    def is_measuring(self) -> bool:
        return self._phase == _MEASURING

    def choose(
        self, number: int, data: torch.Tensor, dtype: torch.dtype, passes: int
    ) -> tuple[str, coding.Recipe | None]:
        """(mode, recipe) of a region that is the number-th of its pass, uint8 [num_bytes] of elements of dtype."""
        recipe = self._recipe(number, data, dtype, passes) if self._budget.coded else None
        if self._holds and data.is_cuda:
            return HOLD, recipe
        mode = self._plans.get((number, data.device)) if self._phase == _PLANNED else None
        if mode is None or (recipe is None and mode in (CODED, DEVICE)):
            mode = self._unbounded(recipe, data.device)
        return mode, recipe if mode in (CODED, DEVICE) else None

    def _recipe(self, number: int, data: torch.Tensor, dtype: torch.dtype, passes: int) -> coding.Recipe | None:
        """Learned when a region is first saved there, and again, at growing distances, where it does not serve."""
        key = number, dtype, data.device
        recipe, next_pass = self._recipes.get(key, (None, 0))
        if (recipe is None or recipe.is_outdated) and passes >= next_pass:
            recipe = coding.learn(data, dtype)
            self._recipes[key] = recipe, 2 * passes + 1
        return recipe

    def _unbounded(self, recipe: coding.Recipe | None, device: torch.device) -> str:
        """The mode where everything is to leave: coded where that takes less time than the link takes for the bytes
        that it saves."""
        saved = 0.0 if recipe is None else 1 - recipe.needed_share
        if device.type == "cpu" or self._budget.to == "device":
            return DEVICE if saved > _LEAST_SAVED else KEEP
        machine = _calibration.in_force(device)
        link_ns = saved * (1 / machine.copy_out_gbps + 1 / machine.copy_in_gbps)
        return CODED if recipe is not None and link_ns > coding.coder_ns(recipe.codebook, machine) else RAW

    # ---- budgets ----

    def note_pass(self, num_bytes: int, recorders: dict[torch.device, Recorder], passes: int) -> None:
        """Says that all of a pass was used: its saved bytes, and what was measured."""
        if not self._budget.is_bounded:
            return
        if self._phase == _LEARNING:
            self._settle(num_bytes)
        elif self._phase == _SETTLING:
            self._phase = _MEASURING
        elif self._phase == _MEASURING and any(recorder.uses for recorder in recorders.values()):
            self._plans = {}
            for device, recorder in recorders.items():
                if recorder.uses:
                    self._plan(device, recorder)
            self._phase, self._planned_bytes, self._next_plan = _PLANNED, num_bytes, 2 * passes
            self._holds = False
        elif self._phase == _PLANNED and passes >= self._next_plan:
            if abs(num_bytes - self._planned_bytes) > _CHANGED * self._planned_bytes:
                self._settle(num_bytes)

    def _settle(self, num_bytes: int) -> None:
        """Before a pass is measured: without copies, which the host would wait for, if there is memory for that."""
        self._phase = _SETTLING
        free = [_free_bytes(index) for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized()]
        self._holds = bool(free) and min(free) > _HELD * num_bytes

    def _plan(self, device: torch.device, recorder: Recorder) -> None:
        timeline, numbers = recorder.timeline()
        device_bytes = self._budget.device_bytes
        if device_bytes is not None:
            device_bytes = max(0, device_bytes - recorder.kept_bytes)
        modes = planning.plan(timeline, self._link(device), device_bytes=device_bytes, slowdown=self._budget.slowdown)
        self._plans.update({(number, device): mode for number, mode in zip(numbers, modes)})

    def _link(self, device: torch.device) -> Link | None:
        if device.type == "cpu" or self._budget.to == "device":
            return None
        machine = _calibration.in_force(device)
        return Link(machine.copy_out_gbps, machine.copy_in_gbps, self._budget.window_bytes)


def _free_bytes(index: int) -> int:
    """Of a CUDA device's memory, what nobody has and what torch's allocator has to give."""
    if not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
        return 2**63 - 1
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
