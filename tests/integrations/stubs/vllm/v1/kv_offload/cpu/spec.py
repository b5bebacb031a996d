"""vLLM's own spec: it counts chunks and makes the manager; the worker is not here."""

from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager


class CPUOffloadingSpec(OffloadingSpec):
    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {"vllm:kv_offload_cpu_cache_usage_perc": "a gauge"}

    @classmethod
    def config_info_keys(cls, extra_config):
        return ("cpu_num_chunks",)

    def __init__(self, config):
        super().__init__(config)
        copies = 1 if config.replicated_layout else config.parallel.world_size
        self.replicated_layout = config.replicated_layout
        chunk_bytes = config.worker_kv_bytes_per_block * copies * self.blocks_per_chunk
        self.num_chunks = int(self.extra_config["cpu_bytes_to_use"]) // chunk_bytes if chunk_bytes else 0
        self._manager = self._worker = None

    def get_manager(self):
        if self._manager is None:
            self._manager = CPUOffloadingManager(
                num_chunks=self.num_chunks,
                cache_policy=self.extra_config.get("eviction_policy", "lru"),
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                info={"cpu_num_chunks": self.num_chunks},
            )
        return self._manager

    def get_worker(self, kv_caches):
        raise NotImplementedError
