"""Names and parameters of vllm.v1.kv_offload.tiering.base."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass
class TransferJob:
    job_id: int
    keys: list
    chunk_ids: object
    is_promotion: bool
    req_context: object
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: list | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(ABC):
    medium = cache_hit_source = None
    tolerates_off_thread_polling = False

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.tier_type, self._primary_kv_view = tier_type, primary_kv_view

    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def submit_store(self, job_metadata): ...

    @abstractmethod
    def submit_load(self, job_metadata): ...

    @abstractmethod
    def get_finished_jobs(self): ...

    @abstractmethod
    def on_new_request(self, req_context): ...

    @abstractmethod
    def drain_jobs(self): ...

    def shutdown(self):
        return
