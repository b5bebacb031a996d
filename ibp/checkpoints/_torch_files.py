"""Reads checkpoints that torch.save wrote, with weights_only: tensors are named by the path of their keys, and other
values become texts."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from .._files import MAX_HEADER_BYTES, MOST_TIMES, STORAGE, View, open_regular
from .._layout import geometry
from ._nested import flattened
from ._source import NotTensorsError, Source, SourceFormatError, SourceTensor

_WHY = re.compile(r"WeightsUnpickler error:\s*(.+)")
_UNKNOWN = re.compile(r"GLOBAL (\S+)")  # in torch's message about a class or function that weights_only does not accept


def open_torch(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint of torch. Nested dicts and lists become flat names (`nested`): ["model"]["w"] becomes
    "model.w".

    Raises:
        NotTensorsError: it holds a value that is neither a tensor nor a number nor a text, so that weights_only refuses
            it.
        SourceFormatError: it is not a checkpoint, or its tensors are more than 1,000 times as large as the file.
    """
    try:
        content = _load(os.fspath(path))
        found, metadata = flattened(content, min(MAX_HEADER_BYTES, MOST_TIMES * os.path.getsize(path)))
    except (OSError, MemoryError):
        raise
    except SourceFormatError as error:
        raise type(error)(f"{path}: {error}") from None
    except UnpicklingError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None:
            raise SourceFormatError(f"{path}: torch.load refuses it: {_reason(error)}") from None
        raise NotTensorsError(
            f"{path} holds {unknown[1]}; wanted tensors, numbers and texts, as torch.load(weights_only=True) takes them"
        ) from None
    except Exception as error:  # for damaged bytes torch raises errors of any kind
        raise SourceFormatError(f"{path}: torch.load refuses it: {_reason(error)}") from None
    tensors = {name: loaded_tensor(name, tensor, path) for name, tensor in found.items()}
    total, most = sum(tensor.num_bytes for tensor in tensors.values()), MOST_TIMES * os.path.getsize(path)
    if total > most:
        largest = max(tensors.values(), key=lambda tensor: tensor.num_bytes)
        raise SourceFormatError(
            f"{path}: its tensors have {total:,} bytes, more than {MOST_TIMES:,} times those of the file, and "
            f"{largest.name!r} has {largest.num_bytes:,}; wanted tensors that are stored whole, not expanded ones"
        )
    return Source(os.fspath(path), "torch", _with_views(tensors, found, path), metadata)


# ---- tensors that share memory ----


def _with_views(
    tensors: dict[str, SourceTensor], found: Mapping[str, torch.Tensor], path: object
) -> dict[str, SourceTensor]:
    """Returns the tensors. Tensors that overlap in memory, or that have an element in several places, become views
    of a base."""
    of_storages: dict[tuple[int, torch.dtype], list[tuple[int, int, str]]] = {}
    for name, tensor in found.items():
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            # torch.save refuses several dtypes in one storage
            storage = tensor.untyped_storage().data_ptr(), tensor.dtype
            of_storages.setdefault(storage, []).append((*_span_of(tensor), name))
    viewed = dict(tensors)
    for spans in of_storages.values():
        for start, end, names in _overlapping(sorted(spans)):
            if len(names) == 1 and found[names[0]].numel() <= end - start:
                continue
            whole = {name for name in names if found[name].is_contiguous() and _span_of(found[name]) == (start, end)}
            base = next((name for name in tensors if name in whole and not name.startswith(STORAGE)), None)
            if base is None:
                memory = found[names[0]].as_strided((end - start,), (1,), start)
                held = loaded_tensor(f"{STORAGE}{names[0]}", memory, path)
            else:
                held = tensors[base]
            for name in names:
                if name != base:
                    tensor = found[name]
                    offset = int(tensor.storage_offset()) - start
                    view = View(held.name, tuple(tensor.shape), tensor.stride(), offset)
                    viewed[name] = replace(tensors[name], base=held, view=view)
    return viewed


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first element of a tensor in its storage, and the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = int(tensor.storage_offset())
    return start, start + last + 1


def _overlapping(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, list[str]]]:
    """Joins sorted spans that overlap. Returns (start, end, names) for each."""
    joined: list[tuple[int, int, list[str]]] = []
    for start, end, name in spans:
        if joined and start < joined[-1][1]:
            first, last, names = joined[-1]
            joined[-1] = first, max(last, end), [*names, name]
        else:
            joined.append((start, end, [name]))
    return joined


# ---- one file ----


def _reason(error: Exception) -> str:
    """Returns why torch refuses a file, in one line, without torch's advice to trust the file."""
    found = _WHY.search(str(error))
    return found[1] if found else str(error).split("\n", 1)[0] or type(error).__name__


def _load(path: str) -> Any:
    """Loads the file, mapped if torch can map it."""
    with os.fdopen(open_regular(path), "rb") as file:
        is_archive = file.read(4) == b"PK\3\4"
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise SourceFormatError("members of the archive are deflated; wanted it as torch.save wrote it")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_archive else None)


def loaded_tensor(name: str, tensor: torch.Tensor, path: object) -> SourceTensor:
    """Returns a dense tensor of torch, with any strides, as a tensor of a source."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise SourceFormatError(f"{path}: tensor {name!r} is not dense; wanted a strided tensor with its values")
    tensor, size = tensor.detach(), tensor.dtype.itemsize

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return geometry.bytes_of(tensor)[start_byte:end_byte].numpy()
        first, last = start_byte // size, -(-end_byte // size)
        elements = _elements(tensor, first, last)
        return geometry.bytes_of(elements)[start_byte - first * size : end_byte - first * size].numpy()

    return SourceTensor(name, tensor.dtype, tuple(tensor.shape), read)


def _elements(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Returns elements first to last - 1 of a tensor in order, by whole items of its first dimension."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    each = tensor[0].numel()
    item, end = first // each, -(-last // each)
    if end - item == 1 and tensor.dim() > 1:
        return _elements(tensor[item], first - item * each, last - item * each)
    return tensor[item:end].reshape(-1)[first - item * each : last - item * each]
