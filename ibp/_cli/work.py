"""What several commands need for their work: the device, the number of threads, progress bars, inputs and outputs. "-"
as an input is stdin, and "-" as an output is stdout."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ibp._common import arguments as _arguments
from ibp._common.process import tqdm
from ibp._files import file_system, is_url, path_text, paths
from ibp._machine import memory
from ibp.checkpoints import _inputs, _outputs

from . import output

STREAM = "-"
T = TypeVar("T")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Returns the device that --device names. Without --device, returns the current GPU, or the CPU if there is no GPU.
    Raises ValueError or Failure if there is no such device."""
    device = memory.usual(arguments.device)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise output.Failure(f"device is {arguments.device!r}, but there are {torch.cuda.device_count()} GPUs")
    return device


@contextlib.contextmanager
def threads(jobs: int | None) -> Iterator[None]:
    """Makes torch use `jobs` threads on the CPU inside the context. None: the number of threads is not changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(jobs or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bar(arguments: argparse.Namespace, what: str, items: Iterable[T]) -> Iterable[T]:
    """Returns an iterable of the items. Iterating over it shows a progress bar on stderr, if `output.show_bars` returns
    True."""
    return tqdm(items, desc=what, leave=False, disable=not output.show_bars(arguments))


# ---- inputs and outputs ----


@contextlib.contextmanager
def local(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields the paths. If one of them is "-", copies stdin to a temporary file, whose path replaces the "-"."""
    if STREAM not in paths:
        yield list(paths)
        return
    if paths.count(STREAM) > 1:
        raise output.Failure("stdin (-) is given twice; wanted one input from there at most")
    if sys.stdin.isatty():
        raise output.Failure("stdin (-) is a terminal; wanted a file or a pipe")
    with tempfile.TemporaryDirectory(prefix="ibp-") as folder:
        held = Path(folder) / "stdin"
        with open(held, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield [str(held) if path == STREAM else path for path in paths]


@contextlib.contextmanager
def written(target: str, suffix: str) -> Iterator[str]:
    """Yields a path to write to. If the target is "-", the path is that of a temporary file, which is copied to stdout
    at the end of the block. suffix: the suffix of the temporary file."""
    if target != STREAM:
        yield target
        return
    if sys.stdout.isatty():
        raise output.Failure("stdout (-) is a terminal; wanted a file or a pipe")
    with tempfile.TemporaryDirectory(prefix="ibp-") as folder:
        held = os.path.join(folder, f"stdout{suffix}")
        yield held
        if not os.path.exists(held):
            raise output.Failure("the output is a set of files, which stdout (-) cannot hold; wanted a directory")
        with open(held, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)


def may_write(arguments: argparse.Namespace, target: str, to_coded: bool | None = None) -> bool:
    """Returns whether to write the output. It is not written if it exists and --keep is given. Raises Failure if it
    exists and neither --force nor --keep is given.

    Args:
        to_coded: whether the command compresses (True) or decompresses (False) directories. None: it does neither.
    """
    if target == STREAM and arguments.json:
        raise output.Failure("--json and -o - both write to stdout; wanted one of them")
    if target == STREAM or arguments.force:
        return True
    with contextlib.ExitStack() as stack:
        conversion = None
        if to_coded is not None:
            conversion = _inputs.conversion_of(arguments.inputs, target, to_coded, stack)
        there = _outputs.already_there(target, _outputs.CODED_WEIGHTS if to_coded else paths.WEIGHTS, conversion)
    # If an interrupted run has left files, return True: `compress` continues that run, or reports the existing output.
    if there is None or (to_coded and unfinished_files(target)):
        return True
    if arguments.keep:
        if not arguments.quiet:
            output.warn(arguments, f"{there} is there already, and is kept")
        return False
    raise output.Failure(f"{there} is there already: --force replaces it, --keep leaves it as it is")


def output_of(arguments: argparse.Namespace, given: Sequence[str]) -> str:
    """Returns the path of the output for these inputs. The path ends in a slash if a directory is converted to a
    directory."""
    return arguments.output if arguments.output == STREAM else paths.output_of(list(given), arguments.output)


def unfinished_files(target: str) -> int:
    """Returns the number of files of a set that an interrupted run has finished and the next run will reuse."""
    if is_url(target):
        return 0
    return len(
        list(_outputs.work_directory(paths.target_of(target, _outputs.CODED_WEIGHTS)).rglob(f"*{_outputs.RECORD}"))
    )


def report_files(arguments: argparse.Namespace, document: dict[str, Any], files: list[str], *more: str) -> None:
    """Reports the written files, local ones or those at URLs, with their sizes, and then the sentences in `more`.
    Reports nothing if the output went to stdout."""
    if arguments.output == STREAM:
        return
    sizes = [size_of(file) for file in files]
    parts = [f"{output.shown(file)}: {output.show_size(size)}" for file, size in zip(files, sizes)]
    output.report(arguments, {**document, "files": files, "bytes": sum(sizes)}, *parts, *more)


def size_of(path: str) -> int:
    """Returns the size in bytes of a file that was written, locally or at a URL."""
    if not is_url(path):
        return os.path.getsize(path_text(path))
    filesystem, remote = file_system(path)
    return int(filesystem.size(remote))


def chosen(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Returns the names that --include and --exclude select. Raises ValueError if a pattern of --include matches no
    name."""
    return _arguments.chosen(names, arguments.include or None, arguments.exclude)
