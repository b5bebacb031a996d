"""Files as arrays of bytes, without copies."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

from .._files.regular import open_regular


def map_file(path: str | os.PathLike[str]) -> np.ndarray:
    """The bytes of a file, uint8 [size], read-only: pages come when they are read, and count as no process's own
    memory. The map lives as long as any view of it."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


class _Memory:
    """The memory of an array, which it keeps, without the flag that it is read-only."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A uint8 array as a tensor over the same memory, which must not be written to if the array must not:
    torch.from_numpy warns of arrays that are read-only."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))
