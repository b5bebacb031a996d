"""`PagedTensors`, which describes where the pages of a paged cache lie in memory, and the planning of transfers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .._fetch.ids import check_range, list_of_ids
from .._layout.geometry import layout_of
from .._machine.memory import is_capturing
from .._tables.coded_rows import Buffers

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
        self.device, self.block_bytes = block.device, block.nbytes
        offsets, self.piece_bytes = _pieces(block)
        places = [start + offset for start in starts for offset in offsets]
        near = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.layout = block.as_strided((self.piece_bytes // block.element_size(),), (1,))
        scratch = torch.empty(self.piece_bytes, dtype=torch.uint8, device=block.device)
        # The arguments of torch.ops.ibp.plan_pages.
        self._where = (near, addresses, stride, scratch.data_ptr(), len(offsets))
        self._used = (*_owners(self.tensors), near, scratch, *(() if addresses is None else (addresses,)))

    def __reduce__(self) -> tuple[type[PagedTensors], tuple[tuple[torch.Tensor, ...]]]:
        """Pickles and copies only the tensors, so that a copy computes the addresses of its own tensors."""
        return PagedTensors, (self.tensors,)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def pieces(self) -> int:
        """Number of pieces of a page. A page has one block of each tensor."""
        return self._where[0].numel()


class PageList(PagedTensors):
    """A list of tensors that are treated as the blocks of a single tensor, so each tensor is a page. A transfer moves
    all tensors of the list."""

    def __init__(self, tensors: Buffers) -> None:
        self.tensors, self.num_blocks = tensors.tensors, len(tensors.tensors)
        self._lay_out(self.tensors[0], [0], tensors.addresses, 0)

    def __len__(self) -> int:
        return 1


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


def check_different(name: str, numbers: torch.Tensor | None, count: int) -> None:
    """Raises ValueError if a number occurs more than once. numbers: int64 on the host, each in [0, count). None: they
    are on a GPU, and nothing is checked."""
    if numbers is None:
        return
    seen = np.zeros(count, bool)
    seen[numbers.numpy()] = True
    if np.count_nonzero(seen) < numbers.numel():
        raise ValueError(f"{name} has a number more than once")


def _owners(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns one tensor for each storage that the tensors use, so that `record_stream` can be called on each."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


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
