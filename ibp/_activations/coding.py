"""The bytes of activations, coded into one piece of memory and back. It holds counters and an index of the rows, then
all that rows take, in one overflow area without slots: a copy of the first bytes is all of it. Rows are those of a
`Place`, laid out and called with as few operations as can be, as a step has hundreds of them."""

from __future__ import annotations

import torch

from .._layout import geometry as _rows
from .._layout import slots
from .._machine.calibration import Calibration
from .._schemes import AnyCodebook, Request, choice, measure
from .origin import Origin
from .spans import View, element_type

ROW_BYTES = 4096
PIECE_BYTES = 64 << 20  # about a millisecond of the link: the first is on its way while the next is coded
COUNTERS_BYTES = 64  # bytes of overflow in use; rows spilled and lost; 4 of a fault; 1 more: int64
_ALIGNMENT = 64  # of overflow
_SAMPLE_BYTES = 1 << 20
_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly over [0, 1) whatever their number
_FIRST_MARGIN = 1 / 32  # of room, over what a sample took
_LEAST_MARGIN, _MOST_MARGIN = 1 / 256, 1 / 16  # over what was needed
_CHANGES = 4  # from one time to the next, that a margin is for
_SPARE_BYTES = 4096
_OUTDATED, _SPARE_SHARE = 1.1, 0.02


class Recipe:
    """How activations of one kind are coded, and how large they become.

    Args:
        codebook: of rows of ROW_BYTES bytes.
        share: of their bytes that a sample took, as coded.
        origin: where elements are counted from; what is left of them is coded. None: they are coded as they are.
    """

    def __init__(self, codebook: AnyCodebook, share: float, origin: Origin | None = None) -> None:
        self.codebook, self.learned_share, self.needed_share = codebook, share, share
        self.codec, self.origin = codebook.codec, origin
        self._room_share, self._noted_share = share * (1 + _FIRST_MARGIN), 0.0
        self._change, self._has_needed = 0.0, False  # of the needed share, as a share of it; whether it was noted yet

    @property
    def times_narrower(self) -> int:
        """Than activations, what is coded of them."""
        return 1 if self.origin is None else self.origin.times_narrower

    def takes(self, num_bytes: int) -> bool:
        """Whether activations of so many bytes can be coded."""
        return self.origin is None or self.origin.takes(num_bytes)

    def room(self, num_bytes: int) -> int:
        """Bytes of overflow that activations of so many bytes are expected to fit."""
        return min(most_overflow(num_bytes), int(self._room_share * num_bytes) + _SPARE_BYTES)

    def begin(self) -> None:
        """Says that activations are about to be coded: room for them follows what the largest piece needed that was
        noted since the last time, with a margin for changes like the last ones."""
        needed, self._noted_share = self._noted_share, 0.0
        if needed == 0:
            return
        if self._has_needed:
            self._change = max(abs(needed / self.needed_share - 1), self._change / 2)
        self.needed_share, self._has_needed = needed, True
        margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, _CHANGES * self._change))
        if not needed * (1 + margin / 2) <= self._room_share <= needed * (1 + 2 * margin):
            self._room_share = needed * (1 + margin)

    def note(self, num_bytes: int, used_bytes: int) -> None:
        """What a piece took of overflow."""
        self._noted_share = max(self._noted_share, used_bytes / num_bytes)

    @property
    def is_outdated(self) -> bool:
        """Whether activations take clearly more than when the recipe was learned."""
        return self.needed_share > _OUTDATED * self.learned_share + _SPARE_SHARE


def pieces(num_bytes: int) -> list[tuple[int, int]]:
    """Where pieces of so many bytes start and end: whole rows, but for the last one."""
    return [(start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES)]


def num_rows(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


def most_overflow(num_bytes: int) -> int:
    """Bytes of overflow that any rows fit, also those without a coded form."""
    return num_rows(num_bytes) * ROW_BYTES


def index_bytes(num_bytes: int) -> int:
    """Bytes before overflow: counters, a base and a length for each row."""
    return -(-(COUNTERS_BYTES + 10 * num_rows(num_bytes)) // _ALIGNMENT) * _ALIGNMENT


def used_bytes(counters: torch.Tensor) -> int:
    """Bytes of overflow in use, by counters in host memory."""
    return int(counters[:8].view(torch.int64))


def memory_for(data: torch.Tensor) -> torch.Tensor:
    """Memory on the device of data, uint8 [num_bytes], that it fits, however it is coded."""
    size = index_bytes(data.numel()) + most_overflow(data.numel())
    return torch.empty(size, dtype=torch.uint8, device=data.device)


def _parts(memory: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, ...]:
    """Bytes of (bytes in use, rows spilled and lost, fault, bases, lengths, overflow), of which the last may be shorter
    than it was."""
    rows, index = num_rows(num_bytes), index_bytes(num_bytes)
    sizes = (8, 16, 32, 8, 8 * rows, 2 * rows, index - COUNTERS_BYTES - 10 * rows, memory.numel() - index)
    used, counts, fault, _, bases, lengths, _, overflow = torch.split_with_sizes(memory, sizes)
    return used, counts, fault, bases, lengths, overflow


_fresh_of: dict[torch.device, torch.Tensor] = {}


def _fresh(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [at least num_bytes] on a device: counters and bases before anything is coded."""
    found = _fresh_of.get(device)
    if found is None or found.numel() < num_bytes:
        counters = torch.zeros(COUNTERS_BYTES // 8, dtype=torch.int64, device=device)
        bases = torch.full((max(num_bytes // 8, num_rows(PIECE_BYTES)),), -1, dtype=torch.int64, device=device)
        found = torch.cat([counters, bases]).view(torch.uint8)
        if found.is_cuda:
            torch.cuda.current_stream(device).synchronize()  # other streams read it
        _fresh_of[device] = found
    return found


def encode(data: torch.Tensor, recipe: Recipe, memory: torch.Tensor) -> None:
    """Codes data, uint8 [num_bytes], on the current stream."""
    used, counts, fault, bases, lengths, overflow = _parts(memory, data.numel())
    end = COUNTERS_BYTES + bases.numel()
    memory[:end].copy_(_fresh(end, memory.device)[:end])
    words, none, rows = recipe.codebook.words(data.device), memory[:0], lengths.view(torch.uint16)
    torch.ops.ibp.encode_into.default(
        *(none, overflow, rows, bases.view(torch.int64), words, recipe.codec, 0, 0, rows.numel(), ROW_BYTES),
        *(rows[:0], used.view(torch.int64), counts.view(torch.int64), data, None, None, 0, 0, fault.view(torch.int64)),
    )


def decode(memory: torch.Tensor, recipe: Recipe, out: torch.Tensor, fault: torch.Tensor) -> None:
    """Decodes into out, uint8 [num_bytes], on the current stream, from the first bytes of memory that was coded into:
    as many as are used. fault: int64 [4] on the device, where damage is noted."""
    *_, bases, lengths, overflow = _parts(memory, out.numel())
    words, none, rows = recipe.codebook.words(memory.device), memory[:0], lengths.view(torch.uint16)
    torch.ops.ibp.decode_bytes.default(
        *(none, overflow, rows, bases.view(torch.int64), words, recipe.codec, 0, 0, rows.numel(), ROW_BYTES),
        *(0, out.numel(), 0, out, fault),
    )


def learn(data: torch.Tensor, view: View) -> Recipe | None:
    """A recipe for activations by a sample of some: data, uint8 [num_bytes], and how the tensor lies in them. None
    where they would not get smaller."""
    if (origin := Origin.of(data, view)) is not None:
        rest, _ = origin.narrow(data)
        if (recipe := _learned(rest, origin.dtype, origin)) is not None:
            return recipe
    return _learned(data, element_type(view.dtype), None)


def _learned(data: torch.Tensor, dtype: torch.dtype, origin: Origin | None) -> Recipe | None:
    """A recipe for what is coded of activations, uint8 [num_bytes], elements of dtype."""
    total = data.numel() // ROW_BYTES
    if total == 0:
        return None
    rows = data[: total * ROW_BYTES].view(total, ROW_BYTES)[_places(total, data.device)]
    geometry = _rows.Geometry(torch.Size((len(rows), ROW_BYTES // dtype.itemsize)), dtype, ROW_BYTES)
    request = Request(rows.view(-1), geometry, rows.device, slot_bytes=0, codes_invariant=True)
    codebook = choice.learn("planes", request)
    if codebook is None:
        return None
    share = stored_share(rows.view(-1), codebook)
    return Recipe(codebook, share, origin) if share < 1 else None


def _places(total: int, device: torch.device) -> torch.Tensor:
    """Rows for a sample of so many: one of each of equal parts, at places that differ from part to part. At equal
    distances they could all be the same part of an image."""
    count = min(total, _SAMPLE_BYTES // ROW_BYTES)
    parts = torch.arange(count, dtype=torch.float64)
    return ((parts + parts * _GOLDEN % 1) * (total / count)).long().clamp_(max=total - 1).to(device)


def stored_share(rows: torch.Tensor, codebook: AnyCodebook) -> float:
    """The share of their bytes that whole rows take of overflow, where each begins at a sector."""
    stored = slots.stored_sizes(measure(rows, codebook, rows.device), ROW_BYTES, ROW_BYTES)
    sectors = (stored + slots.SECTOR_BYTES - 1) // slots.SECTOR_BYTES
    return float(sectors.sum()) * slots.SECTOR_BYTES / rows.numel()


def coder_ns(codebook: AnyCodebook, machine: Calibration) -> float:
    """Time of coding and decoding a byte, in ns."""
    rates = choice.coder_rates(codebook, machine)
    return 1 / rates.encode_gbps + 1 / rates.decode_gbps
