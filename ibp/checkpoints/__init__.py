"""Compresses and decompresses whole checkpoints: files of tensors of any size, block by block.

    print(ibp.checkpoints.estimate("model.safetensors"))
    report = ibp.checkpoints.compress("model.safetensors", "model.ibp.safetensors")
    ibp.checkpoints.decompress("model.ibp.safetensors", "again.safetensors")    # the same tensors and metadata

Loaders of frameworks read such files with `open`, and write them with `CheckpointWriter`:

    with ibp.checkpoints.open("model.ibp.safetensors") as source:               # a file of any format
        tables = {name: tensor.table for name, tensor in source.tensors.items()}

A tensor passes through these forms, block by block:

    file of any format -> SourceTensor -> Block  -> CodedBlock -> file of ibp    `compress`
    file of any format -> SourceTensor -> bytes                -> plain file     `decompress`

`_source.py` has what all formats share, and `_sources.py` opens paths of every kind. Each format is read and written in
a file of its own: `_safetensors_files.py`, `_numpy_files.py`, `_torch_files.py`. `_learning.py` decides which codebook
a tensor gets, and `_coding.py` codes blocks on the CPU or a GPU. `_outputs.py` plans the files of ibp, keeps the
finished ones if a call is interrupted, and makes the report. `_model_files.py` is for calls whose input and output are
directories: it finds the files of tensors, and copies the other files. `_compressing.py`, `_decompressing.py` and
`_estimating.py` have the functions `compress`, `decompress` and `estimate`. `_writing.py` has `CheckpointWriter` and
`is_coded`.
"""

from .._common.importing import published
from .._files import coded_name
from ._compressing import CheckpointEstimate, TensorEstimate, compress, estimate
from ._decompressing import decompress
from ._outputs import CheckpointReport, TensorReport
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
