"""Memory that the system refuses to pin: tables are pageable with one warning, and all calls give the right rows. Who
asks for pinned memory gets it, or an error."""

import warnings

import pytest
import torch

import ibp
from fault_cases import CASES
from helpers import assert_same_bits, embedding, spiky_rows
from ibp import _core
from ibp._common import ops, process
from ibp._fetch import host_gather
from ibp._machine import memory, segments
from models import IDS, Net

MOST_PINNED = 4096  # bytes: records of faults, which kernels write to, are the one thing that must be pinned


class RefusedBuffer(_core.PinnedBuffer):
    """Of little memory, as the library's."""

    def __init__(self, num_bytes, node=-1):
        if num_bytes > MOST_PINNED:
            raise RuntimeError("made up by the test: out of memory")
        super().__init__(num_bytes, node)


def refuse(*_):
    raise RuntimeError("made up by the test: out of memory")


@pytest.fixture
def refused(monkeypatch):
    """Nothing is pinned from here on, and a warning has not been given."""
    empty = torch.empty

    def pageable_only(*args, pin_memory=False, **options):
        return refuse() if pin_memory else empty(*args, **options)

    monkeypatch.setattr(_core, "PinnedBuffer", RefusedBuffer)
    monkeypatch.setattr(_core, "PinnedRange", refuse)
    monkeypatch.setattr(_core.FilePages, "pin", refuse)
    monkeypatch.setattr(torch, "empty", pageable_only)
    monkeypatch.setattr(process, "said", set())
    monkeypatch.setattr(host_gather, "_refused", set())
    monkeypatch.setattr(host_gather, "_rings", {})
    monkeypatch.setattr(host_gather, "_stagers", {})
    monkeypatch.setattr(segments, "_segments", type(segments._segments)())


def warned(call):
    """(what a call returns, the warnings of pageable memory)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


@pytest.fixture
def made_up_gpu(refused, monkeypatch):
    """What is pinned where there is a GPU is asked for here too."""
    monkeypatch.setattr(ops, "cuda_is_available", lambda: True)


@pytest.mark.parametrize("options", [{}, {"layout": "packed"}, {"scheme": "raw"}], ids=str)
def test_a_table_is_pageable(made_up_gpu, options):
    x = embedding(3000, 32)
    table, said = warned(lambda: ibp.compress(x, device="cpu", **options))
    assert len(said) == 1 and "cannot be pinned" in said[0] and "pageable" in said[0]
    assert not table.is_pinned()
    assert_same_bits(table.decompress(), x)
    assert_same_bits(table.index_select([5, 2999]), x[[5, 2999]])
    assert warned(lambda: ibp.compress(x, device="cpu"))[1] == []  # it has been said
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        ibp.compress(x, device="cpu", memory="pinned")
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        table.pin_memory()
    assert_same_bits(table.decompress(), x)


def test_a_table_in_its_tensors_memory_is_pageable(made_up_gpu):
    x = embedding(2000, 32)
    before = x.clone()
    table, said = warned(lambda: ibp.compress(x, device="cpu", inplace=True))
    assert len(said) == 1 and not table.is_pinned()
    assert_same_bits(table.decompress(), before)
    x = before.clone()
    with pytest.raises(RuntimeError, match="cannot be pinned") as raised:
        ibp.compress(x, device="cpu", memory="pinned", inplace=True)
    assert_same_bits(raised.value.table.decompress(), before)


def test_a_part_that_is_refused_leaves_none_pinned(made_up_gpu, monkeypatch):
    """Slots that could be pinned beside an overflow that could not."""
    x, sizes = spiky_rows(3000, 32), []

    class Given(bytearray):
        is_used = False

        def __init__(self, num_bytes, node=-1):
            sizes.append(num_bytes)
            if len(sizes) > 1:
                refuse()
            super().__init__(num_bytes)

    monkeypatch.setattr(_core, "PinnedBuffer", Given)
    table, said = warned(lambda: ibp.compress(x, scheme="planes", slot_bytes=32, device="cpu"))
    assert len(sizes) == 2 and sizes[1] == table.overflow.numel() and len(said) == 1
    assert not table.is_pinned() and table._is_refused
    assert_same_bits(table.decompress(), x)


def test_tables_of_files_are_pageable(made_up_gpu, tmp_path):
    x, path = embedding(3000, 32), tmp_path / "x.safetensors"
    ibp.save(path, {"x": ibp.compress(x, device="cpu", memory="host")})
    table, said = warned(lambda: ibp.load(path)["x"])
    assert len(said) == 1 and not table.is_pinned()
    assert_same_bits(table.decompress(), x)
    for read in (ibp.load, ibp.open):
        with pytest.raises(RuntimeError, match="cannot be pinned"):
            read(path, memory="pinned")["x"]
    assert_same_bits(ibp.open(path)["x"].decompress(), x)


def test_copies_of_a_sender_are_pageable(made_up_gpu):
    weights, held = {"x": embedding(3000, 32)}, {"x": torch.zeros(3000, 32)}
    messages, said = warned(lambda: list(ibp.deltas.Sender(weights, memory="pinned").push(weights, full=True)))
    assert len(said) == 1
    receiver = ibp.deltas.Receiver(held)
    assert [receiver.apply(message) for message in messages][-1]
    assert_same_bits(held["x"], weights["x"])


# ---- with a GPU ----


def test_rows_come_to_a_gpu(cuda, refused):
    x = embedding(40_000, 128, torch.bfloat16)
    table, said = warned(lambda: ibp.compress(x))
    assert len(said) == 1 and not table.is_pinned() and table.device.type == "cpu"
    few, many = torch.randint(len(x), (100,)), torch.randint(len(x), (30_000,))
    for ids in (few, many):
        assert_same_bits(table.index_select(ids, device=cuda).cpu(), x[ids])
        assert_same_bits(table.index_select(ids.to(cuda)).cpu(), x[ids])
    with pytest.raises(ValueError, match="refuses to pin"):
        table.index_select(many, device=cuda, path="cpu")
    assert_same_bits(table.decompress(device=cuda).cpu(), x)
    assert_same_bits(ibp.decompress([table, table], device=cuda)[1].cpu(), x)
    bags = ibp.embedding_bag(table, few.view(10, 10).to(cuda), mode="sum")
    assert_same_bits(bags, torch.nn.functional.embedding_bag(few.view(10, 10).to(cuda), x.to(cuda), mode="sum"))
    table.update_(few[:1], x[:1]).append(x[:3])
    assert_same_bits(table.index_select(torch.cat((few[:1], torch.tensor([len(x)])))), x[[0, 0]])
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        table.pin_memory()


@pytest.mark.parametrize("options", [{}, {"policy": "lru"}, {"writable": True}], ids=str)
def test_a_cache_of_a_pageable_table(cuda, refused, options):
    x = embedding(4000, 64)
    table, _ = warned(lambda: ibp.compress(x))
    cache = ibp.RowCache(table, 1 << 20, torch.arange(4000), devices=cuda, **options)
    ids = torch.randint(4000, (500,))
    assert cache.num_cached_rows == 0
    assert_same_bits(cache.index_select(ids.to(cuda)).cpu(), x[ids])
    cache.update_(ids[:1], x[:1])
    assert_same_bits(cache.index_select(ids[:1].to(cuda)).cpu(), x[:1])
    cache.refill(torch.rand(4000))
    bags = ibp.embedding_bag(cache, ids.view(50, 10)[1:].to(cuda), mode="sum")
    assert bags.shape == (49, 64)
    unpinned = ibp.compress(x, memory="host")
    with pytest.raises(ValueError, match="pin_memory"):
        ibp.RowCache(unpinned, 1 << 20, devices=cuda)


def test_shared_memory_that_is_not_pinned(cuda, refused, monkeypatch):
    x = embedding(4000, 64)
    table, _ = warned(lambda: ibp.compress(x))
    opened = ibp.distributed.open_shared(table.share_memory_().share(), memory="pinned")

    def refuse_pages(segment):
        raise memory.PinningError("made up by the test")

    monkeypatch.setattr(segments.Segment, "pin_here", refuse_pages)
    ids = torch.randint(4000, (500,))
    assert_same_bits(opened.index_select(ids.to(cuda)).cpu(), x[ids])
    assert_same_bits(opened.decompress(device=cuda).cpu(), x)
    assert not opened.is_pinned()


def test_offloaded_weights_that_are_not_pinned(cuda, refused):
    model = Net()
    wanted = [model(ids).detach() for ids in IDS]
    _, said = warned(lambda: ibp.offload(model, cuda, min_bytes=1))
    assert len(said) == 1
    for _ in range(2):
        for ids, result in zip(IDS, wanted):
            torch.testing.assert_close(model(ids.to(cuda)).cpu(), result, rtol=1e-2, atol=1e-3)


def test_calls_on_the_cpu_do_not_ask(refused):
    """Nothing here pins anything."""
    case = CASES["compress"]()
    subject = case.make()
    result, said = warned(lambda: case.call(subject))
    case.check(subject, result)
    assert not said
