"""Deltas: the difference between two versions of a tensor, or of all tensors of a checkpoint.

    delta = ibp.deltas.make(new, base)      # two tensors, or two state dicts
    delta.apply_(base)                      # base is new, bit for bit
    ibp.save("delta.safetensors", delta)

`_tensors.py` and `_checkpoints.py` define the classes of deltas. `_coding.py` codes differences, and `_applying.py`
applies deltas. `_sending.py` and `_receiving.py` keep the weights of several processes the same.
"""

from .._common.publishing import published
from ._checkpoints import CheckpointDelta
from ._fingerprint import DeltaMismatchError, fingerprint
from ._making import make
from ._places import PlacedReceiver, ShardPlace
from ._receiving import OutOfSyncError, Receiver
from ._sending import Sender
from ._tensors import Delta

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
