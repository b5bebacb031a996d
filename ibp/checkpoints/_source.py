"""What readers see of a file of tensors: names, shapes, dtypes, and ranges of bytes."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from .. import _core
from .._common.closing import Closing
from .._files import VIEW_KEY, View, entry_of, open_regular
from .._tables.compressed_tensor import CompressedTensor

_BLOCK_BYTES = 16 << 20  # bytes that `tensor` reads at once


class SourceFormatError(ValueError):
    """A file of tensors is damaged, holds something that is not a tensor, or has an unknown format."""


class NotTensorsError(SourceFormatError):
    """A file is whole, but holds what this package does not read, such as objects of Python, or no tensors at all."""


def is_chosen(name: str, include: Iterable[str] | None, exclude: Iterable[str]) -> bool:
    """Returns whether a name matches a pattern of include (None: any name) and none of exclude. Patterns are those
    of fnmatch."""

    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return (include is None or matches(include)) and not matches(exclude)


def chosen(names: Iterable[str], include: Iterable[str] | None, exclude: Iterable[str]) -> list[str]:
    """Returns the names that patterns choose. Raises ValueError if a pattern of include matches none of the names."""
    every, unwanted = list(names), tuple(exclude)
    wanted = None if include is None else tuple(include)
    for pattern in wanted or ():
        if not any(is_chosen(name, [pattern], ()) for name in every):
            raise ValueError(f"there is no tensor whose name matches {pattern!r}")
    return [name for name in every if is_chosen(name, wanted, unwanted)]


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """A tensor of a file. It is read by ranges of its bytes: those of the contiguous tensor, little-endian."""

    name: str  # the name in its file
    # dtype, shape: of the tensor.
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Returns bytes [start, end), uint8 and contiguous. They must not be written to, because they may be the file's map.
    # Threads may call it at once. Raises OSError or ValueError if the file cannot be read, or is damaged.
    read: Callable[[int, int], np.ndarray]
    # Whether it is an array whose items are looked up, and not a weight that is used as a whole.
    has_items: bool = False
    table: CompressedTensor | None = None  # the table that holds the tensor in a file of ibp
    # The dtype and shape in the file, if torch does not have the dtype and the tensor consists of its bytes; otherwise
    # None.
    entry: tuple[str, tuple[int, ...]] | None = None
    # The tensor whose memory contains this one, and the view that this one is. None for a tensor with memory of its
    # own.
    base: SourceTensor | None = None
    view: View | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def header_entry(self) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype and shape of the plain tensor in the header of a file. Raises ValueError if safetensors
        does not have the dtype."""
        entry = self.entry or entry_of(self.dtype, self.shape)
        if entry is None:
            raise ValueError(f"tensor {self.name!r} has {self.dtype}, which safetensors lacks")
        return entry

    def tensor(self) -> torch.Tensor:
        """Returns the whole tensor, in memory of its own on the CPU."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        to = data.numpy()
        for start in range(0, self.num_bytes, _BLOCK_BYTES):
            end = min(start + _BLOCK_BYTES, self.num_bytes)
            to[start:end] = self.read(start, end)
        return data.view(self.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"SourceTensor({self.name!r}, {self.dtype}, {list(self.shape)})"


def mapped_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray, has_items: bool = False
) -> SourceTensor:
    """Returns a tensor whose bytes are in a map of its file."""
    return SourceTensor(name, dtype, shape, lambda start, end: data[start:end], has_items)


def with_entry(tensor: SourceTensor, dtype: str, shape: tuple[int, ...]) -> SourceTensor:
    """Returns the tensor of an entry in a header. It keeps the entry if torch's tensor has another one."""
    entry = dtype, shape
    return tensor if entry_of(tensor.dtype, tensor.shape) == entry else replace(tensor, entry=entry)


def map_file(path: str | os.PathLike[str]) -> np.ndarray:
    """Returns the bytes of a file, uint8 [size], read-only. Pages are loaded when they are read, and do not count as
    a process's own memory. The map lives as long as any view of it."""
    with os.fdopen(open_regular(path), "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        pages = memoryview(_core.FilePages(file.fileno(), 0, num_bytes)) if num_bytes else memoryview(b"")
        return np.frombuffer(pages.toreadonly(), np.uint8)


class Source(Closing):
    """A file of tensors, or a set of files that is read as one source.

    A context manager: leaving it closes the file.

    Attributes:
        path: the path as it was given.
        format: "safetensors", "npy", "npz", "torch" or "ibp".
        metadata: texts by keys that the file holds in addition to its tensors.
        tensors: mapping from name to `SourceTensor`, in the file's order.
        parts: the files of a set as sources, in the order of their names; for one file, the source itself.
        files: paths, on this machine, of the files that are read.
    """

    def __init__(
        self,
        path: str,
        format: str,
        tensors: Mapping[str, SourceTensor],
        metadata: Mapping[str, str] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.format = path, format
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.tensors: Mapping[str, SourceTensor] = MappingProxyType(dict(tensors))
        self.parts: tuple[Source, ...] = (self,)
        self.files: tuple[str, ...] = (path,)
        self._close = close

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def stored(self) -> list[SourceTensor]:
        """Returns the tensors that a file has to store: those that are not views, and the bases of the views."""
        return list(dict.fromkeys(tensor.base or tensor for tensor in self.tensors.values()))

    def view_texts(self) -> dict[str, str]:
        """Returns the texts of metadata that describe the tensors which are views."""
        views = {name: tensor.view for name, tensor in self.tensors.items()}
        return {f"{VIEW_KEY}{name}": view.text() for name, view in views.items() if view is not None}

    def only(self, names: Iterable[str]) -> Source:
        """Returns a source with these tensors alone, without the files that have none of them."""
        wanted = set(names)
        kept = {name: tensor for name, tensor in self.tensors.items() if name in wanted}
        restricted = Source(self.path, self.format, kept, self.metadata)
        if len(self.parts) > 1:
            restricted.parts = tuple(part.only(wanted) for part in self.parts if not wanted.isdisjoint(part.tensors))
        return restricted

    def close(self) -> None:
        """Closes the file. Arrays that were read stay valid."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"Source({self.path!r}, {self.format}, {len(self.tensors)} tensors, {self.num_bytes:,} bytes)"
