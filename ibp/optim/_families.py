"""Which rows share a codebook (`grouped`): rows that take as many bytes by it as the rows it was learned from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._layout import geometry, slots
from .._schemes import AnyCodebook, measure
from ._learning import ROW_BYTES

_AS_GOOD = 32  # bytes that a row may take more by a codebook of others


class Section(NamedTuple):
    """Rows start to stop, which have one codebook. key: of the values that they are a part of."""

    start: int
    stop: int
    key: Hashable


class StateGroup(NamedTuple):
    """Rows start to stop: sections next to each other that share a codebook. survey: what the rows take by it."""

    start: int
    stop: int
    codebook: AnyCodebook
    survey: slots.Survey


@dataclass
class Family:
    """Sections that are alike."""

    codebook: AnyCodebook  # that was learned for the first of them
    mean_bytes: float  # of a row of that one, by the codebook
    keys: set[Hashable] = field(default_factory=set)  # of its sections

    def suits(self, section: Section, mean_bytes: float) -> bool:
        """Whether a section belongs to the family, by the mean bytes that its rows take by the family's codebook. A
        section of other values must not take far fewer bytes either; a section of the same values may."""
        more = mean_bytes - self.mean_bytes
        return more <= _AS_GOOD and (more >= -_AS_GOOD or section.key in self.keys)


class _Measured:
    """What all rows of some sections take by a codebook. Waits for the device."""

    def __init__(self, rows: torch.Tensor, sections: Sequence[Section], codebook: AnyCodebook) -> None:
        self._lengths = measure(geometry.bytes_of(rows), codebook, rows.device)
        sums = slots.stored_sizes(self._lengths, ROW_BYTES, ROW_BYTES).cumsum(0)
        ends = torch.tensor([section.stop - 1 for section in sections], dtype=torch.int64, device=rows.device)
        totals = [0, *sums[ends].tolist()]
        self.means = [
            (stop - start) / (section.stop - section.start)
            for section, start, stop in zip(sections, totals, totals[1:])
        ]

    def survey(self, rows: torch.Tensor, start: int, stop: int) -> slots.Survey:
        return slots.survey(self._lengths[start:stop], geometry.Geometry.of(rows[start:stop], ROW_BYTES))


def grouped(
    rows: torch.Tensor,
    sections: Sequence[Section],
    families: list[Family],
    learn: Callable[[torch.Tensor], AnyCodebook],
) -> list[StateGroup]:
    """The groups of rows, in their order. Waits for the device.

    Args:
        rows: [n, ROW_BYTES / itemsize], contiguous.
        sections: of all rows, in their order.
        families: that may take sections; families that are founded here are added.
        learn: gives a codebook for rows.
    """
    measured: list[_Measured] = []  # by the number of the family, as far as they were asked
    takers: dict[int, int] = {}  # the number of the family, by that of the section

    def offer(found: _Measured) -> None:
        """Gives the next family the sections that suit it and have no family yet."""
        measured.append(found)
        family = families[len(measured) - 1]
        for i, section in enumerate(sections):
            if i not in takers and family.suits(section, found.means[i]):
                takers[i] = len(measured) - 1

    for family in families:
        if len(takers) == len(sections):
            break
        offer(_Measured(rows, sections, family.codebook))
    for i, section in enumerate(sections):
        if i in takers:
            continue
        own = learn(rows[section.start : section.stop])
        by_own = _Measured(rows, sections, own)
        best = min(range(len(measured)), key=lambda number: measured[number].means[i], default=None)
        if best is not None and measured[best].means[i] <= by_own.means[i] + _AS_GOOD:
            takers[i] = best
            continue
        families.append(Family(own, by_own.means[i]))
        offer(by_own)
    groups: list[StateGroup] = []
    firsts = [i for i in range(len(sections)) if i == 0 or takers[i] != takers[i - 1]]
    for first, end in zip(firsts, [*firsts[1:], len(sections)]):
        family, found = families[takers[first]], measured[takers[first]]
        family.keys.update(section.key for section in sections[first:end])
        start, stop = sections[first].start, sections[end - 1].stop
        groups.append(StateGroup(start, stop, family.codebook, found.survey(rows, start, stop)))
    return groups
