"""Modules over compressed tables: frozen weights that move, are saved and are loaded with their module.

    embedding = ibp.nn.Embedding(ibp.compress(weight))
    linear    = ibp.nn.Linear(ibp.compress(weight, layout="packed"), bias)

A table is no torch.Tensor (docs/tensor_subclass.md says why), so that a module cannot hold it as a parameter or buffer.
These hold it as `weight`: `module.to()`, `cuda()`, `state_dict()`, `load_state_dict()`, `copy.deepcopy`, pickling and
torch.compile work as for other modules. `parameters()` and `buffers()` do not list it: optimizers, DDP and FSDP leave
it alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ._compressed_tensor import CompressedTensor
from ._torch_functions import embedding_of, linear_of

__all__ = ["Embedding", "Linear"]


class _TableModule(torch.nn.Module):
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

    def _apply(self, fn: Callable, recurse: bool = True) -> _TableModule:
        super()._apply(fn, recurse)
        if not self.stays:
            self.weight = fn(self.weight)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

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
        if not isinstance(table, CompressedTensor):
            error_msgs.append(
                f"{key} is a {type(table).__name__}; wanted an ibp.CompressedTensor: ibp.compress makes one of a tensor"
            )
        elif (table.shape, table.dtype) != (held.shape, held.dtype):
            error_msgs.append(
                f"{key} has shape {list(table.shape)} and dtype {table.dtype}; wanted {list(held.shape)} and "
                f"{held.dtype}"
            )
        elif local_metadata.get("assign_to_params_buffers", False):
            self.weight = table
        else:
            moved = table.to(held.device)
            self.weight = copy.copy(moved).pin_memory() if held.is_pinned() else moved

    def extra_repr(self) -> str:
        return f"{self.weight!r}{', stays=True' if self.stays else ''}"


class Embedding(_TableModule):
    """`torch.nn.Embedding` with fixed weights, whose rows are decoded when they are looked up.

    Results are on the device of the ids, wherever the table is: a table in pinned host memory serves GPUs with rows
    that they fetch themselves.

    Args:
        table: [num_embeddings, embedding_dim].
        stays: the table stays where it is, and as it is, when the module is moved or converted.

    Raises:
        TypeError: table is no `ibp.CompressedTensor`.
        ValueError: table has not two dimensions.
    """

    def __init__(self, table: CompressedTensor, *, stays: bool = False) -> None:
        super().__init__(table, stays)
        self.num_embeddings, self.embedding_dim = table.shape

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows at ids, int32 or int64 of any shape [...]: [..., embedding_dim]."""
        return embedding_of(ids, self.weight)


class Linear(_TableModule):
    """`torch.nn.Linear` with fixed weights, which are decoded on the input's device for the time of a call.

    Where the input requires grad, autograd keeps the decoded weights until backward.

    Args:
        table: [out_features, in_features].
        bias: [out_features], an ordinary parameter; None: none.
        stays: as in `Embedding`.

    Raises:
        TypeError: table is no `ibp.CompressedTensor`.
        ValueError: table has not two dimensions, or bias another length.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, table: CompressedTensor, bias: torch.Tensor | None = None, *, stays: bool = False) -> None:
        super().__init__(table, stays)
        self.out_features, self.in_features = table.shape
        if bias is not None and bias.shape != table.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}; wanted [{self.out_features}]")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] times the weights: [..., out_features]."""
        return linear_of(x, self.weight, self.bias)
