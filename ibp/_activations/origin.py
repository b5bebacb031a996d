"""What indices of max pooling have in common. Each is a position in its channel's image, one of the few of its window:
counted from the first of these, which is the same for all images and channels, it takes 2 or 3 bits of its 64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .spans import View

_LEAST_CHANNELS = 16  # of all images: in fewer, the least element may be another one of its window
_ITEM = 8  # bytes of an element


class Origin:
    """Where int64 elements are counted from, by their place in an image. Differences wrap around, so that any elements
    come back, also those that are no indices.

    Args:
        places: int64 [elements of an image], as they lie in memory.
    """

    def __init__(self, places: torch.Tensor) -> None:
        self._places = places

    @classmethod
    def of(cls, data: torch.Tensor, view: View) -> Origin | None:
        """The least of the elements at each place, over images and channels: of a dense int64 tensor [images,
        channels, places of one or more dimensions], images one after the other in memory. None for other tensors.

        Args:
            data: uint8 [num_bytes], the tensor's bytes.
            view: how the tensor lies in them.
        """
        if view.dtype != torch.int64 or len(view.shape) < 3 or _ITEM * view.shape.numel() != data.numel():
            return None
        x = view.of(data)
        if x.stride(0) * x.shape[0] != x.numel() or x.shape[0] * x.shape[1] < _LEAST_CHANNELS:
            return None
        places = torch.empty_strided(x.shape[1:], x.stride()[1:], dtype=x.dtype, device=x.device)
        places.copy_(x.amin((0, 1)).expand(x.shape[1:]))
        return cls(places.as_strided((places.numel(),), (1,)))

    def differences(self, data: torch.Tensor, start: int) -> torch.Tensor:
        """Elements, counted from here, uint8 [num_bytes]; bytes behind the last whole one as they are.

        Args:
            data: uint8 [num_bytes].
            start: bytes of the tensor before them, whole elements.
        """
        out = torch.empty_like(data)
        if rest := data.numel() % _ITEM:
            out[-rest:] = data[-rest:]
        for part, places in self._parts(data, start):
            torch.sub(_elements(data, part, places), places, out=_elements(out, part, places))
        return out

    def add_to(self, data: torch.Tensor, start: int) -> None:
        """Makes differences what they were made from."""
        for part, places in self._parts(data, start):
            _elements(data, part, places).add_(places)

    def differences_of_rows(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """As `differences`, of rows that lie anywhere: uint8 [rows, row bytes], and their numbers."""
        elements = rows.view(torch.int64)
        count = elements.shape[1]
        places = numbers[:, None] * count + torch.arange(count, device=rows.device)
        return (elements - self._places[places % len(self._places)]).view(torch.uint8)

    def _parts(self, data: torch.Tensor, start: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Bytes of whole images, and of parts of one before and after them, with the places that they have."""
        period, place, done = len(self._places), start // _ITEM, 0
        count = data.numel() // _ITEM
        while done < count:
            first = (place + done) % period
            rest = count - done
            num = rest // period * period if first == 0 and rest >= period else min(rest, period - first)
            yield slice(_ITEM * done, _ITEM * (done + num)), self._places[first : first + num]
            done += num


def _elements(data: torch.Tensor, part: slice, places: torch.Tensor) -> torch.Tensor:
    """Bytes as int64 [images, places]."""
    return data[part].view(torch.int64).view(-1, len(places))
