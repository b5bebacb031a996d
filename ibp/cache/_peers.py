"""Shares a cache among the ranks of a process group on one machine. Each rank has one slab and reads the slabs of the
others.

Each rank fills its own slab and lends it to the others: GPU memory through CUDA IPC, which torch also uses to send
tensors between processes, and host memory as shared segments. A loan is the data that another rank needs to open the
slab. Each rank opens loans on its own device. The rank's kernels then read the slab over NVLink, and the rank needs no
CUDA context on the lender's GPU. Lent memory is freed when all borrowers have closed it, or when the lender ends.
Borrowers close the memory when the cache is refilled or freed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._common import wire
from .._common.wire import RankGroup, check_one_machine, machine, same_on_all
from .._machine.segments import Segment, SharedHandle
from .._rows.geometry import rows_of
from ._slabs import (
    MAX_SLABS,
    STATIC_WAYS,
    CacheState,
    Generation,
    Hotness,
    Slab,
    filled_slab,
    hottest_first,
    plan_slabs,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._row_cache import RowCache

_REFILL = "RowCache.refill"


def members_of(group: ProcessGroup) -> RankGroup:
    """Returns the ranks of a process group, whose slabs make up a cache. Slab r belongs to rank r. Raises RuntimeError
    or ValueError if there is no such group, or if the group is too large."""
    members = RankGroup(group)
    if members.size > MAX_SLABS:
        raise ValueError(f"the group has {members.size} ranks; a cache has at most {MAX_SLABS}")
    return members


def agree(members: RankGroup, cache: RowCache, set_up: Callable[[], None], has_hotness: bool) -> None:
    """Calls set_up() on each rank, and checks that the ranks can share a cache. A collective call. Raises what set_up()
    raises. Also raises ValueError if ranks give different tables or budgets, are on several machines, or have GPUs that
    cannot read each other's memory."""

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

    agreed = members.together("RowCache", work)
    machines, uuids, arguments = (list(of_ranks) for of_ranks in zip(*agreed))
    check_one_machine("a RowCache with a group", machines)
    same_on_all("RowCache", arguments)
    members.together("RowCache", lambda: _check_access(cache.devices[0], uuids))


def filled_by_all(members: RankGroup, state: CacheState, hotness: Hotness, budget_bytes: int) -> Generation:
    """Fills the slabs of all ranks and returns them as a new generation. A collective call. If one rank fails, the
    call raises an error on all ranks."""
    device, own = state.devices[0], members.rank
    plans: list[tuple[torch.Tensor, torch.Tensor]] = []
    slabs: dict[int, Slab] = {}
    segments: list[Segment | None] = []  # kept until all ranks have opened them

    def plan() -> dict[str, Any]:
        items = hottest_first(hotness, state.view.geometry.num_items)
        rows = rows_of(items, state.rows_per_item)
        found, copies = plan_slabs(state.view, rows, members.size, 0, budget_bytes, True)
        plans.extend(found)
        return {"hotness": _fingerprint(items), "whether maps are copied": copies}

    def fill() -> list[Any]:
        with state.beside():
            slab = filled_slab(state.view, *plans[own], own, device)
        slabs[own], loans, segment = _lent(slab, own, members.size)
        segments.append(segment)
        return loans

    def open_all() -> None:
        for rank in range(members.size):
            if rank != own:
                slabs[rank] = _opened(loans[rank][own], device)

    planned = members.together(_REFILL, plan)
    same_on_all(_REFILL, planned)
    loans = members.together(_REFILL, fill)
    members.together(_REFILL, open_all)
    in_order = tuple(slabs[rank] for rank in range(members.size))
    made = state.generation_of(in_order, STATIC_WAYS, 0, sum(rows.numel() for rows, _ in plans))
    if planned[0]["whether maps are copied"]:
        with state.beside():
            made.near_maps = {device: {number: slab.map.clone() for number, slab in made if slab.is_lent}}
    return made


def give_back(members: RankGroup) -> None:
    """Waits until all ranks have closed the memory of other ranks. Then lets torch free the memory that this rank has
    lent. A collective call."""
    members.together(_REFILL, lambda: None)
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


def _lent(slab: Slab, rank: int, size: int) -> tuple[Slab, list[Any], Segment | None]:
    """Lends the slab of this rank to the other ranks.

    Returns:
        (slab, loans, segment). slab: the slab that is lent: the given one if it is in GPU memory, otherwise a copy in a
        shared segment. loans: a loan for each rank, see `_opened`; None for this rank. Each loan of GPU memory must be
        opened exactly once, because the memory cannot be freed before it has been opened. segment: the segment, which
        must be kept until the other ranks have opened it through this process.
    """
    if slab.device.type == "cuda":
        loans = [
            None if other == rank else tuple(wire.lent(one) if one.numel() else None for one in (slab.bytes, slab.map))
            for other in range(size)
        ]
        return slab, loans, None
    segment, copies = Segment.of({"slots": slab.bytes, "bases": slab.map.view(-1)}, -1)
    handle = SharedHandle(os.getpid(), segment.num_bytes, segment.file, segment.name, False, b"", b"")
    copy = Slab(slab.device, copies["slots"], copies["bases"].view(-1, 2))
    return copy, [(handle, slab.bytes.numel(), slab.map.numel())] * size, segment


def _opened(loan: Any, device: torch.device) -> Slab:
    """Opens a slab that another process has lent, without copying it, as memory that `device` can read.

    loan: for a slab in host memory, (handle of the shared segment, size of the slab in bytes, number of words of its
    map). For a slab in GPU memory, (result of `wire.lent` for its bytes, result of `wire.lent` for its map); each
    result is None if the tensor is empty.
    """
    if device.type == "cpu":
        handle, num_bytes, num_words = loan
        held = Segment.opened(handle).tensors({"slots": num_bytes, "bases": num_words})
        return Slab(device, held["slots"], held["bases"].view(-1, 2), is_lent=True)
    data, ways = (
        torch.empty(0, dtype=dtype, device=device) if how is None else wire.opened(how, device.index)
        for how, dtype in zip(loan, (torch.uint8, torch.int64))
    )
    return Slab(device, data, ways.view(-1, 2), is_lent=True)
