"""Tests of what the benchmarks compute without a GPU: sectors and ideal rates, synthetic tables, savings, CSV files, charts."""

import csv
import math
import types

import numpy as np
import pytest
import torch

import ibp
from benchmarks import charts, cpu, harness, ideal, inputs, ratio, sampling, sets


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


def test_synthetic_sets_are_what_they_are_called():
    found = {(case.name, case.dtype): case.tensors[0] for case in sets.synthetic_sets(32)}
    assert all(x.shape == (32, sets.COLUMNS) and x.dtype == dtype for (_, dtype), x in found.items())
    assert abs(float((found["half zeros", torch.bfloat16] == 0).float().mean()) - 0.5) < 0.02
    assert float(found["clipped normal", torch.float16].min()) == 0
    assert 0 <= int(found["ids below 2^20", torch.int64].min()) <= int(found["ids below 2^20", torch.int64].max()) < 1 << 20
    assert int(found["counts", torch.int32].min()) == 1
    for dtype, low, high in ((torch.int8, -127, 127), (torch.uint8, 1, 255), (torch.int16, -32767, 32767)):
        x = found["quantised weights", dtype]
        assert int(x.min()) == low or int(x.max()) == high
    again = {(case.name, case.dtype): case.tensors[0] for case in sets.synthetic_sets(32)}
    assert all(torch.equal(again[key], x) for key, x in found.items())


def test_shipped_sets_of_savings():
    found = {(case.name, case.dtype): case for case in sets.real_sets(inputs.DATA_DIR)}
    assert found["citeseer", torch.float32].rows == 3327 and found["citeseer", torch.float32].row_bytes == 14812
    assert {dtype for name, dtype in found if name == "pubmed_1060rows"} == {torch.float32, torch.float16, torch.bfloat16}
    one, many = found["stories260k", torch.bfloat16], found["stories260k, codebook a tensor", torch.bfloat16]
    assert len(one.tensors) == 1 and len(many.tensors) == 31 and one.num_bytes == many.num_bytes
    assert torch.equal(torch.cat(many.tensors).view(torch.int16), one.tensors[0].view(torch.int16))
    assert found["K-cache", torch.bfloat16].row_bytes == 320


def tiny_set(rows=200, name="normal 1"):
    return sets.Set(name, tuple(torch.randn(rows, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)))


@pytest.mark.parametrize("method", ratio.OURS)
def test_a_cell_of_ratio(method):
    case = tiny_set()
    cell = ratio.measure_cell(ratio.ours(method), case.tensors, torch.device("cpu"), with_times=True)
    assert 0 < cell.stored_bytes < case.num_bytes and 0 < cell.link_bytes <= case.num_bytes
    assert cell.metadata_bytes > 2 * case.rows and cell.seconds > 0


def test_zstd_cell_of_ratio():
    pytest.importorskip("zstandard")
    x = torch.zeros(40_000, 1)  # 160,000 bytes, three blocks
    cell = ratio.measure_cell(ratio.zstd_blocks, [x, torch.tensor([[1.5]])], torch.device("cpu"), with_times=False)
    assert cell.metadata_bytes == 4 * ratio.BLOCK_INDEX_BYTES and cell.stored_bytes < 100
    assert cell.link_bytes is None and cell.seconds is None


class PlainCodec:
    """Stands in for nvCOMP's: keeps the bytes as they are."""

    made = []

    def __init__(self, **options):
        self.made.append(options)

    def encode(self, array):
        return types.SimpleNamespace(buffer_size=array.nbytes, kept=array)

    def decode(self, coded):
        return coded.kept


def test_nvcomp_cells_of_ratio(monkeypatch):
    monkeypatch.setattr(ratio, "nvcomp", types.SimpleNamespace(Codec=PlainCodec, as_array=lambda x: x))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for dtype, num_floats in ((torch.bfloat16, 1), (torch.float32, 1), (torch.float64, 0), (torch.int8, 0)):
        methods = {name: measure for name, measure in ratio.methods_for(dtype, on_gpu=True).items() if name.startswith("nvcomp ")}
        assert len(methods) == 6 + num_floats
        for measure in methods.values():
            cell = ratio.measure_cell(measure, [torch.ones(3, 5, dtype=dtype)], torch.device("cpu"), with_times=False)
            assert cell.stored_bytes == 15 * dtype.itemsize and cell.metadata_bytes is None
    assert {"algorithm": "ANS", "uncomp_chunk_size": 65536, "data_type": "<f2"} in PlainCodec.made
    assert not any(name.startswith("nvcomp ") for name in ratio.methods_for(torch.bfloat16, on_gpu=False))


def test_ratio_shows_and_judges_savings():
    assert [ratio.show(s) for s in (-0.001, 0.334, 0.875, 0.9975)] == ["-0.1", "33.4", "8.0x", "400x"]
    cells = {("a", "float32"): {"paper": 0.1, "ibp": 0.2, "auto": 0.1995}, ("b", "int8"): {"paper": 0.3, "ibp": 0.2, "auto": -0.1}}
    assert ratio.shortfalls({("a", "float32"): cells["a", "float32"]}, {("a", "float32"): 0.19}) == []
    below = [line.split(", less than ")[1].split(",")[0] for line in ratio.shortfalls(cells, {("a", "float32"): 0.25})]
    assert below == ["its target", "raw rows", "ibp", "paper"]


def lines_of(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_ratio_writes_its_columns_table_and_chart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([tiny_set(), tiny_set(40, "cora")]))
    assert ratio.main(["--device", "cpu", "--quick", "--no-times", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path / "ratio.csv")
    assert ",".join(lines[0]) == "set,dtype,rows,row_bytes,method,savings,link_savings,metadata_bytes,seconds"
    assert [line[4] for line in lines[1:5]] == list(ratio.OURS) and lines[1][:4] == ["normal 1", "float32", "400", "128"]
    assert all(line[8] == "" for line in lines[1:])
    assert "Percent saved" in capsys.readouterr().out
    if charts.plt:
        assert (tmp_path / "ratio.png").exists()


def test_ratio_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    def broken(tensors, device):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([tiny_set()]))
    monkeypatch.setattr(ratio, "methods_for", lambda dtype, on_gpu: {"auto": broken, "planes": ratio.ours("planes")})
    assert ratio.main(["--device", "cpu", "--no-times", "--out", str(tmp_path)]) == 1
    assert "FAILED auto, normal 1 float32: RuntimeError: no such kernel" in capsys.readouterr().out
    assert [line[4] for line in lines_of(tmp_path / "ratio.csv")[1:]] == ["planes"]


def test_sampling_writes_its_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([tiny_set()]))
    assert sampling.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path / "sampling.csv")
    assert ",".join(lines[0]) == "set,dtype,scheme,sample,savings"
    assert [line[2:4] for line in lines[1:]] == [[scheme, str(share)] for scheme in sampling.SCHEMES for share in sampling.SAMPLES]
    assert float(lines[6][4]) > 0.1 and "100%" in capsys.readouterr().out


def test_cpu_writes_its_cases_and_puts_back_what_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inputs, "NORMAL", inputs.NORMAL[:1])
    monkeypatch.setattr(cpu, "data_bytes", lambda run: 1 << 18)
    before = torch.get_num_threads(), ibp._core.cpu_features()
    assert cpu.main(["--quick", "--out", str(tmp_path)]) == 0
    assert (torch.get_num_threads(), ibp._core.cpu_features()) == before
    lines = lines_of(tmp_path / "cpu.csv")
    assert ",".join(lines[0]) == ",".join(harness.COLUMNS)
    arms = ["copy_"] + [f"{scheme}{plain} {verb}" for scheme in cpu.SCHEMES for plain in ("", " plain") for verb in ("decode", "encode")]
    one_thread = [line for line in lines[1:] if line[1] == "normal 0.02, 1 thread"]
    assert [line[2] for line in one_thread][: len(arms)] == arms and float(one_thread[1][6]) > 0.3
    assert len(lines) == 1 + len(one_thread) * len({1, before[0]})
    assert ("lz4 compress" in capsys.readouterr().out) == (cpu.lz4_block is not None)
