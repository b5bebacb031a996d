"""Multiplies by compressed matrices: `linear`, and `linear_groups` for stacks of matrices.

The kernels multiply by the coded rows of a matrix of level "fast". Such a row has a four-bit digit for the exponent of
each weight. A weight whose exponent the digits cannot represent is an escape. The first part of the file lists the
escapes of a matrix. The list is made once, so that the kernels do not have to look for escapes. They multiply by
regular rows, which have few escapes; torch multiplies by the other rows.

The next parts are `linear`, the conditions under which a kernel multiplies, `linear_groups`, and the gradients of
products. The backward pass decodes the matrix again, so autograd does not have to keep the decoded matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F

from .. import _core
from .._common.modes import outside_of_modes
from .._common.process import warn_once
from .._machine.memory import is_capturing
from .._rows.planes import PlanesCodebook
from .._rows.table import Table, handle_on, is_live, worker_of
from .calls import Decodable, check_out, check_table, refusal
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


# ---- escapes ----

# A regular row of K columns has at most max(64, K / 128) escapes. The kernel adds the products of that many escapes in
# about the time that it needs to decode the row.
MOST_OF_A_ROW, COLUMNS_AN_ESCAPE = 64, 128
_LEAST_ROWS = 16  # The kernel supports matrices of at least this many rows.
COLUMN_UNIT = 32  # The kernel supports rows whose number of columns is a multiple of this.
# An element of BF16 is coded as a residual, which is its sign and mantissa, and a digit of four bits for its exponent.
_RESIDUAL_BITS, _EXPONENT_BITS = 8, 8
_NUM_SYMBOLS = 15  # Digits 0 to 14 stand for exponents; digit 15 marks an escape.
LEAST_REGULAR = 31 / 32  # If a smaller fraction of the rows is regular, the whole matrix is decoded in every call.
# Number of elements that are searched for escapes at once. The search takes about seven bytes of memory per element.
_CHUNK_ELEMENTS = 1 << 24


class Escapes(NamedTuple):
    """What the product kernels read of a matrix: its slots, and the list of its escapes. `torch.ops.ibp.linear` takes
    the first four fields.

    Attributes:
        slots: the table's slots, as a torch.nn.Parameter, because torch.compile(mode="reduce-overhead") copies all
            other tensors to the memory of its graphs in every call.
        below: uint8 [2 + first_symbol], where first_symbol is the exponent that digit 0 stands for. Only the size
            matters. first_symbol is passed as a size because torch.compile treats numbers on modules as constants, and
            compiles again for each value. It does the same for sizes 0 and 1, hence the 2.
        starts: int32 [N + 1], the position of each row's first entry, followed by the number of entries.
        entries: int32 [escapes, 2], ordered by row and column. An entry consists of the column of the weight and a
            word. The low half of the word holds the bits of the weight. The high half holds the bits to which the
            weight's digit, 15, decodes.
        rows: int64 [rows], the indices of the irregular rows, by which torch multiplies. A row is irregular if it is
            stored raw, if it is a default row, or if it has more than max(`MOST_OF_A_ROW`, K // `COLUMNS_AN_ESCAPE`)
            escapes.
        weights: [rows, K] of the table's dtype, the weights of the irregular rows.
    """

    slots: torch.Tensor
    below: torch.Tensor
    starts: torch.Tensor
    entries: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self[1:])


def escapes_of(table: Table) -> Escapes | None:
    """Returns the escapes of a table on a GPU, and lists them first if necessary.

    Returns None if the kernel does not support the table, or if too many of its rows are irregular. Also returns None
    if the escapes are not listed yet and cannot be listed now, because a graph is being captured or code is being
    compiled."""
    held: tuple[Any, Escapes | None] | None = table._escapes
    if torch.compiler.is_compiling():
        if held is not None:
            return held[1]
        from torch._dynamo.comptime import comptime

        comptime(_warn_of_decoding)  # Warns while the code is compiled, not when the code runs.
        return None
    state = _state(table)
    is_captured = is_capturing(table.device)
    if held is not None and held[0] == state:
        if is_captured and not any(held[1] is kept for kept in (None, *table._escapes_of_graphs)):
            table._escapes_of_graphs += (held[1],)
        return held[1]
    if is_captured:
        if takes(table):
            _warn_of_decoding()
        return None
    escapes = None
    if takes(table):
        with outside_of_modes(), torch.no_grad():
            escapes = list_escapes(table)
        torch.cuda.current_stream(table.device).synchronize()  # Other streams may use the list next.
    table._escapes = state, escapes
    return escapes


def matrix_of(table: Any, device: torch.device, check: bool = False) -> torch.Tensor:
    """Decodes the table of a matrix to a tensor on a device, as `decompress` does. If the table is on the same GPU and
    its escapes are listed, the table is decoded by a kernel that is faster because it does not look for escapes."""
    is_listed = isinstance(table, Table) and table._escapes is not None and table.device == device
    escapes = escapes_of(table) if is_listed and table.is_cuda else None
    if escapes is None:
        return decompress(table, device=device, check=check)
    weights = torch.empty(table.shape, dtype=table.dtype, device=device)
    torch.ops.ibp.decode_matrix.default(
        escapes.slots, table.slot_bytes, escapes.below, escapes.starts, escapes.entries, weights
    )
    return weights.index_copy_(0, escapes.rows, escapes.weights) if len(escapes.rows) else weights


def _warn_of_decoding(context: object = None) -> None:
    """Warns that every call will decode the whole matrix. context: unused; `comptime` passes it."""
    warn_once(
        "ibp.linear is compiled or captured before the escapes of its table are listed, or after the table has "
        "changed: every call will decode the whole matrix. Call table.prepare_linear() first, and compile or capture "
        "again"
    )


def _state(table: Table) -> tuple:
    """Returns a value that changes when the table's bytes change."""
    slots = table.slots
    return table.version, table.shape, slots.data_ptr(), None if slots.is_inference() else slots._version


def takes(table: Table) -> bool:
    """Returns whether the kernel (ibp_cuda_linear in ibp_linear.h) can multiply by a table's rows."""
    if table.dtype != torch.bfloat16 or is_live(table) or table.geometry.item_bytes != table.row_bytes:
        return False
    num_rows, columns = table.shape
    if num_rows < _LEAST_ROWS or columns % COLUMN_UNIT or table.slot_bytes < coded_row_bytes(columns):
        return False
    return table.slots.data_ptr() % 16 == 0 and _gives_digits(table.codebook)


def coded_row_bytes(columns: int) -> int:
    """Returns the size in bytes of a row's residuals and digits, without its escapes."""
    return columns // 2 * 3


def _gives_digits(codebook: Any) -> bool:
    """Returns whether a codebook splits an element of BF16 into sign and mantissa and a digit of four bits, as
    codebooks of level "fast" do."""
    if not isinstance(codebook, PlanesCodebook):
        return False
    split = codebook.element_bytes, codebook.rotate, codebook.residual_bits, codebook.digit_bits
    has_more = codebook.per_column or codebook.listed or codebook.invariant_bits or codebook.num_constant
    first, largest = codebook.first_symbol, 2**_EXPONENT_BITS - 2  # Digit 15 also has to decode to a finite weight.
    is_split = split == (2, 1, _RESIDUAL_BITS, (4,)) and not has_more
    return is_split and first is not None and first + _NUM_SYMBOLS <= largest


def list_escapes(table: Table) -> Escapes | None:
    """Lists the escapes of a table for which `takes` returns True. Returns None if too many rows are irregular. Raises
    CorruptTableError if the table's bytes are inconsistent."""
    assert isinstance(table.codebook, PlanesCodebook)
    first_symbol = table.codebook.first_symbol
    assert first_symbol is not None
    num_rows, columns = table.shape
    step = max(1, _CHUNK_ELEMENTS // columns)
    parts = [_list_rows(table, start, min(start + step, num_rows), first_symbol) for start in range(0, num_rows, step)]
    counts, entries, rows, weights = (torch.cat(of_chunks) for of_chunks in zip(*parts))
    if len(rows) > num_rows * (1 - LEAST_REGULAR):
        return None
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    below = torch.zeros(2 + first_symbol, dtype=torch.uint8, device=table.device)
    slots = torch.nn.Parameter(table.slots, requires_grad=False)
    return Escapes(slots, below, starts, entries, rows, weights)


def _list_rows(table: Table, start: int, end: int, first_symbol: int) -> tuple[torch.Tensor, ...]:
    """Lists the escapes of the rows start to end - 1. Returns (number of listed escapes of each row, entries, indices
    of the irregular rows, weights of the irregular rows)."""
    weights = decode_items(table, start, end, check=True)
    bits, mantissa_bits = weights.view(torch.int16), _RESIDUAL_BITS - 1
    exponents = bits >> mantissa_bits & 2**_EXPONENT_BITS - 1
    escaped = (exponents < first_symbol) | (exponents >= first_symbol + _NUM_SYMBOLS)
    counts = escaped.sum(1)
    lengths = table.lengths[start:end].view(torch.int16).int() & 0xFFFF
    most = max(MOST_OF_A_ROW, table.shape[1] // COLUMNS_AN_ESCAPE)
    coded_bytes = coded_row_bytes(table.shape[1]) + counts  # Each escape takes a byte for its exponent.
    regular = (lengths == coded_bytes) & (lengths < table.row_bytes) & (counts <= most)
    rows, columns = (escaped & regular[:, None]).nonzero(as_tuple=True)
    weight = bits[rows, columns].int() & 0xFFFF
    taken = weight & (0x8000 | 2**mantissa_bits - 1) | first_symbol + _NUM_SYMBOLS << mantissa_bits
    entries = torch.stack((columns.int(), weight | taken << 16), dim=1)
    irregular = (~regular).nonzero().view(-1)
    return counts * regular, entries, irregular + start, weights[irregular]


# ---- products with one matrix, or with several ----


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

    The kernel adds products in float. For up to 32 vectors, the order of the additions depends only on K, so a vector's
    result has the same bits regardless of the number of vectors. The results of rows that torch multiplies (see below)
    are an exception. For more vectors, the order depends on the shapes and on the GPU. The bits differ from those of
    torch's function, whose bits also differ between shapes and between GPUs.

    With several tables, such as the query, key and value matrices of a model, one launch of the kernel multiplies by up
    to 4 of them, if no gradients are wanted. Together, short matrices then take as long as one matrix that has all
    their rows.

    Gradients reach x and bias, also under autocast. The decoded W is not kept for backward. Instead, backward decodes W
    again for the duration of its product, so rows of the table must not change before that. There are two exceptions:
    if transforms of torch.func are active, or if `table` is not a table, autograd keeps the decoded W until backward.

    The kernel needs a list of the few escaped weights, which the table's digits do not represent. Modules of `ibp.nn`
    make this list when they are given a table; call `table.prepare_linear()` to make it for a table of your own. With
    the list, calls do not synchronise, and they allocate only their result and, for more than 32 vectors, a workspace.
    They can be captured in a CUDA graph, or compiled with fullgraph=True and mode="reduce-overhead", from the first
    call on. Without the list, the first call makes it. If a graph is captured, or code is compiled, before the list is
    made, the graph or the code decodes W in every call, and a warning says so once. The table's `nbytes` includes the
    list. If the table changes, the list is made again. Then compile the code and capture the graphs again, too.

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


# ---- when the kernel multiplies ----


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


# ---- gradients ----

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
