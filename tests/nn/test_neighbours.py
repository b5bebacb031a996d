"""Modules that multiply together: their results, when one product serves all, and when each has its own."""

import copy
import pickle

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.nn import _tables


def plain_modules(count=3, columns=96, **options):
    torch.manual_seed(0)
    return [torch.nn.Linear(columns, 32 + 16 * number, **options).bfloat16().eval() for number in range(count)]


@pytest.fixture
def pairs():
    """(modules that multiply together, torch's modules of the same weights)."""
    plain = plain_modules()
    modules = [ibp.nn.Linear.from_linear(module) for module in plain]
    ibp.nn.multiply_together(*modules)
    return modules, plain


@pytest.fixture
def calls(monkeypatch):
    """How many tables each product takes."""
    counts, multiply = [], _tables.linear

    def watched(x, tables, biases):
        counts.append(len(tables) if isinstance(tables, list) else 1)
        return multiply(x, tables, biases)

    monkeypatch.setattr(_tables, "linear", watched)
    return counts


def check(modules, plain, x):
    for module, wanted in zip(modules, plain):
        assert_same_bits(module(x), wanted(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_product_for_all(pairs, calls, mode):
    modules, plain = pairs
    with mode():
        for shape in ((96,), (3, 96), (2, 4, 96), (0, 96)):
            check(modules, plain, torch.randn(shape).bfloat16())
    assert calls == [3] * 4
    assert modules[0].place[0]._kept is None


@torch.no_grad()
def test_other_vectors_have_products_of_their_own(pairs, calls):
    """As keys of other states than queries; no product is made in vain twice."""
    modules, plain = pairs
    x, other = torch.randn(2, 3, 96).bfloat16()
    for _ in range(2):
        assert_same_bits(modules[0](x), plain[0](x))
        check(modules[1:], plain[1:], other)
    assert calls == [3, 1, 1, 1, 1, 1]


@torch.no_grad()
def test_vectors_that_change_between(pairs, calls):
    modules, plain = pairs
    x = torch.randn(3, 96).bfloat16()
    assert_same_bits(modules[0](x), plain[0](x))
    x.mul_(2)
    check(modules[1:], plain[1:], x)
    assert calls == [3, 1, 1]


@torch.no_grad()
def test_other_orders(pairs, calls):
    """A module that is left out, or called twice, or too early, is right, too."""
    modules, plain = pairs
    x = torch.randn(3, 96).bfloat16()
    for order in ((1, 0, 2, 2), (0, 2, 1), (0, 1, 2)):
        for number in order:
            assert_same_bits(modules[number](x), plain[number](x))
    assert calls.count(3) == 1


def test_training(pairs, calls):
    """Each module has a product of its own where gradients are wanted."""
    modules, plain = pairs
    grads = []
    for linears in (modules, plain):
        x = torch.arange(192.0).view(2, 96).bfloat16().requires_grad_()
        sum(module(x).sum() for module in linears).backward()
        grads.append(x.grad)
    assert_same_bits(*grads)
    assert calls == [1, 1, 1]


@torch.no_grad()
def test_copies_and_changes(pairs, calls):
    """A copy's modules multiply together, without the others; and new weights are used."""
    modules, plain = pairs
    x = torch.randn(3, 96).bfloat16()
    modules[0](x)
    copied = copy.deepcopy(torch.nn.ModuleList(modules))
    pickled = pickle.loads(pickle.dumps(torch.nn.ModuleList(modules)))
    calls.clear()
    for others in (copied, pickled):
        assert all(other.place[0] is others[0].place[0] for other in others)
        assert others[0].place[0].modules == tuple(others)
        check(others, plain, x)
    assert calls == [3, 3]
    changed = plain_modules(bias=True)
    changed[1].weight.mul_(2)
    for other, module in zip(copied, changed):
        other.load_state_dict(module.state_dict())
    check(copied, changed, x)


def test_refusals():
    modules = [ibp.nn.Linear.from_linear(module) for module in plain_modules(2)]
    wide, plain = ibp.nn.Linear.from_linear(plain_modules(1, 128)[0]), plain_modules(1)[0]
    exact = ibp.nn.Linear.from_linear(plain, fused=False)
    for given, error, message in (
        ((modules[0],), ValueError, "there are 1 different modules; wanted at least two"),
        ((), ValueError, "there are 0 different modules"),
        ((modules[0], modules[0]), ValueError, "there are 1 different modules"),
        ((modules[0], wide), ValueError, "96 and 128 in_features; wanted the same"),
        ((modules[0], exact), ValueError, "fused=False"),
        ((modules[0], plain), TypeError, "is a Linear; wanted ibp.nn.Linear"),
    ):
        with pytest.raises(error, match=message):
            ibp.nn.multiply_together(*given)
    assert modules[0].place is None


class Attention(torch.nn.Module):
    def __init__(self, names, columns=(256, 256, 256)):
        super().__init__()
        for name, size in zip(names, columns):
            setattr(self, name, torch.nn.Linear(size, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "names,columns,joined",
    [
        (("q_proj", "k_proj", "v_proj"), (256, 256, 256), 3),
        (("gate_proj", "up_proj", "down_proj"), (256, 256, 256), 2),
        (("q_proj", "k_proj", "v_proj"), (256, 128, 128), 0),  # of other states
        (("q_proj", "k_proj"), (256, 256), 0),
        (("one", "two"), (256, 256), 0),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_models(names, columns, joined, fused):
    model = torch.nn.Sequential(Attention(names, columns)).eval()
    ibp.nn.compress(model, min_bytes=0, fused=fused)
    places = [module.place for module in model[0].children()]
    assert sum(place is not None for place in places) == (joined if fused else 0)
    assert len({place[0] for place in places if place is not None}) == bool(joined and fused)


def test_one_module_under_three_names():
    model = Attention(("q_proj",))
    model.k_proj = model.v_proj = model.q_proj
    ibp.nn.compress(model.eval(), min_bytes=0)
    assert model.q_proj is model.v_proj and model.q_proj.place is None
