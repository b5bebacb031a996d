"""benchmarks/kv_fetch.py on the CPU: rows, columns; and that a wrong bit is a failure."""

import csv

import pytest

pytest.importorskip("transformers")

from benchmarks import harness, kv_fetch  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of a run of the whole script."""
    directory = tmp_path_factory.mktemp("kv_fetch")
    assert kv_fetch.main(["--device", "cpu", "--quick", "--out", str(directory)]) == 0
    return directory


def test_the_script_on_the_cpu(directory):
    with open(directory / "kv_fetch.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*harness.COLUMNS, *kv_fetch.COLUMNS]
    cases = {row["case"] for row in rows}
    assert cases == {"real, batch 2, 600 tokens", "batch 1, 300 tokens", "batch 2, 200 tokens"}
    assert {(row["case"], row["arm"]) for row in rows} == {(case, arm) for case in cases for arm in kv_fetch.ARMS}
    for row in rows:
        assert float(row["gbps"]) > 0 and float(row["ms"]) > 0 and int(row["host_bytes"]) > 0
        assert (float(row["savings"]) > 0.25) == (row["arm"] in (kv_fetch.HOST, kv_fetch.GPU))
        assert (float(row["savings"]) > 0) == (row["arm"] != kv_fetch.RAW)
        assert bool(row["target_gbps"]) == (row["arm"] == kv_fetch.HOST)


def test_a_wrong_bit_is_a_failure(directory, monkeypatch, capsys):
    update = kv_fetch.CompressedCache.update

    def wrong(cache, *args):
        keys, values = update(cache, *args)
        return keys, -values

    monkeypatch.setattr(kv_fetch.CompressedCache, "update", wrong)
    monkeypatch.setattr(kv_fetch, "QUICK_CELLS", ())
    monkeypatch.setattr(kv_fetch, "MOST_SLOW_BYTES", 0)
    assert kv_fetch.main(["--device", "cpu", "--quick", "--out", str(directory / "wrong")]) == 1
    assert "bits differ" in capsys.readouterr().out
