"""What the stores and messages of pages have in common: the sizes of rows, slots and overflow, and the places of pages.

The sizes are chosen from a sample of a cache's content, or from the size of a pool. `PagedTensors` describes where the
pages of a paged cache lie in memory. `plan_pages` computes on the device which rows, and which addresses, a transfer of
pages reads and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.sequences import rounded_up
from .._fetch.calls import check_range, list_of_ids
from .._machine import memory
from .._machine.memory import is_capturing
from .._rows import geometry
from .._rows.codebook import AnyCodebook, check_codebook, surveyed
from .._rows.geometry import layout_of
from .._rows.learning import analyze
from .._rows.planes import PlanesCodebook
from .._tables.coded_rows import Buffers

# ---- sizes ----

# Preferred size in bytes of the rows of pages. Longer rows save no more, and shorter rows take longer to decode for
# each byte (benchmarks/results/gather.csv).
ROW_BYTES = 2048
_SHARE_IN_SLOTS = 0.999  # the fraction of the sample's rows that should fit in their slots
# The smallest size of the overflow, as a fraction of the size of all slots. If a slot has 70 % of a row's size, this is
# enough for one raw row in 21.
_LEAST_OVERFLOW = 0.02
# The size of the overflow divided by the size that the sample's rows need. It is more than 1 because a row that needed
# overflow once keeps this overflow when a shorter row replaces it.
_SPILL_MARGIN = 4
_SECTOR = _core.SECTOR_BYTES
# For rows of at most _SHORT_ROW_BYTES bytes, a second codebook is learned, from groups of _ROWS_TOGETHER rows (see
# `_of_longer_rows`).
_SHORT_ROW_BYTES, _ROWS_TOGETHER = 128, 8


def divided(piece_bytes: int) -> int:
    """Returns the size in bytes of the rows into which a contiguous piece of memory is cut without a remainder. The
    size is 1 to 2 KiB if possible."""
    fitting = [n for n in range(_SECTOR, min(piece_bytes, _core.MAX_ROW_BYTES) + 1, _SECTOR) if piece_bytes % n == 0]
    short = [n for n in fitting if n <= ROW_BYTES]
    if short and short[-1] >= ROW_BYTES // 2:
        return short[-1]
    long = [n for n in fitting if n > ROW_BYTES]
    if long:
        return long[0]
    return short[-1] if short else min(piece_bytes, _core.MAX_ROW_BYTES)


def row_bytes_of(codebook: AnyCodebook | torch.Tensor, row_bytes: int | None, page_bytes: int) -> int:
    """Returns the size in bytes of the rows of a page. If `codebook` is a codebook, this is its row size. If it is a
    sample, this is row_bytes, or a size that suits page_bytes if row_bytes is None."""
    if isinstance(codebook, torch.Tensor):
        row_bytes = divided(page_bytes) if row_bytes is None else row_bytes
        row_bytes = whole_number("row_bytes", row_bytes, 1, _core.MAX_ROW_BYTES)
    elif row_bytes is not None:
        raise ValueError("row_bytes is given beside a codebook, which says it")
    else:
        check_codebook(codebook)
        row_bytes = codebook.row_bytes
    if page_bytes % row_bytes:
        raise ValueError(f"page_bytes is {page_bytes}; wanted whole rows of {row_bytes} bytes")
    return row_bytes


def learned(sample: AnyCodebook | torch.Tensor, row_bytes: int, level: str) -> AnyCodebook:
    """Learns a codebook for rows of row_bytes bytes, into which `sample`, a tensor of any shape, is cut. If `sample` is
    a codebook, returns it."""
    if not isinstance(sample, torch.Tensor):
        check_codebook(sample)
        return sample
    own = _of_rows(sample, row_bytes, level)
    if row_bytes > _SHORT_ROW_BYTES or level != "default":
        return own
    other = _of_longer_rows(sample, row_bytes)
    if other is None or usual_sizes(sample, other)[0] > usual_sizes(sample, own)[0]:
        return own
    return other


def _of_rows(sample: torch.Tensor, row_bytes: int, level: str) -> AnyCodebook:
    found = analyze(_as_rows(sample, row_bytes), scheme="planes", sample=None, level=level)
    assert found is not None, "scheme 'planes' always has a codebook"
    return found


def _of_longer_rows(sample: torch.Tensor, row_bytes: int) -> PlanesCodebook | None:
    """Learns a codebook for short rows from groups of `_ROWS_TOGETHER` consecutive rows. Returns None if the sample has
    no such group, or if the codebook depends on the columns or lists elements, because such a codebook does not suit
    single rows.

    The reason: each plane of a row is rounded up to whole bytes, which matters if rows are short. Learning from short
    rows may choose digits of three bits because they save a byte, although they are slower to decode. The codebook for
    longer rows is better if its slots are no larger.
    """
    if sample.nbytes < _ROWS_TOGETHER * row_bytes:
        return None
    found = _of_rows(sample, _ROWS_TOGETHER * row_bytes, "default")
    if not isinstance(found, PlanesCodebook) or found.per_column or found.listed or found.live_columns is not None:
        return None
    return dataclasses.replace(found, row_bytes=row_bytes, expected_savings=None)


def usual_sizes(sample: torch.Tensor | None, codebook: AnyCodebook) -> tuple[int, float]:
    """Returns (size of a slot, size of the overflow divided by the number of rows), in bytes: the smallest slot size
    that holds 99.9 % of a sample's rows, and enough overflow for the other rows. Without a sample, a slot is 2 % larger
    than the size of a coded row that the codebook's `expected_savings` predicts."""
    row_bytes = codebook.row_bytes
    if sample is None:
        savings = codebook.expected_savings or 0.0
        return _rounded(int(row_bytes * (1 - savings) * 1.02), 0.0, row_bytes)
    data, worker = geometry.bytes_of(_as_rows(sample, row_bytes)), memory.usual(None, sample)
    survey = surveyed(data, codebook, worker)
    last = survey.num_rows - 1
    suited = survey.best_slots(_SECTOR, overflow_cost=0.0, most_spilled=last - int(_SHARE_IN_SLOTS * last))
    return _rounded(*suited, row_bytes)


def sizes_within(pool_bytes: int, num_rows: int, row_bytes: int, spills: bool = False) -> tuple[int, float]:
    """Returns (size of a slot, size of the overflow divided by the number of rows), in bytes: the largest slot size for
    which the slots and the overflow of num_rows rows fit in a pool. Overflow gets the bytes that slots leave, at least
    2 % of the slots' size. If slots can hold complete raw rows, there is no overflow. spills: whether overflow is
    outside the pool. Slots may then fill the pool."""
    per_row = pool_bytes / max(1, num_rows)
    if per_row >= row_bytes:
        return row_bytes, 0.0
    slot_bytes = int(per_row / (1 if spills else 1 + _LEAST_OVERFLOW)) // _SECTOR * _SECTOR
    if slot_bytes < _SECTOR:
        raise ValueError(
            f"pool_bytes is {pool_bytes}: {per_row:.0f} bytes for each of {num_rows} rows; wanted 33 or more"
        )
    return slot_bytes, per_row - slot_bytes


def checked_sizes(
    slot_bytes: int | None, overflow_bytes: int | None, num_rows: int, usual_slot_bytes: int, overflow_per_row: float
) -> tuple[int, int]:
    """Checks the given sizes. Returns (size of a slot, size of the overflow of all rows), in bytes. A size that is None
    follows from the last two arguments, which `usual_sizes` or `sizes_within` returns."""
    slot_bytes = usual_slot_bytes if slot_bytes is None else whole_number("slot_bytes", slot_bytes, 0)
    if overflow_bytes is None:
        return slot_bytes, int(num_rows * overflow_per_row) // _SECTOR * _SECTOR
    return slot_bytes, whole_number("overflow_bytes", overflow_bytes, 0)


def _rounded(slot_bytes: int, spilled: float, row_bytes: int) -> tuple[int, float]:
    slot_bytes = max(_SECTOR, rounded_up(slot_bytes, _SECTOR))
    if slot_bytes >= row_bytes:
        return row_bytes, 0.0
    return slot_bytes, max(_LEAST_OVERFLOW * slot_bytes, _SPILL_MARGIN * spilled)


def _as_rows(sample: torch.Tensor, row_bytes: int) -> torch.Tensor:
    geometry.check_tensor(sample)
    elements = row_bytes // sample.element_size()
    if sample.numel() < elements or row_bytes % sample.element_size():
        raise ValueError(
            f"the sample has {sample.numel()} elements of {sample.element_size()} bytes; wanted at least one row of "
            f"{row_bytes} bytes"
        )
    flat = sample.detach().reshape(-1)
    return flat[: flat.numel() // elements * elements].view(-1, elements)


# ---- places ----

Pages = Sequence[int] | torch.Tensor


class PagedTensors:
    """The tensors [num_blocks, ...] of a paged cache, for example one for each layer. Page b consists of block b of
    each tensor. Make the object once and use it for all transfers, because the constructor copies addresses to the
    device.

    Example:
        >>> layers = [torch.randn(100, 16, 128) for _ in range(4)]
        >>> cache = ibp.kv.PagedTensors(layers)
        >>> cache.num_blocks, cache.block_bytes
        (100, 8192)
        >>> store = ibp.kv.KVStore(layers[0], page_bytes=8192, num_tensors=4, num_pages=10, device="cpu")
        >>> store.store([0], cache, blocks=[42]).wait()  # page 0 becomes block 42 of all four layers

    Args:
        tensors: a tensor, or several tensors with the same shape, dtype, strides and device. Any strides work: blocks
            need be neither adjacent nor contiguous. The elements of a block are taken in row-major order of their
            indices, whatever their order in memory.

    Attributes:
        tensors: the given tensors, as a tuple.
        num_blocks: number of blocks of each tensor.
        block_bytes: size in bytes of one block of one tensor.
        piece_bytes: size in bytes of a piece. A block consists of pieces of equal size, each contiguous in memory.
        layout: the first piece of the first block, a tensor of one dimension.
        device: the device of the tensors.

    Raises:
        TypeError: the argument is neither a tensor nor a sequence of one or more tensors.
        ValueError: the tensors differ in dtype, shape, device or strides, or have no blocks or empty blocks.
    """

    def __init__(self, tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
        self.tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if not self.tensors or not all(isinstance(tensor, torch.Tensor) for tensor in self.tensors):
            raise TypeError("wanted a tensor [num_blocks, ...], or a sequence of at least one")
        first, looks = self.tensors[0], [layout_of(tensor) for tensor in self.tensors]
        for look in looks:
            if look != looks[0]:
                raise ValueError(f"the tensors differ: one is {look}, the first is {looks[0]}")
        if first.dim() == 0 or not first[:1].numel():
            raise ValueError(f"a tensor of shape {list(first.shape)} has no blocks; wanted [num_blocks, ...]")
        self.num_blocks = first.shape[0]
        stride = first.stride(0) * first.element_size()
        self._lay_out(first[0], [tensor.data_ptr() for tensor in self.tensors], None, stride)

    def _lay_out(self, block: torch.Tensor, starts: Sequence[int], addresses: torch.Tensor | None, stride: int) -> None:
        """Stores where the pieces of blocks lie.

        Args:
            block: the first block; all blocks have its layout.
            starts: for each tensor, the address of its first block. If `addresses` is given, this is instead an offset
                that is added to the address of every block.
            addresses: int64: the address of each block. None: block b begins b * stride bytes after the first block.
            stride: distance in bytes between consecutive blocks of a tensor. Unused if `addresses` is given.
        """
        self.device, self.block_bytes, self._num_tensors = block.device, block.nbytes, len(starts)
        offsets, self.piece_bytes = _pieces(block)
        places = [start + offset for start in starts for offset in offsets]
        near = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.layout = block.as_strided((self.piece_bytes // block.element_size(),), (1,))
        scratch = torch.empty(self.piece_bytes, dtype=torch.uint8, device=block.device)
        # The arguments of torch.ops.ibp.plan_pages.
        self._where = (near, addresses, stride, scratch.data_ptr(), len(offsets))
        # The tensors that transfers use: one for each storage, so that `record_stream` can be called on each.
        owners = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.tensors}.values()
        self.used = (*owners, near, scratch, *(() if addresses is None else (addresses,)))

    def __reduce__(self) -> tuple[type[PagedTensors], tuple[tuple[torch.Tensor, ...]]]:
        """Pickles and copies only the tensors, so that a copy computes the addresses of its own tensors."""
        return PagedTensors, (self.tensors,)

    def __len__(self) -> int:
        return self._num_tensors

    @property
    def pieces(self) -> int:
        """Number of pieces of a page. A page has one block of each tensor."""
        return self._where[0].numel()


def pages_of(tensors: Buffers) -> PagedTensors:
    """Returns the tensors of a list as the blocks of a single tensor, so that each of them is a page."""
    paged = PagedTensors.__new__(PagedTensors)
    paged.tensors, paged.num_blocks = tensors.tensors, len(tensors.tensors)
    paged._lay_out(paged.tensors[0], [0], tensors.addresses, 0)
    return paged


def check_paged(paged: PagedTensors, owner: str, device: torch.device, page_bytes: int, row_bytes: int) -> None:
    """Raises ValueError if tensors do not suit a store or codec of pages: they are not on `device`, the size of their
    blocks is not page_bytes, or the size of their pieces is not a multiple of row_bytes. owner: what the message calls
    the store or codec."""
    if paged.device != device:
        raise ValueError(f"the tensors are on {paged.device}; the {owner} is of {device}")
    if paged.block_bytes != page_bytes:
        raise ValueError(f"a block has {paged.block_bytes} bytes; the {owner}'s pages have {page_bytes} a tensor")
    if paged.piece_bytes % row_bytes:
        raise ValueError(
            f"blocks lie in pieces of {paged.piece_bytes} bytes, which are not whole rows of {row_bytes} bytes: make "
            f"the {owner} with a row_bytes that divides them"
        )


def plan_pages(
    paged: PagedTensors,
    pages: torch.Tensor,
    blocks: torch.Tensor,
    ids_per_block: int,
    num_pages: int,
    num_tensors: int,
    first_tensor: int = 0,
    stored: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plans a transfer between page pages[k] and block blocks[k] of each tensor, for every k. Computes the ids of the
    rows of the pages and the addresses of the blocks on the device, in one launch.

    Args:
        pages, blocks: the numbers of the pages and of the blocks, int64 on the device, of equal length.
        ids_per_block: number of ids for a block of one tensor. Either each row has an id, or each piece.
        num_pages: number of pages that exist.
        num_tensors: number of tensors of a page. The first id of page p is p * num_tensors * ids_per_block.
        first_tensor: the index in a page of the first tensor of `paged`.
        stored: uint8 [num_pages or more, num_tensors] on the device: 1 if the tensor's block of the page is stored, and
            0 otherwise. None: all pages are stored.

    Returns:
        (ids, addresses): the ids of the rows or pieces of the pages, and the addresses of the pieces of the blocks,
        both int64, ordered by k, then by tensor, then by position in the block. If page pages[k] or block blocks[k]
        does not exist, its ids are -1, and its addresses are those of unused memory. If the page's block of any tensor
        of `paged` is not stored, its ids are -1.
    """
    ids, addresses = (
        torch.empty(pages.numel() * number, dtype=torch.int64, device=paged.device)
        for number in (len(paged) * ids_per_block, paged.pieces)
    )
    sizes = (num_pages, paged.num_blocks, num_tensors, first_tensor)
    torch.ops.ibp.plan_pages.default(pages, blocks, *sizes, *paged._where, stored, ids, addresses)
    return ids, addresses


def numbers_on(device: torch.device, name: str, numbers: Pages, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the numbers of pages or blocks as int64 tensors: (numbers on a device, numbers on the host). If they are
    given on a GPU, the second tensor is None, and the numbers are not checked. The host does not wait for the device.

    Raises:
        IndexError, TypeError, ValueError: the numbers are not a list or tensor of integers in [0, count).
        RuntimeError: the numbers are given on the host, and a CUDA graph is being captured.
    """
    given = list_of_ids(numbers, name).to(torch.int64).contiguous()
    if given.is_cuda:
        return given.to(device), None
    check_range(given, count, name=name)
    if device.type != "cuda":
        return given, given
    if is_capturing(device):
        raise RuntimeError(f"{name} must be a tensor on {device} while a CUDA graph is captured")
    return given.pin_memory().to(device, non_blocking=True), given


def blocks_on(paged: PagedTensors, blocks: Pages | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the numbers of blocks of a paged cache, as `numbers_on` does. blocks: None: all blocks, whose numbers are
    then returned only on the device."""
    if blocks is None:
        return torch.arange(paged.num_blocks, device=paged.device), None
    return numbers_on(paged.device, "blocks", blocks, paged.num_blocks)


def check_different(name: str, numbers: torch.Tensor | None, count: int) -> None:
    """Raises ValueError if a number occurs more than once. numbers: int64 on the host, each in [0, count). None: they
    are only on the device, and nothing is checked."""
    if numbers is None:
        return
    seen = np.zeros(count, bool)
    seen[numbers.numpy()] = True
    if np.count_nonzero(seen) < numbers.numel():
        raise ValueError(f"{name} has a number more than once")


def _pieces(block: torch.Tensor) -> tuple[list[int], int]:
    """Divides a block into pieces, which are contiguous. Returns (offset of each piece, size of a piece), in bytes. The
    pieces are in the order of the block's elements."""
    run, dims = 1, [(size, stride) for size, stride in zip(block.shape, block.stride()) if size != 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in dims:
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    itemsize = block.element_size()
    return (offsets * itemsize).flatten().tolist(), run * itemsize
