"""The weights of a model with their tables, and the checkpoints that weights can come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._common.modes import outside_of_modes
from .._common.states import SavedTensor
from .._files import open as open_file
from .._layout.geometry import DTYPES
from .._schemes.learning import ROW_BYTES
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import memory_order
from . import resting

if TYPE_CHECKING:
    from .groups import Group

_INDEX_NAME = "model.safetensors.index.json"

_LEAST_STACKED_ROW_BYTES = 64  # in bytes; the index of shorter rows takes more than they save

Value = torch.Tensor | CompressedTensor
Checkpoint = str | Path | Mapping[str, Value] | Iterable[tuple[str, Value]]


class Weight:
    """A tensor of a model, or several tensors that share all of their memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.names: list[str] = []  # its names in `state_dict()`
        self.holders: list[tuple[torch.nn.Module, str]] = []  # (module, attribute) for each name
        self.tensors: list[torch.Tensor] = []  # the parameters or buffers, each object once
        self.shape, self.dtype = tensor.shape, tensor.dtype  # of all of them
        self.num_bytes = tensor.shape.numel() * tensor.dtype.itemsize
        # The dimensions in their order in memory: `x.permute(order)` is contiguous if x is dense.
        self.order = memory_order(tensor)
        is_dense = tensor.permute(self.order).is_contiguous()
        # The strides of the values: those of the weight, or contiguous ones if the weight had gaps.
        self.stride = (
            tensor.stride() if is_dense else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        )
        # The weight's device before it was offloaded; the CPU if a checkpoint fills it.
        self.home = torch.device("cpu") if tensor.is_meta else tensor.device
        self.requires_grad: list[bool] = []  # of each tensor, before it was offloaded
        # The table of `x.permute(order)`; None before the weight is stored and after it is restored.
        self.table: CompressedTensor | None = None
        # The content of the tensors between uses: a tensor of the right shape, dtype and device without values.
        self.blank: torch.Tensor | None = None
        self.group: Group | None = None  # the group that it is fetched with; None if single rows of it are looked up
        self.saved = SavedTensor()  # the tensor that state_dict() returned for it
        self._decode: Callable[[Weight], torch.Tensor] | None = None  # returns the values between uses

    @property
    def name(self) -> str:
        return self.names[0]

    def add(self, module: torch.nn.Module, attribute: str, name: str, tensor: torch.Tensor) -> None:
        """Adds a name of the tensor, or of another tensor with the same memory."""
        self.names.append(name)
        self.holders.append((module, attribute))
        if not any(tensor is known for known in self.tensors):
            self.tensors.append(tensor)
            self.requires_grad.append(tensor.requires_grad)

    @property
    def stacked_row_bytes(self) -> int | None:
        """Size in bytes of the rows into which the items x[i] are cut: the largest, at most `ROW_BYTES`, that divides
        an item. None if there is no such size, or if the items do not lie one after the other."""
        item_bytes, element = self.num_bytes // self.shape[0], self.dtype.itemsize
        if self.order[0] != 0:
            return None
        fitting = (size for size in range(ROW_BYTES, _LEAST_STACKED_ROW_BYTES - 1, -1) if size % element == 0)
        return next((size for size in fitting if item_bytes % size == 0), None)

    def like(self) -> torch.Tensor:
        """Returns a tensor on the meta device with the shape, dtype and strides of the weight."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Returns a view of the weight's bytes, uint8 [num_bytes], with the shape, dtype and strides of the model's
        tensor."""
        return data.view(self.dtype).as_strided(self.shape, self.stride)

    def items(self, data: torch.Tensor) -> torch.Tensor:
        """Returns a view of the bytes of some items x[i], which lie one after the other, as a tensor of these items."""
        data = data if data.dtype == self.dtype else data.view(self.dtype)
        return data.as_strided((data.numel() // self.shape[1:].numel(), *self.shape[1:]), self.stride)

    def bind(self, value: torch.Tensor) -> None:
        """Gives the model's tensors the memory of a value."""
        for tensor in self.tensors:
            resting.wake(tensor)
            put(tensor, value)

    def prepare(self, blank: torch.Tensor, decode: Callable[[Weight], torch.Tensor]) -> None:
        """Removes the content of the tensors for the first time. decode: returns the values when they are read between
        uses."""
        self.blank, self._decode = blank, decode
        for tensor in self.tensors:
            put(tensor, blank)
        self.rest()

    def wake(self) -> None:
        """Makes the tensors ordinary tensors, whatever their memory holds."""
        for tensor in self.tensors:
            resting.wake(tensor)

    def rest(self) -> None:
        """Removes the content of the tensors again."""
        assert self.blank is not None
        for tensor in self.tensors:
            resting.rest(tensor, self, self.blank)

    def read(self) -> torch.Tensor:
        """Decodes the weight into newly allocated memory, for code that reads the parameter while it rests (see
        resting.py)."""
        assert self._decode is not None
        return self._decode(self)

    def release(self) -> None:
        """Makes the tensors ordinary and removes their sources."""
        for tensor in self.tensors:
            resting.release(tensor)

    def is_held(self, module: torch.nn.Module, attribute: str) -> bool:
        """Returns whether an attribute of a module still is one of the tensors. It may have been assigned another
        tensor."""
        held = module._parameters.get(attribute, module._buffers.get(attribute))
        return any(held is tensor for tensor in self.tensors)

    def freeze(self) -> None:
        for tensor in self.tensors:
            tensor.requires_grad_(False)

    def fits(self, table: CompressedTensor, scheme: str, by_rows: bool) -> bool:
        """Returns whether a table of a checkpoint can be used as the weight's table without decoding it. scheme: the
        scheme that the user wants. by_rows: whether rows of the weight are looked up."""
        return (
            table.dtype == self.dtype
            and self.order == tuple(range(len(self.order)))
            and scheme in ("auto", table.scheme)
            and (not by_rows or table.geometry.has_whole_rows)
        )

    def data(self, device: torch.device | str) -> torch.Tensor:
        """Returns the weight's bytes in the order of memory, uint8 [num_bytes], in newly allocated memory on a
        device."""
        if self.table is None:
            return self.tensors[0].detach().to(device).permute(self.order).reshape(-1).view(torch.uint8)
        return self.table.decompress(device=device).reshape(-1).view(torch.uint8)

    @outside_of_modes()
    def value(self, device: torch.device | str) -> torch.Tensor:
        """Returns the weight as a new tensor on a device."""
        return self.view(self.data(device))


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a parameter or buffer of a model the memory of a value. The object stays the same, because others may hold
    it."""
    if tensor.is_meta:  # its data cannot be set, so the contents of two objects are swapped
        other = torch.nn.Parameter(value, False) if isinstance(tensor, torch.nn.Parameter) else value.view_as(value)
        torch.utils.swap_tensors(tensor, other)
    else:
        tensor.data = value


def can_be_stored(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a plain dense tensor of a dtype that tables can hold, and not a subclass with its own
    behaviour."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype in DTYPES
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


def read_checkpoint(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    """Yields the pairs (name, value) of a checkpoint. Values are tensors, or tables if the checkpoint is compressed,
    and use the memory of the mapped file.

    Args:
        checkpoint: a file of safetensors or ibp; a directory of such files; the index of a set; a mapping; or pairs.

    Raises:
        FileNotFoundError: the file does not exist, or the directory has no checkpoint file.
        ibp.FileFormatError: a file is damaged, has a newer format, or is not a checkpoint.
        TypeError: the checkpoint holds a delta.
    """
    if not isinstance(checkpoint, (str, Path)):
        yield from checkpoint.items() if isinstance(checkpoint, Mapping) else checkpoint
        return
    index = Path(checkpoint) / _INDEX_NAME  # a directory may have further indices, for other precisions
    with open_file(index if index.is_file() else checkpoint) as file:
        for name, value in file.items():
            if not isinstance(value, (torch.Tensor, CompressedTensor)):
                raise TypeError(
                    f"{name!r} in {str(checkpoint)!r} is a delta; wanted tensors: apply it to its base first"
                )
            yield name, value
