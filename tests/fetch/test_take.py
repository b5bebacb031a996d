"""torch.ops.ibp.take, the operation of `index_select`: what it takes, what it refuses, and what a refusal becomes."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ibp
from helpers import assert_same_bits, embedding, make_tensor, reckon_with, spiky_rows
from ibp._rows.table import handle_on

ON_CPU = {"device": "cpu", "memory": "host"}
CPU = torch.device("cpu")
PLANNED, IN_ORDER, BUCKETED = 0, 1, 2


@pytest.fixture(scope="module")
def x():
    return spiky_rows(100, 60)


@pytest.fixture
def table(x):
    return ibp.compress(x, **ON_CPU, scheme="planes", slot_bytes=32)


def take(table, ids, max_sms=0, way=PLANNED, from_end=0, cache=None):
    handle = handle_on(table, ids.device)
    return torch.ops.ibp.take(handle.table, ids, handle.like, max_sms, way, from_end, cache)


def take_out(table, ids, out, max_sms=0, way=PLANNED):
    return torch.ops.ibp.take.out(handle_on(table, ids.device).table, ids, out, max_sms, way)


@pytest.mark.parametrize("scheme", ["raw", "ibp", "planes"])
@pytest.mark.parametrize("layout", ["slots", "packed"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_same_items(x, scheme, layout, dtype):
    table = ibp.compress(x, scheme=scheme, layout=layout, **ON_CPU)
    ids = torch.tensor([5, 99, 5, 0], dtype=dtype)
    for given in (ids, ids.repeat(2)[::2], ids[:0]):
        assert_same_bits(table.index_select(given), x[given.long()])
    out = torch.empty(4, 60, dtype=x.dtype)
    assert ibp.index_select(table, ids, out=out, max_sms=3) is out
    assert_same_bits(out, x[ids.long()])
    assert_same_bits(table[ids[1:]], x[ids[1:].long()])


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.uint16])
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 5)])
def test_items_of_any_kind(dtype, shape):
    x = make_tensor(shape, dtype, "random")
    table = ibp.compress(x, **ON_CPU)
    out = torch.empty(2, *shape[1:], dtype=dtype)
    for given in (None, out):
        assert_same_bits(table.index_select(torch.tensor([6, 2]), out=given), x[[6, 2]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_from_the_end(x, table, dtype):
    ids = torch.tensor([-1, 5, -100, 99], dtype=dtype)
    assert_same_bits(take(table, ids, from_end=100), x[ids.long()])
    with pytest.raises(RuntimeError, match="an item id is outside"):
        take(table, ids - 1, from_end=100)
    with pytest.raises(RuntimeError, match="from_end is 99"):
        take(table, ids, from_end=99)


def faultless():
    return torch.zeros(4, dtype=torch.int64)


class Marked(torch.Tensor):
    pass


class NoMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def resized(tensor):
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - tensor.element_size())
    return tensor


def test_unusual_ids(x, table):
    ids = torch.tensor([1, 2])
    for unusual in (ids.to(torch.int16), ids.as_subclass(Marked), [1, 2], ids.numpy(), torch.arange(1, 5)[::2]):
        assert_same_bits(table.index_select(unusual).as_subclass(torch.Tensor), x[torch.as_tensor(unusual).long()])
    assert_same_bits(table.index_select(torch.tensor(1)), x[[1]])
    with NoMode():
        assert_same_bits(take(table, ids), x[ids])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert take(table, mode.from_tensor(ids)).shape == (2, 60)


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([[1, 2]]), "ids has 2 dimensions"),
        (torch.tensor([1.0, 2.0]), "ids must be int32 or int64"),
        (torch.tensor([1, 100]), "an item id is outside"),
        (resized(torch.tensor([1, 2])), "ids has more elements than its storage"),
    ],
)
def test_refused_ids(table, ids, message):
    with pytest.raises(RuntimeError, match=message):
        take(table, ids)


def test_results_of_any_strides(x, table):
    """Contiguous, items of a larger tensor, and elements that are not one after the other."""
    ids = torch.tensor([1, 2, 99, 0, 5, 5])
    for out in (
        torch.empty(6, 60, dtype=x.dtype),
        torch.empty(6, 3, 60, dtype=x.dtype)[:, 1],
        torch.empty(2, 4, 3, 60, dtype=x.dtype)[:, 2],
        torch.empty(60, 6, dtype=x.dtype).T,
        torch.empty(6, 120, dtype=x.dtype)[:, ::2],
    ):
        assert table.index_select(ids, out=out) is out
        assert_same_bits(out.reshape(6, 60), x[ids])


def test_refused_results(table):
    ids, dtype = torch.tensor([1, 2]), table.dtype
    shared = torch.zeros(2 * 60 * dtype.itemsize, dtype=torch.uint8)
    small = ibp.compress(torch.arange(400, dtype=torch.int32).view(100, 4), scheme="raw", **ON_CPU)
    for out, message in (
        (torch.empty(3, 60, dtype=dtype), "out has 720 bytes, 480 are needed"),
        (resized(torch.empty(2, 60, dtype=dtype)), "out has more elements than its storage"),
        (torch.empty(2, 60, dtype=dtype, device="meta"), "must be on"),
    ):
        with pytest.raises(RuntimeError, match=message):
            take_out(table, ids, out)
    with pytest.raises(RuntimeError, match="out and ids share memory"):
        take_out(table, shared[:16].view(torch.int64), shared.view(dtype).view(2, 60))
    with pytest.raises(RuntimeError, match="out and slots share memory"):
        take_out(small, torch.arange(2), small.slots[:32].view(torch.int32).view(2, 4))
    with pytest.raises(RuntimeError, match="max_sms is -1"):
        take(table, ids, max_sms=-1)
    with pytest.raises(RuntimeError, match="way is 3"):
        take(table, ids, way=3)
    with pytest.raises(RuntimeError, match="like has items of other bytes than 240"):
        torch.ops.ibp.take(handle_on(table, CPU).table, ids, torch.empty(0, 61, dtype=dtype), 0, 0)


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


@pytest.mark.parametrize("call", [ibp.decompress, lambda path: ibp.index_select(path, [1])])
def test_paths_are_no_tables(call, tmp_path):
    for path in ("a.safetensors", tmp_path):
        with pytest.raises(TypeError, match=r"wanted an ibp.CompressedTensor: ibp.load\(path\) reads those of a file"):
            call(path)


def test_corrupt_rows(x):
    table = ibp.compress(x, scheme="planes", layout="packed", **ON_CPU)
    coded = int((table.lengths.to(torch.int32) > 0).nonzero()[0])
    table.lengths.view(torch.int16)[coded] += 1
    for _ in range(2):
        with pytest.raises(ibp.CorruptTableError):
            table.index_select(torch.tensor([coded]))


def test_a_table_that_moves_is_described_again(x):
    table = ibp.compress(x, **ON_CPU)
    before = handle_on(table, CPU)
    table._refresh()
    assert_same_bits(table.index_select(torch.tensor([7])), x[[7]])
    assert handle_on(table, CPU) is not before


def test_handles_are_checked(table):
    describe, parts = torch.ops.ibp.describe_table, handle_on(table, CPU).parts
    with pytest.raises(RuntimeError, match="slot_bytes is -1"):
        describe(*parts._replace(slot_bytes=-1))
    with pytest.raises(RuntimeError, match="plan has 2 numbers, 3 are needed"):
        describe(*parts._replace(plan=[1, 2]))
    with pytest.raises(RuntimeError, match="not what describe_table has described"):
        nothing = torch.zeros_like(describe(*parts))
        torch.ops.ibp.gather_items(nothing, torch.tensor([1]), 0, torch.empty(240, dtype=torch.uint8), faultless())


def test_a_handle_outlives_its_table(x):
    """What operations are given keeps the memory, as long as they use it."""
    table = ibp.compress(x, scheme="planes", **ON_CPU)
    given = handle_on(table, CPU).table
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
    for way in (PLANNED, IN_ORDER, BUCKETED):
        assert_same_bits(take(table, ids, way=way).cpu(), x[ids.cpu()])
        assert_same_bits(take(table, ids - 1000, way=way, from_end=1000).cpu(), x[ids.cpu()])
        spread = torch.empty(4, 2, 256, dtype=x.dtype, device=cuda)[:, 1]
        take_out(table, ids, spread, 8, way)
        assert_same_bits(spread.cpu(), x[ids.cpu()])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = torch.empty(4, 256, dtype=x.dtype, device=cuda)
        assert table.index_select(ids, out=out, max_sms=8) is out
    side.synchronize()
    assert_same_bits(out.cpu(), x[ids.cpu()])
    with pytest.raises(RuntimeError, match="all tensors must be on"):
        torch.ops.ibp.take(handle_on(table, ids.device).table, ids.cpu(), handle_on(table, ids.device).like, 0, 0)
    table.index_select(torch.tensor([1000], device=cuda))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"ids\[0\] is 1000"):  # before anything else
        table.index_select(ids)
    assert_same_bits(table.index_select(ids).cpu(), x[ids.cpu()])


def test_a_plan_is_made_anew_after_a_calibration(cuda, monkeypatch):
    table, ids = ibp.compress(embedding(1000, 256)).pin_memory(), torch.tensor([5, 999], device=cuda)
    table.index_select(ids)
    before = handle_on(table, ids.device)
    assert handle_on(table, ids.device) is before
    reckon_with(monkeypatch, reach_bytes=1)
    table.index_select(ids)
    assert handle_on(table, ids.device) is not before and handle_on(table, ids.device).machine.reach_bytes == 1


@pytest.mark.parametrize("way", [IN_ORDER, BUCKETED])
def test_in_a_graph(cuda, way):
    x = embedding(1000, 256, dtype=torch.bfloat16)
    table, ids = ibp.compress(x).pin_memory(), torch.tensor([5, 999], device=cuda)
    out, path = torch.empty(2, 256, dtype=torch.bfloat16, device=cuda), {IN_ORDER: "gpu", BUCKETED: "bucketed"}[way]
    table.index_select(ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.index_select(ids, out=out, path=path)
        made = table.index_select(ids, path=path)
    ids.copy_(torch.tensor([7, 3]))
    graph.replay()
    assert_same_bits(out.cpu(), x[[7, 3]])
    assert_same_bits(made.cpu(), x[[7, 3]])
