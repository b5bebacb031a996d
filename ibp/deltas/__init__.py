"""Deltas: the difference between two versions of a tensor, or of all tensors of a checkpoint.

    delta = ibp.deltas.make(new, base)      # two tensors, or two state dicts
    delta.apply_(base)                      # base is new, bit for bit
    ibp.save("delta.safetensors", delta)

A delta is a value: coded differences, and the fingerprints of the versions before and after (`_delta.py`, which also
makes deltas). `_coding.py` computes fingerprints and says how differences are coded. `_applying.py` applies deltas: to
tensors on the CPU or on a GPU, and to weights that lie in several tensors or in tables.

Weights of several processes are kept the same by pushes. A `Sender` (`_sending.py`) divides its weights into regions
and makes messages of the deltas of regions; `_messages.py` says what a message holds; a `Receiver` (`_receiving.py`)
finds the memory of the regions in its process and applies the deltas there.
"""

from .._common.process import published
from ._coding import DeltaMismatchError, fingerprint
from ._delta import CheckpointDelta, Delta, make
from ._receiving import OutOfSyncError, PlacedReceiver, Receiver, ShardPlace
from ._sending import Sender, _Extent

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

__dir__ = published(__name__, _Extent)
