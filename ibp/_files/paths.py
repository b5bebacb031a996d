"""Interprets paths, URLs, names of files, and outputs. Files at URLs are read and written through temporary files on
this machine; fsspec copies between the two.

A set of files has an index, which says which file each tensor is in. A coded file in a directory has a special name. A
loader that does not know ibp then reports that there are no weights, instead of reading weights that it cannot decode.
The name tells which file the coded file was made from:

    model.safetensors    model.ibp.safetensors
    optimizer.pt         optimizer.pt.ibp.safetensors

These rules hold for the outputs of `ibp.save`, `ibp.checkpoints` and the command line:

- An output is a directory if its name ends in a slash or is that of an existing directory. If the input is a directory,
  an output whose name has no suffix of a format is a directory, too. The directory is made if it does not exist; its
  parent must exist.
- The format of a file agrees with the suffix of its name: a safetensors file does not get a name like "model.pt".
- `ibp.save` replaces what is at its path, as torch.save does; `ibp.checkpoints` and the command line do so only with
  `force`.
- Nothing of a replaced output remains: if a single file replaces a set of files, the set and its index are removed; if
  a set replaces a single file, that file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Union

from .._common.whole_files import KINDS, check_replaceable, write_whole
from .format import MAX_HEADER_BYTES, FileFormatError

PathLike = Union[str, "os.PathLike[str]"]
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_CODED_SUFFIX = f".ibp{SUFFIX}"
WEIGHTS = f"model{SUFFIX}"  # The name of the file of weights in the directory of a model.
# The formats of files of tensors, by suffix, and suffixes of formats that this library does not write.
_TENSOR_FORMATS = {SUFFIX: "safetensors", ".ibp": "safetensors", ".npy": "npy", ".npz": "npz"}
_TENSOR_FORMATS.update(dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"))
_OTHER_SUFFIXES = (
    ".csv", ".gguf", ".ggml", ".h5", ".hdf5", ".json", ".msgpack", ".onnx", ".onnx_data", ".ot", ".parquet", ".pb",
    ".pdparams", ".pickle", ".pkl", ".tflite", ".txt", ".yaml", ".zip",
)  # fmt: skip
TENSOR_SUFFIXES = tuple(_TENSOR_FORMATS)
SUFFIXES = {**_TENSOR_FORMATS, **{suffix: suffix[1:] for suffix in _OTHER_SUFFIXES}}
_HERE = ("file", "local")  # Protocols of fsspec for files of this machine.


# ---- paths and URLs ----


def path_text(path: PathLike) -> str:
    """Returns a path or URL as a string. For a URL of a file on this machine ("file://..."), returns the path of the
    file. Raises TypeError if `path` is neither a string nor an os.PathLike."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"path is a {type(text).__name__}; wanted text or a path")
    protocol, is_split, rest = text.partition("://")
    return rest if is_split and protocol in _HERE else text


def is_url(path: str) -> bool:
    """Returns whether a path is a URL that fsspec has to read, because its protocol is not that of local files."""
    return "://" in path and path.partition("://")[0] not in _HERE


def file_system(url: str) -> tuple[Any, str]:
    """Returns (file system of fsspec, path in it) for a URL."""
    import fsspec

    return fsspec.core.url_to_fs(url)


# ---- names of files ----


def format_of_name(path: PathLike) -> str | None:
    """Returns the format that the suffix of a name stands for, or None for an unknown suffix."""
    return SUFFIXES.get(os.path.splitext(path_text(path))[1].lower())


def coded_name(name: str) -> str:
    """Returns the name of the coded form of a file of tensors. The name of a file that is already coded is returned
    unchanged. Frameworks that do not know ibp do not look for such names.

    Example:
        >>> ibp.checkpoints.coded_name("model.safetensors"), ibp.checkpoints.coded_name("optimizer.pt")
        ('model.ibp.safetensors', 'optimizer.pt.ibp.safetensors')
    """
    if name.endswith(_CODED_SUFFIX):
        return name
    stem = name.removesuffix(SUFFIX)
    return f"{name if stem.endswith(TENSOR_SUFFIXES) else stem}{_CODED_SUFFIX}"


def plain_name(name: str) -> str:
    """Returns the name of the file that a coded file was made from. The name of any other file is returned
    unchanged."""
    if not name.endswith(_CODED_SUFFIX):
        return name
    stem = name.removesuffix(_CODED_SUFFIX)
    return stem if stem.endswith(TENSOR_SUFFIXES) else stem + SUFFIX


def is_of_weights(name: str) -> bool:
    """Returns whether a name is that of a safetensors file, of the coded form of one, or of an index of such files."""
    return plain_name(name.removesuffix(INDEX_SUFFIX)).endswith(SUFFIX)


def names_of_set(path: Path, count: int) -> list[str]:
    """Returns the names of the `count` files of a set that is named after `path`. If count is 1, that is the name of
    `path` itself."""
    if count == 1:
        return [path.name]
    stem, suffix = _split_name(path)
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_of(path: Path) -> Path:
    """Returns the path of the index of the set that is named after `path`."""
    return path.with_name("".join((*_split_name(path), INDEX_SUFFIX)))


def _split_name(path: Path) -> tuple[str, str]:
    """Returns the beginning and the suffix of the names of a set's files. The ".1" of a name like "llama-3.1" is not
    taken for a suffix: the files are "llama-3.1-00001-of-00002.safetensors" and so on, so that readers of a directory
    find them."""
    return (path.stem, path.suffix) if path.suffix in TENSOR_SUFFIXES else (path.name, SUFFIX)


# ---- files that are read ----


def open_regular(path: str | os.PathLike[str]) -> int:
    """Opens a regular file for reading, and returns its descriptor. Symbolic links are followed. The call never blocks.

    Raises:
        OSError: the path names something else, such as a pipe, or cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # Raised for a socket, and for a device without a driver.
            _check_regular(path, os.stat(path))
        raise
    try:
        _check_regular(path, os.fstat(file))
        return file
    except BaseException:
        os.close(file)
        raise


def _check_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    """Raises OSError if what was found at a path is not a regular file."""
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(f"{os.fspath(path)} is {KINDS.get(kind, 'no file')}; wanted a regular file")


def read_index(path: Path) -> dict[str, str]:
    """Reads the index of a set of files. Returns a dictionary from the name of each tensor to the name of its file.

    Raises:
        FileFormatError: the file is not an index.
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_HEADER_BYTES:
            raise FileFormatError(f"{path} has {size} bytes; wanted an index of at most {MAX_HEADER_BYTES}")
        try:
            places = json.loads(file.read(), object_pairs_hook=_unique, parse_int=float)["weight_map"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FileFormatError(f"{path} is no index of shards: {str(error)[:200]}") from None
    if not isinstance(places, dict) or not places:
        raise FileFormatError(f"{path} has no weight_map; wanted one from tensors to files")
    for tensor, name in places.items():
        if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
            raise FileFormatError(f"{path}: {tensor!r} is in {str(name)[:80]!r}; wanted the name of a file beside it")
    return places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns pairs of (key, value) as a dict. Raises ValueError if a key occurs twice or cannot be printed."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    for key in found:
        key.encode()  # Raises for half of a surrogate pair, which cannot be printed.
    return found


def find_files(path: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Finds the files that a path stands for. A file stands for itself, and an index for the files of its set. A
    directory stands for the set of its index if it has one, and otherwise for all its safetensors files. The coded form
    of a file that was not a safetensors file (`optimizer.pt.ibp.safetensors`) is left out, unless the directory has
    only such files.

    Returns (the paths of the files by their names; for each tensor, the name of its file, as the index gives it, or an
    empty dictionary if there is no index).

    Raises:
        FileNotFoundError: there is no file, or an index names a file that does not exist.
        FileFormatError: the index is not valid, or a directory has several indices.
    """
    if path.is_dir():
        indices = _of_weights(path.glob(f"*{SUFFIX}{INDEX_SUFFIX}"))
        if len(indices) > 1:
            raise FileFormatError(f"{path} has {len(indices)} indexes of shards; wanted the path of one of them")
        if not indices:
            files = {file.name: file for file in _of_weights(path.glob(f"*{SUFFIX}"))}
            if not files:
                raise FileNotFoundError(f"{path} has no files *.safetensors")
            return files, {}
        path = indices[0]
    if not path.name.endswith(INDEX_SUFFIX):
        return {path.name: path}, {}
    places = read_index(path)
    files = {name: path.parent / name for name in sorted(set(places.values()))}
    for name, file in files.items():
        if not file.exists():
            raise FileNotFoundError(f"{path.name} names the file {name!r}, which is not beside it")
    return files, places


def _of_weights(paths: Iterable[Path]) -> list[Path]:
    """Returns the paths whose names are those of files of weights (see `is_of_weights`), sorted. If no name does,
    returns all paths, sorted."""
    found = sorted(paths)
    return [path for path in found if is_of_weights(path.name)] or found


@contextlib.contextmanager
def read_here(url: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yields the path on this machine of a file, a set of files or a directory. If `url` is a path, it is yielded
    unchanged. If it is a URL, the files are copied to a temporary directory, which is removed when the context is left.

    suffixes: if the URL is a directory, only files whose names end with one of these are copied.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file system has failed.
    """
    if not is_url(url):
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="ibp-") as folder:
        try:
            near = _fetched(url, Path(folder), suffixes)
        except FileNotFoundError:
            raise FileNotFoundError(f"{url}: there is no such file") from None
        except (ImportError, OSError, ValueError):
            raise
        except Exception as error:  # The file system's own exception classes.
            raise OSError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
        yield os.fspath(near)


def _fetched(url: str, folder: Path, suffixes: tuple[str, ...]) -> Path:
    """Copies the file, set of files or directory at a URL to a folder. Returns the path of the copy."""
    system, remote = file_system(url)
    remote = remote.rstrip("/")
    near = folder / (os.path.basename(remote) or "input")
    if system.isdir(remote):
        near.mkdir()
        for each in system.ls(remote, detail=False):
            if each.endswith(suffixes):
                system.get_file(each, os.fspath(near / os.path.basename(each)))
        return near
    system.get_file(remote, os.fspath(near))
    if near.name.endswith(INDEX_SUFFIX):
        for name in set(read_index(near).values()):
            system.get_file(f"{remote.rpartition('/')[0]}/{name}", os.fspath(folder / name))
    return near


# ---- outputs ----


def check_names_safetensors(output: PathLike) -> None:
    """Raises ValueError if an output that will be written as safetensors has the suffix of another format."""
    text = file_of(output)
    stem, suffix = os.path.splitext(text)
    if format_of_name(text) not in (None, "safetensors"):
        raise ValueError(
            f"the output is {text!r}, but what is written is safetensors, which readers of {suffix} files refuse; "
            f"wanted a name like {stem + SUFFIX!r}"
        )


def names_directory(output: PathLike) -> bool:
    """Returns whether an output is a directory: its name ends in a slash, or it is an existing directory on this
    machine."""
    text = path_text(output)
    return text.endswith("/") or (not is_url(text) and os.path.isdir(text))


def output_of(inputs: PathLike | Iterable[PathLike], output: PathLike) -> str:
    """Returns the path or URL of an output as a string. If the only input is a directory, and the output does not have
    the suffix of a format, a slash is added to it, because the output is then a directory, too."""
    text = path_text(output)
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if names_directory(text) or format_of_name(text) or not isinstance(given, (list, tuple)) or len(given) != 1:
        return text
    source = path_text(given[0])
    if is_url(source):
        system, remote = file_system(source)
        is_directory = bool(system.isdir(remote))
    else:
        is_directory = os.path.isdir(source)
    return f"{text}/" if is_directory else text


def target_of(output: PathLike, name: str = WEIGHTS) -> Path:
    """Returns the path on this machine of the file that an output stands for. name: the file's name if the output is a
    directory."""
    text = path_text(output)
    return Path(text) / name if names_directory(text) else Path(text)


def is_there(output: PathLike, name: str = WEIGHTS) -> bool:
    """Returns whether an output exists already: the file, or the index of the set. name: the file's name if the
    output is a directory."""
    text = file_of(output, name)
    folder, slash, file = text.rpartition("/")
    texts = [text, f"{folder}{slash}{index_of(Path(file)).name}"]
    if not is_url(text):
        return any(map(os.path.lexists, texts))
    system, _ = file_system(text)
    return any(map(system.exists, texts))


def file_of(output: PathLike, name: str = WEIGHTS) -> str:
    """Returns the path or URL of the file that an output stands for. name: the file's name if the output is a
    directory."""
    text = path_text(output)
    if is_url(text):
        return f"{text}{name}" if names_directory(text) else text
    return os.fspath(target_of(text, name))


def check_other_sets(folder: Path, own: Iterable[Path]) -> None:
    """Raises FileExistsError if a directory has the index of another set of files, because readers of the directory
    would find that set and not the output. own: indices that the output will replace or remove."""
    others = sorted(set(folder.glob(f"*{SUFFIX}{INDEX_SUFFIX}")).difference(own))
    if others:
        raise FileExistsError(
            f"{folder} has {others[0].name}, by which readers of the directory would go on finding another set; "
            "wanted another directory, or that set removed"
        )


def check_other_files(path: Path) -> None:
    """Raises FileExistsError if the directory of a file that will be written has other weights, which readers of the
    directory would also find: another set of files, or the other form of the same file (coded if it is plain, plain if
    it is coded)."""
    check_other_sets(path.parent, [index_of(path)])
    (other,) = {coded_name(path.name), plain_name(path.name)} - {path.name}
    if os.path.lexists(path.with_name(other)):
        raise FileExistsError(
            f"{path.parent} has {other}, which readers of the directory would find beside {path.name}; wanted another "
            "directory, or that file removed"
        )


@contextlib.contextmanager
def _made_directory(output: str, folder: Path) -> Iterator[None]:
    """Makes the directory of an output, if the output is a directory that does not exist. If an exception leaves the
    context, the new directory is removed again, unless it has files.

    Raises:
        OSError: the directory of a file, or the parent of a directory, does not exist.
    """
    is_new = names_directory(output) and not os.path.lexists(folder)
    home = folder.parent if is_new else folder
    if not home.is_dir():
        if os.path.lexists(home):
            raise NotADirectoryError(errno.ENOTDIR, "is no directory", os.fspath(home))
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", os.fspath(home))
    if is_new:
        folder.mkdir(exist_ok=True)  # Another rank may have made it.
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # It is not empty, or another rank has removed it.
                folder.rmdir()
        raise


@contextlib.contextmanager
def written_to(output: PathLike, name: str = WEIGHTS) -> Iterator[Path]:
    """Yields the path on this machine to which the caller writes an output. name: the file's name if the output is a
    directory.

    For a URL, that path is in a temporary directory. After the context the files are copied from there to the URL, the
    index last, and files of an earlier output that the new one does not have are removed from the URL.
    """
    text = path_text(output)
    if not is_url(text):
        target = target_of(text, name)
        with _made_directory(text, target.parent):
            yield target
        return
    system, remote = file_system(text)
    folder, slash, file_name = remote.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="ibp-") as made:
        near, away = Path(made), f"{folder}{slash}"
        target = near / (file_name or name)
        index = index_of(target)
        if system.exists(away + index.name):
            system.get_file(away + index.name, os.fspath(index))
        earlier = [file.name for file in (index, target, *shards_of_index(target))]
        yield target
        files = [file.name for file in sorted(near.iterdir()) if not file.name.startswith(".")]
        for file in sorted(files, key=lambda file: file.endswith(INDEX_SUFFIX)):
            system.put_file(os.fspath(near / file), away + file)
        for file in earlier:
            if file not in files and system.exists(away + file):
                system.rm_file(away + file)


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Writes the index of a set.

    Args:
        path: the path that the set is named after.
        weight_map: a mapping from the name of each tensor to the name of its file.
        total_bytes: size in bytes of all tensors.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    write_whole(index_of(path), json.dumps(index, ensure_ascii=False, indent=2).encode())


def outputs_of(path: Path, count: int) -> list[str]:
    """Returns the names of all files of an output: `count` files of tensors and, if they are a set, its index last.
    Raises OSError if something that must not be replaced, such as a device, has one of the names."""
    names = [*names_of_set(path, count), *([index_of(path).name] if count > 1 else [])]
    for name in names:
        check_replaceable(path.with_name(name))
    return names


@contextlib.contextmanager
def replacing(path: Path, names: Collection[str]) -> Iterator[None]:
    """When the context ends without an exception, removes what remains of the earlier output of `path`: a file, or the
    index of a set and the files that it names. If the earlier files remained, readers of the directory would find the
    old tensors. names: the files of the new output, which stay."""
    earlier = [index_of(path), path, *shards_of_index(path)]
    yield
    for file in earlier:  # The index goes first: a set without an index is not read as a set.
        if file.name not in names:
            file.unlink(missing_ok=True)


def shards_of_index(path: Path) -> list[Path]:
    """Returns the files that the index of `path` names. Files whose names do not belong to its set are left out."""
    with contextlib.suppress(OSError, FileFormatError):  # A damaged index is ignored, because nobody can read its set.
        names = dict.fromkeys(read_index(index_of(path)).values())
        return [path.with_name(name) for name in names if is_of_set(path.with_name(name), path)]
    return []


def is_of_set(file: Path, path: Path) -> bool:
    """Returns whether a file is named like a file of the set that is named after `path`."""
    stem, suffix = map(re.escape, _split_name(path))
    return file.parent == path.parent and re.fullmatch(rf"{stem}-\d{{5,}}-of-\d{{5,}}{suffix}", file.name) is not None
