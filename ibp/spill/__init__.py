"""Tables whose slots are on a GPU, and whose overflow is in pinned host memory (Buddy Compression, ISCA 2020).

    profile = ibp.spill.profile(snapshots)               # finds the sizes of slots
    table   = ibp.spill.place(x, profile["weight"])      # slots of this size on the GPU, the rest in host memory

`_targets.py` computes sizes of slots from ratios and thresholds, `_profiling.py` finds the slot sizes that snapshots of
a run need, and `_placing.py` moves tensors and tables.
"""

from .._common.publishing import published
from ._placing import place
from ._profiling import Profile, TensorProfile, profile

__all__ = ["Profile", "TensorProfile", "place", "profile"]

__dir__ = published(__name__)
