"""`StackFetcher` and the operation `take_matrices`: matrices of several stacks through their caches."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ibp
from helpers import assert_same_bits, embedding, in_threads
from ibp._rows.table import handle_on
from ibp.cache._stacks import StackFetcher

CPU = torch.device("cpu")
MATRICES = 12
ROWS, COLUMNS = (3, 5), (60, 64)  # of a matrix of each stack


def stacks_of():
    return [embedding(MATRICES * rows, columns, seed=rows) for rows, columns in zip(ROWS, COLUMNS)]


class Stacks:
    """Two stacks, the second one with transposed matrices, and their fetcher. cache_bytes: of each cache; 0: the caches
    are static and hold one row."""

    def __init__(self, device=CPU, cache_bytes=1 << 16, beside=None):
        self.values = [x.to(device) for x in stacks_of()]
        home = {"device": "cpu", "memory": "host"} if device == CPU else {"memory": "pinned"}
        self.tables = [ibp.compress(x, **home) for x in self.values]
        options = {"policy": "lru"} if cache_bytes else {}
        self.caches = [
            ibp.RowCache(table, cache_bytes or table.row_bytes + 512, [0], devices=device, **options)
            for table in self.tables
        ]
        (rows, other_rows), (columns, other_columns) = ROWS, COLUMNS
        self.likes = [
            torch.empty(0, rows, columns, device=device),
            torch.empty_strided(
                (0, other_columns, other_rows), (other_rows * other_columns, 1, other_columns), device=device
            ),
        ]
        self.num_spare = torch.zeros(1, dtype=torch.int64, device=device)
        self.fetcher = StackFetcher(self.caches, MATRICES, self.likes, [0, 0 if cache_bytes else 32], beside)

    def wanted(self, numbers):
        """The matrices of a list, in the form of the results."""
        first, second = (x.view(MATRICES, rows, -1)[numbers] for x, rows in zip(self.values, ROWS))
        return first, second.mT

    def take(self, ids, num_slots=None):
        num_slots = max(2, ids.numel()) if num_slots is None else num_slots
        return self.fetcher.take(ids, num_slots, self.num_spare)

    def check(self, ids, found):
        """Checks the results of a call whose ids are in range."""
        slots, held, _, *stacks = found
        used = ids.unique().long()
        assert slots.shape == ids.shape and slots.dtype == torch.int64 and torch.equal(held[slots], ids.long())
        assert torch.equal(held[: len(used)], used) and bool((held[len(used) :] == -1).all())
        for stack, wanted in zip(stacks, self.wanted(used), strict=True):
            assert stack.shape == (len(held), *wanted.shape[1:]) and stack.stride(-1) == wanted.stride(-1)
            assert_same_bits(stack[: len(used)], wanted)


@given(
    numbers=st.lists(st.tuples(st.integers(0, MATRICES - 1), st.integers(0, MATRICES - 1)), max_size=9),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    cache_bytes=st.sampled_from([0, 12_000, 1 << 16]),
)
def test_matrices(numbers, dtype, cache_bytes):
    stacks = Stacks(cache_bytes=cache_bytes)
    ids, spare = torch.tensor(numbers, dtype=dtype).reshape(-1, 2), 0
    for _ in range(2):
        found = stacks.take(ids)
        stacks.check(ids, found)
        spare += int((found[1] < 0).sum())
        assert int(stacks.num_spare) == spare


def test_counts():
    """Rows are looked up once; slots that are left over ask for the first row, which is there."""
    stacks, ids = Stacks(), torch.tensor([[3, 3], [7, 1]])
    for call in range(3):
        stacks.take(ids)
        for cache, rows in zip(stacks.caches, ROWS):
            stats = cache.stats()
            assert stats.misses == 3 * rows and stats.hits == 3 * rows * call + rows * (call + 1)


def test_the_caches_share_a_lock():
    """One operation uses both, also while other threads look rows up in one of them."""
    stacks = Stacks()
    assert stacks.caches[0]._state.lock is stacks.caches[1]._state.lock

    def fetch(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            ids = torch.randint(0, MATRICES, (3, 2), generator=generator)
            stacks.check(ids, stacks.take(ids))

    def look_up():
        for _ in range(30):
            assert_same_bits(stacks.caches[1].index_select([0, 7]), stacks.values[1][[0, 7]])

    in_threads(*(functools.partial(fetch, seed) for seed in range(3)), look_up)


def test_damaged_rows():
    stacks = Stacks()
    stacks.tables[1].lengths[4 * ROWS[1] + 2] = 4000
    with pytest.raises(ibp.CorruptTableError, match=f"row {4 * ROWS[1] + 2}"):
        stacks.take(torch.tensor([1, 4]))
    stacks.check(torch.tensor([1, 5]), stacks.take(torch.tensor([1, 5])))


@pytest.mark.parametrize("bad", [-1, MATRICES])
def test_matrices_that_are_not_there(bad):
    stacks = Stacks()
    with pytest.raises(IndexError):
        stacks.take(torch.tensor([1, bad]))


def for_a_gpu(handle):
    """A handle that says that its table is for the first GPU."""
    numbers = handle.clone()
    numbers.view(torch.int64)[1] = 0
    return numbers


def wrong_arguments():
    """(what the message says, place of the argument, wrong value as a function of the right one)."""
    yield "same length", 0, lambda tables: tables[:1]
    yield "same length", 1, lambda caches: caches[:1]
    yield "fault and fault share memory", 0, lambda tables: [tables[0], tables[0]]
    yield "must be on the CPU", 0, lambda tables: [for_a_gpu(tables[0]), tables[1]]
    yield "cache and cache share memory", 1, lambda caches: [caches[0], caches[0]]
    yield "ids must be int32 or int64", 2, lambda ids: ids.short()
    yield "ids is not contiguous", 2, lambda ids: ids.t()
    yield "likes have 1 dimensions", 3, lambda likes: [likes[0], torch.empty(0)]
    yield "no elements in a dimension", 3, lambda likes: [torch.empty(0, 0, 60), likes[1]]
    yield "960 bytes, 720 are needed", 3, lambda likes: [torch.empty(0, 4, 60), likes[1]]
    yield "360 bytes, 720 are needed", 3, lambda likes: [likes[0].bfloat16(), likes[1]]
    for sizes, strides in (
        ((3, 60), (240, 80, 1)),
        ((3, 60), (240, 60, 1)),
        ((3, 60), (180, 0, 1)),
        ((3, 3, 20), (180, 40, 40, 1)),
    ):
        like = torch.empty_strided((0, *sizes), strides)
        yield "leave gaps or overlap", 3, lambda likes, like=like: [like, likes[1]]
    yield "a stack has 36 rows", 4, lambda number: number + 1
    yield "a stack has 36 rows", 4, lambda number: 0
    yield "list_matrices: an argument is outside", 5, lambda slots: 1
    yield "num_slots is -1", 5, lambda slots: -1
    yield "a stack has 36 rows", 6, lambda rows: [5, 3]
    yield "num_rows is 0", 6, lambda rows: [0, 5]
    yield "num_rows is ", 6, lambda rows: [2**62, 5]
    yield "num_spare has the wrong dtype", 7, lambda spare: spare.int()
    yield "max_sms is -1", 8, lambda sms: [0, -1]


@pytest.mark.parametrize(("message", "place", "change"), list(wrong_arguments()))
def test_wrong_arguments(message, place, change):
    stacks = Stacks()
    arguments = [
        [handle_on(table, CPU).table for table in stacks.tables],
        [cache._state.described_on(CPU) for cache in stacks.caches],
        torch.tensor([[1, 4], [4, 2]]),
        stacks.likes,
        MATRICES,
        4,
        list(ROWS),
        stacks.num_spare,
        [0, 0],
        0,
        [],
    ]
    torch.ops.ibp.take_matrices.default(*arguments)
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ibp.take_matrices.default(*arguments)
    stacks.check(torch.tensor([2, 9]), stacks.take(torch.tensor([2, 9])))


# ---- GPUs ----


def on_gpu(cuda, **options):
    return Stacks(cuda, beside=torch.cuda.Stream(cuda, priority=-1), **options)


@pytest.mark.parametrize("cache_bytes", [0, 12_000, 1 << 16])
def test_gpu_matrices_are_ordered(cuda, cache_bytes):
    """Results are right at once where the stream has waited, and memory is used again only after the last wait, while
    work before and after the calls keeps both streams busy."""
    stacks, draws = on_gpu(cuda, cache_bytes=cache_bytes), torch.Generator().manual_seed(3)
    for number, stream in enumerate([torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)] * 20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000 * (number % 3))
            ids = torch.randint(0, MATRICES, (4, 2), generator=draws, pin_memory=True).to(cuda, non_blocking=True)
            slots, held, work, *found = stacks.take(ids)
            copies = []
            for place, stack in enumerate(found):
                stacks.fetcher.wait_for(place, stream)
                copies.append(stack.clone())
            memory = [part.untyped_storage() for part in (work, *found)]
            sizes = [part.nbytes() for part in memory]
            kept = [slots.clone(), held.clone(), work.clone()]
            del slots, held, work, found, memory, stack
            for size in sizes:
                torch.full((size,), 255, dtype=torch.uint8, device=cuda)  # uses the memory again
            stacks.check(ids, [*kept, *copies])
    assert not cache_bytes or all(cache.stats().hits and cache.stats().misses for cache in stacks.caches)


def test_gpu_counts_and_bits_are_those_of_the_cpu(cuda):
    near, far, draws = on_gpu(cuda, cache_bytes=12_000), Stacks(cache_bytes=12_000), torch.Generator().manual_seed(4)
    current = torch.cuda.current_stream(cuda)
    for number in range(20):
        ids = torch.randint(0, MATRICES, (1 + number % 3, 2), generator=draws)
        found = near.take(ids.to(cuda))
        near.fetcher.wait_for(1, current)
        for mine, wanted in zip(found[:2], far.take(ids)[:2]):
            assert torch.equal(mine.cpu(), wanted)
        near.check(ids.to(cuda), found)
    assert near.num_spare.item() == far.num_spare.item()
    for mine, wanted in zip(near.caches, far.caches):
        assert mine.stats().hits + mine.stats().misses == wanted.stats().hits + wanted.stats().misses


def test_gpu_graphs(cuda):
    """A graph has the stream beside; replays take other ids, before and after calls outside of the graph."""
    stacks, ids = on_gpu(cuda), torch.zeros(3, 2, dtype=torch.int64, device=cuda)
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        stacks.take(ids)
        stacks.fetcher.wait_for(1, stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = stacks.take(ids)
        for place in (0, 1):
            stacks.fetcher.wait_for(place, stream)
    for seed in range(6):
        ids.copy_(torch.randint(0, MATRICES, (3, 2), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        stacks.check(ids, found)
        current = torch.cuda.current_stream(cuda)
        other = stacks.take(ids.flip(0).contiguous())
        stacks.fetcher.wait_for(1, current)
        stacks.check(ids.flip(0), other)
        torch.cuda.synchronize(cuda)


def test_gpu_threads(cuda):
    """Threads with streams of their own share the stream beside and its events."""
    stacks = on_gpu(cuda, cache_bytes=12_000)

    def fetch(seed):
        stream, draws = torch.cuda.Stream(cuda), torch.Generator().manual_seed(seed)
        with torch.cuda.stream(stream):
            for _ in range(30):
                ids = torch.randint(0, MATRICES, (3, 2), generator=draws).to(cuda)
                found = stacks.take(ids)
                stacks.fetcher.wait_for(1, stream)
                stacks.check(ids, found)

    in_threads(*(functools.partial(fetch, seed) for seed in range(4)))


def test_gpu_needs_a_stream_and_events(cuda):
    stacks = on_gpu(cuda)
    ids = torch.tensor([1, 2], device=cuda)
    right, events = stacks.fetcher._address, stacks.fetcher._addresses
    for address, addresses in ((0, events), (right, events[1:])):
        with pytest.raises(RuntimeError, match="one for each stack and one more are needed"):
            torch.ops.ibp.take_matrices.default(
                [handle_on(table, cuda).table for table in stacks.tables],
                [cache._state.described_on(cuda) for cache in stacks.caches],
                ids,
                stacks.likes,
                MATRICES,
                2,
                list(ROWS),
                None,
                [0, 0],
                address,
                addresses,
            )


def test_gpu_notes_matrices_that_are_not_there(cuda):
    stacks, current = on_gpu(cuda), torch.cuda.current_stream(cuda)
    _, held, _, *found = stacks.take(torch.tensor([3, MATRICES], device=cuda))
    stacks.fetcher.wait_for(1, current)
    assert held.tolist() == [3, MATRICES]
    for stack, wanted, cache in zip(found, stacks.wanted([3]), stacks.caches):
        assert_same_bits(stack[:1], wanted)
        assert not stack[1].any()
        with pytest.raises(IndexError):
            cache.check()
