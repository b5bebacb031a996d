"""ibp.linear and ibp.nn.Linear: by torch's function on decoded weights, and by the kernel that decodes them itself."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits
from ibp._fetch import linear
from products import matrix_of

AWAY = 2.0**-30  # what weights are multiplied by to become escapes
SHAPES = [(4096, 1024), (48, 32), (100, 4128), (16, 96), (1000, 2048)]


def matrix(rows, columns, device="cpu", dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype).to(device)


def vectors(count, columns, device="cpu", dtype=torch.bfloat16):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype).to(device)


def coded(weight, **options):
    options.setdefault("slot_bytes", linear.slot_bytes_for(weight.shape[1], weight.dtype))
    return ibp.compress(
        weight, level="fast", device=weight.device, memory=None if weight.is_cuda else "host", **options
    )


# ---- by torch's function ----


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,), (9, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_same_bits_as_torch(shape, dtype):
    weight, bias = matrix(40, 96, dtype=dtype), torch.randn(40).to(dtype)
    x = torch.randn(*shape, 96).to(dtype)
    table = ibp.compress(weight, device="cpu", memory="host")
    for given in (None, bias):
        wanted = F.linear(x, weight, given)
        assert_same_bits(ibp.linear(x, table, given), wanted)
        out = torch.empty(wanted.shape, dtype=dtype)
        assert ibp.linear(x, table, given, out=out) is out
        assert_same_bits(out, wanted)
    strided = torch.randn(96, *shape).to(dtype).movedim(0, -1)
    assert_same_bits(ibp.linear(strided, table), F.linear(strided, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients(dtype):
    weight, bias = matrix(40, 96, dtype=dtype), torch.randn(40).to(dtype).requires_grad_()
    x = vectors(3, 96, dtype=dtype).requires_grad_()
    ibp.linear(x, ibp.compress(weight, device="cpu", memory="host"), bias).sum().backward()
    got = x.grad, bias.grad
    x.grad = bias.grad = None
    F.linear(x, weight, bias).sum().backward()
    assert_same_bits(got[0], x.grad)
    assert_same_bits(got[1], bias.grad)


def test_refusals():
    table, x = ibp.compress(matrix(40, 96), device="cpu", memory="host"), vectors(3, 96)
    for arguments, error, message in (
        ((x, x), TypeError, "table is a Tensor; wanted an ibp.CompressedTensor"),
        ((None, table), TypeError, "x is a NoneType; wanted a torch.Tensor"),
        ((x, table, 3), TypeError, "bias is a int; wanted a torch.Tensor"),
        ((x[:, :95], table), ValueError, r"x has shape \[3, 95\]; wanted \[..., 96\]"),
        ((x[0, 0], table), ValueError, r"x has shape \[\]; wanted \[..., 96\]"),
        ((x, table, x[0]), ValueError, r"bias has shape \[96\]; wanted \[40\]"),
        ((x, ibp.compress(x[0], device="cpu", memory="host")), ValueError, r"the table has shape \[96\]"),
    ):
        with pytest.raises(error, match=message):
            ibp.linear(*arguments)
    with pytest.raises(ValueError, match=r"out has shape \[2, 40\]; wanted \[3, 40\]"):
        ibp.linear(x, table, out=torch.empty(2, 40, dtype=x.dtype))
    with pytest.raises(TypeError, match="out has dtype torch.float32"):
        ibp.linear(x, table, out=torch.empty(3, 40))


def test_quantised_weights_are_refused_as_plain_ones():
    """By a sentence of torch's function."""
    weight, x = matrix(40, 128, dtype=torch.float8_e4m3fn), vectors(3, 128)
    with pytest.raises(RuntimeError, match="to have the same dtype, but got: .*BFloat16 != .*Float8_e4m3fn"):
        ibp.linear(x, ibp.compress(weight, level="fast", device="cpu", memory="host"))


def test_a_new_codebook_is_not_used_with_old_escapes():
    table = coded(matrix(64, 2048))
    table._escapes = linear._state(table), linear.list_escapes(table)
    table.refit(level="default")
    assert table._escapes is None


def test_functions_that_see_no_kernel():
    assert not linear.is_transformed()
    with torch.autograd.forward_ad.dual_level():
        assert linear.is_transformed()
    seen = []
    torch.func.vmap(lambda x: seen.append(linear.is_transformed()) or x)(torch.ones(2))
    assert seen == [True] and not linear.is_transformed()


def test_which_tables_the_kernel_takes():
    weight = matrix(64, 2048)
    assert linear.takes(coded(weight))
    place = ibp.CodedRows(coded(weight).codebook, 64, slot_bytes=3136, overflow_bytes=4096, device="cpu")
    for table in (
        place.table(weight.shape, weight.dtype),  # whose rows may be coded anew at any time
        copy.copy(place.table(weight.shape, weight.dtype)),
        ibp.compress(weight, device="cpu", memory="host"),
        coded(weight, slot_bytes=3040),
        coded(weight[:15].contiguous()),
        coded(weight[:, :2040].contiguous(), slot_bytes=None),
        ibp.compress(weight, level="fast", layout="packed", device="cpu", memory="host"),
        coded(weight.half()),
        ibp.compress(weight, scheme="raw", device="cpu", memory="host"),
        ibp.compress(weight, level="fast", row_bytes=1024, slot_bytes=800, device="cpu", memory="host"),
    ):
        assert not linear.takes(table)


@pytest.mark.parametrize("columns", [32, 64, 96, 1024, 4096, 11008, 32736])
def test_slots_hold_escapes(columns):
    slot_bytes = linear.slot_bytes_for(columns)
    room = 16 if columns >= 1024 else 0
    assert slot_bytes % 32 == 0 and columns * 3 // 2 + room <= slot_bytes <= 2 * columns
    assert linear.slot_bytes_for(columns + 8) is None and linear.slot_bytes_for(0) is None
    assert linear.slot_bytes_for(columns, torch.float16) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_module(dtype):
    plain = torch.nn.Linear(256, 40).to(dtype)
    x = vectors(3, 256, dtype=dtype)
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
    other, module = torch.nn.Linear(256, 40).to(dtype), ibp.nn.Linear.from_linear(plain)
    module.load_state_dict(other.state_dict())
    assert_same_bits(module(x), other(x))
    assert linear.takes(module.weight) == (dtype == torch.bfloat16)
    other = ibp.nn.Linear.from_linear(plain, device="cpu", memory="host")
    assert linear.takes(other.weight) == (dtype == torch.bfloat16)
    assert ibp.nn.Linear.from_linear(torch.nn.Linear(100, 40, bias=False))(torch.ones(100)).shape == (40,)
    with pytest.raises(TypeError, match="module is a ReLU; wanted a torch.nn.Linear"):
        ibp.nn.Linear.from_linear(torch.nn.ReLU())


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(torch.nn.Linear):
    pass


def test_modules_that_compute_something_else():
    """A subclass with torch's forward is as torch's class; one with its own is refused."""
    plain, x = Named(96, 40), torch.ones(96)
    assert_same_bits(ibp.nn.Linear.from_linear(plain, fused=False)(x), plain(x))
    with pytest.raises(TypeError, match=r"module is a Doubled with a forward of its own.* torch.nn.Linear"):
        ibp.nn.Linear.from_linear(Doubled(96, 40))
    plain.forward = lambda x: x
    with pytest.raises(TypeError, match="module is a Named with a forward of its own"):
        ibp.nn.Linear.from_linear(plain)


# ---- escapes ----


def uneven(rows=96, columns=2048, device="cpu"):
    """Weights with rows that are zeros, raw, and have many escapes, and the codebook of weights without."""
    weight = matrix(rows, columns, device)
    weight[3] = 0.0  # the default
    weight[5] *= AWAY
    bits = torch.randint(-(2**15), 2**15, (columns,), dtype=torch.int16) & ~(1 << 14)
    weight[20] = bits.to(device).view(weight.dtype)
    weight[40:50, ::50] *= AWAY  # 41 escapes
    weight[60:70, ::100] *= 2.0**30  # 21
    return weight, coded(matrix(rows, columns, device)).codebook


def multiplied(table, listed):
    """The matrix as the kernel multiplies it: digits, with escapes in place of what they are taken for."""
    assert listed.starts[0] == 0 and len(listed.starts) == len(table) + 1
    form = table.slots, table.slot_bytes, listed.below, listed.starts, listed.entries
    weight = matrix_of(*form, table.shape[1])
    weight[listed.rows] = listed.weights
    return weight


@pytest.mark.parametrize("room", [0, 64, 256])
def test_escapes_complete_the_digits(room):
    weight, codebook = uneven()
    slot_bytes = 3072 + room
    weight[41, 7], weight[42, 9], weight[43, 11] = float("inf"), float("nan"), 0.0
    table = ibp.compress(weight, codebook=codebook, slot_bytes=slot_bytes, device="cpu", memory="host")
    listed = linear.list_escapes(table)
    assert listed.rows.tolist() == [3, 5, 20] and len(listed.entries) >= 600
    assert listed.nbytes == len(listed.below) + 4 * 97 + 8 * len(listed.entries) + 3 * (8 + 4096)
    assert_same_bits(multiplied(table, listed), weight)


def test_escapes_are_listed_by_chunks(monkeypatch):
    weight = matrix(100, 96)
    weight[::9, 5] *= AWAY
    table = coded(weight)
    whole = linear.list_escapes(table)
    monkeypatch.setattr(linear, "_CHUNK_ELEMENTS", weight.shape[1] * 7)
    for one, other in zip(linear.list_escapes(table), whole):
        assert torch.equal(one, other)
    assert_same_bits(multiplied(table, whole), weight)


def test_many_irregular_rows_are_not_listed():
    weight, codebook = uneven()
    weight[80] = weight[3]
    table = coded(weight, codebook=codebook)
    assert linear.list_escapes(table) is None


def test_long_rows_may_have_more_escapes():
    """One in 128 columns, where that is more than 64."""
    columns = 16384
    weight = matrix(64, columns)
    codebook = coded(weight).codebook
    weight[:, ::180] *= AWAY
    weight[7, : columns // 100] *= AWAY
    table = coded(weight, codebook=codebook)
    listed = linear.list_escapes(table)
    assert listed.rows.tolist() == [7] and 63 * 91 <= len(listed.entries) <= 63 * 128
    assert_same_bits(multiplied(table, listed), weight)


def test_escapes_of_damaged_rows():
    table = coded(matrix(64, 2048))
    table.lengths.view(torch.int16)[7] += 1
    with pytest.raises(ibp.CorruptTableError, match="7"):
        linear.list_escapes(table)


# ---- by the kernel ----


@pytest.fixture
def fused(monkeypatch):
    """Calls of `ibp.linear` fail that are not fused."""

    def fail(*arguments, **options):
        raise AssertionError("the weights are decoded")

    monkeypatch.setattr(linear, "decompress", fail)
    monkeypatch.setattr(linear, "matrix_of", fail)


def check_products(x, weight, bias, got):
    """Up to the rounding of the result and what is lost in sums of float."""
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = F.linear(x.double().abs(), weight.double().abs())
    assert got.shape == wanted.shape and got.dtype == x.dtype
    assert ((got.double() - wanted).abs() <= wanted.abs() / 256 + scale * 1e-5 + 1e-30).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_weight(cuda, fused, shape):
    """Products with one element are weights, or zeros of either sign."""
    rows, columns = shape
    weight = matrix(rows, columns, cuda)
    table = coded(weight)
    one_hot = torch.eye(columns, dtype=torch.bfloat16, device=cuda)
    for count, apart in ((8, 8 * 16), (64, 64)):
        for first in range(0, columns, apart):
            part = one_hot[first : first + count]
            assert torch.equal(ibp.linear(part, table).t(), weight[:, first : first + count])


@pytest.mark.parametrize("count", [1, 3, 8, 9, 16, 24, 33, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(cuda, fused, shape, count):
    rows, columns = shape
    weight, bias = matrix(rows, columns, cuda), vectors(1, rows, cuda)[0]
    table, x = coded(weight), vectors(count, columns, cuda)
    for given in (None, bias):
        got = ibp.linear(x, table, given, check=True)
        check_products(x, weight, given, got)
        assert_same_bits(ibp.linear(x[None], table, given)[0], got)
        if count <= 32:
            assert_same_bits(ibp.linear(x[-1], table, given), got[-1])
        out = torch.empty(rows, count, dtype=x.dtype, device=cuda).t()
        assert ibp.linear(x, table, given, out=out) is out
        assert_same_bits(out, got)


@pytest.mark.parametrize("rows,columns", [(8192, 544), (4099, 4128), (4096, 14336), (1100, 8192), (1100, 18464)])
def test_products_of_many_vectors(cuda, fused, rows, columns):
    """Up to 512: more than 256 in two parts; those past 8192 / 16 are decoded."""
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("wants a GPU of compute capability 9.0")
    weight, bias = matrix(rows, columns, cuda), vectors(1, rows, cuda)[0]
    table, most = coded(weight), min(512, max(128, rows // 16))
    one_hot = torch.eye(columns, dtype=torch.bfloat16, device=cuda)[torch.randperm(columns, device=cuda)]
    for count in [33, 40, 64, 65, 100, 128, 129, 200, 256, 300, 512]:
        if count > most:
            continue
        assert torch.equal(ibp.linear(one_hot[:count], table).t(), weight @ one_hot[:count].t())
        x = vectors(count, columns, cuda)
        for given in (None, bias):
            got = ibp.linear(x, table, given, check=True)
            check_products(x, weight, given, got)
            assert_same_bits(ibp.linear(x, table, given), got)


@pytest.mark.parametrize("count", [8, 64])
def test_irregular_rows(cuda, fused, count):
    """Raw and default rows, many escapes, rows that leave their slots. torch multiplies by some of them, and may round
    sums of parts to BF16."""
    weight, codebook = uneven(device=cuda)
    x, bias = vectors(count, 2048, cuda), vectors(1, 96, cuda)[0]
    for room in (0, 64, 256):
        table = coded(weight, codebook=codebook, slot_bytes=3072 + room)
        got = ibp.linear(x, table, bias)
        rows = table._escapes[1].rows
        assert rows.tolist() == [3, 5, 20]
        assert_same_bits(got[:, rows], F.linear(x, weight[rows], bias[rows]))
        regular = torch.ones(96, dtype=torch.bool, device=cuda).index_fill_(0, rows, False)
        check_products(x, weight[regular], bias[regular], got[:, regular])
        for column in (0, 50, 100, 2047):
            one = torch.zeros(1, 2048, dtype=x.dtype, device=cuda)
            one[0, column] = 1
            assert torch.equal(ibp.linear(one, table)[0], weight[:, column])


@pytest.mark.parametrize("rows,columns", [*SHAPES, (33, 1056), (300, 5120)], ids=str)
def test_weights_of_a_listed_matrix(cuda, rows, columns):
    weight = matrix(rows, columns, cuda)
    codebook = coded(weight).codebook
    weight[::3, 5::100] *= AWAY
    if rows > 32:
        weight[1] *= AWAY
    table = coded(weight, codebook=codebook)
    assert_same_bits(linear.matrix_of(table, cuda), weight)  # nothing is listed
    listed = linear.escapes_of(table)
    assert len(listed.entries) and listed.rows.tolist() == [1] * (rows > 32)
    assert_same_bits(linear.matrix_of(table, cuda), weight)
    assert_same_bits(linear.matrix_of(table, torch.device("cpu")), weight.cpu())
    x = vectors(513, columns, cuda)
    assert_same_bits(ibp.linear(x, table), F.linear(x, weight))
    given = (table.slots, table.slot_bytes, listed.below, listed.starts, listed.entries)
    torch.library.opcheck(torch.ops.ibp.decode_matrix.default, (*given, torch.empty_like(weight)))
    for out, message in (
        (weight[0], "out has 1 dimensions, 2 are needed"),
        (weight[1:].contiguous(), "out has"),
        (torch.empty(rows * columns + 1, dtype=weight.dtype, device=cuda)[1:].view(rows, columns), "decode_matrix"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.ibp.decode_matrix(*given, out)


def test_many_irregular_rows_are_decoded(cuda):
    weight, codebook = uneven(device=cuda)
    weight[80] = 0
    table = ibp.compress(weight, codebook=codebook, slot_bytes=3136)
    x = vectors(8, 2048, cuda)
    assert_same_bits(ibp.linear(x, table), F.linear(x, weight))


@pytest.mark.parametrize("count", [8, 40, 100])
def test_what_is_not_finite(cuda, fused, count):
    """Infinity and NaN come out where torch's function has them."""
    weight = matrix(1600 if count > 64 else 256, 4000, cuda)
    rows, columns = (torch.randint(size, (60,), device=cuda) for size in weight.shape)
    weight[rows[:20], columns[:20]] = 0.0
    weight[rows[20:30], columns[20:30]] = 5e4
    for special in ((), (float("inf"), -float("inf"), float("nan"))):
        for i, value in enumerate(special):
            weight[rows[30 + 5 * i : 35 + 5 * i], columns[30 + 5 * i : 35 + 5 * i]] = value
        x = vectors(count, weight.shape[1], cuda)
        x[1, columns[3]], x[2, columns[25]], x[3, 17] = float("inf"), float("nan"), -float("inf")
        x[4, columns], x[5, columns[::2]] = 0.0, float("inf")
        x[6] = 6e4 * weight[3].sign()
        got, wanted = ibp.linear(x, coded(weight)), F.linear(x, weight)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(got), kind(wanted))


@pytest.mark.parametrize("columns", [1024, 8192, 14336, 32736])
def test_same_bits_every_time(cuda, fused, columns):
    """Whatever else runs, and however many vectors there are, up to 32, also of the longest rows."""
    weight, x = matrix(4096, columns, cuda), vectors(32, columns, cuda)
    table = coded(weight)
    first = ibp.linear(x, table)
    for count in (8, 1, 2, 5, 16, 20, 31):
        assert_same_bits(ibp.linear(x[:count], table), first[:count])


def test_corrupt_rows(cuda, fused):
    weight, x = matrix(64, 2048, cuda), vectors(2, 2048, cuda)
    table = coded(weight)
    table.lengths.view(torch.int16)[7] += 1
    with pytest.raises(ibp.CorruptTableError, match="7"):
        ibp.linear(x, table)


def test_rows_that_change(cuda, fused):
    weight, x = matrix(256, 2048, cuda), vectors(2, 2048, cuda)
    table = coded(weight)
    size = table.nbytes
    check_products(x, weight, None, ibp.linear(x, table))
    assert table.nbytes == size + table._escapes[1].nbytes > size
    changed = weight.clone()
    changed[5, ::100] = 0
    changed[7] = weight[8]
    table.update_(torch.tensor([5, 7], device=cuda), changed[[5, 7]])
    check_products(x, changed, None, ibp.linear(x, table))
    table.append(weight[:40])
    check_products(x, torch.cat((changed, weight[:40])), None, ibp.linear(x, table))
    table = coded(weight)
    ibp.linear(x, table)
    other = ibp.compress(changed, codebook=table.codebook, slot_bytes=table.slot_bytes)
    table.slots.copy_(other.slots)
    table.lengths.view(torch.int16).copy_(other.lengths.view(torch.int16))
    check_products(x, changed, None, ibp.linear(x, table))


def test_a_graph_before_the_first_call(cuda):
    """Escapes cannot be listed there: the weights are decoded."""
    weight, x = matrix(512, 1024, cuda), vectors(4, 1024, cuda)
    table = coded(weight)
    table.decompress()
    out = torch.zeros(4, 512, dtype=torch.bfloat16, device=cuda)
    F.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.linear(x, table, out=out)
    graph.replay()
    check_products(x, weight, None, out)


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
    (kept,) = table._escapes_of_graphs
    assert kept is table._escapes[1]


def test_compiled(cuda, fused):
    weight, x = matrix(64, 96, cuda), vectors(2, 96, cuda)
    table = coded(weight)
    wanted = ibp.linear(x, table)
    compiled = torch.compile(lambda x: ibp.linear(x, table) + 0, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), wanted)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=cuda)[1:].view_as(x).copy_(x)
    for multiply in (lambda x: ibp.linear(x, table), compiled):
        assert_same_bits(multiply(moved), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_are_decoded(cuda, dtype):
    """torch multiplies by the decoded weights, alone and in a graph: to the bits that plain weights give."""
    weights = [matrix(rows, 1024, cuda, dtype) for rows in (512, 64)]
    biases, x = [vectors(1, 512, cuda, dtype)[0], None], vectors(8, 1024, cuda, dtype)
    tables = [coded(weight) for weight in weights]
    wanted = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    for got, right in zip(ibp.linear(x, tables, biases), wanted):
        assert_same_bits(got, right)
    out, table = torch.empty_like(wanted[0]), tables[0].prepare_linear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ibp.linear(x, table, biases[0], out=out)
    graph.replay()
    torch.testing.assert_close(out, wanted[0], rtol=1e-3, atol=1e-3)
    assert not any(table._escapes and table._escapes[1] for table in tables)


def test_views_that_are_not_aligned(cuda, fused):
    weight, table = matrix(64, 96, cuda), coded(matrix(64, 96, cuda))
    flat = vectors(3, 97, cuda).view(-1)
    for x in (flat[1:97], flat[3 : 3 + 2 * 96].view(2, 96), vectors(96, 3, cuda).t()):
        check_products(x, weight, None, ibp.linear(x, table))


def test_autocast_and_gradients(cuda):
    weight, x = matrix(64, 128, cuda), vectors(2, 128, cuda)
    table, halves = coded(weight), coded(weight.half())
    with torch.autocast("cuda", dtype=torch.float16):
        assert ibp.linear(x, table).dtype == torch.float16
        assert_same_bits(ibp.linear(x.float(), halves), F.linear(x.float(), weight.half()))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert ibp.linear(x.float(), table).dtype == torch.bfloat16
        check_products(x, weight, None, ibp.linear(x, table))
    for one, given in ((table, x), (halves, x.half())):
        given.requires_grad_()
        ibp.linear(given, one).sum().backward()
        torch.testing.assert_close(given.grad, weight.to(given.dtype).sum(0).expand(2, 128))


def test_module_on_a_gpu(cuda, fused):
    plain = torch.nn.Linear(1024, 256, dtype=torch.bfloat16, device=cuda)
    module, x = ibp.nn.Linear.from_linear(plain), vectors(3, 1024, cuda)
    with torch.no_grad():
        check_products(x, plain.weight, plain.bias, module(x))
    with pytest.raises(AssertionError, match="decoded"):
        module(vectors(513, 1024, cuda))


def test_operation(cuda):
    table, x = coded(matrix(64, 96, cuda)), vectors(2, 96, cuda)
    out, listed = torch.empty(2, 64, dtype=x.dtype, device=cuda), linear.list_escapes(table)
    parts, sizes, bias = listed[:4], [table.slot_bytes], vectors(1, 64, cuda)[0]
    OPS = torch.ops.ibp.linear
    for biases in ([], [bias], [bias[:0]]):
        torch.library.opcheck(OPS.default, (x, parts, sizes, biases))
        torch.library.opcheck(OPS.default, (x[0], parts, sizes, biases))
        torch.library.opcheck(OPS.out, (x, parts, sizes, biases), {"out": out})
    torch.library.opcheck(OPS.default, (x, 2 * parts, 2 * sizes, []))
    assert OPS(x.view(2, 1, 96), parts, sizes, []).shape == (2, 1, 64)
    assert OPS(x, 3 * parts, 3 * sizes, []).shape == (3 * 2 * 64,)
    for arguments, message in (
        ((vectors(2, 160, cuda), parts, sizes, []), "linear"),  # rows that leave their slots
        ((x, parts, sizes, [x[0]]), "biases has 96 elements, 64 are needed"),
        ((x, parts, sizes, [bias, bias]), "the lists have different lengths"),
        ((x, parts[:3], sizes, []), "the lists have different lengths"),
        ((x.float(), parts, sizes, []), "x has the wrong dtype"),
        ((x.half(), parts, sizes, []), "x has the wrong dtype"),
        ((x, (*parts[:3], listed.starts), sizes, []), "entries has the wrong shape"),
        ((vectors(513, 96, cuda), parts, sizes, []), "linear"),
        ((x, 5 * parts, 5 * sizes, []), "slot_bytes has 5 numbers, 1 to 4 are needed"),
        ((x, (), [], []), "slot_bytes has 0 numbers, 1 to 4 are needed"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS(*arguments)
    with pytest.raises(RuntimeError, match="out has 64 elements, 128 are needed"):
        OPS.out(x, parts, sizes, [], out=out[0])


@pytest.mark.parametrize("count", [1, 8, 20, 64, 100, 256])
@pytest.mark.parametrize("columns", [96, 4128])
def test_many_tables(cuda, fused, columns, count):
    """One launch for tables of different rows, with the bits of each alone up to 32 vectors."""
    weights = [matrix(rows, columns, cuda) for rows in (4096, 100, 16, 1000, 48)]
    weights[1][::3, 5] *= AWAY
    weights[3][:, 7] *= AWAY
    biases = [vectors(1, len(weight), cuda)[0] if number % 2 else None for number, weight in enumerate(weights)]
    if count > 24 and torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("wants a GPU of compute capability 9.0")
    tables, x = [coded(weight) for weight in weights], vectors(count, columns, cuda)
    used = slice(0, 5 if count <= 100 else 4)  # a single short table is decoded for more than 128 vectors
    for given in (None, biases[used]):
        results = ibp.linear(x, tables[used], given, check=True)
        assert len(results) == len(tables[used])
        for number, got in enumerate(results):
            check_products(x, weights[number], given and given[number], got)
            if count <= 32:
                assert_same_bits(ibp.linear(x, tables[number], given and given[number]), got)
        assert all(map(torch.equal, ibp.linear(x, tables[used], given), results))
    one_hot = torch.eye(columns, dtype=x.dtype, device=cuda)[torch.randperm(columns, device=cuda)[:count]]
    for weight, got in zip(weights[used], ibp.linear(one_hot, tables[used])):
        assert torch.equal(got.t(), weight @ one_hot.t())


def test_neighbours_on_a_gpu(cuda, fused):
    """In a graph, too: one launch for all."""
    plain = [torch.nn.Linear(1024, rows, dtype=torch.bfloat16, device=cuda) for rows in (256, 64, 64)]
    modules, x = [ibp.nn.Linear.from_linear(module) for module in plain], vectors(3, 1024, cuda)
    with torch.no_grad():
        alone = [module(x) for module in modules]
        ibp.nn.multiply_together(*modules)
        for _ in range(2):
            for module, wanted in zip(modules, alone):
                assert_same_bits(module(x), wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [module(x) for module in modules]
        x.copy_(x.flip(0))
        graph.replay()
        for got, wanted in zip(results, alone):
            assert_same_bits(got, wanted.flip(0))


def groups_of(parts, device):
    """[groups, 3]: of (number of the matrix, how many vectors), one after the other."""
    first, groups = 0, []
    for number, count in parts:
        groups.append((number, first, count))
        first += count
    return torch.tensor(groups, dtype=torch.int32, device=device)


@pytest.mark.parametrize("rows,columns,matrices", [(64, 96, 5), (1536, 2048, 4), (2048, 768, 3), (16, 4128, 40)])
def test_groups_of_vectors(cuda, rows, columns, matrices):
    """Each has the bits of a product with its matrix alone; groups that are out of range have no results."""
    weight = matrix(matrices * rows, columns, cuda)
    weight[::50, 3] *= AWAY
    table = coded(weight)
    listed = linear.list_escapes(table)
    given = (table.slots, table.slot_bytes, listed.below, listed.starts, listed.entries)
    parts = [(number % matrices, 1 + number % 8) for number in range(70)]
    x = vectors(sum(count for _, count in parts), columns, cuda)
    out = torch.zeros(len(x), rows, dtype=x.dtype, device=cuda)
    groups = groups_of([*parts, (0, 0), (0, 5)], cuda)
    torch.ops.ibp.linear_groups(*given, x, groups, None, 1, rows, out)
    for number, first, count in groups[: len(parts)].tolist():
        own = slice(number * rows, (number + 1) * rows)
        assert_same_bits(out[first : first + count], ibp.linear(x[first : first + count], table)[:, own].contiguous())
    torch.library.opcheck(torch.ops.ibp.linear_groups.default, (*given, x, groups, None, 1, rows, out))
    order = torch.randperm(2 * len(x), device=cuda)
    ordered = torch.zeros(2 * len(x), rows, dtype=x.dtype, device=cuda)
    torch.ops.ibp.linear_groups(*given, x, groups, order, 2, rows, ordered)
    alone = torch.zeros_like(out)
    torch.ops.ibp.linear_groups(*given, x[order[: len(x)] // 2], groups, None, 1, rows, alone)
    assert_same_bits(ordered[order[: len(x)]], alone)
    assert not ordered[order[len(x) :]].any()
    torch.ops.ibp.linear_groups(*given, x, groups, order * 10**12 - 5, 2, rows, ordered)  # does no harm
    for wrong in ((matrices, 0, 1), (-1, 0, 1), (0, len(x), 1), (0, len(x) - 1, 2), (0, 0, 9), (0, 0, -1)):
        out.zero_()
        torch.ops.ibp.linear_groups(*given, x, torch.tensor([wrong, (0, 0, 1)]).int().to(cuda), None, 1, rows, out)
        assert not out.any()
    for arguments, message in (
        ((x, groups[:, :2], None, 1, rows, out), "groups has the wrong shape"),
        ((x, groups, None, 1, rows + 1, vectors(len(x), rows + 1, cuda)), "linear_groups"),
        ((x, groups, None, 1, rows, out[1:]), "out has"),
        ((x, groups, order, 1, rows, out), "order has"),
        ((x, groups, order, 0, rows, out), "sharing is 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.ibp.linear_groups(*given, *arguments)
