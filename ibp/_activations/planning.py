"""Which activations leave under a budget: decided by a timeline of one step, measured while all of
them are coded and stay, or, where there is no memory for that, leave.

The step is predicted for a plan as it would run: the device computes, codes and decodes in turn, each way of the link
copies in turn, and both windows are bounded. Candidates go by what freeing a byte costs, with the link's time weighted
by a price; the best plan over a few prices is taken. What a prediction leaves out, such as the host's time and copies
that slow computing down, is the drag: a share of the coders' and the link's time, found by a comparison of steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from .coding import PIECE_BYTES

KEEP, DEVICE, RAW, CODED = "keep", "device", "raw", "coded"  # as it is, coded on the device; on the host
HOLD = "hold"  # coded on the device, all of its memory: for a step that is measured
_PRICES = (0.0, 0.5, 3.0)  # of the link's time, in the device's
_ROUNDING = 1e-9  # of sums, as a share
_MOST_PARTS = 32  # of a step, that are tried one by one
LEAST_MOVING = 2  # pieces that may be on their way, each way, however large: one is copied and one is next
_MARGIN = 0.5  # of a slowdown: what is predicted, for a step that varies
Mark: TypeAlias = torch.cuda.Event | float


class Link(NamedTuple):
    """GB/s (bytes a nanosecond) from the device and to it, and the bytes that may be on their way."""

    out_gbps: float
    back_gbps: float
    window_bytes: int


@dataclass
class Item:
    """A region of a step. Times in ms.

    Attributes:
        num_bytes, coded_bytes: before coding and after; coded_bytes is None where it is not coded.
        saved_after, used_after: of computing since the region before it was saved, or used.
        encode, decode: of the coders.
    """

    num_bytes: int
    coded_bytes: int | None
    saved_after: float = 0.0
    used_after: float = 0.0
    encode: float = 0.0
    decode: float = 0.0

    def freed(self, mode: str) -> int:
        if mode == DEVICE:
            return self.num_bytes - (self.coded_bytes or 0)
        return 0 if mode == KEEP else self.num_bytes

    def coder(self, mode: str) -> float:
        return self.encode + self.decode if mode in (DEVICE, CODED) else 0.0

    def sent(self, mode: str) -> int:
        return {RAW: self.num_bytes, CODED: self.coded_bytes or 0}.get(mode, 0)

    def busy(self, mode: str, link: Link) -> tuple[float, float]:
        """ms of the coder and the link, on the way out and back."""
        sent, is_coded = 1e-6 * self.sent(mode), mode in (DEVICE, CODED)
        return sent / link.out_gbps + self.encode * is_coded, sent / link.back_gbps + self.decode * is_coded


class Predicted(NamedTuple):
    """ms of a step, and the most bytes of saved tensors that are on the device in it."""

    ms: float
    peak_bytes: int


@dataclass
class Timeline:
    """Items in the order of saving, and the order of use. drag: see above."""

    items: list[Item]
    uses: list[int]
    drag: float = 0.0

    @property
    def computing(self) -> float:
        return sum(item.saved_after + item.used_after for item in self.items)

    def step(self, modes: Sequence[str], link: Link) -> float:
        """Predicted ms of the step."""
        return self.predict(modes, link).ms

    def predict(self, modes: Sequence[str], link: Link) -> Predicted:
        run = _Run(self, modes, link)
        run.forward()
        run.backward()
        return Predicted(run.now, run.peak)

    def busy(self, modes: Sequence[str], link: Link) -> float:
        """ms of the coders and the link."""
        return sum(sum(item.busy(mode, link)) for item, mode in zip(self.items, modes))


class _Run:
    """A step as it is predicted.

    Attributes:
        now: ms since its start.
        held, peak: bytes on the device, and the most there were.
    """

    def __init__(self, timeline: Timeline, modes: Sequence[str], link: Link) -> None:
        self.timeline, self.modes, self.link = timeline, modes, link
        self.now, self.held, self.peak = 0.0, 0, 0
        self._leaving: deque[tuple[int, float]] = deque()  # items, and when they will have left

    def forward(self) -> None:
        free = 0.0  # when the link has sent all
        for k, (item, mode) in enumerate(zip(self.timeline.items, self.modes)):
            self._advance(item.saved_after + self.timeline.drag * item.busy(mode, self.link)[0])
            self._hold(item.num_bytes)
            start = self.now
            if mode in (DEVICE, CODED):
                self._advance(item.encode)
            if mode == DEVICE:
                self.held -= item.freed(mode)
            if mode == RAW:
                self._wait(free, self.link.window_bytes - item.num_bytes, item, mode)
            if sent := item.sent(mode):
                free = max(self.now, max(free, start) + self._ms(sent, self.link.out_gbps))
                self._leaving.append((k, free))
            if mode == CODED:
                self._wait(free, self.link.window_bytes, item, mode)

    def _wait(self, free: float, room: int, item: Item, mode: str) -> None:
        """Waits until so many bytes of the device's memory are on their way. free: when none are."""
        room = max(room, LEAST_MOVING * min(PIECE_BYTES, item.num_bytes))
        sent = int(room * item.sent(mode) / max(1, item.num_bytes))
        self._advance(max(0.0, free - self._ms(sent, self.link.out_gbps) - self.now))

    def backward(self) -> None:
        items, modes, back = self.timeline.items, self.modes, self.link.back_gbps
        stay = {k for k, _ in self._leaving}
        away = [k for k in self.timeline.uses if items[k].sent(modes[k]) and k not in stay]
        total = sum(items[k].sent(modes[k]) for k in away)
        behind = set(away)
        free, fetched, used = 0.0, 0, 0  # when the link has brought all that was asked for; bytes: those, and decoded
        for k in self.timeline.uses:
            item, mode = items[k], modes[k]
            self.now += item.used_after + self.timeline.drag * item.busy(mode, self.link)[1]
            if k in behind:
                used += item.sent(mode)
                if fetched < used:
                    free, fetched = max(free, self.now) + self._ms(used - fetched, back), used
                self.now = max(self.now, free - self._ms(fetched - used, back))
            own = 0 if mode == KEEP or (mode == RAW and k in stay) else item.num_bytes  # beside what is held
            coming = fetched - used
            self.peak = max(self.peak, self.held + coming + own)
            if k not in behind:
                self.held -= item.coded_bytes or 0 if mode == DEVICE else item.num_bytes
            self.now += item.decode if mode in (DEVICE, CODED) else 0.0
            if fetched < (most := min(total, used + self.link.window_bytes)):
                free, fetched = max(free, self.now) + self._ms(most - fetched, back), most

    def _advance(self, ms: float) -> None:
        """Lets time pass, in which copies come to their end."""
        self.now += ms
        while self._leaving and self._leaving[0][1] <= self.now:
            self.held -= self.timeline.items[self._leaving.popleft()[0]].num_bytes

    def _hold(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.peak = max(self.peak, self.held)

    @staticmethod
    def _ms(num_bytes: int, gbps: float) -> float:
        return 1e-6 * num_bytes / gbps


def plan(
    timeline: Timeline, link: Link | None, *, device_bytes: int | None = None, slowdown: float | None = None
) -> list[str]:
    """A mode for each item.

    Args:
        link: None: there is no host to send to.
        device_bytes: that may stay on the device, at the least predicted time.
        slowdown: share of the time of computing that the step may take longer, for the lowest peak: what frees
            nothing when most is on the device stays.
    """
    found = []
    for price in _PRICES if link is not None else (0.0,):
        search = _Search(timeline, link, price)
        if device_bytes is not None:
            found += search.within_bytes(device_bytes)
        if slowdown is not None:
            found.append(search.within_time(timeline.computing * (1 + _MARGIN * slowdown + _ROUNDING)))
    reckoned = link or NO_LINK
    if slowdown is not None:
        return min(found, key=lambda modes: timeline.predict(modes, reckoned)[::-1])
    total = sum(item.num_bytes for item in timeline.items)
    fitting = [modes for modes in found if total - _freed(timeline, modes) <= (device_bytes or 0)]
    return min(fitting or found, key=lambda modes: timeline.step(modes, reckoned))


NO_LINK = Link(1.0, 1.0, 0)


def _freed(timeline: Timeline, modes: Sequence[str]) -> int:
    return sum(item.freed(mode) for item, mode in zip(timeline.items, modes))


class _Search:
    """Plans in which the cheapest items go to the host, those after them are coded on the device, and the last ones
    stay."""

    def __init__(self, timeline: Timeline, link: Link | None, price: float) -> None:
        self.timeline, self.link, self.price = timeline, link, price
        self.away = [self._away(item) for item in timeline.items]
        self.order = sorted(range(len(timeline.items)), key=lambda k: (round(self._cost(k), 2), k))

    def _away(self, item: Item) -> str:
        """How an item leaves: coded where that costs less."""
        if item.coded_bytes is None:
            return RAW if self.link is not None else KEEP
        if self.link is None:
            return DEVICE
        return min((RAW, CODED), key=lambda mode: self._price_of(item, mode))

    def _price_of(self, item: Item, mode: str) -> float:
        link = self.link or NO_LINK
        return item.coder(mode) + self.price * item.sent(mode) * (1 / link.out_gbps + 1 / link.back_gbps) * 1e-6

    def _cost(self, k: int) -> float:
        """ns for a byte that is freed."""
        item = self.timeline.items[k]
        return 1e6 * self._price_of(item, self.away[k]) / max(1, item.num_bytes)

    def modes(self, away: int, coded: int) -> list[str]:
        """The first `away` items in order leave, the next `coded` ones are coded on the device."""
        modes = [KEEP] * len(self.order)
        for position, k in enumerate(self.order[: away + coded]):
            modes[k] = self.away[k] if position < away else self._on_device(k)
        return modes

    def _on_device(self, k: int) -> str:
        return DEVICE if self.timeline.items[k].coded_bytes is not None else KEEP

    def within_time(self, limit: float) -> list[str]:
        """Items in their order, those left out with which the step would take too long, and those that free nothing;
        in the time of these a second round may fit others."""
        modes, useless = [KEEP] * len(self.order), set[int]()
        for _ in range(2):
            for mode_of in (lambda k: self.away[k], self._on_device):
                self._add(modes, [k for k in self.order if modes[k] == KEEP and k not in useless], mode_of, limit)
            useless.update(self._prune(modes, limit))
        return modes

    def _prune(self, modes: list[str], limit: float) -> list[int]:
        """Keeps what does not lower the peak, the last saved first. @return these items."""
        link, found = self.link or NO_LINK, list[int]()
        peak = self.timeline.predict(modes, link).peak_bytes
        leaving = [k for k in range(len(modes)) if modes[k] != KEEP]
        size = max(1, len(leaving) // _MOST_PARTS)
        for end in range(len(leaving), 0, -size):
            group = leaving[max(0, end - size) : end]
            before = [modes[k] for k in group]
            for k in group:
                modes[k] = KEEP
            without = self.timeline.predict(modes, link)
            if without.peak_bytes <= peak and without.ms <= limit:
                found, peak = found + group, without.peak_bytes
                continue
            for k, mode in zip(group, before):
                modes[k] = mode
        return found

    def _add(self, modes: list[str], group: Sequence[int], mode_of: Callable[[int], str], limit: float) -> None:
        """Changes the modes of all of a group, or, where that takes too long, of what is possible of each half."""
        if not group:
            return
        before = [modes[k] for k in group]
        for k in group:
            modes[k] = mode_of(k)
        if self.timeline.step(modes, self.link or NO_LINK) <= limit:
            return
        for k, mode in zip(group, before):
            modes[k] = mode
        if len(group) > max(1, len(self.order) // _MOST_PARTS):
            self._add(modes, group[: len(group) // 2], mode_of, limit)
            self._add(modes, group[len(group) // 2 :], mode_of, limit)

    def within_bytes(self, limit: int) -> list[list[str]]:
        """Plans with as few items away as fit, or coded on the device besides."""
        count, total = len(self.order), sum(item.num_bytes for item in self.timeline.items)

        def fits(modes: list[str]) -> bool:
            return total - _freed(self.timeline, modes) <= limit

        most_kept = _largest(count, lambda n: fits(self.modes(count - n, 0)))
        most_coded = _largest(count, lambda n: fits(self.modes(count - n, n)))
        return [self.modes(count - most_kept, 0), self.modes(count - most_coded, most_coded)]


def _largest(count: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to count for which something holds that holds for all below one for which it does; 0 where it
    never does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# ---- measuring -----------------------------------------------------------------------------------------------------


class Stopwatch:
    """Marks of the work on a device's current stream: when computing ended, and when coding of each piece began and
    ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[Mark] = []
        self.mark()

    def mark(self) -> None:
        self.marks.append(_mark(self._device))


class Clock:
    """The time from one moment to another: on GPUs, as far as their work is concerned, else the host's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"] or [torch.device("cpu")]
        self._first = [_mark(device) for device in self._devices]
        self._last: list[Mark] = []

    def stop(self) -> None:
        self._last = [_mark(device) for device in self._devices]

    def ms(self) -> float | None:
        """None: the devices are not done. It does not wait."""
        if not all(isinstance(last, float) or last.query() for last in self._last):
            return None
        return max(_ms(first, last) for first, last in zip(self._first, self._last))


def _mark(device: torch.device) -> Mark:
    """Now on a device's current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _ms(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (float(end) - float(start))  # type: ignore[arg-type]
    return start.elapsed_time(end)


def _coding_ms(marks: list[Mark]) -> float:
    """Time of the coders in the marks of a `Stopwatch`."""
    return sum(_ms(start, end) for start, end in zip(marks[1::2], marks[2::2]))


class Save(NamedTuple):
    """coded_bytes: None where the region is not coded. marks: of a `Stopwatch`."""

    number: int
    num_bytes: int
    coded_bytes: int | None
    marks: list[Mark]


@dataclass
class Recorder:
    """Marks of a step on one device, from which its timeline is made.

    Attributes:
        saves: in order.
        uses: (number, marks) in order; those of regions that were not saved in the step do not count.
        kept_bytes: that stay as they are, whatever the plan.
    """

    saves: list[Save] = field(default_factory=list)
    uses: list[tuple[int, list[Mark]]] = field(default_factory=list)
    kept_bytes: int = 0

    def timeline(self) -> tuple[Timeline, list[int]]:
        """(timeline, numbers of its items). Waits for the marks."""
        for _, marks in self.uses:  # streams can differ
            if isinstance(marks[-1], torch.cuda.Event):
                marks[-1].synchronize()
        items: list[Item] = []
        position, end = {}, self.saves[0].marks[0]
        for save in self.saves:
            position[save.number] = len(items)
            computing, encode = _ms(end, save.marks[0]), _coding_ms(save.marks)
            items.append(Item(save.num_bytes, save.coded_bytes, computing, encode=encode))
            end = save.marks[-1]
        uses = [(position[number], marks) for number, marks in self.uses if number in position]
        for k, marks in uses:
            items[k].used_after, items[k].decode = _ms(end, marks[0]), _coding_ms(marks)
            end = marks[-1]
        order = list(dict.fromkeys(k for k, _ in uses))  # graphs that are retained ask twice
        return Timeline(items, order), [save.number for save in self.saves]
