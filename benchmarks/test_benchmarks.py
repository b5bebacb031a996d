"""Tests of what the benchmarks compute without a GPU: sectors and ideal rates, synthetic tables, CSV files, charts."""

import csv
import math
import types

import numpy as np
import pytest
import torch

from benchmarks import charts, harness, ideal, inputs


def make_table(lengths, *, num_rows, row_bytes, slot_bytes, num_bytes=None, offset=0):
    """Only what ideal.py reads of a table, indexed as FORMAT.md section 3 says."""
    num_bytes = num_rows * row_bytes if num_bytes is None else num_bytes
    stored = [n or min(row_bytes, num_bytes - r * row_bytes) for r, n in enumerate(lengths or [0] * num_rows)]
    bases, end = [], 0
    for r, n in enumerate(stored):
        if r % 32 == 0:
            bases.append(end)
        part = max(0, n - slot_bytes)
        end += part if slot_bytes == 0 else -(-part // 32) * 32
    aligned = torch.empty(1 << 20, dtype=torch.uint8)
    aligned = aligned[-aligned.data_ptr() % 64:]
    return types.SimpleNamespace(
        shape=(num_bytes,), dtype=torch.uint8, num_rows=num_rows, row_bytes=row_bytes, slot_bytes=slot_bytes,
        lengths=torch.tensor(lengths, dtype=torch.uint16), bases=torch.tensor(bases if end else [], dtype=torch.int64),
        slots=aligned[offset:], overflow=aligned[2 * offset:]), stored


def sectors_by_bytes(table, stored, row):
    """Row by row and byte by byte: the sectors of every byte that a fetch of one row reads."""
    sectors = {("slots", (table.slots.data_ptr() + row * table.slot_bytes + k) // 32)
               for k in range(min(stored[row], table.slot_bytes))}
    part = max(0, stored[row] - table.slot_bytes)
    if part:
        start = int(table.bases[row // 32])
        for q in range(row // 32 * 32, row):
            before = max(0, stored[q] - table.slot_bytes)
            start += before if table.slot_bytes == 0 else -(-before // 32) * 32
        sectors |= {("overflow", (table.overflow.data_ptr() + start + k) // 32) for k in range(part)}
    return len(sectors)


@pytest.mark.parametrize("offset", [0, 4, 31])
@pytest.mark.parametrize("row_bytes, slot_bytes", [(100, 32), (100, 100), (100, 0), (256, 96), (256, 256), (37, 37)])
def test_row_sectors_counts_every_byte(row_bytes, slot_bytes, offset):
    rng = np.random.default_rng(row_bytes + slot_bytes)
    num_rows, num_bytes = 70, 70 * row_bytes - 5
    lengths = [int(n) for n in rng.integers(0, row_bytes - 5, num_rows)]
    table, stored = make_table(lengths, num_rows=num_rows, row_bytes=row_bytes, slot_bytes=slot_bytes, num_bytes=num_bytes,
                               offset=offset)
    assert ideal.row_sectors(table).tolist() == [sectors_by_bytes(table, stored, r) for r in range(num_rows)]
    ids = torch.tensor([69, 0, 33, 33], dtype=torch.int32)
    assert ideal.row_sectors(table, ids).tolist() == [sectors_by_bytes(table, stored, r) for r in ids.tolist()]


def test_raw_table_reads_whole_rows():
    table, stored = make_table([], num_rows=3, row_bytes=64, slot_bytes=64, num_bytes=150)
    assert ideal.stored_row_bytes(table).tolist() == stored == [64, 64, 22]
    assert ideal.row_sectors(table).tolist() == [2, 2, 1]


def test_ideal_rates():
    sectors = torch.full((1000,), 16)  # rows of 512 B, raw: the link's rate, whatever a memset does
    assert ideal.gather_gbps(512_000, sectors, 4000) == pytest.approx(51.4)
    assert ideal.gather_gbps(1_024_000, sectors, 4000) == pytest.approx(102.8)  # half saved
    assert ideal.gather_gbps(512_000, sectors, 10) == pytest.approx(10)  # the writing binds
    ones = torch.ones(1000, dtype=torch.int64)  # a row costs 1.45 ns, however short
    assert ideal.link_seconds(ones) == pytest.approx(1.45e-6)
    assert ideal.link_seconds(4 * ones) == pytest.approx(1000 * 128 / 51.4e9)
    assert ideal.device_gbps(100, 200, 2000) == pytest.approx(2000)  # nothing saved: a copy
    assert ideal.device_gbps(100, 110, 2000, memset_gbps=3000) == pytest.approx(3000)


@pytest.mark.parametrize("row_bytes", inputs.ROW_BYTES)
@pytest.mark.parametrize("savings", inputs.SAVINGS)
def test_synthetic_rows_save_what_was_asked(row_bytes, savings):
    mask, bitval = inputs.synthetic_mask(row_bytes, savings)
    assert not (bitval & ~mask).any()
    num_fixed = int(np.unpackbits(mask.numpy()).sum())
    num_flags = int((mask.view(torch.int32) != 0).sum())
    coded_bytes = math.ceil((num_flags + 8 * row_bytes - num_fixed) / 8)
    assert 1 - coded_bytes / row_bytes == pytest.approx(savings, abs=max(0.005, 1 / row_bytes))
    x = inputs.agreeing_rows(50, mask, bitval, "cpu")
    assert x.dtype == torch.int32 and x.shape == (50, row_bytes // 4)
    assert ((x.view(torch.uint8) & mask) == bitval).all()
    assert (x[0] != x[1]).any()


def test_synthetic_mask_refuses_the_impossible():
    for row_bytes, savings in ((128, 0.99), (127, 0.5), (128, -0.2)):
        with pytest.raises(ValueError):
            inputs.synthetic_mask(row_bytes, savings)


def test_real_sets_that_are_there(tmp_path, capsys):
    np.savez(tmp_path / "cora.npz", data=np.float32([1, 2]), indices=np.uint16([2, 0]), indptr=np.int32([0, 1, 1, 2]), shape=[3, 4])
    np.savez(tmp_path / "stories260k.npz", weights_bf16=np.uint16([[0x3F80, 0x4000]]))
    found = dict(inputs.real_sets(tmp_path))
    assert list(found) == ["cora", "LLM weights"]
    assert found["cora"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [2, 0, 0, 0]] and found["cora"].dtype == torch.float32
    assert found["LLM weights"].tolist() == [[1, 2]] and found["LLM weights"].dtype == torch.bfloat16
    assert "citeseer.npz, left out" in capsys.readouterr().out
    assert inputs.replicated(found["cora"], 5, "cpu")[:, 0].tolist() == [0, 0, 2, 0, 0]


def test_check_bits_sees_every_bit():
    nan = torch.tensor([0x7FC00001, 1], dtype=torch.int32).view(torch.float32)
    harness.check_bits(nan.clone(), nan, "same")
    for other in (torch.tensor([0x7FC00002, 1], dtype=torch.int32).view(torch.float32), nan[:1], nan.double()):
        with pytest.raises(AssertionError):
            harness.check_bits(other, nan, "other")
    with pytest.raises(AssertionError):
        harness.check_bits(torch.tensor([-0.0]), torch.tensor([0.0]), "sign")


def run_on_cpu(tmp_path, name="gather"):
    return harness.Run(name, harness.parse_args(["--device", "cpu", "--quick", "--out", str(tmp_path)]))


def test_run_writes_the_columns_and_goes_on_after_a_failure(tmp_path, capsys):
    run = run_on_cpu(tmp_path)
    same = dict(rows=5, row_bytes=128, dtype=torch.bfloat16, gbps=50.0, ideal_gbps=100.0)
    with run.cell("broken"):
        raise RuntimeError("no such kernel")
    run.add(case="synthetic 50%", arm="ibp slots", savings=0.5, sms=None, **same)
    run.add(case="synthetic", arm="cpu index + copy", savings=0.0, sms=0, **same)
    assert run.finish() == 1
    printed = capsys.readouterr().out
    assert "FAILED broken: RuntimeError: no such kernel" in printed and "50 (50)" in printed
    with open(tmp_path / "gather.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert ",".join(lines[0]) == ("benchmark,case,arm,rows,row_bytes,dtype,savings,gbps,ideal_gbps,sms,gpu,torch,cuda,commit")
    assert lines[1][:9] == ["gather", "synthetic 50%", "ibp slots", "5", "128", "bfloat16", "0.5000", "50", "100"]
    assert len(lines) == 3


def test_timing_rotates_and_passes_the_cache(tmp_path):
    run = run_on_cpu(tmp_path)
    called = []
    assert run.seconds([lambda: called.append(0), lambda: called.append(1)]) >= 0
    assert set(called) == {0, 1} and len(called) == 2 + harness.MAX_REPEATS
    assert run.rotation(run.l2_bytes) == 4 and run.rotation(1 << 40) == 2 and run.rotation(1) == harness.MAX_ROTATION


def test_a_long_call_is_timed_once(tmp_path, monkeypatch):
    run, called = run_on_cpu(tmp_path), []
    monkeypatch.setattr(run, "_wall_seconds", lambda call: call() or 5.0)
    assert run.seconds([lambda: called.append(0)]) == 5.0 and len(called) == 2


def test_events_give_the_median(tmp_path, monkeypatch):
    times = iter([3.0, 1.0, 2.0])
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: next(times))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    assert run_on_cpu(tmp_path)._event_seconds([lambda: None], 3) == pytest.approx(2e-3)


def test_commit_from_the_environment_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setenv("IBP_COMMIT", "abc123")
    assert harness.commit_id() == "abc123"


def test_charts_from_csv(tmp_path):
    pytest.importorskip("matplotlib")
    gather, codec = run_on_cpu(tmp_path), run_on_cpu(tmp_path, "codec")
    for row_bytes in (128, 1024):
        same = dict(rows=10, row_bytes=row_bytes, dtype=torch.int32, gbps=50.0, ideal_gbps=100.0)
        gather.add(case="synthetic", arm="raw rows", savings=0.0, sms=132, **same)
        gather.add(case="synthetic 50%", arm="ibp slots", savings=0.5, sms=132, **same)
        gather.add(case="cora", arm="ibp slots", savings=0.5, sms=132, **same)
        codec.add(case="synthetic 50%", arm="decode", savings=0.5, sms=132, **same)
    codec.add(case="device", arm="copy_", savings=0.0, sms=132, **same)
    charts.draw(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"gather.png", "gather_real.png", "codec.png"}
