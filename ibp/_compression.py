"""Compressing tensors: `compress` into new memory, `compress_` in the tensor's own."""

from __future__ import annotations

import itertools

import torch
from tqdm import tqdm

from . import _layout, _memory, _ops, _rows
from ._choice import learn
from ._estimation import check_codebook
from ._compressed_tensor import CompressedTensor
from ._schemes import (
    ClusteredCodebook, Codebook, PlanesCodebook, Request, check_clusters, check_sample, check_scheme, measure, total_stored,
)  # fmt: skip


def compress(x: torch.Tensor, *, scheme: str = "auto", chunk_bytes: int | None = None, tau: float | None = None, codebook: Codebook | PlanesCodebook | ClusteredCodebook | None = None,
             sample: float | None = None, clusters: int | str | None = None, layout: str = "slots", slot_bytes: int | None = None, row_bytes: int | None = None,
             device: torch.device | str | int | None = None, pin_memory: bool | None = None, progress: bool = False) -> CompressedTensor:
    """Compresses a tensor, bit for bit, into a table whose rows decode alone (the paper's sections 4.1 and 4.2).

    The table lives where x lives: on its GPU, or in host memory, pinned unless pin_memory says otherwise. A table that would not be smaller
    keeps its rows as they are and says so: `table.scheme == "raw"`.

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes, contiguous or not. x itself is not changed.
        scheme: "auto", the best for the layout by exact cost on a sample of rows; "ibp", invariant bits (the paper's); "planes", ranked symbols;
            or "raw", rows as they are (to gather them by the same kernels).
        chunk_bytes, tau: as in `analyze`; they imply scheme "ibp". Used if no codebook is given.
        codebook: from `analyze`, `Codebook.from_masks` or another table; rows are then of codebook.row_bytes.
        sample: fraction of the rows to learn the codebook from; None: as many as fit 64 MiB (16 MiB without a GPU).
        clusters: how many codebooks to divide the rows among, 1 to 256, by k-means over their bits and then by coded size (the paper's section
            6.5); "auto": doubled for as long as the net saving grows. None: one.
        layout: "slots", rows at multiples of slot_bytes, for gathers; "packed", rows back to back, for streaming and files.
        slot_bytes: a multiple of 32 below row_bytes, or row_bytes itself (the paper's in-place layout). None: chosen from the row lengths.
        row_bytes: bytes of a row, the unit of coding, 1 to 65,536. None: an item x[i] if it has at most 64 KiB and x is not 1-D,
            else 4,096 bytes of the flat tensor.
        device: where analysis and compression run. None: x's GPU, else the current GPU if there is one, else the CPU.
        pin_memory: whether a table in host memory is pinned, at exactly its size. None: if there is a CUDA device.
        progress: show progress bars.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype, or codebook is none.
        ValueError: an argument is outside its range or contradicts another.
        RuntimeError: memory cannot be pinned.
    """
    _rows.check_tensor(x)
    check_scheme(scheme, chunk_bytes=chunk_bytes, tau=tau)
    check_sample(sample)
    _check_choices(scheme, codebook, clusters)
    if layout not in ("slots", "packed"):
        raise ValueError(f"layout is {layout!r}; wanted 'slots' or 'packed'")
    if layout == "packed" and slot_bytes is not None:
        raise ValueError(f"slot_bytes is {slot_bytes}, but the packed layout has no slots")
    pin = _wants_pinning(x, pin_memory)
    geometry = _geometry(x, row_bytes, codebook)
    if slot_bytes is not None:
        _layout.check_slot_bytes(slot_bytes, geometry.row_bytes)
    worker = _rows.working_device(x, device)
    data = _rows.bytes_of(x)
    if layout == "packed":
        slot_bytes = 0
    if codebook is None and geometry.num_bytes:
        codebook = learn(scheme, Request(data, geometry, worker, sample, chunk_bytes, tau, slot_bytes=slot_bytes, clusters=clusters, progress=progress))
    if codebook is not None and geometry.num_bytes:
        lengths = measure(data, codebook, worker, progress)
        survey = _layout.survey(lengths, geometry)
        if survey.stored + codebook.nbytes < geometry.num_bytes:
            if slot_bytes is None:
                slot_bytes = _layout.choose_slot_bytes(survey, geometry)
            return _encode(data, geometry, codebook, lengths, survey, slot_bytes, worker, pin, progress)
    slots = _memory.empty(geometry.num_bytes, data.device, pin).copy_(data)
    return _table(geometry, "raw", geometry.row_bytes, slots, None, None)


def compress_(x: torch.Tensor, *, scheme: str = "auto", chunk_bytes: int | None = None, tau: float | None = None, codebook: Codebook | PlanesCodebook | ClusteredCodebook | None = None,
              sample: float | None = None, clusters: int | str | None = None, row_bytes: int | None = None,
              device: torch.device | str | int | None = None, pin_memory: bool | None = None, progress: bool = False) -> CompressedTensor:
    """Compresses a tensor within its own memory (the paper's in-place layout, section 5), so that one that fills memory can be compressed.

    Every row keeps its address and uses only the first bytes of it. x's values are gone afterwards: its memory belongs to the table. Besides
    x this takes 2.25 bytes a row and about 128 MiB. All analysis is done before the first write; rows are then rewritten in
    blocks. If that is interrupted, or the memory cannot be pinned afterwards, the exception has the table as its attribute `table`, and
    that table decompresses to x.

    Args:
        x: contiguous tensor that owns its whole storage and does not require grad.
        Others: as in `compress`.

    Raises:
        TypeError: as `compress`.
        ValueError: x is not contiguous, is a part of a larger storage, or requires grad; or as `compress`.
    """
    _rows.check_tensor(x)
    _check_owns_memory(x)
    check_scheme(scheme, chunk_bytes=chunk_bytes, tau=tau)
    check_sample(sample)
    _check_choices(scheme, codebook, clusters)
    geometry = _geometry(x, row_bytes, codebook)
    worker, pin = _rows.working_device(x, device), _wants_pinning(x, pin_memory)
    data = _rows.bytes_of(x)
    if codebook is None and geometry.num_bytes:
        codebook = learn(scheme, Request(data, geometry, worker, sample, chunk_bytes, tau, slot_bytes=0, clusters=clusters, progress=progress))
    lengths = measure(data, codebook, worker, progress) if codebook else None
    rewrites = lengths is not None and total_stored(lengths, geometry) + codebook.nbytes < geometry.num_bytes
    if rewrites:
        coded = torch.zeros_like(lengths, device=data.device)  # all rows raw: what the memory holds
        table = _table(geometry, codebook.scheme, geometry.row_bytes, data, codebook, coded)
    else:
        table = _table(geometry, "raw", geometry.row_bytes, data, None, None)
    table._owner = x
    try:  # to the end: from the first row rewritten, the table is all that is left of x
        if rewrites:
            _encode_in_place(table, data, lengths, worker, progress)
        return table.pin_memory() if pin else table
    except BaseException as interruption:
        interruption.table = table
        raise


def _check_choices(scheme, codebook, clusters):
    check_clusters(clusters)
    if clusters is not None and codebook is not None:
        raise ValueError(f"clusters is {clusters!r}, but a codebook is given: it says itself how many clusters there are")
    if clusters is not None and scheme == "raw":
        raise ValueError(f"clusters is {clusters!r}, but rows of scheme 'raw' have no codebook")


def _wants_pinning(x, pin_memory):
    """Whether a table of x is to be pinned; RuntimeError if it cannot be."""
    if pin_memory and not _ops.cuda_is_available():
        raise RuntimeError("pin_memory=True needs a CUDA device and a build of ibp with CUDA")
    return not x.is_cuda and (_ops.cuda_is_available() if pin_memory is None else pin_memory)


def _geometry(x, row_bytes, codebook):
    if codebook is None:
        return _rows.Geometry.of(x, row_bytes)
    check_codebook(codebook)
    if row_bytes is not None and row_bytes != codebook.row_bytes:
        raise ValueError(f"row_bytes is {row_bytes}, but the codebook is for rows of {codebook.row_bytes} bytes")
    return _rows.Geometry.of(x, codebook.row_bytes)


def _check_owns_memory(x):
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise ValueError(f"x has strides {x.stride()}; compress_ wants a contiguous tensor")
    held = x.untyped_storage().nbytes()
    if x.storage_offset() != 0 or held != x.numel() * x.element_size():
        raise ValueError(f"x has {x.numel() * x.element_size()} bytes of a storage of {held}; compress_ wants a tensor that owns all of its storage")
    if x.requires_grad:
        raise ValueError("x requires grad; compress_ would destroy its values: detach it first")


def _table(geometry, scheme, slot_bytes, slots, codebook, lengths, overflow=None, bases=None):
    def on_home(tensor, dtype):
        return torch.empty(0, dtype=dtype, device=slots.device) if tensor is None else tensor.to(slots.device)

    return CompressedTensor(shape=geometry.shape, dtype=geometry.dtype, scheme=scheme, row_bytes=geometry.row_bytes, slot_bytes=slot_bytes,
                            slots=slots, overflow=on_home(overflow, torch.uint8), lengths=on_home(lengths, torch.uint16),
                            bases=on_home(bases, torch.int64), codebook=codebook)


def _encode(data, geometry, codebook, lengths, survey, slot_bytes, worker, pin, progress):
    slots = _memory.empty(_layout.slots_size(geometry, slot_bytes), data.device, pin)
    overflow = _memory.empty(survey.overflow_bytes(slot_bytes) if slot_bytes < geometry.row_bytes else 0, data.device, pin)
    bases = _layout.index_rows(lengths, geometry, slot_bytes) if overflow.numel() else torch.empty(0, dtype=torch.int64, device=worker)
    lies_near, faults = slots.device == worker, []
    ends = [*bases.tolist(), overflow.numel()] if overflow.numel() and not (lies_near and worker.type == "cuda") else None
    with _Outlet(worker, pin) as outlet, tqdm(total=geometry.num_rows, desc="compress", unit="row", unit_scale=True, disable=not progress) as bar:
        for first, last, block in _rows.blocks(data, geometry.row_bytes, worker):
            start, end = (ends[first // 32], ends[-(-last // 32)]) if ends else (0, overflow.numel())
            targets = slots[first * slot_bytes : last * slot_bytes], overflow[start:end]
            near = targets if lies_near else outlet.take([target.numel() for target in targets])
            part = bases[first // 32 : -(-last // 32)] if overflow.numel() else bases
            faults.append(_encode_block(block, codebook, lengths[first:last], part, slot_bytes, start, *near))
            if not lies_near:
                outlet.put(targets, near)
            bar.update(last - first)
    _check_faults(faults)
    return _table(geometry, codebook.scheme, slot_bytes, slots, codebook, lengths, overflow, bases)


class _Outlet:
    """Where blocks are coded before they are copied to the table: on a GPU two buffers in turn, and a stream for the copies. To pageable memory
    they go through pinned memory, from which torch's intra-op threads copy them while the next block is coded."""

    def __init__(self, device, pinned):
        self._device, self._pinned, self._turn = device, pinned, 0
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._staging = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._waiting = [[], []]  # (target, staged) of each turn
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = [torch.cuda.Event() for _ in self._buffers] if device.type == "cuda" else []

    def take(self, sizes):
        """A tensor of each size, which earlier copies no longer read."""
        starts = list(itertools.accumulate((-(-size // 256) * 256 for size in sizes), initial=0))
        self._finish(self._turn)
        if self._buffers[self._turn].numel() < starts[-1]:
            self._buffers[self._turn] = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
            if self._stream and not self._pinned:
                self._staging[self._turn] = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        return [self._buffers[self._turn][start : start + size] for start, size in zip(starts, sizes)]

    def put(self, targets, sources):
        """Copies what work issued so far has written."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources):
                if self._stream and not self._pinned:
                    start = source.storage_offset()
                    staged = self._staging[self._turn][start : start + source.numel()]
                    self._waiting[self._turn].append((target, staged))
                    target = staged
                target.copy_(source, non_blocking=True)
        if self._stream:
            self._copied[self._turn].record(self._stream)
        self._turn = 1 - self._turn

    def _finish(self, turn):
        if self._stream:
            self._copied[turn].synchronize()
        for target, staged in self._waiting[turn]:
            target.copy_(staged)
        self._waiting[turn].clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._stream:
            self._stream.synchronize()
        for turn in (self._turn, 1 - self._turn):
            self._finish(turn)


def _encode_block(block, codebook, lengths, bases, slot_bytes, overflow_start, slots, overflow):
    """Codes a block of rows into slices of slots and overflow on its own device. Returns where a fault is noted."""
    device = block.device
    if device.type == "cpu":  # zeros between the rows' bytes, as kernels write them: equal tables have equal tensors
        slots.zero_(), overflow.zero_()
    fault = torch.zeros(4, dtype=torch.int64, device=device)
    torch.ops.ibp.encode_rows(slots, overflow, lengths, bases, codebook.words(device), codebook.codec, slot_bytes, overflow_start, 1, block.numel(), block, fault)
    return fault


def _check_faults(faults):
    for status, row, _, _ in torch.stack(faults).tolist():
        if status:
            raise RuntimeError(f"x changed while it was being compressed: row {row} of a block no longer has the length measured before")


def _encode_in_place(table, data, lengths, worker, progress):
    codebook, row_bytes, coded = table.codebook, table.row_bytes, table.lengths
    no_bases, no_overflow = torch.empty(0, dtype=torch.int64, device=worker), torch.empty(0, dtype=torch.uint8, device=worker)
    with tqdm(total=table.num_rows, desc="compress", unit="row", unit_scale=True, disable=not progress) as bar:
        for first, last, block in _rows.blocks(data, row_bytes, worker, whole=False):
            home = data[first * row_bytes : last * row_bytes]
            original = block.clone() if block.data_ptr() == home.data_ptr() else block
            staged = torch.empty_like(original)
            _check_faults([_encode_block(original, codebook, lengths[first:last], no_bases, row_bytes, 0, staged, no_overflow)])
            _replace(home, staged, original, coded[first:last], lengths[first:last])
            bar.update(last - first)


def _replace(home, staged, original, coded, lengths):
    """Writes a block of coded rows and its lengths, or, if interrupted, neither."""
    try:
        home.copy_(staged)
        coded.copy_(lengths)
    except BaseException:
        coded.zero_()
        home.copy_(original)
        raise
