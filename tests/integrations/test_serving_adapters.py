"""ibp.integrations.vllm, .sglang and .lmcache, with the stand-ins in stubs/ for the classes that they derive from."""

import dataclasses
import functools
import importlib
import importlib.metadata
import os
import random
import re
import select
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import assert_same_bits, in_threads
from ibp.integrations.shared import dtype_of

STUBS = Path(__file__).parent / "stubs"
ENGINES = ("vllm", "sglang", "lmcache")
PAGE = (2, 16, 2, 32)  # K and V, tokens, heads, head dim: 4,096 bytes of BF16


@pytest.fixture
def framework(monkeypatch):
    """Imports an adapter and a stub's module, which nobody else sees."""

    def imported(name, module):
        monkeypatch.syspath_prepend(str(STUBS))
        adapter = importlib.reload(importlib.import_module(f"ibp.integrations.{name}"))
        return adapter, importlib.import_module(module)

    before = set(sys.modules)
    yield imported
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ENGINES or name.startswith("ibp.integrations."):
            del sys.modules[name]


def pages_of(count, seed=0, spread=0.02):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, *PAGE, generator=generator) * spread).to(torch.bfloat16)


def noise(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (count, *PAGE), dtype=torch.int16, generator=generator).view(torch.bfloat16)


# ---- vLLM ----


def config_of(blocks_per_chunk, layers, block_bytes=4096, **options):
    """vLLM's OffloadingConfig, for two workers; after its module is there."""
    of = importlib.import_module("vllm.v1.kv_offload.config")
    return of.OffloadingConfig(
        groups=(of.OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=block_bytes * layers,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": 2 * 40 * block_bytes * layers * blocks_per_chunk} | options,
        engine_id="some",
        model=of.OffloadingModelConfig("some", "auto"),  # as vLLM does without --kv-cache-dtype
        cache=of.OffloadingCacheConfig(16, blocks_per_chunk),
        parallel=of.OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, True),
    )


def caches_of(base, layers, groups, device="cpu"):
    """vLLM's tensors, of int8 and with padding behind each block, and how groups of layers use them."""
    tensors = []
    for layer in layers:
        padded = torch.zeros(len(layer), 4096 + 64, dtype=torch.int8, device=device)
        padded[:, :4096] = layer.reshape(len(layer), -1).view(torch.int8)
        tensors.append(base.CanonicalKVCacheTensor(padded, 4096 + 64))
    refs = [[base.CanonicalKVCacheRef(number, 4096) for number in group] for group in groups]
    return base.CanonicalKVCaches(tensors, refs)


def blocks_of(caches, number):
    return caches.tensors[number].tensor[:, :4096].contiguous().view(torch.bfloat16).view(-1, *PAGE)


def finish(worker, job):
    worker.wait({job})
    results = worker.get_finished()
    assert [result.job_id for result in results] == [job] and all(result.success for result in results)
    return results[0]


def test_the_default_dtype_of_a_cache_is_bf16():
    assert dtype_of("auto") is torch.bfloat16
    assert dtype_of("fp8_e5m2") is torch.float8_e5m2 and dtype_of("some other") is torch.uint8


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_vllm_blocks_come_back(framework, blocks_per_chunk):
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    spec = adapter.IBPOffloadingSpec(config_of(blocks_per_chunk, 2))
    assert spec.num_chunks == int(40 * 1.4) and spec.build_metric_definitions({})
    layers = [pages_of(40), pages_of(40, seed=1)]
    caches = caches_of(base, layers, [[0, 1]])
    worker, manager = spec.get_worker(caches), spec.get_manager()
    assert worker is spec.get_worker(caches) and manager is spec.get_manager() and worker.blocks.pools == []
    blocks = random.Random(0).sample(range(40), 2 * blocks_per_chunk)
    stored = manager.prepare_store([b"a", b"b"], None)
    source = base.GPULoadStoreSpec(blocks, [len(blocks)], [0])
    assert worker.submit_store(7, source, stored.store_spec)
    result = finish(worker, 7)
    assert result.transfer_size == 2 * 4096 * len(blocks) and worker.get_finished() == []
    manager.complete_store([b"a", b"b"], None)
    (store,) = worker.blocks.pools
    assert store.pool_bytes <= spec.pool_bytes and store.gain >= 1.39
    assert store.codebook.codec[2] == 2  # elements of BF16, not of int8
    for tensor in caches.tensors:
        tensor.tensor.zero_()
    skipped = blocks_per_chunk // 2  # the first GPU blocks of the first chunk are there already
    targets = list(range(len(blocks) - skipped))
    loads = base.GPULoadStoreSpec(targets, [len(targets)], [4 * blocks_per_chunk + skipped])
    assert worker.submit_load(8, manager.prepare_load([b"a", b"b"], None), loads)
    finish(worker, 8)
    for number, layer in enumerate(layers):
        assert_same_bits(blocks_of(caches, number)[targets], layer[blocks[skipped:]])
        assert not caches.tensors[number].tensor[len(targets) :].any()
    worker.shutdown()
    assert worker.blocks.pools == [] and worker.get_finished() == []


def test_vllm_groups_of_layers(framework):
    """Two groups that use the same tensors for blocks of their own, and one of fewer layers."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    layers = [pages_of(30, seed=seed) for seed in range(3)]
    caches = caches_of(base, layers, [[0, 1], [2]])
    worker = adapter.IBPOffloadingSpec(config_of(2, 2)).get_worker(caches)
    source = base.GPULoadStoreSpec([3, 4, 5, 9, 8], [3, 2], [0, 2])
    worker.submit_store(1, source, base.BlockIDsLoadStoreSpec([10, 11, 30]))
    finish(worker, 1)
    target = base.GPULoadStoreSpec([20, 21, 22, 23], [2, 2], [1, 2])
    worker.submit_load(2, base.BlockIDsLoadStoreSpec([10, 11, 30]), target)
    finish(worker, 2)
    for number in (0, 1):
        assert_same_bits(blocks_of(caches, number)[20:22], layers[number][4:6])
    assert_same_bits(blocks_of(caches, 2)[22:24], layers[2][[9, 8]])
    assert_same_bits(blocks_of(caches, 2)[:22], layers[2][:22])


def test_vllm_keeps_what_finds_no_room(framework):
    """No transfer fails: pages that do not compress are kept as they are, until their chunk is stored anew."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    layers = [torch.cat([pages_of(20), noise(20)])]
    caches = caches_of(base, layers, [[0]])
    worker = adapter.IBPOffloadingSpec(config_of(1, 1)).get_worker(caches)
    for block in range(40):
        worker.submit_store(block, base.GPULoadStoreSpec([block], [1], [0]), base.BlockIDsLoadStoreSpec([block]))
        finish(worker, block)
    assert 0 < worker.blocks.num_raw_pages <= 20
    caches.tensors[0].tensor.zero_()
    everything = base.GPULoadStoreSpec(range(40), [40], [0])
    worker.submit_load(100, base.BlockIDsLoadStoreSpec(range(40)), everything)
    assert finish(worker, 100).transfer_size == 40 * 4096
    assert_same_bits(blocks_of(caches, 0), layers[0])
    again = base.GPULoadStoreSpec([*range(20)] * 2, [40], [0])
    worker.submit_store(101, again, base.BlockIDsLoadStoreSpec(range(40)))
    finish(worker, 101)
    assert worker.blocks.num_raw_pages == 0
    worker.submit_load(102, base.BlockIDsLoadStoreSpec(range(40)), everything)
    finish(worker, 102)
    assert_same_bits(blocks_of(caches, 0), layers[0][[*range(20)] * 2])


def test_vllm_a_scheduler_at_work(framework):
    """Chunks are stored, given up and loaded at random, as a scheduler asks for it."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    kv = torch.cat([pages_of(60), noise(4)])
    caches = caches_of(base, [kv, kv.flip(0)], [[0, 1]])
    spec = adapter.IBPOffloadingSpec(
        config_of(2, 2, cpu_bytes_to_use=2 * 12 * 2 * 2 * 4096, ibp_level="fast", ibp_gain=1.3)
    )
    manager, worker, rng, held = spec.get_manager(), spec.get_worker(caches), random.Random(2), {}
    for step in range(40):
        blocks, key = rng.sample(range(50), 2), str(step).encode()
        found = manager.prepare_store([key], None)
        held = {k: v for k, v in held.items() if k not in found.evicted_keys} | {key: blocks}
        worker.submit_store(2 * step, base.GPULoadStoreSpec(blocks, [2], [0]), found.store_spec)
        finish(worker, 2 * step)
        manager.complete_store([key], None)
        wanted = rng.choice(sorted(held))
        worker.submit_load(
            2 * step + 1, manager.prepare_load([wanted], None), base.GPULoadStoreSpec([62, 63], [2], [0])
        )
        finish(worker, 2 * step + 1)
        assert_same_bits(blocks_of(caches, 0)[62:], kv[held[wanted]])
        assert_same_bits(blocks_of(caches, 1)[62:], kv.flip(0)[held[wanted]])
    assert len(held) < 40


def all_noise(framework, count=40):
    """(worker, vLLM's modules, its tensors of one layer) of pages for many of which the pool has no room."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    caches = caches_of(base, [noise(count)], [[0]])
    return adapter.IBPOffloadingSpec(config_of(1, 1)).get_worker(caches), base, caches


def test_vllm_wait_frees_the_blocks(framework):
    """vLLM gives the blocks of a store that it has waited for to other requests, before it asks what is finished."""
    worker, base, caches = all_noise(framework)
    everything, chunks = base.GPULoadStoreSpec(range(40), [40], [0]), base.BlockIDsLoadStoreSpec(range(40))
    worker.submit_store(1, everything, chunks)
    worker.wait({1, 99})
    caches.tensors[0].tensor.fill_(7)
    assert [result.job_id for result in worker.get_finished()] == [1] and worker.blocks.num_raw_pages > 0
    worker.submit_load(2, chunks, everything)
    finish(worker, 2)
    assert_same_bits(blocks_of(caches, 0), noise(40))


def test_vllm_a_page_keeps_its_last_store(framework):
    """After a reset of the cache, chunks are stored anew while older stores of them are under way."""
    worker, base, caches = all_noise(framework)
    chunks = base.BlockIDsLoadStoreSpec(range(20))
    worker.submit_store(1, base.GPULoadStoreSpec(range(20), [20], [0]), chunks)
    worker.submit_store(2, base.GPULoadStoreSpec(range(20, 40), [20], [0]), chunks)
    worker.wait({2})
    worker.submit_store(3, base.GPULoadStoreSpec(range(20, 40), [20], [0]), base.BlockIDsLoadStoreSpec(range(20, 40)))
    assert [result.job_id for result in worker.get_finished()] == [1, 2, 3]
    caches.tensors[0].tensor.zero_()
    worker.submit_load(4, chunks, base.GPULoadStoreSpec(range(20), [20], [0]))
    finish(worker, 4)
    assert_same_bits(blocks_of(caches, 0)[:20], noise(40)[20:])


def test_vllm_expedited_loads_and_the_null_block(framework):
    """A load may name the null block several times; an expedited one is waited for within the step."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    kv = pages_of(10)
    caches = caches_of(base, [kv], [[0]])
    worker = adapter.IBPOffloadingSpec(config_of(2, 1)).get_worker(caches)
    worker.submit_store(1, base.GPULoadStoreSpec([1, 2, 3, 4], [4], [0]), base.BlockIDsLoadStoreSpec([5, 6]))
    finish(worker, 1)
    target = base.GPULoadStoreSpec([0, 0, 8, 9], [4], [0])
    assert worker.submit_load(2, base.BlockIDsLoadStoreSpec([5, 6]), target, expedited=True)
    finish(worker, 2)
    assert_same_bits(blocks_of(caches, 0)[8:], kv[3:5])
    assert_same_bits(blocks_of(caches, 0)[1:8], kv[1:8])


def test_vllm_a_load_of_what_is_not_stored_fails(framework):
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    worker = adapter.IBPOffloadingSpec(config_of(1, 1)).get_worker(caches_of(base, [pages_of(10)], [[0]]))
    worker.submit_store(1, base.GPULoadStoreSpec([1], [1], [0]), base.BlockIDsLoadStoreSpec([5]))
    finish(worker, 1)
    worker.submit_load(2, base.BlockIDsLoadStoreSpec([6]), base.GPULoadStoreSpec([2], [1], [0]))
    worker.wait({2})
    assert [result.success for result in worker.get_finished()] == [False]


def test_vllm_several_sizes_of_pages(framework):
    """A hybrid model: a group of two sizes; one that shares a tensor with it, and uses less of each block."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    wide, narrow = pages_of(40), pages_of(20, seed=1).view(40, -1)
    tensors = [
        wide.reshape(40, -1).clone().view(torch.int8),
        narrow.clone().view(torch.int8),
        wide.clone().view(40, -1),
    ]
    sizes = [4096, 2048, 4096]
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(tensor, size) for tensor, size in zip(tensors, sizes)],
        [
            [base.CanonicalKVCacheRef(number, size) for number, size in enumerate(sizes)]
            * 2,  # layers that share a cache
            [base.CanonicalKVCacheRef(2, 3000)],
        ],
    )
    spec = adapter.IBPOffloadingSpec(config_of(2, 1, block_bytes=4096 + 2048 + 4096))
    worker = spec.get_worker(caches)
    before = [tensor.clone() for tensor in tensors]
    source = base.GPULoadStoreSpec([3, 4, 5, 9, 8, 7], [4, 2], [0, 0])
    worker.submit_store(1, source, base.BlockIDsLoadStoreSpec([10, 11, 30]))
    assert finish(worker, 1).transfer_size == 4 * 2 * sum(sizes) + 2 * 3000
    assert sorted(store.page_bytes for store in worker.blocks.pools) == [2048, 4096]
    assert 0.9 * spec.pool_bytes < sum(store.pool_bytes for store in worker.blocks.pools) <= spec.pool_bytes
    worker.submit_load(
        2, base.BlockIDsLoadStoreSpec([10, 11, 30]), base.GPULoadStoreSpec([20, 21, 22, 31, 32], [3, 2], [1, 0])
    )
    finish(worker, 2)
    for tensor, old, first in zip(tensors, before, (False, False, True)):
        assert_same_bits(tensor[20:23], old[[4, 5, 9]])
        assert_same_bits(tensor[31:33], old[[8, 7]] if first else old[31:33])
        assert_same_bits(tensor[:20], old[:20])


def test_vllm_a_chunk_that_changes_groups(framework):
    """What is kept beside the pools of a chunk's last group is dropped when another group takes the chunk."""
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    layers = [noise(40), pages_of(40)]
    caches = caches_of(base, layers, [[0], [0, 1]])
    caches.tensors[1].tensor = caches.tensors[1].tensor[:, :4096].contiguous()  # a pool of its own
    worker = adapter.IBPOffloadingSpec(config_of(1, 2)).get_worker(caches)
    chunks = base.BlockIDsLoadStoreSpec(range(40))
    worker.submit_store(1, base.GPULoadStoreSpec(range(40), [0, 40], [0, 0]), chunks)
    finish(worker, 1)
    raw = worker.blocks.num_raw_pages
    assert raw > 0
    worker.submit_store(2, base.GPULoadStoreSpec([0] * 40, [40, 0], [0, 0]), chunks)
    finish(worker, 2)
    caches.tensors[0].tensor.zero_()
    worker.submit_load(3, chunks, base.GPULoadStoreSpec(range(40), [40, 0], [0, 0]))
    finish(worker, 3)
    assert_same_bits(blocks_of(caches, 0), layers[0][[0] * 40])
    assert_same_bits(blocks_of(caches, 1), layers[1])


def test_vllm_options_of_its_own(framework):
    """vLLM's spec reads them: for its manager, and for the metrics that it announces."""
    adapter, _ = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    spec = adapter.IBPOffloadingSpec(config_of(1, 1, store_threshold=3, ibp_gain=2))
    manager = spec.get_manager()
    assert spec.num_chunks == manager.num_chunks == 80 and manager.store_threshold == 3
    assert spec.config_info_keys({}) == ("cpu_num_chunks",) and manager.config_info() == [{"cpu_num_chunks": 80}]
    one_copy = dataclasses.replace(config_of(1, 1), replicated_layout=True)  # an MLA model: workers hold the same
    spec = adapter.IBPOffloadingSpec(one_copy)
    assert not spec.replicated_layout and spec.num_chunks == 56  # each worker has a pool of its own


def test_vllm_before_0_30(framework, monkeypatch):
    """Chunks were called blocks; in 0.26 a config had no replicated_layout."""
    _, module = framework("vllm.offloading", "vllm.v1.kv_offload.cpu.spec")

    class Older(module.OffloadingSpec):
        def __init__(self, config):
            super().__init__(config)
            self.num_blocks = config.extra_config["cpu_bytes_to_use"] // config.worker_kv_bytes_per_block // 2
            self._worker = None

        def get_manager(self):
            raise NotImplementedError

        get_worker = get_manager

    monkeypatch.setattr(module, "CPUOffloadingSpec", Older)
    adapter, _ = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    config = config_of(1, 1)
    fields = [field.name for field in dataclasses.fields(config) if field.name != "replicated_layout"]
    older = dataclasses.make_dataclass("OffloadingConfig", fields, frozen=True)
    assert adapter.IBPOffloadingSpec(older(*(getattr(config, name) for name in fields))).num_chunks == 56


def test_vllm_wrong_options(framework):
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    with pytest.raises(ValueError, match="cpu_bytes_to_use"):
        adapter.IBPOffloadingSpec(config_of(1, 1, cpu_bytes_to_use=0))
    with pytest.raises(ValueError, match="ibp_gain is 0.5"):
        adapter.IBPOffloadingSpec(config_of(1, 1, ibp_gain=0.5))
    with pytest.raises(ValueError, match="dtype is 'bfloat17'; wanted one of torch, such as 'bfloat16'"):
        adapter.IBPOffloadingSpec(config_of(1, 1, ibp_dtype="bfloat17"))
    with pytest.raises(ValueError, match="level is 'quick'; wanted one of"):
        adapter.IBPOffloadingSpec(config_of(1, 1, ibp_level="quick")).get_worker(caches_of(base, [pages_of(4)], [[0]]))
    worker = adapter.IBPOffloadingSpec(config_of(1, 1)).get_worker(caches_of(base, [pages_of(4)], [[0]]))
    with pytest.raises(RuntimeError, match="before any store"):
        worker.submit_load(1, base.BlockIDsLoadStoreSpec([0]), base.GPULoadStoreSpec([0], [1], [0]))


def test_vllm_on_the_gpu(framework, cuda):
    adapter, base = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    layers = [torch.cat([pages_of(20), noise(20)]), pages_of(40, seed=1)]
    caches = caches_of(base, layers, [[0, 1]], cuda)
    worker = adapter.IBPOffloadingSpec(config_of(2, 2)).get_worker(caches)
    for job in range(10):
        source = base.GPULoadStoreSpec(range(4 * job, 4 * job + 4), [4], [0])
        worker.submit_store(job, source, base.BlockIDsLoadStoreSpec([2 * job, 2 * job + 1]))
    worker.wait(set(range(10)))
    for expedited in (False, True):
        for tensor in caches.tensors:
            tensor.tensor.zero_()  # the blocks are vLLM's again, before it has asked what is finished
        if not expedited:
            results = worker.get_finished()
            assert len(results) == 10 and all(result.success and result.transfer_time > 0 for result in results)
            assert worker.blocks.num_raw_pages > 0
        chunks, blocks = base.BlockIDsLoadStoreSpec(range(20)), base.GPULoadStoreSpec(range(40), [40], [0])
        worker.submit_load(50 + expedited, chunks, blocks, expedited=expedited)
        finish(worker, 50 + expedited)
        for number, layer in enumerate(layers):
            assert_same_bits(blocks_of(caches, number).cpu(), layer)


# ---- vLLM's tiers ----


@pytest.fixture
def tiered(framework):
    """Makes (a tier behind vLLM's memory, that memory [20, 4096], what makes a job); it is shut down at the end."""
    made = []

    def make(pool_bytes=40 * 4096, chunk_bytes=4096, **options):
        adapter, of = framework("vllm.tiers", "vllm.v1.kv_offload.tiering.base")
        memory = torch.zeros(20, chunk_bytes, dtype=torch.int8)
        view = memoryview(memory.numpy())
        spec = types.SimpleNamespace(config=types.SimpleNamespace(model=types.SimpleNamespace(dtype="bfloat16")))
        tier = adapter.IBPSecondaryTier(spec, view, "IBPSecondaryTier", pool_bytes=pool_bytes, **options)
        made.append((tier, view))
        return tier, memory, lambda job, keys, chunks: of.TransferJob(job, keys, np.array(chunks), False, None)

    yield make
    for tier, view in made:
        tier.shutdown()
        view.release()  # nothing of the tier's refers to the memory


def results_of(tier):
    """By job, whether it has succeeded."""
    tier.drain_jobs()
    return {result.job_id: result.success for result in tier.get_finished_jobs()}


def found(tier, keys):
    return [key for key in keys if tier.lookup(key, None).name == "HIT"]


def test_vllm_tiers_keep_chunks(tiered, caplog):
    with caplog.at_level("INFO", "vllm.ibp"):
        tier, memory, job = tiered()
    assert caplog.messages == ["ibp: a tier keeps chunks of bfloat16 compressed in host memory"]
    assert tier.medium.name == "CPU" and tier.on_new_request(None).policy.name == "CHUNK_LEVEL"
    pages = pages_of(6).view(torch.int8).view(6, -1)
    memory[:6] = pages
    tier.submit_store(job(0, list("abc"), [0, 1, 2]))
    tier.submit_store(job(1, list("cd"), [5, 3]))  # a key's chunk does not change
    assert results_of(tier) == {0: True, 1: True} and tier.get_finished_jobs() == []
    assert found(tier, "abcde") == list("abcd")
    memory.zero_()
    tier.submit_load(job(2, list("dca"), [7, 8, 9]))
    tier.submit_load(job(3, ["a", "none", "b"], [10, 11, 12]))
    assert results_of(tier) == {2: True, 3: False}
    assert_same_bits(memory[[7, 8, 9, 10, 12]], pages[[3, 2, 0, 0, 1]])
    assert not memory[:7].any() and not memory[11].any()


def test_vllm_tiers_make_room(tiered):
    tier, memory, job = tiered(pool_bytes=4 * 4096)
    memory[:] = pages_of(20).view(torch.int8).view(20, -1)
    tier.submit_store(job(0, list(range(5)), list(range(5))))
    assert results_of(tier) == {0: True} and found(tier, range(5)) == list(range(5))  # 4 raw ones would fit
    tier.touch([0, "none"], None)
    tier.submit_store(job(1, [5, 6], [5, 6]))
    assert results_of(tier) == {1: True} and found(tier, range(7)) == [0, 3, 4, 5, 6]
    memory[:] = noise(20).view(torch.int8).view(20, -1)
    tier.submit_store(job(2, list(range(10, 20)), list(range(10))))
    assert results_of(tier) == {2: False}  # some of them found no room


def test_vllm_tiers_with_options(tiered, caplog):
    for options in ({"dtype": "fp8", "level": "fast"}, {"chunk_bytes": 4095}):  # no whole values of BF16
        tier, memory, job = tiered(**options)
        memory.random_(-3, 3)
        right = memory.clone()
        tier.submit_store(job(0, [1], [19]))
        tier.drain_jobs()
        tier.submit_load(job(1, [1], [0]))
        assert results_of(tier) == {0: True, 1: True} and torch.equal(memory[0], right[19])
        tier.submit_store(job(2, [2], [20]))  # there is no such chunk
        assert results_of(tier) == {2: False} and "a task of an adapter has failed" in caplog.text
    with pytest.raises(ValueError, match="the tier's configuration has no pool_bytes"):
        tiered(pool_bytes=0)


def test_vllm_tiers_before_0_30(tiered):
    tier, memory, _ = tiered()
    memory[3] = 7
    tier.submit_store(types.SimpleNamespace(job_id=0, keys=["a"], block_ids=[3]))
    tier.drain_jobs()
    tier.submit_load(types.SimpleNamespace(job_id=1, keys=["a"], block_ids=[4]))
    assert results_of(tier) == {0: True, 1: True} and (memory[4] == 7).all()


# ---- SGLang ----


class HostPool:
    """SGLang's host pool as far as storage backends use it."""

    page_size = 16

    def __init__(self, pages):
        self.pages = pages.clone()

    def get_data_page(self, index, flat=True):
        return self.pages[index // self.page_size].flatten()

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.pages[0].numel(), dtype=self.pages.dtype)

    def set_from_flat_data_page(self, index, data_page):
        self.pages[index // self.page_size] = data_page.view(PAGE)


def storage_of(framework, pool_bytes=20 * 4096, is_mla_model=False, tp_size=1, **options):
    adapter, module = framework("sglang.storage", "sglang.srt.mem_cache.hicache_storage")
    ranks = {"tp_rank": 0, "tp_size": tp_size, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config = module.HiCacheStorageConfig(
        **ranks,
        is_mla_model=is_mla_model,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="some",
        extra_config={"pool_bytes": pool_bytes} | options,
    )
    return adapter.IBPHiCacheStorage(config, {}), module


def tokens_of(pages):
    return torch.cat([torch.arange(16 * page, 16 * page + 16) for page in pages]) if pages else torch.empty(0)


def test_sglang_pages_by_their_keys(framework):
    storage, _ = storage_of(framework)
    pages = pages_of(60)
    assert (
        not storage.exists("0")
        and storage.get("0", torch.empty(2048)) is None
        and storage.stats()["kv"]["stored_pages"] == 0
    )
    assert storage.set("0", pages[0].flatten()) and storage.set("0", pages[1].flatten()) and storage.exists("0")
    out = torch.empty(2048, dtype=torch.bfloat16)
    assert storage.get("0", out) is out
    assert_same_bits(out, pages[0].flatten())  # a key's page does not change
    assert not storage.set("short", pages[0, 0].flatten()) and not storage.set("none")
    assert storage.batch_set([str(k) for k in range(24)], list(pages[:24].flatten(1)))
    held = storage.stats()["kv"]
    assert held["stored_pages"] == 24 and held["pool_bytes"] <= 20 * 4096  # 20 raw ones would fit
    for k in range(24, 60):  # those used longest ago make room
        assert storage.set(str(k), pages[k].flatten()) and storage.get("3", out) is out
    assert storage.exists("3") and storage.exists("59") and not storage.exists("4")
    assert storage.batch_exists(["59", "3", "4", "58"]) == 2
    found = storage.batch_get(["59", "4"], [torch.empty_like(out), torch.empty_like(out)])
    assert_same_bits(found[0], pages[59].flatten())
    assert found[1] is None
    storage.clear()
    assert not storage.exists("59") and storage.set("59", pages[0].flatten())
    assert storage.get_stats() is None  # SGLang's metrics take StorageMetrics or None
    storage.close()
    assert storage.stats() == {} and not storage.exists("59") and storage.set("59", pages[0].flatten())


def test_sglang_host_pools(framework):
    storage, module = storage_of(framework)
    pages = pages_of(12)
    host, other = HostPool(pages), HostPool(pages.flip(0))
    storage.register_mem_pool_host(host)
    storage.register_mem_host_pool_v2(host, module.PoolName.KV)
    storage.register_mem_host_pool_v2(other, module.PoolName.MAMBA)
    keys = [str(k) for k in range(4)]
    assert storage.batch_set_v1(keys, tokens_of([3, 0, 7, 1])) == [True] * 4
    host.pages.zero_()
    assert storage.batch_get_v1([*keys, "9"], tokens_of([5, 6, 7, 8, 9])) == [True] * 4 + [False]
    assert_same_bits(host.pages[5:9], pages[[3, 0, 7, 1]])
    assert storage.batch_get_v1(keys, tokens_of([1])) == [False] * 4
    of = module.PoolTransfer
    transfers = [
        of(module.PoolName.KV, tokens_of([5]), keys=["k"]),
        of(module.PoolName.MAMBA, tokens_of([2, 3]), keys=["0", "2"]),
    ]
    assert storage.batch_set_v2(transfers) == {"kv": [True], "mamba": [True, True]}
    other.pages.zero_()
    assert storage.batch_get_v2(transfers[1:]) == {"mamba": [True, True]}
    assert_same_bits(other.pages[2:4], pages.flip(0)[2:4])


def test_sglang_a_host_pool_whose_pages_are_tokens(framework):
    storage, _ = storage_of(framework)
    pages = pages_of(4)

    class Tokens(HostPool):
        page_size = None

        def get_data_page(self, index, flat=True):
            return self.pages[index].flatten()

        def set_from_flat_data_page(self, index, data_page):
            self.pages[index] = data_page.view(PAGE)

    storage.register_mem_pool_host(host := Tokens(pages))
    assert storage.batch_set_v1(["a", "b"], torch.tensor([3, 1])) == [True, True]
    assert storage.batch_get_v1(["b", "a"], torch.tensor([0, 2])) == [True, True]
    assert_same_bits(host.pages, pages[[1, 1, 3, 3]])


def test_sglang_prefixes_that_all_pools_restore(framework):
    storage, module = storage_of(framework, 100 * 4096)
    keys, name, policy = [str(k) for k in range(6)], module.PoolName, module.PoolHitPolicy
    there = {name.KV: "012345", name.MAMBA: "024", name.SWA: "01245", name.INDEXER: "0123"}
    for pool, held in there.items():
        host = HostPool(pages_of(6))
        storage.register_mem_host_pool_v2(host, pool)
        transfer = module.PoolTransfer(pool, tokens_of(map(int, held)), keys=list(held))
        assert storage.batch_set_v2([transfer]) == {pool: [True] * len(held)}

    def asked(pool, policy, count=1, **geometry):
        return module.PoolTransfer(pool, keys=keys[:count], hit_policy=policy, **geometry)

    mamba, window = asked(name.MAMBA, policy.TRAILING_PAGES), asked(name.SWA, policy.TRAILING_PAGES, 2)
    every = asked(name.INDEXER, policy.ALL_PAGES)
    groups = asked(name.SWA, policy.BLOCK_GROUPS, 6, block_pages=2, group_pages=2)
    unsized = asked(name.SWA, policy.BLOCK_GROUPS, 6, block_pages=2, group_pages=0)
    absent = asked(name.INDEXER, policy.BLOCK_GROUPS, 6, block_pages=1, group_pages=5)
    for transfers, restorable, hits in [
        (None, [1, 2, 3, 4, 5, 6], {"kv": 6}),
        ([mamba], [1, 3, 5], {"kv": 6, "mamba": 5}),
        ([window], [1, 2, 3, 6], {"kv": 6, "swa": 6}),
        ([mamba, window], [1, 3], {"kv": 6, "mamba": 5, "swa": 6}),  # not 5, the smaller of their longest
        ([every, mamba], [1, 3], {"kv": 6, "indexer": 4, "mamba": 5}),
        ([asked(name.MAMBA, policy.ALL_PAGES), window], [1], {"kv": 6, "mamba": 1, "swa": 6}),
        ([asked("none", policy.ALL_PAGES), window], [], {"kv": 6}),
        ([groups], [1, 2, 3, 4, 5, 6], {"kv": 6, "swa": 2}),  # a second form of the KV-cache: shortens nothing
        ([unsized], [1, 2, 3, 4, 5, 6], {"kv": 6}),
        ([absent, mamba], [1, 3, 5], {"kv": 6, "mamba": 5}),
    ]:
        result = storage.batch_exists_v2([*keys, "9"], transfers)
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (max(restorable, default=0), hits)
        assert result.restorable_prefix_pages == restorable
    assert storage.batch_exists_v2(["9"], [mamba]).kv_hit_pages == 0


def test_sglang_before_0_5_20(framework, monkeypatch):
    """Results had no restorable_prefix_pages."""
    storage, module = storage_of(framework)
    older = dataclasses.make_dataclass("PoolTransferResult", ["kv_hit_pages", "extra_pool_hit_pages"])
    monkeypatch.setattr(sys.modules["ibp.integrations.sglang.storage"], "PoolTransferResult", older)
    assert storage.set("a", pages_of(1).flatten())
    assert storage.batch_exists_v2(["a", "b"]) == older(1, {"kv": 1})


def test_sglang_pages_without_bytes(framework):
    """The KV pool of DeepSeek V4 holds nothing: its pages stand for those of other pools."""
    storage, _ = storage_of(framework, 4 * 256)
    empty = torch.empty(0, dtype=torch.uint8)
    assert storage.batch_set(list("abcd"), [empty] * 4) and storage.get("a", empty) is empty
    assert storage.set("e", empty) and storage.batch_exists(["a", "c", "d", "e", "b"]) == 4  # room for four keys
    assert storage.get("b", empty) is None and not storage.set("f", pages_of(1).flatten())
    storage.clear()
    assert not storage.exists("a") and storage.set("a", empty)


def test_sglang_pages_that_find_no_room(framework):
    """They are refused, and SGLang computes them again; there is room once others are gone."""
    storage, _ = storage_of(framework, 40 * 4096)
    pages, wild = pages_of(60), noise(60)
    assert storage.set("first", pages[0].flatten())
    kept = [k for k in range(30) if storage.set(str(k), wild[k].flatten())]
    assert 0 < len(kept) < 30
    out = torch.empty(2048, dtype=torch.bfloat16)
    for k in kept:
        assert_same_bits(storage.get(str(k), out), wild[k].flatten())
    for k in range(60):
        assert storage.set(f"p{k}", pages[k].flatten())
    assert not any(storage.exists(str(k)) for k in kept)
    assert any(storage.set(f"again{k}", wild[k].flatten()) for k in range(8))


def test_sglang_threads(framework):
    storage, _ = storage_of(framework, 60 * 4096)
    pages, wrong = pages_of(40), []

    def work(seed):
        rng, out = random.Random(seed), torch.empty(2048, dtype=torch.bfloat16)
        for _ in range(40):
            k = rng.randrange(40)
            storage.set(str(k), pages[k].flatten())
            if storage.get(str(k), out) is None or not torch.equal(out, pages[k].flatten()):
                wrong.append(k)

    in_threads(*(functools.partial(work, seed) for seed in range(4)))
    assert not wrong


def test_sglang_wrong_options(framework):
    for options, message in (
        ({"pool_bytes": 0}, "pool_bytes"),
        ({"pool_bytes": "32GB"}, "pool_bytes is '32GB'; wanted a number of bytes"),
        ({"level": "quick"}, "level is 'quick'; wanted one of"),
        ({"device": "gpu"}, "device is 'gpu'; wanted the name of a CPU or CUDA device"),
    ):
        with pytest.raises(ValueError, match=message):  # before there is a page
            storage_of(framework, **options)
    with pytest.raises(ValueError, match="MLA model on 8 tensor-parallel ranks"):
        storage_of(framework, is_mla_model=True, tp_size=8)
    assert storage_of(framework, is_mla_model=True)


class DeviceCache:
    """SGLang's paged cache of two layers, of 24 pages of 16 tokens: what it says of its buffers."""

    head_num, head_dim = PAGE[2:]
    num_pages, num_layers = 24, 2

    def __init__(self, device="cpu", dtype=torch.bfloat16, stride=1):
        rows = self.num_pages * PAGE[1]
        self.dtype, kind = dtype, torch.zeros(1, dtype=dtype).to(device)
        self.k, self.v = (
            [kind.new_zeros(rows, stride * self.head_num, self.head_dim)[:, : self.head_num] for _ in range(2)]
            for _ in range(2)
        )
        self.buffers = types.SimpleNamespace(k=self.k, v=self.v)

    def bits(self, pages=slice(None)):
        """[keys and values, layers, pages, values of a block] on the CPU."""
        kept = torch.stack([torch.stack(tensors) for tensors in (self.k, self.v)])
        return kept.view(torch.int16).view(2, self.num_layers, self.num_pages, -1)[:, :, pages].cpu()

    def write(self, pages, values):
        """values: [len(pages), ...], the same in each layer's keys, and zeros in its values."""
        for tensor in self.k:
            tensor.view(self.num_pages, -1)[pages] = values.flatten(1)[:, : tensor[0].numel() * 16].to(tensor.device)


def host_pool_of(framework, cache, num_raw_pages=20, drafts=(), **options):
    adapter, _ = framework("sglang.pool", "sglang.srt.mem_cache.pool_host.mha")
    page_bytes = 2 * cache.num_layers * cache.head_num * cache.head_dim * PAGE[1] * cache.dtype.itemsize
    made = {"device_capacity_tokens": 384, "start_layer": 0, "end_layer": 2, "draft_buffer_infos": drafts}
    return adapter.IBPHostPool(
        cache, 2.0, num_raw_pages * page_bytes * 1e-9, PAGE[1], "page_first_direct", **made | options
    )


def test_sglang_host_pool(framework):
    cache = DeviceCache()
    pool = host_pool_of(framework, cache)
    assert pool.page_num >= 28 and pool.kv_buffer.untyped_storage().nbytes() == 2  # 20 raw ones would fit
    cache.write([3, 5, 7], pages_of(3))
    before = cache.bits([3, 5, 7])
    pool.backup_from_device_all_layer(None, tokens_of([20, 1, 8]), tokens_of([3, 5, 7]), "direct")
    cache.write(list(range(24)), noise(24))
    others = cache.bits()
    where = tokens_of([8, 20, 1]), tokens_of([0, 9, 4])
    pool.load_to_device_per_layer(None, *where, 1, "direct")
    assert_same_bits(cache.bits([0, 9, 4])[:, 1], before[:, 1][:, [2, 0, 1]])
    assert_same_bits(cache.bits()[:, 0], others[:, 0])  # layers come one by one
    for layer in (0, 2, -1):
        pool.load_to_device_per_layer(None, *where, layer, "direct")
    pool.load_to_device_per_layer(None, *where, 0, "direct", is_draft=True)
    assert_same_bits(cache.bits([0, 9, 4]), before[:, :, [2, 0, 1]])
    page = pool.get_data_page(torch.tensor(16 * 20), flat=False)
    assert page.shape == (2, 2, 16, 2, 32)
    assert_same_bits(page.view(torch.int16).reshape(2, 2, -1), before[:, :, 0])
    flat = pool.get_dummy_flat_data_page()
    assert not flat.any() and flat.shape == pool.get_data_page(16 * 20).shape
    pool.set_from_flat_data_page(16 * 2, page.flatten())
    assert_same_bits(pool.get_data_page(16 * 2, flat=False), page)
    pool.destroy()
    assert pool.blocks.pools == []


def test_sglang_host_pool_keeps_pages_without_room(framework):
    """They are copied before the call comes back: SGLang writes to the blocks then."""
    cache, pages = DeviceCache(), list(range(24))
    pool = host_pool_of(framework, cache)
    cache.write(pages, pages_of(24))
    pool.backup_from_device_all_layer(None, tokens_of(pages), tokens_of(pages), "direct")
    assert pool.blocks.num_raw_pages == 0
    cache.write(pages, noise(24))
    before = cache.bits()
    pool.backup_from_device_all_layer(None, tokens_of(pages), tokens_of(pages), "direct")
    cache.write(pages, pages_of(24))
    assert pool.blocks.num_raw_pages > 0
    for layer in range(2):
        pool.load_to_device_per_layer(None, tokens_of(pages), tokens_of(pages), layer, "direct")
    assert_same_bits(cache.bits(), before)


def test_sglang_host_pool_wrong_use(framework):
    cache = DeviceCache()
    for wrong, message in (
        (DeviceCache(dtype=torch.uint8), "keys and values are torch.uint8; wanted torch.bfloat16 or torch.float16"),
        (DeviceCache(stride=2), "wanted rows that lie one after the other"),
    ):
        with pytest.raises(ValueError, match=message):
            host_pool_of(framework, wrong)
    with pytest.raises(ValueError, match="has 3 layers, 2 of the model, and the device 4; .* neither draft layers"):
        host_pool_of(framework, cache, drafts=[DeviceCache()])
    pool = host_pool_of(framework, cache)
    with pytest.raises(ValueError, match="20 tokens do not begin and end with pages of 16"):
        pool.backup_from_device_all_layer(None, torch.arange(20), torch.arange(20), "direct")
    with pytest.raises(ValueError, match="16 tokens do not begin and end with pages of 16"):
        pool.backup_from_device_all_layer(None, torch.arange(16), torch.arange(4, 20), "direct")
    pool.backup_from_device_all_layer(None, tokens_of([0]), tokens_of([0]), "direct")
    with pytest.raises(RuntimeError, match="was never stored"):
        pool.get_data_page(16)
    with pytest.raises(NotImplementedError, match="use a storage backend that copies pages"):
        pool.get_page_buffer_meta(tokens_of([0]))
    for get in (pool.get_hybrid_pool_buffer, lambda: pool.get_split_heads_page_buffer_meta(tokens_of([0]), 2)):
        with pytest.raises(NotImplementedError, match="are coded"):
            get()


def test_sglang_builds_the_host_pool_where_the_plugin_is_wanted(framework, monkeypatch, caplog):
    adapter, mha = framework("sglang.pool", "sglang.srt.mem_cache.pool_host.mha")
    registry, package = adapter.HookRegistry, importlib.import_module("ibp.integrations.sglang")
    for value in (None, "", "others"):
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False) if value is None else monkeypatch.setenv(
            "SGLANG_PLUGINS", value
        )
        package.register_host_pool()
        assert registry.hooks == []
    monkeypatch.setenv("SGLANG_PLUGINS", "others, ibp_host_pool")
    package.register_host_pool()
    ((target, hook, _),) = registry.hooks
    assert target == "sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls"
    assert hook(mha.MHATokenToKVPoolHost, None) is adapter.IBPHostPool
    assert hook(mha.AsymmetricMHATokenToKVPoolHost) is mha.AsymmetricMHATokenToKVPoolHost
    assert "pages of AsymmetricMHATokenToKVPoolHost stay plain" in caplog.text
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "ibp_host_pool": f"{package.__name__}:{package.register_host_pool.__name__}"
    }


def test_sglang_host_pool_on_the_gpu(framework, cuda):
    """Blocks are written anew once the stream of the store is done, as SGLang does; pages without room are kept."""
    cache, pages, rng = DeviceCache(cuda), list(range(24)), random.Random(0)
    pool, stream = host_pool_of(framework, cache), torch.cuda.Stream(cuda)
    for step in range(20):
        torch.cuda.synchronize()
        host = rng.sample(range(pool.page_num), 24)
        cache.write(pages, noise(24, step) if step % 4 == 3 else pages_of(24, step))
        before = cache.bits()
        torch.cuda.synchronize()
        indices = tokens_of(host), tokens_of(pages)
        with torch.cuda.stream(stream):
            pool.backup_from_device_all_layer(
                None, *(tensor.to(cuda) if step % 2 else tensor for tensor in indices), "direct"
            )
        stream.synchronize()
        cache.write(pages, noise(24, 99))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for layer in range(2):
                pool.load_to_device_per_layer(None, *indices, layer, "direct")
        stream.synchronize()
        assert_same_bits(cache.bits(), before)
        assert_same_bits(
            pool.get_data_page(16 * host[3], flat=False).view(torch.int16).reshape(2, 2, -1), before[:, :, 3]
        )
    assert pool.blocks.num_raw_pages > 0
    pool.destroy()


def test_sglang_on_the_gpu(framework, cuda):
    storage, _ = storage_of(framework, device="cuda")
    pages, out = pages_of(10), torch.empty(2048, dtype=torch.bfloat16)
    for k in range(10):
        assert storage.set(str(k), pages[k].flatten())
    for k in range(10):
        assert_same_bits(storage.get(str(k), out), pages[k].flatten())


# ---- LMCache ----


class Memory:
    """An object of LMCache's first tier, with padding behind it."""

    def __init__(self, page, dtype=torch.bfloat16):
        self.page, self.dtype = page, dtype
        self.padded = torch.zeros(page.nbytes + 64, dtype=torch.uint8)
        self.padded[: page.nbytes] = page.contiguous().view(-1).view(torch.uint8)

    def get_size(self):
        return self.page.nbytes

    def get_dtype(self):
        return self.dtype

    @property
    def raw_tensor(self):
        return self.padded


def assert_holds(memory, page):
    assert_same_bits(memory.padded[: page.nbytes], page.contiguous().view(-1).view(torch.uint8))
    assert not memory.padded[page.nbytes :].any()


class Told:
    """A listener of LMCache's second tiers."""

    def __init__(self):
        self.stored, self.accessed, self.deleted = [], [], []

    def on_l2_keys_stored(self, keys, sizes):
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys):
        self.accessed += keys

    def on_l2_keys_deleted(self, keys):
        self.deleted += keys


@pytest.fixture
def tier(framework):
    """Makes (an adapter, what it tells), which is closed at the end."""
    made = []

    def make(pool_bytes=20 * 4096, **params):
        adapter, _ = framework("lmcache", "lmcache.v1.distributed.l2_adapters.base")
        made.append(adapter.IBPL2Adapter({"pool_bytes": pool_bytes, **params}, l1_memory_desc=None))
        told = Told()
        made[-1].register_listener(told)
        return made[-1], told

    yield make
    for each in made:
        each.close()


def awaited(fd, ask):
    """The result of a task, once its descriptor can be read."""
    assert select.select([fd], [], [], 10)[0]
    os.read(fd, 1)
    return ask()


def stored_to(tier, keys, pages):
    task = tier.submit_store_task(keys, [Memory(page) for page in pages])
    done = awaited(tier.get_store_event_fd(), tier.pop_completed_store_tasks)
    assert list(done) == [task] and tier.pop_completed_store_tasks() == {}
    return done[task]


def found_in(tier, keys):
    task = tier.submit_lookup_and_lock_task(keys, {})
    found = awaited(tier.get_lookup_and_lock_event_fd(), lambda: tier.query_lookup_and_lock_result(task))
    assert tier.query_lookup_and_lock_result(task) is None  # results are given out once
    return [key for number, key in enumerate(keys) if found.test(number)]


def loaded_from(tier, keys, objects):
    task = tier.submit_load_task(keys, objects)
    loaded = awaited(tier.get_load_event_fd(), lambda: tier.query_load_result(task))
    return [key for number, key in enumerate(keys) if loaded.test(number)]


def test_lmcache_objects_come_back(tier):
    adapter, told = tier()
    assert len({adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}) == 3
    pages = pages_of(6)
    assert found_in(adapter, ["a"]) == []
    result = stored_to(adapter, list("abcd"), pages[:4])
    assert result.is_successful() and result.bytes_transferred() == 4 * 4096
    assert told.stored == [(key, 4096) for key in "abcd"]
    assert stored_to(adapter, ["a", "e"], pages[4:]).bytes_transferred() == 4096  # a key's object does not change
    assert found_in(adapter, list("abzcde")) == list("abcde")
    objects = [Memory(torch.zeros_like(page)) for page in pages]
    assert loaded_from(adapter, list("abzcd"), objects) == told.accessed == list("abcd")
    for memory, page in zip([*objects[:2], *objects[3:]], pages[:4]):
        assert_holds(memory, page)
    adapter.submit_unlock(list("abzcde"))
    adapter.delete(["b", "z"])
    assert told.deleted == ["b"] and found_in(adapter, list("abc")) == ["a", "c"]
    status = adapter.report_status()
    assert status["is_healthy"] and status["pools"][4096]["stored_pages"] == 4


def test_lmcache_objects_of_several_sizes_and_dtypes(tier):
    adapter, _ = tier()
    pages = [pages_of(1)[0], pages_of(1)[0, :, :3], torch.arange(999, dtype=torch.uint8)]
    objects = [Memory(pages[0]), Memory(pages[1]), Memory(pages[2], dtype=None)]
    adapter.submit_store_task(list("abc"), objects)
    assert awaited(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert set(adapter.report_status()["pools"]) == {page.nbytes for page in pages}
    for key, page in zip("abc", pages):
        memory = Memory(torch.zeros_like(page))
        assert loaded_from(adapter, [key], [memory]) == [key]
        assert_holds(memory, page)


def test_lmcache_locked_objects_do_not_make_room(tier):
    adapter, told = tier()
    pages = pages_of(60)
    stored_to(adapter, ["first", "second"], pages[:2])
    assert found_in(adapter, ["first"]) == ["first"]
    stored_to(adapter, [str(k) for k in range(40)], pages[:40])
    assert "second" in told.deleted and "first" not in told.deleted
    kept = {key for key, _ in told.stored} - set(told.deleted)
    assert len(kept) == adapter.report_status()["pools"][4096]["stored_pages"] >= 28  # 20 raw ones would fit
    adapter.submit_unlock(["first"])
    stored_to(adapter, [f"more {k}" for k in range(40)], pages[:40])
    assert "first" in told.deleted


def test_lmcache_a_task_that_fails(tier, caplog):
    """Objects without memory of the host: the task fails, and later ones do not."""
    adapter, told = tier()
    stored_to(adapter, ["a"], pages_of(1))
    memory = Memory(pages_of(1)[0])
    memory.padded = None
    adapter.submit_store_task(["b"], [memory])
    (result,) = awaited(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks).values()
    assert not result.is_successful() and result.bytes_transferred() == 0
    assert loaded_from(adapter, ["a"], [memory]) == [] and "a task of an adapter has failed" in caplog.text
    assert found_in(adapter, ["a"]) == ["a"] and [key for key, _ in told.stored] == ["a"]


def test_lmcache_wrong_options(tier):
    with pytest.raises(ValueError, match="adapter_params has no pool_bytes"):
        tier(0)


def test_lmcache_on_the_gpu(tier, cuda):
    adapter, _ = tier(device="cuda")
    pages = pages_of(10)
    stored_to(adapter, list("abcdefghij"), pages)
    objects = [Memory(torch.zeros_like(page)) for page in pages]
    assert loaded_from(adapter, list("abcdefghij"), objects) == list("abcdefghij")
    for memory, page in zip(objects, pages):
        assert_holds(memory, page)


# ---- without them, and with others ----


@pytest.mark.parametrize("installed", ["0.33.1", "0.25.1", "0.34.0.dev3+cu130"])
def test_another_release(framework, monkeypatch, installed):
    """It is tried, with a warning: its classes are there."""
    adapter, _ = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: installed)
    with pytest.warns(UserWarning, match=rf"was tried with vLLM 0.26.0 to 0.33.0; {re.escape(installed)} is installed"):
        adapter.IBPOffloadingSpec(config_of(1, 1))


@pytest.mark.parametrize("installed", ["0.26.0", "0.31.0", "0.33.0+cu130"])
def test_a_release_that_was_tried(framework, monkeypatch, recwarn, installed):
    adapter, _ = framework("vllm.offloading", "vllm.v1.kv_offload.base")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: installed)
    adapter.IBPOffloadingSpec(config_of(1, 1))
    assert not recwarn.list


def test_a_release_without_a_class(monkeypatch):
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("sglang is here")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.4.9")
    with pytest.raises(
        ImportError, match=r"SGLang 0.5.10.post1 to 0.5.23; 0.4.9 is installed: No module named 'sglang'"
    ):
        importlib.import_module("ibp.integrations.sglang").IBPHiCacheStorage(None)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("vllm", lambda module: module.IBPOffloadingSpec(None)),
        (
            "vllm",
            lambda module: module.IBPOffloadingWorker(None, num_chunks=1, blocks_per_chunk=1, pool_bytes=1, dtype=None),
        ),
        ("vllm.tiers", lambda module: module.IBPSecondaryTier(None, None, "IBPSecondaryTier", pool_bytes=1)),
        ("sglang", lambda module: module.IBPHiCacheStorage(None)),
        ("sglang.pool", lambda module: module.IBPHostPool(None)),
        ("sglang.pool", lambda module: module.register()),
        ("lmcache", lambda module: module.IBPL2Adapter({})),
    ],
)
def test_without_the_framework(name, make):
    engine = name.split(".")[0]
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is here")
    with pytest.raises(ImportError, match=f"ibp.integrations.{engine} needs"):
        make(importlib.import_module(f"ibp.integrations.{name}"))
