"""Makes memory for tables that several processes map: `Segment`, the shared memory of a table, and `FileRows`, the rows
of a table in a mapped file.

Shared memory is an anonymous file (memfd_create). The system frees it when the last process that has it open ends, even
if that process crashes, so nothing is left to clean up. A process opens the memory as /proc/<pid>/fd/<number>, where
<pid> is a process that already has it open and <number> is that process's file descriptor.
"""

from __future__ import annotations

import fcntl
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from .. import _core
from .._common import wire
from .._common.arguments import whole_number
from .._common.process import ForkLock
from .._common.sequences import rounded_up
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
