"""Coded slots between pinned memory and a GPU."""

from __future__ import annotations

from collections import deque

import torch

from .._machine.ring import Ring, Turn
from ._chunks import NAMES, Chunk, Work


class StateTransfers:
    """Brings the slots of chunks to a GPU and takes them back by the copy engine, both ways at once, beside the work: a
    chunk ahead, and a chunk behind. Overflow is read and written where it is.

    Args:
        device: the GPU.
        num_bytes: of the rows of a state of the largest chunk; eight times as much is taken of the GPU's memory.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        worker = torch.cuda.current_stream(device)
        self._inward, self._outward = (Ring(device, worker, len(NAMES) * num_bytes) for _ in range(2))
        self._coming: deque[Turn] = deque()  # fetched, and not loaded

    def begin(self, current: torch.cuda.Stream) -> None:
        """Before the first chunk of a step, whose work is on stream `current`."""
        self._current = current
        self.end()
        self._inward.stream.wait_stream(current)
        self._coming.clear()

    def fetch(self, chunk: Chunk) -> None:
        """Begins to bring the next chunk."""
        turn = self._inward.next()
        turn.bring(self._inward.stream, ((near, slots) for slots, near in chunk.slots_near(_states_in(turn))))
        self._coming.append(turn)

    def load(self, chunk: Chunk, work: Work) -> None:
        """As `Chunk.load`, of the chunk that was fetched first and not loaded."""
        turn = self._coming.popleft()
        turn.wait(self._current)
        chunk.load(work, _states_in(turn))
        turn.release(self._current)

    def store(self, chunk: Chunk, work: Work) -> None:
        """As `Chunk.store`, and begins to take it back."""
        turn = self._outward.next()
        turn.claim(self._current)
        chunk.store(work, _states_in(turn))
        turn.hand_over(self._current)
        turn.send(self._outward.stream, chunk.slots_near(_states_in(turn)))

    def end(self) -> None:
        """After the last chunk: work on the current stream from now on finds all slots in pinned memory."""
        self._current.wait_stream(self._outward.stream)


def _states_in(turn: Turn) -> torch.Tensor:
    """A buffer as `Chunk` wants it: uint8 [states, bytes]."""
    return turn.memory.view(len(NAMES), -1)
