"""Plans how a model is offloaded: which weights are fetched together, in which order and to which device, which weights
stay on a device, and how much memory this takes. `plan_for` makes an `OffloadPlan`; each `Group` in it is one or more
weights that are fetched together. A plan is data; its decisions do not change while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .._rows.geometry import DTYPES
from ..nn import TableParameter
from ..nn._compressing import place_of
from ..nn._experts import is_stack
from .weights import Group, Weight

# Modules of torch that read the weights of their submodules to choose how they compute. A call of such a module uses
# the weights of all its submodules.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(eq=False)
class Other:
    """A parameter or buffer that is not offloaded."""

    tensor: torch.Tensor
    device: torch.device  # device of the first module that has the tensor
    home: torch.device  # the tensor's device before `offload`; the CPU if a checkpoint fills it
    names: list[str] = field(default_factory=list)  # the tensor's names in state_dict()


@dataclass(eq=False)
class OffloadPlan:
    """The decisions of `ibp.offload` about each tensor and module of a model."""

    devices: list[torch.device]
    # For each module, the index of its device in `devices`.
    device_numbers: dict[nn.Module, int] = field(default_factory=dict)
    # The modules that are distributed over the devices round-robin, such as the layers of a transformer.
    blocks: list[nn.Module] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)  # all offloaded weights
    # For each module, the weights that it holds itself, by attribute. Weights of its submodules are not included.
    held: dict[nn.Module, dict[str, Weight]] = field(default_factory=dict)
    others: list[Other] = field(default_factory=list)  # all other parameters and buffers, each tensor once
    groups: list[Group] = field(default_factory=list)  # in the order of the modules
    # The next three fields say how modules use weights.
    users: dict[nn.Module, list[Group]] = field(default_factory=dict)  # the groups that a module's calls use
    lookups: list[nn.Module] = field(default_factory=list)  # modules that look up rows of the weights that they hold
    # For each module of experts, the group of its weights.
    experts: dict[nn.Module, Group] = field(default_factory=dict)
    # For each device, the size in bytes of the memory for groups that are in use or fetched ahead.
    arena_bytes: list[int] = field(default_factory=list)
    # For each stacked weight that is fetched, the size of its cache in bytes.
    cache_bytes: dict[Weight, int] = field(default_factory=dict)


def plan_for(
    model: nn.Module,
    devices: Sequence[torch.device],
    *,
    min_bytes: int,
    group_bytes: int,
    resident_bytes: int = 0,
    lookahead: int = 0,
    buffers: bool = False,
) -> OffloadPlan:
    """Returns the plan for a model. Its blocks, which are the children of its outermost `ModuleList` or `Sequential`,
    are assigned to the devices round-robin.

    The weights of a module with at most group_bytes bytes of weights are one group. In a larger module, the weights
    that it holds itself are a group, and each of its children is divided in the same way. A weight that several modules
    use belongs to the group of the first of them; the other modules use that group, too.

    Arguments as in `ibp.offload`."""
    plan = OffloadPlan(list(devices))
    _find_blocks(model, plan)
    _find_tensors(model, plan, min_bytes, buffers)
    nested_bytes = _divide(model, plan, group_bytes)
    for number in range(len(devices)):
        _plan_memory(plan, number, resident_bytes, lookahead, nested_bytes.get(number, 0))
    return plan


# ---- blocks and tensors ----


def _find_blocks(model: nn.Module, plan: OffloadPlan) -> None:
    """Fills in `device_numbers` and `blocks` of a plan."""

    def visit(module: nn.Module, device_number: int, in_block: bool) -> None:
        if module in plan.device_numbers:
            return
        plan.device_numbers[module] = device_number
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1 and not in_block
        for child in module.children():
            if is_list and child in children and child not in plan.device_numbers:
                number = len(plan.blocks)
                plan.blocks.append(child)
                visit(child, number % len(plan.devices), True)
            else:
                visit(child, device_number, in_block)

    visit(model, 0, False)


def _find_tensors(model: nn.Module, plan: OffloadPlan, min_bytes: int, buffers: bool) -> None:
    """Fills in `weights`, `held` and `others` of a plan."""
    known: dict[object, Weight] = {}
    others: dict[int, Other] = {}
    for prefix, module in model.named_modules():
        device = plan.devices[plan.device_numbers[module]]
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or isinstance(tensor, TableParameter):  # coded weights stay where they are
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            is_trained = tensor.requires_grad and module.training
            is_weight = (
                (attribute in module._parameters or buffers)
                and not is_trained
                and _can_be_stored(tensor)
                and tensor.numel() * tensor.element_size() >= min_bytes
            )
            if not is_weight:
                home = torch.device("cpu") if tensor.is_meta else tensor.device
                other = others.setdefault(id(tensor), Other(tensor, device, home))
                if attribute not in module._non_persistent_buffers_set:
                    other.names.append(name)
                continue
            weight = known.get(id(tensor)) or known.get(place_of(tensor))
            if weight is None:
                weight = Weight(tensor, device)
                plan.weights.append(weight)
            known[id(tensor)] = known[place_of(tensor)] = weight
            weight.add(module, attribute, name, tensor)
            plan.held.setdefault(module, {})[attribute] = weight
    plan.others = list(others.values())


def _can_be_stored(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a plain dense tensor of a dtype that tables can hold, and not a subclass with its own
    behaviour."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype in DTYPES
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


# ---- groups ----


def _divide(model: nn.Module, plan: OffloadPlan, group_bytes: int) -> dict[int, int]:
    """Divides the weights of a plan into groups, and finds the modules that use them: fills in `groups`, `users`,
    `lookups` and `experts` of a plan. Returns, for each device number, the largest total size in bytes of the groups
    that modules keep in use while their submodules use other groups."""
    visited: set[nn.Module] = set()
    nested_bytes: dict[int, int] = {}

    def visit(module: nn.Module, name: str, outer: dict[int, int]) -> None:
        """Divides the weights of a module and of its submodules into groups. outer: for each device number, the size in
        bytes of the groups that the modules which contain this module use."""
        if module in visited:
            return
        visited.add(module)
        below = _weights_of(module.modules(), plan)
        if not below:
            return
        for number, num_bytes in outer.items():
            nested_bytes[number] = max(nested_bytes.get(number, 0), num_bytes)
        used: list[Group] = []
        if _looks_rows_up(module, plan):
            plan.lookups.append(module)
            for weight in plan.held[module].values():
                weight.unit = "row"
            return
        if _is_stack(module, plan):
            used = [_new_group(module, name, list(plan.held[module].values()), plan, are_experts=True)]
            plan.experts[module] = used[0]
            for weight in used[0].weights:
                weight.unit = "expert"
        elif isinstance(module, _WHOLE) or (name and _is_one_group(module, below, plan, group_bytes)):
            visited.update(module.modules())
            _use(module, name, below, plan)
            return
        elif _has_forward(module):  # it uses its own weights, and those in its lists of parameters
            lists = [child for child in module.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))]
            used = _use(module, name, _weights_of([module, *lists], plan), plan)
        held = dict(outer)
        for group in used:
            held[group.device_number] = held.get(group.device_number, 0) + group.num_bytes
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, held)

    visit(model, "", {})
    return nested_bytes


def _weights_of(modules: Iterable[nn.Module], plan: OffloadPlan) -> list[Weight]:
    """Returns the weights that the given modules hold themselves, each weight once. Weights of their submodules are not
    included."""
    return list(dict.fromkeys(weight for part in modules for weight in plan.held.get(part, {}).values()))


def _is_one_group(module: nn.Module, below: list[Weight], plan: OffloadPlan, group_bytes: int) -> bool:
    """Returns whether the weights of a module and of its submodules, which are given, are one group."""
    return (
        _has_forward(module)
        and sum(weight.num_bytes for weight in below) <= group_bytes
        and not any(_looks_rows_up(part, plan) or _is_stack(part, plan) for part in module.modules())
    )


def _is_stack(module: nn.Module, plan: OffloadPlan) -> bool:
    """Returns whether a module holds stacks of experts, of which a call may fetch a few."""
    weights = plan.held.get(module, {}).values()
    return (
        bool(weights)
        and is_stack(module)
        and all(len(weight.holders) == 1 and weight.stacked_row_bytes is not None for weight in weights)
    )


def _looks_rows_up(module: nn.Module, plan: OffloadPlan) -> bool:
    """Returns whether a module is an embedding of torch that looks up rows of a weight of the plan."""
    is_usual = isinstance(module, nn.Embedding) and module.max_norm is None and "forward" not in vars(module)
    return is_usual and module in plan.held


def _use(module: nn.Module, name: str, weights: list[Weight], plan: OffloadPlan) -> list[Group]:
    """Makes one group of those weights that have no group yet. Records that the module uses the groups of all the
    weights, and returns these groups."""
    new = [weight for weight in weights if weight.group is None]
    if new:
        _new_group(module, name, new, plan)
    groups = list(dict.fromkeys(weight.group for weight in weights if weight.group is not None))
    if groups:
        plan.users[module] = groups
    return groups


def _new_group(
    module: nn.Module, name: str, weights: list[Weight], plan: OffloadPlan, are_experts: bool = False
) -> Group:
    """Adds a group to a plan, and assigns its weights to the module's device."""
    number = plan.device_numbers[module]
    group = Group(name or type(module).__name__, number, weights, are_experts)
    for weight in weights:
        weight.device = plan.devices[number]
    plan.groups.append(group)
    return group


def _has_forward(module: nn.Module) -> bool:
    """Returns whether a module is certainly called when its children are used. A list or a sequence may be iterated
    over instead."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.Sequential)


# ---- memory ----


def _plan_memory(plan: OffloadPlan, number: int, resident_bytes: int, lookahead: int, nested_bytes: int) -> None:
    """Decides which groups stay on a device, and how large its arena and its caches of experts are. Experts stay only
    if all weights of the device stay."""
    groups = [group for group in plan.groups if group.device_number == number]
    all_fit = sum(group.num_bytes for group in groups) <= resident_bytes
    left = resident_bytes
    for group in spread([group for group in groups if all_fit or not group.are_experts], resident_bytes):
        group.stays = True
        left -= group.num_bytes
    stacks = [weight for group in groups if group.are_experts and not group.stays for weight in group.weights]
    total = sum(weight.num_bytes for weight in stacks)
    plan.cache_bytes.update({weight: left * weight.num_bytes // total for weight in stacks})
    sizes = [group.num_bytes for group in groups if not group.stays]
    at_once = min(lookahead + 1, len(sizes))
    # The size in bytes of each run of consecutive groups that can be on the device at the same time. Runs wrap around:
    # the first group follows the last.
    runs = (sum([*sizes, *sizes][first : first + at_once]) for first in range(len(sizes)))
    plan.arena_bytes.append(nested_bytes + max(runs, default=0))


def spread(groups: Sequence[Group], num_bytes: int) -> list[Group]:
    """Chooses groups that have at most num_bytes bytes in total. The chosen groups are evenly spaced, so that the
    groups between them can be fetched while the chosen groups are used."""
    share = min(1.0, num_bytes / max(1, sum(group.num_bytes for group in groups)))
    chosen, left, due = [], num_bytes, 0.0
    for group in groups:
        due += group.num_bytes * share
        if group.num_bytes <= left and due >= group.num_bytes * 0.5:
            chosen.append(group)
            left -= group.num_bytes
            due -= group.num_bytes
    for group in groups:  # uses the bytes that are left
        if group not in chosen and group.num_bytes <= left:
            chosen.append(group)
            left -= group.num_bytes
    return chosen
