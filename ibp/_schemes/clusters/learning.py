"""Learning one codebook for each kind of rows: k-means, then by the bytes that rows take (the paper's section 6.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._layout import slots
from ..codebook import AnyCodebook
from ..registry import SCHEMES
from ..request import Request
from ..sizes import measure
from .codebook import MAX_CLUSTERS, ClusteredCodebook
from .kmeans import kmeans

_STEPS = (2, 4, 8, 16, 32, 64)  # numbers of clusters that "auto" tries
_COST_ROUNDS = 2  # in which rows move to the codebook that codes them best


def check_clusters(clusters: int | str | None) -> None:
    """Raises ValueError for a number of clusters that is none."""
    if clusters is not None and clusters != "auto" and (type(clusters) is not int or not 1 <= clusters <= MAX_CLUSTERS):
        raise ValueError(f"clusters is {clusters!r}; wanted 1 to {MAX_CLUSTERS}, 'auto' or None")


def learn(scheme: str, request: Request) -> AnyCodebook | None:
    """A codebook of a scheme for a table, or one for each of the clusters asked for, if they pay; None for raw rows."""
    codebook = SCHEMES[scheme].learn(request)
    if codebook is None or request.options.clusters in (None, 1) or request.geometry.num_rows < 2:
        return codebook
    return split(codebook, request)


def split(codebook: AnyCodebook, request: Request) -> AnyCodebook:
    """Divides a table's codebook into one for each cluster of its rows; itself where more than one does not pay.
    codebook: learned from all rows; the clusters' codebooks keep its form; request: with clusters, a number, or "auto":
    doubled for as long as the net saving grows."""
    num_rows, is_auto = request.geometry.num_rows, request.options.clusters == "auto"
    learned, compared = _halves(request.few_rows.view(-1, codebook.row_bytes), num_rows)
    best, least = codebook, _cost(codebook, compared, num_rows)
    for count in _STEPS if is_auto else (int(request.options.clusters or 1),):
        found = _with_count(codebook, learned, count, request)
        if found is None:
            break
        cost = _cost(found, compared, num_rows)
        if is_auto and cost >= least:
            break
        if cost < least:
            best, least = found, cost
    return best


def _halves(table: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to learn on and others, drawn at random, to compare on; the same, if they are the whole table but for a
    short last row."""
    if len(table) >= num_rows - 1 or len(table) < 2:
        return table, table
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0), device="cpu").to(table.device)
    return table[order[::2].sort().values], table[order[1::2].sort().values]


def _cost(codebook: AnyCodebook, table: torch.Tensor, num_rows: int) -> float:
    """Bytes of a mean row of the table [n, row_bytes] with its share of the codebook."""
    return int(_stored(codebook, table).sum()) / len(table) + codebook.nbytes / num_rows


def _stored(codebook: AnyCodebook, table: torch.Tensor) -> torch.Tensor:
    """Bytes of every row as stored: int64 [n]."""
    lengths = measure(table.reshape(-1), codebook, table.device)
    return slots.stored_sizes(lengths, codebook.row_bytes, codebook.row_bytes)


def _with_count(codebook: AnyCodebook, table: torch.Tensor, count: int, request: Request) -> ClusteredCodebook | None:
    """A codebook with at most `count` clusters, or None if the rows do not fall apart."""
    if not codebook.can_differ:
        return None
    assigned = kmeans(
        table, min(count, max(2, len(table) // 2))
    )  # a codebook for one row takes more bytes than the row
    codebooks = _relearned(codebook, table, assigned, request)
    for _ in range(_COST_ROUNDS):
        if len(codebooks) < 2:
            return None
        moved = _cheapest(codebooks, table)
        if torch.equal(moved, assigned):
            break
        assigned, codebooks = moved, _relearned(codebook, table, moved, request)
    if len(codebooks) < 2:
        return None
    found = ClusteredCodebook(codebooks)
    return found.with_savings(1 - _cost(found, table, request.geometry.num_rows) / codebook.row_bytes)


def _cheapest(codebooks: Sequence[AnyCodebook], table: torch.Tensor) -> torch.Tensor:
    """The codebook that codes each row in the fewest bytes, the first of equal ones: int64 [n]."""
    least = _stored(codebooks[0], table)
    assigned = torch.zeros_like(least)
    for k, codebook in enumerate(codebooks[1:], 1):
        stored = _stored(codebook, table)
        assigned.masked_fill_(stored < least, k)
        torch.minimum(least, stored, out=least)
    return assigned


def _relearned(
    codebook: AnyCodebook, table: torch.Tensor, assigned: torch.Tensor, request: Request
) -> Sequence[AnyCodebook]:
    """A codebook of the same form for the rows of each cluster that has any."""
    relearn = SCHEMES[codebook.scheme].relearn
    assert relearn is not None, f"scheme {codebook.scheme} has codebooks but does not say how to learn them again"
    sizes = [size for size in torch.bincount(assigned).tolist() if size]
    rows = table[assigned.argsort(stable=True)].reshape(-1)
    return relearn(codebook, rows, sizes, request.options)
