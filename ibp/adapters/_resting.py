"""`RestingWeight` keeps the values of a parameter in a table while no computation uses the parameter."""

from __future__ import annotations

import torch

from .._offload import resting
from .._tables.weights import CodedWeight


class RestingWeight:
    """A coded weight that has the values of a parameter while the parameter rests.

    A resting parameter keeps its shape, dtype and device, and takes no memory. Code that reads its values gets a
    decoded copy, and code that writes to it raises RuntimeError.

    Example:
        >>> layer, compressor = torch.nn.Linear(64, 64), ibp.adapters.WeightCompressor({})
        >>> values = layer.weight.detach().clone()
        >>> weight = ibp.adapters.RestingWeight("weight", compressor.code("weight", values), "cpu")
        >>> weight.rest(layer.weight)
        >>> torch.equal(layer.weight, values)    # decoded for this call
        True
        >>> weight.wake(layer.weight, weight.coded.decoded("cpu"))    # an ordinary parameter, until it rests again
        >>> weight.release(layer.weight)                              # an ordinary parameter for good

    Args:
        name: the name of the parameter in error messages.
        coded: the weight.
        device: the device of the parameter while it rests.

    Attributes:
        name, coded: as given.
    """

    def __init__(self, name: str, coded: CodedWeight, device: torch.device | str) -> None:
        self.name, self.coded, self._device = name, coded, torch.device(device)
        # The data of a resting parameter: one element, expanded. It is NaN in every floating-point dtype.
        element = torch.full((coded.table.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        self._blank = element.view(coded.table.dtype)[0].expand(coded.shape)

    def like(self) -> torch.Tensor:
        """Returns a tensor on the meta device with the weight's shape, strides and dtype."""
        return torch.empty_strided(self.coded.shape, self.coded.stride, dtype=self.coded.table.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """Returns the values in new memory, on the device of the resting parameter."""
        return self.coded.decoded(self._device)

    def rest(self, parameter: torch.nn.Parameter) -> None:
        """Makes a parameter rest: its memory is freed, and from now on its values are read from the table."""
        resting.rest(parameter, self, self._blank)

    def wake(self, parameter: torch.nn.Parameter, decoded: torch.Tensor | None = None) -> None:
        """Makes a resting parameter an ordinary one. decoded: a tensor that holds the decoded table of the weight; the
        parameter uses its memory from now on. None: the parameter's content is undefined until it rests again."""
        resting.wake(parameter)
        if decoded is not None:
            parameter.data = self.coded.as_it_was(decoded)

    def release(self, parameter: torch.nn.Parameter) -> None:
        """Makes a parameter an ordinary one for good: its values are decoded to new memory, on the device where it
        rested."""
        values = self.read()
        resting.release(parameter)
        parameter.data = values
