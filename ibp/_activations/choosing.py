"""What becomes of a region: codebooks by the place in a pass at which it is saved, and the plan of a budget."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from .._machine import calibration
from . import coding, planning
from .planning import CODED, DEVICE, HOLD, KEEP, RAW, Clock, Link, Recorder
from .spans import View

_LEAST_SAVED = 0.05  # of the bytes; less is not worth coding
_CHANGED = 0.1  # of the bytes that a pass saves: then the plan is made anew
_HELD = 1.1  # bytes of free device memory for each saved byte, with which a pass is measured that sends nothing
_LEARNING, _SETTLING, _MEASURING, _COMPARING, _TRYING, _PLANNED = range(6)
_TIMED_PASSES = 3  # of a plan; the one before them, in which memory is taken, does not count
_VARIATION = 0.9  # of a slowdown that passes may show, as later steps vary
_MOST_CORRECTIONS = 4
_LEAST_FREED = 0.02  # of the bytes that a pass saves, by a plan that is to free some within a slowdown
_LOOK = 4  # times as many passes, after which one has hooks again to see what it saves
_LEAST_RISE, _LEAST_DRAG = 1.5, 0.02  # of the drag, from one correction to the next


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


class _Plan:
    """What becomes of the regions of a device. numbers: of the timeline's items."""

    def __init__(self, recorder: Recorder, link: Link | None, budget: Budget) -> None:
        self.timeline, self.numbers = recorder.timeline()
        self._link, self._slowdown, self._device_bytes = link, budget.slowdown, budget.device_bytes
        if self._device_bytes is not None:
            self._device_bytes = max(0, self._device_bytes - recorder.kept_bytes)
        self.modes: list[str] = []
        self.make()

    def make(self) -> None:
        self.modes = planning.plan(self.timeline, self._link, device_bytes=self._device_bytes, slowdown=self._slowdown)
        if self._slowdown is not None and not self._is_worth_hooks():
            self.drop()

    def _is_worth_hooks(self) -> bool:
        """Whether it lowers the peak of memory by more than a little."""
        total = sum(item.num_bytes for item in self.timeline.items)
        peak = self.timeline.predict(self.modes, self._link or planning.NO_LINK).peak_bytes
        return total - peak > _LEAST_FREED * total

    def correct(self, excess_ms: float) -> None:
        """Makes it anew, where steps took so much longer than without it."""
        link = self._link or planning.NO_LINK
        busy, drag = self.timeline.busy(self.modes, link), self.timeline.drag
        if busy == 0:
            return
        self.timeline.drag = 0.0
        unexplained = excess_ms - (self.timeline.step(self.modes, link) - self.timeline.computing)
        self.timeline.drag = max(unexplained / busy, _LEAST_RISE * drag, _LEAST_DRAG)
        self.make()

    @property
    def is_empty(self) -> bool:
        return all(mode == KEEP for mode in self.modes)

    def drop(self) -> None:
        self.modes = [KEEP] * len(self.modes)


class _Trial:
    """Times of a few passes."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = []

    @property
    def is_running(self) -> bool:
        return len(self._clocks) <= _TIMED_PASSES

    def add(self, clock: Clock) -> None:
        self._clocks.append(clock)

    def ms(self) -> float | None:
        """The median; None: it is not known yet."""
        found = [clock.ms() for clock in self._clocks[1:]]
        return None if self.is_running or None in found else statistics.median(ms for ms in found if ms is not None)


class Chooser:
    """Learns in the first pass. Where there is a budget it measures the third, when the allocator has what the second
    needed, and then follows its plan. That of a budget of time is compared with passes in which nothing leaves, and
    corrected where it takes longer than allowed; where that does not help, nothing leaves."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._recipes: dict[tuple[int, torch.dtype, torch.device], tuple[coding.Recipe | None, int]] = {}
        self._plans: dict[torch.device, _Plan] = {}
        self._modes: dict[tuple[int, torch.device], str] = {}
        self._phase, self._planned_bytes, self._next_plan = _LEARNING, 0, 0
        self._holds = False
        self._trial, self._plain_ms, self._corrections = _Trial(), 0.0, 0
        self._clock: Clock | None = None
        self._shares_context = False

    @property
    def is_measuring(self) -> bool:
        return self._phase == _MEASURING

    @property
    def is_settled(self) -> bool:
        return self._phase == _PLANNED if self._budget.is_bounded else self._phase != _LEARNING

    def note_shared_context(self) -> None:
        """Says that several passes run in one context, which has hooks in all of them or in none."""
        self._shares_context = True

    def is_bare(self, passes: int) -> bool:
        """Whether the pass that begins runs without hooks: others are compared with it, or nothing leaves."""
        if self._shares_context:
            return False
        is_empty = self._phase == _PLANNED and all(plan.is_empty for plan in self._plans.values())
        return self._phase == _COMPARING or (is_empty and self._budget.is_bounded and passes < self._next_plan)

    def start_clock(self) -> None:
        """Times the pass that begins, where that is of use: until the next one begins."""
        is_timed = self._phase in (_COMPARING, _TRYING) and self._trial.is_running
        self._clock = Clock(self._plans) if is_timed and not _is_capturing() else None

    def take_clock(self) -> Clock | None:
        """Of the pass that has ended; None: it was not timed."""
        clock, self._clock = self._clock, None
        if clock is None or _is_capturing():
            return None
        clock.stop()
        return clock

    def choose(self, number: int, data: torch.Tensor, view: View, passes: int) -> tuple[str, coding.Recipe | None]:
        """(mode, recipe) of a region that is the number-th of its pass, uint8 [num_bytes]. view: of a tensor in it."""
        recipe = self._recipe(number, data, view, passes) if self._budget.coded else None
        if self._phase == _COMPARING:
            return KEEP, None
        if self._holds and data.is_cuda:
            return HOLD, recipe
        mode = self._modes.get((number, data.device)) if self._phase in (_TRYING, _PLANNED) else None
        if mode is None or (recipe is None and mode in (CODED, DEVICE)):
            mode = self._unbounded(recipe, data.device)
        return mode, recipe if mode in (CODED, DEVICE) else None

    def _recipe(self, number: int, data: torch.Tensor, view: View, passes: int) -> coding.Recipe | None:
        """Learned when a region is first saved there, and again, at growing distances, where it does not serve."""
        key = number, view.dtype, data.device
        recipe, next_pass = self._recipes.get(key, (None, 0))
        if (recipe is None or recipe.is_outdated) and passes >= next_pass:
            recipe = coding.learn(data, view)
            self._recipes[key] = recipe, 2 * passes + 1
        return recipe if recipe is None or recipe.takes(data.numel()) else None

    def _unbounded(self, recipe: coding.Recipe | None, device: torch.device) -> str:
        """The mode where everything is to leave: coded where that takes less time than the link takes for the bytes
        that it saves."""
        saved = 0.0 if recipe is None else 1 - recipe.needed_share / recipe.times_narrower
        if device.type == "cpu" or self._budget.to == "device":
            return DEVICE if saved > _LEAST_SAVED else KEEP
        machine = calibration.in_force(device)
        link_ns = saved * (1 / machine.copy_out_gbps + 1 / machine.copy_in_gbps)
        return CODED if recipe is not None and link_ns > coding.coder_ns(recipe.codebook, machine) else RAW

    # ---- budgets ----

    def note_pass(
        self, num_bytes: int | None, recorders: dict[torch.device, Recorder], clock: Clock | None, passes: int
    ) -> None:
        """Says that all of a pass was used: its saved bytes, None without hooks, and what was measured."""
        if not self._budget.is_bounded:
            self._phase = _SETTLING
        elif self._phase == _LEARNING:
            self._settle(num_bytes or 0)
        elif self._phase == _SETTLING:
            self._phase = _MEASURING
        elif self._phase == _MEASURING:
            if any(recorder.uses for recorder in recorders.values()):
                self._planned_bytes, self._next_plan = num_bytes or 0, _LOOK * passes
                self._plan(recorders)
        elif num_bytes is not None and passes >= self._next_plan:
            self._next_plan = _LOOK * passes
            if abs(num_bytes - self._planned_bytes) > _CHANGED * self._planned_bytes:
                self._settle(num_bytes)
        elif self._phase != _PLANNED:
            self._note_time(clock)

    def _settle(self, num_bytes: int) -> None:
        """Before a pass is measured: without copies, which the host would wait for, if there is memory for that."""
        self._phase, self._corrections = _SETTLING, 0
        free = [_free_bytes(index) for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized()]
        self._holds = bool(free) and min(free) > _HELD * num_bytes

    def _plan(self, recorders: dict[torch.device, Recorder]) -> None:
        self._plans = {
            device: _Plan(recorder, self._link(device), self._budget)
            for device, recorder in recorders.items()
            if recorder.uses
        }
        self._plain_ms = max(plan.timeline.computing for plan in self._plans.values())
        if self._budget.slowdown is None:
            self._follow(_PLANNED)
        else:
            compared = self._holds or all(device.type == "cpu" for device in self._plans)
            self._follow(_COMPARING if compared else _TRYING)
        self._holds = False

    def _follow(self, phase: int) -> None:
        """Takes plans as they are by now. phase: what follows."""
        self._modes = {
            (number, device): mode
            for device, plan in self._plans.items()
            for number, mode in zip(plan.numbers, plan.modes)
        }
        self._phase, self._trial = phase, _Trial()

    def _note_time(self, clock: Clock | None) -> None:
        """Goes on once the passes of a trial were timed."""
        if clock is not None:
            self._trial.add(clock)
        ms = self._trial.ms()
        if ms is None:
            return
        if self._phase == _COMPARING:
            self._plain_ms = ms
            self._follow(_TRYING)
        else:
            self._correct(ms)

    def _correct(self, ms: float) -> None:
        """Makes plans anew whose passes take longer than allowed; after some times nothing leaves."""
        assert self._budget.slowdown is not None
        plans = self._plans.values()
        limit = self._plain_ms * (1 + _VARIATION * self._budget.slowdown)
        if ms <= limit or all(plan.is_empty for plan in plans):
            self._phase = _PLANNED
            return
        self._corrections += 1
        for plan in plans:
            if self._corrections > _MOST_CORRECTIONS:
                plan.drop()
            else:
                plan.correct(ms - self._plain_ms)
        self._follow(_PLANNED if all(plan.is_empty for plan in plans) else _TRYING)

    def _link(self, device: torch.device) -> Link | None:
        if device.type == "cpu" or self._budget.to == "device":
            return None
        machine = calibration.in_force(device)
        return Link(machine.copy_out_gbps, machine.copy_in_gbps, self._budget.window_bytes)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _free_bytes(index: int) -> int:
    """Of a CUDA device's memory, what nobody has and what torch's allocator has to give."""
    if not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
        return 2**63 - 1
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
