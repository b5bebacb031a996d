"""Offloaded weights between uses: tensors with shape, dtype and device, whose values are decoded when they are asked
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .weights import Weight

_WEIGHT, _READ = "_ibp_weight", "_ibp_read"  # attributes of a resting tensor

# What a tensor is asked about itself, and what is set of it, besides its values.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_ABOUT: set[Any] = {
    accessor
    for name, attribute in vars(torch._C.TensorBase).items()
    if type(attribute).__name__ == "getset_descriptor" and name not in _VALUES
    for accessor in (attribute.__get__, attribute.__set__)
}
_ABOUT |= {
    getattr(torch.Tensor, name)
    for name in (
        "__hash__ __len__ data_ptr dim element_size get_device is_complex is_conj is_floating_point is_inference "
        "is_neg is_pinned _is_view is_same_size is_shared is_signed ndimension nelement numel register_hook "
        "register_post_accumulate_grad_hook requires_grad_ size storage_offset"
    ).split()
}
_ABOUT |= {torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type}
_OF_MEMORY = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.dim_order}
_MOVES = {getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double")}
_SETS_DATA: Any = vars(torch._C.TensorBase)["data"].__set__


def _changes_nothing(function: Callable, tensor: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a conversion, as of `module.to()`, would return the tensor itself."""
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return function(probe, *args, **kwargs) is probe


def _read(value: Any) -> Any:
    """A function's arguments with decoded tensors in the place of resting ones."""
    if isinstance(value, Resting):
        return getattr(value, _READ)(getattr(value, _WEIGHT))
    if type(value) in (tuple, list):
        return type(value)(map(_read, value))
    if type(value) is dict:
        return {key: _read(held) for key, held in value.items()}
    return value


class NotCopied:
    """What belongs to one offloaded model: it is neither copied nor saved with the model's modules."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("an offloaded model cannot be copied: close() first, or copy its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("an offloaded model cannot be pickled: save its state_dict(), or close() first")


class Resting(NotCopied):
    """What the classes of resting tensors have in common."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        first: Any = next(iter((*args, *kwargs.values())), None)
        if isinstance(first, Resting):
            if function in _OF_MEMORY:
                return function(getattr(first, _WEIGHT).like(), *args[1:], **kwargs)
            if function in _MOVES and _changes_nothing(function, first, args[1:], kwargs):
                return first
            if function == _SETS_DATA and args[1] is first:
                return None
        name = getattr(function, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__set__", "__delete__")
        written = [first] if writes else []
        written.append(kwargs.get("out"))
        for tensor in written:
            if isinstance(tensor, Resting):
                raise RuntimeError(
                    f"{getattr(tensor, _WEIGHT).name} is offloaded and cannot be written to: close() first"
                )
        return function(*_read(args), **_read(kwargs))


class RestingParameter(Resting, torch.nn.Parameter):
    pass


class RestingTensor(Resting, torch.Tensor):
    pass


_CLASSES: dict[type, type] = {torch.nn.Parameter: RestingParameter, torch.Tensor: RestingTensor}
_AWAKE: dict[type, type] = {resting: awake for awake, resting in _CLASSES.items()}


def prepare(tensor: torch.Tensor, weight: Weight, read: Callable[[Weight], torch.Tensor]) -> None:
    """Says whose values a tensor of a model stands for, and what decodes them."""
    setattr(tensor, _WEIGHT, weight)
    setattr(tensor, _READ, read)


def rest(tensor: torch.Tensor) -> None:
    """Makes a prepared tensor ask for its values."""
    tensor.__class__ = _CLASSES.get(type(tensor), type(tensor))


def wake(tensor: torch.Tensor) -> None:
    """Makes a tensor what it was: its memory holds its values."""
    tensor.__class__ = _AWAKE.get(type(tensor), type(tensor))


def release(tensor: torch.Tensor) -> None:
    """Undoes `prepare` and `rest`."""
    wake(tensor)
    for name in (_WEIGHT, _READ):
        vars(tensor).pop(name, None)
