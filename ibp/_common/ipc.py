"""Lends memory of a GPU to another process by CUDA IPC, as torch does when it sends tensors. Unlike in torch, plain
values describe the memory, so no pickle is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_CLASS, _STORAGE, _DEVICE = 0, 4, 6  # Positions among the arguments of rebuild_cuda_tensor.
_CLASSES = torch.Tensor, torch.storage.TypedStorage


def lent(tensor: torch.Tensor) -> tuple:
    """Returns plain values that describe a CUDA tensor. One other process can pass them to `opened`, once. Until then,
    this process keeps the memory."""
    arguments = reduce_tensor(tensor.detach())[1]
    assert (arguments[_CLASS], arguments[_STORAGE]) == _CLASSES
    return (*arguments[_CLASS + 1 : _STORAGE], *arguments[_STORAGE + 1 :])


def opened(how: Any, device: int | None = None) -> torch.Tensor:
    """Opens a tensor that another process has lent.

    Args:
        how: the values that `lent` has returned in that process.
        device: the index of the tensor's GPU in this process. None: the same index as in the other process.

    Raises:
        ValueError: `how` does not have the form of a result of `lent`.
    """
    arguments = list(how) if isinstance(how, tuple) else []
    for place, kind in zip((_CLASS, _STORAGE), _CLASSES):
        arguments.insert(place, kind)
    if len(arguments) != rebuild_cuda_tensor.__code__.co_argcount:
        raise ValueError("what another process has lent is no memory of a GPU")
    if device is not None:
        arguments[_DEVICE] = device
    with torch.cuda.device(arguments[_DEVICE]):
        return rebuild_cuda_tensor(*arguments)
