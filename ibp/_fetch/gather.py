"""Items of a table by their ids: `index_select`, and the paths that they can take to a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .. import _core
from .._common.graphs import outside_of_graphs
from .._machine import calibration, memory
from .._machine.calibration import Calibration
from .._machine.memory import is_capturing
from .._rows.protocols import Ids, Rows
from .._rows.table import Table
from .._schemes.choice import coder_rates, work_of
from . import host_gather
from .calls import check_out, check_table, produce, sms_of, target_of, worker_of
from .ids import check_readable, checked_ids, flat_ids
from .paths import Path, choose, named

# A GPU that fetches at random places of 0.5 GiB of pinned memory is bound by bytes; out of 4 GiB, 1,000,000 rows of 128
# B come at 49 million rows a second, and at 370 to 400 when their ids are put in the order of windows of 64 KiB to 256
# MiB first; 100,000 rows gain 3.5 times from windows of 64 KiB there and 1.6 times out of 16 GiB
# (benchmarks/large_table.py, an H200). From which sizes on that is so, the calibration in force says.
WINDOW_BYTES = 64 << 10  # at least, of a window
MAX_WINDOWS = 1 << 16  # IBP_MAX_WINDOWS
LEAST_STAGED_BYTES = 4 << 20  # of items: fewer do not fill the CPU path's pipeline
# What the paths cost beside the rows themselves, by benchmarks/paths.py (an H100). To put ids in order takes a GPU
# PARTITION_NS, and PARTITION_ID_NS for each id; it waits for the launches, too, if the ids come from the CPU
# (LAUNCHES_NS). STAGING_NS is what it takes to begin and end the CPU's pipeline, which stages rows at STAGED_SHARE of
# the rate of its threads and the copy engine alone. A path that prepares something must promise to be PROMISED times as
# fast as one that does not.
PARTITION_NS, PARTITION_ID_NS, LAUNCHES_NS = 16e3, 0.055, 90e3
STAGING_NS, STAGED_SHARE = 100e3, 0.7
PROMISED = 1.2


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
    """The items ids of a table, as torch.index_select(x, 0, ids), moved to a device (the paper's sections 4.3 and 4.4).

    A table in pinned host memory is fetched and rebuilt by the GPU itself in one kernel on the current stream, and a
    table on a GPU likewise; an unpinned table is gathered on the CPU and copied. With ids and out on the GPU and the
    table pinned or on that GPU, the call does not synchronise, allocates nothing but what path "bucketed" needs, and
    can be captured in a CUDA graph (after one call outside it).

    CPU ids out of range raise IndexError at once. CUDA ids are checked by the kernel, without synchronising: a bad id's
    item is zeros, and the first bad one met raises in the next call on the table, in `table.check()`, or here with
    check=True.

    Inside torch.compile, with fullgraph=True too, the call works after one call outside, but without check=True and
    path="cpu". There, CPU ids are checked like CUDA ones. A call with a list of tables ends the graph.

    One call can take items of several tables, such as a model's embeddings: item ids[k] of table[table_numbers[k]], for
    every k. The ids are put in the order of the tables; of every 32 tables, one kernel writes the items of all that
    have one scheme, element size and about one length of rows, up to 2 KiB. The call waits for table numbers on a GPU,
    but not for table numbers on the CPU. It cannot be captured in a CUDA graph; bad CUDA ids and corrupt rows are
    raised by the next call on their table.

    Example:
        >>> x, ids = torch.randn(1000, 1024).bfloat16(), torch.tensor([3, 999, 3])
        >>> table = ibp.compress(x)
        >>> torch.equal(ibp.index_select(table, ids), x[ids])
        True
        >>> ibp.index_select([table, table], ids, table_numbers=[0, 1, 0]).shape
        torch.Size([3, 1024])

    Args:
        table: a table of N items of shape [...]; or anything else that has rows, such as an `ibp.RowCache` or an
            `ibp.distributed.ShardedTable`: see its `index_select`. Or a list of T tables of one dtype and one shape of
            items, each pinned or on the device of the ids.
        ids: integers [K] in [0, N), on the CPU or a GPU, in any order, repeated or none at all: a tensor (int32 and
            int64 are taken as they are, shorter ones are widened), a sequence of ints or a numpy array.
        table_numbers: integers [K] in [0, T), with a list of tables.
        device: where the result goes; None: out's device, else the ids'. Of a list of tables the ids'.
        out: tensor of the table's dtype to write to: [K, ...], or with several dimensions in place of K, whose product
            is K. Any strides will do: contiguous items, such as the items at one t of a cache [B, H, T, D], are written
            straight to their places. With a list of tables: contiguous.
        check: wait for the result and raise here what went wrong.
        max_sms: keep at most this many of the GPU's multiprocessors busy; None: all, except that path "bucketed" takes
            only as many as decode rows as fast as the link brings them (at least 16 on an H200).
        path: how items come from host memory to a GPU; None chooses by the sizes. All give the same bits.
            "gpu": the GPU fetches them in the order given.
            "bucketed": the GPU first puts the ids in the order of windows of the table, then fetches in that order: for
                many ids of a large table.
            "cpu": the CPU gathers rows as they are stored, the copy engine moves them and the GPU decodes: for ids on
                the CPU and a large table, or one that is not pinned. Items must be whole rows. The call comes back when
                the CPU's part is done, and cannot be captured.

    Returns:
        Tensor [K, ...]; out if it was given.

    Raises:
        TypeError: ids or table numbers are no integers, out has another dtype, or there are table numbers without a
            list of tables.
        ValueError: ids is not 1-D, out has another shape or is not on `device`, `path` cannot be taken, or tables or
            table numbers do not go together.
        IndexError: an id or a table number is out of range.
        CorruptTableError: the table's bytes contradict each other.
    """
    if others:
        raise TypeError(
            "index_select takes a table and ids, without a dimension, and selects along dimension 0: call "
            "ibp.index_select(table, ids), or torch.index_select(table, dim, ids) for another dimension"
        )
    if device is None and path is table_numbers is None and not check and not torch.compiler.is_compiling():
        taken = _take_few(table, ids, out, max_sms)
        if taken is not None:
            return taken
    if table_numbers is not None or isinstance(table, (list, tuple)):
        return _select_of_many(table, ids, table_numbers, device, out, check, max_sms, path)
    if not isinstance(table, Table) and isinstance(table, Rows) and not isinstance(table, torch.Tensor):
        if path is not None:
            raise ValueError(f"path is for tables; an ibp.{type(table).__name__} has none")
        given: dict[str, Any] = {"device": device, "out": out, "check": check or None, "max_sms": max_sms}
        return table.index_select(ids, **{name: value for name, value in given.items() if value is not None})
    check_table(table)
    ids = flat_ids(ids)
    target = target_of(device, out, ids.device)
    worker, sms = worker_of(table, target), sms_of(max_sms)
    chosen = None
    if path is not None:
        chosen = named(PATHS, path)
        refuse(chosen, GatherRequest(table, ids, target, worker, sms))
    check_readable(ids, table.num_items)
    if ids.is_cuda and worker.type == "cpu":
        ids = ids.cpu()
    request = GatherRequest(table, ids, target, worker, sms)
    if chosen is None:
        chosen = choose(PATHS, request)
        if not torch.compiler.is_compiling() and ids.device == worker == target:
            table._make_ready(worker)
    return produce(
        table,
        (ids.numel(), *table.item_shape),
        target,
        chosen.worker(request),
        out,
        check,
        lambda result, fault: chosen.run(request, result, fault),
        (lambda result, dims, fault: chosen.into(request, result, dims, fault)) if chosen.is_direct else None,
    )


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
    """Item ids[k] of tables[table_numbers[k]], for every k."""
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
    _check_many(tables, ids, numbers)
    _take_of_many(tables, ids[order.to(device)], order.to(device), starts, result, sms)
    if check and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        for table in tables:
            table._raise_pending(device)
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


def _check_many(tables: Sequence[Table], ids: torch.Tensor, numbers: torch.Tensor) -> None:
    """Raises IndexError for the first of CPU ids that its table lacks."""
    if ids.is_cuda:
        return
    sizes = torch.tensor([table.num_items for table in tables], dtype=torch.int64, device="cpu")[numbers.cpu()]
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
    """Writes items ids[starts[t]] to ids[starts[t + 1] - 1] of table t to the positions of out that order has there."""
    used = [number for number in range(len(tables)) if starts[number] < starts[number + 1]]
    for number in used:
        tables[number]._raise_pending(out.device)
        tables[number]._make_ready(out.device)
    cores = [tables[number].handle(out.device).core for number in used]
    bounds = [*(starts[number] for number in used), starts[-1]]
    positions = order.to(torch.int32)
    with torch.cuda.device(out.device if out.is_cuda else -1):
        if _core.TableHandle.take_many(cores, bounds, ids, positions, out, sms):
            return
    for number in used:  # what the operations say
        some = slice(starts[number], starts[number + 1])
        out[order[some]] = index_select(tables[number], ids[some])


def _take_few(table: Any, ids: Any, out: torch.Tensor | None, max_sms: int | None) -> torch.Tensor | None:
    """The items at ids by the shortest way, where an earlier call has made the table ready and nothing is unusual."""
    try:
        core = table._handles[ids.device].core
    except (AttributeError, KeyError, TypeError):
        return None
    return core.take(ids, out, 0) if max_sms is None else core.take(ids, out, sms_of(max_sms))


class GatherRequest(NamedTuple):
    """Items to fetch. worker: the device that decodes them without the CPU's help."""

    table: Table
    ids: torch.Tensor  # int32 or int64 [K], contiguous
    target: torch.device
    worker: torch.device
    sms: int  # at most; 0: all


class ItemPath(Path[GatherRequest]):
    """A path that items take. is_direct: whether it has `into`, which writes to a result of any strides."""

    is_direct = False

    def worker(self, request: GatherRequest) -> torch.device:
        """The device that decodes."""
        return request.worker

    def run(self, request: GatherRequest, result: torch.Tensor, fault: torch.Tensor) -> None:
        """Writes the items to result on the worker device, in the order of its current stream; notes in fault what goes
        wrong."""
        raise NotImplementedError

    def into(self, request: GatherRequest, result: torch.Tensor, outer_dims: int, fault: torch.Tensor) -> None:
        """As `run`, to items that the first outer_dims dimensions of the result number."""
        raise NotImplementedError


class _Decode(ItemPath):
    """The device that decodes reads rows where they are, in the order given."""

    is_direct = True

    def cost(self, request: GatherRequest) -> float:
        return 1.0

    def run(self, request: GatherRequest, result: torch.Tensor, fault: torch.Tensor) -> None:
        table, ids, worker = request.table, request.ids, request.worker
        if ids.device != worker:
            ids = ids.to(worker)
        if ids.numel():
            torch.ops.ibp.gather_items.default(table.handle(worker).table, ids, request.sms, result, fault, None)

    def into(self, request: GatherRequest, result: torch.Tensor, outer_dims: int, fault: torch.Tensor) -> None:
        handle, ids = request.table.handle(request.worker), request.ids.to(request.worker)
        torch.ops.ibp.gather_items.default(handle.table, ids, request.sms, result, fault, outer_dims=outer_dims)


class _GpuGather(_Decode):
    """The GPU fetches rows from pinned memory, or its own, in the order given."""

    name = "gpu"

    def can(self, request: GatherRequest) -> str | None:
        return None if request.worker.type == "cuda" else "it is the GPU's: wanted a pinned table and device='cuda'"


class _Bucketed(ItemPath):
    """The GPU puts ids in the order of windows of the table first: address translation then finds what it needs."""

    name = "bucketed"

    def can(self, request: GatherRequest) -> str | None:
        return None if request.worker.type == "cuda" else "it is the GPU's: wanted a pinned table and device='cuda'"

    def cost(self, request: GatherRequest) -> float:
        table, ids = request.table, request.ids
        if request.worker.type != "cuda" or table.device.type == "cuda":
            return 2.0
        machine = calibration.in_force(request.worker)
        if ids.numel() < machine.least_bucketed_ids or table.resident_bytes < machine.reach_bytes:
            return 2.0
        if torch.compiler.is_compiling():
            return 0.5
        pays = PROMISED * bucketed_ns(table, ids.numel(), ids.is_cuda, machine) < fetched_ns(table, machine)
        return 0.5 if pays and (ids.is_cuda or not looks_sorted(ids)) else 2.0

    def run(self, request: GatherRequest, result: torch.Tensor, fault: torch.Tensor) -> None:
        table, ids, worker = request.table, request.ids.to(request.worker), request.worker
        if ids.numel() == 0:
            return
        order, positions = torch.ops.ibp.partition_ids.default(ids, table.num_items, window_bits(table))
        all_sms = torch.cuda.get_device_properties(worker).multi_processor_count
        sms = request.sms or bucketed_sms(table, calibration.in_force(worker), all_sms)
        torch.ops.ibp.gather_items.default(table.handle(worker).table, order, sms, result, fault, positions)


class _Cpu(ItemPath):
    """The CPU gathers coded rows, the copy engine moves them, the GPU decodes them (host_gather)."""

    name = "cpu"

    def can(self, request: GatherRequest) -> str | None:
        table = request.table
        if request.target.type != "cuda" or table.device.type != "cpu":
            return "it goes from host memory to a GPU"
        if request.ids.is_cuda:
            return "it wants ids on the CPU, which gathers their rows"
        if torch.compiler.is_compiling():
            return "it cannot be compiled: the CPU looks at the ids"
        if not host_gather.rows_at_once(table):
            return (
                "it wants items of whole rows that fit its staging buffers; these have "
                f"{table.item_bytes:,} bytes in rows of {table.row_bytes:,}"
            )
        if is_capturing(request.target):
            return "it cannot be captured in a CUDA graph, which the CPU takes no part in: wanted 'gpu' or 'bucketed'"
        if not host_gather.has_buffers(table, request.target):
            return "the system refuses to pin its staging buffers"
        return None

    def cost(self, request: GatherRequest) -> float:
        table = request.table
        if request.ids.numel() * table.item_bytes < LEAST_STAGED_BYTES:
            return 4.0
        if request.worker.type == "cpu":  # not pinned: the GPU cannot fetch
            return 0.25
        machine = calibration.in_force(request.target)
        num_threads, num_ids = torch.get_num_threads(), request.ids.numel()
        if num_threads < machine.least_staging_threads or table.resident_bytes < machine.reach_bytes:
            return 4.0
        by_gpu = min(fetched_ns(table, machine), bucketed_ns(table, num_ids, False, machine))
        return 0.25 if PROMISED * staged_ns(table, num_ids, machine, num_threads) < by_gpu else 4.0

    def worker(self, request: GatherRequest) -> torch.device:
        return request.target

    def run(self, request: GatherRequest, result: torch.Tensor, fault: torch.Tensor) -> None:
        table, ids, device = request.table, request.ids, request.target
        if ids.numel():
            host_gather.fetch(table, ids, device, request.sms, result)


class _GatherHere(_Decode):
    """The CPU decodes rows where they are."""

    def can(self, request: GatherRequest) -> str | None:
        return None if request.worker.type == "cpu" else "the GPU can decode"


# The usual ones first: of the others the cost alone is looked at.
PATHS: tuple[ItemPath, ...] = (_GpuGather(), _GatherHere(), _Bucketed(), _Cpu())


def refuse(path: ItemPath, request: GatherRequest) -> None:
    """Raises ValueError if the path cannot be taken."""
    reason = path.can(request)
    if reason is not None:
        table = request.table
        kind = "device memory" if table.device.type == "cuda" else "pinned" if table.is_pinned() else "pageable"
        raise ValueError(
            f"path {path.name!r} cannot be taken: {reason}; the table is on {table.device} ({kind}), "
            f"the ids are on {request.ids.device}, the result goes to {request.target}"
        )


def stored_item_bytes(table: Table) -> float:
    """Returns the bytes that the link brings for an item of a table, on average."""
    return table.resident_bytes / max(1, table.num_items)


def fetched_ns(table: Table, machine: Calibration, translation_ns: float | None = None) -> float:
    """Returns the time, in ns, in which a GPU fetches an item of a pinned table, by a machine's rates: the link brings
    its bytes while addresses are translated, and it is written to device memory.

    translation_ns: the time that translation takes alone; None: that of items in any order."""
    link_ns = max(stored_item_bytes(table) / machine.read_gbps, machine.least_row_ns)
    if translation_ns is None:
        translation_ns = machine.random_ns(table.resident_bytes)
    return max(math.hypot(link_ns, translation_ns), table.item_bytes / machine.device_copy_gbps)


def bucketed_ns(table: Table, num_ids: int, ids_on_gpu: bool, machine: Calibration) -> float:
    """Returns the same for num_ids items in the order of windows, with the time in which they are put in order."""
    translation_ns = machine.sorted_ns(table.resident_bytes, num_ids)
    prepared_ns = PARTITION_NS if ids_on_gpu else PARTITION_NS + LAUNCHES_NS
    return fetched_ns(table, machine, translation_ns) + prepared_ns / num_ids + PARTITION_ID_NS


def staged_ns(table: Table, num_ids: int, machine: Calibration, num_threads: int) -> float:
    """Returns the time, in ns, that an item takes which the CPU gathers and the copy engine moves."""
    gbps = min(num_threads * machine.gather_gbps, machine.copy_in_gbps)
    return stored_item_bytes(table) / (STAGED_SHARE * gbps) + STAGING_NS / num_ids


def bucketed_sms(table: Table, machine: Calibration, all_sms: int) -> int:
    """Returns how many of a GPU's SMs path "bucketed" takes by default, or 0 for all. Few are enough for raw rows, and
    with more of them the rows that are fetched at the same time lie farther apart. Coded rows get as many as decode
    and write them at the rate at which the link brings them."""
    if table.codebook is None:
        return machine.bucketed_sms
    stored_bytes = table.resident_bytes / max(1, table.num_rows)
    work = work_of(table.codebook, table.row_bytes, stored_bytes)
    decode_ns = max(work / coder_rates(table.codebook, machine).work_per_ns, table.row_bytes / machine.memset_gbps)
    link_ns = max(stored_bytes / machine.read_gbps, machine.least_row_ns)
    sms = max(machine.bucketed_sms, math.ceil(all_sms * decode_ns / link_ns))
    return sms if sms < all_sms else 0


def window_bits(table: Table) -> int:
    """The least power of two of items in a window that gives at least WINDOW_BYTES and at most MAX_WINDOWS windows."""
    num_items = max(1, table.num_items)
    items = max(-(-num_items // MAX_WINDOWS), WINDOW_BYTES * num_items // max(1, table.resident_bytes), 1)
    return (items - 1).bit_length()


def is_bucketed(table: Table, ids: torch.Tensor, worker: torch.device) -> bool:
    """Whether items at these ids of a GPU would be fetched in the order of windows of the table."""
    return _Bucketed().cost(GatherRequest(table, ids, worker, worker, 0)) < _GpuGather().cost(
        GatherRequest(table, ids, worker, worker, 0)
    )


def looks_sorted(ids: torch.Tensor) -> bool:
    """Whether CPU ids are in order at a thousand places: looking at all of them costs more than putting them in order
    on a GPU."""
    some = ids[:: max(1, ids.numel() // 1024)]
    return bool((some[1:] >= some[:-1]).all())
