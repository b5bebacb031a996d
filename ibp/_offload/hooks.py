"""Hooks and forwards that `ibp.offload` installs in the modules of a model. Functions that return `Undo` install
something, and return the functions that remove it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from .._common.conversions import guard_conversions
from .._common.graphs import cannot_record, outside_of_graphs
from .._common.modes import is_transformed
from ..nn._stacks import stand_in
from ..nn._tables import CodedModule
from .experts import ExpertsForward
from .fetcher import Place
from .plan import OffloadPlan
from .resting import refuse_copy, refuse_pickle
from .weights import Weight

if TYPE_CHECKING:
    from .events import Events

Undo = list[Callable[[], object]]


def install(model: nn.Module, plan: OffloadPlan, events: Events) -> list[ExpertsForward]:
    """Installs the hooks and forwards that the plan asks for. Returns the new forwards of those mixtures of experts
    whose experts are fetched on demand."""
    for module, groups in plan.users.items():
        events.install_use(module, groups)
    for module in plan.lookups:
        weights = plan.held[module]
        if all(weight.table is not None for weight in weights.values()):
            events.undo += instead_of_forward(module, looking_up(module, weights))
    experts = [
        ExpertsForward(module, plan, group, events) for module, group in plan.experts.items() if group in events.places
    ]
    for forward in experts:
        events.undo += instead_of_forward(forward.module, forward.call)
    events.undo += on_calls(model, events.begin_model, events.end_model)
    if len(plan.devices) > 1:
        within = {part for block in plan.blocks for part in block.modules()}
        outside = [
            module
            for module in plan.device_numbers
            if module not in within
            and (any(True for _ in module.parameters(recurse=False)) or isinstance(module, CodedModule))
        ]
        for module in (*plan.blocks, *outside):
            events.undo += on_moves(module, plan.devices[plan.device_numbers[module]])
    for module, weights in plan.held.items():
        if any(weight.table is not None for weight in weights.values()):
            events.undo += on_states(module, weights, events.place_of)
    guard_conversions(model)
    events.undo.append(lambda: guard_conversions(model))
    return experts


class Hook(functools.partial[Any]):
    """A closure in a module of an offloaded model. It refuses to be copied or pickled with the module, because the copy
    would act on the original model."""

    __deepcopy__, __reduce_ex__ = refuse_copy, refuse_pickle


def on_calls(module: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Undo:
    """Installs hooks that call `begin` before each call of a module, and `end` after it, even if the call raises an
    exception. torch.compile traces neither function."""
    vars(module)["__prepare_scriptable__"] = _refuse_script
    return [
        module.register_forward_pre_hook(Hook(outside_of_graphs(begin)), prepend=True).remove,
        module.register_forward_hook(Hook(outside_of_graphs(end)), always_call=True).remove,
        functools.partial(vars(module).pop, "__prepare_scriptable__", None),
    ]


def on_moves(module: nn.Module, device: torch.device) -> Undo:
    """Makes each call of a module move its arguments to a device first."""

    def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return moved(args, device), moved(kwargs, device)

    return [module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True).remove]


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


def on_states(module: nn.Module, weights: Mapping[str, Weight], place_of: Callable[[Weight], Place | None]) -> Undo:
    """Makes `state_dict()` of a module return the values of its offloaded weights, and makes `load_state_dict()` refuse
    to load other values.

    Args:
        weights: the weights of the module, by attribute. Weights without a table are left to torch.
        place_of: returns the place of a weight's group, or None. After a save, a weight rests again unless a call is
            using its place.
    """

    def before_save(*_: Any) -> None:
        for weight in weights.values():
            if weight.table is not None:
                weight.wake()  # so that torch lists the tensor without decoding it

    def after_save(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for attribute, weight in weights.items():
            if weight.table is not None:
                place = place_of(weight)
                if place is None or not place.uses:
                    weight.rest()
                if prefix + attribute in state and weight.is_held(module, attribute):
                    state[prefix + attribute] = weight.saved.of(state, functools.partial(weight.value, "cpu"))

    def before_load(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for attribute, weight in weights.items():
            if prefix + attribute in state and weight.table is not None and weight.is_held(module, attribute):
                raise RuntimeError(f"{prefix}{attribute} is offloaded and cannot be loaded: close() first")

    return [
        module.register_state_dict_pre_hook(Hook(before_save)).remove,
        module.register_state_dict_post_hook(Hook(after_save)).remove,
        module.register_load_state_dict_pre_hook(Hook(before_load)).remove,
    ]


def looking_up(module: nn.Module, weights: Mapping[str, Weight]) -> Callable[..., Any]:
    """Returns a forward for a module that looks up rows. The new forward calls the module's original forward with
    tables in place of the weights."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        kind: Any = type(module)
        if is_transformed():  # `vmap` may have batched the ids, which a table cannot look up
            return kind.forward(module, *args, **kwargs)
        tables = {attribute: weight.table for attribute, weight in weights.items()}
        return kind.forward(stand_in(module, tables, kind), *args, **kwargs)

    return forward


def instead_of_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Replaces the forward of this one module; other modules of its class keep theirs. torch.compile does not trace the
    new forward."""
    module.forward = Hook(outside_of_graphs(forward))
    return [functools.partial(vars(module).pop, "forward")]


def _refuse_script() -> NoReturn:
    """Raises an error. torch.jit.script calls this function of a module before it compiles the module and its hooks."""
    raise cannot_record("torch.jit.script")
