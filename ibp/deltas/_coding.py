"""The integers that deltas subtract and add, and how tables of differences are coded: by a codebook that is known
beforehand, or by one that is learned from the differences."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from .._layout import geometry
from .._schemes import PlanesCodebook
from .._tables.compressed_tensor import CompressedTensor, compress_rows

# Bytes of a row of differences. Each row takes 5 to 7 bytes besides its listed elements, which is then little.
ROW_BYTES = 8192
# A step of an optimizer moves most of the weights that it changes to the next number, up or down. So -1 and 1 have the
# shortest digits.
_DIGIT_BITS = (1, 1, 4, 4)
_NUM_ENTRIES = sum(2**bits - 1 for bits in _DIGIT_BITS)
assert _NUM_ENTRIES % 2 == 0, "each number has an entry, and so has its negative"
# If the known codebook brings differences to at most this share of their bytes, learning another one does not pay.
WELL_CODED = 0.3
# Bytes of differences that are encoded or decoded at once, by type of device. A block stays in the cache until the next
# operation has read it (an H200 has a cache of 50 MB). It is so large that a GPU works on it for longer than the host
# takes to call the operations.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def element_bytes_of(dtype: torch.dtype) -> int:
    """Returns the bytes of the integers that are subtracted. A complex number consists of two of them."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def integers_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the bits of the elements as integers, 1-D. If x is contiguous, they are a view of it."""
    return geometry.bytes_of(x).view(INTEGERS[element_bytes_of(x.dtype)])


def integers_in(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of the memory of x as the integers that are added. If x is complex, it has a last dimension of
    size 2 more than x."""
    numbers = torch.view_as_real(x) if x.is_complex() else x
    return numbers.view(INTEGERS[numbers.element_size()])


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of x as integers of the same size. Torch copies these bit by bit, but may quiet NaNs when it
    copies floating-point numbers."""
    return x.view(INTEGERS[x.element_size()])


@functools.cache
def known_codebook(element_bytes: int) -> PlanesCodebook:
    """Returns the codebook of listed rows whose entries are -1, 1, -2, 2, ... The first entries have the shortest
    digits. Numbers without an entry are stored whole."""
    width = 8 * element_bytes
    numbers = [number for size in range(1, _NUM_ENTRIES // 2 + 1) for number in (-size, size)]
    symbols = [number % 2**width if width < 64 else number for number in numbers]
    entries = torch.tensor([symbols], dtype=torch.int64, device="cpu")
    return PlanesCodebook(ROW_BYTES, element_bytes, 0, 0, _DIGIT_BITS, False, True, 0, 1, entries)


def code(differences: torch.Tensor, like: torch.Tensor, codebook: PlanesCodebook | None) -> CompressedTensor:
    """Returns the packed table of differences, on their device.

    Args:
        differences: integers, 1-D.
        like: a tensor of the shape and dtype that the table gets.
        codebook: codes the rows. None: a codebook is learned from the differences.
    """
    fields = {"row_bytes": ROW_BYTES} if codebook is None else {"codebook": codebook}
    table = compress_rows(differences, **fields, layout="packed", device=differences.device, memory="device")
    return table._with(lambda tensor: tensor, like.shape, like.dtype)


def note_change(tensors: Iterable[torch.Tensor]) -> None:
    """Tells autograd that tensors were written through views of their memory."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
