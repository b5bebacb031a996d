"""Reports of what is in tables: the parts of their bytes, and what their bits do."""

import re

import numpy as np
import pytest
import torch

import ibp
import row_codecs
from golden import make_planes
from helpers import embedding, make_tensor, one_hot_rows, planes_codebook, spiky_rows
from ibp._cli import report
from ibp._rows.handle import spread_bytes
from ibp.checkpoints._source import loaded_tensor

# Parts of a table that are none of its coded rows.
OTHER_PARTS = {"raw rows", "index", "unused room"}


def rows_of(x):
    return np.ascontiguousarray(x.view(torch.uint8).numpy()).reshape(len(x), -1)


@pytest.mark.parametrize("name", make_planes.CASES)
def test_parts_of_coded_rows_of_planes_add_up(name):
    codebook, rows, coded, _ = make_planes.load(name)
    with_form = np.frombuffer(b"".join(row for row, c in zip(rows, coded) if c), np.uint8).reshape(
        -1, codebook.row_bytes
    )
    split = report.split_rows(with_form, planes_codebook(codebook), 1)
    assert sum(split.parts.values()) == sum(map(len, coded))
    assert (split.left_out >= 0).all() and (split.left_out + split.ranked <= 1 + 1e-9).all()


@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("flag_all", [False, True])
def test_parts_of_coded_rows_of_masks_add_up(chunk_bytes, flag_all):
    rows = rows_of(make_tensor((40, 13), torch.int16, "narrow"))
    mask = torch.from_numpy(np.random.default_rng(0).choice([0, 0x80, 0xFC, 0xFF], 26).astype(np.uint8))
    bitval = mask & torch.from_numpy(rows[0])
    codec = row_codecs.RowCodec(mask.numpy(), bitval.numpy(), chunk_bytes, flag_all)
    split = report.split_rows(rows, ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes, flag_all), 2)
    assert sum(split.parts.values()) == sum(codec.coded_bytes(row) for row in rows)
    assert split.parts["participation bits"] == codec.num_flags * len(rows) // 8


TABLES = {
    "planes": (embedding(300, 96, torch.bfloat16), {"scheme": "planes"}),
    "ibp": (embedding(300, 96, torch.bfloat16), {"scheme": "ibp"}),
    "listed": (spiky_rows(200, 250), {"scheme": "planes"}),
    "closed": (one_hot_rows(200, 250), {"scheme": "planes"}),
    "packed": (embedding(333, 64), {"layout": "packed"}),
    "in place": (embedding(100, 64), {"scheme": "ibp", "slot_bytes": 256}),
    "float8": (embedding(300, 96).to(torch.float8_e4m3fn), {"scheme": "planes"}),
    "short last row": (make_tensor((1001,), torch.int32), {"row_bytes": 64, "layout": "packed"}),
    "rows of odd bytes": (make_tensor((100, 13), torch.float64), {"row_bytes": 13, "scheme": "ibp"}),
    "complex": (torch.complex(embedding(50, 8), embedding(50, 8, seed=1)), {}),
    "clusters": (torch.cat([embedding(99, 64), 1e9 * embedding(99, 64)]), {"clusters": 3, "layout": "packed"}),
    "clusters in slots": (torch.cat([embedding(99, 64), 1e9 * embedding(99, 64)]), {"clusters": 2}),
    "raw": (make_tensor((30, 40), torch.uint8, "random"), {}),
    "zeros": (torch.zeros(40, 100), {}),
    "empty": (torch.empty(0, 7), {}),
    "scalar": (torch.tensor(3.0), {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_reports_of_whole_tables_are_exact(name):
    x, options = TABLES[name]
    table = ibp.compress(x, memory="host", **options)
    found = report.report_table(name, table)
    coded = sum(size for part, size in found.parts.items() if part not in OTHER_PARTS)
    assert coded + found.parts.get("raw rows", 0) + found.codebook_bytes == table.stored_bytes
    assert found.stored_bytes == sum(found.parts.values()) == spread_bytes(table) + table.index_bytes
    assert not found.is_sampled and sum(found.lengths) == table.num_rows == found.num_rows
    assert len(found.entropy) in (0, len(found.left_out)) and found.scheme == table.scheme


def test_parts_of_clusters_are_of_their_own_codebooks():
    x, options = TABLES["clusters"]
    table = ibp.compress(x, memory="host", **options)
    found = report.report_table("x", table)
    split = report.split_table(table, rows_of(x), np.arange(len(x)))
    lengths = table.lengths.numpy().astype(np.int64)
    assert found.clusters == len(table.codebook) and (lengths > 0).all()
    assert sum(split.parts.values()) == lengths.sum()
    assert split.parts["cluster numbers"] == len(x)


@pytest.mark.parametrize("name", ["planes", "ibp", "listed", "clusters", "clusters in slots", "raw", "empty"])
def test_reports_of_tables_on_a_gpu(cuda, name):
    x, options = TABLES[name]
    table = ibp.compress(x, memory="host", device="cpu", **options)
    assert report.report_table(name, table.to(cuda)) == report.report_table(name, table)


def test_rows_are_counted_in_blocks(monkeypatch):
    table = ibp.compress(spiky_rows(200, 250), memory="host")
    found = report.report_table("x", table)
    monkeypatch.setattr(report, "_BLOCK_ROWS", 7)
    assert report.report_table("x", table) == found


def test_rows_that_have_changed_are_counted():
    table = ibp.compress(spiky_rows(200, 250), memory="host")
    table.update_(torch.arange(50), 2 * spiky_rows(50, 250, seed=1))
    found = report.report_table("x", table)
    assert found.stored_bytes == sum(found.parts.values()) == spread_bytes(table) + table.index_bytes
    assert found.codebook_bytes == table.codebook.nbytes


@pytest.mark.parametrize("layout", ["slots", "packed"])
def test_reports_of_large_tables_are_estimates(layout, monkeypatch):
    monkeypatch.setattr(report, "SAMPLE_BYTES", 1 << 16)
    x = embedding(5000, 100, torch.bfloat16)
    table = ibp.compress(x, layout=layout, scheme="planes", memory="host")
    found = report.report_table("x", table)
    assert found.is_sampled and 32 <= found.sampled_rows < 500
    assert found.stored_bytes == sum(found.parts.values())
    monkeypatch.undo()
    exact = report.report_table("x", table)
    assert not exact.is_sampled and found.parts.keys() == exact.parts.keys()
    assert all(abs(found.parts[part] - size) <= 0.02 * table.stored_bytes for part, size in exact.parts.items())


def test_samples_are_spread_over_the_table():
    for num_rows, row_bytes in ((100_000, 200), (5000, 65536), (40_000, 100), (33, 1 << 16)):
        runs = report.sample_runs(num_rows, row_bytes)
        assert all(0 <= first < last <= num_rows for first, last in runs)
        assert all(before[1] <= after[0] for before, after in zip(runs, runs[1:]))
        assert runs[-1][1] > 0.9 * num_rows and sum(last - first for first, last in runs) >= 32


@pytest.mark.parametrize("kind", ["rows", "flat", "clusters"])
def test_estimates_are_what_compressing_gives(kind, monkeypatch):
    monkeypatch.setattr(report, "SAMPLE_BYTES", 1 << 17)
    options = {"flat": {"row_bytes": 4096}, "clusters": {"clusters": 2, "scheme": "planes"}}.get(kind, {})
    x = torch.cat([embedding(2000, 100, torch.bfloat16), 1e6 * embedding(2001, 100, torch.bfloat16)])
    table = ibp.compress(x, layout="packed", memory="host", **options)
    found = report.report_estimate(loaded_tensor("x", x, ""), table.codebook)
    assert found.is_sampled and found.kind == "estimate" and found.scheme == table.scheme
    assert found.savings == pytest.approx(1 - (table.stored_bytes + table.index_bytes) / x.nbytes, abs=0.01)
    assert found.num_rows == table.num_rows and found.original_bytes == x.nbytes
    assert sum(found.lengths) == pytest.approx(table.num_rows, abs=32)


def test_estimates_of_few_rows_are_exact():
    x = embedding(33, 100)
    table = ibp.compress(x, layout="packed", row_bytes=1024, memory="host")
    found = report.report_estimate(loaded_tensor("x", x, ""), table.codebook)
    exact = report.report_table("x", table)
    assert {**found.parts, "unused room": 0} == {**exact.parts, "unused room": 0}
    assert found.lengths == exact.lengths and not found.is_sampled


@pytest.mark.parametrize("x", [torch.empty(0, 3), torch.tensor(1.5), torch.arange(7)], ids=["empty", "0-D", "short"])
def test_plain_tensors_are_reported(x):
    found = report.report_plain(loaded_tensor("x", x, ""))
    assert found.shape == tuple(x.shape) and found.original_bytes == x.nbytes == found.stored_bytes
    assert found.savings == 0 and len(found.entropy) == (8 * x.itemsize if x.numel() else 0)


def test_entropy_of_bits_begins_with_the_most_significant():
    rows = rows_of(torch.tensor([[0], [-1], [1], [-2]], dtype=torch.int16))
    assert report.bit_entropy(rows, 2) == [1.0] * 16
    halves = rows_of(torch.tensor([[0x4000], [0]], dtype=torch.int16))
    assert report.bit_entropy(halves, 2) == [0.0, 1.0, *[0.0] * 14]


def test_bits_of_bfloat16_are_ranked_exponents():
    found = report.report_table("x", ibp.compress(embedding(300, 96, torch.bfloat16), scheme="planes", memory="host"))
    assert found.ranked == [0.0, *[1.0] * 8, *[0.0] * 7] and found.left_out == [0.0] * 16
    assert re.fullmatch(r"plane 0: 2\^-[5678]", found.entries[0][1]) and sum(
        share for _, _, share in found.entries
    ) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
def test_exponents_are_named_by_their_powers(dtype):
    found = report.report_table("x", ibp.compress(embedding(200, 100).to(dtype), scheme="planes", memory="host"))
    assert [meaning for _, meaning, _ in found.entries[:2]] == ["plane 0: 2^-6", "plane 0: 2^-7"]  # of N(0, 0.02)
