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

_WORD_BYTES = 8  # bytes of a word of a fingerprint (FORMAT.md section 10)
# Number of bytes that one call adds to a fingerprint. `sum_words` does not divide them among torch's threads.
_HASHED_BYTES = 1 << 20
_CPU = torch.device("cpu")


class Block(NamedTuple):
    """Bytes [start, end) of a tensor. A block of rows holds whole groups of 32 rows, unless it is the tensor's last.
    codebook: the codebook of the rows. None: the bytes are kept as they are."""

    tensor: SourceTensor
    start: int
    end: int
    codebook: AnyCodebook | None


class CodedBlock(NamedTuple):
    """A block in its stored form."""

    block: Block
    data: np.ndarray  # uint8, valid until `release` is called
    lengths: np.ndarray  # uint16, one for each row (FORMAT.md section 2); empty if the block is kept
    words: int  # what the block's bytes before coding add to its tensor's fingerprint
    release: Callable[[], object]  # frees the memory of `data` for another block; any thread may call it


def blocks_of(tensor: SourceTensor, codebook: AnyCodebook | None, block_bytes: int) -> Iterator[Block]:
    """Yields the blocks of a tensor. A block has block_bytes, rounded down to whole groups of 32 rows, but at least one
    group."""
    group = _core.ROWS_PER_BASE * (1 if codebook is None else codebook.row_bytes)
    for start, end in tensor.spans(max(1, block_bytes // group) * group):
        yield Block(tensor, start, end, codebook)


def _kept(block: Block, data: np.ndarray) -> CodedBlock:
    return CodedBlock(block, data, np.empty(0, np.uint16), 0, lambda: None)


# ---- on the CPU ----


class CpuCoder:
    """Codes blocks on threads. Each thread reads, codes and fingerprints one block at a time."""

    block_bytes = 4 << 20  # bytes; smaller blocks cost more in Python, and larger ones do not fit a core's caches

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
        Handle(Parts(buffer[:0], buffer[:size], *index, *sizes, None, counts[:1])).encode(rows)  # into packed rows
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
        # The size of the coded block in bytes, the sum of words, and the coder's fault record of four numbers.
        self.facts = torch.empty(6, dtype=torch.int64, pin_memory=True, device="cpu")
        self.lengths = torch.empty(0, dtype=torch.uint16, device="cpu")  # pinned


class _Passing(NamedTuple):
    """A block that is being coded."""

    block: Block
    slot: _Slot | None  # None if the block is kept
    read: Future[np.ndarray]


class CudaCoder:
    """Codes blocks on a GPU. Threads read blocks into pinned memory. Copies to the device, the coder's kernels, and
    copies from the device each run on a stream of their own. Meanwhile the caller writes an earlier block."""

    block_bytes = 16 << 20  # bytes; the copy engines reach their full rate at 4 MiB
    _DEPTH = 2  # largest number of blocks that are queued for coding, and of blocks that are queued for the copy back

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
        """Starts reading a block on a thread: to pinned memory if the block is to be coded."""
        if block.codebook is None:
            return _Passing(block, None, pool.submit(block.tensor.read, block.start, block.end))
        slot = self._slot(block.end - block.start)

        def read() -> np.ndarray:
            to = slot.raw.host[: block.end - block.start].numpy()
            np.copyto(to, block.tensor.read(block.start, block.end))
            return to

        return _Passing(block, slot, pool.submit(read))

    def _slot(self, num_bytes: int) -> _Slot:
        """Returns a free or a new slot with room for num_bytes bytes."""
        if self._free:
            slot = self._free.popleft()
        else:
            ways = (self._up, self._coder), (self._coder, self._down)
            slot = _Slot(*(Turn(self._device, streams, self.block_bytes, staging.empty_pinned) for streams in ways))
        slot.raw.reserve(num_bytes)
        slot.coded.reserve(num_bytes)
        return slot

    def _launch(self, passing: _Passing) -> _Passing:
        """Waits until a block is read. Queues its copy to the device, its coding, and the copies of its lengths and
        facts to the host."""
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
        """Codes a block to `out`. Returns (lengths, facts as in `_Slot`), both on the device. start: the block's offset
        in the tensor."""
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
        """Waits until a block is coded. Queues the copy of its coded bytes to the host. Raises RuntimeError if a row
        could not be coded, because the tensor has changed."""
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
