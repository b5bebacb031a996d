"""Whole checkpoints in and out: files of tensors of any size, read, coded and written by blocks.

    print(ibp.checkpoints.estimate("model.safetensors"))
    report = ibp.checkpoints.compress("model.safetensors", "model.ibp.safetensors")
    ibp.checkpoints.decompress("model.ibp.safetensors", "again.safetensors")    # the same tensors and metadata

Modules import only those before them in this list:

    source          what a file of tensors is to its readers
    nested          nested values of torch as flat names, and back
    numpy_files, torch_files, ibp_files
                    sources, one module a format
    sources         opening them, and files of safetensors: which format a file has, globs, directories, URLs
    learning        codebooks, which weights of a kind share
    coding          blocks coded in order, by threads or a GPU
    planning        which file of the output each tensor goes to
    report          what became of a checkpoint
    journal         finished files of a set that is still being made
    outputs         files that are decompressed to, one function a format
    compressing, decompressing, estimating
                    the functions of the package
"""

from .._common.publishing import published
from ._compressing import compress
from ._decompressing import decompress
from ._estimating import CheckpointEstimate, TensorEstimate, estimate
from ._report import CheckpointReport, TensorReport
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
