"""Plans and records the outputs of `compress`, and reports on them. `check_output` refuses an output that must not be
replaced. The plan says which tensors each file holds (`shards_of`), and how large the files become. A `Journal` has a
record of each finished file. The last part has the reports and the estimates.

`compress` writes files to a work directory beside the output, `.<name>.ibp-work`, where the finished ones wait for the
others, so that an interrupted call can be repeated. This directory also has a record of each finished file, and a plan
of the whole output. When all files are finished, they are moved to their final paths, the other files of an input that
is a directory are copied, and the work directory is removed. Only one call at a time uses it: the call locks a file
there. When the call's process ends, for whatever reason, the system releases the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _core
from .._common.manners import share_saved
from .._common.sequences import cut
from .._common.whole_files import NO_LOCKS, check_replaceable, open_locked, sync_directory, write_whole
from .._files import (
    SUFFIX,
    WEIGHTS,
    PathLike,
    check_other_files,
    checksum_bytes,
    codebook_bytes,
    coded_name,
    dtype_name,
    dtype_of,
    file_of,
    header_room,
    is_there,
    is_url,
    names_of_set,
    outputs_of,
    replacing,
    rounded_up,
    write_index,
)
from .._rows.codebook import AnyCodebook
from .._rows.learning import Options
from ._inputs import Conversion, directory_of
from ._source import Source

CODED_WEIGHTS = coded_name(WEIGHTS)  # the name of the file of ibp in an output that is a directory
SHARD_BYTES = 5 << 30  # default limit in bytes of the total size, before coding, of the tensors in a file
RECORD = ".done.json"  # the end of the name of a finished file's record
_PLAN, _LOCK = "plan.json", "lock"
_OPTIONS = ("scheme", "chunk_bytes", "tau", "clusters", "level", "row_bytes")  # options on which coded bytes depend
# Formats of input whose files are not joined; files of ibp have the format "ibp".
_FILES_OF_THEIR_OWN = ("safetensors", "torch")


# ---- what is there already ----


def already_there(output: PathLike, name: str, conversion: Conversion | None) -> str | None:
    """Returns the path or URL of an existing file that the output would replace, or None if there is no such file.
    Raises OSError if that file must not be replaced, for instance because it is a device. name: the name of the new
    file if the output is a directory and there is no conversion."""
    if conversion is not None:
        there = next(map(os.fspath, conversion.paths()), None)
    else:
        there = file_of(output, name) if is_there(output, name) else None
    if there is not None and not is_url(there):
        check_replaceable(Path(there))
    return there


def check_output(output: PathLike, name: str, conversion: Conversion | None, force: bool) -> None:
    """Raises OSError if an output cannot be written: it exists, and `force` is not set; or something that must not be
    replaced, such as a device, has its name; or its directory has other weights, which programs that read the directory
    would load. The other arguments are as in `already_there`."""
    there = None if force else already_there(output, name, conversion)
    if there is not None:
        raise FileExistsError(f"{there} is there already; wanted another output, or force=True, which replaces it")
    if conversion is not None:
        conversion.check()
    elif (target := directory_of(output)) is not None:
        check_other_files(target / name)


# ---- which tensors a file holds ----


def shards_of(source: Source, target: Path, shard_bytes: int | None, metadata: Mapping[str, str]) -> list[Source]:
    """Plans the files that are written for a source. Returns, for each file, a source with the tensors that it is to
    hold, and its metadata. The path of this source is the file's path within the directory of the output; its `files`
    are those of the whole source.

    If the source consists of several files, all of them ordinary safetensors files or checkpoints of torch, the files
    are not joined. Otherwise all tensors go to one file. A file is then divided, between tensors, if the total size of
    its tensors exceeds shard_bytes.

    Args:
        target: the path, within the directory of the output, that the files are named after.
        shard_bytes: the largest total size in bytes of the tensors in a file. A larger tensor is alone in its file.
            None: files are not divided.
        metadata: entries that are added to the metadata of every file.

    Raises:
        ValueError: two tensors that must be stored have the same name.
    """
    stay_apart = len(source.parts) > 1 and all(part.format in _FILES_OF_THEIR_OWN for part in source.parts)
    contents = [
        (tensors, {**part.metadata, **part.view_texts(), **metadata})
        for part in (source.parts if stay_apart else [source])
        for tensors in cut(part.stored(), lambda tensor: tensor.num_bytes, shard_bytes)
    ]
    names = Counter(tensor.name for tensors, _ in contents for tensor in tensors)
    for twice in (name for name, count in names.items() if count > 1):  # A view's base may get the name of a tensor.
        raise ValueError(f"there are two tensors {twice!r} in {source.path}; wanted different names")
    shards = []
    for name, (tensors, texts) in zip(names_of_set(target, len(contents)), contents):
        by_name = {tensor.name: tensor for tensor in tensors}
        shard = Source(os.fspath(target.with_name(name)), "ibp", by_name, texts)
        shard.files = source.files
        shards.append(shard)
    return shards


def compressed_bytes(source: Source, stored: Mapping[str, int], codebooks: Mapping[str, AnyCodebook | None]) -> int:
    """Returns the total size in bytes of the files that `compress` writes for a source, with headers, codebooks and
    checksums. stored: size in bytes of each tensor in its file, by name. codebooks: the codebook of each tensor, by
    name; None if the tensor is stored uncompressed."""
    total = 0
    for shard in shards_of(source, Path(f"model{SUFFIX}"), SHARD_BYTES, {}):
        books = {book for name in shard.tensors if (book := codebooks[name]) is not None}
        data = sum(rounded_up(stored[name]) for name in shard.tensors)
        data += sum(rounded_up(part) for part in codebook_bytes(books))
        shapes = {name: tensor.shape for name, tensor in shard.tensors.items()}
        total += header_room(shapes, shard.metadata, books) + data + checksum_bytes(data)
    return total


def table_bytes(stored_bytes: int, num_rows: int) -> int:
    """Returns the size in bytes of a packed table in a file, where its rows, lengths and bases are each padded to a
    multiple of the alignment. stored_bytes: size in bytes of all three together, without padding. If this is the size
    of the lengths alone, no row has stored bytes, so the table has no bases."""
    lengths = 2 * num_rows
    bases = 8 * -(-num_rows // _core.ROWS_PER_BASE) if stored_bytes > lengths else 0
    return sum(map(rounded_up, (stored_bytes - lengths - bases, lengths, bases)))


# ---- which files are finished ----


def plan_of(shards: Sequence[Source], options: Options, kept: Iterable[str]) -> dict[str, Any]:
    """Returns a description of a set of files, as a dict that JSON can hold: the inputs, the options, and the tensors
    of each file. An input is described by its path, its size and the time of its last change. kept: names of the
    tensors that are stored uncompressed, because the caller's patterns do not choose them."""
    inputs = dict.fromkeys(os.path.abspath(path) for shard in shards for path in shard.files)
    found = {path: os.stat(path) for path in inputs}
    return {
        "format": _core.FORMAT_VERSION,
        "release": _core.version(),
        "inputs": [[path, state.st_size, state.st_mtime_ns] for path, state in found.items()],
        "options": {**{name: getattr(options, name) for name in _OPTIONS}, "kept": sorted(kept)},
        "shards": {
            shard.path: [[tensor.name, tensor.num_bytes] for tensor in shard.tensors.values()] for shard in shards
        },
    }


def work_directory(target: Path) -> Path:
    """Returns the directory where the finished files of an output wait until all of them are finished. target: the
    output's path."""
    return target.with_name(f".{target.name}.ibp-work")


class Journal:
    """The work directory of an output that is being made. A context manager: leaving it releases the directory. If the
    `with` block ends with an exception, and no file is finished, the directory is also removed.

    Args:
        target: the output's path.
        plan: the description of the output that `plan_of` returns. Files that were finished under another plan are not
            used.

    Attributes:
        directory: the work directory.
        home: the directory of the output.
    """

    def __init__(self, target: Path, plan: dict[str, Any]) -> None:
        self.directory = work_directory(target)
        self._lock: io.FileIO | None = None
        self._target, self.home, self._plan = target, target.parent, plan

    def open(self, restart: bool, check: Callable[[], object] = lambda: None) -> None:
        """Makes the directory, if it does not exist, and locks it. Other calls cannot use the directory until `release`
        is called. If an interrupted call with the same plan has left the directory, and if `restart` is set, the
        finished files in the directory are kept. Otherwise the directory is emptied.

        check: a function that is called before that. If it raises an error, the directory stays as it is. It is not
            called if the interrupted call has moved finished files to their final paths, and these files have not
            changed since.

        Raises:
            OSError: another call is using the directory, or its path is not a directory.
        """
        self._lock = self._locked()
        try:
            goes_on = json.loads((self.directory / _PLAN).read_bytes()) == self._plan
        except (OSError, ValueError):
            goes_on = False
        records = (path.relative_to(self.directory) for path in self.directory.rglob(f"*{RECORD}"))
        files = [os.fspath(path).removesuffix(RECORD) for path in records]
        moved = [file for file in files if not (self.directory / file).exists()]
        if not (goes_on and moved and all(map(self.finished, moved))):
            check()
        if not (restart and goes_on):
            self._empty()
        write_whole(self.directory / _PLAN, json.dumps(self._plan, sort_keys=True).encode())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._lock is not None and not any(self.directory.rglob(f"*{RECORD}")):
            self.close()
        self.release()

    def release(self) -> None:
        """Releases the directory if this journal holds its lock, so that other calls can use it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _locked(self) -> io.FileIO:
        """Makes the directory if it does not exist, and takes its lock. Returns the file that holds the lock."""
        path = self.directory / _LOCK
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.directory.is_symlink():
                raise NotADirectoryError(f"{self.directory} is a symbolic link; wanted a directory, or nothing there")
            try:
                return io.FileIO(open_locked(path, 0o666, self._take), "r+")
            except FileNotFoundError:  # another call, which had used the directory, has just removed it
                continue

    def _take(self, file: int) -> None:
        """Locks an open file. Raises BlockingIOError if another call has locked it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another call writes {self._target} at this moment, and has {self.directory}; wanted another output, "
                "or to wait until that call has ended"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{self.directory}: the file system has no locks ({error.strerror}): wanted no other call that "
                "writes there meanwhile",
                stacklevel=2,
            )

    def _empty(self) -> None:
        """Removes everything in the directory except the locked file."""
        for path in self.directory.iterdir():
            if path.name != _LOCK:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def finished(self, file: str) -> dict[str, Any] | None:
        """Returns the record of a finished file, or None if there is no valid record, or if the file has changed since
        the record was written."""
        try:
            record = json.loads((self.directory / f"{file}{RECORD}").read_bytes())
            for fields in record["tensors"]:
                TensorReport.from_dict(fields)
            is_own = record["file"] == file and {"names", "data_bytes"} <= record.keys()
            return record if is_own and self._place(file, record) is not None else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def path_of(self, file: str) -> Path:
        """Returns the path, in the journal's directory, to which a file of the output is first written. Makes the
        parent directory of that path. file: the file's path within the output's directory."""
        path = self.directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_record(self, file: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Writes the record of a finished file, which is in the directory. Returns the record: the fields, with the
        file's path, its size and the time of its last change."""
        found = self.path_of(file).lstat()
        record = {**fields, "file": file, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
        write_whole(self.directory / f"{file}{RECORD}", json.dumps(record).encode())
        return record

    def _place(self, file: str, record: dict[str, Any]) -> Path | None:
        """Returns the path of a record's file: in the directory, or its final path if an earlier call has already moved
        it. Returns None if there is no such file, or if it has changed."""
        for path in (self.directory / file, self.home / file):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                told = found.st_size, found.st_mtime_ns
                return path if stat.S_ISREG(found.st_mode) and told == (record["size"], record["mtime_ns"]) else None
        return None

    def move(self, record: dict[str, Any]) -> None:
        """Moves the finished file of a record from the directory to its final path, unless it is there already. Raises
        OSError if the file exists at neither path, or was replaced by another file."""
        file = record["file"]
        place = self._place(file, record)
        if place is None:
            raise FileNotFoundError(
                f"{self.directory / file} is not what was written there: it has been removed or replaced; wanted the "
                "same call again, which writes it anew"
            )
        (self.home / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(place, self.home / file)

    def publish(self, sets: Mapping[Path, Sequence[Source]], records: Mapping[str, dict[str, Any]]) -> None:
        """Moves finished files to their final paths, and writes the index of each set. Until `close` is called, a call
        with the same plan still uses these files.

        sets: for each set, its files. The key is the path, within the directory of the output, that the set is named
            after. A set of one file has no index.
        records: the records of the files, by their paths.
        """
        for path, shards in sets.items():
            target, made = self.home / path, [records[shard.path] for shard in shards]
            with replacing(target, outputs_of(target, len(made))):
                for record in made:
                    self.move(record)
                if len(made) > 1:
                    weight_map = {name: Path(record["file"]).name for record in made for name in record["names"]}
                    write_index(target, weight_map, sum(record["data_bytes"] for record in made))
            sync_directory(target.parent)

    def close(self) -> None:
        """Removes the directory. The locked file is removed last, because without it another call could begin."""
        with contextlib.suppress(OSError):
            self._empty()
            (self.directory / _LOCK).unlink()
            self.directory.rmdir()


# ---- reports and estimates ----


@dataclass(frozen=True)
class TensorReport:
    """A tensor of a compressed checkpoint.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> for tensor in ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu").tensors:
        ...     print(tensor.name, tensor.scheme, f"{tensor.savings:.0%}")
        w planes 17%
        b None 0%

    Attributes:
        name: name in the checkpoint.
        dtype, shape: dtype and shape of the tensor.
        scheme: "ibp" or "planes". None if the tensor is stored uncompressed.
        num_bytes: size in bytes of the tensor.
        stored_bytes: size in bytes of the tensor in the file, with its index and its padding, but without its codebook.
        file: path of its file, within the directory of the output.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    scheme: str | None
    num_bytes: int
    stored_bytes: int
    file: str

    @property
    def savings(self) -> float:
        """The share of the tensor's bytes that is saved: 1 - stored_bytes / num_bytes."""
        return share_saved(self.num_bytes, self.stored_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict that JSON can hold."""
        return _as_json(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TensorReport:
        """Makes a report from the fields that its `as_dict` returned."""
        return cls(**{**fields, "dtype": dtype_of(fields["dtype"]), "shape": tuple(fields["shape"])})


@dataclass(frozen=True)
class CheckpointReport:
    """A report of the files and tensors that `compress` has written.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> report = ibp.checkpoints.compress("model.pt", "model.ibp", device="cpu")
        >>> report.path, report.num_bytes, f"{report.savings:.0%}"
        ('model.ibp', 1025024, '16%')

    Attributes:
        path: the path to open: the file, the index of a set of files, or the directory of several files that are not a
            set. If the output is a URL, this is a URL, too.
        files: paths of the files with tensors, within their directory.
        tensors: a `TensorReport` for each tensor, in the order of the files.
        num_bytes: size in bytes of all tensors.
        file_bytes: size in bytes of all files with tensors, headers and checksums included.
        kept_files: number of files that an earlier, interrupted call had finished.
        peak_bytes: the largest size in bytes of this process's own memory (RssAnon of Linux) that was seen during the
            call.
        other_files: paths of the other files that were copied or written, if a directory was compressed.
    """

    path: str
    files: tuple[str, ...]
    tensors: tuple[TensorReport, ...]
    num_bytes: int
    file_bytes: int
    kept_files: int
    peak_bytes: int
    other_files: tuple[str, ...] = ()

    @property
    def savings(self) -> float:
        """The share of the tensors' bytes that is saved: 1 - file_bytes / num_bytes. It is negative if headers take
        more bytes than coding saves."""
        return share_saved(self.num_bytes, self.file_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict that JSON can hold."""
        own = {**vars(self), "savings": self.savings, "files": list(self.files), "other_files": list(self.other_files)}
        return {**own, "tensors": [tensor.as_dict() for tensor in self.tensors]}

    def __repr__(self) -> str:
        coded = sum(tensor.scheme is not None for tensor in self.tensors)
        return (
            f"ibp.checkpoints.CheckpointReport({self.path!r}, {len(self.files)} files, {len(self.tensors)} tensors, "
            f"{coded} of them compressed, {self.num_bytes:,} -> {self.file_bytes:,} bytes, {self.savings:.1%} saved)"
        )


def _as_json(record: TensorReport | TensorEstimate) -> dict[str, Any]:
    """Returns the fields, with dtype and shape in a form that JSON can hold."""
    return {**vars(record), "dtype": dtype_name(record.dtype), "shape": list(record.shape)}


def report_of(
    path: str, records: Sequence[dict[str, Any]], kept_files: int, peak_bytes: int, other_files: tuple[str, ...]
) -> CheckpointReport:
    """Returns the report of files from their records (see `Journal.write_record`)."""
    tensors = tuple(TensorReport.from_dict(fields) for record in records for fields in record["tensors"])
    return CheckpointReport(
        path,
        tuple(record["file"] for record in records),
        tensors,
        sum(tensor.num_bytes for tensor in tensors),
        sum(record["size"] for record in records),
        kept_files,
        peak_bytes,
        other_files,
    )


@dataclass(frozen=True)
class TensorEstimate:
    """An estimate of how `compress` would store a tensor.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> for tensor in ibp.checkpoints.estimate("model.pt").tensors:
        ...     print(tensor.name, tensor.num_bytes, tensor.best)
        w 1024000 planes
        b 1024 None

    Attributes:
        name, dtype, shape, num_bytes: name, dtype, shape and size in bytes of the tensor.
        savings: for each scheme, the share of the tensor's bytes that a table would save in a file. The size of the
            table includes its index and its padding, but not its codebook. The share is approximate for schemes that
            `compress` would not choose. The mapping is empty for a tensor that is never coded, because it is smaller
            than 4 KiB, because tables do not support its dtype, or because the patterns do not choose it.
        best: the scheme that `compress` chooses. None if `compress` would store the tensor uncompressed, for example
            because no scheme saves more than 1 %.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    savings: Mapping[str, float]
    best: str | None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the tensor in a file, as in `TensorReport`."""
        return self.num_bytes - (round(self.savings[self.best] * self.num_bytes) if self.best else 0)


@dataclass(frozen=True)
class CheckpointEstimate:
    """An estimate of the files that `compress` would write for a checkpoint.

    Example:
        >>> torch.save({"w": torch.randn(1000, 256), "b": torch.zeros(256)}, "model.pt")
        >>> estimate = ibp.checkpoints.estimate("model.pt")
        >>> f"{estimate.savings:.0%} of {estimate.num_bytes:,} bytes"
        '16% of 1,025,024 bytes'

    Attributes:
        tensors: a `TensorEstimate` for each tensor.
        num_bytes, stored_bytes: size in bytes of all tensors before and after compression, without headers and
            codebooks.
        file_bytes: size in bytes of the files, with headers, codebooks and checksums.
    """

    tensors: tuple[TensorEstimate, ...]
    num_bytes: int
    stored_bytes: int
    file_bytes: int

    @property
    def savings(self) -> float:
        """1 - file_bytes / num_bytes: an estimate of `CheckpointReport.savings`."""
        return share_saved(self.num_bytes, self.file_bytes)

    def __repr__(self) -> str:
        return (
            f"ibp.checkpoints.CheckpointEstimate({len(self.tensors)} tensors, {self.num_bytes:,} -> "
            f"{self.file_bytes:,} bytes, {self.savings:.1%} saved)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict that JSON can hold."""
        tensors = [{**_as_json(tensor), "stored_bytes": tensor.stored_bytes} for tensor in self.tensors]
        own = {key: getattr(self, key) for key in ("num_bytes", "stored_bytes", "file_bytes", "savings")}
        return {**own, "tensors": tensors}
