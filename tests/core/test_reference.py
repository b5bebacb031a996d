"""The numpy reference against FORMAT.md's worked example and against itself."""

import numpy as np
import pytest

import reference

EXAMPLE = reference.make_codebook(bytes.fromhex("FFF00000FF00"), bytes.fromhex("004000003C00"), chunk_bytes=2)
ROW = bytes.fromhex("0045EFBE3C12")


def test_worked_example_codebook():
    assert EXAMPLE.palette.tobytes() == bytes.fromhex("FFF00040 00000000 FF003C00")
    assert EXAMPLE.palette.shape == (3, 2, 2)
    assert EXAMPLE.index.tolist() == [0, 1, 2] and EXAMPLE.index.dtype == np.uint8
    assert EXAMPLE.flagged().tolist() == [True, False, True]


def test_worked_example_row():
    assert reference.encode_row(EXAMPLE, ROW) == bytes.fromhex("D7BBAF04")
    assert reference.decode_row(EXAMPLE, bytes.fromhex("D7BBAF04")) == ROW


def test_worked_example_row_that_stays_raw():
    row = bytes.fromhex("0145EFBE3C12")
    assert len(reference.encode_row(EXAMPLE, row)) == 6
    table = reference.encode_table(ROW + row, 6, 6, EXAMPLE)
    assert table.lengths.tolist() == [4, 0]
    assert table.slots.tobytes() == bytes.fromhex("D7BBAF040000") + row


def test_worked_example_packed():
    table = reference.encode_table(ROW * 3, 6, 0, EXAMPLE)
    assert table.slots.size == 0 and table.bases.tolist() == [0]
    assert table.overflow.tobytes() == bytes.fromhex("D7BBAF04" * 3)


@pytest.mark.parametrize("coded", ["", "D7BBAF", "D7BBAF0400", "D6BBAF04", "D4BBAF04"])
def test_wrong_lengths_are_corrupt(coded):
    with pytest.raises(reference.CorruptRow):
        reference.decode_row(EXAMPLE, bytes.fromhex(coded))


def test_participation_bits_are_believed():
    """Clearing chunk 2's bit asks for 8 more kept bits: 38 of them fill five bytes."""
    decoded = reference.decode_row(EXAMPLE, bytes.fromhex("D5BBAF0400"))
    assert decoded[:4] == ROW[:4] and decoded != ROW


@pytest.mark.parametrize("flag_all", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("row_bytes", [1, 2, 7, 8, 33, 64, 100])
def test_round_trip(row_bytes, chunk_bytes, flag_all):
    rng = np.random.default_rng([row_bytes, chunk_bytes, flag_all])
    mask = rng.integers(0, 256, row_bytes, np.uint8) | rng.integers(0, 256, row_bytes, np.uint8)
    mask[rng.random(row_bytes) < 0.3] = 0
    bitval = rng.integers(0, 256, row_bytes, np.uint8) & mask
    codebook = reference.make_codebook(mask, bitval, chunk_bytes, flag_all)
    assert all(np.array_equal(a, b) for a, b in zip(reference.masks_of(codebook), (mask, bitval)))
    rows = rng.integers(0, 256, (70, row_bytes), np.uint8)
    rows = np.where(rng.random(rows.shape) < 0.9, rows & ~mask | bitval, rows).astype(np.uint8)
    data = rows.tobytes()[: 70 * row_bytes - row_bytes // 2]
    for slot_bytes in {0, row_bytes} | set(range(32, row_bytes, 32)):
        table = reference.encode_table(data, row_bytes, slot_bytes, codebook)
        assert reference.decode_table(table) == data
