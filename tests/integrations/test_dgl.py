"""ibp.integrations.dgl: features of DGL's graphs in compressed tables, against those in plain tensors."""

import pickle
import re
import runpy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits, make_tensor
from native import ROOT

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")]
ibp_dgl = pytest.importorskip("ibp.integrations.dgl", reason="DGL is not installed", exc_type=ImportError)
dgl = pytest.importorskip("dgl")

from ibp.integrations.dgl import attach, close  # noqa: E402

NUM_NODES, NUM_EDGES = 300, 1500
SEEDS = torch.arange(64)
RATES, FOLLOWS = ("user", "rates", "item"), ("user", "follows", "user")


def node_features():
    return make_tensor((NUM_NODES, 128), torch.float32)


def image_features():
    return make_tensor((NUM_NODES, 3, 5), torch.bfloat16, "narrow")


def edge_features():
    return make_tensor((NUM_EDGES, 16), torch.float32, "narrow", seed=2)


def graph(attached=True, **options):
    """A graph with two features of nodes and one of edges, in tables or in plain tensors."""
    random = torch.Generator().manual_seed(1)
    made = dgl.graph(tuple(torch.randint(NUM_NODES, (2, NUM_EDGES), generator=random)), num_nodes=NUM_NODES)
    made.ndata["feat"], made.ndata["image"], made.edata["w"] = node_features(), image_features(), edge_features()
    if attached:
        attach(made, "feat", **options)
        attach(made, "image", **options)
        attach(made, "w", edges=True, **options)
    return made


def hetero(attached=True):
    random = torch.Generator().manual_seed(4)
    ends = [torch.randint(n, (400,), generator=random) for n in (50, 40, 50)]
    made = dgl.heterograph(
        {RATES: (ends[0], ends[1]), FOLLOWS: (ends[0], ends[2])}, num_nodes_dict={"user": 50, "item": 40}
    )
    made.nodes["user"].data["feat"] = make_tensor((50, 64), torch.float32)
    made.nodes["item"].data["feat"] = make_tensor((40, 8), torch.float32, "narrow")
    made.edges["rates"].data["w"] = make_tensor((400, 16), torch.float32)
    if attached:
        attach(made, "feat", ntype="user")
        attach(made, "feat", ntype="item")
        attach(made, "w", etype="rates")
    return made


def loader(made, seeds=SEEDS, batch_size=24, num_workers=0, **prefetch):
    torch.manual_seed(0)
    dgl.seed(0)
    sampler = dgl.dataloading.NeighborSampler([5, 3], **prefetch)
    return dgl.dataloading.DataLoader(made, seeds, sampler, batch_size=batch_size, num_workers=num_workers)


def is_attached(made, name="feat"):
    return made._node_frames[0]._columns[name].is_attached


PREFETCH = {"prefetch_node_feats": ["feat", "image"], "prefetch_edge_feats": ["w"]}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [PREFETCH, {}], ids=["prefetched", "read"])
def test_blocks_are_the_same(workers, prefetch):
    """Features of a worker's blocks are fetched in the main process."""
    made, plain = graph(), graph(attached=False)
    got = list(loader(made, num_workers=workers, **prefetch))
    if not prefetch:
        column = got[0][2][0].srcnodes["_N"].data._graph._node_frames[0]._columns["feat"]
        assert column.is_attached and column.index is not None  # not yet fetched
    num_batches = 0
    for nodes, _, blocks in got:
        assert_same_bits(blocks[0].srcdata["feat"], plain.ndata["feat"][nodes])
        assert_same_bits(blocks[0].srcdata["image"], plain.ndata["image"][nodes])
        for block in blocks:
            assert_same_bits(block.edata["w"], plain.edata["w"][block.edata[dgl.EID]])
        if not prefetch:
            assert_same_bits(blocks[-1].dstdata["feat"], plain.ndata["feat"][blocks[-1].dstdata[dgl.NID]])
        num_batches += 1
    assert num_batches == 3 and is_attached(made)


def test_losses_are_the_same():
    """GraphSAGE on a graph that is attached, and on one that is not."""

    def losses(made):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([dgl.nn.SAGEConv(128, 16, "mean"), dgl.nn.SAGEConv(16, 5, "mean")])
        optimizer, found = torch.optim.Adam(layers.parameters(), 0.01), []
        for _, seeds, blocks in loader(made, prefetch_node_feats=["feat"]):
            out = layers[1](blocks[1], layers[0](blocks[0], blocks[0].srcdata["feat"]).relu())
            loss = F.cross_entropy(out, seeds % 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    made, plain = graph(), graph(attached=False)
    x = torch.randn(NUM_NODES, 128)
    made.ndata["feat"] = plain.ndata["feat"] = x
    assert attach(made, "feat", scheme="planes").table.scheme == "planes"
    found = losses(made)
    assert found == losses(plain) and len(set(found)) == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [True, False])
def test_heterographs(workers, prefetch):
    made, plain = hetero(), hetero(attached=False)
    asked = {
        "prefetch_node_feats": {"user": ["feat"]},
        "prefetch_edge_feats": {RATES: ["w"]},
    }
    got = loader(made, {"item": torch.arange(30)}, 10, workers, **(asked if prefetch else {}))
    num_batches = 0
    for nodes, _, blocks in got:
        assert_same_bits(blocks[0].srcnodes["user"].data["feat"], plain.nodes["user"].data["feat"][nodes["user"]])
        edges = blocks[0].edges["rates"].data
        assert_same_bits(edges["w"], plain.edges["rates"].data["w"][edges[dgl.EID]])
        num_batches += 1
    assert num_batches == 3


def test_whole_features():
    made, plain = graph(), graph(attached=False)
    for _ in range(2):
        for name in ("feat", "image"):
            assert_same_bits(made.ndata[name], plain.ndata[name])
            assert is_attached(made, name)
    assert (
        made.node_attr_schemes() == plain.node_attr_schemes() and made.edge_attr_schemes() == plain.edge_attr_schemes()
    )
    ids = torch.tensor([7, 0, 7])
    assert_same_bits(made.nodes[ids].data["feat"], plain.ndata["feat"][ids])
    assert_same_bits(made.edges[ids].data["w"], plain.edata["w"][ids])
    assert "feat" in repr(made) and "CompressedTensor" in repr(made._node_frames[0]._columns["feat"])
    for g in (made, plain):
        g.update_all(dgl.function.copy_u("feat", "m"), dgl.function.sum("m", "h"))
    assert_same_bits(made.ndata["h"], plain.ndata["h"])


def test_subgraphs():
    made, plain = graph(), graph(attached=False)
    ids = torch.arange(10, 90, 3)
    for take in (
        lambda g: dgl.node_subgraph(g, ids),
        lambda g: dgl.in_subgraph(g, ids),
        lambda g: dgl.edge_subgraph(g, ids),
        lambda g: dgl.node_subgraph(dgl.node_subgraph(g, ids), torch.tensor([3, 1, 4])),
        lambda g: dgl.to_block(dgl.in_subgraph(g, ids)),
        lambda g: dgl.reverse(g, copy_edata=True),
        lambda g: g.clone(),
        lambda g: g.local_var(),
        lambda g: pickle.loads(pickle.dumps(g)),
        lambda g: pickle.loads(pickle.dumps(dgl.node_subgraph(g, ids))),
        lambda g: dgl.batch([g, g]),
        lambda g: dgl.unbatch(dgl.batch([g, g]))[1],
        lambda g: dgl.to_float(dgl.to_double(dgl.node_subgraph(g, ids))),
    ):
        a, b = take(made), take(plain)
        assert_same_bits(a.srcdata["feat"], b.srcdata["feat"])
        assert_same_bits(a.edata["w"], b.edata["w"])
        assert_same_bits(a.srcdata["feat"], b.srcdata["feat"])  # once it is read
    assert is_attached(made) and is_attached(made.clone()) and is_attached(pickle.loads(pickle.dumps(made)))


def test_other_dtypes():
    made, plain = graph(), graph(attached=False)
    for change in (dgl.to_half, lambda g: dgl.to_half(dgl.to_double(g)), lambda g: dgl.to_float(dgl.to_half(g))):
        a, b = change(made), change(plain)
        assert_same_bits(a.ndata["feat"], b.ndata["feat"])
        assert_same_bits(a.subgraph(SEEDS).ndata["feat"], b.subgraph(SEEDS).ndata["feat"])
        assert_same_bits(first_block(a, **PREFETCH).srcdata["feat"], first_block(b).srcdata["feat"])
        assert_same_bits(pickle.loads(pickle.dumps(a)).ndata["feat"], b.ndata["feat"])
    assert is_attached(made) and is_attached(dgl.to_half(made))


def first_block(made, **prefetch):
    return next(iter(loader(made, **prefetch)))[2][0]


def test_a_loader_of_a_subgraph():
    ids = torch.arange(0, NUM_NODES, 2)
    a, b = (dgl.node_subgraph(g, ids) for g in (graph(), graph(attached=False)))
    assert_same_bits(first_block(a, **PREFETCH).srcdata["feat"], first_block(b).srcdata["feat"])


@pytest.mark.parametrize(
    "write",
    [
        lambda g: g.nodes[torch.tensor([1, 2])].data.update({"feat": torch.ones(2, 128)}),
        lambda g: g.add_nodes(2, {"feat": torch.ones(2, 128)}),
        lambda g: g.add_nodes(1),
    ],
    ids=["rows", "new rows", "zeros"],
)
def test_writing_makes_a_plain_tensor(write, monkeypatch):
    made, plain, warned = graph(), graph(attached=False), []
    monkeypatch.setattr(dgl.base, "dgl_warning", warned.append)
    write(made)
    write(plain)
    assert_same_bits(made.ndata["feat"], plain.ndata["feat"])
    assert not is_attached(made) and any("plain tensor from now on" in text for text in warned)


def test_new_edges(monkeypatch):
    monkeypatch.setattr(dgl.base, "dgl_warning", lambda text: None)
    a, b = dgl.add_self_loop(graph()), dgl.add_self_loop(graph(attached=False))
    assert_same_bits(a.edata["w"], b.edata["w"])


def test_replaced_features():
    made = graph()
    made.ndata["feat"] = torch.ones(NUM_NODES, 4)
    assert torch.equal(made.ndata["feat"], torch.ones(NUM_NODES, 4))
    with pytest.raises(ValueError, match="node feature 'feat' is not attached"):
        close(made, "feat")


def test_detach():
    made, taken = graph(), None
    taken = dgl.node_subgraph(made, SEEDS)
    for name, arguments, wanted in (
        ("feat", {}, node_features()),
        ("image", {}, image_features()),
        ("w", {"edges": True}, edge_features()),
    ):
        assert_same_bits(close(made, name, **arguments), wanted)
        assert_same_bits((made.edata if arguments else made.ndata)[name], wanted)
        with pytest.raises(ValueError, match="is not attached"):
            close(made, name, **arguments)
    assert type(made._node_frames[0]._columns["feat"]) is dgl.frame.Column
    assert_same_bits(taken.ndata["feat"], node_features()[SEEDS])  # it has the table
    attach(made, "feat")
    assert_same_bits(made.ndata["feat"], node_features())
    of_types = hetero()
    assert close(of_types, "feat", ntype="item").shape == (40, 8) and close(of_types, "w", etype=RATES).shape[0] == 400


def test_what_attach_gives_undoes_it():
    made = graph(attached=False)
    with attach(made, "feat") as feature:
        assert feature.table.shape == node_features().shape
        assert made._node_frames[0]._columns["feat"].is_attached
    column = made._node_frames[0]._columns["feat"]
    assert isinstance(column.storage, torch.Tensor)
    assert_same_bits(made.ndata["feat"], node_features())
    feature.close()
    assert made._node_frames[0]._columns["feat"] is column
    with pytest.raises(ValueError, match="node feature 'feat' is not attached"):
        close(made, "feat")


def test_a_table_is_taken_as_it_is():
    made, table = graph(attached=False), ibp.compress(node_features(), scheme="planes")
    assert attach(made, "feat", table=table).table is table
    assert attach(made, "new", table=table).table is table
    assert_same_bits(made.ndata["new"], node_features())


def test_rows_through_a_cache():
    made = graph(attached=False)
    cache = ibp.RowCache(ibp.compress(node_features()), 20_000, torch.rand(NUM_NODES), devices="cpu")
    assert attach(made, "feat", table=cache).table is cache
    assert_same_bits(made.ndata["feat"], node_features())
    assert_same_bits(made.subgraph(SEEDS).ndata["feat"], node_features()[SEEDS])
    assert 0 < cache.stats().hit_rate < 1
    assert_same_bits(close(made, "feat"), node_features())


def test_ids_out_of_range():
    column = graph()._node_frames[0]._columns["feat"]
    for ids in ([NUM_NODES], [-1]):
        with pytest.raises(IndexError, match=f"wanted 0 to {NUM_NODES - 1}"):
            column.fetch(torch.tensor(ids), "cpu")


@pytest.mark.parametrize(
    "error, message, call",
    [
        (TypeError, "graph is a Tensor; wanted a dgl.DGLGraph", lambda: attach(torch.zeros(3), "x")),
        (TypeError, "table is a Tensor", lambda: attach(graph(False), "x", table=torch.zeros(3))),
        (KeyError, "no node feature 'none'; it has \\['feat', 'image'\\]", lambda: attach(graph(False), "none")),
        (KeyError, "no edge feature 'feat'", lambda: attach(graph(False), "feat", edges=True)),
        (KeyError, "the graph has 2 types of nodes; wanted one of", lambda: attach(hetero(False), "feat")),
        (KeyError, "the graph has 2 types of edges", lambda: attach(hetero(False), "w", edges=True)),
        (KeyError, "ntype is 'author'; wanted one of", lambda: attach(hetero(False), "feat", ntype="author")),
        (KeyError, "etype is 'reads'; wanted one of", lambda: attach(hetero(False), "w", etype="reads")),
        (ValueError, "ntype is 'user', but", lambda: attach(hetero(False), "w", ntype="user", edges=True)),
        (ValueError, "node feature 'feat' is attached already", lambda: attach(graph(), "feat")),
        (
            ValueError,
            r"shape \[3, 4\]; wanted 300 rows, one for each of the nodes",
            lambda: attach(graph(False), "x", table=ibp.compress(torch.zeros(3, 4))),
        ),
        (
            ValueError,
            "is a table already, but options are given: scheme",
            lambda: attach(graph(False), "x", table=ibp.compress(node_features()), scheme="ibp"),
        ),
        (ValueError, "scheme is 'none'", lambda: attach(graph(False), "feat", scheme="none")),
    ],
    ids=range(13),
)
def test_what_attach_refuses(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_rows_of_a_gpu_in_workers(monkeypatch):
    made = graph()
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    with pytest.raises(RuntimeError, match="cannot be fetched to cuda:0 in a worker process.*prefetch_node_feats"):
        made._node_frames[0]._columns["feat"].fetch(torch.tensor([0]), "cuda:0")


def test_dgl_is_imported_without_graphbolt():
    """`import dgl` fails with a torch that GraphBolt has no binary for; after the integration it does not."""
    if not hasattr(sys.modules["dgl.graphbolt"], "Feature"):
        plain = subprocess.run([sys.executable, "-c", "import dgl"], capture_output=True, text=True, timeout=60)
        assert plain.returncode == 1 and "graphbolt" in plain.stderr.lower()
        assert "Left out by ibp" in sys.modules["dgl.graphbolt"].__doc__
    assert ibp_dgl.dgl is dgl


def test_what_to_pickle_instead_of_an_attached_feature():
    made = graph(attached=False)
    with attach(made, "feat") as feature:
        with pytest.raises(TypeError, match="cannot be pickled or copied: pickle its table, or the graph"):
            pickle.dumps(feature)
        again = pickle.loads(pickle.dumps(made))
        assert_same_bits(again.ndata["feat"], node_features())
        assert_same_bits(pickle.loads(pickle.dumps(feature.table)).decompress(), node_features())


def test_the_example(capsys, set_threads):
    """Also where torch has several threads, which DGL adds with in any order."""
    set_threads(2)
    path = ROOT / "examples" / "gnn_dgl.py"
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path))
    same = "True|False" if torch.cuda.is_available() else "True"
    pattern = rf"losses \d\.\d+ to 0\.\d+, the same bits: ({same}); features: the same\n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


def test_rows_on_a_gpu(cuda):
    """DGL of PyPI knows no GPU: its loaders' part is played here."""
    made = graph()
    column, x = made._node_frames[0]._columns["feat"], node_features()
    assert column.storage.is_pinned()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        rows = column.fetch(SEEDS, cuda)
    rows.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(stream)
    assert rows.device == cuda
    assert_same_bits(rows.cpu(), x[SEEDS])
    moved = column.to(cuda)
    assert moved.data.device == cuda and moved.is_attached
    for index in (SEEDS, SEEDS.to(cuda)):
        taken = moved.subcolumn(index)
        taken.record_stream(stream)
        assert taken.data.device == cuda
        assert_same_bits(taken.data.cpu(), x[SEEDS])
    assert_same_bits(column.subcolumn(SEEDS.to(cuda)).data.cpu(), x[SEEDS])
    column.pin_memory_()
    column.unpin_memory_()
    assert_same_bits(next(iter(loader(made, num_workers=1, **PREFETCH)))[2][0].srcdata["feat"][:24], x[SEEDS[:24]])
    with pytest.raises(ValueError, match="wanted host memory or the graph's device"):
        attach(made, "other", table=ibp.compress(x.to(cuda)))
