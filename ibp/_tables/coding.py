"""Makes tables from the rows of a tensor, which `Request.of` makes. `compressed` calls `coded`, which finds a codebook
and measures all rows with it, then allocates the table, and calls `encode`, which writes the rows. `placed` makes
tables whose overflow is in host memory, and `compressed_in_place` makes tables in the tensor's own memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from .. import _core
from .._common.once import warn_once
from .._fetch.streaming import decompress
from .._layout import geometry as _rows
from .._machine import memory, staging
from .._machine import numa as _numa
from .._rows.faults import FaultWords, new_record
from .._rows.handle import Handle, Parts
from .._rows.table import AnyTable, Table
from .._schemes import AnyCodebook, Options, Request, checked, learn, measure, surveyed

_FEW_BYTES = 1 << 20  # The CPU encodes at most this many bytes of host memory sooner than they are copied to a GPU.
# With a given codebook, rows are encoded while they are measured if there are at least _LEAST_TIMES times as many bytes
# as are surveyed to choose the slots.
_SURVEYED_BYTES, _LEAST_TIMES = 1 << 20, 32
# The overflow of rows that are encoded while they are measured has 1.25 times the size that the sample predicts, plus
# 1/512 of all bytes, because the prediction rests on few rows.
_MORE_OVERFLOW, _LEAST_SHARE = 1.25, 1 / 512
MOST_LACKING = 0.01  # Share of the bytes that may stay raw because rows lack what all sampled rows have in common.
_CPU = torch.device("cpu")
CHANGED = FaultWords(
    "x changed while it was being compressed: row {position} of a block no longer has the length measured", RuntimeError
)


class Coding(NamedTuple):
    """The results of measuring all rows, before the table's memory is allocated.

    Attributes:
        codebook: the codebook that the rows were measured with and are to be encoded with.
        lengths: uint16 [num_rows], the lengths of all rows (FORMAT.md section 2), on the device that measured the rows
            and encodes them.
        survey: the survey of the lengths.
        place: slots that already hold the encoded rows, and the rows' parts in the overflow, which lie there in any
            order. None: the rows were only measured.
    """

    codebook: AnyCodebook
    lengths: torch.Tensor
    survey: _rows.Survey
    place: Handle | None = None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the rows and the codebook."""
        return self.survey.stored + self.codebook.nbytes


def warn_of_gradient(x: torch.Tensor) -> None:
    """Warns once per process that a table has no gradient, if x requires grad."""
    if x.requires_grad and torch.is_grad_enabled():
        warn_once(
            "x requires grad, and a table of it has no gradient: give x.detach() if its values alone are meant. Rows "
            "of ibp.nn.Embedding and EmbeddingBag train, with trainable=True",
            stacklevel=3,
        )


def compressed(kind: type[AnyTable], request: Request) -> AnyTable:
    """Returns a table of the rows, in memory of its own.

    Args:
        kind: the class of the table.

    Raises:
        TypeError, ValueError, RuntimeError: as `ibp.compress`.
    """
    data, geometry, options = request.data, request.geometry, request.options
    worker, slot_bytes = request.device, request.slot_bytes
    home, pins = memory.home_of(data.device, options.memory, worker)
    node = _numa.CALLERS_NODE if options.numa is None else _numa.node_of(options.numa)
    is_there = home == data.device
    pin = pins if is_there else False

    def room(num_bytes: int) -> torch.Tensor:
        return memory.empty_parts([num_bytes], data.device, pin, node)[0][0]

    is_far = worker.type == "cuda" and not data.is_cuda
    with staging.whole_ahead(data, worker) if is_far else nullcontext() as near:
        request = request if near is None else replace(request, near=near)
        coding = coded(request, room)
        if coding is None or coding.stored_bytes >= geometry.num_bytes:
            coding = None  # frees the slots that rows were encoded into
            (slots,), is_pinned = memory.empty_parts([geometry.num_bytes], data.device, pin, node)
            table = kind.of_parts(geometry, "raw", geometry.row_bytes, slots.copy_(data))
        else:
            book, survey, place = coding.codebook, coding.survey, coding.place
            slot_bytes = survey.table_slot_bytes if slot_bytes is None else slot_bytes
            sizes = [geometry.slots_size(slot_bytes), survey.overflow_bytes(slot_bytes)]
            if place is not None and place.parts.slot_bytes == slot_bytes:
                slots = place.parts.slots
                like_slots = pin if slots.is_pinned() else False
                (overflow,), is_pinned = memory.empty_parts(sizes[1:], data.device, like_slots, node)
                bases = None
                if sizes[1]:
                    bases = geometry.index_rows(coding.lengths, slot_bytes)
                    torch.ops.ibp.move_parts.default(place.table, bases, overflow)
            else:  # No rows are encoded yet, or all rows ask for other slots than the sample did.
                place, coding = None, coding._replace(place=None)  # frees the memory of the place
                (slots, overflow), is_pinned = memory.empty_parts(sizes, data.device, pin, node)
                bases = encode(request, coding, slot_bytes, slots, overflow, not is_pinned)
            table = kind.of_parts(geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)
    if pin is None and not is_pinned:
        table._is_refused = True
    if is_there:
        return table
    # The table is a CompressedTensor here: `code_anew`, which makes a Table, never asks for another device.
    moved = table.to(home)  # type: ignore[attr-defined]
    return moved.pin_memory(numa=options.numa) if pins else moved


def code_anew(table: Table, options: Options, level: str | None) -> Table:
    """Returns a new table of the same tensor, for `CompressedTensor.refit`.

    Args:
        level: the level at which a codebook is learned. None: the level of the table's codebook, unless the options say
            otherwise.
    """
    if level is None:
        is_free = options.scheme in ("auto", "planes") and options.codebook is options.clusters is None
        level = table.codebook.level if is_free and table.codebook is not None else "default"
    scheme = "planes" if options.scheme == "auto" and table.spills_to_host else options.scheme
    options = replace(options, scheme=scheme, level=level, layout=table.layout, row_bytes=table.row_bytes)
    x = decompress(table, check=table.device.type == "cuda")
    if table.spills_to_host:
        options = replace(checked(options), clusters=None, device=table.device)
        return placed(Table, Request.of(x, options), lambda _: table.slot_bytes)
    home = None if x.is_cuda else "pinned" if table.is_pinned() else "host"
    return compressed(Table, Request.of(x, replace(options, memory=home)))


def placed(kind: type[AnyTable], request: Request, slots_for: Callable[[Coding], int]) -> AnyTable:
    """Returns a table with slots on the device that codes the rows, and with the overflow in host memory, pinned for a
    GPU. If slots hold whole rows, and rows take no fewer bytes encoded, they stay raw.

    Args:
        slots_for: returns the bytes of a slot if the request leaves them open.
    """
    data, geometry, device, slot_bytes = request.data, request.geometry, request.device, request.slot_bytes
    is_near = device.type == "cpu"
    with nullcontext() if is_near else staging.whole_ahead(data, device) as near:
        request = request if near is None else replace(request, near=near)
        coding = coded_in_slots(request) if geometry.num_bytes else None
        if coding is None:
            slot_bytes = geometry.row_bytes
        elif slot_bytes is None:
            slot_bytes = slots_for(coding)
        if coding is None or (slot_bytes == geometry.row_bytes and coding.stored_bytes >= geometry.num_bytes):
            nothing = torch.empty(0, dtype=torch.uint8, device=_CPU)
            slots = data.to(device, copy=True)
            return kind.of_parts(geometry, "raw", geometry.row_bytes, slots, overflow=nothing)
        slots = memory.empty(geometry.slots_size(slot_bytes), device, False)
        overflow = memory.empty(coding.survey.overflow_bytes(slot_bytes), _CPU, not is_near)
        bases = encode(request, coding, slot_bytes, slots, memory.seen_from(device, overflow), is_near)
    book = coding.codebook
    return kind.of_parts(geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)


# ---- rows, a codebook for them, and their lengths ----


def coded(request: Request, room: Callable[[int], torch.Tensor] | None = None) -> Coding | None:
    """Measures all rows with the codebook that is given, or with one that it learns. Returns None if there are no rows,
    or if raw rows are best.

    A codebook may leave out what all sampled rows have in common; rows that lack it stay raw. If these are too many, a
    second codebook is learned that leaves out nothing, and the better one is taken.

    Args:
        room: allocates slots beside the tensor, so that many rows are encoded in the pass that measures them; None:
            rows are only measured.
    """
    options, num_bytes = request.options, request.geometry.num_bytes
    if not num_bytes:
        return None
    codebook = learn(options.scheme, request) if options.codebook is None else options.codebook
    if codebook is None:
        return None
    coding = _measured(request, codebook, room)
    if options.codebook is not None or not codebook.is_partial or codebook.expected_savings is None:
        return coding
    if 1 - coding.stored_bytes / num_bytes > codebook.expected_savings - MOST_LACKING:
        return coding
    request = replace(request, codes_invariant=True)
    codebook = learn(options.scheme, request)
    if codebook is None:
        return coding
    again = _measured(request, codebook, room)
    return min(coding, again, key=lambda tried: tried.stored_bytes)


def coded_in_slots(request: Request) -> Coding:
    """Returns what `coded` returns, for slots that are smaller than rows. There is always a codebook, because even a
    table whose rows are all raw has parts in the overflow. The tensor is not empty."""
    found = coded(request)
    if found is None:
        codebook = learn("planes", request)
        assert codebook is not None, "scheme 'planes' always has a codebook"
        found = _measured(request, codebook, None)
    return found


def _measured(request: Request, codebook: AnyCodebook, room: Callable[[int], torch.Tensor] | None) -> Coding:
    """Returns the results of measuring all rows with a codebook. If there is a room for slots, and if it pays, the rows
    are encoded in the same pass."""
    data, device = request.data, request.device
    known = None if codebook is request.options.codebook else request.known(codebook)
    is_free = request.options.device is None and not data.is_cuda  # The caller has not named a device.
    coder = data.device if is_free and data.numel() <= _FEW_BYTES else device
    if known is not None and request.host_rows.numel() == data.numel():  # All rows have already been measured.
        return Coding(codebook, known[0].to(coder), known[1])
    if room is not None and request.slot_bytes != 0 and coder == data.device:
        some = None if known is None else known[1]
        if some is None and data.numel() >= _LEAST_TIMES * _SURVEYED_BYTES:
            sample = _rows.sample(data, codebook.row_bytes, _SURVEYED_BYTES // codebook.row_bytes)
            some = surveyed(sample, codebook)
        if some is not None:
            return _encoded_ahead(request, codebook, some, room)
    near = data if request.near is None else request.near()
    lengths = measure(near, codebook, coder, request.options.progress)
    return Coding(codebook, lengths, request.geometry.survey(lengths))


# ---- encoding ----


def _encoded_ahead(
    request: Request, codebook: AnyCodebook, some: _rows.Survey, room: Callable[[int], torch.Tensor]
) -> Coding:
    """Encodes the rows into slots in the pass that measures them, and returns the results. If the overflow does not
    hold all parts, the results have no place, and the rows are encoded again.

    Args:
        some: the survey of a sample of the rows, by which the sizes of slots and overflow are chosen.
        room: allocates the slots.
    """
    data, geometry = request.data, request.geometry
    slot_bytes = request.slot_bytes or some.table_slot_bytes
    scale = _MORE_OVERFLOW * geometry.num_rows / some.num_rows
    spare = data.new_empty(int(scale * some.spilled(slot_bytes)[1] + _LEAST_SHARE * geometry.num_bytes))
    slots = room(geometry.slots_size(slot_bytes))
    lengths = data.new_empty(geometry.num_rows, dtype=torch.uint16)
    bases, used = data.new_empty(geometry.num_rows, dtype=torch.int64), data.new_zeros(1, dtype=torch.int64)
    words = codebook.words(data.device)

    def place_of(first: int, last: int, num_bytes: int) -> Handle:
        index, sizes = (lengths[first:last], bases[first:last], words), (slot_bytes, 0, 1, num_bytes)
        own = slots[first * slot_bytes : last * slot_bytes]
        return Handle(Parts(own, spare, *index, codebook.codec, *sizes, None, used))

    bar = "compress" if request.options.progress else None
    for first, last, block in _rows.blocks(data, geometry.row_bytes, data.device, bar):
        place_of(first, last, block.numel()).encode(block, is_new=True)
    survey = geometry.survey(lengths)
    is_whole = survey.spilled(slot_bytes)[1] <= spare.numel()
    return Coding(codebook, lengths, survey, place_of(0, geometry.num_rows, data.numel()) if is_whole else None)


def encode(
    request: Request,
    coding: Coding,
    slot_bytes: int,
    slots: torch.Tensor,
    overflow: torch.Tensor,
    pageable: bool,
) -> torch.Tensor:
    """Encodes rows, on the device of the coding, into slots and overflow. Returns the table's bases, which are empty if
    no row has a part in the overflow.

    Args:
        slots, overflow: uint8, of the sizes that the survey asks for; both on the device of the coding, or both in host
            memory.
        pageable: whether this host memory is pageable.

    Raises:
        RuntimeError: a row no longer has the length that was measured, because the tensor was changed.
    """
    geometry, lengths, codebook, worker = request.geometry, coding.lengths, coding.codebook, coding.lengths.device
    data = request.data if request.near is None else request.near()
    lies_near, num_bytes = slots.device == worker, overflow.numel()
    bases = torch.empty(0, dtype=torch.int64, device=worker)
    if num_bytes:
        bases = geometry.index_rows(lengths, slot_bytes)
    # Whether each block of rows gets only its own range of the overflow. A GPU that writes to its own memory gets all
    # of the overflow, so that it need not be asked for the ranges.
    is_cut = num_bytes > 0 and not (lies_near and worker.type == "cuda")
    starts, fault = bases.cpu() if is_cut else bases, new_record(worker)
    words, codec = codebook.words(worker), codebook.codec
    bar = "compress" if request.options.progress else None
    with nullcontext() if lies_near else staging.outlet(worker, slots.device, pageable=pageable) as outlet:
        for first, last, block in _rows.blocks(data, geometry.row_bytes, worker, bar, whole=lies_near):
            base, end_base = first // _core.ROWS_PER_BASE, -(-last // _core.ROWS_PER_BASE)
            start = int(starts[base]) if is_cut else 0
            end = int(starts[end_base]) if is_cut and end_base < len(starts) else num_bytes
            targets = slots[first * slot_bytes : last * slot_bytes], overflow[start:end]
            rows, parts = targets if outlet is None else outlet.take([target.numel() for target in targets])
            index, sizes = (lengths[first:last], bases[base:end_base]), (slot_bytes, start, 1, block.numel())
            place = torch.ops.ibp.describe_table.default(rows, parts, *index, words, codec, *sizes)
            torch.ops.ibp.encode_rows.default(place, block, fault)
            if outlet is not None:
                outlet.put(targets, (rows, parts))
    CHANGED.raise_for(fault)
    return bases


# ---- in the tensor's own memory ----


def compressed_in_place(kind: type[AnyTable], x: torch.Tensor, options: Options) -> AnyTable:
    """Returns a table in the memory of x, for `ibp.compress(x, inplace=True)`.

    All analysis is done before the first write. Then the rows are rewritten block by block. One operation writes a
    block and the lengths of its rows, so that the table decompresses to x at any time."""
    _check_owns_memory(x)
    request = Request.of(x, options)
    data, geometry, row_bytes = request.data, request.geometry, request.geometry.row_bytes
    home, pin = memory.home_of(x.device, options.memory, request.device)
    if home != x.device:
        raise ValueError(f"memory is {options.memory!r}, but inplace=True leaves x where it is, on {x.device}")
    coding = coded(replace(request, slot_bytes=row_bytes, in_place=True))
    if coding is None or coding.stored_bytes >= geometry.num_bytes:
        coding = None
        table = kind.of_parts(geometry, "raw", row_bytes, data)
    else:
        # Lengths of 0 say that all rows are still raw.
        book, raw = coding.codebook, torch.zeros_like(coding.lengths, device=data.device)
        table = kind.of_parts(geometry, book.scheme, row_bytes, data, book, raw)
    table._owner = x
    kept: list[AnyTable] = []

    def work() -> AnyTable:
        kept.append(table)  # Once the first row is rewritten, x can be read through the table alone.
        if coding is not None:
            _encode_in_place(table, data, coding, options.progress)
        if pin:
            table.pin_memory()
        elif pin is None:
            memory.pin_if_possible(table)
        return table

    try:
        return _core.call_keeping_table(kept, work)
    except BaseException as interruption:  # Python may also handle a signal while that function returns.
        if kept:
            interruption.table = table  # type: ignore[attr-defined]
        raise


def _check_owns_memory(x: torch.Tensor) -> None:
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise ValueError(f"x has strides {x.stride()}; compress(inplace=True) wants a contiguous tensor")
    held = x.untyped_storage().nbytes()
    if x.storage_offset() != 0 or held != x.nbytes:
        raise ValueError(
            f"x has {x.nbytes} bytes of a storage of {held}; "
            "compress(inplace=True) wants a tensor that owns all of its storage"
        )
    if x.requires_grad:
        raise ValueError("x requires grad; compress(inplace=True) would destroy its values: detach it first")


def _encode_in_place(table: Table, data: torch.Tensor, coding: Coding, progress: bool) -> None:
    """Rewrites the rows of a table, all of which are still raw. One operation of torch changes the bytes of a block and
    the lengths of its rows. The table can be decoded before and after each such operation, so that an interrupt does no
    harm at any time."""
    codebook, lengths, worker = coding.codebook, coding.lengths, coding.lengths.device
    row_bytes, words, entries = table.row_bytes, codebook.words(worker), table.lengths.view(torch.uint8)
    no_bases = torch.empty(0, dtype=torch.int64, device=worker)
    no_overflow = torch.empty(0, dtype=torch.uint8, device=worker)
    blocks = _rows.blocks(data, row_bytes, worker, "compress" if progress else None, whole=False)
    with staging.outlet(worker, data.device, pageable=True) as outlet:
        for first, last, block in blocks:
            targets = data[first * row_bytes : last * row_bytes], entries[2 * first : 2 * last]
            rows, new_lengths = outlet.take([target.numel() for target in targets])
            new_lengths.copy_(lengths[first:last].view(torch.uint8))
            index, sizes, fault = (lengths[first:last], no_bases), (row_bytes, 0, 1, block.numel()), new_record(worker)
            place = torch.ops.ibp.describe_table.default(rows, no_overflow, *index, words, codebook.codec, *sizes)
            torch.ops.ibp.encode_rows.default(place, block, fault)
            CHANGED.raise_for(fault)
            outlet.put(targets, (rows, new_lengths))
