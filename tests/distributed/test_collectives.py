"""Collectives whose tensors travel coded: torch's bits, whatever the tensors are, and errors on all ranks or on none.
Processes exchange over gloo.
"""

import functools
import os
import pickle
import types
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ibp
from helpers import assert_same_bits, slow_but
from ibp._common import process
from ibp.distributed import (
    Codec,
    Link,
    _exchange,
    _links,
    all_gather_into_tensor,
    all_to_all_single,
    broadcast,
    measure_link,
    recv,
    send,
)
from ibp.distributed._calls import NotedWork
from ibp.distributed._messages import (
    ROW_BYTES,
    MessageBuffers,
    Messages,
    MessageViews,
    Status,
    shares_of,
    spans_of,
    status_entries,
)
from ranks import Ranks, raised

LEVELS = ["default", "fast", "auto"]
DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
COUNT = 30_001  # elements: no whole rows
SUBGROUP = [1, 3]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    ranks = Ranks(1, tmp_path_factory.mktemp("one"))
    yield ranks
    ranks.end()


@pytest.fixture(params=[2, 4])
def ranks(request, two, four):
    return two if request.param == 2 else four


def tensor_of(rank, dtype=torch.bfloat16, count=COUNT, scale=0.02):
    generator = torch.Generator().manual_seed(rank)
    if dtype in (torch.int64, torch.uint8, torch.bool):
        return torch.randint(0, 2 if dtype == torch.bool else 100, (count,), generator=generator).to(dtype)
    x = torch.randn(count, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    return (x * scale).to(dtype)


def poisoned(count, dtype):
    return torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)


def gathered(size, dtype, **options):
    return torch.cat([tensor_of(rank, dtype, **options) for rank in range(size)])


# ---- bits ----------------------------------------------------------------------------------------------------------


def gather(rank, dtype, level):
    size, x = dist.get_world_size(), tensor_of(rank, dtype)
    wanted = gathered(size, dtype)
    for is_async in (False, True):
        out = poisoned(size * COUNT, dtype)
        work = all_gather_into_tensor(out, x, async_op=is_async, level=level)
        assert (work is not None) == is_async
        if work is not None:
            assert work.wait() and work.wait() and work.is_completed()
        assert_same_bits(out, wanted)
    whole = poisoned(size * COUNT, dtype).view(size, COUNT)
    whole[rank] = x
    all_gather_into_tensor(whole, whole[rank], level=level)  # in place
    assert_same_bits(whole.view(-1), wanted)


def spread(rank, dtype, level):
    x, wanted = tensor_of(rank, dtype), tensor_of(1, dtype)
    for arguments in ({"src": 1}, {"group_src": 1, "async_op": True}):
        y = x.clone()
        work = broadcast(y, **arguments, level=level)
        if work is not None:
            work.wait()
        assert_same_bits(y, wanted)


def parts_of(rank, size):
    """Items to each rank: none to some."""
    return [((3 * rank + 5 * other) % 4) * 1013 for other in range(size)]


def exchange_all(rank, dtype, level):
    size = dist.get_world_size()
    xs = [tensor_of(other, dtype, count=size * 5000) for other in range(size)]
    out = poisoned(size * 5000, dtype)
    all_to_all_single(out, xs[rank], level=level)
    assert_same_bits(out, torch.cat([x.chunk(size)[rank] for x in xs]))
    xs = [tensor_of(other, dtype, count=3 * sum(parts_of(other, size))).view(-1, 3) for other in range(size)]
    wanted = torch.cat([x.split(parts_of(other, size))[rank] for other, x in enumerate(xs)])
    back = [parts_of(other, size)[rank] for other in range(size)]
    for is_async in (False, True):
        out = poisoned(wanted.numel(), dtype).view(-1, 3)
        work = all_to_all_single(out, xs[rank], back, parts_of(rank, size), async_op=is_async, level=level)
        if work is not None:
            work.wait()
        assert_same_bits(out, wanted)


@pytest.mark.parametrize("work", [gather, spread, exchange_all], ids=lambda work: work.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks(two, work, dtype):
    two(work, dtype, "default")


@pytest.mark.slow
@pytest.mark.parametrize("work", [gather, spread, exchange_all], ids=lambda work: work.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_four_ranks(four, work, level):
    four(work, torch.bfloat16, level)


def gather_by_torchs_name(rank, calls):
    """Raw and coded, with warnings as errors; and by a torch that has the old name alone."""
    size, x = dist.get_world_size(), tensor_of(rank)
    assert ibp.distributed.all_gather_single is all_gather_into_tensor
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        if calls == "old":
            newer = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            patch.delattr(dist, "all_gather_single", raising=False)
            patch.setattr(dist, "all_gather_into_tensor", newer)
        for level in ("auto", "default"):
            out = poisoned(size * COUNT, x.dtype)
            all_gather_into_tensor(out, x, level=level, name=f"torch's {calls} name")
            assert_same_bits(out, gathered(size, x.dtype))


@pytest.mark.parametrize("calls", ["new", "old"])
def test_no_name_of_torch_that_is_about_to_go(two, calls):
    two(gather_by_torchs_name, calls)


def gather_in_pieces(rank):
    """Many pieces, the last one short, and of all kinds of rows."""
    size, count = dist.get_world_size(), 200_001
    x = tensor_of(rank, count=count)
    x[5000:90_000] = 0
    x[100_000:] = torch.nan
    x.view(torch.int16)[150_000:] += torch.arange(50_001, dtype=torch.int16) % 60  # payloads
    out = poisoned(size * count, x.dtype)
    all_gather_into_tensor(out, x, level="default", name="pieces")
    (plan,) = [plan for kind, plan in _links.state_of(None).plans.items() if kind.name == "pieces"]
    for count_of in (3, 7, 16):
        plan.num_pieces = count_of
        out.view(torch.uint8).fill_(0xA5)
        all_gather_into_tensor(out, x, level="default", name="pieces")
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        assert_same_bits(out, torch.cat(parts))
    return plan.codec.savings


def test_pieces(ranks):
    assert min(ranks(gather_in_pieces)) > 0.2


def nothing(rank):
    size, of_few = dist.get_world_size(), {"level": "default", "name": "nothing"}
    for count in (0, 1, COUNT):  # What tensors of no whole row say about a codec does not count.
        all_gather_into_tensor(poisoned(size * count, torch.float16), tensor_of(rank, torch.float16, count), **of_few)
    plans = [(kind, plan) for kind, plan in _links.state_of(None).plans.items() if kind.name == "nothing"]
    assert {kind.numel: plan.codec is not None for kind, plan in plans} == {0: False, 1: False, COUNT: True}
    out = torch.empty(0)
    all_gather_into_tensor(out, torch.empty(0), level="default")
    broadcast(out, 0, level="default")
    all_to_all_single(out, torch.empty(0), level="default")
    all_to_all_single(torch.empty(0, 3), torch.empty(0, 3), [0] * size, [0] * size, level="default")
    one = torch.empty(size)
    all_gather_into_tensor(one, torch.tensor([float(rank)]), level="default")
    assert one.tolist() == list(range(size))
    scalar = torch.tensor(float(rank))
    broadcast(scalar, 1, level="default")
    assert scalar.item() == 1
    of_many = torch.full((3, 5), float(rank))
    broadcast(of_many[:1, 2], 1, level="default")  # one element, with a stride of 5
    assert of_many.sum().item() == 14 * rank + 1
    assert Codec.learn(of_many[:1, 2]) is None


def test_nothing_and_little(ranks):
    ranks(nothing)


def exchange_with_an_idle_rank(rank):
    """Rank 1 sends nothing and receives nothing."""
    size = dist.get_world_size()
    sizes = [0 if 1 in (rank, other) else 5000 for other in range(size)]
    x = tensor_of(rank, count=sum(sizes))
    for level in LEVELS:
        out = poisoned(sum(sizes), x.dtype)
        all_to_all_single(out, x, sizes, sizes, level=level)
        xs = [tensor_of(other, count=sum(sizes)) for other in range(size) if other != 1]
        assert_same_bits(out, torch.cat([of.split(5000)[rank - (rank > 1)] for of in xs]) if rank != 1 else x)


def test_a_rank_without_parts(ranks):
    ranks(exchange_with_an_idle_rank)


def gather_by_sizes(rank, dtype):
    """Rank 0 sends nothing and receives from all others, which receive nothing."""
    size = dist.get_world_size()
    sent = [5000 if rank and not other else 0 for other in range(size)]
    received = [5000 if other and not rank else 0 for other in range(size)]
    xs = [tensor_of(other, dtype, sum(sent) if other == rank else 5000) for other in range(size)]
    for level in LEVELS:
        out = poisoned(sum(received), dtype)
        all_to_all_single(out, xs[rank], received, sent, level=level, name="one way")
        assert_same_bits(out, torch.cat(xs[1:]) if rank == 0 else out[:0])


def scatter_by_sizes(rank, dtype):
    """Rank 0 sends a part to each rank, also to itself; the others send nothing."""
    size = dist.get_world_size()
    sent, received = [5000 * (rank == 0)] * size, [5000] + [0] * (size - 1)
    x = tensor_of(0, dtype, 5000 * size)
    for level in LEVELS:
        out = poisoned(5000, dtype)
        all_to_all_single(out, x if rank == 0 else x[:0], received, sent, level=level, name="from one")
        assert_same_bits(out, x.split(5000)[rank])


@pytest.mark.parametrize("work", [gather_by_sizes, scatter_by_sizes], ids=lambda work: work.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_ranks_that_send_or_receive_nothing(ranks, dtype, work):
    ranks(work, dtype)


def exchange_with_sizes_or_without(rank, device):
    """Equal parts, which some ranks give as sizes and others leave out."""
    size = dist.get_world_size()
    for level in ("default", "auto"):
        xs = [tensor_of(other, count=size * 500_000) for other in range(size)]
        wanted = torch.cat([x.chunk(size)[rank] for x in xs])
        for call in range(3):
            sizes = [500_000] * size if (rank + call) % 2 else None
            out = poisoned(len(wanted), wanted.dtype).to(device)
            all_to_all_single(out, xs[rank].to(device), sizes, sizes, level=level, name="sizes or not")
            assert_same_bits(out.cpu(), wanted)
            plans = _links.state_of(None).plans.items()
            for plan in [plan for kind, plan in plans if kind.name == "sizes or not" and plan.codec is not None]:
                plan.least = 1 if call == 0 else 1 << 20  # more than a part has: all of them travel raw


@pytest.mark.slow
def test_sizes_that_some_ranks_leave_out(ranks):
    ranks(exchange_with_sizes_or_without, "cpu")


def in_inference_mode(rank):
    """What is kept from a call in inference mode is of use outside, and the other way round."""
    x, size = tensor_of(rank, count=77_000), dist.get_world_size()
    for is_inference in (True, False, True):
        with torch.inference_mode(is_inference):
            out = poisoned(size * len(x), x.dtype)
            all_gather_into_tensor(out, x, level="default", name="inference")
            assert_same_bits(out, gathered(size, x.dtype, count=len(x)))


def test_inference_mode(two):
    two(in_inference_mode)


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 40_000, 1_000_001, 1 << 24])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16])
def test_spans(num_bytes, count):
    """They are all bytes, in whole rows, and need as much room on all ranks."""
    spans = spans_of(num_bytes, count)
    assert 1 <= len(spans) <= count and spans[0].start == 0 and spans[-1].start < num_bytes <= spans[-1].stop
    for span, following in zip(spans, spans[1:]):
        assert span.stop == following.start
    assert all(len(span) > 0 and len(span) % ROW_BYTES == 0 for span in spans)
    if count > 2 and num_bytes >= 1 << 24:
        assert len(spans) == count and len(spans[0]) == len(spans[-1]) < len(spans[1]) / 7


def in_a_subgroup(rank):
    group = dist.new_group(SUBGROUP)
    if rank not in SUBGROUP:
        return raised(lambda: all_gather_into_tensor(torch.empty(2), torch.empty(1), group))
    x = tensor_of(rank)
    out = poisoned(2 * COUNT, x.dtype)
    all_gather_into_tensor(out, x, group, level="default")
    assert_same_bits(out, torch.cat([tensor_of(other) for other in SUBGROUP]))
    broadcast(x, SUBGROUP[1], group, level="default")
    assert_same_bits(x, tensor_of(SUBGROUP[1]))
    broadcast(x.fill_(rank), group=group, group_src=0, level="default")
    assert (x == SUBGROUP[0]).all()
    return None


def test_a_subgroup(four):
    assert [result and result[0] for result in four(in_a_subgroup)] == ["ValueError", None, "ValueError", None]


def relay(rank, dtype, level, codec):
    """From the first rank to the next and so on, around the ring; then all at once."""
    size = dist.get_world_size()
    before, behind = (rank - 1) % size, (rank + 1) % size
    options = {"level": level, "name": "relay", "codec": Codec.learn(tensor_of(0, dtype)) if codec else None}
    for call in range(5):
        x = tensor_of(call, dtype)
        if rank == 0:
            send(x, behind, **options)
        out = poisoned(COUNT, dtype)
        recv(out, before, **options)
        assert_same_bits(out, x)
        if rank:
            send(out, behind, **options)
        outs = [poisoned(COUNT, dtype) for _ in range(2)]
        works = [send(tensor_of(rank, dtype), group_dst=behind, async_op=True, **options)]
        works += [recv(outs[0], group_src=before, async_op=True, **options)]
        works += [send(x, behind, async_op=True, **options), recv(outs[1], before, async_op=True, **options)]
        for work in works:
            assert work.wait() and work.is_completed()
        assert_same_bits(outs[0], tensor_of(before, dtype))
        assert_same_bits(outs[1], x)
    channel = _links.state_of(None).channels[True, behind, 0]
    return [
        plan.codec is not None for kind, plan in channel.plans.items() if (kind.dtype, kind.level) == (dtype, level)
    ]


@pytest.mark.parametrize(
    ("dtype", "codec"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float8_e4m3fn, False), (torch.bool, True)],
    ids=str,
)
def test_from_rank_to_rank(ranks, dtype, codec):
    assert all(all(coded) and coded for coded in ranks(relay, dtype, "fast", codec))


def relay_by_the_link(rank):
    link = measure_link()
    assert link.gbps > 0 and measure_link() is link
    assert _links.state_of(None).link is link
    x, out = tensor_of(0, count=1 << 20), torch.empty(1 << 20, dtype=torch.bfloat16)
    for _ in range(3):
        if rank == 0:
            send(x, 1)
        else:
            recv(out, 0)
            assert_same_bits(out, x)
    return link.gbps


def test_from_rank_to_rank_by_the_link(two):
    first, second = two(relay_by_the_link)
    assert first == second


def relay_lost(rank):
    """Lost rows on their way, while others follow."""
    learned = Codec.learn(tensor_of(9))
    codec, xs = (
        Codec(learned.codebook, learned.slot_bytes, 0.0),
        [tensor_of(k, scale=10.0 ** (9 * k)) for k in range(3)],
    )
    process.said.add(_exchange.SENT_TWICE)
    if rank == 0:
        works = [send(x, 1, codec=codec, async_op=True) for x in xs]
    else:
        outs = [torch.empty_like(x) for x in xs]
        works = [recv(out, 0, codec=codec, async_op=True) for out in outs]
    for work in works:
        work.wait()
    if rank:
        for out, x in zip(outs, xs, strict=True):
            assert_same_bits(out, x)


def test_lost_rows_from_rank_to_rank(two):
    two(relay_lost)


def relay_mixed_up(rank, device_type="cpu"):
    """After a tensor that was coded by another codec, the next one comes."""
    x, device = tensor_of(0, torch.float32), torch.device(device_type, rank if device_type == "cuda" else None)
    learned = Codec.learn(x)
    x, out = x.to(device), torch.empty(COUNT, device=device)
    codecs = [Codec(learned.codebook, learned.slot_bytes, share) for share in (40.0, 40.0 + 1e-9)]
    if rank == 0:
        for _ in range(2):
            send(x, 1, codec=codecs[0], name="mixed up")
        return None
    wrong = raised(lambda: recv(out, 0, codec=codecs[1], name="mixed up"))
    recv(out, 0, codec=codecs[0], name="mixed up")
    assert_same_bits(out, x)
    return wrong


def test_an_error_from_rank_to_rank_is_told_once(two):
    sent, (name, message) = two(relay_mixed_up)
    assert sent is None and name == "RuntimeError" and "different codecs" in message


class InterruptedWait(dist.Work):
    """Work whose wait is interrupted once it has ended. It cannot be waited for twice."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def wait(self, *_):
        self.work.wait()
        self.work = None
        raise KeyboardInterrupt


def relay_interrupted(rank):
    """The receiver's first call is interrupted while it waits for the tensor."""
    x, irecv, calls = tensor_of(0), dist.irecv, []
    if rank == 0:
        for _ in range(3):
            send(x, 1, level="default", name="interrupted")
        return
    out = torch.empty_like(x)

    def interrupted(*args, **options):
        calls.append(args)
        work = irecv(*args, **options)
        return InterruptedWait(work) if len(calls) == 1 else work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "irecv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recv(out, 0, level="default", name="interrupted")
    for _ in range(2):
        out.zero_()
        recv(out, 0, level="default", name="interrupted")
        assert_same_bits(out, x)


def test_the_next_call_finishes_an_interrupted_one(two):
    two(relay_interrupted)


def relay_interrupted_and_lost(rank, number):
    """The first tensor has lost rows, so it is sent again, raw. The receiver's call for it is interrupted while it
    waits for the message (0) or for the raw tensor (1)."""
    learned = Codec.learn(tensor_of(9))
    codec = Codec(learned.codebook, learned.slot_bytes, 0.0)
    xs = [tensor_of(k, scale=10.0 ** (9 - 9 * k)) for k in range(2)]
    process.said.add(_exchange.SENT_TWICE)
    if rank == 0:
        for x in xs:
            send(x, 1, codec=codec)
        return
    out, irecv, calls = torch.empty_like(xs[0]), dist.irecv, []

    def interrupted(*args, **options):
        calls.append(args)
        work = irecv(*args, **options)
        return InterruptedWait(work) if len(calls) == number + 1 else work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "irecv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recv(out, 0, codec=codec)
    recv(out, 0, codec=codec)
    assert_same_bits(out, xs[1])


@pytest.mark.parametrize("number", range(2))
def test_the_next_call_finishes_an_interrupted_one_with_lost_rows(two, number):
    two(relay_interrupted_and_lost, number)


def relay_wrong(rank):
    if rank == 0:
        return raised(lambda: send(tensor_of(0), 1, level="default", name="other"))
    return raised(lambda: recv(torch.empty(COUNT, dtype=torch.float16), 0, level="default", name="other"))


def test_a_sender_of_another_kind(two):
    sent, received = two(relay_wrong)
    assert sent is None and received[0] == "ValueError" and "float16" in received[1]


# ---- gathers on one rank and scatters from one rank ----------------------------------------------------------------

TO_ONE = [(torch.bfloat16, level) for level in LEVELS] + [(dtype, "default") for dtype in DTYPES[1:]]


def gather_on_one(rank, dtype, level, root, count=COUNT, is_async=False, device="cpu", **named):
    """A gather whose destination is named in one of the ways that torch knows, and a scatter back, in place."""
    size, options = dist.get_world_size(), {"level": level, "async_op": is_async}
    xs = [tensor_of(other, dtype, count).to(device) for other in range(size)]
    x, out = xs[rank].clone(), [poisoned(count, dtype).to(device) for _ in range(size)] if rank == root else None
    if out is not None:
        out[rank] = x
    to = {f"{name}dst": value for name, value in named.items()}
    work = ibp.distributed.gather(x, out, **to, **options, name="gather")
    assert (work is not None) == is_async and (work is None or (work.wait() and (x.is_cuda or work.is_completed())))
    for found, wanted in zip(out or [], xs, strict=bool(out)):
        assert_same_bits(found.cpu(), wanted.cpu())
    back = poisoned(count, dtype).to(device)
    parts = [xs[(other + 1) % size] for other in range(size)] if rank == root else []
    from_one = {f"{name}src": value for name, value in named.items()}
    work = ibp.distributed.scatter(back, parts, **from_one, **options, name="scatter")
    assert (work is not None) == is_async and (work is None or (work.wait() and (x.is_cuda or work.is_completed())))
    assert_same_bits(back.cpu(), xs[(rank + 1) % size].cpu())
    assert_same_bits(x.cpu(), xs[rank].cpu())


def gather_and_scatter(rank, cases):
    last = dist.get_world_size() - 1
    for dtype, level in cases:
        gather_on_one(rank, dtype, level, 0)
        gather_on_one(rank, dtype, level, last, is_async=True, **{"": last})
        gather_on_one(rank, dtype, level, last, group_=last)
    for count in (0, 1):
        gather_on_one(rank, torch.float64, "default", last, count, **{"": last})
    plans = [
        (kind, plan) for kind, plan in _links.state_of(None).plans.items() if kind.numel == COUNT and kind.root >= 0
    ]
    assert not any(plan.has_lost for kind, plan in plans if kind.what != "broadcast")  # Codecs suit what is sent.
    return {(kind.what, kind.root, kind.level, plan.codec is not None) for kind, plan in plans}


@pytest.mark.slow
def test_gathers_and_scatters(one, ranks):
    """All dtypes and levels; the last rank or rank 0 is the root; 1, 2 and 4 ranks."""
    assert one(gather_and_scatter, TO_ONE) == [set()]
    for found in ranks(gather_and_scatter, TO_ONE):
        roots = 0, len(ranks.pipes) - 1
        assert {(what, root, "default", True) for what in ("gather", "scatter") for root in roots} <= found


def rooted_in_pieces(rank):
    """Calls in any number of pieces, and calls whose parts are too small to be coded."""
    for count in (1, 2, 3, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_links.Rates, "num_pieces", lambda self, load, count=count: count)
            gather_on_one(rank, torch.bfloat16, "default", 1, 200_000 + count, group_=1)
            gather_on_one(rank, torch.bfloat16, "default", 1, 200_000 + count, is_async=True, group_=1)
    plans = _links.state_of(None).plans.items()
    plans = [plan for kind, plan in plans if kind.what in ("gather", "scatter") and 200_000 < kind.numel < 200_010]
    for plan in plans:
        plan.least = 1 << 20
    gather_on_one(rank, torch.bfloat16, "default", 1, 200_007, is_async=True, group_=1)
    return sorted(plan.num_pieces for plan in plans)


def test_pieces_of_gathers_and_scatters(ranks):
    wanted = [1, 1, 2, 2, 3, 3, 7, 7]
    assert ranks(as_on_gpus, rooted_in_pieces) == [wanted] * len(ranks.pipes)


def gather_in_a_subgroup(rank):
    group = dist.new_group(SUBGROUP)
    x, out = tensor_of(rank), [poisoned(COUNT, torch.bfloat16) for _ in SUBGROUP] if rank == SUBGROUP[1] else None
    if rank not in SUBGROUP:
        return raised(lambda: ibp.distributed.gather(x, group=group, group_dst=1))
    for named in ({"dst": SUBGROUP[1]}, {"group_dst": 1}):
        ibp.distributed.gather(x, out, group=group, level="default", **named)
    for found, other in zip(out or [], SUBGROUP):
        assert_same_bits(found, tensor_of(other))
    ibp.distributed.scatter(x, out, group=group, group_src=1, level="default")
    assert_same_bits(x, tensor_of(rank))
    return raised(lambda: ibp.distributed.scatter(x, out, group=group))  # Rank 0 is not in the group.


def test_gathers_and_scatters_in_a_subgroup(four):
    assert [name for name, _ in four(gather_in_a_subgroup)] == ["ValueError"] * 4


def lose_to_one(rank, function, device="cpu"):
    """Rows of one tensor have no room. Its sender and its receiver send it again, and the other ranks do not."""
    process.said.discard(_exchange.SENT_TWICE)
    learned, size = Codec.learn(tensor_of(9)), dist.get_world_size()
    codec = Codec(learned.codebook, learned.slot_bytes, 0.0)
    xs = [tensor_of(other, scale=1e20 if other == 0 else 0.02).to(device) for other in range(size)]
    out = [poisoned(COUNT, torch.bfloat16).to(device) for _ in xs]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if function == "gather":
                ibp.distributed.gather(xs[rank], out if rank == 1 else None, 1, codec=codec)
            else:
                ibp.distributed.scatter(out[rank], xs if rank == 1 else None, 1, codec=codec)
    arrived = range(size) if function == "gather" else [rank]
    for other in arrived if function == "scatter" or rank == 1 else ():
        assert_same_bits(out[other].cpu(), xs[other].cpu())
    return sum("no room" in str(one.message) for one in caught)


@pytest.mark.parametrize("function", ["gather", "scatter"])
def test_only_the_tensor_that_has_lost_rows_is_sent_again(ranks, function):
    wanted = [1, 1, 0, 0][: len(ranks.pipes)]
    assert ranks(lose_to_one, function) == wanted
    assert ranks(as_on_gpus, lose_to_one, function) == wanted


def wrong_calls(size):
    """Returns, by what is wrong: (the rank that makes the wrong call; its tensor, its list and its root; its error; a
    part of the message)."""
    x = tensor_of(0)
    good, holes = [x.clone() for _ in range(size)], torch.empty(2 * COUNT, dtype=x.dtype)[::2]
    last = f"list[{size - 1}]"
    return {
        "no list": (0, (x, None, 0), "ValueError", f"has 0 tensors on rank 0 of the group; wanted {size}"),
        "too few": (0, (x, good[1:], 0), "ValueError", f"has {size - 1} tensors on rank 0 of the group; wanted {size}"),
        "too many": (0, (x, [*good, x], 0), "ValueError", f"has {size + 1} tensors on rank 0 of the group; wanted"),
        "a tensor as list": (0, (x, torch.stack(good), 0), "TypeError", "list is a Tensor; wanted a list of tensors"),
        "no tensor": (0, (x, [*good[1:], 1.0], 0), "TypeError", f"{last} is a float; wanted a torch.Tensor"),
        "a dtype in a list": (0, (x, [*good[1:], x.half()], 0), "ValueError", "wanted one dtype and device"),
        "a shape in a list": (0, (x, [*good[1:], x[None]], 0), "ValueError", f"{last} has shape [1, {COUNT}]; wanted"),
        "a layout in a list": (0, (x, [*good[1:], holes], 0), "ValueError", "strides (2,) is not contiguous memory"),
        "a list elsewhere": (1, (x, good, 0), "ValueError", f"has {size} tensors on rank 1 of the group; wanted 0"),
        "a layout": (1, (holes, None, 0), "ValueError", "strides (2,) is not contiguous memory"),
        "a root that is not there": (1, (x, None, size), "ValueError", f"is {size}; wanted 0 to {size - 1}"),
        # What ranks disagree on is the same error on all of them.
        "a size": (None, (x[1:], None, 0), "ValueError", f"numel is {COUNT} on rank 0 of the group and {COUNT - 1} on"),
        "nothing": (None, (x[:0], None, 0), "ValueError", f"numel is {COUNT} on rank 0 of the group and 0 on rank 1"),
        "a dtype": (None, (x.half(), None, 0), "ValueError", "dtype is torch.bfloat16 on rank 0 of the group and"),
        "a root": (None, (x, good, 1), "ValueError", "root is 0 on rank 0 of the group and 1 on rank 1"),
    }


def make_wrong_calls(rank):
    size, found = dist.get_world_size(), {}
    x = tensor_of(0)
    right = x, [x.clone() for _ in range(size)] if rank == 0 else None, 0
    for what, (culprit, wrong, _, _) in wrong_calls(size).items():
        arguments = wrong if rank == (1 if culprit is None else culprit) else right
        for function in (ibp.distributed.gather, ibp.distributed.scatter):
            call = functools.partial(function, *arguments, level="default", name="wrong")
            found[what, function.__name__] = raised(call)
    gather_on_one(rank, torch.bfloat16, "default", 0)  # The next call is as ever.
    return found


def test_wrong_gathers_and_scatters_raise_on_all_ranks(ranks):
    results, wrong = ranks(make_wrong_calls), wrong_calls(len(ranks.pipes))
    for what, function in results[0]:
        culprit, _, name, message = wrong[what]
        for rank, result in enumerate(found[what, function] for found in results):
            assert result is not None and message in result[1], (what, function, rank, result)
            assert result[0] == (name if culprit in (None, rank) else "RuntimeError"), (what, function, rank, result)
            assert result[0] != "RuntimeError" or f"{function} has failed on rank {culprit}" in result[1]


def make_wrong_raw_calls(rank):
    """Calls that need no other rank are checked, too."""
    x = tensor_of(0)
    gather_on, scatter_from = ibp.distributed.gather, ibp.distributed.scatter
    return [
        raised(lambda: gather_on(x, None)),
        raised(lambda: scatter_from(x, [x, x])),
        raised(lambda: gather_on(x[::2], [x[::2]])),
        raised(lambda: scatter_from(x, [x.half()])),
        raised(lambda: gather_on(x, [x], dst=0, group_dst=0)),
        raised(lambda: scatter_from(x, [x], 1)),
        raised(lambda: gather_on([1.0], [x])),
        raised(lambda: scatter_from(x, [x], level="best")),
        raised(lambda: gather_on(x, [x], codec="planes")),
    ]


def test_wrong_gathers_and_scatters_of_one_rank(one):
    (found,) = one(make_wrong_raw_calls)
    assert [name for name, _ in found] == ["ValueError"] * 6 + ["TypeError", "ValueError", "TypeError"]
    assert "wanted one of dst and group_dst" in found[4][1] and "src is 1; wanted 0 to 0" in found[5][1]


def rooted_by_the_link(rank):
    """Over a slow link, tensors of 512 KiB travel raw without a plan, and tensors of 2 MiB travel coded."""
    state = _links.state_of(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "link", Link(1e-4))
        patch.setattr(_links.Kind, "follows_link", True)  # as on a GPU
        for count in (1 << 18, 1 << 20):
            gather_on_one(rank, torch.bfloat16, "auto", 0, count)
    plans = [(kind, plan) for kind, plan in state.plans.items() if (kind.root, kind.level) == (0, "auto")]
    return {(kind.what, kind.numel, plan.codec is not None) for kind, plan in plans if kind.what != "broadcast"}


def test_the_link_decides_for_gathers_and_scatters(ranks):
    wanted = {("gather", 1 << 20, True), ("scatter", 1 << 20, True)}
    assert ranks(rooted_by_the_link) == [wanted] * len(ranks.pipes)


# ---- when tensors travel raw ---------------------------------------------------------------------------------------


def gather_random(rank):
    x = torch.randint(256, (COUNT,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
    out = torch.empty(dist.get_world_size() * COUNT, dtype=torch.uint8)
    all_gather_into_tensor(out, x, level="default", name="random")
    assert_same_bits(out.chunk(dist.get_world_size())[rank], x)
    return [plan.codec is None for kind, plan in _links.state_of(None).plans.items() if kind.name == "random"]


def test_random_bytes_travel_raw(two):
    assert two(gather_random) == [[True]] * 2


def by_the_link(rank, gbps):
    """Makes calls of each kind over a link of this rate, which only rank 0 has measured to be so fast: the other ranks
    have measured the opposite. Returns which calls travelled coded: (function, elements, whether it was coded)."""
    state, size = _links.state_of(None), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "link", Link(gbps if rank == 0 else 1 / gbps))
        for count in (1000, 1 << 20):
            x, name, wanted = tensor_of(rank, count=count), f"{gbps}", gathered(size, torch.bfloat16, count=count)
            out, told, back = poisoned(size * count, x.dtype), x.clone(), poisoned(count, x.dtype)
            all_gather_into_tensor(out, x, name=name)
            broadcast(told, 1, name=name)
            all_to_all_single(back, x, name=name)
            assert_same_bits(out, wanted)
            assert_same_bits(told, tensor_of(1, count=count))
            assert_same_bits(back, torch.cat([x.chunk(size)[rank] for x in wanted.split(count)]))
        all_gather_into_tensor(out, x, name=name, level="default")  # the caller's word
    plans = [(kind, plan) for kind, plan in state.plans.items() if kind.name == name]
    return {(kind.what, kind.level, kind.numel, plan.codec is not None) for kind, plan in plans}


@pytest.mark.parametrize("gbps, is_coded", [(1e5, False), (1e-4, True)])
def test_the_link_decides_for_all_ranks(two, gbps, is_coded):
    wanted = {
        ("all_gather_into_tensor", "auto", 1 << 20, is_coded),
        ("broadcast", "auto", 1 << 20, False),  # all-gathers of the CPU do not say how fast others are
        ("all_to_all_single", "auto", 0, False),
        ("all_gather_into_tensor", "default", 1 << 20, True),
    }
    assert two(by_the_link, gbps) == [wanted] * 2


def measured(rank):
    """Makes calls of three kinds. Returns how often the link was measured, and what it gave."""
    state, count, links = _links.state_of(None), 1 << 20, []
    measure = _links.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "link", None)
        patch.setattr(_links, "measure", lambda members: links.append(measure(members)) or links[-1])
        out = torch.empty(2 * count, dtype=torch.float64)
        all_gather_into_tensor(out, tensor_of(rank, torch.float64, count), level="default", name="measured")
        assert not links
        for name in ("measured", "once"):
            all_gather_into_tensor(out, tensor_of(rank, torch.float64, count), name=name)
    return [link.gbps for link in links]


def test_one_raw_call_is_timed_a_group(two):
    first, second = two(measured)
    assert first == second and len(first) == 1 and first[0] > 0


def test_when_coding_pays():
    savings = Codec.learn(tensor_of(0)).savings
    rates = _links.Rates(savings, 700.0, 1900.0)
    small, large = (_links.Load(size, size, size) for size in (1 << 20, 1 << 29))
    assert 1.4 < rates.gain(Link(3.0), large) < 1 / (1 - savings)
    assert rates.pays(Link(25.0), large)
    assert not rates.pays(Link(25.0), small)
    assert not rates.pays(Link(250.0), large)  # the coders are not so fast
    break_even = savings / (1 / 700.0 + 1 / 1900.0)
    assert rates.pays(Link(0.4 * break_even), large)
    assert not rates.pays(Link(0.5 * break_even), large)  # coders and link compete before
    integers = _links.Rates(0.829, 956.0, 745.0)  # int64 below 1,000, by the rates of an H200
    assert integers.pays(Link(25.0), large) and not integers.pays(Link(210.0), large)
    assert rates.num_pieces(small) == 1 and 3 <= rates.num_pieces(large) <= 16
    assert rates.num_pieces(_links.Load(1 << 27, 1 << 27, 1 << 27)) == 2
    known = _links.Load(1 << 24, 1 << 24, 1 << 24, True)  # the host has other work between such calls
    assert rates.gain(Link(25.0), known) < rates.gain(Link(25.0), _links.Load(1 << 24, 1 << 24, 1 << 24))


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_shares_are_those_of_spans(count):
    num_bytes = 1 << 28
    spans = spans_of(num_bytes, count)
    first, last = ((min(span.stop, num_bytes) - span.start) / num_bytes for span in (spans[0], spans[-1]))
    assert shares_of(count) == pytest.approx((first, last), rel=0.1)


def lose(rank, what):
    """A codec with too little room: the bits are right, one warning is given."""
    process.said.discard(_exchange.SENT_TWICE)
    learned = Codec.learn(tensor_of(9))
    codec, size = Codec(learned.codebook, learned.slot_bytes, 0.0), dist.get_world_size()
    x = tensor_of(rank, count=400_000 // 4 * 4, scale=1e20 if rank == 0 else 0.02)
    xs = [tensor_of(other, count=len(x), scale=1e20 if other == 0 else 0.02) for other in range(size)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if what == "all_gather":
                out = poisoned(size * len(x), x.dtype)
                all_gather_into_tensor(out, x, codec=codec)
                assert_same_bits(out, torch.cat(xs))
            elif what == "broadcast":
                y = x.clone()
                broadcast(y, 0, codec=codec)
                assert_same_bits(y, xs[0])
            else:
                out = poisoned(len(x), x.dtype)
                all_to_all_single(out, x, codec=codec, async_op=True).wait()
                assert_same_bits(out, torch.cat([of.chunk(size)[rank] for of in xs]))
    return sum("no room" in str(one.message) for one in caught)


@pytest.mark.parametrize("what", ["all_gather", "broadcast", "all_to_all"])
def test_lost_rows_are_sent_again(ranks, what):
    warned = ranks(lose, what)
    assert warned == [1] * len(warned)  # rank 0 sends lost rows to all


def lose_in_one_piece(rank, num_pieces):
    """All-gathers in pieces. In each call one piece of rank 0 has rows without room: an early one, a middle one, the
    last one, and then none has."""
    process.said.add(_exchange.SENT_TWICE)
    learned, size, count = Codec.learn(tensor_of(9)), dist.get_world_size(), 600_000
    codec = Codec(learned.codebook, learned.slot_bytes, 0.0)
    xs = [tensor_of(other, count=count) for other in range(size)]
    plain = xs[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_links.Rates, "num_pieces", lambda self, load: num_pieces)
        for first in (0, count // 2, count - 40_960, count, 0, count):
            xs[0].copy_(plain)[first : first + 40_960] *= 1e20  # 20 rows
            out = poisoned(size * count, xs[0].dtype)
            all_gather_into_tensor(out, xs[rank], codec=codec, name=f"{num_pieces} pieces")
            assert_same_bits(out, torch.cat(xs))


@pytest.mark.slow
@pytest.mark.parametrize("num_pieces", slow_but([3], [2, 3, 7]))
def test_lost_rows_of_one_piece(ranks, num_pieces):
    ranks(lose_in_one_piece, num_pieces)
    ranks(as_on_gpus, lose_in_one_piece, num_pieces)


class Works:
    """Of a call of NCCL's, done by messages from rank to rank."""

    def __init__(self, outs, ins):
        self.works = []
        for other, (out, x) in enumerate(zip(outs, ins)):
            if other == dist.get_rank():
                out.copy_(x)
                continue
            self.works += [dist.isend(x, other)] if x.numel() else []
            self.works += [dist.irecv(out, other)] if out.numel() else []

    def wait(self):
        for work in self.works:
            work.wait()


def exchange_as_nccl(outs, ins, group, async_op):
    return Works(outs, ins)


def exchange_splits_as_nccl(out, x, back, to, group, async_op):
    work = Works(out.split(back), x.split(to))
    return work if async_op else work.wait()


class EventOfCpu:
    """A CUDA event of work that is done at once."""

    def record(self):
        """There is nothing to record."""

    def synchronize(self):
        """There is nothing to wait for."""


_status = Messages.status


def status_as_on_gpus(messages):
    """A status whose copy for the host does not see what is decoded after it was recorded."""
    status = _status(messages)
    if status.seen is None:
        status.seen, status._on_host = EventOfCpu(), torch.zeros_like(status.data)
    return status


def as_on_gpus(rank, work, *arguments):
    """Ranks tell each other what was lost once all is coded, before it moves; they exchange in pairs."""
    with pytest.MonkeyPatch.context() as patch:
        buffers = _links.state_of(None).buffers(torch.device("cpu"))
        patch.setattr(buffers, "on_gpu", True)
        patch.setattr(Messages, "status", status_as_on_gpus)
        patch.setattr(Messages, "note_heads", lambda *ignored: pytest.fail("on a GPU codecs are told, too"))
        patch.setattr(dist, "all_to_all", exchange_as_nccl)
        patch.setattr(dist, "all_to_all_single", exchange_splits_as_nccl)
        return work(rank, *arguments)


@pytest.mark.parametrize("what", ["all_gather", "broadcast", "all_to_all"])
def test_lost_rows_that_are_told(ranks, what):
    warned = ranks(as_on_gpus, lose, what)
    assert warned == [1] * len(warned)


def test_messages_that_follow_what_is_told(two):
    assert min(two(as_on_gpus, gather_in_pieces)) > 0.2
    two(as_on_gpus, relay_lost)
    sent, (name, message) = two(as_on_gpus, relay_mixed_up)
    assert sent is None and name == "RuntimeError" and "different codecs" in message


def exchange_unevenly(rank, device):
    """Messages of nothing, of one element, of some rows and of many, of which all or the larger ones are coded."""
    size, counts = dist.get_world_size(), (0, 1, 700, 70_001)
    for call, least in enumerate((1, 1, 2000, 1 << 30)):
        sent = [[counts[(other + 2 * to + call) % 4] for to in range(size)] for other in range(size)]
        xs = [tensor_of(other, count=sum(sent[other])) for other in range(size)]
        wanted = torch.cat([x.split(sent[other])[rank] for other, x in enumerate(xs)])
        out, back = poisoned(len(wanted), wanted.dtype).to(device), [of[rank] for of in sent]
        all_to_all_single(out, xs[rank].to(device), back, sent[rank], level="default", name="uneven")
        assert_same_bits(out.cpu(), wanted)
        for kind, plan in _links.state_of(None).plans.items():
            if kind.name == "uneven":
                plan.least = least


def test_uneven_messages(ranks):
    ranks(exchange_unevenly, "cpu")
    ranks(as_on_gpus, exchange_unevenly, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_exchanges_in_pairs(ranks, dtype):
    ranks(as_on_gpus, exchange_all, dtype, "default")
    ranks(as_on_gpus, gather_by_sizes, dtype)
    ranks(as_on_gpus, scatter_by_sizes, dtype)
    ranks(as_on_gpus, exchange_with_an_idle_rank)


def test_damage_that_the_next_call_sees():
    status = Status(2, torch.device("cpu"), 7)
    status.seen = object()  # as on a GPU, where messages are decoded after the host has its copy
    for told, lost, faults, is_damaged in (
        ("damage", [0, 0], [0, 3], True),
        ("nothing", [0, 0], [0, 0], False),
        ("lost, and missing in an early piece", [0, 5], [0, 3], False),
        ("missing in the last piece of the call before", [0, 0], [0, 3], False),
        ("damage of another message than the lost one", [0, 5], [3, 0], True),
    ):
        for message in range(2):
            status.counts[message][1], status.faults[message][0] = lost[message], faults[message]
        status.read()
        assert status.is_damaged == is_damaged, told
        assert status.lost == [count > 0 for count in lost] and not status.is_strange
    status.rows[1][7] = 8
    status.read()
    assert status.is_strange


def damage(rank):
    """Rank 1 misses rows of its first call. It finds out in the second one, which the ranks make together."""
    size, x, options = dist.get_world_size(), tensor_of(rank), {"level": "default", "name": "damage"}
    out, decode = poisoned(size * COUNT, x.dtype), Messages.decode

    def decode_with_a_fault(messages, buffer, message, data, status, max_sms):
        decode(messages, buffer, message, data, status, max_sms)
        status.faults[message][0] = 3

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Messages, "decode", decode_with_a_fault)
        all_gather_into_tensor(out, x, **options)
    found = raised(lambda: all_gather_into_tensor(out, x, **options))
    out.fill_(0)
    all_gather_into_tensor(out, x, **options)
    assert_same_bits(out, gathered(size, x.dtype))
    return found


def test_damage_raises_on_the_rank_that_meets_it(ranks):
    others, (name, message) = (found := ranks(as_on_gpus, damage))[:1] + found[2:], found[1]
    assert others == [None] * len(others) and name == "RuntimeError" and "damaged on its way" in message


def drift(rank):
    """A codec that is learned anew once its tensors have changed, and given up where that does not help."""
    size, seen = dist.get_world_size(), []
    for call in range(12):
        x = tensor_of(rank, scale=0.02 if call < 2 else 1e15)
        out = poisoned(size * COUNT, x.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            all_gather_into_tensor(out, x, level="default", name="drift")
        assert_same_bits(out, gathered(size, x.dtype, scale=0.02 if call < 2 else 1e15))
        (plan,) = [plan for kind, plan in _links.state_of(None).plans.items() if kind.name == "drift"]
        seen.append(plan.has_lost)
    return seen


def test_a_codec_is_learned_anew(two):
    for seen in two(drift):
        assert not any(seen[:2]) and any(seen) and not seen[-1]


# ---- errors --------------------------------------------------------------------------------------------------------


def differ(rank, how):
    size, x = dist.get_world_size(), tensor_of(rank)
    options = {"level": "default", "name": how}
    if how == "shape":
        x = x[: COUNT - rank]
    elif how == "dtype":
        x = x.half() if rank else x
    elif how == "level":
        options["level"] = "fast" if rank else "default"
    elif how == "name":
        options["name"] = f"rank {rank}"
    elif how == "codec":
        options = {"codec": Codec.learn(tensor_of(0, scale=1 + 99 * rank))}
    out = torch.empty(size * len(x) - (how == "output" and rank == 0), dtype=x.dtype)
    if how == "layout" and rank == 0:
        x = torch.empty(2 * COUNT, dtype=x.dtype)[::2]
    return raised(lambda: all_gather_into_tensor(out, x, **options))


@pytest.mark.parametrize("how", ["shape", "dtype", "level", "name", "codec", "output", "layout"])
def test_ranks_that_differ_all_raise(ranks, how):
    results = ranks(differ, how)
    assert all(results), results
    assert all(name in ("ValueError", "RuntimeError") for name, _ in results)


def mix_up(rank, how):
    """Ranks make calls that all have made before, but not the same ones: their messages may have other sizes."""
    size, x = dist.get_world_size(), tensor_of(rank, torch.float32)
    learned, out = Codec.learn(x), torch.empty(size * COUNT)
    codecs = [Codec(learned.codebook, learned.slot_bytes, share) for share in (40.0, 40.0 + 1e-9, 900.0)]
    dist.broadcast_object_list(codecs, 0)
    assert len({codec.fingerprint for codec in codecs}) == 3
    noise = torch.randint(0, 256, (4 * COUNT,), dtype=torch.uint8).view(torch.float32)
    calls = {
        "codec": lambda k: all_gather_into_tensor(out, x, codec=codecs[k]),
        "size": lambda k: all_gather_into_tensor(out, x, codec=codecs[2 * k]),
        "raw": lambda k: all_gather_into_tensor(out, noise if k else x, level="default", name=f"mixed {k}"),
        "function": lambda k: (
            broadcast(x, 0, codec=codecs[0]) if k else all_gather_into_tensor(out, x, codec=codecs[0])
        ),
        "shape": lambda k: all_gather_into_tensor(out[: size * (5000 + k)], x[: 5000 + k], codec=codecs[0]),
        "new": lambda k: all_gather_into_tensor(out, x, codec=codecs[0], name="new" if k == 2 else "old"),
    }
    call = calls[how]
    for k in range(2):
        call(k)
    return raised(lambda: call(2 * (rank % 2) if how == "new" else rank % 2))


@pytest.mark.parametrize("how", ["codec", "size", "raw", "function", "shape", "new"])
def test_known_calls_mixed_up(ranks, how):
    for name, message in ranks(mix_up, how):
        assert name in ("ValueError", "RuntimeError") and "rank" in message
    ranks(gather, torch.bfloat16, "default")  # the next call is as ever


def refused(rank):
    x, out = tensor_of(rank), torch.empty(2 * COUNT, dtype=torch.bfloat16)
    return [
        raised(lambda: all_gather_into_tensor(out, x, level="best")),
        raised(lambda: all_gather_into_tensor(out, x, codec="planes")),
        raised(lambda: broadcast(x)),
        raised(lambda: all_gather_into_tensor([out], x)),
        raised(lambda: send([1.0], 0)),
        raised(lambda: all_to_all_single(x, x, [1, 2], [COUNT, 0], level="default", name="refused")),
    ]


def test_arguments_that_are_refused(two):
    for results in two(refused):
        names = ["ValueError", "TypeError", "ValueError", "TypeError", "TypeError", "ValueError"]
        assert [name for name, _ in results] == names


def test_codecs():
    x = tensor_of(0)
    codec = Codec.learn(x)
    assert 0.25 < codec.savings < 0.4 and pickle.loads(pickle.dumps(codec)).fingerprint == codec.fingerprint
    assert Codec.learn(x, level="fast").fingerprint != codec.fingerprint
    assert Codec.learn(x.view(-1, 1).expand(-1, 3)) is not None and Codec.learn(x[:9]) is None
    assert Codec.learn(torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)) is None
    for wrong in ((33, 0.0), (4096, 0.0), (-32, 0.0), (64, -1.0), (64, 1e9)):
        with pytest.raises(ValueError, match="wanted"):
            Codec(codec.codebook, *wrong)
    with pytest.raises(ValueError, match="rows of 2048 bytes"):
        Codec(ibp.codecs.analyze(x[:20480].view(20, 1024), scheme="planes"), 64, 0.0)
    with pytest.raises(ValueError, match="level"):
        Codec.learn(x, level="auto")
    with pytest.raises(TypeError, match="tensor"):
        Codec.learn([1.0])


def die_or_call(rank):
    x = tensor_of(rank)
    out = torch.empty(3 * COUNT, dtype=x.dtype)
    if rank == 1:
        all_gather_into_tensor(out, x, level="default")
        os._exit(1)
    all_gather_into_tensor(out, x, level="default")
    return raised(lambda: [all_gather_into_tensor(out, x, level="default") for _ in range(2)])


@pytest.mark.slow
def test_a_rank_that_ends(tmp_path):
    ranks = Ranks(3, tmp_path, timeout=5)
    for _, (name, message) in ranks.survivors(die_or_call, 1):
        assert name == "RuntimeError" and "not all ranks" in message


def wait_for_a_slow_rank(rank):
    """Rank 1 sends later than rank 0 waits."""
    x = tensor_of(rank)
    out = poisoned(2 * COUNT, x.dtype)
    all_gather_into_tensor(out, x, level="default")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_exchange, "CodedWork", work_once_rank_0_is_done)
        work = all_gather_into_tensor(out, x, level="default", async_op=True)
    result = raised(lambda: work.wait(timedelta(seconds=0.1 if rank == 0 else 20)))
    if rank == 0:
        store().set("waited", "")
    dist.barrier()
    return result


_CodedWork = _exchange.CodedWork


def work_once_rank_0_is_done(*args):
    store().wait(["waited"], timedelta(seconds=20))
    return _CodedWork(*args)


def store():
    return dist.distributed_c10d._get_default_store()


@pytest.mark.slow
def test_a_timeout(two):
    first, second = two(wait_for_a_slow_rank)
    assert second is None and first is not None and first[0] == "RuntimeError"
    two(gather, torch.bfloat16, "default")  # the next call is as ever


class FailingMessages:
    """Messages of 100 bytes, of which the n-th coding, or decoding, raises."""

    num_bytes = 100

    def __init__(self, fails, number):
        self.fails, self.left, self.decoded, self.used = fails, number, [], set()

    def status(self):
        return None

    def of(self, buffer):
        return MessageViews(buffer.memory, [buffer.memory], {})

    def code(self, buffer, message, data, status, max_sms):
        self.used.add(buffer)  # It is kept, so that no other buffer can have its place in memory.
        self._meet("code")

    def decode(self, buffer, message, data, status, max_sms):
        self._meet("decode")
        self.decoded.append(data)

    def clean(self, buffer, k):
        """There is nothing to clean."""

    def note_heads(self, buffer, status):
        """There are no heads."""

    def _meet(self, what):
        if what == self.fails:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


class FailingCall:
    """A call in pieces with one message each."""

    tensors, own, state = (torch.zeros(1),), None, None

    def __init__(self, buffers, messages, count):
        self.state = types.SimpleNamespace(buffers=lambda device: buffers)
        self._pieces = [_exchange.ExchangePiece(messages, {0: part}, {0: part}) for part in range(count)]

    def pieces(self, plan):
        return self._pieces

    def move(self, whole, each):
        return None


def work_of(buffers, messages, count, is_async):
    status = Status(1, torch.device("cpu"), data=torch.zeros(status_entries(1), dtype=torch.int64))
    return _exchange.CodedWork(FailingCall(buffers, messages, count), None, is_async, status)


@pytest.mark.parametrize("fails", ["code", "decode"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_calls_that_fail_keep_no_buffers(fails, number):
    """As on a GPU, where buffers are used again: work that nobody waits for may still use the buffers of a call that
    failed."""
    buffers = MessageBuffers(torch.device("cpu"))
    buffers.on_gpu = True
    used = []
    for _ in range(3):
        messages = FailingMessages(fails, number)
        with pytest.raises(KeyboardInterrupt):
            work_of(buffers, messages, 4, False)
        assert not used or not used[-1] & messages.used
        used.append(messages.used)
    messages = FailingMessages("", 0)
    for _ in range(2):
        work_of(buffers, messages, 4, False)
    assert len(messages.used) == 2  # They are used in turn, and again.


def test_an_interrupted_wait_goes_on():
    messages = FailingMessages("decode", 2)
    work = work_of(MessageBuffers(torch.device("cpu")), messages, 3, True)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.wait() and messages.decoded == [0, 1, 2]


def test_without_torch_distributed():
    with pytest.raises(RuntimeError, match="not initialised"):
        all_gather_into_tensor(torch.empty(2), torch.empty(1))


# ---- GPUs ----------------------------------------------------------------------------------------------------------

NO_PEERS = {"NCCL_P2P_DISABLE": "1"}


@pytest.fixture(scope="module", params=["direct", "no peer access"])
def nccl(request, gpus, tmp_path_factory):
    """Two processes with a GPU each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_PEERS.items() if request.param != "direct" else ():
            patch.setenv(name, value)
        ranks = Ranks(2, tmp_path_factory.mktemp("nccl"), backend="nccl")
        yield ranks
        ranks.end()


def equal_to_torchs(rank, dtype, level, count):
    """All calls, in order and with `wait()` later, from this stream and another."""
    size, device = dist.get_world_size(), torch.device("cuda", rank)
    xs = [tensor_of(other, dtype, count=count).to(device) for other in range(size)]
    x, wanted = xs[rank], torch.cat(xs)
    count -= count % size
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for is_async in (False, True):
                out, told = poisoned(len(wanted), dtype).to(device), xs[rank].clone()
                back = poisoned(count, dtype).to(device)
                works = [
                    all_gather_into_tensor(out, x, async_op=is_async, level=level),
                    broadcast(told, 1, async_op=is_async, level=level),
                    all_to_all_single(back, x[:count], async_op=is_async, level=level),
                ]
                for work in works if is_async else ():
                    assert work.wait()  # torch's own does not wait on the host
                    assert not isinstance(work, _exchange.CodedWork) or work.is_completed()
                assert_same_bits(out.cpu(), wanted.cpu())
                assert_same_bits(told.cpu(), xs[1].cpu())
                assert_same_bits(back.cpu(), torch.cat([of[:count].chunk(size)[rank] for of in xs]).cpu())
    whole = torch.zeros(size, len(x), dtype=dtype, device=device)
    whole[rank] = x
    all_gather_into_tensor(whole, whole[rank], level=level)
    assert_same_bits(whole.view(-1).cpu(), wanted.cpu())
    return [plan.codec is not None for kind, plan in _links.state_of(None).plans.items() if kind.level == level]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool], ids=str
)
def test_nccl(nccl, dtype):
    for coded in nccl(equal_to_torchs, dtype, "default", 3_000_001):
        assert any(coded)
    nccl(equal_to_torchs, dtype, "auto", 3_000_001)


def to_one_on_gpus(rank, dtype, level):
    device = torch.device("cuda", rank)
    for root in range(2):
        for is_async in (False, True):
            gather_on_one(rank, dtype, level, root, 3_000_001, is_async, device, group_=root)
    return [lose_to_one(rank, function, device) for function in ("gather", "scatter")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool], ids=str)
def test_nccl_gathers_and_scatters(nccl, dtype):
    for level in ("default", "auto"):
        assert nccl(to_one_on_gpus, dtype, level) == [[1, 1]] * 2  # Both ranks warn of lost rows once.


def splits_on_gpus(rank):
    size, device = dist.get_world_size(), torch.device("cuda", rank)
    xs = [tensor_of(other, count=1000 * sum(parts_of(other, size))).view(-1, 1000).to(device) for other in range(size)]
    wanted = torch.cat([x.split(parts_of(other, size))[rank] for other, x in enumerate(xs)])
    out = torch.zeros_like(wanted)
    all_to_all_single(
        out, xs[rank], [parts_of(other, size)[rank] for other in range(size)], parts_of(rank, size), level="fast"
    )
    assert_same_bits(out.cpu(), wanted.cpu())
    for _ in range(3):
        if rank == 0:
            send(xs[0], 1, level="default")
        else:
            got = torch.zeros_like(xs[0])
            recv(got, 0, level="default")
            assert_same_bits(got.cpu(), xs[0].cpu())


def test_nccl_with_splits_and_from_rank_to_rank(nccl):
    nccl(splits_on_gpus)


def unevenly_on_gpus(rank):
    exchange_unevenly(rank, torch.device("cuda", rank))


def test_nccl_with_uneven_messages(nccl):
    nccl(unevenly_on_gpus)


def test_an_error_from_gpu_to_gpu_is_told_once(nccl):
    sent, (name, message) = nccl(relay_mixed_up, "cuda")
    assert sent is None and name == "RuntimeError" and "different codecs" in message


def sizes_or_not_on_gpus(rank):
    exchange_with_sizes_or_without(rank, torch.device("cuda", rank))


def test_nccl_with_sizes_that_one_rank_leaves_out(nccl):
    nccl(sizes_or_not_on_gpus)


def mix_up_on_gpus(rank):
    """Codecs that both ranks know, and one that the other does not: their messages have other sizes."""
    device, x = torch.device("cuda", rank), tensor_of(0, torch.float32)
    learned, x = Codec.learn(x), x.to(device)
    codecs = [Codec(learned.codebook, learned.slot_bytes, share) for share in (40.0, 900.0, 300.0)]
    out, found = torch.empty(2 * COUNT, device=device), []
    for call in (lambda k: all_gather_into_tensor(out, x, codec=codecs[k]), lambda k: broadcast(x, 0, codec=codecs[k])):
        call(0)
        call(1)
        found += [raised(lambda: call(rank)), raised(lambda: call(2 * rank))]
    return found


def test_nccl_with_codecs_mixed_up(nccl):
    for found in nccl(mix_up_on_gpus):
        for name, message in found:
            assert name in ("ValueError", "RuntimeError") and "rank" in message


def lose_on_gpus(rank):
    process.said.add(_exchange.SENT_TWICE)
    device, learned = torch.device("cuda", rank), Codec.learn(tensor_of(9))
    codec = Codec(learned.codebook, learned.slot_bytes, 0.0)
    xs = [tensor_of(other, count=1_000_000, scale=1e20 if other == 0 else 0.02).to(device) for other in range(2)]
    out, told, back = (
        torch.zeros(2_000_000, dtype=torch.bfloat16, device=device),
        xs[rank].clone(),
        torch.zeros_like(xs[0]),
    )
    all_gather_into_tensor(out, xs[rank], codec=codec)
    broadcast(told, 0, codec=codec)
    all_to_all_single(back, xs[rank], codec=codec)
    assert_same_bits(out.cpu(), torch.cat(xs).cpu())
    assert_same_bits(told.cpu(), xs[0].cpu())
    assert_same_bits(back.cpu(), torch.cat([x.chunk(2)[rank] for x in xs]).cpu())


def test_nccl_sends_lost_rows_again(nccl):
    nccl(lose_on_gpus)


def capture(rank):
    device, x = torch.device("cuda", rank), tensor_of(rank, count=1_000_000)
    x, out = x.to(device), torch.zeros(2_000_000, dtype=x.dtype, device=device)
    all_gather_into_tensor(out, x, level="default")  # makes the communicator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_gather_into_tensor(out, x, level="default")
    out.zero_()
    graph.replay()
    assert_same_bits(out.cpu(), torch.cat([tensor_of(other, count=1_000_000) for other in range(2)]))


def test_a_graph_captures_torchs_own_call(nccl):
    nccl(capture)


def test_work_is_waited_for_after_an_interrupt():
    """Once each, and then the note is read."""
    waited = []

    class Interrupting(dist.Work):
        def wait(self, *_):
            waited.append(self)
            if len(waited) == 1:
                raise KeyboardInterrupt

    parts = [Interrupting(), Interrupting()]
    work = NotedWork(list(parts), lambda: waited.append("note"))
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.wait() and waited == [*parts, "note"]


def test_work_that_has_failed_is_waited_for_once():
    """Each call raises the error, and the note is not read."""
    waited = []

    class Failing(dist.Work):
        def wait(self, *_):
            waited.append(self)
            raise RuntimeError("the other rank is gone")

    part = Failing()
    work = NotedWork([part, Failing()], lambda: waited.append("note"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is gone"):
            work.wait()
    assert waited == [part]
