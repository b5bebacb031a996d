"""Products with a compressed matrix: `linear`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .. import _core
from .._rows.protocols import Decodable
from .._rows.table import Table
from .calls import check_out, check_table
from .escapes import COLUMNS, Escapes, escapes_of
from .products import differentiable, is_transformed, wants_gradients
from .streaming import decompress

MOST_VECTORS = 24  # more are multiplied faster with weights that are decoded before (benchmarks/linear.py)
# The same on GPUs of compute capability 9.0: a vector for each 16 rows, but not fewer or more than these.
LEAST_90, MOST_90 = 128, 512  # IBP_MOST_VECTORS
# A slot has 32 bytes for a row's escapes, so that decoding the row reads no overflow, if the row has at least 1,024
# columns; most shorter rows have no escape.
_SYMBOL_BYTES, _LONG_COLUMNS = 32, 1024


def linear(
    x: torch.Tensor,
    table: Table | Decodable,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor:
    """x W^T + bias, W being the tensor that was compressed: torch.nn.functional.linear(x, W, bias).

    On a GPU, a kernel that decodes W in registers, reading only its coded bytes, multiplies up to 24 vectors, and on
    GPUs of compute capability 9.0 up to one for each 16 rows, at least 128 and at most 512. It runs where W is BF16 at
    level "fast" in that GPU's memory, N is at least 16, K a multiple of 32, and slot_bytes at least 1.5 K;
    `ibp.nn.Linear.from_linear` makes such tables. The kernel adds products in float, for up to 64 vectors in an order
    that depends on K alone: a vector's result has then the same bits however many vectors there are, but for rows that
    torch multiplies (below). They differ from the bits of torch's function, which differ by shape and GPU, too.
    In all other cases torch's function multiplies by W, decoded on x's device for the time of the call.

    Gradients reach x and bias, under autocast too. Nothing is kept for them: backward decodes W again, for the time of
    its product, and rows of the table must not change before. Where transforms of torch.func are in force, or the
    source is no table, autograd keeps W until backward.

    The kernel needs a list of the few escaped weights, which the table's digits do not give. Modules of `ibp.nn` list
    them when they take a table, and `table.prepare_linear()` does so for a table of your own. Calls do not synchronise
    then, allocate their result and at most a workspace for more than 64 vectors, and from the first one on can be
    captured in a CUDA graph, or compiled with fullgraph=True and mode="reduce-overhead". Otherwise the first call lists
    them; graphs that are captured before it, and code that is compiled before it, decode W every time, and a warning
    says so once. The list counts in the table's `nbytes`, and is made anew after the table has changed: compile and
    capture again then. Rows that are stored raw, or have more than 64 escaped weights and more than one in 128,
    are kept decoded beside the list, and torch multiplies by them; where more than one row in 32 is such a row, all of
    W is decoded for every call.

    Example:
        >>> x, weight = torch.randn(2, 1024).bfloat16(), torch.randn(512, 1024).bfloat16()
        >>> y = ibp.linear(x, ibp.compress(weight, level="fast"))
        >>> torch.equal(y, torch.nn.functional.linear(x, weight))
        True

    Args:
        x: tensor [..., K], or a nested one.
        table: of a matrix [N, K], of x's dtype; or anything else that decodes itself, such as an `ibp.RowCache`.
        bias: [N], of x's dtype and on its device.
        out: tensor [..., N] of the table's dtype, on x's device, to write to.
        check: wait for the result and raise here what went wrong, as in `index_select`.

    Returns:
        Tensor [..., N] on x's device; out if it was given.

    Raises:
        TypeError: x or bias is no tensor, table is no table, or out has another dtype.
        ValueError: a shape does not fit; x is on the meta device, or out on another than x; x is nested, and out given.
        RuntimeError: by torch's function, as for plain weights: dtypes differ, or bias is on another device than x.
        CorruptTableError: the table's bytes contradict each other; where W is decoded for the call, a GPU reports it as
            `index_select` does.
        RuntimeError: in backward, rows of the table have changed since the call.
    """
    if isinstance(table, torch.Tensor) or not isinstance(table, (Table, Decodable)):
        check_table(table)
    _check_arguments(x, table, bias)
    if x.is_nested:  # has no shape
        if out is not None:
            raise ValueError("x is a nested tensor; wanted no out")
        return F.linear(x, decompress(table, device=x.device, check=check), bias)
    shape = (*x.shape[:-1], table.shape[0])
    if out is not None:
        check_out(out, shape, table.dtype)
        if out.device != x.device:
            raise ValueError(f"out is on {out.device}; wanted x's device, {x.device}")
    if not wants_gradients(x, bias):
        return _product(x, table, bias, out, check)
    result = differentiable(partial(_product, check=check), x, table, bias)
    return result if out is None else out.copy_(result)


def slot_bytes_for(columns: int) -> int | None:
    """`slot_bytes` of a BF16 table at level "fast" whose rows have `columns` columns; long ones have room for 32
    escapes. None: the kernel takes no such rows."""
    if columns == 0 or columns % COLUMNS or 2 * columns > _core.MAX_ROW_BYTES:
        return None
    least = columns // 2 * 3 + (_SYMBOL_BYTES if columns >= _LONG_COLUMNS else 0)
    return min(2 * columns, -(-least // 32) * 32)


def _product(
    x: torch.Tensor,
    table: Any,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor:
    """What `linear` gives, without gradients where the kernel multiplies."""
    x, bias = _as_autocast(x), None if bias is None else _as_autocast(bias)
    escapes = escapes_of(table) if isinstance(table, Table) and _may_fuse(x, table, bias) else None
    if escapes is None:
        result = F.linear(x, decompress(table, device=x.device, check=check), bias)
        return result if out is None else out.copy_(result)
    result = _multiply(x, table, escapes, bias, (*x.shape[:-1], table.shape[0]), out)
    if check:
        torch.cuda.current_stream(x.device).synchronize()
    return result


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """What torch's products take in place of x where autocast is in force."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


def _check_arguments(x: torch.Tensor, table: Any, bias: torch.Tensor | None) -> None:
    for name, tensor in (("x", x), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "x"):
            raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor")
    if x.is_meta:
        raise ValueError("x is on the meta device; wanted the CPU or a CUDA device")
    if len(table.shape) != 2:
        raise ValueError(f"the table has shape {list(table.shape)}; wanted two dimensions")
    if not x.is_nested and (x.dim() == 0 or x.shape[-1] != table.shape[1]):
        raise ValueError(f"x has shape {list(x.shape)}; wanted [..., {table.shape[1]}]")
    if bias is not None and tuple(bias.shape) != (table.shape[0],):
        raise ValueError(f"bias has shape {list(bias.shape)}; wanted [{table.shape[0]}]")


# ---- by the kernel ----


def _may_fuse(x: torch.Tensor, table: Table, bias: torch.Tensor | None) -> bool:
    """Whether the kernel takes the vectors; whether it takes the table, `escapes_of` says."""
    if not x.is_cuda or table.device != x.device or x.numel() == 0:
        return False
    count = x.numel() // x.shape[-1]
    if count > MOST_VECTORS and count > most_vectors(x.device, table.shape[0]):
        return False
    if is_transformed():
        return False
    given = (x,) if bias is None else (x, bias)
    return all(
        tensor.dtype == torch.bfloat16 and tensor.device == x.device and tensor.layout == torch.strided
        for tensor in given
    )


def most_vectors(device: torch.device, num_rows: int) -> int:
    """How many vectors a GPU multiplies with coded weights faster than with weights that are decoded before."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return MOST_VECTORS
    return min(MOST_90, max(LEAST_90, num_rows // 16))


def _multiply(
    x: torch.Tensor,
    table: Table,
    escapes: Escapes,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
) -> torch.Tensor:
    vectors = x.detach().reshape(-1, x.shape[-1]).contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    result = out if out is not None and out.is_contiguous() else x.new_empty(shape)
    matrix = escapes.slots, table.slot_bytes, escapes.below.shape[0], escapes.starts, escapes.entries
    torch.ops.ibp.linear.default(*matrix, vectors, bias, result)
    if len(escapes.rows):
        irregular = F.linear(vectors, escapes.weights, None if bias is None else bias[escapes.rows])
        result.view(len(vectors), -1).index_copy_(1, escapes.rows, irregular)
    return result if out is None or out is result else out.copy_(result)
