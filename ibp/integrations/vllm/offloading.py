"""vLLM's KV-cache offloading with coded pages in host memory: 1.4 times as many tokens fit in the same memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm",
        "cpu_bytes_to_use": 34359738368}}'

`docs/serving.md` lists the tested versions, and says how they were tested. On the scheduler's side, vLLM's own
`CPUOffloadingSpec` and its manager are used, with a memory size that is larger than the real one. `IBPOffloadingWorker`
moves the pages.

vLLM cannot handle a failed transfer. If the pools are full, further pages are therefore kept raw, in additional host
memory; `IBPOffloadingWorker.blocks.num_raw_pages` counts them.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import torch

import ibp

from ..shared import check_engine, dtype_of

try:
    from vllm.v1.kv_offload.base import (  # type: ignore
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        OffloadingWorker,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # type: ignore

    _missing: ImportError | None = None
except ImportError as error:
    CPUOffloadingSpec = OffloadingWorker = object
    _missing = error

__all__ = ["IBPOffloadingSpec", "IBPOffloadingWorker"]

_logger = logging.getLogger("vllm.ibp")  # vLLM shows the messages of loggers whose names begin with "vllm."

# Default number of coded chunks that are kept in the memory of one raw chunk. BF16 keys and values allow this gain.
USUAL_GAIN = 1.4
# Pages are rounded up to a multiple of this size in bytes, if the tensor's padding allows it, so that they can be cut
# into complete rows.
_WHOLE_ROWS = 2048


class IBPOffloadingSpec(CPUOffloadingSpec):
    """The spec that vLLM makes from `spec_name` and `spec_module_path`. It is a `CPUOffloadingSpec` whose worker is an
    `IBPOffloadingWorker`.

    `kv_connector_extra_config` must have `cpu_bytes_to_use`, the size in bytes of the host memory of all workers
    together. It may have `ibp_gain`, the number of coded chunks that are kept in the memory of one raw chunk, 1.4 by
    default; `ibp_level`, "default" or "fast"; and `ibp_dtype`, the dtype of the pages. Give `ibp_dtype` if
    `--kv-cache-dtype` is "auto", its default, and the pages are not BF16. The options of `CPUOffloadingSpec`, such as
    `eviction_policy` and `store_threshold`, also apply. vLLM's metrics count chunks at their original size.

    Attributes:
        pool_bytes: size in bytes of the host memory of one worker.
        num_chunks: number of chunks that the scheduler can use.

    Raises:
        ImportError: vLLM is not installed, or lacks a class that is needed.
        ValueError: `cpu_bytes_to_use` is missing, or an option is out of range.
    """

    _worker: IBPOffloadingWorker | None  # set by CPUOffloadingSpec

    def __init__(self, config: Any) -> None:
        check_engine("vllm", _missing)
        options = config.extra_config
        if not options.get("cpu_bytes_to_use"):
            raise ValueError("kv_connector_extra_config has no cpu_bytes_to_use: bytes of host memory for the KV-cache")
        gain = float(options.get("ibp_gain", USUAL_GAIN))
        if not 1 <= gain <= 16:
            raise ValueError(f"ibp_gain is {gain}; wanted 1 to 16 chunks for each raw one")
        host_bytes = int(options["cpu_bytes_to_use"])
        self.pool_bytes = host_bytes // max(1, config.parallel.world_size)
        changes: dict[str, Any] = {"extra_config": {**options, "cpu_bytes_to_use": int(host_bytes * gain)}}
        # vLLM may keep one copy of replicated pages for all workers. Here each worker has a separate pool.
        if hasattr(config, "replicated_layout"):
            changes["replicated_layout"] = False
        super().__init__(dataclasses.replace(config, **changes))
        self._dtype = dtype_of(self.config.model.dtype, options.get("ibp_dtype"))
        if not hasattr(self, "num_chunks"):
            self.num_chunks: int = self.num_blocks  # the attribute's name before vLLM 0.30

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the worker, which moves pages."""
        if self._worker is None:
            options = self.config.extra_config
            self._worker = IBPOffloadingWorker(
                kv_caches,
                num_chunks=self.num_chunks,
                blocks_per_chunk=self.config.cache.blocks_per_chunk,
                pool_bytes=self.pool_bytes,
                dtype=self._dtype,
                level=options.get("ibp_level", "default"),
            )
        return self._worker


class IBPOffloadingWorker(OffloadingWorker):
    """Moves blocks of vLLM's paged tensors to the pages of an `ibp.kv.BlockStore` and back.

    Args:
        kv_caches: vLLM's tensors.
        num_chunks: number of chunks that the scheduler can use.
        blocks_per_chunk: number of GPU blocks in a chunk.
        pool_bytes: size in bytes of the host memory.
        dtype: the dtype of the pages.
        level: level of the codebooks, see `ibp.compress`.

    Attributes:
        blocks: the `ibp.kv.BlockStore`.

    Raises:
        ImportError: vLLM is not installed, or lacks a class that is needed.
        RuntimeError: a tensor cannot be viewed as rows of bytes, one for each block.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        num_chunks: int,
        blocks_per_chunk: int,
        pool_bytes: int,
        dtype: torch.dtype,
        level: str = "default",
    ) -> None:
        check_engine("vllm", _missing)
        self._blocks_per_chunk = blocks_per_chunk
        self._block_bytes = [sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs]
        self._num_bytes: dict[int, int] = {}  # {job: raw size in bytes of the blocks that the job moves}
        self.blocks = ibp.kv.BlockStore(
            _groups_of(kv_caches),
            num_pages=num_chunks * blocks_per_chunk,
            pool_bytes=pool_bytes,
            dtype=dtype,
            level=level,
        )
        _logger.info(
            "ibp: pages of the KV-cache are kept compressed in host memory: room for %s chunks in %.2f GiB",
            f"{num_chunks:,}",
            pool_bytes / 2**30,
        )

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begins to store GPU blocks, after the work that was queued on the current stream."""
        self.blocks.store(job_id, self._moves(job_id, src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begins to load chunks into GPU blocks. expedited: whether the load may run at the same time as loads that
        were submitted before."""
        self.blocks.load(job_id, self._moves(job_id, dst_spec, src_spec), urgent=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Returns the jobs that have ended since the last call."""
        return [
            TransferResult(job_id, success, transfer_size=self._num_bytes.pop(job_id), transfer_time=seconds)
            for job_id, success, seconds in self.blocks.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Makes the host wait for jobs. Afterwards vLLM may write to the blocks that these jobs read."""
        self.blocks.wait(job_ids)

    def shutdown(self) -> None:
        """Waits for all jobs, and frees the pools."""
        self.blocks.close()

    def _moves(
        self, job_id: int, gpu: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> dict[int, tuple[list[int], list[int]]]:
        """Returns {group: (pages, blocks)} for a job. In each group, the job's blocks correspond to consecutive pages
        of the job's chunks. The first of these pages may be in the middle of a chunk."""
        self._num_bytes[job_id] = sum(count * size for count, size in zip(gpu.group_sizes, self._block_bytes))
        moves, first_block, first_chunk, many = {}, 0, 0, self._blocks_per_chunk
        for group, (count, index) in enumerate(zip(gpu.group_sizes, gpu.block_indices)):
            if not count:
                continue
            skipped = int(index) % many
            num_chunks = -(-(count + skipped) // many)
            numbers = np.asarray(chunks.block_ids[first_chunk : first_chunk + num_chunks], dtype=np.int64)
            pages = (numbers[:, None] * many + np.arange(many)).ravel()[skipped : skipped + count]
            blocks = gpu.block_ids[first_block : first_block + count]
            first_block, first_chunk = first_block + count, first_chunk + num_chunks
            moves[group] = pages.tolist(), [int(block) for block in blocks]
        return moves


def _groups_of(kv_caches: CanonicalKVCaches) -> list[list[torch.Tensor]]:
    """Returns the tensors of each group of layers, as views of vLLM's memory: int8 [num_blocks, n]. A group may use
    only the first bytes of each block of a tensor. n is the largest number of bytes that a group uses, rounded up to a
    multiple of _WHOLE_ROWS."""
    used: dict[int, int] = {}
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            used[ref.tensor_idx] = max(used.get(ref.tensor_idx, 0), ref.page_size_bytes)
    tensors = {}
    for number, page_bytes in used.items():
        tensor = kv_caches.tensors[number].tensor.view(torch.int8)
        tensors[number] = tensor.view(len(tensor), -1)[:, : -(-page_bytes // _WHOLE_ROWS) * _WHOLE_ROWS]
    return [
        [tensors[number] for number in dict.fromkeys(ref.tensor_idx for ref in refs)]
        for refs in kv_caches.group_data_refs
    ]
