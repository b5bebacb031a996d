"""`ibp bench`."""

import dataclasses
import json

import pytest
import torch

import ibp
from ibp._cli import machine
from ibp._cli.main import main
from ibp._machine import timing


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(timing._TABLE_BYTES, "cpu", (1 << 20, 16))
    monkeypatch.setattr(machine, "_KINDS", {kind: machine._KINDS[kind] for kind in ("BF16 weights", "FP8 weights")})


def test_on_a_cpu(small, capsys):
    assert main(["bench", "--device", "cpu", "--seconds", "1", "--jobs", "1", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert shown.err == "" and document["threads"] == 1 and document["link"] is None
    weights = document["data"][0]
    assert weights["lossless"] and 0.3 < weights["saved"] < 0.35 and all(rate > 0 for rate in weights["gbps"].values())
    assert document["verdict"].startswith("There is no GPU here. BF16 weights take 33 % less")


def test_the_table_of_a_cpu_fits(small, capsys):
    assert main(["bench", "--device", "cpu", "--seconds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and sum("weights" in line for line in lines) >= 2


def test_bits_that_differ_are_an_error(small, capsys, monkeypatch):
    monkeypatch.setattr(machine, "same_bits", lambda a, b: False)
    assert main(["bench", "--device", "cpu", "--seconds", "1", "--quiet"]) == 1
    assert capsys.readouterr().err == "ibp bench: bits differ: BF16 weights, FP8 weights\n"


def test_tables_are_coded_again_by_their_own_codebooks(monkeypatch):
    """What is measured of compressing is coding: no codebook is learned, and noise stays raw."""
    asked = []
    compress = ibp.compress
    monkeypatch.setattr(ibp, "compress", lambda x, **options: asked.append(options) or compress(x, **options))
    noise = torch.randint(256, (100, 256), dtype=torch.uint8)
    for x in (machine.made("BF16 weights", 1 << 16), noise):
        machine._again(compress(x, device="cpu", memory="host"), x)
    assert asked[0]["codebook"] is not None and asked[1]["scheme"] == "raw" and "codebook" not in asked[1]


def measured(rows, whole):
    return [machine.Measured("BF16 weights", 0.33, True, {}, rows, whole)]


@pytest.mark.parametrize(
    "rows, whole, start",
    [
        (1.46, 1.45, "Compression pays here: of BF16 weights rows come 1.46 times"),
        (1.46, 1.01, "Compression pays here for rows:"),
        (0.9, 1.45, "Compression pays here for whole tensors:"),
        (1.0, 1.0, "Compression gains no speed here:"),
    ],
)
def test_the_verdict_follows_from_what_was_measured(rows, whole, start):
    assert machine.verdict(measured(rows, whole), 2).startswith(start)


def test_no_verdict_follows_from_noise():
    found = [*measured(1.46, 1.45), machine.Measured("FP8 weights", 0.1, True, {}, 1.1, 1.0, 0.12)]
    assert machine.verdict(found, 2) == (
        "Whether compression pays here is not certain: of BF16 weights rows come 1.46 times as fast as raw ones, whole "
        "tensors 1.45 times. Repetitions of a measurement differ so much that its rate may be off by 12 %: something "
        "else uses this machine. Measure again without it, or longer (--seconds)."
    )
    on_cpu = machine.Measured("BF16 weights", 0.33, True, {"decompress": 1.0}, uncertainty=0.3)
    said = machine.verdict([on_cpu], 1)
    assert said.startswith("There is no GPU here.") and "off by 30 %: something else uses this machine" in said
    quiet = dataclasses.replace(on_cpu, uncertainty=0.04)
    assert machine.verdict([quiet], 1).endswith("slower than that.")


@pytest.mark.parametrize(
    "seconds, median, uncertainty",
    [([2.0] * 9, 2.0, 0.0), ([1.0, 2.0, 3.0], 2.0, 0.93 / 3**0.5 / 2), ([1.0] * 14 + [9.0], 1.0, 0.0)],
)
def test_repetitions_that_differ(monkeypatch, seconds, median, uncertainty):
    clock, times = timing.Clock(torch.device("cpu"), 1.0), iter(seconds)
    monkeypatch.setattr(clock, "_repeats", lambda call: len(seconds))
    monkeypatch.setattr(timing, "timed_once", lambda call, device: (None, next(times)))
    assert clock.wall_s(lambda: None) == median
    assert clock.uncertainty == pytest.approx(uncertainty)


@pytest.mark.parametrize("value", ["0", "121", "nan", "x"])
def test_seconds_out_of_range(value, capsys):
    assert main(["bench", "--seconds", value]) == 2
    assert "is no number from 1 to 120" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99"])
def test_devices_that_are_none(device, capsys):
    assert main(["bench", "--device", device]) == 2
    assert capsys.readouterr().err.startswith("ibp bench: ")


def test_on_a_gpu(cuda, small, capsys):
    assert main(["bench", "--device", str(cuda), "--seconds", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["link"]["read_gbps"] > 0 and document["gpu"]
    weights = document["data"][0]
    assert weights["lossless"] and weights["rows"] > 0 and weights["whole"] > 0
    assert main(["bench", "--device", str(cuda), "--seconds", "1"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
