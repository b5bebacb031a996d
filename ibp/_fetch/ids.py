"""Checks the ids that are passed to calls, and converts them to tensors of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .._common.graphs import cannot_map

ID_DTYPES = (torch.int64, torch.int32)  # Operations take ids of these dtypes. Ids of shorter dtypes are widened.
_WIDENED = (torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def tensor_of(values: Any, name: str) -> torch.Tensor:
    """Converts a sequence or an array of ids, or a mask, to a CPU tensor. Without values, the tensor's dtype is int64.
    Raises TypeError if the values do not form an array."""
    if not isinstance(values, (list, tuple, range, np.ndarray, np.generic)):
        raise TypeError(
            f"{name} is a {type(values).__name__}; wanted an integer tensor, a sequence of ints or a numpy array"
        )
    try:
        # An array is copied, because torch refuses negative strides and warns of read-only arrays.
        tensor = torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values, device="cpu")
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} is a {type(values).__name__} that is no array of integers: {error}") from error
    return tensor if tensor.numel() else tensor.to(torch.int64)


def checked_ids(ids: Any, name: str = "ids") -> torch.Tensor:
    """Converts ids to a tensor of int32 or int64. ids: a tensor, or a sequence or array that `tensor_of` accepts.
    Raises TypeError if the ids are not integers."""
    if isinstance(ids, torch.Tensor):
        refuse_mapped(ids)
    else:
        ids = tensor_of(ids, name)
    if ids.dtype in ID_DTYPES:
        return ids
    if ids.dtype in _WIDENED:
        return ids.to(torch.int64)
    raise TypeError(f"{name} has dtype {ids.dtype}; wanted torch.int32 or torch.int64 (shorter integers are widened)")


def refuse_mapped(ids: torch.Tensor) -> None:
    """Raises RuntimeError if the ids are inside torch.vmap, because their values cannot be read there."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(ids):
        raise cannot_map()


def list_of_ids(ids: Any, name: str = "ids") -> torch.Tensor:
    """Converts ids as `checked_ids` does. Raises ValueError unless the tensor has one dimension."""
    ids = checked_ids(ids, name)
    if ids.dim() != 1:
        raise ValueError(f"{name} has shape {list(ids.shape)}; wanted one dimension")
    return ids


def flat_ids(ids: Any) -> torch.Tensor:
    """Converts ids as `checked_ids` does, to a contiguous tensor of one dimension. A tensor of no dimension is one id.
    Raises ValueError if there is more than one dimension."""
    ids = checked_ids(ids)
    if ids.dim() > 1:
        raise ValueError(f"ids has shape {list(ids.shape)}; wanted one dimension")
    return ids.reshape(-1).contiguous()


def check_range(ids: torch.Tensor, num_items: int, least: int = 0, name: str = "ids") -> None:
    """Raises IndexError if an id on the CPU is not in [least, num_items). The message gives the first such id and its
    position."""
    if ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    if low.item() < least or high.item() >= num_items:
        position = int(((ids < least) | (ids >= num_items)).nonzero()[0])
        raise IndexError(f"{name}[{position}] is {int(ids[position])}; wanted {least} to {num_items - 1}")
