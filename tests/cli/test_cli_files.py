"""Commands that read and write files: compress, decompress, verify, estimate, diff, apply."""

import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ibp
from helpers import bytes_of
from ibp._cli import doctor, work
from ibp._cli.main import main
from ibp._files import read_header
from ibp._machine import calibration
from ibp.checkpoints import _converting
from ibp.checkpoints._inputs import open_source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Paths are short, as those that people type."""
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return main([os.path.relpath(one) if isinstance(one, Path) else str(one) for one in arguments])


def document(capsys, *arguments, status=0):
    """What a command prints with --json, and nothing else."""
    assert run(*arguments, "--json") == status
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


def printed(capsys, *arguments, status=0):
    """The lines that a command prints."""
    assert run(*arguments) == status
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def tensors():
    weights = torch.randn(300, 512, generator=torch.Generator().manual_seed(1)).mul(0.02).to(torch.bfloat16)
    return {
        "model.embed.weight": weights,
        "model.layers.0.a_rather_long_name_of_a_projection.that_does_not_fit.into_a_line.weight": weights[:64].clone(),
        "model.norm.weight": torch.ones(512, dtype=torch.float32),
        "step": torch.tensor(17),
        "none": torch.empty(0, 8),
    }


@pytest.fixture
def source(tensors, tmp_path):
    """An ordinary file of safetensors."""
    path = tmp_path / "model.safetensors"
    pytest.importorskip("safetensors.torch").save_file(tensors, path, {"made": "by a test"})
    return path


@pytest.fixture
def compressed(source, tmp_path):
    path = tmp_path / "small.safetensors"
    assert run("compress", source, "-o", path, "--quiet", "--device", "cpu") == 0
    return path


def whole(value):
    return value if isinstance(value, torch.Tensor) else ibp.decompress(value)


def assert_holds(path, tensors):
    found = {name: whole(value) for name, value in ibp.load(path).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bytes_of(found[name].contiguous()), bytes_of(tensor)), name


# ---- compress and decompress ----


def test_a_round_trip_keeps_names_bits_and_metadata(source, compressed, tensors, tmp_path):
    assert compressed.stat().st_size < 0.75 * source.stat().st_size
    assert_holds(compressed, tensors)
    back = tmp_path / "back.safetensors"
    assert run("decompress", compressed, "-o", back, "--quiet") == 0
    assert_holds(back, tensors)
    with ibp.open(back) as file:
        assert file.metadata == {"made": "by a test"} and not file.tables


def test_what_compress_says(source, tmp_path, capsys):
    said = document(capsys, "compress", source, "-o", tmp_path / "x.safetensors", "--verify-output", "--device", "cpu")
    assert said["verified_bytes"] > 0
    lines = printed(capsys, "compress", source, "-o", tmp_path / "y.safetensors", "--verbose")
    assert any(line.startswith("model.norm.weight") and "plain" in line for line in lines)
    assert lines[-1].endswith("saved.") or lines[-2].startswith("y.safetensors: 5 tensors, 2 compressed;")


def test_arrays_go_through_pipes(tmp_path, capsysbinary, monkeypatch):
    x = np.arange(200_000, dtype=np.int32).reshape(1000, 200)
    sent = io.BytesIO()
    np.save(sent, x)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(sent.getvalue())))
    assert run("compress", "-", "-o", "-", "--device", "cpu") == 0
    (tmp_path / "x.safetensors").write_bytes(capsysbinary.readouterr().out)
    assert run("decompress", tmp_path / "x.safetensors", "-o", "-", "--format", "npy") == 0
    assert np.array_equal(np.load(io.BytesIO(capsysbinary.readouterr().out)), x)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
def test_formats_of_what_is_decompressed(suffix, tmp_path):
    x = {"a": torch.arange(9000, dtype=torch.int32).view(90, 100), "b": torch.ones(3)}
    ibp.save(tmp_path / "x.ibp.safetensors", {"a": ibp.compress(x["a"], device="cpu"), "b": x["b"]})
    out = tmp_path / f"out{suffix}"
    assert run("decompress", tmp_path / "x.ibp.safetensors", "-o", out, "--quiet") == 0
    if suffix == ".npz":
        found = {name: torch.from_numpy(array) for name, array in np.load(out).items()}
    else:
        found = torch.load(out, weights_only=True) if suffix == ".pt" else ibp.load(out)
    assert found.keys() == x.keys() and all(torch.equal(found[name], x[name]) for name in x)


def test_names_are_chosen_by_patterns(source, tensors, tmp_path):
    out = tmp_path / "x.safetensors"
    assert run("compress", source, "-o", out, "--include", "model.*", "--exclude", "*layers*", "--quiet") == 0
    assert_holds(out, tensors)  # those that are left out are kept as they are
    with ibp.open(out) as file:
        assert file.tables == ("model.embed.weight",)


def test_chosen_tensors_are_decompressed(compressed, tensors, tmp_path, capsys):
    out = tmp_path / "out.npz"
    assert run("decompress", compressed, "-o", out, "--include", "model.norm*", "--include", "step", "--quiet") == 0
    assert set(np.load(out)) == {"model.norm.weight", "step"}
    assert run("decompress", compressed, "-o", tmp_path / "none.npz", "--include", "nothing") == 2
    assert "no tensor whose name" in capsys.readouterr().err


def test_what_is_there_is_left_alone(source, tmp_path, capsys):
    out = tmp_path / "x.safetensors"
    out.write_bytes(b"mine")
    assert run("compress", source, "-o", out) == 2
    assert re.fullmatch(r"ibp compress: [^\n]*x.safetensors is there already: --force[^\n]*\n", capsys.readouterr().err)
    assert run("compress", source, "-o", out, "--keep") == 0 and out.read_bytes() == b"mine"
    assert run("compress", source, "-o", out, "--force", "--keep") == 2
    assert run("compress", source, "-o", out, "--force", "--quiet") == 0
    assert ibp.load(out)


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x93NUMPY\x01", b"PK\x03\x04"], ids=repr)
@pytest.mark.parametrize("command", ["compress", "decompress", "estimate"])
def test_files_that_cannot_be_read(command, content, tmp_path, capsys):
    path, out = tmp_path / "x.dat", tmp_path / "out.safetensors"
    path.write_bytes(content)
    assert run(command, path, *([] if command == "estimate" else ["-o", out])) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(rf"ibp {command}: [^\n]+\n", shown.err) and not out.exists()


@pytest.mark.parametrize("command", ["compress", "decompress", "estimate", "verify"])
def test_files_that_are_not_there(command, tmp_path, capsys):
    arguments = [] if command in ("estimate", "verify") else ["-o", tmp_path / "out.safetensors"]
    assert run(command, tmp_path / "nothing.safetensors", *arguments) == 2
    assert "nothing.safetensors" in capsys.readouterr().err
    assert run(command, tmp_path / "no*.npy", *arguments) == 2
    assert "no*.npy" in capsys.readouterr().err


def test_interrupted(source, tmp_path, capsys, monkeypatch):
    """Nothing is left under the output's name, nor beside it."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    monkeypatch.setattr("ibp._files.writer.FileWriter.table", interrupt)
    assert run("compress", source, "-o", tmp_path / "out.safetensors") == 130
    shown = capsys.readouterr()
    assert shown.out == "" and set(tmp_path.iterdir()) == before
    command = "ibp compress model.safetensors -o out.safetensors"
    assert shown.err == f"ibp compress: interrupted, and nothing was written: the same command begins anew: {command}\n"


def test_an_interrupted_set_goes_on(source, tensors, tmp_path, capsys, monkeypatch):
    write, written = _converting.write_file, []

    def interrupted(path, shard, *arguments, **options):
        if written:
            raise KeyboardInterrupt
        written.append(shard.path)
        return write(path, shard, *arguments, **options)

    command = ["compress", source, "-o", "a set.safetensors", "--shard-bytes", "100K", "--device", "cpu"]
    monkeypatch.setattr(_converting, "write_file", interrupted)
    assert run(*command) == 130
    said = capsys.readouterr().err
    assert said.startswith("ibp compress: interrupted: 1 file of the set is finished and kept. The same command")
    assert said.endswith(": ibp compress model.safetensors -o 'a set.safetensors'\n")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert document(capsys, *command)["kept_files"] == 1
    assert_holds(tmp_path / "a set.safetensors.index.json", tensors)


# ---- names, patterns, and what is said ----


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".pt", ".pth", ".bin", ".ckpt", ".NPZ"])
def test_names_of_other_formats_are_refused(suffix, source, tmp_path, capsys):
    out = tmp_path / f"out{suffix}"
    assert run("compress", source, "-o", out) == 2
    assert "wanted a name like 'out.safetensors'" in capsys.readouterr().err and not out.exists()
    out.mkdir()
    assert run("compress", source, "-o", out, "--quiet") == 0  # a directory may have any name
    assert (out / "model.ibp.safetensors").exists()


@pytest.mark.parametrize("name", ["x.npz", "x.pt", "x"])
@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "legacy.pt", "safetensors", "ibp"])
def test_formats_are_told_by_content(kind, name, tmp_path, capsys):
    x = torch.arange(5000, dtype=torch.int32).view(50, 100)
    if kind == "npy":
        np.save(tmp_path / "held.npy", x.numpy())
    elif kind == "npz":
        np.savez(tmp_path / "held.npz", x=x.numpy())
    elif kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file({"x": x}, tmp_path / "held.safetensors")
    elif kind == "ibp":
        ibp.save(tmp_path / "held.ibp", {"x": ibp.compress(x, device="cpu")})
    else:
        torch.save({"x": x}, tmp_path / f"held.{kind}", _use_new_zipfile_serialization=kind == "pt")
    (tmp_path / f"held.{kind}").rename(tmp_path / name)
    assert run("decompress", name, "-o", "out.safetensors", "--quiet") == 0
    assert_holds(tmp_path / "out.safetensors", {"x": x})
    (said,) = document(capsys, "verify", name, status=int(kind != "ibp"))["files"]
    assert (said["status"], said["tensors"]) == ("good" if kind == "ibp" else "no checksums", 1)
    assert document(capsys, "inspect", name)["files"][0]["tensors"][0]["name"] == "x"
    if kind in ("safetensors", "ibp"):
        assert torch.equal(whole(ibp.load(tmp_path / name)["x"]), x)


@pytest.mark.parametrize(
    "content", [b"nothing that is known", b"", b"PK\x05\x06" + bytes(18), b"GGUF\3\0\0\0{}"], ids=repr
)
def test_what_is_read_is_said(content, tmp_path, capsys):
    (tmp_path / "x.pt").write_bytes(content)
    if content.startswith(b"PK"):  # an archive of no arrays
        assert document(capsys, "estimate", "x.pt")["tensors"] == []
        return
    assert run("estimate", "x.pt") == 2
    shown = capsys.readouterr().err
    if content.startswith(b"GGUF"):
        assert "is no file of safetensors" in shown
    else:
        assert shown == (
            "ibp estimate: x.pt has no format that is known; wanted one of safetensors, .npy, .npz, checkpoints of "
            "torch.save, and files of ibp\n"
        )


@pytest.mark.parametrize("command", ["compress", "estimate", "decompress", "diff", "inspect"])
def test_patterns_that_match_nothing(command, source, tmp_path, capsys):
    more = {"compress": ["-o", "out.safetensors"], "decompress": ["-o", "out.safetensors"], "diff": [source]}
    patterns = ["--include", "model.*", "--include", "modle.*"] if command != "inspect" else ["--include", "modle.*"]
    assert run(command, source, *more.get(command, []), *patterns) == 2
    assert "modle.*" in capsys.readouterr().err and not (tmp_path / "out.safetensors").exists()


def test_files_that_grow(tmp_path, capsys):
    ibp.save("x.safetensors", {"noise": torch.randint(0, 256, (100, 100), dtype=torch.uint8), "bias": torch.ones(3)})
    said = " ".join(printed(capsys, "compress", "x.safetensors", "-o", "out.safetensors"))
    assert re.search(r" became .*, \d+\.\d % more\. The file is larger than its tensors", said)
    share = re.search(r"(\d+\.\d) % more", said)[1]
    assert " ".join(printed(capsys, "estimate", "x.safetensors")).endswith(f", {share} % more.")
    assert_holds("out.safetensors", {name: whole(x) for name, x in ibp.load("x.safetensors").items()})


# ---- verify ----


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_good_files(source, compressed, capsys):
    said = document(capsys, "verify", compressed, "--content")
    assert said["good"] and [one["status"] for one in said["files"]] == ["good"]
    assert said["files"][0]["bytes"] > 0 and said["files"][0]["tables"] >= 1
    assert "no checksums" not in "".join(printed(capsys, "verify", compressed))


def test_a_file_without_checksums_is_not_good(source, compressed, capsys):
    said = document(capsys, "verify", compressed, source, "--content", status=1)
    assert not said["good"] and [one["status"] for one in said["files"]] == ["good", "no checksums"]
    lines = printed(capsys, "verify", compressed, source, status=1)
    assert any(line.endswith("has no checksums: nothing was verified.") for line in lines)


def test_a_set_of_which_a_file_has_no_checksums(source, compressed, tmp_path, capsys):
    os.makedirs(tmp_path / "set")
    os.rename(compressed, tmp_path / "set" / "a.safetensors")
    pytest.importorskip("safetensors.torch").save_file({"other": torch.ones(3)}, tmp_path / "set" / "b.safetensors")
    found = document(capsys, "verify", tmp_path / "set", status=1)["files"]
    assert [file["status"] for file in found] == ["good", "no checksums"]
    places = {name: "a.safetensors" for name in read_header(tmp_path / "set" / "a.safetensors").tensors}
    index = json.dumps({"weight_map": {**places, "other": "b.safetensors"}})
    (tmp_path / "set" / "model.safetensors.index.json").write_text(index)
    assert document(capsys, "verify", tmp_path / "set", status=1)["files"][0]["status"] == "no checksums"
    assert re.search(
        "set has no checksums: only .* were verified", printed(capsys, "verify", tmp_path / "set", status=1)[-1]
    )


def test_a_damaged_tensor_is_named(compressed, capsys):
    flip(compressed, compressed.stat().st_size // 3)  # its rows are most of the file
    said = document(capsys, "verify", compressed, status=1)
    assert not said["good"] and "model.embed.weight" in said["files"][0]["damaged"]
    assert any("damaged: model.embed.weight" in line for line in printed(capsys, "verify", compressed, status=1))


@pytest.fixture
def crowded(tmp_path):
    """A file with several tensors in each block of a checksum: five tables, four of which share a codebook, and plain
    tensors."""
    weights = {f"layers.{i}": torch.randn(128, 1024).mul(0.02).bfloat16() for i in range(4)}
    weights |= {"norm": torch.ones(512), "large": torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)}
    weights |= {"bias": torch.randn(100), "other": torch.randn(300, 1024)}
    ibp.save("plain.safetensors", weights)
    ibp.checkpoints.compress("plain.safetensors", "x.safetensors", device="cpu")
    return Path("x.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "damaged", "by_codebook", "suspect"),
    [
        ("layers.0:overflow", ["layers.0"], [], []),
        ("layers.2:lengths", ["layers.2"], [], []),
        ("layers.3:bases", ["layers.3"], [], []),
        ("ibp.codebook.0:entries", *[[f"layers.{i}" for i in range(4)]] * 2, []),
        ("ibp.codebook.1:entries", ["other"], [], []),
        ("norm", [], [], ["norm", "large"]),
        ("large", ["large"], [], []),  # nothing else is in the block
        ("bias", [], [], ["large", "bias"]),
        ("other:overflow", ["other"], [], []),
    ],
)
def test_only_the_damaged_tensor_is_named(part, damaged, by_codebook, suspect, crowded, capsys):
    header = read_header(crowded)
    assert header.tensors["layers.0:overflow"].num_bytes > 1000
    entry = header.tensors[part]
    flip(crowded, (entry.start + entry.end) // 2 if part == "large" else entry.start + 2)
    (found,) = document(capsys, "verify", crowded, status=1)["files"]
    assert (found["damaged"], found["by_codebook"], found["suspect"]) == (damaged, by_codebook, suspect)
    assert re.fullmatch(r"x\.safetensors: block \d, bytes \d+ to \d+ of the file, has another checksum", found["error"])
    lines = printed(capsys, "verify", crowded, status=1)
    named = [line.strip() for line in lines if "damaged: " in line]
    shared = " (by its codebook, which it shares with others)"
    wanted = [f"damaged: {name}{shared if name in by_codebook else ''}" for name in damaged]
    assert named == [*wanted, *(f"perhaps damaged: {name}" for name in suspect)]


def test_several_damaged_tensors_are_named(crowded, capsys):
    header = read_header(crowded)
    for part in ("layers.1:overflow", "layers.2:overflow", "other:overflow"):
        flip(crowded, header.tensors[part].start + 2)
    (found,) = document(capsys, "verify", crowded, "--content", status=1)["files"]
    assert (found["damaged"], found["suspect"]) == (["layers.1", "layers.2", "other"], [])
    assert found["error"].endswith("has another checksum, as 1 other block has")


@pytest.mark.parametrize("options", [[], ["--content"]])
def test_views_are_damaged_as_their_base_is(options, tmp_path, capsys):
    held = torch.randn(300, 1024)
    torch.save({"a": held[:200], "b": held[100:], "c": torch.randn(300, 1024)}, "x.pt")
    ibp.checkpoints.compress("x.pt", "x.safetensors", device="cpu")
    names = [name for name in read_header(Path("x.safetensors")).tensors if name.startswith("torch_storage.")]
    entry = read_header(Path("x.safetensors")).tensors[names[0]]
    flip(Path("x.safetensors"), (entry.start + entry.end) // 2)
    (found,) = document(capsys, "verify", Path("x.safetensors"), *options, status=1)["files"]
    assert sorted(found["damaged"] + found["suspect"]) == ["a", "b"]


def test_damaged_checksums_name_no_tensor(crowded, capsys):
    flip(crowded, read_header(crowded).tensors["ibp.checks"].start)
    (found,) = document(capsys, "verify", crowded, status=1)["files"]
    assert found["error"] == "x.safetensors: the checksums have another checksum: they are damaged"
    assert found["damaged"] == found["suspect"] == []


def test_a_file_that_was_cut_off_is_damaged(compressed, capsys):
    compressed.write_bytes(compressed.read_bytes()[:-1000])
    assert document(capsys, "verify", compressed, status=1)["files"][0]["status"] == "damaged"


def test_other_formats_have_no_checksums(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", a=np.ones(3), b=np.ones(4))
    said = document(capsys, "verify", tmp_path / "x.npz", status=1)
    assert (said["files"][0]["status"], said["files"][0]["tensors"]) == ("no checksums", 2)


# ---- estimate ----


def test_estimate(source, capsys):
    said = document(capsys, "estimate", source)
    weights = next(one for one in said["tensors"] if one["name"] == "model.embed.weight")
    assert 0.3 < weights["savings"]["planes"] < 0.36 and weights["best"] == "planes"
    lines = printed(capsys, "estimate", source, "--include", "model.embed*")
    assert any(line.startswith("model.embed.weight") and "planes" in line for line in lines)
    assert not any("norm" in line for line in lines)


# ---- diff and apply ----


@pytest.fixture
def versions(tensors, tmp_path):
    """Two versions of a checkpoint: one element of a thousand changed, a tensor gone, one new, one of another shape."""
    new = dict(tensors)
    changed = tensors["model.embed.weight"].clone()
    changed.view(-1)[::1000] += 0.01
    new["model.embed.weight"] = changed
    new["head"] = torch.arange(100.0)
    new["model.norm.weight"] = torch.ones(256)
    del new["step"]
    paths = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    for path, content in zip(paths, (tensors, new)):
        ibp.save(path, content)
    return *paths, tensors, new


def test_what_changed_is_counted(versions, capsys):
    old, new, before, after = versions
    said = document(capsys, "diff", old, new, "--exit-code", status=1)
    by_name = {one["name"]: one for one in said["tensors"]}
    name = "model.embed.weight"
    differing = int((before[name].view(torch.int16) != after[name].view(torch.int16)).sum())
    assert by_name[name]["changed"] == differing > 0
    assert 0 < by_name[name]["delta_bytes"] < 0.1 * by_name[name]["num_bytes"]
    statuses = {one["name"]: one["status"] for one in said["tensors"] if one["status"] != "same"}
    assert statuses == {name: "changed", "head": "new", "model.norm.weight": "replaced", "step": "removed"}
    lines = printed(capsys, "diff", old, new)
    assert any(line.startswith(name) and "changed" in line for line in lines)


def test_no_difference(versions, capsys):
    old = versions[0]
    assert not document(capsys, "diff", old, old, "--exit-code")["differs"]
    assert printed(capsys, "diff", old, old) == ["5 tensors: 5 same."]


WIDTHS = [torch.bool, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_elements_of_every_width_are_counted(dtype, tmp_path, capsys):
    x = torch.zeros(300, 4, dtype=torch.float32).to(dtype)
    y = x.clone()
    y.view(torch.uint8).view(-1)[-1] = 1  # one byte of the last element
    y.view(torch.uint8).view(-1)[0] = 1
    torch.save({"x": x}, tmp_path / "x.pt")
    torch.save({"x": y}, tmp_path / "y.pt")
    said = document(capsys, "diff", tmp_path / "x.pt", tmp_path / "y.pt", "--no-weigh")
    assert said["tensors"][0]["changed"] == 2 and said["tensors"][0]["delta_bytes"] is None


def test_a_delta_makes_the_new_version(versions, tmp_path, capsys):
    old, new, _, after = versions
    delta, out = tmp_path / "x.delta", tmp_path / "made.safetensors"
    said = document(capsys, "diff", old, new, "-o", delta)
    assert said["written_bytes"] == delta.stat().st_size < 0.2 * new.stat().st_size
    said = document(capsys, "apply", old, delta, "-o", out)
    assert said["removed"] == ["step"] and said["changed"] == ["model.embed.weight"]
    assert_holds(out, after)


def test_a_delta_of_a_set_of_files(tmp_path, capsys):
    old = {f"layers.{i}": torch.rand(64, 512).to(torch.bfloat16) for i in range(4)}
    new = {**old, "layers.2": old["layers.2"] * torch.where(torch.rand(64, 512) < 0.01, 1.5, 1.0).bfloat16()}
    new["head"] = torch.ones(5)
    for path, content in (("old", old), ("new", new)):
        (tmp_path / path).mkdir()
        ibp.save(tmp_path / path / "model.safetensors", content, shard_bytes=100_000)
    assert run("diff", "old", "new", "-o", "x.delta", "--quiet") == 0
    said = document(capsys, "apply", "old", "x.delta", "-o", "made/")
    assert said["files"][-1] == "made/model.safetensors.index.json"
    assert_holds(tmp_path / "made", new)
    assert run("apply", "old", "x.delta", "-o", "made/") == 2 and "is there already" in capsys.readouterr().err


def test_a_delta_of_another_base_is_refused(versions, tmp_path, capsys):
    old, new, *_ = versions
    delta, out = tmp_path / "x.delta", tmp_path / "made.safetensors"
    assert run("diff", old, new, "-o", delta, "--quiet") == 0
    assert run("apply", new, delta, "-o", out) in (1, 2)
    assert not out.exists() and re.fullmatch(r"ibp apply: [^\n]+\n", capsys.readouterr().err)


def test_a_checkpoint_is_no_delta(versions, tmp_path, capsys):
    old, new, *_ = versions
    assert run("apply", old, new, "-o", tmp_path / "made.safetensors") == 2
    assert "is no delta of old.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "made.safetensors").exists()


def test_where_a_delta_goes(versions, tmp_path, capsys):
    old, new, *_ = versions
    pytest.importorskip("fsspec")
    url = "memory://ibp-test-cli/x.delta"
    assert document(capsys, "diff", old, new, "-o", url, "--force")["written_bytes"] > 0
    (tmp_path / "folder").mkdir()
    assert run("diff", old, new, "-o", "folder/", "--quiet") == 0
    assert run("apply", old, url, "-o", "made.safetensors", "--quiet") == 0
    assert (tmp_path / "folder" / "model.safetensors").is_file()
    assert run("diff", old, new, "-o", "-") == 2 and "cannot go to stdout" in capsys.readouterr().err


# ---- URLs, stdin and stdout ----


def test_urls(source, tensors, capsys):
    pytest.importorskip("fsspec")
    url = "memory://ibp-test-cli/x.safetensors"
    said = document(capsys, "compress", source, "-o", url, "--verify-output", "--force")
    assert said["path"] == url and said["verified_bytes"] > 0
    assert run("compress", source, "-o", url) == 2 and "is there already" in capsys.readouterr().err
    assert document(capsys, "verify", url)["files"][0]["status"] == "good"
    assert run("decompress", url, "-o", "back.safetensors", "--quiet") == 0
    assert_holds("back.safetensors", tensors)
    assert document(capsys, "diff", source, url)["differs"] is False


def test_urls_of_files_here(source, tensors, tmp_path, capsys):
    url = f"file://{tmp_path}/x.safetensors"
    assert run("compress", source, "-o", url, "--quiet") == 0
    assert run("compress", source, "-o", url) == 2 and "is there already" in capsys.readouterr().err
    assert run("decompress", url, "-o", f"file://{tmp_path}/back.safetensors", "--quiet") == 0
    assert_holds(tmp_path / "back.safetensors", tensors)


def test_urls_of_sets_of_files(tensors, capsys):
    pytest.importorskip("fsspec")
    ibp.save("x.safetensors", tensors)
    options = ["--shard-bytes", "100K", "--verify-output", "--force"]
    said = document(capsys, "compress", "x.safetensors", "-o", "memory://ibp-test-set/x.safetensors", *options)
    assert len(said["files"]) > 1 and said["verified_bytes"] > 0
    assert not document(capsys, "diff", "x.safetensors", said["path"])["differs"]
    assert run("decompress", said["path"], "-o", "memory://ibp-test-set/y.safetensors", "--force", "--quiet") == 0
    assert_holds("memory://ibp-test-set/y.safetensors.index.json", tensors)


def test_stdout_holds_one_file(source, tmp_path, capsys):
    assert run("compress", source, "-o", "-", "--json") == 2
    assert "both write to stdout" in capsys.readouterr().err
    ibp.save(tmp_path / "small.safetensors", {"a": torch.ones(3), "b": torch.ones(3)}, shard_bytes=1)
    assert run("decompress", "small.safetensors.index.json", "-o", "-") == 2
    assert "a set of files, which stdout (-) cannot hold" in capsys.readouterr().err


def test_stdin_is_taken_once(capsys):
    assert run("diff", "-", "-") == 2
    assert capsys.readouterr().err == "ibp diff: stdin (-) is given twice; wanted one input from there at most\n"


@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "safetensors"])
def test_stdin_is_known_by_its_first_bytes(kind, tmp_path, monkeypatch):
    held = io.BytesIO()
    if kind == "pt":
        torch.save({"x": torch.ones(3)}, held)
    elif kind == "safetensors":
        ibp.save(tmp_path / "x", {"x": torch.ones(3)})
        held.write((tmp_path / "x").read_bytes())
    else:
        (np.save if kind == "npy" else np.savez)(held, np.ones(3))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(held.getvalue())))
    with work.local(["-"]) as (path,), open_source(path) as source:
        assert source.format == {"pt": "torch", "safetensors": "ibp"}.get(kind, kind)
        assert os.path.getsize(path) == len(held.getvalue())
    assert not os.path.exists(path)


# ---- what the page says of JSON ----


def test_documents_have_the_members_that_the_page_lists(versions, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(calibration._TABLE_BYTES, "cpu", (1 << 20, 16))
    monkeypatch.setattr(doctor, "TEST_SECONDS", 0.0)
    rows = re.findall(r"^\| (\w+) \| (`.*) \|$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    old, new, *_ = versions
    commands = {
        "compress": [old, "-o", "x.safetensors"],
        "decompress": ["x.safetensors", "-o", "y.safetensors"],
        "verify": ["x.safetensors"],
        "inspect": ["x.safetensors"],
        "estimate": [old],
        "diff": [old, new, "-o", "x.delta"],
        "apply": [old, "x.delta", "-o", "z.safetensors"],
        "doctor": ["--device", "cpu", "--seconds", "1"],
    }
    assert [command for command, _ in rows] == list(commands)
    for command, members in rows:
        said = document(capsys, command, *commands[command])
        assert set(re.findall(r"`(\w+)`", members.partition(" (")[0])) == set(said), command


# ---- a GPU ----


def test_the_same_by_a_gpu(cuda, source, versions, tensors, tmp_path, capsys):
    said = document(capsys, "compress", source, "-o", tmp_path / "x.safetensors", "--device", cuda, "--verify-output")
    assert said["verified_bytes"] > 0 and any(tensor["scheme"] == "planes" for tensor in said["tensors"])
    assert run("decompress", tmp_path / "x.safetensors", "-o", tmp_path / "back.safetensors", "--quiet") == 0
    assert_holds(tmp_path / "back.safetensors", tensors)
    old, new, _, after = versions
    totals = [document(capsys, "diff", old, new, "--device", device)["total"] for device in ("cpu", cuda)]
    assert totals[0]["changed"] == totals[1]["changed"] > 0
    assert run("diff", old, new, "-o", "x.delta", "--device", cuda, "--quiet") == 0
    assert run("apply", old, "x.delta", "-o", "made.safetensors", "--device", cuda, "--quiet") == 0
    assert_holds("made.safetensors", after)
