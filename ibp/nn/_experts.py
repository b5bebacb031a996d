"""`Experts`: a module of stacked experts, as transformers has them, with weights that are tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .._common.modes import outside_of_graphs
from .._fetch.calls import checked_ids
from .._fetch.gather import index_select
from .._fetch.linear import (
    MOST_GROUPED,
    MOST_STACKED,
    Escapes,
    escapes_for_groups,
    group_vectors,
    matrix_of,
    multiply_groups,
)
from .._tables.compressed_tensor import CompressedTensor
from ._parameters import Calls, SharedTable, TableParameter, are_few, by_rows, slots_for
from ._tables import CodedModule

_DOWN, _BIAS = "down_proj", "_bias"


def multiply_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    stacks: Sequence[tuple[CompressedTensor, Escapes, torch.Tensor | None, Callable | None]],
    absent: float = torch.nan,
) -> torch.Tensor:
    """Applies experts to tokens, with the kernel that multiplies by stacks of coded matrices. Returns, for each token,
    the weighted sum of the results of its experts.

    Args:
        x: [tokens, columns], the vectors that are multiplied by the first stack.
        index: [tokens, choices], the experts of each token.
        weights: [tokens, choices], the weights of the experts' results.
        stacks: for each of the two stacks (its table; its entry in the result of `escapes_for_groups`; biases
            [experts, rows] or None; a function to apply to the products [tokens * choices, rows], or None).
        absent: the value of the products with the second stack for an expert id that is not in [0, num_experts), such
            as -1 for an expert on another rank.
    """
    ids = checked_ids(index).reshape(-1)
    order, groups = group_vectors(ids, num_experts)
    y, sharing = x, index.shape[1]
    for table, escapes, biases, then in stacks:
        shape = ids.shape[0], table.shape[0] // num_experts
        out = x.new_empty(shape) if y is x else x.new_full(shape, absent)  # rows in no group keep their value
        y = multiply_groups(y, table, escapes, groups, order, sharing, out)
        y = y if biases is None else y.add_(biases[ids.clamp(0, num_experts - 1)])
        y, sharing = y if then is None else then(y), 1
    return (y.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Experts(CodedModule):
    """A module of transformers that holds stacked experts, with the stacked weights kept as tables. `ibp.nn.compress`
    makes such modules.

    On a GPU, a call for few tokens sorts the tokens by their experts and multiplies with a kernel that decodes weights
    in registers. Such a call does not wait for the GPU, and can be compiled or captured in a CUDA graph. All other
    calls run the original forward of the class with decoded weights: those of the chosen experts, or those of all
    experts if most are chosen. Results on the CPU have the same bits as those of the plain module.

    Gradients reach inputs and the parameters that are not coded. Autograd keeps decoded experts until backward.

    Example:
        >>> # needs the package transformers
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_experts": 8, "moe_intermediate_size": 256}
        >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=512, **sizes)).bfloat16().eval()
        >>> report = ibp.nn.compress(model, include="*.experts")
        >>> experts = model.model.layers[0].mlp.experts
        >>> type(experts), experts.stacks["down_proj"].weight.shape
        (<class 'ibp.nn.Experts'>, torch.Size([2048, 256]))

    Args:
        module: a module of a class that transformers' `use_experts_implementation` decorates. Its attributes become
            this module's.
        fused: whether a GPU uses the kernel for few tokens.

    Attributes:
        stacks: a dict from the name of each coded weight to the holder of its table. The table is
            `stacks[name].weight`.
    """

    __module__ = "ibp.nn"

    num_experts: int
    stacks: dict[str, SharedTable]
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Any
    post_expert_norm: Any

    def __init__(self, module: torch.nn.Module, fused: bool) -> None:
        super().__init__()
        held = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")}
        vars(self).update({**vars(module), **held})
        self.fused, self._kind, self.stacks = fused, cast(Any, type(module)), {}
        self._calls = Calls(self._kind, [])

    def shared_tables(self) -> dict[str, SharedTable]:
        return self.stacks

    def put(self, name: str, table: CompressedTensor) -> SharedTable:
        """Replaces a stacked weight by a table, which holds the plain weight or its transposed matrices."""
        requires_grad = self.get_parameter(name).requires_grad
        stack = SharedTable(by_rows(table), requires_grad, bool(self.is_transposed), table.shape[:1])
        self.stacks[name] = stack
        self._parameters[name] = TableParameter(stack)
        self._calls = Calls(self._kind, self.stacks)
        return stack

    def turn_plain(self) -> None:
        """Turns this object into the plain module, of the class from which it was made."""
        plain = {name: stack.plain_parameter(stack.requires_grad) for name, stack in self.stacks.items()}
        state = {
            name: value for name, value in vars(self).items() if name not in ("fused", "_kind", "_calls", "stacks")
        }
        state["_parameters"] = {**self._parameters, **plain}
        self.__dict__, self.__class__ = state, self._kind

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes what the original forward of the class computes.

        Raises:
            IndexError: an expert's number is out of range. On a GPU the error may come late, as in `ibp.index_select`.
                Calls that use the kernel for few tokens (see the class) raise nothing: the result of a token with a
                wrong number is NaN.
        """
        ids = self._calls.ids_of(args, kwargs)
        if len(args) == 3 and ids is not None and 0 < ids.numel() <= MOST_GROUPED:
            escapes = self._escapes_for(*args)
            if escapes is not None:
                return self._multiplied(*args, escapes)
        return self._decoded(args, kwargs, ids)

    def _escapes_for(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> dict[str, Escapes] | None:
        """Returns the escapes of both stacks, by name, or None if this call cannot use the kernel."""
        if not self.fused or hidden.dim() != 2 or ids.dim() != 2:
            return None
        stacks, names = self.stacks, {self._up, _DOWN}
        biases = {name + _BIAS for name in names} if self.has_bias else set()
        if stacks.keys() != names or self.num_experts > MOST_STACKED:
            return None
        if {*self._parameters, *self._buffers} != names | biases:
            return None
        if torch.is_grad_enabled():
            others = [self.get_parameter(name) for name in biases]
            others += [own for module in self.children() for own in module.parameters()]
            if any(x.requires_grad for x in (hidden, weights, *others)):
                return None
        found = escapes_for_groups(hidden, [stack.weight for stack in stacks.values()], self._rows_of_an_expert())
        return None if found is None else dict(zip(stacks, found))

    def _rows_of_an_expert(self) -> list[int]:
        """Returns the number of rows of an expert in each table."""
        return [stack.weight.shape[0] // self.num_experts for stack in self.stacks.values()]

    @property
    def _up(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    def _multiplied(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, escapes: dict[str, Escapes]
    ) -> torch.Tensor:
        """Computes what the forward of transformers' class computes, with the kernel and coded weights."""
        gate = functools.partial(self._kind._apply_gate, self) if self.has_gate else self.act_fn
        norm = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        stacks = [
            (self.stacks[name].weight, escapes[name], getattr(self, name + _BIAS) if self.has_bias else None, then)
            for name, then in ((self._up, gate), (_DOWN, norm))
        ]
        return multiply_experts(hidden, index, weights, self.num_experts, stacks)

    @outside_of_graphs
    def _decoded(self, args: tuple, kwargs: dict[str, Any], ids: torch.Tensor | None) -> torch.Tensor:
        """Runs the original forward of the class with decoded weights."""
        calls, stacks = self._calls, self.stacks
        if not are_few(ids, self.num_experts):
            device = next(iter(stacks.values())).weight.device if ids is None else ids.device
            decoded = [matrix_of(stack.weight, device) for stack in stacks.values()]
            return calls.with_all(self, args, kwargs, self._plain(decoded))
        calls.check(ids, self.num_experts, self._kind.__name__)
        slots, held, rows = slots_for(ids, self.num_experts, self._rows_of_an_expert())
        fetched = [
            index_select(stack.weight, numbers, device=numbers.device) for stack, numbers in zip(stacks.values(), rows)
        ]
        return calls.with_slots(self, args, kwargs, slots, held, self._plain(fetched))

    def _plain(self, rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the plain weights of some experts or of all, by name, made from the rows of each table."""
        return {name: stack.plain_of(of_stack) for (name, stack), of_stack in zip(self.stacks.items(), rows)}

    def extra_repr(self) -> str:
        return f"{self._kind.__name__}, {self.num_experts} experts{', fused=True' if self.fused else ''}"
