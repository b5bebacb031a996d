"""What earlier releases pickled and saved (tests/golden/pickles) loads, with the same bits."""

import io
import json
import lzma
import pickle

import pytest
import torch

import ibp
from golden import make_pickles
from golden.make_pickles import PICKLES, SAVED, contents, modules, rows
from helpers import assert_same_bits

RELEASES = sorted(path.name for path in PICKLES.iterdir())
WEIGHTS_ONLY = {"tables", "codebooks", "wholes", "states", "optimizers"}  # which torch.load takes with its default
GONE = {"least_bucketed_ids"}  # fields that values had, and that nothing reads any more
PACKAGES = {"zstd": "zstandard", "lz4": "lz4.frame"}  # that general codecs need
FILES = sorted(f"{path.parent.name}/{path.name}" for path in PICKLES.glob("*/*.xz"))
pytestmark = pytest.mark.filterwarnings("ignore:ibp.* is ibp.* now:DeprecationWarning")


def recorded(release):
    return json.loads((PICKLES / release / "contents.json").read_text())


def loaded(file):
    data, kind = lzma.decompress((PICKLES / file).read_bytes()), file.split("/")[1].split(".")[0]
    if ".pickle" in file:
        return pickle.loads(data)
    return torch.load(io.BytesIO(data), weights_only=kind in WEIGHTS_ONLY)


def assert_holds(found, wanted, where):
    """`found` has all that `wanted` has; objects may have come to say more."""
    if isinstance(wanted, dict):
        for key in wanted.keys() - GONE:
            assert_holds(found[key], wanted[key], f"{where}, {key}")
    else:
        assert found == wanted, where


@pytest.mark.parametrize("file", FILES)
def test_pickles(file):
    release, kind = file.split(".pickle")[0].split(".pt")[0].split("/")
    made, wanted = loaded(file), recorded(release)[kind]
    assert made.keys() == wanted.keys()
    for name in wanted:
        if name in PACKAGES:
            pytest.importorskip(PACKAGES[name])
        assert_holds(contents(kind, name, made[name]), wanted[name], name)


class Named(pickle.Unpickler):
    """Collects the names of ibp that a pickle holds."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.names = set()

    def find_class(self, module, name):
        if module.startswith("ibp"):
            self.names.add(f"{module}.{name}")
        return super().find_class(module, name)


def test_pickles_of_modules_name_no_private_module():
    """A module could not be renamed without an alias for the pickles of a release that name it."""
    model = torch.nn.Sequential(torch.nn.Embedding(200, 64), torch.nn.Linear(64, 200)).bfloat16().requires_grad_(False)
    ibp.nn.compress(model, min_bytes=0)
    held = Named(pickle.dumps({**modules(), "coded": model}))
    held.load()["coded"].to("cpu")
    assert {"ibp.nn.Linear", "ibp.nn._apply_checked", "ibp.nn._Group", "ibp.nn.SharedTable"} <= held.names
    assert [name for name in held.names if "._" in name.rpartition(".")[0]] == []


@pytest.mark.parametrize("release", RELEASES)
def test_files(release):
    held, wanted = ibp.load(PICKLES / release / "saved.safetensors"), recorded(release)
    assert_holds(contents("deltas", "tensor", held.pop("delta")), wanted["deltas"]["tensor"], "delta")
    assert held.keys() == set(SAVED)
    for name, table in held.items():
        assert_holds(contents("tables", name, table), wanted["tables"][name], name)


@pytest.mark.parametrize("release", RELEASES)
def test_states_go_into_modules(release, monkeypatch):
    filled = modules()
    monkeypatch.setattr(make_pickles, "rows", lambda *args, **options: torch.zeros_like(rows(*args, **options)))
    for name, state in loaded(f"{release}/states.pt.xz").items():
        kind = name.partition(",")[0]
        module = modules()[kind]
        module.load_state_dict(state)
        for of_key, wanted in filled[kind].state_dict().items():
            assert_same_bits(module.state_dict()[of_key], wanted)


@pytest.mark.parametrize("release", RELEASES)
def test_states_go_into_optimizers(release):
    """States of `ibp.optim.Adam` and `AdamW`, which were removed, go into torch's."""
    for name, saved in loaded(f"{release}/optimizers.pt.xz").items():
        if name in ("Adam", "AdamW"):
            weight = torch.nn.Parameter(rows())
            weight.grad = torch.ones_like(weight)
            optimizer = getattr(torch.optim, name)([weight])
        else:
            optimizer = getattr(ibp.optim, name)(ibp.nn.Embedding(ibp.compress(rows(), device="cpu"), trainable=True))
        optimizer.load_state_dict(saved)
        wanted = recorded(release)["optimizers"][name]
        assert_holds(contents("optimizers", name, optimizer.state_dict())["state"], wanted["state"], name)
        assert optimizer.param_groups[0]["lr"] == 0.25
        optimizer.step()  # options that torch checks in a step are good
