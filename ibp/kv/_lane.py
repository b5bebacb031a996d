"""How the coded tokens of layers get to the device that computes, each layer's before it is used."""

from __future__ import annotations

import torch

from .._machine import memory as _memory
from ._arena import Arena, HostArena, NearArena
from ._coding import Options
from ._history import History, Pending

_SLACK = 8  # a staging buffer is larger than what it is for by one part in so many


class Fetch:
    """Keys and values whose first tokens are being decoded, [B, heads, num_tokens, head_dim].

    Their memory is that of the stream that was current when they were made. Once they are given up, work on that
    stream comes after the decoding.

    Args:
        keys, values: the tensors.
        owner: the stream that was current; None: they are there.
        decoder: the stream that decodes.
    """

    _ready: torch.cuda.Event | None = None

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        owner: torch.cuda.Stream | None = None,
        decoder: torch.cuda.Stream | None = None,
    ) -> None:
        self.keys, self.values = keys, values
        if owner is not None:
            self._owner, self._ready = owner, torch.cuda.Event()
            self._ready.record(decoder)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors, for work on the current stream of their device."""
        if self._ready is not None:
            current = torch.cuda.current_stream(self.keys.device.index)
            current.wait_event(self._ready)
            if current == self._owner:
                self._ready = None
            else:
                self.keys.record_stream(current)
                self.values.record_stream(current)
        return self.keys, self.values

    def __del__(self) -> None:
        if self._ready is not None:
            self._owner.wait_event(self._ready)


class Lane:
    """What codes and decodes the layers of one device, here on the CPU, at once.

    Args:
        device: of the keys and values.
        options: of the cache.

    Attributes:
        fetched_bytes, sent_bytes: that have gone over the link to the device, and to the host.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        self.device = device
        self._sms: int | None = options.sms
        self.fetched_bytes = self.sent_bytes = 0
        self._fault = torch.zeros(4, dtype=torch.int64)  # what decoding notes
        self._noted = self._fault.numpy()  # the same, for the host

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the lane keeps."""
        return 0

    def new_arena(self) -> Arena:
        return NearArena(self.device)

    def store(self, history: History, pending: Pending) -> None:
        """Puts coded blocks behind the others of a layer, once their sizes are known. Whatever interrupts it, they are
        there or not."""
        sizes, start, offsets = pending.sizes(), history.arena.used, []
        try:
            for codec, coded, size in zip((history.keys, history.values), (pending.keys, pending.values), sizes):
                alignment = codec.alignment_of(coded)
                offset, memory = history.arena.reserve(size, alignment)
                offsets.append(offset)
                self._put(history.arena, memory, coded.data[:size])
            history.add(pending, sizes, (offsets[0], offsets[1]), start)
        except BaseException:
            history.arena.rewind(start)
            raise

    def _put(self, arena: Arena, memory: torch.Tensor, data: torch.Tensor) -> None:
        """Queues the copy of coded bytes to memory of an arena."""
        memory.copy_(data)

    def fetch(self, history: History, num_tokens: int, blocks: range | None = None) -> Fetch:
        """Begins to decode blocks (None: all) to the first of so many tokens of new keys and values."""
        blocks = range(history.num_blocks) if blocks is None else blocks
        keys, values = history.empty(num_tokens)
        self._decode(history, keys, values, blocks, history.arena.parts()[0][1])
        self.check()
        return Fetch(keys, values)

    def _decode(
        self, history: History, keys: torch.Tensor, values: torch.Tensor, blocks: range, staged: torch.Tensor
    ) -> None:
        history.decode(staged, keys, values, blocks, self._sms, self._fault)

    def check(self) -> None:
        """Raises what decoding has noted so far.

        Raises:
            RuntimeError: coded bytes in memory were damaged.
        """
        if self._noted[0]:
            status, position, item, _ = self._noted.tolist()
            self._noted[:] = 0
            raise RuntimeError(f"coded tokens were damaged: status {status}, item {item} at position {position}")


class CudaLane(Lane):
    """A GPU that has the coded bytes of its layers. They are decoded on a stream beside the current one, which waits
    for them; no call waits for the GPU."""

    def __init__(self, device: torch.device, options: Options) -> None:
        super().__init__(device, options)
        self._decoder, self._issued = torch.cuda.Stream(device), torch.cuda.Event()
        host = _memory.empty(32, torch.device("cpu"), pin=True).view(torch.int64).zero_()
        self._fault, self._noted = _memory.device_view(host, device), host.numpy()

    def fetch(self, history: History, num_tokens: int, blocks: range | None = None) -> Fetch:
        self.check()
        blocks = range(history.num_blocks) if blocks is None else blocks
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            keys, values = history.empty(num_tokens)
            self._issued.record(current)
            self._decoder.wait_event(self._issued)
            try:
                self._decode_beside(history, keys, values, blocks)
            finally:
                torch.cuda.set_stream(current)
            return Fetch(keys, values, current, self._decoder)

    def _decode_beside(self, history: History, keys: torch.Tensor, values: torch.Tensor, blocks: range) -> None:
        """Queues the decoding on the stream beside the current one, and leaves that, or another one, as the current
        stream."""
        torch.cuda.set_stream(self._decoder)
        self._decode(history, keys, values, blocks, history.arena.parts()[0][1])


class _Staging:
    """Device memory for the coded bytes of a layer.

    Attributes:
        stamp: of the history whose bytes are there, or on their way.
        copied, decoded: recorded after the last copy to it, and after what has read it last.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.stamp = 0
        self.copied, self.decoded = torch.cuda.Event(), torch.cuda.Event()


class HostLane(CudaLane):
    """A GPU whose layers' coded bytes are in pinned host memory. The copy engine brings a layer's to one of two staging
    buffers while those in the other one are decoded."""

    def __init__(self, device: torch.device, options: Options) -> None:
        super().__init__(device, options)
        self._sms = options.sms or None
        self._copier, self._sender = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stagings = [_Staging(device) for _ in range(2)]  # the one that was used last comes first

    @property
    def device_bytes(self) -> int:
        return sum(staging.memory.numel() for staging in self._stagings)

    def new_arena(self) -> Arena:
        return HostArena()

    def _put(self, arena: Arena, memory: torch.Tensor, data: torch.Tensor) -> None:
        assert isinstance(arena, HostArena)
        self._sender.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._sender):
            memory.copy_(data, non_blocking=True)
            arena.filled.record(self._sender)
        data.record_stream(self._sender)
        self.sent_bytes += data.numel()

    def _decode_beside(self, history: History, keys: torch.Tensor, values: torch.Tensor, blocks: range) -> None:
        staging = self._stage(history)
        torch.cuda.set_stream(self._decoder)
        self._decoder.wait_event(staging.copied)
        self._decode(history, keys, values, blocks, staging.memory[: history.arena.used])
        staging.decoded.record(self._decoder)

    def _stage(self, history: History) -> _Staging:
        """A buffer with a layer's coded bytes, or with these on their way."""
        recent, older = self._stagings
        if recent.stamp == history.stamp:
            return recent
        self._stagings = [older, recent]
        if older.stamp != history.stamp:
            older.stamp = 0
            self._copy(history, older)
            older.stamp = history.stamp
        return older

    def _copy(self, history: History, staging: _Staging) -> None:
        arena = history.arena
        assert isinstance(arena, HostArena)
        if staging.memory.numel() < arena.used:
            self._enlarge(staging, arena.used)
        self._copier.wait_event(staging.decoded)
        self._copier.wait_event(arena.filled)
        torch.cuda.set_stream(self._copier)
        for offset, part in arena.parts():
            staging.memory[offset : offset + part.numel()].copy_(part, non_blocking=True)
            self.fetched_bytes += part.numel()
        staging.copied.record(self._copier)

    def _enlarge(self, staging: _Staging, num_bytes: int) -> None:
        """Gives a buffer new memory, which the streams that use it wait for."""
        with torch.inference_mode(False):
            staging.memory = torch.empty(num_bytes + num_bytes // _SLACK, dtype=torch.uint8, device=self.device)
        self._copier.wait_stream(torch.cuda.current_stream(self.device))
        for stream in (self._copier, self._decoder):
            staging.memory.record_stream(stream)


def lane_of(device: torch.device, options: Options) -> Lane:
    """The lane for a device.

    Raises:
        ValueError: it is neither a CPU nor a GPU that this build of ibp can use.
    """
    device = _memory.canonical(device)
    with torch.inference_mode(False):
        if device.type == "cpu":
            return Lane(device, options)
        return HostLane(device, options) if options.memory == "pinned" else CudaLane(device, options)
