"""Names of ibp 0.2 that are elsewhere since 0.3."""

from __future__ import annotations

import sys
import warnings
from typing import Any

_MODULES = {
    "cache": ("CacheStats", "count_accesses"),
    "calibration": ("Calibration", "CoderRates", "H200", "calibrate"),
    "checkpoints": ("CheckpointEstimate", "CheckpointReport", "SourceFormatError", "TensorEstimate", "TensorReport"),
    "codecs": ("AnyCodebook", "Choice", "ClusteredCodebook", "Codebook", "CodingCost", "PlanesCodebook", "WholeTensor")
    + ("analyze", "choose"),
    "deltas": ("CheckpointDelta", "Delta", "DeltaMismatchError", "fingerprint"),
    "distributed": ("SharedHandle", "open_shared"),
    "kv": ("KVRows", "KVRowsStats", "KVStore", "KVStoreStats", "PagedTensors", "Transfer"),
    "spill": ("Profile", "TensorProfile", "place", "profile"),
}
# What was pickled by a name at the root: plain pickle finds it there.
_PICKLED = {"ClusteredCodebook", "Codebook", "PlanesCodebook", "WholeTensor", "CheckpointDelta", "Delta", "Choice"}
_PICKLED |= {"CodingCost", "Profile", "TensorProfile"}
_RENAMED = {
    "Place": ("Place", "CodedRows"),
    "PlaceCounts": ("PlaceCounts", "RowCounts"),
    "compress_": ("compress_(x)", "compress(x, inplace=True)"),
    "compress_checkpoint": ("compress_checkpoint", "checkpoints.compress"),
    "decompress_checkpoint": ("decompress_checkpoint", "checkpoints.decompress"),
    "decompress_many": ("decompress_many(tables)", "decompress(tables)"),
    "delta": ("delta", "deltas.make"),
    "estimate_checkpoint": ("estimate_checkpoint", "checkpoints.estimate"),
    "index_select_many": (
        "index_select_many(tables, ids, table_numbers)",
        "index_select(tables, ids, table_numbers=table_numbers)",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def found(name: str) -> Any:
    """What a name that the root lacks stood for, where pickles of ibp 0.2 hold it, with a DeprecationWarning.
    AttributeError: for all other names; for a name that ibp 0.2 had, with the new one."""
    if name in _MODULE_OF:
        moved = f"ibp.{name} is ibp.{_MODULE_OF[name]}.{name} now"
        if name not in _PICKLED:
            raise AttributeError(moved)
        warnings.warn(moved, DeprecationWarning, stacklevel=3)
        return getattr(sys.modules[f"ibp.{_MODULE_OF[name]}"], name)
    if name in _RENAMED:
        old, new = _RENAMED[name]
        raise AttributeError(f"ibp.{old} is ibp.{new} now")
    raise AttributeError(f"module 'ibp' has no attribute {name!r}")
