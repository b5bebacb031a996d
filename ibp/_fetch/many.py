"""Items of several tables in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import _core
from .._machine import memory
from .._rows.protocols import Ids
from .._rows.table import Table
from .calls import check_out, check_table, sms_of, worker_of
from .ids import checked_ids


def select(
    tables: Sequence[Table],
    ids: Ids,
    table_numbers: Ids,
    device: torch.device | str | int | None,
    out: torch.Tensor | None,
    check: bool,
    max_sms: int | None,
    select_of_one: Callable[[Table, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Item ids[k] of tables[table_numbers[k]], for every k: what `index_select` does with a list of tables.
    select_of_one: what fetches from one of them where a table is not ready."""
    ids, numbers = checked_ids(ids), checked_ids(table_numbers, "table_numbers")
    if ids.dim() != 1 or numbers.shape != ids.shape:
        raise ValueError(f"ids have shape {list(ids.shape)}, table_numbers {list(numbers.shape)}; wanted [K] of both")
    sms = sms_of(max_sms)
    if device is not None and memory.canonical(device) != ids.device:
        raise ValueError(f"device is {device}, the ids are on {ids.device}; items of several tables come to the ids'")
    device = ids.device
    _check_tables(tables, device)
    shape = (ids.numel(), *tables[0].item_shape)
    if out is not None:
        check_out(out, shape, tables[0].dtype)
        if out.device != device or out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out is on {out.device}, strides {out.stride()}; wanted a contiguous one on {device}")
    result = torch.empty(shape, dtype=tables[0].dtype, device=device) if out is None else out
    if result.numel() == 0:
        return result
    low, high = torch.stack(torch.aminmax(numbers)).tolist()
    if low < 0 or high >= len(tables):
        raise IndexError(f"table_numbers are {low} to {high}; wanted 0 to {len(tables) - 1}")
    counts = torch.bincount(numbers, minlength=len(tables))
    order, starts = torch.argsort(numbers, stable=True), [0, *counts.cumsum(0).tolist()]
    _check_range(tables, ids, numbers)
    _take(tables, ids[order.to(device)], order.to(device), starts, result, sms, select_of_one)
    if check and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        for table in tables:
            table.raise_pending(device)
    return result


def _check_tables(tables: Sequence[Table], device: torch.device) -> None:
    if not tables:
        raise ValueError("there are no tables; wanted one at least")
    for table in tables:
        check_table(table)
        if (table.dtype, table.item_shape) != (tables[0].dtype, tables[0].item_shape):
            raise ValueError(
                f"the tables have items of {tables[0].dtype} {list(tables[0].item_shape)} and of {table.dtype} "
                f"{list(table.item_shape)}; wanted the same of all"
            )
        if worker_of(table, device) != device:
            raise ValueError(f"a table is on {table.device}; wanted it pinned or on {device}, where the ids are")


def _check_range(tables: Sequence[Table], ids: torch.Tensor, numbers: torch.Tensor) -> None:
    """Raises IndexError for the first of CPU ids that its table lacks."""
    if ids.is_cuda:
        return
    sizes = torch.tensor([table.num_items for table in tables])[numbers.cpu()]
    bad = ((ids < 0) | (ids >= sizes)).nonzero()
    if bad.numel():
        position = int(bad[0])
        raise IndexError(
            f"ids[{position}] is {int(ids[position])}; wanted 0 to {int(sizes[position]) - 1} "
            f"of table {int(numbers[position])}"
        )


def _take(
    tables: Sequence[Table],
    ids: torch.Tensor,
    order: torch.Tensor,
    starts: list[int],
    out: torch.Tensor,
    sms: int,
    select_of_one: Callable[[Table, torch.Tensor], torch.Tensor],
) -> None:
    """Writes items ids[starts[t]] to ids[starts[t + 1] - 1] of table t to the positions of out that order has there."""
    used = [number for number in range(len(tables)) if starts[number] < starts[number + 1]]
    for number in used:
        tables[number].raise_pending(out.device)
        tables[number].make_ready(out.device)
    cores = [tables[number].handle(out.device).core for number in used]
    bounds = [*(starts[number] for number in used), starts[-1]]
    positions = order.to(torch.int32)
    with torch.cuda.device(out.device if out.is_cuda else -1):
        if _core.TableHandle.take_many(cores, bounds, ids, positions, out, sms):
            return
    for number in used:  # what the operations say
        some = slice(starts[number], starts[number + 1])
        out[order[some]] = select_of_one(tables[number], ids[some])
