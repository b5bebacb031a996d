"""Implements some functions of torch for tables. If an argument of a function is a table, torch calls the table's
method `__torch_function__`, which calls `call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .._fetch.bags import embedding_bag
from .._fetch.gather import index_select
from .._fetch.linear import differentiable
from .._fetch.streaming import decompress
from .._rows.table import Table


def call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a function of torch and returns its result. At least one argument must be a table. Raises TypeError if the
    function does not support tables."""
    handler = _HANDLERS.get(function)
    # PyTorch Geometric replaces torch.index_select, so this attribute is looked up at each call.
    if function is torch.index_select:
        handler = _index_select
    if handler is None:
        known = ", ".join(sorted({name for name, _ in _NAMED}))
        raise TypeError(
            f"{getattr(function, '__name__', function)} does not take an ibp.CompressedTensor (only {known} do): "
            "call table.decompress() and give it the tensor"
        )
    return handler(*args, **kwargs)


def _check_table(table: Any, name: str) -> None:
    if not isinstance(table, Table):
        raise TypeError(
            f"{name} is a {type(table).__name__}; of this function's arguments, a table can only be the one that holds "
            "rows"
        )


def _index_select(input: Table, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Implements torch.index_select. For dimension 0, only the selected rows are decoded. For any other dimension, the
    whole table is decoded on the device of the index."""
    _check_table(input, "input")
    if dim in (0, -len(input.shape)):
        return index_select(input, index, out=out)
    return torch.index_select(decompress(input, device=index.device), dim, index, out=out)


def embedding_of(
    input: torch.Tensor,
    weight: Table,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Implements F.embedding. Returns the rows of the table whose ids are in input, on the device of input.
    padding_idx, scale_grad_by_freq and sparse are ignored, because they concern only the gradient of the weight, and a
    table has none."""
    _check_table(weight, "weight")
    _refuse_max_norm(max_norm)
    if len(weight.shape) != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}; wanted two dimensions")
    return index_select(weight, input.reshape(-1)).reshape(*input.shape, weight.shape[1])


def embedding_bag_of(
    input: torch.Tensor,
    weight: Any,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Implements F.embedding_bag with `ibp.embedding_bag`. The result is on the device of input. scale_grad_by_freq and
    sparse are ignored."""
    _check_table(weight, "weight")
    _refuse_max_norm(max_norm)
    return embedding_bag(
        weight,
        input,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        padding_idx=padding_idx,
        include_last_offset=include_last_offset,
    )


def _refuse_max_norm(max_norm: float | None) -> None:
    if max_norm is not None:
        raise ValueError(f"max_norm is {max_norm}, but it would change the rows of the table, which are fixed")


def _torch_embedding(
    weight: Table, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> torch.Tensor:
    return embedding_of(indices, weight)


def linear_of(input: torch.Tensor, weight: Table, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Implements F.linear. Decodes the whole table on the device of input for the duration of the call. If input
    requires grad, the backward pass decodes the table again."""
    _check_table(weight, "weight")
    return differentiable(_decoded_linear, input, weight, bias)


def _decoded_linear(input: torch.Tensor, weight: Table, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(input, decompress(weight, device=input.device), bias)


_NAMED: tuple[tuple[str, tuple[tuple[Callable, Callable], ...]], ...] = (
    (
        "torch.index_select",
        ((torch._C._VariableFunctions.index_select, _index_select), (torch.Tensor.index_select, _index_select)),
    ),
    ("F.embedding", ((F.embedding, embedding_of), (torch.embedding, _torch_embedding))),
    ("F.embedding_bag", ((F.embedding_bag, embedding_bag_of),)),
    ("F.linear", ((F.linear, linear_of),)),
)
_HANDLERS: dict[Callable, Callable] = {function: handler for _, pairs in _NAMED for function, handler in pairs}
