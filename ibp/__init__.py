"""Lossless tensor compression that makes moving tensors faster.

    import torch, ibp
    table = ibp.compress(x)                                # x: [N, ...] tensor on the CPU or a GPU
    y     = ibp.index_select(table, ids, device="cuda")    # the same bits as x[ids].to("cuda")
    x2    = ibp.decompress(table)                          # the same bits as x

The method is that of the paper Invariant Bit Packing (EuroSys 2026). FORMAT.md, in the directory of the installed
headers (`ibp.get_include()`), specifies the bytes of a table.

ibp.nn, ibp.optim    modules whose weights are tables, and optimizers for them
ibp.checkpoints      compression, decompression and estimates of whole checkpoints
ibp.deltas           differences between versions of tensors and checkpoints
ibp.kv               compressed KV-caches
ibp.cache            caches on GPUs for the rows of tables
ibp.spill            tables on a GPU whose overflow is in host memory
ibp.codecs           codebooks, general codecs, and the choice between them
ibp.calibration      measured rates of a machine, for the choice of schemes and paths
ibp.distributed      tables in several processes, and collectives that send coded tensors
ibp.adapters         building blocks for framework adapters
ibp.integrations     framework adapters
"""

import sys as _sys
from contextlib import suppress as _suppress
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import Any as _Any

if _find_spec("ibp._core") is None:
    raise ImportError(
        f"{_Path(__file__).parent} is the source of ibp, and nothing is built in it for this Python: leave its "
        "directory to import the ibp that is installed, or build it here by `pip install --no-build-isolation -e .`"
    )

from . import _core, adapters, cache, calibration, checkpoints, codecs, deltas, distributed, kv, nn, optim, spill
from ._activations import ActivationOffload, ActivationStats, offload_activations
from ._common import ops
from ._common.process import after_import as _after_import
from ._common.process import published as _published
from ._fetch.bags import embedding_bag
from ._fetch.gather import Prefetch, index_select
from ._fetch.linear import linear
from ._fetch.streaming import decompress
from ._files import ChecksumError, File, FileFormatError, TensorInfo, load, open, save
from ._files.opened import _reopened
from ._machine.memory import release_pinned
from ._machine.memory import usual as _usual
from ._offload import Offloaded, OffloadStats, offload
from ._rows.estimation import Estimate, SchemeEstimate, estimate
from ._rows.handle import CorruptTableError
from ._tables.coded_rows import Buffers, CodedRows, RowCounts, encode_into
from ._tables.compressed_tensor import CompressedTensor
from .cache import RowCache
from .codecs._compressing import compress

__version__ = _core.version()

__all__ = [
    "ActivationOffload",
    "ActivationStats",
    "Buffers",
    "ChecksumError",
    "CodedRows",
    "CompressedTensor",
    "CorruptTableError",
    "Estimate",
    "File",
    "FileFormatError",
    "OffloadStats",
    "Offloaded",
    "Prefetch",
    "RowCache",
    "RowCounts",
    "TensorInfo",
    "adapters",
    "cache",
    "calibration",
    "checkpoints",
    "codecs",
    "compress",
    "cuda_is_available",
    "decompress",
    "deltas",
    "distributed",
    "embedding_bag",
    "encode_into",
    "estimate",
    "get_include",
    "get_library_dir",
    "index_select",
    "integrations",
    "kv",
    "linear",
    "load",
    "nn",
    "offload",
    "offload_activations",
    "open",
    "optim",
    "release_pinned",
    "save",
    "show_config",
    "spill",
]
_published(__name__, SchemeEstimate, _reopened)

# Pickles of earlier commits name modules that have since been merged into others. pickle finds them under these names.
for _former, _present in (
    ("_schemes.estimation", "_rows.estimation"),
    ("nn._neighbours", "nn._tables"),
    ("nn._stacks", "nn._experts"),
):
    _sys.modules[f"ibp.{_former}"] = _sys.modules[f"ibp.{_present}"]

# ibp 0.2 had these classes in the root module, so pickles and torch.save files of 0.2 refer to them there.
# `__getattr__` finds them under the old names, so that such files can still be loaded. Programs should import the
# classes from their present modules.
_PICKLED_BY_0_2 = {
    **dict.fromkeys(("Choice", "ClusteredCodebook", "Codebook", "CodingCost", "PlanesCodebook", "WholeTensor"), codecs),
    **dict.fromkeys(("CheckpointDelta", "Delta"), deltas),
    **dict.fromkeys(("Profile", "TensorProfile"), spill),
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> _Any:
    if name == "integrations":  # its modules import their frameworks when they are first used
        return _import_module("ibp.integrations")
    if name in _PICKLED_BY_0_2:
        return getattr(_PICKLED_BY_0_2[name], name)
    raise AttributeError(f"module 'ibp' has no attribute {name!r}")


def _register(name: str) -> None:
    # If the framework's release lacks something that the module imports, nothing is registered, and the framework
    # does not support coded weights.
    with _suppress(ImportError, AttributeError):
        _import_module(f"ibp.integrations.{name}")


# After ibp is imported, transformers and diffusers can load directories of coded weights, PEFT can adapt coded models,
# and accelerate's hooks leave tables where they are. ibp and the framework may be imported in any order.
_after_import("transformers.modeling_utils", lambda: _register("transformers.weights"))
_after_import("diffusers.models.modeling_utils", lambda: _register("diffusers"))
_after_import("peft", lambda: _register("peft"))
_after_import("accelerate.big_modeling", lambda: _register("accelerate"))


def cuda_is_available() -> bool:
    """Returns True if this build of ibp has CUDA kernels and torch sees a CUDA device.

    Example:
        >>> device = "cuda" if ibp.cuda_is_available() else "cpu"
        >>> table = ibp.compress(torch.ones(1000, 1024))
        >>> ibp.index_select(table, [0, 999], device=device).shape
        torch.Size([2, 1024])
    """
    return ops.cuda_is_available()


def get_include() -> str:
    """Returns the directory that contains ibp.h, ibp_cuda.h, the headers that they include, and FORMAT.md. Pass it
    to the compiler as an include directory to build a program that uses the core library.

    Example:
        >>> from pathlib import Path
        >>> Path(ibp.get_include(), "ibp.h").exists()
        True
    """
    return str(_Path(__file__).parent / "include")


def get_library_dir() -> str:
    """Returns the directory that contains libibp.so, the core library.

    Example:
        >>> flags = f"-I{ibp.get_include()} -L{ibp.get_library_dir()} -libp"
        >>> flags
        '-I.../include -L.../_lib -libp'
    """
    return str(_Path(__file__).parent / "_lib")


def show_config() -> None:
    """Prints how ibp was built, on which machine it runs, and by which paths rows can come to the GPU. Include the
    output in bug reports.

    Example:
        >>> ibp.show_config()
        ibp           ..., format version 1, in ...
        torch         ...
    """
    from ._cli.doctor import config  # Imported here, because other programs do not need the command line.

    lines = config(_usual(None))
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))
