"""Memory and streams of coded exchanges: what is reused from call to call on a GPU."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Slot:
    """Memory of the messages of one piece."""

    memory: torch.Tensor  # uint8; another one where it has grown
    is_taken: bool = False  # by a piece that is not finished
    clean: object = None  # what of it can be coded into as it is; None: nothing is known to
    # what users of the memory keep about it, while it is the same
    bound: weakref.WeakKeyDictionary[Any, dict[int, Any]] = field(default_factory=weakref.WeakKeyDictionary)


class MessageSlots:
    """Slots in which messages lie, and the stream of calls that the current one does not wait for.

    On the CPU every piece has memory of its own, which is there until the call has been waited for. On a GPU the order
    of the streams protects it: each call begins when the one before it has ended.

    side: the stream of calls that are waited for later; None on the CPU. coding_sms, decoding_sms: multiprocessors for
    pieces that are coded and decoded while the link needs some. What is coded late holds up the link; what is decoded
    late does not."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.side = torch.cuda.Stream(device) if self.on_gpu else None
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 0
        self.coding_sms, self.decoding_sms = num_sms * 3 // 4, num_sms // 2
        self._slots: list[Slot] = []
        self._ended = torch.cuda.Event() if self.on_gpu else None
        self._last: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """The current stream waits for the call before this one."""
        if self._ended is not None:
            stream = torch.cuda.current_stream(self.device)
            if stream != self._last:
                stream.wait_event(self._ended)

    def end(self) -> None:
        """The call's work is queued on the current stream."""
        if self._ended is not None:
            self._last = torch.cuda.current_stream(self.device)
            self._ended.record(self._last)

    def take(self, num_bytes: int) -> Slot:
        """A slot of at least num_bytes bytes."""
        if not self.on_gpu:
            return Slot(self._empty(num_bytes))
        free = [slot for slot in self._slots if not slot.is_taken]
        slot = min((slot for slot in free if slot.memory.numel() >= num_bytes), key=_size_of, default=None)
        if slot is None:
            slot = self._larger(max(free, key=_size_of, default=None), num_bytes)
        slot.is_taken = True
        return slot

    def leave(self, slot: Slot) -> None:
        """The slot is free for what is queued from now on."""
        slot.is_taken = False

    def give_up(self, slot: Slot) -> None:
        """Forgets a slot of a call that has failed: work that nobody waits for may still use its memory."""
        if slot in self._slots:
            self._slots.remove(slot)

    def _larger(self, slot: Slot | None, num_bytes: int) -> Slot:
        """A slot that has grown, or a new one."""
        if slot is None:
            slot = Slot(self._empty(num_bytes))
            self._slots.append(slot)
            return slot
        slot.memory.record_stream(torch.cuda.current_stream(self.device))  # which has waited for all its users
        slot.memory, slot.clean, slot.bound = self._empty(num_bytes), None, weakref.WeakKeyDictionary()
        return slot

    @torch.inference_mode(False)  # later calls write to it
    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def _size_of(slot: Slot) -> int:
    return slot.memory.numel()


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Work goes to the stream; None: to the current one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
