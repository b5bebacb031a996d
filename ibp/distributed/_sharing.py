"""Tables opened from what other processes share, and sent to them by multiprocessing."""

from __future__ import annotations

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch.distributed as dist
import torch.multiprocessing  # noqa: F401 - teaches multiprocessing to send tensors

from .._common import group as _group
from .._common import ipc, wire
from .._machine.memory import check_memory
from .._machine.segments import Segment, SharedHandle
from .._rows.table import TENSORS
from .._tables.compressed_tensor import CompressedTensor


def share_table(
    table: CompressedTensor | None, group: dist.ProcessGroup | None = None, *, src: int = 0, memory: str | None = None
) -> CompressedTensor:
    """Puts one rank's table in memory that all processes of a machine share, once for all. A collective call.

    The table is moved to shared memory (see `CompressedTensor.share_memory_`). Each process pins it for its GPU when
    it first fetches from it.

    Example:
        >>> # on each rank of a group
        >>> is_first = torch.distributed.get_rank() == 0
        >>> table = ibp.compress(torch.ones(1000, 64), device="cpu", memory="host") if is_first else None
        >>> table = ibp.distributed.share_table(table)
        >>> table[17, 0]
        tensor(1.)

    Args:
        table: in host memory, on rank src; other ranks give None.
        group: a process group of torch.distributed, all on one machine; None: the default group.
        src: the rank in the group that has the table.
        memory: "pinned": GPUs read rows from the memory themselves; "host": they do not; None: as on rank src.

    Returns:
        The table of rank src: on that rank itself, on the others a table in the same memory.

    Raises:
        TypeError, ValueError: table is none, or on a GPU; ranks are on several machines or differ in src.
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

    return members.on_all(what, open_it)  # rank src keeps the table until all have opened it


def open_shared(handle: SharedHandle, *, memory: str | None = None) -> CompressedTensor:
    """The table that another process shares: its memory, mapped here, not a copy.

    Several calls in a process map the memory once. Where GPUs fetch rows from it, a process pins it for itself, once,
    when it first uses a GPU for it or calls `pin_memory`.

    Example:
        >>> rows = torch.arange(1000.0)[:, None].repeat(1, 64)
        >>> table = ibp.compress(rows, device="cpu", memory="host")
        >>> shared = ibp.distributed.open_shared(table.share())  # in this process or another one
        >>> shared[17, 0]
        tensor(17.)

    Args:
        handle: from `table.share()` of a process of this machine, of the same user and in the same container, that
            lives and has the table. A handle of a table on a GPU is opened once, and in another process.
        memory: "pinned": GPUs read rows from the memory themselves; "host": not; None: as in the process that shares
            it.

    Raises:
        TypeError: handle is none.
        RuntimeError: the memory cannot be opened.
        ValueError: memory is none, or the handle's bytes are none that `share` made.
    """
    if not isinstance(handle, SharedHandle):
        raise TypeError(f"handle is a {type(handle).__name__}; wanted what table.share() returns")
    check_memory(memory, among=("pinned", "host"))
    return _opened(handle, None, handle._pin if memory is None else memory == "pinned")


def _opened(handle: SharedHandle, file: int | None, pin: bool) -> CompressedTensor:
    state, held = _read(handle._fields), _read(handle._tensors)
    if held.keys() != set(TENSORS):
        raise ValueError(f"handle has {sorted(held, key=str)}; wanted {sorted(TENSORS)}, as table.share() gives it")
    table = CompressedTensor.__new__(CompressedTensor)
    if handle.num_bytes == 0:
        table.__setstate__({**state, **{name: ipc.opened(how) for name, how in held.items()}})
        return table
    segment = Segment.opened(handle, file)
    segment.pin = segment.pin or pin
    tensors = segment.tensors(held)
    table.__setstate__({**state, **tensors})
    table._move(tensors, segment)
    return table


def _read(content: bytes) -> dict[str, Any]:
    found = wire.read(content)
    if not isinstance(found, dict):
        raise ValueError(f"handle has a {type(found).__name__}; wanted what table.share() returns")
    return found


def _placed(content: bytes, device: str) -> CompressedTensor:
    """A table whose overflow is in host memory, from its state; all else is on the device."""
    state = _read(content)
    state.update({name: state[name].to(device) for name in TENSORS if name != "overflow"})
    table = CompressedTensor.__new__(CompressedTensor)
    table.__setstate__(state)
    return table


def _received(handle: SharedHandle, file: Any) -> CompressedTensor:
    return _opened(handle, file.detach() if file is not None else None, handle._pin)


def _reduced(table: CompressedTensor) -> Any:
    """How multiprocessing sends a table: what can be shared is, as torch does for tensors; of others the bytes. The
    receiver is given the memory itself, so that it is there also where the sender no longer has the table."""
    if table._owner is not None:
        return table.__reduce_ex__(2)
    if table.spills_to_host:
        state = table.__getstate__()
        return _placed, (wire.written(state), str(table.device))
    handle = table.share()
    return _received, (handle, DupFd(handle._file) if handle.num_bytes else None)


ForkingPickler.register(CompressedTensor, _reduced)
