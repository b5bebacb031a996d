"""Copies host memory to a GPU and back, block by block. The copy engine moves one block while the caller works on
another.

Pageable memory goes through pinned memory, which torch's intra-op threads fill or empty while the copy engine works on
the other buffer of a ring (`ring.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .._common.rounding import rounded_up
from . import memory
from .ring import Ring, Turn

STAGED_BYTES = 16 << 20  # size in bytes of a block; the copy engine reaches its full rate at 4 MiB
_ALIGNMENT = 256  # bytes, of tensors that share a buffer
_MOST_OF_FREE = 0.25  # the share of a GPU's free memory that pinned bytes may take if they are copied there as a whole


def empty_pinned(num_bytes: int) -> torch.Tensor:
    """Returns memory from torch's allocator, which keeps pinned memory for the next call. It is pageable if the
    system refuses."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        memory.warn_of_pageable(memory.PinningError(f"{num_bytes:,} bytes of memory cannot be pinned ({error})"))
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return empty_pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def _ring(device: torch.device, pageable: bool) -> tuple[Ring, torch.cuda.Stream]:
    """Returns a ring for work on the current stream of a device, and that stream. pageable: whether buffers also
    have pinned memory."""
    worker = torch.cuda.current_stream(device)
    return Ring(device, worker, empty_host=empty_pinned if pageable else None), worker


class Outlet(contextlib.AbstractContextManager["Outlet"]):
    """A context that copies bytes which a GPU computes to host memory, while work on the current stream goes on.

    Leaving the context waits for all copies.

    device: the GPU; pageable: whether the host memory is pageable."""

    def __init__(self, device: torch.device, pageable: bool) -> None:
        self._ring, self._worker = _ring(device, pageable)
        self._pageable = pageable
        self._deliveries: dict[Turn, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # (targets, pinned sources)

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns a tensor of bytes on the GPU for each size. Earlier copies no longer read them."""
        starts = list(itertools.accumulate((rounded_up(size, _ALIGNMENT) for size in sizes), initial=0))
        turn = self._ring.next()
        turn.free.synchronize()
        self._deliver(turn)
        turn.reserve(starts[-1])
        turn.claim(self._worker)
        return [turn.memory[start : start + size] for start, size in zip(starts, sizes)]

    def put(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Starts copying the tensors that were taken last to host memory, with the content that the work issued so far
        gives them.

        If the memory is pageable, all of them are copied to it by one operation (see `copy_all`), at the latest when
        the context is left.
        """
        turn, staged = self._ring.last, list(targets)
        if self._pageable:
            starts = [source.storage_offset() for source in sources]
            staged = [turn.host[start : start + source.numel()] for start, source in zip(starts, sources)]
        turn.hand_over(self._worker)
        turn.send(self._ring.stream, zip(staged, sources))
        if self._pageable:
            # last, because `_deliver` must find only copies that are recorded
            self._deliveries[turn] = list(targets), staged

    def _deliver(self, turn: Turn) -> None:
        """Copies the bytes of a turn from its pinned memory to their targets."""
        if turn in self._deliveries:
            copy_all(*self._deliveries[turn])
            del self._deliveries[turn]

    def __exit__(self, *_: object) -> None:
        self._ring.stream.synchronize()
        for turn in list(self._deliveries):
            self._deliver(turn)


class Direct(contextlib.AbstractContextManager["Direct"]):
    """Has the methods `take` and `put` of `Outlet` for the case that no link has to be hidden. Its tensors are in
    the worker's memory and are copied at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def put(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_all(targets, sources)

    def __exit__(self, *_: object) -> None:
        return None


def outlet(worker: torch.device, home: torch.device, pageable: bool) -> Outlet | Direct:
    """Returns an object that brings blocks from the device that makes them to the memory of another device, or of
    its own."""
    return Outlet(worker, pageable) if worker.type == "cuda" and home.type == "cpu" else Direct(worker)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies every source to its target in one operation of torch, so that Python runs no signal handler before all
    are copied."""
    torch._foreach_copy_(list(targets), list(sources))


def copied_ahead(parts: Iterable[torch.Tensor], device: torch.device, pageable: bool) -> Iterator[torch.Tensor]:
    """Yields parts of host memory on a GPU. The next part is copied while the caller works on one. Each part is
    valid until the next one is asked for. The work is on the stream that is current when the first part is asked
    for."""
    ring, worker = _ring(device, pageable)

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
            turn.wait(worker)
            yield near
            turn.release(worker)
    finally:
        ring.stream.synchronize()


def _goes_whole(data: torch.Tensor, device: torch.device) -> bool:
    """Returns whether bytes are copied to a device as a whole: if they are pinned and do not take too much of its
    memory."""
    if device.type != "cuda" or data.is_cuda or data.numel() <= STAGED_BYTES or not data.is_pinned():
        return False
    return data.numel() <= _MOST_OF_FREE * torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def whole_ahead(data: torch.Tensor, device: torch.device) -> Iterator[Callable[[], torch.Tensor]]:
    """Yields a function that returns bytes where work on a GPU reads them. If `_goes_whole` says so, this is a copy on
    the GPU, made while the caller does other work; otherwise it is `data` itself.

    The work is on the stream that is current when the context is entered. Leaving the context waits for the copy.
    """
    if not _goes_whole(data, device):
        yield lambda: data
        return
    ring, worker = _ring(device, pageable=False)
    turn = ring.next()
    turn.reserve(data.numel())
    turn.bring(ring.stream, [(turn.memory, data)])

    def near() -> torch.Tensor:
        turn.wait(worker)
        return turn.memory

    try:
        yield near
    finally:
        ring.stream.synchronize()


class Coming:
    """A small tensor on its way to the host. It is copied after the work on the current stream, which does not wait
    for the copy. A tensor in host memory is used as it is."""

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
    """Returns tensor.cpu() for a flat tensor of bytes. Bytes on a GPU come through pinned memory, which is faster."""
    return Coming(tensor).wait() if tensor.is_cuda else tensor


def queued(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns tensor.to(device) for a small tensor in host memory. Work on a GPU's current stream finds it there,
    and the call does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return pinned_like(tensor).copy_(tensor).to(device, non_blocking=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns tensor.to(device). A contiguous tensor in pageable memory goes to a GPU in blocks, which is faster."""
    data = tensor.view(-1).view(torch.uint8)
    if device.type != "cuda" or data.is_cuda or data.numel() <= STAGED_BYTES or data.is_pinned():
        return tensor.to(device)
    near = torch.empty_like(data, device=device)
    parts = data.split(STAGED_BYTES)
    for to, block in zip(near.split(STAGED_BYTES), copied_ahead(parts, device, pageable=True)):
        to.copy_(block)
    return near.view(tensor.dtype).view(tensor.shape)
