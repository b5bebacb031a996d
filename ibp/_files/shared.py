"""One copy of a table for all processes of a machine, where GPUs cannot read mapped files themselves: the first process
puts it into shared memory, and the others open that.

They meet at a small file in a directory of the user's own, which is locked meanwhile and names the processes that have
the memory. The memory itself has no name: it ends with the last of them, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .. import _core
from .._segments import Segment, SharedHandle
from .reader import OpenFile

_can_pin: dict[int, bool] = {}  # by the number of the device that a file is on


def can_pin(file: OpenFile) -> bool:
    """Whether GPUs read the mapping of a file, as far as its first page tells. Tried once for each file system."""
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
    """The shared memory of a key, and the tensors in it: made from these, or opened where another process has it.

    Args:
        key: the same for the same tensors.
        tensors: of a table.

    Raises:
        RuntimeError: the directory where processes meet is not the user's alone.
    """
    with _record_of(key) as (record, write):
        name, num_bytes, holders = record
        living = [holder for holder in holders if _has(holder, name)]
        for process, file in living:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                segment = Segment.opened(SharedHandle(process, num_bytes, file, name, False, b"", b""))
                write(_Record(name, num_bytes, [*living, (os.getpid(), segment.file)]))
                return segment, segment.tensors({part: tensor.numel() for part, tensor in tensors.items()})
        segment, copies = Segment.of(tensors, -1)
        write(_Record(segment.name, segment.num_bytes, [(os.getpid(), segment.file)]))
        return segment, copies


class _Record(NamedTuple):
    """What processes write down: the memory's name and size, and who has it, each a process and its descriptor."""

    name: str
    num_bytes: int
    holders: list[tuple[int, int]]

    @classmethod
    def of(cls, text: bytes) -> _Record:
        """Empty if the file is new, or whoever wrote it was killed."""
        try:
            name, num_bytes, holders = json.loads(text)
            return cls(str(name), int(num_bytes), [(int(process), int(file)) for process, file in holders])
        except (ValueError, TypeError):
            return cls("", 0, [])


def _has(holder: tuple[int, int], name: str) -> bool:
    """Whether a process has the memory of that name under that descriptor."""
    process, file = holder
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process}/fd/{file}") == f"/memfd:{name} (deleted)"
    return False


@contextlib.contextmanager
def _record_of(key: str) -> Iterator[tuple[_Record, Callable[[_Record], None]]]:
    """What processes have written down for a key, and a function that writes it anew. Locked until the context is
    left."""
    name = hashlib.sha256(f"{_core.version()} {key}".encode()).hexdigest()[:32]
    file = os.open(_folder() / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)

        def write(new: _Record) -> None:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(new).encode(), 0)

        yield _Record.of(os.pread(file, 1 << 20, 0)), write
    finally:
        os.close(file)


def _folder() -> Path:
    """A directory that is the user's alone."""
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
