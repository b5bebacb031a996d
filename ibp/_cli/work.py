"""What commands share at work: device, threads, bars. Imports torch: commands import it where they run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

import ibp

from . import output

T = TypeVar("T")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """That of --device; else the current GPU if there is one, else the CPU. Failure for what is none."""
    if arguments.device is None:
        return torch.device("cuda", torch.cuda.current_device()) if ibp.cuda_is_available() else torch.device("cpu")
    try:
        device = torch.device(arguments.device)
    except RuntimeError:
        raise output.Failure(f"{arguments.device!r} is no device; wanted cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise output.Failure(f"device is {arguments.device!r}; wanted cpu, cuda or cuda:1")
    if device.type == "cuda" and not ibp.cuda_is_available():
        raise output.Failure(f"device is {arguments.device!r}, but there is no GPU that this build of ibp can use")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise output.Failure(f"device is {arguments.device!r}, but there are {torch.cuda.device_count()} GPUs")
    return device


@contextlib.contextmanager
def threads(jobs: int | None) -> Iterator[None]:
    """So many threads of the CPU meanwhile; None: as many as torch takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(jobs or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bar(arguments: argparse.Namespace, what: str, items: Iterable[T]) -> Iterable[T]:
    """The items, with a bar on stderr where one belongs there."""
    from tqdm import tqdm

    return tqdm(items, desc=what, leave=False, disable=not output.show_bars(arguments))
