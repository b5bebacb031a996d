"""Maps files of tables and tensors (`ibp.open`, which returns an `ibp.File`), and reads them into memory (`ibp.load`).
The last part of this file has functions that tell `ibp.checkpoints` and the command line more about a file than
`ibp.File` does."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _core
from .._common import ops as _ops
from .._common.arguments import near
from .._common.process import Closing, tqdm
from .._common.sequences import in_threads
from .._machine import memory as _memory
from .._machine.segments import FileRows, segment_of
from .._machine.staging import to_device
from .._rows.codebook import AnyCodebook
from .._rows.handle import CorruptTableError
from .._rows.table import lie_in_file, move, tensors_of
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import WholeTensor
from ..deltas import Delta
from ..deltas._coding import fingerprint
from .format import (
    CODEBOOK_KEY,
    STORAGE,
    VIEW_KEY,
    ChecksumError,
    Entry,
    FileFormatError,
    TableFields,
    View,
    dtype_of,
    form_of,
    part_names,
    views_of,
)
from .paths import INDEX_SUFFIX, SUFFIX, PathLike, find_files, is_url, path_text, read_here
from .reader import (
    THREADS,
    Checks,
    OpenFile,
    can_pin,
    mapped_parts,
    read_parts,
    read_table,
    read_whole,
    row_ranges,
    shown_names,
)

_COMPARED_NAMES = 4096  # An unknown name is compared with at most this many names; each comparison takes 0.1 ms.

Value = CompressedTensor | WholeTensor | torch.Tensor | Delta


@dataclass(frozen=True)
class TensorInfo:
    """The description of a tensor in a file.

    Attributes:
        name: name of the tensor.
        dtype: dtype of the original tensor. If this torch lacks that dtype, the attribute is None for a table, and
            uint8 for a plain tensor, which is then read as bytes.
        shape: shape of the original tensor, or of the tensor of bytes.
        scheme: "ibp", "planes" or "raw" for a table; None for a tensor that is uncompressed or is coded by `codec`.
        codebook: codebook of a table, or None.
        codec: name of the external codec of a table, or None.
        num_bytes: size in bytes of the original tensor. None if dtype is None.
        stored_bytes: size in bytes of the tensor in the file, including the index and padding, but not the codebook. 0
            for a tensor that is stored as a view of another tensor.
        fields: the fields of a table, a mapping from strings to strings; empty for other tensors.
        files: names of the files that hold the tensor's bytes.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    scheme: str | None
    codebook: AnyCodebook | None
    codec: str | None
    num_bytes: int | None
    stored_bytes: int
    fields: Mapping[str, str]
    files: tuple[str, ...]


class File(Mapping[str, Value], Closing):
    """A file, or a set of files, opened by `ibp.open`: a mapping from names to tables, tensors and deltas over the
    mapped file.

    A table or tensor is made when it is first asked for, and its bytes are read from the file when they are used.
    Tables and tensors stay valid after `close`. Changing them does not change the file: the first change of a table
    copies its rows to new memory, and when a tensor is written to, the system copies the pages that change.

    Example:
        >>> ibp.save("model.safetensors", {"weight": ibp.compress(torch.ones(1000, 1024)), "bias": torch.ones(1000)})
        >>> with ibp.open("model.safetensors") as file:
        ...     list(file), file.tables, file["weight"][7].sum()
        ...     file.info("bias")
        (['weight', 'bias'], ('weight',), tensor(1024.))
        TensorInfo(name='bias', dtype=torch.float32, shape=(1000,), ...)

    Attributes:
        path: the path that was opened.
        metadata: the user's metadata, a mapping from strings to strings.
        tables: names of the compressed tensors.
        removed: for the delta of a checkpoint, names of tensors that no longer exist.
    """

    def __init__(self, path: Path, *, verify: bool, memory: str | None, share: bool) -> None:
        self.path, self._verify, self._memory, self._share = path, verify, memory, share
        paths, places = find_files(path)
        self._files = {name: OpenFile(file, verify=verify) for name, file in paths.items()}
        self._holders = _holders_of(self._files, places)  # For each tensor in a header, the file that holds it.
        self._owners: dict[str, OpenFile] = {}  # For each table, the file whose metadata has its fields.
        for file in self._files.values():
            for name in file.tables:
                if name in self._owners:
                    raise FileFormatError(f"{self._owners[name].path} and {file.path} both have a table {name!r}")
                self._owners[name] = file
        table_of = {part: name for name in self._owners for part in part_names(name)}
        self._names = {table_of.get(name, name): None for name in self._holders}  # In the order of their bytes.
        for name in self._owners:
            if name in self._holders:
                raise FileFormatError(f"{self._owners[name].path}: there are a table and a tensor of the name {name!r}")
            self._names[name] = None
        metadata: dict[str, str] = {}
        for file in reversed(self._files.values()):
            metadata.update(file.header.user_metadata)
        self._views = views_of(metadata, self._names)
        self.metadata = {key: text for key, text in metadata.items() if not key.startswith(VIEW_KEY)}
        self._stored = tuple(self._names)  # Names of everything that the file holds, bases of views included.
        storages = {view.base for view in self._views.values() if view.base.startswith(STORAGE)}
        self._names = {name: None for name in (*self._names, *self._views) if name not in storages}
        self.tables = tuple(name for name in self._names if name in self._owners)
        self.removed = tuple(name for file in self._files.values() for name in file.removed)
        self._pins = _memory.pins(memory) is not False
        self._made: dict[str, Value] = {}
        self._is_closed = False

    # ---- the mapping from names to values ----

    def __getitem__(self, name: str) -> Value:
        """Returns the table or tensor with a name.

        Raises:
            KeyError: there is no such name.
            FileFormatError: the file's fields for it are wrong, or this version of ibp does not know them.
            ChecksumError: with `verify`, its bytes are damaged.
            ValueError: the file is closed.
        """
        self._check_name(name)
        return self._value(name)

    def get_tensor(self, name: str, device: torch.device | str | int | None = None) -> torch.Tensor:
        """Returns the tensor with a name, as `get_tensor` of safetensors' `safe_open` does. A compressed tensor is
        decompressed.

        Args:
            device: the device of the result. None: the CPU.

        Raises:
            KeyError: there is no such name.
            TypeError: the value with this name is a delta.
            FileFormatError, ChecksumError, ValueError: as in `file[name]`.
        """
        value, home = self[name], _memory.canonical("cpu" if device is None else device)
        if isinstance(value, torch.Tensor):
            return value.to(home)
        if isinstance(value, Delta):
            raise TypeError(f"{name!r} is a delta; wanted a tensor, compressed or not: apply the delta to its base")
        return value.decompress(device=home)

    def _value(self, name: str) -> Value:
        """Returns the value with a name. The first call makes the value, which is kept for later calls. The name may
        also be that of a storage of which tensors are views; such names are not keys of the mapping."""
        if name not in self._made:  # If several threads make the value, the first one is kept.
            self._made.setdefault(name, self._map(name, self._verify))
        return self._made[name]

    def _check_name(self, name: str) -> None:
        """Raises KeyError if there is no tensor with a name, and ValueError if the file is closed."""
        self._check_open()
        if name not in self._names:
            raise self._unknown(name)

    def _unknown(self, name: object) -> KeyError:
        """Returns the error for an unknown name. Its message lists some of the existing names."""
        there = f"it has {shown_names(self._names)}" if self._names else "it has no tensors"
        alike = itertools.islice(self._names, _COMPARED_NAMES)
        return KeyError(f"{self.path} has no tensor {name!r}{near(name, alike)}; {there}")

    def _map(self, name: str, verify: bool) -> Value:
        """Makes the value with a name, over the mapped file. verify: whether to compare its checksums first.

        The exception is a tensor that an external codec has coded: it is read into memory. Its checksums are compared
        if the file was opened with `verify`, regardless of the argument `verify`.
        """
        if name in self._views:
            return _viewed(self._views[name], self._value(self._views[name].base))
        pages: list[_core.FilePages] | None = [] if _ops.cuda_is_available() else None
        with _naming(name):
            if name in self._owners and self.fields(name).codec is not None:
                return read_whole(self._owners[name], name, self._holders, self._memory == "pinned")
            if verify:
                self.verify([name])
            if name not in self._owners:
                holder = self._holders[name]
                return holder.tensor(name, holder.mapped)
            table, fields = read_table(self._owners[name], name, self._holders, mapped_parts(pages))
        lie_in_file(table, None if pages is None else FileRows(pages, pin=self._pins))
        if self._share and self._pins and not can_pin(self._owners[name]):
            self._share_between_processes(name, table)
        if self._memory == "pinned":
            table.pin_memory()
        return _with_fields(table, fields)

    def _share_between_processes(self, name: str, table: CompressedTensor) -> None:
        """Moves a table to memory that is shared by all processes that open the file with share=True. If the system
        does not allow it, the table stays where it is, and a warning says so."""
        identities = {file.identity for file, _ in self._parts(name)}
        try:
            segment, copies = segment_of(f"{sorted(identities)} {name}", tensors_of(table))
        except (RuntimeError, OSError) as error:
            warnings.warn(f"{name!r} is not shared between processes: {error}", RuntimeWarning, stacklevel=5)
            return
        segment.pin = True
        move(table, copies, segment)

    def _load(self, name: str, device: torch.device, pin: bool | None) -> Value:
        """Reads the value with a name into new memory (see `load`). pin: whether to pin that memory. None: it is pinned
        for tables, if the system allows, and pageable for plain tensors."""
        if name in self._views:
            return _viewed(self._views[name], self._load(self._views[name].base, device, pin))
        if device.type == "cuda":
            value = self._map(name, self._verify)
            return to_device(value, device) if isinstance(value, torch.Tensor) else value.to(device)
        with _naming(name):
            if name not in self._owners:
                file = self._holders[name]
                return file.tensor(name, lambda start, num_bytes: file.read(start, num_bytes, bool(pin)))
            if self.fields(name).codec is not None:
                return read_whole(self._owners[name], name, self._holders, pin)
            table, fields = read_table(self._owners[name], name, self._holders, read_parts(pin))
        table._is_refused = pin is None and not table.is_pinned()
        return _with_fields(table, fields)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the table or tensor with this name, or `default` if the name does not exist. Unlike `file[name]`,
        this method then does not search for similar names."""
        self._check_open()
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"ibp.File({str(self.path)!r}, tables={len(self.tables)}, tensors={len(self)}{closed})"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        """Pickles the path and the options. Unpickling opens the file again."""
        return _reopened, (os.fspath(self.path), self._verify, self._memory, self._share)

    # ---- descriptions of tensors ----

    def info(self, name: str) -> TensorInfo:
        """Returns what the file says about a tensor, without reading its bytes.

        Raises:
            KeyError: there is no tensor of that name.
            FileFormatError: the file's fields for it are wrong, or this version of ibp does not know them.
            ValueError: the file is closed.
        """
        self._check_open()
        parts = self._parts(name)
        stored = sum(entry.num_bytes for _, entry in parts)
        files = tuple(dict.fromkeys(file.path.name for file, _ in parts))
        if name in self._views:
            view = self._views[name]
            base = self.info(view.base).dtype
            num_bytes = None if base is None else math.prod(view.shape) * base.itemsize
            return TensorInfo(name, base, view.shape, None, None, None, num_bytes, 0, {}, files)
        if name not in self._owners:
            dtype, shape = form_of(*parts[0][1][:2], stored)
            return TensorInfo(name, dtype, shape, None, None, None, stored, stored, {}, files)
        owner, fields = self._owners[name], self.fields(name)
        table_dtype: torch.dtype | None = None
        with contextlib.suppress(FileFormatError):  # This torch does not have the dtype.
            table_dtype = dtype_of(fields.dtype)
        return TensorInfo(
            name,
            table_dtype,
            fields.shape,
            fields.scheme,
            None if fields.codebook is None else owner.codebook(fields.codebook),
            fields.codec,
            None if table_dtype is None else torch.Size(fields.shape).numel() * table_dtype.itemsize,
            stored,
            dict(pair.split("=", 1) for pair in owner.tables[name].split(" ")),
            files,
        )

    def fields(self, name: str) -> TableFields:
        """Returns the checked fields of a table. Raises KeyError and FileFormatError as `info` does."""
        return self._owners[name].fields(name)

    def _parts(self, name: str) -> list[tuple[OpenFile, Entry]]:
        """Returns (file, entry in its header) for each part of a tensor. For a view, these are the parts of its base.
        Parts of codebooks are left out."""
        if name in self._views:
            name = self._views[name].base
        elif name not in self._names and name not in self._stored:
            raise self._unknown(name)
        parts = part_names(name) if name in self._owners else [name]
        holders = [(self._holders[part], part) for part in parts if part in self._holders]
        return [(file, file.header.tensors[part]) for file, part in holders]

    # ---- checksums ----

    @property
    def has_checksums(self) -> bool:
        """Whether all files of the set have checksums. Every file that ibp writes has them."""
        return all(file.checks is not None for file in self._files.values())

    def verify(self, names: Iterable[str] | None = None, *, content: bool = False, progress: bool = False) -> int:
        """Computes the checksums of the file's bytes, and compares them with the checksums in the file.

        Args:
            names: names of the tensors to verify. The codebooks of tables are verified, too. None: the whole file.
            content: whether to decode tables, too, and to compare the fingerprints of the decoded tensors with those
                in the file, if it has them.
            progress: whether to show a progress bar.

        Returns:
            The number of bytes that were compared: 0 for files without checksums, such as those of other libraries.

        Raises:
            ChecksumError: bytes are damaged. The message names the tensor and the block.
            CorruptTableError: with `content`, a table cannot be decoded.
            FileFormatError: a table is not valid.
            KeyError: there is no tensor with a given name.
            TypeError: names is a single string.
            ValueError: the file is closed.
        """
        self._check_open()
        _check_names(names)
        given = self if names is None else names
        chosen = list(dict.fromkeys(self._views[name].base if name in self._views else name for name in given))
        if names is None:
            of_files = [file.checks for file in self._files.values() if file.checks is not None]
            blocks: dict[Checks, Sequence[int]] = {checks: range(checks.num_blocks) for checks in of_files}
        else:
            blocks = self._blocks_of(chosen)
        runs = [run for checks, numbers in blocks.items() for run in checks.runs_of(numbers)]
        total, num_blocks = 0, sum(map(len, blocks.values()))
        with tqdm(total=num_blocks, desc="verify", unit="block", disable=not progress) as bar:
            for run, num_bytes in zip(runs, in_threads(lambda run: run[0].check(run[1]), runs, THREADS)):
                total += num_bytes
                bar.update(len(run[1]))
        for name in tqdm(chosen if content else (), desc="decode", unit="tensor", disable=not (progress and content)):
            if not self._is_what_it_was(name):
                raise ChecksumError(f"{self._owners[name].path}: {name!r} decodes to other bytes than were compressed")
        return total

    def _blocks_of(self, names: Iterable[str]) -> dict[Checks, Sequence[int]]:
        """Returns, for the checksums of each file, the sorted numbers of the blocks that hold bytes of the named
        tensors or of their codebooks. Files without checksums are left out."""
        blocks: dict[Checks, set[int]] = {}
        for name in names:
            held = self._parts(name)
            if name in self._owners:
                owner = self._owners[name]
                parts = owner.codebook_parts(self.fields(name).codebook)
                held += [(owner, owner.header.tensors[part]) for part in parts]
            for file, entry in held:
                if file.checks is not None:
                    blocks.setdefault(file.checks, set()).update(file.checks.blocks_of(entry.start, entry.end))
        return {checks: sorted(numbers) for checks, numbers in blocks.items()}

    def _is_what_it_was(self, name: str) -> bool:
        """Decodes a table, and compares the result with the fingerprint of the original tensor. Returns False if they
        differ. Returns True if they agree, or if the file has no fingerprint to compare."""
        if name not in self._owners:
            return True
        wanted, value = self.fields(name).content, self._value(name)
        return wanted is None or isinstance(value, (torch.Tensor, Delta)) or fingerprint(value) == wanted

    # ---- closing ----

    def close(self) -> None:
        """Closes the file. Tables and tensors that the caller holds stay valid, and keep the file mapped."""
        self._is_closed = True
        self._made.clear()
        for file in self._files.values():
            file.close()

    def _check_open(self) -> None:
        """Raises ValueError if the file is closed."""
        if self._is_closed:
            raise ValueError(f"{self.path} is closed")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """A context that adds the name of a tensor to the message of a ChecksumError of its block."""
    try:
        yield
    except ChecksumError as error:
        raise ChecksumError(f"{error}; {name!r} was being read") from None


def _viewed(view: View, base: Value) -> Value:
    """Returns the value of a view. If the view covers its whole base, that is the base itself, tensor or table.
    Otherwise it is a tensor, and a base that is a table is decompressed."""
    if isinstance(base, Delta):
        raise FileFormatError(f"there is a view of {view.base!r}, which is a delta")
    if view.is_whole(base.shape):
        return base
    return view.of(base if isinstance(base, torch.Tensor) else base.decompress(device=base.device))


def _with_fields(table: CompressedTensor, fields: TableFields) -> CompressedTensor | Delta:
    """Returns the table itself, or a delta that is made from it if the fields are those of a delta."""
    return table if fields.base is None or fields.result is None else Delta(table, fields.base, fields.result)


def _holders_of(files: Mapping[str, OpenFile], places: Mapping[str, str]) -> dict[str, OpenFile]:
    """Returns the file that holds each tensor, by the tensor's name. Padding, checksums and codebooks are left out.
    files, places: as `find_files` returns them, but with open files. Raises FileFormatError if two files have a tensor
    with the same name, or if a file lacks a tensor that the index says it has."""
    holders: dict[str, OpenFile] = {}
    for file_name, file in files.items():
        for name in file.header.tensors:
            if file.is_own(name) or places.get(name, file_name) != file_name:
                continue
            if name in holders:
                raise FileFormatError(f"{holders[name].path} and {file.path} both have a tensor {name!r}")
            holders[name] = file
    for name, file_name in places.items():
        if name not in files[file_name].header.tensors:
            raise FileFormatError(f"{files[file_name].path} has no tensor {name!r}, which the index says it has")
    return holders


# ---- opening and loading ----


def open(path: PathLike, *, verify: bool = False, memory: str | None = None, share: bool = False) -> File:
    """Opens and maps a file of tables and tensors. The bytes of rows are read only when the rows are asked for.

    The system keeps the bytes in memory once, however many processes read them. Tables can be changed, and tensors can
    be written to. This does not change the file: the first change of a table copies its rows to new memory, and when a
    tensor is written to, the system copies the pages that change.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> ibp.save("embedding.safetensors", {"embedding": ibp.compress(x)})
        >>> with ibp.open("embedding.safetensors") as file:
        ...     rows = ibp.index_select(file["embedding"], [5, 900])
        >>> torch.equal(rows, x[[5, 900]])
        True

    Args:
        path: a file, the index of a set of files (`model.safetensors.index.json`), or a directory that has a set or
            single files. An ordinary safetensors file also works: all of its tensors are plain.
        verify: whether to compare the header's checksum now, and a tensor's checksums when the tensor is first asked
            for. To compare them, all bytes of the tensor are read. False by default, so that the CPU and GPUs read only
            the rows that they need from the map. Comparing checksums row by row would not help: a row has a few hundred
            bytes, and a checksum covers 1 MiB.
        memory: "pinned": GPUs read rows themselves. A table's mapped bytes are pinned when the table is first asked
            for. If the system refuses, the table is copied to pinned memory, and a RuntimeWarning is given once per
            process. "host": rows pass through the CPU. None: a table is pinned when a GPU first fetches from it.
        share: whether processes share pinned copies of tables. This has an effect only if the system cannot pin mapped
            memory. All processes of the same user on this machine that open the file with share=True then use the same
            copy of a table, instead of one copy each. A shared table cannot be changed. Its copy is freed when no
            process uses it any longer. The processes find the copy through a small file in the directory
            `$XDG_RUNTIME_DIR` or, if that does not exist, in the directory of temporary files. If the table cannot be
            shared, a RuntimeWarning says so, and the process makes its own copy.

    Returns:
        An `ibp.File`, a mapping from names to tables and tensors.

    Raises:
        FileFormatError: the file has another format, is inconsistent, or has a newer format.
        ChecksumError: with `verify`, the header is damaged.
        ValueError: path is a URL that does not name a file on this machine. `ibp.load` can read it.
        OSError: the file cannot be read.
    """
    text = path_text(path)
    if is_url(text):
        raise ValueError(f"{text!r} is on no file system of this machine, so that it cannot be mapped: use ibp.load")
    return File(Path(text), verify=verify, memory=memory, share=share)


def _reopened(path: str, verify: bool, memory: str | bool | None, share: bool) -> File:
    """Opens the file of an unpickled `File`. memory: as in `open`; in pickles of ibp 0.2, a bool that says whether
    tables are pinned."""
    if isinstance(memory, bool):
        memory = "pinned" if memory else "host"
    return open(path, verify=verify, memory=memory, share=share)


def load(
    path: PathLike,
    *,
    device: torch.device | str | int | None = None,
    names: Iterable[str] | None = None,
    verify: bool = True,
    memory: str | None = None,
) -> dict[str, Value]:
    """Reads tables and tensors from a file into new memory.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> ibp.save("model.safetensors", {"weight": ibp.compress(x), "bias": torch.ones(1000)})
        >>> tensors = ibp.load("model.safetensors", memory="host")
        >>> tensors["weight"].stored_bytes < x.nbytes, torch.equal(tensors["weight"].decompress(), x)
        (True, True)

    Args:
        path: as in `ibp.open`, or a URL that fsspec knows ("s3://...", "memory://..."). A remote file is copied to
            a temporary file for the duration of the call.
        device: where tables and tensors go. None: host memory, or with memory="device" the current CUDA device.
        names: names of the tensors to read. None: all.
        verify: whether to compare the checksums of the header, and those of all bytes that are read. A file without
            checksums, such as one that another library wrote, is read without this check.
        memory: where tables and tensors live: "device", on the device; "pinned", in host memory that GPUs read; "host",
            in pageable memory. None: on the device if one is given; otherwise tables in pinned memory and tensors in
            pageable memory.

    Returns:
        Tables and tensors by name, in the order of `names` or of the file.

    Raises:
        FileFormatError: the file has another format, is inconsistent, or has a newer format.
        ChecksumError: with `verify`, bytes are damaged.
        KeyError: there is no tensor with a given name.
        TypeError, ValueError: device, names or memory is not as described, or device and memory are inconsistent.
        RuntimeError: memory is "pinned", but there is no CUDA device, or the system refuses to pin memory.
        OSError: the file cannot be read.
    """
    _check_names(names)
    _memory.check_memory(memory)
    is_near = memory == "device"
    target = _memory.usual(device) if is_near else _memory.canonical("cpu" if device is None else device)
    if target.type == "cuda" and memory in ("pinned", "host"):
        raise ValueError(f"memory is {memory!r}, of the host, but device is {target}")
    pin = False if target.type == "cuda" or is_near else _memory.pins(memory)
    with read_here(path_text(path), (SUFFIX, INDEX_SUFFIX)) as near, open(near, verify=verify) as file:
        wanted = list(file if names is None else names)
        for name in wanted:
            file._check_name(name)
        return {name: file._load(name, target, pin) for name in wanted}


def _check_names(names: Iterable[str] | None) -> None:
    """Raises TypeError if `names` is a single string."""
    if isinstance(names, str):
        raise TypeError(f"names is the text {names!r}; wanted a list of names")


# ---- what `ibp.checkpoints` and the command line ask of a file ----


def stored_in(file: File) -> Iterator[tuple[str, Value, tuple[str, tuple[int, ...]] | None]]:
    """Yields (name, value, entry) for every value that a file stores, including the bases of views. Checksums of values
    that are mapped are not compared; `range_verifier` compares them. entry: the dtype and the shape of a plain tensor
    in the header; None for a table."""
    for name in file._stored:
        entry = None if name in file._owners else file._holders[name].header.tensors[name][:2]
        yield name, file._map(name, verify=False), entry


def views_in(file: File) -> Mapping[str, View]:
    """Returns the views of a file by name: its tensors that share the memory of another tensor or storage in the
    file."""
    return file._views


def range_verifier(file: File, name: str, value: CompressedTensor | torch.Tensor) -> Callable[[int, int], None]:
    """Returns a function of (start, end) that verifies the blocks from which bytes [start, end) of a tensor are read,
    unless they were verified before. For a table, these are the blocks of its index, and the blocks of the rows that
    are decoded for these bytes. value: the value that `stored_in` yields for the name.

    The function raises ChecksumError if a block is damaged. The message names the file, the block and the tensor.
    """

    def check(part: str, first: int, last: int) -> None:
        holder = file._holders.get(part)
        if holder is not None and holder.checks is not None:
            start = holder.header.tensors[part].start
            with _naming(name):
                holder.checks.check(holder.checks.blocks_of(start + first, start + last))

    if isinstance(value, torch.Tensor):
        return lambda start, end: check(name, start, end)
    rows_per_base = file.fields(name).rows_per_base

    def check_rows(start: int, end: int) -> None:
        if start < end:
            check(f"{name}:lengths", 0, value.lengths.nbytes)
            check(f"{name}:bases", 0, value.bases.nbytes)
            for part, (first, last) in row_ranges(value, rows_per_base, start, end).items():
                check(f"{name}:{part}", first, last)

    return check_rows


def damage_in(file: File, content: bool) -> tuple[dict[str, list[str]], list[str]]:
    """Finds out which tensors of a damaged file, or set of files, are damaged.

    Checksums tell which blocks are damaged. Fingerprints tell which tables are damaged. If no tensor and no codebook in
    a damaged block is known to be damaged, all tensors with bytes in the block may be damaged, except those that are
    known to be intact. If the block has bytes of only one tensor, this tensor is damaged.

    Args:
        content: whether to decode tables outside of damaged blocks, too.

    Returns:
        (names, blocks). names: a dictionary with three lists of names. "damaged" has the damaged tensors, "by_codebook"
        has the damaged tensors that share a damaged codebook, and "suspect" has the tensors that may be damaged.
        blocks: for each damaged block, a text that names the file, the number of the block and the range of its bytes.

    Raises:
        ChecksumError: a header is damaged, or the checksums themselves are.
    """
    blocks = _damaged_blocks(file)
    inside = {name for _, tensors, _ in blocks for name in tensors}
    used = {name for *_, codebooks in blocks for users in codebooks for name in users}
    good = {name: _is_good(file, name) for name in {*inside, *used, *(file if content else ())}}
    # For each codebook that is certainly damaged, the tables of this codebook. A codebook in a damaged block is
    # certainly damaged if all of its tables are damaged. If there is only one such table, its rows must also lie
    # outside of damaged blocks; otherwise the rows may be damaged, and not the codebook.
    shared = [
        users
        for *_, codebooks in blocks
        for users in codebooks
        if all(good[name] is False for name in users) and (len(users) > 1 or users[0] not in inside)
    ]
    by_codebook = set(itertools.chain(*shared))
    damaged, suspect = {name for name, is_good in good.items() if is_good is False}, set[str]()
    for _, tensors, codebooks in blocks:
        books = [users for users in codebooks if not any(good[name] for name in users)]
        unknown = [name for name in tensors if not good[name] and name not in by_codebook]
        if any(users in shared for users in books) or not damaged.isdisjoint(unknown):
            continue
        is_alone = len({*tensors, *itertools.chain(*codebooks)}) == 1
        (damaged if is_alone else suspect).update(unknown, *books)
    found = {"damaged": damaged, "by_codebook": by_codebook & damaged, "suspect": suspect - damaged}
    bases = {name: view.base for name, view in views_in(file).items()}  # A view is in the same lists as its base.
    lists = {kind: [name for name in file if bases.get(name, name) in names] for kind, names in found.items()}
    return lists, [place for place, *_ in blocks]


def _damaged_blocks(file: File) -> list[tuple[str, list[str], list[list[str]]]]:
    """Compares all checksums of a file. Returns, for each damaged block: its place; the names of the tensors that have
    bytes in it, where a table's codebook does not count as its bytes; and for each codebook that has bytes in it, the
    names of the tables that are coded with the codebook. Raises ChecksumError as `damage_in` does."""
    table_of = {part: name for name in file._owners for part in part_names(name)}
    books: dict[tuple[OpenFile, str], list[str]] = {}  # For each part of a codebook, the tables that use the codebook.
    for name, owner in file._owners.items():
        with contextlib.suppress(FileFormatError):  # If this ibp cannot read a table, its codebook is not known.
            for part in owner.codebook_parts(file.fields(name).codebook):
                books.setdefault((owner, part), []).append(name)
    found = []
    for each in file._files.values():
        for place, names in [] if each.checks is None else each.checks.damaged():
            tensors = dict.fromkeys(table_of.get(name, name) for name in names if not each.is_own(name))
            users = dict.fromkeys(tuple(books.get((each, name), ())) for name in names if name.startswith(CODEBOOK_KEY))
            found.append((place, list(tensors), [list(of) for of in users if of]))
    return found


def _is_good(file: File, name: str) -> bool | None:
    """Returns whether a table decodes to the tensor of which the file has the fingerprint. Returns None if the file has
    no fingerprint for it."""
    if name not in file.tables or file.fields(name).content is None:
        return None
    try:
        return file._is_what_it_was(name)
    except (FileFormatError, CorruptTableError):
        return False
