"""Which bits are invariant: codebooks of scheme ibp learned from rows (the paper's sections 4.1 and 6.1)."""

from __future__ import annotations

import functools

import torch
from tqdm import tqdm

from ... import _rows
from ..request import Request
from ..sizes import measure, total_stored
from .codebook import CHUNK_BYTES, Codebook, MasksForm, check_chunk_bytes

TAUS = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
_GREEDY_BYTES, _LEAST_GREEDY_ROWS = 2 << 20, 256  # what the greedy choice of masks looks at
_FINALISTS = 3  # thresholds for all chunks that are compared exactly
_BITS_SET = torch.tensor([bin(byte).count("1") for byte in range(256)])


def check_tau(tau: float) -> None:
    """Raises ValueError for a threshold that is none."""
    if not 0.5 <= tau <= 1:
        raise ValueError(f"tau is {tau}; wanted 0.5 to 1, or None to sweep")


def learn(request: Request) -> Codebook:
    """The best codebook of scheme ibp for a table."""
    return _learn(request.rows, request.geometry.row_bytes, request.geometry.num_rows, request.device, request.chunk_bytes, request.tau, request.paper,
                  request.progress)


def relearn(codebook: Codebook, rows: torch.Tensor, sizes: list[int], tau: float | None) -> list[Codebook]:
    """Codebooks of the same form as another, one for each group of rows.

    Args:
        codebook: gives the form.
        rows: uint8 [n * row_bytes], whole rows, those of each group next to each other.
        sizes: rows of each group, at least one.
        tau: a threshold for all chunks; None: each group finds the best ones.
    """
    parts = rows.split([size * codebook.row_bytes for size in sizes])
    return [_learn(part, codebook.row_bytes, size, rows.device, codebook.chunk_bytes, tau, codebook.flag_all) for part, size in zip(parts, sizes)]


def _learn(rows: torch.Tensor, row_bytes: int, num_rows: int, device: torch.device, chunk_bytes: int | None = None, tau: float | None = None,
          paper: bool = False, progress: bool = False) -> Codebook:
    """The best codebook of scheme ibp for a table, from a sample of its rows; other arguments as `analyze`.

    Args:
        rows: uint8 [n * row_bytes], whole rows; none at all for a table without rows.
        num_rows: rows of the whole table, over which the codebook's own bytes are spread.
        device: where the work is done.
    """
    if rows.numel() == 0:
        nothing = torch.zeros(row_bytes, dtype=torch.uint8)
        return Codebook.from_masks(nothing, nothing, 4)
    sweep = _Sweep(rows, row_bytes, num_rows, device)
    sizes = CHUNK_BYTES if chunk_bytes is None else (chunk_bytes,)
    taus = TAUS if tau is None else (tau,)
    found = []
    for size in tqdm(sizes, desc="analyze", unit="chunk size", disable=not progress):
        found.append(sweep.with_one_threshold(size, taus, paper))
        if not paper and tau is None:
            found.append(sweep.with_best_masks(size))
    return max(found, key=lambda codebook: codebook.expected_savings)


class _Sweep:
    """Thresholds and chunk sizes tried on the same sampled rows."""

    def __init__(self, data, row_bytes, num_rows, device):
        self.data, self.row_bytes, self.num_rows, self.device = data, row_bytes, num_rows, device
        self.num_sampled = data.numel() // row_bytes
        self.counts = sum(torch.ops.ibp.count_bits(block, row_bytes) for block in self._blocks()).cpu()
        self._thresholds, self._kept_gains = {}, {}

    def _blocks(self):
        return (block for _, _, block in _rows.blocks(self.data, self.row_bytes, self.device))

    def thresholds(self, taus):
        """[(tau, mask, bitval)] of the thresholds that give different masks."""
        if taus not in self._thresholds:
            found = self._thresholds[taus] = []
            for tau in taus:
                mask, bitval = torch.ops.ibp.threshold_bits(self.counts, self.num_sampled, float(tau))
                if not found or not torch.equal(mask, found[-1][1]):
                    found.append((tau, mask, bitval))
        return self._thresholds[taus]

    def with_one_threshold(self, chunk_bytes, taus, paper):
        """The paper's choice: one threshold for all chunks, the best of those given; only those that fix the most bits are compared exactly."""
        tried = self.thresholds(taus)
        if not paper and len(tried) > _FINALISTS:
            gains = [int(gain.sum()) for gain in self._gains(taus, chunk_bytes)]
            tried = [tried[i] for i in sorted(sorted(range(len(tried)), key=lambda i: -gains[i])[:_FINALISTS])]
        found = [self._codebook(mask, bitval, chunk_bytes, paper, tau) for tau, mask, bitval in tried]
        return max(found, key=lambda codebook: codebook.expected_savings)

    def with_best_masks(self, chunk_bytes):
        """For each chunk the mask that saves most: of the thresholds', of the greedy one, or none."""
        best_mask = torch.zeros(self.row_bytes, dtype=torch.uint8)
        best_bitval, best_gain = best_mask.clone(), self._per_chunk(best_mask, chunk_bytes)
        greedy = torch.ops.ibp.choose_masks(self._few_rows, self.row_bytes, chunk_bytes)
        tried = [(*greedy, *self._gains_of([greedy], chunk_bytes))]
        tried += [(mask, bitval, gain) for (_, mask, bitval), gain in zip(self.thresholds(TAUS), self._gains(TAUS, chunk_bytes))]
        for mask, bitval, gain in tried:
            better = (gain > best_gain).repeat_interleave(chunk_bytes)[: self.row_bytes]
            best_gain = torch.maximum(gain, best_gain)
            best_mask, best_bitval = torch.where(better, mask, best_mask), torch.where(better, bitval, best_bitval)
        return self._codebook(best_mask, best_bitval, chunk_bytes, False, None)

    @functools.cached_property
    def _few_rows(self):
        """Rows for the greedy choice, evenly spread over the sample, on the CPU."""
        step = -(-self.num_sampled // max(_LEAST_GREEDY_ROWS, _GREEDY_BYTES // self.row_bytes))
        return self.data.view(self.num_sampled, self.row_bytes)[::step].reshape(-1).contiguous().cpu()

    def _per_chunk(self, mask, chunk_bytes):
        """Bits set in each chunk of a mask."""
        padded = torch.zeros(-(-self.row_bytes // chunk_bytes) * chunk_bytes, dtype=torch.int64)
        padded[: self.row_bytes] = _BITS_SET[mask.to(torch.int64)]
        return padded.view(-1, chunk_bytes).sum(1)

    def _gains(self, taus, chunk_bytes):
        """_gains_of the thresholds' masks; kept."""
        if (taus, chunk_bytes) not in self._kept_gains:
            self._kept_gains[taus, chunk_bytes] = self._gains_of([(mask, bitval) for _, mask, bitval in self.thresholds(taus)], chunk_bytes)
        return self._kept_gains[taus, chunk_bytes]

    def _gains_of(self, masks, chunk_bytes):
        """Bits that each chunk saves over all sampled rows with every (mask, bitval), participation bits paid: brought to the CPU at once."""
        words = [torch.ops.ibp.codebook_words(mask, bitval, chunk_bytes, False) for mask, bitval in masks]
        near, codec = torch.stack(words).to(self.device), MasksForm(self.row_bytes, chunk_bytes, False).codec(num_flags=0)
        hits = torch.zeros(len(masks), -(-self.row_bytes // chunk_bytes), dtype=torch.int64, device=self.device)
        for block in self._blocks():
            for i in range(len(masks)):
                hits[i] += torch.ops.ibp.count_hits(block, near[i], codec)
        fixed = [self._per_chunk(mask, chunk_bytes) for mask, _ in masks]
        return [found * bits - self.num_sampled * (bits > 0) for found, bits in zip(hits.cpu(), fixed)]

    def _codebook(self, mask, bitval, chunk_bytes, flag_all, tau):
        codebook = Codebook.from_masks(mask, bitval, chunk_bytes, flag_all, tau=tau)
        return codebook.with_savings(self._savings(codebook))

    def _savings(self, codebook):
        """Exact, on the sampled rows: rows are rounded to bytes, and those that would grow are raw."""
        sampled = _rows.Geometry(torch.Size((self.num_sampled, self.row_bytes)), torch.uint8, self.row_bytes)
        coded = total_stored(measure(self.data, codebook, self.device), sampled) / self.num_sampled
        return 1 - (coded + codebook.nbytes / self.num_rows) / self.row_bytes
