"""Arrays of numpy: .npy files, mapped, and .npz archives, whose stored members are mapped and whose deflated ones are
read as streams."""

from __future__ import annotations

import contextlib
import io
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch

from .._common.locks import ForkLock
from ._source import Source, SourceFormatError, SourceTensor, map_file, mapped_tensor

_LOCAL_HEADER_BYTES = 30  # of a member of an archive, in front of its name; the lengths that follow are at 26 and 28
_MOST_HEADER_BYTES = 1 << 16
_MOST_HELD_BYTES = 1 << 30  # of arrays of an archive that are put in order as a whole
# What numpy, zipfile and the libraries below them raise for bytes that are no array or no member. RuntimeError: of a
# member that is encrypted, or compressed by a method that is not known.
_UNREADABLE = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    EOFError,
    OSError,
    RuntimeError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
)


def open_npy(path: str | os.PathLike[str]) -> Source:
    """An .npy file: one tensor, called as the file without its suffix. SourceFormatError: it is none, or its dtype is
    none of torch."""
    data = map_file(path)
    name = Path(path).stem
    return Source(os.fspath(path), "npy", {name: _mapped_array(name, data, path)})


def open_npz(path: str | os.PathLike[str]) -> Source:
    """An .npz archive: one tensor for each member. SourceFormatError: it is none, or a dtype is none of torch."""
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise SourceFormatError(f"{path} is no .npz archive: {error}") from None
    data = map_file(path)
    tensors: dict[str, SourceTensor] = {}
    held_bytes = 0
    with contextlib.ExitStack() as opened:
        opened.enter_context(archive)
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise SourceFormatError(f"{path}: the archive has two members {name!r}")
            if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                tensors[name] = _mapped_array(name, _stored_bytes(data, member, path), path)
                continue
            tensors[name], stream = _streamed_array(name, archive, member, path)
            if stream is None:
                held_bytes += tensors[name].num_bytes
            else:
                opened.callback(stream.close)
            if held_bytes > _MOST_HELD_BYTES:
                raise SourceFormatError(
                    f"{path}: {name!r} is deflated, in Fortran's order or big-endian, and would be held in memory: "
                    f"{held_bytes:,} bytes of such arrays; wanted at most {_MOST_HELD_BYTES:,}, or numpy.savez's file"
                )
        return Source(os.fspath(path), "npz", tensors, close=opened.pop_all().close)


def _converted_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], np.ndarray]
) -> SourceTensor:
    """An array whose memory is in another order than that of the contiguous little-endian tensor: ranges are put in
    order as they are read. load: returns the array; called once, when the tensor is first read."""
    lock, loaded, size = ForkLock(), list[np.ndarray](), dtype.itemsize

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        with lock:
            if not loaded:
                loaded.append(load())
        first, last = start_byte // size, -(-end_byte // size)
        elements = loaded[0].flat[first:last].astype(loaded[0].dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(elements).view(np.uint8)[start_byte - first * size : end_byte - first * size]

    return SourceTensor(name, dtype, shape, read, has_items=True)


class _Stream:
    """The end of a stream that is read forwards; going back reads it from its beginning.

    Args:
        name: of the tensor, for messages.
        start: bytes in front of it.
        reopen: opens the stream.
    """

    def __init__(self, name: str, start: int, reopen: Callable[[], IO[bytes]]) -> None:
        self._name, self._start, self._reopen, self._lock = name, start, reopen, ForkLock()
        self._stream: IO[bytes] | None = None
        self._at = 0

    def read(self, start_byte: int, end_byte: int) -> np.ndarray:
        with self._lock:
            if self._stream is None or start_byte < self._at:
                self.close()
                self._stream, self._at = self._reopen(), -self._start
            self._take(start_byte - self._at)
            return np.frombuffer(self._take(end_byte - start_byte, keep=True), np.uint8)

    def close(self) -> None:
        """Closes the stream, until it is read again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _take(self, num_bytes: int, keep: bool = False) -> bytearray:
        """The next bytes of the stream, or nothing, having read them."""
        kept = bytearray()
        while num_bytes > 0:
            try:
                piece = cast(IO[bytes], self._stream).read(min(num_bytes, 1 << 20))
            except _UNREADABLE as error:
                raise SourceFormatError(f"tensor {self._name!r} cannot be read: {error}") from None
            if not piece:
                raise SourceFormatError(f"tensor {self._name!r} ends before its last element")
            num_bytes, self._at = num_bytes - len(piece), self._at + len(piece)
            if keep:
                kept += piece
        return kept


def _mapped_array(name: str, data: np.ndarray, path: object) -> SourceTensor:
    dtype, shape, is_fortran, start = _read_array_header(io.BytesIO(data[:_MOST_HEADER_BYTES].tobytes()), name, path)
    num_bytes = math.prod(shape) * dtype.itemsize
    if data.size - start < num_bytes:
        raise SourceFormatError(f"{path}: array {name!r} has {data.size - start} bytes; its shape wants {num_bytes}")
    body, made = data[start : start + num_bytes], _torch_dtype(dtype, name, path)
    if _is_converted(dtype, shape, is_fortran):
        array = body.view(dtype).reshape(shape, order="F" if is_fortran else "C")
        return _converted_tensor(name, made, shape, lambda: array)
    return mapped_tensor(name, made, shape, body, has_items=True)


def _streamed_array(
    name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: object
) -> tuple[SourceTensor, _Stream | None]:
    """A deflated array, and the stream that it is read from; None where it will be held in memory."""
    try:
        with archive.open(member) as stream:
            dtype, shape, is_fortran, start = _read_array_header(stream, name, path)
        if start + math.prod(shape) * dtype.itemsize > member.file_size:
            raise SourceFormatError(f"{path}: array {name!r} has fewer bytes than its shape wants")
        made = _torch_dtype(dtype, name, path)
        if _is_converted(dtype, shape, is_fortran):
            return _converted_tensor(name, made, shape, lambda: _inflated(name, archive, member, path)), None
        streamed = _Stream(name, start, lambda: archive.open(member))
        return SourceTensor(name, made, shape, streamed.read, has_items=True), streamed
    except SourceFormatError:
        raise
    except _UNREADABLE as error:
        raise SourceFormatError(f"{path}: {name!r} cannot be read: {error}") from None


def _inflated(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: object) -> np.ndarray:
    """An array that lies deflated in an archive, as a whole."""
    try:
        with archive.open(member) as stream:
            return np.lib.format.read_array(stream)
    except _UNREADABLE as error:
        raise SourceFormatError(f"{path}: {name!r} cannot be read: {error}") from None


def _is_converted(dtype: np.dtype, shape: tuple[int, ...], is_fortran: bool) -> bool:
    """Whether an array's memory is in another order than that of the contiguous little-endian tensor."""
    return not dtype.isnative or (is_fortran and len(shape) > 1)


def _read_array_header(stream: IO[bytes], name: str, path: object) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """(dtype, shape, whether in Fortran's order, where the data begin)."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} of the format is unknown")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        if not all(size >= 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
        if dtype.shape:  # which numpy.save writes of no array
            raise ValueError(f"its elements are arrays of shape {dtype.shape}")
    except _UNREADABLE as error:
        raise SourceFormatError(f"{path}: {name!r} is no array of numpy: {error}") from None
    return dtype, shape, is_fortran, stream.tell()


def _torch_dtype(dtype: np.dtype, name: str, path: object) -> torch.dtype:
    try:
        if dtype.subdtype is not None:
            raise TypeError
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise SourceFormatError(f"{path}: array {name!r} has dtype {dtype}, which torch does not have") from None


def _stored_bytes(data: np.ndarray, member: zipfile.ZipInfo, path: object) -> np.ndarray:
    """Where the bytes of a member lie that is stored as it is."""
    header = data[member.header_offset : member.header_offset + _LOCAL_HEADER_BYTES]
    if header.size == _LOCAL_HEADER_BYTES and header[:4].tobytes() == b"PK\3\4":
        start = member.header_offset + _LOCAL_HEADER_BYTES + sum(header[26:30].view("<u2").tolist())
        if start + member.file_size <= data.size:
            return data[start : start + member.file_size]
    raise SourceFormatError(f"{path}: member {member.filename!r} does not lie inside the archive")
