"""`Source` and `SourceTensor`, which present files of every format, and models in memory, in the same way: as tensors
with a name, a shape, a dtype, and a function that reads ranges of bytes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from .._common.process import Closing
from .._files import VIEW_KEY, View, entry_of
from .._rows.geometry import bytes_of, check_tensor
from .._tables.compressed_tensor import CompressedTensor

_BLOCK_BYTES = 16 << 20  # number of bytes that `SourceTensor.tensor` reads at once


class SourceFormatError(ValueError):
    """A file of tensors is damaged, holds something that is not a tensor, or has an unknown format."""


class NotTensorsError(SourceFormatError):
    """A file is not damaged, but it holds no tensors, or values that this package does not read, such as objects of
    Python."""


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """A tensor of a file. The bytes of its contiguous, little-endian form are read range by range."""

    name: str  # the name in its file
    # dtype and shape of the tensor. See `entry` for a dtype that torch does not have.
    dtype: torch.dtype
    shape: tuple[int, ...]
    # A function that returns bytes [start, end) as a contiguous uint8 array. The array must not be written to, because
    # it may be the file's map. Several threads may call the function at once. It raises OSError or ValueError if the
    # file cannot be read, or is damaged.
    read: Callable[[int, int], np.ndarray]
    # Whether users look up single items of the tensor, as in an array of numpy. False for a weight, which is used as a
    # whole.
    has_items: bool = False
    # A function that returns `table`. None: there is no table.
    make_table: Callable[[], CompressedTensor] | None = None
    # The dtype and shape in the file's header, if torch does not have that dtype; `dtype` and `shape` are then those of
    # the tensor's bytes (see `form_of`). Otherwise None.
    entry: tuple[str, tuple[int, ...]] | None = None
    # If the tensor is a view: `base` is the tensor in whose memory it lies, and `view` describes the view. Otherwise
    # both are None.
    base: SourceTensor | None = None
    view: View | None = None

    @property
    def table(self) -> CompressedTensor | None:
        """The table that holds the tensor; its memory is the map of the file. None if no single table holds the tensor.

        Raises:
            ibp.ChecksumError: the source was opened with `verify`, and bytes of the table are damaged.
        """
        return None if self.make_table is None else self.make_table()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def spans(self, block_bytes: int) -> Iterator[tuple[int, int]]:
        """Divides the tensor's bytes into blocks of block_bytes bytes; the last block may be shorter. Yields the range
        (start, end) of each block. An empty tensor has one empty block."""
        for start in range(0, max(1, self.num_bytes), block_bytes):
            yield start, min(start + block_bytes, self.num_bytes)

    def header_entry(self) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype and shape to write in a header if the tensor is stored uncompressed. Raises ValueError if
        safetensors does not support the dtype."""
        entry = self.entry or entry_of(self.dtype, self.shape)
        if entry is None:
            raise ValueError(f"tensor {self.name!r} has {self.dtype}, which safetensors lacks")
        return entry

    def tensor(self) -> torch.Tensor:
        """Returns the whole tensor, in new memory on the CPU."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        to = data.numpy()
        for start, end in self.spans(_BLOCK_BYTES):
            to[start:end] = self.read(start, end)
        return data.view(self.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"SourceTensor({self.name!r}, {self.dtype}, {list(self.shape)})"


def loaded_tensor(name: str, tensor: torch.Tensor, path: object) -> SourceTensor:
    """Returns the `SourceTensor` of a dense tensor of torch, which may have any strides. Raises SourceFormatError if it
    is not dense. path: its file, for the message."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise SourceFormatError(f"{path}: tensor {name!r} is not dense; wanted a strided tensor with its values")
    tensor, size = tensor.detach(), tensor.dtype.itemsize

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return bytes_of(tensor)[start_byte:end_byte].numpy()
        first, last = start_byte // size, -(-end_byte // size)
        elements = _elements(tensor, first, last)
        return bytes_of(elements)[start_byte - first * size : end_byte - first * size].numpy()

    return SourceTensor(name, tensor.dtype, tuple(tensor.shape), read)


def _elements(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Returns elements first to last - 1 of a tensor in order, as a 1-D tensor. Copies only the items that hold these
    elements. If a single item holds all these elements, copies only the part of the item that contains them."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    each = tensor[0].numel()
    item, end = first // each, -(-last // each)
    if end - item == 1 and tensor.dim() > 1:
        return _elements(tensor[item], first - item * each, last - item * each)
    return tensor[item:end].reshape(-1)[first - item * each : last - item * each]


# A function that returns the bytes of a tensor in order, block by block.
Pieces = Callable[[SourceTensor], Iterable[np.ndarray]]


class Source(Closing):
    """A file of tensors, or a set of files that is read as one source.

    A context manager: leaving it closes the file.

    Attributes:
        path: the path as it was given.
        format: "safetensors", "npy", "npz", "torch" or "ibp"; "several" for files of different formats.
        metadata: a mapping from strings to strings, which the file holds in addition to its tensors.
        tensors: mapping from name to `SourceTensor`, in the file's order.
        parts: for several files, such as those of a set, a source for each file, in order. For one file, the source
            itself.
        files: paths, on this machine, of the files that are read.
        closing: context managers that are exited when the source is closed.
    """

    def __init__(
        self,
        path: str,
        format: str,
        tensors: Mapping[str, SourceTensor],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.format = path, format
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.tensors: Mapping[str, SourceTensor] = MappingProxyType(dict(tensors))
        self.parts: tuple[Source, ...] = (self,)
        self.files: tuple[str, ...] = (path,)
        self.closing = contextlib.ExitStack()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def stored(self) -> list[SourceTensor]:
        """Returns the tensors that a file must store: all tensors that are not views, and the bases of the views."""
        return list(dict.fromkeys(tensor.base or tensor for tensor in self.tensors.values()))

    def view_texts(self) -> dict[str, str]:
        """Returns the metadata entries that describe views. There is one for each tensor that is a view."""
        views = {name: tensor.view for name, tensor in self.tensors.items()}
        return {f"{VIEW_KEY}{name}": view.text() for name, view in views.items() if view is not None}

    def only(self, names: Iterable[str]) -> Source:
        """Returns a source with only these tensors. Files of a set that have none of these tensors are left out."""
        wanted = set(names)
        kept = {name: tensor for name, tensor in self.tensors.items() if name in wanted}
        restricted = Source(self.path, self.format, kept, self.metadata)
        restricted.files = self.files
        if len(self.parts) > 1:
            restricted.parts = tuple(part.only(wanted) for part in self.parts if not wanted.isdisjoint(part.tensors))
        return restricted

    def close(self) -> None:
        """Closes the file. Arrays that were read stay valid."""
        self.closing.close()

    def __repr__(self) -> str:
        return f"Source({self.path!r}, {self.format}, {len(self.tensors)} tensors, {self.num_bytes:,} bytes)"


def source_of(state: Mapping[str, torch.Tensor]) -> Source:
    """Returns the tensors of a model, on any device, as a source. Values that are not tensors are left out."""
    tensors, of_memory = dict[str, SourceTensor](), dict[tuple, SourceTensor]()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            check_tensor(value, name)
            read = functools.partial(_read, bytes_of(value.detach()))
            tensor = SourceTensor(name, value.dtype, tuple(value.shape), read)
            memory = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
            first = of_memory.setdefault(memory, tensor)
            tensors[name] = tensor if first is tensor else replace(tensor, base=first)
    return Source("the model", "torch", tensors)


def _read(data: torch.Tensor, start: int, end: int) -> np.ndarray:
    return data[start:end].cpu().numpy()
