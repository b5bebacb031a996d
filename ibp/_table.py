"""CompressedTensor: a tensor as a table of coded rows, and what can be asked of it."""

from __future__ import annotations

import torch

from . import _core, _layout, _memory
from ._schemes import SCHEMES, coding_of, total_stored
from ._rows import Geometry, to_device

_INDEX_OUT_OF_RANGE, _CORRUPT_ROW = 2, 3  # ibp_status


class CorruptTableError(ValueError):
    """A table's bytes contradict each other: it was damaged or made up."""


class CompressedTensor:
    """A tensor [N, ...] kept as rows that decode alone. Made by `ibp.compress`, `ibp.compress_` and by unpickling.

    Attributes:
        shape, dtype: of the original tensor.
        device: where the coded rows are.
        scheme: "ibp", "planes", or "raw" where compression would have saved nothing.
        codebook: the `ibp.Codebook` or `ibp.PlanesCodebook`; None for scheme "raw".
        row_bytes, num_rows: the unit of coding: an item x[i] of up to 64 KiB, else a piece of the flat tensor.
        slot_bytes: bytes of a row's slot; 0 in the packed layout (FORMAT.md section 3).
        slots, overflow, lengths, bases: the table's tensors (FORMAT.md sections 2 and 3); not to be changed.

    Pickling and `torch.save` keep everything but pinning: call `pin_memory` after loading.
    """

    def __init__(self, *, shape, dtype, scheme, row_bytes, slot_bytes, slots, overflow, lengths, bases, codebook):
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.scheme = scheme
        self.row_bytes = row_bytes
        self.slot_bytes = slot_bytes
        self.slots, self.overflow, self.lengths, self.bases = (_contiguous(tensor) for tensor in (slots, overflow, lengths, bases))
        self.codebook = codebook
        self._check_fields()
        self._geometry = Geometry(self.shape, dtype, row_bytes)
        self._item_shape = tuple(self.shape[1:])
        self._check_state()
        self._places: dict[torch.device, tuple] = {}
        self._faults: dict[torch.device, dict[bool, tuple]] = {}  # where faults are noted: see _fault_on
        self._pinned_range = self._owner = None
        self._refresh()

    # ---- what it is ----

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @property
    def layout(self) -> str:
        """"slots" or "packed" (FORMAT.md section 3)."""
        return "slots" if self.slot_bytes else "packed"

    @property
    def num_rows(self) -> int:
        return self._geometry.num_rows

    @property
    def original_bytes(self) -> int:
        """Bytes of the original tensor."""
        return self._geometry.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Exact bytes of the coded rows and the codebook."""
        if self._stored_bytes is None:
            coded = total_stored(self.lengths.cpu(), self._geometry) if self.lengths.numel() else self.original_bytes
            self._stored_bytes = coded + (self.codebook.nbytes if self.codebook else 0)
        return self._stored_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the row index (lengths and bases): at most 2.25 a row."""
        return _nbytes(self.lengths) + _nbytes(self.bases)

    @property
    def savings(self) -> float:
        """1 - stored_bytes / original bytes; 0 for an empty tensor."""
        return 1 - self.stored_bytes / self.original_bytes if self.original_bytes else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that the table occupies where it lives: slots, overflow, index, codebook and its working form."""
        codebook = self.codebook.nbytes + _nbytes(self.codebook.words(torch.device("cpu"))) if self.codebook else 0
        return _nbytes(self.slots) + _nbytes(self.overflow) + self.index_bytes + codebook

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots and the overflow: the memory that fetches of rows at random places are spread over."""
        return self.slots.numel() + self.overflow.numel()

    @property
    def link_bytes(self) -> int:
        """Bytes that fetching every row once reads over the link, in whole 32-byte sectors."""
        if self._link_bytes is None:
            self._link_bytes = _layout.link_bytes(self.lengths.cpu(), self._geometry, self.slot_bytes)
        return self._link_bytes

    @property
    def is_pinned(self) -> bool:
        """Whether GPUs can fetch rows from the table's host memory themselves."""
        return self._is_pinned

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        where = str(self.device) if self.device.type == "cuda" else "pinned" if self.is_pinned else "pageable"
        slots = f", slot_bytes={self.slot_bytes}" if self.slot_bytes else ""
        return (f"ibp.CompressedTensor(shape={list(self.shape)}, dtype={self.dtype}, scheme={self.scheme!r}, layout={self.layout!r}{slots}, "
                f"bytes={self.original_bytes:,} -> {self.stored_bytes:,}, savings={self.savings:.1%}, {where})")

    # ---- where it is ----

    def pin_memory(self) -> CompressedTensor:
        """Moves the rows to pinned host memory of exactly their size, so that GPUs fetch them by themselves. Returns self.

        A table made by `compress_` is pinned where it is. No-op if already pinned or on a GPU.

        Raises:
            RuntimeError: there is no CUDA device, or the system refuses to pin that much memory.
        """
        if self._is_pinned or self.device.type != "cpu":
            return self
        if self._owner is not None:
            data = self.slots
            self._pinned_range = _core.PinnedRange(data, data.data_ptr(), data.numel()) if data.numel() else None
        else:
            self.slots, self.overflow = _memory.to_pinned(self.slots), _memory.to_pinned(self.overflow)
        self._refresh()
        return self

    def to(self, device: torch.device | str | int) -> CompressedTensor:
        """The table on another device: itself if it is there, else a copy of its coded bytes (not pinned)."""
        device = _memory.canonical(device)
        if device == self.device:
            return self
        moved = {name: to_device(getattr(self, name), device) for name in ("slots", "overflow", "lengths", "bases")}
        return CompressedTensor(shape=self.shape, dtype=self.dtype, scheme=self.scheme, row_bytes=self.row_bytes, slot_bytes=self.slot_bytes,
                                codebook=self.codebook, **moved)

    # ---- what can be asked of it ----

    def index_select(self, ids, *, device=None, out=None, check=False, max_sms=None, path=None) -> torch.Tensor:
        """See `ibp.index_select`."""
        from ._fetch.gather import index_select

        return index_select(self, ids, device=device, out=out, check=check, max_sms=max_sms, path=path)

    def decompress(self, *, device=None, out=None, check=False, max_sms=None, path=None) -> torch.Tensor:
        """See `ibp.decompress`."""
        from ._fetch.streaming import decompress

        return decompress(self, device=device, out=out, check=check, max_sms=max_sms, path=path)

    def __getitem__(self, key) -> torch.Tensor:
        """x[key] for an int, a slice, or an index tensor or list (bool masks too); on the table's device, or on the index tensor's."""
        from ._fetch.gather import check_ids_dtype, check_range, index_select
        from ._fetch.streaming import decode_items

        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step <= 0:
                raise ValueError(f"the slice has step {step}; wanted a step greater than zero")
            if step == 1:
                return decode_items(self, start, max(start, stop), None, None, check=self.device.type == "cuda", max_sms=None)
            return index_select(self, torch.arange(start, stop, step), device=self.device)
        if isinstance(key, (bool, tuple, type(None), type(Ellipsis), str, float)):
            raise TypeError(f"index is a {type(key).__name__}; wanted an int, a slice, an index tensor or a list of ints")
        ids = torch.as_tensor(key)
        if ids.dtype == torch.bool:
            if ids.shape != self.shape[:1]:
                raise IndexError(f"the mask has shape {list(ids.shape)}; wanted [{len(self)}]")
            ids = ids.nonzero().reshape(-1)
        if ids.dtype not in (torch.int32, torch.int64):
            ids = check_ids_dtype(ids.to(torch.int64) if ids.dtype in (torch.int8, torch.int16, torch.uint8) or ids.numel() == 0 else ids)
        device = ids.device if isinstance(key, torch.Tensor) and key.dim() else self.device
        flat = ids.reshape(-1)
        if not flat.is_cuda:
            check_range(flat, len(self), least=-len(self))
        flat = torch.where(flat < 0, flat + len(self), flat)
        return index_select(self, flat, device=device).reshape((*ids.shape, *self.shape[1:]))

    def check(self) -> None:
        """Waits for this table's work on all GPUs and raises what went wrong there, or in compiled code: IndexError or CorruptTableError."""
        for device in list(self._faults):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._raise_pending(device)

    # ---- pickling ----

    def __getstate__(self):
        return {"format_version": _core.FORMAT_VERSION, "shape": tuple(self.shape), "dtype": self.dtype, "scheme": self.scheme,
                "row_bytes": self.row_bytes, "slot_bytes": self.slot_bytes, "slots": self.slots, "overflow": self.overflow,
                "lengths": self.lengths.view(torch.int16),  # plain pickle cannot load uint16 tensors
                "bases": self.bases, "codebook": self.codebook}

    def __setstate__(self, state):
        state = dict(state)
        version = state.pop("format_version", None)
        if version != _core.FORMAT_VERSION:
            raise ValueError(f"the table has format version {version}; this ibp reads version {_core.FORMAT_VERSION}")
        missing = {"shape", "dtype", "scheme", "row_bytes", "slot_bytes", "slots", "overflow", "lengths", "bases", "codebook"} ^ state.keys()
        if missing:
            raise ValueError(f"the table's state lacks or has too many of: {sorted(missing)}")
        if isinstance(state["lengths"], torch.Tensor) and state["lengths"].dtype == torch.int16:
            state["lengths"] = state["lengths"].view(torch.uint16)
        self.__init__(**state)

    # ---- inside ----

    def _refresh(self):
        """Forgets what was derived from the tensors."""
        self._stored_bytes = self._link_bytes = None
        self._places.clear()
        held = [tensor for tensor in (self.slots, self.overflow) if tensor.numel()]
        self._is_pinned = self.device.type == "cpu" and torch.cuda.is_available() and all(tensor.is_pinned() for tensor in held)

    def _check_fields(self):
        if self.scheme not in SCHEMES:
            raise ValueError(f"the table has scheme {self.scheme!r}; this ibp knows {sorted(SCHEMES)}")
        if not isinstance(self.dtype, torch.dtype) or min(self.shape, default=0) < 0:
            raise ValueError(f"the table has dtype {self.dtype!r} and shape {list(self.shape)}; wanted a torch.dtype and sizes of at least 0")
        if type(self.row_bytes) is not int or type(self.slot_bytes) is not int:
            raise TypeError(f"the table has row_bytes {self.row_bytes!r} and slot_bytes {self.slot_bytes!r}; wanted ints")

    def _check_state(self):
        """Raises ValueError unless sizes, dtypes and devices fit each other; what the bytes say is checked when they are decoded."""
        geometry, want = self._geometry, []
        if not 1 <= self.row_bytes <= _core.MAX_ROW_BYTES:
            raise ValueError(f"the table has rows of {self.row_bytes} bytes; wanted 1 to {_core.MAX_ROW_BYTES}")
        if self.slot_bytes != 0:
            _layout.check_slot_bytes(self.slot_bytes, self.row_bytes)
        num_bases = -(-geometry.num_rows // 32)
        want.append(("slots", self.slots, torch.uint8, {_layout.slots_size(geometry, self.slot_bytes)}))
        want.append(("overflow", self.overflow, torch.uint8, None))
        want.append(("lengths", self.lengths, torch.uint16, {0} if self.scheme == "raw" else {geometry.num_rows}))
        want.append(("bases", self.bases, torch.int64, {0, num_bases}))
        for name, tensor, dtype, sizes in want:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.dim() != 1 or (sizes and tensor.numel() not in sizes):
                got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                size = f"[{' or '.join(str(s) for s in sorted(sizes))}]" if sizes else "[any size]"
                raise ValueError(f"the table's {name} is {got}; wanted {dtype} {size}: it is truncated or was not made by ibp")
            if tensor.device != self.slots.device:
                raise ValueError(f"the table's {name} is on {tensor.device}, its slots on {self.slots.device}; wanted one device")
        of_scheme = getattr(self.codebook, "scheme", "raw") == self.scheme
        if not of_scheme or (self.codebook is not None and self.codebook.row_bytes != self.row_bytes):
            raise ValueError(f"the table's codebook is {self.codebook!r}; wanted one of scheme {self.scheme!r} for rows of {self.row_bytes} bytes")

    def _arguments(self, device):
        """What every table operation starts with (see _ops). Made once a device: the index and the codebook are copied to a GPU, pinned rows are mapped."""
        if device in self._places:
            return self._places[device]
        _refuse_capture(device)
        slots, overflow = self.slots, self.overflow
        if device != self.device:
            slots, overflow = _memory.device_view(slots, device), _memory.device_view(overflow, device)
        codec, words = self._coding(device)
        place = (slots, overflow, self.lengths.to(device), self.bases.to(device), words, codec, self.slot_bytes, 0,
                 self._geometry.num_items, self._geometry.item_bytes)
        self._places[device] = place
        self._fault_on(device)  # compiled code and graphs find it made
        return place

    def _coding(self, device):
        """(codec, codebook) of the operations: how the rows are coded, for a device."""
        return coding_of(self.codebook, self.row_bytes, device)

    def _fault_on(self, device, of_selections=False):
        """Where a device's work notes faults that nobody waits for: mapped host memory, readable at any time. of_selections: for those that read
        selections of the table's items (see host_gather), which do not know the items' ids."""
        if of_selections not in self._faults.get(device, ()):
            _refuse_capture(device)
            host = _memory.empty(32, torch.device("cpu"), pin=device.type == "cuda").view(torch.int64).zero_()
            near = _memory.device_view(host, device) if device.type == "cuda" else host
            self._faults.setdefault(device, {})[of_selections] = host.numpy(), near
        return self._faults[device][of_selections][1]

    def _raise_pending(self, device):
        for of_selections, (record, _) in self._faults.get(device, {}).items():
            if not record[0]:
                continue
            status, position, value, taken = record.tolist()
            record[:] = 0
            self._raise_fault((status, position, None if of_selections else value, taken),
                              f" (noted by an earlier call on {device}; its row was filled with zeros)")

    def _raise_fault(self, fault, when=""):
        status, position, value, _ = fault
        if status == _INDEX_OUT_OF_RANGE:
            raise IndexError(f"ids[{position}] is {value}; wanted 0 to {self._geometry.num_items - 1}{when}")
        if status == _CORRUPT_ROW:
            which = f"item or row {value} at position {position}" if value is not None else f"the item of ids[{position}]"
            raise CorruptTableError(f"{_core.status_string(status)}: {which}{when}")


def _refuse_capture(device):
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first use of a table on {device} copies its index there, which a CUDA graph cannot capture: "
                           "call index_select or decompress once before capturing")


def _contiguous(value):
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _nbytes(tensor):
    return tensor.numel() * tensor.element_size()


torch.serialization.add_safe_globals([CompressedTensor])
