"""ibp.kv.TokenCoder and TokenHistory: what a cache that grows token by token keeps of its older tokens."""

import itertools
import pickle
import sys

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp.kv import TokenCoder, TokenHistory
from interrupts import interrupt_at

CPU = torch.device("cpu")


def states(count, batch=2, device=CPU):
    """Keys and values, [B, heads, tokens, head_dim]."""
    return [torch.randn(batch, 2, count, dim).mul(0.02).bfloat16().to(device) for dim in (16, 32)]


def grown(coder, device=CPU):
    """A layer of 48 tokens in two steps, and its raw keys and values."""
    raw = states(48, device=device)
    history = coder.history(*raw)
    for first, last in ((0, 32), (32, 48)):
        pending = history.encode(*(tensor[:, :, first:last] for tensor in raw))
        assert pending.num_blocks == (last - first) // 16
        history.store(pending)
    return history, raw


def check(history, raw, extra=0):
    num_tokens = raw[0].shape[2]
    for got, wanted in zip(history.fetch(num_tokens + extra).wait(), raw):
        assert got.shape[2] == num_tokens + extra
        assert_same_bits(got[:, :, :num_tokens], wanted)


@pytest.mark.parametrize("scheme", ["planes", "ibp", "raw"])
def test_tokens_come_back(scheme):
    coder = TokenCoder(block=16, window=0, scheme=scheme)
    history, raw = grown(coder)
    assert type(history) is TokenHistory and (history.num_tokens, history.num_blocks, history.batch_size) == (48, 3, 2)
    check(history, raw)
    check(history, raw, extra=5)
    assert history.original_bytes == sum(tensor.nbytes for tensor in raw) and history.nbytes >= history.stored_bytes
    for got, wanted in zip(history.fetch(16, range(1, 2)).wait(), raw):
        assert_same_bits(got, wanted[:, :, 16:32])
    assert coder.devices == [CPU] and coder.fetched_bytes == coder.sent_bytes == coder.device_bytes == 0


def test_sequences_and_blocks():
    history, raw = grown(TokenCoder(block=16, window=0))
    order = torch.tensor([1, 0, 1])
    history.take(order)
    raw = [tensor[order] for tensor in raw]
    check(history, raw)
    assert not history.is_sparse
    history.truncate(1)
    check(history, [tensor[:, :, :16] for tensor in raw])
    history.take(torch.tensor([2]))
    check(history, [tensor[2:, :, :16] for tensor in raw])
    assert history.is_sparse


def test_pending_blocks_follow_the_sequences():
    coder, raw = TokenCoder(block=16, window=0), states(16)
    history = coder.history(*raw)
    pending, order = history.encode(*raw), torch.tensor([1, 1])
    pending.take(order)
    history.store(pending)
    check(history, [tensor[order] for tensor in raw])


def test_a_copy_belongs_to_another_coder():
    coder = TokenCoder(block=16, window=8, memory="device")
    history, raw = grown(coder)
    other = coder.copy()
    assert (other.block, other.memory, other.devices) == (16, "device", []) and other.num_due(24) == 1
    copied = other.clone_of(history)
    history.truncate(0)
    check(copied, raw)
    assert other.devices == [CPU] and copied.num_codebooks == 2


def test_a_store_does_not_look_at_all_stores_before_it():
    """The number of lines of Python that a store runs does not grow."""
    history, counts = TokenCoder(block=16, window=0, scheme="raw").history(*states(16)), []

    def tracer(frame, event, _):
        if not frame.f_code.co_filename.endswith("_tokens.py"):
            return None
        counts[-1] += event == "line"
        return tracer

    for _ in range(40):
        pending = history.encode(*states(16))
        counts.append(0)
        sys.settrace(tracer)
        try:
            history.store(pending)
            assert history.original_bytes and not history.is_sparse
        finally:
            sys.settrace(None)
    assert counts[-1] == counts[1] > 10


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["planes", "raw"])
@pytest.mark.parametrize("call", ["store", "truncate", "take"])
def test_interrupted_calls_change_all_or_nothing(call, scheme):
    """Wherever a call is interrupted, the tokens are those before it or those after it, and later calls work."""
    order, moment = torch.tensor([1, 0, 1]), 0
    while True:
        history, raw = grown(TokenCoder(block=16, window=0, scheme=scheme))
        history.take(torch.tensor([1, 0]))
        raw = [tensor[[1, 0]] for tensor in raw]
        new = states(32)
        pending = history.encode(*new)
        wanted = {"store": [torch.cat(pair, 2) for pair in zip(raw, new)], "truncate": [x[:, :, :16] for x in raw]}
        wanted["take"] = [tensor[order] for tensor in raw]
        calls = {"store": (history.store, pending), "truncate": (history.truncate, 1), "take": (history.take, order)}
        _, interrupts = interrupt_at(moment, None, lambda: calls[call][0](calls[call][1]))
        changed = (history.num_blocks, history.batch_size) != (3, 2)
        check(history, wanted[call] if changed else raw)
        if not interrupts:
            break
        check(history.clone(), wanted[call] if changed else raw)
        if not changed:
            calls[call][0](calls[call][1])
        check(history, wanted[call])
        later = states(16, batch=history.batch_size)
        history.store(history.encode(*later))
        check(history, [torch.cat(pair, 2) for pair in zip(wanted[call], later)])
        moment += 1
    assert changed and moment > 5


@pytest.mark.parametrize("scheme", ["planes", "raw"])
def test_memory_that_runs_out(scheme, monkeypatch):
    """Between the keys and the values of blocks: no block is added, and the same blocks can be stored again."""
    history, raw = grown(TokenCoder(block=16, window=0, scheme=scheme))
    new, reserve, numbers = states(16), history.arena.reserve, itertools.count()

    def second_fails(*arguments):
        if next(numbers) == 1:
            raise MemoryError
        return reserve(*arguments)

    monkeypatch.setattr(history.arena, "reserve", second_fails)
    pending = history.encode(*new)
    with pytest.raises(MemoryError):
        history.store(pending)
    check(history, raw)
    history.store(pending)
    check(history, [torch.cat(pair, 2) for pair in zip(raw, new)])


def test_tokens_that_take_no_bytes():
    """All their rows are equal, so that coded rows are empty. A copy decodes them, too."""
    coder, raw = TokenCoder(block=16, window=0), [torch.zeros(2, 2, 32, dim).bfloat16() for dim in (16, 32)]
    history = coder.history(*raw)
    history.store(history.encode(*raw))
    assert history.stored_bytes == 0
    copied = history.clone()
    for one in (history, copied):
        check(one, raw)
        one.truncate(0)
        one.store(one.encode(*raw))
        check(one, raw)


def test_blocks_that_are_due():
    coder = TokenCoder(block=4, window=10)
    assert [coder.num_due(count) for count in (0, 9, 10, 13, 14, 21, 22)] == [0, 0, 0, 0, 1, 2, 3]


def test_given_codebooks():
    raw = states(16)
    books = tuple(ibp.codecs.analyze(tensor.view(-1, tensor.shape[-1]), scheme="planes") for tensor in raw)
    coder = TokenCoder(block=16, window=0, codebooks=books)
    history = coder.history(*raw)
    history.store(history.encode(*raw))
    check(history, raw)
    assert history.num_codebooks == 0
    with pytest.raises(ValueError, match="wanted a divisor of"):
        coder.history(*(tensor[..., :5] for tensor in raw))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"memory": "disk"}, ValueError, "memory is 'disk'"),
        ({"scheme": "zip"}, ValueError, "scheme is 'zip'"),
        ({"level": "best"}, ValueError, "level is 'best'"),
        ({"block": 0}, ValueError, "block is 0"),
        ({"window": 0.5}, TypeError, "window is 0.5"),
        ({"max_sms": 0}, ValueError, "max_sms"),
        ({"codebooks": (None,)}, ValueError, "codebooks are a pair"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        TokenCoder(**options)


def test_objects_of_this_process():
    coder = TokenCoder()
    with pytest.raises(ValueError, match="meta"):
        coder.history(*(tensor.to("meta") for tensor in states(3)))
    history = coder.history(*states(3))
    for thing, what in ((coder, "make another"), (history, "fetch")):
        with pytest.raises(TypeError, match=what):
            pickle.dumps(thing)


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_on_a_gpu(cuda, memory):
    coder = TokenCoder(block=16, window=0, memory=memory)
    layers = [grown(coder, cuda) for _ in range(3)]
    for history, raw in layers:
        check(history, raw, extra=3)
    assert (coder.fetched_bytes > 0) == (memory == "pinned") and coder.devices == [cuda]


@pytest.mark.parametrize("memory", ["pinned", "device"])
@pytest.mark.parametrize("change", ["store", "truncate", "take"])
def test_changes_while_tokens_are_decoded_on_a_gpu(cuda, change, memory):
    """Memory that a fetch still reads is not given to other tensors."""
    coder = TokenCoder(block=16, window=0, memory=memory)
    raw = states(4096, batch=8, device=cuda)
    for _ in range(5):
        history = coder.history(*raw)
        history.store(history.encode(*(tensor[:, :, :2048] for tensor in raw)))
        history.take(torch.arange(8, device=cuda))
        pending = history.encode(*(tensor[:, :, 2048:] for tensor in raw))
        fetch = history.fetch(2048)
        if change == "store":
            history.store(pending)
        elif change == "truncate":
            history.truncate(0)
        else:
            history.take(torch.arange(8, device=cuda).flip(0))
        taken = [torch.full((1 << 20,), 255, dtype=torch.uint8, device=cuda) for _ in range(32)]
        for got, wanted in zip(fetch.wait(), raw):
            assert_same_bits(got, wanted[:, :, :2048])
        del taken


@pytest.mark.parametrize("memory", ["pinned", "device"])
def test_interrupted_fetches_on_a_gpu(cuda, memory):
    """The fetch after an interrupted one has the right tokens. (An interrupt of `set_stream` itself, which torch does
    not guard against either, leaves another stream current.)"""
    history, raw = grown(TokenCoder(block=16, window=0, memory=memory), cuda)
    before = torch.cuda.current_stream()
    for moment in itertools.count():
        history.truncate(3)  # so that the bytes are brought again
        _, interrupts = interrupt_at(moment, None, lambda: history.fetch(48))
        torch.cuda.set_stream(before)
        check(history, raw)
        if not interrupts:
            break
    assert moment > 5
