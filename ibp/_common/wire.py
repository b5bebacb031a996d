"""Converts values to bytes for other processes, and back, and lends memory of a GPU to them.

A message is JSON, followed by the data of tensors and of bytes objects. It is read as data: it can name only a few
kinds of values, and classes that are registered here. Nothing in it is executed, unlike in a pickle. The fields of
named tuples are compared with their annotations; other classes check their fields themselves.

Memory of a GPU is lent by CUDA IPC, as torch does when it sends tensors. Unlike in torch, plain values describe the
memory, so no pickle is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
import struct
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_Class = TypeVar("_Class", bound=type)
_Record = TypeVar("_Record", bound=tuple[Any, ...])

_LENGTH = struct.Struct("<Q")  # The first bytes of a message: the length of the JSON in bytes.
# The registered classes by name, each with the names of its constructor's arguments.
_classes: dict[str, tuple[type, tuple[str, ...]]] = {}


# ---- messages ----


def sent(kind: _Class) -> _Class:
    """Registers a class whose objects can then be sent: a named tuple, a dataclass or a class of codebooks. An object
    is sent as the arguments of its constructor.

    The sender chooses these values, so the constructors of dataclasses and codebooks must check their arguments and
    raise ValueError or TypeError if they are wrong."""
    is_record = dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)] if is_record else kind._fields  # type: ignore[attr-defined]
    _classes[kind.__name__] = kind, tuple(names)
    return kind


def written(value: Any) -> bytes:
    """Converts a value to bytes. The value may be None, a number, a string, bytes, a dtype, a device, a dense tensor,
    an object of a registered class, or a list, tuple or dict of such values. Raises TypeError for any other value."""
    parts: list[bytes] = []
    text = json.dumps(_form_of(value, parts)).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *parts))


def read(content: bytes) -> Any:
    """Returns the value that `written` has converted to bytes. Tensors are on the CPU and do not share the memory of
    the bytes. Raises ValueError if `written` did not make the bytes."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        text = content[_LENGTH.size : _LENGTH.size + length]
        if len(text) != length:
            raise ValueError(f"there are {len(text)} bytes of {length}")
        reader = _Reader(memoryview(content)[_LENGTH.size + length :])
        value = reader.value(json.loads(text))
        reader.end()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise ValueError(f"the message is damaged, or no message of ibp's: {error}") from error
    return value


def checked(record: _Record) -> _Record:
    """Checks a named tuple and returns it. Raises ValueError if a field does not match its annotation."""
    for (name, hint), value in zip(_hints_of(type(record)).items(), record, strict=True):
        if not _is_of(value, hint):
            raise ValueError(f"{name} of a {type(record).__name__} is a {type(value).__name__}; wanted {hint}")
    return record


_hints_of = functools.cache(get_type_hints)


@functools.cache
def _parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the origin and the arguments of an annotation, such as (tuple, (int, str)) for tuple[int, str]."""
    return get_origin(hint), get_args(hint)


def _is_of(value: Any, hint: Any) -> bool:
    """Returns whether a value matches an annotation. The annotation is a class, Any, a union, or a tuple, list or dict
    of such annotations."""
    kind, parts = _parts_of(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(_is_of(value, part) for part in parts)
    if not isinstance(value, kind or hint):
        return False
    if kind is dict:
        return all(_is_of(key, parts[0]) and _is_of(held, parts[1]) for key, held in value.items())
    if kind is tuple and parts[-1] is not ...:
        return len(value) == len(parts) and all(map(_is_of, value, parts))
    return kind is None or all(_is_of(held, parts[0]) for held in value)


def _form_of(value: Any, parts: list[bytes]) -> Any:
    """Returns the form of a value, which stands for it in the JSON: the value itself, or a list [kind, ...]. The data
    of tensors and of bytes objects is appended to parts."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value).__name__ in _classes and type(value) is _classes[type(value).__name__][0]:
        name = type(value).__name__
        return ["object", name, [_form_of(getattr(value, field), parts) for field in _classes[name][1]]]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, bytes):
        parts.append(value)
        return ["bytes", len(value)]
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts.append(data)
        return ["tensor", _name_of(value.dtype), list(value.shape), len(data)]
    if isinstance(value, torch.dtype):
        return ["dtype", _name_of(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, dict):
        return ["dict", [[_form_of(key, parts), _form_of(held, parts)] for key, held in value.items()]]
    for kind, name in ((torch.Size, "size"), (tuple, "tuple"), (list, "list")):
        if type(value) is kind:
            return [name, [_form_of(held, parts) for held in value]]
    raise TypeError(f"a {type(value).__name__} cannot be sent to other processes")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


class _Reader:
    """Converts forms, as `_form_of` returns them, back to values. The forms must be converted in their order, because
    each bytes object or tensor takes the next bytes of the data that follows the JSON."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0
        self._kinds: dict[str, Callable[..., Any]] = {
            "bytes": lambda size: bytes(self._taken(size)),
            "tensor": self._tensor,
            "dtype": _dtype,
            "device": lambda name: torch.device(str(name)),
            "dict": lambda pairs: {self.value(key): self.value(held) for key, held in pairs},
            "size": lambda sizes: torch.Size(self._values(sizes)),
            "tuple": lambda held: tuple(self._values(held)),
            "list": self._values,
            "object": self._object,
        }

    def value(self, form: Any) -> Any:
        if not isinstance(form, (list, dict)):
            return form
        if not isinstance(form, list) or not form or not isinstance(form[0], str) or form[0] not in self._kinds:
            raise ValueError(f"{str(form)[:60]} is no value")
        return self._kinds[form[0]](*form[1:])

    def end(self) -> None:
        if self._position != len(self._data):
            raise ValueError(f"there are {len(self._data) - self._position} bytes too many")

    def _values(self, forms: Any) -> list[Any]:
        if not isinstance(forms, list):
            raise ValueError(f"{str(forms)[:60]} is no list")
        return [self.value(form) for form in forms]

    def _taken(self, size: Any) -> memoryview:
        if type(size) is not int or not 0 <= size <= len(self._data) - self._position:
            raise ValueError(f"{size} bytes are wanted; {len(self._data) - self._position} are there")
        self._position += size
        return self._data[self._position - size : self._position]

    def _tensor(self, dtype: Any, shape: Any, size: Any) -> torch.Tensor:
        data, kind = self._taken(size), _dtype(dtype)
        if not isinstance(shape, list) or any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"{shape} is no shape")
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        if size:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return flat.view(kind).view(shape)

    def _object(self, name: Any, fields: Any) -> Any:
        if not isinstance(name, str) or name not in _classes:
            raise ValueError(f"{name!r} is no class of ibp's that is sent")
        kind, names = _classes[name]
        found = kind(**dict(zip(names, self._values(fields), strict=True)))
        return checked(found) if isinstance(found, tuple) else found


# ---- memory of a GPU ----

_CLASS, _STORAGE, _DEVICE = 0, 4, 6  # Positions among the arguments of rebuild_cuda_tensor.
_CLASSES = torch.Tensor, torch.storage.TypedStorage


def lent(tensor: torch.Tensor) -> tuple:
    """Returns plain values that describe a CUDA tensor. One other process can pass them to `opened`, once. Until then,
    this process keeps the memory."""
    arguments = reduce_tensor(tensor.detach())[1]
    assert (arguments[_CLASS], arguments[_STORAGE]) == _CLASSES
    return (*arguments[_CLASS + 1 : _STORAGE], *arguments[_STORAGE + 1 :])


def opened(how: Any, device: int | None = None) -> torch.Tensor:
    """Opens a tensor that another process has lent.

    Args:
        how: the values that `lent` has returned in that process.
        device: the index of the tensor's GPU in this process. None: the same index as in the other process.

    Raises:
        ValueError: `how` does not have the form of a result of `lent`.
    """
    arguments = list(how) if isinstance(how, tuple) else []
    for place, kind in zip((_CLASS, _STORAGE), _CLASSES):
        arguments.insert(place, kind)
    if len(arguments) != rebuild_cuda_tensor.__code__.co_argcount:
        raise ValueError("what another process has lent is no memory of a GPU")
    if device is not None:
        arguments[_DEVICE] = device
    with torch.cuda.device(arguments[_DEVICE]):
        return rebuild_cuda_tensor(*arguments)
