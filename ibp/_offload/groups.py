"""Divides a model into groups of weights that are used together, and finds the modules whose calls use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._common.rounding import rounded_up
from ..nn import TableParameter
from ..nn._compressing import place_of
from ..nn._stacks import is_stack
from .weights import Weight, can_be_stored

# Alignment in bytes of the weights in a group. It is that of torch's allocator, and enough for cuBLAS.
_ALIGNMENT = 256

# Modules of torch that read the weights of their submodules to choose how they compute. They are used as a whole.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


Region = tuple[int, int]  # [start, end) in bytes


def overlap(one: Region, other: Region) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class WeightArena:
    """A ring of memory for groups: each new region begins where the last one ended, and at the end of the memory the
    next region begins at its start again.

    If every pass asks for the same sizes in the same order, the memory that is overwritten is thus the least recently
    used.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._cursor = 0

    def place(self, num_bytes: int, held: Iterable[Region], wish: int | None = None) -> int | None:
        """Returns the offset of num_bytes bytes that overlap none of the held regions, or None if there is no such
        offset. It is `wish` if that region is free, otherwise the first free offset after the region that was given out
        last."""
        held = list(held)
        after_held = sorted(end for _, end in held)
        starts = [self._cursor, *(end for end in after_held if end > self._cursor), 0, *after_held]
        if wish is not None:
            starts.insert(0, wish)
        for start in starts:
            region = start, start + num_bytes
            if region[1] <= self.num_bytes and not any(overlap(region, other) for other in held):
                self._cursor = region[1]
                return start
        return None


@dataclass(eq=False)
class Place:
    """The memory of a group of weights on a device."""

    # Region of the arena; None: the arena had no room, and the group has an allocation of its own.
    region: Region | None
    memory: torch.Tensor  # uint8: the memory of the whole group
    data: list[torch.Tensor]  # the bytes of each weight
    values: list[torch.Tensor]  # the same bytes as tensors with the shapes and dtypes of the model's
    sms: int = 0  # number of multiprocessors with which `prepared` was made
    prepared: Sequence[tuple[Any, ...]] = ()  # the arguments of `TensorStream.issue` for each weight; empty at first


class Group:
    """One or more weights that are fetched together and lie one after the other in memory."""

    def __init__(self, name: str, device_number: int, weights: Sequence[Weight]) -> None:
        self.name, self.device_number, self.weights = name, device_number, list(weights)
        self.offsets: list[int] = []  # offset of each weight from the group's start, in bytes
        end = 0
        for weight in self.weights:
            weight.group = self
            start = rounded_up(end, _ALIGNMENT)
            self.offsets.append(start)
            end = start + weight.num_bytes
        self.num_bytes = rounded_up(end, _ALIGNMENT)  # size of all weights as the model uses them
        self.stored_bytes = 0  # size of the compressed rows, which a fetch moves; 0 until the tables are made
        # The following attributes change while the model runs, under the lock of `Offloaded`; `fetcher.py` changes
        # them.
        self.uses = 0  # number of calls that are using the weights
        # Whether the weights are in the memory of `place`, or will be when `ready` has been reached.
        self.is_loaded = False
        self.is_ahead = False  # whether they were fetched ahead of a use that has not begun
        self.place: Place | None = None  # their present or latest memory
        self.ready: torch.cuda.Event | None = None  # CUDA: reached when the weights have arrived
        # CUDA, by stream: reached when the stream no longer reads the weights.
        self.done: dict[int, torch.cuda.Event] = {}

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {len(self.weights)} weights, {self.num_bytes:,} bytes)"

    @property
    def region(self) -> Region | None:
        """The present or latest region of the weights in the arena."""
        return None if self.place is None else self.place.region


@dataclass(eq=False)
class Use:
    """A module and the groups of weights that its call uses."""

    module: nn.Module
    groups: list[Group] = field(default_factory=list)


@dataclass(eq=False)
class Lookup:
    """A module that looks up rows of a weight. Only these rows are fetched."""

    module: nn.Module
    attribute: str
    weight: Weight


@dataclass(eq=False)
class StackedModule:
    """A module of transformers with a stack of experts. A call for few tokens fetches the experts that the router
    chose; a call for many tokens uses the whole group."""

    module: nn.Module
    stacks: dict[str, Weight]
    group: Group

    @property
    def num_experts(self) -> int:
        return int(self.module.num_experts)  # type: ignore[arg-type]


@dataclass(eq=False)
class Other:
    """A parameter or buffer that is not offloaded."""

    tensor: torch.Tensor
    device_number: int  # index of the device of the first module that has the tensor
    home: torch.device  # its device before `offload`; the CPU for a tensor that a checkpoint fills
    names: list[str] = field(default_factory=list)  # its names in state_dict()


@dataclass(eq=False)
class Division:
    """A model divided into groups of weights, modules that use them, and all other tensors."""

    weights: list[Weight] = field(default_factory=list)  # all offloaded weights
    groups: list[Group] = field(default_factory=list)  # in the order of the modules
    # uses, lookups, experts: the modules that use weights, by the way in which they use them
    uses: list[Use] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    experts: list[StackedModule] = field(default_factory=list)
    # All parameters and buffers that are not offloaded, each tensor once.
    others: list[Other] = field(default_factory=list)
    device_numbers: dict[nn.Module, int] = field(default_factory=dict)  # index of the device of each module
    # The repeated modules that are distributed over the devices in turn.
    blocks: list[nn.Module] = field(default_factory=list)
    # By index of the device: the largest size in bytes of groups that are in use at the same time because a module uses
    # its own group while its submodules use theirs.
    nested_bytes: dict[int, int] = field(default_factory=dict)


def divide(model: nn.Module, *, min_bytes: int, group_bytes: int, num_devices: int, buffers: bool) -> Division:
    """Divides a model. Its blocks, which are the children of its outermost `ModuleList` or `Sequential`, are assigned
    to the devices in turn.

    The weights of a module with at most group_bytes bytes of weights are one group. In a larger module, its own weights
    are a group, and each of its children is divided in the same way. A weight that several modules use belongs to the
    group of the first of them; the other modules use that group, too.
    """
    division = Division()
    _find_blocks(model, division, num_devices)
    found = _find_tensors(model, division, min_bytes, buffers)
    _Divider(division, found, group_bytes).visit(model, "", {})
    return division


def _find_blocks(model: nn.Module, division: Division, num_devices: int) -> None:
    def visit(module: nn.Module, device_number: int, in_block: bool) -> None:
        if module in division.device_numbers:
            return
        division.device_numbers[module] = device_number
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1 and not in_block
        for child in module.children():
            if is_list and child in children and child not in division.device_numbers:
                number = len(division.blocks)
                division.blocks.append(child)
                visit(child, number % num_devices, True)
            else:
                visit(child, device_number, in_block)

    visit(model, 0, False)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields (attribute, tensor, whether it is a parameter) for the tensors of a module without its submodules, except
    coded weights."""
    for attribute, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, TableParameter):
            yield attribute, parameter, True
    for attribute, buffer in module._buffers.items():
        if buffer is not None:
            yield attribute, buffer, False


def _find_tensors(
    model: nn.Module, division: Division, min_bytes: int, buffers: bool
) -> dict[nn.Module, list[tuple[str, Weight]]]:
    """Fills in `division.weights` and `division.others`. Returns (attribute, weight) for the weights of each module
    without its submodules."""
    found: dict[nn.Module, list[tuple[str, Weight]]] = {}
    known: dict[object, Weight] = {}
    others: dict[int, Other] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor, is_parameter in _tensors_of(module):
            name = f"{prefix}.{attribute}" if prefix else attribute
            is_trained = tensor.requires_grad and module.training
            is_weight = (
                (is_parameter or buffers)
                and not is_trained
                and can_be_stored(tensor)
                and tensor.numel() * tensor.element_size() >= min_bytes
            )
            if not is_weight:
                home = torch.device("cpu") if tensor.is_meta else tensor.device
                other = others.setdefault(id(tensor), Other(tensor, division.device_numbers[module], home))
                if attribute not in module._non_persistent_buffers_set:
                    other.names.append(name)
                continue
            weight = known.get(id(tensor)) or known.get(place_of(tensor))
            if weight is None:
                weight = Weight(tensor)
                division.weights.append(weight)
            known[id(tensor)] = known[place_of(tensor)] = weight
            weight.add(module, attribute, name, tensor)
            found.setdefault(module, []).append((attribute, weight))
    division.others = list(others.values())
    return found


class _Divider:
    def __init__(self, division: Division, found: dict[nn.Module, list[tuple[str, Weight]]], group_bytes: int) -> None:
        self._division, self._found, self._group_bytes = division, found, group_bytes
        self._visited: set[nn.Module] = set()

    def visit(self, module: nn.Module, name: str, outer: dict[int, int]) -> None:
        """Divides a module. outer: by index of the device, the size in bytes of the groups that the modules around this
        one use."""
        if module in self._visited:
            return
        self._visited.add(module)
        below = _once(weight for part in module.modules() for _, weight in self._found.get(part, ()))
        if not below:
            return
        nested = self._division.nested_bytes
        nested.update({number: max(nested.get(number, 0), num_bytes) for number, num_bytes in outer.items()})
        if self._looks_rows_up(module):
            self._division.lookups += [Lookup(module, attribute, weight) for attribute, weight in self._found[module]]
        elif self._is_stack(module):
            stacks = dict(self._found[module])
            group = self._new_group(module, name, list(stacks.values()))
            self._division.experts.append(StackedModule(module, stacks, group))
            number = group.device_number
            self._visit_children(module, name, {**outer, number: outer.get(number, 0) + group.num_bytes})
        elif isinstance(module, _WHOLE) or (name and self._fits(module, below)):
            self._visited.update(module.modules())
            self._use(module, name, below)
        else:
            held = dict(outer)
            for group in self._use(module, name, self._own(module)):
                held[group.device_number] = held.get(group.device_number, 0) + group.num_bytes
            self._visit_children(module, name, held)

    def _visit_children(self, module: nn.Module, name: str, outer: dict[int, int]) -> None:
        for child_name, child in module.named_children():
            self.visit(child, f"{name}.{child_name}" if name else child_name, outer)

    def _own(self, module: nn.Module) -> list[Weight]:
        """Returns the weights that the module's own forward uses: its own weights, and those in its lists of
        parameters."""
        if not _has_forward(module):
            return []
        lists = [child for child in module.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))]
        return _once(weight for part in (module, *lists) for _, weight in self._found.get(part, ()))

    def _fits(self, module: nn.Module, below: list[Weight]) -> bool:
        return (
            _has_forward(module)
            and sum(weight.num_bytes for weight in below) <= self._group_bytes
            and not any(self._looks_rows_up(part) or self._is_stack(part) for part in module.modules())
        )

    def _is_stack(self, module: nn.Module) -> bool:
        weights = [weight for _, weight in self._found.get(module, ())]
        return (
            bool(weights)
            and is_stack(module)
            and all(len(weight.holders) == 1 and weight.stacked_row_bytes is not None for weight in weights)
        )

    def _looks_rows_up(self, module: nn.Module) -> bool:
        is_usual = isinstance(module, nn.Embedding) and module.max_norm is None and "forward" not in vars(module)
        return is_usual and module in self._found

    def _use(self, module: nn.Module, name: str, weights: list[Weight]) -> list[Group]:
        """Makes a group of the weights that have none yet, and records that the module uses the groups of all weights.
        Returns these groups."""
        if not weights:
            return []
        new = [weight for weight in weights if weight.group is None]
        if new:
            self._new_group(module, name, new)
        groups = list(dict.fromkeys(weight.group for weight in weights if weight.group is not None))
        self._division.uses.append(Use(module, groups))
        return groups

    def _new_group(self, module: nn.Module, name: str, weights: list[Weight]) -> Group:
        group = Group(name or type(module).__name__, self._division.device_numbers[module], weights)
        self._division.groups.append(group)
        return group


def _has_forward(module: nn.Module) -> bool:
    """Returns whether a module is certainly called when its children are used. A list or a sequence may be iterated
    over instead."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.Sequential)


def _once(weights: Iterator[Weight]) -> list[Weight]:
    return list(dict.fromkeys(weights))


def spread(groups: Sequence[Group], num_bytes: int) -> list[Group]:
    """Returns groups of at most num_bytes in all, evenly spaced, so that the groups between them can be fetched while
    they are used."""
    share = min(1.0, num_bytes / max(1, sum(group.num_bytes for group in groups)))
    chosen, left, due = [], num_bytes, 0.0
    for group in groups:
        due += group.num_bytes * share
        if group.num_bytes <= left and due >= group.num_bytes * 0.5:
            chosen.append(group)
            left -= group.num_bytes
            due -= group.num_bytes
    for group in groups:  # the room that even spacing left
        if group not in chosen and group.num_bytes <= left:
            chosen.append(group)
            left -= group.num_bytes
    return chosen
