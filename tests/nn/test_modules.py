"""ibp.nn: modules over tables beside torch's over tensors; moved, saved, loaded, copied, compiled, under DDP and
FSDP2."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

import ibp
from helpers import assert_same_bits, assert_same_table, embedding

ON_CPU = {"device": "cpu", "memory": "host"}
IDS = torch.tensor([[3, 99], [0, 3]])


class Model(torch.nn.Module):
    """An embedding and a product by fixed weights, then an ordinary layer."""

    def __init__(self, weight, other, compressed=True, **arguments):
        super().__init__()
        if compressed:
            self.embedding = ibp.nn.Embedding(ibp.compress(weight, scheme="planes", **ON_CPU), **arguments)
            self.fixed = ibp.nn.Linear(
                ibp.compress(other, scheme="planes", layout="packed", **ON_CPU), torch.zeros(len(other)), **arguments
            )
        else:
            self.embedding = torch.nn.Embedding.from_pretrained(weight)
            self.fixed = torch.nn.Linear(other.shape[1], len(other))
            self.fixed.weight.data, self.fixed.bias.data = other, torch.zeros(len(other))
        self.last = torch.nn.Linear(len(other), 3)
        for parameter in self.last.parameters():
            torch.nn.init.constant_(parameter, 0.5)

    def forward(self, ids):
        return self.last(self.fixed(self.embedding(ids)))


def make_model(seed=0, **arguments):
    return Model(embedding(100, 32, seed=seed), embedding(24, 32, seed=seed + 1), **arguments)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_they_compute_what_torchs_do():
    model, torchs = make_model(), make_model(compressed=False)
    assert_same_bits(model(IDS), torchs(IDS))
    (embedded, fixed), other = (model.embedding, model.fixed), torchs.embedding
    assert (embedded.num_embeddings, embedded.embedding_dim) == (other.num_embeddings, other.embedding_dim)
    assert (fixed.out_features, fixed.in_features) == (24, 32)
    assert embedded.weight.scheme == fixed.weight.scheme == "planes"
    assert "([100, 32], torch.float32, scheme='planes', 0.01 of 0.01 MB)" in repr(model), repr(model)
    assert "stays=True" in repr(make_model(stays=True))
    assert [(name, p.shape) for name, p in model.named_parameters()] == [
        (name, p.shape) for name, p in torchs.named_parameters()
    ]
    assert not list(model.buffers())


def test_what_is_no_table():
    table = ibp.compress(embedding(10, 4), **ON_CPU)
    for kind in (ibp.nn.Embedding, ibp.nn.Linear):
        with pytest.raises(TypeError, match="table is a Tensor; wanted an ibp.CompressedTensor"):
            kind(embedding(10, 4))
        with pytest.raises(ValueError, match=r"shape \[4, 5, 6\]; wanted two dimensions"):
            kind(ibp.compress(torch.zeros(4, 5, 6), **ON_CPU))
    with pytest.raises(ValueError, match=r"bias has shape \[4\]; wanted \[10\]"):
        ibp.nn.Linear(table, torch.zeros(4))
    bias = torch.nn.Parameter(torch.ones(10))
    assert ibp.nn.Linear(table, bias).bias is bias and ibp.nn.Linear(table).bias is None


def test_gradients_reach_what_is_ordinary():
    model, torchs = make_model(), make_model(compressed=False)
    torchs.fixed.weight.requires_grad_(False)
    for one in (model, torchs):
        one(IDS).square().sum().backward()
    for (name, parameter), (_, expected) in zip(
        *([p for p in one.named_parameters() if p[1].requires_grad] for one in (model, torchs)), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)
    before = model.embedding.weight
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert model.embedding.weight is before


def test_moving():
    model = make_model()
    table = model.embedding.weight
    assert (
        model.to("cpu") is model and model.embedding.weight is table and model.cpu().float().embedding.weight is table
    )
    for change in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(TypeError, match="keeps its own, torch.float32"):
            change()
    with pytest.raises(TypeError, match="empty_like"):
        model.to_empty(device="cpu")
    staying = make_model(stays=True).double()
    assert staying.embedding.weight.dtype == torch.float32 and staying.last.weight.dtype == torch.float64


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(assign):
    model, other = make_model(), make_model(seed=5)
    assert not torch.equal(model(IDS), other(IDS))
    state = saved(ibp.nn.coded_state_dict(model))
    assert list(state) == ["embedding.weight", "fixed.weight", "fixed.bias", "last.weight", "last.bias"]
    assert str(other.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert_same_table(other.embedding.weight, model.embedding.weight)
    assert_same_bits(other(IDS), model(IDS))


@pytest.mark.parametrize("assign", [False, True])
def test_plain_state_dict(assign):
    model, other, torchs = make_model(), make_model(seed=5), make_model(compressed=False)
    state = saved(model.state_dict())
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(torchs.state_dict(), torch.Tensor)
    assert str(torchs.load_state_dict(state)) == "<All keys matched successfully>"
    assert str(other.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert_same_bits(other(IDS), model(IDS))
    assert_same_bits(torchs(IDS), model(IDS))


def test_state_dicts_that_do_not_fit():
    model, state = make_model(), make_model(seed=5).state_dict()
    before = model.embedding.weight
    for change, message in (
        ({"embedding.weight": None}, "Missing key.*embedding.weight"),
        ({"embedding.weigth": torch.zeros(1)}, "Unexpected.*weigth"),
        ({"embedding.weight": [1.0]}, "embedding.weight is a list; wanted an ibp.CompressedTensor or a tensor"),
        ({"embedding.weight": embedding(100, 31)}, r"shape \[100, 31\].*wanted \[100, 32\]"),
        ({"embedding.weight": ibp.compress(embedding(100, 31), **ON_CPU)}, r"shape \[100, 31\].*wanted \[100, 32\]"),
        ({"embedding.weight": ibp.compress(embedding(100, 32).double(), **ON_CPU)}, "float64; wanted"),
    ):
        changed = {name: value for name, value in {**state, **change}.items() if value is not None}
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(changed)
        assert (
            model.embedding.weight is before or "weigth" in message
        )  # torch reports what is too much after loading the rest
        model.embedding.weight = before
    partial = {name: value for name, value in state.items() if not name.startswith("embedding")}
    assert model.load_state_dict(partial, strict=False).missing_keys == ["embedding.weight"]
    assert model.embedding.weight is before


def test_copies():
    model = make_model()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert_same_bits(copied(IDS), model(IDS))
        assert_same_table(copied.embedding.weight, model.embedding.weight)
    assert copy.deepcopy(model).embedding.weight is not model.embedding.weight


@pytest.mark.slow
def test_compiled():
    """From the first call on."""
    torch.compiler.reset()
    model, plain = make_model(), make_model(compressed=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close((compiled(IDS), compiled(IDS[:1])), (plain(IDS), plain(IDS[:1])))


def test_tables_are_prepared_when_they_are_taken(monkeypatch):
    """Made, moved, loaded, set, copied, unpickled: each table of a module, whichever module it is taken by."""
    prepared = []

    def prepare(table):
        prepared.append(table)
        return table

    monkeypatch.setattr(ibp.CompressedTensor, "prepare_linear", prepare)

    def check(model):
        for module in (model.embedding, model.fixed):
            assert any(module.weight is table for table in prepared)
        prepared.clear()

    model, other = make_model(), make_model(seed=5)
    check(model)
    model._apply(lambda x: x.clone())
    check(model)
    model.load_state_dict(other.state_dict())
    check(model)
    model.load_state_dict(ibp.nn.coded_state_dict(other), assign=True)
    check(model)
    model.fixed.weight, model.embedding.weight = other.fixed.weight, other.embedding.weight
    check(model)
    check(copy.deepcopy(model))
    check(pickle.loads(pickle.dumps(model)))


@pytest.fixture
def one_process(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2(one_process):
    """Parameters are sharded; tables stay whole, in each process."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    model, plain = make_model(), make_model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    torch.testing.assert_close(model(IDS), plain(IDS))
    model(IDS).sum().backward()
    state = model.state_dict()
    assert_same_bits(state["embedding.weight"], plain.state_dict()["embedding.weight"])
    assert type(state["last.weight"]).__name__ == "DTensor"
    assert model.last.weight.grad is not None


def test_ddp(one_process):
    model, plain = torch.nn.parallel.DistributedDataParallel(make_model()), make_model()
    torch.testing.assert_close(model(IDS), plain(IDS))
    model(IDS).sum().backward()
    assert model.module.last.weight.grad is not None


@pytest.mark.parametrize("stays", [False, True])
def test_on_a_gpu(cuda, stays):
    weight = embedding(100, 32)
    model = torch.nn.Sequential(
        ibp.nn.Embedding(ibp.compress(weight, memory="pinned"), stays=stays), torch.nn.Linear(32, 3)
    ).to(cuda)
    held = model[0].weight
    assert held.is_pinned() == stays and held.is_cuda != stays
    assert_same_bits(model[0](IDS.to(cuda)).cpu(), weight[IDS])
    state = saved(model.state_dict())
    model.load_state_dict(state)
    assert (
        model[0].weight is not held and model[0].weight.is_pinned() == stays and model[0].weight.device == held.device
    )
    assert_same_bits(model[0](IDS.to(cuda)).cpu(), weight[IDS])
    torch.compiler.reset()
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="aot_eager")(IDS.to(cuda)), model(IDS.to(cuda))
    )
    torch.testing.assert_close(
        model.cpu()(IDS), torch.nn.functional.linear(weight[IDS], model[1].weight, model[1].bias)
    )
