"""safetensors files, mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

from .._files.fields import FileFormatError, dtype_of
from .._files.header import Header, read_header
from ._maps import map_file
from ._source import Source, mapped_tensor


def open_safetensors(path: str | os.PathLike[str], header: Header | None = None) -> Source:
    """A safetensors file, whose tensors are read from its map. header: if it has been read.

    Raises:
        ibp.FileFormatError: it is none, or has a dtype that torch lacks.
    """
    header = header or read_header(Path(path))
    data, tensors = map_file(path), {}
    for name, entry in header.tensors.items():
        if entry.end > data.size:
            raise FileFormatError(f"{path} has changed since it was opened")
        tensors[name] = mapped_tensor(name, dtype_of(entry.dtype), entry.shape, data[entry.start : entry.end])
    return Source(os.fspath(path), "safetensors", tensors, header.metadata)
