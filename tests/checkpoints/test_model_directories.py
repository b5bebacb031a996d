"""Directories of models: compressing one copies the files beside the weights, and decompressing gives all back."""

import json

import pytest
import torch

import ibp
from ibp._cli.main import main
from ibp.checkpoints._model_files import files_beside

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
    small.mkdir()
    compress(model, small, shard_bytes=shard_bytes)
    found = texts(small)
    assert json.loads(found["config.json"]) == {**json.loads(CONFIG), "quantization_config": {"quant_method": "ibp"}}
    assert found["tokenizer.model"] == b"\0\1\2" and found["templates/tool.jinja"] == b"{{ x }}"
    assert ("model.safetensors.index.json" in found) == (shard_bytes is not None) and ".cache/lock" not in found
    back.mkdir()
    ibp.checkpoints.decompress(small, back)
    again = texts(back)
    assert again["config.json"] == CONFIG.encode() and again["tokenizer.model"] == b"\0\1\2"
    assert torch.equal(ibp.load(back, device="cpu")["w"], ibp.load(model, device="cpu")["w"])


def test_only_directories_take_files_along(model, tmp_path):
    compress(model / "model.safetensors", tmp_path / "one")
    compress(model, tmp_path / "two.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "one", "two.safetensors"}
    assert files_beside([model, model], tmp_path) == files_beside(model, model) == {}
    inner = model / "inner"
    inner.mkdir()
    compress(model, inner)
    compress(model, inner)
    assert set(texts(inner)) == {"config.json", "model.safetensors", "templates/tool.jinja", "tokenizer.model"}


def test_weights_that_are_not_read_stay_behind(model, tmp_path):
    (model / "training_args.bin").write_bytes(b"no format that is known")
    torch.save({"w": torch.ones(64, 512), "b": torch.zeros(64)}, model / "pytorch_model.bin")
    (model / "flax_model.msgpack").write_bytes(b"1")
    (model / "original").mkdir()
    torch.save({"w": torch.ones(3)}, model / "original" / "consolidated.00.pth")
    small = tmp_path / "small"
    small.mkdir()
    with pytest.warns(UserWarning, match="left out: ") as warned:
        compress(model, small)
    said = " ".join(str(one.message) for one in warned)
    assert "pytorch_model.bin, whose tensors the safetensors files beside it have" in said
    assert "flax_model.msgpack, original/consolidated.00.pth" in said and "training_args.bin has no format" in said
    assert set(texts(small)) == {
        "config.json",
        "model.safetensors",
        "templates/tool.jinja",
        "tokenizer.model",
        "training_args.bin",
    }


@pytest.mark.parametrize(
    "config",
    [
        "[1]",
        "{}",
        "no JSON",
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


def test_a_config_that_was_written_anew_loses_the_field(model, tmp_path):
    (model / "config.json").write_text('{"a": 1, "quantization_config": {"level": "fast", "quant_method": "ibp"}}')
    back = tmp_path / "back"
    back.mkdir()
    ibp.checkpoints.decompress(model, back)
    assert json.loads((back / "config.json").read_text()) == {"a": 1}


def test_the_command_says_what_it_copies_and_replaces_nothing(model, tmp_path, capsys):
    small = tmp_path / "small"
    command = ["compress", str(model), "-o", f"{small}/", "--device", "cpu"]
    assert main(command) == 0
    assert "3 other files were copied." in capsys.readouterr().out
    (small / "model.safetensors").unlink()
    assert main(command) == 2
    assert "config.json is there already: --force replaces it" in capsys.readouterr().err
    assert main([*command, "--keep"]) == 0 and not (small / "model.safetensors").exists()
    (small / "tokenizer.model").write_bytes(b"old")
    assert main([*command, "--force"]) == 0 and (small / "tokenizer.model").read_bytes() == b"\0\1\2"
