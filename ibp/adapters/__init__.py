"""What adapters of frameworks are made of: weights that are coded one by one, models that are coded while they are
loaded, parameters that rest in tables, and products with coded experts.

    compressor = ibp.adapters.WeightCompressor({"memory": "pinned"})
    coded = compressor.code("model.layers.0.mlp.up_proj.weight", weight)    # one codebook for the weights of a kind
    weight = coded.decoded("cuda")                                          # where and when the host wants it

    loading = ibp.adapters.ModelLoading(ibp.adapters.ModelOptions(exclude="lm_head"), model)
    for name, tensor in checkpoint:
        loading.put(name, tensor)                                           # modules over tables take its place
    report = loading.finish()

An adapter holds the policy of its host alone. Other names that it needs are in `ibp.kv` (`BlockStore`, `KeyedPages`,
`TokenCoder`), `ibp.checkpoints` (`open`, `CheckpointWriter`) and `ibp.deltas` (`Receiver`, `PlacedReceiver`).
docs/adapters.md shows two whole adapters, and `ibp.integrations` has adapters of known frameworks.
"""

from .._common.closing import Closing
from .._common.process import OfThisProcess
from .._common.publishing import published
from .._common.statistics import shown_memory
from .._tables.weights import CodedWeight, WeightCompressor
from ._loading import ModelLoading, ModelOptions
from ._objects import CodedStatistics, ModelChange, checked_device
from ._products import ExpertTables, compress_matrix, join
from ._resting import RestingWeight

__all__ = [
    "Closing",
    "CodedStatistics",
    "CodedWeight",
    "ExpertTables",
    "ModelChange",
    "ModelLoading",
    "ModelOptions",
    "OfThisProcess",
    "RestingWeight",
    "WeightCompressor",
    "checked_device",
    "compress_matrix",
    "join",
    "shown_memory",
]

__dir__ = published(__name__)
