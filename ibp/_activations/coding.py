"""Finds the bytes of saved tensors, and encodes and decodes them.

Bytes that several saved tensors share are encoded only once, so the first part finds the span of memory that a saved
tensor occupies.

The second part learns a recipe for activations of one kind, encodes activations into packed pieces of coded rows
(`_rows.forms`), and decodes them. A packed piece has a head, an index, and then the overflow, in which all coded rows
lie one after the other. The host does not know how many bytes of a piece are in use; a recipe predicts the number, and
only so many bytes are copied. A training step encodes hundreds of tensors. To keep the host's work small, a single
operation encodes a piece, and a single operation decodes it.

The third part narrows the int64 indices that max pooling saves. An index is the position of the maximum of a small
window, in the image of a channel. The first position of the window is the same for all images and channels. The
difference between the index and this position fits in one or two bytes, and takes 2 or 3 bits when it is encoded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._rows import forms, geometry
from .._rows.codebook import AnyCodebook, surveyed
from .._rows.learning import learned_from

# A tensor with gaps is saved as its whole storage if the storage is at most this many times as large as the tensor.
_MOST_OF_A_STORAGE = 4


# ---- spans ---------------------------------------------------------------------------------------------------------


class ByteSpan(NamedTuple):
    """A range of bytes in a storage. These bytes are compressed together.

    Attributes:
        storage: the address of torch's C++ object for the storage.
        start: offset of the range in the storage, in bytes.
        num_bytes: size of the range in bytes.
        version: the saved tensor's version, which torch increases whenever the tensor is changed in place.
    """

    storage: int
    start: int
    num_bytes: int
    version: int


class SpanView(NamedTuple):
    """Describes how a tensor lies in its span. offset: the position of its first element in the span, in elements."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, as a view of `data`. data: the bytes of its span, uint8 [num_bytes]."""
        rest = data.numel() % self.dtype.itemsize
        return (data[:-rest] if rest else data).view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class UnchangedTensor(NamedTuple):
    """A tensor that must not be changed any more, and its version at the time of saving."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, x: torch.Tensor) -> UnchangedTensor:
        return cls(x.detach(), x._version)  # x itself would keep its autograd graph alive

    @property
    def is_changed(self) -> bool:
        return self.tensor._version != self.version

    def get(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError, with autograd's message, if it has been changed since it was
        saved."""
        if self.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


def is_plain(x: torch.Tensor) -> bool:
    """Returns whether a tensor is an ordinary strided tensor of a dtype that tables can hold. Tensor subclasses,
    tensors inside a transform of torch.func, and conjugate or negative views are not ordinary."""
    return (
        type(x) is torch.Tensor
        and x.layout == torch.strided
        and x.dtype in geometry.DTYPES
        and not x.is_conj()
        and not x.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_of_parameter(x: torch.Tensor) -> bool:
    """Returns whether a tensor is a parameter, a view of a parameter, or a parameter that was cast to another dtype,
    for example by autocast."""
    base = x if x._base is None else x._base
    if base.requires_grad and base.is_leaf:
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return any(of is not None and of.name().endswith("AccumulateGrad") for of, _ in made_by.next_functions)


def span_of(x: torch.Tensor) -> tuple[ByteSpan, SpanView] | None:
    """Returns (the span of a plain tensor, the tensor's layout in the span). If the tensor is dense, the span consists
    of the tensor's bytes. Otherwise the span is the tensor's complete storage. Returns None if that storage is more
    than 4 times as large as the tensor."""
    storage, size = x.untyped_storage(), x.dtype.itemsize
    num_bytes, start, offset = int(x.numel() * size), int(x.storage_offset() * size), 0
    if not (x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)):
        whole = int(storage.nbytes())
        if whole > _MOST_OF_A_STORAGE * num_bytes:
            return None
        start, offset, num_bytes = 0, int(x.storage_offset()), whole
    return ByteSpan(storage._cdata, start, num_bytes, x._version), SpanView(x.dtype, x.shape, x.stride(), offset)


def bytes_of(x: torch.Tensor, span: ByteSpan) -> torch.Tensor:
    """Returns the bytes of a span as a view of x's storage, uint8 [num_bytes]. span: as `span_of(x)` returns it."""
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage(), span.start, (span.num_bytes,), (1,))


# ---- recipes and pieces --------------------------------------------------------------------------------------------

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


# ---- indices of pooling --------------------------------------------------------------------------------------------

# `IndexOrigin.of` needs at least this many channels, counted over all images. It takes the smallest index found in a
# window as the window's first position. With fewer channels, perhaps no channel has its maximum there, and the smallest
# index would be too large.
_LEAST_CHANNELS = 16
_NARROW = (torch.uint8, torch.int16)  # narrowest first
_ITEM = 8  # size in bytes of an int64 element


class IndexOrigin:
    """The origins that are subtracted from int64 elements: one value for each element of an image. All images share the
    same origins.

    Args:
        places: the origins: int64 [number of elements of an image with all its channels], in the order of memory. No
            origin is negative.
        dtype: dtype of the differences.
    """

    def __init__(self, places: torch.Tensor, dtype: torch.dtype) -> None:
        self._places, self.dtype = places, dtype
        self._last = places + torch.iinfo(dtype).max  # the largest elements whose differences fit in the dtype

    @classmethod
    def of(cls, data: torch.Tensor, view: SpanView) -> IndexOrigin | None:
        """Returns an origin whose value at each position is the minimum over all images and channels. The tensor must
        be dense int64 [images, channels, one or more dimensions of positions], one image after the other in memory.
        Returns None for other tensors. Also returns None if the images together have fewer than 16 channels, if an
        element is negative, or if a difference does not fit in int16. Waits for the device.

        Args:
            data: uint8 [num_bytes], the tensor's bytes.
            view: describes the tensor in these bytes.
        """
        if view.dtype != torch.int64 or len(view.shape) < 3 or _ITEM * view.shape.numel() != data.numel():
            return None
        x = view.of(data)
        if x.stride(0) * x.shape[0] != x.numel() or x.shape[0] * x.shape[1] < _LEAST_CHANNELS:
            return None
        places = torch.empty_strided(x.shape[1:], x.stride()[1:], dtype=x.dtype, device=x.device)
        places.copy_(x.amin((0, 1)).expand(x.shape[1:]))
        flat = places.as_strided((places.numel(),), (1,))
        if int(flat.min()) < 0:
            return None
        most = int((data.view(torch.int64).view(-1, len(flat)).amax(0) - flat).max())
        return next((cls(flat, dtype) for dtype in _NARROW if most <= torch.iinfo(dtype).max), None)

    @property
    def times_narrower(self) -> int:
        return _ITEM // self.dtype.itemsize

    def takes(self, num_bytes: int) -> bool:
        """Returns whether num_bytes is a whole number of images."""
        return num_bytes % (_ITEM * len(self._places)) == 0

    def narrow(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Subtracts the origins from elements. data: uint8 [num_bytes] of whole images. Returns (the differences as
        uint8 [bytes]; a bool tensor [], which is True if a difference does not fit in the dtype).
        """
        elements = data.view(torch.int64).view(-1, len(self._places))
        out = torch.empty(elements.shape, dtype=self.dtype, device=data.device)
        torch.sub(elements, self._places, out=out)
        least, greatest = torch.aminmax(elements, dim=0)
        misfits = ((least < self._places) | (greatest > self._last)).any()
        return out.view(-1).view(torch.uint8), misfits

    def widen(self, data: torch.Tensor) -> torch.Tensor:
        """Adds the origins to differences. data: the differences, as `narrow` returns them. Returns the elements as
        uint8 [num_bytes]."""
        rest = data.view(self.dtype).view(-1, len(self._places))
        out = torch.empty(rest.shape, dtype=torch.int64, device=data.device)
        return torch.add(self._places, rest, out=out).view(-1).view(torch.uint8)
