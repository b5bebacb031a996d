"""Rows that train: after steps of ibp.optim a table holds the bits that torch's optimizer gives a plain weight, in the
rows that were looked up and in the others."""

import copy
import pickle
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ibp
from benchmarks import dlrm_train, harness
from helpers import assert_same_bits, embedding, pairwise
from ibp._common import process
from ibp.nn._embedding import RowsModule
from ranks import Ranks

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, ibp.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, ibp.optim.Adagrad, {"lr": 0.1}),
    "Adagrad with all options": (
        torch.optim.Adagrad,
        ibp.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3, "eps": 1e-4},
    ),
}
NUM_ROWS, LOOKED_UP = 120, 50


def both(columns, dtype, kind="EmbeddingBag", **options):
    """(torch's module, the compressed one) of the same weights."""
    torchs = getattr(torch.nn, kind)(NUM_ROWS, columns, dtype=dtype, **options)
    return torchs, getattr(ibp.nn, kind).from_pretrained(torchs, freeze=False)


def random_call(seed, columns):
    """(ids with repetitions, offsets with an empty bag, weights, factors of the loss)"""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(LOOKED_UP, (24,), generator=generator)
    return ids, torch.tensor([0, 5, 5, 11]), torch.rand(24, generator=generator), torch.randn(4, columns)


def loss_of(module, seed):
    ids, offsets, weights, factors = random_call(seed, module.embedding_dim)
    if isinstance(module, (torch.nn.Embedding, ibp.nn.Embedding)):
        return (module(ids.view(4, 6)).float().sum(1) * factors).square().sum()
    weights = weights.to(module.weight.dtype) if module.mode == "sum" else None
    return (module(ids, offsets, weights).float() * factors).square().sum()


def train(module, optimizer, num_steps=3, num_calls=3, together=False):
    """Steps of several forward passes each, whose losses go backward one by one or as one sum."""
    for step in range(num_steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses = [loss_of(module, 10 * step + call) for call in range(num_calls)]
        for loss in [sum(losses)] if together else losses:
            loss.backward()
        optimizer.step()


def assert_same_weights(ours, torchs):
    assert_same_bits(ours.current_table().decompress(), torchs.weight.detach())


@pytest.mark.parametrize(
    "name, dtype, columns, mode, padding_idx, together",
    pairwise(
        list(OPTIMIZERS),
        [torch.float32, torch.bfloat16, torch.float16],
        [16, 7],
        ["sum", "mean", "max", None],
        [None, 3],
        [False, True],
    ),
)
def test_steps_have_torchs_bits(name, dtype, columns, mode, padding_idx, together):
    make_torchs, make_ours, options = OPTIMIZERS[name]
    if dtype == torch.float16 and name != "SGD":
        options = {**options, "eps": 1e-4}  # less is 0 in this dtype: torch divides 0 by 0 in rows without a gradient
    kind = {"kind": "EmbeddingBag", "mode": mode} if mode else {"kind": "Embedding"}
    torchs, ours = both(columns, dtype, padding_idx=padding_idx, **kind)
    before = torchs.weight.detach().clone()
    for module, optimizer in (
        (torchs, make_torchs(torchs.parameters(), **options)),
        (ours, make_ours(ours, **options)),
    ):
        train(module, optimizer, together=together)
    assert_same_weights(ours, torchs)
    changed = (torchs.weight != before).any(1)
    assert changed[:LOOKED_UP].sum() > LOOKED_UP // 2 and not changed[LOOKED_UP:].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_steps(name):
    """The step runs outside of the graph."""
    torch.compiler.reset()
    _, make, options = OPTIMIZERS[name]
    _, plain = both(16, torch.float32)
    compiled, graphs = copy.deepcopy(plain), []
    optimizers = [make(module, **options) for module in (plain, compiled)]

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    steps = [optimizers[0].step, torch.compile(lambda: optimizers[1].step(), backend=backend)]
    for seed in range(4):
        for module, optimizer, step in zip((plain, compiled), optimizers, steps):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            loss_of(module, seed).backward()
            step()
        assert_same_bits(compiled.current_table().decompress(), plain.current_table().decompress())
    assert graphs == []


def test_a_step_between_two_backward_passes():
    """A row of both forward passes takes both changes, though the second pass was looked up before the first step."""
    torchs, ours = both(16, torch.float32, mode="sum")
    for module, optimizer in ((torchs, torch.optim.SGD(torchs.parameters(), 0.1)), (ours, ibp.optim.SGD(ours, 0.1))):
        torch.manual_seed(0)
        first, second = loss_of(module, 1), loss_of(module, 2)
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
    assert_same_weights(ours, torchs)


def test_gradients_stay_until_they_are_dropped():
    torchs, ours = both(16, torch.float32, mode="sum")
    for module, optimizer in ((torchs, torch.optim.SGD(torchs.parameters(), 0.1)), (ours, ibp.optim.SGD(ours, 0.1))):
        torch.manual_seed(0)
        loss_of(module, 1).backward(retain_graph=True)
        optimizer.step()
        optimizer.step()
        loss_of(module, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    assert_same_weights(ours, torchs)
    with torch.no_grad():
        assert not loss_of(ours, 1).requires_grad
    loss_of(ours, 1)  # never goes backward
    assert ours.row_gradient() is None


def unread_passes(module, count, calls=1):
    """The warnings of so many backward passes, of several calls each, and the sum of torch's gradients."""
    process.said.discard("unread gradients")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(count):
            sum(loss_of(module, calls * number + call) for call in range(calls)).backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_nobody_reads_are_summed(dtype):
    """Memory does not grow with the backward passes, and not a bit of their sum differs."""
    torchs, ours = both(16, dtype, mode="sum")
    torch.manual_seed(0)
    assert len(unread_passes(ours, 63)) == 0
    ours.drop_gradients()
    torch.manual_seed(0)
    (message,) = unread_passes(ours, 200)
    assert message.startswith(
        "64 backward passes gave gradients to rows of an ibp.nn module [120, 16], and no optimizer"
    )
    assert "ibp.optim" in message
    assert len(ours._noted) < 64
    torch.manual_seed(0)
    unread_passes(torchs, 200)
    gradient = ours.row_gradient()
    assert_same_bits(gradient.grad, torchs.weight.grad[gradient.ids])
    assert_same_bits(gradient.rows, torchs.weight.detach()[gradient.ids])


def test_many_calls_are_one_backward_pass():
    """A module that is called in a loop, as in a recurrent network, is read as often as its optimizer steps."""
    torchs, ours = both(16, torch.float32, mode="sum")
    torch.manual_seed(0)
    assert unread_passes(ours, 2, calls=100) == []
    torch.manual_seed(0)
    unread_passes(torchs, 2, calls=100)
    gradient = ours.row_gradient()
    torch.testing.assert_close(gradient.grad, torchs.weight.grad[gradient.ids])
    for _ in range(100):
        assert unread_passes(ours, 1) == []
        ours.row_gradient()  # reading is enough: gradients that are never dropped add up


def test_gradients_of_weights_and_of_what_comes_after():
    torchs, ours = both(16, torch.float32, mode="sum")
    ids, offsets, _, _ = random_call(0, 16)
    found = []
    for module in (torchs, ours):
        weights = torch.linspace(0, 1, 24).requires_grad_()
        last = torch.nn.Linear(16, 1)
        torch.nn.init.constant_(last.weight, 0.5), torch.nn.init.zeros_(last.bias)
        last(module(ids, offsets, weights)).square().sum().backward()
        found.append((weights.grad, last.weight.grad))
    for ours_grad, torchs_grad in zip(found[1], found[0]):
        assert_same_bits(ours_grad, torchs_grad)
    gradient = ours.row_gradient()
    assert_same_bits(gradient.grad, torchs.weight.grad[gradient.ids])
    assert_same_bits(gradient.rows, torchs.weight.detach()[gradient.ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_wise_adagrad(dtype):
    """As FBGEMM's exact row-wise Adagrad says, computed here row by row in float32."""
    torchs, ours = both(16, dtype, mode="sum")
    weight, sums = torchs.weight.detach().float(), torch.zeros(NUM_ROWS)
    optimizer = ibp.optim.RowWiseAdagrad(ours, lr=0.1, eps=1e-6)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss_of(ours, step).backward()
        gradient = ours.row_gradient()
        for row, grad in zip(gradient.ids.tolist(), gradient.grad.float()):
            sums[row] += grad.square().sum() / 16
            weight[row] = (weight[row] - 0.1 / (sums[row].sqrt() + 1e-6) * grad).to(dtype).float()
        optimizer.step()
    torch.testing.assert_close(ours.weight.decompress(), weight.to(dtype))
    state = optimizer.state_dict()["state"][0]["sum"]
    torch.testing.assert_close(state, sums)
    assert not state[LOOKED_UP:].any()


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad"])
def test_weights_decay_where_there_are_gradients(name):
    weight = embedding(20, 8)
    ours = ibp.nn.Embedding.from_pretrained(weight, freeze=False)
    optimizer = getattr(ibp.optim, name)(ours, lr=0.5 if name == "SGD" else 1e-4, weight_decay=0.25)
    (0 * ours(torch.tensor([4, 9])).sum()).backward()
    optimizer.step()
    changed = ours.weight.decompress()
    if name == "SGD":
        assert_same_bits(changed[[4, 9]], weight[[4, 9]] * 0.875)
    else:
        assert (changed[[4, 9]].abs() < weight[[4, 9]].abs()).all()
    others = [row for row in range(20) if row not in (4, 9)]
    assert_same_bits(changed[others], weight[others])


def test_schedulers_groups_and_closures():
    first, second = (ibp.nn.Embedding.from_pretrained(embedding(9, 4, seed=seed), freeze=False) for seed in (0, 1))
    fixed = ibp.nn.Embedding.from_pretrained(embedding(9, 4))
    model = torch.nn.Sequential(second, fixed)
    optimizer = ibp.optim.SGD([{"params": first, "lr": 1.0}, {"params": [model]}], lr=0.5)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = [module.weight.decompress() for module in (first, second)]

    def closure():
        optimizer.zero_grad()
        loss = first(torch.tensor([1])).sum() + second(torch.tensor([2])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx((before[0][1].sum() + before[1][2].sum()).item())
    scheduler.step()
    optimizer.step(closure)
    for module, row, rates, held in ((first, 1, (1.0, 0.5), before[0]), (second, 2, (0.5, 0.25), before[1])):
        expected = held[row]
        for rate in rates:
            expected = expected - rate
        assert_same_bits(module.weight[row], expected)
    assert "SGD" in repr(optimizer) and "lr: 0.5" in repr(optimizer)


def test_optimizers_refuse():
    module, fixed = ibp.nn.Embedding(9, 4), ibp.nn.Embedding.from_pretrained(embedding(9, 4))
    no_modules = r"there are no modules: give the module itself, as in ibp.optim.SGD\(model\), because its parameters"
    of_parameters = "params has a TableParameter; wanted modules: give the module itself"
    for error, message, make in (
        (ValueError, "Embedding has no ibp.nn module that trains", lambda: ibp.optim.SGD(fixed)),
        (TypeError, "params has a Tensor; wanted modules: give", lambda: ibp.optim.SGD([torch.zeros(3)])),
        (TypeError, of_parameters, lambda: ibp.optim.SGD(module.parameters())),
        (TypeError, of_parameters, lambda: ibp.optim.SGD([{"params": module.parameters(), "lr": 0.1}])),
        (TypeError, of_parameters, lambda: ibp.optim.average_gradients(module.parameters())),
        (ValueError, "lr is -1; wanted at least 0", lambda: ibp.optim.SGD(module, lr=-1)),
        (ValueError, "eps is nan; wanted at least 0", lambda: ibp.optim.Adagrad(module, eps=float("nan"))),
        (ValueError, "in the optimizer already", lambda: ibp.optim.SGD(module).add_param_group({"params": module})),
        (ValueError, no_modules, lambda: ibp.optim.SGD([])),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Usage"])
def test_removed_optimizers(name):
    message = f"^ibp.optim.{name} was removed: use torch.optim.Adam or AdamW with fused=True, .* FSDP, .* bitsandbytes"
    with pytest.raises(AttributeError, match=message):
        getattr(ibp.optim, name)
    assert name not in dir(ibp.optim)
    with pytest.raises(AttributeError, match="^module 'ibp.optim' has no attribute 'Lion'"):
        ibp.optim.Lion  # noqa: B018


# ---- states that are saved ----


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_goes_on_after_loading(name, tmp_path):
    make_torchs, make_ours, options = OPTIMIZERS[name]
    torchs, ours = both(16, torch.float32, mode="sum")
    optimizers = make_torchs(torchs.parameters(), **options), make_ours(ours, **options)
    train(torchs, optimizers[0])
    train(ours, optimizers[1])
    torch.save({"model": ibp.nn.coded_state_dict(ours), "optimizer": optimizers[1].state_dict()}, tmp_path / "ours.pt")
    saved = torch.load(tmp_path / "ours.pt", weights_only=True)
    plain = copy.deepcopy({"model": torchs.state_dict(), "optimizer": optimizers[0].state_dict()})
    train(torchs, optimizers[0], num_steps=2)
    for state in (saved, plain):  # torch's own checkpoint is taken, too
        again = ibp.nn.EmbeddingBag(NUM_ROWS, 16, mode="sum")
        optimizer = make_ours(again, lr=99.0)
        again.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(again, optimizer, num_steps=2)
        assert_same_weights(again, torchs)


@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_loaded_trains_apart(pinned, request):
    """Neither module nor optimizer changes what it was loaded from, which is in use."""
    options = {"memory": "pinned" if pinned else "host"}
    if pinned:
        request.getfixturevalue("cuda")
    first, second = (
        ibp.nn.Embedding(ibp.compress(embedding(9, 4, seed=seed), **options), trainable=True) for seed in (0, 1)
    )
    one, other = (ibp.optim.Adagrad(module, lr=0.5) for module in (first, second))
    first(torch.tensor([3])).sum().backward()
    one.step()
    held, sums = first.weight.decompress(), one.state_dict()["state"][0]["sum"].decompress()
    second.load_state_dict(ibp.nn.coded_state_dict(first))
    other.load_state_dict(one.state_dict())
    second(torch.tensor([3, 4])).sum().backward()
    other.step()
    assert_same_bits(first.weight.decompress(), held)
    assert_same_bits(one.state_dict()["state"][0]["sum"].decompress(), sums)
    assert not torch.equal(second.weight.decompress(), held)
    assert second.weight.is_pinned() == pinned


def test_states_that_do_not_fit():
    module = ibp.nn.Embedding(9, 4)
    optimizer = ibp.optim.Adagrad(module)
    module(torch.tensor([3])).sum().backward()
    optimizer.step()
    good = optimizer.state_dict()
    for state, message in (
        ({"step": 1, "sum": torch.zeros(9, 5)}, r"torch.float32 \[9, 5\]; wanted torch.float32 \[9, 4\]"),
        ({"step": 1, "sum": torch.zeros(9, 4).half()}, "torch.float16"),
        ({"step": 1, "sum": [1.0]}, "sum is a list"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**good, "state": {0: state}})
    with pytest.raises(ValueError, match=r"groups of \[\] modules; wanted \[1\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="wanted none"):
        ibp.optim.SGD(module).load_state_dict(good)
    assert optimizer.state_dict()["state"][0]["sum"] is good["state"][0]["sum"]


def test_loading_forgets_gradients():
    module = ibp.nn.Embedding(9, 4)
    module(torch.tensor([3])).sum().backward()
    module.load_state_dict({"weight": torch.ones(9, 4)})
    ibp.optim.SGD(module, lr=1.0).step()
    assert torch.equal(module.weight.decompress(), torch.ones(9, 4))


# ---- memory ----


def test_states_of_rows_that_have_not_trained_take_no_bytes():
    module = ibp.nn.EmbeddingBag(ibp.compress(embedding(50_000, 32, torch.bfloat16)), mode="sum", trainable=True)
    optimizer = ibp.optim.Adagrad(module, initial_accumulator_value=0.1)
    module(torch.arange(100).view(10, 10)).sum().backward()
    optimizer.step()
    sums = optimizer.state_dict()["state"][0]["sum"]
    assert isinstance(sums, ibp.CompressedTensor) and sums.dtype == torch.bfloat16
    assert sums.nbytes < 15 * 50_000  # an index of 12 bytes a row, the rows that trained, room for more
    assert torch.equal(sums[[0, 99, 100, 49_999]][:, 0], torch.tensor([1.1, 1.1, 0.1, 0.1]).bfloat16())
    optimizer.refit()
    module.refit()
    assert torch.equal(sums[[0, 100]][:, 0], torch.tensor([1.1, 0.1]).bfloat16())


def test_memory_is_said_after_a_step():
    """Rows that have changed take more memory than their coded bytes say."""
    bags = ibp.nn.EmbeddingBag(20_000, 64, mode="sum")
    bags(torch.arange(20_000)[:, None]).sum().backward()
    ibp.optim.SGD(bags, lr=0.1).step()
    table, plain_bytes = bags.weight, 20_000 * 64 * 4
    assert table.savings > 0.1 and table.nbytes > 0.95 * plain_bytes
    assert f" {table.nbytes / 1e6:.3g} of {plain_bytes / 1e6:.3g} MB" in repr(bags)


def test_refit_saves_again():
    """The codebook of weights that are all alike saves nothing of those that training makes of them."""
    module = ibp.nn.EmbeddingBag(ibp.compress(torch.zeros(400, 128, dtype=torch.bfloat16)), mode="sum", trainable=True)
    optimizer = ibp.optim.SGD(module, lr=1.0)
    (module(torch.arange(400)[:, None]) * embedding(400, 128, torch.bfloat16)).sum().backward()
    optimizer.step()
    held, savings = module.weight.decompress(), module.weight.savings
    module.refit()
    assert_same_bits(module.weight.decompress(), held)
    assert savings < 0.01 and module.weight.savings > 0.2


# ---- caches ----

CACHES = {
    "writable": {"hotness": range(0, 60, 2), "writable": True},
    "writable, of two devices": {"hotness": range(0, 60, 2), "writable": True, "devices": ["cpu", "cpu"]},
    "writable and empty": {"hotness": [], "writable": True},
    "of fixed rows": {"hotness": range(30)},
    "lru": {"policy": "lru"},
}


def cached_module(torchs, name):
    """torch's module with a cache of 32 KiB a device over its rows."""
    table = ibp.compress(torchs.weight.detach(), device="cpu", memory="host")
    options = {"devices": "cpu", **CACHES[name]}
    if "hotness" in options:
        options["hotness"] = list(options["hotness"])
    cache = ibp.RowCache(table, 1 << 15, **options)
    return ibp.nn.EmbeddingBag(table, mode="sum", trainable=True, cache=cache)


@pytest.mark.parametrize("name", list(CACHES))
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_caches_train(name, optimizer):
    make_torchs, make_ours, options = OPTIMIZERS[optimizer]
    torchs = torch.nn.EmbeddingBag(NUM_ROWS, 64, mode="sum", dtype=torch.bfloat16)
    before = torchs.weight.detach().clone()
    ours = cached_module(torchs, name)
    train(torchs, make_torchs(torchs.parameters(), **options))
    train(ours, make_ours(ours, **options))
    assert_same_bits(ours(torch.arange(NUM_ROWS)[:, None]).detach(), torchs.weight.detach())
    stats = ours.cache.stats()
    assert (stats.hits > 0) == (name != "writable and empty")
    stale = ours.weight.decompress()
    is_late = torch.equal(stale[:60:2], before[:60:2])
    assert is_late == (ours.cache.writable and "empty" not in name), "rows in the cache reach the table at flush"
    assert_same_bits(ours.state_dict()["weight"], torchs.weight.detach())


def test_caches_follow_their_tables():
    """refit, load_state_dict and copies of a module whose cache has rows that the table lacks."""
    torchs = torch.nn.EmbeddingBag(NUM_ROWS, 64, mode="sum", dtype=torch.bfloat16)
    ours = cached_module(torchs, "writable")
    cached = ours.cache.cached_ids()
    assert cached.numel() and set(cached.tolist()) <= set(range(0, 60, 2))
    optimizer = ibp.optim.SGD(ours, lr=0.5)
    every = torch.arange(NUM_ROWS)[:, None]

    def step():
        optimizer.zero_grad()
        ours(every).sum().backward()
        optimizer.step()
        return ours(every).detach()

    held = step()
    ours.refit()
    assert_same_bits(ours(every).detach(), held)
    assert torch.equal(ours.cache.cached_ids(), cached)
    held = step()
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied.cache is None
        assert_same_bits(copied(every).detach(), held)
    table, cache = ours.weight, ours.cache
    ours.load_state_dict(torchs.state_dict())
    assert_same_bits(ours(every).detach(), torchs.weight.detach())
    assert ours.cache is not cache and ours.cache.table is ours.weight is not table and ours.cache.writable
    assert torch.equal(ours.cache.cached_ids(), cached)
    assert "cache=ibp.RowCache" in repr(ours)


def test_caches_by_their_size():
    fixed = ibp.nn.EmbeddingBag.from_pretrained(embedding(50, 64, torch.bfloat16), mode="sum", cache=1 << 15)
    with pytest.warns(RuntimeWarning, match="the cache holds no rows"):
        trains = ibp.nn.EmbeddingBag(50, 64, mode="sum", cache=1 << 15)
    with pytest.warns(RuntimeWarning, match="the cache holds no rows"):
        many = ibp.nn.EmbeddingCollection({"a": (20, 8), "b": (20, 8), "c": (20, 16)}, cache_bytes=1 << 14)
    assert (fixed.cache.policy, trains.cache.writable, trains.cache.num_cached_rows) == ("lru", True, 0)
    assert [group.cache.budget_bytes for group in many.groups] == [1 << 14, 1 << 14]
    many({"a": torch.tensor([[3]])})["a"].sum().backward()
    ibp.optim.SGD(many, lr=1.0).step()
    many.flush()
    ids = torch.randint(50, (5, 4))
    assert_same_bits(fixed(ids), fixed.to_torch()(ids))
    embedded = ibp.nn.Embedding.from_pretrained(fixed.weight, cache=1 << 15)
    assert embedded.stays
    assert_same_bits(embedded(ids), fixed.weight[ids])
    other = ibp.compress(embedding(50, 64), device="cpu", memory="host")
    for cache, error, message in (
        (fixed.cache, ValueError, "the cache is one of another table"),
        (True, TypeError, "cache is a bool; wanted an ibp.RowCache or a number of bytes"),
    ):
        with pytest.raises(error, match=message):
            ibp.nn.Embedding(other, cache=cache)


# ---- collections ----


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_collections_train(name):
    make_torchs, make_ours, options = OPTIMIZERS[name]
    ours = ibp.nn.EmbeddingCollection({"a": (40, 16), "b": (30, 8), "c": (20, 16)})
    torchs = ours.to_torch()
    optimizers = make_torchs([module.weight for module in torchs.values()], **options), make_ours(ours, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        features = {n: torch.randint(20, (5, 3), generator=generator) for n in "cab"}
        results = ours(features), {n: torchs[n](ids) for n, ids in features.items()}
        for optimizer, result in zip(reversed(optimizers), results):
            optimizer.zero_grad()
            sum(part.square().sum() for part in result.values()).backward()
            optimizer.step()
    for n, module in torchs.items():
        assert_same_bits(ours.weight(n), module.weight.detach())
    assert all(isinstance(group, RowsModule) and group.trainable for group in ours.groups)
    with pytest.raises(IndexError, match="of table 'c'"):
        ours({"c": torch.tensor([[20]])})


# ---- several processes ----


def step_of_a_rank(rank, num_steps=2):
    """The rows after steps of two processes; in the second one of them has no gradient."""
    table = ibp.compress(embedding(60, 16, torch.bfloat16), device="cpu", memory="host")
    module = ibp.nn.EmbeddingBag(table, mode="sum", trainable=True)
    optimizer = ibp.optim.SGD(module, lr=0.5)
    for step in range(num_steps):
        optimizer.zero_grad()
        if step == 0 or rank == 0:
            module(bags_of_rank(rank, step)).square().sum().backward()
        ibp.optim.average_gradients(module)
        optimizer.step()
    optimizer.zero_grad()
    ibp.optim.average_gradients(module)  # of nobody
    assert module.row_gradient() is None
    return module.weight.decompress()


def bags_of_rank(rank, step):
    return torch.randint(40, (8, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def test_processes_average_their_gradients(tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        results = ranks(step_of_a_rank)
    finally:
        ranks.end()
    weight = embedding(60, 16, torch.bfloat16)
    for step in range(2):
        total = torch.zeros_like(weight)
        for rank in range(2 - step):
            leaf = weight.clone().requires_grad_()
            F.embedding_bag(bags_of_rank(rank, step), leaf, mode="sum").square().sum().backward()
            total += leaf.grad / 2
        weight = weight.add(total, alpha=-0.5)
    for result in results:
        assert_same_bits(result, weight)


# ---- the benchmark and the example ----


@pytest.mark.slow
def test_the_benchmark_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(dlrm_train, "ROWS", ((128, torch.float32),))
    assert dlrm_train.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    heads, *lines = (tmp_path / "dlrm_train.csv").read_text().splitlines()
    assert heads == ",".join([*harness.COLUMNS, *dlrm_train.COLUMNS]) and len(lines) == 10
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_example(capsys):
    path = Path(__file__).resolve().parents[2] / "examples" / "train_embeddings.py"
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path))
    same = "True|False" if torch.cuda.is_available() else "True"
    assert re.fullmatch(rf"losses 0\.\d+ to 0\.\d+, the same bits: ({same})\n", capsys.readouterr().out)


# ---- GPUs ----


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "RowWiseAdagrad"])
def test_on_a_gpu(cuda, pinned, name):
    """GPUs add gradients in any order: small integers have one sum. Rows are compared with torch's by bits for SGD, and
    closely for the others, whose roots a GPU rounds as it likes."""
    weight = torch.randint(-4, 5, (500, 64)).float()
    table = ibp.compress(weight, memory="pinned") if pinned else ibp.compress(weight.to(cuda))
    ours = ibp.nn.EmbeddingBag(table, mode="sum", trainable=True)
    torchs = torch.nn.EmbeddingBag.from_pretrained(weight.to(cuda), mode="sum", freeze=False)
    if name == "RowWiseAdagrad":
        optimizers = None, ibp.optim.RowWiseAdagrad(ours, lr=0.5)
    else:
        make_torchs, make_ours, options = OPTIMIZERS[name]
        optimizers = (
            make_torchs(torchs.parameters(), **{**options, "lr": 0.5}),
            make_ours(ours, **{**options, "lr": 0.5}),
        )
    for step in range(3):
        ids = torch.randint(300, (64, 5), generator=torch.Generator().manual_seed(step)).to(cuda)
        for module, optimizer in zip((torchs, ours), optimizers):
            if optimizer is not None:
                optimizer.zero_grad()
                module(ids).sum().backward()
                optimizer.step()
    got = ours.weight.decompress(device="cpu")
    assert_same_bits(got[300:], weight[300:])
    if name == "SGD":
        assert_same_bits(got, torchs.weight.detach().cpu())
    elif name == "RowWiseAdagrad":
        assert not torch.equal(got[:300], weight[:300]) and got.isfinite().all()
        assert optimizers[1].state_dict()["state"][0]["sum"].device == cuda
    else:
        torch.testing.assert_close(got, torchs.weight.detach().cpu())
    assert ours.weight.is_pinned() == pinned
    with pytest.raises(IndexError, match="500"):
        F.relu(ours(torch.tensor([[500]], device=cuda)))


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
@pytest.mark.parametrize("writable", [False, True])
def test_caches_on_a_gpu(cuda, name, writable):
    """A cache changes no bit, whatever it holds: the same steps with and without."""
    weight = torch.randint(-4, 5, (2000, 128)).to(torch.bfloat16)
    results = []
    for is_cached in (False, True):
        table = ibp.compress(weight, scheme="planes", memory="pinned")
        hotness = torch.arange(2000, 0, -1)
        cache = ibp.RowCache(table, 1 << 16, hotness, devices=cuda, writable=writable) if is_cached else None
        module = ibp.nn.EmbeddingBag(table, mode="sum", trainable=True, cache=cache)
        optimizer = OPTIMIZERS[name][1](module, lr=0.5)
        for step in range(4):
            ids = torch.randint(600, (256, 3), generator=torch.Generator().manual_seed(step)).to(cuda)
            optimizer.zero_grad()
            module(ids).sum().backward()
            optimizer.step()
        results.append(module.state_dict()["weight"])
    assert_same_bits(*results)
    assert cache.stats().hits > 0 and cache.stats().misses > 0
