"""Finds where a worker of vLLM keeps the weights of a checkpoint, which may be merged, sharded or coded there.

To find out, `ModelReceiver` passes tensors that have no memory to the model's own `load_weights`, once for each name.
The tensors only record where `load_weights` copies them to. Later changes are written directly to the recorded places,
without `load_weights`.
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
    """Receives changes of a checkpoint's tensors for an engine's model, which may keep the tensors merged, sharded or
    coded.

    Args:
        model: a model whose `load_weights` takes pairs of the names and tensors of a checkpoint.
        is_eager: whether the model runs without CUDA graphs.

    Raises:
        NotImplementedError: the model has coded layers and is_eager is False.
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
        """Returns a dict from each tensor's name to a list of the places where the model keeps parts of the tensor. The
        list is empty for tensors that the model does not load, such as those of other pipeline stages."""
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
    """The origin of an `IncomingTensor` that notes where the tensor's parts are copied, and copies nothing."""

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
    """Returns the place to which a loader copied a part of a weight. weight: the whole tensor, on the meta device.
    source: the part, a view of weight. target: the memory to which it was copied, or, if the layer is coded, a view of
    a weight that `as_plain` made. tables: a map from `storage_of` of each such weight to its table."""
    if target.dtype != weight.dtype:
        raise TypeError(f"{name} has dtype {target.dtype} here; the message is for {weight.dtype}")
    strides, at, box = weight.stride(), source.storage_offset(), []
    missing = weight.dim() - source.dim()  # number of leading dimensions that a loader has removed by indexing
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
