"""Products with compressed matrices as autograd and torch.compile see them: nothing plain is kept for backward, modules
of a shape share compiled code, and the kernel multiplies from the first call on, compiled or captured."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import get_static_address_type

import ibp
from helpers import assert_same_bits
from ibp._common import process
from ibp._fetch import linear
from ibp._rows.table import handle_on
from products import kernels_on_the_cpu, lists

ROWS, COLUMNS = 64, 128


def coded_linear(seed=0, scale=0.02, irregular=False, device="cpu", rows=ROWS, columns=COLUMNS, **options):
    """A module and torch's of the same weights, which do not train; every exponent beside the digits is an escape."""
    torch.manual_seed(seed)
    plain = torch.nn.Linear(columns, rows, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.normal_(std=scale)[:: 3 + seed, 5] = 0
        plain.weight[7] *= 2.0**-40 if irregular else 1.0
    plain.to(device).weight.requires_grad_(False)
    options = options if device != "cpu" else {"device": "cpu", "memory": "host", **options}
    return ibp.nn.Linear.from_linear(plain, **options), plain


@pytest.fixture
def kernel(monkeypatch):
    """The kernel's part in torch, for tables on the CPU. Numbers of vectors of its calls; a call takes up to four
    tables."""
    with kernels_on_the_cpu(monkeypatch) as calls:
        yield calls


@pytest.fixture(params=["decoded", "by the kernel"])
def way(request):
    """Lists a table's escapes where the kernel is to multiply, which it does then."""
    if request.param == "decoded":
        return lambda table: None
    request.getfixturevalue("kernel")
    return lists


def kept(run):
    """(what run gives, shapes of the tensors that autograd keeps)."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        return run(), shapes


# ---- gradients ----


@pytest.mark.parametrize("shape", [(COLUMNS,), (3, COLUMNS), (2, 4, COLUMNS), (0, COLUMNS), (2, 0, COLUMNS)], ids=str)
def test_gradients(way, shape):
    """The bits of torch's, and nothing is kept for them."""
    module, plain = coded_linear(irregular=True)
    way(module.weight)
    x = torch.randn(shape).bfloat16().requires_grad_()
    results = []
    for one in (module, plain):
        x.grad = plain.bias.grad = None
        y, shapes = kept(lambda one=one: one(x))
        assert len(shapes) == (0 if one is module else 1)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, plain.bias.grad))
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted)
    if len(shape) > 1:
        assert_same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("multiplied", ["fused", "decoded", "F.linear", "Conv1D"])
def test_no_plain_weights_are_kept(multiplied):
    """A model with adapters keeps what these need."""
    module, plain = coded_linear(fused=multiplied == "fused")
    first, second = torch.randn(8, COLUMNS).bfloat16(), torch.randn(ROWS, 8).bfloat16().requires_grad_()
    of_table = {
        "F.linear": lambda x: F.linear(x, module.weight, module.bias),
        "Conv1D": ibp.nn.Conv1D(module.weight, module.bias),
    }.get(multiplied, module)
    grads = []
    for one in (of_table, plain):
        x = torch.ones(5, COLUMNS).bfloat16().requires_grad_()
        y, shapes = kept(lambda one=one, x=x: one(x) + F.linear(F.linear(x, first), second))
        assert any({*shape} == {ROWS, COLUMNS} for shape in shapes) == (one is plain)
        y.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_only_what_is_wanted():
    module, plain = coded_linear()
    x, table = torch.randn(3, COLUMNS).bfloat16(), module.weight
    total, decoded = module(x).sum(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "matrix_of", lambda *args, **options: decoded.append(1))
        total.backward()  # of the bias alone
    assert not decoded
    assert_same_bits(plain.bias.grad, torch.full((ROWS,), 3).bfloat16())
    with torch.no_grad():
        assert not module(x.requires_grad_()).requires_grad
    assert not ibp.linear(x.detach(), table).requires_grad
    out = torch.empty(3, ROWS).bfloat16()
    assert ibp.linear(x, table, out=out, check=True) is out and out.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, plain.weight.sum(0).expand(3, -1))


def test_gradients_of_gradients():
    module, plain = coded_linear()
    results = []
    for one in (module, plain):
        x = torch.ones(3, COLUMNS).bfloat16().requires_grad_()
        (grad,) = torch.autograd.grad(one(x).float().square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.float().square().sum(), x)[0])
    assert_same_bits(*results)


def test_rows_that_change_before_backward():
    module, plain = coded_linear()
    y = module(torch.ones(2, COLUMNS).bfloat16().requires_grad_())
    module.weight.update_([3], plain.weight[4:5])
    with pytest.raises(RuntimeError, match="rows of the table have changed 1 times between forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(way, dtype):
    """Inputs, weights and biases are cast, gradients have the dtypes of what they are for: as torch's module."""
    module, plain = coded_linear()
    way(module.weight)
    module.bias = plain.bias = torch.nn.Parameter(plain.bias.detach().float())
    results = []
    for one in (module, plain):
        x = torch.linspace(-1, 1, 3 * COLUMNS).view(3, COLUMNS).requires_grad_()
        plain.bias.grad = None
        with torch.autocast("cpu", dtype=dtype):
            y = one(x)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, plain.bias.grad))
    assert results[0][0].dtype == dtype and results[0][1].dtype == results[0][2].dtype == torch.float32
    for got, wanted in zip(*results):
        assert_same_bits(got, wanted)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).float().square().sum()),
    "vmap": torch.func.vmap,
    "jacrev": torch.func.jacrev,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)  # torch.compile is loaded
def test_transforms(way, transform, compiled):
    module, plain = coded_linear()
    way(module.weight)
    run, x = TRANSFORMS[transform](lambda x: module(x)), torch.randn(3, COLUMNS).bfloat16()
    torch.compiler.reset()
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x), TRANSFORMS[transform](plain)(x))


class Source:
    """A matrix that decodes itself and may change."""

    shape, dtype = torch.Size((ROWS, COLUMNS)), torch.float32

    def __init__(self):
        self.weight = torch.randn(self.shape)

    def decompress(self, *, device=None, out=None):
        return self.weight.clone()


def test_source_that_is_no_table():
    """Its changes are not counted: autograd keeps the matrix that was multiplied."""
    source, x = Source(), torch.ones(2, COLUMNS, requires_grad=True)
    wanted = source.weight.sum(0).expand(2, -1)
    y, shapes = kept(lambda: ibp.linear(x, source))
    source.weight = -source.weight
    y.sum().backward()
    assert shapes == [(COLUMNS, ROWS)]
    torch.testing.assert_close(x.grad, wanted)


# ---- several tables ----


@pytest.mark.parametrize("count", [1, 2, 5])
@torch.no_grad()
def test_many_tables(way, request, count):
    """Of different rows, with irregular ones, with biases or without; four in a launch."""
    modules = [coded_linear(number, rows=32 + 8 * number, irregular=number == 1) for number in range(count)]
    biases = [plain.bias if number != 1 else None for number, (_, plain) in enumerate(modules)]
    for module, _ in modules:
        way(module.weight)
    tables = [module.weight for module, _ in modules]
    for shape in ((COLUMNS,), (3, COLUMNS), (2, 4, COLUMNS), (0, COLUMNS)):
        x = torch.randn(shape).bfloat16()
        for given in (None, biases):
            results = ibp.linear(x, tables, given)
            assert isinstance(results, list) and len(results) == count
            for result, (_, plain), bias in zip(results, modules, biases):
                assert_same_bits(result, F.linear(x, plain.weight, bias if given else None))
            outs = [None if number == 1 else torch.empty_like(result) for number, result in enumerate(results)]
            for got, out, result in zip(ibp.linear(x, tables, given, out=outs), outs, results):
                assert_same_bits(got, result)
                assert out is None or got is out
    if "kernel" in request.fixturenames:
        calls = request.getfixturevalue("kernel")
        calls.clear()
        ibp.linear(torch.ones(3, COLUMNS).bfloat16(), tables, biases)
        assert calls == [3] * (1 if count < 5 else 2)


def test_many_tables_train(way):
    """Gradients reach x and biases."""
    modules = [coded_linear(number) for number in range(2)]
    grads = []
    for number in range(2):
        x = torch.arange(2.0 * COLUMNS).view(2, COLUMNS).bfloat16().requires_grad_()
        biases = [plain.bias for _, plain in modules]
        for module, plain in modules:
            way(module.weight)
            plain.bias.grad = None
        weights = [plain.weight for _, plain in modules]
        together = ibp.linear(x, [module.weight for module, _ in modules], biases)
        results = together if number else [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
        sum(result.sum() for result in results).backward()
        grads.append((x.grad, *(bias.grad for bias in biases)))
    for got, wanted in zip(*grads):
        assert_same_bits(got, wanted)


def test_refusals_of_many_tables():
    (module, _), x = coded_linear(), torch.ones(2, COLUMNS).bfloat16()
    assert ibp.linear(x, []) == []
    for tables, biases, error, message in (
        ([module.weight] * 2, [None], ValueError, "there are 1 biases for 2 tables; wanted one for each"),
        ([module.weight], module.bias, TypeError, "biases is a Parameter; wanted a list"),
        ([module.weight, x], None, TypeError, "table is a Tensor; wanted an ibp.CompressedTensor"),
        ([module.weight], [x[0]], ValueError, r"bias has shape \[128\]; wanted \[64\]"),
    ):
        with pytest.raises(error, match=message):
            ibp.linear(x, tables, biases)
    with pytest.raises(ValueError, match="there are 2 outs for 1 tables"):
        ibp.linear(x, [module.weight], out=[None, None])


# ---- torch.compile, with the kernel's part on the CPU ----


class Layer(torch.nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


@pytest.mark.slow  # torch.compile is loaded
@torch.no_grad()
def test_modules_share_compiled_code(way):
    """Neither addresses nor numbers of a table are constants of the code: it is compiled for one layer, and once more
    when sizes of lists differ. No call came before."""
    torch.compiler.reset()
    counter = CompileCounter()
    run = torch.compile(lambda layer, x: layer(x), fullgraph=True, backend=counter)
    x = torch.randn(3, COLUMNS).bfloat16()
    for number in range(12):
        parts = [coded_linear(number, 0.02 * 2.0 ** (number % 4 + i % 2)) for i in range(3)]
        for module, _ in parts:
            way(module.weight)
        layer, plain = (Layer(*modules) for modules in zip(*parts))
        assert_same_bits(run(layer, x), plain(x))
    assert counter.frame_count <= 2


@pytest.mark.slow  # torch.compile is loaded
@torch.no_grad()
def test_irregular_rows_are_compiled(kernel):
    torch.compiler.reset()
    module, plain = coded_linear(irregular=True)
    lists(module.weight)
    assert module.weight._escapes[1].rows.tolist() == [7]
    x = torch.randn(3, COLUMNS).bfloat16()
    assert_same_bits(torch.compile(module, fullgraph=True)(x), plain(x))
    assert kernel == [3]


@pytest.mark.slow  # torch.compile is loaded
def test_training_is_compiled(way):
    """Compiled for a GPU as for the CPU: no part of forward decodes what backward multiplies by."""
    torch.compiler.reset()
    step = torch.compile(lambda layer, x: layer(x).relu(), fullgraph=True)
    for number in range(3):
        module, plain = coded_linear(number)
        way(module.weight)
        adapter = torch.nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
        adapter.weight.data = torch.randn(ROWS, 8).bfloat16() @ torch.randn(8, COLUMNS).bfloat16()
        results = []
        for one in (Layer(module, adapter), Layer(plain, adapter)):
            x = torch.ones(5, COLUMNS).bfloat16().requires_grad_()
            plain.bias.grad = adapter.weight.grad = None
            y, shapes = kept(lambda one=one, x=x: step(one, x))
            y.float().square().sum().backward()
            results.append((y.detach(), x.grad, plain.bias.grad, adapter.weight.grad))
            plain_shapes = [shape for shape in shapes if {*shape} == {ROWS, COLUMNS}]
            assert len(plain_shapes) == (1 if one.parts[0] is module else 2)  # the adapter's
        for got, wanted in zip(*results):
            torch.testing.assert_close(got, wanted, rtol=0.016, atol=4e-3 * float(wanted.abs().max()))


@pytest.mark.slow  # torch.compile is loaded
@torch.no_grad()
def test_neighbours_are_compiled(kernel):
    """One operation for both, from the first call on, and the same code for other layers and calls."""
    torch.compiler.reset()
    counter = CompileCounter()
    run = torch.compile(lambda layer, x: layer(x), fullgraph=True, backend=counter)
    for number in range(4):
        parts = [coded_linear(2 * number + i) for i in range(2)]
        for module, _ in parts:
            lists(module.weight)
        layer, plain = (Layer(*modules) for modules in zip(*parts))
        ibp.nn.multiply_together(*layer.parts)
        for _ in range(2):
            x = torch.randn(3, COLUMNS).bfloat16()
            assert_same_bits(run(layer, x), plain(x))
    assert counter.frame_count <= 2 and kernel == [3] * 8


@pytest.mark.slow  # torch.compile is loaded
@torch.no_grad()
def test_warning_where_escapes_are_not_listed(kernel, monkeypatch):
    """Once, and the code is compiled anew when they are."""
    torch.compiler.reset()
    monkeypatch.setattr(process, "said", set())
    module, plain = coded_linear()
    table, x = module.weight, torch.randn(2, COLUMNS).bfloat16()
    run = torch.compile(lambda x: ibp.linear(x, table), fullgraph=True, backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="every call will decode the whole matrix") as caught:
        run(x), run(x[:1])
    assert len(caught) == 1 and not kernel
    lists(table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(run(x), F.linear(x, plain.weight))
    assert kernel == [2]


@pytest.mark.slow  # torch.compile is loaded
@torch.no_grad()
def test_slots_are_not_copied(kernel):
    """What inductor's CUDA graphs take for memory that stays: all of a module's lists, and slots of any table."""
    torch.compiler.reset()
    (module, _), (other, _) = coded_linear(0), coded_linear(1)
    for table in (module.weight, other.weight):
        lists(table)
    table, x = other.weight, torch.randn(2, COLUMNS).bfloat16()
    torch.compile(lambda x: module(x) + ibp.linear(x, table), fullgraph=True)(x)
    assert kernel == [2, 2]
    listed = module.weight._escapes[1]
    for stays in (listed.slots, listed.below, listed.starts, listed.entries, table._escapes[1].slots):
        assert get_static_address_type(stays) == "unguarded"


def test_the_operation_can_be_part_of_cuda_graphs():
    assert torch.Tag.cudagraph_unsafe not in torch.ops.ibp.linear.default.tags
    assert torch.Tag.cudagraph_unsafe in torch.ops.ibp.times_matrix.default.tags  # it reads a handle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_times_matrix(dtype):
    module, plain = coded_linear()
    x, handle = torch.randn(3, ROWS).to(dtype), handle_on(module.weight, torch.device("cpu"))
    arguments = handle.table, x, COLUMNS, torch.bfloat16, torch.device("cpu")
    assert_same_bits(torch.ops.ibp.times_matrix.default(*arguments), x @ plain.weight.to(dtype))
    torch.library.opcheck(torch.ops.ibp.times_matrix.default, arguments)


# ---- on a GPU ----


@pytest.fixture
def never_decoded(monkeypatch):
    """Calls fail that decode all of a matrix."""

    def fail(*arguments, **options):
        raise AssertionError("the weights are decoded")

    monkeypatch.setattr(linear, "matrix_of", fail)


MADE = {
    "coded on the GPU": lambda cuda: coded_linear(device=cuda, rows=512, columns=1024),
    "moved": lambda cuda: tuple(one.to(cuda) for one in coded_linear(rows=512, columns=1024)),
    "irregular rows": lambda cuda: coded_linear(device=cuda, rows=512, columns=1024, irregular=True),
}


def check_products(got, module, plain, x):
    """The kernel's bits, but for the irregular row, by which torch multiplies."""
    regular = [row for row in range(512) if row not in module.weight._escapes[1].rows.tolist()]
    assert len(regular) >= 511
    assert_same_bits(got[:, regular], module(x)[:, regular])
    torch.testing.assert_close(got, plain(x), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_compiled_from_the_first_call_on(cuda, never_decoded, made, mode):
    torch.compiler.reset()
    module, plain = MADE[made](cuda)
    compiled = torch.compile(module, fullgraph=True, mode=mode)
    for count in (1, 8):
        x = torch.randn(count, 1024, device=cuda).to(plain.weight.dtype)
        for _ in range(3):  # warm-up, recording and replay
            got = compiled(x).clone()
            check_products(got, module, plain, x)


@torch.no_grad()
def test_graphs_replay_without_decoding(cuda, never_decoded):
    """The graph has no memory for copies of slots, 24 MiB a layer, nor for weights."""
    torch.compiler.reset()
    layers = torch.nn.Sequential(*(coded_linear(n, device=cuda, rows=4096, columns=4096)[0] for n in range(2)))
    compiled, x = torch.compile(layers, fullgraph=True, mode="reduce-overhead"), torch.randn(2, 4096, device=cuda)
    x = x.bfloat16()
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    for _ in range(4):
        compiled(x)
    torch.cuda.synchronize(cuda)
    assert torch.cuda.max_memory_allocated(cuda) - before < 8 << 20


@torch.no_grad()
def test_layers_share_compiled_code_on_a_gpu(cuda, never_decoded):
    torch.compiler.reset()
    counter = CompileCounter()
    run = torch.compile(lambda module, x: module(x), fullgraph=True, backend=counter)
    x = torch.randn(3, 1024, device=cuda).bfloat16()
    for number in range(10):
        module, _ = coded_linear(number, 0.02 * 2.0 ** (number % 4), device=cuda, rows=512, columns=1024)
        assert_same_bits(run(module, x), module(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("made", MADE)
@torch.no_grad()
def test_captured_from_the_first_call_on(cuda, never_decoded, made):
    module, plain = MADE[made](cuda)
    x = torch.randn(4, 1024, device=cuda).to(plain.weight.dtype)
    plain(x)  # cuBLAS is ready
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    x.copy_(x.flip(0))
    graph.replay()
    check_products(out, module, plain, x)


@torch.no_grad()
def test_a_table_of_ones_own(cuda, never_decoded):
    """prepare_linear lists; later calls find the list."""
    module, plain = coded_linear(rows=512, columns=1024)
    table, x = module.weight.to(cuda), torch.randn(4, 1024, device=cuda).bfloat16()
    assert table._escapes is None and table.prepare_linear() is table
    listed = table._escapes[1]
    torch.compiler.reset()
    got = torch.compile(lambda x: ibp.linear(x, table), fullgraph=True, backend="aot_eager")(x)
    assert_same_bits(got, ibp.linear(x, table))
    assert table._escapes[1] is listed


def test_warning_where_a_graph_is_captured_first(cuda, monkeypatch):
    monkeypatch.setattr(process, "said", set())
    module, plain = coded_linear(rows=512, columns=1024)
    table, x = module.weight.to(cuda), torch.randn(4, 1024, device=cuda).bfloat16()
    table.decompress()
    F.linear(x, plain.weight.to(cuda))
    with pytest.warns(RuntimeWarning, match="every call will decode the whole matrix"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ibp.linear(x, table)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_holds_no_plain_weights(cuda, compiled):
    """Of eight layers of 32 MiB: a step takes the memory of activations and of a few of them."""
    torch.compiler.reset()
    size = 4096
    layers = [coded_linear(n, device=cuda, rows=size, columns=size)[0].requires_grad_(False) for n in range(8)]
    made = {"bias": False, "dtype": torch.bfloat16, "device": cuda}
    adapters = [torch.nn.Sequential(torch.nn.Linear(size, 8, **made), torch.nn.Linear(8, size, **made)) for _ in layers]
    model = torch.nn.Sequential(*(Layer(*parts) for parts in zip(layers, adapters)))
    run = torch.compile(model, fullgraph=True) if compiled else model
    for count in (4, 512):  # by the kernel, and by decoded weights
        x = torch.randn(count, size, device=cuda).bfloat16()
        for _ in range(2):
            model.zero_grad()
            gc.collect()
            torch.cuda.synchronize(cuda)
            before = torch.cuda.memory_allocated(cuda)
            torch.cuda.reset_peak_memory_stats(cuda)
            run(x).float().square().mean().backward()
            torch.cuda.synchronize(cuda)
        assert torch.cuda.max_memory_allocated(cuda) - before < 6 * 2 * size * size
        for adapter in adapters:
            assert all(parameter.grad.isfinite().all() for parameter in adapter.parameters())
