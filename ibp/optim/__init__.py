"""Optimizers over compressed memory.

ibp.optim.AdamW, Adam                    torch's, for any parameters, with states that are kept coded
ibp.optim.SGD, Adagrad, RowWiseAdagrad   of rows that train: of `ibp.nn.Embedding`, `EmbeddingBag` and others
ibp.optim.average_gradients              of such rows, over the processes of a group
"""

from .._common.publishing import published
from ._states import Usage
from .adamw import Adam, AdamW
from .rows import SGD, Adagrad, RowWiseAdagrad, average_gradients

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "RowWiseAdagrad", "Usage", "average_gradients"]

__dir__ = published(__name__)
