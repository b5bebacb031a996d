"""`PlacedReceiver`: receives weights for an engine that keeps them merged, sharded or compressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .._tables.compressed_tensor import CompressedTensor
from ._applying import Base
from ._on_pieces import Memory
from ._receiving import Receiver, bases_of_rows, rows_of
from ._regions import Region, TensorRows


class ShardPlace(NamedTuple):
    """Says where a process keeps a part of a checkpoint's tensor. The part is a box: a range of elements in each
    dimension.

    Example:
        >>> merged = torch.zeros(8, 4)
        >>> place = ibp.deltas.ShardPlace(merged, first_row=4, box=((0, 4), (0, 4)))  # the lower half of merged
        >>> place.memory[place.first_row :].shape
        torch.Size([4, 4])

    Attributes:
        memory: the tensor or table that holds the part. Its rows have the same shape as the part's rows. A tensor
            without dimensions counts as one row.
        first_row: the index of the row of `memory` at which the part begins.
        box: for each dimension of the checkpoint's tensor, (index of the part's first element, number of elements).
    """

    memory: torch.Tensor | CompressedTensor
    first_row: int
    box: tuple[tuple[int, int], ...]

    def _within(self, rows: TensorRows) -> tuple[Memory, tuple[slice, ...]] | None:
        """Returns (the memory in this place that holds a part of `rows`; a slice for each dimension of `rows`, which
        together select this part), or None if this place holds no part of `rows`."""
        if not rows.shape:
            return rows_of(self.memory, 0, 1), ()
        (start, length), *others = self.box
        first, last = max(start, rows.start), min(start + length, rows.start + rows.shape[0])
        if first >= last:
            return None
        memory = rows_of(self.memory, self.first_row + first - start, self.first_row + last - start)
        return memory, (slice(first - rows.start, last - rows.start), *(slice(at, at + size) for at, size in others))


class PlacedReceiver(Receiver, ABC):
    """A `Receiver` for an engine whose tensors differ from those of the checkpoint: the engine may merge several of the
    checkpoint's tensors, keep only parts of them, or keep them as tables. A subclass implements `places_of`, which
    returns where the engine keeps each tensor.

    Example:
        >>> merged = torch.zeros(8, 4)
        >>> class MergedReceiver(ibp.deltas.PlacedReceiver):
        ...     def places_of(self, tensors):
        ...         first_rows, box = {"gate": 0, "up": 4}, ((0, 4), (0, 4))
        ...         return {name: [ibp.deltas.ShardPlace(merged, first_rows[name], box)] for name in tensors}
        >>> sender, receiver = ibp.deltas.Sender(), MergedReceiver()
        >>> weights = {"gate": torch.ones(4, 4), "up": torch.full((4, 4), 2.0)}
        >>> [receiver.apply(message) for message in sender.push(weights)]
        [True]
        >>> merged[:, 0]
        tensor([1., 1., 1., 1., 2., 2., 2., 2.])
    """

    def __init__(self) -> None:
        super().__init__({})
        self._places: dict[str, Sequence[ShardPlace]] = {}

    @abstractmethod
    def places_of(self, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Mapping[str, Sequence[ShardPlace]]:
        """Returns the places of a checkpoint's tensors in this process. It is called only once for each name.

        Args:
            tensors: (shape, dtype) of each tensor, by name.

        Returns:
            For each name, the places of the tensor's parts, or an empty sequence if this process keeps no part of the
            tensor. The boxes of a tensor's places must be equal or must not overlap.
        """

    def bases_of(self, regions: Sequence[Region]) -> list[list[Base]]:
        """Returns, for each region of a message, the memory that holds its rows. `Receiver.apply` calls this method."""
        all_rows = [region.tensor_rows() for region in regions]
        asked = {
            name: (rows.full_shape, region.dtype)
            for region, each in zip(regions, all_rows)
            for rows in each
            for name in rows.names
            if name not in self._places
        }
        if asked:
            self._places.update(self.places_of(asked))
        return [
            bases_of_rows([(rows, self._parts_here(rows)) for rows in each], region.dtype)
            for region, each in zip(regions, all_rows)
        ]

    def _parts_here(self, rows: TensorRows) -> list[tuple[Memory, tuple[slice, ...]]]:
        """Returns the results of `ShardPlace._within` for the places that hold a part of `rows`."""
        places = [place._within(rows) for name in rows.names for place in self._places[name]]
        return [place for place in places if place is not None]
