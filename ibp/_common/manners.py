"""Defines base classes of the objects that the library gives to its users: manners that such objects have in common.

`TensorManners`, `CodedManners` and `Movable` are for objects that stand for tensors. They provide those methods and
properties of torch.Tensor that need no values, such as `size()`, `is_cuda` and `cpu()`. `Saves` adds `savings` to
objects that have coded bytes, and `Statistics` is the base class of counters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

_Self = TypeVar("_Self", bound="Movable")


class Movable:
    """Adds `cpu()` and `cuda()` to a class that has `to(device)`."""

    __slots__ = ()

    if TYPE_CHECKING:

        def to(self: _Self, device: torch.device | str | int, *, non_blocking: bool = False) -> _Self: ...

    def cpu(self: _Self) -> _Self:
        """Returns `to("cpu")`."""
        return self.to(torch.device("cpu"))

    def cuda(self: _Self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> _Self:
        """Returns `to(device)`. device: a CUDA device. None: the current CUDA device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)


class TensorManners:
    """Provides methods and properties of torch.Tensor that follow from `shape`, `dtype` and `device`. The subclass must
    provide these three."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> torch.Size: ...

        @property
        def dtype(self) -> torch.dtype: ...

        @property
        def device(self) -> torch.device: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Returns the shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Returns the number of elements of the tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Returns the size in bytes of an element of the tensor."""
        return self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Size in bytes of an element of the tensor."""
        return self.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        """Always False: the values of such an object have no gradient."""
        return False

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]


class CodedManners(TensorManners):
    """A base class of coded tensors. If an object is used in a way that only a torch.Tensor supports, an error says
    what to call instead.

    Attributes:
        _is: a name for the object in messages, such as "a compressed table".
        _instead: the end of messages, which says what to call instead.
    """

    _is: str
    _instead: str

    def __new__(cls, *values: object, **_: object) -> Any:
        if values:
            given = type(values[0]).__name__
            raise TypeError(f"{cls.__name__}() takes no {given}: ibp.compress(x) makes a {cls.__name__} of a tensor")
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(torch.Tensor, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(f"{self._is} has no {name!r}: {self._instead}")

    def _refuse_arithmetic(self, *_: object) -> NoReturn:
        raise TypeError(f"{self._is} takes part in no arithmetic: {self._instead}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse_arithmetic
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = (
        _refuse_arithmetic
    )
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse_arithmetic
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse_arithmetic

    def _refuse_assignment(self, *_: object) -> NoReturn:
        raise TypeError(f"items of {self._is} cannot be assigned: {self._instead}")

    __setitem__ = __delitem__ = _refuse_assignment

    def __dlpack_device__(self) -> NoReturn:
        """Raises TypeError if the object is given to torch.from_dlpack, torch.as_tensor or torch.tensor. The last two
        would otherwise read the object row by row."""
        raise TypeError(f"{self._is} has no elements in memory: {self._instead}")

    __dlpack__ = __dlpack_device__


# ---- savings, and counters ----


def share_saved(num_bytes: int, stored_bytes: int) -> float:
    """Returns the fraction of the bytes that coding saves: 1 - stored_bytes / num_bytes, or 0 if num_bytes is 0. It is
    negative if coding has made the tensors larger.

    Args:
        num_bytes, stored_bytes: size in bytes of the tensors before and after coding. The caller decides whether
            headers, the index and codebooks count.
    """
    return 1 - stored_bytes / num_bytes if num_bytes else 0.0


def shown_memory(nbytes: int, original_bytes: int) -> str:
    """Returns a string for the `repr` of coded objects: the size of all memory that coded tensors take, and the ratio
    of this size to the size of the plain tensors. The memory includes the index and codebooks, so the ratio cannot be
    computed from `savings`, for which only coded rows and codebooks count.

    Example:
        >>> ibp.adapters.shown_memory(1500, 2000)
        'nbytes=1,500 (75.0% of 2,000)'

    Args:
        nbytes: size in bytes of all memory that coded tensors take.
        original_bytes: size in bytes of the plain tensors. 0: the ratio is not shown.
    """
    share = f" ({nbytes / original_bytes:.1%} of {original_bytes:,})" if original_bytes else ""
    return f"nbytes={nbytes:,}{share}"


class Saves:
    """Adds `savings` to classes that have `original_bytes` and `stored_bytes`."""

    @property
    def savings(self: Any) -> float:
        """1 - stored_bytes / original_bytes; 0 if original_bytes is 0."""
        return share_saved(self.original_bytes, self.stored_bytes)


class Statistics:
    """Base class of the objects that `stats()` returns. A subclass is a frozen dataclass. Its fields are counters, and
    its properties are fractions that are computed from the counters. An object can be unpacked like a tuple of the
    counters."""

    def as_dict(self) -> dict[str, Any]:
        """Returns counters and fractions by name."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        names += [name for name in dir(type(self)) if isinstance(getattr(type(self), name), property)]
        return {name: getattr(self, name) for name in names}

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
