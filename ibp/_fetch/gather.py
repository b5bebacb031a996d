"""Items of a table by their ids: `index_select`, and the paths that they can take to a GPU."""

from __future__ import annotations

import torch

from .._table import CompressedTensor
from . import host_gather
from .calls import check_path_name, check_table, produce, sms_of, target_of, worker_of

PATHS = ("gpu", "bucketed", "cpu")

# Thresholds of the paths, for an H200 on PCIe 5 and 16 cores; benchmarks/large_table.py measures every path beside the others. A GPU that fetches at random places
# of 0.5 GiB of pinned memory is bound by bytes; out of 4 GiB, 1,000,000 rows of 128 B come at 49 million rows a second, and at 370 to 400 when their ids are
# put in the order of windows of 64 KiB to 256 MiB first; 100,000 rows gain 3.5 times from windows of 64 KiB there and 1.6 times out of 16 GiB.
LARGE_TABLE_BYTES = 512 << 20  # of slots and overflow: from here on address translation binds
LEAST_BUCKETED_IDS = 1 << 15  # fewer fetches cost less than the four launches of a partition gain
WINDOW_BYTES = 64 << 10  # at least, of a window
MAX_WINDOWS = 1 << 16  # IBP_MAX_WINDOWS
BUCKETED_SMS = 16  # with more, the rows that are fetched at the same time lie farther apart
LEAST_STAGED_BYTES = 4 << 20  # of items: fewer do not fill the CPU path's pipeline
LEAST_STAGING_THREADS = 8  # a core gathers 4 to 6 GB/s: with fewer a GPU that fetches in order is faster


def index_select(table: CompressedTensor, ids: torch.Tensor, *, device: torch.device | str | int | None = None,
                 out: torch.Tensor | None = None, check: bool = False, max_sms: int | None = None, path: str | None = None) -> torch.Tensor:
    """The items ids of a table, as torch.index_select(x, 0, ids), moved to a device (the paper's sections 4.3 and 4.4).

    A table in pinned host memory is fetched and rebuilt by the GPU itself in one kernel on the current stream, and a table on a GPU
    likewise; an unpinned table is gathered on the CPU and copied. With ids and out on the GPU and the table pinned or on that GPU, the call
    does not synchronise, allocates nothing but what path "bucketed" needs, and can be captured in a CUDA graph (after one call outside it).

    CPU ids out of range raise IndexError at once. CUDA ids are checked by the kernel, without synchronising: a bad id's item is
    zeros, and the first bad one met raises in the next call on the table, in `table.check()`, or here with check=True.

    Inside torch.compile, fullgraph=True too, it works after one call outside; there CPU ids are checked like CUDA ones, without check=True or path="cpu".

    Args:
        table: a table of N items of shape [...].
        ids: int32 or int64 [K] in [0, N), on the CPU or a GPU, in any order, repeated or none at all.
        device: where the result goes; None: out's device, else the ids'.
        out: contiguous tensor [K, ...] of the table's dtype to write to.
        check: wait for the result and raise here what went wrong.
        max_sms: keep at most this many of the GPU's multiprocessors busy; None: all, but for path "bucketed" 16 where these decode as fast as the
            link brings rows.
        path: how items come from host memory to a GPU; None chooses by the sizes. All give the same bits.
            "gpu": the GPU fetches them in the order given.
            "bucketed": the GPU first puts the ids in the order of windows of the table, then fetches in that order: for many ids of a large table.
            "cpu": the CPU gathers rows as they are stored, the copy engine moves them and the GPU decodes: for ids on the CPU and a large table, or
            one that is not pinned. Items must be whole rows. The call comes back when the CPU's part is done, and cannot be captured.

    Returns:
        Tensor [K, ...]; out if it was given.

    Raises:
        TypeError: ids is not int32 or int64, or out has another dtype.
        ValueError: ids is not 1-D, out has another shape, is not contiguous or is not on `device`, or `path` cannot be taken.
        IndexError: an id is out of range.
        CorruptTableError: the table's bytes contradict each other.
    """
    check_table(table)
    if not isinstance(ids, torch.Tensor):
        ids = torch.as_tensor(ids)
        ids = ids.to(torch.int64) if ids.numel() == 0 else ids
    check_ids_dtype(ids)
    if ids.dim() != 1:
        if ids.dim() > 1:
            raise ValueError(f"ids has shape {list(ids.shape)}; wanted one dimension")
        ids = ids.reshape(-1)
    ids = ids.contiguous()
    is_compiling, on_gpu, num_ids = torch.compiler.is_compiling(), ids.is_cuda, ids.numel()
    target = target_of(device, out, ids.device)
    worker = worker_of(table, target)
    if path is not None:
        check_path(path, table, ids, target, worker)
    if not on_gpu and not is_compiling:
        check_range(ids, table._geometry.num_items)
    if on_gpu and worker.type == "cpu":
        ids = ids.cpu()
    path = path or choose_path(table, ids, target, worker)
    if path == "cpu":
        worker = target
    elif ids.device != worker:
        ids = ids.to(worker)
    shape = (num_ids, *table._item_shape)

    def run(result, fault):
        if num_ids == 0:
            return
        if path == "cpu":
            host_gather.fetch(table, ids, worker, sms_of(max_sms), result, table._fault_on(worker, of_selections=True))
            return
        order, positions, sms = ids, None, sms_of(max_sms)
        if path == "bucketed":
            order, positions = torch.ops.ibp.partition_ids.default(ids, table._geometry.num_items, window_bits(table))
            sms = sms or bucketed_sms(table)
        torch.ops.ibp.gather_items.default(*table._arguments(worker), order, sms, result, fault, positions)

    return produce(table, shape, target, worker, out, check, run)


def check_path(path, table, ids, target, worker):
    """Raises ValueError unless the path can be taken."""
    check_path_name(path, PATHS)
    if path != "cpu" and worker.type == "cpu":
        raise ValueError(f"path {path!r} is the GPU's, but the table is {table!r} and the result goes to {target}: wanted a pinned table and device='cuda'")
    if path != "cpu":
        return
    if target.type != "cuda" or table.device.type != "cpu":
        raise ValueError(f"path 'cpu' goes from host memory to a GPU, but the table is on {table.device} and the result goes to {target}")
    if ids.is_cuda:
        raise ValueError(f"path 'cpu' wants ids on the CPU, which gathers their rows; they are on {ids.device}")
    if not host_gather.rows_at_once(table):
        raise ValueError(f"path 'cpu' wants items of whole rows that fit its staging buffers; these have {table._geometry.item_bytes:,} bytes "
                         f"in rows of {table.row_bytes:,}")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("path 'cpu' cannot be captured in a CUDA graph, which the CPU takes no part in: wanted 'gpu' or 'bucketed'")


def bucketed_sms(table):
    """SMs that path "bucketed" takes by itself; 0: all, for decoders that are slower than the link with few."""
    return BUCKETED_SMS if table.codebook is None or table.codebook.is_fast else 0


def choose_path(table, ids, target, worker):
    """The fastest path, by the thresholds above; None where the CPU does it all."""
    num_ids, is_pinned = ids.numel(), worker.type == "cuda"
    if ids.is_cuda and is_pinned and num_ids < LEAST_BUCKETED_IDS:
        return "gpu"
    num_bytes, is_large = num_ids * table._geometry.item_bytes, table.resident_bytes >= LARGE_TABLE_BYTES
    can_look = not ids.is_cuda and not torch.compiler.is_compiling()
    if target.type == "cuda" and table.device.type == "cpu" and can_look and num_bytes >= LEAST_STAGED_BYTES:
        pays = not is_pinned or (is_large and torch.get_num_threads() >= LEAST_STAGING_THREADS)
        if pays and host_gather.rows_at_once(table) and not torch.cuda.is_current_stream_capturing():
            return "cpu"
    if not is_pinned:
        return None
    if num_ids < LEAST_BUCKETED_IDS or not is_large or table.device.type == "cuda" or (can_look and looks_sorted(ids)):
        return "gpu"
    return "bucketed"


def window_bits(table):
    """The least power of two of items in a window that gives at least WINDOW_BYTES and at most MAX_WINDOWS windows."""
    num_items = max(1, table._geometry.num_items)
    items = max(-(-num_items // MAX_WINDOWS), WINDOW_BYTES * num_items // max(1, table.resident_bytes), 1)
    return (items - 1).bit_length()


def looks_sorted(ids):
    """Whether CPU ids are in order at a thousand places: looking at all of them costs more than putting them in order on a GPU."""
    some = ids[:: max(1, ids.numel() // 1024)]
    return bool((some[1:] >= some[:-1]).all())


def check_ids_dtype(ids):
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids has dtype {ids.dtype}; wanted torch.int32 or torch.int64")
    return ids


def check_range(ids, num_items, least=0):
    if ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < least or high >= num_items:
        position = int(((ids < least) | (ids >= num_items)).nonzero()[0])
        raise IndexError(f"ids[{position}] is {int(ids[position])}; wanted {least} to {num_items - 1}")
