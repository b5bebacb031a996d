"""Finds where a worker of vLLM keeps a checkpoint's weights: merged, sharded or coded.

The model's own `load_weights` tells this, once for each name, when it loads weights that have no memory. From then on
changes go to these places, and nothing is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._tables.compressed_tensor import CompressedTensor
from ...deltas import Receiver
from ...deltas._applying import Base
from ...deltas._on_pieces import Memory
from ...deltas._receiving import bases_of_rows, rows_of
from ...deltas._regions import Region, TensorRows
from ._incoming import IncomingTensor, storage_of
from ._methods import CodedMethod


class ShardPlace(NamedTuple):
    """The place where a worker keeps a part of a checkpoint's tensor. box: first element and length in each
    dimension."""

    memory: torch.Tensor | CompressedTensor
    first_row: int  # first row in the memory
    box: tuple[tuple[int, int], ...]

    def within(self, rows: TensorRows) -> tuple[Memory, tuple[slice, ...]] | None:
        """Returns the memory here that holds a part of a tensor's rows, and the place of that part in the rows, or
        None if no part is here."""
        if not rows.shape:
            return rows_of(self.memory, 0, 1), ()
        (start, length), *others = self.box
        first, last = max(start, rows.start), min(start + length, rows.start + rows.shape[0])
        if first >= last:
            return None
        memory = rows_of(self.memory, self.first_row + first - start, self.first_row + last - start)
        return memory, (slice(first - rows.start, last - rows.start), *(slice(at, at + size) for at, size in others))


class ModelReceiver(Receiver):
    """Receives a checkpoint's tensors for a model of an engine, which keeps them merged, sharded or coded.

    Args:
        model: its `load_weights` takes names and tensors of a checkpoint.
        is_eager: whether the model's coded layers are in no CUDA graph.

    Raises:
        NotImplementedError: there are coded layers, and they are in graphs.
    """

    def __init__(self, model: torch.nn.Module, is_eager: bool = False) -> None:
        super().__init__({})
        self._model: Any = model
        self._places: dict[str, list[ShardPlace]] = {}
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

    def bases_of(self, regions: Sequence[Region]) -> list[list[Base]]:
        all_rows = [region.tensor_rows() for region in regions]
        asked = {
            name: (rows.full_shape, region.dtype)
            for region, each in zip(regions, all_rows)
            for rows in each
            for name in rows.names
            if name not in self._places
        }
        if asked:
            self._places |= self._found(asked)
        return [
            bases_of_rows([(rows, self._within(rows)) for rows in each], region.dtype)
            for region, each in zip(regions, all_rows)
        ]

    def _within(self, rows: TensorRows) -> list[tuple[Memory, tuple[slice, ...]]]:
        places = [place.within(rows) for name in rows.names for place in self._places[name]]
        return [place for place in places if place is not None]

    def _found(self, asked: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, list[ShardPlace]]:
        """Returns the places of tensors. Tensors that the model does not load, such as those of other pipeline
        stages, have no places."""
        copies = {name: _Copies() for name in asked}
        weights = {name: IncomingTensor.of(copies[name], *each) for name, each in asked.items()}
        with contextlib.ExitStack() as stack:
            tables = [stack.enter_context(method.as_plain(layer)) for layer, method in self._coded]
            with torch.no_grad():
                self._model.load_weights(iter(weights.items()))
        by_storage = {storage_of(weight): table for of_layer in tables for weight, table in of_layer.items()}
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
