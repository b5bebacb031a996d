"""Files as arrays of bytes, without copies."""

from __future__ import annotations

import mmap
import os

import numpy as np

from .._files.regular import open_regular


def map_file(path: str | os.PathLike[str]) -> np.ndarray:
    """The bytes of a file, uint8 [size], read-only: pages come when they are read, and count as no process's own
    memory. The map lives as long as any view of it."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
