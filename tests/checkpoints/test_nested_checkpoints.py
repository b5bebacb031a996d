"""Checkpoints of torch whose values are nested: as they were, after they were compressed; and directories of them."""

import collections
import json
import random

import numpy as np
import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.checkpoints._inputs import open_source


def assert_same(got, wanted):
    """The same types, values and order of keys, and bits of tensors."""
    if isinstance(wanted, torch.Tensor):
        return assert_same_bits(got, wanted.detach())
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert list(got) == list(wanted) and vars_of(got) == vars_of(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted):
            assert_same(one, other)
    else:
        assert got == wanted or (got != got and wanted != wanted)


def vars_of(value):
    return getattr(value, "__dict__", {})


def trained():
    """A module and its optimizer, after a step."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3, 64)).sum().backward()
    optimizer.step()
    return module, optimizer


def checkpoint():
    module, optimizer = trained()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "epoch": 3,
        "loss": float("nan"),
        "best": float("inf"),
        "name": "ä",
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": (), "counter": collections.Counter()},
        "history": [{"loss": 0.5, "at": [1, 2]}, {"loss": 0.25, "at": []}],
        "betas": (0.9, [0.99, (torch.arange(3),)]),
        "shape": torch.Size([2, 3]),
        "by number": {0: torch.ones(3), (1, "a"): 5, None: True, 2.5: "x"},
        "": {"": torch.zeros(2)},
    }


CASES = {
    "a checkpoint": checkpoint,
    "a state_dict": lambda: trained()[0].state_dict(),
    "an optimizer": lambda: trained()[1].state_dict(),
    "a flat dict": lambda: {"a.weight": torch.arange(2000.0), "b": torch.ones(2), "epoch": 3, "rates": [0.5, {"x": 1}]},
    "values among tensors": lambda: {"epoch": 3, "w": torch.zeros(64, 64), "lr": 0.1, "b": torch.zeros(4)},
    "values first": lambda: collections.OrderedDict(epoch=3, w=torch.zeros(64, 64)),
    "a tensor": lambda: torch.arange(5000),
    "a list": lambda: [torch.arange(5000), {"a": torch.ones(2)}, 3],
    "numbers": lambda: {"a": {"b": 1}},
}


@pytest.mark.parametrize("case", CASES)
def test_values_come_back_as_they_were(case, tmp_path):
    content = CASES[case]()
    torch.save(content, tmp_path / "x.pt")
    ibp.checkpoints.compress(tmp_path / "x.pt", tmp_path / "small.safetensors", device="cpu", jobs=1)
    ibp.checkpoints.decompress(tmp_path / "small.safetensors", tmp_path / "plain.safetensors")
    for name in ("small", "plain"):
        ibp.checkpoints.decompress(tmp_path / f"{name}.safetensors", tmp_path / f"{name}.pt")
        assert_same(torch.load(tmp_path / f"{name}.pt", weights_only=True), content)


def test_names_of_nested_tensors(tmp_path):
    torch.save({"model": {"w": torch.ones(3)}, "state": {0: {"step": torch.tensor(1)}}, "epoch": 3}, tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        assert list(source.tensors) == ["model.w", "state.0.step"]
        assert source.metadata["torch.epoch"] == "3" and len(source.metadata) == 2


def test_sets_of_files_come_back_as_one_checkpoint(tmp_path):
    content = {"model": {f"w{n}": torch.randn(64, 64) for n in range(5)}, "step": 7}
    torch.save(content, tmp_path / "x.pt")
    report = ibp.checkpoints.compress(tmp_path / "x.pt", tmp_path / "small", shard_bytes=40_000, device="cpu", jobs=1)
    assert len(report.files) == 3
    plain = ibp.checkpoints.decompress(report.path, tmp_path / "plain.safetensors")
    for number, path in enumerate((report.path, plain[-1])):
        ibp.checkpoints.decompress(path, tmp_path / f"{number}.pt")
        assert_same(torch.load(tmp_path / f"{number}.pt", weights_only=True), content)


def test_tensors_that_are_left_out_or_added(tmp_path):
    torch.save({"model": {"a": torch.ones(2), "b": torch.zeros(2)}, "list": [torch.ones(1)]}, tmp_path / "x.pt")
    ibp.checkpoints.compress(tmp_path / "x.pt", tmp_path / "x.safetensors", device="cpu")
    ibp.checkpoints.decompress(tmp_path / "x.safetensors", tmp_path / "y.pt", exclude=["model.b"])
    assert_same(torch.load(tmp_path / "y.pt"), {"model": {"a": torch.ones(2)}, "list": [torch.ones(1)]})
    with pytest.raises(ValueError, match="a tensor of the list at 'list' is left out; wanted .safetensors"):
        ibp.checkpoints.decompress(tmp_path / "x.safetensors", tmp_path / "z.pt", exclude=["list*"])
    np.save(tmp_path / "other.npy", np.ones(3))
    ibp.checkpoints.decompress([tmp_path / "x.safetensors", tmp_path / "other.npy"], tmp_path / "z.pt")
    assert list(torch.load(tmp_path / "z.pt")) == ["model", "list", "other"]
    np.save(tmp_path / "model.npy", np.ones(3))
    with pytest.raises(ValueError, match="'model' has no place in the checkpoint"):
        ibp.checkpoints.decompress([tmp_path / "x.safetensors", tmp_path / "model.npy"], tmp_path / "w.pt")
    assert not (tmp_path / "w.pt").exists()


@pytest.mark.parametrize("value", [{1, 2}, torch.float16, torch.device("cpu"), 1j, bytearray(b"x")], ids=repr)
def test_values_that_cannot_be_kept_are_refused(value, tmp_path):
    torch.save({"w": torch.ones(3), "deep": [{"x": value}]}, tmp_path / "x.pt")
    with pytest.raises(
        ibp.checkpoints.SourceFormatError, match=r"x.pt: the value at 'deep.0.x' is a \w+; wanted a tensor, a number"
    ):
        ibp.checkpoints.compress(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("texts", [
    {"torch_structure": "["}, {"torch_structure": "[" * 100_000}, {"torch_structure": '["set", []]'},
    {"torch_structure": '["dict", 5]'}, {"torch_structure": '["dict", [[["list", []], ["dict", []]]]]'},
    {"torch_structure": '["dict", [], ["dict", []]]'}, {"torch_structure": "5"}, {"torch.x": "{"},
    {"torch.x": "[" * 100_000}, {"torch.x": "1" * 5000},
], ids=lambda texts: f"{next(iter(texts.items()))}"[:40])  # fmt: skip
def test_metadata_that_is_damaged(texts, tmp_path):
    ibp.save(tmp_path / "x.safetensors", {"w": torch.ones(3)}, metadata=texts)
    with pytest.raises(
        ibp.checkpoints.SourceFormatError, match="does not say how the checkpoint was nested|has no place"
    ):
        ibp.checkpoints.decompress(tmp_path / "x.safetensors", tmp_path / "x.pt")


# ---- directories, as transformers' Trainer writes them ----


@pytest.fixture
def trainer(tmp_path):
    """What a Trainer leaves of a step. The state of random numbers has arrays of numpy, which weights_only refuses, and
    the arguments are an object."""
    made, (module, optimizer) = tmp_path / "checkpoint-1", trained()
    made.mkdir()
    pytest.importorskip("safetensors.torch").save_file(module.state_dict(), made / "model.safetensors")
    torch.save(optimizer.state_dict(), made / "optimizer.pt")
    torch.save(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict(), made / "scheduler.pt")
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, made / "rng_state.pth")
    torch.save(module, made / "training_args.bin")
    (made / "trainer_state.json").write_text(json.dumps({"epoch": 1}))
    return made, module.state_dict()


def test_a_directory_of_a_trainer(trainer, tmp_path):
    directory, weights = trainer
    with pytest.warns(UserWarning, match="left out") as warned:
        report = ibp.checkpoints.compress(directory, tmp_path / "model.safetensors", device="cpu", jobs=1)
    said = [str(warning.message).partition("checkpoint-1/")[2] for warning in warned]
    assert [text.split()[0] for text in said] == ["rng_state.pth", "scheduler.pt", "training_args.bin"]
    assert "numpy" in said[0] and "holds no tensor" in said[1] and "torch.nn.modules.container.Sequential" in said[2]
    found = ibp.load(report.path)
    assert set(weights) < set(found) and "state.0.exp_avg" in found and len(report.files) == 2
    optimizer = tmp_path / report.files[1]
    ibp.checkpoints.decompress(optimizer, tmp_path / "optimizer.pt")
    states = torch.load(directory / "optimizer.pt", weights_only=True)
    assert_same(torch.load(tmp_path / "optimizer.pt", weights_only=True), states)
    with pytest.warns(UserWarning, match="left out"):
        estimate = ibp.checkpoints.estimate(directory)
    assert estimate.num_bytes == report.num_bytes
    with pytest.raises(
        ibp.checkpoints.SourceFormatError, match="rng_state.pth holds numpy.*; wanted tensors, numbers and texts"
    ):
        ibp.checkpoints.compress(directory / "rng_state.pth", tmp_path / "none.safetensors")


def test_damaged_files_of_a_directory_are_not_left_out(trainer):
    directory, *_ = trainer
    content = bytearray((directory / "optimizer.pt").read_bytes())
    for damaged in (content[:-100], b""):
        (directory / "optimizer.pt").write_bytes(damaged)
        with pytest.raises(ibp.checkpoints.SourceFormatError, match="optimizer.pt"):
            open_source(directory)


@pytest.mark.filterwarnings("ignore:left out")
def test_a_directory_without_tensors(trainer):
    directory, *_ = trainer
    for name in ("model.safetensors", "optimizer.pt"):
        (directory / name).unlink()
    with pytest.raises(FileNotFoundError, match="checkpoint-1: no file holds tensors"):
        open_source(directory)


def test_files_that_an_index_does_not_name(trainer):
    directory, weights = trainer
    (directory / "model.safetensors").unlink()
    ibp.save(directory / "model.safetensors", dict(weights), shard_bytes=8000)
    with pytest.warns(
        UserWarning, match="left out: .*optimizer.pt.*, which model.safetensors.index.json does not name"
    ):
        source = open_source(directory)
    with source:
        assert set(source.tensors) == set(weights)
