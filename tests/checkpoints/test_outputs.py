"""Outputs of `ibp.save`, `ibp.checkpoints` and the command line: their names, what is there already, and what goes."""

import errno
import itertools
import json
import os
import pathlib
import stat
import threading

import numpy as np
import pytest
import torch

import ibp
from ibp._cli.main import main
from ibp._common.whole_files import replaced
from ibp._files import FileWriter
from ibp.checkpoints import _converting
from ibp.checkpoints._outputs import Journal

OLD = {f"w{number}": torch.zeros(64, 256).bfloat16() for number in range(4)}
NEW = {name: torch.ones_like(value) for name, value in OLD.items()}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model():
    """A directory of a model: a set of two files, and its configuration."""
    os.mkdir("model")
    ibp.save("coded.safetensors", OLD, shard_bytes=70_000)
    for name in ibp.checkpoints.decompress("coded.safetensors.index.json", "model/model.safetensors"):
        os.unlink(name.replace("model/model", "coded"))
    with open("model/config.json", "w") as file:
        file.write('{"a": 1}')
    return "model"


@pytest.fixture
def file():
    ibp.save("in.safetensors", NEW)
    return "in.safetensors"


def compress(inputs, output, **options):
    return ibp.checkpoints.compress(inputs, output, device="cpu", jobs=1, **options)


def run(*arguments):
    return main([*arguments, "--quiet"])


def assert_holds(path, tensors):
    found = ibp.load(path, memory="host")
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        assert torch.equal(value if isinstance(value, torch.Tensor) else value.decompress(), tensors[name])


# ---- names ----


@pytest.mark.parametrize("small, back", [("small", "back"), ("small/", "back/"), ("small-3.1", "back.v2")])
def test_a_directory_becomes_a_directory(model, small, back):
    compress(model, small)
    ibp.checkpoints.decompress(small, back)
    assert run("compress", model, "-o", f"cli-{small}") == 0
    assert run("decompress", f"cli-{small}", "-o", f"cli-{back}") == 0
    for plain in (back, f"cli-{back}"):
        assert sorted(os.listdir(plain)) == sorted(os.listdir(model))
        assert_holds(plain, OLD)
    assert len(os.listdir()) == 5


def test_apply_makes_a_directory_of_one(model):
    ibp.save("step.delta", ibp.deltas.make(NEW, OLD))
    assert run("apply", model, "step.delta", "-o", "next") == 0
    assert_holds("next", NEW)
    assert sorted(os.listdir()) == ["model", "next", "step.delta"]


def test_a_directory_is_no_file(model):
    with open("taken", "w"):
        pass
    with pytest.raises(NotADirectoryError, match="taken"):
        compress(model, "taken", force=True)
    assert os.path.getsize("taken") == 0


@pytest.mark.parametrize("name", ["o.pt", "o.npz", "o.GGUF", "o.h5", "config.json"])
def test_names_of_other_formats(name, file, capsys):
    for write in (ibp.save, lambda name, tensors: compress(file, name)):
        with pytest.raises(ValueError, match=rf"'{name}', but what is written is safetensors.*wanted a name like"):
            write(name, NEW)
    assert run("compress", file, "-o", name) == 2 and "but what is written is safetensors" in capsys.readouterr().err
    assert os.listdir() == ["in.safetensors"]


@pytest.mark.parametrize(
    "name, format, said",
    [
        ("g.gguf", None, "a format that is written; wanted a name that ends in .safetensors, .ibp, .npy"),
        ("x.ptt", None, "a format that is written; wanted a name that ends in .safetensors, .ibp, .npy"),
        ("x.pt", "npz", "npz; wanted a name that ends in .npz"),
        ("x.safetensors", "torch", "torch; wanted a name that ends in .pt, .pth, .bin, .ckpt"),
    ],
)
def test_suffixes_that_are_not_written(name, format, said, file, capsys):
    with pytest.raises(ValueError, match=rf"the output is '{name}', whose suffix does not say {said}"):
        ibp.checkpoints.decompress(file, name, format=format)
    assert run("decompress", file, "-o", name, *(["--format", format] if format else [])) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert os.listdir() == ["in.safetensors"]


def test_names_that_say_no_format(file):
    for number, (name, format) in enumerate([("a", None), ("llama-3.1", None), ("x.dat", "torch")]):
        assert ibp.checkpoints.decompress(file, name, format=format) == [name]
        assert len(os.listdir()) == number + 2
    assert_holds("llama-3.1", NEW)
    assert torch.load("x.dat").keys() == NEW.keys()


def test_files_of_a_set_have_a_suffix(file):
    """By which readers of their directory find them."""
    os.mkdir("a")
    report = compress(file, "a/llama-3.1", shard_bytes=70_000)
    assert report.path == "a/llama-3.1.safetensors.index.json"
    assert report.files == ("llama-3.1-00001-of-00002.safetensors", "llama-3.1-00002-of-00002.safetensors")
    assert_holds("a", NEW)


# ---- what is there already, and what is missing ----


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 70_000}])
def test_outputs_that_are_there(options, file):
    compress(file, "out.safetensors", **options)
    before = {name: os.stat(name).st_mtime_ns for name in os.listdir()}
    for output in ("out.safetensors", file):
        with pytest.raises(FileExistsError, match="is there already; wanted another output, or force=True"):
            compress(file, output, **options)
        with pytest.raises(FileExistsError, match="is there already; wanted another output, or force=True"):
            ibp.checkpoints.decompress(file, output)
    assert {name: os.stat(name).st_mtime_ns for name in os.listdir()} == before
    compress(file, file, force=True)
    assert_holds(file, NEW)
    ibp.checkpoints.decompress(file, file, force=True)
    assert_holds(file, NEW)


@pytest.mark.parametrize("output", ["none/out.safetensors", "none/out/"])
def test_missing_directories_are_refused(output, file, model):
    for write in (compress, ibp.checkpoints.decompress, lambda _, output: ibp.save(output, NEW)):
        with pytest.raises(FileNotFoundError, match="there is no such directory: 'none'"):
            write(file, output)
    assert run("compress", file, "-o", output) == 2 and run("compress", model, "-o", output) == 2
    assert sorted(os.listdir()) == ["in.safetensors", "model"]


def test_a_directory_is_made_and_goes_if_nothing_is_written(file, monkeypatch):
    compress(file, "a/")
    ibp.checkpoints.decompress(file, "b/")
    ibp.save("c/", NEW)
    for made in "abc":
        assert_holds(made, NEW)
    monkeypatch.setattr(_converting, "write_file", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
    for options in ({}, {"shard_bytes": 70_000}):
        with pytest.raises(OSError, match="full"):
            compress(file, "d/", **options)
    assert not os.path.exists("d")


@pytest.mark.parametrize("name", ["out-00002-of-00002.safetensors", "out.safetensors.index.json"])
def test_devices_are_refused_before_the_first_byte(name, file):
    os.mkfifo(name)
    for write in (
        lambda: compress(file, "out.safetensors", shard_bytes=70_000, force=True),
        lambda: ibp.save("out.safetensors", NEW, shard_bytes=70_000),
    ):
        with pytest.raises(OSError, match=f"{name} is a pipe, which is not replaced"):
            write()
    assert sorted(os.listdir()) == sorted([file, name])


def test_permissions_of_what_is_made(file):
    os.chmod(file, 0o600)
    compress(file, "one.safetensors")
    compress(file, "set.safetensors", shard_bytes=70_000)
    ibp.checkpoints.decompress("one.safetensors", "one.pt")
    made = ["one.safetensors", "one.pt", *(name for name in os.listdir() if name.startswith("set-"))]
    assert {stat.S_IMODE(os.stat(name).st_mode) for name in made} == {0o600} and len(made) == 4
    os.chmod("set-00001-of-00002.safetensors", 0o640)
    compress(file, "set.safetensors", shard_bytes=70_000, force=True)
    modes = [stat.S_IMODE(os.stat(f"set-0000{number}-of-00002.safetensors").st_mode) for number in (1, 2)]
    assert modes == [0o640, 0o600]


# ---- two calls at once ----


@pytest.mark.parametrize("call", [compress, ibp.checkpoints.decompress])
def test_the_second_of_two_calls_is_refused(call, file):
    path = pathlib.Path("out.safetensors")
    with Journal(path, {}) as journal, replaced(path, 0):
        journal.open(True)
        with pytest.raises(BlockingIOError, match="another call writes"):
            call(file, path, force=True)
        journal.close()
    call(file, "out.safetensors", force=True)
    assert_holds("out.safetensors", NEW)
    assert sorted(os.listdir()) == [file, "out.safetensors"]


@pytest.mark.parametrize("shard_bytes", [None, 70_000])
def test_a_call_that_has_ended_meanwhile_is_not_replaced(shard_bytes, file, monkeypatch):
    """Both find no output; one ends before the other begins to write."""
    where, name = (_converting, "Codebooks") if shard_bytes is None else (_converting.Journal, "open")
    original = getattr(where, name)
    ibp.save("old.safetensors", OLD)

    def after_another(*arguments):
        monkeypatch.setattr(where, name, original)
        compress("old.safetensors", "out.safetensors", shard_bytes=shard_bytes)
        return original(*arguments)

    monkeypatch.setattr(where, name, after_another)
    with pytest.raises(FileExistsError):
        compress(file, "out.safetensors", shard_bytes=shard_bytes)
    assert_holds("out.safetensors" if shard_bytes is None else "out.safetensors.index.json", OLD)
    assert not any(name.startswith(".") for name in os.listdir())


def test_what_was_made_since_an_interruption_is_not_replaced(file, monkeypatch):
    """The interrupted call has moved none of its files, so that what is there is none of them."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        compress(file, "out.safetensors", shard_bytes=70_000)
    ibp.save("out.safetensors", OLD)
    with pytest.raises(FileExistsError, match="out.safetensors is there already"):
        compress(file, "out.safetensors", shard_bytes=70_000)
    assert_holds("out.safetensors", OLD)
    assert compress(file, "out.safetensors", shard_bytes=70_000, force=True).kept_files == 2
    assert_holds("out.safetensors.index.json", NEW)
    assert not any(name.startswith(".") for name in os.listdir())


def test_saves_to_one_path_go_beside_each_other():
    with FileWriter("out.safetensors") as writer:
        thread = threading.Thread(target=ibp.save, args=("out.safetensors", NEW))
        thread.start()
        thread.join()
        assert_holds("out.safetensors", NEW)
        with writer.plain("x", "U8", (1,)) as write:
            write(b"x")
    assert set(ibp.load("out.safetensors")) == {"x"} and os.listdir() == ["out.safetensors"]


# ---- what an output replaces ----

FORMS = {"file": None, "set": 70_000, "larger set": 35_000}


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("write", ["save", "compress", "decompress"])
def test_nothing_is_left_of_what_is_replaced(write, before, after):
    """A directory has the new tensors, and files of the new output only; others stay."""
    os.mkdir("out")
    ibp.save("out/model.safetensors", OLD, shard_bytes=FORMS[before])
    ibp.save("out/other-00001-of-00002.safetensors", {"other": torch.ones(3)})
    ibp.save("in.safetensors", NEW)
    if write == "save":
        ibp.save("out/model.safetensors", NEW, shard_bytes=FORMS[after])
    elif write == "compress":
        compress("in.safetensors", "out/model.safetensors", shard_bytes=FORMS[after], force=True)
    else:
        ibp.save("in.safetensors", NEW, shard_bytes=FORMS[after])
        given = "in.safetensors" if after == "file" else "in.safetensors.index.json"
        ibp.checkpoints.decompress(given, "out/model.safetensors", force=True)
    count = {"file": 1, "set": 2, "larger set": 4}[after]
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    wanted = ["model.safetensors"] if count == 1 else [*names, "model.safetensors.index.json"]
    assert sorted(os.listdir("out")) == sorted([*wanted, "other-00001-of-00002.safetensors"])
    os.unlink("out/other-00001-of-00002.safetensors")
    assert_holds("out", NEW)


def test_a_set_for_which_the_disk_is_too_small(monkeypatch):
    """No file of the earlier set is replaced before all new ones are on disk."""
    ibp.save("coded.safetensors", NEW, shard_bytes=40_000)
    ibp.save("out.safetensors", OLD, shard_bytes=40_000)
    before = {name: pathlib.Path(name).read_bytes() for name in os.listdir()}
    for full_at in range(4):
        calls = itertools.count()

        def sync(file, full_at=full_at, calls=calls, fsync=os.fsync):
            if next(calls) == full_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(file)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device: wanted room for"):
            patch.setattr(os, "fsync", sync)
            ibp.checkpoints.decompress("coded.safetensors.index.json", "out.safetensors", force=True)
        assert {name: pathlib.Path(name).read_bytes() for name in os.listdir()} == before
    ibp.checkpoints.decompress("coded.safetensors.index.json", "out.safetensors", force=True)
    assert_holds("out.safetensors.index.json", NEW)


def test_an_index_removes_no_other_files():
    ibp.save("m.safetensors", OLD, shard_bytes=70_000)
    ibp.save("kept.safetensors", NEW)
    with open("m.safetensors.index.json") as file:
        index = json.load(file)
    index["weight_map"]["w0"] = "kept.safetensors"
    with open("m.safetensors.index.json", "w") as file:
        json.dump(index, file)
    ibp.save("m.safetensors", NEW)
    assert "kept.safetensors" in os.listdir() and "m.safetensors.index.json" not in os.listdir()


def test_what_is_at_a_url_is_replaced(file):
    system = pytest.importorskip("fsspec").filesystem("memory")
    ibp.save("memory://ibp-test-outputs/m.safetensors", OLD, shard_bytes=70_000)
    ibp.save("memory://ibp-test-outputs/m.safetensors", NEW)
    assert [name.rpartition("/")[2] for name in system.ls("/ibp-test-outputs", detail=False)] == ["m.safetensors"]
    compress(file, "memory://ibp-test-outputs/m.safetensors", shard_bytes=70_000, force=True)
    assert not system.exists("/ibp-test-outputs/m.safetensors")
    assert_holds("memory://ibp-test-outputs", NEW)
    system.rm("/ibp-test-outputs", recursive=True)


def test_a_directory_with_another_set_is_refused(model, file):
    os.rename("model/model.safetensors.index.json", "model/a.safetensors.index.json")
    before = sorted(os.listdir("model"))
    for write in (
        lambda: ibp.save(model, NEW),
        lambda: compress(file, model, force=True),
        lambda: ibp.checkpoints.decompress(file, f"{model}/", force=True),
    ):
        with pytest.raises(FileExistsError, match=r"model has a.safetensors.index.json, by which readers"):
            write()
    assert sorted(os.listdir("model")) == before


@pytest.mark.parametrize(
    "there, write",
    [
        ("model.ibp.safetensors", lambda file: ibp.save("made", NEW)),
        ("model.ibp.safetensors", lambda file: ibp.checkpoints.decompress(file, "made/", force=True)),
        ("model.safetensors", lambda file: compress(file, "made/", force=True)),
    ],
)
def test_a_directory_with_the_other_form_is_refused(there, write, file):
    """A loader that does not know ibp would go on with the old weights, others would find each name twice."""
    os.mkdir("made")
    ibp.save(f"made/{there}", OLD)
    with pytest.raises(FileExistsError, match=f"made has {there}, which readers of the directory would find beside"):
        write(file)
    assert os.listdir("made") == [there]
    assert_holds("made", OLD)


# ---- indices that say what is not so ----


@pytest.fixture
def wrong_index():
    """A set of plain files, whose index names a tensor that is in neither."""
    safetensors = pytest.importorskip("safetensors.torch")
    os.mkdir("wrong")
    for number in range(2):
        tensors = {f"w{number}": NEW["w0"], "both": torch.full((9,), float(number))}
        safetensors.save_file(tensors, f"wrong/m-{number}.safetensors")
    names = {"w0": "m-0.safetensors", "w1": "m-1.safetensors", "both": "m-1.safetensors"}
    with open("wrong/m.safetensors.index.json", "w") as file:
        json.dump({"weight_map": {**names, "lost": "m-1.safetensors"}}, file)
    return names


@pytest.mark.parametrize("path", ["wrong", "wrong/m.safetensors.index.json"])
def test_a_tensor_that_is_not_where_the_index_says(path, wrong_index, capsys):
    for read in (
        ibp.open,
        ibp.load,
        ibp.checkpoints.estimate,
        lambda path: compress(path, "out/"),
        lambda path: ibp.checkpoints.decompress(path, "out/"),
    ):
        with pytest.raises(ibp.FileFormatError, match="m-1.safetensors has no tensor 'lost', which the index says"):
            read(path)
    for command in (["inspect", path], ["diff", path, path], ["verify", path], ["compress", path, "-o", "out"]):
        assert main(command) in (1, 2)
        assert "has no tensor 'lost'" in "".join(capsys.readouterr())
    assert os.listdir() == ["wrong"]


def test_of_two_tensors_of_a_name_the_index_says_which(wrong_index):
    with open("wrong/m.safetensors.index.json", "w") as file:
        json.dump({"weight_map": wrong_index}, file)
    compress("wrong/m.safetensors.index.json", "out/")
    ibp.checkpoints.decompress("wrong/m.safetensors.index.json", "back.npz", include=["both"])
    assert np.load("back.npz")["both"].tolist() == [1.0] * 9
    assert float(ibp.load("out")["both"][0]) == 1.0
