"""How activations leave a device and come back: a stream and a bounded window each way, pinned memory that is kept from
step to step."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import torch

from .. import _memory
from . import coding
from .planning import LEAST_MOVING
from .region import Region


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
        buffer, read = free.pop()
        if read is not None:
            writer.wait_event(read)
        return buffer

    def give(self, buffer: torch.Tensor, read: torch.cuda.Event | None) -> None:
        """Memory back, which the copy before an event still reads."""
        self._free[buffer.numel()].append((buffer, read))

    def release(self) -> None:
        """Lets go of what is free, once no copy reads it."""
        for size, free in self._free.items():
            self.held_bytes -= size * len(free)
            for _, read in free:
                if read is not None:
                    read.synchronize()
        self._free.clear()


def _size_class(num_bytes: int) -> int:
    """The next number that has few digits: at most a 16th more."""
    step = max(4096, 1 << max(0, num_bytes.bit_length() - 5))
    return -(-num_bytes // step) * step


class Lane:
    """Copies between a CUDA device and the host.

    Args:
        device: the device.
        window_bytes: of device memory that may be on its way out, and as much on its way in; more where activations
            are larger (see `planning.LEAST_MOVING`).
    """

    def __init__(self, device: torch.device, window_bytes: int) -> None:
        self.device, self.window_bytes = device, window_bytes
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.buffers = HostBuffers()
        self.coming = self.coming_bytes = 0
        self._leaving: deque[tuple[weakref.ref[Region], int]] = deque()
        self._leaving_bytes = 0

    # ---- from the device ----

    def send(self, region: Region) -> int:
        """Starts copying a region's memory, which the current stream has just written, to the host. @return its
        bytes."""
        assert region.memory is not None
        source = region.memory if region.recipe is None else region.memory[: region.expected_bytes]
        region.buffer = self.buffers.take(source.numel(), self.out)
        region.host = region.buffer[: source.numel()]
        region.counters = None if region.recipe is None else region.host[: coding.COUNTERS_BYTES]
        self._copy_out(region, region.host, source)
        return source.numel()

    def keep(self, region: Region) -> None:
        """Keeps a coded region's memory on the device, without the room that it is not expected to need."""
        assert region.memory is not None
        region.kept = region.memory[: region.expected_bytes].clone()
        region.buffer = self.buffers.take(coding.COUNTERS_BYTES, self.out)
        region.counters = region.buffer[: coding.COUNTERS_BYTES]
        self._copy_out(region, region.counters, region.memory[: coding.COUNTERS_BYTES])

    def _copy_out(self, region: Region, to: torch.Tensor, source: torch.Tensor) -> None:
        assert region.memory is not None and region.stream is not None
        self.out.wait_stream(region.stream)
        with torch.cuda.stream(self.out):
            to.copy_(source, non_blocking=True)
        region.sent = self.out.record_event()
        self._leaving.append((weakref.ref(region), region.memory.numel()))
        self._leaving_bytes += region.memory.numel()

    def make_room(self, num_bytes: int) -> None:
        """Waits until so many more bytes fit the window, or few regions are on their way, and frees the memory of what
        has left."""
        while len(self._leaving) > LEAST_MOVING and self._leaving_bytes + num_bytes > self.window_bytes:
            self._pop()

    def free(self) -> None:
        """Frees the memory of what has left, without waiting."""
        while self._leaving:
            region = self._leaving[0][0]()
            if region is not None and region.sent is not None and not region.sent.query():
                return
            self._pop()

    def _pop(self) -> None:
        of, held = self._leaving.popleft()
        self._leaving_bytes -= held
        region = of()
        if region is not None:
            self._settle(region)

    def _settle(self, region: Region) -> None:
        """Frees the memory of a region that is elsewhere by now; where that has no room for all of it, the memory
        stays."""
        held = region.host if region.kept is None else region.kept
        assert region.sent is not None and held is not None
        region.sent.synchronize()
        if region.counters is None or region.note_used() <= held.numel():
            region.leave()
            return
        region.of.offload._note_outgrown(region.num_bytes)
        assert region.buffer is not None
        self.buffers.give(region.buffer, None)
        region.buffer = region.host = region.counters = region.kept = region.sent = None

    # ---- back ----

    def has_room_for(self, region: Region) -> bool:
        assert region.host is not None
        return self.coming < LEAST_MOVING or self.coming_bytes + region.host.numel() <= self.window_bytes

    def fetch(self, region: Region) -> None:
        """Starts copying a region back, to memory of the current stream."""
        assert region.host is not None
        current = torch.cuda.current_stream(self.device)
        region.coming = torch.empty(region.host.numel(), dtype=torch.uint8, device=self.device)
        region.stream = current
        self.back.wait_stream(current)
        with torch.cuda.stream(self.back):
            region.coming.copy_(region.host, non_blocking=True)
        region.arrived = self.back.record_event()
        self.coming += 1
        self.coming_bytes += region.coming.numel()

    def receive(self, region: Region) -> torch.Tensor:
        """A region's bytes on the device, for the current stream."""
        if region.coming is None:
            self.fetch(region)
        assert region.coming is not None and region.arrived is not None
        torch.cuda.current_stream(self.device).wait_event(region.arrived)
        buffer, region.coming = region.coming, None
        self.coming -= 1
        self.coming_bytes -= buffer.numel()
        return buffer

    def forget(self, region: Region) -> None:
        """Takes back what a region that nobody can ask for any more has of the lane."""
        if region.coming is not None:
            region.coming.record_stream(self.back)
            self.coming -= 1
            self.coming_bytes -= region.coming.numel()
        if region.memory is not None and region.sent is not None:
            if not region.sent.query():
                region.memory.record_stream(self.out)
            elif region.counters is not None:
                region.note_used()
        if region.buffer is not None:
            self.buffers.give(region.buffer, region.arrived)
