"""Deltas of checkpoints applied from file to file, tensor by tensor: what `ibp apply` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import ibp
from ibp._checkpoints import outputs
from ibp._checkpoints.sources import Source, SourceTensor

from . import comparing
from .output import Failure

_BLOCK_BYTES = 16 << 20


class Applied(SourceTensor):
    """A tensor of the new version: made when it is asked for, as a whole.

    Args:
        base: the tensor of the old version.
        delta: what changed.
        device: where it is applied.
    """

    def __init__(self, base: SourceTensor, delta: ibp.Delta, device: torch.device) -> None:
        super().__init__(base.name, base.dtype, base.shape)
        self._base, self._delta, self._device = base, delta, device

    def tensor(self) -> torch.Tensor:
        return self._delta.to(self._device).apply_(comparing.whole(self._base).to(self._device)).cpu()

    def read(self, start_byte: int, end_byte: int) -> np.ndarray:
        return _bytes_of(self.tensor())[start_byte:end_byte]


class Whole(SourceTensor):
    """A tensor that the delta holds whole."""

    def __init__(self, name: str, value: torch.Tensor | ibp.CompressedTensor) -> None:
        super().__init__(name, value.dtype, tuple(value.shape))
        self._value = value

    def tensor(self) -> torch.Tensor:
        value = self._value
        return value if isinstance(value, torch.Tensor) else ibp.decompress(value, device="cpu")

    def read(self, start_byte: int, end_byte: int) -> np.ndarray:
        return _bytes_of(self.tensor())[start_byte:end_byte]


def changes_in(path: str) -> ibp.CheckpointDelta:
    """The changes that a file holds, mapped.

    Raises:
        ibp.ChecksumError: it is damaged.
        ibp.FileFormatError: it is none.
    """
    with ibp.open(path, verify=True) as file:
        return ibp.CheckpointDelta(dict(file), file.removed)


def apply(
    base: Source,
    changes: ibp.CheckpointDelta,
    target: str,
    device: torch.device,
    on_bytes: Callable[[int], object],
) -> None:
    """Writes the new version to a file, whose suffix says of which format; one tensor is in memory at a time.

    Raises:
        Failure: a tensor that changed, or is gone, is not in the old version.
        ibp.DeltaMismatchError: a tensor of the old version is not what the delta was made for.
        ValueError: a format cannot hold what is to be written.
    """
    missing = [name for name in (*changes.changed, *changes.removed) if name not in base.tensors]
    if missing:
        raise Failure(f"{base.path} has no tensor {missing[0]!r}, which the delta changes or removes", 1)
    path = Path(target)
    kind = outputs.SUFFIXES.get(path.suffix.lower(), "safetensors")

    def pieces(tensor: SourceTensor) -> Iterator[np.ndarray]:
        for piece in _pieces(tensor):
            yield piece
            on_bytes(len(piece))

    outputs.FORMATS[kind](path, list(_new_version(base, changes, device)), base.metadata, pieces)


def _new_version(base: Source, changes: ibp.CheckpointDelta, device: torch.device) -> Iterator[SourceTensor]:
    """The tensors in the order of the old version, and then those that are new."""
    for name, tensor in base.tensors.items():
        change = changes.get(name)
        if isinstance(change, ibp.Delta):
            yield Applied(tensor, change, device)
        elif change is None and name not in changes.removed:
            yield tensor
    for name in changes.new:
        change = changes[name]
        assert not isinstance(change, ibp.Delta)
        yield Whole(name, change)


def _pieces(tensor: SourceTensor) -> Iterator[np.ndarray]:
    if isinstance(tensor, (Applied, Whole)):
        yield _bytes_of(tensor.tensor())
        return
    for start in range(0, tensor.num_bytes, _BLOCK_BYTES):
        yield tensor.read(start, min(start + _BLOCK_BYTES, tensor.num_bytes))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    data: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return data
