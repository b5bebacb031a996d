"""What the operations on tables share: where the work is done, what `out` must be, and how faults come back."""

from __future__ import annotations

import torch

from .. import _memory
from .._table import CompressedTensor

_CPU = torch.device("cpu")


def produce(table, shape, target, worker, out, check, run):
    """Runs an operation, run(result, fault), that writes on the worker device, into out where that is there, and brings the result to the target."""
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


def check_table(table):
    if not isinstance(table, CompressedTensor):
        raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")


def check_out(out, shape, dtype):
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


def target_of(device, out, default):
    """Where a result goes. default: the device of a tensor."""
    if out is None:
        return _memory.canonical(default if device is None else device)
    target = _memory.canonical(out.device)
    if device is not None and _memory.canonical(device) != target:
        raise ValueError(f"device is {device}, but out is on {out.device}")
    return target


def worker_of(table, target):
    """Which device decodes."""
    if table.is_pinned:
        return target
    device = table.device
    return device if device.type == "cuda" else _CPU


def check_path_name(path, names):
    if path not in names:
        raise ValueError(f"path is {path!r}; wanted one of {', '.join(map(repr, names))}, or None")


def sms_of(max_sms):
    if max_sms is None:
        return 0
    if max_sms < 1:
        raise ValueError(f"max_sms is {max_sms}; wanted at least 1, or None for all")
    return int(max_sms)
