"""Calls of index_select for few rows: a table that an earlier call has made ready takes the shortest way, gives the
same bits, and leaves everything unusual to the operations."""

import gc
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ibp
from helpers import assert_same_bits, embedding, make_tensor, spiky_rows
from ibp._fetch import gather
from ibp._rows.table import LEAST_SHARED_BYTES

ON_CPU = {"device": "cpu", "memory": "host"}
CPU = torch.device("cpu")


def ready_table(x, **arguments):
    table = ibp.compress(x, **ON_CPU, **arguments)
    table.index_select(torch.tensor([0]))
    assert table.handle(CPU).core.is_ready
    return table


@pytest.fixture(scope="module")
def x():
    return spiky_rows(100, 60)


@pytest.fixture
def table(x):
    return ready_table(x, scheme="planes", slot_bytes=32)


@pytest.fixture
def only_ready(monkeypatch):
    """Fails where a call goes on to the operations."""

    def choose(*_):
        raise AssertionError("the call was not taken by the shortest way")

    monkeypatch.setattr(gather, "choose", choose)


@pytest.mark.parametrize("scheme", ["raw", "ibp", "planes"])
@pytest.mark.parametrize("layout", ["slots", "packed"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_same_items(x, scheme, layout, dtype, request):
    table = ready_table(x, scheme=scheme, layout=layout)
    request.getfixturevalue("only_ready")
    ids = torch.tensor([5, 99, 5, 0], dtype=dtype)
    assert_same_bits(table.index_select(ids), x[ids.long()])
    out = torch.empty(4, 60, dtype=x.dtype)
    assert ibp.index_select(table, ids, out=out, max_sms=3) is out
    assert_same_bits(out, x[ids.long()])
    assert_same_bits(table[ids[1:]], x[ids[1:].long()])


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.uint16])
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 5)])
def test_items_of_any_kind(dtype, shape, request):
    x = make_tensor(shape, dtype, "random")
    table = ready_table(x)
    request.getfixturevalue("only_ready")
    out = torch.empty(2, *shape[1:], dtype=dtype)
    for given in (None, out):
        assert_same_bits(table.index_select(torch.tensor([6, 2]), out=given), x[[6, 2]])


def test_few_python_calls(table):
    """What a call costs is Python's own work: frames that it enters, C functions left out."""
    ids, out, entered = torch.tensor([1, 2]), torch.empty(2, 60, dtype=table.dtype), []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        ibp.index_select(table, ids, out=out)
    finally:
        sys.setprofile(None)
    assert len(entered) <= 5, entered


def faultless():
    return torch.zeros(4, dtype=torch.int64)


def taken(table, ids, out=None, max_sms=0):
    return table.handle(CPU).core.take(ids, out, max_sms)


class Marked(torch.Tensor):
    pass


class NoMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def resized(tensor):
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - tensor.element_size())
    return tensor


def test_unusual_ids(table):
    ids = torch.tensor([1, 2])
    assert taken(table, ids) is not None
    for unusual in (
        ids[:0],
        ids.view(1, 2),
        torch.arange(4)[::2],
        ids.to(torch.int16),
        ids.double(),
        ids.to("meta"),
        ids.as_subclass(Marked),
        torch.tensor(1),
        torch.zeros(LEAST_SHARED_BYTES, dtype=torch.int64),
        resized(torch.tensor([1, 2])),
        [1, 2],
        None,
    ):
        assert taken(table, unusual) is None
    with NoMode():
        assert taken(table, ids) is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert taken(table, ids) is None
    assert torch.func.vmap(lambda one: torch.tensor(taken(table, one) is None))(ids.view(1, 2)).all()


def test_unusual_out(table):
    ids, dtype = torch.tensor([1, 2]), table.dtype
    shared = torch.zeros(2 * 60 * dtype.itemsize, dtype=torch.uint8)
    small = ready_table(torch.arange(400, dtype=torch.int32).view(100, 4), scheme="raw")
    assert taken(table, ids, torch.empty(2, 60, dtype=dtype)) is not None
    for unusual in (
        torch.empty(2, 60, dtype=torch.int64),
        torch.empty(3, 60, dtype=dtype),
        torch.empty(120, dtype=dtype),
        torch.empty(60, 2, dtype=dtype).T,
        torch.empty(2, 60, dtype=dtype, device="meta"),
        torch.empty(2, 60, dtype=dtype).as_subclass(Marked),
        resized(torch.empty(2, 60, dtype=dtype)),
        "out",
    ):
        assert taken(table, ids, unusual) is None
    assert taken(table, shared[:16].view(torch.int64), shared.view(dtype).view(2, 60)) is None
    assert taken(small, torch.arange(2), small.slots[:32].view(torch.int32).view(2, 4)) is None
    if dtype.is_floating_point:
        assert taken(table, ids, torch.empty(2, 60, dtype=dtype, requires_grad=True)) is None


def test_errors_are_those_of_the_operations(table):
    for ids, found in (([3, 100], "ids\\[1\\] is 100"), ([-1], "ids\\[0\\] is -1")):
        with pytest.raises(IndexError, match=found):
            table.index_select(torch.tensor(ids))
    with pytest.raises(ValueError, match="out has shape"):
        table.index_select(torch.tensor([1]), out=torch.empty(2, 60, dtype=table.dtype))
    with pytest.raises(TypeError, match="max_sms"):
        table.index_select(torch.tensor([1]), max_sms="all")
    with pytest.raises(ValueError, match="max_sms"):
        table.index_select(torch.tensor([1]), max_sms=0)


def test_corrupt_rows(x):
    table = ready_table(x, scheme="planes", layout="packed")
    coded = int((table.lengths.to(torch.int32) > 0).nonzero()[0])
    table.lengths.view(torch.int16)[coded] += 1
    for _ in range(2):
        with pytest.raises(ibp.CorruptTableError):
            table.index_select(torch.tensor([coded]))


def test_a_table_that_moves_is_made_ready_again(x):
    table = ready_table(x)
    table._refresh()
    assert not table.handle(CPU).core.is_ready
    assert_same_bits(table.index_select(torch.tensor([7])), x[[7]])
    assert table.handle(CPU).core.is_ready


def test_handles_are_checked(table):
    describe, parts = torch.ops.ibp.describe_table.default, table.handle(CPU).parts
    with pytest.raises(RuntimeError, match="slot_bytes is -1"):
        ibp._core.TableHandle(describe, parts._replace(slot_bytes=-1))
    nothing = ibp._core.TableHandle(lambda *_: None, parts)
    assert nothing.take(torch.tensor([1]), None, 0) is None
    with pytest.raises(RuntimeError, match="not what describe_table has described"):
        bytes_ = torch.frombuffer(nothing, dtype=torch.uint8)
        torch.ops.ibp.gather_items(bytes_, torch.tensor([1]), 0, torch.empty(240, dtype=torch.uint8), faultless())


def test_a_handle_outlives_its_table(x):
    """What operations are given keeps the memory, as long as they use it."""
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    given = table.handle(CPU).table
    del table
    gc.collect()
    out = torch.empty(3, 60, dtype=x.dtype)
    torch.ops.ibp.gather_items(given, torch.tensor([7, 99, 0]), 0, out, faultless())
    assert_same_bits(out, x[[7, 99, 0]])


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_on_a_gpu(place, cuda):
    x = embedding(1000, 256, dtype=torch.bfloat16)
    table = ibp.compress(x.to(cuda)) if place == "device" else ibp.compress(x).pin_memory()
    ids = torch.tensor([5, 999, 5, 0], device=cuda)
    first, ready = table.index_select(ids), table.handle(ids.device).core
    again = ready.take(ids, None, 0)
    assert_same_bits(again, first)
    assert_same_bits(again.cpu(), x[ids.cpu()])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = torch.empty_like(first)
        assert ready.take(ids, out, 8) is out
    side.synchronize()
    assert_same_bits(out, first)
    assert ready.take(ids.cpu(), None, 0) is None
    table.index_select(torch.tensor([1000], device=cuda))
    torch.cuda.synchronize()
    assert ready.take(ids, None, 0) is None  # a fault is to be raised first
    with pytest.raises(IndexError):
        table.index_select(ids)
    assert ready.take(ids, None, 0) is not None


def test_in_a_graph(cuda):
    x = embedding(1000, 256, dtype=torch.bfloat16)
    table, ids = ibp.compress(x.to(cuda)), torch.tensor([5, 999], device=cuda)
    out = torch.empty(2, 256, dtype=torch.bfloat16, device=cuda)
    table.index_select(ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.index_select(ids, out=out)
    ids.copy_(torch.tensor([7, 3]))
    graph.replay()
    assert_same_bits(out.cpu(), x[[7, 3]])
