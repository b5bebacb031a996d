"""Makes tables of many rows block by block, so that the uncompressed rows are never all in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .._layout.geometry import sampled
from .._machine import memory
from .._tables import changes
from .._tables.compressed_tensor import CompressedTensor, compress_rows

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
