"""Copies host memory to a GPU and back, block by block. The copy engine copies a block while the GPU works on another
one.

The first part of the file has rings of GPU buffers, the second part copies blocks through them, and the last part
copies a tensor in one piece, so that the host need not wait for a small one.

A ring serves one direction. To bring bytes to the GPU, copies on one stream fill a buffer, and work on another stream
reads it, or "empties" it. To send bytes to the host, work fills a buffer, and copies empty it. Each buffer has two
events, `filled` and `free`. In both directions a buffer goes through these steps:

| step | stream | what the host queues there |
| --- | --- | --- |
| claim | filling | a wait for `free`, then the writes to the buffer |
| hand over | filling | records `filled` |
| wait | emptying | a wait for `filled`, then the reads of the buffer |
| release | emptying | records `free` |

The host must take the steps of a buffer in this order, and may then begin again with the first step. Before it does, it
may repeat wait and release on the same stream. This order is safe. Before the filling stream writes, it waits for
`free`, which is recorded after all reads of the previous bytes. Before the emptying stream reads, it waits for
`filled`, which is recorded after the writes. CUDA does not wait for an event that was never recorded, so a new buffer
can be claimed at once. The host waits only before the CPU itself uses a buffer's host memory: for `filled` if the ring
brings bytes to the GPU, and for `free` if it sends bytes to the host.

A buffer that grows gets new memory that belongs to the current stream, so the buffer's streams first wait for the
current stream. `record_stream` tells torch's allocator of these streams, so that the allocator does not reuse the old
memory before their work is done.

Blocks of pageable memory are copied through pinned buffers: torch's intra-op threads fill or empty the pinned memory of
one of a ring's buffers while the copy engine works on the other buffer.

Rings are used for blocks of tensors (here), rows that the CPU gathers (`_fetch/host_gather.py`), layers of KV-caches,
and blocks of checkpoints. Whole coded tensors (`ibp.offload`, `decompress`) use a ring of the core instead
(csrc/cuda/stream/stream.cu), which decodes bytes on arrival. Python calls the core's ring once per tensor, not once per
buffer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .._common.modes import outside_of_modes
from .._common.sequences import rounded_up
from . import memory

STAGED_BYTES = 16 << 20  # Size in bytes of a block. The copy engine reaches its full rate at 4 MiB.
_ALIGNMENT = 256  # Tensors that share a buffer begin at multiples of this many bytes.
_MOST_OF_FREE = 0.25  # Data is copied to a GPU as a whole only if it takes at most this fraction of the free memory.

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]  # Pairs (destination, source).


# ---- rings ----


class Turn:
    """A buffer of a ring, with its events.

    Args:
        device: the GPU.
        streams: all streams that use the buffer.
        num_bytes: initial size of the buffer in bytes.
        empty_host: a function that allocates a given number of bytes of host memory. The buffer then also has host
            memory, of the same size as its GPU memory. None: the buffer has no host memory.

    Attributes:
        memory, host: the uint8 tensors of the buffer on the GPU and in host memory. New tensors replace them when the
            buffer grows.
        filled, free: the events.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Iterable[torch.cuda.Stream],
        num_bytes: int = 0,
        empty_host: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._device, self._streams, self._empty_host = device, tuple(streams), empty_host
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.filled, self.free = torch.cuda.Event(), torch.cuda.Event()
        self.reserve(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffer at least num_bytes bytes large. If the buffer grows, its contents are lost."""
        if self.memory.numel() >= num_bytes:
            return
        with outside_of_modes(), torch.cuda.device(self._device):
            if self._empty_host is not None:
                self.host = self._empty_host(num_bytes)
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(current)
            self.memory.record_stream(stream)

    def claim(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.free)

    def hand_over(self, stream: torch.cuda.Stream) -> None:
        self.filled.record(stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.filled)

    def release(self, stream: torch.cuda.Stream) -> None:
        self.free.record(stream)

    def bring(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        """Claims the buffer, fills it with copies on a stream, and hands it over."""
        self.claim(stream)
        _copy(stream, copies)
        self.hand_over(stream)

    def send(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        """Waits for the buffer on a stream, empties it with copies on this stream, and releases it."""
        self.wait(stream)
        _copy(stream, copies)
        self.release(stream)


def _copy(stream: torch.cuda.Stream, copies: Copies) -> None:
    with torch.cuda.stream(stream):
        for to, source in copies:
            to.copy_(source, non_blocking=True)


class Ring:
    """A ring of buffers.

    Args:
        turns: number of buffers.
        device, num_bytes, empty_host: as for `Turn`.

    Attributes:
        worker: the stream of the work that reads or writes the buffers.
        stream: the stream on which copies to and from the buffers run.
    """

    def __init__(
        self,
        device: torch.device,
        worker: torch.cuda.Stream,
        num_bytes: int = 0,
        turns: int = 2,
        empty_host: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.worker, self.stream = worker, torch.cuda.Stream(device)
        self._turns = deque(Turn(device, (self.stream, worker), num_bytes, empty_host) for _ in range(turns))

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the buffers in GPU memory."""
        return sum(turn.memory.numel() for turn in self._turns)

    @property
    def last(self) -> Turn:
        """The buffer that the latest call of `next` returned."""
        return self._turns[-1]

    def next(self) -> Turn:
        """Returns the least recently used buffer."""
        self._turns.rotate(-1)
        return self.last


def empty_pinned(num_bytes: int) -> torch.Tensor:
    """Returns an uninitialised pinned uint8 tensor from torch's caching allocator. If the system refuses to pin the
    memory, warns and returns a pageable tensor."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        memory.warn_of_pageable(memory.PinningError(f"{num_bytes:,} bytes of memory cannot be pinned ({error})"))
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return empty_pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def _ring(device: torch.device, pageable: bool) -> Ring:
    """Returns a ring for work on the current stream of a device. pageable: whether the data is in pageable memory, so
    that each buffer also needs pinned host memory."""
    return Ring(device, torch.cuda.current_stream(device), empty_host=empty_pinned if pageable else None)


# ---- blocks ----


class Outlet(contextlib.AbstractContextManager["Outlet"]):
    """A context that copies the results of a device's work to other memory, block by block.

    The results of a GPU go to host memory through a ring: they are copied while the GPU goes on with the work on the
    current stream, and leaving the context waits for all copies. If the device's memory can be copied to the targets
    directly, there is no ring, and `put` copies at once.

    Args:
        device: the device that does the work.
        pageable: whether the host memory is pageable.
        is_direct: whether there is no ring.
    """

    def __init__(self, device: torch.device, pageable: bool, is_direct: bool = False) -> None:
        self._device, self._pageable = device, pageable
        self._ring = None if is_direct else _ring(device, pageable)
        self._deliveries: dict[Turn, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # (targets, pinned sources)

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """For each size in bytes, returns a uint8 tensor on the device to which the caller's work may write. Waits
        until earlier copies from this memory are done."""
        if self._ring is None:
            return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        starts = list(itertools.accumulate((rounded_up(size, _ALIGNMENT) for size in sizes), initial=0))
        turn = self._ring.next()
        turn.free.synchronize()
        self._deliver(turn)
        turn.reserve(starts[-1])
        turn.claim(self._ring.worker)
        return [turn.memory[start : start + size] for start, size in zip(starts, sizes)]

    def put(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Starts copying the tensors of the latest call of `take` to their targets, after the work that is queued on
        the current stream.

        If a ring brings them to pageable memory, the bytes are first copied to pinned memory. Later, at the latest when
        the context is left, one operation copies all of them to their targets (see `copy_all`).

        Args:
            targets: the tensors to copy to.
            sources: the tensors that `take` returned.
        """
        if self._ring is None:
            copy_all(targets, sources)
            return
        turn, staged = self._ring.last, list(targets)
        if self._pageable:
            starts = [source.storage_offset() for source in sources]
            staged = [turn.host[start : start + source.numel()] for start, source in zip(starts, sources)]
        turn.hand_over(self._ring.worker)
        turn.send(self._ring.stream, zip(staged, sources))
        if self._pageable:
            # This must come last: `_deliver` must find only copies whose events have been recorded.
            self._deliveries[turn] = list(targets), staged

    def _deliver(self, turn: Turn) -> None:
        """Copies the bytes of a buffer from its pinned memory to their targets, if this has not been done yet."""
        if turn in self._deliveries:
            copy_all(*self._deliveries[turn])
            del self._deliveries[turn]

    def __exit__(self, *_: object) -> None:
        if self._ring is not None:
            self._ring.stream.synchronize()
        for turn in list(self._deliveries):
            self._deliver(turn)


def outlet(worker: torch.device, home: torch.device, pageable: bool) -> Outlet:
    """Returns the `Outlet` for blocks that the device `worker` computes, and that go to memory of the device `home`.
    pageable: whether this memory is pageable, if `home` is the CPU."""
    return Outlet(worker, pageable, is_direct=worker.type != "cuda" or home.type != "cpu")


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies every source to its target in one operation of torch, so that Python runs no signal handler until all of
    them are copied."""
    torch._foreach_copy_(list(targets), list(sources))


def copied_ahead(parts: Iterable[torch.Tensor], device: torch.device, pageable: bool) -> Iterator[torch.Tensor]:
    """Copies parts of host memory to a GPU and yields the copies, one by one. The next part is copied while the caller
    works on the present one. The caller must not use a copy after it has requested the next one, and must queue its
    work on the stream that was current when it requested the first. pageable: whether the parts are in pageable
    memory."""
    ring = _ring(device, pageable)

    def bring(part: torch.Tensor) -> tuple[Turn, torch.Tensor]:
        turn, num_bytes = ring.next(), part.numel()
        turn.filled.synchronize()
        turn.reserve(num_bytes)
        near = turn.memory[:num_bytes]
        turn.bring(ring.stream, [(near, turn.host[:num_bytes].copy_(part) if pageable else part)])
        return turn, near

    try:
        brought = map(bring, parts)
        coming = next(brought, None)
        while coming is not None:
            (turn, near), coming = coming, next(brought, None)
            turn.wait(ring.worker)
            yield near
            turn.release(ring.worker)
    finally:
        ring.stream.synchronize()


def _goes_whole(data: torch.Tensor, device: torch.device) -> bool:
    """Returns whether `data` is to be copied to a GPU in one copy, not block by block. This is so if `data` is pinned,
    is larger than one block, and takes no more than a quarter of the GPU's free memory."""
    if device.type != "cuda" or data.is_cuda or data.numel() <= STAGED_BYTES or not data.is_pinned():
        return False
    return data.numel() <= _MOST_OF_FREE * torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def whole_ahead(data: torch.Tensor, device: torch.device) -> Iterator[Callable[[], torch.Tensor]]:
    """A context that yields a function. The function returns the bytes of `data` for work on the device. If
    `_goes_whole` holds, it returns a copy of `data` on the GPU, which is made while the caller does other work.
    Otherwise it returns `data` itself.

    The work must be on the stream that is current when the context is entered. Leaving the context waits for the copy.
    """
    if not _goes_whole(data, device):
        yield lambda: data
        return
    ring = _ring(device, pageable=False)
    turn = ring.next()
    turn.reserve(data.numel())
    turn.bring(ring.stream, [(turn.memory, data)])

    def near() -> torch.Tensor:
        turn.wait(ring.worker)
        return turn.memory

    try:
        yield near
    finally:
        ring.stream.synchronize()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns tensor.to(device) for a contiguous tensor. From pageable memory, a tensor is copied to a GPU in blocks,
    which is faster."""
    data = tensor.view(-1).view(torch.uint8)
    if device.type != "cuda" or data.is_cuda or data.numel() <= STAGED_BYTES or data.is_pinned():
        return tensor.to(device)
    near = torch.empty_like(data, device=device)
    parts = data.split(STAGED_BYTES)
    for to, block in zip(near.split(STAGED_BYTES), copied_ahead(parts, device, pageable=True)):
        to.copy_(block)
    return near.view(tensor.dtype).view(tensor.shape)


# ---- tensors in one piece ----


class Coming:
    """A small tensor that is being copied to the host. The copy is queued on the current stream, after the work that is
    already there; the host waits for the copy only in `wait`. A tensor that is already in host memory is not copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._copied = tensor, None
        if tensor.is_cuda:
            self._host = pinned_like(tensor).copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def is_here(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns tensor.cpu(). Bytes on a GPU are copied to pinned memory, which is faster."""
    return Coming(tensor).wait() if tensor.is_cuda else tensor


def queued(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns tensor.to(device) for a small tensor in host memory, without waiting. The copy is queued on the GPU's
    current stream, so later work on that stream can use the result."""
    if device.type != "cuda":
        return tensor.to(device)
    return pinned_like(tensor).copy_(tensor).to(device, non_blocking=True)
