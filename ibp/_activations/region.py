"""Saved bytes, wherever they are: the memory of one or several saved tensors, in pieces that move one after the
other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import coding, planning, spans
from .origin import Origin

if TYPE_CHECKING:
    from .lane import Lane
    from .passes import Pass


class Piece:
    """Bytes from start to end of a region, and where they are.

    Attributes:
        memory: on the device: coded bytes with room for any. What is not coded is in the region's own memory.
        kept: on the device: coded bytes with the room that they are expected to take.
        host: likewise, in pinned memory, or all bytes.
        buffer: the pinned memory that host or counters are in.
        counters: of coded memory, in host memory; None: it is not known how many bytes are used, or all are.
        sent: after the copies to host and counters.
        coming, arrived: a copy of host on its way to the device, and after it.
        stream: that memory, kept or coming belong to.
    """

    def __init__(self, start: int, end: int, stream: torch.cuda.Stream | None) -> None:
        self.start, self.end, self.stream = start, end, stream
        self.memory: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self.counters: torch.Tensor | None = None
        self.sent: torch.cuda.Event | None = None
        self.coming: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def expected_bytes(self, recipe: coding.Recipe) -> int:
        """Bytes that coded memory is expected to need, from its first one on."""
        return coding.index_bytes(self.num_bytes) + recipe.room(self.num_bytes)

    def note_used(self, recipe: coding.Recipe) -> int:
        """Bytes that coded memory uses, from its first one on: for after `sent`."""
        assert self.counters is not None
        used = coding.used_bytes(self.counters)
        recipe.note(self.num_bytes, used)
        return coding.index_bytes(self.num_bytes) + used


class Region:
    """Bytes that were saved once, coded or as they are, on the device or on the host.

    Attributes:
        num_bytes: before coding.
        recipe: how they are coded; None: as they are.
        pieces: in order; each is coded, sent and brought back for itself. Of what a recipe makes narrower they are
            the narrower bytes.
        memory: the bytes, where they are not coded: the saved tensor's own, until all have left. Of what is made
            narrower, until it is known that it fits.
        source: the saved tensor whose bytes memory is.
        coming: where pieces that are not coded come back to.
        stream: for which memory, coming or what was decoded are there.
        saves, uses: how often tensors of the region were saved, and asked for.
    """

    def __init__(self, of: Pass, number: int, num_bytes: int, recipe: coding.Recipe | None, lane: Lane | None) -> None:
        self.of, self.number, self.num_bytes, self.recipe, self.lane = of, number, num_bytes, recipe, lane
        self.stream = None if lane is None else torch.cuda.current_stream(lane.device)
        self.piece_bytes = num_bytes // (1 if recipe is None else recipe.times_narrower)
        self.pieces = [Piece(start, end, self.stream) for start, end in coding.pieces(self.piece_bytes)]
        self.memory: torch.Tensor | None = None
        self.source: spans.Kept | None = None
        self.changed: RuntimeError | None = None  # source was, before its copy was known to be done
        self.coming: torch.Tensor | None = None
        self.misfits: torch.Tensor | None = None  # whether anything of memory is lost by narrower bytes, on the device
        self.saves = self.uses = 0
        self._decoded: spans.Kept | None = None

    def is_away(self, piece: Piece) -> bool:
        """Whether the bytes of a piece are on the host, and not on their way back."""
        held = (self.memory, piece.memory, piece.kept, piece.coming)
        return piece.host is not None and all(memory is None for memory in held)

    @property
    def expected_bytes(self) -> int:
        """Bytes that coded pieces are expected to need."""
        assert self.recipe is not None
        return sum(piece.expected_bytes(self.recipe) for piece in self.pieces)

    def to_send(self, piece: Piece) -> torch.Tensor:
        """The bytes of a piece that go to the host."""
        if self.recipe is None:
            assert self.memory is not None
            return self.memory[piece.start : piece.end]
        assert piece.memory is not None
        return piece.memory[: piece.expected_bytes(self.recipe)]

    def trim(self, piece: Piece) -> int:
        """Gives back what a piece that was coded on the CPU does not need. @return the bytes that it needs."""
        assert piece.memory is not None and self.recipe is not None
        piece.counters = piece.memory[: coding.COUNTERS_BYTES]
        piece.memory = piece.memory[: piece.note_used(self.recipe)].clone()
        return piece.memory.numel()

    def narrow(self, origin: Origin, data: torch.Tensor) -> torch.Tensor:
        """What is coded of data, which is the region's memory until `note_narrow`."""
        rest, self.misfits = origin.narrow(data)
        return rest

    def note_narrow(self, fits: bool) -> None:
        """Says whether narrower bytes are all there is; if not, the bytes stay as they are."""
        self.misfits = None
        if fits:
            self.memory = self.source = None
        else:
            self.of.offload._note_outgrown(self.num_bytes)

    def leave(self, piece: Piece) -> None:
        """Frees the memory of a piece, which is elsewhere by now; what is not coded, once the last piece is."""
        if self.recipe is not None:
            piece.memory = None
            return
        try:
            self._check()
        except RuntimeError as error:
            self.changed = error
        if piece is self.pieces[-1] and all(part.host is not None for part in self.pieces):
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
        self.of.prefetch(self, len(self.pieces))
        return data

    def _again(self, decoded: spans.Kept) -> torch.Tensor:
        """What an operation was given, for another one; read anew where the first one has changed it."""
        if decoded.is_changed and self.memory is None:
            return self._read()
        return self._usable(decoded.get())

    def _check(self) -> None:
        """Raises RuntimeError where bytes that are not coded were changed while they could be."""
        if self.changed is not None:
            raise self.changed
        if self.misfits is not None and self.source is not None and self.source.is_changed:
            self.note_narrow(not bool(self.misfits))
        if self.source is not None:
            self.source.get()

    def _read(self) -> torch.Tensor:
        device = torch.device("cpu") if self.lane is None else self.lane.device
        notes = self.of.recorder(device)
        watch = None if notes is None else planning.Stopwatch(device)
        if self.recipe is not None and self.memory is None:
            data = self._decode(self.recipe, device, watch)
        else:
            data = self._received(watch)
        if watch is not None and notes is not None:
            notes.uses.append((self.number, watch.marks))
        return data

    def _received(self, watch: planning.Stopwatch | None) -> torch.Tensor:
        """The bytes, where they are not coded."""
        if self.memory is not None:
            data = self.memory
        else:
            assert self.lane is not None
            for k, piece in enumerate(self.pieces):
                self.of.prefetch(self, k)
                self.lane.receive(self, piece)
            assert self.coming is not None
            data, self.coming = self.coming, None
        if watch is not None:
            watch.mark()
            watch.mark()
        return self._usable(data)

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region's bytes, which are there for its stream, for the current one, which it has from then on."""
        _hand_over(tensor, self.stream)
        if self.stream is not None:
            self.stream = torch.cuda.current_stream(tensor.device)
        return tensor

    def _decode(self, recipe: coding.Recipe, device: torch.device, watch: planning.Stopwatch | None) -> torch.Tensor:
        """The bytes, decoded piece by piece: the next ones come meanwhile."""
        out = torch.empty(self.piece_bytes, dtype=torch.uint8, device=device)
        fault = self.of.offload._faults.of(device)
        for k, piece in enumerate(self.pieces):
            held = piece.memory if piece.memory is not None else piece.kept
            if held is None:
                assert self.lane is not None
                self.of.prefetch(self, k)
                held = self.lane.receive(self, piece)
            _hand_over(held, piece.stream)
            if watch is not None:
                watch.mark()
            coding.decode(held, recipe, out[piece.start : piece.end], fault)
            if watch is not None:
                watch.mark()
        if self.lane is not None:
            self.stream = torch.cuda.current_stream(device)
        return out if recipe.origin is None else recipe.origin.widen(out)

    def __del__(self) -> None:
        self.of.ended.append(self.number)
        if self.lane is not None:
            self.lane.forget(self)


def _hand_over(tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    """Makes a tensor, which is there for a stream, usable for the current one."""
    if stream is not None and (current := torch.cuda.current_stream(tensor.device)) != stream:
        current.wait_stream(stream)
        tensor.record_stream(current)
