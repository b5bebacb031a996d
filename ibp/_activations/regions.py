"""Holds the bytes of saved tensors, and moves them off a GPU and back.

A `SavedRegion` has the bytes of one span, in `SavedPiece`s that are encoded, sent and brought back separately. The
bytes may be on the device or on the host. The `PieceTransfers` of a GPU move pieces. Each direction has a stream and a
window, which limits the device memory that its copies use. Pinned memory is kept from step to step. A `ForwardPass`
knows the regions that one forward pass saved, and the order in which the backward pass is expected to need them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping

import torch

from .._machine.memory import Pool
from .._rows import forms
from .._rows.handle import Faults
from . import coding
from .coding import UnchangedTensor

# Number of pieces, of any size, that may always be in transit in each direction: one is being copied and one waits.
_LEAST_MOVING = 2


# ---- saved bytes ---------------------------------------------------------------------------------------------------


class SavedPiece:
    """The bytes [start, end) of a region, and the memory that holds them."""

    def __init__(self, start: int, end: int, stream: torch.Stream | None) -> None:
        # stream: the stream to which the memory of `memory`, `kept` or `coming` belongs.
        self.start, self.end, self.num_bytes, self.stream = start, end, end - start, stream
        # Encoded bytes on the device, in memory that is large enough for raw rows. Bytes that are not encoded are in
        # `SavedRegion.memory` instead.
        self.memory: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None  # encoded bytes on the device, in a buffer of the expected size
        # In pinned memory: encoded bytes, in a buffer of the expected size; or all raw bytes.
        self.host: torch.Tensor | None = None
        self.room_bytes = 0  # size in bytes of `kept` or `host`
        # The pinned memory that contains `host`. If encoded bytes stay on the device, it contains only the head of the
        # encoded piece.
        self.buffer: torch.Tensor | None = None
        self.sent: torch.Event | None = None  # recorded after the copy to buffer
        # coming: the copy of `host` that is being made on the device. arrived: the event that is recorded after that
        # copy.
        self.coming: torch.Tensor | None = None
        self.arrived: torch.Event | None = None

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of the piece as a part of `data`. data: all bytes of the region."""
        return data if self.num_bytes == data.numel() else data[self.start : self.end]

    def note_used(self, recipe: coding.ActivationRecipe, counters: torch.Tensor) -> int:
        """Records in the recipe how many bytes of overflow the piece uses. Returns the size in bytes of the used part
        of the encoded memory, from its first byte. counters: the encoded memory, or a copy of its head. The caller must
        wait for `sent` before it passes a copy."""
        used = forms.used_bytes(counters)
        recipe.note(self.num_bytes, used)
        return coding.index_bytes(self.num_bytes) + used


class SavedRegion:
    """A range of bytes that was saved once, encoded or raw, on the device or on the host.

    Args:
        of: the pass that saves the bytes.
        number: number of the region in that pass.
        num_bytes: size in bytes before encoding.
        recipe: the recipe by which the bytes are encoded. None: they are not encoded.
        transfers: the transfers of a GPU. None: the bytes are on the CPU.
    """

    def __init__(
        self,
        of: ForwardPass,
        number: int,
        num_bytes: int,
        recipe: coding.ActivationRecipe | None,
        transfers: PieceTransfers | None,
    ) -> None:
        self.of, self.number, self.num_bytes, self.recipe, self.transfers = of, number, num_bytes, recipe, transfers
        self.latest = of  # the last pass that saved the bytes
        # The stream on which the memory, the copies that come back, and decoded bytes can be used.
        self.stream = None if transfers is None else transfers.current()
        self._max_sms = 0 if transfers is None else transfers.max_sms
        self._piece_bytes = num_bytes // (1 if recipe is None else recipe.times_narrower)
        # The pieces in order: of the region's bytes, or of the narrower bytes that its recipe makes. Each piece is
        # encoded, sent and brought back separately.
        self.pieces = [SavedPiece(start, end, self.stream) for start, end in coding.pieces(self._piece_bytes)]
        # The saved tensor's own bytes. If they are not encoded, they are kept until all of them have been copied. If
        # they are narrowed, they are kept until the host knows that narrowing lost nothing.
        self.memory: torch.Tensor | None = None
        self.source: UnchangedTensor | None = None  # the saved tensor whose bytes `memory` has
        self.coming: torch.Tensor | None = None  # the memory to which raw pieces are copied back
        self.misfits: torch.Tensor | None = None  # a bool tensor [] on the device: True if narrowing lost anything
        # saves: how often tensors of the region have been saved. uses: how often they have been read.
        self.saves = self.uses = 0
        # The error to raise at the next read, if the source was changed before its copy had ended.
        self._changed: RuntimeError | None = None
        self._decoded: UnchangedTensor | None = None
        self._is_decoded_only = False

    def is_away(self, piece: SavedPiece) -> bool:
        """Returns whether the bytes of a piece are on the host and are not being copied back."""
        return piece.host is not None and self.memory is piece.memory is piece.kept is piece.coming is None

    # ---- leaving ----

    def hold(self, data: torch.Tensor, x: torch.Tensor) -> None:
        """Makes the region hold the bytes of a saved tensor x. data: these bytes, uint8 [num_bytes]."""
        self.memory, self.source = data, UnchangedTensor.of(x)

    def encode(self, piece: SavedPiece, data: torch.Tensor) -> None:
        """Encodes a piece of data, uint8, on the current stream."""
        assert self.recipe is not None
        piece.memory = torch.empty(coding.memory_bytes(piece.num_bytes), dtype=torch.uint8, device=data.device)
        coding.encode(piece.of(data), self.recipe, piece.memory, self._max_sms)

    def to_send(self, piece: SavedPiece) -> torch.Tensor:
        """Returns the bytes of a piece that are to be copied off the device."""
        if self.recipe is None:
            assert self.memory is not None
            return piece.of(self.memory)
        assert piece.memory is not None
        return piece.memory[: coding.index_bytes(piece.num_bytes) + self.recipe.room(piece.num_bytes)]

    def trim(self, piece: SavedPiece) -> int:
        """Frees the unused memory of a piece that was encoded on the CPU. Returns the size in bytes of the memory that
        is left."""
        assert piece.memory is not None and self.recipe is not None
        piece.memory = piece.memory[: piece.note_used(self.recipe, piece.memory)].clone()
        return piece.memory.numel()

    def note_narrow(self, fits: bool) -> None:
        """Records whether narrowing lost nothing. If so, frees the original bytes; otherwise they are kept."""
        self.misfits = None
        if fits:
            self.memory = self.source = None
        else:
            self.of.note_outgrown(self.num_bytes)

    def leave(self, piece: SavedPiece) -> None:
        """Frees the device memory of a piece that has been copied elsewhere. Bytes that are not encoded are freed
        together, after the last piece."""
        if self.recipe is not None:
            piece.memory = None
            return
        try:
            self._check()
        except RuntimeError as error:
            self._changed = error
        if piece is self.pieces[-1] and all(part.host is not None for part in self.pieces):
            self.memory = self.source = None

    # ---- coming back ----

    def data(self) -> torch.Tensor:
        """Returns the region's bytes, uint8 [num_bytes], in memory of the device, for use on the current stream. The
        decoded bytes are kept until every operation that saved them has read them, so that they are decoded once. If an
        operation has changed them, they are decoded again. If the encoded bytes exist only on the device, they are
        freed at the last read, and the decoded bytes are kept instead, because autograd's graph may be retained and
        read again."""
        self._check()
        if self.uses == 0:
            self.of.uses.append(self.number)
        decoded, current = self._decoded, None if self.transfers is None else self.transfers.current()
        if decoded is None or (decoded.is_changed and self.memory is None and not self._is_decoded_only):
            data = self._read(current)
        else:
            data = self._usable(decoded.get(), current)
        self.of.prefetch(self, len(self.pieces))
        uses, is_decoded_only = self.uses + 1, self._is_decoded_only or self._may_drop_codes(self.uses + 1)
        kept = UnchangedTensor(data, data._version) if uses % self.saves or is_decoded_only else None
        # In one statement, and before any encoded bytes are freed, so that an interrupted call can be made again.
        self.uses, self._decoded, self._is_decoded_only = uses, kept, is_decoded_only
        if is_decoded_only:
            self._drop_codes()
        return data

    def _may_drop_codes(self, uses: int) -> bool:
        """Returns whether the encoded bytes exist only on the device and every save has been read. uses: how often
        tensors of the region have been read."""
        if uses < self.saves or self.recipe is None or self.memory is not None:
            return False
        return not any(piece.host is not None or piece.memory is piece.kept is None for piece in self.pieces)

    def _drop_codes(self) -> None:
        """Frees the encoded bytes."""
        for piece in self.pieces:
            if self.transfers is None:
                piece.memory = None
            else:
                self.transfers.drop_codes(piece)

    def _check(self) -> None:
        """Raises RuntimeError if the saved tensor was changed while the region still needed its bytes."""
        if self._changed is not None:
            raise self._changed
        if self.misfits is not None and self.source is not None and self.source.is_changed:
            self.note_narrow(not bool(self.misfits))
        if self.source is not None:
            self.source.get()

    def _read(self, current: torch.Stream | None) -> torch.Tensor:
        if self.memory is not None:
            return self._usable(self.memory, current)
        return self._received(current) if self.recipe is None else self._decode(self.recipe, current)

    def _received(self, current: torch.Stream | None) -> torch.Tensor:
        """Receives the pieces of a region that was sent raw, and returns its bytes."""
        assert self.transfers is not None and current is not None
        for k, piece in enumerate(self.pieces):
            self.of.prefetch(self, k)
            self.transfers.receive(self, piece, current)
        assert self.coming is not None
        data, self.coming = self.coming, None
        return self._usable(data, current)

    def _usable(self, tensor: torch.Tensor, current: torch.Stream | None) -> torch.Tensor:
        """Makes a tensor of the region's bytes safe to use on the current stream, which becomes the region's stream.
        Returns the tensor."""
        _hand_over(tensor, self.stream, current)
        self.stream = current
        return tensor

    def _decode(self, recipe: coding.ActivationRecipe, current: torch.Stream | None) -> torch.Tensor:
        """Decodes the bytes piece by piece, while the next pieces are copied, and returns them."""
        device = torch.device("cpu") if self.transfers is None else self.transfers.device
        out = torch.empty(self._piece_bytes, dtype=torch.uint8, device=device)
        for k, piece in enumerate(self.pieces):
            held = piece.memory if piece.memory is not None else piece.kept
            if held is None:
                assert self.transfers is not None and current is not None
                self.of.prefetch(self, k)
                held = self.transfers.receive(self, piece, current)
            _hand_over(held, piece.stream, current)
            coding.decode(held, recipe, piece.of(out), self.of.faults.on(device), self._max_sms)
        self.stream = current
        return out if recipe.origin is None else recipe.origin.widen(out)

    def __del__(self) -> None:
        self.of.note_end(self)
        if self.transfers is not None:
            self.transfers.forget(self)


def _hand_over(tensor: torch.Tensor, stream: torch.Stream | None, current: torch.Stream | None) -> None:
    """Makes the current stream wait until `stream` has produced a tensor, and records that the current stream uses the
    tensor."""
    if stream is not None and current is not None and current != stream:
        current.wait_stream(stream)
        tensor.record_stream(current)


# ---- moving pieces -------------------------------------------------------------------------------------------------


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
            self._settle_oldest()

    def free(self) -> None:
        """Frees the memory of pieces that have been copied, without waiting."""
        self._note_misfits()
        while self._leaving:
            piece = self._leaving[0][1]()
            if piece is not None and piece.sent is not None and not piece.sent.query():
                return
            self._settle_oldest()

    def begin_backward(self) -> None:
        """If encoded pieces stay on the GPU, frees all memory that waits for the host, because gradients will soon need
        it."""
        if self._keeps_codes:
            self._note_misfits(waits=True)
            while self._leaving:
                self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Waits until the oldest piece has been copied elsewhere, and frees the piece's memory. A piece that does not
        fit in its destination keeps its memory."""
        of, part, num_bytes = self._leaving.popleft()
        self.leaving_bytes -= num_bytes
        region, piece = of(), part()
        if region is None or piece is None:
            return
        assert piece.sent is not None and piece.buffer is not None
        piece.sent.synchronize()
        if region.recipe is None or piece.note_used(region.recipe, piece.buffer) <= piece.room_bytes:
            region.leave(piece)
            return
        region.of.note_outgrown(piece.num_bytes)
        buffer = piece.buffer
        piece.buffer = piece.host = piece.kept = piece.sent = None  # first, so that no buffer is given back twice
        self.buffers.give(buffer, raw_bytes=self._raw_bytes(piece))

    # ---- back ----

    def fetch_region(self, region: SavedRegion, first: int) -> bool:
        """Starts to bring back the pieces of a region that are on the host, beginning with piece number `first`.
        Returns whether the window had room for all of these pieces."""
        for piece in region.pieces[first:]:
            if region.is_away(piece):
                assert piece.host is not None
                self.take_back()
                self._note_misfits()
                if self.coming >= _LEAST_MOVING and self.coming_bytes + piece.host.numel() > self.window_bytes:
                    return False
                self.fetch(region, piece)
        return True

    def fetch(self, region: SavedRegion, piece: SavedPiece) -> None:
        """Starts to copy a piece back. Encoded bytes are copied to new memory, raw bytes to their position in
        `region.coming`. The memory belongs to the current stream."""
        assert piece.host is not None
        current, num_bytes = self.current(), piece.host.numel()
        stream: torch.Stream | None = current
        if region.recipe is not None:
            coming = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        else:
            if region.coming is None:
                region.coming = torch.empty(region.num_bytes, dtype=torch.uint8, device=self.device)
                region.stream = current
            coming, stream = piece.of(region.coming), piece.stream
        arrived = _copy(coming, piece.host, self.back, current)
        # In one statement, so that an interrupt leaves no piece that waits for the event of an earlier copy.
        piece.coming, piece.arrived, piece.stream = coming, arrived, stream
        self.coming, self.coming_bytes = self.coming + 1, self.coming_bytes + num_bytes

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
    try:
        with stream:
            to.copy_(data, non_blocking=True)
        return stream.record_event()
    except BaseException:
        stream.synchronize()  # because nobody waits for this copy before the memory is used again
        raise


# ---- passes --------------------------------------------------------------------------------------------------------


class ForwardPass:
    """One forward pass and the regions that it saved.

    Args:
        order: numbers of the regions in the order in which the previous backward pass used them. Empty: regions are
            expected in the reverse order of saving.
        transfers: the transfers of each device.
        faults: receives the faults that decoders find.
        note_outgrown: a function that is called for each region or piece that compressed worse than expected, with its
            size in bytes before encoding.
    """

    def __init__(
        self,
        order: list[int],
        transfers: Mapping[torch.device, PieceTransfers],
        faults: Faults,
        note_outgrown: Callable[[int], None],
    ) -> None:
        self.faults, self.note_outgrown = faults, note_outgrown
        self.numbers = 0  # number of regions so far, including those that are not moved; also the next region's number
        self.is_used = False  # whether a saved tensor has been read since the pass began
        self.uses: list[int] = []  # numbers of regions in the order of their first use
        self._order, self._transfers = order, transfers
        self._positions = {number: position for position, number in enumerate(order)}
        self._regions: dict[int, weakref.ref[SavedRegion]] = {}
        self._ended: deque[int] = deque()  # numbers of regions that have been destroyed
        # For each device, the position in `order` from which regions are fetched next.
        self._next: dict[PieceTransfers, int] = {}

    @property
    def alive(self) -> int:
        """Number of regions that may still be read."""
        return len(self._regions) - len(self._ended)

    def take_number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def add(self, region: SavedRegion) -> None:
        self._regions[region.number] = weakref.ref(region)

    def share(self, region: SavedRegion) -> None:
        """Records that the pass saves bytes that a region already holds. If the region was last saved by an earlier
        pass, uses up a number, so that the next regions have the same numbers in every pass."""
        if region.latest is not self:
            region.latest = self
            self.take_number()

    def note_end(self, region: SavedRegion) -> None:
        """Records that a region is destroyed, which may happen at any time and in any thread."""
        self._ended.append(region.number)

    def prefetch(self, region: SavedRegion, first: int) -> None:
        """Starts to bring back the pieces of a region, beginning with piece number `first`, and then the regions that
        are expected to be used after it."""
        transfers = region.transfers
        if transfers is None or not transfers.fetch_region(region, first):
            return
        position = self._positions.get(region.number) if self._order else self.numbers - 1 - region.number
        if position is not None and (position >= self._next.get(transfers, 0) or region.uses >= region.saves):
            self._next[transfers] = position + 1
        self._fetch_on(transfers)

    def start(self) -> None:
        """Records that the backward pass begins, and starts to bring back the regions that it needs first."""
        self.is_used = True
        for transfers in self._transfers.values():
            transfers.begin_backward()
            self._fetch_on(transfers)

    def _fetch_on(self, transfers: PieceTransfers) -> None:
        """Starts to bring back the next regions of a device, in the expected order, until the window is full."""
        numbers, position = self._order or range(self.numbers - 1, -1, -1), self._next.get(transfers, 0)
        while position < len(numbers):
            found = self._regions.get(numbers[position])
            region = None if found is None else found()
            if region is not None and region.transfers is transfers and not transfers.fetch_region(region, 0):
                break
            position += 1
        self._next[transfers] = position
