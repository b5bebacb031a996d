"""Runs ibp's serving adapters with the Python files of released engines, on the CPU.

    python tools/try_adapters.py                                     all releases in build/engines
    python tools/try_adapters.py build/engines/vllm-0.33.0           one of them
    python tools/try_adapters.py lmcache                             the installed package, with all of its modules

tools/record_interfaces.py unpacks releases there.

An unpacked release is not installed, and no server runs. Its modules around KV-cache offloading are imported as they
are. Objects that do nothing replace all other modules, such as those with compiled parts.

vLLM's own manager, and the worker's side of its connector, store and load random chunks for a few hundred steps, as a
scheduler does: blocks are overwritten as soon as vLLM may do so, pages find no room, and caches are reset. vLLM's
manager of tiers stores chunks in memory and in the tier behind it, and looks them up. For SGLang, its own factory makes
the storage, its controller's methods write and read pages, and its storage of files says which prefixes can be
restored. Every page that is loaded must have the bits that were stored.

try_weights.py then tries vLLM's layers with compressed weights, try_sync.py pushes changes into them, and
try_experts.py tries vLLM's fused experts.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.abc
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch
import try_experts
import try_sync
import try_weights
from record_interfaces import ENGINES

from ibp.integrations import sglang

# Modules that are imported as they are.
REAL = (
    *try_weights.REAL,
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.config",
    "vllm.v1.kv_offload.factory",
    "vllm.v1.kv_offload.cpu.common",
    "vllm.v1.kv_offload.cpu.manager",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.v1.kv_offload.cpu.policies.*",
    "vllm.v1.kv_offload.tiering.*",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.utils.math_utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.storage.backend_factory",
    "sglang.srt.mem_cache.storage.file.lru_file_evictor",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.l2_transfer",
    "sglang.srt.mem_cache.pool_host.base",
    "sglang.srt.mem_cache.pool_host.common",
    "sglang.srt.mem_cache.pool_host.hisparse",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "lmcache.lmcache_native",
    # This leaves out serde and transfer_channel.
    "lmcache.v1.distributed.[!st]*",
    "lmcache.v1.distributed.storage*",
    "lmcache.v1.memory_management",
    "lmcache.v1.memory_allocators",
    "lmcache.v1.memory_allocators.*",
    "lmcache.v1.platform.event_notifier",
)
# A package reexports the names of a module.
GIVEN_ON = {"lmcache.v1.platform": "lmcache.v1.platform.event_notifier"}
PAGE_ALIGNMENT = 4096  # vLLM aligns chunks in host memory to this many bytes.


class CPUStreams:
    """A stand-in for torch.cuda, as far as SGLang uses it."""

    class Event:
        def __init__(self, enable_timing=False):
            """Does nothing, because no time is measured."""

        def record(self, stream=None):
            """Does nothing, because work is done when its call returns."""

        def wait(self, stream=None):
            """Does nothing, because work is done when its call returns."""

    @staticmethod
    def Stream():
        return None

    @staticmethod
    def stream(stream):
        return contextlib.nullcontext()


# Functions of SGLang that its host pools call. They return what they would on a machine without a GPU.
OF_SGLANG = dict.fromkeys(("is_cuda", "is_hip", "is_npu", "is_xpu", "is_mps"), bool) | {
    "get_device_module": lambda: CPUStreams,
    "available_host_memory_bytes": lambda **options: 1 << 40,
}


class _NothingType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        return made(*args) if cls is Nothing and len(args) == 1 and callable(args[0]) else made

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Nothing(metaclass=_NothingType):
    """A stand-in for everything that the packages import and the adapters do not need."""

    def __init__(self, *args, **kwargs):
        """Takes any arguments."""

    def __class_getitem__(cls, item):
        return cls

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else None  # A decorator returns what it decorates.

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of a package's modules. Modules in REAL come from files; all others have only attributes that are
    Nothing."""

    def __init__(self, root, package):
        self._root, self._package = root, package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self._package:
            return None
        path = self._root.joinpath(*name.split("."))
        files = [path / "__init__.py", path.with_suffix(".py"), *path.parent.glob(f"{path.name}.*.so")]
        file = next((file for file in files if file.exists()), None)
        if file is not None and _is_real(name):
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _attribute(spec.name, name)
        return module

    def exec_module(self, module):
        """Does nothing, because there is no code to run."""


def _is_real(name):
    return any(fnmatch.fnmatchcase(name, real) for real in REAL)


def _attribute(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    if _is_real(f"{module}.{name}"):
        return importlib.import_module(f"{module}.{name}")
    if module in GIVEN_ON:
        given_on = importlib.import_module(GIVEN_ON[module])
        if hasattr(given_on, name):
            return getattr(given_on, name)
    if module.startswith("sglang.") and name in OF_SGLANG:
        return OF_SGLANG[name]
    if name in try_weights.GIVEN:
        return try_weights.GIVEN[name]
    if name == "get_size_bytes":
        return lambda shapes, dtypes: sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
    if name == "init_logger":
        return lambda name: Nothing()
    if name == "SharedOffloadRegion":
        return type(name, (), {"BLOCK_SIZE_ALIGNMENT": PAGE_ALIGNMENT})
    return Nothing() if name == "envs" else Nothing  # The variables of envs are None.


def check(is_so, what):
    if not is_so:
        raise SystemExit(f"not as it should be: {what}")


def pages_of(count, num_bytes, rng):
    """Returns [count, num_bytes] of BF16 keys. Every eighth page is noise, for which a pool may have no room."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    kept = torch.randn(count, num_bytes // 2, generator=generator).mul(0.02).bfloat16().view(torch.int8)
    noise = torch.randint(-128, 128, (count, num_bytes), dtype=torch.int8, generator=generator)
    return torch.where((torch.arange(count) % 8 == 0).unsqueeze(1), noise, kept)


# ---- vLLM ----


class Scheduler:
    """A scheduler that stores and loads chunks at random, through vLLM's manager and the worker's side of its
    connector."""

    NUM_BLOCKS, BLOCKS_PER_CHUNK = 64, 2

    def __init__(self, seed):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, worker
        from vllm.v1.kv_offload import base, config, factory

        self.base, self.common, self.rng = base, common, random.Random(seed)
        # One group has layers with blocks of two sizes. The other shares a tensor with it and uses less of each block.
        sizes = [4096, 4096, 2048]
        self.tensors = [torch.zeros(self.NUM_BLOCKS, size, dtype=torch.int8) for size in sizes]
        self.groups = [[(0, 4096), (1, 4096), (2, 2048)], [(1, 3000)]]
        refs = [[base.CanonicalKVCacheRef(*ref) for ref in group] for group in self.groups]
        of_tensors = [base.CanonicalKVCacheTensor(tensor, size) for tensor, size in zip(self.tensors, sizes)]
        chunk_bytes = self.BLOCKS_PER_CHUNK * sum(sizes)
        options = {"spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm"}
        options |= {"cpu_bytes_to_use": 30 * -(-chunk_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT, "store_threshold": 1}
        made = {
            "groups": tuple(_filled(config.OffloadingGroupConfig, tokens_per_block=16, group_id=k) for k in range(2)),
            "worker_kv_bytes_per_block": sum(sizes),
            "extra_config": options,
            "model": _filled(config.OffloadingModelConfig, dtype="bfloat16", max_model_len=256),
            "cache": config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=self.BLOCKS_PER_CHUNK),
            "parallel": _filled(config.OffloadingParallelConfig, rank=0, world_size=1),
        }
        self.spec = factory.OffloadingSpecFactory.create_spec(_filled(config.OffloadingConfig, **made))
        self.manager = self.spec.get_manager()
        self.context = base.ReqContext("some")
        self.manager.on_new_request(self.context)
        num_arguments = len(inspect.signature(worker.OffloadingConnectorWorker).parameters)
        self.connector = worker.OffloadingConnectorWorker(self.spec, *[None] * (num_arguments - 1))
        self.connector._init_worker(base.CanonicalKVCaches(of_tensors, refs))
        self.jobs = itertools.count()
        self.stores, self.loads = {}, {}  # by job: (keys, blocks) and (keys, blocks, wanted)
        self.content, self.free = {}, list(range(1, self.NUM_BLOCKS))
        self.num_loaded = self.num_lost = 0

    def allocate(self, count):
        self.rng.shuffle(self.free)
        return [self.free.pop() for _ in range(count)]

    def bits(self, group, blocks):
        return [self.tensors[number][blocks, :size].clone() for number, size in self.groups[group]]

    def write(self, blocks):
        """Writes random keys to blocks, as a model does with its blocks."""
        for tensor in self.tensors:
            tensor[blocks] = pages_of(len(blocks), tensor.shape[1], self.rng)

    def gpu_spec(self, blocks_of_groups):
        blocks = [block for blocks in blocks_of_groups for block in blocks]
        indices = [self.BLOCKS_PER_CHUNK * self.rng.randrange(4) for _ in blocks_of_groups]
        return self.base.GPULoadStoreSpec(blocks, [len(each) for each in blocks_of_groups], indices)

    def of_groups(self, blocks):
        """Returns the blocks of keys, by group."""
        groups = ([each for key, each in blocks.items() if self.content[key][0] == group] for group in range(2))
        return [sum(each, []) for each in groups]

    def new_stores(self):
        keys, many = [], self.BLOCKS_PER_CHUNK
        for group in range(2):
            for _ in range(self.rng.randrange(3)):
                if len(self.free) < 4 * many:
                    break
                key = self.base.make_offload_key(self.rng.randbytes(8), group)
                blocks = self.allocate(many)
                self.write(blocks)
                self.content[key] = group, blocks, self.bits(group, blocks)
                keys.append(key)
        output = self.manager.prepare_store(keys, self.context) if keys else None
        taken = [] if output is None else list(output.keys_to_store)
        for key in set(keys) - set(taken):
            self.free += self.content.pop(key)[1]
        if not taken:
            return {}
        for key in output.evicted_keys:
            self.content.pop(key, None)
        blocks = self.of_groups({key: self.content[key][1] for key in taken})
        job = next(self.jobs)
        self.stores[job] = taken, sum(blocks, [])
        return {job: self.common.TransferJob("some", self.gpu_spec(blocks), output.store_spec)}

    def new_loads(self, ready):
        """Starts to load a few stored chunks. If the engine supports it, half of the loads must finish within the
        step."""
        wanted = [key for key in self.rng.sample(ready, min(len(ready), 2)) if key in self.content]
        wanted = sorted(wanted, key=lambda key: self.content[key][0])
        if not wanted or len(self.free) < 4 * self.BLOCKS_PER_CHUNK:
            return {}
        targets = {key: self.allocate(self.BLOCKS_PER_CHUNK) for key in wanted}
        blocks = self.of_groups(targets)
        fields = {field.name for field in dataclasses.fields(self.common.TransferJob)}
        options = {"sync": self.rng.random() < 0.5} if "sync" in fields else {}
        source, job = self.manager.prepare_load(wanted, self.context), next(self.jobs)
        self.loads[job] = wanted, sum(blocks, []), [(self.content[key], targets[key]) for key in wanted]
        return {job: self.common.TransferJob("some", source, self.gpu_spec(blocks), **options)}

    def check_loads(self, jobs):
        for job in jobs:
            for (group, _, bits), target in self.loads[job][2]:
                same = all(torch.equal(*pair) for pair in zip(bits, self.bits(group, target)))
                check(same, f"the bits of a chunk of group {group}, job {job}")
                self.num_loaded += 1

    def step(self, is_reset=False):
        """Runs a step of the engine: flushes, starts loads, runs the model, starts stores, and takes what has
        finished."""
        if is_reset:
            self.manager.reset_cache()
            flushed = set(self.stores) | set(self.loads)
        else:
            flushed = {job for job in self.stores if self.rng.random() < 0.5}
        ready = [key for key in self.content if not any(key in keys for keys, _ in self.stores.values())]
        loads = {} if is_reset else self.new_loads(ready)
        stores = self.new_stores()
        metadata = self.common.OffloadingConnectorMetadata(loads, stores, flushed or None)
        self.connector.handle_preemptions(metadata)
        for job in flushed & set(self.stores):  # The next request gets their blocks.
            self.write(self.stores[job][1])
        self.connector.start_kv_transfers(metadata)
        self.check_loads(job for job, entry in loads.items() if getattr(entry, "sync", False))
        self.connector.prepare_store_kv(metadata)
        self.num_lost = max(self.num_lost, self.connector.worker.blocks.num_raw_pages)
        self.connector.get_finished(set())
        done = self.connector.build_connector_worker_meta()
        self.complete(done.completed_jobs if done else (), stale=flushed if is_reset else ())
        if is_reset:
            kept = {key for job in self.stores for key in self.stores[job][0]}
            self.content = {key: value for key, value in self.content.items() if key in kept}

    def complete(self, jobs, stale):
        for job in jobs:
            if job in self.stores:
                keys, blocks = self.stores.pop(job)
                if job not in stale:
                    self.manager.complete_store(keys, self.context)
            else:
                self.check_loads([job])
                keys, blocks, _ = self.loads.pop(job)
                if job not in stale:
                    self.manager.complete_load(keys, self.context)
            self.free += blocks


def _filled(cls, **values):
    """Returns an object of a dataclass. Fields without a value or default are None."""
    missing = (field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING)
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**(dict.fromkeys(missing) | {name: value for name, value in values.items() if name in known}))


def try_vllm(num_steps=200):
    scheduler = Scheduler(0)
    for step in range(num_steps):
        scheduler.step(is_reset=step % 50 == 49)
    worker = scheduler.connector.worker
    print(f"  manager of {scheduler.spec.num_chunks} chunks, where {scheduler.spec.num_chunks / 1.4:.0f} would fit raw")
    if hasattr(scheduler.spec, "config_info_keys"):
        keys, info = scheduler.spec.config_info_keys({}), scheduler.manager.config_info()
        check(set(keys) == set(info[0]), "the labels of config_info")
        print(f"  config_info: {info[0]}")
    print(f"  {num_steps} steps, {scheduler.num_loaded} chunks loaded, all with their bits")
    print(f"  pools of pages of {sorted(store.page_bytes for store in worker.blocks.pools)} bytes, ", end="")
    print(f"at most {scheduler.num_lost} pages that found no room")
    check(scheduler.num_loaded > 100 and scheduler.num_lost > 0, "how much has been tried")
    scheduler.connector.shutdown()


class Tiers:
    """A scheduler that stores chunks in vLLM's host memory, and looks them up there and in ibp's tier, through vLLM's
    manager."""

    NUM_CHUNKS, CHUNK_BYTES = 8, 2 * PAGE_ALIGNMENT

    def __init__(self, seed):
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering import factory, manager

        self.base, self.rng = base, random.Random(seed)
        self.memory = torch.zeros(self.NUM_CHUNKS, self.CHUNK_BYTES, dtype=torch.int8)
        region = types.SimpleNamespace(
            create_kv_memoryview=lambda: memoryview(self.memory.numpy()), cleanup=lambda: None
        )
        primary = manager.CPUPrimaryTierOffloadingManager(self.NUM_CHUNKS, region)
        options = {"type": "IBPSecondaryTier", "module_path": "ibp.integrations.vllm.tiers", "pool_bytes": 200_000}
        tiers = factory.SecondaryTierFactory
        # Before 0.28 a tier is registered as a plugin does it.
        if "module_path" not in inspect.getsource(tiers.get_tier_class):
            tiers.register_tier(options["type"], options.pop("module_path"), options["type"])
        model = types.SimpleNamespace(dtype="bfloat16")
        spec = types.SimpleNamespace(config=types.SimpleNamespace(model=model))
        self.tier = tiers.create_secondary_tier(options, primary.get_kv_memoryview(), spec)
        self.manager = manager.TieringOffloadingManager(primary, [self.tier])
        self.request = base.ReqContext("some")
        self.manager.on_new_request(self.request)
        self.content, self.waiting = {}, []  # bits by key; keys that vLLM is loading
        self.num_loaded = self.num_promoted = self.num_lost = 0

    def store(self):
        keys = [self.base.make_offload_key(self.rng.randbytes(8), 0) for _ in range(self.rng.randrange(3))]
        output = self.manager.prepare_store(keys, self.request) if keys else None
        if output is None:
            return
        for key, number in zip(output.keys_to_store, output.store_spec.block_ids):
            self.memory[number] = pages_of(8, self.CHUNK_BYTES, self.rng)[self.rng.randrange(8)]
            self.content[key] = self.memory[number].clone()
        self.manager.complete_store(output.keys_to_store, self.request)

    def look(self):
        """Looks up the chunks that are being loaded, and a few others."""
        wanted = dict.fromkeys([*self.waiting, *self.rng.sample(list(self.content), min(2, len(self.content)))])
        before, self.waiting, results = self.waiting, [], self.base.LookupResult
        for key in wanted:
            found = self.manager.lookup(key, self.request)
            if found is results.HIT:
                source = self.manager.prepare_load([key], self.request)
                bits = self.memory[int(source.block_ids[0])]
                check(torch.equal(bits, self.content[key]), "the bits of a chunk of a tier")
                self.manager.complete_load([key], self.request)
                self.num_loaded += 1
                self.num_promoted += key in before
            elif found is results.MISS:
                self.num_lost += 1
                del self.content[key]
            else:
                self.waiting.append(key)

    def step(self, is_reset=False):
        if is_reset:
            self.manager.reset_cache()
            self.waiting = []
            getattr(self.manager, "on_reset_flushed", lambda: None)()
        self.store()
        self.manager.touch(self.rng.sample(list(self.content), min(2, len(self.content))), self.request)
        self.look()
        self.manager.on_schedule_end(self.base.ScheduleEndContext((), ()))
        time.sleep(5e-4)  # The engine takes this time, in which the tier's threads work.


def try_vllm_tiers(num_steps=300):
    tiers = Tiers(0)
    for step in range(num_steps):
        tiers.step(is_reset=step % 100 == 99)
    stored = tiers.tier.pages.stats().stored_pages
    print(
        f"  {num_steps} steps of tiers, {tiers.num_loaded} chunks found, {tiers.num_promoted} in ibp's, with their bits"
    )
    print(f"  {stored} chunks are in the tier behind {tiers.NUM_CHUNKS}, {tiers.num_lost} made room or found none")
    check(
        tiers.num_promoted > 50 and tiers.num_lost > 0 and stored > 2 * tiers.NUM_CHUNKS,
        "how much of tiers has been tried",
    )
    tiers.manager.shutdown()


# ---- SGLang ----


class HostPool:
    """A host pool of SGLang, with the methods that storage calls."""

    page_size = 16

    def __init__(self, pages):
        self.pages = pages.clone()

    def get_data_page(self, index, flat=True):
        return self.pages[int(index) // self.page_size]

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.pages[0])

    def set_from_flat_data_page(self, index, data_page):
        self.pages[int(index) // self.page_size] = data_page


def tokens_of(pages):
    return torch.cat([torch.arange(16 * page, 16 * page + 16) for page in pages])


def storage_of(hicache, folder=None):
    """Returns the adapter that SGLang's factory makes, or SGLang's own storage of files if a folder is given."""
    options = {"backend_name": "ibp", "module_path": "ibp.integrations.sglang", "class_name": "IBPHiCacheStorage"}
    options |= {"interface_v1": 1, "pool_bytes": 1 << 20}
    values = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    values |= {"is_mla_model": False, "extra_config": options}
    config = _filled(hicache.HiCacheStorageConfig, **values)
    if folder is not None:
        return hicache.HiCacheFile(config, str(folder))
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    return StorageBackendFactory.create_backend("dynamic", config, None)


def controller_of(storage, host):
    """Returns four methods of SGLang's controller, bound to a stand-in: those of version 1 and those before it."""
    from sglang.srt.managers.cache_controller import HiCacheController

    self = types.SimpleNamespace(storage_backend=storage, storage_host_pool=host, mem_pool_host=host, page_size=16)
    methods = ("_page_set_zero_copy", "_page_get_zero_copy", "_generic_page_set", "_generic_page_get")
    return [types.MethodType(getattr(HiCacheController, name), self) for name in methods]


class Operation:
    """A prefetch. The controller's methods count its tokens in some releases, and its pages in others."""

    request_id, completed_tokens = "some", 0

    def increment(self, count):
        self.completed_tokens += count
        return True

    def is_terminated(self):
        return False


def try_sglang(num_trials=200):
    from sglang.srt.mem_cache import hicache_storage as hicache

    rng = random.Random(0)
    storage = storage_of(hicache)
    pages = pages_of(40, 4096, rng)
    host = HostPool(pages)
    storage.register_mem_pool_host(host)
    if hasattr(hicache.HiCacheStorage, "on_host_pools_registered"):
        storage.on_host_pools_registered()
    set_v1, get_v1, set_pages, get_pages = controller_of(storage, host)
    keys = [str(page) for page in range(40)]
    check(set_v1(keys[:20], tokens_of(range(20))), "pages are stored by version 1")
    check(set_pages(keys[20:], tokens_of(range(20, 40))), "pages are stored one by one")
    for get in (get_v1, get_pages):
        host.pages.zero_()
        operation = Operation()
        count = get(operation, keys, tokens_of(range(40)))
        check(40 in (count, operation.completed_tokens // 16), "pages are found")
        check(torch.equal(host.pages, pages), "bits of pages")
    check(storage.get_stats() is None, "get_stats")
    print("  40 pages stored and loaded by the controller's methods, all with their bits")
    num_same = 0
    for _ in range(num_trials):
        with tempfile.TemporaryDirectory() as folder:
            num_same += same_prefixes(hicache, rng, storage_of(hicache), folder, pages)
    print(
        f"  batch_exists_v2 gives what SGLang's storage of files does in {num_same} of {num_trials} trials, and finds "
        "fewer pages in the others, which it may"
    )
    storage.close()


def same_prefixes(hicache, rng, storage, folder, pages):
    """Returns whether two storages with the same random pages find the same prefix. Some releases of SGLang take the
    shortest prefix of all pools, even if not each pool can restore it; then the adapter's prefix may be shorter."""
    names, policies = list(hicache.PoolName)[1:4], hicache.PoolHitPolicy
    keys, storages = [str(page) for page in range(8)], [storage, storage_of(hicache, folder)]
    transfers = []
    for name in (hicache.PoolName.KV, *names):
        there = [page for page in range(8) if rng.random() < 0.9]
        tokens = tokens_of(there) if there else torch.empty(0)
        written = hicache.PoolTransfer(name, tokens, keys=[keys[page] for page in there])
        for each in storages:
            each.register_mem_host_pool_v2(HostPool(pages[:8]), name)
            check(all(each.batch_set_v2([written])[name]), f"pages of {name}")
        policy = rng.choice([policies.ALL_PAGES, policies.TRAILING_PAGES])
        transfers.append(hicache.PoolTransfer(name, keys=keys[: rng.randint(1, 3)], hit_policy=policy))
    mine, theirs = (each.batch_exists_v2(keys, transfers[1:]) for each in storages)
    check(mine.kv_hit_pages <= theirs.kv_hit_pages, "the prefix that can be restored")
    check(getattr(theirs, "restorable_prefix_pages", None) is None or mine == theirs, "which prefixes can be restored")
    return mine.kv_hit_pages == theirs.kv_hit_pages


class DevicePool:
    """SGLang's paged cache of a model, on the CPU, as its host pools see it: keys and values by layer."""

    PAGE, NUM_PAGES, LAYERS, HEADS, WIDTH = 16, 48, 3, 2, 64
    start_layer, end_layer, layer_num, head_num = 0, LAYERS, LAYERS, HEADS
    head_dim = v_head_dim = WIDTH
    size, row_dim, store_dtype, dtype = PAGE * (NUM_PAGES - 1), HEADS * WIDTH, torch.bfloat16, torch.bfloat16
    device, page_size, layer_shard_enabled = torch.device("cpu"), PAGE, False
    scales = transfer_buffers = host_capacity_tokens = None

    def __init__(self):
        rows = self.PAGE * self.NUM_PAGES
        self.k_buffer, self.v_buffer = (
            [torch.zeros(rows, self.HEADS, self.WIDTH, dtype=self.dtype) for _ in range(self.LAYERS)] for _ in range(2)
        )
        self.k_data_ptrs, self.v_data_ptrs = (
            torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
            for tensors in (self.k_buffer, self.v_buffer)
        )
        self.buffers = types.SimpleNamespace(
            k=tuple(self.k_buffer), v=tuple(self.v_buffer), k_data_ptrs=self.k_data_ptrs, v_data_ptrs=self.v_data_ptrs
        )

    def validate(self):
        """Does nothing. Releases since 0.5.23 ask for a description of the pool, and this object is also that."""

    def blocks(self, pages):
        """Returns the bits of pages: [keys of all layers then values, pages, bytes]."""
        tensors = [tensor.view(torch.int8).view(self.NUM_PAGES, -1) for tensor in (*self.k_buffer, *self.v_buffer)]
        return torch.stack([tensor[pages] for tensor in tensors])

    def write(self, pages, rng, share_of_noise=0.0):
        kinds = [8 * page + int(rng.random() >= share_of_noise) for page in range(len(pages))]
        for tensor in (*self.k_buffer, *self.v_buffer):
            blocks = tensor.view(torch.int8).view(self.NUM_PAGES, -1)
            blocks[pages] = pages_of(8 * len(pages), blocks.shape[1], rng)[kinds]


def host_pool_of(device_pool, host_bytes):
    """Returns the host pool that SGLang makes if its plugin ibp_host_pool is chosen."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.plugins.hook_registry import HookRegistry

    os.environ["SGLANG_PLUGINS"] = "ibp_host_pool"
    sglang.register_host_pool()
    HookRegistry.apply_hooks()
    made = mha.get_mha_host_pool_cls(device_pool)
    given = {}
    if "device_capacity_tokens" in inspect.signature(mha.MHATokenToKVPoolHost).parameters:
        given = {"device_capacity_tokens": device_pool.size, "start_layer": 0, "end_layer": device_pool.LAYERS}
    return made(device_pool, 2.0, host_bytes * 1e-9, device_pool.PAGE, "page_first_direct", **given)


def try_sglang_host_pool(num_steps=150):
    """Moves nodes of a prefix tree to the host pool and back to other pages, through SGLang's engine of transfers."""
    from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine

    rng, device, engine = random.Random(0), DevicePool(), L2TransferEngine("direct")
    raw_bytes = 2 * device.LAYERS * device.row_dim * 2 * device.PAGE  # per page
    pool = host_pool_of(device, 30 * raw_bytes)
    check(type(pool).__name__ == "IBPHostPool", "the class of the host pool")
    check(pool.page_num >= 42 and pool.blocks.num_raw_pages == 0, "1.4 times the pages")
    kept, num_loaded, most_raw = [], 0, 0  # kept: (tokens of the host pool, bits)
    for step in range(num_steps):
        pages = rng.sample(range(device.NUM_PAGES), rng.randint(1, 6))
        device.write(pages, rng, 0.05 if step else 0.0)
        host = pool.alloc(len(pages) * device.PAGE)
        while host is None:  # SGLang drops a node.
            pool.free(kept.pop(rng.randrange(len(kept)))[0])
            host = pool.alloc(len(pages) * device.PAGE)
        kept.append((host, device.blocks(pages)))
        engine.submit_device_to_host([L2Transfer(pool, device, host, tokens_of(pages))])
        device.write(pages, rng)  # SGLang may overwrite pages after a store.
        most_raw = max(most_raw, pool.blocks.num_raw_pages)
        host, bits = rng.choice(kept)
        pages = rng.sample(range(device.NUM_PAGES), len(host) // device.PAGE)
        layers = []
        loads = [L2Transfer(pool, device, host, tokens_of(pages))]
        engine.submit_host_to_device(loads, transfer_layer_id_max=device.LAYERS, on_layer_done=layers.append)
        check(layers == list(range(device.LAYERS)), "layers are loaded one by one")
        check(torch.equal(device.blocks(pages), bits), "the bits of loaded pages")
        num_loaded += len(pages)
        page = pool.get_data_page(host[0])
        order = bits[:, 0].view(device.dtype).flatten()  # keys of all layers, then values
        check(torch.equal(*map(bits_of, (page, order))), "the bits of a page for storage")
        pool.set_from_flat_data_page(host[0], page)
        check(torch.equal(*map(bits_of, (pool.get_data_page(host[0]), page))), "the bits of a page from storage")
    check(num_loaded > 300 and most_raw > 0, "how much of the host pool has been tried")
    pool.destroy()
    print(
        f"  {num_steps} nodes in the host pool, {num_loaded} pages loaded with their bits, at most {most_raw} kept raw"
    )


# ---- LMCache ----


def storage_manager(num_bytes):
    """Returns LMCache's own storage manager. Its first tier is host memory, and the second is the adapter."""
    from lmcache.v1 import memory_management
    from lmcache.v1.distributed import config
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.storage_manager import StorageManager

    memory_management._allocate_cpu_memory = lambda size, *rest, **more: torch.empty(size, dtype=torch.uint8)
    adapter = {"type": "plugin", "module_path": "ibp.integrations.lmcache", "class_name": "IBPL2Adapter"}
    adapter |= {"adapter_params": {"pool_bytes": num_bytes}}
    memory = config.L1MemoryManagerConfig(size_in_bytes=16 * num_bytes, use_lazy=False, shm_name="")
    made = {
        "l1_manager_config": config.L1ManagerConfig(memory_config=memory),
        "eviction_config": config.EvictionConfig(eviction_policy="noop"),
        "l2_adapter_config": parse_args_to_l2_adapters_config(types.SimpleNamespace(l2_adapter=[json.dumps(adapter)])),
    }
    return StorageManager(config.StorageManagerConfig(**made))


class Told:
    """A listener of LMCache, which checks what the adapter reports."""

    def __init__(self):
        self.there, self.num_dropped = set(), 0

    def on_l2_keys_stored(self, keys, sizes):
        self.there |= set(keys)

    def on_l2_keys_accessed(self, keys):
        check(self.there.issuperset(keys), "keys that are loaded are there")

    def on_l2_keys_deleted(self, keys):
        check(self.there.issuperset(keys), "keys that are dropped were there")
        self.there -= set(keys)
        self.num_dropped += len(keys)


def bits_of(tensor):
    return tensor.view(torch.int16)


def wait_until(is_so, what):
    for _ in range(2000):
        if is_so():
            return
        time.sleep(0.005)
    check(False, what)


def prefetched(api, manager, keys, layout):
    """Loads objects to the first tier. Returns a Bitmap that says which of them are there."""
    if hasattr(api, "PrefetchTaskSpec"):  # This is the interface since 0.5.6.
        spec = api.PrefetchTaskSpec([api.GroupedObjectKeys(keys, 0, layout)], fetching_policy="full")
    else:
        spec = api.PrefetchRequestSpec(keys, {0: layout}, policy=api.TrimPolicy.SPARSE)
    handle = manager.submit_prefetch_task(spec)
    check(manager.wait_prefetch_status(handle, 10), "a prefetch ends")
    result = manager.query_prefetch_status(handle)
    return result.hit_cells[0] if hasattr(result, "hit_cells") else result


def try_lmcache(num_rounds=40):
    """Stores and loads objects of two models of different sizes. Each round stores some and loads some that the first
    tier lacks."""
    from lmcache.v1.distributed import api

    rng, told, manager = random.Random(0), Told(), storage_manager(1 << 19)
    manager.register_l2_listener(told)
    ((_, adapter),) = manager.l2_adapters()
    shapes = [torch.Size([2, 4, 16, 64]), torch.Size([2, 1, 16, 64])]
    layouts = [api.MemoryLayoutDesc([shape], [torch.bfloat16]) for shape in shapes]
    content, num_loaded, num_absent = {}, 0, 0
    for step in range(num_rounds):
        model = step % 2
        chunks = pages_of(8, shapes[model].numel() * 2, rng).view(torch.bfloat16).view(-1, *shapes[model])
        keys = [api.ObjectKey(rng.randbytes(8), str(model), 0) for _ in chunks]
        has_modes = "mode" in inspect.signature(manager.reserve_write).parameters  # Releases until 0.5.5 have modes.
        objects = manager.reserve_write(keys, layouts[model], **({"mode": "new"} if has_modes else {}))
        for key, chunk in zip(keys, chunks):
            objects[key].tensor.copy_(chunk)
            content[key] = chunk
        manager.finish_write(keys)
        wait_until(lambda: keys[-1] in told.there, "objects are stored")
        manager.delete_l1_keys(keys)
        wanted = rng.sample([key for key in content if key.model_name == str(model) and key != keys[-1]], 4) + keys[-1:]
        hits = prefetched(api, manager, wanted, layouts[model])
        found = [key for number, key in enumerate(wanted) if hits.test(number)]
        check(keys[-1] in found, "what was stored last is found")
        with manager.read_prefetched_results(found) as loaded:
            same = all(torch.equal(*map(bits_of, (memory.tensor, content[key]))) for key, memory in zip(found, loaded))
            check(same, f"the bits of objects of model {model}")
        manager.finish_read_prefetched(found)
        manager.delete_l1_keys(found)
        num_loaded, num_absent = num_loaded + len(found), num_absent + len(wanted) - len(found)
    used = sum(content[key].nbytes for key in told.there)
    check(adapter.get_usage().total_bytes_used == used, "the bytes in use")
    some = sorted(told.there, key=lambda key: key.chunk_hash)[:5]
    adapter.delete(some)
    check(not told.there.intersection(some) and adapter.report_status()["is_healthy"], "objects are deleted")
    check(num_loaded > 60 and num_absent > 0 and told.num_dropped > 20, "how much has been tried")
    print(f"  {num_rounds} rounds, {num_loaded} objects loaded from the second tier, all with their bits")
    print(f"  {told.num_dropped} objects made room, {num_absent} were not found any more")
    manager.close()


# ---- the command ----

TRIES = {"vllm": try_vllm, "sglang": try_sglang, "lmcache": try_lmcache}


def run(release):
    """Tries an unpacked release in this process, or an installed package if there is no such folder. A process can
    import only one release of each package."""
    package = release.name.split("-")[0]
    if not release.is_dir():
        TRIES[package]()
        return
    sys.meta_path.insert(0, Finder(release, package))
    TRIES[package]()
    if (release / "sglang" / "srt" / "plugins").exists():
        try_sglang_host_pool()
    if package == "vllm":
        try_vllm_tiers()
        sys.modules.setdefault("regex", re)
        sys.meta_path += [Finder(release, name) for name in try_weights.OTHERS]
        try_weights.try_weights()
        try_sync.try_checkpoints()
        try_sync.try_sync()
        try_experts.try_experts()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", type=Path, metavar="FOLDER", help="PACKAGE-VERSION, or a name")
    releases = parser.parse_args().releases or sorted(ENGINES.glob("*-*"))
    for release in releases:
        if not release.is_dir():
            parser.error(f"there is no folder {release}: unpack the release by tools/record_interfaces.py first")
    if len(releases) == 1:
        run(releases[0])
        return
    failed = []
    for release in releases:
        print(release.name, flush=True)
        failed += [release.name] if subprocess.run([sys.executable, __file__, str(release)]).returncode else []
    if failed or not releases:
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else f"no release is unpacked in {ENGINES}")


if __name__ == "__main__":
    main()
