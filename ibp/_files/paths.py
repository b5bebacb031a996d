"""Paths and URLs of inputs and outputs. What fsspec reads and writes goes by way of files of this machine.

One policy holds for the outputs of `ibp.save`, `ibp.checkpoints` and the command line:

- A name that ends in a slash, or is one of a directory, names a directory, which gets "model.safetensors". It is made if
  it is not there; the directory that it lies in is there already.
- What a file holds agrees with the suffix of its name: safetensors are not written under a name like "model.pt".
- `ibp.save` replaces what is at its path, as torch.save does. `ibp.checkpoints` and the command line do with `force`.
- What an output replaces goes as a whole: a set of files with its index, where a file takes its place, and vice versa.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Union

from .sets import INDEX_SUFFIX, SUFFIX, index_of, read_index, shards_of_index

PathLike = Union[str, "os.PathLike[str]"]
SUFFIXES = {SUFFIX: "safetensors", ".ibp": "safetensors", ".npy": "npy", ".npz": "npz"}  # of files, by their suffixes
SUFFIXES.update(dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"))
SUFFIXES.update({suffix: suffix[1:] for suffix in (  # of others, which are not written
    ".csv", ".gguf", ".ggml", ".h5", ".hdf5", ".json", ".msgpack", ".onnx", ".onnx_data", ".ot", ".parquet", ".pb",
    ".pdparams", ".pickle", ".pkl", ".tflite", ".txt", ".yaml", ".zip",
)})  # fmt: skip
_HERE = ("file", "local")  # protocols of fsspec for files of this machine


def path_text(path: PathLike) -> str:
    """A path or URL as text; of a URL of a file of this machine the path. TypeError for what is neither."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path is {text!r}; wanted text or a path")
    protocol, is_split, rest = text.partition("://")
    return rest if is_split and protocol in _HERE else text


def is_url(path: str) -> bool:
    """Whether a path is for fsspec to read: it has a protocol, and not that of local files."""
    return "://" in path and path.partition("://")[0] not in _HERE


def file_system(url: str) -> tuple[Any, str]:
    """(file system of fsspec, path in it) of a URL."""
    import fsspec

    return fsspec.core.url_to_fs(url)


def format_of_name(path: PathLike) -> str | None:
    """The format that the suffix of a name says, or None."""
    return SUFFIXES.get(os.path.splitext(path_text(path))[1].lower())


def check_names_safetensors(path: PathLike) -> None:
    """ValueError if an output, which is written as safetensors, has a name that readers take for another format."""
    text = file_of(path)
    stem, suffix = os.path.splitext(text)
    if format_of_name(text) not in (None, "safetensors"):
        raise ValueError(
            f"the output is {text!r}, but what is written is safetensors, which readers of {suffix} files refuse; "
            f"wanted a name like {stem + SUFFIX!r}"
        )


def names_directory(output: PathLike) -> bool:
    """Whether an output is a directory, here or at a URL."""
    text = path_text(output)
    return text.endswith("/") or (not is_url(text) and os.path.isdir(text))


def output_of(inputs: PathLike | Iterable[PathLike], output: PathLike) -> str:
    """An output as text, with a slash where a directory is the only input and the output has no suffix of a format: a
    directory becomes a directory."""
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


def target_of(output: PathLike) -> Path:
    """The file of this machine that an output names: of a directory, "model.safetensors" in it."""
    text = path_text(output)
    return Path(text) / f"model{SUFFIX}" if names_directory(text) else Path(text)


def is_there(output: PathLike) -> bool:
    """Whether there is an output already: the file, or the index of the set."""
    text = path_text(output)
    if not is_url(text):
        return any(map(os.path.lexists, (target_of(text), index_of(target_of(text)))))
    system, remote = file_system(text)
    folder, _, name = remote.rpartition("/")
    return any(system.exists(f"{folder}/{one}") for one in (name, index_of(Path(name or f"model{SUFFIX}")).name) if one)


def file_of(output: PathLike) -> str:
    """The file that an output names, here or at a URL."""
    text = path_text(output)
    return text if is_url(text) else os.fspath(target_of(text))


@contextlib.contextmanager
def _directory_of(output: str) -> Iterator[Path]:
    """The file that an output names. The directory is made that the output itself is, and removed again if nothing is
    written. OSError: the directory that it lies in is not there, or readers of it would go on finding another set."""
    target = target_of(output)
    folder = target.parent
    is_new = names_directory(output) and not os.path.lexists(folder)
    home = folder.parent if is_new else folder
    if not home.is_dir():
        number = errno.ENOTDIR if os.path.lexists(home) else errno.ENOENT
        raise OSError(number, "is no directory" if number == errno.ENOTDIR else "there is no such directory", str(home))
    if names_directory(output):
        others = set(folder.glob(f"*{SUFFIX}{INDEX_SUFFIX}")).difference([index_of(target)])
        if others:
            raise FileExistsError(
                f"{folder} has {min(others).name}, by which readers of the directory would go on finding another set; "
                "wanted another directory, or that set removed"
            )
    if is_new:
        folder.mkdir(exist_ok=True)  # another rank may have made it
    try:
        yield target
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty, or another rank has removed it
                folder.rmdir()
        raise


@contextlib.contextmanager
def read_here(url: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """What to open on this machine: a path itself; in place of a URL a copy of a file, of a set of files or of a
    directory, for as long as the context lasts. suffixes: of the files of a directory that are copied.
    FileNotFoundError: there is no such file. OSError: the file system has failed."""
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
        except Exception as error:  # of the file system's own kinds
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
def written_to(output: PathLike) -> Iterator[Path]:
    """Where to write an output. For a URL it is in a temporary directory, from which the files go there afterwards, the
    index last; what `replacing` removes here goes there, too."""
    text = path_text(output)
    if not is_url(text):
        with _directory_of(text) as target:
            yield target
        return
    system, remote = file_system(text)
    folder, slash, name = remote.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="ibp-") as made:
        near, away = Path(made), f"{folder}{slash}"
        target = near / (name or f"model{SUFFIX}")
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
