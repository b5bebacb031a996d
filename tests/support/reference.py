"""An encoder and a decoder of compressed tables in plain numpy, written from csrc/FORMAT.md alone.

It is slow and simple on purpose, because the C and CUDA code is compared with it. Section numbers are those of
FORMAT.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

ROWS_PER_BASE = 32
OVERFLOW_ALIGN = 32


class CorruptRow(ValueError):
    """A row that contradicts its length, its codebook or its buffers (section 6)."""


@dataclasses.dataclass
class Codebook:
    """A codebook of section 5: the distinct (mask, bitval) pairs of the chunks of a row, and the pair of each chunk."""

    row_bytes: int
    chunk_bytes: int
    flag_all: bool
    palette: np.ndarray  # uint8 [P, 2, chunk_bytes]
    index: np.ndarray  # uint8 or uint16 [num_chunks]; empty if P is 1

    @property
    def num_chunks(self) -> int:
        return ceil_div(self.row_bytes, self.chunk_bytes)

    def pairs(self) -> np.ndarray:
        """Returns (mask, bitval) of every chunk: uint8 [num_chunks, 2, chunk_bytes]."""
        if len(self.palette) == 1:
            return np.repeat(self.palette, self.num_chunks, axis=0)
        return self.palette[self.index]

    def flagged(self) -> np.ndarray:
        """Returns which chunks have a participation bit: bool [num_chunks]."""
        return self.pairs()[:, 0].any(axis=1) | self.flag_all


@dataclasses.dataclass
class Table:
    """A table of sections 1 to 3. If codebook is None, the scheme is raw (section 4)."""

    num_bytes: int
    row_bytes: int
    slot_bytes: int
    codebook: Codebook | None
    lengths: np.ndarray  # uint16 [num_rows]; empty if every row is raw
    bases: np.ndarray  # uint64 [ceil(num_rows / rows_per_base)]; empty if no row has an overflow part
    slots: np.ndarray  # uint8
    overflow: np.ndarray  # uint8
    default: bytes = b"\0"  # the bytes that a default row repeats
    rows_per_base: int = ROWS_PER_BASE  # ROWS_PER_BASE or 1

    @property
    def num_rows(self) -> int:
        return ceil_div(self.num_bytes, self.row_bytes)

    def valid(self, row: int) -> int:
        return min(self.row_bytes, self.num_bytes - row * self.row_bytes)

    def is_default(self, row: int) -> bool:
        return len(self.lengths) > 0 and int(self.lengths[row]) == default_length(self.row_bytes)

    def stored(self, row: int) -> int:
        length = int(self.lengths[row]) if len(self.lengths) else 0
        return 0 if self.is_default(row) else length or self.valid(row)

    def default_row(self, row: int) -> bytes:
        return (self.default * self.row_bytes)[: self.valid(row)]

    def part(self, row: int) -> int:
        return max(0, self.stored(row) - self.slot_bytes)

    def room(self, row: int) -> int:
        part = self.part(row)
        return ceil_div(part, OVERFLOW_ALIGN) * OVERFLOW_ALIGN if self.slot_bytes > 0 else part

    def overflow_start(self, row: int) -> int:
        if self.rows_per_base == 1:
            return int(self.bases[row])
        group = row // ROWS_PER_BASE
        return int(self.bases[group]) + sum(self.room(q) for q in range(group * ROWS_PER_BASE, row))


def default_length(row_bytes: int) -> int:
    """Returns the length that marks a default row."""
    return min(row_bytes, 65535)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def bits_of(data: bytes | np.ndarray) -> np.ndarray:
    return np.unpackbits(as_bytes(data), bitorder="little")


def as_bytes(data: bytes | np.ndarray) -> np.ndarray:
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)


def padded(data: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([data, np.zeros(size - len(data), np.uint8)])


# ---- codebook ------------------------------------------------------------------------------------------------------


def make_codebook(
    mask: bytes | np.ndarray, bitval: bytes | np.ndarray, chunk_bytes: int, flag_all: bool = False
) -> Codebook:
    """Returns the codebook of a row's masks and bitvals. Pairs are numbered in order of appearance."""
    mask, bitval = as_bytes(mask), as_bytes(bitval)
    assert mask.shape == bitval.shape and not np.any(bitval & ~mask)
    size = ceil_div(len(mask), chunk_bytes) * chunk_bytes
    chunks = np.stack(
        [padded(mask, size).reshape(-1, chunk_bytes), padded(bitval, size).reshape(-1, chunk_bytes)], axis=1
    )
    numbers: dict[bytes, int] = {}
    index = [numbers.setdefault(pair.tobytes(), len(numbers)) for pair in chunks]
    palette = np.frombuffer(b"".join(numbers), np.uint8).reshape(-1, 2, chunk_bytes)
    index_type = np.uint8 if len(palette) <= 256 else np.uint16
    return Codebook(len(mask), chunk_bytes, flag_all, palette, np.array(index if len(palette) > 1 else [], index_type))


def masks_of(codebook: Codebook) -> tuple[np.ndarray, np.ndarray]:
    """Returns mask and bitval of a whole row, row_bytes bytes each."""
    pairs = codebook.pairs()
    return tuple(pairs[:, i].reshape(-1)[: codebook.row_bytes] for i in (0, 1))


# ---- one row -------------------------------------------------------------------------------------------------------


def kept_bits(codebook: Codebook, participates: np.ndarray) -> np.ndarray:
    """Returns which bits of a row are stored: bool [8 * row_bytes]."""
    removed = codebook.pairs()[:, 0] * participates[:, None].astype(np.uint8)
    return bits_of(removed.reshape(-1)[: codebook.row_bytes]) == 0


def encode_row(codebook: Codebook, row: bytes | np.ndarray) -> bytes:
    """Returns the coded row, whether or not it is smaller than the row."""
    row = as_bytes(row)
    assert len(row) == codebook.row_bytes
    chunks = padded(row, codebook.num_chunks * codebook.chunk_bytes).reshape(-1, codebook.chunk_bytes)
    pairs, flagged = codebook.pairs(), codebook.flagged()
    participates = flagged & ((chunks & pairs[:, 0]) == pairs[:, 1]).all(axis=1)
    kept = bits_of(row)[kept_bits(codebook, participates)]
    return np.packbits(np.concatenate([participates[flagged], kept]).astype(np.uint8), bitorder="little").tobytes()


def decode_row(codebook: Codebook, coded: bytes | np.ndarray) -> bytes:
    bits, flagged = bits_of(coded), codebook.flagged()
    num_flags = int(flagged.sum())
    if len(bits) < num_flags:
        raise CorruptRow(f"{len(coded)} bytes cannot hold {num_flags} participation bits")
    participates = np.zeros(codebook.num_chunks, bool)
    participates[flagged] = bits[:num_flags] == 1
    kept = kept_bits(codebook, participates)
    num_bits = num_flags + int(kept.sum())
    if ceil_div(num_bits, 8) != len(coded):
        raise CorruptRow(f"the participation bits ask for {ceil_div(num_bits, 8)} bytes, there are {len(coded)}")
    row = bits_of(masks_of(codebook)[1]).copy()
    row[kept] = bits[num_flags:num_bits]
    return np.packbits(row, bitorder="little").tobytes()


# ---- a table -------------------------------------------------------------------------------------------------------


def encode_table(data: bytes | np.ndarray, row_bytes: int, slot_bytes: int, codebook: Codebook | None) -> Table:
    """Encodes the bytes of a whole tensor. slot_bytes: 0 (packed), a multiple of 32 below row_bytes (slots), or
    row_bytes (in place)."""
    data = as_bytes(data)
    none = {"lengths": np.zeros(0, np.uint16), "bases": np.zeros(0, np.uint64), "overflow": np.zeros(0, np.uint8)}
    if codebook is None:
        return Table(len(data), row_bytes, row_bytes, None, slots=data, **none)
    table = Table(len(data), row_bytes, slot_bytes, codebook, slots=np.zeros(0, np.uint8), **none)
    rows = []
    for r in range(table.num_rows):
        row = data[r * row_bytes : r * row_bytes + table.valid(r)]
        rows.append(stored_form(table, r, row, encode_row(codebook, padded(row, row_bytes))))
    place_rows(table, rows)
    if not table.lengths.any():
        table.lengths = none["lengths"]
    return table


def stored_form(table: Table, r: int, row: np.ndarray, coded: bytes) -> np.ndarray:
    """Returns the bytes that are stored for a row: none, the coded bytes, or the row itself."""
    if row.tobytes() == table.default_row(r):
        return row[:0]
    is_shorter = len(coded) < min(len(row), default_length(table.row_bytes))
    return np.frombuffer(coded, np.uint8) if is_shorter else row


def place_rows(table: Table, rows: list[np.ndarray]) -> None:
    """Fills lengths, bases, slots and overflow. rows: the stored bytes of each row."""
    lengths = [len(row) if len(row) < table.valid(r) else 0 for r, row in enumerate(rows)]
    lengths = [length if len(row) else default_length(table.row_bytes) for length, row in zip(lengths, rows)]
    table.lengths = np.array(lengths, np.uint16)
    rooms = [table.room(r) for r in range(table.num_rows)]
    starts = np.concatenate([[0], np.cumsum(rooms)]).astype(np.int64)
    if starts[-1] > 0:
        table.bases = starts[: table.num_rows : ROWS_PER_BASE].astype(np.uint64)
    in_place = table.slot_bytes == table.row_bytes
    table.slots = np.zeros(table.num_bytes if in_place else table.num_rows * table.slot_bytes, np.uint8)
    table.overflow = np.zeros(starts[-1], np.uint8)
    for r, row in enumerate(rows):
        in_slot, part = row[: table.slot_bytes], row[table.slot_bytes :]
        table.slots[r * table.slot_bytes :][: len(in_slot)] = in_slot
        table.overflow[starts[r] : starts[r] + len(part)] = part


def stored_row(table: Table, row: int) -> np.ndarray:
    """Returns the stored bytes of a row, from its slot and its part of the overflow."""
    stored, part = table.stored(row), table.part(row)
    if stored > table.valid(row):
        raise CorruptRow(f"row {row} stores {stored} bytes, more than its {table.valid(row)}")
    start = row * table.slot_bytes
    in_slot = table.slots[start : start + stored - part]
    if len(in_slot) < stored - part:
        raise CorruptRow(f"the slot of row {row} is not inside slots")
    if part == 0:
        return in_slot
    if len(table.bases) == 0:
        raise CorruptRow(f"row {row} needs overflow, and there are no bases")
    start = table.overflow_start(row)
    if start + part > len(table.overflow):
        raise CorruptRow(f"the overflow part of row {row} is not inside overflow")
    return np.concatenate([in_slot, table.overflow[start : start + part]])


def decode_table_row(table: Table, row: int) -> bytes:
    """Returns the valid(row) original bytes of a row."""
    stored = stored_row(table, row)
    if table.is_default(row):
        return table.default_row(row)
    if len(table.lengths) == 0 or table.lengths[row] == 0:
        return stored.tobytes()
    return decode_row(table.codebook, stored)[: table.valid(row)]


def decode_table(table: Table) -> bytes:
    """Returns the original bytes. Raises CorruptRow at the first bad row."""
    return b"".join(decode_table_row(table, r) for r in range(table.num_rows))


def stored_bytes(table: Table) -> int:
    """Returns the bytes of the coded rows and of the codebook, without the row index."""
    codebook = table.codebook
    codebook_bytes = 0 if codebook is None else codebook.palette.nbytes + codebook.index.nbytes
    return sum(table.stored(r) for r in range(table.num_rows)) + codebook_bytes


GOLDEN = 0x9E3779B97F4A7C15


def fingerprint(data: bytes) -> int:
    """Returns the fingerprint of section 10."""
    words = np.frombuffer(bytes(data) + bytes(-len(data) % 8), "<u8")
    with np.errstate(over="ignore"):
        offsets = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        total = mix(words + offsets).sum(dtype=np.uint64) + mix(np.array([len(data)], np.uint64))[0]
    return int(total)


def mix(x: np.ndarray) -> np.ndarray:
    """Computes the finalizer of SplitMix64 on uint64s."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
