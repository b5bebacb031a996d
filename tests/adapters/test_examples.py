"""The adapters that docs/adapters.md shows as programs."""

import runpy

import pytest

from native import ROOT

MOST_LINES = {"kv_backend.py": 79, "model_loader.py": 40}


@pytest.mark.parametrize("name", MOST_LINES)
def test_an_example_is_short(name):
    lines = (ROOT / "examples" / name).read_text().splitlines()
    assert len(lines) <= MOST_LINES[name] and not [line for line in lines if "ibp._" in line or "import _" in line]


def test_a_kv_backend(capsys):
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "kv_backend.py"), run_name="__main__")
    assert ended.value.code == 0
    computed, stats, bits = capsys.readouterr().out.splitlines()
    assert computed == "24 of 96 blocks were computed; the others came from host memory"
    assert stats.startswith("KVStoreStats(stored_pages=24, ") and bits == "All bits are the same."


def test_a_loader(capsys):
    runpy.run_path(str(ROOT / "examples" / "model_loader.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.pt", "model.ibp.safetensors"]
    assert all("2 modules coded" in line and line.endswith(": the same results") for line in lines)
