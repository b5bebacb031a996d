"""The tensors of a model, each with its table, and the checkpoints that they can come from."""

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

_LEAST_STACKED_ROW_BYTES = 64  # shorter rows have more index than they save

Value = torch.Tensor | CompressedTensor
Checkpoint = str | Path | Mapping[str, Value] | Iterable[tuple[str, Value]]


class Weight:
    """A tensor of a model, or several that share all of their memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.names: list[str] = []  # what the model calls it, as in `state_dict()`
        self.holders: list[tuple[torch.nn.Module, str]] = []  # (module, attribute) for every name
        self.tensors: list[torch.Tensor] = []  # the parameters or buffers themselves, each once
        self.shape, self.dtype = tensor.shape, tensor.dtype  # of all of them
        self.num_bytes = tensor.shape.numel() * tensor.dtype.itemsize
        # Dimensions in the order in which memory holds them: `x.permute(order)` is contiguous if x is dense.
        self.order = memory_order(tensor)
        is_dense = tensor.permute(self.order).is_contiguous()
        # How the values lie in memory: as the weight's did; of a weight that left gaps, as if it were contiguous.
        self.stride = (
            tensor.stride() if is_dense else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        )
        # The device before it was offloaded; the CPU for tensors that a checkpoint brings.
        self.home = torch.device("cpu") if tensor.is_meta else tensor.device
        self.requires_grad: list[bool] = []  # of each tensor before it was offloaded
        # Coded rows of `x.permute(order)`; None until it is stored, and after it is restored.
        self.table: CompressedTensor | None = None
        # What the tensors hold between uses: the right shape, dtype and device, and no values.
        self.blank: torch.Tensor | None = None
        self.group: Group | None = None  # that it is fetched with; None if its rows are looked up where they lie
        self.saved = SavedTensor()  # what state_dict() has of it
        self._decode: Callable[[Weight], torch.Tensor] | None = None  # for those who ask for the values between uses

    @property
    def name(self) -> str:
        return self.names[0]

    def add(self, module: torch.nn.Module, attribute: str, name: str, tensor: torch.Tensor) -> None:
        """Notes one more name of the tensor, or of another one with the same memory."""
        self.names.append(name)
        self.holders.append((module, attribute))
        if not any(tensor is known for known in self.tensors):
            self.tensors.append(tensor)
            self.requires_grad.append(tensor.requires_grad)

    @property
    def stacked_row_bytes(self) -> int | None:
        """Bytes of the longest rows, at most `ROW_BYTES`, that the items x[i] consist of; None: there are no such rows,
        or items do not lie one after the other."""
        item_bytes, element = self.num_bytes // self.shape[0], self.dtype.itemsize
        if self.order[0] != 0:
            return None
        fitting = (size for size in range(ROW_BYTES, _LEAST_STACKED_ROW_BYTES - 1, -1) if size % element == 0)
        return next((size for size in fitting if item_bytes % size == 0), None)

    def like(self) -> torch.Tensor:
        """A tensor without memory that lies as the weight did."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The weight's bytes, uint8 [num_bytes], as the tensor that the model had: shape, dtype and order of memory."""
        return data.view(self.dtype).as_strided(self.shape, self.stride)

    def items(self, data: torch.Tensor) -> torch.Tensor:
        """The bytes of some items x[i], one after the other, as a tensor of these items."""
        data = data if data.dtype == self.dtype else data.view(self.dtype)
        return data.as_strided((data.numel() // self.shape[1:].numel(), *self.shape[1:]), self.stride)

    def bind(self, value: torch.Tensor) -> None:
        """Makes value the content of the model's tensors."""
        for tensor in self.tensors:
            resting.wake(tensor)
            put(tensor, value)

    def prepare(self, blank: torch.Tensor, decode: Callable[[Weight], torch.Tensor]) -> None:
        """Takes the content away for the first time. decode: gives it to those who ask for it between uses."""
        self.blank, self._decode = blank, decode
        for tensor in self.tensors:
            put(tensor, blank)
        self.rest()

    def wake(self) -> None:
        """Makes the tensors ordinary ones, whatever they hold."""
        for tensor in self.tensors:
            resting.wake(tensor)

    def rest(self) -> None:
        """Takes the content away again."""
        assert self.blank is not None
        for tensor in self.tensors:
            resting.rest(tensor, self, self.blank)

    def read(self) -> torch.Tensor:
        """The values for someone who asks for them between uses, in memory of their own."""
        assert self._decode is not None
        return self._decode(self)

    def release(self) -> None:
        """Makes the tensors what they were before."""
        for tensor in self.tensors:
            resting.release(tensor)

    def is_held(self, module: torch.nn.Module, attribute: str) -> bool:
        """Whether an attribute of a module still is one of the tensors: it may have been replaced by another one."""
        held = module._parameters.get(attribute, module._buffers.get(attribute))
        return any(held is tensor for tensor in self.tensors)

    def freeze(self) -> None:
        for tensor in self.tensors:
            tensor.requires_grad_(False)

    def fits(self, table: CompressedTensor, scheme: str, by_rows: bool) -> bool:
        """Whether a table of a checkpoint can be the weight's as it is. scheme: that is asked for; by_rows: whether
        rows of the weight are looked up."""
        return (
            table.dtype == self.dtype
            and self.order == tuple(range(len(self.order)))
            and scheme in ("auto", table.scheme)
            and (not by_rows or table.geometry.has_whole_rows)
        )

    def data(self, device: torch.device | str) -> torch.Tensor:
        """The weight's bytes in the order of memory, uint8 [num_bytes], in memory of their own on a device."""
        if self.table is None:
            return self.tensors[0].detach().to(device).permute(self.order).reshape(-1).view(torch.uint8)
        return self.table.decompress(device=device).reshape(-1).view(torch.uint8)

    @outside_of_modes()
    def value(self, device: torch.device | str) -> torch.Tensor:
        """The tensor again, in memory of its own on a device."""
        return self.view(self.data(device))


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes value the content of a parameter or buffer of a model: of the object itself, which others may hold."""
    if tensor.is_meta:  # whose data cannot be set: the object gets another inside
        other = torch.nn.Parameter(value, False) if isinstance(tensor, torch.nn.Parameter) else value.view_as(value)
        torch.utils.swap_tensors(tensor, other)
    else:
        tensor.data = value


def can_be_stored(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory of a dtype that tables hold, and not a subclass with rules of its own."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype in DTYPES
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


def read_checkpoint(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    """Names and tensors of a checkpoint, or tables of a compressed one, one at a time, over the mapped file.

    Args:
        checkpoint: a file, or a directory of them, of safetensors or ibp; the index of a set; a mapping, or pairs.

    Raises:
        FileNotFoundError: there is no such file, or the directory holds none.
        ibp.FileFormatError: a file is damaged, of a newer format, or no such file.
        TypeError: the checkpoint holds a delta.
    """
    if not isinstance(checkpoint, (str, Path)):
        yield from checkpoint.items() if isinstance(checkpoint, Mapping) else checkpoint
        return
    index = Path(checkpoint) / _INDEX_NAME  # a directory may have more, of other precisions
    with open_file(index if index.is_file() else checkpoint) as file:
        for name, value in file.items():
            if not isinstance(value, (torch.Tensor, CompressedTensor)):
                raise TypeError(
                    f"{name!r} in {str(checkpoint)!r} is a delta; wanted tensors: apply it to its base first"
                )
            yield name, value
