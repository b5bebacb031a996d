"""Sets of files: their names, and the index that says which file each tensor is in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .._common.whole_files import write_whole

INDEX_SUFFIX = ".index.json"


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
