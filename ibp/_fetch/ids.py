"""Ids as calls take them: tensors of integers, in range."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .._common.graphs import cannot_map

ID_DTYPES = (torch.int64, torch.int32)  # of ids as operations take them
_WIDENED = (torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def tensor_of(values: Any, name: str) -> torch.Tensor:
    """Ids or a mask, given as a sequence or an array, as a tensor; no values are int64."""
    if not isinstance(values, (list, tuple, range, np.ndarray, np.generic)):
        raise TypeError(
            f"{name} is a {type(values).__name__}; wanted an integer tensor, a sequence of ints or a numpy array"
        )
    try:
        # A copy of an array: of any strides, and writable.
        tensor = torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values, device="cpu")
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} is a {type(values).__name__} that is no array of integers: {error}") from error
    return tensor if tensor.numel() else tensor.to(torch.int64)


def checked_ids(ids: Any, name: str = "ids") -> torch.Tensor:
    """ids, a tensor or what `tensor_of` takes, as int32 or int64; TypeError if they are no integers."""
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
    """Raises RuntimeError for ids inside torch.vmap, which have no values that can be read."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(ids):
        raise cannot_map()


def list_of_ids(ids: Any, name: str = "ids") -> torch.Tensor:
    """The same; ValueError for other than one dimension."""
    ids = checked_ids(ids, name)
    if ids.dim() != 1:
        raise ValueError(f"{name} has shape {list(ids.shape)}; wanted one dimension")
    return ids


def flat_ids(ids: Any) -> torch.Tensor:
    """The same, contiguous; one id may be a tensor of no dimension."""
    ids = checked_ids(ids)
    if ids.dim() > 1:
        raise ValueError(f"ids has shape {list(ids.shape)}; wanted one dimension")
    return ids.reshape(-1).contiguous()


def check_range(ids: torch.Tensor, num_items: int, least: int = 0, name: str = "ids") -> None:
    """Raises IndexError, with its position, for the first of CPU ids that is not in [least, num_items)."""
    if ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    if low.item() < least or high.item() >= num_items:
        position = int(((ids < least) | (ids >= num_items)).nonzero()[0])
        raise IndexError(f"{name}[{position}] is {int(ids[position])}; wanted {least} to {num_items - 1}")
