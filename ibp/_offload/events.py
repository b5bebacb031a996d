"""What happens in an offloaded model while it runs. `Events` handles the events of the model. `install` installs hooks
and forwards in the model's modules, which call `Events`. `ExpertsForward` is the forward of a mixture of experts.

The events, in the order in which they occur during a call of a module, and the code that handles them:

    a module begins          `Events.begin`, by a hook before each call of a module that uses weights (`on_calls`)
      a group is needed        `WeightFetcher.begin_use`: fetches the group if it was not fetched ahead
      its weights arrive       `CudaWeightFetcher._wait`: the caller's stream waits for them, the host does not
                             the model's tensors get the memory of the weights; the next groups, which `Schedule`
                             predicts, are fetched ahead
    (the module computes)
    a module ends            `Events.end`, by a hook after the call: the tensors rest (`weights.py`), which means that
                             they give up the memory, and other groups may use it
    an error                 `Events.abandon`: ends the uses that an interrupted call of this thread has begun

Two kinds of modules have another forward, which fetches single rows or experts without these events:

    an embedding is called   `looking_up`: the original forward looks the rows up in the table, which fetches only them
    experts are called       `ExpertsForward.call`
      for few tokens           `Events.note_choice`; fetches only the experts that the router chose, by one operation
                               (`StackFetcher`), through a cache for each stacked weight
      for many tokens          `Events.using_all`: the module begins and ends as above, with the group of all experts

Other hooks do not fetch groups:

    the model is called      `Events.begin_model` and `Events.end_model`
    a module is called       `on_moves`, if there are several devices: moves the arguments to the module's device
    state_dict() is called   `on_states`: returns the values of the weights that rest

A stacked weight is one tensor with the weights of all experts. In its table, an expert is a fixed number of consecutive
rows. The experts of a call are decoded into slots, with which the module's original forward computes
(`nn/_experts.py`). The CPU decodes all stacked weights first. The host never waits for the GPU. A GPU fetches experts
on a separate stream; the caller's stream waits for a stacked weight only when the forward first reads the weight. So
`down_proj` is fetched while `gate_up_proj` is multiplied.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from .._common.modes import cannot_record, is_transformed, outside_of_graphs, outside_of_modes
from .._common.process import ForkLock
from .._fetch.calls import checked_ids
from .._fetch.streaming import STREAM_SMS
from ..cache import RowCache
from ..cache._stacks import StackFetcher
from ..nn._experts import Calls, are_few, num_slots_for, slots_for, stand_in
from ..nn._tables import CodedModule, guard_conversions
from .fetcher import CudaWeightFetcher, WeightFetcher
from .plan import OffloadPlan
from .weights import Group, Weight, refuse_copy, refuse_pickle

# A call of a module that has begun but not ended: the module, the groups that it uses, and the context of autograd's
# saved-tensor hooks, or None if the call needs no such hooks.
Call = tuple[nn.Module, Sequence[Group], Any]
_BESIDE_ROWS = 512  # size in bytes that is enough for the map and the counters of a cache of one row


# ---- the order of uses ----


class Schedule:
    """Predicts which group is used next. If the two most recent groups have been used in this order before, it predicts
    the group that followed them on the latest such occasion. Otherwise it predicts the group that followed the previous
    use of the most recent group.

    After one pass, a constant order is predicted without error. If the order changes, each new step is mispredicted
    once. If a group is used twice in a pass, the group before it tells the two uses apart. If a pair of successive
    groups occurs twice in a pass, and different groups follow it, both predictions are wrong in every pass.

    groups: the groups in the order that is expected for the first pass. Later passes are expected in this order, too,
        until another order is seen."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._after_one: dict[Group, Group] = {}
        self._after_two: dict[tuple[Group | None, Group], Group] = {}
        self._last: tuple[Group | None, Group | None] = (None, groups[-1] if groups else None)
        for number, group in enumerate(groups):
            self._after_one[group] = groups[(number + 1) % len(groups)]

    def saw(self, group: Group) -> None:
        """Records that a group is used."""
        before, last = self._last
        if last is not None:
            self._after_one[last] = group
            self._after_two[before, last] = group
        self._last = last, group

    def coming(self) -> Iterator[Group]:
        """Yields the groups that are expected to be used, the next group first. The iterator ends only if the successor
        of a group is not known."""
        before, last = self._last
        while last is not None:
            group = self._after_two.get((before, last), self._after_one.get(last))
            if group is None:
                return
            yield group
            before, last = last, group


# ---- events ----


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
        lock: guards the groups, and everything else that changes while the model runs.
        thread: the calls of the model and of its modules that the current thread is in.
        fetchers: the fetcher of each device, in the order of the plan's devices.
        groups: the groups that are fetched. The others stay on their devices.
        users: for each module that uses such groups, these groups.
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
        self.groups = [group for group in plan.groups if not group.stays]
        self.users: dict[nn.Module, list[Group]] = {}
        self._schedule = Schedule(self.groups)
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
        for number, fetcher in enumerate(self.fetchers):
            fetcher.start([group for group in self.groups if group.device_number == number])
        self._fetch_ahead()

    def install_use(self, module: nn.Module, groups: Sequence[Group]) -> None:
        """Installs hooks in a module, so that each of its calls uses the given groups. Groups that stay on their
        devices need no hooks."""
        fetched = [group for group in groups if not group.stays]
        if fetched:
            self.users[module] = fetched
            on_calls(module, lambda *_: self.begin(module, self.users[module]), lambda *_: self.end(module), self)

    # ---- a module begins ----

    def begin(self, module: nn.Module, groups: Sequence[Group]) -> None:
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
                begun: list[Group] = []
                try:
                    for group in groups:
                        self.fetchers[group.device_number].begin_use(group)
                        begun.append(group)
                        self._note(group)
                except BaseException:
                    for group in begun:
                        self.fetchers[group.device_number].end_use(group)
                    raise
                for group in begun:
                    for weight, value in zip(group.weights, group.values):
                        weight.bind(value)
                saving = None
                if saves:
                    # With these hooks, autograd saves a function that decodes a weight, instead of the weight's memory,
                    # which other weights will overwrite. `_end` removes the hooks.
                    saving = torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked)
                    saving.__enter__()
                self.thread.calls.append((module, begun, saving))
                self._fetch_ahead()

    def note_choice(self, group: Group) -> None:
        """Records a call of a mixture that uses only some of its experts. These experts are fetched by a cache, not
        with the group. From now on, groups of experts are not fetched ahead."""
        with self.lock:
            self._uses_all_experts = False
            self._note(group)

    @contextmanager
    def using_all(self, module: nn.Module, group: Group) -> Iterator[None]:
        """A context for a call of a mixture that uses all of its experts. Entering it switches on fetching groups of
        experts ahead, until `note_choice` switches it off."""
        with self.lock:
            self._uses_all_experts = True
            self.begin(module, [group])
        try:
            yield
        finally:
            self.end(module)

    def _note(self, group: Group) -> None:
        """Records a use of a group."""
        self._schedule.saw(group)
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
        for group in itertools.islice(self._schedule.coming(), len(self.groups)):
            if not any(left):
                break
            number, is_fetched = group.device_number, self._uses_all_experts or not group.are_experts
            if left[number] and is_fetched and not group.uses and group not in expected:
                left[number] -= 1
                expected.append(group)
        self._is_short = False
        for number, fetcher in enumerate(self.fetchers):
            if not fetcher.fetch_ahead([group for group in expected if group.device_number == number]):
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
        """Ends the uses of a call. Weights that no other call uses rest."""
        _, groups, saving = call
        if saving is not None:
            saving.__exit__()
        for group in groups:
            self.fetchers[group.device_number].end_use(group)
            if group.uses == 0:
                for weight in group.weights:
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
            group = weight.group
            is_running = self.thread.is_running and not is_transformed()
            if is_running and reader is not None and group is not None and not group.stays:
                self._readers[weight] = reader
                if reader not in self.users:
                    self.install_use(reader, [group])
                elif group not in self.users[reader]:
                    self.users[reader] = [*self.users[reader], group]
        return weight.value(weight.device)

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
    """Returns the tensor for which `Events._packed` returned `saved`."""
    return saved() if isinstance(saved, functools.partial) else saved


# ---- hooks ----


def install(model: nn.Module, plan: OffloadPlan, events: Events) -> list[ExpertsForward]:
    """Installs the hooks and forwards that the plan asks for. Returns the new forwards of those mixtures of experts
    whose experts are fetched on demand."""
    for module, groups in plan.users.items():
        events.install_use(module, groups)
    for module in plan.lookups:
        weights = plan.held[module]
        if all(weight.table is not None for weight in weights.values()):
            instead_of_forward(module, looking_up(module, weights), events)
    experts = [ExpertsForward(module, plan, group, events) for module, group in plan.experts.items() if not group.stays]
    for forward in experts:
        instead_of_forward(forward.module, forward.call, events)
    on_calls(model, events.begin_model, events.end_model, events)
    if len(plan.devices) > 1:
        within = {part for block in plan.blocks for part in block.modules()}
        outside = [
            module
            for module in plan.device_numbers
            if module not in within
            and (any(True for _ in module.parameters(recurse=False)) or isinstance(module, CodedModule))
        ]
        for module in (*plan.blocks, *outside):
            on_moves(module, plan.devices[plan.device_numbers[module]], events)
    for module, weights in plan.held.items():
        if any(weight.table is not None for weight in weights.values()):
            on_states(module, weights, events)
    guard_conversions(model)
    return experts


def remove_all(model: nn.Module, modules: Iterable[nn.Module], events: Events) -> None:
    """Removes what `install` and `Events.install_use` have installed in a model, even if they were interrupted. The
    function searches the modules for hooks, because an interrupted call may have lost the handles that remove them.
    Hooks that another `Events` has installed stay.

    Args:
        modules: the modules that the model had at the time of `install`.
        events: what was given to `install`.
    """

    def is_own(hook: Any) -> bool:
        hook = getattr(hook, "hook", hook)
        return isinstance(hook, Hook) and hook.owner is events

    for module in modules:
        attributes = vars(module)
        for name in _HOOKS:
            hooks = attributes[name]
            for key in [key for key, hook in hooks.items() if is_own(hook)]:
                for extra in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                    attributes.get(extra, {}).pop(key, None)
        if is_own(attributes.get("forward")):
            del attributes["forward"]
        if attributes.get("__prepare_scriptable__") is _refuse_script:
            del attributes["__prepare_scriptable__"]
    guard_conversions(model)


# The attributes in which torch keeps the hooks of a module that this file installs. Torch wraps some hooks in an object
# whose attribute `hook` is the hook.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


class Hook(functools.partial[Any]):
    """A closure in a module of an offloaded model. It refuses to be copied or pickled with the module, because the copy
    would act on the original model. owner: the `Events` of the model."""

    owner: Events
    __deepcopy__, __reduce_ex__ = refuse_copy, refuse_pickle

    def __new__(cls, function: Callable[..., Any], owner: Events) -> Hook:
        hook = super().__new__(cls, function)
        hook.owner = owner
        return hook


def on_calls(module: nn.Module, begin: Callable[..., None], end: Callable[..., None], owner: Events) -> None:
    """Installs hooks that call `begin` before each call of a module, and `end` after it, even if the call raises an
    exception. torch.compile traces neither function."""
    vars(module)["__prepare_scriptable__"] = _refuse_script
    module.register_forward_pre_hook(Hook(outside_of_graphs(begin), owner), prepend=True)
    module.register_forward_hook(Hook(outside_of_graphs(end), owner), always_call=True)


def on_moves(module: nn.Module, device: torch.device, owner: Events) -> None:
    """Makes each call of a module move its arguments to a device first."""

    def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return moved(args, device), moved(kwargs, device)

    module.register_forward_pre_hook(Hook(before, owner), prepend=True, with_kwargs=True)


def moved(value: Any, device: torch.device) -> Any:
    """Returns a value with its tensors moved to a device, including tensors in lists, tuples and dicts. Other objects
    are returned unchanged. For example, the layers of a key-value cache of transformers stay on the devices that fill
    them."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if type(value) in (tuple, list):
        return type(value)(moved(held, device) for held in value)
    if type(value) is dict:
        return {key: moved(held, device) for key, held in value.items()}
    return value


def on_states(module: nn.Module, weights: Mapping[str, Weight], owner: Events) -> None:
    """Makes `state_dict()` of a module return the values of its offloaded weights, and makes `load_state_dict()` refuse
    to load other values. After a save, a weight rests again unless a call is using its group.

    weights: the weights of the module, by attribute. Weights without a table are left to torch."""

    def before_save(*_: Any) -> None:
        for weight in weights.values():
            if weight.table is not None:
                weight.wake()  # so that torch lists the tensor without decoding it

    def after_save(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for attribute, weight in weights.items():
            if weight.table is not None:
                if weight.group is None or not weight.group.uses:
                    weight.rest()
                if prefix + attribute in state and weight.is_held(module, attribute):
                    state[prefix + attribute] = weight.saved(state, functools.partial(weight.value, "cpu"))

    def before_load(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for attribute, weight in weights.items():
            if prefix + attribute in state and weight.table is not None and weight.is_held(module, attribute):
                raise RuntimeError(f"{prefix}{attribute} is offloaded and cannot be loaded: close() first")

    module.register_state_dict_pre_hook(Hook(before_save, owner))
    module.register_state_dict_post_hook(Hook(after_save, owner))
    module.register_load_state_dict_pre_hook(Hook(before_load, owner))


def looking_up(module: nn.Module, weights: Mapping[str, Weight]) -> Callable[..., Any]:
    """Returns a forward for a module that looks up rows. The new forward calls the module's original forward with
    tables in place of the weights."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        kind: Any = type(module)
        tables = {attribute: weight.table for attribute, weight in weights.items()}
        # `vmap` may have batched the ids, which a table cannot look up. After `close()` the weights have no tables, but
        # this forward can still be called if other code has wrapped it.
        if is_transformed() or any(table is None for table in tables.values()):
            return kind.forward(module, *args, **kwargs)
        return kind.forward(stand_in(module, tables, kind), *args, **kwargs)

    return forward


def instead_of_forward(module: nn.Module, forward: Callable[..., Any], owner: Events) -> None:
    """Replaces the forward of this one module; other modules of its class keep theirs. torch.compile does not trace the
    new forward."""
    module.forward = Hook(outside_of_graphs(forward), owner)


def _refuse_script() -> NoReturn:
    """Raises an error. torch.jit.script calls this function of a module before it compiles the module and its hooks."""
    raise cannot_record("torch.jit.script")


# ---- experts ----


def cache_of(weight: Weight, cache_bytes: int) -> RowCache:
    """Returns a cache of the rows of a stacked weight, on the weight's device. It always holds the first row: slots
    without an expert request this row, so they cause no traffic on the link.

    cache_bytes: size in bytes of the cache on the device. If this size is too small for an LRU cache, the cache is
        static and holds only the first row."""
    assert weight.table is not None
    cache = RowCache(weight.table, cache_bytes, [0], devices=weight.device, policy="lru")
    if cache.capacity > 0:
        return cache
    return RowCache(weight.table, weight.table.row_bytes + _BESIDE_ROWS, [0], devices=weight.device)


class ExpertsForward:
    """Replaces the forward of a module of experts. It fetches experts, and calls the module's original forward with
    them, whichever implementation of experts transformers is set to use.

    Args:
        module: the module of experts.
        group: the group of the module's stacked weights. A call for many tokens fetches it as a whole.
        events: fetches the group, and records calls for few tokens.
    """

    def __init__(self, module: nn.Module, plan: OffloadPlan, group: Group, events: Events) -> None:
        self.module, self._group, self._events = module, group, events
        self._calls, self._num_experts = Calls(type(module), plan.held[module]), int(module.num_experts)  # type: ignore
        weights, device = plan.held[module], group.weights[0].device
        # A cache of rows for each stacked weight. The keys are the names of the weights in the module.
        self.caches = {name: cache_of(weight, plan.cache_bytes[weight]) for name, weight in weights.items()}
        # Empty tensors with the dtypes, the strides and the shapes of the experts.
        self._likes = [
            torch.empty_strided((0, *weight.shape[1:]), weight.stride, dtype=weight.dtype, device=device)
            for weight in weights.values()
        ]
        self._fetcher = StackFetcher(
            list(self.caches.values()),
            self._num_experts,
            self._likes,
            # Cached rows are faster than the link.
            [0 if cache.policy == "lru" else STREAM_SMS for cache in self.caches.values()],
            beside := _stream_beside(device),
        )
        self._has_stream = beside is not None
        # Number of slots without an expert, over all calls.
        self.num_spare = torch.zeros(1, dtype=torch.int64, device=device)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        calls, module, num_experts = self._calls, self.module, self._num_experts
        if self._group.weights[0].table is None:  # as in `looking_up`
            return calls.kind.forward(module, *args, **kwargs)
        ids = calls.ids_of(args, kwargs)
        if is_transformed() or not are_few(ids, num_experts):
            with self._events.using_all(module, self._group):
                return calls.kind.forward(module, *args, **kwargs)
        calls.check(ids, num_experts, self._group.name)
        self._events.note_choice(self._group)
        if not self._fetcher.serves(ids.device):  # the system refused to pin a stack
            return self._call_without_caches(ids, args, kwargs)
        experts = checked_ids(ids).contiguous()
        num_slots = num_slots_for(ids.numel(), num_experts)
        current = torch.cuda.current_stream(ids.device) if self._has_stream else None
        awaited: set[int] = set()  # the numbers of the stacks that the current stream has waited for
        try:
            slots, held, work, *fetched = self._fetcher.take(experts, num_slots, self.num_spare)
            stacks: dict[str, Any] = dict(zip(self.caches, fetched))
            if current is not None:
                stacks = {
                    name: functools.partial(self._awaited, number, current, of_stack, awaited)
                    for number, (name, of_stack) in enumerate(stacks.items())
                }
            return calls.with_slots(module, args, kwargs, slots.to(ids.dtype), held, stacks)
        finally:  # The current stream owns what `take` allocates. That memory is used again only after the fetches.
            last = len(self.caches) - 1
            if current is not None and last not in awaited:
                self._fetcher.wait_for(last, current)

    def _awaited(
        self, number: int, current: torch.cuda.Stream, fetched: torch.Tensor, awaited: set[int]
    ) -> torch.Tensor:
        """Makes the stream `current` wait for the experts of a stack, and returns them. number: the stack's number,
        which is added to `awaited`."""
        self._fetcher.wait_for(number, current)
        awaited.add(number)
        return fetched

    def _call_without_caches(self, ids: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls forward on a device that cannot look up rows in the caches. Each stack is fetched when forward first
        reads it."""
        slots, held, rows = slots_for(ids, self._num_experts, list(map(self._num_rows, self.caches)), self.num_spare)
        fetches = {
            name: functools.partial(self._fetch, name, like, of)
            for name, like, of in zip(self.caches, self._likes, rows)
        }
        return self._calls.with_slots(self.module, args, kwargs, slots, held, fetches)

    def _num_rows(self, name: str) -> int:
        """Returns the number of rows of an expert of a stacked weight."""
        return self.caches[name].view.num_rows // self._num_experts

    def _fetch(self, name: str, like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Fetches the rows of a stacked weight with the given numbers, which make up whole experts, on the current
        stream, and returns them as a tensor of experts. The fetch may keep all multiprocessors of a GPU busy, because
        later work of the current stream waits for the experts in any case."""
        fetched = self.caches[name].index_select(rows, in_order=True)
        return fetched.as_strided((rows.numel() // self._num_rows(name), *like.shape[1:]), like.stride())

    @property
    def device_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches.values())

    def counts(self) -> tuple[int, int, int, int]:
        """Returns (number of rows of experts found in the cache, number of missed rows, size of the missed rows in
        bytes, number of bytes that crossed the link for them). Waits for the device."""
        hits = misses = missed_bytes = link_bytes = 0
        for name, cache in self.caches.items():
            stats, num_spare_rows = cache.stats(), int(self.num_spare) * self._num_rows(name)
            hits += max(0, stats.hits - num_spare_rows) if cache.policy == "lru" else 0
            misses, missed_bytes = misses + stats.misses, missed_bytes + stats.misses * cache.view.row_bytes
            link_bytes += stats.link_bytes
        return hits, misses, missed_bytes, link_bytes

    def reset_counts(self) -> None:
        self.num_spare.zero_()
        for cache in self.caches.values():
            cache.reset_stats()


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the stream on which experts are fetched to a GPU, or None if the device is the CPU. The stream's priority
    is high, so that the few thread blocks of a fetch are scheduled before those of matrix multiplications."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
