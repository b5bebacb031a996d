"""Narrows the int64 indices that max pooling saves. An index is the position of the maximum of a small window, in the
image of a channel. The first position of the window is the same for all images and channels. The difference between the
index and this position fits in one or two bytes, and takes 2 or 3 bits when it is encoded."""

from __future__ import annotations

import torch

from .spans import SpanView

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
