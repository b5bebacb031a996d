"""What the calls on tables share: where the work is done, what `out` must be, and how faults come back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _memory
from .._table import Table

CPU = torch.device("cpu")


def produce(
    table: Table,
    shape: Sequence[int],
    target: torch.device,
    worker: torch.device,
    out: torch.Tensor | None,
    check: bool,
    run: Callable[[torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """Runs an operation, run(result, fault), that writes on the worker device, into out where that is there, and brings
    the result to the target."""
    if out is not None:
        check_out(out, shape, table.dtype)
    result = out if out is not None and out.device == worker else torch.empty(shape, dtype=table.dtype, device=worker)
    if torch.compiler.is_compiling():  # what goes wrong is raised by the next call outside, or by table.check()
        run(result, table._fault_on(worker))
    else:
        table._raise_pending(worker)
        fault = table._fault_on(worker) if worker.type == "cuda" else torch.zeros(4, dtype=torch.int64)
        run(result, fault)
        if worker.type == "cpu":
            table._raise_fault(fault.tolist())
        elif check:
            torch.cuda.current_stream(worker).synchronize()
            table._raise_pending(worker)
    if out is not None and out is not result:
        return out.copy_(result)
    return result if worker == target else result.to(target)


def check_table(table: Any) -> None:
    if not isinstance(table, Table):
        raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")


def check_out(out: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}; wanted {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {list(out.shape)}; wanted {list(shape)}")
    if not out.is_contiguous():
        raise ValueError("out is not contiguous")
    if not torch.compiler.is_compiling() and (out.is_conj() or out.is_neg()):
        raise ValueError("out is a conjugated or negated view of other memory")
    if out.requires_grad:
        raise ValueError("out requires grad")


def target_of(device: torch.device | str | int | None, out: torch.Tensor | None, default: torch.device) -> torch.device:
    """Where a result goes. default: the device of a tensor."""
    if out is None:
        return _memory.canonical(default if device is None else device)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor")
    target = _memory.canonical(out.device)
    if device is not None and _memory.canonical(device) != target:
        raise ValueError(f"device is {device}, but out is on {out.device}")
    return target


def worker_of(table: Table, target: torch.device) -> torch.device:
    """Which device decodes, unless the path has it otherwise."""
    if table._is_pinned:
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
