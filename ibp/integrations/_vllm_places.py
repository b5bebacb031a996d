"""Where a worker of vLLM keeps a checkpoint's weights: merged, sharded or coded.

The model's own `load_weights` says so, once for each name, when it loads weights that have no memory. From then on
changes go to these places, and nothing is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .._tables.compressed_tensor import CompressedTensor
from ..deltas import Receiver
from ..deltas._applying import Base
from ..deltas._on_parts import PartOf
from ..deltas._receiving import rows_of
from ..deltas._regions import Region
from .vllm_weights import IBPWeightMethod


class Place(NamedTuple):
    """Where a worker keeps a part of a checkpoint's tensor. box: first element and length in each dimension."""

    memory: torch.Tensor | CompressedTensor
    first_row: int  # of the memory
    box: tuple[tuple[int, int], ...]

    def base_of(self, region: Region) -> Base | None:
        """What of a region is here, as a base of its delta; None: nothing."""
        if not region.shape:
            return rows_of(self.memory, 0, 1)
        (start, length), *others = self.box
        first, last = max(start, region.start), min(start + length, region.start + region.shape[0])
        if first >= last:
            return None
        memory = rows_of(self.memory, self.first_row + first - start, self.first_row + last - start)
        box = (slice(first - region.start, last - region.start), *(slice(at, at + size) for at, size in others))
        return memory if memory.shape == region.shape else PartOf(memory, region.shape, box)


class ModelReceiver(Receiver):
    """A receiver of a checkpoint's tensors, which a model of an engine keeps merged, sharded or coded.

    Args:
        model: its `load_weights` takes names and tensors of a checkpoint.
        is_eager: whether no CUDA graph holds the model's coded layers.

    Raises:
        NotImplementedError: there are coded layers, and graphs.
    """

    def __init__(self, model: torch.nn.Module, is_eager: bool = False) -> None:
        super().__init__({})
        self._model: Any = model
        self._places: dict[str, list[Place]] = {}
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
            method.table.prepare_linear()
        return is_done

    def bases_of(self, regions: Sequence[Region]) -> list[list[Base]]:
        asked = {name: region for region in regions for name in region.names if name not in self._places}
        if asked:
            self._places |= self._found({name: (region.full_shape, region.dtype) for name, region in asked.items()})
        places = [[place for name in region.names for place in self._places[name]] for region in regions]
        bases = [[place.base_of(region) for place in each] for each, region in zip(places, regions)]
        return [[base for base in each if base is not None] for each in bases]

    def _found(self, asked: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, list[Place]]:
        """The places of tensors. Tensors that the model does not load, such as those of other pipeline stages, have
        none."""
        weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in asked.items()}
        copies = _Copies(weights)
        with contextlib.ExitStack() as stack:
            tables = {stack.enter_context(method.as_plain(layer)): method.table for layer, method in self._coded}
            with torch.no_grad(), copies:
                self._model.load_weights(iter(weights.items()))
        by_storage = {_storage(weight): table for weight, table in tables.items()}
        return {
            name: [_place(name, weights[name], source, target, by_storage) for source, target in copies.found[name]]
            for name in weights
        }


class _Copies(TorchFunctionMode):
    """Notes what is copied from weights without memory, and where to, in place of copying."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {_storage(weight): name for name, weight in weights.items()}
        self.found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in weights}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_ and args[1].is_meta:
            name = self._names.get(_storage(args[1]))
            if name is None:
                raise NotImplementedError("a weight loader changes values before it copies them, which no delta can do")
            self.found[name].append((args[1], args[0]))
            return args[0]
        return function(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_coded(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    return isinstance(method, IBPWeightMethod) and method.table is not None and not method.is_tied


def _place(
    name: str, weight: torch.Tensor, source: torch.Tensor, target: torch.Tensor, tables: dict[int, CompressedTensor]
) -> Place:
    """Where a loader has copied a part of a weight to."""
    if target.dtype != weight.dtype:
        raise TypeError(f"{name} has dtype {target.dtype} here; the message is for {weight.dtype}")
    strides, at, box = weight.stride(), source.storage_offset(), []
    missing = weight.dim() - source.dim()  # leading dimensions that a loader has chosen one element of
    if source.numel() == weight.numel() and source.is_contiguous():
        source, target, missing = weight, target.view(weight.shape), 0
    if missing < 0 or any(n > 1 and a != b for n, a, b in zip(source.shape, source.stride(), strides[missing:])):
        raise NotImplementedError(f"the loader of {name} takes it in another order, which deltas cannot follow")
    for stride, length in zip(strides, (1,) * missing + tuple(source.shape)):
        box.append((at // max(1, stride), length))
        at %= max(1, stride)
    if target.is_meta:
        rows, columns = target.shape
        table = tables[_storage(target)]
        if columns != table.shape[1]:
            raise NotImplementedError(f"{name} is coded beside other weights in one row")
        return Place(table, target.storage_offset() // columns, tuple(box))
    return Place(target.detach()[(None,) * missing], 0, tuple(box))
