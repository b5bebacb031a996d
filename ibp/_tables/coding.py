"""How a tensor's rows are coded into the memory of a table: where the codebook comes from, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.progress import tqdm
from .._fetch.streaming import decompress
from .._layout import geometry as _rows
from .._layout import slots as _layout
from .._machine import memory, staging
from .._rows.faults import FaultWords, new_record
from .._rows.handle import Handle, Parts
from .._rows.table import Table
from .._schemes import AnyCodebook, Request, check_clusters, measure, surveyed
from .._schemes.choice import learn
from .._schemes.estimation import check_codebook, check_learning

_FEW_BYTES = 1 << 20  # of a tensor in host memory, that the CPU codes sooner than they are at a GPU
# So many bytes are surveyed before at least so many times the bytes are coded with a codebook that is given.
_SURVEYED_BYTES, _LEAST_TIMES = 1 << 20, 32
# Room for parts of all rows: in times of the sample's, and as a share of all bytes, since few sampled rows have a part.
_MORE_OVERFLOW, _LEAST_SHARE = 1.25, 1 / 512
MOST_LACKING = 0.01  # of the bytes, stored raw because rows lack what the sample has in common
_CPU = torch.device("cpu")
_WORDS = FaultWords(
    "x changed while it was being compressed: row {position} of a block no longer has the length measured", RuntimeError
)
AnyTable = TypeVar("AnyTable", bound=Table)


@dataclass(frozen=True)
class Coding:
    """How a tensor's rows are coded."""

    codebook: AnyCodebook  # what with
    lengths: torch.Tensor  # of all rows on the working device (FORMAT.md section 2)
    survey: _layout.Survey  # of the lengths
    place: Handle | None = None  # slots that hold the rows already, and their parts of overflow in any order; or None

    @property
    def stored_bytes(self) -> int:
        """Of the rows and the codebook."""
        return self.survey.stored + self.codebook.nbytes


@dataclass(frozen=True)
class Learning:
    """Where a codebook comes from: it is given, or learned as these options say."""

    scheme: str
    chunk_bytes: int | None = None
    tau: float | None = None
    sample: float | None = None
    clusters: int | str | None = None
    level: str = "default"
    codebook: AnyCodebook | None = None

    @classmethod
    def of(cls, scheme: str, **options: Any) -> Learning:
        """Of the arguments of the same names. Raises TypeError and ValueError for wrong ones."""
        given = cls(scheme, **options)
        clusters, level, codebook = given.clusters, given.level, given.codebook
        chunk_bytes, tau, sample = check_learning(scheme, given.chunk_bytes, given.tau, given.sample, level)
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

    def request(self, data: torch.Tensor, geometry: _rows.Geometry, worker: torch.device, **others: Any) -> Request:
        """What a codebook is learned for. others: further arguments of `Request`, or in place of these options."""
        own = {name: getattr(self, name) for name in ("sample", "chunk_bytes", "tau", "clusters", "level")}
        return Request(data, geometry, worker, **{**own, **others})

    def coding_of(self, request: Request, in_place: bool = False, is_free: bool = False) -> Coding | None:
        """How the bytes of a request of these options are coded; None where raw rows take no more bytes, or the caller
        wants them. is_free: whether the CPU may be the working device of few bytes that it has, as nobody has named
        another one."""
        data, num_bytes = request.data, request.geometry.num_bytes
        if not num_bytes:
            return None
        coder = data.device if is_free and not data.is_cuda and data.numel() <= _FEW_BYTES else request.device
        if self.codebook is not None:
            coding: Coding | None = _coding(request, self.codebook, coder)
        else:
            coding = self._learned(request, in_place, coder)
        return coding if coding is not None and coding.stored_bytes < num_bytes else None

    def coding_in_slots(self, request: Request) -> Coding:
        """How the bytes of a request of these options are coded where slots are smaller than rows: always with a
        codebook, since even a table whose rows are all raw has parts in overflow. The tensor is not empty."""
        codebook = self.codebook
        if codebook is None:
            request = replace(request, clusters=None)
            found = self._learned(request, False, request.device)
            if found is not None:
                return found
            codebook = learn("planes", request)
            assert codebook is not None, "scheme 'planes' always has a codebook"
        return _coding(request, codebook, request.device)

    def _learned(self, request: Request, in_place: bool, coder: torch.device) -> Coding | None:
        """As learned from sampled rows; where many others lack what those have in common, once more without it. coder:
        the working device of all rows."""
        codebook = learn(self.scheme, request, in_place)
        if codebook is None:
            return None
        coding = _coding(request, codebook, coder)
        savings, expected = 1 - coding.stored_bytes / request.geometry.num_bytes, codebook.expected_savings
        if not codebook.is_partial or expected is None or savings > expected - MOST_LACKING:
            return coding
        request = replace(request, codes_invariant=True)
        codebook = learn(self.scheme, request, in_place)
        if codebook is None:
            return coding
        again = _coding(request, codebook, coder)
        return min(coding, again, key=lambda tried: tried.stored_bytes)


def _coding(request: Request, codebook: AnyCodebook, coder: torch.device) -> Coding:
    known, geometry = request.known(codebook), request.geometry
    if known is not None and request.host_rows.numel() == request.data.numel():  # all rows have been measured
        return Coding(codebook, known[0].to(coder), known[1])
    if request.room_ahead is not None and request.slot_bytes != 0 and coder == request.data.device:
        some = known[1] if known is not None else _survey_of_some(request, codebook)
        if some is not None:
            return _coded_ahead(request, codebook, some)
    data = request.data if request.near is None else request.near()
    lengths = measure(data, codebook, coder, request.progress)
    return Coding(codebook, lengths, _layout.survey(lengths, geometry))


def _survey_of_some(request: Request, codebook: AnyCodebook) -> _layout.Survey | None:
    """What some rows take with a codebook that was not learned from them; None of few rows, which are measured soon."""
    data, row_bytes = request.data, request.geometry.row_bytes
    if data.numel() < _LEAST_TIMES * _SURVEYED_BYTES:
        return None
    return surveyed(_rows.sample(data, row_bytes, _SURVEYED_BYTES // row_bytes), codebook)


def _coded_ahead(request: Request, codebook: AnyCodebook, some: _layout.Survey) -> Coding:
    """Rows coded into slots where they are, in the pass that measures them. some: what some of the rows take."""
    data, geometry = request.data, request.geometry
    slot_bytes = request.slot_bytes or some.table_slot_bytes
    scale = _MORE_OVERFLOW * geometry.num_rows / some.num_rows
    spare = data.new_empty(int(scale * some.spilled(slot_bytes)[1] + _LEAST_SHARE * geometry.num_bytes))
    assert request.room_ahead is not None
    slots = request.room_ahead(_layout.slots_size(geometry, slot_bytes))
    lengths = data.new_empty(geometry.num_rows, dtype=torch.uint16)
    bases, used = data.new_empty(geometry.num_rows, dtype=torch.int64), data.new_zeros(1, dtype=torch.int64)
    words = codebook.words(data.device)

    def place_of(first: int, last: int, num_bytes: int) -> Handle:
        index, sizes = (lengths[first:last], bases[first:last], words), (slot_bytes, 0, 1, num_bytes)
        own = slots[first * slot_bytes : last * slot_bytes]
        return Handle(Parts(own, spare, *index, codebook.codec, *sizes, None, used))

    with tqdm(
        total=geometry.num_rows, desc="compress", unit="row", unit_scale=True, disable=not request.progress
    ) as bar:
        for first, last, block in _rows.blocks(data, geometry.row_bytes, data.device):
            torch.ops.ibp.encode_slots.default(place_of(first, last, block.numel()).table, block)
            bar.update(last - first)
    survey = _layout.survey(lengths, geometry)
    is_whole = survey.spilled(slot_bytes)[1] <= spare.numel()
    return Coding(codebook, lengths, survey, place_of(0, geometry.num_rows, data.numel()) if is_whole else None)


def geometry_of(x: torch.Tensor, row_bytes: int | None, codebook: AnyCodebook | None) -> _rows.Geometry:
    if codebook is None:
        return _rows.Geometry.of(x, row_bytes)
    check_codebook(codebook)
    if row_bytes is not None and row_bytes != codebook.row_bytes:
        raise ValueError(f"row_bytes is {row_bytes}, but the codebook is for rows of {codebook.row_bytes} bytes")
    return _rows.Geometry.of(x, codebook.row_bytes)


def table_of(
    kind: type[AnyTable],
    geometry: _rows.Geometry,
    scheme: str,
    slot_bytes: int,
    slots: torch.Tensor,
    codebook: AnyCodebook | None,
    lengths: torch.Tensor | None,
    overflow: torch.Tensor | None = None,
    bases: torch.Tensor | None = None,
) -> AnyTable:
    """A table of a kind, from its parts; None: an empty part. The index goes to where the slots are."""

    def on_home(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=slots.device) if tensor is None else tensor.to(slots.device)

    return kind(
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


def code(
    kind: type[AnyTable],
    x: torch.Tensor,
    learning: Learning,
    layout: str,
    slot_bytes: int | None,
    row_bytes: int | None,
    device: torch.device | str | int | None,
    pin: bool | None,
    node: int,
    progress: bool,
) -> AnyTable:
    """A table of a kind, in memory of its own. pin: None: where the system lets."""
    geometry = geometry_of(x, row_bytes, learning.codebook)
    slot_bytes = _layout.checked_slot_bytes(layout, slot_bytes, geometry.row_bytes)
    worker = _rows.working_device(x, device)
    data = _rows.bytes_of(x)

    def room(num_bytes: int) -> torch.Tensor:
        return memory.empty_parts([num_bytes], data.device, pin, node)[0][0]

    with staging.whole_ahead(data, worker) as near:
        options: dict[str, Any] = {"slot_bytes": slot_bytes, "progress": progress, "near": near, "room_ahead": room}
        coding = learning.coding_of(learning.request(data, geometry, worker, **options), is_free=device is None)
        if coding is None:
            (slots,), is_pinned = memory.empty_parts([geometry.num_bytes], data.device, pin, node)
            table = table_of(kind, geometry, "raw", geometry.row_bytes, slots.copy_(data), None, None)
        else:
            if slot_bytes is None:
                slot_bytes = coding.survey.table_slot_bytes
            sizes = sizes_of(coding, geometry, slot_bytes)
            if coding.place is not None and coding.place.parts.slot_bytes == slot_bytes:
                slots = coding.place.parts.slots
                pins = pin if slots.is_pinned() else False
                (overflow,), is_pinned = memory.empty_parts(sizes[1:], data.device, pins, node)
                bases = _move_parts(geometry, coding, coding.place, overflow)
            else:  # all rows may ask for another size than the sample's
                coding = replace(coding, place=None)
                (slots, overflow), is_pinned = memory.empty_parts(sizes, data.device, pin, node)
                bases = encode_to(near(), geometry, coding, slot_bytes, slots, overflow, not is_pinned, progress)
            book = coding.codebook
            table = table_of(kind, geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)
    table._is_refused = pin is None and not is_pinned
    return table


def code_anew(table: Table, slot_bytes: int | None, device: torch.device | str | int | None, **learning: Any) -> Table:
    """A table of the same tensor as `CompressedTensor.refit` asks for it. learning: options of `Learning`; level:
    None: the level of the table's codebook, where the other options let such a codebook be learned."""
    if learning["level"] is None:
        is_free = learning["scheme"] in ("auto", "planes") and learning["codebook"] is learning["clusters"] is None
        learning["level"] = table.codebook.level if is_free and table.codebook is not None else "default"
    x = decompress(table, check=table.device.type == "cuda")
    if not table.spills_to_host:
        pin = table.is_pinned() and not x.is_cuda
        return code(
            Table, x, Learning.of(**learning), table.layout, slot_bytes, table.row_bytes, device, pin, -1, False
        )
    return placed_anew(x, table, slot_bytes, **learning)


def placed_anew(x: torch.Tensor, table: Table, slot_bytes: int | None, scheme: str, **options: Any) -> Table:
    """The rows of x in slots on the device of a table and overflow in host memory. slot_bytes: None: the table's.
    options: of `Learning`."""
    learning = Learning.of("planes" if scheme == "auto" else scheme, **options)
    geometry = geometry_of(x, table.row_bytes, learning.codebook)
    slot_bytes = _layout.checked_slot_bytes(table.layout, slot_bytes, table.row_bytes)
    num_bytes = table.slot_bytes if slot_bytes is None else slot_bytes
    return placed(Table, x, geometry, learning, lambda coding: num_bytes, table.device, False)


def placed(
    kind: type[AnyTable],
    x: torch.Tensor,
    geometry: _rows.Geometry,
    learning: Learning,
    slots_for: Callable[[Coding], int],
    device: torch.device,
    progress: bool,
) -> AnyTable:
    """The table of a tensor. Where slots hold whole rows, and rows take no fewer bytes coded, they stay raw."""
    data = _rows.bytes_of(x)
    with staging.whole_ahead(data, device) as at_device:
        request = learning.request(data, geometry, device, progress=progress, near=at_device)
        coding = learning.coding_in_slots(request) if geometry.num_bytes else None
        slot_bytes = geometry.row_bytes if coding is None else slots_for(coding)
        if coding is None or (slot_bytes == geometry.row_bytes and coding.stored_bytes >= geometry.num_bytes):
            overflow = torch.empty(0, dtype=torch.uint8, device="cpu")
            return table_of(kind, geometry, "raw", geometry.row_bytes, data.to(device, copy=True), None, None, overflow)
        is_near = device.type == "cpu"
        slots_bytes, overflow_bytes = sizes_of(coding, geometry, slot_bytes)
        slots = memory.empty(slots_bytes, device, False)
        overflow = memory.empty(overflow_bytes, _CPU, not is_near)
        near = memory.seen_from(device, overflow)
        bases = encode_to(at_device(), geometry, coding, slot_bytes, slots, near, is_near, progress)
    book = coding.codebook
    return table_of(kind, geometry, book.scheme, slot_bytes, slots, book, coding.lengths, overflow, bases)


def sizes_of(coding: Coding, geometry: _rows.Geometry, slot_bytes: int) -> list[int]:
    """Bytes of the slots and of the overflow of a table."""
    overflow_bytes = coding.survey.overflow_bytes(slot_bytes) if slot_bytes < geometry.row_bytes else 0
    return [_layout.slots_size(geometry, slot_bytes), overflow_bytes]


def encode_to(
    data: torch.Tensor,
    geometry: _rows.Geometry,
    coding: Coding,
    slot_bytes: int,
    slots: torch.Tensor,
    overflow: torch.Tensor,
    pageable: bool,
    progress: bool,
) -> torch.Tensor:
    """Codes a tensor's bytes on the working device of the coding, into memory of the sizes that `sizes_of` says, both
    on that device or both in host memory, pageable or pinned. Returns the table's bases."""
    codebook, lengths, worker = coding.codebook, coding.lengths, coding.lengths.device
    bases = (
        _layout.index_rows(lengths, geometry, slot_bytes)
        if overflow.numel()
        else torch.empty(0, dtype=torch.int64, device=worker)
    )
    lies_near, faults = slots.device == worker, []
    is_cut = overflow.numel() > 0 and not (lies_near and worker.type == "cuda")  # by blocks
    ends = np.append(bases.cpu().numpy(), overflow.numel()) if is_cut else None
    with (
        staging.outlet(worker, slots.device, pageable=pageable) as outlet,
        tqdm(total=geometry.num_rows, desc="compress", unit="row", unit_scale=True, disable=not progress) as bar,
    ):
        for first, last, block in _rows.blocks(data, geometry.row_bytes, worker, whole=lies_near):
            base, end_base = first // _core.ROWS_PER_BASE, -(-last // _core.ROWS_PER_BASE)
            start, end = (0, overflow.numel()) if ends is None else (int(ends[base]), int(ends[end_base]))
            targets = slots[first * slot_bytes : last * slot_bytes], overflow[start:end]
            near = targets if lies_near else outlet.take([target.numel() for target in targets])
            part = bases[base:end_base] if overflow.numel() else bases
            faults.append(encode_block(block, codebook, lengths[first:last], part, slot_bytes, start, *near))
            if not lies_near:
                outlet.put(targets, near)
            bar.update(last - first)
    check_faults(faults)
    return bases


def _move_parts(geometry: _rows.Geometry, coding: Coding, place: Handle, overflow: torch.Tensor) -> torch.Tensor:
    """Puts the parts of overflow of a coding's place in the order of the rows. Returns the table's bases."""
    parts = place.parts
    if not overflow.numel():
        return parts.bases[:0]
    bases = _layout.index_rows(coding.lengths, geometry, parts.slot_bytes)
    torch.ops.ibp.move_parts.default(place.table, bases, overflow)
    return bases


def encode_block(
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
    fault = new_record(device)
    words, sizes = codebook.words(device), (slot_bytes, overflow_start, 1, block.numel())
    table = Handle(Parts(slots, overflow, lengths, bases, words, codebook.codec, *sizes)).table
    torch.ops.ibp.encode_rows.default(table, block, fault)
    return fault


def check_faults(faults: list[torch.Tensor]) -> None:
    for record in torch.stack(faults).tolist() if len(faults) > 1 else [faults[0].tolist()]:
        _WORDS.raise_for(record)
