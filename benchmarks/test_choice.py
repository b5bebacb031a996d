"""Checks the scheme that "auto" chooses for slots against gather.csv: it must never be slower there than raw rows."""

import csv

import pytest
import torch

import ibp
from benchmarks import harness, inputs
from ibp._machine import calibration
from ibp._rows import geometry, learning

ARMS = {"raw": "raw rows", "ibp": "ibp slots", "planes": "planes slots"}
MOST_BYTES = 256 << 10  # A choice is made from rows of this many bytes.


def measured_rates():
    """Returns GB/s with all multiprocessors by (case, dtype, bytes of a row) and arm.

    What raw rows hold does not change how fast they are fetched, but one measurement of them differs from the next by
    up to 4 %. Raw rows of one size therefore all have the highest rate that was measured for this size."""
    with open(harness.RESULTS / "gather.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    most = max(int(row["sms"]) for row in rows)
    found = {}
    for row in rows:
        if int(row["sms"]) == most:
            found.setdefault((row["case"], row["dtype"], int(row["row_bytes"])), {})[row["arm"]] = float(row["gbps"])
    for (_, _, row_bytes), rates in found.items():
        if ARMS["raw"] in rates:
            of_size = (other for (_, _, size), other in found.items() if size == row_bytes)
            rates[ARMS["raw"]] = max(other.get(ARMS["raw"], 0.0) for other in of_size)
    return found


RATES = measured_rates()


def choice_for(x, row_bytes):
    """Returns the scheme that `compress` chooses by default, and the candidates."""
    x = x[: max(16, MOST_BYTES // row_bytes)].contiguous()
    request = learning.Request(geometry.bytes_of(x), geometry.Geometry.of(x, row_bytes), torch.device("cpu"))
    candidates, _ = learning.compare(request)
    return learning.choose(candidates).scheme, candidates


def assert_no_slower(key, scheme, candidates):
    rates = RATES[key]
    assert rates[ARMS[scheme]] >= rates[ARMS["raw"]], f"{key}: auto takes {scheme}, {candidates}"


@pytest.fixture(autouse=True)
def an_h200(monkeypatch):
    """Puts the calibration of the machine in force on which gather.csv was measured."""
    monkeypatch.setattr(calibration, "in_force", lambda device: ibp.calibration.H200)


NORMAL = [key for key in RATES if key[0].startswith("normal")]
SHORT = [key for key in NORMAL if key[2] <= 512]


@pytest.mark.parametrize(
    "key", [*SHORT, *(pytest.param(key, marks=pytest.mark.slow) for key in NORMAL if key not in SHORT)], ids=str
)
def test_normal_values(key):
    _, dtype, row_bytes = key
    deviation = {"normal 1": 1.0, "normal 0.02": 0.02}[key[0]]
    dtype = getattr(torch, dtype)
    x = inputs.normal_rows(
        max(MOST_BYTES, 16 * row_bytes), dtype, deviation, "cpu", columns=row_bytes // dtype.itemsize
    )
    scheme, candidates = choice_for(x, row_bytes)
    assert_no_slower(key, scheme, candidates)
    if row_bytes >= 256:
        assert scheme == "planes"


@pytest.mark.parametrize(
    "name, x", list(inputs.real_sets(inputs.DATA_DIR)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_real_sets(name, x):
    row_bytes = x.shape[1] * x.element_size()
    key = name, str(x.dtype).removeprefix("torch."), row_bytes
    scheme, candidates = choice_for(x, row_bytes)
    assert_no_slower(key, scheme, candidates)
    assert RATES[key][ARMS[scheme]] >= 0.98 * max(RATES[key][arm] for arm in ARMS.values())


@pytest.mark.parametrize("key", [key for key in RATES if key[0].startswith("synthetic ")], ids=str)
def test_synthetic_rows(key, monkeypatch):
    """Uses the codebook for which the rows were made."""
    case, _, row_bytes = key
    mask, bitval = inputs.synthetic_mask(row_bytes, float(case.split()[1].rstrip("%")) / 100)
    codebook = ibp.codecs.Codebook.from_masks(mask, bitval, inputs.CHUNK_BYTES)
    x = inputs.agreeing_rows(64, mask, bitval, "cpu")
    request = learning.Request(geometry.bytes_of(x), geometry.Geometry.of(x, row_bytes), torch.device("cpu"))
    monkeypatch.setattr(learning, "learn_scheme", lambda scheme, request: codebook)
    (raw, coded, *_), _ = learning.compare(request)
    rates = RATES[key] | RATES["synthetic", "int32", row_bytes]
    assert coded.row_ns >= raw.row_ns or rates["ibp slots"] >= rates["raw rows"]
    if rates["ibp slots"] > 1.2 * rates["raw rows"]:
        assert coded.row_ns < raw.row_ns
