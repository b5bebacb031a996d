"""`ibp.save`: writes tables and tensors from memory to a file or a set of files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.arguments import whole_number
from .._common.progress import tqdm
from .._common.sequences import cut
from .._layout.geometry import KEPT_DTYPES, check_tensor, given_tensor
from .._rows.protocols import CachedRows
from .._schemes import AnyCodebook, with_clusters
from .._tables.compressed_tensor import CompressedTensor
from ..codecs._whole import WholeTensor
from ..deltas import CheckpointDelta, Delta
from ..deltas._fingerprint import fingerprint
from .opened import Value
from .paths import PathLike, check_names_safetensors, check_other_files, names_directory, written_to
from .sets import outputs_of, replacing, write_index
from .writer import FileWriter, checked_metadata, header_room, write_plain, write_table, write_whole_tensor


def save(
    path: PathLike,
    tensors: Mapping[str, Value | np.ndarray] | Value | np.ndarray,
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int | None = None,
    content: bool = False,
    progress: bool = False,
) -> None:
    """Writes tables and tensors to a file. `ibp.load` and `ibp.open` read it, and readers of safetensors list its
    contents.

    The file appears under its name only when it is whole and on disk. Only then does it replace an earlier file or set
    of that name; it keeps the earlier permissions. Bytes on a GPU are copied from it block by block.

    Example:
        >>> table = ibp.compress(torch.randn(1000, 1024).bfloat16())
        >>> ibp.save("model.safetensors", {"weight": table, "bias": torch.ones(1000)}, metadata={"step": "500"})
        >>> ibp.open("model.safetensors").metadata
        {'step': '500'}

    Args:
        path: path of the file; a directory, for "model.safetensors" in it; or a URL that fsspec knows ("s3://...",
            "memory://..."). A directory is made if its name ends in a slash and it does not exist.
        tensors: tables (`ibp.compress`), tensors, arrays of numpy and deltas (`ibp.deltas.make`) by name; a single one
            without a name gets the name "tensor". Tensors are kept as they are, and may have any dtype that safetensors
            has. Arrays are stored as tensors. For an `ibp.deltas.CheckpointDelta` the file also keeps the names of
            tensors that no longer exist (`File.removed`).
        metadata: texts by keys, kept in the file; no key begins with "ibp.".
        shard_bytes: the largest number of bytes of data in a file, unless one table is larger. Larger data become a set
            of files, `<stem>-00001-of-00003.safetensors` and so on, with the index `<stem>.safetensors.index.json`.
            None: one file.
        content: whether to keep the fingerprint of each table's tensor, too, for which tables are decoded once.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: a name, a tensor, metadata or shard_bytes is not one that a file can have, or path ends
            like files of another format (.pt, .npz, .gguf).
        OSError: the file cannot be written; no new file exists then. The message names the file, and if the disk is
            full it says how many bytes are needed.
    """
    if isinstance(tensors, (str, os.PathLike)):
        raise TypeError(f"tensors is the path {os.fspath(tensors)!r}; wanted ibp.save(path, tensors), the path first")
    items = _checked(tensors)
    removed = tensors.removed if isinstance(tensors, CheckpointDelta) else ()
    checked_metadata(metadata)
    check_names_safetensors(path)
    most = None if shard_bytes is None else whole_number("shard_bytes", shard_bytes, 1)
    with written_to(path) as target:
        if names_directory(path):
            check_other_files(target)
        shards = [dict(shard) for shard in cut(items.items(), lambda item: _stored(item[1]), most)]
        total = sum(map(_stored, items.values()))
        with tqdm(total=total, desc="save", unit="B", unit_scale=True, disable=not progress) as bar:
            _write_files(target, shards, removed, metadata, content, bar.update)


def _checked(tensors: Mapping[str, Value | np.ndarray] | Value | np.ndarray) -> dict[str, Value]:
    items: dict[str, Value] = {}
    for name, given in (tensors if isinstance(tensors, Mapping) else {"tensor": tensors}).items():
        if not isinstance(name, str):
            raise TypeError(f"tensors has the key {name!r}; wanted names as text")
        value: Any = given_tensor(given, repr(name))
        if isinstance(value, CachedRows):
            value.flush()
            value = value.view
        items[name] = value
        if not isinstance(value, (CompressedTensor, WholeTensor, torch.Tensor, Delta)):
            got = type(value).__name__
            raise TypeError(
                f"{name!r} is a {got}; wanted a table (ibp.compress), a torch.Tensor, an array of numpy or a delta "
                "(ibp.deltas.make)"
            )
        if isinstance(value, torch.Tensor):
            check_tensor(value, repr(name), KEPT_DTYPES)
    return items


# ---- one file ----


@contextlib.contextmanager
def _writer(
    path: Path,
    items: Mapping[str, Value],
    removed: Sequence[str],
    metadata: Mapping[str, str] | None,
    on_write: Callable[[int], object],
) -> Iterator[FileWriter]:
    """Yields a writer of a file whose header has room for these items."""
    codebooks = {one for value in items.values() for one in _codebooks_of(value)}
    dimensions = sum(len(value.shape) for value in items.values())
    room = header_room([*items, *removed], metadata, len(codebooks)) + 32 * dimensions
    total = sum(map(_stored, items.values()))
    with FileWriter(path, metadata=metadata, header_bytes=room, data_bytes=total, on_write=on_write) as writer:
        for name in removed:
            writer.removed(name)
        yield writer


def _codebooks_of(value: Value) -> list[AnyCodebook]:
    table = value.table if isinstance(value, Delta) else value
    return with_clusters(table.codebook if isinstance(table, CompressedTensor) else None)


def _write(writer: FileWriter, items: Mapping[str, Value], content: bool) -> None:
    for name, value in items.items():
        if isinstance(value, torch.Tensor):
            write_plain(writer, name, value)
        elif isinstance(value, Delta):
            write_table(writer, name, value.table, base=value.base, result=value.result)
        elif isinstance(value, WholeTensor):
            write_whole_tensor(writer, name, value, fingerprint(value) if content else None)
        else:
            write_table(writer, name, value, content=fingerprint(value) if content else None)


def _stored(value: Value) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    table = value.table if isinstance(value, Delta) else value
    return sum(tensor.nbytes for tensor in table._tensors().values())


# ---- all files ----


def _write_files(
    path: Path,
    shards: list[dict[str, Value]],
    removed: Sequence[str],
    metadata: Mapping[str, str] | None,
    content: bool,
    on_write: Callable[[int], object],
) -> None:
    """Writes a file for each shard, and names them when all are whole. If there are several, the index is named
    last."""
    weight_map: dict[str, str] = {}
    total = 0
    names = outputs_of(path, len(shards))
    with replacing(path, names):
        with contextlib.ExitStack() as stack:
            for name, items in zip(names, shards):
                gone = () if weight_map else removed  # only the first file says it
                writer = stack.enter_context(_writer(path.with_name(name), items, gone, metadata, on_write))
                _write(writer, items, content)
                writer.finish()
                weight_map.update(dict.fromkeys(writer.names, name))
                total += writer.data_bytes
        if len(shards) > 1:
            write_index(path, weight_map, total)
