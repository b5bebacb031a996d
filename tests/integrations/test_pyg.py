"""ibp.integrations.pyg: features of PyTorch Geometric's graphs in compressed tables, against those in plain tensors."""

import copy
import os
import pickle
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits, make_tensor
from native import ROOT

pytestmark = pytest.mark.frameworks
pyg = pytest.importorskip("torch_geometric")

from torch_geometric.data import Data, GraphStore, HeteroData, TensorAttr  # noqa: E402
from torch_geometric.loader import CachedLoader, NodeLoader, RandomNodeLoader  # noqa: E402
from torch_geometric.nn import GATConv, SAGEConv  # noqa: E402
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, SamplerOutput  # noqa: E402
from torch_geometric.transforms import Compose  # noqa: E402

from ibp.integrations.pyg import FeatureStore, FetchFeatures, attach  # noqa: E402

NUM_NODES, NUM_EDGES = 300, 1500
SEEDS = torch.arange(64)
RATING = ("user", "rates", "item")


class Neighbors(BaseSampler):
    """Edges by their target, drawn in plain torch: what NeighborLoader's sampler does with its compiled extension."""

    edge_permutation = None

    def __init__(self, edge_index, num_nodes, fan_out=(5, 3)):
        self.sources, targets = edge_index
        self.starts = torch.searchsorted(targets.contiguous(), torch.arange(num_nodes + 1))
        self.fan_out = fan_out

    def sample_from_nodes(self, inputs, **kwargs):
        nodes = frontier = inputs.node
        edges, targets = [], []
        for fan_out in self.fan_out:
            degrees = self.starts[frontier + 1] - self.starts[frontier]
            draws = (torch.rand(len(frontier), fan_out) * degrees[:, None]).long() + self.starts[frontier][:, None]
            drawn = (degrees > 0)[:, None].expand_as(draws)
            edges.append(draws[drawn])
            targets.append(frontier[:, None].expand_as(draws)[drawn])
            frontier = self.sources[edges[-1]].unique()
            frontier = frontier[~torch.isin(frontier, nodes)]
            nodes = torch.cat([nodes, frontier])
        places = torch.full((len(self.starts) - 1,), -1)
        places[nodes] = torch.arange(len(nodes))
        edge = torch.cat(edges)
        return SamplerOutput(
            nodes,
            places[self.sources[edge]],
            places[torch.cat(targets)],
            edge,
            None,
            metadata=(inputs.input_id, inputs.time),
        )

    def sample_from_edges(self, *args, **kwargs):
        raise NotImplementedError


class HeteroNeighbors(BaseSampler):
    """Every edge of RATING into the items asked for."""

    edge_permutation = None

    def __init__(self, edge_index):
        self.users, self.items = edge_index

    def sample_from_nodes(self, inputs, **kwargs):
        edge = torch.isin(self.items, inputs.node).nonzero().reshape(-1)
        users, row = self.users[edge].unique(return_inverse=True)
        place = torch.full((int(self.items.max()) + 1,), -1)
        place[inputs.node] = torch.arange(len(inputs.node))
        return HeteroSamplerOutput(
            {"user": users, "item": inputs.node},
            {RATING: row},
            {RATING: place[self.items[edge]]},
            {RATING: edge},
            None,
            metadata=(inputs.input_id, inputs.time),
        )

    def sample_from_edges(self, *args, **kwargs):
        raise NotImplementedError


def graph(**features):
    """A graph whose edges are sorted by their target."""
    random = torch.Generator().manual_seed(1)
    edge_index = torch.randint(NUM_NODES, (2, NUM_EDGES), generator=random)
    return Data(edge_index=edge_index[:, edge_index[1].argsort()], y=torch.arange(NUM_NODES) % 5, **features)


def features():
    """Node and edge features of several widths, shapes and dtypes."""
    return {
        "x": make_tensor((NUM_NODES, 128), torch.float32),
        "image": make_tensor((NUM_NODES, 3, 5), torch.bfloat16, "narrow"),
        "edge_attr": make_tensor((NUM_EDGES, 16), torch.float32, "narrow", seed=2),
    }


USES = {
    "product": lambda x: F.linear(x, torch.ones(4, 128)),
    "matmul": lambda x: x @ torch.ones(128, 4),
    "by a tensor": lambda x: torch.ones(300, 128) * x,
    "sum": lambda x: x + 1,
    "mean": lambda x: x.mean(),
    "rows": lambda x: x[:3],
    "length": len,
    "array": np.asarray,
    "keyword": lambda x: torch.nn.functional.relu(input=x),
    "SAGEConv": lambda x: SAGEConv(128, 4)(x, torch.zeros(2, 1, dtype=torch.int64)),
    "GATConv": lambda x: GATConv(128, 4)(x, torch.zeros(2, 1, dtype=torch.int64)),
    "stack": lambda x: torch.stack([x, x]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_features_without_their_transform(use):
    """What a graph has in their place says which transform brings them, in the graph and its copies, and in batches."""
    data = graph(x=features()["x"])
    attach(data)
    batch = next(iter(loader(data)))
    for held in (data, batch, pickle.loads(pickle.dumps(data)), copy.deepcopy(data).to("cpu")):
        assert held.x.shape == (300, 128) and repr(held.x) == "[300, 128] in a table" and "x=[300, 128]" in repr(held)
        with pytest.raises(RuntimeError, match="'x' is in a table: give what attach returned to the loader"):
            use(held.x)


def test_widths_of_features_are_still_known():
    data, plain = graph(**features()), graph(**features())
    attach(data, ["x", "edge_attr"])
    for name in ("num_features", "num_edge_features", "num_nodes", "num_edges"):
        assert getattr(data, name) == getattr(plain, name)


def test_stand_ins_of_types_and_edges():
    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(50, 8), torch.randn(40, 8)
    data[RATING].edge_index = torch.zeros(2, 60, dtype=torch.int64)
    data[RATING].edge_attr = torch.randn(60, 4)
    attach(data, ["x", "edge_attr"])
    for held, what in (
        (data["item"].x, "'x' of 'item'"),
        (data[RATING].edge_attr, "'edge_attr' of ('user', 'rates', "),
    ):
        with pytest.raises(RuntimeError, match=re.escape(what) + ".* is in a table"):
            torch.relu(held)
    with pytest.raises(RuntimeError, match="'x' of 'user' is in a table"):
        attach(data)


def loader(data, sampled=None, **options):
    sampled = data if sampled is None else sampled
    sampler = Neighbors(sampled.edge_index, NUM_NODES)
    return NodeLoader(data, node_sampler=sampler, input_nodes=SEEDS, batch_size=24, **options)


def batches(*args, **options):
    torch.manual_seed(3)
    return list(loader(*args, **options))


def assert_same_batches(got, wanted, names):
    assert len(got) == len(wanted) == 3
    for a, b in zip(got, wanted):
        assert torch.equal(a.n_id, b.n_id) and a.num_nodes == b.num_nodes
        for name in names:
            assert_same_bits(a[name], b[name])


# ---- attach and FetchFeatures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("filter_per_worker", [None, False])
def test_batches_are_the_same(workers, filter_per_worker):
    """Rows come in worker processes too, on the CPU."""
    names = list(features())
    plain, data = graph(**features()), graph(**features())
    fetch = attach(data, names)
    assert all("in a table" in repr(data[name]) for name in names) and data.num_nodes == NUM_NODES
    assert set(fetch.nodes) == {"x", "image"} and set(fetch.edges) == {"edge_attr"}
    options = {"num_workers": workers, "filter_per_worker": filter_per_worker}
    assert_same_batches(batches(data, transform=fetch, **options), batches(plain, **options), names)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_through_a_cache_are_the_same(workers):
    names = [*features(), "time"]
    times = {"time": torch.rand(NUM_NODES)}
    plain, data = graph(**features(), **times), graph(**features(), **times)
    fetch = attach(data, names, device="cpu", cache_bytes=20_000)
    cache = fetch.nodes["x"]
    assert isinstance(cache, ibp.RowCache) and isinstance(fetch.nodes["time"], ibp.CompressedTensor)
    assert_same_batches(batches(data, transform=fetch, num_workers=workers), batches(plain, num_workers=workers), names)
    if not workers:  # whose hits nobody counts
        assert 0.3 < cache.stats().hit_rate < 1
    other = FetchFeatures({"x": ibp.RowCache(cache.table, 0, devices="cpu")}, device="cpu")
    assert_same_batches(batches(data, transform=other), batches(plain), ["x"])


def test_losses_are_the_same():
    """GraphSAGE on a graph that is attached, and on one that is not."""

    def losses(data, **options):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([SAGEConv(128, 16), SAGEConv(16, 5)])
        optimizer, found = torch.optim.Adam(layers.parameters(), 0.01), []
        for batch in batches(data, **options):
            out = layers[1](layers[0](batch.x, batch.edge_index).relu(), batch.edge_index)
            loss = F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    x = torch.randn(NUM_NODES, 128)
    data = graph(x=x)
    fetch = attach(data, scheme="planes")
    assert fetch.nodes["x"].scheme == "planes"
    found = losses(data, transform=fetch)
    assert found == losses(graph(x=x)) and len(set(found)) == 3


def test_hetero_data():
    def hetero():
        made, random = HeteroData(), torch.Generator().manual_seed(4)
        made["user"].x = make_tensor((50, 64), torch.float32)
        made["item"].x, made["item"].y = make_tensor((40, 3, 8), torch.bfloat16), torch.arange(40)
        made[RATING].edge_index = torch.stack([torch.randint(n, (400,), generator=random) for n in (50, 40)])
        made[RATING].edge_attr = make_tensor((400, 8), torch.float32)
        return made

    plain, data = hetero(), hetero()
    fetch = attach(data, ["x", "edge_attr"])
    assert set(fetch.nodes) == {"user", "item"} and set(fetch.edges) == {RATING}
    assert (data["user"].num_nodes, data["item"].num_nodes) == (50, 40)

    def run(data, **options):
        sampler = HeteroNeighbors(plain[RATING].edge_index)
        return list(NodeLoader(data, sampler, input_nodes=("item", torch.arange(30)), batch_size=12, **options))

    for workers in (0, 2):
        for a, b in zip(run(data, transform=fetch, num_workers=workers), run(plain), strict=True):
            assert_same_bits(a["user"].x, b["user"].x)
            assert_same_bits(a["item"].x, b["item"].x)
            assert_same_bits(a[RATING].edge_attr, b[RATING].edge_attr)
    with pytest.raises(TypeError, match="the batch is a Data; these features are of a HeteroData"):
        fetch(graph())
    with pytest.raises(KeyError, match="no type 'author'; it has \\['user'"):
        FetchFeatures({"author": {"x": torch.zeros(3, 4)}})(data)
    with pytest.raises(KeyError, match=r"no n_id to fetch 'x' of 'user' by.*set data\['user'\].n_id = torch.arange"):
        fetch(data)


def test_of_types_that_share_no_name():
    data = HeteroData()
    data["user"].x, data["item"].feat = torch.zeros(3, 4), torch.ones(2, 8)
    fetch = attach(data, ("x", "feat"))
    data["user"].n_id, data["item"].n_id = torch.tensor([2]), torch.tensor([1, 0])
    batch = fetch(data)
    assert batch["user"].x.shape == (1, 4) and batch["item"].feat.shape == (2, 8)


def test_tables_are_given_as_they_are():
    found = features()
    table = ibp.compress(found["x"])
    fetch = FetchFeatures({"x": table, "image": found["image"]}, {"edge_attr": found["edge_attr"].numpy()})
    assert fetch.nodes["x"] is table
    assert_same_batches(batches(graph(num_nodes=NUM_NODES), transform=fetch), batches(graph(**found)), list(found))
    assert "x" in repr(fetch) and "edge_attr" in repr(fetch)


def test_pickled_and_composed():
    fetch = pickle.loads(pickle.dumps(attach(graph(**features()), ["x", "edge_attr"])))
    data = graph(num_nodes=NUM_NODES)
    got = batches(data, transform=Compose([fetch, lambda batch: batch]))
    assert_same_batches(got, batches(graph(**features())), ["x", "edge_attr"])


def test_other_loaders():
    """Those whose batches have no n_id slice one that the data has."""
    plain, data = graph(**features()), graph(**features())
    data.n_id = torch.arange(NUM_NODES)
    fetch = attach(data)
    torch.manual_seed(5)
    wanted = list(RandomNodeLoader(plain, 4, shuffle=True))
    torch.manual_seed(5)
    for a, b in zip(RandomNodeLoader(data, 4, shuffle=True), wanted, strict=True):
        assert_same_bits(fetch(a).x, b.x)
    cached = CachedLoader(loader(data, transform=fetch), device="cpu")
    assert_same_bits(next(iter(cached)).x, plain.x[next(iter(cached)).n_id])


def test_a_batch_without_ids():
    with pytest.raises(KeyError, match="the batch has no n_id.*set data.n_id = torch.arange\\(data.num_nodes\\)"):
        FetchFeatures({"x": torch.zeros(3, 4)})(graph())
    with pytest.raises(KeyError, match="the batch has no e_id.*num_edges"):
        FetchFeatures(edges={"w": torch.zeros(3, 4)})(graph())


@pytest.mark.parametrize("ids", [[NUM_NODES], [-1], [0, 1 << 40]])
def test_ids_out_of_range(ids):
    with pytest.raises(IndexError, match=f"'x': ids.*wanted 0 to {NUM_NODES - 1}"):
        FetchFeatures({"x": features()["x"]})(Data(n_id=torch.tensor(ids)))


def test_features_that_the_batch_has_already():
    with pytest.raises(ValueError, match="the batch has 'x' already: take it out"):
        batches(graph(**features()), transform=FetchFeatures({"x": features()["x"]}))


def test_after_close():
    data = graph(**features())
    with attach(data) as fetch:
        batches(data, transform=fetch)
    with pytest.raises(RuntimeError, match="freed by close"):
        batches(data, transform=fetch)


def test_close_gives_the_graph_its_features_back():
    found = features()
    found["image"], replaced = found["image"].float().numpy(), torch.zeros(NUM_NODES, 2)
    data, plain = graph(**found, other=torch.ones(NUM_NODES, 4)), graph(**found, other=replaced)
    with attach(data, [*found, "other"]) as fetch:
        kept, copied = copy.deepcopy(data), copy.copy(fetch)
        data.other = replaced
    assert data.keys() == plain.keys() and list(data.to_dict()) == list(plain.to_dict())
    assert data.num_nodes == NUM_NODES and data.other is replaced
    for name, value in found.items():
        assert type(data[name]) is type(value)
        assert_same_bits(torch.as_tensor(data[name]), torch.as_tensor(value))
    assert "in a table" in repr(kept.x)
    copied.close()
    fetch.close()
    again = attach(data)
    del data
    again.close()  # whose graph is gone
    assert again.nodes == {}


def test_close_of_types_and_of_counted_nodes():
    data = HeteroData()
    user, item = torch.randn(50, 8), torch.randn(40, 8)
    data["user"].x, data["item"].x, data["item"].num_nodes = user, item, 40
    attach(data).close()
    assert torch.equal(data["user"].x, user) and torch.equal(data["item"].x, item)
    assert "num_nodes" in data["item"] and "num_nodes" not in data["user"]


def test_a_cache_without_a_device(monkeypatch):
    data = graph(x=torch.zeros(NUM_NODES, 200), edge_attr=torch.zeros(NUM_EDGES, 4))
    with monkeypatch.context() as patch:
        patch.setattr(ibp, "cuda_is_available", lambda: False)
        with pytest.raises(ValueError, match="no device, and there is no CUDA device; wanted device="):
            attach(data, cache_bytes=1000)
    assert isinstance(data.x, torch.Tensor) and len(data.x) == NUM_NODES and "num_nodes" not in data
    attach(data, "edge_attr", cache_bytes=1000).close()  # features of edges have no caches


def test_a_cache_on_the_current_gpu(cuda):
    data = graph(x=torch.zeros(NUM_NODES, 200))
    with attach(data, cache_bytes=20_000) as fetch:
        assert fetch.device == cuda and fetch.nodes["x"].devices == (cuda,)
        (first, *_) = batches(data, transform=fetch)
        assert first.x.device == cuda and not first.x.any()
    assert data.x.device.type == "cpu" and not data.x.any()


@pytest.mark.parametrize(
    "error, message, call",
    [
        (TypeError, "data is a Tensor", lambda: attach(torch.zeros(3))),
        (
            KeyError,
            "no 'feat'; it has \\['edge_index', 'x'",
            lambda: attach(graph(x=torch.zeros(NUM_NODES, 2)), "feat"),
        ),
        (
            ValueError,
            r"'bad' has shape \[7, 2\]; wanted a row for each",
            lambda: attach(graph(num_nodes=NUM_NODES, bad=torch.zeros(7, 2)), "bad"),
        ),
        (TypeError, "'x' is a str; wanted a tensor", lambda: attach(graph(x="name"))),
        (TypeError, "nodes\\['x'\\] is a list", lambda: FetchFeatures({"x": [1, 2]})),
        (TypeError, "the features are a list", lambda: FetchFeatures([1, 2])),
        (ValueError, "some are not", lambda: FetchFeatures({"x": torch.zeros(2)}, {RATING: {"w": torch.zeros(2)}})),
        (ValueError, "device is 'nowhere'", lambda: FetchFeatures(device="nowhere")),
    ],
)
def test_what_attach_refuses(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_what_attach_refuses_stays_as_it_was():
    data = graph(x=torch.zeros(NUM_NODES, 2), bad=torch.zeros(7, 2))
    with pytest.raises(ValueError, match="'bad' has shape"):
        attach(data, ["x", "bad"])
    assert "x" in data


def test_rows_for_a_gpu_in_workers():
    """Which have no CUDA once the main process has: the error says what to do."""
    data = graph(**features())
    fetch = attach(data)
    fetch.device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="'x' cannot be fetched to cuda:0 in a worker.*filter_per_worker=False"):
        batches(data, transform=fetch, num_workers=1)


# ---- FeatureStore --------------------------------------------------------------------------------------------------


class Edges(GraphStore):
    def _put_edge_index(self, edge_index, edge_attr):
        raise NotImplementedError

    _get_edge_index = _remove_edge_index = _put_edge_index

    def get_all_edge_attrs(self):
        return []


def filled_store(**options):
    store = FeatureStore(**options)
    for name in ("x", "image"):
        assert store.put_tensor(features()[name], group_name=None, attr_name=name, index=None)
    return store


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_a_store(workers):
    found, data = features(), graph(**features())
    got = batches((filled_store(), Edges()), data, num_workers=workers)
    for batch in got:
        assert_same_bits(batch.x, found["x"][batch.n_id])
        assert_same_bits(batch.image, found["image"][batch.n_id])


@pytest.mark.parametrize(
    "index", [torch.tensor([3, 0, 3]), np.array([5]), slice(2, 9), 4, None, torch.arange(NUM_NODES) % 3 == 0]
)
def test_every_index_of_a_store(index):
    store, x = filled_store(), features()["x"]
    assert_same_bits(store.get_tensor(None, "x", index), x if index is None else x[index])
    if not isinstance(index, (torch.Tensor, np.ndarray)):
        assert_same_bits(store[None, "x", index], x if index is None else x[index])


def test_a_store_is_asked():
    store, found = filled_store(scheme="planes"), features()
    table = ibp.compress(found["edge_attr"])
    store["paper", "w", None] = table
    store["paper", "v", None] = found["image"].float().numpy()
    assert store.table("paper", "w") is table and store.table(None, "x").scheme == "planes" and len(store) == 4
    assert store.get_tensor_size(group_name=None, attr_name="image") == (NUM_NODES, 3, 5)
    assert store.get_tensor_size(group_name=None, attr_name="none") is None
    assert [(attr.group_name, attr.attr_name) for attr in store.get_all_tensor_attrs()] == [
        (None, "x"),
        (None, "image"),
        ("paper", "w"),
        ("paper", "v"),
    ]
    ids = torch.tensor([7, 7, 1])
    assert_same_bits(store.view("paper").w[ids], found["edge_attr"][ids])
    assert_same_bits(store.view("paper")["v"](), found["image"].float())
    both = store.multi_get_tensor([TensorAttr(None, "x", ids), TensorAttr("paper", "w", ids)])
    assert_same_bits(both[0], found["x"][ids])
    assert_same_bits(both[1], found["edge_attr"][ids])
    array = store.get_tensor("paper", "w", np.array([1]), convert_type=True)
    assert isinstance(array, np.ndarray) and array.shape == (1, 16)  # PyG itself takes no longer arrays
    assert "image" in repr(store) and "paper" in repr(store)


def test_a_store_after_removal_and_close():
    store = filled_store()
    assert store.update_tensor(torch.ones(4, 8), None, "x", None) and store.get_tensor_size(None, "x") == (4, 8)
    assert store.remove_tensor(None, "x", None) is True and store.remove_tensor(None, "x", None) is False
    with pytest.raises(KeyError, match=r"no feature \(None, 'x'\); there are \[\(None, 'image'\)\]"):
        store.get_tensor(None, "x", None)
    del store[None, "image"]
    with store:
        assert len(store) == 0
    for call in (
        lambda: store.get_tensor(None, "image", None),
        lambda: store.put_tensor(torch.zeros(2, 2), None, "x", None),
        store.get_all_tensor_attrs,
    ):
        with pytest.raises(RuntimeError, match="freed by close"):
            call()
    assert repr(store) == "FeatureStore()"


def test_what_a_store_refuses():
    store = filled_store()
    with pytest.raises(ValueError, match=r"index of \(None, 'x'\) is a Tensor; wanted None: rows of tables are fixed"):
        store.put_tensor(torch.zeros(1, 128), None, "x", torch.tensor([0]))
    with pytest.raises(TypeError, match=r"\(None, 'y'\) is a list"):
        store.put_tensor([1, 2], None, "y", None)
    with pytest.raises(IndexError, match=rf"\(None, 'x'\): ids\[1\] is {NUM_NODES}"):
        store.get_tensor(None, "x", torch.tensor([0, NUM_NODES]))
    with pytest.raises(IndexError):
        store.get_tensor(None, "x", NUM_NODES)
    with pytest.raises(TypeError, match="ids has dtype torch.float32"):
        store.get_tensor(None, "x", torch.tensor([0.0]))
    store._device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="cannot be fetched to cuda:0 in a worker"):
        batches((store, Edges()), graph(), num_workers=1)


# ---- the example ---------------------------------------------------------------------------------------------------


def test_the_example(capsys):
    path = ROOT / "examples" / "gnn_pyg.py"
    assert len(path.read_text().splitlines()) < 65
    runpy.run_path(str(path))
    same = "True|False" if torch.cuda.is_available() else "True"
    pattern = (
        rf"losses \d\.\d+ to 0\.\d+, the same bits: ({same}); features: the same, \d+% of their rows from the cache\n"
    )
    assert re.fullmatch(pattern, capsys.readouterr().out)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_on_a_gpu(cuda, workers):
    """The transform runs in the main process; the workers sample."""
    plain, data = graph(**features()), graph(**features())
    fetch = attach(data, list(features()), device=cuda)
    assert fetch.nodes["x"].is_pinned()
    got = batches(data, transform=fetch, num_workers=workers, filter_per_worker=False)
    for a, b in zip(got, batches(plain, num_workers=workers), strict=True):
        for name in features():
            assert a[name].device == cuda
            assert_same_bits(a[name].cpu(), b[name])
        assert a.to(cuda).x.data_ptr() == a.x.data_ptr()


@pytest.mark.parametrize("modules", ["ibp, torch_geometric", "torch_geometric, ibp"])
def test_torch_functions_of_tables(modules):
    """PyG replaces torch.index_select by a function of its own: before or after ibp is imported."""
    code = f"""
import torch, {modules}
x = torch.randn(40, 8)
table, ids = ibp.compress(x, memory="host"), torch.tensor([3, 1, 39])
assert torch.index_select is not torch._C._VariableFunctions.index_select
for result in (torch.index_select(table, 0, ids), torch.nn.functional.embedding(ids, table)):
    assert torch.equal(result, x[ids])
compiled = torch.compile(lambda t, ids: torch.index_select(t, 0, ids), fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(table, ids), x[ids])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def test_workers_after_cuda_began(cuda):
    """A forked process reads the pinned rows and decodes them on the CPU."""
    data = graph(**features())
    fetch = attach(data)
    assert_same_bits(fetch.nodes["x"].decompress(device=cuda).cpu(), features()["x"])
    got = batches(data, transform=fetch, num_workers=2)
    assert_same_batches(got, batches(graph(**features()), num_workers=2), ["x"])
    with pytest.raises(RuntimeError, match="in a worker process.*filter_per_worker=False"):
        fetch.device = cuda
        batches(data, transform=fetch, num_workers=1)


def test_a_side_stream(cuda):
    data, stream = graph(**features()), torch.cuda.Stream()
    fetch = attach(data, device=cuda)
    with torch.cuda.stream(stream):
        got = batches(data, transform=fetch)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_batches([batch.cpu() for batch in got], batches(graph(**features())), ["x"])


def test_a_store_on_a_gpu(cuda):
    store, x = filled_store(device=cuda), features()["x"]
    for index in (torch.tensor([3, 0]), torch.tensor([3, 0], device=cuda), slice(1, 4), None):
        rows = store.get_tensor(None, "x", index)
        assert rows.device == cuda
        assert_same_bits(rows.cpu(), x if index is None else x[index.cpu() if torch.is_tensor(index) else index])
