"""Makes memory for tables that several processes map: `Segment`, the shared memory of a table, and `FileRows`, the rows
of a table in a mapped file. `shared` describes a table for other processes by a `SharedHandle`, and `open_handle` opens
it there. `segment_of` finds or makes the one copy of a table that all processes of a user share.

Shared memory is an anonymous file (memfd_create). The system frees it when the last process that has it open ends, even
if that process crashes, so nothing is left to clean up. A process opens the memory as /proc/<pid>/fd/<number>, where
<pid> is a process that already has it open and <number> is that process's file descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from .. import _core
from .._common import wire
from .._common.arguments import whole_number
from .._common.process import ForkLock
from .._common.sequences import rounded_up
from .._common.whole_files import open_locked
from .memory import pinning

_ALIGNMENT = 256  # Each tensor begins at a multiple of this many bytes in the memory.
_pin_lock = ForkLock()  # Held while memory is pinned, because several threads may try to pin the same memory at once.
PART_DTYPES = {"slots": torch.uint8, "overflow": torch.uint8, "lengths": torch.uint16, "bases": torch.int64}


@wire.sent
@dataclass(frozen=True)
class SharedHandle:
    """A description with which another process opens a shared table. It consists of plain data, which can be pickled
    and sent by any means. `CompressedTensor.share` returns a handle, and `ibp.distributed.open_shared` takes it.

    Example:
        >>> table = ibp.compress(torch.ones(1000, 64), device="cpu", memory="host")
        >>> handle = table.share()
        >>> handle.num_bytes >= table.nbytes
        True
        >>> ibp.distributed.open_shared(handle)[17, 0]  # in this process or another one
        tensor(1.)

    Attributes:
        process: ID of the process that shares the table. The process must live until the handle has been opened.
        num_bytes: size in bytes of the shared memory; 0 for a table on a GPU.
    """

    process: int
    num_bytes: int
    _file: int = field(repr=False)
    _name: str = field(repr=False)
    _pin: bool = field(repr=False)
    _fields: bytes = field(repr=False)
    # For a table in shared memory: the number of elements of each tensor. For a table on a GPU: the data with which
    # torch opens each tensor.
    _tensors: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value).__name__ != each.type:
                raise TypeError(f"{each.name} of a SharedHandle is a {type(value).__name__}; wanted {each.type}")
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{each.name} of a SharedHandle is {value}; wanted 0 or more")


class Segment:
    """The shared memory of a table. A process maps it once for all tables that it opens from this memory.

    Attributes:
        name: the name of the memfd, by which it is recognised.
        num_bytes: size in bytes of the memory.
        file: the file descriptor of the memory in this process.
        pin: whether the memory is to be pinned. It is pinned when a GPU first fetches from it.
        pages: the mapped memory. The tensors of tables keep it alive.
    """

    def __init__(self, name: str, file: int, num_bytes: int, is_new: bool, node: int = -1) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.file = file
        self.pin = False
        weakref.finalize(self, os.close, file)
        self.pages = _core.SharedPages(file, num_bytes, is_new, node)

    @classmethod
    def new(cls, num_bytes: int, node: int) -> Segment:
        name = f"ibp-{uuid.uuid4().hex}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, num_bytes)
            # Seals prevent any process from changing the size, so that no process reads past the end.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(file)
            raise
        made = _segments[name] = cls(name, file, num_bytes, is_new=True, node=node)
        return made

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], node: int) -> tuple[Segment, dict[str, torch.Tensor]]:
        """Allocates shared memory and copies a table's tensors to it. Returns (the memory, the copies by name). node:
        the preferred NUMA node. Negative: the caller's node."""
        num_bytes = sum(rounded_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors.values())
        segment = cls.new(max(num_bytes, _ALIGNMENT), node)
        copies = segment.tensors({name: tensor.numel() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            copies[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        return segment, copies

    @classmethod
    def opened(cls, handle: SharedHandle, file: int | None = None) -> Segment:
        """Opens the memory that a handle describes, or returns its `Segment` if this process has already opened it.

        Args:
            file: a file descriptor of the memory. The call takes ownership of the descriptor. None: the call opens the
                memory through the process that shares it.

        Raises:
            RuntimeError: the memory cannot be opened.
        """
        found = _segments.get(handle._name)
        if found is None:
            file = _checked(_file_of(handle) if file is None else file, handle)
            found = _segments[handle._name] = cls(handle._name, file, handle.num_bytes, is_new=False)
        elif file is not None:
            os.close(file)
        return found

    @property
    def is_pinned(self) -> bool:
        return self.pages.is_pinned

    def pin_here(self) -> None:
        """Pins the memory for this process, once. Raises PinningError if there is no CUDA device, or if the system
        refuses."""
        with _pin_lock, pinning(f"{self.num_bytes:,} bytes of shared memory"):
            self.pages.pin()
        self.pin = True

    def tensors(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Returns a table's tensors over this memory, by name. sizes: the number of elements of each tensor; a tensor
        that is not in `sizes` is empty. Raises TypeError if a size is not an int, and ValueError if the memory is too
        small for the tensors."""
        made, start = {}, 0
        for name, dtype in PART_DTYPES.items():
            most = max(0, self.num_bytes - start) // dtype.itemsize
            count = whole_number(f"the size of {name} in shared memory", sizes.get(name, 0), 0, most)
            made[name] = torch.empty(0, dtype=dtype, device="cpu")
            if count:
                made[name] = torch.frombuffer(self.pages, dtype=dtype, count=count, offset=start)
            start += rounded_up(count * dtype.itemsize, _ALIGNMENT)
        return made


class FileRows:
    """The rows of a table in a mapped file, which must not be written to. A table that was loaded from a file has a
    `FileRows` in place of a `Segment`.

    Attributes:
        pages: the mapped pages of the slots, and those of the overflow. Slots or an overflow of 0 bytes have no entry.
        pin: whether the pages are to be pinned. They are pinned when a GPU first fetches from them.
    """

    def __init__(self, pages: Sequence[_core.FilePages], pin: bool) -> None:
        self.pages, self.pin = tuple(pages), pin

    @property
    def is_pinned(self) -> bool:
        return all(pages.is_pinned for pages in self.pages)

    def pin_here(self) -> None:
        """Pins the memory for this process, once. Raises PinningError if there is no CUDA device, or if the system
        refuses."""
        with _pin_lock, pinning("a mapped file"):
            for pages in self.pages:
                pages.pin()
        self.pin = True


_segments: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


def _file_of(handle: SharedHandle) -> int:
    """Opens the file that the handle's process has open under the handle's descriptor number. Returns a new descriptor
    of this file. If the process has ended, this may be any other file (see `_checked`). Raises RuntimeError if the file
    cannot be opened."""
    try:
        return os.open(f"/proc/{handle.process}/fd/{handle._file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"process {handle.process} does not share the table with this one ({error.strerror}): it must live until "
            "this one has opened the table, as the same user in the same container, and still have the table"
        ) from error


def _checked(file: int, handle: SharedHandle) -> int:
    """Checks that a file descriptor refers to the memory that a handle describes. If so, returns the descriptor.
    Otherwise closes the descriptor and raises RuntimeError.

    The descriptor may refer to another file: if the process of the handle has ended, a new process may have the same ID
    and have any file open under the same number. The memory must also be sealed against shrinking, because a process
    that reads a mapped file past its end is killed by SIGBUS."""
    try:
        is_it = os.readlink(f"/proc/self/fd/{file}") == f"/memfd:{handle._name} (deleted)"
        if not is_it or os.fstat(file).st_size != handle.num_bytes:
            raise RuntimeError(f"process {handle.process} has ended, or no longer has the table that it shared")
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise RuntimeError(
                f"process {handle.process} can still cut the memory that it shares (it lacks F_SEAL_SHRINK); wanted "
                "memory that table.share() has made"
            )
        return file
    except BaseException:
        os.close(file)
        raise


# ---- tables in handles ----


def shared(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], segment: Segment | None) -> SharedHandle:
    """Returns a handle of a table, which `open_handle` opens in another process.

    Args:
        state: the state of the table without its tensors.
        tensors: the tensors of the table, by name.
        segment: the shared memory that holds the tensors. None: they are on a GPU.
    """
    content = wire.written(state)
    if segment is None:
        loans = wire.written({name: wire.lent(tensor) for name, tensor in tensors.items()})
        return SharedHandle(os.getpid(), 0, 0, "", False, content, loans)
    sizes = wire.written({name: tensor.numel() for name, tensor in tensors.items()})
    return SharedHandle(os.getpid(), segment.num_bytes, segment.file, segment.name, segment.pin, content, sizes)


def open_handle(
    handle: SharedHandle, file: int | None = None, pin: bool | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor], Segment | None]:
    """Opens the memory of a table that another process shares. Returns the arguments of `shared`.

    Args:
        file: the descriptor of the file that is the shared memory. None: the file is opened through the process that
            shares the memory.
        pin: whether GPUs read rows directly from the memory. None: as in the process that shares it.

    Raises:
        RuntimeError: the memory cannot be opened.
        ValueError: the handle's bytes were not made by `shared`.
    """
    state, held = read_state(handle._fields), read_state(handle._tensors)
    if held.keys() != set(PART_DTYPES):
        raise ValueError(f"handle has {sorted(held, key=str)}; wanted {sorted(PART_DTYPES)}, as table.share() gives it")
    if handle.num_bytes == 0:
        return state, {name: wire.opened(how) for name, how in held.items()}, None
    segment = Segment.opened(handle, file)
    segment.pin = segment.pin or (handle._pin if pin is None else pin)
    return state, segment.tensors(held), segment


def read_state(content: bytes) -> dict[str, Any]:
    """Decodes the bytes in a handle. Returns the dictionary that they hold. Raises ValueError if they do not hold a
    dictionary."""
    found = wire.read(content)
    if not isinstance(found, dict):
        raise ValueError(f"handle has a {type(found).__name__}; wanted what table.share() returns")
    return found


# ---- one copy of a table for all processes of a user ----


def segment_of(key: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Segment, dict[str, torch.Tensor]]:
    """Returns the shared memory for a key, and the tensors in it. The first process makes the memory and copies the
    given tensors there; other processes open it. This is for systems on which mapped files cannot be pinned.

    A process finds the memory through a small file in a directory that belongs to the user alone. The file lists the
    processes that hold the memory. A process locks the file while it reads or changes the file, and the last process
    that holds the memory removes the file. If all holders were killed, the next process that makes such memory removes
    their file. The memory itself has no path: the system frees it when the last process that holds it ends, however it
    ends.

    Args:
        key: a string that is the same in all processes for the same tensors, and differs between different tensors.
        tensors: the tensors of a table, by the names of the parts.

    Raises:
        RuntimeError: the directory of these files cannot be made, or does not belong to this user alone.
    """
    path = _folder() / hashlib.sha256(f"{_core.version()} {key}".encode()).hexdigest()[:32]
    with _locked(path) as file:
        living = _holders(os.pread(file, 1 << 20, 0))
        for handle in living:
            with contextlib.suppress(RuntimeError):  # The holder may have ended meanwhile.
                segment = Segment.opened(handle)
                _enter(segment, living, path, file)
                return segment, segment.tensors({part: tensor.numel() for part, tensor in tensors.items()})
        segment, copies = Segment.of(tensors, -1)
        _enter(segment, [], path, file)
    for other in path.parent.iterdir():
        _leave(other)
    return segment, copies


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yields the descriptor of a file, which is locked until the context is left."""
    file = open_locked(path, 0o600, lambda file: fcntl.flock(file, fcntl.LOCK_EX))
    try:
        yield file
    finally:
        os.close(file)


def _enter(segment: Segment, others: list[SharedHandle], path: Path, file: int) -> None:
    """Writes the processes that hold shared memory, which are the others and this one, to its file. The file is JSON:
    the memory's name, its size in bytes, and (process ID, descriptor of the memory in that process) for each holder.
    When this process releases the memory, calls `_leave`. file: the descriptor of the file, which is locked."""
    own = os.getpid(), segment.file
    holders = [*((other.process, other._file) for other in others), own]
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps([segment.name, segment.num_bytes, holders]).encode(), 0)
    weakref.finalize(segment, _leave, path, own)


def _holders(text: bytes) -> list[SharedHandle]:
    """Reads the content of a file, and returns a handle for each process named there that still holds the memory. The
    list is empty if the content is not valid, because the file is new or its writer was killed."""
    living = []
    with contextlib.suppress(ValueError, TypeError):
        name, num_bytes, holders = json.loads(text)
        for process, file in holders:
            with contextlib.suppress(OSError):  # There is no such process or descriptor.
                if os.readlink(f"/proc/{process}/fd/{file}") == f"/memfd:{name} (deleted)":
                    living.append(SharedHandle(process, num_bytes, file, name, False, b"", b""))
    return living


def _leave(path: Path, own: tuple[int, int] | None = None) -> None:
    """Removes the file of shared memory, unless a process holds the memory or has locked the file. own: the entry of
    this process in the file, if the process is releasing the memory; the entry is then ignored. In a forked child, the
    function does nothing."""
    if own is not None and own[0] != os.getpid():  # In a forked child: the holder is the parent.
        return
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if all((holder.process, holder._file) == own for holder in _holders(file.read(1 << 20))):
            path.unlink()


def _folder() -> Path:
    """Returns a directory that belongs to this user alone. Makes the directory if it does not exist. Raises
    RuntimeError if the directory cannot be made, or if other users have access to it."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    folder = (own if own.is_absolute() and own.is_dir() else Path(tempfile.gettempdir())) / f"ibp-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise RuntimeError(f"{folder}, where processes meet, cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RuntimeError(f"{folder} is not a directory of this user alone, where processes meet to share tables")
    return folder
