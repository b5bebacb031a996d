"""Buffers of a GPU that are used in turn: the copy engine fills or empties one while the GPU works on another.

The order of streams and events is the same for all rings. A buffer has two events, `filled` and `free`. One stream
fills it and another one empties it: copies fill a buffer with bytes that come in, and work empties it; work fills a
buffer with bytes that go out, and copies empty it.

| step | stream | what the host queues there |
| --- | --- | --- |
| claim | filling | a wait for `free`, then the writes to the buffer |
| hand over | filling | records `filled` |
| wait | emptying | a wait for `filled`, then the reads of the buffer |
| release | emptying | records `free` |

The host takes the steps of a buffer in this order, and then begins again with the first; before that, wait and release
may repeat on the same stream. In this way no byte is overwritten early: every write follows a wait for `free`, which
follows all reads of the bytes before, and every read follows a wait for `filled`, which follows the write. A wait for
an event that was never recorded does not wait, as a new buffer needs. The host waits only before the CPU itself uses a
buffer's host memory: for `filled` if bytes came in, for `free` if bytes went out.

A buffer that grows gets new memory from the current stream, so that the buffer's streams wait for the current one. The
allocator is told of these streams, and keeps the former memory until they are done with it.

Users: blocks of tensors (`staging`), rows that the CPU gathers (`_fetch/host_gather.py`), layers of KV-caches, and
blocks of checkpoints. Whole coded tensors (`ibp.offload`, `decompress`) go through a ring of the core,
csrc/cuda/stream/stream.cu, which decodes on arrival and calls Python once per tensor, not once per buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from .._common.modes import outside_of_modes

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]  # (to, from)


class Turn:
    """A buffer and its events.

    Args:
        device: the GPU.
        streams: all streams that use the buffer.
        num_bytes: initial size of the buffer.
        empty_host: a function that makes host memory of a number of bytes, to go with the buffer. None: the buffer has
            no host memory.

    Attributes:
        memory, host: uint8 on the GPU and in host memory. They are replaced when the buffer grows.
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
        """Makes the buffer large enough. If it grows, its bytes are lost."""
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
        """Fills the buffer by copies: claims it and hands it over."""
        self.claim(stream)
        _copy(stream, copies)
        self.hand_over(stream)

    def send(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        """Empties the buffer by copies: waits for it and releases it."""
        self.wait(stream)
        _copy(stream, copies)
        self.release(stream)


def _copy(stream: torch.cuda.Stream, copies: Copies) -> None:
    with torch.cuda.stream(stream):
        for to, source in copies:
            to.copy_(source, non_blocking=True)


class Ring:
    """Buffers that are used in turn, and `stream`, on which their copies run. worker: the stream of the work on
    them; for the other arguments see `Turn`."""

    def __init__(
        self,
        device: torch.device,
        worker: torch.cuda.Stream,
        num_bytes: int = 0,
        turns: int = 2,
        empty_host: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.stream = torch.cuda.Stream(device)
        self._turns = deque(Turn(device, (self.stream, worker), num_bytes, empty_host) for _ in range(turns))

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the buffers in GPU memory."""
        return sum(turn.memory.numel() for turn in self._turns)

    @property
    def last(self) -> Turn:
        """The buffer that `next` returned last."""
        return self._turns[-1]

    def next(self) -> Turn:
        """Returns the buffer that was used longest ago."""
        self._turns.rotate(-1)
        return self.last
