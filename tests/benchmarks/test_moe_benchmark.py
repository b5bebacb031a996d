"""benchmarks/moe.py on the CPU: rows, columns, what experts by index move, and routes."""

import csv

import pytest
import torch

import ibp

pytest.importorskip("transformers")

from benchmarks import harness, moe  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(exit status, rows, directory) of a run of the whole script."""
    directory = tmp_path_factory.mktemp("moe")
    status = moe.main(["--device", "cpu", "--quick", "--layers", "3", "--out", str(directory)])
    with open(directory / "moe.csv", newline="") as file:
        return status, list(csv.DictReader(file)), directory


def test_the_script_on_the_cpu(measured):
    status, rows, _ = measured
    assert status == 0 and list(rows[0]) == [*harness.COLUMNS, *moe.EXTRA_COLUMNS]
    assert {row["layers"] for row in rows} == {"3"}
    cells = {(row["arm"], row["routing"], int(row["rows"])) for row in rows}
    few = {(arm, routing, tokens) for arm in moe.ARMS for routing in ("uniform", "sticky") for tokens in (1, 3)}
    few -= {(moe.HOOKS, routing, tokens) for routing, tokens in (("uniform", 3), ("sticky", 1), ("sticky", 3))}
    few -= {(moe.BETWEEN, "sticky", tokens) for tokens in (1, 3)}
    assert cells == few | {
        (arm, "uniform", moe.QUICK_PREFILL) for arm in (moe.PLAIN, moe.CODED, moe.STREAMED, moe.BY_INDEX)
    }
    assert {row["arm"]: row["host_us"] != "" for row in rows if row["rows"] == "1"} == {
        arm: arm not in (moe.STREAMED, moe.BETWEEN, *moe.OTHERS) for arm in moe.ARMS
    }
    assert {row["arm"] for row in rows if row["own_us"]} == {arm for arm in moe.ARMS if arm.startswith(moe.BY_INDEX)}
    assert all(float(row["ms"]) > 0 and float(row["gbps"]) > 0 for row in rows)
    assert all((float(row["times"] or 0) > 0) == (row["arm"] == moe.CODED) for row in rows)
    assert {float(row["savings"]) > 0.15 for row in rows if row["arm"] == moe.CODED} == {True}


def test_what_is_moved(measured):
    rows = {(row["arm"], row["routing"], int(row["rows"])): row for row in measured[1]}
    for routing in ("uniform", "sticky"):
        for tokens in (1, 3):
            link = {
                arm: int(rows[arm, routing, tokens]["link_bytes"])
                for arm in moe.ARMS
                if arm not in (moe.HOOKS, moe.BETWEEN)
            }
            asked = int(rows[moe.BY_INDEX, routing, tokens]["asked_bytes"])
            assert link[moe.GATHERED] == asked
            assert link[moe.BY_INDEX] < 0.75 * link[moe.BY_INDEX + moe.RAW] < 0.75 * 1.1 * asked
            assert link[moe.CACHED] < link[moe.BY_INDEX] < link[moe.STREAMED]
            hits = {
                arm: float(rows[arm, routing, tokens]["hit_rate"]) for arm in moe.ARMS if arm.startswith(moe.BY_INDEX)
            }
            assert hits[moe.BY_INDEX] == 0 < hits[moe.CACHED + moe.RAW] < hits[moe.CACHED]


def test_between_experts_alone(measured, tmp_path):
    (tmp_path / "moe.csv").write_text((measured[2] / "moe.csv").read_text())
    options = ["--between", "--device", "cpu", "--quick", "--layers", "3", "--out", str(tmp_path)]
    assert moe.main(options) == 0
    with open(tmp_path / "moe.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == [row["arm"] for row in measured[1]]


def test_experts_in_fp8(tmp_path):
    assert moe.main(["--deepseek", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "moe_deepseek.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["arm"], row["dtype"]) for row in rows} == {
        (arm, "float8_e4m3fn") for arm in (moe.BY_INDEX, moe.BY_INDEX + moe.RAW)
    }
    link = {(row["arm"], row["routing"], row["rows"]): int(row["link_bytes"]) for row in rows}
    for routing in ("uniform", "sticky"):
        for tokens in ("1", "3"):
            assert link[moe.BY_INDEX, routing, tokens] < 0.85 * link[moe.BY_INDEX + moe.RAW, routing, tokens]


def test_hits(tmp_path):
    assert moe.main(["--hits", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "moe_hits.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == moe.HITS_COLUMNS and len(rows) == 2 * 2 * moe.QUICK_TOKENS
    for row in rows:
        assert (row["hit_rate"] == "0.0000") == (row["token"] == "0")
        assert int(row["link_bytes"]) <= int(row["asked_bytes"])
    assert {path.name for path in tmp_path.iterdir()} == {"moe_hits.csv", "moe_policies.csv"}
    with open(tmp_path / "moe_policies.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == moe.POLICIES_COLUMNS and len(rows) == 3 * len(moe.SHARES) * len(moe.HALVING)


def test_policies():
    """Counts find more where favourites last."""
    asked = moe.routes("sticky", 32, 4, 1, 1, 300, "cpu")[:, 0, 0]
    rates = [moe.hit_rate(asked, 32, 0.25, halving) for halving in (0, 64)]
    assert 0.25 < rates[0] < rates[1] < 1


def test_a_simulated_cache_is_that_of_rows():
    """The same rows of sets of ways are found as `ibp.RowCache` finds, to a few points."""
    asked = moe.routes("sticky", 64, 4, 1, 1, 120, "cpu")[:, 0, 0]
    x = torch.randn(64 * 50, 64)
    table = ibp.compress(x, scheme="raw", device="cpu", memory="host")
    cache = ibp.RowCache(table, len(x) // 2 * 276, devices="cpu", policy="lru")
    for call, ids in enumerate(asked):
        if call == len(asked) // 2:
            cache.reset_stats()
        cache.index_select((ids[:, None] * 50 + torch.arange(50)).flatten())
    assert abs(cache.stats().hit_rate - moe.hit_rate(asked, 64, 0.5, 0)) < 0.04


def test_dequantized_blocks():
    experts = torch.ones(2, 4, 6).to(torch.float8_e4m3fn)
    scale = torch.arange(8.0).view(2, 2, 2)
    found = moe.dequantized(experts, scale, (2, 3))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, scale.repeat_interleave(2, 1).repeat_interleave(3, 2).bfloat16())
    with pytest.raises(ValueError, match="whole blocks"):
        moe.dequantized(experts, scale)


OTHERS = {"rows": 8, "routing": "uniform", "ms_of_all": "10.0", "bound_ms": "", "layers": 48, "own_us": ""}


@pytest.mark.parametrize("routing", ["uniform", "sticky"])
def test_routes(routing):
    found = moe.routes(routing, 32, 4, 2, 3, 200, "cpu")
    assert found.shape == (200, 2, 3, 4) and found.min() >= 0 and found.max() < 32
    ordered = found.sort(-1).values
    assert bool((ordered[..., 1:] > ordered[..., :-1]).all())
    kept = (found[1:, ..., None] == found[:-1, ..., None, :]).any(-1).float().mean()
    counts = torch.bincount(found[:, 0].flatten(), minlength=32).sort(descending=True).values
    share = float(counts[:4].sum() / counts.sum())
    assert (kept > 0.5 and share > 0.3) if routing == "sticky" else (kept < 0.2 and share < 0.2)


def test_shortfalls_of_coded_experts():
    def row(times, savings, way="graph"):
        return {"case": "8 tokens", "arm": moe.CODED, "way": way, "times": times, "savings": savings, **OTHERS}

    assert list(moe.shortfalls([row("1.21", "0.245"), row("0.9", "0.245", "eager")])) == []
    assert list(moe.shortfalls([row("1.1", "0.23")])) == [
        "8 tokens: 1.1 times as fast as plain, wanted 1.2",
        "8 tokens: 0.23 saved, wanted 0.24",
    ]


def test_shortfalls():
    def row(arm, rows, routing, ms, bound):
        numbers = {"ms_of_all": ms, "bound_ms": bound, "layers": 48, "own_us": ""}
        return {"arm": arm, "rows": rows, "routing": routing, **numbers}

    near = [row(moe.BY_INDEX, 1, "uniform", "45.00", "43"), row(moe.BY_INDEX, 8, "uniform", "100.00", "91")]
    assert list(moe.shortfalls(near)) == []
    far = [row(moe.BY_INDEX, 1, "uniform", "47.00", "43"), row(moe.BY_INDEX, 8, "uniform", "100.00", "89")]
    far += [row(moe.CACHED, 1, "sticky", "19.00", "9"), row(moe.CACHED + moe.RAW, 1, "sticky", "20.00", "9")]
    far += [row(moe.BY_INDEX, 2048, "uniform", "100.00", "94")]
    wanted = [line.rsplit(" ", 1)[1] for line in moe.shortfalls(far)]
    assert wanted == ["46.0", "98.9", "15.4", "98.9"]
    one = [{**row(moe.BY_INDEX, 1, "uniform", "60.00", "50"), "layers": moe.DEEPSEEK_V3.layers}]
    assert [line.rsplit(" ", 1)[1] for line in moe.shortfalls(one, moe.DEEPSEEK_V3)] == ["55.6"]
