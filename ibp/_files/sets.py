"""Names of files of tensors: of the files of a set, whose index says which file each tensor is in, and of coded files.
Also removes the files that a new output replaces.

In a directory a coded file has a name of its own, so that a loader that does not know ibp finds no weights there
instead of weights that it cannot read. The name says which file the coded file was made from:

    model.safetensors    model.ibp.safetensors
    optimizer.pt         optimizer.pt.ibp.safetensors
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._common.whole_files import check_replaceable, write_whole
from .fields import FileFormatError
from .regular import open_regular
from .writer import MAX_HEADER_BYTES

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_CODED_SUFFIX = f".ibp{SUFFIX}"
_OTHER_SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt", ".ibp")
TENSOR_SUFFIXES = (SUFFIX, *_OTHER_SUFFIXES)


def coded_name(name: str) -> str:
    """Returns the name of the coded form of a file of tensors; for a coded file, its own name. Frameworks that do not
    know ibp look for no such name.

    Example:
        >>> ibp.checkpoints.coded_name("model.safetensors"), ibp.checkpoints.coded_name("optimizer.pt")
        ('model.ibp.safetensors', 'optimizer.pt.ibp.safetensors')
    """
    if name.endswith(_CODED_SUFFIX):
        return name
    stem = name.removesuffix(SUFFIX)
    return f"{name if stem.endswith(TENSOR_SUFFIXES) else stem}{_CODED_SUFFIX}"


def plain_name(name: str) -> str:
    """Returns the name of the file that a coded file was made from; for any other file, its own name."""
    if not name.endswith(_CODED_SUFFIX):
        return name
    stem = name.removesuffix(_CODED_SUFFIX)
    return stem if stem.endswith(TENSOR_SUFFIXES) else stem + SUFFIX


def is_of_weights(name: str) -> bool:
    """Returns whether a file, or an index, is one of safetensors, or the coded form of one."""
    return plain_name(name.removesuffix(INDEX_SUFFIX)).endswith(SUFFIX)


def names_of_set(path: Path, count: int) -> list[str]:
    """Returns the names of the files of a set whose index belongs to `path`; for one file, its own name."""
    if count == 1:
        return [path.name]
    stem, suffix = _split(path)
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_of(path: Path) -> Path:
    """Returns the path of the index of the set that is named after `path`."""
    return path.with_name("".join((*_split(path), INDEX_SUFFIX)))


def _split(path: Path) -> tuple[str, str]:
    """Returns the beginning and the end of the names of a set's files. The end of a name like "llama-3.1" is not a
    suffix: its files are "llama-3.1-00001-of-00002.safetensors" and so on, which readers of a directory find."""
    return (path.stem, path.suffix) if path.suffix in TENSOR_SUFFIXES else (path.name, SUFFIX)


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Writes the index of a set.

    Args:
        path: the path that the set is named after.
        weight_map: the name of each tensor's file.
        total_bytes: bytes of the tensors.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    write_whole(index_of(path), json.dumps(index, ensure_ascii=False, indent=2).encode())


def read_index(path: Path) -> dict[str, str]:
    """Returns the name of each tensor's file.

    Raises:
        FileFormatError: the file is not an index.
        OSError: it cannot be read.
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
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    for key in found:
        key.encode()  # raises for half of a surrogate pair, which cannot be printed
    return found


# ---- what an output replaces ----


def outputs_of(path: Path, count: int) -> list[str]:
    """Returns the names of all files of an output; the index of a set is the last. Raises OSError if something that
    must not be replaced, such as a device, has one of the names."""
    names = [*names_of_set(path, count), *([index_of(path).name] if count > 1 else [])]
    for name in names:
        check_replaceable(path.with_name(name))
    return names


@contextlib.contextmanager
def replacing(path: Path, names: Collection[str]) -> Iterator[None]:
    """Removes, when the context is left normally, what is left of the earlier output of `path`: a file, or the index
    of a set and the files that it names. Otherwise readers of the directory would find the old tensors. names: the
    files of the new output, which stay."""
    earlier = [index_of(path), path, *shards_of_index(path)]
    yield
    for file in earlier:  # the index goes first: a set without an index is not read as a set
        if file.name not in names:
            file.unlink(missing_ok=True)


def shards_of_index(path: Path) -> list[Path]:
    """Returns the files that the index of `path` names, if their names are those of its set."""
    stem, suffix = map(re.escape, _split(path))
    own = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}{suffix}")
    with contextlib.suppress(OSError, FileFormatError):  # a damaged index is ignored, because nobody can read its set
        names = dict.fromkeys(read_index(index_of(path)).values())
        return [path.with_name(name) for name in names if own.fullmatch(name)]
    return []
