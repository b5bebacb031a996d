"""From a tensor to a table. `compressed` checks the options, cuts the tensor into rows, has `coded` find a codebook and
measure all rows with it, allocates the table, and has `encode` write the rows. `placed` makes tables whose overflow is
in host memory, and `compress_in_place` of `compression.py` makes those in the tensor's own memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from .. import _core
from .._fetch.streaming import decompress
from .._layout import geometry as _rows
from .._layout import slots as _layout
from .._machine import memory, staging
from .._machine import numa as _numa
from .._rows.faults import FaultWords, new_record
from .._rows.handle import Handle, Parts
from .._rows.table import AnyTable, Table
from .._schemes import AnyCodebook, Options, Request, measure, surveyed
from .._schemes.choice import learn
from .._schemes.estimation import check_codebook, checked

_FEW_BYTES = 1 << 20  # The CPU encodes at most this many bytes of host memory sooner than they are copied to a GPU.
# With a given codebook, rows are encoded while they are measured if there are at least _LEAST_TIMES times as many bytes
# as are surveyed to choose the slots.
_SURVEYED_BYTES, _LEAST_TIMES = 1 << 20, 32
# Room for the overflow of rows that are encoded while they are measured: a multiple of what the sample needs, and a
# share of all bytes, because few sampled rows have a part in the overflow.
_MORE_OVERFLOW, _LEAST_SHARE = 1.25, 1 / 512
MOST_LACKING = 0.01  # Share of the bytes that may stay raw because rows lack what all sampled rows have in common.
_CPU = torch.device("cpu")
Near = Callable[[], torch.Tensor]  # Returns the bytes of a tensor where its coder reads them.
CHANGED = FaultWords(
    "x changed while it was being compressed: row {position} of a block no longer has the length measured", RuntimeError
)


class Coding(NamedTuple):
    """Holds what measuring all rows has told, before the table's memory is allocated.

    Attributes:
        codebook: what they are encoded with.
        lengths: of all rows, on the device that measured them and encodes them (FORMAT.md section 2).
        survey: of the lengths.
        place: slots that hold the rows already, and their parts of overflow in any order; None if the rows were only
            measured.
    """

    codebook: AnyCodebook
    lengths: torch.Tensor
    survey: _layout.Survey
    place: Handle | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rows and the codebook."""
        return self.survey.stored + self.codebook.nbytes


def compressed(kind: type[AnyTable], x: torch.Tensor, options: Options) -> AnyTable:
    """Returns a table of the rows of x, which `check_tensor` has checked, in memory of its own.

    Raises:
        TypeError, ValueError, RuntimeError: as `ibp.compress`.
    """
    options = checked(options)
    worker = memory.usual(options.device, x)
    home, pins = memory.home_of(x, options.memory, worker)
    node = _numa.CALLERS_NODE if options.numa is None else _numa.node_of(options.numa)
    is_there = home == x.device
    pin = pins if is_there else False
    geometry = geometry_of(x, options.row_bytes, options.codebook)
    slot_bytes = _layout.checked_slot_bytes(options.layout, options.slot_bytes, geometry.row_bytes)
    data = _rows.bytes_of(x)
    request = Request(data, geometry, worker, options, slot_bytes)

    def room(num_bytes: int) -> torch.Tensor:
        return memory.empty_parts([num_bytes], data.device, pin, node)[0][0]

    with staging.whole_ahead(data, worker) if worker.type == "cuda" else nullcontext() as near:
        coding = coded(request, near, room)
        if coding is None or coding.stored_bytes >= geometry.num_bytes:
            coding = None  # frees the slots that rows were encoded into
            (slots,), is_pinned = memory.empty_parts([geometry.num_bytes], data.device, pin, node)
            table = kind.of_parts(geometry, "raw", geometry.row_bytes, slots.copy_(data))
        else:
            book, survey, place = coding.codebook, coding.survey, coding.place
            slot_bytes = survey.table_slot_bytes if slot_bytes is None else slot_bytes
            sizes = [_layout.slots_size(geometry, slot_bytes), survey.overflow_bytes(slot_bytes)]
            if place is not None and place.parts.slot_bytes == slot_bytes:
                slots = place.parts.slots
                like_slots = pin if slots.is_pinned() else False
                (overflow,), is_pinned = memory.empty_parts(sizes[1:], data.device, like_slots, node)
                bases = None
                if sizes[1]:
                    bases = _layout.index_rows(coding.lengths, geometry, slot_bytes)
                    torch.ops.ibp.move_parts.default(place.table, bases, overflow)
            else:  # No rows are encoded yet, or all rows ask for other slots than the sample did.
                place, coding = None, coding._replace(place=None)  # frees its memory
                (slots, overflow), is_pinned = memory.empty_parts(sizes, data.device, pin, node)
                bases = encode(request, coding, near, slot_bytes, slots, overflow, not is_pinned)
            table = kind.of_parts(geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)
    if pin is None and not is_pinned:
        table._is_refused = True
    if is_there:
        return table
    moved = table.to(home)  # type: ignore[attr-defined]  # of a CompressedTensor: `code_anew` leaves x where it is
    return moved.pin_memory(numa=options.numa) if pins else moved


def code_anew(table: Table, options: Options, level: str | None) -> Table:
    """Returns a table of the same tensor as `CompressedTensor.refit` asks for it. level: None: that of the table's
    codebook, if the options let such a codebook be learned."""
    if level is None:
        is_free = options.scheme in ("auto", "planes") and options.codebook is options.clusters is None
        level = table.codebook.level if is_free and table.codebook is not None else "default"
    scheme = "planes" if options.scheme == "auto" and table.spills_to_host else options.scheme
    options = replace(options, scheme=scheme, level=level, layout=table.layout, row_bytes=table.row_bytes)
    x = decompress(table, check=table.device.type == "cuda")
    if table.spills_to_host:
        return placed(Table, x, checked(options), lambda _: table.slot_bytes, table.device)
    home = None if x.is_cuda else "pinned" if table.is_pinned() else "host"
    return compressed(Table, x, replace(options, memory=home))


def placed(
    kind: type[AnyTable],
    x: torch.Tensor,
    options: Options,
    slots_for: Callable[[Coding], int],
    device: torch.device,
) -> AnyTable:
    """Returns a table with slots on a device, and with the overflow in host memory, pinned for a GPU. If slots hold
    whole rows, and rows take no fewer bytes encoded, they stay raw.

    Args:
        options: checked.
        slots_for: returns the bytes of a slot if options.slot_bytes is None.
        device: where the rows are encoded, too.
    """
    geometry, is_near = geometry_of(x, options.row_bytes, options.codebook), device.type == "cpu"
    slot_bytes = _layout.checked_slot_bytes(options.layout, options.slot_bytes, geometry.row_bytes)
    data, options = _rows.bytes_of(x), replace(options, clusters=None, device=device)
    request = Request(data, geometry, device, options, slot_bytes)
    with nullcontext() if is_near else staging.whole_ahead(data, device) as near:
        coding = coded_in_slots(request, near) if geometry.num_bytes else None
        if coding is None:
            slot_bytes = geometry.row_bytes
        elif slot_bytes is None:
            slot_bytes = slots_for(coding)
        if coding is None or (slot_bytes == geometry.row_bytes and coding.stored_bytes >= geometry.num_bytes):
            nothing = torch.empty(0, dtype=torch.uint8, device=_CPU)
            slots = data.to(device, copy=True)
            return kind.of_parts(geometry, "raw", geometry.row_bytes, slots, overflow=nothing)
        slots = memory.empty(_layout.slots_size(geometry, slot_bytes), device, False)
        overflow = memory.empty(coding.survey.overflow_bytes(slot_bytes), _CPU, not is_near)
        bases = encode(request, coding, near, slot_bytes, slots, memory.seen_from(device, overflow), is_near)
    book = coding.codebook
    return kind.of_parts(geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)


# ---- rows, a codebook for them, and their lengths ----


def geometry_of(x: torch.Tensor, row_bytes: int | None, codebook: AnyCodebook | None) -> _rows.Geometry:
    """Returns how x is cut into rows of row_bytes, or of those that a codebook is for."""
    if codebook is None:
        return _rows.Geometry.of(x, row_bytes)
    check_codebook(codebook)
    if row_bytes is not None and row_bytes != codebook.row_bytes:
        raise ValueError(f"row_bytes is {row_bytes}, but the codebook is for rows of {codebook.row_bytes} bytes")
    return _rows.Geometry(x.shape, x.dtype, codebook.row_bytes)


def coded(
    request: Request,
    near: Near | None = None,
    room: Callable[[int], torch.Tensor] | None = None,
    in_place: bool = False,
) -> Coding | None:
    """Measures all rows with the codebook that is given, or with one that it learns. Returns None if there are no rows,
    or if raw rows are best.

    A codebook may leave out what all sampled rows have in common; rows that lack it stay raw. If these are too many, a
    second codebook is learned that leaves out nothing, and the better one is taken.

    Args:
        near: returns the bytes where a GPU reads them, if they are copied there ahead.
        room: allocates slots beside the tensor, so that many rows are encoded in the pass that measures them; None:
            rows are only measured.
        in_place: whether rows stay where they are, so that the scheme of fewest bytes is taken.
    """
    options, num_bytes = request.options, request.geometry.num_bytes
    if not num_bytes:
        return None
    codebook = learn(options.scheme, request, in_place) if options.codebook is None else options.codebook
    if codebook is None:
        return None
    coding = _measured(request, codebook, near, room)
    if options.codebook is not None or not codebook.is_partial or codebook.expected_savings is None:
        return coding
    if 1 - coding.stored_bytes / num_bytes > codebook.expected_savings - MOST_LACKING:
        return coding
    request = replace(request, codes_invariant=True)
    codebook = learn(options.scheme, request, in_place)
    if codebook is None:
        return coding
    again = _measured(request, codebook, near, room)
    return min(coding, again, key=lambda tried: tried.stored_bytes)


def coded_in_slots(request: Request, near: Near | None = None) -> Coding:
    """Returns the same for slots that are smaller than rows: always with a codebook, because even a table whose rows
    are all raw has parts in the overflow. The tensor is not empty."""
    found = coded(request, near)
    if found is None:
        codebook = learn("planes", request)
        assert codebook is not None, "scheme 'planes' always has a codebook"
        found = _measured(request, codebook, near, None)
    return found


def _measured(
    request: Request, codebook: AnyCodebook, near: Near | None, room: Callable[[int], torch.Tensor] | None
) -> Coding:
    """Returns what all rows take with a codebook."""
    data, device = request.data, request.device
    known = None if codebook is request.options.codebook else request.known(codebook)
    is_free = request.options.device is None and not data.is_cuda  # nobody has named a device other than the CPU
    coder = data.device if is_free and data.numel() <= _FEW_BYTES else device
    if known is not None and request.host_rows.numel() == data.numel():  # all rows have been measured
        return Coding(codebook, known[0].to(coder), known[1])
    if room is not None and request.slot_bytes != 0 and coder == data.device:
        some = None if known is None else known[1]
        if some is None and data.numel() >= _LEAST_TIMES * _SURVEYED_BYTES:
            sample = _rows.sample(data, codebook.row_bytes, _SURVEYED_BYTES // codebook.row_bytes)
            some = surveyed(sample, codebook)
        if some is not None:
            return _encoded_ahead(request, codebook, some, room)
    lengths = measure(data if near is None else near(), codebook, coder, request.options.progress)
    return Coding(codebook, lengths, _layout.survey(lengths, request.geometry))


# ---- encoding ----


def _encoded_ahead(
    request: Request, codebook: AnyCodebook, some: _layout.Survey, room: Callable[[int], torch.Tensor]
) -> Coding:
    """Returns rows that are encoded into slots in the pass that measures them. some: what some of the rows take. If the
    overflow does not hold all parts, the coding has no place, and the rows are encoded again."""
    data, geometry = request.data, request.geometry
    slot_bytes = request.slot_bytes or some.table_slot_bytes
    scale = _MORE_OVERFLOW * geometry.num_rows / some.num_rows
    spare = data.new_empty(int(scale * some.spilled(slot_bytes)[1] + _LEAST_SHARE * geometry.num_bytes))
    slots = room(_layout.slots_size(geometry, slot_bytes))
    lengths = data.new_empty(geometry.num_rows, dtype=torch.uint16)
    bases, used = data.new_empty(geometry.num_rows, dtype=torch.int64), data.new_zeros(1, dtype=torch.int64)
    words = codebook.words(data.device)

    def place_of(first: int, last: int, num_bytes: int) -> Handle:
        index, sizes = (lengths[first:last], bases[first:last], words), (slot_bytes, 0, 1, num_bytes)
        own = slots[first * slot_bytes : last * slot_bytes]
        return Handle(Parts(own, spare, *index, codebook.codec, *sizes, None, used))

    bar = "compress" if request.options.progress else None
    for first, last, block in _rows.blocks(data, geometry.row_bytes, data.device, bar):
        torch.ops.ibp.encode_slots.default(place_of(first, last, block.numel()).table, block)
    survey = _layout.survey(lengths, geometry)
    is_whole = survey.spilled(slot_bytes)[1] <= spare.numel()
    return Coding(codebook, lengths, survey, place_of(0, geometry.num_rows, data.numel()) if is_whole else None)


def encode(
    request: Request,
    coding: Coding,
    near: Near | None,
    slot_bytes: int,
    slots: torch.Tensor,
    overflow: torch.Tensor,
    pageable: bool,
) -> torch.Tensor:
    """Encodes rows, on the device of the coding, into slots and overflow of the sizes that the survey says. Returns the
    table's bases, which are empty if no row has a part in the overflow.

    Args:
        near: as in `coded`.
        slots, overflow: both on the device of the coding, or both in host memory.
        pageable: whether host memory is pageable.

    Raises:
        RuntimeError: a row no longer has the length that was measured, because the tensor was changed.
    """
    geometry, lengths, codebook, worker = request.geometry, coding.lengths, coding.codebook, coding.lengths.device
    data, lies_near, num_bytes = request.data if near is None else near(), slots.device == worker, overflow.numel()
    bases = torch.empty(0, dtype=torch.int64, device=worker)
    if num_bytes:
        bases = _layout.index_rows(lengths, geometry, slot_bytes)
    is_cut = num_bytes > 0 and not (lies_near and worker.type == "cuda")  # The overflow is given block by block.
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
            place = Handle(Parts(rows, parts, *index, words, codec, *sizes))
            torch.ops.ibp.encode_rows.default(place.table, block, fault)
            if outlet is not None:
                outlet.put(targets, (rows, parts))
    CHANGED.raise_for(fault)
    return bases
