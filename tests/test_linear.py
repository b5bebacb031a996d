"""ibp.linear and ibp.nn.Linear: by torch's function on decoded weights, and by the kernel that decodes them itself."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits
from ibp import _linear

SHAPES = [(4096, 1024), (48, 32), (100, 4128), (16, 96), (1000, 2048)]


def matrix(rows, columns, device="cpu", dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype).to(device)


def vectors(count, columns, device="cpu", dtype=torch.bfloat16):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype).to(device)


def coded(weight, **options):
    options.setdefault("slot_bytes", _linear.slot_bytes_for(weight.shape[1]))
    return ibp.compress(weight, level="fast", device=weight.device, pin_memory=False, **options)


# ---- by torch's function ----


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,), (9, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_as_torch(shape, dtype):
    weight, bias = matrix(40, 96, dtype=dtype), torch.randn(40).to(dtype)
    x = torch.randn(*shape, 96).to(dtype)
    table = ibp.compress(weight, device="cpu", pin_memory=False)
    for given in (None, bias):
        wanted = F.linear(x, weight, given)
        assert_same_bits(ibp.linear(x, table, given), wanted)
        out = torch.empty(wanted.shape, dtype=dtype)
        assert ibp.linear(x, table, given, out=out) is out
        assert_same_bits(out, wanted)
    strided = torch.randn(96, *shape).to(dtype).movedim(0, -1)
    assert_same_bits(ibp.linear(strided, table), F.linear(strided, weight))


def test_gradients():
    weight, bias = matrix(40, 96), torch.randn(40).bfloat16().requires_grad_()
    x = vectors(3, 96).requires_grad_()
    ibp.linear(x, ibp.compress(weight, device="cpu", pin_memory=False), bias).sum().backward()
    got = x.grad, bias.grad
    x.grad = bias.grad = None
    F.linear(x, weight, bias).sum().backward()
    assert_same_bits(got[0], x.grad)
    assert_same_bits(got[1], bias.grad)


def test_refusals():
    table, x = ibp.compress(matrix(40, 96), device="cpu", pin_memory=False), vectors(3, 96)
    for arguments, error, message in (
        ((x, x), TypeError, "table is a Tensor; wanted an ibp.CompressedTensor"),
        ((None, table), TypeError, "x is a NoneType; wanted a torch.Tensor"),
        ((x, table, 3), TypeError, "bias is a int; wanted a torch.Tensor"),
        ((x[:, :95], table), ValueError, r"x has shape \[3, 95\]; wanted \[..., 96\]"),
        ((x[0, 0], table), ValueError, r"x has shape \[\]; wanted \[..., 96\]"),
        ((x, table, x[0]), ValueError, r"bias has shape \[96\]; wanted \[40\]"),
        ((x, ibp.compress(x[0], device="cpu", pin_memory=False)), ValueError, r"the table has shape \[96\]"),
    ):
        with pytest.raises(error, match=message):
            ibp.linear(*arguments)
    with pytest.raises(ValueError, match=r"out has shape \[2, 40\]; wanted \[3, 40\]"):
        ibp.linear(x, table, out=torch.empty(2, 40, dtype=x.dtype))
    with pytest.raises(TypeError, match="out has dtype torch.float32"):
        ibp.linear(x, table, out=torch.empty(3, 40))


def test_which_tables_the_kernel_takes():
    weight = matrix(64, 2048)
    assert _linear._takes(coded(weight))
    for table in (
        ibp.compress(weight, device="cpu", pin_memory=False),
        coded(weight, slot_bytes=3072),
        coded(weight[:15].contiguous()),
        coded(weight[:, :2040].contiguous(), slot_bytes=None),
        ibp.compress(weight, level="fast", layout="packed", device="cpu", pin_memory=False),
        ibp.compress(weight.half(), level="fast", device="cpu", pin_memory=False),
        ibp.compress(weight, scheme="raw", device="cpu", pin_memory=False),
        ibp.compress(weight, level="fast", row_bytes=1024, slot_bytes=800, device="cpu", pin_memory=False),
    ):
        assert not _linear._takes(table)


@pytest.mark.parametrize("columns", [32, 64, 96, 1024, 4096, 11008, 32736])
def test_slots_hold_escapes(columns):
    slot_bytes = _linear.slot_bytes_for(columns)
    assert slot_bytes % 32 == 0 and columns * 3 // 2 + 16 <= slot_bytes <= 2 * columns
    assert _linear.slot_bytes_for(columns + 8) is None and _linear.slot_bytes_for(0) is None


def test_module():
    plain = torch.nn.Linear(96, 40).bfloat16()
    x = vectors(3, 96)
    wanted = plain(x)
    for module in (
        ibp.nn.Linear.from_linear(plain),
        ibp.nn.Linear.from_linear(plain, fused=False),
        ibp.nn.Linear.from_linear(plain, layout="packed"),
    ):
        assert module.bias is plain.bias
        for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert_same_bits(made(x), wanted)
            assert made.fused == module.fused and ("fused=True" in repr(made)) == module.fused
    other, module = torch.nn.Linear(96, 40).bfloat16(), ibp.nn.Linear.from_linear(plain)
    module.load_state_dict(other.state_dict())
    assert_same_bits(module(x), other(x))
    assert _linear._takes(module.weight)
    assert ibp.nn.Linear.from_linear(torch.nn.Linear(100, 40, bias=False))(torch.ones(100)).shape == (40,)
    with pytest.raises(TypeError, match="module is a ReLU; wanted a torch.nn.Linear"):
        ibp.nn.Linear.from_linear(torch.nn.ReLU())


# ---- by the kernel ----


@pytest.fixture
def fused(monkeypatch):
    """Calls of `ibp.linear` fail that are not fused."""

    def fail(*arguments, **options):
        raise AssertionError("the weights are decoded")

    monkeypatch.setattr(_linear, "decompress", fail)


def check_products(x, weight, bias, got):
    """Up to the rounding of the result and what is lost in sums of float."""
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = F.linear(x.double().abs(), weight.double().abs())
    assert got.shape == wanted.shape and got.dtype == torch.bfloat16
    assert ((got.double() - wanted).abs() <= wanted.abs() / 256 + scale * 1e-5 + 1e-30).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_weight(cuda, fused, shape):
    """Products with one element are weights, or zeros of either sign."""
    weight = matrix(*shape, cuda)
    table = coded(weight)
    one_hot = torch.eye(shape[1], dtype=torch.bfloat16, device=cuda)
    for first in range(0, shape[1], 8 * 16):
        part = one_hot[first : first + 8]
        assert torch.equal(ibp.linear(part, table).t(), weight[:, first : first + 8])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(cuda, fused, shape, count):
    weight, bias = matrix(*shape, cuda), vectors(1, shape[0], cuda)[0]
    table, x = coded(weight), vectors(count, shape[1], cuda)
    for given in (None, bias):
        got = ibp.linear(x, table, given, check=True)
        check_products(x, weight, given, got)
        assert_same_bits(ibp.linear(x[None], table, given)[0], got)
        assert_same_bits(ibp.linear(x[-1], table, given), got[-1])
        out = torch.empty(shape[0], count, dtype=torch.bfloat16, device=cuda).t()
        assert ibp.linear(x, table, given, out=out) is out
        assert_same_bits(out, got)


def test_irregular_rows(cuda, fused):
    """Raw and default rows, many escapes, rows that leave their slots."""
    weight = matrix(96, 2048, cuda)
    weight[3] = 0
    weight[5] *= 2.0**-20
    below_two = torch.randint(-(2**15), 2**15, (2048,), dtype=torch.int16) & ~(1 << 14)
    weight[20] = below_two.to(cuda).view(torch.bfloat16)
    weight[40:50, ::50] *= 2.0**-20  # 41 escapes
    weight[60:70, ::100] *= 2.0**30  # 21
    x, codebook = vectors(8, 2048, cuda), coded(matrix(96, 2048, cuda)).codebook
    for slot_bytes in (3072 + 32, 3072 + 64, 4096):
        table = ibp.compress(weight, codebook=codebook, slot_bytes=slot_bytes, pin_memory=False)
        got = ibp.linear(x, table, check=True)
        check_products(x, weight, None, got)
        for column in (0, 50, 100, 2047):
            one = torch.zeros(1, 2048, dtype=torch.bfloat16, device=cuda)
            one[0, column] = 1
            assert torch.equal(ibp.linear(one, table)[0], weight[:, column])


def test_corrupt_rows(cuda, fused):
    weight, x = matrix(64, 2048, cuda), vectors(2, 2048, cuda)
    table = coded(weight)
    lengths = table.lengths.view(torch.int16)
    lengths[7] += 1
    lengths[30] = 17
    got = ibp.linear(x, table)
    rows = torch.ones(64, dtype=torch.bool, device=cuda)
    rows[[7, 30]] = False
    assert not got[:, ~rows].any()
    check_products(x, weight[rows], None, got[:, rows])
    torch.cuda.synchronize()
    with pytest.raises(ibp.CorruptTableError, match="7|30"):
        table.check()


def test_graph_and_streams(cuda, fused):
    weight, x = matrix(512, 1024, cuda), vectors(4, 1024, cuda)
    table = coded(weight)
    out = torch.empty(4, 512, dtype=torch.bfloat16, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ibp.linear(x, table, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            ibp.linear(x, table, out=out)
        x.copy_(x.flip(0))
        out.zero_()
        graph.replay()
    stream.synchronize()
    check_products(x, weight, None, out)


def test_views_that_are_not_aligned(cuda, fused):
    weight, table = matrix(64, 96, cuda), coded(matrix(64, 96, cuda))
    flat = vectors(3, 97, cuda).view(-1)
    for x in (flat[1:97], flat[3 : 3 + 2 * 96].view(2, 96), vectors(96, 3, cuda).t()):
        check_products(x, weight, None, ibp.linear(x, table))


def test_autocast_and_gradients(cuda):
    weight, x = matrix(64, 96, cuda), vectors(2, 96, cuda)
    table = coded(weight)
    with torch.autocast("cuda", dtype=torch.float16):
        assert ibp.linear(x, table).dtype == torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert ibp.linear(x.float(), table).dtype == torch.bfloat16
        check_products(x, weight, None, ibp.linear(x, table))
    x.requires_grad_()
    ibp.linear(x, table).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 96))


def test_module_on_a_gpu(cuda, fused):
    plain = torch.nn.Linear(1024, 256, dtype=torch.bfloat16, device=cuda)
    module, x = ibp.nn.Linear.from_linear(plain), vectors(3, 1024, cuda)
    with torch.no_grad():
        check_products(x, plain.weight, plain.bias, module(x))
    with pytest.raises(AssertionError, match="decoded"):
        module(vectors(9, 1024, cuda))


def test_operation(cuda):
    table, x = coded(matrix(64, 96, cuda)), vectors(2, 96, cuda)
    out, fault = torch.empty(2, 64, dtype=x.dtype, device=cuda), torch.zeros(4, dtype=torch.int64, device=cuda)
    for bias in (None, vectors(1, 64, cuda)[0]):
        torch.library.opcheck(torch.ops.ibp.linear.default, (*table._arguments(cuda), x, bias, out, fault))
    for arguments, message in (
        ((x[:, :64].contiguous(), None, out, fault), "x has rows of 64 elements, 96 are needed"),
        ((x, x[0], out, fault), "bias has 96 elements, 64 are needed"),
        ((x.float(), None, out, fault), "x has the wrong dtype"),
        ((x, None, out[0], fault), "out has 64 elements, 128 are needed"),
        ((vectors(9, 96, cuda), None, vectors(9, 64, cuda), fault), "linear"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.ibp.linear(*table._arguments(cuda), *arguments)
