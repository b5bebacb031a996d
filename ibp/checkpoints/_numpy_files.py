"""Reads and writes arrays of numpy. .npy files and stored members of .npz archives are mapped; deflated members are
loaded when they are first read."""

from __future__ import annotations

import contextlib
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch

from .._common.process import ForkLock
from ._source import Pieces, Source, SourceFormatError, SourceTensor

# Size in bytes of the local header of a member of an archive, and the offset in it of two 16-bit numbers: the lengths
# of the name and of the extra field, which follow the header.
_LOCAL_HEADER_BYTES, _LENGTHS_AT = 30, 26
# The errors that numpy, zipfile and the libraries below them raise for bytes that are not an array or a member. A
# RuntimeError is raised for a member that is encrypted, or compressed by an unknown method.
_UNREADABLE = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    KeyError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
)


def open_npy(path: str | os.PathLike[str]) -> Source:
    """Opens an .npy file: one tensor, whose name is the name of the file without its suffix.

    Raises:
        SourceFormatError: numpy cannot map it, or torch does not have its dtype.
    """
    name = Path(path).stem
    with _refused(f"{path}: {name!r} is no array that numpy reads"):
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return Source(os.fspath(path), "npy", {name: _tensor(name, array.dtype, array.shape, lambda: array, path)})


def open_npz(path: str | os.PathLike[str]) -> Source:
    """Opens an .npz archive: one tensor for each member.

    Raises:
        SourceFormatError: it is not an archive, numpy cannot read a member, two members have the same name, or torch
            does not have a member's dtype.
    """
    with contextlib.ExitStack() as stack:
        with _refused(f"{path} is no .npz archive"):
            archive = stack.enter_context(zipfile.ZipFile(path))
        tensors: dict[str, SourceTensor] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise SourceFormatError(f"{path}: the archive has two members {name!r}")
            tensors[name] = _member(name, archive, member, path)
        source = Source(os.fspath(path), "npz", tensors)
        source.closing = stack.pop_all()
        return source


def _member(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str | os.PathLike[str]) -> SourceTensor:
    """Returns the tensor of an array in an archive. A stored array is mapped. A deflated array is loaded as a whole
    when it is first read."""
    refusal = f"{path}: {name!r} is no array that numpy reads"
    loaded: list[np.ndarray] = []
    with _refused(refusal):
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(stream)
            data_at = stream.tell()
        if min(shape, default=0) < 0 or data_at + math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"it has shape {shape}, which its {member.file_size} bytes cannot hold")
        if member.compress_type == zipfile.ZIP_STORED and not dtype.hasobject:
            lengths = np.fromfile(path, "<u2", 2, offset=member.header_offset + _LENGTHS_AT)
            start = member.header_offset + _LOCAL_HEADER_BYTES + int(lengths.sum()) + data_at
            loaded.append(np.asarray(np.memmap(path, dtype, "r", start, shape, "F" if is_fortran else "C")))
    lock = ForkLock()

    def load() -> np.ndarray:
        try:
            with lock, _refused(refusal):
                if not loaded:
                    with archive.open(member) as stream:
                        loaded.append(np.lib.format.read_array(stream, allow_pickle=False))
                return loaded[0]
        except MemoryError:
            raise MemoryError(
                f"{path}: there is not enough memory for array {name!r}, which is deflated and so is loaded whole: "
                "unzip the archive and give the .npy files, which are mapped"
            ) from None

    return _tensor(name, dtype, shape, load, path)


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Converts the errors that numpy and zipfile raise for invalid bytes to SourceFormatError. what: the beginning of
    the message."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        text = str(error).partition("\n")[0]
        raise SourceFormatError(f"{what}: {text or type(error).__name__}") from None


def _tensor(
    name: str, dtype: np.dtype, shape: tuple[int, ...], load: Callable[[], np.ndarray], path: object
) -> SourceTensor:
    """Returns a tensor that reads its bytes from the array that `load` returns. If the array is big-endian or in
    Fortran order, its elements are converted and put in order when they are read. path: the file, for the message."""
    try:
        if dtype.subdtype is not None:
            raise TypeError
        made = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise SourceFormatError(f"{path}: array {name!r} has dtype {dtype}, which torch does not have") from None
    size = made.itemsize

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        array = load()
        if array.flags.c_contiguous and array.dtype.isnative:
            return array.reshape(-1).view(np.uint8)[start_byte:end_byte]
        first, last = start_byte // size, -(-end_byte // size)
        elements = array.flat[first:last].astype(array.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(elements).view(np.uint8)[start_byte - first * size : end_byte - first * size]

    return SourceTensor(name, made, shape, read, has_items=True)


# ---- writing ----


def write_npy(file: IO[bytes], source: Source, pieces: Pieces) -> None:
    """Writes an .npy file of one tensor. Raises ValueError unless the source has exactly one tensor, of a dtype that
    numpy has."""
    if len(source.tensors) != 1:
        count = len(source.tensors)
        raise ValueError(f"an .npy file holds one array, and there are {count} tensors; wanted a name with .npz")
    (tensor,) = source.tensors.values()
    _write_array(file, tensor, _dtype_of(tensor), pieces)


def write_npz(file: IO[bytes], source: Source, pieces: Pieces) -> None:
    """Writes an .npz archive, whose members are not deflated. Raises ValueError if numpy does not have a dtype."""
    dtypes = list(map(_dtype_of, source.tensors.values()))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for tensor, dtype in zip(source.tensors.values(), dtypes):
            with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as member:
                _write_array(member, tensor, dtype, pieces)


def _dtype_of(tensor: SourceTensor) -> np.dtype:
    """Returns the dtype of numpy for a tensor. Raises ValueError if numpy does not have the tensor's dtype."""
    try:
        return torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    except TypeError:
        raise ValueError(f"tensor {tensor.name!r} has {tensor.dtype}, which numpy lacks; wanted .safetensors") from None


def _write_array(file: IO[bytes], tensor: SourceTensor, dtype: np.dtype, pieces: Pieces) -> None:
    """Writes a tensor in the format of an .npy file. dtype: its dtype, as `_dtype_of` returns it."""
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(file, fields)
    for piece in pieces(tensor):
        file.write(piece.data)
