"""vLLM's KV-cache offloading into a pool of coded pages: the same host memory keeps 1.4 times the tokens.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm",
        "cpu_bytes_to_use": 34359738368}}'

Written against the source of `vllm.v1.kv_offload` as it is from vLLM 0.26 on (OffloadingConfig, OffloadingSpec with
get_manager and get_worker, OffloadingWorker with submit_store and submit_load), and tested with stand-ins for these
classes: it has not run inside vLLM. The scheduler's side is vLLM's own `CPUOffloadingManager`, told of more chunks than
raw ones that would fit.

vLLM takes no failed transfer. A page for which the pool's overflow has no room is therefore kept as it is, in pageable
host memory beside the pool, until its chunk is stored anew: `IBPOffloadingWorker.num_raw_pages` says how many are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import ibp

try:
    from vllm.v1.kv_offload.base import (  # type: ignore
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # type: ignore
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # type: ignore

    _missing: ImportError | None = None
except ImportError as error:
    OffloadingSpec = OffloadingWorker = object
    _missing = error

__all__ = ["IBPOffloadingSpec", "IBPOffloadingWorker"]

USUAL_GAIN = 1.4  # chunks for each raw one: what BF16 keys and values give
_SAMPLE_BYTES = 4 << 20  # of blocks, from which the codebook is learned
_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}


def _refuse_without_vllm() -> None:
    if _missing is not None:
        raise ImportError(
            "ibp.integrations.vllm needs vLLM with vllm.v1.kv_offload.base.OffloadingWorker (0.26 or newer)"
        ) from _missing


class IBPOffloadingSpec(OffloadingSpec):
    """What vLLM makes by `spec_name` and `spec_module_path`.

    Of `kv_connector_extra_config` it reads `cpu_bytes_to_use`, bytes of host memory for all workers together, and
    optionally: `ibp_gain`, chunks for each raw one that would fit, 1.4; `ibp_level`, "default" or "fast"; `ibp_dtype`,
    what the pages hold, where it is not the model's dtype; `eviction_policy`, as vLLM's own spec.

    Raises:
        ImportError: vLLM is not there, or is older.
        ValueError: `cpu_bytes_to_use` is missing, or an option is out of range.
    """

    def __init__(self, config: Any) -> None:
        _refuse_without_vllm()
        super().__init__(config)
        options = config.extra_config
        if not options.get("cpu_bytes_to_use"):
            raise ValueError("kv_connector_extra_config has no cpu_bytes_to_use: bytes of host memory for the KV-cache")
        gain = float(options.get("ibp_gain", USUAL_GAIN))
        if not 1 <= gain <= 16:
            raise ValueError(f"ibp_gain is {gain}; wanted 1 to 16 chunks for each raw one")
        self.pool_bytes = int(options["cpu_bytes_to_use"]) // max(1, config.parallel.world_size)
        chunk_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        self.num_chunks = int(self.pool_bytes * gain) // chunk_bytes if chunk_bytes else 0
        self._manager: Any = None
        self._worker: IBPOffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Those of vLLM's own spec, whose manager reports them."""
        _refuse_without_vllm()
        return CPUOffloadingSpec.build_metric_definitions(extra_config)

    def get_manager(self) -> OffloadingManager:
        """vLLM's manager of chunks in host memory."""
        if self._manager is None:
            self._manager = CPUOffloadingManager(
                num_blocks=self.num_chunks,
                cache_policy=self.config.extra_config.get("eviction_policy", "lru"),
                enable_events=self.config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """What moves pages."""
        if self._worker is None:
            options = self.config.extra_config
            self._worker = IBPOffloadingWorker(
                kv_caches,
                num_chunks=self.num_chunks,
                blocks_per_chunk=self.config.cache.blocks_per_chunk,
                pool_bytes=self.pool_bytes,
                dtype=_dtype_of(options.get("ibp_dtype", self.config.model.dtype)),
                level=options.get("ibp_level", "default"),
            )
        return self._worker


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, _CACHE_DTYPES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.uint8


@dataclass
class _Job:
    """Pages on their way. parts: of each group of layers, (its number, pages, blocks, transfer)."""

    stores: bool
    parts: list[tuple[int, list[int], list[int], ibp.Transfer]] = field(default_factory=list)
    num_bytes: int = 0
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # before and after

    def is_done(self) -> bool:
        return self.events is None or self.events[1].query()

    def seconds(self) -> float | None:
        return None if self.events is None else self.events[0].elapsed_time(self.events[1]) * 1e-3


class IBPOffloadingWorker(OffloadingWorker):
    """Moves blocks of vLLM's paged tensors to the pages of an `ibp.KVStore` and back, on streams of its own.

    The codebook is learned from the blocks that are stored first, and the pool is made then. A page is a GPU block of
    all layers of a group.

    Args:
        kv_caches: vLLM's tensors, the blocks of which have one size.
        num_chunks, blocks_per_chunk: how many chunks the scheduler gives out, and GPU blocks of each.
        pool_bytes: of host memory.
        dtype: what the pages hold.
        level: of the codebook, see `ibp.compress`.

    Raises:
        ImportError: vLLM is not there, or is older.
        ValueError: blocks of layers have several sizes.
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
        _refuse_without_vllm()
        sizes = {ref.page_size_bytes for refs in kv_caches.group_data_refs for ref in refs}
        if len(sizes) != 1:
            raise ValueError(f"blocks of layers have {sorted(sizes)} bytes; wanted one size for all layers")
        (self._page_bytes,) = sizes
        self._groups = [
            [_bytes_of_blocks(kv_caches.tensors[ref.tensor_idx].tensor)[:, : self._page_bytes] for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._paged = [ibp.PagedTensors(tensors) for tensors in self._groups]
        self._num_chunks, self._blocks_per_chunk, self._pool_bytes = num_chunks, blocks_per_chunk, pool_bytes
        self._dtype, self._level, self._device = dtype, level, self._groups[0][0].device
        self._store: ibp.KVStore | None = None
        self._raw: dict[int, list[torch.Tensor]] = {}  # by page: blocks of all layers, as they are
        self._jobs: dict[int, _Job] = {}
        on_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if on_gpu else [None, None]

    @property
    def num_raw_pages(self) -> int:
        """Pages for which the pool had no room."""
        return len(self._raw)

    @property
    def store(self) -> ibp.KVStore | None:
        """The pool; None before the first store."""
        return self._store

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begins to store GPU blocks, once the current stream is done with them."""
        job = _Job(stores=True)
        parts = list(self._parts(src_spec, dst_spec))
        if self._store is None:
            self._store = self._make_store(parts)
        with self._timed(job, self._streams[0]):
            for group, pages, blocks in parts:
                transfer = self._store.store(pages, self._paged[group], blocks, stream=self._streams[0])
                job.parts.append((group, pages, blocks, transfer))
                job.num_bytes += transfer.num_bytes
        self._jobs[job_id] = job
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begins to load chunks into GPU blocks."""
        job = _Job(stores=False)
        if self._store is None:
            raise RuntimeError("a load was submitted before any store")
        with self._timed(job, self._streams[1]):
            for group, pages, blocks in self._parts(dst_spec, src_spec):
                coded = [k for k, page in enumerate(pages) if page not in self._raw]
                some = [pages[k] for k in coded], [blocks[k] for k in coded]
                transfer = self._store.load(some[0], self._paged[group], some[1], stream=self._streams[1])
                job.parts.append((group, *some, transfer))
                job.num_bytes += len(pages) * self._page_bytes * len(self._groups[group])
                self._load_raw(group, pages, blocks)
        self._jobs[job_id] = job
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that are done, each once."""
        results = []
        for job_id in [job_id for job_id, job in self._jobs.items() if job.is_done()]:
            job = self._jobs.pop(job_id)
            success = self._settle(job)
            results.append(
                TransferResult(job_id=job_id, success=success, transfer_size=job.num_bytes, transfer_time=job.seconds())
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Lets the host wait for jobs."""
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None and job.events is not None:
                job.events[1].synchronize()

    def shutdown(self) -> None:
        """Waits for all jobs, and frees the pool."""
        self.wait(set(self._jobs))
        self._jobs.clear()
        self._raw.clear()
        self._store = None

    # ---- how ----

    def _make_store(self, parts: Sequence[tuple[int, list[int], list[int]]]) -> ibp.KVStore:
        group, _, blocks = next(part for part in parts if part[2])
        count = max(1, _SAMPLE_BYTES // (self._page_bytes * len(self._groups[group])))
        some = torch.as_tensor(blocks[:count], device=self._device)
        sample = torch.cat([tensor[some] for tensor in self._groups[group]])
        return ibp.KVStore(
            sample.view(self._dtype),
            page_bytes=self._page_bytes,
            num_pages=self._num_chunks * self._blocks_per_chunk,
            pool_bytes=self._pool_bytes,
            num_tensors=max(map(len, self._groups)),
            level=self._level,
            device=self._device,
        )

    def _parts(self, gpu: GPULoadStoreSpec, chunks: LoadStoreSpec) -> Iterator[tuple[int, list[int], list[int]]]:
        """(number of the group, pages, blocks) of a transfer. A group's blocks follow each other in its chunks; the
        first may begin in the middle of one."""
        first_block, first_chunk, many = 0, 0, self._blocks_per_chunk
        for group, (count, index) in enumerate(zip(gpu.group_sizes, gpu.block_indices)):
            skipped = int(index) % many
            num_chunks = -(-(count + skipped) // many) if count else 0
            numbers = np.asarray(chunks.block_ids[first_chunk : first_chunk + num_chunks], dtype=np.int64)
            pages = (numbers[:, None] * many + np.arange(many)).ravel()[skipped : skipped + count]
            blocks = gpu.block_ids[first_block : first_block + count]
            first_block, first_chunk = first_block + count, first_chunk + num_chunks
            if count:
                yield group, pages.tolist(), [int(block) for block in blocks]

    @contextlib.contextmanager
    def _timed(self, job: _Job, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Work of a job on a stream, behind that of the current one and between events."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            job.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            job.events[0].record()
            yield
            job.events[1].record()

    def _load_raw(self, group: int, pages: list[int], blocks: list[int]) -> None:
        """Copies the pages that are not in the pool, on the current stream."""
        for page, block in zip(pages, blocks):
            for tensor, raw in zip(self._groups[group], self._raw.get(page, ())):
                tensor[block].copy_(raw, non_blocking=True)

    def _settle(self, job: _Job) -> bool:
        """Keeps the pages that found no room as they are, while their blocks are vLLM's to keep. Returns whether all is
        well."""
        found_no_room = False
        for group, pages, blocks, transfer in job.parts:
            if not job.stores:
                try:
                    transfer.synchronize()
                except (IndexError, ibp.CorruptTableError):
                    return False
                continue
            lost = set(transfer.lost())
            for page, block in zip(pages, blocks):
                self._raw.pop(page, None)
                if page in lost:
                    self._raw[page] = [tensor[block].to("cpu", copy=True) for tensor in self._groups[group]]
            found_no_room = found_no_room or bool(lost)
        if found_no_room and not self._jobs and self._store is not None:
            self._store.compact()
        return True


def _bytes_of_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """[num_blocks, bytes of a block], int8, over the same memory."""
    return tensor.view(torch.int8).flatten(1)
