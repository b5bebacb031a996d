"""Raises an interrupt, like Ctrl-C, at any moment of a call."""

import gc
import itertools
import os
import sys

import tqdm
from torch.utils._python_dispatch import TorchDispatchMode

import ibp
from helpers import assert_same_bits


class Interrupted(BaseException):
    pass


PACKAGE, TQDM = (os.path.dirname(module.__file__) for module in (ibp, tqdm))


def interrupt_at(moment, then, call):
    """Runs `call` and raises Interrupted at one moment of ibp's Python code. Moments are counted from 0; each is a call
    of a Python function, a line, or the return of a C function, where Python handles signals, too.

    If `then` is a number, raises Interrupted once more while the first exception propagates: at the point of this
    number, counted from 0. A point is a call, or the return of a C function. Returns (what `call` returns, or the table
    of the exception that leaves it; number of interrupts).
    """
    moments, points, raised = itertools.count(), itertools.count(), 0

    def tracer(frame, event, _):
        nonlocal raised
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event in ("call", "line") and next(moments) == moment:
            raised = 1
            raise Interrupted
        return tracer

    def profiler(frame, event, _):
        nonlocal raised
        path = frame.f_code.co_filename
        if raised == 0 and event == "c_return" and path.startswith(PACKAGE) and next(moments) == moment:
            raised = 1
            raise Interrupted
        if (
            raised == 1
            and then is not None
            and event in ("call", "c_call", "c_return")
            and path.startswith((PACKAGE, TQDM))
            and next(points) == then
        ):
            raised = 2
            raise Interrupted

    try:
        sys.setprofile(profiler)
        sys.settrace(tracer)
        return call(), raised
    except Interrupted as interruption:
        return getattr(interruption, "table", None), raised
    finally:
        sys.settrace(None)
        sys.setprofile(None)


def exempt_what_lives():
    """Exempts what lives now from garbage collection. Tests that collect garbage after each of many interrupts call
    this first: otherwise they look at all modules each time."""
    gc.collect()
    gc.freeze()


def assert_kept(table, x, before):
    """Asserts that x is as it was before, or that its table decompresses to it. Returns how many rows are compressed,
    or None if there is no table."""
    assert_same_bits(x if table is None else table.decompress(device="cpu"), before)
    return None if table is None else int((table.lengths != 0).sum())


class InterruptedOperations(TorchDispatchMode):
    """A mode that raises Interrupted before or after the torch operations with the given numbers. It also counts
    operations that run while an exception propagates."""

    def __init__(self, numbers, before):
        super().__init__()
        self.numbers, self.before, self.number = set(numbers), before, -1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        is_chosen = self.number in self.numbers
        if is_chosen and self.before:
            raise Interrupted
        result = function(*args, **(kwargs or {}))
        if is_chosen:
            raise Interrupted
        return result
