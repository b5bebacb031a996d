"""An encoder and a decoder of rows of scheme `planes` in plain numpy, written from csrc/FORMAT.md, section 6, alone.

It is slow and simple on purpose, because the C and CUDA code is compared with it. The caller decides whether to store a
row raw (section 2).
"""

from __future__ import annotations

import dataclasses

import numpy as np

MAX_ROW_BYTES = 65536


class CorruptRow(ValueError):
    """A coded row that contradicts its length or its codebook (section 8)."""


class NoCodedForm(ValueError):
    """A row that the codebook cannot encode."""


@dataclasses.dataclass
class Codebook:
    """The fields of FORMAT.md. Raises ValueError if they contradict each other."""

    element_bytes: int
    row_bytes: int
    rotate: int
    residual_bits: int
    digit_bits: tuple[int, ...]
    per_column: bool
    listed: bool
    default: int  # default and closed are elements as in the row, not rotated
    closed: int
    entries: np.ndarray  # symbol_type(symbol_bits) [live columns or 1, E]; ignored if first_symbol is given
    invariant_bits: int = 0
    invariant_value: int = 0
    first_symbol: int | None = None
    signed_default: bool = False
    live_columns: tuple[int, ...] | None = None  # None: all columns
    row_template: bytes = b""

    def __post_init__(self):
        self.digit_bits = tuple(self.digit_bits)
        require(self.element_bytes in (1, 2, 4, 8), "an element has 1, 2, 4 or 8 bytes")
        require(
            1 <= self.row_bytes <= MAX_ROW_BYTES and self.row_bytes % self.element_bytes == 0,
            "a row is 1 to 65536 bytes of whole elements",
        )
        require(self.rotate in (0, 1), "elements are rotated by 0 or 1 bit")
        require(0 <= self.invariant_bits < self.width, "some bits of an element vary")
        require(0 <= self.residual_bits <= self.coded_bits, "a residual is no wider than what varies of an element")
        require(0 <= self.invariant_value < 2**self.invariant_bits, "the invariant value has the invariant bits")
        require(self.listed or not self.signed_default, "only listed rows leave elements out")
        require(
            len(self.digit_bits) <= 4 and all(1 <= b <= 4 for b in self.digit_bits), "at most 4 planes of 1 to 4 bits"
        )
        require(not (self.per_column and self.listed), "listed elements have no entries of their column")
        require(max(self.default, self.closed) < 2**self.width, "default and closed are elements")
        if self.live_columns is not None:
            self._check_constants()
        dtype, count = symbol_type(self.symbol_bits), sum(2**b - 1 for b in self.digit_bits)
        if self.first_symbol is not None:
            require(not self.per_column and 0 <= self.first_symbol < 2**self.symbol_bits, "entries begin with a symbol")
            symbols = [(self.first_symbol + i) % 2**self.symbol_bits for i in range(count)]
            self.entries = np.array([symbols], np.uint64).astype(dtype)
        shape = (self.columns if self.per_column else 1, count)
        require(self.entries.shape == shape and self.entries.dtype == dtype, f"entries must be {dtype} {list(shape)}")
        require(
            not np.any(high_part(self.entries.astype(np.uint64), self.symbol_bits)),
            f"entries are symbols of {self.symbol_bits} bits",
        )

    def _check_constants(self) -> None:
        live, all_columns = self.live_columns, self.row_bytes // self.element_bytes
        require(0 < len(live) and all(0 <= c < all_columns for c in live), "live columns are columns")
        require(all(a < b for a, b in zip(live, live[1:])), "live columns increase")
        require(len(self.row_template) == self.row_bytes, "the template is a row")
        values = elements_of(self.row_template, self.element_bytes)[list(live)]
        require(bool((values == np.uint64(self.default)).all()), "the template has default in live columns")

    @property
    def width(self) -> int:
        return 8 * self.element_bytes

    @property
    def coded_bits(self) -> int:
        """Returns w', the coded bits of an element."""
        return self.width - self.invariant_bits

    @property
    def split(self) -> tuple[int, int, int]:
        """Returns the arguments of split() and join() for the coded bits of an element."""
        return self.coded_bits, self.rotate, self.residual_bits

    @property
    def columns(self) -> int:
        """Returns the number of columns that are coded."""
        return self.row_bytes // self.element_bytes if self.live_columns is None else len(self.live_columns)

    @property
    def symbol_bits(self) -> int:
        return self.coded_bits - self.residual_bits

    @property
    def default_row(self) -> bytes:
        """Returns the row that a table stores in no bytes."""
        if self.live_columns is not None:
            return self.row_template
        return self.default.to_bytes(self.element_bytes, "little") * self.columns


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def symbol_type(symbol_bits: int) -> np.dtype:
    """Returns the smallest unsigned type that holds a symbol."""
    return next(np.dtype(f"<u{size}") for size in (1, 2, 4, 8) if 8 * size >= symbol_bits)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def low_bits(width: int) -> np.uint64:
    return np.uint64(2**width - 1)


def high_part(values: np.ndarray, shift: int) -> np.ndarray:
    """Returns values >> shift, also if the shift is all 64 bits."""
    return values >> np.uint64(shift) if shift < 64 else np.zeros_like(values)


# ---- fields of bits ------------------------------------------------------------------------------------------------


def pack_fields(values: np.ndarray, width: int) -> bytes:
    """Returns fields of `width` bits, lowest bits first, padded with zero bits to a whole byte."""
    bits = (values.astype(np.uint64)[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


class Reader:
    """A coded row from which fields are taken, part by part."""

    def __init__(self, coded: bytes):
        self.coded = np.frombuffer(coded, np.uint8)
        self.at = 0

    def fields(self, count: int, width: int) -> np.ndarray:
        """Takes `count` fields of `width` bits: uint64 [count]. Skips the padding to a whole byte."""
        size = ceil_div(count * width, 8)
        if self.at + size > len(self.coded):
            raise CorruptRow(f"byte {self.at + size} of a row of {len(self.coded)} bytes is asked for")
        bits = np.unpackbits(self.coded[self.at : self.at + size], bitorder="little")[: count * width].reshape(
            count, width
        )
        self.at += size
        return (bits.astype(np.uint64) << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)

    def finish(self) -> None:
        if self.at != len(self.coded):
            raise CorruptRow(f"the row asks for {self.at} bytes, there are {len(self.coded)}")


# ---- elements ------------------------------------------------------------------------------------------------------


def elements_of(row: bytes, element_bytes: int) -> np.ndarray:
    return np.frombuffer(row, f"<u{element_bytes}").astype(np.uint64)


def rotate_left(elements: np.ndarray, count: int, width: int) -> np.ndarray:
    """Rotates elements of `width` bits by 0 <= count < width bits."""
    if count == 0:
        return elements
    return ((elements << np.uint64(count)) | (elements >> np.uint64(width - count))) & low_bits(width)


def split(elements: np.ndarray, width: int, rotate: int, residual_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (symbols, residuals) of elements."""
    rotated = rotate_left(elements, rotate, width)
    return high_part(rotated, residual_bits), rotated & low_bits(residual_bits)


def join(symbols: np.ndarray, residuals: np.ndarray, width: int, rotate: int, residual_bits: int) -> np.ndarray:
    """Returns the elements that split() takes apart."""
    high = symbols << np.uint64(residual_bits) if residual_bits < width else np.uint64(0)
    return rotate_left(high | residuals, width - rotate if rotate else 0, width)


# ---- values of n elements ------------------------------------------------------------------------------------------


def planes_of(codebook: Codebook, n: int) -> list[tuple[int, np.ndarray]]:
    """Returns for every plane the bits of a digit, and its entries for each of n elements: [n, 2^b - 1]."""
    entries = np.broadcast_to(codebook.entries.astype(np.uint64), (n, codebook.entries.shape[1]))
    firsts = np.cumsum([0] + [2**b - 1 for b in codebook.digit_bits])
    return [(b, entries[:, first : first + 2**b - 1]) for b, first in zip(codebook.digit_bits, firsts)]


def encode_values(codebook: Codebook, elements: np.ndarray) -> bytes:
    if np.any(elements & low_bits(codebook.invariant_bits) != np.uint64(codebook.invariant_value)):
        raise NoCodedForm("an element has other invariant bits")
    symbols, residuals = split(elements >> np.uint64(codebook.invariant_bits), *codebook.split)
    parts = [pack_fields(residuals, codebook.residual_bits)]
    left = np.arange(len(elements))  # elements that every plane so far has escaped
    for bits, entries in planes_of(codebook, len(elements)):
        equal = entries[left] == symbols[left, None]
        digits = np.where(equal.any(axis=1), equal.argmax(axis=1), 2**bits - 1)
        parts.append(pack_fields(digits, bits))
        left = left[digits == 2**bits - 1]
    parts.append(pack_fields(symbols[left], codebook.symbol_bits))
    return b"".join(parts)


def decode_values(codebook: Codebook, n: int, reader: Reader) -> np.ndarray:
    residuals = reader.fields(n, codebook.residual_bits)
    symbols = np.zeros(n, np.uint64)
    left = np.arange(n)
    for bits, entries in planes_of(codebook, n):
        digits = reader.fields(len(left), bits).astype(np.int64)
        named = digits < 2**bits - 1
        symbols[left[named]] = entries[left[named], digits[named]]
        left = left[~named]
    symbols[left] = reader.fields(len(left), codebook.symbol_bits)
    varying = join(symbols, residuals, *codebook.split)
    return varying << np.uint64(codebook.invariant_bits) | np.uint64(codebook.invariant_value)


# ---- positions of listed elements ----------------------------------------------------------------------------------

BITMAP = ("bitmap", None)
FORMS = [BITMAP] + [(of, low) for of in ("listed", "not listed") for low in range(14)]


def num_positions(form: tuple, columns: int, k: int) -> int:
    """Returns m, the number of positions in a list."""
    return k if form[0] == "listed" else columns - k


def num_upper_bits(m: int, low: int, columns: int) -> int:
    return m + ceil_div(columns, 2**low) - 1


def form_bytes(form: tuple, columns: int, k: int) -> int:
    if form == BITMAP:
        return ceil_div(columns, 8)
    m, low = num_positions(form, columns, k), form[1]
    return ceil_div(num_upper_bits(m, low, columns), 8) + ceil_div(m * low, 8)


def choose_form(columns: int, k: int) -> tuple:
    """Returns the form with the fewest bytes. Of equally long forms it is the first, as min() takes it."""
    return min(FORMS, key=lambda form: form_bytes(form, columns, k))


def encode_positions(is_listed: np.ndarray, form: tuple) -> bytes:
    """Encodes positions. is_listed: bool [columns]."""
    if form == BITMAP:
        return pack_fields(is_listed, 1)
    of, low = form
    positions = np.flatnonzero(is_listed if of == "listed" else ~is_listed)
    upper = np.zeros(num_upper_bits(len(positions), low, len(is_listed)), np.uint8)
    upper[np.arange(len(positions)) + (positions >> low)] = 1
    return pack_fields(upper, 1) + pack_fields(positions & (2**low - 1), low)


def decode_positions(columns: int, k: int, form: tuple, reader: Reader) -> np.ndarray:
    """Returns is_listed: bool [columns]."""
    if form == BITMAP:
        is_listed = reader.fields(columns, 1) == 1
        if is_listed.sum() != k:
            raise CorruptRow(f"a bitmap of {k} positions has {is_listed.sum()} bits set")
        return is_listed
    of, low = form
    m = num_positions(form, columns, k)
    ones = np.flatnonzero(reader.fields(num_upper_bits(m, low, columns), 1))
    if len(ones) != m:
        raise CorruptRow(f"a list of {m} positions has {len(ones)} upper bits set")
    positions = ((ones - np.arange(m)) << low) | reader.fields(m, low).astype(np.int64)
    if np.any(positions >= columns):
        raise CorruptRow(f"position {positions.max()} in a row of {columns} elements")
    if np.any(positions[1:] <= positions[:-1]):
        raise CorruptRow("the positions of a list do not increase")
    in_list = np.zeros(columns, bool)
    in_list[positions] = True
    return in_list if of == "listed" else ~in_list


# ---- a row ---------------------------------------------------------------------------------------------------------


def header_bytes(columns: int) -> int:
    return 1 if columns < 128 else 2 if columns < 32768 else 3


def encode_row(codebook: Codebook, row: bytes) -> bytes:
    """Returns the coded row, whether or not it is smaller than the row."""
    require(len(row) == codebook.row_bytes, f"a row has {codebook.row_bytes} bytes, not {len(row)}")
    elements = live_elements(codebook, row)
    return encode_listed(codebook, elements) if codebook.listed else encode_values(codebook, elements)


def live_elements(codebook: Codebook, row: bytes) -> np.ndarray:
    elements = elements_of(row, codebook.element_bytes)
    if codebook.live_columns is None:
        return elements
    is_constant = np.ones(len(elements), bool)
    is_constant[list(codebook.live_columns)] = False
    if np.any((elements != elements_of(codebook.row_template, codebook.element_bytes))[is_constant]):
        raise NoCodedForm("a constant column has another value")
    return elements[~is_constant]


def encode_listed(codebook: Codebook, elements: np.ndarray) -> bytes:
    highest = np.uint64(1 << (codebook.width - 1))
    differing = elements ^ np.uint64(codebook.default)
    is_listed = (differing & ~highest if codebook.signed_default else differing) != 0
    k, size = int(is_listed.sum()), header_bytes(codebook.columns)
    is_closed = k > 0 and bool((elements[is_listed] == np.uint64(codebook.closed)).all())
    header = (k | is_closed << (8 * size - 1)).to_bytes(size, "little")
    positions = encode_positions(is_listed, choose_form(codebook.columns, k)) if k > 0 else b""
    signs = pack_fields((elements & highest != 0)[~is_listed], 1) if codebook.signed_default else b""
    values = encode_values(codebook, elements[is_listed]) if k > 0 and not is_closed else b""
    return header + positions + signs + values


def decode_listed(codebook: Codebook, reader: Reader) -> np.ndarray:
    size = header_bytes(codebook.columns)
    header = int(reader.fields(1, 8 * size)[0])
    is_closed, k = header >> (8 * size - 1), header & (2 ** (8 * size - 1) - 1)
    if k > codebook.columns:
        raise CorruptRow(f"{k} elements of {codebook.columns} are listed")
    elements, is_listed = np.full(codebook.columns, codebook.default, np.uint64), np.zeros(codebook.columns, bool)
    if k > 0:
        is_listed = decode_positions(codebook.columns, k, choose_form(codebook.columns, k), reader)
    if codebook.signed_default:
        signs = reader.fields(codebook.columns - k, 1)
        without = np.uint64(codebook.default) & low_bits(codebook.width - 1)
        elements[~is_listed] = without | signs << np.uint64(codebook.width - 1)
    if k > 0:
        elements[is_listed] = np.uint64(codebook.closed) if is_closed else decode_values(codebook, k, reader)
    return elements


def decode_row(codebook: Codebook, coded: bytes) -> bytes:
    """Returns the row. Raises CorruptRow if `coded` is not a coded row."""
    reader = Reader(coded)
    if codebook.listed:
        elements = decode_listed(codebook, reader)
    else:
        elements = decode_values(codebook, codebook.columns, reader)
    reader.finish()
    if codebook.live_columns is None:
        return elements.astype(f"<u{codebook.element_bytes}").tobytes()
    row = elements_of(codebook.row_template, codebook.element_bytes).copy()
    row[list(codebook.live_columns)] = elements
    return row.astype(f"<u{codebook.element_bytes}").tobytes()


# ---- a codebook for given rows -------------------------------------------------------------------------------------


def frequent(values: np.ndarray, count: int) -> list[int]:
    """Returns the `count` most frequent values, and zeros if there are fewer. Of equally frequent values the smaller
    one comes first."""
    distinct, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:count]
    return [int(value) for value in distinct[order]] + [0] * (count - len(order))


def make_codebook(
    rows: np.ndarray,
    element_bytes: int,
    *,
    rotate=0,
    residual_bits=0,
    digit_bits=(),
    per_column=False,
    listed=False,
    constant_columns=(),
    invariant_bits=0,
    **later,
) -> Codebook:
    """Returns a codebook for rows, uint8 [num_rows, row_bytes]. Its default, closed and entries are the most frequent
    values of the rows.

    This is one way to choose a codebook; the bytes of a coded row do not depend on the way. later: fields of Codebook
    from invariant_value on. constant_columns: columns that get the value that rows have there most often.
    """
    row_bytes, num_entries = rows.shape[1], sum(2**b - 1 for b in digit_bits)
    elements = elements_of(rows.tobytes(), element_bytes)
    whole_rows = elements.reshape(len(rows), -1)
    live = [column for column in range(whole_rows.shape[1]) if column not in constant_columns]
    elements = whole_rows[:, live].reshape(-1)
    default, closed = frequent(elements, 2) if listed else (0, 0)
    if constant_columns:
        values = [
            default if column in live else frequent(whole_rows[:, column], 1)[0]
            for column in range(whole_rows.shape[1])
        ]
        later |= {"live_columns": tuple(live), "row_template": np.array(values, f"<u{element_bytes}").tobytes()}
    varying = (elements[elements != np.uint64(default)] if listed else elements) >> np.uint64(invariant_bits)
    symbols, _ = split(varying, 8 * element_bytes - invariant_bits, rotate, residual_bits)
    columns = symbols.reshape(-1, len(live)).T if per_column else [symbols]
    entries = np.array([frequent(column, num_entries) for column in columns], np.uint64)
    return Codebook(
        element_bytes,
        row_bytes,
        rotate,
        residual_bits,
        digit_bits,
        per_column,
        listed,
        default,
        closed,
        entries.astype(symbol_type(8 * element_bytes - invariant_bits - residual_bits)),
        invariant_bits,
        **later,
    )
