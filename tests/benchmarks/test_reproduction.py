"""The benchmarks behind docs/reproduction.md that no other test runs, and the page itself."""

import csv
import importlib
import math
import re

import numpy as np
import pytest
import torch
import torch.nn as nn

import ibp
from benchmarks import (
    bits,
    bpc,
    charts,
    chunks,
    claims,
    clusters,
    codec,
    copy_threads,
    cpu,
    densities,
    entries,
    harness,
    inputs,
    kv_request,
    more_clusters,
    ndzip,
    papers,
    rans,
    ratio,
    reading,
    reference,
    reproduction,
    sets,
    spill,
    stream,
    thresholds,
    transfers,
)
from ibp._rows.learning import SCHEMES

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
    assert [row["arm"] for row in rows] == 2 * ["raw copy_", "raw rows", "ibp", "planes", "auto"]
    assert [row["dtype"] for row in rows[::5]] == ["bfloat16", "float32"]
    assert all(float(row["gain"]) == 1 for row in rows if row["arm"].startswith("raw"))
    assert all(float(row["encode_ms"]) > 0 for row in rows if not row["arm"].startswith("raw"))
    tables = [row for row in rows if row["arm"] != "raw copy_"]
    assert all(float(row["spread"]) >= 0 and int(row["slot_bytes"]) > 0 for row in tables)
    assert [row["chosen"] for row in tables[:3]] == ["raw", "ibp", "planes"] and tables[3]["chosen"] in SCHEMES


class PlainCoder:
    """Stands in for ndzip's: keeps the bytes as they are."""

    def __init__(self, num_bytes, device):
        self.num_bytes = num_bytes

    def room(self, data):
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def encode(self, data, room):
        return room.copy_(data)

    def decode(self, coded, out):
        out.copy_(coded)


def test_transfers_by_ndzip_stand_beside_the_others(two_sets, tmp_path, monkeypatch):
    monkeypatch.delenv("IBP_NDZIP", raising=False)
    assert transfers.main(["--ndzip", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 2
    monkeypatch.setenv("IBP_NDZIP", str(tmp_path))
    monkeypatch.setattr(ndzip, "GpuCoder", PlainCoder)
    raw = transfers.RAW_ROWS
    monkeypatch.setattr(transfers, "measure_codecs", lambda case: transfers.measure_rows(case, ("raw",)))
    arms = [[row["arm"] for row in run_quickly("transfers", tmp_path, *options)] for options in ([], ["--ndzip"], [])]
    assert arms[0] == 2 * ["raw copy_", raw] and arms[1] == 2 * [raw] + 2 * ["raw copy_", "ndzip"]
    assert arms[2] == 2 * ["ndzip"] + arms[0]


class ByteCoder:
    """Stands in for a codec of nvCOMP: adds 1 to each byte, and a length in front."""

    def room(self, data):
        return torch.empty(data.numel() + 1, dtype=torch.uint8)

    def encode(self, data, room):
        room[0] = 7
        return room[: data.numel() + 1].index_copy_(0, torch.arange(1, data.numel() + 1), data + 1)

    def decode(self, coded, out):
        torch.sub(coded[1:], 1, out=out)


def test_a_table_comes_in_pieces(two_sets, tmp_path, monkeypatch):
    """Each piece is coded alone and decoded to its place; a piece at a wrong place is found."""
    run = harness.Run(
        "transfers", harness.parse_args(["--device", "cpu", "--quick", "--out", str(tmp_path)]), transfers.COLUMNS
    )
    case = transfers.Case(run, "keys", two_sets[0])
    transfers.measure_copy(case)
    monkeypatch.setattr(stream, "LEAST_PIECE_BYTES", 1 << 16)
    transfers.measure_pieces(case, "coded", ByteCoder())
    assert len(stream.CodedPieces(ByteCoder(), *2 * [case.x.view(torch.uint8).view(-1)]).pieces) == 8
    assert run.rows[-1]["savings"] == f"{-8 / case.num_bytes:.4f}" and run.rows[-1]["encode_ms"] == ""
    monkeypatch.setattr(ByteCoder, "decode", lambda self, coded, out: torch.sub(coded[1:], 2, out=out))
    with pytest.raises(AssertionError, match="keys, coded: bits differ"):
        transfers.measure_pieces(case, "coded", ByteCoder())


@pytest.mark.slow
def test_rows_alone_say_where_auto_is_slower(two_sets, tmp_path, monkeypatch):
    """Rows of 128 B come with --rows alone, and rows of other arms stay beside them."""
    monkeypatch.setattr(transfers, "all_sets", lambda data, more=None: iter([("keys", two_sets[0])]))
    full = run_quickly("transfers", tmp_path)
    rows = run_quickly("transfers", tmp_path, "--rows")
    assert [row["arm"] for row in full] == [transfers.RAW_COPY, transfers.RAW_ROWS, *transfers.SCHEMES[1:]]
    assert rows[0] == full[0] and {row["case"] for row in rows[1:]} == {"keys", *transfers.SHORT_NAMES}
    assert len(rows) == 1 + 4 * (1 + len(inputs.NORMAL)) and {row["row_bytes"] for row in rows[5:]} == {"128"}
    again = run_quickly("transfers", tmp_path)
    assert again[:-5] == rows[5:] and {row["case"] for row in again[-5:]} == {"keys"}

    def said(gain, spread):
        names = {"case": "keys", "dtype": "float32"}
        raw = names | {"arm": transfers.RAW_ROWS, "gain": "1.000", "spread": "0.010"}
        auto = names | {"arm": "auto", "gain": gain, "spread": spread, "chosen": "ibp"}
        return [*transfers.slower_than_raw([raw, auto])]

    assert said("0.902", "0.02") == ["keys float32: auto, which chose ibp, 0.90 times as fast as raw rows, wanted 1"]
    assert said("0.902", "0.24") == said("0.995", "0.001") == []


def test_sets_of_transfers(monkeypatch, tmp_path):
    """Keys and values in FP16 are those that a model computed, and never BF16 ones."""
    weights, rows = torch.zeros(9, 64, dtype=torch.bfloat16), torch.ones(10, 32)
    monkeypatch.setattr(inputs, "real_sets", lambda data: iter([("LLM weights", weights), ("embedding", rows)]))
    np.savez(tmp_path / "word2vec_1000x300.npz", x=np.ones((2, 3), np.float32))
    cache = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(tmp_path / "kv_stories260k.npz", k=cache, v_bf16=np.ones((5, 16), np.uint16))
    found = list(transfers.all_sets(None, tmp_path))
    assert [(name, x.dtype, tuple(x.shape)) for name, x in found] == [
        ("LLM weights", torch.bfloat16, (9, 64)),
        ("LLM weights, 512 B", torch.bfloat16, (2, 256)),
        ("embedding", torch.float32, (10, 32)),
        ("embedding, 512 B", torch.float32, (2, 128)),
        ("word2vec", torch.float32, (2, 3)),
        ("K-cache", torch.float16, (5, 16)),
    ]
    assert (found[-1][1].view(torch.int16) & 7).count_nonzero() > 60


@pytest.mark.slow
def test_rates_by_size_stand_beside_the_others(tmp_path):
    for options in ([], ["--sizes"]):
        assert codec.main([*options, "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path / "codec.csv")
    sized = [row for row in rows if row["case"].startswith(codec.SIZED)]
    assert len(sized) == 2 * 4 * 2 + 2 * 2 and 0 < len(rows) - len(sized) and rows[-1] == sized[-1]
    assert [row["arm"] for row in sized[:2]] == ["planes decode", "planes encode"]
    tables = [table for table in claims.TABLES if table.csv == "codec"]
    plain, by_size, joined = (table.rows(reading.Results(tmp_path)) for table in tables)
    assert joined == []
    assert len(by_size) == len(sized) and not any(row["case"].startswith(codec.SIZED) for row in plain)
    assert tables[1].markdown(reading.Results(tmp_path)).split("\n")[0] == "| data, way | 1 MiB |"


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
    assert run_quickly("more_clusters", tmp_path, "--huge")[: len(rows)] == rows
    again = run_quickly("more_clusters", tmp_path)
    assert {row["set"] for row in again[:4]} == {more_clusters.HUGE} and again[4:] == rows


def test_clusters_of_rows_by_hand():
    """Two kinds of rows: the centre that a row is nearest to, the ones of each cluster, and what a mask saves."""
    rows = torch.tensor([[255, 255, 255, 1], [0, 0, 0, 2]] * 20, dtype=torch.uint8)
    assert torch.equal(more_clusters.bytes_of(more_clusters.bits_of(rows)), rows)
    assigned, ones, sizes = more_clusters.kmeans(rows, 8)
    assert (assigned[::2] == assigned[0]).all() and (assigned[1::2] == assigned[1]).all() and assigned[0] != assigned[1]
    assert sizes.sum() == 40 and ones[assigned[0]].sum() == 20 * 25 and ones[assigned[1]].sum() == 20
    assert more_clusters.saved_bytes(rows, assigned, ones, sizes, 0.8)[assigned[0]] == 20 * ((32 - 1) // 8)


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


def test_savings_without_the_list(tmp_path, monkeypatch):
    sparse, dense = (torch.randn(300, 64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    sparse[torch.rand(sparse.shape, generator=torch.Generator().manual_seed(1)) < 0.5] = 0
    found = [sets.Set(ratio.SPARSE_SET, (sparse,)), sets.Set("normal 1", (dense,))]
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter(found))
    monkeypatch.setattr(sets, "simulated_sets", lambda rows: iter(()))
    rows = run_quickly("ratio", tmp_path, "--methods", f"planes; {ratio.NO_LIST}")
    assert [row["method"] for row in rows] == ["planes", ratio.NO_LIST, "planes"]
    saved = [float(row["savings"]) for row in rows]
    assert saved[0] > 0.5 > 0.2 > saved[1] > 0.1
    results = reading.Results(tmp_path)
    (tmp_path / "bits.csv").write_text("set,dtype,bound\nhalf zeros,float32,0.5\n")
    assert reproduction.sparse_shares(results).split("<br>")[1] == f"without the list {1 - saved[1]:.2f}"


def test_simulations_go_on():
    water, particles = (found.tensors[0] for found in sets.simulated_sets(64))
    assert water.shape == (64, sets.COLUMNS) and particles.shape == (16, sets.COLUMNS)
    assert water.dtype == particles.dtype == torch.float64 and water.isfinite().all() and particles.isfinite().all()
    assert 1 < water[0].mean() < 2 and (water[:20] != 1).all() and len(water.unique()) > 60_000
    assert len(particles.unique()) > 15_000 and particles.abs().max() <= sets.LATTICE * sets.SIDE_CELLS


def entries_by_kind():
    """Yields (name, entries int32 [n, 32]) that between them have every code and every size."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (300, 32), generator=generator, dtype=torch.int32)
    noise[0, :2] = torch.tensor([-(2**31), 2**31 - 1])
    yield "noise", noise
    yield "none", noise[:0]
    yield "zeros", torch.zeros(40, 32, dtype=torch.int32)
    yield "small numbers", noise % 37
    yield "smaller and smaller numbers", noise >> torch.arange(300, dtype=torch.int32)[:, None] % 32
    yield "rare ones", (torch.rand(300, 32, generator=generator) < 0.05).float().view(torch.int32)
    yield "another step each", torch.arange(32, dtype=torch.int32) * noise[:, :1]
    yield "rows of more than a chunk", torch.arange(bpc.CHUNK_ENTRIES + 3, dtype=torch.int32)[:, None] + 0 * noise[:1]


def test_entries_come_back_from_bit_planes():
    sizes = set()
    for name, words in entries_by_kind():
        classes, data = bpc.encode(words)
        assert torch.equal(bpc.decode(classes, data), words), name
        assert data.size == sum(bpc.SIZES[k] for k in classes) and len(classes) == len(words)
        sizes |= set(classes.tolist())
    assert sizes == set(range(len(bpc.SIZES)))


def test_planes_have_all_that_differences_have():
    for name, found in entries_by_kind():
        words = found.numpy()
        assert np.array_equal(bpc.words_of(words[:, 0].astype(np.int64), bpc.planes_of(words)), words), name


def bits_of(words):
    return bpc.codes_of(words.numpy())[1].sum(axis=0).tolist()


def test_bits_of_entries():
    """By hand, from the paper's tables of codes."""
    noise = next(entries_by_kind())[1]
    steps = torch.arange(32, dtype=torch.int32)
    zeros, ones, jump, others = bits_of(torch.stack([0 * steps, steps + 7, 1000 * (steps > 4).int(), noise[1]]))
    assert zeros == 3 + 7 and ones == 7 + 7 + 5  # a run of planes of zeros; one of 32, then all ones
    assert zeros < jump < 128 and 1024 < others <= 33 + 33 * 32
    firsts = torch.tensor([0, -8, 7, 8, -129, 2**15, -(2**31)], dtype=torch.int32)[:, None].expand(-1, 32)
    assert bits_of(firsts.contiguous()) == [7 + bits for bits in (3, 7, 7, 11, 19, 33, 33)]


def test_the_bytes_of_an_entry_by_hand():
    """The first word, 7, is 001 0111. A run of 32 planes is 01 11110, and a plane of all ones is 00000."""
    classes, data = bpc.encode(7 + torch.arange(32, dtype=torch.int32)[None])
    bits = "0010111011111000000"
    assert classes.tolist() == [1] and "".join(f"{byte:08b}" for byte in data) == bits + "0" * (64 - len(bits))


def test_entries_take_one_of_eight_sizes():
    steps, noise = torch.arange(32, dtype=torch.int32), next(entries_by_kind())[1][1:2]
    classes, data = bpc.encode(torch.cat([torch.zeros(1, 32, dtype=torch.int32), steps[None], noise]))
    assert classes.tolist() == [0, 1, 7] and data.size == 136 and bpc.sector_bytes(classes) == 160
    assert bpc.entries_of(torch.ones(130, dtype=torch.uint8))[1].tolist() == [0x0101, *31 * [0]]
    x = torch.cat([torch.zeros(3, 32), torch.ones(1, 32)])
    cell, again = ratio.bit_planes([x], torch.device("cpu"))
    assert cell.metadata_bytes == 2 and cell.stored_bytes == 8 + 2 and cell.link_bytes == 32
    assert [classes.tolist() for classes, _ in again()] == [[0, 0, 0, 1]]


@pytest.mark.slow
def test_entries_and_moments_of_programs(tmp_path):
    assert entries.main(["--nets", "SqueezeNet,LSTM", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows, moments = lines_of(tmp_path / "entries.csv"), lines_of(tmp_path / "moments.csv")
    assert {row["program"] for row in rows} == {"SqueezeNet", "LSTM"} and all(len(row["sizes"]) == 64 for row in rows)
    assert [row["moment"] for row in moments[:11]] == [f"{k / 10:g}" for k in range(11)] and len(moments) == 22
    pytest.importorskip("matplotlib")
    charts.draw_entries(tmp_path)
    assert (tmp_path / "entries.png").stat().st_size > 5000


def test_moments_of_a_step():
    """Old contents become new ones: outputs first, then gradients, then weights."""
    program = spill.Program(torch.device("cpu"), "LSTM", True, 2)
    program.step()
    before = {name: x.clone() for name, x in program.snapshot(1).items()}
    moments = list(entries.moments_of(program, 1))
    assert len(moments) == 11 and moments[0].keys() == before.keys()
    assert all(torch.equal(moments[0][name], x) for name, x in before.items())
    after = program.snapshot(1)
    assert all(torch.equal(moments[-1][name], x) for name, x in after.items())
    changed = [
        name for name in before if moments[1][name] is after.get(name) or not moments[1][name].equal(before[name])
    ]
    assert changed and all(name.startswith(("hidden", "gradient")) for name in changed)


def bytes_by_kind(num_bytes):
    """Yields (name, uint8 [num_bytes]) of bytes of any entropy."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, num_bytes, dtype=np.uint8)
    yield "random", noise
    yield "constant", np.full(num_bytes, 200, np.uint8)
    yield "skewed", np.minimum(random.geometric(0.4, num_bytes), 255).astype(np.uint8)
    yield "rarely another", np.where(random.random(num_bytes) < 0.001, noise, 3).astype(np.uint8)


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 32, 33, 63, 64, 65, 4096, 100_003])
def test_an_rans_gives_back_what_it_coded(num_bytes):
    for name, data in bytes_by_kind(num_bytes):
        coded = rans.encode(data)
        assert np.array_equal(rans.decode(coded), data), name
        if num_bytes < 4096:
            continue
        shares = np.bincount(data) / num_bytes
        entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() / 8 * num_bytes
        assert entropy < coded.size < 1.01 * entropy + 0.005 * num_bytes + 700, name


def test_an_rans_refuses_other_bytes():
    coded = rans.encode(next(bytes_by_kind(1000))[1])
    changed = coded.copy()
    changed[-200] ^= 1
    longer = np.append(coded, [0, 0]).astype(np.uint8)
    frequency = coded.copy()
    frequency[rans.LENGTH_BYTES] += 1
    for wrong in (coded[:-2], coded[:5], coded[:600], longer, changed, frequency):
        with pytest.raises(ValueError, match=f"{wrong.size} bytes do not decode; wanted"):
            rans.decode(wrong)


@pytest.mark.parametrize("kind", ["normal", "any bits", "none"])
def test_an_rans_of_bfloat16_gives_back_what_it_coded(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator).bfloat16().view(torch.uint16).numpy()
    x = {"normal": x, "none": x[:0], "any bits": np.arange(1 << 16, dtype=np.uint16)}[kind]
    coded = rans.encode_bfloat16(x)
    assert np.array_equal(rans.decode_bfloat16(coded), x)
    assert kind != "normal" or 0.66 * x.nbytes < coded.size < 0.75 * x.nbytes


def test_blocks_of_the_cpus_arms_come_back():
    words = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    block = memoryview(words.view(torch.uint8).view(-1).numpy())
    for compress, decompress in (cpu.rans_codec(), cpu.rans_bfloat16_codec()):
        frame = compress(block)
        assert decompress(frame) == block and len(frame) < len(block) + 700


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_floats_in_sets_of_bytes(dtype):
    """The exponent is in the first set, and all bits come back."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:4] = torch.tensor([0.0, -0.0, math.inf, math.nan])
    words, is_half = ratio.bytes_of(x).numpy().view(f"u{x.itemsize}"), dtype == torch.float16
    split, rest = ratio.byte_sets(words, is_half)
    assert len(split) == (2 if dtype == torch.float64 else 1) and rest.shape == (300, x.itemsize - len(split))
    assert np.array_equal(ratio.floats_of(split, rest, is_half), words)
    of_one = ratio.byte_sets(ratio.bytes_of(torch.ones(1, dtype=dtype)).numpy().view(f"u{x.itemsize}"), is_half)[0]
    assert of_one[0][0] == {torch.float16: 15 << 2, torch.float64: 1023 >> 3}.get(dtype, 127)


def test_what_an_rans_saves_of_floats(tmp_path, monkeypatch):
    """Two coders save more of FP64 than one, a bitmap more of zeros than none, and a coded one more if few are zero."""
    generator = torch.Generator().manual_seed(0)
    dense, sparse = (torch.randn(200, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    sparse[torch.rand(sparse.shape, generator=generator) < 0.1] = 0
    found = [sets.Set("normal 1", (dense,)), sets.Set("half zeros", (sparse, sparse[:7]))]
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter(found))
    monkeypatch.setattr(sets, "simulated_sets", lambda rows: iter(()))
    methods = [ratio.RANS, ratio.RANS_ONE, ratio.RANS_BITMAP, ratio.RANS_CODED_BITMAP]
    rows = run_quickly("ratio", tmp_path, "--no-times", "--methods", ";".join(methods))
    assert [row["method"] for row in rows] == [*methods[:2], *methods]
    two, one, two_sparse, _, bitmap, coded_bitmap = (float(row["savings"]) for row in rows)
    assert two == pytest.approx(0.13, abs=0.01) and one == pytest.approx(0.10, abs=0.01)
    assert two_sparse < bitmap < coded_bitmap
    assert int(rows[0]["metadata_bytes"]) == 2 * rans.TABLE_BYTES and int(rows[1]["metadata_bytes"]) == rans.TABLE_BYTES
    assert int(rows[5]["metadata_bytes"]) == 2 * 3 * rans.TABLE_BYTES


def test_rows_of_rivals_name_their_version(tmp_path, monkeypatch):
    pytest.importorskip("zstandard")
    pytest.importorskip("lz4")
    monkeypatch.setattr(sets, "all_sets", lambda data, quick: iter([sets.Set("cora", (torch.randn(64, 64),))]))
    monkeypatch.setattr(sets, "simulated_sets", lambda rows: iter(()))
    rows = run_quickly("ratio", tmp_path, "--no-times", "--methods", f"{ratio.ZSTD};{ratio.LZ4};planes")
    assert re.fullmatch(r"zstandard [\d.]+, zstd [\d.]+", rows[1]["version"])
    assert re.fullmatch(r"lz4 [\d.]+, LZ4 [\d.]+", rows[2]["version"]) and rows[0]["version"] == ""
    assert all(row["commit"] for row in rows)


# ---- densities -----------------------------------------------------------------------------------------------------


def test_ratios_of_chosen_activations():
    assert densities.zvc_ratio(0.4, torch.float32) == pytest.approx(1 / (0.4 + 1 / 32))  # cDMA: 60 % zero, about 2.5
    assert densities.zvc_ratio(0.0, torch.bfloat16) == 16
    zeros = torch.zeros(5000)
    assert densities.zlib_ratio(zeros) > 50 and densities.ibp_ratio(zeros) > 50
    noise = torch.randint(256, (70_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert densities.zlib_ratio(noise) == 1 and densities.ibp_ratio(noise) == 1
    assert densities.rle_ratio(zeros) == 4096 / 8 and densities.rle_ratio(torch.ones(2048)) == 8192 / (8192 + 16)
    assert densities.rle_ratio((torch.arange(4096) % 2).float()) == 4 / 3  # a byte a run of one, half of 4 bytes
    assert densities.zlib_ratio(zeros, 1 << 16, 1 << 18) > densities.zlib_ratio(zeros)
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert torch.equal(densities.in_layout(x, "CHWN").view(3, 4, 5, 2)[2, 3, 4], x[:, 2, 3, 4])
    assert torch.equal(densities.in_layout(x, "NCHW"), x.view(-1))


@pytest.mark.parametrize("name", densities.MAKERS)
def test_nets_of_cdma_take_images_and_have_classes(name):
    net = densities.Plan(name, 96, 2, 1, 0.05).make().eval()
    x = torch.randn(2, 3, 96, 96)
    assert net(x).shape == (2, densities.CLASSES)
    found = densities.outputs_of(net, x)
    layers = {"AlexNet": 10, "OverFeat": 10, "NiN": 15, "VGG16": 20, "SqueezeNet": 21, "GoogLeNet": 34, "ResNet-50": 50}
    assert len(found) == layers[name] and sum(kind == "pool" for _, kind, _ in found) in (1, 3, 4, 5)


def test_measuring_some_nets_keeps_the_others(tmp_path):
    writer(tmp_path)("some", "net,layer", "NiN,conv0", "VGG16,conv0")
    path, columns = tmp_path / "some.csv", ["net", "layer"]
    assert densities.rows_of_others(path, columns, ["NiN"]) == [{"net": "VGG16", "layer": "conv0"}]
    assert densities.rows_of_others(path, columns, None) == [] == densities.rows_of_others(path, [*columns, "x"], [])
    assert densities.rows_of_others(tmp_path / "none.csv", columns, ["NiN"]) == []


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
    assert [row["layer"] for row in ratios if row["kind"] == "indices"] == 2 * ["indices0", "indices1", "indices2"]
    maps = lines_of(tmp_path / "activation_maps.csv")
    assert len(maps) == 10 * 3 and maps[0]["channels"] == "4" and (maps[8]["layer"], maps[8]["height"]) == ("fc0", "1")
    shown = charts.mosaic({**maps[0], **{name: int(maps[0][name]) for name in ("channels", "height", "width")}})
    assert shown.shape == (int(maps[0]["height"]) + 2, 4 * (int(maps[0]["width"]) + 2)) and 0 < shown.mean() < 1
    pytest.importorskip("matplotlib")
    charts.draw_maps(tmp_path)
    assert (tmp_path / "activation_maps.png").stat().st_size > 5000


def test_indices_of_pools_shrink():
    x = torch.randn(4, 64, 56, 56, generator=torch.Generator().manual_seed(0))
    _, indices = nn.functional.max_pool2d(x, 3, 2, return_indices=True)
    assert densities.indices_ratio(indices) > 12


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

    def preprocess(self, rows, threshold):
        assert threshold == kv_request.THRESHOLD and len(rows) == kv_request.QUICK.prompt
        return rows[0], rows[0]

    def decompress_fetch(self, rows, mask, bitval, bitmask, device, length, ids, blocks, threads, way, out):
        assert length in (None, rows.shape[1] // 2) and len(bitmask) == -(-len(rows) // 32)
        return torch.index_select(rows, 0, ids, out=out)


def test_the_papers_code_beside_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "built", lambda repository: PapersLibrary())
    monkeypatch.setenv("IBP_REFERENCE_COMMIT", "b2f7100")
    rows = run_quickly("reference", tmp_path, "--repository", str(tmp_path))
    arms = ["raw rows", "ibp slots", "the paper's code"]
    assert [row["arm"] for row in rows] == 2 * arms and {row["reference"] for row in rows} == {"b2f7100"}
    assert [row["case"] for row in rows[::3]] == ["synthetic 50%", "synthetic 90%"]
    assert {row["savings"] for row in rows[2::3]} == {"0.5000"}


@pytest.mark.slow
def test_a_request_of_opt_by_the_papers_code(tmp_path, monkeypatch, capsys):
    """Its arms stand between raw rows and ours; rows of other runs stay; wrong rows are found, and no clone is said."""
    monkeypatch.delenv("IBP_REFERENCE", raising=False)
    monkeypatch.setenv("IBP_REFERENCE_COMMIT", "b2f7100")
    monkeypatch.setattr(reference, "built", lambda repository: PapersLibrary())
    argv = ["--opt", "--repository", str(tmp_path)]
    rows = run_quickly("kv_request", tmp_path, *argv)
    arms = [kv_request.CPU, kv_request.RAW, kv_request.THEIRS_RAW, kv_request.THEIRS, kv_request.IBP]
    assert [row["arm"] for row in rows] == arms and {row["case"].split(",")[0] for row in rows} == {"OPT-6.7B"}
    assert [row["reference"] for row in rows] == ["", "", "b2f7100", "b2f7100", ""]
    assert [row["savings"] for row in rows[2:4]] == ["0.0000", "0.5000"]
    assert {kv_request.option_of(row) for row in rows} == {"opt"}
    fetch = kv_request.TheirPools.fetch
    monkeypatch.setattr(kv_request.TheirPools, "fetch", lambda pools, number, outs: fetch(pools, number, outs.flip(0)))
    with pytest.raises(AssertionError):
        run_quickly("kv_request", tmp_path, *argv)
    run_quickly("kv_request", tmp_path, "--opt")
    assert "no clone is named by --repository or IBP_REFERENCE" in capsys.readouterr().out
    monkeypatch.undo()  # The folder is no clone: the run says so, and measures the other arms.
    assert kv_request.main(["--device", "cpu", "--quick", "--out", str(tmp_path), *argv]) == 1
    assert "wanted a clone of the paper's code" in capsys.readouterr().out
    assert [row["arm"] for row in lines_of(tmp_path / "kv_request.csv")] == [arms[0], arms[1], arms[4]]


def test_the_papers_code_is_looked_for(tmp_path, monkeypatch):
    for name in ("IBP_REFERENCE", "IBP_REFERENCE_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    assert reference.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 2
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
ITEMS = {  # by the captions of the papers
    "ibp": [*(f"Figure {n}" for n in range(1, 16)), *(f"Table {n}" for n in range(1, 8))],
    "dietgpu": [
        *(f"Table {n}" for n in range(1, 4)),
        *(f"Section {n}, chart" for n in ("5.1.1", "5.1.2", "5.2.1", "5.2.2")),
        *("Section 3.1", "Section 3.3", "Section 5.1.5", "Section 5.1.6"),
    ],
    "cdma": [*(f"Figure {n}" for n in range(1, 14)), "Table I", "Table II"],
    "buddy": [*(f"Figure {n}" for n in range(1, 14)), "Table 1", "Table 2"],
    "nvcomp": [f"Figure {n}" for n in range(1, 7)],
}
ROWS = [row for rows in reproduction.PAPERS.values() for row in rows]


def named_items(text):
    """ "Figures 1, 2, Table 3" as "Figure 1", "Figure 2", "Table 3"."""
    found, kind = [], ""
    for part in text.split(", "):
        *words, number = part.split(" ")
        kind = words[0].removesuffix("s") if words else kind
        found.append(f"{kind} {number}")
    return found


@pytest.mark.parametrize("paper", ITEMS)
def test_every_table_and_figure_of_a_paper_stands_there_once(paper):
    """In the table, or in the list of what is not measured."""
    measured = [row.item.removesuffix("; headline") for row in reproduction.PAPERS[paper]]
    missing = [item for items in reproduction.NOT_MEASURED.get(paper, {}) for item in named_items(items)]
    items = [item for item in measured if not item.startswith("Headline")] + missing
    assert sorted(items) == sorted(ITEMS[paper])
    assert len(measured) == len(set(measured))


def test_every_script_is_there_and_described():
    named = {script for row in ROWS for script in (row.script, *row.others)}
    readme = (harness.ROOT / "benchmarks" / "README.md").read_text()
    described = set(re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE))
    assert named - described == set()
    assert [name for name in named if not (harness.ROOT / "benchmarks" / name).exists()] == []


def test_no_figure_of_ours_is_typed():
    """All tables of the page are written from the CSVs."""
    assert all(callable(row.ours) for row in ROWS)
    text = claims.BLOCK.sub("", PAGE.read_text())
    assert not re.search(r"^\|", text, re.MULTILINE)


def numbers_in(text):
    return {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)} | (
        {0.5} if "half" in text else {0.2} if "fifth" in text else {0.1} if "tenth" in text else set()
    )


def test_ratios_are_to_figures_that_the_paper_names():
    """As a number, as percent, or as percent more than one or less than it."""
    results = reading.Results(harness.RESULTS)
    for row in ROWS:
        for label, ours, theirs in row.compared(results):
            forms = {theirs, 100 * theirs, 100 * (theirs - 1), 100 * (1 - theirs)}
            assert {round(form, 6) for form in forms} & numbers_in(row.theirs), (row.item, label, theirs)
            assert f"{label} {ours / theirs:.2f}".lstrip() in row.ratios(results)


def test_ratios_of_figures(tmp_path):
    writer(tmp_path)(
        "choose",
        "case,arm,savings",
        "sorted ids with runs,nvcomp:cascaded,0.9",
        "strings as int32,nvcomp:lz4,0.5",
        "strings as int32,nvcomp:cascaded,0.0",
    )
    row = next(row for row in reproduction.NVCOMP_POST if row.item == "Figure 4")
    assert row.ratios(reading.Results(tmp_path)) == (
        "Cascaded on sorted 0.13, LZ4 on strings 0.03, Cascaded on strings 0.31"
    )


def test_the_csvs_that_a_table_reads():
    read = reproduction.csvs_of("buddy", reading.Results(harness.RESULTS))
    assert set(read) == {"spill", "entries", "moments", "thresholds", "activations"} and read["spill"]


@pytest.mark.parametrize("paper", papers.TITLES)
def test_parts_of_a_paper_are_where_the_table_says(paper):
    rows, tests = papers.parts_of(paper), {path.name for path in (harness.ROOT / "tests").rglob("test_*.py")}
    scripts = {path.name for path in (harness.ROOT / "benchmarks").glob("*.py")}
    known = tests | scripts | {path.name for path in harness.RESULTS.glob("*.csv")}
    for row in rows:
        assert set(papers.files_of(row)) <= known, row
        assert row["state"] in papers.STATES and bool(row["why"]) == (row["state"] != "yes"), row
        assert bool(row["where"]) == (row["state"] != "no"), row
    assert len({row["what"] for row in rows}) == len(rows)


@pytest.mark.parametrize("paper", reproduction.PAPERS)
def test_parts_of_a_paper_have_its_tables_and_figures(paper):
    named = {row["what"] for row in papers.parts_of(paper)}
    items = {row.item.removesuffix("; headline") for row in reproduction.PAPERS[paper]}
    assert items <= named


def test_every_part_belongs_to_a_paper():
    assert {row["paper"] for row in reading.read(papers.SHEET)} == set(papers.TITLES)


def writer(directory):
    """function(name, columns, *lines): writes a CSV."""
    return lambda name, *lines: (directory / f"{name}.csv").write_text("\n".join(lines) + "\n")


def test_figures_of_bytes_are_those_of_the_csvs(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    write("ratio", "set,dtype,method,savings", "normal 1,float16,planes,0.125", "normal 1,float64,planes,0.0625")
    write("bits", "set,dtype,bound", "normal 1,float16,0.25", "normal 1,float64,0.5")
    write(
        "densities",
        "net,layer,kind,elements,step,progress,loss,density",
        *("AlexNet,conv0,relu,4,0,0.0,,0.5", "AlexNet,pool0,pool,1,0,0.0,,0.75"),
        *("AlexNet,conv0,relu,4,9,1.0,1.5,0.25", "AlexNet,pool0,pool,1,9,1.0,1.5,0.25"),
    )
    write(
        "activation_ratios",
        "net,layer,kind,elements,progress,layout,dtype,zvc,zlib,ibp",
        *("AlexNet,conv0,relu,300,1.0,NCHW,float32,2,4,5", "AlexNet,pool0,pool,100,1.0,NCHW,float32,1,1,1"),
        *("AlexNet,conv0,relu,300,1.0,NCHW,bfloat16,4,3,1", "AlexNet,pool0,pool,100,1.0,NCHW,bfloat16,1,1,1"),
        *(f"AlexNet,conv0,relu,300,1.0,{layout},float32,2,4,5" for layout in ("NHWC", "CHWN")),
    )
    assert reproduction.output_shares("normal 1")(results) == "FP16 0.875 (0.750), FP64 0.938 (0.500)"
    assert reproduction.densities_by_layer(results) == "conv0 50 %, 25 %, 25 %"
    assert reproduction.densities_of_pools(results) == "1 of 1 pools, nets: 1"
    assert reproduction.net_sparsity(results) == "AlexNet 60.0 %; nets: 1, 60.0 % on average, at most 75.0 %"
    ratios = reproduction.layout_ratios(results).split("<br>")
    assert (ratios[0], ratios[-1]) == ("NCHW: zvc 1.60, zlib 2.29, ibp 2.50", "nets: 1; zvc at most 2.0")
    assert reproduction.net_ratios(results) == "nets: 1: zvc 2.29, zlib 2.00, ibp 1.00"


def test_a_run_that_was_stopped_is_said(tmp_path):
    writer(tmp_path)(
        "densities",
        "net,layer,kind,step,progress,loss,density",
        *("AlexNet,conv1,relu,0,0.0,,0.5", "AlexNet,conv1,relu,50,0.5,2.0,0.25", "NiN,conv1,relu,4,1.0,2.0,0.25"),
    )
    results = reading.Results(tmp_path)
    assert reproduction.losses(results) == (
        "AlexNet: loss 2.00 to 2.0000; conv1 least dense, 25 %, after 50 steps, at last 25 %; stopped after 50 of 100 "
        "steps; today's script has 2000"
    )
    assert "; stopped after 50 of 100 steps" in reproduction.densities_by_layer(results)
    assert reproduction.densities_of_deeper(results) == "nets: 1, on average 25, 25, 25 %"


def test_rivals_stand_with_their_best_arms(tmp_path):
    """The best gather of the CPU by any script, and the best of nvCOMP's codecs."""
    write, results = writer(tmp_path), reading.Results(tmp_path)
    columns = "arm,row_bytes,gbps,workers"
    for_each = [f"{arm},{size},{gbps},{workers}" for size in (256, 1024, 4096) for arm, gbps, workers in (
        ("cpu index + copy", 2, 1), ("cpu index + copy", 5, 8), ("planes slots", 69, 8), ("planes slots", 70, 64),
    )]  # fmt: skip
    write("copy_threads", columns, *for_each)
    write("kv_rows", "arm,row_bytes,gbps", *(f"cpu index + copy,{size},30" for size in (256, 4096)))
    write("gather", "case,dtype,arm,row_bytes,gbps", "normal 0.02,bfloat16,cpu pipelined,1024,40")
    assert reproduction.workers(results).split("<br>")[2] == "1 KiB: 2.00 to 5.00, 40.0, 70.0 from 8 SMs"
    arms = {"ibp": 3, "auto": 4, "nvcomp ans": 1.5, "nvcomp lz4": 0.5, "nvcomp zstd, row by row": 2}
    write("transfers", "case,dtype,arm,gain", *(f'pubmed,float32,"{arm}",{gain}' for arm, gain in arms.items()))
    assert reproduction.transfer_gains(results).split("<br>")[1:] == ["sparse 3.00, 4.00, 1.50 (ans)"]


def test_sets_of_a_column_are_not_averaged(tmp_path):
    """Where one set gains and another loses, both stand there; keys that were cast to FP16 stand nowhere."""
    gains = {("LLM weights", "bfloat16"): 0.9, ("LLM weights, 512 B", "bfloat16"): 1.3, ("LLM keys", "float16"): 1.2}
    rows = [
        f'"{case}",{dtype},{arm},{gain}' for (case, dtype), gain in gains.items() for arm in ("ibp", "auto", "ndzip")
    ]
    writer(tmp_path)("transfers", "case,dtype,arm,gain", *rows)
    results = reading.Results(tmp_path)
    found = reproduction.transfer_gains(results).split("<br>")[1:]
    assert found == ["weights 0.90 to 1.30, 0.90 to 1.30, 0.90 to 1.30 (ndzip)"]
    assert [label for label, *_ in reproduction.transfer_ratios(results)] == ["weights"]


def test_keys_and_values_of_fp16_stand_beside_older_ones(tmp_path):
    """Rows of 512 B are no rows of 128 B, and a pipelined codec may be the best one."""
    gains = {("K-cache", "float16"): 1.1, ("embedding", "float32"): 1.0, ("embedding, 512 B", "float32"): 1.15}
    rows = [f'"{case}",{dtype},{arm},{gain}' for (case, dtype), gain in gains.items() for arm in ("ibp", "auto")]
    rows += [f'"{case}",{dtype},"nvcomp ans{way}",{gain}' for case, dtype in gains
             for way, gain in (("", 0.9), (", pipelined", 1.05))]  # fmt: skip
    writer(tmp_path)("transfers", "case,dtype,arm,gain", *rows)
    results = reading.Results(tmp_path)
    assert reproduction.transfer_gains(results).split("<br>")[1:] == [
        "DLRM 1.00, 1.00, 1.05 (ans, pipelined)",
        "DLRM, 512 B 1.15, 1.15, 1.05 (ans, pipelined)",
        "KV FP16 1.10, 1.10, 1.05 (ans, pipelined)",
    ]
    assert list(reproduction.transfer_ratios(results)) == [
        ("DLRM", 1.0, 1.1), ("DLRM, 512 B", 1.15, 1.1), ("KV FP16", 1.1, 1.02)
    ]  # fmt: skip


def test_rows_by_sms_and_threads_are_those_of_their_csvs(tmp_path):
    """They stand beside a request's own rows and the steps of activations.py, and are not taken for them."""
    write = writer(tmp_path)
    request = ("cpu index + copy,3,14,", "raw by kernel,2,7,", "ibp,1.5,7,")
    older = [row.rstrip(",") for row in request]
    write("kv_request", "arm,step_ms,request_s", *(f"{row}" for row in older))
    assert list(reproduction.workers_of_requests(reading.Results(tmp_path))) == []
    assert "a request, learning included: 50 %, 0 %" in reproduction.cache_rows(reading.Results(tmp_path))
    swept = [f"{arm} by {n} {of},{ms},1,{n}" for arm, of, some in (
        ("cpu index + copy", "threads", ((1, 9), (2, 5))), ("ibp", "SMs", ((8, 1.5), (132, 1.25))),
    ) for n, ms in some]  # fmt: skip
    of_opt = [f'"OPT-13B, 40 layers",{row}' for row in ("cpu index + copy,4,20,", "raw by kernel,3,10,", "ibp,3,9,")]
    write("kv_request", "case,arm,step_ms,request_s,workers", *(f",{row}" for row in (*request, *swept)), *of_opt)
    results = reading.Results(tmp_path)
    shown = reproduction.cache_rows(results)
    assert "a request, learning included: 50 %, 0 %" in shown and "OPT-13B, learning included: 55 %, 10 %" in shown
    assert list(reproduction.workers_of_requests(results)) == [
        "in a request, ms of a token and layer, cpu index + copy: 9.00/5.00 by 1/2 threads",
        "in a request, ms of a token and layer, ibp: 1.50/1.25 by 8/132 SMs",
    ]
    tables = [table for table in claims.TABLES if table.csv == "kv_request"]
    assert [len(table.rows(results)) for table in tables] == [6, 4]
    fork = [f'"opt-6.7b, 32 layers",{arm},{s}' for arm, s in (("cpu index + copy", 20), ("the paper's code", 12))]
    write("infinigen", "case,arm,request_s", *fork)
    assert "fork" not in reproduction.cache_rows(reading.Results(tmp_path))
    write("infinigen", "case,arm,request_s", *fork, '"opt-6.7b, 32 layers",ibp,10')
    assert reproduction.cache_rows(reading.Results(tmp_path)).split("<br>")[-1] == (
        "InfiniGen's fork, opt-6.7b, a request takes less time: 50 % than cpu index + copy, 17 % than the paper's code"
    )
    write(
        "throttle",
        "case,arm,sms,what,gpus,step_ms,out_gbps",
        *("VGG16,plain,0,sweep,1,8,0", "VGG16,ibp,132,sweep,1,10,50", "VGG16,ibp by 8 SMs,8,sweep,1,20,25"),
        *("VGG16,ibp by 64 SMs,64,sweep,1,12.5,50", "VGG16,ibp,132,together,1,11,50", "VGG16,ibp,132,together,2,30,9"),
    )
    assert list(reproduction.throttled_steps(reading.Results(tmp_path))) == [
        "VGG16 by 8/64 SMs: 0.50/0.80 times the rate by all, 25.0/50.0 GB/s to the host"
    ]


def test_a_table_in_place_is_reckoned_until_it_is_measured(tmp_path):
    write, columns = writer(tmp_path), "case,arm,rows,row_bytes,ms,gbps,learn_ms,checked_rows"
    rows = [f"large,{arm},1073741824,1,{ms},{gbps},," for arm, ms, gbps in
            (("on the GPU", 4, 270), ("pinned", 35, 29), ("pageable", 116, 8.7))]  # fmt: skip
    write("compress", columns, *rows)
    assert "174 GB reckoned" in reproduction.compress_times(reading.Results(tmp_path)).split("<br>")[-1]
    in_place = ('filling",9,1,4000,2,,', 'pageable",9,1,18000,2,,9', 'pinned, all rows counted",9,1,30000,2,21000,9')
    write("compress", columns, *rows, *(f'"normal, 174 GB","in place, {row}' for row in in_place))
    results = reading.Results(tmp_path)
    measured = "174 GB in place: pageable 18.0 s; pinned, all rows counted 30.0 s"
    assert reproduction.compress_times(results).split("<br>")[-1] == measured
    assert [len(table.rows(results)) for table in claims.TABLES if table.csv == "compress"] == [3, 3]


def test_an_arm_of_a_loader_that_ran_out_of_time_has_no_ratio(tmp_path):
    rows = ('"cora, batch 8",loader,', '"cora, batch 8",PrefetchLoader,12', '"cora, batch 8",raw rows,3')
    columns, results = "case,arm,accuracy_s", reading.Results(tmp_path)
    assert list(reproduction.loaded(results)) == []
    writer(tmp_path)("gnn_pyg", columns, *rows, '"cora, batch 8",ibp,2')
    drawn = [f'"cora, batch 8, drawn by the {name}",{row}' for name, row in (
        ("CPU", "pin_prefetcher,9"), ("CPU", "ibp,3"), ("GPU", "use_uva,2.5"), ("GPU", "ibp,2"),
    )]  # fmt: skip
    writer(tmp_path)("gnn_dgl", columns, *drawn)
    of_pyg, by_cpu, by_gpu = reproduction.loaded(reading.Results(tmp_path))
    assert of_pyg.endswith("cora, batch 8: PrefetchLoader 6.00, raw rows 1.50")
    assert by_cpu.endswith("with ibp, cora, batch 8, drawn by the CPU: pin_prefetcher 3.00")
    assert by_gpu.startswith("DGL's loader") and by_gpu.endswith("drawn by the GPU: use_uva 1.25")


def test_waits_of_a_batch_are_of_one_clock(tmp_path):
    """Older rows, whose times alone are of another clock, say so."""
    write = writer(tmp_path)
    cases = [(f'"{name}, batch 1024"', arm) for name in ("cora", "dense 602") for arm in ("raw rows", "ibp")]
    numbers = ",".join(("16", "2.5", "2.5", "4"))
    write("gnn", "case,arm,fetch_ms,train_ms,beside_ms,epoch_s", *(f"{case},{arm},{numbers}" for case, arm in cases))
    heads, *parts = reproduction.graph_parts(reading.Results(tmp_path)).split("<br>")
    assert "(wall clock)" in heads and parts[0] == "cora, raw rows: 16, 2.5, 2.5, 18 of 20 ms"
    columns = "case,arm,fetch_ms,train_ms,beside_ms,epoch_s,wait_ms"
    write("gnn", columns, *(f"{case},{arm},{numbers},17" for case, arm in cases))
    heads, *parts = reproduction.graph_parts(reading.Results(tmp_path)).split("<br>")
    assert "wall clock" not in heads and parts[-1] == "dense 602, ibp: 16, 2.5, 2.5, 17 of 20 ms"


def test_epochs_by_the_papers_scheme_are_paired_by_case(tmp_path):
    """Batches of two sizes, and a second row of one arm, which is refused."""
    arms = {"cpu plain": 90, "cpu pinned": 20, "cpu pipelined": 16, "raw rows": 12, "scheme ibp": 8}
    rows = [
        f'"{name}, batch {batch}",{arm},1,{seconds * times}'
        for name, batch, times in (("citeseer", 1024, 1), ("citeseer", 8192, 6), ("cora", 1024, 2))
        for arm, seconds in arms.items()
    ]
    rows.append('"citeseer, batch 8192",ibp,1,1')
    writer(tmp_path)("gnn", "case,arm,fetch_ms,epoch_s", *rows)
    assert list(reproduction.masked_epochs(reading.Results(tmp_path))) == [
        "Citeseer by scheme ibp: batch 1024 1.50, 2.00; batch 8192 1.50, 2.00"
    ]
    writer(tmp_path)("gnn", "case,arm,fetch_ms,epoch_s", *rows, rows[0])
    with pytest.raises(ValueError, match="cpu plain has two rows for citeseer, batch 1024"):
        list(reproduction.masked_epochs(reading.Results(tmp_path)))


def test_look_ups_are_compared_by_dtype_and_size(tmp_path):
    """Rows of 128 B in three dtypes have one case; each is divided by its own."""
    lookups = {("bfloat16", 128): (30, 36), ("float32", 128): (10, 35), ("bfloat16", 512): (20, 180)}
    rows = [
        f'"4 GiB, Zipf",{dtype},{size},{arm},{gbps}'
        for (dtype, size), (bags, coded) in lookups.items()
        for arm, gbps in (("CachedEmbeddingBag", bags), ("ibp + cache", coded), ("raw + cache", bags))
    ]
    writer(tmp_path)("dlrm", "case,dtype,row_bytes,arm,gbps", *rows)
    results = reading.Results(tmp_path)
    gains = [36 / 30, 35 / 10, 180 / 20]
    assert list(reproduction.lookup_headline(results)) == [("over CachedEmbeddingBag", sum(gains) / 3, 2.8)]
    assert reproduction.cached_bags(results) == (
        "as CachedEmbeddingBag, two sets of ids in turn: 1.20 to 9.00, 4.57 on average of 3; raw rows with the cache "
        "1.00, 1.00"
    )
    assert not reproduction.bags_inside(results)


def test_the_class_with_ibp_inside_is_compared_with_itself(tmp_path):
    """If both arms of the paper's comparison were measured, they are the headline."""
    lookups = {
        "ibp + cache": (90, 90),
        "raw + cache": (45, 60),
        "CachedEmbeddingBag": (30, 30),
        "CachedEmbeddingBag, no write-back": (10, 20),
        "CachedEmbeddingBag, raw rows": (20, 40),
        "CachedEmbeddingBag, ibp": (30, 50),
        "ibp": (70, 60),
        "cpu unique rows": (7, 5),
    }
    rows = [f'a,float32,{512 << k},"{arm}",{rates[k]},16' for arm, rates in lookups.items() for k in range(2)]
    writer(tmp_path)("dlrm", "case,dtype,row_bytes,arm,gbps,sets", *rows)
    results = reading.Results(tmp_path)
    assert list(reproduction.lookup_headline(results)) == [("inside CachedEmbeddingBag", 2.75, 2.8)]
    assert reproduction.bags_inside(results).split("<br>")[1:] == [
        "ibp 2.50 to 3.00 (2.75), 1.25 to 1.50 (1.38), 10.00 to 12.00 (11.00)"
    ]
    assert reproduction.cached_bags(results).startswith("as CachedEmbeddingBag: 3.00, 3.00 on average of 2; raw rows")


def test_unlike_rows_are_not_taken_for_each_other(tmp_path):
    writer(tmp_path)("x", "case,arm,dtype,sms,gbps", "a,ibp,int8,8,1", "a,ibp,int8,132,2", "a,cpu,int8,0,3")
    results = reading.Results(tmp_path)
    with pytest.raises(ValueError, match="ibp has two rows for a; wanted a key that tells them apart"):
        reproduction.by_arm(results.rows("x"))
    with pytest.raises(ValueError, match="x.csv has 2 rows with {'arm': 'ibp'}; wanted one"):
        results.row("x", arm="ibp")
    assert results.row("x", arm="raw") is None
    assert reproduction.by_arm(reading.whole(results.rows("x")))["a"]["ibp"]["gbps"] == 2


def test_figures_of_slots_and_offload_are_those_of_the_csvs(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    write(
        "spill",
        "case,arm,row_bytes,dtype,gbps,ideal_gbps,target,slot_bytes,spilled,rows,spilled_bytes",
        'normal 0.02,"decode, device only",2048,bfloat16,1000,2000,,1408,0.0,1000,0',
        'normal 0.02,"decode, device only",2048,bfloat16,500,2000,,1408,0.1,1000,0',
        'normal 0.02,"decode, spilled",2048,bfloat16,900,1000,,1408,0.0,1000,0',
        'normal 0.02,"decode, spilled",2048,bfloat16,400,1000,,1408,0.1,1000,409600',
        'normal 0.02,"decode, spilled",2048,bfloat16,300,1000,,1408,0.2,1000,9',  # whose other arm was not measured
    )
    assert reproduction.spilled_reads(results) == (
        "0 % spilled: 90 %, 90 %; reckoned 100/100 %<br>10 % spilled: 80 %, 40 %; reckoned 50/100 %"
    )
    write(
        "activations",
        "case,arm,step_ms",
        *("VGG16,plain,10", "VGG16,raw,30", "VGG16,ibp,12", "VGG16,save_on_cpu,60"),
        *("ResNet-50,plain,5", "ResNet-50,raw,29", "ResNet-50,ibp,58", "ResNet-50,save_on_cpu,50"),
    )
    assert reproduction.offload_costs(results) == (
        "3.00 to 5.80 times the step without offload, by torch's `save_on_cpu` 6.00 to 10.00"
    )
    assert reproduction.offload_gains(results) == (
        "1.20 to 11.60 times the step without offload<br>50 % faster than without coding in the median, 50 % on "
        "average, 1 of 2 nets slower"
    )


def test_figures_of_capped_memory_are_those_of_the_csvs(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    assert reproduction.managed_reads(results) == reproduction.larger_batches(results) == "not measured yet"
    write(
        "spill",
        "case,arm,gbps,spilled",
        *(f"managed memory,migrated,{gbps},{share}" for gbps, share in ((2000, 0), (900, 0.05), (20, 0.1), (8, 0.5))),
    )
    write(
        "activations",
        "case,arm,rows,gbps,step_ms",
        *("VGG16,plain in 4 GB,64,10,9", "VGG16,ibp in 4 GB,128,13,10", "VGG16,ibp,256,1,12", "VGG16,plain,256,1,9"),
        *("VGG16,ibp by 16 SMs,256,1,16", "VGG16,raw,256,1,15", "VGG16,save_on_cpu,256,1,60"),
    )
    results = reading.Results(tmp_path)
    assert reproduction.managed_reads(results) == "migrated: 100.0/250.0 times as long at 10/50 %"
    assert reproduction.larger_batches(results) == "VGG16: plain 64, 1.00; ibp 128, 1.30"
    assert list(reproduction.larger_batches_compared(results)) == [("VGG16, over plain", 1.3, 1.3)]
    text = "ibp by 16 SMs 0.75 times the rate of ibp in the median"
    assert reproduction.offload_gains(results).endswith(text)
    assert list(reproduction.offload_headlines(results))[-1] == ("throttled, over all SMs", 0.75, 0.94)


def test_rates_of_simulations_are_those_of_the_csvs(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    assert list(reproduction.against_zstd_simulated(results)) == []
    write(
        "codec", "case,arm,gbps", "by size: shallow water,planes encode,50", "by size: shallow water,planes decode,90"
    )
    write("cpu", "case,arm,gbps", *(f'"shallow water, 1 thread",zstd -1 {way}press,0.5' for way in ("com", "decom")))
    found = list(reproduction.against_zstd_simulated(reading.Results(tmp_path)))
    assert found == ["shallow water, 1 thread: encode 100 times, decode 180 times"]


def test_rates_against_an_rans(tmp_path):
    write = writer(tmp_path)
    write("encode_into", "case,arm,dtype,row_bytes,sms,gbps", "normal 0.02,decode,bfloat16,2048,132,2000")
    ours = '"normal 0.02, 1 thread",planes decode,bfloat16,5'
    write("cpu", "case,arm,dtype,gbps", ours)
    results = reading.Results(tmp_path)
    assert reproduction.against_rans(results) == "2,000 GB/s, planes decode by 1 thread 5.00: 400 times"
    assert list(reproduction.times_rans(results)) == []
    arms = [("rans", 1), ("rans of bytes", 0.5)]
    lines = (f'"normal 0.02, 1 thread",{arm} decompress,bfloat16,{gbps}' for arm, gbps in arms)
    write("cpu", "case,arm,dtype,gbps", ours, *lines)
    results = reading.Results(tmp_path)
    assert reproduction.against_rans(results).split("<br>") == [
        "2,000 GB/s, rans decompress by 1 thread 1.00: 2,000 times",
        "2,000 GB/s, rans of bytes decompress by 1 thread 0.50: 4,000 times",
        "2,000 GB/s, planes decode by 1 thread 5.00: 400 times",
    ]
    assert list(reproduction.times_rans(results)) == [("rans of bytes, 1 thread", 4000, 160)]


def test_shares_by_an_rans_are_those_of_the_csvs(tmp_path):
    rows = ((ratio.RANS, 0.125), (ratio.RANS_ONE, 0.1), (ratio.RANS_BITMAP, 0.5), (ratio.RANS_CODED_BITMAP, 0.75))
    writer(tmp_path)(
        "ratio",
        "set,dtype,method,savings",
        *(f'normal 1,float64,"{method}",{savings}' for method, savings in rows[:2]),
        *(f'cora,float32,"{method}",{savings}' for method, savings in (rows[0], *rows[2:])),
        *(f'cora,float16,"{method}",{savings}' for method, savings in (rows[0], *rows[2:])),
    )
    results = reading.Results(tmp_path)
    ours = {row.item: row.ours(results) for row in reproduction.DIETGPU if row.item in ("Section 3.1", "Section 3.3")}
    assert ours == {"Section 3.1": "normal 1 0.875, 0.900", "Section 3.3": "cora 0.500, 0.250"}
    assert list(reproduction.coders_compared(results)) == [("two", 0.875, 0.87), ("one", 0.9, 0.90)]


def test_swept_thresholds_are_those_of_the_csv(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    assert reproduction.swept(results) == reproduction.NOT_YET
    cells = ((threshold, size, net) for threshold in (0.1, 0.3) for size in (2048, 128) for net in (1, 2))
    write(
        "thresholds",
        "program,row_bytes,slots,threshold,ratio,spilled",
        *(f"net {net},{size},the paper's ratios,{threshold},{net},{threshold / 2}" for threshold, size, net in cells),
        "net 1,128,one target,0.3,9,0.9",
    )
    assert reproduction.swept(reading.Results(tmp_path)).split("<br>") == [
        "nets: 2",
        "10 %: 2 KiB 1.50 with 5.0 %, 128 B 1.50 with 5.0 %",
        "30 %: 2 KiB 1.50 with 15.0 %, 128 B 1.50 with 15.0 %",
    ]


def test_figures_of_entries_are_those_of_the_csvs(tmp_path):
    writer(tmp_path)("entries", "program,times_smaller", "AlexNet,1.5", "AlexNet,1.5", "LSTM,1.25")
    assert reproduction.entry_sizes(reading.Results(tmp_path)) == "AlexNet 1.50, LSTM 1.25 times smaller"


def test_parts_of_epochs_are_those_of_the_csvs(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    arms = {"raw rows": 8, "ibp": 2, "cache by ibp": 4, "misses by ibp": 5}
    write(
        "gnn_cache",
        "case,arm,cache_percent,epoch_s",
        *(f'cora,"{arm}, cache of 1 %",1,{seconds}' for arm, seconds in arms.items()),
        "cora,ibp,0,1.5",
    )
    dgl = "cora, batch 1024, sampled by DGL"
    write(
        "gnn",
        "case,arm,fetch_ms,train_ms,beside_ms,epoch_s",
        *(f'"{case}",{arm},9,4,5,{seconds}' for case in ("cora, batch 1024", "dense 602, batch 1024", dgl)
          for arm, seconds in (("cpu plain", 6), ("cpu pinned", 5), ("cpu pipelined", 4), ("raw rows", 3), ("ibp", 2),
                               ("scheme ibp", 2.5))),
    )  # fmt: skip
    assert reproduction.graph_gains(results).split("<br>") == [
        "epochs, times as fast as by raw rows and the GPU, as by the CPU's best gather:",
        "sparse features: ibp 1.50, 2.00; scheme ibp 1.20, 1.60",
        "dense: ibp 1.50, 2.00; scheme ibp 1.20, 1.60",
        "sampled by DGL, over rows by `x[ids].to()`, over raw rows by the GPU: cora 3.00, 1.50",
        "behind a cache of 1 %, seconds: raw, misses coded, the cache coded, both, coded without a cache: "
        "cora 8.00, 5.00, 4.00, 2.00, 1.50",
    ]
    parts = reproduction.graph_parts(results).split("<br>")
    assert parts[2] == "cora, ibp: 9.0, 4.0, 5.0, 5.0 of 10 ms" and len(parts) == 5
    assert parts[0] == "fetch alone, train alone (wall clock), train beside fetches (CUDA events), wait:"


def test_profiles_of_programs_and_of_one_target(tmp_path):
    write, results = writer(tmp_path), reading.Results(tmp_path)
    kinds = ("the paper's ratios", "slots of any size", "one target", "without 16 times")
    write(
        "spill",
        "case,arm,savings,target,spilled",
        *(f'"{name}, {kind}","profile, 30%",0.5,1.5,0.1' for name in ("training", "program LSTM") for kind in kinds),
    )
    assert reproduction.best_ratios(results) == "LSTM 2.00"
    assert reproduction.chosen_ratios(results).split("<br>") == [f"{kind}: 1.50 with 10.0 %" for kind in kinds]
    assert [label for label, *_ in reproduction.chosen_ratio_compared(results)] == [
        *("the paper's ratios", "accesses", "one target", "accesses")
    ]
    assert list(reproduction.headline_compared(results)) == [("", 1.5, 1.5)]
    write("moments", "program,moment,ratio,spilled", "LSTM,0,1.25,0.1", "LSTM,1,1.25,0.2")
    assert reproduction.spilled_within_steps(results) == "LSTM 1.25 with 10.0 to 20.0 %"


def test_one_target_for_all_tensors_spills_a_share_of_all_rows():
    noise = torch.randint(2**31, (100, 512), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    report = ibp.spill.profile([{"noise": noise, "zeros": torch.zeros(900, 512)}], device="cpu")
    assert spill.with_one_target(report, 0.2).rows == 0.1
    assert spill.with_one_target(report, 0.2).ratio > 10 and spill.with_one_target(report, 0.05).ratio < 1
    assert list(spill.spilled_by_snapshot(spill.with_one_target(report, 0.2))) == [0.1]
    assert spill.with_ratios(report, None)["zeros"].slot_bytes == 0


def test_thresholds_by_size_of_rows(tmp_path, monkeypatch):
    """A tensor of which a fifth is noise, and one of zeros; in rows of 128 bytes the index takes more of the bytes."""
    x = torch.zeros(640, 512)
    noise = torch.randint(2**31, (128, 512), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x[::5] = noise.view(torch.float32)
    held = {"some noise": x, "zeros and a rest": torch.zeros(320 * 512 + 7)}
    monkeypatch.setattr(thresholds, "snapshots", lambda *_: iter(2 * [thresholds.in_rows(held)]))
    rows = run_quickly("thresholds", tmp_path, "--nets", "LSTM")
    assert list(rows[0]) == thresholds.COLUMNS and {row["program"] for row in rows} == {"LSTM"}
    swept = [f"{threshold:g}" for threshold in thresholds.SWEEP]
    for row_bytes in ("2048", "128"):
        own = {(row["slots"], row["threshold"]): row for row in rows if row["row_bytes"] == row_bytes}
        assert [key[1] for key in own] == [*swept, *swept, "0.3", "0.3"]
        ratios = [float(own["the paper's ratios", threshold]["ratio"]) for threshold in swept]
        spilled = [float(own["the paper's ratios", threshold]["spilled"]) for threshold in swept]
        assert ratios == sorted(ratios) and ratios[-1] > 1.4 * ratios[0] and spilled[0] == 0
        assert spilled[-1] == pytest.approx(128 / 960, abs=0.04)
        assert all(float(row["index"]) == pytest.approx(2.25 / int(row_bytes), rel=0.2) for row in own.values())
    assert run_quickly("thresholds", tmp_path, "--nets", "AlexNet")[: len(rows)] == rows


def test_slots_of_a_small_batch_hold_rows_of_a_large_one(tmp_path, monkeypatch):
    """A tensor of which a tenth is noise with the small batch, and half with the large one; and weights."""
    generator = torch.Generator().manual_seed(0)

    def snapshots(device, name, quick, batch, smallest=1.0):
        assert smallest == (thresholds.SMALL_BATCH / thresholds.LARGE_BATCH if batch == thresholds.SMALL_BATCH else 1)
        x = torch.zeros(40 * batch, 512)
        share = 10 if batch == thresholds.SMALL_BATCH else 2
        noise = torch.randint(2**31, x[::share].shape, generator=generator, dtype=torch.int32)
        x[::share] = noise.view(torch.float32)
        held = {"output": x, "weights": torch.zeros(160, 512)}
        if batch == thresholds.SMALL_BATCH:
            held["output that the large batch lacks"] = torch.zeros(40, 512)
        return iter(2 * [thresholds.in_rows(held)])

    monkeypatch.setattr(thresholds, "snapshots", snapshots)
    main = ["--batches", "--device", "cpu", "--quick", "--out", str(tmp_path), "--nets", "LSTM"]
    assert thresholds.main(main) == 0
    rows = lines_of(tmp_path / "batches.csv")
    assert list(rows[0]) == thresholds.BATCH_COLUMNS and {row["batch"] for row in rows} == {"16"}
    for row_bytes in ("2048", "128"):
        small, own = (
            {
                (row["slots"], row["threshold"]): row
                for row in rows
                if row["row_bytes"] == row_bytes and row["profiled_batch"] == batch
            }
            for batch in ("2", "16")
        )
        assert small.keys() == own.keys() and len(small) == 10
        chosen = ("the paper's ratios", "0.3")
        assert float(small[chosen]["ratio"]) > 1.5 * float(own[chosen]["ratio"])
        assert (
            float(small[chosen]["spilled"]) == pytest.approx(320 / 800, abs=0.01) and float(own[chosen]["spilled"]) == 0
        )
        assert float(small[chosen]["best_ratio"]) == pytest.approx(float(own[chosen]["best_ratio"]), rel=0.02)
    monkeypatch.undo()
    assert thresholds.main([*main[:-1], "AlexNet"]) == 0  # As quick programs have one batch, both profiles agree.
    found = lines_of(tmp_path / "batches.csv")
    assert found[: len(rows)] == rows and {row["program"] for row in found[len(rows) :]} == {"AlexNet"}
    half = (len(found) - len(rows)) // 2
    for small, own in zip(found[len(rows) :][:half], found[len(rows) :][half:], strict=True):
        assert {**small, "profiled_batch": ""} == {**own, "profiled_batch": ""}


@pytest.mark.slow
def test_programs_are_profiled_and_other_rows_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "PROGRAMS", ("AlexNet", "LSTM"))
    before = "benchmark,case,arm,rows,row_bytes,dtype,savings,gbps,ideal_gbps,sms,gpu,torch,cuda,commit".split(",")
    kept = dict.fromkeys([*before, *spill.COLUMNS], "")
    kept |= {"benchmark": "spill", "case": "pages", "gpu": "none", "torch": torch.__version__, "cuda": "none"}
    kept["cuda"] = torch.version.cuda or "none"
    with open(tmp_path / "spill.csv", "w", newline="") as file:
        sheet = csv.DictWriter(file, list(kept))
        sheet.writeheader()
        sheet.writerow(kept)
    rows = run_quickly("spill", tmp_path, "--programs")
    assert [row["case"].split(",")[0] for row in rows] == ["pages", *4 * ["program AlexNet"], *4 * ["program LSTM"]]
    rows = run_quickly("spill", tmp_path, "--managed")
    assert len(rows) == 9 + 3 * len(spill.MANAGED_SHARES) and {row["arm"] for row in rows[9:]} == {
        *("migrated", "read over the link", "slots and overflow")
    }


def test_overflow_on_another_gpu_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "MAX_REPEATS", 1)
    monkeypatch.setattr(harness, "MIN_REPEATS", 1)
    rows = run_quickly("spill", tmp_path, "--peer")
    kinds, placed = (
        {row["arm"] for row in rows if row["case"].endswith(end)} for end in ("normal 0.02, 128 bytes", spill.NOISE)
    )
    reads = ("decode", "index_select", "update_")
    assert kinds == {f"{read}, {where}" for read in reads for where in ("device only", "spilled", "spilled to a GPU")}
    assert placed == {"slots and overflow, spilled", "slots and overflow, spilled to a GPU"}
    assert all(spill.mode_of(row["case"]) == "peer" for row in rows)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda near, far: far == 2)
    for count, found in ((3, "cuda:2"), (2, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert spill.peer_of("cuda") == found
    monkeypatch.setattr(spill, "peer_of", lambda device: None)
    assert spill.main(["--peer", "--device", "cpu", "--out", str(tmp_path)]) == 1


# CSVs that lack columns of where they were measured: those that count bytes, and what README.md of the benchmarks says.
WITHOUT_MACHINE = {
    **{
        name: {"gpu"}
        for name in (
            *("batches", "bits", "chunks", "clusters", "digit_forms", "entries", "moe_hits", "moe_policies", "moments"),
            *("more_clusters", "probes", "ratio", "sampling", "thresholds"),
        )
    },
    "real_weights": {"gpu"},
    "fuzz": {"gpu", "commit"},
}


def test_every_row_of_speed_names_gpu_and_commit():
    readme = (harness.ROOT / "benchmarks" / "README.md").read_text()
    lacking = {}
    for path in harness.RESULTS.glob("*.csv"):
        rows = reading.read(path)
        missing = {name for name in ("gpu", "commit") if name not in rows[0]}
        if missing:
            lacking[path.stem] = missing
            assert f"`{path.name}`" in readme.split("## Results")[1], path
        if not missing:
            assert all(row["gpu"] and row["commit"] for row in rows), path
    assert lacking == WITHOUT_MACHINE


MAIN_COMMIT = "17293c56"  # that CSVs of speed are of, unless the README of the benchmarks names them


def test_the_readme_names_the_csvs_of_other_commits():
    readme = (harness.ROOT / "benchmarks" / "README.md").read_text()
    said = readme.split("| `--unlimited`")[1].split("`IBP_COMMIT` names")[0]
    assert f"**Commit {MAIN_COMMIT}**" in said
    for path in harness.RESULTS.glob("*.csv"):
        rows = reading.read(path)
        if path.stem not in WITHOUT_MACHINE and {row["commit"][:8] for row in rows} != {MAIN_COMMIT}:
            assert f"`{path.stem}`" in said, path.stem
