"""Codebooks for states, which are decoded and coded in every step: chosen by what they save and by what that costs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import _calibration, _choice, _layout, _rows
from .._calibration import Calibration
from .._schemes import AnyCodebook, PlanesCodebook, Request, measure
from .._schemes.planes.codebook import num_entries
from .._schemes.planes.learning import relearn

ROW_BYTES = 4096
_PAIRS = (2, 2, 2, 2)  # digits of the rows that are decoded the fastest, with symbols of a byte
_PAIRED_BYTES = (2, 4)  # of elements that have such rows
_CPU = torch.device("cpu")


def learn(rows: torch.Tensor, level: str) -> AnyCodebook:
    """The codebook that saves the most for each nanosecond that rows take to be decoded and coded, by the calibration
    in force: the best one that `analyze` finds for the level, or at level "default" one of symbols of a byte and digits
    of two bits.

    Args:
        rows: [n, ROW_BYTES / itemsize], contiguous.
        level: see `ibp.compress`.
    """
    request = Request(_rows.bytes_of(rows), _rows.Geometry.of(rows, ROW_BYTES), rows.device, level=level)
    best = _choice.learn("planes", request)
    assert best is not None, "scheme 'planes' always has a codebook"
    element_bytes, sample = rows.dtype.itemsize, request.host_rows.view(-1, ROW_BYTES)
    sample = sample[(sample != 0).any(1)]  # zeros take no bytes
    if level != "default" or element_bytes not in _PAIRED_BYTES or _is_paired(best) or not len(sample):
        return best
    machine = _calibration.in_force(rows.device)
    return max([best, *_pairs(sample, element_bytes)], key=lambda codebook: _worth(sample, codebook, machine))


def _is_paired(codebook: AnyCodebook) -> bool:
    """Whether a codebook is one of those that `_pairs` makes, or as fast."""
    if not isinstance(codebook, PlanesCodebook):
        return False
    return codebook.is_fast and codebook.residual_bits == 8 * (codebook.element_bytes - 1)


def _pairs(sample: torch.Tensor, element_bytes: int) -> Iterator[PlanesCodebook]:
    """Codebooks whose symbols are the highest byte of an element, with its sign and without."""
    blank = torch.zeros(1, num_entries(_PAIRS), dtype=torch.int64)
    for rotate in (0, 1):
        codebook = PlanesCodebook(
            ROW_BYTES, element_bytes, rotate, 8 * (element_bytes - 1), _PAIRS, False, False, 0, 0, blank
        )
        yield relearn(codebook, sample.view(-1), [len(sample)])[0]


def _worth(sample: torch.Tensor, codebook: AnyCodebook, machine: Calibration) -> float:
    """Bytes that a codebook saves of a row for each nanosecond that a byte takes. sample: uint8 [n, ROW_BYTES] on the
    CPU."""
    sizes = _layout.stored_sizes(measure(sample.view(-1), codebook, _CPU), ROW_BYTES, ROW_BYTES)
    return (ROW_BYTES - float(sizes.float().mean())) / ns_of(codebook, machine)


def ns_of(codebook: AnyCodebook, machine: Calibration) -> float:
    """Nanoseconds that a byte takes to be decoded and coded."""
    rates = _choice.coder_rates(codebook, machine)
    return 1 / rates.decode_gbps + 1 / rates.encode_gbps
