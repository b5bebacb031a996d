"""The streams and events of `ibp.offload` on a GPU, without one: see stream_clocks.py."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ibp
from helpers import assert_same_bits, embedding
from ibp._offload import events
from ibp._offload.fetcher import CudaWeightFetcher
from ibp._rows.table import handle_on
from ibp.nn._experts import slots_for
from stream_clocks import Event, Gpu, clocked_gpu
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


@pytest.mark.parametrize("missing", ["", "wait_event", "wait_stream"])
def test_experts_come_on_a_stream_of_their_own(monkeypatch, missing):
    """The caller's stream waits for a weight when it reads it, and for the others before it uses their memory again."""
    gpu, fetch, memory = clocked_gpu(monkeypatch), events.CachedStack.fetch, []
    beside = Gpu.Stream(gpu)

    def record_event(stream):
        event = Event()
        event.record(stream)
        return event

    def clocked_fetch(stack, rows, out, max_sms):
        gpu.use(out, writes=True)
        memory.append(out)
        return fetch(stack, rows, out, max_sms)

    monkeypatch.setattr(Gpu.Stream, "record_event", record_event, raising=False)
    monkeypatch.setattr(events, "_stream_beside", lambda device: beside)
    monkeypatch.setattr(events.CachedStack, "fetch", clocked_fetch)
    if missing:
        monkeypatch.setattr(Gpu.Stream, missing, lambda stream, other: None)
    model = Experts()
    wanted = model.up_proj[[1, 5]]
    with ibp.offload(model, "cpu", **SIZES) as offloaded:
        (forward,) = offloaded._experts
        _, _, rows = slots_for(torch.tensor([[1, 5]]), 8, forward._num_rows, forward.num_spare)

        def read_one(weights):
            value = weights["up_proj"]()
            gpu.use(value, writes=False)
            return value

        with pytest.raises(AssertionError, match="races") if missing else contextlib.nullcontext():
            assert_same_bits(forward._call_beside(rows, read_one), wanted)
            for part in memory:
                gpu.use(part, writes=True)
