"""torch's own functions of a table: torch.index_select, F.embedding, F.embedding_bag, F.linear; what is no function of
tables says so."""

import functools

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits, embedding

ON_CPU = {"device": "cpu", "memory": "host"}
IDS = torch.tensor([3, 99, 0, 3])


@pytest.fixture(scope="module")
def x():
    return embedding(100, 32)


@pytest.fixture(scope="module", params=["raw", "ibp", "planes"])
def table(x, request):
    return ibp.compress(x, scheme=request.param, **ON_CPU)


def test_index_select(table, x):
    for ids in (IDS, IDS.to(torch.int32), IDS[:0]):
        assert_same_bits(torch.index_select(table, 0, ids), torch.index_select(x, 0, ids))
        assert_same_bits(torch.index_select(table, -2, ids), torch.index_select(x, -2, ids))
    assert_same_bits(torch.index_select(table, 1, IDS[2:]), torch.index_select(x, 1, IDS[2:]))
    assert_same_bits(torch.index_select(input=table, dim=0, index=IDS), x[IDS])
    out = torch.empty(4, 32)
    assert torch.index_select(table, 0, IDS, out=out) is out
    assert_same_bits(out, x[IDS])
    with pytest.raises(IndexError, match=r"ids\[0\] is 100; wanted 0 to 99"):
        torch.index_select(table, 0, torch.tensor([100]))
    with pytest.raises(IndexError):
        torch.index_select(table, 2, IDS)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (), (1, 4, 1), (0, 3)], ids=str)
def test_embedding(table, x, shape):
    ids = IDS[: torch.Size(shape).numel()].reshape(shape)
    for arguments in ({}, {"padding_idx": 3}, {"sparse": True}, {"scale_grad_by_freq": True}):
        assert_same_bits(F.embedding(ids, table, **arguments), F.embedding(ids, x, **arguments))
    assert_same_bits(torch.embedding(table, ids), torch.embedding(x, ids))
    assert not F.embedding(ids, table).requires_grad


def test_embedding_bag(table, x):
    arguments = {"mode": "sum", "padding_idx": 3, "per_sample_weights": torch.rand(4).to(x.dtype)}
    offsets = torch.tensor([0, 3])
    assert_same_bits(F.embedding_bag(IDS, table, offsets, **arguments), F.embedding_bag(IDS, x, offsets, **arguments))
    assert_same_bits(F.embedding_bag(IDS.view(2, 2), table), F.embedding_bag(IDS.view(2, 2), x))
    for wrong, error in (({"max_norm": 1.0}, ValueError), ({"mode": "median"}, ValueError)):
        with pytest.raises(error, match="max_norm|mode"):
            F.embedding_bag(IDS, table, offsets, **wrong)


def test_embedding_refuses(table):
    with pytest.raises(ValueError, match="max_norm"):
        F.embedding(IDS, table, max_norm=1.0)
    with pytest.raises(ValueError, match=r"shape \[4, 5, 6\]; wanted two dimensions"):
        F.embedding(IDS, ibp.compress(torch.zeros(4, 5, 6), **ON_CPU))
    with pytest.raises(IndexError, match="100"):
        F.embedding(torch.tensor([[100]]), table)
    with pytest.raises(TypeError, match="weight is a Tensor"):
        F.embedding(table, torch.zeros(3, 3))


def test_linear(table, x):
    given, bias = torch.randn(5, 7, 32), torch.randn(100)
    for arguments in ((), (bias,)):
        assert_same_bits(F.linear(given, table, *arguments), F.linear(given, x, *arguments))
    assert_same_bits(F.linear(given[0, 0], table), F.linear(given[0, 0], x))
    with pytest.raises(TypeError, match="weight is a Tensor"):
        F.linear(table, given[0])


def test_gradients_pass_through_linear(table, x):
    results = []
    for weight in (table, x):
        given, bias = torch.linspace(-1, 1, 96).view(3, 32).requires_grad_(), torch.ones(100, requires_grad=True)
        F.linear(given, weight, bias).square().sum().backward()
        results.append((given.grad, bias.grad))
    for of_table, of_tensor in zip(*results):
        assert_same_bits(of_table, of_tensor)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: torch.add(t, 1),
        lambda t: torch.cat([t, t]),
        lambda t: torch.matmul(torch.ones(1, 100), t),
        lambda t: torch.empty_like(t),
        lambda t: torch.equal(t, t),
        lambda t: torch.sum(t),
        lambda t: F.relu(t),
    ],
    ids=range(7),
)
def test_other_functions(table, call):
    with pytest.raises(
        TypeError,
        match=r"an ibp.CompressedTensor \(only F.embedding, F.embedding_bag, F.linear, torch.index_select do\)",
    ):
        call(table)


INSTEAD = (
    "a compressed table {}: call ibp.decompress(table) for the tensor, table[ids] for some items, or "
    "table.update_(ids, rows) to change rows"
)


def assign(t):
    t[0] = 1


def delete(t):
    del t[0]


def add_in_place(t):
    t += 1


@pytest.mark.parametrize(
    "call, what",
    [
        (lambda t: torch.ones(1, 100) @ t, "takes part in no arithmetic"),
        (lambda t: torch.ones(100, 32) + t, "takes part in no arithmetic"),
        (lambda t: t + 1, "takes part in no arithmetic"),
        (lambda t: t * t, "takes part in no arithmetic"),
        (lambda t: -t, "takes part in no arithmetic"),
        (lambda t: 1 | t, "takes part in no arithmetic"),
        (lambda t: divmod(t, 2), "takes part in no arithmetic"),
        (lambda t: 1 in t, "takes part in no arithmetic"),
        (add_in_place, "takes part in no arithmetic"),
        (torch.as_tensor, "has no elements in memory"),
        (torch.tensor, "has no elements in memory"),
        (torch.asarray, "has no elements in memory"),
        (torch.from_dlpack, "has no elements in memory"),
    ],
    ids=range(13),
)
def test_operators_and_conversions(table, call, what):
    with pytest.raises(TypeError) as caught:
        call(table)
    assert str(caught.value) == INSTEAD.format(what)


@pytest.mark.parametrize("call", [assign, delete])
def test_assignments(table, call):
    with pytest.raises(TypeError) as caught:
        call(table)
    assert str(caught.value) == "items of " + INSTEAD.format("cannot be assigned")


def test_what_only_tensors_have(table):
    """Every public name of torch.Tensor is one of the table's too, or says what to call."""
    names = {name for name in dir(torch.Tensor) if not name.startswith("_")}
    lacking = sorted(names - set(dir(table)))
    assert {"mean", "view", "numpy", "data", "T", "grad", "copy_", "item"} <= set(lacking)
    for name in lacking:
        with pytest.raises(AttributeError) as caught:
            getattr(table, name)
        assert str(caught.value) == INSTEAD.format(f"has no {name!r}")
        assert not hasattr(table, name)
    for name in ("slot", "_version", "__index__"):
        with pytest.raises(AttributeError, match=f"^'CompressedTensor' object has no attribute '{name}'"):
            getattr(table, name)


def test_the_constructor_is_not_for_tensors(x):
    with pytest.raises(TypeError, match=r"^CompressedTensor\(\) takes no Tensor: ibp.compress\(x\) makes a Compress"):
        ibp.CompressedTensor(x)


@pytest.mark.parametrize("select", [ibp.index_select, ibp.CompressedTensor.index_select])
def test_a_dimension_is_none_of_the_ids(table, select):
    with pytest.raises(TypeError, match="takes a table and ids, without a dimension, and selects along dimension 0"):
        select(table, 0, IDS)


@pytest.mark.parametrize(
    "function",
    [
        lambda t, ids, given: torch.index_select(t, 0, ids),
        lambda t, ids, given: F.embedding(ids, t) * 2,
        lambda t, ids, given: F.linear(given, t),
        lambda t, ids, given: ibp.decompress(t) + 1,
    ],
    ids=["index_select", "embedding", "linear", "decompress"],
)
def test_compiled(x, function, request):
    if "index_select" in request.node.name and torch.index_select is not torch._C._VariableFunctions.index_select:
        pytest.skip("PyTorch Geometric, which another test file imports, has replaced it: test_pyg compiles that")
    torch.compiler.reset()
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    given = torch.randn(3, 32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    table.index_select(IDS)
    expected = function(table, IDS, given)
    assert_same_bits(compiled(table, IDS, given), expected)
    assert_same_bits(compiled(table, IDS[:2], given), function(table, IDS[:2], given))


@pytest.mark.parametrize("place", ["pinned", "device", "pageable"])
def test_on_a_gpu(cuda, x, place):
    table = ibp.compress(x.to(cuda) if place == "device" else x, memory={"pageable": "host"}.get(place, place))
    ids, given = IDS.to(cuda), torch.randn(3, 32, device=cuda)
    for result in (
        torch.index_select(table, 0, ids),
        F.embedding(ids, table),
        F.embedding(ids.view(2, 2), table).view(4, 32),
    ):
        assert result.device == cuda
        assert_same_bits(result.cpu(), x[IDS])
    assert_same_bits(F.linear(given, table).cpu(), F.linear(given, x.to(cuda)).cpu())
    assert_same_bits(torch.index_select(table, 1, ids[2:]).cpu(), x[:, [0, 3]])
    torch.compiler.reset()
    compiled = torch.compile(
        lambda ids, given: (F.embedding(ids, table) * 2, F.linear(given, table)), fullgraph=True, backend="aot_eager"
    )
    rows, product = compiled(ids, given)
    assert_same_bits(rows.cpu(), x[IDS] * 2)
    torch.testing.assert_close(product, F.linear(given, x.to(cuda)))
    table.check()


def _collection(rows):
    module = ibp.nn.EmbeddingCollection({"a": rows, "b": rows}, device="cpu", trainable=False)
    return lambda: module({"a": IDS[None], "b": IDS[None]})["b"]


FIRST_USES = {
    "decompress": lambda rows: ibp.compress(rows, **ON_CPU).decompress,
    "index_select": lambda rows: functools.partial(ibp.index_select, ibp.compress(rows, **ON_CPU), IDS),
    "bags": lambda rows: functools.partial(ibp.embedding_bag, ibp.compress(rows, **ON_CPU), IDS[None]),
    "linear": lambda rows: functools.partial(ibp.linear, torch.ones(2, 32), ibp.compress(rows, **ON_CPU)),
    "cache": lambda rows: functools.partial(
        ibp.RowCache(ibp.compress(rows, **ON_CPU), 4096, range(9), devices="cpu").index_select, IDS
    ),
    "collection": _collection,
}
MODES = {
    "grad": lambda call: torch.func.grad(lambda y: (call() * y).sum())(torch.ones(())),
    "jvp": lambda call: torch.func.jvp(lambda y: call() * y, (torch.ones(()),), (torch.ones(()),))[1],
    "vmap": lambda call: torch.func.vmap(lambda y: call() * y)(torch.ones(2)),
}


@pytest.mark.parametrize("make", FIRST_USES.values(), ids=FIRST_USES)
@pytest.mark.parametrize("mode", [*MODES, "inference mode"])
def test_a_first_use_in_a_mode_of_torch(make, mode, x):
    """What a table makes on its first use and keeps, it makes as outside of transforms and modes."""
    wanted = make(x)()
    call = make(x)
    if mode == "inference mode":
        with torch.inference_mode():
            assert_same_bits(call(), wanted)
    else:
        torch.testing.assert_close(MODES[mode](call), MODES[mode](lambda: wanted))
    assert_same_bits(call(), wanted)
    assert not call().is_inference()
