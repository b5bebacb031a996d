"""Deltas: the difference between two versions of a tensor, or of all tensors of a checkpoint.

    delta = ibp.deltas.make(new, base)      # two tensors, or two state dicts
    delta.apply_(base)                      # base is new, bit for bit
    ibp.save("delta.safetensors", delta)

`_tensors.py` and `_checkpoints.py` define the classes of deltas. `_coding.py` codes differences, and `_applying.py`
applies deltas. `_sending.py` and `_receiving.py` keep the weights of several processes the same.
"""

from .._common.importing import published
from ._coding import DeltaMismatchError, fingerprint
from ._making import make
from ._receiving import OutOfSyncError, PlacedReceiver, Receiver, ShardPlace
from ._sending import Sender
from ._tensors import CheckpointDelta, Delta

__all__ = [
    "CheckpointDelta",
    "Delta",
    "DeltaMismatchError",
    "OutOfSyncError",
    "PlacedReceiver",
    "Receiver",
    "Sender",
    "ShardPlace",
    "fingerprint",
    "make",
]

__dir__ = published(__name__)
