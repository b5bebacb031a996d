"""Learning codebooks of scheme planes from rows (FORMAT.md section 6): the core counts symbols and compares plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..._layout import geometry as _rows
from ..._layout import slots
from ..._machine import staging
from ..request import Request
from .codebook import PlanesCodebook, signed

LEVELS = ("default", "fast")
_LEARN_ELEMENTS = 1 << 19  # of the rows of a cluster that are looked at
_RUN_ELEMENTS = 1 << 20  # of all rows that a run of symbols is chosen by


@dataclass(frozen=True)
class LearnedPlanes:
    """What `learn_planes` found."""

    codebook: PlanesCodebook  # with expected_savings
    entries: torch.Tensor  # uint16 [n], what an index says of the sample's rows (FORMAT.md section 2)
    survey: slots.Survey | None  # of these; None where all rows stay as they are

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [n], the bytes of the sample's rows as coded, row_bytes for rows that are stored raw."""
        return slots.stored_sizes(self.entries, self.codebook.row_bytes, self.codebook.row_bytes)


def check_level(level: str) -> None:
    """Raises ValueError for a level that is none."""
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; wanted one of {list(LEVELS)}")


def learn(request: Request) -> PlanesCodebook:
    """The best codebook of scheme planes that the device can code a table's rows with."""
    codebook = _learn(request, request.codes_invariant)
    is_plain = not codebook.is_partial and codebook.first_symbol is None
    if not is_plain and not _can_code(codebook, request.device):
        codebook = _learn(request, True)
    if codebook.first_symbol is None or codebook.is_partial or codebook.rotate > codebook.residual_bits:
        return codebook
    # The run of consecutive symbols that most elements of all rows have: where one row in fifty has larger elements
    # than the rest, a sample may have none of these rows, and each of their elements would be an escape.
    counts, run = _symbol_counts(codebook, request.data), 2 ** codebook.digit_bits[0] - 1
    if not counts.any():
        return codebook
    inside = torch.cat((counts, counts[: run - 1])).unfold(0, run, 1).sum(1)
    return replace(codebook, first_symbol=int(inside.argmax()))


def _learn(request: Request, codes_invariant: bool) -> PlanesCodebook:
    geometry = request.geometry
    learned = learn_planes(
        request.host_rows,
        geometry.row_bytes,
        geometry.num_rows,
        geometry.dtype,
        level=request.options.level,
        codes_invariant=codes_invariant,
    )
    if learned.survey is not None:
        request.measured.append((learned.codebook, learned.entries, learned.survey))
    return learned.codebook


def _can_code(codebook: PlanesCodebook, device: torch.device) -> bool:
    """Whether the device has an encoder for what a codebook leaves out (csrc/cuda/encode/encode.cu)."""
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    try:
        torch.ops.ibp.measure_rows.default(nothing, codebook.words(device), codebook.codec)
    except RuntimeError:
        return False
    return True


def learn_planes(
    sample: torch.Tensor,
    row_bytes: int,
    num_rows: int,
    dtype: torch.dtype,
    *,
    level: str = "default",
    codes_invariant: bool = False,
) -> LearnedPlanes:
    """The best codebook of scheme planes for a table, from a sample of its rows.

    Symbol widths, rotation, digit widths, dense or listed rows and entries a table or a column are compared by what
    counts of the symbols say that rows take. Entries a column are learned on one half of the sample and compared on the
    other, unless the sample is the whole table.

    What is found for few rows is flattered by the very rows it was learned from: expect 2 points of savings less from
    30 rows, 0.2 from 300.

    Args:
        sample: uint8 [n * row_bytes], whole rows in any order, on the CPU.
        row_bytes: bytes of a row.
        num_rows: rows of the whole table, over which the codebook's own bytes are spread.
        dtype: of the elements, or of the parts of complex ones; it decides where exponents are looked for. Symbols are
            of elements, or of the largest parts of them that divide row_bytes.
        level: "default" or "fast", as in `ibp.compress`.
        codes_invariant: whether bits and columns that all of the sample agrees on are coded too, so that every row has
            a coded form.

    Raises:
        ValueError: the sample has no row or is not of whole rows.
    """
    _check_sample(sample, row_bytes)
    if sample.numel() == 0:
        raise ValueError("the sample has no row to learn from")
    element_bytes, exponent_bits = _element_of(dtype, row_bytes)
    num_rows = max(num_rows, sample.numel() // row_bytes)
    words, codec = torch.ops.ibp.learn_planes.default(
        sample, row_bytes, element_bytes, exponent_bits, num_rows, level == "fast", codes_invariant
    )
    codebook = PlanesCodebook.of_words(words, codec.tolist())
    entries = torch.ops.ibp.measure_rows.default(sample, codebook.words("cpu"), codebook.codec)
    survey = slots.survey(entries, _rows.Geometry(sample.shape, torch.uint8, row_bytes))
    coded_bytes = survey.stored / len(entries) + codebook.nbytes / num_rows
    if coded_bytes > row_bytes:  # the codebook of a few rows takes more than it saves
        return LearnedPlanes(_rows_as_they_are(row_bytes, element_bytes), torch.zeros_like(entries), None)
    return LearnedPlanes(codebook.with_savings(1 - coded_bytes / row_bytes), entries, survey)


def _rows_as_they_are(row_bytes: int, element_bytes: int) -> PlanesCodebook:
    """A codebook of no bytes, which leaves all bits of elements as they are."""
    return PlanesCodebook(
        row_bytes=row_bytes,
        element_bytes=element_bytes,
        rotate=0,
        residual_bits=8 * element_bytes,
        digit_bits=(),
        per_column=False,
        listed=False,
        default=0,
        closed=0,
        entries=torch.empty(1, 0, dtype=torch.int64, device="cpu"),
        expected_savings=0.0,
    )


def relearn(codebook: PlanesCodebook, rows: torch.Tensor, sizes: list[int]) -> list[PlanesCodebook]:
    """Codebooks that differ from another in their entries only: the most frequent symbols of each group of rows.

    Args:
        codebook: with at least one entry.
        rows: uint8 [n * row_bytes], whole rows, those of each group next to each other.
        sizes: rows of each group, at least one.
    """
    _check_sample(rows, codebook.row_bytes)
    return [_relearned(codebook, part) for part in rows.split([size * codebook.row_bytes for size in sizes])]


def _relearned(codebook: PlanesCodebook, rows: torch.Tensor) -> PlanesCodebook:
    some = _rows.sample(rows, codebook.row_bytes, max(1, _LEARN_ELEMENTS // codebook.columns))
    words = torch.ops.ibp.learn_entries.default(staging.to_host(some), codebook.words("cpu"), codebook.codec)
    return PlanesCodebook.of_words(words, codebook.codec)


def _symbol_counts(codebook: PlanesCodebook, data: torch.Tensor) -> torch.Tensor:
    """How many elements have each symbol, of a sample of all rows, without elements that are the default."""
    size, num_symbols = codebook.element_bytes, 2**codebook.symbol_bits
    elements = data[: data.numel() // size * size].view(_rows.INTEGERS[size])
    elements = elements[:: elements.numel() // _RUN_ELEMENTS | 1]  # odd, so that rows give different columns
    elements = elements[elements != signed(codebook.default, 8 * size)]
    symbols = elements >> codebook.residual_bits - codebook.rotate & num_symbols - 1
    return torch.bincount(symbols, minlength=num_symbols)


def _check_sample(sample: torch.Tensor, row_bytes: int) -> None:
    if sample.dtype != torch.uint8 or sample.dim() != 1 or sample.numel() % row_bytes:
        raise ValueError(f"the sample is {sample.dtype} {list(sample.shape)}; wanted torch.uint8 [n * {row_bytes}]")


def _element_of(dtype: torch.dtype, row_bytes: int) -> tuple[int, int]:
    """(bytes of an element, bits of its exponent or 0)."""
    exponent_bits, own_bytes = 0, dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        own_bytes = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        exponent_bits = (
            8 * own_bytes - 1 + round(math.log2(torch.finfo(dtype).eps)) if own_bytes > 1 else 4
        )  # of a byte all bits are tried
    element_bytes = math.gcd(own_bytes, row_bytes)
    return element_bytes, exponent_bits if element_bytes == own_bytes else 0
