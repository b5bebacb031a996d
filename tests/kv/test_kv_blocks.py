"""Coded tokens of a KV-cache without a framework: any sequence of changes gives what it gives raw tensors."""

import pytest
import torch

from ibp._machine import memory as _memory
from ibp.kv._states import Form, TokenArena
from kv_blocks import BLOCK, Raw, any_changes, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("scheme", ["planes", "ibp", "raw"])
@pytest.mark.parametrize("seed", range(3))
def test_any_changes(scheme, seed):
    any_changes(Raw(scheme=scheme), seed, 25)


@pytest.mark.parametrize("memory", ["pinned", "device"])
@pytest.mark.parametrize("scheme", ["planes", "ibp", "raw"])
def test_any_changes_on_a_gpu(cuda, scheme, memory):
    any_changes(Raw(cuda, scheme=scheme, memory=memory), 0, 60)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype):
    raw = Raw(dtype=dtype)
    raw.add(3, scale=1.0)
    raw.add(1, scale=1.0)
    raw.check()


def test_rows_of_several_tokens():
    x = torch.empty(1, 2, 5, 64, dtype=torch.bfloat16)
    sizes = {block: Form.of(x, block, None).row_bytes // 128 for block in (1, 16, 64, 100, 97)}
    assert sizes == {1: 1, 16: 16, 64: 64, 100: 50, 97: 1}
    assert Form.of(torch.empty(1, 1, 1, 8192), 8, None).row_bytes == 32768
    with pytest.raises(ValueError, match="one token of a head has 131072 bytes"):
        Form.of(torch.empty(1, 1, 1, 32768), 8, None)


def test_an_arena_grows_and_takes_back():
    arena = TokenArena(CPU, pinned=False)
    for size in (100, 1, 5000, 40):
        offset, (memory,) = arena.reserve(size, 32, 0)
        memory.fill_(size % 256)
        assert offset % 32 == 0 and memory.numel() == size
    ((_, memory),) = arena.parts()
    assert memory[:100].eq(100).all() and memory[128] == 1 and arena.used == 5224
    arena.rewind(100)
    assert arena.reserve(8, 32, 0)[0] == 128 and arena.parts()[0][1].numel() == 136


def test_an_arena_in_pieces(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(_memory, "empty", lambda size, device, pin: torch.empty(size, dtype=torch.uint8))
    arena, generator = TokenArena(CPU, pinned=True), torch.Generator().manual_seed(0)
    given, held = [], torch.zeros(0, dtype=torch.uint8)
    for step in range(300):
        start, alignment = arena.used, 32 if step % 3 else 48
        offset, memory = arena.reserve(int(torch.randint(1, 9000, (1,), generator=generator)), alignment, 1 << 40)
        assert offset % alignment == 0 and 0 <= offset - start < alignment
        for part in memory:
            part.fill_(step % 256)
        given.append((start, offset, sum(part.numel() for part in memory), step % 256))
        if step % 7 == 6:
            arena.rewind(given[-3][0])
            del given[-3:]
        held = torch.zeros(arena.used, dtype=torch.uint8)
        for first, part in arena.parts():
            held[first : first + part.numel()] = part
    for _, offset, size, value in given:
        assert held[offset : offset + size].eq(value).all()
    assert len(arena.parts()) < 25 and arena.nbytes < 1.4 * arena.used + (1 << 20)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("saved, most", [(0.329, 1), (0.144, 1), (0.02, 1.11), (0, 1.13)])
def test_an_arena_grows_rarely_and_takes_less_than_plain_tokens(monkeypatch, pinned, saved, most):
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(_memory, "empty", lambda size, device, pin: torch.empty(size, dtype=torch.uint8))
    arena, plain, growths, coded = TokenArena(CPU, pinned), 1 << 15, 0, int((1 << 15) * (1 - saved)) // 32 * 32
    for count in range(1, 1001):
        held = arena.nbytes
        arena.reserve(coded, 32, count * plain)
        growths += arena.nbytes > held
        assert arena.nbytes <= most * count * plain
    assert growths < 60 and (saved < 0.3 or growths < 25)  # each growth copies, or adds a part to later copies
    assert len(arena.parts()) == (growths if pinned else 1)


def test_what_cannot_be_stored_leaves_all_as_it_was(monkeypatch):
    raw = Raw()
    raw.add(2)
    pending, used = raw.history.encode(*tokens(2 * BLOCK, 3)), raw.history.arena.used
    calls = []

    def fail_at_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return TokenArena.reserve(raw.history.arena, *args)

    with monkeypatch.context() as patch:
        patch.setattr(raw.history.arena, "reserve", fail_at_second)
        with pytest.raises(RuntimeError, match="out of memory"):
            raw.history.store(pending)
    assert raw.history.arena.used == used and raw.history.num_blocks == 2
    raw.check()
    raw.add(1)
    raw.check()


def test_a_clone_is_apart():
    raw = Raw()
    raw.add(3)
    raw.take(torch.tensor([2, 0]))
    copied, right = raw.history.clone(), [x.clone() for x in raw.right]
    raw.add(2)
    raw.truncate(1)
    raw.check()
    assert copied.nbytes == copied.stored_bytes <= raw.history.nbytes
    raw.history, raw.right = copied, right
    raw.check()
    raw.add(1)
    raw.check()
