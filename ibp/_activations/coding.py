"""Learns recipes for activations, encodes activations into packed pieces of coded rows (`_layout.forms`), and decodes
them. A packed piece has a head, an index, and then the overflow, in which all coded rows lie one after the other. The
host does not know how many bytes of a piece are in use; a recipe predicts the number, and only so many bytes are
copied. A training step encodes hundreds of tensors. To keep the host's work small, a single operation encodes a piece,
and a single operation decodes it."""

from __future__ import annotations

import functools

import torch

from .._layout import forms, geometry
from .._schemes import AnyCodebook, surveyed
from .._schemes.learning import learned_from
from .origin import IndexOrigin
from .spans import SpanView

ROW_BYTES = 4096  # Size in bytes of the rows into which activations are cut.
# Size of a piece in bytes. The link copies it in about a millisecond, while the next piece is encoded.
PIECE_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 20  # Size in bytes of the sample from which a codebook is learned.
# The room of a piece is the size in bytes of the memory for its overflow, which holds all of its coded rows. The room
# is a share of the raw size: the share that earlier pieces needed, plus a margin. Margins are fractions of the needed
# share.
_FIRST_MARGIN = 1 / 32  # The margin while only a sample has been encoded.
_LEAST_MARGIN, _MOST_MARGIN = 1 / 256, 1 / 16  # Bounds of all later margins.
_CHANGES = 4  # Within these bounds, the margin is this many times the last relative change of the share.
_SPARE_BYTES = 4096  # Number of bytes that are added to the room of every piece.


class ActivationRecipe:
    """The codebook by which activations of one kind are encoded, and the expected size of the result.

    Args:
        codebook: a codebook for rows of ROW_BYTES bytes.
        share: size of the coded rows of a sample as a fraction of the sample's raw size.
        origin: the origin that is subtracted from elements before they are encoded. None: elements are encoded as they
            are.
    """

    def __init__(self, codebook: AnyCodebook, share: float, origin: IndexOrigin | None = None) -> None:
        self.codebook, self.needed_share = codebook, share
        self.codec, self.origin = codebook.codec, origin
        # The share that the room of a piece is for, and the largest share that a piece has used since the last `begin`.
        self._room_share, self._noted_share = share * (1 + _FIRST_MARGIN), 0.0
        # The last relative change of the needed share, and whether a share has been recorded.
        self._change, self._has_needed = 0.0, False

    @property
    def times_narrower(self) -> int:
        """The size of an element divided by the size of the narrower element that is encoded instead."""
        return 1 if self.origin is None else self.origin.times_narrower

    def takes(self, num_bytes: int) -> bool:
        """Returns whether activations of num_bytes bytes can be encoded with this recipe."""
        return self.origin is None or self.origin.takes(num_bytes)

    def room(self, num_bytes: int) -> int:
        """Returns the size in bytes of the overflow that num_bytes bytes are expected to need when they are encoded. If
        there is an origin, num_bytes is the size of the narrower elements."""
        return min(_most_overflow(num_bytes), int(self._room_share * num_bytes) + _SPARE_BYTES)

    def expected_bytes(self, num_bytes: int) -> int:
        """Returns the expected size in bytes of num_bytes bytes of activations after they are encoded in pieces."""
        parts = [end - start for start, end in pieces(num_bytes // self.times_narrower)]
        return sum(index_bytes(part) + self.room(part) for part in parts)

    @property
    def coded_share(self) -> float:
        """The expected size of the coded rows as a fraction of the activations' size."""
        return self.needed_share / self.times_narrower

    def begin(self) -> None:
        """Updates the room of pieces. Must be called before a region is encoded. The new room is for the largest share
        that a piece has used since the last call, plus a margin that grows with the latest changes of this share."""
        needed, self._noted_share = self._noted_share, 0.0
        if needed == 0:
            return
        if self._has_needed:
            self._change = max(abs(needed / self.needed_share - 1), self._change / 2)
        self.needed_share, self._has_needed = needed, True
        margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, _CHANGES * self._change))
        if not needed * (1 + margin / 2) <= self._room_share <= needed * (1 + 2 * margin):
            self._room_share = needed * (1 + margin)

    def note(self, num_bytes: int, used_bytes: int) -> None:
        """Records the size in bytes of the overflow that a piece of num_bytes bytes used."""
        self._noted_share = max(self._noted_share, used_bytes / num_bytes)


def pieces(num_bytes: int) -> list[tuple[int, int]]:
    """Cuts num_bytes bytes into pieces. Returns a list with (start, end) of each piece. All pieces except the last
    consist of whole rows."""
    return [(start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES)]


def _num_rows(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


def _most_overflow(num_bytes: int) -> int:
    """Returns the size in bytes of an overflow that is large enough for any content, which is the size of all rows if
    they are stored raw."""
    return _num_rows(num_bytes) * ROW_BYTES


@functools.lru_cache(1024)
def index_bytes(num_bytes: int) -> int:
    """Returns the offset in bytes of a piece's overflow, which is the size of what precedes it: the head, and a base
    and a length for each row."""
    return forms.packed(_num_rows(num_bytes)).overflow.start


@functools.lru_cache(1024)
def memory_bytes(num_bytes: int) -> int:
    """Returns the size in bytes of memory that is enough to encode num_bytes bytes of any content."""
    return index_bytes(num_bytes) + _most_overflow(num_bytes)


def encode(data: torch.Tensor, recipe: ActivationRecipe, memory: torch.Tensor, max_sms: int = 0) -> None:
    """Encodes data, uint8 [num_bytes], into memory, uint8 [at least memory_bytes(num_bytes)], on the current stream.
    max_sms: the largest number of multiprocessors to use; 0: all."""
    words, start = recipe.codebook.words(data.device), index_bytes(data.numel())
    torch.ops.ibp.encode_piece.default(data, words, recipe.codec, start, max_sms, memory)


def decode(
    memory: torch.Tensor, recipe: ActivationRecipe, out: torch.Tensor, fault: torch.Tensor, max_sms: int = 0
) -> None:
    """Decodes a piece into out, uint8 [num_bytes], on the current stream. memory: at least the used bytes of the memory
    that `encode` wrote. fault: int64 [4] on the device, which receives faults."""
    words, start = recipe.codebook.words(memory.device), index_bytes(out.numel())
    torch.ops.ibp.decode_piece.default(memory, words, recipe.codec, start, max_sms, out, fault)


def learn(data: torch.Tensor, view: SpanView) -> ActivationRecipe | None:
    """Learns a recipe from a sample of data, uint8 [num_bytes], and returns it, or None if data would not become
    smaller. view: the layout of the tensor in data.
    """
    if (origin := IndexOrigin.of(data, view)) is not None:
        rest, _ = origin.narrow(data)
        if (recipe := _learned(rest, origin.dtype, origin)) is not None:
            return recipe
    return _learned(data, view.dtype, None)


def _learned(data: torch.Tensor, dtype: torch.dtype, origin: IndexOrigin | None) -> ActivationRecipe | None:
    """Returns a recipe for data, uint8 [num_bytes], whose elements have the dtype, or None if data would not become
    smaller."""
    rows = geometry.sample(data, ROW_BYTES, _SAMPLE_BYTES // ROW_BYTES)
    if not rows.numel():
        return None
    codebook = learned_from(rows, ROW_BYTES, dtype)
    if codebook is None:
        return None
    share = surveyed(rows, codebook).spilled(0)[1] / rows.numel()  # all sectors of the rows
    return ActivationRecipe(codebook, share, origin) if share < 1 else None
