"""What commands share while they work: device, threads, bars, inputs and outputs. "-" as an input is stdin, and "-" as
an output is stdout."""

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

from ibp._common.progress import tqdm
from ibp._files import INDEX_SUFFIX, file_system, is_url, path_text, paths
from ibp._machine import memory
from ibp.checkpoints import _model_files, _outputs, _source, _sources

from . import output

STREAM = "-"
T = TypeVar("T")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Returns the device of --device, else the current GPU if there is one, else the CPU. Raises ValueError or
    Failure if there is no such device."""
    device = memory.usual(arguments.device)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise output.Failure(f"device is {arguments.device!r}, but there are {torch.cuda.device_count()} GPUs")
    return device


@contextlib.contextmanager
def threads(jobs: int | None) -> Iterator[None]:
    """Makes torch use `jobs` threads of the CPU inside the context. None: the number is not changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(jobs or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bar(arguments: argparse.Namespace, what: str, items: Iterable[T]) -> Iterable[T]:
    """Returns the items, with a bar on stderr if bars are shown."""
    return tqdm(items, desc=what, leave=False, disable=not output.show_bars(arguments))


# ---- inputs and outputs ----


@contextlib.contextmanager
def local(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields the paths, with a temporary file that holds stdin in place of "-"."""
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
    """Yields a path to write to. For "-" it is a temporary file, which is copied to stdout when the work is done."""
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
    """Returns whether to write the output: not if it exists and is to be kept. Raises Failure if it exists and no
    option says what to do with it. to_coded: whether directories are compressed or decompressed. None: neither."""
    if target == STREAM and arguments.json:
        raise output.Failure("--json and -o - both write to stdout; wanted one of them")
    if target == STREAM or arguments.force:
        return True
    with contextlib.ExitStack() as stack:
        conversion = None
        if to_coded is not None:
            conversion = _model_files.conversion_of(arguments.inputs, target, to_coded, stack)
        there = _model_files.already_there(
            target, _model_files.CODED_WEIGHTS if to_coded else paths.WEIGHTS, conversion
        )
    if there is None or (to_coded and unfinished_files(target)):  # the call goes on, or reports what exists
        return True
    if arguments.keep:
        if not arguments.quiet:
            output.warn(arguments, f"{there} is there already, and is kept")
        return False
    raise output.Failure(f"{there} is there already: --force replaces it, --keep leaves it as it is")


def output_of(arguments: argparse.Namespace, given: Sequence[str]) -> str:
    """Returns the output for these inputs, with a slash if a directory becomes a directory."""
    return arguments.output if arguments.output == STREAM else paths.output_of(list(given), arguments.output)


def unfinished_files(target: str) -> int:
    """Returns how many files of a set an interrupted run has finished, which the next run reuses."""
    if is_url(target):
        return 0
    return len(
        list(_outputs.work_directory(paths.target_of(target, _model_files.CODED_WEIGHTS)).rglob(f"*{_outputs.RECORD}"))
    )


def has_other_format(path: str) -> bool:
    """Returns whether a file is one of tensors, but not a safetensors file. It looks at the file's bytes, or, for a
    URL, at the suffix."""
    if is_url(path):
        return paths.format_of_name(path) not in (None, "safetensors")
    if not os.path.isfile(path) or path.endswith(INDEX_SUFFIX):
        return False
    try:
        return _sources.format_of(path) != "safetensors"
    except _sources.SourceFormatError:  # ibp.open reports the fault
        return False


def files_to_verify(paths: Sequence[str]) -> list[str]:
    """Returns the paths to verify: the inputs, and for a directory each of its files of safetensors."""
    found = _sources.expand(paths)
    return [file for path in found for file in (_model_files.files_to_verify(path) if os.path.isdir(path) else [path])]


def report_files(arguments: argparse.Namespace, document: dict[str, Any], files: list[str], *more: str) -> None:
    """Reports the files that were written, local or at URLs, and further sentences, unless the files went to stdout."""
    if arguments.output == STREAM:
        return
    sizes = [size_of(file) for file in files]
    parts = [f"{output.shown(file)}: {output.show_size(size)}" for file, size in zip(files, sizes)]
    output.report(arguments, {**document, "files": files, "bytes": sum(sizes)}, *parts, *more)


def size_of(path: str) -> int:
    """Returns the bytes of a file that was written, here or at a URL."""
    if not is_url(path):
        return os.path.getsize(path_text(path))
    filesystem, remote = file_system(path)
    return int(filesystem.size(remote))


def chosen(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Returns the names that --include and --exclude leave. Raises ValueError if a pattern of --include matches no
    name."""
    return _source.chosen(names, arguments.include or None, arguments.exclude)
