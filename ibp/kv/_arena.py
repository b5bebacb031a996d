"""Memory for coded bytes that grows: the host knows every offset in it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .._machine import memory as _memory

_SHARE, _FIRST_BYTES = 4, 1 << 20  # what is added: a quarter of what is used, more for the first MiB


def _added(used: int, wanted: int) -> int:
    """Bytes to add to an arena for `wanted` more."""
    return max(wanted, used // _SHARE, min(used, _FIRST_BYTES))


class TokenArena(ABC):
    """Bytes that are handed out one after the other.

    Attributes:
        used: bytes that have been handed out, those between them counted too.
    """

    used = 0

    def reserve(self, num_bytes: int, alignment: int) -> tuple[int, torch.Tensor]:
        """(offset, memory) of that many bytes behind all others, at a multiple of the alignment. Whatever interrupts
        it, the arena is as it was."""
        offset = -(-self.used // alignment) * alignment
        memory = self._at(offset, num_bytes)
        self.used = offset + num_bytes
        return offset, memory

    @abstractmethod
    def _at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The memory from an offset on that is not below `used`."""

    @abstractmethod
    def rewind(self, used: int) -> None:
        """Takes back what was handed out behind the first bytes."""

    @abstractmethod
    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """(offset, bytes) of what has been handed out: a few long pieces."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory."""

    @abstractmethod
    def clone(self) -> TokenArena:
        """A copy of what is used, as the work issued to the current stream leaves it."""


class DeviceTokenArena(TokenArena):
    """One piece of memory of the device that codes and decodes, which moves when it grows."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def _at(self, offset: int, num_bytes: int) -> torch.Tensor:
        if offset + num_bytes > self.memory.numel():
            size = offset + _added(self.used, num_bytes)
            larger = torch.empty(size, dtype=torch.uint8, device=self.memory.device)
            larger[: self.used].copy_(self.memory[: self.used])
            self.memory = larger
        return self.memory[offset : offset + num_bytes]

    def rewind(self, used: int) -> None:
        self.used = used

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        return [(0, self.memory[: self.used])]

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def clone(self) -> DeviceTokenArena:
        copied = DeviceTokenArena(self.memory.device)
        copied.used, copied.memory = self.used, self.memory[: self.used].clone()
        return copied


class PinnedTokenArena(TokenArena):
    """Pinned host memory in pieces, which stay where they are.

    Attributes:
        filled: recorded once the last bytes that were handed out are there.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, torch.Tensor]] = []
        self.filled = torch.cuda.Event()

    def _at(self, offset: int, num_bytes: int) -> torch.Tensor:
        if self._pieces:
            start, memory = self._pieces[-1]
            if offset + num_bytes <= start + memory.numel():
                return memory[offset - start : offset - start + num_bytes]
        memory = _memory.empty(_added(self.used, num_bytes), torch.device("cpu"), pin=True)
        self._pieces.append((offset, memory))
        return memory[:num_bytes]

    def rewind(self, used: int) -> None:
        self.used = used
        while self._pieces and self._pieces[-1][0] >= used:
            self._pieces.pop()

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        ends = [*(start for start, _ in self._pieces[1:]), self.used]
        return [(start, memory[: end - start]) for (start, memory), end in zip(self._pieces, ends)]

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for _, memory in self._pieces)

    def clone(self) -> PinnedTokenArena:
        copied = PinnedTokenArena()
        self.filled.synchronize()
        for offset, part in self.parts():
            copied.used = offset
            copied.reserve(part.numel(), 1)[1].copy_(part)
        return copied
