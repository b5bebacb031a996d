"""Inputs that commands read as files. "-" as an input is stdin, and "-" as an output is stdout."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .output import Failure

STREAM = "-"


@contextlib.contextmanager
def local(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields the paths, with a temporary file that holds stdin in place of "-"."""
    if STREAM not in paths:
        yield list(paths)
        return
    if paths.count(STREAM) > 1:
        raise Failure("stdin (-) is given twice; wanted one input from there at most")
    if sys.stdin.isatty():
        raise Failure("stdin (-) is a terminal; wanted a file or a pipe")
    with tempfile.TemporaryDirectory(prefix="ibp-") as folder:
        held = Path(folder) / "stdin"
        with open(held, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield [str(held) if path == STREAM else path for path in paths]


@contextlib.contextmanager
def written(output: str, suffix: str) -> Iterator[str]:
    """Yields a path to write to. For "-" it is a temporary file, which is copied to stdout when the work is done."""
    if output != STREAM:
        yield output
        return
    if sys.stdout.isatty():
        raise Failure("stdout (-) is a terminal; wanted a file or a pipe")
    with tempfile.TemporaryDirectory(prefix="ibp-") as folder:
        held = os.path.join(folder, f"stdout{suffix}")
        yield held
        if not os.path.exists(held):
            raise Failure("the output is a set of files, which stdout (-) cannot hold; wanted a directory")
        with open(held, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
