"""Moves activations off a GPU and back. Each direction has a stream and a window, which limits the device memory that
its copies use. Pinned memory is kept from step to step."""

from __future__ import annotations

import weakref
from collections import deque

import torch

from .._machine.memory import Pool
from .._rows import forms
from . import coding
from .region import SavedPiece, SavedRegion

# Number of pieces, of any size, that may always be in transit in each direction: one is being copied and one waits.
_LEAST_MOVING = 2


class PieceTransfers:
    """Moves pieces from a GPU to pinned memory and back. If encoded pieces stay on the GPU, moves them to GPU memory of
    the expected encoded size instead.

    A piece is encoded into memory that is large enough for raw rows. Only the bytes that the piece is expected to use
    are copied. When the host knows that the piece did not use more bytes, the memory is freed. `make_room` limits how
    much memory waits to be freed in this way.

    Args:
        device: the GPU.
        window_bytes: largest number of bytes of device memory in use by copies to the host and, counted separately, by
            copies back. Two pieces in each direction are always allowed. None: encoded pieces stay on the GPU, and up
            to two pieces keep their full-size buffers until the host has read their encoded sizes.
        max_sms: number of multiprocessors that encoding and decoding may keep busy; 0: all.
    """

    def __init__(self, device: torch.device, window_bytes: int | None, max_sms: int = 0) -> None:
        self.device, self.max_sms, self._keeps_codes = device, max_sms, window_bytes is None
        self.window_bytes = 2 * coding.memory_bytes(coding.PIECE_BYTES) if window_bytes is None else window_bytes
        # The streams of copies to the host, of copies back, and of the copies that `ask_for_misfits` makes. They are
        # torch.Stream objects, because torch.cuda.Stream costs the host two or three more calls of Python functions.
        self.out, self.back, self._notes = (torch.Stream(device) for _ in range(3))
        self.buffers = Pool()
        # Number of pieces that are being copied back, their size in bytes, and the size in bytes of the device memory
        # of the pieces in `_leaving`.
        self.coming = self.coming_bytes = self.leaving_bytes = 0
        # Pieces of destroyed regions: (piece, recipe or None, number of bytes that were being copied back). The recipe
        # is given if the piece's encoded size has not been recorded in it yet.
        self._ended: deque[tuple[SavedPiece, coding.ActivationRecipe | None, int]] = deque()
        # Pieces whose copies to the host may not have ended: (region, piece, size of the piece's device memory in
        # bytes).
        self._leaving: deque[tuple[weakref.ref[SavedRegion], weakref.ref[SavedPiece], int]] = deque()
        # Flags that `ask_for_misfits` copies: (region, pinned memory whose first byte says whether an element does not
        # fit, event after the copy to this memory).
        self._narrowed: deque[tuple[weakref.ref[SavedRegion], torch.Tensor, torch.Event]] = deque()

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device.index)

    # ---- out ----

    def send(self, region: SavedRegion, piece: SavedPiece) -> int:
        """Starts to move a piece, which the current stream has just written. Returns the size in bytes of the piece's
        memory at its destination."""
        self.take_back()
        source = region.to_send(piece)
        copied = source[: forms.HEAD_BYTES] if self._keeps_codes else source
        num_bytes, copied_bytes = source.numel(), copied.numel()
        piece.buffer = self.buffers.take(copied_bytes, self.out, self._raw_bytes(piece))
        piece.room_bytes = num_bytes
        host = piece.buffer[:copied_bytes]
        if self._keeps_codes:
            piece.kept = source.clone()
        else:
            piece.host = host
        assert piece.stream is not None
        piece.sent = _copy(host, copied, self.out, piece.stream)
        held_bytes = num_bytes if piece.memory is None else piece.memory.numel()
        self._leaving.append((weakref.ref(region), weakref.ref(piece), held_bytes))
        self.leaving_bytes += held_bytes
        return num_bytes

    def _raw_bytes(self, piece: SavedPiece) -> int | None:
        """Returns the number of bytes that a piece would take in pinned memory if it were raw. Returns None if only the
        head of an encoded piece is copied to pinned memory."""
        return None if self._keeps_codes else piece.num_bytes

    def ask_for_misfits(self, region: SavedRegion) -> None:
        """Starts to copy to the host the flag that says whether an element of a region does not fit its narrower dtype.
        This copy does not wait for other copies."""
        assert region.misfits is not None and region.stream is not None
        buffer = self.buffers.take(1, self._notes)
        done = _copy(buffer[:1], region.misfits.view(1).view(torch.uint8), self._notes, region.stream)
        region.misfits.record_stream(self._notes)
        self._narrowed.append((weakref.ref(region), buffer, done))

    def _note_misfits(self, waits: bool = False) -> None:
        """Reads the flags that have been copied by `ask_for_misfits`, and frees the original bytes of regions whose
        elements all fit. waits: whether to wait for copies that have not ended."""
        while self._narrowed and (waits or self._narrowed[0][2].query()):
            of, buffer, done = self._narrowed.popleft()
            region = of()
            if region is not None and region.misfits is not None:
                done.synchronize()
                region.note_narrow(not buffer[0])
            self.buffers.give(buffer, done)

    def make_room(self, num_bytes: int) -> None:
        """Makes room in the window for num_bytes more bytes: waits for the oldest copies and frees the memory of their
        pieces, until the new bytes fit in the window. Stops earlier if only the pieces that are always allowed are left
        in transit."""
        self._note_misfits(waits=self._keeps_codes)
        least = 0 if self._keeps_codes else _LEAST_MOVING
        while len(self._leaving) > least and self.leaving_bytes + num_bytes > self.window_bytes:
            self._pop()

    def free(self) -> None:
        """Frees the memory of pieces that have been copied, without waiting."""
        self._note_misfits()
        while self._leaving:
            piece = self._leaving[0][1]()
            if piece is not None and piece.sent is not None and not piece.sent.query():
                return
            self._pop()

    def begin_backward(self) -> None:
        """If encoded pieces stay on the GPU, frees all memory that waits for the host, because gradients will soon need
        it."""
        if self._keeps_codes:
            self._note_misfits(waits=True)
            while self._leaving:
                self._pop()

    def _pop(self) -> None:
        of, part, num_bytes = self._leaving.popleft()
        self.leaving_bytes -= num_bytes
        region, piece = of(), part()
        if region is not None and piece is not None:
            self._settle(region, piece)

    def _settle(self, region: SavedRegion, piece: SavedPiece) -> None:
        """Frees the memory of a piece that has been copied elsewhere. A piece that does not fit in its destination
        keeps its memory."""
        assert piece.sent is not None
        piece.sent.synchronize()
        assert piece.buffer is not None
        if region.recipe is None or piece.note_used(region.recipe, piece.buffer) <= piece.room_bytes:
            region.leave(piece)
            return
        region.of.note_outgrown(piece.num_bytes)
        self.buffers.give(piece.buffer, raw_bytes=self._raw_bytes(piece))
        piece.buffer = piece.host = piece.kept = piece.sent = None

    # ---- back ----

    def fetch_region(self, region: SavedRegion, first: int) -> bool:
        """Starts to bring back the pieces of a region that are on the host, beginning with piece number `first`.
        Returns whether the window had room for all of these pieces."""
        for piece in region.pieces[first:]:
            if region.is_away(piece):
                if not self._has_room_for(piece):
                    return False
                self.fetch(region, piece)
        return True

    def _has_room_for(self, piece: SavedPiece) -> bool:
        assert piece.host is not None
        self.take_back()
        self._note_misfits()
        return self.coming < _LEAST_MOVING or self.coming_bytes + piece.host.numel() <= self.window_bytes

    def fetch(self, region: SavedRegion, piece: SavedPiece) -> None:
        """Starts to copy a piece back. Encoded bytes are copied to new memory, raw bytes to their position in
        `region.coming`. The memory belongs to the current stream."""
        assert piece.host is not None
        current, num_bytes = self.current(), piece.host.numel()
        if region.recipe is not None:
            piece.coming = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            piece.stream = current
        else:
            if region.coming is None:
                region.coming = torch.empty(region.num_bytes, dtype=torch.uint8, device=self.device)
                region.stream = current
            piece.coming = piece.of(region.coming)
        piece.arrived = _copy(piece.coming, piece.host, self.back, current)
        self.coming += 1
        self.coming_bytes += num_bytes

    def receive(self, region: SavedRegion, piece: SavedPiece, current: torch.Stream) -> torch.Tensor:
        """Returns the bytes of a piece in GPU memory, for use on the current stream. From then on the piece does not
        count in the window."""
        if piece.coming is None:
            self.fetch(region, piece)
        assert piece.coming is not None and piece.arrived is not None
        current.wait_event(piece.arrived)
        memory, piece.coming = piece.coming, None
        self.coming -= 1
        self.coming_bytes -= memory.numel()
        return memory

    # ---- regions that end ----

    def drop_codes(self, piece: SavedPiece) -> None:
        """Frees the GPU memory of a piece. If a copy to the host is still reading it, the memory is reused only after
        the copy."""
        if piece.memory is not None and piece.sent is not None and not piece.sent.query():
            piece.memory.record_stream(self.out)
        piece.memory = piece.kept = None

    def forget(self, region: SavedRegion) -> None:
        """Releases a region that is being destroyed, which can happen at any time and in any thread. Its GPU memory is
        freed here. Its pinned memory is returned to the pool by the next call of `take_back`."""
        if region.memory is not None and any(piece.sent and not piece.sent.query() for piece in region.pieces):
            region.memory.record_stream(self.out)
        if region.coming is not None:
            region.coming.record_stream(self.back)
        for piece in region.pieces:
            coming_bytes = 0
            if piece.coming is not None:
                coming_bytes = piece.coming.numel()
                piece.coming.record_stream(self.back)
            # A piece that still has `memory` has not recorded its size in the recipe yet.
            recipe = None if piece.memory is None else region.recipe
            self.drop_codes(piece)
            piece.coming = None
            self._ended.append((piece, recipe, coming_bytes))

    def take_back(self) -> None:
        """Returns the pinned memory of destroyed regions to the pool, and removes their bytes from the window."""
        while self._ended:
            piece, recipe, coming_bytes = self._ended.popleft()
            self.coming -= coming_bytes > 0
            self.coming_bytes -= coming_bytes
            if piece.buffer is None:
                continue
            if recipe is not None and piece.sent is not None and piece.sent.query():
                piece.note_used(recipe, piece.buffer)
            self.buffers.give(piece.buffer, piece.arrived or piece.sent, self._raw_bytes(piece))


def _copy(to: torch.Tensor, data: torch.Tensor, stream: torch.Stream, after: torch.Stream) -> torch.Event:
    """Starts a copy on `stream`, which first waits for the work that is queued on the stream `after`. Returns an event
    after the copy."""
    stream.wait_stream(after)
    with stream:
        to.copy_(data, non_blocking=True)
    return stream.record_event()
