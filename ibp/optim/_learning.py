"""Codebooks for states, which are decoded and coded in every step: chosen by what they save and by what that costs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._layout import geometry
from .._machine import calibration, staging
from .._machine.calibration import Calibration
from .._schemes import AnyCodebook, PlanesCodebook, Request, choice, stored_share
from .._schemes.planes.codebook import num_entries
from .._schemes.planes.learning import relearn

ROW_BYTES = 4096
_PAIRS = (2, 2, 2, 2)  # digits of the rows that are decoded the fastest, with symbols of a byte
_PAIRED_BYTES = (2, 4)  # of elements that have such rows
_SAMPLED_ROWS = 64  # that such codebooks are learned from
_LEAST_GROWTH = 1.2  # that is reckoned with
_CLEARLY_BETTER = 1.05  # times the worth of the codebook so far: what another one must have to take its place
_FEW_ZEROS = 0.25  # of the elements: with fewer, no other codebook is taken to save so much more that it pays


def learn(rows: torch.Tensor, level: str, before: AnyCodebook | None = None, growth: float = 1.0) -> AnyCodebook:
    """The codebook that saves the most for each nanosecond that rows take to be decoded and coded, by the calibration
    in force: the best one that `analyze` finds for the level, or at level "default" one of symbols of a byte and digits
    of two bits.

    Args:
        rows: [n, ROW_BYTES / itemsize], contiguous.
        level: see `ibp.compress`.
        before: the codebook so far, which is kept where no other is clearly better. Where it has such symbols, only
            codebooks that do are looked at, unless many elements are zeros: that takes a small part of the time.
        growth: how many times larger the values are expected to become; such codebooks serve all on the way.
    """
    machine, element_bytes = calibration.in_force(rows.device), rows.dtype.itemsize
    can_be_paired = level == "default" and element_bytes in _PAIRED_BYTES
    sample = _sample_of(rows, growth) if can_be_paired else rows[:0]
    pairs: list[AnyCodebook] = list(_pairs(sample, element_bytes)) if len(sample) else []
    if pairs and before is not None and _is_paired(before) and float((sample == 0).float().mean()) < _FEW_ZEROS:
        candidates = pairs
    else:
        request = Request(geometry.bytes_of(rows), geometry.Geometry.of(rows, ROW_BYTES), rows.device, level=level)
        best = choice.learn("planes", request)
        assert best is not None, "scheme 'planes' always has a codebook"
        candidates = pairs if pairs and _has_digits_of_pairs(best) else [best, *pairs]
    if not pairs:
        return candidates[0]
    worths = [_worth(sample, codebook, machine) for codebook in candidates]
    if before is not None and max(worths) < _CLEARLY_BETTER * _worth(sample, before, machine):
        return before
    return candidates[worths.index(max(worths))]


def _sample_of(rows: torch.Tensor, growth: float) -> torch.Tensor:
    """Some of the rows, but none of zeros, which take no bytes; as they are, and as they may become."""
    some = geometry.sample(geometry.bytes_of(rows), ROW_BYTES, _SAMPLED_ROWS).view(rows.dtype).view(-1, rows.shape[1])
    some = some[(some != 0).any(1)]
    return some if growth < _LEAST_GROWTH else torch.cat([some, some * growth**0.5, some * growth])


def _is_paired(codebook: AnyCodebook) -> bool:
    """Whether a codebook is of the kind that `_pairs` makes."""
    return isinstance(codebook, PlanesCodebook) and _has_digits_of_pairs(codebook) and codebook.symbol_bits == 8


def _has_digits_of_pairs(codebook: AnyCodebook) -> bool:
    """Whether it is like those, but that symbols may have fewer bits: residuals are then no whole bytes, which only
    some of the coders are made for, and little is saved by it."""
    return isinstance(codebook, PlanesCodebook) and codebook.is_fast


def _pairs(sample: torch.Tensor, element_bytes: int) -> Iterator[PlanesCodebook]:
    """Codebooks whose symbols are the highest byte of an element, with its sign and without."""
    blank = torch.zeros(1, num_entries(_PAIRS), dtype=torch.int64, device="cpu")
    data = staging.to_host(geometry.bytes_of(sample))
    for rotate in (0, 1):
        codebook = PlanesCodebook(
            ROW_BYTES, element_bytes, rotate, 8 * (element_bytes - 1), _PAIRS, False, False, 0, 0, blank
        )
        yield relearn(codebook, data, [len(sample)])[0]


def _worth(sample: torch.Tensor, codebook: AnyCodebook, machine: Calibration) -> float:
    """Bytes that a codebook saves of a row for each nanosecond that a byte takes."""
    saved = ROW_BYTES * (1 - stored_share(geometry.bytes_of(sample), codebook))
    return saved / choice.coder_ns(codebook, machine)
