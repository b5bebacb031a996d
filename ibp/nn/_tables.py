"""What modules over tables share, and `Linear`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from .._fetch.linear import linear, slot_bytes_for
from .._machine import memory
from .._schemes import PlanesCodebook
from .._tables.compressed_tensor import CompressedTensor
from .._tables.compression import compress_rows
from .._tables.torch_functions import linear_of

_HOW_IT_RUNS = {"device", "memory", "numa", "progress"}  # arguments of `compress` that leave the table's form alone


class TableModule(torch.nn.Module):
    """A module with one table [rows, columns], its `weight`."""

    weight: CompressedTensor

    def __init__(self, table: CompressedTensor, stays: bool) -> None:
        super().__init__()
        if not isinstance(table, CompressedTensor):
            raise TypeError(
                f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor: ibp.compress makes one of a tensor"
            )
        if table.dim() != 2:
            raise ValueError(f"table has shape {list(table.shape)}; wanted two dimensions")
        self.weight = table
        self.stays = stays

    def _apply(self, fn: Callable, recurse: bool = True) -> TableModule:
        super()._apply(fn, recurse)
        if not self.stays:
            moved = fn(self.weight)
            if moved is not self.weight:
                self._take(moved)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.current_table()

    def current_table(self) -> CompressedTensor:
        """The table, with all rows as they are now."""
        return self.weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key, held = prefix + "weight", self.weight
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        table = state_dict[key]
        if not isinstance(table, (CompressedTensor, torch.Tensor)):
            error_msgs.append(f"{key} is a {type(table).__name__}; wanted an ibp.CompressedTensor or a tensor")
        elif (table.shape, table.dtype) != (held.shape, held.dtype):
            error_msgs.append(
                f"{key} has shape {list(table.shape)} and dtype {table.dtype}; wanted {list(held.shape)} and "
                f"{held.dtype}"
            )
        elif isinstance(table, CompressedTensor) and local_metadata.get("assign_to_params_buffers", False):
            self._take(table)
        else:
            self._take(placed_like(held, table))

    def _take(self, table: CompressedTensor) -> None:
        """Takes a table, loaded or moved, in place of the one held."""
        self.weight = table

    def extra_repr(self) -> str:
        return f"{self.weight!r}{', stays=True' if self.stays else ''}"


def placed_like(held: CompressedTensor, weight: CompressedTensor | torch.Tensor) -> CompressedTensor:
    """A table of the weights where another one is, pinned if that is. A plain tensor is compressed in its layout and
    at its level; of a table, it shares the memory at most until one of the two changes."""
    if isinstance(weight, torch.Tensor):
        options: dict[str, Any] = {"layout": held.layout, "row_bytes": held.row_bytes}
        if isinstance(held.codebook, PlanesCodebook) and held.codebook.first_symbol is not None:
            options |= {"level": "fast", "slot_bytes": held.slot_bytes or None}
        table = compress_rows(weight.detach(), **options, memory=None if weight.is_cuda else "host").to(held.device)
    else:
        table = weight.to(held.device)
        table = copy.copy(table) if table is weight else table
    if held.is_pinned():
        memory.pin_if_possible(table)
    return table


def check_forward(name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Raises TypeError for a module that computes something else than a torch module of this kind does."""
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise TypeError(
            f"{name} is a {type(module).__name__} with a forward of its own, which a module over a table does not "
            f"have: wanted that of torch.nn.{kind.__name__}. Give ibp.compress(module.weight) to the constructor, and "
            "do in the model what else forward does"
        )


class Linear(TableModule):
    """`torch.nn.Linear` with fixed weights, which are decoded on the input's device for the time of a call.

    Where the input requires grad, autograd keeps the decoded weights until backward.

    Example:
        >>> dense = torch.nn.Linear(256, 128)
        >>> linear = ibp.nn.Linear.from_linear(dense, fused=False)
        >>> x = torch.randn(4, 256)
        >>> torch.equal(linear(x), dense(x))
        True

    Args:
        table: [out_features, in_features].
        bias: [out_features], an ordinary parameter; None: none.
        stays: as in `Embedding`.
        fused: whether few vectors are multiplied as `ibp.linear` does it, by weights that are decoded in registers: in
            other bits than torch has. Without it the bits are torch's.

    Raises:
        TypeError: table is no `ibp.CompressedTensor`.
        ValueError: table has not two dimensions, or bias another length.
    """

    __module__ = "ibp.nn"

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        table: CompressedTensor,
        bias: torch.Tensor | None = None,
        *,
        stays: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__(table, stays)
        self.fused = fused
        self.out_features, self.in_features = table.shape
        if bias is not None and bias.shape != table.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}; wanted [{self.out_features}]")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, *, fused: bool = True, **options: Any) -> Linear:
        """The module with compressed weights, on the device where they are, and with its own bias.

        Args:
            module: its weights are compressed at level "fast" unless options say otherwise.
            fused: as in the constructor. The bits are torch's where it is False.
            options: as `ibp.compress` takes them.

        Raises:
            TypeError: module is no torch.nn.Linear, or has another forward than torch.nn.Linear's.
            TypeError, ValueError: as `ibp.compress`.
        """
        if not isinstance(module, torch.nn.Linear):
            raise TypeError(f"module is a {type(module).__name__}; wanted a torch.nn.Linear")
        check_forward("module", module, torch.nn.Linear)
        if options.keys() <= _HOW_IT_RUNS:
            slot_bytes = slot_bytes_for(module.in_features) if module.weight.dtype == torch.bfloat16 else None
            options = {"level": "fast", "slot_bytes": slot_bytes, **options}
        return cls(compress_rows(module.weight.detach(), **options), module.bias, fused=fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] times the weights: [..., out_features]."""
        return (linear if self.fused else linear_of)(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', fused=True' if self.fused else ''}"


def dense_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`module.state_dict()` with plain tensors in place of tables, on the CPU: a checkpoint for torch's own modules.

    It takes the memory of all uncompressed weights. The tables of an `EmbeddingCollection` are named as torchrec's
    EmbeddingBagCollection names them, `embedding_bags.NAME.weight`.

    Example:
        >>> embedding = ibp.nn.Embedding(1000, 64, device="cpu")
        >>> weights = ibp.nn.dense_state_dict(embedding)
        >>> torch.nn.Embedding(1000, 64).load_state_dict(weights)
        <All keys matched successfully>
    """
    dense: dict[str, torch.Tensor] = {}
    split = {
        f"{name}." if name else "": found for name, found in module.named_modules() if hasattr(found, "dense_state")
    }
    for key, value in module.state_dict().items():
        if any(key.startswith(f"{prefix}groups.") for prefix in split):
            continue
        dense[key] = value.decompress(device="cpu") if isinstance(value, CompressedTensor) else value
    for prefix, found in split.items():
        dense.update(found.dense_state(prefix))
    return dense
