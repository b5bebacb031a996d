"""`ibp doctor`, and `ibp bench`, as it was called."""

import dataclasses
import json
import os
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

import ibp
from ibp import _core
from ibp._cli import doctor
from ibp._cli.doctor import config
from ibp._cli.main import main
from ibp._machine import calibration
from ibp._machine.memory import PinningError

H200 = ibp.calibration.H200
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(calibration._TABLE_BYTES, "cpu", (1 << 20, 16))
    monkeypatch.setattr(doctor, "_KINDS", {kind: doctor._KINDS[kind] for kind in ("BF16 weights", "FP8 weights")})
    monkeypatch.setattr(doctor, "TEST_SECONDS", 0.0)


# ---- the command ----


@pytest.mark.parametrize("word", ["doctor", "bench"])
def test_on_a_cpu(word, small, capsys):
    assert main([word, "--device", "cpu", "--seconds", "1", "--jobs", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ("" if word == "doctor" else "ibp: `ibp bench` is now `ibp doctor`, which runs\n")
    document = json.loads(shown.out)
    assert document["threads"] == 1 and document["link"] is None and document["failed"] == []
    assert document["tests"] == 43 and document["facts"]["ibp"].startswith(ibp.__version__)
    weights = document["data"][0]
    assert weights["lossless"] and 0.3 < weights["saved"] < 0.35 and all(rate > 0 for rate in weights["gbps"].values())
    assert "BF16 weights 33 %" in document["verdict"] and "1 thread decodes" in document["verdict"]
    assert document["verdict"].startswith(f"{doctor.why_no_gpu(CPU)}: the CPU codes and decodes.")


@pytest.mark.parametrize(
    "sees, is_built, has_driver, why",
    [
        (False, False, False, "There is no GPU here"),
        (False, True, True, "Torch sees no GPU, though NVIDIA's driver is installed"),
        (True, False, True, "This build of ibp has no CUDA kernels"),
        (True, True, True, "The GPU was left out"),
    ],
)
def test_why_the_cpu_does_the_work(sees, is_built, has_driver, why, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    monkeypatch.setattr(_core, "cuda_is_built", lambda: is_built)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path if has_driver else tmp_path / "none")
    assert doctor.why_no_gpu(CPU) == why and doctor.why_no_gpu(GPU) is None


def test_the_old_word_is_quiet(small, capsys):
    assert main(["bench", "--device", "cpu", "--seconds", "1", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_architectures_of_kernels_are_known():
    text = config(CPU)["CUDA kernels"]
    architectures = _core.cuda_architectures()
    assert bool(architectures) == _core.cuda_is_built()
    assert re.fullmatch(r"built for compute capability \d+\.\d(, \d+\.\d)*" if architectures else "not built .*", text)


def test_several_architectures(monkeypatch):
    monkeypatch.setattr(_core, "cuda_is_built", lambda: True)
    monkeypatch.setattr(_core, "cuda_architectures", lambda: "800,900,1030")
    assert config(CPU)["CUDA kernels"] == "built for compute capability 8.0, 9.0, 10.3"


def test_what_is_printed_fits(small, capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert main(["doctor", "--device", "cpu", "--seconds", "1"]) == 0
    _, tested, *measured = capsys.readouterr().out.split("\n\n")
    assert tested == "Self-test by the CPU: 43 tests, and every bit came back."
    lines = "\n".join(measured).splitlines()
    assert max(map(len, lines)) <= 80 and sum("weights  " in line for line in lines) == 2
    assert not any("Other work" in line for line in lines)


@pytest.mark.parametrize("value", ["0", "121", "nan", "x"])
def test_seconds_out_of_range(value, capsys):
    assert main(["doctor", "--seconds", value]) == 2
    assert "is no number from 1 to 120" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99"])
def test_devices_that_are_none(device, capsys):
    assert main(["doctor", "--device", device]) == 2
    assert capsys.readouterr().err.startswith("ibp doctor: ")


# ---- faults ----


def refusing(*arguments, **options):
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize(
    "changed, replacement, number, first",
    [
        (doctor, ("same_bits", lambda a, b: False), 42 * 3 + 1, "BF16 weights, scheme auto, layout slots: decompress"),
        (ibp, ("index_select", refusing), 42, "no kernel image is available"),
        pytest.param(
            *(ibp, ("load", lambda path, verify: {}), 1, "a file: damaged bytes are not noticed"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_self_test_that_fails(changed, replacement, number, first, small, capsys, monkeypatch):
    monkeypatch.setattr(changed, *replacement)
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert len(document["failed"]) == number and first in document["failed"][0]
    assert document["data"] == [] and document["verdict"] is None
    assert shown.err.startswith(f"ibp doctor: {number} fault{'s' * (number > 1)}; the first: ") and first in shown.err
    assert main(["doctor", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  failed: ") for line in lines) == min(number, 8) and "Nothing was measured." in lines


def test_measurements_that_fail(small, capsys, monkeypatch):
    """What was found until then is printed."""
    monkeypatch.setattr(doctor, "code_again", refusing)
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    assert "CPU coders" in shown.out and "Nothing was measured." in shown.out
    assert shown.err == "ibp doctor: 1 fault; the first: measuring: no kernel image is available\n"


def test_measured_bits_that_differ(small, capsys, monkeypatch):
    calls = []
    monkeypatch.setattr(doctor, "same_bits", lambda a, b: calls.append(a.numel()) or a.nbytes < 1 << 19)
    assert main(["doctor", "--device", "cpu", "--seconds", "1", "--quiet"]) == 1
    assert capsys.readouterr().err == "ibp doctor: 2 faults; the first: measuring BF16 weights: bits differ\n"


def test_the_self_test_goes_on_for_its_time(monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(doctor.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(doctor, "_TESTED_KINDS", {"BF16 weights": torch.bfloat16})
    num_tests, failed = doctor.self_test(CPU, 3.5)
    assert (num_tests, failed) == (4 * 7, [])


# ---- a machine that something else uses ----


@pytest.fixture
def smi(monkeypatch):
    """nvidia-smi, which gives these answers by the first word of a query."""
    answers = {"gpu": "580.65.06, 0, 4\n", "compute": ""}

    def run(command, **options):
        assert command[:2] == ["nvidia-smi", "--id=GPU-12ab"] and options["check"]
        answer = answers[command[2].removeprefix("--query-").partition("=")[0].partition("-")[0]]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    monkeypatch.setattr(doctor, "config", lambda device: {"ibp": ibp.__version__})
    monkeypatch.setattr(doctor.memory, "empty", lambda num_bytes, device, pin: None)
    monkeypatch.setattr(_core, "pinned_limit", lambda: 3 << 30)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return answers


def test_an_idle_gpu(smi):
    smi["compute"] = f"{os.getpid()}, 500\n"
    facts, busy = doctor.facts_of(GPU)
    assert busy == [] and {name: facts[name] for name in ("load", "driver", "GPU in use", "pinned memory")} == {
        "load": "1.0 on 16 cores",
        "driver": "580.65.06",
        "GPU in use": "0 % of the time, 4 MiB of its memory",
        "pinned memory": "can be pinned; up to 3.0 GiB of what tables leave stay pinned for the next ones",
    }


def test_memory_that_cannot_be_pinned(smi, monkeypatch):
    def refuse(*_, **__):
        raise PinningError("1,048,576 bytes of memory cannot be pinned\n(no room)")

    monkeypatch.setattr(doctor.memory, "empty", refuse)
    facts, _ = doctor.facts_of(GPU)
    assert facts["pinned memory"] == "1,048,576 bytes of memory cannot be pinned (no room)"


@pytest.mark.parametrize(
    "compute, said",
    [
        ("No running processes found\n71, 9000\n", "The GPU has 1 other process: 71 (9000 MiB)."),
        ("71, 9000\n72, [N/A]\n", "The GPU has 2 other processes: 71 (9000 MiB), 72 ([N/A] MiB)."),
    ],
)
def test_a_busy_gpu(compute, said, smi):
    smi.update(gpu="580.65.06, 55, 9004\n", compute=compute)
    _, busy = doctor.facts_of(GPU)
    assert busy == ["Other work uses the GPU: it was at work for 55 % of the last second.", said]


@pytest.mark.parametrize(
    "gpu", [FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi"), "580, [N/A], 0\n"]
)
def test_what_is_not_known_is_not_busy(gpu, smi):
    smi["gpu"] = gpu
    facts, busy = doctor.facts_of(GPU)
    assert busy == [] and facts["GPU in use"] == (
        "[N/A] % of the time, 0 MiB of its memory" if isinstance(gpu, str) else "nvidia-smi does not say"
    )


@pytest.mark.parametrize("load, is_busy", [(8.0, False), (8.1, True)])
def test_a_busy_cpu(load, is_busy, smi, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    _, busy = doctor.facts_of(CPU)
    said = f"Other work uses the CPU: the load of the last minute is {load} on 16 cores."
    assert busy == ([said] if is_busy else [])


# ---- what is measured ----


def test_tables_are_coded_again_by_their_own_codebooks(monkeypatch):
    """What is measured of compressing is coding: no codebook is learned, and noise stays raw."""
    asked = []
    compress = ibp.compress
    monkeypatch.setattr(ibp, "compress", lambda x, **options: asked.append(options) or compress(x, **options))
    for kind in ("BF16 weights", "UINT8 noise"):
        x = doctor.made(kind, 1 << 16)
        doctor.code_again(compress(x, device="cpu", memory="host"), x)
    assert asked[0]["codebook"] is not None and asked[1]["scheme"] == "raw" and "codebook" not in asked[1]


def test_measurements_with_a_gpu_are_made_of_all_calls(monkeypatch):
    """The CPU takes the GPU's part."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    clock = calibration.Clock(CPU, 0.01)
    monkeypatch.setattr(clock, "gpu_s", clock.wall_s, raising=False)
    found = doctor._with_gpu(clock, "BF16 weights", doctor.made("BF16 weights", 1 << 20))
    assert found.lossless and set(found.gbps) == set(doctor._GPU_COLUMNS) and min(found.gbps.values()) > 0
    assert set(found.rows) == set(doctor._ROW_BYTES) and 0.3 < found.saved < 0.35
    assert found.rows[2048] == found.gbps["rows"] / found.gbps["raw_rows"]
    assert found.whole == found.gbps["whole"] / found.gbps["copy"]


def measured(kind, rows, whole, uncertainty=0.0):
    gbps = dict.fromkeys((*doctor._CPU_COLUMNS, *doctor._GPU_COLUMNS), 12.34)
    return doctor.Measured(kind, 0.33, True, gbps, dict(zip(doctor._ROW_BYTES, rows)), whole, uncertainty)


@pytest.mark.parametrize(
    "rows, whole, said",
    [
        (
            (1.1, 1.2, 1.46),
            1.45,
            "Compression pays here: rows of A, B (of 2,048 bytes) come up to 1.46 times as fast as raw ones; whole "
            "tensors of A come up to 1.45 times as fast as raw ones.",
        ),
        (
            (0.9, 1.2, 1.46),
            1.01,
            "Compression pays here: rows of A (of 512 or 2,048 bytes), B (of 2,048 bytes) come up to 1.46 times as "
            "fast as raw ones.",
        ),
    ],
)
def test_the_verdict_follows_from_what_was_measured(rows, whole, said):
    assert doctor.verdict([measured("A", rows, whole), measured("B", (1.0, 1.0, 1.1), 1.0)], 2, None) == said


def test_what_gains_no_speed():
    (one,) = found = [measured("A", (0.9, 1.0, 1.04), 1.0)]
    assert doctor.verdict(found, 2, None) == "Compression gains no speed here. Memory that is saved: A 33 %."
    found = [dataclasses.replace(one, whole=1.2)]
    assert doctor.verdict(found, 2, None).startswith("Compression pays here: whole tensors of A come up to 1.20 times")


def test_no_verdict_follows_from_noise():
    found = [measured("A", (1.0, 1.0, 1.46), 1.0), measured("B", (1.0, 1.0, 1.0), 1.0, 0.12)]
    noise = (
        " Repetitions of a measurement differ so much that its rate may be off by 12 %: something else uses this "
        "machine. Measure again without it, or longer (--seconds)."
    )
    assert doctor.verdict(found, 2, None) == (
        "Whether compression pays here is not certain: rows of A (of 2,048 bytes) come up to 1.46 times as fast as raw "
        f"ones.{noise}"
    )
    said = doctor.verdict(found, 2, "There is no GPU here")
    assert said.startswith("There is no GPU here: the CPU codes and decodes.") and said.endswith(noise)
    assert "2 threads decode 12.3 to 12.3 GB/s" in said
    quiet = dataclasses.replace(found[1], uncertainty=0.04)
    assert doctor.verdict([quiet], 1, "There is no GPU here").endswith("slower than that.")


def test_a_report_of_a_gpu_fits(small, capsys, monkeypatch):
    """The command with a GPU whose measurements are made up."""
    monkeypatch.setattr(doctor.work, "device_of", lambda arguments: GPU)
    monkeypatch.setattr(doctor, "facts_of", lambda device: ({"load": "0"}, ["The GPU has 1 other process: 7."]))
    monkeypatch.setattr(doctor, "self_test", lambda device, seconds: (3, []))
    asked = []
    monkeypatch.setattr(ibp.calibration, "calibrate", lambda *device, **options: asked.append(options) or H200)
    found = [measured(kind, (0.9, 1.2, 1.46), 1.45) for kind in doctor._KINDS]
    monkeypatch.setattr(doctor, "measured_with_gpu", lambda device, seconds, kinds: found)
    assert main(["doctor", "--refresh", "--seconds", "4"]) == 0
    assert asked == [{"refresh": True, "seconds": 2.0}]
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "Self-test by cuda:0: 3 tests, and every bit came back." in shown and "The GPU has 1 other process" in shown
    assert re.search(r"^kernels, pinned memory +51\.4$", shown, re.MULTILINE)
    assert re.search(r"^BF16 weights +0\.90 +1\.20 +1\.46 +1\.45$", shown, re.MULTILINE)
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpu"] == H200.gpu and document["link"]["read_gbps"] == H200.read_gbps
    assert document["data"][0]["rows"] == {"128": 0.9, "512": 1.2, "2048": 1.46}
    assert document["busy"] == ["The GPU has 1 other process: 7."]


@pytest.mark.parametrize(
    "seconds, median, uncertainty",
    [([2.0] * 9, 2.0, 0.0), ([1.0, 2.0, 3.0], 2.0, 0.93 / 3**0.5 / 2), ([1.0] * 14 + [9.0], 1.0, 0.0)],
)
def test_repetitions_that_differ(monkeypatch, seconds, median, uncertainty):
    clock, times = calibration.Clock(torch.device("cpu"), 1.0), iter(seconds)
    monkeypatch.setattr(clock, "_repeats", lambda call: len(seconds))
    monkeypatch.setattr(calibration, "timed_once", lambda call, device: (None, next(times)))
    assert clock.wall_s(lambda: None) == median
    assert clock.uncertainty == pytest.approx(uncertainty)


# ---- a GPU ----


def test_on_a_gpu(cuda, small, capsys):
    assert main(["doctor", "--device", str(cuda), "--seconds", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["link"]["read_gbps"] > 0 and document["gpu"] and document["failed"] == []
    assert "." in document["facts"]["CUDA kernels"] and "can be pinned" in document["facts"]["pinned memory"]
    weights = document["data"][0]
    assert weights["lossless"] and set(weights["rows"]) == {"128", "512", "2048"}
    assert min(weights["rows"].values()) > 0 and weights["whole"] > 0
    assert main(["doctor", "--device", str(cuda), "--seconds", "1"]) == 0
    _, *measured = capsys.readouterr().out.split("\n\n")
    assert max(map(len, "\n".join(measured).splitlines())) <= 80
