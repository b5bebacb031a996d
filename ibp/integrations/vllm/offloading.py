"""vLLM's KV-cache offloading into pools of coded pages: the same host memory keeps 1.4 times the tokens.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm",
        "cpu_bytes_to_use": 34359738368}}'

`docs/serving.md` names the versions that were tried, and how. The scheduler's side is vLLM's own `CPUOffloadingSpec`
and its manager, which is told of more host memory than there is. `IBPOffloadingWorker` moves the pages.

vLLM cannot handle a failed transfer. Pages for which the pools have no room therefore stay raw;
`IBPOffloadingWorker.blocks.num_raw_pages` counts them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

import ibp

from ..shared.engines import check_engine, dtype_of

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

USUAL_GAIN = 1.4  # how many chunks are kept for each one that would fit raw; BF16 keys and values allow this many
_WHOLE_ROWS = 2048  # bytes to which pages are rounded up, if the tensor's padding allows, so that they divide into rows


class IBPOffloadingSpec(CPUOffloadingSpec):
    """The spec that vLLM makes from `spec_name` and `spec_module_path`: its own `CPUOffloadingSpec` with another
    worker.

    It reads from `kv_connector_extra_config`: `cpu_bytes_to_use`, bytes of host memory for all workers together;
    optionally `ibp_gain`, how many chunks are kept for each one that would fit raw, 1.4 by default; `ibp_level`,
    "default" or "fast"; and `ibp_dtype`, the dtype of the pages, if it is not that of `--kv-cache-dtype`, or, with the
    default "auto", not BF16. `CPUOffloadingSpec` reads its other options, such as `eviction_policy` and
    `store_threshold`, and its metrics count chunks at their original size.

    Attributes:
        pool_bytes: bytes of host memory for one worker.
        num_chunks: how many chunks the scheduler hands out.

    Raises:
        ImportError: vLLM is not installed, or does not have a class.
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
        # vLLM has one copy for all workers; here each worker has a pool of its own
        if hasattr(config, "replicated_layout"):
            changes["replicated_layout"] = False
        super().__init__(dataclasses.replace(config, **changes))
        self._dtype = dtype_of(self.config.model.dtype, options.get("ibp_dtype"))
        if not hasattr(self, "num_chunks"):
            self.num_chunks: int = self.num_blocks  # its name before 0.30

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
        num_chunks, blocks_per_chunk: how many chunks the scheduler hands out, and how many GPU blocks a chunk has.
        pool_bytes: bytes of host memory.
        dtype: the dtype of the pages.
        level: level of the codebooks, see `ibp.compress`.

    Attributes:
        blocks: the `ibp.kv.BlockStore`.

    Raises:
        ImportError: vLLM is not installed, or does not have a class.
        RuntimeError: the blocks of a tensor are not rows of bytes.
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
        self._num_bytes: dict[int, int] = {}  # by job
        self.blocks = ibp.kv.BlockStore(
            _groups_of(kv_caches),
            num_pages=num_chunks * blocks_per_chunk,
            pool_bytes=pool_bytes,
            dtype=dtype,
            level=level,
        )

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begins to store GPU blocks, after the work that was queued on the current stream."""
        self.blocks.store(job_id, self._moves(job_id, src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begins to load chunks into GPU blocks. expedited: whether the load may run beside the loads that were
        submitted before."""
        self.blocks.load(job_id, self._moves(job_id, dst_spec, src_spec), urgent=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Returns the jobs that have ended since the last call."""
        return [
            TransferResult(job_id, success, transfer_size=self._num_bytes.pop(job_id), transfer_time=seconds)
            for job_id, success, seconds in self.blocks.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Makes the host wait for jobs. Then vLLM may write to the blocks that they read."""
        self.blocks.wait(job_ids)

    def shutdown(self) -> None:
        """Waits for all jobs, and frees the pools."""
        self.blocks.close()

    def _moves(
        self, job_id: int, gpu: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> dict[int, tuple[list[int], list[int]]]:
        """Returns, by group, the pages and blocks of a job. A group's blocks are consecutive in its chunks; the
        first block may be in the middle of a chunk."""
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
    """Returns, by group of layers, its tensors, [num_blocks, bytes of a block], int8, over vLLM's memory. Groups
    that share a tensor may use different parts of a block: a page holds the largest part, with padding up to whole
    rows."""
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
