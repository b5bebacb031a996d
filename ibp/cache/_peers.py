"""Counts accesses of items, and sorts items by their hotness.

Shares a cache among the ranks of a process group on one machine. Each rank has one slab and reads the slabs of the
others.

Each rank fills its own slab and lends it to the others: GPU memory through CUDA IPC, which torch also uses to send
tensors between processes, and host memory as shared segments. A loan has the data that another rank needs to open the
slab. Each rank opens loans on its own device. The rank's kernels then read the slab over NVLink, and the rank needs no
CUDA context on the lender's GPU. Lent memory is freed when all borrowers have closed it, or when the lender ends.
Borrowers close the memory when the cache is refilled or freed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .._common import wire
from .._common.arguments import whole_number
from .._common.group import RankGroup, check_one_machine, machine, same_on_all
from .._fetch.calls import Ids, check_range, checked_ids
from .._machine import memory
from .._machine.segments import Segment, SharedHandle
from .._rows.geometry import rows_of
from ._slabs import MAX_SLABS, STATIC_WAYS, CacheState, Generation, Slab, SlabPlan, filled_slab, plan_slabs

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


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._row_cache import RowCache

_REFILL = "RowCache.refill"


class Peers:
    """The ranks whose slabs make up a cache. Slab r belongs to rank r.

    Attributes:
        rank: the number of this process in the group.
        size: number of processes in the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Raises RuntimeError or ValueError if there is no such group, or if the group is too large."""
        self._group = RankGroup(group)
        self.rank, self.size = self._group.rank, self._group.size
        if self.size > MAX_SLABS:
            raise ValueError(f"the group has {self.size} ranks; a cache has at most {MAX_SLABS}")

    def agree(self, cache: RowCache, set_up: Callable[[], None], has_hotness: bool) -> None:
        """Calls set_up() on each rank, and checks that the ranks can share a cache. A collective call. Raises what
        set_up() raises. Also raises ValueError if ranks give different tables or budgets, are on several machines, or
        have GPUs that cannot read each other's memory."""

        def work() -> tuple[str, str, dict[str, Any]]:
            set_up()
            view = cache.view
            return (
                machine(),
                _uuid(cache.devices[0]),
                {
                    "shape of the table": list(view.shape),
                    "dtype of the table": view.dtype,
                    "row_bytes of the table": view.row_bytes,
                    "stored_bytes of the table": view.stored_bytes,
                    "codebook of the table": view.codebook,
                    "budget_bytes": cache.budget_bytes,
                    "type of device": cache.devices[0].type,
                    "hotness": "given" if has_hotness else None,
                },
            )

        agreed = self._group.together("RowCache", work)
        machines, uuids, arguments = (list(of_ranks) for of_ranks in zip(*agreed))
        check_one_machine("a RowCache with a group", machines)
        same_on_all("RowCache", arguments)
        self._group.together("RowCache", lambda: _check_access(cache.devices[0], uuids))

    def made(self, state: CacheState, hotness: Hotness, budget_bytes: int) -> Generation:
        """Fills the slabs of all ranks and returns them as a new generation. A collective call. If it fails on one
        rank, it raises on all ranks."""
        device, own, slabs = state.devices[0], _Lender(self.rank, self.size), list[Slab]()
        plans: list[SlabPlan] = []

        def plan() -> dict[str, Any]:
            items = hottest_first(hotness, state.view.geometry.num_items)
            rows = rows_of(items, state.rows_per_item)
            found, copies = plan_slabs(state.view, rows, self.size, 0, budget_bytes, True)
            plans.extend(found)
            return {"hotness": _fingerprint(items), "whether maps are copied": copies}

        def fill() -> list[_Loan | None]:
            with state.beside():
                slab = filled_slab(state.view, plans[self.rank], self.rank, device)
            return own.lend(slab)

        def open_all() -> None:
            for rank in range(self.size):
                slabs.append(own.slab if rank == self.rank else loans[rank][self.rank].opened(device))

        planned = self._group.together(_REFILL, plan)
        same_on_all(_REFILL, planned)
        loans = self._group.together(_REFILL, fill)
        self._group.together(_REFILL, open_all)
        made = state.generation_of(tuple(slabs), STATIC_WAYS, 0, sum(plan.rows.numel() for plan in plans))
        if planned[0]["whether maps are copied"]:
            with state.beside():
                made.near_maps = {device: {number: slab.map.clone() for number, slab in made if slab.is_lent}}
        return made

    def give_back(self) -> None:
        """Waits until all ranks have closed the memory that was lent to them, and then lets torch free the memory that
        this rank has lent. A collective call."""
        self._group.together(_REFILL, lambda: None)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


def _uuid(device: torch.device | int) -> str:
    """Returns an identifier of a GPU that is the same in all processes, or "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device != torch.device("cpu") else ""


def _check_access(device: torch.device, uuids: list[str]) -> None:
    """Raises ValueError if a GPU cannot read the memory of another rank's GPU. A GPU that this process does not see
    is not checked; opening its memory will fail."""
    if device.type != "cuda":
        return
    seen = {_uuid(number): number for number in range(torch.cuda.device_count())}
    for rank, uuid in enumerate(uuids):
        number = seen.get(uuid, device.index)
        if number != device.index and not torch.cuda.can_device_access_peer(device, number):
            raise ValueError(f"{device} cannot read the memory of cuda:{number}, the GPU of rank {rank} of the group")


def _fingerprint(items: torch.Tensor) -> tuple[int, int]:
    """Returns the length and a hash of a list of ids. The hash depends on the order of the ids; different lists almost
    surely have different hashes."""
    places = torch.arange(1, items.numel() + 1, device=items.device) * 0x5851F42D4C957F2D
    return items.numel(), int(((items + 1) * places ^ places >> 29).sum())


# ---- memory that is lent ----


@wire.sent
class _Loan(NamedTuple):
    """A slab that one other process may open.

    how: for a slab in host memory: (handle of the shared segment, size of the slab in bytes, number of words of its
    map). For a slab in GPU memory: (result of `ipc.lent` for its bytes, result of `ipc.lent` for its map); each result
    is None if the tensor is empty.
    """

    how: Any

    def opened(self, device: torch.device) -> Slab:
        """Opens the slab in this process, without copying it, as memory that `device` can read."""
        if device.type == "cpu":
            handle, num_bytes, num_words = self.how
            held = Segment.opened(handle).tensors({"slots": num_bytes, "bases": num_words})
            return Slab(device, held["slots"], held["bases"].view(-1, 2), is_lent=True)
        data, ways = (
            torch.empty(0, dtype=dtype, device=device) if how is None else wire.opened(how, device.index)
            for how, dtype in zip(self.how, (torch.uint8, torch.int64))
        )
        return Slab(device, data, ways.view(-1, 2), is_lent=True)


class _Lender:
    """Lends a slab to the other ranks of a cache. `slab` is the slab that was lent: the argument of `lend` if that is
    in GPU memory, otherwise a copy of the argument in a shared segment."""

    slab: Slab
    _segment: Segment  # other ranks open it through this process

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def lend(self, slab: Slab) -> list[_Loan | None]:
        """Returns a loan for each other rank. Each loan of GPU memory must be opened exactly once, because the memory
        cannot be freed before it has been opened."""
        if slab.device.type == "cuda":
            self.slab = slab
            return [
                _Loan(tuple(wire.lent(one) if one.numel() else None for one in (slab.bytes, slab.map)))
                if rank != self._rank
                else None
                for rank in range(self._size)
            ]
        self._segment, copies = Segment.of({"slots": slab.bytes, "bases": slab.map.view(-1)}, -1)
        self.slab = Slab(slab.device, copies["slots"], copies["bases"].view(-1, 2))
        segment = self._segment
        handle = SharedHandle(os.getpid(), segment.num_bytes, segment.file, segment.name, False, b"", b"")
        return [_Loan((handle, slab.bytes.numel(), slab.map.numel()))] * self._size
