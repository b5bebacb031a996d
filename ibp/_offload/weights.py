"""Holds the weights of an offloaded model, and the tensors that stand for them between uses.

Between uses, each parameter or buffer of a weight is a resting tensor. It has the weight's shape, dtype and device, but
not the weight's values. Code that reads the values gets a decoded copy. `rest` and `wake` change a tensor of the model
in place.

A `Weight` has the tensors of a weight, and the table of its values. A `Group` has weights that are fetched together,
and their memory on the device. `store` makes the tables from the values of the model or of a checkpoint, which
`read_checkpoint` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._common.modes import outside_of_graphs, outside_of_modes
from .._common.process import tqdm
from .._common.sequences import rounded_up
from .._files import open as open_file
from .._rows.geometry import memory_order
from .._rows.learning import ROW_BYTES
from .._rows.table import handle_on, pin_if_possible, serves
from .._tables.compressed_tensor import CompressedTensor
from .._tables.weights import WeightCompressor
from ..nn._parameters import by_rows, made_once

if TYPE_CHECKING:
    from .plan import OffloadPlan

Value = torch.Tensor | CompressedTensor
Region = tuple[int, int]  # [start, end) of an arena, in bytes
Checkpoint = str | Path | Mapping[str, Value] | Iterable[tuple[str, Value]]

# Alignment in bytes of the weights in a group. Memory from cudaMalloc has the same alignment, which is enough for
# cuBLAS.
_ALIGNMENT = 256
_INDEX_NAME = "model.safetensors.index.json"
_LONGEST_ELEMENT = 16  # size in bytes of an element of complex128
# Least size in bytes of a row of a stacked weight. The index of smaller rows takes more bytes than compression saves.
_LEAST_STACKED_ROW_BYTES = 64


# ---- resting tensors ----


class ValueSource(Protocol):
    """The weight that a resting tensor stands for, which has the tensor's values."""

    @property
    def name(self) -> str: ...

    def like(self) -> torch.Tensor:
        """Returns a tensor on the meta device with the shape, dtype and strides of the weight."""

    def read(self) -> torch.Tensor:
        """Returns the values in newly allocated memory."""


# Names of the attributes that this file gives to resting tensors and to tensors that were read from them.
_SOURCE, _NAME = "_ibp_source", "_ibp_name"

# Attributes of a tensor that give its values.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
# Functions that neither read nor write the values of a tensor.
_ABOUT: set[Any] = {
    accessor
    for name, attribute in vars(torch._C.TensorBase).items()
    if type(attribute).__name__ == "getset_descriptor" and name not in _VALUES
    for accessor in (attribute.__get__, attribute.__set__)
}
_ABOUT |= {
    getattr(torch.Tensor, name)
    for name in (
        "__hash__ __len__ _is_view data_ptr dim element_size get_device is_complex is_conj is_floating_point "
        "is_inference is_neg is_pinned is_same_size is_shared is_signed ndimension nelement numel register_hook "
        "register_post_accumulate_grad_hook requires_grad_ size storage_offset"
    ).split()
}
_ABOUT |= {torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type}
_ABOUT |= {torch.autograd.grad, torch.Tensor.backward}
# Functions whose results follow from strides. The strides of a resting tensor's memory are not those of the weight.
_OF_MEMORY = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.dim_order}
# Conversions, which return the tensor itself if there is nothing to convert.
_MOVES = {getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double")}
_SETS_DATA: Any = vars(torch._C.TensorBase)["data"].__set__


def _changes_nothing(function: Callable, tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether a conversion, such as `Tensor.to`, would return the tensor itself, because there is nothing to
    convert."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = (0, *tensor.shape[1:]) if tensor.dim() else ()
        probe = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return function(probe, *args, **kwargs) is probe


def _refuse_to_write(tensor: Any) -> NoReturn:
    """Raises RuntimeError for a write to a resting tensor, or to values that were read from one."""
    raise RuntimeError(
        f"{_name_of(tensor)} is offloaded and cannot be written to: close() first, or write to a clone() of its values"
    )


def _name_of(tensor: Any) -> str:
    """Returns the name of a weight. tensor: the resting tensor that stands for the weight, or values that were read
    from it."""
    held = vars(tensor)
    return held[_SOURCE].name if isinstance(tensor, Resting) else held[_NAME]


class _Reading(TorchDispatchMode):
    """The dispatch mode under which a function of torch is called with the values of resting tensors. It refuses
    operations that write to these values, or to values that were read before: their memory is not the model's, so
    writes would be lost."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[tuple[torch.Tensor, Any]] = []  # (plain values, the argument that they stand for)

    def values(self, given: Any) -> Any:
        """Returns arguments of a function with plain tensors in place of resting and other `ReadOnly` tensors."""
        if isinstance(given, Resting):
            with outside_of_modes():
                values = vars(given)[_SOURCE].read()
            self._given.append((values, given))
            return values
        if isinstance(given, ReadOnly):
            values = given.as_subclass(torch.Tensor)
            self._given.append((values, given))
            return values
        if type(given) in (tuple, list):
            return type(given)(map(self.values, given))
        if type(given) is dict:
            return {key: self.values(held) for key, held in given.items()}
        return given

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation._schema.is_mutable:
            for number, argument in enumerate(operation._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[number] if number < len(args) else kwargs.get(argument.name)
                    for tensor in written if isinstance(written, (tuple, list)) else [written]:
                        read = self._whole_of(tensor)
                        if read is not None:
                            _refuse_to_write(read)
        return operation(*args, **kwargs)

    def kept(self, result: Any) -> Any:
        """Returns the result of the function. Tensors in the result that share memory with the values refuse to be
        written to."""
        if type(result) is torch.Tensor:
            read = self._whole_of(result)
            if read is not None:
                result.__class__ = ReadOnly
                setattr(result, _NAME, _name_of(read))
        elif type(result) in (tuple, list):
            return type(result)(map(self.kept, result))
        elif isinstance(result, Iterator):  # the rows, as `iter()` yields them
            return map(self.kept, result)
        elif isinstance(result, np.ndarray) and not result.flags.owndata:
            result.flags.writeable = False
        return result

    def _whole_of(self, tensor: Any) -> Any:
        """If a tensor is an alias of the values that stand in for an argument, returns this argument. Otherwise returns
        None."""
        if not isinstance(tensor, torch.Tensor):
            return None
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        is_alias_of: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
        return next((given for values, given in self._given if is_alias_of(tensor, values)), None)


@outside_of_graphs
def _call(cls: type, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Calls a function of torch that was given resting tensors, or values that were read from them. Returns its
    result."""
    kwargs = kwargs or {}
    if function in _ABOUT:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    first: Any = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, Resting):
        if function in _OF_MEMORY:
            return function(vars(first)[_SOURCE].like(), *args[1:], **kwargs)
        if function == _SETS_DATA and args[1] is first:
            return None
    if isinstance(first, ReadOnly):
        if function in _MOVES and _changes_nothing(function, first, *args[1:], **kwargs):
            return first
        # `_Reading` does not see methods that write without dispatching an operator, such as `apply_` and
        # `share_memory_`. Methods whose names end in one underscore, as those of torch's in-place methods do, are
        # therefore refused here.
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__") or name in ("__set__", "__delete__"):
            _refuse_to_write(first)
    reading = _Reading()
    args, kwargs = reading.values(args), reading.values(kwargs)
    with reading:
        result = function(*args, **kwargs)
    return reading.kept(result)


def refuse_copy(*_: Any) -> NoReturn:
    """Raises the error for copying an object that belongs to an offloaded model."""
    raise RuntimeError("an offloaded model cannot be copied: close() first, or copy its state_dict()")


def refuse_pickle(*_: Any) -> NoReturn:
    """Raises the error for pickling an object that belongs to an offloaded model."""
    raise RuntimeError("an offloaded model cannot be pickled: save its state_dict(), or close() first")


class ReadOnly(torch.Tensor):
    """A tensor that refuses to be written to: a resting tensor, or values that were read from one, or a part of such
    values."""

    __torch_function__: Any = classmethod(_call)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # torch does not call `__torch_function__` for it
        _refuse_to_write(self)


class Resting(ReadOnly):
    """A resting tensor."""

    __deepcopy__, __reduce_ex__ = refuse_copy, refuse_pickle

    def as_subclass(self, cls: type) -> Any:  # torch does not call `__torch_function__` for it
        return _call(type(self), torch.Tensor.as_subclass, (), (self, cls))

    def check_conversion(self, convert: Callable) -> None:
        """Raises RuntimeError if a conversion of the model would change the tensor's dtype, device or memory format."""
        if not _changes_nothing(convert, self):
            raise RuntimeError(
                f"{_name_of(self)} is offloaded and keeps its dtype, device and memory format: close() first"
            )


class RestingParameter(Resting, torch.nn.Parameter):
    """A resting tensor that is a parameter."""


_CLASSES: dict[type, type] = {torch.nn.Parameter: RestingParameter, torch.Tensor: Resting}
_AWAKE: dict[type, type] = {resting: awake for awake, resting in _CLASSES.items()}


def rest(tensor: torch.Tensor, source: ValueSource, blank: torch.Tensor) -> None:
    """Makes a model's tensor rest. The tensor gets the memory of `blank`, a tensor of the same shape, dtype and device,
    in place of its own. From now on, its values are read from `source`."""
    kind = tensor.__class__ = _AWAKE.get(type(tensor), type(tensor))
    tensor.data = blank
    setattr(tensor, _SOURCE, source)
    tensor.__class__ = _CLASSES[kind]


def wake(tensor: torch.Tensor) -> None:
    """Makes a tensor an ordinary tensor, whose values are the content of its memory. The tensor keeps its source,
    because another thread may be about to read from it."""
    tensor.__class__ = _AWAKE.get(type(tensor), type(tensor))


def bind(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes `tensor`, a parameter or buffer of a model, an ordinary tensor that uses the memory of `value`. `tensor`
    remains the same object, because other code may hold references to it."""
    tensor.__class__ = _AWAKE.get(type(tensor), type(tensor))
    if tensor.is_meta:  # its data cannot be set, so the contents of two objects are swapped
        other = torch.nn.Parameter(value, False) if isinstance(tensor, torch.nn.Parameter) else value.view_as(value)
        torch.utils.swap_tensors(tensor, other)
    else:
        tensor.data = value


def release(tensor: torch.Tensor) -> None:
    """Makes a tensor ordinary and removes its source."""
    wake(tensor)
    vars(tensor).pop(_SOURCE, None)


# ---- weights ----


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
        self.saved = made_once()  # makes the weight's tensor for a state_dict()
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
            bind(tensor, value)

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
            rest(tensor, self, self._blank)

    def wake(self) -> None:
        """Makes the tensors ordinary tensors without restoring their values."""
        for tensor in self.tensors:
            wake(tensor)

    def read(self) -> torch.Tensor:
        """Decodes the weight into newly allocated memory, for code that reads the parameter while it rests."""
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
            release(tensor)
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
                pin_if_possible(self.table)
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
            if self.device.type == "cpu" or serves(self.table, self.device):
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


class Group:
    """One or more weights that are fetched together and lie one after the other in memory. It also has the memory of
    these weights on their device while the model runs, and a record of the work that uses them; only the fetcher of the
    device changes these."""

    def __init__(self, name: str, device_number: int, weights: Sequence[Weight], are_experts: bool = False) -> None:
        self.name, self.device_number, self.weights = name, device_number, list(weights)
        # True if the weights are stacks of experts. A call may then fetch a few of the experts.
        self.are_experts = are_experts
        self.stays = False  # whether the weights stay on their device, not compressed; if so, they are never fetched
        self.offsets: list[int] = []  # offset of each weight from the group's start, in bytes
        end = 0
        for weight in self.weights:
            weight.group = self
            start = rounded_up(end, _ALIGNMENT)
            self.offsets.append(start)
            end = start + weight.num_bytes
        self.num_bytes = rounded_up(end, _ALIGNMENT)  # size of the group in bytes, uncompressed and with padding
        self.stored_bytes = 0  # size of the compressed rows, which a fetch moves; 0 until the tables are made
        self.uses = 0  # number of calls that are using the weights
        # True if the weights are in `memory`, or will be there when `ready` has been reached.
        self.is_loaded = False
        self.is_ahead = False  # whether the weights were fetched ahead of a use that has not begun
        # The region of the arena that the group has, or had last. None: the group has a separate allocation, or no
        # memory.
        self.region: Region | None = None
        self.memory: torch.Tensor | None = None  # uint8: the memory of the whole group
        self.data: list[torch.Tensor] = []  # the bytes of each weight
        self.values: list[torch.Tensor] = []  # the same bytes with the shapes and dtypes of the model's tensors
        # CUDA: the arguments of `TensorStream.issue` for each weight, and the number of multiprocessors in them.
        self.prepared: list[tuple[Any, ...]] = []
        self.sms = 0
        self.ready: torch.cuda.Event | None = None  # CUDA: reached when the weights have arrived
        # CUDA: events that are recorded before and after the last wait for the weights.
        self.wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        # CUDA: for each stream, an event that is reached when the stream no longer reads the weights.
        self.done: dict[int, torch.cuda.Event] = {}

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {len(self.weights)} weights, {self.num_bytes:,} bytes)"

    def move(self, region: Region | None, memory: torch.Tensor | None) -> None:
        """Gives the group new memory, or takes its memory away if `memory` is None. region: the region of the memory in
        the arena. None: the memory is not in the arena."""
        self.region, self.memory, self.data, self.values, self.prepared = region, memory, [], [], []
        if memory is not None:
            self.data = [memory[start : start + weight.num_bytes] for weight, start in zip(self.weights, self.offsets)]
            self.values = [weight.view(part) for weight, part in zip(self.weights, self.data)]


# ---- storing ----


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
            bind(target, values.to(target.dtype, copy=True))
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
