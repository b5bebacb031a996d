"""Compresses and decompresses whole checkpoints: files of tensors of any size, block by block.

    print(ibp.checkpoints.estimate("model.safetensors"))
    report = ibp.checkpoints.compress("model.safetensors", "model.ibp.safetensors")
    ibp.checkpoints.decompress("model.ibp.safetensors", "again.safetensors")    # the same tensors and metadata

Loaders of frameworks read and write such files themselves:

    with ibp.checkpoints.open("model.ibp.safetensors") as source:               # a file of any format
        tables = {name: tensor.table for name, tensor in source.tensors.items()}

`_sources.py` opens files of every format, each in a module of its own, as a `Source` (`_source.py`). `_outputs.py`
writes them.
"""

from .._common.publishing import published
from .._files.sets import coded_name
from ._compressing import compress
from ._decompressing import decompress
from ._estimating import CheckpointEstimate, TensorEstimate, estimate
from ._report import CheckpointReport, TensorReport
from ._source import Source, SourceFormatError, SourceTensor
from ._sources import open_source as open
from ._writing import CheckpointWriter, is_coded

__all__ = [
    "CheckpointEstimate",
    "CheckpointReport",
    "CheckpointWriter",
    "Source",
    "SourceFormatError",
    "SourceTensor",
    "TensorEstimate",
    "TensorReport",
    "coded_name",
    "compress",
    "decompress",
    "estimate",
    "is_coded",
    "open",
]

__dir__ = published(__name__)
