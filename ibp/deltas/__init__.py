"""Deltas: the difference between two versions of a tensor, or of all tensors of a checkpoint.

    delta = ibp.deltas.make(new, base)      # two tensors, or two state dicts
    delta.apply_(base)                      # base is new, bit for bit
    ibp.save("delta.safetensors", delta)

`_tensors.py` has the classes of deltas and applies them. `_making.py` makes deltas; `_coding.py` says how differences
are coded, and computes fingerprints. `_on_gpu.py` makes and applies deltas of many tensors at once on a GPU, and
`_on_pieces.py` changes weights that lie in several tensors or in tables. `_sending.py` and `_receiving.py` keep the
weights of several processes the same, by the messages of `_messages.py`.
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
