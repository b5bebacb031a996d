"""Modules over compressed tables. A table is moved, saved and loaded together with its module.

    ibp.nn.compress(model)                                            # every matrix and embedding of a model, in place
    ibp.nn.decompress(model)                                          # plain weights again
    embedding = ibp.nn.Embedding(ibp.compress(weight))                # fixed weights
    bags      = ibp.nn.EmbeddingBag(1_000_000, 64, mode="sum")        # trained by ibp.optim
    linear    = ibp.nn.Linear(ibp.compress(weight, layout="packed"), bias)

A table is not a torch.Tensor (docs/guide.md says why), so a module cannot hold it as a parameter or buffer. These
modules hold it as `weight`. `module.to()`, `cuda()`, `state_dict()`, `load_state_dict()`, `copy.deepcopy`, pickling and
torch.compile work as for other modules. `state_dict()` returns plain tensors on the CPU, and `coded_state_dict` returns
tables; `load_state_dict` accepts both, and compresses plain tensors. `parameters()` lists each table as a
`TableParameter` with the plain weight's shape and without a gradient, so torch's optimizers ignore it.
docs/embeddings.md says how rows are trained.
"""

from .._common.process import published
from ._collection import EmbeddingCollection, _Group, _Part
from ._compressing import ModelReport, compress, decompress
from ._embedding import Embedding, EmbeddingBag
from ._experts import Calls, Experts
from ._parameters import SharedTable, TableParameter
from ._tables import Conv1D, Linear, _apply_checked, coded_state_dict, multiply_together

__all__ = [
    "Conv1D",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Experts",
    "Linear",
    "ModelReport",
    "TableParameter",
    "coded_state_dict",
    "compress",
    "decompress",
    "multiply_together",
]

__dir__ = published(__name__, Calls, SharedTable, _Group, _Part, _apply_checked)
