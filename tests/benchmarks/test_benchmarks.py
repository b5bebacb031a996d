"""What the benchmarks compute without a GPU: sectors, ideal rates, tables, savings, targets; scripts on the CPU."""

import collections
import contextlib
import csv
import ctypes
import enum
import itertools
import math
import os
import signal
import threading
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
    changes,
    checkpoints,
    choose,
    claims,
    codec,
    compress,
    cpu,
    dcp,
    deltas,
    densities,
    encode_into,
    families,
    gather,
    harness,
    host_calls,
    ideal,
    inputs,
    large_table,
    linear,
    ndzip,
    overlap,
    paths,
    profiles,
    ratio,
    reading,
    reproduction,
    sampling,
    scattered,
    sets,
    small_calls,
    spill,
    stream,
)
from benchmarks.cpu_gather import PipelinedGather
from fake_nvcomp import FakeCodec, as_array
from ibp.codecs import _codec


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
    aligned = aligned[-aligned.data_ptr() % 128 :]
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
    units = {
        ("slots", (table.slots.data_ptr() + row * table.slot_bytes + k) // 32)
        for k in range(min(stored[row], table.slot_bytes))
    }
    part = max(0, stored[row] - table.slot_bytes)
    if part:
        start = int(table.bases[row // 32])
        for q in range(row // 32 * 32, row):
            before = max(0, stored[q] - table.slot_bytes)
            start += before if table.slot_bytes == 0 else -(-before // 32) * 32
        units |= {("overflow", (table.overflow.data_ptr() + start + k) // 32) for k in range(part)}
    return units


def requests_by_bytes(table, stored, row):
    """How many sectors each request of one row asks for: those of a line."""
    lines = collections.Counter((part, sector // 4) for part, sector in sectors_by_bytes(table, stored, row))
    return lines.values()


def request_ns(sectors):
    return max(1.45, (32 * sectors + ideal.LINE_COST) / (ideal.LINK_KERNEL_GBPS * 157 / 128))


@pytest.mark.parametrize("offset", [0, 4, 31])
@pytest.mark.parametrize("row_bytes, slot_bytes", [(100, 32), (100, 100), (100, 0), (256, 96), (256, 256), (37, 37)])
def test_row_sectors_counts_every_byte(row_bytes, slot_bytes, offset):
    rng = np.random.default_rng(row_bytes + slot_bytes)
    num_rows, num_bytes = 70, 70 * row_bytes - 5
    lengths = [int(n) for n in rng.integers(0, row_bytes - 5, num_rows)]
    table, stored = make_table(
        lengths, num_rows=num_rows, row_bytes=row_bytes, slot_bytes=slot_bytes, num_bytes=num_bytes, offset=offset
    )
    assert ideal.row_sectors(table).tolist() == [len(sectors_by_bytes(table, stored, r)) for r in range(num_rows)]
    ids = torch.tensor([69, 0, 33, 33], dtype=torch.int32)
    assert ideal.row_sectors(table, ids).tolist() == [len(sectors_by_bytes(table, stored, r)) for r in ids.tolist()]
    expected = [sum(map(request_ns, requests_by_bytes(table, stored, r))) for r in range(num_rows)]
    assert ideal.row_link_ns(table).tolist() == pytest.approx(expected)


def test_raw_table_reads_whole_rows():
    table, stored = make_table([], num_rows=3, row_bytes=64, slot_bytes=64, num_bytes=150)
    assert ideal.stored_row_bytes(table).tolist() == stored == [64, 64, 22]
    assert ideal.row_sectors(table).tolist() == [2, 2, 1]


def test_a_default_row_reads_nothing():
    table, _ = make_table([10, 64, 0], num_rows=3, row_bytes=64, slot_bytes=64)
    assert ideal.stored_row_bytes(table).tolist() == [10, 0, 64]
    assert ideal.row_sectors(table).tolist() == [1, 0, 2]


def test_ideal_rates():
    starts = 512 * torch.arange(1000)
    rows = ideal.link_ns_of_range(starts, torch.full_like(starts, 512))
    # Raw rows: the link's rate, whatever a memset does.
    assert ideal.gather_gbps(512_000, rows, 4000) == pytest.approx(51.4)
    assert ideal.gather_gbps(1_024_000, rows, 4000) == pytest.approx(102.8)  # half saved
    assert ideal.gather_gbps(512_000, rows, 10) == pytest.approx(10)  # the writing binds
    sectors = ideal.link_ns_of_range(starts, torch.full_like(starts, 32))  # a request takes 1.45 ns, however short
    assert sectors.tolist() == pytest.approx([1.45] * 1000)
    line = ideal.link_ns_of_range(starts, torch.full_like(starts, 128))
    across = ideal.link_ns_of_range(starts + 64, torch.full_like(starts, 128))  # parts of two lines
    assert across.tolist() == pytest.approx((line * (128 + 2 * ideal.LINE_COST) / (128 + ideal.LINE_COST)).tolist())
    a_byte_more = ideal.link_ns_of_range(starts, torch.full_like(starts, 129))
    assert (a_byte_more - line).tolist() == pytest.approx([1.45] * 1000)
    assert ideal.link_ns_of_range(starts, torch.zeros_like(starts)).tolist() == [0] * 1000
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


def test_real_sets_that_are_there(tmp_path):
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


def test_run_writes_the_columns_and_goes_on_after_a_failure(tmp_path):
    run = run_on_cpu(tmp_path)
    same = dict(rows=5, row_bytes=128, dtype=torch.bfloat16, gbps=50.0, ideal_gbps=100.0)
    with run.cell("broken"):
        raise RuntimeError("no such kernel")
    run.add(case="synthetic 50%", arm="ibp slots", savings=0.5, sms=None, **same)
    run.add(case="synthetic", arm="cpu index + copy", savings=0.0, sms=0, **same)
    assert run.finish() == 1
    with open(tmp_path / "gather.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert ",".join(lines[0]) == (
        "benchmark,case,arm,rows,row_bytes,dtype,savings,gbps,ideal_gbps,sms,gpu,torch,cuda,commit"
    )
    assert lines[1][:9] == ["gather", "synthetic 50%", "ibp slots", "5", "128", "bfloat16", "0.5000", "50", "100"]
    assert len(lines) == 3


def test_a_stopped_run_leaves_what_it_measured(tmp_path):
    run = run_on_cpu(tmp_path)
    run.add(case="c", arm="a", rows=1, row_bytes=1, dtype=torch.uint8, savings=0.0, gbps=1.5, ideal_gbps=3.0, sms=0)
    with pytest.raises(SystemExit) as stopped, run.cell("a long one"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert stopped.value.code == 1 and len(lines_of(tmp_path / "gather.csv")) == 2
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
    assert len(list(harness.memory_shortfalls([memory_row(peak_bytes=129 << 20)]))) == 1


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
    monkeypatch.setattr(codec, "ans_coders", lambda x: {"": coder, ", latency": coder})
    monkeypatch.setattr(codec, "measure_nvcomp_batch", lambda case: None)
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

    names = [*(name for name, _, _ in inputs.NORMAL), "few"]
    arms = [f"nvcomp ANS {what}{policy}" for policy in ("", ", latency") for what in ("decode", "compress")]
    wanted = [(name, arm) for name in names for arm in arms]
    assert measured() == measured() == [("normal 1", "decode"), *wanted]


def on_gpu(run):
    run.on_gpu, run.sync = True, lambda: None
    return run


def test_joins_alone_keep_the_rows_of_others(tmp_path, monkeypatch):
    """Tables are decoded to an aligned address and to one that is an element off, and wrong bits are found."""
    found, decompress = set(), ibp.decompress
    same = dict(rows=1, row_bytes=1, savings=0, gbps=1, ideal_gbps=1, sms=0)
    run_on_cpu(tmp_path, "codec").add(case="normal 1", arm="decode", dtype=torch.int8, **same)

    def noted(table, out):
        found.add((out.dtype, out.data_ptr() % 64))
        return decompress(table, out=out)

    monkeypatch.setattr(ibp, "decompress", noted)
    argv = ["--device", "cpu", "--quick", "--joins", "--out", str(tmp_path)]
    assert codec.main(argv) == codec.main(argv) == 0
    assert found == {(dtype, off) for _, dtype, _ in codec.JOINED for off in (0, dtype.itemsize)}
    other, *rows = reading.read(tmp_path / "codec.csv")
    assert other["case"] == "normal 1" and [(row["case"], row["dtype"], row["arm"]) for row in rows] == [
        (codec.JOINS + name, harness.dtype_name(dtype), f"planes decode, {where}")
        for name, dtype, _ in codec.JOINED
        for where in ("aligned", "one element off")
    ]
    assert all(row["rows"] * row["row_bytes"] == 1 << 20 and 0.1 < row["savings"] < 0.5 for row in rows)
    monkeypatch.setattr(ibp, "decompress", lambda table, out: out.copy_(noted(table, out).roll(1, 0)))
    assert codec.main(argv) == 1


@pytest.fixture
def fake_cascaded(monkeypatch):
    """A codec by zlib stands in for nvCOMP's Cascaded, and the CPU for a GPU. Returns the options of the codecs that
    were made. Level 7 is refused."""
    made = []

    class Cascaded(FakeCodec):
        def __init__(self, *, algorithm, device_id, cuda_stream, uncomp_chunk_size, data_type, **options):
            if options.get("compression_level") == 7:
                raise ValueError("there is no level 7")
            made.append((algorithm, uncomp_chunk_size, data_type, options))
            super().__init__(
                algorithm=algorithm, device_id=device_id, cuda_stream=cuda_stream, uncomp_chunk_size=uncomp_chunk_size
            )

    module = types.SimpleNamespace(
        Codec=Cascaded,
        as_array=as_array,
        CascadedMode=enum.Enum("CascadedMode", {"ASYMMETRIC": 1, "SYMMETRIC": 2}),
        CascadedFineGrainedEncoding=enum.IntFlag("CascadedFineGrainedEncoding", {"DELTA": 1, "RLE": 2, "FOR": 4}),
    )
    monkeypatch.setattr(choose, "nvcomp", module)
    monkeypatch.setattr(_codec, "_module", lambda codec: module)
    monkeypatch.setattr(choose, "stream_number", lambda device: 1)
    monkeypatch.setattr(harness.Run, "seconds", lambda run, calls, wall=False: [call() for call in calls] and 1.0)
    run_cascaded = choose.run_cascaded
    monkeypatch.setattr(choose, "run_cascaded", lambda run, columns: run_cascaded(on_gpu(run), columns))
    return made


def test_cascaded_alone_keeps_the_rows_of_others(fake_cascaded, tmp_path, capsys):
    """Integers of every size are coded by every option that there is for them. Rows of other sets and arms stay."""
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert choose.main([*argv, "--sets", "dates"]) == 0
    others = reading.read(tmp_path / "choose.csv")
    assert {row["arm"] for row in others} >= {"planes", "choice at 6 GB/s"}
    assert choose.main([*argv, "--cascaded"]) == choose.main([*argv, "--cascaded", "--sets", "dates"]) == 0
    rows = reading.read(tmp_path / "choose.csv")
    assert rows[: len(others)] == others
    sizes = {"sorted ids with runs": 8, "dates": 4, "strings": 1, "strings as int32": 4, "loan age": 4}
    sizes |= {"loan month": 4, "loan delinquency": 1}
    ends = ["level 1", "level 2", "level 3", "no differences", "no run lengths", "symmetric"]
    arms = {(name, choose.CASCADED + end) for name, size in sizes.items() for end in ends[: 6 if size > 1 else 5]}
    assert {(row["case"], row["arm"]) for row in rows[len(others) :]} == arms and len(rows) == len(others) + len(arms)
    for row in rows[len(others) :]:
        assert abs(1 - row["stored_bytes"] / (row["rows"] * row["row_bytes"]) - row["savings"]) < 1e-4
        assert row["encode_us"] == row["decode_us"] == 1e6 and row["gbps"] > 0 and row["chosen"] is None
    assert "dates int32, nvcomp:cascaded, level 7: nvCOMP refuses this: there is no level 7" in capsys.readouterr().out
    assert {options[:2] for options in fake_cascaded} == {("Cascaded", 65536)}
    assert {options[2] for options in fake_cascaded} == {"|u1", "<u4", "<u8"}
    symmetric = [options for *_, data_type, options in fake_cascaded if "mode" in options and data_type == "<u8"]
    assert symmetric == [{"mode": choose.nvcomp.CascadedMode.SYMMETRIC, "fine_grained_encodings": 7}]
    masks = {options.get("fine_grained_encodings") for *_, options in fake_cascaded}
    assert masks == {None, 5, 6, 7}
    *_, candidates, options = (table for table in claims.TABLES if table.csv == "choose")
    heads = options.markdown(reading.Results(tmp_path)).split("\n")[0].strip("| ").split(" | ")
    assert heads == ["set", *ends] and "level" not in candidates.markdown(reading.Results(tmp_path))
    assert choose.main([*argv, "--sets", "strings as int32"]) == 0
    again = reading.read(tmp_path / "choose.csv")
    assert again[: len(rows)] == rows and {row["case"] for row in again[len(rows) :]} == {"strings as int32"}


def test_wrong_bits_of_cascaded_are_no_row(fake_cascaded, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeCodec, "decode", lambda self, array, out, decompression_config: out.zero_())
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--cascaded", "--sets", "dates"]
    assert choose.main(argv) == 1 and reading.read(tmp_path / "choose.csv") == []


def test_strings_as_words_are_the_same_bytes():
    makers = choose.strings_as_words, choose.strings
    words, text = (make(1 << 10, torch.Generator().manual_seed(0)) for make in makers)
    assert words.dtype == torch.int32 and words.shape == (128, 4) and torch.equal(words.view(torch.uint8), text)


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
    row = rate_row(arm="planes gather, beside", sms=16, loss_ratio="1.45", fetch_share="0.9")
    alone = rate_row(arm="planes gather, alone", sms=16)
    assert overlap.shortfalls([row, alone]) == []
    assert len(overlap.shortfalls([row | {"loss_ratio": "1.6", "fetch_share": "0.8"}, alone | {"gbps": "60"}])) == 3
    assert overlap.shortfalls([row | {"loss_ratio": "9", "sms": 4}]) == []
    assert overlap.shortfalls([row | {"arm": "sleep, beside", "loss_ratio": "9", "fetch_share": ""}]) == []  # no fetch
    assert overlap.shortfalls([row | {"arm": f"{overlap.COPY_ARM}, beside", "fetch_share": "0.1"}]) == []


# ---- kinds of rows, compressing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, row_bytes, arm, sms, wanted",
    [
        ("short", 128, "planes slots", None, 62),
        ("short", 128, "planes slots", 8, 50),
        ("short", 128, "planes slots", 16, None),
        ("short", 128, "planes encode", None, 95),
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
        ("zeros", 2048, "planes encode", None, 800),
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
    assert harness.judged(58.0, 80.0, 60.0) == {"target_gbps": "57", "met": "yes"}  # 95 % of what the hardware allows
    assert harness.judged(50.0, None, 60.0) == {}
    rows = [rate_row(**harness.judged(49.0, wanted)) for wanted in (None, 40.0, 50.0)]
    assert harness.missed(rows) == ["normal 0.02 bfloat16, 1024 B, planes slots, 8 SMs: 75 GB/s, wanted 50"]


# ---- whole scripts -------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, tmp_path):
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
    kinds = paths.kinds
    monkeypatch.setattr(paths, "kinds", lambda run, data_dir: itertools.islice(kinds(run, data_dir), 2))
    monkeypatch.setattr(compress, "SETS", compress.SETS[:1])
    monkeypatch.setattr(encode_into, "CASES", encode_into.CASES[:2])
    monkeypatch.setattr(activations, "QUICK_CASES", activations.QUICK_CASES[2:])
    monkeypatch.setattr(spill, "CASES", spill.CASES[3:4])
    monkeypatch.setattr(compress, "SMALL_ELEMENTS", (64, 1000))
    monkeypatch.setattr(dcp, "TMPFS", tmp_path / "none")
    yield
    torch.set_num_threads(threads)


def test_every_nth_case_alone(small, tmp_path):
    """--every N: what tools/compare_commits.py measures."""
    assert small_calls.main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--every", "2"]) == 0
    cases = [line[1] for line in lines_of(tmp_path / "small_calls.csv")[1:]]
    wanted = small_calls.NUM_ROWS[::2]
    assert list(dict.fromkeys(case.split(", ")[-1] for case in cases)) == [f"{rows:,} rows" for rows in wanted]


def test_a_table_is_compressed_in_place(monkeypatch, tmp_path):
    """Every row is compared, rows of other runs stay, and a row that comes back with other bits is found."""
    same = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    argv = ["--inplace", "0.003", *same]
    run = harness.Run("compress", harness.parse_args(same), compress.COLUMNS)
    compress.record(run, "another", compress.CPU, torch.zeros(4, 8), 1.0, 0.0, 1.0)
    for options in ([], ["--count"], []):
        assert compress.main([*argv, *options]) == 0
    other, *rows = reading.read(tmp_path / "compress.csv")
    plain = [compress.FILLING, compress.IN_PLACE + compress.PAGEABLE]
    assert other["case"] == "another" and {row["case"] for row in rows} == {"normal 0.02, 0.003 GB"}
    assert [row["arm"] for row in rows] == [*(arm + compress.COUNTED for arm in plain), *plain]
    assert all(row["host_gb"] > 0.003 for row in rows)
    for row in rows[1::2]:
        assert row["checked_rows"] == row["rows"] == 3_000_000 // row["row_bytes"] and row["savings"] > 0
    assert 0 < rows[1]["learn_ms"] < rows[1]["ms"] and rows[3]["learn_ms"] is None
    select = compress.ibp.index_select
    monkeypatch.setattr(compress.ibp, "index_select", lambda *args, **given: select(*args, **given).roll(1, 0))
    assert compress.main(argv) == 1
    with pytest.raises(SystemExit, match="1e\\+09 GB in place need 1000000008 GB of memory, and this machine has "):
        compress.main(["--inplace", "1e9", *same])


def path_rows(monkeypatch, tmp_path, times):
    """Runs one case of paths.py whose arms take times, {arm: [seconds of each measurement]}. Returns its rows."""
    args = harness.parse_args(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    run = harness.Run("paths", args, harness.TARGET_COLUMNS)
    case = paths.Case(run, "a case", torch.zeros(4, 8), types.SimpleNamespace(savings=0.5), 4, 100.0)
    monkeypatch.setattr(case, "seconds", lambda arm, call, wanted: times[arm].pop(0))
    named = {arm: (arm, None) for arm in times if arm != paths.CHOSEN}
    case.compare(lambda path, sms: path, named, None)
    return {row["arm"]: row for row in run.rows}


def test_a_chosen_path_is_judged_by_the_fastest_named_one(monkeypatch, tmp_path):
    rows = path_rows(monkeypatch, tmp_path, {"gpu": [1.0], "cpu": [2.0], paths.CHOSEN: [1.1]})
    assert rows[paths.CHOSEN]["met"] == "yes" and "met" not in rows["gpu"]
    rows = path_rows(monkeypatch, tmp_path, {"gpu": [1.0, 1.0], "cpu": [2.0, 2.0], paths.CHOSEN: [1.3, 1.05]})
    assert rows[paths.CHOSEN]["met"] == "yes", "measured again"
    rows = path_rows(monkeypatch, tmp_path, {"gpu": [1.0, 1.0], "cpu": [2.0, 2.0], paths.CHOSEN: [1.3, 1.2]})
    assert rows[paths.CHOSEN]["met"] == "no"


@pytest.mark.parametrize(
    "script",
    [
        *(
            stream,
            large_table,
            overlap,
            small_calls,
            families,
            compress,
            encode_into,
            changes,
            deltas,
            linear,
        ),
        *(scattered, spill, paths),
        *(
            pytest.param(script, marks=pytest.mark.slow)
            for script in (host_calls, gather, codec, activations, checkpoints, dcp)
        ),
    ],
    ids=lambda script: script.__name__,
)
def test_a_script_runs_on_the_cpu(script, small, tmp_path):
    assert script.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    name = script.__name__.split(".")[-1]
    lines = lines_of(tmp_path / f"{name}.csv")
    assert len(lines) > 3 and all(float(line[7]) > 0 and float(line[8]) > 0 for line in lines[1:])


def test_a_script_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    called, before = [], signal.getsignal(signal.SIGTERM)

    def start(words, **_):
        called.append(words[2:])
        return types.SimpleNamespace(
            wait=lambda limit_s: -11 if words[2] == "benchmarks.codec" else 0, terminate=lambda: None
        )

    monkeypatch.setattr(suite.subprocess, "Popen", start)
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert suite.main(["--all", *argv]) == 1
    signal.signal(signal.SIGTERM, before)
    names = [*suite.SPEED, *suite.CODING, *suite.CACHES, *suite.TRAINING, *suite.CHOICES, *suite.MODELS, *suite.BYTES]
    assert called == [[*f"benchmarks.{name}".split(), *argv] for name in names]
    assert all((Path(suite.__file__).parent / f"{name.split()[0]}.py").exists() for name in [*names, *suite.OTHERS])
    called.clear()
    assert suite.main(["--papers", "--choices", *argv]) == 1  # codec again
    signal.signal(signal.SIGTERM, before)
    read = {csv for name in reproduction.PAPERS for csv in reproduction.csvs_of(name, reading.Results(harness.RESULTS))}
    # densities.py and entries.py write the first two, too, and kv_request.py writes the last if a clone is named.
    page = read - {"activation_ratios", "moments", "infinigen"}
    assert {words[0] for words in called} == {f"benchmarks.{name}" for name in page | suite.CHOICES.keys()}
    assert len({tuple(words) for words in called}) == len(called)


def test_one_claim_takes_its_scripts_alone(monkeypatch, tmp_path):
    called, before = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(suite, "run_script", lambda name, argv, limit_s: called.append(name))
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert suite.main(["--claim", "ibp", "Figure 11", *argv]) == 0
    signal.signal(signal.SIGTERM, before)
    assert called == ["weights", "flexgen_opt", "flexgen_opt --trace"]
    for paper, item, known in (("ibp", "Table 8", "Table 1"), ("xyz", "Table 1", "dietgpu")):
        with pytest.raises(SystemExit, match=f"there is no '{item}' of '{paper}'; wanted one of .*{known}"):
            suite.rows_of(paper, item)


def test_scripts_run_together(monkeypatch):
    """A GPU has one script at a time, a script that compares GPUs has two, and a CSV has one writer."""
    busy, most, order, lock = set(), [0], [], threading.Lock()

    def run_script(name, argv, limit_s, gpus, cores, running):
        taken = {*gpus, suite.script_of(name)}
        with lock:
            assert not taken & busy and len(gpus) == (2 if name == "scale" else 1)
            busy.update(taken)
            most[0] = max(most[0], len(busy))
            order.append(name)
        time.sleep(0.01)
        with lock:
            busy.difference_update(taken)
        return int(name == "codec")

    monkeypatch.setattr(suite, "run_script", run_script)
    names = ["gather", "llm", "scale", "codec", "llm --large", "bags", "linear"]
    ended = suite.run_together(names, [], {"llm": 2, "llm --large": 2, "linear": 3}, 3)
    assert ended == {name: int(name == "codec") for name in names}
    assert order[0] == "scale" and order.index("llm") < order.index("llm --large") and most[0] > 3


def test_scripts_that_run_together_end_with_the_suite(monkeypatch):
    ended = threading.Event()

    class Process:
        def wait(self, limit_s):
            assert ended.wait(10)

        def terminate(self):
            ended.set()

    def run_script(name, argv, limit_s, gpus, cores, running):
        if name == "codec":
            raise SystemExit(1)
        running.append(Process())
        running[-1].wait(None)

    monkeypatch.setattr(suite, "run_script", run_script)
    with pytest.raises(SystemExit):
        suite.run_together(["gather", "codec", "bags"], [], {"codec": 2, "gather": 1}, 2)


def test_a_script_is_stopped_when_its_time_is_over(tmp_path):
    assert suite.run_script("clusters", ["--device", "cpu", "--out", str(tmp_path)], limit_s=0.1) != 0


def test_what_has_no_time_left_does_not_begin(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(suite.time, "perf_counter", lambda: now[0])
    assert suite.allowed_s("gather", {"gather": 80}, 150.0) == 50
    assert suite.allowed_s("gather", {"gather": 30}, 150.0) == 30
    assert suite.allowed_s("ratio", {}, math.inf) is None
    now[0] = 150.0
    monkeypatch.setattr(suite.subprocess, "Popen", None)  # nothing is started
    assert suite.run_script("gather", [], suite.allowed_s("gather", {"gather": 80}, 150.0)) == 1
    assert "gather: no time was left" in capsys.readouterr().out


# ---- counters ------------------------------------------------------------------------------------------------------


def test_counters_are_read_by_call():
    heads = ["ID", "Kernel Name", "gpu__time_duration.sum", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"]
    heads += ["sm__inst_issued.avg.pct_of_peak_sustained_active", "sm__warps_active.avg.pct_of_peak_sustained_active"]
    stalls = ("long_scoreboard", "selected")
    heads += [f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in stalls]
    lines = [
        ["", "", "ns", "%", "%", "%", "", ""],
        ["0", "at::cuda::spin_kernel(long)", "1,000", *["0"] * 5],
        ["1", "void ibp::list_rows<3>(int)", "500", *["1"] * 5],
        ["2", "void ibp::decode_rows<ibp::Planes<4, 8>, 2>(ibp::Job)", "1,500", "60", "80.5", "25", "6", "2"],
        ["3", "at::cuda::spin_kernel(long)", "1,000", *["0"] * 5],
        ["4", "memset", "10", *["0"] * 5],
    ]
    text = "\n".join(["==PROF== Connected", *(",".join(f'"{cell}"' for cell in line) for line in [heads, *lines])])
    calls = profiles.kernels_of(text)
    assert [len(kernels) for kernels in calls] == [2, 1]
    columns, all_ns = profiles.counted(calls[0])
    assert all_ns == 2000 and columns["kernel"] == "decode_rows" and columns["us"] == "1.5" and columns["launches"] == 2
    assert (columns["issue"], columns["memory"], columns["warps"], columns["bound"]) == (
        "80.5",
        "60.0",
        "25.0",
        "issue",
    )
    assert (columns["share"], columns["stall"], columns["stall_share"]) == ("0.750", "long_scoreboard", "0.750")
    assert profiles.counted(calls[1])[0]["kernel"] == "memset"


def test_profiled_calls_run_without_a_gpu(tmp_path, capsys):
    assert profiles.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    assert "the calls ran" in capsys.readouterr().out and not (tmp_path / "profiles.csv").exists()


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
        assert len(methods) == 9 + num_floats
        for measure in methods.values():
            cell = ratio.measure_cell(measure, [torch.ones(3, 5, dtype=dtype)], torch.device("cpu"), with_times=False)
            assert cell.stored_bytes == 15 * dtype.itemsize and cell.metadata_bytes is None
    assert {"algorithm": "ANS", "uncomp_chunk_size": 65536, "data_type": "<f2"} in PlainCodec.made
    assert not any(name.startswith("nvcomp ") for name in ratio.methods_for(torch.bfloat16, on_gpu=False))


def test_ndzip_is_a_method_where_a_clone_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("IBP_NDZIP", raising=False)
    assert ratio.NDZIP not in ratio.methods_for(torch.float32, on_gpu=False)
    monkeypatch.setenv("IBP_NDZIP", str(tmp_path))
    measure = ratio.methods_for(torch.float16, on_gpu=False)[ratio.NDZIP]
    assert ratio.NDZIP not in ratio.methods_for(torch.int8, on_gpu=False)
    with pytest.raises(FileNotFoundError, match="no src/ndzip/cpu_codec.inl; wanted a clone of ndzip"):
        measure([torch.zeros(2, 2)], None)
    (tmp_path / "src" / "ndzip").mkdir(parents=True)
    for name in ("common.cc", "cuda_codec.inl", "cpu_codec.inl"):
        (tmp_path / "src" / "ndzip" / name).touch()
    assert "{size}" in ndzip.source_of(tmp_path, False) and '"cuda_codec.inl"' in ndzip.source_of(tmp_path, True)
    monkeypatch.setattr(ndzip, "library", lambda clone, on_gpu: HalvedWords)
    assert measure([torch.ones(4, 4), torch.ones(2, 2)], None)[0].stored_bytes == 32 + 8
    monkeypatch.setattr(HalvedWords, "decode", lambda *arguments: None)
    with pytest.raises(AssertionError, match="ndzip: bits differ"):
        measure([torch.ones(4, 4)], None)


class HalvedWords:
    """Stands in for ndzip's library: pairs of equal words."""

    @staticmethod
    def words_at(address, count):
        return (ctypes.c_uint32 * count).from_address(address.value)

    def bound(size):
        return size

    def encode(size, source, to):
        HalvedWords.words_at(to, size // 2)[:] = HalvedWords.words_at(source, size)[::2]
        return size // 2

    def decode(size, source, to):
        HalvedWords.words_at(to, size)[:] = [w for w in HalvedWords.words_at(source, size // 2) for _ in range(2)]


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


@pytest.mark.slow
def test_ratio_writes_its_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([tiny_set(), tiny_set(40, "cora")]))
    assert ratio.main(["--device", "cpu", "--quick", "--no-times", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path / "ratio.csv")
    heads = "set,dtype,rows,row_bytes,method,savings,link_savings,metadata_bytes,seconds,version,commit"
    assert ",".join(lines[0]) == heads
    assert [line[4] for line in lines[1:5]] == list(ratio.OURS) and lines[1][:4] == [
        "normal 1",
        "float32",
        "400",
        "128",
    ]
    assert all((line[8], line[10]) == ("", harness.commit_id()) for line in lines[1:])


def test_ratio_measures_some_and_keeps_the_others(tmp_path, monkeypatch):
    found = [tiny_set(), tiny_set(40, "cora")]
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter(found))
    monkeypatch.setattr(sets, "simulated_sets", lambda rows: iter(()))
    argv = ["--device", "cpu", "--quick", "--no-times", "--out", str(tmp_path)]
    assert ratio.main([*argv, "--methods", "planes"]) == 0 and ratio.main([*argv, "--methods", "ibp; paper"]) == 0
    lines = [(line[0], line[4]) for line in lines_of(tmp_path / "ratio.csv")[1:]]
    assert lines == [(name, method) for name in ("normal 1", "cora") for method in ("planes", "paper", "ibp")]
    found.reverse()
    before = lines_of(tmp_path / "ratio.csv")
    assert ratio.main([*argv, "--methods", "planes", "--sets", "cora"]) == 0
    assert sorted(lines_of(tmp_path / "ratio.csv")) == sorted(before)


def test_ratio_goes_on_after_a_failure(tmp_path, monkeypatch):
    def broken(tensors, device):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([tiny_set()]))
    monkeypatch.setattr(sets, "simulated_sets", lambda rows: iter(()))
    monkeypatch.setattr(ratio, "methods_for", lambda dtype, on_gpu: {"auto": broken, "planes": ratio.ours("planes")})
    assert ratio.main(["--device", "cpu", "--no-times", "--out", str(tmp_path)]) == 1
    assert [line[4] for line in lines_of(tmp_path / "ratio.csv")[1:]] == ["planes"]


def test_sampling_writes_its_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([tiny_set()]))
    assert sampling.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path / "sampling.csv")
    assert ",".join(lines[0]) == "set,dtype,scheme,sample,savings,commit"
    assert [line[2:4] for line in lines[1:]] == [
        [scheme, str(share)] for scheme in sampling.SCHEMES for share in sampling.SAMPLES
    ]
    assert float(lines[6][4]) > 0.1


def test_cpu_writes_its_cases_and_puts_back_what_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "NORMAL", inputs.NORMAL[:1])
    monkeypatch.setattr(cpu, "data_bytes", lambda run: 1 << 18)
    monkeypatch.setattr(sets, "simulated_sets", lambda rows: iter([sets.Set("waves", (torch.randn(8, 8).double(),))]))
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
    assert {"rans decompress", "rans of bytes compress"} < {line[2] for line in one_thread}
    of_one_alone = 2 * len(avx2) * len(cpu.SCHEMES)
    of_all_threads = len(one_thread) - of_one_alone if before[0] > 1 else 0
    waves = [line for line in lines[1:] if line[1] == "waves, 1 thread"]
    assert [line[2] for line in waves][: len(arms)] == arms
    assert len(lines) == 1 + len(one_thread) + of_all_threads + len(waves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_listed_zeros_come_back(tmp_path, dtype):
    """As cDMA counts them: a bit an element, and the elements that are not zero; -0 is none. Dense tensors stay."""
    run = run_on_cpu(tmp_path)
    x = torch.randn(3, 5, 41, 67).relu().to(dtype).to(memory_format=torch.channels_last)
    x[0, 0, 0, :2] = torch.tensor([-0.0, math.nan])
    recipe = activations.zeros_recipe(x.permute(0, 2, 3, 1).reshape(-1).view(torch.uint8), dtype)
    kept = int(torch.count_nonzero(x)) + 1  # -0
    counted = kept / x.numel() + 1 / (8 * dtype.itemsize)
    assert recipe.coded_share == pytest.approx(counted, abs=0.02) and recipe.codebook.num_entries == 0
    zeros = activations.zeros_listed(run)
    with zeros:
        saved = zeros._pack(x)
        harness.check_bits(zeros._unpack(saved), x, "zeros listed")
        dense = torch.randn(1 << 14).to(dtype)
        assert zeros._unpack(zeros._pack(dense)) is not None
    stats = zeros.stats()
    assert stats.coded_bytes == x.nbytes and stats.kept_bytes == dense.nbytes
    assert counted < stats.device_bytes / x.nbytes < counted + 0.1  # with each row's length and base


def test_larger_batches_stand_beside_other_arms(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "QUICK_CASES", activations.QUICK_CASES[-1:])
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert activations.main([*argv, "--arms", "none"]) == 0 and activations.main([*argv, "--batches"]) == 0
    arms = [line[2] for line in lines_of(tmp_path / "activations.csv")[1:]]
    assert arms == ["plain", *(f"{arm} in 4 GB" for arm in ("plain", "recomputed", "ibp", "on the device"))]


def test_rows_of_an_older_csv_stay(tmp_path):
    """With empty cells for its missing columns; a column that is gone drops them."""
    path = tmp_path / "some.csv"
    path.write_text("case,arm\na,b\nc,d\n")
    harness.start_file(path, ["case", "arm", "new"], lambda row: row["case"] == "a")
    assert lines_of(path) == [["case", "arm", "new"], ["a", "b", ""]]
    harness.start_file(path, ["case", "new"], lambda row: True)
    assert lines_of(path) == [["case", "new"]]


def test_trained_nets():
    case = next(case for case in activations.QUICK_CASES if case.plan is not None)
    (net, x), untrained = case.build(torch.device("cpu")), densities.started(case.plan, torch.device("cpu"))
    assert list(x.shape) == list(case.shape) and x.is_contiguous(memory_format=torch.channels_last)
    same = [torch.equal(*weights) for weights in zip(net.parameters(), untrained.parameters(), strict=True)]
    assert not any(same)


def test_what_is_compared_of_activations(monkeypatch):
    """Gradients; or saved tensors, where plain steps turn out to have other gradients every time."""
    net, x = activations.QUICK_CASES[2].build(torch.device("cpu"))
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
