"""Makes tables from the rows of a tensor.

A `Request` has the tensor and the options. `compressed` works in three steps. First, `coded` finds a codebook and
measures the coded length of every row. Second, the memory of the table is allocated. Third, `encode` writes the rows.
`placed` makes tables whose overflow is in the memory of another device, and `compressed_in_place` makes tables in the
tensor's own memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from .. import _core
from .._common.process import warn_once
from .._fetch.streaming import decompress
from .._machine import memory, staging
from .._rows import geometry as _geometry
from .._rows.codebook import AnyCodebook, measure, surveyed
from .._rows.geometry import Survey
from .._rows.handle import FaultWords, Handle, Parts, new_record
from .._rows.learning import Options, Request, checked, learn
from .._rows.table import AnyTable, Table, pin_if_possible, spills

# If the caller names no device, the CPU encodes tensors in host memory of at most this size in bytes, because copying
# them to a GPU would take longer.
_FEW_BYTES = 1 << 20
# Rows can be encoded in the pass that measures them. The slot size is then chosen from the survey of a sample. If no
# survey was made when the codebook was learned, a sample of _SURVEYED_BYTES bytes is surveyed, but only if the tensor
# has at least _LEAST_TIMES times this size.
_SURVEYED_BYTES, _LEAST_TIMES = 1 << 20, 32
# If rows are encoded while they are measured, memory for the overflow is allocated before its size is known. Its size
# is _MORE_OVERFLOW times the size that the sample predicts, plus the fraction _LEAST_SHARE of the tensor's bytes. The
# additional memory is needed because a prediction from so small a sample is inexact.
_MORE_OVERFLOW, _LEAST_SHARE = 1.25, 1 / 512
# A codebook may leave out bits that are equal in all sampled rows; rows in which these bits differ are stored raw. If
# the savings on all rows are lower than expected by at least this fraction of the original bytes, a codebook that can
# code all rows is learned, too.
MOST_LACKING = 0.01
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
        place: the slots and the overflow, if the rows have already been encoded. The order of the rows' parts in the
            overflow is arbitrary. None: the rows have only been measured.
    """

    codebook: AnyCodebook
    lengths: torch.Tensor
    survey: Survey
    place: Handle | None = None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the coded rows and the codebook."""
        return self.survey.stored + self.codebook.nbytes


def warn_of_gradient(x: torch.Tensor) -> None:
    """If x requires grad, warns (once per process) that a table has no gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        warn_once(
            "x requires grad, and a table of it has no gradient: give x.detach() if its values alone are meant. Rows "
            "of ibp.nn.Embedding and EmbeddingBag train, with trainable=True",
            stacklevel=3,
        )


def compressed(kind: type[AnyTable], request: Request) -> AnyTable:
    """Compresses the rows of a request. Returns a table in new memory.

    Args:
        kind: the class of the table.

    Raises:
        TypeError, ValueError, RuntimeError: as in `ibp.compress`.
    """
    data, geometry, options = request.data, request.geometry, request.options
    worker, slot_bytes = request.device, request.slot_bytes
    home, pins = memory.home_of(data.device, options.memory, worker)
    node = memory.CALLERS_NODE if options.numa is None else memory.node_of(options.numa)
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
            else:  # No rows are encoded yet, or the survey of all rows chooses another slot size than the sample did.
                place, coding = None, coding._replace(place=None)  # frees the first slots and overflow
                (slots, overflow), is_pinned = memory.empty_parts(sizes, data.device, pin, node)
                bases = encode(request, coding, slot_bytes, slots, overflow, not is_pinned)
            table = kind.of_parts(geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)
    if pin is None and not is_pinned:
        table._is_refused = True
    if is_there:
        return table
    # The table is a CompressedTensor here: `code_anew`, which makes a Table, never requests another device.
    moved = table.to(home)  # type: ignore[attr-defined]
    return moved.pin_memory(numa=options.numa) if pins else moved


def code_anew(table: Table, options: Options, level: str | None) -> Table:
    """Decompresses a table and compresses the tensor again, for `CompressedTensor.refit`. Returns the new table.

    Args:
        options: the arguments of `refit`.
        level: the level at which a codebook is learned. None: the level of the table's codebook; or "default" if the
            table has no codebook, or if the options give a codebook, clusters, or a scheme other than "auto" and
            "planes".
    """
    if level is None:
        is_free = options.scheme in ("auto", "planes") and options.codebook is options.clusters is None
        level = table.codebook.level if is_free and table.codebook is not None else "default"
    scheme = "planes" if options.scheme == "auto" and spills(table) else options.scheme
    options = replace(options, scheme=scheme, level=level, layout=table.layout, row_bytes=table.row_bytes)
    x = decompress(table, check=table.device.type == "cuda")
    if spills(table):
        options = replace(checked(options), clusters=None, device=table.device)
        return placed(Table, Request.of(x, options), lambda _: table.slot_bytes, table.overflow.device)
    home = None if x.is_cuda else "pinned" if table.is_pinned() else "host"
    return compressed(Table, Request.of(x, replace(options, memory=home)))


def placed(kind: type[AnyTable], request: Request, slots_for: Callable[[Coding], int], home: torch.device) -> AnyTable:
    """Compresses the rows of a request. Returns a table whose slots are on the device that encodes the rows. The rows
    stay raw if a slot has the size of a row and encoding would not make the table smaller.

    Args:
        kind: the class of the table.
        slots_for: a function that takes the `Coding` and returns the size of a slot in bytes. It is called if the
            request does not give the size.
        home: the device of the overflow, as `memory.overflow_home` returns it for the device that encodes the rows.
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
            nothing = torch.empty(0, dtype=torch.uint8, device=home)
            slots = data.to(device, copy=True)
            return kind.of_parts(geometry, "raw", geometry.row_bytes, slots, overflow=nothing)
        slots = memory.empty(geometry.slots_size(slot_bytes), device, False)
        overflow = memory.empty_overflow(coding.survey.overflow_bytes(slot_bytes), home, device)
        bases = encode(request, coding, slot_bytes, slots, memory.seen_from(device, overflow), is_near)
    book = coding.codebook
    return kind.of_parts(geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)


# ---- rows, a codebook for them, and their lengths ----


def coded(request: Request, room: Callable[[int], torch.Tensor] | None = None) -> Coding | None:
    """Measures all rows with the given codebook, or with a codebook that it learns. Returns None if there are no rows,
    or if raw rows are best.

    A learned codebook may leave out bits that are equal in all sampled rows; rows in which these bits differ are stored
    raw. If these rows lower the savings too much (see MOST_LACKING), a second codebook is learned that can code all
    rows, and the better of the two codebooks is used.

    Args:
        room: a function that takes a size in bytes and allocates memory of this size for slots. The rows may then be
            encoded in the pass that measures them (see `_measured`). None: rows are only measured.
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
    """Measures all rows as `coded` does, for a table whose slots may be smaller than its rows. If `coded` returns None
    because raw rows are best, this function measures the rows with a codebook of scheme "planes". The tensor must not
    be empty."""
    found = coded(request)
    if found is None:
        codebook = learn("planes", request)
        assert codebook is not None, "scheme 'planes' always has a codebook"
        found = _measured(request, codebook, None)
    return found


def _measured(request: Request, codebook: AnyCodebook, room: Callable[[int], torch.Tensor] | None) -> Coding:
    """Measures all rows with a codebook and returns the results. The same pass also encodes the rows (see
    `_encoded_ahead`) if all of these conditions hold: `room` is given; the table has slots; the rows are on the device
    that encodes; and a sample has been surveyed, or the tensor is large enough to survey a sample."""
    data, device = request.data, request.device
    known = None if codebook is request.options.codebook else request.known(codebook)
    is_free = request.options.device is None and not data.is_cuda  # The caller has not named a device.
    coder = data.device if is_free and data.numel() <= _FEW_BYTES else device
    if known is not None and request.host_rows.numel() == data.numel():  # All rows have already been measured.
        return Coding(codebook, known[0].to(coder), known[1])
    if room is not None and request.slot_bytes != 0 and coder == data.device:
        some = None if known is None else known[1]
        if some is None and data.numel() >= _LEAST_TIMES * _SURVEYED_BYTES:
            sample = _geometry.sample(data, codebook.row_bytes, _SURVEYED_BYTES // codebook.row_bytes)
            some = surveyed(sample, codebook)
        if some is not None:
            return _encoded_ahead(request, codebook, some, room)
    near = data if request.near is None else request.near()
    lengths = measure(near, codebook, coder, request.options.progress)
    return Coding(codebook, lengths, request.geometry.survey(lengths))


# ---- encoding ----


def _encoded_ahead(
    request: Request, codebook: AnyCodebook, some: Survey, room: Callable[[int], torch.Tensor]
) -> Coding:
    """Encodes the rows into slots in the pass that measures them, and returns the results. If the overflow turns out to
    be too small, the results have no `place`, and the caller must encode the rows again.

    Args:
        some: the survey of a sample of the rows, from which the sizes of slots and overflow are chosen.
        room: a function that takes a size in bytes and allocates memory of this size for slots.
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
    for first, last, block in _geometry.blocks(data, geometry.row_bytes, data.device, bar):
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
    """Encodes the rows into slots and overflow, on the device of coding.lengths. Returns the table's bases, which are
    empty if no row has a part in the overflow.

    Args:
        slots, overflow: uint8, with the sizes that follow from the survey. Both are on the device that encodes, or both
            are in host memory.
        pageable: whether slots and overflow are in pageable host memory.

    Raises:
        RuntimeError: a row no longer has the length that was measured, because the tensor was changed.
    """
    geometry, lengths, codebook, worker = request.geometry, coding.lengths, coding.codebook, coding.lengths.device
    data = request.data if request.near is None else request.near()
    lies_near, num_bytes = slots.device == worker, overflow.numel()
    bases = torch.empty(0, dtype=torch.int64, device=worker)
    if num_bytes:
        bases = geometry.index_rows(lengths, slot_bytes)
    # is_cut: whether the operation gets, for each block of rows, only this block's range of the overflow. A GPU that
    # writes to its own memory gets the whole overflow, so that the host need not read the bases.
    is_cut = num_bytes > 0 and not (lies_near and worker.type == "cuda")
    starts, fault = bases.cpu() if is_cut else bases, new_record(worker)
    words, codec = codebook.words(worker), codebook.codec
    bar = "compress" if request.options.progress else None
    with nullcontext() if lies_near else staging.outlet(worker, slots.device, pageable=pageable) as outlet:
        for first, last, block in _geometry.blocks(data, geometry.row_bytes, worker, bar, whole=lies_near):
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
    """Compresses x in its own memory, for `ibp.compress(x, inplace=True)`. Returns the table.

    All analysis is done before the first write. Then the rows are rewritten block by block. One operation writes the
    bytes of a block together with the lengths of its rows, so the table decompresses to x at any time. If the call is
    interrupted after the first write, the exception has the table as its attribute `table`."""
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
        kept.append(table)  # After the first row is rewritten, x can be read only through the table.
        if coding is not None:
            _encode_in_place(table, data, coding, options.progress)
        if pin:
            table.pin_memory()
        elif pin is None:
            pin_if_possible(table)
        return table

    try:
        return _core.call_keeping_table(kept, work)
    except BaseException as interruption:  # Python may handle a signal as call_keeping_table returns.
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
    """Encodes the rows of a table in place. All rows must still be raw. A single torch operation changes the bytes of a
    block of rows together with the lengths of these rows. The table can be decoded before and after each such
    operation, so an interrupt does no harm."""
    codebook, lengths, worker = coding.codebook, coding.lengths, coding.lengths.device
    row_bytes, words, entries = table.row_bytes, codebook.words(worker), table.lengths.view(torch.uint8)
    no_bases = torch.empty(0, dtype=torch.int64, device=worker)
    no_overflow = torch.empty(0, dtype=torch.uint8, device=worker)
    blocks = _geometry.blocks(data, row_bytes, worker, "compress" if progress else None, whole=False)
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
