"""Memory for coded bytes that grows: the host knows every offset in it."""

from __future__ import annotations

import torch

from .._machine import memory as _memory

_SHARE, _FIRST_BYTES = 4, 1 << 20  # what is added: a quarter of what is used, more for the first MiB


class TokenArena:
    """Bytes that are handed out one after the other. Memory of the device that codes and decodes is one piece, which
    moves when it grows; pinned host memory is in pieces that stay where they are.

    Args:
        device: that codes and decodes.
        pinned: whether the bytes are in pinned host memory.

    Attributes:
        used: bytes that have been handed out, those between them counted too.
        filled: of pinned memory: recorded once the last bytes that were handed out are there.
    """

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device, self._pinned, self.used = device, pinned, 0
        self._pieces: list[tuple[int, torch.Tensor]] = []  # by their offsets
        self.filled = torch.cuda.Event() if pinned else None

    def reserve(self, num_bytes: int, alignment: int) -> tuple[int, torch.Tensor]:
        """(offset, memory) of that many bytes behind all others, at a multiple of the alignment. Whatever interrupts
        it, the arena is as it was."""
        offset = -(-self.used // alignment) * alignment
        start, memory = self._pieces[-1] if self._pieces else (0, None)
        if memory is None or offset + num_bytes > start + memory.numel():
            start, memory = self._grown(offset, num_bytes)
        self.used = offset + num_bytes
        return offset, memory[offset - start : self.used - start]

    def _grown(self, offset: int, num_bytes: int) -> tuple[int, torch.Tensor]:
        """The last piece, once it has room for more bytes from an offset on."""
        added = max(num_bytes, self.used // _SHARE, min(self.used, _FIRST_BYTES))
        if self._pinned:
            self._pieces.append((offset, _memory.empty(added, torch.device("cpu"), pin=True)))
        else:
            larger = torch.empty(offset + added, dtype=torch.uint8, device=self._device)
            for start, part in self.parts():
                larger[start : start + part.numel()].copy_(part)
            self._pieces = [(0, larger)]
        return self._pieces[-1]

    def rewind(self, used: int) -> None:
        """Takes back what was handed out behind the first bytes."""
        self.used = used
        while self._pinned and self._pieces and self._pieces[-1][0] >= used:
            self._pieces.pop()

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """(offset, bytes) of all pieces handed out, joined to a few long ones."""
        ends = [*(start for start, _ in self._pieces[1:]), self.used]
        return [(start, memory[: end - start]) for (start, memory), end in zip(self._pieces, ends)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(memory.numel() for _, memory in self._pieces)

    def clone(self) -> TokenArena:
        """A copy of the used pieces, as the work issued to the current stream leaves them."""
        if self.filled is not None:
            self.filled.synchronize()
        copied = TokenArena(self._device, self._pinned)
        for offset, part in self.parts():
            copied.used = offset
            copied.reserve(part.numel(), 1)[1].copy_(part)
        return copied
