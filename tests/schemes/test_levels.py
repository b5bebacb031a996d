"""What codebooks leave out, and levels: what is saved, and that every row comes back, whatever the sample has in
common."""

import pytest
import torch

import ibp
from helpers import assert_same_bits

ROWS, COLUMNS = 512, 1024


def compressed(x, **kwargs):
    table = ibp.compress(x, device="cpu", memory="host", **kwargs)
    assert_same_bits(table.decompress(), x)
    return table


def normal(seed=0):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def dropped(x):
    return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5)


HOLDING = {  # (values, percent saved at least, bits that are not stored)
    "FP32 holding BF16": (lambda: normal().bfloat16().float(), 66.0, 16),
    "FP16 holding BF16": (lambda: normal().bfloat16().half(), 32.0, 3),
    "FP32 holding FP16": (lambda: normal().half().float(), 57.0, 13),
}


@pytest.mark.parametrize("name", HOLDING)
def test_bits_that_all_elements_have_in_common_cost_nothing(name):
    make, percent, invariant_bits = HOLDING[name]
    table = compressed(make())
    assert 100 * table.savings >= percent and table.codebook.invariant_bits == invariant_bits


@pytest.mark.parametrize(
    "dtype, percent", [(torch.bfloat16, 57.0), (torch.float16, 47.5), (torch.float32, 53.5)], ids=str
)
def test_zeros_of_both_signs(dtype, percent):
    table = compressed(dropped(normal()).to(dtype))
    assert 100 * table.savings >= percent and table.codebook.signed_default


def test_constant_columns():
    x = normal().bfloat16()
    x[:, ::4] = x[0, ::4]
    table = compressed(x)
    assert table.codebook.num_constant == COLUMNS // 4 and table.savings >= 0.49
    assert table.savings > compressed(normal().bfloat16()).savings + 0.15


def test_default_rows():
    x = normal().bfloat16()
    x[torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
    assert compressed(x).savings >= 0.64
    x[x[:, 0] == 0] = -1.5
    table = compressed(x)
    assert table.savings >= 0.64 and table.codebook.default == 0xBFC0


@pytest.mark.parametrize("share", [0.001, 0.3])
def test_rows_that_lack_what_the_sample_has_in_common(share):
    """Few of them are stored raw. Where there are many, all rows have a coded form."""
    x = normal().bfloat16().float().repeat(16, 1)
    others = torch.rand(len(x), generator=torch.Generator().manual_seed(3)) < share
    x[others] = normal(1)[0]
    table = compressed(x, scheme="planes")
    assert table.codebook.is_partial == (share < 0.1)
    assert table.savings >= (0.66 if share < 0.1 else 0.16)


def test_a_sample_that_misleads():
    """The sampled rows hold BF16 values, most others do not."""
    x = normal().repeat(4, 1)
    known = ibp.compress(x[:ROWS].bfloat16().float(), scheme="planes", device="cpu", memory="host").codebook
    assert known.is_partial
    table = ibp.compress(x, codebook=known, device="cpu", memory="host")
    assert table.scheme == "raw"
    assert compressed(x, scheme="planes").savings >= 0.16


FAST = {  # percent saved at least
    torch.bfloat16: 24.5,
    torch.float32: 12.0,
    torch.float16: 10.0,
}


@pytest.mark.parametrize("dtype", FAST, ids=str)
def test_level_fast(dtype):
    x = normal().to(dtype)
    table = compressed(x, level="fast")
    assert table.codebook.digit_bits == (4,) and table.codebook.first_symbol is not None
    assert 100 * table.savings >= FAST[dtype]
    assert ibp.codecs.analyze(x, scheme="auto", level="fast", sample=None, device="cpu") == table.codebook
    for row_bytes in (128, None):  # "auto" takes scheme planes even if rows are too short for it to save a sector
        found = ibp.estimate(x, level="fast", device="cpu", row_bytes=row_bytes)
        assert found["planes"] == pytest.approx(table.savings, abs=0.01)
        assert found.auto == compressed(x, level="fast", row_bytes=row_bytes).scheme == "planes"


@pytest.mark.parametrize("dtype", FAST, ids=str)
@pytest.mark.parametrize("zero_rows", [0.0, 0.7])
def test_level_fast_takes_the_run_that_most_elements_have(dtype, zero_rows):
    """Also where a row in fifty is of another scale, as in trained matrices, and where most rows are zeros."""
    generator = torch.Generator().manual_seed(4)
    scales = torch.where(torch.rand(2000, 1, generator=generator) < 0.02, 8.0, 1.0) / 64
    x = torch.randn(2000, 512, generator=generator) * scales
    x[torch.rand(2000, generator=generator) < zero_rows] = 0
    x = x.to(dtype)
    codebook = compressed(x, level="fast").codebook
    whole = x.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    assert codebook.rotate == 1
    num_symbols = 2**codebook.symbol_bits
    symbols = whole[whole != 0] >> codebook.residual_bits - 1 & num_symbols - 1
    inside = torch.bincount(symbols, minlength=num_symbols).unfold(0, 15, 1).sum(1)
    assert len(symbols) - inside[codebook.first_symbol] <= 1.1 * (len(symbols) - inside.max())


def test_level_fast_of_what_it_saves_nothing_of():
    x = dropped(normal()).bfloat16()
    assert compressed(x, level="fast").codebook == compressed(x, scheme="planes").codebook


WRONG = {
    "a level that is none": ({"level": "slow"}, "level is 'slow'"),
    "with masks": ({"level": "fast", "scheme": "ibp"}, "belong to scheme 'planes'"),
    "with clusters": ({"level": "fast", "clusters": 2}, "have no clusters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_levels(name):
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ibp.compress(normal(), device="cpu", memory="host", **arguments)
