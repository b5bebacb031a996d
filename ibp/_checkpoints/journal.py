"""Finished files of a set that is still being made, so that an interrupted call can be made again.

They lie in a directory beside the output, `.<name>.ibp-work`, each with a record, and with a plan of the whole. When
all are there, they are moved to their places, and the directory goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from .._files.writer import write_whole

_PLAN, _RECORD = "plan.json", ".done.json"


class Journal:
    """The directory of a set that is being made.

    Args:
        target: the output's path.
        plan: what the set is made of and how, as JSON has it: records of another plan are not used.
    """

    def __init__(self, target: Path, plan: dict[str, Any]) -> None:
        self.directory = target.with_name(f".{target.name}.ibp-work")
        self._home, self._plan = target.parent, plan

    @property
    def summary(self) -> str:
        """A short text that differs where the plan does."""
        return hashlib.sha256(json.dumps(self._plan, sort_keys=True).encode()).hexdigest()[:16]

    def open(self, restart: bool) -> None:
        """Makes the directory, empty unless it is of the same plan and `restart` is set."""
        if not (restart and self._is_same_plan()):
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self.directory / _PLAN, json.dumps(self._plan, sort_keys=True).encode())

    def _is_same_plan(self) -> bool:
        try:
            return json.loads((self.directory / _PLAN).read_bytes()) == self._plan
        except (OSError, ValueError):
            return False

    def finished(self, file: str) -> dict[str, Any] | None:
        """The record of a file that is whole and as it was written; None if there is none.

        Raises:
            FileNotFoundError: this process does not see the directory.
        """
        if not (self.directory / _PLAN).exists():
            raise FileNotFoundError(
                f"{self.directory} is not there; wanted an output on a file system that all ranks see"
            )
        try:
            record = json.loads((self.directory / f"{file}{_RECORD}").read_bytes())
            return record if _state(self._place(file)) == (record["size"], record["mtime_ns"]) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def finish(self, file: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Notes that a file in the directory is whole. Returns its record: the fields, and what tells the file."""
        size, mtime_ns = _state(self.directory / file)
        record = {**fields, "file": file, "size": size, "mtime_ns": mtime_ns}
        write_whole(self.directory / f"{file}{_RECORD}", json.dumps(record).encode())
        return record

    def _place(self, file: str) -> Path:
        """Where a file is: in the directory, or, if an earlier call came so far, in its own place."""
        inside = self.directory / file
        return inside if inside.exists() else self._home / file

    def move(self, file: str) -> None:
        """Moves a finished file to its place."""
        with contextlib.suppress(FileNotFoundError):  # it is there
            os.replace(self.directory / file, self._home / file)

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close_if_empty(self) -> None:
        """Removes the directory of a call in which no file was finished."""
        if not any(self.directory.glob(f"*{_RECORD}")):
            self.close()


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
