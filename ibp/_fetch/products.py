"""Gradients of products with a table's matrix. The backward pass decodes the matrix again, so autograd does not have to
keep the decoded matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._rows.table import Table, handle_on
from .calls import worker_of
from .escapes import matrix_of

Product = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def differentiable(
    product: Product, x: torch.Tensor, table: Table | Any, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns product(x, table, bias), with gradients of x and bias. The product is x [..., K] times the transpose of
    the table's matrix [N, K], plus bias [N].

    Autograd keeps the decoded matrix until backward in two cases: if `table` is not a `Table`, because backward could
    not find out whether its rows have changed; and inside transforms of torch.func, which do not support an
    autograd.Function of this kind.
    """
    if not wants_gradients(x, bias) or not isinstance(table, Table) or is_transformed():
        return product(x, table, bias)
    return _Product.apply(x, bias, table, product)


def wants_gradients(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def is_transformed() -> bool:
    """Returns whether forward-mode gradients are being computed or transforms of torch.func are active. The kernels
    support neither."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, table: Table, product: Product) -> torch.Tensor:
        ctx.table, ctx.version, ctx.dtype = table, table.version, x.dtype
        return product(x, table, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.table.version != ctx.version:
            raise RuntimeError(
                f"rows of the table have changed {ctx.table.version - ctx.version} times between forward and backward: "
                "the gradient would be of other weights"
            )
        rows = torch.atleast_2d(grad).flatten(0, -2)
        x_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _times(rows, ctx.table).view(*grad.shape[:-1], ctx.table.shape[1]).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            bias_grad = rows.sum(0)
        return x_grad, bias_grad, None, None


def _times(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Returns x [M, N] times the matrix [N, K] of a table."""
    if not torch.compiler.is_compiling():
        return x @ matrix_of(table, x.device).to(x.dtype)
    # One operation both decodes and multiplies. If an operation only decoded, a compiler would move it to the forward
    # pass and keep the decoded matrix until backward.
    worker = worker_of(table, x.device)
    return torch.ops.ibp.times_matrix.default(handle_on(table, worker).table, x, table.shape[1], table.dtype, worker)
