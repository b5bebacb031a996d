"""Rows of several tables in one, as they are coded."""

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp._fetch.linear import slot_bytes_for
from ibp._tables.weights import join
from ibp.nn._tables import matrix_table

CPU = torch.device("cpu")
COLUMNS = 256


def matrix(num_rows, seed=0):
    """With rows that overflow their slots, one that is stored raw, and a default row."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(num_rows, COLUMNS, generator=generator).mul(0.02).bfloat16()
    made[5::7, ::9] = 1e-9
    noise = torch.randint(-(2**15), 2**15, (COLUMNS,), generator=generator, dtype=torch.int16)
    made[num_rows // 2] = noise.view(torch.bfloat16)
    made[num_rows // 3] = 0
    return made


def tables():
    first = matrix_table(matrix(100))
    book = {"codebook": first.codebook, "slot_bytes": first.slot_bytes}
    others = [ibp.compress(matrix(rows, seed), **book) for rows, seed in ((64, 1), (33, 2))]
    return [first, *others], [matrix(100), matrix(64, 1), matrix(33, 2)]


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 100)],
        [(0, 100), (0, 64), (0, 33)],
        [(3, 100), (1, 63), (0, 32)],
        [(32, 64), (64, 64), (31, 33)],
        [(99, 100), (0, 1), (5, 6)],
        [(7, 7)],
    ],
)
@pytest.mark.parametrize("is_saved", [False, True])
def test_rows_keep_their_bits(cuts, is_saved, tmp_path):
    """Also of a file, whose overflow is padded."""
    held, plain = tables()
    if is_saved:
        ibp.save(tmp_path / "rows.safetensors", {str(number): table for number, table in enumerate(held)})
        held = list(ibp.open(tmp_path / "rows.safetensors").values())
    made = join([(table, *cut) for table, cut in zip(held, cuts)], CPU)
    wanted = torch.cat([rows[slice(*cut)] for rows, cut in zip(plain, cuts)])
    assert_same_bits(made.decompress(check=True), wanted)
    assert made.slot_bytes == held[0].slot_bytes and made.codebook is held[0].codebook
    if len(wanted):
        ids = torch.randperm(len(wanted))
        assert_same_bits(made[ids], wanted[ids])


def test_a_whole_table_is_moved():
    (table, *_), _ = tables()
    assert join([(table, 0, 100)], CPU) is table


@pytest.mark.parametrize(
    "other",
    [
        lambda rows: matrix_table(rows.mul(1 << 20)),  # another codebook
        lambda rows: ibp.compress(rows, level="fast", layout="packed"),
        lambda rows: ibp.compress(rows, level="fast", slot_bytes=480),
        lambda rows: ibp.compress(rows, level="fast", row_bytes=4096),
        lambda rows: ibp.compress(rows, scheme="raw"),
        lambda rows: matrix_table(rows.half()),
    ],
)
def test_tables_of_other_forms(other):
    (first, *_), (rows, *_) = tables()
    assert first.slot_bytes == slot_bytes_for(COLUMNS) < 480
    table = other(rows)
    assert join([(first, 0, 100), (table, 0, 100)], CPU) is None


def test_tables_that_are_not_cut():
    _, (rows, *_) = tables()
    for options in ({"layout": "packed"}, {"row_bytes": 4096}, {"scheme": "raw"}):
        table = ibp.compress(rows, **options)
        assert join([(table, 0, 4)], CPU) is None
    table = ibp.compress(rows, level="fast", slot_bytes=384)
    kept = table.clone()
    table.update_(torch.tensor([1]), rows[:1])  # rows have a place each in the overflow
    assert join([(table, 0, 4)], CPU) is None
    assert join([(kept, 0, 4)], CPU) is not None
    assert join([(kept, 0, 4), (table, 0, 4)], CPU) is None
