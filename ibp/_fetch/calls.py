"""Defines what all calls on tables share.

`index_select`, `decompress` and `embedding_bag` accept not only tables, but any object that implements the required
protocol. The first part of the file defines these protocols. The second part checks arguments such as `out`, and finds
the device of the result. The third part checks ids, and converts them to tensors of integers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from .._common.modes import cannot_map
from .._machine import memory
from .._rows.handle import Handle
from .._rows.table import Table

# Dtypes of tensors that can be conjugated or negated views: complex dtypes, and the dtypes of their imaginary parts.
_VIEWED = {torch.complex32, torch.complex64, torch.complex128, torch.float16, torch.float32, torch.float64}
# The orders in which `take` fetches items on a GPU (enum Way of csrc/bindings/torch_take_ops.cpp). IN_ORDER is the
# order of the ids, BUCKETED the order of windows of the table, and with PLANNED the table's plan chooses one of them.
PLANNED, IN_ORDER, BUCKETED = 0, 1, 2
ID_DTYPES = (torch.int64, torch.int32)  # Operations take ids of these dtypes. Ids of shorter dtypes are widened.
_WIDENED = (torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)

Device = torch.device | str | int
Ids = torch.Tensor | Sequence[int] | np.ndarray


# ---- objects that calls accept ----


@runtime_checkable
class Rows(Protocol):
    """A protocol of objects whose items are fetched by their ids: tables, caches of rows, sharded tables."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def index_select(
        self,
        ids: Ids,
        *,
        device: Device | None = None,
        out: torch.Tensor | None = None,
        check: bool = False,
        max_sms: int | None = None,
    ) -> torch.Tensor: ...


@runtime_checkable
class Decodable(Protocol):
    """A protocol of objects that are decoded as a whole: tables, caches of rows, tensors of general codecs."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def decompress(self, *, device: Device | None = None, out: torch.Tensor | None = None) -> torch.Tensor: ...


@runtime_checkable
class CachedRows(Rows, Protocol):
    """A protocol of tables some of whose rows are cached in memory nearer to the device that requests them.

    Attributes:
        view: the table from which rows that are not cached are read.
    """

    @property
    def view(self) -> Table: ...

    def flush(self) -> None:
        """Writes changed rows of the cache back to the table."""

    def serves(self, device: torch.device) -> bool:
        """Returns whether the cache can look up and decode rows on a device."""

    def found(
        self, ids: torch.Tensor
    ) -> AbstractContextManager[tuple[Handle, torch.Tensor | None, Sequence[torch.Tensor]]]:
        """Returns a context that looks up the rows of ids in the cache. Inside the `with` block, operations on the
        current stream may read these rows.

        The context yields (handle of the table, tensor whose entry for each row says where the row is held, slabs of
        memory that hold cached rows).
        """


# ---- arguments, and devices ----


def check_table(table: Any) -> None:
    if not isinstance(table, Table):
        why = getattr(table, "_why_no_rows", None)  # The attribute of an ibp.codecs.WholeTensor.
        hint = ": ibp.load(path) reads those of a file" if isinstance(table, (str, os.PathLike)) else ""
        raise TypeError(why or f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor{hint}")


def check_path(path: str, paths: Collection[str]) -> None:
    """Raises ValueError unless `path` is one of the paths in `paths`."""
    if path not in paths:
        raise ValueError(f"path is {path!r}; wanted one of {', '.join(map(repr, paths))}, or None")


def check_out(out: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError unless a result of this shape and dtype can be written to out. In place of the
    first dimension, out may have several dimensions whose product is the size of that dimension."""
    if type(out) is not torch.Tensor or out.dtype != dtype or out.shape != shape or out.requires_grad:
        _check_unusual(out, shape, dtype)
    if dtype in _VIEWED and not torch.compiler.is_compiling() and (out.is_conj() or out.is_neg()):
        raise ValueError("out is a conjugated or negated view of other memory")


def _check_unusual(out: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}; wanted {dtype}")
    if out.shape != shape and not _numbers_items(out.shape, shape):
        raise ValueError(f"out has shape {list(out.shape)}; wanted {list(shape)}")
    if out.requires_grad:
        raise ValueError("out requires grad")


def _numbers_items(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Returns whether a shape has several dimensions with the product wanted[0], followed by the dimensions
    wanted[1:]."""
    num_outer = len(shape) - len(wanted) + 1
    if num_outer < 2 or not wanted or tuple(shape[num_outer:]) != tuple(wanted[1:]):
        return False
    return math.prod(shape[:num_outer]) == wanted[0]


def refusal(error: RuntimeError) -> RuntimeError:
    """Converts the error of an operation to the class that torch's own functions raise: torch.OutOfMemoryError if a GPU
    ran out of memory. Other errors are returned unchanged."""
    is_memory = "out of memory" in str(error) and torch.cuda.is_initialized()
    return torch.OutOfMemoryError(str(error)) if is_memory else error


def target_of(device: torch.device | str | int | None, out: torch.Tensor | None, default: torch.device) -> torch.device:
    """Returns the device of a result: `device`, the device of `out`, or `default` if the caller gives neither. Raises
    ValueError if `out` is not on `device`."""
    if out is None:
        return memory.canonical(default if device is None else device)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
    if device is None:
        return memory.canonical(out.device)
    if memory.canonical(device) != out.device:
        raise ValueError(f"device is {device}, but out is on {out.device}")
    return out.device


# ---- ids ----


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
