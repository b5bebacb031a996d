"""Products with inputs that the kernel does not take, or that no product has: as torch's with plain weights, or one
sentence that names the right input."""

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits

ROWS, COLUMNS = 40, 96


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.getfixturevalue("cuda") if request.param == "cuda" else torch.device("cpu")


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(weight, bias=None):
    module = torch.nn.Linear(1, 1, bias=False, device=weight.device)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    module.out_features, module.in_features = weight.shape
    return module.eval()


def ways(weight, bias=None):
    """The same layer, coded in each way: functions of x."""
    model = torch.nn.Sequential(layer(weight, bias))
    ibp.nn.compress(model, min_bytes=0)
    table = ibp.compress(weight, level="fast", device=weight.device)
    plain = layer(weight, bias)
    return {
        "ibp.linear": lambda x: ibp.linear(x, table, bias),
        "ibp.nn.Linear": ibp.nn.Linear.from_linear(plain),
        "ibp.nn.Linear, not fused": ibp.nn.Linear.from_linear(plain, fused=False),
        "ibp.nn.compress": model,
    }


def outcome(function, x):
    """The result, or type and message of what was raised."""
    try:
        return function(x)
    except Exception as error:
        return type(error), str(error)


def check_as_plain(x, weight, bias=None):
    """That each way does what torch does: its bits on the CPU, its numbers and special values on a GPU."""
    wanted = outcome(lambda x: F.linear(x, weight, bias), x)
    for way, multiply in ways(weight, bias).items():
        got = outcome(multiply, x)
        if isinstance(wanted, tuple) or isinstance(got, tuple):
            assert got == wanted, way
        elif got.is_cuda and got.dtype == torch.bfloat16:
            assert got.shape == wanted.shape and got.dtype == wanted.dtype, way
            torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3, equal_nan=True)
        else:
            assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_vectors_of_another_dtype(device, dtype):
    check_as_plain(normal(3, COLUMNS, dtype=torch.float32).to(dtype).to(device), normal(ROWS, COLUMNS).to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bias_of_another_dtype(device, dtype):
    x, weight = normal(3, COLUMNS).to(device), normal(ROWS, COLUMNS).to(device)
    check_as_plain(x, weight, normal(ROWS, dtype=dtype).to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64], ids=str)
def test_weights_of_other_dtypes(device, dtype):
    weight = normal(ROWS, COLUMNS, dtype=dtype).to(device)
    check_as_plain(normal(3, COLUMNS, dtype=dtype, seed=1).to(device), weight, normal(ROWS, dtype=dtype).to(device))


@pytest.mark.parametrize(
    "shape", [(ROWS, 90), (ROWS, 1), (15, COLUMNS), (1, COLUMNS), (0, COLUMNS), (ROWS, 0)], ids=str
)
@pytest.mark.parametrize("count", [0, 1, 70])
def test_shapes_that_the_kernel_does_not_take(device, shape, count):
    weight, bias = (0.1 * normal(*shape)).to(device), normal(shape[0]).to(device)
    check_as_plain(normal(count, shape[1], seed=1).to(device), weight, bias)


def test_numbers_that_are_not_finite(device):
    """In weights and vectors. On a GPU the sum that overflows has no order, so none does here."""
    weight, x = 0.1 * normal(64, COLUMNS), normal(8, COLUMNS, seed=1)
    weight[0, 0], weight[1, 1], weight[2, 2] = float("nan"), float("inf"), -float("inf")
    weight[3], weight[4], weight[5, 5], weight[6, 6] = 0, float("nan"), -0.0, 1e-39
    weight[7, ::2] = float("inf")
    check_as_plain(x.to(device), weight.to(device))
    x[0, 0], x[1, 1], x[2, 2], x[3] = float("inf"), float("nan"), -float("inf"), 0
    check_as_plain(x.to(device), weight.to(device), normal(64, seed=2).to(device))
    check_as_plain(x.to(device), normal(64, COLUMNS).fill_(float("nan")).to(device))


def test_weights_that_do_not_shrink(device):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-(1 << 15), 1 << 15, (64, COLUMNS), dtype=torch.int16, generator=generator)
    weight, x = weight.view(torch.bfloat16).to(device), normal(3, COLUMNS).to(device)
    model = torch.nn.Sequential(layer(weight))
    report = ibp.nn.compress(model, min_bytes=0)
    assert report.plain == {"0": "without gain"} and type(model[0]) is torch.nn.Linear
    for multiply in ways(weight).values():
        assert_same_bits(multiply(x), F.linear(x, weight))


def test_a_table_that_changes(device):
    """Modules over it multiply by the rows as they are."""
    weight, x = 0.1 * normal(64, COLUMNS).to(device), normal(3, COLUMNS, seed=1).to(device)
    module = ibp.nn.Linear.from_linear(layer(weight))
    module(x)
    changed = weight.clone()
    changed[5, ::2], changed[7] = 0, 3 * weight[8]
    module.weight.update_(torch.tensor([5, 7], device=device), changed[[5, 7]])
    for got in (module(x), ibp.linear(x, module.weight)):
        torch.testing.assert_close(got, F.linear(x, changed), rtol=2**-7, atol=1e-3)
    module.weight.append(weight[:3])
    wanted = F.linear(x, torch.cat((changed, weight[:3])))
    torch.testing.assert_close(ibp.linear(x, module.weight), wanted, rtol=2**-7, atol=1e-3)


def test_nested_and_sparse_vectors(device):
    weight, bias, x = normal(ROWS, COLUMNS).to(device), normal(ROWS).to(device), normal(3, COLUMNS, seed=1).to(device)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([x[:1], x], layout=layout)
        wanted = F.linear(nested, weight, bias)
        for multiply in ways(weight, bias).values():
            for got, one in zip(multiply(nested).unbind(), wanted.unbind()):
                torch.testing.assert_close(got, one, rtol=2**-7, atol=1e-3)
    table = ibp.compress(weight, device=device)
    with pytest.raises(ValueError, match="x is a nested tensor; wanted no out"):
        ibp.linear(nested, table, out=torch.empty(4, ROWS, dtype=x.dtype, device=device))
    check_as_plain(x.to_sparse(), weight)


def test_other_devices(device):
    """A table multiplies where x is; bias and out must be there."""
    weight, bias, x = normal(ROWS, COLUMNS).to(device), normal(ROWS).to(device), normal(3, COLUMNS, seed=1).to(device)
    for multiply in ways(weight, bias).values():
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            multiply(x.to("meta"))
    table = ibp.compress(weight, device=device)
    with pytest.raises(ValueError, match="x is on the meta device; wanted the CPU or a CUDA device"):
        ibp.linear(x.to("meta"), table)
    with pytest.raises(ValueError, match=f"out is on meta; wanted x's device, {x.device}"):
        ibp.linear(x, table, out=torch.empty(3, ROWS, dtype=x.dtype, device="meta"))
    with pytest.raises(RuntimeError, match="device"):
        ibp.linear(x, table, bias.to("meta"))


def test_a_table_on_a_gpu_and_vectors_on_the_cpu(cuda):
    weight, bias, x = 0.1 * normal(ROWS, COLUMNS), normal(ROWS), normal(3, COLUMNS, seed=1)
    on_gpu = ibp.compress(weight.to(cuda), level="fast")
    assert_same_bits(ibp.linear(x, on_gpu, bias), F.linear(x, weight, bias))
    with pytest.raises(RuntimeError, match="device"):
        ibp.linear(x, on_gpu, bias.to(cuda))
    with pytest.raises(RuntimeError, match="device"):
        ibp.nn.Linear(on_gpu, bias.to(cuda), fused=True)(x)
    on_cpu = ibp.compress(weight, level="fast", device="cpu")
    wanted = F.linear(x.to(cuda), weight.to(cuda), bias.to(cuda))
    assert_same_bits(ibp.linear(x.to(cuda), on_cpu, bias.to(cuda)), wanted)
    with pytest.raises(RuntimeError, match="device"):
        ibp.linear(x.to(cuda), on_gpu, bias)
