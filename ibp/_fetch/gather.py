"""Fetches items of a table, in three ways.

`index_select` fetches items by their ids. `select` does this for one table, and chooses the path by which items come to
a GPU. The items of several tables come in one call, too.

`get_item` implements `table[key]`, which equals x[key] for the tensor x that the table was made from. It decodes the
rows that the key needs, and torch indexes the decoded rows.

`prefetch` implements `CompressedTensor.prefetch`: it brings items or a whole tensor to a GPU, on another stream, before
they are needed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from .._common.arguments import sms_of
from .._common.modes import outside_of_graphs
from .._common.process import OfThisProcess
from .._machine import calibration, memory
from .._machine.memory import is_capturing
from .._rows.handle import ENTRIES, LEAST_STAGED_BYTES, Handle, looks_sorted, new_record, stages
from .._rows.table import Table, faults_of, handle_on, worker_of
from . import host_gather
from .calls import (
    BUCKETED,
    ID_DTYPES,
    IN_ORDER,
    PLANNED,
    Ids,
    Rows,
    check_out,
    check_path,
    check_range,
    check_table,
    checked_ids,
    flat_ids,
    refusal,
    refuse_mapped,
    target_of,
    tensor_of,
)
from .streaming import decode_items, decompress

# For each path, the order in which the operation `take` fetches items. None: the path does not use `take`.
PATHS = {"gpu": IN_ORDER, "bucketed": BUCKETED, "cpu": None}
_take, _take_out = torch.ops.ibp.take.default, torch.ops.ibp.take.out


# ---- items by their ids ----


def index_select(
    table: Table | Rows | list[Table] | tuple[Table, ...],
    ids: Ids,
    *others: NoReturn,
    table_numbers: Ids | None = None,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    max_sms: int | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Returns the items of a table with the given ids, as a tensor on a device. The result equals torch.index_select(x,
    0, ids), where x is the tensor that was compressed (the paper's sections 4.3 and 4.4).

    If the table is in pinned host memory or on a GPU, the GPU itself fetches and decodes the rows in one kernel on the
    current stream. If the table is in pageable memory, the CPU gathers the rows and they are copied. If ids and out are
    on the GPU, and the table is pinned or on that GPU, the call does not synchronise, and it allocates nothing except
    what path "bucketed" needs. Such a call can be captured in a CUDA graph after one call has been made outside of the
    graph.

    CPU ids that are out of range raise IndexError at once. CUDA ids are checked by the kernel, without synchronising:
    the item of a bad id is zeros, and the error for the first bad id is raised by the next call on the table, by
    `table.check()`, or by this call if check=True.

    The call works inside torch.compile, also with fullgraph=True, after one call has been made outside. Inside
    torch.compile, check has no effect, path="cpu" raises ValueError, and CPU ids are checked in the same way as CUDA
    ids. A call with a list of tables ends the graph.

    One call can fetch items of several tables, such as a model's embeddings: item ids[k] of table[table_numbers[k]],
    for every k. The call sorts the ids by table, and takes the tables in groups of up to 32. In a group, tables with
    the same scheme, the same element size and similar row lengths share a launch; each table with rows above 2 KiB has
    its own launch. The call waits for table numbers that are on a GPU, but not for table numbers on the CPU. It cannot
    be captured in a CUDA graph. The error for a bad CUDA id or a corrupt row is raised by the next call on the table
    that it belongs to.

    Example:
        >>> x, ids = torch.randn(1000, 1024).bfloat16(), torch.tensor([3, 999, 3])
        >>> table = ibp.compress(x)
        >>> torch.equal(ibp.index_select(table, ids), x[ids])
        True
        >>> ibp.index_select([table, table], ids, table_numbers=[0, 1, 0]).shape
        torch.Size([3, 1024])

    Args:
        table: a table of N items of shape [...]; or another object that has rows, such as an `ibp.RowCache` or an
            `ibp.distributed.ShardedTable`, whose `index_select` is then called; or a list of T tables of the same dtype
            and the same shape of items, each pinned or on the device of the ids.
        ids: integers [K] in [0, N), on the CPU or a GPU, in any order; they may be repeated, and K may be 0. A tensor
            (int32 and int64 are used directly, shorter integers are widened), a sequence of ints or a numpy array.
        table_numbers: integers [K] in [0, T): the position in the list of the table that each id belongs to. None:
            there is only one table.
        device: the device of the result. None: the device of out or, without out, that of the ids. With a list of
            tables, it must be the device of the ids.
        out: tensor of the table's dtype to write to. Its shape is [K, ...]; in place of K it may have several
            dimensions, whose product is K. It may have any strides. If each item of out is contiguous, as are the items
            at one t of a cache [B, H, T, D], the results are written to out directly. With a list of tables, out must
            be contiguous.
        check: whether to wait for the result and raise faults in this call.
        max_sms: the largest number of the GPU's multiprocessors to keep busy. None: all, except on path "bucketed",
            which uses only the number that decodes rows as fast as the link brings them (at least 16 on an H200).
        path: how items come from host memory to a GPU. All paths give the same bits. None chooses by the sizes.
            "gpu": the GPU fetches the items in the order of the ids.
            "bucketed": the table is divided into windows. The GPU first sorts the ids by window, and fetches the items
                in that order. This is for many ids and a large table.
            "cpu": the CPU gathers the stored rows, the copy engine moves them, and the GPU decodes them. This is for
                ids on the CPU and a table that is large or not pinned. Items must consist of whole rows. The call
                returns when the CPU's part is done, and it cannot be captured in a CUDA graph.

    Returns:
        Tensor [K, ...]; out if it was given.

    Raises:
        TypeError: ids or table numbers are not integers, out has another dtype, or there are table numbers without a
            list of tables.
        ValueError: ids is not 1-D, out has another shape or is not on `device`, `path` cannot be taken, or the tables,
            or ids and table numbers, do not match.
        IndexError: an id or a table number is out of range.
        CorruptTableError: the table's bytes are inconsistent.
    """
    if others:
        raise TypeError(
            "index_select takes a table and ids, without a dimension, and selects along dimension 0: call "
            "ibp.index_select(table, ids), or torch.index_select(table, dim, ids) for another dimension"
        )
    if isinstance(table, Table) and table_numbers is None:
        return select(table, ids, device, out, check, max_sms, path)
    if table_numbers is not None or isinstance(table, (list, tuple)):
        return _select_of_many(table, ids, table_numbers, device, out, check, max_sms, path)
    if isinstance(table, torch.Tensor) or not isinstance(table, Rows):
        check_table(table)
    assert not isinstance(table, Table)
    if path is not None:
        raise ValueError(f"path is for tables; an ibp.{type(table).__name__} has none")
    given: dict[str, Any] = {"device": device, "out": out, "check": check or None, "max_sms": max_sms}
    return table.index_select(ids, **{name: value for name, value in given.items() if value is not None})


def select(
    table: Table,
    ids: Ids,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
    max_sms: int | None = None,
    path: str | None = None,
    from_end: int = 0,
) -> torch.Tensor:
    """Computes `index_select` for one table.

    Args:
        from_end: the table's number of items, if ids below 0 count from the end; out and path must then be None. 0: ids
            below 0 are out of range.
    """
    is_compiling = torch.compiler.is_compiling()
    if type(ids) is not torch.Tensor or ids.dtype not in ID_DTYPES or ids.dim() != 1:
        ids = flat_ids(ids)
    sms = 0 if max_sms is None else sms_of(max_sms)
    home = ids.device
    if type(out) is torch.Tensor and (device is None or device == out.device):
        target = out.device
    elif out is None and device is None:
        target = home
    else:
        target = target_of(device, out, home)
    handles, worker = table._handles, target
    handle = handles.get(target)
    if handle is None:
        target = memory.canonical(target)
        worker = worker_of(table, target)
        handle = handles.get(worker) or handle_on(table, worker)
    elif handle.machine is not None and not is_compiling and handle.machine is not calibration.in_force(target):
        handle = handle_on(table, target)
    if path is not None and (worker.type == "cpu" or PATHS.get(path) is None):
        _refuse(table, path, ids, target, worker)
    if out is not None:
        check_out(out, (ids.shape[0], *table.geometry.item_shape), table.dtype)
    way = PLANNED if path is None else PATHS[path]
    if home != worker or target != worker or path == "cpu":
        ids = ids.cpu() if worker.type == "cpu" else ids
        if not ids.is_cuda and not is_compiling:
            way = _way_from_cpu(table, handle, ids, target, worker, path, from_end)
            if way is None:
                return _select_by_cpu(table, handle, ids, target, out, check, sms, from_end)
        ids = ids.to(worker)
    notes = {"notes": True} if is_compiling else {}
    if not is_compiling and (handle.noted[0] or handle.noted[ENTRIES]):
        handle.faults.raise_pending(worker)
    try:
        if from_end:
            result = _take(handle.table, ids, handle.like, sms, way, from_end, **notes)
        elif out is None or target != worker:
            result = _take(handle.table, ids, handle.like, sms, way, **notes)
        else:
            result = out
            _take_out(handle.table, ids, out, sms, way, **notes)
    except RuntimeError as error:
        if worker.type == "cpu" and not is_compiling:
            raise_for(table, ids, handle, from_end)
        raise refusal(error) from None
    if check and worker.type == "cuda" and not is_compiling:
        handle.faults.raise_when_done(worker)
    if out is not None and result is not out:
        return out.copy_(result.view(out.shape))
    return result if worker == target else result.to(target)


def _refuse(table: Table, path: str, ids: torch.Tensor, target: torch.device, worker: torch.device) -> None:
    """Raises ValueError if a path cannot be taken."""
    check_path(path, PATHS)
    reason = None
    if path != "cpu":
        reason = None if worker.type == "cuda" else "it is the GPU's: wanted a pinned table and device='cuda'"
    elif target.type != "cuda" or table.device.type != "cpu":
        reason = "it goes from host memory to a GPU"
    elif ids.is_cuda:
        reason = "it wants ids on the CPU, which gathers their rows"
    elif torch.compiler.is_compiling():
        reason = "it cannot be compiled: the CPU looks at the ids"
    elif not host_gather.rows_at_once(table):
        reason = (
            "it wants items of whole rows that fit its staging buffers; these have "
            f"{table.geometry.item_bytes:,} bytes in rows of {table.row_bytes:,}"
        )
    elif is_capturing(target):
        reason = "it cannot be captured in a CUDA graph, which the CPU takes no part in: wanted 'gpu' or 'bucketed'"
    elif not host_gather.has_buffers(table, target):
        reason = "the system refuses to pin its staging buffers"
    if reason is not None:
        kind = "device memory" if table.device.type == "cuda" else "pinned" if table.is_pinned() else "pageable"
        raise ValueError(
            f"path {path!r} cannot be taken: {reason}; the table is on {table.device} ({kind}), "
            f"the ids are on {ids.device}, the result goes to {target}"
        )


def _way_from_cpu(
    table: Table,
    handle: Handle,
    ids: torch.Tensor,
    target: torch.device,
    worker: torch.device,
    path: str | None,
    from_end: int,
) -> int | None:
    """Chooses how items are fetched if the ids are on the CPU. Returns the order in which `take` fetches them, or None
    if the CPU gathers their rows. Raises IndexError if an id is out of range and a GPU takes part in the call."""
    if worker.type == "cuda" or target.type == "cuda":
        check_range(ids, table.geometry.num_items, -from_end)
    if path is not None:
        return PATHS[path]
    are_many = ids.shape[0] * table.geometry.item_bytes >= LEAST_STAGED_BYTES
    if are_many and target.type == "cuda" and _is_staged(table, handle, ids, target, worker):
        return None
    is_bucketed = ids.shape[0] >= handle.plan.least_from_cpu and not looks_sorted(ids)
    return BUCKETED if is_bucketed else IN_ORDER


def _is_staged(table: Table, handle: Handle, ids: torch.Tensor, target: torch.device, worker: torch.device) -> bool:
    """Returns whether the CPU should gather the items of these CPU ids for a GPU: it must be able to, and if the GPU
    could fetch the items itself, gathering must be expected to be faster (see `stages`)."""
    if table.slots.is_cuda:
        return False
    if worker.type == "cuda":
        # The number of ids is rounded down to its three most significant bits, so that the handle keeps few results.
        rest = max(0, ids.shape[0].bit_length() - 3)
        asked = ids.shape[0] >> rest << rest, torch.get_num_threads()
        if asked not in handle.staged:
            assert handle.machine is not None
            handle.staged[asked] = stages(table, asked[0], handle.machine)
        if not handle.staged[asked]:
            return False
    can_gather = host_gather.rows_at_once(table) > 0 and not is_capturing(target)
    return can_gather and host_gather.has_buffers(table, target)


def _select_by_cpu(
    table: Table,
    handle: Handle,
    ids: torch.Tensor,
    target: torch.device,
    out: torch.Tensor | None,
    check: bool,
    sms: int,
    from_end: int,
) -> torch.Tensor:
    """Computes `select` for CPU ids that are in range: the CPU gathers the rows, and the target GPU decodes them."""
    if from_end:
        ids = _from_start(ids, from_end)
    handle.faults.raise_pending(target)
    ids = ids.contiguous()
    is_direct = out is not None and out.is_contiguous()
    shape = ids.shape[0], *table.geometry.item_shape
    result = out if is_direct else torch.empty(shape, dtype=table.dtype, device=target)
    assert result is not None
    if ids.shape[0]:
        host_gather.fetch(table, ids, target, sms, result)
    if check:
        handle.faults.raise_when_done(target)
    return result if out is None or is_direct else out.copy_(result.view(out.shape))


def _from_start(ids: torch.Tensor, num_items: int) -> torch.Tensor:
    """Returns the ids as int64. An id below 0 counts from the end and becomes id + num_items."""
    return torch.where(ids < 0, ids.long() + num_items, ids.long())


def raise_for(table: Table, ids: torch.Tensor, handle: Handle, from_end: int = 0, **near: Any) -> None:
    """Raises the error for a call of `take` on the CPU that has failed because an id or a row is bad. To find the bad
    id or row, fetches the items again.

    Args:
        near: the arguments `entries` and `slabs` of `gather_items`, if rows come from a cache.
    """
    refuse_mapped(ids)
    check_range(ids, table.geometry.num_items, -from_end)
    if from_end:
        ids = _from_start(ids, from_end)
    shape = ids.shape[0], *table.geometry.item_shape
    result, fault = torch.empty(shape, dtype=table.dtype, device="cpu"), new_record()
    torch.ops.ibp.gather_items.default(handle.table, ids.contiguous(), 0, result, fault, **near)
    handle.faults.raise_for(fault)


# ---- items of several tables ----


@outside_of_graphs
def _select_of_many(
    tables: Any,
    ids: Ids,
    table_numbers: Ids | None,
    device: torch.device | str | int | None,
    out: torch.Tensor | None,
    check: bool,
    max_sms: int | None,
    path: str | None,
) -> torch.Tensor:
    """Computes `index_select` for a list of tables: item ids[k] of tables[table_numbers[k]], for every k."""
    if not isinstance(tables, (list, tuple)):
        raise TypeError(f"table_numbers go with a list of tables; table is a {type(tables).__name__}")
    if table_numbers is None:
        raise TypeError("table is a list of tables, but there are no table_numbers, which say which table an id is of")
    if path is not None:
        raise ValueError("path is for one table; several have none")
    ids, numbers = checked_ids(ids), checked_ids(table_numbers, "table_numbers")
    if ids.dim() != 1 or numbers.shape != ids.shape:
        raise ValueError(f"ids have shape {list(ids.shape)}, table_numbers {list(numbers.shape)}; wanted [K] of both")
    sms = sms_of(max_sms)
    if device is not None and memory.canonical(device) != ids.device:
        raise ValueError(f"device is {device}, the ids are on {ids.device}; items of several tables come to the ids'")
    device = ids.device
    _check_tables(tables, device)
    shape = (ids.numel(), *tables[0].geometry.item_shape)
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
    _check_many(tables, ids, numbers)
    _take_of_many(tables, ids[order.to(device)], order.to(device), starts, result, sms)
    if check and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        for table in tables:
            faults_of(table).raise_pending(device)
    return result


def _check_tables(tables: Sequence[Table], device: torch.device) -> None:
    if not tables:
        raise ValueError("there are no tables; wanted one at least")
    for table in tables:
        check_table(table)
        if (table.dtype, table.shape[1:]) != (tables[0].dtype, tables[0].shape[1:]):
            raise ValueError(
                f"the tables have items of {tables[0].dtype} {list(tables[0].shape[1:])} and of {table.dtype} "
                f"{list(table.shape[1:])}; wanted the same of all"
            )
        if worker_of(table, device) != device:
            raise ValueError(f"a table is on {table.device}; wanted it pinned or on {device}, where the ids are")


def _check_many(tables: Sequence[Table], ids: torch.Tensor, numbers: torch.Tensor) -> None:
    """Raises IndexError for the first CPU id that is out of range for its table. Ids on a GPU are not checked here, but
    by the kernel."""
    if ids.is_cuda:
        return
    sizes = torch.tensor([table.geometry.num_items for table in tables], dtype=torch.int64, device="cpu")[numbers.cpu()]
    bad = ((ids < 0) | (ids >= sizes)).nonzero()
    if bad.numel():
        position = int(bad[0])
        raise IndexError(
            f"ids[{position}] is {int(ids[position])}; wanted 0 to {int(sizes[position]) - 1} "
            f"of table {int(numbers[position])}"
        )


def _take_of_many(
    tables: Sequence[Table], ids: torch.Tensor, order: torch.Tensor, starts: list[int], out: torch.Tensor, sms: int
) -> None:
    """Fetches items of several tables and writes them to out.

    Args:
        ids: the ids, sorted by table. Those of table t are ids[starts[t]:starts[t + 1]].
        order: for each of these ids, the position of its item in out.
    """
    used = [number for number in range(len(tables)) if starts[number] < starts[number + 1]]
    handles = [handle_on(tables[number], out.device) for number in used]
    for handle in handles:
        handle.faults.raise_pending(out.device)
    bounds = [*(starts[number] for number in used), starts[-1]]
    try:
        torch.ops.ibp.take_many.default(
            [handle.table for handle in handles], ids, order.to(torch.int32), bounds, sms, out
        )
    except RuntimeError:
        for number in used:  # A table has a bad id or row. `select` raises the error for it.
            some = slice(starts[number], starts[number + 1])
            out[order[some]] = select(tables[number], ids[some])


# ---- items by a key ----

_WANTED = "wanted an int, a slice, ..., None, or an integer or bool tensor, array or list"


def get_item(table: Table, key: Any) -> torch.Tensor:
    """Returns x[key] on the table's device, or on the device of the index tensor that selects rows."""
    if type(key) is torch.Tensor and key.dtype in ID_DTYPES and key.dim() == 1 and table.shape:
        return select(table, key, from_end=table.geometry.num_items)
    if not isinstance(key, tuple):
        return (
            _rows_at(table, _checked_index(key))[0]
            if key is not None and key is not Ellipsis and table.shape
            else _at_tuple(table, (_checked_index(key),))
        )
    return _at_tuple(table, tuple(_checked_index(element) for element in key))


def _at_tuple(table: Table, key: tuple[Any, ...]) -> torch.Tensor:
    """Returns x[key] for a key whose elements `_checked_index` has returned."""
    place = _place_of_rows(key, len(table.shape))
    if place is None:
        return decompress(table, check=table.slots.is_cuda)[key]
    if not table.shape:
        raise IndexError("too many indices for a table of 0 dimensions")
    rows, index = _rows_at(table, key[place], is_alone=False)
    return rows[(*key[:place], index, *key[place + 1 :])]


def _place_of_rows(key: tuple[Any, ...], num_dims: int) -> int | None:
    """Returns the position in the key of the element that indexes dimension 0. Returns None if there is no such
    element; the key then needs all rows."""
    for place, element in enumerate(key):
        if element is Ellipsis:  # An ellipsis stands for the dimensions that the other elements do not index.
            if sum(map(_dims_of, key)) < num_dims:
                return None
        elif element is not None:
            return place
    return None


def _dims_of(element: Any) -> int:
    if element is None or element is Ellipsis:
        return 0
    return element.dim() if isinstance(element, torch.Tensor) and element.dtype == torch.bool else 1


def _checked_index(element: Any) -> Any:
    """Returns an element of a key, with arrays and lists converted to tensors. Raises TypeError if the element is not
    an index."""
    if element is None or element is Ellipsis or isinstance(element, slice):
        return element
    if isinstance(element, (list, tuple, range, np.ndarray)):
        element = tensor_of(element, "index")
    elif not isinstance(element, torch.Tensor):
        if isinstance(element, (bool, np.bool_)) or not hasattr(element, "__index__"):
            raise TypeError(f"index is a {type(element).__name__}; {_WANTED}")
        return operator.index(element)
    else:
        refuse_mapped(element)
    if element.dim() and element.dtype in (torch.bool, *ID_DTYPES):
        return element
    if element.dtype == torch.uint8:
        raise TypeError(
            "index has dtype torch.uint8, which torch takes for a mask: wanted torch.bool for a mask, torch.int64 for "
            "ids"
        )
    if element.dtype == torch.bool or element.is_floating_point() or element.is_complex():
        raise TypeError(f"index is a tensor of {element.dtype} {list(element.shape)}; {_WANTED}")
    return int(element) if element.dim() == 0 else checked_ids(element, "index")


def _rows_at(table: Table, index: Any, is_alone: bool = True) -> tuple[torch.Tensor, Any]:
    """Decodes the rows that an index along dimension 0 selects. Returns (rows, rest): rows[rest] equals table[index].

    Args:
        is_alone: whether the key has no other element. If so, the rows that are returned are already the result, and
            `rest` is None or a full slice.
    """
    num_items = table.geometry.num_items
    if isinstance(index, int):
        if not -num_items <= index < num_items:
            raise IndexError(f"index {index} is out of range; wanted {-num_items} to {num_items - 1}")
        item = decode_items(table, index % num_items, index % num_items + 1, check=table.slots.is_cuda)
        return (item[0], None) if is_alone else (item, 0)
    if isinstance(index, slice):
        start, stop, step = index.indices(num_items)
        if step <= 0:
            raise ValueError(f"the slice has step {step}; wanted a step greater than zero")
        if step == 1:
            rows = decode_items(table, start, max(start, stop), check=table.slots.is_cuda)
        else:
            ids = torch.arange(start, max(start, stop), step, device="cpu")
            rows = index_select(table, ids, device=table.device)
        return rows, slice(None)
    if index.dtype == torch.bool:
        if index.shape != table.shape[: index.dim()]:
            raise IndexError(f"the mask has shape {list(index.shape)}; wanted {list(table.shape[: index.dim()])}")
        if index.dim() > 1:
            needed = index.flatten(1).any(1)
            rows, masks = index_select(table, needed.nonzero().reshape(-1)), index[needed]
            return (rows[masks], None) if is_alone else (rows, masks)
        index = index.nonzero().reshape(-1)
    flat = index.reshape(-1)
    rows = select(table, flat, from_end=num_items)
    if is_alone:
        return rows.reshape((*index.shape, *table.geometry.item_shape)), None
    return rows, torch.arange(flat.numel(), device=rows.device).reshape(index.shape)


# ---- items ahead of their use ----


class Prefetch(OfThisProcess):
    """The result of `table.prefetch`: items, or a whole tensor, that are brought to a device on another stream.

    `wait` makes the current stream wait for the result; the host does not wait. Call `close` when all work that uses
    the result has been queued on the current stream. A `with` block calls `wait` at its beginning and `close` at its
    end.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.compress(x, device="cpu", memory="host")
        >>> with table.prefetch([3, 1, 3]) as rows:
        ...     torch.equal(rows, x[[3, 1, 3]])
        True
    """

    _instead = "wait() gives its tensor, which can be pickled"

    def __init__(self, result: torch.Tensor, stream: torch.cuda.Stream | None, owned: bool) -> None:
        self._result: torch.Tensor | None = result
        self._stream, self._owned, self._event = stream, owned, None
        if stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def is_ready(self) -> bool:
        """Returns whether the result has arrived. Does not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """Makes the current stream of the result's device wait until the result has arrived. Returns the result. The
        method may be called on several streams.

        Raises:
            RuntimeError: the prefetch has been closed.
        """
        if self._result is None:
            raise RuntimeError("the prefetch is closed: its result may be another one's by now")
        if self._event is not None:
            current = torch.cuda.current_stream(self._result.device)
            current.wait_event(self._event)
            if self._owned:
                self._result.record_stream(current)
        return self._result

    def close(self) -> None:
        """Releases the result. Later prefetches on the same stream wait for the work that is now queued on the current
        stream, so they may write to the same memory. A second call does nothing."""
        if self._result is not None and self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._result.device))
        self._result = None

    def __enter__(self) -> torch.Tensor:
        return self.wait()

    def __exit__(self, *_: Any) -> None:
        self.close()


_streams: dict[torch.device, torch.cuda.Stream] = {}  # For each GPU, the stream on which prefetches run by default.


def prefetch(
    table: Table,
    ids: Ids | None = None,
    *,
    device: torch.device | str | int | None = None,
    out: torch.Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
    max_sms: int | None = None,
    path: str | None = None,
) -> Prefetch:
    """Starts a prefetch: the implementation of `CompressedTensor.prefetch`."""
    if device is None:
        device = out.device if out is not None else ids.device if isinstance(ids, torch.Tensor) else table.device
    target = memory.canonical(device)

    def fetched() -> torch.Tensor:
        if ids is None:
            return decompress(table, device=target, out=out, max_sms=max_sms, path=path)
        return index_select(table, ids, device=target, out=out, max_sms=max_sms, path=path)

    if target.type != "cuda":
        return Prefetch(fetched(), None, out is None)
    if stream is None and target not in _streams:
        _streams[target] = torch.cuda.Stream(target)
    side = _streams[target] if stream is None else stream
    if side.device != target:
        raise ValueError(f"stream is of {side.device}; wanted one of {target}, where the result goes")
    side.wait_stream(torch.cuda.current_stream(target))
    for given in (ids, out):
        if isinstance(given, torch.Tensor) and given.is_cuda:
            given.record_stream(side)
    with torch.cuda.stream(side):
        result = fetched()
    return Prefetch(result, side, out is None)
