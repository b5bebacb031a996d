"""Mixtures of experts: a call for few tokens fetches the experts that the router chose, and no others.

An expert is a fixed number of consecutive rows of a table for each stacked weight. The experts of a call are decoded
into slots, with which the module's own forward computes (`nn/_stacks.py`). Nothing waits for the GPU. On a GPU they
come on a stream beside the caller's, which waits for a stacked weight when the forward first reads it: `down_proj`
comes while `gate_up_proj` is multiplied.

Behind the experts of a layer come those that the next layer's router is likely to choose: it scores this layer's
vectors. The next call looks its experts up among them; wrong guesses cost bytes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .._fetch.streaming import STREAM_SMS
from .._machine.memory import is_capturing
from ..cache import RowCache
from ..cache._order import behind
from ..nn._stacks import Calls, are_few, slots_for
from .groups import StackedModule
from .resting import NotCopied
from .weights import Weight

Later = functools.partial[torch.Tensor]
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
        self._row_shape, self._dtype = table.shape[1:], table.dtype
        self.cache = RowCache(table, cache_bytes, [0], devices=device, policy="lru")
        self.is_cached = self.cache.capacity > 0
        if not self.is_cached:
            self.cache = RowCache(table, table.row_bytes + _BESIDE_ROWS, [0], devices=device)

    def room_for(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory for rows, whose numbers are given."""
        return torch.empty((rows.numel(), *self._row_shape), dtype=self._dtype, device=rows.device)

    def fetch(self, cache: RowCache, rows: torch.Tensor, out: torch.Tensor, max_sms: int | None = None) -> torch.Tensor:
        """Experts from the numbers of their rows, in memory that `room_for` gave. cache: itself, or what it gave."""
        return self.weight.items(cache.index_select(rows, out=out, max_sms=max_sms, in_order=True))


class Ahead(threading.local):
    """The experts that a thread has fetched for one mixture before its call, within a call of the model.

    A GPU does so while a CUDA graph is captured, and in a thread's first call, which loads the kernels. Outside of
    graphs the host takes as long for a layer as the link does (benchmarks/results/moe.csv, `host_us`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_on, self._is_warm = device, False, False
        self.fetched: tuple[ExpertsForward | None, dict[str, RowCache]] = None, {}

    def turn(self, is_called: bool) -> None:
        """Notes that a call of the model begins or ends."""
        self.take(None)
        self.is_on = is_called and (self._device.type == "cpu" or not self._is_warm or is_capturing(self._device))
        self._is_warm = True

    def take(self, owner: ExpertsForward | None) -> dict[str, RowCache]:
        """What has a mixture's experts, by name of the stacked weight: kept until the current stream waits for it.
        What was fetched for another mixture is given up."""
        (was, caches), self.fetched = self.fetched, (None, {})
        if was is owner:
            return caches
        if was is not None and was.num_spare.is_cuda:
            device = was.num_spare.device
            torch.cuda.current_stream(device).wait_stream(_stream_beside(device))
        return {}


class ExpertsForward(NotCopied):
    """The forward of a module of experts: its own, whatever implementation transformers is told to use.

    Args:
        use_group: called around a call for many tokens; the weights are there within.
        note_use: called before a call for few.
        router: whose scores say which experts are chosen, if it is known.
        ahead: where mixtures of the model note what they have fetched for each other.
    """

    def __init__(
        self,
        experts: StackedModule,
        device: torch.device,
        cache_bytes: int,
        use_group: Callable[[], AbstractContextManager[None]],
        note_use: Callable[[], None],
        router: torch.nn.Module | None,
        ahead: Ahead,
    ) -> None:
        self._router, self._ahead = router, ahead
        self._fetch_ahead: Callable[[Any, torch.cuda.Stream | None], None] = lambda vectors, beside: None
        self._experts, self._use_group, self._note_use = experts, use_group, note_use
        self._calls = Calls(type(experts.module), experts.stacks)
        total = sum(weight.num_bytes for weight in experts.stacks.values())
        self.stacks = {
            name: CachedStack(weight, device, cache_bytes * weight.num_bytes // total)
            for name, weight in experts.stacks.items()
        }
        self._num_rows = [stack.num_rows for stack in self.stacks.values()]
        self.num_spare = torch.zeros(1, dtype=torch.int64, device=device)  # slots left over, all in all
        self._compute = torch.compiler.disable(ExpertsForward._called)

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
        with self._coming(rows, args[0] if args else None) as tensors:
            return calls.with_slots(module, args, kwargs, slots, held, tensors)

    def expect(self, following: ExpertsForward, num_experts: int) -> None:
        """From now on a call fetches so many experts of a mixture on the same device, which is called next. Not for
        one with a cache: most of its experts are there, and it gains nothing (benchmarks/results/probes.csv)."""
        is_near = self.num_spare.device == following.num_spare.device
        is_cached = any(stack.is_cached for stack in following.stacks.values())
        if num_experts and is_near and following._router is not None and not is_cached:
            self._fetch_ahead = functools.partial(following.fetch_likeliest, num_experts)

    @torch.no_grad()
    def fetch_likeliest(self, num_experts: int, vectors: Any, beside: torch.cuda.Stream | None) -> None:
        """Fetches experts that all vectors together are likely to ask for. Rows come on the stream beside."""
        router: Any = self._router
        is_scored = isinstance(vectors, torch.Tensor) and vectors.shape[-1:] == router.weight.shape[1:]
        if not is_scored or not self._ahead.is_on:
            return
        vectors = vectors.reshape(-1, vectors.shape[-1]).to(router.weight.dtype)
        scores = torch.nn.functional.linear(vectors, router.weight, getattr(router, "bias", None))
        likeliest = scores.softmax(-1, dtype=torch.float32).sum(0).topk(min(num_experts, scores.shape[-1])).indices
        # Twice: slots are left over for the first row, which calls ask for again and again.
        _, _, rows = slots_for(likeliest.repeat(2), self._experts.num_experts, self._num_rows)
        stacks = zip(self.stacks.items(), rows)
        self._ahead.fetched = self, {name: stack.cache.prefetch(of, beside) for (name, stack), of in stacks}

    @contextmanager
    def _coming(self, rows: Sequence[torch.Tensor], vectors: Any) -> Iterator[dict[str, Later]]:
        """Functions that give the experts of slots, by name of the stacked weight. rows: numbers of each one's rows. On
        a GPU the current stream waits for a weight when its function is called, or at the end of the block."""
        near = self._ahead.take(self)
        fetches = {
            name: functools.partial(stack.fetch, near.get(name, stack.cache), of, stack.room_for(of))
            for (name, stack), of in zip(self.stacks.items(), rows)
        }
        if not rows[0].is_cuda:
            self._fetch_ahead(vectors, None)
            yield fetches
            return
        current, beside = torch.cuda.current_stream(rows[0].device), _stream_beside(rows[0].device)
        left = set(self.stacks)  # weights that the current stream has not waited for
        try:
            tensors: dict[str, Later] = {}
            with behind(beside):
                for name, fetch in fetches.items():
                    sms = None if self.stacks[name].is_cached else STREAM_SMS  # cached rows come faster than the link
                    fetched, ready = fetch(sms), functools.partial(current.wait_event, beside.record_event())
                    tensors[name] = functools.partial(_awaited, fetched, ready, left, name)
            self._fetch_ahead(vectors, beside)
            yield tensors
        finally:  # the memory is the current stream's
            if left:
                current.wait_stream(beside)

    @property
    def device_bytes(self) -> int:
        return sum(stack.cache.nbytes for stack in self.stacks.values())

    def counts(self) -> tuple[int, int, int, int, int]:
        """(rows of experts that were there when they were asked for, rows that were not, bytes of all that came, bytes
        of these on the link, of these fetched ahead). Waits for the device."""
        found = [(stack, stack.cache.stats()) for stack in self.stacks.values()]
        num_spare = int(self.num_spare)
        return (
            sum(max(0, stats.hits - num_spare * stack.num_rows) for stack, stats in found),
            sum(stats.misses for _, stats in found),
            sum((stats.misses + stats.prefetched) * stack.row_bytes for stack, stats in found),
            sum(stats.link_bytes + stats.prefetched_bytes for _, stats in found),
            sum(stats.prefetched_bytes for _, stats in found),
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
