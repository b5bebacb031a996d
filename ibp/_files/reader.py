"""What is in a file: its bytes, mapped, as tables and tensors."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .. import _layout
from .._compressed_tensor import CompressedTensor
from .._rows import DTYPES, Geometry
from .._schemes import AnyCodebook
from .._table import raw_overflow_bytes
from . import checks
from .fields import (
    ALIGNMENT,
    CODEC_PARTS,
    TABLE_PARTS,
    ChecksumError,
    Fields,
    FileFormatError,
    TableFields,
    dtype_of,
    read_codebook,
    table_fields,
)
from .header import Entry, read_header
from .writer import CHECKS, PREFIX

_TABLE, _CODEBOOK, _REMOVED = f"{PREFIX}table.", f"{PREFIX}codebook.", f"{PREFIX}removed."
_DTYPES = {"slots": torch.uint8, "overflow": torch.uint8, "lengths": torch.uint16, "bases": torch.int64}
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap of older Pythons lacks


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are."""

    file: OpenFile
    entry: Entry


class OpenFile:
    """One file, mapped.

    Attributes:
        path: of the file.
        header: what stands before its data.
        tables: lines of the tables by their names.
        removed: names that the delta of a checkpoint says are gone.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)
        metadata = self.header.metadata
        own = {} if self.header.is_plain else metadata
        self.tables = {key[len(_TABLE) :]: text for key, text in own.items() if key.startswith(_TABLE)}
        self.removed = [key[len(_REMOVED) :] for key in own if key.startswith(_REMOVED)]
        self._pages: mmap.mmap | None = None
        self._codebooks: dict[int, AnyCodebook] = {}
        self._checks: Checks | None = None

    @property
    def user_metadata(self) -> dict[str, str]:
        """The metadata without what is ibp's."""
        if self.header.is_plain:
            return dict(self.header.metadata)
        return {key: text for key, text in self.header.metadata.items() if not key.startswith(PREFIX)}

    def is_own(self, name: str) -> bool:
        """Whether a tensor belongs to the file itself: padding, checksums, codebooks."""
        return not self.header.is_plain and (name == CHECKS or name.startswith((f"{PREFIX}padding.", _CODEBOOK)))

    def codebook_entries(self) -> list[Entry]:
        """Where the codebooks are."""
        return [entry for name, entry in self.header.tensors.items() if name.startswith(_CODEBOOK)]

    # ---- bytes ----

    def bytes_at(self, start: int, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], mapped: memory of its own once written to. It keeps the mapping alive."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._pages is None:
            self._pages = self._mapped()
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes, offset=start)

    def _mapped(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            wanted = max((entry.end for entry in self.header.tensors.values()), default=self.header.num_bytes)
            if os.fstat(file.fileno()).st_size != wanted:
                raise FileFormatError(f"{self.path} has changed since it was opened")
            flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), wanted, flags=flags, prot=access)

    def close(self) -> None:
        """Forgets the mapping, which tensors in it keep."""
        self._pages = None
        self._codebooks.clear()

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor."""
        entry = self.header.tensors[name]
        dtype = dtype_of(entry.dtype)
        if dtype.itemsize * math.prod(entry.shape) != entry.num_bytes:
            raise FileFormatError(f"{self.path}: {name!r} is {entry.dtype}, of which torch has no such tensors")
        data = self.bytes_at(entry.start, entry.num_bytes)
        if entry.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    # ---- codebooks ----

    def codebook(self, number: int) -> AnyCodebook:
        """The codebook of a number; read once."""
        if number not in self._codebooks:
            self._codebooks[number] = read_codebook(number, self._codebook_line, self._codebook_part)
        return self._codebooks[number]

    def _codebook_line(self, number: int) -> str:
        line = self.header.metadata.get(f"{_CODEBOOK}{number}")
        if line is None:
            raise FileFormatError(f"{self.path} has no codebook {number}")
        return line

    def _codebook_part(self, number: int, part: str, dtype: str, count: int) -> np.ndarray:
        name = f"{_CODEBOOK}{number}:{part}"
        numpy_dtype = np.dtype(f"<u{int(dtype[1:]) // 8}")
        entry = self.header.tensors.get(name)
        if entry is None and count == 0:
            return np.empty(0, numpy_dtype)
        data = part_bytes(self, name, entry, dtype, count * numpy_dtype.itemsize)
        return data.numpy().view(numpy_dtype)

    # ---- checksums ----

    @property
    def checks(self) -> Checks | None:
        """The checksums; None of a file that has none."""
        if self._checks is None and CHECKS in self.header.tensors and not self.header.is_plain:
            self._checks = Checks(self)
        return self._checks


class Checks:
    """The checksums of a file, themselves checked, and which blocks have been."""

    def __init__(self, file: OpenFile) -> None:
        fields = Fields(f"{file.path}: {CHECKS}", file.header.metadata.get(CHECKS, ""))
        self.block_bytes, self.hash = fields.number("block_bytes", 2**40), fields.text("hash")
        if self.hash != checks.HASH or self.block_bytes < 1 or self.block_bytes & (self.block_bytes - 1):
            raise fields.error(f"its blocks of {self.block_bytes} bytes or its hash {self.hash!r} are none it can have")
        entry = file.header.tensors[CHECKS]
        self.start, self.end = file.header.num_bytes, entry.start
        self.num_blocks = -(-(self.end - self.start) // self.block_bytes)
        if entry.dtype != "U64" or entry.shape != (self.num_blocks + 2,) or entry.start % 8:
            raise fields.error(f"it is {entry.dtype} {list(entry.shape)}; wanted U64 [{self.num_blocks + 2}]")
        self._file = file
        self._hashes = file.bytes_at(entry.start, entry.num_bytes).numpy().view("<u8")
        self._is_right = np.zeros(self.num_blocks, bool)
        self._check_itself()

    def _check_itself(self) -> None:
        own = checks.hash_of(self._hashes[:-1].tobytes())
        if own != int(self._hashes[-1]):
            raise ChecksumError(f"{self._file.path}: the checksums have another checksum: they are damaged")
        header = self._file.bytes_at(0, self.start).numpy()
        if checks.hash_of(header) != int(self._hashes[-2]):
            raise ChecksumError(f"{self._file.path}: the header has another checksum: it is damaged")

    def blocks_of(self, entry: Entry) -> range:
        """The blocks that hold a tensor's bytes."""
        if entry.num_bytes == 0:
            return range(0)
        first, last = entry.start - self.start, entry.end - 1 - self.start
        return range(first // self.block_bytes, last // self.block_bytes + 1)

    def check(self, block: int) -> int:
        """Compares the checksum of a block, unless it has been before. Returns the block's bytes.

        Raises:
            ChecksumError: it is wrong; the message names the block and the tensors that have bytes in it.
        """
        start = self.start + block * self.block_bytes
        num_bytes = min(self.block_bytes, self.end - start)
        if not self._is_right[block]:
            if checks.hash_of(self._file.bytes_at(start, num_bytes).numpy()) != int(self._hashes[block]):
                raise ChecksumError(
                    f"{self._file.path}: block {block}, bytes {start} to {start + num_bytes - 1} of the file, has "
                    f"another checksum: {self._names_in(start, start + num_bytes)} is damaged"
                )
            self._is_right[block] = True
        return num_bytes

    def _names_in(self, start: int, end: int) -> str:
        entries = self._file.header.tensors.items()
        names = [name for name, entry in entries if entry.start < end and entry.end > start and entry.num_bytes]
        return ", ".join(map(repr, names[:3])) + (f" or one of {len(names) - 3} more" if len(names) > 3 else "")


# ---- parts of tables ----


def part_bytes(file: OpenFile, name: str, entry: Entry | None, dtype: str, num_bytes: int) -> torch.Tensor:
    """The bytes of a part without its padding. FileFormatError unless it is there, of the dtype, aligned, and as long
    as it must be."""
    padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if entry is None:
        raise FileFormatError(f"{file.path}: {name!r}, of {num_bytes} bytes, is missing")
    if entry.dtype != dtype or len(entry.shape) != 1 or entry.start % ALIGNMENT or entry.num_bytes != padded:
        raise FileFormatError(
            f"{file.path}: {name!r} is {entry.dtype} {list(entry.shape)} at byte {entry.start}; wanted {dtype} of "
            f"{padded} bytes at a multiple of {ALIGNMENT}"
        )
    return file.bytes_at(entry.start, num_bytes)


def part_names(table: str) -> list[str]:
    """Names that the parts of a table can have."""
    return [f"{table}:{part}" for part in (*TABLE_PARTS, *CODEC_PARTS)]


def read_table(file: OpenFile, name: str, find: Callable[[str], Place | None]) -> tuple[CompressedTensor, TableFields]:
    """A table over the mapping of its parts, and its fields.

    Args:
        file: that has its line.
        find: where a part is.

    Raises:
        FileFormatError: fields or parts are none of a table.
    """
    fields = table_fields(name, file.tables[name])
    what = f"{file.path}: table {name!r}"
    if fields.codec is not None:
        raise FileFormatError(f"{what} is coded by {fields.codec[:40]!r}, which this ibp lacks")
    dtype = dtype_of(fields.dtype)
    geometry = _geometry(fields, dtype, what)
    tensors = {}
    for part in TABLE_PARTS:
        place = find(f"{name}:{part}")
        owner, entry = (file, None) if place is None else (place.file, place.entry)
        data = torch.empty(0, dtype=torch.uint8)
        num_bytes = _part_bytes(part, fields, geometry, entry)
        if num_bytes:
            data = part_bytes(owner, f"{name}:{part}", entry, TABLE_PARTS[part], num_bytes)
        elif entry is not None:
            raise FileFormatError(f"{what} has {part!r}, which such a table lacks")
        tensors[part] = data.view(_DTYPES[part])
    try:
        table = CompressedTensor(
            shape=fields.shape,
            dtype=dtype,
            scheme=fields.scheme or "",
            row_bytes=fields.row_bytes,
            slot_bytes=fields.slot_bytes,
            codebook=None if fields.codebook is None else file.codebook(fields.codebook),
            **tensors,
        )
        return table, fields
    except FileFormatError:
        raise
    except (ValueError, TypeError) as error:
        raise FileFormatError(f"{what}: {error}") from error


def _geometry(fields: TableFields, dtype: torch.dtype, what: str) -> Geometry:
    if dtype not in DTYPES or fields.row_bytes < 1:
        raise FileFormatError(f"{what} has {fields.dtype} in rows of {fields.row_bytes} bytes: no table can")
    if math.prod(max(1, size) for size in fields.shape) * dtype.itemsize > 2**63 - 1:
        raise FileFormatError(f"{what} has shape {list(fields.shape)}: wanted at most 2^63 - 1 bytes")
    return Geometry(torch.Size(fields.shape), dtype, fields.row_bytes)


def _part_bytes(part: str, fields: TableFields, geometry: Geometry, entry: Entry | None) -> int:
    """Bytes of a table's part without padding (FORMAT.md sections 1 to 3); of overflow those that it has."""
    is_raw = fields.scheme == "raw"
    if part == "slots":
        return _layout.slots_size(geometry, fields.slot_bytes)
    if part == "lengths":
        return 0 if is_raw else 2 * geometry.num_rows
    raw_overflow = raw_overflow_bytes(geometry, fields.slot_bytes) if is_raw else 0
    if part == "overflow":
        return raw_overflow if is_raw or entry is None else entry.num_bytes
    return 8 * -(-geometry.num_rows // fields.rows_per_base) if raw_overflow or (entry and not is_raw) else 0
