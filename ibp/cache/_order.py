"""Orders the work of a cache on several streams, because one stream may write rows that another stream reads."""

from __future__ import annotations

import torch

from .._machine.memory import is_capturing

Key = tuple[int, int]  # a stream's device and address
ON_CPU: Key = (-1, 0)


class StreamOrder:
    """Orders work on several streams: a reader waits for the last write, and a writer waits for all earlier reads and
    writes. The host does not wait, and streams that capture CUDA graphs are left out."""

    def __init__(self) -> None:
        self._users: dict[Key, torch.cuda.Stream] = {}  # streams used since the last write, including the writer's
        self._writer: torch.cuda.Stream | None = None

    def read(self, device: torch.device) -> torch.cuda.Stream | None:
        """Makes the device's current stream wait for the last write, and returns the stream. Must be called before the
        stream reads. On the CPU, or while a graph is captured, does nothing and returns None."""
        current = _stream_of(device)
        if current is None or key_of(current) in self._users:
            return current
        if self._writer is not None:
            current.wait_stream(self._writer)
        self._users[key_of(current)] = current
        return current

    def write(self, device: torch.device) -> torch.cuda.Stream | None:
        """Makes the device's current stream wait for all earlier reads and writes, and returns the stream. Must be
        called before the stream writes. On the CPU, or while a graph is captured, does nothing and returns None."""
        current = _stream_of(device)
        if current is None:
            return None
        for stream in self._users.values():
            if stream != current:
                current.wait_stream(stream)
        self._users, self._writer = {key_of(current): current}, current
        return current

    def is_settled(self, key: Key, writes: bool) -> bool:
        """Returns whether a stream may read (or write, if `writes` is set) without waiting for other streams."""
        return key == ON_CPU or (key in self._users and (not writes or len(self._users) == 1))


def key_of(stream: torch.cuda.Stream) -> Key:
    return stream.device.index, stream.cuda_stream


def current_key(device: torch.device) -> Key | None:
    """Returns the key of a device's current stream. Returns None if the device is not the current one, or if the stream
    captures a CUDA graph."""
    if device.type != "cuda":
        return ON_CPU
    if torch.cuda.current_device() != device.index or torch.cuda.is_current_stream_capturing():
        return None
    return device.index, torch._C._cuda_getCurrentRawStream(device.index)


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda" or is_capturing(device):
        return None
    return torch.cuda.current_stream(device)
