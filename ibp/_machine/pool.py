"""Parts of pinned memory, kept for their next user and counted.

Pinning memory takes tens of milliseconds, however little it is. The core keeps whole allocations for the process after
their last tensor is gone (csrc/bindings/pinned_pool.h, `memory.empty`), but a caller that takes one of them waits for
all GPUs. A `Pool` has one user: it holds its allocations, and streams, not the host, wait for the last use of a part.
Memory that it releases goes back to the core.
"""

from __future__ import annotations

import torch

from .._common.rounding import rounded_up
from . import memory

_CPU = torch.device("cpu")


class Pool:
    """Hands out parts of pinned memory and takes them back. Only one thread at a time may use it.

    Parts have few sizes. Each is pinned separately, and is only handed out again for the same size.

    Attributes:
        held_bytes: number of bytes that are pinned and have not been released.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._free: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}  # by size

    def take(self, num_bytes: int, writer: torch.Stream) -> torch.Tensor:
        """Returns a part of num_bytes bytes or somewhat more.

        Args:
            num_bytes: how many bytes are needed.
            writer: the stream that writes to the part first. It waits for the part's last use.

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
            writer.wait_event(used)  # if it raises, the part is still free
        self._free[size].pop()
        return part

    def give(self, part: torch.Tensor, used: torch.Event | None = None) -> None:
        """Returns a part to the pool. used: an event after the work that still uses the part. None: no work uses it."""
        self._free.setdefault(part.numel(), []).append((part, used))

    def release(self) -> None:
        """Waits until no work uses the free parts, and releases them."""
        for size, free in self._free.items():
            self.held_bytes -= size * len(free)
            for _, used in free:
                if used is not None:
                    used.synchronize()
        self._free.clear()


def _size_class(num_bytes: int) -> int:
    """Returns the next number with few significant bits; it is at most a sixteenth larger."""
    step = max(4096, 1 << max(0, num_bytes.bit_length() - 5))
    return rounded_up(num_bytes, step)
