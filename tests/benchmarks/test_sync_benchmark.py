"""benchmarks/sync.py on the CPU: two processes, all arms and links, and what is reckoned."""

import csv

import pytest

from benchmarks import harness, sync


@pytest.mark.slow
def test_the_script_on_the_cpu(tmp_path):
    assert sync.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "sync.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    links = [sync.SOCKETS, sync.SHARED, "100 Gb/s", "400 Gb/s"]
    assert list(rows[0]) == [*harness.COLUMNS, *sync.COLUMNS]
    assert sorted((row["case"], row["arm"]) for row in rows) == sorted(
        (f"{shape.name}, {name}, {link}", arm)
        for shape in sync.QUICK
        for name in sync.STEPS
        for link in links
        for arm in sync.ARMS
    )
    for row in rows:
        parts = [float(row[name]) for name in ("make_ms", "move_ms", "apply_ms")]
        assert sum(parts) == pytest.approx(float(row["ms"]), rel=1e-3)
        if "Gb/s" in row["link"]:
            seconds = float(row["mib"]) * 2**20 * 8e-9 / float(row["link"].split()[0])
            assert parts[1] >= 1e3 * seconds * (1 - 2e-3)  # Taking the messages may be slower than the link.
        wanted = float(row["case"].split(", ")[1].removesuffix(" %")) / 100
        assert 0.8 * wanted < float(row["changed"]) < 1.3 * wanted
        assert float(row["fewer"]) == pytest.approx(1, abs=0.01) or row["arm"] != sync.PLAIN


def test_bytes_of_all_layers():
    """As many weights as the models have: 8.2 and 30.5 billion."""
    dense, experts = (shape.num_bytes(shape.of_layers) / 2e9 for shape in sync.FULL)
    assert 8.1 < dense < 8.3 and 30.4 < experts < 30.6


def test_reckoned_links():
    """The link binds, or the engine, which begins when the first message has come."""
    assert sync.reckoned_moving(4.0, 4, 2.5) == 4.0
    assert sync.reckoned_moving(4.0, 4, 3.5) == 4.5
    assert sync.reckoned_moving(4.0, 1, 0.0) == 4.0
