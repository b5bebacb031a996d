"""Writes the files to which checkpoints are decompressed. Each is written as a stream, and appears under its name
when it is whole."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from .._common.rounding import rounded_up
from .._files import MAX_HEADER_BYTES, SUFFIXES, format_of_name
from ._nested import nested
from ._source import SourceTensor

Pieces = Callable[[SourceTensor], Iterable[np.ndarray]]  # returns the bytes of a tensor, in order
Begin = Callable[[Path, int], AbstractContextManager[IO[bytes]]]  # `replaced`, with its options
Writer = Callable[[Path, Sequence[SourceTensor], Mapping[str, str], Pieces, Begin], None]

_ALIGNMENT = 8  # bytes: the alignment of data in a safetensors file
_METADATA = "__metadata__"


def write_safetensors(
    path: Path, tensors: Sequence[SourceTensor], metadata: Mapping[str, str], pieces: Pieces, begin: Begin
) -> None:
    """Writes an ordinary safetensors file."""
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        if tensor.name == _METADATA:
            raise ValueError(f"there is a tensor {_METADATA!r}, a name that safetensors has for other uses")
        start, end = end, end + tensor.num_bytes
        dtype, shape = tensor.header_entry()
        header[tensor.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(rounded_up(len(text), _ALIGNMENT))
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {path.name} has {len(text)} bytes; readers take at most {MAX_HEADER_BYTES}")
    with begin(path, _total(tensors)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in pieces(tensor):
                file.write(piece.data)


def write_npy(
    path: Path, tensors: Sequence[SourceTensor], metadata: Mapping[str, str], pieces: Pieces, begin: Begin
) -> None:
    """Writes an .npy file of one tensor. Raises ValueError if there are several, or if numpy does not have the
    dtype."""
    if len(tensors) != 1:
        raise ValueError(f"{path} holds one array, and there are {len(tensors)} tensors; wanted a name with .npz")
    header = _array_header(tensors[0])
    with begin(path, _total(tensors)) as file:
        file.write(header)
        for piece in pieces(tensors[0]):
            file.write(piece.data)


def write_npz(
    path: Path, tensors: Sequence[SourceTensor], metadata: Mapping[str, str], pieces: Pieces, begin: Begin
) -> None:
    """Writes an .npz archive, whose members are not deflated. Raises ValueError if numpy does not have a dtype."""
    headers = [_array_header(tensor) for tensor in tensors]
    with begin(path, _total(tensors)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for tensor, header in zip(tensors, headers):
            with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as member:
                member.write(header)
                for piece in pieces(tensor):
                    member.write(piece.data)


def write_torch(
    path: Path, tensors: Sequence[SourceTensor], metadata: Mapping[str, str], pieces: Pieces, begin: Begin
) -> None:
    """Writes a checkpoint by torch.save: nested as metadata says, otherwise a dict from names to tensors. Tensors
    that shared memory share it again. Meanwhile all of it is in memory."""
    held: dict[SourceTensor, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        base = tensor.base or tensor
        if base not in held:
            held[base] = base.tensor()
        values[tensor.name] = held[base] if tensor.view is None else tensor.view.of(held[base])
    content = nested(values, metadata)
    with begin(path, _total(tensors)) as file:
        torch.save(content, file)


FORMATS: Mapping[str, Writer] = {
    "safetensors": write_safetensors,
    "npy": write_npy,
    "npz": write_npz,
    "torch": write_torch,
}
_A_SUFFIX = re.compile(r"\.[A-Za-z]\w*")  # the end of "llama-3.1" does not match


def format_of_output(target: Path, format: str | None) -> str:
    """Returns the format in which a file is written: the one that the caller names, or else that of the suffix. For a
    name without a suffix it is safetensors.

    Raises:
        ValueError: the format cannot be written, or the suffix stands for another one.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; wanted one of {sorted(FORMATS)}")
    named = format_of_name(target)
    if format is None and named is None and _A_SUFFIX.fullmatch(target.suffix):
        named = target.suffix
    kind = format or named or "safetensors"
    if kind not in FORMATS or named not in (None, kind):
        wanted = FORMATS if format is None else (format,)
        raise ValueError(
            f"the output is {os.fspath(target)!r}, whose suffix does not say {format or 'a format that is written'}; "
            f"wanted a name that ends in {', '.join(end for end, told in SUFFIXES.items() if told in wanted)}"
        )
    return kind


def _total(tensors: Sequence[SourceTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _array_header(tensor: SourceTensor) -> bytes:
    """Returns the bytes before an array's data in an .npy file."""
    try:
        dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    except TypeError:
        raise ValueError(f"tensor {tensor.name!r} has {tensor.dtype}, which numpy lacks; wanted .safetensors") from None
    header = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()
