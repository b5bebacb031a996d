"""Stores the encoded tokens of layers, copies them to the device that computes, and decodes them there."""

from __future__ import annotations

import torch

from .. import _core
from .._machine import memory as _memory
from .._machine.ring import Ring, Turn
from .._rows.faults import Faults, FaultWords
from ._coding import Options
from ._history import Pending, TokenArena, TokenHistory

_WORDS = FaultWords("coded tokens were damaged: {status}, item {value} at position {position}", RuntimeError, later="")
_SLACK = 8  # a buffer that must grow gets (1 + 1 / _SLACK) times the bytes that the layer needs


class Fetch:
    """Keys and values, [B, heads, num_tokens, head_dim], whose first tokens are being decoded.

    The memory of these tensors belongs to the stream that was current when they were allocated. If the object is
    destroyed before `wait` was called on that stream, later work on that stream waits for the decoding.

    Args:
        keys, values: the tensors.
        owner: the stream that was current when the tensors were allocated. None: the decoding has ended.
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
        """Makes the current stream wait for the decoding, and returns the keys and values."""
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


class TokenDecoder:
    """Stores and decodes the tokens of all layers on one device. This class is for the CPU, where `fetch` decodes at
    once; its subclasses are for GPUs.

    Args:
        device: the device of the keys and values.
        options: the options of the cache.

    Attributes:
        fetched_bytes: number of bytes that have been copied from host memory to the device.
        sent_bytes: number of bytes that have been copied from the device to host memory.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        self.device = device
        self._sms: int | None = options.sms
        self.fetched_bytes = self.sent_bytes = 0
        self._faults = Faults(_WORDS)

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the buffers on the device to which coded bytes are copied."""
        return 0

    def new_arena(self) -> TokenArena:
        return TokenArena(self.device, pinned=False)

    def store(self, history: TokenHistory, pending: Pending) -> None:
        """Appends encoded blocks to the history of a layer. Waits until the sizes of the blocks are known. If the call
        is interrupted, either all blocks have been appended, or none."""
        sizes, start, offsets = pending.sizes(), history.arena.used, []
        pairs = (history.keys, pending.keys), (history.values, pending.values)
        new_bytes = sum(coded.num_items * codec.form.item_bytes for codec, coded in pairs)
        plain_bytes = history.original_bytes + new_bytes
        try:
            for (codec, coded), size in zip(pairs, sizes):
                alignment = codec.form.item_bytes if coded.codebook is None else _core.SECTOR_BYTES
                offset, memory = history.arena.reserve(size, alignment, plain_bytes)
                offsets.append(offset)
                for part, data in zip(memory, coded.data[:size].split([part.numel() for part in memory])):
                    self._put(history.arena, part, data)
            history.add(pending, sizes, (offsets[0], offsets[1]), start)
        except BaseException:
            history.arena.rewind(start)
            raise

    def _put(self, arena: TokenArena, memory: torch.Tensor, data: torch.Tensor) -> None:
        """Queues a copy of coded bytes to memory that was reserved in an arena."""
        memory.copy_(data)

    def fetch(self, history: TokenHistory, num_tokens: int, blocks: range | None = None) -> Fetch:
        """Allocates keys and values for num_tokens tokens, and begins to decode blocks into their first tokens. blocks:
        the numbers of the blocks. None: all blocks of the history."""
        blocks = range(history.num_blocks) if blocks is None else blocks
        keys, values = history.empty(num_tokens)
        self._decode(history, keys, values, blocks, history.arena.parts()[0][1])
        self.check()
        return Fetch(keys, values)

    def _decode(
        self, history: TokenHistory, keys: torch.Tensor, values: torch.Tensor, blocks: range, staged: torch.Tensor
    ) -> None:
        """Queues the decoding of blocks into the first tokens of keys and values, on the current stream. staged: all
        used bytes of the arena, or a copy of them on the device."""
        for codec, out in ((history.keys, keys), (history.values, values)):
            codec.decode(staged, out, blocks, history.order, self._sms, self._faults.on(self.device))

    def check(self) -> None:
        """Raises an error if decoding has noted a fault so far. Does not wait.

        Raises:
            RuntimeError: coded bytes in memory were damaged.
        """
        self._faults.raise_pending(self.device)


class CudaTokenDecoder(TokenDecoder):
    """A decoder of layers whose coded bytes are in GPU memory. It decodes on its own stream, while the current stream
    goes on. `fetch` does not make the host wait, and `Fetch.wait` makes the current stream wait for the decoding."""

    def __init__(self, device: torch.device, options: Options) -> None:
        super().__init__(device, options)
        self._decoder, self._issued = torch.cuda.Stream(device), torch.cuda.Event()
        self._faults.on(device)

    def fetch(self, history: TokenHistory, num_tokens: int, blocks: range | None = None) -> Fetch:
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

    def _decode_beside(self, history: TokenHistory, keys: torch.Tensor, values: torch.Tensor, blocks: range) -> None:
        """Makes the decoder's stream the current one, and queues the decoding there. The caller must restore the former
        current stream, even if an exception is raised."""
        torch.cuda.set_stream(self._decoder)
        self._decode(history, keys, values, blocks, history.arena.parts()[0][1])


class HostTokenDecoder(CudaTokenDecoder):
    """A decoder of layers whose coded bytes are in pinned host memory. It has a ring of two buffers on the GPU. The
    copy engine copies the bytes of one layer to one buffer while the GPU decodes another layer from the other buffer.
    If a buffer still has the bytes of a layer, they are not copied again."""

    def __init__(self, device: torch.device, options: Options) -> None:
        super().__init__(device, options)
        self._sms = options.sms or None
        self._ring, self._sender = Ring(device, self._decoder), torch.cuda.Stream(device)
        # For each buffer, the stamp of the history whose bytes it has or is receiving.
        self._stamps: dict[Turn, int] = {}

    @property
    def device_bytes(self) -> int:
        return self._ring.num_bytes

    def new_arena(self) -> TokenArena:
        return TokenArena(self.device, pinned=True)

    def _put(self, arena: TokenArena, memory: torch.Tensor, data: torch.Tensor) -> None:
        assert arena.filled is not None
        self._sender.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._sender):
            memory.copy_(data, non_blocking=True)
            arena.filled.record(self._sender)
        data.record_stream(self._sender)
        self.sent_bytes += data.numel()

    def _decode_beside(self, history: TokenHistory, keys: torch.Tensor, values: torch.Tensor, blocks: range) -> None:
        turn = self._ring.last
        if self._stamps.get(turn) != history.stamp:
            turn = self._ring.next()
        if self._stamps.get(turn) != history.stamp:
            self._stamps.pop(turn, None)
            arena, stream = history.arena, self._ring.stream
            assert arena.filled is not None
            if turn.memory.numel() < arena.used:
                turn.reserve(arena.used + arena.used // _SLACK)
            stream.wait_event(arena.filled)
            parts = arena.parts()
            turn.bring(stream, ((turn.memory[start : start + part.numel()], part) for start, part in parts))
            self.fetched_bytes += sum(part.numel() for _, part in parts)
            self._stamps[turn] = history.stamp
        torch.cuda.set_stream(self._decoder)
        turn.wait(self._decoder)
        self._decode(history, keys, values, blocks, turn.memory[: history.arena.used])
        turn.release(self._decoder)


def decoder_for(device: torch.device, options: Options) -> TokenDecoder:
    """Returns a new decoder for layers whose keys and values are on a device.

    Raises:
        ValueError: the device is neither a CPU nor a GPU that this build of ibp can use.
    """
    device = _memory.canonical(device)
    with torch.inference_mode(False):
        if device.type == "cpu":
            return TokenDecoder(device, options)
        return (HostTokenDecoder if options.memory == "pinned" else CudaTokenDecoder)(device, options)
