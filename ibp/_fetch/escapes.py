"""Lists the escapes of a matrix that was coded at level "fast": the weights whose exponents the four-bit digits cannot
represent. The list is made once, so that the kernel that multiplies does not have to look for escapes. The kernel
multiplies by regular rows, which have few escapes; torch multiplies by the other rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._common.modes import outside_of_modes
from .._common.process import warn_once
from .._machine.memory import is_capturing
from .._rows.planes import PlanesCodebook
from .._rows.table import Table, handle_on
from .streaming import decode_items, decompress

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


def prepare(table: Table) -> None:
    """Lists a table's escapes in advance: the implementation of `CompressedTensor.prepare_linear`."""
    handle_on(table, table.device)
    if table.is_cuda:
        escapes_of(table)


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
    if table.dtype != torch.bfloat16 or table._is_live or table.geometry.item_bytes != table.row_bytes:
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
