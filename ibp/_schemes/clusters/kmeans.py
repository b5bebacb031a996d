"""Rows that are like each other: k-means over the bits of rows with Hamming distance (the paper's section 6.5)."""

from __future__ import annotations

import torch

from ..._layout.geometry import sampled

# Of the rows that k-means looks at, for up to 64 clusters; for more, fewer, so that time grows no further with their
# number. 256 MiB as float32.
_SAMPLE_BITS, _FULL_SAMPLE_CLUSTERS = 1 << 26, 64
_ROUNDS = 8
_MOST_SEEDS = 1 << 16  # rows that it may start from: torch.multinomial takes at most 2^24


def kmeans(table: torch.Tensor, count: int) -> torch.Tensor:
    """The cluster of each row, int64 [n]: Lloyd's iteration on the rows' bits, from seeds that are far apart, until it
    is settled. table: uint8 [n, row_bytes]; count: clusters, at most."""
    most_bits = _SAMPLE_BITS * _FULL_SAMPLE_CLUSTERS // max(_FULL_SAMPLE_CLUSTERS, count)
    most_bytes = max(1, most_bits // (8 * len(table)))
    columns = table if table.shape[1] <= most_bytes else table[:, :: -(-table.shape[1] // most_bytes)]
    shifts = torch.arange(8, dtype=torch.uint8, device=table.device)
    bits = ((columns.unsqueeze(2) >> shifts) & 1).reshape(len(table), -1).to(torch.float32)
    norms = bits.sum(1)
    centres = _far_seeds(bits, norms, count)
    for _ in range(_ROUNDS):
        assigned = _distances(bits, norms, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, assigned, bits)
        sizes = torch.bincount(assigned, minlength=len(centres)).unsqueeze(1)
        moved = torch.where(sizes > 0, (2 * sums > sizes).to(torch.float32), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return assigned


def _distances(bits: torch.Tensor, norms: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Hamming distances, float32 [rows, centres]; norms: how many bits of each row are 1."""
    return (bits @ centres.t()).mul_(-2).add_(norms[:, None]).add_(centres.sum(1))


def _far_seeds(bits: torch.Tensor, norms: torch.Tensor, count: int) -> torch.Tensor:
    """Rows to start from, each drawn with a probability that grows with its distance to those before (k-means++),
    seeded."""
    generator = torch.Generator().manual_seed(0)
    if len(bits) > _MOST_SEEDS:
        some = sampled(len(bits), _MOST_SEEDS).to(bits.device)
        bits, norms = bits[some], norms[some]
    chosen = [int(torch.randint(len(bits), (1,), generator=generator, device="cpu"))]
    nearest = _distances(bits, norms, bits[chosen]).squeeze(1)
    while len(chosen) < min(count, len(bits)) and float(nearest.max()) > 0:
        weights = nearest.clamp(min=0).double().square().cpu()
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
        nearest = torch.minimum(nearest, _distances(bits, norms, bits[chosen[-1:]]).squeeze(1))
    return bits[chosen]
