"""Mixtures of experts: a call for few tokens fetches the experts that the router chose, and no others.

An expert is a fixed number of consecutive rows of a table for each stacked weight. The experts of a call are decoded
into a workspace of as many slots as the call can need; the module's own forward then computes with the workspace in
the place of its weights, and with numbers of slots in the place of numbers of experts. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._fetch.ids import check_range
from .._tables.compressed_tensor import CompressedTensor
from ..cache import RowCache
from .groups import Experts
from .resting import NotCopied
from .weights import Weight, stand_in

# From so many choices of an expert on, for each expert, a call uses the group: 98 % of the experts are chosen where all
# are chosen alike.
_MOST_CHOICES = 4
_BESIDE_ROWS = 512  # bytes: the map and the counters of a cache of one row take less


def by_rows(table: CompressedTensor) -> CompressedTensor:
    """A table over the same memory whose items are its rows."""
    shape = torch.Size((table.num_rows, table.row_bytes // table.dtype.itemsize))
    return table._with(lambda tensor: tensor, shape)


def may_leave_slots(ids: torch.Tensor) -> bool:
    """Whether slots may be left over: only the choices of one token are known to be different experts."""
    return len(ids) != 1 or ids.numel() < 2


def slots_for(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of a workspace that hold the experts of a call.

    Args:
        ids: integers [tokens, choices], the experts of each token.

    Returns:
        (int64 [tokens, choices], the slot of each choice; int64 [slots], the expert of each slot, -1 in slots that are
        left over). Slots have the experts in increasing order; the slots of one token have its choices in their order.
        Ids that are out of range remain so: as `num_experts` where several tokens share slots. There are at least two
        slots: `torch.histc`, by which transformers counts the tokens of each, waits for the GPU where there is one.
    """
    experts = ids.reshape(-1).to(torch.int64)
    if not may_leave_slots(ids):
        return torch.arange(experts.numel(), device=ids.device).view(ids.shape), experts
    experts = experts.clamp(-1, num_experts).remainder(num_experts + 1)
    is_chosen = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).scatter_(0, experts, 1)
    slots = (is_chosen.cumsum(0) - 1)[experts]
    num_slots = max(2, min(experts.numel(), num_experts + 1))
    held = torch.full((num_slots,), -1, dtype=torch.int64, device=ids.device).scatter_(0, slots, experts)
    return slots.view(ids.shape), held


class Stack:
    """One stacked weight on a device: its experts, looked up by a cache of rows.

    Slots that are left over ask for the first row again and again, which the cache has on the device: they fetch
    nothing.

    Args:
        cache_bytes: of the device; fewer than `RowCache` needs to replace rows: the cache holds the first row alone.
    """

    def __init__(self, weight: Weight, device: torch.device, cache_bytes: int) -> None:
        assert weight.table is not None
        self.weight, table = weight, weight.table
        self.num_rows, self.row_bytes = table.num_rows // weight.shape[0], table.row_bytes  # of an expert, of a row
        self._numbers = torch.arange(self.num_rows, device=device)
        self.cache = RowCache(table, cache_bytes, [0], devices=device, policy="lru")
        self.is_cached = self.cache.capacity > 0
        if not self.is_cached:
            self.cache = RowCache(table, table.row_bytes + _BESIDE_ROWS, [0], devices=device)

    def fetch(self, experts: torch.Tensor, has_spare: bool) -> torch.Tensor:
        """The experts of slots. has_spare: whether slots may be left over."""
        ids = torch.add(self._numbers, experts[:, None], alpha=self.num_rows).view(-1)
        if has_spare:
            ids.clamp_(min=0)
        out = torch.empty((len(ids), self.cache.shape[1]), dtype=self.cache.dtype, device=ids.device)
        return self.weight.items(self.cache.index_select(ids, out=out))


class ExpertsForward(NotCopied):
    """The forward of a module of experts: its own, whatever implementation transformers is told to use.

    Args:
        use_group: called around a call for many tokens; the weights are there within.
        note_use: called before a call for few.
    """

    def __init__(
        self,
        experts: Experts,
        device: torch.device,
        cache_bytes: int,
        use_group: Callable[[], AbstractContextManager[None]],
        note_use: Callable[[], None],
    ) -> None:
        module = self.module = experts.module
        self._experts, self._use_group, self._note_use = experts, use_group, note_use
        self._own: Any = type(module).forward
        total = sum(weight.num_bytes for weight in experts.stacks.values())
        self.stacks = {
            name: Stack(weight, device, cache_bytes * weight.num_bytes // total)
            for name, weight in experts.stacks.items()
        }
        self.num_spare = torch.zeros((), dtype=torch.int64, device=device)  # slots left over, all in all
        self._compute = torch.compiler.disable(ExpertsForward._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(self, *args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        name, num_experts = self._experts.choice, self._experts.num_experts
        ids = args[1] if len(args) > 1 else kwargs.get(name)
        if not isinstance(ids, torch.Tensor) or ids.numel() >= _MOST_CHOICES * num_experts:
            with self._use_group():
                return self._own(self.module, *args, **kwargs)
        if not ids.is_cuda:
            check_range(ids.reshape(-1), num_experts, name=f"{name} of {self._experts.group.name}")
        self._note_use()
        slots, held = slots_for(ids, num_experts)
        has_spare = may_leave_slots(ids)
        if has_spare:
            self.num_spare += (held < 0).sum()
        tensors = {name: stack.fetch(held, has_spare) for name, stack in self.stacks.items()}
        slots = slots.to(ids.dtype)
        args, kwargs = ((args[0], slots, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, name: slots})
        values = {**tensors, **self._small(held), "num_experts": len(held)}
        return self._own(stand_in(self.module, values), *args, **kwargs)

    def _small(self, held: torch.Tensor) -> dict[str, torch.Tensor]:
        """The experts' part of tensors that are too small to be offloaded: biases, scales."""
        all_tensors = [*self.module.named_parameters(recurse=False), *self.module.named_buffers(recurse=False)]
        tensors = {name: tensor for name, tensor in all_tensors if name not in self.stacks}
        if not tensors:
            return {}
        experts = held.clamp(0, self._experts.num_experts - 1)
        return {name: tensor[experts] for name, tensor in tensors.items()}

    @property
    def device_bytes(self) -> int:
        return sum(stack.cache.nbytes for stack in self.stacks.values())

    def counts(self) -> tuple[int, int, int, int]:
        """(rows of experts that were cached, rows that were not, bytes of these, bytes of these on the link). Waits for
        the device."""
        found = [(stack, stack.cache.stats()) for stack in self.stacks.values()]
        num_spare = int(self.num_spare)
        return (
            sum(max(0, stats.hits - num_spare * stack.num_rows) for stack, stats in found if stack.is_cached),
            sum(stats.misses for _, stats in found),
            sum(stats.misses * stack.row_bytes for stack, stats in found),
            sum(stats.link_bytes for _, stats in found),
        )

    def reset_counts(self) -> None:
        self.num_spare.zero_()
        for stack in self.stacks.values():
            stack.cache.reset_stats()
