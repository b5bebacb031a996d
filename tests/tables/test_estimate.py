"""What `estimate` says beforehand is what `compress` does; what "auto" takes by itself saves memory or sectors."""

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding, make_tensor, one_hot_rows, spiky_rows
from ibp._rows import estimation, masks, planes
from ibp._rows.geometry import Geometry
from ibp._rows.learning import row_ns

SETS = {
    "BF16 rows of 96 B": lambda: embedding(400, 48, torch.bfloat16),
    "BF16 rows of 128 B": lambda: embedding(400, 64, torch.bfloat16),
    "BF16 rows of 512 B": lambda: embedding(300, 256, torch.bfloat16),
    "FP32 rows of 128 B": lambda: embedding(400, 32),
    "one-hot": lambda: one_hot_rows(300, 60),
    "spiky": lambda: spiky_rows(300, 60),
    "noise": lambda: make_tensor((300, 64), torch.uint8, "random"),
    "rows of 4 B": lambda: embedding(1000, 2, torch.bfloat16),
    "flat": lambda: embedding(40, 1024).reshape(-1),
}
OTHERS = [
    ("BF16 rows of 512 B", {"layout": "packed"}),
    ("BF16 rows of 512 B", {"slot_bytes": 320}),
    ("spiky", {"layout": "packed"}),
    ("spiky", {"slot_bytes": 32}),
    ("rows of 4 B", {"layout": "packed"}),
    ("noise", {"layout": "packed"}),
]


MOST_APART = 0.05  # The savings of a scheme that is not learned are known to this share of the bytes, for many rows.


@pytest.mark.parametrize("name, arguments", [*((name, {}) for name in SETS), *OTHERS], ids=str)
def test_estimates_are_what_compress_does(name, arguments):
    """A sample of a small tensor is the whole tensor. For `ibp`, unless it may be the best scheme, a bound is given."""
    x = SETS[name]()
    estimate = ibp.estimate(x, device="cpu", **arguments)
    assert list(estimate) == ["raw", "ibp", "planes"] and len(estimate) == 3 and estimate["raw"] == 0
    auto = ibp.compress(x, device="cpu", memory="host", **arguments)
    assert auto.scheme == estimate.auto and (repr(estimate.auto) in estimate.advice or "raw rows" in estimate.advice)
    assert auto.scheme == "raw" or auto.nbytes < x.nbytes
    for scheme, expected in estimate.schemes.items():
        table = ibp.compress(x, scheme=scheme, device="cpu", memory="host", **arguments)
        assert estimate[scheme] == expected.savings
        if scheme == "ibp" and estimate.auto != "ibp":
            apart = MOST_APART + 2 / table.num_rows
            assert expected.savings == pytest.approx(table.savings, abs=apart)
            assert expected.memory_savings == pytest.approx(1 - table.nbytes / x.nbytes, abs=apart)
            assert expected.link_bytes / x.nbytes == pytest.approx(table.link_bytes / x.nbytes, rel=0.1, abs=2 * apart)
        elif x.numel() <= estimation._LEAST_ELEMENTS:
            assert expected.stored_bytes == table.stored_bytes and expected.slot_bytes == table.slot_bytes
            assert expected.nbytes == table.nbytes
            near = 0.0 if table.slot_bytes else 0.02  # Where packed rows begin in their sectors is not known.
            assert expected.link_bytes == pytest.approx(table.link_bytes, rel=near)
            assert expected.memory_savings == pytest.approx(1 - table.nbytes / x.nbytes)
        else:
            assert expected.stored_bytes == pytest.approx(table.stored_bytes, rel=0.01)
            assert expected.nbytes == pytest.approx(table.nbytes, rel=0.01)


@pytest.mark.parametrize("layout", ["slots", "packed"])
def test_an_estimate_takes_less_than_compressing(layout, monkeypatch):
    """It learns from fewer elements, and learns no scheme that cannot be the best, as `compress` does."""
    seen, learn = [], planes.learn_planes
    monkeypatch.setattr(
        planes, "learn_planes", lambda rows, *args, **kw: seen.append(len(rows)) or learn(rows, *args, **kw)
    )
    monkeypatch.setattr(masks, "learn_masks", lambda *args, **kw: pytest.fail("masks were learned"))
    for num_rows in (100, 1000, 6000):
        x, before = embedding(num_rows, 256, torch.bfloat16), len(seen)
        estimate, table = ibp.estimate(x, layout=layout, device="cpu"), ibp.compress(x, layout=layout, device="cpu")
        assert estimate.auto == table.scheme == "planes" and 0.2 < estimate["ibp"] < 0.25
        estimated, compressed = seen[before:]
        least, most = 2 * estimation._LEAST_ELEMENTS, 2 * estimation._MOST_ELEMENTS
        assert estimated <= min(most, max(least, compressed // 4)) + 512 and estimated <= compressed


def test_few_long_rows_are_all_looked_at():
    """Symbols that are learned for each column take more than a quarter of 60 rows."""
    x = torch.randn(60, 4000, generator=torch.Generator().manual_seed(0)) * 2.0 ** (torch.arange(4000) % 16)
    table = ibp.compress(x, device="cpu", layout="packed")
    assert table.codebook.per_column
    assert ibp.estimate(x, device="cpu", layout="packed")["planes"] == pytest.approx(table.savings, abs=0.002)


def test_short_rows_that_save_no_sector_are_raw():
    """A third of the bytes saved, and nothing of the memory: three sectors a row all the same, and an index."""
    x = torch.randn(3000, 48).bfloat16()
    estimate = ibp.estimate(x, device="cpu")
    assert estimate["planes"] > 0.3 and estimate.schemes["planes"].nbytes > x.nbytes and estimate.auto == "raw"
    assert "layout='packed'" in estimate.advice and "row_bytes=576" in estimate.advice
    assert ibp.compress(x, device="cpu").nbytes == x.nbytes
    for help_ in ({"layout": "packed"}, {"row_bytes": 576}):
        table = ibp.compress(x, device="cpu", **help_)
        assert table.scheme == "planes" and table.nbytes < 0.75 * x.nbytes


def test_short_fp32_rows():
    x = embedding(1000, 32)
    estimate = ibp.estimate(x, device="cpu")
    assert estimate["planes"] > 0.15 and estimate.auto == "raw" and estimate.schemes["planes"].link_savings == 0
    assert "no 32-byte sector" in estimate.advice and "row_bytes=512" in estimate.advice
    assert ibp.compress(x, device="cpu", row_bytes=512).scheme == "planes"


def test_compress_in_place_goes_by_bytes():
    x = embedding(500, 48, torch.bfloat16)
    table = ibp.compress(x.clone(), device="cpu", memory="host", inplace=True)
    assert table.scheme == "planes" and table.savings > 0.3
    assert_same_bits(table.decompress(), x)


def test_an_estimate_is_printed_as_a_table():
    text = repr(ibp.estimate(embedding(300, 256, torch.bfloat16), device="cpu"))
    for part in (
        "153,600 bytes",
        "rows of 512",
        "'slots'",
        "raw ",
        "ibp ",
        "planes ",
        "memory",
        "link",
        "takes scheme 'planes'",
    ):
        assert part in text, f"{part} is not in {text}"
    assert max(map(len, text.splitlines())) <= 110 and "-0.0%" not in text
    assert repr(ibp.estimate(torch.zeros(0, 7))).endswith("no scheme saves anything.")


def test_estimates_with_a_codebook_are_bytes():
    x = one_hot_rows(100, 60)
    codebook = ibp.codecs.analyze(x, device="cpu")
    found, table = ibp.estimate(x, codebook, device="cpu"), ibp.compress(x, codebook=codebook, device="cpu")
    assert found.stored_bytes == table.stored_bytes and set(found) == {"raw", codebook.scheme}
    assert found.auto == table.scheme and found[codebook.scheme] == pytest.approx(table.savings)
    for arguments in ({"layout": "packed"}, {"slot_bytes": 32}, {"row_bytes": codebook.row_bytes}):
        with pytest.raises(ValueError, match="without a codebook"):
            ibp.estimate(x, codebook, **arguments)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"layout": "diagonal"}, ValueError),
        ({"layout": "packed", "slot_bytes": 32}, ValueError),
        ({"slot_bytes": 33}, ValueError),
        ({"slot_bytes": 32.0}, TypeError),
        ({"row_bytes": True}, TypeError),
    ],
    ids=str,
)
def test_arguments_of_estimate(arguments, error):
    with pytest.raises(error, match=list(arguments)[-1]):
        ibp.estimate(one_hot_rows(50, 60), **arguments)


@pytest.mark.parametrize("row_bytes", [1, 31, 32, 48, 100, 128, 4096])
@pytest.mark.parametrize("num_bytes", [1, 31, 4096, 100_001])
def test_sectors_of_raw_rows(num_bytes, row_bytes):
    geometry = Geometry(torch.Size((num_bytes,)), torch.uint8, row_bytes)
    assert geometry.raw_link_bytes() == geometry.link_bytes(torch.empty(0, dtype=torch.uint16), row_bytes)


def test_time_of_a_row():
    """Raw rows by their sectors, coded ones by those or by their decoder."""
    assert row_ns(None, 128, 128, 128, ibp.calibration.H200) == pytest.approx(128 / 51.4)
    assert row_ns(None, 16, 16, 32, ibp.calibration.H200) == 1.45
    dense = ibp.codecs.analyze(embedding(500, 256, torch.bfloat16), scheme="planes", device="cpu")
    assert row_ns(dense, 512, 341, 352, ibp.calibration.H200) == pytest.approx(352 / (0.9 * 51.4))
    assert (
        row_ns(dense, 128, 86, 96, ibp.calibration.H200)
        == ibp.calibration.H200.pairs.least_row_ns
        > row_ns(None, 128, 128, 128, ibp.calibration.H200)
    )
    masks = ibp.codecs.analyze(one_hot_rows(500, 60), device="cpu")
    assert row_ns(masks, 65536, 6600, 6624, ibp.calibration.H200) == pytest.approx(
        65536 / ibp.calibration.H200.masks.work_per_ns
    )
    listed = ibp.codecs.analyze(spiky_rows(500, 60), scheme="planes", device="cpu")
    assert listed.listed and row_ns(listed, 8192, 4000, 4000, ibp.calibration.H200) == pytest.approx(4000 / 46.26)
    assert row_ns(listed, 4096, 3200, 32, ibp.calibration.H200) == pytest.approx(
        3200 / 4 / ibp.calibration.H200.listed.work_per_ns
    )
