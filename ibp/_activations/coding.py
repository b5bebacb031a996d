"""The bytes of activations, coded into one piece of memory and back: a `Place` without slots, so that what rows take
lies together, behind its index, and a copy of the first bytes is all of it."""

from __future__ import annotations

import torch

from .. import _choice, _layout, _rows
from .._calibration import Calibration
from .._place import Place, encode_into
from .._schemes import AnyCodebook, Request, measure

ROW_BYTES = 4096
COUNTERS_BYTES = 64  # at the start of a place's memory; the first 8 say how many bytes of overflow are used
_SAMPLE_BYTES = 1 << 20
_MARGIN = 1 / 64  # of room, over what was needed
_LEAST_OF_ROOM = 0.85  # that is needed; below, room is made smaller, so that sizes seldom change
_SPARE_BYTES = 4096
_OUTDATED, _SPARE_SHARE = 1.1, 0.02


class Recipe:
    """How activations of one kind are coded, and how large they become.

    Args:
        codebook: of rows of ROW_BYTES bytes.
        share: of their bytes that a sample took, as coded.
    """

    def __init__(self, codebook: AnyCodebook, share: float) -> None:
        self.codebook, self.learned_share, self.needed_share = codebook, share, share
        self._room_share = share * (1 + 2 * _MARGIN)

    def room(self, num_bytes: int) -> int:
        """Bytes of overflow that activations of so many bytes are expected to fit."""
        return min(most_overflow(num_bytes), int(self._room_share * num_bytes) + _SPARE_BYTES)

    def note(self, num_bytes: int, used_bytes: int) -> None:
        """What activations took of overflow."""
        self.needed_share = used_bytes / num_bytes
        if not _LEAST_OF_ROOM * self._room_share <= self.needed_share <= self._room_share:
            self._room_share = self.needed_share * (1 + _MARGIN)

    @property
    def is_outdated(self) -> bool:
        """Whether activations take clearly more than when the recipe was learned."""
        return self.needed_share > _OUTDATED * self.learned_share + _SPARE_SHARE


def num_rows(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


def most_overflow(num_bytes: int) -> int:
    """Bytes of overflow that any rows fit, also those without a coded form."""
    return num_rows(num_bytes) * ROW_BYTES


def index_bytes(codebook: AnyCodebook, num_bytes: int) -> int:
    """Bytes before overflow."""
    return Place.memory_bytes(codebook, num_rows(num_bytes), slot_bytes=0, overflow_bytes=0)


def memory_for(codebook: AnyCodebook, data: torch.Tensor) -> torch.Tensor:
    """Memory on the device of data, uint8 [num_bytes], that it fits, however it is coded."""
    size = index_bytes(codebook, data.numel()) + most_overflow(data.numel())
    return torch.empty(size, dtype=torch.uint8, device=data.device)


def encode(data: torch.Tensor, codebook: AnyCodebook, memory: torch.Tensor) -> None:
    """Codes data, uint8 [num_bytes], on the current stream."""
    room = most_overflow(data.numel())
    encode_into(data, Place(codebook, num_rows(data.numel()), slot_bytes=0, overflow_bytes=room, memory=memory))


def decode(memory: torch.Tensor, codebook: AnyCodebook, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], decoded on the current stream from the first bytes of memory that was coded into: as many as
    are used."""
    room = memory.numel() - index_bytes(codebook, num_bytes)
    place = Place.over(memory, codebook, num_rows(num_bytes), slot_bytes=0, overflow_bytes=room)
    out = torch.empty(num_bytes, dtype=torch.uint8, device=memory.device)
    place._read_into(out)
    return out


def learn(data: torch.Tensor, dtype: torch.dtype) -> Recipe | None:
    """A recipe for activations by a sample of some: data, uint8 [num_bytes], elements of dtype. None where they would
    not get smaller."""
    total = data.numel() // ROW_BYTES
    if total == 0:
        return None
    count = min(total, _SAMPLE_BYTES // ROW_BYTES)
    places = torch.arange(count, device=data.device) * total // count
    rows = data[: total * ROW_BYTES].view(total, ROW_BYTES)[places]
    geometry = _rows.Geometry(torch.Size((count, ROW_BYTES // dtype.itemsize)), dtype, ROW_BYTES)
    request = Request(rows.view(-1), geometry, data.device, slot_bytes=0, codes_invariant=True)
    codebook = _choice.learn("planes", request)
    if codebook is None:
        return None
    share = stored_share(rows.view(-1), codebook)
    return Recipe(codebook, share) if share < 1 else None


def stored_share(rows: torch.Tensor, codebook: AnyCodebook) -> float:
    """The share of their bytes that whole rows take of overflow, where each begins at a sector."""
    lengths = measure(rows, codebook, rows.device).to(torch.int32)
    stored = torch.where(lengths == 0, ROW_BYTES, torch.where(lengths == ROW_BYTES, 0, lengths))
    sectors = (stored + _layout.SECTOR_BYTES - 1) // _layout.SECTOR_BYTES
    return float(sectors.sum()) * _layout.SECTOR_BYTES / rows.numel()


def coder_ns(codebook: AnyCodebook, machine: Calibration) -> float:
    """Time of coding and decoding a byte, in ns."""
    rates = _choice.coder_rates(codebook, machine)
    return 1 / rates.encode_gbps + 1 / rates.decode_gbps
