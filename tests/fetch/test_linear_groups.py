"""Products of groups of vectors with stacked matrices: `linear_groups`, and the groups that `group_vectors` makes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import ibp
from helpers import assert_same_bits
from ibp._fetch.linear import MOST_GROUPED, MOST_STACKED, group_vectors, linear_groups
from products import kernels_on_the_cpu, lists

MATRICES, ROWS, COLUMNS = 5, 32, 128


def stack(irregular=False, rows=ROWS, columns=COLUMNS, matrices=MATRICES):
    """Matrices, and a table of them one below the other. Some weights are escapes."""
    torch.manual_seed(0)
    weights = torch.empty(matrices, rows, columns).normal_(std=0.02).bfloat16()
    weights[:, ::5, 3] = 0
    if irregular:
        weights[1, 7] *= 2.0**-40
    return weights, ibp.nn.Linear.from_linear(linear_of(weights), device="cpu", memory="host").weight


def linear_of(weights):
    module = torch.nn.Linear(weights.shape[-1], weights.shape[0] * weights.shape[1], bias=False, dtype=weights.dtype)
    module.weight.data = weights.flatten(0, 1)
    return module


def vectors(number, columns=COLUMNS):
    return torch.randn(number, columns).bfloat16()


def wanted(x, weights, numbers):
    results = [F.linear(vector, weights[number]) for vector, number in zip(x, numbers)]
    return torch.stack(results) if results else x.new_empty(0, weights.shape[1])


@pytest.fixture
def kernel(monkeypatch):
    with kernels_on_the_cpu(monkeypatch) as calls:
        yield calls


def groups_of(numbers, num_matrices):
    """Groups of vectors that are in the order of their matrices."""
    return group_vectors(numbers, num_matrices)[1]


def check_groups(numbers, num_matrices):
    order, groups = group_vectors(numbers, num_matrices)
    assert order.dtype == torch.int64 and groups.dtype == torch.int32
    assert len(groups) == min(len(numbers), num_matrices) + len(numbers) // 8
    is_there = (numbers >= 0) & (numbers < num_matrices)
    wanted = torch.where(is_there, numbers, num_matrices).sort(stable=True)
    assert torch.equal(order, wanted.indices)
    held = groups[groups[:, 2] > 0].tolist()
    assert not groups[len(held) :, 2].any()
    found = [(number, first + place) for number, first, count in held for place in range(count)]
    assert found == [(n, place) for place, n in enumerate(wanted.values.tolist()) if n < num_matrices]
    assert all(count == 8 or following[0] != number for (number, _, count), following in zip(held, held[1:]))


@given(num_matrices=st.integers(0, 9), numbers=st.lists(st.integers(-2, 10), max_size=60), is_long=st.booleans())
def test_groups(num_matrices, numbers, is_long):
    check_groups(torch.tensor(numbers, dtype=torch.int64 if is_long else torch.int32), num_matrices)


def test_the_most_groups():
    check_groups(torch.arange(MOST_GROUPED).flip(0), MOST_STACKED)
    check_groups(torch.full((MOST_GROUPED,), MOST_STACKED - 1), MOST_STACKED)
    with pytest.raises(RuntimeError, match="there are 1025 vectors, more than 1024"):
        group_vectors(torch.zeros(MOST_GROUPED + 1, dtype=torch.int64), 3)
    for number in (-1, MOST_STACKED + 1):
        with pytest.raises(RuntimeError, match=f"num_matrices is {number}; wanted 0 to 4096"):
            group_vectors(torch.tensor([0]), number)


@pytest.mark.parametrize("irregular", [False, True])
@pytest.mark.parametrize("numbers", [[], [3], [0, 0, 2, 4], [1] * 8, [1] * 17 + [4] * 9], ids=len)
def test_products(kernel, numbers, irregular):
    """Where a row is irregular, matrices are decoded."""
    weights, table = stack(irregular)
    lists(table)
    x = vectors(len(numbers))
    y = linear_groups(x, table, groups_of(torch.tensor(numbers, dtype=torch.int64), MATRICES), ROWS)
    torch.testing.assert_close(y, wanted(x, weights, numbers))
    assert kernel == ([len(numbers)] if numbers and not irregular else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decoded_matrices(dtype):
    """Groups in any order; what follows the first one of no vectors is not looked at, and nothing else is written."""
    weights = stack()[0].to(dtype)
    table = ibp.compress(weights.flatten(0, 1))
    x = vectors(5).to(dtype).requires_grad_()
    groups = torch.tensor([[4, 3, 2], [0, 0, 1], [0, 0, 0], [9, 9, 9]], dtype=torch.int32)
    y = linear_groups(x, table, groups, ROWS)
    assert_same_bits(y[3:], F.linear(x[3:], weights[4]).detach())
    assert_same_bits(y[:1], F.linear(x[:1], weights[0]).detach())
    assert not y.requires_grad
    out = torch.full((5, ROWS), 7, dtype=dtype)
    assert linear_groups(x, table, groups, ROWS, out=out) is out
    assert_same_bits(out[[0, 3, 4]], y[[0, 3, 4]])
    assert bool((out[1:3] == 7).all())


@pytest.mark.parametrize("irregular", [False, True])
def test_an_order(kernel, irregular):
    """Vectors are where they were, and some share rows of x."""
    weights, table = stack(irregular)
    lists(table)
    numbers = [3, 0, 3, 4, 9, 0]
    x, (order, groups) = vectors(3), group_vectors(torch.tensor(numbers), MATRICES)
    out = torch.full((6, ROWS), 7, dtype=x.dtype)
    linear_groups(x, table, groups, ROWS, order=order, sharing=2, out=out)
    there = [v for v, number in enumerate(numbers) if number < MATRICES]
    torch.testing.assert_close(out[there], wanted(x[torch.tensor(there) // 2], weights, [numbers[v] for v in there]))
    assert bool((out[4] == 7).all()) and bool(kernel) != irregular


def test_refusals():
    (weights, table), x = stack(), vectors(2)
    groups = groups_of(torch.tensor([0, 1]), MATRICES)
    for arguments, error, message in (
        ((x, weights, groups, ROWS), TypeError, "table is a Tensor; wanted an ibp.CompressedTensor"),
        ((None, table, groups, ROWS), TypeError, "x is a NoneType"),
        ((x, table, groups.long(), ROWS), TypeError, "groups is torch.int64; wanted a tensor of torch.int32"),
        ((x, table, None, ROWS), TypeError, "groups is NoneType; wanted"),
        ((x[0], table, groups, ROWS), ValueError, r"x has shape \[128\] and groups \[2, 3\]; wanted \[V, K\] and"),
        ((x, table, groups[:, :2], ROWS), ValueError, r"groups \[2, 2\]; wanted"),
        ((x[:, 1:], table, groups, ROWS), ValueError, r"x has shape \[2, 127\]; wanted \[..., 128\]"),
        ((x, table, groups, 33), ValueError, "a matrix has 33 rows; wanted a divisor of the table's 160"),
        ((x, table, groups, 0), ValueError, "a matrix has 0 rows"),
        ((x, table, groups.to("meta"), ROWS), ValueError, "groups is on meta; wanted x's device, cpu"),
    ):
        with pytest.raises(error, match=message):
            linear_groups(*arguments)
    for order, sharing, error, message in (
        (None, 2, ValueError, "2 vectors share a row of x; wanted an order, too"),
        (torch.arange(2).int(), 1, TypeError, "order is torch.int32; wanted a tensor of torch.int64"),
        ([0, 1], 1, TypeError, "order is list"),
        (torch.arange(3), 1, ValueError, r"order has shape \[3\], strides \(1,\) and is on cpu; wanted \[2\]"),
        (torch.arange(2), 0, ValueError, r"wanted \[0\], contiguous"),
    ):
        with pytest.raises(error, match=message):
            linear_groups(x, table, groups, ROWS, order=order, sharing=sharing)
    for out, error, message in (
        (torch.empty(2, ROWS), TypeError, "out has dtype torch.float32; wanted torch.bfloat16"),
        (torch.empty(3, ROWS).bfloat16(), ValueError, r"out has shape \[3, 32\]; wanted \[2, 32\]"),
        (torch.empty(ROWS, 2).bfloat16().t(), ValueError, r"out is on cpu, with strides \(1, 2\); wanted cpu, contig"),
    ):
        with pytest.raises(error, match=message):
            linear_groups(x, table, groups, ROWS, out=out)
    for bad in ([5, 0, 1], [-1, 0, 1], [0, 1, 2], [0, -1, 1], [0, 0, 9]):
        with pytest.raises(IndexError, match="a group is .*; wanted one of 5 matrices and 2 vectors"):
            linear_groups(x, table, torch.tensor([bad], dtype=torch.int32), ROWS)


@pytest.mark.slow  # torch.compile is loaded
@torch.no_grad()
def test_compiled(kernel):
    weights, table = stack()
    lists(table)
    torch.compiler.reset()

    def multiply(x, numbers):
        return linear_groups(x, table, groups_of(numbers, MATRICES), ROWS)

    x, numbers = vectors(20), [0] * 9 + [2] * 3 + [4] * 8
    y = torch.compile(multiply, fullgraph=True)(x, torch.tensor(numbers))
    torch.testing.assert_close(y, wanted(x, weights, numbers))
    assert kernel == [20]


# ---- GPUs ----


@pytest.mark.parametrize("number", [0, 1, 8, 33, 256, MOST_GROUPED])
@pytest.mark.parametrize("num_matrices", [0, 1, 128, 1025, MOST_STACKED])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_groups_on_a_gpu(cuda, number, num_matrices, dtype):
    for below in (num_matrices + 3, 5):
        numbers = torch.randint(-2, below, (number,), dtype=dtype)
        given = numbers.to(cuda)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = group_vectors(given, num_matrices)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for mine, wanted in zip(found, group_vectors(numbers, num_matrices)):
            assert torch.equal(mine.cpu(), wanted)


@pytest.mark.parametrize("rows, columns", [(1536, 2048), (2048, 768), (16, 32), (48, 2880)])
@torch.no_grad()
def test_on_a_gpu(cuda, rows, columns):
    weights, table = stack(rows=rows, columns=columns)
    weights, table = weights.to(cuda), table.to(cuda).prepare_linear()
    for numbers in ([2], [0, 4], [0, 1, 1, 3], [1] * 8, [1] * 17 + [4] * 9, sorted([0, 1, 2, 3, 4] * 40)):
        x, ids = vectors(len(numbers), columns).to(cuda), torch.tensor(numbers, device=cuda)
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = linear_groups(x, table, groups_of(ids, MATRICES), rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(y, wanted(x, weights, numbers))


@torch.no_grad()
def test_a_group_out_of_range_ends_the_list_on_a_gpu(cuda):
    weights, table = stack()
    table, x = table.to(cuda).prepare_linear(), vectors(4).to(cuda)
    for wrong in ([5, 0, 1], [0, 3, 2], [0, 0, 9]):
        groups = torch.tensor([[2, 1, 1], wrong, [0, 2, 1]], dtype=torch.int32, device=cuda)
        y = linear_groups(x, table, groups, ROWS, out=torch.zeros(4, ROWS, dtype=x.dtype, device=cuda))
        torch.testing.assert_close(y[1], F.linear(x[1], weights[2].to(cuda)))
        assert not y[[0, 2, 3]].any()


@torch.no_grad()
def test_a_cuda_graph(cuda):
    weights, table = stack()
    weights, table = weights.to(cuda), table.to(cuda).prepare_linear()
    x, ids = vectors(20).to(cuda), torch.zeros(20, dtype=torch.int64, device=cuda)
    linear_groups(x, table, groups_of(ids, MATRICES), ROWS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_groups(x, table, groups_of(ids, MATRICES), ROWS)
    for _ in range(3):
        numbers = torch.randint(0, MATRICES, (20,)).sort().values
        ids.copy_(numbers)
        graph.replay()
        torch.testing.assert_close(y, wanted(x, weights, numbers.tolist()))
