"""Stacks of experts: finds the modules of transformers that hold them, and calls such a module for a few of its
experts.

A call has a fixed number of choices: the number of tokens times the number of experts that each token chooses. The
chosen experts are put into slots. The number of slots is the largest number of different experts that this number of
choices can name, where all numbers out of range count as one more expert, and at least two. So the host knows the
number of slots without waiting for a GPU. The forward of the module's class computes with the slots instead of all
experts, and with slot numbers instead of expert numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch

from .._fetch.ids import check_range, checked_ids
from .._fetch.linear import MOST_STACKED
from .._tables.compressed_tensor import CompressedTensor

# A call with at least this many choices per expert decodes all experts, because uniform random choices would name 98 %
# of them.
MOST_CHOICES = 4


def is_stack(module: torch.nn.Module) -> bool:
    """Returns whether a module holds stacked experts that `Calls` can call: its class is decorated with transformers'
    `use_experts_implementation` and has forward(hidden states, experts of each token, ...); the first dimension of all
    of its own tensors is num_experts; and the experts are not divided among processes."""
    has_attributes = all(hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed"))
    is_decorated = has_attributes and hasattr(type(module), "_apply_gate")
    if not is_decorated or getattr(module, "_is_expert_parallel", False) or "forward" in vars(module):
        return False
    tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return len(arguments_of(type(module))) > 1 and all(
        tensor.dim() > 0 and len(tensor) == module.num_experts for _, tensor in tensors
    )


def arguments_of(kind: type[torch.nn.Module]) -> tuple[str, ...]:
    """Returns the names of the arguments that a class's forward takes."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def reshaped(table: CompressedTensor, shape: torch.Size) -> CompressedTensor:
    """Returns a table over the same memory, with the same rows, in another shape."""
    return table._with(lambda tensor: tensor, shape)


def by_rows(table: CompressedTensor) -> CompressedTensor:
    """Returns a table over the same memory whose items are its rows."""
    return reshaped(table, torch.Size((table.num_rows, table.row_bytes // table.dtype.itemsize)))


def are_few(ids: torch.Tensor | None, num_experts: int) -> TypeGuard[torch.Tensor]:
    """Returns whether a call should use only the experts in its ids: it has ids, these are unlikely to name all
    experts, and there are at most `MOST_STACKED` experts."""
    return ids is not None and ids.numel() < MOST_CHOICES * num_experts and num_experts <= MOST_STACKED


def slots_for(
    ids: torch.Tensor, num_experts: int, num_rows: Sequence[int] = (), num_spare: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Assigns the experts of a call to slots, in one operation, which does not wait for a GPU.

    Args:
        ids: integers [tokens, choices], the experts of each token.
        num_rows: the number of rows of an expert in each of several tables.
        num_spare: an int64 counter, to which the number of slots that are left over is added. None: it is not counted.

    Returns:
        (slots, held, rows). slots: integers [tokens, choices], the slot of each choice. held: int64 [slots], the expert
        of each slot, -1 in slots that are left over. rows: for each table, int64 [slots * num_rows], the numbers of the
        rows of the experts in the slots, 0 in slots that are left over.

        Slots hold the experts in increasing order. Ids that are out of range become `num_experts`. There are at least
        two slots: with one slot, `torch.histc`, with which transformers counts the tokens of each expert, would wait
        for the GPU.
    """
    experts, count = checked_ids(ids).reshape(-1), ids.numel()
    num_slots = max(2, min(count, num_experts + 1))
    numbers = torch.ops.ibp.list_matrices.default(experts, num_experts, num_slots, num_rows, num_spare)
    sizes = [count, num_slots, *(num_slots * number for number in num_rows)]
    slots, held, *rows = numbers.split_with_sizes(sizes)
    slots = slots.view(ids.shape)
    return slots if ids.dtype == slots.dtype else slots.to(ids.dtype), held, rows


class Calls:
    """Calls the forward of a class of stacked experts with tensors that replace some of a module's tensors.

    kind: the class. A module of another class can be called if it has the attributes that this forward reads. stacks:
    names of the stacked weights.
    """

    def __init__(self, kind: Any, stacks: Iterable[str]) -> None:
        self.kind, self._stacks, self._choice = kind, frozenset(stacks), arguments_of(kind)[1]

    def ids_of(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Returns the experts of each token, [tokens, choices], from the arguments of a call, or None if the arguments
        do not contain them."""
        ids = args[1] if len(args) > 1 else kwargs.get(self._choice)
        return ids if isinstance(ids, torch.Tensor) else None

    def check(self, ids: torch.Tensor, num_experts: int, name: str) -> None:
        """Raises IndexError if ids on the CPU are not all in [0, num_experts). Does not check ids on a GPU. name: the
        name of the module."""
        if not ids.is_cuda:
            check_range(ids.reshape(-1), num_experts, name=f"{self._choice} of {name}")

    def with_all(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], values: Mapping[str, Any]) -> Any:
        """Calls forward with all experts, and returns its result. values: attributes that replace the module's own in
        this call, such as the stacked weights."""
        return self.kind.forward(stand_in(module, values, self.kind), *args, **kwargs)

    def with_slots(
        self,
        module: torch.nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        slots: torch.Tensor,
        held: torch.Tensor,
        weights: Mapping[str, torch.Tensor | functools.partial[torch.Tensor]],
    ) -> Any:
        """Calls forward with the experts in slots, and returns its result.

        slots, held: from `slots_for`. weights: by name, the stacked weights of the experts in `held`. A value may also
        be a function that returns the weight; it is called when forward first reads the weight.
        """
        if len(args) > 1:
            args = args[0], slots, *args[2:]
        else:
            kwargs = {**kwargs, self._choice: slots}
        values = {**self._small(module, held), **weights, "num_experts": held.numel()}
        return self.with_all(module, args, kwargs, values)

    def _small(self, module: Any, held: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the module's other tensors, such as biases and scales, by name, for the experts in `held` only."""
        all_tensors = chain(module._parameters.items(), module._buffers.items())
        tensors = {name: tensor for name, tensor in all_tensors if tensor is not None and name not in self._stacks}
        if not tensors:
            return {}
        experts = held.clamp(0, module.num_experts - 1)
        return {name: tensor[experts] for name, tensor in tensors.items()}


def stand_in(module: torch.nn.Module, values: Mapping[str, Any], kind: Any) -> torch.nn.Module:
    """Returns an object that can be passed as self to the forward of a class, for one call. It has the attributes of
    the module, but those in `values` replace the module's own. A value that is a `functools.partial` is called when it
    is first read; its result is then the attribute."""
    later = {name: value for name, value in values.items() if isinstance(value, functools.partial)}
    made = object.__new__(_reading_later(kind) if later else kind)
    state = vars(made)
    state.update(vars(module))
    state.pop("forward", None)
    for held in ("_parameters", "_buffers"):
        state[held] = {name: tensor for name, tensor in state[held].items() if name not in values}
    state.update({name: value for name, value in values.items() if name not in later}, _read_later=later)
    return made


@functools.cache
def _reading_later(kind: Any) -> Any:
    """Returns a subclass of `kind`. Its objects have a dict `_read_later` from names of attributes to functions. When
    such an attribute is first read, its function is called and returns the attribute's value."""

    class ReadsLater(kind):
        def __getattr__(self, name: str) -> Any:
            give = self.__dict__["_read_later"].pop(name, None)
            if give is None:
                return super().__getattr__(name)
            self.__dict__[name] = value = give()
            return value

    return ReadsLater
