"""The weights of a matrix that digits do not give: listed once, for the kernel that multiplies without looking for
them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._rows.table import Table
from .._schemes import PlanesCodebook
from .streaming import decode_items

COLUMNS = 32  # the kernel takes rows of a multiple of this many columns
MOST_OF_A_ROW = 64  # escapes; one warp adds those of 16 rows, four of each at a time. Of longer rows one in
COLUMNS_AN_ESCAPE = 128  # columns: that takes about as long as decoding the row
_LEAST_ROWS = 16
_NUM_SYMBOLS = 15  # exponents that a digit of four bits gives; digit 15 is an escape
_LARGEST_FIRST_SYMBOL = 254 - _NUM_SYMBOLS  # what an escape is multiplied as is finite
_LEAST_REGULAR = 31 / 32  # of the rows: else the matrix is decoded
_CHUNK_ELEMENTS = 1 << 24  # that are looked at together


class Escapes(NamedTuple):
    """What is known of a table besides its digits.

    first_symbol: the exponent of digit 0.
    starts: int32 [N + 1], where a row's entries begin.
    entries: int32 [escapes, 2], by rows and columns: the column; the weight's bits, and in the high half those of what
        digit 15 is multiplied as.
    rows, weights: int64 [rows] and bfloat16 [rows, K]: irregular rows, which torch multiplies: stored raw or as
        default rows, or with more than `MOST_OF_A_ROW` escapes and more than one in `COLUMNS_AN_ESCAPE` columns.
    """

    first_symbol: int
    starts: torch.Tensor
    entries: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self[1:])


def escapes_of(table: Table) -> Escapes | None:
    """The escapes of a table on a GPU. None: the kernel does not take it; or none have been listed yet, and cannot be
    now, as a graph is being captured or code compiled."""
    held: tuple[Any, Escapes | None] | None = table._escapes
    if torch.compiler.is_compiling():
        return held[1] if held is not None and held[0][:2] == (table.version, table.shape) else None
    state = _state(table)
    is_captured = torch.cuda.is_current_stream_capturing()
    if held is not None and held[0] == state:
        if is_captured and not any(held[1] is kept for kept in (None, *table._escapes_of_graphs)):
            table._escapes_of_graphs += (held[1],)
        return held[1]
    if is_captured:
        return None
    escapes = None
    if takes(table):
        with torch.no_grad():
            escapes = list_escapes(table)
        torch.cuda.current_stream(table.device).synchronize()  # other streams may use them next
    table._escapes = state, escapes
    return escapes


def _state(table: Table) -> tuple:
    """What changes when the table's bytes do."""
    slots = table.slots
    return table.version, table.shape, slots.data_ptr(), None if slots.is_inference() else slots._version


def takes(table: Table) -> bool:
    """Whether the kernel multiplies a table's rows (ibp_cuda_linear in ibp_cuda.h)."""
    if table._is_live or table.dtype != torch.bfloat16 or table.item_bytes != table.row_bytes:
        return False
    num_rows, columns = table.shape
    if num_rows < _LEAST_ROWS or columns % COLUMNS or table.slot_bytes < columns // 2 * 3:
        return False
    if table.slots.data_ptr() % 16:
        return False
    return isinstance(table.codebook, PlanesCodebook) and _gives_digits(table.codebook)


def _gives_digits(codebook: PlanesCodebook) -> bool:
    """Whether an element is a digit of four bits and a byte of sign and mantissa, as level "fast" codes BF16."""
    split = codebook.element_bytes, codebook.rotate, codebook.residual_bits, codebook.digit_bits
    has_more = codebook.per_column or codebook.listed or codebook.invariant_bits or codebook.num_constant
    first = codebook.first_symbol
    return split == (2, 1, 8, (4,)) and not has_more and first is not None and first <= _LARGEST_FIRST_SYMBOL


def list_escapes(table: Table) -> Escapes | None:
    """The escapes of a table that the kernel takes. None: too many rows are irregular.

    Raises:
        CorruptTableError: the table's bytes contradict each other.
    """
    assert isinstance(table.codebook, PlanesCodebook)
    first_symbol = table.codebook.first_symbol
    assert first_symbol is not None
    num_rows, columns = table.shape
    step = max(1, _CHUNK_ELEMENTS // columns)
    parts = [_list_rows(table, start, min(start + step, num_rows), first_symbol) for start in range(0, num_rows, step)]
    counts, entries, rows, weights = (torch.cat(of_chunks) for of_chunks in zip(*parts))
    if len(rows) > num_rows * (1 - _LEAST_REGULAR):
        return None
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    return Escapes(first_symbol, starts, entries, rows, weights)


def _list_rows(table: Table, start: int, end: int, first_symbol: int) -> tuple[torch.Tensor, ...]:
    """(escapes of each row, entries, irregular rows, their weights) of rows start to end - 1."""
    weights = decode_items(table, start, end, check=True)
    bits = weights.view(torch.int16).int()
    escaped = ((bits >> 7) - first_symbol & 0xFF) >= _NUM_SYMBOLS
    counts = escaped.sum(1)
    # A row's digits and residuals are what its length says: a byte and a half an element, and a byte an escape.
    lengths = table.lengths[start:end].view(torch.int16).int() & 0xFFFF
    most = max(MOST_OF_A_ROW, table.shape[1] // COLUMNS_AN_ESCAPE)
    regular = (lengths == table.shape[1] // 2 * 3 + counts) & (lengths < table.row_bytes) & (counts <= most)
    rows, columns = (escaped & regular[:, None]).nonzero(as_tuple=True)
    weight = bits[rows, columns] & 0xFFFF
    taken = weight & 0x807F | first_symbol + _NUM_SYMBOLS << 7
    entries = torch.stack((columns.int(), weight | taken << 16), dim=1)
    irregular = (~regular).nonzero().view(-1)
    return counts * regular, entries, irregular + start, weights[irregular]
