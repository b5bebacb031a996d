"""Checkpoints that torch.save wrote, read by weights_only: tensors by the path of their keys, other values as text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .. import _rows
from .source import Source, SourceFormatError, SourceTensor

PREFIX = "torch."  # of keys of metadata that hold a value of the checkpoint as JSON


def open_torch(path: str | os.PathLike[str]) -> Source:
    """A checkpoint of torch. Nested dicts and lists are flattened: the tensor at ["model"]["w"] is "model.w". Numbers,
    texts, and lists of them become metadata: JSON under "torch." and their path.

    Raises:
        SourceFormatError: it is none, torch refuses it with weights_only, or it holds a value that is neither tensor
            nor text.
    """
    try:
        content = _load(os.fspath(path))
        values = list(_flattened(content, ""))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of damaged bytes torch raises errors of any kind
        reason = str(error).split("\n", 1)[0]
        raise SourceFormatError(f"{path}: torch.load(weights_only=True) refuses it: {reason}") from None
    tensors: dict[str, SourceTensor] = {}
    metadata: dict[str, str] = {}
    for name, value in values:
        if name in tensors or PREFIX + name in metadata:
            raise SourceFormatError(f"{path}: two values have the path {name!r}")
        if isinstance(value, torch.Tensor):
            tensors[name] = LoadedTensor(name, value, path)
        else:
            metadata[PREFIX + name] = _as_text(value, name, path)
    return Source(os.fspath(path), "torch", tensors, metadata)


def _load(path: str) -> Any:
    """Mapped, where the file is one of those that torch maps."""
    with open(path, "rb") as file:
        is_archive = file.read(4) == b"PK\3\4"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_archive else None)


class LoadedTensor(SourceTensor):
    """A tensor of torch: of any strides."""

    def __init__(self, name: str, tensor: torch.Tensor, path: object) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise SourceFormatError(f"{path}: tensor {name!r} is not dense; wanted a strided tensor with its values")
        super().__init__(name, tensor.dtype, tuple(tensor.shape))
        self._tensor = tensor.detach()

    def read(self, start_byte: int, end_byte: int) -> np.ndarray:
        tensor, size = self._tensor, self.dtype.itemsize
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return _rows.bytes_of(tensor)[start_byte:end_byte].numpy()
        first, last = start_byte // size, -(-end_byte // size)
        elements = _elements(tensor, first, last)
        return _rows.bytes_of(elements)[start_byte - first * size : end_byte - first * size].numpy()


def _elements(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Elements first to last - 1 of a tensor in their order, by whole items of its first dimension."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    each = tensor[0].numel()
    item, end = first // each, -(-last // each)
    if end - item == 1 and tensor.dim() > 1:
        return _elements(tensor[item], first - item * each, last - item * each)
    return tensor[item:end].reshape(-1)[first - item * each : last - item * each]


def _flattened(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)) and _holds_tensors(value):
        pairs = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        yield path or "tensor", value
        return
    for key, inner in pairs:
        yield from _flattened(inner, f"{path}.{key}" if path else key)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(inner) for inner in value)
    return isinstance(value, torch.Tensor)


def _as_text(value: Any, name: str, path: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise SourceFormatError(
            f"{path}: the value at {name!r} is a {type(value).__name__}; wanted a tensor, a number, a text or a list"
        ) from None
