"""Items of several tables in one call: `index_select_many`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _core
from .._rows.table import Table
from .calls import check_out, check_table, sms_of, worker_of
from .gather import Ids, checked_ids, index_select, make_ready, tensor_of


def index_select_many(
    tables: Sequence[Table],
    ids: Ids,
    table_numbers: Ids,
    *,
    out: torch.Tensor | None = None,
    check: bool = False,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Items of several tables, such as a model's embeddings: item ids[k] of tables[table_numbers[k]], for every k.

    The ids are put in the order of the tables, and each table's items are written where they belong: one call into the
    library and a kernel a table, with no result of a table's own. Table numbers on a GPU are waited for; those on the
    CPU are not. It cannot be captured in a CUDA graph.

    Args:
        tables: T tables of one dtype and one shape of items, each pinned or on the device of the ids.
        ids: integers [K] in [0, N of their table), as `index_select` takes them.
        table_numbers: integers [K] in [0, T).
        out: contiguous tensor [K, ...] of the tables' dtype to write to.
        check, max_sms: as in `index_select`. Bad CUDA ids and corrupt rows are raised by the next call on their table.

    Returns:
        Tensor [K, ...] on the ids' device; out if it was given.

    Raises:
        TypeError: tables, ids or table numbers are of a wrong type.
        ValueError: the tables do not go together, there are not as many table numbers as ids, or out does not fit.
        IndexError: a table number or an id on the CPU is out of range.
        CorruptTableError: as `index_select`.
    """
    tables = list(tables)
    ids, numbers = (
        checked_ids(given if isinstance(given, torch.Tensor) else tensor_of(given, name), name)
        for given, name in ((ids, "ids"), (table_numbers, "table_numbers"))
    )
    if ids.dim() != 1 or numbers.shape != ids.shape:
        raise ValueError(f"ids have shape {list(ids.shape)}, table_numbers {list(numbers.shape)}; wanted [K] of both")
    device, sms = ids.device, sms_of(max_sms)
    _check_tables(tables, device)
    shape = (ids.numel(), *tables[0].item_shape)
    if out is not None:
        check_out(out, shape, tables[0].dtype)
        if out.device != device or out.shape != shape or not out.is_contiguous():
            raise ValueError(f"out is on {out.device}, strides {out.stride()}; wanted a contiguous one on {device}")
    result = torch.empty(shape, dtype=tables[0].dtype, device=device) if out is None else out
    if result.numel() == 0:
        return result
    order, starts = _in_order_of_tables(numbers, len(tables))
    _check_range(tables, ids, numbers)
    _take(tables, ids[order.to(device)], order.to(device), starts, result, sms)
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


def _in_order_of_tables(numbers: torch.Tensor, num_tables: int) -> tuple[torch.Tensor, list[int]]:
    """(positions in the order of their tables, int64; where in that order each table's begin, and the end)."""
    low, high = (int(number) for number in torch.aminmax(numbers))
    if low < 0 or high >= num_tables:
        raise IndexError(f"table_numbers are {low} to {high}; wanted 0 to {num_tables - 1}")
    counts = torch.bincount(numbers, minlength=num_tables)
    return torch.argsort(numbers, stable=True), [0, *counts.cumsum(0).tolist()]


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
    tables: Sequence[Table], ids: torch.Tensor, order: torch.Tensor, starts: list[int], out: torch.Tensor, sms: int
) -> None:
    """Writes items ids[starts[t]] to ids[starts[t + 1] - 1] of table t to the positions of out that order has there."""
    used = [number for number in range(len(tables)) if starts[number] < starts[number + 1]]
    for number in used:
        tables[number].raise_pending(out.device)
        make_ready(tables[number], out.device)
    ready = [tables[number]._ready[out.device] for number in used]
    bounds = [*(starts[number] for number in used), starts[-1]]
    positions = order.to(torch.int32)
    with torch.cuda.device(out.device if out.is_cuda else -1):
        if _core.ReadyTable.take_many(ready, bounds, ids, positions, out, sms):
            return
    for number in used:  # what the operations say
        some = slice(starts[number], starts[number + 1])
        out[order[some]] = index_select(tables[number], ids[some])
