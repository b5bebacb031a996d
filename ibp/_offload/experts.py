"""Fetches the experts of a mixture. A call for few tokens fetches only the experts that the router chose.

A stacked weight is one tensor with the weights of all experts. In its table, an expert is a fixed number of consecutive
rows. The experts of a call are decoded into slots, with which the module's original forward computes (`nn/_stacks.py`).
The host never waits for the GPU. A GPU fetches experts on a separate stream; the caller's stream waits for a stacked
weight only when the forward first reads the weight. So `down_proj` is fetched while `gate_up_proj` is multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._common.modes import is_transformed
from .._fetch.streaming import STREAM_SMS
from ..cache import RowCache
from ..nn._stacks import Calls, are_few, slots_for
from .weights import Weight

if TYPE_CHECKING:
    from .events import Events
    from .plan import Group, OffloadPlan

_BESIDE_ROWS = 512  # Size in bytes that is enough for the map and the counters of a cache of one row.


class CachedStack:
    """One stacked weight and the cache of its rows on a device.

    Slots without an expert request the first row of the table, which is always in the cache, so they cause no traffic
    on the link.

    cache_bytes: size in bytes of the cache on the device. If this size is too small for an LRU cache, the cache is
        static and holds only the first row."""

    def __init__(self, weight: Weight, cache_bytes: int) -> None:
        assert weight.table is not None
        table = weight.table
        # Number of rows of an expert, and size of a row in bytes.
        self.num_rows, self.row_bytes = table.num_rows // weight.shape[0], table.row_bytes
        self._row_shape, self._dtype = table.shape[1:], table.dtype
        self._expert_shape, self._stride = weight.shape[1:], weight.stride
        self.cache = RowCache(table, cache_bytes, [0], devices=weight.device, policy="lru")
        self.is_cached = self.cache.capacity > 0
        if not self.is_cached:
            self.cache = RowCache(table, table.row_bytes + _BESIDE_ROWS, [0], devices=weight.device)

    def room_for(self, rows: torch.Tensor) -> torch.Tensor:
        """Allocates memory for decoded rows. rows: the numbers of the rows."""
        return torch.empty((rows.numel(), *self._row_shape), dtype=self._dtype, device=rows.device)

    def fetch(self, rows: torch.Tensor, out: torch.Tensor | None = None, max_sms: int | None = None) -> torch.Tensor:
        """Fetches the rows with the given numbers, which make up whole experts, and returns them as a tensor of
        experts. out: memory that `room_for` returned. None: new memory is allocated."""
        fetched, shape = self.cache.index_select(rows, out=out, max_sms=max_sms, in_order=True), self._expert_shape
        return fetched.as_strided((rows.numel() // self.num_rows, *shape), self._stride)


class ExpertsForward:
    """Replaces the forward of a module of experts. It fetches experts, and calls the module's original forward with
    them, whichever implementation of experts transformers is set to use.

    Args:
        module: the module of experts.
        group: the group of the module's stacked weights. A call for many tokens fetches it as a whole.
        events: fetches the group, and records calls for few tokens.
    """

    def __init__(self, module: nn.Module, plan: OffloadPlan, group: Group, events: Events) -> None:
        self.module, self._name, self._events, self._place = module, group.name, events, events.places[group]
        self._calls, self._num_experts = Calls(type(module), plan.held[module]), int(module.num_experts)  # type: ignore
        self.stacks = {
            name: CachedStack(weight, plan.cache_bytes[weight]) for name, weight in plan.held[module].items()
        }
        self._num_rows = [stack.num_rows for stack in self.stacks.values()]
        # Number of slots without an expert, over all calls.
        self.num_spare = torch.zeros(1, dtype=torch.int64, device=group.weights[0].device)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        calls, module, num_experts = self._calls, self.module, self._num_experts
        ids = calls.ids_of(args, kwargs)
        if is_transformed() or not are_few(ids, num_experts):
            with self._events.using_all(module, self._place):
                return calls.kind.forward(module, *args, **kwargs)
        calls.check(ids, num_experts, self._name)
        self._events.note_choice(self._place)
        slots, held, rows = slots_for(ids, num_experts, self._num_rows, self.num_spare)
        if rows[0].is_cuda:
            return self._call_beside(rows, lambda experts: calls.with_slots(module, args, kwargs, slots, held, experts))
        fetches = {name: functools.partial(stack.fetch, of) for (name, stack), of in zip(self.stacks.items(), rows)}
        return calls.with_slots(module, args, kwargs, slots, held, fetches)

    def _call_beside(
        self, rows: Sequence[torch.Tensor], forward: Callable[[dict[str, functools.partial[torch.Tensor]]], Any]
    ) -> Any:
        """Calls forward while experts are fetched on a separate stream. Returns the result of forward.

        Args:
            rows: for each stacked weight, the numbers of the rows that fill the slots.
            forward: receives a dict that maps the name of each stacked weight to a function, which returns the experts
                in the slots. The current stream waits for a weight when its function is called, or else when forward
                has returned.
        """
        stacks = [(name, stack, of, stack.room_for(of)) for (name, stack), of in zip(self.stacks.items(), rows)]
        current, beside = torch.cuda.current_stream(rows[0].device), _stream_beside(rows[0].device)
        beside.wait_stream(current)
        left = set(self.stacks)  # names of the weights that the current stream has not waited for
        try:
            tensors = {}
            with torch.cuda.stream(beside):
                for name, stack, of, out in stacks:
                    sms = None if stack.is_cached else STREAM_SMS  # cached rows are faster than the link
                    fetched = stack.fetch(of, out, sms)
                    ready = functools.partial(current.wait_event, beside.record_event())
                    tensors[name] = functools.partial(_awaited, fetched, ready, left, name)
            return forward(tensors)
        finally:  # the current stream owns the memory, which it may reuse only after the fetches
            if left:
                current.wait_stream(beside)

    @property
    def device_bytes(self) -> int:
        return sum(stack.cache.nbytes for stack in self.stacks.values())

    def counts(self) -> tuple[int, int, int, int]:
        """Returns (number of rows of experts found in the cache, number of missed rows, size of the missed rows in
        bytes, number of bytes that crossed the link for them). Waits for the device."""
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
    """Returns the stream on which experts are fetched to a device. Its priority is high, so that the few thread blocks
    of a fetch are scheduled before those of matrix multiplications."""
    return torch.cuda.Stream(device, priority=-1)
