"""A ring of GPU buffers. The copy engine fills or empties one buffer while the GPU works on another.

A ring serves one direction. To bring bytes to the GPU, copies on one stream fill a buffer, and work on another stream
reads it, or "empties" it. To send bytes to the host, work fills a buffer, and copies empty it. Each buffer has two
events, `filled` and `free`. In both directions a buffer goes through these steps:

| step | stream | what the host queues there |
| --- | --- | --- |
| claim | filling | a wait for `free`, then the writes to the buffer |
| hand over | filling | records `filled` |
| wait | emptying | a wait for `filled`, then the reads of the buffer |
| release | emptying | records `free` |

The host must take the steps of a buffer in this order, and may then begin again with the first step. Before it does, it
may repeat wait and release on the same stream. This order is safe. Before the filling stream writes, it waits for
`free`, which is recorded after all reads of the previous bytes. Before the emptying stream reads, it waits for
`filled`, which is recorded after the writes. CUDA does not wait for an event that was never recorded, so a new buffer
can be claimed at once. The host waits only before the CPU itself uses a buffer's host memory: for `filled` if the ring
brings bytes to the GPU, and for `free` if it sends bytes to the host.

A buffer that grows gets new memory that belongs to the current stream, so the buffer's streams first wait for the
current stream. `record_stream` tells torch's allocator of these streams, so that the allocator does not reuse the old
memory before their work is done.

Rings are used for blocks of tensors (`staging`), rows that the CPU gathers (`_fetch/host_gather.py`), layers of
KV-caches, and blocks of checkpoints. Whole coded tensors (`ibp.offload`, `decompress`) use a ring of the core instead
(csrc/cuda/stream/stream.cu), which decodes bytes on arrival. Python calls the core's ring once per tensor, not once per
buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from .._common.modes import outside_of_modes

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]  # pairs (destination, source)


class Turn:
    """A buffer of a ring, with its events.

    Args:
        device: the GPU.
        streams: all streams that use the buffer.
        num_bytes: initial size of the buffer in bytes.
        empty_host: a function that allocates a given number of bytes of host memory. The buffer then also has host
            memory, of the same size as its GPU memory. None: the buffer has no host memory.

    Attributes:
        memory, host: the uint8 tensors of the buffer on the GPU and in host memory. New tensors replace them when the
            buffer grows.
        filled, free: the events.
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
        """Makes the buffer at least num_bytes bytes large. If the buffer grows, its contents are lost."""
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
        """Claims the buffer, fills it with copies on a stream, and hands it over."""
        self.claim(stream)
        _copy(stream, copies)
        self.hand_over(stream)

    def send(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        """Waits for the buffer on a stream, empties it with copies on this stream, and releases it."""
        self.wait(stream)
        _copy(stream, copies)
        self.release(stream)


def _copy(stream: torch.cuda.Stream, copies: Copies) -> None:
    with torch.cuda.stream(stream):
        for to, source in copies:
            to.copy_(source, non_blocking=True)


class Ring:
    """A ring of buffers.

    Args:
        worker: the stream of the work that reads or writes the buffers.
        turns: number of buffers.
        device, num_bytes, empty_host: as for `Turn`.

    Attributes:
        stream: the stream on which copies to and from the buffers run.
    """

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
        """Total size in bytes of the buffers in GPU memory."""
        return sum(turn.memory.numel() for turn in self._turns)

    @property
    def last(self) -> Turn:
        """The buffer that the latest call of `next` returned."""
        return self._turns[-1]

    def next(self) -> Turn:
        """Returns the least recently used buffer."""
        self._turns.rotate(-1)
        return self.last
