"""`RowsModule`, the base of modules with trainable rows. In each call, a module looks up every row that it needs once.
Autograd computes a gradient of these rows, and an optimizer of `ibp.optim` writes changed rows back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .._common.modes import outside_of_graphs
from .._common.process import warn_once
from .._fetch.bags import embedding_bag
from .._fetch.calls import checked_ids, list_of_ids
from .._tables.changes import check_rows, put_items
from .._tables.compressed_tensor import CompressedTensor
from ..cache import RowCache
from ._tables import TableModule

# Number of gradients that are collected before they are added up. Adding each gradient at once would cost a pass over
# the whole sum.
_MOST_KEPT = 64
_MOST_UNREAD = 64  # A warning is given after this many backward passes whose gradients no optimizer has read.


class RowGradient(NamedTuple):
    """The gradient of some rows of a table."""

    ids: torch.Tensor  # int64 [U], the numbers of the rows, in increasing order
    rows: torch.Tensor  # [U, D], the values of the rows
    grad: torch.Tensor  # [U, D]
    num_writes: int  # the module's count of writes when the rows were looked up


class LookedUp(NamedTuple):
    """The rows that the ids of a call name, each row once."""

    rows: torch.Tensor  # [U, D]; if the module trains, autograd gives it a gradient
    places: torch.Tensor  # int64, in the shape of the call's ids: for each id, the index of its row in `rows`
    padding: int | None  # index in `rows` of row padding_idx; None: there is no padding row


class RowsModule(TableModule):
    """A module with a table [num_embeddings, embedding_dim], whose rows are looked up by ids and can be trained.

    Attributes:
        cache: the cache through which rows are read and written. None: the table itself is used.
    """

    def __init__(
        self, table: CompressedTensor, stays: bool, trainable: bool, cache: RowCache | int | None = None
    ) -> None:
        super().__init__(table, stays, trainable)
        self.num_embeddings, self.embedding_dim = table.shape
        self.trainable = trainable
        self.cache = _checked_cache(cache, table, trainable)
        self._noted: list[RowGradient] = []
        # Number of backward passes since gradients were read or dropped, and torch's id of the latest pass.
        self._num_unread, self._last_pass = 0, -1
        self._num_writes = 0

    # ---- forward ----

    @property
    def _trains_now(self) -> bool:
        return self.trainable and torch.is_grad_enabled()

    @property
    def _source(self) -> CompressedTensor | RowCache:
        return self.weight if self.cache is None else self.cache

    def _fetched(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the present values of the rows with the numbers `ids` [K]."""
        return self._source.index_select(ids)

    @outside_of_graphs
    def _look_up(self, ids: torch.Tensor, padding_idx: int | None) -> LookedUp:
        """Looks up the rows with the numbers `ids`, of any shape. Waits for the GPU if the ids are on it.

        Raises:
            TypeError: the ids are not integers.
            IndexError: an id is out of range.
        """
        flat = checked_ids(ids).reshape(-1).to(torch.int64)
        if padding_idx is not None:
            flat = torch.cat((flat, flat.new_tensor([padding_idx])))
        unique, places = flat.unique(return_inverse=True)
        padding = None
        if unique.numel():
            low, high, last = torch.stack((unique[0], unique[-1], places[-1])).tolist()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(self._refusal(low if low < 0 else high))
            padding = None if padding_idx is None else last
        rows = self._fetched(unique).detach()
        if self._trains_now:
            self._note_gradient_of(unique, rows.requires_grad_())
        return LookedUp(rows, places[: ids.numel()].view(ids.shape), padding)

    def _refusal(self, wrong: int) -> str:
        """Returns the message for an id that is out of range."""
        return f"ids hold {wrong}; wanted 0 to {self.num_embeddings - 1}"

    def rows_at(self, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
        """Returns the rows with the numbers `ids`, of any shape [...], as a tensor [..., embedding_dim]."""
        if not self._trains_now:
            return self._fetched(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)
        looked_up = self._look_up(ids, padding_idx)
        return F.embedding(looked_up.places, looked_up.rows, looked_up.padding)

    def _pool(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        mode: str,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> torch.Tensor:
        """Returns pooled bags, as torch.nn.functional.embedding_bag does. If rows train, each different row is fetched
        once and gets one gradient."""
        if not self._trains_now:
            return embedding_bag(
                self._source,
                ids,
                offsets,
                mode=mode,
                per_sample_weights=per_sample_weights,
                padding_idx=padding_idx,
                include_last_offset=include_last_offset,
            )
        if offsets is not None:
            offsets = _checked_offsets(offsets, ids.numel())
        looked_up = self._look_up(ids, padding_idx)
        is_plain = per_sample_weights is None and looked_up.padding is None
        if ids.is_cuda and ids.dim() == 2 and ids.shape[1] == 1 and is_plain:  # eight times as fast as F.embedding_bag
            rows = F.embedding(looked_up.places[:, 0], looked_up.rows)
            return rows if mode == "max" else rows + 0  # -0 becomes +0, as in a sum
        return F.embedding_bag(
            looked_up.places,
            looked_up.rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=looked_up.padding,
        )

    def _note_gradient_of(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Makes each backward pass that computes a gradient of `rows` append this gradient to `_noted`. ids: the
        numbers of the rows."""
        num_writes = self._num_writes

        def note(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            self._noted.append(RowGradient(ids, leaf.detach(), leaf.grad, num_writes))
            leaf.grad = None
            if len(self._noted) == _MOST_KEPT:
                self._sum_up()
            self._count_pass()

        rows.register_post_accumulate_grad_hook(note)

    def _count_pass(self) -> None:
        """Counts the running backward pass, unless it has been counted already. Warns if no optimizer has read the
        gradients of the last _MOST_UNREAD passes."""
        number = torch._C._current_graph_task_id()
        if number == self._last_pass:
            return
        self._last_pass, self._num_unread = number, self._num_unread + 1
        if self._num_unread != _MOST_UNREAD:
            return
        warn_once(
            f"{_MOST_UNREAD} backward passes gave gradients to rows of an ibp.nn module {list(self.weight.shape)}, and "
            "no optimizer has read them. An optimizer of torch does not train these rows, because no gradient reaches "
            "their parameter: give the model to one of ibp.optim too, such as ibp.optim.SGD(model), and call its "
            "step() and zero_grad(). Make the module with trainable=False if its rows are not to train.",
            key="unread gradients",
        )

    @torch.no_grad()
    def _sum_up(self) -> RowGradient:
        """Replaces the noted gradients by their sum, and returns the sum. Gradients are added in the order of their
        passes."""
        self._noted = [_sum_of(self._noted)]
        return self._noted[0]

    # ---- what optimizers do ----

    def row_gradient(self) -> RowGradient | None:
        """Returns the sum of the gradients of all backward passes since `drop_gradients`, together with the present
        values of the rows, or None if there were no gradients. Gradients are added in the order of the passes."""
        if not self._noted:
            return None
        total = self._sum_up()
        if total.num_writes != self._num_writes:
            total = total._replace(rows=self._fetched(total.ids), num_writes=self._num_writes)
        self._keep([total])
        return total

    def set_gradient(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Replaces all noted gradients by grad [U, embedding_dim]. ids: int64 [U], the numbers of the rows, in
        increasing order."""
        self._keep([RowGradient(ids, self._fetched(ids), grad, self._num_writes)])

    def drop_gradients(self) -> None:
        """Forgets all gradients."""
        self._keep([])

    def _keep(self, noted: list[RowGradient]) -> None:
        """Replaces the noted gradients, and starts to count unread passes from 0. Called when an optimizer has read or
        dropped the gradients."""
        self._noted, self._num_unread = noted, 0

    @torch.no_grad()
    def write_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Sets weight[ids] = rows, for ids [U] as `row_gradient` returns them and rows [U, embedding_dim]."""
        check_rows(self.weight, rows, ids.numel())
        if self.cache is None:
            put_items(self.weight, ids, rows)
        else:
            self.cache.put_items(ids, rows)
        self._num_writes += 1

    # ---- the table ----

    @property
    def _requires_grad(self) -> bool:
        return self.trainable or super()._requires_grad

    def flush(self) -> None:
        """Writes rows that have changed only in the cache back to the table."""
        if self.cache is not None:
            self.cache.flush()

    def current_table(self) -> CompressedTensor:
        """Returns the table after all changed rows have been written to it."""
        self.flush()
        return self.weight

    def _save_tables(self, state: dict[str, Any], prefix: str) -> None:
        self.flush()
        super()._save_tables(state, prefix)

    def refit(self, **options: Any) -> None:
        """Compresses the rows again, with a codebook that suits their present values, and frees unused memory. It calls
        `CompressedTensor.refit`, which needs additional memory for all rows, decoded. Use it when `weight.savings` has
        fallen. The cache is filled again with the rows that it had.

        Args:
            options: arguments of `CompressedTensor.refit`.
        """
        if self.cache is None:
            self.weight.refit(**options)
            return
        cached = self.cache.cached_ids().tolist()
        self.current_table().refit(**options)
        self.cache.refill(cached)

    def _take(self, name: str, table: CompressedTensor) -> None:
        """Replaces the table. If there is a cache, replaces it by a cache of the new table with the same row numbers.
        Drops the gradients."""
        cache = self.cache
        if cache is not None:
            self.cache = RowCache(
                table,
                cache.budget_bytes,
                cache.cached_ids().tolist(),
                devices=cache.devices,
                policy=cache.policy,
                writable=cache.writable,
            )
        super()._take(name, table)
        self.drop_gradients()
        self._num_writes += 1

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles: without gradients, and without the cache, which belongs to the
        devices of this process."""
        self.flush()
        return {**super().__getstate__(), "cache": None, "_noted": [], "_num_unread": 0}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{'' if self.cache is None else f', cache={self.cache!r}'}"


def _checked_cache(cache: Any, table: CompressedTensor, trainable: bool) -> RowCache | None:
    """Checks the argument `cache` of a module, and returns the cache. An int is the size in bytes of a new cache."""
    if cache is None:
        return None
    if isinstance(cache, int) and not isinstance(cache, bool):
        return RowCache(table, cache, writable=True) if trainable else RowCache(table, cache, policy="lru")
    if not isinstance(cache, RowCache):
        raise TypeError(f"cache is a {type(cache).__name__}; wanted an ibp.RowCache or a number of bytes")
    if cache.table is not table:
        raise ValueError("the cache is one of another table")
    return cache


def _checked_offsets(offsets: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Checks the offsets of bags, because torch's kernels do not, and returns them. Waits for the GPU if the offsets
    are on it.

    Raises:
        TypeError: the offsets are not integers.
        ValueError: the offsets do not begin with 0, decrease, or exceed num_ids.
    """
    offsets = list_of_ids(offsets, "offsets")
    if offsets.numel() == 0:
        return offsets
    falls = (offsets[1:] < offsets[:-1]).any()
    first, last, has_fall = torch.stack((offsets[0], offsets[-1], falls.to(offsets.dtype))).tolist()
    if first != 0 or last > num_ids or has_fall:
        raise ValueError(
            f"offsets go from {first} to {last}; wanted 0 to at most {num_ids}, the ids, in ascending order"
        )
    return offsets


def _sum_of(parts: list[RowGradient]) -> RowGradient:
    """Adds up gradients of rows, in the order of `parts`. Returns one gradient of all rows that occur in them."""
    if len(parts) == 1:
        return parts[0]
    ids, grad, places = summed([part.ids for part in parts], [part.grad for part in parts])
    rows = parts[0].rows.new_empty(grad.shape)
    for part, place in zip(parts, places):
        rows[place] = part.rows
    return RowGradient(ids, rows, grad, min(part.num_writes for part in parts))


def summed(
    ids: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
    """Adds up gradients of rows, in the given order. Returns (the ids that occur, each once, in increasing order; the
    sum of the gradients of each of these rows; for each entry of ids, the positions of its ids in the first result)."""
    union, places = torch.cat(list(ids)).unique(return_inverse=True)
    parts, total = places.split([part.numel() for part in ids]), grads[0].new_zeros(union.numel(), grads[0].shape[1])
    for part, place in zip(grads, parts):
        total.index_add_(0, place, part)
    return union, total, parts
