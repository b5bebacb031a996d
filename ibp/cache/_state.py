"""The state that the modules of a cache share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .._common.locks import ForkLock
from .._tables.compressed_tensor import CompressedTensor
from ._order import StreamOrder, key_of
from ._slabs import COUNTERS, Generation, Slab


class CacheState:
    """The rows that a cache holds, and the locks and streams that order readers and writers.

    Args:
        view: the table whose rows are held.
        devices: the devices of the slabs.
        writable: whether changed rows are kept in the slabs until they are flushed.
    """

    generation: Generation  # the slabs in use

    def __init__(self, view: CompressedTensor, devices: tuple[torch.device, ...], writable: bool) -> None:
        self.view, self.devices, self.writable = view, devices, writable
        self.workers = tuple(dict.fromkeys(devices))  # the devices, each once
        self.rows_per_item = max(1, view.geometry.item_bytes // view.row_bytes)
        # For each device, the counters of its lookups, see `COUNTERS`.
        self.counts = {device: torch.zeros(COUNTERS, dtype=torch.int64, device=device) for device in self.workers}
        self.change_lock = ForkLock()  # held from the beginning of a change to its end; taken before `lock`
        self.lock = ForkLock()  # held while lookups and changes are issued
        self.order = StreamOrder()  # orders the streams that read and write the slabs
        self.captured: list[Generation] = []  # generations that CUDA graphs read
        self._side_streams: dict[torch.device, torch.cuda.Stream] = {}
        # True if the system refused to pin the table, so that GPUs cannot read it. Then the cache holds nothing, and
        # all rows come from the table.
        self.is_idle = devices[0].type == "cuda" and view._is_refused and not view.is_pinned()
        self.serving = () if self.is_idle else self.workers  # the devices that look rows up

    def hold(self, generation: Generation, worker: torch.device, stream: torch.cuda.Stream | None) -> None:
        """Keeps the allocator from reusing the memory of the generation and of the counters until the stream's work is
        done, even if that memory is freed earlier. worker: the device of the stream. If stream is None, does
        nothing."""
        if stream is not None and key_of(stream) not in generation.streams:
            generation.hold_for(stream)
            self.counts[worker].record_stream(stream)

    def check(self, generation: Generation) -> None:
        """Raises RuntimeError if the table has changed since a generation was made."""
        if generation.codebook is not self.view.codebook:
            raise RuntimeError("the table has been refit since its rows were cached: refill the cache")
        if generation.version != self.view.version:
            raise RuntimeError(
                "the table's rows have changed other than by this cache: invalidate those, or change them by the "
                "cache's update_"
            )

    def generation_of(self, slabs: tuple[Slab, ...], ways: int, slot_bytes: int, capacity: int) -> Generation:
        """Returns a generation of slabs whose rows were copied from the present version of the table."""
        return Generation(slabs, ways, slot_bytes, self.view.codebook, self.view.version, capacity)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Makes the cache's own streams the current streams inside the context. The cache's streams first wait for the
        work that is already queued on the previously current streams. At the end the host waits for the cache's
        streams."""
        with ExitStack() as stack:
            for device in self.workers:
                if device.type != "cuda":
                    continue
                side = self._side_streams.setdefault(device, torch.cuda.Stream(device))
                side.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(side))
            yield
            self.wait_beside()

    def wait_beside(self) -> None:
        """Makes the host wait for the work on the cache's own streams."""
        for stream in self._side_streams.values():
            stream.synchronize()

    def synchronize(self) -> None:
        """Waits for all work on the cache's devices."""
        for device in self.workers:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
