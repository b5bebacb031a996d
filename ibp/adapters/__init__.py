"""Tools for adapters of frameworks: they code weights one by one, code models while they are loaded, keep the values of
parameters in tables, and multiply by coded experts.

    compressor = ibp.adapters.WeightCompressor({"memory": "pinned"})
    coded = compressor.code("model.layers.0.mlp.up_proj.weight", weight)    # one codebook for the weights of a kind
    weight = coded.decoded("cuda")                                          # a plain tensor on a device

    loading = ibp.adapters.ModelLoading(ibp.adapters.ModelOptions(exclude="lm_head"), model)
    for name, tensor in checkpoint:
        loading.put(name, tensor)                                           # codes it, and puts the table into modules
    report = loading.finish()

With these tools, an adapter needs only the code that is specific to its framework. Other tools are in `ibp.kv`
(`BlockStore`, `KeyedPages`, `TokenCoder`), `ibp.checkpoints` (`open`, `CheckpointWriter`) and `ibp.deltas` (`Receiver`,
`PlacedReceiver`). docs/adapters.md shows two complete adapters, and `ibp.integrations` has adapters of known
frameworks.
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
