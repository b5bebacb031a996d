"""How differences of two versions are coded: by a codebook that is known beforehand, or one learned from them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from .._layout import geometry
from .._schemes import PlanesCodebook
from .._tables.compressed_tensor import CompressedTensor, compress_rows

ROW_BYTES = 8192  # what a row takes besides its listed elements, 5 to 7 bytes, is then a small part of it
# Of the weights that a step of an optimizer changes, most move to the next number, up or down.
_DIGIT_BITS = (1, 1, 4, 4)
_NUM_ENTRIES = sum(2**bits - 1 for bits in _DIGIT_BITS)
assert _NUM_ENTRIES % 2 == 0, "a number and its negative"
_SAMPLED_ROWS = 64
WELL_CODED = 0.3  # of the rows' bytes: below, no codebook that could be learned pays for the time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_bytes_of(dtype: torch.dtype) -> int:
    """Bytes of the integers that are subtracted: of complex numbers two are an element."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def integers_of(x: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, 1-D: a view where x is contiguous."""
    return geometry.bytes_of(x).view(INTEGERS[element_bytes_of(x.dtype)])


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers, which torch copies bit for bit: of floats it may quiet NaNs."""
    return x.view(INTEGERS[x.element_size()])


@functools.cache
def known_codebook(element_bytes: int) -> PlanesCodebook:
    """Listed rows of small numbers: of -1, 1, -2, 2, ... the first ones have the shortest digits; numbers that have
    none are kept whole."""
    width = 8 * element_bytes
    numbers = [number for size in range(1, _NUM_ENTRIES // 2 + 1) for number in (-size, size)]
    symbols = [number % 2**width if width < 64 else number for number in numbers]
    entries = torch.tensor([symbols], dtype=torch.int64, device="cpu")
    return PlanesCodebook(ROW_BYTES, element_bytes, 0, 0, _DIGIT_BITS, False, True, 0, 1, entries)


def is_well_coded(differences: torch.Tensor) -> bool:
    """Whether the known codebook codes them well, by a sample of rows. differences: integers, 1-D."""
    codebook, data = known_codebook(differences.element_size()), differences.view(torch.uint8)
    rows = geometry.sample(data, ROW_BYTES, _SAMPLED_ROWS) if data.numel() >= ROW_BYTES else data
    lengths = torch.ops.ibp.measure_rows(rows, codebook.words(rows.device), codebook.codec)
    valid = min(ROW_BYTES, rows.numel())
    return int(geometry.stored_sizes(lengths, ROW_BYTES, valid).sum()) <= WELL_CODED * rows.numel()


def code(differences: torch.Tensor, like: torch.Tensor | CompressedTensor) -> CompressedTensor:
    """The table of differences, integers, 1-D, of a tensor of like's shape and dtype, where they are."""
    device, element_bytes = differences.device, differences.element_size()
    if differences.numel() == 0 or is_well_coded(differences):
        known = known_codebook(element_bytes)
        table = compress_rows(differences, codebook=known, layout="packed", device=device, memory="device")
    else:
        table = compress_rows(differences, row_bytes=ROW_BYTES, layout="packed", device=device, memory="device")
    return table._with(lambda tensor: tensor, like.shape, like.dtype)


def note_change(tensors: Iterable[torch.Tensor]) -> None:
    """Tells autograd that tensors were written by address, or by an operation of this package."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
