"""Code that the feature stores share. It makes tables from users' data, and fetches rows of tables to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import ibp

TABLES = (ibp.CompressedTensor, ibp.RowCache)  # classes from which rows are fetched
Table = ibp.CompressedTensor | ibp.RowCache


def table_of(value: Any, what: str, options: dict[str, Any]) -> Table:
    """Returns `value` itself if it is a table or a cache of a table. If it is a tensor or an array, compresses it with
    the given options of `ibp.compress`, and returns the table. what: the name of the value in error messages.

    Raises:
        TypeError: value is not a tensor, an array, a table or a cache, or has a dtype that tables cannot hold.
        ValueError: options are given with a table, or are wrong.
    """
    if isinstance(value, TABLES):
        if options:
            raise ValueError(f"{what} is a table already, but options are given: {', '.join(options)}")
        return value
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{what} is a {type(value).__name__}; wanted a torch.Tensor, a numpy array, an ibp.CompressedTensor or an "
            "ibp.RowCache"
        )
    return ibp.compress(value, **options)


def check_rows(table: Table, num_rows: int, what: str, of: str) -> None:
    """Raises ValueError unless the table has num_rows rows. what: the name of the table in error messages. of: "nodes"
    or "edges"."""
    if table.dim() == 0 or len(table) != num_rows:
        raise ValueError(f"{what} has shape {list(table.shape)}; wanted {num_rows:,} rows, one for each of the {of}")


def fetch(table: Table, ids: torch.Tensor, device: torch.device | None, what: str) -> torch.Tensor:
    """Returns the rows of a table at `ids`, on `device`, or on the device of `ids` if `device` is None. what: the name
    of the table in error messages.

    Raises:
        IndexError: an id on the CPU is out of range (for ids on a GPU see `ibp.index_select`).
        RuntimeError: this is a worker process of a data loader, and a GPU would have to fetch the rows.
    """
    refuse_cuda_in_worker(table, device, what)
    try:
        return table.index_select(ids, device=device)
    except IndexError as error:
        raise IndexError(f"{what}: {error}") from None


def refuse_cuda_in_worker(table: Table, device: torch.device | None, what: str) -> None:
    """Raises RuntimeError if this is a worker process of a data loader and a GPU would be needed. A forked process
    cannot use CUDA if its parent has used it, and rows on a GPU cannot be queued to the main process."""
    needs_cuda = table.is_cuda or (device is not None and device.type == "cuda")
    if needs_cuda and torch.utils.data.get_worker_info() is not None:
        where = device if device is not None else table.device
        raise RuntimeError(
            f"{what} cannot be fetched to {where} in a worker process of a data loader: fetch it in the main process "
            "(PyG: filter_per_worker=False; DGL: prefetch_node_feats of the sampler), or to the CPU from a table there"
        )
