"""Arrays of numpy where tensors are wanted."""

from __future__ import annotations

import numpy as np
import torch


class _Writable:
    """An array's memory, whatever the array says of writing to it: torch warns of arrays that are read only."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def tensor_of(array: np.ndarray, name: str) -> torch.Tensor:
    """The array as a contiguous tensor, to be read only: over the same memory, unless its elements are in another order
    than those of a contiguous tensor, or their bytes are.

    Raises:
        TypeError: torch lacks the dtype; the message has the name.
    """
    native = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(np.asarray(_Writable(native)))
    except TypeError:
        raise TypeError(f"{name} is an array of {array.dtype}, which torch does not have") from None
