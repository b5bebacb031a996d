"""Opens what the functions of this folder are given: one or several files of tensors, of any supported format, local or
through fsspec. `FORMATS` lists the formats, which `_source.py` and `_other_files.py` read and write.

A directory can be opened in two ways. `open_source` opens the model in it as one source, as it opens one file, several
files, or the set of files that an index names. A `Conversion` keeps the directory's files apart, to compress or
decompress the directory of a model or of a trainer to a directory: each file of tensors is converted to a separate
file, and each set of files is converted to a set. `_files/paths.py` describes the names of the new files. All other
files are copied. After compression, a config.json beside weights says that they are coded; decompression removes this
entry.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from .._common.whole_files import check_replaceable, replaced, write_whole
from .._files import (
    INDEX_SUFFIX,
    SUFFIX,
    TENSOR_SUFFIXES,
    FileFormatError,
    PathLike,
    check_other_sets,
    coded_name,
    file_system,
    find_files,
    index_of,
    is_of_set,
    is_of_weights,
    is_url,
    open_regular,
    other_format,
    path_text,
    plain_name,
    read_header,
    read_here,
    read_index,
    target_of,
)
from ._other_files import open_npy, open_npz, open_torch, write_npy, write_npz, write_torch
from ._source import (
    BLOCK_BYTES,
    NotTensorsError,
    Pieces,
    Source,
    SourceFormatError,
    SourceTensor,
    open_ibp,
    open_safetensors,
    write_safetensors,
)

# For each format: a function that opens a local file; and a function that writes the tensors and the metadata of a
# source to a file. The last argument of the second function is a function that returns the bytes of each tensor.
FORMATS: Mapping[str, tuple[Callable[[PathLike], Source], Callable[[IO[bytes], Source, Pieces], None]]] = {
    "safetensors": (open_safetensors, write_safetensors),
    "npy": (open_npy, write_npy),
    "npz": (open_npz, write_npz),
    "torch": (open_torch, write_torch),
}
_OF_ANY_BYTES = ".bin"  # a suffix of torch's checkpoints, and also of other files, such as those of tokenizers
_READ = "safetensors, .npy, .npz, checkpoints of torch.save, and files of ibp"
_START_BYTES = 16  # number of bytes that are read to recognise the format of a file
_COPIED_BYTES = 1 << 20  # number of bytes that are copied at once
_CONFIG, _FIELD = "config.json", "quantization_config"
# The value of quant_method in quantization_config, by which transformers finds `ibp.integrations.transformers`.
_METHOD = "ibp"
# What is inserted before the last brace of a config.json.
_INSERTED = f',\n  "{_FIELD}": {{\n    "quant_method": "{_METHOD}"\n  }}'


# ---- opening paths as one source ----


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
    if kind == "safetensors":
        return open_safetensors(path, verify)
    open_file, _ = FORMATS[kind]
    return open_file(path)


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
    files, places = find_files(Path(path))
    names = {os.fspath(file): name for name, file in files.items()}
    if any(format_of(file) == "safetensors" and not read_header(Path(file)).is_plain for file in names):
        return open_ibp(path, verify)

    def open_part(file: str) -> Source:
        part, own = open_source(file), names[file]
        for tensor, name in places.items():
            if name == own and tensor not in part.tensors:
                part.close()
                raise FileFormatError(f"{file} has no tensor {tensor!r}, which the index says it has")
        kept = {tensor: value for tensor, value in part.tensors.items() if places.get(tensor, own) == own}
        part.tensors = MappingProxyType(kept)
        return part

    return _opened(path, list(names), open_part)


# ---- from directory to directory ----


class Conversion:
    """A directory of this machine that is compressed or decompressed, to another directory or in place.

    The constructor opens the files of tensors, and checks that the other files can be read. The caller writes the new
    files of tensors, and then calls `finish`, which writes the other files.

    Attributes:
        sources: the opened files and sets of files of tensors. The key is the path, within the target, of the new file,
            or the path that the new set of files is named after.
        sets: the keys of `sources` that stand for sets of files.
    """

    def __init__(
        self, source: Path, target: Path, to_coded: bool, stack: contextlib.ExitStack, verify: bool = False
    ) -> None:
        self.source, self.target = source, target
        self._is_in_place = source.resolve() == target.resolve()
        name_of, other_name_of = (coded_name, plain_name) if to_coded else (plain_name, coded_name)
        files = _shown_files(source, None if self._is_in_place else target)
        superseded: dict[Path, list[Path]] = {}
        if self._is_in_place:
            files, superseded = _to_convert(source, files, name_of, other_name_of, verify)
        tensors, others = _contents_of(source, files, stack, verify)
        self.sources: dict[Path, Source] = {}
        self.sets: set[Path] = set()
        # For each key of `sources`: the files in the target that hold the same tensors in the other form, plain if the
        # new file or set is coded, and vice versa. `finish` removes them.
        self._replaced: dict[Path, list[Path]] = {}
        for path, opened in tensors.items():
            new = path.with_name(name_of(path.name.removesuffix(INDEX_SUFFIX)))
            if new in self.sources:
                raise ValueError(f"{source} has {new.name} both plain and coded; wanted one of them")
            self.sources[new] = opened
            if is_index(path):
                self.sets.add(new)
            other = target / new.with_name(other_name_of(new.name))
            self._replaced[new] = _files_of(other) if other.name != new.name else []
            self._replaced[new] += superseded.get(new, [])
        homes = {path.parent for path in tensors}
        # The other files, by new path: the path of the file to copy, or the new content of a config.json.
        self._beside: dict[Path, Path | bytes] = {}
        for path in others:
            os.close(open_regular(source / path))  # raises OSError if it cannot be read
            told = _told(source / path, to_coded) if path.name == _CONFIG and path.parent in homes else None
            if told is not None:
                self._beside[target / path] = told
            elif not self._is_in_place:
                self._beside[target / path] = source / path

    def paths(self) -> list[Path]:
        """Returns the existing paths that would be replaced or removed."""
        new = [self.target / path for path in self.sources]
        replaced = itertools.chain(*self._replaced.values())
        return [path for path in (*new, *map(index_of, new), *self._beside, *replaced) if os.path.lexists(path)]

    def skip(self, path: Path) -> None:
        """Drops a source, so that nothing is written for it. path: a key of `sources`."""
        del self.sources[path], self._replaced[path]

    def check(self) -> None:
        """Raises OSError if one of the other files would replace a directory, a device, or anything else that is not a
        regular file. Also raises OSError if the target contains the index of a set that this conversion neither writes
        nor removes."""
        for path in self._beside:
            check_replaceable(path)
        indices = [index_of(self.target / path) for path in self.sources]
        check_other_sets(self.target, [*indices, *itertools.chain(*self._replaced.values())])

    def keep(self, path: Path) -> None:
        """Removes a source from `sources`, so that its files are copied unchanged, as the other files are. path: a key
        of `sources`."""
        files = self.sources.pop(path).files
        home = self.target / path.parent
        names = [os.path.basename(file) for file in files]
        if path in self.sets:
            index = index_of(self.source / path)
            files, names = (*files, os.fspath(index)), [*names, index.name]
        if not self._is_in_place:
            self._beside.update({home / name: Path(file) for name, file in zip(names, files)})

    def finish(self) -> tuple[str, ...]:
        """Writes the other files, such as config.json, and then removes the files of tensors that the new ones
        supersede. The caller must call it after the new files of tensors are in place. Each file is written as a new
        file, which gets its name when it is complete. If a symbolic link has that name, the link is replaced, and the
        file to which it points does not change. Returns the paths of the other files within the target."""
        for path, content in self._beside.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                write_whole(path, content)
            else:
                size = content.stat().st_size
                with open(content, "rb") as source, replaced(path, size, like=[content]) as file:
                    shutil.copyfileobj(source, file, _COPIED_BYTES)
        for path in itertools.chain(*self._replaced.values()):
            path.unlink(missing_ok=True)
        return tuple(os.fspath(path.relative_to(self.target)) for path in self._beside)


def conversion_of(
    inputs: PathLike | Iterable[PathLike],
    output: PathLike,
    to_coded: bool,
    stack: contextlib.ExitStack,
    verify: bool = False,
) -> Conversion | None:
    """Returns the conversion of the only input to the output, if both are directories of this machine; otherwise None.
    verify: as in `open_source`.

    Raises:
        FileNotFoundError: the directory has no file of tensors.
        SourceFormatError, ibp.FileFormatError: a file of tensors is damaged.
        ValueError: a config.json beside tensors is not JSON, or tensors exist both plain and coded.
    """
    given = inputs[0] if isinstance(inputs, (list, tuple)) and len(inputs) == 1 else inputs
    target = directory_of(output)
    if target is None or not isinstance(given, (str, os.PathLike)):
        return None
    text = path_text(given)
    return None if is_url(text) or not os.path.isdir(text) else Conversion(Path(text), target, to_coded, stack, verify)


def directory_of(output: PathLike) -> Path | None:
    """Returns the directory of this machine that is the output, or None if it is not such a directory."""
    text = path_text(output)
    if is_url(text) or target_of(text) == Path(text):
        return None
    return target_of(text).parent


# ---- the files of tensors of a directory ----


def files_to_verify(path: str) -> list[str]:
    """Returns the paths of the safetensors files in a directory, at any depth; for a set of files, the path of its
    index. If there is only one such path, or none, or if `path` is not a directory of this machine, returns `path`
    itself."""
    if not os.path.isdir(path):
        return [path]
    paths, _ = _units_of(Path(path), _shown_files(Path(path), None))
    found = [os.path.join(path, file) for file in paths if file.name.removesuffix(INDEX_SUFFIX).endswith(SUFFIX)]
    return found if len(found) > 1 else [path]


def is_index(path: Path) -> bool:
    """Returns whether a file is named like the index of a set of files of tensors."""
    return path.name.endswith(tuple(suffix + INDEX_SUFFIX for suffix in TENSOR_SUFFIXES))


def _units_of(folder: Path, files: list[Path]) -> tuple[list[Path], set[Path]]:
    """Finds tensor files by their suffixes. A checkpoint is a single file, or a set of files with an index. Returns
    (sorted paths of the single files and the indices, paths of the files that the indices name). All paths are relative
    to `folder`."""
    paths, parts = {path for path in files if path.name.endswith(TENSOR_SUFFIXES)}, set[Path]()
    for path in filter(is_index, files):
        named = {path.with_name(name) for name in read_index(folder / path).values()}
        if not named.isdisjoint(files):  # a download may have an index without its files
            paths.add(path)
            parts |= named
    return sorted(paths - parts), parts


def _contents_of(
    folder: Path, files: list[Path], stack: contextlib.ExitStack, verify: bool
) -> tuple[dict[Path, Source], list[Path]]:
    """Opens the files of tensors in a folder. Returns (sources by the path of their file or of their set's index, paths
    of all other files); the paths are within the folder. verify: as in `open_source`."""
    paths, parts = _units_of(folder, files)
    tensors: dict[Path, Source] = {}
    for path in paths:
        with contextlib.suppress(NotTensorsError):
            source = stack.enter_context(open_source(folder / path, verify=verify))
            if source.tensors:
                tensors[path] = source
    if not tensors:
        raise FileNotFoundError(f"{folder}: the directory has no file of tensors ({', '.join(TENSOR_SUFFIXES)})")
    return tensors, [path for path in files if path not in parts.union(tensors)]


def _to_convert(
    folder: Path, files: list[Path], name_of: Callable[[str], str], other_name_of: Callable[[str], str], verify: bool
) -> tuple[list[Path], dict[Path, list[Path]]]:
    """Finds the files that a conversion in place must convert. An earlier conversion may have been interrupted, and may
    have left two kinds of files that must not be converted:

    - Results: files, sets, or files of a set that has no index yet. The files from which they were made are still
      there, and are converted again.
    - Superseded files: files of a set that was converted, if the index of this set has been removed already.

    A file counts as a result or as superseded only if every tensor in it also exists in the other form, with the same
    bytes. So nothing is lost when the file is replaced or removed.

    Args:
        files: paths within the folder.
        name_of: returns the name of the result for the name of a file.
        other_name_of: returns the name of what was converted for the name of a result.
        verify: as in `open_source`.

    Returns:
        (files without results and superseded files; the paths of superseded files by the path within the folder that
        their result is named after).
    """
    names = {path: path.with_name(path.name.removesuffix(INDEX_SUFFIX)) for path in _units_of(folder, files)[0]}
    results: set[Path] = set()
    superseded: dict[Path, list[Path]] = {}
    for kept, name in names.items():
        other = name.with_name(name_of(name.name))
        is_result = other == name
        if is_result:
            other = name.with_name(other_name_of(name.name))
        for path in names:
            if not (is_of_set(path, other) or (names[path] == other and not is_result)):
                continue
            with (
                contextlib.suppress(NotTensorsError),
                open_source(folder / kept, verify=verify) as source,
                open_source(folder / path, verify=verify) as copy,
            ):
                if copy.tensors and all(_is_same(x, source.tensors.get(key)) for key, x in copy.tensors.items()):
                    found = {folder / path, *map(Path, copy.files)}
                    if is_result:
                        superseded.setdefault(name, []).extend(found)
                    results |= found
    return [path for path in files if folder / path not in results], superseded


def _is_same(one: SourceTensor, other: SourceTensor | None) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(bytes(one.read(*span)) == bytes(other.read(*span)) for span in one.spans(BLOCK_BYTES))


def _files_of(path: Path) -> list[Path]:
    """Returns those files of an output that exist: the index of its set, the files that the index names, and the single
    file. path: the path that the set is named after, which is also that of the single file."""
    index = index_of(path)
    names = sorted(set(read_index(index).values())) if index.is_file() else []
    return [found for found in (index, *map(path.with_name, names), path) if os.path.lexists(found)]


def _shown_files(folder: Path, target: Path | None) -> list[Path]:
    """Returns the files in a folder, at any depth, that are neither hidden nor in the target, as paths within the
    folder."""
    apart = None if target is None else target.resolve()
    return [
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and apart not in (path.parent.resolve(), *path.parent.resolve().parents)
    ]


# ---- config.json ----


def _told(path: Path, is_coded: bool) -> bytes | None:
    """Changes the text of a config.json. If `is_coded` is set, adds ibp's entry, which tells transformers and diffusers
    that the weights are coded; otherwise removes this entry. Returns the new text, or None if nothing changes. All
    other text stays the same, byte for byte. The exception is an entry that is to be removed, but whose text has
    changed since it was inserted: then all of the JSON is formatted anew."""
    try:
        text = path.read_bytes().decode()
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be told whether the weights beside it are coded, since it is no JSON in UTF-8: {error}"
        ) from None
    if not isinstance(config, dict) or not config:
        return None
    held = config.get(_FIELD)
    if is_coded and held is None:
        end = len(text[: text.rindex("}")].rstrip())
        return (text[:end] + _INSERTED + text[end:]).encode()
    if is_coded and not _is_ours(held):
        warnings.warn(
            f"{path} has a {_FIELD} of its own, which stays: its weights load where ibp is imported, and are decoded "
            "then",
            stacklevel=5,
        )
    if not is_coded and _is_ours(held):
        if text.count(_INSERTED) == 1:
            return text.replace(_INSERTED, "").encode()
        left = {key: value for key, value in config.items() if key != _FIELD}
        return f"{json.dumps(left, indent=2)}\n".encode()
    return None


def _is_ours(field: object) -> bool:
    return isinstance(field, dict) and field.get("quant_method") == _METHOD


def lines_that_load(folder: str | os.PathLike[str]) -> str | None:
    """Returns the two lines of Python that load a directory of coded weights, or None if it is not a directory of
    transformers or diffusers."""
    for name in (_CONFIG, "model_index.json"):  # for a model, and for a pipeline
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            config = json.loads(Path(folder, name).read_bytes())
            package, kind = "diffusers", config.get("_class_name")
            if kind is None:
                package, kind = "transformers", config["architectures"][0]
            return f"import ibp, {package}\nmodel = {package}.{kind}.from_pretrained({os.fspath(folder)!r})"
    return None
