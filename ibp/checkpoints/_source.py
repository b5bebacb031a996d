"""`Source` and `SourceTensor`, which present files of every format, and models in memory, in the same way: as tensors
with a name, a shape, a dtype, and a function that reads ranges of bytes.

The second part of the file reads and writes safetensors files, both plain ones and those of ibp; `_other_files.py` has
the other formats. Plain tensors are read from the memory map of the file. Tables are decoded block by block when they
are read. `write_safetensors` writes the tensors of a source to a plain file. `is_coded` recognises files of ibp.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import torch

from .. import _core
from .._common.process import Closing, ForkLock
from .._common.sequences import in_threads, rounded_up
from .._files import (
    FORMAT,
    MAX_HEADER_BYTES,
    STORAGE,
    SUFFIX,
    VIEW_KEY,
    Entry,
    File,
    FileFormatError,
    PathLike,
    View,
    check_names,
    entry_of,
    find_files,
    form_of,
    open_regular,
    path_text,
    range_verifier,
    read_header,
    stored_in,
    views_in,
)
from .._files import open as open_file
from .._rows.geometry import bytes_of, check_tensor
from .._rows.handle import new_record
from .._rows.table import handle_on
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import WholeTensor, decoded_range

BLOCK_BYTES = 4 << 20  # number of bytes of a tensor that a thread reads, and decodes, at once
# Number of bytes that one call of `decode_bytes` decodes. It is small enough that the call uses a single thread.
_DECODED_BYTES = 1 << 19


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

        def read(span: tuple[int, int]) -> None:
            to[slice(*span)] = self.read(*span)

        for _ in in_threads(read, list(self.spans(BLOCK_BYTES)), torch.get_num_threads()):
            pass
        return data.view(self.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"SourceTensor({self.name!r}, {self.dtype}, {list(self.shape)})"


def loaded_tensor(name: str, tensor: torch.Tensor, path: object) -> SourceTensor:
    """Returns the `SourceTensor` of a dense tensor of torch, on any device and with any strides. Raises
    SourceFormatError if it is not dense. path: its file, for the message."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise SourceFormatError(f"{path}: tensor {name!r} is not dense; wanted a strided tensor with its values")
    tensor, size = tensor.detach(), tensor.dtype.itemsize

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        if not tensor.numel() or (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()):
            return bytes_of(tensor)[start_byte:end_byte].cpu().numpy()
        first, last = start_byte // size, -(-end_byte // size)
        elements = _elements(tensor, first, last)
        return bytes_of(elements)[start_byte - first * size : end_byte - first * size].cpu().numpy()

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


# A function that yields the bytes of tensors in order, block by block.
Pieces = Callable[[Iterable[SourceTensor]], Generator[np.ndarray, None, None]]


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
            check_names({name: False})
            check_tensor(value, name)
            tensor = loaded_tensor(name, value, "the model")
            memory = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
            first = of_memory.setdefault(memory, tensor)
            tensors[name] = tensor if first is tensor else replace(tensor, base=first)
    return Source("the model", "torch", tensors)


# ---- safetensors files ----

# The items of a tensor may be divided among several tables. The metadata then has a key for each of these tables: this
# string, followed by the table's name. The key's value has three fields: first and last (the table holds items [first,
# last) of the tensor), and items (the number of items of the tensor).
ROWS_KEY = "ibp_rows."
_ALIGNMENT = 8  # bytes: the alignment of data in a safetensors file
_METADATA = "__metadata__"
_CPU = torch.device("cpu")


def open_safetensors(path: str | os.PathLike[str], verify: bool = False) -> Source:
    """Opens a safetensors file: one of ibp, or a plain one, which has no checksums. verify: as in `open_ibp`.

    Raises:
        ibp.FileFormatError: it is not a valid safetensors file.
        SourceFormatError: it holds a delta.
    """
    header = read_header(Path(path))
    if not header.is_plain:
        return open_ibp(path, verify)
    with os.fdopen(open_regular(path), "rb") as file:
        # The kernel loads pages of the map when they are read, and does not count them as a process's own memory. The
        # map lives as long as any view of it.
        pages = memoryview(_core.FilePages(file.fileno(), 0, os.fstat(file.fileno()).st_size))
    data, tensors = np.frombuffer(pages.toreadonly(), np.uint8), {}
    for name, entry in header.tensors.items():
        if entry.end > data.size:
            raise FileFormatError(f"{path} has changed since it was opened")
        tensors[name] = _mapped_tensor(name, entry, data[entry.start : entry.end])
    return Source(os.fspath(path), "safetensors", tensors, header.metadata)


def _mapped_tensor(name: str, entry: Entry, data: np.ndarray) -> SourceTensor:
    """Returns a plain tensor of a file. Its bytes are read from the memory map of the file."""
    dtype, shape = form_of(entry.dtype, entry.shape, entry.num_bytes)
    tensor = SourceTensor(name, dtype, shape, lambda start, end: data[start:end])
    return _with_entry(tensor, entry.dtype, entry.shape)


def _with_entry(tensor: SourceTensor, dtype: str, shape: tuple[int, ...]) -> SourceTensor:
    """Returns a tensor whose entry in a file's header has this dtype and shape. If torch does not have the dtype, the
    returned tensor also has the entry, so that the tensor can be stored again with the same entry."""
    entry = dtype, shape
    return tensor if entry_of(tensor.dtype, tensor.shape) == entry else replace(tensor, entry=entry)


# ---- files of ibp ----


def open_ibp(path: str | os.PathLike[str], verify: bool = False) -> Source:
    """Opens a file of ibp, or a set of them. verify: whether to check the checksums of headers and codebooks now, and
    those of other bytes when `SourceTensor.read` first reads them.

    Raises:
        ibp.FileFormatError: it is not a valid file of ibp.
        ibp.ChecksumError: with `verify`, bytes that are read now are damaged.
        SourceFormatError: it holds a delta, which becomes a tensor only together with its base.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_file(path, verify=verify, memory="host"))
        tensors: dict[str, SourceTensor] = {}
        for name, value, entry in stored_in(file):
            if isinstance(value, (CompressedTensor, WholeTensor)):
                tensors[name] = _coded_tensor(name, value)
            elif isinstance(value, torch.Tensor) and entry is not None:
                tensors[name] = _with_entry(loaded_tensor(name, value, path), *entry)
            else:
                raise SourceFormatError(f"{path}: {name!r} is a delta; wanted tensors: apply it to its base first")
            if verify and not isinstance(value, WholeTensor):  # a WholeTensor has been read and verified already
                tensors[name] = _verified(tensors[name], file, value)
        tensors = _with_whole(tensors, file.metadata, path)
        for name, view in views_in(file).items():
            if view.base not in tensors:
                raise FileFormatError(f"{path}: {name!r} is a view of {view.base!r}, some items of a tensor")
            tensors[name] = _view_tensor(name, view, tensors[view.base])
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(STORAGE) or name in file}
        metadata = {key: text for key, text in file.metadata.items() if not key.startswith(ROWS_KEY)}
        source = Source(os.fspath(path), "ibp", tensors, metadata)
        source.files = tuple(map(os.fspath, find_files(Path(path))[0].values()))
        if len(source.files) > 1 and list(tensors) == list(file):
            source.parts = _parts_of(source, file)
        source.closing = stack.pop_all()
        return source


def _verified(tensor: SourceTensor, file: File, value: CompressedTensor | torch.Tensor) -> SourceTensor:
    """Returns the tensor with another `read`, which first verifies the blocks of the file that it will read. value: the
    tensor or table in the file. A table is verified as a whole when `SourceTensor.table` is first read."""
    verify = range_verifier(file, tensor.name, value)

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        verify(start_byte, end_byte)
        return tensor.read(start_byte, end_byte)

    if not isinstance(value, CompressedTensor):
        return replace(tensor, read=read)

    @functools.cache  # so that the table can be requested again after the file has been closed
    def make_table() -> CompressedTensor:
        file.verify([tensor.name])
        return value

    return replace(tensor, read=read, make_table=make_table)


def _parts_of(whole: Source, file: File) -> tuple[Source, ...]:
    """Returns a source for each file of a set. A table with parts in several files belongs to the first of them."""
    tensors: dict[str, dict[str, SourceTensor]] = {os.path.basename(path): {} for path in whole.files}
    for name, tensor in whole.tensors.items():
        held_by = file.info(name).files
        tensors[held_by[0] if held_by else next(iter(tensors))][name] = tensor
    return tuple(
        Source(path, "ibp", tensors[os.path.basename(path)], read_header(Path(path)).user_metadata)
        for path in whole.files
    )


def _coded_tensor(name: str, coded: CompressedTensor | WholeTensor) -> SourceTensor:
    """Returns a `SourceTensor` for a table, or for a tensor that a general codec has coded. Ranges are decoded when
    they are read, by the thread that reads them: callers read several ranges at the same time."""

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        if start_byte == end_byte:
            return np.empty(0, np.uint8)
        if isinstance(coded, WholeTensor):
            return decoded_range(coded, start_byte, end_byte).numpy()
        return _decoded(coded, start_byte, end_byte)

    table = None if isinstance(coded, WholeTensor) else lambda: coded
    return SourceTensor(name, coded.dtype, tuple(coded.shape), read, make_table=table)


def _decoded(table: CompressedTensor, start_byte: int, end_byte: int) -> np.ndarray:
    """Returns bytes [start_byte, end_byte) of a table's tensor, which the calling thread decodes alone."""
    out = torch.empty(end_byte - start_byte, dtype=torch.uint8, device="cpu")
    handle, fault = handle_on(table, _CPU), new_record(_CPU)
    step = max(1, _DECODED_BYTES // table.row_bytes) * table.row_bytes
    for at in range(start_byte - start_byte % step, end_byte, step):
        start, end = max(at, start_byte), min(at + step, end_byte)
        to = out[start - start_byte : end - start_byte]
        torch.ops.ibp.decode_bytes.default(handle.table, start, end, 0, to, fault)
    handle.faults.raise_for(fault)
    return out.numpy()


def _joined_tensor(name: str, parts: list[SourceTensor]) -> SourceTensor:
    """Returns a tensor whose items are in several tables, in order."""

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        found, at = [], 0
        for part in parts:
            start, end = max(start_byte - at, 0), min(end_byte - at, part.num_bytes)
            if start < end:
                found.append(part.read(start, end))
            at += part.num_bytes
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint8), *found])

    return SourceTensor(name, parts[0].dtype, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]), read)


def _view_tensor(name: str, view: View, base: SourceTensor) -> SourceTensor:
    """Returns a tensor that is stored as a view of another tensor, its base. Unless the view's elements are contiguous,
    the whole base is decoded when the view is first read."""
    view.check(math.prod(base.shape))
    start = view.offset * base.dtype.itemsize
    loaded = functools.cache(lambda: loaded_tensor(name, view.of(base.tensor()), base.name))
    lock = ForkLock()  # `functools.cache` would let each of several threads decode the base
    is_contiguous = (
        torch.empty(0, dtype=torch.uint8, device="meta").as_strided(view.shape, view.strides).is_contiguous()
    )

    def read(first: int, last: int) -> np.ndarray:
        if is_contiguous:
            return base.read(start + first, start + last)
        with lock:
            whole = loaded()
        return whole.read(first, last)

    return SourceTensor(name, base.dtype, view.shape, read, base=base, view=view)


def _with_whole(tensors: dict[str, SourceTensor], metadata: Mapping[str, str], path: object) -> dict[str, SourceTensor]:
    """Joins tables that hold items of the same tensor (see ROWS_KEY). Returns the tensors, with the joined tensor in
    place of its tables. Raises FileFormatError if the tables do not hold all items of their tensor."""
    pieces: dict[str, list[tuple[int, int, int, str]]] = {}
    for key, text in metadata.items():
        if key.startswith(ROWS_KEY):
            name = key.removeprefix(ROWS_KEY)
            try:
                fields = dict(pair.split("=") for pair in text.split(" "))
                first, last, items = (int(fields[field]) for field in ("first", "last", "items"))
            except (ValueError, KeyError):
                raise FileFormatError(
                    f"{path}: the metadata {key!r} is {text[:60]!r}; wanted first, last and items"
                ) from None
            pieces.setdefault(name.rpartition(".rows-")[0], []).append((first, last, items, name))
    for whole, found in pieces.items():
        found.sort()
        ends = [0, *(last for _, last, _, _ in found)]
        fits = all(first == end for (first, *_), end in zip(found, ends)) and ends[-1] == found[0][2]
        parts = [tensors.pop(name, None) for *_, name in found]
        held = [part for part in parts if part is not None]
        alike = len({(part.dtype, part.shape[1:]) for part in held}) == 1 and all(part.shape for part in held)
        counts = [part.shape[0] if part.shape else 0 for part in held]
        fits = fits and len(held) == len(parts) and counts == [last - first for first, last, _, _ in found]
        if whole in tensors or not fits or not alike:
            raise FileFormatError(f"{path}: the tables of {whole!r} are not those of all its items")
        tensors[whole] = _joined_tensor(whole, held)
    return tensors


# ---- plain files ----


def write_safetensors(file: IO[bytes], source: Source, pieces: Pieces) -> None:
    """Writes an ordinary safetensors file. Raises ValueError if safetensors reserves a tensor's name, if it does not
    support a tensor's dtype, or if the header is too large."""
    header: dict[str, Any] = {_METADATA: dict(source.metadata)} if source.metadata else {}
    end = 0
    for tensor in source.tensors.values():
        if tensor.name == _METADATA:
            raise ValueError(f"there is a tensor {_METADATA!r}, a name that safetensors has for other uses")
        start, end = end, end + tensor.num_bytes
        dtype, shape = tensor.header_entry()
        header[tensor.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(rounded_up(len(text), _ALIGNMENT))
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes; readers of safetensors take at most {MAX_HEADER_BYTES}")
    file.write(len(text).to_bytes(8, "little") + text)
    write_pieces(file, pieces, source.tensors.values())


def write_pieces(file: IO[bytes], pieces: Pieces, tensors: Iterable[SourceTensor]) -> None:
    """Writes the bytes of tensors to a file, one tensor after the other."""
    with contextlib.closing(pieces(tensors)) as found:
        for piece in found:
            file.write(piece.data)


def is_coded(path: PathLike) -> bool:
    """Returns whether a file is a file of ibp. Only the header is read. Returns False for a file of another format.

    Example:
        >>> ibp.save("coded.safetensors", {"a": ibp.compress(torch.ones(1000, 1024))})
        >>> ibp.checkpoints.is_coded("coded.safetensors"), ibp.checkpoints.is_coded("pytorch_model.bin")
        (True, False)

    Raises:
        OSError: a file whose name ends in ".safetensors" cannot be read.
    """
    text = path_text(path)
    if not text.endswith(SUFFIX):
        return False
    with os.fdopen(open_regular(text), "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        return header_bytes <= MAX_HEADER_BYTES and f'"{FORMAT}":'.encode() in file.read(header_bytes)
