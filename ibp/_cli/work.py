"""What commands share at work: device, threads, bars. Imports torch: commands import it where they run."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import ibp
from ibp._common.progress import tqdm
from ibp._files import paths
from ibp._files.paths import file_system, is_url, path_text
from ibp._files.sets import INDEX_SUFFIX
from ibp._machine import memory
from ibp.checkpoints import _journal, _model_files, _sources
from ibp.checkpoints import _source as source_names

from . import inputs, output

T = TypeVar("T")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """The device of --device; else the current GPU if there is one, else the CPU. ValueError, Failure: there is no such
    device."""
    device = memory.usual(arguments.device)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise output.Failure(f"device is {arguments.device!r}, but there are {torch.cuda.device_count()} GPUs")
    return device


@contextlib.contextmanager
def threads(jobs: int | None) -> Iterator[None]:
    """Lets torch use `jobs` threads of the CPU inside the context; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(jobs or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bar(arguments: argparse.Namespace, what: str, items: Iterable[T]) -> Iterable[T]:
    """The items, with a bar on stderr where one belongs there."""
    return tqdm(items, desc=what, leave=False, disable=not output.show_bars(arguments))


# ---- inputs and outputs ----


def may_write(arguments: argparse.Namespace, target: str, to_coded: bool | None = None) -> bool:
    """Whether the output is to be written: not where it is there and is to be kept. Failure where it is there, and
    nothing says what becomes of it. to_coded: whether directories are compressed or decompressed; None: neither."""
    if target == inputs.STREAM and arguments.json:
        raise output.Failure("--json and -o - both write to stdout; wanted one of them")
    if target == inputs.STREAM or arguments.force:
        return True
    with contextlib.ExitStack() as stack:
        conversion = None
        if to_coded is not None:
            conversion = _model_files.conversion_of(arguments.inputs, target, to_coded, stack)
        there = _model_files.already_there(
            target, _model_files.CODED_WEIGHTS if to_coded else paths.WEIGHTS, conversion
        )
    if there is None or (to_coded and unfinished_files(target)):  # the call goes on, or says what is there
        return True
    if arguments.keep:
        output.note(arguments, f"{there} is there already, and is kept")
        return False
    raise output.Failure(f"{there} is there already: --force replaces it, --keep leaves it as it is")


def output_of(arguments: argparse.Namespace, given: Sequence[str]) -> str:
    """The output of these inputs: with a slash, where a directory becomes a directory."""
    return arguments.output if arguments.output == inputs.STREAM else paths.output_of(list(given), arguments.output)


def unfinished_files(target: str) -> int:
    """How many files of a set an interrupted run has finished, which its next one takes over."""
    if is_url(target):
        return 0
    return len(
        list(_journal.work_directory(paths.target_of(target, _model_files.CODED_WEIGHTS)).rglob(f"*{_journal.RECORD}"))
    )


def has_other_format(path: str) -> bool:
    """Whether a file is one of tensors, and none of safetensors: by its bytes, of a URL by its suffix."""
    if is_url(path):
        return paths.format_of_name(path) not in (None, "safetensors")
    if not os.path.isfile(path) or path.endswith(INDEX_SUFFIX):
        return False
    try:
        return _sources.format_of(path) != "safetensors"
    except _sources.SourceFormatError:  # ibp.open names the fault
        return False


def files_to_verify(paths: Sequence[str]) -> list[str]:
    """Returns the paths to verify: the inputs, and for a directory each of its files of safetensors."""
    found = _sources.expand(paths)
    return [file for path in found for file in (_model_files.files_to_verify(path) if os.path.isdir(path) else [path])]


def verify_inputs(paths: Sequence[str], bars: bool) -> int:
    """Compares the checksums of those files of ibp among the inputs that are on this machine; bytes compared."""
    total = 0
    for path in files_to_verify(paths):
        if not is_url(path) and not has_other_format(path):
            with ibp.open(path) as file:
                total += file.verify(progress=bars)
    return total


def report_files(arguments: argparse.Namespace, document: dict[str, Any], files: list[str], *more: str) -> None:
    """Reports files that were written, here or at URLs, and what else there is to say, unless they went to stdout."""
    if arguments.output == inputs.STREAM:
        return
    sizes = [size_of(file) for file in files]
    parts = [f"{output.shown(file)}: {output.show_size(size)}" for file, size in zip(files, sizes)]
    output.report(arguments, {**document, "files": files, "bytes": sum(sizes)}, *parts, *more)


def size_of(path: str) -> int:
    """Bytes of a file that was written, here or at a URL."""
    if not is_url(path):
        return os.path.getsize(path_text(path))
    filesystem, remote = file_system(path)
    return int(filesystem.size(remote))


def chosen(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The names that --include and --exclude leave. ValueError if an --include matches none."""
    return source_names.chosen(names, arguments.include or None, arguments.exclude)


def is_chosen(arguments: argparse.Namespace, name: str) -> bool:
    """Whether --include and --exclude leave a name."""
    return source_names.is_chosen(name, arguments.include or None, arguments.exclude)
