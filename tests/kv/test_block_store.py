"""ibp.kv.BlockStore: it keeps blocks of groups of layers by job, and loses none."""

import itertools

import pytest
import torch

from helpers import assert_same_bits
from ibp.kv import BlockStore
from ibp.kv._engines import _Pool
from interrupts import Interrupted, InterruptedOperations, interrupt_at

BLOCK_BYTES = 4096


def blocks_of(count, seed=0, noise=False, block_bytes=BLOCK_BYTES):
    generator = torch.Generator().manual_seed(seed)
    if noise:
        return torch.randint(-128, 128, (count, block_bytes), dtype=torch.int8, generator=generator)
    return torch.randn(count, block_bytes // 2, generator=generator).mul(0.02).bfloat16().view(torch.int8)


def store_of(*groups, num_pages=40, pool_bytes=30 * BLOCK_BYTES):
    return BlockStore(groups, num_pages=num_pages, pool_bytes=pool_bytes, dtype=torch.bfloat16)


def finish(store, job):
    store.wait({job})
    ((done, success, _),) = store.finished()
    assert done == job
    return success


def test_blocks_come_back():
    layers = [blocks_of(40, seed) for seed in range(2)]
    before = [layer.clone() for layer in layers]
    store = store_of(layers, pool_bytes=2 * 30 * BLOCK_BYTES)
    store.store(1, {0: ([5, 6, 9], [1, 2, 3])})
    assert finish(store, 1) and store.finished() == []
    store.load(2, {0: ([9, 5], [20, 21])}, urgent=True)
    assert finish(store, 2)
    for layer, old in zip(layers, before):
        assert_same_bits(layer[20:22], old[[3, 1]])
        assert_same_bits(layer[:20], old[:20])
    (pool,) = store.pools
    assert pool.num_tensors == 2 and pool.pool_bytes <= 2 * 30 * BLOCK_BYTES and pool.codebook.codec[2] == 2


def test_a_page_is_of_the_group_that_stored_it_last():
    wild, tame = blocks_of(40, noise=True), blocks_of(40, 1, block_bytes=2048)
    store = store_of([wild], [tame], pool_bytes=45 * BLOCK_BYTES)
    pages = list(range(40))
    store.store(1, {0: (pages, pages)})
    finish(store, 1)
    assert store.num_raw_pages > 0
    store.store(2, {1: (pages, pages)})
    finish(store, 2)
    assert store.num_raw_pages == 0 and sorted(pool.page_bytes for pool in store.pools) == [2048, BLOCK_BYTES]


def test_pages_without_room_are_kept_until_they_are_stored_anew():
    wild = blocks_of(40, noise=True)
    before, pages = wild.clone(), list(range(40))
    store = store_of([wild])
    store.store(1, {0: (pages, pages)})
    store.wait()
    wild.zero_()  # the blocks are the caller's once the job has been waited for
    assert store.num_raw_pages > 0
    store.finished()
    store.load(2, {0: (pages, pages)})
    assert finish(store, 2)
    assert_same_bits(wild, before)


@pytest.mark.parametrize("is_raw_before", [False, True])
@pytest.mark.parametrize("is_raw_after", [False, True])
def test_a_load_reads_what_was_stored_last(is_raw_before, is_raw_after):
    """Also if the job that stored it is not reported yet."""
    wild, tame = blocks_of(40, noise=True), blocks_of(40, 1)
    layer = torch.cat([wild, tame, torch.zeros_like(wild)])
    store, pages = store_of([layer], pool_bytes=32 * BLOCK_BYTES), list(range(40))
    tame_pages = {0: (pages, [page + 40 for page in pages])}
    store.store(0, tame_pages)  # its codebook is learned from these
    finish(store, 0)
    store.store(1, {0: (pages, pages)} if is_raw_before else tame_pages)
    finish(store, 1)
    assert bool(store.num_raw_pages) == is_raw_before
    store.store(2, {0: (pages, pages)} if is_raw_after else tame_pages)
    store.load(3, {0: (pages, [page + 80 for page in pages])})
    store.wait()
    assert [(job, success) for job, success, _ in store.finished()] == [(2, True), (3, True)]
    assert_same_bits(layer[80:], (layer[:40] if is_raw_after else layer[40:80]))


def test_a_job_whose_end_is_interrupted_is_settled_later(monkeypatch):
    """Pages that found no room are copied from their blocks, for which there may be no memory."""
    wild = blocks_of(40, noise=True)
    before, pages, store = wild.clone(), list(range(40)), store_of([wild])
    with monkeypatch.context() as patched:
        patched.setattr(_Pool, "keep", lambda *_: 1 / 0)
        store.store(1, {0: (pages, pages)})
        with pytest.raises(ZeroDivisionError):
            store.wait()
    assert store.finished() == [(1, True, None)]
    wild.zero_()
    store.load(2, {0: (pages, pages)})
    assert finish(store, 2)
    assert_same_bits(wild, before)


@pytest.mark.parametrize("is_before", [False, True])
def test_interrupted_jobs_lose_no_page(is_before):
    """All pages find room afterwards, as if the interrupted jobs had not been begun."""
    blocks, pages = blocks_of(40), list(range(40))
    before, store = blocks.clone(), store_of([blocks])
    for number in itertools.count():
        try:
            with InterruptedOperations([number], is_before):
                store.store(number, {0: (pages, pages)})
        except Interrupted:
            continue
        break
    assert number > 3
    store.wait()
    store.finished()
    blocks.zero_()
    store.load(-1, {0: (pages, pages)})
    assert finish(store, -1)
    assert_same_bits(blocks, before)


def test_interrupted_stores_mix_no_page():
    """A page has the old blocks of all of its tensors, or the new ones, or it is not stored."""
    sizes = BLOCK_BYTES, BLOCK_BYTES // 2
    old, new = ([blocks_of(4, seed + size, block_bytes=size) for size in sizes] for seed in (0, 1))
    for moment in itertools.count(0, 4):
        layers = [blocks.clone() for blocks in old]
        store = store_of(layers, num_pages=3, pool_bytes=4 * BLOCK_BYTES)
        store.store(1, {0: ([0, 1, 2], [0, 1, 2])})
        assert finish(store, 1)
        for layer, blocks in zip(layers, new):
            layer.copy_(blocks)
        _, interrupts = interrupt_at(moment, None, lambda: store.store(2, {0: ([0, 1], [0, 1])}))
        store.wait()
        store.finished()
        for page in range(3):
            store.load(3, {0: ([page], [3])})
            if finish(store, 3):
                of = [[blocks[page] for blocks in each] for each in (old, new)]
                assert [layer[3].tolist() for layer in layers] in [
                    [block.tolist() for block in blocks] for blocks in of
                ]
            else:
                assert page < 2 and interrupts
        if not interrupts:
            break
    assert moment > 5


def test_an_interrupted_store_after_one_that_nobody_waited_for():
    """The page has the bits of one of the stores, or is not stored, whatever is in the blocks later."""
    old, new = ([blocks_of(2, seed + size, block_bytes=size) for size in (BLOCK_BYTES, BLOCK_BYTES // 2)]
                for seed in (0, 1))  # fmt: skip
    for moment in itertools.count(0, 3):
        layers = [torch.stack((first[0], second[0])) for first, second in zip(old, new)]
        store = store_of(layers, num_pages=2, pool_bytes=4 * BLOCK_BYTES)
        store.store(1, {0: ([1], [0])})
        _, interrupts = interrupt_at(moment, None, lambda: store.store(2, {0: ([1], [1])}))
        for layer in layers:
            layer.zero_()
        store.finished()
        store.load(3, {0: ([1], [0])})
        if finish(store, 3):
            found = [layer[0].tolist() for layer in layers]
            assert found in [[blocks[0].tolist() for blocks in each] for each in (old, new)]
        else:
            assert interrupts
        if not interrupts:
            break
    assert moment > 5


@pytest.mark.parametrize("stores", [True, False])
def test_interrupted_waits_report_each_job_once(stores):
    """And a load of a page that is not stored has failed, whichever call finds it."""
    for moment in itertools.count():
        layers = [blocks_of(4), blocks_of(4, block_bytes=BLOCK_BYTES // 2)]
        store = store_of(layers, num_pages=3, pool_bytes=4 * BLOCK_BYTES)
        store.store(1, {0: ([0], [0])})
        assert finish(store, 1)
        if stores:
            store.store(2, {0: ([1], [1])})
        else:
            store.load(2, {0: ([2], [3])})
        _, interrupts = interrupt_at(moment, None, store.wait)
        assert finish(store, 2) == stores
        store.load(3, {0: ([0], [3])})
        assert finish(store, 3)  # although another one has failed
        if not interrupts:
            break
    assert moment > 5


def test_loads_of_pages_that_are_not_there():
    store = store_of([blocks_of(10)])
    with pytest.raises(RuntimeError, match="before any store"):
        store.load(1, {0: ([0], [0])})
    store.store(2, {0: ([0], [0])})
    assert finish(store, 2)
    store.load(3, {0: ([1], [1])})
    assert not finish(store, 3)


def test_the_last_page_counts_where_a_block_is_named_twice():
    layer = blocks_of(10)
    store = store_of([layer])
    store.store(1, {0: ([0, 1], [4, 5])})
    store.load(2, {0: ([0, 1], [7, 7])})
    assert store.finished() == [(1, True, None), (2, True, None)]
    assert_same_bits(layer[7], layer[5])


def test_some_tensors_of_a_page():
    """A load of some tensors leaves the others as they are, of coded pages with two sizes of blocks and of raw ones."""
    layers = [blocks_of(10, 1), blocks_of(10, 2, block_bytes=2048), blocks_of(10, noise=True), blocks_of(10, 3)]
    before = [layer.clone() for layer in layers]
    store, pages = store_of(layers, num_pages=10, pool_bytes=10 * 10 * 1024), list(range(10))
    store.store(1, {0: (pages, pages[::-1])})
    assert finish(store, 1) and 0 < store.num_raw_pages <= 10
    for job, wanted in enumerate((range(1, 3), range(3, 9)), 2):
        store.load(job, {0: (pages, pages)}, tensors=wanted)
        assert finish(store, job)
        for number, (layer, old) in enumerate(zip(layers, before)):
            assert_same_bits(layer, old.flip(0) if 1 <= number < wanted.stop else old)


def test_groups_with_blocks_of_one_size_share_pages():
    """A page comes from the tensors of one group and goes to those of another one, of other strides."""
    wide = [blocks_of(10, seed) for seed in range(2)]
    narrow = [blocks_of(1, 5), blocks_of(3, 6, block_bytes=2 * BLOCK_BYTES)[:, :BLOCK_BYTES]]
    store = store_of(wide, narrow, pool_bytes=60 * BLOCK_BYTES)
    store.store(1, {0: ([3], [7])})
    store.load(2, {1: ([3], [0])})
    store.wait()
    assert [success for _, success, _ in store.finished()] == [True, True] and len(store.pools) == 1
    for from_, to in zip(wide, narrow):
        assert_same_bits(to[0], from_[7])


def test_kinds_of_blocks_have_codebooks_of_their_own():
    """Keys are larger than values: together they need larger slots."""
    keys, values = (blocks_of(40, seed).view(torch.bfloat16).mul_(scale) for seed, scale in ((0, 100), (1, 0.1)))
    layers, pages = [keys.view(torch.int8), values.view(torch.int8)], list(range(40))
    raw = []
    for kinds in (None, [[0, 1]]):
        options = {"num_pages": 40, "pool_bytes": 2 * 29 * BLOCK_BYTES, "dtype": torch.bfloat16, "kinds": kinds}
        store = BlockStore([layers], **options)
        store.store(1, {0: (pages, pages)})
        assert finish(store, 1) and len(store.pools) == (1 if kinds is None else 2)
        raw.append(store.num_raw_pages)
        before = [layer.clone() for layer in layers]
        store.load(2, {0: (pages, pages[::-1])})
        assert finish(store, 2)
        for layer, old in zip(layers, before):
            assert_same_bits(layer, old.flip(0))
    assert raw[0] > raw[1] == 0
    with pytest.raises(ValueError, match=r"kinds are of \[1\] tensors by group; wanted \[2\]"):
        BlockStore([layers], num_pages=1, pool_bytes=1 << 16, dtype=torch.bfloat16, kinds=[[0]])


def test_when_blocks_may_find_no_room():
    """Before their jobs are done the store counts what they need at most, afterwards what is in use."""
    layer, pages = blocks_of(40), list(range(40))
    store = store_of([layer])
    assert not store.may_lose
    store.store(1, {0: (pages[:1], pages[:1])})
    assert not store.may_lose  # overflow has room for a raw page
    store.store(2, {0: (pages, pages)})
    assert store.may_lose
    store.wait()
    assert not store.may_lose and store.num_raw_pages == 0
    layer[:] = blocks_of(40, noise=True)
    store.store(3, {0: (pages, pages)})
    assert store.may_lose
    store.finished()
    assert store.num_raw_pages > 0


def test_close_frees_the_pools():
    store = store_of([blocks_of(10, noise=True)], num_pages=10, pool_bytes=3 * BLOCK_BYTES)
    store.store(1, {0: (list(range(10)), list(range(10)))})
    store.close()
    assert store.pools == [] and store.num_raw_pages == 0 and store.finished() == []


def test_on_a_gpu(cuda):
    layer = blocks_of(40).to(cuda)
    layer[::8] = blocks_of(5, 3, noise=True).to(cuda)
    before, pages = layer.clone(), list(range(40))
    store = store_of([layer])
    for job in range(4):
        store.store(job, {0: (pages[job::4], pages[job::4])})
    store.wait()
    layer.zero_()
    assert all(success and seconds > 0 for _, success, seconds in store.finished())
    store.load(9, {0: (pages, pages)})
    assert finish(store, 9)
    assert_same_bits(layer, before)


def test_blocks_that_are_no_rows_of_bytes():
    for wrong in (torch.zeros(4, dtype=torch.int8), torch.zeros(4, 4096, dtype=torch.int16)):
        with pytest.raises(ValueError, match="bytes of a block"):
            store_of([], [wrong])
