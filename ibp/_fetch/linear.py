"""Products with compressed matrices: `linear`, and `linear_groups` for stacks of matrices.

Gradients of products with a table's matrix. The backward pass decodes the matrix again, so autograd does not have to
keep the decoded matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import torch
import torch.nn.functional as F

from .. import _core
from .._rows.protocols import Decodable
from .._rows.table import Table, handle_on
from .calls import check_out, check_table, refusal, worker_of
from .escapes import COLUMN_UNIT, Escapes, coded_row_bytes, escapes_of, matrix_of
from .streaming import decode_items, decompress

# Largest number of vectors that the kernel multiplies. With more vectors, it is faster to decode the weights first
# (benchmarks/linear.py).
MOST_VECTORS = 24
# On GPUs of compute capability 9.0 the limit is min(MOST_90, max(LEAST_90, N / 16)) for a matrix of N rows. MOST_90 is
# IBP_MOST_VECTORS.
LEAST_90, MOST_90 = 128, 512
MOST_MATRICES = 4  # Largest number of matrices in one launch (IBP_MOST_MATRICES).
MOST_OF_A_GROUP = 8  # Largest number of vectors in a group, for stacks of matrices (IBP_MOST_OF_A_GROUP).
# Largest numbers of vectors (IBP_MOST_GROUPED) and of matrices of a stack (IBP_MOST_STACKED) for `group_vectors`.
MOST_GROUPED, MOST_STACKED = 1024, 4096
_multiply = torch.ops.ibp.linear.default
_ROWS_OF_STACKS = 16  # The kernel supports stacks whose matrices have a multiple of this number of rows.
# Slots of rows with at least _LONG_COLUMNS columns have _SYMBOL_BYTES bytes for the row's escapes, so that decoding the
# row does not read overflow. Most shorter rows have no escape.
_SYMBOL_BYTES, _LONG_COLUMNS = 32, 1024


@overload
def linear(
    x: torch.Tensor,
    table: Table | Decodable,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor: ...
@overload
def linear(
    x: torch.Tensor,
    table: Sequence[Table | Decodable],
    bias: Sequence[torch.Tensor | None] | None = None,
    *,
    out: Sequence[torch.Tensor | None] | None = None,
    check: bool = False,
) -> list[torch.Tensor]: ...
def linear(
    x: torch.Tensor,
    table: Any,
    bias: Any = None,
    *,
    out: Any = None,
    check: bool = False,
) -> torch.Tensor | list[torch.Tensor]:
    """Returns x W^T + bias, as torch.nn.functional.linear(x, W, bias) does. W is the tensor that was compressed.

    On a GPU, a kernel reads only the coded bytes of W, decodes them in registers and multiplies up to 24 vectors of
    BF16. On GPUs of compute capability 9.0 it multiplies up to min(512, max(128, N / 16)) vectors. The kernel runs if W
    is in the memory of that GPU, N is at least 16, and the table has the form that `ibp.nn.Linear.from_linear` makes:
    level "fast", K a multiple of 32, and slot_bytes at least 1.5 K. In all other cases, such as FP16 and FP32, torch's
    function multiplies by W, which is decoded on the device of x for the duration of the call.

    The kernel adds products in float. For up to 64 vectors (32 if K is above 14,336), the order of the additions
    depends only on K, so a vector's result has the same bits regardless of the number of vectors. The results of rows
    that torch multiplies (see below) are an exception. The bits differ from those of torch's function, whose bits also
    differ between shapes and between GPUs.

    With several tables, such as the query, key and value matrices of a model, one launch of the kernel multiplies by up
    to 4 of them, if no gradients are wanted. Together, short matrices then take as long as one matrix that has all
    their rows.

    Gradients reach x and bias, also under autocast. The decoded W is not kept for backward. Instead, backward decodes W
    again for the duration of its product, so rows of the table must not change before that. There are two exceptions:
    if transforms of torch.func are active, or if `table` is not a table, autograd keeps the decoded W until backward.

    The kernel needs a list of the few escaped weights, which the table's digits do not represent. Modules of `ibp.nn`
    make this list when they are given a table; call `table.prepare_linear()` to make it for a table of your own. With
    the list, calls do not synchronise, and they allocate only their result and, for more than 64 vectors (32 if K is
    above 14,336), a workspace. They can be captured in a CUDA graph, or compiled with fullgraph=True and
    mode="reduce-overhead", from the first call on. Without the list, the first call makes it. If a graph is captured,
    or code is compiled, before the list is made, the graph or the code decodes W in every call, and a warning says so
    once. The table's `nbytes` includes the list. If the table changes, the list is made again. Then compile the code
    and capture the graphs again, too.

    Some rows are kept decoded next to the list, and torch multiplies by them: rows that are stored raw, default rows,
    and rows with more than max(64, K / 128) escaped weights. If more than one row in 32 is such a row, all of W is
    decoded in every call.

    Example:
        >>> x, weight = torch.randn(2, 1024).bfloat16(), torch.randn(512, 1024).bfloat16()
        >>> y = ibp.linear(x, ibp.compress(weight, level="fast"))
        >>> torch.equal(y, torch.nn.functional.linear(x, weight))
        True
        >>> query, key = ibp.linear(x, [ibp.compress(part, level="fast") for part in weight.split([384, 128])])
        >>> query.shape, key.shape
        (torch.Size([2, 384]), torch.Size([2, 128]))

    Args:
        x: tensor [..., K], or a nested one.
        table: a table of a matrix [N, K] of x's dtype; or another object with a method `decompress`, such as an
            `ibp.RowCache`; or several of these, as a list or a tuple.
        bias: tensor [N] of x's dtype, on the device of x. None: no bias. For several tables: a list with a tensor or
            None for each table; or None.
        out: tensor [..., N] of the table's dtype, on the device of x, to write to. For several tables: a list with a
            tensor or None for each table.
        check: whether to wait for the result and raise faults in this call, as in `index_select`.

    Returns:
        Tensor [..., N] on the device of x; out if it was given. For several tables: a list of tensors, one for each
        table.

    Raises:
        TypeError: x or bias is not a tensor, table is not a table, or out has another dtype.
        ValueError: a shape is wrong; x is on the meta device; out is on another device than x, or is given for a nested
            x; or the number of biases or outs is not the number of tables.
        RuntimeError: dtypes differ, or bias is on another device than x (raised by torch's function); or, in backward,
            rows of the table have changed since the call.
        CorruptTableError: the table's bytes are inconsistent. If W is decoded for the call, faults on a GPU are raised
            as in `index_select`.
    """
    if isinstance(table, (list, tuple)):
        biases, outs = _one_for_each("biases", bias, table), _one_for_each("outs", out, table)
        for arguments in zip(table, biases, outs):
            _check_arguments(x, *arguments)
        results: list[torch.Tensor] = []
        for first in range(0, len(table), MOST_MATRICES):
            some = slice(first, first + MOST_MATRICES)
            together = _products(x, table[some], biases[some])
            results += together or [linear(x, *pair) for pair in zip(table[some], biases[some])]
        if check and x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        return [result if to is None else to.copy_(result) for result, to in zip(results, outs)]
    _check_arguments(x, table, bias, out)
    if x.is_nested:  # A nested tensor has no shape, which the kernel would need.
        return F.linear(x, decompress(table, device=x.device, check=check), bias)
    if not wants_gradients(x, bias):
        return _product(x, table, bias, out, check)
    result = differentiable(partial(_product, check=check), x, table, bias)
    return result if out is None else out.copy_(result)


def _one_for_each(name: str, given: Sequence[torch.Tensor | None] | None, tables: Sequence) -> list:
    if given is None:
        return [None] * len(tables)
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} is a {type(given).__name__}; wanted a list with a tensor or None for each table")
    if len(given) != len(tables):
        raise ValueError(f"there are {len(given)} {name} for {len(tables)} tables; wanted one for each")
    return list(given)


def slot_bytes_for(columns: int, dtype: torch.dtype = torch.bfloat16) -> int | None:
    """Returns the `slot_bytes` that a table needs so that the kernel can multiply by its rows. Slots of long rows have
    32 bytes for escapes. Returns None if the kernel does not support rows of this length and dtype. columns: the number
    of elements of a row."""
    if dtype != torch.bfloat16 or columns == 0 or columns % COLUMN_UNIT or 2 * columns > _core.MAX_ROW_BYTES:
        return None
    least = coded_row_bytes(columns) + (_SYMBOL_BYTES if columns >= _LONG_COLUMNS else 0)
    return min(2 * columns, -(-least // 32) * 32)


def _product(
    x: torch.Tensor,
    table: Any,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Computes `linear` for one table. If the kernel multiplies, the result has no gradient."""
    if torch.is_autocast_enabled(x.device.type):
        x, bias = _as_autocast(x), None if bias is None else _as_autocast(bias)
    escapes = None
    if _are_near(x, table, bias) and _are_few(x, table.shape[0]):
        escapes = escapes_of(table)
    if escapes is None:
        result = F.linear(x, matrix_of(table, x.device, check), bias)
        return result if out is None else out.copy_(result)
    biases = [] if bias is None else [bias.detach().contiguous()]
    try:
        if out is None or not out.is_contiguous():
            result = _multiply(x.detach(), escapes[:4], [table.slot_bytes], biases)
        else:
            result = out
            torch.ops.ibp.linear.out(x.detach(), escapes[:4], [table.slot_bytes], biases, out=out)
    except RuntimeError as error:
        raise refusal(error) from None
    if escapes.rows.shape[0]:
        _multiply_irregular(x, escapes, bias, result)
    if check:
        torch.cuda.current_stream(x.device).synchronize()
    return result if out is None or out is result else out.copy_(result)


def _products(
    x: torch.Tensor, tables: Sequence[Any], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor] | None:
    """Computes `linear` for several tables in one launch. Returns the results. Returns None, and computes nothing, if
    gradients are wanted, if there is only one table, or if the kernel cannot multiply by all tables together."""
    if len(tables) == 1 or x.is_nested or any(wants_gradients(x, bias) for bias in biases):
        return None
    x, biases = _as_autocast(x), [None if bias is None else _as_autocast(bias) for bias in biases]
    if not all(_are_near(x, table, bias) for table, bias in zip(tables, biases)):
        return None
    if not _are_few(x, sum(table.shape[0] for table in tables)):
        return None
    found = [escapes_of(table) for table in tables]
    escapes = [of_table for of_table in found if of_table is not None]
    if len(escapes) != len(tables):
        return None
    added = []
    if any(bias is not None for bias in biases):
        added = [x.new_empty(0) if bias is None else bias.detach().contiguous() for bias in biases]
    parts = [part for of_table in escapes for part in of_table[:4]]
    together = _multiply(x.detach(), parts, [table.slot_bytes for table in tables], added)
    num_vectors = x.numel() // x.shape[-1]
    each = together.split([num_vectors * table.shape[0] for table in tables])
    results = [part.view(*x.shape[:-1], table.shape[0]) for part, table in zip(each, tables)]
    for result, of_table, bias in zip(results, escapes, biases):
        if of_table.rows.shape[0]:
            _multiply_irregular(x, of_table, bias, result)
    return results


def _multiply_irregular(x: torch.Tensor, escapes: Escapes, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    """Multiplies x by the irregular rows of a table with torch's function, and writes the products to the columns of
    the result that belong to these rows."""
    vectors = x.detach().reshape(-1, x.shape[-1])
    irregular = F.linear(vectors, escapes.weights, None if bias is None else bias[escapes.rows])
    result.view(len(vectors), -1).index_copy_(1, escapes.rows, irregular)


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Returns x in the dtype to which autocast would convert it for a product. Returns x itself if autocast is not
    active."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


def _check_arguments(x: torch.Tensor, table: Any, bias: torch.Tensor | None, out: torch.Tensor | None) -> None:
    if isinstance(table, torch.Tensor) or not isinstance(table, (Table, Decodable)):
        check_table(table)
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
    if out is None:
        return
    if x.is_nested:
        raise ValueError("x is a nested tensor; wanted no out")
    check_out(out, (*x.shape[:-1], table.shape[0]), table.dtype)
    if out.device != x.device:
        raise ValueError(f"out is on {out.device}; wanted x's device, {x.device}")


# ---- products by the kernel ----


def _are_near(x: torch.Tensor, table: Any, bias: torch.Tensor | None = None) -> bool:
    """Returns whether x, table and bias are on one GPU and have the dtypes and layouts that the kernel supports.
    Whether the kernel supports the table's rows is not checked here, but by `escapes_of`."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not isinstance(table, Table) or table.dtype != x.dtype:
        return False
    if table.slots.device != x.device or x.layout != torch.strided or x.numel() == 0 or is_transformed():
        return False
    return bias is None or (bias.dtype, bias.device, bias.layout) == (x.dtype, x.device, torch.strided)


def _are_few(x: torch.Tensor, num_rows: int) -> bool:
    """Returns whether x has so few vectors that the kernel multiplies them faster than torch does after decoding the
    weights. num_rows: the number of rows of the matrix, or of all matrices together."""
    num_vectors = x.numel() // x.shape[-1]
    return num_vectors <= MOST_VECTORS or num_vectors <= most_vectors(x.device, num_rows)


def most_vectors(device: torch.device, num_rows: int) -> int:
    """Returns the largest number of vectors for which a GPU multiplies faster by coded weights than by weights that it
    has to decode first. num_rows: the number of rows of the matrix, or of all matrices together."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return MOST_VECTORS
    return min(MOST_90, max(LEAST_90, num_rows // 16))


# ---- products with stacks of matrices ----


def linear_groups(
    x: torch.Tensor,
    table: Table,
    groups: torch.Tensor,
    rows: int,
    *,
    order: torch.Tensor | None = None,
    sharing: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies each group of vectors by one matrix of a stack, as `torch.nn.functional.linear` does. Returns the
    products.

    On a GPU, a kernel multiplies if `escapes_for_groups` returns escapes. The kernel reads only the coded bytes of a
    matrix, once for each of the matrix's groups, and the call does not synchronise. Otherwise the matrices are decoded
    one after the other; if `groups` is on a GPU, the call then waits for its values.

    Example:
        >>> x, stack = torch.randn(3, 64).bfloat16(), torch.randn(4, 32, 64).bfloat16()
        >>> order, groups = group_vectors(torch.tensor([3, 1, 1]), num_matrices=4)
        >>> y = linear_groups(x, ibp.compress(stack.view(128, 64), level="fast"), groups, rows=32, order=order)
        >>> torch.equal(y[0], torch.nn.functional.linear(x[:1], stack[3])[0])
        True

    Args:
        x: tensor [V / sharing, K], the vectors.
        table: a table of the stacked matrices [E * rows, K], of x's dtype.
        groups: int32 [G, 3] on the device of x. A group is (index of its matrix, position of its first vector, number
            of its vectors). It has at most 8 vectors. The first group without vectors ends the list. A vector must not
            be in two groups.
        rows: the number of rows of each matrix.
        order: int64 [V] on the device of x, as returned by `group_vectors`: position v in the groups stands for vector
            order[v]. None: position v stands for vector v.
        sharing: each row of x stands for this number of consecutive vectors. It must be 1 if order is None.
        out: tensor [V, rows] of the table's dtype, contiguous and on the device of x, to write to.

    Returns:
        Tensor [V, rows], without gradients; out if it was given. For vectors that are not in a group, out keeps its
        values; if out was not given, their results are undefined.

    Raises:
        TypeError: an argument has a wrong type, groups is not int32, order is not int64, or out has another dtype.
        ValueError: shapes do not match; groups, order or out is on another device than x; or out is not contiguous.
        IndexError: a group, or a number in order, is out of range. The kernel does not raise this error: it ends the
            list of groups at such a group, and the results for such a number are undefined.
        CorruptTableError: as for `linear`.
    """
    check_table(table)
    _check_arguments(x, table, None, None)
    if not isinstance(groups, torch.Tensor) or groups.dtype != torch.int32:
        raise TypeError(f"groups is {getattr(groups, 'dtype', type(groups).__name__)}; wanted a tensor of torch.int32")
    if x.dim() != 2 or groups.dim() != 2 or groups.shape[1] != 3:
        raise ValueError(f"x has shape {list(x.shape)} and groups {list(groups.shape)}; wanted [V, K] and [G, 3]")
    if groups.device != x.device:
        raise ValueError(f"groups is on {groups.device}; wanted x's device, {x.device}")
    if rows < 1 or table.shape[0] % rows:
        raise ValueError(f"a matrix has {rows} rows; wanted a divisor of the table's {table.shape[0]}")
    num_vectors = len(x) * sharing
    _check_order(order, sharing, num_vectors, x.device)
    if out is not None:
        check_out(out, (num_vectors, rows), table.dtype)
        if out.device != x.device or not out.is_contiguous():
            raise ValueError(f"out is on {out.device}, with strides {out.stride()}; wanted {x.device}, contiguous")
    x, escapes = x.detach(), escapes_for_groups(x, [table], [rows])
    y = x.new_empty(num_vectors, rows) if out is None else out
    if escapes is None:
        places = torch.arange(num_vectors, device=x.device) if order is None else order
        _multiply_one_by_one(x, table, groups, rows, y, places, sharing)
        return y
    return multiply_groups(x, table, escapes[0], groups.contiguous(), order, sharing, y) if len(groups) else y


def multiply_groups(
    x: torch.Tensor,
    table: Table,
    escapes: Escapes,
    groups: torch.Tensor,
    order: torch.Tensor | None,
    sharing: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Computes `linear_groups` with the kernel, without checking the arguments, and writes the result to out.

    Args:
        escapes: the table's entry in the result of `escapes_for_groups`.
        groups: as in `linear_groups`, contiguous, with at least one group.
    """
    torch.ops.ibp.linear_groups.default(
        escapes.slots,
        table.slot_bytes,
        escapes.below,
        escapes.starts,
        escapes.entries,
        x.contiguous(),
        groups,
        order,
        sharing,
        out.shape[1],
        out,
    )
    return out


def _check_order(order: Any, sharing: int, num_vectors: int, device: torch.device) -> None:
    if order is None:
        if sharing != 1:
            raise ValueError(f"{sharing} vectors share a row of x; wanted an order, too")
        return
    if not isinstance(order, torch.Tensor) or order.dtype != torch.int64:
        raise TypeError(f"order is {getattr(order, 'dtype', type(order).__name__)}; wanted a tensor of torch.int64")
    if order.shape != (num_vectors,) or order.device != device or not order.is_contiguous():
        raise ValueError(
            f"order has shape {list(order.shape)}, strides {order.stride()} and is on {order.device}; wanted "
            f"[{num_vectors}], contiguous, on {device}"
        )


def escapes_for_groups(x: torch.Tensor, tables: Sequence[Table], rows: Sequence[int]) -> list[Escapes] | None:
    """Returns the escapes of each of several stacks of matrices, for products of vectors such as x. Returns None if the
    kernel cannot multiply by one of the stacks, for example because it has irregular rows.

    Args:
        tables: the stacks.
        rows: for each stack, the number of rows of each of its matrices.
    """
    if any(number % _ROWS_OF_STACKS for number in rows) or not all(_are_near(x, table) for table in tables):
        return None
    found = [escapes_of(table) for table in tables]
    escapes = [of_table for of_table in found if of_table is not None and not of_table.rows.numel()]
    return escapes if len(escapes) == len(found) else None


def _multiply_one_by_one(
    x: torch.Tensor,
    table: Table,
    groups: torch.Tensor,
    rows: int,
    y: torch.Tensor,
    places: torch.Tensor,
    sharing: int,
) -> None:
    num_matrices = table.shape[0] // rows
    for number, first, count in groups.tolist():
        if count == 0:
            return
        if not (0 <= number < num_matrices and 0 <= first <= first + count <= len(y) and count <= MOST_OF_A_GROUP):
            of_all = f"{num_matrices} matrices and {len(y)} vectors"
            raise IndexError(f"a group is {[number, first, count]}; wanted one of {of_all}")
        matrix = decode_items(table, number * rows, (number + 1) * rows, x.device)
        own = places[first : first + count]
        y[own] = F.linear(x[own // sharing], matrix)


def group_vectors(matrices: torch.Tensor, num_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides vectors into groups for `linear_groups`: the vectors of a group have the same matrix. On a GPU one short
    kernel does this, and the call does not synchronise.

    Example:
        >>> group_vectors(torch.tensor([3, 1, 7, 1]), num_matrices=5)
        (tensor([1, 3, 0, 2]), tensor([[1, 0, 2],
                [3, 2, 1],
                [0, 0, 0],
                [0, 0, 0]], dtype=torch.int32))

    Args:
        matrices: int32 or int64 [V], the index of each vector's matrix. V is at most `MOST_GROUPED`. Vectors whose
            matrix is out of range come last in the order and are not in any group.
        num_matrices: the number of matrices E, at most `MOST_STACKED`.

    Returns:
        (order, groups). order is int64 [V]: the indices of the vectors, sorted by their matrices. groups is int32
        [min(V, E) + V // 8, 3]: the groups of the vectors in that order, then groups without vectors.

    Raises:
        RuntimeError: matrices has another dtype, or there are too many vectors or matrices.
    """
    return torch.ops.ibp.group_vectors.default(matrices.contiguous(), num_matrices)


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
