"""`ibp.codecs.choose`: what it measures, what it takes for which link, and what it refuses."""

import csv
import dataclasses
import importlib.util
import pickle

import pytest
import torch

import ibp
from benchmarks import choose as benchmark
from benchmarks import harness, sets
from helpers import assert_same_bits
from ibp.codecs import _compressing


def weights(num_rows=2000):
    return (torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def cost(scheme, stored_bytes, encode_s, decode_s):
    return ibp.codecs.CodingCost(scheme, "default", None, stored_bytes, encode_s, 0.0, decode_s, 0.0)


@pytest.fixture
def measured(monkeypatch):
    """Candidates are not timed: (bytes of the tensor for one coded, seconds a byte to encode, to decode) by scheme."""
    rates = {"planes": (2 / 3, 1e-9, 1e-9), "zstd": (0.5, 1e-7, 1e-8), "lz4": (0.9, 1e-10, 1e-10)}

    def measure(cost, x, rows):
        share, encode_s, decode_s = (
            rates[cost.scheme] if cost.level == "default" and cost.scheme in rates else (1, 1, 1)
        )
        n = x.nbytes
        return dataclasses.replace(cost, stored_bytes=round(share * n), encode_s=encode_s * n, decode_s=decode_s * n)

    monkeypatch.setattr(_compressing, "measured", measure)
    monkeypatch.setattr(_compressing, "_is_there", lambda name: True)
    for name in ("zstd", "lz4"):
        monkeypatch.setattr(_compressing.CODECS[name], "require", lambda: None)


@pytest.mark.slow
def test_which_is_taken(measured):
    """1 + 2/3 / link + 1 ns a byte of planes, 0.1 + 0.9 / link + 0.1 of lz4, 100 + 0.5 / link + 10 of zstd."""
    x = weights()
    for link_gbps, scheme in ((100, "raw"), (0.2, "lz4"), (0.1, "planes"), (0.001, "zstd")):
        found = ibp.codecs.choose(x, link_gbps, device="cpu")
        assert found.scheme == scheme and found.num_bytes == x.nbytes
        assert [one.total_s for one in found.table] == sorted(one.total_s for one in found.table)
        assert found.best.transfer_s == found.stored_bytes / link_gbps * 1e-9
        assert found.total_s == found.best.encode_s + found.best.transfer_s + found.best.decode_s
        assert ibp.codecs.choose(x, 7, device="cpu").at(link_gbps).table == found.table


def test_coding_that_does_not_count(measured):
    """Without encoding zstd takes 10 + 0.5 / link, planes 1 + 2/3 / link."""
    x = weights()
    found = ibp.codecs.choose(x, 0.01, device="cpu", encode=False)
    assert (found.scheme, ibp.codecs.choose(x, 0.01, device="cpu").scheme) == ("zstd", "planes")
    assert found.total_s == found.best.transfer_s + found.best.decode_s and found.best.encode_s > 0
    assert found.at(0.01, encode=True).scheme == "planes" and found.at(0.1).encode is False


def test_the_link_of_the_calibration(measured):
    assert ibp.codecs.choose(weights(), device="cpu").link_gbps == ibp.calibration.H200.copy_in_gbps


def test_compress():
    x = weights()
    found = ibp.codecs.choose(x, 1e-3, device="cpu", schemes=["planes", "ibp"])
    assert found.scheme == "planes" and isinstance(found.codebook, ibp.codecs.PlanesCodebook)
    for table in (found.compress(x, device="cpu"), ibp.compress(x, scheme=found, memory="host", device="cpu")):
        assert (table.scheme, table.layout, table.codebook) == ("planes", "packed", found.codebook)
        assert table.stored_bytes + table.index_bytes == found.stored_bytes
        assert_same_bits(table.decompress(), x)
    other = weights(500) * 2
    assert_same_bits(found.compress(other, device="cpu").decompress(), other)
    raw = found.at(1e9)
    assert raw.scheme == "raw" and raw.savings == 0 and raw.compress(x, device="cpu").scheme == "raw"
    for option in ({"tau": 0.8}, {"layout": "packed"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} is given, but a choice says how x is coded"):
            ibp.compress(x, scheme=found, **option)
    assert pickle.loads(pickle.dumps(found)).table == found.table


def test_rows():
    found = ibp.codecs.choose(weights(), 1e-3, device="cpu", rows=True)
    assert {one.scheme for one in found.table} <= {"raw", "planes", "ibp"}
    table = found.compress(weights(), device="cpu")
    assert table.layout == "slots" and found.stored_bytes == table.link_bytes + table.index_bytes


def test_general_codecs():
    pytest.importorskip("zstandard")
    x = torch.arange(1 << 18) // 7
    found = ibp.codecs.choose(x, 1e-4, device="cpu", schemes=["zstd", "zstd:1", "planes"])
    assert {"zstd", "zstd:1", "raw"} <= {one.scheme for one in found.table} and found.scheme.startswith("zstd")
    whole = found.compress(x)
    assert isinstance(whole, ibp.codecs.WholeTensor) and whole.nbytes == found.stored_bytes
    assert_same_bits(ibp.decompress(whole), x)
    is_there = importlib.util.find_spec("lz4") is not None
    assert any(one.scheme == "lz4" for one in ibp.codecs.choose(x, 1, device="cpu").table) == is_there


def test_repr(measured):
    text = repr(ibp.codecs.choose(weights(), 0.1, device="cpu"))
    head, names, *lines = text.splitlines()
    assert "1,024,000 bytes at 0.1 GB/s, encode + transfer + decode" in head
    assert names.split() == ["bytes", "encode", "transfer", "decode", "total"]
    assert [line.split()[0] for line in lines] == ["planes", "lz4", "raw", "zstd"]


@pytest.mark.parametrize("x", [torch.empty(0, 4), torch.tensor(3.0), torch.arange(3), torch.rand(5).requires_grad_()])
def test_small_tensors(x):
    found = ibp.codecs.choose(x, 10, device="cpu")
    assert found.scheme == "raw" and found.num_bytes == x.nbytes
    assert_same_bits(found.compress(x.detach(), device="cpu").decompress(), x.detach())


def test_samples(monkeypatch):
    """Pieces from the first item to the last; few long items are sampled as a flat tensor."""
    monkeypatch.setattr(_compressing, "_CPU_SAMPLE_BYTES", (1 << 12) // torch.get_num_threads())
    monkeypatch.setattr(_compressing, "_PIECE_BYTES", 1 << 10)
    cpu = torch.device("cpu")
    x = torch.arange(1 << 14, dtype=torch.int32).view(-1, 16)
    sample = _compressing._sample(x, cpu)
    assert sample.shape == (64, 16) and len(sample.unique()) == sample.numel()
    assert sample[0, 0] == 0 and sample[-1, -1] == x[-1, -1]
    assert _compressing._sample(x.view(2, -1), cpu).shape == (1024,)
    assert _compressing._sample(x[:64], cpu).shape == (64, 16)
    assert torch.equal(_compressing._sample(x[:64, :8], cpu), x[:64, :8])


def test_costs_of_a_sample_are_those_of_the_whole(monkeypatch):
    """Short calls are timed in turns, long ones once; the least times count."""
    monkeypatch.setattr(_compressing, "_CPU_SAMPLE_BYTES", (1 << 18) // torch.get_num_threads())
    seen = []

    def measure(cost, x, rows):
        seen.append((cost.scheme, cost.level))
        seconds = _compressing._STEADY_S if cost.scheme == "ibp" else (1 + len(seen) % 2) * 1e-4
        return dataclasses.replace(
            cost,
            stored_bytes=x.nbytes // 2,
            encode_s=min(cost.encode_s, seconds),
            decode_s=min(cost.decode_s, seconds),
        )

    monkeypatch.setattr(_compressing, "measured", measure)
    x = weights(2048)
    found = ibp.codecs.choose(x, 1e-3, device="cpu", schemes=["planes", "ibp"])
    assert seen.count(("ibp", "default")) == 1 and seen.count(("planes", "fast")) == _compressing._ROUNDS
    costs = {one.name: one for one in found.table}
    assert set(costs) == {"planes", "planes, fast", "ibp", "raw"}
    assert costs["planes"].stored_bytes == x.nbytes // 2 and costs["planes"].decode_s == pytest.approx(4e-4)
    assert costs["ibp"].encode_s == pytest.approx(4 * _compressing._STEADY_S)


def test_what_saves_nothing_is_left_out():
    found = ibp.codecs.choose(torch.randint(0, 256, (500, 512), dtype=torch.uint8), 1, device="cpu", schemes=["planes"])
    assert [one.scheme for one in found.table] == ["raw"]


def test_ranking_keeps_the_order_of_equals():
    table = _compressing.ranked([cost("raw", 10, 0, 0), cost("planes", 10, 0, 0), cost("ibp", 5, 0, 0)], 1.0, True)
    assert [one.scheme for one in table] == ["ibp", "raw", "planes"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"link_gbps": 0}, ValueError, "link_gbps is 0.0; wanted a positive number"),
        ({"link_gbps": float("inf")}, ValueError, "link_gbps is inf"),
        ({"link_gbps": "fast"}, TypeError, "link_gbps is 'fast'"),
        ({"schemes": ["brotli"]}, ValueError, "schemes has 'brotli'; wanted some of"),
        ({"schemes": ["plane"]}, ValueError, r"schemes has 'plane' \(did you mean 'planes'\?\); wanted some of"),
        ({"schemes": ["zstd"], "rows": True}, ValueError, "'zstd', which has no rows that decode alone"),
        ({"schemes": ["nvcomp:ans"]}, ValueError, "'nvcomp:ans', which codes on a CUDA device"),
        ({"x": [1.0]}, TypeError, "x is a list; wanted a torch.Tensor"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        ibp.codecs.choose(**{"x": weights(10), "link_gbps": 1, "device": "cpu", **options})


def test_on_a_gpu(cuda):
    x = (torch.randn(1 << 14, 1024, device=cuda) * 0.02).bfloat16()
    found = ibp.codecs.choose(x, 1)
    assert found.scheme != "raw" and found.savings > 0.2
    table = found.compress(x)
    assert table.device == x.device and torch.equal(ibp.decompress(table), x)
    assert ibp.codecs.choose(x, 1e6).scheme == "raw"
    general = {one.scheme for one in found.table if one.scheme.startswith("nvcomp:")}
    assert bool(general) == _compressing._is_there("nvcomp:ans")


# ---- the benchmark -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark(tmp_path, monkeypatch):
    """Rows of candidates with what was predicted beside what was measured, and a row for each link."""
    monkeypatch.setattr(harness, "MAX_REPEATS", 1)
    monkeypatch.setattr(harness, "MIN_REPEATS", 1)
    monkeypatch.setattr(benchmark, "QUICK_ITEMS", 1 << 12)
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: [sets.Set("weights", (weights(200),))])
    assert benchmark.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "choose.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {"weights", *(name for name, _, _ in benchmark.TYPED)}
    choices = [row for row in rows if row["loss"]]
    assert len(choices) == (1 + len(benchmark.TYPED)) * 2 * len(benchmark.LINKS_GBPS)
    assert all(row["chosen"] and row["best"] and float(row["gbps"]) <= float(row["ideal_gbps"]) for row in choices)
    candidates = [row for row in rows if not row["loss"]]
    assert {"planes", "planes, fast", "ibp"} <= {row["arm"] for row in candidates}
    assert all(row["stored_bytes"] == row["predicted_bytes"] for row in candidates)  # the sample is all of a small set


def test_reports_of_loans_follow_each_other():
    rate, balance, age, month, late = benchmark.loans(4096, torch.Generator().manual_seed(0)).values()
    goes_on = age[1:] > 0
    assert torch.equal(goes_on, age[1:] == age[:-1] + 1) and 0.9 < goes_on.float().mean() < 1
    assert torch.equal(rate[1:][goes_on], rate[:-1][goes_on]) and (balance[1:] < balance[:-1])[goes_on].all()
    assert torch.equal(month[1:][goes_on], month[:-1][goes_on] + 1) and 0 < (late > 0).float().mean() < 0.05
    assert len(rate) == 4096 and (balance > 0).all()


def test_the_order_of_sets(monkeypatch):
    """One of every name first."""
    names = ("a", "a", "b", "several", "a", "c", "b")
    found = [sets.Set(name, (weights(1),) * (2 if name == "several" else 1)) for name in names]
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: found)
    args = harness.parse_args(["--device", "cpu", "--quick"])
    typed = len(benchmark.TYPED)
    assert [name for name, _ in benchmark.tensors(args)][typed:] == ["a", "b", "c", "a", "a", "b"]


def test_where_the_choice_loses():
    row = {"case": "x", "dtype": "int8", "arm": "choice at 6 GB/s", "chosen": "ibp", "best": "planes"}
    rows = [{**row, "loss": loss} for loss in ("0.0000", "0.0299", "0.0510", "")]
    assert benchmark.shortfalls(rows) == ["x int8, choice at 6 GB/s: ibp takes 5.1 % longer than planes, wanted 3 %"]
    costs = {
        "stored_bytes": 9,
        "encode_us": "5",
        "decode_us": "7",
        "predicted_encode_us": "4",
        "predicted_decode_us": "8",
    }
    (line,) = benchmark.shortfalls([*rows, {**row, "arm": "ibp", **costs}])
    assert "ibp (9 bytes, 5 + 7 us, predicted 4 + 8) takes 5.1 % longer than planes, wanted 3 %" in line


def test_named_sets(tmp_path, monkeypatch):
    """They are measured, and the rows of others are kept; without names none are."""
    monkeypatch.setattr(harness, "MAX_REPEATS", 1)
    monkeypatch.setattr(harness, "MIN_REPEATS", 1)
    monkeypatch.setattr(benchmark, "TYPED", ())
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: [sets.Set(name, (weights(50),)) for name in "abc"])

    def cases(*options):
        assert benchmark.main(["--device", "cpu", "--quick", "--out", str(tmp_path), *options]) == 0
        with open(tmp_path / "choose.csv", newline="") as file:
            return [row["case"] for row in csv.DictReader(file) if row["arm"] == "choice at 6 GB/s"]

    assert cases("--sets", "b") == ["b"]
    assert cases("--sets", "a,c") == ["b", "a", "c"]
    assert cases("--sets", "b") == ["a", "c", "b"] and cases() == ["a", "b", "c"]
