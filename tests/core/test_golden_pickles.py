"""What earlier releases pickled and saved (tests/golden/pickles) loads, with the same bits."""

import dataclasses
import inspect
import io
import json
import lzma
import pickle

import pytest
import torch

import ibp
from golden import make_pickles
from golden.make_pickles import KINDS, PICKLES, SAVED, contents, modules, rows, table_of
from helpers import assert_same_bits
from nn.test_coded_experts import PlainExperts
from public_names import MODULES

RELEASES = sorted(path.name for path in PICKLES.iterdir())
WEIGHTS_ONLY = {"tables", "codebooks", "wholes", "states", "optimizers"}  # which torch.load takes with its default
OPTIMIZERS = (ibp.optim.SGD, ibp.optim.Adagrad, ibp.optim.RowWiseAdagrad)
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


# Public classes whose objects belong to an open file or to a model that is being loaded, and a base of adapters'
# classes. A pickled `File` is opened again by `ibp._reopened`.
NAMED_BY_NO_PICKLE = {"CheckpointWriter", "CodedStatistics", "File", "ModelLoading", "Source", "SourceTensor"}


def held_by_processes(tmp_path):
    """Objects that pickle, and that programs keep in no file."""
    x, compressor = rows(200, 64), ibp.adapters.WeightCompressor({"device": "cpu"})
    ibp.save(tmp_path / "x.safetensors", {"x": table_of(x)})
    experts = torch.nn.Sequential(PlainExperts())
    ibp.nn.compress(experts, min_bytes=0)
    sender, weights = ibp.deltas.Sender({"x": x}), {"x": x.clone()}
    receiver = ibp.deltas.Receiver(weights)
    for message in sender.push({"x": x + 1}):
        receiver.apply(message)
    counters = (ibp.ActivationStats, ibp.OffloadStats, ibp.cache.CacheStats, ibp.kv.KVRowsStats, ibp.kv.KVStoreStats)
    errors = (ibp.ChecksumError, ibp.CorruptTableError, ibp.FileFormatError)
    return [
        *(kind(*range(len(dataclasses.fields(kind)))) for kind in counters),
        *(kind("a sentence") for kind in (*errors, ibp.checkpoints.SourceFormatError, ibp.deltas.DeltaMismatchError)),
        *(kind(ibp.nn.Embedding(table_of(x), trainable=True), lr=0.25) for kind in OPTIMIZERS),
        ibp.open(tmp_path / "x.safetensors"),
        table_of(x).share(),
        experts,
        sender,
        receiver,
        ibp.Buffers([x]),
        ibp.kv.PagedTensors([x]),
        ibp.deltas.ShardPlace(x, 0, ((0, 200), (0, 64))),
        ibp.adapters.RestingWeight("x", compressor.code("x", x), "cpu"),
        compressor,
        ibp.adapters.ExpertTables(table_of(x), table_of(x), num_experts=2),
    ]


def test_pickles_name_no_private_module(tmp_path):
    """A module could not be renamed without an alias for the pickles of a release that name it."""
    made = {make.__name__: make() for make in KINDS if make.__name__ not in ("coded_rows", "wholes")}
    made["wholes"] = loaded("0.3.0/wholes.pt.xz")  # whose packages may not be there
    held = Named(pickle.dumps([made, held_by_processes(tmp_path)]))
    held.load()
    assert [name for name in held.names if "._" in name.rpartition(".")[0]] == []
    public = {kind for module in MODULES for name in module.__all__ if isinstance(kind := getattr(module, name), type)}
    never = {kind for kind in public if issubclass(kind, ibp.adapters.OfThisProcess) or inspect.isabstract(kind)}
    lacking = {kind.__name__ for kind in public - never if f"{kind.__module__}.{kind.__qualname__}" not in held.names}
    assert lacking == NAMED_BY_NO_PICKLE


@pytest.mark.parametrize("release", RELEASES)
def test_files(release):
    held, wanted = ibp.load(PICKLES / release / "saved.safetensors"), recorded(release)
    assert_holds(contents("deltas", "tensor", held.pop("delta")), wanted["deltas"]["tensor"], "delta")
    assert held.keys() == set(SAVED)
    for name, table in held.items():
        assert_holds(contents("tables", name, table), wanted["tables"][name], name)


@pytest.mark.slow
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
