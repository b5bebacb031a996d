"""tools/compare_results.py: which cells of two folders of results go together, and which are slower."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compare_results.py"
COLUMNS = "benchmark,case,arm,gbps,us,commit\n"


def compare(tmp_path, before, after):
    for folder, rows in (("before", before), ("after", after)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gather.csv").write_text(COLUMNS + rows)
    return subprocess.run(
        [sys.executable, TOOL, tmp_path / "before", tmp_path / "after"], capture_output=True, text=True
    )


def test_means_and_slower_cells(tmp_path):
    before = "gather,a,raw,100,,1\ngather,b,raw,50,,1\ngather,c,raw,,10,1\ngather,old,raw,1,,1\n"
    after = "gather,a,raw,200,,2\ngather,b,raw,25,,2\ngather,c,raw,,10,2\n"
    printed = compare(tmp_path, before, after).stdout.splitlines()
    assert printed == ["gather: 3 cells, geometric mean 1.000, 1 slower; 1 in one alone", "    0.500  b, raw"]


def test_no_common_file_is_said(tmp_path):
    (tmp_path / "before").mkdir()
    run = subprocess.run([sys.executable, TOOL, tmp_path / "before", tmp_path], capture_output=True, text=True)
    assert run.returncode == 2
    assert "no CSV is in both" in run.stderr
