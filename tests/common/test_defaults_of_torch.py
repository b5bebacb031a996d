"""Calls give the same under a default device and a default dtype that the program has set."""

import contextlib
import pickle

import numpy as np
import pytest
import torch

import ibp
from helpers import assert_same_bits

WORDS = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
FLOATS = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([3, 1, 4])
HOTNESS = torch.arange(500)
TABLE, FLOAT_TABLE = ibp.compress(WORDS), ibp.compress(FLOATS)
PAGES = WORDS.reshape(-1)[: 16 * 2048].view(16, 2048).contiguous()
OTHER = (WORDS.float() * 1.01).bfloat16()


def table(folder):
    made = ibp.compress(WORDS)
    made.update_(IDS, WORDS[:3])
    made.append(WORDS[:3])
    made.refit()
    return [made.decompress(), made[IDS], made[[7, 9]], made[3:9:2], made[5, 7], made[np.array([2])]]


def schemes(folder):
    makers = [{"scheme": "ibp"}, {"scheme": "planes"}, {"scheme": "raw"}, {"clusters": 2}, {"level": "fast"}]
    tables = [ibp.compress(WORDS, **options) for options in makers]
    return [*(made.decompress() for made in tables), ibp.compress(WORDS.clone(), inplace=True).decompress()]


def arrays(folder):
    return [ibp.compress(FLOATS.numpy()).decompress(), ibp.compress(WORDS * 1e-38).decompress()]


def several_tables(folder):
    rows = ibp.index_select([TABLE, TABLE], IDS, table_numbers=IDS % 2)
    return [rows, ibp.embedding_bag(FLOAT_TABLE, IDS.view(1, 3))]


def estimates(folder):
    return [str(ibp.estimate(WORDS)), str(ibp.estimate(FLOATS))]


def copies(folder):
    shared = TABLE.clone().share_memory_()
    return [made.decompress() for made in (shared, pickle.loads(pickle.dumps(TABLE)), ibp.spill.place(WORDS, 4 / 3))]


def files(folder):
    path = folder / "f.safetensors"
    ibp.save(path, {"t": TABLE, "p": FLOATS, "none": FLOATS[:0]}, content=True)
    loaded = ibp.load(path)
    with ibp.open(path) as file:
        file.verify(content=True)
        opened = dict(file)
    return [held[name] for held in (loaded, opened) for name in ("p", "none")] + [
        held["t"].decompress() for held in (loaded, opened)
    ]


def checkpoints(folder):
    torch.save({"w": WORDS, "b": FLOATS[0], "none": FLOATS[:0]}, folder / "c.pt")
    ibp.checkpoints.compress(folder / "c.pt", folder / "c.safetensors", force=True)
    for name in ("back.pt", "back.safetensors"):
        ibp.checkpoints.decompress(folder / "c.safetensors", folder / name, force=True)
    estimate = ibp.checkpoints.estimate(folder / "c.pt")
    return [(folder / "c.safetensors").read_bytes(), (folder / "back.safetensors").read_bytes(), str(estimate)]


def deltas(folder):
    one, all_of = WORDS.clone(), {"w": WORDS.clone()}
    ibp.deltas.make(OTHER, one).apply_(one)
    ibp.deltas.make({"w": OTHER}, all_of).apply_(all_of)
    return [one, all_of["w"]]


def caches(folder):
    hot = ibp.RowCache(TABLE, 50_000, HOTNESS, devices="cpu")
    lru = ibp.RowCache(TABLE, 50_000, policy="lru", devices="cpu")
    return [cache.index_select(IDS, device="cpu") for cache in (hot, lru, lru)]


def offloaded(folder):
    model = torch.nn.Linear(64, 64, device="cpu", dtype=torch.float32).requires_grad_(False)
    model.weight.data.copy_(FLOATS[:64]), model.bias.data.zero_()
    handle = ibp.offload(model, "cpu", min_bytes=64)
    found = [model(FLOATS), model.weight.detach().clone()]
    handle.close()
    return [*found, model.weight]


def modules(folder):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, device="cpu", dtype=torch.float32)).requires_grad_(False)
    model[0].weight.data.copy_(FLOATS[:64]), model[0].bias.data.zero_()
    ibp.nn.compress(model, min_bytes=64)
    embedding = ibp.nn.Embedding.from_pretrained(FLOATS, freeze=True)
    torch.manual_seed(0)
    new = ibp.nn.Embedding(100, 64, dtype=torch.float32)
    return [model(FLOATS), model.state_dict()["0.weight"], embedding(IDS), new(IDS)]


def rows_that_train(folder):
    optimizers = ibp.optim.SGD, ibp.optim.Adagrad, ibp.optim.RowWiseAdagrad
    found = []
    for kind in optimizers:
        embedding = ibp.nn.Embedding.from_pretrained(FLOATS, freeze=False)
        optimizer = kind(embedding, lr=0.5)
        for _ in range(2):
            embedding(IDS).square().sum().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        found.append(embedding(IDS).detach())
    return found


def activations(folder):
    weights = torch.nn.Parameter(FLOATS.clone())
    with ibp.offload_activations(least_bytes=0):
        result = (torch.nn.functional.linear(weights, weights).relu() ** 2).sum()
    result.backward()
    return [weights.grad]


def kv(folder):
    store = ibp.kv.KVStore(PAGES, page_bytes=4096, num_pages=16, device="cpu")
    store.store(range(16), PAGES).synchronize()
    pages = torch.empty_like(PAGES)
    store.load(range(16), pages).synchronize()
    keys = WORDS.view(500, 4, 64)
    rows = ibp.kv.KVRows(keys[:100], num_layers=1, num_tokens=600, num_heads=4, cache_bytes=1 << 16, device="cpu")
    rows.store(0, keys, HOTNESS)
    return [pages, rows.load(0, IDS)]


CALLS = [
    table, schemes, arrays, several_tables, estimates, copies, files, checkpoints, deltas, caches, offloaded, modules,
    rows_that_train, activations, kv,
]  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_defaults_of_torch_change_nothing(tmp_path, call, default):
    wanted = call(tmp_path)
    with DEFAULTS[default]():
        found = call(tmp_path)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        if isinstance(one, torch.Tensor):
            assert one.device == other.device
            assert_same_bits(one, other)
        else:
            assert one == other
