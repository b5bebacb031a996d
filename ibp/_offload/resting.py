"""A resting tensor stands for a weight of an offloaded model between uses. It has the weight's shape, dtype and device,
but not the weight's values. Code that reads the values gets a decoded copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._common.graphs import outside_of_graphs
from .._common.modes import outside_of_modes


class Source(Protocol):
    """The weight that a resting tensor stands for."""

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
        """Returns arguments of a function with plain tensors in place of `Resting` and `ReadOnly` tensors."""
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
    if isinstance(first, _Refusing):
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


class _Refusing:
    """A tensor that refuses to be written to."""

    __torch_function__: Any = classmethod(_call)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # torch does not call `__torch_function__` for it
        _refuse_to_write(self)


class Resting(_Refusing):
    """The base of the classes of resting tensors."""

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
    pass


class RestingTensor(Resting, torch.Tensor):
    pass


class ReadOnly(_Refusing, torch.Tensor):
    """Values that were read from a resting tensor, or a part of them."""


_CLASSES: dict[type, type] = {torch.nn.Parameter: RestingParameter, torch.Tensor: RestingTensor}
_AWAKE: dict[type, type] = {resting: awake for awake, resting in _CLASSES.items()}


def rest(tensor: torch.Tensor, source: Source, blank: torch.Tensor) -> None:
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
