"""benchmarks/throttle.py: steps by numbers of SMs, their energy, and several processes that take steps together."""

import csv
import json
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from benchmarks import throttle


def throttled(tmp_path, *options):
    assert throttle.main([*options, "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "throttle.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_steps_by_numbers_of_sms_and_their_energy(tmp_path, monkeypatch, capsys):
    """Rows of one option stay beside those of another; a counter that is not there is named."""
    monkeypatch.setattr(throttle, "SMS", (8, 64))
    rows = throttled(tmp_path)
    assert [row["arm"] for row in rows] == ["plain", "raw", "ibp", "ibp by 8 SMs", "ibp by 64 SMs"]
    assert [row["sms"] for row in rows] == ["0", "0", "0", "8", "64"] and {row["what"] for row in rows} == {"sweep"}
    for row in rows:
        step_ms, out_ms, back_ms = (float(row[name]) for name in ("step_ms", "out_ms", "back_ms"))
        assert 0 < out_ms and 0 < back_ms and step_ms > 0 and row["joules"] == ""
    assert [row["checked"] for row in rows[1:]] == 4 * ["gradients"] and float(rows[2]["saved_gb"]) > 0
    assert throttled(tmp_path, "--energy") == rows
    assert "energy: needs --device cuda, left out" in capsys.readouterr().out
    watts = 300.0
    monkeypatch.setattr(throttle, "SMS", (16,))
    monkeypatch.setattr(throttle, "energy_meter", lambda run: lambda: watts * time.perf_counter())
    found = throttled(tmp_path, "--energy")
    assert found[:5] == rows and [row["arm"] for row in found[5:]] == ["plain", "raw", "ibp", "ibp by 16 SMs"]
    for row in found[5:]:
        assert float(row["watts"]) == pytest.approx(watts, rel=0.1) and int(row["steps"]) > 0
        assert float(row["joules"]) == pytest.approx(watts * 1e-3 * float(row["step_ms"]), rel=0.1)


@pytest.mark.slow
def test_the_slowest_of_several_gpus_counts(tmp_path, monkeypatch):
    """Each process writes what it measured; here one, then two of which the second is twice as slow."""

    def in_this_process(work, arguments, nprocs):
        work(0, 1, *arguments[1:])
        found = Path(arguments[-1])
        if nprocs == 2:
            numbers = json.loads((found / "0" / "found.json").read_text())
            numbers["ibp"]["step_ms"] *= 2
            numbers[throttle.COPIES]["gbps"] /= 2
            (found / "1").mkdir()
            (found / "1" / "found.json").write_text(json.dumps(numbers))
            read.append(numbers)

    read = []
    monkeypatch.setattr(throttle.mp, "spawn", in_this_process)
    rows = throttled(tmp_path, "--together")
    assert [(row["arm"], row["gpus"]) for row in rows] == [
        (arm, gpus) for gpus in "12" for arm in (throttle.COPIES, "plain", "raw", "ibp")
    ]
    assert float(rows[-1]["step_ms"]) == pytest.approx(read[0]["ibp"]["step_ms"], rel=1e-3)
    assert float(rows[4]["gbps"]) == pytest.approx(read[0][throttle.COPIES]["gbps"], rel=1e-3)


@pytest.mark.slow
def test_several_processes_take_steps_together(tmp_path):
    assert {row["gpus"] for row in throttled(tmp_path, "--together")} == {"1", "2"}


def test_a_counter_of_energy_that_is_not_there_is_named(monkeypatch, capsys):
    """No package; a driver that does not count; and millijoules, which become joules."""
    run = types.SimpleNamespace(on_gpu=True, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert throttle.energy_meter(run) is None
    assert capsys.readouterr().out == "energy: the package nvidia-ml-py is not installed, left out\n"

    class NVMLError(Exception):
        pass

    def not_supported(handle):
        raise NVMLError("Not Supported")

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-1-2": "handle"}[name],
        nvmlDeviceGetTotalEnergyConsumption=not_supported,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert throttle.energy_meter(run) is None
    assert capsys.readouterr().out == "energy: NVML does not count it (Not Supported), left out\n"
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 2500 if handle == "handle" else 0
    assert throttle.energy_meter(run)() == 2.5


@pytest.mark.slow
def test_copies_of_a_step_on_a_gpu(cuda, tmp_path):
    assert throttle.main(["--device", "cuda", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "throttle.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["arm"] != "plain"]
    assert len(rows) == 2 + len(throttle.SMS)
    assert all(0 < float(row["out_ms"]) <= float(row["step_ms"]) * 1.5 for row in rows)
