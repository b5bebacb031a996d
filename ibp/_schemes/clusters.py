"""Codebooks for rows of several kinds (the paper's section 6.5; FORMAT.md section 7)."""

from __future__ import annotations

import torch

from .masks import learning as analysis
from .masks.codebook import Codebook
from .planes import PlanesCodebook, relearn

MAX_CLUSTERS = 256
_STEPS = (2, 4, 8, 16, 32, 64)  # numbers of clusters that "auto" tries
_SAMPLE_BITS = 1 << 26  # of the rows that k-means looks at
_KMEANS_ROUNDS, _COST_ROUNDS = 8, 2
_MOST_SEEDS = 1 << 16  # rows that k-means may start from


class ClusteredCodebook:
    """Two to 256 codebooks of one scheme; every coded row begins with the number of its own.

    Made by `ibp.compress(..., clusters=)` or from its parts. Immutable.

    Attributes:
        codebooks: tuple of `Codebook` with equal chunk_bytes and flag_all, or of `PlanesCodebook` that differ in their entries only.
        expected_savings: 1 - coded / original bytes on the rows that were analysed, codebooks included; None if not learned.

    Raises:
        ValueError: the codebooks do not fit each other.
    """

    def __init__(self, codebooks, expected_savings=None):
        if not hasattr(codebooks, "__iter__"):
            raise ValueError(f"codebooks is a {type(codebooks).__name__}; wanted a tuple of codebooks")
        if expected_savings is not None and not isinstance(expected_savings, float):
            raise ValueError(f"expected_savings is {expected_savings!r}; wanted a float or None")
        self.codebooks = tuple(codebooks)
        self.expected_savings = expected_savings
        self._check()
        self._words = {}

    @property
    def scheme(self) -> str:
        return self.codebooks[0].scheme

    @property
    def row_bytes(self) -> int:
        return self.codebooks[0].row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all codebooks as stored."""
        return sum(codebook.nbytes for codebook in self.codebooks)

    @property
    def codec(self) -> list[int]:
        """What the operations want to know besides the words: as of the first codebook."""
        return self.codebooks[0].codec

    def words(self, device: torch.device) -> torch.Tensor:
        """The working form of all codebooks, one after the other; kept once made."""
        if device not in self._words:
            self._words[device] = torch.cat([_words_of(codebook) for codebook in self.codebooks]).to(device)
        return self._words[device]

    def __len__(self) -> int:
        return len(self.codebooks)

    def _check(self):
        if not 2 <= len(self.codebooks) <= MAX_CLUSTERS:
            raise ValueError(f"there are {len(self.codebooks)} codebooks; wanted 2 to {MAX_CLUSTERS}")
        first = self.codebooks[0]
        for codebook in self.codebooks:
            if not isinstance(codebook, (Codebook, PlanesCodebook)) or "row_bytes" not in vars(codebook):
                raise ValueError(f"there is a {type(codebook).__name__} among the codebooks; wanted finished ibp.Codebook or ibp.PlanesCodebook")
            if _common(codebook) != _common(first):
                raise ValueError(f"the codebooks {first!r} and {codebook!r} do not fit each other")
        if isinstance(first, PlanesCodebook) and first.num_entries == 0:
            raise ValueError("codebooks without entries cannot differ")

    def __getstate__(self):
        return {"codebooks": self.codebooks, "expected_savings": self.expected_savings}

    def __setstate__(self, state):
        if not isinstance(state, dict) or set(state) != {"codebooks", "expected_savings"}:
            raise ValueError("the state of a ClusteredCodebook has not just the fields codebooks and expected_savings")
        self.__init__(**state)

    def __eq__(self, other):
        return self.codebooks == other.codebooks if isinstance(other, ClusteredCodebook) else NotImplemented

    def __hash__(self):
        return hash(self.codebooks)

    def __repr__(self):
        savings = "" if self.expected_savings is None else f", expected_savings={self.expected_savings:.1%}"
        return f"ibp.ClusteredCodebook({len(self)} of {self.codebooks[0]!r} and others, nbytes={self.nbytes}{savings})"


def _common(codebook):
    """What all codebooks of a table share."""
    if isinstance(codebook, Codebook):
        return codebook.row_bytes, codebook.chunk_bytes, codebook.flag_all
    return type(codebook), tuple(codebook.codec), codebook.per_column


def _words_of(codebook):
    words = codebook.words(torch.device("cpu")).reshape(-1)
    if isinstance(codebook, PlanesCodebook):
        return words
    return torch.cat([words, torch.tensor([codebook.num_flags, 0, 0, 0], dtype=torch.int32)])


def check_clusters(clusters: int | str | None) -> None:
    if clusters is not None and clusters != "auto" and (type(clusters) is not int or not 1 <= clusters <= MAX_CLUSTERS):
        raise ValueError(f"clusters is {clusters!r}; wanted 1 to {MAX_CLUSTERS}, 'auto' or None")


def learn_clusters(codebook: Codebook | PlanesCodebook, rows: torch.Tensor, num_rows: int, clusters: int | str, tau: float | None = None) -> Codebook | PlanesCodebook | ClusteredCodebook:
    """Splits a table's codebook into one for each cluster of its rows: k-means over rows with Hamming distance, then by coded size.

    Args:
        codebook: learned from all rows; the clusters' codebooks keep its form.
        rows: uint8 [n * row_bytes], a sample of whole rows on the working device.
        num_rows: rows of the whole table, over which the codebooks' own bytes are spread.
        clusters: how many; "auto": doubled for as long as the net saving grows.
        tau: the threshold that was asked for in scheme ibp; None: every cluster finds its own.

    Returns:
        The codebooks, or `codebook` itself where more than one does not pay.
    """
    learned, compared = _halves(rows, codebook.row_bytes, num_rows)
    best, least = codebook, _cost(codebook, compared, num_rows)
    for count in _STEPS if clusters == "auto" else (clusters,):
        found = _with_count(codebook, learned, num_rows, count, tau)
        if found is None:
            break
        cost = _cost(found, compared, num_rows)
        if clusters == "auto" and cost >= least:
            break
        if cost < least:
            best, least = found, cost
    return best


def _halves(rows, row_bytes, num_rows):
    """Rows to learn on and others, drawn at random, to compare on; the same, if they are the whole table but for a short last row."""
    table = rows.view(-1, row_bytes)
    if len(table) >= num_rows - 1 or len(table) < 2:
        return rows, rows
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0)).to(table.device)
    return table[order[::2].sort().values].reshape(-1), table[order[1::2].sort().values].reshape(-1)


def _cost(codebook, rows, num_rows):
    """Bytes of a mean row with its share of the codebook, on the sample."""
    num_sampled = rows.numel() // codebook.row_bytes
    stored = _stored(codebook, rows).sum().item() / num_sampled
    return stored + codebook.nbytes / num_rows


def _stored(codebook, rows):
    lengths = analysis.measure(rows, codebook, rows.device).to(torch.int64)
    return torch.where(lengths == 0, codebook.row_bytes, lengths)


def _with_count(codebook, rows, num_rows, count, tau):
    """A codebook with at most `count` clusters, or None if the rows do not fall apart."""
    if isinstance(codebook, PlanesCodebook) and codebook.num_entries == 0:
        return None
    table = rows.view(-1, codebook.row_bytes)
    assigned = _kmeans(table, count)
    codebooks = _relearned(codebook, table, assigned, tau)
    for _ in range(_COST_ROUNDS):  # to the codebook that codes a row best, then again from the rows that came together
        if len(codebooks) < 2:
            return None
        assigned = torch.stack([_stored(one, rows) for one in codebooks]).argmin(0).to(rows.device)
        codebooks = _relearned(codebook, table, assigned, tau)
    if len(codebooks) < 2:
        return None
    found = ClusteredCodebook(codebooks)
    found.expected_savings = 1 - _cost(found, rows, num_rows) / codebook.row_bytes
    return found


def _relearned(codebook, table, assigned, tau):
    """A codebook of the same form for the rows of each cluster."""
    found = []
    for k in assigned.unique().tolist():
        rows = table[assigned == k].reshape(-1)
        if isinstance(codebook, PlanesCodebook):
            found.append(relearn(codebook, rows))
        else:
            found.append(analysis.learn(rows, codebook.row_bytes, len(rows) // codebook.row_bytes, rows.device, codebook.chunk_bytes, tau, codebook.flag_all))
    return found


def _kmeans(table, count):
    """The cluster of each row, int64 [n]: Lloyd's iteration on the rows' bits, from seeds that are far apart."""
    most_bytes = max(1, _SAMPLE_BITS // (8 * len(table)))
    columns = table if table.shape[1] <= most_bytes else table[:, :: -(-table.shape[1] // most_bytes)]
    shifts = torch.arange(8, dtype=torch.uint8, device=table.device)
    bits = ((columns.unsqueeze(2) >> shifts) & 1).reshape(len(table), -1).to(torch.float32)
    centres = _far_seeds(bits, count)
    for _ in range(_KMEANS_ROUNDS):
        assigned = _distances(bits, centres).argmin(1)
        sums = torch.zeros(len(centres), bits.shape[1], device=bits.device).index_add_(0, assigned, bits)
        sizes = torch.bincount(assigned, minlength=len(centres)).unsqueeze(1)
        moved = torch.where(sizes > 0, (2 * sums > sizes).to(torch.float32), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return assigned


def _distances(bits, centres):
    """Hamming distances, float32 [rows, centres]."""
    return bits.sum(1, keepdim=True) + centres.sum(1) - 2 * bits @ centres.t()


def _far_seeds(bits, count):
    """Rows to start from, each drawn with a probability that grows with its distance to those before (k-means++), seeded."""
    generator = torch.Generator().manual_seed(0)
    bits = bits[:: -(-len(bits) // _MOST_SEEDS)]
    chosen = [int(torch.randint(len(bits), (1,), generator=generator))]
    nearest = _distances(bits, bits[chosen]).squeeze(1)
    while len(chosen) < min(count, len(bits)) and float(nearest.max()) > 0:
        weights = nearest.clamp(min=0).double().square().cpu()
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
        nearest = torch.minimum(nearest, _distances(bits, bits[chosen[-1:]]).squeeze(1))
    return bits[chosen]


torch.serialization.add_safe_globals([ClusteredCodebook])
