"""Saved tensors that leave their device (ibp.offload_activations): what autograd gets back has the same bits, nothing
is kept longer than the graph, and what must stay stays."""

import contextlib
import copy
import functools
import gc
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ibp
from benchmarks import nets
from benchmarks.activations import deterministic
from helpers import DTYPES, assert_same_bits, in_threads, slow_but
from ibp._activations import choosing, coding, lane, planning, spans
from ibp._activations.origin import Origin
from ibp._activations.region import Region

LEAST = 1024
CPU = torch.device("cpu")


def offload_on(device, **options):
    return ibp.offload_activations(**({"least_bytes": LEAST, "device": device} | options))


def images(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def small_nets():
    yield "alexnet", nets.alexnet(10, 0.1, 95), images(2, 3, 95, 95)
    yield "vgg16", nets.vgg16(10, 0.1, 32), images(4, 3, 32, 32)
    yield "resnet50", nets.resnet50(10, 0.1), images(2, 3, 64, 64)
    yield "swiglu", nets.llama(2, 64, 160, 4), torch.randn(2, 32, 64)
    yield "relu2", nets.llama(2, 64, 160, 4, "relu2"), torch.randn(2, 32, 64)


NETS = {name: (net, x) for name, net, x in small_nets()}


def on(device, dtype, name):
    net, x = NETS[name]
    net, x = copy.deepcopy(net).to(device, dtype), x.to(device, dtype)
    return (net.to(memory_format=torch.channels_last), x) if x.dim() == 4 else (net, x)


def gradients(net, x, context=None):
    """Of every parameter, with the same dropout every time."""
    torch.manual_seed(3)
    with context or contextlib.nullcontext():
        loss = net(x).float().square().mean()
    loss.backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return found


def assert_same_gradients(got, wanted):
    assert len(got) == len(wanted)
    for mine, other in zip(got, wanted):
        assert_same_bits(mine, other)


class Save(torch.autograd.Function):
    """Saves tensors, and gives what comes back to `seen`."""

    @staticmethod
    def forward(ctx, x, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.saved_tensors)
        return gradient, None, *[None] * len(ctx.saved_tensors)


def saved(offload, *tensors, between=lambda: None):
    """What comes back of tensors that are saved by one operation."""
    seen, x = [], torch.ones((), device=tensors[0].device, requires_grad=True)
    with offload:
        y = Save.apply(x, seen, *tensors)
    between()
    y.backward()
    return seen[0]


def assert_comes_back(offload, *tensors):
    wanted = [tensor.clone() for tensor in tensors]
    for got, tensor, bits in zip(saved(offload, *tensors), tensors, wanted, strict=True):
        assert got.dtype == tensor.dtype and got.stride() == tensor.stride() and got.device == tensor.device
        assert_same_bits(got.contiguous(), bits.contiguous())


def noise(shape, dtype, device=CPU):
    """Random bytes: NaNs with all payloads, negative zeros, values out of range."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).view(shape).to(device)


def halves(shape, dtype, device=CPU):
    """Zeros and few other values, which are coded."""
    data = torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    data.view(-1, dtype.itemsize)[::2, 0] = 1
    return data.view(dtype).view(shape).to(device)


# ---- gradients ----


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same(name, dtype):
    net, x = on(CPU, dtype, name)
    wanted, offload = gradients(net, x), offload_on(CPU)
    for _ in range(2):
        offload.reset_stats()
        assert_same_gradients(gradients(net, x, offload), wanted)
    stats = offload.stats
    assert stats.coded_bytes > 0 and stats.shared > 0 and stats.raw_bytes == stats.sent_bytes == 0
    assert stats.device_bytes < stats.coded_bytes * (0.95 if dtype == torch.float32 else 0.8)


def test_autocast():
    net, x = on(CPU, torch.float32, "swiglu")

    def under_autocast(context):
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(net, x, context)

    offload = offload_on(CPU)
    assert_same_gradients(under_autocast(offload), under_autocast(None))
    weights = sum(p.numel() for p in net.parameters() if p.dim() > 1) * 2
    assert offload.stats.kept_bytes >= weights, "cast weights stay, which autocast keeps for the next forward pass"


# ---- bits ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype):
    for make in (noise, halves):
        offload = offload_on(CPU)
        assert_comes_back(offload, make((3, 2000), dtype), make((1000, 8), dtype).t())
    assert offload.stats.coded_bytes > 0


def test_what_coding_does_not_make_smaller_is_not_coded():
    offload, x = offload_on(CPU), noise((1 << 16,), torch.uint8)
    assert_comes_back(offload, x)
    assert offload.stats.coded_bytes == 0 and offload.stats.kept_bytes == x.nbytes
    assert coding.learn(x, view_of(x)) is None


def test_layouts_come_back():
    offload, x = offload_on(CPU), torch.randn(8, 6, 10, 12).bfloat16()
    q, k, v = x.chunk(3, 1)
    views = (
        x.permute(2, 0, 3, 1),
        x[2:6],
        q,
        k,
        v,
        x.transpose(1, 2),
        x.view(-1),
        x[..., ::2],
        x[:1].expand(9, 6, 10, 12),
    )
    assert_comes_back(offload, *views)
    assert offload.stats.coded_bytes == x.numel() * 2 + x[2:6].numel() * 2
    assert offload.stats.shared == 7, "q, k, v and other views have the bytes of x"


def test_sizes_come_back():
    offload = offload_on(CPU, least_bytes=0)
    for count in (0, 1, 2047, 2048, 2049, 4096, 5000):
        assert_comes_back(offload, halves((count,), torch.bfloat16), noise((count,), torch.uint8))
    assert_comes_back(offload, torch.randn(()))


def test_subclasses_and_sparse_tensors_stay():
    class Mine(torch.Tensor):
        pass

    offload = offload_on(CPU)
    mine, sparse = torch.randn(5000).as_subclass(Mine), torch.eye(100).to_sparse()
    got = saved(offload, mine, sparse)
    assert_same_bits(got[0].as_subclass(torch.Tensor), mine.as_subclass(torch.Tensor))
    assert_same_bits(got[1].to_dense(), sparse.to_dense())
    assert offload.stats.coded_bytes == 0


def test_repr_says_what_was_saved():
    offload = offload_on(CPU)
    assert_comes_back(offload, halves((5000,), torch.float32), torch.ones(3))
    assert "2 tensors saved, 0 of them again; bytes kept 12, coded 20,000, raw 0" in repr(offload)


def test_samples_are_not_of_one_part_of_every_image():
    """Every 16th row has small numbers only: a sample of rows at equal distances could have none else."""
    rows = torch.randint(0, 1 << 20, (256 * 16, coding.ROW_BYTES // 8))
    rows[::16] %= 4
    recipe = coding.learn(rows.view(-1).view(torch.uint8), view_of(rows))
    assert recipe.needed_share == pytest.approx(22 / 64, abs=0.05)


def test_samples_have_a_row_of_each_part():
    """All rows where they are few."""
    cpu = torch.device("cpu")
    for total in (1, 2, 200):
        assert coding._places(total, cpu).tolist() == [*range(total)]
    total = 10 * coding._SAMPLE_BYTES // coding.ROW_BYTES
    places = coding._places(total, cpu)
    assert (places // 10).tolist() == [*range(total // 10)] and places.remainder(10).unique().tolist() == [*range(10)]


def view_of(x):
    return spans.View(x.dtype, x.shape, x.stride(), 0)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(coding, "PIECE_BYTES", 2 * coding.ROW_BYTES)
    monkeypatch.setattr(coding, "_SPARE_BYTES", 256)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("kernel, stride, least", [(2, 2, 16), (3, 2, 12), (3, 1, 12)])
def test_indices_of_pooling_take_few_bits(small_pieces, layout, kernel, stride, least):
    offload, shape = offload_on(CPU), (6, 24, 37, 29)
    for _ in range(2):
        x = torch.randn(shape).relu().to(memory_format=layout)
        _, indices = torch.nn.functional.max_pool2d(x, kernel, stride, return_indices=True)
        offload.reset_stats()
        assert_comes_back(offload, indices)
    stats = offload.stats
    assert stats.coded_bytes == 8 * indices.numel() and stats.device_bytes * least < stats.coded_bytes
    assert_comes_back(offload, torch.empty_like(indices).copy_(indices.flip(0)))
    assert stats.outgrown_bytes == 0
    with pytest.warns(RuntimeWarning, match="less compressible"):
        assert_comes_back(offload, torch.empty_like(indices).copy_(noise(indices.shape, torch.int64)))
    assert stats.outgrown_bytes == 8 * indices.numel()
    assert_comes_back(offload, indices[:, :5].clone(), torch.zeros_like(indices))


@pytest.mark.parametrize("most, dtype", [(255, torch.uint8), (256, torch.int16), (32767, torch.int16)])
def test_narrow_elements_are_widened(most, dtype):
    view = spans.View(torch.int64, torch.Size((5, 4, 3, 7)), (84, 1, 28, 4), 0)  # channels last
    least = (torch.arange(21) * 1000).repeat_interleave(4)
    elements = least + torch.randint(0, most + 1, (5, 84))
    elements[0], elements[1] = least, least + most
    data = elements.view(-1).view(torch.uint8)
    origin = Origin.of(data, view)
    assert origin.dtype == dtype and origin.takes(data.numel()) and not origin.takes(data.numel() - 8)
    limit = torch.iinfo(dtype).max
    for place, is_lost in ((7, False), (limit, False), (limit + 1, True), (-1, True), (-(2**63), True), (2**62, True)):
        elements[3, 50] = least[50] + place if abs(place) < 2**62 else place
        narrow, misfits = origin.narrow(data)
        assert bool(misfits) == is_lost and narrow.numel() * origin.times_narrower == data.numel()
        assert is_lost or torch.equal(origin.widen(narrow), data)


def test_elements_too_far_from_others_have_no_origin():
    x = torch.zeros(8, 4, 4, 4, dtype=torch.int64)
    assert Origin.of(x.view(-1).view(torch.uint8), view_of(x)) is not None
    for place in (1 << 15, -1):
        x[3, 3, 3, 3] = place
        assert Origin.of(x.view(-1).view(torch.uint8), view_of(x)) is None


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(64, 64, dtype=torch.int64),
        torch.zeros(4, 8, 4, 4, dtype=torch.int32),
        torch.zeros(1, 2, 64, 64, dtype=torch.int64),
        torch.zeros(8, 4, 4, 4, dtype=torch.int64).transpose(0, 1),
    ],
    ids=lambda x: str(x.shape),
)
def test_what_else_has_no_origin(x):
    assert Origin.of(torch.zeros(x.numel() * x.itemsize, dtype=torch.uint8), view_of(x)) is None


# ---- what is saved once ----


def test_bytes_are_coded_once():
    offload, x = offload_on(CPU), torch.randn(64, 64)
    assert_comes_back(offload, x, x, x.t(), x.view(-1), x.view(torch.int32))
    assert offload.stats.shared == 4 and offload.stats.coded_bytes == x.numel() * 4


def test_a_changed_tensor_is_saved_again():
    """Bits are those of the time of saving; torch itself would refuse the first one."""
    offload, x, seen = offload_on(CPU), torch.zeros(5000), []
    one = torch.ones((), requires_grad=True)
    with offload:
        y = Save.apply(one, seen, x)
        x.add_(1)
        z = Save.apply(y, seen, x)
    z.backward()
    assert_same_bits(seen[1][0], torch.zeros(5000))
    assert_same_bits(seen[0][0], torch.ones(5000))


def test_reused_memory_is_not_mistaken():
    offload, seen, one = offload_on(CPU), [], torch.ones((), requires_grad=True)
    with offload:
        for value in range(20):
            one = Save.apply(one, seen, torch.full((5000,), float(value)))  # freed at once
    one.backward()
    for value, (got,) in enumerate(reversed(seen)):
        assert_same_bits(got, torch.full((5000,), float(value)))
    assert offload.stats.shared == 0


class Change(Save):
    """Saves one tensor, and changes what comes back."""

    @staticmethod
    def backward(ctx, gradient):
        (tensor,) = ctx.saved_tensors
        ctx.seen.append([tensor.add_(1)])
        return gradient, None, None


def test_an_operation_may_change_what_comes_back():
    """Another one that has saved the same bytes gets those of the time of saving."""
    offload, x, seen = offload_on(CPU), halves((5000,), torch.float32), []
    with offload:
        y = Change.apply(Save.apply(torch.ones((), requires_grad=True), seen, x), seen, x)
    y.backward()
    assert offload.stats.shared == 1 and offload.stats.coded_bytes == 20_000
    assert_same_bits(seen[0][0], x + 1)
    assert_same_bits(seen[1][0], x)


class Stream:
    """Notes which streams it has waited for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


class Recorded:
    """Memory that notes the streams it is used on."""

    device = CPU

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_what_is_decoded_on_a_stream_is_waited_for_by_others(monkeypatch):
    offload, first, second = offload_on(CPU), Stream(), Stream()
    region, held, decoded = Region(offload._pass, 0, 5000, None, None), Recorded(), Recorded()
    region.stream = first
    for stream, memory in ((first, held), (second, held), (second, decoded), (first, decoded)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        assert region._usable(memory) is memory
    assert second.waited == [first] and held.streams == [second]
    assert first.waited == [second] and decoded.streams == [first]


# ---- what stays ----


def test_parameters_and_small_tensors_stay():
    offload, net = offload_on(CPU), torch.nn.Linear(64, 64)
    with offload:
        y = net(torch.randn(64, 64)[:2].clone().requires_grad_())
    y.sum().backward()
    assert offload.stats.coded_bytes == 0 and offload.stats.kept_bytes > 0


def test_what_stays_is_refused_where_it_was_changed():
    offload, x = offload_on(CPU, least_bytes=1 << 30), torch.randn(2000)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved(offload, x, between=lambda: x.add_(1))


def test_without_gradients_nothing_is_saved():
    net, x = on(CPU, torch.float32, "vgg16")
    offload = offload_on(CPU)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), offload:
            net(x)
    assert offload.stats.tensors == 0


# ---- ways to use autograd ----


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])  # imports torch._dynamo
def test_beside_checkpoint(reentrant):
    net, x = on(CPU, torch.float32, "swiglu")

    def recomputed(context, inside):
        hidden = x.clone().requires_grad_()
        with context or contextlib.nullcontext():
            for block in net.blocks:

                def run(h, block=block):
                    with inside or contextlib.nullcontext():
                        return block(h)

                hidden = checkpoint(run, hidden, use_reentrant=reentrant)
            loss = hidden.square().mean()
            loss.backward()
        found = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        return found

    wanted = recomputed(None, None)
    outside = offload_on(CPU)
    assert_same_gradients(recomputed(outside, None), wanted)
    assert outside._pass.alive == 0
    assert outside.stats.coded_bytes <= 3 * x.numel() * 4, "inputs of blocks, not what is saved inside"
    assert_same_gradients(recomputed(None, offload_on(CPU)), wanted)


def test_retained_graphs_are_asked_twice():
    net, x = on(CPU, torch.float32, "relu2")
    wanted, offload = gradients(net, x), offload_on(CPU)
    torch.manual_seed(3)
    with offload:
        loss = net(x).square().mean()
    for _ in range(2):
        got = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        assert_same_gradients(got, wanted)


def test_double_backward():
    x = torch.randn(64, 64, dtype=torch.float64)

    def second(context):
        y = x.clone().requires_grad_()
        with context:
            (first,) = torch.autograd.grad((y.sin() * y @ y).sum(), y, create_graph=True)
            (got,) = torch.autograd.grad(first.square().sum(), y)
        return got

    assert_same_bits(second(offload_on(CPU)), second(contextlib.nullcontext()))


def test_several_forward_passes_before_a_backward_pass():
    net, x = on(CPU, torch.float32, "swiglu")
    offload, inputs = offload_on(CPU), [x, x + 1, x - 1]

    def summed(context, order):
        losses = []
        for part in inputs:
            with context:
                losses.append(net(part).square().mean())
        for k in order:
            losses[k].backward()
        found = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        return found

    for order in ([0, 1, 2], [2, 0, 1]):
        assert_same_gradients(summed(offload, order), summed(contextlib.nullcontext(), order))
    assert offload._pass.alive == 0


def test_one_context_around_all_steps():
    net, x = on(CPU, torch.float32, "swiglu")
    wanted, offload = gradients(net, x), offload_on(CPU)
    with offload:
        for _ in range(3):
            assert_same_gradients(gradients(net, x), wanted)
        assert len(offload._chooser._recipes) <= offload._pass.numbers


def test_nothing_outlives_the_graph():
    net, x = on(CPU, torch.float32, "vgg16")
    offload = offload_on(CPU)
    with offload:
        y = net(x)
    assert offload._pass.alive > 0
    del y  # no backward pass
    gc.collect()
    assert offload._pass.alive == 0
    with pytest.raises(ZeroDivisionError), offload:
        net(x).sum() / (1 // 0)
    gc.collect()
    assert offload._pass.alive == 0
    assert_same_gradients(gradients(net, x, offload), gradients(net, x))


def test_an_offload_that_is_gone_leaves_its_tensors():
    x = torch.randn(5000)
    seen, one = [], torch.ones((), requires_grad=True)
    with offload_on(CPU):
        y = Save.apply(one, seen, x)
    gc.collect()
    y.backward()
    assert_same_bits(seen[0][0], x)


def test_threads_share_an_offload():
    net, x = on(CPU, torch.float32, "swiglu")
    offload, wanted = offload_on(CPU), gradients(net, x)
    copies = [copy.deepcopy(net) for _ in range(4)]

    def work(mine):
        for _ in range(3):
            assert_same_gradients(gradients(mine, x, offload), wanted)

    in_threads(*[functools.partial(work, mine) for mine in copies])


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"to": "disk"}, ValueError, "to is 'disk'; wanted one of"),
        ({"least_bytes": -1}, ValueError, "least_bytes"),
        ({"window_bytes": "many"}, TypeError, "window_bytes"),
        ({"device": "tpu"}, ValueError, "device is 'tpu'"),
        ({"slowdown": -0.1}, ValueError, "slowdown is -0.1"),
        ({"slowdown": float("nan")}, ValueError, "slowdown is nan"),
        ({"slowdown": 0.1, "device_bytes": 1}, ValueError, "wanted one budget"),
        ({"device_bytes": 0.5}, TypeError, "device_bytes"),
    ],
)
def test_arguments(options, error, text):
    with pytest.raises(error, match=text):
        ibp.offload_activations(**options)


# ---- budgets ----

MB = 1 << 20
MODES = ("keep", "device", "raw", "coded")
LINK = planning.Link(out_gbps=50.0, back_gbps=50.0, window_bytes=256 * MB)


def timeline_of(*sizes, computing=1.0, coded=0.5, coder=0.1):
    """Items of so many MiB, each with so many ms of computing each way, a share as coded and ms of coding each way."""
    items = [
        planning.Item(size * MB, coded and int(size * MB * coded), computing, computing, coder, coder) for size in sizes
    ]
    return planning.Timeline(items, list(reversed(range(len(items)))))


def freed(timeline, modes):
    return sum(item.freed(mode) for item, mode in zip(timeline.items, modes))


def test_a_step_is_predicted(monkeypatch):
    monkeypatch.setattr(planning, "PIECE_BYTES", 32 * MB)
    line = timeline_of(100, 100, 100, 100)
    assert line.step(["keep"] * 4, LINK) == pytest.approx(8)
    assert line.step(["device", "keep", "keep", "keep"], LINK) == pytest.approx(8.2)
    narrow = planning.Link(out_gbps=10.0, back_gbps=10.0, window_bytes=64 * MB)
    sent, window = (1e-6 * size * MB / narrow.out_gbps for size in (100, 64))
    # The link binds: the last item is on its way when the forward pass ends, and is used first, like the one before.
    assert line.step(["raw"] * 4, narrow) == pytest.approx(1 + 3 * sent - window + 1 + 2 * sent)
    assert line.step(["coded"] * 4, LINK) == pytest.approx(8.8, abs=0.1), "the link is faster than computing"


def test_a_drag_makes_a_step_longer():
    line, modes = timeline_of(100, 100, 100, 100, computing=50.0), ["raw", "coded", "device", "keep"]
    before = line.step(modes, LINK)
    line.drag = 0.5
    busy = 2e-6 * (100 * MB + 50 * MB) / 50 + 4 * 0.1
    assert line.busy(modes, LINK) == pytest.approx(busy)
    assert line.step(modes, LINK) == pytest.approx(before + 0.5 * busy)


def test_what_leaves_in_time_lowers_the_peak():
    line = timeline_of(100, 100, 100, 100, computing=3.0)
    peaks = {modes: line.predict(modes, LINK).peak_bytes for modes in itertools.product(("keep", "raw"), repeat=4)}
    assert peaks["keep", "keep", "keep", "keep"] == 400 * MB
    assert peaks["raw", "keep", "keep", "keep"] == 300 * MB
    assert peaks["keep", "keep", "keep", "raw"] == 400 * MB, "it comes back at once"
    assert peaks["raw", "raw", "raw", "keep"] <= peaks["raw", "raw", "raw", "raw"] < 300 * MB
    assert line.predict(["device"] * 4, LINK).peak_bytes == 300 * MB, "of 4 halves, and what is coded or decoded"


@pytest.mark.parametrize("slowdown", [0.0, 0.05, 0.5, 10.0])
@pytest.mark.parametrize("computing", [0.2, 5.0])
@pytest.mark.parametrize("coded", [None, 0.3, 0.9])
def test_plans_keep_to_a_slowdown(slowdown, computing, coded):
    line = timeline_of(*[50, 100, 20] * 5, computing=computing, coded=coded)
    modes = planning.plan(line, LINK, slowdown=slowdown)
    found, total = line.predict(modes, LINK), sum(item.num_bytes for item in line.items)
    assert found.ms <= line.computing * (1 + slowdown + 1e-6)
    if computing == 5.0:  # the link has time for all
        assert modes[-1] == "keep", "it is asked for first"
        assert found.peak_bytes < 0.4 * total
        assert slowdown > 0 or "coded" not in modes, "coding takes time, sending does not"
    assert slowdown < 10 or found.peak_bytes < 0.7 * total
    line.drag = 1e6
    assert planning.plan(line, LINK, slowdown=slowdown) == ["keep"] * 15


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("link", [None, LINK])
def test_plans_keep_to_device_bytes(share, link):
    line = timeline_of(*[50, 100, 20] * 5)
    total = sum(item.num_bytes for item in line.items)
    modes = planning.plan(line, link, device_bytes=int(share * total))
    least = total / 2 if link is None else 0
    assert total - freed(line, modes) <= max(least, share * total)
    assert share < 1 or modes == ["keep"] * 15


def test_plans_compare_with_all_there_are():
    line = planning.Timeline(
        [
            planning.Item(100 * MB, 30 * MB, 0.5, 1.0, 0.2, 0.1),
            planning.Item(10 * MB, 9 * MB, 0.5, 1.0, 0.1, 0.1),
            planning.Item(200 * MB, 180 * MB, 0.5, 1.0, 0.4, 0.2),
            planning.Item(50 * MB, 5 * MB, 0.5, 1.0, 0.1, 0.1),
        ],
        [3, 2, 0, 1],
    )
    total, freed_bytes = sum(item.num_bytes for item in line.items), []
    for slowdown in (0.05, 0.2, 1.0):
        limit = line.computing * (1 + 0.5 * slowdown + 1e-9)
        plans = [line.predict(modes, LINK) for modes in itertools.product(MODES, repeat=4)]
        best = total - min(found.peak_bytes for found in plans if found.ms <= limit)
        mine = line.predict(planning.plan(line, LINK, slowdown=slowdown), LINK)
        assert mine.ms <= limit and total - mine.peak_bytes >= 0.5 * best
        freed_bytes.append(best)
    assert freed_bytes[-1] > 0


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_budget_of_bytes(share):
    net, x = on(CPU, torch.bfloat16, "vgg16")
    wanted, offload = gradients(net, x), offload_on(CPU)
    assert_same_gradients(gradients(net, x, offload), wanted)
    everything = offload._pass.num_bytes
    offload = offload_on(CPU, device_bytes=int(share * everything))
    for _ in range(5):
        offload.reset_stats()
        assert_same_gradients(gradients(net, x, offload), wanted)
    stays = everything - offload.stats.coded_bytes + offload.stats.device_bytes
    assert stays <= max(share, 0.5) * everything and (offload.stats.coded_bytes == 0) == (share == 1)


def test_what_does_not_shrink_counts_in_a_budget_of_bytes():
    tensors = [noise((400_000,), torch.uint8), *[torch.randn(200_000).bfloat16() for _ in range(4)]]
    offload = offload_on(CPU, device_bytes=1_700_000)
    for _ in range(5):
        offload.reset_stats()
        assert_comes_back(offload, *tensors)
    stats = offload.stats
    assert stats.kept_bytes >= 400_000 and stats.coded_bytes > 0
    assert stats.kept_bytes + stats.device_bytes <= 1_700_000


def settled(offload, net, x):
    """The offload, after as many steps as it needs to learn and to plan."""
    for _ in range(40):
        if offload.is_settled:
            return offload
        gradients(net, x, offload)
        if x.is_cuda:
            torch.cuda.synchronize()
    raise AssertionError("not settled after 40 steps")


def test_a_budget_of_time():
    net, x = on(CPU, torch.bfloat16, "vgg16")
    wanted = gradients(net, x)
    for slowdown, is_coded in ((0, False), (1e9, True)):
        offload = settled(offload_on(CPU, slowdown=slowdown), net, x)
        offload.reset_stats()
        assert_same_gradients(gradients(net, x, offload), wanted)
        assert (offload.stats.coded_bytes > 0) == is_coded


@pytest.mark.parametrize("factor, empties", [(1.0, False), (1.4, True), (100.0, True)])
def test_a_budget_of_time_is_kept_or_nothing_leaves(monkeypatch, factor, empties):
    """Steps of a plan take a factor longer than what a plan allows: it is corrected until nothing leaves."""
    net, x = on(CPU, torch.bfloat16, "swiglu")
    offload, wanted = offload_on(CPU, slowdown=0.2), gradients(net, x)
    chooser = offload._chooser
    monkeypatch.setattr(planning.Timeline, "computing", 1e9)  # coding is always allowed, but for the drag
    monkeypatch.setattr(
        planning.Clock, "ms", lambda self: 1e9 * (1.0 if chooser._phase == choosing._COMPARING else factor)
    )
    settled(offload, net, x)
    (plan,) = chooser._plans.values()
    assert plan.is_empty == empties and chooser._corrections <= 5
    offload.reset_stats()
    assert_same_gradients(gradients(net, x, offload), wanted)
    assert (offload.stats.coded_bytes == 0) == empties


def test_a_plan_is_corrected_by_what_was_measured():
    line = timeline_of(100, 100, 100, 100, 100, 100, computing=3.0)
    recorder = planning.Recorder()
    recorder.timeline = lambda: (line, list(range(6)))
    plan = choosing._Plan(recorder, LINK, choosing.Budget("host", True, None, 0.1, 256 * MB))
    before = plan.modes
    plan.correct(5.0)
    assert 0 < line.busy(plan.modes, LINK) < line.busy(before, LINK), "fewer bytes move"
    assert line.drag == pytest.approx((5.0 - 0.0) / line.busy(before, LINK), rel=0.1)
    for _ in range(8):
        plan.correct(5.0)
    assert plan.is_empty


def test_a_plan_that_frees_little_is_none(monkeypatch):
    line, recorder = timeline_of(10, *[100] * 10, computing=50.0), planning.Recorder()
    recorder.timeline = lambda: (line, list(range(11)))
    for count in (1, 4):
        monkeypatch.setattr(planning, "plan", lambda *_, **__: ["raw"] * count + ["keep"] * (11 - count))
        plan = choosing._Plan(recorder, LINK, choosing.Budget("host", True, None, 0.1, 256 * MB))
        assert plan.is_empty == (count == 1)


@pytest.mark.parametrize("window, leaving", [(256 * MB, 1), (MB, 9)])
def test_what_comes_back_at_once_frees_nothing(window, leaving):
    """As where the window holds all that is saved: the room of one region is all that is gained."""
    line = timeline_of(*[1] * 10, computing=1.0, coder=0.5)
    modes = planning.plan(line, LINK._replace(window_bytes=window), slowdown=1e9)
    assert sum(mode != planning.KEEP for mode in modes) == leaving


def test_what_is_on_its_way_is_little_with_a_budget_of_time():
    assert offload_on(CPU, slowdown=0.1)._budget.window_bytes == 2 * coding.PIECE_BYTES
    assert offload_on(CPU, slowdown=0.1, window_bytes=1)._budget.window_bytes == 1
    assert offload_on(CPU)._budget.window_bytes > 2 * coding.PIECE_BYTES


@pytest.mark.parametrize("change", [0.0, 0.001, 0.01])
def test_room_is_for_changes_like_the_last_ones(change):
    recipe = coding.learn(
        halves((1 << 16,), torch.bfloat16).view(torch.uint8), spans.View(torch.bfloat16, (1,), (1,), 0)
    )
    size, used, rooms = 1 << 26, 0.5 * (1 << 26), []
    for step in range(12):
        recipe.begin()
        rooms.append(recipe.room(size))
        assert step < 3 or used < rooms[-1] <= used * (1.005 + 12 * change)
        recipe.note(size, int(used))
        used *= 1 + change


def test_times_of_passes_are_not_waited_for(monkeypatch):
    class Pending(Event):
        def query(self):
            return False

    clock = planning.Clock([CPU])
    clock.stop()
    assert 0 <= clock.ms() < 1e4
    monkeypatch.setattr(planning, "_mark", lambda device: 0.0 if device == CPU else Event())
    clock = planning.Clock([torch.device("cuda", 0), CPU])
    clock._last = [Pending()]
    assert clock.ms() is None
    clock.stop()
    assert clock.ms() == 1.0, "of the GPU alone"


@pytest.mark.parametrize("budget", [{"slowdown": 0.0}, pytest.param({"device_bytes": 1 << 40}, marks=pytest.mark.slow)])
def test_where_nothing_leaves_steps_run_without_hooks(budget):
    """But for one after four times as many, which sees whether sizes have changed."""
    net, x = on(CPU, torch.bfloat16, "swiglu")
    few = x[:, :16]
    offload, wanted = settled(offload_on(CPU, **budget), net, few), gradients(net, few)

    def hooked(part, count):
        found = []
        for _ in range(count):
            offload.reset_stats()
            assert_same_gradients(gradients(net, part, offload), wanted if part is few else everything)
            found += [offload._passes] if offload.stats.tensors else []
        return found

    with torch.no_grad(), offload:
        net(few)
    assert len(hooked(few, 24 - offload._passes)) <= 1
    everything, bytes_before = gradients(net, x), offload._chooser._planned_bytes
    assert hooked(x, 64)[0] >= 48
    assert offload._chooser._planned_bytes == pytest.approx(2 * bytes_before, rel=0.1) and offload.is_settled


def test_a_loop_in_one_context_has_hooks_in_all_steps():
    net, x = on(CPU, torch.bfloat16, "swiglu")
    offload, wanted = offload_on(CPU, slowdown=0.0), gradients(net, x)
    for _ in range(2):
        with offload:
            for _ in range(12):
                offload.reset_stats()
                assert_same_gradients(gradients(net, x), wanted)
                assert offload.stats.tensors > 0
    assert offload.is_settled


def test_a_plan_that_leaves_all_is_numbered_anew_in_each_step():
    net, x = on(CPU, torch.bfloat16, "swiglu")
    offload = offload_on(CPU, device_bytes=1 << 40)
    with offload:
        for _ in range(6):
            offload.reset_stats()
            gradients(net, x)
    assert offload.is_settled and offload.stats.coded_bytes == 0


def test_a_plan_is_made_anew_for_other_sizes():
    net, x = on(CPU, torch.bfloat16, "swiglu")
    offload, planned = offload_on(CPU, slowdown=1e9), []
    for size in (32, 32, 32, 32, *[16] * 18):
        part = x[:, :size]
        assert_same_gradients(gradients(net, part, offload), gradients(net, part))
        planned.append(offload._chooser._planned_bytes)
    assert planned[-1] == pytest.approx(planned[3] / 2, rel=0.1) and planned[3] > 0


# ---- pieces, and the ways of a link ----


class Instant:
    """In place of a CUDA stream: all work is done at once."""

    def __init__(self, device=None):
        self.waits = 0

    def wait_stream(self, other):
        self.waits += 1

    wait_event = wait_stream

    def record_event(self):
        return Event()


class Event:
    def __init__(self, **_):
        self.is_done = True

    def record(self, stream):
        pass

    def query(self):
        return self.is_done

    synchronize = query

    def elapsed_time(self, other):
        return 1.0


@pytest.fixture
def linked(monkeypatch, small_pieces):
    """An offload on the CPU whose regions move as those of a GPU do."""
    stream = Instant()
    monkeypatch.setattr(torch.cuda, "Stream", Instant)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda of: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, of: None)
    monkeypatch.setattr(lane._memory, "empty", lambda size, *_, **__: torch.empty(size, dtype=torch.uint8))

    def make(coded=True, to="host", window_bytes=1 << 16, mode=None):
        offload = offload_on(CPU, coded=coded, to=to, window_bytes=window_bytes)
        offload._lanes[CPU] = lane.Lane(CPU, window_bytes)
        mode = mode or {"device": planning.DEVICE}.get(to, planning.CODED if coded else planning.RAW)
        monkeypatch.setattr(offload, "_lane_of", offload._lanes.get)
        chosen = offload._chooser._recipe

        def choose(number, data, view, passes):
            recipe = chosen(number, data, view, passes) if coded else None
            return (mode if recipe is not None or mode == planning.HOLD else planning.RAW), recipe

        monkeypatch.setattr(offload._chooser, "choose", choose)
        return offload

    return make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.int64], ids=str)
def test_pieces_come_back(small_pieces, dtype):
    offload = offload_on(CPU)
    for count in (1, 8191, 8192, 8193, 20000, 32768):
        assert_comes_back(offload, halves((count,), dtype), noise((count,), dtype))


@pytest.mark.parametrize("options", [{}, {"coded": False}, {"to": "device"}, {"window_bytes": 1}], ids=str)
@pytest.mark.parametrize("name", slow_but(["swiglu"], ["vgg16", "swiglu"]))
def test_pieces_go_over_a_link(linked, name, options):
    net, x = on(CPU, torch.bfloat16, name)
    x, offload = x.repeat(4, *[1] * (x.dim() - 1)), linked(**options)
    wanted = gradients(net, x)
    for _ in range(3):
        offload.reset_stats()
        assert_same_gradients(gradients(net, x, offload), wanted)
    (way,) = offload._lanes.values()
    way.take_back()
    assert offload._pass.alive == way.coming == way.coming_bytes == 0
    stats, everything = offload.stats, offload._pass.num_bytes
    assert stats.raw_bytes + stats.coded_bytes == everything and (
        stats.raw_bytes == everything or "coded" not in options
    )
    if options.get("to") == "device":
        assert 0 < stats.device_bytes < stats.coded_bytes
    else:
        assert stats.sent_bytes == everything if "coded" in options else stats.sent_bytes < 0.9 * everything
    held = offload.pinned_bytes
    gradients(net, x, offload)
    assert offload.pinned_bytes == held, "pinned memory is used again"
    offload.release()
    assert offload.pinned_bytes == 0


def test_what_is_measured_is_held(linked):
    net, x = on(CPU, torch.bfloat16, "vgg16")
    wanted, offload = gradients(net, x), linked(mode=planning.HOLD)
    offload._chooser._phase = choosing._MEASURING
    assert_same_gradients(gradients(net, x, offload), wanted)
    line, numbers = offload._pass.recorders[CPU].timeline()
    assert offload.stats.sent_bytes == offload.stats.device_bytes == 0
    assert sum(item.num_bytes for item in line.items) == offload._pass.num_bytes and len(numbers) == len(line.items)
    assert sorted(line.uses) == list(range(len(numbers)))
    for item in line.items:
        assert item.saved_after >= 0 and item.used_after > 0
        if item.coded_bytes is not None and item.num_bytes > coding.PIECE_BYTES:
            assert item.encode > 0 and item.decode > 0 and item.coded_bytes < item.num_bytes


@pytest.mark.parametrize("coded", [False, True])
def test_windows_bound_what_is_on_its_way(linked, monkeypatch, coded):
    """Nothing leaves before it is waited for; what comes back fits the window."""
    monkeypatch.setattr(Event, "query", lambda self: False)
    window = 8 * coding.PIECE_BYTES
    offload, seen, most = linked(coded, window_bytes=window), [], 0
    (way,) = offload._lanes.values()
    y = one = torch.ones((), requires_grad=True)
    tensors = [halves((size,), torch.bfloat16) for size in [4096, 40000, 10000, 300, 5000] * 4]
    fetch, coming = way.fetch, []
    monkeypatch.setattr(way, "fetch", lambda *of: (fetch(*of), coming.append(way.coming_bytes)))
    with offload:
        for x in tensors:
            y = Save.apply(y, seen, x)
            most = max(most, way._leaving_bytes - (0 if coded else x.numel() * 2))
    assert most <= window + 3 * coding.PIECE_BYTES
    assert coded or way._leaving, "raw tensors stay until their last piece has left"
    y.backward()
    for (got,), x in zip(reversed(seen), tensors, strict=True):
        assert_same_bits(got, x)
    way.take_back()
    assert one.grad is not None and 0 < max(coming) <= window + coding.PIECE_BYTES and way.coming == 0


def test_pieces_that_outgrow_their_room_stay(linked):
    offload = linked()
    shape, inputs = (1 << 15,), [torch.zeros(1 << 15), *[torch.randn(1 << 15).exp() for _ in range(2)]]
    for x, expected in zip(inputs, (False, True, False)):
        before = offload.stats.outgrown_bytes
        context = pytest.warns(RuntimeWarning, match="less compressible") if expected else contextlib.nullcontext()
        with context:
            assert_comes_back(offload, x, *torch.zeros(6, *shape).unbind())
        assert (offload.stats.outgrown_bytes > before) == expected


def test_a_graph_is_asked_twice_over_a_link(linked):
    for coded in (False, True):
        offload, seen, x = linked(coded), [], halves((50000,), torch.bfloat16)
        with offload:
            y = Save.apply(torch.ones((), requires_grad=True), seen, x)
            Save.apply(torch.ones((), requires_grad=True), [], torch.zeros(200000))
        for _ in range(2):
            y.backward(retain_graph=True)
        assert [torch.equal(got, x) for (got,) in seen] == [True, True]
        del y, seen
        gc.collect()
        way = offload._lanes[CPU]
        way.take_back()
        assert offload._pass.alive == way.coming == way.coming_bytes == 0


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("fits", [False, True])
def test_indices_stay_until_it_is_known_that_they_fit(linked, monkeypatch, fits, is_known):
    offload = linked()
    x = torch.randn(6, 24, 37, 29).to(memory_format=torch.channels_last)
    _, indices = torch.nn.functional.max_pool2d(x, 2, 2, return_indices=True)
    assert_comes_back(offload, indices)
    other = indices if fits else indices + 300
    monkeypatch.setattr(Event, "query", lambda self: is_known)
    seen, one = [], torch.ones((), requires_grad=True)
    context = contextlib.nullcontext() if fits else pytest.warns(RuntimeWarning, match="less compressible")
    with context, offload:
        y = Save.apply(one, seen, other)
        y = Save.apply(y, [], torch.zeros(30000))
    (region,) = [found() for found in offload._pass._regions.values() if found().num_bytes == 8 * indices.numel()]
    assert (region.memory is None) == (fits and is_known) and (region.misfits is None) == is_known
    monkeypatch.setattr(Event, "query", lambda self: True)
    del region
    y.backward()
    assert_same_bits(seen[0][0], other)
    assert (offload.stats.outgrown_bytes == 0) == fits


def test_indices_that_were_changed_come_back_as_they_were(linked, monkeypatch):
    offload, x = linked(), torch.randn(6, 24, 37, 29)
    _, indices = torch.nn.functional.max_pool2d(x, 2, 2, return_indices=True)
    assert_comes_back(offload, indices)
    monkeypatch.setattr(Event, "query", lambda self: False)
    wanted = indices.clone()
    (got,) = saved(offload, indices, between=lambda: indices.zero_())
    assert_same_bits(got, wanted)
    indices[0, 0, 0, 0] = 1 << 20
    with (
        pytest.warns(RuntimeWarning, match="compressible"),
        pytest.raises(RuntimeError, match="modified by an inplace"),
    ):
        saved(offload, indices, between=lambda: indices.zero_())


@pytest.mark.parametrize("coded", [False, True])
def test_pieces_stay_from_where_no_memory_is_pinned(linked, monkeypatch, coded):
    offload = linked(coded)
    (way,), taken = offload._lanes.values(), []
    take, recorded = way.buffers.take, []

    def three(*of):
        taken.append(of)
        if len(taken) > 3:
            raise lane._memory.PinningError("no memory is pinned")
        return take(*of)

    monkeypatch.setattr(way.buffers, "take", three)
    monkeypatch.setattr(lane._memory, "_has_warned", False)
    monkeypatch.setattr(Event, "query", lambda self: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, of: recorded.append(of))
    with pytest.warns(RuntimeWarning, match="no memory is pinned"):
        assert_comes_back(offload, halves((40000,), torch.bfloat16))
    assert len(taken) > 4 and way.out in recorded, "copies of the first pieces may still read them"


def test_regions_end_in_other_threads(linked):
    """What ended is counted by calls that hold the lock, and by none twice."""
    offload = linked()
    (way,), graphs = offload._lanes.values(), []
    for _ in range(8):
        with offload:
            y = torch.ones((), requires_grad=True)
            for _ in range(4):
                y = Save.apply(y, [], halves((20000,), torch.bfloat16))
        graphs.append(y)
    most = offload.pinned_bytes
    del y
    graphs[-1].backward(retain_graph=True)  # some are on their way back
    in_threads(*(functools.partial(graphs.__setitem__, k, None) for k in range(len(graphs))))
    gc.collect()
    assert offload._pass.alive == 0 and way._ended
    way.take_back()
    assert way.coming == way.coming_bytes == 0 and not way._ended
    assert sum(size * len(free) for size, free in way.buffers._free.items()) == way.buffers.held_bytes == most
    assert all(used for free in way.buffers._free.values() for _, used in free), "copies out may be under way"


# ---- CUDA ----

WAYS = {
    "host": {},
    "raw": {"coded": False},
    "device": {"to": "device"},
    "narrow": {"window_bytes": 1},
    "narrow, raw": {"coded": False, "window_bytes": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["vgg16", "swiglu", "relu2"])
def test_gradients_on_a_gpu(cuda, name, way):
    net, x = on(cuda, torch.bfloat16, name)
    x = x.repeat(8, *[1] * (x.dim() - 1))
    with deterministic(x):
        wanted, offload = gradients(net, x), offload_on(cuda, **WAYS[way])
        for _ in range(3):
            offload.reset_stats()
            assert_same_gradients(gradients(net, x, offload), wanted)
    stats = offload.stats
    assert (stats.coded_bytes > 0) == ("raw" not in way) and (stats.sent_bytes > 0) == (way != "device")
    assert offload._pass.alive == 0
    for way in offload._lanes.values():
        way.take_back()
        assert way.coming == way.coming_bytes == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_from_a_gpu(cuda, dtype, way):
    offload = offload_on(cuda, **WAYS[way])
    for make in (noise, halves):
        for _ in range(2):
            assert_comes_back(offload, make((3, 2000), dtype, cuda), make((1000, 8), dtype, cuda).t())


@pytest.mark.parametrize("to", ["host", "device"])
def test_an_operation_may_change_what_comes_back_from_a_gpu(cuda, to):
    """Another one that has saved the same bytes gets those of the time of saving."""
    offload, x = offload_on(cuda, to=to), halves((1 << 20,), torch.float32, cuda)
    for _ in range(3):
        seen = []
        offload.reset_stats()
        with offload:
            y = Change.apply(Save.apply(torch.ones((), device=cuda, requires_grad=True), seen, x), seen, x)
        y.backward()
        assert offload.stats.shared == 1 and offload.stats.coded_bytes == x.numel() * 4
        assert_same_bits(seen[0][0], x + 1)
        assert_same_bits(seen[1][0], x)


class LateSave(Save):
    """Asks for what it has saved long after the host has come to that, and copies it at once."""

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(20_000_000)
        ctx.seen.append([tensor.clone() for tensor in ctx.saved_tensors])
        return gradient, None, *[None] * len(ctx.saved_tensors)


class PromptSave(LateSave):
    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append([tensor.clone() for tensor in ctx.saved_tensors])
        return gradient, None, *[None] * len(ctx.saved_tensors)


@pytest.mark.parametrize("options", [{}, {"coded": False}, {"to": "device"}], ids=str)
def test_streams_that_share_what_they_save(cuda, options):
    """Of two operations on different streams one has the bytes decoded, late; the other one waits for them."""
    offload, main, side = offload_on(cuda, **options), torch.cuda.current_stream(), torch.cuda.Stream()
    for first, second in ((PromptSave, LateSave), (LateSave, PromptSave)) * 3:
        x, late, prompt = (torch.rand(1 << 20, device=cuda) * 3).round(), [], []
        seen = {LateSave: late, PromptSave: prompt}
        ones = [torch.ones((), device=cuda, requires_grad=True) for _ in "ab"]
        with offload:
            y = first.apply(ones[0], seen[first], x)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                z = second.apply(ones[1], seen[second], x)
        torch.autograd.backward((y, z))
        torch.cuda.synchronize()
        for found in (late, prompt):
            assert_same_bits(found[0][0], x)


@pytest.mark.parametrize("way", ["host", "device", "narrow"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_indices_of_pooling_on_a_gpu(cuda, layout, way):
    offload, shape = offload_on(cuda, **WAYS[way]), (32, 64, 57, 57)
    for _ in range(3):
        x = torch.randn(shape, device=cuda).to(memory_format=layout)
        _, indices = torch.nn.functional.max_pool2d(x, 3, 2, return_indices=True)
        offload.reset_stats()
        assert_comes_back(offload, indices, *torch.zeros(3, 1 << 18, device=cuda).unbind())
    stats = offload.stats
    assert stats.outgrown_bytes == 0
    assert 12 * (stats.sent_bytes + stats.device_bytes) < stats.coded_bytes == 8 * indices.numel() + (3 << 20)
    for other in (indices + 300, noise(shape, torch.int64, cuda).to(memory_format=layout)):
        for _ in range(2):
            assert_comes_back(offload, torch.empty_like(other).copy_(other))


@pytest.mark.parametrize("to", ["host", "device"])
def test_what_outgrows_its_room_is_not_lost(cuda, to):
    offload = offload_on(cuda, to=to, window_bytes=1)
    shape = (1 << 18,)
    inputs = [torch.zeros(shape, device=cuda), *[torch.randn(shape, device=cuda).exp() for _ in range(2)]]
    for x, expected in zip(inputs, (False, True, False)):
        before = offload.stats.outgrown_bytes
        context = pytest.warns(RuntimeWarning, match="less compressible") if expected else contextlib.nullcontext()
        with context:
            assert_comes_back(offload, x, *torch.zeros(3, 1 << 18, device=cuda).unbind())
        assert (offload.stats.outgrown_bytes > before) == expected


def test_a_gpu_keeps_nothing(cuda):
    net, x = on(cuda, torch.bfloat16, "vgg16")
    for options in WAYS.values():
        offload = offload_on(cuda, **options)
        gradients(net, x, offload)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            gradients(net, x, offload)
            with offload:
                net(x)  # no backward pass
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


def test_memory_is_freed(cuda):
    """Saved tensors of a chain take no device memory beyond the windows."""
    offload = offload_on(cuda, window_bytes=8 << 20)
    x = torch.zeros(1 << 20, device=cuda, requires_grad=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with offload:
            y = x
            for _ in range(32):
                y = y.sin()
        held = torch.cuda.memory_allocated() - before
        y.sum().backward()
    assert held < 5 * x.numel() * 4
    assert torch.cuda.max_memory_allocated() - before < 16 * x.numel() * 4


def test_streams(cuda):
    net, x = on(cuda, torch.float32, "swiglu")
    wanted, offload = gradients(net, x), offload_on(cuda)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = gradients(net, x, offload)
        torch.cuda.current_stream().wait_stream(stream)
        assert_same_gradients(got, wanted)


def test_graphs_that_are_captured_keep_what_they_save(cuda):
    x = torch.randn(1 << 16, device=cuda, requires_grad=True)
    offload, side = offload_on(cuda), torch.cuda.Stream()

    def step():
        with offload:
            y = (x * x).sin()
        return torch.autograd.grad(y.sum(), x)[0]

    wanted = step()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    offload.reset_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert_same_bits(got, wanted)
    assert offload.stats.coded_bytes == 0


# Where the window holds all that is saved, all of it comes back at once, and a plan frees nothing.
@pytest.mark.parametrize(
    "budget",
    [{"slowdown": 0.0}, {"slowdown": 0.5}, {"slowdown": 1e9, "window_bytes": 1 << 20}, {"device_bytes": 1 << 20}],
)
def test_budgets_on_a_gpu(cuda, budget):
    net, x = on(cuda, torch.bfloat16, "vgg16")
    x = x.repeat(16, 1, 1, 1)
    with deterministic(x):
        wanted, offload = gradients(net, x), settled(offload_on(cuda, **budget), net, x)
        for _ in range(2):
            offload.reset_stats()
            assert_same_gradients(gradients(net, x, offload), wanted)
    stats, everything = offload.stats, offload._pass.num_bytes
    left = stats.coded_bytes + stats.raw_bytes
    if budget.get("slowdown") == 1e9:
        assert left > 0
    if "device_bytes" in budget:
        assert everything - left + stats.device_bytes <= budget["device_bytes"]
    assert offload._pass.alive == 0


def test_an_order_that_changes(cuda):
    offload, ones = offload_on(cuda, window_bytes=1 << 20), torch.ones((), device=cuda, requires_grad=True)
    inputs = [torch.randn(1 << 17, device=cuda) for _ in range(12)]
    for seed in range(4):
        seen = []
        with offload:
            results = [Save.apply(ones, seen, x * 1) for x in inputs]
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        for k in order[:-1]:  # the last one is never asked for
            results[k].backward()
        for k, (got,) in zip(order, seen):
            assert_same_bits(got, inputs[k])


def test_what_a_gpu_sends_raw_is_refused_where_it_was_changed(cuda):
    offload, x = offload_on(cuda, coded=False), torch.randn(1 << 16, device=cuda)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved(offload, x, between=lambda: x.add_(1))


def test_two_gpus(gpus):
    net, x = on(CPU, torch.float32, "swiglu")
    first, second = (copy.deepcopy(block).to(gpu) for block, gpu in zip(net.blocks, gpus))
    both = torch.nn.ModuleList([first, second])

    def split(context):
        with context:
            y = second(first(x.to(gpus[0])).to(gpus[1]))
        y.square().mean().backward()
        found = [parameter.grad for parameter in both.parameters()]
        both.zero_grad()
        return found

    offload = offload_on(None, window_bytes=1)
    wanted = split(contextlib.nullcontext())
    for _ in range(3):
        assert_same_gradients(split(offload), wanted)
    assert len(offload._lanes) == 2


def test_what_does_not_shrink_counts_in_a_budget_on_a_gpu(cuda):
    floats = [torch.randn(1 << 20, device=cuda).bfloat16() for _ in range(4)]
    tensors = [noise((4 << 20,), torch.uint8, cuda), *floats]
    offload = offload_on(cuda, to="device", device_bytes=11 << 20)
    for _ in range(12):
        offload.reset_stats()
        assert_comes_back(offload, *tensors)
        torch.cuda.synchronize()
    stats = offload.stats
    assert offload.is_settled and stats.kept_bytes >= 4 << 20 and stats.coded_bytes > 0
    assert stats.kept_bytes + stats.device_bytes <= 11 << 20
