"""Lossless compression of tensors that makes moving them faster.

    import torch, ibp
    table = ibp.compress(x)                                # x: [N, ...] tensor on the CPU or a GPU
    y     = ibp.index_select(table, ids, device="cuda")    # the same bits as x[ids].to("cuda")
    x2    = ibp.decompress(table)                          # the whole tensor again

The method is that of the paper Invariant Bit Packing (EuroSys 2026); the bytes are specified in FORMAT.md
beside the installed headers (`ibp.get_include()`). Modules over tables are in `ibp.nn`, tables in several processes in
`ibp.distributed`, bridges to frameworks in `ibp.integrations`.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

from . import _core, distributed, nn, optim
from ._activations import ActivationOffload, ActivationStats, offload_activations
from ._common import ops
from ._fetch.bags import embedding_bag
from ._fetch.gather import index_select
from ._fetch.linear import linear
from ._fetch.many import index_select_many
from ._fetch.prefetch import Prefetch
from ._fetch.streaming import decompress, decompress_many
from ._files.fields import ChecksumError, FileFormatError
from ._files.opened import File, TensorInfo, load, open
from ._files.saving import save
from ._inspect.config import show_config
from ._machine.memory import release_pinned
from ._machine.segments import SharedHandle
from ._offload import Offloaded, OffloadStats, offload
from ._rows.table import CorruptTableError
from ._schemes import AnyCodebook, ClusteredCodebook, Codebook, PlanesCodebook
from ._schemes.estimation import Estimate, analyze, estimate
from ._tables.compressed_tensor import CompressedTensor
from ._tables.compression import compress_
from ._tables.place import Buffers, Place, PlaceCounts, encode_into
from .cache import CacheStats, RowCache, count_accesses
from .calibration import H200, Calibration, CoderRates, calibrate
from .checkpoints._compressing import compress_checkpoint
from .checkpoints._decompressing import decompress_checkpoint
from .checkpoints._estimating import CheckpointEstimate, TensorEstimate, estimate_checkpoint
from .checkpoints._report import CheckpointReport, TensorReport
from .checkpoints._source import SourceFormatError
from .codecs._choice import choose
from .codecs._chosen import Choice, CodingCost
from .codecs._compressing import compress
from .codecs._whole import WholeTensor
from .deltas import CheckpointDelta, Delta, DeltaMismatchError, delta
from .deltas._fingerprint import fingerprint
from .distributed._sharing import open_shared
from .kv._paged import PagedTensors
from .kv._rows import KVRows, KVRowsStats
from .kv._store import KVStore, KVStoreStats, Transfer
from .spill._placing import place
from .spill._profiling import Profile, TensorProfile, profile

__version__ = _core.version()

__all__ = [
    "ActivationOffload",
    "ActivationStats",
    "AnyCodebook",
    "Buffers",
    "CacheStats",
    "Calibration",
    "CheckpointDelta",
    "CheckpointEstimate",
    "CheckpointReport",
    "ChecksumError",
    "Choice",
    "ClusteredCodebook",
    "Codebook",
    "CoderRates",
    "CodingCost",
    "CompressedTensor",
    "CorruptTableError",
    "Delta",
    "DeltaMismatchError",
    "Estimate",
    "File",
    "FileFormatError",
    "H200",
    "KVRows",
    "KVRowsStats",
    "KVStore",
    "KVStoreStats",
    "OffloadStats",
    "Offloaded",
    "PagedTensors",
    "Place",
    "PlaceCounts",
    "PlanesCodebook",
    "Prefetch",
    "Profile",
    "RowCache",
    "SharedHandle",
    "SourceFormatError",
    "TensorEstimate",
    "TensorInfo",
    "TensorProfile",
    "TensorReport",
    "Transfer",
    "WholeTensor",
    "analyze",
    "calibrate",
    "choose",
    "compress",
    "compress_",
    "compress_checkpoint",
    "count_accesses",
    "cuda_is_available",
    "decompress",
    "decompress_checkpoint",
    "decompress_many",
    "delta",
    "distributed",
    "embedding_bag",
    "encode_into",
    "estimate",
    "estimate_checkpoint",
    "fingerprint",
    "get_include",
    "get_library_dir",
    "index_select",
    "index_select_many",
    "linear",
    "load",
    "nn",
    "offload",
    "offload_activations",
    "open",
    "open_shared",
    "optim",
    "place",
    "profile",
    "release_pinned",
    "save",
    "show_config",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> _ModuleType:
    if name == "integrations":  # each of which imports its framework when it is first named
        return _import_module("ibp.integrations")
    raise AttributeError(f"module 'ibp' has no attribute {name!r}")


def cuda_is_available() -> bool:
    """Whether this build of ibp has CUDA kernels and torch can see a CUDA device."""
    return ops.cuda_is_available()


def get_include() -> str:
    """The directory of ibp.h, ibp_cuda.h, format.h and FORMAT.md, for programs that link the core."""
    return str(_Path(__file__).parent / "include")


def get_library_dir() -> str:
    """The directory of libibp.so, the core library."""
    return str(_Path(__file__).parent / "_lib")
