"""Regions: the saved bytes of one or several tensors, in pieces that are moved one after the other. The bytes may be on
the device or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._rows import forms
from . import coding
from .coding import IndexOrigin, UnchangedTensor

if TYPE_CHECKING:
    from .policy import ForwardPass
    from .transfers import PieceTransfers


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

    def narrow(self, origin: IndexOrigin, data: torch.Tensor) -> torch.Tensor:
        """Returns the narrower bytes of data. The region's memory, which has the original bytes, is kept until
        `note_narrow`."""
        rest, self.misfits = origin.narrow(data)
        return rest

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
        decoded bytes are kept until every operation that saved them has read them, so that they are decoded once. If
        the encoded bytes exist only on the device, they are freed at the last read, and the decoded bytes are kept
        instead, because autograd's graph may be retained and read again."""
        self._check()
        self.of.note_use(self)
        self.uses += 1
        decoded, self._decoded = self._decoded, None
        current = None if self.transfers is None else self.transfers.current()
        data = self._read(current) if decoded is None else self._again(decoded, current)
        if self.uses % self.saves or self._is_decoded_only:
            self._decoded = UnchangedTensor(data, data._version)
        self.of.prefetch(self, len(self.pieces))
        return data

    def _drop_codes(self) -> None:
        """Frees the encoded bytes if they exist only on the device and every save has been read."""
        if self.uses < self.saves or self.recipe is None or self.memory is not None:
            return
        if any(piece.host is not None or piece.memory is piece.kept is None for piece in self.pieces):
            return
        for piece in self.pieces:
            if self.transfers is None:
                piece.memory = None
            else:
                self.transfers.drop_codes(piece)
        self._is_decoded_only = True

    def _again(self, decoded: UnchangedTensor, current: torch.Stream | None) -> torch.Tensor:
        """Returns the bytes that an earlier read has decoded. If the operation that received these bytes has changed
        them, decodes them again, or raises RuntimeError if no encoded bytes are left."""
        if decoded.is_changed and self.memory is None and not self._is_decoded_only:
            return self._read(current)
        data = self._usable(decoded.get(), current)
        self._drop_codes()
        return data

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
        self._drop_codes()
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
