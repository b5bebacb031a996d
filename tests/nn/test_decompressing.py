"""`ibp.nn.decompress`: the modules of a model hold plain weights again, as before `ibp.nn.compress`."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import ibp
from helpers import assert_same_bits, embedding
from ibp.nn._tables import TableModule
from interrupts import interrupt_at
from models import IDS
from test_coded_experts import PlainExperts
from test_compressing import Net, compress


def description_of(model):
    """What a model consists of: all but the values."""
    modules = [(name, type(module), module.training) for name, module in model.named_modules(remove_duplicate=False)]
    parameters = [
        (name, parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad, type(parameter))
        for name, parameter in model.named_parameters()
    ]
    return modules, parameters, repr(model)


def assert_undone(model, plain):
    assert ibp.nn.decompress(model) is model
    assert description_of(model) == description_of(plain)
    for (name, value), (same_name, wanted) in zip(model.state_dict().items(), plain.state_dict().items()):
        assert name == same_name
        assert_same_bits(value, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tie", [False, True])
def test_models_are_as_they_were(dtype, tie):
    model = Net(dtype=dtype, tie=tie)
    model.head.requires_grad_(False)
    plain = copy.deepcopy(model)
    compress(model)
    assert_undone(model, plain)
    assert (model.head.weight is model.embed.weight) == tie
    assert_same_bits(model(IDS), plain(IDS))
    model(IDS).float().sum().backward()
    assert (model.embed.weight.grad is None) == tie and model.blocks[0].up.weight.grad is not None
    assert compress(model.requires_grad_(False).eval()).coded == compress(copy.deepcopy(plain)).coded


def test_interrupted():
    """The model works, and the same call completes what is left."""
    plain = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 64)).bfloat16().eval()
    coded, ids = copy.deepcopy(plain), torch.arange(8)
    ibp.nn.compress(coded, min_bytes=0)
    assert all(isinstance(module, TableModule) for module in coded)
    for moment in itertools.count(0, 3):
        model = copy.deepcopy(coded)
        _, interrupts = interrupt_at(moment, None, lambda: ibp.nn.decompress(model))
        assert_same_bits(model(ids), plain(ids))
        assert_undone(model, plain)
        if not interrupts:
            break
    assert moment > 5


def test_plain_models_stay_as_they_are():
    model, plain = Net(), Net()
    assert_undone(model, plain)
    assert_undone(model, plain)
    with pytest.raises(TypeError, match="model is a str; wanted a torch.nn.Module"):
        ibp.nn.decompress("model")


@pytest.mark.parametrize("module", [nn.Embedding(64, 32, padding_idx=3), nn.Linear(64, 32), nn.EmbeddingBag(64, 32)])
def test_a_module_itself(module):
    kind = getattr(ibp.nn, type(module).__name__)
    coded = (kind.from_linear if kind is ibp.nn.Linear else kind.from_pretrained)(copy.deepcopy(module))
    plain = copy.deepcopy(module)
    plain.weight.requires_grad_(False)
    made = coded.to_torch()
    assert isinstance(coded, TableModule) and description_of(made) == description_of(plain)
    assert_undone(coded, plain)


def test_rows_that_train():
    """Rows in a cache alone are not lost, and weights train as before."""
    bags = ibp.nn.EmbeddingBag(64, 16, mode="sum", padding_idx=2, cache=1 << 12)
    bags.cache.refill(range(64))
    bags(IDS[:, :4]).sum().backward()
    ibp.optim.SGD(bags, lr=0.5).step()
    wanted = copy.deepcopy(bags).weight
    collection = ibp.nn.EmbeddingCollection({"a": (9, 4)})
    model = nn.Sequential(bags, collection)
    ibp.nn.decompress(model)
    assert type(model[0]) is nn.EmbeddingBag and model[0].weight.requires_grad and model[0].mode == "sum"
    assert_same_bits(model[0].weight.detach(), wanted.decompress())
    assert model[1] is collection and isinstance(collection.groups[0], TableModule)


def test_hooks_stay():
    model = Net(torch.bfloat16)
    compress(model)
    calls = []
    handles = [model.head.register_forward_hook(lambda *_: calls.append("forward"))]
    handles.append(model.head.register_state_dict_pre_hook(lambda *_: calls.append("state")))
    model.head.train()
    head, generator = model.head, torch.get_rng_state()
    ibp.nn.decompress(model)
    assert model.head is head and type(head) is nn.Linear and head.training
    assert torch.equal(torch.get_rng_state(), generator)
    model(IDS), model.state_dict()
    for handle in handles:
        handle.remove()
    model(IDS), model.state_dict()
    assert calls == ["forward", "state"]


def test_tables_go_one_by_one(monkeypatch):
    """Memory holds one table more than the plain model at most, neighbours and tied weights included."""
    model = Net(torch.bfloat16, tie=True)
    compress(model)
    ibp.nn.multiply_together(*(model.blocks[number].up for number in (0, 1)))
    alive = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, TableModule)]
    tables, counts, turn = len({id(table()) for table in alive}), [], TableModule.parameter

    def counted(module):
        counts.append(len({id(table()) for table in alive if table() is not None}))
        return turn(module)

    monkeypatch.setattr(TableModule, "parameter", counted)
    gc.disable()
    try:
        ibp.nn.decompress(model)
    finally:
        gc.enable()
    assert counts == list(range(tables, 0, -1))


def test_what_is_refused_leaves_the_model_coded():
    model = Net(torch.bfloat16)
    compress(model)
    model.blocks[1].down.forward = model.blocks[1].down.forward
    with pytest.raises(ValueError, match=r"the forward of blocks.1.down has been replaced, .*: undo that first"):
        ibp.nn.decompress(model)
    assert all(isinstance(block.up, ibp.nn.Linear) for block in model.blocks)


def test_a_damaged_table_stops_it():
    model = Net(torch.bfloat16)
    compress(model)
    wanted = model.state_dict()["blocks.0.up.weight"]
    table = model.blocks[2].up.weight
    table.lengths.fill_(0xFFFF)
    with pytest.raises(ibp.CorruptTableError):
        ibp.nn.decompress(model)
    assert type(model.blocks[0].up) is nn.Linear and type(model.blocks[2].up) is ibp.nn.Linear
    assert_same_bits(model.blocks[0].up.weight.detach(), wanted)


def test_offloaded_beside():
    """`ibp.offload` holds modules, which stay the same objects: `close` gives them what is theirs."""
    model = Net(torch.bfloat16)
    plain = copy.deepcopy(model.requires_grad_(False))
    compress(model, include="blocks.*.up")
    offloaded = ibp.offload(model, "cpu", min_bytes=64)
    ibp.nn.decompress(model)
    offloaded.close()
    assert_undone(model, plain)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("has_bias, is_transposed", [(True, True), (False, False)])
def test_stacked_experts(has_gate, has_bias, is_transposed):
    model = nn.Sequential(PlainExperts(has_gate, has_bias, is_transposed, has_post_expert_norm=True))
    plain = copy.deepcopy(model)
    assert len(compress(model).coded) == 2 and isinstance(model[0], ibp.nn.Experts)
    assert_undone(model, plain)
    args = embedding(3, 128, torch.bfloat16), torch.tensor([[0, 1], [2, 3], [7, 0]]), torch.rand(3, 2).bfloat16()
    assert_same_bits(model[0](*args), plain[0](*args))


# ---- on a GPU ----


def test_on_a_gpu(cuda):
    model = Net(torch.bfloat16, tie=True).to(cuda)
    plain = copy.deepcopy(model)
    compress(model)
    assert_undone(model, plain)
    assert_same_bits(model(IDS.to(cuda)), plain(IDS.to(cuda)))
