"""What readers see of a file of tensors: names, shapes, dtypes, and bytes by ranges."""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from .._common.closing import Closing

_BLOCK_BYTES = 16 << 20  # of what `tensor` reads at once


class SourceFormatError(ValueError):
    """A file of tensors is damaged, holds what is no tensor, or has no known format."""

    __module__ = "ibp.checkpoints"


class NotTensorsError(SourceFormatError):
    """A file is whole, and holds what this package does not read, such as objects of Python, or no tensors at all."""


def is_chosen(name: str, include: Iterable[str] | None, exclude: Iterable[str]) -> bool:
    """Whether a name matches a pattern of include (None: any) and none of exclude; patterns are those of fnmatch."""

    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return (include is None or matches(include)) and not matches(exclude)


def chosen(names: Iterable[str], include: Iterable[str] | None, exclude: Iterable[str]) -> list[str]:
    """The names that patterns choose. ValueError if a pattern of include matches none of the names."""
    every, unwanted = list(names), tuple(exclude)
    wanted = None if include is None else tuple(include)
    for pattern in wanted or ():
        if not any(is_chosen(name, [pattern], ()) for name in every):
            raise ValueError(f"there is no tensor whose name matches {pattern!r}")
    return [name for name in every if is_chosen(name, wanted, unwanted)]


class SourceTensor(ABC):
    """A tensor of a file, which is read by ranges of its bytes: those of the contiguous tensor, little-endian.

    Attributes:
        name: in its file.
        dtype: torch.dtype.
        shape: tuple of ints.
        has_items: whether it is an array whose items are looked up, rather than a weight that is used as a whole.
    """

    has_items = False

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def read(self, start_byte: int, end_byte: int) -> np.ndarray:
        """Bytes [start_byte, end_byte), uint8 and contiguous; not to be written to, since it may be the file's map.
        Threads may call it at once.

        Raises:
            OSError, ValueError: the file cannot be read, or is damaged.
        """

    def tensor(self) -> torch.Tensor:
        """The whole tensor, in memory of its own on the CPU."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8)
        to = data.numpy()
        for start in range(0, self.num_bytes, _BLOCK_BYTES):
            end = min(start + _BLOCK_BYTES, self.num_bytes)
            to[start:end] = self.read(start, end)
        return data.view(self.dtype).reshape(self.shape) if data.numel() else torch.empty(self.shape, dtype=self.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.dtype}, {list(self.shape)})"


class MappedTensor(SourceTensor):
    """A tensor that lies in a map of its file."""

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray) -> None:
        super().__init__(name, dtype, shape)
        self._data = data

    def read(self, start_byte: int, end_byte: int) -> np.ndarray:
        return self._data[start_byte:end_byte]


class Source(Closing):
    """A file of tensors, or a set of files that is read as one.

    A context manager: leaving it closes the file.

    Attributes:
        path: as it was given.
        format: "safetensors", "npy", "npz", "torch" or "ibp".
        metadata: texts by text that the file holds besides its tensors.
        tensors: mapping from name to `SourceTensor`, in the file's order.
        parts: the files of a set as sources, in the order of their names; of one file, the source itself.
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
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def only(self, names: Iterable[str]) -> Source:
        """The same with these tensors alone, and without files that have none of them."""
        wanted = set(names)
        kept = {name: tensor for name, tensor in self.tensors.items() if name in wanted}
        restricted = Source(self.path, self.format, kept, self.metadata)
        if len(self.parts) > 1:
            restricted.parts = tuple(part.only(wanted) for part in self.parts if not wanted.isdisjoint(part.tensors))
        return restricted

    def close(self) -> None:
        """Lets go of the file. Arrays that were read stay valid."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"Source({self.path!r}, {self.format}, {len(self.tensors)} tensors, {self.num_bytes:,} bytes)"
