"""A pool of pinned buffers for one owner.

Pinning memory takes tens of milliseconds, even for a small buffer. The core keeps the pinned memory of freed tensors
for the whole process (csrc/bindings/pinned_pool.h, `memory.empty`), but a caller that reuses such memory waits for all
GPUs. A `Pool` belongs to one object, its owner, which tells the pool when each buffer was last used. The stream that
writes to the buffer next waits for this use, so the host does not wait. Memory that a pool releases goes back to the
core.
"""

from __future__ import annotations

import torch

from .._common.rounding import rounded_up
from . import memory

_CPU = torch.device("cpu")


class Pool:
    """Hands out pinned buffers and takes them back. Only one thread at a time may use a pool.

    Sizes of buffers are rounded up to a few size classes. Each buffer is pinned separately, and is reused only for
    requests of its own size class.

    Attributes:
        held_bytes: total size in bytes of the buffers that the pool has pinned and not yet released.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        # For each size, the free buffers, each with the event after its last use.
        self._free: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}

    def take(self, num_bytes: int, writer: torch.Stream) -> torch.Tensor:
        """Returns a pinned buffer of at least num_bytes bytes.

        Args:
            num_bytes: the smallest size in bytes that the caller needs.
            writer: the stream that will write to the buffer first. This stream waits for the last use of the buffer.

        Raises:
            PinningError: the system refuses to pin more memory.
        """
        size = _size_class(num_bytes)
        if not self._free.get(size):
            part = memory.empty(size, _CPU, True)
            self.held_bytes += size
            return part
        part, used = self._free[size][-1]
        if used is not None:
            writer.wait_event(used)  # If this call raises, the buffer is still in the list of free buffers.
        self._free[size].pop()
        return part

    def give(self, part: torch.Tensor, used: torch.Event | None = None) -> None:
        """Gives a buffer back to the pool. used: an event recorded after the last work that uses the buffer. None: no
        work uses the buffer any more."""
        self._free.setdefault(part.numel(), []).append((part, used))

    def release(self) -> None:
        """Waits until no work uses the free buffers, and releases their memory."""
        for size, free in self._free.items():
            self.held_bytes -= size * len(free)
            for _, used in free:
                if used is not None:
                    used.synchronize()
        self._free.clear()


def _size_class(num_bytes: int) -> int:
    """Rounds num_bytes up to a size class, a multiple of 4,096 bytes. A size of 64 KiB or more grows by at most a
    sixteenth."""
    step = max(4096, 1 << max(0, num_bytes.bit_length() - 5))
    return rounded_up(num_bytes, step)
