"""Calibrations: measured once, kept on disk, and what is chosen by them."""

import dataclasses
import gc
import json
import types
import warnings

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding, in_threads, reckon_with, sized
from ibp import calibration as measuring
from ibp._common import ops
from ibp._fetch import streaming
from ibp._machine import calibration
from ibp._machine import memory as _memory
from ibp._rows import codebook as codebooks
from ibp._rows import geometry, handle, learning

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
READ, WRITE = calibration._read, calibration._write  # which the other tests do without
SLOW_LINK = dataclasses.replace(
    ibp.calibration.H200, gpu="slow link", read_gbps=6.0, least_row_ns=8.0, copy_in_gbps=6.5
)
FAST_LINK = dataclasses.replace(
    ibp.calibration.H200, gpu="fast link", read_gbps=400.0, least_row_ns=0.2, copy_in_gbps=420.0
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Stands in for a CUDA device: `measured` are the calibrations that measuring gives, one after the other."""
    found = types.SimpleNamespace(
        measured=[SLOW_LINK, FAST_LINK], calls=0, properties=types.SimpleNamespace(name="some GPU", uuid="1-2-3")
    )

    def measure(device, seconds):
        assert device == GPU and seconds == 4.0
        found.calls += 1
        return found.measured[found.calls - 1]

    monkeypatch.setattr(calibration, "_read", READ)
    monkeypatch.setattr(calibration, "_write", WRITE)
    monkeypatch.setattr(calibration, "_in_force", {})
    monkeypatch.setattr(calibration, "_complained", set())
    monkeypatch.setattr(ops, "cuda_is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(_memory, "canonical", lambda device: CPU if str(device) == "cpu" else GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found.properties)
    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def forget():
    """As a new process begins."""
    calibration._in_force.clear()


@pytest.mark.parametrize("test", ["one", "the next"])
def test_it_ends_with_a_test(test):
    """No test reckons with what another one has measured."""
    assert CPU not in calibration._in_force
    calibration._in_force[CPU] = SLOW_LINK


def test_it_is_measured_once(machine, tmp_path):
    assert calibration.in_force(GPU) is ibp.calibration.H200 and not calibration.is_measured(GPU)
    assert ibp.calibration.calibrate() == SLOW_LINK == ibp.calibration.calibrate(device=0) and machine.calls == 1
    assert calibration.in_force(GPU) == SLOW_LINK == calibration.in_force(CPU) and calibration.is_measured(GPU)
    forget()
    assert calibration.in_force(GPU) == SLOW_LINK == ibp.calibration.calibrate() and machine.calls == 1
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "ibp"]


def test_it_is_measured_again_when_asked(machine):
    ibp.calibration.calibrate()
    assert ibp.calibration.calibrate(refresh=True) == FAST_LINK == calibration.in_force(GPU) and machine.calls == 2
    forget()
    assert ibp.calibration.calibrate() == FAST_LINK and machine.calls == 2


@pytest.mark.parametrize("changed", [{"name": "another GPU"}, {"uuid": "4-5-6"}, {"version": "0.0.1"}], ids=str)
def test_another_machine_has_another(machine, monkeypatch, changed):
    ibp.calibration.calibrate()
    forget()
    if "version" in changed:
        monkeypatch.setattr(calibration._core, "version", lambda: changed["version"])
    else:
        vars(machine.properties).update(changed)
    assert calibration.in_force(GPU) is ibp.calibration.H200
    assert ibp.calibration.calibrate(refresh=True) == FAST_LINK


def contents():
    """What cannot be a calibration of this machine."""
    right = {"key": calibration._key(GPU), "calibration": dataclasses.asdict(SLOW_LINK)}

    def changed(**values):
        return json.dumps(right | {"calibration": right["calibration"] | values})

    less = {name: value for name, value in right["calibration"].items() if name != "pairs"}
    return {
        "empty": "",
        "cut off": json.dumps(right)[:-40],
        "a list": "[]",
        "nested too deep": "[" * 100_000,
        "no text": b"\xff\xfe",
        "another key": json.dumps(right | {"key": {"gpu": "another"}}),
        "no rates": json.dumps({"key": right["key"], "calibration": None}),
        "a field less": json.dumps(right | {"calibration": less}),
        "a field more": changed(further=1.0),
        "negative": changed(read_gbps=-1.0),
        "zero": changed(least_row_ns=0),
        "not a number": changed(read_gbps=float("nan")),
        "infinite": changed(memset_gbps=float("inf")),
        "huge": changed(memset_gbps=10**400),
        "a flag": changed(read_gbps=True),
        "a text": changed(read_gbps="51.4"),
        "not whole": changed(reach_bytes=1.5),
        "a number for a name": changed(gpu=1),
        "no coder": changed(pairs=1.0),
        "a coder less": changed(pairs={"decode_gbps": 1.0}),
    }


def test_a_broken_file_is_left_out(machine):
    path = calibration.cache_file(GPU)
    path.parent.mkdir()
    for name, content in contents().items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        forget()
        calibration._complained.clear()
        with pytest.warns(UserWarning, match="is left out") as warned:
            assert calibration.in_force(GPU) is ibp.calibration.H200, name
            forget()
            assert calibration.in_force(GPU) is ibp.calibration.H200, name
        assert len(warned) == 1, name
    forget()
    assert ibp.calibration.calibrate() == SLOW_LINK
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibration.in_force(GPU) == SLOW_LINK and machine.calls == 1


def test_it_is_measured_where_there_was_nothing_to_read(machine):
    """The H200's rates, in force meanwhile, are not taken for measured ones."""
    assert calibration.in_force(GPU) is ibp.calibration.H200
    assert ibp.calibration.calibrate() == SLOW_LINK


def test_writers_at_the_same_time(machine, tmp_path):
    """A reader finds the whole of what one of them wrote."""
    written = [dataclasses.replace(SLOW_LINK, gpu=f"GPU {k}", read_gbps=float(k + 1)) for k in range(8)]
    calibration._write(GPU, written[0])

    def read():
        for _ in range(50):
            assert READ(GPU) in written

    writers = [lambda one=one: [calibration._write(GPU, one) for _ in range(20)] for one in written]
    in_threads(read, *writers)
    assert READ(GPU) in written and len(list((tmp_path / "ibp").iterdir())) == 1


def test_a_directory_that_cannot_be_written(machine, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(UserWarning, match="for this process only"):
        assert ibp.calibration.calibrate() == SLOW_LINK
    assert calibration.in_force(GPU) == SLOW_LINK


def test_the_directory(machine, tmp_path, monkeypatch):
    for named in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert calibration.cache_file(GPU).parent == tmp_path / ".cache" / "ibp"


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(ops, "cuda_is_available", lambda: False)
    monkeypatch.setattr(calibration, "_in_force", {})
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        ibp.calibration.calibrate()
    assert calibration.in_force(CPU) is ibp.calibration.H200


@pytest.mark.parametrize(
    "arguments, error",
    [({"seconds": 0.1}, ValueError), ({"seconds": "4"}, TypeError), ({"seconds": float("nan")}, ValueError)],
    ids=str,
)
def test_arguments(machine, arguments, error):
    with pytest.raises(error, match="seconds"):
        ibp.calibration.calibrate(**arguments)
    with pytest.raises(ValueError, match="wanted a CUDA device"):
        ibp.calibration.calibrate("cpu")
    assert machine.calls == 0


def test_nothing_measures_by_itself(monkeypatch):
    monkeypatch.setattr(measuring, "measure", lambda *arguments: pytest.fail("measured"))
    x = embedding(3000, 64)
    table = ibp.compress(x, memory="host")
    assert_same_bits(ibp.index_select(table, torch.arange(3000)), x)


# ---- what is chosen ------------------------------------------------------------------------------------------------


@pytest.fixture
def scheme_for(monkeypatch):
    """The scheme that is chosen for a tensor by the calibration in force, and the time of its rows over that of raw
    ones. Codebooks are learned once."""
    requests, learned, learn = {}, {}, learning.learn_scheme

    def remembered(scheme, request):
        if (scheme, id(request)) not in learned:
            learned[scheme, id(request)] = learn(scheme, request)
        return learned[scheme, id(request)]

    monkeypatch.setattr(learning, "learn_scheme", remembered)

    def choose(x):
        request = requests.setdefault(id(x), learning.Request(geometry.bytes_of(x), geometry.Geometry.of(x), CPU))
        candidates, _ = learning.compare(request)
        chosen = learning.choose(candidates)
        return chosen.scheme, chosen.row_ns / candidates[0].row_ns

    return choose


def slow_decoder(**rates):
    return {
        name: dataclasses.replace(getattr(ibp.calibration.H200, name), **rates) for name in ("pairs", "dense", "masks")
    }


def test_auto_reckons_with_the_machine(monkeypatch, scheme_for):
    short, long = (torch.randn(1024, columns).mul(0.02).to(torch.bfloat16) for columns in (64, 512))

    def schemes(**rates):
        reckon_with(monkeypatch, **rates)
        return scheme_for(short)[0], scheme_for(long)[0]

    assert schemes() == ("raw", "planes")  # an H200
    assert schemes(read_gbps=6.0, least_row_ns=8.0) == ("planes", "planes")
    assert schemes(read_gbps=3000.0, least_row_ns=0.2) == ("raw", "raw")
    assert schemes(**slow_decoder(work_per_ns=10.0)) == ("raw", "raw")
    assert schemes(**slow_decoder(least_row_ns=1000.0)) == ("raw", "raw")


def test_auto_takes_no_slots_that_are_slower_than_raw_rows(monkeypatch, scheme_for):
    """Whatever the machine: what is chosen takes no longer than raw rows do."""
    xs = [embedding(200, columns, dtype) for columns in (8, 64, 300) for dtype in (torch.float32, torch.bfloat16)]
    for read_gbps in (3.0, 12.0, 51.4, 400.0):
        for decoder_ns in (0.1, 3.0, 50.0):
            reckon_with(monkeypatch, read_gbps=read_gbps, **slow_decoder(least_row_ns=decoder_ns))
            assert all(scheme_for(x)[1] <= 1 for x in xs)


def pinned(num_bytes):
    """Returns what plans read of a table of rows of 512 bytes."""
    return sized(num_bytes // 512, 512, num_bytes)


def test_plans_reckon_with_the_machine(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    of_h200 = ibp.calibration.H200
    assert handle.LEAST_BUCKETED_IDS < handle.least_bucketed(pinned(4 << 30), False, of_h200) < 100_000
    assert handle.least_bucketed(pinned(4 << 30), True, of_h200) == handle.LEAST_BUCKETED_IDS
    assert handle.stages(pinned(16 << 30), 100_000, of_h200) and not handle.stages(pinned(1 << 30), 40_000, of_h200)
    changed = dataclasses.replace(of_h200, reach_bytes=1 << 20, gather_gbps=1.0)
    assert handle.least_bucketed(pinned(1 << 24), True, changed) < 100_000
    assert handle.least_bucketed(pinned(1 << 20), True, changed) == handle.NEVER
    assert not handle.stages(pinned(16 << 30), 100_000, changed)


def test_streams_reckon_with_the_machine(monkeypatch):
    assert not streaming._copies(GPU, 4 << 20, 0, None)
    reckon_with(monkeypatch, stream_start_us=5.0)
    assert streaming._copies(GPU, 4 << 20, 0, None)
    assert not streaming._copies(GPU, 4 << 20, 16, None) and not streaming._copies(GPU, 4 << 20, 0, "gpu")


def test_thresholds_of_an_h200():
    assert ibp.calibration.H200.least_streamed_bytes == pytest.approx(64 << 20, rel=1e-3)
    no_faster = dataclasses.replace(ibp.calibration.H200, copy_in_gbps=50.0)
    assert no_faster.least_streamed_bytes == 1 << 30


def test_it_is_shown(machine):
    text = repr(ibp.calibration.H200)
    assert text.startswith("ibp.calibration.Calibration of NVIDIA H200\n") and "64 MiB" in text and "1,952" in text
    assert max(map(len, text.splitlines())) < 120
    assert dataclasses.replace(ibp.calibration.H200) == ibp.calibration.H200
    with pytest.raises(dataclasses.FrozenInstanceError):
        ibp.calibration.H200.read_gbps = 1.0


# ---- how it is measured --------------------------------------------------------------------------------------------


FAMILIES = measuring._families(types.SimpleNamespace(device=CPU, table_bytes=1 << 20))


@pytest.mark.parametrize("name", calibration.CODER_FAMILIES)
@pytest.mark.parametrize("row_bytes", [128, 256, 2048])
def test_families_of_coders(name, row_bytes):
    """Their rows are coded by the family that they are named after, and save something."""
    family = FAMILIES[name]
    table, codebook = family.table(row_bytes, 1 << 19, CPU), family.codebook(row_bytes)
    assert codebooks.coder_rates(codebook, ibp.calibration.H200) is getattr(ibp.calibration.H200, name)
    assert table.savings > 0.15 and table.num_rows == (1 << 19) // row_bytes
    whole = ibp.decompress(table).view(torch.uint8).view(-1)
    assert torch.equal(whole, family.rows.view(torch.uint8).view(-1)[: 1 << 19])


@pytest.mark.parametrize("name", calibration.CODER_FAMILIES)
def test_rows_are_coded_into_places_that_have_room(name):
    family = FAMILIES[name]
    place = measuring._place_for(family.table(2048, 1 << 20, CPU), family.codebook(2048), CPU)
    ibp.encode_into(family.rows, place)
    assert place.counts().lost == 0
    assert_same_bits(place.decode(dtype=family.rows.dtype), family.rows)


def test_raw_tables_are_the_memory():
    memory = torch.randint(256, (4096,), dtype=torch.uint8)
    table = measuring._raw_table(memory, 32)
    assert table.slots.data_ptr() == memory.data_ptr()
    assert_same_bits(ibp.index_select(table, [3, 127]), memory.view(128, 32)[[3, 127]])


def rows_take(monkeypatch, nanoseconds):
    monkeypatch.setattr(measuring, "_row_ns", lambda clock, table, **options: nanoseconds(table, **options))


def test_the_reach_of_address_translation(monkeypatch):
    host = torch.empty(1 << 12, dtype=torch.uint8)
    monkeypatch.setattr(measuring, "_NEAR_BYTES", 1 << 8)
    for reach in (1 << 8, 1 << 10, 1 << 12):
        rows_take(monkeypatch, lambda table: 1.5 if table.slots.numel() <= reach else 5.0)
        assert measuring._reach_bytes(None, host) == reach
    rows_take(monkeypatch, lambda table: 1.5 + 1e-4 * table.slots.numel())  # gradually
    assert measuring._reach_bytes(None, host) == 1 << 11


def test_the_rows_that_a_thread_gathers(monkeypatch):
    monkeypatch.setattr(
        _memory, "empty", lambda num_bytes, *others, **options: torch.empty(num_bytes, dtype=torch.uint8)
    )
    clock = types.SimpleNamespace(wall_s=lambda call: 1e-3 if call() else None)  # in which some MB are gathered
    assert 4 < measuring._gather_gbps(clock, torch.empty(1 << 20, dtype=torch.uint8)) < 9


def test_how_many_multiprocessors_fetch_ids_in_order(monkeypatch):
    rows_take(monkeypatch, lambda table, max_sms, path: {8: 4.0, 16: 2.0, 32: 1.97}[max_sms])
    assert measuring._bucketed_sms(None, None) == 16


def test_the_least_time_of_a_row(monkeypatch):
    """By what raw rows take in the same run."""
    family, clock = FAMILIES["pairs"], types.SimpleNamespace(table_bytes=1 << 20)
    monkeypatch.setattr(
        _memory, "empty", lambda num_bytes, *others, **options: torch.empty(num_bytes, dtype=torch.uint8)
    )
    known = dataclasses.replace(ibp.calibration.H200, coded_read_share=1.0)
    slower = 1.08 * 2.6
    for coded_ns, raw_ns, expected in ((2.6, 128 / 51.4, slower), (5.2, 256 / 51.4, slower), (1.9, 128 / 51.4, 1.45)):
        rows_take(monkeypatch, lambda table: raw_ns if table.scheme == "raw" else coded_ns)
        assert measuring._least_row_ns(clock, family, known) == pytest.approx(expected)


def test_the_share_of_coded_rows(monkeypatch):
    family, clock = FAMILIES["pairs"], types.SimpleNamespace(table_bytes=1 << 20)
    for coded_ns, expected in ((5.0, 192 / 5.0 / 51.4), (1.0, 1.0)):
        rows_take(monkeypatch, lambda table: coded_ns)
        assert measuring._coded_read_share(clock, family, ibp.calibration.H200) == pytest.approx(expected, rel=0.01)


def test_the_start_of_a_stream(monkeypatch):
    """What is left of the difference where the rates are taken off."""
    taken = iter([2.1e-3, 2.0e-3, 1.0e-3, 2.0e-3])
    clock = types.SimpleNamespace(table_bytes=1 << 20, device=CPU, wall_s=lambda call: next(taken))
    num_bytes = handle.spread_bytes(FAMILIES["pairs"].table(2048, 1 << 20, CPU))
    expected = 100 + num_bytes * (1 / 51.4 - 1 / 55.4) / 1e3
    assert measuring._stream_start_us(clock, FAMILIES["pairs"], ibp.calibration.H200) == pytest.approx(expected)
    assert measuring._stream_start_us(clock, FAMILIES["pairs"], ibp.calibration.H200) == 1.0


def test_ids_differ_from_call_to_call(monkeypatch):
    table, seen = measuring._raw_table(torch.zeros(1 << 16, dtype=torch.uint8), 32), []
    monkeypatch.setattr(measuring, "index_select", lambda table, ids, **others: seen.append((ids, others)))
    clock = types.SimpleNamespace(table_bytes=1 << 20, device=CPU, gpu_s=lambda call: [call(), call()] and 1e-6)
    assert measuring._row_ns(clock, table, num_ids=100, in_order=True, path="bucketed") == pytest.approx(10.0)
    (first, others), (second, _) = seen
    assert not torch.equal(first, second) and torch.equal(first, first.sort().values) and len(first) == 100
    assert others["path"] == "bucketed" and others["out"].shape == (100, 32)


def test_on_a_gpu(cuda, monkeypatch, tmp_path):
    """Measured and kept for the next process; of the GPU's memory a stream's ring stays at most. Rates are not judged:
    other processes use the GPU meanwhile."""
    monkeypatch.setattr(calibration, "_read", READ)
    monkeypatch.setattr(calibration, "_write", WRITE)
    monkeypatch.setattr(calibration, "_in_force", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    found = ibp.calibration.calibrate(cuda, seconds=1)
    print(found)
    gc.collect()
    assert torch.cuda.memory_allocated(cuda) <= before + (64 << 20)
    assert found.gpu == torch.cuda.get_device_name(cuda) and found is not ibp.calibration.H200
    assert all(0 < rate < 1e5 for rate in dataclasses.astuple(found.pairs))
    calibration._in_force.clear()
    assert calibration.in_force(cuda) == found
