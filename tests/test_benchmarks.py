"""What the benchmarks compute without a GPU: sectors, ideal rates, tables, savings, CSVs, targets, charts, claims."""

import contextlib
import csv
import math
import os
import re
import signal
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import ibp
from benchmarks import __main__ as suite
from benchmarks import (
    activations,
    adamw,
    changes,
    charts,
    checkpoints,
    claims,
    codec,
    compress,
    cpu,
    deltas,
    encode_into,
    families,
    gather,
    gnn,
    gnn_parallel,
    harness,
    ideal,
    inputs,
    large_table,
    linear,
    overlap,
    ratio,
    sampling,
    scattered,
    sets,
    small_calls,
    spill,
    stream,
)
from benchmarks.cpu_gather import PipelinedGather


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
    aligned = aligned[-aligned.data_ptr() % 64 :]
    return types.SimpleNamespace(
        shape=(num_bytes,),
        dtype=torch.uint8,
        num_rows=num_rows,
        row_bytes=row_bytes,
        slot_bytes=slot_bytes,
        lengths=torch.tensor(lengths, dtype=torch.uint16),
        bases=torch.tensor(bases if end else [], dtype=torch.int64),
        slots=aligned[offset:],
        overflow=aligned[2 * offset :],
    ), stored


def sectors_by_bytes(table, stored, row):
    """Row by row and byte by byte: the sectors of every byte that a fetch of one row reads."""
    sectors = {
        ("slots", (table.slots.data_ptr() + row * table.slot_bytes + k) // 32)
        for k in range(min(stored[row], table.slot_bytes))
    }
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
    table, stored = make_table(
        lengths, num_rows=num_rows, row_bytes=row_bytes, slot_bytes=slot_bytes, num_bytes=num_bytes, offset=offset
    )
    assert ideal.row_sectors(table).tolist() == [sectors_by_bytes(table, stored, r) for r in range(num_rows)]
    ids = torch.tensor([69, 0, 33, 33], dtype=torch.int32)
    assert ideal.row_sectors(table, ids).tolist() == [sectors_by_bytes(table, stored, r) for r in ids.tolist()]


def test_raw_table_reads_whole_rows():
    table, stored = make_table([], num_rows=3, row_bytes=64, slot_bytes=64, num_bytes=150)
    assert ideal.stored_row_bytes(table).tolist() == stored == [64, 64, 22]
    assert ideal.row_sectors(table).tolist() == [2, 2, 1]


def test_a_default_row_reads_nothing():
    table, _ = make_table([10, 64, 0], num_rows=3, row_bytes=64, slot_bytes=64)
    assert ideal.stored_row_bytes(table).tolist() == [10, 0, 64]
    assert ideal.row_sectors(table).tolist() == [1, 0, 2]


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
    assert ideal.tensor_gbps(300, 200) == pytest.approx(1.5 * 55.4)


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
    np.savez(
        tmp_path / "cora.npz",
        data=np.float32([1, 2]),
        indices=np.uint16([2, 0]),
        indptr=np.int32([0, 1, 1, 2]),
        shape=[3, 4],
    )
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


def run_on_cpu(tmp_path, name="gather", extra_columns=()):
    return harness.Run(name, harness.parse_args(["--device", "cpu", "--quick", "--out", str(tmp_path)]), extra_columns)


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
    assert ",".join(lines[0]) == (
        "benchmark,case,arm,rows,row_bytes,dtype,savings,gbps,ideal_gbps,sms,gpu,torch,cuda,commit"
    )
    assert lines[1][:9] == ["gather", "synthetic 50%", "ibp slots", "5", "128", "bfloat16", "0.5000", "50", "100"]
    assert len(lines) == 3


def test_a_stopped_run_leaves_and_prints_what_it_measured(tmp_path, capsys):
    run = run_on_cpu(tmp_path)
    run.add(case="c", arm="a", rows=1, row_bytes=1, dtype=torch.uint8, savings=0.0, gbps=1.5, ideal_gbps=3.0, sms=0)
    with pytest.raises(SystemExit) as stopped, run.cell("a long one"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert stopped.value.code == 1 and len(lines_of(tmp_path / "gather.csv")) == 2
    printed = capsys.readouterr().out
    assert "1.5 (50)" in printed and "FAILED stopped before its end" in printed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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


@pytest.mark.parametrize("in_repository", [False, True])
def test_commit_from_the_environment(in_repository, tmp_path, monkeypatch):
    if not in_repository:
        monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setenv("IBP_COMMIT", "abc123")
    assert harness.commit_id() == "abc123"


def test_no_commit_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.delenv("IBP_COMMIT", raising=False)
    assert harness.commit_id() == "unknown"


# ---- memory --------------------------------------------------------------------------------------------------------


def memory_row(**changed):
    same = {
        "case": "normal",
        "arm": "planes slots",
        "row_bytes": 256,
        "dtype": "bfloat16",
        "peak_bytes": 1 << 20,
        "output_bytes": 1 << 26,
        "index_bytes": 1 << 20,
        "original_bytes": 1 << 27,
        "gpu": "NVIDIA H200",
        "benchmark": "gather",
        "commit": "0",
    }
    return same | changed


def test_memory_is_recorded_beside_that_of_other_scripts(tmp_path):
    with open(tmp_path / "memory.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, harness.MEMORY_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([memory_row(benchmark="codec"), memory_row(benchmark="gather")])
    run, x = run_on_cpu(tmp_path), torch.zeros(64, 64)
    table = ibp.compress(x, scheme="ibp")
    result, peak_bytes = run.peak_bytes(lambda: ibp.decompress(table))
    assert torch.equal(result, x) and peak_bytes is None
    run.add_memory(
        case="zeros",
        arm="decode",
        row_bytes=256,
        dtype=x.dtype,
        peak_bytes=peak_bytes,
        output_bytes=16384,
        original_bytes=16384,
        table=table,
    )
    lines = lines_of(tmp_path / "memory.csv")
    assert lines[0] == harness.MEMORY_COLUMNS and [line[0] for line in lines[1:]] == ["codec", "gather"]
    words = table.codebook.words(torch.device("cpu"))
    assert (
        int(lines[2][7]) == harness.metadata_bytes(table, "cpu") == table.index_bytes + 4 * words.numel()
        and lines[2][5] == ""
    )


def test_peak_is_counted_beyond_the_result(tmp_path, monkeypatch):
    run = run_on_cpu(tmp_path)
    monkeypatch.setattr(run, "on_gpu", True)
    monkeypatch.setattr(run, "sync", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    out = types.SimpleNamespace(is_cuda=True, numel=lambda: 100, element_size=lambda: 4)
    assert run.peak_bytes(lambda: out, out=out)[1] == 4000
    assert run.peak_bytes(lambda: [out, out])[1] == 3200


def test_memory_is_judged():
    assert list(harness.memory_shortfalls([memory_row(), memory_row(index_bytes="", peak_bytes=1 << 30)])) == []
    assert len(list(harness.memory_shortfalls([memory_row(index_bytes=1 << 21)]))) == 1
    assert list(harness.memory_shortfalls([memory_row(index_bytes=1 << 21, row_bytes=128)])) == []
    assert "temporaries of 129.0 MiB" in next(harness.memory_shortfalls([memory_row(peak_bytes=129 << 20)]))
    lines = list(harness.memory_lines([memory_row(), memory_row(peak_bytes=3 << 20, arm="other")]))
    assert "at most 0.78 %" in lines[0] and "at most 3.0 MiB" in lines[1] and "other" in lines[1]


def test_shortfalls_are_printed_on_a_full_run_alone(tmp_path, monkeypatch, capsys):
    run = run_on_cpu(tmp_path)
    run.add(case="c", arm="a", rows=1, row_bytes=1, dtype=torch.uint8, savings=0.0, gbps=1.0, ideal_gbps=1.0, sms=0)
    assert run.finish(["too slow"]) == 0 and "BELOW" not in capsys.readouterr().out
    monkeypatch.setattr(harness.Run, "is_judged", True)
    assert run.finish(["too slow"]) == 0 and "BELOW too slow" in capsys.readouterr().out


# ---- gather --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ids, columns", [(1, 4), (1000, 33), (70_000, 64)])
def test_pipelined_gather(num_ids, columns):
    x = torch.randn(5000, columns)
    ids, out = torch.randint(5000, (num_ids,)), torch.zeros(num_ids, columns)
    gather_rows = PipelinedGather(x, num_ids, "cpu")
    assert gather_rows(ids, out) is out and torch.equal(out, x[ids])
    assert num_ids < 70_000 or gather_rows.chunk_rows < num_ids / 4  # the buffers are used more than once
    fewer = torch.zeros(num_ids // 2, columns)
    assert torch.equal(gather_rows(ids[: num_ids // 2], fewer), x[ids[: num_ids // 2]])


def rate_row(**changed):
    same = {
        "case": "normal 0.02",
        "arm": "planes slots",
        "row_bytes": 1024,
        "dtype": "bfloat16",
        "savings": "0.3300",
        "gbps": "75",
        "ideal_gbps": "76",
        "sms": 8,
    }
    return same | changed


def test_gather_is_judged():
    raw = [rate_row(arm="raw rows", savings="0", gbps="51", sms=sms) for sms in (8, 132)]
    assert gather.shortfalls([rate_row(), *raw], {}) == []
    few, all_sms = rate_row(gbps="73"), rate_row(gbps="73", sms=132)  # promised with few SMs
    assert len(gather.shortfalls([few, *raw], {})) == 1 and gather.shortfalls([all_sms, *raw], {}) == []
    assert gather.shortfalls([rate_row(gbps="69", row_bytes=256), *raw], {}) == [
        "normal 0.02 bfloat16, 256 B, planes slots, 8 SMs: 69 GB/s, less than 92 % of the ideal, 69.92"
    ]
    assert "raw rows" in gather.shortfalls([rate_row(gbps="49", sms=132), *raw], {})[0]
    assert gather.shortfalls([rate_row(gbps="50", sms=132), *raw], {}) == []
    ibp_row = rate_row(
        case="synthetic 50%", arm="ibp slots", dtype="int32", savings="0.5000", gbps="98", ideal_gbps="102.8", sms=132
    )
    assert gather.shortfalls([ibp_row], {(1024, 0.5): 97.0}) == []
    assert "the paper's code" in gather.shortfalls([ibp_row], {(1024, 0.5): 98.5})[0]
    assert (
        len(gather.shortfalls([rate_row(case="citeseer", dtype="float32", gbps="900", ideal_gbps="1000", sms=132)], {}))
        == 1
    )
    assert gather.wanted_share(ibp_row | {"savings": "0.9", "row_bytes": 512}) is None


def test_paper_rates():
    rates = gather.paper_rates()
    assert len(rates) == 25 and rates[256, 0.125] == 43.9 and rates[4096, 0.9] == 367
    assert {row["path"] for row in charts.read(charts.REFERENCE)} == {"rows", "tensor", "device"}
    assert all(row["gbps"] > 0 for row in charts.read(charts.REFERENCE))


# ---- codec ---------------------------------------------------------------------------------------------------------


def test_decoding_is_judged():
    device = [
        rate_row(case="device", arm="copy_", gbps="2000", sms=132),
        rate_row(case="device", arm="memset", gbps="3000", sms=132),
    ]

    def short(**changed):
        return len(codec.shortfalls([*device, rate_row(sms=132, rows=1, **changed)]))

    assert (
        short(arm="planes decode", gbps="1890") == 1 == short(arm="planes decode packed", gbps="1890")
        and short(arm="planes decode", gbps="1900") == 0
    )
    assert (
        short(arm="planes decode", gbps="1300", dtype="float16")
        == 0
        == short(arm="planes per column decode", gbps="1300")
        == short(arm="decode", gbps="1300")
    )
    assert short(arm="decode", gbps="1100") == 1 and short(arm="decode", gbps="1100", row_bytes=256) == 0
    assert short(arm="planes listed decode", gbps="2390") == 1 and short(arm="planes listed decode", gbps="2400") == 0
    assert short(arm="nvcomp ANS decode", gbps="300") == 0 == short(arm="encode", gbps="10")
    assert len(codec.shortfalls([*device, rate_row(arm="planes decode", gbps="80", sms=4, rows=1)])) == 1
    assert codec.shortfalls([*device, rate_row(arm="planes decode", gbps="86", sms=4, rows=1)]) == []


def test_compression_and_analysis_are_judged():
    """On the GPU of large tables alone; from pinned memory by the link, from pageable memory by torch's copy."""
    device = [
        rate_row(case="device", arm="copy_", gbps="2000", sms=132),
        rate_row(case="device", arm="memset", gbps="3000", sms=132),
    ]
    large, copied = (
        {"rows": codec.LARGE_BYTES // 2048, "row_bytes": 2048},
        rate_row(arm="planes to(cuda), pageable", gbps="7.5", rows=1, row_bytes=2048),
    )

    def short(arm, gbps, rows=1, row_bytes=2048):
        return len(
            codec.shortfalls([*device, copied, rate_row(arm=arm, gbps=gbps, rows=rows, row_bytes=row_bytes, sms=132)])
        )

    for arm, least in (("planes compress", 500), ("compress", 500), ("analyze", 1000)):
        assert short(arm, str(least - 1), **large) == 1 and short(arm, str(least), **large) == 0 == short(arm, "1")
    for arm, least in (
        ("planes compress, pinned", 44.4),
        ("planes analyze, pinned", 49.9),
        ("planes compress, pageable", 5),
        ("planes analyze, pageable", 5),
    ):
        assert short(arm, str(least - 0.2)) == 1 and short(arm, str(least)) == 0


def test_column_codebook():
    x = inputs.normal_rows(1 << 18, torch.bfloat16, 0.02, "cpu", columns=128)
    x *= 2.0 ** torch.arange(-64, 64, 1)  # columns of different exponents
    dense = ibp.codecs.analyze(x, scheme="planes", sample=1.0)
    shared = ibp.codecs.PlanesCodebook(
        256, 2, dense.rotate, dense.residual_bits, dense.digit_bits, False, False, 0, 0, dense.entries[:1]
    )
    found = codec.column_codebook(shared, x)
    assert found.per_column and codec.kind_of(found) == "planes per column " and codec.kind_of(shared) == "planes "
    table = ibp.compress(x, codebook=found)
    assert table.savings > ibp.compress(x, codebook=shared).savings
    harness.check_bits(table.decompress(), x, "a codebook a column")


def test_read_bytes():
    x = inputs.normal_rows(1 << 18, torch.bfloat16, 0.02, "cpu", columns=128)
    packed, slots = (ibp.compress(x, scheme="planes", layout=layout) for layout in ("packed", "slots"))
    assert codec.read_bytes(packed) == packed.stored_bytes - packed.codebook.nbytes
    assert codec.read_bytes(slots) % 32 == 0 and codec.read_bytes(slots) >= slots.link_bytes


def test_nvcomp_alone_keeps_the_rows_of_others(tmp_path, monkeypatch):
    """A coder that copies stands in for nvCOMP, and the CPU for a GPU."""
    coder = types.SimpleNamespace(
        room=torch.empty_like,
        encode=lambda data, room: room.copy_(data),
        decode=lambda coded, out: out.copy_(coded),
    )
    monkeypatch.setattr(codec, "nvcomp", types.SimpleNamespace())
    monkeypatch.setattr(codec, "ans_coder", lambda x: coder)
    monkeypatch.setattr(inputs, "real_sets", lambda data: [("few", torch.zeros(4, 512))])
    monkeypatch.setattr(harness.Run, "seconds", lambda run, calls, wall=False: [call() for call in calls] and 1.0)

    def measured():
        assert codec.main(["--device", "cpu", "--quick", "--nvcomp", "--out", str(tmp_path)]) == 0
        with open(tmp_path / "codec.csv", newline="") as file:
            return [(row["case"], row["arm"]) for row in csv.DictReader(file)]

    assert measured() == []  # not without a GPU
    same = dict(rows=1, row_bytes=1, dtype=torch.int8, savings=0, gbps=1, ideal_gbps=1, sms=0)
    run_on_cpu(tmp_path, "codec").add(case="normal 1", arm="decode", **same)
    monkeypatch.setattr(codec, "run_nvcomp", lambda run, *others, call=codec.run_nvcomp: call(on_gpu(run), *others))

    def on_gpu(run):
        run.on_gpu, run.sync = True, lambda: None
        return run

    names = [*(name for name, _, _ in inputs.NORMAL), "few"]
    wanted = [(name, f"nvcomp ANS {what}") for name in names for what in ("decode", "compress")]
    assert measured() == measured() == [("normal 1", "decode"), *wanted]


# ---- overlap -------------------------------------------------------------------------------------------------------


class Clock:
    """Two streams whose work takes as long as a test says; events note their stream's time."""

    def __init__(self, fetch_ms, product_ms):
        self.fetch_ms, self.product_ms, self.now, self.on = fetch_ms, product_ms, {"side": 0.0, "main": 0.0}, "main"

    def event(self, enable_timing):
        noted = types.SimpleNamespace(at=None)
        noted.record = lambda: setattr(noted, "at", self.now[self.on])
        noted.elapsed_time = lambda end: end.at - noted.at
        return noted

    @contextlib.contextmanager
    def stream(self, stream):
        self.on = "side"
        yield
        self.on = "main"

    def wait_event(self, event):
        self.now["main"] = max(self.now["main"], event.at)

    def fetch(self):
        self.now["side"] += self.fetch_ms

    def launch(self, num):
        self.now["main"] += num * self.product_ms


def beside(monkeypatch, clock, num_fetches):
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: clock)
    monkeypatch.setattr(torch.cuda, "stream", clock.stream)
    run = types.SimpleNamespace(sync=lambda: None, device="cuda")
    return overlap.beside(
        run,
        types.SimpleNamespace(launch=clock.launch),
        10,
        types.SimpleNamespace(call=clock.fetch, arm="gather"),
        num_fetches,
    )


def test_products_beside_fetches(monkeypatch):
    assert beside(monkeypatch, Clock(7.0, 2.0), 8) == pytest.approx(
        (0.020, 0.007)
    )  # a train of 20 ms, in which fetches end at 7 and 14
    assert beside(monkeypatch, Clock(7.0, 2.0), 3) is None  # the fetches end before the train does
    with pytest.raises(AssertionError, match="wanted two"):
        beside(monkeypatch, Clock(15.0, 2.0), 8)


def test_loss_of_products():
    run, products = types.SimpleNamespace(num_sms=132), types.SimpleNamespace(flops=2e12)
    columns = {"matmul_tflops": "500", "matmul_share": "0.9000", "sm_share": "0.0606", "loss_ratio": "1.650"}
    assert overlap.loss(run, products, 3.6e-3, 4e-3, 8) == columns
    assert overlap.loss(run, products, 3.6e-3, 4e-3, None) == columns | {"sm_share": "1.0000", "loss_ratio": "0.100"}
    assert overlap.loss(run, products, 3.6e-3, 4e-3, 0) == columns | {"sm_share": "0.0000", "loss_ratio": ""}


def test_losses_are_judged():
    row = rate_row(arm="planes gather, beside", loss_ratio="1.25", fetch_share="0.9")
    assert overlap.shortfalls([row, rate_row(arm="planes gather, alone")]) == []
    assert len(overlap.shortfalls([row | {"loss_ratio": "1.4"}, rate_row(arm="planes gather, alone", gbps="60")])) == 2
    assert overlap.shortfalls([row | {"loss_ratio": "9", "sms": 4}]) == []
    assert overlap.shortfalls([row | {"arm": "sleep, beside", "loss_ratio": "9", "fetch_share": ""}]) == []  # no fetch


# ---- kinds of rows, compressing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, row_bytes, arm, sms, wanted",
    [
        ("short", 128, "planes slots", None, 62),
        ("short", 128, "planes slots", 8, 54),
        ("short", 128, "planes slots", 16, None),
        ("short", 256, "planes slots", 8, 95),
        ("long", 65536, "planes slots", 8, 97),
        ("columns", 320, "planes slots", None, 92),
        ("columns", 320, "planes slots", 8, 49),
        ("bytes", 576, "planes slots", 16, 92),
        ("bytes", 576, "planes slots", 8, 49),
        ("zeros", 2048, "planes slots", None, 90),
        ("zeros", 2048, "planes slots", 16, 49),
        ("zeros", 2048, "raw rows", None, None),
        ("zeros", 2048, "auto", None, 49),
        ("bytes", 576, "planes decode", None, 1200),
        ("bytes", 576, "planes decode", 8, None),
        ("zeros", 2048, "planes encode", None, 1000),
        ("short", 512, "planes decode", None, 1900),
        ("short", 256, "planes decode", None, None),
        ("columns", 512, "planes encode", None, None),
    ],
)
def test_what_is_wanted_of_kinds_of_rows(kind, row_bytes, arm, sms, wanted):
    assert families.target(kind, row_bytes, arm, sms, 50.0, 100.0, 2000.0) == (wanted and pytest.approx(wanted))


def test_kinds_of_rows_are_what_they_are_called():
    for share in (0.3, 0.5, 0.9):
        x = families.clipped(share)(256, 1024, "cpu")
        assert float((x == 0).float().mean()) == pytest.approx(share, abs=0.01) and float(x.min()) == 0
    for make, has_both in ((families.masked, False), (families.multiplied, True)):
        x = make(64, 1024, "cpu")
        zeros = x[x == 0]
        assert 0.48 < len(zeros) / x.numel() < 0.52 and bool(torch.signbit(zeros).any()) == has_both
    assert families.quantised(64, 100, "cpu").abs().amax(1).eq(127).all()
    assert len({float(scale) for scale in families.scaled_columns(4096, 32, "cpu").std(0).log2().round()}) > 8
    assert all(kind in {*families.WANTED_SHARES, families.NO_TARGET} for _, kind, _, _, _ in families.CASES)


@pytest.mark.parametrize(
    "arm, num_bytes, wanted",
    [
        ("on the GPU", 128, 128 / 1e6),
        ("on the CPU", 4095, 4095 / 1e6),
        ("on the GPU", 4096, None),
        ("on the GPU", 128 << 20, 26.84),
        ("on the GPU", 4 << 30, 300),
        ("on the CPU", 128 << 20, 4),
        ("pinned", 1 << 30, 30),
        ("pageable", 1 << 30, None),
        ("copy_ on the GPU", 128, None),
    ],
)
def test_what_is_wanted_of_compress(arm, num_bytes, wanted):
    assert compress.target(arm, num_bytes, 4) == (wanted and pytest.approx(wanted, rel=1e-3))


def test_targets_are_said_beside_rates():
    assert harness.judged(50.0, None) == {}
    assert harness.judged(50.0, 50.0) == {"target_gbps": "50", "met": "yes"}
    rows = [rate_row(**harness.judged(49.0, wanted)) for wanted in (None, 40.0, 50.0)]
    assert harness.missed(rows) == ["normal 0.02 bfloat16, 1024 B, planes slots, 8 SMs: 75 GB/s, wanted 50"]


# ---- whole scripts -------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Even fewer cells, each timed once, by one thread: several wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(harness, "MAX_REPEATS", 1)
    monkeypatch.setattr(harness, "MIN_REPEATS", 1)
    monkeypatch.setattr(inputs, "QUICK_ROW_BYTES", (128, 1024))
    monkeypatch.setattr(inputs, "QUICK_SAVINGS", (0.5,))
    monkeypatch.setattr(inputs, "REAL_SETS", inputs.REAL_SETS[2:3])
    monkeypatch.setattr(inputs, "NORMAL", inputs.NORMAL[::2])
    monkeypatch.setattr(codec, "QUICK_ROW_BYTES", (2048,))
    monkeypatch.setattr(stream, "QUICK_SIZES_MIB", (1,))
    monkeypatch.setattr(stream, "MAX_TENSORS", 2)
    monkeypatch.setattr(families, "QUICK_CASES", (0, 11))
    monkeypatch.setattr(compress, "SETS", compress.SETS[:1])
    monkeypatch.setattr(encode_into, "CASES", encode_into.CASES[:2])
    monkeypatch.setattr(activations, "QUICK_CASES", activations.QUICK_CASES[1:])
    monkeypatch.setattr(spill, "CASES", spill.CASES[3:4])
    monkeypatch.setattr(compress, "SMALL_ELEMENTS", (64, 1000))
    monkeypatch.setattr(adamw, "MODELS", {name: adamw.MODELS[name] for name in ("one tensor", "embedding, 1 % alive")})
    yield
    torch.set_num_threads(threads)


def test_models_that_take_long_get_fewer_steps(small, tmp_path, monkeypatch):
    monkeypatch.setattr(adamw, "MODELS", {"embedding, 1 % alive": adamw.embedding})
    monkeypatch.setattr(adamw, "ARMS", {arm: adamw.ARMS[arm] for arm in (adamw.TORCH, adamw.FAST)})
    monkeypatch.setattr(adamw, "MODEL_SECONDS", 0.0)
    monkeypatch.setattr(adamw, "LEAST_STEPS", 2)
    assert adamw.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "adamw.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == list(adamw.ARMS) and {row["steps"] for row in rows} == {"2"}


@pytest.mark.parametrize(
    "script",
    [
        *(stream, large_table, overlap, small_calls, families, compress, encode_into, changes, deltas, linear),
        *(scattered, adamw, spill),
        *(pytest.param(script, marks=pytest.mark.slow) for script in (gather, codec, activations, checkpoints)),
    ],
    ids=lambda script: script.__name__,
)
def test_a_script_runs_on_the_cpu(script, small, tmp_path, capsys):
    assert script.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    name = script.__name__.split(".")[-1]
    lines = lines_of(tmp_path / f"{name}.csv")
    assert lines[0][: len(harness.COLUMNS)] == harness.COLUMNS and len(lines) > 3
    assert all(
        len(line) == len(lines[0]) and line[0] == name and float(line[7]) > 0 and float(line[8]) > 0
        for line in lines[1:]
    )
    memory = lines_of(tmp_path / "memory.csv")
    assert memory[0] == harness.MEMORY_COLUMNS and {line[0] for line in memory[1:]} == (
        {name} if script in (gather, codec, stream, large_table, overlap, families) else set()
    )
    assert "BELOW" not in capsys.readouterr().out
    arms = {line[2] for line in lines[1:]}
    expected = {
        "gather": {"raw rows", "cpu index + copy", "cpu pipelined", "ibp slots", "ibp in place", "planes slots"},
        "codec": {
            "copy_",
            "memset",
            "decode",
            "decode packed",
            "planes decode",
            "planes per column decode",
            "planes listed decode",
            "planes encode",
        },
        "stream": {"raw copy_", "planes packed", "planes packed, list", "planes slots", "ibp packed", "ibp slots"},
        "large_table": {"raw", "planes", "x[ids].to", "partition alone"},
        "overlap": {"planes gather, alone", "raw gather, alone", "planes decompress, alone", "copy_, alone"},
        "small_calls": {"until it returns", "until the result is there"},
        "families": {"copy_", "raw rows", "planes slots", "auto", "planes decode", "planes encode"},
        "compress": {"copy_ on the CPU", "on the CPU"},
        "encode_into": {
            "copy_",
            "measured, then coded",
            "one tensor",
            "again",
            "decode",
            "strided",
            "until it returns",
        },
        "changes": {"update_", "index_copy_", "append", "refit"},
        "deltas": {"ibp", "ibp, apply", "index and value", "index and value, apply"},
        "linear": {"cuBLAS", "decode, then cuBLAS", "ibp.linear"},
        "scattered": {"gathered by the CPU", "ibp, raw rows"},
        "adamw": set(adamw.ARMS),
        "activations": {"plain", "recomputed", "ibp", "raw", "5 %", "save_on_cpu"},
        "spill": {
            *(
                f"{what}, {where}"
                for what in ("decode", "index_select", "update_")
                for where in ("device only", "spilled")
            ),
            *("profile, 10%", "profile, 40%"),
        },
        "checkpoints": {"reading", "writing", "compress, two cores", "decompress", "verify"},
    }
    assert expected[name] <= arms


def test_a_script_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    called, before = [], signal.getsignal(signal.SIGTERM)

    def start(words):
        called.append(words[2:])
        return types.SimpleNamespace(
            wait=lambda limit_s: -11 if words[2] == "benchmarks.codec" else 0, terminate=lambda: None
        )

    monkeypatch.setattr(suite.subprocess, "Popen", start)
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert suite.main(["--all", *argv]) == 1
    signal.signal(signal.SIGTERM, before)
    names = [*suite.SPEED, *suite.CODING, *suite.CACHES, *suite.TRAINING, *suite.PAPERS, *suite.BYTES]
    assert [words[0] for words in called] == [f"benchmarks.{name}" for name in names] and all(
        words[1:] == argv for words in called
    )
    assert all((Path(suite.__file__).parent / f"{name}.py").exists() for name in names)
    assert "FAILED: codec" in capsys.readouterr().out


def test_a_script_is_stopped_when_its_time_is_over(tmp_path, capsys):
    assert suite.run_script("clusters", ["--device", "cpu", "--out", str(tmp_path)], limit_s=0.1) != 0
    assert "stopped after 0.1 s" in capsys.readouterr().out


def test_the_scripts_share_minutes():
    assert sum(suite.CODING.values()) < 240 and all(
        sum(own.values()) < 300 for own in (suite.SPEED, suite.CACHES, suite.TRAINING, suite.PAPERS)
    )


# ---- charts and claims ---------------------------------------------------------------------------------------------


def write_measurements(directory):
    """Every CSV that charts and claims read, with rates that stand for nothing."""
    runs = {
        name: run_on_cpu(directory, name) for name in ("gather", "codec", "stream", "large_table", "cpu", "small_calls")
    }
    runs["overlap"] = run_on_cpu(directory, "overlap", overlap.COLUMNS)
    runs["families"] = run_on_cpu(directory, "families", harness.TARGET_COLUMNS)
    runs["encode_into"] = run_on_cpu(directory, "encode_into", encode_into.COLUMNS)
    runs["changes"] = run_on_cpu(directory, "changes", changes.COLUMNS)
    runs["deltas"] = run_on_cpu(directory, "deltas", deltas.COLUMNS)
    runs["compress"] = run_on_cpu(directory, "compress", compress.COLUMNS)
    runs["adamw"] = run_on_cpu(directory, "adamw", adamw.COLUMNS)
    runs["activations"] = run_on_cpu(directory, "activations", activations.COLUMNS)
    runs["checkpoints"] = run_on_cpu(directory, "checkpoints", checkpoints.COLUMNS)

    def add(name, case, arm, gbps=50.0, row_bytes=2048, dtype=torch.bfloat16, sms=132, **extra):
        runs[name].add(
            case=case,
            arm=arm,
            rows=10,
            row_bytes=row_bytes,
            dtype=dtype,
            savings=0.5,
            gbps=gbps,
            ideal_gbps=100.0,
            sms=sms,
            **extra,
        )

    for row_bytes in (512, 2048):
        add("gather", "synthetic", "raw rows", row_bytes=row_bytes)
        add("gather", "synthetic 50%", "ibp slots", 93.0, row_bytes=row_bytes)
        for arm, sms in (("raw rows", 132), ("cpu pipelined", 0), ("planes slots", 132), ("planes slots", 8)):
            add("gather", "normal 0.02", arm, sms=sms, row_bytes=row_bytes)
        add("codec", "normal 0.02", "planes decode", 1700.0, row_bytes=row_bytes)
    add("gather", "cora", "ibp slots")
    for arm in ("encode", "decode", "nvcomp ANS decode"):
        add("codec", "normal 0.02", arm, 1000.0)
    add("codec", "device", "copy_", 2000.0)
    add("codec", "device", "memset", 3000.0)
    for arm, gbps in (("raw copy_", 55.0), ("planes packed", 80.5), ("nvcomp ANS", 70.0)):
        add("stream", "normal 0.02, 64 MiB", arm, gbps, sms=8)
    add("large_table", "4 GiB", "raw rows", 6.5)
    add("cpu", "one core", "planes decode", 3.25, sms=0)
    add("families", "device", "copy_")
    for sms in (132, 16, 8):
        add("families", "half zeros", "raw rows", sms=sms)
        add("families", "half zeros", "planes slots", 40.0 + sms, sms=sms, **harness.judged(40.0 + sms, 56.0))
    add("families", "half zeros", "planes decode", 900.0, **harness.judged(900.0, 1000.0))
    add("compress", "half zeros", "on the GPU", 20.0, ms="6.25", **harness.judged(20.0, 26.8))
    runs["compress"].add(
        case="large", arm="on the GPU", rows=1 << 16, row_bytes=2048, dtype=torch.bfloat16, savings=0.5, gbps=300.0,
        ideal_gbps=1000.0, sms=132, ms="0.45",
    )  # fmt: skip
    add("encode_into", "normal 0.02", "one tensor", 700.0, row_bytes=1 << 23, us="120", **harness.judged(700.0, 800.0))
    add("encode_into", "normal 0.02", "until it returns", 5.0, us="12.5", **harness.judged(5.0, 3.3))
    add("changes", "device memory, 10 rows", "update_", 4.0, us="51.5")
    sizes = {"changed": "0.0420", "stored": "0.0236"}
    for arm, gbps, wanted in (("ibp", 400.0, 300.0), ("ibp, apply", 900.0, 1000.0)):
        add("deltas", "4.2 % changed", arm, gbps, fewer="5.25", **sizes, **harness.judged(gbps, wanted))
    add("deltas", "4.2 % changed", "index and value", 200.0, fewer="1.00", **sizes)
    for arm, gbps, peak_mib in (("writing", 4.0, 0), ("compress, GPU", 3.0, 400)):
        numbers = {"seconds": "1.5", "fsync_seconds": "0.1", "peak_mib": peak_mib}
        add("checkpoints", "4.00 GiB of weights", arm, gbps, sms=0, **numbers, **harness.judged(gbps, 3.2))
    sizes = {"m_savings": "0.1560", "v_savings": "0.2000", "device_bytes": 1 << 20, "host_bytes": 1 << 18, "steps": 10}
    missed = {"target_ratio": 4.0, "met": "no"}
    times = {"ms": "12.5", "mean_ms": "13", "first_ms": "500", "slowest_ms": "40"}
    add("adamw", "one tensor", "ibp", **times, ratio="4.25", **sizes, **missed)
    numbers = {"peak_gb": "2.5", "freed_gb": "7.5", "pinned_gb": "4.75", "saved_gb": "9", "sent_gb": "4.5"}
    numbers |= {"times_smaller": "2", "wanted_times_smaller": "2.05", "most_times_smaller": "2.1"}
    numbers |= {"target_ms": "100", "met": "no"}
    wanted = {
        "times_raw": "1.6",
        "wanted_times_raw": "1.7",
        "times_save_on_cpu": "3.5",
        "wanted_times_save_on_cpu": 3.0,
    }
    add("activations", "ResNet-50", "ibp", 90.0, step_ms="125", **numbers, **wanted)
    slower = {"peak_gb": "9", "freed_gb": "1", "slowdown": "0.1", "wanted_slowdown": 0.05, "met": "no"}
    add("activations", "ResNet-50", "5 %", 90.0, step_ms="55", **slower)
    add("small_calls", "ibp, host memory", "until it returns", 10 * 2048 / 12.5e3)
    add(
        "overlap",
        "normal 0.02",
        "planes gather, beside",
        70.0,
        sms=8,
        matmul_tflops="600",
        matmul_share="0.9300",
        fetch_share="0.9900",
        sm_share="0.0606",
        loss_ratio="1.155",
    )
    with open(directory / "memory.csv", "a", newline="") as file:
        csv.DictWriter(file, harness.MEMORY_COLUMNS, lineterminator="\n").writerow(memory_row())
    sheet = ratio.Sheet(directory / "ratio.csv", ratio.COLUMNS)
    for method, savings in {"paper": 0.1, "ibp": 0.2, "planes": 0.9, "nvcomp LZ4": -0.0001, "nvcomp ANS": 0.31}.items():
        sheet.add(
            set="cora",
            dtype="float32",
            rows=10,
            row_bytes=64,
            method=method,
            savings=savings,
            link_savings="",
            metadata_bytes="",
            seconds="",
        )


def test_charts_from_csv(tmp_path):
    pytest.importorskip("matplotlib")
    charts.draw(tmp_path)
    assert list(tmp_path.glob("*.png")) == []
    write_measurements(tmp_path)
    charts.draw(tmp_path)
    drawn = {
        "overview",
        "gather",
        "gather_normal",
        "gather_real",
        "codec",
        "stream",
        "large_table",
        "cpu",
        "overlap",
        "ratio",
        "families",
        "compress",
        "encode_into",
        "activations",
    }
    assert {path.stem for path in tmp_path.glob("*.png")} == drawn


def test_overview_takes_the_best_of_each_kind(tmp_path):
    write_measurements(tmp_path)
    found = {name: charts.read(tmp_path / f"{name}.csv") for name in ("gather", "codec", "stream")}
    assert charts.rows_by_savings(found["gather"]) == {"50% saved": {"raw rows": 50.0, "ibp": 93.0, "paper": 93.0}}
    assert [(label, gbps) for label, gbps, _, _ in charts.tensor_bars(found["stream"])] == [
        ("raw copy_", 55.0),
        ("the paper's code", 62.0),
        ("nvCOMP, pipelined", 70.0),
        ("ibp", 80.5),
    ]
    assert [gbps for _, gbps, _, _ in charts.device_bars(found["codec"])] == [2000.0, 400.0, 1000.0, 1700.0]


def assert_says(page, *texts):
    for text in texts:
        assert text in page, text


def test_claims_are_what_the_csvs_say(tmp_path, capsys):
    write_measurements(tmp_path)
    pages = {tmp_path / name: blocks for name, blocks in claims.PAGES.items()}
    for page, blocks in pages.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text("before\n" + "".join("\n".join(claims.markers(name)) + "\nbetween\n" for name in blocks))
    argv = ["--out", str(tmp_path), "--root", str(tmp_path)]
    assert claims.main([*argv, "--check"]) == 1 and claims.main(argv) == 0 and claims.main([*argv, "--check"]) == 0
    readme, results, *others = (page.read_text() for page in pages)
    assert results.startswith("before\n<!-- rows") and results.count("\nbetween\n") == len(claims.BLOCKS)
    assert not any(
        "weights.csv" in page or "gnn.csv" in page or "flexgen_opt.csv" in page for page in (results, *others)
    )
    assert_says(
        results,
        "| 2 KiB |",
        "1.00 to 1.24 times",
        "ibp 80.5",
        "`copy_` does 2,000",
        "| 1,700 |",
        "7.0 % |",
        "0.78 %",
        "| 3.2 |",
        "| 6.5 |",
        "| 12.5 |",
        "| half zeros, bfloat16, 2 KiB | 100 | 50.0 | 50.0 | 172 | 56.0 | 48.0 (of 56.0) |  | 900 (of 1,000) |  |",
        "missed (2 of 4)",
        "Of 11 targets of these scripts 6 are missed:",
        "| one tensor | 700 (of 800) |",
        "page of 64 KiB comes back after 12.5 us.",
        "| device memory, 10 rows | 51.5 (4.00) |",
        "| `families` | half zeros, bfloat16, 2 KiB | planes decode, 132 SMs | 1,000 | 900 | 90 % |",
        "| half zeros, bfloat16, rows of 2 KiB | **6.25 (20.0)** |",
        "| cora | float32 | 10.0 % | 20.0 % | 10.0x |  | 31.0 % (ANS) |",
    )
    assert "| a whole BF16 tensor | `copy_` 55.0, nvCOMP, pipelined 70.0 | 80.5 |" in readme
    (tmp_path / "gather.csv").unlink()
    assert claims.main([*argv, "--check"]) == 0  # stays as it is
    page = tmp_path / "benchmarks" / "RESULTS.md"
    page.write_text(results.replace(claims.markers("device")[1], ""))
    with pytest.raises(ValueError, match="end of device"):
        claims.main(argv)


WEIGHTS_COLUMNS = ("prompt", "ms", "bound_ms", "host_bytes", "device_bytes", "weight_bytes")
FLEXGEN_COLUMNS = ("prefill_s", "token_s", "load_s", "host_bytes")


def write_tokens(directory):
    """weights.csv and timeline.csv: BF16 in three cells, FP16 in one."""
    run = run_on_cpu(directory, "weights", WEIGHTS_COLUMNS)

    def add(arm, batch, prompt, ms, bound_ms="", sms=0, dtype=torch.bfloat16, host_bytes=0, device_bytes=20_000_000):
        run.add(
            case="Llama of 0.02 GB",
            arm=arm,
            rows=batch,
            row_bytes=128,
            dtype=dtype,
            savings=0.3,
            gbps=50.0,
            ideal_gbps=60.0,
            sms=sms,
            prompt=prompt,
            ms=f"{ms:.2f}",
            bound_ms=bound_ms,
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            weight_bytes=20_000_000,
        )

    add("on the GPU", 1, 256, 20)
    add("on the GPU", 16, 512, 22)
    add("on the GPU", 12, 0, 240)
    add("raw through hooks", 1, 256, 250, "240.00", host_bytes=20_000_000)
    add("ibp", 1, 256, 160, "152.00", 16, host_bytes=14_000_000, device_bytes=600_000_000)
    add("ibp", 1, 256, 200, "152.00", 8, host_bytes=14_000_000)
    add("ibp", 12, 0, 250, "247.50", 16)
    add("ibp, on the GPU", 16, 512, 30, "27.00", 132)
    add("ibp, two GPUs", 1, 256, 85, "76.50", 16)
    add("ibp, loading", 0, 0, 8100, "10000.00")
    add("accelerate cpu_offload", 1, 256, 2000, device_bytes="")
    add("on the GPU", 1, 256, 18.5, dtype=torch.float16)
    spans = [("copy", 0, 9000), ("copy", 9500, 10000), ("decode", 1000, 5000), ("decode", 4000, 6000)]
    with open(directory / "timeline.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("kind", "start_us", "end_us"), *spans, ("compute", 2000.5, 4000.5)])


def write_graphs(directory):
    """gnn.csv with one set of which all arms are there, and one without raw rows; gnn_parallel.csv."""
    run = run_on_cpu(directory, "gnn", gnn.COLUMNS)
    same = {"rows": 1000, "row_bytes": 5732, "dtype": torch.float32, "savings": 0.9, "gbps": 50.0, "ideal_gbps": 60.0}
    alone = {"batch": 1024, "batches": 200, "sample_ms": "9", "train_ms": "6", "table_gib": "12.81", "sms": 0}
    arms = zip((*gnn.CPU_ARMS, "raw rows", "ibp"), ((30, 31.0), (15, 21.0), (12, 18.0), (10, 11.0), (0.125, 7.5)))
    for arm, (fetch_ms, epoch_s) in arms:
        run.add(case="cora, batch 1024", arm=arm, fetch_ms=fetch_ms, epoch_s=epoch_s, **same, **alone)
    run.add(case="dense 602, batch 8192", arm="ibp", fetch_ms=4, epoch_s=5.25, **same, **(alone | {"batch": 8192}))
    run = run_on_cpu(directory, "gnn_parallel", gnn_parallel.COLUMNS)
    for gpus, epoch_s in ((1, 8.0), (2, 4.0), (4, 2.5)):
        shape = {"gpus": gpus, "batch": 1024, "batches": 200, "epoch_s": epoch_s, "sms": 0}
        run.add(case="cora", arm=f"ibp, {gpus} GPUs", **same, **shape)


def write_flexgen(directory):
    run = run_on_cpu(directory, "flexgen_opt", FLEXGEN_COLUMNS)
    same = {"rows": 1000, "row_bytes": 8192, "dtype": torch.float16, "gbps": 50.0, "ideal_gbps": 60.0, "sms": 0}
    for arm, token_s, host_bytes in (("FlexGen", "0.25", 13_100_000_000), ("FlexGen, ibp", "0.2", 11_200_000_000)):
        times = {"prefill_s": "0.5", "token_s": token_s, "load_s": "20.1"}
        run.add(case="opt, batch 4", arm=arm, savings=0.1, host_bytes=host_bytes, **same, **times)


@pytest.mark.slow
def test_charts_of_weights_and_graphs(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "timeline.csv").write_text("kind,start_us,end_us\ncopy,0,1\n")
    charts.draw(tmp_path)
    assert list(tmp_path.glob("*.png")) == []  # a timeline alone does not say what it is of
    write_tokens(tmp_path)
    charts.draw(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"weights", "timeline"}
    write_graphs(tmp_path)
    charts.draw(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"weights", "timeline", "gnn"}


def test_charts_of_weights_show_each_arm_with_the_most_sms(tmp_path):
    write_tokens(tmp_path)
    rows = charts.by_dtype(charts.read(tmp_path / "weights.csv"))
    assert list(rows) == ["bfloat16", "float16"]
    cells = charts.of_tokens(rows["bfloat16"])
    assert list(cells) == [(1, 256), (16, 512), (12, 0)]  # one call on many tokens last
    assert {arm: row["ms"] for arm, row in cells[1, 256].items()} == {
        "on the GPU": 20,
        "raw through hooks": 250,
        "ibp": 160,
        "ibp, two GPUs": 85,
        "accelerate cpu_offload": 2000,
    }
    assert charts.cell_name(1, 1920) == "batch 1, prompt 1,920" and charts.cell_name(12, 0) == "12,288 tokens at once"


def test_spans_of_a_timeline(tmp_path):
    assert charts.merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    write_tokens(tmp_path)
    timeline = charts.read(tmp_path / "timeline.csv")
    assert charts.window_of(timeline) == (0, 10000)
    busy = {kind: charts.busy_share(spans, (0, 10000)) for kind, spans in charts.spans_of(timeline).items()}
    assert busy == pytest.approx({"copy": 0.95, "decode": 0.5, "compute": 0.2})


def test_bars_of_graphs(tmp_path):
    """Fetches are drawn as multiples of raw rows, over the set that they are of."""
    pytest.importorskip("matplotlib")
    figure, panel = charts.plt.subplots()
    charts.draw_arms(panel, {"a": {}, "b": {"cpu plain": 0.25, "ibp": 8.0}}, 1)
    bars = [bar for bars in panel.containers for bar in bars]
    assert [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in bars] == [(1, 0.25), (1, 8.0)]
    assert all(0.5 < bar.get_x() and bar.get_x() + bar.get_width() < 1.5 for bar in bars)
    assert [text.get_text() for text in panel.texts] == ["0.25", "8.00"]
    charts.plt.close(figure)


def test_claims_of_optimizer_states(tmp_path):
    assert claims.adamw_table(tmp_path) is None
    write_measurements(tmp_path)
    assert_says(
        claims.adamw_table(tmp_path),
        "| one tensor | ibp | 12.5 | 13.0 | 40.0 | 500 | 4.25 (4.0) | 15.6 % | 20.0 % | 1 | 0 |",
    )


def test_claims_of_activations(tmp_path):
    assert claims.activations_table(tmp_path) is None
    write_measurements(tmp_path)
    assert_says(
        claims.activations_table(tmp_path),
        "| ResNet-50 | ibp | 125 (100) | 2.50 | 7.50 | 4.75 | 9.00 | 4.50 | 2.00 (2.05) | 1.60 (1.7) | 3.50 | 2.10 |",
        "| ResNet-50 | 5 % | 55.0 (10.0% slower than plain) | 9.00 | 1.00 |",
    )


def test_claims_of_activations_kept_on_the_device(tmp_path):
    """For which nets the peak falls, and for which it rises."""
    none = dict.fromkeys(activations.COLUMNS, "")
    sheet = [
        none
        | {"case": case, "arm": arm, "step_ms": step_ms, "peak_gb": peak_gb, "freed_gb": freed_gb, "saved_gb": saved}
        for case, arm, step_ms, peak_gb, freed_gb, saved in (
            ("VGG16", "plain", 10, 4, 0, ""),
            ("VGG16", "on the device", 15, 3, 1, 3),
            ("AlexNet", "plain", 10, 4, 0, ""),
            ("AlexNet", "on the device", 25, 4.5, -0.5, 2),
        )
    ]
    with open(tmp_path / "activations.csv", "w", newline="") as file:
        out = csv.DictWriter(file, [*activations.COLUMNS, "case", "arm", "gpu", "torch", "cuda", "commit"], restval="x")
        out.writeheader()
        out.writerows(sheet)
    assert (
        "\n\nKeeping coded activations on the device lowers the peak of VGG16 by 1.00 GB (steps 1.5 times as long, "
        "saved tensors 75 % of the peak), and raises that of AlexNet by 0.50 GB (steps 2.5 times as long, saved "
        "tensors 50 % of the peak)."
    ) in claims.activations_table(tmp_path)


def test_claims_of_weights(tmp_path):
    assert claims.offload_block(tmp_path) is None is claims.offload_line(tmp_path)
    write_tokens(tmp_path)
    page, line = claims.offload_block(tmp_path), claims.offload_line(tmp_path)
    assert_says(
        page,
        "(`weights.csv`: none, torch ",
        "\n\nBF16, 0.02 GB:\n\n| weights | batch 1, prompt 256 | batch 16, prompt 512 | 12,288 tokens at once |",
        "| raw weights on the GPU | 20.0 | 22.0 | 240 | 0.00 | 0.02 |",
        "| ibp, coded rows on the GPU |  | 30.0 (90 %) |  | 0.00 | 0.02 |",
        "| ibp, streamed | 160 (95 %) |  | 250 (99 %) | 0.01 | 0.60 |",
        "| ibp, streamed, at most 8 SMs | 200 (76 %) |  |  | 0.01 | 0.02 |",
        "| accelerate's cpu_offload | 2,000 |  |  | 0.00 |  |",
        "\n\nFP16, 0.02 GB:\n\n| weights | batch 1, prompt 256 | GB on the host | GB on GPUs |",
        "in pinned memory: 8.1 s.",
        "the largest model that fits has 1.00 times as many",
        "(../benchmarks/results/weights.png)",
        "In 10 ms",
        "95 % of the time, decoding 50 %, and the model's own kernels 20 %",
        "(../benchmarks/results/timeline.png)",
    )
    assert line.startswith("## Models") and "batch 1, prompt 256" in line and "; ibp, streamed 160 (95 %); " in line
    (tmp_path / "timeline.csv").unlink()
    assert "timeline" not in claims.offload_block(tmp_path)


def test_claims_of_flexgen(tmp_path):
    assert claims.flexgen_block(tmp_path) is None is claims.flexgen_line(tmp_path)
    write_flexgen(tmp_path)
    page, line = claims.flexgen_block(tmp_path), claims.flexgen_line(tmp_path)
    assert "| FlexGen | 16.00 | 0.50 | 20.1 | 13.10 |\n| FlexGen, ibp | 20.00 | 0.50 | 20.1 | 11.20 |" in page
    assert "16.00 tokens a second without ibp, 20.00 with it; 13.10 and 11.20 GB" in line


def test_claims_of_graphs(tmp_path):
    assert claims.graphs_block(tmp_path) is None is claims.several_block(tmp_path)
    assert claims.graphs_line(tmp_path) is None
    write_graphs(tmp_path)
    page, line = claims.graphs_block(tmp_path), claims.graphs_line(tmp_path)
    assert_says(
        page,
        "| cora | FP32, 5,732 B | 12.8 | 1,024 | 31.0 | 21.0 | 18.0 | 11.0 | 7.50 | 80.0 | 2.40 | 1.47 |",
        "| dense 602 | FP32, 5,732 B | 12.8 | 8,192 |  |  |  |  | 5.25 |  |  |  |",
        "(../benchmarks/results/gnn.png)",
    )
    assert "2.40 times as fast as with the best gather" in line and "fetches alone are 80.0 times" in line
    assert "| features | 1 GPU | 2 GPUs | 4 GPUs |" in claims.several_block(tmp_path)
    assert "| cora | 8.00 | 4.00 (2.00) | 2.50 (3.20) |" in claims.several_block(tmp_path)


def test_claims_of_weights_and_graphs_reach_their_pages(tmp_path):
    for write in (write_tokens, write_flexgen, write_graphs):
        write(tmp_path)
    for name, blocks in claims.PAGES.items():
        page = tmp_path / name
        page.parent.mkdir(exist_ok=True)
        page.write_text("".join("\n".join(claims.markers(block)) + "\n" for block in blocks))
    assert claims.main(["--out", str(tmp_path), "--root", str(tmp_path)]) == 0
    for name, csvs in {
        "docs/llm.md": ("weights.csv", "flexgen_opt.csv"),
        "docs/gnn.md": ("gnn.csv", "gnn_parallel.csv"),
        "benchmarks/RESULTS.md": ("weights.csv", "flexgen_opt.csv", "gnn.csv"),
    }.items():
        text = (tmp_path / name).read_text()
        assert all(f"`{csv_name}`" in text for csv_name in csvs), name


@pytest.mark.slow
def test_pictures_of_claims_are_drawn(tmp_path):
    """What a block links stands beside the CSV that the block is made of."""
    pytest.importorskip("matplotlib")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    write_tokens(results)
    write_graphs(results)
    charts.draw(results)
    text = claims.offload_block(results) + claims.graphs_block(results)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 3 and all(os.path.exists(os.path.normpath(tmp_path / "docs" / link)) for link in links)


def test_the_pages_say_what_the_results_say():
    for name, blocks in claims.PAGES.items():
        text = (harness.ROOT / name).read_text()
        assert all(text.count(marker) == 1 for block in blocks for marker in claims.markers(block)), name
    assert claims.main(["--check"]) == 0


# ---- savings -------------------------------------------------------------------------------------------------------


def test_synthetic_sets_are_what_they_are_called():
    found = {(case.name, case.dtype): case.tensors[0] for case in sets.synthetic_sets(32)}
    assert all(x.shape == (32, sets.COLUMNS) and x.dtype == dtype for (_, dtype), x in found.items())
    assert abs(float((found["half zeros", torch.bfloat16] == 0).float().mean()) - 0.5) < 0.02
    assert float(found["clipped normal", torch.float16].min()) == 0
    assert (
        0
        <= int(found["ids below 2^20", torch.int64].min())
        <= int(found["ids below 2^20", torch.int64].max())
        < 1 << 20
    )
    assert int(found["counts", torch.int32].min()) == 1
    for dtype, low, high in ((torch.int8, -127, 127), (torch.uint8, 1, 255), (torch.int16, -32767, 32767)):
        x = found["quantised weights", dtype]
        assert int(x.min()) == low or int(x.max()) == high
    zeros = found["dropout", torch.bfloat16].view(torch.int16).remainder(1 << 15) == 0
    negative = found["dropout", torch.bfloat16].view(torch.int16) < 0
    assert 0.4 < float(zeros.float().mean()) < 0.6 and 0.4 < float(negative[zeros].float().mean()) < 0.6
    assert int((found["holding BF16", torch.float32].view(torch.int32) & 0xFFFF).max()) == 0
    assert int((found["holding FP16", torch.float32].view(torch.int32) & 0x1FFF).max()) == 0
    assert 5 < int((found["default rows", torch.bfloat16] == 0).all(1).sum()) < 27
    assert (
        int((found["constant columns", torch.float32] == found["constant columns", torch.float32][0]).all(0).sum())
        == 256
    )
    again = {(case.name, case.dtype): case.tensors[0] for case in sets.synthetic_sets(32)}
    assert all(torch.equal(again[key].view(torch.uint8), x.view(torch.uint8)) for key, x in found.items())


def test_shipped_sets_of_savings():
    found = {(case.name, case.dtype): case for case in sets.real_sets(inputs.DATA_DIR)}
    assert found["citeseer", torch.float32].rows == 3327 and found["citeseer", torch.float32].row_bytes == 14812
    assert {dtype for name, dtype in found if name == "pubmed_1060rows"} == {
        torch.float32,
        torch.float16,
        torch.bfloat16,
    }
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
    tensors = [x, torch.tensor([[1.5]])]
    cell = ratio.measure_cell(ratio.block_codec(ratio.zstd_coders), tensors, torch.device("cpu"), with_times=False)
    assert cell.metadata_bytes == 4 * ratio.BLOCK_INDEX_BYTES and cell.stored_bytes < 100
    assert cell.link_bytes is None and cell.seconds is None
    by_row = ratio.block_codec(ratio.zstd_coders, by_row=True)([torch.zeros(7, 100), torch.ones(2, 1)], None)[0]
    assert by_row.metadata_bytes == 9 * ratio.BLOCK_INDEX_BYTES and 8 < by_row.stored_bytes < 7 * 40 + 8


def test_a_block_codec_that_loses_bits_is_seen():
    with pytest.raises(AssertionError, match="bits differ"):
        ratio.block_codec(lambda: (bytes, lambda coded: coded[:-1]))([torch.zeros(4, 4)], None)


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
        methods = {
            name: measure
            for name, measure in ratio.methods_for(dtype, on_gpu=True).items()
            if name.startswith("nvcomp ")
        }
        assert len(methods) == 8 + num_floats
        for measure in methods.values():
            cell = ratio.measure_cell(measure, [torch.ones(3, 5, dtype=dtype)], torch.device("cpu"), with_times=False)
            assert cell.stored_bytes == 15 * dtype.itemsize and cell.metadata_bytes is None
    assert {"algorithm": "ANS", "uncomp_chunk_size": 65536, "data_type": "<f2"} in PlainCodec.made
    assert not any(name.startswith("nvcomp ") for name in ratio.methods_for(torch.bfloat16, on_gpu=False))


def test_ratio_shows_and_judges_savings():
    assert [ratio.show(s) for s in (-0.001, -0.0001, 0.334, 0.875, 0.9975)] == ["-0.1", "0.0", "33.4", "8.0x", "400x"]
    cells = {
        ("a", "float32"): {"paper": 0.1, "ibp": 0.2, "auto": 0.1995},
        ("b", "int8"): {"paper": 0.3, "ibp": 0.2, "auto": -0.1},
    }
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
    assert [line[4] for line in lines[1:5]] == list(ratio.OURS) and lines[1][:4] == [
        "normal 1",
        "float32",
        "400",
        "128",
    ]
    assert all(line[8] == "" for line in lines[1:])
    assert "Percent saved" in capsys.readouterr().out
    if charts.plt:
        assert (tmp_path / "ratio.png").exists()


def test_ratio_measures_some_and_keeps_the_others(tmp_path, monkeypatch):
    found = [tiny_set(), tiny_set(40, "cora")]
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter(found))
    argv = ["--device", "cpu", "--quick", "--no-times", "--out", str(tmp_path)]
    assert ratio.main([*argv, "--methods", "planes"]) == 0 and ratio.main([*argv, "--methods", "ibp; paper"]) == 0
    lines = [(line[0], line[4]) for line in lines_of(tmp_path / "ratio.csv")[1:]]
    assert lines == [(name, method) for name in ("normal 1", "cora") for method in ("planes", "paper", "ibp")]
    found.reverse()
    before = lines_of(tmp_path / "ratio.csv")
    assert ratio.main([*argv, "--methods", "planes", "--sets", "cora"]) == 0
    assert sorted(lines_of(tmp_path / "ratio.csv")) == sorted(before)


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
    assert [line[2:4] for line in lines[1:]] == [
        [scheme, str(share)] for scheme in sampling.SCHEMES for share in sampling.SAMPLES
    ]
    assert float(lines[6][4]) > 0.1 and "100%" in capsys.readouterr().out


def test_cpu_writes_its_cases_and_puts_back_what_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inputs, "NORMAL", inputs.NORMAL[:1])
    monkeypatch.setattr(cpu, "data_bytes", lambda run: 1 << 18)
    before = torch.get_num_threads(), ibp._core.cpu_features()
    assert cpu.main(["--quick", "--out", str(tmp_path)]) == 0
    assert (torch.get_num_threads(), ibp._core.cpu_features()) == before
    lines = lines_of(tmp_path / "cpu.csv")
    assert ",".join(lines[0]) == ",".join(harness.COLUMNS)
    avx2 = [" avx2"] if before[1] > cpu.AVX2 else []
    arms = ["copy_"] + [
        f"{scheme}{kind} {verb}"
        for scheme in cpu.SCHEMES
        for kind in ("", *avx2, " plain")
        for verb in ("decode", "encode")
    ]
    one_thread = [line for line in lines[1:] if line[1] == "normal 0.02, 1 thread"]
    assert [line[2] for line in one_thread][: len(arms)] == arms and float(one_thread[1][6]) > 0.3
    of_all_threads = len(one_thread) - 2 * len(avx2) * len(cpu.SCHEMES) if before[0] > 1 else 0
    assert len(lines) == 1 + len(one_thread) + of_all_threads
    assert ("lz4 compress" in capsys.readouterr().out) == (cpu.lz4_block is not None)


def test_what_is_compared_of_activations(monkeypatch):
    """Gradients; or saved tensors, where plain steps turn out to have other gradients every time."""
    net, x = activations.QUICK_CASES[1].build(torch.device("cpu"))
    offload = ibp.offload_activations(device="cpu", least_bytes=4096)
    plain = activations.gradients(net, x, contextlib.nullcontext())
    others = [2 * gradient for gradient in plain]
    assert activations.check(net, x, offload, plain) == "gradients"
    assert activations.check(net, x, offload, None) == activations.check(net, x, offload, others) == "saved tensors"
    monkeypatch.setattr(activations, "repeats", lambda net, x, plain: True)
    with pytest.raises(AssertionError, match="gradients differ"):
        activations.check(net, x, offload, others)
    unpack = offload._unpack
    monkeypatch.setattr(offload, "_unpack", lambda saved: unpack(saved) + 1)
    with pytest.raises(AssertionError, match="bits differ of a saved tensor"):
        activations.check(net, x, offload, plain)
