"""Rings of buffers, and those who use them: no buffer is written or read early, however fast each stream runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counted import CountedOperations
from helpers import assert_same_bits
from ibp._machine import memory, staging
from ibp._machine.staging import Ring, Turn
from ibp.checkpoints import _coding
from ibp.kv._tokens import TokenDecoder
from kv_blocks import Raw, any_changes, tokens
from stream_clocks import Gpu, clock_copies, clocked_gpu

CPU = torch.device("cpu")


def use_gpu(monkeypatch):
    gpu = clocked_gpu(monkeypatch)
    clock_copies(monkeypatch, gpu)
    return gpu


@pytest.fixture
def gpu(monkeypatch):
    return use_gpu(monkeypatch)


def numbers(num_bytes, start=0):
    return (torch.arange(num_bytes) + start).to(torch.uint8)


# ---- the ring ----


def bring(gpu, ring, size, start=0):
    """Fills the next buffer by a copy. Returns the turn and its bytes."""
    turn, source = ring.next(), numbers(size, start)
    gpu.held.append(source)
    turn.reserve(size)
    turn.bring(ring.stream, [(turn.memory[:size], source)])
    return turn, source


def check(gpu, worker, turn, right):
    """Work that reads a buffer."""
    turn.wait(worker)
    with gpu.on(worker):
        gpu.use(turn.memory[: right.numel()], writes=False)
    assert_same_bits(turn.memory[: right.numel()], right)
    turn.release(worker)


def send(gpu, ring, worker, size, start=0):
    """Work that fills the next buffer, and a copy that empties it. Returns what was filled in, and the copy."""
    turn, right, target = ring.next(), numbers(size, start), torch.zeros(size, dtype=torch.uint8)
    gpu.held.append(target)
    turn.reserve(size)
    turn.claim(worker)
    with gpu.on(worker):
        gpu.use(turn.memory[:size], writes=True)
    turn.memory[:size] = right
    turn.hand_over(worker)
    turn.send(ring.stream, [(target, turn.memory[:size])])
    return right, target


STEPS = st.lists(st.tuples(st.sampled_from(["bring", "check", "send"]), st.integers(0, 9)), max_size=40)


@given(STEPS, st.integers(1, 4), st.booleans())
def test_no_buffer_is_used_early(steps, turns, is_beside):
    """Any order of bytes that come in, are read once or more, and go out, through buffers that grow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = use_gpu(monkeypatch)
        worker = Gpu.Stream(gpu) if is_beside else gpu.current
        inward, outward = (Ring(CPU, worker, 3, turns) for _ in range(2))
        held, sent = {}, []
        for step, number in steps:
            if step == "bring":
                turn, right = bring(gpu, inward, 1 + 5 * number, number)
                held[turn] = right
            elif step == "send":
                sent.append(send(gpu, outward, worker, 1 + 5 * number, number))
            elif held:
                turn = list(held)[number % len(held)]
                check(gpu, worker, turn, held[turn])
        assert len(held) <= turns
        for right, target in sent:
            assert_same_bits(target, right)
        for turn in (*inward._turns, *outward._turns):
            streams = {worker, inward.stream if turn in inward._turns else outward.stream}
            assert {stream for address, stream in gpu.recorded if address == turn.memory.data_ptr()} == streams
        assert inward.num_bytes == sum(turn.memory.numel() for turn in inward._turns) >= 3 * turns


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("missing", ["claim", "hand_over", "wait", "release"])
def test_every_step_is_needed(gpu, monkeypatch, missing, way):
    monkeypatch.setattr(Turn, missing, lambda turn, stream: None)
    worker = gpu.current
    ring = Ring(CPU, worker, 8)
    with pytest.raises(AssertionError, match="races"):
        for _ in range(3):
            if way == "in":
                turn, right = bring(gpu, ring, 8)
                check(gpu, worker, turn, right)
            else:
                send(gpu, ring, worker, 8)


def test_new_memory_is_waited_for(gpu, monkeypatch):
    ring = Ring(CPU, Gpu.Stream(gpu))
    bring(gpu, ring, 8)
    monkeypatch.setattr(Gpu.Stream, "wait_stream", lambda stream, other: None)
    with pytest.raises(AssertionError, match="races"):
        bring(gpu, ring, 9)


# ---- its users ----


@pytest.mark.parametrize("pageable", [True, False])
def test_blocks_on_their_way_to_the_gpu(gpu, pageable):
    parts = [numbers(size, size) for size in (10, 30, 5, 20, 50, 30, 40)]
    for near, right in zip(staging.copied_ahead(parts, CPU, pageable), parts):
        gpu.use(near, writes=False)
        assert_same_bits(near, right)


def test_bytes_on_their_way_as_a_whole(gpu, monkeypatch):
    monkeypatch.setattr(staging, "_goes_whole", lambda data, device: data.numel() > 50)
    for size in (100, 50):
        data = numbers(size, size)
        with staging.whole_ahead(data, CPU) as near:
            for _ in range(2):
                if size > 50:
                    gpu.use(near(), writes=False)
                assert_same_bits(near(), data)
                assert (near() is data) == (size <= 50)


@pytest.mark.parametrize("pageable", [True, False])
def test_blocks_on_their_way_from_the_gpu(gpu, pageable):
    targets = [torch.zeros(size, dtype=torch.uint8) for size in (10, 30, 5, 20, 500, 30, 400)]
    with staging.Outlet(CPU, pageable) as outlet:
        for number, target in enumerate(targets):
            (near,) = outlet.take([target.numel()])
            gpu.use(near, writes=True)
            near.fill_(number + 1)
            outlet.put([target], [near])
    with gpu.on(gpu.host):
        for number, target in enumerate(targets):
            gpu.use(target, writes=False)
            assert (target == number + 1).all()


class Layers:
    """Layers of a KV-cache whose coded tokens are in the memory of a GPU or in host memory, with one decoder."""

    def __init__(self, gpu, monkeypatch, count, place="pinned"):
        monkeypatch.setattr(memory, "device_view", lambda host, device: host)
        monkeypatch.setattr(memory, "empty", lambda size, *_, **__: torch.empty(size, dtype=torch.uint8))
        self.raws, self.decoder = [Raw() for _ in range(count)], TokenDecoder(CPU, place, 0)
        decode = self.decoder._decode
        for raw in self.raws:
            raw.coder._decoders[CPU] = self.decoder
            raw.history = raw.coder.history(*tokens(1, 1))

        def clocked_decode(history, keys, values, blocks, staged):
            gpu.use(staged, writes=False)
            decode(history, keys, values, blocks, staged)

        self.decoder._decode = clocked_decode


def test_layers_of_a_kv_cache(gpu, monkeypatch):
    layers = Layers(gpu, monkeypatch, 3)
    for _ in range(3):
        for raw in layers.raws:
            raw.add(2)
            raw.check()
    before = layers.decoder.fetched_bytes
    layers.raws[2].check()
    layers.raws[1].check()
    assert layers.decoder.fetched_bytes == before, "both are in a buffer"
    layers.raws[0].check()
    assert layers.decoder.fetched_bytes == before + layers.raws[0].history.arena.used
    assert layers.decoder.device_bytes >= 2 * layers.raws[0].history.arena.used


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_operations_of_a_fetch(gpu, monkeypatch, place, count):
    """A fetch makes no tensors but the keys and values and views of them. Coded tokens are described to operations once
    for each buffer, until tokens are added."""
    layers, operations = Layers(gpu, monkeypatch, count, place), CountedOperations()
    for raw in layers.raws:
        raw.add(2)
    for _ in range(2):
        for raw in 2 * layers.raws:
            raw.check()
        with operations:
            for raw in layers.raws:
                raw.history.fetch(20).wait()
        of_copies = ["slice", "copy_"] if place == "pinned" and count > 2 else []
        in_parts = len(layers.raws[0].history.arena.parts())
        of_a_layer = ["empty", "empty", *of_copies * in_parts, *["as_strided", "gather_items"] * 2]
        assert operations.names == of_a_layer * count
        operations.names.clear()
        for raw in layers.raws:
            raw.add(1)


def test_descriptions_keep_no_memory(gpu, monkeypatch):
    """Buffers that grow are freed, and descriptions of their memory are forgotten."""
    layers = Layers(gpu, monkeypatch, 1)
    raw = layers.raws[0]
    for _ in range(4):
        raw.add(3)
        raw.check()
        for turn in list(layers.decoder._ring._turns):
            turn.memory = turn.memory.clone()
            raw.history.stamp += 1000
            raw.check()
        assert all(len(span._tables) <= 2 for states in (raw.history.keys, raw.history.values) for span in states.spans)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_any_changes_of_a_kv_cache(gpu, monkeypatch, place):
    layers = Layers(gpu, monkeypatch, 1, place)
    any_changes(layers.raws[0], 0, 25)
    assert (layers.decoder.fetched_bytes > 0) == (layers.decoder.device_bytes > 0) == (place == "pinned")


def test_blocks_of_a_checkpoint(gpu, monkeypatch):
    """Blocks are coded by the CPU here, where they lie on a GPU."""

    class Source:
        def __init__(self, data):
            self.data, self.num_bytes = data, data.size

        def read(self, start, end):
            return self.data[start:end]

    def code(coder, data, codebook, out, start):
        gpu.use(data, writes=False)
        gpu.use(out, writes=True)
        out[:-1] = data[1:]
        return torch.zeros(1, dtype=torch.uint16), torch.tensor([data.numel() - 1, start, 0, 0, 0, 0])

    monkeypatch.setattr(_coding.CudaCoder, "_code", code)
    monkeypatch.setitem(_coding._BLOCK_BYTES, "cuda", 64)
    source, coder, held = Source(numbers(1000).numpy()), _coding.CudaCoder(CPU, 3), []
    starts = range(0, 1000, 50)
    blocks = [_coding.Block(source, start, start + 50, codebook=...) for start in starts]
    for start, coded in zip(starts, coder.coded(blocks)):
        with gpu.on(gpu.host):
            gpu.use(torch.from_numpy(coded.data), writes=False)
        assert coded.data.tolist() == source.data[start + 1 : start + 50].tolist() and coded.words == start
        held.append(coded)
        if len(held) == 3:
            held.pop(0).release()
    assert len({coded.data.ctypes.data for coded in held}) == 2 and len(coder._free) < 12
