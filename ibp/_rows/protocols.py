"""Protocols of objects that have rows. `index_select`, `decompress` and `embedding_bag` take any such object."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from .handle import Handle
from .table import Table

Device = torch.device | str | int
Ids = torch.Tensor | Sequence[int] | np.ndarray


@runtime_checkable
class Rows(Protocol):
    """An object whose items are fetched by their numbers: a table, a cache of rows, a sharded table."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def index_select(
        self,
        ids: Ids,
        *,
        device: Device | None = None,
        out: torch.Tensor | None = None,
        check: bool = False,
        max_sms: int | None = None,
    ) -> torch.Tensor: ...


@runtime_checkable
class Decodable(Protocol):
    """An object that is decoded as a whole: a table, a cache of rows, a tensor of a general codec."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def decompress(self, *, device: Device | None = None, out: torch.Tensor | None = None) -> torch.Tensor: ...


@runtime_checkable
class CachedRows(Rows, Protocol):
    """The rows of a table, some of which are held nearer to the device that asks for them. view: the table, which has
    all rows."""

    @property
    def view(self) -> Table: ...

    def flush(self) -> None:
        """Writes changed rows to the table."""

    def serves(self, device: torch.device) -> bool:
        """Returns whether rows can be looked up and decoded on a device."""

    def found(
        self, ids: torch.Tensor
    ) -> AbstractContextManager[tuple[Handle, torch.Tensor | None, Sequence[torch.Tensor]]]:
        """Looks up the rows of ids, for operations that read them on the current stream within the block.

        Yields (the handle of the table, an entry for each row, slabs that hold rows).
        """
