"""tools/compare_commits.py: which cells count as slower, by what their passes spread."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_commits

    return compare_commits


def passes_of(**rates):
    """Four passes of cells, from the rates of each."""
    return [{("gather", cell): four[number] for cell, four in rates.items()} for number in range(4)]


def slower(tool, tmp_path, known=(), again=None, **rates):
    status = tool.report_slower(tmp_path, ("a GPU", "abc"), passes_of(**rates), dict(known), again)
    with open(tmp_path / "slower.csv", newline="") as file:
        found = [row["cell"] for row in csv.DictReader(file)]
    assert status == (1 if found else 0)
    return found


def test_a_cell_is_slower_beyond_two_per_cent_and_three_spreads(tool, tmp_path):
    """Passes are before, after, before, after."""
    rates = {"same": (100, 100, 100, 100), "a little": (100, 98.5, 100, 98.5), "much": (100, 97, 100, 97)}
    rates |= {"noisy": (100, 97, 104, 99), "faster": (100, 120, 100, 120)}
    assert slower(tool, tmp_path, **rates) == ["much"]
    known = {("gather", "much"): 0.011}
    assert slower(tool, tmp_path, known, **rates) == []


def test_a_second_run_confirms_the_first(tool, tmp_path):
    rates = {"much": (100, 90, 100, 90), "more": (100, 80, 100, 80)}
    assert slower(tool, tmp_path, again={("gather", "more")}, **rates) == ["more"]


def test_spreads_of_one_tree_are_written(tool, tmp_path, capsys):
    passes = passes_of(a=(99, 101, 99, 101), b=(100, 100, 100, 100))
    tool.report_spreads(tmp_path, ("a GPU", "abc"), passes, 1)
    assert tool.read(tmp_path / "spreads.csv", "a GPU") == {("gather", "a"): 0.0115, ("gather", "b"): 0.0}
    assert tool.read(tmp_path / "spreads.csv", "another") == {}
    assert "gather             2    0.58        1.15     1.15" in capsys.readouterr().out
    tool.report_spreads(tmp_path, ("a GPU", "abc"), passes, 2)
    assert tool.read(tmp_path / "spreads.csv", "a GPU") == {("gather", "a"): 0.0, ("gather", "b"): 0.0}


@pytest.mark.slow
def test_a_tree_is_measured_four_times(tmp_path):
    options = ["--scripts", "small_calls", "--options", "--device cpu --quick", "--out", tmp_path]
    command = [sys.executable, TOOLS / "compare_commits.py", TOOLS.parent, TOOLS.parent, *options]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "small_calls" in said.stdout and len(list(tmp_path.glob("[1-4]/small_calls.csv"))) == 4
