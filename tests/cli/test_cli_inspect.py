"""`ibp inspect`: what it says of files of ibp and of others, and what it writes."""

import json
import os
import re
import sys

import numpy as np
import pytest
import torch

import ibp
from helpers import embedding, one_hot_rows, spiky_rows
from ibp._cli import describing, report
from ibp._cli import main as frame
from ibp._cli.describing import make_page
from ibp._cli.report import inspect_path
from native import ROOT

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m"


def run(*arguments):
    return frame.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of tables of several kinds, tensors and a delta."""
    base = embedding(100, 64, torch.bfloat16)
    new = torch.where(torch.rand(base.shape, generator=torch.Generator().manual_seed(0)) < 0.02, base * 2, base)
    path = tmp_path_factory.mktemp("inspect") / "model.safetensors"
    tensors = {
        "layers.0.weight": ibp.compress(base, layout="packed", scheme="planes", memory="host"),
        "features": ibp.compress(spiky_rows(100, 90), memory="host"),
        HOSTILE: ibp.compress(one_hot_rows(50, 40), scheme="ibp", memory="host"),
        "norm": torch.ones(64, dtype=torch.bfloat16),
        "step": ibp.deltas.make(new, base),
    }
    ibp.save(path, tensors, metadata={"by": "a test"})
    return path


def document(capsys, *arguments):
    assert run("inspect", *arguments, "--json") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


def test_a_file_is_described(file, capsys):
    (found,) = document(capsys, file)["files"]
    assert found["format"] == "ibp" and not found["estimate"] and found["metadata"] == {"by": "a test"}
    assert found["file_bytes"] == file.stat().st_size
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    with ibp.open(file) as opened:
        assert list(tensors) == list(opened)
        for name, tensor in tensors.items():
            info = opened.info(name)
            assert tuple(tensor["shape"]) == info.shape and tensor["original_bytes"] == info.num_bytes
            assert tensor["stored_bytes"] == sum(tensor["parts"].values())
            assert tensor["stored_bytes"] == info.stored_bytes
    assert [tensor["kind"] for tensor in tensors.values()].count("delta") == 1
    assert tensors["norm"]["scheme"] == "plain" and "residuals" in tensors["layers.0.weight"]["parts"]
    assert found["original_bytes"] == sum(tensor["original_bytes"] for tensor in tensors.values())


def test_lists_fit_a_terminal(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("inspect", file, "--planes") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "\x1b" not in shown
    assert "layers.0.weight" in shown and "5 tensors: " in shown and re.search(r"residuals +6,400 ", shown)


def test_one_tensor_is_told_in_detail(file, capsys):
    assert run("inspect", file, "--tensor", "layers.0.weight") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^14-\d+ +0\.\d\d +0\.0 % +100\.0 %", shown, re.MULTILINE) and "plane 0" in shown
    assert re.search(r"^0-?|^\d+-0 +1\.00 +100\.0 %", shown, re.MULTILINE)


def test_tensors_are_chosen(file, capsys):
    (found,) = document(capsys, file, "--include", "layers.*", "--include", "norm", "--exclude", "*rm")["files"]
    assert [tensor["name"] for tensor in found["tensors"]] == ["layers.0.weight"]
    whole = inspect_path(file)
    assert whole.stored_bytes == whole.file_bytes > report.sum_bytes(whole.tensors)[1]
    some = inspect_path(file, wanted=lambda name: name == "norm")
    assert (some.original_bytes, some.stored_bytes) == (128, some.tensors[0].stored_bytes)


def test_a_tensor_that_is_not_there_is_a_line(file, capsys):
    assert run("inspect", file, "--tensor", "nothing") == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(r"ibp inspect: there is no tensor 'nothing' in [^\n]+\n", shown.err)


def test_ordinary_files_are_estimated(tmp_path, capsys):
    weights = embedding(300, 64, torch.bfloat16)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"w": weights, "b": torch.zeros(3)}, tmp_path / "a.safetensors")
    np.save(tmp_path / "x.npy", np.zeros((200, 200), np.float32))
    torch.save({"w": weights}, tmp_path / "c.pt")
    given = document(capsys, tmp_path / "a.safetensors", tmp_path / "x.npy", tmp_path / "c.pt")["files"]
    assert [file["format"] for file in given] == ["safetensors", "npy", "torch"]
    assert all(file["estimate"] for file in given) and given[0]["metadata"] == {}
    (w,) = (tensor for tensor in given[0]["tensors"] if tensor["name"] == "w")
    assert w["kind"] == "estimate" and w["scheme"] == "planes" and 0.3 < w["savings"] < 0.35
    assert given[1]["tensors"][0]["default_rows"] == 200 and given[2]["tensors"][0]["parts"] == w["parts"]


def test_a_set_of_files_is_one(tmp_path, capsys):
    tables = {f"t{i}": ibp.compress(embedding(50, 64, seed=i), memory="host") for i in range(3)}
    ibp.save(tmp_path / "m.safetensors", tables, shard_bytes=15_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (found,) = document(capsys, tmp_path)["files"]
    assert sorted(tensor["name"] for tensor in found["tensors"]) == ["t0", "t1", "t2"]
    assert found["file_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_codebooks_that_tables_share_count_once(tmp_path, capsys):
    codebook = ibp.compress(embedding(100, 64), scheme="ibp", memory="host").codebook
    tables = {f"t{i}": ibp.compress(embedding(50, 64, seed=i), codebook=codebook, memory="host") for i in range(2)}
    ibp.save(tmp_path / "m.safetensors", tables)
    (found,) = document(capsys, tmp_path / "m.safetensors")["files"]
    assert [tensor["codebook_bytes"] for tensor in found["tensors"]] == [codebook.nbytes] * 2
    own = sum(tensor["stored_bytes"] for tensor in found["tensors"])
    with ibp.open(tmp_path / "m.safetensors") as file:
        assert own == sum(file.info(name).stored_bytes for name in file)
    assert found["stored_bytes"] == found["file_bytes"] > own + codebook.nbytes


def test_shared_memory_counts_once(tmp_path, capsys):
    """`inspect` lists every tensor, and its total is that of `estimate`, before compression and after it. A tensor that
    lies in the memory of another one has no bytes of its own."""
    weights = embedding(300, 64, torch.bfloat16)
    tensors = {"a": weights, "tied": weights, "part": weights[100:200], "other": embedding(200, 64, seed=1)}
    parts = embedding(400, 64, seed=2)
    tensors |= {"left": parts[:250], "right": parts[150:], "none": parts[:0]}  # no tensor has all of this memory
    source, coded = tmp_path / "m.pt", tmp_path / "m.safetensors"
    torch.save(tensors, source)
    assert run("compress", source, "-o", coded, "--device", "cpu", "--quiet") == 0
    for path in (source, coded):
        assert run("estimate", path, "--json") == 0
        estimated = json.loads(capsys.readouterr().out)
        (found,) = document(capsys, path)["files"]
        assert {tensor["name"]: tensor["original_bytes"] for tensor in found["tensors"]} == {
            name: tensor.nbytes for name, tensor in tensors.items()
        }
        wanted = weights.nbytes + tensors["other"].nbytes + parts.nbytes
        assert found["original_bytes"] == estimated["num_bytes"] == wanted
        assert abs(found["savings"] - estimated["savings"]) < 0.02
        views = [tensor for tensor in found["tensors"] if not tensor["stored_bytes"]]
        assert {tensor["name"] for tensor in views} == {"tied", "part", "left", "right", "none"}
        assert all(tensor["parts"] == {} for tensor in views)
    assert found["stored_bytes"] == coded.stat().st_size
    assert run("inspect", coded, "--planes") == 0 and "tied" in capsys.readouterr().out
    assert run("inspect", coded, "--tensor", "tied") == 0 and "0 bytes, 100.0 % saved" in capsys.readouterr().out
    unseen, count = re.subn(rb'("ibp\.table\.\w[^"]*": ?"[^"]*scheme=)planes', rb"\1unseen", coded.read_bytes())
    assert count == 3
    coded.write_bytes(unseen)  # of a scheme that nobody has
    (found,) = document(capsys, coded, "--planes")["files"]
    assert [tensor["name"] for tensor in found["tensors"] if tensor["kind"] != "unknown"] == ["none"]
    assert found["original_bytes"] == 0
    assert run("inspect", coded, "--planes") == 0 and "tied" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["coded", "constant", "plain", "several rows"])
def test_commands_agree_about_the_size_of_a_tensor(kind, tmp_path, capsys):
    x = {
        "coded": torch.randint(0, 3, (1024,), dtype=torch.int32),
        "constant": torch.ones(1025),
        "plain": torch.randn(100),
        "several rows": embedding(100, 1024, torch.bfloat16),
    }[kind]
    np.save(tmp_path / "x.npy", (x.float() if x.dtype == torch.bfloat16 else x).numpy())
    source, coded = tmp_path / "x.npy", tmp_path / "x.safetensors"
    assert run("compress", source, "-o", coded, "--device", "cpu", "--json") == 0
    (made,) = json.loads(capsys.readouterr().out)["tensors"]
    assert run("estimate", source, "--json") == 0
    (estimated,) = json.loads(capsys.readouterr().out)["tensors"]
    (before,), (after,) = (document(capsys, path)["files"][0]["tensors"] for path in (source, coded))
    assert after["stored_bytes"] == made["stored_bytes"] == ibp.open(coded).info(made["name"]).stored_bytes
    assert before["stored_bytes"] == estimated["stored_bytes"] == made["stored_bytes"]
    assert (made["scheme"] is None) == (kind == "plain")


def test_what_this_ibp_lacks_is_named(tmp_path, capsys):
    """A file with a table of a codec that nobody has."""
    path = tmp_path / "m.safetensors"
    ibp.save(path, {"w": ibp.compress(embedding(50, 64), layout="packed", memory="host"), "p": torch.ones(2)})
    data = path.read_bytes()
    assert data.count(b"scheme=planes row_bytes") >= 1
    line = re.search(rb'"ibp\.table\.w": ?"([^"]*)"', data)[1]
    other = re.sub(rb"scheme=\w+", b"surprise=1", line)
    path.write_bytes(data.replace(line, other[: len(line)].ljust(len(line)), 1))
    (found,) = document(capsys, path)["files"]
    w, p = found["tensors"]
    assert w["kind"] == "unknown" and w["note"] and p["kind"] == "plain"


@pytest.mark.parametrize(
    "content", [b"", b"no file of tensors", b"\x10" + bytes(7) + b"{" * 16], ids=["empty", "text", "json"]
)
def test_what_is_no_file_of_tensors_is_a_line(tmp_path, capsys, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert run("inspect", path) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("ibp inspect: ") and shown.err.count("\n") == 1


def test_a_page_is_written(file, tmp_path, capsys):
    page = tmp_path / "out.html"
    assert run("inspect", file, "--html", page, "--quiet") == 0
    text = page.read_text(encoding="utf-8")
    assert capsys.readouterr().out == "" and "<img" not in text and "layers.0.weight" in text


@pytest.mark.slow
def test_a_plot_is_written(file, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "out.png"
    assert run("inspect", file, "--plot", plot, "--quiet") == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_failing_plot_leaves_what_is_there(file, tmp_path, monkeypatch):
    plot = tmp_path / "out.png"
    plot.write_text("before")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("inspect", file, "--plot", plot, "--force") == 2 and plot.read_text() == "before"


def test_a_missing_matplotlib_is_said_before_the_work(file, tmp_path, capsys, monkeypatch):
    """No file is read for a plot that cannot be drawn; a page that is asked for besides is written."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = []

    def inspected(*arguments, **options):
        said.append(capsys.readouterr().err)
        return inspect_path(*arguments, **options)

    monkeypatch.setattr(describing, "inspect_path", inspected)
    plot, page = tmp_path / "out.png", tmp_path / "out.html"
    assert run("inspect", file, "--plot", plot) == 2 and said == []
    assert "pip install matplotlib" in capsys.readouterr().err
    assert run("inspect", file, "--plot", plot, "--html", page, "--quiet") == 2
    assert len(said) == 1 and re.fullmatch(r"ibp inspect: [^\n]+ pip install matplotlib\n", said[0])
    assert not plot.exists() and "layers.0.weight" in page.read_text(encoding="utf-8")


def test_pages_that_are_there_or_are_none(file, tmp_path, capsys):
    page = tmp_path / "out.html"
    page.write_text("before")
    assert run("inspect", file, "--html", page) == 2 and "--force replaces it" in capsys.readouterr().err
    assert run("inspect", file, "--html", page, "--keep", "--quiet") == 0 and page.read_text() == "before"
    assert run("inspect", file, "--html", page, "--force", "--quiet") == 0 and "<html" in page.read_text()
    for option, suffix in (("--html", ".html"), ("--plot", ".png")):
        assert run("inspect", file, option, file, "--force") == 2
        said = capsys.readouterr().err
        assert re.fullmatch(rf"ibp inspect: {option} is .*; wanted a name that ends in {suffix}\n", said)
    os.mkfifo(tmp_path / "pipe.html")
    assert run("inspect", file, "--html", tmp_path / "pipe.html", "--force") == 2
    assert "is a pipe, which is not replaced" in capsys.readouterr().err
    assert ibp.load(file)


@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_a_directory_that_is_not_there_is_a_line(file, tmp_path, capsys, option):
    assert run("inspect", file, option, tmp_path / "none" / "out") == 2
    assert re.fullmatch(r"ibp inspect: [^\n]+: there is no such directory\n", capsys.readouterr().err)


def test_damaged_rows_are_wrong_data(tmp_path, capsys):
    path = tmp_path / "m.safetensors"
    ibp.save(path, {"w": ibp.compress(embedding(50, 64), scheme="planes", layout="packed", memory="host")})
    with ibp.open(path) as opened:
        lengths = opened["w"].lengths.numpy().tobytes()
    data = path.read_bytes()
    assert data.count(lengths) == 1
    path.write_bytes(data.replace(lengths, b"\1" * len(lengths)))
    assert run("inspect", path) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("ibp inspect: ") and shown.err.count("\n") == 1


@pytest.mark.slow
def test_any_damage_is_told_or_harmless(file, tmp_path):
    """Whatever the bytes are, a report is made or one of two errors raised."""
    rng, whole = np.random.default_rng(0), file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = 8 + len(whole[8:start].rstrip())
    damaged, told = tmp_path / "damaged.safetensors", 0
    for _ in range(200):
        data = bytearray(whole)
        for at in (rng.integers(8, header), *rng.integers(start, len(whole), 3))[rng.integers(2) :]:
            data[at] ^= 1 << rng.integers(8)
        damaged.write_bytes(data)
        try:
            make_page([inspect_path(damaged)])
        except (ibp.FileFormatError, ibp.CorruptTableError):
            told += 1
    assert 20 < told < 200


def test_samples_are_named(file, capsys, monkeypatch):
    monkeypatch.setattr(report, "SAMPLE_BYTES", 1 << 12)
    (found,) = document(capsys, file, "--tensor", "layers.0.weight")["files"]
    (tensor,) = found["tensors"]
    assert 32 <= tensor["sampled_rows"] < tensor["num_rows"] == 100
    assert run("inspect", file, "--tensor", "layers.0.weight") == 0
    assert "of the rows, as a sample" in capsys.readouterr().out


# ---- docs/cli.md ----


def test_the_page_names_all_parts(file, capsys):
    table = (ROOT / "docs" / "cli.md").read_text().partition("| part | what it is |")[2].partition("\n\n")[0]
    named = " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))
    for tensor in document(capsys, file)["files"][0]["tensors"]:
        for part in tensor["parts"]:
            assert part in named or re.fullmatch(r"digits of plane \d|plain", part) or part == "positions", part
