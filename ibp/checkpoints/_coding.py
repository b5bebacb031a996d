"""Codes the tensors of a checkpoint. Tensors may be larger than the memory: they pass block by block through a chain of
generators, which `write_file` of `_writing.py` puts together.

    SourceTensor -> `blocks_of` -> `Block` -> `coded_on_cpu` or `CudaCoder` -> `Block` -> `write_blocks` -> file

Before that, `Codebooks` decides which tensors are coded, and with which codebooks. Tensors of the same kind share a
codebook: their names differ only in numbers, and their shapes and dtypes are equal. The codebook is learned from rows
of up to 8 of these tensors. A coder reads and codes several blocks at the same time, and yields them in order, while
another thread writes earlier blocks.

`coded_on_its_gpu` is for tensors that are on a GPU already. A `WeightCompressor` finds their codebooks.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.sequences import in_threads
from .._machine import memory, staging
from .._machine.staging import Turn
from .._rows import geometry as _rows
from .._rows.clusters import check_clusters
from .._rows.codebook import AnyCodebook, surveyed
from .._rows.estimation import expected_savings
from .._rows.geometry import as_tensor, bytes_of
from .._rows.handle import Handle, Parts
from .._rows.learning import CLEARLY_LESS, LEAST_BYTES, ROW_BYTES, Learner, Options, Request, checked, kind_of, learn
from .._tables.weights import WeightCompressor
from ._source import SourceTensor

# Each item of an array becomes a row if items have at least this size in bytes. For shorter rows, the index would take
# about as many bytes as coding saves.
_LEAST_ITEM_BYTES = 512
SAMPLE_ELEMENTS = 1 << 19  # number of elements from which a codebook is learned, as in `ibp.compress`
# The codebook of a kind is tried on a sample of each tensor. This is the sample's size in bytes for a codebook that
# cannot code every row.
_CHECK_BYTES = 16 << 20
_TRIED_BYTES = 1 << 18  # the same size for codebooks that can code every row
_SAMPLED_TENSORS = 8  # largest number of tensors of a kind from which the kind's sample is taken
_LEAST_ROWS = 16  # smallest number of rows that are sampled from a tensor, unless it has fewer rows
_LEAST_SAVED_BYTES = 1024  # A table must save more than this, which is about the size of its entries in the header.
_WORD_BYTES = 8  # size in bytes of a word of a fingerprint (FORMAT.md section 10)
# Number of bytes that one call of `sum_words` adds to a fingerprint. It is small enough that the call uses a single
# thread.
_HASHED_BYTES = 1 << 20
# Size in bytes of a block, by the device that codes it. On the CPU, Python takes more of the time with smaller blocks,
# and larger ones do not fit in a core's caches. The copy engines of a GPU reach their full rate at 4 MiB.
_BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
_CPU = torch.device("cpu")


# ---- codebooks ----


def checked_options(options: Options) -> Options:
    """Checks options of `ibp.compress` for a checkpoint. Returns them with the device that does the work. Raises
    TypeError or ValueError if an option is invalid."""
    clusters, rows = options.clusters, options.row_bytes
    checked_ones = checked(replace(options, clusters=None))
    check_clusters(clusters)
    rows = None if rows is None else whole_number("row_bytes", rows, 1, _core.MAX_ROW_BYTES)
    return replace(checked_ones, clusters=clusters, row_bytes=rows, device=memory.usual(options.device))


class Codebooks:
    """The codebooks of a checkpoint's tensors.

    Args:
        options: options of `ibp.compress`, as `checked_options` returns them. If row_bytes is None, a row is 4,096
            bytes of the flat tensor. For an array of numpy, a row is an item if items have 512 bytes to 64 KiB.
        tensors: all tensors of the checkpoint.
        kept: names of tensors that are not to be coded.

    Attributes:
        device: the device that learns the codebooks, and codes rows with them.
    """

    def __init__(self, options: Options, tensors: Sequence[SourceTensor], kept: frozenset[str] = frozenset()) -> None:
        self._options, self._kept, self.device = options, kept, memory.usual(options.device)
        self._kinds: dict[tuple, list[SourceTensor]] = {}
        for tensor in tensors:
            if self.is_coded(tensor):
                self._kinds.setdefault(self.kind_of(tensor), []).append(tensor)
        self._of_kinds: dict[tuple, Learner[AnyCodebook]] = {}
        self._of_tensors: dict[SourceTensor, tuple[AnyCodebook | None, float | None]] = {}

    def prepare(self, tensors: Sequence[SourceTensor], jobs: int = 1) -> None:
        """Learns the codebooks of tensors: first one codebook for each kind; then, on `jobs` threads, a separate
        codebook for each tensor that the codebook of its kind does not suit. If only one tensor is given, the second
        step is left to the first call of `of` or `savings` for this tensor."""
        for tensor in tensors:
            if self.is_coded(tensor) and (kind := self.kind_of(tensor)) not in self._of_kinds:
                self._of_kinds[kind] = self._learned(self._kinds[kind])
        if len(tensors) == 1:
            return
        for _ in in_threads(self.of, tensors, jobs):
            pass

    def of(self, tensor: SourceTensor) -> AnyCodebook | None:
        """Returns the codebook of a tensor that has been prepared, or None if the tensor is stored uncompressed."""
        return self._found(tensor)[0] if self.is_coded(tensor) else None

    def savings(self, tensor: SourceTensor) -> float | None:
        """Returns the share of bytes that the codebook of a prepared tensor saved in the sample on which it was tried,
        or None if it was not tried."""
        return self._found(tensor)[1] if self.is_coded(tensor) else None

    def is_coded(self, tensor: SourceTensor) -> bool:
        """Returns whether a tensor may have a codebook: its name is not among those that are not to be coded, the
        scheme is not "raw", tables can have the tensor's dtype, and the tensor has at least 4 KiB."""
        has_dtype = tensor.dtype in _rows.DTYPES and tensor.entry is None
        is_wanted = tensor.name not in self._kept and self._options.scheme != "raw"
        return is_wanted and has_dtype and tensor.num_bytes >= LEAST_BYTES

    def geometry_of(self, tensor: SourceTensor) -> _rows.Geometry:
        """Returns how a tensor is divided into rows."""
        whole = _rows.Geometry(torch.Size(tensor.shape), tensor.dtype, 1)
        row_bytes = self._options.row_bytes or min(ROW_BYTES, max(1, whole.num_bytes))
        if self._options.row_bytes is None and tensor.has_items and len(tensor.shape) > 1:
            if _LEAST_ITEM_BYTES <= whole.item_bytes <= _core.MAX_ROW_BYTES:
                row_bytes = whole.item_bytes
        return replace(whole, row_bytes=row_bytes)

    def kind_of(self, tensor: SourceTensor) -> tuple:
        """Returns (kind of a tensor as in `_rows/learning.py`, size in bytes of its rows). Tensors for which both
        are equal share a codebook. In this file, a kind is this pair."""
        return kind_of(tensor.name, torch.Size(tensor.shape), tensor.dtype), self.geometry_of(tensor).row_bytes

    def expected_savings(self, tensor: SourceTensor, scheme: str) -> float:
        """Returns the share of a tensor's bytes that a scheme would probably save, without a codebook of the tensor's
        kind."""
        request = Request(rows_of(tensor, self.geometry_of(tensor)), self.geometry_of(tensor), _CPU, self._options, 0)
        return expected_savings(scheme, request)

    def _learn(self, sample: torch.Tensor, geometry: _rows.Geometry, all_rows: bool) -> AnyCodebook | None:
        """Learns a codebook from a sample of rows. Returns the codebook, or None if raw rows are best.

        Args:
            sample: uint8 [n * row_bytes].
            geometry: the geometry of the tensors that the rows belong to.
            all_rows: whether every row must have a coded form; see `codes_invariant` of `Request`.
        """
        request = Request(sample, geometry, self.device, self._options, 0, codes_invariant=all_rows)
        return learn(self._options.scheme, request)

    def _found(self, tensor: SourceTensor) -> tuple[AnyCodebook | None, float | None]:
        """Returns (the codebook of a tensor, the share of bytes that it saved where it was tried, or None if it was
        not tried). Finds them at the first call for this tensor."""
        if tensor not in self._of_tensors:
            kind = self.kind_of(tensor)
            codebook = self._of_kinds[kind].found
            if codebook is None or (len(self._kinds[kind]) == 1 and not codebook.is_partial):
                self._of_tensors[tensor] = codebook, None
            else:
                self._of_tensors[tensor] = self._tried(tensor, kind, codebook)
        return self._of_tensors[tensor]

    def _tried(
        self, tensor: SourceTensor, kind: tuple, codebook: AnyCodebook
    ) -> tuple[AnyCodebook | None, float | None]:
        """Tries the codebook of a kind on a sample of one tensor. If it saves less there than in the kind's sample, by
        more than one percentage point, learns a codebook for this tensor alone, and uses the better of the two. Returns
        (the codebook, the share of the sample's bytes that the codebook saves), or (None, None) if that share is too
        small for a table."""
        geometry = self.geometry_of(tensor)
        sample = sample_of([tensor], geometry, _CHECK_BYTES if codebook.is_partial else _TRIED_BYTES)
        savings = savings_of(sample, codebook)
        if self._of_kinds[kind].fits(1 - savings, 1):
            return codebook, savings
        sample = sample if codebook.is_partial else sample_of([tensor], geometry)
        own = self._learn(sample, geometry, codebook.is_partial)
        tried = {one: savings_of(sample, one) for one in (codebook, own) if one is not None}
        best = max(tried, key=tried.__getitem__)
        return (best, tried[best]) if _pays(tried[best], geometry) else (None, None)

    def _learned(self, tensors: Sequence[SourceTensor]) -> Learner[AnyCodebook]:
        """Learns the codebook of a kind from a sample of its tensors. Returns a `Learner` that holds the codebook, or
        that holds None if the codebook would save too little."""
        geometry = self.geometry_of(tensors[0])
        sample = sample_of(tensors, geometry)
        codebook = self._learn(sample, geometry, False)
        savings = 0.0 if codebook is None else savings_of(sample, codebook)
        return Learner(codebook, 1 - savings) if _pays(savings, geometry) else Learner()


def sample_of(tensors: Sequence[SourceTensor], geometry: _rows.Geometry, num_bytes: int | None = None) -> torch.Tensor:
    """Returns a sample of whole rows from up to 8 tensors that have the same geometry, uint8 [n * row_bytes]. If the
    tensors are shorter than a row, returns the first tensor, padded with zeros to a row. num_bytes: approximate size of
    the sample in bytes. None: as many rows as hold 2^19 elements."""
    row_bytes = geometry.row_bytes
    wanted_bytes = SAMPLE_ELEMENTS * geometry.dtype.itemsize if num_bytes is None else num_bytes
    chosen = [
        tensors[number] for number in np.linspace(0, len(tensors) - 1, min(len(tensors), _SAMPLED_TENSORS)).astype(int)
    ]
    wanted = max(_LEAST_ROWS, wanted_bytes // row_bytes // len(chosen))
    num_rows = geometry.num_bytes // row_bytes
    if num_rows == 0:
        row = np.zeros(row_bytes, np.uint8)
        row[: geometry.num_bytes] = chosen[0].read(0, geometry.num_bytes)
        return torch.from_numpy(row)
    sample = np.empty((len(chosen), min(wanted, num_rows), row_bytes), np.uint8)
    for seed, (rows, tensor) in enumerate(zip(sample, chosen)):
        for row, number in zip(rows, _rows.sampled(num_rows, wanted, seed).tolist()):
            row[:] = tensor.read(number * row_bytes, (number + 1) * row_bytes)
    return torch.from_numpy(sample.reshape(-1))


def rows_of(tensor: SourceTensor, geometry: _rows.Geometry) -> torch.Tensor:
    """Returns a sample of about 256 KiB of a tensor's rows, or the whole tensor if it is smaller, as uint8 on the
    CPU."""
    if tensor.num_bytes > _TRIED_BYTES:
        return sample_of([tensor], geometry, _TRIED_BYTES)
    return as_tensor(tensor.read(0, tensor.num_bytes))


def savings_of(sample: torch.Tensor, codebook: AnyCodebook) -> float:
    """Returns the share of a sample's bytes that is saved by a table of this sample. The size of the table includes its
    index, but not its codebook. The last row of the sample may be shorter than the others."""
    geometry = _rows.Geometry(sample.shape, torch.uint8, codebook.row_bytes)
    stored = surveyed(sample, codebook, _CPU).stored
    return 1 - (stored + geometry.index_bytes(stored > 0)) / geometry.num_bytes


def _pays(savings: float, geometry: _rows.Geometry) -> bool:
    """Returns whether a tensor is worth coding. savings: the share of its bytes that a table would save."""
    return savings > CLEARLY_LESS and savings * geometry.num_bytes > _LEAST_SAVED_BYTES


# ---- blocks ----


@dataclass(eq=False)
class Block:
    """Holds consecutive bytes of a tensor, which are read, coded and written together. A block consists of whole rows;
    only the last row of the tensor may be shorter."""

    tensor: SourceTensor
    # start, end: the range of the block's bytes in the tensor
    start: int
    end: int
    codebook: AnyCodebook | None  # None: the bytes are stored as they are
    # The stored form, which a coder sets.
    data: np.ndarray = field(init=False)  # uint8, valid until `release` is called
    lengths: np.ndarray = field(init=False)  # one for each row (FORMAT.md section 2); not set without a codebook
    # The contribution of the block's original bytes to its tensor's fingerprint; 0 without a codebook. None: no
    # fingerprint is written for this tensor.
    words: int | None = 0
    release: Callable[[], object] = lambda: None  # lets another block use the memory of `data`; any thread may call it
    # What `CudaCoder` needs while it codes the block.
    read: Future[np.ndarray] = field(init=False)  # the block's original bytes, which a thread reads
    slot: _Slot | None = None  # None if the block has no codebook


# A function that sets the stored forms of blocks, and yields the blocks in order.
Coder = Callable[[Iterable[Block]], Generator[Block, None, None]]


def coder_on(device: torch.device, jobs: int) -> Coder:
    """Returns the coder of a device. jobs: the number of threads of the CPU that it uses."""
    return CudaCoder(device, jobs).coded if device.type == "cuda" else functools.partial(coded_on_cpu, jobs=jobs)


def blocks_of(tensor: SourceTensor, books: Codebooks) -> Iterator[Block]:
    """Yields the blocks of a tensor. Each block except the last one has the size for the device of `books`, rounded
    down to whole groups of 32 rows, but at least one group. Without a codebook, a row counts as one byte."""
    codebook, block_bytes = books.of(tensor), _BLOCK_BYTES[books.device.type]
    group = _core.ROWS_PER_BASE * (1 if codebook is None else codebook.row_bytes)
    for start, end in tensor.spans(max(1, block_bytes // group) * group):
        yield Block(tensor, start, end, codebook)


# ---- coding on the CPU ----


def coded_on_cpu(blocks: Iterable[Block], jobs: int, content: bool = True) -> Generator[Block, None, None]:
    """Sets the stored forms of blocks, and yields the blocks in order. Each of `jobs` threads reads, codes and
    fingerprints one block at a time. content: whether the file gets the fingerprints of tensors."""
    free: deque[torch.Tensor] = deque()
    yield from in_threads(lambda block: _coded(block, free, content), blocks, jobs)


def _coded(block: Block, free: deque[torch.Tensor], content: bool) -> Block:
    """Reads a block, and codes it if it has a codebook. Returns the block. free: buffers for coded bytes. Takes one of
    them if there is one; the block gives its buffer back when it is released. content: as in `coded_on_cpu`."""
    block.data = data = block.tensor.read(block.start, block.end)
    if block.codebook is None:
        return block
    size = data.size
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
    with contextlib.suppress(IndexError):
        buffer = free.pop()
    if buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    lengths = torch.empty(-(-size // block.codebook.row_bytes), dtype=torch.uint16, device="cpu")
    counts, none = torch.zeros(2, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
    rows, words = as_tensor(data), block.codebook.words(_CPU)
    index, sizes = (lengths, none, words, block.codebook.codec), (0, 0, 1, size)
    Handle(Parts(buffer[:0], buffer[:size], *index, *sizes, None, counts[:1])).encode(rows)  # packed, to `buffer`
    for at in range(0, size, _HASHED_BYTES) if content else ():
        part, number = rows[at : at + _HASHED_BYTES], (block.start + at) // _WORD_BYTES
        torch.ops.ibp.sum_words.default(part, number, counts[1:])
    stored, words = counts.tolist()
    block.words = words if content else None
    block.data, block.lengths = buffer[:stored].numpy(), lengths.numpy()
    block.release = lambda: free.append(buffer)
    return block


# ---- coding on a GPU ----


def coded_on_its_gpu(tensor: SourceTensor, x: torch.Tensor, compressor: WeightCompressor) -> Block:
    """Codes a tensor on the GPU where it is. Coding uses the current stream of this GPU, and so begins after work that
    is queued there. Returns one block with the whole tensor. The block's stored form is in host memory, and has no
    fingerprint.

    Args:
        tensor: the tensor, whose `read` is not called.
        x: the same tensor, without a gradient.
        compressor: finds the codebooks. It makes tables in host memory.
    """
    table = compressor.compress(tensor.name, x, device=x.device) if compressor.takes(x) else None
    block = Block(tensor, 0, tensor.num_bytes, None if table is None else table.codebook, words=None)
    if table is None:
        block.data = bytes_of(x.cpu()).numpy()
    elif table.codebook is None:
        block.data = table.slots.numpy()
    else:
        block.data, block.lengths = table.overflow.numpy(), table.lengths.numpy()
    return block


class _Slot(NamedTuple):
    """Holds the buffers of one block. Each `Turn` has memory on the device and pinned host memory."""

    raw: Turn  # for the block's bytes before coding
    coded: Turn  # for its bytes after coding
    # Six numbers in pinned memory: the size of the coded block in bytes, its `Block.words`, and the coder's fault
    # record of four numbers.
    facts: torch.Tensor


class CudaCoder:
    """Codes blocks on a GPU. Threads read blocks into pinned memory. Three streams work at the same time: one copies
    blocks to the device, one codes them, and one copies coded blocks to the host. Meanwhile the caller writes an
    earlier block."""

    _DEPTH = 2  # largest number of blocks in the queue for coding, and in the queue for copying to the host

    def __init__(self, device: torch.device, jobs: int) -> None:
        self._device = device
        self._readers = min(4, jobs)
        self._free: deque[_Slot] = deque()
        with torch.cuda.device(device):
            self._coder, self._down = torch.cuda.Stream(), torch.cuda.Stream()
            self._up = torch.cuda.Stream()

    def coded(self, blocks: Iterable[Block]) -> Generator[Block, None, None]:
        """Sets the stored forms of blocks, and yields the blocks in order."""
        reading: deque[Block] = deque()
        coding: deque[Block] = deque()
        coming: deque[Block] = deque()
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
                for block in reading:
                    block.read.cancel()
                for stream in (self._up, self._coder, self._down):
                    stream.synchronize()

    def _begin(self, block: Block, pool: ThreadPoolExecutor) -> Block:
        """Starts reading a block on a thread. A block that will be coded is read into pinned memory. Returns the
        block, as the other steps do."""
        if block.codebook is None:
            block.read = pool.submit(block.tensor.read, block.start, block.end)
            return block
        slot = block.slot = self._slot(block.end - block.start)

        def read() -> np.ndarray:
            to = slot.raw.host[: block.end - block.start].numpy()
            np.copyto(to, block.tensor.read(block.start, block.end))
            return to

        block.read = pool.submit(read)
        return block

    def _slot(self, num_bytes: int) -> _Slot:
        """Returns a free slot, or a new one, whose buffers have at least num_bytes bytes each."""
        if self._free:
            slot = self._free.popleft()
        else:
            ways = (self._up, self._coder), (self._coder, self._down)
            raw, coded = (Turn(self._device, way, _BLOCK_BYTES["cuda"], staging.empty_pinned) for way in ways)
            slot = _Slot(raw, coded, torch.empty(6, dtype=torch.int64, pin_memory=True, device="cpu"))
        slot.raw.reserve(num_bytes)
        slot.coded.reserve(num_bytes)
        return slot

    def _launch(self, block: Block) -> Block:
        """Waits until a block is read. If the block is to be coded, queues its copy to the device, its coding, and the
        copies of its lengths and facts (see `_Slot`) to the host."""
        block.data, slot = block.read.result(), block.slot
        if slot is None:
            return block
        num_bytes = block.data.size
        assert block.codebook is not None
        near = slot.raw.memory[:num_bytes]
        slot.raw.bring(self._up, [(near, slot.raw.host[:num_bytes])])
        slot.raw.wait(self._coder)
        slot.coded.claim(self._coder)
        with torch.cuda.stream(self._coder):
            lengths, facts = self._code(near, block.codebook, slot.coded.memory[:num_bytes], block.start)
            held = torch.empty(lengths.shape, dtype=lengths.dtype, pin_memory=True, device="cpu")
            held.copy_(lengths, non_blocking=True)
            slot.facts.copy_(facts, non_blocking=True)
        block.lengths = held.numpy()
        slot.raw.release(self._coder)
        slot.coded.hand_over(self._coder)
        return block

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

    def _fetch(self, block: Block) -> Block:
        """Waits until a block is coded. Queues the copy of its coded bytes to the host. Raises RuntimeError if a row
        could not be coded, because the tensor has changed."""
        slot = block.slot
        if slot is not None:
            slot.coded.filled.synchronize()
            stored, _, status, row, *_ = slot.facts.tolist()
            if status:
                raise RuntimeError(f"{block.tensor.name!r} changed while it was compressed: row {row} of a block")
            slot.coded.send(self._down, [(slot.coded.host[:stored], slot.coded.memory[:stored])])
        return block

    def _finish(self, block: Block) -> Block:
        """Waits until the stored form of a block is in host memory."""
        slot = block.slot
        if slot is not None:
            slot.coded.free.synchronize()
            stored, block.words = slot.facts[:2].tolist()
            block.data = slot.coded.host[:stored].numpy()
            block.release = lambda: self._free.append(slot)
        return block
