"""Learning codebooks of scheme planes from rows (FORMAT.md section 6); words and letters as in cost.py."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..request import Request
from .codebook import ELEMENT_BYTES, MAX_DIGIT_BITS, MAX_PLANES, PlanesCodebook, is_fast, num_entries, symbol_bytes
from .cost import MAX_BINS_BITS, Values, as_entries, check_sample, elements_of, ranks_of, symbols_of, values_of

Shape = tuple[int, int]  # rotate, symbol bits

_GUESS_ELEMENTS = 1 << 17  # from which the symbols' frequencies are guessed
_LEARN_ELEMENTS = 1 << 19  # from which candidates are learned, and
_TEST_ELEMENTS = 1 << 18  # on which they are compared, always whole rows
_WHOLE_ELEMENTS = 1 << 20  # of a table that candidates are learned from as a whole
_LEAST_ROWS = 32
_CANDIDATES = 10  # that are compared exactly
_COLUMNS_GAIN = 1.5  # rows with entries a column are taken to be smaller than others by this factor at the most
_AS_GOOD = 1.001  # a cost within this of the least is as good: dense rows, fewer planes and entries decode faster
_FAST_COST = 1.008  # a cost within this of the least is worth it for a plan that decodes fastest,
_FAST_COLUMNS_COST = 1.006  # and this, where entries are a column's and it decodes faster than others of that kind
_LEAST_SHARE = 1 / 256  # of a default
_PSEUDO_COUNTS = 8.0  # of the table's symbols that every column has besides its own
_DICTIONARY = 255  # the table's symbols that columns choose from, at most
_COLUMN_CELLS = 1 << 20  # columns * symbols, at most


def _all_digit_lists() -> list[tuple[int, ...]]:
    """All lists of digit widths, those of fewer entries first."""
    widths = range(1, MAX_DIGIT_BITS + 1)
    lists = [digits for planes in range(MAX_PLANES + 1) for digits in itertools.product(widths, repeat=planes)]
    return sorted(lists, key=lambda digits: (num_entries(digits), len(digits)))


_DIGIT_LISTS = _all_digit_lists()
_MOST_ENTRIES = num_entries(_DIGIT_LISTS[-1])


@dataclass(frozen=True)
class Learned:
    """What `learn_planes` found.

    Attributes:
        codebook: with expected_savings.
        lengths: int64 [n], the bytes of the sample's rows as coded with it, row_bytes for those that are stored raw; on
            the sample's device.
    """

    codebook: PlanesCodebook
    lengths: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """A codebook without its entries."""

    width: int
    listed: bool = False
    default: int = 0
    closed: int = 0
    rotate: int = 0
    symbol_bits: int = 0
    digit_bits: tuple[int, ...] = ()
    per_column: bool = False

    @property
    def shape(self) -> Shape:
        return self.rotate, self.symbol_bits

    @property
    def is_fast(self) -> bool:
        """Whether the decoder is at its best: symbols of a byte, digits of two bits."""
        return is_fast(self.symbol_bits, self.digit_bits)

    def codebook_bytes(self, columns: int) -> int:
        values = 2 * self.width // 8 if self.listed else 0
        return (
            num_entries(self.digit_bits) * (columns if self.per_column else 1) * symbol_bytes(self.symbol_bits) + values
        )


def learn(request: Request) -> PlanesCodebook:
    """The best codebook of scheme planes for a table."""
    return learn_planes(
        request.few_rows, request.geometry.row_bytes, request.geometry.num_rows, request.geometry.dtype
    ).codebook


def learn_planes(
    sample: torch.Tensor, row_bytes: int, num_rows: int, dtype: torch.dtype, *, element_bytes: int | None = None
) -> Learned:
    """The best codebook of scheme planes for a table, from a sample of its rows.

    Symbol widths, rotation, digit widths, dense or listed rows and entries a table or a column are compared by the
    exact bytes of coded rows. Entries a column are learned on one half of the sample and compared on the other, unless
    the sample is the whole table.

    What is found for few rows is flattered by the very rows it was learned from: expect 2 points of savings less from
    30 rows, 0.2 from 300.

    Args:
        sample: uint8 [n * row_bytes], whole rows in any order, on the CPU or a GPU, where the work is then done.
        row_bytes: bytes of a row.
        num_rows: rows of the whole table, over which the codebook's own bytes are spread.
        dtype: of the table's elements; it decides where exponents are looked for.
        element_bytes: 1, 2, 4 or 8; None: the dtype's (a complex dtype's parts), or the largest that divides row_bytes.

    Raises:
        ValueError: the sample has no row or is not of whole rows, or element_bytes does not divide row_bytes.
    """
    check_sample(sample, row_bytes)
    if sample.numel() == 0:
        raise ValueError("the sample has no row to learn from")
    element_bytes, exponent_bits = _element_of(dtype, row_bytes, element_bytes)
    return _Search(sample, row_bytes, max(num_rows, sample.numel() // row_bytes), element_bytes, exponent_bits).best()


def relearn(codebook: PlanesCodebook, rows: torch.Tensor, sizes: list[int]) -> list[PlanesCodebook]:
    """Codebooks that differ from another in their entries only: the most frequent symbols of each group of rows.

    Args:
        codebook: with at least one entry.
        rows: uint8 [n * row_bytes], whole rows, those of each group next to each other.
        sizes: rows of each group, at least one.
    """
    check_sample(rows, codebook.row_bytes)
    return [_relearned(codebook, part) for part in rows.split([size * codebook.row_bytes for size in sizes])]


def _relearned(codebook: PlanesCodebook, rows: torch.Tensor) -> PlanesCodebook:
    values = values_of(codebook, elements_of(rows, codebook.element_bytes, codebook.columns))
    symbols = values.symbols(codebook.rotate, codebook.symbol_bits)
    if symbols.numel() == 0:
        return codebook
    entries = (
        _column_entries(symbols, codebook.symbol_bits, codebook.columns, False)
        if codebook.per_column
        else _top_symbols(symbols, codebook.symbol_bits)
    )
    return replace(codebook, entries=_exactly(entries, codebook.num_entries), expected_savings=None)


def _element_of(dtype: torch.dtype, row_bytes: int, element_bytes: int | None) -> tuple[int, int]:
    """(bytes of an element, bits of its exponent or 0)."""
    exponent_bits, own_bytes = 0, dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        own_bytes = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        exponent_bits = (
            8 * own_bytes - 1 + round(math.log2(torch.finfo(dtype).eps)) if own_bytes > 1 else 4
        )  # of a byte all bits are tried
    if element_bytes is None:
        element_bytes = math.gcd(own_bytes, row_bytes)
    if element_bytes not in ELEMENT_BYTES or row_bytes % element_bytes:
        raise ValueError(
            f"element_bytes is {element_bytes}; wanted one of {ELEMENT_BYTES} that divides row_bytes, {row_bytes}"
        )
    return element_bytes, exponent_bits if element_bytes == own_bytes else 0


def _shapes(width: int, exponent_bits: int) -> list[Shape]:
    """The (rotate, symbol bits) to try; of equally good ones the first is taken."""
    if exponent_bits == 0:
        return [(0, bits) for bits in range(width + 1)]
    if width == 8:
        return [(0, bits) for bits in range(width + 1)] + [(1, bits) for bits in range(1, width)]
    around = range(max(1, exponent_bits - 2), MAX_BINS_BITS)
    return (
        [(0, 0)]
        + [(1, bits) for bits in around]
        + [(0, bits + 1) for bits in around]
        + [(0, width)] * (width > MAX_BINS_BITS)
    )


class _Search:
    """Plans tried on parts of the same sampled rows."""

    def __init__(
        self, sample: torch.Tensor, row_bytes: int, num_rows: int, element_bytes: int, exponent_bits: int
    ) -> None:
        self.row_bytes, self.num_rows, self.width = row_bytes, num_rows, 8 * element_bytes
        self.columns = row_bytes // element_bytes
        self.shapes = _shapes(self.width, exponent_bits)
        self.sample, self.element_bytes = sample, element_bytes
        self.learn, self.test = self._parts(sample.view(-1, row_bytes))

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Elements [n, C] of the rows to learn on and of others to compare on, or of the same if no others are to
        come."""
        order, half = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)), len(rows) // 2
        self.is_whole = len(rows) >= self.num_rows and len(rows) * self.columns <= _WHOLE_ELEMENTS
        self.is_apart = not self.is_whole and half > 0
        parts = (order[:half], order[half:]) if self.is_apart else (order, order)
        learned = _WHOLE_ELEMENTS if self.is_whole else _LEARN_ELEMENTS
        sizes = (max(_LEAST_ROWS, most // self.columns) for most in (learned, _TEST_ELEMENTS))
        return [self._elements(rows[part[:size].sort().values.to(rows.device)]) for part, size in zip(parts, sizes)]

    def _elements(self, rows: torch.Tensor) -> torch.Tensor:
        return elements_of(rows.reshape(-1), self.element_bytes, self.columns)

    def best(self) -> Learned:
        listing = self._listing()
        plans = self._table_plans(listing) if listing else []
        least = min((cost for cost, _ in plans), default=math.inf)
        plans += self._table_plans(_Plan(self.width), _COLUMNS_GAIN * least)
        least = min(cost for cost, _ in plans)
        fast = [
            (cost, plan)
            for cost, plan in plans
            if plan.is_fast and cost <= (_FAST_COLUMNS_COST if plan.per_column else _FAST_COST) * least
        ]
        if fast:
            return self._learned(min(fast, key=lambda found: found[0])[1])
        as_good = [plan for cost, plan in plans if cost <= _AS_GOOD * least]
        return self._learned(
            min(as_good, key=lambda plan: (plan.listed, len(plan.digit_bits), plan.codebook_bytes(self.columns)))
        )

    def _learned(self, plan: _Plan) -> Learned:
        """The plan's codebook, its entries from all sampled rows."""
        values = values_of(plan, self._elements(self.sample))
        symbols = values.symbols(*plan.shape)
        entries = (
            _column_entries(symbols, plan.symbol_bits, self.columns, self.is_whole)
            if plan.per_column
            else _top_symbols(symbols, plan.symbol_bits)
        )
        entries = _exactly(entries, num_entries(plan.digit_bits))
        lengths = values.lengths(ranks_of(symbols, entries, plan.symbol_bits), plan.symbol_bits, plan.digit_bits)
        coded = float(lengths.sum()) / len(lengths) + plan.codebook_bytes(self.columns) / self.num_rows
        codebook = PlanesCodebook(
            self.row_bytes,
            self.element_bytes,
            plan.rotate,
            self.width - plan.symbol_bits,
            plan.digit_bits,
            plan.per_column,
            plan.listed,
            plan.default,
            plan.closed,
            entries,
            1 - coded / self.row_bytes,
        )
        return Learned(codebook, lengths)

    # -- what rows list

    def _listing(self) -> _Plan | None:
        """A plan that lists, or None where no value is frequent enough for that to pay."""
        picked = _some(self.learn)
        default, share = _most_frequent(picked)
        if share < _LEAST_SHARE or share * self.width < 2 * _entropy(share):
            return None
        others = self.learn[self.learn != default]
        closed = _most_frequent(_some(others))[0] if others.numel() else default
        low = 2**self.width - 1
        return _Plan(self.width, True, default & low, closed & low)

    # -- entries a table

    def _table_plans(self, plan: _Plan, worth: float = 0.0) -> list[tuple[float, _Plan]]:
        """A plan with the best shapes and digits filled in: [(bytes of a mean row with its share of the codebook,
        plan)].

        With entries a column too if a mean row has at most `worth` bytes without.
        """
        learn, test = values_of(plan, self.learn), values_of(plan, self.test)
        bits = self._model(_tails(learn, self.shapes), self.shapes, learn.rows is None, 1)
        found = []
        for shape, digit_lists in _best_groups(bits, self.shapes):
            ranks = ranks_of(test.symbols(*shape), _top_symbols(learn.symbols(*shape), shape[1]), shape[1])
            found += self._compare(replace(plan, rotate=shape[0], symbol_bits=shape[1]), digit_lists, ranks, test)
        if self._columns_may_pay() and min(cost for cost, _ in found) <= worth:
            found += self._column_plans(plan, bits.min(1).values.tolist(), learn, test)
        return found

    def _compare(
        self, plan: _Plan, digit_lists: list[tuple[int, ...]], ranks: torch.Tensor, test: Values
    ) -> list[tuple[float, _Plan]]:
        """Digits of several widths for the same ranks, which say how many entries they want."""
        found: list[tuple[float, _Plan]] = []
        counts: dict[int, torch.Tensor] = {}
        for digits in digit_lists:
            tried = replace(plan, digit_bits=digits)
            lengths = test.lengths(ranks, plan.symbol_bits, digits, counts)
            found.append(
                (float(lengths.sum()) / test.num_rows + tried.codebook_bytes(self.columns) / self.num_rows, tried)
            )
        return found

    def _model(self, tails: torch.Tensor, shapes: list[Shape], is_dense: bool, sets: int) -> torch.Tensor:
        """Bits of the values of a mean row with its share of the codebook: float64 [shapes, lists of digits].

        Args:
            tails: float64 [shapes, _MOST_ENTRIES + 1]: how many elements of a mean row have that rank or a higher one.
            sets: of entries: 1 or columns.
        """
        widths, firsts, entries = _digit_tables()
        symbol_bits = torch.tensor([bits for _, bits in shapes])[:, None]
        waiting = tails[:, firsts]  # [shapes, lists, planes + 1]
        total = _padded_bits(waiting[..., 0], self.width - symbol_bits, is_dense)
        for plane in range(MAX_PLANES):
            total = total + _padded_bits(waiting[..., plane], widths[:, plane], is_dense and plane == 0)
        total = total + _padded_bits(waiting[..., MAX_PLANES], symbol_bits, False)
        entry_bytes = torch.tensor([symbol_bytes(bits) for _, bits in shapes])[:, None]
        return total + 8.0 * sets / self.num_rows * entries * entry_bytes

    # -- entries a column

    def _columns_may_pay(self) -> bool:
        """Whether there are rows to compare on, and one entry a column is less than a tenth of the table."""
        return (
            self.columns > 1
            and (self.is_whole or self.is_apart)
            and self.columns < 0.1 * self.row_bytes * self.num_rows
        )

    def _column_plans(
        self, plan: _Plan, table_bits: list[float], learn: Values, test: Values
    ) -> list[tuple[float, _Plan]]:
        """Symbols of more and fewer bits, from those on that are best with entries a table, as long as they are
        better."""
        tried: dict[Shape, tuple[float, list[tuple[int, ...]], torch.Tensor]] = {}

        def cost(shape: Shape) -> float:
            if shape not in tried:
                tried[shape] = self._column_digits(shape, learn, test)
            return tried[shape][0]

        for rotate in sorted({rotate for rotate, _ in self.shapes}):
            own = [(shape, bits) for shape, bits in zip(self.shapes, table_bits) if shape[0] == rotate and shape[1]]
            best = min(range(len(own)), key=lambda i: own[i][1])
            for step in (1, -1):
                while 0 <= best + step < len(own) and cost(own[best + step][0]) < cost(own[best][0]):
                    best += step
        shape, (_, digit_lists, ranks) = min(tried.items(), key=lambda item: item[1][0])
        return self._compare(
            replace(plan, rotate=shape[0], symbol_bits=shape[1], per_column=True), digit_lists, ranks, test
        )

    def _column_digits(
        self, shape: Shape, learn: Values, test: Values
    ) -> tuple[float, list[tuple[int, ...]], torch.Tensor]:
        """(bits of a mean row, the best lists of digits, ranks of the elements to compare on) with entries a column."""
        entries = _column_entries(learn.symbols(*shape), shape[1], self.columns, self.is_whole)
        ranks = ranks_of(test.symbols(*shape), entries, shape[1])
        count = entries.shape[1]
        tails = (
            _tails_of(torch.bincount(ranks.flatten(), minlength=count + 1).cpu()[:count], ranks.numel()) / test.num_rows
        )
        bits = self._model(tails[None], [shape], True, self.columns)
        return float(bits.min()), _best_groups(bits, [shape])[0][1], ranks


# -- frequencies


def _column_entries(symbols: torch.Tensor, bits: int, columns: int, is_whole: bool) -> torch.Tensor:
    """Entries a column, int64 [C, up to _MOST_ENTRIES], out of the table's most frequent symbols."""
    dictionary = _top_symbols(symbols, bits, max(16, min(_DICTIONARY, _COLUMN_CELLS // columns)))
    size = dictionary.shape[1]
    cells = ranks_of(symbols, dictionary, bits).to(torch.int32)
    cells += torch.arange(columns, dtype=torch.int32, device=cells.device) * (size + 1)
    counts = (
        torch.bincount(cells.flatten(), minlength=columns * (size + 1))
        .view(columns, size + 1)[:, :size]
        .to(torch.float64)
    )
    if not is_whole:
        counts = counts + counts.sum(0) * (_PSEUDO_COUNTS / symbols.numel())
    order = counts.sort(dim=1, descending=True, stable=True).indices[:, :_MOST_ENTRIES]
    return dictionary[0][order]


def _some(x: torch.Tensor, most: int = _GUESS_ELEMENTS) -> torch.Tensor:
    """Elements drawn at random, or all if there are no more than `most`: [up to most]."""
    x = x.reshape(-1)
    if x.numel() <= most:
        return x
    return x[torch.randint(x.numel(), (most,), generator=torch.Generator().manual_seed(0)).to(x.device)]


def _runs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct values in increasing order and how often they are there."""
    ordered = (
        x.sort().values if x.is_cuda else torch.from_numpy(np.sort(x.numpy()))
    )  # numpy's sort is 50 times torch's on the CPU
    return torch.unique_consecutive(ordered, return_counts=True)


def _most_frequent(x: torch.Tensor) -> tuple[int, float]:
    """(the most frequent of elements, its share)."""
    values, counts = _runs(x)
    at = int((counts == counts.max()).nonzero()[0])  # the smallest; argmax may take any
    return int(values[at]), float(counts[at]) / x.numel()


def _entropy(share: float) -> float:
    """Bits an element of saying which elements are of a share."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _top_symbols(symbols: torch.Tensor, bits: int, most: int = _MOST_ENTRIES) -> torch.Tensor:
    """The most frequent symbols as entries, int64 [1, up to most]; of equally frequent ones the smaller first."""
    if bits <= MAX_BINS_BITS:
        counts = torch.bincount(symbols.reshape(-1), minlength=2**bits)
        values = torch.arange(2**bits, device=symbols.device)
    else:
        values, counts = _runs(_some(symbols, _LEARN_ELEMENTS))
    ordered = counts.sort(descending=True, stable=True)
    order = ordered.indices[:most][ordered.values[:most] > 0]
    return as_entries(values[order], bits)[None]


def _exactly(entries: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` entries of every column; what is missing repeats the first one, so that it is never chosen."""
    if entries.shape[1] == 0:
        return entries.new_zeros(len(entries), count)
    at = torch.arange(count, device=entries.device)
    return entries[:, torch.where(at < entries.shape[1], at, 0)]


def _tails(values: Values, shapes: list[Shape]) -> torch.Tensor:
    """How many elements of a mean row have a rank or a higher one, for every shape: float64 [shapes, _MOST_ENTRIES + 1]
    on the CPU."""
    picked = _some(values.elements)
    scale = float(values.counts.sum()) / max(1, picked.numel()) / values.num_rows
    bins = {}
    for rotate in {rotate for rotate, _ in shapes}:
        most = max((bits for turned, bits in shapes if turned == rotate and bits <= MAX_BINS_BITS), default=0)
        bins[rotate] = torch.bincount(symbols_of(picked, values.width, rotate, values.width - most), minlength=2**most)
    tops = []
    for rotate, bits in shapes:
        if bits <= MAX_BINS_BITS:
            counts = bins[rotate].view(2**bits, -1).sum(1)
        else:
            counts = _runs(symbols_of(picked, values.width, rotate, values.width - bits))[1]
        tops.append(_tails_of(counts.topk(min(_MOST_ENTRIES, len(counts))).values, picked.numel()))
    return torch.stack(tops).cpu() * scale


def _tails_of(counts: torch.Tensor, total: int) -> torch.Tensor:
    """From the counts of ranks 0, 1, ...: float64 [_MOST_ENTRIES + 1], how many of `total` have a rank or a higher
    one."""
    tails = torch.full((_MOST_ENTRIES + 1,), float(total), dtype=torch.float64, device=counts.device)
    named = counts.to(torch.float64).cumsum(0)
    tails[1 : 1 + len(named)] -= named
    tails[1 + len(named) :] = tails[len(named)]
    return tails


# -- what the plans are thought to cost


def _padded_bits(count: torch.Tensor, bits: torch.Tensor, is_exact: bool) -> torch.Tensor:
    """Bits of `count` fields of `bits` bits in a mean row, padded; is_exact: count is the same in all rows."""
    if is_exact:
        return torch.ceil(count * bits / 8) * 8
    padding = (8 - torch.gcd(bits, torch.tensor(8))) / 2
    return count * bits + padding * (1 - torch.exp(-count))


@functools.lru_cache(maxsize=1)
def _digit_tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all lists of digits: widths [lists, planes], first entries [lists, planes + 1], entries [lists]; planes that
    are not there have 0 bits."""
    widths = torch.tensor([digits + (0,) * (MAX_PLANES - len(digits)) for digits in _DIGIT_LISTS])
    firsts = torch.nn.functional.pad((2**widths - 1).cumsum(1), (1, 0))
    return widths, firsts, firsts[:, -1]


def _best_groups(bits: torch.Tensor, shapes: list[Shape]) -> list[tuple[Shape, list[tuple[int, ...]]]]:
    """The _CANDIDATES least of bits [shapes, lists of digits] and the least of the fast ones: [(shape, lists)], the
    best shape first."""
    groups: dict[Shape, list[tuple[int, ...]]] = {}
    least = bits.flatten().argsort(stable=True).tolist()
    at_fast = (at for at in least if is_fast(shapes[at // len(_DIGIT_LISTS)][1], _DIGIT_LISTS[at % len(_DIGIT_LISTS)]))
    for at in dict.fromkeys([*least[:_CANDIDATES], *itertools.islice(at_fast, 1)]):
        groups.setdefault(shapes[at // len(_DIGIT_LISTS)], []).append(_DIGIT_LISTS[at % len(_DIGIT_LISTS)])
    return list(groups.items())
