"""Implements `table[key]`, which equals x[key] for the tensor x that the table was made from. The rows that the key
needs are decoded, and torch indexes the decoded rows."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from .._rows.table import Table
from .calls import ID_DTYPES, checked_ids, refuse_mapped, tensor_of
from .gather import index_select, select
from .streaming import decode_items, decompress

_WANTED = "wanted an int, a slice, ..., None, or an integer or bool tensor, array or list"


def take(table: Table, key: Any) -> torch.Tensor:
    """Returns x[key] on the table's device, or on the device of the index tensor that selects rows."""
    if type(key) is torch.Tensor and key.dtype in ID_DTYPES and key.dim() == 1 and table.shape:
        return select(table, key, from_end=table.geometry.num_items)
    if not isinstance(key, tuple):
        return (
            _rows_at(table, _checked(key))[0]
            if key is not None and key is not Ellipsis and table.shape
            else _of_many(table, (_checked(key),))
        )
    return _of_many(table, tuple(_checked(element) for element in key))


def _of_many(table: Table, key: tuple[Any, ...]) -> torch.Tensor:
    place = _place_of_rows(key, len(table.shape))
    if place is None:
        return decompress(table, check=table.slots.is_cuda)[key]
    if not table.shape:
        raise IndexError("too many indices for a table of 0 dimensions")
    rows, index = _rows_at(table, key[place], is_alone=False)
    return rows[(*key[:place], index, *key[place + 1 :])]


def _place_of_rows(key: tuple[Any, ...], num_dims: int) -> int | None:
    """Returns the position in the key of the element that indexes dimension 0. Returns None if there is no such
    element; the key then needs all rows."""
    for place, element in enumerate(key):
        if element is Ellipsis:  # An ellipsis stands for the dimensions that the other elements do not index.
            if sum(map(_dims_of, key)) < num_dims:
                return None
        elif element is not None:
            return place
    return None


def _dims_of(element: Any) -> int:
    if element is None or element is Ellipsis:
        return 0
    return element.dim() if isinstance(element, torch.Tensor) and element.dtype == torch.bool else 1


def _checked(element: Any) -> Any:
    """Returns an element of a key, with arrays and lists converted to tensors. Raises TypeError if the element is not
    an index."""
    if element is None or element is Ellipsis or isinstance(element, slice):
        return element
    if isinstance(element, (list, tuple, range, np.ndarray)):
        element = tensor_of(element, "index")
    elif not isinstance(element, torch.Tensor):
        if isinstance(element, (bool, np.bool_)) or not hasattr(element, "__index__"):
            raise TypeError(f"index is a {type(element).__name__}; {_WANTED}")
        return operator.index(element)
    else:
        refuse_mapped(element)
    if element.dim() and element.dtype in (torch.bool, *ID_DTYPES):
        return element
    if element.dtype == torch.uint8:
        raise TypeError(
            "index has dtype torch.uint8, which torch takes for a mask: wanted torch.bool for a mask, torch.int64 for "
            "ids"
        )
    if element.dtype == torch.bool or element.is_floating_point() or element.is_complex():
        raise TypeError(f"index is a tensor of {element.dtype} {list(element.shape)}; {_WANTED}")
    return int(element) if element.dim() == 0 else checked_ids(element, "index")


def _rows_at(table: Table, index: Any, is_alone: bool = True) -> tuple[torch.Tensor, Any]:
    """Decodes the rows that an index along dimension 0 selects. Returns (rows, rest): rows[rest] equals table[index].

    Args:
        is_alone: whether the key has no other element. If so, the rows that are returned are already the result, and
            `rest` is None or a full slice.
    """
    num_items = table.geometry.num_items
    if isinstance(index, int):
        if not -num_items <= index < num_items:
            raise IndexError(f"index {index} is out of range; wanted {-num_items} to {num_items - 1}")
        item = decode_items(table, index % num_items, index % num_items + 1, check=table.slots.is_cuda)
        return (item[0], None) if is_alone else (item, 0)
    if isinstance(index, slice):
        return _slice_of(table, index), slice(None)
    if index.dtype == torch.bool:
        if index.shape != table.shape[: index.dim()]:
            raise IndexError(f"the mask has shape {list(index.shape)}; wanted {list(table.shape[: index.dim()])}")
        if index.dim() > 1:
            needed = index.flatten(1).any(1)
            rows, masks = index_select(table, needed.nonzero().reshape(-1)), index[needed]
            return (rows[masks], None) if is_alone else (rows, masks)
        index = index.nonzero().reshape(-1)
    flat = index.reshape(-1)
    rows = select(table, flat, from_end=num_items)
    if is_alone:
        return rows.reshape((*index.shape, *table.geometry.item_shape)), None
    return rows, torch.arange(flat.numel(), device=rows.device).reshape(index.shape)


def _slice_of(table: Table, key: slice) -> torch.Tensor:
    start, stop, step = key.indices(table.geometry.num_items)
    if step <= 0:
        raise ValueError(f"the slice has step {step}; wanted a step greater than zero")
    if step == 1:
        return decode_items(table, start, max(start, stop), check=table.slots.is_cuda)
    return index_select(table, torch.arange(start, max(start, stop), step, device="cpu"), device=table.device)
