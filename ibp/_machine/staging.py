"""Host memory to a GPU and back, block by block: the copy engine moves one block while the caller works on another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from . import memory

STAGED_BYTES = 16 << 20  # of a block: the copy engine is at its rate from 4 MiB on
_ALIGNMENT = 256  # bytes, of what shares a buffer


class _Turn:
    """A buffer on the GPU, one in pinned memory beside it where host memory is pageable, and what is known of their
    copies."""

    def __init__(self, device: torch.device, pageable: bool) -> None:
        self.device, self.pageable = device, pageable
        self.near = torch.empty(0, dtype=torch.uint8, device=device)
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()  # the last copy from or to the buffers
        self.used = torch.cuda.Event()  # the caller's last work on what was brought
        self.delivery: tuple[list[torch.Tensor], list[torch.Tensor]] | None = (
            None  # (targets, pinned sources) not yet copied by the CPU
        )

    def finish(self) -> None:
        """Waits for the last copy, and delivers what it brought to pinned memory."""
        self.copied.synchronize()
        if self.delivery is not None:
            copy_all(*self.delivery)
            self.delivery = None

    def reserve(self, num_bytes: int) -> bool:
        """Makes the buffers of a finished turn large enough. Returns whether they are new."""
        if self.near.numel() >= num_bytes:
            return False
        with torch.cuda.device(self.device):
            self.near = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            if self.pageable:
                self.pinned = _empty_pinned(num_bytes)
        return True


def _empty_pinned(num_bytes: int) -> torch.Tensor:
    """From torch's allocator, which keeps pinned memory for the next call; pageable where the system refuses."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        memory.warn_of_pageable(memory.PinningError(f"{num_bytes:,} bytes of memory cannot be pinned ({error})"))
        return torch.empty(num_bytes, dtype=torch.uint8)


class Staging:
    """Two buffers on a GPU, used in turn, and a stream of their own for the copies between them and host memory.

    Pageable memory goes through pinned buffers, which torch's intra-op threads fill or empty while the copy engine
    works on the other turn.
    Blocks go one way: `bring` and `release`, or `take` and `put`. The caller's work is on the device's current stream,
        whichever device is
    current. Leaving the context waits for all copies.

    Args:
        device: the GPU.
        pageable: whether what is copied from or to goes through pinned buffers.
    """

    def __init__(self, device: torch.device, pageable: bool) -> None:
        self._caller, self._copier = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self._turns = [_Turn(device, pageable) for _ in range(2)]

    def _next(self, num_bytes: int) -> _Turn:
        """The turn after the last one, finished and with room."""
        self._turns.reverse()
        turn = self._turns[0]
        turn.finish()
        if turn.reserve(num_bytes):
            self._copier.wait_stream(self._caller)  # which may still use the memory's former tensors
        return turn

    # ---- to the GPU ----

    def bring(self, part: torch.Tensor) -> tuple[_Turn, torch.Tensor]:
        """Starts copying bytes of host memory. Returns the turn, to release, and its bytes on the GPU, there once
        `wait` says so."""
        num_bytes = part.numel()
        turn = self._next(num_bytes)
        if turn.pageable:
            part = turn.pinned[:num_bytes].copy_(part)
        self._copier.wait_event(turn.used)
        with torch.cuda.stream(self._copier):
            near = turn.near[:num_bytes].copy_(part, non_blocking=True)
        turn.copied.record(self._copier)
        return turn, near

    def wait(self, turn: _Turn) -> None:
        """Makes the caller's stream wait for what was brought."""
        self._caller.wait_event(turn.copied)

    def release(self, turn: _Turn) -> None:
        """Says that all work on what was brought has been issued."""
        turn.used.record(self._caller)

    # ---- from the GPU ----

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """A tensor of bytes on the GPU of each size, which earlier copies no longer read."""
        starts = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        near = self._next(starts[-1]).near
        return [near[start : start + size] for start, size in zip(starts, sizes)]

    def put(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Starts copying what was taken last, as the work issued so far leaves it, to host memory.

        To pageable memory all of it is copied by one operation (see `copy_all`), at the latest when the context is
        left.
        """
        turn = self._turns[0]
        staged = list(targets)
        if turn.pageable:
            starts = [source.storage_offset() for source in sources]
            staged = [turn.pinned[start : start + source.numel()] for start, source in zip(starts, sources)]
        self._copier.wait_stream(self._caller)
        with torch.cuda.stream(self._copier):
            for to, source in zip(staged, sources):
                to.copy_(source, non_blocking=True)
        turn.copied.record(self._copier)
        if turn.pageable:
            turn.delivery = list(targets), staged  # last: whoever finishes the turn finds its copies recorded

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._copier.synchronize()
        for turn in reversed(self._turns):  # the older one first
            turn.finish()


class Direct:
    """Has the `take` and `put` of `Staging` where there is no link to hide: tensors of the worker's memory, copied at
    once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def put(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_all(targets, sources)

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def outlet(worker: torch.device, home: torch.device, pageable: bool) -> Staging | Direct:
    """What brings blocks from the device that makes them to the memory of another one, or of its own."""
    return Staging(worker, pageable) if worker.type == "cuda" and home.type == "cpu" else Direct(worker)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies every source to its target in one operation of torch: Python runs no signal handler before the last of
    them is copied."""
    torch._foreach_copy_(list(targets), list(sources))


def copied_ahead(parts: Iterable[torch.Tensor], device: torch.device, pageable: bool) -> Iterator[torch.Tensor]:
    """Parts of host memory on a GPU, the next one copied while the caller works on one: each is valid until the next
    one is asked for."""
    with Staging(device, pageable) as staging:
        parts = iter(parts)
        first = next(parts, None)
        coming = None if first is None else staging.bring(first)
        while coming is not None:
            turn, near = coming
            part = next(parts, None)
            coming = None if part is None else staging.bring(part)
            staging.wait(turn)
            yield near
            staging.release(turn)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """As tensor.cpu(), of a flat tensor of bytes; from a GPU through pinned memory, which is faster."""
    if not tensor.is_cuda:
        return tensor
    pinned = _empty_pinned(tensor.numel()).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As tensor.to(device), but a contiguous tensor in pageable memory goes to a GPU in blocks, as above, which is
    faster."""
    data = tensor.view(-1).view(torch.uint8)
    if device.type != "cuda" or data.is_cuda or data.numel() <= STAGED_BYTES or data.is_pinned():
        return tensor.to(device)
    near = torch.empty_like(data, device=device)
    parts = data.split(STAGED_BYTES)
    for to, block in zip(near.split(STAGED_BYTES), copied_ahead(parts, device, pageable=True)):
        to.copy_(block)
    return near.view(tensor.dtype).view(tensor.shape)
