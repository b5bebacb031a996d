"""What the calls on tables share: where the work is done, what `out` must be, and how faults come back."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._machine import memory
from .._rows.faults import new_record
from .._rows.table import Table

CPU = torch.device("cpu")
# Dtypes of complex tensors, which can be conjugated views, and of their imaginary parts, which can be negated ones.
_VIEWED = {torch.complex32, torch.complex64, torch.complex128, torch.float16, torch.float32, torch.float64}
_MOST_OUTER_DIMS = 4  # IBP_MAX_OUT_DIMS


def produce(
    table: Table,
    shape: Sequence[int],
    target: torch.device,
    worker: torch.device,
    out: torch.Tensor | None,
    check: bool,
    run: Callable[[torch.Tensor, torch.Tensor], None],
    into: Callable[[torch.Tensor, int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Runs an operation, run(result, fault), that writes on the worker device, into out where that is there, and brings
    the result to the target.
    into: the same, run(result, outer_dims, fault), for an out of other strides, whose first outer_dims dimensions
        number items; None: there is none, and what run gives is copied."""
    if out is not None:
        check_out(out, shape, table.dtype)
    outer_dims = None
    if into is not None and out is not None and out.device == worker:
        outer_dims = spread_dims(out, table.item_bytes)
    if out is not None and out.device == worker and (outer_dims is not None or out.is_contiguous()):
        result = out
    else:
        result = memory.empty_tensor(shape, table.dtype, worker)

    def work(fault: torch.Tensor) -> None:
        if into is not None and outer_dims is not None:
            into(result, outer_dims, fault)
        else:
            run(result, fault)

    if torch.compiler.is_compiling():  # what goes wrong is raised by the next call outside, or by table.check()
        work(table._faults.on(worker))
    else:
        table._raise_pending(worker)
        fault = table._faults.on(worker) if worker.type == "cuda" else new_record(worker)
        work(fault)
        if worker.type == "cpu":
            table._raise_fault(fault)
        elif check:
            torch.cuda.current_stream(worker).synchronize()
            table._raise_pending(worker)
    if out is not None and out is not result:
        return out.copy_(result.view(out.shape))
    return result if worker == target else result.to(target)


def check_table(table: Any) -> None:
    if not isinstance(table, Table):
        why = getattr(table, "_why_no_rows", None)  # of an ibp.codecs.WholeTensor
        raise TypeError(why or f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")


def check_out(out: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError unless out is a tensor of a dtype, and of a shape or one with several dimensions
    in place of the first, that can be written to."""
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
    """Whether a shape is [..., *item], its first dimensions as many items as the one of wanted, [items, *item]."""
    num_outer = len(shape) - len(wanted) + 1
    if num_outer < 2 or not wanted or tuple(shape[num_outer:]) != tuple(wanted[1:]):
        return False
    return math.prod(shape[:num_outer]) == wanted[0]


def spread_dims(out: torch.Tensor, item_bytes: int) -> int | None:
    """How many first dimensions of a tensor number its contiguous items of `item_bytes`; None where the whole tensor is
    contiguous, the dimensions are too many, or there are no such items."""
    if torch.compiler.is_compiling() or out.is_contiguous() or out.numel() == 0:
        return None
    num_bytes, dims = out.element_size(), out.dim()
    while dims > 0 and num_bytes < item_bytes and out.stride(dims - 1) * out.element_size() == num_bytes:
        dims -= 1
        num_bytes *= out.shape[dims]
    is_spread = num_bytes == item_bytes and sum(size > 1 for size in out.shape[:dims]) <= _MOST_OUTER_DIMS
    return dims if is_spread and _is_apart(out, dims, item_bytes) else None


def _is_apart(out: torch.Tensor, dims: int, item_bytes: int) -> bool:
    """Whether no two items share memory, as can be told from their strides one by one."""
    end = item_bytes
    for stride, size in sorted(zip(out.stride()[:dims], out.shape[:dims])):
        if size > 1 and stride * out.element_size() < end:
            return False
        end += (size - 1) * stride * out.element_size()
    return True


def target_of(device: torch.device | str | int | None, out: torch.Tensor | None, default: torch.device) -> torch.device:
    """Where a result goes. default: the device of a tensor."""
    if out is None:
        return memory.canonical(default if device is None else device)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
    if device is None:
        return memory.canonical(out.device)
    if memory.canonical(device) != out.device:
        raise ValueError(f"device is {device}, but out is on {out.device}")
    return out.device


def worker_of(table: Table, target: torch.device) -> torch.device:
    """Which device decodes, unless the path has it otherwise."""
    if table.is_pinned() and (target.type == "cpu" or table._serves(target)):
        return target
    device = table.device
    return device if device.type == "cuda" else CPU


def sms_of(max_sms: int | None) -> int:
    """max_sms as the operations take it; 0: all."""
    if max_sms is None:
        return 0
    if isinstance(max_sms, bool) or not hasattr(max_sms, "__index__"):
        raise TypeError(f"max_sms is {max_sms!r}; wanted an int of at least 1, or None for all")
    max_sms = operator.index(max_sms)
    if max_sms < 1:
        raise ValueError(f"max_sms is {max_sms}; wanted at least 1, or None for all")
    return max_sms
