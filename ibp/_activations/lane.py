"""How activations leave a device and come back: a stream and a bounded window each way, pinned memory that is kept from
step to step."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import torch

from .. import _memory
from . import coding
from .region import Region


class HostBuffers:
    """Pinned memory by size, kept for the next step."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[torch.Tensor, torch.cuda.Event | None]]] = defaultdict(list)
        self.held_bytes = 0

    def take(self, num_bytes: int, writer: torch.cuda.Stream) -> torch.Tensor:
        """Memory that a stream may write to behind what it has been given so far."""
        free = self._free.get(num_bytes)
        if not free:
            self.held_bytes += num_bytes
            return _memory.empty(num_bytes, torch.device("cpu"), pin=True)
        buffer, read = free.pop()
        if read is not None:
            writer.wait_event(read)
        return buffer

    def give(self, buffer: torch.Tensor, read: torch.cuda.Event | None) -> None:
        """Memory back, which the copy before an event still reads."""
        self._free[buffer.numel()].append((buffer, read))

    def release(self) -> None:
        """Lets go of what is free."""
        for num_bytes, free in self._free.items():
            self.held_bytes -= num_bytes * len(free)
        self._free.clear()


class Lane:
    """Copies between a CUDA device and the host.

    Args:
        device: the device.
        window_bytes: of device memory that may be on its way out, and as much on its way in. One activation may be
            larger.
    """

    def __init__(self, device: torch.device, window_bytes: int) -> None:
        self.device, self.window_bytes = device, window_bytes
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.buffers = HostBuffers()
        self.coming_bytes = 0
        self._leaving: deque[weakref.ref[Region]] = deque()

    # ---- from the device ----

    def send(self, region: Region) -> int:
        """Starts copying a region's memory, which the current stream has just written, to the host. @return its
        bytes."""
        assert region.memory is not None
        source = region.memory if region.recipe is None else region.memory[: region.expected_bytes]
        region.host = self.buffers.take(source.numel(), self.out)
        region.counters = None if region.recipe is None else region.host[: coding.COUNTERS_BYTES]
        self._copy_out(region, region.host, source)
        return source.numel()

    def keep(self, region: Region) -> None:
        """Keeps a coded region's memory on the device, without the room that it is not expected to need."""
        assert region.memory is not None
        region.kept = region.memory[: region.expected_bytes].clone()
        region.counters = self.buffers.take(coding.COUNTERS_BYTES, self.out)
        self._copy_out(region, region.counters, region.memory[: coding.COUNTERS_BYTES])

    def _copy_out(self, region: Region, to: torch.Tensor, source: torch.Tensor) -> None:
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            to.copy_(source, non_blocking=True)
        region.sent = self.out.record_event()
        self._leaving.append(weakref.ref(region))

    def make_room(self, num_bytes: int) -> None:
        """Waits until so many more bytes fit the window, and frees the memory of what has left."""
        alive = deque(region for of in self._leaving if (region := of()) is not None and region.memory is not None)
        held = sum(region.memory.numel() for region in alive if region.memory is not None)
        while alive and held + num_bytes > self.window_bytes:
            region = alive.popleft()
            assert region.memory is not None
            held -= region.memory.numel()
            self._settle(region)
        self._leaving = deque(map(weakref.ref, alive))

    def _settle(self, region: Region) -> None:
        """Frees the memory of a region that is elsewhere by now; where that has no room for all of it, the memory
        stays."""
        held = region.host if region.kept is None else region.kept
        assert region.sent is not None and held is not None
        region.sent.synchronize()
        if region.fits(held):
            region.leave()
            return
        region.of.offload._note_outgrown(region.num_bytes)
        if region.host is not None:
            self.buffers.give(region.host, None)
        region.host = region.counters = region.kept = None

    # ---- back ----

    def has_room_for(self, region: Region) -> bool:
        assert region.host is not None
        return self.coming_bytes == 0 or self.coming_bytes + region.host.numel() <= self.window_bytes

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
        self.coming_bytes += region.coming.numel()

    def receive(self, region: Region) -> torch.Tensor:
        """A region's bytes on the device, for the current stream."""
        if region.coming is None:
            self.fetch(region)
        assert region.coming is not None and region.arrived is not None
        torch.cuda.current_stream(self.device).wait_event(region.arrived)
        buffer, region.coming = region.coming, None
        self.coming_bytes -= buffer.numel()
        return buffer

    def forget(self, region: Region) -> None:
        """Takes back what a region that nobody can ask for any more has of the lane."""
        if region.coming is not None:
            region.coming.record_stream(self.back)
            self.coming_bytes -= region.coming.numel()
        if region.memory is not None and region.sent is not None:
            if region.sent.query():
                region.fits(region.memory)  # for what is learned
            else:
                region.memory.record_stream(self.out)
        if region.host is not None:
            self.buffers.give(region.host, region.arrived)
        elif region.counters is not None:
            self.buffers.give(region.counters, None)
