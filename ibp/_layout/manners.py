"""The questions that code asks of any tensor, answered for everything that stands for one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import torch

_Self = TypeVar("_Self", bound="Movable")


class Movable:
    """Short ways to say where to, for what has `to(device)`."""

    __slots__ = ()

    if TYPE_CHECKING:

        def to(self: _Self, device: torch.device | str | int, *, non_blocking: bool = False) -> _Self: ...

    def cpu(self: _Self) -> _Self:
        """`to("cpu")`."""
        return self.to(torch.device("cpu"))

    def cuda(self: _Self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> _Self:
        """`to(device)`; None: the current CUDA device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)


class TensorManners:
    """Answers from `shape`, `dtype` and `device`, which a class that stands for a tensor has itself."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> torch.Size: ...

        @property
        def dtype(self) -> torch.dtype: ...

        @property
        def device(self) -> torch.device: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element of the tensor."""
        return self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the tensor."""
        return self.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        """Whether the bytes are on a GPU."""
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        """False: the values are fixed."""
        return False

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]
