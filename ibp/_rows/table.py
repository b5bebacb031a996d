"""Keeps the state of tables, and the calls by which other folders use and change them.

A `Table` holds the table's tensors, the values that are derived from them, a `Handle` for each device that uses it, and
the faults that operations on it have noted. The functions after it are for the other folders of the library:
`handle_on` returns the handle for a device, and `make_room` and `encode_rows` change rows. The last part of the file
checks the fields of tables, which may come from a file, a pickle or a caller.

`_fetch/` fetches the rows of a `Table`. The class `CompressedTensor` in `_tables/compressed_tensor.py` adds the methods
that users call, such as `index_select` and `decompress`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from .. import _core
from .._common.manners import Saves, TensorManners
from .._common.modes import outside_of_modes
from .._common.sequences import rounded_up
from .._machine import calibration, memory
from .._machine.segments import PART_DTYPES, FileRows, Segment
from .codebook import AnyCodebook, coding_of
from .forms import Room, room_of
from .geometry import DTYPES, Geometry, check_slot_bytes
from .handle import WORDS_OF_TABLES, Faults, GatherPlan, Handle, Parts, new_record, plan_of, refuse_capture
from .learning import SCHEMES

AnyTable = TypeVar("AnyTable", bound="Table")
_CPU = torch.device("cpu")
_MAX_TENSOR_BYTES = 2**63 - 1  # torch counts bytes in int64

TENSORS = tuple(PART_DTYPES)
_FIELDS = ("shape", "dtype", "scheme", "row_bytes", "slot_bytes", "slots", "overflow", "lengths", "bases", "codebook")
# The fields of a table whose rows lie in new memory that nothing else uses.
_OWN_MEMORY: dict[str, Any] = {"_segment": None, "_owner": None, "_pinned_range": None, "_is_aliased": False}


class Table(TensorManners, Saves):
    """A table of coded rows. The constructor checks its arguments, which may come from a file, a pickle or a caller.
    `of_parts` does not check them: it takes tensors that the library itself has made. Once a table is made, only
    `update_`, `append` and `refit` change its rows."""

    shape: torch.Size
    dtype: torch.dtype
    scheme: str
    row_bytes: int
    slot_bytes: int
    slots: torch.Tensor
    overflow: torch.Tensor
    codebook: AnyCodebook | None
    geometry: Geometry
    _faults: Faults  # The faults that operations on the table have noted.
    _handles: dict[torch.device, Handle]  # The handles of the devices that use the table (see `handle_on`).
    _room: Room | None = None  # The memory of a table whose rows have been changed; None if they never were.
    # (state of the rows when `ibp.linear` listed their escapes, list of the escapes); see _fetch/linear.py.
    _escapes: tuple | None = None
    _escapes_of_graphs: tuple = ()  # Lists of escapes that captured CUDA graphs still read.
    # Number of times that rows were changed in place. Code that keeps copies of rows compares this number to detect
    # stale copies.
    version = 0
    _is_live: bool = False  # Rows may be encoded into the table's memory at any time (see `CodedRows.table`).
    _is_aliased: bool = False  # Another table may have the same memory.
    _is_refused: bool = False  # See `is_refused`.
    _stored_bytes: int | None
    _link_bytes: int | None
    _is_pinned: bool
    _owner: torch.Tensor | None  # The tensor whose memory holds the slots, if the table was made in place.
    _pinned_range: object
    # The memory that holds the rows, if it is shared with other processes or is a mapped file.
    _segment: Segment | FileRows | None

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scheme: str,
        row_bytes: int,
        slot_bytes: int,
        slots: torch.Tensor,
        overflow: torch.Tensor,
        lengths: torch.Tensor,
        bases: torch.Tensor,
        codebook: AnyCodebook | None,
    ) -> None:
        if "geometry" in vars(self):
            raise RuntimeError("the table is made already: its fields are checked once and cannot be set again")
        _check_kinds(shape, dtype, scheme, row_bytes, slot_bytes)
        geometry = Geometry(torch.Size(shape), dtype, row_bytes)
        tensors = _checked_tensors(geometry, scheme, slot_bytes, slots, overflow, lengths, bases)
        _check_codebook(codebook, scheme, row_bytes)
        vars(self).update(vars(Table.of_parts(geometry, scheme, slot_bytes, codebook=codebook, **tensors)))

    @classmethod
    def of_parts(
        cls: type[AnyTable],
        geometry: Geometry,
        scheme: str,
        slot_bytes: int,
        slots: torch.Tensor,
        codebook: AnyCodebook | None = None,
        lengths: torch.Tensor | None = None,
        overflow: torch.Tensor | None = None,
        bases: torch.Tensor | None = None,
    ) -> AnyTable:
        """Makes a table from tensors that the library itself has made. They are not checked; for tensors from files and
        pickles, call the constructor, which checks its arguments. None stands for an empty tensor. lengths and bases
        are moved to the device of the slots. If the slots are on a GPU and the overflow is in host memory, the overflow
        is pinned. If the overflow is on another GPU, `memory.empty_overflow` must have allocated it."""
        table, home = object.__new__(cls), slots.device
        if overflow is None:
            overflow = torch.empty(0, dtype=torch.uint8, device=home)
        elif overflow.device != home and not overflow.is_cuda:
            overflow = memory.to_pinned(overflow)
        vars(table).update(
            shape=geometry.shape,
            dtype=geometry.dtype,
            scheme=scheme,
            row_bytes=geometry.row_bytes,
            slot_bytes=slot_bytes,
            slots=slots,
            overflow=overflow,
            lengths=torch.empty(0, dtype=torch.uint16, device=home) if lengths is None else lengths.to(home),
            bases=torch.empty(0, dtype=torch.int64, device=home) if bases is None else bases.to(home),
            codebook=codebook,
            geometry=geometry,
            _faults=Faults(*WORDS_OF_TABLES),
            _handles={},
            **_OWN_MEMORY,
        )
        table._refresh()
        return table

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"{name} of an ibp.CompressedTensor cannot be set: a table's fields are checked once, when it is made"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} of an ibp.CompressedTensor cannot be deleted")

    # ---- properties, and pinning ----

    @property
    def lengths(self) -> torch.Tensor:
        """Lengths of the coded rows, uint16 [num_rows] (FORMAT.md section 2)."""
        return self._settled("lengths")

    @property
    def bases(self) -> torch.Tensor:
        """Offsets in the overflow at which parts of rows lie, int64 (FORMAT.md section 2)."""
        return self._settled("bases")

    def _settled(self, name: str) -> torch.Tensor:
        """Waits until GPUs have finished changing the table. Then returns the tensor with this name."""
        if self._room is not None:
            self._room.settle()
        return vars(self)[name]

    @property
    def device(self) -> torch.device:
        """The device that the slots are on."""
        return self.slots.device

    @property
    def spills_to_host(self) -> bool:
        """Whether the slots are on a GPU and the overflow is in pinned host memory. `ibp.spill.place` makes such
        tables."""
        return self.is_cuda and not self.overflow.is_cuda

    @property
    def overflow_memory(self) -> str:
        """The memory that holds the overflow: "device", if this is the memory of the table's GPU; "pinned" or "host",
        as in `ibp.compress`; or the name of another GPU, such as "cuda:1"."""
        if self.overflow.is_cuda:
            return str(self.overflow.device) if spills(self) else "device"
        return "pinned" if self.spills_to_host or self._is_pinned else "host"

    @property
    def layout(self) -> str:
        """The layout of the rows: "slots" or "packed" (FORMAT.md section 3)."""
        return "slots" if self.slot_bytes else "packed"

    @property
    def num_rows(self) -> int:
        """Number of rows. A row is the unit of coding; an item may consist of several rows."""
        return self.geometry.num_rows

    @property
    def original_bytes(self) -> int:
        """Size in bytes of the original tensor."""
        return self.geometry.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Exact size in bytes of the coded rows and the codebook, from which `savings` is computed. `nbytes` is the
        size of the memory that the table takes."""
        if self._stored_bytes is None:
            lengths, geometry = self.lengths, self.geometry
            coded = geometry.survey(lengths.cpu()).stored if lengths.numel() else geometry.num_bytes
            self._stored_bytes = coded + (self.codebook.nbytes if self.codebook else 0)
        return self._stored_bytes

    @property
    def index_bytes(self) -> int:
        """Size of the row index in bytes: at most 2 per row, plus 8 per group of 32 rows. In a table whose rows have
        been changed, it is at most 12 per row of capacity, plus 8."""
        return self._room.index_bytes if self._room is not None else self.lengths.nbytes + self.bases.nbytes

    @property
    def nbytes(self) -> int:
        """Size in bytes of all memory that the table occupies: slots, overflow, index, the codebook and its working
        form, and the list of escapes that `ibp.linear` has made. Copies of the index on other devices do not count."""
        beside = self.codebook.nbytes + self.codebook.words(_CPU).nbytes if self.codebook else 0
        if self._escapes is not None and self._escapes[1] is not None:
            beside += self._escapes[1].nbytes
        if self._room is not None:
            return self._room.nbytes + beside
        return self.slots.nbytes + self.overflow.nbytes + self.index_bytes + beside

    @property
    def device_bytes(self) -> int:
        """The part of `nbytes` that is in the memory of the table's GPU; 0 if the table is in host memory."""
        return self.nbytes - self.host_bytes - self.peer_bytes

    @property
    def peer_bytes(self) -> int:
        """Size in bytes of the overflow if it is in the memory of another GPU, where `ibp.spill.place` can put it;
        otherwise 0. `nbytes` includes these bytes."""
        return self.overflow.numel() if spills(self) and self.overflow.is_cuda else 0

    @property
    def host_bytes(self) -> int:
        """The part of `nbytes` that is in host memory: all of it for a table in host memory, the overflow for a table
        that spills to host memory, and otherwise 0."""
        if self.device.type == "cpu":
            return self.nbytes
        return self.overflow.numel() if self.spills_to_host else 0

    @property
    def link_bytes(self) -> int:
        """Number of bytes that a GPU reads over the link to fetch every row once. It reads whole sectors of 32
        bytes."""
        if self._link_bytes is None:
            bases = self.bases.cpu() if has_own_bases(self) else None
            self._link_bytes = self.geometry.link_bytes(self.lengths.cpu(), self.slot_bytes, bases)
        return self._link_bytes

    def is_pinned(self) -> bool:
        """Returns whether the rows are in pinned host memory, from which GPUs can fetch rows without the CPU."""
        return self._is_pinned

    def pin_memory(self, *, numa: memory.Numa = None) -> Table:
        """Moves the rows to pinned host memory, so that GPUs fetch them without the CPU. Returns the table itself.

        torch's `pin_memory` returns a pinned copy and keeps the unpinned tensor. Because tables are large, this method
        replaces the table's own memory instead. A table that was made by `compress(inplace=True)` is pinned at its
        present address. So is a table that is shared with other processes, but for this process only. Nothing happens
        if the table is already pinned or is on a GPU.

        Args:
            numa: the NUMA node whose memory is preferred, or a device, which stands for the node nearest to it. None:
                the node of the calling thread.

        Raises:
            RuntimeError: there is no CUDA device, or the system refuses to pin that much memory.
            TypeError, ValueError: numa is neither a node nor a device of this machine.
        """
        node = memory.node_of(numa)
        if self.device.type != "cpu":
            return self
        if self._segment is not None:
            self._pin_segment(node)
        elif self._is_pinned:
            return self
        elif self._owner is not None:
            self._pinned_range = memory.pin_in_place(self.slots)
        else:
            move(self, {name: memory.to_pinned(getattr(self, name), node) for name in ("slots", "overflow")})
        self._refresh()
        return self

    def _pin_segment(self, node: int = -1) -> None:
        """Pins shared memory, or the memory of a mapped file, at its present address. If the system refuses to pin a
        mapped file, copies the rows to new pinned memory and warns of the copy. Raises PinningError if the system
        refuses to pin shared memory, or the memory for the copy. node: the preferred NUMA node of the copy."""
        segment = self._segment
        assert segment is not None
        try:
            segment.pin_here()
        except memory.PinningError as error:
            if isinstance(segment, Segment):
                raise
            pinned = {name: memory.to_pinned(getattr(self, name), node) for name in ("slots", "overflow")}
            memory.warn_of_copy(error)
            move(self, pinned)

    def _set_fields(self, **fields: Any) -> None:
        """Replaces fields of the table, and drops all handles before that. If the call is interrupted, the next use of
        the table makes new handles."""
        self._handles.clear()
        vars(self).update(fields)
        self._refresh()

    # ---- changing ----

    def _set_room(self, room: Room, geometry: Geometry | None = None) -> Room:
        """Makes the table use the memory of a room and, if a geometry is given, this geometry. All fields change in one
        step: if the call is interrupted, the table is either unchanged or completely changed. Returns the room.

        Args:
            room: holds the rows of the table.
            geometry: the table's new geometry. None: the table keeps its own.
        """
        if room is self._room and geometry is None:
            return room
        geometry = geometry or self.geometry
        slots = room.slots[: geometry.slots_size(self.slot_bytes)]
        moved = slots.data_ptr() != self.slots.data_ptr()
        index = room.index.first(geometry.num_rows)
        self._set_fields(
            _room=room,
            _segment=None,
            geometry=geometry,
            _is_aliased=False,
            _owner=None if moved else self._owner,
            _pinned_range=None if moved else self._pinned_range,
            shape=geometry.shape,
            slots=slots,
            overflow=room.overflow,
            lengths=index.lengths,
            bases=index.bases,
        )
        return room

    def _become(self, other: Table) -> None:
        """Replaces all fields and the memory of this table with those of `other`, another table of the same tensor, in
        one step. No other code may hold the other table."""
        self._set_fields(
            **{name: vars(other)[name] for name in _FIELDS},
            geometry=other.geometry,
            _room=None,
            _escapes=None,
            _is_live=False,
            **_OWN_MEMORY,
        )

    # ---- pickling ----

    def __getstate__(self) -> dict[str, Any]:
        tensors = tensors_of(self)
        if spills(self) and not self.spills_to_host:  # Whoever reads the state may have no other GPU.
            tensors["overflow"] = tensors["overflow"].cpu()
        return {
            "format_version": _core.FORMAT_VERSION,
            "release": _core.version(),
            **{name: getattr(self, name) for name in _FIELDS},
            "shape": tuple(self.shape),
            **{name: _in_memory_of_its_own(tensor) for name, tensor in tensors.items()},
            "lengths": _in_memory_of_its_own(tensors["lengths"].view(torch.int16)),  # plain pickle cannot load uint16
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise ValueError(f"the table's state is a {type(state).__name__}; wanted a dict")
        state = dict(state)
        _check_version(state.pop("format_version", None), state.pop("release", None))
        missing = set(_FIELDS) ^ state.keys()
        if missing:
            raise ValueError(f"the table's state lacks or has too many of: {sorted(missing, key=str)}")
        lengths = state["lengths"]
        if isinstance(lengths, torch.Tensor) and lengths.dtype == torch.int16 and _flaw(lengths) is None:
            state["lengths"] = lengths.view(torch.uint16)
        Table.__init__(self, **state)

    # ---- handles for the operations ----

    def _refresh(self) -> None:
        """Drops all values that are derived from the tensors, and determines again whether the tensors are pinned."""
        self._handles.clear()
        self._faults.names["last"] = self.geometry.num_items - 1
        slots, overflow, is_pinned = self.slots, self.overflow, False
        if self._segment is not None:
            is_pinned = self._segment.pin and torch.cuda.is_available()
        # Before torch has initialised CUDA, no memory is pinned. Asking torch whether memory is pinned would initialise
        # CUDA, and then forked child processes could not use CUDA.
        elif not slots.is_cuda and torch.cuda.is_initialized():
            is_pinned = all(not part.numel() or part.is_pinned() for part in (slots, overflow))
        vars(self).update(_stored_bytes=None, _link_bytes=None, _is_pinned=is_pinned)

    def _parts(self, device: torch.device, geometry: Geometry) -> Parts:
        """Returns the table's memory as a device reads it. Handles are made from the result. If the table has a `Room`,
        the result includes `rooms` and `used`, so rows can also be encoded through such a handle.

        Args:
            geometry: the table's own geometry, or one with more items if the table's room has capacity for them.
        """
        codec, words = coding_of(self.codebook, self.row_bytes, device)
        sizes = (self.slot_bytes, 0, geometry.num_items, geometry.item_bytes)
        overflow = memory.seen_from(device, self.overflow)
        if self._room is None:
            lengths, bases = (vars(self)[name].to(device) for name in ("lengths", "bases"))
            return Parts(memory.seen_from(device, self.slots), overflow, lengths, bases, words, codec, *sizes)
        slots = memory.seen_from(device, self._room.slots[: geometry.slots_size(self.slot_bytes)])
        lengths, bases, rooms, used = self._room.index_on(device).first(geometry.num_rows)
        return Parts(slots, overflow, lengths, bases, words, codec, *sizes, rooms, used)

    def check(self) -> None:
        """Waits for all GPUs that have used this table. Raises the first fault that work on these GPUs, or compiled
        code, has noted, if any.

        Raises:
            IndexError: an id was out of range.
            CorruptTableError: the table's bytes are inconsistent.
        """
        for device in self._faults.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._faults.raise_pending(device)


# ---- what other folders ask of a table ----


def spills(table: Table) -> bool:
    """Returns whether the slots of a table are on a GPU and its overflow is in other memory: in pinned host memory, or
    on another GPU. `ibp.spill.place` makes such tables."""
    return table.slots.device != table.overflow.device


def is_live(table: Table) -> bool:
    """Returns whether rows may be encoded into the table's memory at any time (see `CodedRows.table`)."""
    return table._is_live


def is_refused(table: Table) -> bool:
    """Returns whether the library has tried to pin the table unasked, and the system has refused."""
    return table._is_refused


def faults_of(table: Table) -> Faults:
    """Returns the faults that operations on the table have noted. `Handle.faults` is the same object."""
    return table._faults


def has_own_bases(table: Table) -> bool:
    """Returns whether every row has its own base, as in tables whose rows have been changed (FORMAT.md section 2)."""
    return 1 < table.num_rows == vars(table)["bases"].numel()


def tensors_of(table: Table) -> dict[str, torch.Tensor]:
    """Returns the tensors of a table by name. The overflow is cut after the bytes that have been allocated to rows."""
    tensors = {name: getattr(table, name) for name in TENSORS}
    if table._room is not None:
        tensors["overflow"] = table.overflow[: int(table._room.index.used)]
    if spills(table):  # Another device is about to copy overflow that the GPU may still be writing.
        torch.cuda.current_stream(table.device).synchronize()
    return tensors


def move(table: Table, tensors: dict[str, torch.Tensor], segment: Segment | FileRows | None = None) -> None:
    """Replaces tensors of a table by copies of the same bytes in other memory. segment: the memory that holds the
    copies, if this memory is shared or is a mapped file."""
    table._set_fields(**tensors, _segment=segment, _room=None)


def lie_in_file(table: Table, rows: FileRows | None) -> None:
    """Records that the table's memory is a mapped file, which must not be written to. The first change of rows then
    copies all rows to memory that belongs to the table alone. rows: the part of the file that can be pinned. None: the
    file cannot be pinned."""
    table._is_aliased = True
    move(table, {}, rows)


def lie_with(table: Table, made: Table) -> None:
    """Records that a new table uses the memory of another one. The new table then also keeps the owner and the pinning
    of this memory, and the first change of either table copies its rows to memory that belongs to that table alone."""
    made._owner, made._pinned_range = table._owner, table._pinned_range
    move(made, {}, table._segment)
    made._is_aliased = table._is_aliased = True
    made._is_live, made._is_refused = table._is_live, table._is_refused


def pin_if_possible(table: Table) -> None:
    """Pins a table if the system allows it. If the system refuses, warns, and records the refusal in the table."""
    try:
        table.pin_memory()
    except memory.PinningError as error:
        memory.warn_of_pageable(error)
        table._is_refused = True


def serves(table: Table, device: torch.device) -> bool:
    """Returns whether a GPU can fetch the rows directly from host memory. Shared memory that is not yet pinned in this
    process is first pinned, if the system allows it."""
    segment = table._segment
    if not table._is_pinned or segment is None or torch.compiler.is_compiling() or segment.is_pinned:
        return table._is_pinned
    try:
        with torch.cuda.device(device):
            table._pin_segment()
    except memory.PinningError as error:
        memory.warn_of_pageable(error)
        segment.pin, table._is_refused = False, True
        table._refresh()
    return table._is_pinned


def worker_of(table: Table, target: torch.device) -> torch.device:
    """Returns the device that decodes by default: the target if it can read the table's memory, and otherwise the
    device of that memory. The exception is path "cpu" of `index_select`: the CPU gathers the rows, and the target
    decodes them even if it cannot read the table's memory."""
    if table._is_pinned and (target.type == "cpu" or serves(table, target)):
        return target
    return table.slots.device if table.slots.is_cuda else _CPU


def handle_on(table: Table, device: torch.device) -> Handle:
    """Returns the table's handle for the operations of a device. The first call for a device makes the handle. For a
    GPU, this copies the index and the codebook to the GPU, and maps pinned rows. After a calibration, the next call
    makes a new handle, because the plan in it depends on the calibrated rates."""
    handle = table._handles.get(device)
    if handle is not None:
        is_planned = handle.machine is None or torch.compiler.is_compiling()
        if is_planned or calibration.in_force(device) is handle.machine or memory.is_capturing(device):
            return handle
    refuse_capture(device)
    if device != table.device and table._segment is not None:
        with torch.cuda.device(device):
            table._pin_segment()
    with outside_of_modes():
        return keep_handle(table, device, table._parts(device, table.geometry))


def keep_handle(table: Table, device: torch.device, parts: Parts) -> Handle:
    """Makes the table's handle for a device, stores it in the table and returns it. parts: the table's memory as the
    device reads it."""
    # The fault record is allocated here, so that compiled code and captured graphs find it.
    fault, plan, machine = table._faults.on(device), GatherPlan(), None
    if device.type == "cuda":
        rates = calibration.in_force(device)
        plan = plan_of(table, rates, device)
        machine = None if device == table.device else rates
    handle = Handle(parts._replace(fault=fault, plan=plan[:3]))
    handle.like = torch.empty((0, *table.geometry.item_shape), dtype=table.dtype, device=device)
    handle.plan, handle.machine, handle.staged = plan, machine, {}
    handle.faults, handle.noted = table._faults, table._faults.words(device)
    table._handles[device] = handle
    return handle


def decoded_bytes(table: Table, start: int, end: int, worker: torch.device) -> torch.Tensor:
    """Decodes a byte range of the table's tensor on a device. Returns uint8 [end - start]."""
    out = torch.empty(end - start, dtype=torch.uint8, device=worker)
    fault = new_record(worker)
    torch.ops.ibp.decode_bytes.default(handle_on(table, worker).table, start, end, 0, out, fault)
    table._faults.raise_for(fault)
    return out


# ---- rows that change ----


def check_can_change(table: Table) -> None:
    """Raises RuntimeError if rows of the table must not change, because it is shared with other processes."""
    if isinstance(table._segment, Segment):
        raise RuntimeError("the table is shared with other processes, which would read its old index: clone() it first")


def _memory_of(table: Table) -> Callable[[int], torch.Tensor]:
    """Returns a function that allocates a given number of bytes in the kind of memory that holds the table's slots."""
    return lambda num_bytes: memory.empty(num_bytes, table.device, table._is_pinned)


def _overflow_memory_of(table: Table) -> Callable[[int], torch.Tensor]:
    """Returns a function that allocates a given number of bytes in the kind of memory that holds the table's
    overflow."""
    home = table.overflow.device
    if spills(table):
        return lambda num_bytes: memory.empty_overflow(num_bytes, home, table.device)
    return lambda num_bytes: memory.empty(num_bytes, home, table._is_pinned)


def copied_overflow(table: Table, overflow: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a table's overflow in the kind of memory that holds it."""
    return memory.copied_overflow(_overflow_memory_of(table)(overflow.numel()), overflow, table.device)


def make_room(table: Table, num_rows: int = 0) -> Room:
    """Prepares a table for changes of its rows. Returns its `Room`, which the first call makes. If another table uses
    the same memory, the memory is copied first. num_rows: the number of rows for which the room must have capacity."""
    if table._room is None or table._is_aliased:
        if table.scheme == "raw" and table.slot_bytes < table.row_bytes:  # From now on, slots hold whole rows.
            data = decoded_bytes(table, 0, table.original_bytes, table.device)
            slots = _memory_of(table)(data.numel()).copy_(data)
            none = torch.empty(0, dtype=torch.int64, device=table.device)
            table._set_fields(slots=slots, overflow=slots[:0], bases=none, slot_bytes=table.row_bytes, **_OWN_MEMORY)
        slots, overflow = table.slots, table.overflow
        if table._is_aliased:  # Another table has the same memory and must keep its rows.
            slots = _memory_of(table)(slots.numel()).copy_(slots)
            overflow = copied_overflow(table, overflow)
        table._set_room(room_of(table.geometry, table.slot_bytes, slots, overflow, table.lengths, table.bases))
    assert table._room is not None
    return table._set_room(table._room.with_rows(num_rows, table.slot_bytes, _memory_of(table)))


def _most_overflow(table: Table, data: torch.Tensor) -> int:
    """Returns the largest number of bytes of overflow that new rows can take. data: the bytes of the rows."""
    return -(-data.nbytes // table.row_bytes) * rounded_up(table.row_bytes - table.slot_bytes, _core.SECTOR_BYTES)


def make_overflow(table: Table, data: torch.Tensor) -> Room:
    """Enlarges the overflow of a table's room if it may be too small for new rows. Returns the room. data: the bytes of
    the rows."""
    assert table._room is not None
    return table._set_room(table._room.with_overflow(_most_overflow(table, data), _overflow_memory_of(table)))


def encode_rows(
    table: Table,
    data: torch.Tensor,
    worker: torch.device,
    *,
    row_ids: torch.Tensor | None = None,
    first_row: int = 0,
    geometry: Geometry | None = None,
) -> None:
    """Encodes rows into the room of a table, which `make_room` has made. If the overflow may be too small for the rows,
    it is enlarged first. The row numbers have been checked. Therefore the operation needs no fault record.

    Args:
        data: the new rows, contiguous, on the worker.
        worker: the device that encodes the rows.
        row_ids: the numbers of the rows that are replaced, all different. None: first_row and the numbers after it.
        geometry: the geometry of the table after rows are appended. None: rows are replaced, and `version` grows.
    """
    room = table._room
    assert room is not None
    if data.numel():
        room = make_overflow(table, data)
        handle = handle_on(table, worker) if geometry is None else Handle(table._parts(worker, geometry))
        index = room.begin_change(worker)
        # The rows change, so sizes that were derived from them, and handles of other devices, must be made anew. The
        # version grows before the rows change: a cache of the table that keeps old rows must not count as current.
        vars(table).update(_stored_bytes=None, _link_bytes=None, _escapes=None)
        if geometry is None:
            vars(table)["version"] = table.version + 1
        for device in [device for device in table._handles if device != worker]:
            del table._handles[device]
        room.most_used += _most_overflow(table, data)
        handle.encode(data, row_ids=row_ids, first_row=first_row)
        if worker.type == "cpu":
            room.most_used = int(index.used)
    if geometry is not None:
        table._set_room(room, geometry)


# ---- checks ----


def _check_version(version: Any, release: Any) -> None:
    """Raises ValueError if a pickled table has a format version that this release of ibp does not read."""
    if type(version) is int and version == _core.FORMAT_VERSION:
        return
    if version == 0:
        raise ValueError(
            "the table has format version 0, of a release before 0.2: decompress it with that release, and compress "
            "the tensor again"
        )
    if type(version) is not int or version < 0:
        raise ValueError(f"the table has format version {version}; this ibp reads version {_core.FORMAT_VERSION}")
    wrote = f"ibp {release[:40]}" if isinstance(release, str) else "a later ibp"
    raise ValueError(
        f"the table has format version {version}, and ibp {_core.version()} reads versions up to "
        f"{_core.FORMAT_VERSION}: {wrote} wrote it and reads it"
    )


def _check_kinds(shape: Any, dtype: Any, scheme: Any, row_bytes: Any, slot_bytes: Any) -> None:
    """Raises ValueError or TypeError if the fields do not describe a tensor that is cut into rows."""
    if scheme not in SCHEMES:
        raise ValueError(f"the table has scheme {scheme!r}; this ibp knows {sorted(SCHEMES)}")
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(
            f"the table has dtype {dtype!r}; wanted a torch.dtype with elements of 1, 2, 4 or 8 whole bytes, not "
            "quantized or packed"
        )
    if not isinstance(shape, (tuple, list)) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"the table has shape {shape!r}; wanted a tuple of ints of at least 0")
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > _MAX_TENSOR_BYTES:
        raise ValueError(f"the table has shape {list(shape)} of {dtype}: wanted at most 2^63 - 1 bytes")
    if type(row_bytes) is not int or type(slot_bytes) is not int:
        raise TypeError(f"the table has row_bytes {row_bytes!r} and slot_bytes {slot_bytes!r}; wanted ints")
    if not 1 <= row_bytes <= _core.MAX_ROW_BYTES:
        raise ValueError(f"the table has rows of {row_bytes} bytes; wanted 1 to {_core.MAX_ROW_BYTES}")
    if slot_bytes != 0:
        check_slot_bytes(slot_bytes, row_bytes)


def _checked_tensors(
    geometry: Geometry, scheme: str, slot_bytes: int, slots: Any, overflow: Any, lengths: Any, bases: Any
) -> dict[str, torch.Tensor]:
    """Checks the sizes, dtypes and devices of the table's tensors; raises ValueError if one is wrong. Returns the
    tensors by name. Each of these is a new tensor object over the same memory. No caller holds the new object, so no
    caller can resize it. The decoders, not this function, check the contents of the tensors."""
    num_bases = -(-geometry.num_rows // _core.ROWS_PER_BASE)
    raw_overflow = geometry.raw_overflow_bytes(slot_bytes)
    is_raw = scheme == "raw"
    wanted = (
        ("slots", slots, torch.uint8, {geometry.slots_size(slot_bytes)}),
        ("overflow", overflow, torch.uint8, {raw_overflow} if is_raw else None),
        ("lengths", lengths, torch.uint16, {0} if is_raw else {geometry.num_rows}),
        ("bases", bases, torch.int64, {num_bases} if is_raw and raw_overflow else {0, num_bases, geometry.num_rows}),
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor, dtype, sizes in wanted:
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype != dtype
            or tensor.dim() != 1
            or (sizes is not None and tensor.numel() not in sizes)
        ):
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            size = f"[{' or '.join(str(s) for s in sorted(sizes))}]" if sizes else "[any size]"
            raise ValueError(
                f"the table's {name} is {got}; wanted {dtype} {size}: it is truncated or was not made by ibp"
            )
        flaw = _flaw(tensor)
        if flaw is not None:
            raise ValueError(
                f"the table's {name} is {flaw}; wanted a contiguous tensor in memory of its own, on the CPU or a CUDA "
                "device"
            )
        tensors[name] = tensor.detach()
        home = tensors["slots"].device
        if tensor.device != home and not (
            name == "overflow" and (tensor.device == _CPU or memory.can_read(home, tensor.device))
        ):
            raise ValueError(f"the table's {name} is on {tensor.device}, its slots on {home}; wanted one device")
    return tensors


def _flaw(tensor: torch.Tensor) -> str | None:
    """Returns None if a tensor is plain contiguous memory on the CPU or a CUDA device. Otherwise returns a description
    of what is wrong, for messages."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"a {tensor.layout} tensor of {tensor.dtype}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"on {tensor.device}"
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        return "a negated, conjugated or zero view of other memory"
    if not tensor.is_contiguous():
        return f"not contiguous: its strides are {tensor.stride()}"
    return None


def _check_codebook(codebook: Any, scheme: str, row_bytes: int) -> None:
    is_codebook = isinstance(codebook, AnyCodebook) and codebook.is_finished
    fits = (
        is_codebook and (codebook.scheme, codebook.row_bytes) == (scheme, row_bytes)
        if scheme != "raw"
        else codebook is None
    )
    if not fits:
        got = repr(codebook) if is_codebook else f"a {type(codebook).__name__}"
        wanted = "none" if scheme == "raw" else f"one of scheme {scheme!r} for rows of {row_bytes} bytes"
        raise ValueError(f"the table's codebook is {got}; wanted {wanted}")


def _in_memory_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if it fills its storage, and otherwise a copy, because pickle would write the whole
    storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
