"""Names of files of tensors: of the files of a set, whose index says which file each tensor is in, and of coded files.

In a directory a coded file has a name of its own, so that a loader that does not know ibp finds no weights there,
rather than weights that it cannot read. The name says which file the coded one was made of:

    model.safetensors    model.ibp.safetensors
    optimizer.pt         optimizer.pt.ibp.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .writer import write_whole

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_CODED_SUFFIX = f".ibp{SUFFIX}"
_OTHER_SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt", ".ibp")
TENSOR_SUFFIXES = (SUFFIX, *_OTHER_SUFFIXES)


def coded_name(name: str) -> str:
    """The name of the coded form of a file of tensors; a coded file's own."""
    if name.endswith(_CODED_SUFFIX):
        return name
    stem = name.removesuffix(SUFFIX)
    return f"{name if stem.endswith(TENSOR_SUFFIXES) else stem}{_CODED_SUFFIX}"


def plain_name(name: str) -> str:
    """The name of the file that a coded one was made of; any other file's own."""
    if not name.endswith(_CODED_SUFFIX):
        return name
    stem = name.removesuffix(_CODED_SUFFIX)
    return stem if stem.endswith(TENSOR_SUFFIXES) else stem + SUFFIX


def is_of_weights(name: str) -> bool:
    """Whether a file, or an index, is one of safetensors, or the coded form of one."""
    return plain_name(name.removesuffix(INDEX_SUFFIX)).endswith(SUFFIX)


def names_of_set(path: Path, count: int) -> list[str]:
    """Names of the files of a set whose index belongs to `path`; of one file, its own."""
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{number:05d}-of-{count:05d}{path.suffix}" for number in range(1, count + 1)]


def index_of(path: Path) -> Path:
    return path.with_name(path.name + INDEX_SUFFIX)


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Writes the index of a set.

    Args:
        path: that the set is named after.
        weight_map: name of the file of each tensor.
        total_bytes: of the tensors.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    write_whole(index_of(path), json.dumps(index, ensure_ascii=False, indent=2).encode())
