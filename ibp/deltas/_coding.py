"""Computes fingerprints of tensors (FORMAT.md section 10), and codes the differences between two versions of a tensor.

Differences are coded with the *known codebook*, which is the same for all tensors whose elements have the same size, or
with a codebook that is learned from the differences.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from .. import _core
from .._fetch.streaming import decode_items
from .._rows import geometry
from .._rows.planes import PlanesCodebook
from .._tables.compressed_tensor import CompressedTensor, compress_rows, with_tensors
from ..codecs._whole import WholeTensor

Version = torch.Tensor | CompressedTensor

# Tables are decompressed, and non-contiguous tensors are copied, in blocks of approximately this many bytes.
_BLOCK_BYTES = 64 << 20
_WORD_BYTES = 8
_MASK = 2**64 - 1


class DeltaMismatchError(ValueError):
    """Raised if a delta was made for another tensor than the one that it is applied to. The tensor is unchanged."""


def fingerprint(x: torch.Tensor | CompressedTensor | WholeTensor) -> int:
    """Returns a 64-bit hash of a tensor's bytes. Files and deltas store it to identify tensors (FORMAT.md section 10).

    Two tensors have the same fingerprint if their elements, in order, consist of the same bytes; shapes, dtypes and
    strides do not matter. Tensors with different bytes almost certainly have different fingerprints. The fingerprint
    detects accidents, but not forgeries. It is computed on the device of x. Tables and non-contiguous tensors are
    processed block by block.

    Example:
        >>> x = torch.arange(4)
        >>> ibp.deltas.fingerprint(x)
        18026350550619423833
        >>> ibp.deltas.fingerprint(x + 1) == ibp.deltas.fingerprint(x)
        False

    Args:
        x: a tensor on the CPU or a CUDA device; an `ibp.CompressedTensor`; or an `ibp.codecs.WholeTensor`, which is
            decompressed as a whole.

    Returns:
        An int from 0 to 2^64 - 1. If x is on a GPU, the call waits for the GPU.

    Raises:
        TypeError: x is not a tensor or table, or its elements cannot be read as plain bytes.
        CorruptTableError: x is a table whose bytes are inconsistent.
    """
    if isinstance(x, WholeTensor):
        x = x.decompress()
    check_source(x, "x")
    device = x.device
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for start, block in byte_blocks(x):
        torch.ops.ibp.sum_words.default(block, start // _WORD_BYTES, total)
    return finished(int(total), x.numel() * x.dtype.itemsize)


def finished(total: int, num_bytes: int) -> int:
    """Returns the fingerprint of a tensor of num_bytes bytes. total: the sum of its mixed words, modulo 2^64."""
    return (total + mix(num_bytes)) & _MASK


def mix(x: int) -> int:
    """Mixes the bits of a 64-bit number with the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def check_source(x: object, name: str) -> None:
    """Raises TypeError unless x is a table, or a tensor whose bytes can be read. An `ibp.nn.TableParameter`, for
    example, has no memory. name: the name of x in the message."""
    if isinstance(x, CompressedTensor):
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; wanted a torch.Tensor or an ibp.CompressedTensor")
    geometry.check_tensor(x, name)
    if x.numel() and not x.data_ptr():
        raise TypeError(
            f"{name} is a {type(x).__name__} without memory of its own; wanted a tensor of state_dict(), or "
            "the table of its compressed weight"
        )


def check_weight(x: object, name: str) -> None:
    """Raises TypeError unless x can be pushed, or changed by a push: as `check_source`, and a tensor must not be a view
    that conjugates or negates another one."""
    check_source(x, name)
    if isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()):
        raise TypeError(f"{name} is a conjugated or negated view; wanted its resolve_conj() or resolve_neg()")


def byte_blocks(x: torch.Tensor | CompressedTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (index of the block's first byte in x, the bytes of the block) for consecutive blocks of x. The bytes are
    on the device of x. The size of each block, except the last, is a multiple of 8 bytes. A contiguous tensor is a
    single block, a view of the tensor."""
    if isinstance(x, torch.Tensor) and (x.is_contiguous() or x.dim() == 0):
        yield 0, geometry.bytes_of(x)
        return
    num_items = x.shape[0] if x.dim() else 1
    item_bytes = x.numel() * x.dtype.itemsize // max(1, num_items)
    step = max(1, _BLOCK_BYTES // max(1, item_bytes * _WORD_BYTES)) * _WORD_BYTES
    for first in range(0, num_items, step):
        last = min(first + step, num_items)
        items = decode_items(x, first, last, check=x.is_cuda) if isinstance(x, CompressedTensor) else x[first:last]
        yield first * item_bytes, geometry.bytes_of(items)


# ---- differences ----

# Size of a row in bytes, before coding. A coded row lists the elements that have changed, and takes 5 to 7 bytes more
# than this list. So rows should be long.
ROW_BYTES = 8192
# Number of bits of a digit in each plane. Most weights that an optimizer step changes become the next larger or the
# next smaller number, so most differences are -1 or 1. The planes for these two differences have digits of one bit.
_DIGIT_BITS = (1, 1, 4, 4)
_NUM_ENTRIES = sum(2**bits - 1 for bits in _DIGIT_BITS)
assert _NUM_ENTRIES % 2 == 0, "a number and its negative"
_SAMPLED_ROWS = 64
# The known codebook is used if the coded differences take at most this fraction of the size of the differences. A
# learned codebook would then save too little to be worth the time.
WELL_CODED = 0.3
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element in bytes


def element_bytes_of(dtype: torch.dtype) -> int:
    """Returns the size in bytes of the integers that are subtracted for a dtype. This is the size of an element. For a
    complex dtype it is half of this size, because the real and the imaginary parts are subtracted separately."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def integers_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor's elements as integers, 1-D; the result is a view of x if x is contiguous."""
    return geometry.bytes_of(x).view(INTEGERS[element_bytes_of(x.dtype)])


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor as integers. torch copies integers bit for bit; when it copies floats, it may change
    the bits of NaNs."""
    return x.view(INTEGERS[x.element_size()])


@functools.cache
def known_codebook(element_bytes: int) -> PlanesCodebook:
    """Returns the known codebook for differences of element_bytes bytes. Rows that it codes list only the differences
    that are not 0. Its entries are -1, 1, -2, 2, ..., in this order; -1 and 1 have the shortest codes. A difference
    that is not among the entries is stored uncoded."""
    width = 8 * element_bytes
    numbers = [number for size in range(1, _NUM_ENTRIES // 2 + 1) for number in (-size, size)]
    symbols = [number % 2**width if width < 64 else number for number in numbers]
    entries = torch.tensor([symbols], dtype=torch.int64, device="cpu")
    return PlanesCodebook(ROW_BYTES, element_bytes, 0, 0, _DIGIT_BITS, False, True, 0, 1, entries)


def first_rows(sizes: Sequence[int], row_bytes: int) -> list[int]:
    """Returns where the rows of several tensors begin in the sequence of rows that kernels code or decode in one call:
    the index of each tensor's first row, followed by the number of rows of the sequence. Each tensor begins with a new
    group of ROWS_PER_BASE rows. sizes: the sizes of the tensors in bytes."""
    group = _core.ROWS_PER_BASE
    return list(itertools.accumulate((-(-size // (group * row_bytes)) * group for size in sizes), initial=0))


def is_well_coded(differences: torch.Tensor) -> bool:
    """Codes a sample of rows of `differences` (integers, 1-D) with the known codebook. Returns whether the coded rows
    take at most WELL_CODED times the size of the rows."""
    codebook, data = known_codebook(differences.element_size()), differences.view(torch.uint8)
    rows = geometry.sample(data, ROW_BYTES, _SAMPLED_ROWS) if data.numel() >= ROW_BYTES else data
    lengths = torch.ops.ibp.measure_rows(rows, codebook.words(rows.device), codebook.codec)
    valid = min(ROW_BYTES, rows.numel())
    return int(geometry.stored_sizes(lengths, ROW_BYTES, valid).sum()) <= WELL_CODED * rows.numel()


def code(differences: torch.Tensor, like: torch.Tensor | CompressedTensor) -> CompressedTensor:
    """Codes `differences` (integers, 1-D) on their device. Returns a table with the shape and dtype of `like`."""
    device, element_bytes = differences.device, differences.element_size()
    if differences.numel() == 0 or is_well_coded(differences):
        known = known_codebook(element_bytes)
        table = compress_rows(differences, codebook=known, layout="packed", device=device, memory="device")
    else:
        table = compress_rows(differences, row_bytes=ROW_BYTES, layout="packed", device=device, memory="device")
    return with_tensors(table, lambda tensor: tensor, like.shape, like.dtype)
