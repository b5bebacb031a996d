"""Reads one file: its header, its bytes (mapped or copied), its checksums, and the tables and tensors in it."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash

from .. import _core
from .._common.sequences import in_threads
from .._machine import memory
from .._machine.segments import PART_DTYPES
from .._rows.codebook import AnyCodebook
from .._rows.geometry import DTYPES, Geometry
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import CODECS, WholeTensor
from .format import (
    ALIGNMENT,
    CHECKS,
    CODEBOOK_KEY,
    CODEC_PARTS,
    PADDING,
    REMOVED_KEY,
    TABLE_KEY,
    TABLE_PARTS,
    ChecksumError,
    Entry,
    FileFormatError,
    Header,
    TableFields,
    dtype_of,
    form_of,
    header_of,
    read_codebook,
    refused,
    rounded_up,
    table_fields,
)
from .paths import open_regular

_ROWS = ("slots", "overflow")  # The parts of a table that hold its rows.
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which the module mmap of older versions of Python does not have
_SHOWN_NAMES = 6  # A message shows at most this many names of tensors.
_PIECE_BYTES = 8 << 20  # Number of bytes that a thread reads, and most that it hashes, at once.
THREADS = min(16, os.cpu_count() or 1)  # Number of threads that read at once.


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        FileFormatError: the file is not a safetensors file, is truncated, has a newer format than this ibp reads, or
            has metadata of ibp but lacks the key `ibp.format`, the key `ibp.checks` or the tensor `ibp.checks`.
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return header_of(file, str(path))


def shown_names(names: Collection[str]) -> str:
    """Returns a string for a message: the first names, and the number of the others."""
    shown = ", ".join(map(repr, itertools.islice(names, _SHOWN_NAMES)))
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


class OpenFile:
    """One file, open until `close`. If another file gets the same path meanwhile, this object still reads the old file.

    Args:
        path: path of the file.
        verify: whether to compare the checksums of the header, and of what `read` reads.
    """

    def __init__(self, path: Path, *, verify: bool) -> None:
        self.path, self._verify = path, verify
        self._file = open_regular(path)
        self._close = weakref.finalize(self, os.close, self._file)
        self._num_bytes = os.fstat(self._file).st_size
        # Two maps of the whole file, each made when it is first needed: a private (copy-on-write) one for tensors that
        # may be written to, and a read-only one. Writing to a tensor never changes the file. All tensors use the same
        # maps, because the system limits the number of maps of a process. The tensors keep their map alive.
        self._private_map: mmap.mmap | None = None
        self._shared_map: _core.FilePages | None = None
        with os.fdopen(os.dup(self._file), "rb") as file:
            self.header = header_of(file, str(path))
        self._checks = Checks(self) if verify and not self.header.is_plain else None
        metadata = {} if self.header.is_plain else self.header.metadata
        # The fields of each table as a string, by the table's name.
        self.tables = {key[len(TABLE_KEY) :]: text for key, text in metadata.items() if key.startswith(TABLE_KEY)}
        # Names of the tensors that no longer exist, if the file is the delta of a checkpoint.
        self.removed = [key[len(REMOVED_KEY) :] for key in metadata if key.startswith(REMOVED_KEY)]
        self._codebooks: dict[int, AnyCodebook] = {}
        self._codebook_parts: dict[str, list[str]] = {}  # Names of the parts of each codebook, by the codebook's key.
        for name in self.header.tensors:
            if name.startswith(CODEBOOK_KEY):
                self._codebook_parts.setdefault(name.rpartition(":")[0], []).append(name)

    def fields(self, name: str) -> TableFields:
        """Returns the checked fields of a table. Raises FileFormatError if they are wrong or unknown."""
        return table_fields(f"{self.path}: table {name!r}", self.tables[name])

    def is_own(self, name: str) -> bool:
        """Returns whether a tensor in the header belongs to the format and not to the user: padding, checksums, or a
        part of a codebook."""
        return not self.header.is_plain and (name == CHECKS or name.startswith((PADDING, CODEBOOK_KEY)))

    # ---- bytes ----

    def fileno(self) -> int:
        """Returns the file's descriptor. Raises ValueError after `close`."""
        if not self._close.alive:
            raise ValueError(f"{self.path} is closed")
        return self._file

    def read(self, start: int, num_bytes: int, pin: bool | None = False) -> torch.Tensor:
        """Reads bytes of the file into new memory, uint8 [num_bytes]. Several threads read a large range. pin: whether
        to pin the memory. None: it is pinned if the system allows.

        Raises:
            ChecksumError: with `verify`, bytes are damaged.
        """
        (target,), _ = memory.empty_parts([num_bytes], torch.device("cpu"), pin)
        data = memoryview(target.numpy().data)
        read_into = self._checks.read_into if self._verify and self._checks is not None else self.read_into
        # Pieces end where blocks with checksums end, so that no block is in two pieces.
        first_end = -(start - self.header.num_bytes) % _PIECE_BYTES or _PIECE_BYTES
        starts = [0, *range(first_end, len(data), _PIECE_BYTES)]
        pieces = list(zip(starts, [*starts[1:], len(data)]))
        for _ in in_threads(lambda piece: read_into(start + piece[0], data[piece[0] : piece[1]]), pieces, THREADS):
            pass
        return target

    def read_into(self, start: int, data: memoryview) -> None:
        """Reads the file, beginning at byte `start`, until `data` is full. Raises FileFormatError if the file ends too
        early."""
        while data:
            count = os.preadv(self.fileno(), [data], start)
            if count == 0:
                raise FileFormatError(f"{self.path} was cut while it was read")
            data, start = data[count:], start + count

    def loaded(self, start: int, num_bytes: int) -> memoryview:
        """Makes the system read a range of the file into its page cache, and returns a view of these cached bytes.

        Raises:
            FileFormatError: the file has been truncated since it was opened, or cannot be read.
        """
        pages = self._read_only()
        if not pages.load(start, num_bytes):
            raise FileFormatError(
                f"{self.path} was cut while it was read, or cannot be read at byte {start} and after it"
            )
        try:
            return memoryview(pages)[start : start + num_bytes]
        except BufferError as error:  # pybind11 tells in this way that it has no memory for the view
            raise MemoryError("there is no memory for a view of a mapped file") from error

    def mapped(self, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes of the file as a mapped tensor, uint8 [num_bytes]. Callers may write to the tensor: the system
        then copies the page, and the file does not change. The tensor keeps the map alive.

        Raises:
            FileFormatError: the file has been truncated since it was opened.
        """
        pages = self._private_map  # A copy of the reference, because another thread may call `close`.
        if pages is None:
            pages = self._private_map = mmap.mmap(
                self.fileno(),
                self._whole_size(),
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        return _part_of(pages, start, num_bytes)

    def mapped_read_only(self, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes of the file as a mapped tensor, uint8 [num_bytes], which must not be written to. Its memory
        belongs to the page cache. Raises FileFormatError as `mapped` does."""
        return _part_of(self._read_only(), start, num_bytes)

    def _read_only(self) -> _core.FilePages:
        """Returns the read-only map of the whole file. Raises FileFormatError as `mapped` does."""
        pages = self._shared_map  # A copy of the reference, because another thread may call `close`.
        if pages is None:
            pages = self._shared_map = self.pages(0, self._whole_size())
        return pages

    def pages(self, start: int, num_bytes: int) -> _core.FilePages:
        """Returns a new read-only map of bytes of the file. It is separate from all other maps, so that it can be
        pinned alone."""
        return _core.FilePages(self.fileno(), start, num_bytes)

    def _whole_size(self) -> int:
        """Returns the file's size in bytes. Raises FileFormatError if the file has been truncated since it was
        opened."""
        size = os.fstat(self.fileno()).st_size
        if size < self._num_bytes:
            raise FileFormatError(f"{self.path} has been cut since it was opened")
        return size

    @property
    def identity(self) -> str:
        """A string that identifies the file and its content. It is the same in every process that opens the file, until
        the file changes."""
        found = os.fstat(self.fileno())
        return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def close(self) -> None:
        """Closes the descriptor. Mapped tensors keep their map."""
        self._close()
        self._codebooks.clear()
        self._private_map = self._shared_map = None

    def tensor(self, name: str, take: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """Returns a plain tensor, in the form that `form_of` describes. Raises FileFormatError if its size in bytes
        does not match that form. take: a function of (start, num_bytes) that returns bytes of the file as a uint8
        tensor."""
        entry = self.header.tensors[name]
        dtype, shape = form_of(*entry[:2], entry.num_bytes)
        if dtype.itemsize * math.prod(shape) != entry.num_bytes:
            raise FileFormatError(f"{self.path}: {name!r} is {entry.dtype}, of which torch has no such tensors")
        data = take(entry.start, entry.num_bytes)
        if entry.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    # ---- codebooks ----

    def codebook(self, number: int) -> AnyCodebook:
        """Returns the codebook with a number. It is read by the first call, and kept."""
        if number not in self._codebooks:
            metadata = self.header.metadata
            self._codebooks[number] = read_codebook(str(self.path), metadata, number, self._read_codebook_part)
        return self._codebooks[number]

    def codebook_parts(self, number: int | None) -> list[str]:
        """Returns the names of the parts of the codebook with a number, and of the parts of the codebooks of its
        clusters. If there is no codebook, number is None, and the result is empty."""
        text = self.header.metadata.get(f"{CODEBOOK_KEY}{number}", "")
        fields = dict(pair.partition("=")[::2] for pair in text.split(" "))
        keys = [f"{CODEBOOK_KEY}{each}" for each in (number, *fields.get("clusters", "").split(","))]
        return [name for key in keys for name in self._codebook_parts.get(key, ())]

    def _read_codebook_part(self, number: int, part: str, dtype: str, count: int) -> np.ndarray:
        """Returns a part of a codebook, an array of `count` entries. dtype: name of their dtype in the file."""
        name = f"{CODEBOOK_KEY}{number}:{part}"
        numpy_dtype = np.dtype(f"<u{int(dtype[1:]) // 8}")
        entry = self.header.tensors.get(name)
        if entry is None and count == 0:
            return np.empty(0, numpy_dtype)
        start = start_of_part(self, name, entry, dtype, count * numpy_dtype.itemsize)
        return self.read(start, count * numpy_dtype.itemsize).numpy().view(numpy_dtype)

    # ---- checksums ----

    @property
    def checks(self) -> Checks | None:
        """The checksums of the file, or None if it is an ordinary safetensors file."""
        if self._checks is None and not self.header.is_plain:
            self._checks = Checks(self)
        return self._checks


def _part_of(pages: mmap.mmap | _core.FilePages, start: int, num_bytes: int) -> torch.Tensor:
    """Returns mapped bytes as a tensor that keeps the map alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)


class Checks:
    """Compares a file with its checksums. The constructor verifies the header and the checksums themselves. `check`
    and `read_into` verify blocks of data, and remember which blocks they have verified.

    Raises:
        ChecksumError: the header or the checksums are damaged.
        FileFormatError: the fields of the checksums in the header are wrong.
    """

    def __init__(self, file: OpenFile) -> None:
        found, entry = file.header.checks, file.header.tensors[CHECKS]
        if not isinstance(found, tuple):
            raise FileFormatError(f"{file.path}: {CHECKS}: {found}")
        self.block_bytes, self.num_blocks = found
        self.start, self.end = file.header.num_bytes, entry.start
        self._file = file
        data = bytearray(entry.num_bytes)
        file.read_into(entry.start, memoryview(data))
        self._hashes = np.frombuffer(data, "<u8")
        self._is_right = np.zeros(self.num_blocks, bool)
        own = xxhash.xxh3_64_intdigest(self._hashes[:-1].tobytes())
        if own != int(self._hashes[-1]):
            raise ChecksumError(f"{self._file.path}: the checksums have another checksum: they are damaged")
        if xxhash.xxh3_64_intdigest(file.loaded(0, self.start)) != int(self._hashes[-2]):
            raise ChecksumError(f"{self._file.path}: the header has another checksum: it is damaged")

    def blocks_of(self, start: int, end: int) -> range:
        """Returns the numbers of the blocks that hold bytes [start, end) of the file."""
        if start == end:
            return range(0)
        return range((start - self.start) // self.block_bytes, (end - 1 - self.start) // self.block_bytes + 1)

    def runs_of(self, blocks: Collection[int]) -> list[tuple[Checks, range]]:
        """Divides blocks into runs of consecutive blocks, each for one thread, so that all threads have some. Returns
        these runs, each with this object. blocks: increasing numbers."""
        length = max(1, min(_PIECE_BYTES // self.block_bytes, -(-len(blocks) // THREADS)))
        runs: list[range] = []
        for block in blocks:
            if runs and block == runs[-1].stop and len(runs[-1]) < length:
                runs[-1] = range(runs[-1].start, block + 1)
            else:
                runs.append(range(block, block + 1))
        return [(self, run) for run in runs]

    def check(self, blocks: range) -> int:
        """Reads and verifies consecutive blocks, unless they were verified before. Returns their size in bytes. Several
        blocks are read by one call, because threads wait for each other between calls. They have at most _PIECE_BYTES
        bytes, so that they are still in memory when they are hashed.

        Raises:
            ChecksumError: a block does not match its checksum. The message names the block, and the tensors that have
                bytes in it.
        """
        length, num_bytes = max(1, _PIECE_BYTES // self.block_bytes), 0
        for run in (blocks[first : first + length] for first in range(0, len(blocks), length)):
            start, end = self._bounds(run[0])[0], self._bounds(run[-1])[1]
            if not self._is_right[run.start : run.stop].all():
                data = self._file.loaded(start, end - start)
                for block, first in zip(run, range(0, end - start, self.block_bytes)):
                    if not self._is_right[block]:
                        self._compare(block, xxhash.xxh3_64_intdigest(data[first : first + self.block_bytes]))
            num_bytes += end - start
        return num_bytes

    def read_into(self, start: int, data: memoryview) -> None:
        """Reads the file, beginning at byte `start`, until `data` is full, and verifies the blocks that hold these
        bytes. A block that is read completely is hashed in memory. A block that is read only in part is read a second
        time, completely, to hash it, unless it was verified before. Raises ChecksumError as `check` does."""
        end = start + len(data)
        for block in self.blocks_of(start, end):
            first, last = self._bounds(block)
            piece = data[max(first, start) - start : min(last, end) - start]
            self._file.read_into(max(first, start), piece)
            if len(piece) == last - first:
                self._compare(block, xxhash.xxh3_64_intdigest(piece))
            else:
                self.check(range(block, block + 1))

    def _bounds(self, block: int) -> tuple[int, int]:
        """Returns where a block begins and ends in the file."""
        start = self.start + block * self.block_bytes
        return start, min(start + self.block_bytes, self.end)

    def _compare(self, block: int, found: int) -> None:
        """Marks a block as verified. Raises ChecksumError unless `found` is its hash."""
        if found != int(self._hashes[block]):
            names = dict.fromkeys(map(self._shown_name, self._names_in(block))) or {"padding": None}
            raise ChecksumError(
                f"{self._place_of(block)}, has another checksum: {'one of ' if len(names) > 1 else ''}"
                f"{shown_names(names)} is damaged"
            )
        self._is_right[block] = True

    def damaged(self) -> list[tuple[str, list[str]]]:
        """Verifies all blocks that were not verified before. Returns (place, names) for each damaged block, as
        returned by `_place_of` and `_names_in`."""

        def is_right(block: int) -> bool:
            with contextlib.suppress(ChecksumError):
                self.check(range(block, block + 1))
            return bool(self._is_right[block])

        right = in_threads(is_right, range(self.num_blocks), THREADS)
        wrong = [block for block, is_one in enumerate(right) if not is_one]
        return [(self._place_of(block), self._names_in(block)) for block in wrong]

    def _place_of(self, block: int) -> str:
        """Returns a string with the place of a block: the file, the block's number and the range of its bytes."""
        start, end = self._bounds(block)
        return f"{self._file.path}: block {block}, bytes {start} to {end - 1} of the file"

    def _names_in(self, block: int) -> list[str]:
        """Returns the names of the header's entries that have bytes in a block, without entries of padding."""
        start, end = self._bounds(block)
        entries = self._file.header.tensors.items()
        inside = [name for name, entry in entries if max(start, entry.start) < min(end, entry.end)]
        return [name for name in inside if not name.startswith(PADDING)]

    def _shown_name(self, name: str) -> str:
        """Returns the name that messages use for an entry of the header. For a part of a table or codebook, that is the
        name of the table or codebook."""
        whole = name.rpartition(":")[0]
        return whole if whole in self._file.tables or name.startswith(CODEBOOK_KEY) else name


# ---- parts of tables ----


def start_of_part(file: OpenFile, name: str, entry: Entry | None, dtype: str, num_bytes: int) -> int:
    """Returns the offset in the file at which a part begins. Raises FileFormatError unless the part exists, has this
    dtype, is aligned, and has the size of num_bytes bytes plus padding. entry: the part's entry in the header.
    None: the part does not exist."""
    padded = rounded_up(num_bytes)
    if entry is None:
        raise FileFormatError(f"{file.path}: {name!r}, of {num_bytes} bytes, is missing")
    if entry.dtype != dtype or len(entry.shape) != 1 or entry.start % ALIGNMENT or entry.num_bytes != padded:
        raise FileFormatError(
            f"{file.path}: {name!r} is {entry.dtype} {list(entry.shape)} at byte {entry.start}; wanted {dtype} of "
            f"{padded} bytes at a multiple of {ALIGNMENT}"
        )
    return entry.start


# A function of (file, offset in it, number of bytes, name of the part) that returns the bytes of a table's part.
Take = Callable[["OpenFile", int, int, str], torch.Tensor]


def mapped_parts(pages: list[_core.FilePages] | None) -> Take:
    """Returns a `Take` that maps parts read-only. pages: a list. Slots and overflow each get a separate map, which is
    appended to the list, so that a single table can be pinned. None: all parts are in the file's read-only map."""

    def take(file: OpenFile, start: int, num_bytes: int, part: str) -> torch.Tensor:
        if pages is None or part not in _ROWS:
            return file.mapped_read_only(start, num_bytes)
        pages.append(file.pages(start, num_bytes))
        return torch.frombuffer(pages[-1], dtype=torch.uint8)

    return take


def read_parts(pin: bool | None) -> Take:
    """Returns a `Take` that reads parts into new memory. pin: whether to pin the memory of slots, overflow and blocks.
    None: it is pinned if the system allows."""
    pinned = (*_ROWS, "blocks")
    return lambda file, start, num_bytes, part: file.read(start, num_bytes, pin if part in pinned else False)


def read_table(
    file: OpenFile, name: str, files: Mapping[str, OpenFile], take: Take
) -> tuple[CompressedTensor, TableFields]:
    """Reads a table, and returns it with its fields.

    Args:
        file: the file whose metadata has the table's fields.
        files: the file of each tensor, by name. In a set, parts of the table may be in other files.
        take: a function that returns the bytes of a part.

    Raises:
        FileFormatError: the fields are wrong, or a part does not match them.
    """
    what, fields = f"{file.path}: table {name!r}", file.fields(name)
    dtype = dtype_of(fields.dtype)
    geometry = _geometry(fields, dtype, what)
    tensors = {}
    for part in TABLE_PARTS:
        owner = files.get(f"{name}:{part}")
        entry = None if owner is None else owner.header.tensors[f"{name}:{part}"]
        num_bytes = _part_bytes(part, fields, geometry, entry)
        if entry is not None and not num_bytes:
            raise FileFormatError(f"{what} has {part!r}, which such a table lacks")
        data = _taken(owner or file, f"{name}:{part}", entry, TABLE_PARTS[part], num_bytes, take)
        tensors[part] = data.view(PART_DTYPES[part])
    with refused(what):
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


def row_ranges(table: CompressedTensor, rows_per_base: int, start: int, end: int) -> dict[str, tuple[int, int]]:
    """Finds the rows that hold bytes [start, end) of a table's tensor. Returns a dictionary from "slots" and "overflow"
    to the range (first byte, end) in which these rows lie in that part. If each row has its own base, rows may lie
    anywhere in the overflow, so the range is the whole overflow. rows_per_base: as in `TableFields`."""
    first, last = start // table.row_bytes, -(-end // table.row_bytes)
    slots = table.slots.numel()
    overflow = 0, table.overflow.numel()
    begin, stop = overflow
    if rows_per_base > 1 and table.bases.numel():
        first_group, last_group = first // rows_per_base, -(-last // rows_per_base)
        begin = int(table.bases[first_group])
        stop = stop if last_group >= table.bases.numel() else int(table.bases[last_group])
    # A file whose checksums are right may have inconsistent bases. The decoder reports them.
    is_right = 0 <= begin <= stop <= overflow[1]
    return {
        "slots": (min(first * table.slot_bytes, slots), min(last * table.slot_bytes, slots)),
        "overflow": (begin, stop) if is_right else overflow,
    }


def read_whole(file: OpenFile, name: str, files: Mapping[str, OpenFile], pin: bool | None) -> WholeTensor:
    """Reads a tensor that an external codec has coded. The coded blocks are read into memory, and not mapped, because
    single rows of such a tensor are never fetched. file, files: as in `read_table`; pin: as in `read_parts`.

    Raises:
        FileFormatError: the fields are wrong, a part does not match them, the codec is not available, or the codec is
            not safe with damaged bytes and the file has no checksums.
        ChecksumError: bytes are damaged. Checksums are compared if the file was opened with `verify`, and always if the
            codec is not safe with damaged bytes.
    """
    what, fields = f"{file.path}: table {name!r}", file.fields(name)
    codec = CODECS.get(fields.codec or "")
    if codec is None:
        raise FileFormatError(f"{what} is coded by {str(fields.codec)[:40]!r}, which this ibp lacks")
    try:
        codec.require()
    except ImportError as error:
        raise FileFormatError(f"{what}: {error}") from error
    geometry = _geometry(fields, dtype_of(fields.dtype), what)
    parts: dict[str, torch.Tensor] = {}
    num_bytes = 8 * (-(-geometry.num_bytes // fields.block_bytes) + 1)
    for part in ("offsets", "blocks"):
        owner = files.get(f"{name}:{part}")
        entry = None if owner is None else owner.header.tensors[f"{name}:{part}"]
        if owner is not None and entry is not None and not codec.is_safe:
            checksums = owner.checks  # The codec's decoder may do anything if the bytes are damaged.
            if checksums is None:
                raise FileFormatError(f"{what} has no checksums, without which its codec decodes nothing")
            checksums.check(checksums.blocks_of(entry.start, entry.end))
        parts[part] = _taken(owner or file, f"{name}:{part}", entry, CODEC_PARTS[part], num_bytes, read_parts(pin))
        num_bytes = int(parts["offsets"].view(torch.int64)[-1])
    with refused(what):
        return WholeTensor(
            shape=fields.shape,
            dtype=geometry.dtype,
            codec=codec.name,
            block_bytes=fields.block_bytes,
            options=fields.codec_fields,
            blocks=parts["blocks"],
            offsets=parts["offsets"].view(torch.int64),
        )


def _taken(file: OpenFile, name: str, entry: Entry | None, dtype: str, num_bytes: int, take: Take) -> torch.Tensor:
    """Returns the num_bytes bytes of a part, without padding. entry: the part's entry in the header. None: the part is
    missing, which is an error unless num_bytes is 0."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    start = start_of_part(file, name, entry, dtype, num_bytes)
    return take(file, start, num_bytes, name.rpartition(":")[2])


def _geometry(fields: TableFields, dtype: torch.dtype, what: str) -> Geometry:
    """Returns the geometry of a table's tensor. Raises FileFormatError if tables cannot have its dtype. what: the
    table's name for the message."""
    if dtype not in DTYPES:
        raise FileFormatError(f"{what} has {fields.dtype}, which tables cannot have")
    return Geometry(torch.Size(fields.shape), dtype, fields.row_bytes)


def _part_bytes(part: str, fields: TableFields, geometry: Geometry, entry: Entry | None) -> int:
    """Returns the size in bytes of a table's part, without padding (FORMAT.md sections 1 to 3). The exception is the
    overflow of a coded table: its size includes the padding, because it is taken from the part's entry. entry: the
    part's entry in the header, or None if there is no entry."""
    is_raw = fields.scheme == "raw"
    if part == "slots":
        return geometry.slots_size(fields.slot_bytes)
    if part == "lengths":
        return 0 if is_raw else 2 * geometry.num_rows
    raw_overflow = geometry.raw_overflow_bytes(fields.slot_bytes) if is_raw else 0
    if part == "overflow":
        return raw_overflow if is_raw or entry is None else entry.num_bytes
    return 8 * -(-geometry.num_rows // fields.rows_per_base) if raw_overflow or (entry and not is_raw) else 0


# ---- pinned maps ----

_can_pin: dict[int, bool] = {}  # Results of `can_pin` by st_dev, which identifies a file system.


def can_pin(file: OpenFile) -> bool:
    """Returns whether maps of a file can be pinned, so that GPUs can read them. The first call for each file system
    tries to pin the first page of the file; later calls return the same result."""
    device = os.fstat(file.fileno()).st_dev
    if device not in _can_pin:
        torch.cuda.init()
        try:
            file.pages(0, 1).pin()
            _can_pin[device] = True
        except RuntimeError:
            _can_pin[device] = False
    return _can_pin[device]
