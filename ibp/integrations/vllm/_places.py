"""Finds where a worker of vLLM keeps a checkpoint's weights: merged, sharded or coded.

The model's own `load_weights` tells this, once for each name, when it loads weights that have no memory. From then on
changes go to these places, and nothing is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from ... import CompressedTensor
from ...deltas import PlacedReceiver, ShardPlace
from ._incoming import IncomingTensor, storage_of
from ._methods import CodedMethod


class ModelReceiver(PlacedReceiver):
    """Receives a checkpoint's tensors for a model of an engine, which keeps them merged, sharded or coded.

    Args:
        model: its `load_weights` takes names and tensors of a checkpoint.
        is_eager: whether the model's coded layers are in no CUDA graph.

    Raises:
        NotImplementedError: there are coded layers, and they are in graphs.
    """

    def __init__(self, model: torch.nn.Module, is_eager: bool = False) -> None:
        super().__init__()
        self._model: Any = model
        self._coded: list[tuple[Any, Any]] = [
            (layer, layer.quant_method) for layer in model.modules() if _is_coded(layer)
        ]
        if self._coded and not is_eager:
            raise NotImplementedError(
                "weights that ibp has coded change with --enforce-eager alone: CUDA graphs hold lists of their escapes"
            )

    def apply(self, message: torch.Tensor) -> bool:
        is_done = super().apply(message)
        for _, method in self._coded if is_done else ():
            for table in method.tables.values():
                table.prepare_linear()
        return is_done

    def places_of(self, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, list[ShardPlace]]:
        """Returns the places of tensors. Tensors that the model does not load, such as those of other pipeline
        stages, have no places."""
        copies = {name: _Copies() for name in tensors}
        weights = {name: IncomingTensor.of(copies[name], *each) for name, each in tensors.items()}
        with contextlib.ExitStack() as stack:
            plain = [stack.enter_context(method.as_plain(layer)) for layer, method in self._coded]
            with torch.no_grad():
                self._model.load_weights(iter(weights.items()))
        by_storage = {storage_of(weight): table for tables in plain for weight, table in tables.items()}
        return {
            name: [_place(name, weight.as_subclass(torch.Tensor), *copied, by_storage) for copied in copies[name].found]
            for name, weight in weights.items()
        }


class _Copies:
    """Notes where a tensor is copied to, instead of copying it."""

    def __init__(self) -> None:
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.found.append((source, target))

    def values(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise NotImplementedError("a weight loader changes values before it copies them, which no delta can do")


def _is_coded(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    return isinstance(method, CodedMethod) and bool(method.tables) and not method.is_tied


def _place(
    name: str, weight: torch.Tensor, source: torch.Tensor, target: torch.Tensor, tables: dict[int, CompressedTensor]
) -> ShardPlace:
    """Returns where a loader has copied a part of a weight."""
    if target.dtype != weight.dtype:
        raise TypeError(f"{name} has dtype {target.dtype} here; the message is for {weight.dtype}")
    strides, at, box = weight.stride(), source.storage_offset(), []
    missing = weight.dim() - source.dim()  # leading dimensions of which a loader has chosen one element
    if source.numel() == weight.numel() and source.is_contiguous():
        source, target, missing = weight, target.view(weight.shape), 0
    if missing < 0 or any(n > 1 and a != b for n, a, b in zip(source.shape, source.stride(), strides[missing:])):
        raise NotImplementedError(f"the loader of {name} takes it in another order, which deltas cannot follow")
    for stride, length in zip(strides, (1,) * missing + tuple(source.shape)):
        box.append((at // max(1, stride), length))
        at %= max(1, stride)
    if target.is_meta:
        columns = target.shape[-1]
        table = tables[storage_of(target)]
        if columns != table.shape[1]:
            raise NotImplementedError(f"{name} is coded beside other weights in one row")
        return ShardPlace(table, target.storage_offset() // columns, tuple(box))
    return ShardPlace(target.detach()[(None,) * missing], 0, tuple(box))
