"""Tables opened from what other processes share, and sent to them by multiprocessing."""

from __future__ import annotations

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch.multiprocessing  # noqa: F401 - teaches multiprocessing to send tensors

from .._common import ipc, wire
from .._machine.memory import check_memory
from .._machine.segments import Segment, SharedHandle
from .._tables.compressed_tensor import TENSORS, CompressedTensor


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
