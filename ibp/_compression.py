"""Compressing tensors: `compress` into new memory, `compress_` in the tensor's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from . import _core, _layout, _memory, _numa, _ops, _rows, _staging
from ._arguments import near, whole_number
from ._choice import learn
from ._codecs.chosen import Choice, arguments_of
from ._codecs.whole import CODECS, compress_whole, is_general
from ._compressed_tensor import CompressedTensor
from ._estimation import check_codebook, check_learning
from ._progress import tqdm
from ._schemes import SCHEMES, AnyCodebook, Request, check_clusters, measure

MOST_LACKING = 0.01  # of the bytes, stored raw because rows lack what the sample has in common


def compress(
    x: torch.Tensor | np.ndarray,
    *,
    scheme: str | Choice = "auto",
    chunk_bytes: int | None = None,
    tau: float | None = None,
    codebook: AnyCodebook | None = None,
    sample: float | None = None,
    clusters: int | str | None = None,
    level: str = "default",
    layout: str = "slots",
    slot_bytes: int | None = None,
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    pin_memory: bool | None = None,
    numa: _numa.Numa = None,
    progress: bool = False,
) -> CompressedTensor:
    """Compresses a tensor, bit for bit, into a table whose rows decode alone (the paper's sections 4.1 and 4.2).

    The table lives where x lives: on its GPU, or in host memory, pinned unless pin_memory says otherwise. Rows
    that would not become smaller are left raw, and the table says so: `table.scheme == "raw"`. `table.savings` counts
    the bytes of its rows, `table.nbytes` the memory that it takes and `table.link_bytes` what is fetched over the link;
    `estimate` tells them beforehand.

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes, contiguous or not. x itself is not changed. Of a tensor
            that requires grad the values are taken, as by `x.detach()`: no gradient flows through a table. Or a numpy
            array, also of ml_dtypes' bfloat16 and float8, as the tensor of the same bytes.
        scheme: "auto", the best for the layout on a sample of rows: for slots the one that fetches the fewest bytes, of
            those that a GPU fetches and decodes faster than raw rows; for packed rows the one of fewest bytes. Or
            "ibp", invariant bits (the paper's); "planes", ranked symbols; or "raw", rows as they are (to gather them by
            the same kernels). Or a general codec, for tensors that are only wanted whole, by its optional package:
            "zstd" and "lz4" on the CPU, also with a level ("zstd:9"), and on a GPU nvCOMP's "nvcomp:ans" (of floats as
            such or as bytes, whichever takes less of a sample; "nvcomp:ans:floats" and "nvcomp:ans:bytes" choose),
            "nvcomp:bitcomp", "nvcomp:cascaded", "nvcomp:deflate", "nvcomp:gdeflate", "nvcomp:lz4", "nvcomp:snappy" and
            "nvcomp:zstd". The result is then an `ibp.WholeTensor`; the arguments for rows are refused. Or an
            `ibp.Choice` (see `ibp.choose`), which says how x is coded: packed, unless it is for rows.
        chunk_bytes, tau: as in `analyze`; they imply scheme "ibp". Used if no codebook is given. Of general codecs
            chunk_bytes are coded by themselves: 64 KiB with nvCOMP, else 2 MiB.
        codebook: from `analyze`, `Codebook.from_masks` or another table; rows are then of codebook.row_bytes.
        sample: fraction of the rows to learn the codebook from; None: as many as hold 2^19 elements, and of scheme
            "ibp" as fit 64 MiB (16 MiB without a GPU).
        clusters: how many codebooks to divide the rows among, 1 to 256, by k-means over their bits and then by coded
            size (the paper's section 6.5); "auto": doubled for as long as the net saving grows. None: one.
        level: "default", the fewest bytes, or nearly so where that decodes faster; "fast", which implies scheme
            "planes": one digit of 4 bits that counts up from the smallest frequent exponent, which a GPU codes and
            decodes at the rate of its memory. It saves 25 % of BF16 weights (33 % by default), 12 % of FP32. Where such
            digits save less than 4 % of a row, as of data that is half zeros, and where elements have 1 or 8 bytes, the
            codebook is that of "default".
        layout: "slots", rows at multiples of slot_bytes, for gathers; "packed", rows back to back, for streaming and
            files.
        slot_bytes: a multiple of 32 below row_bytes, or row_bytes itself (the paper's in-place layout). None: chosen
            from the row lengths.
        row_bytes: bytes of a row, the unit of coding, 1 to 65,536. None: an item x[i] if it has at most 64 KiB and x is
            not 1-D, else 4,096 bytes of the flat tensor.
        device: where analysis and compression run. None: x's GPU, else the current GPU if there is one, else the CPU.
        pin_memory: whether a table in host memory is pinned, at its size. None: if there is a CUDA device; where the
            system refuses, the table is pageable, and a RuntimeWarning says so, once a process.
        numa: the NUMA node whose memory is preferred for a pinned table, or a device near whose node; None: the calling
            thread's.
        progress: show progress bars.

    Returns:
        `ibp.CompressedTensor`; for general codecs `ibp.WholeTensor`.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype (quantized ones and those of less than a byte are not),
            codebook is none, or an argument is not of its type.
        ValueError: an argument is outside its range or contradicts another.
        ImportError: the package of a general codec is not installed.
        RuntimeError: pin_memory=True, and memory cannot be pinned; or the codec needs a GPU, and there is none.
    """
    x = _rows.given_tensor(x)
    _rows.check_tensor(x)
    of_rows = {"tau": tau, "codebook": codebook, "sample": sample, "clusters": clusters, "slot_bytes": slot_bytes}
    of_rows |= {"row_bytes": row_bytes, "level": None if level == "default" else level}
    of_rows["layout"] = None if layout == "slots" else layout
    if isinstance(scheme, Choice):
        _refuse("a choice says how x is coded", chunk_bytes=chunk_bytes, **of_rows)
        chosen = arguments_of(scheme.scheme, scheme.codebook, scheme.rows)
        return compress(x, **chosen, device=device, pin_memory=pin_memory, numa=numa, progress=progress)
    if is_general(scheme):
        _refuse(f"{scheme!r} codes whole tensors", **of_rows)
        pin, node = _wants_pinning(x, pin_memory), _numa.node_of(numa)
        whole = compress_whole(x, scheme, chunk_bytes=chunk_bytes, device=device, pin=pin, node=node, progress=progress)
        return cast(CompressedTensor, whole)  # a type of its own for the schemes of rows is of more use
    if isinstance(scheme, str) and scheme not in (known := ["auto", *SCHEMES]):
        hint = near(scheme, [*known, *CODECS])
        raise ValueError(f"scheme is {scheme!r}{hint}; wanted one of {known}, or a general codec of {sorted(CODECS)}")
    learning = Learning.of(scheme, chunk_bytes, tau, sample, clusters, level, codebook)
    pin, node = _wants_pinning(x, pin_memory), _numa.node_of(numa)
    geometry = geometry_of(x, row_bytes, codebook)
    slot_bytes = _layout.checked_slot_bytes(layout, slot_bytes, geometry.row_bytes)
    worker = _rows.working_device(x, device)
    data = _rows.bytes_of(x)
    coding = learning.coding_of(data, geometry, worker, slot_bytes, progress)
    if coding is None:
        (slots,), is_pinned = _memory.empty_parts([geometry.num_bytes], data.device, pin, node)
        table = table_of(geometry, "raw", geometry.row_bytes, slots.copy_(data), None, None)
        table._is_refused = pin is None and not is_pinned
        return table
    if slot_bytes is None:
        slot_bytes = _layout.choose_slot_bytes(coding.survey, geometry)
    return _encode(data, geometry, coding, slot_bytes, worker, pin, node, progress)


def compress_(
    x: torch.Tensor,
    *,
    scheme: str = "auto",
    chunk_bytes: int | None = None,
    tau: float | None = None,
    codebook: AnyCodebook | None = None,
    sample: float | None = None,
    clusters: int | str | None = None,
    level: str = "default",
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    pin_memory: bool | None = None,
    progress: bool = False,
) -> CompressedTensor:
    """Compresses a tensor within its own memory (the paper's in-place layout, section 5), so that one that fills memory
    can be compressed.

    Every row keeps its address and uses only the first bytes of it: fetches read less, but no memory is freed. x's
    values are gone afterwards: its memory belongs to the table. Besides x this takes 2.25 bytes a row and about
    128 MiB. "auto" takes the scheme of fewest bytes.

    All analysis is done before the first write; rows are then rewritten in blocks, each with its lengths by one
    operation. If that is interrupted, however often, or the memory cannot be pinned afterwards, the exception has the
    table as its attribute `table`, and that table decompresses to x. Without that attribute x is as it was.

    Args:
        x: contiguous tensor that owns its whole storage and does not require grad.
        Others: as in `compress`.

    Raises:
        TypeError: as `compress`.
        ValueError: x is not contiguous, is a part of a larger storage, or requires grad; or as `compress`.
    """
    _rows.check_tensor(x)
    _check_owns_memory(x)
    learning = Learning.of(scheme, chunk_bytes, tau, sample, clusters, level, codebook)
    geometry = geometry_of(x, row_bytes, codebook)
    worker, pin = _rows.working_device(x, device), _wants_pinning(x, pin_memory)
    data = _rows.bytes_of(x)
    coding = learning.coding_of(data, geometry, worker, geometry.row_bytes, progress, in_place=True)
    if coding is None:
        table = table_of(geometry, "raw", geometry.row_bytes, data, None, None)
    else:
        coded = torch.zeros_like(coding.lengths, device=data.device)  # all rows raw: what the memory holds
        table = table_of(geometry, coding.codebook.scheme, geometry.row_bytes, data, coding.codebook, coded)
    table._owner = x
    kept: list[CompressedTensor] = []

    def work() -> CompressedTensor:
        kept.append(table)  # from the first row rewritten, the table is all that is left of x
        if coding is not None:
            _encode_in_place(table, data, coding, worker, progress)
        if pin:
            table.pin_memory()
        elif pin is None:
            _memory.pin_if_possible(table)
        return table

    try:
        return _core.call_keeping_table(kept, work)
    except BaseException as interruption:  # Python handles signals as that function returns, too
        if kept:
            interruption.table = table  # type: ignore[attr-defined]
        raise


@dataclass(frozen=True)
class Coding:
    """How a tensor's rows are coded.

    Attributes:
        codebook: what with.
        lengths: of all rows on the working device (FORMAT.md section 2).
        survey: of the lengths.
    """

    codebook: AnyCodebook
    lengths: torch.Tensor
    survey: _layout.Survey

    @property
    def stored_bytes(self) -> int:
        """Of the rows and the codebook."""
        return self.survey.stored + self.codebook.nbytes


@dataclass(frozen=True)
class Learning:
    """How a codebook is come by: given, or learned as asked for."""

    scheme: str
    chunk_bytes: int | None
    tau: float | None
    sample: float | None
    clusters: int | str | None
    level: str
    codebook: AnyCodebook | None

    @classmethod
    def of(
        cls,
        scheme: str,
        chunk_bytes: int | None,
        tau: float | None,
        sample: float | None,
        clusters: int | str | None,
        level: str,
        codebook: AnyCodebook | None,
    ) -> Learning:
        """Of the arguments of the same names. Raises TypeError and ValueError for wrong ones."""
        chunk_bytes, tau, sample = check_learning(scheme, chunk_bytes, tau, sample, level)
        if clusters is not None and not isinstance(clusters, str):
            clusters = whole_number("clusters", clusters)
        check_clusters(clusters)
        if clusters is not None and codebook is not None:
            raise ValueError(
                f"clusters is {clusters!r}, but a codebook is given: it says itself how many clusters there are"
            )
        if clusters is not None and scheme == "raw":
            raise ValueError(f"clusters is {clusters!r}, but rows of scheme 'raw' have no codebook")
        if level == "fast" and clusters is not None:
            raise ValueError(f"clusters is {clusters!r}, but consecutive entries, level='fast', have no clusters")
        return cls(scheme, chunk_bytes, tau, sample, clusters, level, codebook)

    def coding_of(
        self,
        data: torch.Tensor,
        geometry: _rows.Geometry,
        worker: torch.device,
        slot_bytes: int | None,
        progress: bool,
        in_place: bool = False,
    ) -> Coding | None:
        """How the bytes are coded; None where raw rows take no more bytes, or are what is asked for."""
        if not geometry.num_bytes:
            return None
        coding: Coding | None
        if self.codebook is not None:
            coding = _coding(data, geometry, self.codebook, worker, progress)
        else:
            request = Request(
                data,
                geometry,
                worker,
                self.sample,
                self.chunk_bytes,
                self.tau,
                slot_bytes=slot_bytes,
                clusters=self.clusters,
                progress=progress,
                level=self.level,
            )
            coding = self._learned(request, in_place)
        if coding is None or coding.stored_bytes >= geometry.num_bytes:
            return None
        return coding

    def coding_in_slots(
        self, data: torch.Tensor, geometry: _rows.Geometry, worker: torch.device, progress: bool
    ) -> Coding:
        """How the bytes are coded where slots are smaller than rows: with a codebook in any case, as rows of which
        every one is raw have parts in overflow too. The tensor is not empty."""
        codebook = self.codebook
        if codebook is None:
            request = Request(
                data, geometry, worker, self.sample, self.chunk_bytes, self.tau, progress=progress, level=self.level
            )
            found = self._learned(request, in_place=False)
            if found is not None:
                return found
            codebook = learn("planes", request)
            assert codebook is not None, "scheme 'planes' always has a codebook"
        return _coding(data, geometry, codebook, worker, progress)

    def _learned(self, request: Request, in_place: bool) -> Coding | None:
        """As learned from sampled rows; where many others lack what those have in common, once more without it."""
        codebook = learn(self.scheme, request, in_place)
        if codebook is None:
            return None
        coding = _coding(request.data, request.geometry, codebook, request.device, request.progress)
        savings, expected = 1 - coding.stored_bytes / request.geometry.num_bytes, codebook.expected_savings
        if not codebook.is_partial or expected is None or savings > expected - MOST_LACKING:
            return coding
        codebook = learn(self.scheme, replace(request, codes_invariant=True), in_place)
        if codebook is None:
            return coding
        again = _coding(request.data, request.geometry, codebook, request.device, request.progress)
        return min(coding, again, key=lambda tried: tried.stored_bytes)


def _coding(
    data: torch.Tensor, geometry: _rows.Geometry, codebook: AnyCodebook, worker: torch.device, progress: bool
) -> Coding:
    lengths = measure(data, codebook, worker, progress)
    return Coding(codebook, lengths, _layout.survey(lengths, geometry))


def _wants_pinning(x: torch.Tensor, pin_memory: bool | None) -> bool | None:
    """Whether a table of x is to be pinned; None: where the system lets. RuntimeError if it cannot be."""
    if pin_memory and not _ops.cuda_is_available():
        raise RuntimeError("pin_memory=True needs a CUDA device and a build of ibp with CUDA")
    if pin_memory is None:
        return None if not x.is_cuda and _ops.cuda_is_available() else False
    return bool(pin_memory) and not x.is_cuda


def _refuse(why: str, **options: object) -> None:
    """Raises ValueError for options of rows that are given, and have no meaning."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} is given, but {why}")


def geometry_of(x: torch.Tensor, row_bytes: int | None, codebook: AnyCodebook | None) -> _rows.Geometry:
    if codebook is None:
        return _rows.Geometry.of(x, row_bytes)
    check_codebook(codebook)
    if row_bytes is not None and row_bytes != codebook.row_bytes:
        raise ValueError(f"row_bytes is {row_bytes}, but the codebook is for rows of {codebook.row_bytes} bytes")
    return _rows.Geometry.of(x, codebook.row_bytes)


def _check_owns_memory(x: torch.Tensor) -> None:
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise ValueError(f"x has strides {x.stride()}; compress_ wants a contiguous tensor")
    held = x.untyped_storage().nbytes()
    if x.storage_offset() != 0 or held != x.numel() * x.element_size():
        raise ValueError(
            f"x has {x.numel() * x.element_size()} bytes of a storage of {held}; "
            "compress_ wants a tensor that owns all of its storage"
        )
    if x.requires_grad:
        raise ValueError("x requires grad; compress_ would destroy its values: detach it first")


def table_of(
    geometry: _rows.Geometry,
    scheme: str,
    slot_bytes: int,
    slots: torch.Tensor,
    codebook: AnyCodebook | None,
    lengths: torch.Tensor | None,
    overflow: torch.Tensor | None = None,
    bases: torch.Tensor | None = None,
) -> CompressedTensor:
    def on_home(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=slots.device) if tensor is None else tensor.to(slots.device)

    return CompressedTensor(
        shape=geometry.shape,
        dtype=geometry.dtype,
        scheme=scheme,
        row_bytes=geometry.row_bytes,
        slot_bytes=slot_bytes,
        slots=slots,
        overflow=on_home(None, torch.uint8) if overflow is None else overflow,
        lengths=on_home(lengths, torch.uint16),
        bases=on_home(bases, torch.int64),
        codebook=codebook,
    )


def _encode(
    data: torch.Tensor,
    geometry: _rows.Geometry,
    coding: Coding,
    slot_bytes: int,
    worker: torch.device,
    pin: bool | None,
    node: int,
    progress: bool,
) -> CompressedTensor:
    (slots, overflow), is_pinned = _memory.empty_parts(sizes_of(coding, geometry, slot_bytes), data.device, pin, node)
    bases = encode_to(data, geometry, coding, slot_bytes, worker, slots, overflow, not is_pinned, progress)
    table = table_of(
        geometry, coding.codebook.scheme, slot_bytes, slots, coding.codebook, coding.lengths, overflow, bases
    )
    table._is_refused = pin is None and not is_pinned
    return table


def sizes_of(coding: Coding, geometry: _rows.Geometry, slot_bytes: int) -> list[int]:
    """Bytes of the slots and of the overflow of a table."""
    overflow_bytes = coding.survey.overflow_bytes(slot_bytes) if slot_bytes < geometry.row_bytes else 0
    return [_layout.slots_size(geometry, slot_bytes), overflow_bytes]


def encode_to(
    data: torch.Tensor,
    geometry: _rows.Geometry,
    coding: Coding,
    slot_bytes: int,
    worker: torch.device,
    slots: torch.Tensor,
    overflow: torch.Tensor,
    pageable: bool,
    progress: bool,
) -> torch.Tensor:
    """Codes a tensor's bytes into memory of the sizes that `sizes_of` says, both on the worker or both in host memory,
    pageable or pinned. Returns the table's bases."""
    codebook, lengths = coding.codebook, coding.lengths
    bases = (
        _layout.index_rows(lengths, geometry, slot_bytes)
        if overflow.numel()
        else torch.empty(0, dtype=torch.int64, device=worker)
    )
    lies_near, faults = slots.device == worker, []
    ends = (
        [*bases.tolist(), overflow.numel()] if overflow.numel() and not (lies_near and worker.type == "cuda") else None
    )
    with (
        _staging.outlet(worker, slots.device, pageable=pageable) as outlet,
        tqdm(total=geometry.num_rows, desc="compress", unit="row", unit_scale=True, disable=not progress) as bar,
    ):
        for first, last, block in _rows.blocks(data, geometry.row_bytes, worker):
            base, end_base = first // _core.ROWS_PER_BASE, -(-last // _core.ROWS_PER_BASE)
            start, end = (ends[base], ends[end_base]) if ends else (0, overflow.numel())
            targets = slots[first * slot_bytes : last * slot_bytes], overflow[start:end]
            near = targets if lies_near else outlet.take([target.numel() for target in targets])
            part = bases[base:end_base] if overflow.numel() else bases
            faults.append(_encode_block(block, codebook, lengths[first:last], part, slot_bytes, start, *near))
            if not lies_near:
                outlet.put(targets, near)
            bar.update(last - first)
    _check_faults(faults)
    return bases


def _encode_block(
    block: torch.Tensor,
    codebook: AnyCodebook,
    lengths: torch.Tensor,
    bases: torch.Tensor,
    slot_bytes: int,
    overflow_start: int,
    slots: torch.Tensor,
    overflow: torch.Tensor,
) -> torch.Tensor:
    """Codes a block of rows into slices of slots and overflow on its own device. Returns where a fault is noted."""
    device = block.device
    if device.type == "cpu":  # zeros between the rows' bytes, as kernels write them: equal tables have equal tensors
        slots.zero_(), overflow.zero_()
    fault = torch.zeros(4, dtype=torch.int64, device=device)
    torch.ops.ibp.encode_rows(
        slots,
        overflow,
        lengths,
        bases,
        codebook.words(device),
        codebook.codec,
        slot_bytes,
        overflow_start,
        1,
        block.numel(),
        block,
        fault,
    )
    return fault


def _check_faults(faults: list[torch.Tensor]) -> None:
    for status, row, _, _ in torch.stack(faults).tolist():
        if status:
            raise RuntimeError(
                f"x changed while it was being compressed: row {row} of a block no longer has the length measured"
            )


def _encode_in_place(
    table: CompressedTensor, data: torch.Tensor, coding: Coding, worker: torch.device, progress: bool
) -> None:
    """Rewrites the rows of a table that are still raw. Rows and lengths of a block change by one operation of torch,
    before and after which the
    table decodes: an interrupt finds it so, however many there are."""
    codebook, lengths = coding.codebook, coding.lengths
    row_bytes, coded = table.row_bytes, table.lengths.view(torch.uint8)
    no_bases, no_overflow = (
        torch.empty(0, dtype=torch.int64, device=worker),
        torch.empty(0, dtype=torch.uint8, device=worker),
    )
    with (
        _staging.outlet(worker, data.device, pageable=True) as outlet,
        tqdm(total=table.num_rows, desc="compress", unit="row", unit_scale=True, disable=not progress) as bar,
    ):
        for first, last, block in _rows.blocks(data, row_bytes, worker, whole=False):
            targets = data[first * row_bytes : last * row_bytes], coded[2 * first : 2 * last]
            rows, new_lengths = outlet.take([target.numel() for target in targets])
            new_lengths.copy_(lengths[first:last].view(torch.uint8))
            _check_faults(
                [_encode_block(block, codebook, lengths[first:last], no_bases, row_bytes, 0, rows, no_overflow)]
            )
            outlet.put(targets, (rows, new_lengths))
            bar.update(last - first)
