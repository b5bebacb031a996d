"""Modules over compressed tables, which move, are saved and are loaded with their module.

    embedding = ibp.nn.Embedding(ibp.compress(weight))                # fixed weights
    bags      = ibp.nn.EmbeddingBag(1_000_000, 64, mode="sum")        # trained by ibp.optim
    linear    = ibp.nn.Linear(ibp.compress(weight, layout="packed"), bias)

A table is no torch.Tensor (docs/guide.md says why), so that a module cannot hold it as a parameter or buffer.
These hold it as `weight`: `module.to()`, `cuda()`, `state_dict()`, `load_state_dict()`, `copy.deepcopy`, pickling and
torch.compile work as for other modules; `load_state_dict` takes plain tensors, too, and compresses them.
`parameters()` and `buffers()` do not list tables: optimizers of torch, DDP and FSDP leave them alone.
docs/embeddings.md says how they are trained.
"""

from ._collection import EmbeddingCollection
from ._embedding import Embedding, EmbeddingBag
from ._tables import Linear, dense_state_dict

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingCollection", "Linear", "dense_state_dict"]
