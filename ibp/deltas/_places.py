"""`PlacedReceiver`: receives weights for engines that keep them merged, sharded or coded."""

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
    """The place where a process keeps a part of a checkpoint's tensor.

    Example:
        >>> merged = torch.zeros(8, 4)
        >>> place = ibp.deltas.ShardPlace(merged, first_row=4, box=((0, 4), (0, 4)))    # its lower half
        >>> place.memory[place.first_row :].shape
        torch.Size([4, 4])

    Attributes:
        memory: a table, or a tensor whose rows are as long as the part's rows. A tensor without dimensions is one row.
        first_row: the first row in the memory.
        box: for each dimension of the checkpoint's tensor, the first element of the part, and how many it has.
    """

    memory: torch.Tensor | CompressedTensor
    first_row: int
    box: tuple[tuple[int, int], ...]

    def _within(self, rows: TensorRows) -> tuple[Memory, tuple[slice, ...]] | None:
        """Returns the memory here that holds a part of a tensor's rows, and the place of that part in the rows, or
        None if no part is here."""
        if not rows.shape:
            return rows_of(self.memory, 0, 1), ()
        (start, length), *others = self.box
        first, last = max(start, rows.start), min(start + length, rows.start + rows.shape[0])
        if first >= last:
            return None
        memory = rows_of(self.memory, self.first_row + first - start, self.first_row + last - start)
        return memory, (slice(first - rows.start, last - rows.start), *(slice(at, at + size) for at, size in others))


class PlacedReceiver(Receiver, ABC):
    """A `Receiver` of an engine that keeps a checkpoint's tensors in another way than the sender names them: several in
    one tensor, parts of them, or as tables. A subclass tells where, by `places_of`.

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
        """Returns the places of tensors of a checkpoint in this process. It is called once for each name.

        Args:
            tensors: shape and dtype of each tensor, by name.

        Returns:
            Places by name. A tensor of which this process keeps nothing has none. Places of a tensor do not overlap,
            unless they are equal.
        """

    def bases_of(self, regions: Sequence[Region]) -> list[list[Base]]:
        """Returns the memory of rows that a message names. `Receiver.apply` calls it."""
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
        places = [place._within(rows) for name in rows.names for place in self._places[name]]
        return [place for place in places if place is not None]
