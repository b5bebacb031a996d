"""Finds the range of memory that a saved tensor occupies. Bytes that several saved tensors share are then encoded only
once."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._layout import geometry

T = TypeVar("T")

# A tensor with gaps is saved as its whole storage if the storage is at most this many times as large as the tensor.
_MOST_OF_A_STORAGE = 4


class ByteSpan(NamedTuple):
    """A range of bytes in a storage. These bytes are compressed together.

    Attributes:
        storage: the address of torch's C++ object for the storage.
        start: offset of the range in the storage, in bytes.
        num_bytes: size of the range in bytes.
        version: the saved tensor's version, which torch increases whenever the tensor is changed in place.
    """

    storage: int
    start: int
    num_bytes: int
    version: int


class SpanView(NamedTuple):
    """The layout of a tensor in its span. offset: the position of its first element in the span, in elements."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, as a view of `data`. data: the bytes of its span, uint8 [num_bytes]."""
        rest = data.numel() % self.dtype.itemsize
        return (data[:-rest] if rest else data).view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class UnchangedTensor(NamedTuple):
    """A tensor that must not be changed any more, and its version at the time of saving."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, x: torch.Tensor) -> UnchangedTensor:
        return cls(x.detach(), x._version)  # x itself would keep its autograd graph alive

    @property
    def is_changed(self) -> bool:
        return self.tensor._version != self.version

    def get(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError, with autograd's message, if it has been changed since it was
        saved."""
        if self.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


def is_plain(x: torch.Tensor) -> bool:
    """Returns whether a tensor is an ordinary strided tensor of a dtype that tables can hold. Tensor subclasses,
    tensors inside a transform of torch.func, and conjugate or negative views are not ordinary."""
    return (
        type(x) is torch.Tensor
        and x.layout == torch.strided
        and x.dtype in geometry.DTYPES
        and not x.is_conj()
        and not x.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_of_parameter(x: torch.Tensor) -> bool:
    """Returns whether a tensor is a parameter, a view of a parameter, or a parameter that was cast to another dtype,
    for example by autocast."""
    base = x if x._base is None else x._base
    if base.requires_grad and base.is_leaf:
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return any(of is not None and of.name().endswith("AccumulateGrad") for of, _ in made_by.next_functions)


def span_of(x: torch.Tensor) -> tuple[ByteSpan, SpanView] | None:
    """Returns (the span of a plain tensor, the tensor's layout in the span). If the tensor is dense, the span consists
    of the tensor's bytes. Otherwise the span is the tensor's complete storage. Returns None if that storage is more
    than 4 times as large as the tensor."""
    storage, size = x.untyped_storage(), x.dtype.itemsize
    num_bytes, start, offset = int(x.numel() * size), int(x.storage_offset() * size), 0
    if not (x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)):
        whole = int(storage.nbytes())
        if whole > _MOST_OF_A_STORAGE * num_bytes:
            return None
        start, offset, num_bytes = 0, int(x.storage_offset()), whole
    return ByteSpan(storage._cdata, start, num_bytes, x._version), SpanView(x.dtype, x.shape, x.stride(), offset)


def bytes_of(x: torch.Tensor, span: ByteSpan) -> torch.Tensor:
    """Returns the bytes of a span as a view of x's storage, uint8 [num_bytes]. span: as `span_of(x)` returns it."""
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage(), span.start, (span.num_bytes,), (1,))


class SeenSpans(Generic[T]):
    """A map from spans that were saved, and may be saved again, to values. A value is valid only while the span's
    storage lives, so that a later storage at the same address is not mistaken for it."""

    def __init__(self) -> None:
        self._found: dict[ByteSpan, tuple[StorageWeakRef, T]] = {}

    def get(self, span: ByteSpan) -> T | None:
        entry = self._found.get(span)
        return None if entry is None or entry[0].expired() else entry[1]

    def put(self, span: ByteSpan, storage: torch.UntypedStorage, value: T) -> None:
        self._found[span] = StorageWeakRef(storage), value

    def drop_expired(self) -> None:
        self._found = {span: entry for span, entry in self._found.items() if not entry[0].expired()}
