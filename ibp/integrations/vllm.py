"""vLLM's KV-cache offloading into pools of coded pages: the same host memory keeps 1.4 times the tokens.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "IBPOffloadingSpec", "spec_module_path": "ibp.integrations.vllm",
        "cpu_bytes_to_use": 34359738368}}'

For vLLM 0.26 and newer. `docs/kv-cache.md` names the versions that were tried, and how. The scheduler's side is vLLM's
own `CPUOffloadingSpec` and its manager, told of more host memory than there is; `IBPOffloadingWorker` moves the pages.

vLLM takes no failed transfer. A page for which the pool's overflow has no room is therefore kept as it is, in pageable
host memory beside the pool, until its chunk is stored anew: `IBPOffloadingWorker.num_raw_pages` says how many are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import ibp

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

USUAL_GAIN = 1.4  # chunks for each raw one: what BF16 keys and values give
_SAMPLE_BYTES = 4 << 20  # of blocks, from which a codebook is learned
_WHOLE_ROWS = 2048  # bytes that pages are rounded up to, where the tensor is padded so far: they divide into rows
_STORES_A_COMPACTION = 16  # overflow is compacted at most once while such a part of the pages is stored
_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}


def _refuse_without_vllm() -> None:
    if _missing is not None:
        raise ImportError(
            "ibp.integrations.vllm needs vLLM with vllm.v1.kv_offload.base.OffloadingWorker (0.26 or newer)"
        ) from _missing


class IBPOffloadingSpec(CPUOffloadingSpec):
    """What vLLM makes by `spec_name` and `spec_module_path`: its own `CPUOffloadingSpec` with another worker.

    Of `kv_connector_extra_config` it reads `cpu_bytes_to_use`, bytes of host memory for all workers together, and
    optionally: `ibp_gain`, chunks for each raw one that would fit, 1.4; `ibp_level`, "default" or "fast"; `ibp_dtype`,
    what the pages hold, where it is not the model's dtype. `CPUOffloadingSpec` reads its other options, such as
    `eviction_policy` and `store_threshold`, and its metrics count chunks at their original size.

    Attributes:
        pool_bytes: of host memory for one worker.
        num_chunks: how many chunks the scheduler gives out.

    Raises:
        ImportError: vLLM is not there, or is older.
        ValueError: `cpu_bytes_to_use` is missing, or an option is out of range.
    """

    _worker: IBPOffloadingWorker | None  # as CPUOffloadingSpec sets it

    def __init__(self, config: Any) -> None:
        _refuse_without_vllm()
        options = config.extra_config
        if not options.get("cpu_bytes_to_use"):
            raise ValueError("kv_connector_extra_config has no cpu_bytes_to_use: bytes of host memory for the KV-cache")
        gain = float(options.get("ibp_gain", USUAL_GAIN))
        if not 1 <= gain <= 16:
            raise ValueError(f"ibp_gain is {gain}; wanted 1 to 16 chunks for each raw one")
        host_bytes = int(options["cpu_bytes_to_use"])
        self.pool_bytes = host_bytes // max(1, config.parallel.world_size)
        changes: dict[str, Any] = {"extra_config": {**options, "cpu_bytes_to_use": int(host_bytes * gain)}}
        if hasattr(config, "replicated_layout"):  # one copy for all workers; here each has a pool of its own
            changes["replicated_layout"] = False
        super().__init__(dataclasses.replace(config, **changes))
        if not hasattr(self, "num_chunks"):
            self.num_chunks: int = self.num_blocks  # its name before 0.30

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


class _Pool:
    """Pages of one size, each of a block of several tensors: coded in a store, or as they are where that has no room.

    The codebook is learned from the blocks that are stored first, and the store is made then.

    Attributes:
        num_tensors: the most that a group of layers has of such pages.
        store: None before the first store.
        raw: by page, its blocks as they are.
    """

    def __init__(self, page_bytes: int, dtype: torch.dtype, level: str, device: torch.device) -> None:
        self.page_bytes, self.num_tensors = page_bytes, 0
        self._dtype = torch.uint8 if page_bytes % dtype.itemsize else dtype
        self._level, self._device = level, device
        self.store: ibp.kv.KVStore | None = None
        self.raw: dict[int, list[torch.Tensor]] = {}
        self._lost_some, self._num_stored = False, 0  # since the last compaction

    def make_store(self, parts: list[_PagePart], num_pages: int, pool_bytes: int) -> None:
        sample = []
        for part in parts:
            tensors = part.span.paged.tensors
            count = max(1, _SAMPLE_BYTES // (len(parts) * len(tensors) * self.page_bytes))
            some = torch.as_tensor(part.blocks[:count], device=self._device)
            sample += [tensor[some] for tensor in tensors]
        self.store = ibp.kv.KVStore(
            torch.cat(sample).view(self._dtype),
            page_bytes=self.page_bytes,
            num_pages=num_pages,
            pool_bytes=pool_bytes,
            num_tensors=self.num_tensors,
            level=self._level,
            device=self._device,
        )

    def keep(self, part: _PagePart, lost: set[int]) -> None:
        """Copies the pages that were lost from their blocks."""
        self._num_stored += len(part.pages)
        self._lost_some = self._lost_some or bool(lost)
        for page, block in zip(part.pages, part.blocks):
            if page in lost:
                self.raw[page] = [tensor[block].to("cpu", copy=True) for tensor in part.span.paged.tensors]

    def compact(self) -> None:
        """Makes room in the overflow, where that was short and enough has been stored since the last time."""
        if self._lost_some and self.store is not None and self._num_stored > len(self.store) // _STORES_A_COMPACTION:
            self.store.compact()
            self._lost_some, self._num_stored = False, 0


class _Span(NamedTuple):
    """The tensors of a group of layers whose blocks are pages of one pool."""

    pool: _Pool
    paged: ibp.kv.PagedTensors


class _PagePart(NamedTuple):
    """Blocks of a span and the pages that they become, or come from."""

    span: _Span
    pages: list[int]
    blocks: list[int]


@dataclasses.dataclass
class _TransferJob:
    """Pages on their way: the parts whose pages are coded, and their transfers."""

    stores: bool
    num_bytes: int
    transfers: list[tuple[_PagePart, ibp.kv.Transfer]] = dataclasses.field(default_factory=list)
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # before and after

    def is_done(self) -> bool:
        return self.events is None or self.events[1].query()

    def seconds(self) -> float | None:
        return None if self.events is None else self.events[0].elapsed_time(self.events[1]) * 1e-3


class IBPOffloadingWorker(OffloadingWorker):
    """Moves blocks of vLLM's paged tensors to the pages of `ibp.kv.KVStore` and back, on streams of its own.

    Each size of blocks has a pool. Its codebook is learned from the blocks that are stored first, and it is made then.
    A page is a GPU block of all the layers of a group that have such blocks.

    Args:
        kv_caches: vLLM's tensors.
        num_chunks, blocks_per_chunk: how many chunks the scheduler gives out, and GPU blocks of each.
        pool_bytes: of host memory.
        dtype: what the pages hold.
        level: of the codebook, see `ibp.compress`.

    Raises:
        ImportError: vLLM is not there, or is older.
        RuntimeError: the blocks of a tensor are no rows of bytes.
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
        self._num_chunks, self._blocks_per_chunk, self._pool_bytes = num_chunks, blocks_per_chunk, pool_bytes
        self._device = kv_caches.tensors[0].tensor.device
        self._pools: dict[tuple[int, ...], _Pool] = {}
        tensors = _pages_of_tensors(kv_caches)
        self._spans = [list(self._spans_of(refs, tensors, dtype, level)) for refs in kv_caches.group_data_refs]
        self._block_bytes = [sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs]
        self._jobs: dict[int, _TransferJob] = {}  # in the order in which they were submitted
        self._finished: list[TransferResult] = []
        on_gpu = self._device.type == "cuda"
        self._store_stream, self._load_stream, self._expedited_stream = (
            torch.cuda.Stream(self._device) if on_gpu else None for _ in range(3)
        )

    def _spans_of(
        self, refs: Iterable[Any], tensors: dict[int, torch.Tensor], dtype: torch.dtype, level: str
    ) -> Iterator[_Span]:
        alike: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for number in dict.fromkeys(ref.tensor_idx for ref in refs):
            tensor = tensors[number]
            alike.setdefault((*tensor.shape, tensor.stride(0)), []).append(tensor)
        for kind, members in alike.items():
            if kind not in self._pools:
                self._pools[kind] = _Pool(members[0].shape[1], dtype, level, self._device)
            pool = self._pools[kind]
            pool.num_tensors = max(pool.num_tensors, len(members))
            yield _Span(pool, ibp.kv.PagedTensors(members))

    @property
    def num_raw_pages(self) -> int:
        """Pages for which the pools had no room."""
        return sum(len(pool.raw) for pool in self._pools.values())

    @property
    def stores(self) -> list[ibp.kv.KVStore]:
        """The pools that have been made, one for each size of blocks; none before the first store."""
        return [pool.store for pool in self._pools.values() if pool.store is not None]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begins to store GPU blocks, once the current stream is done with them."""
        job = _TransferJob(True, self._bytes_of(src_spec))
        parts = list(self._parts(src_spec, dst_spec))
        self._make_stores(parts)
        with self._timed(job, self._store_stream):
            for part in parts:
                store = part.span.pool.store
                assert store is not None
                transfer = store.store(part.pages, part.span.paged, part.blocks, stream=self._store_stream)
                job.transfers.append((part, transfer))
        self._jobs[job_id] = job
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begins to load chunks into GPU blocks; with expedited beside the loads that were submitted before.

        Raises:
            RuntimeError: nothing has been stored yet.
        """
        job = _TransferJob(False, self._bytes_of(dst_spec))
        stream = self._expedited_stream if expedited else self._load_stream
        with self._timed(job, stream):
            for part in self._parts(dst_spec, src_spec):
                if part.span.pool.store is None:
                    raise RuntimeError("a load was submitted before any store")
                coded = self._load_raw(part)
                if coded.pages:
                    transfer = part.span.pool.store.load(coded.pages, part.span.paged, coded.blocks, stream=stream)
                    job.transfers.append((coded, transfer))
        self._jobs[job_id] = job
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that are done, each once."""
        self._settle()
        if not self._jobs:
            for pool in self._pools.values():
                pool.compact()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Lets the host wait for jobs. The blocks that they read are vLLM's to write then."""
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None and job.events is not None:
                job.events[1].synchronize()
        self._settle()

    def shutdown(self) -> None:
        """Waits for all jobs, and frees the pools."""
        self.wait(set(self._jobs))
        self._finished.clear()
        for pool in self._pools.values():
            pool.store = None
            pool.raw.clear()

    # ---- how ----

    def _make_stores(self, parts: list[_PagePart]) -> None:
        all_bytes = sum(pool.page_bytes * pool.num_tensors for pool in self._pools.values())
        for pool in self._pools.values():
            mine = [part for part in parts if part.span.pool is pool]
            if mine and pool.store is None:
                share = self._pool_bytes * pool.page_bytes * pool.num_tensors // all_bytes
                pool.make_store(mine, self._num_chunks * self._blocks_per_chunk, share)

    def _bytes_of(self, gpu: GPULoadStoreSpec) -> int:
        return sum(count * block_bytes for count, block_bytes in zip(gpu.group_sizes, self._block_bytes))

    def _parts(self, gpu: GPULoadStoreSpec, chunks: LoadStoreSpec) -> Iterator[_PagePart]:
        """The parts of a transfer. A group's blocks follow each other in its chunks; the first may begin in the middle
        of one."""
        first_block, first_chunk, many = 0, 0, self._blocks_per_chunk
        for spans, count, index in zip(self._spans, gpu.group_sizes, gpu.block_indices):
            if not count:
                continue
            skipped = int(index) % many
            num_chunks = -(-(count + skipped) // many)
            numbers = np.asarray(chunks.block_ids[first_chunk : first_chunk + num_chunks], dtype=np.int64)
            pages = (numbers[:, None] * many + np.arange(many)).ravel()[skipped : skipped + count]
            blocks = gpu.block_ids[first_block : first_block + count]
            first_block, first_chunk = first_block + count, first_chunk + num_chunks
            for span in spans:
                yield _PagePart(span, pages.tolist(), [int(block) for block in blocks])

    @contextlib.contextmanager
    def _timed(self, job: _TransferJob, stream: torch.cuda.Stream | None) -> Iterator[None]:
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

    def _load_raw(self, part: _PagePart) -> _PagePart:
        """Copies the pages that are not coded, on the current stream. Returns the part with the coded pages. Its blocks
        are all different: only vLLM's null block, which nobody reads, may come several times."""
        raw, tensors = part.span.pool.raw, part.span.paged.tensors
        page_of = dict(zip(part.blocks, part.pages))
        for block, page in page_of.items():
            if page in raw:
                for tensor, kept in zip(tensors, raw[page]):
                    tensor[block].copy_(kept, non_blocking=True)
        coded = {block: page for block, page in page_of.items() if page not in raw}
        return _PagePart(part.span, list(coded.values()), list(coded))

    def _settle(self) -> None:
        """Ends the jobs that are done, in the order in which they were submitted: pages that found no room are copied
        while their blocks are still as they were, and raw copies that newer pages replace are dropped."""
        for job_id in [job_id for job_id, job in self._jobs.items() if job.is_done()]:
            job = self._jobs.pop(job_id)
            success = self._settle_store(job) if job.stores else _settle_load(job)
            self._finished.append(
                TransferResult(job_id=job_id, success=success, transfer_size=job.num_bytes, transfer_time=job.seconds())
            )

    def _settle_store(self, job: _TransferJob) -> bool:
        pages = [page for part, _ in job.transfers for page in part.pages]
        for pool in self._pools.values():  # all of them: a chunk may have been another group's before
            for page in pages:
                pool.raw.pop(page, None)
        for part, transfer in job.transfers:
            part.span.pool.keep(part, set(transfer.lost()))
        return True


def _settle_load(job: _TransferJob) -> bool:
    try:
        for _, transfer in job.transfers:
            transfer.synchronize()
    except (IndexError, ibp.CorruptTableError):
        return False
    return True


def _pages_of_tensors(kv_caches: CanonicalKVCaches) -> dict[int, torch.Tensor]:
    """By number of the tensor, [num_blocks, bytes of a page], int8, over its memory. Groups of layers that share a
    tensor may use different parts of a block: a page holds the largest, and padding behind it up to whole rows."""
    used: dict[int, int] = {}
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            used[ref.tensor_idx] = max(used.get(ref.tensor_idx, 0), ref.page_size_bytes)
    pages = {}
    for number, page_bytes in used.items():
        tensor = kv_caches.tensors[number].tensor.view(torch.int8)
        blocks = tensor.view(len(tensor), -1)
        pages[number] = blocks[:, : -(-page_bytes // _WHOLE_ROWS) * _WHOLE_ROWS]
    return pages
