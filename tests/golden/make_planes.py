"""Writes planes_*.npz with the numpy reference: `python tests/golden/make_planes.py`. A change of the format is a
change of these.

Each file has rows, the codebook's fields, the coded rows one after the other with their lengths, and likewise bytes
that no decoder may accept. The rows made here also serve the tests of scheme `planes`.
"""

import dataclasses
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import reference_planes as reference  # noqa: E402

FIELDS = (
    "element_bytes",
    "row_bytes",
    "rotate",
    "residual_bits",
    "digit_bits",
    "per_column",
    "listed",
    "default",
    "closed",
    "entries",
)
LATER_FIELDS = (
    "invariant_bits",
    "invariant_value",
    "first_symbol",
    "signed_default",
    "live_columns",
    "row_template",
)

KINDS = ("dense", "per_column", "listed")

# ---- rows: uint8 [num_rows, columns * element_bytes] ----------------------------------------------------------------


def bytes_of(elements):
    return np.ascontiguousarray(elements).view(np.uint8)


def normal_rows(rng, num_rows, columns, dtype):
    """Values of trained weights. dtype: bfloat16 or a float type of numpy."""
    values = rng.normal(0, 0.02, (num_rows, columns))
    if dtype == "bfloat16":
        return bytes_of((values.astype("<f4").view("<u4") >> 16).astype("<u2"))
    return bytes_of(values.astype(dtype))


def bfloat16_rows(rng, num_rows, columns):
    return normal_rows(rng, num_rows, columns, "bfloat16")


def float16_rows(rng, num_rows, columns):
    return normal_rows(rng, num_rows, columns, "<f2")


def float32_rows(rng, num_rows, columns):
    return normal_rows(rng, num_rows, columns, "<f4")


def float64_rows(rng, num_rows, columns):
    return normal_rows(rng, num_rows, columns, "<f8")


def scaled_columns(rng, num_rows, columns):
    """float32 with a scale of its own for every column."""
    return bytes_of((rng.normal(0, 1, (num_rows, columns)) * 2.0 ** rng.integers(-20, 20, columns)).astype("<f4"))


def half_zeros(rng, num_rows, columns):
    """bfloat16 activations after a rectifier."""
    rows = bfloat16_rows(rng, num_rows, columns).view("<u2")
    return bytes_of(np.where(rows >> 15, 0, rows).astype("<u2"))


def mostly_zeros(rng, num_rows, columns):
    return bytes_of(
        np.where(rng.random((num_rows, columns)) < 0.97, 0, rng.normal(0, 1, (num_rows, columns))).astype("<f4")
    )


def few_zeros(rng, num_rows, columns):
    """bfloat16 of which the zeros are fewer than the others, and yet what is most frequent."""
    rows = rng.integers(0x3F00, 0x4100, (num_rows, columns))
    return bytes_of(np.where(rng.random((num_rows, columns)) < 0.04, 0, rows).astype("<u2"))


def zeros_and_ones(rng, num_rows, columns):
    """float32 one-hot features, some rows far fuller than others."""
    density = rng.choice([0.003, 0.02, 0.5, 0.98], (num_rows, 1), p=[0.7, 0.1, 0.1, 0.1])
    return bytes_of((rng.random((num_rows, columns)) < density).astype("<f4"))


def rare_bytes(rng, num_rows, columns):
    """Bytes of which one in a thousand is not zero."""
    return np.where(rng.random((num_rows, columns)) < 0.001, rng.integers(1, 4, (num_rows, columns)), 0).astype(
        np.uint8
    )


def float32_of_bfloat16(rng, num_rows, columns):
    """float32 that bfloat16 holds: 16 bits are 0. Others in a row now and then."""
    rows = normal_rows(rng, num_rows, columns, "<f4").view("<u4") & np.uint32(0xFFFF0000)
    rows[::5, 0] |= 1
    return bytes_of(rows)


def zeros_of_both_signs(rng, num_rows, columns):
    """bfloat16 of which half are multiplied by zero."""
    rows = bfloat16_rows(rng, num_rows, columns).view("<u2")
    return bytes_of(np.where(rng.random((num_rows, columns)) < 0.5, rows & np.uint16(0x8000), rows))


def some_columns_constant(rng, num_rows, columns):
    """float32 of which every third column is the same in all rows but a few."""
    rows = normal_rows(rng, num_rows, columns, "<f4").view("<u4")
    rows[:, ::3] = rows[:1, ::3]
    rows[::5, 0] ^= 1
    return bytes_of(rows)


def small_integers(rng, num_rows, columns):
    return bytes_of(rng.geometric(0.3, (num_rows, columns)).clip(0, 255).astype(np.uint8))


def int64_ids(rng, num_rows, columns):
    return bytes_of((10**12 + rng.integers(0, 1000, (num_rows, columns))).astype("<i8"))


def adversarial_rows(rng, num_rows, codebook):
    """Rows of default, closed, elements of an entry's symbol and anything, each row mixed in its own way. All of
    `closed` first.
    """
    width, shape = codebook.width, (num_rows, codebook.columns)
    anything = rng.integers(0, 2**64, shape, np.uint64) & reference.low_bits(width)
    symbols, residuals = reference.split(anything, *codebook.split)
    if codebook.entries.shape[1] > 0:
        picked = rng.integers(0, codebook.entries.shape[1], shape)
        symbols = np.broadcast_to(codebook.entries, (codebook.columns, codebook.entries.shape[1]))[
            np.arange(codebook.columns), picked
        ]
    named = reference.join(symbols.astype(np.uint64), residuals, *codebook.split)
    default, closed = np.full(shape, codebook.default, np.uint64), np.full(shape, codebook.closed, np.uint64)
    if codebook.invariant_bits:
        named, anything = with_invariant_bits(rng, codebook, named, anything)
    if codebook.signed_default:
        default ^= rng.integers(0, 2, shape, np.uint64) << np.uint64(width - 1)
    kinds = [anything, named, default, closed]
    shares = rng.dirichlet([0.15] * 4, num_rows) if num_rows else np.zeros((0, 4))
    shares[:1] = [0, 0, 0, 1]
    kind = (rng.random((*shape, 1)) >= shares.cumsum(axis=1)[:, None, :3]).sum(axis=2)
    return in_all_columns(codebook, np.choose(kind, kinds))


def with_invariant_bits(rng, codebook, named, anything):
    """Named elements, and others of which three rows in four have the invariant bits."""
    shift, value = np.uint64(codebook.invariant_bits), np.uint64(codebook.invariant_value)
    has_them = rng.random((len(anything), 1)) < 0.75
    return named << shift | value, np.where(has_them, anything >> shift << shift | value, anything)


def in_all_columns(codebook, elements):
    """Whole rows of bytes, from the elements of the live columns."""
    if codebook.live_columns is not None:
        rows = np.tile(reference.elements_of(codebook.row_template, codebook.element_bytes), (len(elements), 1))
        rows[:, list(codebook.live_columns)] = elements
        elements = rows
    return bytes_of(elements.astype(f"<u{codebook.element_bytes}"))


def rows_of_k(rng, codebook, counts):
    """For each k of counts a row of which k elements are not the default."""
    rows = np.full((len(counts), codebook.columns), codebook.default, np.uint64)
    for row, k in zip(rows, counts):
        at = rng.choice(codebook.columns, k, replace=False)
        row[at] = (np.uint64(codebook.default) + rng.integers(1, 4, k).astype(np.uint64)) & reference.low_bits(
            codebook.width
        )
    return in_all_columns(codebook, rows)


def random_codebook(rng, element_bytes, columns, rotate, residual_bits, digit_bits, kind):
    """Any entries, of a few bits now and then, so that some are equal; any default and closed."""
    width, num_entries = 8 * element_bytes, sum(2**b - 1 for b in digit_bits)
    entries = rng.integers(
        0, 2**64, (columns if kind == "per_column" else 1, num_entries), np.uint64
    ) & reference.low_bits(width)
    entries = reference.high_part(entries, residual_bits) & reference.low_bits(int(rng.choice([3, 64])))
    default, closed = (int(element) >> (64 - width) for element in rng.integers(0, 2**64, 2, np.uint64))
    return reference.Codebook(
        element_bytes,
        columns * element_bytes,
        rotate,
        residual_bits,
        digit_bits,
        kind == "per_column",
        kind == "listed",
        default,
        closed,
        entries.astype(reference.symbol_type(width - residual_bits)),
    )


def with_later_fields(rng, codebook, chosen=None):
    """The codebook with some of the fields that leave bits out: the chosen ones of LATER_FIELDS, else any."""
    chosen = {field for field in LATER_FIELDS if rng.random() < 0.5} if chosen is None else chosen
    later, width, entries = {}, codebook.width, codebook.entries
    if "invariant_bits" in chosen and codebook.residual_bits < width:
        most = min(width - 1, width - codebook.residual_bits)
        bits = int(rng.integers(0, most + 1))
        later |= {"invariant_bits": bits, "invariant_value": int(rng.integers(0, 2**bits, dtype=np.uint64))}
        dtype = reference.symbol_type(width - bits - codebook.residual_bits)
        entries = (entries & reference.low_bits(width - bits - codebook.residual_bits)).astype(dtype)
    symbol_bits = width - later.get("invariant_bits", 0) - codebook.residual_bits
    if "first_symbol" in chosen and not codebook.per_column:
        later["first_symbol"] = int(rng.integers(0, 2**symbol_bits, dtype=np.uint64))
    if "signed_default" in chosen and codebook.listed:
        later["signed_default"] = True
    if "live_columns" in chosen and codebook.columns > 1:
        count = int(rng.integers(1, codebook.columns))
        live = np.sort(rng.choice(codebook.columns, count, replace=False))
        row_template = rng.integers(0, 256, (codebook.columns, codebook.element_bytes), np.uint8)
        row_template[live] = list(codebook.default.to_bytes(codebook.element_bytes, "little"))
        later |= {"live_columns": tuple(live.tolist()), "row_template": row_template.tobytes()}
        entries = entries[: len(live)]
    return dataclasses.replace(codebook, entries=entries, **later)


# ---- damage --------------------------------------------------------------------------------------------------------


def damaged(rng, coded, flips=12):
    """A coded row of wrong lengths, then with single bits, a byte or all bytes changed: not all of these
    are corrupt.
    """
    yield from (b"", coded[:-1], coded[: len(coded) // 2], coded + b"\0", coded + coded)
    for flip in range(flips):
        changed = bytearray(coded)
        at = int(rng.integers(0, len(coded))) if flip % 2 else min(flip // 2, len(coded) - 1)
        changed[at] = changed[at] ^ (1 << int(rng.integers(0, 8))) if flip % 4 else int(rng.integers(0, 256))
        yield bytes(changed)
    yield rng.bytes(len(coded))


def refused(codebook, coded):
    try:
        reference.decode_row(codebook, coded)
    except reference.CorruptRow:
        return True
    return False


# ---- the files -----------------------------------------------------------------------------------------------------

# name: rows, element_bytes, columns, the other fields that differ from the defaults of make_codebook
CASES = {
    "bfloat16": (bfloat16_rows, 2, 96, {"rotate": 1, "residual_bits": 8, "digit_bits": (4, 4)}),
    "bfloat16_not_rotated": (bfloat16_rows, 2, 33, {"residual_bits": 7, "digit_bits": (3, 3, 3)}),
    "float16": (float16_rows, 2, 100, {"rotate": 1, "residual_bits": 11, "digit_bits": (1, 1, 2, 3)}),
    "float32": (float32_rows, 4, 64, {"rotate": 1, "residual_bits": 24, "digit_bits": (2, 2, 2, 3)}),
    "float32_one_bit": (float32_rows, 4, 31, {"rotate": 1, "residual_bits": 28, "digit_bits": (1,)}),
    "float32_per_column": (
        scaled_columns,
        4,
        30,
        {"rotate": 1, "residual_bits": 24, "digit_bits": (1, 1, 2), "per_column": True},
    ),
    "float64": (float64_rows, 8, 24, {"rotate": 1, "residual_bits": 53, "digit_bits": (2, 2, 2, 3)}),
    "float64_per_column": (
        float64_rows,
        8,
        5,
        {"rotate": 1, "residual_bits": 45, "digit_bits": (4,), "per_column": True},
    ),
    "int64_whole_symbols": (int64_ids, 8, 40, {"digit_bits": (4, 4, 4, 4)}),
    "int64_ids": (int64_ids, 8, 17, {"residual_bits": 10, "digit_bits": (1,)}),
    "bytes_whole_symbols": (small_integers, 1, 130, {"digit_bits": (2, 3)}),
    "no_planes": (float16_rows, 2, 21, {"rotate": 1, "residual_bits": 5}),
    "symbols_of_no_bits": (small_integers, 1, 50, {"residual_bits": 8, "digit_bits": (2, 1)}),
    "listed_zero_value": (mostly_zeros, 4, 60, {"residual_bits": 32, "listed": True}),
    "listed_half_zeros": (
        half_zeros,
        2,
        128,
        {"rotate": 1, "residual_bits": 8, "digit_bits": (2, 2, 2, 3), "listed": True},
    ),
    "listed_few_zeros": (few_zeros, 2, 127, {"rotate": 1, "residual_bits": 8, "digit_bits": (4, 4), "listed": True}),
    "listed_zeros_and_ones": (
        zeros_and_ones,
        4,
        300,
        {"rotate": 1, "residual_bits": 23, "digit_bits": (1,), "listed": True},
    ),
    "listed_mostly_zeros": (
        mostly_zeros,
        4,
        200,
        {"rotate": 1, "residual_bits": 24, "digit_bits": (1, 1, 2, 3), "listed": True},
    ),
    "listed_one_column": (small_integers, 1, 1, {"digit_bits": (1,), "listed": True}),
    "listed_int64": (int64_ids, 8, 9, {"rotate": 1, "residual_bits": 12, "digit_bits": (1, 1), "listed": True}),
    "listed_header_of_2": (rare_bytes, 1, 32767, {"digit_bits": (2,), "listed": True}),
    "listed_header_of_3": (rare_bytes, 1, 32768, {"residual_bits": 4, "listed": True}),
    "listed_longest": (rare_bytes, 1, 65536, {"digit_bits": (2,), "listed": True}),
    "invariant_bits": (
        float32_of_bfloat16,
        4,
        65,
        {"rotate": 1, "residual_bits": 8, "digit_bits": (2, 2, 2), "invariant_bits": 16},
    ),
    "consecutive": (bfloat16_rows, 2, 96, {"rotate": 1, "residual_bits": 8, "digit_bits": (4,), "first_symbol": 0x6C}),
    "consecutive_that_wrap_around": (small_integers, 1, 70, {"digit_bits": (3, 2), "first_symbol": 0xFE}),
    "listed_signed_default": (
        zeros_of_both_signs,
        2,
        129,
        {"rotate": 1, "residual_bits": 8, "digit_bits": (2, 2), "listed": True, "signed_default": True},
    ),
    "constant_columns": (
        some_columns_constant,
        4,
        50,
        {"rotate": 1, "residual_bits": 24, "digit_bits": (2, 2), "constant_columns": range(0, 50, 3)},
    ),
    "constant_columns_with_entries_a_column": (
        some_columns_constant,
        4,
        20,
        {
            "rotate": 1,
            "residual_bits": 20,
            "digit_bits": (1, 2),
            "per_column": True,
            "invariant_bits": 1,
            "constant_columns": range(0, 20, 3),
        },
    ),
    "listed_constant_columns": (
        zeros_of_both_signs,
        2,
        40,
        {
            "rotate": 1,
            "residual_bits": 8,
            "digit_bits": (4,),
            "listed": True,
            "signed_default": True,
            "first_symbol": 0x70,
            "constant_columns": (0, 1, 17, 39),
        },
    ),
}


def make_rows(number, name):
    """(codebook, rows) of a case: rows as they are met, adversarial ones and, if listed, some of every k that is
    special.
    """
    rows_of, element_bytes, columns, settings = CASES[name]
    rng = np.random.default_rng(number)
    long = columns * element_bytes > 4096
    rows = rows_of(rng, 2 if long else 10, columns)
    codebook = reference.make_codebook(rows, element_bytes, **settings)
    if "constant_columns" in settings:
        rows[1::2] = np.where(live_bytes(codebook), rows[1::2], np.frombuffer(codebook.row_template, np.uint8))
    more = [] if long else [adversarial_rows(rng, 4, codebook)]
    if codebook.listed:
        columns = codebook.columns
        counts = [0, 1, min(2, columns), columns // 10, columns // 2, columns - 1, columns]
        more.append(rows_of_k(rng, codebook, counts[:3] if long else counts))
    return codebook, np.concatenate([rows, *more])


def live_bytes(codebook):
    """Which bytes of a row belong to live columns."""
    is_live = np.zeros((codebook.row_bytes // codebook.element_bytes, codebook.element_bytes), bool)
    is_live[list(codebook.live_columns)] = True
    return is_live.reshape(-1)


def coded_or_nothing(codebook, row):
    """The coded row; no bytes where it has no coded form."""
    try:
        return reference.encode_row(codebook, bytes(row))
    except reference.NoCodedForm:
        return b""


def make_case(number, name):
    codebook, rows = make_rows(number, name)
    rng = np.random.default_rng([number, 1])
    coded = [coded_or_nothing(codebook, row.tobytes()) for row in rows]
    good_rows = [c for c in coded if c]
    assert all(reference.decode_row(codebook, c) == row.tobytes() for c, row in zip(coded, rows) if c)
    corrupt = [
        bad for good in good_rows[:: len(good_rows) // 3] for bad in damaged(rng, good) if refused(codebook, bad)
    ]
    fields = {field: np.asarray(getattr(codebook, field)) for field in FIELDS}
    changed = {field for field in LATER_FIELDS if getattr(codebook, field) != getattr(reference.Codebook, field)}
    fields |= {field: np.asarray(getattr(codebook, field)) for field in sorted(changed - {"row_template"})}
    if "row_template" in changed:
        fields["row_template"] = np.frombuffer(codebook.row_template, np.uint8)
    fields["default"], fields["closed"] = np.uint64(codebook.default), np.uint64(codebook.closed)
    fields["digit_bits"] = np.array(codebook.digit_bits, np.int64)
    np.savez_compressed(
        HERE / f"planes_{name}.npz", rows=rows, **fields, **joined("coded", coded), **joined("corrupt", corrupt)
    )


def joined(name, parts):
    return {
        name: np.frombuffer(b"".join(parts), np.uint8),
        f"{name}_lengths": np.array([len(part) for part in parts], np.uint32),
    }


def load(name):
    """(codebook, rows, coded rows, corrupt rows) of a golden file; a row without a coded form has no bytes."""
    golden = np.load(HERE / f"planes_{name}.npz")
    fields = {field: golden[field] if field == "entries" else golden[field].tolist() for field in FIELDS}
    fields |= {field: golden[field].tolist() for field in LATER_FIELDS if field in golden}
    if "row_template" in golden:
        fields["row_template"] = golden["row_template"].tobytes()
    cut = {part: np.split(golden[part], golden[f"{part}_lengths"].cumsum())[:-1] for part in ("coded", "corrupt")}
    rows, coded, corrupt = (
        [piece.tobytes() for piece in pieces] for pieces in (golden["rows"], cut["coded"], cut["corrupt"])
    )
    return reference.Codebook(**fields), rows, coded, corrupt


if __name__ == "__main__":
    for case_number, case_name in enumerate(CASES):
        make_case(case_number, case_name)
