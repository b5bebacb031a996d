"""Makes tables of many rows block by block, so that the uncompressed rows are never all in memory at once.

`Embedding` and `EmbeddingBag`: torch's modules of these names over compressed rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from .._fetch.bags import checked_padding
from .._machine import memory
from .._rows.geometry import sampled
from .._tables import changes
from .._tables.compressed_tensor import CompressedTensor, compress_rows, embedding_of
from ..cache import RowCache
from ._tables import check_forward
from ._training import RowsModule

_BLOCK_BYTES = 64 << 20  # Size in bytes of a block of uncompressed rows.
_SAMPLED_ELEMENTS = 1 << 19  # Number of elements from which a codebook is learned, the same as in ibp.compress.


class NormalRows:
    """Draws rows from N(0, 1), as torch.nn.Embedding does, with torch's CPU generator. The padding row is zeros."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        if num_rows < 0 or num_columns < 1:
            raise ValueError(f"there are {num_rows} rows of {num_columns} values; wanted at least 0 of at least 1")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype is {dtype}; wanted a floating-point one")
        self.num_rows, self.dtype = num_rows, dtype
        self._num_columns, self._padding_idx = num_columns, padding_idx

    def block(self, first: int, last: int) -> torch.Tensor:
        rows = torch.empty(last - first, self._num_columns, dtype=self.dtype, device="cpu").normal_()
        if self._padding_idx is not None and first <= self._padding_idx < last:
            rows[self._padding_idx - first] = 0
        return rows

    def sample(self, num_rows: int) -> torch.Tensor:
        """Returns rows from the same distribution, without changing the state of the generator."""
        with torch.random.fork_rng(devices=[]):
            return torch.empty(num_rows, self._num_columns, dtype=self.dtype, device="cpu").normal_()


class GivenRows:
    """The rows of a tensor, or of a table."""

    def __init__(self, rows: torch.Tensor | CompressedTensor) -> None:
        self.num_rows = rows.shape[0]
        self._rows = rows.detach()

    def block(self, first: int, last: int) -> torch.Tensor:
        return self._rows[first:last]

    def sample(self, num_rows: int) -> torch.Tensor:
        return self._rows[sampled(self.num_rows, num_rows).to(self._rows.device)]


Rows = NormalRows | GivenRows


def table_of(
    sources: Sequence[Rows], num_columns: int, dtype: torch.dtype, device: torch.device | str | int
) -> CompressedTensor:
    """Makes one table of the rows of all sources, one source after the other. The table is in device memory or, for the
    CPU, in host memory, which is pinned if there is a GPU. Its codebook is learned from rows of all sources."""
    device = memory.canonical(device)
    total, row_bytes = sum(source.num_rows for source in sources), num_columns * dtype.itemsize
    block_rows = max(1, _BLOCK_BYTES // row_bytes)
    if total <= block_rows:
        blocks = [source.block(0, source.num_rows).to(device) for source in sources]
        return compress_rows(torch.cat([torch.empty(0, num_columns, dtype=dtype, device=device), *blocks]))
    sample = compress_rows(_sample_of(sources, total, num_columns), memory="host")
    table = None
    for rows in _blocks_of(sources, block_rows):
        rows = rows.to(device)
        if table is not None:
            table.append(rows)
            continue
        table = (
            compress_rows(rows, scheme="raw")
            if sample.codebook is None
            else compress_rows(rows, codebook=sample.codebook, slot_bytes=sample.slot_bytes)
        )
        changes.reserve(table, total)
    assert table is not None
    return table


def _sample_of(sources: Sequence[Rows], total: int, num_columns: int) -> torch.Tensor:
    """Samples rows from every source, in proportion to its number of rows. The sample is on the CPU."""
    wanted = max(1, _SAMPLED_ELEMENTS // num_columns)
    counts = [min(source.num_rows, -(-wanted * source.num_rows // total)) for source in sources]
    return torch.cat([source.sample(count).cpu() for source, count in zip(sources, counts) if count])


def _blocks_of(sources: Sequence[Rows], block_rows: int) -> Iterator[torch.Tensor]:
    for source in sources:
        for first in range(0, source.num_rows, block_rows):
            yield source.block(first, min(first + block_rows, source.num_rows))


_MODES = ("sum", "mean", "max")

_Module = TypeVar("_Module", bound="_Rows")


class _Rows(RowsModule):
    """The common base of `Embedding` and `EmbeddingBag`."""

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
            rows = NormalRows(table, embedding_dim, dtype or torch.get_default_dtype(), padding_idx)
            table = table_of([rows], embedding_dim, rows.dtype, "cpu" if device is None else device)
        elif (embedding_dim, device, dtype) != (None, None, None):
            raise TypeError("embedding_dim, device and dtype are for new weights; a table has its own")
        trainable = is_new if trainable is None else trainable
        stays = trainable or cache is not None if stays is None else stays
        super().__init__(table, stays, trainable, cache)
        self.padding_idx = checked_padding(padding_idx, self.num_embeddings)

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

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{super().extra_repr()}{padding}{', trainable=True' if self.trainable else ''}"


class Embedding(_Rows):
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
        return self.rows_at(ids, self.padding_idx)

    def _module_over(self, weight: torch.nn.Parameter) -> torch.nn.Module:
        made = torch.nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        made.weight = weight
        return made


class EmbeddingBag(_Rows):
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
        return self._pool(
            input, offsets, self.mode, per_sample_weights, self.include_last_offset, padding_idx=self.padding_idx
        )

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
