"""The streams and events of `ibp.offload` on a GPU, without one: see stream_clocks.py."""

import contextlib
import ctypes
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ibp
from helpers import assert_same_bits, embedding
from ibp._offload import events
from ibp._offload.fetcher import CudaWeightFetcher
from ibp._rows.table import handle_on
from ibp.cache import _stacks
from stream_clocks import Gpu, clocked_gpu
from test_experts import SIZES, Experts

WIDTH = 32


@pytest.fixture
def gpu(monkeypatch):
    return use_gpu(monkeypatch)


def use_gpu(monkeypatch):
    gpu = clocked_gpu(monkeypatch)

    class Ring:
        ring_bytes = 0

        def __init__(self, device, ring_bytes):
            assert gpu.current is not gpu.streams[0]

        def prepare(self, *job):
            return job

        def issue(self, job):
            table, start, end, worker, sms, out, fault = job
            address = out.data_ptr()
            gpu.access(address, address + end - start, writes=True)
            torch.ops.ibp.decode_bytes(handle_on(table, worker).table, start, end, sms, out, fault)

        def close(self):
            pass

    monkeypatch.setattr("ibp._offload.fetcher.TensorStream", Ring)
    for module in ("fetcher", "weights"):
        monkeypatch.setattr(f"ibp._offload.{module}.serves", lambda table, device: True)  # as if they were pinned
    monkeypatch.setattr("ibp._offload.events.WeightFetcher", CudaWeightFetcher)
    return gpu


class Layer(nn.Module):
    """A layer that reads its weight on the current stream."""

    def __init__(self, gpu, width, seed):
        super().__init__()
        self.gpu = gpu
        self.weight = nn.Parameter(embedding(width, WIDTH, seed=seed))

    def forward(self, x):
        start = self.weight.data_ptr()
        self.gpu.access(start, start + self.weight.nbytes, writes=False)
        return x + (x @ self.weight.t()).sum(-1, keepdim=True)


class Outer(Layer):
    """A layer with a weight of its own that it reads before and after a layer inside."""

    def __init__(self, gpu, width, seed):
        super().__init__(gpu, width, seed)
        self.inner = Layer(gpu, width, seed + 50)

    def forward(self, x):
        return super().forward(self.inner(super().forward(x)))


class Net(nn.Module):
    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.order, self.streams = gpu, [], []
        kinds = [Layer, Layer, Outer, Layer, Outer, Layer]
        self.layers = nn.ModuleList(kind(gpu, 40 + 8 * number, number) for number, kind in enumerate(kinds))
        self.eval()

    def forward(self, x):
        for number, stream in zip(self.order, itertools.cycle(self.streams)):
            stream.wait_stream(self.gpu.current)  # as a caller does who goes on on another stream
            with self.gpu.on(stream):
                x = self.layers[number](x)
            self.gpu.current.wait_stream(stream)
        return x


ORDERS = st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=1, max_size=6)


@given(ORDERS, st.integers(0, 5), st.integers(1, 20000), st.integers(1, 3))
def test_nothing_races(orders, lookahead, group_bytes, num_streams):
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = use_gpu(monkeypatch)
        model = Net(gpu)
        x = torch.ones(2, WIDTH)
        model.streams = [gpu.current]
        wanted = []
        with torch.no_grad():
            for model.order in orders:
                wanted.append(model(x))
            gpu.accesses.clear()
            offloaded = ibp.offload(model, "cpu", min_bytes=1, lookahead=lookahead, group_bytes=group_bytes)
            model.streams = [gpu.current, *(Gpu.Stream(gpu) for _ in range(num_streams - 1))]
            for model.order, result in zip(orders, wanted):
                assert_same_bits(model(x), result)
            assert any(writes for _, _, _, writes in gpu.accesses) == any(orders) or lookahead
            offloaded.close()
            for model.order, result in zip(orders, wanted):
                assert_same_bits(model(x), result)


@pytest.mark.parametrize("missing", ["_wait", "_note_reads", "over"])
def test_missing_waits_are_found(gpu, monkeypatch, missing):
    """The clocks see it when a fetcher waits for too little."""
    if missing == "over":
        queue = CudaWeightFetcher._queue
        monkeypatch.setattr(
            CudaWeightFetcher,
            "_queue",
            lambda self, place, over: (place.done.clear(), queue(self, place, [])),
        )
    else:
        monkeypatch.setattr(CudaWeightFetcher, missing, lambda self, place: None)
    model = Net(gpu)
    offloaded = ibp.offload(model, "cpu", min_bytes=1, lookahead=2, group_bytes=1)
    model.order, model.streams = list(range(6)), [gpu.current]
    with torch.no_grad(), pytest.raises(AssertionError, match="races"):
        for _ in range(4):
            model(torch.ones(2, WIDTH))
    assert offloaded.stats().uses


def test_a_steady_order_fetches_ahead_and_waits_for_nothing_else(gpu):
    """Once the order is known, a layer waits for its own fetch only: the one of the next layer may still go on."""
    model = Net(gpu)
    offloaded = ibp.offload(model, "cpu", min_bytes=1, lookahead=2, group_bytes=1)
    model.order, model.streams = list(range(6)), [gpu.current]
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        offloaded.reset_stats()
        ahead = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: ahead.append(side.clock[side.cuda_stream]))
        side = next(stream for stream in gpu.streams if stream is not gpu.streams[0] and stream.clock)
        for _ in range(3):
            model(torch.ones(2, WIDTH))
    stats = offloaded.stats()
    assert stats.misses == 0 and stats.waited_seconds > 0
    waited = gpu.streams[0].clock[side.cuda_stream]
    assert waited < side.clock[side.cuda_stream]


def test_pageable_weights_are_decoded_by_the_cpu(gpu, monkeypatch):
    """As where the system pins no memory: their bytes come to the same places, without a ring."""
    monkeypatch.setattr("ibp._offload.fetcher.serves", lambda table, device: False)
    monkeypatch.setattr("ibp._offload.fetcher.TensorStream", None)
    model = Net(gpu)
    model.order, model.streams = list(range(6)), [gpu.current]
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        wanted = model(x)
        offloaded = ibp.offload(model, "cpu", min_bytes=1, lookahead=2, group_bytes=1)
        for _ in range(3):
            assert_same_bits(model(x), wanted)
        (weight,) = offloaded._plan.groups[3].weights
        weight.table.lengths.fill_(1)
        with pytest.raises(ibp.CorruptTableError, match="row 0"):
            for _ in range(2):
                model(x)


def test_a_graph_cannot_capture(gpu):
    model = Net(gpu)
    model.order, model.streams = [0, 1], [gpu.current]
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        wanted = model(x)
        ibp.offload(model, "cpu", min_bytes=1, group_bytes=1)
        gpu.capturing = True
        with pytest.raises(RuntimeError, match="'layers.0' are streamed.*cannot capture"):
            model(x)
        gpu.capturing = False
        assert_same_bits(model(x), wanted)


def test_damage_is_raised_by_the_use_of_a_weight(gpu):
    model = Net(gpu)
    model.order, model.streams = list(range(6)), [gpu.current]
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        wanted = model(x)
        offloaded = ibp.offload(model, "cpu", min_bytes=1, group_bytes=1)
        (weight,) = offloaded._plan.groups[3].weights
        kept = weight.table.lengths.clone()
        weight.table.lengths.fill_(1)
        with pytest.raises(ibp.CorruptTableError, match="noted by an earlier call"):
            for _ in range(2):
                model(x)
        weight.table.lengths.copy_(kept)
        assert_same_bits(model(x), wanted)


class Reading(Experts):
    """Experts whose forward reads some of the stacks on the current stream, and may then fail."""

    gpu, reads, fails = None, (), False

    def forward(self, hidden, index, weights):
        values = []
        for name in self.reads:
            value = getattr(self, name)
            self.gpu.use(value, writes=False)
            values.append(value[index])
        if self.fails:
            raise ZeroDivisionError
        return values


def clock_experts(monkeypatch, gpu, beside, has_fork=True, is_interrupted=False):
    """Lets clocks follow the operation that fetches experts. Returns a list that receives all memory of its results."""
    take, memory = _stacks._take_matrices, []

    def clocked(*arguments):
        *_, address, events = arguments
        assert address == beside.cuda_stream
        first, *others = (ctypes.cast(event, ctypes.py_object).value for event in events)
        slots, held, work, *stacks = results = take(*arguments)
        memory.extend(results)
        for part in results:
            gpu.use(part, writes=True)  # an earlier owner of the memory, or the lists
        first.record(gpu.current)
        if has_fork:
            beside.wait_event(first)
        with gpu.on(beside):
            for event, stack in zip(others, stacks, strict=True):
                gpu.use(work, writes=True)
                gpu.use(stack, writes=True)
                event.record(beside)
        if is_interrupted:
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(_stacks, "_take_matrices", clocked)
    return memory


INDEX, GATES = torch.tensor([[1, 5]]), torch.ones(1, 2)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("reads", [(), ("up_proj",), ("down_proj",), ("up_proj", "down_proj")], ids=str)
@pytest.mark.parametrize("missing", ["", "fork", "stacks", "end"])
def test_experts_come_on_a_stream_of_their_own(monkeypatch, reads, fails, missing):
    """The caller's stream waits for a weight when it reads it, and for the others before it uses their memory again,
    even if forward fails. Every missing wait is seen."""
    gpu = clocked_gpu(monkeypatch)
    beside = Gpu.Stream(gpu)
    monkeypatch.setattr(events, "_stream_beside", lambda device: beside)
    memory = clock_experts(monkeypatch, gpu, beside, has_fork=missing != "fork")
    model = Reading()
    model.gpu, model.reads, model.fails = gpu, reads, fails
    wanted = [getattr(model, name)[INDEX] for name in reads]
    wait_for = _stacks.StackFetcher.wait_for
    with ibp.offload(model, "cpu", **SIZES) as offloaded:
        (forward,) = offloaded._experts
        calls = []

        def counted(fetcher, number, stream):
            calls.append(number)
            is_end = len(calls) > len(reads)
            if missing != ("end" if is_end else "stacks"):
                wait_for(fetcher, number, stream)

        monkeypatch.setattr(_stacks.StackFetcher, "wait_for", counted)

        def call():
            for part in memory:
                gpu.use(part, writes=True)  # the memory is used again
            memory.clear()
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                for value, right in zip(forward.call(torch.ones(1, 4), INDEX, GATES), wanted, strict=True):
                    assert_same_bits(value, right)
            for part in memory:
                gpu.use(part, writes=True)

        needed = {"": False, "fork": True, "stacks": bool(reads), "end": "down_proj" not in reads}
        with pytest.raises(AssertionError, match="races") if needed[missing] else contextlib.nullcontext():
            for _ in range(2):
                call()
                awaited = [("up_proj", "down_proj").index(name) for name in reads]
                assert calls == (awaited if 1 in awaited else [*awaited, 1])
                calls.clear()


def test_an_interrupted_fetch_of_experts(monkeypatch):
    """The caller's stream waits also if an interrupt comes when the operation has queued its work."""
    gpu = clocked_gpu(monkeypatch)
    beside = Gpu.Stream(gpu)
    monkeypatch.setattr(events, "_stream_beside", lambda device: beside)
    memory = clock_experts(monkeypatch, gpu, beside, is_interrupted=True)
    with ibp.offload(Experts(), "cpu", **SIZES) as offloaded:
        with pytest.raises(KeyboardInterrupt):
            offloaded._experts[0].call(torch.ones(1, 4), INDEX, GATES)
        assert memory
        for part in memory:
            gpu.use(part, writes=True)


def test_a_failure_before_forward(monkeypatch):
    """The caller's stream waits also if slots of another dtype find no memory."""

    class NoMemory(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation is torch.ops.aten._to_copy.default:
                raise torch.OutOfMemoryError("no memory for slots")
            return operation(*args, **(kwargs or {}))

    gpu = clocked_gpu(monkeypatch)
    beside = Gpu.Stream(gpu)
    monkeypatch.setattr(events, "_stream_beside", lambda device: beside)
    memory, x, index = clock_experts(monkeypatch, gpu, beside), torch.ones(1, 4), INDEX.int()
    with ibp.offload(Experts(), "cpu", **SIZES) as offloaded:
        with pytest.raises(torch.OutOfMemoryError, match="slots"), NoMemory():
            offloaded._experts[0].call(x, index, GATES)
        assert memory
        for part in memory:
            gpu.use(part, writes=True)


def test_experts_without_caches(monkeypatch):
    """If the system has refused to pin a stack, no cache serves, and each stack is read from its table."""
    model, x = Experts(), torch.randn(1, 256).bfloat16()
    wanted = model(x, INDEX, GATES)
    with ibp.offload(model, "cpu", **SIZES) as offloaded:
        monkeypatch.setattr(_stacks.StackFetcher, "serves", lambda fetcher, device: False)
        assert_same_bits(model(x, INDEX, GATES), wanted)
        assert int(offloaded._experts[0].num_spare) == 0
