"""`Experts`: stacked experts of transformers with tables in the place of their stacked weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .._common.graphs import outside_of_graphs
from .._fetch.escapes import Escapes, matrix_of
from .._fetch.gather import index_select
from .._fetch.ids import checked_ids
from .._fetch.linear import MOST_GROUPED, MOST_STACKED, escapes_for_groups, group_vectors, multiply_groups
from .._tables.compressed_tensor import CompressedTensor
from ._stacks import Calls, are_few, by_rows, slots_for
from ._tables import TableModule

_DOWN, _BIAS = "down_proj", "_bias"


class CodedStack(TableModule):
    """The table of a stacked weight of `Experts`, whose name the module has. table: [experts, rows, columns], of rows
    that are table rows; transposed: whether plain weights are [experts, columns, rows]."""

    def __init__(self, table: CompressedTensor, transposed: bool, requires_grad: bool) -> None:
        super().__init__(by_rows(table), stays=False)
        self._shared.requires_grad = requires_grad
        self.stacked, self.transposed, self.num_rows = table.shape[:1], transposed, table.shape[1]

    def all(self, device: torch.device) -> torch.Tensor:
        """The plain weights of all experts on a device."""
        return self.plain_of(matrix_of(self.weight, device))

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """The plain weights of experts, from the numbers of their rows and on their device."""
        return self.plain_of(index_select(self.weight, rows, device=rows.device))

    def _name_of_weight(self, prefix: str) -> str:
        return prefix[:-1]

    def _load_from_state_dict(self, *args: Any) -> None:
        """Takes no table: `Experts` loads it, since torch gives a module only names that begin with its own and a
        dot."""
        super(TableModule, self)._load_from_state_dict(*args)


def multiply_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    stacks: Sequence[tuple[CompressedTensor, Escapes, torch.Tensor | None, Callable | None]],
    absent: float = torch.nan,
) -> torch.Tensor:
    """What experts of two stacked matrices give, by the kernel.

    Args:
        index: [tokens, choices], the experts of each token, and weights of their results.
        stacks: the table of each, with what `escapes_for_groups` gives, biases [experts, rows] or None, and a function
            of its products [tokens * choices, rows], or None.
        absent: the second product where an expert is not there.
    """
    ids = checked_ids(index).reshape(-1)
    order, groups = group_vectors(ids, num_experts)
    y, sharing = x, index.shape[1]
    for table, escapes, biases, then in stacks:
        shape = ids.shape[0], table.shape[0] // num_experts
        out = x.new_empty(shape) if y is x else x.new_full(shape, absent)  # remains for what no group has
        y = multiply_groups(y, table, escapes, groups, order, sharing, out)
        y = y if biases is None else y.add_(biases[ids.clamp(0, num_experts - 1)])
        y, sharing = y if then is None else then(y), 1
    return (y.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Experts(torch.nn.Module):
    """Stacked experts of transformers whose stacked weights are coded, as `ibp.nn.compress` makes them.

    On a GPU a call for few tokens sorts the choices by expert and multiplies by a kernel that decodes weights in
    registers; it does not wait for the GPU, and can be compiled or captured in a CUDA graph. All other calls run the
    class's own forward: with the experts that were chosen, decoded for the call, or with all where most are. Results on
    the CPU have the bits of the plain module.

    Gradients reach inputs and small parameters; autograd keeps the experts that were decoded until backward.

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
        module: of a class that transformers' `use_experts_implementation` decorates. Its attributes become this
            module's.
        fused: whether the kernel multiplies.
    """

    __module__ = "ibp.nn"

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Any
    post_expert_norm: Any

    def __init__(self, module: torch.nn.Module, fused: bool) -> None:
        super().__init__()
        held = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")}
        vars(self).update({**vars(module), **held})
        self.fused, self._kind = fused, cast(Any, type(module))
        self._calls, self._order = Calls(self._kind, []), tuple(self._parameters)

    @property
    def stacks(self) -> dict[str, CodedStack]:
        """The coded weights, by name."""
        return {name: module for name, module in self._modules.items() if isinstance(module, CodedStack)}

    def put(self, name: str, table: CompressedTensor) -> CodedStack:
        """Puts a table in the place of a stacked weight: as the plain weight, or its transposed matrices."""
        stack = CodedStack(table, bool(self.is_transposed), self.get_parameter(name).requires_grad)
        del self._parameters[name]
        self.add_module(name, stack)
        self._calls = Calls(self._kind, self.stacks)
        return stack

    def turn_plain(self) -> None:
        """Turns this module itself into the plain one, of the class that it was made of."""
        plain = {name: stack.parameter() for name, stack in self.stacks.items()}
        state = {
            name: value for name, value in vars(self).items() if name not in ("fused", "_kind", "_calls", "_order")
        }
        held = {**self._parameters, **plain}
        state["_parameters"] = {name: held[name] for name in (*self._order, *held)}
        state["_modules"] = {name: module for name, module in self._modules.items() if name not in plain}
        self.__dict__, self.__class__ = state, self._kind

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the class's own forward.

        Raises:
            IndexError: an expert is not there. On a GPU, the results of its token are NaN where the kernel multiplies,
                and the error comes as `ibp.index_select` says where it does not.
        """
        ids = self._calls.ids_of(args, kwargs)
        if len(args) == 3 and ids is not None and 0 < ids.numel() <= MOST_GROUPED:
            escapes = self._escapes_for(*args)
            if escapes is not None:
                return self._multiplied(*args, escapes)
        return self._decoded(args, kwargs, ids)

    def _escapes_for(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> dict[str, Escapes] | None:
        """The escapes of both stacks, by name, where the kernel multiplies by them."""
        if not self.fused or hidden.dim() != 2 or ids.dim() != 2:
            return None
        stacks, names = self.stacks, {self._up, _DOWN}
        biases = {name + _BIAS for name in names} if self.has_bias else set()
        if stacks.keys() != names or {*self._parameters, *self._buffers} != biases or self.num_experts > MOST_STACKED:
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, weights, *self.parameters())):
            return None
        found = escapes_for_groups(
            hidden, [stack.weight for stack in stacks.values()], [stack.num_rows for stack in stacks.values()]
        )
        return None if found is None else dict(zip(stacks, found))

    @property
    def _up(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    def _multiplied(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, escapes: dict[str, Escapes]
    ) -> torch.Tensor:
        """What transformers' implementations compute, from coded weights."""
        gate = functools.partial(self._kind._apply_gate, self) if self.has_gate else self.act_fn
        norm = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        stacks = [
            (self.stacks[name].weight, escapes[name], getattr(self, name + _BIAS) if self.has_bias else None, then)
            for name, then in ((self._up, gate), (_DOWN, norm))
        ]
        return multiply_experts(hidden, index, weights, self.num_experts, stacks)

    @outside_of_graphs
    def _decoded(self, args: tuple, kwargs: dict[str, Any], ids: torch.Tensor | None) -> torch.Tensor:
        """What the class's own forward gives, with decoded weights."""
        calls, stacks = self._calls, self.stacks
        if not are_few(ids, self.num_experts):
            device = next(iter(stacks.values())).weight.device if ids is None else ids.device
            return calls.with_all(self, args, kwargs, {name: stack.all(device) for name, stack in stacks.items()})
        calls.check(ids, self.num_experts, self._kind.__name__)
        slots, held, rows = slots_for(ids, self.num_experts, [stack.num_rows for stack in stacks.values()])
        weights = {name: stack.fetch(of_stack) for (name, stack), of_stack in zip(stacks.items(), rows)}
        return calls.with_slots(self, args, kwargs, slots, held, weights)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for name, stack in self.stacks.items():
            stack.load_weight(args[1] + name, *args)

    def extra_repr(self) -> str:
        return f"{self._kind.__name__}, {self.num_experts} experts{', fused=True' if self.fused else ''}"
