"""A manager of chunks as vLLM's: which keys are stored in which chunks, those used longest ago are given up first."""

from collections import OrderedDict

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, OffloadingManager, PrepareStoreOutput


class CPUOffloadingManager(OffloadingManager):
    def __init__(
        self,
        num_chunks,
        cache_policy="lru",
        cache_policy_module_path=None,
        enable_events=False,
        store_threshold=1,
        max_tracker_size=64_000,
        info=None,
    ):
        self.num_chunks, self.store_threshold, self.info = num_chunks, store_threshold, info
        self.free, self.held = list(range(num_chunks))[::-1], OrderedDict()
        self.ready = set()

    def on_new_request(self, req_context):
        return None

    def lookup(self, key, req_context):
        return key in self.ready

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

    def config_info(self):
        return [self.info]
