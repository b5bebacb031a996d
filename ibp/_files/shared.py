"""One copy of a table for all processes of a machine, for systems on which GPUs cannot read mapped files themselves.
The first process puts the table into shared memory, and the others open that memory.

The processes meet at a small file in a directory of the user's own. The file is locked while it is used, and names the
processes that have the memory. The last of them removes it. The file of processes that were killed is removed by the
next process that writes one. The memory itself has no name: it ends with the last process that has it, however that
process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .. import _core
from .._machine.segments import Segment, SharedHandle
from .reader import OpenFile
from .regular import open_locked

_can_pin: dict[int, bool] = {}  # by the number of the device that a file is on


def can_pin(file: OpenFile) -> bool:
    """Returns whether GPUs can read the mapping of a file, judged by its first page. It tries once for each file
    system."""
    device = os.fstat(file.fileno()).st_dev
    if device not in _can_pin:
        torch.cuda.init()
        try:
            file.pages(0, 1).pin()
            _can_pin[device] = True
        except RuntimeError:
            _can_pin[device] = False
    return _can_pin[device]


def segment_of(key: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Segment, dict[str, torch.Tensor]]:
    """Returns the shared memory with a key, and the tensors in it. The memory is made from the given tensors, or opened
    if another process has it.

    Args:
        key: the same for the same tensors.
        tensors: the tensors of a table.

    Raises:
        RuntimeError: the directory where processes meet does not belong to this user alone.
    """
    path = _folder() / hashlib.sha256(f"{_core.version()} {key}".encode()).hexdigest()[:32]
    with _locked(path) as (record, write):
        living = record.living()
        for process, file in living:
            with contextlib.suppress(RuntimeError):  # it may have ended meanwhile
                handle = SharedHandle(process, record.num_bytes, file, record.name, False, b"", b"")
                segment = Segment.opened(handle)
                own = os.getpid(), segment.file
                write(_Record(record.name, record.num_bytes, [*living, own]))
                weakref.finalize(segment, _leave, path, own)
                return segment, segment.tensors({part: tensor.numel() for part, tensor in tensors.items()})
        segment, copies = Segment.of(tensors, -1)
        own = os.getpid(), segment.file
        write(_Record(segment.name, segment.num_bytes, [own]))
        weakref.finalize(segment, _leave, path, own)
    for other in path.parent.iterdir():
        _leave(other)
    return segment, copies


class _Record(NamedTuple):
    """What processes write to the file: the memory's name and size, and its holders, each a process and its
    descriptor."""

    name: str
    num_bytes: int
    holders: list[tuple[int, int]]

    @classmethod
    def of(cls, text: bytes) -> _Record:
        """Reads a record. It is empty if the file is new, or if its writer was killed."""
        try:
            name, num_bytes, holders = json.loads(text)
            return cls(str(name), int(num_bytes), [(int(process), int(file)) for process, file in holders])
        except (ValueError, TypeError):
            return cls("", 0, [])

    def living(self) -> list[tuple[int, int]]:
        """Returns the holders that still have the memory."""
        return [holder for holder in self.holders if _has(holder, self.name)]


def _has(holder: tuple[int, int], name: str) -> bool:
    """Returns whether a process has the memory of that name under that descriptor."""
    process, file = holder
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process}/fd/{file}") == f"/memfd:{name} (deleted)"
    return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[_Record, Callable[[_Record], None]]]:
    """Yields the record in a file, and a function that writes a new one. The file is locked until the context is
    left."""
    file = open_locked(path, 0o600, lambda file: fcntl.flock(file, fcntl.LOCK_EX))
    try:

        def write(new: _Record) -> None:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(new).encode(), 0)

        yield _Record.of(os.pread(file, 1 << 20, 0)), write
    finally:
        os.close(file)


def _leave(path: Path, own: tuple[int, int] | None = None) -> None:
    """Removes the file if no process needs it and none has locked it. own: this process and its descriptor, which
    are not counted."""
    if own is not None and own[0] != os.getpid():  # in a forked child the holder is its parent
        return
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if all(holder == own for holder in _Record.of(file.read(1 << 20)).living()):
            path.unlink()


def _folder() -> Path:
    """Returns a directory that belongs to this user alone."""
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
