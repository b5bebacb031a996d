"""Keeps finished files of a set that is still being made, so that an interrupted call can be repeated.

They are in a directory beside the output, `.<name>.ibp-work`. Each has a record, and there is a plan of the whole set.
When all files are there, they are moved to their places, and the directory is removed. Only one call at a time has the
directory: it holds a lock on a file in it, which the system releases when the call's process ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

from .._common.whole_files import NO_LOCKS, write_whole
from .._files import open_locked
from ._report import TensorReport

_PLAN, RECORD, _LOCK = "plan.json", ".done.json", "lock"


def work_directory(target: Path) -> Path:
    """Returns the directory where files of a set wait until all of them are there. target: the output's path."""
    return target.with_name(f".{target.name}.ibp-work")


class Journal:
    """The directory of a set that is being made.

    target: the output's path. plan: what the set is made of and how, in the form for JSON. Records of another plan are
    not used.
    """

    def __init__(self, target: Path, plan: dict[str, Any]) -> None:
        self.directory = work_directory(target)
        self._lock: int | None = None
        self._target, self._home, self._plan = target, target.parent, plan

    def open(self, restart: bool) -> bool:
        """Makes the directory. It becomes empty unless it has the same plan and `restart` is set. Returns whether it
        had the same plan, left by an interrupted call. No other call has it until `release` is called.

        Raises:
            OSError: another call has it, or it is not a directory.
        """
        self._lock = self._locked()
        goes_on = self._is_same_plan()
        if not (restart and goes_on):
            self._empty()
        write_whole(self.directory / _PLAN, json.dumps(self._plan, sort_keys=True).encode())
        return goes_on

    def release(self) -> None:
        """Releases the directory, if this call has it, so that other calls can have it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _locked(self) -> int:
        """Takes the lock, and returns the descriptor that has it."""
        path = self.directory / _LOCK
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.directory.is_symlink():
                raise NotADirectoryError(f"{self.directory} is a symbolic link; wanted a directory, or nothing there")
            try:
                return open_locked(path, 0o666, self._take)
            except FileNotFoundError:  # the call that had finished with the directory has removed it meanwhile
                continue

    def _take(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another call writes {self._target} at this moment, and has {self.directory}; wanted another output, "
                "or to wait until that call has ended"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{self.directory}: the file system has no locks ({error.strerror}): wanted no other call that "
                "writes there meanwhile",
                stacklevel=2,
            )

    def _empty(self) -> None:
        """Removes everything except the lock."""
        for path in self.directory.iterdir():
            if path.name != _LOCK:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _is_same_plan(self) -> bool:
        try:
            return json.loads((self.directory / _PLAN).read_bytes()) == self._plan
        except (OSError, ValueError):
            return False

    def finished(self, file: str) -> dict[str, Any] | None:
        """Returns the record of a file that is whole and as it was written, or None if there is no such file."""
        try:
            record = json.loads((self.directory / f"{file}{RECORD}").read_bytes())
            for fields in record["tensors"]:
                TensorReport.from_dict(fields)
            is_own = record["file"] == file and {"names", "data_bytes"} <= record.keys()
            return record if is_own and self._place(file, record) is not None else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def path_of(self, file: str) -> Path:
        """Returns the path to which a file of the output is written. file: a path within the output's directory."""
        path = self.directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, file: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Notes that a file in the directory is whole. Returns its record: the fields, and what identifies the file."""
        found = self.path_of(file).lstat()
        record = {**fields, "file": file, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
        write_whole(self.directory / f"{file}{RECORD}", json.dumps(record).encode())
        return record

    def _place(self, file: str, record: dict[str, Any]) -> Path | None:
        """Returns where the file of a record is: in the directory, or, if an earlier call got so far, in its final
        place. Returns None if it is in neither, or has changed."""
        for path in (self.directory / file, self._home / file):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                told = found.st_size, found.st_mtime_ns
                return path if stat.S_ISREG(found.st_mode) and told == (record["size"], record["mtime_ns"]) else None
        return None

    def move(self, record: dict[str, Any]) -> None:
        """Moves the finished file of a record to its place, unless it is there already. Raises OSError if it is in
        neither place, or if another file has its name."""
        file = record["file"]
        place = self._place(file, record)
        if place is None:
            raise FileNotFoundError(
                f"{self.directory / file} is not what was written there: it has been removed or replaced; wanted the "
                "same call again, which writes it anew"
            )
        (self._home / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(place, self._home / file)

    def close(self) -> None:
        """Removes the directory. The lock goes last, because another call may begin without it."""
        with contextlib.suppress(OSError):
            self._empty()
            (self.directory / _LOCK).unlink()
            self.directory.rmdir()

    def close_if_empty(self) -> None:
        """Removes the directory of a call in which no file was finished."""
        if not any(self.directory.rglob(f"*{RECORD}")):
            self.close()
