"""Which bits are invariant: codebooks of scheme ibp learned from rows (the paper's sections 4.1 and 6.1).

Learning runs on groups of rows, and each group gets a codebook of its own: the whole sample for a table, its clusters
for several. Below, K is a number of groups. Bits of rows are counted by the operations; what is small, masks and sums a
group, is kept in numpy arrays for all groups at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ..._common.progress import tqdm
from ..._layout import geometry as _rows
from ..._machine import staging
from ..request import Request
from .codebook import CHUNK_BYTES, Codebook, MasksForm

TAUS = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)  # the paper's artifact sweeps 0.70 to 1.0
_GREEDY_BYTES, _LEAST_GREEDY_ROWS = 2 << 20, 256  # of a group's rows that the greedy choice of masks looks at
_LEAST_MASKED_ROWS = 64
_FEW_BYTES = 32 << 10  # of rows that the CPU analyses sooner than a GPU, which is waited for about 60 times
_FINALISTS = 3  # thresholds for all chunks that are compared exactly
_BITS_SET = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def check_tau(tau: float) -> None:
    """Raises ValueError for a threshold that is none."""
    if not 0.5 <= tau <= 1:
        raise ValueError(f"tau is {tau}; wanted 0.5 to 1, or None to sweep")


def learn(request: Request) -> Codebook:
    """The best codebook of scheme ibp for a table."""
    rows, row_bytes = request.rows, request.geometry.row_bytes
    if rows.numel() <= _FEW_BYTES:
        rows = staging.to_host(rows)
    if rows.numel() == 0:
        nothing = torch.zeros(row_bytes, dtype=torch.uint8, device="cpu")
        return Codebook.from_masks(nothing, nothing, 4)
    sweep = _Sweep(rows, row_bytes, [rows.numel() // row_bytes], [request.geometry.num_rows])
    sizes = CHUNK_BYTES if request.options.chunk_bytes is None else (request.options.chunk_bytes,)
    found = [
        sweep.best(size, request.options.tau, request.paper)
        for size in tqdm(sizes, desc="analyze", unit="chunk size", disable=not request.options.progress)
    ]
    return max(found, key=lambda best: best.savings[0]).codebooks()[0]


def estimates(rows: torch.Tensor, row_bytes: int, num_rows: int) -> Iterator[float]:
    """Upper bounds of the share of a table's bytes that masks save, the cheapest first, by a sample of its rows.

    Args:
        rows: uint8 [n * row_bytes], whole rows on the CPU.
        num_rows: of the table. For few of them masks that differ from chunk to chunk take more bytes than they save.
    """
    is_few = num_rows < _LEAST_MASKED_ROWS and row_bytes % max(CHUNK_BYTES) == 0
    yield float(torch.ops.ibp.estimate_masks.default(rows, max(CHUNK_BYTES) if is_few else row_bytes))
    if num_rows == 1:
        yield 1 - min(_single_row_bytes(rows.numpy(), size) for size in CHUNK_BYTES) / row_bytes


def _single_row_bytes(row: np.ndarray, chunk_bytes: int) -> int:
    """What a table of one row takes at least. All of its bits are invariant, so that the codebook holds its chunks."""
    whole = row[: len(row) // chunk_bytes * chunk_bytes].view(f"u{chunk_bytes}")
    # Two different bytes are as good as more: the index takes as many bytes as the row.
    ordered = np.sort(whole) if chunk_bytes > 1 else np.array([whole.min(), whole.max()])
    chunks, pairs = -(-len(row) // chunk_bytes), 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
    flags = chunks // 8 if row.any() else 0  # a default row takes no bytes
    return flags + _palette_bytes(pairs, chunks, chunk_bytes)


def _palette_bytes(pairs: int, chunks: int, chunk_bytes: int) -> int:
    """Bytes of a codebook whose chunks have this number of different pairs of a mask and a bitval."""
    return pairs * 2 * chunk_bytes + (chunks * (2 if pairs > 256 else 1) if pairs > 1 else 0)


def relearn(codebook: Codebook, rows: torch.Tensor, sizes: list[int], tau: float | None) -> list[Codebook]:
    """Codebooks of the same form as another, one for each group of rows.

    Args:
        codebook: gives the form.
        rows: uint8 [n * row_bytes], whole rows, those of each group next to each other.
        sizes: rows of each group, at least one.
        tau: a threshold for all chunks; None: each group finds the best ones.
    """
    return _Sweep(rows, codebook.row_bytes, sizes, sizes).best(codebook.chunk_bytes, tau, codebook.flag_all).codebooks()


class _Masks(NamedTuple):
    """A mask and bitval for the rows of every group: uint8 [K, row_bytes]. tau: float64 [K], nan where there is no one
    threshold."""

    mask: np.ndarray
    bitval: np.ndarray
    tau: np.ndarray

    def where(self, condition: np.ndarray, other: _Masks) -> _Masks:
        """These for the groups where the condition, [K], holds, others' for the rest."""
        by_row = condition[:, None]
        mask, bitval = np.where(by_row, self.mask, other.mask), np.where(by_row, self.bitval, other.bitval)
        return _Masks(mask, bitval, np.where(condition, self.tau, other.tau))


class _Best(NamedTuple):
    """The masks of every group that save most with chunks of one size, and what they save: float64 [K]."""

    masks: _Masks
    savings: np.ndarray
    chunk_bytes: int
    flag_all: bool

    def codebooks(self) -> list[Codebook]:
        """One for every group, with expected_savings."""
        return [
            Codebook.from_masks(
                torch.from_numpy(mask),
                torch.from_numpy(bitval),
                self.chunk_bytes,
                self.flag_all,
                tau=None if np.isnan(at) else float(at),
                expected_savings=float(saved),
            )
            for mask, bitval, at, saved in zip(*self.masks, self.savings)
        ]


class _Sweep:
    """Thresholds and chunk sizes tried on the same sampled rows, for every group apart.

    Args:
        rows: uint8 [n * row_bytes], whole rows on the device that does the work, those of a group next to each other.
        sizes: rows of each group, at least one.
        num_rows: rows over which the bytes of each group's codebook are spread.
    """

    def __init__(self, rows: torch.Tensor, row_bytes: int, sizes: list[int], num_rows: list[int]) -> None:
        self.row_bytes, self.device = row_bytes, rows.device
        self.parts = rows.split([size * row_bytes for size in sizes])
        self.sizes, self.num_rows = np.array(sizes), np.array(num_rows)
        self.counts = torch.stack([torch.ops.ibp.count_bits.default(part, row_bytes) for part in self.parts]).cpu()
        self._thresholds: dict[float, _Masks] = {}

    def best(self, chunk_bytes: int, tau: float | None, paper: bool) -> _Best:
        """For every group the masks of chunks of this size that save most."""
        tried = self.thresholds(TAUS if tau is None else (tau,))
        gains = self.gains(tried, chunk_bytes) if not paper and tau is None else []
        found, savings = self._best_threshold(tried, gains, chunk_bytes, paper)
        if gains:
            # For each chunk the mask that saves most: of the thresholds', of the greedy one, or none.
            greedy = self._greedy(chunk_bytes)
            mask, bitval = np.zeros_like(greedy.mask), np.zeros_like(greedy.mask)
            best = np.zeros_like(gains[0])
            for masks, gain in zip([greedy, *tried], [*self.gains([greedy], chunk_bytes), *gains]):
                better = (gain > best).repeat(chunk_bytes, axis=1)[:, : self.row_bytes]
                best = np.maximum(gain, best)
                mask, bitval = np.where(better, masks.mask, mask), np.where(better, masks.bitval, bitval)
            chosen = _Masks(mask, bitval, greedy.tau)
            of_chosen = self.savings(chosen, chunk_bytes, False)
            found, savings = found.where(savings >= of_chosen, chosen), np.maximum(savings, of_chosen)
        return _Best(found, savings, chunk_bytes, paper)

    def thresholds(self, taus: tuple[float, ...]) -> list[_Masks]:
        """The masks of thresholds, without masks that equal the ones of the threshold before in every group."""
        found: list[_Masks] = []
        for tau in taus:
            if tau not in self._thresholds:
                pairs = [
                    torch.ops.ibp.threshold_bits.default(counts, size, float(tau))
                    for counts, size in zip(self.counts, self.sizes.tolist())
                ]
                mask, bitval = (np.stack([part.numpy() for part in parts]) for parts in zip(*pairs))
                self._thresholds[tau] = _Masks(mask, bitval, np.full(len(pairs), tau))
            if not found or (self._thresholds[tau].mask != found[-1].mask).any():
                found.append(self._thresholds[tau])
        return found

    def _best_threshold(
        self, tried: list[_Masks], gains: list[np.ndarray], chunk_bytes: int, paper: bool
    ) -> tuple[_Masks, np.ndarray]:
        """The paper's choice: one threshold for all chunks, the best of those tried, and what it saves, [K]. With
        gains, only the masks of a group that fix the most bits are compared exactly."""
        ranked = np.tile(np.arange(len(tried))[:, None], (1, len(self.sizes)))
        if gains and len(tried) > _FINALISTS:
            totals = np.stack([gain.sum(1) for gain in gains])
            for at in range(1, len(tried)):  # masks that are the same as of the threshold before are no finalists
                totals[at][(tried[at].mask == tried[at - 1].mask).all(1)] = np.iinfo(np.int64).min
            ranked = np.sort((-totals.astype(np.float64)).argsort(axis=0, kind="stable")[:_FINALISTS], axis=0)
        best, most = None, np.full(len(self.sizes), -np.inf)
        for places in ranked:
            masks = functools.reduce(
                lambda found, at: tried[at].where(places == at, found), np.unique(places)[1:], tried[places.min()]
            )
            savings = self.savings(masks, chunk_bytes, paper)
            best, most = masks if best is None else best.where(most >= savings, masks), np.maximum(most, savings)
        assert best is not None
        return best, most

    def _greedy(self, chunk_bytes: int) -> _Masks:
        pairs = [torch.ops.ibp.choose_masks.default(rows, self.row_bytes, chunk_bytes) for rows in self._few_rows]
        mask, bitval = (np.stack([part.numpy() for part in parts]) for parts in zip(*pairs))
        return _Masks(mask, bitval, np.full(len(pairs), np.nan))

    @functools.cached_property
    def _few_rows(self) -> list[torch.Tensor]:
        """Rows of every group for the greedy choice, on the CPU."""
        most = max(_LEAST_GREEDY_ROWS, _GREEDY_BYTES // self.row_bytes)
        return [_rows.sample(part, self.row_bytes, most).cpu() for part in self.parts]

    def gains(self, tried: list[_Masks], chunk_bytes: int) -> list[np.ndarray]:
        """Bits that each chunk saves over all rows of a group with every one of the masks, participation bits paid:
        int64 [K, chunks]."""
        codec, found = MasksForm(self.row_bytes, chunk_bytes, False).codec(num_flags=0), []
        for masks in tried:
            words = self._words(masks, chunk_bytes, False)
            hits = (
                torch.stack(
                    [torch.ops.ibp.count_hits.default(part, near, codec) for part, near in zip(self.parts, words)]
                )
                .cpu()
                .numpy()
            )
            fixed = self._per_chunk(_BITS_SET[masks.mask], chunk_bytes)
            found.append(hits * fixed - self.sizes[:, None] * (fixed > 0))
        return found

    def savings(self, masks: _Masks, chunk_bytes: int, flag_all: bool) -> np.ndarray:
        """1 - coded / original bytes on the rows of every group, exactly, codebook included: float64 [K]. Rows that
        would grow are raw."""
        fixed = self._per_chunk(_BITS_SET[masks.mask], chunk_bytes)
        num_flags = np.count_nonzero(fixed, axis=1) if not flag_all else np.full(len(fixed), fixed.shape[1])
        form, stored = MasksForm(self.row_bytes, chunk_bytes, flag_all), []
        for part, words, flags in zip(self.parts, self._words(masks, chunk_bytes, flag_all), num_flags.tolist()):
            lengths = torch.ops.ibp.measure_rows.default(part, words, form.codec(flags))
            stored.append(torch.ops.ibp.survey_rows.default(lengths, len(part), self.row_bytes)[0])
        coded = torch.stack(stored).cpu().numpy() / self.sizes
        return 1 - (coded + self._codebook_bytes(masks, chunk_bytes) / self.num_rows) / self.row_bytes

    def _words(self, masks: _Masks, chunk_bytes: int, flag_all: bool) -> torch.Tensor:
        """The working form of every group's masks, int32 [K, 3, words] on the device."""
        pairs = zip(torch.from_numpy(masks.mask), torch.from_numpy(masks.bitval))
        return torch.stack(
            [torch.ops.ibp.codebook_words.default(mask, bitval, chunk_bytes, flag_all) for mask, bitval in pairs]
        ).to(self.device)

    def _per_chunk(self, values: np.ndarray, chunk_bytes: int) -> np.ndarray:
        """Sums over the bytes of each chunk: int64 [K, chunks] of [K, row_bytes]."""
        return np.add.reduceat(values, np.arange(0, self.row_bytes, chunk_bytes), axis=1, dtype=np.int64)

    def _codebook_bytes(self, masks: _Masks, chunk_bytes: int) -> np.ndarray:
        """`nbytes` of every group's codebook: int64 [K]."""
        chunks = -(-self.row_bytes // chunk_bytes)
        padded = np.zeros((2, len(self.sizes), chunks * chunk_bytes), np.uint8)
        padded[:, :, : self.row_bytes] = masks[:2]
        pairs = zip(*padded.view(f"u{chunk_bytes}"))
        return np.array([_palette_bytes(_num_distinct(*pair), chunks, chunk_bytes) for pair in pairs])


def _num_distinct(mask: np.ndarray, bitval: np.ndarray) -> int:
    """How many pairs of two arrays differ."""
    order = np.lexsort((bitval, mask))
    mask, bitval = mask[order], bitval[order]
    return 1 + int(np.count_nonzero((mask[1:] != mask[:-1]) | (bitval[1:] != bitval[:-1])))
