"""Keeps a feature of DGL's GraphBolt in a compressed table.

    features = gb.BasicFeatureStore({("node", None, "feat"): ibp.integrations.graphbolt.Feature(x)})
    datapipe = datapipe.fetch_feature(features, node_feature_keys=["feat"])

This module was written from GraphBolt's Python source (the class Feature of DGL 2.1.0, and the additions of 2.4.0), and
is tested with a stand-in for that class. It is not tested with GraphBolt's binaries: they need torch 2.4 or older, and
ibp needs torch 2.10 or newer, so no released build of DGL can use this module. It is meant for your own builds of DGL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from dgl import graphbolt as gb  # type: ignore

import ibp

from ..adapters import Closing
from .shared import Table, fetch, table_of

__all__ = ["Feature"]


class Feature(gb.Feature, Closing):
    """A feature whose rows are fetched from a table. If the ids are on a GPU, that GPU fetches the rows.

    Args:
        x: a tensor or array [N, ...], which is compressed; or a table or an `ibp.RowCache`, which is used unchanged.
        metadata: the dict that `metadata()` returns. None: an empty dict.
        options: options of `ibp.compress`.

    Raises:
        TypeError: x is not a tensor, array, table or cache.
        ValueError: x has no dimensions, or options are wrong.
    """

    def __init__(self, x: Any, metadata: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self._table: Table | None = table_of(x, "x", options)
        if self._table.dim() == 0:
            raise ValueError("x has no dimensions; wanted a row for each node or edge")
        self._metadata, self._options = metadata or {}, options

    @property
    def table(self) -> Table:
        """The table; if x is an `ibp.RowCache`, the cache. Raises RuntimeError after close()."""
        if self._table is None:
            raise RuntimeError("the table of this Feature was freed by close()")
        return self._table

    def close(self) -> None:
        """Drops the table. Its memory is freed when nothing else holds it."""
        self._table = None

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x[ids] on the device of ids. If ids is None, returns all of x, on the device of the table.

        Raises:
            IndexError: an id is out of range (for ids on a GPU see `ibp.index_select`).
        """
        return self.table.decompress() if ids is None else fetch(self.table, ids, None, "the feature")

    def read_async(self, ids: torch.Tensor) -> Iterator[ibp.Prefetch | torch.futures.Future[torch.Tensor]]:
        """Yields one object, whose `wait()` returns the rows. If ids are on a GPU, the rows are fetched on a stream
        other than the current stream."""
        if ids.is_cuda:
            yield self.table.prefetch(ids)
        else:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(self.read(ids))
            yield done

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """Returns 1, because `read_async` yields once."""
        return 1

    def size(self) -> torch.Size:
        """Returns the shape of a row."""
        return self.table.shape[1:]

    def count(self) -> int:
        """Returns the number of rows."""
        return len(self.table)

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Replaces all of x with another tensor of the same shape and dtype, which is compressed.

        Raises:
            ValueError: ids are given (single rows of a table cannot be replaced), value has another shape or dtype, or
                x is an `ibp.RowCache`.
        """
        if ids is not None:
            raise ValueError("ids are given; wanted None: rows of tables are fixed")
        held = self.table
        if isinstance(held, ibp.RowCache):
            raise ValueError("the feature is read through an ibp.RowCache, which holds its rows: make another Feature")
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (held.shape, held.dtype):
            got = f"{list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"value is {got}; wanted {list(held.shape)} of {held.dtype}")
        self._table = ibp.compress(value, **self._options)

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata that was given."""
        return self._metadata

    def pin_memory_(self) -> Feature:
        """Pins the table, so that GPUs can read its rows directly; see `CompressedTensor.pin_memory`."""
        self.table.pin_memory()
        return self

    def is_pinned(self) -> bool:
        """Returns whether the table is in pinned memory."""
        return self.table.is_pinned()

    def __repr__(self) -> str:
        return f"Feature({self._table!r})"
