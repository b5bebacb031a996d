"""Memory that several processes map: one copy of a table's bytes for all readers.

The memory is a file without a name (memfd_create): it ends with the last process that has it, in whatever way that
process ends, and leaves nothing to clean up. Another process opens it through a process that has it, as
/proc/<pid>/fd/<number>.
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
from .._common.locks import ForkLock
from .._common.rounding import rounded_up
from .memory import pinning

_ALIGNMENT = 256  # bytes, of each tensor in the memory
_pin_lock = ForkLock()  # several threads may ask at once to pin what they share
PART_DTYPES = {"slots": torch.uint8, "overflow": torch.uint8, "lengths": torch.uint16, "bases": torch.int64}


@wire.sent
@dataclass(frozen=True)
class SharedHandle:
    """The description by which another process opens a shared table. It consists of plain data, and can be pickled and
    sent in any way. `CompressedTensor.share` makes it, for `ibp.distributed.open_shared`.

    Example:
        >>> table = ibp.compress(torch.ones(1000, 64), device="cpu", memory="host")
        >>> handle = table.share()
        >>> handle.num_bytes >= table.nbytes
        True
        >>> ibp.distributed.open_shared(handle)[17, 0]  # in this process or another one
        tensor(1.)

    Attributes:
        process: number of the process that shares the table. The process must live until the handle has been opened.
        num_bytes: size in bytes of the shared memory; 0 for a table on a GPU.
    """

    process: int
    num_bytes: int
    _file: int = field(repr=False)
    _name: str = field(repr=False)
    _pin: bool = field(repr=False)
    _fields: bytes = field(repr=False)
    _tensors: bytes = field(repr=False)  # how each tensor is opened; in shared memory, its number of elements

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value).__name__ != each.type:
                raise TypeError(f"{each.name} of a SharedHandle is a {type(value).__name__}; wanted {each.type}")
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{each.name} of a SharedHandle is {value}; wanted 0 or more")


class Segment:
    """Shared memory of a table, mapped by this process once, for all tables that are opened from it here."""

    def __init__(self, name: str, file: int, num_bytes: int, is_new: bool, node: int = -1) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.file = file  # its descriptor in this process
        self.pin = False  # whether it is to be pinned, which is done when a GPU first fetches from it
        weakref.finalize(self, os.close, file)
        # the memory, which the tables' tensors keep alive
        self.pages = _core.SharedPages(file, num_bytes, is_new, node)

    @classmethod
    def new(cls, num_bytes: int, node: int) -> Segment:
        name = f"ibp-{uuid.uuid4().hex}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, num_bytes)
            # Seal it against shrinking, so that no process reads past its end.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(file)
            raise
        made = _segments[name] = cls(name, file, num_bytes, is_new=True, node=node)
        return made

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], node: int) -> tuple[Segment, dict[str, torch.Tensor]]:
        """Returns new memory on a NUMA node (negative: the caller's) with a copy of a table's tensors, and these
        copies."""
        num_bytes = sum(rounded_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors.values())
        segment = cls.new(max(num_bytes, _ALIGNMENT), node)
        copies = segment.tensors({name: tensor.numel() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            copies[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        return segment, copies

    @classmethod
    def opened(cls, handle: SharedHandle, file: int | None = None) -> Segment:
        """Opens the memory of a handle.

        file: a descriptor of the memory, which the segment owns from then on. None: it is opened through the handle's
        process.

        Raises:
            RuntimeError: it cannot be opened.
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
        """Returns a table's tensors in the memory. sizes: how many elements each has; 0 if it is not named. Raises
        TypeError or ValueError if a size is not an int, or if the memory has no room for it."""
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
    """The rows of a table in a mapped file, which must not be written to. Such a table has it in place of a `Segment`.

    pages: the maps of slots and of overflow, if there are any. pin: whether they are to be pinned, which is done when a
    GPU first fetches from them.
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
    """Returns a descriptor of what the handle's process has under the handle's number."""
    try:
        return os.open(f"/proc/{handle.process}/fd/{handle._file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"process {handle.process} does not share the table with this one ({error.strerror}): it must live until "
            "this one has opened the table, as the same user in the same container, and still have the table"
        ) from error


def _checked(file: int, handle: SharedHandle) -> int:
    """Returns the descriptor if it is that of the handle's memory, because another process with the same number may
    have anything there. Raises RuntimeError if it is not, or if it can be cut short, which would end its readers
    (SIGBUS)."""
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
