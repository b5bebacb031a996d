"""The example notebook: its cells run, and give what it shows."""

import importlib.util
import json

import pytest

from native import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def run_notebook():
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "tools" / "run_notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_give_what_the_notebook_shows(path, run_notebook):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    with run_notebook.inside(path.parent):
        outputs = run_notebook.run_cells(notebook)
    assert outputs == [cell["outputs"] for cell in cells], f"run python tools/run_notebook.py {path.name}"


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == ["tour.ipynb"]


def test_cells_end_with_their_value(run_notebook):
    cells = [
        {"cell_type": "code", "source": ["x = 2\n", "print(x)\n", "x + 1"]},
        {"cell_type": "code", "source": ["None"]},
    ]
    (first, second) = run_notebook.run_cells({"cells": cells})
    assert [output["output_type"] for output in first] == ["stream", "execute_result"] and second == []
    assert first[0]["text"] == ["2\n"] and first[1]["data"] == {"text/plain": ["3"]}
