"""Plans to which file of the output each tensor of a checkpoint goes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _core
from .._common.sequences import cut
from .._files import SUFFIX, checksum_bytes, codebook_bytes, header_room, names_of_set, rounded_up
from .._schemes import AnyCodebook, with_clusters
from ._source import Source, SourceTensor

SHARD_BYTES = 5 << 30  # bytes of tensors before coding in a file, at most, unless the caller says otherwise
_FILES_OF_THEIR_OWN = ("safetensors", "torch")  # formats of checkpoints whose files stay files of their own


@dataclass(frozen=True)
class Shard:
    """A file of the output."""

    file: str  # the file's path within the directory of the output
    tensors: tuple[SourceTensor, ...]  # the tensors of the file, in order
    metadata: Mapping[str, str]  # the metadata of the file

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header_bytes(self, codebooks: Iterable[AnyCodebook]) -> int:
        """Returns the bytes of the file's header, if its tensors have these codebooks."""
        names = [tensor.name for tensor in self.tensors]
        room = header_room(names, self.metadata, len({one for book in codebooks for one in with_clusters(book)}))
        return rounded_up(room + sum(64 * len(tensor.shape) for tensor in self.tensors))


def shards_of(source: Source, target: Path, shard_bytes: int | None, metadata: Mapping[str, str]) -> list[Shard]:
    """Returns the files that a checkpoint becomes. Files of a set stay files of their own. A file that is larger
    than shard_bytes is cut between tensors. target: the path, within the directory of the output, after which the
    files are named."""
    contents: list[tuple[list[SourceTensor], Mapping[str, str]]] = []
    for tensors, texts in _files_of(source):
        contents += [(part, texts) for part in cut(tensors, lambda tensor: tensor.num_bytes, shard_bytes)]
    names = names_of_set(target, len(contents))
    files = [os.fspath(target.with_name(name)) for name in names]
    return [Shard(file, tuple(tensors), {**texts, **metadata}) for file, (tensors, texts) in zip(files, contents)]


def compressed_bytes(source: Source, stored: Mapping[str, int], codebooks: Mapping[str, AnyCodebook | None]) -> int:
    """Returns the bytes of the files that a checkpoint becomes, with headers, codebooks and checksums. stored: bytes
    of each tensor in its file, by name. codebooks: the codebook of each tensor, or None if it is kept as it is."""
    total = 0
    for shard in shards_of(source, Path(f"model{SUFFIX}"), SHARD_BYTES, {}):
        books = {book for tensor in shard.tensors if (book := codebooks[tensor.name]) is not None}
        data = sum(rounded_up(stored[tensor.name]) for tensor in shard.tensors)
        data += sum(rounded_up(part) for part in codebook_bytes(books))
        total += shard.header_bytes(books) + data + checksum_bytes(data)
    return total


def table_bytes(stored_bytes: int, num_rows: int) -> int:
    """Returns the bytes that a packed table takes in a file: its rows, lengths and bases each begin at a multiple of
    the alignment. stored_bytes: bytes of all three, without the gaps between them."""
    lengths, bases = 2 * num_rows, 8 * -(-num_rows // _core.ROWS_PER_BASE)
    return sum(map(rounded_up, (stored_bytes - lengths - bases, lengths, bases)))


def plan_of(shards: list[Shard], inputs: list[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a set of files is made of and how, in the form for JSON."""
    return {
        "format": _core.FORMAT_VERSION,
        "release": _core.version(),
        "inputs": inputs,
        "options": dict(options),
        "shards": {shard.file: [[tensor.name, tensor.num_bytes] for tensor in shard.tensors] for shard in shards},
    }


def state_of(paths: Iterable[str]) -> list[list[Any]]:
    """Returns what shows whether files have changed: path, size, time of the last change."""
    found = [(os.path.abspath(path), os.stat(path)) for path in paths]
    return [[path, state.st_size, state.st_mtime_ns] for path, state in found]


def _files_of(source: Source) -> list[tuple[list[SourceTensor], Mapping[str, str]]]:
    if len(source.parts) > 1 and all(part.format in _FILES_OF_THEIR_OWN for part in source.parts):
        return [(part.stored(), {**part.metadata, **part.view_texts()}) for part in source.parts]
    return [(source.stored(), {**source.metadata, **source.view_texts()})]
