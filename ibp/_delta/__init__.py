"""Deltas: what changed between two versions of a tensor, or of all tensors of a checkpoint (`tensors.py`,
`checkpoints.py`), how their differences are coded (`coding.py`), and how they are applied (`applying.py`)."""

from .checkpoints import CheckpointDelta
from .making import delta
from .tensors import Delta, DeltaMismatchError

__all__ = ["CheckpointDelta", "Delta", "DeltaMismatchError", "delta"]
