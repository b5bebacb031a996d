"""Memory of a GPU that another process opens, by CUDA IPC as torch sends tensors, told in plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_CLASS, _STORAGE, _DEVICE = 0, 4, 6  # among the arguments of rebuild_cuda_tensor
_CLASSES = torch.Tensor, torch.storage.TypedStorage


def lent(tensor: torch.Tensor) -> tuple:
    """How one other process opens a CUDA tensor, once: the tensor is kept until then."""
    arguments = reduce_tensor(tensor.detach())[1]
    assert (arguments[_CLASS], arguments[_STORAGE]) == _CLASSES
    return (*arguments[_CLASS + 1 : _STORAGE], *arguments[_STORAGE + 1 :])


def opened(how: Any, device: int | None = None) -> torch.Tensor:
    """The tensor that another process has lent, on the device of its number here; None: that of the lender. ValueError:
    how is not what `lent` returns."""
    arguments = list(how) if isinstance(how, tuple) else []
    for place, kind in zip((_CLASS, _STORAGE), _CLASSES):
        arguments.insert(place, kind)
    if len(arguments) != rebuild_cuda_tensor.__code__.co_argcount:
        raise ValueError("what another process has lent is no memory of a GPU")
    if device is not None:
        arguments[_DEVICE] = device
    with torch.cuda.device(arguments[_DEVICE]):
        return rebuild_cuda_tensor(*arguments)
