"""Parts of pinned memory: `_machine.pool`."""

import pytest
import torch

from ibp._machine import memory
from ibp._machine.memory import Pool


class Waits:
    """A stream that notes what it waits for; or an event."""

    def __init__(self):
        self.seen = []

    def wait_event(self, event):
        self.seen.append(event)

    def synchronize(self):
        self.seen.append("host")


@pytest.fixture
def taken(monkeypatch):
    """Sizes that were pinned."""
    sizes = []

    def empty(num_bytes, device, pin):
        assert device.type == "cpu" and pin
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(memory, "empty", empty)
    return sizes


def test_a_part_is_kept_for_its_own_size(taken):
    pool, writer, used = Pool(), Waits(), Waits()
    first, second = pool.take(5000, writer), pool.take(5001, writer)
    assert taken == [8192, 8192] and pool.held_bytes == 16384 and not writer.seen
    assert first.data_ptr() != second.data_ptr() and first.numel() == 8192
    pool.give(first, used)
    assert pool.take(9000, writer).numel() == 12288 and len(taken) == 3, "no smaller part, and no larger one, serves"
    assert pool.take(8192, writer).data_ptr() == first.data_ptr() and writer.seen == [used]
    large = 10_000_000
    assert large <= pool.take(large, writer).numel() <= large * 17 // 16


def test_a_part_whose_last_use_cannot_be_waited_for_stays_free(taken, monkeypatch):
    pool, writer, used = Pool(), Waits(), Waits()
    pool.give(pool.take(5000, writer), used)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "wait_event", lambda event: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.take(5000, writer)
    assert pool.take(5000, writer).numel() == 8192 and len(taken) == 1 and writer.seen == [used]


def test_parts_are_let_go_of_once_nothing_uses_them(taken):
    pool, writer, used = Pool(), Waits(), Waits()
    parts = [pool.take(4096, writer) for _ in range(3)]
    pool.give(parts[0], used)
    pool.give(parts[1])
    pool.release()
    assert used.seen == ["host"] and pool.held_bytes == 4096
    pool.take(4096, writer)
    assert len(taken) == 4 and not writer.seen


def test_a_coded_request_takes_a_larger_part(taken):
    pool, writer = Pool(), Waits()
    pool.give(pool.take(100_000, writer, 200_000), raw_bytes=200_000)
    part = pool.take(95_000, writer, 200_000)
    assert part.numel() >= 100_000 and len(taken) == 1, "at most an eighth larger"
    pool.give(part, raw_bytes=200_000)
    assert pool.take(70_000, writer, 200_000).numel() < 80_000, "both together are smaller than a raw one"
    assert len(taken) == 2 and pool.held_bytes <= pool.raw_held_bytes


def test_no_more_is_held_than_for_raw_requests(taken):
    """Sizes that differ from round to round, mixed with raw ones."""
    generator, raw = torch.Generator().manual_seed(5), [*range(70_000, 400_000, 30_000)]
    pool, plain, writer, used = Pool(), Pool(), Waits(), Waits()
    for _ in range(30):
        shares = torch.rand(len(raw), generator=generator).tolist()
        asked = [(int(size * share), size) if share < 0.8 else (size, None) for size, share in zip(raw, shares)]
        parts = []
        for size, raw_bytes in asked:
            parts.append(pool.take(size, writer, raw_bytes))
            assert parts[-1].numel() >= size and pool.held_bytes <= pool.raw_held_bytes
        others = [plain.take(size, writer) for size in raw]
        assert pool.raw_held_bytes == plain.held_bytes == plain.raw_held_bytes
        for part, other, (_, raw_bytes) in zip(parts, others, asked):
            pool.give(part, used, raw_bytes)
            plain.give(other, used)
    assert pool.held_bytes == sum(size * len(free) for size, free in pool._free.items())
    assert used.seen and set(used.seen) == {"host"}, "what is released is not used any more"
    pool.release()
    assert pool.held_bytes == pool.raw_held_bytes == 0


def test_the_same_requests_pin_nothing_twice(taken):
    pool, writer, asked = Pool(), Waits(), [(share * 10_000, 150_000) for share in (5, 9, 7, 12, 8)]
    for round in range(4):
        parts = [pool.take(size - 1000 * (round == 0), writer, raw) for size, raw in asked]
        for part, (_, raw) in zip(parts, asked):
            pool.give(part, raw_bytes=raw)
        if round == 2:
            count = len(taken)
    assert len(taken) == count


def test_nothing_is_held_where_nothing_is_pinned(monkeypatch):
    def refuse(*_):
        raise memory.PinningError("no memory is pinned")

    monkeypatch.setattr(memory, "empty", refuse)
    pool = Pool()
    with pytest.raises(memory.PinningError):
        pool.take(100, Waits())
    assert pool.held_bytes == 0
