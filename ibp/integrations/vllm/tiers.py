"""A secondary tier for vLLM's `TieringOffloadingSpec`. It keeps chunks of the KV-cache coded in host memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 4294967296,
        "secondary_tiers": [{"type": "IBPSecondaryTier", "module_path": "ibp.integrations.vllm.tiers",
        "pool_bytes": 34359738368}]}}'

`docs/serving.md` lists the tested versions, and says how they were tested. vLLM keeps raw chunks in `cpu_bytes_to_use`
bytes of host memory, and passes every chunk that is stored there to the tier. The tier keeps the chunks coded in an
`ibp.kv.KeyedPages`, which drops the least recently used chunks when it is full.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..shared import Tasks, check_engine, dtype_of, pages_by

try:
    from vllm.v1.kv_offload import base  # type: ignore
    from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext  # type: ignore
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # type: ignore

    _missing: ImportError | None = None
    _MEDIUM = base.Medium.CPU if hasattr(base, "Medium") else None  # since vLLM 0.27
except ImportError as error:
    SecondaryTierManager = object
    _missing, _MEDIUM = error, None

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

__all__ = ["IBPSecondaryTier"]

_logger = logging.getLogger("vllm.ibp")  # vLLM shows the messages of loggers whose names begin with "vllm."


class IBPSecondaryTier(SecondaryTierManager):
    """A secondary tier for vLLM, which creates it if an entry of `secondary_tiers` names it in `type` and
    `module_path`.

    Its configuration must have `pool_bytes`, the size in bytes of the host memory for coded chunks. It may have
    `device`, the device that codes, "cpu" (the default) or "cuda"; `level`, "default" or "fast"; and `dtype`, the dtype
    of the chunks, if it is not the model's. Stores run on one thread of the scheduler's process, and loads on another.
    If the pool has no room for a chunk, the chunk is not stored, and vLLM does not find it later. If a chunk is dropped
    between lookup and load, vLLM computes it again.

    Attributes:
        pages: the `ibp.kv.KeyedPages`.

    Raises:
        ImportError: vLLM is not installed, or lacks a class that is needed.
        ValueError: `pool_bytes` is missing.
    """

    medium = _MEDIUM

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        check_engine("vllm", _missing)
        self.pages = pages_by(options, "the tier's configuration")()
        # releases before 0.31 have no detector
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        dtype = dtype_of(offloading_spec.config.model.dtype, options.get("dtype"))
        chunks = torch.from_numpy(np.asarray(primary_kv_view)).view(torch.uint8)
        self._chunks = chunks.view(dtype) if chunks.shape[1] % dtype.itemsize == 0 else chunks  # [chunks, values]
        numbers = itertools.count()
        self._stores, self._loads = (Tasks(numbers, lambda: None) for _ in range(2))
        _logger.info("ibp: a tier keeps chunks of %s compressed in host memory", str(dtype).removeprefix("torch."))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Returns whether a chunk is stored: HIT or MISS."""
        return LookupResult.HIT if key in self.pages else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store chunks of vLLM's memory."""
        self._stores.submit(self._run, self.pages.put, job_metadata, failed=JobResult(job_metadata.job_id, False))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to load chunks into vLLM's memory."""
        self._loads.submit(self._run, self.pages.get, job_metadata, failed=JobResult(job_metadata.job_id, False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended since the last call."""
        return [*self._stores.take_all().values(), *self._loads.take_all().values()]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Marks chunks as used now."""
        self.pages.touch(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Returns an empty context, because all requests are treated alike."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Waits for all jobs submitted so far."""
        for tasks in (self._stores, self._loads):
            tasks.wait()

    def shutdown(self) -> None:
        """Waits for the jobs that have begun, and frees the pool and its references to vLLM's memory."""
        for tasks in (self._stores, self._loads):
            tasks.close()
        self.pages.clear()
        del self._chunks

    def _run(self, move: Any, job: TransferJob) -> JobResult:
        """Stores or loads the chunks of a job. A chunk that fails does not stop the others; the job succeeds if all
        chunks succeed. move: `put` or `get` of `pages`."""
        numbers = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # the name before vLLM 0.30
        pairs = zip(job.keys, map(int, numbers), strict=True)
        return JobResult(job.job_id, all([move(key, self._chunks[number]) for key, number in pairs]))
