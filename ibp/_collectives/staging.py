"""Memory and streams of coded exchanges: what is reused from call to call on a GPU."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

_DEPTH = 4  # pieces that are coded, on their way or being decoded at a time


@dataclass(eq=False)
class Slot:
    """Memory of the messages of one piece.

    Attributes:
        memory: uint8; another one where it has grown.
        is_taken: by a piece that is not finished.
        free: recorded when the last piece is done with it; None on the CPU, and where there was none.
        bound: what users of the memory keep about it, while it is the same.
    """

    memory: torch.Tensor
    is_taken: bool = False
    free: torch.cuda.Event | None = None
    bound: weakref.WeakKeyDictionary[Any, dict[int, Any]] = field(default_factory=weakref.WeakKeyDictionary)


class Staging:
    """Slots in which messages lie, and the two streams that code and decode beside the link.

    On the CPU every piece has memory of its own, which is there until the call has been waited for. On a GPU the order
    of the streams protects it: at most four pieces are in memory, whatever the calls' sizes.

    Attributes:
        coding, decoding: the streams; None on the CPU.
        few_sms: multiprocessors for coding that the link does not wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.coding = torch.cuda.Stream(device) if self.on_gpu else None
        self.decoding = torch.cuda.Stream(device) if self.on_gpu else None
        self.few_sms = torch.cuda.get_device_properties(device).multi_processor_count // 2 if self.on_gpu else 0
        self._slots: list[Slot] = []  # the one that was used last is last

    def take(self, num_bytes: int) -> Slot:
        """A slot with at least so many bytes. On a GPU the coding stream waits until it is free."""
        if self.coding is None:
            return Slot(self._empty(num_bytes))
        slot = self._free_slot(num_bytes)
        self._slots.remove(slot)
        self._slots.append(slot)
        slot.is_taken = True
        if slot.memory.numel() < num_bytes:
            slot.memory, slot.bound = self._empty(num_bytes), weakref.WeakKeyDictionary()
        if slot.free is not None:
            self.coding.wait_event(slot.free)
        return slot

    def leave(self, slot: Slot) -> None:
        """The slot is free once the decoding stream is done with what it has now."""
        slot.is_taken = False
        if self.decoding is not None:
            slot.free = slot.free or torch.cuda.Event()
            slot.free.record(self.decoding)

    def _free_slot(self, num_bytes: int) -> Slot:
        """The smallest that is large enough, of those that no piece has any more; else a new one, or the one that was
        used the longest ago."""
        slots = [slot for slot in self._slots if not slot.is_taken]
        free = [slot for slot in slots if slot.free is None or slot.free.query()]
        fitting = [slot for slot in free if slot.memory.numel() >= num_bytes]
        if fitting:
            return min(fitting, key=lambda slot: slot.memory.numel())
        if len(self._slots) < _DEPTH or not slots:
            self._slots.append(Slot(self._empty(0)))
            return self._slots[-1]
        return next((slot for slot in slots if slot.memory.numel() >= num_bytes), slots[0])

    @torch.inference_mode(False)  # later calls write to it
    def _empty(self, num_bytes: int) -> torch.Tensor:
        """Memory that returns to torch's allocator once the decoding stream, its last user, is done with it."""
        with on(self.coding):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self.decoding is not None:
            memory.record_stream(self.decoding)
        return memory


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Work goes to the stream; None: there are none."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
