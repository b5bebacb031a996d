"""Saved tensors that leave their device (ibp.offload_activations): what autograd gets back has the same bits, nothing
is kept longer than the graph, and what must stay stays."""

import contextlib
import copy
import functools
import gc
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ibp
from benchmarks import nets
from benchmarks.activations import deterministic
from helpers import DTYPES, assert_same_bits, in_threads, slow_but
from ibp._activations import coding
from ibp._activations.coding import IndexOrigin
from ibp._activations.offload import CODED, RAW, ActivationPolicy, _RegionSize
from ibp._activations.regions import PieceTransfers, SavedRegion
from ibp._common import process
from ibp._machine import memory as machine_memory
from interrupts import interrupt_at

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
    stats = offload.stats()
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
    assert offload.stats().kept_bytes >= weights, "cast weights stay, which autocast keeps for the next forward pass"


# ---- bits ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype):
    for make in (noise, halves):
        offload = offload_on(CPU)
        assert_comes_back(offload, make((3, 2000), dtype), make((1000, 8), dtype).t())
    assert offload.stats().coded_bytes > 0


def test_what_coding_does_not_make_smaller_is_not_coded():
    offload, x = offload_on(CPU), noise((1 << 16,), torch.uint8)
    assert_comes_back(offload, x)
    assert offload.stats().coded_bytes == 0 and offload.stats().kept_bytes == x.nbytes
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
    assert offload.stats().coded_bytes == x.numel() * 2 + x[2:6].numel() * 2
    assert offload.stats().shared == 7, "q, k, v and other views have the bytes of x"


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
    assert offload.stats().coded_bytes == 0


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


def view_of(x):
    return coding.SpanView(x.dtype, x.shape, x.stride(), 0)


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
    stats = offload.stats()
    assert stats.coded_bytes == 8 * indices.numel() and stats.device_bytes * least < stats.coded_bytes
    assert_comes_back(offload, torch.empty_like(indices).copy_(indices.flip(0)))
    assert offload.stats().outgrown_bytes == 0
    with pytest.warns(RuntimeWarning, match="less compressible"):
        assert_comes_back(offload, torch.empty_like(indices).copy_(noise(indices.shape, torch.int64)))
    assert offload.stats().outgrown_bytes == 8 * indices.numel()
    assert_comes_back(offload, indices[:, :5].clone(), torch.zeros_like(indices))


@pytest.mark.parametrize("most, dtype", [(255, torch.uint8), (256, torch.int16), (32767, torch.int16)])
def test_narrow_elements_are_widened(most, dtype):
    view = coding.SpanView(torch.int64, torch.Size((5, 4, 3, 7)), (84, 1, 28, 4), 0)  # channels last
    least = (torch.arange(21) * 1000).repeat_interleave(4)
    elements = least + torch.randint(0, most + 1, (5, 84))
    elements[0], elements[1] = least, least + most
    data = elements.view(-1).view(torch.uint8)
    origin = IndexOrigin.of(data, view)
    assert origin.dtype == dtype and origin.takes(data.numel()) and not origin.takes(data.numel() - 8)
    limit = torch.iinfo(dtype).max
    for place, is_lost in ((7, False), (limit, False), (limit + 1, True), (-1, True), (-(2**63), True), (2**62, True)):
        elements[3, 50] = least[50] + place if abs(place) < 2**62 else place
        narrow, misfits = origin.narrow(data)
        assert bool(misfits) == is_lost and narrow.numel() * origin.times_narrower == data.numel()
        assert is_lost or torch.equal(origin.widen(narrow), data)


def test_elements_too_far_from_others_have_no_origin():
    x = torch.zeros(8, 4, 4, 4, dtype=torch.int64)
    assert IndexOrigin.of(x.view(-1).view(torch.uint8), view_of(x)) is not None
    for place in (1 << 15, -1):
        x[3, 3, 3, 3] = place
        assert IndexOrigin.of(x.view(-1).view(torch.uint8), view_of(x)) is None


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
    assert IndexOrigin.of(torch.zeros(x.numel() * x.itemsize, dtype=torch.uint8), view_of(x)) is None


# ---- what is saved once ----


def test_bytes_are_coded_once():
    offload, x = offload_on(CPU), torch.randn(64, 64)
    assert_comes_back(offload, x, x, x.t(), x.view(-1), x.view(torch.int32))
    assert offload.stats().shared == 4 and offload.stats().coded_bytes == x.numel() * 4


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
    assert offload.stats().shared == 0


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
    assert offload.stats().shared == 1 and offload.stats().coded_bytes == 20_000
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


def test_what_is_decoded_on_a_stream_is_waited_for_by_others():
    offload, first, second = offload_on(CPU), Stream(), Stream()
    region, held, decoded = SavedRegion(offload._pass, 0, 5000, None, None), Recorded(), Recorded()
    region.stream = first
    for stream, memory in ((first, held), (second, held), (second, decoded), (first, decoded)):
        assert region._usable(memory, stream) is memory
    assert second.waited == [first] and held.streams == [second]
    assert first.waited == [second] and decoded.streams == [first]


# ---- what stays ----


def test_parameters_and_small_tensors_stay():
    offload, net = offload_on(CPU), torch.nn.Linear(64, 64)
    with offload:
        y = net(torch.randn(64, 64)[:2].clone().requires_grad_())
    y.sum().backward()
    assert offload.stats().coded_bytes == 0 and offload.stats().kept_bytes > 0


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
    assert offload.stats().tensors == 0


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
    assert outside.stats().coded_bytes <= 3 * x.numel() * 4, "inputs of blocks, not what is saved inside"
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
        assert len(offload._policy._learners) <= offload._pass.numbers


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
        ({"memory": "host"}, ValueError, "memory is 'host'; wanted one of"),
        ({"least_bytes": -1}, ValueError, "least_bytes"),
        ({"window_bytes": "many"}, TypeError, "window_bytes"),
        ({"device": "tpu"}, ValueError, "device is 'tpu'"),
        ({"device_bytes": 0.5}, TypeError, "device_bytes"),
        ({"max_sms": 0}, ValueError, "max_sms is 0"),
    ],
)
def test_arguments(options, error, text):
    with pytest.raises(error, match=text):
        ibp.offload_activations(**options)


# ---- budgets ----


def sizes_of(offload):
    return offload._policy._sizes[CPU]


@pytest.mark.parametrize("share", [0.0, 0.6, 0.9, 1.0])
def test_a_budget_of_bytes(share):
    net, x = on(CPU, torch.bfloat16, "vgg16")
    wanted, offload = gradients(net, x), offload_on(CPU, device_bytes=0)
    assert_same_gradients(gradients(net, x, offload), wanted)
    everything = sum(size.num_bytes for size in sizes_of(offload))
    budget = int(share * everything)
    offload = offload_on(CPU, device_bytes=budget)
    for step in range(4):
        offload.reset_stats()
        assert_same_gradients(gradients(net, x, offload), wanted)
        stats = offload.stats()
        stays = everything - stats.coded_bytes + stats.device_bytes
        assert offload.is_settled == (step > 0)
    gone = [size for size in sizes_of(offload) if (CPU, size.number) not in offload._policy._staying]
    expected = everything - sum(size.num_bytes - size.left_bytes for size in gone)
    least = sum(size.left_bytes for size in sizes_of(offload))
    assert stays <= max(budget, least)
    largest = max((size.num_bytes - size.left_bytes for size in gone), default=0)
    assert expected + largest > budget or share == 1, "no more leaves than must"
    assert (stats.coded_bytes == 0) == (share == 1)


def test_the_most_compressible_leave_first():
    choice = ActivationPolicy("device", True, 250)
    left = [(0.9, 90), (0.5, 50), (0.3, 30), (1.0, 100)]
    sizes = [_RegionSize(share, k, 100, num_bytes) for k, (share, num_bytes) in enumerate(left)]
    for budget, staying in ((400, [0, 1, 2, 3]), (330, [0, 1, 3]), (329, [0, 3]), (280, [0, 3]), (279, [3]), (0, [])):
        choice._device_bytes = budget
        assert sorted(choice._that_fit(sizes)) == staying


def test_a_budget_follows_other_sizes():
    net, x = on(CPU, torch.bfloat16, "swiglu")
    offload = offload_on(CPU, device_bytes=1 << 40)
    for size in (32, 32, 16, 16):
        part = x[:, :size]
        offload.reset_stats()
        assert_same_gradients(gradients(net, part, offload), gradients(net, part))
    assert offload.stats().coded_bytes == 0
    everything = sum(size.num_bytes for size in sizes_of(offload))
    offload = offload_on(CPU, device_bytes=everything)
    for size, leaves in ((16, True), (16, False), (32, True), (32, True), (16, True), (16, False)):
        offload.reset_stats()
        gradients(net, x[:, :size], offload)
        assert (offload.stats().coded_bytes > 0) == leaves


def test_one_context_around_all_steps_keeps_to_a_budget():
    net, x = on(CPU, torch.bfloat16, "swiglu")
    offload = offload_on(CPU, device_bytes=1 << 40)
    with offload:
        for _ in range(3):
            offload.reset_stats()
            gradients(net, x)
    assert offload.is_settled and offload.stats().coded_bytes == 0


def test_what_does_not_shrink_counts_in_a_budget_of_bytes():
    tensors = [noise((400_000,), torch.uint8), *[torch.randn(200_000).bfloat16() for _ in range(4)]]
    offload = offload_on(CPU, device_bytes=1_700_000)
    for _ in range(5):
        offload.reset_stats()
        assert_comes_back(offload, *tensors)
    stats = offload.stats()
    assert stats.kept_bytes >= 400_000 and stats.coded_bytes > 0
    assert stats.kept_bytes + stats.device_bytes <= 1_700_000


@pytest.mark.parametrize("change", [0.0, 0.001, 0.01])
def test_room_is_for_changes_like_the_last_ones(change):
    recipe = coding.learn(
        halves((1 << 16,), torch.bfloat16).view(torch.uint8), coding.SpanView(torch.bfloat16, (1,), (1,), 0)
    )
    size, used, rooms = 1 << 26, 0.5 * (1 << 26), []
    for step in range(12):
        recipe.begin()
        rooms.append(recipe.room(size))
        assert step < 3 or used < rooms[-1] <= used * (1.005 + 12 * change)
        recipe.note(size, int(used))
        used *= 1 + change


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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Event:
    def query(self):
        return True

    synchronize = query


@pytest.fixture
def linked(monkeypatch, small_pieces):
    """An offload on the CPU whose regions move as those of a GPU do."""
    stream = Instant()
    monkeypatch.setattr(torch, "Stream", Instant)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, of: None)
    monkeypatch.setattr(machine_memory, "empty", lambda size, *_, **__: torch.empty(size, dtype=torch.uint8))

    def make(coded=True, memory="pinned", window_bytes=1 << 16, max_sms=None):
        offload = offload_on(CPU, coded=coded, memory=memory, window_bytes=window_bytes, max_sms=max_sms)
        window_bytes = window_bytes if memory == "pinned" else None
        offload._transfers[CPU] = PieceTransfers(CPU, window_bytes, offload._max_sms)
        monkeypatch.setattr(offload, "_transfers_of", offload._transfers.get)
        if memory == "pinned":
            monkeypatch.setattr(offload._policy, "_mode", lambda recipe, _: RAW if recipe is None else CODED)
        return offload

    return make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.int64], ids=str)
def test_pieces_come_back(small_pieces, dtype):
    offload = offload_on(CPU)
    for count in (1, 8191, 8192, 8193, 20000, 32768):
        assert_comes_back(offload, halves((count,), dtype), noise((count,), dtype))


@pytest.mark.parametrize("options", [{}, {"coded": False}, {"memory": "device"}, {"window_bytes": 1}], ids=str)
@pytest.mark.parametrize("name", slow_but(["swiglu"], ["vgg16", "swiglu"]))
def test_pieces_go_over_a_link(linked, name, options):
    net, x = on(CPU, torch.bfloat16, name)
    x, offload = x.repeat(4, *[1] * (x.dim() - 1)), linked(**options)
    wanted = gradients(net, x)
    for _ in range(3):
        offload.reset_stats()
        assert_same_gradients(gradients(net, x, offload), wanted)
    (way,) = offload._transfers.values()
    way.take_back()
    assert offload._pass.alive == way.coming == way.coming_bytes == 0
    stats = offload.stats()
    if options.get("memory") == "device":
        assert 0 < stats.device_bytes < stats.coded_bytes
    else:
        saved_bytes = stats.coded_bytes + stats.raw_bytes
        assert stats.sent_bytes == saved_bytes if "coded" in options else 0 < stats.sent_bytes < 0.9 * saved_bytes
    held = offload.pinned_bytes
    gradients(net, x, offload)
    assert offload.pinned_bytes == held, "pinned memory is used again"
    offload.close()
    assert offload.pinned_bytes == 0


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, after each operation.

    known: tensors that do not count.
    """

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._known:
                self._alive[key] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self.now = sum(num_bytes for _, num_bytes in self._alive.values())
        self.peak = max(self.peak, self.now)
        return found


def peaks(net, x, context, *pinned):
    """(most bytes alive in the forward pass, and in the backward pass, bytes between them) of a step."""
    with AliveBytes(x, *net.parameters(), *pinned) as alive:
        with context:
            loss = net(x).square().mean()
        torch.zeros(())  # counts what is gone
        forward, between, alive.peak = alive.peak, alive.now, 0
        loss.backward()
    net.zero_grad()
    return forward, alive.peak, between


@pytest.fixture
def host_far_ahead(monkeypatch):
    """Events of the link are not done until the host waits for them."""
    monkeypatch.setattr(Event, "query", lambda self: False)


@pytest.mark.parametrize("tokens, activation", [(256, "relu2"), (256, "swiglu"), (64, "swiglu")])
def test_codes_on_the_device_lower_the_peak(linked, host_far_ahead, monkeypatch, tokens, activation):
    """Also where the host never sees sizes before it waits; with few tokens most of the memory is gradients'."""
    monkeypatch.setattr(coding, "PIECE_BYTES", 4 * coding.ROW_BYTES)
    net, x = nets.llama(1, 128, 448, 4, activation).bfloat16(), torch.randn(2, tokens, 128).bfloat16()
    plain, offload = peaks(net, x, contextlib.nullcontext()), linked(memory="device")
    gradients(net, x, offload)
    (way,) = offload._transfers.values()
    way.take_back()
    pinned = [buffer for free in way.buffers._free.values() for buffer, _ in free]
    coded = peaks(net, x, offload, *pinned)
    assert max(coded[:2]) < 0.97 * max(plain[:2]) and coded[2] < 0.85 * plain[2]


def test_at_most_two_pieces_wait_for_the_host(linked, host_far_ahead, monkeypatch):
    offload, two = linked(memory="device"), 2 * coding.memory_bytes(coding.PIECE_BYTES)
    (way,), waiting = offload._transfers.values(), []
    send = way.send
    monkeypatch.setattr(way, "send", lambda *of: (send(*of), waiting.append(way.leaving_bytes))[0])
    tensors = [halves((size,), torch.bfloat16) for size in (40000, 300, 5000, 4096, 1 << 16)]
    for _ in range(2):
        seen, y = [], torch.ones((), requires_grad=True)
        with offload:
            for x in tensors:
                y = Save.apply(y, seen, x.clone())
        assert 0 < way.leaving_bytes <= max(waiting) <= two
        y.backward()
        assert way.leaving_bytes == 0, "nothing waits in the backward pass"


@pytest.mark.parametrize("is_linked", [False, True])
def test_codes_are_freed_once_they_are_decoded(linked, small_pieces, is_linked):
    """A graph that is retained has decoded bytes from then on."""
    offload = linked(memory="device") if is_linked else offload_on(CPU)
    x, seen = halves((1 << 16,), torch.bfloat16), []
    with offload:
        y = Save.apply(torch.ones((), requires_grad=True), seen, x)
    (region,) = [found() for found in offload._pass._regions.values()]
    codes = [piece.memory if piece.kept is None else piece.kept for piece in region.pieces]
    assert len(codes) == 16 and all(code is not None for code in codes)
    for _ in range(3):
        y.backward(retain_graph=True)
        assert all(piece.memory is piece.kept is None for piece in region.pieces)
    assert [torch.equal(got, x) for (got,) in seen] == [True] * 3
    seen[0][0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("coded", [False, True])
def test_windows_bound_what_is_on_its_way(linked, monkeypatch, coded):
    """Nothing leaves before it is waited for; what comes back fits the window."""
    monkeypatch.setattr(Event, "query", lambda self: False)
    window = 8 * coding.PIECE_BYTES
    offload, seen, most = linked(coded, window_bytes=window), [], 0
    (way,) = offload._transfers.values()
    y = one = torch.ones((), requires_grad=True)
    tensors = [halves((size,), torch.bfloat16) for size in [4096, 40000, 10000, 300, 5000] * 4]
    fetch, coming = way.fetch, []
    monkeypatch.setattr(way, "fetch", lambda *of: (fetch(*of), coming.append(way.coming_bytes)))
    with offload:
        for x in tensors:
            y = Save.apply(y, seen, x)
            most = max(most, way.leaving_bytes - (0 if coded else x.numel() * 2))
    assert most <= window + 3 * coding.PIECE_BYTES
    assert coded or way._leaving, "raw tensors stay until their last piece has left"
    y.backward()
    for (got,), x in zip(reversed(seen), tensors, strict=True):
        assert_same_bits(got, x)
    way.take_back()
    assert one.grad is not None and 0 < max(coming) <= window + coding.PIECE_BYTES and way.coming == 0


@pytest.mark.parametrize("max_sms, wanted", [(None, 0), (3, 3)])
def test_coding_keeps_to_its_multiprocessors(linked, monkeypatch, max_sms, wanted):
    """Every call that codes or decodes is given the limit."""
    given = []
    for name in ("encode", "decode"):
        call = getattr(coding, name)
        monkeypatch.setattr(coding, name, lambda *of, call=call: (given.append(of[-1]), call(*of))[1])
    x = halves((20_000,), torch.bfloat16)
    assert_comes_back(linked(max_sms=max_sms), x)
    assert len(given) >= 4 and set(given) == {wanted}


def test_pieces_that_outgrow_their_room_stay(linked):
    offload = linked()
    shape, inputs = (1 << 15,), [torch.zeros(1 << 15), *[torch.randn(1 << 15).exp() for _ in range(2)]]
    for x, expected in zip(inputs, (False, True, False)):
        before = offload.stats().outgrown_bytes
        context = pytest.warns(RuntimeWarning, match="less compressible") if expected else contextlib.nullcontext()
        with context:
            assert_comes_back(offload, x, *torch.zeros(6, *shape).unbind())
        assert (offload.stats().outgrown_bytes > before) == expected


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
        way = offload._transfers[CPU]
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
    assert (offload.stats().outgrown_bytes == 0) == fits


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
    (way,), taken = offload._transfers.values(), []
    take, recorded = way.buffers.take, []

    def three(*of):
        taken.append(of)
        if len(taken) > 3:
            raise machine_memory.PinningError("no memory is pinned")
        return take(*of)

    monkeypatch.setattr(way.buffers, "take", three)
    monkeypatch.setattr(process, "said", set())
    monkeypatch.setattr(Event, "query", lambda self: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, of: recorded.append(of))
    with pytest.warns(RuntimeWarning, match="no memory is pinned"):
        assert_comes_back(offload, halves((40000,), torch.bfloat16))
    assert len(taken) > 4 and way.out in recorded, "copies of the first pieces may still read them"


def test_coded_pieces_pin_no_more_than_raw_ones(linked, monkeypatch):
    """From step to step they become smaller: buffers of all their sizes would be larger than raw ones."""
    coded, raw = linked(), linked(coded=False)
    monkeypatch.setattr(coding, "PIECE_BYTES", 1 << 18)
    for step in range(8):
        for offload in (coded, raw):
            torch.manual_seed(step)
            kept = torch.rand(1 << 17) < 0.9 - 0.1 * step
            assert_comes_back(offload, *[torch.randn(1 << 17).bfloat16() * kept for _ in range(4)])
        assert coded.stats().coded_bytes and not raw.stats().coded_bytes
        assert coded.pinned_bytes <= raw.pinned_bytes
    (way,) = raw._transfers.values()
    assert raw.pinned_bytes == way.buffers.raw_held_bytes


def test_regions_end_in_other_threads(linked):
    """What ended is counted by calls that hold the lock, and by none twice."""
    offload = linked()
    (way,), graphs = offload._transfers.values(), []
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
    "pinned": {},
    "raw": {"coded": False},
    "device": {"memory": "device"},
    "narrow": {"window_bytes": 1},
    "narrow, raw": {"coded": False, "window_bytes": 1},
    "few": {"max_sms": 4},
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
    stats = offload.stats()
    assert (stats.coded_bytes > 0) == ("raw" not in way) and (stats.sent_bytes > 0) == (way != "device")
    assert offload._pass.alive == 0
    for way in offload._transfers.values():
        way.take_back()
        assert way.coming == way.coming_bytes == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_from_a_gpu(cuda, dtype, way):
    offload = offload_on(cuda, **WAYS[way])
    for make in (noise, halves):
        for _ in range(2):
            assert_comes_back(offload, make((3, 2000), dtype, cuda), make((1000, 8), dtype, cuda).t())


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_an_operation_may_change_what_comes_back_from_a_gpu(cuda, memory):
    """Another one that has saved the same bytes gets those of the time of saving."""
    offload, x = offload_on(cuda, memory=memory), halves((1 << 20,), torch.float32, cuda)
    for _ in range(3):
        seen = []
        offload.reset_stats()
        with offload:
            y = Change.apply(Save.apply(torch.ones((), device=cuda, requires_grad=True), seen, x), seen, x)
        y.backward()
        assert offload.stats().shared == 1 and offload.stats().coded_bytes == x.numel() * 4
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


@pytest.mark.parametrize("options", [{}, {"coded": False}, {"memory": "device"}], ids=str)
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


@pytest.mark.parametrize("way", ["pinned", "device", "narrow"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_indices_of_pooling_on_a_gpu(cuda, layout, way):
    offload, shape = offload_on(cuda, **WAYS[way]), (32, 64, 57, 57)
    for _ in range(3):
        x = torch.randn(shape, device=cuda).to(memory_format=layout)
        _, indices = torch.nn.functional.max_pool2d(x, 3, 2, return_indices=True)
        offload.reset_stats()
        assert_comes_back(offload, indices, *torch.zeros(3, 1 << 18, device=cuda).unbind())
    stats = offload.stats()
    assert stats.outgrown_bytes == 0
    assert 12 * (stats.sent_bytes + stats.device_bytes) < stats.coded_bytes == 8 * indices.numel() + (3 << 20)
    for other in (indices + 300, noise(shape, torch.int64, cuda).to(memory_format=layout)):
        for _ in range(2):
            assert_comes_back(offload, torch.empty_like(other).copy_(other))


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_what_outgrows_its_room_is_not_lost(cuda, memory):
    offload = offload_on(cuda, memory=memory, window_bytes=1)
    shape = (1 << 18,)
    inputs = [torch.zeros(shape, device=cuda), *[torch.randn(shape, device=cuda).exp() for _ in range(2)]]
    for x, expected in zip(inputs, (False, True, False)):
        before = offload.stats().outgrown_bytes
        context = pytest.warns(RuntimeWarning, match="less compressible") if expected else contextlib.nullcontext()
        with context:
            assert_comes_back(offload, x, *torch.zeros(3, 1 << 18, device=cuda).unbind())
        assert (offload.stats().outgrown_bytes > before) == expected


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
    assert offload.stats().coded_bytes == 0


def test_a_budget_on_a_gpu(cuda):
    net, x = on(cuda, torch.bfloat16, "vgg16")
    x = x.repeat(16, 1, 1, 1)

    def left(offload):
        return offload.stats().coded_bytes + offload.stats().raw_bytes

    with deterministic(x):
        wanted, offload = gradients(net, x), offload_on(cuda)
        assert_same_gradients(gradients(net, x, offload), wanted)
        everything = left(offload)
        offload = offload_on(cuda, device_bytes=everything // 2)
        for step in range(4):
            offload.reset_stats()
            assert_same_gradients(gradients(net, x, offload), wanted)
            assert offload.is_settled == (step > 0)
    assert 0 < everything - left(offload) <= everything // 2
    assert offload._pass.alive == 0


def test_codes_on_a_gpu_lower_its_peak(cuda):
    torch.manual_seed(0)
    net, x = nets.llama(2, 1024, 4096, 8, "relu2"), torch.randn(8, 4096, 1024)
    net, x = net.to(cuda, torch.bfloat16), x.to(cuda, torch.bfloat16)

    def peak(context):
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with context:
                loss = net(x).square().mean()
            loss.backward()
            net.zero_grad()
            del loss
        return torch.cuda.max_memory_allocated() - before

    assert peak(offload_on(cuda, memory="device", least_bytes=1 << 20)) < 0.95 * peak(contextlib.nullcontext())


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
    assert len(offload._transfers) == 2


def test_a_retained_graph_is_read_again_after_an_interrupt():
    x = torch.randn(64, 256).mul(0.02).requires_grad_()
    offload = ibp.offload_activations(device="cpu", least_bytes=1024)
    for moment in itertools.count(0, 3):
        with offload:
            loss = (x.exp().sin() * x).sum()
        (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
        _, interrupts = interrupt_at(moment, None, lambda: torch.autograd.grad(loss, x, retain_graph=True))
        assert_same_bits(torch.autograd.grad(loss, x)[0], wanted)
        if not interrupts:
            break
    assert moment > 5


def test_an_interrupted_backward_can_be_repeated():
    x = torch.randn(64, 256).mul(0.02).requires_grad_()
    wanted = torch.autograd.grad((x.exp().sin() * x).sum(), x)[0]
    offload = ibp.offload_activations(device="cpu", least_bytes=1024)
    for moment in itertools.count():
        with offload:
            loss = (x.exp().sin() * x).sum()
        _, interrupts = interrupt_at(moment, None, lambda: torch.autograd.grad(loss, x, retain_graph=True))
        for _ in range(2):
            assert_same_bits(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
        if not interrupts:
            break
    assert moment > 50


def test_what_does_not_shrink_counts_in_a_budget_on_a_gpu(cuda):
    floats = [torch.randn(1 << 20, device=cuda).bfloat16() for _ in range(4)]
    tensors = [noise((4 << 20,), torch.uint8, cuda), *floats]
    offload = offload_on(cuda, memory="device", device_bytes=11 << 20)
    for _ in range(12):
        offload.reset_stats()
        assert_comes_back(offload, *tensors)
        torch.cuda.synchronize()
    stats = offload.stats()
    assert offload.is_settled and stats.kept_bytes >= 4 << 20 and stats.coded_bytes > 0
    assert stats.kept_bytes + stats.device_bytes <= 11 << 20
