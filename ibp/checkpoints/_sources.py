"""Opens one or several files of tensors, of any supported format, local or through fsspec.

`FORMATS` lists the formats, which `_safetensors_files.py`, `_numpy_files.py` and `_torch_files.py` read and write. A
source may be one file, several files, the set of files that an index names, or the model in a directory.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

from .._files import (
    INDEX_SUFFIX,
    SUFFIX,
    TENSOR_SUFFIXES,
    FileFormatError,
    PathLike,
    file_system,
    find_files,
    is_of_weights,
    is_url,
    open_regular,
    other_format,
    path_text,
    read_header,
    read_here,
)
from ._numpy_files import open_npy, open_npz, write_npy, write_npz
from ._safetensors_files import open_ibp, open_safetensors, write_safetensors
from ._source import NotTensorsError, Pieces, Source, SourceFormatError, SourceTensor
from ._torch_files import open_torch, write_torch


class Format(NamedTuple):
    """A format of files of tensors.

    Attributes:
        open: opens a local file.
        write: writes the tensors and the metadata of a source to a file. Its last argument is a function that returns
            the bytes of each tensor.
    """

    open: Callable[[PathLike], Source]
    write: Callable[[IO[bytes], Source, Pieces], None]


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(open_safetensors, write_safetensors),
    "npy": Format(open_npy, write_npy),
    "npz": Format(open_npz, write_npz),
    "torch": Format(open_torch, write_torch),
}
_OF_ANY_BYTES = ".bin"  # a suffix of torch's checkpoints, and also of other files, such as those of tokenizers
_READ = "safetensors, .npy, .npz, checkpoints of torch.save, and files of ibp"
_START_BYTES = 16  # number of bytes that are read to recognise the format of a file


def open_source(path: PathLike, *, verify: bool = False) -> Source:
    """Opens a file of tensors, or a set of them: a directory, or an index (model.safetensors.index.json).

    The format is recognised by the file's bytes, not by its name. A URL of fsspec ("s3://...") is copied to a temporary
    file first, which is removed when the source is closed.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> ibp.save("model.ibp.safetensors", {"weight": ibp.compress(x), "bias": torch.ones(1000)})
        >>> with ibp.checkpoints.open("model.ibp.safetensors") as source:
        ...     weight, bias = source.tensors["weight"], source.tensors["bias"]
        ...     weight.shape, weight.table is not None, bias.table
        ...     torch.equal(weight.tensor(), x)
        ((1000, 1024), True, None)
        True

    Args:
        path: path or URL of the file.
        verify: whether to check the checksums of a file of ibp: those of headers and codebooks now, those of other
            bytes when `SourceTensor.read` or `SourceTensor.tensor` reads them, and those of a whole table when
            `SourceTensor.table` is first read. False by default, as in `ibp.open`.

    Returns:
        A `Source`. The bytes of its `tensors` are read when they are requested.

    Raises:
        FileNotFoundError: there is no such file.
        SourceFormatError: the file's format is unknown, or the file is inconsistent.
        ibp.FileFormatError: a file of ibp is inconsistent.
        ibp.ChecksumError: with `verify`, bytes that are read now are damaged.
    """
    path = path_text(path)
    if is_url(path):
        with contextlib.ExitStack() as stack:
            source = open_source(stack.enter_context(local_path(path)), verify=verify)
            source.path = path
            source.closing.push(stack.pop_all())
            return source
    if os.path.isdir(path):
        return _open_directory(path, verify)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.endswith(INDEX_SUFFIX):
        return _open_index(path, verify)
    kind = format_of(path)
    return open_safetensors(path, verify) if kind == "safetensors" else FORMATS[kind].open(path)


def format_of(path: str) -> str:
    """Recognises the format of a file on this machine by its bytes. Returns "npy", "npz", "torch", or "safetensors",
    which is also the format of ibp's files. If the bytes are not recognised, but the name ends in ".safetensors" or
    ".ibp", also returns "safetensors".

    Raises:
        SourceFormatError: the file has none of these formats.
        OSError: the file cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(_START_BYTES)
    kind = other_format(start)
    if kind == "npy":
        return "npy"
    if kind == "archive":
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError) as error:
            raise SourceFormatError(f"{path} is a damaged archive: {error}") from None
        if any(name.endswith("/data.pkl") for name in names):
            return "torch"
        if all(name.endswith(".npy") for name in names):
            return "npz"
        raise SourceFormatError(f"{path} is an archive of neither numpy nor torch; wanted one of {_READ}")
    if kind == "pickle":
        return "torch"
    if start[8:9] == b"{" or path.endswith((SUFFIX, ".ibp")):
        return "safetensors"
    refusal = NotTensorsError if path.endswith(_OF_ANY_BYTES) else SourceFormatError
    raise refusal(f"{path} has no format that is known; wanted one of {_READ}")


def open_sources(inputs: PathLike | Iterable[PathLike], *, verify: bool = False) -> Source:
    """Opens paths, globs, directories and URLs as one source, whose `parts` are the files. verify: as in `open_source`.
    Raises ValueError if two files have a tensor with the same name. Also raises what `open_source` raises."""
    paths = expand(inputs)
    return _opened(", ".join(paths), paths, functools.partial(open_source, verify=verify))


def expand(inputs: PathLike | Iterable[PathLike]) -> list[str]:
    """Returns the paths and URLs that the inputs name, each once. A glob is replaced by the paths that it matches,
    sorted. Raises FileNotFoundError if there are no inputs, or if a glob matches nothing."""
    given = [inputs] if isinstance(inputs, (str, bytes, os.PathLike)) or not isinstance(inputs, Iterable) else inputs
    found: list[str] = []
    for path in given:
        found += _matches(path_text(path))
    if not found:
        raise FileNotFoundError("no input is given; wanted at least one file of tensors")
    return list(dict.fromkeys(found))


def local_path(path: str) -> contextlib.AbstractContextManager[str]:
    """Returns a context that yields the path itself or, for a URL, the path of a local copy of the file or set of
    files. The copy is removed when the context is left."""
    return read_here(path, (*TENSOR_SUFFIXES, INDEX_SUFFIX))


def _opened(path: str, files: list[str], open_one: Callable[[str], Source | None]) -> Source:
    """Opens files as one source, which has the tensors and the metadata of all of them. Files for which open_one
    returns None are left out.

    Raises:
        FileNotFoundError: no file is left.
        ValueError: two files have a tensor with the same name.
    """
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(source) for file in files if (source := open_one(file)) is not None]
        if not parts:
            raise FileNotFoundError(f"{path}: no file holds tensors")
        if len(parts) == 1:
            stack.pop_all()
            return parts[0]
        tensors: dict[str, SourceTensor] = {}
        owners: dict[str, str] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise ValueError(
                        f"{owners[name]} and {part.path} both have a tensor {name!r}; wanted names of their own"
                    )
                tensors[name], owners[name] = tensor, part.path
        formats = {part.format for part in parts}
        texts: dict[str, str] = {}
        for part in reversed(parts):  # if several parts have a key, the first part's value is used
            texts.update(part.metadata)
        whole = Source(path, formats.pop() if len(formats) == 1 else "several", tensors, texts)
        whole.parts = tuple(inner for part in parts for inner in part.parts)
        whole.files = tuple(file for part in parts for file in part.files)
        whole.closing = stack.pop_all()
        return whole


def _matches(path: str) -> list[str]:
    """Returns the paths or URLs that a glob matches, sorted; or the path itself if it is not a glob."""
    if not glob.has_magic(path) or (not is_url(path) and os.path.exists(path)):
        return [path]
    if is_url(path):
        filesystem, pattern = file_system(path)
        found = [filesystem.unstrip_protocol(match) for match in sorted(filesystem.glob(pattern))]
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise FileNotFoundError(f"{path}: no file matches")
    return found


def _open_directory(path: str, verify: bool) -> Source:
    """Opens the model in a directory. If the directory has an index, opens the files that the index names. Otherwise
    opens all files of tensors, safetensors files first. A file of another format is left out if all of its tensors are
    in files that were opened before. verify: as in `open_source`."""
    names = sorted(os.listdir(path))
    named = [name for name in names if name.endswith(TENSOR_SUFFIXES) and not name.startswith(".")]
    indices = [name for name in names if name.endswith(f"{SUFFIX}{INDEX_SUFFIX}")]
    indices = list(filter(is_of_weights, indices)) or indices
    if len(indices) > 1:
        raise SourceFormatError(f"{path} has {len(indices)} indices; wanted the path of one of them")
    files = [os.path.join(path, name) for name in named]
    if indices:
        source = _open_index(os.path.join(path, indices[0]), verify)
        others = set(files).difference(source.files)
        if others:
            warnings.warn(f"left out: {', '.join(sorted(others))}, which {indices[0]} does not name", stacklevel=2)
        return source
    if not files:
        raise FileNotFoundError(f"{path}: the directory has no file of tensors ({', '.join(TENSOR_SUFFIXES)})")
    seen: set[str] = set()

    def open_new(file: str) -> Source | None:
        source = _open_if_tensors(file, verify)
        if source is None:
            return None
        if is_of_weights(file) or not seen.issuperset(source.tensors):
            seen.update(source.tensors)
            return source
        source.close()
        warnings.warn(f"left out: {file}, whose tensors the safetensors files beside it have", stacklevel=2)
        return None

    source = _opened(path, sorted(files, key=lambda file: (not is_of_weights(file), file)), open_new)
    source.path = path
    return source


def _open_if_tensors(path: str, verify: bool) -> Source | None:
    """Opens a file of a directory. Warns and returns None if the file has no tensors, or if opening it raises
    `NotTensorsError`, as for the state of a random number generator that was saved with a model. verify: as in
    `open_source`."""
    try:
        source = open_source(path, verify=verify)
    except NotTensorsError as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return None
    if not source.tensors:
        source.close()
        warnings.warn(f"left out: {path} holds no tensor", stacklevel=2)
        return None
    return source


def _open_index(path: str, verify: bool) -> Source:
    """Opens the set of files that an index names. If several files have a tensor with the same name, the tensor is read
    from the file that the index names for it. verify: as in `open_source`.

    Raises:
        ibp.FileFormatError: a file does not have a tensor that the index says it has.
    """
    found = find_files(Path(path))
    names = {os.fspath(file): name for name, file in found.files.items()}
    if any(format_of(file) == "safetensors" and not read_header(Path(file)).is_plain for file in names):
        return open_ibp(path, verify)

    def open_part(file: str) -> Source:
        part, own = open_source(file), names[file]
        for tensor, name in found.places.items():
            if name == own and tensor not in part.tensors:
                part.close()
                raise FileFormatError(f"{file} has no tensor {tensor!r}, which the index says it has")
        kept = {tensor: value for tensor, value in part.tensors.items() if found.places.get(tensor, own) == own}
        part.tensors = MappingProxyType(kept)
        return part

    return _opened(path, list(names), open_part)
