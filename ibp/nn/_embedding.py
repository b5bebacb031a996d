"""Modules whose rows are looked up by ids: `Embedding` and `EmbeddingBag`, which are torch's modules of these names
over compressed rows.

`table_of` makes a table of many rows block by block, so that the uncompressed rows are never all in memory at once.
`RowsModule` is the base of both modules and of the groups of an `EmbeddingCollection`. Its rows may train: in each
call, it looks up every row that it needs once, autograd computes a gradient of these rows, and an optimizer of
`ibp.optim` writes changed rows back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from .._common.modes import outside_of_graphs
from .._common.process import warn_once
from .._fetch.bags import checked_padding, embedding_bag
from .._fetch.calls import checked_ids, list_of_ids, target_of
from .._rows.geometry import sampled
from .._tables.changes import check_rows, put_items, reserve
from .._tables.compressed_tensor import CompressedTensor, compress_rows, embedding_of
from ..cache import RowCache
from ._tables import CodedModule, TableModule, check_forward

_BLOCK_BYTES = 64 << 20  # Size in bytes of a block of uncompressed rows.
_SAMPLED_ELEMENTS = 1 << 19  # Number of elements from which a codebook is learned, the same as in ibp.compress.
# Number of gradients that are collected before they are added up. Adding each gradient at once would cost a pass over
# the whole sum.
_MOST_KEPT = 64
_MOST_UNREAD = 64  # A warning is given after this many backward passes whose gradients no optimizer has read.
_MODES = ("sum", "mean", "max")

# Rows of which a table is made: those of a tensor or of a table; or (number, number of columns) of new rows, which are
# drawn from N(0, 1) as torch.nn.Embedding draws them.
Rows = torch.Tensor | CompressedTensor | tuple[int, int]
_Module = TypeVar("_Module", bound="RowsModule")


# ---- tables of many rows ----


def size_of(rows: Rows) -> tuple[int, int]:
    """Returns (number of rows, number of columns)."""
    num_rows, num_columns = rows if isinstance(rows, tuple) else rows.shape
    return num_rows, num_columns


def table_of(
    sources: Sequence[Rows],
    dtype: torch.dtype,
    device: torch.device | str | int | None,
    padding_idx: int | None = None,
) -> CompressedTensor:
    """Makes one table of the rows of all sources, one source after the other. The table is in device memory or, for the
    CPU, in host memory, which is pinned if there is a GPU. Its codebook is learned from rows of all sources, from each
    source in proportion to its number of rows.

    Args:
        sources: at least one, all of the same number of columns.
        dtype: the dtype of all rows.
        device: the device of the table. None: the CPU.
        padding_idx: number of a new row that is all zeros.

    Raises:
        TypeError: there are new rows, and dtype is not a floating-point one.
        ValueError: the size of new rows is out of range.
    """
    for source in sources:
        if isinstance(source, tuple):
            if source[0] < 0 or source[1] < 1:
                raise ValueError(f"there are {source[0]} rows of {source[1]} values; wanted at least 0 of at least 1")
            if not dtype.is_floating_point:
                raise TypeError(f"dtype is {dtype}; wanted a floating-point one")
    device = target_of(device, None, torch.device("cpu"))
    sizes, num_columns = [size_of(source)[0] for source in sources], size_of(sources[0])[1]
    total, block_rows = sum(sizes), max(1, _BLOCK_BYTES // (num_columns * dtype.itemsize))
    if total <= block_rows:
        whole = [_block(source, 0, size, dtype, padding_idx).to(device) for source, size in zip(sources, sizes)]
        return compress_rows(torch.cat([torch.empty(0, num_columns, dtype=dtype, device=device), *whole]))
    wanted = max(1, _SAMPLED_ELEMENTS // num_columns)
    counts = [min(size, -(-wanted * size // total)) for size in sizes]
    samples = [_sample(source, count, dtype).cpu() for source, count in zip(sources, counts) if count]
    sample = compress_rows(torch.cat(samples), memory="host")
    blocks = (
        _block(source, first, min(first + block_rows, size), dtype, padding_idx)
        for source, size in zip(sources, sizes)
        for first in range(0, size, block_rows)
    )
    table = None
    for rows in blocks:
        rows = rows.to(device)
        if table is not None:
            table.append(rows)
            continue
        table = (
            compress_rows(rows, scheme="raw")
            if sample.codebook is None
            else compress_rows(rows, codebook=sample.codebook, slot_bytes=sample.slot_bytes)
        )
        reserve(table, total)
    assert table is not None
    return table


def _block(source: Rows, first: int, last: int, dtype: torch.dtype, padding_idx: int | None = None) -> torch.Tensor:
    """Returns rows first to last - 1 of a source. New rows are drawn with torch's CPU generator."""
    if not isinstance(source, tuple):
        return source.detach()[first:last]
    rows = torch.empty(last - first, source[1], dtype=dtype, device="cpu").normal_()
    if padding_idx is not None and first <= padding_idx < last:
        rows[padding_idx - first] = 0
    return rows


def _sample(source: Rows, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns `count` rows from which a codebook can be learned. A sample of new rows has other rows of the same
    distribution, and does not change the state of the generator."""
    if not isinstance(source, tuple):
        return source.detach()[sampled(source.shape[0], count).to(source.device)]
    with torch.random.fork_rng(devices=[]):
        return _block(source, 0, count, dtype)


# ---- rows that are looked up and trained ----


class RowGradient(NamedTuple):
    """The gradient of some rows of a table."""

    ids: torch.Tensor  # int64 [U], the numbers of the rows, in increasing order
    rows: torch.Tensor  # [U, D], the values of the rows
    grad: torch.Tensor  # [U, D]
    num_writes: int  # the module's count of writes when the rows were looked up


class RowsModule(TableModule):
    """A module with a table [num_embeddings, embedding_dim], whose rows are looked up by ids and can be trained. The
    arguments are those of `Embedding`.

    Attributes:
        cache: the cache through which rows are read and written. None: the table itself is used.
    """

    padding_idx: int | None = None  # groups of collections that earlier releases pickled have no such attribute

    def __init__(
        self,
        table: CompressedTensor | int,
        embedding_dim: int | None = None,
        *,
        padding_idx: int | None = None,
        trainable: bool | None = None,
        stays: bool | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        cache: RowCache | int | None = None,
    ) -> None:
        is_new = isinstance(table, int)
        if isinstance(table, int):
            if embedding_dim is None:
                raise TypeError(f"there are {table} embeddings; wanted embedding_dim besides, or a table")
            padding_idx = checked_padding(padding_idx, table)
            dtype = dtype or torch.get_default_dtype()
            table = table_of([(table, embedding_dim)], dtype, device, padding_idx)
        elif (embedding_dim, device, dtype) != (None, None, None):
            raise TypeError("embedding_dim, device and dtype are for new weights; a table has its own")
        trainable = is_new if trainable is None else trainable
        stays = trainable or cache is not None if stays is None else stays
        super().__init__(table, stays, trainable)
        self.num_embeddings, self.embedding_dim = table.shape
        self.trainable, self.cache = trainable, _checked_cache(cache, table, trainable)
        self.padding_idx = checked_padding(padding_idx, self.num_embeddings)
        self._noted: list[RowGradient] = []
        # Number of backward passes since gradients were read or dropped, and torch's id of the latest pass.
        self._num_unread, self._last_pass = 0, -1
        self._num_writes = 0

    @classmethod
    def from_pretrained(
        cls: type[_Module],
        embeddings: torch.Tensor | torch.nn.Module | CompressedTensor,
        freeze: bool = True,
        **options: Any,
    ) -> _Module:
        """Returns a module over given weights.

        Args:
            embeddings: a tensor [num_embeddings, embedding_dim], which is compressed; or torch's module of the same
                name, whose weights and options are used; or a table, which is used as it is.
            freeze: whether the weights are fixed. False: rows train.
            options: arguments of the constructor.

        Raises:
            ValueError: torch's module has max_norm or scale_grad_by_freq, which change rows or gradients in ways that
                this module does not support.
            TypeError: embeddings is a module whose forward is not that of torch's module of the same name.
            TypeError, ValueError: as in `ibp.compress` and the constructor.
        """
        if isinstance(embeddings, torch.nn.Module):
            options = {**_options_of(embeddings, cls), **options}
            embeddings = embeddings.weight
        if isinstance(embeddings, torch.Tensor):
            embeddings = compress_rows(embeddings.detach())
        return cls(embeddings, trainable=not freeze, **options)  # type: ignore[arg-type]

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
    def _look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Looks up the rows with the numbers `ids`, of any shape. Waits for the GPU if the ids are on it.

        Returns:
            (rows, places, padding). rows: [U, D], the rows that the ids name, each row once; if the module trains,
            autograd gives them a gradient. places: int64, in the shape of ids: for each id, the index of its row in
            `rows`. padding: index in `rows` of row padding_idx; None: there is no padding row.

        Raises:
            TypeError: the ids are not integers.
            IndexError: an id is out of range.
        """
        flat = checked_ids(ids).reshape(-1).to(torch.int64)
        if self.padding_idx is not None:
            flat = torch.cat((flat, flat.new_tensor([self.padding_idx])))
        unique, places = flat.unique(return_inverse=True)
        padding = None
        if unique.numel():
            low, high, last = torch.stack((unique[0], unique[-1], places[-1])).tolist()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(self._refusal(low if low < 0 else high))
            padding = None if self.padding_idx is None else last
        rows = self._fetched(unique).detach()
        if self._trains_now:
            self._note_gradient_of(unique, rows.requires_grad_())
        return rows, places[: ids.numel()].view(ids.shape), padding

    def _refusal(self, wrong: int) -> str:
        """Returns the message for an id that is out of range."""
        return f"ids hold {wrong}; wanted 0 to {self.num_embeddings - 1}"

    def rows_at(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows with the numbers `ids`, of any shape [...], as a tensor [..., embedding_dim]."""
        if not self._trains_now:
            return self._fetched(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)
        rows, places, padding = self._look_up(ids)
        return F.embedding(places, rows, padding)

    def _pool(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        mode: str,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
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
                padding_idx=self.padding_idx,
                include_last_offset=include_last_offset,
            )
        if offsets is not None:
            offsets = _checked_offsets(offsets, ids.numel())
        rows, places, padding = self._look_up(ids)
        is_plain = per_sample_weights is None and padding is None
        if ids.is_cuda and ids.dim() == 2 and ids.shape[1] == 1 and is_plain:  # eight times as fast as F.embedding_bag
            bags = F.embedding(places[:, 0], rows)
            return bags if mode == "max" else bags + 0  # -0 becomes +0, as in a sum
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding,
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
        parts = self._noted
        if len(parts) > 1:
            ids, grad, places = summed([part.ids for part in parts], [part.grad for part in parts])
            rows = parts[0].rows.new_empty(grad.shape)
            for part, place in zip(parts, places):
                rows[place] = part.rows
            self._noted = [RowGradient(ids, rows, grad, min(part.num_writes for part in parts))]
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
        self._num_writes += 1  # before the rows change, so that an interrupted call leaves no old rows in use
        if self.cache is None:
            put_items(self.weight, ids, rows)
        else:
            self.cache.put_items(ids, rows)

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

    def _apply(self, fn: Callable, recurse: bool = True) -> CodedModule:
        self.flush()  # because the conversion copies the table
        return super()._apply(fn, recurse)

    def _take(self, name: str, table: CompressedTensor) -> None:
        """Replaces the table. If there is a cache, replaces it by a cache of the new table with the same row numbers.
        Drops the gradients."""
        self.flush()
        cache, made = self.cache, None
        if cache is not None:
            made = RowCache(
                table,
                cache.budget_bytes,
                cache.cached_ids().tolist(),
                devices=cache.devices,
                policy=cache.policy,
                writable=cache.writable,
            )
        self.cache = None  # so that no interrupt leaves a table with a cache of another one
        super()._take(name, table)
        self.cache = made
        self.drop_gradients()
        self._num_writes += 1

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles: without gradients, and without the cache, which belongs to the
        devices of this process."""
        self.flush()
        return {**super().__getstate__(), "cache": None, "_noted": [], "_num_unread": 0}

    def extra_repr(self) -> str:
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{super().extra_repr()}{cache}{padding}{', trainable=True' if self.trainable else ''}"


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


# ---- the modules ----


class Embedding(RowsModule):
    """`torch.nn.Embedding` over compressed rows, which are decoded when they are looked up.

    Results are on the device of the ids, wherever the table is: a GPU itself fetches rows of a table in pinned host
    memory. Trainable rows are updated by the optimizers in `ibp.optim`.

    Example:
        >>> rows = torch.arange(1000.0)[:, None].repeat(1, 64)
        >>> embedding = ibp.nn.Embedding(ibp.compress(rows, device="cpu"))
        >>> embedding(torch.tensor([3, 5]))[:, 0]
        tensor([3., 5.])

    Args:
        table: a table [num_embeddings, embedding_dim]; or the number num_embeddings, for new weights from N(0, 1).
        embedding_dim, device, dtype: the number of columns, the device and the dtype of new weights. If device is None,
            new weights are on the CPU, in pinned memory if there is a GPU.
        padding_idx: number of a row that gets no gradient. In new weights this row is all zeros. A negative number
            counts from the end.
        trainable: whether rows get gradients. None: new weights do, the rows of a given table do not.
        stays: whether the table stays in its memory, with its dtype, when the module is moved or converted. None: it
            stays if its rows train or it has a cache.
        cache: a cache of the table, or the size in bytes of a new cache in device memory. A new cache holds the most
            recently used rows. But if rows train, a new cache holds the rows that `cache.refill` puts into it, and
            keeps changed rows until `flush` writes them to the table.

    Raises:
        TypeError: table is neither a table nor a number, or is to train but does not hold floating-point rows.
        ValueError: table does not have two dimensions, padding_idx is out of range, or the cache belongs to another
            table.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows with the numbers `ids`, int32 or int64 of any shape [...], as a tensor [..., embedding_dim].

        Raises:
            TypeError: ids are not integers.
            IndexError: an id is out of range. On a GPU the error is raised at once if rows train, otherwise as
                `ibp.index_select` says.
        """
        if not self._trains_now and self.cache is None:
            return embedding_of(ids, self.weight)
        return self.rows_at(ids)

    def _module_over(self, weight: torch.nn.Parameter) -> torch.nn.Module:
        made = torch.nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        made.weight = weight
        return made


class EmbeddingBag(RowsModule):
    """`torch.nn.EmbeddingBag` over compressed rows: sums, means or maxima of bags of rows.

    Results have the same bits as those of torch's module on the same device. Trainable rows are updated by the
    optimizers in `ibp.optim`.

    Example:
        >>> rows = torch.arange(1000.0)[:, None].repeat(1, 64)
        >>> bags = ibp.nn.EmbeddingBag(ibp.compress(rows, device="cpu"), mode="sum")
        >>> bags(torch.tensor([3, 5, 7]), offsets=torch.tensor([0, 2]))[:, 0]  # rows 3 and 5, row 7
        tensor([8., 7.])

    Args:
        table, embedding_dim, device, dtype, trainable, cache: as in `Embedding`.
        mode: "sum", "mean" or "max": how the rows of a bag are pooled.
        padding_idx: number of a row that is left out of bags and gets no gradient.
        include_last_offset: whether offsets have one more entry, the end of the last bag.
        stays: as in `Embedding`, but True by default.

    Raises:
        TypeError, ValueError: as in `Embedding`; or mode is unknown.
    """

    def __init__(
        self,
        table: CompressedTensor | int,
        embedding_dim: int | None = None,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        trainable: bool | None = None,
        stays: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        cache: RowCache | int | None = None,
    ) -> None:
        check_mode(mode)
        placed: dict[str, Any] = {"stays": stays, "device": device, "dtype": dtype, "cache": cache}
        super().__init__(table, embedding_dim, padding_idx=padding_idx, trainable=trainable, **placed)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the pooled bags, [B, embedding_dim].

        Args:
            input: int32 or int64 ids, [B, L] for bags of L ids, or [K] with offsets.
            offsets: [B], or [B + 1] with include_last_offset: the index in input at which each bag begins.
            per_sample_weights: the factor of each row, in the shape of input; only for mode "sum".

        Raises:
            TypeError: ids or offsets are not integers.
            IndexError: an id is out of range.
            ValueError, NotImplementedError: as in torch.nn.functional.embedding_bag.
        """
        return self._pool(input, offsets, self.mode, per_sample_weights, self.include_last_offset)

    def _module_over(self, weight: torch.nn.Parameter) -> torch.nn.Module:
        options: dict[str, Any] = {"include_last_offset": self.include_last_offset, "padding_idx": self.padding_idx}
        sizes = self.num_embeddings, self.embedding_dim
        made = torch.nn.EmbeddingBag(*sizes, mode=self.mode, device="meta", **options)
        made.weight = weight
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def check_mode(mode: Any) -> None:
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; wanted one of {', '.join(_MODES)}")


def _options_of(module: torch.nn.Module, wanted: type) -> dict[str, Any]:
    """Returns the options of a module of torch as arguments for the constructor of a class. wanted: that class."""
    kind = torch.nn.EmbeddingBag if issubclass(wanted, EmbeddingBag) else torch.nn.Embedding
    if not isinstance(module, kind):
        raise TypeError(f"embeddings is a {type(module).__name__}; wanted a torch.nn.{kind.__name__} or its weights")
    check_forward("embeddings", module, kind)
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError("the module has max_norm or scale_grad_by_freq, which compressed rows do not have")
    options: dict[str, Any] = {"padding_idx": module.padding_idx}
    if isinstance(module, torch.nn.EmbeddingBag):
        options.update(mode=module.mode, include_last_offset=module.include_last_offset)
    return options
