"""Opens files of tensors of any known format, one or many, on this machine or by fsspec."""

from __future__ import annotations

import contextlib
import glob
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType

from .._files.fields import FileFormatError, form_of
from .._files.header import Header, find_files, other_format, read_header
from .._files.paths import PathLike, file_system, is_url, path_text, read_here
from .._files.regular import open_regular
from .._files.sets import INDEX_SUFFIX, SUFFIX, TENSOR_SUFFIXES, is_of_weights
from ._ibp_files import open_ibp
from ._numpy_files import open_npy, open_npz
from ._source import NotTensorsError, Source, SourceFormatError, SourceTensor, map_file, mapped_tensor, with_entry
from ._torch_files import open_torch

_OPENERS: dict[str, Callable[[PathLike], Source]] = {"npy": open_npy, "npz": open_npz, "torch": open_torch}
_OF_ANY_BYTES = ".bin"  # a suffix that tokenizers also use for files of theirs
_READ = "safetensors, .npy, .npz, checkpoints of torch.save, and files of ibp"
_START_BYTES = 16


def open_source(path: PathLike) -> Source:
    """Opens a file of tensors, or a set of them: a directory, or an index (model.safetensors.index.json).

    The format is recognised by the file's bytes, whatever its name. A URL of fsspec ("s3://...") is copied to a
    temporary file first, which is removed when the source is closed.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> ibp.save("model.ibp.safetensors", {"weight": ibp.compress(x), "bias": torch.ones(1000)})
        >>> with ibp.checkpoints.open("model.ibp.safetensors") as source:
        ...     weight, bias = source.tensors["weight"], source.tensors["bias"]
        ...     weight.shape, weight.table is not None, bias.table
        ...     torch.equal(weight.tensor(), x)
        ((1000, 1024), True, None)
        True

    Returns:
        A `Source`, whose `tensors` are read when they are asked for.

    Raises:
        FileNotFoundError: there is no such file.
        SourceFormatError: the file has no known format, or contradicts itself.
        ibp.FileFormatError: a file of ibp contradicts itself.
    """
    path = path_text(path)
    if is_url(path):
        return _open_url(path)
    if os.path.isdir(path):
        return _open_directory(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.endswith(INDEX_SUFFIX):
        return _open_index(path)
    found = format_of(path)
    if found != "safetensors":
        return _OPENERS[found](path)
    header = read_header(Path(path))
    return _open_safetensors(path, header) if header.is_plain else open_ibp(path)


def _open_safetensors(path: str, header: Header) -> Source:
    """Opens a safetensors file, whose tensors are read from its map. A tensor whose dtype torch does not have is
    read as its bytes."""
    data, tensors = map_file(path), {}
    for name, entry in header.tensors.items():
        if entry.end > data.size:
            raise FileFormatError(f"{path} has changed since it was opened")
        dtype, shape = form_of(*entry[:2], entry.num_bytes)
        tensors[name] = with_entry(mapped_tensor(name, dtype, shape, data[entry.start : entry.end]), *entry[:2])
    return Source(path, "safetensors", tensors, header.metadata)


def format_of(path: str) -> str:
    """Returns the format of a file of this machine, recognised by its bytes: "npy", "npz", "torch", or "safetensors",
    also for ibp's files.

    Raises:
        SourceFormatError: it has none of these formats.
        OSError: it cannot be read, or is not a regular file.
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


def open_sources(inputs: PathLike | Iterable[PathLike]) -> Source:
    """Opens paths, globs, directories and URLs as one source, whose `parts` are the files. Raises ValueError if two
    files have a tensor with the same name; otherwise like `open_source`."""
    paths = expand(inputs)
    return _opened(", ".join(paths), paths, open_source)


def _opened(path: str, files: list[str], open_one: Callable[[str], Source | None]) -> Source:
    """Opens files as one source, without the files for which open_one returns None."""
    opened: list[Source] = []
    try:
        for file in files:
            source = open_one(file)
            if source is not None:
                opened.append(source)
        if not opened:
            raise FileNotFoundError(f"{path}: no file holds tensors")
        return opened[0] if len(opened) == 1 else joined(path, opened)
    except BaseException:
        for source in opened:
            source.close()
        raise


def expand(inputs: PathLike | Iterable[PathLike]) -> list[str]:
    """Returns the files and URLs that the inputs name. Globs become what they match, sorted. Raises
    FileNotFoundError if nothing is named, or if nothing matches."""
    given = [inputs] if isinstance(inputs, (str, bytes, os.PathLike)) or not isinstance(inputs, Iterable) else inputs
    found: list[str] = []
    for path in given:
        found += _matches(path_text(path))
    if not found:
        raise FileNotFoundError("no input is given; wanted at least one file of tensors")
    return list(dict.fromkeys(found))


def local_path(path: str) -> contextlib.AbstractContextManager[str]:
    """Returns a context of the path; for a URL, of the path of a local copy of the file or set of files, which
    exists as long as the context lasts."""
    return read_here(path, (*TENSOR_SUFFIXES, INDEX_SUFFIX))


def joined(path: str, parts: list[Source]) -> Source:
    """Returns several sources as one, with the metadata of all. Raises ValueError if two have a tensor with the same
    name."""
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
    for part in reversed(parts):  # if several parts have a key, the first part's text counts
        texts.update(part.metadata)

    def close() -> None:
        for part in parts:
            part.close()

    whole = Source(path, formats.pop() if len(formats) == 1 else "several", tensors, texts, close)
    whole.parts = tuple(inner for part in parts for inner in part.parts)
    whole.files = tuple(file for part in parts for file in part.files)
    return whole


def _matches(path: str) -> list[str]:
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


def _open_url(url: str) -> Source:
    with contextlib.ExitStack() as stack:
        source = open_source(stack.enter_context(local_path(url)))
        source.path = url
        held, close = stack.pop_all(), source._close

        def let_go() -> None:
            with held:
                if close is not None:
                    close()

        source._close = let_go
        return source


def _open_directory(path: str) -> Source:
    """Opens the model in a directory: the files that its index names, if it has one; otherwise all files of tensors,
    without those whose tensors the safetensors files also have."""
    names = sorted(os.listdir(path))
    named = [name for name in names if name.endswith(TENSOR_SUFFIXES) and not name.startswith(".")]
    indices = [name for name in names if name.endswith(f"{SUFFIX}{INDEX_SUFFIX}")]
    indices = list(filter(is_of_weights, indices)) or indices
    if len(indices) > 1:
        raise SourceFormatError(f"{path} has {len(indices)} indices; wanted the path of one of them")
    files = [os.path.join(path, name) for name in named]
    if indices:
        source = _open_index(os.path.join(path, indices[0]))
        others = set(files).difference(source.files)
        if others:
            warnings.warn(f"left out: {', '.join(sorted(others))}, which {indices[0]} does not name", stacklevel=2)
        return source
    if not files:
        raise FileNotFoundError(f"{path}: the directory has no file of tensors ({', '.join(TENSOR_SUFFIXES)})")
    seen: set[str] = set()

    def open_new(file: str) -> Source | None:
        source = _open_if_tensors(file)
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


def _open_if_tensors(path: str) -> Source | None:
    """Opens a file of a directory. Returns None, with a warning, if it holds something else, such as the state of
    random numbers or of a schedule beside a model."""
    try:
        source = open_source(path)
    except NotTensorsError as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return None
    if not source.tensors:
        source.close()
        warnings.warn(f"left out: {path} holds no tensor", stacklevel=2)
        return None
    return source


def _open_index(path: str) -> Source:
    """Opens the set of files that an index names. If two files have a tensor with the same name, the one that the index
    names is taken.

    Raises:
        ibp.FileFormatError: a file does not have a tensor that the index says it has.
    """
    found = find_files(Path(path))
    names = {os.fspath(file): name for name, file in found.files.items()}
    if any(format_of(file) == "safetensors" and not read_header(Path(file)).is_plain for file in names):
        return open_ibp(path)

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
