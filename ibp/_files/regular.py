"""Opens files for reading if they are regular files. A pipe would keep its reader waiting, and a device has no end."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from .._common.whole_files import KINDS


def open_regular(path: str | os.PathLike[str]) -> int:
    """Returns a descriptor for reading of a regular file, or of the one that a symbolic link names. The call never
    blocks.

    Raises:
        OSError: the path names something else, such as a pipe, or cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # raised for a socket, and for a device without a driver
            _check_regular(path, os.stat(path))
        raise
    try:
        _check_regular(path, os.fstat(file))
        return file
    except BaseException:
        os.close(file)
        raise


def _check_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(f"{os.fspath(path)} is {KINDS.get(kind, 'no file')}; wanted a regular file")


def open_locked(path: str | os.PathLike[str], mode: int, lock: Callable[[int], None]) -> int:
    """Returns a descriptor of a file that `lock` has locked and that still has this name. If another process removed
    the file in between, a new file is made and locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            lock(file)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.lstat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
