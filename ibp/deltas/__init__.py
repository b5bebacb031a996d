"""Deltas: the differences between two versions of a tensor, or of all tensors of a checkpoint.

    delta = ibp.deltas.make(new, base)      # two tensors, or two state dicts
    delta.apply_(base)                      # base is new, bit for bit
    ibp.save("delta.safetensors", delta)

`_tensors.py` and `_checkpoints.py` have the classes of deltas. `_differences.py` codes differences, and `_applying.py`
adds them to the memory that `_on_pieces.py` describes. `_sending.py` and `_receiving.py` keep the weights of several
processes the same.
"""

from .._common.publishing import published
from ._checkpoints import CheckpointDelta
from ._fingerprint import DeltaMismatchError, fingerprint
from ._making import make
from ._receiving import OutOfSyncError, Receiver
from ._sending import Sender
from ._tensors import Delta

__all__ = [
    "CheckpointDelta",
    "Delta",
    "DeltaMismatchError",
    "OutOfSyncError",
    "Receiver",
    "Sender",
    "fingerprint",
    "make",
]

__dir__ = published(__name__)
