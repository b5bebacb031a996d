"""How activations leave a device and come back: a stream and a bounded window each way, pinned memory that is kept from
step to step."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import NamedTuple

import torch

from .._machine import memory as _memory
from . import coding
from .planning import LEAST_MOVING
from .region import Piece, Region


class HostBuffers:
    """Pinned memory in few sizes, kept for the next step."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[torch.Tensor, torch.cuda.Event | None]]] = defaultdict(list)
        self.held_bytes = 0

    def take(self, num_bytes: int, writer: torch.cuda.Stream) -> torch.Tensor:
        """Memory of so many bytes or somewhat more, which a stream may write to behind what it has been given so
        far."""
        size = _size_class(num_bytes)
        free = self._free.get(size)
        if not free:
            buffer = _memory.empty(size, torch.device("cpu"), pin=True)
            self.held_bytes += size
            return buffer
        buffer, used = free.pop()
        if used is not None:
            writer.wait_event(used)
        return buffer

    def give(self, buffer: torch.Tensor, used: torch.cuda.Event | None) -> None:
        """Memory back, which the copies before an event still read or write."""
        self._free[buffer.numel()].append((buffer, used))

    def release(self) -> None:
        """Lets go of what is free, once no copy uses it."""
        for size, free in self._free.items():
            self.held_bytes -= size * len(free)
            for _, used in free:
                if used is not None:
                    used.synchronize()
        self._free.clear()


def _size_class(num_bytes: int) -> int:
    """The next number that has few digits: at most a 16th more."""
    step = max(4096, 1 << max(0, num_bytes.bit_length() - 5))
    return -(-num_bytes // step) * step


class _Ended(NamedTuple):
    """A piece of a region that has ended. recipe: of coded bytes whose size was not noted yet; coming_bytes: that were
    on their way back."""

    piece: Piece
    recipe: coding.Recipe | None
    coming_bytes: int | None


class Lane:
    """Copies between a CUDA device and the host.

    Args:
        device: the device.
        window_bytes: of device memory that may be on its way out, and as much on its way in; `planning.LEAST_MOVING`
            pieces may be in any case.
    """

    def __init__(self, device: torch.device, window_bytes: int) -> None:
        self.device, self.window_bytes = device, window_bytes
        self.out, self.back, self._notes = (torch.cuda.Stream(device) for _ in range(3))
        self.buffers = HostBuffers()
        self.coming = self.coming_bytes = 0
        self._ended: deque[_Ended] = deque()
        self._leaving: deque[tuple[weakref.ref[Region], weakref.ref[Piece], int]] = deque()
        self._leaving_bytes = 0
        self._narrowed: deque[tuple[weakref.ref[Region], torch.Tensor, torch.cuda.Event]] = deque()

    # ---- from the device ----

    def send(self, region: Region, piece: Piece) -> int:
        """Starts copying a piece, which the current stream has just written, to the host. @return its bytes."""
        self.take_back()
        source = region.to_send(piece)
        piece.buffer = self.buffers.take(source.numel(), self.out)
        piece.host = piece.buffer[: source.numel()]
        piece.counters = None if region.recipe is None else piece.host[: coding.COUNTERS_BYTES]
        held = source if piece.memory is None else piece.memory
        self._copy_out(region, piece, piece.host, source, held.numel())
        return source.numel()

    def keep(self, region: Region, piece: Piece) -> int:
        """Keeps a coded piece on the device, without the room that it is not expected to need. @return its bytes."""
        assert piece.memory is not None
        self.take_back()
        piece.kept = region.to_send(piece).clone()
        piece.buffer = self.buffers.take(coding.COUNTERS_BYTES, self.out)
        piece.counters = piece.buffer[: coding.COUNTERS_BYTES]
        source = piece.memory[: coding.COUNTERS_BYTES]
        self._copy_out(region, piece, piece.counters, source, piece.memory.numel())
        return piece.kept.numel()

    def ask_for_misfits(self, region: Region) -> None:
        """Has the host told whether what a region is made narrower to is all there is, ahead of what is on its way."""
        assert region.misfits is not None and region.stream is not None
        buffer = self.buffers.take(1, self._notes)
        self._notes.wait_stream(region.stream)
        with torch.cuda.stream(self._notes):
            buffer[:1].copy_(region.misfits.view(1).view(torch.uint8), non_blocking=True)
        region.misfits.record_stream(self._notes)
        self._narrowed.append((weakref.ref(region), buffer, self._notes.record_event()))

    def _note_misfits(self) -> None:
        """Frees the memory of regions that are known to be no more than what they were made narrower to."""
        while self._narrowed and self._narrowed[0][2].query():
            of, buffer, done = self._narrowed.popleft()
            region = of()
            if region is not None and region.misfits is not None:
                region.note_narrow(not buffer[0])
            self.buffers.give(buffer, done)

    def _copy_out(
        self, region: Region, piece: Piece, to: torch.Tensor, source: torch.Tensor, window_bytes: int
    ) -> None:
        assert piece.stream is not None
        self.out.wait_stream(piece.stream)
        with torch.cuda.stream(self.out):
            to.copy_(source, non_blocking=True)
        piece.sent = self.out.record_event()
        self._leaving.append((weakref.ref(region), weakref.ref(piece), window_bytes))
        self._leaving_bytes += window_bytes

    def make_room(self, num_bytes: int) -> None:
        """Waits until so many more bytes fit the window, or few pieces are on their way, and frees the memory of what
        has left."""
        self._note_misfits()
        while len(self._leaving) > LEAST_MOVING and self._leaving_bytes + num_bytes > self.window_bytes:
            self._pop()

    def free(self) -> None:
        """Frees the memory of what has left, without waiting."""
        self._note_misfits()
        while self._leaving:
            piece = self._leaving[0][1]()
            if piece is not None and piece.sent is not None and not piece.sent.query():
                return
            self._pop()

    def _pop(self) -> None:
        of, part, num_bytes = self._leaving.popleft()
        self._leaving_bytes -= num_bytes
        region, piece = of(), part()
        if region is not None and piece is not None:
            self._settle(region, piece)

    def _settle(self, region: Region, piece: Piece) -> None:
        """Frees the memory of a piece that is elsewhere by now; where that has no room for all of it, the memory
        stays."""
        held = piece.host if piece.kept is None else piece.kept
        assert piece.sent is not None and held is not None
        piece.sent.synchronize()
        if region.recipe is None or piece.note_used(region.recipe) <= held.numel():
            region.leave(piece)
            return
        region.of.offload._note_outgrown(piece.num_bytes)
        assert piece.buffer is not None
        self.buffers.give(piece.buffer, None)
        piece.buffer = piece.host = piece.counters = piece.kept = piece.sent = None

    # ---- back ----

    def has_room_for(self, piece: Piece) -> bool:
        assert piece.host is not None
        self.take_back()
        self._note_misfits()
        return self.coming < LEAST_MOVING or self.coming_bytes + piece.host.numel() <= self.window_bytes

    def fetch(self, region: Region, piece: Piece) -> None:
        """Starts copying a piece back, to memory of the current stream; what is not coded, to its place among the
        region's bytes."""
        assert piece.host is not None
        current = torch.cuda.current_stream(self.device)
        if region.recipe is not None:
            piece.coming = torch.empty(piece.host.numel(), dtype=torch.uint8, device=self.device)
            piece.stream = current
        else:
            if region.coming is None:
                region.coming = torch.empty(region.num_bytes, dtype=torch.uint8, device=self.device)
                region.stream = current
            piece.coming = region.coming[piece.start : piece.end]
        self.back.wait_stream(current)
        with torch.cuda.stream(self.back):
            piece.coming.copy_(piece.host, non_blocking=True)
        piece.arrived = self.back.record_event()
        self.coming += 1
        self.coming_bytes += piece.coming.numel()

    def receive(self, region: Region, piece: Piece) -> torch.Tensor:
        """The bytes of a piece on the device, for the current stream."""
        if piece.coming is None:
            self.fetch(region, piece)
        assert piece.coming is not None and piece.arrived is not None
        torch.cuda.current_stream(self.device).wait_event(piece.arrived)
        return self._taken(piece)

    def _taken(self, piece: Piece) -> torch.Tensor:
        """The memory that a piece comes back to, which leaves the window."""
        assert piece.coming is not None
        memory, piece.coming = piece.coming, None
        self.coming -= 1
        self.coming_bytes -= memory.numel()
        return memory

    # ---- regions that end ----

    def forget(self, region: Region) -> None:
        """Notes what a region has of the lane that nobody can ask for any more. Regions end at any time and in any
        thread: memory of the device is freed here, the rest is taken back by the lane's next call."""
        if region.memory is not None and any(piece.sent and not piece.sent.query() for piece in region.pieces):
            region.memory.record_stream(self.out)
        if region.coming is not None:
            region.coming.record_stream(self.back)
        for piece in region.pieces:
            coming_bytes, recipe = None, None
            if piece.coming is not None:
                coming_bytes = piece.coming.numel()
                piece.coming.record_stream(self.back)
            if piece.memory is not None and piece.sent is not None:
                recipe = region.recipe
                if not piece.sent.query():
                    piece.memory.record_stream(self.out)
            piece.memory = piece.kept = piece.coming = None
            self._ended.append(_Ended(piece, recipe, coming_bytes))

    def take_back(self) -> None:
        """Takes back what regions had that have ended: pinned memory, and room in the window."""
        while self._ended:
            piece, recipe, coming_bytes = self._ended.popleft()
            if coming_bytes is not None:
                self.coming -= 1
                self.coming_bytes -= coming_bytes
            if recipe is not None and piece.sent is not None and piece.sent.query():
                piece.note_used(recipe)
            if piece.buffer is not None:
                self.buffers.give(piece.buffer, piece.arrived or piece.sent)
