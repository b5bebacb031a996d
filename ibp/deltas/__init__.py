"""Deltas: what changed between two versions of a tensor, or of all tensors of a checkpoint (`tensors.py`,
`checkpoints.py`), how their differences are coded (`coding.py`), and how they are applied (`applying.py`)."""

from ._checkpoints import CheckpointDelta
from ._fingerprint import DeltaMismatchError
from ._making import delta
from ._tensors import Delta

__all__ = ["CheckpointDelta", "Delta", "DeltaMismatchError", "delta"]
