"""The class Delta: the differences of two versions of a tensor."""

from __future__ import annotations

from typing import Any

import torch

from .._common.arguments import whole_number
from .._layout.manners import Movable
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from ._applying import apply_all


class Delta(Movable):
    """The change from one version of a tensor, its base, to another one. `ibp.deltas.make` makes deltas, and files hold
    them.

    The table holds new - base for each element: the difference of the bits as integers of w bits, modulo 2^w. A complex
    number consists of two integers. Elements that did not change take next to nothing. A delta never changes.

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
        base, result: fingerprints (`ibp.deltas.fingerprint`) of the tensor before and after the delta is applied.

    Attributes:
        table, base, result: the arguments.
        shape, dtype: those of the tensor.
        device: the device of the coded differences.

    Raises:
        TypeError, ValueError: an argument is not as described.
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
        """Returns whether both versions are the same, as far as their fingerprints tell."""
        return self.base == self.result

    @property
    def original_bytes(self) -> int:
        """Returns the bytes of the tensor."""
        return self.table.original_bytes

    @property
    def stored_bytes(self) -> int:
        """Returns the bytes of the coded differences, of the index of their rows, and of the codebook. These bytes are
        sent, or written to files."""
        return self.table.stored_bytes + self.table.index_bytes

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory that the delta takes."""
        return self.table.nbytes

    def __repr__(self) -> str:
        share = f" ({self.stored_bytes / self.original_bytes:.2%})" if self.original_bytes else ""
        return (
            f"ibp.deltas.Delta(shape={list(self.shape)}, dtype={self.dtype}, bytes={self.original_bytes:,} -> "
            f"{self.stored_bytes:,}{share}, base={self.base:016x}, result={self.result:016x}, device={self.device})"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Delta:
        """Returns the delta on another device, or the delta itself if it is there."""
        target = memory.canonical(device)
        return (
            self if target == self.device else Delta(self.table.to(target, None, non_blocking), self.base, self.result)
        )

    def apply_(self, base: torch.Tensor) -> torch.Tensor:
        """Makes the new version out of the base, in the base's memory. Returns the base.

        The call checks that the base is the tensor for which the delta was made, before it writes anything, and that
        the result is the new version. If the delta is damaged, or the call is interrupted, the base gets its bits back.
        Gradients are not computed.

        Args:
            base: a tensor of the delta's shape and dtype, with any strides that do not make elements overlap, on the
                CPU or a CUDA device. The coded differences are brought to this device.

        Raises:
            TypeError: base is not a tensor, has another dtype, or is a conjugated or negated view.
            DeltaMismatchError: base has another shape or other bits than the base of the delta.
            CorruptTableError: the delta is damaged.
        """
        apply_all([("base", self, base)])
        return base

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the new version, as `apply_` makes it, in new memory. The base stays as it is."""
        return self.apply_(base.detach().clone())
