"""benchmarks/digit_forms.py: counts of exponents, runs and escapes."""

import csv

import pytest
import torch

from benchmarks import digit_forms


@pytest.mark.parametrize("dtype", digit_forms.EXPONENTS, ids=str)
def test_exponents_are_counted(dtype):
    exponents = torch.tensor([-3, 0, 0, 2], dtype=torch.float64)
    counts = digit_forms.exponent_counts((-1.5 * 2**exponents).to(dtype))
    bias = 2 ** (digit_forms.EXPONENTS[dtype][0] - 1) - 1
    assert {int(i) - bias: int(counts[i]) for i in counts.nonzero()} == {-3: 1, 0: 2, 2: 1}


def test_escapes_are_outside_of_the_best_run():
    counts = torch.zeros(32, dtype=torch.float64)
    counts[10:17] = 1.0  # seven: what digits of three bits have
    counts[20] = 1.0
    three, four = digit_forms.forms_of(torch.float16, counts)
    assert three["escapes"] == "125000" and three["bits"] == f"{14 + 64 / 8:.2f}"
    assert float(three["bound_short"]) == pytest.approx(16 / (14 + 32 / 8), abs=1e-3)
    assert four == {"digit_bits": 4, "escapes": "0", "bits": "15.00", "bound": "1.067", "bound_short": "1.067"}


def test_blocks_are_scaled_apart():
    weight = torch.cat((torch.full((128, 128), 3.0), torch.full((128, 128), 0.03)))
    assert set(digit_forms.scaled(weight, digit_forms.BLOCK).float().tolist()) == {448.0}
    assert set(digit_forms.scaled(weight, None).float().flatten().tolist()) == {448.0, 4.5}


def test_the_script(tmp_path):
    assert digit_forms.main(["--quick", "--device", "cpu", "--data", str(tmp_path), "--out", str(tmp_path)]) == 0
    with open(tmp_path / "digit_forms.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["form"] for row in rows} == set(digit_forms.FORMS)
    assert all(float(row["bits"]) >= float(row["digit_bits"]) for row in rows)
