"""Modules of stacked experts, as transformers has them: how such a module is called for a few of its experts, and
`Experts`, such a module with weights that are tables.

A call has a fixed number of choices: the number of tokens times the number of experts that each token chooses. The
chosen experts are put into slots. The number of slots is the largest number of different experts that this number of
choices can name, where all numbers out of range count as one more expert, and at least two. So the host knows the
number of slots without waiting for a GPU. The forward of the module's class computes with the slots instead of all
experts, and with slot numbers instead of expert numbers.

For few tokens, a GPU uses neither slots nor the forward of the class: `ExpertTables` multiplies by coded matrices.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard, cast

import torch

from .._common.modes import outside_of_graphs
from .._fetch.calls import check_range, checked_ids
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
from ._parameters import SharedTable, TableParameter, by_rows
from ._tables import CodedModule

# A call with at least this many choices per expert decodes all experts, because uniform random choices would name 98 %
# of them.
MOST_CHOICES = 4


# ---- stacks of experts, and calls for a few of them ----


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


def are_few(ids: torch.Tensor | None, num_experts: int) -> TypeGuard[torch.Tensor]:
    """Returns whether a call should use only the experts in its ids: it has ids, these are unlikely to name all
    experts, and there are at most `MOST_STACKED` experts."""
    return ids is not None and ids.numel() < MOST_CHOICES * num_experts and num_experts <= MOST_STACKED


def num_slots_for(num_choices: int, num_experts: int) -> int:
    """Returns the number of slots of a call. There are at least two: with one slot, `torch.histc`, with which
    transformers counts the tokens of each expert, would wait for the GPU."""
    return max(2, min(num_choices, num_experts + 1))


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

        Slots hold the experts in increasing order. Ids that are out of range become `num_experts`.
    """
    experts, count = checked_ids(ids).reshape(-1), ids.numel()
    num_slots = num_slots_for(count, num_experts)
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
        module: Any,
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
        tensors = chain(module._parameters.items(), module._buffers.items())
        # The module's other tensors, such as biases and scales, are given for the experts in `held` only.
        others = {name: tensor for name, tensor in tensors if tensor is not None and name not in self._stacks}
        if others:
            experts = held.clamp(0, module.num_experts - 1)
            others = {name: tensor[experts] for name, tensor in others.items()}
        return self.with_all(module, args, kwargs, {**others, **weights, "num_experts": held.numel()})


def stand_in(module: torch.nn.Module, values: Mapping[str, Any], kind: Any) -> torch.nn.Module:
    """Returns an object that can be passed as self to the forward of a class, for one call. It has the attributes of
    the module, but those in `values` replace the module's own. A value that is a `functools.partial` is called when it
    is first read; its result is then the attribute."""
    later: dict[str, functools.partial[Any]] = {}
    state = {**vars(module), "_read_later": later}
    state.pop("forward", None)
    for held in ("_parameters", "_buffers"):
        state[held] = {name: tensor for name, tensor in state[held].items() if name not in values}
    for name, value in values.items():
        if isinstance(value, functools.partial):
            state.pop(name, None)  # otherwise `__getattr__` would not be called
            later[name] = value
        else:
            state[name] = value
    made = object.__new__(_reading_later(kind) if later else kind)
    vars(made).update(state)
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


# ---- products with experts ----


class ExpertTables:
    """The two tables of a mixture of experts, for engines that stack the matrices of all experts: one table has the
    first matrix of every expert, and the other has the second one.

    Example:
        >>> up, down = (ibp.adapters.compress_matrix(torch.randn(rows, 64).bfloat16()) for rows in (8 * 32, 8 * 64))
        >>> experts = ibp.adapters.ExpertTables(up, down, num_experts=8)
        >>> [stack.shape for stack in experts.decoded("cpu")]
        [torch.Size([8, 32, 64]), torch.Size([8, 64, 64])]
        >>> experts.multiplies(torch.ones(3, 64).bfloat16(), torch.zeros(3, 2).long())    # a CPU has no such kernel
        False

    Args:
        up, down: tables [num_experts * rows, columns] of the first and the second stacked matrix.
        num_experts: number of experts.
    """

    def __init__(self, up: CompressedTensor, down: CompressedTensor, num_experts: int) -> None:
        self.up, self.down, self.num_experts = up, down, num_experts

    def multiplies(self, x: torch.Tensor, ids: torch.Tensor) -> bool:
        """Returns whether `multiply` can be called. The tables must be on the GPU of x, in the form that the kernel
        supports. There must be at most 1,024 pairs of a token and an expert, and at most 4,096 experts. If the result
        is False, multiply by the matrices that `decoded` returns.

        Args:
            x: [tokens, columns], BF16.
            ids: [tokens, choices], the experts of each token.
        """
        return self._escapes(x, ids) is not None

    def multiply(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
        *,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        absent: float = torch.nan,
    ) -> torch.Tensor:
        """Returns, for each token, the weighted sum of its experts' results. The kernel decodes the matrices in
        registers. The call does not wait for the GPU, so that CUDA graphs can capture it.

        Args:
            x, ids: as in `multiplies`.
            weights: [tokens, choices], the weights of the experts' results.
            activate: a function that takes the products by the first matrix, [n, rows of up], and returns the vectors
                that the second matrix multiplies, [n, columns of down].
            biases: the biases of both matrices, [num_experts, rows] or None.
            absent: the value that stands for the products with the second matrix if an id is not in [0, num_experts).
                For example, an id may be -1 if the expert is on another rank.

        Raises:
            ValueError: the kernel does not support these arguments.
        """
        escapes = self._escapes(x, ids)
        if escapes is None:
            raise ValueError("the kernel does not multiply x by these experts: ask `multiplies` first")
        return self._products(escapes, x, ids, weights, (activate, None), biases, absent)

    def decoded(self, device: torch.device | str) -> list[torch.Tensor]:
        """Returns both stacked matrices, [num_experts, rows, columns], decoded on a device."""
        tables = (self.up, self.down)
        return [matrix_of(table, torch.device(device)).view(self.num_experts, -1, table.shape[1]) for table in tables]

    def _escapes(self, x: torch.Tensor, ids: torch.Tensor) -> list[Escapes] | None:
        """Returns the escapes of both tables, or None if the kernel cannot multiply x by the experts in ids."""
        if not 0 < ids.numel() <= MOST_GROUPED or self.num_experts > MOST_STACKED:
            return None
        tables = [self.up, self.down]
        return escapes_for_groups(x, tables, [table.shape[0] // self.num_experts for table in tables])

    def _products(
        self,
        escapes: list[Escapes],
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        then: tuple[Callable | None, Callable | None],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        absent: float,
    ) -> torch.Tensor:
        """Does the work of `multiply`. escapes: from `_escapes`. then: for each matrix, a function to apply to the
        products [tokens * choices, rows], or None."""
        flat = checked_ids(ids).reshape(-1)
        order, groups = group_vectors(flat, self.num_experts)
        y, sharing = x, ids.shape[1]
        for table, of_table, bias, apply in zip((self.up, self.down), escapes, biases, then):
            shape = flat.shape[0], table.shape[0] // self.num_experts
            out = x.new_empty(shape) if y is x else x.new_full(shape, absent)  # rows in no group keep their value
            y = multiply_groups(y, table, of_table, groups, order, sharing, out)
            y = y if bias is None else y.add_(bias[flat.clamp(0, self.num_experts - 1)])
            y, sharing = y if apply is None else apply(y), 1
        return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


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
        # After each step this object is a module that works, in case an interrupt comes before the next step.
        own = vars(self)
        own["_parameters"] = {**self._parameters, **plain}
        self.__class__ = self._kind
        for name in ("fused", "_kind", "_calls", "stacks"):
            del own[name]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes what the original forward of the class computes.

        Raises:
            IndexError: an expert's number is out of range. On a GPU the error may come late, as in `ibp.index_select`.
                Calls that use the kernel for few tokens (see the class) raise nothing: the result of a token with a
                wrong number is NaN.
        """
        ids = self._calls.ids_of(args, kwargs)
        if len(args) == 3 and ids is not None:
            products = self._multiplied(*args)
            if products is not None:
                return products
        return self._decoded(args, kwargs, ids)

    def _multiplied(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """Computes what the forward of transformers' class computes, with the kernel and coded weights. Returns None if
        this call cannot use the kernel."""
        if not self.fused or hidden.dim() != 2 or ids.dim() != 2:
            return None
        up, down = "gate_up_proj" if self.has_gate else "up_proj", "down_proj"
        biases = (f"{up}_bias", f"{down}_bias") if self.has_bias else ()
        if self.stacks.keys() != {up, down}:
            return None
        if {*self._parameters, *self._buffers} != {up, down, *biases}:
            return None
        if torch.is_grad_enabled():
            others = [self.get_parameter(name) for name in biases]
            others += [own for module in self.children() for own in module.parameters()]
            if any(x.requires_grad for x in (hidden, weights, *others)):
                return None
        tables = ExpertTables(self.stacks[up].weight, self.stacks[down].weight, self.num_experts)
        escapes = tables._escapes(hidden, ids)
        if escapes is None:
            return None
        gate = functools.partial(self._kind._apply_gate, self) if self.has_gate else self.act_fn
        norm = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        added = (getattr(self, biases[0]), getattr(self, biases[1])) if biases else (None, None)
        return tables._products(escapes, hidden, ids, weights, (gate, norm), added, torch.nan)

    @outside_of_graphs
    def _decoded(self, args: tuple, kwargs: dict[str, Any], ids: torch.Tensor | None) -> torch.Tensor:
        """Runs the original forward of the class with decoded weights."""
        calls, stacks = self._calls, self.stacks
        if not are_few(ids, self.num_experts):
            device = next(iter(stacks.values())).weight.device if ids is None else ids.device
            decoded = [matrix_of(stack.weight, device) for stack in stacks.values()]
            return calls.with_all(self, args, kwargs, self._plain(decoded))
        calls.check(ids, self.num_experts, self._kind.__name__)
        rows_of_an_expert = [stack.weight.shape[0] // self.num_experts for stack in stacks.values()]
        slots, held, rows = slots_for(ids, self.num_experts, rows_of_an_expert)
        fetched = [
            index_select(stack.weight, numbers, device=numbers.device) for stack, numbers in zip(stacks.values(), rows)
        ]
        return calls.with_slots(self, args, kwargs, slots, held, self._plain(fetched))

    def _plain(self, rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the plain weights of some experts or of all, by name, made from the rows of each table."""
        return {name: stack.plain_of(of_stack) for (name, stack), of_stack in zip(self.stacks.items(), rows)}

    def extra_repr(self) -> str:
        return f"{self._kind.__name__}, {self.num_experts} experts{', fused=True' if self.fused else ''}"
