"""Directories of models and trainers: each file of tensors becomes a file of its own, all others are copied, and
decompressing gives all back."""

import errno
import functools
import io
import itertools
import json
import os
import pathlib
import shutil

import pytest
import torch

import ibp
from ibp._cli.main import main
from ibp.checkpoints import _inputs
from ibp.checkpoints._inputs import lines_that_load

CONFIG = '{\n  "architectures": ["LlamaForCausalLM"],\n "name": "caf\u00e9",   "vocab_size": 7\n}\n'


@pytest.fixture
def model(tmp_path):
    """A directory as transformers and trainers leave it."""
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {"w": torch.randn(64, 512).bfloat16(), "b": torch.zeros(64)}
    ibp.save(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(CONFIG, encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(b"\0\1\2")
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_text("{{ x }}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


def texts(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def compress(*paths, **options):
    return ibp.checkpoints.compress(*paths, device="cpu", **options)


@pytest.mark.parametrize("shard_bytes", [None, 1000])
def test_directories_stay_whole(model, tmp_path, shard_bytes):
    small, back = tmp_path / "small", tmp_path / "back"
    report = compress(model, f"{small}/", shard_bytes=shard_bytes)
    found = texts(small)
    assert json.loads(found["config.json"]) == {**json.loads(CONFIG), "quantization_config": {"quant_method": "ibp"}}
    assert found["tokenizer.model"] == b"\0\1\2" and found["templates/tool.jinja"] == b"{{ x }}"
    assert ("model.ibp.safetensors.index.json" in found) == (shard_bytes is not None) and ".cache/lock" not in found
    assert report.other_files == ("config.json", "templates/tool.jinja", "tokenizer.model")
    assert ibp.checkpoints.decompress(small, f"{back}/")[-1].startswith(f"{back}/model.safetensors")
    again = texts(back)
    assert again["config.json"] == CONFIG.encode() and again["tokenizer.model"] == b"\0\1\2"
    assert torch.equal(ibp.load(back, device="cpu")["w"], ibp.load(model, device="cpu")["w"])


@pytest.mark.parametrize("shard_bytes", [None, 1000])
def test_a_copy_that_fails(model, tmp_path, monkeypatch, shard_bytes):
    """The tensors are finished by then. The same call copies the other files, and codes nothing again."""
    small = tmp_path / "small"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        patch.setattr(
            shutil, "copyfileobj", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        )
        compress(model, f"{small}/", shard_bytes=shard_bytes)
    with pytest.raises(FileExistsError, match="is there already"):
        compress(model, f"{small}/", shard_bytes=shard_bytes, level="fast")  # another call, which changes nothing
    report = compress(model, f"{small}/", shard_bytes=shard_bytes)
    assert report.kept_files == len(report.files)
    assert set(texts(small)) >= {"config.json", "templates/tool.jinja", "tokenizer.model", *report.files}
    assert not [path.name for path in small.rglob("*") if path.name.startswith(".")]
    assert ibp.load(small, device="cpu").keys() == {"w", "b"}


def test_only_directories_take_files_along(model, tmp_path):
    compress(model / "model.safetensors", tmp_path / "one")
    compress(model, tmp_path / "two.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "one", "two.safetensors"}
    inner = model / "inner"
    inner.mkdir()
    compress(model, inner)
    compress(model, inner, force=True)
    assert set(texts(inner)) == {"config.json", "model.ibp.safetensors", "templates/tool.jinja", "tokenizer.model"}


@pytest.fixture
def trainer(tmp_path):
    """A directory as trainers leave it: tensors of several formats in files of their own, and objects of Python."""
    folder = tmp_path / "checkpoint-5"
    (folder / "original").mkdir(parents=True)
    weights = {"w": torch.randn(64, 512).bfloat16(), "b": torch.zeros(64)}
    ibp.save(folder / "model.safetensors", weights, metadata={"format": "pt"})
    ibp.save(folder / "adapter_model.safetensors", {"w": torch.randn(64, 64)})
    ibp.save(folder / "learned_embeds.safetensors", {"<token>": torch.randn(768)})
    states = {0: {"step": torch.tensor(5.0), "exp_avg": torch.randn(64, 512)}}
    torch.save({"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, folder / "optimizer.pt")
    torch.save({"w": torch.randn(64, 64)}, folder / "original" / "consolidated.00.pth")
    torch.save(weights, folder / "pytorch_model.bin")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None), "device": torch.device("cpu")}, folder / "rng_state.pth")
    (folder / "training_args.bin").write_bytes(b"no format that is known")
    (folder / "model.onnx").write_bytes(b"onnx")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def assert_same(value, wanted):
    if isinstance(wanted, torch.Tensor):
        assert value.dtype == wanted.dtype and torch.equal(value, wanted)
    elif isinstance(wanted, dict):
        assert type(value) is type(wanted) and list(value) == list(wanted)
        for key in wanted:
            assert_same(value[key], wanted[key])
    else:
        assert value == wanted


def test_each_file_of_a_trainer_keeps_its_name_and_kind(trainer, tmp_path):
    small, back = tmp_path / "small", tmp_path / "back"
    report = compress(trainer, f"{small}/")
    assert set(texts(small)) == {
        "adapter_model.ibp.safetensors",
        "learned_embeds.ibp.safetensors",
        "model.ibp.safetensors",
        "optimizer.pt.ibp.safetensors",
        "original/consolidated.00.pth.ibp.safetensors",
        "pytorch_model.bin.ibp.safetensors",
        *("model.onnx", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"),
    }
    assert set(report.files) | set(report.other_files) == set(texts(small)) and report.path == str(small)
    assert {tensor.file for tensor in report.tensors} == set(report.files)
    ibp.checkpoints.decompress(small, f"{back}/")
    assert set(texts(back)) == set(texts(trainer))
    for name, content in texts(trainer).items():
        if name.endswith(".safetensors"):
            assert_same(ibp.load(back / name, device="cpu"), ibp.load(trainer / name, device="cpu"))
            assert ibp.open(back / name).metadata == ibp.open(trainer / name).metadata
        elif f"{name}.ibp.safetensors" in report.files:
            assert_same(torch.load(back / name), torch.load(io.BytesIO(content)))
        else:
            assert (back / name).read_bytes() == content


def test_the_model_of_a_trainer_is_what_a_coded_directory_reads_as(trainer, tmp_path):
    compress(trainer, f"{tmp_path}/small/", exclude=["*"])
    for name in ("adapter_model", "learned_embeds"):
        (tmp_path / "small" / f"{name}.ibp.safetensors").unlink()
    with ibp.open(tmp_path / "small") as file:
        assert set(file) == {"w", "b"}


def test_sets_of_torch_come_back_as_sets(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    states = [{"a": torch.randn(64, 64)}, {"b": torch.randn(64, 64), "epoch": 3}]
    for name, state in zip(names, states):
        torch.save(state, folder / name)
    index = {"metadata": {}, "weight_map": dict(zip("ab", names))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "tf_model.h5.index.json").write_text("{}")
    (folder / "other.safetensors.index.json").write_text('{"weight_map": {"a": "left-out.safetensors"}}')
    report = compress(folder, f"{tmp_path}/small/")
    assert report.path.endswith("small/pytorch_model.bin.ibp.safetensors.index.json") and len(report.files) == 2
    ibp.checkpoints.decompress(tmp_path / "small", f"{tmp_path}/back/")
    assert set(texts(tmp_path / "back")) == set(texts(folder))
    for name, state in zip(names, states):
        assert_same(torch.load(tmp_path / "back" / name), state)


def test_a_directory_in_its_own_place(trainer):
    (trainer / "config.json").write_text(CONFIG, encoding="utf-8")
    before = texts(trainer)
    with pytest.raises(FileExistsError, match="is there already; wanted another output, or force=True"):
        compress(trainer, trainer)
    assert texts(trainer) == before
    compress(trainer, f"{trainer}/", shard_bytes=20_000, force=True)
    found = texts(trainer)
    assert "model.safetensors" not in found and "model.ibp.safetensors.index.json" in found
    assert b'"quant_method": "ibp"' in found["config.json"]
    ibp.checkpoints.decompress(trainer, f"{trainer}/", force=True)
    again = texts(trainer)
    assert not any(".ibp" in name for name in again)
    assert set(before) - {"model.safetensors"} == {name for name in again if not name.startswith("model-0000")} - {
        "model.safetensors.index.json"
    }
    assert again["config.json"] == before["config.json"] and again["rng_state.pth"] == before["rng_state.pth"]


MOMENTS = ["before the config", "after the config", "after the first file is removed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "shard_bytes"), [*itertools.product(MOMENTS, [None, 20_000]), ("amid the files of a set", 20_000)]
)
@pytest.mark.parametrize("convert", ["compress", "decompress"])
def test_a_directory_whose_conversion_in_its_own_place_was_interrupted(
    trainer, tmp_path, monkeypatch, convert, moment, shard_bytes
):
    """The same call again finishes it."""
    (trainer / "config.json").write_text(CONFIG, encoding="utf-8")
    tensors = ibp.load(trainer / "model.safetensors", device="cpu")
    plain, small = texts(trainer), functools.partial(compress, trainer, trainer, shard_bytes=shard_bytes, force=True)
    large = functools.partial(ibp.checkpoints.decompress, trainer, f"{trainer}/", force=True)
    small()
    coded = texts(trainer)
    large()
    if convert == "decompress":
        small()
    call, wanted = (small, coded) if convert == "compress" else (large, plain)
    write, unlink, replace, calls = _inputs.write_whole, pathlib.Path.unlink, os.replace, []

    def interrupted_write(path, content):
        if moment == "after the config":
            write(path, content)
        raise KeyboardInterrupt

    def interrupted_unlink(path, missing_ok=False):
        if path.parent == trainer and calls.append(path) is None and len(calls) == 2:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    def interrupted_replace(path, target):
        if pathlib.Path(target).parent == trainer and "-00002-of-" in str(target):
            raise KeyboardInterrupt
        replace(path, target)

    with monkeypatch.context() as patch:
        if moment == "amid the files of a set":
            patch.setattr(os, "replace", interrupted_replace)
        elif moment == "after the first file is removed":
            patch.setattr(pathlib.Path, "unlink", interrupted_unlink)
        else:
            patch.setattr(_inputs, "write_whole", interrupted_write)
        with pytest.raises(KeyboardInterrupt):
            call()
    call()
    found = texts(trainer)
    assert found["config.json"] == wanted["config.json"]
    if shard_bytes is None:
        assert found.keys() == wanted.keys()
    assert {".ibp" in name for name in found if "safetensors" in name} == {convert == "compress"}
    again = tmp_path / "again"
    ibp.checkpoints.decompress(trainer, f"{again}/")
    (path,) = again.glob("model.safetensors*")  # the file, or the index of the set
    assert_same(dict(sorted(ibp.load(path, device="cpu").items())), dict(sorted(tensors.items())))


@pytest.mark.parametrize("convert", ["compress", "decompress"])
def test_a_set_whose_removal_was_interrupted(tmp_path, monkeypatch, convert):
    """The same call again finishes it, wherever it was interrupted."""
    tensors, unlink = {name: torch.randn(1000, 64).bfloat16() for name in "abc"}, pathlib.Path.unlink
    for moment in itertools.count():
        folder, calls = tmp_path / str(moment), itertools.count()
        folder.mkdir()
        places = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(tensors, 1)}
        for name, file in places.items():
            ibp.save(folder / file, {name: tensors[name]})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        if convert == "decompress":
            compress(folder, folder, force=True, shard_bytes=1)

        def interrupted(path, missing_ok=False, folder=folder, calls=calls, moment=moment):
            if path.parent == folder and next(calls) == moment:
                raise KeyboardInterrupt
            unlink(path, missing_ok)

        call = functools.partial(getattr(ibp.checkpoints, convert), folder, f"{folder}/", force=True)
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "unlink", interrupted)
            try:
                call()
                break
            except KeyboardInterrupt:
                pass
        call()
        assert all((".ibp" in name) == (convert == "compress") for name in texts(folder))
        with ibp.checkpoints.open(folder) as source:
            assert_same({name: source.tensors[name].tensor() for name in sorted(source.tensors)}, tensors)
    assert moment > 4


@pytest.mark.parametrize("change", ["value", "name", "shape"])
@pytest.mark.parametrize("convert", ["compress", "decompress"])
def test_a_directory_keeps_other_tensors_beside_those_that_are_converted(tmp_path, convert, change):
    """Files that are no results of an interrupted conversion, though they have the names of results."""
    before = {"w": torch.randn(1000, 64).bfloat16(), "b": torch.randn(100)}
    beside = {**before, "b": before["b"].clone()}
    if change == "value":
        beside["b"][-1] += 1
    elif change == "name":
        beside["c"] = beside.pop("b")
    else:
        beside["b"] = beside["b"].view(10, 10)
    plain, coded = tmp_path / "model.safetensors", tmp_path / "model.ibp.safetensors"
    ibp.save(plain, beside if convert == "decompress" else before)
    ibp.save(coded, {name: ibp.compress(x) for name, x in (before if convert == "decompress" else beside).items()})
    kept = texts(tmp_path)
    with pytest.raises(ValueError, match="both plain and coded"):
        getattr(ibp.checkpoints, convert)(tmp_path, f"{tmp_path}/", force=True)
    assert texts(tmp_path) == kept


def test_a_new_form_takes_the_place_of_the_other(model, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    ibp.save(small / "model.safetensors", {"old": torch.ones(9), "older": torch.ones(9)}, shard_bytes=1)
    assert len(texts(small)) == 3
    compress(model, small, force=True)
    assert set(texts(small)) == {"config.json", "model.ibp.safetensors", "templates/tool.jinja", "tokenizer.model"}
    ibp.checkpoints.decompress(small, f"{tmp_path}/back/")
    compress(tmp_path / "back", f"{tmp_path}/back/inner/")
    (tmp_path / "back" / "inner" / "model.ibp.safetensors").rename(tmp_path / "back" / "model.ibp.safetensors")
    with pytest.raises(ValueError, match="back has model.ibp.safetensors both plain and coded; wanted one of them"):
        compress(tmp_path / "back", f"{tmp_path}/again/")


def test_what_is_not_coded_is_copied(trainer, tmp_path):
    ibp.save(trainer / "set.safetensors", {"x": torch.ones(9), "y": torch.ones(9)}, shard_bytes=1)
    first = ibp.checkpoints.decompress(trainer, f"{tmp_path}/plain/")
    names = {"adapter_model.safetensors", "learned_embeds.safetensors", "model.safetensors"}
    names |= {f"set-0000{number}-of-00002.safetensors" for number in (1, 2)} | {"set.safetensors.index.json"}
    assert {os.path.basename(path) for path in first} == names  # files of ibp.save, which have its checksums
    assert ibp.checkpoints.decompress(tmp_path / "plain", f"{tmp_path}/again/") == []
    assert texts(tmp_path / "again") == texts(tmp_path / "plain")
    assert set(texts(tmp_path / "again")) == set(texts(trainer))


def test_patterns_choose_among_all_files(trainer, tmp_path):
    report = compress(trainer, f"{tmp_path}/small/", include=["state.*"])
    assert {tensor.name for tensor in report.tensors if tensor.scheme is not None} == {"state.0.exp_avg"}
    with pytest.raises(ValueError, match="no tensor whose name matches 'none'"):
        compress(trainer, f"{tmp_path}/none/", include=["none"])
    with pytest.raises(ValueError, match="format is 'npz'; wanted None for a directory"):
        ibp.checkpoints.decompress(tmp_path / "small", f"{tmp_path}/none/", format="npz")
    assert not (tmp_path / "none").exists()
    ibp.checkpoints.decompress(tmp_path / "small", f"{tmp_path}/some/", include=["<token>", "b"])
    found = {name for name in texts(tmp_path / "some") if name.endswith((".safetensors", ".bin", ".pt", ".pth"))}
    others = {"rng_state.pth", "scheduler.pt", "training_args.bin"}
    assert found - others == {"learned_embeds.safetensors", "model.safetensors", "pytorch_model.bin"}
    assert list(ibp.load(tmp_path / "some" / "model.safetensors", device="cpu")) == ["b"]
    ibp.checkpoints.decompress(tmp_path / "small", f"{tmp_path}/small/", include=["<token>"], force=True)
    found = set(texts(tmp_path / "small"))
    assert {"learned_embeds.safetensors", "model.ibp.safetensors", "optimizer.pt.ibp.safetensors"} < found
    assert "learned_embeds.ibp.safetensors" not in found


def test_directories_of_earlier_versions(model, tmp_path):
    """There coded weights have the name of plain ones."""
    small = tmp_path / "small"
    small.mkdir()
    compress(model / "model.safetensors", small / "model.safetensors")
    (small / "config.json").write_text('{"a": 1, "quantization_config": {"level": "fast", "quant_method": "ibp"}}')
    ibp.checkpoints.decompress(small, f"{tmp_path}/back/")
    assert set(texts(tmp_path / "back")) == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {"a": 1}
    assert torch.equal(ibp.load(tmp_path / "back", device="cpu")["w"], ibp.load(model, device="cpu")["w"])


@pytest.mark.parametrize(
    "config",
    [
        "[1]",
        "{}",
        '{"quantization_config": {"quant_method": "fp8"}}',
        '{"quantization_config": {"quant_method": "ibp"}}',
    ],
)
def test_configs_of_other_kinds_stay(model, tmp_path, config):
    (model / "config.json").write_text(config)
    small = tmp_path / "small"
    small.mkdir()
    if "fp8" in config:
        with pytest.warns(UserWarning, match="has a quantization_config of its own, which stays"):
            compress(model, small)
    else:
        compress(model, small)
    assert (small / "config.json").read_text() == config


@pytest.mark.parametrize("config", [b"no JSON", b'{"name": "\xe9"}', b"[" * 100_000])
@pytest.mark.parametrize("convert", [compress, ibp.checkpoints.decompress])
def test_a_config_that_cannot_be_told_is_refused_first(model, tmp_path, config, convert):
    (model / "config.json").write_bytes(config)
    before = texts(model)
    for output in (tmp_path / "small", model):
        with pytest.raises(ValueError, match=r"config\.json .* no JSON in UTF-8"):
            convert(model, f"{output}/")
    assert not (tmp_path / "small").exists() and texts(model) == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_links_of_the_output_lead_to_stays(model, tmp_path, link):
    store, small = tmp_path / "store", tmp_path / "small"
    names = ("tokenizer.model", "config.json", "model.safetensors", "model.ibp.safetensors")
    for folder in (store, small):
        folder.mkdir()
    for name in names:
        (store / name).write_text("of another model")
        link(store / name, small / name)
    compress(model, small, force=True)
    assert set(texts(store).values()) == {b"of another model"} and len(texts(store)) == 4
    assert not any(path.is_symlink() for path in small.iterdir())
    assert set(texts(small)) == {"config.json", "model.ibp.safetensors", "templates/tool.jinja", "tokenizer.model"}


def test_links_to_the_input_do_not_keep_the_config_from_being_told(model, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    for name in ("tokenizer.model", "config.json", "model.safetensors"):
        os.link(model / name, small / name)
    compress(model, small, force=True)
    assert b'"quant_method": "ibp"' in (small / "config.json").read_bytes()
    assert (model / "config.json").read_bytes() == CONFIG.encode()


@pytest.mark.parametrize(
    "name, config, package",
    [
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "transformers.LlamaForCausalLM"),
        ("config.json", {"_class_name": "DiTTransformer2DModel"}, "diffusers.DiTTransformer2DModel"),
        ("model_index.json", {"_class_name": "DiTPipeline"}, "diffusers.DiTPipeline"),
        ("config.json", {"architectures": []}, None),
        ("config.json", [], None),
        ("other.json", {"architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_the_lines_that_load_a_directory(tmp_path, name, config, package):
    (tmp_path / name).write_text(json.dumps(config))
    told = None if package is None else f"import ibp, {package.split('.')[0]}"
    wanted = None if told is None else f"{told}\nmodel = {package}.from_pretrained({str(tmp_path)!r})"
    assert lines_that_load(tmp_path) == wanted


def test_the_command_says_what_it_copies_and_replaces_nothing(model, tmp_path, capsys):
    small = tmp_path / "small"
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    command = ["compress", str(model), "-o", f"{small}/", "--device", "cpu"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "3 other files were copied." in said
    lines = ["    import ibp, transformers", f"    model = transformers.LlamaForCausalLM.from_pretrained('{small}/')"]
    assert said.splitlines()[-2:] == lines
    (small / "model.ibp.safetensors").unlink()
    assert main(command) == 2
    assert "config.json is there already: --force replaces it" in capsys.readouterr().err
    assert main([*command, "--keep"]) == 0 and not (small / "model.ibp.safetensors").exists()
    (small / "tokenizer.model").write_bytes(b"old")
    assert main([*command, "--force"]) == 0 and (small / "tokenizer.model").read_bytes() == b"\0\1\2"


def test_the_command_does_not_replace_the_other_form(model, tmp_path, capsys):
    small, plain = tmp_path / "small", tmp_path / "small" / "model.safetensors"
    small.mkdir()
    plain.write_bytes(b"of another model")
    command = ["compress", str(model), "-o", f"{small}/", "--device", "cpu", "--quiet"]
    assert main(command) == 2 and f"{plain} is there already" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0 and not plain.exists()
    assert main(["decompress", str(small), "-o", f"{small}/", "--force", "--quiet"]) == 0 and plain.exists()
    command = ["compress", str(model / "model.safetensors"), "-o", f"{small}/", "--device", "cpu", "--quiet"]
    assert main(command) == 2 and "small has model.safetensors, which readers" in capsys.readouterr().err
    plain.unlink()
    assert main(command) == 0
    assert main(command) == 2 and "model.ibp.safetensors is there already" in capsys.readouterr().err


def test_the_command_verifies_every_file_of_a_directory(trainer, tmp_path, capsys):
    small = tmp_path / "small"
    assert main(["compress", str(trainer), "-o", f"{small}/", "--device", "cpu", "--verify-output"]) == 0
    assert main(["verify", str(small), "--content"]) == 0
    assert "optimizer.pt.ibp.safetensors" in capsys.readouterr().out
    with open(small / "optimizer.pt.ibp.safetensors", "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"\xff" * 64)
    assert main(["verify", str(small)]) == 1
    assert main(["decompress", str(small), "-o", f"{tmp_path}/back/"]) == 1 and not (tmp_path / "back").exists()
