"""Which activations leave under a budget: decided by a timeline of one step, measured while all of
them are coded and stay, or, where there is no memory for that, leave.

The step is predicted for a plan as it would run: the device computes, codes and decodes in turn, each way of the link
copies in turn, and both windows are bounded. Candidates go by what freeing a byte costs, with the link's time weighted
by a price; the best plan over a few prices is taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

KEEP, DEVICE, RAW, CODED = "keep", "device", "raw", "coded"  # as it is, coded on the device; on the host
HOLD = "hold"  # coded on the device, all of its memory: for a step that is measured
_PRICES = (0.0, 0.3, 1.0, 3.0, 10.0)  # of the link's time, in the device's
_ROUNDING = 1e-9  # of sums, as a share
_MOST_PARTS = 128  # of a step, that are tried one by one
LEAST_MOVING = 2  # regions that may be on their way, each way, however large: one is copied and one is next
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


@dataclass
class Timeline:
    """Items in the order of saving, and the order of use."""

    items: list[Item]
    uses: list[int]

    @property
    def computing(self) -> float:
        return sum(item.saved_after + item.used_after for item in self.items)

    def step(self, modes: Sequence[str], link: Link) -> float:
        """Predicted ms of the step."""
        now, on_device = self._forward(modes, link)
        return self._backward(modes, link, now, on_device)

    def _forward(self, modes: Sequence[str], link: Link) -> tuple[float, set[int]]:
        """(end of the forward pass, which items that leave have not done so by then)."""
        now, free, held = 0.0, 0.0, 0
        leaving: deque[tuple[int, int, float]] = deque()
        for k, (item, mode) in enumerate(zip(self.items, modes)):
            now += item.saved_after
            if mode != KEEP:
                while len(leaving) > LEAST_MOVING and held + item.num_bytes > link.window_bytes:
                    _, size, end = leaving.popleft()
                    held, now = held - size, max(now, end)
            while mode == KEEP and leaving and leaving[0][2] <= now:
                held -= leaving.popleft()[1]
            if mode in (DEVICE, CODED):
                now += item.encode
            if mode in (RAW, CODED):
                free = max(free, now) + item.sent(mode) / link.out_gbps * 1e-6
                held += item.num_bytes
                leaving.append((k, item.num_bytes, free))
        return now, {k for k, _, _ in leaving}

    def _backward(self, modes: Sequence[str], link: Link, now: float, on_device: set[int]) -> float:
        wanted = deque(k for k in self.uses if modes[k] in (RAW, CODED) and k not in on_device)
        arrived: dict[int, float] = {}
        free, coming, count = 0.0, 0, 0
        for k in self.uses:
            item = self.items[k]
            now += item.used_after
            if wanted and wanted[0] == k:  # not fetched yet
                wanted.popleft()
                free = arrived[k] = max(free, now) + item.sent(modes[k]) / link.back_gbps * 1e-6
                coming, count = coming + item.sent(modes[k]), count + 1
            if k in arrived:
                now, coming, count = max(now, arrived[k]), coming - item.sent(modes[k]), count - 1
            if modes[k] in (DEVICE, CODED):
                now += item.decode
            while wanted:
                size = self.items[wanted[0]].sent(modes[wanted[0]])
                if count >= LEAST_MOVING and coming + size > link.window_bytes:
                    break
                free = arrived[wanted.popleft()] = max(free, now) + size / link.back_gbps * 1e-6
                coming, count = coming + size, count + 1
        return now


def plan(
    timeline: Timeline, link: Link | None, *, device_bytes: int | None = None, slowdown: float | None = None
) -> list[str]:
    """A mode for each item.

    Args:
        link: None: there is no host to send to.
        device_bytes: that may stay on the device, at the least predicted time.
        slowdown: share of the time of computing that the step may take longer, for the most bytes freed.
    """
    found = []
    for price in _PRICES if link is not None else (0.0,):
        search = _Search(timeline, link, price)
        if device_bytes is not None:
            found += search.within_bytes(device_bytes)
        if slowdown is not None:
            found.append(search.within_time(timeline.computing * (1 + _MARGIN * slowdown + _ROUNDING)))
    if slowdown is not None:
        return max(found, key=lambda modes: _freed(timeline, modes))
    reckoned = link or _NO_LINK
    total = sum(item.num_bytes for item in timeline.items)
    fitting = [modes for modes in found if total - _freed(timeline, modes) <= (device_bytes or 0)]
    return min(fitting or found, key=lambda modes: timeline.step(modes, reckoned))


_NO_LINK = Link(1.0, 1.0, 0)


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
        link = self.link or _NO_LINK
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
        """Items in their order, those left out with which the step would take too long."""
        modes = [KEEP] * len(self.order)
        self._add(modes, self.order, lambda k: self.away[k], limit)
        self._add(modes, [k for k in self.order if modes[k] == KEEP], self._on_device, limit)
        return modes

    def _add(self, modes: list[str], group: Sequence[int], mode_of: Callable[[int], str], limit: float) -> None:
        """Changes the modes of all of a group, or, where that takes too long, of what is possible of each half."""
        before = [modes[k] for k in group]
        for k in group:
            modes[k] = mode_of(k)
        if self.timeline.step(modes, self.link or _NO_LINK) <= limit:
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
    """Marks of the work on a device's current stream: when computing ended, when coding began, when it ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[Mark] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self.marks.append(event)


def _ms(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (float(end) - float(start))  # type: ignore[arg-type]
    return start.elapsed_time(end)


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
            computed, start, coded = save.marks
            position[save.number] = len(items)
            items.append(Item(save.num_bytes, save.coded_bytes, _ms(end, computed), encode=_ms(start, coded)))
            end = coded
        uses = [(position[number], marks) for number, marks in self.uses if number in position]
        for k, (computed, start, decoded) in uses:
            items[k].used_after, items[k].decode = _ms(end, computed), _ms(start, decoded)
            end = decoded
        return Timeline(items, [k for k, _ in uses]), [save.number for save in self.saves]
