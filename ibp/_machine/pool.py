"""Parts of pinned memory, kept for their next user and counted.

To pin memory takes tens of milliseconds, however little it is. The core keeps whole allocations for the process, once
their last tensor is gone (csrc/bindings/pinned_pool.h, `memory.empty`); whoever takes one of them waits for all GPUs. A
`Pool` is of one user: it holds its allocations, hands them out in parts, and lets streams wait for the last use of a
part, not the host. What it lets go of goes back to the core.
"""

from __future__ import annotations

import torch

from .._common.rounding import rounded_up
from . import memory

_ALIGNMENT = 256
_LARGEST_BLOCK = 1 << 30
_CPU = torch.device("cpu")


class Pool:
    """Hands out parts of pinned memory and takes them back. For one thread at a time.

    Args:
        cuts: whether parts are cut from larger ones, as suits parts that are kept for long. Otherwise every part is
            pinned apart, in few sizes, and is handed out again for its own size.

    Attributes:
        held_bytes: pinned, and not let go of.
    """

    def __init__(self, cuts: bool = False) -> None:
        self._cuts, self.held_bytes = cuts, 0
        self._free: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}  # by size

    def take(self, num_bytes: int, writer: torch.Stream | None = None, others: int = 0) -> torch.Tensor:
        """A part of that many bytes or somewhat more.

        Args:
            num_bytes: wanted.
            writer: the stream that writes to the part first, behind its last use. None: parts were given back without
                events, since all work on them is on one stream.
            others: bytes that are about to be asked for, pinned at once where parts are cut.

        Raises:
            PinningError: the system pins no more memory.
        """
        size = rounded_up(num_bytes, _ALIGNMENT) if self._cuts else _size_class(num_bytes)
        found = size if size in self._free else None
        if found is None and self._cuts:
            found = min((free for free in self._free if free > size), default=None)
        if found is None:
            block_bytes = max(size, min(size + others, _LARGEST_BLOCK)) if self._cuts else size
            part, used = memory.empty(block_bytes, _CPU, True), None
            self.held_bytes += block_bytes
        else:
            part, used = self._free[found][-1]
        if used is not None:
            assert writer is not None
            writer.wait_event(used)  # it may raise: the part is still free then
        if found is not None:
            self._free[found].pop()
            if not self._free[found]:
                del self._free[found]
        if part.numel() > size:
            self.give(part[size:], used)
            part = part[:size]
        return part

    def give(self, part: torch.Tensor, used: torch.Event | None = None) -> None:
        """Takes a part back, which work before an event still uses; None: no work, or only on the next writer's
        stream."""
        self._free.setdefault(part.numel(), []).append((part, used))

    def release(self) -> None:
        """Lets go of the parts that are free, once no work uses them."""
        for size, free in self._free.items():
            self.held_bytes -= size * len(free)
            for _, used in free:
                if used is not None:
                    used.synchronize()
        self._free.clear()


def _size_class(num_bytes: int) -> int:
    """The next number that has few digits: at most a 16th more."""
    step = max(4096, 1 << max(0, num_bytes.bit_length() - 5))
    return rounded_up(num_bytes, step)
