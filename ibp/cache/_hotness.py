"""Counts accesses of items, and sorts items by their hotness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from .._common.arguments import whole_number
from .._fetch.ids import check_range, checked_ids
from .._machine import memory
from .._rows.protocols import Ids

Hotness = torch.Tensor | np.ndarray | Sequence[int]


def count_accesses(
    batches: Iterable[Ids], num_items: int, *, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """Counts how often batches of ids contain each item. `ibp.RowCache` takes the result as hotness. Legion, too,
    counts the accesses of a first epoch (the paper's sections 5 and 6.2).

    Example:
        >>> ibp.cache.count_accesses([torch.tensor([0, 2, 2]), torch.tensor([2, 4])], num_items=5)
        tensor([1, 0, 3, 0, 1])

    Args:
        batches: the ids of each batch, integers of any shape, on the CPU or a GPU.
        num_items: number of items. Ids are in [0, num_items).
        device: the device on which the accesses are counted. None: the CPU.

    Returns:
        int64 [num_items].

    Raises:
        TypeError: ids are not integers, or num_items is not an int.
        IndexError: an id is out of range.
    """
    num_items = whole_number("num_items", num_items, 0, 2**62)
    counts = torch.zeros(num_items, dtype=torch.int64, device=memory.canonical("cpu" if device is None else device))
    for batch in batches:
        ids = checked_ids(batch)
        ids = ids.reshape(-1).to(counts.device, torch.int64)
        check_range(ids, num_items)
        counts.index_add_(0, ids, torch.ones_like(ids))
    return counts


def hottest_first(hotness: Hotness, num_items: int) -> torch.Tensor:
    """Returns the ids of items, int64, the hottest first. If hotness is a number for each item, the result has all ids,
    and equally hot items are ordered by increasing id. If hotness is a list of ids, the result is this list without
    repetitions.

    Raises:
        TypeError, ValueError: hotness is neither a number for each item nor a list of ids.
        IndexError: the list has an id that is out of range.
    """
    if isinstance(hotness, np.ndarray):
        hotness = torch.from_numpy(np.ascontiguousarray(hotness))
    if not isinstance(hotness, torch.Tensor):
        ids = checked_ids(hotness, "hotness")
        if ids.dim() != 1:
            raise ValueError(f"hotness has shape {list(ids.shape)}; wanted a list of ids from the hottest on")
        check_range(ids, num_items)
        ids = ids.to(torch.int64)
        ordered, order = ids.sort(stable=True)
        is_first = torch.ones_like(ids, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        return ids[order[is_first].sort().values]
    if hotness.dtype.is_complex or hotness.layout != torch.strided:
        raise TypeError(f"hotness is a {hotness.layout} tensor of {hotness.dtype}; wanted a real number for each item")
    if hotness.shape != (num_items,):
        raise ValueError(
            f"hotness has shape {list(hotness.shape)}; wanted [{num_items}], a number for each item, or a list of ids "
            "from the hottest on"
        )
    scores = hotness.detach()
    if scores.is_floating_point() and bool(scores.isnan().any()):
        raise ValueError("hotness has NaN")
    return torch.argsort(scores, descending=True, stable=True)
