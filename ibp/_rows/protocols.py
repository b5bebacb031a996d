"""Protocols of objects that have rows. `index_select`, `decompress` and `embedding_bag` take any object that follows
them."""

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
    """Items that are fetched by their ids: tables, caches of rows, sharded tables."""

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
    """A tensor that can be decoded as a whole: tables, caches of rows, tensors of general codecs."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def decompress(self, *, device: Device | None = None, out: torch.Tensor | None = None) -> torch.Tensor: ...


@runtime_checkable
class CachedRows(Rows, Protocol):
    """A protocol of tables whose rows may be cached in memory nearer to the device that requests them.

    Attributes:
        view: the table, from which the other rows are read.
    """

    @property
    def view(self) -> Table: ...

    def flush(self) -> None:
        """Writes changed rows back to the table."""

    def serves(self, device: torch.device) -> bool:
        """Returns whether rows are looked up and decoded on a device."""

    def found(
        self, ids: torch.Tensor
    ) -> AbstractContextManager[tuple[Handle, torch.Tensor | None, Sequence[torch.Tensor]]]:
        """Looks up the rows of ids, for operations on the current stream that read them inside the `with` block.

        Yields (handle of the table, an entry for each row that says where it is held, slabs that hold rows).
        """
