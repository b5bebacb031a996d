"""Makes tensors that are kept plain, in whichever mode of torch a call is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def is_transformed() -> bool:
    """Returns whether functions of torch.func, such as `grad` and `vmap`, are computing."""
    return torch._C._are_functorch_transforms_active()


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Makes operations compute plain tensors, as outside of all modes. Otherwise they could be tensors of a
    transform of torch.func, which end with it, of inference mode, or of a mode that takes operations itself, such as
    FakeTensorMode. While torch.compile traces the code, the block has no effect."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    with torch.inference_mode(False):
        if is_transformed() or torch._C._len_torch_dispatch_stack():
            with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
                yield
        else:  # an interrupt before the end of a block would leave dispatch disabled for as long as its traceback lives
            yield
