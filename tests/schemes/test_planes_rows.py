"""Rows of scheme `planes` from the C core: the numpy reference's bytes, and no harm from bytes that are no row."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference_planes as reference
import row_codecs
from golden import make_planes
from golden.make_planes import (
    CASES,
    KINDS,
    LATER_FIELDS,
    adversarial_rows,
    coded_or_nothing,
    damaged,
    load,
    make_rows,
    random_codebook,
    rows_of_k,
    with_later_fields,
)
from helpers import pairwise, slow_but

FEW_COLUMNS = [name for name in CASES if CASES[name][2] <= 1000]


def codec_of(codebook):
    c = codebook
    return row_codecs.PlanesCodec(
        c.row_bytes,
        c.element_bytes,
        c.rotate,
        c.residual_bits,
        list(c.digit_bits),
        c.per_column,
        c.listed,
        c.default,
        c.closed,
        b"" if c.first_symbol is not None else c.entries.tobytes(),
        **{field: getattr(c, field) for field in make_planes.LATER_FIELDS if field != "live_columns"},
        live_columns=c.live_columns or [],
    )


def assert_coded_alike(codebook, rows):
    codec = codec_of(codebook)
    assert codec.row_bytes == codebook.row_bytes
    for row in rows:
        row = row.tobytes()
        coded = coded_or_nothing(codebook, row)
        if not coded:
            assert codec.coded_bytes(row) is None
            with pytest.raises(ValueError, match="no coded form"):
                codec.encode(row)
            continue
        assert codec.encode(row) == coded
        assert codec.coded_bytes(row) == len(coded)
        assert codec.decode(coded) == row


def decoded(decode, coded):
    """The row, or None if it is refused."""
    try:
        return decode(coded)
    except ValueError:
        return None


def assert_decoded_alike(codebook, codec, coded):
    assert decoded(codec.decode, coded) == decoded(lambda bad: reference.decode_row(codebook, bad), coded), coded.hex()


# ---- golden files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden_rows(name):
    codebook, rows, coded, corrupt = load(name)
    codec = codec_of(codebook)
    assert [codec.encode(row) if codec.coded_bytes(row) else b"" for row in rows] == coded
    assert [codec.decode(c) if c else row for row, c in zip(rows, coded)] == rows
    for row in corrupt:
        with pytest.raises(ValueError, match="corrupt|contradicts"):
            codec.decode(row)


def test_worked_example():
    codec = row_codecs.PlanesCodec(12, 2, 1, 8, [1, 1], False, False, 0, 0, bytes.fromhex("7E 7F"))
    row, coded = bytes.fromhex("003F 803F 40BF 4040 003F C03F"), bytes.fromhex("00 00 81 80 00 80 2A 02 80")
    assert codec.encode(row) == coded and codec.decode(coded) == row


def test_worked_examples_of_what_is_left_out():
    split = {"rotate": 1, "residual_bits": 8, "digit_bits": [2], "per_column": False, "closed": 0, "entries": b""}
    signed = row_codecs.PlanesCodec(
        18, 2, **split, listed=True, default=0, first_symbol=0x7E, signed_default=True
    )  # fmt: skip
    row = np.array([0x8000, 0, 0x3F80, 0x8000, 0x8000, 0, 0, 0, 0x8000], "<u2").tobytes()
    assert signed.encode(row) == bytes.fromhex("01 04 00 8D 00 01") and signed.decode(signed.encode(row)) == row
    constants = {"live_columns": [0, 1, 3], "row_template": np.array([0, 0, 0x2A, 0], "<u4").tobytes()}
    held = row_codecs.PlanesCodec(
        16, 4, **split, listed=False, default=0, first_symbol=0x7E, invariant_bits=16, **constants
    )  # fmt: skip
    row = np.array([0x3F000000, 0x3F800000, 0x2A, 0xBF400000], "<u4").tobytes()
    assert held.encode(row) == bytes.fromhex("00 00 81 04") and held.decode(held.encode(row)) == row


# ---- rows as they are met ------------------------------------------------------------------------------------------

EXPONENTS = {
    "bfloat16_rows": (2, 8),
    "float16_rows": (2, 11),
    "float32_rows": (4, 24),
    "float64_rows": (8, 53),
    "half_zeros": (2, 8),
    "few_zeros": (2, 8),
    "mostly_zeros": (4, 24),
    "zeros_and_ones": (4, 23),
    "scaled_columns": (4, 24),
}
INTEGERS = {"small_integers": 1, "rare_bytes": 1, "int64_ids": 8}
DIGIT_BITS = [(), (1,), (4, 4), (2, 2, 2, 3), (1, 1, 2, 3), (3, 3, 3)]


@pytest.mark.parametrize("rows_of, digit_bits, kind", pairwise(list(EXPONENTS), DIGIT_BITS, KINDS), ids=str)
def test_floats(rows_of, digit_bits, kind):
    element_bytes, residual_bits = EXPONENTS[rows_of]
    rows = getattr(make_planes, rows_of)(np.random.default_rng(len(digit_bits)), 6, 257)
    codebook = reference.make_codebook(
        rows,
        element_bytes,
        rotate=1,
        residual_bits=residual_bits,
        digit_bits=digit_bits,
        per_column=kind == "per_column",
        listed=kind == "listed",
    )
    assert_coded_alike(codebook, rows)


@pytest.mark.parametrize("rows_of, digit_bits, kind", pairwise(list(INTEGERS), DIGIT_BITS, KINDS), ids=str)
def test_integers(rows_of, digit_bits, kind):
    rows = getattr(make_planes, rows_of)(np.random.default_rng(len(digit_bits)), 6, 500)
    for residual_bits in (0, 3, 8):
        codebook = reference.make_codebook(
            rows,
            INTEGERS[rows_of],
            residual_bits=residual_bits,
            digit_bits=digit_bits,
            per_column=kind == "per_column",
            listed=kind == "listed",
        )
        assert_coded_alike(codebook, rows)


@pytest.mark.parametrize("name", CASES)
def test_other_rows_of_the_golden_cases(name):
    assert_coded_alike(*make_rows(4000, name))


# ---- rows made to be hard ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element_bytes, digit_bits, kind", pairwise([1, 2, 4, 8], DIGIT_BITS, KINDS), ids=str)
def test_every_split(element_bytes, digit_bits, kind):
    """Every residual width, rotated and not."""
    rng = np.random.default_rng([element_bytes, len(digit_bits), KINDS.index(kind)])
    for residual_bits in range(8 * element_bytes + 1):
        codebook = random_codebook(
            rng, element_bytes, int(rng.integers(1, 80)), residual_bits % 2, residual_bits, digit_bits, kind
        )
        assert_coded_alike(codebook, adversarial_rows(rng, 3, codebook))
        assert_coded_alike(
            dataclasses.replace(codebook, rotate=1 - codebook.rotate), adversarial_rows(rng, 3, codebook)
        )


LATER = [{"invariant_bits"}, {"first_symbol"}, {"signed_default"}, {"live_columns"}, set(LATER_FIELDS)]


@pytest.mark.parametrize(
    "later", slow_but([set(LATER_FIELDS)], LATER), ids=lambda later: "all" if len(later) > 1 else "".join(later)
)
@pytest.mark.parametrize("element_bytes, digit_bits, kind", pairwise([1, 2, 4, 8], DIGIT_BITS, KINDS), ids=str)
def test_what_is_left_out(element_bytes, digit_bits, kind, later):
    rng = np.random.default_rng([element_bytes, len(digit_bits), KINDS.index(kind), len(later)])
    for residual_bits in {0, 3, 7, 8, 8 * element_bytes - 5, 8 * element_bytes - 1, 8 * element_bytes}:
        if residual_bits > 8 * element_bytes:
            continue
        for columns in (1, 9, int(rng.integers(30, 140))):
            codebook = random_codebook(rng, element_bytes, columns, residual_bits % 2, residual_bits, digit_bits, kind)
            codebook = with_later_fields(rng, codebook, later)
            rows = adversarial_rows(rng, 3, codebook)
            rows[2:, : rng.integers(0, 3)] ^= 1
            assert_coded_alike(codebook, rows)
            coded = coded_or_nothing(codebook, rows[1].tobytes())
            for bad in damaged(rng, coded or b"\0" * codebook.row_bytes, 3):
                assert_decoded_alike(codebook, codec_of(codebook), bad)


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 64, 65, 127, 128, 129, 300])
def test_every_k(columns):
    """Every number of listed elements, closed and not: every form of positions that these rows can have."""
    rng = np.random.default_rng(columns)
    codebook = random_codebook(rng, 2, columns, 1, 9, (1, 2), "listed")
    rows = rows_of_k(rng, codebook, range(columns + 1))
    assert_coded_alike(codebook, rows)
    closed = np.where(rows.view("<u2") == codebook.default, codebook.default, codebook.closed).astype("<u2")
    assert_coded_alike(codebook, closed)


@pytest.mark.parametrize("columns", [4096, 8191, 32767, 32768, 65535, 65536])
def test_long_rows(columns):
    rng = np.random.default_rng(columns)
    codebook = random_codebook(rng, 1, columns, 0, 4, (2, 1), "listed")
    counts = [
        0,
        1,
        2,
        5,
        13,
        27,
        60,
        200,
        1000,
        columns // 3,
        columns - 300,
        columns - 20,
        columns - 3,
        columns - 1,
        columns,
    ]
    rows = rows_of_k(rng, codebook, counts)
    assert_coded_alike(codebook, rows)
    assert_coded_alike(codebook, np.where(rows == codebook.default, codebook.default, codebook.closed).astype(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_longest_rows(element_bytes, kind):
    rng = np.random.default_rng([element_bytes, KINDS.index(kind)])
    codebook = random_codebook(rng, element_bytes, 65536 // element_bytes, 1, 3, (1, 1, 1, 1), kind)
    assert_coded_alike(codebook, adversarial_rows(rng, 2, codebook))


@st.composite
def codebooks(draw, max_columns=200):
    element_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    columns = draw(st.one_of(st.integers(1, max_columns), st.sampled_from([127, 128])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    digit_bits = draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    codebook = random_codebook(
        rng,
        element_bytes,
        columns,
        draw(st.integers(0, 1)),
        draw(st.integers(0, 8 * element_bytes)),
        digit_bits,
        draw(st.sampled_from(KINDS)),
    )
    elements = st.one_of(
        st.sampled_from([0, 1, 2 ** (8 * element_bytes) - 1]), st.integers(0, 2 ** (8 * element_bytes) - 1)
    )
    codebook = dataclasses.replace(codebook, default=draw(elements), closed=draw(elements))
    return with_later_fields(rng, codebook) if draw(st.booleans()) else codebook


@given(codebooks(), st.integers(0, 2**32), st.data())
def test_any_codebook(codebook, seed, data):
    rng = np.random.default_rng(seed)
    assert_coded_alike(codebook, adversarial_rows(rng, 2, codebook))
    counts = data.draw(st.lists(st.integers(0, codebook.columns), max_size=3))
    assert_coded_alike(codebook, rows_of_k(rng, codebook, counts))


@given(codebooks(max_columns=24), st.data())
def test_any_row(codebook, data):
    row = data.draw(st.binary(min_size=codebook.row_bytes, max_size=codebook.row_bytes))
    assert_coded_alike(codebook, [np.frombuffer(row, np.uint8)])


# ---- bytes that are no coded row -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_damaged_rows(name):
    codebook, rows = make_rows(5000, name)
    codec, rng = codec_of(codebook), np.random.default_rng(1)
    for row in rows:
        for bad in damaged(rng, coded_or_nothing(codebook, row.tobytes()) or row.tobytes()):
            assert_decoded_alike(codebook, codec, bad)


@pytest.mark.parametrize("name", FEW_COLUMNS)
def test_every_wrong_length_is_refused(name):
    codebook, rows = make_rows(6000, name)
    codec = codec_of(codebook)
    for coded in filter(None, (coded_or_nothing(codebook, row.tobytes()) for row in rows[::3])):
        for wrong in [coded[:size] for size in range(len(coded))] + [coded + b"\0", coded + b"\xff" * 9, coded * 2]:
            with pytest.raises(ValueError, match="corrupt|contradicts"):
                codec.decode(wrong)


@pytest.mark.parametrize("name", slow_but(FEW_COLUMNS[::3], FEW_COLUMNS))
def test_every_bit_flipped(name):
    codebook, rows = make_rows(7000, name)
    codec = codec_of(codebook)
    for row in filter(None, (coded_or_nothing(codebook, row.tobytes()) for row in rows[::6])):
        coded = np.frombuffer(row, np.uint8)
        for bit in range(min(8 * len(coded), 400)):
            changed = coded.copy()
            changed[bit // 8] ^= 1 << bit % 8
            assert_decoded_alike(codebook, codec, changed.tobytes())


@pytest.mark.parametrize("columns", [37, 101, 301, 4097])
@pytest.mark.parametrize("is_listed", [0, 1])
def test_wrong_lists(columns, is_listed):
    """A list of two positions: in order, the wrong way round, equal, and the first one past the row."""
    codebook = reference.Codebook(1, columns, 0, 8, (), False, True, 0, 1, np.zeros((1, 0), np.uint8))
    codec = codec_of(codebook)
    k, size = 2 if is_listed else columns - 2, reference.header_bytes(columns)
    of, low = reference.choose_form(columns, k)
    assert of == ("listed" if is_listed else "not listed")

    def coded(first, second):
        upper = np.zeros(reference.num_upper_bits(2, low, columns), np.uint8)
        upper[[first >> low, 1 + (second >> low)]] = 1
        lows = np.array([first, second]) % 2**low
        return (
            (k | 1 << (8 * size - 1)).to_bytes(size, "little")
            + reference.pack_fields(upper, 1)
            + reference.pack_fields(lows, low)
        )

    row = np.full(columns, 1 - is_listed, np.uint8)
    row[[1, 3]] = is_listed
    assert codec.decode(coded(1, 3)) == row.tobytes()
    for wrong in (coded(3, 1), coded(3, 3), coded(3, columns)):
        with pytest.raises(ValueError, match="corrupt|contradicts"):
            codec.decode(wrong)


@given(codebooks(max_columns=40), st.data())
def test_any_bytes_decode_alike_or_not_at_all(codebook, data):
    codec, size = codec_of(codebook), data.draw(st.integers(0, 2 * codebook.row_bytes + 20))
    assert_decoded_alike(codebook, codec, data.draw(st.binary(min_size=size, max_size=size)))
    k = data.draw(st.integers(0, codebook.columns + 1)) | data.draw(st.sampled_from([0, 0x80, 0x8000]))
    assert_decoded_alike(
        codebook,
        codec,
        k.to_bytes(2, "little")[: reference.header_bytes(codebook.columns)] + data.draw(st.binary(max_size=40)),
    )


@given(codebooks(max_columns=60), st.integers(0, 2**32))
def test_any_codebook_and_damage(codebook, seed):
    rng, codec = np.random.default_rng(seed), codec_of(codebook)
    for row in adversarial_rows(rng, 2, codebook):
        for bad in damaged(rng, coded_or_nothing(codebook, row.tobytes()) or row.tobytes()):
            assert_decoded_alike(codebook, codec, bad)


# ---- arguments -----------------------------------------------------------------------------------------------------

GOOD = {
    "row_bytes": 12,
    "element_bytes": 2,
    "rotate": 1,
    "residual_bits": 8,
    "digit_bits": [1, 1],
    "per_column": False,
    "listed": False,
    "default": 0,
    "closed": 0,
    "entries": b"\x7e\x7f",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"row_bytes": 0},
        {"row_bytes": 13},
        {"row_bytes": 65538},
        {"row_bytes": 2**32 - 2},
        {"element_bytes": 0},
        {"element_bytes": 3, "entries": bytes(4)},
        {"element_bytes": 8, "entries": bytes(16)},
        {"element_bytes": 16, "row_bytes": 48, "residual_bits": 120},
        {"rotate": 2},
        {"residual_bits": 17},
        {"digit_bits": [1, 0, 1]},
        {"digit_bits": [5], "entries": bytes(31)},
        {"digit_bits": [1, 257]},
        {"digit_bits": [1] * 5, "entries": bytes(5)},
        {"digit_bits": [1]},
        {"per_column": True},
        {"per_column": True, "listed": True, "entries": bytes(12)},
        {"default": 65536},
        {"closed": 65536},
        {"entries": b""},
        {"entries": b"\x7e"},
        {"entries": b"\x7e\x7f\x80"},
        {"residual_bits": 7},
    ],
    ids=str,
)
def test_codebooks_that_contradict_themselves(changes):
    row_codecs.PlanesCodec(*GOOD.values())
    with pytest.raises(ValueError):
        row_codecs.PlanesCodec(*(GOOD | changes).values())


@pytest.mark.parametrize("size", [0, 11, 13, 24])
def test_rows_of_another_size(size):
    codec = row_codecs.PlanesCodec(*GOOD.values())
    for method in (codec.encode, codec.coded_bytes):
        with pytest.raises(ValueError):
            method(bytes(size))
