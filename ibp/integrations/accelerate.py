"""Hugging Face accelerate with compressed weights: a mapping from which accelerate's hooks take offloaded weights.

    from accelerate import cpu_offload
    from ibp.integrations.accelerate import CompressedWeights

    weights = CompressedWeights(model.state_dict(), device="cuda")
    cpu_offload(model, execution_device="cuda", state_dict=weights)

accelerate's hooks are slow: they copy without `non_blocking`, and clear the device's cache for each parameter.
`ibp.offload` is faster. The mapping is for models that accelerate already dispatches.

The import of this module also changes accelerate's hooks: in modules with tables (`ibp.nn`), they move plain tensors
and leave tables where they are. If accelerate is imported, ibp imports this module itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import big_modeling, hooks

import ibp

from ..adapters import CodedWeight, WeightCompressor, checked_device, shown_memory
from ..nn import TableParameter

__all__ = ["CompressedWeights"]


class CompressedWeights(Mapping[str, torch.Tensor]):
    """The weights of a model by name, compressed in host memory. A weight is decoded each time it is read.

    Use it for `accelerate.cpu_offload(model, execution_device, state_dict=weights)`. If part of a model stays on GPUs,
    use it for `accelerate.dispatch_model(model, device_map, state_dict=weights, offload_index={})`. Any other code that
    takes a mapping from names to tensors can also use it.

    A tensor that several names share is stored once. Tensors of less than 4 KiB, and tensors of subclasses of
    torch.Tensor, are kept raw. The given tensors are not kept alive, so a checkpoint can be passed shard by shard, as
    pairs.

    Args:
        weights: a state dict, or pairs (name, tensor).
        device: the device of decoded tensors. It should be the execution device, because accelerate recognises tied
            weights by their addresses, and temporary copies on the CPU would have misleading addresses. None: the CPU.
        compress_options: options of `ibp.compress`, except x and codebook. By default layout is "packed" and row_bytes
            4,096.

    Raises:
        TypeError: a weight is not a tensor, or an option is not one of `ibp.compress`.
        ValueError: a name occurs twice, or a tensor is on the meta device.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        device: torch.device | str | int | None = None,
        **compress_options: Any,
    ) -> None:
        compressor = WeightCompressor(compress_options)
        self.device = checked_device("cpu" if device is None else device)
        self._stored: dict[str, CodedWeight | torch.Tensor] = {}
        # The key identifies a tensor only while the tensor lives: a later tensor may be at the address of a freed one.
        seen: dict[tuple, tuple[weakref.ref[torch.Tensor], CodedWeight | torch.Tensor]] = {}
        for name, x in weights.items() if isinstance(weights, Mapping) else weights:
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name!r} is a {type(x).__name__}; wanted a torch.Tensor")
            if name in self._stored:
                raise ValueError(f"{name!r} comes twice; wanted each name once")
            if x.is_meta:
                raise ValueError(f"{name!r} is on the meta device; wanted a tensor with values")
            # A caller may pass one buffer several times, filled with the values of different tensors. Then the version
            # of the buffer changes each time.
            version = None if x.is_inference() else x._version
            key = (x.data_ptr(), version, x.device, x.dtype, x.shape, x.stride())
            alive, stored = seen.get(key, (None, None))
            if stored is None or alive is None or alive() is None or not x.numel():
                near = x.detach().cpu()
                stored = compressor.code(name, near) if compressor.takes(near) else near.clone()
                seen[key] = weakref.ref(x), stored
            self._stored[name] = stored

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns the tensor with this name on `device`. The result is in new memory, unless the tensor is kept raw and
        `device` is the CPU. Raises KeyError if there is no such name."""
        stored = self._stored[name]
        return stored.decoded(self.device) if isinstance(stored, CodedWeight) else stored.to(self.device)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def tables(self) -> dict[str, ibp.CompressedTensor]:
        """The tables of the compressed tensors, by name. A table's dimensions are permuted to the memory order of the
        given tensor."""
        return {name: stored.table for name, stored in self._stored.items() if isinstance(stored, CodedWeight)}

    @property
    def original_bytes(self) -> int:
        """Size in bytes of the given tensors. A tensor with several names counts once."""
        return sum(one.original_bytes if isinstance(one, ibp.CompressedTensor) else one.nbytes for one in self._each())

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the coded rows, codebooks and raw tensors. A tensor with several names counts once."""
        return sum(one.stored_bytes if isinstance(one, ibp.CompressedTensor) else one.nbytes for one in self._each())

    @property
    def savings(self) -> float:
        """1 - stored_bytes / original_bytes; 0 if there are no bytes."""
        return 1 - self.stored_bytes / self.original_bytes if self.original_bytes else 0.0

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the tables and raw tensors occupy. A tensor with several names counts
        once."""
        return sum(one.nbytes for one in self._each())

    def _each(self) -> list[ibp.CompressedTensor | torch.Tensor]:
        held = {id(stored): stored for stored in self._stored.values()}.values()
        return [stored.table if isinstance(stored, CodedWeight) else stored for stored in held]

    def __repr__(self) -> str:
        return (
            f"ibp.integrations.accelerate.CompressedWeights({len(self)} names, {len(self._each())} tensors, "
            f"{shown_memory(self.nbytes, self.original_bytes)}, stored_bytes={self.stored_bytes:,}, "
            f"savings={self.savings:.1%}, device={self.device})"
        )


# ---- accelerate's hooks ----


_named_module_tensors, _find_tied_parameters = hooks.named_module_tensors, big_modeling.find_tied_parameters


def _plain_tensors(*args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for the tensors that hooks move: all tensors except tables. Tables need not be moved,
    because their rows are decoded on the device of a module's input. Replaces a function of accelerate."""
    for name, tensor in _named_module_tensors(*args, **options):
        if not isinstance(tensor, TableParameter):
            yield name, tensor


def _plain_ties(model: torch.nn.Module, **options: Any) -> list[list[str]]:
    """Returns the lists of tied parameters that contain no table. `dispatch_model` calls this function, which replaces
    a function of accelerate."""
    named = model.named_parameters(remove_duplicate=False)
    tables = {name for name, parameter in named if isinstance(parameter, TableParameter)}
    return [names for names in _find_tied_parameters(model, **options) if tables.isdisjoint(names)]


hooks.named_module_tensors = _plain_tensors
big_modeling.find_tied_parameters = _plain_ties
