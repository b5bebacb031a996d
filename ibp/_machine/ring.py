"""Buffers of a GPU that are used in turn: the copy engine fills or empties one while the GPU works on another.

The order of streams and events is the same for all rings. A buffer has two events, `filled` and `free`. One stream
fills it and another one empties it: copies fill a buffer with bytes that come in, and work empties it; work fills a
buffer with bytes that go out, and copies empty it.

| step | stream | what the host gives it |
| --- | --- | --- |
| claim | that fills | a wait for `free`, then the writes to the buffer |
| hand over | that fills | a record of `filled` |
| wait | that empties | a wait for `filled`, then the reads of the buffer |
| release | that empties | a record of `free` |

The host takes the steps of a buffer in this order, and begins again with the first; wait and release may repeat on the
same stream before that. So no byte is overwritten early: every write follows a wait for `free`, which follows all reads
of the bytes before; every read follows a wait for `filled`, which follows the write. An event that was never recorded
holds nothing up, as a new buffer needs. Streams wait for events; the host waits for none. Only a user that lets the CPU
write or read a buffer's host memory waits for its last copy before: for `filled` of bytes that came in, for `free` of
bytes that went out.

A buffer that grows has new memory, which the current stream gives: all streams that use the buffer wait for the current
one. The allocator is told of these streams, and keeps the former memory until they are done with it.

Users: blocks of a tensor (`staging`), rows that the CPU gathers (`_fetch/host_gather.py`), states of optimizers, layers
of a KV-cache, blocks of a checkpoint. Whole coded tensors (`ibp.offload`, `decompress`) go through a ring of the core,
csrc/cuda/stream.cu, which decodes where its copies arrive and needs Python once a tensor, not once a buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]  # (to, from)


class Turn:
    """A buffer and its events.

    Args:
        device: the GPU.
        empty_host: makes host memory of a number of bytes, to go beside the buffer; None: there is none.

    Attributes:
        memory: uint8 on the GPU; other memory where it has grown.
        host: uint8 in host memory, as large.
        filled, free: as above.
    """

    def __init__(self, device: torch.device, empty_host: Callable[[int], torch.Tensor] | None = None) -> None:
        self._device, self._empty_host = device, empty_host
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.host = torch.empty(0, dtype=torch.uint8)
        self.filled, self.free = torch.cuda.Event(), torch.cuda.Event()

    def reserve(self, num_bytes: int, *streams: torch.cuda.Stream) -> None:
        """Makes the buffer large enough; its bytes are lost where it grows. streams: all that use it."""
        if self.memory.numel() >= num_bytes:
            return
        with torch.inference_mode(False), torch.cuda.device(self._device):
            if self._empty_host is not None:
                self.host = self._empty_host(num_bytes)
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        current = torch.cuda.current_stream(self._device)
        for stream in streams:
            stream.wait_stream(current)
            self.memory.record_stream(stream)

    # ---- the four steps ----

    def claim(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.free)

    def hand_over(self, stream: torch.cuda.Stream) -> None:
        self.filled.record(stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.filled)

    def release(self, stream: torch.cuda.Stream) -> None:
        self.free.record(stream)

    # ---- two of them, around copies ----

    def bring(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        """Fills the buffer by copies to it."""
        self.claim(stream)
        _copy(stream, copies)
        self.hand_over(stream)

    def send(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        """Empties the buffer by copies from it."""
        self.wait(stream)
        _copy(stream, copies)
        self.release(stream)


def _copy(stream: torch.cuda.Stream, copies: Copies) -> None:
    with torch.cuda.stream(stream):
        for to, source in copies:
            to.copy_(source, non_blocking=True)


class Ring:
    """Turns, and a stream for their copies.

    Args:
        device: the GPU.
        worker: the stream of the work on the buffers.
        num_bytes: of each buffer at first.
        turns: how many buffers there are.
        empty_host: see `Turn`.

    Attributes:
        stream: of the copies.
    """

    def __init__(
        self,
        device: torch.device,
        worker: torch.cuda.Stream,
        num_bytes: int = 0,
        turns: int = 2,
        empty_host: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.stream, self._worker = torch.cuda.Stream(device), worker
        self._turns = deque(Turn(device, empty_host) for _ in range(turns))
        for turn in self._turns:
            self.reserve(turn, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the GPU's memory."""
        return sum(turn.memory.numel() for turn in self._turns)

    @property
    def last(self) -> Turn:
        """The turn that `next` gave last."""
        return self._turns[-1]

    def next(self) -> Turn:
        """The turn that was given longest ago."""
        self._turns.rotate(-1)
        return self.last

    def reserve(self, turn: Turn, num_bytes: int) -> None:
        """As `Turn.reserve`."""
        turn.reserve(num_bytes, self.stream, self._worker)
