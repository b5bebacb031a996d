"""Writes files that appear under their names only when they are complete. The library writes all its files in this way.

A file is written under a temporary name in the directory of its path, and renamed at the end. The temporary name is
derived from the path's name. The writer holds a lock on the temporary file, which the system releases when the writer's
process ends, however it ends. Therefore the next writer of the same path can distinguish a temporary file that is being
written from one that a killed process has left, and removes the latter.

The result depends on what is at the path:

- A regular file is replaced, and its permissions are kept. If a symbolic link leads to a regular file, the link is
  replaced.
- A device, a pipe, a socket or a directory is refused, even if the path is a symbolic link to it.
- If nothing is there, the new file gets those permissions that all its source files have (`like`). If it has no source
  files, it gets 0666 minus the umask.

`open_locked` is for files that several processes change in turn, and of which one may be removed while another waits.
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
from collections.abc import Callable, Iterable, Iterator
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
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Errors of file systems that do not support locks.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Errors if the disk is full or a limit of the user is reached.
_NO_PARENT = (errno.ENOENT, errno.ENOTDIR)  # Errors if the directory of the path does not exist.
_NEW_MODE = 0o666  # The system subtracts the umask.


def check_replaceable(path: Path) -> None:
    """Raises OSError unless a path is a regular file, is a symbolic link to a regular file or to nothing, or does not
    exist."""
    with contextlib.suppress(FileNotFoundError):
        leads_out = path.is_symlink() and os.readlink(path).startswith("/proc/")  # Like /dev/stdout.
        kind = stat.S_IFMT(path.stat().st_mode)
        if leads_out or kind != stat.S_IFREG:
            what = "a link to an open file of a process" if leads_out else KINDS.get(kind, "no file")
            raise OSError(f"{path} is {what}, which is not replaced; wanted the name of a regular file, or a new name")


class NewFile:
    """A file that gets its name when it is complete. When all is written, call `commit`; after that, or after an error,
    call `discard`.

    An interrupt at any moment leaves no file behind and no descriptor open. A descriptor belongs to an object as soon
    as the system call returns, so a file is discarded together with its object even if an interrupt comes before the
    caller's `try` block.

    Args:
        path: path of the file.
        like: the source files. A new file gets those permissions that all of them have.
        alone: whether to raise if another call is writing this path. If not, several calls may write the path at the
            same time, and the file of the last one to finish stays.
        replace: whether to replace an existing file.

    Attributes:
        file: the file object to write to.

    Raises:
        BlockingIOError: `alone` is set, and another call is writing this path.
        FileExistsError: a file exists, and `replace` is not set.
        OSError: what is at the path is not a regular file, or the file cannot be made. The message names the file, or
            its directory if that is missing.
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
            # Another call may have made the file before this call had the lock.
            if not replace and os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, "a file is there already", str(path))
        except BaseException:
            self.discard()
            raise

    def _opened(self, alone: bool) -> io.FileIO:
        """Opens the temporary file. Usually its name is derived from the path, and it is locked. If the file system
        does not support locks, or if another call has the lock, the file gets a random name and no lock.

        Raises:
            BlockingIOError: `alone` is set, and another call has the lock.
        """
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
        """Gives the file its permissions and its final name, and waits until the name is on disk. The caller must first
        call `os.fsync` on the file."""
        assert self.file is not None and self._temporary is not None
        if self._mode is not None and self._mode != stat.S_IMODE(os.fstat(self.file.fileno()).st_mode):
            os.fchmod(self.file.fileno(), self._mode)
        os.replace(self._temporary, self._path)
        self._temporary = None
        sync_directory(self._path.parent)

    def discard(self) -> None:
        """Removes the temporary file, if it exists, and closes it. After `commit`, it only closes the file."""
        if self.file is not None:
            if self._temporary is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary)
                self._temporary = None
            if not self.file.closed:  # An earlier call may have been interrupted after it closed the file.
                # Closing would not release the lock if a process that was forked meanwhile also has the descriptor.
                with contextlib.suppress(OSError):
                    fcntl.flock(self.file, fcntl.LOCK_UN)
                self.file.close()
            self.file = None
        elif self._temporary is not None:  # `_opened` was interrupted: the file may have been made.
            with contextlib.suppress(OSError):
                _remove_unless_locked(self._temporary)
            self._temporary = None

    def __del__(self) -> None:
        self.discard()


def _kept_mode(path: Path, like: Iterable[str | os.PathLike[str]]) -> int | None:
    """Returns the permissions of the file at a path. If there is no file, returns the permissions that all files in
    `like` have, or None if `like` is empty."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode) & 0o777
    modes = [stat.S_IMODE(os.stat(each).st_mode) & 0o777 for each in like]
    return functools.reduce(operator.and_, modes) if modes else None


def _new_file(path: Path, mode: int) -> io.FileIO:
    """Creates a file; raises FileExistsError if it exists. The system call is made inside the constructor of the file
    object. No line of Python runs between the two, so an interrupt cannot leave the descriptor open."""
    return io.FileIO(path, "x+", opener=functools.partial(os.open, mode=mode))


def _locked_file(path: Path, mode: int) -> io.FileIO:
    """Creates and locks a file. If a killed process left a file there, removes it first. Raises BlockingIOError if
    another call is writing the file there."""
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
        file.close()  # Another process removed the file before it was locked. Try again.


def _remove_unless_locked(path: Path) -> None:
    """Removes a temporary file, if it exists. Raises BlockingIOError if another call that is writing it holds the
    lock."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(f"{path} is no regular file; wanted it removed")
        with io.FileIO(path, "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Without locks, writers use random names, so nobody is writing the file under this name.
                if error.errno not in NO_LOCKS:
                    raise
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                os.unlink(path)


def open_locked(path: str | os.PathLike[str], mode: int, lock: Callable[[int], None]) -> int:
    """Opens and locks a file, and creates it if it does not exist. Returns its descriptor. If another process has
    removed the file before it is locked, a new file is made and locked. lock: a function that locks a descriptor."""
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


@contextlib.contextmanager
def errors_of(path: Path, num_bytes: int) -> Iterator[None]:
    """A context that completes an OSError of the block if the error names no file: adds the path and, if the disk is
    full, the number of bytes that the file needs.

    Args:
        num_bytes: the number of bytes that the file needs at least, for the message.
    """
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
    """Waits until the entries of a directory are on disk."""
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
    """Yields a temporary file to write to. When the block ends normally, the file is put on disk and renamed to `path`;
    if the block raises, the file is removed.

    Args:
        num_bytes: the number of bytes that the caller writes. It appears in the error if the disk is full.
        like, alone, replace: as in `NewFile`.
    """
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
    """Writes data to a file that appears under its name only when it is complete and on disk."""
    with replaced(path, len(data)) as file:
        file.write(data)
