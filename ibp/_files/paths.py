"""Paths and URLs: what fsspec reads and writes goes by way of files of this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

from .header import read_index
from .sets import INDEX_SUFFIX, SUFFIX

PathLike = Union[str, "os.PathLike[str]"]
_HERE = ("file", "local")  # protocols of fsspec for files of this machine


def path_text(path: PathLike) -> str:
    """A path or URL as text; of a URL of a file of this machine the path. TypeError for what is neither."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"path is a {type(text).__name__}; wanted text or a path")
    protocol, is_split, rest = text.partition("://")
    return rest if is_split and protocol in _HERE else text


def is_url(path: str) -> bool:
    """Whether a path is for fsspec to read: it has a protocol, and not that of local files."""
    return "://" in path and path.partition("://")[0] not in _HERE


def file_system(url: str) -> tuple[Any, str]:
    """(file system of fsspec, path in it) of a URL."""
    import fsspec

    return fsspec.core.url_to_fs(url)


def target_of(output: PathLike) -> Path:
    """The file of this machine that an output names: of a directory, "model.safetensors" in it."""
    text = path_text(output)
    return Path(text) / f"model{SUFFIX}" if text.endswith(os.sep) or os.path.isdir(text) else Path(text)


def file_of(output: PathLike) -> str:
    """The file that an output names, here or at a URL."""
    text = path_text(output)
    return text if is_url(text) else os.fspath(target_of(text))


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
    """Where to write an output: for a URL in a temporary directory, from which the files go there afterwards, the index
    last."""
    text = path_text(output)
    if not is_url(text):
        yield target_of(text)
        return
    system, remote = file_system(text)
    folder, _, name = remote.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="ibp-") as near:
        yield Path(near) / (name or f"model{SUFFIX}")
        files = [file for file in sorted(Path(near).iterdir()) if not file.name.startswith(".")]
        for file in sorted(files, key=lambda file: file.name.endswith(INDEX_SUFFIX)):
            system.put_file(os.fspath(file), f"{folder}/{file.name}" if folder else file.name)
