"""Mixtures of experts: a call for few tokens fetches the experts that the router chose, and no others.

An expert is a fixed number of consecutive rows of a table for each stacked weight. The experts of a call are decoded
into slots, with which the module's own forward computes (`nn/_stacks.py`). Nothing waits for the GPU. On a GPU they
come on a stream beside the caller's, which waits for a stacked weight when the forward first reads it: `down_proj`
comes while `gate_up_proj` is multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .._fetch.streaming import STREAM_SMS
from ..cache import RowCache
from ..nn._stacks import MOST_CHOICES, Calls, may_leave_slots, rows_of, slots_for
from .groups import StackedModule
from .resting import NotCopied
from .weights import Weight

_BESIDE_ROWS = 512  # bytes: the map and the counters of a cache of one row take less


class CachedStack:
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

    def room_for(self, experts: torch.Tensor, has_spare: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers of the rows of the experts in slots, room for these rows). has_spare: whether slots may be left
        over."""
        ids = rows_of(self._numbers, experts, self.num_rows)
        if has_spare:
            ids.clamp_(min=0)
        return ids, torch.empty((len(ids), self.cache.shape[1]), dtype=self.cache.dtype, device=ids.device)


class ExpertsForward(NotCopied):
    """The forward of a module of experts: its own, whatever implementation transformers is told to use.

    Args:
        use_group: called around a call for many tokens; the weights are there within.
        note_use: called before a call for few.
    """

    def __init__(
        self,
        experts: StackedModule,
        device: torch.device,
        cache_bytes: int,
        use_group: Callable[[], AbstractContextManager[None]],
        note_use: Callable[[], None],
    ) -> None:
        self._experts, self._use_group, self._note_use = experts, use_group, note_use
        self._calls = Calls(type(experts.module), experts.stacks)
        total = sum(weight.num_bytes for weight in experts.stacks.values())
        self.stacks = {
            name: CachedStack(weight, device, cache_bytes * weight.num_bytes // total)
            for name, weight in experts.stacks.items()
        }
        self.num_spare = torch.zeros((), dtype=torch.int64, device=device)  # slots left over, all in all
        self._compute = torch.compiler.disable(ExpertsForward._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(self, *args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        calls, module, num_experts = self._calls, self._experts.module, self._experts.num_experts
        ids = calls.ids_of(args, kwargs)
        if ids is None or ids.numel() >= MOST_CHOICES * num_experts:
            with self._use_group():
                return calls.kind.forward(module, *args, **kwargs)
        calls.check(ids, num_experts, self._experts.group.name)
        self._note_use()
        slots, held = slots_for(ids, num_experts)
        has_spare = may_leave_slots(ids)
        if has_spare:
            self.num_spare += (held < 0).sum()
        with self._coming(held, has_spare) as tensors:
            return calls.with_slots(module, args, kwargs, slots, held, tensors)

    @contextmanager
    def _coming(self, held: torch.Tensor, has_spare: bool) -> Iterator[dict[str, functools.partial[torch.Tensor]]]:
        """Functions that give the stacked weights of the experts of slots, by name. On a GPU the current stream waits
        for a weight when its function is called, or at the end of the block."""
        rooms = {name: stack.room_for(held, has_spare) for name, stack in self.stacks.items()}
        if not held.is_cuda:
            yield {name: functools.partial(self._fetch, name, *room) for name, room in rooms.items()}
            return
        current, beside = torch.cuda.current_stream(held.device), _stream_beside(held.device)
        beside.wait_stream(current)
        left = set(rooms)  # weights that the current stream has not waited for
        try:
            tensors = {}
            with torch.cuda.stream(beside):
                for name, room in rooms.items():
                    sms = None if self.stacks[name].is_cached else STREAM_SMS  # cached rows come faster than the link
                    fetched = self._fetch(name, *room, max_sms=sms)
                    ready = functools.partial(current.wait_event, beside.record_event())
                    tensors[name] = functools.partial(_awaited, fetched, ready, left, name)
            yield tensors
        finally:  # the memory is the current stream's
            if left:
                current.wait_stream(beside)

    def _fetch(self, name: str, ids: torch.Tensor, out: torch.Tensor, max_sms: int | None = None) -> torch.Tensor:
        stack = self.stacks[name]
        return stack.weight.items(stack.cache.index_select(ids, out=out, max_sms=max_sms))

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


def _awaited(tensor: torch.Tensor, wait: Callable[[], None], left: set[str], name: str) -> torch.Tensor:
    wait()
    left.discard(name)
    return tensor


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """The stream on which experts come to a device. Its few blocks get SMs before those of products."""
    return torch.cuda.Stream(device, priority=-1)
