"""Reads and codes tensors block by block, on the CPU's cores or on a GPU. Several blocks are read and coded at the same
time, and are returned in order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from .. import _core
from .._common.sequences import ahead
from .._layout.geometry import as_tensor
from .._machine import staging
from .._machine.ring import Turn
from .._rows.handle import Handle, Parts
from .._schemes import AnyCodebook
from ._source import SourceTensor

_WORD_BYTES = 8  # size in bytes of a word of a fingerprint (FORMAT.md section 10)
# Number of bytes that one call of `sum_words` adds to a fingerprint. It is small enough that the call uses a single
# thread.
_HASHED_BYTES = 1 << 20
_CPU = torch.device("cpu")


class Block(NamedTuple):
    """Bytes [start, end) of a tensor, which are read and coded together. Every block of a tensor except the last one
    holds whole groups of 32 rows. codebook: the codebook that codes the rows. None: the bytes are stored
    uncompressed."""

    tensor: SourceTensor
    start: int
    end: int
    codebook: AnyCodebook | None


class CodedBlock(NamedTuple):
    """A block in its stored form."""

    block: Block
    data: np.ndarray  # uint8, valid until `release` is called
    lengths: np.ndarray  # uint16, one for each row (FORMAT.md section 2); empty if the block has no codebook
    words: int  # the contribution of the block's original bytes to its tensor's fingerprint; 0 without a codebook
    release: Callable[[], object]  # lets another block use the memory of `data`; any thread may call it


def blocks_of(tensor: SourceTensor, codebook: AnyCodebook | None, block_bytes: int) -> Iterator[Block]:
    """Yields the blocks of a tensor. Each block except the last one has block_bytes bytes, rounded down to whole groups
    of 32 rows, but at least one group. Without a codebook, a row counts as one byte."""
    group = _core.ROWS_PER_BASE * (1 if codebook is None else codebook.row_bytes)
    for start, end in tensor.spans(max(1, block_bytes // group) * group):
        yield Block(tensor, start, end, codebook)


def _kept(block: Block, data: np.ndarray) -> CodedBlock:
    """Returns the stored form of a block without a codebook, which is its original bytes."""
    return CodedBlock(block, data, np.empty(0, np.uint16), 0, lambda: None)


# ---- on the CPU ----


class CpuCoder:
    """Codes blocks on threads. Each thread reads, codes and fingerprints one block at a time."""

    # Size of a block in bytes. With smaller blocks, Python takes more of the time; larger blocks do not fit in a core's
    # caches.
    block_bytes = 4 << 20

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._free: deque[torch.Tensor] = deque()

    def coded(self, blocks: Iterable[Block]) -> Generator[CodedBlock, None, None]:
        with ThreadPoolExecutor(self._jobs, "ibp-coder") as threads:
            yield from ahead(threads, self._code, blocks, 2 * self._jobs)

    def _code(self, block: Block) -> CodedBlock:
        data = block.tensor.read(block.start, block.end)
        if block.codebook is None:
            return _kept(block, data)
        size = data.size
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(IndexError):
            buffer = self._free.pop()
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        lengths = torch.empty(-(-size // block.codebook.row_bytes), dtype=torch.uint16, device="cpu")
        counts, none = torch.zeros(2, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
        rows, words = as_tensor(data), block.codebook.words(_CPU)
        index, sizes = (lengths, none, words, block.codebook.codec), (0, 0, 1, size)
        Handle(Parts(buffer[:0], buffer[:size], *index, *sizes, None, counts[:1])).encode(rows)  # packed, to `buffer`
        for at in range(0, size, _HASHED_BYTES):
            part, number = rows[at : at + _HASHED_BYTES], (block.start + at) // _WORD_BYTES
            torch.ops.ibp.sum_words.default(part, number, counts[1:])
        stored, total = counts.tolist()
        return CodedBlock(block, buffer[:stored].numpy(), lengths.numpy(), total, lambda: self._free.append(buffer))


# ---- on a GPU ----


class _Slot:
    """Buffers for one block: `raw` for its bytes before coding, and `coded` for its bytes after coding. Each buffer has
    memory on the device and pinned host memory."""

    def __init__(self, raw: Turn, coded: Turn) -> None:
        self.raw, self.coded = raw, coded
        # Six numbers: the size of the coded block in bytes, its `CodedBlock.words`, and the coder's fault record of
        # four numbers.
        self.facts = torch.empty(6, dtype=torch.int64, pin_memory=True, device="cpu")
        self.lengths = torch.empty(0, dtype=torch.uint16, device="cpu")  # pinned


class _Passing(NamedTuple):
    """A block that is being coded."""

    block: Block
    slot: _Slot | None  # None if the block has no codebook
    read: Future[np.ndarray]  # the block's original bytes, which a thread reads


class CudaCoder:
    """Codes blocks on a GPU. Threads read blocks into pinned memory. Three streams work at the same time: one copies
    blocks to the device, one codes them, and one copies coded blocks to the host. Meanwhile the caller writes an
    earlier block."""

    block_bytes = 16 << 20  # size of a block in bytes; the copy engines reach their full rate at 4 MiB
    _DEPTH = 2  # largest number of blocks in the queue for coding, and in the queue for copying to the host

    def __init__(self, device: torch.device, jobs: int) -> None:
        self._device = device
        self._readers = min(4, jobs)
        self._free: deque[_Slot] = deque()
        with torch.cuda.device(device):
            self._coder, self._down = torch.cuda.Stream(), torch.cuda.Stream()
            self._up = torch.cuda.Stream()

    def coded(self, blocks: Iterable[Block]) -> Generator[CodedBlock, None, None]:
        reading: deque[_Passing] = deque()
        coding: deque[_Passing] = deque()
        coming: deque[_Passing] = deque()
        left = iter(blocks)
        with ThreadPoolExecutor(self._readers, "ibp-reader") as pool:
            try:
                while True:
                    while len(reading) <= self._readers and (block := next(left, None)) is not None:
                        reading.append(self._begin(block, pool))
                    while reading and len(coding) < self._DEPTH:
                        coding.append(self._launch(reading.popleft()))
                    while coding and len(coming) < self._DEPTH:
                        coming.append(self._fetch(coding.popleft()))
                    if not coming:
                        return
                    yield self._finish(coming.popleft())
            finally:
                for passing in reading:
                    passing.read.cancel()
                for stream in (self._up, self._coder, self._down):
                    stream.synchronize()

    def _begin(self, block: Block, pool: ThreadPoolExecutor) -> _Passing:
        """Starts reading a block on a thread. A block that will be coded is read into pinned memory."""
        if block.codebook is None:
            return _Passing(block, None, pool.submit(block.tensor.read, block.start, block.end))
        slot = self._slot(block.end - block.start)

        def read() -> np.ndarray:
            to = slot.raw.host[: block.end - block.start].numpy()
            np.copyto(to, block.tensor.read(block.start, block.end))
            return to

        return _Passing(block, slot, pool.submit(read))

    def _slot(self, num_bytes: int) -> _Slot:
        """Returns a free slot, or a new one, whose buffers have at least num_bytes bytes each."""
        if self._free:
            slot = self._free.popleft()
        else:
            ways = (self._up, self._coder), (self._coder, self._down)
            slot = _Slot(*(Turn(self._device, streams, self.block_bytes, staging.empty_pinned) for streams in ways))
        slot.raw.reserve(num_bytes)
        slot.coded.reserve(num_bytes)
        return slot

    def _launch(self, passing: _Passing) -> _Passing:
        """Waits until a block is read. If the block is to be coded, queues its copy to the device, its coding, and the
        copies of its lengths and facts (see `_Slot`) to the host. Returns `passing`."""
        block, slot = passing.block, passing.slot
        num_bytes = passing.read.result().size
        if slot is None:
            return passing
        assert block.codebook is not None
        near = slot.raw.memory[:num_bytes]
        slot.raw.bring(self._up, [(near, slot.raw.host[:num_bytes])])
        slot.raw.wait(self._coder)
        slot.coded.claim(self._coder)
        with torch.cuda.stream(self._coder):
            lengths, facts = self._code(near, block.codebook, slot.coded.memory[:num_bytes], block.start)
            slot.lengths = torch.empty(lengths.shape, dtype=lengths.dtype, pin_memory=True, device="cpu")
            slot.lengths.copy_(lengths, non_blocking=True)
            slot.facts.copy_(facts, non_blocking=True)
        slot.raw.release(self._coder)
        slot.coded.hand_over(self._coder)
        return passing

    def _code(
        self, data: torch.Tensor, codebook: AnyCodebook, out: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes a block, and writes the result to `out`. Returns (lengths, facts as in `_Slot`), both on the device.
        start: the block's offset in the tensor, in bytes."""
        words, codec, row_bytes = codebook.words(self._device), codebook.codec, codebook.row_bytes
        none, facts = data[:0], torch.zeros(6, dtype=torch.int64, device=self._device)
        lengths = torch.ops.ibp.measure_rows.default(data, words, codec)
        index = torch.ops.ibp.index_rows.default(lengths, data.numel(), row_bytes, 0)
        parts = Parts(none, out, lengths, index[:-1], words, codec, 0, 0, 1, data.numel())
        torch.ops.ibp.encode_rows.default(Handle(parts).table, data, facts[2:])
        torch.ops.ibp.sum_words.default(data, start // _WORD_BYTES, facts[1:2])
        facts[:1].copy_(index[-1:])
        return lengths, facts

    def _fetch(self, passing: _Passing) -> _Passing:
        """Waits until a block is coded. Queues the copy of its coded bytes to the host. Returns `passing`. Raises
        RuntimeError if a row could not be coded, because the tensor has changed."""
        slot = passing.slot
        if slot is not None:
            slot.coded.filled.synchronize()
            stored, _, status, row, *_ = slot.facts.tolist()
            if status:
                name = passing.block.tensor.name
                raise RuntimeError(f"{name!r} changed while it was compressed: row {row} of a block")
            slot.coded.send(self._down, [(slot.coded.host[:stored], slot.coded.memory[:stored])])
        return passing

    def _finish(self, passing: _Passing) -> CodedBlock:
        """Waits until the stored form of a block is in host memory, and returns it."""
        slot = passing.slot
        if slot is None:
            return _kept(passing.block, passing.read.result())
        slot.coded.free.synchronize()
        stored, words = slot.facts[:2].tolist()
        data = slot.coded.host[:stored].numpy()
        return CodedBlock(passing.block, data, slot.lengths.numpy(), words, lambda: self._free.append(slot))
