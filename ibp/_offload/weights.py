"""Holds the weights of an offloaded model and makes their tables from the values of the model or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from .._common.modes import outside_of_modes
from .._common.progress import tqdm
from .._common.states import SavedTensor
from .._files import open as open_file
from .._machine import memory
from .._rows.table import handle_on
from .._schemes.learning import ROW_BYTES
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import WeightCompressor, memory_order
from ..nn._stacks import by_rows
from . import resting

if TYPE_CHECKING:
    from .plan import Group, OffloadPlan

_INDEX_NAME = "model.safetensors.index.json"

_LONGEST_ELEMENT = 16  # size in bytes of an element of complex128
# Least size in bytes of a row of a stacked weight. The index of smaller rows takes more bytes than compression saves.
_LEAST_STACKED_ROW_BYTES = 64

Value = torch.Tensor | CompressedTensor
Checkpoint = str | Path | Mapping[str, Value] | Iterable[tuple[str, Value]]


class Weight:
    """A tensor of a model, or several tensors that share all of their memory.

    Args:
        tensor: the first of the tensors.
        device: the device of the first module that has the tensor.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.names: list[str] = []  # its names in `state_dict()`
        self.holders: list[tuple[torch.nn.Module, str]] = []  # (module, attribute) for each name
        self.tensors: list[torch.Tensor] = []  # the parameters or buffers, each object once
        self.requires_grad: list[bool] = []  # requires_grad of each tensor before it was offloaded
        self.shape, self.dtype = tensor.shape, tensor.dtype  # the same for all of these tensors
        self.num_bytes = tensor.shape.numel() * tensor.dtype.itemsize
        # The dimensions in their order in memory: `tensor.permute(order)` is contiguous if the tensor is dense.
        self.order = memory_order(tensor)
        is_dense = tensor.permute(self.order).is_contiguous()
        # The strides of the values: the strides of the tensor if it is dense, otherwise the strides of a contiguous
        # tensor.
        self.stride = (
            tensor.stride() if is_dense else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        )
        # The weight's device before it was offloaded; the CPU if a checkpoint fills it.
        self.home = torch.device("cpu") if tensor.is_meta else tensor.device
        # The plan sets the next three attributes.
        self.group: Group | None = None  # the group that it is fetched with; None if single rows of it are looked up
        self.device = device  # the device that uses it
        self.unit: Literal["weight", "row", "expert"] = "weight"  # what one fetch brings
        # The table of `tensor.permute(order)`. None before the weight is stored, and after it is restored.
        self.table: CompressedTensor | None = None
        self.saved = SavedTensor()  # the tensor that state_dict() returned for the weight
        # What the tensors contain between uses: a tensor of the right shape, dtype and device, with meaningless values.
        self._blank: torch.Tensor | None = None
        self._read: Callable[[Weight], torch.Tensor] | None = None  # returns the values between uses

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def stays(self) -> bool:
        """True if the weight stays on the device, not compressed."""
        return self.group is not None and self.group.stays

    def add(self, module: torch.nn.Module, attribute: str, name: str, tensor: torch.Tensor) -> None:
        """Adds a name of the tensor, or of another tensor with the same memory."""
        self.names.append(name)
        self.holders.append((module, attribute))
        if not any(tensor is known for known in self.tensors):
            self.tensors.append(tensor)
            self.requires_grad.append(tensor.requires_grad)

    @property
    def stacked_row_bytes(self) -> int | None:
        """Size in bytes of the rows into which the items x[i] are cut: the largest divisor of the size of an item that
        is a multiple of the size of an element, at least _LEAST_STACKED_ROW_BYTES, and at most `ROW_BYTES`. None if
        there is no such divisor, or if the items do not lie one after the other in memory."""
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

    def bind(self, value: torch.Tensor) -> None:
        """Makes the model's tensors ordinary tensors that use the memory of `value`."""
        for tensor in self.tensors:
            resting.bind(tensor, value)

    def prepare(self, blank: torch.Tensor, read: Callable[[Weight], torch.Tensor]) -> None:
        """Makes the tensors rest for the first time, which frees their memory.

        Args:
            blank: a tensor of the same shape, dtype and device, whose values do not matter.
            read: returns the values when they are read between uses.
        """
        self._blank, self._read = blank, read
        self.bind(blank)  # because tensors on the meta device cannot rest
        self.rest()

    def rest(self) -> None:
        """Makes the tensors rest again: they give up their memory, and reading them decodes the weight."""
        assert self._blank is not None
        for tensor in self.tensors:
            resting.rest(tensor, self, self._blank)

    def wake(self) -> None:
        """Makes the tensors ordinary tensors without restoring their values."""
        for tensor in self.tensors:
            resting.wake(tensor)

    def read(self) -> torch.Tensor:
        """Decodes the weight into newly allocated memory, for code that reads the parameter while it rests (see
        resting.py)."""
        assert self._read is not None
        return self._read(self)

    def restore(self) -> None:
        """Makes the tensors ordinary tensors with their values on their original device, and frees the table."""
        if self.table is not None:
            self.bind(self.value(self.home))
            self.table = None
        elif self.stays and not self.tensors[0].is_meta:  # otherwise no checkpoint has filled it yet
            self.bind(self.tensors[0].data.to(self.home))
        for tensor, requires_grad in zip(self.tensors, self.requires_grad):
            resting.release(tensor)
            tensor.requires_grad_(requires_grad)

    def is_held(self, module: torch.nn.Module, attribute: str) -> bool:
        """Returns whether an attribute of a module is still one of the tensors. Otherwise another tensor has been
        assigned to it."""
        held = module._parameters.get(attribute, module._buffers.get(attribute))
        return any(held is tensor for tensor in self.tensors)

    def store(
        self, x: torch.Tensor | CompressedTensor, compressor: WeightCompressor, scheme: str, is_borrowed: bool
    ) -> None:
        """Freezes the weight and puts its values where the plan wants them: uncompressed on the device, or in a table
        in host memory.

        Args:
            x: the values, on any device.
            compressor: makes the table, unless x already is a table that can be used without changes.
            scheme: as in `ibp.offload`.
            is_borrowed: whether x belongs to a checkpoint, so that it is copied before the model uses it.
        """
        if isinstance(x, CompressedTensor) and (self.stays or not self._fits(x, scheme)):
            x = x.decompress(device="cpu").to(self.dtype)
        if isinstance(x, CompressedTensor):
            self.table = x.to("cpu")
            if self.device.type == "cuda":
                memory.pin_if_possible(self.table)
        elif self.stays:
            self.bind(x.to(self.device, copy=is_borrowed))
        else:
            stored = x.to("cpu").permute(self.order)
            row_bytes = self.stacked_row_bytes if self.unit == "expert" else None if self.unit == "row" else ROW_BYTES
            self.table = compressor.compress(self.name, stored, device=self.device, row_bytes=row_bytes)
        for tensor in self.tensors:
            tensor.requires_grad_(False)
        if self.table is not None:
            if self.unit == "expert":
                self.table = by_rows(self.table)
            if self.device.type == "cpu" or self.table._serves(self.device):
                handle_on(self.table, self.device)  # copies the index to the device now instead of at the first use

    def _fits(self, table: CompressedTensor, scheme: str) -> bool:
        """Returns whether a table of a checkpoint can be used without decoding it."""
        return (
            table.dtype == self.dtype
            and self.order == tuple(range(len(self.order)))
            and scheme in ("auto", table.scheme)
            and (self.unit == "weight" or table.geometry.has_whole_rows)
        )

    def data(self, device: torch.device | str) -> torch.Tensor:
        """Returns the weight's bytes on a device, in the order in which they lay in the memory of the weight's tensor,
        uint8 [num_bytes]."""
        if self.table is None:
            return self.tensors[0].detach().to(device).permute(self.order).reshape(-1).view(torch.uint8)
        return self.table.decompress(device=device).reshape(-1).view(torch.uint8)

    @outside_of_modes()
    def value(self, device: torch.device | str) -> torch.Tensor:
        """Returns the weight as a new tensor on a device."""
        return self.view(self.data(device))


def store(
    model: torch.nn.Module,
    plan: OffloadPlan,
    checkpoint: Iterable[tuple[str, Value]] | None,
    scheme: str,
    progress: bool,
    read: Callable[[Weight], torch.Tensor],
) -> None:
    """Stores all weights of a model, and moves its other tensors to their devices.

    Args:
        checkpoint: the pairs of `read_checkpoint`. None: the values come from the model.
        scheme, progress: as in `ibp.offload`.
        read: returns the values of a weight that is read between uses.
    """
    compressor = WeightCompressor({"scheme": scheme})
    # Between uses, all elements of a weight are views of one element in this memory, whose bits are all ones. A float
    # with these bits is NaN.
    ones = {device: torch.full((_LONGEST_ELEMENT,), 0xFF, dtype=torch.uint8, device=device) for device in plan.devices}
    total = sum(weight.num_bytes for weight in plan.weights)
    with tqdm(total=total, desc="offload", unit="B", unit_scale=True, disable=not progress) as bar:
        for weight, x in _sources(model, plan, checkpoint):
            weight.store(x, compressor, scheme, is_borrowed=checkpoint is not None)
            if weight.table is not None:
                weight.prepare(ones[weight.device].view(weight.dtype)[0].expand(weight.shape), read)
            bar.update(weight.num_bytes)
    for other in plan.others:
        other.tensor.data = other.tensor.data.to(other.device)


def _sources(
    model: torch.nn.Module, plan: OffloadPlan, checkpoint: Iterable[tuple[str, Value]] | None
) -> Iterator[tuple[Weight, Value]]:
    """Yields each weight of a plan with its values, from the model or from the checkpoint. The checkpoint also fills
    the tensors that are not offloaded."""
    if checkpoint is None:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta:
                raise RuntimeError(f"{name} is on the meta device: give its values as checkpoint=")
        for weight in plan.weights:
            yield weight, weight.tensors[0].data
        return
    by_name: dict[str, Weight] = {name: weight for weight in plan.weights for name in weight.names}
    others = {name: other.tensor for other in plan.others for name in other.names}
    seen: set[int] = set()
    for name, x in checkpoint:
        target = by_name.get(name, others.get(name))
        if target is None:
            raise ValueError(f"the checkpoint has {name!r}, which the model has not")
        if x.shape != target.shape:
            raise ValueError(f"{name} has shape {list(x.shape)} in the checkpoint; wanted {list(target.shape)}")
        if id(target) in seen:
            continue
        seen.add(id(target))
        if isinstance(target, Weight):
            yield target, x if isinstance(x, CompressedTensor) else x.to(target.dtype)
        else:
            values = x.decompress() if isinstance(x, CompressedTensor) else x
            resting.bind(target, values.to(target.dtype, copy=True))
    missing = [weight.name for weight in plan.weights if id(weight) not in seen]
    missing += [name for name, tensor in others.items() if id(tensor) not in seen]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} of the model's tensors, the first {missing[0]!r}")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise RuntimeError(
                f"buffer {name} is on the meta device and no checkpoint holds it: make the model with its buffers, "
                "for example under accelerate.init_empty_weights()"
            )


def read_checkpoint(checkpoint: Checkpoint, verify: bool) -> Iterator[tuple[str, Value]]:
    """Yields the pairs (name, value) of a checkpoint. Values are tensors, or tables if the checkpoint is compressed,
    and use the memory of the mapped file.

    Args:
        checkpoint: a file of safetensors or ibp; a directory of such files; the index of a set of files; a mapping; or
            pairs.
        verify: whether to compare a tensor's checksums before it is yielded, which reads all of its bytes.

    Raises:
        FileNotFoundError: the file does not exist, or the directory has no checkpoint file.
        ibp.FileFormatError: a file is damaged, has a newer format, or is not a checkpoint.
        ibp.ChecksumError: with `verify`, bytes are damaged.
        TypeError: the checkpoint holds a delta.
    """
    if not isinstance(checkpoint, (str, Path)):
        yield from checkpoint.items() if isinstance(checkpoint, Mapping) else checkpoint
        return
    index = Path(checkpoint) / _INDEX_NAME  # a directory may have further indices, for other precisions
    with open_file(index if index.is_file() else checkpoint, verify=verify) as file:
        for name, value in file.items():
            if not isinstance(value, (torch.Tensor, CompressedTensor)):
                raise TypeError(
                    f"{name!r} in {str(checkpoint)!r} is a delta; wanted tensors: apply it to its base first"
                )
            yield name, value
