"""Fingerprints of tensors (FORMAT.md section 10)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._fetch.streaming import decode_items
from .._layout import geometry
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import WholeTensor

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
    """Raises TypeError unless x is a table, or a tensor whose bytes can be read. name: the name of x in the message."""
    if isinstance(x, CompressedTensor):
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; wanted a torch.Tensor or an ibp.CompressedTensor")
    geometry.check_tensor(x, name)


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
