"""Blocks between host memory and a GPU: which buffer is used when.

Streams and events do nothing here. On a GPU: test_encode_cuda.py.
"""

import contextlib
import itertools

import pytest
import torch

import ibp
from helpers import assert_same_bits, one_hot_rows
from ibp._machine import staging as _staging
from interrupts import assert_kept, interrupt_at

CPU = torch.device("cpu")


class FakeStream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass


class FakeEvent:
    def record(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def fake_gpu(monkeypatch):
    """The CPU in the place of a GPU whose copies are done at once."""
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(_staging, "empty_pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("pageable", [True, False])
@pytest.mark.parametrize("num_parts", [0, 1, 2, 3, 7])
def test_parts_come_in_order(fake_gpu, num_parts, pageable):
    data = torch.arange(100 * num_parts - 30 * (num_parts > 0)).to(torch.uint8)
    parts = list(data.split(100)) if num_parts else []
    places, got = set(), []
    for near in _staging.copied_ahead(parts, CPU, pageable):
        places.add(near.untyped_storage().data_ptr())
        got.append(near.clone())
    assert [part.tolist() for part in got] == [part.tolist() for part in parts] and len(places) == min(2, num_parts)


def test_a_part_stays_until_the_next_is_asked_for(fake_gpu):
    parts = list(torch.arange(5 * 64).to(torch.uint8).split(64))
    for part, near in zip(parts, _staging.copied_ahead(parts, CPU, True)):
        assert_same_bits(near, part)


@pytest.mark.parametrize("pageable", [True, False])
def test_what_is_put_arrives(fake_gpu, pageable):
    targets = [
        (torch.zeros(size, dtype=torch.uint8), torch.zeros(3 * size, dtype=torch.uint8))
        for size in (0, 300, 5, 1000, 7, 8)
    ]
    with _staging.Outlet(CPU, pageable) as staging:
        for number, pair in enumerate(targets):
            sources = staging.take([target.numel() for target in pair])
            for source in sources:
                source.fill_(number + 1)
            staging.put(pair, sources)
    for number, pair in enumerate(targets):
        assert all((target == number + 1).all() for target in pair)


def test_pageable_memory_is_written_once_its_copy_is_done(fake_gpu):
    target = torch.zeros(50, dtype=torch.uint8)
    with _staging.Outlet(CPU, True) as staging:
        (source,) = staging.take([50])
        staging.put([target], [source.fill_(9)])
        assert not target.any()
        staging.take([50])
        assert not target.any()
        staging.take([50])
        assert (target == 9).all()


def test_what_was_not_put_is_not_written(fake_gpu):
    """An interrupt between the copies and the note of where they go."""
    target = torch.zeros(50, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="no such event"), _staging.Outlet(CPU, True) as staging:
        (source,) = staging.take([50])
        staging._ring.last.free.record = lambda stream: (_ for _ in ()).throw(RuntimeError("no such event"))
        staging.put([target], [source.fill_(9)])
    assert not target.any()


@pytest.mark.parametrize(
    "worker, home, pageable, is_direct",
    [
        ("cuda:0", "cpu", True, False),
        ("cuda:0", "cuda:0", False, True),
        ("cuda:1", "cuda:0", False, True),
        ("cpu", "cpu", True, True),
        ("cpu", "cuda:0", False, True),
    ],
)
def test_outlet(monkeypatch, worker, home, pageable, is_direct):
    monkeypatch.setattr(_staging, "_ring", lambda device, pageable: "a ring")
    assert (_staging.outlet(torch.device(worker), torch.device(home), pageable)._ring is None) == is_direct


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_compress_in_place_through_staging_interrupted_twice(fake_gpu, monkeypatch):
    """As a GPU compresses a tensor in host memory: blocks arrive late, while the next ones are coded."""
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 240 * 32)
    monkeypatch.setattr(_staging, "outlet", lambda worker, home, pageable: _staging.Outlet(worker, pageable))
    before = one_hot_rows(150, 60)
    codebook, seen = ibp.codecs.analyze(before, scheme="planes"), set()

    def interrupted(line, point):
        x = before.clone()
        table, raised = interrupt_at(
            line, point, lambda: ibp.compress(x, codebook=codebook, device="cpu", memory="host", inplace=True)
        )
        seen.add(assert_kept(table, x, before))
        return raised

    for line in itertools.count(3, 11):
        points = (interrupted(line, point) for point in range(0, 1 << 20, 3))
        if not list(itertools.takewhile(lambda raised: raised == 2, points)) and not interrupted(line, None):
            break
    assert {None, 0, 64, 150} <= seen
