"""The weight transfer backend of vLLM, as far as it goes without vLLM: where a model's loaders put what a checkpoint
has, what a sender sends, and the warning where vLLM is missing. tools/try_sync.py runs the rest with the classes of
releases.
"""

import importlib
import importlib.util
import logging
from pathlib import Path

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.deltas import _applying
from ibp.integrations.vllm import sync as vllm_sync
from ibp.integrations.vllm.sync import ModelReceiver
from native import ROOT

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
HALF = 24  # rows of a merged weight


class Model(torch.nn.Module):
    """Two weights merged in one; a part of another one's columns; one with room behind it."""

    def __init__(self):
        super().__init__()
        self.merged = torch.nn.Parameter(torch.zeros(2 * HALF, 32).bfloat16())
        self.columns = torch.nn.Parameter(torch.zeros(16, 8).bfloat16())
        self.padded = torch.nn.Parameter(torch.zeros(20, 32).bfloat16())

    def load_weights(self, weights):
        for name, loaded in weights:
            if name == "a":
                self.merged[:HALF].data.copy_(loaded)
            elif name == "b":
                self.merged.data.narrow(0, HALF, HALF).copy_(loaded)
            elif name == "columns":
                self.columns.data.copy_(loaded.narrow(1, 8, 8))
            elif name == "padded":
                self.padded[: len(loaded)].data.copy_(loaded)
                self.padded[len(loaded) :].data.fill_(0)
            elif name == "turned":
                self.columns.data.copy_(loaded.t())
            elif name == "scaled":
                self.columns.data.copy_(loaded + 1)
            elif name == "set":
                self.columns.data[:] = loaded
            elif name == "written":
                self.columns.data.copy_(loaded.mul_(2))


SHAPES = {"a": (HALF, 32), "b": (HALF, 32), "columns": (16, 24), "padded": (17, 32), "elsewhere": (5, 5)}


def versions():
    """Weights before and after a step."""
    generator = torch.Generator().manual_seed(0)
    old = {name: torch.randn(shape, generator=generator).mul(0.02) for name, shape in SHAPES.items()}
    new = {name: weight + 1e-5 * torch.randn(weight.shape, generator=generator) for name, weight in old.items()}
    return tuple({name: weight.bfloat16() for name, weight in version.items()} for version in (old, new))


def loaded(checkpoint):
    model = Model()
    with torch.no_grad():
        model.load_weights(checkpoint.items())
    return model


@pytest.mark.parametrize("piece_bytes", [700, 1 << 20])
@pytest.mark.parametrize("full", [False, True])
def test_places(piece_bytes, full):
    old, new = versions()
    model = loaded(old)
    receiver = ModelReceiver(model, False)
    for message in ibp.deltas.Sender(old, piece_bytes=piece_bytes).push(new, full=full):
        receiver.apply(message)
    assert receiver.version == 1
    for mine, wanted in zip(model.parameters(), loaded(new).parameters()):
        assert_same_bits(mine.detach(), wanted.detach())


def test_a_part_is_checked_by_the_chain():
    """Of a part nobody has the fingerprint, but a delta has to follow what was applied."""
    old, new = ({"columns": checkpoint["columns"]} for checkpoint in versions())
    receiver = ModelReceiver(loaded(old), False)
    assert receiver.apply(*ibp.deltas.Sender(old).push(new))
    with pytest.raises(ibp.deltas.OutOfSyncError, match="columns has fingerprint"):
        receiver.apply(*ibp.deltas.Sender(old).push({"columns": new["columns"] + 1}))


@pytest.mark.parametrize("piece_bytes", [700, 1 << 20])
def test_an_interrupted_part_is_taken_back(piece_bytes, monkeypatch):
    old, new = versions()
    model, write, calls = loaded(old), _applying.SplitBase.write, []

    def interrupted(base, group, elements):
        write(base, group, elements)
        calls.append(group)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_applying.SplitBase, "write", interrupted)
    receiver = ModelReceiver(model, False)
    with pytest.raises(KeyboardInterrupt):
        for message in ibp.deltas.Sender(old, piece_bytes=piece_bytes).push(new):
            receiver.apply(message)
    assert len(calls) == 2
    for mine, wanted in zip(model.parameters(), loaded(old).parameters()):
        assert_same_bits(mine.detach(), wanted.detach())


@pytest.mark.parametrize(
    ("name", "shape", "kind", "match"),
    [
        ("turned", (8, 16), NotImplementedError, "the loader of turned takes it in another order"),
        ("scaled", (16, 8), NotImplementedError, "changes values before it copies them"),
        ("written", (16, 8), NotImplementedError, "writes to a tensor of the checkpoint"),
        ("a", (HALF, 32), TypeError, "a has dtype torch.bfloat16 here; the message is for torch.float32"),
    ],
)
def test_loaders_that_do_more_than_copy(name, shape, kind, match):
    model = Model()
    with pytest.raises(kind, match=match):
        dtype = torch.float32 if name == "a" else torch.bfloat16
        ModelReceiver(model, False).apply(*ibp.deltas.Sender().push({name: torch.ones(shape, dtype=dtype)}))
    assert not any(weight.any() for weight in model.parameters())


def test_loaders_that_set_what_they_load():
    model, values = Model(), torch.randn(16, 8).bfloat16()
    assert ModelReceiver(model, False).apply(*ibp.deltas.Sender().push({"set": values}))
    assert_same_bits(model.columns.detach(), values)


class Client:
    """One of vLLM's clients: what it was told, and the bytes of the files then."""

    def __init__(self):
        self.told = []

    def start_weight_update(self):
        self.told.append("start")

    def update_weights(self, info):
        self.told.append([Path(path).read_bytes() for path in info.get("paths", [])] or info)

    def finish_weight_update(self):
        self.told.append("finish")


def test_messages_are_sent_by_files_or_by_a_group(tmp_path, monkeypatch):
    messages = [torch.arange(9, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)]
    client = Client()
    vllm_sync.send(messages, client, folder=str(tmp_path))
    assert client.told == ["start", [bytes(range(9)), bytes(3)], "finish"] and not list(tmp_path.iterdir())

    class Group:
        sent = []

        def broadcast(self, message, src, stream):
            self.sent.append((message, src))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    client = Client()
    vllm_sync.send(messages, client, group=Group())
    assert client.told == ["start", {"num_bytes": [9, 3]}, "finish"]
    assert [message.numel() for message, _ in Group.sent] == [9, 3] and {src for _, src in Group.sent} == {0}


@without_vllm
def test_without_vllm(caplog):
    with pytest.raises(ImportError, match=r"needs vLLM 0.26.0 to 0.33.0; none is installed"):
        vllm_sync.IBPWeightTransferEngine(None, None, torch.device("cpu"), Model())
    with caplog.at_level(logging.WARNING, "ibp.integrations.vllm.sync"):
        vllm_sync.register.__wrapped__()
    assert "backend ibp_delta is not there with this vLLM: No module named 'vllm'" in caplog.text


def test_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["ibp_sync"].split(":")
    assert getattr(importlib.import_module(module), name) is vllm_sync.register
