"""Compresses and decompresses whole checkpoints: files of tensors of any size, block by block.

    print(ibp.checkpoints.estimate("model.safetensors"))
    report = ibp.checkpoints.compress("model.safetensors", "model.ibp.safetensors")
    ibp.checkpoints.decompress("model.ibp.safetensors", "again.safetensors")    # the same tensors and metadata

`_sources.py` opens files of every format, each in a module of its own, as a `Source` (`_source.py`). `_outputs.py`
writes them.
"""

from .._common.publishing import published
from ._compressing import compress
from ._decompressing import decompress
from ._estimating import CheckpointEstimate, TensorEstimate, estimate
from ._outputs import CheckpointReport, TensorReport
from ._source import SourceFormatError

__all__ = [
    "CheckpointEstimate",
    "CheckpointReport",
    "SourceFormatError",
    "TensorEstimate",
    "TensorReport",
    "compress",
    "decompress",
    "estimate",
]

__dir__ = published(__name__)
