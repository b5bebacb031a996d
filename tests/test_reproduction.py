"""The benchmarks behind docs/reproduction.md that no other test runs, and the page itself."""

import csv
import importlib
import re

import numpy as np
import pytest
import torch
import torch.nn as nn

import ibp
from benchmarks import (
    bits,
    charts,
    chunks,
    claims,
    clusters,
    copy_threads,
    densities,
    harness,
    inputs,
    more_clusters,
    reference,
    reproduction,
    sets,
)

# ---- scripts on the CPU --------------------------------------------------------------------------------------------


def lines_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def run_quickly(name, directory, *others):
    script = importlib.import_module(f"benchmarks.{name}")
    assert script.main(["--device", "cpu", "--quick", "--out", str(directory), *others]) == 0
    return lines_of(directory / f"{name}.csv")


@pytest.fixture
def two_sets(monkeypatch):
    """A set of each kind in place of all of them."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(200, 32, generator=generator).to(torch.bfloat16)
    sparse = (torch.rand(200, 64, generator=generator) < 0.02).float()
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter(found))
    monkeypatch.setattr(sets, "real_sets", lambda data: iter(found))
    monkeypatch.setattr(inputs, "real_sets", lambda data: iter([("LLM keys", dense), ("cora", sparse)]))
    found = [sets.Set("K-cache", (dense,)), sets.Set("cora", (sparse,)), sets.Set("several", (dense, dense))]
    return dense, sparse


def test_bits_by_set(two_sets, tmp_path):
    dense, sparse = run_quickly("bits", tmp_path)
    assert list(dense) == bits.COLUMNS and (dense["set"], sparse["set"]) == ("K-cache", "cora")
    assert float(sparse["invariant"]) > 0.99 and float(sparse["chunks"]) > 0.9 and float(sparse["removed"]) > 0.8
    assert 0.3 < float(dense["bound"]) < 0.4 and float(dense["removed"]) < float(dense["bound"])


def test_packing_bits():
    words = np.uint16([[1, 0], [3, 0], [4, 1 << 9]])
    assert bits.packed_share(words, None) == pytest.approx(1 - 10 / 16)
    assert bits.packed_share(words, 2) == pytest.approx(1 - (2 * (2 + 0) + 1 * (3 + 10)) / (6 * 16))
    assert bits.widths(np.uint64([0, 1, 2, 255, 256, 2**64 - 1]), 8).tolist() == [0, 1, 2, 8, 9, 64]


def test_invariance_by_hand():
    """Of four rows three agree in the first chunk; the second chunk has nothing in common."""
    rows = torch.tensor([[7, 1], [7, 2], [7, 4], [8, 8], [7, 16]], dtype=torch.int32).repeat(20, 1)
    rows[:, 1] = torch.randint(-(2**31), 2**31, (100,), generator=torch.Generator().manual_seed(0))
    invariant, chunk_share, packed_rows, removed = bits.invariance(rows)
    assert invariant == pytest.approx(0.5, abs=0.1) and chunk_share >= 0.4
    assert 0.8 <= packed_rows <= 1 and 0.25 < removed < 0.5


def test_entropy_bound_of_chosen_values():
    assert bits.entropy_bound(torch.ones(4, 4, dtype=torch.int32)) is None
    assert bits.entropy_bound(torch.zeros(4, 4)) == 1
    ones = torch.tensor([[1.0, 2.0], [2.0, 1.0]])  # one bit for two exponents, sign and mantissa
    assert bits.entropy_bound(ones) == pytest.approx(1 - 25 / 32)
    half = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float16)
    assert bits.entropy_bound(half) == pytest.approx(1 - (1 + 0.5 * (1 + 11)) / 16)


def test_chunks_by_threshold(two_sets, tmp_path):
    rows = run_quickly("chunks", tmp_path)
    assert list(rows[0]) == chunks.COLUMNS and len(rows) == 3 * len(chunks.CHUNK_BYTES) * len(chunks.QUICK_TAUS)
    saved = {(row["set"], row["chunk_bytes"], row["tau"]): float(row["savings"]) for row in rows}
    assert saved["K-cache", "2", "0.8"] > 0.2 and saved["K-cache", "2", "1"] == 0
    assert saved["cora", "4", "0.8"] > 0.9
    assert not (tmp_path / "chunk_rates.csv").exists()


def test_copies_by_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(copy_threads, "QUICK_ROW_BYTES", (256,))
    before = torch.get_num_threads()
    rows = run_quickly("copy_threads", tmp_path)
    assert torch.get_num_threads() == before
    assert [(row["arm"], row["workers"]) for row in rows] == [
        *((arm, threads) for arm in ("cpu index + copy", "cpu pinned", "cpu pipelined") for threads in ("1", "2")),
        ("raw rows", "1"),
        ("planes slots", "1"),
    ]
    assert list(rows[0]) == [*harness.COLUMNS, *copy_threads.COLUMNS]


@pytest.mark.slow
def test_transfers_by_codec(two_sets, tmp_path):
    rows = run_quickly("transfers", tmp_path)
    assert [row["arm"] for row in rows] == 3 * ["raw copy_", "raw rows", "ibp", "planes", "auto"]
    assert [row["dtype"] for row in rows[::5]] == ["bfloat16", "float16", "float32"]
    assert all(float(row["gain"]) == 1 for row in rows if row["arm"].startswith("raw"))
    assert all(float(row["encode_ms"]) > 0 for row in rows if not row["arm"].startswith("raw"))


def test_more_clusters_than_the_format_has(tmp_path, monkeypatch):
    near = torch.randint(2**31, (16, 8), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    x = near.repeat_interleave(64, 0)  # 16 kinds of rows, of which no two are equal
    x[:, 7] = torch.randint(2**31, (1024,), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(clusters, "all_sets", lambda data, quick: iter([("kinds", x)]))
    monkeypatch.setattr(more_clusters, "QUICK_COUNTS", (1, 64, 512))
    rows = run_quickly("more_clusters", tmp_path)
    assert [(row["method"], row["clusters"]) for row in rows] == [
        *(("k-means", str(count)) for count in (1, 64, 512)),
        *(("ibp.compress", str(count)) for count in (1, 64)),
    ]
    one, some, many = (float(row["savings"]) for row in rows[:3])
    assert some > 0.5 > one and some > many and float(rows[2]["numbers"]) == 2 / 32


def test_one_cluster_takes_the_papers_bytes():
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    least = 1.0
    for tau in more_clusters.TAUS:
        codebook = ibp.codecs.analyze(x, paper=True, tau=tau, chunk_bytes=4, sample=1.0, device="cpu")
        least = min(least, (ibp.estimate(x, codebook, device="cpu").stored_bytes - codebook.nbytes) / (4 * x.numel()))
    savings, codebooks, numbers = more_clusters.estimate(x, 1)
    assert numbers == 0 and codebooks == 2 * 256 / (4 * x.numel())
    assert 1 - savings - codebooks == pytest.approx(least, abs=1e-6)


@pytest.mark.slow
def test_scripts_on_a_gpu(cuda, two_sets, tmp_path, monkeypatch):
    monkeypatch.setattr(copy_threads, "QUICK_ROW_BYTES", (256,))
    monkeypatch.setattr(densities, "QUICK_PLANS", (densities.Plan("AlexNet", 64, 4, 2, 0.05),))
    for name in ("copy_threads", "transfers", "chunks", "densities"):
        script = importlib.import_module(f"benchmarks.{name}")
        assert script.main(["--device", "cuda", "--quick", "--out", str(tmp_path)]) == 0
    workers = {row["workers"] for row in lines_of(tmp_path / "copy_threads.csv") if row["arm"] == "planes slots"}
    assert set(map(str, copy_threads.SMS)) < workers
    rates = lines_of(tmp_path / "chunk_rates.csv")
    assert [row["chunk_bytes"] for row in rates] == 2 * list(map(str, chunks.CHUNK_BYTES))


# ---- densities -----------------------------------------------------------------------------------------------------


def test_ratios_of_chosen_activations():
    assert densities.zvc_ratio(0.4, torch.float32) == pytest.approx(1 / (0.4 + 1 / 32))  # cDMA: 60 % zero, about 2.5
    assert densities.zvc_ratio(0.0, torch.bfloat16) == 16
    zeros = torch.zeros(5000)
    assert densities.zlib_ratio(zeros) > 50 and densities.ibp_ratio(zeros) > 50
    noise = torch.randint(256, (70_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert densities.zlib_ratio(noise) == 1 and densities.ibp_ratio(noise) == 1
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert torch.equal(densities.in_layout(x, "CHWN").view(3, 4, 5, 2)[2, 3, 4], x[:, 2, 3, 4])
    assert torch.equal(densities.in_layout(x, "NCHW"), x.view(-1))


def test_outputs_are_those_before_the_next_layer():
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU(inplace=True))
    nn.init.constant_(net[0].weight, 1.0)
    nn.init.constant_(net[0].bias, 0.0)
    x = torch.tensor([-1.0, -2.0, 3.0, -4.0]).view(1, 1, 2, 2)
    found = densities.outputs_of(net, x)
    assert [(name, kind) for name, kind, _ in found] == [("conv0", "relu"), ("pool0", "pool"), ("fc0", "relu")]
    assert densities.density(found[0][2]) == 0.25 and densities.density(found[1][2]) == 1
    assert net.training and not net[1]._forward_hooks


@pytest.mark.slow
def test_densities_by_layer_and_step(tmp_path, monkeypatch):
    monkeypatch.setattr(densities, "QUICK_PLANS", (densities.Plan("AlexNet", 64, 2, 2, 0.02),))
    rows, ratios = run_quickly("densities", tmp_path), lines_of(tmp_path / "activation_ratios.csv")
    assert list(rows[0]) == densities.COLUMNS and list(ratios[0]) == densities.RATIO_COLUMNS
    assert [row["layer"] for row in rows[:10]] == [
        *("conv0", "pool0", "conv1", "pool1", "conv2", "conv3", "conv4", "pool2", "fc0", "fc1")
    ]
    assert [row["step"] for row in rows[::10]] == ["0", "1", "2"] and rows[0]["loss"] == "" < rows[10]["loss"]
    assert {row["layout"] for row in ratios if row["progress"] == "1.000"} == set(densities.LAYOUTS)
    assert all(0 <= float(row["density"]) <= 1 for row in rows) and all(float(row["ibp"]) >= 1 for row in ratios)


def test_checkpoints_begin_and_end_training():
    steps = densities.checkpoints(400)
    assert steps[0] == 0 and steps[-1] == 400 and steps[1] - steps[0] < steps[-1] - steps[-2]
    assert densities.learning_rate(0, 100) == densities.LEARNING_RATE
    assert densities.learning_rate(99, 100) == pytest.approx(densities.LEARNING_RATE / 100)


# ---- the paper's own code ------------------------------------------------------------------------------------------


class PapersLibrary:
    """What the paper's library offers, for tables that stay as they are."""

    def get_compress_size(self, rows, mask, bitval, ids, total):
        assert rows.dtype == mask.dtype == bitval.dtype
        return torch.full((len(rows),), rows.shape[1] * rows.element_size() // 2)

    def compress_inplace(self, rows, mask, bitval, ids):
        return torch.zeros(-(-len(rows) // 32), dtype=torch.int32)

    def decompress_fetch(self, rows, mask, bitval, bitmask, device, length, ids, blocks, threads, way, out):
        assert length == rows.shape[1] // 2
        return torch.index_select(rows, 0, ids, out=out)


def test_the_papers_code_beside_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "built", lambda repository: PapersLibrary())
    monkeypatch.setenv("IBP_REFERENCE_COMMIT", "b2f7100")
    rows = run_quickly("reference", tmp_path, "--repository", str(tmp_path))
    arms = ["raw rows", "ibp slots", "the paper's code"]
    assert [row["arm"] for row in rows] == 2 * arms and {row["reference"] for row in rows} == {"b2f7100"}
    assert [row["case"] for row in rows[::3]] == ["synthetic 50%", "synthetic 90%"]
    assert {row["savings"] for row in rows[2::3]} == {"0.5000"}
    gains = reference.gains(charts.read(tmp_path / "reference.csv"))
    assert gains.keys() == {(1024, 0.5), (1024, 0.9)}
    assert gains[1024, 0.5] == pytest.approx(float(rows[1]["gbps"]) / float(rows[2]["gbps"]))


def test_the_papers_code_is_looked_for(tmp_path, monkeypatch, capsys):
    for name in ("IBP_REFERENCE", "IBP_REFERENCE_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    assert reference.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 2
    assert "--repository or IBP_REFERENCE" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="has no src/ibp_api.cu; wanted a clone of the paper's code"):
        reference.sources_of(tmp_path)
    (tmp_path / "src").mkdir()
    for name in reference.SOURCES:
        (tmp_path / "src" / name).touch()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cusparse.h").touch()
    assert reference.headers_of_wheels(tmp_path) == []
    assert len(reference.sources_of(tmp_path)) == 4 and reference.commit_of(tmp_path) == "unknown"


# ---- the page ------------------------------------------------------------------------------------------------------

PAGE = harness.ROOT / "docs" / "reproduction.md"
HEADLINES = "Headline"
ITEMS = {  # by the captions of the papers
    "reproduction of ibp": [*(f"Figure {n}" for n in range(1, 16)), *(f"Table {n}" for n in range(1, 8))],
    "reproduction of dietgpu": [
        *(f"Table {n}" for n in range(1, 4)),
        *(f"Section {n}, chart" for n in ("5.1.1", "5.1.2", "5.2.1", "5.2.2")),
        *("Section 5.1.5", "Section 5.1.6"),
    ],
    "reproduction of cdma": [*(f"Figure {n}" for n in range(1, 14)), "Table I", "Table II"],
    "reproduction of buddy": [*(f"Figure {n}" for n in range(1, 14)), "Table 1", "Table 2"],
    "reproduction of nvcomp": [f"Figure {n}" for n in range(1, 7)],
}
ROWS = [row for rows in reproduction.PAPERS.values() for row in rows]


@pytest.mark.parametrize("paper", ITEMS)
def test_every_table_and_figure_of_a_paper_stands_there_once(paper):
    items = [row.item for row in reproduction.PAPERS[paper]]
    assert sorted(item for item in items if not item.startswith(HEADLINES)) == sorted(ITEMS[paper])
    assert len(items) == len(set(items))
    start, end = claims.markers(paper)
    table = PAGE.read_text().split(start)[1].split(end)[0]
    assert re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) == ["item", "---", *items]


def test_every_script_is_there_and_described():
    named = {row.script for row in ROWS if row.script}
    readme = (harness.ROOT / "benchmarks" / "README.md").read_text()
    described = set(re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE))
    assert named - described == set()
    assert [name for name in named if not (harness.ROOT / "benchmarks" / name).exists()] == []


def test_no_figure_of_ours_is_typed(tmp_path):
    """Without CSVs there is none; reasons have none; and all tables of the page are written from the CSVs."""
    results = reproduction.Results(tmp_path)
    for row in ROWS:
        ours = reproduction.cells(row, results)[-1]
        assert ours == (row.ours if isinstance(row.ours, str) else reproduction.MISSING), row
        assert bool(row.script) != isinstance(row.ours, str), row
        assert not (isinstance(row.ours, str) and re.search(r"\d %|\d[.,]\d|\d times", row.ours)), row
    text = PAGE.read_text()
    for name in reproduction.BLOCKS:
        start, end = claims.markers(name)
        text = text.split(start)[0] + text.split(end)[1]
    assert not re.search(r"^\|", text, re.MULTILINE)


def test_figures_of_ours_are_those_of_the_csvs(tmp_path):
    chosen = {
        "ratio.csv": [
            "set,dtype,rows,row_bytes,method,savings,link_savings,metadata_bytes,seconds",
            "normal 1,float16,1,1,planes,0.125,,,",
            "normal 1,float64,1,1,planes,0.0625,,,",
        ],
        "bits.csv": [",".join(bits.COLUMNS), "normal 1,float16,1,1,0,0,0,0,0,0,0.25,c"],
        "densities.csv": [
            ",".join(densities.COLUMNS),
            "AlexNet,conv0,relu,1x2x2,4,0,0.0,,0.5,none,c",
            "AlexNet,pool0,pool,1x1x1,1,0,0.0,,0.75,none,c",
            "AlexNet,conv0,relu,1x2x2,4,9,1.0,1.5,0.25,none,c",
            "AlexNet,pool0,pool,1x1x1,1,9,1.0,1.5,0.25,none,c",
        ],
        "activation_ratios.csv": [
            ",".join(densities.RATIO_COLUMNS),
            "AlexNet,conv0,relu,300,1.0,NCHW,float32,2,4,5,none,c",
            "AlexNet,pool0,pool,100,1.0,NCHW,float32,1,1,1,none,c",
        ],
    }
    for name, lines in chosen.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert "![Densities" in reproduction.BLOCKS["reproduction of cdma"](tmp_path)
    assert "![" not in reproduction.BLOCKS["reproduction of ibp"](tmp_path)
    results = reproduction.Results(tmp_path)
    assert reproduction.output_shares("normal 1")(results) == "FP16 0.875 (entropy 0.750)<br>FP64 0.938"
    assert reproduction.densities_by_layer("AlexNet")(results) == "conv0 50 %, 25 %, 25 %"
    assert reproduction.densities_of_pools(results) == "AlexNet: 1 of 1 pools are denser than what they pool"
    assert reproduction.net_sparsity(results) == "AlexNet: 60.0 % zero on average, 75.0 % in the sparsest layer"
    assert reproduction.net_ratios("float32")(results) == (
        "AlexNet, NCHW: zvc 1.60 (most 2.0), zlib 2.29 (most 4.0), ibp 2.50 (most 5.0)"
    )


def writer(directory):
    """function(name, columns, *lines): writes a CSV."""
    return lambda name, *lines: (directory / f"{name}.csv").write_text("\n".join(lines) + "\n")


def test_rivals_stand_with_their_best_arms(tmp_path):
    write, results = writer(tmp_path), reproduction.Results(tmp_path)
    write(
        "copy_threads",
        "arm,row_bytes,gbps,workers",
        *(
            "cpu index + copy,1024,2,1",
            "cpu index + copy,1024,5,8",
            "planes slots,1024,69,8",
            "planes slots,1024,70,64",
        ),
    )
    write("kv_rows", "arm,row_bytes,gbps", "cpu index + copy,256,30")
    write("gather", "case,dtype,arm,row_bytes,gbps", "normal 0.02,bfloat16,cpu pipelined,1024,40")
    assert reproduction.workers(results) == (
        "rows of 1 KiB: `x[ids].to()` 2.00 GB/s with 1 thread, 5.00 with the best number, the CPU through pinned "
        "memory 40.0 (`gather.csv`), coded rows by the GPU 70.0, within a twentieth of it from 8 SMs"
    )
    write(
        "dlrm",
        "case,dtype,row_bytes,arm,gbps",
        *(f"a,float16,512,{arm},{gbps}" for arm, gbps in zip(("cpu gather + copy", "cpu pipelined"), (10, 20))),
        *("a,float16,512,raw rows,25", "a,float16,512,ibp,30"),
    )
    assert reproduction.lookups(results) == (
        "3.00 times as fast as gathered and then copied by the CPU, 1.50 times as gathered while it is copied, 1.20 "
        "times as raw rows by the same kernel"
    )
    write("transfers", "case,dtype,arm,savings,gain", "pubmed,float32,nvcomp ans,0.2,1.5", "cora,float32,ibp,0.5,2")
    assert reproduction.transfer_gains(results) == "pubmed FP32: nvCOMP ans 1.50<br>cora FP32: ibp 2.00"
    write("ratio", "set,dtype,method,savings", "pubmed_1060rows,float32,nvcomp ANS,0.8")
    assert reproduction.transfer_gains(reproduction.Results(tmp_path)).endswith(
        "<br>ANS coded sparse sets as floats; as bytes it saves more, at a rate not measured yet: pubmed 20 %, as "
        "bytes 80 %"
    )


def test_what_goes_the_other_way_is_said(tmp_path):
    """Alignment that loses, a run that was cut off, a loss that is gone at once."""
    write, results = writer(tmp_path), reproduction.Results(tmp_path)
    columns = "arm,rows,row_bytes,gbps"
    write("scattered", columns, '"by kernel, words",100000,512,40', '"by kernel, aligned",100000,512,30')
    assert reproduction.scattered_copies(results).endswith("<br>aligned against words, 100,000 elements: 512 B -25 %")
    write(
        "densities",
        "net,layer,kind,step,progress,loss,density",
        *(
            "AlexNet,conv1,relu,0,0.0,,0.5",
            "AlexNet,conv1,relu,8,0.04,0.0005,0.25",
            "AlexNet,conv1,relu,200,1.0,0.0,0.3",
        ),
        *("VGG16,conv1,relu,0,0.0,,0.5", "VGG16,conv1,relu,50,0.5,2.0,0.25"),
    )
    assert reproduction.losses(results) == (
        "AlexNet: loss 0.00 to 0.0000; 0.0005 after 8 steps already; conv1 least dense, 25 %, after 8 steps<br>"
        "VGG16: loss 2.00 to 2.0000; conv1 least dense, 25 %, after 50 steps; the run was stopped after 50 of 100 "
        "steps; today's script has 110"
    )
    assert reproduction.densities_by_layer("AlexNet")(results) == "conv1 50 %, 25 %, 30 %"
    assert "<br>the run was stopped after 50 of 100 steps" in reproduction.densities_by_layer("VGG16")(results)


def test_figures_of_pages_are_those_of_the_probes():
    found = {
        row["case"].split(", ")[-1].split("; ")[-1]: row["value"] for row in charts.read(harness.RESULTS / "probes.csv")
    }
    text = " ".join((harness.ROOT / "docs" / "spill.md").read_text().split())
    first, last = (round(float(found[f"{which} snapshot"])) for which in ("first", "last"))
    assert f"{first} % at first and {last} % at last are zero" in text


# CSVs that lack columns of where they were measured: those that count bytes, and what README.md of the benchmarks says.
WITHOUT_MACHINE = {
    **{name: {"gpu"} for name in ("bits", "chunks", "more_clusters", "probes")},
    **{name: {"gpu", "commit"} for name in ("ratio", "sampling", "clusters", "timeline", "fuzz")},
}


def test_every_row_of_speed_names_gpu_and_commit():
    readme = (harness.ROOT / "benchmarks" / "README.md").read_text()
    lacking = {}
    for path in harness.RESULTS.glob("*.csv"):
        rows = charts.read(path)
        missing = {name for name in ("gpu", "commit") if name not in rows[0]}
        if missing:
            lacking[path.stem] = missing
            assert f"`{path.name}`" in readme.split("## Results")[1], path
        if not missing:
            assert all(row["gpu"] and row["commit"] for row in rows), path
    assert lacking == WITHOUT_MACHINE


def test_figures_of_slots_and_codecs_are_those_of_the_csvs(tmp_path):
    write = writer(tmp_path)
    write(
        "spill",
        "case,arm,row_bytes,dtype,savings,gbps,ideal_gbps,target,spilled,predicted_spilled",
        'normal 0.02,"decode, device only",2048,bfloat16,0.3,500,2000,,0.1,',
        'normal 0.02,"decode, device only",2048,bfloat16,0.3,1000,2000,,0.0,',
        'normal 0.02,"decode, spilled",2048,bfloat16,0.3,900,1000,,0.0,',
        'normal 0.02,"decode, spilled",2048,bfloat16,0.3,400,1000,,0.1,',
        'normal 0.02,"decode, spilled",2048,bfloat16,0.3,300,1000,,0.2,',  # whose other arm was not measured
        '"training, the paper\'s ratios","profile, 10%",64,float32,0.5,100,200,1.25,0.01,0.02',
        '"training, the paper\'s ratios","profile, 30%",64,float32,0.5,100,200,1.5,0.04,0.05',
    )
    write(
        "activations",
        "case,arm,step_ms",
        *("VGG16,plain,10", "VGG16,raw,30", "VGG16,ibp,12", "VGG16,save_on_cpu,60", "other,plain,1"),
        *("ResNet-50,plain,5", "ResNet-50,raw,29", "ResNet-50,ibp,25"),
    )
    write(
        "collectives",
        "case,arm,gbps,link,mib,over_torch",
        *(f'"sockets, all_gather_into_tensor, weights",{arm},{gbps},sockets,{mib},{gbps / 4}'
          for arm, gbps in (("torch", 4), ("default", 5), ("fast", 6), ("auto", 5.5)) for mib in (64, 1024)),
    )  # fmt: skip
    write("choose", "case,arm,savings,gbps", "dates,nvcomp:lz4,0.5,20", "dates,planes,0.75,40")
    results = reproduction.Results(tmp_path)
    assert reproduction.best_ratios(results) == "the paper's ratios: 2.00 times smaller"
    assert reproduction.chosen_ratios(results) == (
        "the paper's ratios: 1.50 times smaller with 4.0 % of the rows spilled"
    )
    assert "5.0 % of the rows foretold, 4.0 % in the last snapshot" in reproduction.foretold_spill(results)
    assert reproduction.thresholds(results).startswith(
        "10 %: 1.25 times smaller with 1.0 % of the rows spilled<br>30 %"
    )
    assert reproduction.spilled_reads(results) == (
        "decode, 0.0 % of the rows spilled: 900 GB/s, 90 % of the rate without spill, 90 % of what the link allows<br>"
        "decode, 10.0 % of the rows spilled: 400 GB/s, 80 % of the rate without spill, 40 % of what the link allows"
    )
    assert reproduction.headline_of_spill(results) == (
        "the paper's ratios: 1.50 times smaller with 4.0 % of the rows spilled, decoded at 100 GB/s, 50 % of the 200 "
        "that memory and link allow<br>"
        "other tables, of which nothing spills: 0.90 times the rate of the same table on the GPU"
    )
    assert reproduction.typed_columns(results) == (
        "dates: LZ4 2.0 times smaller, 20.0 GB/s, planes 4.0 times smaller, 40.0 GB/s"
    )
    assert reproduction.offload_costs(results) == (
        "VGG16: 3.00 times the step without offload, by torch's `save_on_cpu` 6.00<br>"
        "ResNet-50: 5.80 times the step without offload"
    )
    assert reproduction.offload_gains(results) == (
        "VGG16: 1.20 times the step without offload, 2.50 times as fast as the same hooks without coding<br>"
        "ResNet-50: 5.00 times the step without offload, 1.16 times as fast as the same hooks without coding"
    )
    assert reproduction.offload_mean(results) == (
        "83 % faster in the median, 83 % on average, 0 of 2 nets slower: VGG16 150 %, ResNet-50 16 %"
    )
    assert reproduction.gathers()(results) == (
        "sockets, 1,024 MiB of weights: NCCL 4.0 GB/s, ibp by itself 1.38 times as fast, always coded 1.50"
    )
    assert reproduction.gathers("direct")(results) is None
