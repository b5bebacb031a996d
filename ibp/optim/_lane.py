"""Coded slots between pinned memory and a GPU."""

from __future__ import annotations

import torch

from ._chunks import NAMES, Chunk, Work


class Lane:
    """Brings the slots of chunks to a GPU and takes them back by the copy engine, both ways at once, beside the work: a
    chunk ahead, and a chunk behind. Overflow is read and written where it is.

    Args:
        device: the GPU.
        num_bytes: of the rows of a state of the largest chunk; eight times as much is taken of the GPU's memory.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with torch.cuda.device(device):
            self._into, self._out = torch.cuda.Stream(), torch.cuda.Stream()
        memory = torch.empty(8 * num_bytes, dtype=torch.uint8, device=device).view(2, 2, len(NAMES), num_bytes)
        self._inward, self._outward = memory.unbind()
        self._ready, self._used, self._coded, self._taken = ([torch.cuda.Event() for _ in "01"] for _ in range(4))
        self._fetched = self._loaded = self._stored = 0

    def begin(self, current: torch.cuda.Stream) -> None:
        """Before the first chunk of a step, whose work is on stream `current`."""
        self._current = current
        self.end()
        self._into.wait_stream(current)
        self._fetched = self._loaded = self._stored = 0

    def fetch(self, chunk: Chunk) -> None:
        """Begins to bring the next chunk."""
        turn, self._fetched = self._fetched % 2, self._fetched + 1
        self._into.wait_event(self._used[turn])
        with torch.cuda.stream(self._into):
            for slots, near in chunk.slots_near(self._inward[turn]):
                near.copy_(slots, non_blocking=True)
            self._ready[turn].record()

    def load(self, chunk: Chunk, work: Work) -> None:
        """As `Chunk.load`, of the chunk that was fetched first and not loaded."""
        turn, self._loaded = self._loaded % 2, self._loaded + 1
        self._current.wait_event(self._ready[turn])
        chunk.load(work, self._inward[turn])
        self._used[turn].record(self._current)

    def store(self, chunk: Chunk, work: Work) -> None:
        """As `Chunk.store`, and begins to take it back."""
        turn, self._stored = self._stored % 2, self._stored + 1
        self._current.wait_event(self._taken[turn])
        chunk.store(work, self._outward[turn])
        self._coded[turn].record(self._current)
        self._out.wait_event(self._coded[turn])
        with torch.cuda.stream(self._out):
            for slots, near in chunk.slots_near(self._outward[turn]):
                slots.copy_(near, non_blocking=True)
            self._taken[turn].record()

    def end(self) -> None:
        """After the last chunk: what follows on the current stream finds all slots in pinned memory."""
        self._current.wait_stream(self._out)
