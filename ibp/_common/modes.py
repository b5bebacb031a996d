"""`outside_of_modes`, a context in which the library makes the tensors that it keeps. In this context they are plain
tensors, even if the caller has activated a mode of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
