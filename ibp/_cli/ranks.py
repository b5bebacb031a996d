"""Processes that torchrun has started, which do a command's work together."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

import ibp

from . import inputs
from .output import Failure


@contextlib.contextmanager
def group(arguments: argparse.Namespace) -> Iterator[dist.ProcessGroup | None]:
    """The group of all processes; None without --distributed. All but rank 0 are quiet meanwhile.

    Each process of a machine takes a GPU of its own, where there are as many; --device cpu takes none.
    """
    if not arguments.distributed:
        yield None
        return
    if not dist.is_available() or not dist.is_torchelastic_launched():
        raise Failure("--distributed wants processes that torchrun has started: torchrun ... -m ibp compress ...")
    if inputs.STREAM in (*arguments.inputs, arguments.output):
        raise Failure("--distributed wants files that all processes see, and not stdin or stdout (-)")
    dist.init_process_group("nccl" if _takes_gpu(arguments) else "gloo")
    try:
        if dist.get_rank() != 0:
            arguments.quiet, arguments.json, arguments.verify = True, False, False
        dist.barrier()  # no rank writes before all ranks have looked which files exist
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _takes_gpu(arguments: argparse.Namespace) -> bool:
    """Makes a GPU of its own this process's current one, where there is one for each process."""
    local_rank, per_machine = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if arguments.device == "cpu" or not ibp.cuda_is_available() or torch.cuda.device_count() < per_machine:
        return False
    torch.cuda.set_device(local_rank)
    return True
