"""Saved bytes, wherever they are: the memory of one or several saved tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import coding, planning, spans

if TYPE_CHECKING:
    from .lane import Lane
    from .passes import Pass


class Region:
    """Bytes that were saved once, coded or as they are, on the device or on the host.

    Attributes:
        num_bytes: before coding.
        recipe: how they are coded; None: as they are.
        memory: on the device: coded bytes with room for any, or the saved tensor's own bytes.
        source: the saved tensor whose bytes memory is; None: memory is the region's own.
        kept: on the device: coded bytes with the room that they are expected to take.
        host: likewise, in pinned memory, or all bytes.
        buffer: the pinned memory that host or counters are in.
        counters: of coded memory, in host memory; None: it is not known how many bytes are used, or all are.
        sent: after the copies to host and counters.
        coming, arrived: a copy of host on its way to the device, and after it.
        saves, uses: how often tensors of the region were saved, and asked for.
    """

    def __init__(self, of: Pass, number: int, num_bytes: int, recipe: coding.Recipe | None, lane: Lane | None) -> None:
        self.of, self.number, self.num_bytes, self.recipe, self.lane = of, number, num_bytes, recipe, lane
        self.memory: torch.Tensor | None = None
        self.source: spans.Kept | None = None
        self.changed: RuntimeError | None = None  # source was, before its copy was known to be done
        self.kept: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self.counters: torch.Tensor | None = None
        self.sent: torch.cuda.Event | None = None
        self.coming: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        self.stream = None if lane is None else torch.cuda.current_stream(lane.device)  # that has its bytes
        self.saves = self.uses = 0
        self._decoded: spans.Kept | None = None
        of.alive += 1

    @property
    def is_away(self) -> bool:
        """Whether the bytes are on the host, and not on their way back."""
        return self.memory is None and self.kept is None and self.host is not None and self.coming is None

    @property
    def expected_bytes(self) -> int:
        """Bytes that coded memory is expected to need, from its first one on."""
        assert self.recipe is not None
        return coding.index_bytes(self.num_bytes) + self.recipe.room(self.num_bytes)

    def note_used(self) -> int:
        """Bytes that coded memory uses, from its first one on: for after `sent`."""
        assert self.recipe is not None and self.counters is not None
        used = coding.used_bytes(self.counters)
        self.recipe.note(self.num_bytes, used)
        return coding.index_bytes(self.num_bytes) + used

    def trim(self) -> int:
        """Gives back what coded memory on the CPU does not need. @return the bytes that it needs."""
        assert self.memory is not None and self.recipe is not None
        self.counters = self.memory[: coding.COUNTERS_BYTES]
        self.memory = self.memory[: self.note_used()].clone()
        return self.memory.numel()

    def leave(self) -> None:
        """Frees memory, which is elsewhere by now."""
        try:
            self._check()
        except RuntimeError as error:
            self.changed = error
        self.memory = self.source = None

    def data(self) -> torch.Tensor:
        """uint8 [num_bytes] on the device, for the current stream. They stay until every save was asked for, so that
        what two operations need is decoded once."""
        self._check()
        self.of.use(self)
        self.uses += 1
        decoded, self._decoded = self._decoded, None
        data = self._read() if decoded is None else self._again(decoded)
        if self.uses % self.saves:
            self._decoded = spans.Kept(data, data._version)
        self.of.prefetch(self)
        return data

    def _again(self, decoded: spans.Kept) -> torch.Tensor:
        """What an operation was given, for another one; read anew where the first one has changed it."""
        if decoded.is_changed and (self.recipe is not None or self.memory is None):
            return self._read()
        return self._usable(decoded.get())

    def _check(self) -> None:
        """Raises RuntimeError where bytes that are not coded were changed while they could be."""
        if self.changed is not None:
            raise self.changed
        if self.source is not None:
            self.source.get()

    def _read(self) -> torch.Tensor:
        device = torch.device("cpu") if self.lane is None else self.lane.device
        notes = self.of.recorder(device)
        watch = None if notes is None else planning.Stopwatch(device)
        held = self.memory if self.memory is not None else self.kept
        if held is None:
            assert self.lane is not None
            held = self.lane.receive(self)
        held = self._usable(held)
        if watch is not None:
            watch.mark()
        data = held if self.recipe is None else coding.decode(held, self.recipe, self.num_bytes, self._fault(device))
        if watch is not None and notes is not None:
            watch.mark()
            notes.uses.append((self.number, watch.marks))
        return data

    def _fault(self, device: torch.device) -> torch.Tensor:
        return self.of.offload._faults.of(device)

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which is there for the region's stream, for the current one, which the region has from then
        on."""
        if self.stream is not None and (current := torch.cuda.current_stream(tensor.device)) != self.stream:
            current.wait_stream(self.stream)
            tensor.record_stream(current)
            self.stream = current  # where what is decoded from it belongs
        return tensor

    def __del__(self) -> None:
        self.of.alive -= 1
        if self.lane is not None:
            self.lane.forget(self)
