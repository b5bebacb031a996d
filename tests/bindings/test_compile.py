"""torch.compile(fullgraph=True) over functions that call the operations, and over index_select itself."""

import functools
import shutil
import subprocess
import sys

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding, slow_but, spiky_rows
from ibp._rows.table import handle_on

OPS = torch.ops.ibp
CPU = torch.device("cpu")
KINDS = ["raw", "ibp", "planes"]
# Of these aot_eager traces what eager does, and then makes its writes results, as inductor does.
BACKENDS = slow_but(["aot_eager"], ["eager", "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.fixture(params=["cpu", "pinned", "device"])
def place(request):
    """Where a table is, and so who decodes it."""
    return request.param


@pytest.fixture
def device(place, request):
    return CPU if place == "cpu" else request.getfixturevalue("cuda")


@pytest.fixture(params=BACKENDS)
def compiled(request, place):
    """torch.compile(fullgraph=True) by each backend."""
    if request.param == "inductor" and place == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("inductor finds no C++ compiler")
    if request.param == "inductor" and place != "cpu":
        pytest.importorskip("triton")
    return lambda function: torch.compile(function, fullgraph=True, backend=request.param)


def make_table(x, scheme, place, device):
    x = x.to(device) if place == "device" else x
    table = ibp.compress(
        x, scheme=scheme, memory={"pinned": "pinned", "cpu": "host", "device": None}[place], device=device
    )
    assert table.device.type == ("cuda" if place == "device" else "cpu") and table.is_pinned() == (place == "pinned")
    return table


@pytest.mark.parametrize("scheme", slow_but(["planes"], KINDS))
def test_operations(compiled, place, device, scheme):
    """A gather, one in the order of windows, and decoding, to memory of the function's own."""
    x = spiky_rows(500, 60)
    table = make_table(x, scheme, place, device)
    handle = handle_on(table, device).table

    def gather(ids):
        out = [torch.empty(ids.numel(), 60, device=device) for _ in range(2)]
        noted = torch.zeros(4, dtype=torch.int64, device=device)
        sorted_ids, positions = OPS.partition_ids(ids, 500, 4)
        OPS.gather_items(handle, ids, 0, out[0], noted)
        OPS.gather_items(handle, sorted_ids, 0, out[1], noted, positions)
        whole = torch.empty(500, 60, device=device)
        OPS.decode_bytes(handle, 0, 500 * 240, 0, whole, noted)
        return out[0] - 1, out[1], whole, noted

    function = compiled(gather)
    for count in (3, 40, 41):
        ids = torch.randint(500, (count,))
        less_one, placed, whole, noted = function(ids.to(device))
        assert_same_bits(less_one.cpu(), x[ids] - 1)
        assert_same_bits(placed.cpu(), x[ids])
        assert_same_bits(whole.cpu(), x)
        assert noted.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scheme", slow_but(["planes"], KINDS))
def test_index_select(compiled, place, device, scheme):
    """The table from outside and as an argument; the result and the memory that it goes to made inside and outside."""
    x = embedding(500, 64)
    table = make_table(x, scheme, place, device)
    weights = torch.randn(64, 8, device=device)
    table.index_select(torch.tensor([0], device=device))

    def project(ids):
        return ibp.index_select(table, ids), ibp.index_select(table, ids) @ weights

    def write(table, ids, out):
        return table.index_select(ids + 1, out=out).sum(), out * 2

    one, other = compiled(project), compiled(write)
    for count in (5, 33, 34):
        ids = torch.randint(499, (count,))
        items, projected = one(ids.to(device))
        assert items.device == device
        assert_same_bits(items.cpu(), x[ids])
        torch.testing.assert_close(projected, x[ids].to(device) @ weights)
        out = torch.full((count, 64), 7.0, device=device)
        _, doubled = other(table, ids.to(device), out)
        assert_same_bits(out.cpu(), x[ids + 1])
        assert_same_bits(doubled.cpu(), x[ids + 1] * 2)


def test_decompress(compiled, place, device):
    """Into a new tensor, and into tensors whose items or elements lie apart, of which fresh tables know nothing yet."""
    x = spiky_rows(300, 60)
    made = functools.partial(torch.empty, device=device)
    outs = [made(300, 60), made(300, 2, 60)[:, 1], made(60, 300).t()]
    given = [{"device": device}, {"device": str(device)}, {"device": device, "max_sms": 2}]
    given += [{"out": out} for out in outs]
    for options in given:
        table = make_table(x, "planes", place, device)
        ibp.decompress(table, device=device)
        function = compiled(lambda options: ibp.decompress(table, **options) + 1)
        assert_same_bits(function(options).cpu(), x + 1)
        if "out" in options:
            assert_same_bits(options["out"].cpu(), x)


def test_bad_ids(compiled, place, device):
    """Raised by the next call outside, or by check(); their items are zeros."""
    x = embedding(500, 64) + 1
    table = make_table(x, "planes", place, device)
    table.index_select(torch.tensor([0], device=device))
    function = compiled(lambda ids: ibp.index_select(table, ids) + 0)
    ids = torch.tensor([4, 500, 7])
    for ask in (table.check, lambda: table.index_select(torch.tensor([1], device=device), check=True)):
        items = function(ids.to(device)).cpu()
        assert_same_bits(items[[0, 2]], x[[4, 7]])
        assert (items[1] == 0).all()
        with pytest.raises(IndexError, match=r"ids\[1\] is 500; wanted 0 to 499"):
            ask()
    table.check()
    assert_same_bits(table.index_select(torch.tensor([1], device=device)).cpu(), x[1:2])


def test_indices(compiled, place, device):
    """table[ids], with negative ids too. Ids out of range are noted, as those of index_select."""
    x = embedding(500, 64)
    table = make_table(x, "planes", place, device)
    table[torch.tensor([0], device=device)]
    function = compiled(lambda ids: table[ids] * 2)
    for ids in (torch.tensor([[3, -1, 499], [-500, 0, 7]]), torch.arange(-500, 500)):
        assert_same_bits(function(ids.to(device)).cpu(), x[ids] * 2)
    items = function(torch.tensor([[4, 500, -501]], device=device)).cpu()
    assert_same_bits(items[0], torch.stack([x[4] * 2, torch.zeros(64), torch.zeros(64)]))
    with pytest.raises(IndexError, match=r"ids\[1\] is 500; wanted 0 to 499"):
        table.check()


OUTSIDE = {
    "several tables": lambda table: lambda ids: ibp.index_select([table, table], ids, table_numbers=ids % 2),
    "RowCache": lambda table: ibp.RowCache(table, 20_000, torch.rand(500), devices="cpu").index_select,
    "trainable": lambda table: ibp.nn.Embedding(table.clone(), trainable=True),
    "offload": lambda table: offloaded(torch.nn.Sequential(ibp.nn.Embedding(table), torch.nn.Linear(64, 64))),
}


def offloaded(model):
    ibp.offload(model.eval(), device="cpu", min_bytes=1)
    return model


_FIRST_CALLS = """
import sys, torch, ibp
x, ids = torch.randn(100, 64).bfloat16(), torch.tensor([5, 99, 5])
cache = ibp.RowCache(ibp.compress(x, device="cpu"), 5000, torch.rand(100), devices="cpu")
bag = ibp.nn.EmbeddingBag(100, 64)
cache.index_select(ids), bag(ids[None])
assert "torch._dynamo" not in sys.modules
call = lambda ids: cache.index_select(ids) + 0
try:
    torch.compile(call, backend="eager", fullgraph=True)(ids)
except RuntimeError as error:
    assert "ibp runs it outside of graphs" in str(error), error
else:
    raise AssertionError
torch.compiler.reset()
assert torch.compile(call, backend="eager")(ids).equal(x[ids] + 0)
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_by_those_who_compile():
    """A call that loaded it would let a process that is forked meanwhile wait for it for ever."""
    subprocess.run([sys.executable, "-c", _FIRST_CALLS], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTSIDE)
def test_calls_outside_of_graphs(name):
    """A graph ends before them, and fullgraph=True, which allows no end, says so."""
    x, ids = embedding(500, 64), torch.tensor([5, 499, 5])
    call = OUTSIDE[name](make_table(x, "planes", "cpu", CPU))
    wanted = call(ids)
    assert_same_bits(torch.compile(lambda ids: call(ids) + 0, backend="eager")(ids), wanted + 0)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="without fullgraph=True"):
        torch.compile(lambda ids: call(ids) + 0, backend="eager", fullgraph=True)(ids)


@pytest.mark.parametrize("path", ["gpu", "bucketed"])
def test_paths(cuda, path):
    x = embedding(500, 64)
    table = make_table(x, "planes", "pinned", cuda)
    table.index_select(torch.tensor([0], device=cuda))
    options = {"fullgraph": True, "backend": "aot_eager"}
    function = torch.compile(lambda ids: ibp.index_select(table, ids, path=path) + 0, **options)
    ids = torch.randint(500, (300,))
    assert_same_bits(function(ids.to(cuda)).cpu(), x[ids] + 0)
