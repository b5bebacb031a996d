"""How steps of optimizers are called: with a closure or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure returns, which computes the loss again, with gradients; None where there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
