"""Delta: holds the differences between two versions of a tensor, and applies them."""

from __future__ import annotations

from typing import Any

import torch

from .._common.arguments import whole_number
from .._layout.manners import Movable
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from ._applying import apply_all


class Delta(Movable):
    """The differences between two versions of a tensor, the base and the new version. A delta turns the base into the
    new version. `ibp.deltas.make` makes deltas, and reading a file of deltas returns deltas. A delta is immutable.

    The bits of each element are taken as an unsigned integer of w bits, where w is the number of bits of an element.
    For each element, the table holds (new - base) modulo 2^w. For complex numbers, the real and the imaginary parts are
    subtracted separately. Elements that did not change take almost no memory.

    Example:
        >>> old = torch.zeros(1000, 64)
        >>> new = old.index_fill(0, torch.tensor([17]), 1)
        >>> delta = ibp.deltas.make(new, old, device="cpu")
        >>> delta.original_bytes, delta.stored_bytes < 1000
        (256000, True)
        >>> delta.apply(old)[16:19, 0]
        tensor([0., 1., 0.])

    Args:
        table: the compressed differences. The table has the shape and dtype of the tensor.
        base: the fingerprint (`ibp.deltas.fingerprint`) of the base.
        result: the fingerprint of the new version.

    Attributes:
        table, base, result: the arguments.
        shape, dtype: the shape and dtype of the tensor.
        device: the device of the compressed differences.

    Raises:
        TypeError: table is not an `ibp.CompressedTensor`, or a fingerprint is not an integer.
        ValueError: a fingerprint is not in [0, 2^64 - 1].
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
        """Whether both versions have the same fingerprint, so that they are almost certainly equal."""
        return self.base == self.result

    @property
    def original_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.table.original_bytes

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the delta when it is sent or stored in a file. It is the size of the compressed differences,
        the index of their rows, and the codebook."""
        return self.table.stored_bytes + self.table.index_bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the delta occupies."""
        return self.table.nbytes

    def __repr__(self) -> str:
        share = f" ({self.stored_bytes / self.original_bytes:.2%})" if self.original_bytes else ""
        return (
            f"ibp.deltas.Delta(shape={list(self.shape)}, dtype={self.dtype}, bytes={self.original_bytes:,} -> "
            f"{self.stored_bytes:,}{share}, base={self.base:016x}, result={self.result:016x}, device={self.device})"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Delta:
        """Returns a copy of the delta on a device, or the delta itself if it is already there."""
        target = memory.canonical(device)
        return (
            self if target == self.device else Delta(self.table.to(target, None, non_blocking), self.base, self.result)
        )

    def apply_(self, base: torch.Tensor) -> torch.Tensor:
        """Turns `base` into the new version, in place, and returns it.

        The call checks that the delta was made for this base, and that the result is the new version. If an error is
        raised, the base holds the same bits as before the call. Gradients are not computed.

        Args:
            base: a tensor of the delta's shape and dtype on the CPU or a CUDA device. It may have any strides, but
                elements must not overlap. The delta is copied to the device of base if necessary.

        Raises:
            TypeError: base is not a tensor, has another dtype, or is a conjugated or negated view.
            DeltaMismatchError: base does not have the shape and the bits of the tensor that the delta was made for.
            CorruptTableError: the delta is damaged.
        """
        apply_all([("base", self, base)])
        return base

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the new version. Works like `apply_`, but on a copy of the base."""
        return self.apply_(base.detach().clone())
