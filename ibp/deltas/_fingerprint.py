"""Computes fingerprints of tensors (FORMAT.md section 10)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._fetch.streaming import decode_items
from .._layout import geometry
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import WholeTensor

_BLOCK_BYTES = 64 << 20  # bytes that are decoded or copied at once
WORD_BYTES = 8
_MASK = 2**64 - 1


class DeltaMismatchError(ValueError):
    """Raised if a delta is applied to a tensor for which it was not made. The tensor is as it was."""


def fingerprint(x: torch.Tensor | CompressedTensor | WholeTensor) -> int:
    """Returns 64 bits that say whether two tensors hold the same bytes, as files and deltas keep them (FORMAT.md
    section 10).

    The fingerprint is the sum, modulo 2^64, of the mixed 64-bit words of the tensor's bytes, as if the tensor were
    contiguous. Neither shape nor dtype count. It finds accidents, not forgeries. It is computed where the tensor is.
    A table, and a tensor that is not contiguous, is read block by block.

    Example:
        >>> x = torch.arange(4)
        >>> ibp.deltas.fingerprint(x)
        18026350550619423833
        >>> ibp.deltas.fingerprint(x + 1) == ibp.deltas.fingerprint(x)
        False

    Args:
        x: a tensor of elements of 1, 2, 4 or 8 bytes on the CPU or a CUDA device; an `ibp.CompressedTensor`; or an
            `ibp.codecs.WholeTensor`, which is decoded as a whole.

    Returns:
        An int of 0 to 2^64 - 1. If x is on a GPU, the call waits for it.

    Raises:
        TypeError: x is of another type.
        CorruptTableError: the table's bytes contradict each other.
    """
    if isinstance(x, WholeTensor):
        x = x.decompress()
    check_source(x, "x")
    device = x.device
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for start, block in byte_blocks(x):
        torch.ops.ibp.sum_words.default(block, start // WORD_BYTES, total)
    return finished(int(total), x.numel() * x.dtype.itemsize)


def finished(total: int, num_bytes: int) -> int:
    """Returns the fingerprint of a tensor of num_bytes bytes whose mixed words add up to `total`, modulo 2^64."""
    return (total + mix(num_bytes)) & _MASK


def mix(x: int) -> int:
    """Returns x mixed by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def check_source(x: object, name: str) -> None:
    """Raises TypeError unless x is a table, or a tensor whose bytes can be read. name: what the message calls x."""
    if isinstance(x, CompressedTensor):
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; wanted a torch.Tensor or an ibp.CompressedTensor")
    geometry.check_tensor(x, name)


def byte_blocks(x: torch.Tensor | CompressedTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first byte, bytes) of the blocks of a tensor, in order, on its device. Each block but the last one has a
    multiple of 8 bytes. A contiguous tensor is one block, which is not copied."""
    if isinstance(x, torch.Tensor) and (x.is_contiguous() or x.dim() == 0):
        yield 0, geometry.bytes_of(x)
        return
    num_items = x.shape[0] if x.dim() else 1
    item_bytes = x.numel() * x.dtype.itemsize // max(1, num_items)
    step = max(1, _BLOCK_BYTES // max(1, item_bytes * WORD_BYTES)) * WORD_BYTES
    for first in range(0, num_items, step):
        last = min(first + step, num_items)
        items = decode_items(x, first, last, check=x.is_cuda) if isinstance(x, CompressedTensor) else x[first:last]
        yield first * item_bytes, geometry.bytes_of(items)
