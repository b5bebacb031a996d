"""The events of an offloaded model while it runs, in the order in which they occur during a call of a module:

    a module begins          `begin`, by a hook before each call of a module that uses weights
      a group is needed        `WeightFetcher.begin_use`: fetches the group if it was not fetched ahead
      its weights arrive       `CudaWeightFetcher._wait`: the caller's stream waits for them, the host does not
                             the model's tensors get the memory of the weights; the next groups are fetched ahead
    (the module computes)
    a module ends            `end`, by a hook after the call: the tensors rest (`resting.py`), which means that they
                             give up the memory, and other groups may use it
    an error                 `abandon`: ends the uses that an interrupted call of this thread has begun

Rows of an embedding (`hooks.py`), and experts that a router chooses (`experts.py`), are fetched without these events.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from .._common.locks import ForkLock
from .._common.modes import is_transformed, outside_of_modes
from . import hooks
from .fetcher import CudaWeightFetcher, Place, WeightFetcher
from .plan import Group, OffloadPlan
from .weights import Weight

# A call of a module that has begun but not ended: the module, the places of the groups that it uses, and the context of
# autograd's saved-tensor hooks (None: there are no hooks).
Call = tuple[nn.Module, Sequence[Place], Any]
Item = TypeVar("Item", bound=Hashable)


class Schedule(Generic[Item]):
    """Predicts which item is used next. If the two most recent items have been used in this order before, it predicts
    the item that followed them on the latest such occasion. Otherwise it predicts the item that followed the previous
    use of the most recent item.

    After one pass, a constant order is predicted without error. If the order changes, each new step is mispredicted
    once. If an item is used twice in a pass, the item before it tells the two uses apart. If a pair of successive items
    occurs twice in a pass, and different items follow it, both predictions are wrong in every pass.

    items: the items in the order that is expected for the first pass. Later passes are expected in this order, too,
        until another order is seen."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._after_one: dict[Item, Item] = {}
        self._after_two: dict[tuple[Item | None, Item], Item] = {}
        self._last: tuple[Item | None, Item | None] = (None, items[-1] if items else None)
        for number, item in enumerate(items):
            self._after_one[item] = items[(number + 1) % len(items)]

    def saw(self, item: Item) -> None:
        before, last = self._last
        if last is not None:
            self._after_one[last] = item
            self._after_two[before, last] = item
        self._last = last, item

    def coming(self) -> Iterator[Item]:
        """Yields the items that are expected to be used, the next item first. The iterator ends only if the successor
        of an item is not known."""
        before, last = self._last
        while last is not None:
            item = self._after_two.get((before, last), self._after_one.get(last))
            if item is None:
                return
            yield item
            before, last = last, item


class _ThreadState(threading.local):
    """State of the current thread: the calls of the model and of its modules that the thread is in."""

    def __init__(self) -> None:
        self.calls: list[Call] = []  # the calls that the thread is in, the innermost last
        self.is_running = False  # whether the thread is within a call of the whole model


class Events:
    """Handles the events of an offloaded model while it runs. Several threads may call the model at the same time.

    Args:
        plan: the plan that is carried out.
        max_sms, lookahead: as in `ibp.offload`.

    Attributes:
        lock: guards the places, and everything else that changes while the model runs.
        thread: the calls of the model and of its modules that the current thread is in.
        fetchers: the fetcher of each device, in the order of the plan's devices.
        places: for each group that is fetched, its `Place`: the memory that it has on its device.
        users: for each module that uses groups, the places of these groups.
        undo: functions that remove what was installed in the model. They are called from the last to the first.
        uses: number of times that a module used a group.
        first_use, last_use: time at which the first use began, and time at which a use last began or ended, in seconds
            by the host's clock.
    """

    def __init__(self, model: nn.Module, plan: OffloadPlan, max_sms: int | None, lookahead: int) -> None:
        self.lock, self.thread, self._lookahead = ForkLock(), _ThreadState(), lookahead
        self.fetchers = [
            (CudaWeightFetcher if device.type == "cuda" else WeightFetcher)(device, arena_bytes, max_sms)
            for device, arena_bytes in zip(plan.devices, plan.arena_bytes)
        ]
        self.places = {
            group: Place(group, self.fetchers[group.device_number]) for group in plan.groups if not group.stays
        }
        self.users: dict[nn.Module, list[Place]] = {}
        self.undo: list[Callable[[], object]] = []
        self._schedule: Schedule[Place] = Schedule(list(self.places.values()))
        # For each module, its parent. The model and its children have no entry.
        self._parents = {child: part for part in model.modules() if part is not model for child in part.children()}
        # For each weight that is read by a module other than its holder, the module that is assumed to read it.
        self._readers: dict[Weight, nn.Module] = {}
        self._uses_all_experts = False  # whether the last call of a mixture used all of its experts
        # Whether an expected group found no room in the arena. If so, groups are fetched ahead again when a use ends.
        self._is_short = False
        self.reset_counts()

    def reset_counts(self) -> None:
        self.uses, self.last_use = 0, 0.0
        self.first_use: float | None = None
        for fetcher in self.fetchers:
            fetcher.reset_counts()

    def start(self) -> None:
        """Called when the tables of all groups have been made. Fetches the first groups."""
        for fetcher in self.fetchers:
            fetcher.start([place for place in self.places.values() if place.fetcher is fetcher])
        self._fetch_ahead()

    def install_use(self, module: nn.Module, groups: Sequence[Group]) -> None:
        """Installs hooks in a module, so that each of its calls uses the given groups. Groups that stay on their
        devices need no hooks."""
        places = [self.places[group] for group in groups if group in self.places]
        if places:
            self.users[module] = places
            self.undo += hooks.on_calls(
                module, lambda *_: self.begin(module, self.users[module]), lambda *_: self.end(module)
            )

    def place_of(self, weight: Weight) -> Place | None:
        """Returns the place of a weight's group, or None if the weight is not fetched with a group."""
        return None if weight.group is None else self.places.get(weight.group)

    # ---- a module begins ----

    def begin(self, module: nn.Module, places: Sequence[Place]) -> None:
        """Fetches groups of weights for a call of a module, and gives the model's tensors the memory of these weights.
        If it raises an error, it ends the uses that it has begun.

        In a transform of torch.func nothing is fetched: the module computes with its resting weights, each of which is
        decoded when it is read. The reason is the backward pass. Other weights overwrite fetched weights after the
        call. A backward pass in such a transform could not decode the fetched weights again, because the transform does
        not support autograd's saved-tensor hooks."""
        with self.lock:
            if is_transformed():
                self.thread.calls.append((module, (), None))
                return
            saves = torch.is_grad_enabled()
            with outside_of_modes():
                begun: list[Place] = []
                try:
                    for place in places:
                        place.fetcher.begin_use(place)
                        begun.append(place)
                        self._note(place)
                except BaseException:
                    for place in begun:
                        place.fetcher.end_use(place)
                    raise
                for place in begun:
                    for weight, value in zip(place.group.weights, place.values):
                        weight.bind(value)
                self.thread.calls.append((module, begun, self._saving() if saves else None))
                self._fetch_ahead()

    def note_choice(self, place: Place) -> None:
        """Records a call of a mixture that uses only some of its experts. These experts are fetched by a cache, not
        with the group. From now on, groups of experts are not fetched ahead."""
        with self.lock:
            self._uses_all_experts = False
            self._note(place)

    @contextmanager
    def using_all(self, module: nn.Module, place: Place) -> Iterator[None]:
        """A context for a call of a mixture that uses all of its experts. Entering it switches on fetching groups of
        experts ahead, until `note_choice` switches it off."""
        with self.lock:
            self._uses_all_experts = True
            self.begin(module, [place])
        try:
            yield
        finally:
            self.end(module)

    def _note(self, place: Place) -> None:
        """Records a use of a group."""
        self._schedule.saw(place)
        self.uses += 1
        self.last_use = time.perf_counter()
        if self.first_use is None:
            self.first_use = self.last_use

    def _fetch_ahead(self) -> None:
        """Fetches ahead, for each device, the next groups that are expected to be used there, as long as the arena has
        room."""
        if not self._lookahead:
            return
        left, expected = [self._lookahead] * len(self.fetchers), []
        for place in itertools.islice(self._schedule.coming(), len(self.places)):
            if not any(left):
                break
            number, is_fetched = place.group.device_number, self._uses_all_experts or not place.group.are_experts
            if left[number] and is_fetched and not place.uses and place not in expected:
                left[number] -= 1
                expected.append(place)
        self._is_short = False
        for fetcher in self.fetchers:
            if not fetcher.fetch_ahead([place for place in expected if place.fetcher is fetcher]):
                self._is_short = True

    # ---- a module ends ----

    def end(self, module: nn.Module) -> None:
        """Ends the latest call of a module. If the call has failed to begin, does nothing."""
        with self.lock:
            calls = self.thread.calls
            if calls and calls[-1][0] is module:  # otherwise the call failed to begin
                with outside_of_modes():
                    self._end(calls.pop())
                    if self._is_short:
                        self._fetch_ahead()

    def _end(self, call: Call) -> None:
        _, places, saving = call
        if saving is not None:
            saving.__exit__()
        for place in places:
            place.fetcher.end_use(place)
            if place.uses == 0:
                for weight in place.group.weights:
                    weight.rest()
        self.last_use = time.perf_counter()

    # ---- an error ----

    def abandon(self) -> None:
        """Ends the uses that this thread has begun and not ended. There are such uses after a KeyboardInterrupt,
        because torch then runs no hooks."""
        with self.lock, outside_of_modes():
            while self.thread.calls:
                self._end(self.thread.calls.pop())

    # ---- a call of the whole model ----

    def begin_model(self, *_: Any) -> None:
        """Prepares for a call of the whole model. Such calls do not nest. If this thread has uses that have not ended,
        an earlier call was interrupted, and these uses are ended here."""
        if self.thread.calls:
            self.abandon()
        self.thread.is_running = True

    def end_model(self, *_: Any) -> None:
        self.thread.is_running = False

    # ---- reads of weights by others ----

    def read(self, weight: Weight) -> torch.Tensor:
        """Returns the values of a weight that is read between uses, in newly allocated memory. While the model runs,
        the reader is assumed to be the parent of the module that was last known to use the weight; the next calls of
        that parent fetch the weight."""
        with self.lock:
            reader = self._parents.get(self._readers.get(weight, weight.holders[0][0]))
            place = self.place_of(weight)
            is_running = self.thread.is_running and not is_transformed()
            if is_running and reader is not None and place is not None:
                self._readers[weight] = reader
                if reader not in self.users:
                    self.install_use(reader, [place.group])
                elif place not in self.users[reader]:
                    self.users[reader] = [*self.users[reader], place]
        return weight.value(weight.device)

    def _saving(self) -> Any:
        """Installs saved-tensor hooks. With them, autograd saves a function that decodes a weight, instead of the
        weight's memory, which other weights will overwrite. Returns torch's context of the hooks; its `__exit__`
        removes them."""
        saving = torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked)
        saving.__enter__()
        return saving

    def _packed(self, tensor: torch.Tensor) -> Any:
        """Returns what autograd saves for a tensor. For a part of a loaded weight, this is a function that decodes the
        part; for any other tensor, it is the tensor itself."""
        with self.lock:
            for fetcher in self.fetchers:
                found = fetcher.find(tensor) if fetcher.device == tensor.device else None
                if found is not None:
                    weight, start = found
                    shape = tensor.size(), tensor.stride(), start // tensor.itemsize
                    return functools.partial(_decoded, weight, tensor.device, tensor.dtype, shape)
        return tensor


def _decoded(
    weight: Weight, device: torch.device, dtype: torch.dtype, shape: tuple[torch.Size, tuple[int, ...], int]
) -> torch.Tensor:
    """Decodes a weight and returns a part of it. shape: the shape, strides and offset of the part, as
    `Tensor.as_strided` takes them."""
    return weight.data(device).view(dtype).as_strided(*shape)


def _unpacked(saved: Any) -> torch.Tensor:
    return saved() if isinstance(saved, functools.partial) else saved
