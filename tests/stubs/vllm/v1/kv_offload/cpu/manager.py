"""A manager of chunks as vLLM's: which keys are stored in which chunks, those used longest ago are given up first."""

from collections import OrderedDict

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, OffloadingManager, PrepareStoreOutput


class CPUOffloadingManager(OffloadingManager):
    def __init__(self, num_blocks, cache_policy="lru", enable_events=False):
        assert cache_policy == "lru"
        self.free, self.held, self.enable_events = list(range(num_blocks))[::-1], OrderedDict(), enable_events
        self.ready = set()

    def prepare_load(self, keys, req_context):
        assert all(key in self.ready for key in keys)
        return BlockIDsLoadStoreSpec([self.held[key] for key in keys])

    def prepare_store(self, keys, req_context):
        new = [key for key in keys if key not in self.held]
        evicted = []
        while len(self.free) < len(new):
            key, chunk = self.held.popitem(last=False)
            self.free.append(chunk)
            self.ready.discard(key)
            evicted.append(key)
        for key in new:
            self.held[key] = self.free.pop()
        return PrepareStoreOutput(new, BlockIDsLoadStoreSpec([self.held[key] for key in new]), evicted)

    def complete_store(self, keys, req_context, success=True):
        self.ready.update(keys)
