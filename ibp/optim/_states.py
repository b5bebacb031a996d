"""One state of an optimizer for many elements, coded in memory: `CodedState`; and `Watch`, which reads its counters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import _core
from .._common.statistics import Statistics, share_saved
from .._layout import slots as _layout
from .._machine.memory import PinningError
from .._machine.staging import Coming
from .._rows.handle import Handle
from .._schemes import AnyCodebook
from .._schemes.kinds import Learner
from .._tables.coded_rows import CodedRows
from ._families import Family, StateGroup
from ._learning import ROW_BYTES
from ._reserve import Reserve

_SECTOR = _core.SECTOR_BYTES
# A byte in overflow is worth 8 of slots, as two kernels move it over the link.
_RULE = _layout.SlotRule(overflow_cost=8, most_overflow=0.02 * ROW_BYTES)
_CROWDED_BYTES = 16 << 20  # in overflow, over all steps, that the link moves both ways while rows are coded anew
_MARGIN = 128  # bytes by which the slots of a later codebook may be smaller without new pinned memory
_LEAST_GAIN = 256  # bytes by which they must be smaller for new pinned memory to be taken
_LEARNED_SHARE = 16  # a step learns codebooks in place of a sixteenth of the earlier ones, but at least of one
_WATCHED_STEPS, _WATCHED_SHARE = 16, 4  # the first steps are all watched, and every fourth later one
_LEAST_SAVED = 0.03  # of the rows' bytes; where slots save less, rows are kept raw
_REFIT_RATIO, _CROWDED_RATIO = 4.0, 1.25  # of the steps so far, to those when the codebook was learned
_FIRST_REFIT_RATIO = 8.0  # likewise, where it was learned in the first step: half as often in the first 24 steps
_LEAST_MOVED = 64  # bytes by which slots must become smaller for all rows to be moved to others


@dataclass(frozen=True)
class Usage(Statistics):
    """Memory of states.

    original_bytes: of the states as torch keeps them.
    device_bytes: of the slots and the index, on the parameters' devices.
    host_bytes: of the room in host memory: what is left for rows that outgrow their slots, and all of them with
        memory="pinned".

    Example:
        >>> weights = torch.nn.Parameter(torch.randn(512, 512))
        >>> optimizer = ibp.optim.AdamW([weights], lr=1e-3)
        >>> weights.sigmoid().sum().backward()
        >>> optimizer.step()
        >>> optimizer.stats()["exp_avg"].savings > 0.1
        True
    """

    original_bytes: int
    device_bytes: int
    host_bytes: int

    @property
    def savings(self) -> float:
        """1 - device_bytes / original_bytes."""
        return share_saved(self.original_bytes, self.device_bytes)

    def plus(self, other: Usage) -> Usage:
        return Usage(*(mine + others for mine, others in zip(self, other)))


class StateCoding(NamedTuple):
    """How states are coded.

    level: of codebooks, see `ibp.compress`.
    reserve: of pinned memory on a GPU; None on the CPU.
    pinned: slots are pinned host memory too.
    families: whose codebooks were learned in the first step or since states were chosen to learn, by the number of the
        state's name and its dtype.
    """

    level: str
    reserve: Reserve | None
    pinned: bool
    families: dict[tuple[int, torch.dtype], list[Family]]


class CodedState:
    """A state of the elements of a chunk: zeros before the first `store`, then rows in a `CodedRows`.

    `fit` chooses a codebook and takes memory; all other calls only queue work, and cannot fail for lack of memory. The
    place is never too small: slots and overflow together hold every row raw, and every row is coded anew by each
    call, so that all of overflow is free before it. Overflow is pinned host memory.

    Args:
        num_rows: rows of ROW_BYTES bytes.
        num_bytes: of the elements in these rows.
        device: where the state is used.
        coding: how it is coded. Its reserve expects the rows.
        stores: how often the elements were kept before, in other states.
    """

    def __init__(
        self, num_rows: int, num_bytes: int, device: torch.device, coding: StateCoding, stores: int = 0
    ) -> None:
        self.num_rows, self.num_bytes, self.device, self.pinned = num_rows, num_bytes, device, coding.pinned
        self.place: CodedRows | None = None
        self.learner: Learner[AnyCodebook] = Learner()  # whose codebook is shared with others that are alike
        self._reserve = coding.reserve
        self._host_memory: torch.Tensor | None = None
        self._lent: torch.Tensor | None = None  # to parts of its rows
        self.raw: torch.Tensor | None = None  # bytes that are not coded, for they do not shrink
        self._expected_bytes = 0.0  # in overflow, by what the codebook was learned from
        self._crowded_bytes = 0.0  # in overflow beyond that, over all steps since then
        self.stores = stores  # how often it was kept
        self.version = 0  # another one where `load` or `write` have come to use other memory or another codebook
        self.may_refit = False  # before the next store

    def load(self, out: torch.Tensor, near: torch.Tensor | None = None) -> None:
        """Writes the bytes of the state to a tensor, uint8 [num_rows * ROW_BYTES], on the current stream. near: a copy
        of the slots, at least as long."""
        if self.is_new:
            out.zero_()
        elif self.place is not None:
            table = self._handle(self.place, near).table
            torch.ops.ibp.decode_bytes.default(table, 0, out.numel(), 0, out, self.place.fault)
        elif self.raw is not None:
            out.copy_(self.raw, non_blocking=True)

    def write(self, data: torch.Tensor, near: torch.Tensor | None = None) -> None:
        """Keeps the state that has these bytes, for which there was a `fit`; the caller counts it in `stores`. All of
        overflow is free. near: memory of num_rows rows that slots are written to, in place of their own."""
        if self.place is not None:
            self._handle(self.place, near).encode(data, self.place._counts, self.place.fault)
        else:
            assert self.raw is not None, "fit comes first"
            self.raw.copy_(data, non_blocking=True)

    @staticmethod
    def _handle(place: CodedRows, near: torch.Tensor | None) -> Handle:
        if near is None:
            return place.handle
        parts = place.handle.parts
        return Handle(parts._replace(slots=near[: parts.slots.numel()]))

    def check(self) -> None:
        """RuntimeError: bytes of the state are damaged. Waits for the device."""
        if self.place is not None:
            _check_counters(self.place.counters.tolist())

    def usage(self) -> Usage:
        """The memory that is held."""
        if self.place is None:
            return Usage(self.num_bytes, 0 if self.raw is None else self.raw.numel(), 0)
        index = sum(part.nbytes for part in (self.place.lengths, self.place.bases, self.place.rooms))
        device_bytes = index + self.place.codebook.nbytes + (0 if self.pinned else self.place.slots.numel())
        host_memory = self.place.overflow if self._host_memory is None else self._host_memory
        return Usage(self.num_bytes, device_bytes, host_memory.numel())

    @property
    def overdue(self) -> float:
        """The next store's number, to the one from which on a new codebook is wanted; 1 or more: it is wanted."""
        growth = _FIRST_REFIT_RATIO if self.learner.learned_at == 1 and self.place is not None else _REFIT_RATIO
        if self._crowded_bytes > _CROWDED_BYTES:
            growth = _CROWDED_RATIO
        return self.learner.overdue(self.stores + 1, growth)

    @property
    def is_new(self) -> bool:
        return self.stores == 0

    @property
    def wants_fit(self) -> bool:
        """Whether it has no codebook, or may take another one before the next store."""
        return self.learner.learned_at == 0 or self.may_refit

    def fit(self, data: torch.Tensor, group: StateGroup) -> None:
        """Takes a codebook, and memory for rows coded by it: that of the place before if its slots suit. Other memory
        is given back when there is new memory. Waits for the device.

        Args:
            data: [num_rows, elements], contiguous: the state itself; before the first store what it is about to be.
            group: that these rows are.

        Raises:
            torch.OutOfMemoryError, MemoryError: there is no memory; nothing has changed.
            PinningError: likewise, where another state keeps the rows coded; elsewhere they are kept raw then.
        """
        wanted, overflow = _layout.slots_for(group.survey, _RULE)
        if self.place is not None and self._serves(self.place, group, wanted):
            found = group.survey
            self._expected_bytes = found.overflow_bytes(self.place.slot_bytes) * self.num_rows / found.num_rows
            return
        slot_bytes = self._with_host_memory(wanted)
        self.version += 1
        if self.place is not None and self.place.slot_bytes == slot_bytes:
            self.place._take_codebook(group.codebook)
            free_overflow([self])
        elif not self._move(group.codebook, slot_bytes):
            return
        self.learner.found, self._expected_bytes = group.codebook, overflow * self.num_rows
        if not self.is_new:
            self.write(data.view(torch.uint8).view(-1))

    @staticmethod
    def _serves(place: CodedRows, group: StateGroup, wanted: int) -> bool:
        """Whether rows may stay as they are, by the bytes of slots that suit them best."""
        if group.codebook is not place.codebook or place.slot_bytes >= wanted + _LEAST_MOVED:
            return False
        return group.survey.overflow_bytes(place.slot_bytes) <= _RULE.most_overflow * group.survey.num_rows

    def settle(self) -> None:
        """Notes that there was a `fit`, or no memory for one."""
        self.learner.take(self.learner.found, use=self.stores + 1)
        self._crowded_bytes, self.may_refit = 0.0, False

    def release(self) -> None:
        """Gives back pinned memory, where other states keep the rows."""
        self.place = None
        self._give_back(self._host_memory)
        self._host_memory = None

    def lend(self, parts: list[CodedState]) -> None:
        """Before states of parts of its rows are fitted: gives them its pinned slots, as it takes long to pin memory.
        What it keeps there is lost."""
        if self.pinned and self._host_memory is not None:
            self._lent, self._host_memory = self._host_memory, None
            for part, memory in zip(parts, self._lent.split([part.num_rows * ROW_BYTES for part in parts])):
                part._host_memory = memory

    def take_back(self, parts: list[CodedState], data: torch.Tensor) -> None:
        """Undoes `lend` where a part had no memory. data: as of `fit`."""
        for part in parts:
            if self._lent is not None:
                part._host_memory = None
            part.release()
        if self._lent is not None:
            self._host_memory, self._lent = self._lent, None
            free_overflow([self])
            self.write(data.view(torch.uint8).view(-1))

    def note_overflow(self, num_bytes: int, steps: int) -> None:
        """Notes that num_bytes bytes of overflow are in use, in each of `steps` steps."""
        self._crowded_bytes += max(0.0, num_bytes - self._expected_bytes) * steps

    def _with_host_memory(self, slot_bytes: int) -> int:
        """Bytes of slots: larger ones than wanted where host memory has no room for what the wanted ones leave, and
        they gain too little for more of it to be pinned."""
        if self._host_memory is None or self.pinned:
            return slot_bytes
        room = self._host_memory.numel() // self.num_rows // _SECTOR * _SECTOR
        least = max(0, ROW_BYTES - room)
        return least if slot_bytes < least < slot_bytes + _LEAST_GAIN else slot_bytes

    def _move(self, codebook: AnyCodebook, slot_bytes: int) -> bool:
        """Takes memory for rows coded by a codebook, or for raw ones; False where that before has to do."""
        place, memory = None, self._host_memory
        if self.pinned or slot_bytes <= (1 - _LEAST_SAVED) * ROW_BYTES:
            try:
                memory = self._host_memory_for(slot_bytes)
                place = self._new_place(codebook, slot_bytes, memory)
            except PinningError as error:
                if self.place is not None:
                    return False
                if self.raw is None and not self.is_new:
                    raise
                message = f"{error}: states of an optimizer stay raw on {self.device}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        if place is None and self.raw is None:
            self.raw = torch.empty(self.num_rows * ROW_BYTES, dtype=torch.uint8, device=self.device)
        if place is None or memory is not self._host_memory:
            self._give_back(self._host_memory)
        self.place, self._host_memory = place, None if place is None else memory
        if place is not None:
            self.raw = None
        return True

    def _host_memory_for(self, slot_bytes: int) -> torch.Tensor | None:
        """Pinned memory for a place: what there is, where it suffices."""
        bytes_per_row, memory = ROW_BYTES - (0 if self.pinned else slot_bytes), self._host_memory
        if self._reserve is not None and memory is None:
            return self._reserve.take_first(self.num_rows, min(ROW_BYTES, bytes_per_row + _MARGIN))
        if self._reserve is not None and memory is not None and memory.numel() < self.num_rows * bytes_per_row:
            return self._reserve.take(self.num_rows * bytes_per_row)
        return memory

    def _new_place(self, codebook: AnyCodebook, slot_bytes: int, memory: torch.Tensor | None) -> CodedRows:
        """An empty place. memory: for what it has in host memory, given back where there is none for the rest."""
        try:
            return CodedRows(
                codebook,
                self.num_rows,
                slot_bytes=slot_bytes,
                overflow_bytes=self.num_rows * (ROW_BYTES - slot_bytes),
                device=self.device,
                memory="pinned" if self.pinned else "device",
                overflow_memory="pinned",
                host_buffer=memory,
            )
        except BaseException:
            if memory is not self._host_memory:
                self._give_back(memory)
            raise

    def _give_back(self, memory: torch.Tensor | None) -> None:
        if self._reserve is not None and memory is not None:
            self._reserve.give(memory)


def free_overflow(states: list[CodedState]) -> None:
    """Makes all of overflow free: before every row of the states is coded anew."""
    places = [state.place for state in states if state.place is not None]
    if places:
        torch._foreach_zero_([place.rooms.view(torch.int16) for place in places])
        torch._foreach_zero_([place.used for place in places])


def choose_learners(states: list[CodedState]) -> None:
    """Lets states learn codebooks in the next step: only the few that want a new codebook the most, so that no step
    takes many times as long as another."""
    families: dict[int, list[CodedState]] = {}
    for state in states:
        if not state.may_refit:
            families.setdefault(id(state.learner.found), []).append(state)
    overdue = {key: max(state.overdue for state in alike) for key, alike in families.items()}
    most = max(1, len(families) // _LEARNED_SHARE)
    for key in sorted((key for key in families if overdue[key] >= 1), key=lambda key: -overdue[key])[:most]:
        for state in families[key]:
            state.may_refit = state.overdue >= 1


def growths(betas: tuple[float, float], stores: int) -> tuple[float, float]:
    """How many times larger exp_avg and exp_avg_sq become from one codebook to the next by being averages over more
    steps, if gradients are independent and as large as before."""
    first, last = max(1, stores), _REFIT_RATIO * max(1, stores)
    squares = [_grown(betas[0] ** 2, first, last), _grown(betas[1], first, last)]
    return squares[0] ** 0.5, squares[1]


def _grown(beta: float, first: float, last: float) -> float:
    return (1 - beta**last) / (1 - beta**first) if 0 < beta < 1 else 1.0


class Watch:
    """Looks at the counters of places on a device without waiting: what is counted in a step is known steps later."""

    def __init__(self) -> None:
        self._watched: list[tuple[CodedState, int]] = []  # and when its codebook was learned: no place is kept alive
        self._found: Coming | None = None
        self._steps = self._asked_at = self._judged_at = 0

    def look(self) -> None:
        """Judges what was counted after an earlier step, if that is known by now.

        Raises:
            RuntimeError: a state is damaged.
        """
        if self._found is not None and self._found.is_here:
            self._judge(self._found.wait().tolist(), self._asked_at - self._judged_at)
            self._found, self._judged_at = None, self._asked_at

    def ask(self, states: list[CodedState]) -> None:
        """Asks for the counters as they are before a step, unless others are yet to be judged. Where there is no memory
        for them, a later step asks."""
        self._steps += 1
        if self._found is not None or (self._steps > _WATCHED_STEPS and self._steps % _WATCHED_SHARE):
            return
        watched = [(state, state.learner.learned_at) for state in states if state.place is not None]
        counters = [state.place.counters for state in states if state.place is not None]
        try:
            self._found = Coming(torch.stack(counters)) if counters else None
        except torch.OutOfMemoryError:
            return
        self._watched, self._asked_at = watched, self._steps

    def _judge(self, found: list[list[int]], steps: int) -> None:
        for (state, learned_at), counters in zip(self._watched, found):
            _check_counters(counters)
            if state.learner.learned_at == learned_at:
                state.note_overflow(counters[0], steps)


def _check_counters(counters: list[int]) -> None:
    """RuntimeError: rows of a place are lost or damaged."""
    _, _, lost, fault, *_ = counters
    if lost or fault:
        raise RuntimeError("the coded states of an optimizer are damaged: load them from a checkpoint")
