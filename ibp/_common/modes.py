"""Decides what the library does inside of torch's modes, transforms and tracers.

`outside_of_modes` is a context in which the library makes the tensors that it keeps. In this context they are plain
tensors, even if the caller has activated a mode of torch. `outside_of_graphs` keeps functions out of the graphs of
torch's compiler. `cannot_record` and `cannot_map` create the errors that are raised under tracers and transforms that
cannot record ibp's operations.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def is_transformed() -> bool:
    """Returns whether the call is inside a transform of torch.func, such as `grad` or `vmap`."""
    return torch._C._are_functorch_transforms_active()


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Makes operations in the block return plain tensors, as outside of all modes.

    Otherwise they could return tensors of a transform of torch.func, which cannot be used after the transform; tensors
    of inference mode; or tensors of a mode that handles operations itself, such as FakeTensorMode. While torch.compile
    traces the code, the block has no effect."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    with torch.inference_mode(False):
        if is_transformed() or torch._C._len_torch_dispatch_stack():
            with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
                yield
        # Dispatch is disabled only if a transform or a mode is active: an interrupt before the end of that block would
        # leave it disabled for as long as the traceback lives.
        else:
            yield


def cannot_record(tracer: str, operation: str = "") -> RuntimeError:
    """Returns the error to raise under a tracer that cannot record ibp's operations. If the tracer went on, its graph
    would leave out the rows of tables, or an operation's writes to its arguments.

    Args:
        tracer: the name under which users know the tracer.
        operation: the operation that is being traced. "": what is traced is a function or a module.
    """
    here = f" (here ibp::{operation})" if operation else ""
    return RuntimeError(
        f"{tracer} cannot record ibp's operations{here}: give it plain tensors, as ibp.decompress(table) and "
        "ibp.nn.decompress(model) make them, or use torch.compile without fullgraph=True"
    )


def cannot_map(operation: str = "") -> RuntimeError:
    """Returns the error to raise inside torch.vmap, which cannot map operations that write to tensors passed to
    them."""
    here = f" (here ibp::{operation})" if operation else ""
    return RuntimeError(
        f"torch.vmap cannot map ibp's operations{here}: call them without torch.vmap, with all ids or vectors at once"
    )


_OUTSIDE = "ibp runs it outside of graphs: compile the code around it, or without fullgraph=True"
_NOT_EXPORTED = f"{_OUTSIDE}. {cannot_record('torch.export')}"


def outside_of_graphs(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Wraps a function so that torch.compile does not compile it: the graph ends before the call. torch.export cannot
    end its graph early, so there the call raises an error."""

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        # In torch 2.11, is_exporting() is also true while torch.compile traces.
        if torch.compiler.is_exporting():
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=_NOT_EXPORTED)
            else:
                raise cannot_record("torch.export")
        if not made:
            # Do not load torch's compiler unless something is compiling. Loading takes seconds, and if another thread
            # forked the process meanwhile, the child would wait forever for the module that is being loaded.
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=_OUTSIDE)
            made.append(torch.compiler.disable(function, reason=_OUTSIDE))
        return made[0](*args, **kwargs)

    made: list[Callable[_Given, _Result]] = []
    return call
