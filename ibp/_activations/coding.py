"""Codes activations into one piece of memory, and decodes them: a packed piece of coded rows (`_layout.forms`). Its
first bytes, up to the last one in use, are all that has to be copied. One operation codes a piece, and one decodes
it, because a step codes hundreds of tensors."""

from __future__ import annotations

import functools

import torch

from .._layout import forms, geometry
from .._schemes import AnyCodebook, surveyed
from .._schemes.learning import learned_from
from .origin import IndexOrigin
from .spans import SpanView

ROW_BYTES = 4096
PIECE_BYTES = 64 << 20  # bytes; about a millisecond of the link: the first piece is on its way while the next is coded
_SAMPLE_BYTES = 1 << 20
_FIRST_MARGIN = 1 / 32  # added to what a sample needed
_LEAST_MARGIN, _MOST_MARGIN = 1 / 256, 1 / 16  # added to what was needed
_CHANGES = 4  # a margin has room for so many times the last change
_SPARE_BYTES = 4096


class ActivationRecipe:
    """How activations of one kind are coded, and how large they become.

    Args:
        codebook: of rows of ROW_BYTES bytes.
        share: coded bytes of a sample, as a share of its bytes.
        origin: where elements are counted from; the differences are coded. None: elements are coded as they are.
    """

    def __init__(self, codebook: AnyCodebook, share: float, origin: IndexOrigin | None = None) -> None:
        self.codebook, self.needed_share = codebook, share
        self.codec, self.origin = codebook.codec, origin
        self._room_share, self._noted_share = share * (1 + _FIRST_MARGIN), 0.0
        # how much the needed share changed, relative to it; whether a share was noted yet
        self._change, self._has_needed = 0.0, False

    @property
    def times_narrower(self) -> int:
        """How many times narrower the coded elements are."""
        return 1 if self.origin is None else self.origin.times_narrower

    def takes(self, num_bytes: int) -> bool:
        """Returns whether activations of num_bytes can be coded."""
        return self.origin is None or self.origin.takes(num_bytes)

    def room(self, num_bytes: int) -> int:
        """Returns the bytes of overflow that num_bytes are expected to fit; if there is an origin, num_bytes are those
        of the narrower elements."""
        return min(_most_overflow(num_bytes), int(self._room_share * num_bytes) + _SPARE_BYTES)

    def expected_bytes(self, num_bytes: int) -> int:
        """Returns how much memory activations of num_bytes are expected to take when they are coded in pieces."""
        parts = [end - start for start, end in pieces(num_bytes // self.times_narrower)]
        return sum(index_bytes(part) + self.room(part) for part in parts)

    @property
    def coded_share(self) -> float:
        """The coded bytes as a share of the activations' bytes."""
        return self.needed_share / self.times_narrower

    def begin(self) -> None:
        """Says that activations are about to be coded. Their room follows the piece that needed most since the last
        call, with a margin for changes like the last ones."""
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
        """Notes the overflow that a piece of num_bytes used."""
        self._noted_share = max(self._noted_share, used_bytes / num_bytes)


def pieces(num_bytes: int) -> list[tuple[int, int]]:
    """Returns the start and the end of each piece of num_bytes. All pieces except the last have whole rows."""
    return [(start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES)]


def _num_rows(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


def _most_overflow(num_bytes: int) -> int:
    """Returns the number of bytes of overflow that are enough for any rows: the size of all rows if they are kept
    raw."""
    return _num_rows(num_bytes) * ROW_BYTES


@functools.lru_cache(1024)
def index_bytes(num_bytes: int) -> int:
    """Returns the bytes before overflow: the head, a base and a length for each row."""
    return forms.packed(_num_rows(num_bytes)).overflow.start


@functools.lru_cache(1024)
def memory_bytes(num_bytes: int) -> int:
    """Returns the bytes of memory that are enough for num_bytes of any content."""
    return index_bytes(num_bytes) + _most_overflow(num_bytes)


def encode(data: torch.Tensor, recipe: ActivationRecipe, memory: torch.Tensor, max_sms: int = 0) -> None:
    """Codes data, uint8 [num_bytes], on the current stream. max_sms: as in operations; 0: all."""
    words, start = recipe.codebook.words(data.device), index_bytes(data.numel())
    torch.ops.ibp.encode_piece.default(data, words, recipe.codec, start, max_sms, memory)


def decode(
    memory: torch.Tensor, recipe: ActivationRecipe, out: torch.Tensor, fault: torch.Tensor, max_sms: int = 0
) -> None:
    """Decodes into out, uint8 [num_bytes], on the current stream. memory: the used bytes of memory that `encode` wrote,
    or more of it. fault: int64 [4] on the device, where damage is noted."""
    words, start = recipe.codebook.words(memory.device), index_bytes(out.numel())
    torch.ops.ibp.decode_piece.default(memory, words, recipe.codec, start, max_sms, out, fault)


def learn(data: torch.Tensor, view: SpanView) -> ActivationRecipe | None:
    """Returns a recipe that is learned from a sample of data, uint8 [num_bytes]. None: data would not get smaller.

    view: how the tensor lies in data.
    """
    if (origin := IndexOrigin.of(data, view)) is not None:
        rest, _ = origin.narrow(data)
        if (recipe := _learned(rest, origin.dtype, origin)) is not None:
            return recipe
    return _learned(data, view.dtype, None)


def _learned(data: torch.Tensor, dtype: torch.dtype, origin: IndexOrigin | None) -> ActivationRecipe | None:
    """Returns a recipe for data, uint8 [num_bytes], elements of dtype. None: data would not get smaller."""
    rows = geometry.sample(data, ROW_BYTES, _SAMPLE_BYTES // ROW_BYTES)
    if not rows.numel():
        return None
    codebook = learned_from(rows, ROW_BYTES, dtype)
    if codebook is None:
        return None
    share = surveyed(rows, codebook).spilled(0)[1] / rows.numel()  # each row takes whole sectors
    return ActivationRecipe(codebook, share, origin) if share < 1 else None
