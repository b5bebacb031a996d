"""Mixtures of experts: a call for few tokens fetches the experts that the router chose, and no others.

An expert is a fixed number of consecutive rows of a table for each stacked weight. The experts of a call are decoded
into slots, with which the module's own forward computes (`nn/_stacks.py`). Nothing waits for the GPU. On a GPU they
come on a stream beside the caller's, which waits for a stacked weight when the forward first reads it: `down_proj`
comes while `gate_up_proj` is multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .._common.graphs import outside_of_graphs
from .._fetch.streaming import STREAM_SMS
from ..cache import RowCache
from ..nn._stacks import Calls, are_few, slots_for
from .groups import StackedModule
from .resting import NotCopied
from .weights import Weight

_BESIDE_ROWS = 512  # bytes: the map and the counters of a cache of one row take less


class CachedStack:
    """One stacked weight on a device: its experts, looked up by a cache of rows.

    Slots that are left over ask for the first row again and again, which the cache has on the device: they fetch
    nothing.

    cache_bytes: of the device; fewer than `RowCache` needs to replace rows: the cache holds the first row alone."""

    def __init__(self, weight: Weight, device: torch.device, cache_bytes: int) -> None:
        assert weight.table is not None
        self.weight, table = weight, weight.table
        self.num_rows, self.row_bytes = table.num_rows // weight.shape[0], table.row_bytes  # of an expert, of a row
        self._row_shape, self._dtype = table.shape[1:], table.dtype
        self.cache = RowCache(table, cache_bytes, [0], devices=device, policy="lru")
        self.is_cached = self.cache.capacity > 0
        if not self.is_cached:
            self.cache = RowCache(table, table.row_bytes + _BESIDE_ROWS, [0], devices=device)

    def room_for(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory for rows, whose numbers are given."""
        return torch.empty((rows.numel(), *self._row_shape), dtype=self._dtype, device=rows.device)

    def fetch(self, rows: torch.Tensor, out: torch.Tensor, max_sms: int | None = None) -> torch.Tensor:
        """Experts from the numbers of their rows, in memory that `room_for` gave."""
        return self.weight.items(self.cache.index_select(rows, out=out, max_sms=max_sms, in_order=True))


class ExpertsForward(NotCopied):
    """The forward of a module of experts: its own, whatever implementation transformers is told to use. use_group:
    called around a call for many tokens; the weights are there within; note_use: called before a call for few."""

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
        self._num_rows = [stack.num_rows for stack in self.stacks.values()]
        self.num_spare = torch.zeros(1, dtype=torch.int64, device=device)  # slots left over, all in all
        self._compute = outside_of_graphs(ExpertsForward._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(self, *args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        calls, module, num_experts = self._calls, self._experts.module, self._experts.num_experts
        ids = calls.ids_of(args, kwargs)
        if not are_few(ids, num_experts):
            with self._use_group():
                return calls.kind.forward(module, *args, **kwargs)
        calls.check(ids, num_experts, self._experts.group.name)
        self._note_use()
        slots, held, rows = slots_for(ids, num_experts, self._num_rows, self.num_spare)
        with self._coming(rows) as tensors:
            return calls.with_slots(module, args, kwargs, slots, held, tensors)

    @contextmanager
    def _coming(self, rows: Sequence[torch.Tensor]) -> Iterator[dict[str, functools.partial[torch.Tensor]]]:
        """Functions that give the experts of slots, by name of the stacked weight. rows: numbers of each one's rows. On
        a GPU the current stream waits for a weight when its function is called, or at the end of the block."""
        stacks = [(name, stack, of, stack.room_for(of)) for (name, stack), of in zip(self.stacks.items(), rows)]
        if not rows[0].is_cuda:
            yield {name: functools.partial(stack.fetch, of, out) for name, stack, of, out in stacks}
            return
        current, beside = torch.cuda.current_stream(rows[0].device), _stream_beside(rows[0].device)
        beside.wait_stream(current)
        left = set(self.stacks)  # weights that the current stream has not waited for
        try:
            tensors = {}
            with torch.cuda.stream(beside):
                for name, stack, of, out in stacks:
                    sms = None if stack.is_cached else STREAM_SMS  # cached rows come faster than the link
                    fetched = stack.fetch(of, out, sms)
                    ready = functools.partial(current.wait_event, beside.record_event())
                    tensors[name] = functools.partial(_awaited, fetched, ready, left, name)
            yield tensors
        finally:  # the memory is the current stream's
            if left:
                current.wait_stream(beside)

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
