"""One state of an optimizer for many elements, coded in memory: `CodedState`; and `Watch`, which reads its counters."""

from __future__ import annotations

import warnings
from typing import NamedTuple, cast

import torch

from .. import _core, _layout, _rows
from .._estimation import analyze
from .._memory import PinningError
from .._place import Place
from .._schemes import AnyCodebook, measure
from ._reserve import Reserve

ROW_BYTES = 2048
_SECTOR = _core.SECTOR_BYTES
_SPILLED_COST = 8  # bytes of slots that a byte in overflow is worth, which two kernels move over the link
_MOST_SPILLED = 0.02  # of the rows' bytes in overflow, where slots are chosen
_CROWDED = 0.025  # of the rows' bytes in overflow: a new codebook would pay
_MARGIN = 64  # bytes by which the slots of a later codebook may be smaller without new pinned memory
_WATCHED_STEPS = 16  # the first ones; of the others one in so many
_LEAST_SAVED = 0.03  # of the rows' bytes; where slots save less, rows are kept raw
_AS_GOOD = 1.005  # of the bytes by a codebook of states alike
_REFIT_RATIO, _CROWDED_RATIO = 4.0, 1.25  # of the steps so far, to those when the codebook was learned


class Usage(NamedTuple):
    """Memory of states.

    original_bytes: of the states as torch keeps them.
    device_bytes: of the slots and the index, on the parameters' devices.
    host_bytes: of the room in host memory: what is left for rows that outgrow their slots, and all of them with
        storage="host".
    """

    original_bytes: int
    device_bytes: int
    host_bytes: int

    @property
    def savings(self) -> float:
        """1 - device_bytes / original_bytes."""
        return 1 - self.device_bytes / self.original_bytes if self.original_bytes else 0.0

    def plus(self, other: Usage) -> Usage:
        return Usage(*(mine + others for mine, others in zip(self, other)))


class Coding(NamedTuple):
    """How states are coded.

    level: of codebooks, see `ibp.compress`.
    reserve: of pinned memory on a GPU; None on the CPU.
    pinned: slots are pinned host memory too.
    learned: codebooks that were learned in this step, and the mean bytes of a row by them: by what they are of.
    """

    level: str
    reserve: Reserve | None
    pinned: bool
    learned: dict[object, tuple[AnyCodebook, float]]


class CodedState:
    """A state of the elements of a chunk: zeros before the first `store`, then rows in a `Place`.

    The place is never too small: slots and overflow together hold every row raw, and every row is coded anew by each
    call, so that all of overflow is free before it. Overflow is pinned host memory.

    Args:
        num_rows: rows of ROW_BYTES bytes.
        device: where the state is used.
        coding: how it is coded.
        kind: the same for states that are alike, whose codebooks are tried first.
    """

    def __init__(self, num_rows: int, device: torch.device, coding: Coding, kind: object) -> None:
        self.num_rows, self.device, self.pinned = num_rows, device, coding.pinned
        self.place: Place | None = None
        self._coding, self._kind, self._reserve = coding, kind, coding.reserve
        self._host_memory: torch.Tensor | None = None
        if self._reserve is not None:
            self._reserve.expect(num_rows)
        self.raw: torch.Tensor | None = None  # bytes that are not coded, for they do not shrink
        self.is_crowded = False  # so many rows have outgrown their slots that a new codebook would pay
        self._stores = 0
        self.fitted_at = 0  # the number of the store that its codebook was learned in

    def load(self, out: torch.Tensor, near: torch.Tensor | None = None) -> None:
        """Writes the state to a contiguous tensor of num_rows rows, on the current stream. near: a copy of the slots,
        at least as long."""
        if self.place is not None:
            data, (_, *others) = out.view(torch.uint8), self.place._table_arguments
            slots = self._slots(self.place, near)
            torch.ops.ibp.decode_bytes.default(slots, *others, 0, data.numel(), 0, data, self.place._fault)
        elif self.raw is not None:
            out.view(torch.uint8).copy_(self.raw, non_blocking=True)
        else:
            out.zero_()

    def store(self, data: torch.Tensor, near: torch.Tensor | None = None) -> None:
        """Keeps the state that a contiguous tensor of num_rows rows holds. Waits for the device where a codebook is
        learned, which is ever more rarely. near: memory of num_rows rows that slots are written to, in place of their
        own."""
        self._stores += 1
        if self._is_due():
            self._fit(data)
        if self.place is not None:
            slots, (_, *others) = self._slots(self.place, near), self.place._arguments
            torch.ops.ibp.encode_into.default(slots, *others, data, None, None, 0, 0, self.place._fault)
        elif self.raw is not None:
            self.raw.copy_(data.view(torch.uint8), non_blocking=True)

    @staticmethod
    def _slots(place: Place, near: torch.Tensor | None) -> torch.Tensor:
        slots = cast(torch.Tensor, place._table_arguments[0])
        return slots if near is None else near[: slots.numel()]

    def check(self) -> None:
        """RuntimeError: bytes of the state are damaged. Waits for the device."""
        if self.place is not None:
            _check_counters(self.place._counters.tolist())

    def usage(self) -> Usage:
        """The memory that is held."""
        original = self.num_rows * ROW_BYTES
        if self.place is None:
            return Usage(original, 0 if self.raw is None else self.raw.numel(), 0)
        index = sum(part.nbytes for part in (self.place.lengths, self.place.bases, self.place.rooms))
        device_bytes = index + self.place.codebook.nbytes + (0 if self.pinned else self.place.slots.numel())
        host_memory = self.place.overflow if self._host_memory is None else self._host_memory
        return Usage(original, device_bytes, host_memory.numel())

    def _is_due(self) -> bool:
        ratio = _CROWDED_RATIO if self.is_crowded else _REFIT_RATIO
        return self._stores >= ratio * self.fitted_at

    def _fit(self, data: torch.Tensor) -> None:
        """Learns a codebook, and takes memory for rows coded by it. The state before may be in the old one, which is
        given back when there is new memory."""
        self.fitted_at, self.is_crowded = self._stores, False
        codebook, slot_bytes = self._fitting(data.view(self.num_rows, -1))
        saves = self.pinned or slot_bytes <= (1 - _LEAST_SAVED) * ROW_BYTES
        try:
            self.place = self._new_place(codebook, slot_bytes) if saves else None
        except PinningError as error:
            if self.place is not None:
                return
            warnings.warn(f"{error}: states of an optimizer stay raw on {self.device}", RuntimeWarning, stacklevel=2)
        if self.place is not None:
            self.raw = None
            return
        self._give_back()
        if self.raw is None:
            self.raw = torch.empty(self.num_rows * ROW_BYTES, dtype=torch.uint8, device=self.device)

    def _fitting(self, rows: torch.Tensor) -> tuple[AnyCodebook, int]:
        """A codebook for rows, and bytes of their slots. That of states alike is taken if it serves as well here."""
        known = self._coding.learned.get(self._kind)
        if known is not None:
            counts = _count_sizes(rows, known[0])
            if _mean_size(counts) <= _AS_GOOD * known[1]:
                return known[0], _slot_bytes(counts)
        codebook = analyze(rows, scheme="planes", sample=None, level=self._coding.level)
        assert codebook is not None, "scheme 'planes' always has a codebook"
        counts = _count_sizes(rows, codebook)
        self._coding.learned[self._kind] = codebook, _mean_size(counts)
        return codebook, _slot_bytes(counts)

    def _new_place(self, codebook: AnyCodebook, slot_bytes: int) -> Place:
        """An empty place, and host memory for it."""
        bytes_per_row, memory = ROW_BYTES - (0 if self.pinned else slot_bytes), self._host_memory
        if self._reserve is not None and memory is None:
            memory = self._reserve.take_first(self.num_rows, min(ROW_BYTES, bytes_per_row + _MARGIN))
        elif self._reserve is not None and memory is not None and memory.numel() < self.num_rows * bytes_per_row:
            memory = self._reserve.take(self.num_rows * bytes_per_row)
        place = Place(
            codebook,
            self.num_rows,
            slot_bytes=slot_bytes,
            overflow_bytes=self.num_rows * (ROW_BYTES - slot_bytes),
            device=self.device,
            pinned=self.pinned,
            spill="host",
            host_memory=memory,
        )
        if memory is not self._host_memory:
            self._give_back()
        self._host_memory = memory
        return place

    def _give_back(self) -> None:
        if self._reserve is not None and self._host_memory is not None:
            self._reserve.give(self._host_memory)
        self._host_memory = None


def free_overflow(states: list[CodedState]) -> None:
    """Makes all of overflow free: before every row of the states is coded anew."""
    places = [state.place for state in states if state.place is not None]
    if places:
        torch._foreach_zero_([place.rooms.view(torch.int16) for place in places])
        torch._foreach_zero_([place._used for place in places])


class Watch:
    """Looks at the counters of places on a device without waiting: what is counted in a step is known steps later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._watched: list[tuple[CodedState, int]] = []  # and when its codebook was learned: no place is kept alive
        self._found: torch.Tensor | None = None
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._steps = 0

    def look(self, states: list[CodedState]) -> None:
        """Judges what was counted before, if that is known by now, and asks for the counters as they are now.

        Raises:
            RuntimeError: a state is damaged.
        """
        self._steps += 1
        if self._steps > _WATCHED_STEPS and self._steps % _WATCHED_STEPS:
            return
        if self._found is not None and (self._event is None or self._event.query()):
            self._judge(self._found.tolist())
            self._found = None
        self._watched_now(states)

    def _watched_now(self, states: list[CodedState]) -> None:
        if self._found is not None:
            return
        places = [state.place for state in states if state.place is not None]
        self._watched = [(state, state.fitted_at) for state in states if state.place is not None]
        if not places:
            return
        counted = torch.stack([place._counters for place in places])
        if self._event is None:
            self._found = counted
            return
        self._found = torch.empty(counted.shape, dtype=counted.dtype, pin_memory=True)
        self._found.copy_(counted, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self.device))

    def _judge(self, found: list[list[int]]) -> None:
        for (state, fitted_at), counters in zip(self._watched, found):
            _check_counters(counters)
            if state.fitted_at == fitted_at:
                state.is_crowded = counters[0] > _CROWDED * state.num_rows * ROW_BYTES


def _check_counters(counters: list[int]) -> None:
    """RuntimeError: rows of a place are lost or damaged."""
    _, _, lost, fault, *_ = counters
    if lost or fault:
        raise RuntimeError("the coded states of an optimizer are damaged: load them from a checkpoint")


def _count_sizes(rows: torch.Tensor, codebook: AnyCodebook) -> torch.Tensor:
    """How many rows a codebook codes in 0, 1, ... ROW_BYTES bytes; on the CPU."""
    lengths = measure(_rows.bytes_of(rows), codebook, rows.device)
    sizes = _layout.stored_sizes(lengths, ROW_BYTES, ROW_BYTES)
    return torch.bincount(sizes.long(), minlength=ROW_BYTES + 1).cpu()


def _mean_size(counts: torch.Tensor) -> float:
    return float((counts * torch.arange(len(counts))).sum() / counts.sum())


def _slot_bytes(counts: torch.Tensor) -> int:
    """Bytes of the slots that cost the least together with what they leave to overflow. counts: of rows by size."""
    slots = torch.arange(0, ROW_BYTES + 1, _SECTOR)
    parts = (torch.arange(ROW_BYTES + 1) - slots[:, None]).clamp(min=0)
    spilled = ((parts + _SECTOR - 1) // _SECTOR * _SECTOR * counts).sum(1) / counts.sum()
    cost = torch.where(spilled <= _MOST_SPILLED * ROW_BYTES, slots + _SPILLED_COST * spilled, torch.inf)
    return int(slots[cost.argmin()])
