"""Optimizers that train the rows of compressed tables in modules such as `ibp.nn.Embedding` and `EmbeddingBag`.

ibp.optim.SGD, Adagrad, RowWiseAdagrad   change the rows that were looked up
ibp.optim.average_gradients              averages the gradients of such rows over the processes of a group
"""

from typing import NoReturn

from .._common.publishing import published
from .rows import SGD, Adagrad, RowWiseAdagrad, average_gradients

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "average_gradients"]

__dir__ = published(__name__)


def __getattr__(name: str) -> NoReturn:
    if name in ("Adam", "AdamW", "Usage"):
        raise AttributeError(
            f"ibp.optim.{name} was removed: use torch.optim.Adam or AdamW with fused=True, which give the same bits "
            "and load the same state_dict(); if their states take too much memory, shard them by FSDP, or use "
            "bitsandbytes' 8-bit optimizers"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
