"""Shares tables between processes: `share_table` and `open_shared`. Also registers the functions with which
torch.multiprocessing sends tables."""

from __future__ import annotations

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch.distributed as dist
import torch.multiprocessing  # noqa: F401 - This import enables multiprocessing to send tensors.

from .._common import group as _group
from .._common import wire
from .._machine.memory import check_memory
from .._machine.segments import Segment, SharedHandle
from .._rows.table import TENSORS
from .._tables.compressed_tensor import CompressedTensor


def share_table(
    table: CompressedTensor | None, group: dist.ProcessGroup | None = None, *, src: int = 0, memory: str | None = None
) -> CompressedTensor:
    """Shares one rank's table with all processes of a group, which must be on one machine. The memory of the machine
    then holds the table only once. A collective call.

    The table is moved to shared memory (see `CompressedTensor.share_memory_`). Each process pins that memory for its
    GPU when it first fetches rows.

    Example:
        >>> # on each rank of a group
        >>> is_first = torch.distributed.get_rank() == 0
        >>> table = ibp.compress(torch.ones(1000, 64), device="cpu", memory="host") if is_first else None
        >>> table = ibp.distributed.share_table(table)
        >>> table[17, 0]
        tensor(1.)

    Args:
        table: on rank src, a table in host memory. On the other ranks, None.
        group: a process group of torch.distributed, whose ranks are on one machine. None: the default group.
        src: the rank in the group that has the table.
        memory: "pinned": GPUs read rows directly from the memory. "host": they do not. None: as on rank src.

    Returns:
        On rank src, the table itself. On the other ranks, a table in the same memory.

    Raises:
        TypeError, ValueError: table is not a table or is on a GPU, or the ranks are on several machines or differ in
            src.
        RuntimeError: the memory cannot be opened, torch.distributed is not initialised, or another rank has failed.
    """
    members, what = _group.RankGroup(group), "share_table"

    def share() -> SharedHandle:
        if not isinstance(table, CompressedTensor):
            raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")
        if table.is_cuda:
            raise ValueError(f"table is on {table.device}; wanted one in host memory")
        return table.share()

    _group.check_one_machine(what, members.together(what, _group.machine))
    handle = members.from_rank(src, what, share)

    def open_it() -> CompressedTensor:
        if members.rank != src or table is None:
            return open_shared(handle, memory=memory)
        return table.pin_memory() if memory == "pinned" else table

    return members.on_all(what, open_it)  # Rank src keeps the table until all ranks have opened it.


def open_shared(handle: SharedHandle, *, memory: str | None = None) -> CompressedTensor:
    """Opens a table that another process shares. The table is in the memory of that process; it is not a copy.

    Repeated calls in a process share one mapping of the memory. If GPUs read rows from the memory, each process pins it
    when the process first uses the table on a GPU, or calls `pin_memory`.

    Example:
        >>> rows = torch.arange(1000.0)[:, None].repeat(1, 64)
        >>> table = ibp.compress(rows, device="cpu", memory="host")
        >>> shared = ibp.distributed.open_shared(table.share())  # in this process or another one
        >>> shared[17, 0]
        tensor(17.)

    Args:
        handle: the result of `table.share()` in a process on this machine. That process must belong to the same user
            and the same container, must still be running, and must still have the table. The handle of a table on a GPU
            can be opened only once, and not in the process that shares the table.
        memory: "pinned": GPUs read rows directly from the memory. "host": they do not. None: as in the process that
            shares the table.

    Returns:
        The table.

    Raises:
        TypeError: handle is not a handle.
        RuntimeError: the memory cannot be opened.
        ValueError: memory is not as described, or the handle's bytes were not made by `share`.
    """
    if not isinstance(handle, SharedHandle):
        raise TypeError(f"handle is a {type(handle).__name__}; wanted what table.share() returns")
    check_memory(memory, among=("pinned", "host"))
    return _opened(handle, None, handle._pin if memory is None else memory == "pinned")


def _opened(handle: SharedHandle, file: int | None, pin: bool) -> CompressedTensor:
    """Opens the table of a handle.

    Args:
        file: the descriptor of the file that is the shared memory. None: the file is opened through the process that
            shares the memory.
        pin: whether GPUs read rows directly from the memory.
    """
    state, held = _read(handle._fields), _read(handle._tensors)
    if held.keys() != set(TENSORS):
        raise ValueError(f"handle has {sorted(held, key=str)}; wanted {sorted(TENSORS)}, as table.share() gives it")
    table = CompressedTensor.__new__(CompressedTensor)
    if handle.num_bytes == 0:
        table.__setstate__({**state, **{name: wire.opened(how) for name, how in held.items()}})
        return table
    segment = Segment.opened(handle, file)
    segment.pin = segment.pin or pin
    tensors = segment.tensors(held)
    table.__setstate__({**state, **tensors})
    table._move(tensors, segment)
    return table


def _read(content: bytes) -> dict[str, Any]:
    """Decodes the bytes in a handle. Returns the dictionary that they hold. Raises ValueError if they do not hold a
    dictionary."""
    found = wire.read(content)
    if not isinstance(found, dict):
        raise ValueError(f"handle has a {type(found).__name__}; wanted what table.share() returns")
    return found


def _placed(content: bytes, device: str) -> CompressedTensor:
    """Returns the table whose state `content` holds, with the overflow in host memory and all other tensors on
    `device`."""
    state = _read(content)
    state.update({name: state[name].to(device) for name in TENSORS if name != "overflow"})
    table = CompressedTensor.__new__(CompressedTensor)
    table.__setstate__(state)
    return table


def _received(handle: SharedHandle, file: Any) -> CompressedTensor:
    """Opens a table that multiprocessing has sent to this process. file: a `DupFd`, or None."""
    return _opened(handle, file.detach() if file is not None else None, handle._pin)


def _reduced(table: CompressedTensor) -> Any:
    """Returns (a function, its arguments) with which the receiver rebuilds a table, as `__reduce__` does.

    If the table can be shared, its memory is shared, as torch shares the memory of tensors. Otherwise the bytes of the
    table are sent. The receiver of shared memory gets a descriptor of the memory's file, so that it can open the memory
    even if the sender no longer has the table."""
    if table._owner is not None:
        return table.__reduce_ex__(2)
    if table.spills_to_host:
        state = table.__getstate__()
        return _placed, (wire.written(state), str(table.device))
    handle = table.share()
    return _received, (handle, DupFd(handle._file) if handle.num_bytes else None)


ForkingPickler.register(CompressedTensor, _reduced)
