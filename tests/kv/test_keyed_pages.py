"""ibp.kv.KeyedPages: it keeps pages by keys, and pages used longest ago make room."""

import functools
import itertools
import random
import re

import pytest
import torch

from helpers import assert_same_bits, in_threads
from ibp.kv import KeyedPages, KVStore, Transfer
from interrupts import interrupt_at

PAGE_BYTES = 4096


def pages_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, PAGE_BYTES // 2, generator=generator).mul(0.02).bfloat16()


def noise(count):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-(2**15), 2**15, (count, PAGE_BYTES // 2), dtype=torch.int16, generator=generator)


def kept_of(count=20, **options):
    return KeyedPages(count * PAGE_BYTES, **{"device": "cpu"} | options)


def filled(kept, pages):
    """Puts pages by number until one makes room for another. Returns how many there is room for."""
    for number, page in enumerate(pages):
        assert kept.put(number, page)
        if len(kept) <= number:
            return number
    raise AssertionError("all found room")


def test_what_is_no_page():
    kept = kept_of()
    with pytest.raises(TypeError, match="page is a NoneType; wanted a torch.Tensor"):
        kept.put("key", None)
    assert len(kept) == 0


def test_pages_that_were_used_longest_ago_make_room():
    dropped, pages = [], pages_of(60)
    kept = kept_of(on_drop=dropped.append)
    room, out = filled(kept, pages), torch.empty_like(pages[0])
    assert room >= 28 and dropped == [0] and 0 not in kept  # 20 raw ones would fit
    assert kept.get(1, out) and kept.put(2, pages[5])  # both are used again; a key's page does not change
    assert kept.put("new", pages[50]) and dropped == [0, 3]
    assert kept.get(2, out)
    assert_same_bits(out, pages[2])
    assert kept.stats().stored_pages == len(kept) == room
    assert kept.leading([1, 2, 3, 4]) == 2 and kept.restorable([1, 2, 3, 4, 5], 2) == {1, 2, 5}


def test_touched_pages_make_room_later():
    dropped, pages = [], pages_of(60)
    kept = kept_of(4, on_drop=dropped.append)
    filled(kept, pages)
    kept.touch([2, "none", 1])
    assert kept.put("a", pages[50]) and kept.put("b", pages[51]) and dropped[:3] == [0, 3, 4]


def test_pinned_pages_make_no_room():
    dropped, pages = [], pages_of(60)
    kept = kept_of(4, on_drop=dropped.append)
    room = filled(kept, pages)
    held = [number for number in range(60) if number in kept]
    assert all(kept.pin(number) for number in [*held, held[0]]) and not kept.pin("none")
    assert not kept.put("more", pages[50]) and len(kept) == room and dropped == [0]
    kept.unpin(held[0])
    assert not kept.put("more", pages[50])  # it had been pinned twice
    kept.unpin(held[0])
    assert kept.put("more", pages[50]) and dropped == [0, held[0]]
    kept.unpin("none")
    assert kept.delete(held[1]) and not kept.delete(held[1]) and dropped == [0, held[0]]  # only what makes room is told
    assert kept.put("again", pages[51]) and "more" in kept
    assert kept.put(held[1], pages[52]) and "more" not in kept  # the only two without a pin are "more" and "again"
    kept.clear()
    assert len(kept) == 0 and kept.put(0, pages[0])


def test_sizes_and_pages_without_bytes():
    kept = kept_of()
    assert not any(kept.stats().as_dict().values())
    assert kept.put("a", pages_of(1)[0]) and not kept.put("short", pages_of(1)[0, :100])
    assert not kept.get("a", torch.empty(3))
    empty = KeyedPages(4 * 256, device="cpu")
    nothing = torch.empty(0, dtype=torch.uint8)
    assert all(empty.put(key, nothing) for key in "abcde") and len(empty) == 4 and "a" not in empty
    assert empty.get("b", nothing) and empty.store is None
    assert all(empty.pin(key) for key in "bcde") and not empty.put("f", nothing)


def test_the_first_page_and_pages_of_other_sizes_are_logged(caplog):
    caplog.set_level("INFO", "ibp")
    kept, (first, second) = kept_of(), pages_of(2)
    assert kept.put("a", first) and kept.put("b", second)
    ((name, _, told),) = caplog.record_tuples
    assert name.startswith("ibp.kv.") and re.fullmatch(
        r"ibp: the first page has 4,096 bytes, .* codebook \d\d pages fit the pool, 1\.[3-5]\d times as many .*", told
    )
    assert not kept.put("c", first[:100]) and not kept.get("a", second[:7])  # only the first one is logged
    (refused,) = caplog.messages[1:]
    assert refused.startswith("ibp: a page of 200 bytes is refused") and "wanted 4,096 bytes" in refused
    assert not kept.get("d", second[:7]) and kept.get("a", second)


def test_pages_that_find_no_room_in_overflow():
    kept = kept_of(40)
    assert kept.put("first", pages_of(1)[0])
    wild = noise(30)
    held = [number for number in range(30) if kept.put(number, wild[number])]
    assert 0 < len(held) < 30
    out = torch.empty_like(wild[0])
    for number in held:
        assert kept.get(number, out)
        assert_same_bits(out, wild[number])


def test_a_damaged_page_is_dropped():
    dropped = []
    kept, out = kept_of(on_drop=dropped.append), pages_of(1)[0]
    assert kept.put("a", out) and kept.put("b", out)
    kept.store.free([0, 1])  # what a page that cannot be decoded looks like
    assert not kept.get("a", out) and dropped == ["a"] and "b" in kept


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_threads(device, request):
    if device == "cuda":
        device = request.getfixturevalue("cuda")
    kept, pages, wrong = kept_of(60, device=device), pages_of(40), []

    def work(seed):
        rng, out = random.Random(seed), torch.empty_like(pages[0])
        for _ in range(40):
            k = rng.randrange(40)
            if not (kept.put(k, pages[k]) and kept.get(k, out) and torch.equal(out, pages[k])):
                wrong.append(k)

    in_threads(*(functools.partial(work, seed) for seed in range(4)))
    assert not wrong


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "place", [(KVStore, "store"), (Transfer, "lost"), (KeyedPages, "_drop"), (KeyedPages, "_forget")]
)
def test_a_call_that_raises_loses_no_room(place, error, monkeypatch):
    pages, out = pages_of(60), torch.empty_like(pages_of(1)[0])
    kept = kept_of(4)
    room = filled(kept, pages)

    def fails(*_):
        raise error("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(*place, fails)
        for number in range(room + 3):
            with pytest.raises(error):
                kept.put(("lost", number), pages[0])
    for number in range(room):
        assert kept.put(("later", number), pages[number])
    assert len(kept) == room
    for number in range(room):
        assert kept.get(("later", number), out)
        assert_same_bits(out, pages[number])


def test_an_interrupt_between_two_steps_loses_no_room(monkeypatch):
    """A number is back when a page was forgotten, or stored, and not yet noted."""
    pages, kept = pages_of(60), kept_of(4)
    room, works = filled(kept, pages), KeyedPages._number_for

    def is_interrupted(self, page):
        works(self, page)
        raise KeyboardInterrupt

    monkeypatch.setattr(KeyedPages, "_number_for", is_interrupted)
    for number in range(room + 3):
        with pytest.raises(KeyboardInterrupt):
            kept.put(("lost", number), pages[0])
    monkeypatch.undo()
    assert len(kept) == room - 1, "one has made room for all that were interrupted"
    assert all(kept.put(("later", number), pages[number]) for number in range(room)) and len(kept) == room


@pytest.mark.parametrize("call", ["get", "delete"])
def test_an_interrupt_at_any_moment_loses_no_room(call):
    pages, out = pages_of(60), torch.empty_like(pages_of(1)[0])
    kept = kept_of(4)
    room = filled(kept, pages)
    for moment in itertools.count():
        kept.put("key", pages[0])
        _, raised = interrupt_at(moment, None, lambda: kept.get("key", out) if call == "get" else kept.delete("key"))
        if not raised:
            break
    assert moment > 3
    assert all(kept.put(("later", number), pages[number]) for number in range(room)) and len(kept) == room


@pytest.mark.parametrize(
    ("page", "error"),
    [
        (torch.zeros(70001, dtype=torch.uint8), ValueError),
        (torch.empty(PAGE_BYTES, dtype=torch.uint8, device="meta"), TypeError),
        (torch.randint(256, (1 << 20,), dtype=torch.uint8), None),
    ],
    ids=["no whole rows", "no memory", "larger than the pool"],
)
def test_a_first_page_that_is_refused(page, error):
    """It sets neither the size nor the codebook."""
    pages, kept = pages_of(5), kept_of()
    if error is None:
        assert not kept.put("first", page)
    else:
        with pytest.raises(error):
            kept.put("first", page)
    assert kept.store is None and len(kept) == 0
    assert all(kept.put(number, each) for number, each in enumerate(pages)) and len(kept) == 5


def test_a_store_from_on_drop():
    """It is refused, and the object goes on working."""
    pages, kept = pages_of(40), None

    def again(key):
        kept.put(("again", key), pages[0])

    kept = kept_of(4, on_drop=again)
    with pytest.raises(RuntimeError, match="on_drop must not store"):
        for number, page in enumerate(pages):
            kept.put(number, page)
    kept._on_drop = None
    assert kept.put("later", pages[1]) and kept.get("later", out := torch.empty_like(pages[1]))
    assert_same_bits(out, pages[1])


def test_tensors_that_get_refuses():
    pages, kept = pages_of(2), kept_of()
    assert kept.put("a", pages[0])
    with pytest.raises(ValueError, match="out is not contiguous"):
        kept.get("a", torch.empty(2 * pages[0].numel(), dtype=pages[0].dtype)[::2])
    with pytest.raises(TypeError, match=r"out is a list; wanted a torch.Tensor"):
        kept.get("a", [0])
