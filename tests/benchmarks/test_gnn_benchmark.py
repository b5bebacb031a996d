"""benchmarks/gnn.py and gnn_parallel.py: graphs, batches and rows; the scripts on the CPU; what they ask for."""

import csv
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ibp
from benchmarks import gnn, gnn_accuracy, gnn_parallel, harness, inputs
from helpers import assert_same_bits

CPU = torch.device("cpu")
CASE = gnn.Case("dense", 500, (8,), torch.bfloat16, 48)
REAL = gnn.Case("pubmed", 500, (8,))


def lines_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_degrees_follow_a_power_law():
    graph = gnn.Graph(20_000, 400_000, CPU)
    degrees = graph.starts.diff()
    assert graph.starts[0] == 0 and graph.starts[-1] == len(graph.neighbors) and degrees.min() >= 1
    assert 0.5 < len(graph.neighbors) / 400_000 < 2 and degrees.max() > 20 * degrees.median()
    assert graph.neighbors.min() >= 0 and graph.neighbors.max() < 20_000
    drawn = torch.bincount(graph.neighbors, minlength=20_000)  # by their degree
    assert torch.corrcoef(torch.stack([drawn.float(), degrees.float()]))[0, 1] > 0.9


def test_a_batch_holds_neighbours():
    graph = gnn.Graph(500, 5_000, CPU)
    batch = graph.sample(torch.arange(100, 120), (4, 3))
    assert (batch.ids.diff() > 0).all()  # in order, none twice
    (outer, outer_neighbors), (inner, inner_neighbors) = batch.hops
    hop = batch.ids[outer]
    assert torch.equal(hop[inner], batch.seeds) and inner_neighbors.shape == (20, 4)
    assert outer_neighbors.shape == (len(hop), 3)
    for nodes, neighbors in ((batch.seeds, hop[inner_neighbors]), (hop, batch.ids[outer_neighbors])):
        for node, drawn in zip(nodes.tolist(), neighbors.tolist()):
            assert set(drawn) <= set(graph.neighbors[graph.starts[node] : graph.starts[node + 1]].tolist())


@pytest.mark.parametrize("case", [CASE, REAL])
def test_features_and_every_fetch(case):
    features = gnn.Features(case, inputs.DATA_DIR, CPU)
    assert_same_bits(features.x, features.source[features.of_node.long()])
    assert features.raw.scheme == "raw" and features.raw.slots.data_ptr() == features.x.data_ptr()
    assert_same_bits(features.table.decompress(), features.x)
    assert features.num_bytes == 500 * features.row_bytes
    arms = dict(gnn.fetches(features, CPU))
    assert set(gnn.ARMS) == arms.keys()
    for ids in (torch.tensor([3, 5, 499]), torch.arange(0, 500, 2)):  # the second needs larger buffers
        for arm, fetch in arms.items():
            rows = fetch(ids, torch.zeros(len(ids), features.x.shape[1], dtype=case.dtype))
            features.check(rows, ids, arm)
            with pytest.raises(AssertionError, match="bits differ"):
                features.check(rows.roll(1, 0), ids, arm)


def test_arms_train_on_the_same_batches():
    graph, features = gnn.Graph(500, 5_000, CPU), gnn.Features(CASE, inputs.DATA_DIR, CPU)
    training = gnn.Training(graph, 48, torch.bfloat16, 8, CPU)
    ends = []
    for _, fetch in gnn.fetches(features, CPU):
        training.restart()
        seconds, num_batches = training.run(fetch, 5, 100)
        assert seconds > 0 and num_batches == 5
        ends.append([p.detach().clone() for p in training.model.parameters()])
    for other in ends[1:]:
        for a, b in zip(ends[0], other):
            assert_same_bits(a, b)
    training.restart()
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], training.model.parameters()))
    assert training.run(fetch, 50, 0)[1] == gnn.LEAST_BATCHES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sage_takes_means(dtype):
    model, h = gnn.Sage(48).to(dtype), torch.randn(30, 48, dtype=dtype)
    places = torch.arange(20), torch.randint(30, (20, 5))
    found = model.own[0](h[places[0]]) + model.neighbors[0](h[places[1]].float().mean(1).to(dtype))
    inner = torch.arange(4), torch.randint(20, (4, 3))
    hidden = found.relu()
    wanted = model.own[1](hidden[inner[0]]) + model.neighbors[1](hidden[inner[1]].float().mean(1).to(dtype))
    torch.testing.assert_close(model(h, [places, inner]), wanted, atol=0.02, rtol=0.02)


@pytest.mark.slow
def test_the_script_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gnn, "QUICK_CASES", (CASE, REAL))
    assert gnn.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path / "gnn.csv")
    assert list(rows[0]) == harness.COLUMNS + gnn.COLUMNS and len(rows) == 12
    assert [row["arm"] for row in rows[:6]] == [*gnn.ARMS]
    assert all(
        float(row[name]) > 0 for row in rows for name in ("gbps", "ideal_gbps", "fetch_ms", "beside_ms", "epoch_s")
    )
    assert all(0 < float(row["wait_ms"]) < 1e3 * float(row["epoch_s"]) for row in rows)
    assert {row["case"] for row in rows} == {"dense, batch 8", "pubmed, batch 8"}
    assert {int(row["batches"]) % gnn.QUICK_EPOCH for row in rows} == {0}
    assert len({row["rows"] for row in rows[:6]}) == 1


def test_a_wrong_row_fails_the_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gnn, "QUICK_CASES", (CASE,))
    monkeypatch.setattr(
        gnn.ByGpu, "__call__", lambda self, ids, out: ibp.index_select(self.table, ids.flip(0), out=out)
    )
    assert gnn.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert "FAILED dense, batch 8, ibp: AssertionError: dense, ibp: bits differ" in capsys.readouterr().out
    assert [row["arm"] for row in lines_of(tmp_path / "gnn.csv")] == list(gnn.CPU_ARMS)


@pytest.mark.slow
def test_a_huge_table_stands_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gnn, "QUICK_CASES", (CASE,))
    for options in ([], ["--huge"], []):
        assert gnn.main([*options, "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path / "gnn.csv")
    assert [row["case"] for row in rows[5:7]] == ["dense, 64 GiB, batch 8", "dense, batch 8"] and len(rows) == 12


@pytest.mark.slow
def test_some_sets_stand_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gnn, "QUICK_CASES", (CASE, REAL))
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert gnn.main(argv) == 0
    before = lines_of(tmp_path / "gnn.csv")
    assert gnn.main(["--sets", "pubmed", *argv]) == 0
    after = lines_of(tmp_path / "gnn.csv")
    assert after[:6] == before[:6] and [row["case"] for row in after[6:]] == 6 * ["pubmed, batch 8"]
    assert gnn.main(["--sets", "pubmed", "--huge", *argv]) == 0
    assert [row["case"] for row in lines_of(tmp_path / "gnn.csv")[12:]] == 6 * ["pubmed, 64 GiB, batch 8"]


def test_marks_of_a_run(monkeypatch):
    """A batch waits from the end of one step to the beginning of the next; a step is between its marks."""
    graph, features = gnn.Graph(500, 5_000, CPU), gnn.Features(CASE, inputs.DATA_DIR, CPU)
    training, ticks = gnn.Training(graph, 48, torch.bfloat16, 8, CPU), iter([0.0, 1, 2, 5, 7, 11, 14, 15])
    monkeypatch.setattr(training, "_mark", lambda: next(ticks))
    training.restart()
    assert training.run(gnn.ByGpu(features.raw), 3, 100) == (15 / 3, 3)
    assert training.beside_s() == 2 and training.wait_s() == 3.5


@pytest.mark.slow
def test_batches_that_dgl_draws(tmp_path, monkeypatch, capsys):
    if gnn.dgl_if_there() is None:
        monkeypatch.setattr(gnn, "QUICK_CASES", ())
        assert gnn.main(["--dgl", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().out == "DGL is not installed\n"
        return
    graph = gnn.Graph(500, 5_000, CPU)
    training = gnn.DglTraining(graph, 48, torch.bfloat16, 8, CPU)
    batch = training.sample(0)
    assert torch.equal(batch.ids[: len(batch.seeds)], batch.seeds) and len(batch.ids.unique()) == len(batch.ids)
    outer, inner = batch.hops
    assert inner[1].shape == (8, gnn.FAN_OUTS[0]) and outer[1].shape == (len(outer[0]), gnn.FAN_OUTS[1])
    for node, drawn in zip(batch.ids[outer[0]].tolist(), batch.ids[outer[1]].tolist()):
        assert set(drawn) <= set(graph.neighbors[graph.starts[node] : graph.starts[node + 1]].tolist())
    monkeypatch.setattr(gnn, "QUICK_CASES", (CASE,))
    for options in ([], ["--dgl"]):
        assert gnn.main([*options, "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path / "gnn.csv")
    assert [row["arm"] for row in rows] == [*gnn.ARMS, *gnn.DGL_ARMS]
    assert [row["case"] for row in rows[5:7]] == ["dense, batch 8", "dense, batch 8, sampled by DGL"]


def arm_row(arm, fetch_ms, epoch_s, case="cora, batch 1024"):
    return {"case": case, "arm": arm, "fetch_ms": str(fetch_ms), "epoch_s": str(epoch_s)}


def test_targets():
    rows = [arm_row(arm, 100, epoch_s) for arm, epoch_s in zip(gnn.CPU_ARMS, (30, 20, 18))]
    rows += [arm_row("raw rows", 60, 11), arm_row("ibp", 1, 10)]
    assert list(gnn.gains(rows)) == [("cora, batch 1024", 60, 1.8, 1.1)] and list(gnn.shortfalls(rows)) == []
    rows[-1] = arm_row("ibp", 2, 12)
    lines = list(gnn.shortfalls(rows))
    assert len(lines) == 3 and "30.00 times as fast as fetches of raw rows by the GPU, wanted 50" in lines[0]
    assert "1.50 times" in lines[1] and "wanted 1.74" in lines[1] and "wanted 1" in lines[2]
    dense = [row | {"case": "dense 602, batch 1024"} for row in rows]
    assert ["raw rows" in line for line in gnn.shortfalls(dense)] == [True] and list(gnn.gains(rows[:4])) == []


def test_every_case_has_data():
    found = {name for name, _ in inputs.real_sets(inputs.DATA_DIR)}
    for case in (*gnn.CASES, *gnn.QUICK_CASES, *gnn.DGL_CASES, *gnn.HUGE_CASES):
        assert bool(case.columns) or case.name.removesuffix(gnn.HUGE) in found
    assert gnn.HUGE_CASES[0].num_nodes * 14_812 / gnn.GIB == pytest.approx(64, abs=0.1)  # Citeseer's rows
    assert set(gnn.WANTED_FETCH) <= {case.name for case in gnn.CASES}
    gib = {case: case.num_nodes * case.columns * case.dtype.itemsize / gnn.GIB for case in gnn.CASES}
    assert max(gib.values()) > 16 and 2_400_000 * 3703 * 4 / gnn.GIB > 16  # citeseer's
    assert {case.name for case in gnn_parallel.CASES} == {"cora", "dense 602"}


# ---- several GPUs --------------------------------------------------------------------------------------------------


def test_one_process_of_several(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    found = tmp_path / "found"
    gnn_parallel.work(0, 1, CASE, True, "cpu", inputs.DATA_DIR, tmp_path / "store", found)
    measured = json.loads(found.read_text())
    assert measured["batches"] == gnn.QUICK_EPOCH and measured["row_bytes"] == 96 and measured["seconds"] > 0
    assert measured["rows"] > measured["batches"] * gnn_parallel.QUICK_BATCH


GROUP_AND_OPTIMIZER = """
import pathlib, sys, time, torch
from benchmarks import harness

def threads_of_gloo():
    names = {(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()}
    return {name for name in names if "gloo" in name}

with harness.process_group("cpu", sys.argv[1], 0, 1):
    torch.optim.Adam([torch.ones(1, requires_grad=True)])
    deadline = time.monotonic() + 10
    while not threads_of_gloo() and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread names itself after it has begun
    assert threads_of_gloo()
assert not threads_of_gloo(), threads_of_gloo()
"""


@pytest.mark.slow
def test_a_group_ends_with_its_threads(tmp_path):
    """A thread of gloo that is left when the interpreter ends may abort the process. Optimizers import modules of
    torch.distributed that keep a group which is there already."""
    if not dist.is_available() or not dist.is_gloo_available() or not Path("/proc/self/task").exists():
        pytest.skip("this torch has no gloo, or this system no /proc")
    command = [sys.executable, "-c", GROUP_AND_OPTIMIZER, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_parallel_script_on_the_cpu(tmp_path, monkeypatch):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    monkeypatch.setattr(gnn, "QUICK_CASES", (CASE,))
    assert gnn_parallel.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path / "gnn_parallel.csv")
    assert list(rows[0]) == harness.COLUMNS + gnn_parallel.COLUMNS
    assert [(row["arm"], row["gpus"]) for row in rows] == [("ibp, 1 GPU", "1"), ("ibp, 2 GPUs", "2")]
    assert all(float(row["gbps"]) > 0 and float(row["epoch_s"]) > 0 for row in rows)


def test_targets_of_several():
    rows = [{"case": "cora", "gpus": str(n), "epoch_s": str(s)} for n, s in ((1, 10), (2, 5), (4, 3))]
    assert list(gnn_parallel.speedups(rows)) == [("cora", 2, 2.0), ("cora", 4, 10 / 3)]
    assert list(gnn_parallel.shortfalls(rows)) == []
    rows[1]["epoch_s"] = "6"
    assert list(gnn_parallel.shortfalls(rows)) == ["cora: two GPUs are 1.67 times as fast as one, wanted 1.9"]


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def test_the_script_on_a_gpu(cuda, tmp_path):
    assert gnn.main(["--device", "cuda", "--quick", "--out", str(tmp_path)]) == 0
    assert len(lines_of(tmp_path / "gnn.csv")) == 18


def test_the_parallel_script_on_a_gpu(cuda, tmp_path):
    assert gnn_parallel.main(["--device", "cuda", "--quick", "--out", str(tmp_path)]) == 0
    assert lines_of(tmp_path / "gnn_parallel.csv")[0]["arm"] == "ibp, 1 GPU"


# ---- training to an accuracy with a loader of PyG --------------------------------------------------------------------


@pytest.fixture
def gnn_pyg():
    pytest.importorskip("torch_geometric")
    return importlib.import_module("benchmarks.gnn_pyg")


@pytest.mark.slow
def test_pygs_batches_hold_neighbours(gnn_pyg):
    """Seeds come first, then the nodes of each hop, none twice, and every node has the neighbours of its edges."""
    graph = gnn.Graph(500, 5_000, CPU)
    inputs_of = types.SimpleNamespace(node=torch.arange(100, 120), input_id=torch.arange(20))
    for sampler in [gnn_pyg.Neighbors(graph)] * 2:  # The second batch finds places that the first one left.
        found = sampler.sample_from_nodes(inputs_of)
        assert torch.equal(found.node[:20], inputs_of.node) and len(found.node.unique()) == len(found.node)
        assert sum(found.num_sampled_nodes) == len(found.node) and sum(found.num_sampled_edges) == len(found.row)
        expanded = 20 + found.num_sampled_nodes[1]
        assert found.num_sampled_edges == [20 * gnn.FAN_OUTS[0], expanded * gnn.FAN_OUTS[1]]
        for row, col in zip(found.node[found.row].tolist(), found.node[found.col].tolist()):
            assert row in graph.neighbors[graph.starts[col] : graph.starts[col + 1]]
        edges = torch.stack([found.row, found.col])
        counts = {"num_sampled_nodes": found.num_sampled_nodes, "num_sampled_edges": found.num_sampled_edges}
        (own, outer), (seeds, inner) = gnn_pyg.hops_of(types.SimpleNamespace(edge_index=edges, **counts))
        assert torch.equal(own, torch.arange(expanded)) and torch.equal(seeds, torch.arange(20))
        assert torch.equal(torch.cat([inner.view(-1), outer.view(-1)]), found.row)


@pytest.fixture
def trained_to_an_accuracy(tmp_path, monkeypatch):
    """Runs a script on a set that is learnt in few batches. All arms learn the labels with losses of the same bits."""
    monkeypatch.setattr(gnn_accuracy, "QUICK_CASES", (gnn.Case("dense 16", 2_000, (64,), torch.float32, 16),))
    monkeypatch.setattr(gnn_accuracy, "QUICK_BATCHES", 25)
    monkeypatch.setattr(gnn_accuracy, "ACCURACY", 0.3)
    monkeypatch.setattr(gnn, "FAN_OUTS", (3, 2))
    argv = ["--device", "cpu", "--quick", "--out", str(tmp_path)]

    def run(script, name, arms):
        assert script.main(argv) == 0
        rows = lines_of(tmp_path / f"{name}.csv")
        assert [row["arm"] for row in rows] == [*arms]
        assert {float(row["loss_difference"]) for row in rows} == {0} and len({row["accuracy"] for row in rows}) == 1
        assert {row["batches"] for row in rows} <= {"5", "10", "15", "20", "25"}
        assert all(float(row["accuracy"]) >= 0.3 and float(row["accuracy_s"]) > 0 for row in rows)
        return argv

    return run


def test_differences_of_losses_are_relative():
    assert gnn_accuracy.difference(torch.tensor([2.0, 1.0, 5.0]), torch.tensor([1.6, 1.0])) == pytest.approx(0.25)


def test_arms_of_pygs_loader_have_the_same_losses(gnn_pyg, trained_to_an_accuracy, tmp_path, monkeypatch):
    """Wrong rows are found as well."""
    argv = trained_to_an_accuracy(gnn_pyg, "gnn_pyg", gnn_pyg.ARMS)
    fetch = gnn_pyg.pyg.FetchFeatures.forward

    def wrong(self, batch):
        batch = fetch(self, batch)
        batch.x = batch.x.roll(1, 0)
        return batch

    monkeypatch.setattr(gnn_pyg.pyg.FetchFeatures, "forward", wrong)
    assert gnn_pyg.main(argv) == 1 and len(lines_of(tmp_path / "gnn_pyg.csv")) == 3


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_arms_of_dgls_loader_have_the_same_losses(trained_to_an_accuracy, tmp_path, monkeypatch):
    """Wrong rows are found as well."""
    gnn_dgl = pytest.importorskip("benchmarks.gnn_dgl", reason="DGL is not installed", exc_type=ImportError)
    argv = trained_to_an_accuracy(gnn_dgl, "gnn_dgl", (gnn_dgl.LOADER, gnn_dgl.RAW, gnn_dgl.IBP))
    fetch = gnn_dgl.ibp_dgl.fetch
    monkeypatch.setattr(gnn_dgl.ibp_dgl, "fetch", lambda *args: fetch(*args).roll(1, 0))
    assert gnn_dgl.main(argv) == 1
    (row,) = lines_of(tmp_path / "gnn_dgl.csv")
    assert row["arm"] == gnn_dgl.LOADER and row["case"] == "dense 16, batch 64" + gnn_dgl.DRAWN_BY_CPU


@pytest.mark.frameworks
def test_dgls_batches_depend_on_their_seeds_alone(set_threads):
    gnn_dgl = pytest.importorskip("benchmarks.gnn_dgl", reason="DGL is not installed", exc_type=ImportError)
    set_threads(1)
    graph = gnn.Graph(500, 5_000, CPU)
    sampler, of_dgl = gnn_dgl.Neighbors(), gnn.graph_of_dgl(graph)
    (ids, seeds, blocks), (again, *_), (others, *_) = (
        sampler.sample_blocks(of_dgl, torch.arange(first, first + 20)) for first in (100, 100, 200)
    )
    assert torch.equal(ids, again) and not torch.equal(ids, others) and torch.equal(ids[:20], seeds)
    (own, outer), (inner_own, inner) = gnn.hops_of_dgl(blocks)
    assert inner.shape == (20, gnn.FAN_OUTS[0]) and outer.shape == (len(own), gnn.FAN_OUTS[1])
    for nodes, neighbors in ((seeds, inner), (ids[own], outer)):
        for node, drawn in zip(nodes.tolist(), ids[neighbors].tolist()):
            assert set(drawn) <= set(graph.neighbors[graph.starts[node] : graph.starts[node + 1]].tolist())
