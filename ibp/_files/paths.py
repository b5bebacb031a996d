"""Paths and URLs of inputs and outputs. Files that fsspec reads and writes pass through files of this machine.

One policy holds for the outputs of `ibp.save`, `ibp.checkpoints` and the command line:

- A name that ends in a slash, or that is the name of a directory, names a directory. If the input is a directory, so
  does any name without the suffix of a format. The directory is made if it does not exist; its parent must exist.
- The content of a file agrees with the suffix of its name: safetensors are not written under a name like "model.pt".
- `ibp.save` replaces what is at its path, as torch.save does; `ibp.checkpoints` and the command line do so with
  `force`.
- An output is replaced as a whole: if a file takes the place of a set of files, the set and its index go, and vice
  versa.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Union

from .sets import INDEX_SUFFIX, SUFFIX, coded_name, index_of, plain_name, read_index, shards_of_index

PathLike = Union[str, "os.PathLike[str]"]
# the formats of files, by their suffixes
SUFFIXES = {SUFFIX: "safetensors", ".ibp": "safetensors", ".npy": "npy", ".npz": "npz"}
SUFFIXES.update(dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"))
SUFFIXES.update({suffix: suffix[1:] for suffix in (  # suffixes of other formats, which are not written
    ".csv", ".gguf", ".ggml", ".h5", ".hdf5", ".json", ".msgpack", ".onnx", ".onnx_data", ".ot", ".parquet", ".pb",
    ".pdparams", ".pickle", ".pkl", ".tflite", ".txt", ".yaml", ".zip",
)})  # fmt: skip
WEIGHTS = f"model{SUFFIX}"  # the file that a directory of a model has
_HERE = ("file", "local")  # protocols of fsspec for files of this machine


def path_text(path: PathLike) -> str:
    """Returns a path or URL as text; for a URL of a file of this machine, the path. Raises TypeError for anything
    else."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"path is a {type(text).__name__}; wanted text or a path")
    protocol, is_split, rest = text.partition("://")
    return rest if is_split and protocol in _HERE else text


def is_url(path: str) -> bool:
    """Returns whether fsspec has to read a path: it has a protocol other than that of local files."""
    return "://" in path and path.partition("://")[0] not in _HERE


def file_system(url: str) -> tuple[Any, str]:
    """Returns (file system of fsspec, path in it) for a URL."""
    import fsspec

    return fsspec.core.url_to_fs(url)


def format_of_name(path: PathLike) -> str | None:
    """Returns the format that the suffix of a name stands for, or None."""
    return SUFFIXES.get(os.path.splitext(path_text(path))[1].lower())


def check_names_safetensors(output: PathLike) -> None:
    """Raises ValueError if an output, which is written as safetensors, has a name that readers take for another
    format."""
    text = file_of(output)
    stem, suffix = os.path.splitext(text)
    if format_of_name(text) not in (None, "safetensors"):
        raise ValueError(
            f"the output is {text!r}, but what is written is safetensors, which readers of {suffix} files refuse; "
            f"wanted a name like {stem + SUFFIX!r}"
        )


def names_directory(output: PathLike) -> bool:
    """Returns whether an output is a directory, here or at a URL."""
    text = path_text(output)
    return text.endswith("/") or (not is_url(text) and os.path.isdir(text))


def output_of(inputs: PathLike | Iterable[PathLike], output: PathLike) -> str:
    """Returns an output as text. If the only input is a directory, and the output has no suffix of a format, a slash
    is added, because a directory becomes a directory."""
    text = path_text(output)
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if names_directory(text) or format_of_name(text) or not isinstance(given, (list, tuple)) or len(given) != 1:
        return text
    return f"{text}/" if _is_directory(path_text(given[0])) else text


def _is_directory(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(path)
    system, remote = file_system(path)
    return bool(system.isdir(remote))


def target_of(output: PathLike, name: str = WEIGHTS) -> Path:
    """Returns the file of this machine that an output names. In a directory it has the given name."""
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
    """Returns the file that an output names, here or at a URL. In a directory it has the given name."""
    text = path_text(output)
    if is_url(text):
        return f"{text}{name}" if names_directory(text) else text
    return os.fspath(target_of(text, name))


def check_other_sets(folder: Path, own: Iterable[Path]) -> None:
    """Raises FileExistsError if a directory has an index of another set of files, because readers of the directory
    would go on finding that set. own: indices that will be replaced or removed."""
    others = sorted(set(folder.glob(f"*{SUFFIX}{INDEX_SUFFIX}")).difference(own))
    if others:
        raise FileExistsError(
            f"{folder} has {others[0].name}, by which readers of the directory would go on finding another set; "
            "wanted another directory, or that set removed"
        )


def check_other_files(path: Path) -> None:
    """Raises FileExistsError if readers of a directory would find other weights than those of a file that is written
    there: another set, or the other form, plain or coded, of the file."""
    check_other_sets(path.parent, [index_of(path)])
    (other,) = {coded_name(path.name), plain_name(path.name)} - {path.name}
    if os.path.lexists(path.with_name(other)):
        raise FileExistsError(
            f"{path.parent} has {other}, which readers of the directory would find beside {path.name}; wanted another "
            "directory, or that file removed"
        )


@contextlib.contextmanager
def _made_directory(output: str, folder: Path) -> Iterator[None]:
    """Makes the directory of an output, if the output itself names it, and removes it again if nothing is written.

    Raises:
        OSError: there is no such directory, or no directory to make it in.
    """
    is_new = names_directory(output) and not os.path.lexists(folder)
    home = folder.parent if is_new else folder
    if not home.is_dir():
        if os.path.lexists(home):
            raise NotADirectoryError(errno.ENOTDIR, "is no directory", os.fspath(home))
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", os.fspath(home))
    if is_new:
        folder.mkdir(exist_ok=True)  # another rank may have made it
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty, or another rank has removed it
                folder.rmdir()
        raise


@contextlib.contextmanager
def read_here(url: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yields the path to open on this machine: a path itself, or, for a URL, a copy of the file, set of files or
    directory, which exists as long as the context lasts.

    suffixes: of the files of a directory that are copied.

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
        except Exception as error:  # errors of the file system's own kinds
            raise OSError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
        yield os.fspath(near)


def _fetched(url: str, folder: Path, suffixes: tuple[str, ...]) -> Path:
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


@contextlib.contextmanager
def written_to(output: PathLike, name: str = WEIGHTS) -> Iterator[Path]:
    """Yields the path where to write an output. In a directory the file has the given name.

    For a URL the path is in a temporary directory, from which the files are copied to the URL afterwards, the index
    last. Files that `replacing` would remove here are removed there, too.
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
