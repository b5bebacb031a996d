"""Names and parameters of vllm.v1.kv_offload.base."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()


class OffloadPolicy(Enum):
    CHUNK_LEVEL = auto()


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


class LoadStoreSpec:
    pass


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    def __init__(self, block_ids):
        self.block_ids = np.array(block_ids, dtype=np.int32)


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    def __init__(self, block_ids, group_sizes, block_indices):
        super().__init__(block_ids)
        assert sum(group_sizes) == len(block_ids) and len(block_indices) == len(group_sizes)
        self.group_sizes, self.block_indices = group_sizes, block_indices


@dataclass
class CanonicalKVCacheTensor:
    tensor: object
    page_size_bytes: int


@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int
    mapping: object = None


@dataclass
class CanonicalKVCaches:
    tensors: list
    group_data_refs: list


@dataclass
class PrepareStoreOutput:
    keys_to_store: list
    store_spec: LoadStoreSpec
    evicted_keys: list


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def prepare_load(self, keys, req_context): ...

    @abstractmethod
    def prepare_store(self, keys, req_context): ...

    @abstractmethod
    def on_new_request(self, req_context): ...

    def config_info(self):
        return [{}]


class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id, src_spec, dst_spec): ...

    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...

    @abstractmethod
    def get_finished(self): ...

    @abstractmethod
    def wait(self, job_ids): ...

    def shutdown(self):
        return


class OffloadingSpec(ABC):
    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {}

    @classmethod
    def config_info_keys(cls, extra_config):
        return ()

    def __init__(self, config):
        self.config, self.extra_config = config, config.extra_config
        self.replicated_layout = False
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @abstractmethod
    def get_manager(self): ...

    @abstractmethod
    def get_worker(self, kv_caches): ...
