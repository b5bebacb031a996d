"""Writes files of tables and tensors: `ibp.save`, and `FileWriter`, the writer of one file. Space for the header is
left at the front of the file. The data are written after this space, one piece after the other, and the header is
written last. The file gets its name when it is complete."""

from __future__ import annotations

import contextlib
import json
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from .. import _core
from .._common.arguments import whole_number
from .._common.process import tqdm
from .._common.sequences import cut
from .._common.whole_files import NewFile, errors_of
from .._fetch.calls import CachedRows
from .._machine import staging
from .._rows.clusters import with_clusters
from .._rows.codebook import AnyCodebook
from .._rows.geometry import KEPT_DTYPES, bytes_of, check_tensor, given_tensor
from .._rows.table import has_own_bases, tensors_of
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import WholeTensor
from ..deltas import CheckpointDelta, Delta
from ..deltas._coding import fingerprint
from .format import (
    ALIGNMENT,
    BLOCK_BYTES,
    CHECKS,
    CODEBOOK_KEY,
    FORMAT,
    HASH,
    MAX_HEADER_BYTES,
    PADDING,
    PLAIN_ITEM_BYTES,
    PREFIX,
    REMOVED_KEY,
    TABLE_KEY,
    TableFields,
    checksum_bytes,
    codebook_record,
    dtype_name,
    entry_of,
    part_names,
    rounded_up,
    write_fields,
)
from .opened import Value
from .paths import (
    PathLike,
    check_names_safetensors,
    check_other_files,
    names_directory,
    outputs_of,
    replacing,
    write_index,
    written_to,
)

_BUFFER_BYTES = 1 << 20  # Small pieces of data are collected in a buffer of at most this size, and written together.
_ENTRY_BYTES = 128  # Largest size in bytes of a tensor's entry in the header, without its name and its shape.
_SIZE_BYTES = 21  # Largest size in bytes of one number of a shape in the header: 20 digits and a comma.
_FIXED_BYTES = 1024  # Largest size in bytes of what every header has: format, release, and fields of the checksums.
# Space in bytes that `header_room` reserves for the fields of a table without its name and its shape, for each
# dimension of the shape, and for the fields and entries of a codebook.
_FIELDS_BYTES, _DIMENSION_BYTES, _CODEBOOK_BYTES = 680, 32, 2048
_MOST_ROOM = (8 + MAX_HEADER_BYTES) // ALIGNMENT * ALIGNMENT  # Largest size in bytes of a header with its padding.
_ZEROS = memoryview(bytes(ALIGNMENT))

# A function that appends the bytes of a contiguous array, a buffer, or a tensor on the CPU.
Write = Callable[[Any], None]


def save(
    path: PathLike,
    tensors: Mapping[str, Value | np.ndarray] | Value | np.ndarray,
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int | None = None,
    content: bool = False,
    progress: bool = False,
) -> None:
    """Writes tables and tensors to a file. `ibp.load` and `ibp.open` read it, and readers of safetensors list its
    contents.

    The file appears under its name only when it is complete and on disk. Only then does it replace an earlier file or
    set of files of that name. A replaced file's permissions are kept. Data on a GPU are copied to the host block by
    block.

    Example:
        >>> table = ibp.compress(torch.randn(1000, 1024).bfloat16())
        >>> ibp.save("model.safetensors", {"weight": table, "bias": torch.ones(1000)}, metadata={"step": "500"})
        >>> ibp.open("model.safetensors").metadata
        {'step': '500'}

    Args:
        path: path of the file; a directory, in which the file gets the name "model.safetensors"; or a URL that fsspec
            knows ("s3://...", "memory://..."). A directory is made if its name ends in a slash and it does not exist.
        tensors: tables (`ibp.compress`), tensors, arrays of numpy and deltas (`ibp.deltas.make`) by name. A single
            table or tensor may be given without a name, and gets the name "tensor". Tensors are stored uncompressed,
            and may have any dtype that safetensors has. Arrays are stored as tensors. No name may begin with "ibp.", or
            be that of a part of a table, such as "weight:slots" if there is a table "weight". For an
            `ibp.deltas.CheckpointDelta` the file also keeps the names of tensors that no longer exist (`File.removed`).
        metadata: a mapping from strings to strings, which is stored in the file. No key may begin with "ibp.".
        shard_bytes: the largest size in bytes of the data of a file, unless a single table or tensor is larger. Larger
            data become a set of files, `<stem>-00001-of-00003.safetensors` and so on, with the index
            `<stem>.safetensors.index.json`. None: one file.
        content: whether to store the fingerprint of each table's original tensor, too. To compute the fingerprint, each
            table is decoded once. `File.verify` with content=True compares it.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: a file cannot hold one of the names or tensors, or the metadata; shard_bytes is not a
            positive number; or path has the suffix of another format (.pt, .npz, .gguf).
        OSError: the file cannot be written. In this case there is no new file. The message names the file, and if the
            disk is full it says how many bytes are needed.
    """
    if isinstance(tensors, (str, os.PathLike)):
        raise TypeError(f"tensors is the path {os.fspath(tensors)!r}; wanted ibp.save(path, tensors), the path first")
    items = _checked(tensors)
    removed = tensors.removed if isinstance(tensors, CheckpointDelta) else ()
    checked_metadata(metadata)
    check_names_safetensors(path)
    most = None if shard_bytes is None else whole_number("shard_bytes", shard_bytes, 1)
    with written_to(path) as target:
        if names_directory(path):
            check_other_files(target)
        shards = [dict(shard) for shard in cut(items.items(), lambda item: _stored(item[1]), most)]
        total = sum(map(_stored, items.values()))
        with tqdm(total=total, desc="save", unit="B", unit_scale=True, disable=not progress) as bar:
            _write_files(target, shards, removed, metadata, content, bar.update)


def _checked(tensors: Mapping[str, Value | np.ndarray] | Value | np.ndarray) -> dict[str, Value]:
    """Returns the values to write, by name. Arrays are converted to tensors. A table with a cache of rows is replaced
    by the table without the cache, after the changed rows of the cache have been written to it. Raises TypeError and
    ValueError for names and values that a file cannot hold."""
    items: dict[str, Value] = {}
    for name, given in (tensors if isinstance(tensors, Mapping) else {"tensor": tensors}).items():
        if not isinstance(name, str):
            raise TypeError(f"tensors has the key {name!r}; wanted names as text")
        value: Any = given_tensor(given, repr(name))
        if isinstance(value, CachedRows):
            value.flush()
            value = value.view
        items[name] = value
        if not isinstance(value, (CompressedTensor, WholeTensor, torch.Tensor, Delta)):
            got = type(value).__name__
            raise TypeError(
                f"{name!r} is a {got}; wanted a table (ibp.compress), a torch.Tensor, an array of numpy or a delta "
                "(ibp.deltas.make)"
            )
        if isinstance(value, torch.Tensor):
            check_tensor(value, repr(name), KEPT_DTYPES)
    check_names({name: not isinstance(value, torch.Tensor) for name, value in items.items()})
    return items


def _write_files(
    path: Path,
    shards: list[dict[str, Value]],
    removed: Sequence[str],
    metadata: Mapping[str, str] | None,
    content: bool,
    on_write: Callable[[int], object],
) -> None:
    """Writes a file for each shard. The files get their names when all of them are complete. If there are several
    files, their index gets its name last. on_write: as in `FileWriter`."""
    weight_map: dict[str, str] = {}
    total = 0
    names = outputs_of(path, len(shards))
    with replacing(path, names):
        with contextlib.ExitStack() as stack:
            for name, items in zip(names, shards):
                gone = () if weight_map else removed  # Only the first file lists them.
                shapes = {each: tuple(value.shape) for each, value in items.items()} | dict.fromkeys(gone, ())
                tables = [value.table if isinstance(value, Delta) else value for value in items.values()]
                books = [table.codebook for table in tables if isinstance(table, CompressedTensor)]
                writer = FileWriter(
                    path.with_name(name),
                    metadata=metadata,
                    header_bytes=header_room(shapes, metadata, books),
                    data_bytes=sum(map(_stored, items.values())),
                    on_write=on_write,
                )
                stack.enter_context(writer)
                for each in gone:
                    writer.add_removed(each)
                for each, value in items.items():
                    if isinstance(value, torch.Tensor):
                        write_plain(writer, each, value)
                    elif isinstance(value, Delta):
                        write_table(writer, each, value.table, base=value.base, result=value.result)
                    else:
                        write_table(writer, each, value, content=fingerprint(value) if content else None)
                writer.finish()
                weight_map.update(dict.fromkeys(writer.names, name))
                total += writer.data_bytes
        if len(shards) > 1:
            write_index(path, weight_map, total)


def _stored(value: Value) -> int:
    """Returns the size in bytes of a value's data, without padding and without its codebook."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    table = value.table if isinstance(value, Delta) else value
    return sum(tensor.nbytes for tensor in _parts_of(table).values())


def _parts_of(table: CompressedTensor | WholeTensor) -> dict[str, torch.Tensor]:
    """Returns the tensors of a table, or of a tensor that a general codec has coded, by the names of their parts."""
    return {"blocks": table.blocks, "offsets": table.offsets} if isinstance(table, WholeTensor) else tensors_of(table)


# ---- one file ----


class FileWriter:
    """Writes a file as a stream. It is a context manager: if the block ends normally, the complete file gets its name.
    If an exception leaves the block, there is no new file, and an earlier file is unchanged.

    Tensors are written one after the other, each from its first byte to its last, in a context that yields the function
    to which its bytes are given:

        with FileWriter("x.safetensors") as writer:
            with writer.plain("a", "U8", (3,)) as write:
                write(b"abc")

    The data go to a temporary file in the directory of `path`.

    Args:
        path: path of the file.
        metadata: the user's metadata, a mapping from strings to strings; no key may begin with "ibp.".
        header_bytes: size in bytes of the space for the header, see `header_room`. If the header turns out to be
            larger, `finish` moves the data, which takes as long as copying the file.
        data_bytes: the expected size of the data in bytes, which may be too small; 0 if it is not known. The error
            message for a full disk gives this size.
        on_write: a function that is called after each write of data, with the number of bytes that were written.
        like: the files that permissions are taken from, as in `NewFile`.

    If an error interrupts the writing of a tensor or a table, no more can be written, and `finish` raises, even if the
    caller has caught the error. An error that is raised before anything is written, such as for a name that occurs
    twice, has no such effect.

    Raises:
        TypeError: a name is not a string.
        ValueError: a name occurs twice or is reserved, the data of a tensor do not have the size that its shape
            requires, the header is larger than readers of safetensors allow, or an earlier call has failed.
        OSError: the file cannot be written. The message names the file, and for a full disk says how many bytes are
            needed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        header_bytes: int = 1 << 20,
        data_bytes: int = 0,
        on_write: Callable[[int], object] | None = None,
        like: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self.path, self._on_write, self._expected_bytes, self._like = Path(path), on_write, data_bytes, like
        self._metadata = checked_metadata(metadata)
        self._room = min(rounded_up(header_bytes), _MOST_ROOM)
        self._lines: dict[str, str] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._names: dict[str, bool] = {}  # the names of tables and plain tensors; whether each one is a table
        self._codebooks: dict[AnyCodebook, int] = {}
        self._open: str | None = None  # the name of the tensor that is being written
        self._failure: str | None = None  # the error that has left a `unit`
        self._output: _FileOutput | None = None

    # ---- the file's contents ----

    def plain(self, name: str, dtype: str, shape: tuple[int, ...]) -> contextlib.AbstractContextManager[Write]:
        """Returns a context in which an uncompressed tensor is written. It yields the function that appends bytes.
        Leaving it raises ValueError if the data do not have the size that the shape requires. dtype: the dtype's name
        in the header; torch need not have the dtype."""
        self.check_names({name: False})
        self._names[name] = False
        return self._tensor(name, dtype, shape)

    def part(self, name: str, dtype: str) -> contextlib.AbstractContextManager[Write]:
        """Returns a context in which a part of a table, named `<table>:<part>`, or of a codebook is written. It yields
        the function that appends bytes. The part has one dimension and is padded with zeros. A part without bytes gets
        no entry in the header."""
        return self._tensor(name, dtype, None)

    def codebook(self, codebook: AnyCodebook) -> int:
        """Writes a codebook, unless an equal codebook is in the file already. Returns its number in the file."""
        if codebook in self._codebooks:
            return self._codebooks[codebook]
        line, parts = codebook_record(codebook, self.codebook)
        number = len(self._codebooks)
        key = f"{CODEBOOK_KEY}{number}"
        with self.unit():
            self._lines[key] = line
            for name, array in parts.items():
                with self.part(f"{key}:{name}", f"U{8 * array.itemsize}") as write:
                    write(array)
            self._codebooks[codebook] = number
        return number

    def table(self, name: str, fields: TableFields) -> None:
        """Adds the fields of a table to the metadata. The caller must also write the table's parts, `<name>:slots` and
        so on, with `part`, before or after this call. The number of the codebook in `fields` must be the one that
        `codebook` has returned. Call `check_names` before anything of the table is written."""
        self._lines[f"{TABLE_KEY}{name}"] = fields.text()
        self._names[name] = True

    def add_removed(self, name: str) -> None:
        """Adds an entry to the metadata that says that a tensor no longer exists. Only for the delta of a
        checkpoint."""
        self._lines[f"{REMOVED_KEY}{name}"] = ""

    @property
    def names(self) -> list[str]:
        """Names of the plain tensors and the parts of tables that were written so far."""
        return [name for name in self._entries if not name.startswith(PREFIX)]

    @property
    def data_bytes(self) -> int:
        """Size in bytes of the data that were written so far, padding included."""
        return self._output.data_bytes if self._output is not None else 0

    def check_names(self, names: Mapping[str, bool]) -> None:
        """Raises what the function `check_names` raises unless new tables and plain tensors can have these names. Also
        raises ValueError if an earlier call has failed."""
        self._check_whole()
        check_names(names, self._names)

    @contextlib.contextmanager
    def unit(self) -> Iterator[None]:
        """A context in which values are written that are complete only together, such as the parts of a table. If an
        exception leaves it, no more can be written, and the file cannot be finished: both raise ValueError."""
        self._check_whole()
        try:
            yield
        except BaseException as error:
            self._failure = traceback.format_exception_only(error)[-1].strip()
            raise

    def _check_whole(self) -> None:
        """Raises ValueError if an earlier call has failed while it was writing."""
        if self._failure is not None:
            raise ValueError(
                f"{self.path} cannot be completed, because an earlier call has failed while it was writing: "
                f"{self._failure}; wanted the file written anew"
            )

    # ---- bytes of tensors ----

    @contextlib.contextmanager
    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...] | None) -> Iterator[Write]:
        """A context in which the bytes of a tensor are written. shape: None for a part of a table or codebook.

        When the context ends, adds the tensor's entry to the header, and pads the data with zeros, so that the next
        tensor begins at a multiple of the alignment. For a part, the zeros count as its bytes; after a plain tensor,
        they are a separate tensor of the file."""
        output = self._output
        if output is None:
            raise ValueError("the file is not being written; wanted `with FileWriter(...) as writer:`")

        def write(data: Any) -> None:
            if self._open != name or self._output is None:
                raise ValueError(f"{name!r} is closed")
            if isinstance(data, torch.Tensor):
                data = bytes_of(data).numpy()
            view = memoryview(data)
            if view.nbytes:
                output.write(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
                if self._on_write is not None:
                    self._on_write(view.nbytes)

        with self.unit():
            if name in self._entries:
                raise ValueError(f"there are two tensors {name!r} in a file; wanted different names")
            if self._open is not None:
                raise ValueError(f"{name!r} begins before {self._open!r} is closed; wanted one at a time")
            self._open, start = name, output.data_bytes
            yield write
            end = output.data_bytes
            num_bytes, missing = end - start, -end % ALIGNMENT
            if shape is None:
                write(_ZEROS[:missing])
                if num_bytes:
                    self._enter(name, dtype, ((num_bytes + missing) // PLAIN_ITEM_BYTES[dtype],), start)
            elif dtype in PLAIN_ITEM_BYTES and math.prod(shape) * PLAIN_ITEM_BYTES[dtype] != num_bytes:
                raise ValueError(f"{name!r} has {num_bytes} bytes; wanted {dtype} {shape and list(shape)}")
            else:
                self._enter(name, dtype, shape, start)
                if missing:
                    output.write(_ZEROS[:missing])
                    self._enter(f"{PADDING}{len(self._entries)}", "U8", (missing,), end)
            self._open = None

    def _enter(self, name: str, dtype: str, shape: tuple[int, ...], start: int) -> None:
        """Adds the entry of a tensor to the header. Its data begin at `start`, and end where the file's data end
        now."""
        offsets = [start, self.data_bytes]
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}

    def _header(self, check_bytes: int) -> bytes:
        """Adds the entry of the checksums. Returns the bytes of the file before the data, which are the size of the
        header and the header. Raises ValueError if the header is too large. check_bytes: size in bytes of the
        checksums, which are still to be written."""
        assert self._output is not None
        hashed = write_fields({"block_bytes": BLOCK_BYTES, "hash": HASH})
        own = {FORMAT: str(_core.FORMAT_VERSION), "ibp.release": _core.version(), CHECKS: hashed}
        self._enter(CHECKS, "U64", (check_bytes // 8,), self.data_bytes)
        self._entries[CHECKS]["data_offsets"][1] += check_bytes
        header = {"__metadata__": {**self._metadata, **self._lines, **own}, **self._entries}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        room = max(self._room, rounded_up(8 + len(text)))
        if room > _MOST_ROOM:
            raise ValueError(
                f"the header of {self.path.name} has {len(text)} bytes; wanted at most {MAX_HEADER_BYTES}, which is "
                "what readers of safetensors take: several files, or fewer tensors"
            )
        return (room - 8).to_bytes(8, "little") + text.ljust(room - 8)

    # ---- the file ----

    def __enter__(self) -> FileWriter:
        new = NewFile(self.path, like=self._like)
        self._output = _FileOutput(new, self.path, self._room, self._expected_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        output = self._output
        assert output is not None
        try:
            if kind is None:
                self.finish()
                output.commit()
        finally:
            output.discard()
            self._output = None

    def finish(self) -> None:
        """Writes the checksums and the header, and waits until the file is on disk. The file keeps its temporary name
        until the context is left. A further call does nothing. Raises ValueError if a tensor is not complete, or if an
        earlier call has failed."""
        if self._output is None or self._output.is_finished:
            return
        with self.unit():
            if self._open is not None:
                raise ValueError(f"the tensor {self._open!r} was not closed")
            self._output.finish(self._header(checksum_bytes(self._output.data_bytes)))


class _FileOutput:
    """The temporary file of a writer. Data, which arrive in pieces of any size, are buffered, hashed block by block,
    and written after the space for the header."""

    def __init__(self, new: NewFile, path: Path, room: int, expected_bytes: int) -> None:
        self._new, self._path, self._room, self._expected_bytes = new, path, room, expected_bytes
        assert new.file is not None
        self._file = new.file
        self._buffer = bytearray()
        self._hashes: list[int] = []  # The hashes of the blocks that are complete.
        self._block, self._missing = xxhash.xxh3_64(), BLOCK_BYTES  # The last block, and the bytes that it lacks.
        self._hashers = ThreadPoolExecutor(1, "ibp-hasher")
        self.data_bytes, self.is_finished = 0, False
        self._end = room  # Offset in the file at which the next data are written.

    def write(self, data: memoryview) -> None:
        """Appends data. Raises OSError if they cannot be written."""
        self.data_bytes += len(data)
        if len(self._buffer) + len(data) < _BUFFER_BYTES:
            self._hash(data)
            self._buffer += data
            return
        self._flush()
        hashing = self._hashers.submit(self._hash, data)  # Hashes while the system copies the same bytes.
        try:
            self._append(data)
        finally:
            hashing.result()

    def _hash(self, data: memoryview) -> None:
        while data:
            piece, data = data[: self._missing], data[self._missing :]
            self._block.update(piece)
            self._missing -= len(piece)
            if not self._missing:
                self._end_block()

    def _end_block(self) -> None:
        self._hashes.append(self._block.intdigest())
        self._block, self._missing = xxhash.xxh3_64(), BLOCK_BYTES

    def _flush(self) -> None:
        self._append(memoryview(bytes(self._buffer)))
        self._buffer.clear()

    def _append(self, data: memoryview) -> None:
        self._write_at(self._end, data)
        self._end += len(data)

    def _write_at(self, start: int, data: memoryview) -> None:
        with self._errors():
            while data:
                written = os.pwrite(self._file.fileno(), data, start)  # raises ValueError if the file is closed
                start, data = start + written, data[written:]

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return errors_of(self._path, self._room + max(self.data_bytes, self._expected_bytes))

    def finish(self, header: bytes) -> None:
        """Writes the data that are still buffered, the checksums, and the header. If the header is larger than the
        space that is reserved for it, moves the data. Waits until everything is on disk. The checksums are the bytes of
        the tensor `ibp.checks`: the hash of each block, the hash of the header, and the hash of all preceding
        hashes."""
        if self._missing < BLOCK_BYTES:
            self._end_block()
        hashed = np.array([*self._hashes, xxhash.xxh3_64_intdigest(header)], "<u8").tobytes()
        self.write(memoryview(hashed + np.array([xxhash.xxh3_64_intdigest(hashed)], "<u8").tobytes()))
        self._flush()
        if len(header) > self._room:
            self._move(len(header) - self._room)
        self._write_at(0, memoryview(header))
        with self._errors():
            os.fsync(self._file)
        self.is_finished = True

    def _move(self, num_bytes: int) -> None:
        """Moves the data by num_bytes bytes toward the end of the file, block by block, the last block first."""
        with self._errors(), open(self._file.fileno(), "rb", closefd=False) as file:
            for end in range(self._end, self._room, -BLOCK_BYTES):
                start = max(self._room, end - BLOCK_BYTES)
                file.seek(start)
                self._write_at(start + num_bytes, memoryview(file.read(end - start)))

    def commit(self) -> None:
        """Renames the file to its final name."""
        self._new.commit()

    def discard(self) -> None:
        """Removes the temporary file, if it exists, and closes it."""
        try:
            self._hashers.shutdown()
        finally:
            self._new.discard()


# ---- tables and tensors ----


def write_table(
    writer: FileWriter,
    name: str,
    table: CompressedTensor | WholeTensor,
    content: int | None = None,
    base: int | None = None,
    result: int | None = None,
) -> None:
    """Writes a table, or a tensor that a general codec has coded. It may be on any device, and is copied from there
    block by block. content, base, result: fingerprints, see `TableFields`."""
    writer.check_names({name: True})  # before anything is written
    dtype, shape = dtype_name(table.dtype), tuple(table.shape)
    if isinstance(table, WholeTensor):
        fields = TableFields(
            dtype,
            shape,
            content=content,
            codec=table.codec,
            block_bytes=table.block_bytes,
            codec_fields=table.options,
        )
    else:
        fields = TableFields(
            dtype,
            shape,
            scheme=table.scheme,
            row_bytes=table.row_bytes,
            slot_bytes=table.slot_bytes,
            codebook=None if table.codebook is None else writer.codebook(table.codebook),
            rows_per_base=1 if has_own_bases(table) else _core.ROWS_PER_BASE,
            content=content,
            base=base,
            result=result,
        )
    with writer.unit():
        writer.table(name, fields)
        for part, tensor in _parts_of(table).items():
            with writer.part(f"{name}:{part}", fields.parts[part]) as write:
                _write_tensor(write, tensor)


def write_plain(writer: FileWriter, name: str, tensor: torch.Tensor) -> None:
    """Writes a tensor uncompressed. It may be on any device, and is copied from there block by block. Raises ValueError
    if safetensors does not have its dtype."""
    check_tensor(tensor, repr(name), KEPT_DTYPES)
    entry = entry_of(tensor.dtype, tuple(tensor.shape))
    if entry is None:
        raise ValueError(
            f"{name!r} has dtype {tensor.dtype}, which safetensors lacks: ibp.compress makes a table of it"
        )
    with writer.plain(name, *entry) as write:
        _write_tensor(write, tensor)


def _write_tensor(write: Write, tensor: torch.Tensor) -> None:
    """Copies the bytes of a tensor from its device, block by block, and writes them."""
    for block in bytes_of(tensor).split(staging.STAGED_BYTES):
        write(staging.to_host(block))


# ---- sizes ----


def header_room(
    shapes: Mapping[str, Sequence[int]],
    metadata: Mapping[str, str] | None = None,
    codebooks: Iterable[AnyCodebook | None] | None = None,
) -> int:
    """Returns a size in bytes that is enough for the header of any file of these tables and tensors, if `codebooks` has
    their codebooks.

    Args:
        shapes: the shapes of the tables and tensors, by name.
        metadata: the user's metadata.
        codebooks: the codebooks of the tables; None stands for a table or tensor that has no codebook. If this argument
            is None, every table may have a codebook of its own, without clusters.
    """
    num_codebooks = len(shapes)
    if codebooks is not None:
        num_codebooks = len({one for book in codebooks for one in with_clusters(book)})
    room = _FIXED_BYTES + _metadata_bytes(checked_metadata(metadata)) + _CODEBOOK_BYTES * num_codebooks
    for name, shape in shapes.items():
        room += 5 * _json_bytes(name) + 4 * (_ENTRY_BYTES + _SIZE_BYTES) + _FIELDS_BYTES + _DIMENSION_BYTES * len(shape)
    return rounded_up(room)


def codebook_bytes(codebooks: Iterable[AnyCodebook]) -> list[int]:
    """Returns a list of the sizes in bytes, without padding, of the parts that these codebooks have in a file. Of equal
    codebooks, only one is counted."""
    written: dict[AnyCodebook, int] = {}
    sizes: list[int] = []

    def number_of(codebook: AnyCodebook) -> int:
        if codebook not in written:
            sizes.extend(part.nbytes for part in codebook_record(codebook, number_of)[1].values())
        return written.setdefault(codebook, len(written))

    for codebook in codebooks:
        number_of(codebook)
    return sizes


# ---- what a file can hold ----


def check_names(names: Mapping[str, bool], there: Mapping[str, bool] | None = None) -> None:
    """Raises an error unless tables and plain tensors can have these names in a file, or in a set of files.

    Args:
        names: the names. The values say whether a name is that of a table.
        there: the names that are in the file already.

    Raises:
        TypeError: a name is not a string.
        ValueError: a name is reserved, is not valid Unicode, is there already, or is that of a part of a table.
    """
    there = {} if there is None else there
    for name, is_table in names.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is of type {type(name).__name__}; wanted text")
        if name == "__metadata__" or name.startswith(PREFIX):
            raise ValueError(f"the name {name!r} is reserved; wanted one that does not begin with {PREFIX!r}")
        if name in there:
            raise ValueError(f"there are two tensors {name!r} in a file; wanted different names")
        _json_bytes(name)
        shared = [(name, part) for part in part_names(name) if is_table and part in there]
        table = name.rpartition(":")[0]
        if names.get(table, there.get(table, False)) and name in part_names(table):
            shared.append((table, name))
        for table, part in shared:
            raise ValueError(
                f"a part of the table {table!r} and another tensor both have the name {part!r}; wanted different names"
            )


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a copy of the user's metadata. Raises TypeError unless keys and values are strings, and ValueError for
    keys that are reserved for ibp."""
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"metadata has {key!r}: {type(text).__name__}; wanted text for text")
        if key.startswith(PREFIX):
            raise ValueError(f"metadata has the key {key!r}; wanted none that begins with {PREFIX!r}")
    return dict(metadata or {})


def _metadata_bytes(metadata: Mapping[str, str]) -> int:
    """Returns the size in bytes of metadata in the header."""
    return sum(_json_bytes(key) + _json_bytes(text) + 4 for key, text in metadata.items())


def _json_bytes(text: str) -> int:
    """Returns the size in bytes of a string in the header. Raises ValueError if it is not valid Unicode."""
    try:
        return len(json.dumps(text, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ValueError(f"the name or text {text!r} has half of a surrogate pair; wanted Unicode") from None
