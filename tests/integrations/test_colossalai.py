"""examples/cached_embedding_bag.py and the arms of benchmarks/dlrm.py: ColossalAI's CachedEmbeddingBag with compressed
rows, by a stand-in for the class, and by the release if it is installed.
"""

import ast
import csv
import importlib.util
import itertools
import re
import sys

import pytest
import torch

import cached_bags
import ibp
from benchmarks import dlrm, harness
from helpers import assert_same_bits
from native import ROOT

EXAMPLE, DEVICE = dlrm.EXAMPLE, "cuda" if ibp.cuda_is_available() else "cpu"
N, D = 600, 128
# Of 60 rows that the cache has, or 45 at first, a batch of at most 50 rows drops some.
OPTIONS = {"cache_ratio": 0.1, "buffer_size": 16}


def forget():
    for name in [name for name in sys.modules if name.startswith("colossalai")]:
        del sys.modules[name]


@pytest.fixture(params=["stand-in", pytest.param("released", marks=pytest.mark.frameworks)])
def make(request, tmp_path, monkeypatch):
    """Yields the class, in a context where it runs on this machine's device."""
    if request.param == "stand-in":
        cached_bags.install(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    elif importlib.util.find_spec("colossalai") is None:
        pytest.skip("colossalai is not installed")
    forget()
    made, release = EXAMPLE.released()
    assert (release == cached_bags.RELEASE) == (request.param == "stand-in")
    with EXAMPLE.calls_for(DEVICE):
        yield made
    forget()


def batches(num=12):
    """Yields ids of 10 bags, of which some are empty, and offsets."""
    for _ in range(num):
        offsets = torch.randint(50, (10,)).sort().values
        offsets[0] = 0
        yield (N * torch.rand(50) ** 3).long().to(DEVICE), offsets.to(DEVICE)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags_have_the_bits_of_the_class_alone(make, mode, dtype):
    weight = torch.randn(N, D).to(dtype)
    table = ibp.compress(weight)
    assert table.savings > 0.1
    alone = make(N, D, _weight=weight.clone(), mode=mode, cache_ratio=0.1)
    inside = make(N, D, _weight=EXAMPLE.Rows(table, DEVICE, trainable=False), mode=mode, **OPTIONS)
    for ids, offsets in batches():
        found = inside(ids, offsets)
        assert_same_bits(found, alone(ids, offsets))
        assert_same_bits(found, torch.nn.functional.embedding_bag(ids, weight.to(DEVICE), offsets, mode=mode))
    assert inside.num_miss_history == alone.num_miss_history and sum(inside.num_miss_history) > 2 * 60
    assert inside.num_hits_history == alone.num_hits_history and sum(inside.num_hits_history) > 0


@pytest.mark.parametrize("is_coded", [True, False])
def test_missed_rows_alone_come_and_none_goes_back(make, is_coded, monkeypatch):
    """Also of rows that something has written over in the cache: that is what trainable=True is for."""
    weight = torch.randn(N, D)
    kind, held = (EXAMPLE.Rows, ibp.compress(weight)) if is_coded else (dlrm.GatheredRows, weight.clone())
    fetched, fetch = [], kind.index_select

    def counted(rows, dim, ids):
        fetched.append(len(ids))
        return fetch(rows, dim, ids)

    monkeypatch.setattr(kind, "index_select", counted)
    inside = make(N, D, _weight=kind(held, DEVICE, trainable=False), mode="sum", **OPTIONS)
    assert sum(fetched) == 42 and max(fetched) == 16
    inside.cache_weight_mgr.cuda_cached_weight.detach().fill_(7)
    for ids, offsets in batches():
        inside(ids, offsets)
    inside.cache_weight_mgr.flush()
    assert sum(fetched) == 42 + sum(inside.num_miss_history)
    assert_same_bits(held.decompress() if is_coded else held, weight)


def test_rows_that_train_go_back(make):
    """Steps are sums of halves, which have one result in every order."""
    weight = torch.randint(-8, 8, (N, D)) / 2
    table = ibp.compress(weight)
    alone = make(N, D, _weight=weight, mode="sum", cache_ratio=0.1)
    inside = make(N, D, _weight=EXAMPLE.Rows(table, DEVICE, trainable=True), mode="sum", **OPTIONS)
    before = weight.clone()
    for bags in (alone, inside):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
        for ids, offsets in batches():
            optimizer.zero_grad()
            bags(ids, offsets).sum().backward()
            optimizer.step()
        bags.cache_weight_mgr.flush()
    changed = (weight != before).any(1).sum()
    assert changed > 2 * 60
    assert_same_bits(table.decompress(), weight)


def test_the_example(make, capsys):
    EXAMPLE.main()
    said = capsys.readouterr().out.splitlines()[-1]
    numbers = re.fullmatch(
        r"colossalai [\d.]+: ([\d,]+) rows found, ([\d,]+) fetched, 16\.\d% smaller; the same bits", said
    )
    assert all(int(number.replace(",", "")) > 1000 for number in numbers.groups())


def adaptation(text):
    """Returns the lines of the class Rows in a program, without docstrings and empty lines."""
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Rows")
    found.body = [node for node in found.body if not isinstance(node, ast.Expr)]
    return [line for line in ast.unparse(found).splitlines() if line]


def test_the_adaptation_is_short_and_on_the_page():
    """The paper names fewer than 15 lines."""
    lines = adaptation((ROOT / "examples" / "cached_embedding_bag.py").read_text())
    (shown,) = (text for text in (ROOT / "docs" / "embeddings.md").read_text().split("```") if "class Rows:" in text)
    assert adaptation(shown.removeprefix("python\n")) == lines and len(lines) < 15


def test_without_the_class_a_sentence_says_so(monkeypatch, tmp_path, capsys):
    sentence = (
        "ColossalAI's CachedEmbeddingBag cannot be imported; wanted pip install --no-deps colossalai contexttimer"
    )
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SystemExit, match=f"^{sentence}$"):
            EXAMPLE.main()
        assert dlrm.released_class() is None
    assert capsys.readouterr().out == f"CachedEmbeddingBag, left out: {sentence}\n"
    cached_bags.install(tmp_path)
    (file,) = tmp_path.rglob("cached_embedding.py")
    file.write_text("import contexttimer_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    with pytest.raises(ImportError, match=re.escape(f"{sentence} (No module named 'contexttimer_that_is_missing')")):
        EXAMPLE.released()
    forget()


@pytest.mark.slow
def test_arms_of_the_benchmark(make, tmp_path, monkeypatch, capsys):
    """A cache of 2 % of the rows has about as much of uniform ids. Batches that it cannot hold are left out, and wrong
    rows are found."""
    monkeypatch.setattr(dlrm, "QUICK_CASES", (dlrm.Case(torch.float32, 512, 1 / 64, (16, 64)),))
    argv = ["--device", DEVICE, "--quick", "--out", str(tmp_path)]
    assert dlrm.main(argv) == 0
    with open(tmp_path / "dlrm.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    inside = [row for row in rows if row["arm"].startswith(dlrm.COLOSSALAI)]
    fetching = dlrm.RAW_INSIDE, dlrm.IBP_INSIDE, f"{dlrm.COLOSSALAI}, {dlrm.SCHEME_IBP}"
    arms = dlrm.COLOSSALAI, dlrm.NO_WRITE_BACK, *fetching
    laws = dlrm.UNIFORM, dlrm.ZIPF
    assert sorted((row["arm"], row["ids"]) for row in inside) == sorted(itertools.product(arms, laws))
    assert {(row["batch"], row["colossalai"], row["sets"]) for row in inside} == {("16", EXAMPLE.released()[1], "16")}
    assert {row["arm"] for row in rows if not row["colossalai"]} == {*dlrm.ARMS, dlrm.CPU_UNIQUE, dlrm.SCHEME_IBP}
    for row in inside:
        low, high = (0, 0.05) if row["ids"] == dlrm.UNIFORM else (0.2, 0.8)
        assert low < float(row["hit_rate"]) < high
    said = capsys.readouterr().out
    assert f"uniform, batch 64, {dlrm.IBP_INSIDE}: a batch has more rows than the cache, left out" in said
    fetch = EXAMPLE.Rows.index_select
    monkeypatch.setattr(EXAMPLE.Rows, "index_select", lambda rows, dim, ids: fetch(rows, dim, ids).flip(0))
    assert dlrm.main(argv) == 1
    failed = re.findall("^FAILED .* (CachedEmbeddingBag.*): AssertionError", capsys.readouterr().out, re.MULTILINE)
    assert sorted(failed) == sorted(2 * fetching)


def test_every_call_of_an_arm_has_ids_of_its_own(tmp_path):
    args = harness.parse_args(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    run, x, num_rows = harness.Run("dlrm", args, dlrm.COLUMNS), torch.randn(64, D), 64 * dlrm.NUM_TABLES
    case = dlrm.Case(torch.float32, 4 * D, num_rows * 4 * D / dlrm.GIB, (2,))
    buffer = torch.empty(num_rows * 4 * D, dtype=torch.uint8)
    tables = dlrm.Tables(run, case, x, ibp.compress(x, scheme="raw"), buffer, None)
    lookups, sets = dlrm.Lookups(run, case, dlrm.UNIFORM, 2, case.sizes(num_rows)), []

    def call(k):
        sets.append(k)
        return ibp.index_select(tables.table, lookups.rows(k), out=lookups.out(k))

    dlrm.measure(tables, lookups, dlrm.RAW, call, 1.0)
    assert sets == list(range(len(sets))) and 3 <= len(sets) <= 3 + harness.MAX_REPEATS <= dlrm.NUM_SETS
