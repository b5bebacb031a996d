"""Writes files that appear under their names when they are whole. Every file of the library is written in this way.

A file is written under a temporary name beside its path, and renamed. The temporary name is derived from the path's
name. Its writer holds a lock on it, which the system releases when the writer's process ends, in whatever way.
Therefore the next writer of the same path can distinguish a file that is being written from one that a killed process
has left, and removes the latter.

The result depends on what is at the path:

- A regular file is replaced, and its permissions are kept. If a symbolic link leads to a regular file, the link is
  replaced.
- A device, a pipe, a socket and a directory are refused, also if a symbolic link leads to one.
- A new file gets the permissions that all files have from which it is made; without such files, 0666 minus the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import operator
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from .. import _core

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems that have no locks
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors if there is no room, on the disk or for the user
_NO_PARENT = (errno.ENOENT, errno.ENOTDIR)
_NEW_MODE = 0o666  # minus the umask, like any new file


def check_replaceable(path: Path) -> None:
    """Raises OSError unless a path is a regular file, a symbolic link to one or to nothing, or nothing."""
    with contextlib.suppress(FileNotFoundError):
        leads_out = path.is_symlink() and os.readlink(path).startswith("/proc/")  # like /dev/stdout
        kind = stat.S_IFMT(path.stat().st_mode)
        if leads_out or kind != stat.S_IFREG:
            what = "a link to an open file of a process" if leads_out else KINDS.get(kind, "no file")
            raise OSError(f"{path} is {what}, which is not replaced; wanted the name of a regular file, or a new name")


class NewFile:
    """A file that gets its name when it is whole: call `commit`, and in any case `discard`.

    An interrupt at any moment leaves no file behind and no descriptor open. Objects hold the descriptors from the
    system call on, so that a file which no `finally` sees is discarded with its object.

    Args:
        path: path of the file.
        like: files from which it is made, whose permissions it gets if it is new.
        alone: whether to refuse if another call is writing this path. Otherwise the file of the last of several calls
            stays.
        replace: whether to replace an existing file.

    Attributes:
        file: the file object to write to.

    Raises:
        BlockingIOError: with `alone`, another call is writing this path.
        FileExistsError: a file exists, and is not to be replaced.
        OSError: what exists is not a regular file, or the file cannot be made. The message names the file, or its
            directory if that is missing.
    """

    file: io.FileIO | None = None
    _temporary: Path | None = None

    def __init__(
        self, path: Path, *, like: Iterable[str | os.PathLike[str]] = (), alone: bool = False, replace: bool = True
    ) -> None:
        check_replaceable(path)
        self._path, self._mode = path, _kept_mode(path, like)
        name = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        self._temporary = path.parent / f".ibp-{name}.tmp"
        try:
            self.file = self._opened(alone)
            if not replace and os.path.lexists(path):  # another call may have made it before this one had the lock
                raise FileExistsError(errno.EEXIST, "a file is there already", str(path))
        except BaseException:
            self.discard()
            raise

    def _opened(self, alone: bool) -> io.FileIO:
        """Opens the temporary file. It is named after the path and locked, or, if this is not possible, has a random
        name."""
        assert self._temporary is not None
        mode = 0o600 | (_NEW_MODE if self._mode is None else self._mode)
        try:
            try:
                return _locked_file(self._temporary, mode)
            except BlockingIOError:
                if alone:
                    raise BlockingIOError(
                        f"another call writes {self._path} at this moment; wanted another output, or to wait until "
                        "that call has ended"
                    ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                _remove_unless_locked(self._temporary)
            self._temporary = self._path.parent / f".ibp-{secrets.token_hex(8)}.tmp"
            return _new_file(self._temporary, mode)
        except OSError as error:
            if error.filename is None:
                raise
            if error.errno in _NO_PARENT:
                parent = str(self._path.parent)
                raise type(error)(error.errno, "there is no such directory", parent) from None
            raise type(error)(error.errno, error.strerror, str(self._path)) from None

    def commit(self) -> None:
        """Renames the file to its final name, after `os.fsync` has put its content on disk."""
        assert self.file is not None and self._temporary is not None
        if self._mode is not None and self._mode != stat.S_IMODE(os.fstat(self.file.fileno()).st_mode):
            os.fchmod(self.file.fileno(), self._mode)
        os.replace(self._temporary, self._path)
        self._temporary = None
        sync_directory(self._path.parent)

    def discard(self) -> None:
        """Removes the temporary file, if it exists, and closes it."""
        if self.file is not None:
            if self._temporary is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary)
                self._temporary = None
            if not self.file.closed:  # an earlier call may have been interrupted after it closed the file
                with contextlib.suppress(OSError):  # a process that was forked meanwhile also has the descriptor
                    fcntl.flock(self.file, fcntl.LOCK_UN)
                self.file.close()
            self.file = None
        elif self._temporary is not None:  # interrupted when it is not known whether the file was made
            with contextlib.suppress(OSError):
                _remove_unless_locked(self._temporary)
            self._temporary = None

    def __del__(self) -> None:
        self.discard()


def _kept_mode(path: Path, like: Iterable[str | os.PathLike[str]]) -> int | None:
    """Returns the permissions of the file at a path, else those that all of other files have, or None if there are
    no files."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode) & 0o777
    modes = [stat.S_IMODE(os.stat(each).st_mode) & 0o777 for each in like]
    return functools.reduce(operator.and_, modes) if modes else None


def _new_file(path: Path, mode: int) -> io.FileIO:
    """Creates a file that does not exist yet. No line of Python runs between the system call and the object that closes
    it."""
    return io.FileIO(path, "x+", opener=functools.partial(os.open, mode=mode))


def _locked_file(path: Path, mode: int) -> io.FileIO:
    """Returns a new file that is locked, in place of one that a killed process left. Raises BlockingIOError if a
    process is writing it."""
    while True:
        try:
            file = _new_file(path, mode)
        except FileExistsError:
            _remove_unless_locked(path)
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # another process removed it before it was locked


def _remove_unless_locked(path: Path) -> None:
    """Removes a temporary file, if it exists. Raises BlockingIOError if a process that is writing it has the lock."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(f"{path} is no regular file; wanted it removed")
        with io.FileIO(path, "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # without locks, nobody goes on writing under the name derived from the path
                if error.errno not in NO_LOCKS:
                    raise
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                os.unlink(path)


@contextlib.contextmanager
def errors_of(path: Path, num_bytes: int) -> Iterator[None]:
    """Adds the file's name to an OSError that names no file, and, for a full disk, how many bytes it needs at least."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        why = error.strerror
        if error.errno in _FULL:
            why = f"{why}: wanted room for at least {num_bytes:,} bytes"
        raise OSError(error.errno, why, str(path)) from error


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk."""
    _core.sync_directory(os.fsencode(path))


@contextlib.contextmanager
def replaced(
    path: Path,
    num_bytes: int,
    *,
    like: Iterable[str | os.PathLike[str]] = (),
    alone: bool = False,
    replace: bool = True,
) -> Iterator[IO[bytes]]:
    """Yields a temporary file beside `path`. If the context is left normally, it gets that name when it is whole and
    on disk; otherwise it is removed. An OSError names `path`, and for a full disk num_bytes, the bytes that are
    written. like, alone, replace: as in `NewFile`."""
    new = NewFile(path, like=like, alone=alone, replace=replace)
    try:
        assert new.file is not None
        with errors_of(path, num_bytes):
            with open(new.file.fileno(), "wb", closefd=False) as file:
                yield file
            os.fsync(new.file.fileno())
            new.commit()
    finally:
        new.discard()


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that appears under its name when it is whole and on disk."""
    with replaced(path, len(data)) as file:
        file.write(data)
