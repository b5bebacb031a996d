"""Compresses and decompresses whole checkpoints: files of tensors of any size, block by block.

    print(ibp.checkpoints.estimate("model.safetensors"))
    report = ibp.checkpoints.compress("model.safetensors", "model.ibp.safetensors")
    ibp.checkpoints.decompress("model.ibp.safetensors", "again.safetensors")    # the same tensors and metadata

Loaders of frameworks read such files with `open`, and write them with `CheckpointWriter`:

    with ibp.checkpoints.open("model.ibp.safetensors") as source:               # a file of any format
        tables = {name: tensor.table for name, tensor in source.tensors.items()}
    with ibp.checkpoints.CheckpointWriter("state.safetensors", shapes) as writer:
        stored = writer.compress(state)                                         # tensors of a program, by name

A tensor passes through these forms, block by block:

    file of any format -> SourceTensor -> Block, which is coded -> file of ibp    `compress`
    file of any format -> SourceTensor -> bytes -----------------> plain file     `decompress`

`_source.py` has what all formats share: a `Source` is a file or a set of files, and its tensors are read range by
range. It also reads and writes safetensors files; `_other_files.py` does so for the formats of numpy and torch.
`_inputs.py` opens paths of every kind; if the input and the output of a call are directories, a `Conversion` also finds
the files of tensors, and copies the other files. `_outputs.py` plans the files of ibp, keeps the finished ones in a
`Journal` if a call is interrupted, and makes the reports. `_coding.py` decides which codebook a tensor gets
(`Codebooks`), and codes blocks on the CPU or a GPU. `_writing.py` writes one file: of a source that is converted, or of
tensors that a program gives to `CheckpointWriter`. `_converting.py` has the functions `compress`, `decompress` and
`estimate`, which put these parts together. Each module imports only modules that are named before it here.
"""

from .._common.process import published
from .._files import coded_name
from ._converting import compress, decompress, estimate
from ._inputs import open_source as open
from ._outputs import CheckpointEstimate, CheckpointReport, TensorEstimate, TensorReport
from ._source import Source, SourceFormatError, SourceTensor, is_coded
from ._writing import CheckpointWriter

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
