"""Defines codebooks for tables with rows of several kinds (the paper's section 6.5; FORMAT.md section 7). A clustered
codebook holds a codebook for each cluster of similar rows.

The second half of the file learns clustered codebooks. k-means finds the clusters; then each row moves to the cluster
whose codebook codes it in the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from .codebook import AnyCodebook, checked_savings, measure, public
from .geometry import sampled, stored_sizes

MAX_CLUSTERS = 256


@public
class ClusteredCodebook(AnyCodebook):
    """Two to 256 codebooks of one scheme. Every coded row begins with the number of the codebook that codes it.

    Clustered codebooks are made by `ibp.compress(..., clusters=)`, or by the constructor. They cannot be changed.

    Example:
        >>> x = torch.randn(200, 1024).bfloat16()
        >>> x[100:] *= 0.001
        >>> codebook = ibp.compress(x, scheme="planes", clusters=2, device="cpu").codebook
        >>> type(codebook).__name__, len(codebook.codebooks)
        ('ClusteredCodebook', 2)

    Attributes:
        codebooks: a tuple of `Codebook` objects with equal row_bytes, chunk_bytes and flag_all, or of `PlanesCodebook`
            objects that differ only in their entries.
        expected_savings: 1 - coded / original bytes on the rows that were analysed. The coded bytes include the
            codebooks. None if the codebooks were not learned.

    Raises:
        ValueError: the codebooks cannot be combined.
    """

    _fields = ("codebooks", "expected_savings")

    codebooks: tuple[AnyCodebook, ...]
    expected_savings: float | None

    def __init__(self, codebooks: Iterable[AnyCodebook], expected_savings: float | None = None) -> None:
        if not hasattr(codebooks, "__iter__"):
            raise ValueError(f"codebooks is a {type(codebooks).__name__}; wanted a tuple of codebooks")
        codebooks = tuple(codebooks)
        if not 2 <= len(codebooks) <= MAX_CLUSTERS:
            raise ValueError(f"there are {len(codebooks)} codebooks; wanted 2 to {MAX_CLUSTERS}")
        first = codebooks[0]
        for codebook in codebooks:
            if (
                not isinstance(codebook, AnyCodebook)
                or isinstance(codebook, ClusteredCodebook)
                or not codebook.is_finished
            ):
                raise ValueError(
                    f"there is a {type(codebook).__name__} among the codebooks; wanted finished codebooks, "
                    "each of one cluster"
                )
            if type(codebook) is not type(first) or codebook.form != first.form:
                raise ValueError(f"the codebooks {first!r} and {codebook!r} do not fit each other")
        if not first.can_differ:
            raise ValueError(f"codebooks like {first!r} cannot differ")
        words = torch.cat([first.shared_words, *(codebook.cluster_words for codebook in codebooks)])
        self._finish(words, codebooks=codebooks, expected_savings=checked_savings(expected_savings))

    @property
    def scheme(self) -> str:  # type: ignore[override]
        return self.codebooks[0].scheme

    @property
    def row_bytes(self) -> int:  # type: ignore[override]
        return self.codebooks[0].row_bytes

    @property
    def form(self) -> Hashable:
        return self.codebooks[0].form

    @property
    def is_partial(self) -> bool:
        return self.codebooks[0].is_partial

    @property
    def can_differ(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Size in bytes of all codebooks as stored."""
        return sum(codebook.nbytes for codebook in self.codebooks)

    @property
    def codec(self) -> list[int]:
        """The `codec` of the first codebook. The operations take it together with the words of all clusters."""
        return self.codebooks[0].codec

    @property
    def _coder(self) -> str:
        return self.codebooks[0]._coder

    def _work(self, row_bytes: int, stored_bytes: float) -> float:
        return self.codebooks[0]._work(row_bytes, stored_bytes)

    @property
    def cluster_words(self) -> torch.Tensor:
        raise TypeError("clusters have no clusters")

    def __len__(self) -> int:
        return len(self.codebooks)

    def _description(self) -> list[str]:
        return [f"{len(self)} of {self.codebooks[0]!r} and others", f"nbytes={self.nbytes}"]


def with_clusters(codebook: AnyCodebook | None) -> list[AnyCodebook]:
    """Returns a list of the codebook itself and, if it is clustered, the codebooks of its clusters. For None, returns
    an empty list."""
    if codebook is None:
        return []
    return [codebook, *codebook.codebooks] if isinstance(codebook, ClusteredCodebook) else [codebook]


# ---- learning --------------------------------------------------------------------------------------------------------

_STEPS = (2, 4, 8, 16, 32, 64)  # The numbers of clusters that "auto" tries, in this order.
_COST_ROUNDS = 2  # Largest number of rounds in which rows move to the codebook that codes them in the fewest bytes.
# A function that takes (rows, sizes) and returns codebooks of one form, one for each group of rows. rows is uint8
# [n * row_bytes], with the rows of a group next to each other; sizes[i] is the number of rows in group i.
Relearn = Callable[[torch.Tensor, list[int]], Sequence[AnyCodebook]]


def check_clusters(clusters: int | str | None) -> None:
    """Raises ValueError unless clusters is a number of clusters, "auto" or None."""
    if clusters is not None and clusters != "auto" and (type(clusters) is not int or not 1 <= clusters <= MAX_CLUSTERS):
        raise ValueError(f"clusters is {clusters!r}; wanted 1 to {MAX_CLUSTERS}, 'auto' or None")


def split(
    codebook: AnyCodebook, rows: torch.Tensor, num_rows: int, clusters: int | str, relearn: Relearn
) -> AnyCodebook:
    """Divides a table's rows into clusters. Returns a clustered codebook, or the given codebook if clusters do not save
    more than their codebooks take.

    Args:
        codebook: a codebook that was learned from rows of all kinds. The codebooks of the clusters get its form.
        rows: uint8 [n * row_bytes], a sample of whole rows.
        num_rows: number of rows of the table.
        clusters: the largest number of clusters. "auto" doubles the number as long as the net savings grow.
        relearn: a function that learns the codebooks of the clusters.
    """
    is_auto = clusters == "auto"
    learned, compared = _halves(rows.view(-1, codebook.row_bytes), num_rows)
    best, least = codebook, _cost(codebook, compared, num_rows)
    for count in _STEPS if is_auto else (int(clusters),):
        found = _with_count(codebook, learned, count, num_rows, relearn)
        if found is None:
            break
        cost = _cost(found, compared, num_rows)
        if is_auto and cost >= least:
            break
        if cost < least:
            best, least = found, cost
    return best


def _halves(table: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides sampled rows at random into two halves. Returns (rows to learn codebooks from, rows to compare codebooks
    on). If the sample has fewer than two rows, or is the whole table (a short last row may be missing), it is not
    divided: both results are the whole sample."""
    if len(table) >= num_rows - 1 or len(table) < 2:
        return table, table
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0), device="cpu").to(table.device)
    return table[order[::2].sort().values], table[order[1::2].sort().values]


def _cost(codebook: AnyCodebook, table: torch.Tensor, num_rows: int) -> float:
    """Returns the mean size in bytes of a stored row, plus the size of the codebook divided by num_rows. table: the
    rows, uint8 [n, row_bytes]."""
    return int(_stored(codebook, table).sum()) / len(table) + codebook.nbytes / num_rows


def _stored(codebook: AnyCodebook, table: torch.Tensor) -> torch.Tensor:
    """Returns the size in bytes of every stored row: int64 [n]. table: the rows, uint8 [n, row_bytes]."""
    lengths = measure(table.reshape(-1), codebook, table.device)
    return stored_sizes(lengths, codebook.row_bytes, codebook.row_bytes)


def _with_count(
    codebook: AnyCodebook, table: torch.Tensor, count: int, num_rows: int, relearn: Relearn
) -> ClusteredCodebook | None:
    """Learns a clustered codebook with at most `count` clusters. Returns None if all rows end up in one cluster, or if
    codebooks of this form cannot differ."""
    if not codebook.can_differ:
        return None
    most = max(2, len(table) // 2)  # A codebook for one row takes more bytes than the row.
    assigned = kmeans(table, min(count, most))
    codebooks = _relearned(table, assigned, relearn)
    for _ in range(_COST_ROUNDS):
        if len(codebooks) < 2:
            return None
        moved = _cheapest(codebooks, table)
        if torch.equal(moved, assigned):
            break
        assigned, codebooks = moved, _relearned(table, moved, relearn)
    if len(codebooks) < 2:
        return None
    found = ClusteredCodebook(codebooks)
    return found.with_savings(1 - _cost(found, table, num_rows) / codebook.row_bytes)


def _cheapest(codebooks: Sequence[AnyCodebook], table: torch.Tensor) -> torch.Tensor:
    """Returns, for each row, the index of the codebook that codes it in the fewest bytes: int64 [n]. Ties go to the
    first codebook."""
    least = _stored(codebooks[0], table)
    assigned = torch.zeros_like(least)
    for k, codebook in enumerate(codebooks[1:], 1):
        stored = _stored(codebook, table)
        assigned.masked_fill_(stored < least, k)
        torch.minimum(least, stored, out=least)
    return assigned


def _relearned(table: torch.Tensor, assigned: torch.Tensor, relearn: Relearn) -> Sequence[AnyCodebook]:
    """Learns a codebook for each cluster that has rows. assigned: the cluster of each row, int64 [n]."""
    sizes = [size for size in torch.bincount(assigned).tolist() if size]
    return relearn(table[assigned.argsort(stable=True)].reshape(-1), sizes)


# ---- k-means ---------------------------------------------------------------------------------------------------------

# For up to _FULL_SAMPLE_CLUSTERS clusters, k-means looks at no more than _SAMPLE_BITS bits of the rows, which take
# 256 MiB as float32. For more clusters it looks at fewer bits, so that its time does not grow with the number of
# clusters.
_SAMPLE_BITS, _FULL_SAMPLE_CLUSTERS = 1 << 26, 64
_ROUNDS = 8  # Largest number of iterations of k-means.
# Largest number of rows from which the first centres are drawn. (The limit of torch.multinomial is 2^24.)
_MOST_SEEDS = 1 << 16


def kmeans(table: torch.Tensor, count: int) -> torch.Tensor:
    """Divides rows into clusters by the Hamming distances of their bits. Returns the cluster of each row, int64 [n].
    Lloyd's iteration begins with seeds that are far apart, and ends when no centre moves, or after _ROUNDS rounds.

    Args:
        table: uint8 [n, row_bytes].
        count: the largest number of clusters.
    """
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
    """Returns the Hamming distance of each row to each centre, float32 [rows, centres]. norms: the number of ones in
    each row."""
    return (bits @ centres.t()).mul_(-2).add_(norms[:, None]).add_(centres.sum(1))


def _far_seeds(bits: torch.Tensor, norms: torch.Tensor, count: int) -> torch.Tensor:
    """Draws at most `count` rows as the first centres (k-means++). The probability of a row is proportional to the
    square of its distance to the nearest row that is already drawn. The random generator has a fixed seed."""
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
