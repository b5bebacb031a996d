"""Delta: the differences of two versions of a tensor."""

from __future__ import annotations

from typing import Any

import torch

from .._common.arguments import whole_number
from .._layout.manners import Movable
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from ._applying import apply_all


class Delta(Movable):
    """What changed from one version of a tensor, its base, to another one. Made by `ibp.deltas.make`, and by reading
    files.

    The table holds new - base for each element: integers of its width, of the elements' bits, modulo 2^w (of complex
    numbers two each). Elements that did not change take next to nothing. It never changes.

    Example:
        >>> old = torch.zeros(1000, 64)
        >>> new = old.index_fill(0, torch.tensor([17]), 1)
        >>> delta = ibp.deltas.make(new, old, device="cpu")
        >>> delta.original_bytes, delta.stored_bytes < 1000
        (256000, True)
        >>> delta.apply(old)[16:19, 0]
        tensor([0., 1., 0.])

    Args:
        table: the differences, of the tensor's shape and dtype.
        base, result: fingerprints (`ibp.deltas.fingerprint`) of what the delta is applied to, and of what that becomes.

    Attributes:
        table, base, result: the arguments.
        shape, dtype: of the tensor.
        device: where the coded differences are.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    __slots__ = ("base", "result", "table")

    table: CompressedTensor
    base: int
    result: int

    def __init__(self, table: CompressedTensor, base: int, result: int) -> None:
        if not isinstance(table, CompressedTensor):
            raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")
        fields = {name: whole_number(name, value, 0, 2**64 - 1) for name, value in (("base", base), ("result", result))}
        for name, value in {"table": table, **fields}.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} of an ibp.deltas.Delta cannot be set: it never changes")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.table, self.base, self.result)

    @property
    def shape(self) -> torch.Size:
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def is_empty(self) -> bool:
        """Whether both versions are the same, as far as their fingerprints tell."""
        return self.base == self.result

    @property
    def original_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.table.original_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the coded differences, the index of their rows and the codebook: what is sent, or stands in a
        file."""
        return self.table.stored_bytes + self.table.index_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the delta takes."""
        return self.table.nbytes

    def __repr__(self) -> str:
        share = f" ({self.stored_bytes / self.original_bytes:.2%})" if self.original_bytes else ""
        return (
            f"ibp.deltas.Delta(shape={list(self.shape)}, dtype={self.dtype}, bytes={self.original_bytes:,} -> "
            f"{self.stored_bytes:,}{share}, base={self.base:016x}, result={self.result:016x}, device={self.device})"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Delta:
        """The delta on another device: itself if it is there."""
        target = memory.canonical(device)
        return (
            self if target == self.device else Delta(self.table.to(target, None, non_blocking), self.base, self.result)
        )

    def apply_(self, base: torch.Tensor) -> torch.Tensor:
        """Makes the new version of the base, in its memory. Returns it.

        All is checked before the call returns: that the base is the one that the delta was made for, and that what it
        becomes is the new version. Where either is not so, the base holds the bits that it held before. It takes no
        gradient into account.

        Args:
            base: tensor of the delta's shape and dtype, of any strides without overlaps, on the CPU or a CUDA device.
                The coded differences are brought there.

        Raises:
            TypeError: base is no tensor, has another dtype, or is a conjugated or negated view.
            DeltaMismatchError: base has another shape or other bits than the base of the delta.
            CorruptTableError: the delta is damaged.
        """
        apply_all([("base", self, base)])
        return base

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """As `apply_`, of a copy: the base stays as it is."""
        return self.apply_(base.detach().clone())
