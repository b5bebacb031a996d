"""Protocols for objects that have rows. `index_select`, `decompress` and `embedding_bag` accept any object that
implements the required protocol."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from .table import Handle, Table

Device = torch.device | str | int
Ids = torch.Tensor | Sequence[int] | np.ndarray


@runtime_checkable
class Rows(Protocol):
    """A protocol of objects whose items are fetched by their ids: tables, caches of rows, sharded tables."""

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
    """A protocol of objects that are decoded as a whole: tables, caches of rows, tensors of general codecs."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def decompress(self, *, device: Device | None = None, out: torch.Tensor | None = None) -> torch.Tensor: ...


@runtime_checkable
class CachedRows(Rows, Protocol):
    """A protocol of tables some of whose rows are cached in memory nearer to the device that requests them.

    Attributes:
        view: the table from which rows that are not cached are read.
    """

    @property
    def view(self) -> Table: ...

    def flush(self) -> None:
        """Writes changed rows of the cache back to the table."""

    def serves(self, device: torch.device) -> bool:
        """Returns whether the cache can look up and decode rows on a device."""

    def found(
        self, ids: torch.Tensor
    ) -> AbstractContextManager[tuple[Handle, torch.Tensor | None, Sequence[torch.Tensor]]]:
        """Returns a context that looks up the rows of ids in the cache. Inside the `with` block, operations on the
        current stream may read these rows.

        The context yields (handle of the table, tensor whose entry for each row says where the row is held, slabs of
        memory that hold cached rows).
        """
