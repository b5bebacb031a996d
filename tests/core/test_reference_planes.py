"""The numpy reference of scheme `planes` against FORMAT.md's worked example, rows worked out by hand, and itself."""

import dataclasses

import numpy as np
import pytest

import reference_planes as reference
from golden.make_planes import (
    CASES,
    HERE,
    KINDS,
    adversarial_rows,
    coded_or_nothing,
    damaged,
    load,
    make_rows,
    random_codebook,
    rows_of_k,
)
from helpers import pairwise

EXAMPLE = reference.Codebook(2, 12, 1, 8, (1, 1), False, False, 0, 0, np.array([[0x7E, 0x7F]], np.uint8))
ROW = bytes.fromhex("003F 803F 40BF 4040 003F C03F")
CODED = bytes.fromhex("00 00 81 80 00 80 2A 02 80")

DIGIT_BITS = [(), (1,), (4, 4), (2, 2, 2, 3), (1, 1, 2, 3), (3, 3, 3)]


def byte_codebook(columns, listed=True, **changes):
    """One byte an element, whole bytes as residuals: coded values are the bytes themselves."""
    codebook = reference.Codebook(1, columns, 0, 8, (), False, listed, 0, 1, np.zeros((1, 0), np.uint8))
    return dataclasses.replace(codebook, **changes)


def row_with(columns, values):
    row = bytearray(columns)
    for position, value in values.items():
        row[position] = value
    return bytes(row)


def round_trip(codebook, row):
    coded = reference.encode_row(codebook, row)
    assert reference.decode_row(codebook, coded) == row
    return coded


def coded_rows(codebook, rows):
    """(row, its coded form) of those rows that have one."""
    pairs = [(row.tobytes(), coded_or_nothing(codebook, row)) for row in rows]
    pairs = [(row, coded) for row, coded in pairs if coded]
    assert pairs
    return pairs


# ---- rows worked out by hand ---------------------------------------------------------------------------------------


def test_worked_example():
    assert reference.encode_row(EXAMPLE, ROW) == CODED
    assert reference.decode_row(EXAMPLE, CODED) == ROW


@pytest.mark.parametrize(
    "coded",
    [b"", CODED[:6], CODED[:-1], CODED + b"\0", CODED[:7] + bytes.fromhex("03 80"), CODED[:7] + bytes.fromhex("00 80")],
)
def test_worked_example_of_another_length(coded):
    """The last two: two raw symbols are asked for, and none."""
    with pytest.raises(reference.CorruptRow):
        reference.decode_row(EXAMPLE, coded)


def test_list_by_hand():
    """Positions 3 and 21 of 40: groups of 8 (l = 3), upper bits 1 0 0 1 0 0, low bits 3 and 5; a bitmap has 5 bytes."""
    codebook = byte_codebook(40)
    assert round_trip(codebook, row_with(40, {3: 7, 21: 9})) == bytes.fromhex("02 09 2B 07 09")
    assert round_trip(codebook, row_with(40, {3: 1, 21: 1})) == bytes.fromhex("82 09 2B")
    assert round_trip(codebook, row_with(40, {})) == bytes.fromhex("00")
    assert round_trip(codebook, bytes([1] * 40)) == bytes.fromhex("A8")


def test_list_of_those_not_listed_by_hand():
    """All of 40 but 3 and 21 are listed: the same list, and then 38 values."""
    row = bytes(0 if position in (3, 21) else 2 for position in range(40))
    assert round_trip(byte_codebook(40), row) == bytes.fromhex("26 09 2B") + bytes([2] * 38)
    assert round_trip(byte_codebook(40, closed=2), row) == bytes.fromhex("A6 09 2B")


def test_bitmap_by_hand():
    row = row_with(12, {0: 5, 3: 6, 4: 7, 11: 8})
    assert round_trip(byte_codebook(12), row) == bytes.fromhex("04 19 08 05 06 07 08")


def test_no_planes_is_all_raw_symbols():
    codebook = dataclasses.replace(EXAMPLE, digit_bits=(), entries=np.zeros((1, 0), np.uint8))
    assert round_trip(codebook, ROW) == bytes.fromhex("00 00 81 80 00 80 7E 7F 7E 80 7E 7F")


def test_entries_of_every_column():
    """Entries 1, 2, 3 in column 0 and 3, 2, 1 in column 1: digits 0, 2; the escape is 3."""
    codebook = reference.Codebook(
        1, 4, 0, 0, (2,), True, False, 0, 0, np.array([[1, 2, 3], [3, 2, 1], [9, 9, 9], [0, 0, 0]], np.uint8)
    )
    assert round_trip(codebook, bytes([1, 1, 9, 5])) == bytes([0b11_00_10_00, 5])
    assert round_trip(codebook, bytes([4, 2, 9, 0])) == bytes([0b00_00_01_11, 4])


def test_first_entry_of_equal_ones():
    codebook = reference.Codebook(1, 2, 0, 0, (2, 1), False, False, 0, 0, np.array([[6, 5, 5, 6]], np.uint8))
    assert round_trip(codebook, bytes([5, 6])) == bytes([0b00_01])


def test_symbols_of_no_bits():
    codebook = reference.Codebook(1, 3, 0, 8, (1,), False, False, 0, 0, np.array([[0]], np.uint8))
    assert round_trip(codebook, b"abc") == b"abc\0"
    assert reference.decode_row(codebook, b"abc\7") == b"abc"


@pytest.mark.parametrize("columns, size", [(1, 1), (127, 1), (128, 2), (32767, 2), (32768, 3), (65536, 3)])
def test_header_bytes(columns, size):
    codebook = byte_codebook(columns)
    assert round_trip(codebook, bytes(columns)) == bytes(size)
    all_listed = (columns | 1 << (8 * size - 1)).to_bytes(size, "little")
    assert round_trip(codebook, bytes([1] * columns)) == all_listed + bytes(
        columns > 8192
    )  # the zeros between the groups of the empty list


def test_default_and_closed_are_not_rotated():
    codebook = reference.Codebook(1, 8, 1, 0, (), False, True, 0x81, 0x40, np.zeros((1, 0), np.uint8))
    assert round_trip(codebook, bytes([0x81] * 8)) == b"\0"
    assert round_trip(codebook, bytes([0x40] + [0x81] * 7)) == bytes([0x81, 0x01])
    assert round_trip(codebook, bytes([0x41] + [0x81] * 7)) == bytes([0x01, 0x01, 0x82])


# ---- forms of positions --------------------------------------------------------------------------------------------


def plain_list(positions, low, columns):
    """(upper, low) bits as strings, from the words of the format."""
    groups = range((columns + 2**low - 1) // 2**low)
    upper = "0".join("1" * sum(position >> low == group for position in positions) for group in groups)
    return upper, "".join(format(position % 2**low, f"0{low}b")[::-1] for position in positions) if low else ""


def bytes_of_bits(bits):
    return bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))


def plain_forms(is_listed):
    """The bytes of every form, in the order in which they are preferred."""
    columns = len(is_listed)
    yield bytes_of_bits("".join("01"[bool(x)] for x in is_listed))
    for wanted in (True, False):
        positions = [position for position in range(columns) if is_listed[position] == wanted]
        for low in range(14):
            upper, lows = plain_list(positions, low, columns)
            yield bytes_of_bits(upper) + bytes_of_bits(lows)


@pytest.mark.parametrize(
    "columns", [1, 2, 3, 7, 8, 9, 31, 64, 127, 128, 300, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_form_is_the_smallest(columns):
    """min() of all forms written out, over every k (or some) and random positions."""
    rng = np.random.default_rng(columns)
    codebook = byte_codebook(columns, closed=1)
    some = {1, 2, 3, columns // 20, columns // 8, columns // 2, columns - 9, columns - 2, columns - 1, columns}
    counts = range(1, columns + 1) if columns < 70 else sorted(some)
    for k in counts:
        is_listed = np.zeros(columns, bool)
        is_listed[rng.choice(columns, k, replace=False)] = True
        smallest = min(plain_forms(is_listed), key=len)
        coded = round_trip(codebook, is_listed.astype(np.uint8).tobytes())
        assert coded[reference.header_bytes(columns) :] == smallest


@pytest.mark.parametrize("columns, k", [(32768, 5), (40000, 1), (65536, 3), (65536, 65530)])
def test_form_of_long_rows(columns, k):
    is_listed = np.zeros(columns, bool)
    is_listed[np.random.default_rng(k).choice(columns, k, replace=False)] = True
    coded = round_trip(byte_codebook(columns, closed=1), is_listed.astype(np.uint8).tobytes())
    best = min(reference.FORMS, key=lambda form: len(reference.encode_positions(is_listed, form)))
    assert coded[3:] == reference.encode_positions(is_listed, best)


@pytest.mark.parametrize("form", reference.FORMS, ids=str)
@pytest.mark.parametrize("columns", [1, 8, 13, 100, 9000])
def test_every_form(form, columns):
    rng = np.random.default_rng(columns)
    for share in (0, 0.01, 0.5, 0.99, 1):
        is_listed, k = (drawn := rng.random(columns) < share), int(drawn.sum())
        coded = reference.encode_positions(is_listed, form)
        assert len(coded) == reference.form_bytes(form, columns, k)
        reader = reference.Reader(coded)
        np.testing.assert_array_equal(reference.decode_positions(columns, k, form, reader), is_listed)
        reader.finish()


def test_every_kind_of_form_is_chosen():
    chosen = {
        reference.choose_form(columns, k)
        for columns in (5, 60, 300, 4096, 65536)
        for k in range(1, columns + 1, max(1, columns // 700))
    }
    chosen |= {reference.choose_form(65536, k) for k in range(1, 100)}
    assert {form[0] for form in chosen} == {"bitmap", "listed", "not listed"}
    assert {form[1] for form in chosen if form[0] == "listed"} >= set(range(1, 14))


# ---- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "element_bytes, rotate, digit_bits, kind", pairwise([1, 2, 4, 8], [0, 1], DIGIT_BITS, KINDS), ids=str
)
def test_round_trip(element_bytes, rotate, digit_bits, kind):
    width = 8 * element_bytes
    rng = np.random.default_rng([element_bytes, rotate, len(digit_bits), KINDS.index(kind)])
    for residual_bits in range(0, width + 1, 1 if width < 32 else 7):
        codebook = random_codebook(
            rng, element_bytes, int(rng.integers(1, 150)), rotate, residual_bits, digit_bits, kind
        )
        for row in adversarial_rows(rng, 5, codebook):
            coded = round_trip(codebook, row.tobytes())
            if kind != "listed":
                n, symbol_bits = codebook.columns, codebook.symbol_bits
                most = sum(n * b // 8 + 1 for b in (residual_bits, *digit_bits, symbol_bits))
                assert (
                    (n * residual_bits + 7) // 8 + (n * (digit_bits or (symbol_bits,))[0] + 7) // 8
                    <= len(coded)
                    <= most
                )


@pytest.mark.parametrize("name", CASES)
def test_round_trip_of_the_golden_cases(name):
    codebook, rows = make_rows(1000, name)
    for row, coded in coded_rows(codebook, rows):
        assert reference.decode_row(codebook, coded) == row


@pytest.mark.parametrize("digit_bits", DIGIT_BITS, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 9, 127, 128, 1024])
def test_special_counts(columns, digit_bits):
    """k = 0, 1, C - 1, C and more, closed and not."""
    rng = np.random.default_rng([columns, len(digit_bits)])
    codebook = random_codebook(rng, 2, columns, 1, 8, digit_bits, "listed")
    counts = [0, 1, columns // 2, columns - 1, columns]
    for k, row in zip(counts, rows_of_k(rng, codebook, counts)):
        coded = round_trip(codebook, row.tobytes())
        size = reference.header_bytes(columns)
        header = int.from_bytes(coded[:size], "little")
        assert header & ((1 << (8 * size - 1)) - 1) == k
        is_listed = row.view("<u2") != codebook.default
        closed = np.where(is_listed, codebook.closed, codebook.default).astype("<u2")
        again = round_trip(codebook, closed.tobytes())
        positions = reference.form_bytes(reference.choose_form(columns, k), columns, k) if k else 0
        assert (
            again[:size] == (k | (k > 0) << (8 * size - 1)).to_bytes(size, "little") and len(again) == size + positions
        )
        assert again[size:] == coded[size : size + positions]


def test_closed_that_is_the_default_is_never_used():
    codebook = byte_codebook(20, closed=0)
    assert round_trip(codebook, bytes(20)) == b"\0"
    assert round_trip(codebook, bytes([3] * 20))[0] == 20


def test_hundreds_of_rows():
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 0.02, (200, 1024)).astype("<f4").view(np.uint8)
    codebook = reference.make_codebook(rows, 4, rotate=1, residual_bits=24, digit_bits=(2, 2, 2, 3))
    sizes = [len(round_trip(codebook, row.tobytes())) for row in rows]
    assert np.mean(sizes) < 0.86 * 4096


# ---- golden files --------------------------------------------------------------------------------------------------


def test_every_case_has_a_file():
    assert {path.stem for path in HERE.glob("planes_*.npz")} == {f"planes_{name}" for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_golden_rows(name):
    codebook, rows, coded, corrupt = load(name)
    for row, expected in zip(rows, coded, strict=True):
        if expected:
            assert reference.encode_row(codebook, row) == expected
            assert reference.decode_row(codebook, expected) == row
        else:
            with pytest.raises(reference.NoCodedForm):
                reference.encode_row(codebook, row)
    for row in corrupt:
        with pytest.raises(reference.CorruptRow):
            reference.decode_row(codebook, row)


# ---- corrupt rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "coded, why",
    [
        ("", "no header"),
        ("02", "no positions"),
        ("02 09", "no low bits"),
        ("02 09 2B 07", "one value"),
        ("02 09 2B 07 09 00", "a byte more"),
        ("82 09 2B 00", "a byte more, closed"),
        ("00 00", "a byte more, none listed"),
        ("A3", "no positions but of 35 listed"),
        ("A5 00", "a byte more, all listed"),
        ("26", "k is 38"),
        ("A7", "k is 39"),
        ("FF", "k is 127"),
        ("82 01 2B", "one upper bit"),
        ("82 19 2B", "three upper bits"),
        ("82 00 2B", "no upper bit"),
        ("82 21 3B", "position 39"),
        ("82 03 1D", "positions 5 and 3"),
        ("82 03 1B", "position 3 twice"),
        ("A3 03 1B", "not listed: position 3 twice"),
        ("A3 21 3B", "not listed: position 39"),
        ("8C 07 00 00 00 00", "a bitmap of 3 for k = 12"),
        ("8C FF FF FF FF FF", "a bitmap of 37 for k = 12"),
    ],
)
def test_wrong_lists_by_hand(coded, why):
    """Rows of 37 elements, with lists of 2 in two bytes as in test_list_by_hand."""
    with pytest.raises(reference.CorruptRow):
        reference.decode_row(byte_codebook(37), bytes.fromhex(coded))


@pytest.mark.parametrize(
    "coded, listed",
    [
        ("82 09 2B", [3, 21]),
        ("82 C9 EB", [3, 21]),
        ("82 03 2B", [3, 5]),
        ("8C FF 0F 00 00 E0", range(12)),
        ("80", []),
        ("A5", range(37)),
    ],
)
def test_right_lists_by_hand(coded, listed):
    """Padding means nothing, nor does is_closed where nothing is listed."""
    assert reference.decode_row(byte_codebook(37), bytes.fromhex(coded)) == row_with(37, dict.fromkeys(listed, 1))


def assert_row_or_corrupt(codebook, coded):
    try:
        assert len(reference.decode_row(codebook, coded)) == codebook.row_bytes
    except reference.CorruptRow:
        pass


@pytest.mark.parametrize("name", CASES)
def test_damaged_rows(name):
    codebook, rows = make_rows(2000, name)
    rng = np.random.default_rng(0)
    for _, coded in coded_rows(codebook, rows)[::2]:
        for bad in damaged(rng, coded):
            assert_row_or_corrupt(codebook, bad)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2] < 1000])
def test_every_wrong_length_is_corrupt(name):
    codebook, rows = make_rows(3000, name)
    for _, coded in coded_rows(codebook, rows)[::3]:
        for wrong in [coded[:size] for size in range(len(coded))] + [coded + b"\0", coded + b"\xff" * 9, coded * 2]:
            with pytest.raises(reference.CorruptRow):
                reference.decode_row(codebook, wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("digit_bits", DIGIT_BITS, ids=str)
def test_random_bytes(digit_bits, kind):
    rng = np.random.default_rng([7, len(digit_bits), KINDS.index(kind)])
    for _ in range(30):
        columns = int(rng.integers(1, 40))
        codebook = random_codebook(rng, 2, columns, 1, int(rng.integers(0, 17)), digit_bits, kind)
        for _ in range(20):
            assert_row_or_corrupt(
                codebook, bytes([int(rng.integers(0, columns + 1))]) + rng.bytes(int(rng.integers(0, 3 * columns)))
            )


@pytest.mark.parametrize(
    "changes",
    [
        {"element_bytes": 3},
        {"element_bytes": 8},
        {"row_bytes": 13},
        {"row_bytes": 0},
        {"row_bytes": 65538},
        {"rotate": 2},
        {"residual_bits": 17},
        {"residual_bits": -1},
        {"digit_bits": (1, 1, 1)},
        {"digit_bits": (1, 0, 1)},
        {"digit_bits": (5,), "entries": np.zeros((1, 31), np.uint8)},
        {"per_column": True},
        {"listed": True, "per_column": True, "entries": np.zeros((6, 2), np.uint8)},
        {"default": 65536},
        {"closed": 65536},
        {"entries": np.array([[1, 2, 3]], np.uint8)},
        {"entries": np.array([[1, 2]], np.uint16)},
        {"residual_bits": 10, "entries": np.array([[1, 64]], np.uint8)},
        {"digit_bits": (1,) * 5, "entries": np.zeros((1, 5), np.uint8)},
    ],
)
def test_codebooks_that_contradict_themselves(changes):
    with pytest.raises(ValueError):
        dataclasses.replace(EXAMPLE, **changes)
